"""FlashAttention-3 through flash-attn3-jax, with workspaces of the size that its kernels write.

The package's backward gives the kernels two float32 workspaces whose rows are q_len rounded up to
128. Without a mask the kernel for 128 channels has tiles of 80 queries and writes q_len rounded up
to 80 of them, past the end where that is more (4,096 and 16,384 are such), and dq comes out wrong.
Here the same kernels get rows of a multiple of both.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp

_ROWS = 640  # of 80 and of 128 a multiple


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attend(q, k, v, causal, window):
    """Attention of [batch, len, heads, dim]; window (left, right), -1 for an open side."""
    return _forward(q, k, v, causal, window)[0]


def _forward(q, k, v, causal, window):
    flash = importlib.import_module("flash_attn3_jax.flash")
    out, lse = flash._flash_mha_fwd(q, k, v, 1.0 / math.sqrt(q.shape[-1]), causal, window)
    return out, (q, k, v, out, lse)


def _backward(causal, window, residuals, dout):
    q, k, v, out, lse = residuals
    batch, q_len, heads, _ = q.shape
    rows = jax.ShapeDtypeStruct((batch, heads, -(-q_len // _ROWS) * _ROWS), jnp.float32)
    grads = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    absent = jnp.zeros((0,), jnp.int32)  # cumulative and used lengths of queries and of keys
    call = jax.ffi.ffi_call("flash_mha_bwd", (*grads, rows, rows))
    dq, dk, dv, _, _ = call(
        *(dout, q, k, v, out, lse),
        *(absent,) * 4,
        max_seqlen_q_val=q_len,
        max_seqlen_q_has_value=True,
        max_seqlen_k_val=k.shape[1],
        max_seqlen_k_has_value=True,
        softmax_scale_val=1.0 / math.sqrt(q.shape[-1]),
        softmax_scale_has_value=True,
        is_causal=causal,
        window_size_left=window[0],
        window_size_right=window[1],
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    )
    return dq, dk, dv


attend.defvjp(_forward, _backward)
