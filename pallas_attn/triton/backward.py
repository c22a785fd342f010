"""The backward kernels: one for dq, one for dk and dv.

No atomics, so both are bit-equal from run to run.

    dq      grid: (q blocks, q heads, batch); q, dout, lse, delta stay; loops over blocks of keys
            s = q·kᵀ  p = 2^(s - lse)  dp = dout·vᵀ  ds = dlogits(p, dp, delta)  dq += ds·k

    dk, dv  grid: (kv blocks, kv heads, batch); k, v stay; loops over the query heads of the group
            and over blocks of queries, all transposed so that P and dS, fresh from registers, are
            the left operands of the matmuls that consume them and never pass through shared memory:
            sᵀ = k·qᵀ  pᵀ = 2^(sᵀ - lse)  dv += pᵀ·dout  dpᵀ = v·doutᵀ  dk += dsᵀ·q

Both loop first over fully visible blocks without mask code, then over partly visible ones. The sum
over a group is in float32 registers. FlashAttention-2, arXiv 2307.08691, algorithm 2, with its loop
in both orders.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_attn import tile_math
from pallas_attn.call import Call
from pallas_attn.tiles import padded_dim
from pallas_attn.triton import common
from pallas_attn.triton.common import Inputs


def backward_dq(call: Call, inputs: Inputs):
    """Runs the dq kernel.

    Args:
        call: static facts.
        inputs: all of `Inputs` but sinks; visits are the dq kernel's.

    Returns:
        (dq,), dq like q.
    """
    q, block_q = inputs.q, call.tiles.dq.block_q
    grid, q_index, specs = common.query_grid(inputs, block_q)
    row_spec = pl.BlockSpec((None, 1, q.shape[1]), lambda i, h, b: (b, h, 0))
    dout_spec = common.head_block(block_q, inputs.v.shape[-1], q_index)
    specs = specs._replace(dout=dout_spec, lse_log2=row_spec, delta=row_spec)
    return common.launch(
        functools.partial(_dq_kernel, call=call, num_q=grid[0]),
        call,
        call.tiles.dq,
        name="pallas_attn_dq",
        grid=grid,
        inputs=inputs,
        specs=specs,
        outs=[(q.shape, q.dtype, common.head_block(block_q, q.shape[-1], q_index))],
    )


class _Queries(NamedTuple):
    """What stays while dq loops over keys: chunks of q and dout, (lse_log2, delta), first query."""

    q: Any
    dout: Any
    vectors: Any
    start: Any


def _dq_kernel(inputs: Inputs, dq_ref, *, call: Call, num_q: int):
    spec, tiles = call.spec, call.tiles.dq
    q_block = num_q - 1 - pl.program_id(0)
    at = common.rows_of(inputs, pl.program_id(2), pl.program_id(1))
    q_start = q_block * tiles.block_q
    ragged = spec.q_len % tiles.block_q != 0
    rows = common.counted_rows(
        q_start, tiles.block_q, spec.q_len if ragged else None, inputs.mask.q_valid, at.batch
    )
    queries = _Queries(
        q=common.load_rows(inputs.q, None, tiles.block_q, spec.head_dim, rows),
        dout=common.load_rows(inputs.dout, None, tiles.block_q, spec.v_dim, rows),
        vectors=common.load_residuals(
            inputs, np.int32(0), q_start, tiles.block_q, spec.q_len if ragged else None
        ),
        start=q_start,
    )
    take = functools.partial(_dq_take, inputs=inputs, call=call, at=at, queries=queries)
    dq = common.zeros(tiles.block_q, spec.head_dim, inputs.q.dtype)
    dq = common.visit(inputs.visits, at, q_block, take, dq)
    exists = None
    if ragged:
        exists = q_start + lax.broadcasted_iota(jnp.int32, (tiles.block_q, 1), 0) < spec.q_len
    common.store_rows(dq_ref, tuple(x * spec.scale for x in dq), spec.head_dim, exists)


def _dq_take(_, kv_block, dq, partial: bool, *, inputs: Inputs, call: Call, at, queries: _Queries):
    """One block of keys into dq."""
    spec, tiles = call.spec, call.tiles.dq
    kv_start = kv_block * tiles.block_kv
    rows = (
        common.partial_kv_rows(inputs.mask, at, call, kv_start, tiles.block_kv) if partial else None
    )
    k = common.load_rows(inputs.k, kv_start, tiles.block_kv, spec.head_dim, rows)
    v = common.load_rows(inputs.v, kv_start, tiles.block_kv, spec.v_dim, rows)
    lse_log2, delta = queries.vectors
    where = (queries.start, kv_start)
    s, factor = common.tile_logits(inputs, call, tiles, common.dot_chunks(queries.q, k), where, at)
    tanh = None if spec.soft_cap is None else s
    if partial:
        s = jnp.where(common.seen(inputs.mask, at, call, tiles, where), s, -jnp.inf)
    p = tile_math.probabilities(s, factor, lse_log2, exp2=common.exp2_for(call))
    ds = tile_math.dlogits(p, common.dot_chunks(queries.dout, v), delta, tanh)
    return common.add_dots(dq, ds.astype(inputs.k.dtype), k)


def backward_dkv(call: Call, inputs: Inputs):
    """Runs the dk and dv kernel; above 128 channels once for each: the sums must fit the registers.

    Args:
        call: static facts.
        inputs: all of `Inputs` but sinks; visits are the dkv kernel's.

    Returns:
        dk like k, dv like v.
    """
    if max(call.spec.head_dim, call.spec.v_dim) <= 128:
        return _backward_dkv(call, inputs, ("dk", "dv"))
    return (*_backward_dkv(call, inputs, ("dk",)), *_backward_dkv(call, inputs, ("dv",)))


def _backward_dkv(call: Call, inputs: Inputs, parts: tuple[str, ...]):
    q, k, v = inputs.q, inputs.k, inputs.v
    (batch, q_len, q_heads, head_dim), (kv_len, kv_heads, v_dim) = q.shape, v.shape[1:]
    group, block_kv = q_heads // kv_heads, call.tiles.dkv.block_kv

    def kv_index(j, h, b):
        return (b, j, h, 0)

    def group_block(rows, width):
        shape = (None, rows, group, width)
        return pl.BlockSpec(shape, lambda j, h, b: (b, 0, h, 0))

    row_spec = pl.BlockSpec((None, group, q_len), lambda j, h, b: (b, h, 0))
    k_spec = common.head_block(block_kv, head_dim, kv_index)
    v_spec = common.head_block(block_kv, v_dim, kv_index)
    specs = Inputs(
        q=group_block(q_len, padded_dim(head_dim)),
        k=k_spec,
        v=v_spec,
        dout=group_block(q_len, padded_dim(v_dim)),
        lse_log2=row_spec,
        delta=row_spec,
        **common.shared_specs(inputs),
    )
    outs = {"dk": (k.shape, k.dtype, k_spec), "dv": (v.shape, v.dtype, v_spec)}
    return common.launch(
        functools.partial(_dkv_kernel, call=call, parts=parts),
        call,
        call.tiles.dkv,
        name="pallas_attn_" + "_".join(parts),
        grid=(pl.cdiv(kv_len, block_kv), kv_heads, batch),
        inputs=inputs,
        specs=specs,
        outs=[outs[part] for part in parts],
    )


class _Keys(NamedTuple):
    """What stays while dk and dv loop over queries: chunks of k and v (for dk only), first key."""

    k: Any
    v: Any
    start: Any


class _Heads(NamedTuple):
    """Whose queries are taken: batch, first head of the loop, and its place in the group."""

    batch: Any
    first: Any
    base: Any = 0


def _dkv_kernel(inputs: Inputs, *out_refs, call: Call, parts: tuple[str, ...]):
    spec, tiles = call.spec, call.tiles.dkv
    kv_block, kv_head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_start = kv_block * tiles.block_kv
    ragged = spec.kv_len % tiles.block_kv != 0
    at = common.rows_of(inputs, batch, kv_head * spec.group)
    rows = common.counted_rows(
        kv_start, tiles.block_kv, spec.kv_len if ragged else None, inputs.mask.kv_valid, at.batch
    )
    k = common.load_rows(inputs.k, None, tiles.block_kv, spec.head_dim, rows)
    v = (
        common.load_rows(inputs.v, None, tiles.block_kv, spec.v_dim, rows)
        if "dk" in parts
        else None
    )

    dims = {"dk": spec.head_dim, "dv": spec.v_dim}
    sums = {part: common.zeros(tiles.block_kv, dims[part], inputs.q.dtype) for part in parts}
    keys = _Keys(k, v, kv_start)
    take = functools.partial(_dkv_take, inputs=inputs, call=call, keys=keys)
    first_head = kv_head * spec.group
    if spec.group == 1 or inputs.visits.table.shape[1] == 1:
        take = functools.partial(take, heads=_Heads(batch, first_head))
        sums = common.visit(inputs.visits, at, kv_block, take, sums, repeat=spec.group)
    else:

        def one_head(member, sums):
            head = common.rows_of(inputs, batch, first_head + member)
            one = functools.partial(take, heads=_Heads(batch, first_head + member, member))
            return common.visit(inputs.visits, head, kv_block, one, sums)

        sums = lax.fori_loop(jnp.int32(0), jnp.int32(spec.group), one_head, sums)
    exists = None
    if ragged:
        exists = kv_start + lax.broadcasted_iota(jnp.int32, (tiles.block_kv, 1), 0) < spec.kv_len
    for part, ref in zip(parts, out_refs, strict=True):
        scale = spec.scale if part == "dk" else 1.0
        common.store_rows(ref, tuple(x * scale for x in sums[part]), dims[part], exists)


def _dkv_take(
    member, q_block, sums, partial: bool, *, inputs: Inputs, call: Call, keys: _Keys, heads: _Heads
):
    """One block of queries of one head into dk and dv, or the one of them that is asked for."""
    spec, tiles = call.spec, call.tiles.dkv
    at = common.rows_of(inputs, heads.batch, heads.first + member)
    member = member + heads.base
    q_start = q_block * tiles.block_q
    rows, length = None, None
    if partial:
        length = spec.q_len if spec.q_len % tiles.block_q else None
        rows = common.counted_rows(q_start, tiles.block_q, length, inputs.mask.q_valid, at.batch)
    q = common.load_rows(inputs.q, q_start, tiles.block_q, spec.head_dim, rows, member)
    lse_log2, delta = common.load_residuals(inputs, member, q_start, tiles.block_q, length)
    dout = common.load_rows(inputs.dout, q_start, tiles.block_q, spec.v_dim, rows, member)
    where = (q_start, keys.start)
    s, factor = common.tile_logits(
        inputs, call, tiles, common.dot_chunks(keys.k, q), where, at, transposed=True
    )
    tanh = None if spec.soft_cap is None else s
    if partial:
        s = jnp.where(
            common.seen(inputs.mask, at, call, tiles, where, transposed=True), s, -jnp.inf
        )
    p = tile_math.probabilities(s, factor, lse_log2, axis=1, exp2=common.exp2_for(call))
    out = {}
    if "dv" in sums:
        out["dv"] = common.add_dots(sums["dv"], p.astype(inputs.q.dtype), dout)
    if "dk" in sums:
        ds = tile_math.dlogits(p, common.dot_chunks(keys.v, dout), delta, tanh, axis=1)
        out["dk"] = common.add_dots(sums["dk"], ds.astype(inputs.q.dtype), q)
    return out
