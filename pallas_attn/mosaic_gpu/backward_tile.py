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
    is_ragged,
)
from pallas_attn.mosaic_gpu.common import UNIT


def _row_term(kernel: Kernel, slot, which):
    """Lse (0) or delta (1) of a slot's queries, which are columns here."""
    start = (2 * slot + which) * kernel.block_q
    ref = kernel.smem.words.at[pl.ds(start, kernel.block_q)]
    words = ref[...] if kernel.call.interpret else plgpu.load(ref, layout=common.COLUMN)
    return lax.bitcast_convert_type(words, jnp.float32)


def partial_of(kernel: Kernel, i):
    """Whether a step's block is partly visible, int32, as `probabilities` takes it."""
    return kernel.smem.words[kernel.word(i, PARTIAL)]


def probabilities(kernel: Kernel, i, slot, partial, s, key):
    """p, and what dp is to be multiplied with for ds: p, or p·(1 - tanh²) with a cap.

    Args:
        kernel: with the step's references.
        i: the step.
        slot: where its queries' lse lies.
        partial: of `partial_of`: read before s is waited for, where there are registers for it.
        s: k·qᵀ.
        key: the tile's first row among the keys of the thread block.
    """
    call = kernel.call
    cap = call.spec.soft_cap
    x, factor = tile_math.logits(s, call.spec.scale, cap, tanh=tile_math.tanh_by_exp)
    slope = None if cap is None else 1.0 - x * x
    # Masked before it is scaled, which keeps less between the mask's branch and the exponentials.
    x, lse = _mask(kernel, i, partial, x, key), _row_term(kernel, slot, 0)
    exp2 = functools.partial(common.exp2_of, call=call)
    p = tile_math.probabilities(x, factor, lse, axis=1, exp2=exp2)
    return p, p if slope is None else p * slope


def dlogits(kernel: Kernel, slot, weight, dp):
    """Ds from what `probabilities` says that dp is to be multiplied with, and dp = v·doutᵀ."""
    return tile_math.dlogits(weight, dp, _row_term(kernel, slot, 1), axis=1)


def _mask(kernel: Kernel, i, partial, x, key):
    """-inf where a key is hidden from a query."""
    if not (kernel.inputs.visits.any_partial or is_ragged(kernel.call)):
        if kernel.plan.wide:
            return x
        # Never true: a border. Without it exponentials move up and do not fit the registers.
        return masking.hide_tile(x, partial, call=kernel.call)
    words, detail = kernel.smem.words, kernel.inputs.extra.detail
    head = masking.Word(words, kernel.word(i, HEAD))
    if kernel.inputs.origin is not None and detail.bits is not None:
        head = head._replace(plus=words[kernel.fact(HEAD_SHIFT)])
    # Keys are rows here: `detail` is by key.
    batch = masking.Word(words, kernel.fact(MASK_BATCH))
    first_key = masking.Word(words, kernel.fact(KV_START), key)
    first = kernel.word(i, Q_START)
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
    "clean_keys", "clean_queries", "clear_keys", "dlogits", "only_clean", "partial_of",
    "probabilities",
]  # fmt: skip
