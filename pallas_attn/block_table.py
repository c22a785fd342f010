"""From a mask and tile sizes to the blocks that each kernel visits.

Every kernel owns one block of rows (queries, or keys for dk and dv) and loops over blocks of
columns. Three forms say which, chosen by the mask's kind while tracing:

    run     first, full_first, full_last, last: [first, full_first) and [full_last, last) are partly
            visible, [full_first, full_last) fully. For masks that are one interval a row.
    loose   a run, how many of its blocks show nothing after all, and a map of those that do, which
            is read only where some do not. For documents: contiguous ones, the rule, cost what a
            run costs.
    list    indices of the fully visible blocks, then of the partly visible ones, and both counts.

Partly visible blocks run mask code, fully visible ones none, others are not visited. A block that
the end of the sequence cuts counts as partly visible. Tables of masks without arrays are made by
NumPy while tracing; others are a few small operations on the device.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from pallas_attn import mask_core
from pallas_attn.mask_core import FAR, Mask, TileGrid, span_bounds, xp_of
from pallas_attn.tiles import KernelTiles, Tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """The blocks that one kernel visits; leading axes are [batch or 1, q_heads or 1, row blocks].

    Attributes:
        table: int32 [..., 4] for a run, [..., 5] for a loose one, [..., width] block indices for a
            list.
        counts: int32 [..., 2]: fully and partly visible blocks, for a list; else None.
        some: bool [..., query blocks, key blocks]: blocks with a visible pair, for a loose run;
            else None.
        any_partial, any_full: False when it is known that no block is of that kind.
        by_key: whether the rows are blocks of keys, as for dk and dv.
    """

    table: Any
    counts: Any
    some: Any
    any_partial: bool = dataclasses.field(metadata={"static": True})
    any_full: bool = dataclasses.field(metadata={"static": True})
    by_key: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def form(self) -> str:
        """Which of the three: "run", "loose" or "list"."""
        if self.counts is not None:
            return "list"
        return "run" if self.some is None else "loose"

    def kinds(self, columns: int) -> np.ndarray:
        """What each block is, int [..., row blocks, columns]: 0 skipped, 1 partly, 2 fully visible.

        For tests and pictures; on concrete tables.
        """
        index, table = np.arange(columns), np.asarray(self.table)[..., None]
        if self.form == "list":
            order, full = table[..., 0], np.asarray(self.counts)[..., :1]
            kind = np.where(np.arange(order.shape[-1]) < full, 2, 1)
            used = np.arange(order.shape[-1]) < np.asarray(self.counts).sum(-1, keepdims=True)
            out = np.zeros((*order.shape[:-1], columns), int)
            np.put_along_axis(out, np.where(used, order, 0), 0, -1)
            rows = np.nonzero(used)
            out[(*rows[:-1], order[rows])] = kind[rows]
            return out
        first, full_first, full_last, last = (table[..., i, :] for i in range(4))
        inside, full = (
            (first <= index) & (index < last),
            (full_first <= index) & (index < full_last),
        )
        kind = np.where(full, 2, np.where(inside, 1, 0))
        if self.some is None:
            return kind
        some = np.asarray(self.some)
        return np.where(some.swapaxes(-1, -2) if self.by_key else some, kind, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """A planned mask: the mask, and the blocks that the forward and backward kernels visit.

    Made by `plan`, passed as `mask=` to every layer of a step; a pytree, so it may cross jit.
    `extra` holds what a backend adds for its own kernels.
    """

    mask: Mask
    fwd: Visits
    dq: Visits
    dkv: Visits
    tiles: Tiles = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    kv_len: int = dataclasses.field(metadata={"static": True})
    backend: str = dataclasses.field(metadata={"static": True})
    extra: Any = None

    def check(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        """Raises ValueError when the table was made for another problem."""
        if (self.q_len, self.kv_len) != (q_len, kv_len):
            raise ValueError(
                f"mask: got a BlockTable planned for q_len={self.q_len}, kv_len={self.kv_len}, "
                f"expected one for q_len={q_len}, kv_len={kv_len}"
            )
        for name, visits in (("fwd", self.fwd), ("dq", self.dq), ("dkv", self.dkv)):
            sizes = visits.table.shape[:2]
            if sizes[0] not in (1, batch) or sizes[1] not in (1, heads):
                raise ValueError(
                    f"mask: got a BlockTable ({name}) planned for batch {sizes[0]} and {sizes[1]} "
                    f"query heads, expected batch 1 or {batch} and 1 or {heads} query heads"
                )
        self.mask.check(batch, heads, q_len, kv_len)


def build(mask: Mask, tiles: Tiles, grid_of, backend: str) -> BlockTable:
    """Builds the tables of all kernels.

    Args:
        mask: what is visible.
        tiles: the kernels' tiles.
        grid_of: KernelTiles -> TileGrid.
        backend: the backend whose tiles these are.
    """
    fwd_grid, dkv_grid = grid_of(tiles.fwd), grid_of(tiles.dkv)
    fwd = row_visits(mask, fwd_grid)
    same = (tiles.dq.block_q, tiles.dq.block_kv) == (tiles.fwd.block_q, tiles.fwd.block_kv)
    dq = fwd if same else row_visits(mask, grid_of(tiles.dq))
    return BlockTable(
        mask,
        fwd,
        dq,
        column_visits(mask, dkv_grid),
        tiles,
        fwd_grid.q_len,
        fwd_grid.kv_len,
        backend,
    )


def grid_for(batch: int, heads: int, q_len: int, kv_len: int):
    """KernelTiles -> TileGrid for one problem."""

    def grid_of(tiles: KernelTiles) -> TileGrid:
        return TileGrid(batch, heads, q_len, kv_len, tiles.block_q, tiles.block_kv)

    return grid_of


def row_visits(mask: Mask, grid: TileGrid) -> Visits:
    """For each block of queries, the blocks of keys to visit."""
    span = mask.row_span(mask_core.row_positions(grid))
    if span is not None:
        first, last, inner_first, inner_last = span_bounds(grid, *span)
        size = np.int32(grid.block_kv)
        # A ragged last block of keys never counts as full: inner_last is at most kv_len.
        run = _ordered(first // size, -(-inner_first // size), inner_last // size, -(-last // size))
        return _run(run[:, None])
    some, every = mask.tiles(grid)
    kv_first, _ = grid.kv_bounds
    every = every & (kv_first + np.int32(grid.block_kv) <= np.int32(grid.kv_len))
    some, every = _to_rank_4(some, every, grid)
    if mask.runs:
        return _loose(some, every)
    ragged = grid.kv_len % grid.block_kv != 0
    return _list(some, every, uniform=mask.uniform(grid) and not ragged)


def column_visits(mask: Mask, grid: TileGrid) -> Visits:
    """For each block of keys, the blocks of queries to visit."""
    run = _columns_of_span(mask, grid)
    if run is not None:
        return dataclasses.replace(_run(run), by_key=True)
    some, every = mask.tiles(grid)
    q_first, _ = grid.q_bounds
    every = every & (q_first + np.int32(grid.block_q) <= np.int32(grid.q_len))
    some, every = _to_rank_4(some, every, grid)
    if mask.runs and mask.row_span(mask_core.row_positions(grid)) is None:
        return dataclasses.replace(_loose(some, every, -2), by_key=True)
    some, every = (x.swapaxes(-1, -2) for x in (some, every))
    if mask.runs:
        return dataclasses.replace(_run(_runs_of(some, every)), by_key=True)
    uniform = mask.uniform(grid) and grid.q_len % grid.block_q == 0
    return dataclasses.replace(_list(some, every, uniform=uniform), by_key=True)


def _columns_of_span(mask: Mask, grid: TileGrid):
    """`column_visits` of one interval a row that only ever moves on, without a map of all blocks.

    Returns:
        [1, 1, num_kv, 4]; None where the mask is not of that kind or not known while tracing.
    """
    span = mask.row_span(mask_core.row_positions(grid)) if mask.runs else None
    if span is None or xp_of(*span) is not np:
        return None
    bounds = span_bounds(grid, *span)
    if any(b.shape[:-1] != (1,) or (np.diff(b) < 0).any() for b in bounds):
        return None
    first, last, inner_first, inner_last = (b[0] for b in bounds)
    if (first > last).any():
        return None  # queries that see nothing, which no order holds for
    kv_first, kv_last = (b.reshape(-1) for b in grid.kv_bounds)
    full_from, full_to = (
        np.searchsorted(ends, at, "right")
        for ends, at in ((inner_last, kv_last), (inner_first, kv_first))
    )
    run = _ordered(
        np.searchsorted(last, kv_first, "right"),
        full_from,
        np.minimum(full_to, grid.q_len // grid.block_q),
        np.searchsorted(first, kv_last, "right"),
    )
    return run[None, None]


def _to_rank_4(some, every, grid: TileGrid):
    xp = xp_of(some, every)
    both: list[Any] = []
    for x in (some, some & every):
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        both.append(xp.broadcast_to(x, (*x.shape[:2], grid.num_q, grid.num_kv)))
    lead = np.broadcast_shapes(both[0].shape, both[1].shape)
    return tuple(xp.broadcast_to(x, lead) for x in both)


def _indices(x, axis: int) -> np.ndarray:
    """0, 1, ... along an axis of x, of x's rank."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return np.arange(x.shape[axis], dtype=np.int32).reshape(shape)


def _runs_of(some, every):
    """[..., 4] from bool maps [..., row blocks, column blocks] that hold at most one run a row."""
    xp = xp_of(some, every)
    index = _indices(some, -1)
    far, end = np.int32(FAR), np.int32(some.shape[-1])
    first = xp.where(some, index, far).min(-1, initial=far)
    last = xp.where(some, index + np.int32(1), np.int32(0)).max(-1, initial=0)
    full_first = xp.where(every, index, far).min(-1, initial=far)
    # The end of the first unbroken run: should there be others, they are visited as partial ones.
    gap = ~every & (index > full_first[..., None])
    full_last = xp.where(gap, index, end).min(-1, initial=end)
    return _ordered(first, full_first, full_last, last)


def _ordered(first, full_first, full_last, last):
    """Puts empty and missing runs into the form first <= full_first <= full_last <= last."""
    xp = xp_of(first, full_first, full_last, last)
    empty = first >= last
    first, last = (xp.where(empty, np.int32(0), x) for x in (first, last))
    no_full = empty | (full_first >= full_last)
    full_first = xp.where(no_full, last, full_first)
    full_last = xp.where(no_full, last, full_last)
    return xp.stack([first, full_first, full_last, last], axis=-1).astype(np.int32)


def _run(table) -> Visits:
    if not isinstance(table, np.ndarray):
        return Visits(table, None, None, any_partial=True, any_full=True)
    full = table[..., 2] - table[..., 1]
    partial = table[..., 3] - table[..., 0] - full
    return Visits(table, None, None, any_partial=bool(partial.any()), any_full=bool(full.any()))


def _loose(some, every, axis: int = -1) -> Visits:
    """A loose run along one axis of bool maps [..., query blocks, key blocks]."""
    ends = _ends(some, every, axis)
    first, last, full_first, full_last, num_some, num_full = ends
    # Fully visible blocks that are no single run are visited as partly visible ones.
    full_last = xp_of(*ends).where(full_last - full_first == num_full, full_last, np.int32(0))
    run = _ordered(first, full_first, full_last, last)
    holes = run[..., 3] - run[..., 0] - num_some
    table = xp_of(*ends).concatenate([run, holes[..., None]], axis=-1)
    return dataclasses.replace(_run(table[..., :4]), table=table, some=some)


def _ends(some, every, axis: int):
    """First and last index + 1 of `some` and of `every` along an axis, and how many each holds."""
    xp = xp_of(some, every)
    far, none, one = np.int32(FAR), np.int32(0), np.int32(1)
    index = _indices(some, axis)
    mapped = [
        xp.where(x, y, z)
        for y, z in ((index, far), (index + one, none))
        for x in (some, every)
    ]  # fmt: skip
    first, full_first, last, full_last = mapped
    counts = [xp.where(x, one, none) for x in (some, every)]
    if xp is np:
        ends = (first.min(axis), last.max(axis), full_first.min(axis), full_last.max(axis))
        return (*ends, *(x.sum(axis, dtype=np.int32) for x in counts))

    def merge(a, b):
        least, most = jax.lax.min, jax.lax.max
        return (
            least(a[0], b[0]), most(a[1], b[1]), least(a[2], b[2]), most(a[3], b[3]),
            a[4] + b[4], a[5] + b[5],
        )  # fmt: skip

    # One reduction of six operands is one kernel; six reductions were five.
    operands = (first, last, full_first, full_last, *counts)
    start = (far, none, far, none, none, none)
    return jax.lax.reduce(operands, start, merge, (some.ndim + axis,))


def _list(some, every, *, uniform: bool) -> Visits:
    xp = xp_of(some, every)
    width = some.shape[-1]
    index = _indices(some, -1)
    # One sort puts full blocks first, then partly visible ones, then the rest.
    kind = xp.where(every, np.int32(0), xp.where(some, np.int32(1), np.int32(2)))
    order = xp.sort(kind * np.int32(width) + index, axis=-1) % np.int32(width)
    counts = xp.stack([every.sum(-1), (some & ~every).sum(-1)], axis=-1).astype(np.int32)
    table = order.astype(np.int32)
    if not isinstance(counts, np.ndarray):
        return Visits(table, counts, None, any_partial=not uniform, any_full=True)
    used = max(1, int(counts.sum(-1).max(initial=0)))
    full, partial = (bool(counts[..., i].any()) for i in (0, 1))
    return Visits(table[..., :used], counts, None, any_partial=partial, any_full=full)


__all__ = ["BlockTable", "Visits", "build", "column_visits", "grid_for", "row_visits"]
