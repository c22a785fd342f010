"""Hopper kernels under the race detector: clean as they are, found out once a fault is planted.

A kernel whose barriers do not agree waits for ever, so kernels run in a child process with a time
limit: `python test_races.py NAME` runs one function of this file, which prints its answer as JSON.
"""

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn as pa
from pallas_attn import backends, reference
from pallas_attn.call import Call
from pallas_attn.interpret import RaceError
from pallas_attn.mosaic_gpu import (
    backward,
    backward_add,
    backward_narrow,
    backward_wide,
    mma,
    ring,
)
from pallas_attn.mosaic_gpu.common import Inputs
from pallas_attn.spec import Spec
from pallas_attn.tile_math import LOG2E

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_limited(name: str, seconds: float, file: str = __file__):
    """Runs the function `name` of a file in a child process; what it gave, read from JSON.

    Raises:
        TimeoutError: when it takes longer, with what it printed until then.
        RuntimeError: when it fails.
    """
    command = [sys.executable, file, name]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "PJRT_NPROC": "16",  # see conftest.py
        # An interpreted kernel is a large program that runs once: most of its time is compilation.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode()[-2000:]
        raise TimeoutError(f"{name} took more than {seconds} s; it printed:\n{text}") from None
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------------
# In the child process
# ------------------------------------------------------------------------------------------------

# head_dim, v_dim: with `overlap` (all up to 64 channels) and without; k and v differ in shape
# where faults are planted, so that a fault can tell them apart.
OVERLAPPED, TURNS = (32, 64), (128, 64)
FWD, DQ = pa.KernelTiles(128, 128, 8, 2), pa.KernelTiles(64, 64, 8, 2)
TILES = pa.Tiles(FWD, DQ, DQ)
CASES = {
    "full": (pa.Full(), TURNS),
    "causal": (pa.Causal(), TURNS),
    "causal overlapped": (pa.Causal(), OVERLAPPED),
    "window, lengths": (pa.SlidingWindow(90, 0) & pa.Lengths(kv_lens=jnp.array([300])), TURNS),
}

# Mask, channels, tiles of the backward, whether deterministic.
NARROW, HALVES, WIDE = (pa.KernelTiles(*x, 8, 2) for x in ((64, 128), (128, 128), (64, 64)))
ADDER = pa.KernelTiles(64, 64, 12, 2)
WINDOW = pa.SlidingWindow(100, 0) & pa.Lengths(kv_lens=jnp.array([200]))
BACKWARD_CASES = {
    "backward, causal": (pa.Causal(), 64, NARROW, False),
    "backward, deterministic": (pa.Causal(), 64, NARROW, True),
    "backward, two halves of queries": (WINDOW, 64, HALVES, False),
    "backward, wide": (WINDOW, 256, WIDE, False),
    "backward, wide, adder": (WINDOW, 256, ADDER, False),
    "backward, wide, adder, deterministic": (pa.Causal(), 192, ADDER, True),
    "backward, padding": (pa.Lengths(jnp.array([130]), jnp.array([200])), 64, NARROW, False),
}


def outcome(run, wanted, tolerances):
    """ "race", "error", "wrong" or "clean", and why, of `run()` in the interpreter.

    Args:
        run: gives arrays.
        wanted: gives what they should be.
        tolerances: of each, as a part of the largest number wanted.
    """
    jax.clear_caches()
    try:
        with pa.interpret(detect_races=True):
            got = [np.asarray(x, np.float32) for x in run()]
    except RaceError as race:
        return "race", str(race)
    except Exception as error:
        return "error", str(error)[-300:]
    far = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, wanted(), strict=True)]
    fine = all(a < b for a, b in zip(far, tolerances, strict=True))
    return "clean" if fine else "wrong", f"errors {far}"


def operands(dims, q_len=256, kv_len=384):
    shapes = (q_len, 2, dims[0]), (kv_len, 1, dims[0]), (kv_len, 1, dims[1])
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (1, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    return (q, k, v), [x.astype(jnp.float32) for x in (q, k, v)]


def attend(mask, dims):
    low, full = operands(dims)
    call = functools.partial(pa.mha, mask=mask, backend="mosaic_gpu", tiles=TILES, return_lse=True)
    return outcome(lambda: jax.jit(call)(*low), lambda: reference.mha(*full, mask), (1e-2, 1e-5))


def backward_problem(mask, channels=64, kernel_tiles=NARROW, deterministic=False):
    """Call and operands of the backward kernel for a cotangent of ones; what it should give."""
    low, full = operands((channels, channels), kv_len=512)
    out, lse = reference.mha(*full, mask)
    dout = jnp.ones_like(out)
    tiles = pa.Tiles(FWD, DQ, kernel_tiles)
    spec = Spec.of(*low)
    table = backends.build_table("mosaic_gpu", mask, tiles, spec)
    inputs = Inputs(
        *low,
        table.dkv,
        table.extra.backward,
        dout=dout.astype(low[0].dtype),
        lse_log2=jnp.where(lse > -jnp.inf, lse * LOG2E, jnp.inf),
        delta=jnp.einsum("bqhd,bqhd->bhq", out, dout),
    )
    wanted = jax.grad(lambda *x: reference.mha(*x, mask)[0].sum(), (0, 1, 2))(*full)
    return Call(spec, tiles, "mosaic_gpu", True, deterministic), inputs, wanted


def differentiate(call, inputs, wanted):
    run = jax.jit(functools.partial(backward.backward, call))
    return outcome(lambda: run(inputs), lambda: wanted, (2e-2, 2e-2, 2e-2))


def clean():
    """What the detector says of the kernels as they are."""
    return {name: attend(*case) for name, case in CASES.items()} | {
        name: differentiate(*backward_problem(*case)) for name, case in BACKWARD_CASES.items()
    }


def slots_named(slots) -> str:
    """Which of q, k, v a ring is, by its shape [slots, rows, channels]."""
    _, rows, channels = slots.data.shape
    return "q" if rows == 64 else "k" if channels == TURNS[0] else "v"


@contextlib.contextmanager
def changed(module, name, function):
    """Inside, `module.name` is `function`, which takes the original first."""
    original = getattr(module, name)
    setattr(module, name, functools.partial(function, original))
    try:
        yield
    finally:
        setattr(module, name, original)


def dropped(module, name, which=None):
    """A fault: calls of `module.name` do nothing, for one ring or for all."""

    def call(original, first, *rest, **options):
        if which is not None and slots_named(first) != which:
            original(first, *rest, **options)

    return changed(module, name, call)


@contextlib.contextmanager
def released_early(which):
    """A fault: consumers hand a slot back as soon as it is full, and read it after that."""

    def wait(original, slots, slot):
        original(slots, slot)
        if slots_named(slots) == which:
            release(slots, slot)

    release = ring.release
    with changed(ring, "wait_full", wait), dropped(ring, "release", which):
        yield


def unawaited(channels):
    """A fault: nobody waits for the products into accumulators of so many columns."""

    def wait(original, acc, pending, *, call):
        if acc.shape[-1] != channels:
            original(acc, pending, call=call)

    # `mma.load` waits by it too.
    return changed(mma, "wait", wait)


def uncommitted():
    """A fault: what threads wrote to shared memory is not made visible to TMA."""
    return changed(plgpu, "commit_smem", lambda original: None)


def unstored():
    """A fault: out is staged while the store of the tile before may still read its memory."""

    def wait(original, n, *, wait_read_only=False):
        if not wait_read_only:
            original(n, wait_read_only=wait_read_only)

    return changed(plgpu, "wait_smem_to_gmem", wait)


FAULTS = {
    **{f"wait for full {x}": functools.partial(dropped, ring, "wait_full", x) for x in "qkv"},
    **{f"wait for empty {x}": functools.partial(dropped, ring, "wait_empty", x) for x in "qkv"},
    **{f"early release of {x}": functools.partial(released_early, x) for x in "kv"},
    "wait for s": functools.partial(unawaited, TILES.fwd.block_kv),
    "wait for p·v": functools.partial(unawaited, TURNS[1]),
    "commit of out": uncommitted,
    "wait for the store of out": unstored,
}


def unheeded(barrier):
    """A fault: nobody waits at one of the backward's barriers."""
    bars = []

    def start(original, kernel):
        bars.append(kernel.bars)
        original(kernel)

    def wait(original, ref):
        if getattr(ref, "ref", ref) is not getattr(bars[-1], barrier):
            original(ref)

    with changed(backward, "_kernel", start), changed(plgpu, "barrier_wait", wait):
        yield


BACKWARD_FAULTS = {
    **{
        f"backward, wait for {x}": functools.partial(contextlib.contextmanager(unheeded), x)
        for x in ("full", "empty", "keys", "ds", "dq_full", "dq_empty", "read", "written", "stored")
    },
    "backward, fence after ds and dq": functools.partial(dropped, backward_narrow, "fence"),
    "backward, wait for products": functools.partial(dropped, mma, "wait"),
}


def overtaken():
    """A fault: the adder stages dq where what it sent before may still be read."""

    def wait(original, n, *, wait_read_only=False):
        if n == 0:
            original(n, wait_read_only=wait_read_only)

    return changed(plgpu, "wait_smem_to_gmem", wait)


@contextlib.contextmanager
def unasked():
    """A fault: warpgroup 0 writes where warpgroup 1's dk may still read ds."""
    bars = plgpu.Barrier(num_barriers=2)
    with (
        changed(backward, "_read_ds", lambda original, plan: bars),
        dropped(backward_wide, "_free_ds"),
    ):
        yield


ADDER_FAULTS = {
    **{
        f"backward, adder, wait for {x}": functools.partial(contextlib.contextmanager(unheeded), x)
        for x in ("dq_empty", "ds", "p")
    },
    "backward, adder, wait for warpgroup 1": unasked,
    "backward, adder, wait for a slot": overtaken,
    "backward, adder, commit of dq": functools.partial(dropped, backward_add, "fence"),
}


def faults():
    """What the detector says of each planted fault."""
    found, problem = {}, backward_problem(pa.Full())
    for name, fault in FAULTS.items():
        with fault():
            found[name] = attend(pa.Full(), TURNS)
    for name, fault in BACKWARD_FAULTS.items():
        with fault():
            found[name] = differentiate(*problem)
    problem = backward_problem(pa.Full(), 256, ADDER)
    for name, fault in ADDER_FAULTS.items():
        with fault():
            found[name] = differentiate(*problem)
    return found


def hang():
    """Never ends."""
    print("before", flush=True)
    threading.Event().wait()


# ------------------------------------------------------------------------------------------------
# In pytest
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean_runs():
    return run_limited("clean", 400)


@pytest.fixture(scope="module")
def faulty_runs():
    return run_limited("faults", 400)


@pytest.mark.parametrize("name", CASES | BACKWARD_CASES)
def test_kernels_have_no_races(name, clean_runs):
    found, why = clean_runs[name]
    assert found == "clean", why


@pytest.mark.parametrize("name", FAULTS | BACKWARD_FAULTS | ADDER_FAULTS)
def test_a_planted_fault_is_found(name, faulty_runs):
    found, why = faulty_runs[name]
    # A dropped wait for a barrier may also break a rule that the interpreter checks by itself.
    dropped_wait = "wait for" in name and found == "error"
    assert found == "race" or (dropped_wait and "arrier" in why), f"{found}: {why}"
    if found == "race":
        rooms = ("backward_",) if name.startswith("backward") else ("forward.py:", "attend.py:")
        assert any(room in why for room in rooms), why


def test_a_kernel_that_hangs_is_ended():
    with pytest.raises(TimeoutError, match=r"hang took more than 8 s[\s\S]*before"):
        run_limited("hang", 8)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
