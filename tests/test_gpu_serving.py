"""Attention to a cache for real on an NVIDIA GPU, with default tiles: `gpu_tier.py -k serving`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_truth import GENERAL, Serving, assert_right, make, refusal, sizes, truth
from test_decode import CASES

import pallas_attn as pa
from pallas_attn import decode_call, gpu, testing

pytestmark = pytest.mark.gpu

KERNELS = [name for name in GENERAL if name != "xla"]
HOPPER = "mosaic_gpu"
CAUSAL = pa.Causal()
WINDOW = CAUSAL & pa.SlidingWindow(1000)

# Several parts a sequence, with every length from none to whole pages.
BASE = Serving(
    lens=(0, 1, 777, 4096, 5003), heads=(32, 8), dims=(128, 128), page_size=64, dtype="bfloat16"
)
CHUNKS = dataclasses.replace(
    BASE, lens=(700, 0, 1030, 64, 2000), q_lens=(700, 0, 130, 1, 1), padding=5
)
LATENT = dataclasses.replace(BASE, lens=(0, 700, 1500), heads=(16, 1), dims=(576, 512), shared=True)


def base(**changes):
    return dataclasses.replace(BASE, **changes)


LARGE = {
    **{f"pages_of_{n}": (base(page_size=n), None) for n in (1, 3, 16, 48, 64, 128, 1024)},
    "sixteen_tokens": (base(q_lens=16), CAUSAL),
    "window": (base(q_lens=2), WINDOW),
    "options": (
        base(q_lens=2, sinks=True, options=(("scale", 0.2), ("soft_cap", 5.0))), WINDOW
    ),
    "prefix_of_arrays": (base(q_lens=9), pa.PrefixLM(jnp.arange(5, dtype=jnp.int32) * 900)),
    "float16": (base(dtype="float16"), None),
    "float32": (base(dtype="float32", lens=(0, 1, 777, 1500)), None),
    "heads_64_1": (base(heads=(64, 1)), None),
    "heads_equal": (base(heads=(8, 8)), None),
    "dim_64": (base(dims=(64, 64)), None),
    "dim_256": (base(heads=(8, 2), dims=(256, 256)), None),
    "dim_192_128": (base(heads=(8, 4), dims=(192, 128)), None),
    "dim_96_40": (base(heads=(8, 4), dims=(96, 40)), None),
    "latent_16": (LATENT, None),
    "latent_128": (dataclasses.replace(LATENT, heads=(128, 1)), None),
    "latent_two_tokens": (dataclasses.replace(LATENT, q_lens=2), CAUSAL),
    "chunks": (CHUNKS, CAUSAL),
    "chunks_pages_of_16": (dataclasses.replace(CHUNKS, page_size=16), CAUSAL),
    "chunks_window": (dataclasses.replace(CHUNKS, sinks=True), CAUSAL & pa.SlidingWindow(200)),
}  # fmt: skip


# What Hopper's kernel takes: chunks, over pages of 8 keys and more, and equal batches of many.
MIXED = dataclasses.replace(
    BASE, lens=(500, 0, 430, 64, 1503, 333), q_lens=(500, 0, 130, 1, 400, 3), padding=5
)


def mixed(**changes):
    return dataclasses.replace(MIXED, **changes)


PREFILL = {
    **{f"pages_of_{n}": (mixed(page_size=n), CAUSAL) for n in (8, 16, 48, 64, 256, 1024)},
    "whole": (mixed(), None),
    "window": (mixed(sinks=True), CAUSAL & pa.SlidingWindow(200)),
    "window_pages_of_16": (mixed(page_size=16), WINDOW),
    "chunked": (mixed(page_size=16), pa.Chunked(300) & CAUSAL),
    "prefix": (mixed(), pa.PrefixLM(jnp.arange(6, dtype=jnp.int32) * 150)),
    "options": (mixed(options=(("scale", 0.2), ("soft_cap", 5.0)), sinks=True), CAUSAL),
    "growing_logits": (mixed(options=(("scale", 3.0),)), CAUSAL),
    "negative_scale": (mixed(options=(("scale", -0.3),)), CAUSAL),
    "float16": (mixed(dtype="float16"), CAUSAL),
    "heads_64_1": (mixed(heads=(64, 1)), CAUSAL),
    "heads_equal": (mixed(heads=(5, 5)), CAUSAL),
    "heads_6_2": (mixed(heads=(6, 2)), CAUSAL),
    "dim_64": (mixed(dims=(64, 64)), CAUSAL),
    "dim_64_window_pages_of_16": (mixed(dims=(64, 64), page_size=16), WINDOW),
    "dim_256": (mixed(heads=(8, 2), dims=(256, 256)), CAUSAL),
    "dim_256_pages_of_16": (mixed(heads=(8, 2), dims=(256, 256), page_size=16), WINDOW),
    "dim_192_128": (mixed(heads=(8, 4), dims=(192, 128)), CAUSAL),
    "dim_40_24": (mixed(heads=(8, 4), dims=(40, 24)), CAUSAL),
    "dim_128_64": (mixed(heads=(8, 4), dims=(128, 64)), CAUSAL),
    "equal": (mixed(lens=(0, 100, 777, 2048), q_lens=100, padding=0), CAUSAL),
    "equal_of_64": (mixed(lens=(64, 100, 777, 2048), q_lens=64, padding=0, page_size=16), None),
    "more_tokens_than_keys": (mixed(lens=(5, 0, 300), q_lens=200, padding=0), CAUSAL),
}  # fmt: skip


@pytest.mark.hopper
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_is_right(name):
    case, mask = PREFILL[name]
    assert refusal(case, mask, HOPPER) is None
    assert_right(case, mask, seed=name, backend=HOPPER)


@pytest.mark.hopper
@pytest.mark.parametrize("name", LARGE)
def test_hopper_takes_it_or_says_why(name):
    case, mask = LARGE[name]
    if refusal(case, mask, HOPPER) is None:
        assert_right(case, mask, seed=name, backend=HOPPER)
    else:
        with pytest.raises(NotImplementedError, match=HOPPER):
            assert_right(case, mask, seed=name, backend=HOPPER)


@pytest.mark.hopper
def test_contiguous_cache_on_hopper():
    case = mixed(lens=(0, 100, 777, 1000), q_lens=100, padding=0, page_size=1000, extra_pages=0)
    data = make(case)
    there = (jnp.arange(1000) < data.kv_lens[:, None])[..., None, None]
    k, v = (jnp.where(there, x, jnp.nan) for x in (data.dense_k, data.dense_v))
    options = {"mask": CAUSAL, "return_lse": True, "backend": HOPPER}
    out, lse = jax.jit(lambda *x: pa.mha_decode(*x, **options))(data.q, k, v, data.kv_lens)
    got = {"out": np.asarray(out, np.float64), "lse": np.asarray(lse, np.float64)}
    testing.assert_close(got, *truth(case, data, CAUSAL), sizes(case, data), case.dtype)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", LARGE)
def test_large_is_right(name, backend):
    case, mask = LARGE[name]
    assert_right(case, mask, seed=name, backend=backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_small_is_right(name, backend):
    case, mask = CASES[name]
    case = dataclasses.replace(case, dtype="bfloat16")
    assert_right(case, mask, seed=name, backend=backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("splits", [1, 2, 7, 33])
def test_any_split_gives_the_same(splits, backend):
    assert_right(base(q_lens=2, sinks=True), WINDOW, backend=backend, num_splits=splits)


def test_plain_jax_is_right_too():
    for case, mask in ((BASE, None), (CHUNKS, CAUSAL)):
        assert_right(case, mask, backend="xla")


def test_kernels_are_the_default():
    spec = decode_call.DecodeSpec(
        batch=1, tokens=1, q_len=1, page_size=16, max_pages=4, paged=True, q_heads=8, kv_heads=2,
        head_dim=128, v_dim=128, dtype="bfloat16", scale=1.0,
    )  # fmt: skip
    assert decode_call.choose(spec, pa.Full(), None) in KERNELS
    if gpu.detect().is_hopper:
        chunk = dataclasses.replace(spec, tokens=512, q_len=512, max_pages=64)
        assert decode_call.choose(chunk, pa.Causal(), None) == HOPPER


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def batches(count, tokens, pages, max_pages, page_size):
    """Tables, lengths and offsets of batches of 16 sequences: others each time, some empty."""
    rng = testing.generator("batches")
    for _ in range(count):
        lens = rng.integers(0, max_pages * page_size + 1, 16)
        new = np.minimum(rng.multinomial(tokens, np.ones(16) / 16), lens)
        table = rng.integers(0, pages, (16, max_pages))
        yield tuple(jnp.asarray(x, jnp.int32) for x in (table, lens, np.cumsum([0, *new])))


@pytest.mark.parametrize("backend", [*KERNELS, pytest.param(HOPPER, marks=pytest.mark.hopper)])
def test_many_batches(backend, report):
    """One program for all; every call gives the same bits again, whatever ran between."""
    tokens = 1000 if backend == HOPPER else 200
    q, k, v = normal(0, tokens, 32, 128), normal(1, 300, 64, 8, 128), normal(2, 300, 64, 8, 128)
    traces = []

    @jax.jit
    def attend(table, lens, cu):
        traces.append(1)
        options = {"cu_seqlens_q": cu, "mask": CAUSAL, "return_lse": True, "backend": backend}
        return pa.paged_attention(q, k, v, table, lens, **options)

    busy = jax.jit(lambda x: jnp.tanh(x @ x) + 1e-3)

    @jax.jit
    def compare(first, other):
        equal = [(x == y).all() for x, y in zip(first, other, strict=True)]
        return jnp.stack([*equal, jnp.isfinite(first[0]).all()]).all()

    given = list(batches(100, tokens, 300, 40, 64))
    first, other, found = [attend(*x) for x in given], normal(9, 1024, 1024), []
    for _ in range(5):
        for x, y in zip(given, first, strict=True):
            other = busy(other)
            found.append(compare(y, attend(*x)))
    equal = int(np.asarray(jnp.stack(found)).sum())
    report.append(f"{backend}, 500 serving calls: {equal} bit-equal and finite")
    assert (equal, len(traces)) == (500, 1)


@pytest.mark.parametrize("backend", KERNELS)
def test_pool_past_32_bits(backend, report):
    # 70,000 pages of 16 x 16 x 128 are 2.29e9 elements; the sequence lies in the last ones.
    pages, length = 70_000, 300
    k, v = (jnp.full((pages, 16, 16, 128), jnp.nan, jnp.bfloat16) for _ in range(2))
    last = jnp.arange(pages - 19, pages, dtype=jnp.int32)
    new = [normal(i, 19, 16, 16, 128) for i in (1, 2)]
    fill = jax.jit(lambda pool, x: pool.at[last].set(x), donate_argnums=0)
    k, v = (fill(pool, x) for pool, x in zip((k, v), new, strict=True))
    q, lens = normal(3, 1, 32, 128), jnp.asarray([length], jnp.int32)
    out = pa.paged_attention(q, k, v, last[None], lens, backend=backend)
    alone = jnp.arange(19, dtype=jnp.int32)[None]
    want = pa.paged_attention(q, *new, alone, lens, backend=backend)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(want, np.float32))
    report.append(f"{backend}, the last of {pages} pages: the same sequence alone")


@pytest.mark.parametrize("backend", KERNELS)
def test_sequences_past_16_bits(backend, report):
    count = 66_000
    q, k, v = normal(0, count, 4, 64), normal(1, 50, 16, 2, 64), normal(2, 50, 16, 2, 64)
    rng = testing.generator("many")
    table = jnp.asarray(rng.integers(0, 50, (count, 3)), jnp.int32)
    lens = jnp.asarray(rng.integers(1, 49, count), jnp.int32)
    attend = jax.jit(lambda *x: pa.paged_attention(x[0], k, v, *x[1:], backend=backend))
    got = attend(q, table, lens)
    want = attend(q[-300:], table[-300:], lens[-300:])
    got, want = (np.asarray(x, np.float32) for x in (got[-300:], want))
    np.testing.assert_array_equal(got, want)
    report.append(f"{backend}, {count} sequences of a serving call: the last 300 as alone")


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("backend", [*KERNELS, None])
def test_page_subsets(backend, page_size):
    rng = testing.generator("subsets")
    pages, block, blocks, keys = 4096 // page_size, 48, 5, 1024
    lists = rng.integers(0, pages, (2, blocks, keys // page_size))
    lens = rng.integers(0, keys + 1, (2, blocks))
    lens[0, 0] = 0
    q = normal(0, 2, block * blocks, 16, 128)
    k, v = (normal(i, pages, page_size, 4, 128) for i in (1, 2))
    arrays = (q, k, v, jnp.asarray(lists, jnp.int32), jnp.asarray(lens, jnp.int32))

    def run(form, backend, *arrays):
        call = jax.jit(
            lambda *x: pa.page_subset_attention(*x, form=form, return_lse=True, backend=backend)
        )
        return [np.asarray(x, np.float64) for x in call(*arrays)]

    with jax.enable_x64(True):
        wide = (np.asarray(x).astype(np.float64) for x in arrays[:3])
        exact = run("two_stage", "xla", *map(jnp.asarray, wide), *arrays[3:])
    plain = run("two_stage", "xla", *arrays)
    names = ("out", "lse")
    judged = [dict(zip(names, x, strict=True)) for x in (exact, plain)]
    for form in ("fused", "two_stage", None):
        got = dict(zip(names, run(form, backend, *arrays), strict=True))
        testing.assert_close(got, *judged, {"out": 1.0, "lse": 2.0}, "bfloat16")


def test_appending_is_in_place():
    cache = pa.PagedKV.empty(64, 16, 4, 64, batch=3, max_pages=8)
    table = np.random.default_rng(0).permutation(64)[:24].reshape(3, 8)
    cache = dataclasses.replace(cache, page_table=jnp.asarray(table, jnp.int32))
    new = normal(1, 3, 40, 4, 64)
    cache = cache.append(new[:, :30], -new[:, :30])
    where = cache.k_pages.unsafe_buffer_pointer()
    for t in range(30, 40):
        cache = cache.append(new[:, t], -new[:, t])
    assert cache.k_pages.unsafe_buffer_pointer() == where
    for b in range(3):
        for pages, want in ((cache.k_pages, new), (cache.v_pages, -new)):
            flat = pages[table[b]].reshape(-1, 4, 64)[:40]
            np.testing.assert_array_equal(
                np.asarray(flat, np.float32), np.asarray(want[b], np.float32)
            )
