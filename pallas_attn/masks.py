"""Who may attend to whom: the masks, joined by `&`, `|` and `~`.

Indices count from 0 in each sequence; `batch` and `head` (a query head) are indices too. A 4 x 6
example of the two causal alignments (rows are queries, x is visible):

    Causal()            Causal(align="bottom_right")
    x . . . . .         x x x . . .
    x x . . . .         x x x x . .
    x x x . . .         x x x x x .
    x x x x . .         x x x x x x

To add a mask, write one class with `allowed` (and `row_span` where it is one interval a row, or
`tiles`), and one line in `testing.MASK_CASES`; `mask_core.py` says what the methods mean.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import predicate
from pallas_attn.mask_core import (
    FAR,
    And,
    Dense,
    Full,
    Mask,
    Not,
    Or,
    Position,
    TileGrid,
    as_mask,
    at_batch,
    batch_of,
    both,
    int_operand,
    is_array,
    largest,
    position_operand,
    show,
    to_blocks,
    true_like,
    xp_of,
)


class Causal(Mask):
    """Query i sees keys up to i + offset.

    Args:
        offset: an int, or an int32 array of rank 0 or [batch] (how far the queries start after the
            keys, as when decoding into a cache). 0 is jax.nn's top-left alignment.
        align: "top_left", or "bottom_right": the last query sees the last key, as in
            FlashAttention; adds kv_len - q_len to the offset.
    """

    runs = True

    def __init__(self, offset=0, align: str = "top_left"):
        if align not in ("top_left", "bottom_right"):
            raise ValueError(f"align: got {align!r}, expected 'top_left' or 'bottom_right'")
        self.offset, self.align = position_operand("offset", offset), align

    def _last(self, at):
        shift = at_batch(self.offset, at.batch)
        last = at.q + shift
        return last + (at.kv_len - at.q_len) if self.align == "bottom_right" else last

    def sizes(self):
        return batch_of(self.offset), 1

    def options(self) -> list[str]:
        """What differs from the defaults, for `repr`."""
        moved = is_array(self.offset) or self.offset != 0
        aligned = [show("align", self.align)] if self.align != "top_left" else []
        return ([show("offset", self.offset)] if moved else []) + aligned

    def __repr__(self):
        return f"Causal({', '.join(self.options())})"

    def allowed(self, at):
        return at.kv <= self._last(at)

    def row_span(self, at):
        last = self._last(at)
        return last * np.int32(0), last + np.int32(1)

    def check(self, batch, heads, q_len, kv_len):
        _check_per_batch("offset", self.offset, batch)


def _check_per_batch(name, value, batch):
    if is_array(value) and value.shape[0] not in (1, batch):
        raise ValueError(f"{name}: got shape {value.shape}, expected [batch] = ({batch},)")


class SlidingWindow(Mask):
    """Query i sees keys i - left .. i + right, counted as FlashAttention and jax.nn do.

    Args:
        left: keys to the left besides self, 0 or more; None is open.
        right: keys to the right besides self; None is open.
        offset: moves the window, as in `Causal`.
        align: as in `Causal`.
    """

    runs = True

    def __init__(self, left=None, right=None, *, offset=0, align: str = "top_left"):
        for name, size in (("left", left), ("right", right)):
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0
            ):
                raise ValueError(
                    f"{name}: got {size!r}, expected an int from 0 up, or None for open"
                )
        self.left, self.right = (None if n is None or n >= FAR else int(n) for n in (left, right))
        self.center = Causal(offset, align)

    def __repr__(self):
        shown = [show(name, getattr(self, name)) for name in ("left", "right")]
        return f"SlidingWindow({', '.join(shown + self.center.options())})"

    def row_span(self, at):
        center = self.center._last(at)
        start = center * np.int32(0) if self.left is None else center - np.int32(self.left)
        far = np.int32(FAR) if self.right is None else np.int32(self.right + 1)
        return start, (center * np.int32(0) if self.right is None else center) + far

    def sizes(self):
        return self.center.sizes()

    def allowed(self, at):
        center = self.center._last(at)
        seen = None if self.left is None else at.kv >= center - np.int32(self.left)
        if self.right is not None:
            seen = both(seen, at.kv <= center + np.int32(self.right))
        return true_like(at.q, at.kv) if seen is None else seen

    def check(self, batch, heads, q_len, kv_len):
        self.center.check(batch, heads, q_len, kv_len)


class PrefixLM(Mask):
    """The first `prefix_len` keys are visible to all queries, the rest causally.

    Args:
        prefix_len: an int, or an int32 array of rank 0 or [batch].
    """

    runs = True

    def __init__(self, prefix_len):
        self.prefix_len = position_operand("prefix_len", prefix_len)
        if isinstance(self.prefix_len, int) and self.prefix_len < 0:
            raise ValueError(f"prefix_len: got {prefix_len}, expected 0 or more")

    def sizes(self):
        return batch_of(self.prefix_len), 1

    def allowed(self, at):
        return (at.kv <= at.q) | (at.kv < at_batch(self.prefix_len, at.batch))

    def row_span(self, at):
        return at.q * np.int32(0), largest(at.q + np.int32(1), at_batch(self.prefix_len, at.batch))

    def check(self, batch, heads, q_len, kv_len):
        _check_per_batch("prefix_len", self.prefix_len, batch)


class Chunked(Mask):
    """Queries see the keys of their own chunk: i // chunk_len == j // chunk_len.

    With `Causal()` these are the local layers of Llama 4.
    """

    runs = True

    def __init__(self, chunk_len: int):
        if isinstance(chunk_len, bool) or not isinstance(chunk_len, int) or chunk_len < 1:
            raise ValueError(f"chunk_len: got {chunk_len!r}, expected an int from 1 up")
        self.chunk_len = min(chunk_len, FAR)

    def _start(self, at):
        return at.q - at.q % np.int32(self.chunk_len)

    def allowed(self, at):
        start = self._start(at)
        return (at.kv >= start) & (at.kv < start + np.int32(self.chunk_len))

    def row_span(self, at):
        start = self._start(at)
        return start, start + np.int32(self.chunk_len)


class Lengths(Mask):
    """Only the first q_lens queries and kv_lens keys of each sequence count; the rest is padding.

    Args:
        q_lens: int32 [batch] (or one number), or None when all queries count.
        kv_lens: the same for keys.
    """

    runs = True

    def __init__(self, q_lens=None, kv_lens=None):
        self.q_lens = None if q_lens is None else position_operand("q_lens", q_lens)
        self.kv_lens = None if kv_lens is None else position_operand("kv_lens", kv_lens)

    def sizes(self):
        return batch_of(self.q_lens, self.kv_lens), 1

    def allowed(self, at):
        seen = both(self.q_valid(at.batch, at.q), self.kv_valid(at.batch, at.kv))
        return true_like(at.q, at.kv) if seen is None else seen

    def row_span(self, at):
        zero = at.q * np.int32(0)
        end = zero + (np.int32(FAR) if self.kv_lens is None else at_batch(self.kv_lens, at.batch))
        if self.q_lens is None:
            return zero, end
        counts = at.q < at_batch(self.q_lens, at.batch)
        return zero, xp_of(counts, end).where(counts, end, np.int32(0))

    def q_valid(self, batch, q):
        return None if self.q_lens is None else q < at_batch(self.q_lens, batch)

    def kv_valid(self, batch, kv):
        return None if self.kv_lens is None else kv < at_batch(self.kv_lens, batch)

    def check(self, batch, heads, q_len, kv_len):
        _check_per_batch("q_lens", self.q_lens, batch)
        _check_per_batch("kv_lens", self.kv_lens, batch)


class RowSpan(Mask):
    """Query i sees keys [start[i], end[i]); what `mha_varlen` builds.

    Args:
        start, end: int32 [q_len] or [batch, q_len].
        kv_end: where the padding after the last key begins, an int32 scalar; None for no padding.
    """

    runs = True

    def __init__(self, start, end, kv_end=None):
        self.kv_end = None if kv_end is None else int_operand("kv_end", kv_end, 0)
        self.start, self.end = (
            jnp.atleast_2d(int_operand(n, x, 2)) for n, x in (("start", start), ("end", end))
        )

    def _row(self, x, batch, q):
        return x[batch if x.shape[0] > 1 else 0, q]

    def sizes(self):
        return batch_of(self.start, self.end), 1

    def allowed(self, at):
        return (at.kv >= self._row(self.start, at.batch, at.q)) & (
            at.kv < self._row(self.end, at.batch, at.q)
        )

    def row_span(self, at):
        return self.start, self.end

    def q_valid(self, batch, q):
        return self._row(self.start, batch, q) < self._row(self.end, batch, q)

    def kv_valid(self, batch, kv):
        return None if self.kv_end is None else kv < at_batch(self.kv_end, batch)

    def check(self, batch, heads, q_len, kv_len):
        for name in ("start", "end"):
            shape = getattr(self, name).shape
            if shape[0] not in (1, batch) or shape[1] != q_len:
                raise ValueError(f"{name}: got shape {shape}, expected ({batch} or 1, {q_len})")


class Predicate(Mask):
    """Visible where fn(batch, head, q_index, kv_index) is True.

    Args:
        fn: takes four int32 scalars and gives a bool; scalar operations and `array[scalar, ...]`
            reads of arrays it closes over. The arrays are operands: new values do not recompile.
    """

    def __init__(self, fn):
        self.trace, self.arrays = predicate.trace(fn)

    def allowed(self, at):
        return predicate.evaluate(self.trace, self.arrays, at.batch, at.head, at.q, at.kv)

    def tiles(self, grid):
        # Every pair is asked, a few rows at a time, so that memory stays at 128 x kv_len.
        batches = grid.batch if self.trace.uses(0) else 1
        heads = grid.heads if self.trace.uses(1) else 1
        rows = math.gcd(grid.block_q, 128)
        parts = (batches, heads, grid.num_q, grid.block_q // rows)
        kv = jnp.arange(grid.num_kv * grid.block_kv, dtype=np.int32)[None, :]
        counts_kv = kv < np.int32(grid.kv_len)

        def some_rows(index):
            batch, head, block, part = index
            first = block * np.int32(grid.block_q) + part * np.int32(rows)
            q = first + jnp.arange(rows, dtype=np.int32)[:, None]
            counts = counts_kv & (q < np.int32(grid.q_len))
            near = (
                jnp.minimum(q, np.int32(grid.q_len - 1)),
                jnp.minimum(kv, np.int32(grid.kv_len - 1)),
            )
            seen = predicate.evaluate(self.trace, self.arrays, batch, head, *near)
            some = (seen & counts).any(0).reshape(grid.num_kv, grid.block_kv).any(-1)
            every = (seen | ~counts).all(0).reshape(grid.num_kv, grid.block_kv).all(-1)
            return some, every

        index = jnp.unravel_index(jnp.arange(math.prod(parts), dtype=np.int32), parts)
        some, every = jax.lax.map(some_rows, tuple(i.astype(np.int32) for i in index))
        shape = (*parts, grid.num_kv)
        return some.reshape(shape).any(-2), every.reshape(shape).all(-2)

    def __repr__(self):
        return f"Predicate({len(self.trace.jaxpr.eqns)} operations, {len(self.arrays)} arrays)"


class Document(Mask):
    """Queries see the keys of their own document.

    Args:
        q_segment_ids: int32 [q_len] or [batch, q_len]; any ids, in any order. Negative ids are
            padding: they see nothing and nothing sees them.
        kv_segment_ids: the same for keys; None for the queries' ids.
    """

    runs = True

    def __init__(self, q_segment_ids, kv_segment_ids=None):
        def rows(name, ids):
            ids = ids if is_array(ids) else np.asarray(ids)
            return jnp.atleast_2d(int_operand(name, ids, 2))

        self.q_segment_ids, kv = rows("q_segment_ids", q_segment_ids), kv_segment_ids
        self.kv_segment_ids = None if kv is None else rows("kv_segment_ids", kv)

    @property
    def _kv_ids(self):
        return self.q_segment_ids if self.kv_segment_ids is None else self.kv_segment_ids

    def _id(self, ids, batch, index):
        return ids[batch if ids.shape[0] > 1 else 0, index]

    def sizes(self):
        return batch_of(self.q_segment_ids, self.kv_segment_ids), 1

    def allowed(self, at):
        # Padding gets two ids that equal nothing, so that one comparison a pair is all there is.
        q_id = self._id(self.q_segment_ids, at.batch, at.q)
        kv_id = self._id(self._kv_ids, at.batch, at.kv)
        q_id = jnp.where(q_id < 0, np.int32(-1), q_id)
        return q_id == jnp.where(kv_id < 0, np.int32(-2), kv_id)

    def tiles(self, grid):
        q_low, q_high, q_bits = _id_bounds(self.q_segment_ids, grid.block_q)
        kv_low, kv_high, kv_bits = _id_bounds(self._kv_ids, grid.block_kv)
        q_low, q_high, q_bits = (x[:, None, :, None] for x in (q_low, q_high, q_bits))
        kv_low, kv_high, kv_bits = (x[:, None, None, :] for x in (kv_low, kv_high, kv_bits))
        # Ranges overlap and some id has the same hash. Exact for ids that ascend; for ids in any
        # order a block may be visited that turns out to hold nothing, never the reverse.
        some = (q_low <= kv_high) & (kv_low <= q_high) & ((q_bits & kv_bits) != 0)
        return some, (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low) & (q_low >= 0)

    def q_valid(self, batch, q):
        return self._id(self.q_segment_ids, batch, q) >= 0

    def kv_valid(self, batch, kv):
        return self._id(self._kv_ids, batch, kv) >= 0

    def check(self, batch, heads, q_len, kv_len):
        for name, ids, length in (
            ("q_segment_ids", self.q_segment_ids, q_len), ("kv_segment_ids", self._kv_ids, kv_len)
        ):  # fmt: skip
            if ids.shape[0] not in (1, batch) or ids.shape[1] != length:
                raise ValueError(
                    f"{name}: got shape {ids.shape}, expected ({batch} or 1, {length})"
                )


def _id_bounds(ids, block: int):
    """Per block: the least and greatest id, and a 32-bit set of the hashes of those from 0 up."""
    blocks = to_blocks(ids, block, np.int32(0))
    # The end of a ragged last block repeats its last id, which changes none of the three.
    short = blocks.shape[-1] * blocks.shape[-2] - ids.shape[-1]
    if short:
        blocks = to_blocks(jnp.pad(ids, ((0, 0), (0, short)), mode="edge"), block, np.int32(0))
    bit = jnp.where(blocks < 0, np.int32(0), jnp.left_shift(np.int32(1), blocks & np.int32(31)))
    bits = jax.lax.reduce(bit, np.int32(0), jax.lax.bitwise_or, (blocks.ndim - 1,))
    return blocks.min(-1), blocks.max(-1), bits


class Dilated(Mask):
    """Query i sees keys i ± n·dilation, n = 0 .. window: a window with gaps (Longformer, 3.1).

    Args:
        window: keys on each side besides self.
        dilation: distance between two visible keys; 1 is `SlidingWindow(window, window)`.
    """

    def __init__(self, window: int, dilation: int):
        for name, value, least in (("window", window, 0), ("dilation", dilation, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, expected an int from {least} up")
        self.dilation = min(dilation, FAR)
        self.window = min(window, FAR // self.dilation)

    def allowed(self, at):
        distance = jnp.abs(at.q - at.kv)
        near = distance <= np.int32(self.window * self.dilation)
        return near & (jax.lax.rem(distance, jnp.full_like(distance, self.dilation)) == 0)

    def tiles(self, grid):
        (q_first, q_last), (kv_first, kv_last) = grid.q_bounds, grid.kv_bounds
        reach = self.window * self.dilation
        low, high = np.maximum(q_first - kv_last, -reach), np.minimum(q_last - kv_first, reach)
        some = (high // self.dilation >= -(-low // self.dilation)) & (low <= high)
        single = (q_first == q_last) & (kv_first == kv_last)
        inside = (q_first - kv_last >= -reach) & (q_last - kv_first <= reach)
        every = inside if self.dilation == 1 else some & single
        return some, every


class BlockSparse(Mask):
    """Visible where a map of blocks says so: retrieval- or hash-routed attention.

    Args:
        block_map: bool [q_blocks, kv_blocks], or with leading axes q_heads or batch, q_heads.
        block_q, block_kv: queries and keys that one entry stands for.
    """

    def __init__(self, block_map, block_q: int, block_kv: int):
        block_map = block_map if is_array(block_map) else np.asarray(block_map)
        if block_map.dtype != jnp.bool_ or not 2 <= block_map.ndim <= 4:
            raise ValueError(
                f"block_map: got {block_map.dtype}{block_map.shape}, expected bool [q_blocks, "
                "kv_blocks], [q_heads, q_blocks, kv_blocks] or [batch, q_heads, q_blocks, "
                "kv_blocks]"
            )
        for name, size in (("block_q", block_q), ("block_kv", block_kv)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}, expected an int from 1 up")
        shape = (1,) * (4 - block_map.ndim) + block_map.shape
        self.q_blocks, self.kv_blocks = shape[2:]
        self.flat_map = jnp.asarray(block_map).reshape(*shape[:2], self.q_blocks * self.kv_blocks)
        self.block_q, self.block_kv = block_q, block_kv

    def sizes(self):
        return self.flat_map.shape[0], self.flat_map.shape[1]

    def allowed(self, at):
        # One flat index a pair, not two that are combined pair by pair: registers.
        batches, heads = self.sizes()
        row = jax.lax.div(at.q, jnp.full_like(at.q, self.block_q)) * np.int32(self.kv_blocks)
        column = jax.lax.div(at.kv, jnp.full_like(at.kv, self.block_kv))
        batch, head = (at.batch if batches > 1 else 0), (at.head if heads > 1 else 0)
        return self.flat_map[batch, head, row + column] & true_like(at.q, at.kv)

    def uniform(self, grid):
        return self.block_q % grid.block_q == 0 and self.block_kv % grid.block_kv == 0

    def tiles(self, grid):
        def per_tile(x, axis, entry, tile, length, *, every):
            unit = math.gcd(entry, tile)
            x = jnp.moveaxis(jnp.repeat(x, entry // unit, axis=axis), axis, -1)[
                ..., : -(-length // unit)
            ]
            x = to_blocks(x, tile // unit, every)
            return jnp.moveaxis(x.all(-1) if every else x.any(-1), -1, axis)

        def both_axes(every):
            block_map = self.flat_map.reshape(*self.sizes(), self.q_blocks, self.kv_blocks)
            rows = per_tile(block_map, 2, self.block_q, grid.block_q, grid.q_len, every=every)
            return per_tile(rows, 3, self.block_kv, grid.block_kv, grid.kv_len, every=every)

        return both_axes(False), both_axes(True)

    def check(self, batch, heads, q_len, kv_len):
        blocks = (-(-q_len // self.block_q), -(-kv_len // self.block_kv))
        sizes = (*self.sizes(), self.q_blocks, self.kv_blocks)
        if sizes[0] not in (1, batch) or sizes[1] not in (1, heads) or sizes[2:] != blocks:
            raise ValueError(
                f"block_map: got shape {sizes}, expected [batch or 1, q_heads or 1, q_blocks, "
                f"kv_blocks] = ({batch}, {heads}, {blocks[0]}, {blocks[1]}) for blocks of "
                f"{self.block_q} queries and {self.block_kv} keys over lengths {q_len} and {kv_len}"
            )


__all__ = [
    "And", "BlockSparse", "Causal", "Chunked", "Dense", "Dilated", "Document", "Full", "Lengths",
    "Mask", "Not", "Or", "Position", "Predicate", "PrefixLM", "RowSpan", "SlidingWindow",
    "TileGrid", "as_mask",
]  # fmt: skip
