"""Predicates: what may be closed over and computed, what is refused, what shares compiled code."""

import jax
import jax.numpy as jnp
import mask_truth
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import predicate, reference
from pallas_attn.mask_core import TileGrid

SIZES = (2, 3, 7, 10)
TABLE = np.random.default_rng(0).integers(0, 5, 10).astype(np.int32)
GRID = np.random.default_rng(1).integers(0, 5, (3, 10)).astype(np.int32)


def seen(fn, sizes=SIZES):
    return np.asarray(reference.visible(pa.Predicate(fn), *sizes))


def truth(see):
    return mask_truth.dense(see, *SIZES)


def test_indices_reach_the_function():
    got = seen(lambda b, h, i, j: (i + 2 * j + 3 * h + 5 * b) % 4 == 0)
    np.testing.assert_array_equal(
        got, truth(lambda b, h, i, j: (i + 2 * j + 3 * h + 5 * b) % 4 == 0)
    )


def test_constant_answers():
    assert seen(lambda b, h, i, j: True).all()
    assert not seen(lambda b, h, i, j: jnp.asarray(False)).any()


def test_closed_over_arrays():
    table, grid = jnp.asarray(TABLE), jnp.asarray(GRID)
    got = seen(lambda b, h, i, j: (table[j] > table[i]) & (grid[h, j] != 2))
    want = truth(lambda b, h, i, j: TABLE[j] > TABLE[i] and GRID[h, j] != 2)
    np.testing.assert_array_equal(got, want)


def test_closed_over_scalars_and_numpy_values():
    shift, limit = jnp.asarray(2, jnp.int32), np.int32(3)
    got = seen(lambda b, h, i, j: j <= i + shift - limit)
    np.testing.assert_array_equal(got, truth(lambda b, h, i, j: j <= i - 1))


def test_traced_closed_over_arrays_are_operands():
    traces = []

    @jax.jit
    def run(table):
        traces.append(1)
        return reference.visible(pa.Predicate(lambda b, h, i, j: table[j] > table[i]), *SIZES)

    for shift in range(3):
        table = np.roll(TABLE, shift)
        want = truth(lambda b, h, i, j, t=table: t[j] > t[i])
        np.testing.assert_array_equal(run(jnp.asarray(table)), want)
    assert len(traces) == 1


def test_where_division_and_negative_numbers():
    def fn(b, h, i, j, xp=jnp):
        near = xp.where(i % 2 == 0, (j - 5) // 3 == (i - 4) // 3, abs(j - i) < 2)
        return near & ((j - i) % 4 != 1)

    np.testing.assert_array_equal(seen(fn), truth(lambda b, h, i, j: bool(fn(b, h, i, j, np))))


def test_floats_and_elementwise_functions():
    got = seen(lambda b, h, i, j: jnp.sqrt((i * i + j * j).astype(jnp.float32)) < jnp.float32(6.5))
    np.testing.assert_array_equal(got, truth(lambda b, h, i, j: (i * i + j * j) ** 0.5 < 6.5))


def test_nested_jit_and_custom_functions():
    table = jnp.asarray(TABLE)

    @jax.jit
    def read(i):
        return table[i]

    @jax.jit
    def less(i, j):
        return read(i) < read(j)

    got = seen(lambda b, h, i, j: less(i, j) & (jax.nn.relu(j - 4) > jnp.clip(i, 1, 3)))
    want = truth(lambda b, h, i, j: TABLE[i] < TABLE[j] and max(j - 4, 0) > min(max(i, 1), 3))
    np.testing.assert_array_equal(got, want)


def test_arrays_of_inner_functions_are_operands_too():
    def mask(values):
        table = jnp.asarray(values, jnp.int32)
        return pa.Predicate(lambda b, h, i, j: jax.jit(lambda k: table[k] > 1)(j))

    a, b = mask([0, 1, 2]), mask([2, 1, 0])
    assert len(a.arrays) == len(b.arrays) == 1
    show = jax.jit(lambda m: reference.visible(m, 1, 1, 1, 3))
    np.testing.assert_array_equal(show(a)[0, 0, 0], [False, False, True])
    np.testing.assert_array_equal(show(b)[0, 0, 0], [True, False, False])


def test_reads_past_the_ends_are_clamped():
    table = jnp.asarray([0, 1, 0, 1], jnp.int32)
    got = seen(lambda b, h, i, j: table[j + 2] == 1, (1, 1, 1, 6))[0, 0, 0]
    np.testing.assert_array_equal(got, [False, True, True, True, True, True])
    ahead = seen(lambda b, h, i, j: jax.lax.dynamic_index_in_dim(table, j, keepdims=False) == 1,
                 (1, 1, 1, 6))  # fmt: skip
    np.testing.assert_array_equal(ahead[0, 0, 0], [False, True, False, True, True, True])


def test_equal_predicates_share_compiled_code():
    def make(values, shift):
        table = jnp.asarray(values, jnp.int32)
        return pa.Predicate(lambda b, h, i, j: table[j] > i + shift)

    a, b, c = make([1, 2], 1), make([5, 0], 1), make([1, 2], 2)
    longer = make([1, 2, 3], 1)
    assert a.trace == b.trace
    assert hash(a.trace) == hash(b.trace)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert a.trace != c.trace
    assert a.trace != longer.trace
    assert a.trace != "text"
    close = [
        pa.Predicate(lambda b, h, i, j, x=x: i.astype(jnp.float32) * x > 1)
        for x in (1.0, 1.0000001)
    ]
    assert close[0].trace != close[1].trace


def test_uses_says_which_indices_matter():
    trace = pa.Predicate(lambda b, h, i, j: (i > j) & (h > 0)).trace
    assert [trace.uses(n) for n in range(4)] == [False, True, True, True]


def test_tiles_ask_only_for_the_batches_and_heads_that_matter():
    grid = TileGrid(2, 3, 7, 10, 4, 4)
    some, every = pa.Predicate(lambda b, h, i, j: j <= i).tiles(grid)
    assert some.shape == every.shape == (1, 1, 2, 3)
    some, _ = pa.Predicate(lambda b, h, i, j: j <= i + h).tiles(grid)
    assert some.shape == (1, 3, 2, 3)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b, h, i, j: i, "fn gave int32, expected bool"),
        (lambda b, h, i, j: (i > j).astype(jnp.float32), "fn gave float32, expected bool"),
        (lambda b, h, i, j: (i > j, True), r"gave \['bool\[\]', 'bool\[\]'\], expected one bool"),
        (lambda b, h, i, j: jnp.ones(3, bool), r"gave \['bool\[3\]'\], expected one bool scalar"),
        (lambda b, h, i, j: None, r"gave \[\], expected one bool scalar"),
        ("text", "Predicate: got str, expected a function"),
    ],
)
def test_wrong_results_are_named(fn, message):
    with pytest.raises(TypeError, match=message):
        pa.Predicate(fn)


ARRAY = jnp.arange(10, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b, h, i, j: jnp.any(i < ARRAY), "operation 'lt' works on arrays of shapes"),
        (lambda b, h, i, j: ARRAY.sum() > i, "operation 'reduce_sum' works on arrays"),
        (lambda b, h, i, j: jax.lax.dynamic_slice(ARRAY, (i,), (2,))[0] > j,
         "reads more than one element"),
        (lambda b, h, i, j: jax.lax.dynamic_slice(ARRAY, (i,), (1,)).sum() > j,
         "operation 'reduce_sum' works on arrays of shapes"),
        (lambda b, h, i, j: jax.lax.cond(i > j, lambda: True, lambda: False), "operation 'cond'"),
        (lambda b, h, i, j: jax.lax.fori_loop(0, 3, lambda n, x: x + n, i) > j,
         "operation '(scan|while)' has no form for whole tiles"),
        (lambda b, h, i, j: jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i)),
         "operation 'random_"),
        (lambda b, h, i, j: jnp.stack([i, j]).max() > 3, "works on arrays of shapes"),
    ],
)  # fmt: skip
def test_operations_without_an_elementwise_form_are_refused(fn, message):
    with pytest.raises(NotImplementedError, match=f"Predicate: .*{message}"):
        pa.Predicate(fn)


def test_python_control_flow_is_refused_by_jax():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        pa.Predicate(lambda b, h, i, j: i > j or i == 0)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_attention_under_a_predicate(backend):
    """Arrays, a head- and batch-dependent rule and a division through forward and backward."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 37, 2, 16)), jnp.float32) for _ in range(3))
    table = jnp.asarray(rng.integers(0, 4, (2, 37)), jnp.int32)
    tiles = pa.KernelTiles(16, 16)

    def loss(run, q, k, v, table):
        mask = pa.Predicate(
            lambda b, h, i, j: (table[b, i] == table[b, j]) | ((j // 5 == i // 5) & (h == 1))
        )
        return jnp.sum(jnp.sin(run(q, k, v, mask)))

    def ours(q, k, v, mask):
        return pa.mha(q, k, v, mask, backend=backend, tiles=pa.Tiles(tiles, tiles, tiles))

    wanted = jax.grad(lambda *a: loss(lambda *x: reference.mha(*x)[0], *a), (0, 1, 2))(
        q, k, v, table
    )
    with pa.interpret():
        got = jax.jit(jax.grad(lambda *a: loss(ours, *a), (0, 1, 2)))(q, k, v, table)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_evaluate_broadcasts_its_indices():
    trace, arrays = predicate.trace(lambda b, h, i, j: i > j)
    q, kv = np.arange(3, dtype=np.int32)[:, None], np.arange(4, dtype=np.int32)[None]
    got = predicate.evaluate(trace, arrays, 0, 0, q, kv)
    np.testing.assert_array_equal(got, q > kv)
