"""The forward kernel.

    grid: (q blocks, q heads, batch), q blocks last to first so that causal's longest come first

    one instance, one block of queries:
        q            loaded once, in registers or shared memory
        full loop    for each fully visible block of keys:        no mask code, no bounds checks
        partial loop for each partly visible block of keys:       bounds, padding and mask
            k -> s = q·kᵀ -> logits -> (mask) -> online_softmax -> acc = acc·correction + p·v
        out = acc·factor, lse                                     stored once

Loads of the next blocks overlap the matmuls (num_stages deep, by Triton's pipeliner).
FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_attn import tile_math
from pallas_attn.call import Call
from pallas_attn.triton import common
from pallas_attn.triton.common import Inputs


def forward(call: Call, inputs: Inputs):
    """Runs the forward kernel.

    Args:
        call: static facts.
        inputs: q, k, v, visits, mask, bias, sinks, origin.

    Returns:
        out [batch, q_len, q_heads, v_dim] in q's dtype; lse float32 [batch, q_heads, q_len].
    """
    block_q, v_dim = call.tiles.fwd.block_q, inputs.v.shape[-1]
    batch, q_len, q_heads, _ = inputs.q.shape
    grid, q_index, specs = common.query_grid(inputs, block_q)
    lse_spec = pl.BlockSpec((None, None, block_q), lambda i, h, b: (b, h, grid[0] - 1 - i))
    out_spec = common.head_block(block_q, v_dim, q_index)
    return common.launch(
        functools.partial(_kernel, call=call, num_q=grid[0]),
        call,
        call.tiles.fwd,
        name="pallas_attn_fwd",
        grid=grid,
        inputs=inputs,
        specs=specs,
        outs=[
            ((batch, q_len, q_heads, v_dim), inputs.q.dtype, out_spec),
            ((batch, q_heads, q_len), jnp.float32, lse_spec),
        ],
    )


def _kernel(inputs: Inputs, out_ref, lse_ref, *, call: Call, num_q: int):
    spec, tiles = call.spec, call.tiles.fwd
    q_block = num_q - 1 - pl.program_id(0)
    at = common.rows_of(inputs, pl.program_id(2), pl.program_id(1))
    q_start = q_block * tiles.block_q
    ragged = spec.q_len % tiles.block_q != 0
    rows = common.counted_rows(
        q_start, tiles.block_q, spec.q_len if ragged else None, inputs.mask.q_valid, at.batch
    )
    q = common.load_rows(inputs.q, None, tiles.block_q, spec.head_dim, rows)
    take = functools.partial(_take, inputs=inputs, call=call, at=at, q=q, q_start=q_start)
    carry = (
        jnp.full((tiles.block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((tiles.block_q,), jnp.float32),
        common.zeros(tiles.block_q, spec.v_dim, inputs.v.dtype),
    )
    row_max, row_sum, acc = common.visit(inputs.visits, at, q_block, take, carry)
    sink = None if inputs.sinks is None else inputs.sinks[pl.program_id(1)].astype(jnp.float32)
    factor, lse = tile_math.finalize(row_max, row_sum, sink)
    exists = None
    if ragged:
        exists = q_start + lax.broadcasted_iota(jnp.int32, (tiles.block_q, 1), 0) < spec.q_len
    out = tuple(x * tile_math.widen(factor, x.shape) for x in acc)
    common.store_rows(out_ref, out, spec.v_dim, exists)
    exists = None if exists is None else exists.reshape(tiles.block_q)
    pltriton.store(lse_ref, lse, mask=exists)


def _take(_, kv_block, carry, partial: bool, *, inputs: Inputs, call: Call, at, q, q_start):
    """One block of keys and values into the running softmax."""
    spec, tiles = call.spec, call.tiles.fwd
    row_max, row_sum, acc = carry
    kv_start = kv_block * tiles.block_kv
    k_rows = v_rows = None
    if partial:
        block = (inputs.mask, at, call, kv_start, tiles.block_kv)
        k_rows = common.partial_kv_rows(*block, padding=False)
        v_rows = common.partial_kv_rows(*block)
    k = common.load_rows(inputs.k, kv_start, tiles.block_kv, spec.head_dim, k_rows)
    s, factor = common.tile_logits(
        inputs, call, tiles, common.dot_chunks(q, k), (q_start, kv_start), at
    )
    if partial:
        seen = common.seen(inputs.mask, at, call, tiles, (q_start, kv_start))
        s = jnp.where(seen, s, -jnp.inf)
    row_max, row_sum, correction, p = tile_math.online_softmax(
        row_max, row_sum, s, factor,
        guard=partial or inputs.bias is not None, exp2=common.exp2_for(call),
    )  # fmt: skip
    v = common.load_rows(inputs.v, kv_start, tiles.block_kv, spec.v_dim, v_rows)
    acc = tuple(x * tile_math.widen(correction, x.shape) for x in acc)
    return row_max, row_sum, common.add_dots(acc, p.astype(inputs.v.dtype), v)
