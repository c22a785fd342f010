"""`Spec` and `Tiles`: what a call's operands must be, canonical forms, hashes."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import backends
from pallas_attn.call import Call
from pallas_attn.spec import Spec
from pallas_attn.tiles import padded_dim, split_dim


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K, V = struct(2, 5, 6, 32), struct(2, 7, 3, 32), struct(2, 7, 3, 16)


def of(q=Q, k=K, v=V, **options):
    return inspect.unwrap(Spec.of)(q, k, v, **options)


def test_facts_of_a_call():
    spec = of(bias=struct(1, 6, 1, 7), sinks=struct(6, dtype=jnp.float32), soft_cap=30)
    assert spec == Spec(
        batch=2, q_len=5, kv_len=7, q_heads=6, kv_heads=3, head_dim=32, v_dim=16, dtype="bfloat16",
        scale=1 / math.sqrt(32), soft_cap=30.0, has_sinks=True, bias_shape=(1, 6, 1, 7),
    )  # fmt: skip
    assert spec.group == 2
    assert hash(spec) == hash(
        of(bias=struct(1, 6, 1, 7), sinks=struct(6, dtype=jnp.float32), soft_cap=30.0)
    )


@pytest.mark.parametrize(
    "scale", [0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5), np.asarray(0.5)]
)
def test_equal_scales_make_equal_specs(scale):
    assert of(scale=scale) == of(scale=0.5)
    assert isinstance(of(scale=scale).scale, float)


def test_none_is_the_root_of_the_true_head_dim_and_zero_is_zero():
    odd = (struct(1, 2, 1, 40), struct(1, 2, 1, 40), struct(1, 2, 1, 8))
    assert of(*odd).scale == pytest.approx(40**-0.5)
    assert of(scale=0).scale == 0.0
    assert of(scale=-1).scale == -1.0
    assert of(scale=None).scale == pytest.approx(32**-0.5)


def test_scale_inside_jit_is_static():
    traced = []

    @jax.jit
    def fn(x, scale):
        with pytest.raises(ValueError, match="scale: ") as caught:
            of(scale=scale)
        traced.append(caught.value)
        return x

    fn(jnp.ones(2), jnp.float32(0.5))
    assert str(traced[0]) == (
        "scale: got a traced array, expected a number known while tracing (scale q instead)"
    )


BAD = [
    (
        {"q": struct(5, 6, 32)},
        ValueError,
        r"q: got shape \(5, 6, 32\), expected \[batch, q_len, q_heads",
    ),
    ({"k": struct(7, 3, 32)}, ValueError, r"k: got shape \(7, 3, 32\), expected \[batch, kv_len"),
    (
        {"v": struct(1, 2, 7, 3, 16)},
        ValueError,
        r"v: got shape .*expected \[batch, kv_len, kv_heads",
    ),
    ({"k": struct(2, 7, 3, 16)}, ValueError, r"q, k, v: got shapes .*expected k"),
    ({"k": struct(1, 7, 3, 32)}, ValueError, "q, k, v: got shapes"),
    ({"v": struct(2, 8, 3, 16)}, ValueError, "q, k, v: got shapes"),
    ({"v": struct(3, 7, 3, 16)}, ValueError, "q, k, v: got shapes"),
    ({"v": struct(2, 7, 6, 16)}, ValueError, "q, k, v: got shapes"),
    (
        {"q": struct(2, 5, 7, 32)},
        ValueError,
        "heads: got 7 in q and 3 in k and v, expected q's to be a mul",
    ),
    ({"q": struct(2, 5, 2, 32)}, ValueError, "heads: got 2 in q and 3 in k and v"),
    ({"q": struct(2, 5, 0, 32)}, ValueError, "heads: got 0 in q"),
    ({"k": struct(2, 7, 0, 32), "v": struct(2, 7, 0, 16)}, ValueError, "heads: got 6 in q and 0"),
    ({"q": struct(2, 5, 6, 0), "k": struct(2, 7, 3, 0)}, ValueError, "head_dim: got 0, expected 1"),
    ({"v": struct(2, 7, 3, 0)}, ValueError, "v_dim: got 0, expected 1 or more"),
    (
        {"q": struct(2, 5, 6, 32, dtype=jnp.float32)},
        ValueError,
        "dtype: got q float32, k bfloat16, v bf",
    ),
    (
        {"v": struct(2, 7, 3, 16, dtype=jnp.float16)},
        ValueError,
        "dtype: got q bfloat16, k bf.*v float16",
    ),
    ({"k": struct(2, 7, 3, 32, dtype=jnp.int8)}, ValueError, "dtype: got q bfloat16, k int8"),
    ({"scale": "big"}, TypeError, "scale: got str, expected a number"),
    ({"scale": True}, TypeError, "scale: got bool, expected a number"),
    ({"scale": np.ones(1)}, TypeError, "scale: got ndarray, expected a number"),
    ({"scale": math.nan}, ValueError, "scale: got nan, expected a finite number"),
    ({"scale": jnp.float32(jnp.nan)}, ValueError, "scale: got nan, expected a finite number"),
    ({"scale": math.inf}, ValueError, "scale: got inf, expected a finite number"),
    (
        {"soft_cap": 0},
        ValueError,
        "soft_cap: got 0.0, expected a positive number, or None for no cap",
    ),
    ({"soft_cap": -5.0}, ValueError, "soft_cap: got -5.0, expected a positive number"),
    ({"soft_cap": math.nan}, ValueError, "soft_cap: got nan, expected a finite number"),
    ({"soft_cap": [1]}, TypeError, "soft_cap: got list, expected a number"),
    ({"sinks": struct(3)}, ValueError, r"sinks: got shape \(3,\), expected \[q_heads\] = \(6,\)"),
    ({"sinks": struct(6, dtype=jnp.int32)}, TypeError, "sinks: got dtype int32, expected a float"),
    ({"bias": struct(1, 1, 1, 1, dtype=bool)}, TypeError, "bias: got dtype bool, expected a float"),
    (
        {"bias": struct(2, 3, 5, 7)},
        ValueError,
        r"bias: got shape \(2, 3, 5, 7\), expected one that",
    ),
    ({"bias": struct(2, 6, 5)}, ValueError, r"bias: got shape \(2, 6, 5\), expected one that"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        of(**change)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.complex64, bool])
def test_other_dtypes_are_refused(dtype):
    same = (struct(1, 2, 1, 8, dtype=dtype),) * 3
    with pytest.raises(
        ValueError, match=r"dtype: got .*expected one of float16, bfloat16, float32"
    ):
        of(*same)


def test_tiles_are_checked():
    for size in (0, 8, 24, -16):
        with pytest.raises(
            ValueError, match=f"block_q: got {size}, expected a multiple of 16 from 16 up"
        ):
            pa.KernelTiles(size, 16)
        with pytest.raises(ValueError, match=f"block_kv: got {size}, expected a multiple of 16"):
            pa.KernelTiles(16, size)
    with pytest.raises(ValueError, match="num_warps: got 3, expected 1, 2, 4, 8, 12 or 16"):
        pa.KernelTiles(16, 16, 3)
    with pytest.raises(ValueError, match="num_stages: got 9, expected 1 to 8"):
        pa.KernelTiles(16, 16, 4, 9)


def test_calls_hash_by_value():
    tiles = pa.Tiles(*(pa.KernelTiles(16, 32),) * 3)
    again = pa.Tiles(*(pa.KernelTiles(16, 32),) * 3)
    a, b = Call(of(), tiles, "xla"), Call(of(), again, "xla")
    assert a == b
    assert hash(a) == hash(b)
    assert a != Call(of(scale=0.3), tiles, "xla")
    assert a != Call(of(), tiles, "xla", interpret=True)
    assert str(tiles.fwd).startswith("16x32, 4 warps")


@pytest.mark.parametrize("dim", range(1, 257))
def test_split_dim_covers_the_dim_in_powers_of_two(dim):
    chunks = split_dim(dim)
    assert 1 <= len(chunks) <= 2
    end = 0
    for start, width in chunks:
        assert start == end
        assert width >= 16
        assert width & (width - 1) == 0
        end = start + width
    assert end == padded_dim(dim) >= dim
    assert end <= max(16, 2 * dim)
    assert chunks[-1][0] < dim


def test_triton_takes_powers_of_two_only():
    spec = of()
    tiles = pa.Tiles(pa.KernelTiles(192, 128, 12), pa.KernelTiles(64, 64), pa.KernelTiles(64, 64))
    assert "fwd's blocks are 192x128" in backends.load("triton").tiles_reason(tiles, spec, None)
