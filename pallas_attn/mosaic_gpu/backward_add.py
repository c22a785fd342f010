"""Adds dq to what is in global memory.

dq lies there in slabs of 16 queries, what a warp holds of an accumulator, and in a slab as its
threads hold it: 16 channels after the other, of these the upper 8 rows before the lower 8, of each
thread the four numbers that it has there. So a warp stages 512 neighbouring bytes by one
instruction, all banks at once, and TMA adds whole lines. `from_slabs` puts dq in order where it is
scaled and cast.

A consumer of the narrow kernel leaves the adding to the producer. The adder itself sends what it
has staged, 32 channels after the other through a ring of slots, and each warp its own rows, so that
none waits for another. Where there is no room for that, instructions add straight from registers.
(Where there is, these are slower: 542 TFLOP/s for 556 with 128 channels, 409 for 452 with 256.)
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_attn.call import Call
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
from pallas_attn.mosaic_gpu.lanes import Emitter

# Rows of a slab: what a warp holds of an accumulator.
SLAB = 16
SLABS = UNIT // SLAB


def slabs(rows: int, channels: int) -> tuple[int, int, int]:
    """How dq of so many rows and channels lies: [slabs, 8 rows of 16 channels each, 128]."""
    return rows // SLAB, channels // 8, 128


def to_slabs(tile):
    """A tile [rows, channels] as it lies in global memory."""
    rows, channels = tile.shape
    parts = tile.reshape(rows // SLAB, 2, 8, channels // 16, 2, 4, 2)
    return parts.transpose(0, 3, 1, 2, 5, 4, 6).reshape(slabs(rows, channels))


def from_slabs(dq):
    """Dq [batch, heads, slabs, channels / 8, 128] as [batch, rows, heads, channels]."""
    batch, heads, count, eights, _ = dq.shape
    parts = dq.reshape(batch, heads, count, eights // 2, 2, 8, 4, 2, 2)
    return parts.transpose(0, 2, 4, 5, 1, 3, 7, 6, 8).reshape(
        batch, count * SLAB, heads, eights * 8
    )


def add(kernel: Kernel, i, dq, half):
    """A consumer adds its half of dq of step `i`: of its rows, or of its channels.

    Args:
        kernel: with the step's references.
        i: the step.
        dq: [64, channels] float32 in registers.
        half: which half.
    """
    wait_turn(kernel, i, half)
    if kernel.call.interpret:
        # Instructions that add are unknown there.
        stage(kernel, i, dq, half, owner=half)
        finish()
    else:
        _red(kernel.outs[0], dq, place_of(kernel, i, dq.shape[1], half))
    _pass_turn(kernel, i, half)


def wait_turn(kernel: Kernel, i, share) -> None:
    """With `deterministic`: until this tile may add its share, one of as many as take turns."""
    if kernel.call.deterministic:
        words = kernel.smem.words
        turns.wait(kernel, *_block(kernel, i), words[kernel.word(i, TURN)], share)


def end_turn(kernel: Kernel, i) -> None:
    """With `deterministic`: what was staged of step `i` is added, and the next tile may."""
    if kernel.call.deterministic:
        finish()
        _pass_turn(kernel, i, 0)


def _pass_turn(kernel: Kernel, i, share):
    if kernel.call.deterministic:
        turns.pass_on(kernel, *_block(kernel, i), share)


def _block(kernel: Kernel, i):
    """Batch entry, head and first query of a step."""
    words = kernel.smem.words
    batch = words[kernel.fact(BATCH)]
    return batch, words[kernel.word(i, HEAD)], words[kernel.word(i, Q_START)]


def place_of(kernel: Kernel, i, channels: int, part):
    """Where a part of dq of step `i` begins: batch entry, head, slab, eighth of channels."""
    batch, head, start = _block(kernel, i)
    first = start // SLAB
    if kernel.plan.by_rows:
        return batch, head, first + part * SLABS, jnp.int32(0)
    return batch, head, first, part * (channels // 8)


def finish() -> None:
    """Waits until what this warpgroup has staged is added."""
    _by_warp(lambda _: plgpu.wait_smem_to_gmem(0))


def stage(kernel: Kernel, i, dq, part, owner=0):
    """Adds a part of dq of step `i` by TMA, 32 channels after the other, through a ring of slots.

    Args:
        kernel: with the step's references.
        i: the step.
        dq: [64, channels] float32 in registers.
        part: which part of so many rows or channels; parts come in order.
        owner: whose slots.
    """
    slots, pieces = kernel.smem.dq.shape[1], dq.shape[1] // STAGED
    batch, head, slab, eighth = place_of(kernel, i, dq.shape[1], part)
    for piece in range(pieces):
        # Slots divide the pieces of a step, so that they go round over all steps.
        slot = piece % slots
        if pieces % slots:
            slot = (part * pieces + piece) % jnp.int32(slots)
        columns = dq[:, piece * STAGED : (piece + 1) * STAGED]
        at = batch, head, slab, eighth + piece * (STAGED // 8)
        _send(kernel, columns, (owner, slot), at)


def _send(kernel: Kernel, dq, slot, at):
    """Adds [64, 32] by way of a slot, a warp its own rows: none waits for another."""
    staged = kernel.smem.dq.at[slot]
    batch, head, slab, eighth = at

    def wait(_):
        # What was in the slot has been read.
        plgpu.wait_smem_to_gmem(kernel.smem.dq.shape[1] - 1, wait_read_only=True)

    def copy(warp):
        here = pl.ds(slab + warp, 1), pl.ds(eighth, STAGED // 8)
        target = kernel.outs[0].at[batch, head, *here]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(warp, 1)], target, reduction_op="add")

    _by_warp(wait)
    put(staged, dq, call=kernel.call)
    _commit(kernel)
    _by_warp(copy)


def _by_warp(act):
    """act(warp) by each warp."""

    @plgpu.warp_map
    def _each(warp):
        act(warp)


def _commit(kernel: Kernel):
    """Makes what a warp staged visible to TMA, which one of its threads will call."""
    fence(kernel.call)
    if kernel.call.interpret:
        return

    @plgpu.inline_mgpu()
    def emit(_):
        mgpu_utils.warp_barrier()

    emit()


def send_half(kernel: Kernel, i, half):
    """The producer adds a warpgroup's half of dq of step `i`, 64 by 64, which stands staged."""
    batch, head, slab, eighth = place_of(kernel, i, UNIT, half)
    target = kernel.outs[0].at[batch, head, pl.ds(slab, SLABS), pl.ds(eighth, UNIT // 8)]
    plgpu.copy_smem_to_gmem(kernel.smem.dq.at[half], target, reduction_op="add")


def put(ref, tile, *, call: Call):
    """Writes a tile [64, n] of registers to shared memory, as it is to lie in global memory."""
    if call.interpret:
        ref[...] = to_slabs(tile)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), common.TILE))
    def emit(_, ref, tile):
        thread = Emitter().thread()
        eighths = tile.shape[1] // 8
        offset = (thread >> 5) * (512 * eighths) + (thread & 31) * 16
        byte, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        base = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [offset.ir_value], byte)
        _by_fours("st.shared.v4.f32", "r", llvm.ptrtoint(i32, base), tile)

    emit(ref, tile)


def _red(ref, tile, at):
    """Adds a tile [64, n] of registers to global memory."""
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), common.TILE, (scalar,) * 4))
    def emit(_, ref, tile, at):
        machine = Emitter()
        thread = machine.thread()
        batch, head, slab, eighth = (machine.fresh(x.registers.flat[0]) for x in at)
        lane = (thread & 31) << 2
        pointer = machine.pointer(ref, batch, head, slab + (thread >> 5), eighth, lane)
        _by_fours("red.relaxed.gpu.global.add.v4.f32", "l", pointer, tile)

    emit(ref, tile, tuple(jnp.asarray(x, jnp.int32) for x in at))


def fours(registers: int):
    """Which registers of two neighbouring numbers a thread stores together, in that order.

    Registers are [8 columns, upper or lower row].
    """
    return [(4 * (n // 2) + n % 2, 4 * (n // 2) + n % 2 + 2) for n in range(registers // 2)]


def _by_fours(instruction: str, kind: str, pointer, tile):
    """One instruction for every 8 rows and 16 channels that a warp has."""
    registers = list(tile.registers.flat)
    void = ir.Type.parse("!llvm.void")
    for n, pair in enumerate(fours(len(registers))):
        four = [common.element(registers[m], e) for m in pair for e in (0, 1)]
        text = f"{instruction} [$0 + {512 * n}], {{$1, $2, $3, $4}};"
        llvm.inline_asm(void, [pointer, *four], text, f"{kind},f,f,f,f", has_side_effects=True)


__all__ = [
    "add",
    "end_turn",
    "finish",
    "fours",
    "from_slabs",
    "put",
    "send_half",
    "slabs",
    "stage",
    "to_slabs",
    "wait_turn",
]
