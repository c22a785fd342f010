"""The one differentiable core that every backend shares.

    forward   out, lse = backend.run_forward(...)
    saved     q, k, v, bias, sinks, table, out, lse; the last two named for remat policies
    backward  delta = rowsum(out·dout) - dlse, then backend.run_backward(...)

Subtracting the lse's cotangent from delta is all that a gradient through lse takes: d lse / d
logits = p.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_attn import backends
from pallas_attn.call import Call
from pallas_attn.tile_math import LOG2E

OUT_NAME = "pallas_attn_out"
LSE_NAME = "pallas_attn_lse"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, q, k, v, bias, sinks, table):
    """Attention through the backend that `call` names.

    Args:
        call: the static facts.
        q, k, v, bias, sinks: rank-4 operands as in `pallas_attn.mha`; bias and sinks may be None.
        table: a BlockTable.

    Returns:
        out [batch, q_len, q_heads, v_dim]; lse [batch, q_heads, q_len].
    """
    return backends.load(call.backend).run_forward(call, q, k, v, bias, sinks, table)


def _attend_forward(call, q, k, v, bias, sinks, table):
    out, lse = attend(call, q, k, v, bias, sinks, table)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, bias, sinks, table, out, lse)


def _attend_backward(call, saved, cotangents):
    q, k, v, bias, sinks, table, out, lse = saved
    dout, dlse = cotangents
    sees = lse > -jnp.inf
    delta = jnp.einsum("bqhd,bqhd->bhq", out.astype(lse.dtype), dout.astype(lse.dtype))
    # Else XLA sums it in whatever fusion takes it, by threads that read far from each other.
    delta = lax.optimization_barrier(delta)
    # Rows that see nothing have no gradient, whatever padding their cotangents carry.
    delta = jnp.where(sees, delta - dlse, 0.0)
    lse_log2 = jnp.where(sees, lse * LOG2E, jnp.inf)
    residuals = (lse_log2, delta, dout.astype(q.dtype))
    backend = backends.load(call.backend)
    dq, dk, dv, dbias = backend.run_backward(call, q, k, v, bias, table, residuals)
    dsinks = None
    if sinks is not None:
        # The sink is one more key with value 0, seen by every row that sees a key.
        p_sink = jnp.where(sees, jnp.exp(sinks.astype(lse.dtype)[None, :, None] - lse), 0.0)
        dsinks = -(p_sink * delta).sum(axis=(0, 2)).astype(sinks.dtype)
    if bias is not None:
        dbias = dbias.astype(bias.dtype)
    return dq, dk, dv, dbias, dsinks, None


attend.defvjp(_attend_forward, _attend_backward)
