"""Backward in plain JAX: five matmuls a tile, and the gradient of the bias.

One pass, which carries the gradients of all keys and values:

for each q block (lax.scan, carrying dk and dv in float32):
    for each kv block (lax.scan), skipped where the mask shows nothing:
        p from the logits and the saved lse; dp = dout·v; ds = dlogits(p, dp, delta)
        dv += pᵀ·dout    dk += dsᵀ·q    dq += ds·k    (dbias += ds, summed where it broadcasts)
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import _compat, tile_math
from pallas_attn.block_table import grid_for
from pallas_attn.call import Call
from pallas_attn.xla import chunks


def backward(call: Call, q, k, v, bias, table, residuals):
    """Gradients of one call.

    Args:
        call, q, k, v, bias, table: as in `forward`.
        residuals: (lse_log2, delta, dout): lse in base 2, +inf for rows that see nothing; delta =
            rowsum(out·dout) - dlse; both [batch, q_heads, q_len]; dout like out.

    Returns:
        dq, dk, dv in the operands' dtype; dbias float32 in bias's shape, None without a bias.
    """
    spec = call.spec
    grid = grid_for(spec.batch, spec.q_heads, spec.q_len, spec.kv_len)(call.tiles.dq)
    dtype = chunks.accumulator_dtype(spec)
    lse_log2, delta, dout = residuals
    (q, dout), (k, v) = chunks.without_padding(table.mask, spec, (q, dout), (k, v))
    k_blocks, v_blocks = chunks.split_kv(k, spec, grid), chunks.split_kv(v, spec, grid)
    rows = (
        chunks.split_q(q, spec, grid),
        chunks.split_q(dout.astype(q.dtype), spec, grid),
        chunks.split_rows(lse_log2, spec, grid, jnp.inf),
        chunks.split_rows(delta, spec, grid, 0),
        jnp.arange(grid.num_q, dtype=np.int32),
        chunks.visited(table.mask, grid),
    )
    bias_grad = None if bias is None else _padded_like(bias, grid, dtype)
    kv_index = jnp.arange(grid.num_kv, dtype=np.int32)

    def one_q_block(carry, row):
        q_tile, _, _, _, q_block, row_visits = row

        def one_kv_block(inner, operands):
            dq, bias_grad = inner
            k_tile, v_tile, dk, dv, kv_block, visit = operands

            def take(state):
                return _tile(call, bias, table.mask, grid, row, (k_tile, v_tile, kv_block), state)

            state = (dq, dk, dv, bias_grad)
            state = take(state) if grid.num_kv == 1 else lax.cond(visit, take, lambda s: s, state)
            dq, dk, dv, bias_grad = state
            return (dq, bias_grad), (dk, dv)

        dk, dv, bias_grad = carry
        zero = jnp.zeros(q_tile.shape, dtype)
        zero = _compat.match_varying(zero, _compat.varying_axes((carry, row)))
        (dq, bias_grad), (dk, dv) = lax.scan(
            one_kv_block, (zero, bias_grad), (k_blocks, v_blocks, dk, dv, kv_index, row_visits)
        )
        del q_block
        return (dk, dv, bias_grad), dq

    start = (jnp.zeros(k_blocks.shape, dtype), jnp.zeros(v_blocks.shape, dtype), bias_grad)
    start = _compat.match_varying(start, _compat.varying_axes((q, k, v, dout, bias)))
    (dk, dv, bias_grad), dq = lax.scan(one_q_block, start, rows)
    if bias_grad is not None:
        bias_grad = bias_grad[tuple(slice(0, n) for n in bias.shape)]
    dq = (chunks.merge_q(dq, spec) * spec.scale).astype(q.dtype)
    dk = (chunks.merge_kv(dk, spec) * spec.scale).astype(k.dtype)
    return dq, dk, chunks.merge_kv(dv, spec).astype(v.dtype), bias_grad


def _padded_like(bias, grid, dtype):
    sizes = (grid.num_q * grid.block_q, grid.num_kv * grid.block_kv)
    inner = (1 if n == 1 else size for n, size in zip(bias.shape[2:], sizes, strict=True))
    return jnp.zeros((*bias.shape[:2], *inner), dtype)


def _tile(call: Call, bias, mask, grid, row, column, state):
    """One tile's share of every gradient."""
    spec = call.spec
    q_tile, dout_tile, lse_tile, delta_tile, q_block, _ = row
    k_tile, v_tile, kv_block = column
    dq, dk, dv, bias_grad = state
    qk = chunks.einsum("bhgqd,bhkd->bhgqk", q_tile, k_tile, spec)
    bias_tile = chunks.bias_tile(bias, spec, grid, q_block, kv_block)
    x, factor = tile_math.logits(qk, spec.scale, spec.soft_cap, bias_tile)
    tanh = None if spec.soft_cap is None else x
    x = jnp.where(chunks.visible(mask, spec, grid, q_block, kv_block), x, -jnp.inf)
    p = chunks.over_heads(lambda tile, lse: tile_math.probabilities(tile, factor, lse))(x, lse_tile)
    dp = chunks.einsum("bhgqd,bhkd->bhgqk", dout_tile, v_tile, spec)
    ds = chunks.over_heads(tile_math.dlogits)(p, dp, delta_tile, tanh)
    low = ds.astype(q_tile.dtype)
    dv = dv + chunks.einsum("bhgqk,bhgqd->bhkd", p.astype(q_tile.dtype), dout_tile, spec)
    dk = dk + chunks.einsum("bhgqk,bhgqd->bhkd", low, q_tile, spec)
    dq = dq + chunks.einsum("bhgqk,bhkd->bhgqd", low, k_tile, spec)
    if bias_grad is not None:
        bias_grad = _add_to_bias(bias_grad, ds, spec, grid, q_block, kv_block)
    return dq, dk, dv, bias_grad


def _add_to_bias(bias_grad, ds, spec, grid, q_block, kv_block):
    ds = ds.reshape(spec.batch, spec.q_heads, grid.block_q, grid.block_kv)
    summed = tuple(axis for axis in range(4) if bias_grad.shape[axis] == 1)
    ds = ds.sum(axis=summed, keepdims=True)
    zero = jnp.zeros((), np.int32)
    start = (
        zero,
        zero,
        zero if bias_grad.shape[2] == 1 else q_block * np.int32(grid.block_q),
        zero if bias_grad.shape[3] == 1 else kv_block * np.int32(grid.block_kv),
    )
    old = lax.dynamic_slice(bias_grad, start, ds.shape)
    return lax.dynamic_update_slice(bias_grad, old + ds, start)
