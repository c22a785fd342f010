"""The kernels for real on an NVIDIA GPU: every case, large offsets, many runs bit-equal, an end.

Runs on a machine that has JAX with CUDA and pytest, no plugins:

    python -m pytest tests/test_gpu.py -m gpu -q -p no:cacheprovider -o addopts=""

All cases compile and run in threads, their references on the CPU; each test then judges its own.
"""

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import testing
from pallas_attn.testing import MASK_CASES, PROBLEMS, SHAPED, Operands, Problem

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Run:
    """One problem under one mask in one dtype on one backend."""

    problem: Problem
    mask_name: str
    dtype: str
    backend: str = "triton"
    label: str = "base"

    def __str__(self):
        return f"{self.backend}-{self.label}-{self.mask_name}-{self.dtype}"


# Several default tiles long, and a bit.
LONG = Problem(lens=(300, 300), dims=(64, 64))
DIMS = {
    "d64": Problem(lens=(520, 520), dims=(64, 64)),
    "d128": Problem(lens=(520, 520), dims=(128, 128)),
    "d192_128": Problem(lens=(330, 520), dims=(192, 128)),
    "d256": Problem(lens=(330, 520), dims=(256, 256)),
}
OPTIONS = Problem(lens=(520, 400), dims=(128, 128), bias="hqk", soft_cap=5.0, sinks=True)
RUNS = [
    *(Run(LONG, mask, "bfloat16") for mask in MASK_CASES),
    *(Run(LONG, mask, "float32") for mask in ("causal_documents", "predicate_arrays", "dense")),
    *(
        Run(PROBLEMS[c.problem_name], c.mask_name, dtype, label=c.problem_name)
        for c in SHAPED
        for dtype in [{"full": "float16"}.get(c.mask_name, "bfloat16")]
    ),
    *(
        Run(
            problem,
            mask,
            dtype,
            "xla" if (label, dtype) == ("d256", "float32") else "triton",
            label,
        )
        for label, problem in DIMS.items()
        for mask in ("full", "causal")
        for dtype in ("bfloat16", "float16", "float32")
    ),
    *(Run(OPTIONS, "causal_window", d, label="options") for d in ("bfloat16", "float32")),
    *(Run(OPTIONS, "causal_documents", d, "xla", "options") for d in ("bfloat16", "float32")),
]


def measure(run: Run):
    """(results, what they are judged by); in any thread."""
    with jax.default_device(_host()):
        name = str(run)
        mask = MASK_CASES[run.mask_name](testing.generator(name), *run.problem.mask_shape)
        data = testing.make_inputs(run.problem, run.dtype, mask, name)
        judged_by = *testing.expected_of(run.problem, data), testing.magnitudes(run.problem, data)
    data = jax.device_put(data, jax.devices()[0])
    return testing.run(testing.attend_with(run.problem, run.backend), data, times=2), judged_by


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


@pytest.fixture(scope="module")
def report(request):
    """Lines for the end of the run."""
    lines = []
    yield lines
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    for line in lines if terminal else ():
        terminal.ensure_newline()
        terminal.write_line(line)


@pytest.fixture(scope="module")
def measured(request, report):
    """A future of each selected run."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    runs = {c.params["case"]: None for c in calls if c and isinstance(c.params.get("case"), Run)}
    shares = {}
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        yield {run: pool.submit(measure, run) for run in runs}, shares
        pool.shutdown(cancel_futures=True)
    report.append(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {len(shares)} cases right"
    )
    for backend, dtype in sorted({(run.backend, run.dtype) for run in shares}):
        of = {r: x for r, x in shares.items() if (r.backend, r.dtype) == (backend, dtype)}
        worst = max(of, key=of.get)
        report.append(
            f"{backend} {dtype}: {len(of)}, error at most {of[worst]:.2f} of allowed ({worst})"
        )


@pytest.mark.parametrize("case", RUNS, ids=str)
def test_every_case(case, measured):
    futures, shares = measured
    got, (exact, plain, sizes) = futures[case].result()
    shares[case] = testing.assert_close(got, exact, plain, sizes, case.dtype)


def test_kernels_are_the_default_on_a_gpu():
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    assert pa.explain(q, q, q, pa.Causal()).backend == "triton"


def normal(seed: int, *shape: int, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def results_of(mask=None, **options):
    """A jitted function of (q, k, v, dout) to (out, dq, dk, dv)."""

    @jax.jit
    def fn(q, k, v, dout):
        out, pullback = jax.vjp(
            lambda *qkv: pa.mha(*qkv, mask, backend="triton", **options), q, k, v
        )
        return out, *pullback(dout)

    return fn


def finite(arrays) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in arrays)


@pytest.mark.parametrize(
    ("sizes", "mask"),
    [((8300, 1, 16, 128), pa.Full()), ((1600, 729, 16, 72), pa.Full())],
    ids=["padded_rows", "padded_channels"],
)
def test_offsets_past_32_bits(sizes, mask, report):
    # 1600·729·16 rows are 1.34e9 elements at 72 channels, 2.39e9 at 128, which kernels may pad to.
    operands = [normal(i, *sizes) for i in range(4)]
    fn = results_of(mask)
    got = fn(*operands)
    assert finite(got)
    last = [x[-1:] for x in got]
    del got
    alone = [x[-1:] for x in operands]
    want = fn(*alone)
    for name, x, y in zip(("out", "dq", "dk", "dv"), last, want, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        if name in ("out", "dv"):
            np.testing.assert_array_equal(x, y, err_msg=name)
        else:
            one_bit = float(jnp.finfo(jnp.bfloat16).eps)
            limit = _rounding_of_delta(*alone)
            np.testing.assert_allclose(x, y, rtol=one_bit, atol=limit, err_msg=name)
    report.append(f"last of {sizes}: the same sequence alone")


def _rounding_of_delta(q, k, v, dout) -> float:
    """How much dq and dk may differ when XLA sums delta in another order for another batch."""
    q, k, v, dout = (np.abs(np.asarray(x, np.float64)) for x in (q, k, v, dout))
    delta = dout.sum(-1).max() * v.max()
    return float(jnp.finfo(jnp.float32).eps) * delta * max(q.max(), k.max())


def _ids():
    return pa.Document(jnp.asarray(np.repeat(np.arange(9), [1, 200, 63, 64, 65, 300, 100, 200, 7])))


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_many_backward_passes_are_bit_equal(mask, report):
    operands = [normal(i, 2, 1000, 8, 128) for i in range(4)]
    fn = results_of(pa.Causal() if mask == "causal" else pa.Causal() & _ids(), deterministic=True)
    busy = jax.jit(lambda x: jnp.tanh(x @ x) + 1e-3)
    equal = jax.jit(
        lambda a, b: jnp.all(jnp.stack([(x == y).all() for x, y in zip(a, b, strict=True)]))
    )
    first, other, same, count = fn(*operands), normal(9, 1024, 1024), [], 400
    assert finite(first)
    for _ in range(count):
        other = busy(other)
        same.append(equal(first, fn(*operands)))
    assert bool(jnp.all(jnp.stack(same))), f"{count - int(jnp.stack(same).sum())} of {count} differ"
    report.append(f"{count} backward passes, {mask}: bit-equal")


_ENDS = """
import jax, jax.numpy as jnp, numpy as np
import pallas_attn as pa
from pallas_attn import reference

def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

rows = np.array([0, 500, 1023])
holes = np.arange(8) % 2 == 0  # tiles with no work between tiles with work
holes = holes[:, None] & (np.arange(8) % 3 == 0)[None]
for batch, length, heads, kv_heads, mask, cap in (
    (1, 1792, 64, 8, pa.Causal(), None),
    (2, 1024, 32, 32, pa.Causal(), 10.0),
    (1, 1024, 8, 2, pa.BlockSparse(holes, 128, 128), None),
):
    q, dout = normal(0, batch, length, heads, 128), normal(1, batch, length, heads, 128)
    k, v = (normal(i, batch, length, kv_heads, 128) for i in (2, 3))
    fn = lambda *qkv: pa.mha(*qkv, mask, soft_cap=cap, backend="triton")
    out, pullback = jax.vjp(jax.jit(fn), q, k, v)
    for x in (out, *pullback(dout)):
        assert bool(jnp.isfinite(x).all())
    seen = reference.visible(mask, 1, 1, length, length)[:, :, rows]
    want, _ = reference.mha(q[:, rows], k, v, pa.Dense(seen), soft_cap=cap)
    a, b = (np.asarray(x).astype(np.float32) for x in (out[:, rows], want))
    np.testing.assert_allclose(a, b, atol=2e-2, rtol=2e-2)
print("ended")
"""


def test_it_ends():
    # In a process of its own: a kernel that waits for ever cannot be stopped from inside.
    root = Path(__file__).parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", _ENDS]
    given = {"cwd": root, "env": env, "capture_output": True, "text": True, "timeout": 120}
    ended = subprocess.run(command, **given, check=False)
    assert ended.stdout.strip().endswith("ended"), ended.stderr[-2000:]


def test_interpreted_and_compiled_kernels_agree():
    problem = Problem(lens=(97, 97), dims=(64, 64))
    mask = pa.Causal() & pa.SlidingWindow(40)
    data = testing.make_inputs(problem, "float32", mask, "agree")
    tiles = pa.Tiles(*(pa.KernelTiles(32, 32),) * 3)
    attend = testing.attend_with(problem, "triton", tiles)
    compiled = testing.run(attend, data)
    with jax.default_device(_host()), pa.interpret():
        host = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, Operands(*data.operands[:3])))
        out, lse = testing.to_host(attend(host, mask))
    np.testing.assert_allclose(compiled["out"], out, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(compiled["lse"], lse, atol=1e-5, rtol=1e-5)
