"""The inspector's reports, and what it reports of kernels with known traits."""

import contextlib
import json
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton

from pallas_attn import _compile_only, _sass, _sass_loops, inspect, tiles

SERIALIZED = (
    "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized "
    "due to insufficient register resources for the wgmma pipeline in the function 'first'"
)


def _kernel(
    name="first",
    usage=(255, 24, 40, 44, 0),
    sass=(("HGMMA.64x128x16.F32", 8),),
    spills=(80, 4, 0),
    warnings=("ptxas warning : spilled",),
):
    return inspect.KernelReport(
        name=name,
        backend="triton",
        arch="sm_90a",
        usage=_sass.PtxasUsage(*usage),
        spills=_sass_loops.Spills(*spills),
        setmaxnreg=(("inc", 232),),
        launch=inspect.Launch((8, 2, 1), 128, 1024),
        sass=dict(sass),
        ptxas=inspect.Ptxas("/opt/ptxas", "PATH", "13.0.88", "", tuple(warnings)),
    )


def test_report_prints_and_counts():
    kernel = _kernel(sass=[("MUFU.EX2", 3), ("MUFU.RCP", 1), ("HGMMA.64x64x16.F32", 8), ("MUF", 1)])
    assert kernel.count("MUFU") == 4
    assert kernel.count("MUFU.EX2") == 3
    assert kernel.count("HGMMA") == 8
    assert kernel.spill_bytes == 84
    text = str(kernel)
    assert "ptxas 13.0.88" in text
    assert "spills outside loops: 80 B; spills in loops: 4 B, of that in hot loops: 0 B" in text
    for part in ("registers 255", "inc 232", "grid 8x2x1", "HGMMA 8", "! ptxas warning : spilled"):
        assert part in text
    assert json.loads(json.dumps(kernel.as_dict()))["counts"]["MUFU.EX2"] == 3
    head, row = inspect.table([kernel]).splitlines()
    assert head.split()[:3] == ["kernel", "backend", "regs"]
    assert row.split()[:4] == ["first", "triton", "255", "84"]


def test_gates():
    clean = _kernel("clean", (100, 0, 0, 0, 0), sass=[("HMMA.16816.F32", 4)])
    assert inspect.failures([clean], fail_on_spill=True, require=["HMMA"]) == []
    assert inspect.failures([_kernel(), clean]) == []
    faults = inspect.failures([_kernel(), clean], fail_on_spill=True, require=["HGMMA", "UTMALDG"])
    assert faults == ["first spills 84 B per thread", "no kernel has UTMALDG"]


def test_check_is_about_what_no_tiles_make_good():
    assert inspect.failures([_kernel()], check=True) == []  # spills, in no hot loop
    hot = _kernel(spills=(0, 84, 80))
    assert inspect.failures([hot], check=True) == ["first: spills 80 B per thread in its hot loops"]
    assert "! spills 80 B per thread in its hot loops" in str(hot)
    serialized = _kernel(spills=(0, 0, 0), warnings=[SERIALIZED])
    assert inspect.failures([serialized], check=True) == [f"first: {SERIALIZED}"]
    assert inspect.failures([serialized]) == []
    assert serialized.as_dict()["faults"] == (SERIALIZED,)
    named = _kernel("wgmma_serializer", spills=(0, 0, 0))
    assert inspect.failures([named], check=True) == []


def test_missing_tools_name_the_extra(monkeypatch):
    monkeypatch.setattr(_sass, "_tool_places", lambda: [])
    with pytest.raises(_sass.MissingToolsError, match=r"ptxas.*pip install pallas_attn\[sass\]"):
        inspect.report(lambda x: x, jax.ShapeDtypeStruct((2,), "float32"))


def test_unknown_target():
    with pytest.raises(ValueError, match=r"target: got 'v100', expected one of \['a100'"):
        inspect.report(lambda x: x, *_pair(16), target="v100")


def test_missing_plugin_names_the_extra(monkeypatch):
    nothing = types.SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(_compile_only.importlib, "util", nothing)
    with pytest.raises(_sass.MissingToolsError, match=r"plugin.*pip install pallas_attn\[sass\]"):
        _compile_only.check_plugin()


def test_command_line_words():
    aval = inspect._aval("bf16[2,4096, 16,128]")
    assert (aval.shape, aval.dtype) == ((2, 4096, 16, 128), jnp.bfloat16)
    some = inspect._tiles("fwd=128x64,w8,s3 dq=64x32")
    assert some == {"fwd": tiles.KernelTiles(128, 64, 8, 3), "dq": tiles.KernelTiles(64, 32)}
    assert set(inspect._tiles("64x64,w4").values()) == {tiles.KernelTiles(64, 64, 4)}
    assert inspect._mask("full", ()) is None
    with pytest.raises(ValueError, match="mask: got 'diagonal'"):
        inspect._mask("causal&diagonal", ())
    with pytest.raises(SystemExit):
        inspect.main(["--q", "bf16(2,3)"])
    with pytest.raises(SystemExit):
        inspect.main([])


def _matmul(name, size, num_warps):
    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    return lambda x, y: pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size, size), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        name=name,
    )(x, y)


def _pair(size, depth=64):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((size, depth), (depth, size))]


TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _hopper(name, sums):
    """x [rows, depth] y [depth, 256], `sums` times over: one warpgroup loads, one multiplies."""

    def multiply(steps, x, y, full, empty, *accs):
        @pl.loop(0, steps)
        def _(i):
            plgpu.barrier_wait(full)
            for acc in accs:
                plgpu.wgmma(acc, x, y)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty)

        return sum(acc[...] for acc in accs).astype(jnp.bfloat16)

    def kernel(x, y, out, x_smem, y_smem, out_smem, full, empty):
        steps = x.shape[1] // 64
        rows = pl.ds(lax.axis_index("row") * 64, 64)

        @pl.when(lax.axis_index("wg") == 1)
        def _load():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, steps)
            def _(i):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(empty))
                part = pl.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(x.at[rows, part], x_smem, full)
                plgpu.copy_gmem_to_smem(y.at[part], y_smem, full)

        @pl.when(lax.axis_index("wg") == 0)
        def _multiply():
            plgpu.set_max_registers(240, action="increase")
            accs = [plgpu.ACC((64, 256), jnp.float32)] * sums
            out_smem[...] = pl.run_scoped(
                lambda *accs: multiply(steps, x_smem, y_smem, full, empty, *accs), *accs
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out.at[rows])
            plgpu.wait_smem_to_gmem(0)

    def smem(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILE)

    return lambda x, y: plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], 256), jnp.bfloat16),
        scratch_types=(
            *(smem(64, 64), smem(64, 256), smem(64, 256)),
            *(plgpu.Barrier(num_arrivals=2), plgpu.Barrier()),
        ),
        grid=(x.shape[0] // 64,),
        grid_names=("row",),
        num_threads=2,
        thread_name="wg",
        kernel_name=name,
    )(x, y)


def _tall(rows, depth=512):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, depth), (depth, 256))]


def spilling(x, y):
    """One warp holds 128 x 128 float32 sums: 512 registers a thread, twice what there are."""
    return _matmul("spilling", 128, num_warps=1)(x, y)


@pytest.fixture(scope="module")
def sass_tools():
    try:
        for tool in ("ptxas", "nvdisasm"):
            _sass.find_tool(tool)
        _compile_only.check_plugin()
    except _sass.MissingToolsError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def on_h200(sass_tools):
    """One child process for everything that is compiled for an H200."""
    calls = [
        (_matmul("good", 128, num_warps=4), *_pair(128)),
        (_matmul("too_large", 512, num_warps=8), *_pair(512, 256)),
        (spilling, *_pair(128, 16)),
        (lambda x, y: undefined_name, *_pair(16)),  # noqa: F821
        (lambda x, y: jnp.sin(x), *_pair(16)),
    ]
    return inspect.report_many(calls, target="h200")


@pytest.mark.sass
def test_hopper_uses_wgmma(on_h200):
    (kernel,) = on_h200[0]
    assert (kernel.name, kernel.backend, kernel.arch) == ("good", "triton", "sm_90a")
    assert kernel.count("HGMMA") > 0
    assert kernel.spill_bytes == kernel.count("LDL") == kernel.count("STL") == 0
    assert 32 < kernel.registers < 256
    assert kernel.launch.threads == 128
    assert kernel.launch.grid == (1, 1, 1)
    assert kernel.smem >= 2 * 128 * 64 * 2
    assert kernel.ptxas.version == kernel.ptxas.xla_version
    assert kernel.ptxas.warnings == ()  # so XLA's own ptxas gave the same numbers


def ptxas_versions():
    """The two that JAX's CUDA wheels bring, as far as they are here."""
    found = []
    for version in ("13.0", "12.9"):
        with contextlib.suppress(_sass.MissingToolsError):
            found.append(_sass.find_tool("ptxas", version).version)
    return found


@pytest.fixture(scope="module")
def mosaic_on_h200(sass_tools):
    """Reports of Mosaic GPU kernels by ptxas; the third is the first again."""
    good = _hopper("good", 1)
    calls = [
        (good, *_tall(192)),
        (_hopper("serialized", 2), *_tall(128)),
        (good, *_tall(192)),
    ]
    versions = ptxas_versions()
    results = inspect.report_many(calls, ptxas=versions or None)
    for result in results:
        assert [k.ptxas.version for k in result] == (versions or [result[0].ptxas.version])
    return results


@pytest.mark.sass
def test_mosaic_kernels_are_told_in_full(mosaic_on_h200):
    for kernel in mosaic_on_h200[0]:
        assert kernel.name.startswith("good")
        assert (kernel.backend, kernel.arch) == ("mosaic_gpu", "sm_90a")
        assert kernel.setmaxnreg == (("dec", 24), ("inc", 240))
        assert kernel.count("USETMAXREG") == 2
        assert min(kernel.count(op) for op in ("HGMMA", "UTMALDG", "UTMASTG")) > 0
        assert kernel.launch.grid == (3, 1, 1)
        assert kernel.launch.threads == 256
        assert kernel.launch.dynamic_smem >= 2 * 64 * (64 + 256 + 256)
        assert kernel.occupancy.ctas_per_sm == 1
        assert kernel.spill_bytes == kernel.spills.in_loops == kernel.spills.outside == 0
        assert kernel.faults == kernel.ptxas.warnings == ()
        assert kernel.ptxas.source in ("NVIDIA's wheel", "PATH", "CUDA_HOME", "CUDA toolkit")


@pytest.mark.sass
def test_serialized_wgmma_and_spills_in_the_loop_are_faults(mosaic_on_h200):
    """Twice 256 sums a thread of 240 registers: they spill where they are added up."""
    for kernel in mosaic_on_h200[1]:
        serialized, hot = sorted(kernel.faults, key=lambda fault: fault.startswith("spills"))
        assert "wgmma.mma_async instructions are serialized" in serialized
        assert hot.startswith("spills")
        at = kernel.spills
        assert at.outside + at.in_loops == kernel.spill_bytes > at.in_hot_loops > 0


@pytest.mark.sass
def test_a_mosaic_kernel_met_before_is_reported_again(mosaic_on_h200):
    assert mosaic_on_h200[2] == mosaic_on_h200[0]


@pytest.mark.sass
def test_spills_are_seen(on_h200):
    (kernel,) = on_h200[2]
    assert kernel.usage.spill_stores > 0
    assert kernel.usage.spill_loads > 0
    assert kernel.count("STL") > 0
    assert kernel.spills.outside + kernel.spills.in_loops == kernel.spill_bytes
    assert any("spilled" in warning for warning in kernel.ptxas.warnings)


@pytest.mark.sass
def test_a_call_that_fails_stops_no_other(on_h200):
    assert isinstance(on_h200[1], inspect.CompileError)
    assert "hared memory" in str(on_h200[1])
    assert isinstance(on_h200[3], inspect.CompileError)
    assert isinstance(on_h200[3].__cause__, NameError)
    assert [kernel.backend for kernel in on_h200[4]] == ["xla"]


@pytest.mark.sass
@pytest.mark.parametrize("target", ["a100", "l4"])
def test_ampere_and_ada_use_mma_sync(sass_tools, target):
    (kernel,) = inspect.report(_matmul("good", 64, num_warps=4), *_pair(64), target=target)
    assert kernel.arch == {"a100": "sm_80", "l4": "sm_89"}[target]
    assert kernel.count("HMMA") > 0
    assert kernel.count("HGMMA") == 0


@pytest.mark.sass
def test_a_compiler_that_dies_is_an_error(sass_tools, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(inspect.CompileError, match="compiler ended with status"):
        inspect.report(lambda x, y: x + 1, *_pair(16))


@pytest.mark.sass
def test_command_line_gates(sass_tools, capsys, tmp_path):
    path = tmp_path / "report.json"
    call = ["--call", f"{__name__}:spilling", "--arg", "bf16[128,16]", "--arg", "bf16[16,128]"]
    status = inspect.main(
        [*call, "--fail-on-spill", "--check", "--require", "HGMMA", "--json", str(path)]
    )
    assert status == 1
    said = capsys.readouterr()
    assert "FAIL spilling spills" in said.err
    assert "FAIL no kernel has HGMMA" in said.err
    assert "ptxas" in said.out
    assert json.loads(path.read_text())[0]["spill_bytes"] > 0


@pytest.mark.sass
def test_command_line_builds_the_attention_call(sass_tools, capsys):
    shape = ["--q", "bf16[2,256,4,64]", "--kv-heads", "2", "--mask", "causal&documents"]
    options = ["--backward", "--backend", "triton", "--fail-on-spill", "--check", "--json", "-"]
    assert inspect.main(shape + options) == 0
    kernels = json.loads(capsys.readouterr().out)
    assert {kernel["backend"] for kernel in kernels} == {"triton"}
    assert len(kernels) >= 3


@pytest.mark.sass
def test_only_kernels_of_a_name_are_read(sass_tools):
    call, x, y = _matmul("good", 64, num_warps=4), *_pair(64)
    named = inspect.report(lambda x, y: jnp.sin(call(x, y)).sum(), x, y, named="goo")
    assert [kernel.name for kernel in named] == ["good"]
    assert inspect.report(lambda x, y: jnp.sin(x), x, y, named="goo") == []
