"""What the parts of the backward kernel share: its static plan, references, and what they tell.

The producer does all index arithmetic, since each register of the consumers counts; they read what
they need from `words` in shared memory.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_attn import gpu as gpus
from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import common
from pallas_attn.mosaic_gpu.common import UNIT, Inputs
from pallas_attn.spec import Spec
from pallas_attn.tiles import KernelTiles

# Warpgroups that compute.
WGS = 2
# Words on steps under way: the producer is `num_stages` ahead of the consumers, dq two behind them.
RING = 8
# Queries of the heads worked on at a time (q, dout, dq) stay in this much of the 50 MB L2 cache.
L2_BYTES = 20 << 20
# Tiles of masks with arrays are taken longest first where there are fewer sections than these: with
# more, neighbours share the cache, and the last section's share of the time is small.
FEW_SECTIONS = 4
# In the place of a tile's `COUNT` where there is no tile.
NO_TILE = -1
# Shared memory of a thread block on Hopper, and of that what a slot takes in which dq is staged:
# 64 queries, 32 channels, float32.
SMEM_BYTES = gpus.KNOWN["h200"].smem_per_block
STAGED = 32
STAGED_BYTES = 4 * UNIT * STAGED
# Words on a step, and on the tile.
Q_START, HEAD, PARTIAL, TURN = range(4)
COUNT, KV_START, BATCH, KV_HEAD, MASK_BATCH, HEAD_SHIFT, KV_DIRTY, Q_DIRTY = range(8)
# Words on a tile and its steps; the next tile's have their own.
TILE_WORDS = 8 + 4 * RING


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static schedule of a backward call.

    Attributes:
        dim, v_dim: channels, whole multiples of 64. When wide, dim is the greater of the two, to
            which all operands are padded.
        q_rows: q_len rounded up to whole blocks.
        tiles: blocks of keys of a head.
        streams: batch entries times KV heads.
        together: streams whose tiles are taken alternately: a section.
        blocks: thread blocks.
        cleans: whether a warp of the producer zeroes queries that are padding.
        wide: whether the warpgroups share 64 keys and split channels, rather than split 128 keys;
            compute warpgroups then add dq to global memory themselves.
        adder: whether a warpgroup of its own computes and adds dq (wide only).
        staged: slots of shared memory through which the adder adds, a divisor of dim / 32.
        by_rows: whether a warpgroup's half of dq is rows of it, and not columns.
        width: channels of a block of swizzled shared memory.
        registers: a thread's, of consumers, producer and adder.
        held: channels of v, when wide of k and of v, that stay in registers as left operands.
    """

    dim: int
    v_dim: int
    q_rows: int
    tiles: int
    streams: int
    together: int
    blocks: int
    cleans: bool
    wide: bool
    adder: bool
    staged: int
    by_rows: bool
    width: int
    registers: tuple[int, int, int]
    held: int


class Smem(NamedTuple):
    """Shared memory.

    k, v: [2, 64, d], 64 keys of each warpgroup; q, dout: [slots, block_q, d]; ds: [2, 2, (halves,)
    64 keys, 64 queries], slots of each warpgroup's keys; dq: each warpgroup's half, as slabs of
    `backward_add`. When wide: k: [2, 64, d], keys and values; q: [2, slots, 64, d], q and dout; p:
    [up to 2, 64, 64]; ds: [2, 64, 64]; dq, where it is staged: [1 or each warpgroup, slots, (slabs
    of 64 queries, 32 channels)]; no others. words:
    int32, one array since each array begins at a multiple of 1024 bytes: lse and delta of
    [slots, 2, block_q] float32 by their bits, then what the producer tells of the tile, then of the
    steps.
    """

    k: Any
    v: Any
    q: Any
    dout: Any
    p: Any
    ds: Any
    dq: Any
    words: Any


class Barriers(NamedTuple):
    """What is waited for.

    full, empty: slots; clean: slots whose padding was zeroed, waited for in full's place;
    dout_empty: slots of dout (wide only); keys: k and v are there; p, ds: they are written, and
    what else the consumers say; dq_full, dq_empty: each half's place in shared memory (with an
    adder, dq_empty: slots of ds that may be written, and ds slots too); read: nobody reads k and v
    any more; written: dk and dv stand in their place; stored: they are on their way to global
    memory, and the tile's words are no longer needed.
    """

    full: Any
    empty: Any
    clean: Any
    dout_empty: Any
    keys: Any
    p: Any
    ds: Any
    dq_full: Any
    dq_empty: Any
    read: Any
    written: Any
    stored: Any


class Order(NamedTuple):
    """Of the deterministic kernel: whose turn it is to add to dq.

    last: int32 [batch | 1, q_heads | 1, q blocks], the last tile that adds to a block, where all
    that do are neighbours; or None. turns: int32 [batch | 1, q_heads | 1, q blocks, tiles / 32, 2],
    which of 32 tiles add to it, as bits, and how many after these; or None. done: int32 [batch,
    q_heads, q blocks, 2], how many have; the halves of dq apart but where an adder adds.
    """

    last: Any
    turns: Any
    done: Any


class Kernel(NamedTuple):
    """What all parts of the kernel see: static facts, references, this warpgroup's number."""

    call: Call
    plan: Plan
    inputs: Inputs
    order: Order
    outs: Any  # dq, dk, dv
    smem: Smem
    bars: Barriers
    wg: Any
    counter: Any  # int32 [1], tiles that have been taken
    first_word: Any = None  # of those on the tile that is worked on

    def of_tile(self, number) -> "Kernel":
        """With the words on the `number`-th tile of this thread block."""
        before = self.stages * 2 * self.block_q
        return self._replace(first_word=(number & jnp.int32(1)) * TILE_WORDS + before)

    @property
    def block_q(self) -> int:
        """Queries of a step."""
        return self.call.tiles.dkv.block_q

    @property
    def stages(self) -> int:
        """Slots for q and dout."""
        return self.call.tiles.dkv.num_stages

    def keys(self, part):
        """64 keys in shared memory."""
        return self.smem.k.at[0 if self.plan.wide else part]

    def values(self, part):
        """64 values in shared memory."""
        return self.smem.k.at[1] if self.plan.wide else self.smem.v.at[part]

    def queries(self, slot):
        """A slot's queries."""
        return self.smem.q.at[0, slot] if self.plan.wide else self.smem.q.at[slot]

    def douts(self, slot):
        """A slot's dout."""
        return self.smem.q.at[1, slot] if self.plan.wide else self.smem.dout.at[slot]

    @property
    def parts(self) -> int:
        """Times 64 keys: the tile."""
        return 1 if self.plan.wide else WGS

    @property
    def steps(self):
        """How many the tile has."""
        return self.smem.words[self.fact(COUNT)]

    def fact(self, field: int):
        """Where in `words` a fact on the tile stands."""
        return self.first_word + field

    def word(self, step, field: int):
        """Where in `words` one on a step stands."""
        return (step & jnp.int32(RING - 1)) * 4 + (self.first_word + (8 + field))


def takes(tiles: KernelTiles, spec: Spec) -> bool:
    """Whether the kernel runs such tiles."""
    wide = max(common.padded(spec.head_dim), common.padded(spec.v_dim))
    most = {(128, 128): 64, (64, 128): 128, (64, 64): 256}
    fits = wide <= most.get((tiles.block_q, tiles.block_kv), 0)
    warps = (4 * WGS, 4 * WGS + 4) if tiles.block_kv == UNIT else (4 * WGS,)
    # More stages than these would outrun the words on them.
    return fits and tiles.num_warps in warps and 2 <= tiles.num_stages < RING - 2


def channels(tiles: KernelTiles, spec: Spec) -> tuple[int, int]:
    """Channels in shared memory, whole multiples of 64: of q and k, of v and dout."""
    dim, v_dim = common.padded(spec.head_dim), common.padded(spec.v_dim)
    if tiles.block_kv == UNIT:
        # Each has half of them, in blocks of 64 or, where that is no whole number, of 32.
        dim = max(dim, v_dim, 2 * UNIT)
        return dim, v_dim if dim % (2 * UNIT) else -(-v_dim // (2 * UNIT)) * 2 * UNIT
    # Halves of dq are columns, 64 or more, or else rows.
    return (dim if tiles.block_q == WGS * UNIT else max(dim, 2 * UNIT)), v_dim


def has_adder(tiles: KernelTiles, spec: Spec) -> bool:
    """Whether a third warpgroup makes dq; it leaves no registers for a cap at 256 channels."""
    fits = spec.soft_cap is None or channels(tiles, spec)[0] < 4 * UNIT
    return tiles.num_warps > 4 * WGS and fits


def smem_bytes(tiles: KernelTiles, spec: Spec) -> int:
    """Shared memory of the kernel, barriers included."""
    return _unstaged_bytes(tiles, spec) + staged_slots(tiles, spec) * STAGED_BYTES


def staged_slots(tiles: KernelTiles, spec: Spec) -> int:
    """Slots in which the adder stages dq: what a step needs is a whole number of times as many."""
    if not has_adder(tiles, spec):
        return 0
    needed = channels(tiles, spec)[0] // STAGED
    room = (SMEM_BYTES - _unstaged_bytes(tiles, spec)) // STAGED_BYTES
    return max([n for n in range(1, needed + 1) if needed % n == 0 and n <= room], default=1)


def handed_over(adder: bool, spec: Spec) -> int:
    """Slots of p, and of what else becomes ds, when wide; with an adder p stands in those of ds."""
    return (spec.soft_cap is not None) + (not adder)


def _unstaged_bytes(tiles: KernelTiles, spec: Spec) -> int:
    """Without what the adder stages dq in."""
    dim, v_dim = channels(tiles, spec)
    wide = tiles.block_kv == UNIT
    both = 2 * dim if wide else dim + v_dim
    ds = 2 * tiles.block_kv * tiles.block_q
    p = UNIT * UNIT * handed_over(has_adder(tiles, spec), spec) if wide else 0
    dq = 0 if wide else 4 * tiles.block_q * dim
    words = 4 * (tiles.num_stages * 2 * tiles.block_q + 2 * TILE_WORDS)
    rows = tiles.block_kv + tiles.num_stages * tiles.block_q
    return 2 * (rows * both + ds + p) + dq + words + 256


def _held(tiles: KernelTiles, spec: Spec) -> int:
    """`Plan.held`: what fits the registers; none fits beside the maths of a cap."""
    if spec.soft_cap is not None:
        return 0
    if tiles.block_kv > UNIT:
        return UNIT  # With 128 of 128: 395 TFLOP/s for 600.
    # 64 rows of half of dk and dv, float32, and of what is held, 16 bits, stand side by side.
    room = 8 * UNIT - sum(channels(tiles, spec)) if has_adder(tiles, spec) else 0
    return max(0, min(room, channels(tiles, spec)[0]))


def plan_of(call: Call, inputs: Inputs) -> Plan:
    """The schedule that follows from a call's shapes and tiles."""
    spec, tiles = call.spec, call.tiles.dkv
    dim, v_dim = channels(tiles, spec)
    wide = tiles.block_kv == UNIT
    q_rows = -(-spec.q_len // tiles.block_q) * tiles.block_q
    streams = spec.batch * spec.kv_heads
    stream_bytes = q_rows * spec.group * (6 * dim + 2 * v_dim)
    together = max(1, min(streams, L2_BYTES // stream_bytes))
    while streams % together:
        together -= 1
    tiles_of_head = -(-spec.kv_len // tiles.block_kv)
    cleans = inputs.extra.detail.q_dirty is not None and inputs.visits.any_partial
    return Plan(
        dim=dim,
        v_dim=v_dim,
        q_rows=q_rows,
        tiles=tiles_of_head,
        streams=streams,
        together=together,
        blocks=common.num_blocks_at_once(tiles_of_head * streams, call),
        cleans=cleans,
        wide=wide,
        adder=has_adder(tiles, spec),
        staged=staged_slots(tiles, spec),
        by_rows=tiles.block_q == WGS * UNIT,
        width=64 if not wide or dim % (2 * UNIT) == 0 else 32,
        registers=(208, 24, 72) if has_adder(tiles, spec) else (240, 24, 0),
        held=_held(tiles, spec),
    )


def for_each_tile(kernel: Kernel, work) -> None:
    """Calls work(kernel, slot) for each tile, when its k and v are there.

    What it returns is the next one's slot.
    """

    def await_tile(i):
        plgpu.barrier_wait(kernel.bars.keys)
        return kernel.of_tile(i).steps

    def take(state):
        i, slot, _ = state
        slot = work(kernel.of_tile(common.fresh(i, kernel.call)), slot)
        return i + 1, slot, await_tile(i + 1)

    zero = jnp.int32(0)
    lax.while_loop(lambda state: state[2] != NO_TILE, take, (zero, zero, await_tile(zero)))


def is_ragged(call: Call) -> bool:
    """Whether the last tile reaches past the end of the keys."""
    return call.spec.kv_len % call.tiles.dkv.block_kv != 0


def fence(call: Call) -> None:
    """Makes this thread's writes to shared memory visible to TMA and wgmma, without a barrier."""
    if call.interpret:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def emit(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    emit()
