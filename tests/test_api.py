"""`mha` and `plan`: which backend runs, what is refused and how, and the edges of what is taken."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import backends, gpu, reference

TILES = pa.Tiles(*(pa.KernelTiles(16, 16),) * 3)


def unchecked(*args, **kwargs):
    """`mha` without the runtime type checks that tests run under, which users do not have."""
    return inspect.unwrap(pa.mha)(*args, **kwargs)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(batch=2, q_len=21, kv_len=34, heads=4, kv_heads=2, dim=16, v_dim=8):
    return (
        normal(0, batch, q_len, heads, dim),
        normal(1, batch, kv_len, kv_heads, dim),
        normal(2, batch, kv_len, kv_heads, v_dim),
    )


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


class TestBackends:
    def test_named_backend_never_falls_back(self):
        reason = "backend 'triton' was asked for and cannot run this call: it needs an NVIDIA GPU"
        if gpu.detect() is not None:
            pytest.skip("this machine has a GPU")
        with pytest.raises(NotImplementedError, match=reason):
            pa.mha(*operands(), backend="triton")
        with pytest.raises(NotImplementedError, match=reason):
            pa.plan(pa.Causal(), q_len=4, kv_len=4, backend="triton")

    def test_unknown_name(self):
        for call in (
            lambda: pa.mha(*operands(), backend="cudnn"),
            lambda: pa.plan(None, q_len=4, kv_len=4, backend="cudnn"),
        ):
            with pytest.raises(
                ValueError,
                match="backend: got 'cudnn', expected one of mosaic_gpu, triton, xla, or None",
            ):
                call()

    def test_default_is_the_first_that_can(self):
        spec = pa.explain(*operands()).spec
        with gpu.target("h200"):
            assert backends.choose(spec, pa.Full(), None) == "triton"
            assert backends.choose(spec, pa.Full(), "xla") == "xla"
        if gpu.detect() is None:
            assert backends.choose(spec, pa.Full(), None) == "xla"

    def test_each_refusal_has_a_reason(self):
        wide = pa.explain(*operands(dim=512), backend="xla").spec
        with gpu.target("a100") as card:
            assert backends.load("triton").unsupported_reason(wide, pa.Full(), card) == (
                "it takes head_dim and v_dim up to 256, not 512, 8"
            )
            assert backends.choose(wide, pa.Full(), None) == "xla"
            with pytest.raises(
                NotImplementedError, match=r"'triton' was asked for.*head_dim and v_dim"
            ):
                pa.mha(*operands(dim=512), backend="triton")
        old = gpu.Gpu("NVIDIA V100", (7, 0), 80, 98304)
        reason = backends.load("triton").unsupported_reason(wide, pa.Full(), old)
        assert reason.startswith("it needs compute capability 8.0 or more, and NVIDIA V100 has")

    def test_when_none_can_every_reason_is_told(self, monkeypatch):
        if gpu.detect() is not None:
            pytest.skip("this machine has a GPU")
        monkeypatch.setattr(backends, "ALL", ("triton",))
        with pytest.raises(
            NotImplementedError, match="no backend takes this call: triton: it needs"
        ):
            pa.mha(*operands())

    def test_unknown_target(self):
        with (
            pytest.raises(ValueError, match="target: got 'h9000', expected one of"),
            gpu.target("h9000"),
        ):
            pass

    def test_interpretation_runs_kernels_here(self):
        q, k, v = operands()
        wanted = pa.mha(q, k, v, pa.Causal(), backend="xla")
        with pa.interpret():
            close(pa.mha(q, k, v, pa.Causal(), backend="triton", tiles=TILES), wanted)


class TestShapes:
    @pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (0, 0, 0)], ids=str)
    @pytest.mark.parametrize("mask", [None, pa.Causal()], ids=["full", "causal"])
    def test_nothing(self, sizes, mask):
        batch, q_len, kv_len = sizes
        q, k, v = operands(batch, q_len, kv_len)
        sinks = normal(3, 4)

        def loss(q, k, v, sinks):
            out, lse = pa.mha(q, k, v, mask, sinks=sinks, return_lse=True)
            assert out.shape == (batch, q_len, 4, 8)
            assert lse.shape == (batch, 4, q_len)
            return out.sum(), lse

        (total, lse), grads = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
        assert total == 0
        assert (np.asarray(lse) == -np.inf).all()
        assert not any(np.asarray(g).any() for g in grads)

    def test_lengths_of_one(self):
        q, k, v = operands(2, 1, 1, 4, 4, 16, 16)
        close(pa.mha(q, k, v), v)

    def test_without_batch(self):
        q, k, v = (x[0] for x in operands())
        options = {"bias": normal(4, 4, 21, 34), "return_lse": True}
        out, lse = pa.mha(q, k, v, pa.Causal(), **options)
        batched, batched_lse = pa.mha(q[None], k[None], v[None], pa.Causal(), **options)
        np.testing.assert_array_equal(out, batched[0])
        np.testing.assert_array_equal(lse, batched_lse[0])
        assert out.shape == (21, 4, 8)
        assert lse.shape == (4, 21)

    def test_rank_is_the_same_for_all(self):
        q, k, v = operands()
        with pytest.raises(
            ValueError, match=r"k: got shape \(34, 2, 16\), expected \[batch, kv_len"
        ):
            unchecked(q, k[0], v)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_out_has_the_dtype_of_q_and_lse_is_float32(self, dtype):
        q, k, v = (x.astype(dtype) for x in operands())
        out, lse = pa.mha(q, k, v, return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == jnp.float32
        assert isinstance(pa.mha(q, k, v), jax.Array)

    def test_lse_is_the_natural_log_of_the_denominator(self):
        q, k, v = operands(1, 3, 5, 1, 1)
        _, lse = pa.mha(q, k, v, scale=0.7, return_lse=True)
        logits = 0.7 * np.asarray(q, np.float64)[0, :, 0] @ np.asarray(k, np.float64)[0, :, 0].T
        close(lse[0, 0], np.log(np.exp(logits).sum(-1)))

    def test_halves_of_the_keys_merge_by_lse(self):
        q, k, v = operands()
        out, lse = pa.mha(q, k, v, return_lse=True)
        halves = [
            pa.mha(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 20), slice(20, None))
        ]
        weights = [jnp.exp(part - lse).swapaxes(1, 2)[..., None] for _, part in halves]
        close(sum(o * w for (o, _), w in zip(halves, weights, strict=True)), out)


class TestScale:
    @pytest.mark.parametrize(
        "scale", [None, 0.3, -0.125, 1e-30, np.float32(0.3), np.asarray(0.3)], ids=repr
    )
    @pytest.mark.parametrize("mask", [None, pa.Causal()], ids=["full", "causal"])
    def test_scales(self, scale, mask):
        q, k, v = operands()
        out, lse = pa.mha(q, k, v, mask, scale=scale, return_lse=True, tiles=TILES)
        wanted, wanted_lse = reference.mha(
            q, k, v, mask, scale=None if scale is None else float(scale)
        )
        close(out, wanted)
        close(lse, wanted_lse)

    def test_concrete_scalar_array(self):
        q, k, v = operands()
        np.testing.assert_array_equal(
            pa.mha(q, k, v, scale=jnp.float32(0.25)), pa.mha(q, k, v, scale=0.25)
        )

    def test_zero_is_the_mean_of_what_is_visible(self):
        q, k, v = operands(1, 34, 34, 2, 2)

        def loss(q, k):
            out = pa.mha(q, k, v, pa.Causal(), scale=0.0, tiles=TILES)
            return jnp.sum(out * normal(5, *out.shape)), out

        (_, out), (dq, dk) = jax.value_and_grad(loss, (0, 1), has_aux=True)(q, k)
        counts = np.arange(1, 35, dtype=np.float32)[None, :, None, None]
        close(out, np.cumsum(v, axis=1) / counts)
        assert not np.asarray(dq).any()
        assert not np.asarray(dk).any()

    def test_nan_and_traced_are_refused_by_name(self):
        q, k, v = operands()
        with pytest.raises(ValueError, match="scale: got nan, expected a finite number"):
            pa.mha(q, k, v, scale=math.nan)
        with pytest.raises(ValueError, match="scale: got a traced array, expected a number known"):
            jax.jit(lambda s: pa.mha(q, k, v, scale=s))(0.5)
        with pytest.raises(ValueError, match="soft_cap: got a traced array"):
            jax.jit(lambda s: pa.mha(q, k, v, soft_cap=s))(0.5)

    def test_calls_that_differ_in_one_option_do_not_share_a_result(self):
        q, k, v = operands()
        base = {"mask": pa.SlidingWindow(8), "soft_cap": 15.0, "scale": 0.1}
        for change in (
            {},
            {"soft_cap": 50.0},
            {"scale": 0.2},
            {"mask": pa.SlidingWindow(16)},
            {"mask": pa.Causal()},
            {"mask": None},
        ):
            options = base | change
            out = pa.mha(q, k, v, tiles=TILES, **options)
            close(out, reference.mha(q, k, v, **options)[0])


def test_float64_of_numpy_is_float32_unless_jax_knows_float64():
    q, k, v = (np.asarray(x, np.float64) for x in operands())
    out = unchecked(q, k, v)
    assert out.dtype == jnp.float32
    assert pa.explain(q, k, v).spec.dtype == "float32"
    close(out, reference.mha(*(jnp.asarray(x) for x in (q, k, v)))[0])


class TestErrors:
    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_operands_must_be_arrays(self, name):
        call = dict(zip("qkv", operands(), strict=True)) | {name: [[1.0]]}
        with pytest.raises(TypeError, match=f"{name}: got list, expected an array"):
            unchecked(**call)

    @pytest.mark.parametrize(
        ("mask", "error", "message"),
        [
            (jnp.ones((21, 34), jnp.int32), TypeError, "mask: got dtype int32, expected bool"),
            (jnp.ones((21, 34)), TypeError, r"mask: got dtype float32.*go into bias=\)"),
            (
                jnp.ones((21, 33), bool),
                ValueError,
                r"mask: got shape \(1, 1, 21, 33\), expected one",
            ),
            (jnp.ones((2, 3, 21, 34), bool), ValueError, "mask: got shape"),
            (jnp.ones((1,) * 5, bool), ValueError, "mask: got shape .*expected rank 4 or less"),
            (
                "causal",
                TypeError,
                r"mask: got str, expected a mask such as Causal\(\), a BlockTable",
            ),
            (True, TypeError, "mask: got bool, expected a mask"),
            (pa.Causal, TypeError, "mask: got type, expected a mask"),
            (
                pa.Document(jnp.zeros(20, jnp.int32)),
                ValueError,
                r"q_segment_ids: got shape \(1, 20\)",
            ),
            (pa.Causal() & pa.Lengths(jnp.ones(3, jnp.int32)), ValueError, "q_lens: got shape"),
        ],
    )
    def test_masks(self, mask, error, message):
        with pytest.raises(error, match=message):
            unchecked(*operands(), mask)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"bias": jnp.zeros((1,) * 5)}, ValueError, "bias: got shape .* rank 4 or less"),
            (
                {"bias": jnp.zeros((20, 34))},
                ValueError,
                r"bias: got shape \(1, 1, 20, 34\), expected",
            ),
            (
                {"bias": jnp.zeros((21, 34), jnp.int32)},
                TypeError,
                "bias: got dtype int32, expected",
            ),
            ({"bias": [[0.0]]}, TypeError, "bias: got list, expected an array"),
            ({"sinks": jnp.zeros(3)}, ValueError, r"sinks: got shape \(3,\), expected \[q_heads\]"),
            ({"sinks": jnp.zeros(4, jnp.int32)}, TypeError, "sinks: got dtype int32"),
            ({"sinks": [0.0] * 4}, TypeError, "sinks: got list, expected an array"),
            ({"soft_cap": 0.0}, ValueError, "soft_cap: got 0.0, expected a positive number"),
            ({"soft_cap": -1.0}, ValueError, "soft_cap: got -1.0"),
            ({"deterministic": "yes"}, TypeError, "deterministic: got str, expected a bool"),
            ({"tiles": (16, 16)}, TypeError, "tiles: got tuple, expected a Tiles or None"),
        ],
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            unchecked(*operands(), **options)

    def test_heads(self):
        q, k, v = operands(heads=4, kv_heads=3)
        with pytest.raises(ValueError, match="heads: got 4 in q and 3 in k and v"):
            pa.mha(q, k, v)

    def test_mixed_dtypes(self):
        q, k, v = operands()
        for change in ({"k": k.astype(jnp.bfloat16)}, {"v": v.astype(jnp.float16)}):
            with pytest.raises(
                ValueError, match=r"dtype: got q float32, k .*, v .*, expected one dtype"
            ):
                unchecked(**({"q": q, "k": k, "v": v} | change))

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"q_len": -1}, ValueError, "q_len: got -1, expected an int from 0 up"),
            ({"kv_len": 2.5}, ValueError, "kv_len: got 2.5, expected an int from 0 up"),
            ({"q_len": True}, ValueError, "q_len: got True"),
            ({"mask": 3}, TypeError, "mask: got int, expected a mask"),
            ({"head_dim": 0}, ValueError, "head_dim: got 0, expected 1 or more"),
            ({"dtype": jnp.int32}, ValueError, "dtype: got int32, expected one of"),
            ({"mask": jnp.ones((3, 3), bool)}, ValueError, "mask: got shape"),
            ({"tiles": 64}, TypeError, "tiles: got int, expected a Tiles or None"),
        ],
    )
    def test_plan(self, change, error, message):
        with pytest.raises(error, match=message):
            inspect.unwrap(pa.plan)(**({"mask": None, "q_len": 4, "kv_len": 4} | change))


class TestPlans:
    def test_a_plan_is_the_mask(self):
        q, k, v = operands()
        ids = np.random.default_rng(0).integers(0, 3, (2, 34)).astype(np.int32)
        for mask in (pa.Causal(), pa.Document(ids[:, :21], ids), pa.Dilated(2, 3), None):
            table = pa.plan(mask, q_len=21, kv_len=34, head_dim=16, tiles=TILES)
            np.testing.assert_array_equal(
                pa.mha(q, k, v, table), pa.mha(q, k, v, mask, tiles=TILES)
            )

    def test_an_array_is_a_mask(self):
        q, k, v = operands()
        for shape in ((21, 34), (34,), (4, 1, 34), (2, 1, 21, 34), (2, 4, 21, 34)):
            array = jnp.asarray(np.random.default_rng(0).random(shape) < 0.6)
            full = jnp.broadcast_to(array, (2, 4, 21, 34))
            close(pa.mha(q, k, v, array), reference.mha(q, k, v, full)[0])

    def test_a_plan_decides_the_backend(self):
        q, k, v = operands()
        with pa.interpret():
            table = pa.plan(pa.Causal(), q_len=21, kv_len=34, head_dim=16, backend="xla")
            assert table.backend == "xla"
            assert pa.explain(q, k, v, table).backend == "xla"
            sizes = {"q_len": 21, "kv_len": 34, "head_dim": 16}
            assert pa.plan(pa.Causal(), **sizes).backend == "mosaic_gpu"
            assert pa.plan(pa.Causal(), **sizes, dtype=jnp.float32).backend == "triton"

    def test_a_predicate_plans_for_the_heads_it_is_told(self):
        q, k, v = operands()
        mask = pa.Predicate(lambda b, h, i, j: j <= i + 3 * h - b)
        table = pa.plan(mask, q_len=21, kv_len=34, batch=2, q_heads=4, head_dim=16, tiles=TILES)
        close(pa.mha(q, k, v, table), reference.mha(q, k, v, mask)[0])

    def test_gradients_pass_by_the_plan(self):
        q, k, v = operands()
        ids = jnp.asarray(np.arange(34) // 9, jnp.int32)

        @jax.jit
        def grads(q, ids):
            table = pa.plan(pa.Document(ids[:21], ids), q_len=21, kv_len=34, head_dim=16)
            return jax.grad(lambda q: jnp.sum(pa.mha(q, k, v, table) ** 2))(q)

        wanted = jax.grad(
            lambda q: jnp.sum(reference.mha(q, k, v, pa.Document(ids[:21], ids))[0] ** 2)
        )(q)
        close(grads(q, ids), wanted)

    def test_deterministic_is_bit_equal(self):
        q, k, v = operands()
        run = jax.jit(jax.grad(lambda *a: jnp.sum(pa.mha(*a, deterministic=True) ** 2), (0, 1, 2)))
        for a, b in zip(run(q, k, v), run(q, k, v), strict=True):
            np.testing.assert_array_equal(a, b)


def test_tiles_too_large_for_the_card_are_refused_before_launch():
    q = jnp.zeros((1, 256, 2, 256), jnp.bfloat16)
    big = pa.Tiles(*(pa.KernelTiles(128, 128, 8, 4),) * 3)
    with pa.interpret():
        with pytest.raises(ValueError, match=r"tiles: got fwd 128x128.*shared memory"):
            pa.mha(q, q, q, pa.Causal(), backend="triton", tiles=big)
        planned = pa.plan(
            pa.Causal(), q_len=256, kv_len=256, head_dim=64, backend="triton", tiles=big
        )
        with pytest.raises(ValueError, match=r"BlockTable.*shared memory"):
            pa.mha(q, q, q, planned)


def test_wide_float32_goes_to_plain_jax_and_is_refused_by_name():
    q = jax.ShapeDtypeStruct((1, 64, 2, 256), jnp.float32)
    with gpu.target("h200"):
        assert pa.explain(q, q, q).backend == "xla"
        with pytest.raises(NotImplementedError, match="float32 up to 192 channels, not 256"):
            pa.explain(q, q, q, backend="triton")
