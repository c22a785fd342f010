"""What `pallas_attn.inspect` tells of one kernel: the record, its text, the table of several."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from pallas_attn import _sass
from pallas_attn._sass_loops import Spills

# Opcodes worth a place in a printed report, in that order.
# fmt: off
_SHOWN = (
    "HGMMA", "QGMMA", "HMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDGSTS", "LDG", "STG", "RED",
    "ATOMG", "LDSM", "STSM", "LDS", "STS", "LDL", "STL", "MUFU.EX2", "FFMA", "FMUL", "FADD",
    "FMNMX", "SHFL", "BAR", "SYNCS", "WARPGROUP", "USETMAXREG",
)
# fmt: on


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

    `source` is how it was found: "NVIDIA's wheel", "PATH", "CUDA_HOME", "CUDA toolkit", "given".
    `xla_version` is "" where XLA's log does not tell.
    """

    path: str
    source: str
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
        spills: bytes that go through local memory, by loops.
        setmaxnreg: ("inc" | "dec", registers) pairs by which warpgroups trade registers.
        launch: grid, threads, dynamic shared memory.
        sass: opcode with modifiers -> count; `count` sums over modifiers.
        ptxas: the assembler and its warnings.
    """

    name: str
    backend: str
    arch: str
    usage: _sass.PtxasUsage
    spills: Spills
    setmaxnreg: tuple[tuple[str, int], ...]
    launch: Launch
    sass: dict[str, int]
    ptxas: Ptxas

    @property
    def registers(self) -> int:
        """Registers per thread, at the start where warpgroups trade some later."""
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

    @property
    def faults(self) -> tuple[str, ...]:
        """What makes a kernel slow whatever its tiles: sentences, empty where there is nothing."""
        pattern = r"wgmma\S* instructions are serializ|setmaxnreg.*ignored"
        found = [w for w in self.ptxas.warnings if re.search(pattern, w, re.IGNORECASE)]
        if self.spills.in_hot_loops:
            found.append(f"spills {self.spills.in_hot_loops} B per thread in its hot loops")
        return tuple(found)

    def count(self, opcode: str) -> int:
        """How many instructions are `opcode`, with any further modifiers ("HGMMA", "MUFU.EX2")."""
        return sum(n for op, n in self.sass.items() if f"{op}.".startswith(f"{opcode}."))

    def as_dict(self) -> dict:
        """All of it as JSON types, with the derived numbers, and counts by opcode family."""
        families = {op.split(".")[0] for op in self.sass} | {"MUFU.EX2"}
        return dataclasses.asdict(self) | {
            "spill_bytes": self.spill_bytes,
            "faults": self.faults,
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
            f"{self.name}  [{self.backend}, {self.arch}, ptxas {self.ptxas.version}]",
            f"  registers {use.registers}"
            + (f" (setmaxnreg {trade})" if trade else "")
            + f"; spill stores {use.spill_stores} B, loads {use.spill_loads} B"
            + f"; stack {use.stack} B",
            *self._spill_lines(),
            f"  grid {grid}; {launch.threads} threads; shared memory {self.smem} B "
            f"(static {use.static_smem}, dynamic {launch.dynamic_smem}); "
            f"{fit.ctas_per_sm} CTA/SM (limit: {fit.limited_by})",
            f"  {sum(self.sass.values())} instructions: {counts}",
        ]
        lines += [f"  {mma}"] if mma else []
        lines += [f"  ! {fault}" for fault in self.faults if fault not in self.ptxas.warnings]
        return "\n".join(lines + [f"  ! {warning}" for warning in self.ptxas.warnings])

    def _spill_lines(self) -> list[str]:
        at = self.spills
        if not at.outside + at.in_loops:
            return []
        return [
            f"  spills outside loops: {at.outside} B; spills in loops: {at.in_loops} B, "
            f"of that in hot loops: {at.in_hot_loops} B"
        ]


_COLUMNS: dict[str, Callable[[KernelReport], object]] = {
    "kernel": lambda k: k.name,
    "backend": lambda k: k.backend,
    "regs": lambda k: k.registers,
    "spill B": lambda k: k.spill_bytes,
    "hot B": lambda k: k.spills.in_hot_loops,
    "smem B": lambda k: k.smem,
    "threads": lambda k: k.launch.threads,
    "CTA/SM": lambda k: k.occupancy.ctas_per_sm,
    "limit": lambda k: k.occupancy.limited_by,
    "HGMMA": lambda k: k.count("HGMMA"),
    "HMMA": lambda k: k.count("HMMA"),
    "LDGSTS": lambda k: k.count("LDGSTS"),
    "UTMALDG": lambda k: k.count("UTMALDG"),
    "UTMASTG": lambda k: k.count("UTMASTG"),
    "UTMAREDG": lambda k: k.count("UTMAREDG"),
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
