"""Compiles a function for an NVIDIA GPU that is not there, and reports what ptxas made of it.

    python -m pallas_attn.inspect --q bf16[2,4096,16,128] --kv-heads 4 --mask causal --backward

The function is traced and lowered here; a child process compiles the result with XLA's real GPU
compiler through the compile-only CUDA plugin; ptxas and nvdisasm then run on the PTX it leaves. No
GPU, no driver and no cuDNN are needed. What is reported are registers, spills, shared memory,
occupancy and instruction counts: nothing about speed, nor about right results.

Traps: the numbers are those of one ptxas, named in every report. On a GPU machine XLA may take
another one (it looks in NVIDIA's wheels, then on PATH) or link nvJitLink instead. Kernels that are
to be told apart need names of their own.
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
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

import pallas_attn as pa
from pallas_attn import _compile_only, _sass, backends
from pallas_attn import gpu as gpus
from pallas_attn.masks import as_mask
from pallas_attn.spec import Spec
from pallas_attn.tiles import KernelTiles

# Opcodes worth a place in a printed report, in that order.
# fmt: off
_SHOWN = (
    "HGMMA", "QGMMA", "HMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDGSTS", "LDG", "STG", "RED",
    "ATOMG", "LDSM", "STSM", "LDS", "STS", "LDL", "STL", "MUFU.EX2", "FFMA", "FMUL", "FADD",
    "FMNMX", "SHFL", "BAR", "SYNCS", "WARPGROUP", "USETMAXREG",
)
# fmt: on


class CompileError(RuntimeError):
    """XLA, Triton or ptxas refused the function, or the compiler died."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched: thread blocks, threads of each, bytes of dynamic shared memory.

    `grid` is None where the compiler does not tell.
    """

    grid: tuple[int, ...] | None
    threads: int
    dynamic_smem: int


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Thread blocks per multiprocessor, and what stops the next one."""

    ctas_per_sm: int
    limited_by: str


@dataclasses.dataclass(frozen=True)
class Ptxas:
    """Which ptxas spoke, what it warned of, and the version that XLA itself ran.

    `xla_version` is "" where XLA's log does not tell.
    """

    path: str
    version: str
    xla_version: str
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What became of one kernel.

    Attributes:
        name: the kernel's name in the PTX.
        backend: "triton" or "mosaic_gpu" for Pallas kernels, "xla" for what XLA adds.
        arch: such as "sm_90a".
        usage: registers per thread; stack, spills and static shared memory in bytes.
        setmaxnreg: ("inc" | "dec", registers) pairs by which warpgroups trade registers.
        launch: grid, threads, dynamic shared memory.
        sass: opcode with modifiers -> count; `count` sums over modifiers.
        ptxas: the assembler and its warnings.
    """

    name: str
    backend: str
    arch: str
    usage: _sass.PtxasUsage
    setmaxnreg: tuple[tuple[str, int], ...]
    launch: Launch
    sass: dict[str, int]
    ptxas: Ptxas

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.usage.registers

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and spill loads of one thread's code; 0 is what one wants."""
        return self.usage.spill_stores + self.usage.spill_loads

    @property
    def smem(self) -> int:
        """Bytes of shared memory per thread block, static and dynamic."""
        return self.usage.static_smem + self.launch.dynamic_smem

    @property
    def occupancy(self) -> Occupancy:
        """How many thread blocks of this kernel one multiprocessor holds."""
        arch = next(arch for arch in _sass.ARCHS.values() if arch.name == self.arch)
        return Occupancy(*_sass.occupancy(arch, self.registers, self.launch.threads, self.smem))

    def count(self, opcode: str) -> int:
        """How many instructions are `opcode`, with any further modifiers ("HGMMA", "MUFU.EX2")."""
        return sum(n for op, n in self.sass.items() if f"{op}.".startswith(f"{opcode}."))

    def as_dict(self) -> dict:
        """All of it as JSON types, with the derived numbers, and counts by opcode family."""
        families = {op.split(".")[0] for op in self.sass} | {"MUFU.EX2"}
        return dataclasses.asdict(self) | {
            "spill_bytes": self.spill_bytes,
            "smem": self.smem,
            "occupancy": dataclasses.asdict(self.occupancy),
            "counts": {op: self.count(op) for op in sorted(families)},
        }

    def __str__(self):
        use, launch, fit = self.usage, self.launch, self.occupancy
        trade = ", ".join(f"{kind} {n}" for kind, n in self.setmaxnreg)
        grid = "unknown" if launch.grid is None else "x".join(map(str, launch.grid))
        counts = ", ".join(f"{op} {n}" for op in _SHOWN if (n := self.count(op)))
        mma = ", ".join(f"{op} x{n}" for op, n in self.sass.items() if re.match("[A-Z]*MMA", op))
        lines = [
            f"{self.name}  [{self.backend}, {self.arch}]",
            f"  registers {use.registers}"
            + (f" (setmaxnreg {trade})" if trade else "")
            + f"; spill stores {use.spill_stores} B, loads {use.spill_loads} B"
            + f"; stack {use.stack} B",
            f"  grid {grid}; {launch.threads} threads; shared memory {self.smem} B "
            f"(static {use.static_smem}, dynamic {launch.dynamic_smem}); "
            f"{fit.ctas_per_sm} CTA/SM (limit: {fit.limited_by})",
            f"  {sum(self.sass.values())} instructions: {counts}",
        ]
        lines += [f"  {mma}"] if mma else []
        return "\n".join(lines + [f"  ! {warning}" for warning in self.ptxas.warnings])


_COLUMNS: dict[str, Callable[[KernelReport], object]] = {
    "kernel": lambda k: k.name,
    "backend": lambda k: k.backend,
    "regs": lambda k: k.registers,
    "spill B": lambda k: k.spill_bytes,
    "smem B": lambda k: k.smem,
    "threads": lambda k: k.launch.threads,
    "CTA/SM": lambda k: k.occupancy.ctas_per_sm,
    "limit": lambda k: k.occupancy.limited_by,
    "HGMMA": lambda k: k.count("HGMMA"),
    "HMMA": lambda k: k.count("HMMA"),
    "LDGSTS": lambda k: k.count("LDGSTS"),
    "UTMALDG": lambda k: k.count("UTMALDG"),
    "EX2": lambda k: k.count("MUFU.EX2"),
    "FFMA": lambda k: k.count("FFMA"),
}


def table(reports: Sequence[KernelReport]) -> str:
    """The reports as a table of text, one kernel a row."""
    rows = [list(_COLUMNS), *([str(get(k)) for get in _COLUMNS.values()] for k in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def report(fn: Callable, *avals, target: str = "h200") -> list[KernelReport]:
    """Compiles `fn(*avals)` for a GPU that need not be here.

    Args:
        fn: any function that `jax.jit` takes; for a backward pass, one that calls `jax.vjp`.
        *avals: its arguments, as arrays, `jax.ShapeDtypeStruct`s or trees of them.
        target: a key of `pallas_attn.gpu.KNOWN`.

    Returns:
        A report for each kernel, Pallas' and XLA's, in the order of launch where XLA tells it.

    Raises:
        MissingToolsError: when the compile-only CUDA wheels are not installed.
        CompileError: when the compiler refuses the function; tracing errors come as they are.
    """
    result = report_many([(fn, *avals)], target=target)[0]
    if isinstance(result, CompileError):
        raise result.__cause__ or result
    return result


def report_many(
    calls: Sequence[tuple], target: str = "h200"
) -> list[list[KernelReport] | CompileError]:
    """Compiles several calls in one child process, as `report` does one; made for tile sweeps.

    Args:
        calls: (fn, *avals) tuples.
        target: a key of `pallas_attn.gpu.KNOWN`.

    Returns:
        For each call its reports, or the error that stopped it: a failed call is a result too.

    Raises:
        MissingToolsError: when the compile-only CUDA wheels are not installed.
        ValueError: for an unknown target.
    """
    with gpus.target(target) as gpu:  # refuses unknown names
        tools = _sass.find_tool("ptxas"), _sass.find_tool("nvdisasm")
    _compile_only.check_plugin()
    modules = [_try_lower(call, target) for call in calls]
    with tempfile.TemporaryDirectory(prefix="pallas_attn_inspect_") as folder:
        root = pathlib.Path(folder)
        jobs = {str(i): m for i, m in enumerate(modules) if isinstance(m, str)}
        _compile_only.compile_all(root, jobs, gpu, ptxas=tools[0])
        return [
            _collect(root / str(i), m, gpu, tools) if isinstance(m, str) else m
            for i, m in enumerate(modules)
        ]


def lower(fn: Callable, *avals, target: str = "h200") -> str:
    """Traces and lowers `fn(*avals)` for `target`, which needs no CUDA wheel; returns StableHLO."""
    with gpus.target(target) as gpu:
        device = AbstractDevice(device_kind=gpu.name, num_cores=gpu.sms, platform="gpu")
        mesh = AbstractMesh((1,), ("inspect",), abstract_device=device)
        # Custom partitioning lowers only where some device is assigned; which one leaves no mark.
        place = SingleDeviceSharding(jax.devices()[0])
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
    folder: pathlib.Path, module: str, gpu: gpus.Gpu, tools: tuple[str, str]
) -> list[KernelReport] | CompileError:
    """Reads what the compiler left of one job."""
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
    xla_log = log.read_text() if log.exists() else ""
    files = sorted(folder.glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        assembled = list(pool.map(lambda ptx: _sass.assemble(ptx, arch, *tools), files))
    reports = []
    for ptx, compiled in zip(files, assembled, strict=True):
        if compiled.error:
            return CompileError(f"{tools[0]}: {compiled.error}")
        passes = ptx.with_suffix(".mlir-passes.log")
        mosaic = passes.exists()
        launch = _sass.parse_mosaic_passes(passes.read_text(errors="replace")) if mosaic else None
        for entry in compiled.entries:
            # XLA tells kernels of one name apart by a suffix.
            triton = re.sub(r"__\d+$", "", entry.name) in pallas_names
            backend = "mosaic_gpu" if mosaic else "triton" if triton else "xla"
            grid, smem = launch or thunks.get(entry.name, (None, 0))
            reports.append(
                KernelReport(
                    name=entry.name,
                    backend=backend,
                    arch=arch,
                    usage=_sass.parse_ptxas(compiled.log)[entry.name],
                    setmaxnreg=entry.setmaxnreg,
                    launch=Launch(grid, entry.threads, smem),
                    sass=compiled.sass[entry.name],
                    ptxas=_ptxas(compiled, entry.name, tools[0], xla_log),
                )
            )
    launched = list(thunks)
    return sorted(
        reports, key=lambda k: launched.index(k.name) if k.name in thunks else len(launched)
    )


def _ptxas(compiled: _sass.Compiled, kernel: str, path: str, xla_log: str) -> Ptxas:
    names = [entry.name for entry in compiled.entries]
    warnings = _sass.ptxas_warnings(compiled.log, kernel, names)
    ours = _sass.parse_ptxas(compiled.log)[kernel]
    theirs = _sass.parse_ptxas(xla_log).get(kernel, ours)
    if theirs != ours:
        warnings += (f"XLA's own run of ptxas gave {theirs}, this one {ours}",)
    version, xla_version = _sass.tool_version(path), _sass.parse_xla_log(xla_log)
    if xla_version not in ("", version):
        warnings += (f"XLA took ptxas {xla_version}, this report {version}",)
    return Ptxas(path, version, xla_version, warnings)


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
    add("--fail-on-spill", action="store_true", help="exit with 1 if a shown kernel spills")
    add("--require", action="append", default=[], metavar="OPCODE", help="exit with 1 without it")
    return parser


def failures(
    reports: Sequence[KernelReport], fail_on_spill: bool = False, require: Sequence[str] = ()
) -> list[str]:
    """What a gate holds against the reports.

    Args:
        reports: from `report`.
        fail_on_spill: whether spilled registers are a fault.
        require: opcodes such as "HGMMA" that some kernel must have.

    Returns:
        A sentence for each fault; empty when there is none.
    """
    spilling = [k for k in reports if k.spill_bytes] if fail_on_spill else []
    missing = [op for op in require if not any(k.count(op) for k in reports)]
    return [
        *(f"{k.name} spills {k.spill_bytes} B per thread" for k in spilling),
        *(f"no kernel has {op}" for op in missing),
    ]


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
        found = report(*call, target=args.target)
    except (CompileError, _sass.MissingToolsError, NotImplementedError, ValueError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    shown = [k for k in found if args.all or k.backend != "xla"] or found
    if args.json:
        text = json.dumps([k.as_dict() for k in shown], indent=1)
        print(text) if args.json == "-" else pathlib.Path(args.json).write_text(text + "\n")
    if args.json != "-":
        ptxas = {f"ptxas {k.ptxas.version} ({k.ptxas.path})" for k in found}
        print(f"jax {jax.__version__}, target {args.target}, {', '.join(sorted(ptxas))}\n")
        print("\n".join(map(str, shown)), table(shown), sep="\n\n")
        if len(shown) < len(found):
            print(f"\nand {len(found) - len(shown)} kernels of XLA's own (--all shows them)")
    faults = failures(shown, args.fail_on_spill, args.require)
    for fault in faults:
        print(f"FAIL {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
