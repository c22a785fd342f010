"""The producer warpgroup of the backward kernel: one warp loads, others store.

    warp 0    for each tile: tells of it; for each query head of the group and each block of queries
              that sees it: tells of the step; waits until its slot is empty; starts the loads of q,
              dout and the rows' starts; after the first few of k and v too
    warps     add dq, each the half that one consumer hands over, to what is in global memory
    1 and 3   (unless compute warpgroups do so themselves: then there is only warp 1); store dk, dv
    warp 2    zeroes queries that are padding, where there are such

Tiles take their blocks from the last to the first. Under causal masks those that run side by side
begin at the same block then, and find it in the cache. With `deterministic` it is from the first to
the last (`backward_turns`).

Nothing waits for ever, from tile to tile of a thread block, because:

  - Who waits at a barrier has seen its phase n before phase n + 1 can end. `keys` n + 1 is loaded
    after `stored` n, at which arrive, having seen `keys` n, all that wait there besides the
    consumers, and the consumers come before `stored` by `written`. `written`, `stored`: one phase a
    tile, n + 1 only after `keys` n + 1. After the last tile `keys` has one phase more, to say so.
    `read`, `ds`: who waits also arrives, after having waited for the phase before. Rings (`full`,
    `clean`, `empty`, `dout_empty`, `dq_full`, `dq_empty`): the other side arrives only after this
    one has gone on.
  - Both sides count alike. Slots go round over all tiles, as `done` and what `compute` returns say.
    A tile of n steps ends n phases of rings, n + 1 of `ds` (the first says that ds of no step is
    0), and n + 1 of `dq_full` and `dq_empty` (dq comes one step late), but none of these two when
    n = 0. Such a tile still loads k and v, and stores dk = dv = 0.
  - The loading warp waits only for tiles loaded wholly before. Of a tile it first loads what the
    slots have room for: these slots were last used by tiles before it (fewer steps than slots come
    ahead), whose loads are all issued. Then k and v wait for `stored` of the tile before, which
    needs no more loads. From there on slots come free as this tile's consumers, which now have
    everything they wait for, go on.
  - Words on the tile before the last may be overwritten: `stored` of it was waited for before k
    and v of the last one were loaded.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic_gpu import backward_add, common, masking, ring
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
    NO_TILE,
    PARTIAL,
    Q_DIRTY,
    Q_START,
    TURN,
    Kernel,
    for_each_tile,
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


def _draw(kernel: Kernel, before):
    """The number of this thread block's next tile.

    Tiles are numbered in the order in which they are taken; whoever is done with one takes the
    next that nobody has.

    Args:
        kernel: with the counter.
        before: number of the tile before; less than 0: none.
    """
    if kernel.call.interpret:
        # Thread blocks run one after another: the first would take all.
        return jnp.where(before < 0, _block(), before + kernel.plan.blocks)
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)
    def emit(_, counter):
        text = (
            "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; mov.b32 $0, 0; "
            "setp.eq.u32 first, lane, 0; @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; "
            "shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }"
        )
        return common.scalar_from_assembly([mgpu_utils.memref_ptr(counter)], text, "=r,l")

    return emit(kernel.counter)


def _block():
    return lax.axis_index("block").astype(jnp.int32)


def tile_at(kernel: Kernel, number) -> Tile:
    """The tile of a number: those of `together` streams alternate, one section after the other."""
    plan, inputs, spec = kernel.plan, kernel.inputs, kernel.call.spec
    size = jnp.int32(plan.together * plan.tiles)
    section, rest = lax.div(number, size), lax.rem(number, size)
    stream = section * plan.together + lax.rem(rest, jnp.int32(plan.together))
    block = lax.div(rest, jnp.int32(plan.together))
    batch, kv_head = (f(stream, jnp.int32(spec.kv_heads)) for f in (lax.div, lax.rem))
    mask_batch, mask_head = batch, kv_head * spec.group
    if inputs.origin is not None:
        mask_batch, mask_head = mask_batch + inputs.origin[0], mask_head + inputs.origin[1]
    if inputs.order is not None:
        block = inputs.order[_lead(inputs.order, mask_batch), block]
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
        block = i if deterministic else first + last - 1 - i
        partial = (block < full_first) | (block >= full_last)
        if visits.form == "run":
            return taken(block, partial, done)
        some = visits.some
        seen = some[(*_row(some, tile, member), block, tile.block)]
        return lax.cond(seen, lambda: taken(block, partial, done), lambda: done)

    return lax.fori_loop(first, last, one, done)


def load(kernel: Kernel) -> None:
    """Warp 0."""
    total = jnp.int32(kernel.plan.streams * kernel.plan.tiles)

    def take(state):
        i, number, done = state
        done = _load_tile(kernel.of_tile(i), i, tile_at(kernel, number), done)
        # Not before: what is drawn is nobody else's, and the last slots' steps are still to come.
        return i + 1, _draw(kernel, number), done

    start = jnp.int32(0), _draw(kernel, jnp.int32(-1)), jnp.int32(0)
    i, _, _ = lax.while_loop(lambda state: state[1] < total, take, start)
    _tell_end(kernel.of_tile(i), i)


def _tell_end(kernel: Kernel, i) -> None:
    """In the place of an i-th tile: there are no more."""
    pl.when(i > 0)(lambda: plgpu.barrier_wait(kernel.bars.stored))
    kernel.smem.words[kernel.fact(COUNT)] = jnp.int32(NO_TILE)
    for _ in range(2 * kernel.parts):  # as many loads as k and v take
        plgpu.barrier_arrive(kernel.bars.keys)


def _load_tile(kernel: Kernel, i, tile: Tile, done):
    """Loads the i-th tile; `done` steps came before it."""
    inputs, smem, call = kernel.inputs, kernel.smem, kernel.call
    count = count_steps(kernel, tile)
    facts = {
        COUNT: count,
        KV_START: tile.kv_start,
        BATCH: tile.batch,
        KV_HEAD: tile.kv_head,
        MASK_BATCH: tile.mask_batch,
        HEAD_SHIFT: tile.mask_head - tile.kv_head * call.spec.group,
    }
    detail = inputs.extra.detail
    # Bit 1 of `PARTIAL`: ids are compared. Read once a tile.
    compare = jnp.int32(0)
    if detail.unsorted is not None:
        compare = detail.unsorted[_lead(detail.unsorted, tile.mask_batch)] << 1
    for field, flags in ((KV_DIRTY, detail.any_kv_dirty), (Q_DIRTY, detail.any_q_dirty)):
        if flags is not None:
            facts[field] = flags[_lead(flags, tile.mask_batch)]
    # These words were those of the tile before the last; nobody has read them since the loads of
    # the last one's k and v.
    for field, value in facts.items():
        smem.words[kernel.fact(field)] = value
    cut = tile.block == kernel.plan.tiles - 1 if is_ragged(call) else False
    # What the slots have room for is loaded ahead of k and v, whose place the tile before still
    # has.
    ahead = jnp.minimum(count, jnp.int32(kernel.stages)) - 1

    def take(number, step: Step):
        partial = (step.partial | cut).astype(jnp.int32)
        step = step._replace(partial=jnp.where(partial > 0, compare | 1, jnp.int32(0)))
        _load_step(kernel, tile, number, done + number, step)
        pl.when(number == ahead)(lambda: _load_keys(kernel, i, tile))

    pl.when(count == 0)(lambda: _load_keys(kernel, i, tile))
    for_each_step(kernel, tile, take)
    return done + count


def _load_keys(kernel: Kernel, i, tile: Tile):
    inputs, bars = kernel.inputs, kernel.bars
    pl.when(i > 0)(lambda: plgpu.barrier_wait(bars.stored))
    for source, target in ((inputs.k, kernel.keys), (inputs.v, kernel.values)):
        for part in range(kernel.parts):
            rows = pl.ds(tile.kv_start + part * UNIT, UNIT)
            at = _channels(source.at[tile.batch, rows, tile.kv_head], target(part))
            plgpu.copy_gmem_to_smem(at, target(part), bars.keys)


def _load_step(kernel: Kernel, tile: Tile, number, running, step: Step):
    """Loads a tile's `number`-th step, the `running`-th of the thread block."""
    inputs, smem, bars, block_q = kernel.inputs, kernel.smem, kernel.bars, kernel.block_q
    slot = lax.rem(running, jnp.int32(kernel.stages))
    used = running >= kernel.stages
    words = {
        Q_START: step.q_block * block_q,
        HEAD: step.head,
        PARTIAL: step.partial,
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


def clean(kernel: Kernel) -> None:
    """Warp 2: zeroes the queries of each slot that are padding."""
    for_each_tile(kernel, _clean_tile)


def _clean_tile(kernel: Kernel, slot):
    bars, words = kernel.bars, kernel.smem.words

    def step(i, slot):
        plgpu.barrier_wait(bars.full.at[slot])
        batch, first = words[kernel.fact(MASK_BATCH)], words[kernel.word(i, Q_START)]
        when = words[kernel.word(i, PARTIAL)] & words[kernel.fact(Q_DIRTY)]
        for ref in (kernel.queries(slot), kernel.douts(slot)):
            masking.clear_rows(
                ref, kernel.inputs.extra.detail.q_dirty, batch, first, when,
                call=kernel.call, width=kernel.plan.width, threads=32,
            )  # fmt: skip
        plgpu.barrier_arrive(bars.clean.at[slot])
        return ring.next_slot(slot, kernel.stages)

    following = lax.fori_loop(jnp.int32(0), kernel.steps, step, slot)
    # Even where there was nothing to do: this tile's words are no longer needed.
    plgpu.barrier_arrive(bars.stored)
    return following


def _channels(gmem, smem):
    """[rows, channels] of global memory, as wide as what it is copied from or to.

    Where that is wider, channels past the end read as 0 and are not written.
    """
    width = smem.shape[-1]
    if gmem.shape[-1] == width:
        return gmem
    # From a traced 0: a static slice may not reach past the end.
    return gmem.at[:, pl.ds(_block() * 0, width)]


def store(kernel: Kernel, half: int) -> None:
    """Warps 1 and 3: what a consumer has made; of a wide kernel warp 1 stores all."""
    if not kernel.plan.wide:
        plgpu.barrier_arrive(kernel.bars.dq_empty.at[half])
    for_each_tile(kernel, functools.partial(_store_tile, half=half))
    plgpu.wait_smem_to_gmem(0)


def _store_tile(kernel: Kernel, slot, half: int):
    """Adds a half of dq of a tile; stores dk and dv of as many of its keys."""
    bars, words = kernel.bars, kernel.smem.words
    _, dk_ref, dv_ref = kernel.outs
    batch, kv_head = words[kernel.fact(BATCH)], words[kernel.fact(KV_HEAD)]
    if not kernel.plan.wide:
        count = kernel.steps

        def step(i, _):
            _add_dq(kernel, batch, i, half)

        # dq of a step comes one step later; in the first there is none.
        pl.when(count > 0)(lambda: lax.fori_loop(jnp.int32(0), count + 1, step, None))
    plgpu.barrier_wait(bars.written)
    rows = pl.ds(words[kernel.fact(KV_START)] + half * UNIT, UNIT)
    for source, target in ((kernel.keys(half), dk_ref), (kernel.values(half), dv_ref)):
        at = _channels(target.at[batch, rows, kv_head], source)
        plgpu.copy_smem_to_gmem(source, at)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(bars.stored)
    return slot


def _add_dq(kernel: Kernel, batch, i, half: int):
    """Adds a half of dq of the step before to what is in global memory."""
    bars, words = kernel.bars, kernel.smem.words
    start, head, turn = (words[kernel.word(i - 1, field)] for field in (Q_START, HEAD, TURN))
    plgpu.barrier_wait(bars.dq_full.at[half])

    @pl.when(i > 0)
    def _add():
        if kernel.call.deterministic:
            turns.wait(kernel, batch, head, start, turn, half)
        backward_add.send_half(kernel, i - 1, half)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(bars.dq_empty.at[half])
    if kernel.call.deterministic:

        @pl.when(i > 0)
        def _done():
            plgpu.wait_smem_to_gmem(0)
            turns.pass_on(kernel, batch, head, start, half)


__all__ = ["clean", "load", "store"]
