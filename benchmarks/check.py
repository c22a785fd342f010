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

from benchmarks import impls, serving, suites

# Largest relative errors, ||x - ref|| / ||ref||, of the output and of a gradient. A few roundings
# of the type; float32 has room for products in TF32, which is how GPUs multiply it by default.
LIMITS = {"bfloat16": (8e-3, 1.5e-2), "float16": (2e-3, 4e-3), "float32": (2e-3, 4e-3)}
BLOCK_ROWS = 256
# The reference's speed does not matter, the time to search for its fastest matmuls does.
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


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


def reference(mask, q, k, v, dout, ids, gradients):
    """Attention and its gradients in float32, for the query heads that share one head of keys.

    Args:
        mask: The case's MaskSpec.
        q: [group, q_len, head_dim].
        k: [kv_len, head_dim].
        v: [kv_len, v_dim].
        dout: [group, q_len, v_dim].
        ids: Segment ids [q_len] int32, or None.
        gradients: Whether they are wanted.

    Returns:
        {"out": like dout}, and with gradients dq like q, dk and dv like k and v, all float32.
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
        if not gradients:
            return carry, (out,)
        delta = (out * dout_rows).sum(-1, keepdims=True)
        ds = p * (dot("gqd,kd->gqk", dout_rows, v) - delta) * scale
        dk, dv = carry
        dk = dk + dot("gqk,gqd->kd", ds, q_rows)
        dv = dv + dot("gqk,gqd->kd", p, dout_rows)
        return (dk, dv), (out, dot("gqk,kd->gqd", ds, k))

    zero = (jnp.zeros_like(k), jnp.zeros_like(v)) if gradients else ()
    indices = jnp.arange(blocks, dtype=jnp.int32)
    sums, rows = lax.scan(step, zero, (split(q), split(dout), indices))

    def join(x):
        return x.swapaxes(0, 1).reshape(group, blocks * BLOCK_ROWS, -1)[:, :q_len]

    return dict(zip(("out", "dq", "dk", "dv"), (*map(join, rows), *sums), strict=False))


def slices(shape):
    """Returns the (batch, head of keys) pairs that are compared: the first and the last."""
    return sorted({(0, 0), (shape.batch - 1, shape.kv_heads - 1)})


def compared(shape, name, whole):
    """Returns the compared part of a result [batch, len, heads, dim].

    Args:
        shape: The case's.
        name: q, k, v, out, or one of them with a d in front.
        whole: The array.

    Returns:
        [slices, group, len, dim] of what queries have, [slices, len, dim] of what keys have.
    """
    parts = []
    for batch, head in slices(shape):
        if name.lstrip("d") in ("q", "out"):
            group = shape.q_heads // shape.kv_heads
            parts.append(whole[batch, :, head * group : (head + 1) * group].swapaxes(0, 1))
        else:
            parts.append(whole[batch, :, head])
    return jnp.stack(parts)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=OPTIONS)
def expect(case, gradients, inputs, raw):
    """Returns what is right on the compared heads: {name: float32 array as from `compared`}."""
    names = ("q", "k", "v", "dout")
    parts = [compared(case.shape, n, x) for n, x in zip(names, inputs, strict=True)]
    ids = jnp.stack([raw["segment_ids"][b] for b, _ in slices(case.shape)]) if raw else None

    def one(part):
        q, k, v, dout, ids = part
        return reference(case.mask, q, k, v, dout, ids, gradients)

    return lax.map(one, (*parts, ids))


@functools.partial(jax.jit, static_argnums=0)
def _errors(shape, results, expected):
    """Returns {name: (largest relative error of a slice, largest absolute error)}."""
    found = {}
    for name, whole in results.items():
        difference = compared(shape, name, whole).astype(jnp.float32) - expected[name]
        axes = tuple(range(1, difference.ndim))
        error = jnp.sqrt(jnp.sum(difference**2, axes))
        size = jnp.sqrt(jnp.sum(expected[name] ** 2, axes))
        relative = jnp.max(error / jnp.where(size > 0, size, 1.0))
        found[name] = (relative, jnp.max(jnp.abs(difference)))
    return found


def _or_infinity(x):
    x = float(x)
    return x if x == x else float("inf")


class Reference:
    """What is right on the compared heads of one case, computed once for all implementations."""

    def __init__(self, case, inputs, raw, gradients=True):
        """Computes it.

        Args:
            case: Of the run.
            inputs: From `make_inputs`.
            raw: From `impls.raw_operands`.
            gradients: Whether gradients will be compared too.
        """
        self.case = case
        self.expected = expect(case, gradients, inputs, raw)

    def errors(self, **results):
        """Returns (relative, absolute) errors by name, infinite where they are not a number.

        The relative one is ||x - expected|| / ||expected|| of the worst of the compared heads, the
        absolute one the greatest of any element.

        Args:
            **results: Any of out, dq, dk and dv, whole arrays [batch, len, heads, dim].
        """
        expected = {name: self.expected[name] for name in results}
        found = _errors(self.case.shape, results, expected)
        relative = {name: _or_infinity(pair[0]) for name, pair in found.items()}
        return relative, {name: _or_infinity(pair[1]) for name, pair in found.items()}

    def objection(self, errors):
        """Returns a sentence if a relative error is over the limit (NaN is), or None."""
        return objection(self.case, errors)


def objection(case, errors):
    """Returns a sentence if a relative error is over the limit (NaN is), or None.

    Args:
        case: Of the run.
        errors: Relative ones by name.
    """
    for name, error in errors.items():
        limit = LIMITS[case.shape.dtype][name != "out"]
        if not error <= limit:
            return f"wrong: relative error of {name} {error:.2e}, at most {limit:.1e} is right"
    return None


def compile_ahead(case, modes):
    """Compiles, in any thread, what checking a case calls later; whatever fails will fail then."""
    if suites.is_serving(case):
        serving.expect.lower(case, serving.specs(case)).compile()
        return
    shape, dtype = case.shape, jnp.dtype(case.shape.dtype)
    sizes = {"q": shape.q, "k": shape.k, "v": shape.v, "dout": shape.out}
    inputs = tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes.values())
    raw = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), impls.raw_operands(case))
    make_inputs.lower(shape).compile()
    expect.lower(case, "bwd" in modes, inputs, raw).compile()
    expected = jax.eval_shape(functools.partial(expect, case, "bwd" in modes), inputs, raw)
    out = {"out": inputs[3]}
    gradients = {f"d{name}": x for name, x in zip("qkv", inputs, strict=False)}
    for mode in modes:
        results = out | gradients if mode == "bwd" else out
        _errors.lower(shape, results, {name: expected[name] for name in results}).compile()
