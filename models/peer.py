"""The same attention as `jax.nn` has it, for comparison: bool masks of [batch, 1, len, len].

This is what packed documents take without mask expressions: the whole mask as an array, made once
a step for each distinct window, which "xla" and "cudnn" both apply to every pair of tokens.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .gpt import AttentionFn, GPTConfig

IMPLEMENTATIONS: dict[str, Literal["xla", "cudnn"]] = {"jax_xla": "xla", "jax_cudnn": "cudnn"}


def dense_masks(config: GPTConfig, segment_ids: jax.Array) -> dict[str, jax.Array | None]:
    """Writes the model's masks as bool arrays; plain causal layers need none.

    Args:
        config: Of the model.
        segment_ids: int32 [batch, len]; tokens see their own document only, negative is padding.

    Returns:
        bool [batch, 1, len, len], True = attend, for each letter that the layers use; None for C.
    """
    index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    distance = (index[:, None] - index[None, :])[None]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    packed = same & (segment_ids >= 0)[:, :, None] & (distance >= 0)
    known = {"L": packed, "S": packed & (distance <= config.attention.window)}
    return {x: None if x == "C" else known[x][:, None] for x in config.letters}


def _jax_nn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    *,
    implementation: Literal["xla", "cudnn"],
    **options: Any,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, called as `pa.mha` is; without a mask it is causal."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"jax.nn.dot_product_attention has no {name}")
    causal = mask is None
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=causal, implementation=implementation
    )


def attention_fn(name: str) -> AttentionFn:
    """Gives one of the implementations in `jax.nn`.

    Args:
        name: A key of IMPLEMENTATIONS.

    Returns:
        A function that `GPT` takes as `attention`, with masks from `dense_masks`.
    """
    return functools.partial(_jax_nn, implementation=IMPLEMENTATIONS[name])
