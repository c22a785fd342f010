"""Adds dq from a consumer's registers to global memory, where no shared memory stages it."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_attn.mosaic_gpu import backward_turns as turns
from pallas_attn.mosaic_gpu import common
from pallas_attn.mosaic_gpu.backward_parts import BATCH, HEAD, Q_START, TURN, Kernel
from pallas_attn.mosaic_gpu.common import UNIT
from pallas_attn.mosaic_gpu.lanes import Emitter, first_column, first_row


def add(kernel: Kernel, i, dq):
    """Adds this warpgroup's half of dq of step `i`, 64 queries, to what is in global memory."""
    words, ref, wg, call = kernel.smem.words, kernel.outs[0], kernel.wg, kernel.call
    width = dq.shape[1]
    batch, head = words[kernel.fact(BATCH)], words[kernel.word(i, HEAD)]
    start = row = words[kernel.word(i, Q_START)]
    channel = wg * width
    if kernel.plan.by_rows:
        row, channel = row + wg * UNIT, wg * 0
    if call.deterministic:
        turns.wait(kernel, batch, head, start, words[kernel.word(i, TURN)], wg)
    if call.interpret:
        # Instructions that add are unknown there: by an adding TMA store.
        staged = kernel.smem.dq.at[wg]
        staged[...] = dq
        plgpu.commit_smem()
        at = ref.at[batch, pl.ds(row, UNIT), head, pl.ds(channel, width)]
        plgpu.copy_smem_to_gmem(staged, at, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
    else:
        _red(ref, dq, (batch, row, head, channel))
    if call.deterministic:
        turns.pass_on(kernel, batch, head, start, wg)


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


__all__ = ["add"]
