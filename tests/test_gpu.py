"""The kernels for real on an NVIDIA GPU: every case, large offsets, many runs bit-equal, an end.

Runs on a machine that has JAX with CUDA and pytest, no plugins:

    python tests/gpu_tier.py                    in several processes, minutes
    python -m pytest tests/test_gpu.py -m gpu -q -p no:cacheprovider -o addopts=""

All cases compile and run in threads, their references on the CPU; each test then judges its own.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import backends, gpu, testing
from pallas_attn.testing import MASK_CASES, PROBLEMS, SHAPED, Operands, Problem

pytestmark = pytest.mark.gpu


KERNELS = tuple(name for name in backends.ALL if name != "xla")
HOPPER = pytest.param("mosaic_gpu", marks=pytest.mark.hopper)
BACKENDS = [HOPPER if name == "mosaic_gpu" else name for name in KERNELS]


@dataclasses.dataclass(frozen=True)
class Run:
    """One problem under one mask in one dtype on one backend."""

    problem: Problem
    mask_name: str
    dtype: str
    backend: str
    label: str = "base"
    twist: str | None = None  # of TWISTS
    deterministic: bool = False

    def __str__(self):
        more = [self.twist] if self.twist else []
        more += ["deterministic"] if self.deterministic else []
        return "-".join([self.backend, self.label, self.mask_name, self.dtype, *more])


def _grow(operands, rows):
    """Operands whose logits grow along the keys, by about 100 in all, where rows is 1."""
    q, k, *rest = operands
    q_rows = jnp.asarray(rows(np.arange(q.shape[1])), q.dtype)[None, :, None, None]
    ramp = jnp.linspace(0.0, 32.0 * k.shape[-1] ** -0.5, k.shape[1], dtype=k.dtype)
    return Operands(q + 3 * q_rows, k + ramp[None, :, None, None], *rest)


# Inputs that make a running maximum move late, often, or far: kernels may put off rescaling.
TWISTS = {
    "growing": lambda operands: _grow(operands, lambda i: np.ones_like(i)),
    "growing_in_some_rows": lambda operands: _grow(operands, lambda i: i % 37 == 5),
    "falling": lambda operands: operands._replace(
        k=_grow(operands, lambda i: np.ones_like(i)).k[:, ::-1], q=operands.q + 3
    ),
    "extreme": lambda operands: operands._replace(q=60 * operands.q, k=60 * operands.k),
}

TWISTED = {
    "growing": ("full", "causal"),
    "growing_in_some_rows": ("full", "causal_documents"),
    "falling": ("causal",),
    "extreme": ("full", "causal"),
}

# Several default tiles long, and a bit.
LONG = Problem(lens=(300, 300), dims=(64, 64))
DIMS = {
    "d64": Problem(lens=(520, 520), dims=(64, 64)),
    "d128": Problem(lens=(520, 520), dims=(128, 128)),
    "d192_128": Problem(lens=(330, 520), dims=(192, 128)),
    "d256": Problem(lens=(330, 520), dims=(256, 256)),
}
OPTIONS = Problem(lens=(520, 400), dims=(128, 128), bias="hqk", soft_cap=5.0, sinks=True)
UNBIASED = dataclasses.replace(OPTIONS, bias=None)
HALVES = ("bfloat16", "float16")


def _runs(backend):
    """All runs of a backend with kernels."""
    hopper = backend == "mosaic_gpu"
    floats = HALVES if hopper else (*HALVES, "float32")
    yield from (Run(LONG, mask, "bfloat16", backend) for mask in MASK_CASES)
    if hopper:
        masks = ("full", "causal", "causal_documents", "dense", "predicate_arrays", "window")
        yield from (Run(LONG, mask, "float16", backend) for mask in masks)
        yield from (Run(LONG, mask, "bfloat16", backend, deterministic=True) for mask in masks)
    else:
        masks = ("causal_documents", "predicate_arrays", "dense")
        yield from (Run(LONG, mask, "float32", backend) for mask in masks)
    for c in SHAPED:
        dtype = {"full": "float16"}.get(c.mask_name, "bfloat16")
        yield Run(PROBLEMS[c.problem_name], c.mask_name, dtype, backend, c.problem_name)
    for label, problem in DIMS.items():
        for mask in ("full", "causal"):
            for dtype in floats:
                # float32 of 256 channels goes to plain JAX.
                other = "xla" if (label, dtype) == ("d256", "float32") else backend
                yield Run(problem, mask, dtype, other, label)
        for twist, masks in TWISTED.items():
            yield from (Run(problem, m, "bfloat16", backend, label, twist) for m in masks)
        if hopper:
            yield Run(problem, "causal", "bfloat16", backend, label, deterministic=True)
    yield from (Run(UNBIASED, "causal_window", dtype, backend, "unbiased") for dtype in HALVES)
    yield from (Run(OPTIONS, "causal_window", d, backend, "options") for d in floats[::2])


RUNS = [
    *(run for backend in KERNELS for run in _runs(backend)),
    *(Run(OPTIONS, "causal_documents", d, "xla", "options") for d in ("bfloat16", "float32")),
]


def refusal(run: Run) -> str | None:
    """What a backend that is asked by name says where it is known not to take the call."""
    if run.backend == "mosaic_gpu" and run.problem.bias is not None:
        return "takes no bias"
    return None


def _as_param(run: Run):
    marks = [pytest.mark.hopper] if run.backend == "mosaic_gpu" else []
    return pytest.param(run, marks=marks, id=str(run))


def attend_with(run: Run):
    """(operands, mask) -> (out, lse) by the backend of a run."""
    problem = run.problem

    def attend(operands: Operands, mask):
        q, k, v, bias, sinks = operands
        return pa.mha(
            q, k, v, mask, bias=bias, sinks=sinks, scale=problem.scale, soft_cap=problem.soft_cap,
            return_lse=True, backend=run.backend, deterministic=run.deterministic,
        )  # fmt: skip

    return attend


@functools.cache
def _truth(run: Run):
    """Data on the device and what results are judged by, of a run without its backend."""
    with jax.default_device(_host()):
        name = str(run)
        mask = MASK_CASES[run.mask_name](testing.generator(name), *run.problem.mask_shape)
        data = testing.make_inputs(run.problem, run.dtype, mask, name)
        if run.twist:
            data = data._replace(operands=TWISTS[run.twist](data.operands))
        exact, plain = testing.expected_of(run.problem, data)
        sizes = testing.magnitudes(run.problem, data)
    data = jax.device_put(data, jax.devices()[0])
    if run.dtype == "float32":
        # The rule allows twice the error of the plain computation in the same dtype. In float32
        # that is the order of the sums alone, and the host's matmuls sum in another one, with
        # half the error of the device's: so the plain computation is made where the kernels run.
        # The exact results stay float64 on the host. (16-bit errors are those of the type.)
        plain = testing.run(testing.attend_plainly(run.problem), data)
    return data, (exact, plain, sizes)


_LOCKS = collections.defaultdict(threading.Lock)


def measure(run: Run):
    """(results of two calls, what they are judged by); in any thread."""
    work = dataclasses.replace(run, backend="any", deterministic=False)
    with _LOCKS[work]:
        data, judged_by = _truth(work)
    fn = testing.compiled(testing.with_gradients(attend_with(run)), data)
    return [testing.to_host(fn(data)) for _ in range(2)], judged_by


def equal_names(run: Run, names):
    """The results that two calls must give bit for bit: dq may be summed in any order."""
    free = run.backend == "mosaic_gpu" and not run.deterministic
    return [name for name in names if not (free and name == "dq")]


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


@pytest.fixture(scope="module")
def measured(request, report):
    """A future of each selected run."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    runs = {c.params["case"]: None for c in calls if c and isinstance(c.params.get("case"), Run)}
    shares = {}
    threads = int(os.environ.get("GPU_TIER_THREADS", min(16, os.cpu_count() or 1)))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
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


@pytest.mark.parametrize("case", [_as_param(run) for run in RUNS if not refusal(run)])
def test_every_case(case, measured):
    futures, shares = measured
    (first, second), judged_by = futures[case].result()
    shares[case] = max(testing.assert_close(got, *judged_by, case.dtype) for got in (first, second))
    for name in equal_names(case, first):
        np.testing.assert_array_equal(first[name], second[name], err_msg=f"{name} of two calls")


@pytest.mark.parametrize("run", [_as_param(run) for run in RUNS if refusal(run)])
def test_what_is_known_to_be_refused(run):
    data = testing.make_inputs(run.problem, run.dtype)
    with pytest.raises(NotImplementedError, match=refusal(run)):
        jax.eval_shape(attend_with(run), data.operands, pa.Causal())


@pytest.mark.hopper
def test_float32_is_refused_by_the_hopper_kernels():
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
    with pytest.raises(NotImplementedError, match="float16 and bfloat16"):
        pa.explain(q, q, q, backend="mosaic_gpu")


def test_kernels_are_the_default_on_a_gpu():
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    here = gpu.detect()
    best = next(name for name in KERNELS if name != "mosaic_gpu" or here.is_hopper)
    assert pa.explain(q, q, q, pa.Causal()).backend == best


def normal(seed: int, *shape: int, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def results_of(backend, mask=None, **options):
    """A jitted function of (q, k, v, dout) to (out, dq, dk, dv)."""

    @jax.jit
    def fn(q, k, v, dout):
        attend = functools.partial(pa.mha, mask=mask, backend=backend, **options)
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    return fn


def finite(arrays) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in arrays)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [(8300, 1, 16, 128), (1600, 729, 16, 72)],
    ids=["padded_rows", "padded_channels"],
)
def test_offsets_past_32_bits(sizes, backend, report):
    # 1600·729·16 rows are 1.34e9 elements at 72 channels, 2.39e9 at 128, which kernels may pad to.
    operands = [normal(i, *sizes) for i in range(4)]
    fn = results_of(backend)
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
    report.append(f"{backend}, last of {sizes}: the same sequence alone")


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_past_16_bits(backend, report):
    # 66,000 tiles of 64 queries: past 65,535, and with a window each is as cheap as in a short row.
    length, part, left = 66_000 * 64, 1024, 100
    mask = pa.SlidingWindow(left, 0)
    operands = [normal(i, 1, length, 1, 64) for i in range(4)]
    fn = results_of(backend, mask)
    last = [np.asarray(x[:, -part:], np.float32) for x in fn(*operands)]
    want = [np.asarray(x, np.float32) for x in fn(*(x[:, -part:] for x in operands))]
    for name, x, y in zip(("out", "dq", "dk", "dv"), last, want, strict=True):
        # The first rows of the part alone lack what comes before it.
        np.testing.assert_allclose(x[:, left:], y[:, left:], atol=2e-2, rtol=2e-2, err_msg=name)
    report.append(f"{backend}, {length} tokens: the last {part} as alone")


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_and_sequences_past_16_bits(backend, report):
    sizes = (2, 5, 66_000, 64)
    operands = [normal(i, *sizes) for i in range(4)]
    fn = results_of(backend, pa.Causal())
    got = [x[-1:, :, -2:] for x in fn(*operands)]
    want = fn(*(x[-1:, :, -2:] for x in operands))
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, atol=1e-2, rtol=1e-2, err_msg=name)
    report.append(f"{backend}, {sizes}: the last two heads as alone")


def _rounding_of_delta(q, k, v, dout) -> float:
    """How much dq and dk may differ when XLA sums delta in another order for another batch."""
    q, k, v, dout = (np.abs(np.asarray(x, np.float64)) for x in (q, k, v, dout))
    delta = dout.sum(-1).max() * v.max()
    return float(jnp.finfo(jnp.float32).eps) * delta * max(q.max(), k.max())


def _ids():
    return pa.Document(jnp.asarray(np.repeat(np.arange(9), [1, 200, 63, 64, 65, 300, 100, 200, 7])))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "default"])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_many_backward_passes(mask, deterministic, backend, report):
    # Other kernels run between, so that blocks start and end in other orders.
    count, operands = 2000, [normal(i, 2, 1000, 8, 128) for i in range(4)]
    mask = pa.Causal() if mask == "causal" else pa.Causal() & _ids()
    fn = results_of(backend, mask, deterministic=deterministic)
    busy = jax.jit(lambda x: jnp.tanh(x @ x) + 1e-3)

    @jax.jit
    def compare(first, other):
        """Whether they are bit-equal, finite, and equal to within a rounding of the greatest."""
        equal, close = [], []
        for x, y in zip(first, other, strict=True):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            equal.append((x == y).all())
            close.append(jnp.max(jnp.abs(x - y)) <= 2**-8 * jnp.max(jnp.abs(x)))  # NaN fails
        return jnp.stack([jnp.stack(equal).all(), jnp.stack(close).all()])

    first, other, found = fn(*operands), normal(9, 1024, 1024), []
    assert finite(first)
    for _ in range(count):
        other = busy(other)
        found.append(compare(first, fn(*operands)))
    equal, close = np.asarray(jnp.stack(found)).sum(0)
    assert close == count, f"{count - close} of {count} are not finite, or far from the first"
    if deterministic:
        assert equal == count, f"{count - equal} of {count} differ"
    kind = "deterministic" if deterministic else "default"
    report.append(f"{backend}, {count} backward passes, {mask}, {kind}: {equal} bit-equal")


_ENDS = """
import sys
import jax, jax.numpy as jnp, numpy as np
import pallas_attn as pa
from pallas_attn import reference

def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

backend, name = sys.argv[1:]
holes = np.arange(8) % 2 == 0  # tiles with no work between tiles with work
holes = holes[:, None] & (np.arange(8) % 3 == 0)[None]
lens = jnp.asarray([0, 1, 0, 700], jnp.int32)
batch, length, heads, kv_heads, dim, mask, cap = {
    "grouped": (1, 1792, 64, 8, 128, pa.Causal(), None),
    "capped": (2, 1024, 32, 32, 128, pa.Causal(), 10.0),
    "holes": (1, 1024, 8, 2, 128, pa.BlockSparse(holes, 128, 128), None),
    "no_work": (2, 1024, 8, 2, 64, pa.Causal() & ~pa.Causal(), None),
    "lengths": (4, 1000, 8, 8, 256, pa.Lengths(kv_lens=lens) & pa.Causal(), None),
    "one_query": (3, 1, 32, 4, 128, None, None),
}[name]
q, dout = normal(0, batch, length, heads, dim), normal(1, batch, length, heads, dim)
k, v = (normal(i, batch, length, kv_heads, dim) for i in (2, 3))
fn = lambda *qkv: pa.mha(*qkv, mask, soft_cap=cap, backend=backend)
out, pullback = jax.vjp(jax.jit(fn), q, k, v)
for x in (out, *pullback(dout)):
    assert bool(jnp.isfinite(x).all())
rows = np.unique([0, length // 2, length - 1])
seen = reference.visible(mask, batch, 1, length, length)[:, :, rows]
want, _ = reference.mha(q[:, rows], k, v, pa.Dense(seen), soft_cap=cap)
a, b = (np.asarray(x).astype(np.float32) for x in (out[:, rows], want))
np.testing.assert_allclose(a, b, atol=2e-2, rtol=2e-2)
print("ended")
"""
ENDS = ("grouped", "capped", "holes", "no_work", "lengths", "one_query")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ENDS)
def test_it_ends(name, backend):
    # In a process of its own: a kernel that waits for ever cannot be stopped from inside.
    root = Path(__file__).parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", _ENDS, backend, name]
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
