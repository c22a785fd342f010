"""Named problems, masks, random inputs and the rule for errors, for tests, benchmarks and tuners.

    CASES["base-causal"]            a problem and a mask, by name
    inputs(case, "bfloat16")        operands, mask and cotangents, seeded by the case's name
    run(attend, data)               out, lse and every gradient, in one jitted function
    expected(case, "bfloat16")      the same in float64, and of the plain computation in that dtype
    assert_close(got, ...)          error <= 2 x the plain computation's error + a rounding floor

A new mask is a line in `MASK_CASES`, a new shape or option one in `PROBLEMS`: all backends meet it.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn import gpu, reference


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes and score options of a call.

    Attributes:
        batch: sequences.
        lens: (q_len, kv_len).
        heads: (q_heads, kv_heads).
        dims: (head_dim, v_dim).
        bias: the axes of [b]atch, [h]eads, [q]ueries, [k]eys that the bias has; None for no bias.
        scale, soft_cap: as in `mha`.
        sinks: whether there are sinks.
    """

    batch: int = 2
    lens: tuple[int, int] = (97, 97)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    bias: str | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        """[batch, q_heads, q_len, kv_len]."""
        return self.batch, self.heads[0], *self.lens

    @property
    def bias_shape(self) -> tuple[int, int, int, int] | None:
        """Rank-4 shape of the bias, or None."""
        if self.bias is None:
            return None
        sizes = zip("bhqk", self.mask_shape, strict=True)
        b, h, q, k = (size if axis in self.bias else 1 for axis, size in sizes)
        return b, h, q, k


PROBLEMS: dict[str, Problem] = {
    "base": Problem(),
    # Heads.
    "heads_equal": Problem(heads=(3, 3)),
    "heads_6_2": Problem(heads=(6, 2)),
    "heads_5_1": Problem(heads=(5, 1)),
    "heads_64_1": Problem(batch=1, lens=(33, 33), heads=(64, 1)),
    # Lengths: within a tile, at its edge, past it; one of a kind; unequal.
    "one_query": Problem(lens=(1, 97)),
    "one_key": Problem(lens=(97, 1)),
    "one_of_each": Problem(lens=(1, 1)),
    "within_a_tile": Problem(lens=(8, 8)),
    "whole_tiles": Problem(lens=(64, 64)),
    "past_a_tile": Problem(lens=(65, 64)),
    "more_keys": Problem(lens=(40, 129)),
    "more_queries": Problem(lens=(129, 40)),
    # Head dimensions.
    "dim_8": Problem(dims=(8, 8)),
    "dim_40": Problem(dims=(40, 40)),
    "dim_72": Problem(dims=(72, 72)),
    "dim_80": Problem(dims=(80, 80)),
    "dim_96": Problem(dims=(96, 96)),
    "dim_64_96": Problem(dims=(64, 96)),
    "dim_96_64": Problem(dims=(96, 64)),
    "dim_32_8": Problem(dims=(32, 8)),
    "dim_192_128": Problem(batch=1, dims=(192, 128)),
    "dim_256": Problem(batch=1, dims=(256, 256)),
    # Score options.
    "scale_negative": Problem(scale=-0.125),
    "scale_zero": Problem(scale=0.0),
    "soft_cap": Problem(soft_cap=2.0),
    "sinks": Problem(sinks=True),
    "bias_bhqk": Problem(bias="bhqk"),
    "bias_hqk": Problem(bias="hqk"),
    "bias_bqk": Problem(bias="bqk"),
    "bias_hk": Problem(bias="hk"),
    "bias_bq": Problem(bias="bq"),
    "bias_scalar": Problem(bias=""),
    "everything": Problem(
        lens=(70, 101), heads=(6, 2), dims=(40, 24), bias="hqk", scale=0.3, soft_cap=3.0, sinks=True
    ),
}  # fmt: skip


def _integers(rng, low: int, high: int, *shape: int):
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)


def _coins(rng, chance: float, *shape: int):
    return jnp.asarray(rng.random(shape) < chance)


def _cross_documents(rng, b, m, n, low=0):
    """Ascending ids: documents one after the other, padding (negative ids) first."""
    return pa.Document(*(jnp.sort(_integers(rng, low, 4, b, x), axis=-1) for x in (m, n)))


def _one_row_of_documents(rng, m, n):
    ids = jnp.sort(_integers(rng, 0, 9, max(m, n)))
    return pa.Document(ids) if m == n else pa.Document(ids[:m], ids[:n])


def _half_lens(rng, b, n):
    """Lengths from 0 to n, the first sequence's 0."""
    return _integers(rng, 0, n + 1, b).at[0].set(0)


def _block_map(rng, lens, block_q: int, block_kv: int, *lead: int):
    rows, columns = -(-lens[0] // block_q), -(-lens[1] // block_kv)
    block_map = _coins(rng, 0.5, *lead, rows, columns)
    return pa.BlockSparse(block_map.at[..., 0, :].set(False), block_q, block_kv)


def _stripes():
    return pa.Predicate(lambda batch, head, q, kv: (q + 2 * kv) % 5 < 2)


def _routed(rng, b, h, m, n):
    """Closes over arrays: a bucket for each query and key of a sequence, a reach for each head."""
    q_bucket, kv_bucket = _integers(rng, 0, 3, b, m), _integers(rng, 0, 3, b, n)
    reach = _integers(rng, 0, n, h)

    def fn(batch, head, q, kv):
        return (q_bucket[batch, q] == kv_bucket[batch, kv]) | (abs(q - kv) < reach[head])

    return pa.Predicate(fn)


# name -> f(rng, batch, q_heads, q_len, kv_len). Arrays made here are operands of the jitted calls.
MASK_CASES: dict[str, Callable[..., pa.Mask]] = {
    "full": lambda r, b, h, m, n: pa.Full(),
    "causal": lambda r, b, h, m, n: pa.Causal(),
    "causal_offset": lambda r, b, h, m, n: pa.Causal(-9),
    "causal_offsets": lambda r, b, h, m, n: pa.Causal(_integers(r, -m // 2, n, b)),
    "causal_bottom_right": lambda r, b, h, m, n: pa.Causal(align="bottom_right"),
    "window": lambda r, b, h, m, n: pa.SlidingWindow(17, 9),
    "window_self": lambda r, b, h, m, n: pa.SlidingWindow(0, 0),
    "window_at_tile_edge": lambda r, b, h, m, n: pa.SlidingWindow(32, 31),
    "window_open_left": lambda r, b, h, m, n: pa.SlidingWindow(None, 5),
    "window_open_right": lambda r, b, h, m, n: pa.SlidingWindow(40, None),
    "window_bottom_right": lambda r, b, h, m, n: pa.SlidingWindow(12, 0, align="bottom_right"),
    "window_offsets": lambda r, b, h, m, n: pa.SlidingWindow(12, 3, offset=_integers(r, -m, n, b)),
    "prefix": lambda r, b, h, m, n: pa.PrefixLM(33),
    "prefixes": lambda r, b, h, m, n: pa.PrefixLM(_half_lens(r, b, n)),
    "chunked": lambda r, b, h, m, n: pa.Chunked(24),
    "dilated": lambda r, b, h, m, n: pa.Dilated(4, 7),
    "dilated_by_1": lambda r, b, h, m, n: pa.Dilated(20, 1),
    "lengths_q": lambda r, b, h, m, n: pa.Lengths(q_lens=_half_lens(r, b, m)),
    "lengths_kv": lambda r, b, h, m, n: pa.Lengths(kv_lens=_half_lens(r, b, n)),
    "lengths": lambda r, b, h, m, n: pa.Lengths(
        _integers(r, 1, m + 1, b), _half_lens(r, b, n)[::-1]
    ),
    "length_static": lambda r, b, h, m, n: pa.Lengths(kv_lens=(n + 1) // 2),
    "documents": lambda r, b, h, m, n: _cross_documents(r, b, m, n),
    "documents_self": lambda r, b, h, m, n: _one_row_of_documents(r, m, n),
    "documents_padded": lambda r, b, h, m, n: _cross_documents(r, b, m, n, low=-2),
    "documents_alternating": lambda r, b, h, m, n: pa.Document(
        _integers(r, -1, 4, b, m), _integers(r, -1, 4, b, n)
    ),
    "block_sparse": lambda r, b, h, m, n: _block_map(r, (m, n), 16, 16),
    "block_sparse_odd": lambda r, b, h, m, n: _block_map(r, (m, n), 24, 10),
    "block_sparse_heads": lambda r, b, h, m, n: _block_map(r, (m, n), 32, 16, h),
    "block_sparse_batch_heads": lambda r, b, h, m, n: _block_map(r, (m, n), 16, 64, b, h),
    "predicate": lambda r, b, h, m, n: _stripes(),
    "predicate_arrays": _routed,
    "dense": lambda r, b, h, m, n: pa.Dense(_coins(r, 0.5, b, h, m, n)),
    "dense_queries_keys": lambda r, b, h, m, n: pa.Dense(_coins(r, 0.3, m, n)),
    "dense_heads": lambda r, b, h, m, n: pa.Dense(_coins(r, 0.6, h, 1, n)),
    "dense_batch_queries": lambda r, b, h, m, n: pa.Dense(_coins(r, 0.6, b, 1, m, 1)),
    "nothing": lambda r, b, h, m, n: pa.Causal() & ~pa.Causal(),
    "causal_window": lambda r, b, h, m, n: pa.Causal() & pa.SlidingWindow(31),
    "causal_documents": lambda r, b, h, m, n: _cross_documents(r, b, m, n, -1) & pa.Causal(),
    "causal_chunked": lambda r, b, h, m, n: pa.Chunked(32) & pa.Causal(),
    "causal_block_sparse": lambda r, b, h, m, n: pa.Causal() & _block_map(r, (m, n), 16, 16, h),
    "causal_dense": lambda r, b, h, m, n: pa.Dense(_coins(r, 0.7, b, 1, m, n)) & pa.Causal(),
    "sinks_and_window": lambda r, b, h, m, n: (
        pa.Causal() & (pa.SlidingWindow(12) | pa.Lengths(kv_lens=4))
    ),
    "documents_lengths_prefix": lambda r, b, h, m, n: (
        _cross_documents(r, b, m, n) & pa.Lengths(kv_lens=_half_lens(r, b, n)) & pa.PrefixLM(20)
    ),
    "not_window": lambda r, b, h, m, n: ~pa.SlidingWindow(33, 0),
    "not_documents_or_causal": lambda r, b, h, m, n: (
        ~(_cross_documents(r, b, m, n, -1) | pa.Causal())
    ),
    "predicate_window": lambda r, b, h, m, n: _stripes() & pa.SlidingWindow(40, 8),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem under a mask, both by name."""

    problem_name: str
    mask_name: str

    @property
    def name(self) -> str:
        """The key in `CASES`, and the seed of the inputs."""
        return f"{self.problem_name}-{self.mask_name}"

    @property
    def problem(self) -> Problem:
        """Its shapes and options."""
        return PROBLEMS[self.problem_name]


MASKED = tuple(Case("base", name) for name in MASK_CASES)
SHAPED = tuple(
    Case(name, mask)
    for name in PROBLEMS
    for mask in ("full", "causal_documents")
    if name != "base" and not (mask == "full" and name.startswith(("dim_", "bias_")))
)
CASES: dict[str, Case] = {case.name: case for case in (*MASKED, *SHAPED)}


class Operands(NamedTuple):
    """What is differentiated; bias and sinks may be None."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    sinks: Any = None


class Data(NamedTuple):
    """The inputs of one run; cotangents are non-zero on every row, masked ones too."""

    operands: Operands
    mask: Any
    dout: Any
    dlse: Any


def generator(name: str) -> np.random.Generator:
    """Random numbers that depend on a name only."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def make_inputs(problem: Problem, dtype: str, mask=None, seed: str = "") -> Data:
    """Standard normal operands and cotangents for a problem.

    Args:
        problem: shapes and options.
        dtype: of q, k, v, bias; sinks are float32.
        mask: a mask expression or None, put into the result as it is.
        seed: any text.
    """
    rng = generator(seed)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)

    (q_len, kv_len), (q_heads, kv_heads), (dim, v_dim) = problem.lens, problem.heads, problem.dims
    b = problem.batch
    q, k = normal(b, q_len, q_heads, dim), normal(b, kv_len, kv_heads, dim)
    v, dout = normal(b, kv_len, kv_heads, v_dim), normal(b, q_len, q_heads, v_dim)
    dlse = normal(b, q_heads, q_len, dtype="float32")
    bias = None if problem.bias_shape is None else normal(*problem.bias_shape)
    sinks = normal(q_heads, dtype="float32") if problem.sinks else None
    return Data(Operands(q, k, v, bias, sinks), mask, dout, dlse)


def inputs(case: Case, dtype: str) -> Data:
    """The operands, mask and cotangents of a case."""
    mask = MASK_CASES[case.mask_name](generator(case.name), *case.problem.mask_shape)
    return make_inputs(case.problem, dtype, mask, case.name)


def attend_with(problem: Problem, backend: str | None, tiles: pa.Tiles | None = None):
    """(operands, mask) -> (out, lse) through `mha`."""

    def attend(operands: Operands, mask):
        q, k, v, bias, sinks = operands
        return pa.mha(
            q, k, v, mask, bias=bias, sinks=sinks, scale=problem.scale, soft_cap=problem.soft_cap,
            return_lse=True, backend=backend, tiles=tiles,
        )  # fmt: skip

    return attend


def attend_plainly(problem: Problem):
    """(operands, mask) -> (out, lse) by definition, see `reference.mha`."""

    def attend(operands: Operands, mask):
        q, k, v, bias, sinks = operands
        options = {"scale": problem.scale, "soft_cap": problem.soft_cap}
        return reference.mha(q, k, v, mask, bias=bias, sinks=sinks, **options)

    return attend


def with_gradients(attend):
    """Data -> every result by name: out, lse, dq, dk, dv; dbias and dsinks where there are any."""

    def fn(data: Data):
        (out, lse), pullback = jax.vjp(lambda operands: attend(operands, data.mask), data.operands)
        (grads,) = pullback((data.dout.astype(out.dtype), data.dlse.astype(lse.dtype)))
        named = {f"d{name}": g for name, g in grads._asdict().items() if g is not None}
        return {"out": out, "lse": lse, **named}

    return fn


def compiled(fn, *args):
    """`fn` compiled for such arguments; not optimised, which costs up to minutes and saves less."""
    if jax.default_backend() == "cpu":
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    else:
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(fn).lower(*args).compile(compiler_options=options)


def run(attend, data: Data, times: int = 1) -> dict[str, np.ndarray]:
    """Every result of `with_gradients`, as float64 arrays on the host.

    Raises:
        AssertionError: when several runs do not give the same bits.
    """
    fn = compiled(with_gradients(attend), data)
    first, *others = (to_host(fn(data)) for _ in range(times))
    for other in others:
        for name, x in first.items():
            np.testing.assert_array_equal(x, other[name], err_msg=f"{name} of two runs")
    return first


def to_host(results):
    """Arrays of any dtype as float64 NumPy arrays."""
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), results)


def expected_of(problem: Problem, data: Data):
    """(exact, plain): the results in float64, and of the plain computation in the operands' dtype.

    Both by `reference.mha` and JAX's own differentiation, from the same rounded operands.
    """
    plain = run(attend_plainly(problem), data)
    with jax.enable_x64(True):
        operands, mask, dout, dlse = data
        operands, dout, dlse = jax.tree.map(jnp.asarray, to_host((operands, dout, dlse)))
        exact = run(attend_plainly(problem), Data(operands, mask, dout, dlse))
    return exact, plain


@functools.lru_cache(maxsize=512)
def expected(case: Case, dtype: str):
    """`expected_of` a case, remembered for the next backend."""
    return expected_of(case.problem, inputs(case, dtype))


def magnitudes(problem: Problem, data: Data) -> dict[str, float]:
    """The typical size of what each result is a sum of.

    Rounding hurts a sum by the size of its terms, also where these cancel: with one visible key dq
    is 0 by dp - delta, two numbers of the size of |dout|·|v|.
    """

    def rms(x):
        return float(np.sqrt(np.mean(np.square(np.asarray(x).astype(np.float64)))))

    operands = data.operands
    dim, v_dim = problem.dims
    scale = dim**-0.5 if problem.scale is None else abs(problem.scale)
    q, k, v, dout = (rms(x) for x in (*operands[:3], data.dout))
    logit = scale * q * k * dim**0.5
    dlogit = dout * v * v_dim**0.5 + rms(data.dlse)
    # Rows that a sum runs over: independent errors grow with the root.
    rows = float(problem.batch * problem.heads[0] * problem.lens[0])
    group = problem.heads[0] / problem.heads[1]
    sums = {"out": v, "lse": 1.0 + logit, "dq": scale * dlogit * k, "dsinks": dlogit * rows**0.5}
    sums |= {"dk": scale * dlogit * q * group**0.5, "dv": dout * group**0.5}
    if problem.bias_shape is not None:
        summed = np.prod(problem.mask_shape) / np.prod(problem.bias_shape)
        sums["dbias"] = dlogit * float(summed) ** 0.5
    return sums


def assert_close(got, exact, plain, sizes, dtype: str, *, factor: float = 2.0):
    """Raises AssertionError unless every result is about as right as the plain computation's.

    For each result x, in the greatest and in the root mean square error over all elements:

        |x - exact| <= factor·|plain - exact| + floor
        floor = (eps(dtype) + eps(float32)·|lse|)·(|exact| + typical size of its terms)

    factor is FlashAttention's 2: another order of the same roundings. The floor is for what only
    kernels round, and for where the plain computation is exact by luck (one visible key, gradients
    of zero): one rounding of the result and one of its terms, see `magnitudes` (two in the greatest
    error); and, in gradients, the probabilities computed again from an lse that float32 holds to
    within eps·|lse|, which is their relative error. The lse's own eps is float32's; it must be -inf
    exactly where the exact one is, and out and dq exactly 0 there.

    Args:
        got, exact, plain: results by name, see `run` and `expected_of`; all of `got` are checked.
        sizes: from `magnitudes`.
        dtype: of the operands.
        factor: see above.

    Returns:
        the greatest error as a share of what is allowed.
    """
    faults, worst = [], 0.0
    blind = np.isneginf(exact["lse"])
    if not np.array_equal(np.isneginf(got["lse"]), blind):
        faults.append("lse: -inf elsewhere than expected")
    for name in ("out", "dq"):
        if name in got and got[name].swapaxes(1, 2)[blind].any():
            faults.append(f"{name}: not 0 on rows that see no key")
    eps32 = float(jnp.finfo("float32").eps)
    lse_size = float(np.abs(exact["lse"][~blind]).max(initial=0.0))
    for name, x in got.items():
        if x.shape != exact[name].shape:
            faults.append(f"{name}: shape {x.shape}, expected {exact[name].shape}")
            continue
        eps = eps32 if name == "lse" else float(jnp.finfo(dtype).eps)
        if name.startswith("d"):
            eps += eps32 * lse_size
        counts = ~np.isneginf(exact[name])
        error, allowed = (np.abs(y[counts] - exact[name][counts]) for y in (x, plain[name]))
        size = np.abs(exact[name][counts])
        for kind, norm, tail in (("max", _max, 2.0), ("rms", _rms, 1.0)):
            limit = factor * norm(allowed) + eps * (norm(size) + tail * sizes[name])
            worst = max(worst, norm(error) / limit if limit else 0.0)
            # Written so that NaN fails.
            if not norm(error) <= limit:
                faults.append(
                    f"{name}: {kind} error {norm(error):.3g} > {limit:.3g} "
                    f"(plain {norm(allowed):.3g}, size {norm(size):.3g})"
                )
    if faults:
        raise AssertionError("; ".join(faults))
    return worst


def _max(x) -> float:
    return float(x.max(initial=0.0))


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def assert_close_to_reference(attend, problem: Problem, data: Data, known=None):
    """Runs `attend` twice on `data`: bit-equal, and by the error rule of `assert_close`.

    Args:
        attend: (operands, mask) -> (out, lse), such as `attend_with` makes.
        problem, data: what is computed.
        known: (exact, plain) of `expected_of`, when at hand.

    Returns:
        the results, float64 arrays by name.
    """
    exact, plain = known or expected_of(problem, data)
    got = run(attend, data, times=2)
    assert_close(got, exact, plain, magnitudes(problem, data), data.operands.q.dtype.name)
    return got


@contextlib.contextmanager
def running(backend: str | None):
    """Inside, `backend` runs on this machine: for real on a GPU, by interpretation on a CPU."""
    here = backend in (None, "xla") or gpu.detect() is not None
    with contextlib.nullcontext() if here else pa.interpret():
        yield


def small_tiles(backend: str) -> pa.Tiles | None:
    """Tiles that cut short sequences into blocks, another way in each kernel; defaults on a GPU."""
    if backend != "xla" and jax.default_backend() != "cpu":
        return None
    return pa.Tiles(pa.KernelTiles(32, 16), pa.KernelTiles(16, 32), pa.KernelTiles(32, 32))
