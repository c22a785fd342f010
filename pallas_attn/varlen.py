"""`mha_varlen`: sequences of any length side by side, [total, heads, dim], without padding.

The sequences become a mask over the packed axis. For masks that are one interval a row (causal,
windows, chunks, prefixes) that is again one interval a row, in packed indices: row i of sequence s
sees keys cu_seqlens_kv[s] + [start, end), with start and end asked at its position inside the
sequence. Other masks are asked at positions inside the sequence, pair by pair.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_attn.api import mha
from pallas_attn.block_table import BlockTable
from pallas_attn.mask_core import (
    Full,
    Mask,
    Position,
    as_mask,
    int32_array,
    is_array,
    largest,
    smallest,
    span_tiles,
)
from pallas_attn.masks import RowSpan


class Packed(Mask):
    """A mask inside each sequence of a packed axis, pair by pair; built by `mha_varlen`.

    Args:
        inner: the mask, asked at positions inside the sequences; its batch is the sequence's index.
        q_cu, kv_cu: int32 [sequences + 1] offsets.
        q_len, kv_len: lengths of the packed axes.
    """

    runs = True

    def __init__(self, inner: Mask, q_cu, kv_cu, q_len: int, kv_len: int):
        self.inner = inner
        self.q_cu, self.kv_cu = q_cu, kv_cu
        self.q_segment, self.q_position = locate(q_cu, q_len)
        self.kv_segment, self.kv_position = locate(kv_cu, kv_len)

    def allowed(self, at):
        segment = self.q_segment[at.q]
        counts = segment >= 0
        index = jnp.maximum(segment, np.int32(0))
        inside = Position(
            index, at.head, self.q_position[at.q], self.kv_position[at.kv],
            self.q_cu[index + 1] - self.q_cu[index], self.kv_cu[index + 1] - self.kv_cu[index],
        )  # fmt: skip
        return counts & (segment == self.kv_segment[at.kv]) & self.inner.allowed(inside)

    def tiles(self, grid):
        # Blocks that share a sequence may hold something; the inner mask is not asked.
        start, end = _segment_span(self.q_segment, self.kv_cu)
        some, every = span_tiles(grid, start[None], end[None])
        return some, every & isinstance(self.inner, Full)

    def q_valid(self, batch, q):
        return self.q_segment[q] >= 0

    def kv_valid(self, batch, kv):
        return self.kv_segment[kv] >= 0


def locate(cu_seqlens, total: int):
    """Sequence and position inside it of each packed index; -1 and 0 past the last offset.

    Args:
        cu_seqlens: int32 [sequences + 1].
        total: length of the packed axis.

    Returns:
        int32 [total] each.
    """
    index = jnp.arange(total, dtype=np.int32)
    # Few offsets, many tokens: comparing with all of them is one fused pass and skips
    # empty sequences.
    segment = (index[:, None] >= cu_seqlens[None, 1:]).sum(-1, dtype=np.int32)
    inside = (segment < np.int32(cu_seqlens.shape[0] - 1)) & (index >= cu_seqlens[0])
    start = cu_seqlens[jnp.minimum(segment, np.int32(cu_seqlens.shape[0] - 2))]
    zero = np.int32(0)
    return jnp.where(inside, segment, np.int32(-1)), jnp.where(inside, index - start, zero)


def _segment_span(segment, kv_cu):
    index = jnp.maximum(segment, np.int32(0))
    counts = segment >= 0
    return (jnp.where(counts, kv_cu[index + i], np.int32(0)) for i in (0, 1))


def packed_mask(mask: Mask, q_cu, kv_cu, q_len: int, kv_len: int) -> Mask:
    """The mask over packed axes that lets each sequence attend to itself under `mask`.

    Args:
        mask: positions count inside each sequence; its batch is the sequence's index.
        q_cu, kv_cu: int32 [sequences + 1] offsets.
        q_len, kv_len: lengths of the packed axes.
    """
    segment, position = locate(q_cu, q_len)
    index = jnp.maximum(segment, np.int32(0))
    lens = (cu[index + 1] - cu[index] for cu in (q_cu, kv_cu))
    at = Position(index, np.zeros((1,), np.int32), position, None, *lens)
    span = mask.row_span(at)
    if span is None:
        return Packed(mask, q_cu, kv_cu, q_len, kv_len)
    low, high = _segment_span(segment, kv_cu)
    start, end = (jnp.broadcast_to(x, (q_len,)) for x in span)
    start, end = low + largest(start, np.int32(0)), low + smallest(end, high - low)
    counts = segment >= 0
    start, end = (jnp.where(counts, x, np.int32(0)) for x in (start, end))
    return RowSpan(start, end, kv_cu[-1])


def mha_varlen(
    q: Float[Array, "q_total q_heads head_dim"],
    k: Float[Array, "kv_total kv_heads head_dim"],
    v: Float[Array, "kv_total kv_heads v_dim"],
    cu_seqlens_q: Int[Array | np.ndarray, " offsets"],
    cu_seqlens_kv: Int[Array | np.ndarray, " offsets"] | None = None,
    *,
    mask: Mask | None = None,
    bias: Float[Array, "..."] | None = None,
    scale=None,
    soft_cap=None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: bool = False,
    **options,
):
    """Attention inside each sequence of a packed batch, differentiable.

    Args:
        q: [q_total, q_heads, head_dim], the sequences one after the other.
        k: [kv_total, kv_heads, head_dim].
        v: [kv_total, kv_heads, v_dim].
        cu_seqlens_q: int [sequences + 1], offsets of the sequences in q, ascending, from 0; may be
            traced. Empty sequences are fine. Tokens past the last offset get exact zeros, in
            gradients too.
        cu_seqlens_kv: the same for k and v; None for the queries' offsets.
        mask: a mask expression; positions count inside each sequence,
            `Causal(align="bottom_right")` aligns each sequence's ends, and per-batch arrays hold
            one entry a sequence.
        bias: broadcasts to [1, q_heads, q_total, kv_total], in packed indices.
        scale, soft_cap, sinks, return_lse: as in `mha`.
        **options: backend, deterministic and tiles, as in `mha`.

    Returns:
        out [q_total, q_heads, v_dim]; with return_lse also lse [q_heads, q_total].

    Raises:
        ValueError, TypeError, NotImplementedError: as `mha`; ValueError also for offsets in a NumPy
            array that do not ascend from 0 or pass the end.
    """
    if isinstance(mask, BlockTable):
        raise TypeError(
            "mask: got a BlockTable, expected a mask expression (offsets change the table)"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
        if x.ndim != 3:
            raise ValueError(f"{name}: got shape {x.shape}, expected [total, heads, dim]")
    cu_q = cu_kv = offsets_operand("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    if cu_seqlens_kv is not None:
        cu_kv = offsets_operand("cu_seqlens_kv", cu_seqlens_kv, k.shape[0])
    if cu_q.shape != cu_kv.shape:
        raise ValueError(
            f"cu_seqlens_kv: got {cu_kv.shape[0]} offsets, expected {cu_q.shape[0]} as in "
            "cu_seqlens_q"
        )
    expression = as_mask(mask)
    sequences, heads = cu_q.shape[0] - 1, expression.sizes()[1]
    if expression.sizes()[0] not in (1, sequences) or heads not in (1, q.shape[1]):
        raise ValueError(
            f"mask: got per-sequence arrays of {expression.sizes()[0]} entries, expected 1 or "
            f"{sequences}"
        )
    packed = packed_mask(expression, cu_q, cu_kv, q.shape[0], k.shape[0])
    return mha(
        q, k, v, packed, bias=bias, scale=scale, soft_cap=soft_cap, sinks=sinks,
        return_lse=return_lse, **options,
    )  # fmt: skip


def offsets_operand(name: str, offsets, total: int):
    """Offsets of sequences side by side in `total` tokens, as int32.

    Raises:
        TypeError, ValueError: for what is no such thing; of the numbers, only those of a NumPy
            array are looked at.
    """
    if not is_array(offsets):
        raise TypeError(f"{name}: got {type(offsets).__name__}, expected an integer array")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ValueError(f"{name}: got shape {offsets.shape}, expected [sequences + 1], 2 or more")
    array = int32_array(name, offsets)
    if isinstance(offsets, np.ndarray) and (
        offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > total
    ):
        raise ValueError(
            f"{name}: got {offsets.tolist()}, expected offsets that ascend from 0 to {total} at "
            "most"
        )
    return array


__all__ = ["Packed", "locate", "mha_varlen", "offsets_operand", "packed_mask"]
