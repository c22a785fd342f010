"""What the inspector reads from ptxas, PTX and SASS, and reports of kernels with known traits."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_attn import _compile_only, _sass, inspect, tiles

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    24 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 49152 bytes smem
ptxas info    : Compile time = 1.616 ms
ptxas warning : Registers are spilled to local memory in function 'first', 40 bytes spill stores
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'second'
ptxas warning : Value of threads per SM is out of range
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""

PTX = """\
.version 9.0
.target sm_90a
.visible .entry first(
    .param .u64 first_param_0
)
.reqntid 128, 2, 1
{
    ret;
}
.visible .entry second(
    .param .u64 second_param_0
)
.maxntid 384
{
    setmaxnreg.dec.sync.aligned.u32 40;
    setmaxnreg.inc.sync.aligned.u32 232;
    setmaxnreg.inc.sync.aligned.u32 232;
    ret;
}
"""

SASS = """\
\t.section\t.text.first,"ax",@progbits
        .type           first,@function
first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R4], desc[UR10][R2.64] ;
        /*0020*/              @P1  LDG.E.128 R32, desc[UR10][R2.64] ;
        /*0030*/                   HFMA2.MMA.BF16_V2 R3, R4, R5, R6 ;
        /*0040*/                   MUFU.EX2 R7, R7 ;
        /*0050*/                   MUFU.RCP R7, R7 ;
.L_x_0:
\t.section\t.text.second,"ax",@progbits
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0010*/             @!UP0 UTMALDG.4D [UR8], [UR6] ;
        /*10020*/                  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*10030*/                  EXIT ;
"""

THUNKS = """\
001: kCustomKernel [source       | next=002 (1)] first grid: [8, 2, 4] threads: [256, 1, 1]  \
shared_memory: 163840 bytes
002: kCustomCall [prev=001 (1) | sink] kCustomCall
"""


def test_ptxas_log_gives_the_usage_of_each_function():
    usage = _sass.parse_ptxas(PTXAS_LOG)
    assert usage == {
        "first": _sass.PtxasUsage(255, 24, 40, 44, 49152),
        "second": _sass.PtxasUsage(168, 0, 0, 0, 0),
    }


def test_ptxas_warnings_go_to_the_kernels_they_name():
    names = ["first", "second"]
    first = _sass.ptxas_warnings(PTXAS_LOG, "first", names)
    second = _sass.ptxas_warnings(PTXAS_LOG, "second", names)
    assert ["spilled" in line for line in first] == [True, False]
    assert "serialized" in second[0]
    assert first[1] == second[1] == "ptxas warning : Value of threads per SM is out of range"


def test_ptx_gives_threads_and_register_trades():
    assert _sass.parse_ptx(PTX) == [
        _sass.PtxEntry("first", 256, ()),
        _sass.PtxEntry("second", 384, (("dec", 40), ("inc", 232))),
    ]


def test_sass_is_counted_per_kernel_without_predicates():
    counts = _sass.parse_sass(SASS)
    assert counts["first"] == dict.fromkeys(
        ["LDC", "LDGSTS.E.BYPASS.128", "LDG.E.128", "HFMA2.MMA.BF16_V2", "MUFU.EX2", "MUFU.RCP"], 1
    )
    assert counts["second"]["UTMALDG.4D"] == 1
    assert sum(counts["second"].values()) == 4


def test_launch_lists():
    assert _sass.parse_thunks(THUNKS) == {"first": ((8, 2, 4), 163840)}
    passes = (
        "module attributes {mosaic_gpu.smem_bytes = 1024 : i64}\n"
        "%c4 = arith.constant 4 : index\n%c2 = arith.constant 2 : index\n"
        "gpu.launch blocks(%a, %b, %c) in (%x = %c4, %y = %c2, %z = %c2) threads(%d) {"
    )
    assert _sass.parse_mosaic_passes(passes) == ((4, 2, 2), 1024)
    assert _sass.parse_mosaic_passes("") == (None, 0)
    assert _sass.parse_xla_log("] Using /opt/cuda/bin/ptxas with version 13.0.88\n") == "13.0.88"
    assert _sass.parse_xla_log("") == ""


@pytest.mark.parametrize(
    ("capability", "usage", "expected"),
    [
        ((9, 0), (168, 384, 0), (1, "registers")),  # 5376 a warp: 12 fit, and 12 are in a block
        ((9, 0), (128, 128, 0), (4, "registers")),
        ((9, 0), (32, 128, 100_000), (2, "shared memory")),
        ((9, 0), (32, 1024, 0), (2, "registers and threads")),
        ((8, 9), (40, 256, 0), (6, "registers and threads")),
        ((8, 9), (16, 32, 0), (24, "blocks")),
        ((8, 0), (16, 32, 0), (32, "registers and blocks")),
        ((8, 0), (64, 1024, 0), (1, "registers")),
        ((9, 0), (255, 256, 163840), (1, "registers and shared memory")),
    ],
)
def test_occupancy(capability, usage, expected):
    assert _sass.occupancy(_sass.ARCHS[capability], *usage) == expected


def _kernel(name="first", usage=(255, 24, 40, 44, 0), sass=(("HGMMA.64x128x16.F32", 8),)):
    return inspect.KernelReport(
        name=name,
        backend="triton",
        arch="sm_90a",
        usage=_sass.PtxasUsage(*usage),
        setmaxnreg=(("inc", 232),),
        launch=inspect.Launch((8, 2, 1), 128, 1024),
        sass=dict(sass),
        ptxas=inspect.Ptxas("/opt/ptxas", "13.0.88", "", ("ptxas warning : spilled",)),
    )


def test_report_prints_and_counts():
    kernel = _kernel(sass=[("MUFU.EX2", 3), ("MUFU.RCP", 1), ("HGMMA.64x64x16.F32", 8), ("MUF", 1)])
    assert kernel.count("MUFU") == 4
    assert kernel.count("MUFU.EX2") == 3
    assert kernel.count("HGMMA") == 8
    assert kernel.spill_bytes == 84
    text = str(kernel)
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


@pytest.mark.sass
def test_spills_are_seen(on_h200):
    (kernel,) = on_h200[2]
    assert kernel.usage.spill_stores > 0
    assert kernel.usage.spill_loads > 0
    assert kernel.count("STL") > 0
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
    status = inspect.main([*call, "--fail-on-spill", "--require", "HGMMA", "--json", str(path)])
    assert status == 1
    said = capsys.readouterr()
    assert "FAIL spilling spills" in said.err
    assert "FAIL no kernel has HGMMA" in said.err
    assert "ptxas" in said.out
    assert json.loads(path.read_text())[0]["spill_bytes"] > 0


@pytest.mark.sass
def test_command_line_builds_the_attention_call(sass_tools, capsys):
    shape = ["--q", "bf16[2,256,4,64]", "--kv-heads", "2", "--mask", "causal&documents"]
    options = ["--backward", "--backend", "triton", "--fail-on-spill", "--json", "-"]
    assert inspect.main(shape + options) == 0
    kernels = json.loads(capsys.readouterr().out)
    assert {kernel["backend"] for kernel in kernels} == {"triton"}
    assert len(kernels) >= 3
