"""What the tests of the flax modules share: layers with random parameters, and layers by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_attn import flax_linen, flax_nnx

FEATURES, HEADS, LEN = 32, 4, 10


def normal(seed, *shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def close(got, want, tol=2e-5):
    def check(a, b):
        a, b = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)

    jax.tree.map(check, got, want)


def tril(rows, cols=None):
    return np.tril(np.ones((rows, cols or rows), bool))


@nnx.jit
def call_nnx(layer, *args, **keywords):
    return layer(*args, **keywords)


@nnx.jit
def decode_step(layer, tokens, **keywords):
    return layer(tokens, decode=True, **keywords)


@functools.partial(jax.jit, static_argnums=0)
def call_linen(layer, params, args, keywords):
    return layer.apply({"params": params}, *args, **keywords)


@functools.partial(jax.jit, static_argnums=0)
def linen_decode_step(layer, params, cache, tokens):
    variables = {"params": params, "cache": cache}
    out, updated = layer.apply(variables, tokens, decode=True, mutable=["cache"])
    return out, updated["cache"]


def nnx_attention(params=None, in_kv_features=None, **options):
    """A layer with random parameters or those given, zeros and ones nowhere left."""
    layer = nnx.eval_shape(
        lambda: flax_nnx.Attention(
            FEATURES, HEADS, in_kv_features=in_kv_features, rngs=nnx.Rngs(0), **options
        )
    )
    if params is None:
        params = jax.tree.map(
            lambda p: normal(p.size, *p.shape, dtype=p.dtype, scale=0.3), flax_nnx.to_linen(layer)
        )
    flax_nnx.from_linen(layer, params)
    return layer


def pair(**options):
    """The same layer in both: calls of the nnx and the linen one, and the parameters."""
    layer = nnx_attention(**options)
    params = flax_nnx.to_linen(layer)
    options.pop("in_kv_features", None)
    twin = flax_linen.Attention(HEADS, **options)
    return (
        lambda *args, **keywords: call_nnx(layer, *args, **keywords),
        lambda *args, **keywords: call_linen(twin, params, args, keywords),
        params,
    )


def softmax_by_hand(q, k, v, mask=True, *, bias=0.0, cap=None, scale=None, sinks=None):
    """Attention in float64 NumPy; a query that sees nothing gives 0."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[-2] // a.shape[-2], axis=-2) for a in (k, v))
    logits = np.einsum("...qhd,...khd->...hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    logits = logits + np.asarray(bias, np.float64)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    weights = np.exp(logits) * (np.asarray(mask) != 0)
    total = weights.sum(-1, keepdims=True)
    total = total if sinks is None else total + np.exp(np.asarray(sinks, np.float64))[:, None, None]
    return np.einsum("...hqk,...khd->...qhd", weights / np.where(total == 0, 1, total), v)


def layer_by_hand(params, x, mask, *, kv=None, rotate=lambda a: a, rotate_kv=None, **options):
    """An Attention layer in float64 NumPy."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    q, k, v = (
        np.einsum("...lf,fhd->...lhd", np.asarray(s, np.float64), p[n]["kernel"]) + p[n]["bias"]
        for n, s in (
            ("query", x),
            ("key", x if kv is None else kv),
            ("value", x if kv is None else kv),
        )
    )
    if "query_ln" in p:  # RMS, before RoPE.
        q, k = (
            a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * p[n]["scale"]
            for a, n in ((q, "query_ln"), (k, "key_ln"))
        )
    q, k = rotate(q), (rotate_kv or rotate)(k)
    out = softmax_by_hand(q, k, v, mask, sinks=p.get("sinks"), **options)
    return np.einsum("...qhd,hdf->...qf", out, p["out"]["kernel"]) + p["out"]["bias"]


def turn_by_hand(positions, theta):
    """RoPE in complex numbers."""

    def turn(a):
        half = a.shape[-1] // 2
        angles = np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half)
        turned = (a[..., :half] + 1j * a[..., half:]) * np.exp(1j * angles)[..., None, :]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    return turn


def decode_nnx(options, x, sizes, max_len, **call):
    layer = nnx_attention(**options)
    layer.init_cache((*x.shape[:-2], max_len, x.shape[-1]))
    spans = itertools.pairwise(np.cumsum([0, *sizes]).tolist())
    outs = [decode_step(layer, x[..., a:b, :], **call) for a, b in spans]
    return jnp.concatenate(outs, axis=-2)


def decode_linen(options, params, x, sizes, max_len):
    layer = flax_linen.Attention(HEADS, **options)
    cache, outs = layer.init_cache((*x.shape[:-2], max_len, x.shape[-1])), []
    for a, b in itertools.pairwise(np.cumsum([0, *sizes]).tolist()):
        out, cache = linen_decode_step(layer, params, cache, x[..., a:b, :])
        outs.append(out)
    return jnp.concatenate(outs, axis=-2)
