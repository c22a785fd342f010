"""What the three Triton kernels share: operands, loads, the blocks to visit, and the launch."""

import contextlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_attn import _compat, tile_math
from pallas_attn.block_table import Visits
from pallas_attn.call import Call
from pallas_attn.mask_core import Mask, Position
from pallas_attn.tiles import KernelTiles, padded_dim, split_dim


class Inputs(NamedTuple):
    """Operands of a kernel: arrays outside, references inside. Unused ones are None.

    q, dout: [batch, q_len, q_heads, d]; k, v: [batch, kv_len, kv_heads, d]; bias: rank 4;
    sinks: [q_heads]; lse_log2, delta: [batch, q_heads, q_len]; visits, mask: see `block_table`;
    origin: int32 [2], the batch and query head of the first ones here, where a call is spread over
    devices.
    """

    q: Any
    k: Any
    v: Any
    visits: Visits
    mask: Mask
    bias: Any = None
    sinks: Any = None
    dout: Any = None
    lse_log2: Any = None
    delta: Any = None
    origin: Any = None


def chunks_of(dim: int, dtype) -> tuple[tuple[int, int], ...]:
    """(start, width) of the chunks of the head dimension.

    float32 matmuls add up term by term; sums over 64 channels, added once more, err half as much as
    one over 256.
    """
    return split_dim(dim, 64 if dtype == jnp.float32 else 256)


def zeros(rows: int, dim: int, dtype):
    """float32 accumulators [rows, dim], in chunks of the head dimension."""
    return tuple(jnp.zeros((rows, width), jnp.float32) for _, width in chunks_of(dim, dtype))


def dot(a, b, *, transpose_b: bool = False):
    """a·b or a·bᵀ on the tensor cores, accumulated in float32.

    float32 operands keep float32's accuracy: TF32 alone would lose 13 bits.
    """
    contract = ((1,), (1 if transpose_b else 0,))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def exp2_for(call):
    """`tile_math.exp2_of` as two instructions, for a call of any kind.

    Triton's own exp2 guards against denormals with three more instructions an element, and XLA does
    not let it fuse the scaling into the subtraction. Flushing denormal probabilities to 0 costs
    nothing.
    """
    if call.interpret:
        return tile_math.exp2_of

    def exp2(x, factor: float, shift):
        constant = struct.pack(">f", factor).hex()
        (out,) = pltriton.elementwise_inline_asm(
            f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{constant}, $2; ex2.approx.ftz.f32 $0, t; }}",
            args=[x, -shift],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return out

    return exp2


def dot_chunks(a, b):
    """Σ a_c·b_cᵀ over the chunks of the head dimension."""
    total = dot(a[0], b[0], transpose_b=True)
    for a_chunk, b_chunk in zip(a[1:], b[1:], strict=True):
        part = dot(a_chunk, b_chunk, transpose_b=True)
        # Triton folds a sum into the matmul's accumulator, where it would go on term by term; it
        # does not see through a difference.
        total = total - (-part) if a_chunk.dtype == jnp.float32 else total + part
    return total


def add_dots(accumulators, a, b):
    """accumulator_c + a·b_c for each chunk of the head dimension."""
    return tuple(acc + dot(a, chunk) for acc, chunk in zip(accumulators, b, strict=True))


def load_rows(ref, start, size: int, dim: int, rows=None, head=None):
    """A tile [size, dim] of a [length, padded_dim] reference, in chunks of the head dimension.

    Args:
        ref: the reference; [length, heads, padded_dim] when `head` is given.
        start: first row; None for a reference that is one block of rows.
        size: rows.
        dim: the true width; what lies past it reads as 0.
        rows: bool [size, 1], rows that exist and count; others read as 0. None for all.
        head: which head to read.
    """
    where = slice(None) if start is None else pl.ds(start, size)
    chunks = []
    for first, width in chunks_of(dim, ref.dtype):
        mask = rows
        if first + width > dim:
            exists = first + lax.broadcasted_iota(jnp.int32, (size, width), 1) < dim
            mask = exists if rows is None else exists & rows
        columns = pl.ds(first, width)
        view = ref.at[where, columns] if head is None else ref.at[where, head, columns]
        if mask is None:
            chunks.append(pltriton.load(view))
        else:
            mask = jnp.broadcast_to(mask, (size, width))
            chunks.append(pltriton.load(view, mask=mask, other=0.0))
    return tuple(chunks)


def store_rows(ref, chunks, dim: int, rows=None):
    """Writes a tile of chunks to a [size, padded_dim] reference, existing rows and columns only."""
    for (first, width), chunk in zip(chunks_of(dim, ref.dtype), chunks, strict=True):
        mask = rows
        if first + width > dim:
            columns = first + lax.broadcasted_iota(jnp.int32, chunk.shape, 1) < dim
            mask = columns if rows is None else columns & rows
        view = ref.at[:, pl.ds(first, width)]
        mask = None if mask is None else jnp.broadcast_to(mask, chunk.shape)
        pltriton.store(view, chunk.astype(ref.dtype), mask=mask)


def load_residuals(inputs: Inputs, member, start, size: int, length: int | None):
    """lse_log2 and delta of a block of rows; past `length` lse is +inf, so that p is 0 there.

    Args:
        inputs: with lse_log2 and delta as [group, q_len] references.
        member: which head of them.
        start, size: the rows.
        length: None when no row can lie past the end.
    """
    index = (member, pl.ds(start, size))
    views = inputs.lse_log2.at[index], inputs.delta.at[index]
    if length is None:
        return tuple(pltriton.load(view) for view in views)
    inside = start + lax.iota(jnp.int32, size) < length
    fills = (jnp.inf, 0.0)
    return tuple(
        pltriton.load(view, mask=inside, other=fill)
        for view, fill in zip(views, fills, strict=True)
    )


# Blocks to visit: how many, and which the i-th is.
_Part = tuple[Any, Callable[[Any], Any]]


class Rows(NamedTuple):
    """Where a kernel instance stands.

    batch, head: absolute, for masks and tables; local_batch, local_head: in this device's arrays.
    """

    batch: Any
    head: Any
    local_batch: Any
    local_head: Any


def rows_of(inputs: Inputs, batch, head) -> Rows:
    """Absolute indices from those of this device's share."""
    if inputs.origin is None:
        return Rows(batch, head, batch, head)
    return Rows(batch + inputs.origin[0], head + inputs.origin[1], batch, head)


def position(mask: Mask, at: Rows, call: Call, q_index, kv_index) -> Position:
    """Where the mask is asked; clamped to the lengths when it reads arrays there."""
    spec = call.spec
    if jax.tree.leaves(mask):
        q_index = jnp.minimum(q_index, np.int32(spec.q_len - 1))
        kv_index = jnp.minimum(kv_index, np.int32(spec.kv_len - 1))
    return Position(at.batch, at.head, q_index, kv_index, spec.q_len, spec.kv_len)


def counted_rows(start, size: int, length: int | None, valid, batch):
    """Rows before `length` that the mask does not call padding, bool [size, 1]; None when all are.

    Args:
        start, size: the rows.
        length: of the sequence; None when no block can reach past it.
        valid: `mask.q_valid` or `mask.kv_valid`.
        batch: absolute batch index.
    """
    index = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    inside = None if length is None else index < length
    clamped = index if length is None else jnp.minimum(index, np.int32(length - 1))
    counts = valid(batch, clamped)
    if inside is None or counts is None:
        return inside if counts is None else counts
    return inside & counts


def partial_kv_rows(mask: Mask, at: Rows, call: Call, kv_start, size: int, *, padding: bool = True):
    """`counted_rows` of a block of keys in the partial loop.

    Args:
        padding: whether keys that the mask calls padding must read as 0. What is only ever a left
            operand of masked logits may hold anything there, and saves a load that waits for
            another.
    """
    ragged = call.spec.kv_len % size != 0
    length = call.spec.kv_len if ragged else None
    valid = mask.kv_valid if padding else lambda *_: None
    return counted_rows(kv_start, size, length, valid, at.batch)


def tile_indices(tiles: KernelTiles, start, transposed: bool):
    """Query and key index of a tile as column and row vectors; as row and column if transposed."""
    q_shape, kv_shape = (tiles.block_q, 1), (1, tiles.block_kv)
    if transposed:
        q_shape, kv_shape = q_shape[::-1], kv_shape[::-1]
    axis = 1 if transposed else 0
    return (
        start[0] + lax.broadcasted_iota(jnp.int32, q_shape, axis),
        start[1] + lax.broadcasted_iota(jnp.int32, kv_shape, 1 - axis),
    )


def seen(mask: Mask, at: Rows, call: Call, tiles: KernelTiles, start, transposed: bool = False):
    """The mask on a tile, the end of the keys included.

    Args:
        start: (first query, first key).
        transposed: whether the tile is [keys, queries].
    """
    spec = call.spec
    q_index, kv_index = tile_indices(tiles, start, transposed)
    allowed = mask.allowed(position(mask, at, call, q_index, kv_index))
    if spec.kv_len % tiles.block_kv:
        allowed = allowed & (kv_index < spec.kv_len)
    shape = (tiles.block_kv, tiles.block_q) if transposed else (tiles.block_q, tiles.block_kv)
    return jnp.broadcast_to(allowed, shape)


def tile_logits(
    inputs: Inputs, call: Call, tiles: KernelTiles, qk, start, at: Rows, transposed=False
):
    """`tile_math.logits` of a tile with its share of the bias; axes of length 1 broadcast."""
    spec, bias = call.spec, None
    if inputs.bias is not None:
        shape = inputs.bias.shape
        inside, index = None, []
        lens = (None, None, spec.q_len, spec.kv_len)
        places = (at.local_batch, at.local_head, *tile_indices(tiles, start, transposed))
        for size, place, length in zip(shape, places, lens, strict=True):
            index.append(place if size > 1 else np.int32(0))
            if size > 1 and length is not None:
                exists = place < length
                inside = exists if inside is None else inside & exists
        if inside is None:
            bias = inputs.bias[tuple(index)]
        else:
            bias = pltriton.load(inputs.bias.at[tuple(index)], mask=inside, other=0.0)
        bias = jnp.broadcast_to(bias, qk.shape).astype(jnp.float32)
    return tile_math.logits(qk, spec.scale, spec.soft_cap, bias)


def visit(visits: Visits, at: Rows, row_block, take, carry, repeat: int = 1):
    """Runs `take` over the blocks that a row of blocks visits, full ones first.

    Args:
        visits: the table, as references.
        at: absolute batch and head.
        row_block: the row of blocks.
        take: (member, block, carry, partial: bool) -> carry.
        carry: initial state.
        repeat: how often to visit each block; `member` counts the visits. One loop over both costs
            fewer registers than a loop in a loop.
    """
    sizes = visits.table.shape
    row = (at.batch if sizes[0] > 1 else 0, at.head if sizes[1] > 1 else 0, row_block)
    if visits.form == "list":
        num_full, num_partial = (visits.counts[(*row, i)] for i in range(2))
        full = (num_full, lambda i: visits.table[(*row, i)])
        partial = (num_partial, lambda i: visits.table[(*row, num_full + i)])
        return _loops(visits, full, partial, take, carry, repeat)
    first, full_first, full_last, last = (visits.table[(*row, i)] for i in range(4))
    before = full_first - first
    full = (full_last - full_first, lambda i: full_first + i)
    partial = (
        before + last - full_last,
        lambda i: jnp.where(i < before, first + i, full_last + i - before),
    )

    def run(carry):
        return _loops(visits, full, partial, take, carry, repeat)

    def run_with_holes(carry):
        def block(j, carry):
            def shown(carry):
                if repeat == 1:
                    return take(np.int32(0), j, carry, True)
                heads = jnp.int32(0), jnp.int32(repeat)
                return lax.fori_loop(*heads, lambda m, c: take(m, j, c, True), carry)

            place = (j, row_block) if visits.by_key else (row_block, j)
            return lax.cond(visits.some[(*row[:2], *place)], shown, lambda c: c, carry)

        return lax.fori_loop(first, last, block, carry)

    if visits.form == "run":
        return run(carry)
    return lax.cond(visits.table[(*row, 4)] == 0, run, run_with_holes, carry)


def _loops(visits: Visits, full: _Part, partial: _Part, take, carry, repeat: int):
    """Two loops, over the full and over the partial blocks."""

    def loop(count, block, is_partial, carry):
        def step(i, carry):
            if repeat == 1:
                return take(np.int32(0), block(i), carry, is_partial)
            member = lax.div(i, count)
            return take(member, block(i - member * count), carry, is_partial)

        return lax.fori_loop(jnp.int32(0), count * repeat, step, carry)

    if visits.any_full:
        carry = loop(*full, False, carry)
    if visits.any_partial:
        carry = loop(*partial, True, carry)
    return carry


def whole(x):
    """A BlockSpec that shows every instance the whole array."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def head_block(rows: int, dim: int, index):
    """A BlockSpec for `rows` rows of one head of a [batch, length, heads, dim] array."""
    return pl.BlockSpec((None, rows, None, padded_dim(dim)), index)


def shared_specs(inputs: Inputs) -> dict[str, Any]:
    """Specs of what every instance sees whole: tables, mask arrays, bias, sinks."""
    names = ("visits", "mask", "bias", "sinks", "origin")
    return {name: jax.tree.map(whole, getattr(inputs, name)) for name in names}


def query_grid(inputs: Inputs, block_q: int):
    """The grid of a kernel whose instances own blocks of queries, last ones first.

    Args:
        inputs: the operands.
        block_q: queries an instance owns.

    Returns:
        the grid (q blocks, q heads, batch); the index map of q-like arrays; specs of q, k, v,
        tables, mask, bias and sinks.
    """
    (batch, q_len, q_heads, head_dim), (kv_len, kv_heads, v_dim) = (
        inputs.q.shape,
        inputs.v.shape[1:],
    )
    group, num_q = q_heads // kv_heads, pl.cdiv(q_len, block_q)

    def q_index(i, h, b):
        return (b, num_q - 1 - i, h, 0)

    def kv_index(i, h, b):
        del i
        return (b, 0, lax.div(h, jnp.int32(group)), 0)

    specs = Inputs(
        q=head_block(block_q, head_dim, q_index),
        k=head_block(kv_len, head_dim, kv_index),
        v=head_block(kv_len, v_dim, kv_index),
        **shared_specs(inputs),
    )
    return (num_q, q_heads, batch), q_index, specs


def launch(
    kernel, call: Call, tiles: KernelTiles, *, name: str, grid, inputs: Inputs, specs: Inputs, outs
):
    """Runs a kernel over a grid.

    Args:
        kernel: takes Inputs of references and the outputs' references.
        call, tiles: static facts and schedule.
        name: shown by profilers and compiler reports.
        grid: instances.
        inputs, specs: operands and how each instance sees them.
        outs: (shape, dtype, BlockSpec) of each output.
    """
    axes = _compat.varying_axes(inputs)
    if axes and call.interpret:
        raise NotImplementedError(
            "Pallas' interpreter does not run inside a shard_map that checks varying axes; pass "
            "check_vma=False there while interpreting (on a GPU the check may stay on)"
        )
    inputs = _compat.match_varying(inputs, axes)
    kernel.__name__ = name
    shield = _compat.without_interpret_context() if call.interpret else contextlib.nullcontext()
    with shield:
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[specs],
            out_specs=[spec for _, _, spec in outs],
            out_shape=[_compat.out_struct(shape, dtype, inputs.q) for shape, dtype, _ in outs],
            interpret=call.interpret,
            compiler_params=pltriton.CompilerParams(
                num_warps=tiles.num_warps, num_stages=tiles.num_stages
            ),
            name=name,
        )(inputs)
