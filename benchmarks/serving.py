"""Attention to a cache in pages: inputs, what is right, and how each implementation is called.

Rows of queries are as in `ServingShape`: sequences, or the lists of "subset". A way to compute them
takes (case, data), `data` as `prepare` made it from that of `make`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import suites


def _as_is(case, data):
    """Takes the data as they are."""
    return data


def _never(case):
    """Has no objection to any case."""


@dataclass(frozen=True)
class Way:
    """How an implementation computes serving cases.

    Attributes:
        forward: (case, data) -> out [tokens, q_heads, v_dim], traceable.
        unsupported: Returns why it can't take a case, or None.
        prepare: (case, data) -> data as `forward` wants them; traceable, not timed.
        kinds: Those of ServingShape that it computes.
        checked: Whether `forward` returns attention.
    """

    forward: Callable[[Any, Any], Any]
    unsupported: Callable[[Any], str | None] = _never
    prepare: Callable[[Any, Any], Any] = _as_is
    kinds: tuple[str, ...] = suites.SERVING_KINDS
    checked: bool = True


# --- inputs and what is right ---------------------------------------------------------------------


def pages_of(n, page_size):
    """Returns how many pages hold n keys."""
    return -(-n // page_size)


def sizes(case):
    """Returns {name: (shape, dtype)} of the arrays of a case.

    Returns:
        q [tokens, q_heads, head_dim]; k, v [pages, page_size, kv_heads, dim], v of "mla" without
        pages; int32: table [rows, max_pages] (-1 past a row's pages), lens [rows], cu [rows + 1].
    """
    s = case.shape
    keys = s.pool or sum(pages_of(n, s.page_size) * s.page_size for n in s.lens)
    pages = (keys // s.page_size, s.page_size, s.kv_heads)
    return {
        "q": ((s.tokens, s.q_heads, s.head_dim), s.dtype),
        "k": ((*pages, s.head_dim), s.dtype),
        "v": ((0 if s.kind == "mla" else pages[0], *pages[1:], s.v_dim), s.dtype),
        "table": ((s.batch, s.max_pages), "int32"),
        "lens": ((s.batch,), "int32"),
        "cu": ((s.batch + 1,), "int32"),
    }


def specs(case):
    """Returns the ShapeDtypeStructs of `make`."""
    return {n: jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for n, (x, dtype) in sizes(case).items()}


def table_of(case, seed=0):
    """Returns the page table: pages of sequences shuffled, those of lists drawn from the pool."""
    s, rng = case.shape, np.random.default_rng(seed)
    table = np.full((s.batch, s.max_pages), -1, np.int32)
    counts = [pages_of(n, s.page_size) for n in s.lens]
    total = sizes(case)["k"][0][0]
    order, first = rng.permutation(total), 0
    for row, count in zip(table, counts, strict=True):
        if s.kind == "subset":
            row[:count] = rng.choice(total, count, replace=False)
        else:
            row[:count] = order[first : first + count]
            first += count
    return table


@functools.partial(jax.jit, static_argnums=(0,))
def _floats(case, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    of = {n: x for n, x in sizes(case).items() if n in ("q", "k", "v")}
    return {
        name: jax.random.normal(key, *x) for key, (name, x) in zip(keys, of.items(), strict=True)
    }


def make(case):
    """Returns the arrays of `sizes`: standard normal ones, and the table, lengths and offsets."""
    s = case.shape
    cu = np.cumsum([0, *s.q_lens])
    ints = {"table": table_of(case), "lens": s.lens, "cu": cu}
    return _floats(case) | {n: jnp.asarray(x, jnp.int32) for n, x in ints.items()}


def compared(case):
    """Returns the (row, KV head) pairs that are compared: the first, a middle, the last one."""
    s = case.shape
    return sorted({(0, 0), (s.batch // 2, s.kv_heads // 2), (s.batch - 1, s.kv_heads - 1)})


def _part(case, row, head, out):
    s = case.shape
    first, group = sum(s.q_lens[:row]), s.q_heads // s.kv_heads
    return out[first : first + s.q_lens[row], head * group : (head + 1) * group].swapaxes(0, 1)


@functools.partial(jax.jit, static_argnums=0)
def expect(case, data):
    """Returns what is right for the compared parts, float32 [group, queries, v_dim] each."""
    from benchmarks import check

    s, found = case.shape, []
    for row, head in compared(case):
        n, q_len = s.lens[row], s.q_lens[row]
        pages = data["table"][row, : pages_of(n, s.page_size)]
        k = data["k"][pages, :, head].reshape(-1, s.head_dim)[:n]
        if s.kind == "mla":
            v = k[:, : s.v_dim]
        else:
            v = data["v"][pages, :, head].reshape(-1, s.v_dim)[:n]
        mask = case.mask
        if mask.kind == "causal":
            # The same at the sequence's end: keys up to n - q_len past the query's number.
            mask = suites.MaskSpec("window", left=n, right=n - q_len)
        q = _part(case, row, head, data["q"])
        nothing = jnp.zeros((*q.shape[:2], s.v_dim), jnp.float32)
        found.append(check.reference(mask, q, k, v, nothing, None, False)["out"])
    return found


@functools.partial(jax.jit, static_argnums=0)
def _errors(case, out, expected):
    pairs = []
    for (row, head), right in zip(compared(case), expected, strict=True):
        difference = _part(case, row, head, out).astype(jnp.float32) - right
        relative = jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(right.ravel())
        pairs.append((relative, jnp.abs(difference).max()))
    return [jnp.stack(x).max() for x in zip(*pairs, strict=True)]


def errors(case, out, expected):
    """Returns the worst (relative, absolute) error, as check.Reference.errors does."""
    found = (float(x) for x in _errors(case, out, expected))
    return tuple({"out": x if x == x else float("inf")} for x in found)


# --- ours -----------------------------------------------------------------------------------------

OWN = {"contiguous": ("decode", "prefill"), "fused": ("subset",), "two_stage": ("subset",)}


def ours(backend, *options):
    """Returns our way; `options` hold one of OWN, or a DecodeTiles as in "16x64x4x5x6", or none.

    "contiguous" has the keys of a sequence side by side, and calls `mha_decode` and `mha_varlen`.
    """
    own = next((option for option in options if option in OWN), None)
    tiles = next((option for option in options if option[:1].isdigit()), None)

    def unsupported(case):
        try:
            jax.eval_shape(lambda data: forward(case, prepare(case, data)), specs(case))
        except NotImplementedError as error:
            return " ".join(str(error).split())[:300]
        return None

    def prepare(case, data):
        if own != "contiguous":
            return data
        return data | {"k": _dense(case, data, "k"), "v": _dense(case, data, "v")}

    def forward(case, data):
        import pallas_attn as pa

        s, k, v = case.shape, data["k"], data["v"]
        given: dict[str, Any] = {"backend": backend}
        if tiles:
            given["tiles"] = pa.DecodeTiles(*map(int, tiles.split("x")), gather=True)
        pages = (data["table"], data["lens"])
        match s.kind:
            case "decode" if own == "contiguous":
                return pa.mha_decode(data["q"], k, v, data["lens"], **given)
            case "decode":
                return pa.paged_attention(data["q"], k, v, *pages, **given)
            case "mla":
                return pa.paged_attention(data["q"], k, None, *pages, v_dim=s.v_dim, **given)
            case "prefill" if own == "contiguous":
                mask, offsets = pa.Causal(align="bottom_right"), jnp.cumsum(data["lens"])
                offsets = jnp.pad(offsets.astype(jnp.int32), (1, 0))
                return pa.mha_varlen(data["q"], k, v, data["cu"], offsets, mask=mask, **given)
            case "prefill":
                more = {"cu_seqlens_q": data["cu"], "mask": pa.Causal()}
                return pa.paged_attention(data["q"], k, v, *pages, **more, **given)
        # One sequence of blocks is as good as several.
        q, lists, lens = (x[None] for x in (data["q"], *pages))
        return pa.page_subset_attention(q, k, v, lists, lens, form=own, backend=backend)[0]

    kinds = OWN[own] if own else suites.SERVING_KINDS
    return Way(forward, unsupported, prepare, kinds)


def _dense(case, data, name):
    """The keys or values of all sequences: [rows, longest, ...], of "prefill" end to end."""
    s, pages = case.shape, data[name]
    if s.kind == "prefill":
        used = [data["table"][row, : pages_of(n, s.page_size)] for row, n in enumerate(s.lens)]
        parts = [
            pages[x].reshape(-1, *pages.shape[2:])[:n] for x, n in zip(used, s.lens, strict=True)
        ]
        return jnp.concatenate(parts)
    found = pages[jnp.maximum(data["table"], 0)]
    return found.reshape(s.batch, -1, *pages.shape[2:])


# --- peers ----------------------------------------------------------------------------------------


def _without_junk(case, data):
    """The data with a table whose unused entries name a page: peers may read them."""
    return data | {"table": jnp.maximum(data["table"], 0)}


def fa3(num_splits="1"):
    """FlashAttention-3 with a cache in pages; it takes the number of splits from its caller."""
    splits = int(num_splits)

    def unsupported(case):
        if case.shape.head_dim != 128:
            return "its wheel is built for head_dim 128 alone"
        return None

    def forward(case, data):
        attend = importlib.import_module("flash_attn3_jax").flash_mha_with_kvcache
        more = {"cache_seqlens": data["lens"], "page_table": data["table"], "num_splits": splits}
        return attend(data["q"][:, None], data["k"], data["v"], **more)[:, 0]

    return Way(forward, unsupported, _without_junk, ("decode",))


JAX_PAGED = "jax.experimental.pallas.ops.gpu.paged_attention"


def jax_paged(num_splits="16"):
    """Jax's own Triton kernel, which has heads before pages and no scale of its own."""
    splits = int(num_splits)

    def unsupported(case):
        if case.shape.max_pages % splits:
            return f"{splits} splits do not divide {case.shape.max_pages} pages"
        return None

    def prepare(case, data):
        moved = {n: data[n].transpose(2, 0, 1, 3) for n in ("k", "v")}
        return _without_junk(case, data) | moved

    def forward(case, data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attend = importlib.import_module(JAX_PAGED).paged_attention
        s = case.shape
        blocks = {"block_h": 16, "pages_per_compute_block": max(1, 128 // s.page_size)}
        q = data["q"] * jnp.asarray(s.head_dim**-0.5, data["q"].dtype)
        return attend(
            q, data["k"], data["v"], data["table"], data["lens"], k_splits=splits, **blocks
        )

    return Way(forward, unsupported, prepare, ("decode",))


def copy():
    """Copies the keys, which reads and writes as many bytes as keys and values hold together."""
    return Way(lambda case, data: -data["k"], kinds=("decode",), checked=False)
