"""The maths of one transposed tile [64 keys, queries] in the backward's consumers."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import tile_math
from pallas_attn.mosaic_gpu import common, masking
from pallas_attn.mosaic_gpu.backward_parts import (
    HEAD,
    HEAD_SHIFT,
    KV_DIRTY,
    KV_START,
    MASK_BATCH,
    PARTIAL,
    Q_START,
    Kernel,
    factor_of,
    is_ragged,
)
from pallas_attn.mosaic_gpu.common import UNIT


def row_start(kernel: Kernel, slot, which):
    """What the columns of s (0) or dp (1) start with, [64 keys, block_q]."""
    start = (2 * slot + which) * kernel.block_q
    ref = kernel.smem.words.at[pl.ds(start, kernel.block_q)]
    words = ref[...] if kernel.call.interpret else plgpu.load(ref, layout=common.COLUMN)
    row = lax.bitcast_convert_type(words, jnp.float32)
    return tile_math.widen(row, (UNIT, kernel.block_q), 1)


def start(kernel: Kernel, slot, s_acc, dp_acc) -> None:
    """Sets what the accumulators begin with, None for one that is not here."""
    if s_acc is not None and factor_of(kernel.call) is not None:
        s_acc[...] = row_start(kernel, slot, 0)
    if dp_acc is not None:
        dp_acc[...] = row_start(kernel, slot, 1)


def probabilities(kernel: Kernel, i, slot, s, key):
    """p, and what dp is to be multiplied with for ds: p, or p·(1 - tanh²) with a cap.

    Args:
        kernel: with the step's references.
        i: the step.
        slot: where its rows' starts lie.
        s: k·qᵀ, plus the start where there is one.
        key: the tile's first row among the keys of the thread block.
    """
    spec, factor = kernel.call.spec, factor_of(kernel.call)
    if factor is not None:
        # Masked before it is scaled, which keeps less between the mask's branch and the
        # exponentials.
        x = _mask(kernel, i, s if factor > 0.0 else -s, key)
        p = jnp.exp2(x * jnp.float32(abs(factor)))
        return p, p
    x, unit = tile_math.logits(s, spec.scale, spec.soft_cap, tanh=tile_math.tanh_by_exp)
    slope = None if spec.soft_cap is None else 1.0 - x * x
    p = jnp.exp2(_mask(kernel, i, x * jnp.float32(unit) + row_start(kernel, slot, 0), key))
    return p, p if slope is None else p * slope


def _mask(kernel: Kernel, i, x, key):
    """-inf where a key is hidden from a query."""
    if not (kernel.inputs.visits.any_partial or is_ragged(kernel.call)):
        return x
    words, detail = kernel.smem.words, kernel.inputs.extra.detail
    head = masking.Word(words, kernel.word(i, HEAD))
    if kernel.inputs.origin is not None and detail.bits is not None:
        head = head._replace(plus=words[kernel.fact(HEAD_SHIFT)])
    # Keys are rows here: `detail` is by key.
    batch = masking.Word(words, kernel.fact(MASK_BATCH))
    first_key = masking.Word(words, kernel.fact(KV_START), key)
    partial, first = words[kernel.word(i, PARTIAL)], kernel.word(i, Q_START)
    compare = partial & 2
    # 64 queries at a time: what decides more of them does not fit the registers.
    parts = []
    for column in range(0, x.shape[1], UNIT):
        place = masking.Place(batch, head, first_key, masking.Word(words, first, column))
        part = x[:, column : column + UNIT]
        parts.append(
            masking.mask_tile(part, detail, place, partial, call=kernel.call, compare=compare)
        )
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


# Padding may hold NaN. On a device it is zeroed in shared memory; the interpreter is told of it.


def _clear_rows(kernel: Kernel):
    return functools.partial(masking.clear_rows, call=kernel.call, width=kernel.plan.width)


def clear_keys(kernel: Kernel, part) -> None:
    """Zeroes the rows of 64 keys and values that are padding."""
    dirty = kernel.inputs.extra.detail.kv_dirty
    if dirty is None:
        return
    words, clear = kernel.smem.words, _clear_rows(kernel)
    batch = words[kernel.fact(MASK_BATCH)]
    first = words[kernel.fact(KV_START)] + part * UNIT
    for ref in (kernel.keys(part), kernel.values(part)):
        clear(ref, dirty, batch, first, words[kernel.fact(KV_DIRTY)])


def clean_queries(kernel: Kernel, i):
    """Which queries of a step are no padding, for the interpreter; None on a device."""
    dirty = kernel.inputs.extra.detail.q_dirty
    if not (kernel.plan.cleans and kernel.call.interpret):
        return None
    words = kernel.smem.words
    batch, first = words[kernel.fact(MASK_BATCH)], words[kernel.word(i, Q_START)]
    return masking.clean_rows_flags(dirty, batch, first, kernel.block_q, kernel.call)


def clean_keys(kernel: Kernel, part):
    """Which of 64 keys are no padding, for the interpreter; None on a device."""
    dirty = kernel.inputs.extra.detail.kv_dirty
    if dirty is None or not kernel.call.interpret:
        return None
    words = kernel.smem.words
    first = words[kernel.fact(KV_START)] + part * UNIT
    return masking.clean_rows_flags(dirty, words[kernel.fact(MASK_BATCH)], first, UNIT, kernel.call)


def only_clean(kernel: Kernel, part, clean_queries, *arrays):
    """Tiles [64 keys, block_q] with 0 where the key or the query is padding (interpreter only)."""
    keys = clean_keys(kernel, part)
    for flags, axis in ((keys, 0), (clean_queries, 1)):
        if flags is not None:
            arrays = tuple(
                jnp.where(lax.broadcast_in_dim(flags, x.shape, (axis,)), x, 0.0) for x in arrays
            )
    return arrays


__all__ = [
    "clean_keys", "clean_queries", "clear_keys", "only_clean", "probabilities",
    "row_start", "start",
]  # fmt: skip
