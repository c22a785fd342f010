"""Merging attention over parts of the keys: partial (out, lse) in float32, in any order.

Over two disjoint sets of keys, with lse the log of each softmax's denominator,

    lse = log(exp(lse_a) + exp(lse_b)),    out = exp(lse_a - lse)·out_a + exp(lse_b - lse)·out_b.

That is associative and commutative, and a part that saw nothing (out 0, lse -inf) is its neutral
element; so any split of the keys gives the same result. A sink, a key with value 0 and the sink's
logit, may be merged last.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(out_a, lse_a, out_b, lse_b):
    """Merges two partial results.

    Args:
        out_a, out_b: [..., v_dim], each normalised over its own keys.
        lse_a, lse_b: [...], natural log; -inf where a part saw nothing.

    Returns:
        (out, lse) over both sets of keys, in the wider of float32 and the operands' dtype.
    """
    return merge_all(jnp.stack([out_a, out_b]), jnp.stack([lse_a, lse_b]))


def merge_all(out: Float[Array, "..."], lse: Float[Array, "..."], sink=None):
    """Merges any number of partial results along the first axis.

    Args:
        out: [parts, ..., v_dim], each normalised over its own keys.
        lse: [parts, ...], natural log; -inf where a part saw nothing.
        sink: a logit that joins the denominator of rows that see a key, broadcasting to [...];
            None for none.

    Returns:
        out [..., v_dim]; lse [...]: 0 and -inf for rows that no part saw. In float32 or wider.
    """
    wide = jnp.promote_types(lse.dtype, jnp.float32)
    out, lse = out.astype(wide), lse.astype(wide)
    top = lse.max(0)
    seen = top > -jnp.inf
    if sink is not None:
        top = jnp.maximum(top, jnp.broadcast_to(sink.astype(wide), top.shape))
    base = jnp.where(seen, top, 0.0)
    weights = jnp.exp(lse - base[None])
    total = weights.sum(0)
    if sink is not None:
        total = total + jnp.exp(jnp.broadcast_to(sink.astype(wide), top.shape) - base)
    total = jnp.where(seen, total, 1.0)
    # A part of weight 0 may hold anything but NaN.
    merged = (weights[..., None] * out).sum(0) / total[..., None]
    merged = jnp.where(seen[..., None], merged, 0.0)
    return merged, jnp.where(seen, base + jnp.log(total), -jnp.inf)


__all__ = ["merge", "merge_all"]
