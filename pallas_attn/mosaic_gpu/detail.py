"""Operands that decide single pairs in blocks that are partly visible; plain JAX, outside kernels.

A mask becomes one of three things, cheapest first:

    span    query row i sees keys [lo[i], hi[i]): all masks that are one interval a row, and those
            with one `Document` whose ids ascend, whose rows end where their document does;
    ids     the span of the other masks, and ids that are compared pair by pair: a `Document` whose
            ids do not ascend, decided per sequence on the device;
    bits    one bit a pair: everything else.

`masking.py` applies them to a tile inside kernels.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import masks
from pallas_attn.mask_core import FAR, Mask, Position, TileGrid, largest, smallest, xp_of
from pallas_attn.mosaic_gpu.by_key import by_key
from pallas_attn.spec import Spec

# Rows of all arrays are padded to this: tiles may reach past the end of a sequence by less.
ROWS = 256
# Ids that equal nothing: of padding among queries, and among keys.
Q_PADDING, KV_PADDING = -1, -2
# Pairs that are decided at once while bits are packed; bounds the memory that this takes.
CHUNK_PAIRS = 1 << 24
# Ids looked at in one step of the search for a document: a kernel a step, three for 32k keys.
PROBES = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Detail:
    """int32 arrays outside of kernels, references to them inside, or None where not needed.

    A leading axis of 1 stands for all sequences (or heads). q_rows and kv_rows are the lengths
    rounded up to `ROWS`.

    Attributes:
        lo, hi: [batch | 1, q_rows]; a query row sees keys [lo, hi). None is no bound. Rows past
            q_len see nothing.
        q_ids, kv_ids: [batch | 1, q_rows], [batch | 1, kv_rows]; padding is -1 among queries and
            -2 among keys.
        unsorted: [batch | 1]; 1 where a pair is visible only if its ids are equal too, 0 where lo
            and hi say all.
        bits: [batch | 1, q_heads | 1, q_rows, kv_rows / 32]; bit j of word w is key 32 w + j.
        kv_dirty, q_dirty: [batch | 1, kv_rows], [batch | 1, q_rows]; 1 for padding, whose numbers
            may be anything. None when the mask calls nothing padding; `detail_of` leaves q_dirty
            out, since the forward's rows past a sequence's end are its own affair.
        any_kv_dirty, any_q_dirty: [batch | 1]; whether a sequence has such at all.
    """

    lo: Any = None
    hi: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    unsorted: Any = None
    bits: Any = None
    kv_dirty: Any = None
    q_dirty: Any = None
    any_kv_dirty: Any = None
    any_q_dirty: Any = None


def padded_rows(length: int) -> int:
    """`length` rounded up to whole `ROWS`."""
    return -(-length // ROWS) * ROWS


def detail_of(mask: Mask, spec: Spec, *, block_q, block_kv) -> Detail:
    """What kernels need to decide single pairs.

    Args:
        mask: what is visible.
        spec: of the whole call, not of one device's share: batch and heads count absolutely.
        block_q, block_kv: the blocks that the kernels' tables are made of, an int or a tuple of
            all that are in use. Blocks of which a table says that nothing is visible are never
            asked about.

    Returns:
        NumPy arrays where the mask is known while tracing, else arrays of a few device operations.
    """
    grids = _grids(spec, block_q, block_kv)
    grid = grids[0]
    dirty = _padding(mask, grid, queries=False)
    ragged = any(g.kv_len % g.block_kv != 0 for g in grids)
    found = _spans_and_document(mask)
    if found is None and not all(mask.uniform(g) for g in grids):
        return Detail(bits=_bits(mask, grid, by_key=False), **dirty)
    # Blocks that are visible wholly or not at all are cut by the ends of the sequences only.
    spans, document = ([], None) if found is None else found
    lo, hi = _span(spans, grid)
    q_ids = kv_ids = unsorted = None
    if document is not None:
        q_ids, kv_ids = _ids(document)
        first, last, unsorted = _document_span(q_ids, kv_ids)
        some = (q_ids >= 0, unsorted[:, None] == 0)
        lo = _joined(some, lo, first, jnp.maximum, 0)
        hi = _joined(some, hi, last, jnp.minimum, grid.kv_len)
        q_ids = _padded(q_ids, Q_PADDING)
        kv_ids = _padded(kv_ids, KV_PADDING)
    lo, hi = _bounds(lo, hi, grid, ragged=ragged)
    return Detail(lo, hi, q_ids, kv_ids, unsorted, **dirty)


def detail_by_key(mask: Mask, spec: Spec, *, block_q: int, block_kv: int) -> Detail:
    """`detail_of` seen from the keys, for tiles [keys, queries]: rows are keys, columns queries.

    A thread holds two rows of a tile and many columns: a span a row costs it four numbers, and one
    a column as many as it has columns.

    Args:
        mask, spec, block_q, block_kv: as in `detail_of`.

    Returns:
        lo and hi bound the queries that see a key, of those that see anything; others may count as
        seeing it, since their probabilities are 0. Rows past kv_len see nothing if there is a hi,
        as there is where a block reaches past them. Ids and bits change roles; dirty flags keep
        theirs.
    """
    (grid,) = _grids(spec, block_q, block_kv)
    dirty = _padding(mask, grid, queries=True)
    found = _spans_and_document(mask)
    if found is None and not mask.uniform(grid):
        return Detail(bits=_bits(mask, grid, by_key=True), **dirty)
    spans, document = ([], None) if found is None else found
    lo, hi = by_key(*_span(spans, grid), grid.q_len, grid.kv_len)
    q_ids = kv_ids = unsorted = None
    if document is not None:
        q_ids, kv_ids = _ids(document)
        first, last, unsorted = _document_span(kv_ids, q_ids)
        some = (kv_ids >= 0, unsorted[:, None] == 0)
        lo = _joined(some, lo, first, jnp.maximum, 0)
        hi = _joined(some, hi, last, jnp.minimum, grid.q_len)
        q_ids, kv_ids = _padded(kv_ids, KV_PADDING), _padded(q_ids, Q_PADDING)
    turned = TileGrid(grid.batch, grid.heads, grid.kv_len, grid.q_len, block_kv, block_q)
    lo, hi = _bounds(lo, hi, turned, ragged=grid.kv_len % block_kv != 0)
    return Detail(lo, hi, q_ids, kv_ids, unsorted, **dirty)


def _grids(spec: Spec, block_q, block_kv) -> list[TileGrid]:
    """Every pairing of blocks of queries and of keys."""
    sizes = [x if isinstance(x, tuple) else (x,) for x in (block_q, block_kv)]
    shape = spec.batch, spec.q_heads, spec.q_len, spec.kv_len
    return [TileGrid(*shape, *blocks) for blocks in itertools.product(*sizes)]


def pair_bytes(mask: Mask, spec: Spec, *, block_q=128, block_kv=128) -> int:
    """Bytes of `Detail.bits` of the forward and the backward together: 0 for masks without.

    Args:
        mask, spec, block_q, block_kv: as in `detail_of`.
    """
    grids = _grids(spec, block_q, block_kv)
    if _spans_and_document(mask) is not None or all(mask.uniform(g) for g in grids):
        return 0
    lead = math.prod(_extents(mask, grids[0]))
    return lead * padded_rows(spec.q_len) * padded_rows(spec.kv_len) // 8 * 2


def _spans_and_document(mask: Mask):
    """The masks that `mask` is the conjunction of, all but one with row spans; None otherwise.

    Returns:
        ([masks with spans], Document or None); None when there is another kind, or two documents.
    """
    if isinstance(mask, masks.And):
        a, b = _spans_and_document(mask.a), _spans_and_document(mask.b)
        if a is None or b is None or (a[1] is not None and b[1] is not None):
            return None
        return a[0] + b[0], b[1] if a[1] is None else a[1]
    if isinstance(mask, masks.Document):
        return [], mask
    zero = np.zeros((1, 1), np.int32)
    span = mask.row_span(Position(zero, zero, zero, None, 1, 1))
    return None if span is None else ([mask], None)


def open_start(mask: Mask) -> bool:
    """Whether a row's interval is known to start at key 0, also where it is a traced number."""
    if isinstance(mask, masks.SlidingWindow):
        return mask.left is None
    return isinstance(mask, masks.Full | masks.Causal | masks.PrefixLM | masks.Lengths)


def _open_end(mask: Mask) -> bool:
    """Whether a row's interval is known to have no end."""
    if isinstance(mask, masks.SlidingWindow):
        return mask.right is None
    if isinstance(mask, masks.Lengths):
        return mask.q_lens is None and mask.kv_lens is None
    return isinstance(mask, masks.Full)


def _span(spans: list[Mask], grid: TileGrid):
    """The intersection of row spans: (lo, hi), each [batch | 1, q_len] or None for no bound."""
    q = np.arange(grid.q_len, dtype=np.int32)[None, :]
    batch = np.arange(grid.batch, dtype=np.int32)[:, None]
    at = Position(batch, np.zeros((1, 1), np.int32), q, None, grid.q_len, grid.kv_len)
    lo = hi = None
    for mask in spans:
        span = mask.row_span(at)
        assert span is not None
        if not open_start(mask):
            lo = span[0] if lo is None else largest(lo, span[0])
        if not _open_end(mask):
            hi = span[1] if hi is None else smallest(hi, span[1])
    return lo, hi


def _bounds(lo, hi, grid: TileGrid, *, ragged: bool):
    """Bounds within the keys that exist, padded to whole rows; None for those that bound nothing.

    Rows past q_len see nothing: hi is 0 there or, without a hi, lo is far away.
    """
    end = np.int32(grid.kv_len)
    if isinstance(lo, np.ndarray) and not (lo > 0).any():
        lo = None
    if isinstance(hi, np.ndarray) and not (hi < end).any():
        hi = None
    if hi is None and ragged:
        hi = np.full((1, grid.q_len), end, np.int32)
    if hi is not None:
        hi = _padded(smallest(hi, end), 0, grid.q_len)
    if lo is not None:
        lo = _padded(largest(lo, np.int32(0)), FAR if hi is None else 0, grid.q_len)
    return lo, hi


def _padded(x, fill: int, length: int | None = None):
    """An array [lead, length or 1] as int32 [lead, rows]."""
    xp, length = xp_of(x), x.shape[-1] if length is None else length
    x = xp.broadcast_to(x, (x.shape[0], length)).astype(np.int32)
    short = padded_rows(length) - length
    if not short:
        return x
    return xp.concatenate([x, xp.full((x.shape[0], short), fill, np.int32)], axis=-1)


def _padding(mask: Mask, grid: TileGrid, *, queries: bool):
    """The fields of `Detail` on padding."""
    fields = {"kv_dirty": _dirty(mask.kv_valid, grid, grid.kv_len)}
    if queries:
        fields["q_dirty"] = _dirty(mask.q_valid, grid, grid.q_len)
    found = {f"any_{n}": None if x is None else x.max(axis=1) for n, x in fields.items()}
    return fields | found


def _dirty(valid, grid: TileGrid, length: int):
    """1 for padding, int32 [batch | 1, rows]; None when nothing is."""
    batch = np.arange(grid.batch, dtype=np.int32)[:, None]
    counts = valid(batch, np.arange(length, dtype=np.int32)[None, :])
    if counts is None or (isinstance(counts, np.ndarray) and counts.all()):
        return None
    xp = xp_of(counts)
    return _padded(xp.where(counts, np.int32(0), np.int32(1)), 0, length)


def _ids(document: masks.Document):
    """The ids of queries and keys, padding as `Q_PADDING` and `KV_PADDING`."""
    q, kv = document.q_segment_ids, document._kv_ids
    return (
        jnp.where(q < 0, np.int32(Q_PADDING), q),
        jnp.where(kv < 0, np.int32(KV_PADDING), kv),
    )


def _document_span(q_ids, kv_ids):
    """Where each query's document lies among the keys, if the keys' ids ascend.

    Padding may stand before the first and after the last document. The order of the queries does
    not matter.

    Returns:
        first, last [batch | 1, q_len]; unsorted int32 [batch | 1], 1 where they do not ascend.
    """
    length = kv_ids.shape[-1]
    index = np.arange(length, dtype=np.int32)[None, :]
    before = jnp.concatenate([kv_ids[:, :1] * np.int32(0) - np.int32(1), kv_ids[:, :-1]], axis=-1)
    real, real_before = kv_ids >= 0, before >= 0
    zero = np.int32(0)
    # Keys in use end here; how many stretches of them there are; how often ids descend in one.
    operands = (
        jnp.where(real, index + np.int32(1), zero),
        jnp.where(real & ~real_before, np.int32(1), zero),
        jnp.where(real & real_before & (kv_ids < before), np.int32(1), zero),
    )
    used, stretches, descents = jax.lax.reduce(
        operands,
        (zero, zero, zero),
        lambda a, b: (jax.lax.max(a[0], b[0]), a[1] + b[1], a[2] + b[2]),
        (1,),
    )
    unsorted = (stretches > 1) | (descents > 0)
    lead = max(q_ids.shape[0], kv_ids.shape[0])
    target = jnp.broadcast_to(q_ids, (lead, q_ids.shape[-1]))
    first, last = _ranks(jnp.broadcast_to(kv_ids, (lead, length)), used[:, None], target)
    return first, last, unsorted.astype(np.int32)


def _ranks(kv_ids, used, target):
    """How many of the first `used` keys have an id below the target, and not above it.

    Args:
        kv_ids: [lead, kv_len], ascending up to `used`.
        used: [lead, 1].
        target: [lead, q_len].

    Returns:
        two int32 [lead, q_len].
    """
    length, lead = kv_ids.shape[-1], target.shape[0]
    step = 1
    while step * PROBES < length:
        step *= PROBES
    # Every row looks at the same ids first.
    below = up_to = np.zeros((1, 1), np.int32)
    wide, end = target[..., None], used[..., None]
    while step:
        ahead = np.arange(1, PROBES + 1, dtype=np.int32).reshape(1, 1, -1) * np.int32(step)

        def counted(found, compare, ahead=ahead):
            place = found[..., None] + ahead
            index = jnp.minimum(place, np.int32(length)) - np.int32(1)
            index = jnp.broadcast_to(index, (lead, *index.shape[1:]))
            there = jnp.take_along_axis(
                kv_ids, index.reshape(lead, -1), axis=-1, mode="clip"
            ).reshape(index.shape)
            less = compare(there, wide) & (place <= end)
            return jnp.where(less, np.int32(1), np.int32(0))

        # One reduction of two operands is one kernel.
        found = jax.lax.reduce(
            (counted(below, jnp.less), counted(up_to, jnp.less_equal)),
            (np.int32(0), np.int32(0)),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            (2,),
        )
        below, up_to = (x + n * np.int32(step) for x, n in zip((below, up_to), found, strict=True))
        step //= PROBES
    return below, up_to


def _joined(some, bound, of_document, closer, open_bound: int):
    """A bound of the other masks, moved to the document's where ids ascend; 0 for padding.

    Args:
        some: queries that are no padding, and whether ids ascend.
        bound, of_document: [batch | 1, q_len]; bound may be None.
        closer: of two bounds the stricter one.
        open_bound: what stands for None.
    """
    real, ascend = some
    if bound is None:
        bound = np.full((1, 1), open_bound, np.int32)
    bound = jnp.where(ascend, closer(jnp.asarray(bound), of_document), bound)
    return jnp.where(real, bound, np.int32(0))


def _extents(mask: Mask, grid: TileGrid) -> tuple[int, int]:
    """(batch, heads) that a mask depends on, each 1 where it does not."""
    if isinstance(mask, masks.Predicate):
        return (
            grid.batch if mask.trace.uses(0) else 1,
            grid.heads if mask.trace.uses(1) else 1,
        )
    inner = [_extents(m, grid) for m in vars(mask).values() if isinstance(m, Mask)]
    sizes = [mask.sizes(), *inner]
    return max(s[0] for s in sizes), max(s[1] for s in sizes)


def _bits(mask: Mask, grid: TileGrid, *, by_key: bool):
    """`Detail.bits`, or those whose rows are keys; packed a few queries at a time."""
    lead = _extents(mask, grid)
    q_rows, kv_rows = padded_rows(grid.q_len), padded_rows(grid.kv_len)
    rows = q_rows
    while rows > 32 and rows % 2 == 0 and math.prod(lead) * rows * kv_rows > CHUNK_PAIRS:
        rows //= 2
    batch = np.arange(lead[0], dtype=np.int32).reshape(-1, 1, 1, 1)
    head = np.arange(lead[1], dtype=np.int32).reshape(1, -1, 1, 1)
    kv = np.arange(kv_rows, dtype=np.int32).reshape(1, 1, 1, -1)
    q_last, kv_last = np.int32(grid.q_len - 1), np.int32(grid.kv_len - 1)

    def pack(first):
        q = first + np.arange(rows, dtype=np.int32).reshape(1, 1, -1, 1)
        at = Position(
            jnp.asarray(batch), jnp.asarray(head), jnp.minimum(q, q_last),
            jnp.minimum(kv, kv_last), grid.q_len, grid.kv_len,
        )  # fmt: skip
        seen = mask.allowed(at) & (q <= q_last) & (kv <= kv_last)
        seen = jnp.broadcast_to(seen, (*lead, rows, kv_rows))
        return _words(jnp.swapaxes(seen, -1, -2) if by_key else seen)

    bits = jax.lax.map(pack, jnp.arange(0, q_rows, rows, dtype=np.int32))
    if by_key:
        return jnp.moveaxis(bits, 0, 3).reshape(*lead, kv_rows, q_rows // 32)
    return jnp.moveaxis(bits, 0, 2).reshape(*lead, q_rows, kv_rows // 32)


def _words(seen):
    """Bools [..., n] as int32 [..., n / 32], the first pair in the lowest bit."""
    parts = seen.reshape(*seen.shape[:-1], seen.shape[-1] // 32, 32)
    shape = (1,) * (parts.ndim - 1) + (32,)
    values = np.left_shift(np.int32(1), np.arange(32, dtype=np.int32)).reshape(shape)
    chosen = jnp.where(parts, values, np.int32(0))
    return jax.lax.reduce(chosen, np.int32(0), jax.lax.bitwise_or, (parts.ndim - 1,))


__all__ = ["Detail", "detail_by_key", "detail_of", "padded_rows", "pair_bytes"]
