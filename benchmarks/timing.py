"""Compiling, timing and counting: what is measured, and how, without saying of what.

A timed loop issues its calls without waiting and blocks once at its end, so that the host's cost a
call is hidden as it is in a training step. All implementations of a case take turns, a few times
over, in one process: a card drifts by several per cent with its temperature, so only ratios
inside one run mean anything.

Where a call takes the device no longer than the host, several calls are one program, a loop that
XLA runs without the host. It adds about 2 us a call, for the loop's counter.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import impls, serving, suites

PLANS_IN_ONE_CALL = 16
# Calls that would take less than SHORT_S at RATE FLOP/s and BYTE_RATE bytes/s are looped until they
# take 2 ms.
SHORT_S, RATE, MOST_IN_ONE_CALL = 0.5e-3, 600e12, 32
BYTE_RATE = 4e12


@dataclass
class Programs:
    """Compiled executables of one implementation, case and mode.

    Attributes:
        calls: Executables by name: "prepare", "fwd", "vjp", "bwd", "looped", or those of the mode
            "tables".
        inner: How many calls "looped" makes.
        lower_s: Seconds to trace and lower them.
        compile_s: Seconds to compile them.
        failed: One line, if it did not come to that.
    """

    calls: dict[str, Any] = field(default_factory=dict)
    inner: int = 1
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


def inner_calls(case, mode):
    """Returns how many calls of a case make one program."""
    seconds = suites.flops(case, mode) / RATE
    if suites.is_serving(case):
        seconds = max(seconds, case.nbytes / BYTE_RATE)
    if mode == "tables" or seconds >= SHORT_S or jax.default_backend() != "gpu":
        return 1
    return int(np.clip(2e-3 / seconds, 2, MOST_IN_ONE_CALL))


def looped(function, count):
    """Returns a function that calls another one `count` times, on the same arguments.

    The barrier ties the arguments to what the call before gave, so that nothing can be left out or
    moved before the loop; results are carried whole, so that their last casts are made.
    """

    def run(*args):
        def body(_, results):
            held, _ = lax.optimization_barrier((args, results))
            return function(*held)

        like = jax.eval_shape(function, *args)
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.fori_loop(np.int32(0), np.int32(count), body, results)

    return run


def compile_programs(impl, case, mode, inner=None):
    """Compiles what one measurement needs; nothing runs on the device, and nothing is raised.

    The backward is made from jax.vjp's function, which one executable returns and another takes,
    so it can be timed without the forward.

    Args:
        impl, case, mode: What is measured.
        inner: Calls in one timed program; None is `inner_calls`.
    """
    programs = Programs(inner=inner or inner_calls(case, mode))
    try:
        if mode == "serve":
            _compile_serving(programs, impl.way, case)
            return programs
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

        def backward(dout, pullback):
            return pullback(dout)

        if mode == "bwd":
            _, pullback = programs.add("vjp", with_vjp, *qkv, operands)
            timed, given = backward, (spec(case.shape.out), pullback)
        else:
            timed, given = forward, (*qkv, operands)
        programs.add("bwd" if mode == "bwd" else "fwd", timed, *given)
        if programs.inner > 1:
            programs.add("looped", looped(timed, programs.inner), *given)
        if mode == "tables":
            _compile_tables(programs, impl, case, qkv, raw)
    except Exception as error:
        programs.failed = one_line(error)
    return programs


def _compile_serving(programs, way, case):
    """Adds preparing the cache and one call, and several in one."""
    data = programs.add("prepare", lambda data: way.prepare(case, data), serving.specs(case))

    def forward(data):
        return way.forward(case, data)

    programs.add("fwd", forward, data)
    if programs.inner > 1:
        programs.add("looped", looped(forward, programs.inner), data)


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
        for name in need.keys() & {"bwd", "looped"}:
            need[name] += memory["vjp"].output_size_in_bytes
    most, free = max(need.values()), stats["bytes_limit"] - stats["bytes_in_use"]
    if most > free:
        return f"out of memory: needs {most / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return None


@dataclass(frozen=True)
class Timed:
    """Something to be timed.

    Attributes:
        one: Issues one call and returns its result.
        many: Issues `inner` calls at once; None where `one` is all there is.
        inner: How many.
    """

    one: Callable[[], Any]
    many: Callable[[], Any] | None = None
    inner: int = 1


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, one figure for each repeat, and of its dispatch on the host."""

    repeats: tuple[float, ...]
    host: tuple[float, ...]
    calls: int
    inner: int = 1

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
            "calls": self.calls * self.inner,
            "host_us": round(host, 1),
            "host_bound": host > 0.9e3 * middle * self.inner,
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


def measure(calls: dict[Any, Timed], repeats: int, seconds: float):
    """Times several functions in turn.

    Args:
        calls: What to time, by name.
        repeats: Rounds, each in another order: a function that follows one which heats the card
            runs slower by up to a tenth. A function whose single call takes longer than four rounds
            has part in the first one alone.
        seconds: About how long one function runs in one round.

    Returns:
        A Timing by name, or the exception that ended that function's part.
    """
    counts, results, host, failed, rounds = {}, {}, {}, {}, {}

    def attempt(name, function, call, count):
        try:
            return function(call, count)
        except Exception as error:
            failed[name] = error
            return None

    for name, timed in calls.items():
        many = timed.many or timed.one
        attempt(name, _dispatch, timed.one, 1)  # warm-up: module load, first allocations
        attempt(name, _loop, many, 1)
        one = attempt(name, _loop, many, 1) or 1.0
        counts[name] = int(np.clip(seconds / max(one, 1e-6), 1, 200))
        rounds[name] = repeats if one <= max(4 * seconds, SHORT_S) else 1
        results[name], host[name] = [], []
    shuffle = random.Random().sample
    for turn in range(repeats):
        for name in shuffle([*calls], len(calls)):
            if name in failed or turn >= rounds[name]:
                continue
            timed = calls[name]
            took = attempt(name, _loop, timed.many or timed.one, counts[name])
            dispatched = attempt(name, _dispatch, timed.one, min(8, counts[name] * timed.inner))
            if took is not None and dispatched is not None:
                results[name].append(took / timed.inner)
                host[name].append(dispatched)
    return {
        name: failed.get(name)
        or Timing(tuple(results[name]), tuple(host[name]), counts[name], timed.inner)
        for name, timed in calls.items()
    }
