"""`PagedKV`: keys and values of many sequences in one pool of pages.

Key j of sequence s lies in page page_table[s, j // page_size] at j % page_size. Which pages a
sequence has is decided on the host (`allocator.py`); arrays here only hold the outcome.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.mask_core import is_array
from pallas_attn.varlen import locate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """A cache in pages; a pytree, so it may cross jit and be donated.

    Attributes:
        k_pages: [num_pages, page_size, kv_heads, head_dim].
        v_pages: [num_pages, page_size, kv_heads, v_dim]; None where the values are channels of the
            keys (absorbed MLA).
        page_table: int32 [batch, max_pages]; entries past a sequence's length may hold anything.
        kv_lens: int32 [batch]: keys of each sequence.
    """

    k_pages: Any
    v_pages: Any
    page_table: Any
    kv_lens: Any

    @staticmethod
    def empty(
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        batch: int,
        max_pages: int,
        v_dim: int | None = None,
        dtype=jnp.bfloat16,
    ) -> "PagedKV":
        """A pool of zeros, and a table and lengths of sequences without keys.

        Args:
            num_pages, page_size: the pool's pages and their keys.
            kv_heads, head_dim: of the keys.
            batch, max_pages: rows of the page table and pages of a row.
            v_dim: of the values; None for head_dim, 0 for no values (absorbed MLA).
            dtype: of keys and values.

        Raises:
            ValueError: for sizes below 1, v_dim apart.
        """
        sizes = {
            "num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads,
            "head_dim": head_dim, "batch": batch, "max_pages": max_pages,
        }  # fmt: skip
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}, expected an int from 1 up")
        width = head_dim if v_dim is None else v_dim
        lead = (num_pages, page_size, kv_heads)
        return PagedKV(
            jnp.zeros((*lead, head_dim), dtype),
            jnp.zeros((*lead, width), dtype) if width else None,
            jnp.zeros((batch, max_pages), jnp.int32),
            jnp.zeros((batch,), jnp.int32),
        )

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.k_pages.shape[1]

    @property
    def capacity(self) -> int:
        """The most keys that the table's rows can name."""
        return self.page_table.shape[1] * self.page_size

    def append(self, k, v=None, *, q_lens=None, cu_seqlens_q=None) -> "PagedKV":
        """Writes new tokens' keys and values after each sequence's last, and counts them.

        Outside jit the pools are donated: they are updated in place, and this PagedKV must not be
        used afterwards. Inside jit XLA does the same where nothing else uses the old ones; donate
        the argument of your own jit.

        Args:
            k: [batch, kv_heads, head_dim], one token a sequence; [batch, q_len, kv_heads,
                head_dim]; or [tokens, kv_heads, head_dim] with cu_seqlens_q. In the pool's dtype.
            v: the same for values; None where v_pages is.
            q_lens: int [batch], how many of the q_len tokens count; None for all.
            cu_seqlens_q: int [batch + 1], offsets of the sequences in k and v; tokens past the
                last one are not written.

        Returns:
            the cache with the new tokens. Tokens that would pass the capacity are not written, and
            kv_lens stops there.

        Raises:
            ValueError, TypeError: naming the argument, what came and what was expected.
        """
        self._check(k, v, q_lens, cu_seqlens_q)
        batch = self.page_table.shape[0]
        if cu_seqlens_q is None and k.ndim == 3:
            k, v = k[:, None], None if v is None else v[:, None]
        if cu_seqlens_q is None:
            q_len = k.shape[1]
            counts = np.full(batch, q_len) if q_lens is None else q_lens
            counts = jnp.clip(jnp.asarray(counts).astype(np.int32), np.int32(0), np.int32(q_len))
            k, v = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in (k, v))
            return _append(self, k, v, counts, None)
        return _append(self, k, v, None, jnp.asarray(cu_seqlens_q).astype(np.int32))

    def _check(self, k, v, q_lens, cu_seqlens_q):
        batch = self.page_table.shape[0]
        ragged = cu_seqlens_q is not None
        if (v is None) != (self.v_pages is None):
            raise ValueError("v: expected with v_pages and without them not")
        for name, x, pages in (("k", k, self.k_pages), ("v", v, self.v_pages)):
            if pages is None:
                continue
            if not is_array(x):
                raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
            ranks = (3,) if ragged else (3, 4)
            if x.ndim not in ranks or x.shape[-2:] != pages.shape[2:]:
                raise ValueError(
                    f"{name}: got shape {x.shape}, expected rank {' or '.join(map(str, ranks))} "
                    f"and to end in {pages.shape[2:]}"
                )
            if not ragged and x.shape[0] != batch:
                raise ValueError(f"{name}: got shape {x.shape}, expected batch {batch}")
            if x.shape[:-2] != k.shape[:-2]:
                raise ValueError(f"v: got shape {x.shape}, expected k's tokens {k.shape[:-2]}")
            if x.dtype != pages.dtype:
                raise ValueError(f"{name}: got dtype {x.dtype}, expected the pool's {pages.dtype}")
        for name, x, shape in (
            ("q_lens", q_lens, (batch,)), ("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
        ):  # fmt: skip
            if x is None:
                continue
            if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"{name}: expected an integer array")
            if x.shape != shape:
                raise ValueError(f"{name}: got shape {x.shape}, expected {shape}")
        if ragged and q_lens is not None:
            raise ValueError("q_lens: got one beside cu_seqlens_q, expected one of the two")


@functools.partial(jax.jit, donate_argnames=("k_pages", "v_pages"))
def _write(k_pages, v_pages, page_table, kv_lens, tokens, counts, offsets):
    k, v = tokens
    batch, max_pages = page_table.shape
    num_pages, page_size = k_pages.shape[:2]
    total = k.shape[0]
    if offsets is None:
        seq, position = _grid(batch, total // batch)
        valid = position < counts[seq]
    else:
        seq, position = locate(offsets, total)
        valid, seq = seq >= 0, jnp.maximum(seq, np.int32(0))
        counts = offsets[1:] - offsets[:-1]
    index = kv_lens[seq] + position
    number = lax.div(index, jnp.full_like(index, page_size))
    valid = valid & (number < np.int32(max_pages)) & (index >= 0)
    number = jnp.where(valid, number, np.int32(0))
    # A page past the pool is written nowhere.
    page = jnp.where(valid, page_table[seq, number], np.int32(num_pages))
    place = lax.rem(index, jnp.full_like(index, page_size))
    pools = [
        None if x is None else pool.at[page, place].set(x, mode="drop")
        for pool, x in ((k_pages, k), (v_pages, v))
    ]
    capacity = np.int32(max_pages * page_size)
    return (*pools, jnp.minimum(kv_lens + counts, capacity))


def _grid(batch: int, q_len: int):
    """Sequence and position of each token of a batch with equally many."""
    index = jnp.arange(batch * q_len, dtype=np.int32)
    seq = lax.div(index, jnp.full_like(index, max(1, q_len)))
    return seq, index - seq * np.int32(q_len)


def _append(cache: PagedKV, k, v, counts, offsets) -> PagedKV:
    table = cache.page_table
    pools = _write(cache.k_pages, cache.v_pages, table, cache.kv_lens, (k, v), counts, offsets)
    return dataclasses.replace(cache, k_pages=pools[0], v_pages=pools[1], kv_lens=pools[2])


__all__ = ["PagedKV"]
