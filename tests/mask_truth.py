"""Masks by their definition: plain Python on plain ints, nothing of the library's own code."""

import numpy as np

import pallas_attn as pa


def dense(see, batch, heads, q_len, kv_len):
    """[batch, heads, q_len, kv_len] from see(b, h, i, j)."""
    out = np.zeros((batch, heads, q_len, kv_len), bool)
    for at in np.ndindex(out.shape):
        out[at] = see(*at)
    return out


def leaves(seed, batch, heads, q_len, kv_len):
    """{name: (mask, see)} for every kind of mask, with random static and array parameters."""
    rng = np.random.default_rng(seed)
    ids_q = rng.integers(-1, 4, (batch, q_len)).astype(np.int32)
    ids_kv = rng.integers(-1, 4, (batch, kv_len)).astype(np.int32)
    packed = np.sort(rng.integers(0, 4, (1, max(q_len, kv_len))).astype(np.int32), axis=-1)
    q_packed, kv_packed = packed[0, :q_len], packed[0, :kv_len]
    q_lens = rng.integers(0, q_len + 1, batch).astype(np.int32)
    kv_lens = rng.integers(0, kv_len + 1, batch).astype(np.int32)
    prefix = rng.integers(0, kv_len + 1, batch).astype(np.int32)
    offsets = rng.integers(-q_len, kv_len, batch).astype(np.int32)
    left, right = (int(n) for n in rng.integers(0, 5, 2))
    offset, chunk, window = int(rng.integers(-3, 4)), int(rng.integers(1, 6)), int(rng.integers(3))
    dilation = int(rng.integers(1, 4))
    block_q, block_kv = (int(n) for n in rng.integers(1, 6, 2))
    blocks = (-(-q_len // block_q), -(-kv_len // block_kv))
    block_map = rng.random((batch, heads, *blocks)) < 0.5
    array = rng.random((batch, heads, q_len, kv_len)) < 0.6
    row = rng.random((heads, 1, kv_len)) < 0.6
    end = kv_len - q_len

    def dilated(i, j):
        return any(j in (i - n * dilation, i + n * dilation) for n in range(window + 1))

    return {
        "full": (pa.Full(), lambda b, h, i, j: True),
        "causal": (pa.Causal(), lambda b, h, i, j: j <= i),
        "causal_offset": (pa.Causal(offset), lambda b, h, i, j: j <= i + offset),
        "causal_offsets": (pa.Causal(offsets), lambda b, h, i, j: j <= i + offsets[b]),
        "causal_end": (pa.Causal(align="bottom_right"), lambda b, h, i, j: j <= i + end),
        "window": (pa.SlidingWindow(left, right), lambda b, h, i, j: i - left <= j <= i + right),
        "window_left": (pa.SlidingWindow(left), lambda b, h, i, j: i - left <= j),
        "window_right": (pa.SlidingWindow(None, right), lambda b, h, i, j: j <= i + right),
        "window_open": (pa.SlidingWindow(), lambda b, h, i, j: True),
        "window_end": (
            pa.SlidingWindow(left, right, align="bottom_right"),
            lambda b, h, i, j: i + end - left <= j <= i + end + right,
        ),
        "window_offset": (
            pa.SlidingWindow(left, right, offset=offset),
            lambda b, h, i, j: i + offset - left <= j <= i + offset + right,
        ),
        "prefix": (pa.PrefixLM(3), lambda b, h, i, j: j < 3 or j <= i),
        "prefixes": (pa.PrefixLM(prefix), lambda b, h, i, j: j < prefix[b] or j <= i),
        "chunked": (pa.Chunked(chunk), lambda b, h, i, j: i // chunk == j // chunk),
        "lengths": (
            pa.Lengths(q_lens, kv_lens),
            lambda b, h, i, j: i < q_lens[b] and j < kv_lens[b],
        ),
        "length_q": (pa.Lengths(q_lens), lambda b, h, i, j: i < q_lens[b]),
        "length_kv": (pa.Lengths(kv_lens=4), lambda b, h, i, j: j < 4),
        "document": (
            pa.Document(ids_q, ids_kv),
            lambda b, h, i, j: ids_q[b, i] == ids_kv[b, j] >= 0,
        ),
        "packed": (
            pa.Document(q_packed, kv_packed),
            lambda b, h, i, j: q_packed[i] == kv_packed[j],
        ),
        "dilated": (pa.Dilated(window, dilation), lambda b, h, i, j: dilated(i, j)),
        "blocks": (
            pa.BlockSparse(block_map, block_q, block_kv),
            lambda b, h, i, j: block_map[b, h, i // block_q, j // block_kv],
        ),
        "shared_blocks": (
            pa.BlockSparse(block_map[0, 0], block_q, block_kv),
            lambda b, h, i, j: block_map[0, 0, i // block_q, j // block_kv],
        ),
        "dense": (pa.Dense(array), lambda b, h, i, j: array[b, h, i, j]),
        "dense_row": (pa.Dense(row), lambda b, h, i, j: row[h, 0, j]),
        "predicate": (
            pa.Predicate(lambda b, h, i, j: (i + j + h) % 3 != b),
            lambda b, h, i, j: (i + j + h) % 3 != b,
        ),
    }


def block_truth(pairs, block_q, block_kv):
    """(any, all) visible pairs of each block of a dense map, over the pairs that exist."""
    *lead, q_len, kv_len = pairs.shape
    shape = (*lead, -(-q_len // block_q), -(-kv_len // block_kv))
    some, every = np.zeros(shape, bool), np.zeros(shape, bool)
    for at in np.ndindex(shape[-2:]):
        rows = slice(at[0] * block_q, (at[0] + 1) * block_q)
        columns = slice(at[1] * block_kv, (at[1] + 1) * block_kv)
        block = pairs[..., rows, columns]
        some[(..., *at)], every[(..., *at)] = block.any((-1, -2)), block.all((-1, -2))
    return some, every
