"""What is read from ptxas, PTX, SASS and the compilers' logs, and which tools are found."""

import pytest

from pallas_attn import _compile_only, _sass, _sass_loops

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
    counts = {name: _sass.count_opcodes(code) for name, code in _sass.split_sass(SASS).items()}
    assert counts["first"] == dict.fromkeys(
        ["LDC", "LDGSTS.E.BYPASS.128", "LDG.E.128", "HFMA2.MMA.BF16_V2", "MUFU.EX2", "MUFU.RCP"], 1
    )
    assert counts["second"]["UTMALDG.4D"] == 1
    assert sum(counts["second"].values()) == 4


THUNKS_0_12_1 = """\
000: kCopy  src=a.1 dst=b.2
001: kCustomKernel [source | sink] kernel=first, profile_annotation=custom-call.1, launch \
dimensions=blocks: {8, 2, 4}, threads/block: {256, 1, 1}, cluster_dim=nullopt, \
shmem_bytes=163840, use_pdl=true
"""


def test_launch_lists():
    expected = {"first": ((8, 2, 4), 163840)}
    assert _sass.parse_thunks(THUNKS) == _sass.parse_thunks(THUNKS_0_12_1) == expected
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


MOSAIC = """\
//
// Generated by LLVM NVPTX Back-End
//
.version 8.8
.visible .entry one_mosaic_gpu_kernel(
)
//
// Generated by LLVM NVPTX Back-End
//
.visible .entry two_mosaic_gpu_kernel(
)
; ModuleID = 'LLVMDialectModule'
define i32 @two_mosaic_gpu(ptr %0, ptr %1) {
  %9 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 %7, i32 1, i32 1, i32 0, i32 0, i32 0, \
i32 384, i32 1, i32 1, i32 1024, i32 0, ptr %1, ptr %8)
}
; ModuleID = 'LLVMDialectModule'
define void @one_mosaic_gpu(ptr %0, ptr %1) {
  call void @mosaic_gpu_build_kernel_spec(ptr %0, i32 64, i32 2, i32 1, i32 0, i32 0, i32 0, \
i32 384, i32 1, i32 1, i32 197728, i32 0, i32 5, ptr %692, ptr %702)
}
"""


def test_mosaic_output_gives_ptx_and_launches_by_name():
    kernels, launches = _sass.parse_mosaic(MOSAIC)
    assert ["one" in kernels[0], "two" in kernels[1]] == [True, True]
    assert not any("ModuleID" in kernel for kernel in kernels)
    assert launches == {
        "one_mosaic_gpu_kernel": ((64, 2, 1), 197728),
        "two_mosaic_gpu_kernel": (None, 1024),
    }
    assert _sass.parse_mosaic("") == ([], {})


def test_dropped_setmaxnreg_is_told():
    entry = _sass.PtxEntry("k", 384, (("dec", 24), ("inc", 240)))
    kept = (
        "/*0b40*/ USETMAXREG.DEALLOC.CTAPOOL 0x18 ;\n"
        "/*1bd0*/ USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;"
    )
    assert _sass.ignored_setmaxnreg(entry, kept) == ()
    lost = _sass.ignored_setmaxnreg(entry, kept.replace("0xf0", "0xa0"))
    assert lost == ("setmaxnreg.inc 240 is ignored: not in the SASS",)


# A loop over tiles (.outer) around one with a matmul (.inner), whose rare side (.far) lies behind
# the end; what is there spills in that loop, though only the jump back from it goes backwards.
LOOPS = """\
        /*0000*/                   STL [R1], R2 ;
.L_outer:
        /*0010*/                   LDL.64 R2, [R1+0x8] ;
.L_inner:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/               @P1 BRA `(.L_far) ;
.L_back:
        /*0040*/              @!P0 BRA `(.L_inner) ;
        /*0050*/                   STL.128 [R1+0x10], R4 ;
        /*0060*/                   BRA.U UP0, `(.L_outer) ;
        /*0070*/                   LDL R2, [R1] ;
        /*0080*/                   EXIT ;
.L_far:
        /*0090*/                   STL.U8 [R1+0x20], R4 ;
        /*00a0*/                   BRA `(.L_back) ;
.L_end:
        /*00b0*/                   BRA `(.L_end);
"""


def test_spills_by_the_loops_they_lie_in():
    graph = _sass_loops.graph_of(LOOPS)
    assert graph.edges[".L_back"] == (".L_inner", ".L_back+")
    assert graph.edges[".L_far"] == (".L_back",)
    loops = [loop for loop in _sass_loops.loops(graph) if loop != {".L_end"}]
    inner = {".L_inner", ".L_back", ".L_far"}
    assert loops == [inner | {".L_outer", ".L_back+"}, inner]
    assert _sass_loops.spills(graph) == _sass_loops.Spills(
        outside=4 + 4, in_loops=8 + 16 + 1, in_hot_loops=1
    )


def test_without_matmuls_every_loop_is_hot():
    graph = _sass_loops.graph_of(LOOPS.replace("HGMMA", "IMAD"))
    assert _sass_loops.spills(graph) == _sass_loops.Spills(8, 25, 25)


def fake_tool(folder, version):
    folder.mkdir(parents=True)
    (folder / "ptxas").write_text(f'#!/bin/sh\necho "release, V{version}"\n')
    (folder / "ptxas").chmod(0o755)
    return str(folder)


@pytest.fixture
def two_toolkits(tmp_path, monkeypatch):
    wheel = fake_tool(tmp_path / "wheel", "12.9.86")
    path = fake_tool(tmp_path / "path", "13.0.88")
    places = [(wheel, "NVIDIA's wheel"), ("", "PATH"), (path, "PATH")]
    monkeypatch.setattr(_sass, "_tool_places", lambda: places)
    return wheel, path


def test_tools_are_found_by_version_and_path(two_toolkits):
    wheel, path = two_toolkits
    assert _sass.find_tool("ptxas") == _sass.find_tool("ptxas", "12.9")
    assert _sass.find_tool("ptxas", "13").path == f"{path}/ptxas"
    assert _sass.find_tool("ptxas", wheel).version == "12.9.86"
    given = _sass.find_tool("ptxas", f"{wheel}/ptxas")
    assert (given.source, given.number) == ("given", (12, 9, 86))
    assert str(given) == f"ptxas 12.9.86 (given: {wheel}/ptxas)"
    with pytest.raises(_sass.MissingToolsError, match=r"version 13.1 .* only 12\.9\.86, 13\.0\.88"):
        _sass.find_tool("ptxas", "13.1")
    with pytest.raises(_sass.MissingToolsError, match="expected a ptxas or its folder"):
        _sass.find_tool("ptxas", "/no/such")
    with pytest.raises(_sass.MissingToolsError, match="nvdisasm: not found"):
        _sass.find_tool("nvdisasm")


def test_mosaic_takes_the_ptxas_on_path_before_the_wheels(two_toolkits, monkeypatch):
    assert _sass.ptxas_of_mosaic().version == "13.0.88"
    monkeypatch.setattr(_sass, "_tool_places", lambda: [(two_toolkits[0], "NVIDIA's wheel")])
    assert _sass.ptxas_of_mosaic().version == "12.9.86"
    monkeypatch.setattr(_sass, "_tool_places", lambda: [])
    assert _sass.ptxas_of_mosaic() is None


def test_no_process_compiles_a_mosaic_kernel_twice():
    one, two = (f'mosaic_gpu kernel_hash = "{name}"' for name in ('a\\"b', "c"))
    jobs = {"0": one, "1": "plain", "2": two, "3": one + two, "4": two, "5": one}
    assert _compile_only._groups(jobs) == [["0", "1", "2"], ["3"], ["4", "5"]]
    assert _compile_only._groups({"0": "mosaic_gpu", "1": "mosaic_gpu"}) == [["0"], ["1"]]
    assert _compile_only._groups({}) == []
