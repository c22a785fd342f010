"""Plain attention with the whole [q_len, kv_len] matrix: what every backend is checked against.

Runs in any float dtype, float64 included; its gradients come from JAX's own differentiation. It
shares the masks' meaning (`Mask.allowed`) with the kernels, and no other code.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.block_table import BlockTable
from pallas_attn.mask_core import Position
from pallas_attn.masks import as_mask


def visible(mask, batch: int, q_heads: int, q_len: int, kv_len: int):
    """The mask as a bool array [batch, q_heads, q_len, kv_len]."""
    mask = mask.mask if isinstance(mask, BlockTable) else as_mask(mask)

    def index(n, axis):
        return jnp.arange(n, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(4)])

    position = Position(
        index(batch, 0), index(q_heads, 1), index(q_len, 2), index(kv_len, 3), q_len, kv_len
    )
    return jnp.broadcast_to(mask.allowed(position), (batch, q_heads, q_len, kv_len))


def mha(q, k, v, mask=None, *, bias=None, scale=None, soft_cap=None, sinks=None):
    """Attention by its definition, in the operands' own dtype.

    Args:
        q, k, v, mask, bias, scale, soft_cap, sinks: as in `pallas_attn.mha`, rank 4.

    Returns:
        out [batch, q_len, q_heads, v_dim]; lse [batch, q_heads, q_len]. float32 or wider inside.
    """
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    k, v = (jnp.repeat(x, q_heads // kv_heads, axis=2) for x in (k, v))
    logits = jnp.einsum(
        "bqhd,bkhd->bhqk", q, k, preferred_element_type=wide, precision=lax.Precision.HIGHEST
    )
    logits = logits * scale
    if bias is not None:
        logits = logits + bias.astype(wide)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    # A bias of -inf hides a pair, too.
    seen = visible(mask, batch, q_heads, q_len, kv_len) & ~jnp.isneginf(logits)
    some = seen.any(-1, keepdims=True)
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.where(some, logits, 0.0).max(-1, keepdims=True, initial=-jnp.inf)
    sink = None if sinks is None else sinks.astype(wide)[None, :, None, None]
    if sink is not None:
        top = jnp.maximum(top, sink)
    top = lax.stop_gradient(jnp.where(some, top, 0.0))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0.0) - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)[..., 0]
    weights = (weights / total).astype(v.dtype)
    out = jnp.einsum(
        "bhqk,bkhd->bqhd", weights, v, preferred_element_type=wide, precision=lax.Precision.HIGHEST
    )
    return out.astype(q.dtype), lse
