"""`PagedKV`: appending token by token, in chunks and raggedly, and what attention makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_attn as pa
from pallas_attn import serving, testing

TABLE = np.asarray([[4, 1, 9], [0, 7, 3], [5, 2, 8]], np.int32)


def empty(page_size=4, **options):
    cache = pa.PagedKV.empty(
        11, page_size, 2, 8, batch=3, max_pages=3, dtype=jnp.float32, **options
    )
    return jax.tree_util.tree_unflatten(
        jax.tree.structure(cache),
        [jnp.asarray(TABLE) if x.shape == TABLE.shape else x for x in jax.tree.leaves(cache)],
    )


def keys_of(cache, b):
    length = int(cache.kv_lens[b])
    flat = np.asarray(cache.k_pages)[TABLE[b]].reshape(-1, *cache.k_pages.shape[2:])
    return flat[:length]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=4),
    st.booleans(),
)
def test_append(steps, ragged):
    rng = testing.generator("append")
    cache, want = empty(), [np.zeros((0, 2, 8), np.float32) for _ in range(3)]
    for counts in steps:
        new = rng.standard_normal((3, 5, 2, 8), np.float32)
        for b, n in enumerate(counts):
            want[b] = np.concatenate([want[b], new[b, :n]])[: cache.capacity]
        if ragged:
            rows = np.zeros((16, 2, 8), np.float32)
            rows[: sum(counts)] = np.concatenate([new[b, :n] for b, n in enumerate(counts)])
            cu = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
            cache = cache.append(jnp.asarray(rows), jnp.asarray(-rows), cu_seqlens_q=cu)
        else:
            k = jnp.asarray(new)
            cache = cache.append(k, -k, q_lens=jnp.asarray(counts, jnp.int32))
        for b in range(3):
            np.testing.assert_array_equal(keys_of(cache, b), want[b])
    np.testing.assert_array_equal(cache.v_pages, -cache.k_pages)
    # Pages that no table names were never written.
    assert not np.asarray(cache.k_pages)[[6, 10]].any()


def test_append_is_in_place_and_compiles_once():
    cache = empty()
    token = jnp.ones((3, 2, 8))
    cache = cache.append(token, token)
    before, size = cache.k_pages, pa.paged._write._cache_size()
    where = before.unsafe_buffer_pointer()
    cache = cache.append(2 * token, token)
    assert before.is_deleted()
    assert cache.k_pages.unsafe_buffer_pointer() == where
    assert pa.paged._write._cache_size() == size
    np.testing.assert_array_equal(cache.kv_lens, [2, 2, 2])


def test_append_in_jit_with_traced_counts():
    @jax.jit
    def step(cache, token, counts):
        return cache.append(token[:, None], token[:, None], q_lens=counts)

    cache = step(empty(), jnp.ones((3, 2, 8)), jnp.asarray([1, 0, 1], jnp.int32))
    np.testing.assert_array_equal(cache.kv_lens, [1, 0, 1])


def test_decoding_equals_the_tail_of_prefill():
    """Tokens appended one by one attend as the rows of one causal call."""
    rng = testing.generator("tail")
    length = 11
    q, k, v = (jnp.asarray(rng.standard_normal((3, length, h, 8), np.float32)) for h in (4, 2, 2))
    whole = pa.mha(q, k, v, pa.Causal(), backend="xla")
    cache = empty()
    cache = cache.append(k[:, :6], v[:, :6])
    first = pa.paged_attention(
        q[:, :6], cache.k_pages, cache.v_pages, cache.page_table, cache.kv_lens, mask=pa.Causal()
    )
    np.testing.assert_allclose(first, whole[:, :6], rtol=1e-5, atol=1e-6)
    for t in range(6, length):
        cache = cache.append(k[:, t], v[:, t])
        out = pa.paged_attention(
            q[:, t], cache.k_pages, cache.v_pages, cache.page_table, cache.kv_lens
        )
        np.testing.assert_allclose(out, whole[:, t], rtol=1e-5, atol=1e-6)


def test_latent_cache_has_no_values():
    cache = empty(v_dim=0)
    assert cache.v_pages is None
    cache = cache.append(jnp.ones((3, 2, 8)))
    np.testing.assert_array_equal(cache.kv_lens, [1, 1, 1])
    with pytest.raises(ValueError, match="v: expected"):
        cache.append(jnp.ones((3, 2, 8)), jnp.ones((3, 2, 8)))


def test_gathered_pages_hold_no_junk():
    pages = jnp.full((4, 2, 1, 3), jnp.nan).at[2].set(1.0).at[3, 0].set(2.0)
    table = jnp.asarray([[2, 3, 2**30], [-1, -1, -1]], jnp.int32)
    dense = serving.gather_pages(pages, table, jnp.asarray([3, 0], jnp.int32))
    np.testing.assert_array_equal(dense[:, :, 0, 0], [[1, 1, 2, 0, 0, 0], [0] * 6])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": jnp.ones((3, 2, 7))}, "k: got shape"),
        ({"k": jnp.ones((2, 2, 8)), "v": jnp.ones((2, 2, 8))}, "k: got shape"),
        ({"k": jnp.ones((3, 2, 8), jnp.bfloat16)}, "k: got dtype bfloat16"),
        ({"v": jnp.ones((3, 1, 2, 8))}, "v: got shape"),
        ({"q_lens": jnp.ones((2,), jnp.int32)}, "q_lens: got shape"),
        ({"cu_seqlens_q": jnp.ones((3,), jnp.int32)}, "cu_seqlens_q: got shape"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    good = {"k": jnp.ones((3, 2, 8)), "v": jnp.ones((3, 2, 8))}
    with pytest.raises(ValueError, match=words):
        empty().append(**{**good, **arguments})
    with pytest.raises(ValueError, match="num_pages: got 0"):
        pa.PagedKV.empty(0, 4, 2, 8, batch=1, max_pages=1)
