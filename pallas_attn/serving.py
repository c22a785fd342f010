"""Attention of new tokens to a cache: `paged_attention`, `mha_decode`, `page_subset_attention`.

The new tokens of a sequence are its last ones: with n of them and kv_lens[s] = len, token t stands
at position len - n + t, and masks are asked at positions. So `Causal()` is aligned to each
sequence's end, a window counts back from each token, and arrays in masks cover positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_attn import decode_call
from pallas_attn import gpu as gpus
from pallas_attn.api import mha
from pallas_attn.block_table import BlockTable
from pallas_attn.decode_call import DecodeCall, DecodeInputs, DecodeSpec, DecodeTiles
from pallas_attn.interpret import is_active
from pallas_attn.mask_core import Mask, as_mask, int32_array, is_array
from pallas_attn.masks import Lengths
from pallas_attn.spec import Spec
from pallas_attn.varlen import offsets_operand

MAX_PAGE_SIZE = 1024
# A CPU has no multiprocessors to fill.
_ANY_SMS = 1


def paged_attention(
    q: Float[Array, "..."],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array | np.ndarray, "batch max_pages"],
    kv_lens: Int[Array | np.ndarray, "..."],
    *,
    cu_seqlens_q: Int[Array | np.ndarray, " offsets"] | None = None,
    mask: Mask | None = None,
    scale=None,
    soft_cap=None,
    sinks: Float[Array, " q_heads"] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    v_dim: int | None = None,
    tiles: DecodeTiles | None = None,
):
    """Attention of each sequence's newest tokens to its keys in pages, which include their own.

    New lengths, tables, offsets and members of the batch compile nothing. The keys are split over
    the GPU's multiprocessors as the lengths ask for, and merged in float32 (Flash-decoding).

    Args:
        q: [batch, q_heads, head_dim], one new token a sequence; [batch, q_len, q_heads, head_dim],
            q_len of them; or, with cu_seqlens_q, [tokens, q_heads, head_dim]: prefill, decoding or
            both in one batch.
        k_pages: [num_pages, page_size, kv_heads, head_dim], in q's dtype; page_size from 1 to 1024;
            kv_heads divides q_heads.
        v_pages: [num_pages, page_size, kv_heads, v_dim]; None when the values are the first v_dim
            channels of the keys (absorbed MLA).
        page_table: int [batch, max_pages]: the page of each run of page_size keys. Entries past a
            sequence's length are never read.
        kv_lens: int [batch]: keys of each sequence, new ones included, 0 to max_pages · page_size.
            Contents of NumPy arrays are checked; on a device, lengths outside count as the nearest
            that is inside.
        cu_seqlens_q: int [batch + 1], offsets of the sequences in q, ascending, from 0. Tokens past
            the last offset get 0.
        mask: a mask expression, asked at positions in each sequence, such as
            `Causal() & SlidingWindow(1024)`; None for all keys (of one new token the same as
            causal).
        scale, soft_cap, sinks: as in `mha`.
        num_splits: how many parts each sequence's keys are cut into; None for what fills the GPU.
            The result is the same to rounding.
        return_lse: also return the log of the softmax's denominator.
        backend: a backend's name, which runs or raises; None takes the first that can.
        v_dim: channels of the values, only where v_pages is None.
        tiles: the kernel's schedule; None for the backend's choice.

    Returns:
        out in q's dtype, of q's shape with v_dim for head_dim; with return_lse also lse, float32:
        [batch, q_heads], [batch, q_heads, q_len] or, with cu_seqlens_q, [q_heads, tokens]. Tokens
        that see no key get 0 and -inf.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected.
        NotImplementedError: when the backend asked for cannot take the call, with its reason.
    """
    _check_arrays(q=q, k_pages=k_pages, page_table=page_table, kv_lens=kv_lens)
    if len(page_table.shape) != 2:
        raise ValueError(f"page_table: got shape {page_table.shape}, expected [batch, max_pages]")
    batch = page_table.shape[0]
    _check_pool(k_pages)
    cache = {"k_pages": k_pages, "v_pages": v_pages}
    q_rows, q_len = _rows_of(q, batch, cu_seqlens_q)
    spec = _spec(
        q_rows, q_len, cache, batch, (k_pages.shape[1], page_table.shape[1], True), v_dim,
        {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "num_splits": num_splits},
    )  # fmt: skip
    lens = _lens(kv_lens, batch, page_table.shape[1] * k_pages.shape[1])
    _check_pages(page_table, kv_lens, k_pages)
    inputs = DecodeInputs(
        q_rows, k_pages, v_pages, int32_array("page_table", page_table),
        lens, _offsets(cu_seqlens_q, batch, q.shape[0]), _as_mask(mask), sinks,
    )  # fmt: skip
    out, lse = _attend(spec, inputs, backend, tiles)
    out, lse = _shaped(q, out, lse, cu_seqlens_q is not None)
    return (out, lse) if return_lse else out


def mha_decode(
    q: Float[Array, "..."],
    k_cache: Float[Array, "batch cache_len kv_heads head_dim"],
    v_cache: Float[Array, "..."] | None,
    kv_lens: Int[Array | np.ndarray, "..."],
    *,
    mask: Mask | None = None,
    scale=None,
    soft_cap=None,
    sinks: Float[Array, " q_heads"] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    v_dim: int | None = None,
    tiles: DecodeTiles | None = None,
):
    """Attention of each sequence's newest tokens to a contiguous cache, which includes their own.

    Args:
        q: [batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim].
        k_cache: [batch, cache_len, kv_heads, head_dim], in q's dtype.
        v_cache: [batch, cache_len, kv_heads, v_dim]; None as in `paged_attention`.
        kv_lens: int [batch]: the used length of each sequence; what lies past it never matters.
        mask, scale, soft_cap, sinks, num_splits, return_lse, backend, v_dim, tiles: as in
            `paged_attention`.

    Returns:
        out, and with return_lse also lse, as `paged_attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `paged_attention`.
    """
    _check_arrays(q=q, k_cache=k_cache, kv_lens=kv_lens)
    if len(k_cache.shape) != 4:
        raise ValueError(
            f"k_cache: got shape {k_cache.shape}, expected [batch, cache_len, kv_heads, head_dim]"
        )
    batch, cache_len = k_cache.shape[:2]
    cache = {"k_cache": k_cache, "v_cache": v_cache}
    q_rows, q_len = _rows_of(q, batch, None)
    spec = _spec(
        q_rows, q_len, cache, batch, (cache_len, 1, False), v_dim,
        {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "num_splits": num_splits},
    )  # fmt: skip
    lens = _lens(kv_lens, batch, cache_len)
    inputs = DecodeInputs(q_rows, k_cache, v_cache, None, lens, None, _as_mask(mask), sinks)
    out, lse = _attend(spec, inputs, backend, tiles)
    out, lse = _shaped(q, out, lse, False)
    return (out, lse) if return_lse else out


FORMS = ("fused", "two_stage")


def page_subset_attention(
    q: Float[Array, "batch q_len q_heads head_dim"],
    k_pages: Float[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "..."],
    page_lists: Int[Array | np.ndarray, "batch q_blocks max_pages"],
    kv_lens: Int[Array | np.ndarray, "..."],
    *,
    form: str | None = None,
    scale=None,
    soft_cap=None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
):
    """Cross-attention where each block of queries attends its own list of pages.

    For retrieval, and for caches that keep or evict whole pages.

    Args:
        q: [batch, q_len, q_heads, head_dim]; q_blocks divides q_len, and block i holds queries
            i·n to (i + 1)·n - 1 with n = q_len / q_blocks.
        k_pages, v_pages: as in `paged_attention`.
        page_lists: int [batch, q_blocks, max_pages]: the pages of each block of queries, in any
            order.
        kv_lens: int [batch, q_blocks]: keys in the list's pages, of which all but the last are
            full. Entries past them are never read.
        form: "fused" reads the pages where they lie; "two_stage" copies them into a dense array and
            runs `mha` on it; None chooses.
        scale, soft_cap, sinks, return_lse, backend: as in `mha`.

    Returns:
        out [batch, q_len, q_heads, v_dim]; with return_lse also lse [batch, q_heads, q_len].

    Raises:
        ValueError, TypeError, NotImplementedError: as `paged_attention`.
    """
    _check_arrays(q=q, k_pages=k_pages, v_pages=v_pages, page_lists=page_lists, kv_lens=kv_lens)
    if form is not None and form not in FORMS:
        raise ValueError(f"form: got {form!r}, expected one of {', '.join(FORMS)}, or None")
    if len(page_lists.shape) != 3:
        raise ValueError(
            f"page_lists: got shape {page_lists.shape}, expected [batch, q_blocks, max_pages]"
        )
    _check_pool(k_pages)
    batch, q_blocks, _ = page_lists.shape
    if len(q.shape) != 4 or q.shape[0] != batch or q_blocks == 0 or q.shape[1] % q_blocks:
        raise ValueError(
            f"q: got shape {q.shape}, expected [batch, q_len, q_heads, head_dim] of batch {batch} "
            f"and a q_len that {q_blocks} blocks divide"
        )
    if kv_lens.shape != (batch, q_blocks):
        raise ValueError(f"kv_lens: got shape {kv_lens.shape}, expected ({batch}, {q_blocks})")
    rows = q.reshape(batch * q_blocks, q.shape[1] // q_blocks, *q.shape[2:])
    table = page_lists.reshape(batch * q_blocks, page_lists.shape[2])
    lens = kv_lens.reshape(batch * q_blocks)
    options: dict[str, Any] = {
        "scale": scale, "soft_cap": soft_cap, "sinks": sinks, "return_lse": True, "backend": backend
    }  # fmt: skip
    form = form or _choose_form(rows, k_pages, v_pages, table, options)
    if form == "fused":
        out, lse = paged_attention(rows, k_pages, v_pages, table, lens, **options)
    else:
        k, v = (gather_pages(pages, table, lens) for pages in (k_pages, v_pages))
        out, lse = mha(rows, k, v, Lengths(kv_lens=lens), **options)
    out = out.reshape(batch, q.shape[1], *out.shape[2:])
    lse = lse.reshape(batch, q_blocks, *lse.shape[1:]).swapaxes(1, 2)
    lse = lse.reshape(batch, q.shape[2], q.shape[1])
    return (out, lse) if return_lse else out


def gather_pages(pages, page_table, kv_lens):
    """A cache in pages as one dense array, 0 past each sequence's length.

    Args:
        pages: [num_pages, page_size, kv_heads, dim].
        page_table: int [batch, max_pages].
        kv_lens: int [batch]; entries of pages past it are not read.

    Returns:
        [batch, max_pages·page_size, kv_heads, dim].
    """
    batch, max_pages = page_table.shape
    page_size = pages.shape[1]
    index = jnp.arange(max_pages, dtype=np.int32) * np.int32(page_size)
    lens = int32_array("kv_lens", kv_lens)
    table = jnp.where(
        index[None] < lens[:, None], int32_array("page_table", page_table), np.int32(0)
    )
    dense = pages[table].reshape(batch, max_pages * page_size, *pages.shape[2:])
    inside = jnp.arange(max_pages * page_size, dtype=np.int32)[None] < lens[:, None]
    return jnp.where(inside[..., None, None], dense, jnp.zeros_like(dense))


def _choose_form(rows, k_pages, v_pages, table, options: dict) -> str:
    """The faster form.

    Few queries a block do not pay for copying the pages first; nor do many on Hopper, where one
    kernel family does both. Elsewhere `mha` is the faster at many.
    """
    if rows.shape[1] * rows.shape[2] <= 4096:
        return "fused"
    cache = {"k_pages": k_pages, "v_pages": v_pages}
    pages = (k_pages.shape[1], table.shape[1], True)
    flat = rows.reshape(-1, *rows.shape[2:])
    given = dict.fromkeys(("scale", "soft_cap", "sinks", "num_splits")) | options
    spec = _spec(flat, rows.shape[1], cache, rows.shape[0], pages, None, given)
    hopper = options["backend"] in (None, "mosaic_gpu")
    hopper = hopper and decode_call.reason("mosaic_gpu", spec, as_mask(None), gpus.detect()) is None
    return "fused" if hopper else "two_stage"


def _attend(spec: DecodeSpec, inputs: DecodeInputs, backend, tiles):
    positions = (spec.batch, spec.q_heads, spec.capacity, spec.capacity)
    inputs.mask.check(*positions)
    if tiles is not None and not isinstance(tiles, DecodeTiles):
        raise TypeError(f"tiles: got {type(tiles).__name__}, expected a DecodeTiles or None")
    name = decode_call.choose(spec, inputs.mask, backend)
    if 0 in (spec.tokens, spec.batch, spec.capacity):
        out = jnp.zeros((spec.tokens, spec.q_heads, spec.v_dim), spec.dtype)
        return out, jnp.full((spec.tokens, spec.q_heads), -jnp.inf, jnp.float32)
    gpu = gpus.detect()
    module = decode_call.load(name)
    assert module is not None
    tiles = tiles or module.candidate_tiles(spec, gpu)[0]
    call = DecodeCall(spec, tiles, name, gpu.sms if gpu else _ANY_SMS, is_active())
    return decode_call.attend(call, inputs)


def _rows_of(q, batch: int, cu_seqlens):
    """Q as [tokens, q_heads, head_dim], and the tokens of each sequence where all have as many."""
    if cu_seqlens is not None:
        _check_arrays(cu_seqlens_q=cu_seqlens)
        if len(q.shape) != 3:
            raise ValueError(
                f"q: got shape {q.shape}, expected [tokens, q_heads, head_dim] with cu_seqlens_q"
            )
        return q, None
    if len(q.shape) not in (3, 4) or q.shape[0] != batch:
        raise ValueError(
            f"q: got shape {q.shape}, expected [batch, q_heads, head_dim] or [batch, q_len, "
            f"q_heads, head_dim] with batch {batch}"
        )
    if len(q.shape) == 3:
        return q, 1
    return q.reshape(q.shape[0] * q.shape[1], *q.shape[2:]), q.shape[1]


def _shaped(q, out, lse, ragged: bool):
    """Out and lse as the caller's q is laid out."""
    if ragged:
        return out, lse.T
    if len(q.shape) == 3:
        return out, lse
    out = out.reshape(*q.shape[:3], out.shape[-1])
    return out, lse.reshape(q.shape[:3]).swapaxes(1, 2)


def _spec(q, q_len, cache: dict, batch: int, pages, v_dim, options: dict) -> DecodeSpec:
    """Checks operands by the rules of `mha` and collects the static facts.

    Args:
        q: [tokens, q_heads, head_dim].
        q_len: tokens of each sequence, or None.
        cache: the keys and the values (or None) by their argument's name.
        batch: sequences.
        pages: (page_size, max_pages, paged).
        v_dim: as given.
        options: scale, soft_cap, sinks, num_splits as given.
    """
    (k_name, k), (v_name, v) = cache.items()
    shared = v is None
    if shared:
        if isinstance(v_dim, bool) or not isinstance(v_dim, int) or not 1 <= v_dim <= k.shape[3]:
            raise ValueError(
                f"v_dim: got {v_dim!r}, expected an int from 1 to {k.shape[3]}, the values' "
                f"channels among the keys', where {v_name} is None"
            )
        v_struct = jax.ShapeDtypeStruct((*k.shape[:3], v_dim), k.dtype)
    else:
        _check_arrays(**{v_name: v})
        if v_dim not in (None, v.shape[-1]):
            raise ValueError(f"v_dim: got {v_dim}, expected {v.shape[-1]} as in {v_name}, or None")
        v_struct = v
    if len(v_struct.shape) != 4 or v_struct.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{v_name}: got shape {v_struct.shape}, expected {k_name}'s {k.shape[:3]} and v_dim"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"head_dim: got {q.shape[-1]} in q and {k.shape[-1]} in {k_name}, expected one"
        )

    def struct(x):
        return jax.ShapeDtypeStruct((1, *x.shape[-3:]), x.dtype)

    scores = {name: options[name] for name in ("scale", "soft_cap", "sinks")}
    plain = Spec.of(struct(q), struct(k), struct(v_struct), **scores)
    splits = options["num_splits"]
    if splits is not None and (
        isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= 1024
    ):
        raise ValueError(f"num_splits: got {splits!r}, expected an int from 1 to 1024, or None")
    page_size, max_pages, paged = pages
    return DecodeSpec(
        batch=batch, tokens=q.shape[0], q_len=q_len, page_size=page_size, max_pages=max_pages,
        paged=paged, q_heads=plain.q_heads, kv_heads=plain.kv_heads, head_dim=plain.head_dim,
        v_dim=plain.v_dim, dtype=plain.dtype, scale=plain.scale, soft_cap=plain.soft_cap,
        has_sinks=plain.has_sinks, shared_kv=shared, num_splits=splits,
    )  # fmt: skip


def _check_arrays(**arrays) -> None:
    for name, x in arrays.items():
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, expected an array")


def _as_mask(mask):
    if isinstance(mask, BlockTable):
        raise TypeError(
            "mask: got a BlockTable, expected a mask expression (lengths change the table)"
        )
    return as_mask(mask)


def _lens(kv_lens, batch: int, capacity: int):
    if kv_lens.shape != (batch,):
        raise ValueError(f"kv_lens: got shape {kv_lens.shape}, expected [batch] = ({batch},)")
    lens = int32_array("kv_lens", kv_lens)
    if isinstance(kv_lens, np.ndarray) and ((kv_lens < 0) | (kv_lens > capacity)).any():
        raise ValueError(f"kv_lens: got {kv_lens.tolist()}, expected 0 to {capacity} each")
    return lens


def _check_pool(k_pages) -> None:
    if len(k_pages.shape) != 4:
        raise ValueError(
            f"k_pages: got shape {k_pages.shape}, expected [num_pages, page_size, kv_heads, "
            "head_dim]"
        )
    if not 1 <= k_pages.shape[1] <= MAX_PAGE_SIZE:
        raise ValueError(
            f"page_size: got {k_pages.shape[1]} (k_pages {k_pages.shape}), expected 1 to "
            f"{MAX_PAGE_SIZE}"
        )


def _check_pages(page_table, kv_lens, k_pages) -> None:
    """Raises where NumPy arrays name a page that is none, among those that are used."""
    if not (isinstance(page_table, np.ndarray) and isinstance(kv_lens, np.ndarray)):
        return
    num_pages, page_size = k_pages.shape[:2]
    used = np.arange(page_table.shape[1]) * page_size < kv_lens[:, None]
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    if wrong.any():
        raise ValueError(
            f"page_table: got {page_table[wrong].tolist()}, expected 0 to {num_pages - 1} in the "
            "entries that kv_lens uses"
        )


def _offsets(cu_seqlens, batch: int, tokens: int):
    if cu_seqlens is None:
        return None
    if cu_seqlens.shape != (batch + 1,):
        raise ValueError(
            f"cu_seqlens_q: got shape {cu_seqlens.shape}, expected [batch + 1] = ({batch + 1},)"
        )
    return offsets_operand("cu_seqlens_q", cu_seqlens, tokens)


__all__ = ["gather_pages", "mha_decode", "page_subset_attention", "paged_attention"]
