"""The reference against a loop in float64 numpy, and its gradients against finite differences."""

import jax
import jax.numpy as jnp
import mask_truth
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import reference

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM, V_DIM = 2, 5, 7, 4, 2, 8, 6


def operands(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = [
        (BATCH, Q_LEN, HEADS, DIM),
        (BATCH, KV_LEN, KV_HEADS, DIM),
        (BATCH, KV_LEN, KV_HEADS, V_DIM),
    ]
    return [rng.normal(size=s).astype(dtype) for s in shapes]


def loop(q, k, v, pairs=None, *, bias=None, scale=None, soft_cap=None, sinks=None):
    """Attention row by row, straight from its formula."""
    batch, q_len, heads, dim = q.shape
    kv_heads = k.shape[2]
    out = np.zeros((batch, q_len, heads, v.shape[-1]))
    lse = np.full((batch, heads, q_len), -np.inf)
    full = (batch, heads, q_len, k.shape[1])
    bias = np.zeros(full) if bias is None else np.broadcast_to(bias, full)
    for b, h, i in np.ndindex(batch, heads, q_len):
        seen = np.ones(full[-1], bool) if pairs is None else pairs[b, h, i]
        if not seen.any():
            continue
        head = h // (heads // kv_heads)
        logits = k[b, :, head].astype(np.float64) @ q[b, i, h].astype(np.float64)
        logits = logits * (dim**-0.5 if scale is None else scale) + bias[b, h, i]
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        top = logits[seen].max()
        weights = np.where(seen, np.exp(logits - top), 0.0)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[h] - top))
        out[b, i, h] = weights @ v[b, :, head] / total
        lse[b, h, i] = np.log(total) + top
    return out, lse


def options_of(name):
    rng = np.random.default_rng(1)
    return {
        "plain": {},
        "scale": {"scale": -0.3},
        "soft_cap": {"soft_cap": 1.5},
        "sinks": {"sinks": rng.normal(size=HEADS)},
        "bias": {"bias": rng.normal(size=(1, HEADS, Q_LEN, KV_LEN))},
        "row_bias": {"bias": rng.normal(size=(BATCH, 1, 1, KV_LEN))},
        "all": {
            "bias": rng.normal(size=(BATCH, HEADS, Q_LEN, KV_LEN)),
            "sinks": rng.normal(size=HEADS),
            "soft_cap": 2.0,
            "scale": 0.7,
        },
    }[name]


NAMES = ["plain", "scale", "soft_cap", "sinks", "bias", "row_bias", "all"]


def pairs_of(seed=3):
    pairs = np.random.default_rng(seed).random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.6
    pairs[0, 1, 2] = False  # A row that sees nothing.
    return pairs


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masked", [False, True])
def test_float64_equals_the_loop(name, masked, x64):
    arrays, options = operands(), options_of(name)
    pairs = pairs_of() if masked else None
    given = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    mask = None if pairs is None else jnp.asarray(pairs)
    out, lse = reference.mha(*(jnp.asarray(x) for x in arrays), mask, **given)
    wanted, wanted_lse = loop(*arrays, pairs, **options)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, wanted, atol=1e-13)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_dtypes(dtype):
    arrays = [jnp.asarray(x, dtype) for x in operands(np.float32)]
    out, lse = reference.mha(*arrays, jnp.asarray(pairs_of()), scale=0.5)
    wanted, wanted_lse = loop(*(np.asarray(x, np.float32) for x in arrays), pairs_of(), scale=0.5)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    tolerance = {"float16": 3e-3, "bfloat16": 3e-2, "float32": 2e-6}[dtype]
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, atol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


@pytest.mark.parametrize("name", ["causal_end", "document", "lengths", "blocks", "predicate"])
def test_masks(name, x64):
    sizes = (BATCH, HEADS, Q_LEN, KV_LEN)
    mask, see = mask_truth.leaves(2, *sizes)[name]
    pairs = mask_truth.dense(see, *sizes)
    out, lse = reference.mha(*(jnp.asarray(x) for x in operands()), mask)
    wanted, wanted_lse = loop(*operands(), pairs)
    np.testing.assert_allclose(out, wanted, atol=1e-13)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-13)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradients_against_finite_differences(name, x64):
    arrays, options, pairs = operands(), options_of(name), pairs_of()
    rng = np.random.default_rng(4)
    weights, lse_weights = (
        rng.normal(size=(BATCH, Q_LEN, HEADS, V_DIM)),
        rng.normal(size=pairs.shape[:3]),
    )
    static = {k: x for k, x in options.items() if not isinstance(x, np.ndarray)}
    names = [k for k, x in options.items() if isinstance(x, np.ndarray)]
    everything = [*arrays, *(options[n] for n in names)]

    def wanted(*values):
        out, lse = loop(*values[:3], pairs, **dict(zip(names, values[3:], strict=True)), **static)
        return (out * weights).sum() + (np.where(np.isfinite(lse), lse, 0.0) * lse_weights).sum()

    def loss(*values):
        named = dict(zip(names, values[3:], strict=True))
        out, lse = reference.mha(*values[:3], jnp.asarray(pairs), **named, **static)
        return (out * weights).sum() + (jnp.where(lse > -jnp.inf, lse, 0.0) * lse_weights).sum()

    values = [jnp.asarray(x) for x in everything]
    grads = jax.grad(loss, tuple(range(len(values))))(*values)
    step = 1e-6
    for n, (value, grad) in enumerate(zip(everything, grads, strict=True)):
        for _ in range(6):
            direction = rng.normal(size=value.shape)
            up, down = (
                [*everything[:n], value + s * direction, *everything[n + 1 :]]
                for s in (step, -step)
            )
            slope = (wanted(*up) - wanted(*down)) / (2 * step)
            np.testing.assert_allclose(
                (np.asarray(grad) * direction).sum(), slope, rtol=1e-6, atol=1e-7
            )


def test_rows_that_see_nothing_have_no_gradient(x64):
    q, k, v = (jnp.asarray(x) for x in operands())
    mask = jnp.asarray(np.arange(Q_LEN) != 2)[:, None]

    def loss(q, k, v):
        out, lse = reference.mha(q, k, v, mask)
        return out.sum() + jnp.where(lse > -jnp.inf, lse, 0.0).sum(), (out, lse)

    grads, (out, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    assert not np.asarray(out[:, 2]).any()
    assert (np.asarray(lse[:, :, 2]) == -np.inf).all()
    assert not np.asarray(grads[0][:, 2]).any()
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)


def test_visible_takes_every_form_of_a_mask():
    pairs = np.tril(np.ones((5, 5), bool))
    for mask in (pa.Causal(), jnp.asarray(pairs), pa.plan(pa.Causal(), q_len=5, kv_len=5)):
        np.testing.assert_array_equal(reference.visible(mask, 1, 1, 5, 5)[0, 0], pairs)
    assert np.asarray(reference.visible(None, 1, 1, 5, 5)).all()
