"""Adds dq to what is in global memory, for the warpgroup that has it in registers.

Where shared memory has room, by TMA, through a ring of slots of 64 queries and 32 channels, a warp
at a time: a warp writes 16 rows, its own of the accumulator, and sends them, and no warp waits for
another. Instructions that add straight from registers (two numbers each, eight rows an
instruction) need no room, but take longer than all else that the kernel does.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_attn.mosaic_gpu import backward_turns as turns
from pallas_attn.mosaic_gpu import common
from pallas_attn.mosaic_gpu.backward_parts import (
    BATCH,
    HEAD,
    Q_START,
    STAGED,
    TURN,
    Kernel,
    fence,
)
from pallas_attn.mosaic_gpu.common import UNIT
from pallas_attn.mosaic_gpu.lanes import Emitter, first_column, first_row


def add(kernel: Kernel, i, dq, half):
    """A consumer adds its half of dq of step `i`.

    Args:
        kernel: with the step's references.
        i: the step.
        dq: [64, channels] float32 in registers.
        half: which half of the channels.
    """
    wait_turn(kernel, i, half)
    if kernel.call.interpret:
        # Instructions that add are unknown there.
        stage(kernel, i, dq, half, owner=half)
        finish()
    else:
        batch, head, start = _place(kernel, i)
        _red(kernel.outs[0], dq, (batch, start, head, half * dq.shape[1]))
    _pass_turn(kernel, i, half)


def wait_turn(kernel: Kernel, i, share) -> None:
    """With `deterministic`: until this tile may add its share, one of as many as take turns."""
    if kernel.call.deterministic:
        words = kernel.smem.words
        turns.wait(kernel, *_place(kernel, i), words[kernel.word(i, TURN)], share)


def end_turn(kernel: Kernel, i) -> None:
    """With `deterministic`: what was staged of step `i` is added, and the next tile may."""
    if kernel.call.deterministic:
        finish()
        _pass_turn(kernel, i, 0)


def _pass_turn(kernel: Kernel, i, share):
    if kernel.call.deterministic:
        turns.pass_on(kernel, *_place(kernel, i), share)


def _place(kernel: Kernel, i):
    """Batch entry, head and first query of a step."""
    words = kernel.smem.words
    batch = words[kernel.fact(BATCH)]
    return batch, words[kernel.word(i, HEAD)], words[kernel.word(i, Q_START)]


def finish() -> None:
    """Waits until what this warpgroup has staged is added."""
    _by_warp(lambda _, __: plgpu.wait_smem_to_gmem(0))


def stage(kernel: Kernel, i, dq, part, owner=0):
    """Adds a part of dq of step `i` by TMA, 32 channels after the other, through a ring of slots.

    Args:
        kernel: with the step's references.
        i: the step.
        dq: [64, channels] float32 in registers.
        part: which part of so many channels; parts come in order.
        owner: whose slots.
    """
    slots, pieces = kernel.smem.dq.shape[1], dq.shape[1] // STAGED
    batch, head, start = _place(kernel, i)
    for piece in range(pieces):
        # Slots divide the pieces of a step, so that they go round over all steps.
        slot = piece % slots
        if pieces % slots:
            slot = lax.rem(part * pieces + piece, jnp.int32(slots))
        columns = pl.ds((part * pieces + piece) * STAGED, STAGED)
        _send(
            kernel,
            dq[:, piece * STAGED : (piece + 1) * STAGED],
            (owner, slot),
            (batch, start, head, columns),
        )


def _send(kernel: Kernel, dq, slot, at):
    """Adds [64, 32] by way of a slot."""
    staged = kernel.smem.dq.at[slot]
    batch, start, head, columns = at

    def wait(_, __):
        # What was in the slot has been read.
        plgpu.wait_smem_to_gmem(kernel.smem.dq.shape[1] - 1, wait_read_only=True)

    def copy(first, rows):
        target = kernel.outs[0].at[batch, pl.ds(start + first, rows), head, columns]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, rows)], target, reduction_op="add")

    _by_warp(wait)
    staged[...] = dq
    _commit(kernel)
    _by_warp(copy)


def _by_warp(act):
    """act(first row, rows) by each warp, for its 16 of 64 rows."""

    @plgpu.warp_map
    def _each(warp):
        act(warp * (UNIT // 4), UNIT // 4)


def _commit(kernel: Kernel):
    """Makes what a warp staged visible to TMA, which one of its threads will call."""
    fence(kernel.call)
    if kernel.call.interpret:
        return

    @plgpu.inline_mgpu()
    def emit(_):
        mgpu_utils.warp_barrier()

    emit()


def _red(ref, tile, at):
    """Adds a [64, n] tile of registers to global memory, two neighbouring numbers at a time."""
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), common.TILE, (scalar,) * 4))
    def emit(_, ref, tile, at):
        machine = Emitter()
        thread = machine.thread()
        batch, row, head, column = (machine.fresh(x.registers.flat[0]) for x in at)
        place = batch, row + first_row(thread), head, column + first_column(thread)
        upper = machine.pointer(ref, *place)
        eight = 8 * ir.MemRefType(ref.type).get_strides_and_offset()[0][1]
        rows = upper, mgpu_utils.getelementptr(upper, [eight], ir.F32Type.get())
        for n, register in enumerate(tile.registers.flat):
            pair = [common.element(register, e) for e in (0, 1)]
            text = f"red.relaxed.gpu.global.add.v2.f32 [$0 + {32 * (n // 2)}], {{$1, $2}};"
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [rows[n % 2], *pair], text, "l,f,f", has_side_effects=True)

    emit(ref, tile, tuple(jnp.asarray(x, jnp.int32) for x in at))


__all__ = ["add", "end_turn", "finish", "stage", "wait_turn"]
