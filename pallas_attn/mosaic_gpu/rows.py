"""Stores the first rows of a tile from registers, and no others.

A TMA store writes whole boxes. Where sequences lie side by side the rows after a sequence's last
one are the next sequence's, and another warpgroup's to write.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import common
from pallas_attn.mosaic_gpu.common import ROW, TILE
from pallas_attn.mosaic_gpu.lanes import Emitter, first_column, first_row

SCALAR = plgpu.Layout.WG_SPLAT


def store_tile(ref, start, head, count, x, *, call: Call) -> None:
    """Stores x[:count, :dim] in ref[start : start + count, head].

    Args:
        ref: [tokens, heads, dim] of 16-bit floats in device memory, dim a multiple of 8.
        start, head, count: int32 scalars.
        x: [64, dim or more] float32.
        call: static facts.
    """
    if call.interpret:

        def one(row, _):
            values = lax.dynamic_index_in_dim(x, row, 0, keepdims=False)
            ref.at[start + row, head][...] = values[: ref.shape[2]].astype(ref.dtype)

        lax.fori_loop(jnp.int32(0), count, one, None)
        return
    dim = ref.shape[2]

    @plgpu.inline_mgpu(arg_types=(TILE, (SCALAR,) * 3, plgpu.RefType()))
    def emit(_, tile, scalars, out):
        machine = Emitter()
        start, head, count = (machine.fresh(x.registers.flat[0]) for x in scalars)
        thread = machine.thread()
        row, column = first_row(thread), first_column(thread)
        kind = ir.MemRefType(out.type).element_type
        registers = list(tile.registers.flat)
        for half in (0, 1):
            own = row + 8 * half
            words = {
                16 * group: _word(registers[2 * group + half], kind) for group in range(dim // 8)
            }
            pointer = machine.pointer(out, start + own, head, column)
            machine.store(pointer, words, machine.word([own < count]))

    emit(x, tuple(jnp.asarray(s, jnp.int32) for s in (start, head, count)), ref)


def store_row_vector(ref, start, head, count, x, *, call: Call) -> None:
    """Stores x[:count] in ref[head, start : start + count].

    Args:
        ref: [heads, tokens] float32 in device memory.
        start, head, count: int32 scalars.
        x: [64] float32.
        call: static facts.
    """
    if call.interpret:

        def one(row, _):
            ref[head, start + row] = lax.dynamic_index_in_dim(x, row, 0, keepdims=False)

        lax.fori_loop(jnp.int32(0), count, one, None)
        return

    @plgpu.inline_mgpu(arg_types=(ROW, (SCALAR,) * 3, plgpu.RefType()))
    def emit(_, vector_of_rows, scalars, out):
        machine = Emitter()
        start, head, count = (machine.fresh(x.registers.flat[0]) for x in scalars)
        thread = machine.thread()
        # A row's number is in all four lanes of a quad.
        row, leads = first_row(thread), machine.equal(thread & 3, 0)
        for half, register in enumerate(vector_of_rows.registers.flat):
            own = row + 8 * half
            i32 = ir.IntegerType.get_signless(32)
            word = arith.bitcast(i32, common.element(register, 0))
            flag = machine.word([leads & (own < count)])
            machine.store(machine.pointer(out, head, start + own), {0: word}, flag)

    emit(x, tuple(jnp.asarray(s, jnp.int32) for s in (start, head, count)), ref)


def _word(pair, kind):
    """Two neighbouring numbers as 16-bit floats in one register."""
    narrow = arith.truncf(ir.VectorType.get((2,), kind), pair)
    word = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), narrow)
    place = ir.DenseI64ArrayAttr.get([0])
    return vector.extract(word, dynamic_position=[], static_position=place)


__all__ = ["store_row_vector", "store_tile"]
