"""Attention for JAX on NVIDIA GPUs: one call, one mask object, forward and backward."""

from pallas_attn.allocator import OutOfPagesError, PageAllocator
from pallas_attn.api import mha, plan
from pallas_attn.block_table import BlockTable
from pallas_attn.decode_call import DecodeTiles
from pallas_attn.draw import draw
from pallas_attn.explain import explain
from pallas_attn.interpret import interpret
from pallas_attn.jax_nn import dot_product_attention
from pallas_attn.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Dense,
    Dilated,
    Document,
    Full,
    Lengths,
    Mask,
    Predicate,
    PrefixLM,
    SlidingWindow,
)
from pallas_attn.paged import PagedKV
from pallas_attn.serving import mha_decode, page_subset_attention, paged_attention
from pallas_attn.tiles import KernelTiles, Tiles
from pallas_attn.varlen import mha_varlen

__all__ = [
    "BlockSparse",
    "BlockTable",
    "Causal",
    "Chunked",
    "DecodeTiles",
    "Dense",
    "Dilated",
    "Document",
    "Full",
    "KernelTiles",
    "Lengths",
    "Mask",
    "OutOfPagesError",
    "PageAllocator",
    "PagedKV",
    "Predicate",
    "PrefixLM",
    "SlidingWindow",
    "Tiles",
    "dot_product_attention",
    "draw",
    "explain",
    "interpret",
    "mha",
    "mha_decode",
    "mha_varlen",
    "page_subset_attention",
    "paged_attention",
    "plan",
]
