"""The kernel that merges the parts of split blocks, see `pallas_attn.combine` for the maths.

    grid: (KV heads, blocks of rows, shares of a block's rows)

    one instance, for each of its rows, the parts in blocks of a few:
        lse of the parts -> weights;  acc = acc·correction + Σ weight·out;  with the sink at the end

Blocks that were not split have their out and lse already: these arrays are updated in place.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_attn import work
from pallas_attn.decode_call import DecodeCall, DecodeInputs
from pallas_attn.tiles import padded_dim
from pallas_attn.triton import common

# float32 elements of partial outputs that an instance holds at once.
_TILE = 4096


class _Launch(NamedTuple):
    num_warps: int = 4
    num_stages: int = 2


def merge(call: DecodeCall, inputs: DecodeInputs, out, lse, part_out, part_lse, *, launch, read):
    """Merges the parts of every block that was split into out and lse.

    Args:
        call: static facts.
        inputs: lengths, mask and sinks; no q, k, v.
        out, lse: of the blocks that were not split; updated in place.
        part_out: float32 [items, kv_heads, block_rows, padded v_dim]; part_lse: without the last.
        launch, read: see `pallas_attn.triton.decode`.
    """
    spec = call.spec
    rows = call.tiles.block_rows
    if spec.q_len is not None:
        rows = min(rows, spec.q_len * spec.group)
    shares = min(rows, 16)
    return launch(
        functools.partial(_merge_kernel, call=call, read=read, rows=-(-rows // shares)),
        call,
        _Launch(),
        name="pallas_attn_decode_merge",
        grid=(spec.kv_heads, work.num_blocks(call), shares),
        operands=(out, lse, part_out, part_lse, inputs),
        outs=[(out.shape, out.dtype), (lse.shape, lse.dtype)],
        in_place=2,
    )


def _merge_kernel(
    _out, _lse, part_out, part_lse, inputs: DecodeInputs, out_ref, lse_ref, *, call, read, rows
):
    spec = call.spec
    kv_head, share = pl.program_id(0), pl.program_id(2)
    block = work.block_of(call, inputs, pl.program_id(1), read)
    at = work.sequence(call, inputs, block.seq, read)
    first = block.block * np.int32(call.tiles.block_rows)
    left = jnp.minimum(
        at.q_num * np.int32(spec.group) - first, np.int32(call.tiles.block_rows)
    ) - share * np.int32(rows)
    count = jnp.clip(left, np.int32(0), np.int32(rows))
    split = block.exists & (block.splits > np.int32(1))
    count = jnp.where(split, count, np.int32(0))

    def one_row(i, nothing):
        row = share * np.int32(rows) + i
        token = lax.div(first + row, jnp.int32(spec.group))
        head = kv_head * np.int32(spec.group) + first + row - token * np.int32(spec.group)
        token = at.q_start + token
        sink = None
        if inputs.sinks is not None:
            sink = pltriton.load(inputs.sinks.at[head]).astype(jnp.float32)
        factor, lse, acc = _merge_parts(call, part_out, part_lse, block, (kv_head, row), sink)
        pltriton.store(lse_ref.at[token, head], lse)
        start = 0
        for chunk in acc:
            width = chunk.shape[0]
            columns = start + lax.iota(jnp.int32, width)
            view = out_ref.at[token, head, columns]
            pltriton.store(view, (chunk * factor).astype(out_ref.dtype), mask=columns < spec.v_dim)
            start += width
        return nothing

    lax.fori_loop(jnp.int32(0), count, one_row, jnp.int32(0))


def _merge_parts(call: DecodeCall, part_out, part_lse, block: work.Block, place, sink):
    """The factor of the accumulated row, its lse, and the accumulator in chunks."""
    kv_head, row = place
    width = padded_dim(call.spec.v_dim)
    many = 1 << (work.max_splits(call) - 1).bit_length()
    size = max(1, min(many, _TILE // (1 << (width - 1).bit_length())))
    widths = [n for _, n in common.chunks_of(call.spec.v_dim, jnp.bfloat16)]

    def step(i, carry):
        top, total, acc = carry
        part = i * np.int32(size) + lax.iota(jnp.int32, size)
        exists = part < block.splits
        item = jnp.where(exists, block.first_item + part, np.int32(0))
        lse = pltriton.load(part_lse.at[item, kv_head, row], mask=exists, other=-jnp.inf)
        new_top = jnp.maximum(top, lse.max())
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, correction = jnp.exp(lse - base), jnp.exp(top - base)
        chunks, start = [], 0
        for chunk, n in zip(acc, widths, strict=True):
            mask = jnp.broadcast_to(exists[:, None], (size, n))
            columns = start + lax.iota(jnp.int32, n)[None, :]
            view = part_out.at[item[:, None], kv_head, row, columns]
            out = pltriton.load(view, mask=mask, other=0.0)
            weights = lax.broadcast_in_dim(weight, (size, n), (0,))
            chunks.append(chunk * correction + (weights * out).sum(axis=0))
            start += n
        return new_top, total * correction + weight.sum(), tuple(chunks)

    carry = (
        jnp.float32(-jnp.inf), jnp.float32(0.0), tuple(jnp.zeros((n,), jnp.float32) for n in widths)
    )  # fmt: skip
    steps = work.ceil_div(block.splits, jnp.int32(size))
    top, total, acc = lax.fori_loop(jnp.int32(0), steps, step, carry)
    seen = top > -jnp.inf
    base = jnp.where(seen, top, 0.0)
    shrink = jnp.float32(1.0)
    if sink is not None:
        higher = jnp.maximum(base, sink)
        shrink = jnp.exp(base - higher)
        total = total * shrink + jnp.exp(sink - higher)
        base = higher
    total = jnp.where(seen, total, 1.0)
    factor = jnp.where(seen, shrink / total, 0.0)
    return factor, jnp.where(seen, base + jnp.log(total), -jnp.inf), acc
