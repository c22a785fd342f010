"""How tiles of the deterministic backward take turns at a block of dq.

Each knows how many add to the block before it, and waits until so many have. A tile waits only for
tiles that are taken before it, and each thread block works on its own one after the other: of those
not done the first taken can always go on, since all thread blocks are on the card at once.

The last keys of a head come first, and each tile begins at the first queries that see it. Where
queries see no later keys, no tile that comes before it begins below that, so that side by side they
come to a block two steps one after the other, which hides what it takes to pass a turn on:

    queries       0   1   2   3   4   5
    last tile                     *   *        * in the first two steps of a tile
    before it             *   *   .   .        . in later ones
    first         *   *   .   .   .   .

(From the last query down all would begin at one block and wait in line: under masks of documents
at 28 % of the speed without turns, on an H200.)

What a tile knows its turn from grows with the length where tiles that see a block are neighbours,
as they are for masks that are one interval a row; for others a quarter of a byte for each pair of
blocks is kept.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_attn.block_table import Visits
from pallas_attn.mosaic_gpu.backward_parts import Kernel, Order
from pallas_attn.mosaic_gpu.lanes import Emitter


def tile_order(tiles: int):
    """The tiles of a head in the order in which they are taken, int32 [1, tiles]."""
    return jnp.arange(tiles - 1, -1, -1, dtype=jnp.int32)[None]


def order_of(visits: Visits, q_blocks: int) -> Order:
    """Whose turn it is, from a table by key; `done` is left out.

    Args:
        visits: the table.
        q_blocks: blocks of queries.
    """
    if visits.form == "run":
        # The tiles that see a block are neighbours, as the keys that its queries see are.
        column = jnp.arange(q_blocks, dtype=jnp.int32)
        table = jnp.asarray(visits.table)[..., None, :]
        seen = (table[..., 0] <= column) & (column < table[..., 3])
        tile = jnp.arange(seen.shape[-2], dtype=jnp.int32)[:, None]
        return Order(jnp.where(seen, tile, jnp.int32(-1)).max(-2), None, None)
    seen = _map_of(visits, q_blocks)
    short = -seen.shape[-1] % 32
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, short)))
    parts = seen.reshape(*seen.shape[:-1], -1, 32)
    bits = np.left_shift(np.int32(1), np.arange(32, dtype=np.int32))
    words = jnp.where(parts, bits, np.int32(0)).sum(-1, dtype=jnp.int32)
    counts = parts.astype(jnp.int32).sum(-1, dtype=jnp.int32)
    later = counts.sum(-1, keepdims=True, dtype=jnp.int32)
    later = later - jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
    return Order(None, jnp.stack([words, later], axis=-1), None)


def _map_of(visits: Visits, q_blocks: int):
    """Whether a tile sees a block, bool [batch | 1, q_heads | 1, q blocks, tiles]."""
    table = jnp.asarray(visits.table)
    if visits.form == "loose":
        column = jnp.arange(q_blocks, dtype=jnp.int32)[:, None]
        inside = (table[..., None, :, 0] <= column) & (column < table[..., None, :, 3])
        return inside & jnp.asarray(visits.some)
    used = jnp.arange(table.shape[-1], dtype=jnp.int32) < jnp.asarray(visits.counts).sum(
        -1, keepdims=True, dtype=jnp.int32
    )
    # What is not used goes past the end.
    index = jnp.where(used, table, jnp.int32(q_blocks))
    seen = jnp.zeros((*table.shape[:-1], q_blocks + 1), bool)
    seen = jnp.put_along_axis(seen, index, np.True_, axis=-1, inplace=False)
    return jnp.swapaxes(seen[..., :q_blocks], -1, -2)


def turn_of(order: Order, row, tile, member, q_block):
    """How many tiles add to a block of queries before this one; `row` as in the producer."""
    if order.last is not None:
        return order.last[(*row(order.last, tile, member), q_block)] - tile.block
    at = (
        *row(order.turns, tile, member),
        q_block,
        lax.shift_right_logical(tile.block, jnp.int32(5)),
    )
    after = lax.shift_left(jnp.int32(-2), tile.block & jnp.int32(31))
    return order.turns[(*at, 1)] + _ones(order.turns[(*at, 0)] & after)


def _ones(word):
    """How many bits are set."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        upper = lax.shift_right_logical(word, jnp.int32(shift)) & jnp.int32(mask)
        word = (word & jnp.int32(mask)) + upper
    return (word & jnp.int32(0xFFFF)) + lax.shift_right_logical(word, jnp.int32(16))


def _counter(kernel: Kernel, batch, head, q_start, half):
    block = lax.div(q_start, jnp.int32(kernel.block_q))
    return kernel.order.done.at[batch, head, block, half]


def wait(kernel: Kernel, batch, head, q_start, turn, half) -> None:
    """Until it is this tile's turn; called by the warps that add."""
    if kernel.call.interpret:
        return  # Thread blocks run one after another.
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def emit(_, counter, turn):
        _spin(mgpu_utils.memref_ptr(counter), turn.registers.flat[0])

    emit(_counter(kernel, batch, head, q_start, half), turn)


def _spin(pointer, turn):
    text = (
        "{ .reg .pred more; .reg .b32 found; "
        "AGAIN: ld.acquire.gpu.global.b32 found, [$0]; setp.ne.b32 more, found, $1; "
        "@more bra AGAIN; fence.proxy.async; }"
    )
    _assembly([pointer, turn], text, "l,r")


def pass_on(kernel: Kernel, batch, head, q_start, half) -> None:
    """This tile has added; called by the warps that did."""
    if kernel.call.interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, counter):
        machine = Emitter()
        if kernel.plan.wide:
            # Additions of all threads of the warpgroup, and those by TMA that they waited for, come
            # before the signal of the first.
            _assembly([], "fence.proxy.async; fence.acq_rel.gpu;", "")
            machine.sync()
            first = machine.thread()
        else:
            _assembly([], "fence.proxy.async; bar.warp.sync -1;", "")
            first = machine.thread() & 31
        text = (
            "{ .reg .pred first; setp.eq.b32 first, $1, 0; "
            "@first red.release.gpu.global.add.u32 [$0], 1; }"
        )
        _assembly([mgpu_utils.memref_ptr(counter), first.ir_value], text, "l,r")

    emit(_counter(kernel, batch, head, q_start, half))


def _assembly(args, text: str, constraints: str) -> None:
    constraints = ",".join(x for x in (constraints, "~{memory}") if x)
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, args, text, constraints, has_side_effects=True)


__all__ = ["order_of", "pass_on", "tile_order", "turn_of", "wait"]
