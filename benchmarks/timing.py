"""Compiling, timing and counting: what is measured, and how, without saying of what.

A timed loop issues its calls without waiting and blocks once at its end, so that the host's cost a
call is hidden as it is in a training step. All implementations of a case take turns, a few times
over, in one process: a card drifts by several per cent with its temperature, so only ratios
inside one run mean anything.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import impls

PLANS_IN_ONE_CALL = 16


@dataclass
class Programs:
    """Compiled executables of one implementation, case and mode.

    Attributes:
        calls: Executables by name: "prepare", "fwd", "vjp", "bwd", or those of the mode "tables".
        lower_s: Seconds to trace and lower them.
        compile_s: Seconds to compile them.
        failed: One line, if it did not come to that.
    """

    calls: dict[str, Any] = field(default_factory=dict)
    lower_s: float = 0.0
    compile_s: float = 0.0
    failed: str | None = None

    def add(self, name, function, *specs):
        """Compiles a function for shapes, keeps it and returns the shapes of what it returns."""
        start = time.perf_counter()
        lowered = jax.jit(function).lower(*specs)
        middle = time.perf_counter()
        self.calls[name] = lowered.compile()
        self.lower_s += middle - start
        self.compile_s += time.perf_counter() - middle
        return as_specs(lowered.out_info)


def as_specs(tree):
    """Returns a tree of arrays or of anything with shape and dtype as ShapeDtypeStructs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def compile_programs(impl, case, mode):
    """Compiles what one measurement needs; nothing runs on the device, and nothing is raised.

    The backward is made from jax.vjp's function, which one executable returns and another takes,
    so it can be timed without the forward.
    """
    programs = Programs()
    try:
        dtype = jnp.dtype(case.shape.dtype)

        def spec(s):
            return jax.ShapeDtypeStruct(s, dtype)

        qkv = [spec(case.shape.q), spec(case.shape.k), spec(case.shape.v)]
        raw = as_specs(impls.raw_operands(case))
        operands = programs.add("prepare", lambda raw: impl.prepare(case, raw), raw)

        def forward(q, k, v, operands):
            return impl.forward(case, q, k, v, operands)

        def with_vjp(q, k, v, operands):
            return jax.vjp(lambda q, k, v: forward(q, k, v, operands), q, k, v)

        if mode == "bwd":
            _, pullback = programs.add("vjp", with_vjp, *qkv, operands)
            programs.add("bwd", lambda vjp, dout: vjp(dout), pullback, spec(case.shape.out))
        else:
            programs.add("fwd", forward, *qkv, operands)
        if mode == "tables":
            _compile_tables(programs, impl, case, qkv, raw)
    except Exception as error:
        programs.failed = one_line(error)
    return programs


def _compile_tables(programs, impl, case, qkv, raw):
    """Adds the planning alone, many times in one program, and planning and a forward in one."""

    def plan_many(raws):
        return lax.scan(lambda _, raw: (None, impl.prepare(case, raw)), None, raws)[1]

    def plan_and_forward(q, k, v, raw):
        return impl.forward(case, q, k, v, impl.prepare(case, raw))

    def many(x):
        return jax.ShapeDtypeStruct((PLANS_IN_ONE_CALL, *x.shape), x.dtype)

    programs.add("plan_many", plan_many, jax.tree.map(many, raw))
    programs.add("plan_and_forward", plan_and_forward, *qkv, raw)


def one_line(error):
    """Returns an exception as one line of at most 400 characters."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:400]}"


def too_large(executables):
    """Returns a sentence if executables don't fit beside what the device holds, or None.

    Args:
        executables: As in Programs.calls. What "vjp" returns stays while "bwd" runs.
    """
    stats = jax.devices()[0].memory_stats() or {}
    memory = {name: e.memory_analysis() for name, e in executables.items()}
    if "bytes_limit" not in stats or None in memory.values():
        return None
    need = {name: m.output_size_in_bytes + m.temp_size_in_bytes for name, m in memory.items()}
    if "bwd" in need:
        need["bwd"] += memory["vjp"].output_size_in_bytes
    most, free = max(need.values()), stats["bytes_limit"] - stats["bytes_in_use"]
    if most > free:
        return f"out of memory: needs {most / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return None


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, one figure for each repeat, and of its dispatch on the host."""

    repeats: tuple[float, ...]
    host: tuple[float, ...]
    calls: int

    def as_record(self):
        """Returns the fields of a result: milliseconds, their spread, host microseconds."""
        ms = np.asarray(self.repeats) * 1e3
        middle = float(np.median(ms))
        host = float(np.median(self.host)) * 1e6
        return {
            "ms": round(middle, 5),
            "ms_min": round(float(ms.min()), 5),
            "ms_max": round(float(ms.max()), 5),
            "spread": round(float(ms.max() - ms.min()) / middle, 4),
            "repeats": len(self.repeats),
            "calls": self.calls,
            "host_us": round(host, 1),
            "host_bound": host > 0.9e3 * middle,
        }


def _loop(call, count):
    result, start = None, time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def _dispatch(call, count):
    """Returns the host's seconds a call, the device idle at first and few enough calls to queue."""
    result, start = None, time.perf_counter()
    for _ in range(count):
        result = call()
    seconds = (time.perf_counter() - start) / count
    jax.block_until_ready(result)
    return seconds


def measure(calls: dict[str, Callable], repeats: int, seconds: float):
    """Times several functions in turn.

    Args:
        calls: Functions without arguments, each issuing one call and returning its result.
        repeats: Rounds; each starts with another function.
        seconds: About how long one function runs in one round.

    Returns:
        A Timing by name, or the exception that ended that function's part.
    """
    counts, results, host, failed = {}, {}, {}, {}

    def attempt(name, function, *arguments):
        try:
            return function(calls[name], *arguments)
        except Exception as error:
            failed[name] = error
            return None

    for name in calls:
        attempt(name, _loop, 2)  # warm-up: module load, autotuning, first allocations
        one = attempt(name, _loop, 1)
        counts[name] = int(np.clip(seconds / max(one or 1.0, 1e-6), 1, 200))
        results[name], host[name] = [], []
    for turn in range(repeats):
        first = turn % max(1, len(calls))
        for name in [*calls][first:] + [*calls][:first]:
            if name in failed:
                continue
            took = attempt(name, _loop, counts[name])
            dispatched = attempt(name, _dispatch, min(8, counts[name]))
            if name not in failed:
                results[name].append(took)
                host[name].append(dispatched)
    return {
        name: failed.get(name) or Timing(tuple(results[name]), tuple(host[name]), counts[name])
        for name in calls
    }
