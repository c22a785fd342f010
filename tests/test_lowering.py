"""Every kernel with its default tiles lowers for CUDA, compiles for sm_80 and sm_90a, spills
nothing and, on Hopper, runs its matmuls on wgmma. No GPU is needed."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn import inspect
from pallas_attn._sass import MissingToolsError, find_tool

LENGTH = 1024


def no_compiler() -> bool:
    try:
        find_tool("nvdisasm")
    except MissingToolsError:
        return True
    return False


needs_wheels = pytest.mark.skipif(
    no_compiler(), reason="needs nvdisasm: pip install pallas_attn[sass]"
)
KERNELS = ("fwd", "dq", "dk")


def gradients(mask_of, options, q, k, v, dout, *arrays):
    """Forward and backward of one call, in the arrays' dtype."""

    def attend(q, k, v):
        return pa.mha(q, k, v, mask_of(*arrays), backend="triton", **options)

    out, vjp = jax.vjp(attend, q, k, v)
    return out, vjp(dout)


def operands(head_dim, dtype, v_dim=None, q_heads=4, kv_heads=2, length=LENGTH):
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    q, k = struct((2, length, q_heads, head_dim)), struct((2, length, kv_heads, head_dim))
    v, out = (
        struct((2, length, kv_heads, v_dim or head_dim)),
        struct((2, length, q_heads, v_dim or head_dim)),
    )
    return q, k, v, out


IDS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
MAP = jax.ShapeDtypeStruct((4, LENGTH // 64, LENGTH // 64), jnp.bool_)
# One mask for each form of table, and none.
MASKS = {
    "full": (lambda: None, ()),
    "run": (lambda: pa.Causal() & pa.SlidingWindow(300), ()),
    "loose": (lambda ids: pa.Causal() & pa.Document(ids), (IDS,)),
    "list": (lambda blocks: pa.BlockSparse(blocks, 64, 64), (MAP,)),
    "predicate": (lambda ids: pa.Predicate(lambda b, h, i, j: ids[b, i] >= ids[b, j]), (IDS,)),
}


@pytest.mark.parametrize("target", ["h200", "a100", "l4"])
@pytest.mark.parametrize("name", MASKS)
def test_lowers_for_cuda(name, target):
    mask_of, arrays = MASKS[name]
    for head_dim, v_dim, dtype in (
        (64, 64, jnp.bfloat16),
        (192, 128, jnp.float16),
        (96, 40, jnp.float32),
    ):
        call = functools.partial(gradients, mask_of, {})
        text = inspect.lower(call, *operands(head_dim, dtype, v_dim), *arrays, target=target)
        assert text.count("xla.gpu.triton") >= 3


def test_options_lower_for_cuda():
    options = {"soft_cap": 30.0, "scale": -0.1, "sinks": jnp.ones(4)}
    q, k, v, dout = operands(80, jnp.bfloat16, length=1000)
    bias = jax.ShapeDtypeStruct((1, 4, 1000, 1), jnp.float32)

    def call(q, k, v, dout, bias):
        return gradients(lambda: ~pa.Causal(), {**options, "bias": bias}, q, k, v, dout)

    assert inspect.lower(call, q, k, v, dout, bias).count("xla.gpu.triton") >= 3


def compiled(target, dims):
    """Reports of the attention kernels of all masks at some head dims, in one compiler process."""
    calls = {}
    for head_dim, v_dim in dims:
        for name, (mask_of, arrays) in MASKS.items():
            if name == "predicate":
                continue
            call = functools.partial(gradients, mask_of, {})
            calls[name, head_dim, v_dim] = (call, *operands(head_dim, jnp.bfloat16, v_dim), *arrays)
    reports = inspect.report_many(list(calls.values()), target=target, named="pallas_attn")
    found = {}
    for key, result in zip(calls, reports, strict=True):
        if isinstance(result, inspect.CompileError):
            raise result
        found[key] = [r for r in result if "pallas_attn" in r.name]
        assert len(found[key]) >= 3, [r.name for r in result]
    return found


@pytest.mark.sass
@needs_wheels
@pytest.mark.parametrize("dims", [((64, 64), (128, 128)), ((192, 128), (256, 256))], ids=str)
def test_default_tiles_spill_nothing_and_reach_wgmma_on_hopper(dims):
    for key, reports in compiled("h200", dims).items():
        for report in reports:
            assert report.spill_bytes == 0, (key, str(report))
            assert report.count("HGMMA") > 0, (key, str(report))
            assert report.count("HMMA") == 0, (key, str(report))


@pytest.mark.sass
@needs_wheels
def test_default_tiles_compile_for_ampere():
    spilled = {}
    for key, reports in compiled("a100", ((64, 64), (128, 128))).items():
        for report in reports:
            assert report.count("HMMA") > 0, (key, str(report))
            if report.spill_bytes:
                spilled[(*key, report.name)] = report.spill_bytes
    assert not spilled, spilled
