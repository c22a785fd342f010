"""Who does which tile when, forward: the static plan, and the scalars that follow from tables.

Everything here is arithmetic on int32 scalars; the producer and each consumer do it for themselves.
"""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_attn.block_table import Visits
from pallas_attn.call import Call
from pallas_attn.mask_core import FAR
from pallas_attn.mosaic_gpu import common
from pallas_attn.mosaic_gpu.common import UNIT, Inputs
from pallas_attn.spec import Spec

# Keys and values of the heads worked on at a time stay in this much of the 50 MB L2 cache.
L2_BYTES = 40 << 20


@dataclasses.dataclass(frozen=True)
class Team:
    """The warpgroups of a thread block and what they keep where.

    Attributes:
        num_wgs: consumer warpgroups, each with 64 rows of a tile.
        overlap: whether a consumer's softmax runs under its own p·v.
        stage_out: whether out leaves q's memory alone, so that q may be loaded ahead.
        registers: a thread's, of consumers and producer.
        turns: whether consumers take turns at the tensor cores.
        interpret: whether the interpreter runs it, which knows no named barriers.
        q_chunks: pieces of `common.CHUNK` channels that lie apart in q's slots; 0 for whole rows.
        ends: whether keys from `Work.dirty` on are padding; otherwise `Detail.kv_dirty` says it.
        lane_sums: whether the lanes that share a row add up their sums after the last block only.
        hold_turns: whether a consumer keeps in registers at which blocks it takes turns.
    """

    num_wgs: int
    overlap: bool
    stage_out: bool
    registers: tuple[int, int]
    turns: bool
    interpret: bool
    q_chunks: int
    ends: bool
    lane_sums: bool
    hold_turns: bool


def team(wgs: int, spec: Spec, *, stage_out: bool, interpret: bool, ragged: bool = False) -> dict:
    """The fields of `Team`.

    Args:
        wgs: consumer warpgroups.
        spec: what is computed.
        stage_out, interpret: as there.
        ragged: whether rows of q start anywhere, and each sequence's keys end somewhere.
    """
    wide = max(common.padded(spec.head_dim), common.padded(spec.v_dim))
    return {
        "num_wgs": wgs,
        "overlap": wide != 128 or wgs != 3,
        "stage_out": stage_out,
        "registers": (160, 32) if wgs == 3 else (240, 24),
        "turns": wgs > 1,
        "interpret": interpret,
        "q_chunks": common.padded(spec.head_dim) // common.CHUNK if ragged else 0,
        "ends": ragged,
        # What is done once a block takes twice as much where blocks have 64 keys, not 128.
        "lane_sums": wide > 128,
        "hold_turns": wide > 128 and wgs == 3,
    }


@dataclasses.dataclass(frozen=True)
class Plan(Team):
    """The static schedule of a forward call.

    Attributes:
        units: units of 64 rows of a head.
        packed: query heads of one KV head that share tiles; 1 for one head a tile.
        tiles: tiles of a stream: of a query head, or of a KV head when packed.
        cost: of each of them, when they differ and that is known while tracing.
        shift: how many units the first tile of a stream is short of.
        streams: all streams of the call.
        together: streams whose tiles are taken alternately.
        blocks: thread blocks.
    """

    units: int
    packed: int
    tiles: int
    cost: tuple[int, ...] | None
    shift: int
    streams: int
    together: int
    blocks: int


def plan(call: Call, inputs: Inputs) -> Plan:
    """The schedule of a call."""
    spec, tiles, visits = call.spec, call.tiles.fwd, inputs.visits
    wgs = tiles.block_q // UNIT
    units = -(-spec.q_len // UNIT)
    by_unit = visits.form != "list"
    packed = spec.group if by_unit and units < wgs else 1
    count = -(-units * packed // wgs)
    streams = spec.batch * (spec.kv_heads if packed > 1 else spec.q_heads)
    kv_bytes = 2 * spec.kv_len * (common.padded(spec.head_dim) + common.padded(spec.v_dim))
    together = 1
    while streams % (together * 2) == 0 and together * 2 * kv_bytes <= L2_BYTES:
        together *= 2
    if inputs.extra.rank is not None:
        # One falling sequence of costs: dealt out forth and back it loads all thread blocks alike.
        together = streams
    return Plan(
        **team(wgs, spec, stage_out=stages_out(spec), interpret=call.interpret),
        units=units,
        packed=packed,
        tiles=count,
        cost=inputs.extra.cost if packed == 1 else None,
        shift=count * wgs - units * packed if by_unit else 0,
        streams=streams,
        together=together,
        blocks=common.num_blocks_at_once(count * streams, call),
    )


def stages_out(spec: Spec) -> bool:
    """Whether out has shared memory of its own: at 256 channels there is room for q's only."""
    q_dim, v_dim = common.padded(spec.head_dim), common.padded(spec.v_dim)
    return q_dim != v_dim or q_dim <= 128


class Tile(NamedTuple):
    """A tile: its place among its stream's tiles, and which heads of which sequence it serves.

    batch, kv_head: in this device's arrays; head: the query head, or a group's first when packed;
    origin: batch and query head of this device's first, None when all are here.
    """

    index: Any
    batch: Any
    head: Any
    kv_head: Any
    origin: Any

    @property
    def mask_batch(self):
        """The batch that masks and tables count in."""
        return self.batch if self.origin is None else self.batch + self.origin[0]


class Unit(NamedTuple):
    """64 rows of one head; `exists` is False for what the first tile is short of."""

    q_unit: Any
    head: Any
    mask_head: Any
    exists: Any


# What the producer tells each consumer of a tile, in shared memory: the consumers would otherwise
# wait for the same tables, and keep in registers what they need only now and then.
FIELDS = (
    "count", "before", "after", "first", "full_first", "full_last",
    "q_start", "batch", "head", "exists", "mask_batch", "mask_head", "tile",
    "turn_first", "turn_last", "dirty",
)  # fmt: skip


class Work:
    """A consumer's share of a tile, read from shared memory wherever it is asked for, or held.

    count: blocks to work on; before, after: blocks of the tile to skip; first, full_first,
    full_last: of a run, blocks of keys (of a list, full_last counts the fully visible ones);
    q_start: the first row; batch, head: where it lies here; mask_batch, mask_head: where masks
    count it; exists: 0 for rows that the first tile is short of; tile: its index in its stream;
    turn_first, turn_last: see `_turns`; dirty: whether the sequence has keys that are padding.
    In serving, `exists` says how many rows there are, and `dirty` where the sequence's keys end.
    """

    def __init__(self, fields, index, visits: Visits, held=None):
        self._fields, self._index, self._visits = fields, index, visits
        self._held = held or {}

    def __getattr__(self, name):
        if name in self._held:
            return self._held[name]
        return self._fields[(*self._index, FIELDS.index(name))]

    def holding(self, *names):
        """The same, with some of it read now and kept in registers."""
        held = {name: getattr(self, name) for name in names}
        return Work(self._fields, self._index, self._visits, held)

    def at(self, n):
        """The n-th block."""
        if self._visits.form != "list":
            return self.first + n
        sizes = self._visits.table.shape
        batch = self.mask_batch if sizes[0] > 1 else 0
        head = self.mask_head if sizes[1] > 1 else 0
        return self._visits.table[batch, head, self.tile, n]

    def partial(self, n):
        """Whether the n-th block is partly visible only."""
        if self._visits.form == "list":
            return n >= self.full_last
        block = self.first + n
        return (block < self.full_first) | (block >= self.full_last)


def tell(plan: Plan, inputs: Inputs, tile: Tile, unit: Unit, write) -> None:
    """Producer: writes a unit's share of a tile; `write(field number, value)`."""
    blocks = blocks_of_unit(plan, inputs, tile, unit)
    none = jnp.int32(0)
    first_turn, last_turn = _turns(plan, inputs, tile, blocks)
    dirty = inputs.extra.detail.any_kv_dirty
    if dirty is not None:
        dirty = dirty[tile.mask_batch if dirty.shape[0] > 1 else 0]
    values = (
        blocks.count, blocks.before, blocks.after, blocks.first, blocks.full_first,
        blocks.full_last, unit.q_unit * UNIT, tile.batch, unit.head,
        jnp.where(unit.exists, jnp.int32(1), none), tile.mask_batch, unit.mask_head, tile.index,
        first_turn, last_turn, dirty,
    )  # fmt: skip
    for i, value in enumerate(values):
        write(i, none if value is None else value)


def _turns(plan: Plan, inputs: Inputs, tile: Tile, blocks: "Blocks"):
    """The first and the last of a unit's blocks at which it takes turns with the tile's others.

    They do so at the blocks that all of them see, and so all equally often. At the others a unit
    goes ahead as far as the ring allows: if it waited, each block that few units see would take
    as long as one that all see. The turn after the last block serves its p·v.
    """
    if blocks.row is not None:
        return jnp.int32(0), jnp.int32(FAR)
    first, last = jnp.int32(0), jnp.int32(FAR)
    for w in range(plan.num_wgs):
        own_first, _, _, own_last = _run_row(inputs.visits, tile, unit_of(plan, tile, w))
        first, last = jnp.maximum(first, own_first), jnp.minimum(last, own_last)
    last_turn = last - blocks.first - (1 if plan.overlap else 0)
    return first - blocks.first, jnp.where(first < last, last_turn, jnp.int32(-1))


def order(plan: Plan):
    """Which tiles each thread block takes, int32 [1 + rounds, blocks]; None if all cost alike.

    The first row counts the tiles of each block; an entry is stream · tiles + tile.
    """
    if plan.cost is None:
        return None
    return balanced(plan.cost, plan.streams, plan.together, plan.blocks)


@functools.lru_cache(maxsize=64)
def balanced(cost: tuple[int, ...], streams: int, together: int, blocks: int) -> np.ndarray:
    """Tiles longest first, each to the thread block that has least to do so far.

    Args:
        cost: of each tile of a stream, in blocks.
        streams: how many.
        together: streams whose tiles are taken alternately.
        blocks: thread blocks.

    Returns:
        as `order`.
    """
    ranked = sorted(range(len(cost)), key=lambda i: -cost[i])
    taken: list[list[int]] = [[] for _ in range(blocks)]
    load = [(0, i) for i in range(blocks)]
    for turn in range(0, streams, together):
        for tile in ranked:
            for stream in range(turn, turn + together):
                busy, block = load[0]
                taken[block].append(stream * len(cost) + tile)
                # A tile costs about as much as one more block of keys to begin and end.
                heapq.heapreplace(load, (busy + cost[tile] + 1, block))
    table = np.zeros((1 + max(map(len, taken)), blocks), np.int32)
    for block, tiles in enumerate(taken):
        table[0, block] = len(tiles)
        table[1 : 1 + len(tiles), block] = tiles
    return table


def tiles_of_block(plan: Plan, inputs: Inputs, block):
    """How many tiles a thread block takes."""
    if inputs.order is not None:
        return inputs.order[0, block]
    total = plan.tiles * plan.streams
    rounds = -(-total // plan.blocks)
    last = number(plan, jnp.int32(rounds - 1), block)
    return jnp.int32(rounds) - jnp.where(last < total, jnp.int32(0), jnp.int32(1))


def number(plan: Any, i, block):
    """The i-th tile of a thread block: round by round, every other round backwards.

    Args:
        plan: has `blocks`, the number of thread blocks.
        i, block: int32 scalars.
    """
    forth = (i & jnp.int32(1)) == 0
    return i * plan.blocks + jnp.where(forth, block, jnp.int32(plan.blocks - 1) - block)


def tile_at(plan: Plan, inputs: Inputs, i, block) -> Tile:
    """The i-th tile of a thread block."""
    rank, place = inputs.extra.rank, None
    if inputs.order is not None:
        stream, index = _div_rem(inputs.order[i + 1, block], plan.tiles)
    elif rank is None:
        stream, index = _div_rem(number(plan, i, block), plan.tiles)
    else:
        turn, rest = _div_rem(number(plan, i, block), plan.tiles * plan.together)
        place, member = _div_rem(rest, plan.together)
        stream, index = turn * plan.together + member, place
    batch, head = _div_rem(stream, inputs.k.shape[2] if plan.packed > 1 else inputs.q.shape[2])
    group = inputs.q.shape[2] // inputs.k.shape[2]
    kv_head, head = (head, head * group) if plan.packed > 1 else (_div(head, group), head)
    origin = None if inputs.origin is None else (inputs.origin[0], inputs.origin[1])
    tile = Tile(index, batch, head, kv_head, origin)
    if place is not None and plan.packed == 1:
        row = tile.mask_batch if rank.shape[0] > 1 else 0
        tile = tile._replace(index=rank[row, place])
    return tile


def _div_rem(x, by: int):
    quotient = _div(x, by)
    return quotient, x - quotient * by


def _div(x, by: int):
    return x if by == 1 else lax.div(x, jnp.int32(by))


def unit_of(plan: Plan, tile: Tile, wg) -> Unit:
    """The unit of a tile that one consumer warpgroup owns."""
    number = tile.index * plan.num_wgs + wg - plan.shift
    last = plan.units * plan.packed - 1
    exists = (number >= 0) & (number <= last)
    number = jnp.clip(number, jnp.int32(0), jnp.int32(last))
    q_unit, member = _div_rem(number, plan.packed)
    head = tile.head if plan.packed == 1 else tile.head + member
    mask_head = head if tile.origin is None else head + tile.origin[1]
    return Unit(q_unit, head, mask_head, exists)


class Blocks(NamedTuple):
    """The blocks of keys that a tile or one of its units visits.

    Attributes:
        count: how many.
        before, after: blocks of the tile that come before and after a unit's own.
        first: of a run. None for a list.
        full_first, full_last: of a run: fully visible ones. For a list: full_last is their number.
        row: of a list: where its indices are, else None.
    """

    count: Any
    before: Any
    after: Any
    first: Any
    full_first: Any
    full_last: Any
    row: Any = None

    def at(self, n):
        """The n-th block."""
        return self.first + n if self.row is None else self.row[0][(*self.row[1], n)]


def _list_row(visits: Visits, tile: Tile, mask_head) -> Blocks:
    sizes = visits.table.shape
    row = (tile.mask_batch if sizes[0] > 1 else 0, mask_head if sizes[1] > 1 else 0, tile.index)
    full, partial = visits.counts[(*row, 0)], visits.counts[(*row, 1)]
    none = jnp.int32(0)
    return Blocks(full + partial, none, none, None, None, full, (visits.table, row))


def _run_row(visits: Visits, tile: Tile, unit: Unit):
    """(first, full_first, full_last, last) of a unit; all 0 when it sees nothing."""
    sizes = visits.table.shape
    batch = tile.mask_batch if sizes[0] > 1 else 0
    head = unit.mask_head if sizes[1] > 1 else 0
    row = tuple(visits.table[batch, head, unit.q_unit, i] for i in range(4))
    return tuple(jnp.where(unit.exists, x, jnp.int32(0)) for x in row)


def blocks_of_tile(plan: Plan, inputs: Inputs, tile: Tile) -> Blocks:
    """What the producer loads: all that any unit of a tile sees."""
    visits = inputs.visits
    if visits.form == "list":
        return _list_row(visits, tile, unit_of(plan, tile, 0).mask_head)
    first, last = jnp.int32(FAR), jnp.int32(0)
    for w in range(plan.num_wgs):
        own_first, _, _, own_last = _run_row(visits, tile, unit_of(plan, tile, w))
        sees = own_first < own_last
        first = jnp.where(sees, jnp.minimum(first, own_first), first)
        last = jnp.maximum(last, own_last)
    count = jnp.maximum(last - first, jnp.int32(0))
    return Blocks(count, jnp.int32(0), jnp.int32(0), first, first, last)


def blocks_of_unit(plan: Plan, inputs: Inputs, tile: Tile, unit: Unit) -> Blocks:
    """What one consumer works on, and what it skips."""
    visits = inputs.visits
    if visits.form == "list":
        return _list_row(visits, tile, unit.mask_head)
    whole = blocks_of_tile(plan, inputs, tile)
    first, full_first, full_last, last = _run_row(visits, tile, unit)
    sees = first < last
    first = jnp.where(sees, first, whole.first + whole.count)
    own = jnp.maximum(last - first, jnp.int32(0))
    before = jnp.where(sees, first - whole.first, whole.count)
    return Blocks(own, before, whole.count - before - own, first, full_first, full_last)


def channels(dim: int):
    """All channels of a row, and zeros past them where `dim` is more: TMA fills those in."""
    return pl.ds(jnp.int32(0), dim)


# Mosaic takes the first hardware barriers, one a warpgroup and one for all.
def _turn_barrier(plan: Team, wg):
    return wg + (plan.num_wgs + 2)


def start_turns(kernel) -> None:
    """Gives the first turn to warpgroup 0."""
    plan = kernel.plan
    if plan.turns and not plan.interpret:

        @pl.when(kernel.wg == plan.num_wgs - 1)
        def _():
            common.named_barrier("arrive", _turn_barrier(plan, jnp.int32(0)), 256)


def _at_turn(kernel, work, turn, act) -> None:
    if kernel.plan.turns and not kernel.plan.interpret:
        pl.when((turn >= work.turn_first) & (turn <= work.turn_last))(act)


def wait_turn(kernel, work: Work, turn) -> None:
    """Waits until this warpgroup may issue the matmuls of its block `turn`, if it takes turns."""
    barrier = _turn_barrier(kernel.plan, kernel.wg)
    _at_turn(kernel, work, turn, lambda: common.named_barrier("sync", barrier, 256))


def pass_turn(kernel, work: Work, turn) -> None:
    """Lets the next warpgroup issue its matmuls, if there was a turn to wait for."""

    def act():
        wgs = kernel.plan.num_wgs
        following = jnp.where(kernel.wg == wgs - 1, jnp.int32(0), kernel.wg + 1)
        common.named_barrier("arrive", _turn_barrier(kernel.plan, following), 256)

    _at_turn(kernel, work, turn, act)
