"""Attention to a cache: every backend against the reference, whatever the pages, lengths, masks."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_truth import GENERAL, Serving, assert_right, attend, make, sizes, truth

import pallas_attn as pa
from pallas_attn import combine, decode_call, gpu, serving, testing, work

BASE = Serving()
RAGGED = Serving(lens=(5, 0, 70, 33, 40), q_lens=(5, 0, 19, 1, 2), padding=3)


@pytest.fixture(params=GENERAL)
def backend(request):
    with testing.running(request.param):
        yield request.param


def tiles(backend, **changes):
    """Tiles that cut short sequences; the default on a GPU."""
    if backend == "xla" or jax.default_backend() != "cpu":
        return None
    return dataclasses.replace(pa.DecodeTiles(16, 16, 4, 2, programs_per_sm=1), **changes)


CASES = {
    "pages_of_1": (dataclasses.replace(BASE, page_size=1), None),
    "pages_of_3": (dataclasses.replace(BASE, page_size=3), None),
    "pages_of_19": (dataclasses.replace(BASE, page_size=19), None),
    "pages_of_48": (dataclasses.replace(BASE, page_size=48), None),
    "pages_of_128": (dataclasses.replace(BASE, page_size=128, extra_pages=0), None),
    "pages_of_256": (dataclasses.replace(BASE, page_size=256), None),
    "length_0": (Serving(lens=(0, 33, 1), q_lens=2), None),
    "heads_5_1": (Serving(heads=(5, 1), lens=(30, 7)), None),
    "heads_32_1": (Serving(heads=(32, 1), lens=(30, 7)), None),
    "heads_equal": (Serving(heads=(3, 3), lens=(30, 7)), None),
    "dims_24_40": (Serving(dims=(24, 40), lens=(30, 7)), None),
    "dims_96_64": (Serving(dims=(96, 64), lens=(30, 7)), None),
    "bfloat16": (dataclasses.replace(BASE, dtype="bfloat16"), None),
    "latent": (Serving(heads=(8, 1), dims=(80, 64), shared=True, lens=(30, 40)), None),
    "latent_in_part": (Serving(heads=(8, 1), dims=(48, 40), shared=True, lens=(30, 40)), None),
    "several_tokens": (Serving(q_lens=5, lens=(5, 64, 129)), pa.Causal()),
    "more_tokens_than_keys": (Serving(q_lens=5, lens=(2, 0, 40)), pa.Causal()),
    "all_of_the_keys": (Serving(q_lens=3, lens=(30, 7)), None),
    "window": (Serving(q_lens=2), pa.Causal() & pa.SlidingWindow(20)),
    "window_of_self": (BASE, pa.SlidingWindow(0, 0)),
    "bottom_right": (Serving(q_lens=2), pa.SlidingWindow(9, 0, align="bottom_right")),
    "sinks_and_window": (
        Serving(q_lens=2, sinks=True),
        pa.Causal() & (pa.SlidingWindow(9) | pa.Lengths(kv_lens=4)),
    ),
    "chunked": (Serving(q_lens=3), pa.Chunked(24) & pa.Causal()),
    "prefix": (
        Serving(q_lens=9, lens=(30, 40)), pa.PrefixLM(jnp.asarray([35, 10], jnp.int32))
    ),
    "predicate": (Serving(q_lens=2), pa.Predicate(lambda b, h, q, kv: (q + 2 * kv + h) % 3 > b)),
    "score_options": (
        Serving(sinks=True, options=(("scale", 0.7), ("soft_cap", 3.0)), lens=(0, 40)), None
    ),
    "negative_scale": (Serving(options=(("scale", -0.3),), lens=(30, 7)), None),
    "ragged": (RAGGED, pa.Causal()),
    "ragged_window": (dataclasses.replace(RAGGED, page_size=7), pa.Causal() & pa.SlidingWindow(6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_is_right(backend, name):
    case, mask = CASES[name]
    assert_right(case, mask, seed=name, backend=backend, tiles=tiles(backend))


@pytest.mark.parametrize("gather", [False, True])
def test_pages_by_page_and_by_row(gather):
    with testing.running("triton"):
        wide = tiles("triton", block_kv=64, gather=gather)
        assert_right(BASE, backend="triton", tiles=wide)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_split_gives_the_same(backend, splits):
    case = Serving(lens=(0, 5, 129), q_lens=2, sinks=True)
    mask = pa.Causal() & pa.SlidingWindow(100)
    assert_right(case, mask, backend=backend, tiles=tiles(backend), num_splits=splits)


def test_splits_chosen_from_the_lengths(backend):
    """More keys than the least part: the device decides, for ragged and equal batches."""
    long = Serving(lens=(700, 3), page_size=64, sinks=True)
    mixed = Serving(lens=(500, 40, 300), q_lens=(1, 20, 2), page_size=64, padding=2)
    for case, mask in ((long, None), (mixed, pa.Causal())):
        assert_right(case, mask, backend=backend, tiles=tiles(backend, block_kv=64))


def test_contiguous_cache(backend):
    case = Serving(lens=(0, 33, 129), q_lens=2, page_size=131, extra_pages=0)
    data = make(case)
    mask = pa.Causal()
    k, v = (
        jnp.where((jnp.arange(131) < data.kv_lens[:, None])[..., None, None], x, jnp.nan)
        for x in (data.dense_k, data.dense_v)
    )

    def call(q, k, v, lens):
        return pa.mha_decode(
            q, k, v, lens, mask=mask, return_lse=True, backend=backend, tiles=tiles(backend)
        )

    out, lse = testing.compiled(call, data.q, k, v, data.kv_lens)(data.q, k, v, data.kv_lens)
    got = {"out": np.asarray(out, np.float64), "lse": np.asarray(lse, np.float64)}
    exact, plain = truth(case, data, mask)
    testing.assert_close(got, exact, plain, sizes(case, data), "float32")


def test_layout_of_tokens_does_not_matter(backend):
    """Equal batches, ragged ones and one token at a time agree."""
    case = Serving(lens=(20, 33), q_lens=3)
    data = make(case)
    equal = attend(case, data, pa.Causal(), backend=backend, tiles=tiles(backend))
    ragged = dataclasses.replace(case, q_lens=(3, 3))
    flat = data._replace(
        q=data.q.reshape(6, *data.q.shape[2:]), cu_seqlens=jnp.asarray([0, 3, 6], jnp.int32)
    )
    other = attend(ragged, flat, pa.Causal(), backend=backend, tiles=tiles(backend))
    for name, x in equal.items():
        np.testing.assert_allclose(other[name], x, rtol=1e-5, atol=1e-6)
    one = Serving(lens=(20, 33))
    last = data._replace(q=data.q[:, -1], dense_q=data.dense_q[:, -1:])
    single = attend(one, last, backend=backend, tiles=tiles(backend))
    np.testing.assert_allclose(single["out"], equal["out"][:, -1:], rtol=1e-5, atol=1e-6)


def test_new_lengths_and_tables_compile_nothing(backend):
    traces = []

    @jax.jit
    def call(q, k, v, table, lens, cu):
        traces.append(1)
        return pa.paged_attention(
            q, k, v, table, lens, cu_seqlens_q=cu, mask=pa.Causal(), backend=backend,
            tiles=tiles(backend),
        )  # fmt: skip

    rng = testing.generator("recompiling")
    pages = jnp.asarray(rng.standard_normal((8, 16, 2, 16), np.float32))
    q = jnp.asarray(rng.standard_normal((6, 4, 16), np.float32))
    for lens, cu in (((20, 3), (0, 4, 6)), ((0, 64), (0, 0, 6)), ((16, 16), (0, 1, 2))):
        table = jnp.asarray(rng.permutation(8).reshape(2, 4), jnp.int32)
        call(q, pages, pages, table, jnp.asarray(lens, jnp.int32), jnp.asarray(cu, jnp.int32))
    before = decode_call.attend._cache_size()
    for lens in ((20, 3), (0, 64)):
        pa.paged_attention(
            q[:2], pages, pages, table, jnp.asarray(lens, jnp.int32), backend=backend,
            tiles=tiles(backend),
        )  # fmt: skip
    assert len(traces) == 1
    assert decode_call.attend._cache_size() <= before + 1


def test_x64_mode_changes_nothing(backend):
    for case, mask in ((dataclasses.replace(RAGGED, sinks=True), pa.Causal()), (BASE, None)):
        data = make(case)
        want = attend(case, data, mask, backend=backend, tiles=tiles(backend))
        with jax.enable_x64(True):
            got = attend(case, data, mask, backend=backend, tiles=tiles(backend))
        for name, x in want.items():
            np.testing.assert_allclose(got[name], x, rtol=1e-6, atol=1e-6)


def test_vmap(backend):
    """Over layers: pools of their own, one table."""
    rng = testing.generator("vmap")
    pages = jnp.asarray(rng.standard_normal((2, 6, 16, 2, 16), np.float32))
    q = jnp.asarray(rng.standard_normal((2, 2, 4, 16), np.float32))
    table, lens = jnp.asarray([[5, 1, 0], [2, 3, 4]], jnp.int32), jnp.asarray([40, 7], jnp.int32)

    def call(q, pages, lens):
        return pa.paged_attention(
            q, pages, pages, table, lens, backend=backend, tiles=tiles(backend), num_splits=2
        )

    got = jax.vmap(call, (0, 0, None))(q, pages, lens)
    for i in range(2):
        np.testing.assert_allclose(got[i], call(q[i], pages[i], lens), rtol=1e-5, atol=1e-6)


def test_no_derivative_by_a_clear_error(backend):
    pages = jnp.ones((2, 16, 2, 16))
    table, lens = jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32)

    def loss(q):
        return pa.paged_attention(q, pages, pages, table, lens, backend=backend).sum()

    with pytest.raises(NotImplementedError, match="no derivatives"):
        jax.grad(loss)(jnp.ones((1, 4, 16)))


@pytest.mark.parametrize(
    ("target", "block", "page_size", "form"),
    [
        ("h200", 256, 16, "fused"),
        ("h200", 256, 1, "two_stage"),
        ("h200", 16, 1, "fused"),
        ("a100", 256, 16, "two_stage"),
    ],
)
def test_the_form_is_what_was_measured_as_the_faster(target, block, page_size, form):
    """Of 32 heads: fused for few queries a block, and for many where Hopper's kernel takes them."""
    pool, lists = jnp.ones((64, page_size, 8, 128), jnp.bfloat16), jnp.ones((2, 4), jnp.int32)
    rows = jnp.ones((2, block, 32, 128), jnp.bfloat16)
    with gpu.target(target):
        chosen = serving._choose_form(rows, pool, pool, lists, {"backend": None})
    assert chosen == form


@pytest.mark.parametrize("form", ["fused", "two_stage", None])
def test_page_subsets(backend, form):
    rng = testing.generator("subset")
    pages = [jnp.asarray(rng.standard_normal((9, 16, 2, d), np.float32)) for d in (16, 24)]
    pages = [x.at[8].set(jnp.nan) for x in pages]
    q = jnp.asarray(rng.standard_normal((2, 12, 4, 16), np.float32))
    lists = np.stack([rng.permutation(8)[:4] for _ in range(6)]).astype(np.int32).reshape(2, 3, 4)
    lens = np.asarray([[64, 16, 0], [50, 33, 1]], np.int32)
    for b, i in np.ndindex(2, 3):
        lists[b, i, -(-lens[b, i] // 16) :] = 2**30
    out, lse = pa.page_subset_attention(
        q, *pages, lists, lens, form=form, return_lse=True, backend=backend
    )
    for b, i in np.ndindex(2, 3):
        rows = slice(4 * i, 4 * i + 4)
        if lens[b, i] == 0:
            assert not out[b, rows].any()
            assert np.isneginf(lse[b, :, rows]).all()
            continue
        used = lists[b, i, : -(-lens[b, i] // 16)]
        k, v = (x[used].reshape(1, -1, 2, x.shape[-1])[:, : lens[b, i]] for x in pages)
        want, want_lse = pa.mha(q[b : b + 1, rows], k, v, return_lse=True, backend="xla")
        np.testing.assert_allclose(out[b, rows], want[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[b, :, rows], want_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("shape", [(8,), (8, 16, 8), (8, 2000, 8, 128)])
def test_a_pool_of_another_shape_is_named(shape, block):
    """Whichever form would be chosen; without the types that tests check first."""
    q, pool = jnp.ones((2, block, 32, 128), jnp.bfloat16), jnp.ones(shape, jnp.bfloat16)
    lists, lens = jnp.zeros((2, 1, 4), jnp.int32), jnp.ones((2, 1), jnp.int32)
    with gpu.target("h200"), pytest.raises(ValueError, match="k_pages"):
        jax.eval_shape(inspect.unwrap(pa.page_subset_attention), q, pool, pool, lists, lens)


def test_merging_is_associative_and_complete():
    rng = testing.generator("merge")
    out, lse = rng.standard_normal((4, 7, 8)), rng.standard_normal((4, 7)) * 30
    out, lse = jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)
    out, lse = out.at[1, 2].set(0.0).at[:, 5].set(0.0), lse.at[1, 2].set(-jnp.inf)
    lse = lse.at[:, 5].set(-jnp.inf)
    parts = list(zip(out, lse, strict=True))
    left = combine.merge(*combine.merge(*combine.merge(*parts[0], *parts[1]), *parts[2]), *parts[3])
    right = combine.merge(
        *parts[0], *combine.merge(*parts[1], *combine.merge(*parts[2], *parts[3]))
    )
    for other in (left, right, combine.merge_all(out[::-1], lse[::-1])):
        for x, y in zip(other, combine.merge_all(out, lse), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert not left[0][5].any()
    assert np.isneginf(left[1][5])
    sink = jnp.float32(2.0)
    with_sink, lse_sink = combine.merge_all(out, lse, sink)
    total = np.logaddexp(np.asarray(left[1], np.float64), 2.0)
    np.testing.assert_allclose(lse_sink[:5], total[:5], rtol=1e-5)
    share = np.exp(np.asarray(left[1], np.float64) - total)[:5, None]
    np.testing.assert_allclose(with_sink[:5], share * np.asarray(left[0])[:5], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("ragged", [False, True])
def test_every_part_is_some_programs(ragged, num_splits):
    """All blocks and parts exactly once, within the static grid, for more than one survey."""
    rng = testing.generator("work")
    batch, rows = 150, rng.integers(0, 9, 150)
    lens = jnp.asarray(rng.integers(0, 3000, batch), jnp.int32)
    cu = jnp.asarray(np.cumsum([0, *rows]), jnp.int32) if ragged else None
    tokens = int(rows.sum()) + 5 if ragged else batch * 3
    spec = decode_call.DecodeSpec(
        batch=batch, tokens=tokens, q_len=None if ragged else 3, page_size=16, max_pages=190,
        paged=True, q_heads=16, kv_heads=2, head_dim=16, v_dim=16, dtype="float32", scale=1.0,
        num_splits=num_splits,
    )  # fmt: skip
    call = decode_call.DecodeCall(spec, pa.DecodeTiles(16, 32), "triton", 132)
    inputs = decode_call.DecodeInputs(None, None, None, None, lens, cu, pa.Full(), None)

    def read(array, index, where):
        return jnp.where(where, array[jnp.clip(index, 0, array.shape[0] - 1)], 0)

    index = jnp.arange(work.num_items(call), dtype=jnp.int32)
    items = jax.jit(jax.vmap(lambda i: work.item_of(call, inputs, i, read)))(index)
    blocks = jnp.arange(work.num_blocks(call), dtype=jnp.int32)
    blocks = jax.jit(jax.vmap(lambda i: work.block_of(call, inputs, i, read)))(blocks)
    found = {}
    for i in np.flatnonzero(items.exists):
        seq, block, split, splits = (int(x[i]) for x in items[:4])
        assert split < splits <= work.max_splits(call)
        found.setdefault((seq, block), []).append((int(i), split))
    counts = [*rows, 5] if ragged else [3] * batch
    expected = {(s, b) for s, n in enumerate(counts) for b in range(-(-int(n) * 8 // 16))}
    assert set(found) == expected
    listed = {}
    for i in np.flatnonzero(blocks.exists):
        key = int(blocks.seq[i]), int(blocks.block[i])
        listed[key] = int(blocks.first_item[i]), int(blocks.splits[i])
    assert set(listed) == expected
    for key, parts in found.items():
        first, splits = listed[key]
        assert parts == [(first + n, n) for n in range(splits)]


GOOD = {
    "q": jnp.ones((2, 4, 16)), "k_pages": jnp.ones((6, 16, 2, 16)),
    "v_pages": jnp.ones((6, 16, 2, 16)), "page_table": jnp.zeros((2, 3), jnp.int32),
    "kv_lens": jnp.ones((2,), jnp.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k_pages": jnp.ones((2, 1025, 2, 16))}, ValueError, "page_size: got 1025"),
        ({"q": jnp.ones((3, 4, 16))}, ValueError, "q: got shape"),
        ({"q": jnp.ones((2, 3, 16))}, ValueError, "heads: got 3"),
        ({"q": jnp.ones((2, 4, 8))}, ValueError, "head_dim: got 8"),
        ({"q": jnp.ones((2, 4, 16), jnp.bfloat16)}, ValueError, "dtype: got q bfloat16"),
        ({"kv_lens": jnp.ones((3,), jnp.int32)}, ValueError, "kv_lens: got shape"),
        ({"v_pages": None}, ValueError, "v_dim: got None"),
        ({"v_pages": jnp.ones((5, 16, 2, 16))}, ValueError, "v_pages: got shape"),
        ({"v_dim": 8}, ValueError, "v_dim: got 8"),
        ({"num_splits": 0}, ValueError, "num_splits: got 0"),
        ({"cu_seqlens_q": jnp.zeros((2,), jnp.int32)}, ValueError, "cu_seqlens_q: got shape"),
        ({"kv_lens": np.array([49, 1])}, ValueError, r"kv_lens: got \[49, 1\], expected 0 to 48"),
        ({"kv_lens": np.array([-1, 1])}, ValueError, "kv_lens: got"),
        (
            {"kv_lens": np.array([17, 1]), "page_table": np.array([[0, 6, 99], [5, -1, -1]])},
            ValueError,
            r"page_table: got \[6\], expected 0 to 5",
        ),
        (
            {"q": jnp.ones((5, 4, 16)), "cu_seqlens_q": np.array([0, 3, 2])},
            ValueError,
            r"cu_seqlens_q: got \[0, 3, 2\], expected offsets that ascend",
        ),
        ({"soft_cap": -1.0}, ValueError, "soft_cap"),
        ({"sinks": jnp.ones((3,))}, ValueError, "sinks"),
        ({"backend": "no"}, ValueError, "backend: got 'no'"),
        ({"mask": pa.Causal(jnp.zeros((3,), jnp.int32))}, ValueError, "offset: got shape"),
    ],
)
def test_wrong_arguments_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        pa.paged_attention(**{**GOOD, **changes})


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="triton runs on a GPU")
def test_a_backend_by_name_never_falls_back():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        pa.paged_attention(**GOOD, backend="triton")
    wide = {n: jnp.ones((*GOOD[n].shape[:-1], 640)) for n in ("q", "k_pages", "v_pages")}
    with pa.interpret():
        with pytest.raises(NotImplementedError, match="up to 576"):
            pa.paged_attention(**{**GOOD, **wide}, backend="triton")
        assert pa.paged_attention(**{**GOOD, **wide}).shape == (2, 4, 640)
