"""Compiles a function for an NVIDIA GPU that is not there, and reports what ptxas made of it.

    python -m pallas_attn.inspect --q bf16[2,4096,16,128] --kv-heads 4 --mask causal --backward

The function is traced and lowered here; a child process compiles the result with XLA's real GPU
compiler through the compile-only CUDA plugin; ptxas and nvdisasm then run on the PTX it leaves. No
GPU, no driver and no cuDNN are needed. What is reported are registers, spills, shared memory,
occupancy and instruction counts: nothing about speed, nor about right results.

Traps: the numbers are those of one ptxas, named in every report; `--ptxas` takes another. On a GPU
machine XLA may take another one (NVIDIA's wheels first; for Mosaic kernels PATH and /usr/local/cuda
first) or link nvJitLink instead. Kernels that are to be told apart need names of their own.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import operator
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_attn as pa
from pallas_attn import _compile_only, _sass, backends
from pallas_attn import gpu as gpus
from pallas_attn._kernel_report import KernelReport, Launch, Occupancy, Ptxas, table
from pallas_attn.masks import as_mask
from pallas_attn.spec import Spec
from pallas_attn.tiles import KernelTiles

__all__ = [
    "CompileError",
    "KernelReport",
    "Launch",
    "Occupancy",
    "Ptxas",
    "failures",
    "lower",
    "main",
    "report",
    "report_many",
    "table",
]


class CompileError(RuntimeError):
    """XLA, Triton or ptxas refused the function, or the compiler died."""


def report(
    fn: Callable,
    *avals,
    target: str = "h200",
    ptxas: str | Sequence[str] | None = None,
    named: str = "",
) -> list[KernelReport]:
    """Compiles `fn(*avals)` for a GPU that need not be here.

    Args:
        fn: any function that `jax.jit` takes; for a backward pass, one that calls `jax.vjp`.
        *avals: its arguments, as arrays, `jax.ShapeDtypeStruct`s or trees of them.
        target: a key of `pallas_attn.gpu.KNOWN`.
        ptxas: the version to compile with, such as "12.9", or a path; default the first found. Of
            several the oldest compiles, and each assembles the PTX.
        named: what the names of the kernels to report contain; default all. To read one takes 0.3 s
            for each ptxas, and a call may bring tens of XLA's own.

    Returns:
        A report for each such kernel, Pallas' and XLA's, in the order of launch where XLA tells it;
        all of them for each ptxas in turn.

    Raises:
        MissingToolsError: when the compile-only CUDA wheels, or that ptxas, are not installed.
        CompileError: when the compiler refuses the function; tracing errors come as they are.
    """
    result = report_many([(fn, *avals)], target=target, ptxas=ptxas, named=named)[0]
    if isinstance(result, CompileError):
        raise result.__cause__ or result
    return result


def report_many(
    calls: Sequence[tuple],
    target: str = "h200",
    ptxas: str | Sequence[str] | None = None,
    named: str = "",
) -> list[list[KernelReport] | CompileError]:
    """Compiles several calls in one child process, as `report` does one; made for tile sweeps.

    Args:
        calls: (fn, *avals) tuples.
        target: a key of `pallas_attn.gpu.KNOWN`.
        ptxas: as for `report`.
        named: as for `report`.

    Returns:
        For each call its reports, or the error that stopped it: a failed call is a result too.

    Raises:
        MissingToolsError: when the compile-only CUDA wheels, or that ptxas, are not installed.
        ValueError: for an unknown target.
    """
    with gpus.target(target) as gpu:  # refuses unknown names
        wanted = [ptxas] if ptxas is None or isinstance(ptxas, str) else ptxas
        tools = [_sass.find_tool("ptxas", one) for one in wanted]
        nvdisasm = _sass.find_tool("nvdisasm")
    # PTX is written in the form that this one knows, and newer ones know too.
    oldest = min(tools, key=lambda tool: tool.number)
    _compile_only.check_plugin()
    modules = [_try_lower(call, target) for call in calls]
    with tempfile.TemporaryDirectory(prefix="pallas_attn_inspect_") as folder:
        root = pathlib.Path(folder)
        jobs = {str(i): m for i, m in enumerate(modules) if isinstance(m, str)}
        _compile_only.compile_all(root, jobs, gpu, ptxas=oldest.path)

        def collect(i: int) -> list[KernelReport] | CompileError:
            module, reports = modules[i], []
            if isinstance(module, CompileError):
                return module
            for tool in tools:
                read = tool, nvdisasm, tool == oldest
                found = _collect(root / str(i), module, gpu, read, named)
                if isinstance(found, CompileError):
                    return found
                reports += found
            return reports

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(collect, range(len(modules))))


def lower(fn: Callable, *avals, target: str = "h200") -> str:
    """Traces and lowers `fn(*avals)` for `target`, which needs no CUDA wheel; returns StableHLO."""
    with gpus.target(target) as gpu:
        device = AbstractDevice(device_kind=gpu.name, num_cores=gpu.sms, platform="gpu")
        mesh = AbstractMesh((1,), ("inspect",), abstract_device=device)
        # Custom partitioning lowers only where some device is assigned; which one leaves no mark.
        place = jax.sharding.make_single_device_sharding(jax.devices()[0])
        with jax.sharding.use_abstract_mesh(mesh):
            # A function of its own, so that no trace made for another device is found again.
            jitted = jax.jit(lambda *args: fn(*args), in_shardings=place, out_shardings=place)
            return jitted.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def _try_lower(call: tuple, target: str) -> str | CompileError:
    fn, *avals = call
    try:
        return lower(fn, *avals, target=target)
    except Exception as e:  # a call that cannot be lowered is that call's result
        error = CompileError(f"{type(e).__name__}: {e}")
        error.__cause__ = e
        return error


def _collect(
    folder: pathlib.Path,
    module: str,
    gpu: gpus.Gpu,
    tools: tuple[_sass.Tool, _sass.Tool, bool],
    named: str,
) -> list[KernelReport] | CompileError:
    """Reads what the compiler left of one job, as far as kernels have such a name.

    `tools` are ptxas, nvdisasm, and whether it is this ptxas that XLA ran.
    """
    ptxas, nvdisasm, compiles = tools
    if error := json.loads((folder / "status.json").read_text())["error"]:
        return CompileError(error)
    arch = _sass.ARCHS[gpu.compute_capability].name
    pallas_names = {
        found[1]
        for line in module.splitlines()
        if "@__gpu$xla.gpu.triton" in line and (found := re.search(r'\bname = "([^"]+)"', line))
    }
    thunks = {}
    for path in folder.glob("*.thunk_sequence.txt"):
        thunks |= _sass.parse_thunks(path.read_text())
    log = folder / "xla.log"
    xla_log = log.read_text() if log.exists() and compiles else ""
    kernels, mosaic = _sass.parse_mosaic((folder / "mosaic.out").read_text(errors="replace"))
    for i, text in enumerate(kernels):
        (folder / f"zz_mosaic_{i}.ptx").write_text(text)
    files = sorted(folder.glob("*.ptx"))
    reports = []
    for ptx in files:
        if not any(named in entry.name for entry in _sass.parse_ptx(ptx.read_text())):
            continue
        compiled = _sass.assemble(ptx, arch, ptxas, nvdisasm)
        if compiled.error:
            return CompileError(f"{ptxas}: {compiled.error}")
        for entry in compiled.entries:
            # XLA tells kernels of one name apart by a suffix.
            triton = re.sub(r"__\d+$", "", entry.name) in pallas_names
            hopper = ptx.name.startswith("zz_mosaic_")
            backend = "mosaic_gpu" if hopper else "triton" if triton else "xla"
            grid, smem = (mosaic if hopper else thunks).get(entry.name, (None, 0))
            reports.append(
                KernelReport(
                    name=entry.name,
                    backend=backend,
                    arch=arch,
                    usage=_sass.parse_ptxas(compiled.log)[entry.name],
                    spills=compiled.functions[entry.name].spills,
                    setmaxnreg=entry.setmaxnreg,
                    launch=Launch(grid, entry.threads, smem),
                    sass=compiled.functions[entry.name].sass,
                    ptxas=_ptxas(compiled, entry.name, ptxas, xla_log),
                )
            )
    launched = list(thunks)
    return sorted(
        reports, key=lambda k: launched.index(k.name) if k.name in thunks else len(launched)
    )


def _ptxas(compiled: _sass.Compiled, kernel: str, tool: _sass.Tool, xla_log: str) -> Ptxas:
    warnings = compiled.functions[kernel].warnings
    ours = _sass.parse_ptxas(compiled.log)[kernel]
    theirs = _sass.parse_ptxas(xla_log).get(kernel, ours)
    if theirs != ours:
        warnings += (f"XLA's own run of ptxas gave {theirs}, this one {ours}",)
    xla_version = _sass.parse_xla_log(xla_log)
    if xla_log and xla_version not in ("", tool.version):
        warnings += (f"XLA took ptxas {xla_version}, this report {tool.version}",)
    return Ptxas(tool.path, tool.source, tool.version, xla_version, warnings)


_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "i32": "int32", "bool": "bool"}


def _aval(text: str) -> jax.ShapeDtypeStruct:
    """Reads "bf16[2,4096,16,128]"."""
    found = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text)
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected for example bf16[2,4096,16,128]")
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    return jax.ShapeDtypeStruct(shape, _DTYPES.get(found[1], found[1]))


def _tiles(text: str) -> dict[str, KernelTiles]:
    """Reads "128x64,w8,s3" for all kernels, or "fwd=128x64,w8,s3 dq=64x64,w4,s2" for some."""
    tiles = {}
    for part in text.split():
        found = re.fullmatch(r"(?:(fwd|dq|dkv)=)?(\d+)x(\d+)(?:,w(\d+))?(?:,s(\d+))?", part)
        if not found:
            raise argparse.ArgumentTypeError(f"got {part!r}, expected for example fwd=128x64,w8,s3")
        kernels = (found[1],) if found[1] else ("fwd", "dq", "dkv")
        sizes = ("block_q", "block_kv", "num_warps", "num_stages")
        given = {k: int(x) for k, x in zip(sizes, found.groups()[1:], strict=True) if x}
        tiles |= dict.fromkeys(kernels, KernelTiles(**given))
    return tiles


def _mask(text: str, segment_ids):
    """Reads "full", "causal", "window:LEFT[,RIGHT]", "documents", joined by "&"."""
    parts: list[pa.Mask] = []
    for part in text.split("&"):
        name, _, sizes = part.strip().partition(":")
        if name == "full":
            continue
        if name == "causal":
            parts.append(pa.Causal())
        elif name == "window" and re.fullmatch(r"\d+(,\d+)?", sizes):
            left, *right = map(int, sizes.split(","))
            parts.append(pa.SlidingWindow(left, right[0] if right else 0))
        elif name == "documents":
            parts.append(pa.Document(*segment_ids))
        else:
            raise ValueError(
                f"mask: got {part!r}, expected full, causal, window:LEFT[,RIGHT] or documents"
            )
    return functools.reduce(operator.and_, parts) if parts else None


def _mha_call(args: argparse.Namespace) -> tuple:
    """The call that the command line describes, as (fn, *avals)."""
    batch, q_len, q_heads, head_dim = args.q.shape
    kv_len, kv_heads = args.kv_len or q_len, args.kv_heads or q_heads
    dtype, v_dim = args.q.dtype, args.v_dim or head_dim
    k = jax.ShapeDtypeStruct((batch, kv_len, kv_heads, head_dim), dtype)
    v = jax.ShapeDtypeStruct((batch, kv_len, kv_heads, v_dim), dtype)
    dout = jax.ShapeDtypeStruct((batch, q_len, q_heads, v_dim), dtype)
    lens = dict.fromkeys((q_len, kv_len)) if "documents" in args.mask else ()
    ids = [jax.ShapeDtypeStruct((batch, length), "int32") for length in lens]

    def forward(q, k, v, *ids):
        mask = _mask(args.mask, ids)
        spec = Spec.of(q, k, v, soft_cap=args.soft_cap)
        backend = backends.choose(spec, as_mask(mask), args.backend)
        default = backends.load(backend).candidate_tiles(spec, as_mask(mask), gpus.detect())[0]
        tiles = dataclasses.replace(default, **args.tiles)
        return pa.mha(q, k, v, mask, soft_cap=args.soft_cap, backend=backend, tiles=tiles)

    def backward(q, k, v, dout, *ids):
        return jax.vjp(lambda q, k, v: forward(q, k, v, *ids), q, k, v)[1](dout)

    if args.backward:
        return (backward, args.q, k, v, dout, *ids)
    return (forward, args.q, k, v, *ids)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_attn.inspect",
        description="Compile an attention call for a GPU without having one, report its kernels.",
    )
    add = parser.add_argument
    add("--q", type=_aval, metavar="DTYPE[BATCH,LEN,HEADS,DIM]", help="shape of q")
    add("--kv-heads", type=int, help="default: q's")
    add("--kv-len", type=int, help="default: q's")
    add("--v-dim", type=int, help="default: head_dim")
    add("--mask", default="full", help='full, causal, window:LEFT[,RIGHT], documents; "&" joins')
    add("--soft-cap", type=float)
    add("--backend", help="default: the one that the call would take on the target")
    add(
        "--tiles",
        type=_tiles,
        default={},
        help='"fwd=128x64,w8,s3 dq=64x64,w4,s2"; w warps, s stages',
    )
    add("--backward", action="store_true", help="compile the gradient too")
    add("--call", metavar="MODULE:FUNCTION", help="compile this function of --arg instead")
    add("--arg", type=_aval, action="append", default=[], metavar="DTYPE[SHAPE]")
    add("--target", default="h200", choices=sorted(gpus.KNOWN))
    add("--all", action="store_true", help="show the kernels that XLA adds, too")
    add("--json", metavar="FILE", help='write the report as JSON; "-" writes only that, to stdout')
    add(
        "--ptxas",
        action="append",
        metavar="VERSION|PATH",
        help='default: the first found; "12.9" is that of jax[cuda12]; may be given several times',
    )
    add("--fail-on-spill", action="store_true", help="exit with 1 if a shown kernel spills")
    add(
        "--check",
        action="store_true",
        help="exit with 1 if a shown kernel's wgmma is serialized, its setmaxnreg ignored, "
        "or if it spills in its hot loops",
    )
    add("--require", action="append", default=[], metavar="OPCODE", help="exit with 1 without it")
    return parser


def failures(
    reports: Sequence[KernelReport],
    fail_on_spill: bool = False,
    require: Sequence[str] = (),
    check: bool = False,
) -> list[str]:
    """What a gate holds against the reports.

    Args:
        reports: from `report`.
        fail_on_spill: whether spilled registers are a fault.
        require: opcodes such as "HGMMA" that some kernel must have.
        check: whether a kernel's `faults` are some.

    Returns:
        A sentence for each fault; empty when there is none.
    """
    spilling = [k for k in reports if k.spill_bytes] if fail_on_spill else []
    missing = [op for op in require if not any(k.count(op) for k in reports)]
    return [
        *(f"{k.name} spills {k.spill_bytes} B per thread" for k in spilling),
        *(f"{k.name}: {fault}" for k in reports if check for fault in k.faults),
        *(f"no kernel has {op}" for op in missing),
    ]


def _spoke(reports: Sequence[KernelReport]) -> str:
    """Which ptxas a report is of, and which one Mosaic kernels get here where that is another."""
    text = ", ".join(
        sorted({f"ptxas {k.ptxas.version} ({k.ptxas.source}: {k.ptxas.path})" for k in reports})
    )
    theirs = _sass.ptxas_of_mosaic()
    spoken = {k.ptxas.version for k in reports if k.backend == "mosaic_gpu"}
    if theirs and spoken - {theirs.version}:
        text += f"\n! run on this machine, JAX gives its Mosaic kernels to {theirs}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, or 1 when a gate fails or the call does not compile."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.q is None) == (args.call is None):
        parser.error("give --q, or --call with --arg")
    if args.call:
        module, _, name = args.call.partition(":")
        call = (getattr(importlib.import_module(module), name), *args.arg)
    else:
        call = _mha_call(args)
    try:
        found = report(*call, target=args.target, ptxas=args.ptxas)
    except (CompileError, _sass.MissingToolsError, NotImplementedError, ValueError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    shown = [k for k in found if args.all or k.backend != "xla"] or found
    if args.json:
        text = json.dumps([k.as_dict() for k in shown], indent=1)
        print(text) if args.json == "-" else pathlib.Path(args.json).write_text(text + "\n")
    if args.json != "-":
        print(f"jax {jax.__version__}, target {args.target}, {_spoke(found)}\n")
        print("\n".join(map(str, shown)), table(shown), sep="\n\n")
        if len(shown) < len(found):
            print(f"\nand {len(found) - len(shown)} kernels of XLA's own (--all shows them)")
    faults = failures(shown, args.fail_on_spill, args.require, args.check)
    for fault in faults:
        print(f"FAIL {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
