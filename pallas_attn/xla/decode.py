"""Serving in plain JAX: new tokens attend to a cache, in pages or not; runs everywhere.

    sequences of equally many new tokens: all at once, mapped over the batch
    ragged ones: block by block of new tokens, a few at a time

    each gathers its keys in tiles, as many as its length asks for, into an online softmax

No page past a sequence's own is read, and nothing past its length counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import tile_math, work
from pallas_attn.decode_call import DecodeCall, DecodeInputs, DecodeSpec, DecodeTiles
from pallas_attn.mask_core import FAR, Position

# Blocks of new tokens computed side by side in a ragged batch.
_TOGETHER = 8


def unsupported_reason(spec: DecodeSpec, mask, gpu) -> str | None:
    """None: it takes everything."""
    del spec, mask, gpu


def candidate_tiles(spec: DecodeSpec, gpu) -> list[DecodeTiles]:
    """One schedule: whole sequences of new tokens up to 128, and tiles of up to 256 keys."""
    del gpu

    def block(length: int, most: int) -> int:
        return min(most, max(16, 1 << max(0, length - 1).bit_length()))

    tokens = spec.q_len or -(-spec.tokens // max(1, spec.batch))
    return [DecodeTiles(block(tokens, 128), block(spec.capacity, 256))]


def run(call: DecodeCall, inputs: DecodeInputs):
    """Out and lse; see `decode_call.attend`. A tile's rows are tokens here."""
    spec = call.spec
    if spec.q_len is not None:
        q = inputs.q.reshape(spec.batch, spec.q_len, *inputs.q.shape[1:])
        seqs = jnp.arange(spec.batch, dtype=np.int32)

        def one(q, seq):
            return _attend(call, inputs, q, seq, np.int32(0), jnp.int32(spec.q_len))

        out, lse = jax.vmap(one)(q, seqs)
        return out.reshape(spec.tokens, *out.shape[2:]), lse.reshape(spec.tokens, spec.q_heads)
    return _ragged(call, inputs)


def _ragged(call: DecodeCall, inputs: DecodeInputs):
    spec, rows = call.spec, call.tiles.block_rows
    starts = jnp.clip(inputs.cu_seqlens, np.int32(0), np.int32(spec.tokens))
    counts = starts[1:] - starts[:-1]
    ends = jnp.cumsum(work.ceil_div(counts, jnp.full_like(counts, rows)), dtype=np.int32)
    blocks = jnp.arange(spec.tokens // rows + spec.batch, dtype=np.int32)

    def one(index):
        seq = (ends <= index).sum(dtype=np.int32)
        exists = seq < np.int32(spec.batch)
        seq = jnp.minimum(seq, np.int32(spec.batch - 1))
        before = jnp.where(seq > 0, ends[jnp.maximum(seq - np.int32(1), np.int32(0))], np.int32(0))
        first = (index - before) * np.int32(rows)
        token = starts[seq] + first + jnp.arange(rows, dtype=np.int32)
        q = inputs.q[jnp.minimum(token, np.int32(spec.tokens - 1))]
        out, lse = _attend(call, inputs, q, seq, first, counts[seq])
        inside = exists & (token < starts[seq + np.int32(1)])
        # Rows of no token are written past the end, that is not at all.
        return jnp.where(inside, token, np.int32(spec.tokens)), out, lse

    token, out, lse = lax.map(one, blocks, batch_size=_TOGETHER)
    token = token.reshape(-1)
    all_out = jnp.zeros((spec.tokens, spec.q_heads, spec.v_dim), out.dtype)
    all_lse = jnp.full((spec.tokens, spec.q_heads), -jnp.inf, lse.dtype)
    out, lse = out.reshape(-1, *out.shape[2:]), lse.reshape(-1, spec.q_heads)
    return all_out.at[token].set(out, mode="drop"), all_lse.at[token].set(lse, mode="drop")


def _attend(call: DecodeCall, inputs: DecodeInputs, q, seq, first, count):
    """Some tokens of one sequence.

    Args:
        q: [rows, q_heads, head_dim], tokens `first` ... of its `count` new ones.
        seq, first, count: int32.

    Returns:
        out [rows, q_heads, v_dim]; lse [rows, q_heads].
    """
    spec, size = call.spec, np.int32(call.tiles.block_kv)
    wide = jnp.float64 if spec.dtype == "float64" else jnp.float32
    rows = q.shape[0]
    kv_len = jnp.clip(inputs.kv_lens[seq], np.int32(0), np.int32(spec.capacity))
    position = kv_len - count + first + jnp.arange(rows, dtype=np.int32)
    low, high = _span(inputs.mask, seq, position, kv_len)
    q = q.reshape(rows, spec.kv_heads, spec.group, spec.head_dim).transpose(1, 2, 0, 3)
    q = q.reshape(spec.kv_heads, spec.group * rows, spec.head_dim)

    def take(tile, carry):
        row_max, row_sum, acc = carry
        kv_index = tile * size + jnp.arange(call.tiles.block_kv, dtype=np.int32)
        k, v = _keys(spec, inputs, seq, kv_index, kv_len)
        precision = {"preferred_element_type": wide, "precision": lax.Precision.HIGHEST}
        qk = jnp.einsum("hrd,khd->hrk", q, k, **precision)
        s, factor = tile_math.logits(qk, spec.scale, spec.soft_cap)
        seen = _seen(spec, inputs.mask, seq, position, kv_index, kv_len)
        s = jnp.where(seen.reshape(s.shape), s, -jnp.inf)
        step = jax.vmap(
            lambda top, total, x: tile_math.online_softmax(top, total, x, factor, guard=True)
        )
        row_max, row_sum, correction, p = step(row_max, row_sum, s)
        pv = jnp.einsum("hrk,khd->hrd", p.astype(v.dtype), v, **precision)
        return row_max, row_sum, acc * correction[..., None] + pv

    lead = q.shape[:2]
    carry = (
        jnp.full(lead, -jnp.inf, wide), jnp.zeros(lead, wide), jnp.zeros((*lead, spec.v_dim), wide)
    )  # fmt: skip
    row_max, row_sum, acc = lax.fori_loop(
        lax.div(low, size), work.ceil_div(high, size), take, carry
    )
    sink = None
    if inputs.sinks is not None:
        sink = jnp.repeat(inputs.sinks.astype(wide), rows).reshape(lead)
    factor, lse = tile_math.finalize(row_max, row_sum, sink)
    out = (acc * factor[..., None]).astype(q.dtype)
    out = out.reshape(spec.q_heads, rows, spec.v_dim).transpose(1, 0, 2)
    return out, lse.reshape(spec.q_heads, rows).T


def _span(mask, seq, position, kv_len):
    """First and past-the-last key that any of the rows sees."""
    found = work.row_span(mask, seq, position, kv_len)
    if found is None:
        return jnp.zeros_like(kv_len), kv_len
    start, end = (
        jnp.clip(jnp.broadcast_to(x, position.shape).astype(np.int32), np.int32(0), kv_len)
        for x in found
    )
    sees = start < end
    first = jnp.where(sees, start, np.int32(FAR)).min()
    return jnp.minimum(first, kv_len), jnp.where(sees, end, np.int32(0)).max()


def _keys(spec: DecodeSpec, inputs: DecodeInputs, seq, kv_index, kv_len):
    """Keys and values at some indices of a sequence, 0 past its end."""
    exists = kv_index < kv_len
    inside = jnp.where(exists, kv_index, np.int32(0))
    where = (seq, inside)
    if spec.paged:
        number = lax.div(inside, jnp.full_like(inside, spec.page_size))
        page = jnp.where(exists, inputs.page_table[seq, number], np.int32(0))
        where = (page, inside - number * np.int32(spec.page_size))
    valid = inputs.mask.kv_valid(seq, inside)
    exists = exists if valid is None else exists & valid

    def load(array):
        x = array[where]
        return jnp.where(exists[:, None, None], x, jnp.zeros_like(x))

    k = load(inputs.k)
    return k, k[..., : spec.v_dim] if spec.shared_kv else load(inputs.v)


def _seen(spec: DecodeSpec, mask, seq, position, kv_index, kv_len):
    """Bool [kv_heads, group, rows, keys]: the mask, the end of the sequence included."""
    last = np.int32(spec.capacity - 1)
    q = jnp.clip(position, np.int32(0), last) if jax.tree.leaves(mask) else position
    kv = jnp.minimum(kv_index, last)
    head = jnp.arange(spec.q_heads, dtype=np.int32).reshape(spec.kv_heads, spec.group, 1, 1)
    at = Position(seq, head, q[None, None, :, None], kv[None, None, None, :], kv_len, kv_len)
    allowed = mask.allowed(at) & (kv_index < kv_len)[None, None, None, :]
    return jnp.broadcast_to(allowed, (*head.shape[:2], position.shape[0], kv_index.shape[0]))
