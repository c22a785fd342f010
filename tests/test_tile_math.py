"""The maths of one tile against float64: several tiles, extreme logits, rows that see nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import tile_math

ROWS, KEYS, TILES = 8, 12, 4


def run_softmax(logits, *, factor=1.0, guard=True, sink=None):
    """Softmax weights and lse from tiles taken one after another; logits are natural."""
    rows = logits.shape[0]
    top = jnp.full(rows, -jnp.inf, jnp.float32)
    total = jnp.zeros(rows, jnp.float32)
    weights = []
    for tile in np.split(logits, TILES, axis=1):
        x = jnp.asarray(tile / factor, jnp.float32)
        top, total, correction, p = tile_math.online_softmax(
            top, total, x, factor * tile_math.LOG2E, guard=guard
        )
        weights = [w * correction[:, None] for w in weights] + [p]
    scale, lse = tile_math.finalize(top, total, sink)
    return np.asarray(jnp.concatenate(weights, axis=1) * scale[:, None]), np.asarray(lse)


def softmax64(logits, sink=None):
    logits = logits.astype(np.float64)
    every = (
        logits
        if sink is None
        else np.concatenate([logits, np.broadcast_to(sink, (len(logits), 1))], 1)
    )
    top = np.where(np.isfinite(every.max(1)), every.max(1), 0.0)
    weights = np.exp(logits - top[:, None])
    total = np.exp(every - top[:, None]).sum(1)
    seen = np.isfinite(logits).any(1)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, np.log(total) + top, -np.inf)
    return np.where(seen[:, None], weights / np.where(seen, total, 1.0)[:, None], 0.0), lse


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("factor", [1.0, 0.125])
def test_online_softmax_over_tiles(size, factor):
    logits = normal(ROWS, KEYS * TILES) * np.float32(size)
    weights, lse = run_softmax(logits, factor=factor)
    wanted, wanted_lse = softmax64(logits)
    # A logit of 1e4 carries a rounding error of 1e-3 in base 2, and the weight that relative error.
    np.testing.assert_allclose(weights, wanted, atol=1e-6 + 3e-7 * size)
    np.testing.assert_allclose(lse, wanted_lse, rtol=3e-7, atol=2e-6)
    assert np.isfinite(weights).all()


def test_rows_and_tiles_that_see_nothing():
    logits = normal(ROWS, KEYS * TILES, seed=1)
    logits[0] = -np.inf  # Nothing at all.
    logits[1, : 2 * KEYS] = -np.inf  # The first tiles are masked.
    logits[2, KEYS:] = -np.inf  # The last ones are.
    logits[3, :] = -np.inf
    logits[3, 17] = 5.0  # One key.
    weights, lse = run_softmax(logits)
    wanted, wanted_lse = softmax64(logits)
    np.testing.assert_allclose(weights, wanted, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-6)
    assert not weights[0].any()
    assert lse[0] == -np.inf
    assert weights[3, 17] == 1.0
    assert lse[3] == pytest.approx(5.0)


def test_guard_changes_nothing_for_rows_that_see_something():
    logits = normal(ROWS, KEYS * TILES, seed=2) * 10
    for a, b in zip(run_softmax(logits, guard=True), run_softmax(logits, guard=False), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sink", [0.5, -1e4, 1e4])
def test_sink_joins_the_denominator(sink):
    logits = normal(ROWS, KEYS * TILES, seed=3)
    logits[0] = -np.inf
    weights, lse = run_softmax(logits, sink=jnp.float32(sink))
    wanted, wanted_lse = softmax64(logits, sink)
    np.testing.assert_allclose(weights, wanted, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=3e-7, atol=2e-6)
    assert not weights[0].any()
    assert lse[0] == -np.inf
    by_row = run_softmax(logits, sink=jnp.full(ROWS, sink, jnp.float32))
    np.testing.assert_array_equal(by_row[0], weights)


@pytest.mark.parametrize("scale", [0.125, -0.5, 0.0])
@pytest.mark.parametrize("soft_cap", [None, 7.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_the_definition(scale, soft_cap, with_bias):
    qk = normal(ROWS, KEYS) * 20
    bias = normal(ROWS, KEYS, seed=4) if with_bias else None
    x, factor = tile_math.logits(
        jnp.asarray(qk), scale, soft_cap, None if bias is None else jnp.asarray(bias)
    )
    wanted = qk.astype(np.float64) * scale + (0 if bias is None else bias)
    if soft_cap is not None:
        wanted = soft_cap * np.tanh(wanted / soft_cap)
        np.testing.assert_allclose(x, wanted / soft_cap, atol=1e-6)
    assert factor > 0
    np.testing.assert_allclose(np.asarray(x) * factor * tile_math.LN2, wanted, atol=2e-5)


def test_soft_cap_of_extreme_logits_is_finite():
    x, factor = tile_math.logits(jnp.asarray([[1e8, -1e8, 0.0]], jnp.float32), 1.0, 50.0)
    np.testing.assert_allclose(
        np.asarray(x) * factor * tile_math.LN2, [[50.0, -50.0, 0.0]], rtol=1e-6
    )
    ds = tile_math.dlogits(jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.zeros(1), x)
    np.testing.assert_allclose(ds, [[0.0, 0.0, 1.0]], atol=1e-6)


def loss64(qk, dout, v, scale, soft_cap):
    logits = qk * scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    weights, _ = softmax64(logits)
    return float((dout * (weights @ v)).sum())


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_dlogits_against_finite_differences(soft_cap):
    rows, keys, scale = 3, 5, 0.7
    qk, dout, v = (normal(*s, seed=n).astype(np.float64) for n, s in
                   enumerate([(rows, keys), (rows, 4), (keys, 4)]))  # fmt: skip
    x, factor = tile_math.logits(jnp.asarray(qk, jnp.float32), scale, soft_cap)
    top, total, _, p = tile_math.online_softmax(
        jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), x, factor, guard=True
    )
    norm, lse = tile_math.finalize(top, total)
    again = tile_math.probabilities(x, factor, lse * tile_math.LOG2E)
    np.testing.assert_allclose(again, p * norm[:, None], atol=1e-6)
    out = again @ v.astype(np.float32)
    delta = (np.asarray(out) * dout).sum(1).astype(np.float32)
    dp = jnp.asarray(dout @ v.T, jnp.float32)
    ds = tile_math.dlogits(again, dp, jnp.asarray(delta), None if soft_cap is None else x)
    step = 1e-5
    for at in np.ndindex(qk.shape):
        up, down = qk.copy(), qk.copy()
        up[at] += step
        down[at] -= step
        slope = (loss64(up, dout, v, scale, soft_cap) - loss64(down, dout, v, scale, soft_cap)) / (
            2 * step
        )
        assert float(ds[at]) * scale == pytest.approx(slope, abs=2e-5)


def test_transposed_forms_agree():
    x, dp = jnp.asarray(normal(ROWS, KEYS)), jnp.asarray(normal(ROWS, KEYS, seed=5))
    lse, delta = jnp.asarray(normal(ROWS, seed=6)), jnp.asarray(normal(ROWS, seed=7))
    lse = lse.at[0].set(jnp.inf)  # A row that sees nothing.
    tanh = jnp.tanh(x)
    p = tile_math.probabilities(x, 1.5, lse)
    p_t = tile_math.probabilities(x.T, 1.5, lse, axis=1)
    np.testing.assert_array_equal(p_t.T, p)
    assert not np.asarray(p[0]).any()
    for cap in (None, tanh):
        ds = tile_math.dlogits(p, dp, delta, cap)
        ds_t = tile_math.dlogits(p.T, dp.T, delta, None if cap is None else cap.T, axis=1)
        np.testing.assert_array_equal(ds_t.T, ds)


def test_masked_pairs_have_no_probability_and_no_gradient():
    x = jnp.asarray([[1.0, -jnp.inf], [-jnp.inf, -jnp.inf]], jnp.float32)
    p = tile_math.probabilities(x, tile_math.LOG2E, jnp.asarray([1.0 * tile_math.LOG2E, jnp.inf]))
    np.testing.assert_allclose(p, [[1.0, 0.0], [0.0, 0.0]], atol=1e-6)
    ds = tile_math.dlogits(p, jnp.ones((2, 2)), jnp.zeros(2), jnp.zeros((2, 2)))
    np.testing.assert_allclose(ds, [[1.0, 0.0], [0.0, 0.0]], atol=1e-6)


def test_widen_places_rows_along_either_axis():
    row = jnp.arange(3.0)
    np.testing.assert_array_equal(
        tile_math.widen(row, (3, 2)), np.tile(np.arange(3.0)[:, None], (1, 2))
    )
    np.testing.assert_array_equal(tile_math.widen(row, (2, 3), 1), np.tile(np.arange(3.0), (2, 1)))


def test_the_same_functions_run_under_jit():
    logits = normal(ROWS, KEYS * TILES, seed=8)
    eager, _ = run_softmax(logits)
    step = jax.jit(lambda t, s, x: tile_math.online_softmax(t, s, x, tile_math.LOG2E, guard=True))
    _, total, _, p = step(
        jnp.full(ROWS, -jnp.inf, jnp.float32), jnp.zeros(ROWS, jnp.float32), jnp.asarray(logits)
    )
    np.testing.assert_allclose(p / total[:, None], eager, atol=1e-6)
