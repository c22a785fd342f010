"""Serving problems, their inputs with junk wherever nothing may be read, and what is right."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn import backends, decode_call, gpu, reference, testing
from pallas_attn.mask_core import Position, as_mask

SERVING = [name for name in backends.ALL if decode_call.load(name) is not None]
# Those that take any call; Hopper's takes chunks in 16-bit floats, see test_mosaic_serving.py.
GENERAL = [name for name in SERVING if name != "mosaic_gpu"]


@dataclasses.dataclass(frozen=True)
class Serving:
    """Shapes and options of a serving call.

    `q_lens` is one number for all sequences, or a tuple: then the call is ragged, with `padding`
    tokens after the last sequence.
    """

    lens: tuple[int, ...] = (5, 64, 129)
    q_lens: int | tuple[int, ...] = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    page_size: int = 16
    extra_pages: int = 1
    padding: int = 0
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False
    shared: bool = False

    @property
    def batch(self):
        return len(self.lens)

    @property
    def each(self):
        """New tokens of each sequence."""
        return self.q_lens if isinstance(self.q_lens, tuple) else (self.q_lens,) * self.batch

    @property
    def max_pages(self):
        return max(1, -(-max(self.lens) // self.page_size)) + self.extra_pages


class Data(NamedTuple):
    """Arrays of a serving call, and the same cache without pages for the truth."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    kv_lens: Any
    cu_seqlens: Any
    sinks: Any
    dense_q: Any
    dense_k: Any
    dense_v: Any


def make(case: Serving, seed: str = "serving") -> Data:
    """Random inputs; NaN and Inf past the lengths and in unused pages, junk in unused entries."""
    rng = testing.generator(seed)
    (q_heads, kv_heads), (dim, v_dim), size = case.heads, case.dims, case.page_size
    capacity = case.max_pages * size
    num_pages = case.batch * case.max_pages + 2

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    dense_k, dense_v = (normal(case.batch, capacity, kv_heads, d) for d in (dim, v_dim))
    if case.shared:
        dense_v = dense_k[..., :v_dim]
    k_pages = np.full((num_pages, size, kv_heads, dim), np.nan, np.float32)
    v_pages = np.full((num_pages, size, kv_heads, v_dim), np.inf, np.float32)
    table = rng.choice([-1, 2**30, num_pages], (case.batch, case.max_pages)).astype(np.int32)
    shuffled = rng.permutation(num_pages).astype(np.int32)
    for b, length in enumerate(case.lens):
        for i in range(-(-length // size)):
            page = table[b, i] = shuffled[b * case.max_pages + i]
            used = min(size, length - i * size)
            k_pages[page, :used] = dense_k[b, i * size : i * size + used]
            v_pages[page, :used] = dense_v[b, i * size : i * size + used]
    q_most = max(1, *case.each)
    dense_q = normal(case.batch, q_most, q_heads, dim)
    cu = None
    if isinstance(case.q_lens, tuple):
        rows = [dense_q[b, :n] for b, n in enumerate(case.each)]
        q = np.concatenate([*rows, np.full((case.padding, q_heads, dim), np.nan, np.float32)])
        cu = jnp.asarray(np.cumsum([0, *case.each]), jnp.int32)
    else:
        q = dense_q[:, 0] if case.q_lens == 1 else dense_q
    sinks = jnp.asarray(normal(q_heads)) if case.sinks else None
    floats = (jnp.asarray(x).astype(case.dtype) for x in (q, k_pages, v_pages))
    dense = (jnp.asarray(x).astype(case.dtype) for x in (dense_q, dense_k, dense_v))
    return Data(*floats, jnp.asarray(table), jnp.asarray(case.lens, jnp.int32), cu, sinks, *dense)


def refusal(case: Serving, mask, backend: str) -> str | None:
    """Why a backend does not take a case here, or None when it does."""
    (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    equal, options = isinstance(case.q_lens, int), dict(case.options)
    spec = decode_call.DecodeSpec(
        batch=case.batch, tokens=sum(case.each) + case.padding,
        q_len=case.q_lens if equal else None, page_size=case.page_size, max_pages=case.max_pages,
        paged=True, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, v_dim=v_dim,
        dtype=case.dtype, scale=1.0, has_sinks=case.sinks, shared_kv=case.shared,
        num_splits=options.get("num_splits"),
    )  # fmt: skip
    return decode_call.reason(backend, spec, as_mask(mask), gpu.detect())


def attend(case: Serving, data: Data, mask=None, **more):
    """out and lse through `paged_attention`, jitted, as the truth is laid out."""

    def call(q, k, v, table, lens, cu, sinks, mask):
        return pa.paged_attention(
            q, k, None if case.shared else v, table, lens, cu_seqlens_q=cu, mask=mask, sinks=sinks,
            return_lse=True, v_dim=case.dims[1] if case.shared else None,
            **dict(case.options), **more,
        )  # fmt: skip

    out, lse = testing.compiled(call, *data[:7], mask)(*data[:7], mask)
    return padded(case, np.asarray(out, np.float64), np.asarray(lse, np.float64))


def padded(case: Serving, out, lse):
    """Results as [batch, tokens, heads, ...] and [batch, heads, tokens]; checks the padding."""
    if isinstance(case.q_lens, int):
        if case.q_lens == 1:
            return {"out": out[:, None], "lse": lse[:, :, None]}
        return {"out": out, "lse": lse}
    total = sum(case.each)
    assert not out[total:].any()
    assert np.isneginf(lse[:, total:]).all()
    most = max(1, *case.each)
    wide = np.zeros((case.batch, most, *out.shape[1:]))
    wide_lse = np.full((case.batch, out.shape[1], most), -np.inf)
    start = 0
    for b, n in enumerate(case.each):
        wide[b, :n] = out[start : start + n]
        wide_lse[b, :, :n] = lse[:, start : start + n]
        start += n
    return {"out": wide, "lse": wide_lse}


def truth(case: Serving, data: Data, mask=None):
    """(exact, plain): the same by `reference.mha`, in float64 and in the operands' dtype."""
    rows, capacity = data.dense_q.shape[1], data.dense_k.shape[1]

    def index(n, axis):
        return jnp.arange(n, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(4)])

    lens = jnp.asarray(case.lens, jnp.int32).reshape(-1, 1, 1, 1)
    counts = jnp.asarray(case.each, jnp.int32).reshape(-1, 1, 1, 1)
    token, kv = index(rows, 2), index(capacity, 3)
    last = jnp.int32(capacity - 1)
    position = lens - counts + token
    asked = jnp.clip(position, 0, last) if jax.tree.leaves(mask) else position
    at = Position(index(case.batch, 0), index(case.heads[0], 1), asked, kv, lens, lens)
    seen = as_mask(mask).allowed(at) & (kv < lens) & (token < counts)
    options = {k: v for k, v in case.options if k in ("scale", "soft_cap")}

    def plain(q, k, v, sinks, seen):
        full = jnp.broadcast_to(seen, (case.batch, case.heads[0], rows, capacity))
        return reference.mha(q, k, v, pa.Dense(full), sinks=sinks, **options)

    arrays = (data.dense_q, data.dense_k, data.dense_v, data.sinks)
    rounded = testing.to_host(testing.compiled(plain, *arrays, seen)(*arrays, seen))
    with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, testing.to_host(arrays))
        exact = testing.to_host(testing.compiled(plain, *wide, seen)(*wide, seen))
    return tuple(dict(zip(("out", "lse"), x, strict=True)) for x in (exact, rounded))


def sizes(case: Serving, data: Data):
    """What rounding errors are measured by, see `testing.magnitudes`."""

    def rms(x):
        return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))

    options = dict(case.options)
    scale = abs(options.get("scale") or 1 / math.sqrt(case.dims[0]))
    logit = scale * rms(data.dense_q) * rms(data.dense_k) * math.sqrt(case.dims[0])
    return {"out": rms(data.dense_v), "lse": 1.0 + logit}


def assert_right(case: Serving, mask=None, *, seed="serving", **more):
    """Runs a case and checks it by the rule of `testing.assert_close`; returns the results."""
    data = make(case, seed)
    got = attend(case, data, mask, **more)
    exact, plain = truth(case, data, mask)
    testing.assert_close(got, exact, plain, sizes(case, data), case.dtype)
    return got
