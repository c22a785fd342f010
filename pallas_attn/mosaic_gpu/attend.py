"""What a Hopper kernel that streams keys does with them: the consumers, and the producer's order.

The forward kernel and the serving kernel differ in where q, k and v lie, in what a warpgroup's rows
are, and in how out is stored. What comes between is here:

    producer    k of the first block; q; then v of a block behind k of the next
                    wait empty -> TMA -> full             (a ring of num_stages slots)
    consumer    wait q; for each block of the tile, in step with the producer:
                    not seen by these 64 rows:  release the slots
                    else  s = q·kᵀ -> logits -> (mask, partly visible blocks only)
                          -> lazy_softmax -> (acc rescaled, if a maximum grew) -> acc += p·v

Every consumer waits for and releases the slots of every block of its tile exactly once, whether its
rows see the block or not: so slot n of k and of v is filled and emptied once a lap, and the phases
of its two barriers stay those of the producer's and of every consumer's own counting.

Consumers take turns (named barriers) at the blocks that all of them see: the one whose turn it is
issues its matmuls, so that the softmax of one runs under the matmuls of the others:

    wg 0   S0 PV0 | softmax ....... | S0 PV0 | softmax ...
    wg 1          | S1 PV1 | softmax ....... | S1 PV1 | ...
    wg 2                   | S2 PV2 | softmax ....... | ...

With `overlap`, a consumer also issues s of the next block before p·v of this one, and its softmax
runs under that product. FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2; the lazy rescale
is FlashAttention-4's.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_attn import tile_math
from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import common, masking, mma, ring, schedule
from pallas_attn.mosaic_gpu.common import CHUNK, UNIT


class Scratch(NamedTuple):
    """Shared memory: slots of q (one a consumer), k, v, where out is staged if it is, and what
    consumers are told of their tiles, int32 [2, consumers, fields].
    """

    q: ring.Slots
    k: ring.Slots
    v: ring.Slots
    out: Any
    work: Any


class Kernel(NamedTuple):
    """What all parts of the kernel see: static facts, references, and this warpgroup's number.

    `plan` is the kernel's own kind of `schedule.Team`.
    """

    call: Call
    plan: Any
    inputs: Any
    smem: Scratch
    wg: Any

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return self.call.tiles.fwd.block_kv

    @property
    def stages(self) -> int:
        """Slots of k and of v."""
        return self.call.tiles.fwd.num_stages


def feed(kernel: Kernel, count, done, load_q, source_of) -> Any:
    """Producer: loads one tile's q, then k and v block by block.

    Args:
        kernel: the kernel.
        count: blocks of the tile.
        done: blocks of the tiles before.
        load_q: loads q of all consumers.
        source_of: ("k" or "v", n) -> where the n-th block lies, as `ring.load` takes it. What that
            reads it reads before the wait for a slot.

    Returns:
        `done` of the next tile.
    """

    def load(name, n):
        source, number = source_of(name, n), done + n
        slot = lax.rem(number, jnp.int32(kernel.stages))
        ring.load(getattr(kernel.smem, name), slot, source, used=number >= kernel.stages)

    # The first k before q: its slot is free earlier.
    pl.when(count > 0)(lambda: load("k", jnp.int32(0)))
    load_q()

    # v is needed one softmax later than k, and so is loaded one block later.
    def step(n, _):
        pl.when(n < count)(lambda: load("k", n))
        load("v", n - 1)

    lax.fori_loop(jnp.int32(1), count + 1, step, None)
    return done + count


def compute_tile(kernel: Kernel, work: schedule.Work, slot, finish):
    """Consumer: attention of this warpgroup's 64 rows of a tile.

    Args:
        kernel: the kernel.
        work: this warpgroup's share; to be read once q is there.
        slot: of the tile's first block.
        finish: (kernel, work, acc, row_max, row_sum): stores the rows.

    Returns:
        the slot of the next tile's first block.
    """
    plan, smem, call = kernel.plan, kernel.smem, kernel.call
    ring.wait_full(smem.q, kernel.wg)
    if plan.hold_turns:
        work = work.holding("count", "turn_first", "turn_last")
    slot = _skip(kernel, work.before, slot)
    _release_q(kernel, work.count == 0)
    v_dim = common.padded(call.spec.v_dim)

    def run():
        attend = _attend_overlapped if plan.overlap else _attend
        return pl.run_scoped(
            lambda acc: attend(kernel, work, acc, slot),
            mma.accumulator((UNIT, v_dim), call=call),
        )

    def nothing():
        return (common.tile_of(0.0, v_dim, call), *_start(kernel), slot)

    if plan.overlap:
        acc, row_max, row_sum, slot = lax.cond(work.count > 0, run, nothing)
    else:
        acc, row_max, row_sum, slot = run()
    slot = _skip(kernel, work.after, slot)
    if plan.lane_sums:
        row_sum = common.sum_of_lanes(row_sum, call)
    finish(kernel, work, acc, row_max, row_sum)
    return slot


def _skip(kernel: Kernel, count, slot):
    """Hands back the slots of blocks that these rows do not see."""
    smem, stages = kernel.smem, kernel.stages

    def one(_, slot):
        # A slot may be released only after it was filled: the release before is then complete.
        for slots in (smem.k, smem.v):
            ring.wait_full(slots, slot)
            ring.release(slots, slot)
        return ring.next_slot(slot, stages)

    return lax.fori_loop(jnp.int32(0), count, one, slot)


def _start_scores(kernel: Kernel, acc, slot) -> None:
    """Starts acc += q·kᵀ of this warpgroup's rows and the block of keys in a slot."""
    call, q, k = kernel.call, kernel.smem.q.data, kernel.smem.k.data.at[slot]
    if not kernel.plan.q_chunks:
        mma.qk(acc, q.at[kernel.wg], k, call=call)
    for i in range(kernel.plan.q_chunks):
        channels = pl.ds(i * CHUNK, CHUNK)
        mma.qk(acc, q.at[kernel.wg, i], k.at[:, channels], call=call)


def _scores(kernel: Kernel, work, n, slot):
    """S = q·kᵀ of this warpgroup's rows and the n-th block of keys, awaited."""
    call = kernel.call

    def body(acc):
        _start_scores(kernel, acc, slot)
        schedule.pass_turn(kernel, work, n)
        return mma.load(acc, 0, call=call)

    return pl.run_scoped(body, mma.accumulator((UNIT, kernel.block_kv), call=call))


def _softmax(kernel: Kernel, work, n, s, row_max, row_sum):
    """Masks a tile of scores where it needs it, and takes it into the softmax."""
    call, spec = kernel.call, kernel.call.spec
    x, factor = tile_math.logits(s, spec.scale, spec.soft_cap, tanh=tile_math.tanh_by_exp)
    if kernel.inputs.visits.any_partial:
        place = masking.Place(
            work.mask_batch, work.mask_head, work.q_start, work.at(n) * kernel.block_kv
        )
        x = masking.mask_tile(x, kernel.inputs.extra.detail, place, work.partial(n), call=call)
    weights, plan = tile_math.weights, kernel.plan
    if plan.lane_sums or not plan.overlap:
        # With overlap p has to stay float32 until p·v of the block before has read its own p.
        dtype = jnp.float32 if plan.overlap else kernel.inputs.v.dtype
        weights = functools.partial(
            common.weights, dtype=dtype, call=call, lane_sums=plan.lane_sums
        )
    return tile_math.lazy_softmax(row_max, row_sum, x, factor, weights)


def _clear_padding(kernel: Kernel, work, n, slot) -> None:
    """Values of padding become 0 in shared memory: they may be NaN, which 0·NaN would spread."""
    values, start = kernel.smem.v.data.at[slot], work.at(n) * kernel.block_kv
    if kernel.plan.ends:
        end = work.dirty
        masking.clear_rows_from(values, end, start, end < start + kernel.block_kv, call=kernel.call)
        return
    dirty = kernel.inputs.extra.detail.kv_dirty
    if dirty is not None and kernel.inputs.visits.any_partial:
        when = work.partial(n) & (work.dirty != 0)
        masking.clear_rows(values, dirty, work.mask_batch, start, when, call=kernel.call)


def _add_pv(kernel: Kernel, work, n, acc, p, slot) -> None:
    """Starts acc += p·v of the n-th block."""
    dirty, v_rows = kernel.inputs.extra.detail.kv_dirty, None
    start, size, call = work.at(n) * kernel.block_kv, kernel.block_kv, kernel.call
    if kernel.plan.ends:
        v_rows = masking.rows_before(work.dirty, start, size, call)
    elif dirty is not None:
        v_rows = masking.clean_rows_flags(dirty, work.mask_batch, start, size, call)
    mma.pv(acc, p, kernel.smem.v.data.at[slot], call=call, v_rows=v_rows)


def _release_q(kernel: Kernel, when) -> None:
    """Q is read for the last time; its slot is free unless it will take out."""
    if kernel.plan.stage_out:
        pl.when(when)(lambda: ring.release(kernel.smem.q, kernel.wg))


def _start(kernel: Kernel):
    call = kernel.call
    return common.row_vector(tile_math.NO_MAX, call), common.row_vector(0.0, call)


def _attend(kernel: Kernel, work, acc, slot):
    """Block after block: s, softmax, p·v. p·v of one block and s of the next share a turn."""
    whole = kernel
    smem, stages, call = kernel.smem, kernel.stages, kernel.call
    pl.when(work.count > 0)(lambda: ring.wait_full(smem.k, slot))
    schedule.wait_turn(kernel, work, jnp.int32(0))

    def step(n, carry):
        row_max, row_sum, slot = carry
        kernel = whole._replace(wg=common.fresh(whole.wg, call))
        s = _scores(kernel, work, n, slot)
        ring.release(smem.k, slot)
        _release_q(kernel, n + 1 == work.count)
        row_max, row_sum, correction, p = _softmax(kernel, work, n, s, row_max, row_sum)
        scaled = common.rescale(mma.load(acc, None, call=call), correction, call)
        scaled, p, row_max, row_sum = lax.optimization_barrier((scaled, p, row_max, row_sum))
        ring.wait_full(smem.v, slot)
        _clear_padding(kernel, work, n, slot)
        schedule.wait_turn(kernel, work, n + 1)
        acc[...] = scaled
        _add_pv(kernel, work, n, acc, p, slot)
        following = ring.next_slot(slot, stages)
        pl.when(n + 1 < work.count)(lambda: ring.wait_full(smem.k, following))
        mma.wait(acc, 0, call=call)
        ring.release(smem.v, slot)
        return row_max, row_sum, following

    carry = (*_start(kernel), slot)
    row_max, row_sum, slot = lax.fori_loop(jnp.int32(0), work.count, step, carry)
    schedule.pass_turn(kernel, work, work.count)
    return mma.load(acc, 0, call=call), row_max, row_sum, slot


def _attend_overlapped(kernel: Kernel, work, acc, slot):
    """As `_attend`, but s of a block is issued with p·v of the one before it."""
    smem, stages, call = kernel.smem, kernel.stages, kernel.call
    ring.wait_full(smem.k, slot)
    schedule.wait_turn(kernel, work, jnp.int32(0))
    s = _scores(kernel, work, jnp.int32(0), slot)
    ring.release(smem.k, slot)
    row_max, row_sum, _, p = _softmax(kernel, work, jnp.int32(0), s, *_start(kernel))
    p = p.astype(kernel.inputs.v.dtype)
    _release_q(kernel, work.count == 1)

    def wait_ahead(n, slot):
        # Waiting between a softmax and the wait for p·v keeps the compiler from moving the latter
        # up, which would undo the overlap.
        ring.wait_full(smem.v, slot)
        ahead = ring.next_slot(slot, stages)
        pl.when(n + 1 < work.count)(lambda: ring.wait_full(smem.k, ahead))

    wait_ahead(jnp.int32(0), slot)
    _clear_padding(kernel, work, jnp.int32(0), slot)

    def step(n, carry):
        row_max, row_sum, p, slot = carry
        following = ring.next_slot(slot, stages)
        schedule.wait_turn(kernel, work, n)

        def body(s_acc):
            _start_scores(kernel, s_acc, following)
            _add_pv(kernel, work, n - 1, acc, p, slot)
            schedule.pass_turn(kernel, work, n)
            s = mma.load(s_acc, 1, call=call)
            ring.release(smem.k, following)
            _release_q(kernel, n + 1 == work.count)
            new = _softmax(kernel, work, n, s, row_max, row_sum)
            new_max, new_sum, correction, new_p = lax.optimization_barrier(new)
            wait_ahead(n, following)
            done = mma.load(acc, 0, call=call)
            ring.release(smem.v, slot)
            acc[...] = common.rescale(done, correction, call)
            return new_max, new_sum, new_p.astype(p.dtype)

        s_acc = mma.accumulator((UNIT, kernel.block_kv), call=call)
        row_max, row_sum, p = pl.run_scoped(body, s_acc)
        _clear_padding(kernel, work, n, following)
        return row_max, row_sum, p, following

    carry = (row_max, row_sum, p, slot)
    row_max, row_sum, p, slot = lax.fori_loop(jnp.int32(1), work.count, step, carry)
    _add_pv(kernel, work, work.count - 1, acc, p, slot)
    out = mma.load(acc, 0, call=call)
    ring.release(smem.v, slot)
    return out, row_max, row_sum, ring.next_slot(slot, stages)


def normalised(kernel: Kernel, work, acc, row_max, row_sum):
    """(out [64, v_dim], lse [64]) of this warpgroup's rows, float32 in registers."""
    spec, sink = kernel.call.spec, None
    if kernel.inputs.sinks is not None:
        sink = kernel.inputs.sinks[work.head].astype(jnp.float32)
    _, factor = tile_math.logits(jnp.float32(0.0), spec.scale, spec.soft_cap)
    factor, lse = tile_math.finalize(row_max * factor, row_sum, sink)
    return acc * common.widen(factor, acc.shape[1]), lse
