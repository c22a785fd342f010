"""The maths of one tile, written once: plain JAX and kernels of every backend run these functions.

Logits inside are in base 2 (multiplied by log2 e), so that exp2, which the hardware has, replaces exp.
A tile is [rows, keys]; row vectors are [rows]. The transposed form [keys, rows] of the dk/dv kernel
passes row vectors along the last axis instead. FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

import math

import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def widen(row, shape, axis: int = 0):
    """A row vector as a tile of `shape`, its entries along `axis`."""
    return lax.broadcast_in_dim(row, shape, (axis,))


def logits(qk, scale: float, soft_cap: float | None, bias=None):
    """Base-2 logits of a tile, and what the cap's derivative needs.

    Args:
        qk: q·k, float32.
        scale: multiplies qk.
        soft_cap: c, for c·tanh(x / c) of the scaled and biased logits; or None.
        bias: float32 tile added after scaling and before the cap; or None.

    Returns:
        the logits; and tanh(x / c), None without a cap.
    """
    if soft_cap is None and bias is None:
        return qk * (scale * LOG2E), None
    x = qk * scale
    if bias is not None:
        x = x + bias
    if soft_cap is None:
        return x * LOG2E, None
    tanh = jnp.tanh(x * (1.0 / soft_cap))
    return tanh * (soft_cap * LOG2E), tanh


def online_softmax(row_max, row_sum, s, *, guard: bool):
    """Takes one more tile of logits into the running softmax.

    Args:
        row_max: running maximum of the base-2 logits, -inf at the start.
        row_sum: running sum of 2^(s - row_max).
        s: [rows, keys] base-2 logits, -inf where masked.
        guard: whether a row may have seen nothing yet, so that its maximum stays -inf.

    Returns:
        the new maximum and sum; the factor for what was accumulated; and p = 2^(s - maximum).
    """
    new_max = jnp.maximum(row_max, s.max(axis=1))
    # -inf minus -inf is NaN; subtracting 0 instead leaves 2^-inf = 0, which is what such rows need.
    base = jnp.where(new_max == -jnp.inf, 0.0, new_max) if guard else new_max
    correction = jnp.exp2(row_max - base)
    p = jnp.exp2(s - widen(base, s.shape))
    return new_max, row_sum * correction + p.sum(axis=1), correction, p


def finalize(row_max, row_sum, sink=None):
    """The factor that turns the accumulated P·V into the output, and the natural-log lse.

    Args:
        row_max, row_sum: of the whole row.
        sink: the head's sink logit (natural), a scalar or a row vector, or None; it joins the
            denominator of rows that see at least one key.

    Returns:
        factor [rows], 0 where the row saw nothing; lse [rows], -inf there.
    """
    seen = row_sum > 0.0
    if sink is not None:
        sink_log2 = jnp.broadcast_to(sink * LOG2E, row_max.shape)
        top = jnp.maximum(row_max, sink_log2)
        shrink = jnp.exp2(row_max - top)
        total = row_sum * shrink + jnp.exp2(sink_log2 - top)
    else:
        top, shrink, total = row_max, jnp.ones_like(row_sum), row_sum
    total = jnp.where(seen, total, 1.0)
    factor = jnp.where(seen, shrink / total, 0.0)
    lse = jnp.where(seen, top * LN2 + jnp.log(total), -jnp.inf)
    return factor, lse


def probabilities(s, lse_log2, axis: int = 0):
    """P again from the logits and the saved lse (base 2, +inf for rows that see nothing)."""
    return jnp.exp2(s - widen(lse_log2, s.shape, axis))


def dlogits(p, dp, delta, tanh, axis: int = 0):
    """Gradient of the natural-log logits before the cap: p·(dp - delta)·(1 - tanh²).

    Args:
        p, dp: tiles.
        delta: rowsum(out·dout) - dlse, a row vector along `axis`.
        tanh: from `logits`.
    """
    ds = p * (dp - widen(delta, p.shape, axis))
    return ds if tanh is None else ds * (1.0 - tanh * tanh)
