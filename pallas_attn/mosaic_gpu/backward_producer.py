"""The producer warpgroup of the backward kernel: one warp loads, one stores.

    warp 0    tells of the tile; loads its k, v; then, for each query head of the group and each
              block of queries that sees the tile: tells of the step; waits until its slot is empty;
              starts the loads of q, dout and the rows' starts
    warp 1    adds dq, as the consumers hand it over, to what is in global memory (unless they do
              so themselves); stores dk and dv

With `deterministic`, tiles add to a block of dq in the order in which they were launched, so that
none waits for one that has not begun, and take their blocks from the last to the first: those that
run side by side then come to a block one shortly after the other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic_gpu import backward_turns as turns
from pallas_attn.mosaic_gpu.backward_parts import (
    BATCH,
    COUNT,
    HEAD,
    HEAD_SHIFT,
    KV_DIRTY,
    KV_HEAD,
    KV_START,
    MASK_BATCH,
    PARTIAL,
    Q_DIRTY,
    Q_START,
    TURN,
    WGS,
    Kernel,
    is_ragged,
)
from pallas_attn.mosaic_gpu.common import UNIT


class Tile(NamedTuple):
    """Whose keys: indices here, and absolute ones for masks and tables; first key; block."""

    batch: Any
    kv_head: Any
    mask_batch: Any
    mask_head: Any
    kv_start: Any
    block: Any


class Step(NamedTuple):
    """One block of queries of one head."""

    head: Any
    q_block: Any
    partial: Any
    turn: Any


def this_tile(kernel: Kernel) -> Tile:
    """This thread block's tile: tiles of `together` streams alternate, the longest first."""
    plan, inputs, spec = kernel.plan, kernel.inputs, kernel.call.spec
    number = lax.axis_index("tile").astype(jnp.int32)
    size = jnp.int32(plan.together * plan.tiles)
    section, rest = lax.div(number, size), lax.rem(number, size)
    stream = section * plan.together + lax.rem(rest, jnp.int32(plan.together))
    place = lax.div(rest, jnp.int32(plan.together))
    batch, kv_head = (f(stream, jnp.int32(spec.kv_heads)) for f in (lax.div, lax.rem))
    mask_batch, mask_head = batch, kv_head * spec.group
    if inputs.origin is not None:
        mask_batch, mask_head = mask_batch + inputs.origin[0], mask_head + inputs.origin[1]
    rank = None if kernel.call.deterministic else inputs.extra.rank
    block = place if rank is None else rank[_lead(rank, mask_batch), place]
    start = block * kernel.call.tiles.dkv.block_kv
    return Tile(batch, kv_head, mask_batch, mask_head, start, block)


def _lead(array, index, axis: int = 0):
    """An index into an axis that may be 1."""
    return jnp.int32(0) if array.shape[axis] == 1 else index


def _row(array, tile: Tile, member):
    """Batch and head in a table."""
    return _lead(array, tile.mask_batch), _lead(array, tile.mask_head + member, 1)


def count_steps(kernel: Kernel, tile: Tile):
    """The steps of a tile."""
    visits, group = kernel.inputs.visits, kernel.call.spec.group

    def of_member(member):
        row = (*_row(visits.table, tile, member), tile.block)
        if visits.form == "list":
            return visits.counts[(*row, 0)] + visits.counts[(*row, 1)]
        holes = visits.table[(*row, 4)] if visits.form == "loose" else jnp.int32(0)
        return visits.table[(*row, 3)] - visits.table[(*row, 0)] - holes

    if visits.table.shape[1] == 1:
        return of_member(jnp.int32(0)) * group
    zero = jnp.int32(0)
    return lax.fori_loop(zero, jnp.int32(group), lambda m, n: n + of_member(m), zero)


def for_each_step(kernel: Kernel, tile: Tile, take):
    """Calls take(number, Step) for each step of a tile."""
    group = kernel.call.spec.group

    def of_member(member, done):
        return _member_steps(kernel, tile, member, take, done)

    lax.fori_loop(jnp.int32(0), jnp.int32(group), of_member, jnp.int32(0))


def _member_steps(kernel: Kernel, tile: Tile, member, take, done):
    """Calls take(number, step) for the blocks of one head; `done` steps came before."""
    visits, deterministic = kernel.inputs.visits, kernel.call.deterministic
    table = visits.table
    row = (*_row(table, tile, member), tile.block)
    head = tile.kv_head * kernel.call.spec.group + member

    def taken(block, partial, done):
        turn = turns.turn_of(kernel.order, _row, tile, member, block) if deterministic else 0
        take(done, Step(head, block, partial, turn))
        return done + 1

    if visits.form == "list":
        full = visits.counts[(*row, 0)]
        count = full + visits.counts[(*row, 1)]

        def listed(i, done):
            return taken(table[(*row, i)], i >= full, done)

        return lax.fori_loop(jnp.int32(0), count, listed, done)
    first, full_first, full_last, last = (table[(*row, i)] for i in range(4))

    def one(i, done):
        block = first + last - 1 - i if deterministic else i
        partial = (block < full_first) | (block >= full_last)
        if visits.form == "run":
            return taken(block, partial, done)
        some = visits.some
        seen = some[(*_row(some, tile, member), block, tile.block)]
        return lax.cond(seen, lambda: taken(block, partial, done), lambda: done)

    return lax.fori_loop(first, last, one, done)


def load(kernel: Kernel) -> None:
    """Warp 0."""
    inputs, smem, bars, call = kernel.inputs, kernel.smem, kernel.bars, kernel.call
    tile = this_tile(kernel)
    facts = {
        COUNT: count_steps(kernel, tile),
        KV_START: tile.kv_start,
        BATCH: tile.batch,
        KV_HEAD: tile.kv_head,
        MASK_BATCH: tile.mask_batch,
        HEAD_SHIFT: tile.mask_head - tile.kv_head * call.spec.group,
    }
    detail = inputs.extra.detail
    for field, flags in ((KV_DIRTY, detail.any_kv_dirty), (Q_DIRTY, detail.any_q_dirty)):
        if flags is not None:
            facts[field] = flags[_lead(flags, tile.mask_batch)]
    for field, value in facts.items():
        smem.words[kernel.fact(field)] = value
    for source, target in ((inputs.k, kernel.keys), (inputs.v, kernel.values)):
        for part in range(kernel.parts):
            rows = pl.ds(tile.kv_start + part * UNIT, UNIT)
            at = _channels(source.at[tile.batch, rows, tile.kv_head], target(part))
            plgpu.copy_gmem_to_smem(at, target(part), bars.keys)
    cut = tile.block == kernel.plan.tiles - 1 if is_ragged(call) else False

    def take(number, step: Step):
        _load_step(kernel, tile, number, step._replace(partial=step.partial | cut))

    for_each_step(kernel, tile, take)


def _load_step(kernel: Kernel, tile: Tile, number, step: Step):
    inputs, smem, bars, block_q = kernel.inputs, kernel.smem, kernel.bars, kernel.block_q
    slot = lax.rem(number, jnp.int32(kernel.stages))
    used = number >= kernel.stages
    words = {
        Q_START: step.q_block * block_q,
        HEAD: step.head,
        PARTIAL: step.partial.astype(jnp.int32),
    }
    if kernel.call.deterministic:
        words[TURN] = step.turn
    pl.when(used)(lambda: plgpu.barrier_wait(bars.empty.at[slot]))
    for field, value in words.items():
        smem.words[kernel.word(number, field)] = value
    rows = pl.ds(step.q_block * block_q, block_q)
    size = 2 * block_q
    starts = inputs.lse_log2.at[tile.batch, step.head, pl.ds(step.q_block * size, size)]
    at = _channels(inputs.q.at[tile.batch, rows, step.head], kernel.queries(slot))
    plgpu.copy_gmem_to_smem(at, kernel.queries(slot), bars.full.at[slot])
    plgpu.copy_gmem_to_smem(starts, smem.words.at[pl.ds(slot * size, size)], bars.full.at[slot])
    at = _channels(inputs.dout.at[tile.batch, rows, step.head], kernel.douts(slot))
    if kernel.plan.wide:
        pl.when(used)(lambda: plgpu.barrier_wait(bars.dout_empty.at[slot]))
    plgpu.copy_gmem_to_smem(at, kernel.douts(slot), bars.full.at[slot])


def _channels(gmem, smem):
    """[rows, channels] of global memory, as wide as what it is copied from or to.

    Where that is wider, channels past the end read as 0 and are not written.
    """
    width = smem.shape[-1]
    if gmem.shape[-1] == width:
        return gmem
    # From a traced 0: a static slice may not reach past the end.
    return gmem.at[:, pl.ds(lax.axis_index("tile").astype(jnp.int32) * 0, width)]


def store(kernel: Kernel) -> None:
    """Warp 1."""
    smem, bars = kernel.smem, kernel.bars
    _, dk_ref, dv_ref = kernel.outs
    if not kernel.plan.direct:
        plgpu.barrier_arrive(bars.dq_empty)
    plgpu.barrier_wait(bars.keys)
    words = smem.words
    batch, kv_head = words[kernel.fact(BATCH)], words[kernel.fact(KV_HEAD)]
    if not kernel.plan.direct:
        count = words[kernel.fact(COUNT)]

        def step(i, _):
            _add_dq(kernel, batch, i)

        # dq of a step comes one step later; in the first there is none.
        pl.when(count > 0)(lambda: lax.fori_loop(jnp.int32(0), count + 1, step, None))
    plgpu.barrier_wait(bars.written)
    for part in range(kernel.parts):
        rows = pl.ds(words[kernel.fact(KV_START)] + part * UNIT, UNIT)
        for source, target in ((kernel.keys(part), dk_ref), (kernel.values(part), dv_ref)):
            at = _channels(target.at[batch, rows, kv_head], source)
            plgpu.copy_smem_to_gmem(source, at)
    plgpu.wait_smem_to_gmem(0)


def _add_dq(kernel: Kernel, batch, i):
    """Adds dq of the step before, both halves, to what is in global memory."""
    smem, bars, plan, words = kernel.smem, kernel.bars, kernel.plan, kernel.smem.words
    dq_ref = kernel.outs[0]
    start, head, turn = (words[kernel.word(i - 1, field)] for field in (Q_START, HEAD, TURN))
    plgpu.barrier_wait(bars.dq_full)

    @pl.when(i > 0)
    def _add():
        if kernel.call.deterministic:
            turns.wait(kernel, batch, head, start, turn, 0)
        for w in range(WGS):
            if plan.by_rows:
                at = dq_ref.at[batch, pl.ds(start + w * UNIT, UNIT), head]
            else:
                half = plan.dim // WGS
                at = dq_ref.at[batch, pl.ds(start, UNIT), head, pl.ds(w * half, half)]
            plgpu.copy_smem_to_gmem(smem.dq.at[w], at, reduction_op="add")

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(bars.dq_empty)
    if kernel.call.deterministic:

        @pl.when(i > 0)
        def _done():
            plgpu.wait_smem_to_gmem(0)
            turns.pass_on(kernel, batch, head, start, 0)


__all__ = ["load", "store"]
