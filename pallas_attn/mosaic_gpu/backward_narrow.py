"""A consumer of the backward kernel up to 128 channels: 64 of the tile's 128 keys are its own.

    wait full
    sᵀ = k·qᵀ                  dpᵀ = v·doutᵀ
    (mask, partly visible blocks only)
    pᵀ = 2^(sᵀ·factor - lse)   dsᵀ = pᵀ·(dpᵀ - delta) -> shared memory
    dv += pᵀ·dout      dq of the step before = ds·k, half of it      dk += dsᵀ·q

All is transposed, so that pᵀ and dsᵀ, fresh from registers, are the left operands of the products
that consume them; only ds crosses between the warpgroups. dq of a step is computed one step later
(`ds` has two slots), so that nobody waits for the other's ds.

What bounds it is shared memory: with 128 channels, operands, ds and dq take 1.10 times as long
there as the products take. Hence half of v stays in registers, as the left operand of dpᵀ, which
makes all 6 % faster; hence how dq is staged; and lse and delta are read when s and dp have come,
since earlier the reads stand in line with the products' operands.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic_gpu import backward_add, common, mma, ring
from pallas_attn.mosaic_gpu import backward_tile as tiles
from pallas_attn.mosaic_gpu.backward_parts import WGS, Kernel, fence
from pallas_attn.mosaic_gpu.common import UNIT


def compute(kernel: Kernel, slot):
    """What a consumer warpgroup does of one tile; returns the slot of the next."""
    call, plan, smem, bars = kernel.call, kernel.plan, kernel.smem, kernel.bars
    dtype = smem.k.dtype

    def body(dk_acc, dv_acc):
        count = kernel.steps
        tiles.clear_keys(kernel, kernel.wg)
        # The first step computes dq of a block before it, whose ds is 0.
        _put_ds(kernel, 1, common.tile_of(0.0, kernel.block_q, call).astype(dtype))
        fence(call)
        plgpu.barrier_arrive(bars.ds)
        held = mma.hold(smem.v.at[kernel.wg], plan.held, call=call)

        def step(i, slot):
            _step(kernel, i, slot, dk_acc, dv_acc, held)
            return ring.next_slot(slot, kernel.stages)

        following = lax.fori_loop(jnp.int32(0), count, step, slot)
        plgpu.barrier_wait(bars.ds)

        @pl.when(count > 0)
        def _last():
            def last(dq_acc):
                _issue_dq(kernel, dq_acc, (count + 1) & 1)
                _put_dq(kernel, mma.load(dq_acc, 0, call=call))

            pl.run_scoped(last, _dq_accumulator(kernel))

        return mma.load(dk_acc, 0, call=call), mma.load(dv_acc, 0, call=call), following

    dk, dv, following = pl.run_scoped(
        body,
        mma.accumulator((UNIT, plan.dim), call=call),
        mma.accumulator((UNIT, plan.v_dim), call=call),
    )
    plgpu.barrier_arrive(bars.read)
    plgpu.barrier_wait(bars.read)
    smem.v.at[kernel.wg][...] = dv.astype(dtype)
    smem.k.at[kernel.wg][...] = (dk * jnp.float32(call.spec.scale)).astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(bars.written)
    return following


def _step(kernel: Kernel, i, slot, dk_acc, dv_acc, held):
    """One block of queries: its share of dk and dv, and dq of the block before.

    `held`: the first channels of v.
    """
    call, smem, bars = kernel.call, kernel.smem, kernel.bars
    shape = UNIT, kernel.block_q
    plgpu.barrier_wait((bars.clean if kernel.plan.cleans else bars.full).at[slot])
    early = kernel._replace(wg=common.fresh(kernel.wg, call))
    clean = tiles.clean_queries(kernel, i)
    p, ds = pl.run_scoped(
        functools.partial(_probabilities, early, i, slot, clean, held),
        mma.accumulator(shape, call=call),
        mma.accumulator(shape, call=call),
    )
    _put_ds(early, i & 1, ds)
    late = kernel._replace(wg=common.fresh(kernel.wg, call))

    def products(dq_acc):
        mma.dot(dv_acc, p, smem.dout.at[slot], call=call, b_rows=clean)
        _issue_dq(late, dq_acc, (i + 1) & 1)
        mma.dot(dk_acc, ds, smem.q.at[slot], call=call, b_rows=clean)
        _put_dq(late, mma.load(dq_acc, 1, call=call))
        plgpu.barrier_arrive(bars.ds)

    pl.run_scoped(products, _dq_accumulator(kernel))
    mma.wait(dk_acc, 0, call=call)
    plgpu.barrier_arrive(bars.empty.at[slot])


def _probabilities(kernel: Kernel, i, slot, clean, held, s_acc, dp_acc):
    """pᵀ and dsᵀ of a block, [64 keys, block_q], in the operands' dtype."""
    call, smem, wg = kernel.call, kernel.smem, kernel.wg
    # The maths of a cap leave no registers for dp, which then is computed after them.
    capped = call.spec.soft_cap is not None
    mma.dot(s_acc, smem.k.at[wg], smem.q.at[slot], call=call, transpose_b=True)
    if not capped:
        mma.dot_held(dp_acc, held, smem.v.at[wg], smem.dout.at[slot], call=call)
    # Read here, it is not waited for after s.
    partial = tiles.partial_of(kernel, i)
    s = mma.load(s_acc, 0 if capped else 1, call=call)
    p, weight = tiles.probabilities(kernel, i, slot, partial, s, wg * UNIT)
    p, weight = tiles.only_clean(kernel, wg, clean, p, weight)
    p = p.astype(smem.k.dtype)
    weight, p = lax.optimization_barrier((weight, p))
    if capped:
        mma.dot_held(dp_acc, held, smem.v.at[common.fresh(wg, call)], smem.dout.at[slot], call=call)
    # ds of the step before is whole, and nobody reads the one before that. Waiting here keeps the
    # compiler from moving the exponentials behind the wait for dp.
    plgpu.barrier_wait(kernel.bars.ds)
    ds = tiles.dlogits(kernel, slot, weight, mma.load(dp_acc, 0, call=call))
    (ds,) = tiles.only_clean(kernel, wg, clean, ds)
    return p, ds.astype(smem.k.dtype)


def _put_ds(kernel: Kernel, slot, ds):
    smem, wg = kernel.smem, kernel.wg
    if kernel.plan.by_rows:
        for half in range(WGS):
            smem.ds.at[slot, wg, half][...] = ds[:, half * UNIT : (half + 1) * UNIT]
    else:
        smem.ds.at[slot, wg][...] = ds


def _issue_dq(kernel: Kernel, dq_acc, slot):
    """Starts this warpgroup's half of dq = ds·k, over all keys of the tile."""
    smem, plan, wg, call = kernel.smem, kernel.plan, kernel.wg, kernel.call
    half = plan.dim // WGS
    for part in range(WGS):
        if plan.by_rows:
            ds, k = smem.ds.at[slot, part, wg], smem.k.at[part]
        else:
            ds, k = smem.ds.at[slot, part], smem.k.at[part, :, pl.ds(wg * half, half)]
        clean = tiles.clean_keys(kernel, part)
        mma.dot(dq_acc, ds, k, call=call, transpose_a=True, b_rows=clean)


def _dq_accumulator(kernel: Kernel):
    plan = kernel.plan
    return mma.accumulator((UNIT, plan.dim if plan.by_rows else plan.dim // WGS), call=kernel.call)


def _put_dq(kernel: Kernel, dq):
    """Hands this warpgroup's half of dq of the step before on."""
    wg, bars = kernel.wg, kernel.bars
    plgpu.barrier_wait(bars.dq_empty.at[wg])
    backward_add.put(kernel.smem.dq.at[wg], dq, call=kernel.call)
    fence(kernel.call)  # of ds too
    plgpu.barrier_arrive(bars.dq_full.at[wg])


__all__ = ["compute"]
