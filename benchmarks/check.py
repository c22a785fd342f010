"""Random inputs of a case, and whether an implementation is right on those very inputs.

The reference is float32 in plain JAX and knows no implementation. It computes whole heads, so that
the gradients of keys and values can be compared too, but only the first and the last group of
heads, and in blocks of rows, so that 64k tokens need no large array.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Largest relative errors, ||x - ref|| / ||ref||, of the output and of a gradient. A few roundings
# of the type; float32 has room for products in TF32, which is how GPUs multiply it by default.
LIMITS = {"bfloat16": (8e-3, 1.5e-2), "float16": (2e-3, 4e-3), "float32": (2e-3, 4e-3)}
BLOCK_ROWS = 256


@functools.partial(jax.jit, static_argnums=0)
def make_inputs(shape, seed=0):
    """Returns q, k, v and dout, standard normal, in the shape's dtype."""
    keys = jax.random.split(jax.random.key(seed), 4)
    sizes = (shape.q, shape.k, shape.v, shape.out)
    return tuple(jax.random.normal(key, s, shape.dtype) for key, s in zip(keys, sizes, strict=True))


def _visible(mask, rows, cols, ids):
    """Returns which of the keys `cols` the queries `rows` see, [rows, cols] bool."""
    rows, cols = rows[:, None], cols[None, :]
    match mask.kind:
        case "full":
            return jnp.ones(jnp.broadcast_shapes(rows.shape, cols.shape), bool)
        case "causal":
            return rows >= cols
        case "window":
            return (cols >= rows - mask.left) & (cols <= rows + mask.right)
        case "documents":
            safe = jnp.minimum(rows, np.int32(ids.shape[0] - 1))
            return (rows >= cols) & (ids[safe] == ids[cols])


@functools.partial(jax.jit, static_argnums=0)
def reference(mask, q, k, v, dout, ids):
    """Attention and its gradients in float32, for the query heads that share one head of keys.

    Args:
        mask: The case's MaskSpec.
        q: [group, q_len, head_dim].
        k: [kv_len, head_dim].
        v: [kv_len, v_dim].
        dout: [group, q_len, v_dim].
        ids: Segment ids [q_len] int32, or None.

    Returns:
        out and dq like dout and q, dk and dv like k and v, all float32.
    """
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    group, q_len, head_dim = q.shape
    scale = np.float32(head_dim**-0.5)
    blocks = -(-q_len // BLOCK_ROWS)
    padding = ((0, 0), (0, blocks * BLOCK_ROWS - q_len), (0, 0))

    def split(x):
        return jnp.pad(x, padding).reshape(group, blocks, BLOCK_ROWS, -1).swapaxes(0, 1)

    dot = functools.partial(jnp.einsum, precision="highest")
    cols = jnp.arange(k.shape[0], dtype=jnp.int32)

    def step(carry, block):
        q_rows, dout_rows, index = block
        rows = index * np.int32(BLOCK_ROWS) + jnp.arange(BLOCK_ROWS, dtype=jnp.int32)
        visible = _visible(mask, rows, cols, ids) & (rows < q_len)[:, None]
        s = jnp.where(visible, dot("gqd,kd->gqk", q_rows, k) * scale, -jnp.inf)
        top = jnp.max(s, axis=-1, keepdims=True)
        p = jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0.0))
        total = p.sum(-1, keepdims=True)
        p = p / jnp.where(total > 0, total, 1.0)
        out = dot("gqk,kd->gqd", p, v)
        delta = (out * dout_rows).sum(-1, keepdims=True)
        ds = p * (dot("gqd,kd->gqk", dout_rows, v) - delta) * scale
        dk, dv = carry
        dk = dk + dot("gqk,gqd->kd", ds, q_rows)
        dv = dv + dot("gqk,gqd->kd", p, dout_rows)
        return (dk, dv), (out, dot("gqk,kd->gqd", ds, k))

    zero = (jnp.zeros_like(k), jnp.zeros_like(v))
    indices = jnp.arange(blocks, dtype=jnp.int32)
    (dk, dv), rows = lax.scan(step, zero, (split(q), split(dout), indices))

    def join(x):
        return x.swapaxes(0, 1).reshape(group, blocks * BLOCK_ROWS, -1)[:, :q_len]

    return join(rows[0]), join(rows[1]), dk, dv


def _slices(shape):
    """Returns the (batch, head of keys) pairs that are compared: the first and the last."""
    return sorted({(0, 0), (shape.batch - 1, shape.kv_heads - 1)})


def _query_part(x, batch, kv_head, kv_heads):
    group = x.shape[2] // kv_heads
    return x[batch, :, kv_head * group : (kv_head + 1) * group].swapaxes(0, 1)


class Reference:
    """What is right on the compared heads of one case, computed once for all implementations."""

    def __init__(self, case, inputs, raw):
        self.case = case
        self.expected = {}
        q, k, v, dout = inputs
        kv_heads = case.shape.kv_heads
        for b, h in _slices(case.shape):
            ids = raw["segment_ids"][b] if raw else None
            query = [_query_part(x, b, h, kv_heads) for x in (q, dout)]
            parts = reference(case.mask, query[0], k[b, :, h], v[b, :, h], query[1], ids)
            self.expected[b, h] = dict(zip(("out", "dq", "dk", "dv"), parts, strict=True))

    def errors(self, **results):
        """Returns the largest relative error of each result over the compared heads.

        Args:
            **results: Any of out, dq, dk and dv, whole arrays [batch, len, heads, dim].
        """
        worst = {}
        for name, whole in results.items():
            for (b, h), expected in self.expected.items():
                if name in ("out", "dq"):
                    part = _query_part(whole, b, h, self.case.shape.kv_heads)
                else:
                    part = whole[b, :, h]
                worst[name] = max(worst.get(name, 0.0), _relative(part, expected[name]))
        return worst

    def objection(self, errors):
        """Returns a sentence if an error is over the limit (NaN is), or None."""
        for name, error in errors.items():
            limit = LIMITS[self.case.shape.dtype][name != "out"]
            if not error <= limit:
                return f"wrong: relative error of {name} {error:.2e}, at most {limit:.1e} is right"
        return None


@jax.jit
def _norms(part, expected):
    difference = part.astype(jnp.float32) - expected
    return jnp.linalg.norm(difference), jnp.linalg.norm(expected)


def _relative(part, expected):
    """Returns ||part - expected|| / ||expected||, infinity where it is not a number."""
    difference, size = (float(x) for x in _norms(part, expected))
    error = difference / size if size else difference
    return error if error == error else float("inf")
