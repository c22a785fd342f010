"""A consumer of the backward kernel above 128 channels: both share the tile's 64 keys.

Two accumulators of 64 keys x 256 channels are half of all registers, so each warpgroup has one half
of the channels of dk, dv and dq, and the two share the work on p and ds:

    wg 0   sᵀ = k·qᵀ - lse        | pᵀ = 2^sᵀ -> shared memory  |  dq ...  dv += pᵀ·dout
    wg 1   dpᵀ = v·doutᵀ - delta  | dsᵀ = pᵀ·dpᵀ -> shared mem. |  dq ...  dv += pᵀ·dout
    both   dk += dsᵀ·q and dq = ds·k of the step before, whose products run under the exponentials

dq goes from registers to global memory, by instructions that add two numbers each: there is no
shared memory left to stage it.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic_gpu import backward_add, common, mma, ring
from pallas_attn.mosaic_gpu import backward_tile as tiles
from pallas_attn.mosaic_gpu.backward_parts import COUNT, WGS, Kernel, factor_of, fence
from pallas_attn.mosaic_gpu.common import UNIT


def compute(kernel: Kernel) -> None:
    """What a consumer warpgroup does."""
    call, plan, smem, bars = kernel.call, kernel.plan, kernel.smem, kernel.bars
    half, v_half = plan.dim // WGS, plan.v_dim // WGS
    dtype = smem.k.dtype

    def body(dk_acc, dv_acc):
        plgpu.barrier_wait(bars.keys)
        count = smem.words[kernel.fact(COUNT)]
        tiles.clear_keys(kernel, 0)
        pl.when(kernel.wg == 1)(lambda: _no_ds(kernel))

        def step(i, slot):
            _step(kernel, i, slot, dk_acc, dv_acc)
            return ring.next_slot(slot, kernel.stages)

        slot = lax.fori_loop(jnp.int32(0), count, step, jnp.int32(0))
        plgpu.barrier_wait(bars.ds)

        @pl.when(count > 0)
        def _last():
            _add_dk(kernel, count, _before(kernel, slot), dk_acc)
            _dq(kernel, count)

        return mma.load(dk_acc, 0, call=call), mma.load(dv_acc, 0, call=call)

    dk, dv = pl.run_scoped(
        body, mma.accumulator((UNIT, half), call=call), mma.accumulator((UNIT, v_half), call=call)
    )
    plgpu.barrier_arrive(bars.read)
    plgpu.barrier_wait(bars.read)
    dk = dk * jnp.float32(call.spec.scale)
    smem.k.at[0, :, pl.ds(kernel.wg * half, half)][...] = dk.astype(dtype)
    smem.k.at[1, :, pl.ds(kernel.wg * v_half, v_half)][...] = dv.astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(bars.written)


def _no_ds(kernel: Kernel):
    """The first step takes dk and dq of a block before it, whose ds is 0."""
    zero = common.tile_of(0.0, kernel.block_q, kernel.call)
    kernel.smem.ds.at[1][...] = zero.astype(kernel.smem.ds.dtype)
    fence(kernel.call)
    plgpu.barrier_arrive(kernel.bars.ds)


def _before(kernel: Kernel, slot):
    return jnp.where(slot == 0, jnp.int32(kernel.stages), slot) - 1


def _step(kernel: Kernel, i, slot, dk_acc, dv_acc):
    """One block of queries: its share of dv; dk and dq of the block before."""
    call, smem, bars = kernel.call, kernel.smem, kernel.bars
    v_half = kernel.plan.v_dim // WGS
    plgpu.barrier_wait(bars.full.at[slot])
    clean = tiles.clear_queries(kernel, i, slot)
    early = kernel._replace(wg=common.fresh(kernel.wg, call))
    # q of no step before the first may be anything; this step's, times 0, is 0.
    q_slot = jnp.where(i == 0, slot, _before(kernel, slot))

    def scores(acc):
        if factor_of(call) is not None:
            acc[...] = tiles.row_start(early, slot, early.wg)
        else:
            acc[...] = tiles.row_start(early, slot, 1) * early.wg.astype(jnp.float32)
        rows, columns = smem.k.at[early.wg], smem.q.at[early.wg, slot]
        mma.dot(acc, rows, columns, call=call, transpose_b=True)
        # ds of the step before is whole.
        plgpu.barrier_wait(bars.ds)
        _add_dk(early, i, q_slot, dk_acc)
        x = mma.load(acc, 1, call=call)
        return lax.cond(
            early.wg == 0,
            lambda: _probabilities(early, i, slot, x, clean),
            lambda: _gradients(early, i, x, clean),
        )

    p = pl.run_scoped(scores, mma.accumulator((UNIT, kernel.block_q), call=call))
    late = kernel._replace(wg=common.fresh(kernel.wg, call))
    dout = smem.q.at[1, slot, :, pl.ds(late.wg * v_half, v_half)]

    def release():
        # dk of the step before is done with its q.
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(bars.empty.at[q_slot]))

    dv = functools.partial(mma.dot, dv_acc, p, dout, call=call, b_rows=clean)
    _dq(late, i, dv, release)
    mma.wait(dv_acc, 0, call=call)
    plgpu.barrier_arrive(bars.dout_empty.at[slot])


def _probabilities(kernel: Kernel, i, slot, s, clean):
    """Warpgroup 0: p from s, for both."""
    smem, bars = kernel.smem, kernel.bars
    p, weight = tiles.probabilities(kernel, i, slot, s, 0)
    p, weight = tiles.only_clean(kernel, 0, clean, p, weight)
    p = p.astype(smem.p.dtype)
    smem.p.at[0][...] = p
    if smem.p.shape[0] > 1:
        smem.p.at[1][...] = weight.astype(smem.p.dtype)
    plgpu.barrier_arrive(bars.p)
    return p


def _gradients(kernel: Kernel, i, dp, clean):
    """Warpgroup 1: ds from p and dp, for both; returns p."""
    smem, bars = kernel.smem, kernel.bars
    (dp,) = tiles.only_clean(kernel, 0, clean, dp)
    plgpu.barrier_wait(bars.p)
    parts = [smem.p.at[n] for n in range(smem.p.shape[0])]
    parts = [x[...] if kernel.call.interpret else plgpu.load(x, layout=common.TILE) for x in parts]
    ds = parts[-1].astype(jnp.float32) * dp
    smem.ds.at[i & 1][...] = ds.astype(smem.ds.dtype)
    fence(kernel.call)
    plgpu.barrier_arrive(bars.ds)
    return parts[0]


def _add_dk(kernel: Kernel, i, q_slot, dk_acc):
    """Starts dk += dsᵀ·q of the step before `i`."""
    smem, half = kernel.smem, kernel.plan.dim // WGS
    q = smem.q.at[0, q_slot, :, pl.ds(kernel.wg * half, half)]
    clean = tiles.clean_queries(kernel, jnp.maximum(i - 1, 0))
    mma.dot(dk_acc, smem.ds.at[(i + 1) & 1], q, call=kernel.call, b_rows=clean)


def _dq(kernel: Kernel, i, product=None, when_dk=None):
    """This warpgroup's half of dq of the step before `i`, into global memory.

    Args:
        kernel: with the step's references.
        i: the step.
        product: starts one more product, which runs while dq is read.
        when_dk: called when products started earlier are done.
    """
    smem, call, half = kernel.smem, kernel.call, kernel.plan.dim // WGS

    def body(acc):
        k = smem.k.at[0, :, pl.ds(kernel.wg * half, half)]
        clean = tiles.clean_keys(kernel, 0)
        mma.dot(acc, smem.ds.at[(i + 1) & 1], k, call=call, transpose_a=True, b_rows=clean)
        if product is not None:
            product()
        dq = mma.load(acc, 0 if product is None else 1, call=call)
        if when_dk is not None:
            when_dk()
        pl.when(i > 0)(lambda: backward_add.add(kernel, i - 1, dq))

    pl.run_scoped(body, mma.accumulator((kernel.block_q, half), call=call))


__all__ = ["compute"]
