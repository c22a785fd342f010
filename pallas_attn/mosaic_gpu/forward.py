"""The forward kernel for Hopper: one producer warpgroup, two or three consumers.

    grid: one thread block a multiprocessor; each takes tiles (64 rows a consumer) longest first

    producer    for each tile: q of each consumer; then k, v of the blocks that any of them sees
                    wait empty -> TMA -> full             (a ring of num_stages slots)
    consumer    wait q; for each block of the tile, in step with the producer:
                    not seen by these 64 rows:  release the slots
                    else  s = q·kᵀ -> logits -> (mask, partly visible blocks only)
                          -> lazy_softmax -> (acc rescaled, if a maximum grew) -> acc += p·v
                out = acc·factor -> shared memory -> TMA; lse -> global memory

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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import tile_math
from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import common, masking, mma, ring, schedule
from pallas_attn.mosaic_gpu.common import UNIT, Inputs


class Scratch(NamedTuple):
    """Shared memory: slots of q (one a consumer), k, v, where out is staged, and what
    consumers are told of their tiles, int32 [2, consumers, fields].
    """

    q: ring.Slots
    k: ring.Slots
    v: ring.Slots
    out: Any
    work: Any


class Kernel(NamedTuple):
    """What all parts of the kernel see: static facts, references, and this warpgroup's number."""

    call: Call
    plan: schedule.Plan
    inputs: Inputs
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


def forward(call: Call, inputs: Inputs):
    """Runs the forward kernel.

    Args:
        call: static facts.
        inputs: q, k, v, visits, extra, sinks, origin.

    Returns:
        out [batch, q_len, q_heads, v_dim] in q's dtype; lse float32 [batch, q_heads, q_len].
    """
    spec = call.spec
    plan = schedule.plan(call, inputs)
    dtype = inputs.q.dtype
    order = schedule.order(plan)
    inputs = inputs._replace(
        q=common.for_tma(inputs.q), k=common.for_tma(inputs.k), v=common.for_tma(inputs.v),
        order=None if order is None else jnp.asarray(order),
    )  # fmt: skip
    q_dim, v_dim = common.padded(spec.head_dim), common.padded(spec.v_dim)
    wgs, tiles = plan.num_wgs, call.tiles.fwd
    slots = {
        "q": (wgs, (UNIT, q_dim), 1),
        "k": (tiles.num_stages, (tiles.block_kv, q_dim), wgs),
        "v": (tiles.num_stages, (tiles.block_kv, v_dim), wgs),
    }
    data = {n: common.smem((count, *shape), dtype) for n, (count, shape, _) in slots.items()}
    bars = {n: ring.barriers(count, readers) for n, (count, _, readers) in slots.items()}
    out = common.smem((wgs, UNIT, v_dim), dtype) if plan.stage_out else None
    padded_len = plan.units * UNIT
    out, lse = common.launch(
        functools.partial(_kernel, call=call, plan=plan),
        inputs,
        name="pallas_attn_hopper_fwd",
        outs=[
            ((*inputs.q.shape[:3], inputs.v.shape[3]), dtype),
            ((spec.batch, spec.q_heads, padded_len), jnp.float32),
        ],
        scratch=(data, bars, out, plgpu.SMEM((2, wgs, len(schedule.FIELDS)), jnp.int32)),
        blocks=plan.blocks,
        threads=wgs + 1,
    )
    return out[:, : spec.q_len, :, : spec.v_dim], lse[..., : spec.q_len]


def _kernel(inputs: Inputs, outs, data, bars, out_smem, work, *, call: Call, plan: schedule.Plan):
    wg = lax.axis_index("wg")
    slots = {name: ring.Slots(data[name], *bars[name]) for name in data}
    kernel = Kernel(call, plan, inputs, Scratch(**slots, out=out_smem, work=work), wg)
    block = lax.axis_index("block")
    count = schedule.tiles_of_block(plan, inputs, block)

    @pl.when(wg == plan.num_wgs)
    def _producer():
        plgpu.set_max_registers(plan.registers[1], action="decrease")

        def take(i, done):
            return _load_tile(kernel, schedule.tile_at(plan, inputs, i, block), i, done)

        lax.fori_loop(jnp.int32(0), count, take, jnp.int32(0))

    @pl.when(wg < plan.num_wgs)
    def _consumer():
        plgpu.set_max_registers(plan.registers[0], action="increase")
        schedule.start_turns(kernel)

        def take(i, slot):
            work_of_tile = schedule.Work(work, (i & jnp.int32(1), wg), inputs.visits)
            return _compute_tile(kernel, outs, work_of_tile, slot)

        lax.fori_loop(jnp.int32(0), count, take, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _load_tile(kernel: Kernel, tile: schedule.Tile, i, done):
    """Producer: loads one tile's q, then k and v block by block; `done` blocks came before."""
    plan, inputs, smem = kernel.plan, kernel.inputs, kernel.smem
    dims = common.padded(kernel.call.spec.head_dim), common.padded(kernel.call.spec.v_dim)
    blocks = schedule.blocks_of_tile(plan, inputs, tile)

    def load(slots, n, which, dim):
        rows = pl.ds(blocks.at(n) * kernel.block_kv, kernel.block_kv)
        source = which.at[tile.batch, rows, tile.kv_head, schedule.channels(dim)]
        number = done + n
        slot = lax.rem(number, jnp.int32(kernel.stages))
        ring.load(slots, slot, source, used=number >= kernel.stages)

    # The first k before q: its slot is free earlier.
    pl.when(blocks.count > 0)(lambda: load(smem.k, jnp.int32(0), inputs.k, dims[0]))
    for w in range(plan.num_wgs):
        unit = schedule.unit_of(plan, tile, w)
        rows = pl.ds(unit.q_unit * UNIT, UNIT)
        source = inputs.q.at[tile.batch, rows, unit.head, schedule.channels(dims[0])]
        pl.when(i > 0)(functools.partial(ring.wait_empty, smem.q, w))
        # The consumer reads this after it has waited for q. It may still be reading what it was
        # told of the tile before, but not of the one before that.
        _tell(kernel, tile, unit, i, w)
        ring.load(smem.q, w, source, used=None)

    # v is needed one softmax later than k, and so is loaded one block later.
    def step(n, _):
        pl.when(n < blocks.count)(lambda: load(smem.k, n, inputs.k, dims[0]))
        load(smem.v, n - 1, inputs.v, dims[1])

    lax.fori_loop(jnp.int32(1), blocks.count + 1, step, None)
    return done + blocks.count


def _tell(kernel: Kernel, tile, unit, i, wg: int) -> None:
    def write(field: int, value):
        kernel.smem.work[i & jnp.int32(1), wg, field] = value

    schedule.tell(kernel.plan, kernel.inputs, tile, unit, write)


def _compute_tile(kernel: Kernel, outs, work: schedule.Work, slot):
    """Consumer: attention of this warpgroup's 64 rows of a tile; returns the next slot."""
    plan, smem, call = kernel.plan, kernel.smem, kernel.call
    ring.wait_full(smem.q, kernel.wg)
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
    _finish(kernel, outs, work, acc, row_max, row_sum)
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


def _scores(kernel: Kernel, work, n, slot):
    """S = q·kᵀ of this warpgroup's rows and the n-th block of keys, awaited."""
    call, smem = kernel.call, kernel.smem

    def body(acc):
        mma.qk(acc, smem.q.data.at[kernel.wg], smem.k.data.at[slot], call=call)
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
    weights = tile_math.weights
    if not kernel.plan.overlap:
        # With overlap p has to stay float32 until p·v of the block before has read its own p.
        weights = functools.partial(common.weights, dtype=kernel.inputs.v.dtype, call=call)
    return tile_math.lazy_softmax(row_max, row_sum, x, factor, weights)


def _clear_padding(kernel: Kernel, work, n, slot) -> None:
    """Values of padding become 0 in shared memory: they may be NaN, which 0·NaN would spread."""
    dirty = kernel.inputs.extra.detail.kv_dirty
    if dirty is not None and kernel.inputs.visits.any_partial:
        values, start = kernel.smem.v.data.at[slot], work.at(n) * kernel.block_kv
        when = work.partial(n) & (work.dirty != 0)
        masking.clear_rows(values, dirty, work.mask_batch, start, when, call=kernel.call)


def _add_pv(kernel: Kernel, work, n, acc, p, slot) -> None:
    """Starts acc += p·v of the n-th block."""
    dirty, v_rows = kernel.inputs.extra.detail.kv_dirty, None
    if dirty is not None:
        start = work.at(n) * kernel.block_kv
        v_rows = masking.clean_rows_flags(
            dirty, work.mask_batch, start, kernel.block_kv, kernel.call
        )
    mma.pv(acc, p, kernel.smem.v.data.at[slot], call=kernel.call, v_rows=v_rows)


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
            mma.qk(s_acc, smem.q.data.at[kernel.wg], smem.k.data.at[following], call=call)
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


def _finish(kernel: Kernel, outs, work, acc, row_max, row_sum):
    """Normalises, and writes out and lse of this warpgroup's rows."""
    plan, spec = kernel.plan, kernel.call.spec
    sink = None
    if kernel.inputs.sinks is not None:
        sink = kernel.inputs.sinks[work.head].astype(jnp.float32)
    _, factor = tile_math.logits(jnp.float32(0.0), spec.scale, spec.soft_cap)
    factor, lse = tile_math.finalize(row_max * factor, row_sum, sink)
    out = acc * common.widen(factor, acc.shape[1])
    if plan.stage_out:
        staged = kernel.smem.out.at[kernel.wg]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    else:
        staged = kernel.smem.q.data.at[kernel.wg]
    staged[...] = out.astype(staged.dtype)
    plgpu.commit_smem()
    rows = pl.ds(work.q_start, UNIT)

    @pl.when(work.exists != 0)
    def _store():
        channels = schedule.channels(common.padded(spec.v_dim))
        plgpu.copy_smem_to_gmem(staged, outs[0].at[work.batch, rows, work.head, channels])
        outs[1].at[work.batch, work.head, rows][...] = lse

    if not plan.stage_out:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(kernel.smem.q, kernel.wg)
