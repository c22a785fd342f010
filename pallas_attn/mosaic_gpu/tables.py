"""Which blocks each warpgroup visits, and the order in which tiles are taken.

Forward: queries are cut into units of 64 rows, one a warpgroup; a tile is the units of one thread
block, which share a stream of keys and values.

    run tables   a row of the table is a unit: each warpgroup skips what its own rows do not see
    list tables  a row of the table is a tile: all its warpgroups visit the same blocks

    units of a head     0 1 2 | 3 4 5 | 6 7         q_len 512: 8 units, tiles of 3
    tiles               . 0 1 | 2 3 4 | 5 6 7       what is short is the first tile: under causal
                                                    masks it is the cheapest

Tiles are taken longest first (`rank`), so that the last ones to run are short.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import block_table
from pallas_attn.block_table import BlockTable, Visits
from pallas_attn.mask_core import FAR, Mask, TileGrid, xp_of
from pallas_attn.mosaic_gpu.common import UNIT
from pallas_attn.mosaic_gpu.detail import detail_by_key, detail_of
from pallas_attn.spec import Spec
from pallas_attn.tiles import KernelTiles, Tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra:
    """What these kernels need besides `Visits`.

    Attributes:
        detail: what decides single pairs, see `detail`; for the backward by key.
        rank: int32 [batch or 1, tiles of a head]: tiles, longest first, of masks that have arrays;
            else None.
        cost: blocks that each tile streams, of masks without arrays; None when all stream equally
            many.
        backward: the backward's; None in itself.
    """

    detail: Any
    rank: Any
    cost: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    backward: Any = None


def tiles_of_head(units: int, tiles: KernelTiles) -> int:
    """Forward tiles that `units` units make."""
    return -(-units // (tiles.block_q // UNIT))


def build(mask: Mask, tiles: Tiles, spec: Spec) -> BlockTable:
    """Tables of all kernels; see `block_table.build`."""

    def grid(block_q: int, block_kv: int) -> TileGrid:
        return TileGrid(spec.batch, spec.q_heads, spec.q_len, spec.kv_len, block_q, block_kv)

    rows = UNIT if mask.runs else tiles.fwd.block_q
    fwd = block_table.row_visits(mask, grid(rows, tiles.fwd.block_kv))
    blocks = {"block_q": tiles.dkv.block_q, "block_kv": tiles.dkv.block_kv}
    dkv = block_table.column_visits(mask, grid(**blocks))
    detail = detail_of(mask, spec, block_q=rows, block_kv=tiles.fwd.block_kv)
    rank, cost = order_of(streamed(fwd, tiles.fwd))
    backward = Extra(detail_by_key(mask, spec, **blocks), *order_of(streamed_by_key(dkv)))
    extra = Extra(detail, rank, cost, backward)
    # One kernel makes all gradients: the blocks that dq is summed over are those of dk and dv.
    return BlockTable(
        mask, fwd, dkv, dkv, tiles, spec.q_len, spec.kv_len, "mosaic_gpu", extra=extra
    )


def streamed(visits: Visits, tiles: KernelTiles):
    """Blocks that each tile streams, int32 [batch or 1, heads or 1, tiles].

    Args:
        visits: a table.
        tiles: of the forward, whose tiles stream what any of their units sees.
    """
    if visits.form == "list":
        return visits.counts.sum(-1)
    first, last = visits.table[..., 0], visits.table[..., 3]
    if tiles.block_q == UNIT:
        return last - first
    xp = xp_of(first)
    per_tile, count = tiles.block_q // UNIT, tiles_of_head(first.shape[-1], tiles)
    short = count * per_tile - first.shape[-1]
    first = xp.where(first < last, first, np.int32(FAR))
    # What the first tile is short of sees nothing, as in `schedule.unit_of`.
    first = xp.pad(first, ((0, 0), (0, 0), (short, 0)), constant_values=FAR)
    last = xp.pad(last, ((0, 0), (0, 0), (short, 0)))
    shape = (*first.shape[:2], count, per_tile)
    return xp.maximum(last.reshape(shape).max(-1) - first.reshape(shape).min(-1), np.int32(0))


def order_of(cost):
    """(rank, cost) of `Extra` from `streamed`.

    Heads share an order: the loads of one tile help those of the same tile of another head.
    """
    if isinstance(cost, np.ndarray):
        total = cost.max((0, 1))
        same = not total.size or (total == total[0]).all()
        return None, None if same else tuple(int(x) for x in total)
    total = cost.sum(1).astype(jnp.int32)
    return jnp.argsort(-total, axis=-1).astype(jnp.int32), None


def streamed_by_key(visits: Visits):
    """Blocks of queries that each tile of the backward streams, as `streamed`."""
    if visits.form == "list":
        return visits.counts.sum(-1)
    cost = visits.table[..., 3] - visits.table[..., 0]
    return cost - visits.table[..., 4] if visits.form == "loose" else cost
