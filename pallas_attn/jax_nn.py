"""`dot_product_attention` with the signature and meaning of `jax.nn.dot_product_attention`.

One difference: a query that sees no key gives 0 (and lse -inf), where jax.nn averages all values.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_attn import backends
from pallas_attn.api import mha
from pallas_attn.mask_core import Full, Mask
from pallas_attn.masks import Causal, Dense, Lengths, SlidingWindow


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["mosaic_gpu", "triton", "xla"] | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention; swapping the import is the whole migration from jax.nn.

    Args:
        query: [batch, q_len, q_heads, head_dim] or without batch.
        key: [batch, kv_len, kv_heads, head_dim]; kv_heads divides q_heads.
        value: [batch, kv_len, kv_heads, head_dim].
        bias: added to the scaled logits; rank 4, broadcasts to [batch, q_heads, q_len, kv_len].
        mask: bool, True where a query may attend; rank 4, broadcasts like bias.
        scale: a number; None for 1/sqrt(head_dim).
        is_causal: query i sees keys up to i (top-left aligned).
        query_seq_lengths: int32 [batch]; rows past it give 0.
        key_value_seq_lengths: int32 [batch]; keys past it are not seen.
        local_window_size: (left, right) extra keys on each side, or one number for both.
        implementation: a backend of `mha`, or None for the best one. jax.nn's "cudnn" is refused:
            ask jax.nn itself for it.
        return_residual: also return the lse, [batch, q_len, q_heads] in key's dtype and without
            gradient, as jax.nn does.

    Returns:
        out [batch, q_len, q_heads, head_dim]; with return_residual (out, lse).

    Raises:
        ValueError, TypeError, NotImplementedError: as `mha`.
    """
    backends.check_name(implementation, "implementation")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None and x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, expected rank 4")
    expression = _mask(mask, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size)
    out, lse = mha(
        query,
        key,
        value,
        expression,
        bias=bias,
        scale=scale,
        return_lse=True,
        backend=implementation,
    )
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(key.dtype))


def _mask(mask, is_causal: bool, q_lens, kv_lens, window) -> Mask:
    expression = Full()
    if mask is not None:
        expression = Dense(jnp.asarray(mask))
    if is_causal:
        expression = expression & Causal()
    if window is not None:
        left, right = window if isinstance(window, tuple | list) else (window, window)
        expression = expression & SlidingWindow(left, right)
    if q_lens is not None or kv_lens is not None:
        expression = expression & Lengths(q_lens, kv_lens)
    return expression
