"""The serving kernels with their default tiles lower for CUDA, compile and spill in no loop."""

import functools

import jax
import jax.numpy as jnp
import pytest
from test_lowering import needs_wheels

import pallas_attn as pa
from pallas_attn import inspect


def paged(q_shape, page_size=64, kv_heads=8, dims=(128, 128), dtype=jnp.bfloat16, **options):
    """A call of `paged_attention` as (fn, *avals): 8,192 keys in pages."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    batch, pages = q_shape[0], 8192 // page_size
    k, v = (struct((batch * pages, page_size, kv_heads, d)) for d in dims)
    table = jax.ShapeDtypeStruct((batch, pages), jnp.int32)
    lens = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def call(q, k, v, table, lens):
        return pa.paged_attention(q, k, v, table, lens, backend="triton", **options)

    return call, struct(q_shape), k, v, table, lens


def prefill(page_size):
    call, _, k, v, table, lens = paged((8, 32, 128), page_size)
    del call

    def ragged(q, k, v, table, lens, cu):
        return pa.paged_attention(
            q, k, v, table, lens, cu_seqlens_q=cu, mask=pa.Causal(), backend="triton"
        )

    q, cu = jax.ShapeDtypeStruct((8192, 32, 128), k.dtype), jax.ShapeDtypeStruct((9,), jnp.int32)
    return ragged, q, k, v, table, lens, cu


def latent(heads):
    _, q, k, _, table, lens = paged((32, heads, 576), kv_heads=1, dims=(576, 512))

    def call(q, k, table, lens):
        return pa.paged_attention(q, k, None, table, lens, v_dim=512, backend="triton")

    return call, q, k, table, lens


def contiguous():
    k = jax.ShapeDtypeStruct((64, 8192, 8, 128), jnp.bfloat16)
    q, lens = jax.ShapeDtypeStruct((64, 32, 128), k.dtype), jax.ShapeDtypeStruct((64,), jnp.int32)
    return lambda q, k, lens: pa.mha_decode(q, k, k, lens, backend="triton"), q, k, lens


FEW = 32  # bytes a thread may spill outside loops
WINDOW = {"mask": pa.Causal() & pa.SlidingWindow(1024), "soft_cap": 30.0}
CALLS = {
    "pages_of_16": paged((64, 32, 128), 16),
    "pages_of_64": paged((64, 32, 128), 64),
    "pages_of_1": paged((64, 32, 128), 1),
    "several_tokens": paged((64, 4, 32, 128), mask=pa.Causal()),
    "window": paged((64, 32, 128), **WINDOW),
    "dim_64": paged((64, 32, 64), dims=(64, 64)),
    "dim_256": paged((16, 16, 256), kv_heads=4, dims=(256, 256)),
    "dim_192_128": paged((16, 32, 192), dims=(192, 128)),
    "dim_96_40": paged((16, 32, 96), dims=(96, 40)),
    "prefill": prefill(64),
    "prefill_16": prefill(16),
    "latent": latent(16),
    "contiguous": contiguous(),
}
MORE = {
    "float32": paged((16, 32, 128), dtype=jnp.float32),
    "predicate": paged((16, 32, 128), mask=pa.Predicate(lambda b, h, q, kv: (q + kv + h) % 3 > 0)),
    "latent_128": latent(128),
}


@pytest.mark.parametrize("target", ["h200", "a100", "l4"])
def test_lowers_for_cuda(target):
    for name, call in {**CALLS, **MORE}.items():
        text = inspect.lower(*call, target=target)
        assert text.count("xla.gpu.triton") == 2, name


@pytest.mark.sass
@needs_wheels
def test_default_tiles_spill_in_no_loop_and_little_outside():
    reports = inspect.report_many(list(CALLS.values()), target="h200", named="pallas_attn")
    for name, found in zip(CALLS, reports, strict=True):
        assert not isinstance(found, inspect.CompileError), (name, found)
        kernels = [k for k in found if "pallas_attn" in k.name]
        assert len(kernels) == 2, (name, [k.name for k in found])
        for kernel in kernels:
            # Some releases of Triton keep a few registers in memory from prologue to epilogue.
            assert kernel.spills.in_loops == 0, (name, str(kernel))
            assert kernel.spill_bytes <= FEW, (name, str(kernel))
        # Keys and values are loaded ahead, 16 bytes a thread.
        assert kernels[0].count("LDGSTS.E.BYPASS.128") > 0, (name, str(kernels[0]))
