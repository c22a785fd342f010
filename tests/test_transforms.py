"""vmap, scan, remat, donation, export, x64, second derivatives; sharding is in test_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_attn as pa
from pallas_attn import gpu, testing, vjp

TILES = pa.Tiles(*(pa.KernelTiles(32, 32),) * 3)
BACKENDS = ("triton", "xla")


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture(params=BACKENDS)
def attend(request):
    """mha of one backend; Triton's kernels run by interpretation."""
    call = functools.partial(pa.mha, backend=request.param, tiles=TILES)
    if request.param == "xla":
        yield call
    else:
        with pa.interpret():
            yield call


def close(actual, expected, tolerance=3e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance),
        actual,
        expected,
    )


def operands(*lead, q_len=40, kv_len=50, q_heads=4, kv_heads=2, dim=16):
    return (
        normal(0, *lead, q_len, q_heads, dim),
        normal(1, *lead, kv_len, kv_heads, dim),
        normal(2, *lead, kv_len, kv_heads, dim),
    )


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 1, 0), (2, 0, None)])
def test_vmap_equals_a_loop(attend, in_axes):
    whole = operands(2)
    mapped = [
        x if axis is None else jnp.stack([x, 0.5 * x, -x], axis)
        for x, axis in zip(whole, in_axes, strict=True)
    ]

    def one(q, k, v):
        return attend(q, k, v, pa.Causal(), return_lse=True)

    def grads(q, k, v):
        return jax.grad(lambda *a: (one(*a)[0] * jnp.cos(one(*a)[0])).sum(), (0, 1, 2))(q, k, v)

    for fn in (one, grads):
        out = jax.jit(jax.vmap(fn, in_axes))(*mapped)
        for i in range(3):
            single = [
                x if axis is None else jnp.take(x, i, axis)
                for x, axis in zip(mapped, in_axes, strict=True)
            ]
            close(jax.tree.map(lambda x, i=i: x[i], out), jax.jit(fn)(*single))


def test_gradient_of_vmap_sums_over_the_axis_that_is_not_mapped(attend):
    q, k, v = operands(1)
    queries = jnp.stack([q, 2 * q])

    def total(k, v):
        return (jax.vmap(lambda q: attend(q, k, v))(queries) ** 2).sum()

    def looped(k, v):
        return sum((attend(q, k, v) ** 2).sum() for q in queries)

    close(jax.jit(jax.grad(total, (0, 1)))(k, v), jax.jit(jax.grad(looped, (0, 1)))(k, v), 1e-4)


def test_vmap_over_mask_arrays_only_and_nested(attend):
    q, k, v = operands(2, kv_len=40)
    ids = jnp.asarray(np.random.default_rng(3).integers(-1, 3, (3, 2, 2, 40)), jnp.int32)

    def one(ids, q, k, v):
        return attend(q, k, v, pa.Document(ids) & pa.Causal())

    out = jax.jit(
        jax.vmap(jax.vmap(one, (0, None, None, None)), (0, None, None, None))
    )(ids, q, k, v)  # fmt: skip
    single = jax.jit(one)
    for i in range(3):
        for j in range(2):
            close(out[i, j], single(ids[i, j], q, k, v))


def test_vmap_over_rank_3_operands(attend):
    whole = operands(3)
    out = jax.jit(jax.vmap(lambda q, k, v: attend(q, k, v, pa.Causal())))(*whole)
    close(out, jax.jit(lambda q, k, v: attend(q, k, v, pa.Causal()))(*whole))


def test_scan_over_layers_equals_a_loop(attend):
    q, k, v = operands(1, q_len=40, kv_len=40, kv_heads=4)
    weights = normal(5, 3, 16, 16) * 0.3

    def layer(x, w):
        return x + attend(x @ w, k, v, pa.Causal()), None

    def scanned(q, weights):
        return (jax.lax.scan(layer, q, weights)[0] ** 2).sum()

    def looped(q, weights):
        for w in weights:
            q = layer(q, w)[0]
        return (q**2).sum()

    both = (jax.jit(jax.grad(f, (0, 1)))(q, weights) for f in (scanned, looped))
    close(*both, 1e-3)


def forward_runs(jaxpr) -> int:
    """How often the forward kernel is called in a jaxpr and all jaxprs inside it."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            count += "pallas_attn_fwd" in str(eqn.params.get("name", eqn.params))
            continue
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += forward_runs(inner)
    return count


def test_remat_with_the_named_outputs_saved_runs_the_forward_once():
    q, k, v = operands(1)
    policy = jax.checkpoint_policies.save_only_these_names(vjp.OUT_NAME, vjp.LSE_NAME)

    def loss(q, k, v, policy=None):
        f = functools.partial(pa.mha, backend="triton", tiles=TILES, mask=pa.Causal())
        return (jax.checkpoint(f, policy=policy)(jnp.sin(q), k, v) ** 2).sum()

    with pa.interpret():
        saved = jax.make_jaxpr(jax.grad(functools.partial(loss, policy=policy)))(q, k, v)
        again = jax.make_jaxpr(jax.grad(loss))(q, k, v)
        plain = jax.make_jaxpr(
            jax.grad(lambda q, k, v: (pa.mha(q, k, v, backend="triton", tiles=TILES) ** 2).sum())
        )(q, k, v)
    once = forward_runs(plain.jaxpr)
    assert once > 0
    assert forward_runs(saved.jaxpr) == once
    assert forward_runs(again.jaxpr) == 2 * once


def test_remat_keeps_gradients_on_odd_shapes(attend):
    q, k, v = normal(0, 3, 16, 5, 19), normal(1, 3, 17, 5, 19), normal(2, 3, 17, 5, 19)

    def loss(q, k, v, wrap=lambda f: f):
        return (wrap(attend)(q, k, v) ** 2).sum()

    plain = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    wrapped = jax.jit(jax.grad(functools.partial(loss, wrap=jax.checkpoint), (0, 1, 2)))(q, k, v)
    close(wrapped, plain)


def test_forward_mode_is_refused_while_tracing(attend):
    q, k, v = operands(1, q_len=17, kv_len=17)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attend(q, k, v), (q,), (q,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.grad(lambda q: attend(q, k, v).sum()), (q,), (q,))


def test_second_derivatives_are_refused_by_the_kernels():
    q, k, v = operands(1, q_len=17, kv_len=17)
    with pa.interpret():
        inner = jax.grad(lambda q: (pa.mha(q, k, v, backend="triton", tiles=TILES) ** 2).sum())
        with pytest.raises(NotImplementedError, match="differentiable once"):
            jax.grad(lambda q: (inner(q) ** 2).sum())(q)


def test_second_derivatives_are_right_in_plain_jax():
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in operands(1, q_len=9, kv_len=11))
        f = jax.jit(jax.grad(lambda q: (pa.mha(q, k, v, pa.Causal(), backend="xla") ** 2).sum()))
        direction = normal(7, *q.shape).astype(jnp.float64)
        second = jax.grad(lambda q: (f(q) * direction).sum())(q)
        step = 1e-5
        expected = (f(q + step * direction) - f(q - step * direction)) / (2 * step)
        # The Hessian is symmetric, so differentiating (grad·direction) gives Hessian·direction.
        np.testing.assert_allclose(second, expected, atol=1e-7)


def test_donated_operands(attend):
    q, k, v = operands(1, kv_heads=4, kv_len=40)
    expected = jax.jit(attend)(q, k, v)
    close(jax.jit(attend, donate_argnums=0)(jnp.array(q), k, v), expected)


def test_export_round_trip():
    q, k, v = operands(2)
    fn = jax.jit(lambda q, k, v: pa.mha(q, k, v, pa.Causal(), backend="xla"))
    exported = jax.export.deserialize(jax.export.export(fn)(q, k, v).serialize())
    close(exported.call(q, k, v), fn(q, k, v))


def test_kernels_export_for_cuda_without_a_gpu():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    fn = jax.jit(lambda q, k, v: pa.mha(q, k, v, pa.Causal(), backend="triton"))
    # JAX does not promise that the Triton call stays stable; whoever exports it says so.
    unstable = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(2)]
    with gpu.target("h200"), jax.sharding.use_abstract_mesh(mesh):
        export = jax.export.export(fn, platforms=["cuda"], disabled_checks=[unstable])
        exported = export(*shapes)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.out_avals[0].shape == (2, 40, 4, 16)


@pytest.mark.parametrize("form", ["loose", "list"])
def test_x64_mode_changes_nothing_for_float32(attend, form):
    q, k, v = operands(2)
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 40)))

    def run(ids):
        kv_ids = jnp.pad(ids, ((0, 0), (0, 10)), mode="edge")
        mask = pa.Document(ids, kv_ids) & pa.Causal(align="bottom_right") & pa.SlidingWindow(17)
        if form == "list":
            mask = mask | pa.Predicate(lambda b, h, i, j: (i == j) | (h == 1))
        loss = lambda q, k, v: (attend(q, k, v, mask, soft_cap=5.0) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    narrow = run(jnp.asarray(ids, jnp.int32))
    with jax.enable_x64(True):
        wide = run(jnp.asarray(ids))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(wide))
    close(wide, narrow)


@pytest.mark.parametrize("name", testing.MASK_CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_traces_where_ranks_must_match(backend, name):
    """Some projects run with jax_numpy_rank_promotion="raise": nothing here promotes."""
    rng = np.random.default_rng(0)
    mask = testing.MASK_CASES[name](rng, 2, 4, 40, 50)
    q, k, v = operands(2)
    bias, sinks = normal(3, 1, 4, 40, 1), normal(4, 4)

    def loss(q, k, v, bias, sinks):
        options = {"bias": bias, "sinks": sinks, "soft_cap": 5.0, "backend": backend}
        out, lse = pa.mha(q, k, v, mask, return_lse=True, tiles=TILES, **options)
        return out.sum() + lse.sum()

    with gpu.target("h200"), jax.numpy_rank_promotion("raise"):
        jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3, 4)))(q, k, v, bias, sinks)


def test_new_values_of_mask_arrays_do_not_retrace(attend):
    q, k, v = operands(2, kv_len=40)
    traces = []

    @jax.jit
    def step(q, k, v, ids, lens):
        traces.append(1)
        return attend(q, k, v, pa.Document(ids) & pa.Lengths(kv_lens=lens))

    rng = np.random.default_rng(0)
    for _ in range(3):
        ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, 40))), jnp.int32)
        step(q, k, v, ids, jnp.asarray(rng.integers(0, 41, 2), jnp.int32))
    assert len(traces) == 1


def test_interpret_context_retraces_jitted_functions():
    q, k, v = operands(1)
    fn = jax.jit(lambda q, k, v: pa.mha(q, k, v))
    assert "pallas_call" not in str(jax.make_jaxpr(fn)(q, k, v))
    with pa.interpret():
        assert "pallas_call" in str(jax.make_jaxpr(fn)(q, k, v))
    assert "pallas_call" not in str(jax.make_jaxpr(fn)(q, k, v))
