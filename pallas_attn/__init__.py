"""Attention for JAX on NVIDIA GPUs: one call, one mask object, forward and backward."""

from pallas_attn.api import mha, plan
from pallas_attn.block_table import BlockTable
from pallas_attn.interpret import interpret
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
from pallas_attn.tiles import KernelTiles, Tiles

__all__ = [
    "BlockSparse",
    "BlockTable",
    "Causal",
    "Chunked",
    "Dense",
    "Dilated",
    "Document",
    "Full",
    "KernelTiles",
    "Lengths",
    "Mask",
    "Predicate",
    "PrefixLM",
    "SlidingWindow",
    "Tiles",
    "interpret",
    "mha",
    "plan",
]
