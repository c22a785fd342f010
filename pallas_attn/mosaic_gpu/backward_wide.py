"""A consumer of the backward kernel above 128 channels: both share the tile's 64 keys.

Two accumulators of 64 keys x 256 channels are half of all registers, so each warpgroup has one half
of the channels of dk, dv and dq, and the two share the work on p and ds:

    wg 0   sᵀ = k·qᵀ    | pᵀ = 2^(sᵀ·factor - lse) -> shared mem.  |  dq ...  dv += pᵀ·dout
    wg 1   dpᵀ = v·doutᵀ| dsᵀ = pᵀ·(dpᵀ - delta) -> shared memory  |  dq ...  dv += pᵀ·dout
    both   dk += dsᵀ·q and dq = ds·k of the step before, whose products run under the exponentials

dq goes from registers to global memory, by instructions that add four numbers each. With a third
warpgroup, the adder, all of dq is its work:

    wg 0   sᵀ = k·qᵀ    | pᵀ = 2^(sᵀ·factor - lse) -> a slot of ds  |  dv += pᵀ·dout
    wg 1   dpᵀ = v·doutᵀ| dsᵀ = pᵀ·(dpᵀ - delta) -> the same slot   |  dv += pᵀ·dout
    both   dk += dsᵀ·q of the step before, which runs under the exponentials
    adder  for each 64 channels: dq = ds·k -> staged, 32 channels a slot -> added by TMA

which takes that product and the additions out of the chain from s to the next step's s, and gives
q of the step before back at the exponentials already. p needs no place of its own, which is what
dq is staged in: both warpgroups keep p for dv in registers, of which they have the more since the
adder gets by with few, 64 channels at a time. What is left of them at 192 channels holds k (in
warpgroup 1: v), a seventh of what is read and written in shared memory, which bounds this kernel.
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
    half, v_half = plan.dim // WGS, plan.v_dim // WGS
    dtype = smem.k.dtype

    def body(dk_acc, dv_acc):
        count = kernel.steps
        tiles.clear_keys(kernel, 0)
        pl.when(kernel.wg == (0 if plan.adder else 1))(lambda: _no_ds(kernel))
        held = mma.hold(smem.k.at[kernel.wg], plan.held, call=call)

        def step(i, slot):
            _step(kernel, i, slot, dk_acc, dv_acc, held)
            return ring.next_slot(slot, kernel.stages)

        following = lax.fori_loop(jnp.int32(0), count, step, slot)
        plgpu.barrier_wait(_ds_written(kernel, count + 1))

        @pl.when(count > 0)
        def _last():
            _last_step(kernel, count, _before(kernel, following), dk_acc)

        _free_ds(kernel, count + 1)
        return mma.load(dk_acc, 0, call=call), mma.load(dv_acc, 0, call=call), following

    dk, dv, following = pl.run_scoped(
        body, mma.accumulator((UNIT, half), call=call), mma.accumulator((UNIT, v_half), call=call)
    )
    plgpu.barrier_arrive(bars.read)
    plgpu.barrier_wait(bars.read)
    dk = dk * jnp.float32(call.spec.scale)
    smem.k.at[0, :, pl.ds(kernel.wg * half, half)][...] = dk.astype(dtype)
    smem.k.at[1, :, pl.ds(kernel.wg * v_half, v_half)][...] = dv.astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(bars.written)
    return following


def start(kernel: Kernel) -> None:
    """Both slots of ds are free."""
    for slot in range(2):
        _free_ds(kernel, slot)


def _free_ds(kernel: Kernel, i):
    """With an adder: warpgroup 1 needs ds of step `i` no more."""
    if kernel.plan.adder:
        slot = kernel.bars.dq_empty.at[i & 1]
        pl.when(kernel.wg == 1)(lambda: plgpu.barrier_arrive(slot))


def _last_step(kernel: Kernel, count, q_slot, dk_acc):
    """Dk and dq of the last block."""
    _add_dk(kernel, count, q_slot, dk_acc)
    if kernel.plan.adder:
        mma.wait(dk_acc, 0, call=kernel.call)
        plgpu.barrier_arrive(kernel.bars.empty.at[q_slot])
        return
    # The slot is handed back when the products are done with its q.
    _dq(kernel, count, when_dk=lambda: plgpu.barrier_arrive(kernel.bars.empty.at[q_slot]))


def _no_ds(kernel: Kernel):
    """The first step takes dk and dq of a block before it, whose ds is 0."""
    if kernel.plan.adder:
        plgpu.barrier_wait(kernel.bars.dq_empty.at[1])
    _put_ds(kernel, jnp.int32(1), common.tile_of(0.0, kernel.block_q, kernel.call))


def _put_ds(kernel: Kernel, i, ds):
    """Writes ds of step `i`, for all."""
    kernel.smem.ds.at[i & 1][...] = ds.astype(kernel.smem.ds.dtype)
    fence(kernel.call)
    plgpu.barrier_arrive(_ds_written(kernel, i))


def _ds_written(kernel: Kernel, i):
    """The barrier that tells that ds of step `i` is there."""
    return kernel.bars.ds.at[i & 1] if kernel.plan.adder else kernel.bars.ds


def _before(kernel: Kernel, slot):
    return jnp.where(slot == 0, jnp.int32(kernel.stages), slot) - 1


def _step(kernel: Kernel, i, slot, dk_acc, dv_acc, held):
    """One block of queries: its share of dv; dk and dq of the block before."""
    call, smem, bars = kernel.call, kernel.smem, kernel.bars
    v_half = kernel.plan.v_dim // WGS
    plgpu.barrier_wait((bars.clean if kernel.plan.cleans else bars.full).at[slot])
    clean = tiles.clean_queries(kernel, i)
    early = kernel._replace(wg=common.fresh(kernel.wg, call))
    # q of no step before the first may be anything; this step's, times 0, is 0.
    q_slot = jnp.where(i == 0, slot, _before(kernel, slot))

    def scores(acc):
        rows, columns = smem.k.at[early.wg], smem.q.at[early.wg, slot]
        mma.dot_held(acc, held, rows, columns, call=call)
        # ds of the step before is whole.
        plgpu.barrier_wait(_ds_written(kernel, i + 1))
        _add_dk(early, i, q_slot, dk_acc)
        x = mma.load(acc, 1, call=call)
        return lax.cond(
            early.wg == 0,
            lambda: _probabilities(early, i, slot, x, clean),
            lambda: _gradients(early, i, slot, x, clean),
        )

    p = pl.run_scoped(scores, mma.accumulator((UNIT, kernel.block_q), call=call))
    late = kernel._replace(wg=common.fresh(kernel.wg, call))
    dout = smem.q.at[1, slot, :, pl.ds(late.wg * v_half, v_half)]

    def release():
        # dk of the step before is done with its q.
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(bars.empty.at[q_slot]))

    dv = functools.partial(mma.dot, dv_acc, p, dout, call=call, b_rows=clean)
    if kernel.plan.adder:
        mma.wait(dk_acc, 0, call=call)
        release()
        _free_ds(late, i + 1)
        dv()
    else:
        _dq(late, i, dv, release)
    mma.wait(dv_acc, 0, call=call)
    plgpu.barrier_arrive(bars.dout_empty.at[slot])


def _probabilities(kernel: Kernel, i, slot, s, clean):
    """Warpgroup 0: p from s, for both."""
    smem, bars = kernel.smem, kernel.bars
    p, weight = tiles.probabilities(kernel, i, slot, tiles.partial_of(kernel, i), s, 0)
    p, weight = tiles.only_clean(kernel, 0, clean, p, weight)
    dtype = smem.ds.dtype
    p = p.astype(dtype)
    if kernel.plan.adder:
        plgpu.barrier_wait(bars.dq_empty.at[i & 1])
    *others, place = _handed_over(kernel, i)
    for ref in others:
        ref[...] = weight.astype(dtype)
    place[...] = p
    plgpu.barrier_arrive(bars.p)
    return p


def _gradients(kernel: Kernel, i, slot, dp, clean):
    """Warpgroup 1: ds from p and dp, for both; returns p."""
    plgpu.barrier_wait(kernel.bars.p)
    parts = [
        x[...] if kernel.call.interpret else plgpu.load(x, layout=common.TILE)
        for x in _handed_over(kernel, i)
    ]
    ds = tiles.dlogits(kernel, slot, parts[0].astype(jnp.float32), dp)
    (ds,) = tiles.only_clean(kernel, 0, clean, ds)
    _put_ds(kernel, i, ds)
    return parts[-1]


def _handed_over(kernel: Kernel, i):
    """Where warpgroup 1 finds what dp is to be multiplied with, where it is not p, then p.

    With an adder p stands where ds of its step will: the warp that reads rows of p writes those of
    ds.
    """
    smem = kernel.smem
    places = [] if smem.p is None else [smem.p.at[n] for n in reversed(range(smem.p.shape[0]))]
    return [*places, smem.ds.at[i & 1]] if kernel.plan.adder else places


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
        pl.when(i > 0)(lambda: backward_add.add(kernel, i - 1, dq, kernel.wg))

    pl.run_scoped(body, mma.accumulator((kernel.block_q, half), call=call))


# The adder. These barriers are others with it than what `backward_producer` says of them. `ds` has
# two slots, which in turn hold ds of no step, then p and after it ds of each step, over all tiles.
# `dq_empty` of a slot: nobody needs the ds in it. The adder arrives there when its last product of
# a step is done, warpgroup 1 when its dk is, each once for every ds and once before the first. Only
# warpgroup 0 waits there, for as many phases, before it writes p or the ds of no step; no phase
# ends twice meanwhile, since both arrive for a ds that is written after that wait. It has itself
# done with its dk of the slot two steps later. `ds` of a slot so has its next phase only after all
# three have waited for this one. At `read` the adder says that k is not needed any more; at
# `stored`, that the words on the tile are not. It waits for nobody but those that write ds, for
# what it sent before, and, with `deterministic`, for its turn.


def start_adder(kernel: Kernel) -> None:
    """Both slots of ds are free."""
    for slot in range(2):
        plgpu.barrier_arrive(kernel.bars.dq_empty.at[slot])


def add_dq(kernel: Kernel, slot):
    """What the adder does of one tile."""
    bars = kernel.bars
    tiles.clear_keys(kernel, 0)
    plgpu.barrier_wait(bars.ds.at[1])
    plgpu.barrier_arrive(bars.dq_empty.at[1])
    lax.fori_loop(jnp.int32(0), kernel.steps, lambda i, _: _add_step(kernel, i), None)
    plgpu.barrier_arrive(bars.read)
    plgpu.barrier_arrive(bars.stored)
    return slot


def _add_step(kernel: Kernel, i):
    """Dq of step `i`, 64 channels after the other."""
    smem, call, parts = kernel.smem, kernel.call, kernel.plan.dim // UNIT
    plgpu.barrier_wait(kernel.bars.ds.at[i & 1])
    clean = tiles.clean_keys(kernel, 0)

    # A loop that nobody can unroll: two accumulators at once do not fit.
    def add_part(part, _):
        def body(acc):
            k = smem.k.at[0, :, pl.ds(part * UNIT, UNIT)]
            mma.dot(acc, smem.ds.at[i & 1], k, call=call, transpose_a=True, b_rows=clean)
            dq = mma.load(acc, 0, call=call)
            pl.when(part == parts - 1)(lambda: plgpu.barrier_arrive(kernel.bars.dq_empty.at[i & 1]))
            backward_add.stage(kernel, i, dq, part)

        pl.run_scoped(body, mma.accumulator((kernel.block_q, UNIT), call=call))

    backward_add.wait_turn(kernel, i, 0)
    lax.fori_loop(jnp.int32(0), common.fresh(jnp.int32(parts), call), add_part, None)
    backward_add.end_turn(kernel, i)


__all__ = ["add_dq", "compute", "start_adder"]
