"""Every shipped tile configuration of the Hopper kernels lowers for CUDA, and compiles for sm_90a
with the ptxas of CUDA 13.0 and of 12.9: nothing spills in the loop over blocks, wgmma is not
serialised, TMA and wgmma are there, registers are traded. No GPU is needed."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn import _compile_only, _sass, backends, gpu, inspect
from pallas_attn.masks import as_mask
from pallas_attn.spec import Spec

BATCH, LENGTH, Q_HEADS, KV_HEADS = 2, 1024, 4, 2  # index arithmetic costs registers
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
PTXAS = ("13.0", "12.9")  # what jax[cuda13] and jax[cuda12] bring
FEW = 48  # bytes a thread may store and load again outside the loop over blocks
# Where the backward's are more. (128, 128) spills two words under documents, with ptxas 13.0 only,
# since JAX 0.12.1; with 0.12.0 it kept to the 48 bytes.
FEW_BACKWARD = {(64, 64): 112, (128, 128): 72, (256, 256): 64}

IDS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
PAIRS = jax.ShapeDtypeStruct((1, Q_HEADS, LENGTH, LENGTH), jnp.bool_)
MASKS = {
    "full": (lambda: None, ()),
    "causal": (pa.Causal, ()),
    "window": (lambda: pa.Causal() & pa.SlidingWindow(300), ()),
    "documents": (lambda ids: pa.Causal() & pa.Document(ids), (IDS,)),
    "dense": (pa.Dense, (PAIRS,)),
}


def operands(head_dim, v_dim, dtype=jnp.bfloat16, kv_heads=KV_HEADS):
    """The structs of q, k, v and of out's cotangent."""
    heads = (Q_HEADS, head_dim), (kv_heads, head_dim), (kv_heads, v_dim), (Q_HEADS, v_dim)
    return [jax.ShapeDtypeStruct((BATCH, LENGTH, *rest), dtype) for rest in heads]


def candidates(dims, name):
    """The shipped tiles for a mask, the default first."""
    q, k, v, _ = operands(*dims)
    mask_of, arrays = MASKS[name]
    mask = as_mask(mask_of(*(jnp.zeros(x.shape, x.dtype) for x in arrays)))
    with gpu.target("h200") as hopper:
        return backends.load("mosaic_gpu").candidate_tiles(Spec.of(q, k, v), mask, hopper)


def forward(mask_of, tiles, q, k, v, *arrays):
    return pa.mha(
        q, k, v, mask_of(*arrays), backend="mosaic_gpu", tiles=tiles, return_lse=True
    )  # fmt: skip


def gradients(mask_of, tiles, q, k, v, dout, *arrays, deterministic=False):
    def attend(q, k, v):
        return pa.mha(
            q, k, v, mask_of(*arrays),
            backend="mosaic_gpu", tiles=tiles, deterministic=deterministic,
        )  # fmt: skip

    out, vjp = jax.vjp(attend, q, k, v)
    return out, vjp(dout)


def forward_call(dims, name, tiles, dtype=jnp.bfloat16):
    mask_of, arrays = MASKS[name]
    q, k, v, _ = operands(*dims, dtype)
    return (functools.partial(forward, mask_of, tiles), q, k, v, *arrays)


def gradient_call(dims, name, tiles, dtype=jnp.bfloat16, kv_heads=KV_HEADS):
    mask_of, arrays = MASKS[name]
    call = functools.partial(gradients, mask_of, tiles)
    return (call, *operands(*dims, dtype, kv_heads), *arrays)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lowers_for_hopper(dims, name):
    first, *others = candidates(dims, name)
    text = inspect.lower(*gradient_call(dims, name, first, jnp.float16), target="h200")
    assert text.count("@mosaic_gpu") >= 2
    assert "xla.gpu.triton" not in text
    for tiles in others:
        assert "@mosaic_gpu" in inspect.lower(*forward_call(dims, name, tiles), target="h200")


@pytest.mark.parametrize("name", ["full", "documents"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)  # narrow and wide kernels
def test_turns_lower_for_hopper(dims, name):
    """What interpretation leaves out of the deterministic backward: waiting, and passing on."""
    call, *avals = gradient_call(dims, name, candidates(dims, name)[0])
    ordered = inspect.lower(functools.partial(call, deterministic=True), *avals, target="h200")
    assert ordered.count("@mosaic_gpu") >= 2
    assert ordered != inspect.lower(call, *avals, target="h200")


@pytest.fixture(scope="module")
def versions():
    """Those of `PTXAS` that are here, at least one ptxas."""
    try:
        _sass.find_tool("nvdisasm")
        _sass.find_tool("ptxas")
        _compile_only.check_plugin()
    except _sass.MissingToolsError as e:
        pytest.skip(str(e))
    found = []
    for version in PTXAS:
        with contextlib.suppress(_sass.MissingToolsError):
            found.append(_sass.find_tool("ptxas", version).version)
    return found or [_sass.find_tool("ptxas").version]


@pytest.fixture(scope="module", params=DIMS, ids=str)
def kernels(request, versions):
    """(what was compiled, the report of each of our kernels in it), each compiled once."""
    dims, calls = request.param, {}
    for name in sorted(
        MASKS.keys() - {"window"}
    ):  # a window's kernel is that of documents, less the ids
        first, *others = candidates(dims, name)
        calls[name, str(first)] = gradient_call(dims, name, first)
        for tiles in others:
            calls[name, str(tiles.fwd)] = forward_call(dims, name, tiles)
    if dims == (128, 128):
        # Registers fell differently where each query head has keys of its own.
        first = candidates(dims, "documents")[0]
        calls["ungrouped"] = gradient_call(dims, "documents", first, kv_heads=Q_HEADS)
    found = []
    results = inspect.report_many(
        list(calls.values()), target="h200", ptxas=versions, named="pallas_attn"
    )
    for key, result in zip(calls, results, strict=True):
        if isinstance(result, inspect.CompileError):
            raise AssertionError(f"{key}: {result}")
        ours = [report for report in result if report.backend != "xla"]
        assert {report.ptxas.version for report in ours} == set(versions)
        found += [(key, report) for report in ours]
    return found


def check(kernels, holds):
    faults = [f"{key}\n{report}" for key, report in kernels if not holds(report)]
    assert not faults, "\n\n".join(faults)


@pytest.mark.sass
def test_both_toolkits_are_here(versions):
    """Where the extra 'sass' is installed as pyproject.toml has it, neither ptxas is left out."""
    wheels = [tool for tool in _sass._tools("ptxas") if tool.source == "NVIDIA's wheel"]
    if not wheels:
        pytest.skip("ptxas is not from NVIDIA's wheels")
    assert len(versions) == len(PTXAS), versions


@pytest.mark.sass
def test_wgmma_and_tma_do_the_work(kernels):
    def holds(report):
        stores = report.count("UTMASTG") + report.count("UTMAREDG")
        return (
            report.backend == "mosaic_gpu"
            and min(report.count("HGMMA"), report.count("UTMALDG"), stores) > 0
            and report.count("HMMA") == 0
        )

    check(kernels, holds)


@pytest.mark.sass
def test_nothing_spills_in_the_loop_and_little_outside(kernels, request):
    few_backward = FEW_BACKWARD.get(request.node.callspec.params["kernels"], FEW)

    def holds(report):
        few = few_backward if "bwd" in report.name else FEW
        return report.spills.in_hot_loops == 0 and report.spill_bytes <= few

    check(kernels, holds)


@pytest.mark.sass
def test_wgmma_is_not_serialised_and_registers_are_traded(kernels):
    def holds(report):
        trades = {kind for kind, _ in report.setmaxnreg}
        return not report.faults and trades == {"dec", "inc"} and report.count("USETMAXREG") >= 2

    check(kernels, holds)


@pytest.mark.sass
def test_a_block_fits_a_multiprocessor(kernels):
    limit = gpu.KNOWN["h200"].smem_per_block
    check(kernels, lambda report: report.smem <= limit and report.occupancy.ctas_per_sm >= 1)
