"""The serving kernel for Hopper: chunks of new tokens attend to a cache in pages.

    grid: one thread block a multiprocessor; each takes tiles, longest first (`ragged.py`)

    producer    for each tile: what each consumer is told, and its 64 rows of q; then k, v of the
                blocks that any of them sees, page by page:
                    page numbers -> wait empty -> a TMA load a piece -> full
    consumer    wait q; for each block of the tile, in step with the producer:
                    s = q·kᵀ -> logits -> (mask) -> softmax -> acc += p·v      (`attend.py`)
                out = acc·factor, lse -> device memory, the rows that there are (`rows.py`)

    a slot of 128 keys, pages of 32     | page 7 | page 2 | page 9 | page 9 |    4 loads, 1 barrier
                                                     keys end here ^

Pieces past the last page of a sequence load that page once more: every slot gets the same number of
loads, which is what its full barrier counts, and entries of the table past a sequence's pages are
never read. What lies past the end of the keys is masked in s, and zeroed in v.

A row of q is a token, and a sequence may begin at any: TMA's tiles of 8 x 64 cannot begin there, so
q is loaded in columns of 64 channels, whose rows lie one after the other. In shared memory these
are the same bytes as tiles of 8 x 64, as which wgmma reads them.

Why nothing waits for ever. k, v: see `attend.py`; the counts before, own and after of a consumer
add up to the tile's blocks by construction (`ragged.py`), whatever the lengths. q: slot w is filled
once a tile by q_chunks + 1 loads, the barrier's count, and released once a tile, by consumer w
alone; the producer waits for that before every fill but the first. Turns: all consumers of a tile
have the same number of turns or none. Producer and consumers count tiles by the same scalars of
device memory.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.block_table import Visits
from pallas_attn.call import Call
from pallas_attn.decode_call import DecodeCall, DecodeInputs, DecodeSpec, DecodeTiles
from pallas_attn.mask_core import Mask, Position
from pallas_attn.mosaic_gpu import (
    attend,
    common,
    device_reason,
    forward_tiles,
    ragged,
    ring,
    rows,
    schedule,
)
from pallas_attn.mosaic_gpu.attend import Kernel, Scratch
from pallas_attn.mosaic_gpu.common import CHUNK, UNIT
from pallas_attn.mosaic_gpu.tables import Extra
from pallas_attn.spec import MAX_HEAD_DIM, Spec
from pallas_attn.tiles import KernelTiles, Tiles

# New tokens of a sequence, on average, from which on rows of 64 tokens are filled well enough.
# Fewer are bound by the reading of keys, for which Triton's kernel splits them.
LEAST_TOKENS = 32
# Rows of a tile in shared memory that cannot be told apart: pieces are whole ones.
_ROWS = 8
# Page numbers read before the wait for a slot; others are read behind the first loads.
_PAGES_AHEAD = 4


def unsupported_reason(spec: DecodeSpec, mask, gpu) -> str | None:
    """Why this kernel cannot take a call, or None when it can."""
    reason = device_reason(spec.dtype, gpu)
    if reason is not None:
        return reason
    tokens = spec.q_len if spec.q_len is not None else spec.tokens // max(1, spec.batch)
    if tokens < LEAST_TOKENS:
        return (
            f"it takes {LEAST_TOKENS} new tokens a sequence or more, on average, and here are "
            f"{tokens}: those run better where the keys are split"
        )
    if spec.shared_kv:
        return "it takes values that have an array of their own"
    if spec.num_splits not in (None, 1):
        return f"it does not split the keys of a sequence, and num_splits is {spec.num_splits}"
    for name, dim in (("head_dim", spec.head_dim), ("v_dim", spec.v_dim)):
        if dim > MAX_HEAD_DIM or dim % 8 or (dim > CHUNK and dim % CHUNK):
            return (
                f"it takes {name} in multiples of 8 up to {CHUNK} and of {CHUNK} up to "
                f"{MAX_HEAD_DIM}, not {dim}"
            )
    if spec.page_size % _ROWS:
        what = "pages" if spec.paged else "a cache"
        return f"it takes {what} of a multiple of {_ROWS} keys, not {spec.page_size}"
    return _mask_reason(mask)


def _mask_reason(mask: Mask) -> str | None:
    index = np.zeros((1, 1), np.int32)
    if mask.row_span(Position(index, index, index, None, 1, 1)) is None:
        return "it takes masks that let each token see one interval of keys"
    if mask.q_valid(index, index) is not None or mask.kv_valid(index, index) is not None:
        return "it takes no mask that calls tokens or keys padding"
    return None


def candidate_tiles(spec: DecodeSpec, gpu) -> list[DecodeTiles]:
    """Schedules worth trying, the default first."""
    del gpu
    wide = max(common.padded(spec.head_dim), common.padded(spec.v_dim))
    return [
        DecodeTiles(t.block_q, t.block_kv, t.num_warps, t.num_stages) for t in forward_tiles(wide)
    ]


def tiles_reason(tiles: DecodeTiles, spec: DecodeSpec, gpu) -> str | None:
    """Why a call cannot run with these tiles, or None when it can."""
    if tiles.block_rows not in (64, 128, 192) or tiles.block_kv not in (64, 128):
        return f"{tiles}: it takes 64, 128 or 192 rows and 64 or 128 keys"
    if tiles.num_warps != tiles.block_rows // 16 or tiles.num_stages < 2:
        return f"{tiles}: it takes a warp for 16 rows, and 2 stages or more"
    q_dim, v_dim = common.padded(spec.head_dim), common.padded(spec.v_dim)
    stream = tiles.num_stages * tiles.block_kv * (q_dim + v_dim)
    needed = 2 * (tiles.block_rows * q_dim + stream) + 2048
    if gpu is not None and needed > gpu.smem_per_block:
        return f"{tiles}: {needed} bytes of shared memory, and {gpu.name} has {gpu.smem_per_block}"
    return None


class Operands(NamedTuple):
    """What the kernel reads: arrays outside, references inside.

    q, k, v, page_table, sinks: as in `DecodeInputs`; units, tiles, total: as in `ragged.Tables`;
    visits, extra: what consumers look for there, see `common.Inputs`.
    """

    q: Any
    k: Any
    v: Any
    page_table: Any
    sinks: Any
    units: Any
    tiles: Any
    total: Any
    visits: Any
    extra: Any


def run(call: DecodeCall, inputs: DecodeInputs):
    """Out and lse; see `decode_call.attend`."""
    reason = tiles_reason(call.tiles, call.spec, None)
    if reason is not None:
        raise ValueError(f"tiles: got {reason}")
    leaves, tree = jax.tree.flatten(inputs)

    # Kernels have no batching rule: what is mapped over runs one after the other.
    @jax.custom_batching.sequential_vmap
    def one(*leaves):
        return _run(call, jax.tree.unflatten(tree, leaves))

    return one(*leaves)


def _run(call: DecodeCall, inputs: DecodeInputs):
    spec, tiles = call.spec, call.tiles
    like = _forward_call(call)
    page = spec.page_size if spec.paged else tiles.block_kv
    piece = int(np.gcd(page, tiles.block_kv))
    plan = ragged.plan(call, like.spec, piece)
    found = ragged.tables(call, plan, inputs)
    operands = Operands(
        inputs.q, inputs.k, inputs.v, inputs.page_table, inputs.sinks,
        found.units, found.tiles, found.total,
        Visits(None, None, None, any_partial=True, any_full=True), Extra(found.detail, None),
    )  # fmt: skip
    out, lse = common.launch(
        functools.partial(_kernel, call=like, plan=plan),
        operands,
        name="pallas_attn_hopper_serve",
        outs=[
            ((spec.tokens, spec.q_heads, spec.v_dim), inputs.q.dtype),
            ((spec.q_heads, spec.tokens), jnp.float32),
        ],
        scratch=_scratch(like, plan, inputs.q.dtype),
        blocks=plan.blocks,
        threads=plan.num_wgs + 1,
    )
    return out, lse.T


def _forward_call(call: DecodeCall) -> Call:
    """The same as a call of the forward kernel, all tokens in one sequence."""
    asked, t = call.spec, call.tiles
    spec = Spec(
        batch=1, q_len=asked.tokens, kv_len=asked.capacity, q_heads=asked.q_heads,
        kv_heads=asked.kv_heads, head_dim=asked.head_dim, v_dim=asked.v_dim, dtype=asked.dtype,
        scale=asked.scale, soft_cap=asked.soft_cap, has_sinks=asked.has_sinks,
    )  # fmt: skip
    one = KernelTiles(t.block_rows, t.block_kv, t.num_warps, t.num_stages)
    return Call(spec, Tiles(one, one, one), call.backend, call.interpret)


def _scratch(call: Call, plan: ragged.Plan, dtype):
    """Slots of q, k, v; their barriers; what consumers are told."""
    spec, tiles, wgs = call.spec, call.tiles.fwd, plan.num_wgs
    q_shape = (wgs, plan.q_chunks, UNIT, CHUNK)
    # One memory seen in two ways: rows one after the other, and tiles of 8 x 64. The interpreter
    # knows no layouts.
    q = common.smem(q_shape, dtype)
    if not call.interpret:
        lines = plgpu.SMEM(q_shape, dtype, transforms=(plgpu.SwizzleTransform(2 * CHUNK),))
        q = plgpu.RefUnion(q, lines)
    dims = {"k": common.padded(spec.head_dim), "v": common.padded(spec.v_dim)}
    slots = {n: common.smem((tiles.num_stages, tiles.block_kv, d), dtype) for n, d in dims.items()}
    pieces = tiles.block_kv // plan.piece
    bars = {n: ring.barriers(tiles.num_stages, wgs, loads=pieces) for n in dims}
    bars["q"] = ring.barriers(wgs, 1, loads=plan.q_chunks + 1)
    told = plgpu.SMEM((2, wgs, ragged.TOLD), jnp.int32)
    return {"q": q, **slots}, bars, told


def _kernel(operands: Operands, outs, data, bars, told, *, call: Call, plan: ragged.Plan):
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    q, lines = (data["q"], data["q"]) if call.interpret else data["q"]
    slots = {name: ring.Slots(x, *bars[name]) for name, x in {**data, "q": q}.items()}
    kernel = Kernel(call, plan, operands, Scratch(**slots, out=None, work=told), wg)
    count = ragged.tiles_of_block(plan, operands.total[0], block)

    @pl.when(wg == plan.num_wgs)
    def _producer():
        plgpu.set_max_registers(plan.registers[1], action="decrease")

        def take(i, done):
            return _load_tile(kernel, lines, schedule.number(plan, i, block), i, done)

        lax.fori_loop(jnp.int32(0), count, take, jnp.int32(0))

    @pl.when(wg < plan.num_wgs)
    def _consumer():
        plgpu.set_max_registers(plan.registers[0], action="increase")
        schedule.start_turns(kernel)
        finish = functools.partial(_finish, outs)

        def take(i, slot):
            # What was told of the tile before was read before TMA may write there again, which it
            # does once q of this tile is released.
            plgpu.commit_smem()
            work = schedule.Work(told, (i & jnp.int32(1), wg), operands.visits)
            return attend.compute_tile(kernel, work, slot, finish)

        lax.fori_loop(jnp.int32(0), count, take, jnp.int32(0))


def _load_tile(kernel: Kernel, lines, number, i, done):
    """Producer: loads one tile; `number` is its place in the order, `done` blocks came before."""
    plan, spec, operands = kernel.plan, kernel.call.spec, kernel.inputs
    heads = jnp.int32(spec.kv_heads)
    place = lax.div(number, heads)
    kv_head = number - place * heads
    seq, first, count, last = (operands.tiles[place, j] for j in range(4))
    dims = {"k": common.padded(spec.head_dim), "v": common.padded(spec.v_dim)}

    def source_of(name, n):
        pool, channels = getattr(operands, name), schedule.channels(dims[name])
        block = first + n
        if operands.page_table is None:
            keys = pl.ds(block * kernel.block_kv, kernel.block_kv)
            return pool.at[seq, keys, kv_head, channels]
        ahead, *rest = _batches(kernel, block)
        ahead = _pages(kernel, seq, ahead, last)

        def pieces():
            for pages in itertools.chain([ahead], (_pages(kernel, seq, b, last) for b in rest)):
                for page, start in pages:
                    yield pool.at[page, pl.ds(start, plan.piece), kv_head, channels]

        return pieces()

    def load_q():
        for w in range(plan.num_wgs):
            pl.when(i > 0)(functools.partial(ring.wait_empty, kernel.smem.q, w))
            _load_q(kernel, lines, number, i, w)

    return attend.feed(kernel, count, done, load_q, source_of)


def _batches(kernel: Kernel, block):
    """The pieces of a block of keys, as many at once as the producer has registers for."""
    pieces = kernel.block_kv // kernel.plan.piece
    first = block * pieces
    return [
        [first + j for j in range(at, min(at + _PAGES_AHEAD, pieces))]
        for at in range(0, pieces, _PAGES_AHEAD)
    ]


def _pages(kernel: Kernel, seq, pieces, last):
    """(page, key in it) of each piece; pieces past the last are the last."""
    plan, operands = kernel.plan, kernel.inputs
    in_page, found = operands.k.shape[1] // plan.piece, []
    for piece in pieces:
        piece = jnp.minimum(piece, last)
        number, start = piece, 0
        if in_page > 1:
            number = lax.div(piece, jnp.int32(in_page))
            start = (piece - number * in_page) * plan.piece
        found.append((operands.page_table[seq, number], start))
    return found


def _load_q(kernel: Kernel, lines, number, i, wg: int) -> None:
    """Producer: loads what a consumer is told of a tile, and its rows of q."""
    operands, slots = kernel.inputs, kernel.smem.q
    # The consumer reads this after it has waited for q. It may still be reading what it was told of
    # the tile before, but not of the one before that.
    told = kernel.smem.work.at[i & jnp.int32(1), wg]
    ring.start(operands.units.at[number, wg], slots, wg, told)
    start = operands.units[number, wg, schedule.FIELDS.index("q_start")]
    head = operands.units[number, wg, schedule.FIELDS.index("head")]
    for chunk in range(kernel.plan.q_chunks):
        # Channels that do not exist are zeros; only the first chunk can be short of some.
        channels = pl.ds(chunk * CHUNK, CHUNK) if chunk else schedule.channels(CHUNK)
        source = operands.q.at[pl.ds(start, UNIT), head, channels]
        ring.start(source, slots, wg, lines.at[wg, chunk])


def _finish(outs, kernel: Kernel, work, acc, row_max, row_sum) -> None:
    """Normalises, and writes out and lse of those of this warpgroup's rows that exist."""
    out, lse = attend.normalised(kernel, work, acc, row_max, row_sum)
    place = work.q_start, work.head, work.exists
    rows.store_tile(outs[0], *place, out, call=kernel.call)
    rows.store_row_vector(outs[1], *place, lse, call=kernel.call)
