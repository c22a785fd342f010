"""Reads what NVIDIA's tools say about a compiled kernel: ptxas' log, PTX, SASS, XLA's launch list.

Text in, numbers out; nothing here imports JAX or compiles anything.
"""

import collections
import dataclasses
import functools
import glob
import importlib.util
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

from pallas_attn import _sass_loops

INSTALL_HINT = "pip install pallas_attn[sass]"


class MissingToolsError(RuntimeError):
    """The compile-only CUDA plugin, ptxas or nvdisasm is not on this machine."""


@dataclasses.dataclass(frozen=True)
class Arch:
    """What limits the thread blocks of one multiprocessor, by compute capability.

    Attributes:
        name: the architecture that ptxas is asked for.
        threads: threads per multiprocessor.
        ctas: thread blocks per multiprocessor.
        smem: bytes of shared memory per multiprocessor.
        fp32_lanes: float32 multiply-adds per clock and multiprocessor.
    """

    name: str
    threads: int
    ctas: int
    smem: int
    fp32_lanes: int


# CUDA C++ Programming Guide, "Technical specifications per compute capability".
ARCHS: dict[tuple[int, int], Arch] = {
    (8, 0): Arch("sm_80", 2048, 32, 164 * 1024, 64),
    (8, 6): Arch("sm_86", 1536, 16, 100 * 1024, 128),
    (8, 7): Arch("sm_87", 1536, 16, 164 * 1024, 128),
    (8, 9): Arch("sm_89", 1536, 24, 100 * 1024, 128),
    (9, 0): Arch("sm_90a", 2048, 32, 228 * 1024, 128),
}
_REGISTERS = 65536  # per multiprocessor, on all of the above
_SYSTEM_SMEM = 1024  # the driver keeps this much of every thread block


def occupancy(arch: Arch, registers: int, threads: int, smem: int) -> tuple[int, str]:
    """How many thread blocks fit one multiprocessor, and what stops the next one.

    Args:
        arch: the multiprocessor.
        registers: per thread.
        threads: per thread block.
        smem: bytes of shared memory per thread block, static and dynamic.

    Returns:
        (thread blocks, what binds: registers, shared memory, threads or blocks, joined by " and ").
    """
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // 256) * 256  # registers go out 256 at a time
    resident_warps = _REGISTERS // per_warp // 4 * 4  # four schedulers of equal share
    fits = {
        "registers": resident_warps // (-(-warps // 4) * 4),
        "shared memory": arch.smem // (-(-smem // 128) * 128 + _SYSTEM_SMEM),
        "threads": arch.threads // (warps * 32),
        "blocks": arch.ctas,
    }
    most = min(fits.values())
    return most, " and ".join(name for name, blocks in fits.items() if blocks == most)


def _tool_places() -> list[tuple[str, str]]:
    """Folders to look in, the first first, and how each was come by."""
    places = [(folder, "NVIDIA's wheel") for folder in _wheel_places()]
    places += [(folder, "PATH") for folder in os.environ.get("PATH", "").split(os.pathsep)]
    for home in ("CUDA_HOME", "CUDA_PATH"):
        if home in os.environ:
            places.append((os.path.join(os.environ[home], "bin"), home))
    toolkits = sorted(glob.glob("/usr/local/cuda*/bin"), reverse=True)
    return places + [(folder, "CUDA toolkit") for folder in toolkits]


def _wheel_places() -> list[str]:
    places = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        places += sorted(glob.glob(os.path.join(root, "cu[0-9]*", "bin")), reverse=True)
        places += [os.path.join(root, name, "bin") for name in ("cuda_nvcc", "cuda_nvdisasm")]
    return places


@dataclasses.dataclass(frozen=True)
class Tool:
    """A CUDA tool: its path, how it was found ("NVIDIA's wheel", "PATH", ...), its version."""

    path: str
    source: str
    version: str

    @property
    def number(self) -> tuple[int, ...]:
        """The version, to be compared."""
        return tuple(map(int, re.findall(r"\d+", self.version)))

    def __str__(self):
        return f"{os.path.basename(self.path)} {self.version} ({self.source}: {self.path})"


def _tools(name: str) -> Iterator[Tool]:
    for place, source in _tool_places():
        path = os.path.join(place, name)
        if place and os.access(path, os.X_OK):
            yield Tool(path, source, tool_version(path))


def find_tool(name: str, wanted: str | None = None) -> Tool:
    """Finds ptxas or nvdisasm: NVIDIA's wheels, then PATH, CUDA_HOME and /usr/local/cuda*.

    Args:
        name: the tool.
        wanted: the version that it must be of, such as "12.9", or a path: the tool or its folder.

    Raises:
        MissingToolsError: when it is in none of them.
    """
    if wanted is not None and os.sep in wanted:
        path = os.path.join(wanted, name) if os.path.isdir(wanted) else wanted
        if os.path.basename(path) != name or not os.access(path, os.X_OK):
            raise MissingToolsError(f"{name}: got {wanted!r}, expected a {name} or its folder")
        return Tool(os.path.abspath(path), "given", tool_version(path))
    seen = []
    for tool in _tools(name):
        if wanted is None or f"{tool.version}.".startswith(f"{wanted}."):
            return tool
        seen.append(tool.version)
    found = f"version {wanted} not found, only {', '.join(seen)}" if seen else "not found"
    raise MissingToolsError(f"{name}: {found} in NVIDIA's wheels or on PATH; {INSTALL_HINT}")


def ptxas_of_mosaic() -> Tool | None:
    """The ptxas that JAX's Mosaic GPU compiler takes on this machine.

    It looks on PATH and in /usr/local/cuda before NVIDIA's wheels, where the rest of XLA looks
    first (JAX 0.11.2 and 0.12).
    """
    tools = list(_tools("ptxas"))
    on_path = [tool for tool in tools if tool.source == "PATH"]
    installed = [tool for tool in tools if tool.path.startswith("/usr/local/cuda/")]
    wheels = [tool for tool in tools if tool.source == "NVIDIA's wheel"]
    return next(iter(on_path + installed + wheels), None)


@functools.cache
def tool_version(path: str) -> str:
    """The version that a CUDA tool gives of itself, such as "13.0.88"."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return found[1] if found else "unknown"


@dataclasses.dataclass(frozen=True)
class PtxasUsage:
    """What `ptxas -v` says of one function: registers per thread, the rest in bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int


_USAGE = re.compile(
    r"Function properties for (?P<name>\S+)\s+(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:\s+ptxas info\s*: Used (?P<registers>\d+) registers(?P<rest>[^\n]*))?"
)


def parse_ptxas(log: str) -> dict[str, PtxasUsage]:
    """Reads the log of `ptxas -v`.

    Returns:
        Usage by function; functions that kernels call count 0 registers of their own.
    """
    usages = {}
    for found in _USAGE.finditer(log):
        smem = re.search(r"(\d+) bytes smem", found["rest"] or "")
        usages[found["name"]] = PtxasUsage(
            registers=int(found["registers"] or 0),
            stack=int(found["stack"]),
            spill_stores=int(found["stores"]),
            spill_loads=int(found["loads"]),
            static_smem=int(smem[1]) if smem else 0,
        )
    return usages


def ptxas_warnings(log: str, kernel: str, kernels: list[str]) -> tuple[str, ...]:
    """The warnings in a ptxas log that name `kernel`, or none of `kernels`."""
    lines = []
    for line in log.splitlines():
        said = re.sub(r"'.*?'", "", line)  # kernels may be named after anything
        if not re.search(r"\bwarning :|performance loss|serializ", said, re.IGNORECASE):
            continue
        named = [name for name in kernels if re.search(rf"'{re.escape(name)}'", line)]
        text = line.strip()
        if (not named or kernel in named) and text not in lines:
            lines.append(text)
    return tuple(lines)


@dataclasses.dataclass(frozen=True)
class PtxEntry:
    """What the PTX of one kernel declares: threads per block and the values given to setmaxnreg."""

    name: str
    threads: int
    setmaxnreg: tuple[tuple[str, int], ...]


def parse_ptx(text: str) -> list[PtxEntry]:
    """The kernels of a PTX file, in order."""
    entries = []
    for part in re.split(r"\.visible\s+\.entry\s+", text)[1:]:
        sizes = re.search(r"\.(?:req|max)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", part)
        threads = 1
        for size in sizes.groups(default="1") if sizes else ():
            threads *= int(size)
        changes = re.findall(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)", part)
        values = tuple(sorted({(kind, int(count)) for kind, count in changes}))
        entries.append(PtxEntry(part[: part.index("(")].strip(), threads, values))
    return entries


_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+).*$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_TRADE = re.compile(r"\bUSETMAXREG\.(TRY_ALLOC|DEALLOC)\S*\s+(?:UP\w+,\s*)?(0x[0-9a-f]+)")


def split_sass(text: str) -> dict[str, str]:
    """The functions in the output of `nvdisasm -c`, by name."""
    _, *parts = _SECTION.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def count_opcodes(code: str) -> dict[str, int]:
    """Opcode with its modifiers ("HGMMA.64x128x16.F32.BF16") -> how many of a function's code."""
    return dict(collections.Counter(_INSTRUCTION.findall(code)))


def ignored_setmaxnreg(entry: PtxEntry, code: str) -> tuple[str, ...]:
    """A sentence for each setmaxnreg of the PTX that is not in the function's code."""
    found = {
        ("dec" if kind == "DEALLOC" else "inc", int(count, 16))
        for kind, count in _TRADE.findall(code)
    }
    missing = sorted(set(entry.setmaxnreg) - found)
    return tuple(
        f"setmaxnreg.{kind} {count} is ignored: not in the SASS" for kind, count in missing
    )


_THUNKS = (
    # JAX 0.12.1
    r"\bkernel=(?P<name>[^,\s]+),.*=blocks: \{(?P<grid>[\d, ]+)\}.*\bshmem_bytes=(?P<smem>\d+)",
    # before
    r"\] (?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[[\d, ]+\]\s+"
    r"shared_memory: (?P<smem>\d+)",
)


def parse_thunks(text: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """Reads XLA's list of launches: by kernel name, its grid and dynamic shared memory in bytes."""
    return {
        found["name"]: (tuple(int(x) for x in found["grid"].split(",")), int(found["smem"]))
        for form in _THUNKS
        for found in re.finditer(form, text)
    }


_LAUNCH = re.compile(
    r"@mosaic_gpu_(?:launch_kernel|build_kernel_spec)\(ptr [^,]+, "  # JAX 0.11; 0.12
    r"(?P<grid>(?:i32 [^,]+, ){3})(?:i32 [^,]+, ){6}"
    r"i32 (?P<smem>\d+)"
)


def parse_mosaic(text: str) -> tuple[list[str], dict[str, tuple[tuple[int, ...] | None, int]]]:
    """Reads what the Mosaic GPU compiler prints: PTX, and host code that launches it.

    Returns:
        (PTX of each kernel, by kernel name what `parse_thunks` gives, with None for a grid that is
        not constant).
    """
    kernels, launches = [], {}
    for part in re.split(r"^(?=//\n// Generated by LLVM NVPTX|; ModuleID = )", text, flags=re.M):
        if part.startswith("//"):
            kernels.append(part)
            continue
        name, call = re.search(r"^define \w+ @(\w+)\(", part, re.M), _LAUNCH.search(part)
        if name and call:
            sizes = re.findall(r"i32 (\d+),", call["grid"])
            grid = tuple(map(int, sizes)) if len(sizes) == 3 else None
            launches[f"{name[1]}_kernel"] = grid, int(call["smem"])
    return kernels, launches


def parse_xla_log(text: str) -> str:
    """The version of the ptxas that XLA itself ran, from its verbose log; "" if not told."""
    found = re.findall(r"Using \S*ptxas\S* with version (\d+(?:\.\d+)+)", text)
    return found[-1] if found else ""


@dataclasses.dataclass(frozen=True)
class Function:
    """One kernel after ptxas and nvdisasm: its opcodes, and where it touches local memory."""

    sass: dict[str, int]
    spills: _sass_loops.Spills
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One PTX file after ptxas and nvdisasm, or `error`, what ptxas said when it refused."""

    entries: list[PtxEntry]
    log: str
    functions: dict[str, Function]
    error: str | None = None


def assemble(ptx: pathlib.Path, arch: str, ptxas: Tool, nvdisasm: Tool) -> Compiled:
    """Runs ptxas with XLA's own options on a PTX file, and nvdisasm on the result."""
    entries = parse_ptx(ptx.read_text())
    cubin = str(ptx.with_suffix(f".{ptxas.version}.cubin"))
    command = [ptxas.path, "-v", "--warn-on-spills", f"-arch={arch}", str(ptx), "-o", cubin]
    run = subprocess.run(command, capture_output=True, text=True)
    log = run.stderr + run.stdout
    if run.returncode:
        return Compiled(entries, log, {}, error=log.strip())

    run = subprocess.run([nvdisasm.path, "-c", cubin], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{nvdisasm} could not read what {ptxas} wrote: {run.stderr.strip()}")
    code = split_sass(run.stdout)
    names = [entry.name for entry in entries]
    functions = {
        entry.name: Function(
            sass=count_opcodes(code[entry.name]),
            spills=_sass_loops.spills(_sass_loops.graph_of(code[entry.name])),
            warnings=ptxas_warnings(log, entry.name, names)
            + ignored_setmaxnreg(entry, code[entry.name]),
        )
        for entry in entries
    }
    return Compiled(entries, log, functions)
