"""Forward in plain JAX: a map over blocks of queries, a scan over blocks of keys.

The softmax is online: one pass over the keys.

for each q block (lax.map):
    for each kv block (lax.scan):
        skipped by lax.cond when the mask shows nothing there to any sequence and head
        s = q·k -> logits -> mask -> online_softmax; acc = acc * correction + p·v
    out, lse = finalize
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import tile_math
from pallas_attn.block_table import grid_for
from pallas_attn.call import Call
from pallas_attn.xla import chunks


def forward(call: Call, q, k, v, bias, sinks, table):
    """Attention of one call.

    Args:
        call: the static facts.
        q, k, v, bias, sinks: as in `pallas_attn.mha`; bias of rank 4 or None.
        table: a BlockTable, of which the mask is used.

    Returns:
        out [batch, q_len, q_heads, v_dim] in q's dtype; lse [batch, q_heads, q_len].
    """
    spec, mask = call.spec, table.mask
    grid = grid_for(spec.batch, spec.q_heads, spec.q_len, spec.kv_len)(call.tiles.fwd)
    dtype = chunks.accumulator_dtype(spec)
    (q,), (k, v) = chunks.without_padding(mask, spec, (q,), (k, v))
    q_blocks = chunks.split_q(q, spec, grid)
    k_blocks, v_blocks = chunks.split_kv(k, spec, grid), chunks.split_kv(v, spec, grid)
    visits = chunks.visited(mask, grid)
    kv_index = jnp.arange(grid.num_kv, dtype=np.int32)
    sink = None if sinks is None else sinks.astype(dtype).reshape(1, spec.kv_heads, spec.group, 1)

    def one_q_block(operands):
        q_tile, q_block, row_visits = operands

        def take(carry, k_tile, v_tile, kv_block):
            row_max, row_sum, acc = carry
            qk = chunks.einsum("bhgqd,bhkd->bhgqk", q_tile, k_tile, spec)
            bias_tile = chunks.bias_tile(bias, spec, grid, q_block, kv_block)
            s, factor = tile_math.logits(qk, spec.scale, spec.soft_cap, bias_tile)
            s = jnp.where(chunks.visible(mask, spec, grid, q_block, kv_block), s, -jnp.inf)
            step = chunks.over_heads(
                lambda top, total, tile: tile_math.online_softmax(
                    top, total, tile, factor, guard=True
                )
            )
            row_max, row_sum, correction, p = step(row_max, row_sum, s)
            pv = chunks.einsum("bhgqk,bhkd->bhgqd", p.astype(v_tile.dtype), v_tile, spec)
            return row_max, row_sum, acc * correction[..., None] + pv

        def one_kv_block(carry, operands):
            k_tile, v_tile, kv_block, visit = operands
            if grid.num_kv == 1:
                return take(carry, k_tile, v_tile, kv_block), None
            return lax.cond(
                visit, lambda c: take(c, k_tile, v_tile, kv_block), lambda c: c, carry
            ), None

        rows = q_tile.shape[:-1]
        start = (
            jnp.full(rows, -jnp.inf, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros((*rows, spec.v_dim), dtype),
        )
        start = _varying_like(start, q_tile, k_blocks, v_blocks)
        carry, _ = lax.scan(one_kv_block, start, (k_blocks, v_blocks, kv_index, row_visits))
        row_max, row_sum, acc = carry
        factor, lse = tile_math.finalize(row_max, row_sum, sink)
        # Rows that saw nothing may hold anything in acc but NaN; 0 times that is 0.
        return (acc * factor[..., None]).astype(q.dtype), lse

    q_index = jnp.arange(grid.num_q, dtype=np.int32)
    out, lse = lax.map(one_q_block, (q_blocks, q_index, visits))
    return chunks.merge_q(out, spec), chunks.merge_rows(lse, spec)


def _varying_like(carry, *operands):
    """Inside shard_map a loop's carry must vary over the axes that its body makes it vary over."""
    from pallas_attn import _compat

    return _compat.match_varying(carry, _compat.varying_axes(operands))
