"""What the Mosaic GPU kernels share: operands, layouts, register tricks, the launch.

Kernels are written in Lane semantics: a warpgroup is 128 threads that hold a [64, n] float32 tile
in the layout of wgmma's accumulator, so that row r lies in one quad of lanes. A "unit" is 64 rows,
what one warpgroup owns. `inline_mgpu` spells out instructions that Pallas has no name for; the
interpreter has no threads, so each such function has a plain branch of the same meaning.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_attn import _compat, tile_math
from pallas_attn import gpu as gpus
from pallas_attn.call import Call

UNIT = 64
# Channels of a block in shared memory: 128 bytes of 16-bit numbers, what swizzling turns in.
CHUNK = 64
TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Inputs(NamedTuple):
    """Operands of a kernel: arrays outside, references inside. Unused ones are None.

    q, dout: [batch, q_len, q_heads, d]; k, v: [batch, kv_len, kv_heads, d]; sinks: [q_heads];
    lse_log2, delta: [batch, q_heads, q_len]; visits: a `block_table.Visits`; extra: a
    `tables.Extra`; origin: int32 [2], the batch and query head of the first ones here, where a
    call is spread over devices; order: see `schedule.order`, or in
    the backward `backward.backward`'s order of the tiles of a head.
    """

    q: Any
    k: Any
    v: Any
    visits: Any
    extra: Any
    sinks: Any = None
    dout: Any = None
    lse_log2: Any = None
    delta: Any = None
    origin: Any = None
    order: Any = None


def padded(dim: int) -> int:
    """Channels of a tile in shared memory: whole 128-byte rows of 16-bit numbers."""
    return -(-dim // CHUNK) * CHUNK


def for_tma(x):
    """X [batch, length, heads, dim] as TMA can address it in tiles of 8 x 64.

    Lengths past 8 must be multiples of 8, and channels past 64 of 64, of 8 below. What is not is
    copied with zeros after the end.
    """
    length, dim = x.shape[1], x.shape[3]
    rows = -length % 8 if length > 8 else 0
    channels = padded(dim) - dim if dim % 8 or dim > 64 else 0
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, channels))) if rows or channels else x


def smem(shape, dtype):
    """A tile in shared memory, laid out for wgmma and TMA: 8 x 64 blocks, 128-byte swizzle."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def widen(row, columns: int):
    """A row vector as a tile [64, columns]."""
    return tile_math.widen(row, (*row.shape, columns))


def row_vector(value: float, call: Call):
    """64 equal numbers, one a row."""
    full = jnp.full((UNIT,), value, jnp.float32)
    return full if call.interpret else plgpu.layout_cast(full, ROW)


def tile_of(value: float, columns: int, call: Call):
    """A [64, columns] tile of equal numbers."""
    full = jnp.full((UNIT, columns), value, jnp.float32)
    return full if call.interpret else plgpu.layout_cast(full, TILE)


def named_barrier(action: str, index, threads: int) -> None:
    """bar.sync or bar.arrive on one of the 16 hardware barriers."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_, barrier):
        (register,) = barrier.registers.flat
        void = ir.Type.parse("!llvm.void")
        text = f"bar.{action} $0, {threads};"
        llvm.inline_asm(void, [register], text, "r", has_side_effects=True)

    emit(jnp.asarray(index, jnp.int32))


def fresh(x, call: Call):
    """A copy of an int32 scalar of which the compiler knows nothing.

    What is computed from it is not kept in registers from one step of a loop to the next.
    """
    if call.interpret:
        return x
    scalar = plgpu.Layout.WG_SPLAT
    out = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=scalar)

    @plgpu.inline_mgpu(arg_types=(scalar,), return_type=out)
    def emit(_, x):
        return scalar_from_assembly(list(x.registers.flat), "mov.b32 $0, $1;", "=r,r")

    return emit(x)


def scalar_from_assembly(operands, text: str, constraints: str):
    """An int32 that an instruction makes, inside `inline_mgpu`."""
    made: Any = llvm.inline_asm(
        ir.IntegerType.get_signless(32), operands, text, constraints, has_side_effects=True
    )
    return fragmented_array.FragmentedArray.splat(made, (), is_signed=True)


def element(register, index: int):
    """One number of a register that may hold several."""
    if not isinstance(register.type, ir.VectorType):
        return register
    place = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(register, dynamic_position=[], static_position=place)


def rescale(acc, correction, call: Call):
    """acc·correction, skipped by every warp whose corrections are all 1.

    Args:
        acc: [64, n] float32 in registers.
        correction: [64] float32.
        call: static facts.
    """
    if call.interpret:
        return acc * widen(correction, acc.shape[1])
    out = plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, ROW), return_type=out)
    def emit(_, acc, correction):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
        differs = [
            arith.cmpf(arith.CmpFPredicate.UNE, element(r, 0), one)
            for r in correction.registers.flat
        ]
        mine = differs[0]
        for other in differs[1:]:
            mine = arith.ori(mine, other)
        vote = (
            "{ .reg .pred mine, any; setp.ne.b32 mine, $1, 0; "
            "vote.sync.any.pred any, mine, 0xffffffff; selp.b32 $0, 1, 0, any; }"
        )
        voter = [arith.extui(i32, mine)]
        some: Any = llvm.inline_asm(i32, voter, vote, "=r,r", has_side_effects=True)
        zero = arith.constant(i32, ir.IntegerAttr.get(i32, 0))
        needed = arith.cmpi(arith.CmpIPredicate.ne, some, zero)
        return when_in_place(
            needed, acc, lambda: acc * correction.broadcast_in_dim(acc.shape, (0,), acc.layout)
        )

    return emit(acc, correction)


def weights(x, factor: float, shift, *, dtype, call: Call, lane_sums: bool = False):
    """`tile_math.weights` with p as `dtype`, made pair by pair.

    A whole tile of p in float32, waiting to be summed and converted, would take registers that
    three consumers with 128 channels do not have.

    Args:
        x: [64, n] float32.
        factor, shift: as there.
        dtype: of p.
        call: static facts.
        lane_sums: leaves each of the four lanes that share a row with the sum of its own numbers;
            `sum_of_lanes` adds them up.
    """
    if call.interpret:
        p, total = tile_math.weights(x, factor, shift)
        return p.astype(dtype), total
    p_type = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), layout=TILE)
    sum_type = plgpu.ShapeDtypeStruct(shift.shape, jnp.dtype(jnp.float32), layout=ROW)

    @plgpu.inline_mgpu(arg_types=(TILE, ROW), return_type=(p_type, sum_type))
    def emit(_, x, shift):
        f32 = ir.F32Type.get()
        narrow = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}.get(jnp.dtype(dtype).name)
        scale = arith.constant(f32, ir.FloatAttr.get(f32, factor))
        shifts = [arith.negf(element(r, 0)) for r in shift.registers.flat]
        sums: list[list[Any]] = [[], []]
        pairs = []
        # Registers are pairs of neighbouring columns, of a thread's upper and lower row in turn.
        for i, register in enumerate(x.registers.flat):
            pair = [
                _exp2(mlir_math.fma(element(register, e), scale, shifts[i % 2])) for e in (0, 1)
            ]
            old = sums[i % 2]
            sums[i % 2] = [arith.addf(*ab) for ab in zip(old, pair, strict=True)] if old else pair
            both = vector.from_elements(ir.VectorType.get((2,), f32), pair)
            if narrow is not None:
                both = arith.truncf(ir.VectorType.get((2,), narrow.get()), both)
            pairs.append(both)
        totals = [arith.addf(*pair) for pair in sums]
        if not lane_sums:
            totals = [_sum_of_quad(total) for total in totals]
        return with_registers(x, pairs), _row_of(totals, shift)

    return emit(x, shift)


def _row_of(numbers, like):
    """A row vector of float32 numbers, one for each of a thread's rows, laid out like another."""
    kind: Any = next(iter(like.registers.flat)).type
    if isinstance(kind, ir.VectorType):
        numbers = [vector.broadcast(kind, number) for number in numbers]
    return with_registers(like, numbers)


def sum_of_lanes(row_sum, call: Call):
    """Row sums, from those that each of the four lanes of a row made for itself."""
    if call.interpret:
        return row_sum
    out = plgpu.ShapeDtypeStruct(row_sum.shape, jnp.dtype(jnp.float32), layout=ROW)

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=out)
    def emit(_, row_sum):
        return _row_of([_sum_of_quad(element(r, 0)) for r in row_sum.registers.flat], row_sum)

    return emit(row_sum)


def exp2_of(x, factor: float, shift, *, call: Call):
    """`tile_math.exp2_of` of a [64, n] tile: one FMA and one exponential a number."""
    if call.interpret:
        return tile_math.exp2_of(x, factor, shift)
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=out)
    def emit(_, x, shift):
        f32 = ir.F32Type.get()
        scale = arith.constant(f32, ir.FloatAttr.get(f32, factor))
        pairs = []
        for number, less in zip(x.registers.flat, shift.registers.flat, strict=True):
            pair = [
                _exp2(mlir_math.fma(element(number, e), scale, arith.negf(element(less, e))))
                for e in (0, 1)
            ]
            pairs.append(vector.from_elements(ir.VectorType.get((2,), f32), pair))
        return with_registers(x, pairs)

    return emit(x, shift)


def _exp2(x) -> Any:
    return llvm.inline_asm(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def _sum_of_quad(x):
    """Sums over the four lanes that share a row."""
    for distance in (1, 2):
        x = arith.addf(x, mgpu_utils.shfl_bfly(x, distance))
    return x


def with_registers(array, registers):
    """An array laid out like another."""
    held = np.empty(len(registers), dtype=object)
    held[:] = registers
    return fragmented_array.FragmentedArray(
        _registers=held.reshape(array.registers.shape), _layout=array.layout, _is_signed=None
    )


def when_in_place(condition, array, change):
    """`change()` where a uniform condition holds, else `array`: same layout, same registers.

    Args:
        condition: i1.
        array: a FragmentedArray.
        change: makes one of the same layout; called while its code is emitted.
    """
    types = [r.type for r in array.registers.flat]
    branch: Any = scf.IfOp(condition, types, has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(change().registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(list(array.registers.flat))
    registers = np.array(list(branch.results), dtype=object).reshape(array.registers.shape)
    return fragmented_array.FragmentedArray(
        _registers=registers, _layout=array.layout, _is_signed=array.is_signed
    )


def num_blocks_at_once(total: int, call: Call) -> int:
    """Thread blocks of a persistent kernel: one a multiprocessor."""
    if call.interpret:
        return min(total, 2)
    device = gpus.detect()
    return min(total, device.sms if device else 132)


def compiler_params():
    """How all kernels are lowered."""
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        # Rows are reduced within a quad of lanes, which takes no shared memory.
        reduction_scratch_bytes=0,
    )


def launch(body, inputs, *, name: str, outs, scratch, blocks: int, threads: int):
    """Runs a persistent kernel.

    Args:
        body: takes the inputs as references, the outputs' references, then the scratch trees.
        inputs: operands, `Inputs` or another tree that has a `q`.
        name: shown by profilers and compiler reports.
        outs: (shape, dtype) of each output.
        scratch: trees of shared memory and barriers.
        blocks, threads: thread blocks, and warpgroups in each.
    """
    axes = _compat.varying_axes(inputs)
    inputs = _compat.match_varying(inputs, axes)
    leaves, tree = jax.tree.flatten(inputs)

    def flat_body(*refs):
        operands = jax.tree.unflatten(tree, refs[: len(leaves)])
        results = refs[len(leaves) : len(leaves) + len(outs)]
        body(operands, results, *refs[len(leaves) + len(outs) :])

    flat_body.__name__ = name
    return plgpu.kernel(
        flat_body,
        out_type=tuple(_compat.out_struct(shape, dtype, inputs.q) for shape, dtype in outs),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="wg",
        compiler_params=compiler_params(),
        kernel_name=name,
    )(*leaves)
