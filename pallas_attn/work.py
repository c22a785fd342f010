"""Which program of a serving kernel does what: found by each program itself, from the lengths.

    rows     a sequence's new tokens times the query heads of a KV head, in blocks of block_rows
    blocks   one block of rows of one sequence, counted over all sequences
    items    a block's keys cut into `splits` parts, one program each, for every KV head

How finely to split is decided on the device, from the lengths of this very batch: the keys of all
sequences together, over the programs that fill the GPU, give the keys of a part; longer sequences
get more parts. The grid is a static upper bound. So lengths, tables and membership change without
compiling anything, and uneven lengths fill the GPU as even ones do.

The padding after cu_seqlens[-1] counts as one more sequence, of length 0, so that its rows get 0
and -inf. Functions here take scalars or vectors of sequences alike.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.decode_call import MIN_SPLIT_KEYS, DecodeCall, DecodeInputs
from pallas_attn.mask_core import Position

# Sequences surveyed at once.
_WIDTH = 128


class Sequence(NamedTuple):
    """One sequence or a vector of them; int32.

    Attributes:
        q_start: its first token's index.
        q_num: its tokens.
        kv_len: its keys.
        blocks: blocks of rows.
        kv_tiles: tiles of keys that its rows see.
    """

    q_start: Any
    q_num: Any
    kv_len: Any
    blocks: Any
    kv_tiles: Any


class Item(NamedTuple):
    """What one program does: part `split` of `splits` of the keys of block `block` of `seq`.

    `exists` is False for programs that have nothing to do.
    """

    seq: Any
    block: Any
    split: Any
    splits: Any
    exists: Any


class Block(NamedTuple):
    """A block of rows, and where its parts begin among the items."""

    seq: Any
    block: Any
    splits: Any
    first_item: Any
    exists: Any


def ceil_div(a, b):
    """A / b rounded up, of int32 from 0 up."""
    return lax.div(a + (b - np.int32(1)), b)


def _const(like, value: int):
    return jnp.full_like(like, value)


def num_blocks(call: DecodeCall) -> int:
    """The most blocks of rows that there can be."""
    spec, rows = call.spec, call.tiles.block_rows
    if spec.q_len is not None:
        return spec.batch * -(-spec.q_len * spec.group // rows)
    return spec.tokens * spec.group // rows + spec.members


def fixed_splits(call: DecodeCall) -> int | None:
    """Parts a sequence, where that is settled without looking at the lengths; else None."""
    spec = call.spec
    if spec.num_splits is not None:
        return spec.num_splits
    return 1 if spec.capacity <= max(MIN_SPLIT_KEYS, call.tiles.block_kv) else None


def _target(call: DecodeCall) -> int:
    """Parts over all sequences, for each KV head, that fill the GPU."""
    return max(1, call.sms * call.tiles.programs_per_sm // call.spec.kv_heads)


def num_items(call: DecodeCall) -> int:
    """The most items that there can be, for each KV head."""
    fixed = fixed_splits(call)
    if fixed is not None:
        return num_blocks(call) * fixed
    # Each block has its exact share of the target, rounded up.
    return num_blocks(call) + _target(call)


def max_splits(call: DecodeCall) -> int:
    """The most parts that a block can have."""
    fixed = fixed_splits(call)
    if fixed is not None:
        return fixed
    tiles = -(-call.spec.capacity // call.tiles.block_kv)
    least = max(1, MIN_SPLIT_KEYS // call.tiles.block_kv)
    return min(_target(call) + 1, -(-tiles // least))


def sequence(call: DecodeCall, inputs: DecodeInputs, seq, read) -> Sequence:
    """The facts of a sequence, or of a vector of them; those past the last are empty.

    Args:
        seq: int32 index.
        read: (array, index, where) -> entries, 0 where `where` is False.
    """
    spec, tiles = call.spec, call.tiles
    real = seq < np.int32(spec.batch)
    kv_len = read(inputs.kv_lens, seq, real)
    kv_len = jnp.clip(kv_len, np.int32(0), np.int32(spec.capacity))
    zero = _const(seq, 0)
    if spec.q_len is not None:
        q_start = seq * np.int32(spec.q_len)
        q_num = jnp.where(real, _const(seq, spec.q_len), zero)
    else:
        counts = seq <= np.int32(spec.batch)
        everything = _const(seq, spec.tokens)
        q_start = jnp.where(counts, read(inputs.cu_seqlens, seq, counts), everything)
        q_end = jnp.where(real, read(inputs.cu_seqlens, seq + np.int32(1), real), everything)
        q_num = jnp.maximum(jnp.minimum(q_end, everything) - q_start, zero)
    blocks = ceil_div(q_num * np.int32(spec.group), _const(seq, tiles.block_rows))
    first, last = span(call, inputs.mask, jnp.minimum(seq, np.int32(spec.batch - 1)), q_num, kv_len)
    size = _const(seq, tiles.block_kv)
    kv_tiles = jnp.maximum(ceil_div(last, size) - lax.div(first, size), zero)
    return Sequence(q_start, q_num, kv_len, blocks, jnp.where(last > first, kv_tiles, zero))


def span(call: DecodeCall, mask, seq, q_num, kv_len):
    """First and past-the-last key that the rows of a sequence see, within its length.

    Both ends of every span mask move forward with the query, so that the first and the last query
    bound all others.
    """
    zero = _const(kv_len, 0)
    first = row_span(mask, seq, kv_len - q_num, kv_len)
    last = row_span(mask, seq, kv_len - np.int32(1), kv_len)
    if first is None or last is None:
        return zero, kv_len
    start = jnp.clip(jnp.broadcast_to(first[0], jnp.shape(zero)), zero, kv_len)
    end = jnp.clip(jnp.broadcast_to(last[1], jnp.shape(zero)), zero, kv_len)
    return start.astype(jnp.int32), end.astype(jnp.int32)


def row_span(mask, seq, q, kv_len):
    """`mask.row_span` of queries at positions q of sequences whose ends align."""
    return mask.row_span(Position(seq, np.int32(0), q, None, kv_len, kv_len))


def _splits(call: DecodeCall, found: Sequence, part_tiles):
    """Parts of each sequence's blocks, at least one; 0 for sequences without rows."""
    fixed = fixed_splits(call)
    if fixed is not None:
        splits = _const(found.kv_tiles, fixed)
    else:
        # Windows may make a block's keys fewer than its sequence's; never more.
        share = ceil_div(found.kv_tiles, jnp.broadcast_to(part_tiles, jnp.shape(found.kv_tiles)))
        splits = jnp.maximum(share, np.int32(1))
    return jnp.where(found.blocks > np.int32(0), splits, _const(splits, 0))


def _over_members(call: DecodeCall, step, carry):
    """Runs `step(first sequence, carry)` over all members, _WIDTH at a time."""
    steps = -(-call.spec.members // _WIDTH)
    if steps == 1:
        return step(np.int32(0), carry)
    bounds = jnp.int32(0), jnp.int32(steps)
    return lax.fori_loop(*bounds, lambda i, c: step(i * np.int32(_WIDTH), c), carry)


def _width(call: DecodeCall) -> int:
    return min(_WIDTH, 1 << max(0, call.spec.members - 1).bit_length())


def _part_tiles(call: DecodeCall, inputs: DecodeInputs, read):
    """Tiles of keys in a part, so that all parts together are about `_target`."""
    if fixed_splits(call) is not None:
        return np.int32(0)

    def step(first, total):
        seqs = first + lax.iota(jnp.int32, _width(call))
        found = sequence(call, inputs, seqs, read)
        return total + (found.blocks * found.kv_tiles).sum(dtype=jnp.int32)

    total = _over_members(call, step, jnp.int32(0))
    least = max(1, MIN_SPLIT_KEYS // call.tiles.block_kv)
    return jnp.maximum(ceil_div(total, jnp.int32(_target(call))), np.int32(least))


def _find(call: DecodeCall, inputs: DecodeInputs, index, count, read):
    """The sequence that holds the index-th thing, and how many things and items come before it.

    Args:
        count: (sequences, their splits) -> things of each.

    Returns:
        sequence, things before it, items before it, part_tiles.
    """
    part_tiles = _part_tiles(call, inputs, read)

    def step(first, carry):
        seq, total, before, items_total, items_before = carry
        seqs = first + lax.iota(jnp.int32, _width(call))
        found = sequence(call, inputs, seqs, read)
        splits = _splits(call, found, part_tiles)
        ends = total + jnp.cumsum(count(found, splits), dtype=jnp.int32)
        item_ends = items_total + jnp.cumsum(found.blocks * splits, dtype=jnp.int32)
        passed = ends <= index
        none = _const(ends, 0)
        return (
            seq + passed.astype(jnp.int32).sum(dtype=jnp.int32),
            ends.max(),
            jnp.maximum(before, jnp.where(passed, ends, none).max()),
            item_ends.max(),
            jnp.maximum(items_before, jnp.where(passed, item_ends, none).max()),
        )

    zero = jnp.int32(0)
    seq, _, before, _, items_before = _over_members(call, step, (zero, zero, zero, zero, zero))
    return seq, before, items_before, part_tiles


def item_of(call: DecodeCall, inputs: DecodeInputs, index, read) -> Item:
    """What the index-th program of a KV head does."""
    fixed = fixed_splits(call)
    if fixed is not None and call.spec.q_len is not None:
        block, split = _divide(index, fixed)
        seq, block = _divide(block, num_blocks(call) // call.spec.batch)
        return Item(seq, block, split, jnp.int32(fixed), jnp.bool_(True))
    seq, before, _, part_tiles = _find(call, inputs, index, lambda s, n: s.blocks * n, read)
    found = sequence(call, inputs, seq, read)
    splits = jnp.maximum(_splits(call, found, part_tiles), np.int32(1))
    inside = index - before
    block = lax.div(inside, splits)
    return Item(seq, block, inside - block * splits, splits, seq < np.int32(call.spec.members))


def block_of(call: DecodeCall, inputs: DecodeInputs, index, read) -> Block:
    """The index-th block of rows, for merging its parts."""
    fixed = fixed_splits(call)
    if fixed is not None and call.spec.q_len is not None:
        seq, block = _divide(index, num_blocks(call) // call.spec.batch)
        return Block(seq, block, jnp.int32(fixed), index * np.int32(fixed), jnp.bool_(True))
    seq, before, items, part_tiles = _find(call, inputs, index, lambda s, _: s.blocks, read)
    found = sequence(call, inputs, seq, read)
    splits = _splits(call, found, part_tiles)
    block = index - before
    exists = seq < np.int32(call.spec.members)
    return Block(seq, block, splits, items + block * splits, exists)


def _divide(index, by: int):
    quotient = lax.div(index, jnp.int32(by))
    return quotient, index - quotient * np.int32(by)
