"""The serving kernel: new tokens attend to a cache in pages, split over the keys.

    grid: (KV heads, items), an item being a part of the keys of a block of rows (`work.py`)

    one instance: the rows are tokens x the query heads of one KV head, so that K and V are read
    once for all of them
        full loop    for each tile of keys that all rows see whole:   no mask code
        partial loop for each other tile of this part:                bounds and mask
            page numbers -> k, v by page (or row by row, where a page is smaller than 16 keys)
            -> s = q·kᵀ -> logits -> (mask) -> softmax -> acc = acc·correction + p·v
        a block that is not split: out and lse;  otherwise: partial out and lse in float32

    merging: one instance a row, head and block; leaves blocks that were not split as they are

KV heads vary fastest over the grid: instances that run side by side read the same tokens' heads,
which lie side by side. Page numbers and K and V of the next tiles are loaded ahead (num_stages, by
Triton's pipeliner). Flash-decoding (Dao et al., 2023) on FlashAttention-2, arXiv 2307.08691.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_attn import _compat, tile_math, work
from pallas_attn.decode_call import DecodeCall, DecodeInputs, DecodeSpec, DecodeTiles
from pallas_attn.mask_core import FAR, Position
from pallas_attn.spec import KERNEL_DTYPES
from pallas_attn.tiles import is_power_of_two, padded_dim
from pallas_attn.triton import common
from pallas_attn.triton.merge import merge

MAX_HEAD_DIM = 576
# Keys of one page that one load takes at least; smaller pages are gathered row by row.
_LEAST_RUN = 16


def unsupported_reason(spec: DecodeSpec, mask, gpu) -> str | None:
    """Why these kernels cannot take a call, or None when they can."""
    del mask
    if gpu is None:
        return (
            "it needs an NVIDIA GPU, and this process runs on none "
            "(pallas_attn.interpret() runs it by interpretation)"
        )
    if gpu.compute_capability < (8, 0):
        return (
            f"it needs compute capability 8.0 or more, and {gpu.name} has {gpu.compute_capability}"
        )
    if spec.dtype not in KERNEL_DTYPES:
        return f"it takes {', '.join(KERNEL_DTYPES)}, and the operands are {spec.dtype}"
    widest = max(spec.head_dim, spec.v_dim)
    if widest > MAX_HEAD_DIM:
        return (
            f"it takes head_dim and v_dim up to {MAX_HEAD_DIM}, not {spec.head_dim}, {spec.v_dim}"
        )
    if not candidate_tiles(spec, gpu):
        dims = f"head_dim {spec.head_dim}, v_dim {spec.v_dim}, {spec.dtype}"
        return f"no tiles of {dims} fit {gpu.name}'s shared memory"
    return None


def candidate_tiles(spec: DecodeSpec, gpu) -> list[DecodeTiles]:
    """Schedules worth trying that fit the device's shared memory, the default first."""
    rows, dim = _rows(spec), max(padded_dim(spec.head_dim), padded_dim(spec.v_dim))
    # Page numbers are one more link in the pipeline: tiles of keys are (stages - 1) / 2 deep then.
    deep, shallow = (5, 3) if spec.paged else (3, 2)

    def tiles(block_rows: int, block_kv: int, num_warps: int, num_stages: int) -> DecodeTiles:
        return DecodeTiles(block_rows, block_kv, num_warps, num_stages, gather=True)

    if spec.dtype == "float32":
        options = [tiles(16, 32, 4, shallow), tiles(16, 16, 4, 1)]
    elif dim > 256:
        wide = [tiles(64, 32, 8, shallow)] if rows >= 64 else []
        options = [*wide, tiles(16, 32, 4, deep), tiles(16, 32, 4, shallow), tiles(16, 16, 4, 1)]
    elif rows >= 64:
        block_kv = 64 if dim <= 128 else 32
        options = [
            tiles(64, block_kv, 4, deep), tiles(128, block_kv, 8, deep),
            tiles(64, block_kv, 4, shallow), tiles(64, 32, 4, shallow), tiles(16, 16, 4, 1),
        ]  # fmt: skip
    else:
        block_kv = 64 if dim <= 128 else 32
        options = [
            tiles(rows, block_kv, 4, deep), tiles(rows, 32, 4, deep),
            tiles(rows, 32, 4, shallow), tiles(16, 16, 4, 1),
        ]  # fmt: skip
    limit = gpu.smem_per_block if gpu else None
    return [t for t in options if limit is None or smem_bytes(t, spec) <= limit]


def _rows(spec: DecodeSpec) -> int:
    """Rows of a tile that a typical sequence fills: a power of two from 16 to 128."""
    tokens = spec.q_len or -(-spec.tokens // max(1, spec.batch))
    return min(128, max(16, 1 << (max(1, tokens * spec.group) - 1).bit_length()))


def smem_bytes(tiles: DecodeTiles, spec: DecodeSpec) -> int:
    """Shared memory that Triton's pipeliner will ask for, as its compiled kernels report it.

    q, and the tiles of k and v in flight; matmuls that read them from shared memory (from 64 rows
    on) hold one more.
    """
    width = 4 if spec.dtype == "float32" else 2
    both = padded_dim(spec.head_dim) + (0 if spec.shared_kv else padded_dim(spec.v_dim))
    links = 2 if spec.paged else 1
    in_flight = max(1, (tiles.num_stages - 1) // links) + (tiles.block_rows >= 64)
    stay = tiles.block_rows * padded_dim(spec.head_dim)
    return width * (stay + in_flight * tiles.block_kv * both) + 4096


def run(call: DecodeCall, inputs: DecodeInputs):
    """Out and lse; see `decode_call.attend`."""
    spec, tiles = call.spec, call.tiles
    if not (is_power_of_two(tiles.block_rows) and is_power_of_two(tiles.num_warps)):
        raise ValueError(f"tiles: got {tiles}, expected powers of two")
    out_shapes = [
        ((spec.tokens, spec.q_heads, spec.v_dim), inputs.q.dtype),
        ((spec.tokens, spec.q_heads), jnp.float32),
    ]
    items = work.num_items(call)
    split = work.max_splits(call) > 1
    parts = []
    if split:
        rows = (items, spec.kv_heads, tiles.block_rows)
        parts = [((*rows, padded_dim(spec.v_dim)), jnp.float32), (rows, jnp.float32)]
    out, lse, *partial = launch(
        functools.partial(_kernel, call=call),
        call,
        tiles,
        name="pallas_attn_decode",
        grid=(spec.kv_heads, items),
        operands=(inputs,),
        outs=[*out_shapes, *parts],
    )
    if split:
        lens = inputs._replace(q=None, k=None, v=None, page_table=None)
        out, lse = merge(call, lens, out, lse, *partial, launch=launch, read=read)
    return out, lse


def launch(kernel, call: DecodeCall, tiles, *, name: str, grid, operands, outs, in_place: int = 0):
    """Runs a kernel whose instances all see whole arrays.

    Args:
        kernel: takes references to operands and outputs.
        call: static facts.
        tiles: with num_warps and num_stages.
        name: shown by profilers and compiler reports.
        grid: instances.
        operands: trees of arrays.
        outs: (shape, dtype) of each output.
        in_place: how many operands, from the first, are the first outputs' old contents.
    """
    axes = _compat.varying_axes(operands)
    if axes and call.interpret:
        raise NotImplementedError(
            "Pallas' interpreter does not run inside a shard_map that checks varying axes; pass "
            "check_vma=False there while interpreting (on a GPU the check may stay on)"
        )
    operands = _compat.match_varying(operands, axes)
    like = jax.tree.leaves(operands)[0]
    named = functools.partial(kernel)
    vars(named)["__name__"] = name
    shield = _compat.without_interpret_context() if call.interpret else contextlib.nullcontext()
    structs = [_compat.out_struct(shape, dtype, like) for shape, dtype in outs]
    with shield:
        return pl.pallas_call(
            named,
            grid=grid,
            in_specs=list(jax.tree.map(common.whole, operands)),
            out_specs=[common.whole(x) for x in structs],
            out_shape=structs,
            input_output_aliases={i: i for i in range(in_place)},
            interpret=call.interpret,
            compiler_params=pltriton.CompilerParams(
                num_warps=tiles.num_warps, num_stages=tiles.num_stages
            ),
            name=name,
        )(*operands)


def read(ref, index, where):
    """Entries of an array, 0 where `where` is False."""
    return pltriton.load(ref.at[index], mask=where, other=np.int32(0))


def _kernel(inputs: DecodeInputs, out_ref, lse_ref, *partial, call: DecodeCall):
    spec, tiles = call.spec, call.tiles
    kv_head, index = pl.program_id(0), pl.program_id(1)
    item = work.item_of(call, inputs, index, read)
    at = work.sequence(call, inputs, item.seq, read)
    rows = _rows_of(call, kv_head, item, at)
    bounds = _bounds(call, inputs, item, at, rows)
    q = _load(inputs.q, (rows.token, rows.head), spec.head_dim, rows.exists)
    take = functools.partial(
        _take, call=call, inputs=inputs, place=(item.seq, kv_head, at.kv_len), rows=rows, q=q
    )
    carry = (
        jnp.full((tiles.block_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((tiles.block_rows,), jnp.float32),
        common.zeros(tiles.block_rows, spec.v_dim, inputs.k.dtype),
    )
    row_max, row_sum, acc = _visit(bounds, take, carry)
    sink = None
    if inputs.sinks is not None:
        sink = pltriton.load(inputs.sinks.at[rows.head], mask=rows.exists, other=0.0)
        sink = sink.astype(jnp.float32)
    whole = rows.exists
    if partial:
        whole = rows.exists & (item.splits == np.int32(1))
        part = rows.exists & (item.splits > np.int32(1))
        part_out, part_lse = partial
        factor, lse = tile_math.finalize(row_max, row_sum)
        inside = lax.iota(jnp.int32, tiles.block_rows)
        pltriton.store(part_lse.at[index, kv_head, inside], lse, mask=part)
        _store(part_out, (index, kv_head, inside), acc, factor, part, None)
    factor, lse = tile_math.finalize(row_max, row_sum, sink)
    pltriton.store(lse_ref.at[rows.token, rows.head], lse, mask=whole)
    _store(out_ref, (rows.token, rows.head), acc, factor, whole, spec.v_dim)


class _Rows:
    """The rows of an instance: vectors [block_rows].

    token, head: where in q; position: in the sequence; exists: whether there is such a row.
    """

    def __init__(self, token, head, position, exists):
        self.token, self.head, self.position, self.exists = token, head, position, exists


def _rows_of(call: DecodeCall, kv_head, item: work.Item, at: work.Sequence) -> _Rows:
    size, group = call.tiles.block_rows, call.spec.group
    index = item.block * np.int32(size) + lax.iota(jnp.int32, size)
    exists = (index < at.q_num * np.int32(group)) & item.exists
    token = lax.div(index, jnp.full_like(index, group))
    member = index - token * np.int32(group)
    # Rows that do not exist stand past the end: an interpreter writes what is masked, too, where it
    # would meet rows that do exist.
    return _Rows(
        jnp.where(exists, at.q_start + token, jnp.full_like(index, call.spec.tokens)),
        kv_head * np.int32(group) + member,
        at.kv_len - at.q_num + token,
        exists,
    )


def _bounds(call: DecodeCall, inputs: DecodeInputs, item: work.Item, at: work.Sequence, rows):
    """(first, full_first, full_last, last) tile of keys of this part; full ones need no mask."""
    size, zero = np.int32(call.tiles.block_kv), np.int32(0)
    seq = jnp.minimum(item.seq, np.int32(call.spec.batch - 1))
    found = work.row_span(inputs.mask, seq, rows.position, at.kv_len)
    start, end = (zero, at.kv_len) if found is None else found
    start, end = (
        jnp.clip(jnp.broadcast_to(x, rows.position.shape).astype(jnp.int32), zero, at.kv_len)
        for x in (start, end)
    )
    sees, far = start < end, np.int32(FAR)
    start, end = jnp.where(sees, start, far), jnp.where(sees, end, zero)
    first = lax.div(jnp.where(rows.exists, start, far).min(), size)
    last = work.ceil_div(jnp.where(rows.exists, end, zero).max(), size)
    count = jnp.maximum(last - first, zero)
    last = first + lax.div(count * (item.split + np.int32(1)), item.splits)
    first = first + lax.div(count * item.split, item.splits)
    if found is None:
        return first, first, first, last
    inner_first = work.ceil_div(jnp.where(rows.exists, start, zero).max(), size)
    inner_last = lax.div(jnp.where(rows.exists, end, far).min(), size)
    full_first = jnp.minimum(jnp.maximum(inner_first, first), last)
    return first, full_first, jnp.minimum(jnp.maximum(inner_last, full_first), last), last


def _visit(bounds, take, carry):
    """The full tiles, then those before and after them."""
    first, full_first, full_last, last = bounds
    if full_first is not first:
        carry = lax.fori_loop(full_first, full_last, functools.partial(take, partial=False), carry)
    before = full_first - first

    def other(i, carry):
        tile = jnp.where(i < before, first + i, full_last + i - before)
        return take(tile, carry, partial=True)

    return lax.fori_loop(jnp.int32(0), before + last - full_last, other, carry)


def _take(tile, carry, *, call: DecodeCall, inputs: DecodeInputs, place, rows, q, partial: bool):
    """One tile of keys into the running softmax."""
    spec, exp2 = call.spec, common.exp2_for(call)
    row_max, row_sum, acc = carry
    kv_start = tile * np.int32(call.tiles.block_kv)
    keys = _keys(call, inputs, place, kv_start, partial)
    tiles, values, factor = [], [], 1.0
    for k, v, kv_index in keys:
        s, factor = tile_math.logits(common.dot_chunks(q, k), spec.scale, spec.soft_cap)
        if partial:
            s = jnp.where(_seen(call, inputs, place, rows, kv_index, s.shape), s, -jnp.inf)
        tiles.append(s)
        values.append(v)
    new_max = row_max
    for s in tiles:
        new_max = jnp.maximum(new_max, s.max(axis=1) * factor)
    base = jnp.where(new_max == -jnp.inf, 0.0, new_max) if partial else new_max
    correction = exp2(row_max, 1.0, base)
    row_sum = row_sum * correction
    acc = tuple(x * tile_math.widen(correction, x.shape) for x in acc)
    for s, v in zip(tiles, values, strict=True):
        p = exp2(s, factor, tile_math.widen(base, s.shape))
        row_sum = row_sum + p.sum(axis=1)
        acc = common.add_dots(acc, p.astype(v[0].dtype), v)
    return new_max, row_sum, acc


def _seen(call: DecodeCall, inputs: DecodeInputs, place, rows, kv_index, shape):
    """Which keys of a tile each row sees, the end of the sequence included."""
    seq, _, kv_len = place
    q, kv = rows.position[:, None], kv_index[None, :]
    inside = kv < kv_len
    if jax.tree.leaves(inputs.mask):
        last = np.int32(call.spec.capacity - 1)
        q, kv = jnp.clip(q, np.int32(0), last), jnp.minimum(kv, last)
        seq = jnp.minimum(seq, np.int32(call.spec.batch - 1))
    at = Position(seq, rows.head[:, None], q, kv, kv_len, kv_len)
    return jnp.broadcast_to(inputs.mask.allowed(at) & inside, shape)


def _keys(call: DecodeCall, inputs: DecodeInputs, place, kv_start, partial: bool):
    """The keys and values of a tile, in runs that lie together: (k, v, key indices) of each."""
    spec, size = call.spec, call.tiles.block_kv
    seq, kv_head, kv_len = place
    run = math.gcd(spec.page_size, size) if spec.paged else size
    by_row = spec.paged and (run < _LEAST_RUN or (call.tiles.gather and run < size))
    page_size = jnp.int32(spec.page_size)
    for start in (kv_start,) if by_row else (kv_start + np.int32(i) for i in range(0, size, run)):
        kv_index = start + lax.iota(jnp.int32, size if by_row else run)
        exists = kv_index < kv_len if partial else None
        if not spec.paged:
            where = (seq, pl.ds(start, run), kv_head)
        elif by_row:
            number = lax.div(kv_index, jnp.full_like(kv_index, spec.page_size))
            page = _page(inputs, seq, number, exists)
            where = (page, kv_index - number * np.int32(spec.page_size), kv_head)
        else:
            number = lax.div(start, page_size)
            page = _page(inputs, seq, number, start < kv_len if partial else None)
            where = (page, pl.ds(start - number * page_size, run), kv_head)
        k = _load(inputs.k, where, spec.head_dim, exists)
        v_exists = exists
        if partial:
            last = jnp.minimum(kv_index, np.int32(spec.capacity - 1))
            valid = inputs.mask.kv_valid(jnp.minimum(seq, np.int32(spec.batch - 1)), last)
            v_exists = exists if valid is None else exists & valid
        yield k, _values(spec, inputs, k, where, v_exists), kv_index


def _page(inputs: DecodeInputs, seq, number, exists):
    """Entries of the page table; those of pages that a sequence does not have are never read."""
    view = inputs.page_table.at[seq, number]
    if exists is None:
        return pltriton.load(view)
    return pltriton.load(view, mask=exists, other=np.int32(0))


def _values(spec: DecodeSpec, inputs: DecodeInputs, k, where, exists):
    if not spec.shared_kv:
        return _load(inputs.v, where, spec.v_dim, exists)
    chunks = common.chunks_of(spec.v_dim, inputs.k.dtype)
    whole = chunks == common.chunks_of(spec.head_dim, inputs.k.dtype)[: len(chunks)]
    if whole and sum(chunks[-1]) == spec.v_dim:
        # Keys that the mask calls padding have probability 0; the cache holds no junk before the
        # sequence's end.
        return k[: len(chunks)]
    return _load(inputs.k, where, spec.v_dim, exists)


def _load(ref, where, dim: int, exists=None):
    """A tile [rows, dim] in chunks of `dim`; rows that do not exist read as 0.

    Args:
        ref: [..., padded dim].
        where: indices of all axes but the last, one of them a run or vector of rows.
        dim: the true width.
        exists: bool [rows], or None for all.
    """
    chunks = []
    for first, width in common.chunks_of(dim, ref.dtype):
        view = _columns(ref, where, first, width)
        mask = None if exists is None else jnp.broadcast_to(exists[:, None], view.shape)
        if first + width > dim:
            inside = first + lax.broadcasted_iota(jnp.int32, view.shape, 1) < dim
            mask = inside if mask is None else inside & mask
        chunks.append(
            pltriton.load(view) if mask is None else pltriton.load(view, mask=mask, other=0.0)
        )
    return tuple(chunks)


def _columns(ref, where, first: int, width: int):
    """A view [rows, width] of columns `first` ..., which may reach past the last one.

    Runs of rows stay runs; vectors of rows, and columns past the end, index element by element.
    """
    inside = first + width <= ref.shape[-1]
    if inside and not any(jnp.ndim(i) for i in where if not isinstance(i, pl.Slice)):
        return ref.at[(*where, pl.ds(first, width))]

    def rows(i):
        if isinstance(i, pl.Slice):
            i = i.start + lax.iota(jnp.int32, int(i.size))
        return i[:, None] if jnp.ndim(i) else i

    return ref.at[(*map(rows, where), first + lax.iota(jnp.int32, width)[None, :])]


def _store(ref, where, acc, factor, exists, dim: int | None):
    """Writes acc·factor, rows that exist only; `dim` is the true width, None for the padded one."""
    # The accumulator's chunks follow the operands' dtype.
    first = 0
    for chunk in acc:
        width = chunk.shape[1]
        mask = jnp.broadcast_to(exists[:, None], chunk.shape)
        if dim is not None and first + width > dim:
            mask = mask & (first + lax.broadcasted_iota(jnp.int32, chunk.shape, 1) < dim)
        tile = (chunk * tile_math.widen(factor, chunk.shape)).astype(ref.dtype)
        pltriton.store(_columns(ref, where, first, width), tile, mask=mask)
        first += width
