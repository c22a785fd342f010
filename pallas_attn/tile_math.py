"""The maths of one tile, written once: plain JAX and kernels of every backend run these functions.

Logits inside are in base 2 (multiplied by log2 e), so that exp2, which the hardware has, replaces
exp. A tile is [rows, keys]; row vectors are [rows]. The transposed form [keys, rows] of the dk/dv
kernel passes row vectors along the last axis instead. FlashAttention-2 (arXiv 2307.08691),
algorithms 1 and 2.
"""

import math

import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# What biases such as -1e9 or float32's least number come to: any other key outweighs it, and an
# lse near it still tells how many keys a row has that are all hidden so.
LEAST_LOGIT = -1e6


def widen(row, shape, axis: int = 0):
    """A row vector as a tile of `shape`, its entries along `axis`."""
    return lax.broadcast_in_dim(row, shape, (axis,))


def tanh_by_exp(y):
    """Tanh from one exp2 and one division, to float32's rounding of 1.

    Hardware's tanh.approx, which approximate math would take, errs by 5e-4.
    """
    return 1.0 - 2.0 / (1.0 + jnp.exp2(y * (2.0 * LOG2E)))


def logits(qk, scale: float, soft_cap: float | None, bias=None, tanh=jnp.tanh):
    """The logits of a tile as x·factor in base 2, so that one FMA an element does scale and shift.

    Args:
        qk: q·k, float32.
        scale: multiplies qk.
        soft_cap: c, for c·tanh(y / c) of the scaled and biased logits y; or None.
        bias: float32 tile added after scaling and before the cap; or None. It may be any number
            that hides a pair: without a cap lower logits count as `LEAST_LOGIT`, but for -inf,
            which is no logit at all.
        tanh: for kernels whose own is too coarse.

    Returns:
        x: a tile; with a cap it is tanh(y / c), which the cap's derivative needs.
        factor: a positive Python float, so that the maximum of x is at the maximum of the logits.
    """
    if soft_cap is None and bias is None:
        if scale > 0.0:
            return qk, scale * LOG2E
        return (-qk, -scale * LOG2E) if scale < 0.0 else (qk * 0.0, LOG2E)
    y = qk * scale
    if bias is not None:
        y = y + bias
    if soft_cap is None:
        # A fused x·factor - shift is off by the rounding of its shift: of -1e30 by 1e23.
        return jnp.where(bias == -jnp.inf, -jnp.inf, jnp.maximum(y, LEAST_LOGIT)), LOG2E
    return tanh(y * (1.0 / soft_cap)), soft_cap * LOG2E


def exp2_of(x, factor: float, shift):
    """2^(x·factor - shift), elementwise; kernels replace it by the hardware's instructions."""
    return jnp.exp2(x * factor - shift)


def online_softmax(row_max, row_sum, x, factor: float, *, guard: bool, exp2=exp2_of):
    """Takes one more tile of logits into the running softmax.

    Args:
        row_max: running maximum of the base-2 logits, -inf at the start.
        row_sum: running sum of 2^(logit - row_max).
        x, factor: from `logits`; x is -inf where masked.
        guard: whether a row may have seen nothing yet, so that its maximum stays -inf: where there
            is a mask or a bias.
        exp2: see `exp2_of`.

    Returns:
        the new maximum and sum; the factor for what was accumulated; and p = 2^(logit - maximum).
    """
    new_max = jnp.maximum(row_max, x.max(axis=1) * factor)
    # -inf minus -inf is NaN; subtracting 0 instead leaves 2^-inf = 0, which is what such rows need.
    base = jnp.where(new_max == -jnp.inf, 0.0, new_max) if guard else new_max
    correction = exp2(row_max, 1.0, base)
    p = exp2(x, factor, widen(base, x.shape))
    return new_max, row_sum * correction + p.sum(axis=1), correction, p


# Stands for the maximum of no logits where -inf would make NaN of a difference.
NO_MAX = -1e30
# A maximum may grow by this much, in powers of 2, before anything is rescaled.
LAZY_LOG2 = 8.0


def weights(x, factor: float, shift):
    """(p, its row sums) with p = 2^(x·factor - shift), shift a row vector."""
    p = jnp.exp2(x * factor - widen(shift, x.shape))
    return p, p.sum(axis=1)


def lazy_softmax(row_max, row_sum, x, factor: float, weights=weights):
    """`online_softmax` that keeps an old maximum while the new one is not much larger.

    Then nothing that was accumulated has to be rescaled; p may grow to 2^8 instead of 1, which
    costs no accuracy in floating point.

    Args:
        row_max: [rows], a maximum of x as of `logits`, without the factor; `NO_MAX` at the start.
        row_sum: [rows], the sum of 2^(factor·(x - row_max)).
        x, factor: from `logits`; x is -inf where masked.
        weights: for kernels that make p in another order.

    Returns:
        the new maximum and sum; the factor for what was accumulated; and p.
    """
    grown = jnp.maximum(row_max, x.max(axis=1))
    new_max = jnp.where((grown - row_max) * factor > LAZY_LOG2, grown, row_max)
    correction = jnp.exp2((row_max - new_max) * factor)
    p, total = weights(x, factor, new_max * factor)
    return new_max, row_sum * correction + total, correction, p


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


def probabilities(x, factor: float, lse_log2, axis: int = 0, exp2=exp2_of):
    """P again from `logits` and the saved lse (base 2, +inf for rows that see nothing)."""
    return exp2(x, factor, widen(lse_log2, x.shape, axis))


def dlogits(p, dp, delta, tanh=None, axis: int = 0):
    """Gradient of the natural-log logits before the cap: p·(dp - delta)·(1 - tanh²).

    Args:
        p, dp: tiles.
        delta: rowsum(out·dout) - dlse, a row vector along `axis`.
        tanh: x of `logits` with a cap, where nothing is masked; None without a cap.
    """
    ds = p * (dp - widen(delta, p.shape, axis))
    return ds if tanh is None else ds * (1.0 - tanh * tanh)
