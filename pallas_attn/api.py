"""`mha` and `plan`: check, choose, tile, table, attend."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pallas_attn import backends, vjp
from pallas_attn import gpu as gpus
from pallas_attn.block_table import BlockTable
from pallas_attn.call import Call
from pallas_attn.interpret import is_active
from pallas_attn.mask_core import Mask, is_array
from pallas_attn.masks import as_mask
from pallas_attn.spec import Spec
from pallas_attn.tiles import Tiles

MaskLike = Mask | BlockTable | Bool[Array, "..."] | None


@overload
def mha(
    q, k, v, mask=None, *, bias=None, scale=None, soft_cap=None, sinks=None,
    return_lse: Literal[False] = False, backend=None, deterministic=False, tiles=None,
) -> Array: ...  # fmt: skip


@overload
def mha(
    q, k, v, mask=None, *, bias=None, scale=None, soft_cap=None, sinks=None,
    return_lse: Literal[True], backend=None, deterministic=False, tiles=None,
) -> tuple[Array, Array]: ...  # fmt: skip


def mha(
    q: Float[Array, "*batch q_len q_heads head_dim"],
    k: Float[Array, "*batch kv_len kv_heads head_dim"],
    v: Float[Array, "*batch kv_len kv_heads v_dim"],
    mask: MaskLike = None,
    *,
    bias: Float[Array, "..."] | None = None,
    scale=None,
    soft_cap=None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool = False,
    tiles: Tiles | None = None,
):
    """Multi-head attention: softmax(soft_cap(scale·q·kᵀ + bias) where mask)·v, differentiable.

    FlashAttention-2 (arXiv 2307.08691) under every mask of `pallas_attn.masks`. A query that sees
    no key gives out 0, lse -inf and zero gradients.

    Args:
        q: [batch, q_len, q_heads, head_dim] or [q_len, q_heads, head_dim]; float16, bfloat16 or
            float32.
        k: [batch, kv_len, kv_heads, head_dim], in q's dtype; kv_heads divides q_heads (GQA).
        v: [batch, kv_len, kv_heads, v_dim]; v_dim may differ from head_dim.
        mask: a mask expression such as `Causal() & SlidingWindow(1024)`, a `BlockTable` from
            `plan`, a bool array (True = attend) that broadcasts to [batch, q_heads, q_len, kv_len],
            or None.
        bias: float, broadcasts to [batch, q_heads, q_len, kv_len]; added after scaling, before
            soft_cap. Differentiable in every broadcast shape. Without a soft_cap, -inf hides a pair
            as a mask does, and lower logits than -1e6 count as -1e6: a row of them is a plain mean.
        scale: a number; None for 1/sqrt(head_dim).
        soft_cap: c > 0 for c·tanh(logits / c); None for no cap.
        sinks: [q_heads], a learned logit a head that joins the softmax's denominator with value 0.
        return_lse: also return the log of the softmax's denominator.
        backend: "mosaic_gpu", "triton" or "xla" runs that one or raises; None takes the first of
            them that can.
        deterministic: ask for gradients that are bit-equal from run to run. Today's backends
            always are.
        tiles: the kernels' schedules; None for the backend's choice. Planned tables bring their
            own.

    Returns:
        out [batch, q_len, q_heads, v_dim] in q's dtype; with return_lse also lse
        [batch, q_heads, q_len], float32, natural log, differentiable, sinks included.

    Raises:
        ValueError, TypeError: naming the argument, what came and what was expected.
        NotImplementedError: when the backend asked for cannot take the call, with its reason.
    """
    q, k, v, squeeze = _with_batch(q, k, v)
    bias = None if bias is None else _rank_4("bias", bias)
    spec = Spec.of(q, k, v, bias=bias, scale=scale, soft_cap=soft_cap, sinks=sinks)
    backends.check_name(backend)
    _check_tiles(tiles)
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, expected a bool")
    if isinstance(mask, BlockTable):
        table, expression = mask, mask.mask
        table.check(spec.batch, spec.q_heads, spec.q_len, spec.kv_len)
        if tiles is not None and tiles != table.tiles:
            raise ValueError(
                f"tiles: got {tiles}, expected those of the BlockTable passed as mask: "
                f"{table.tiles}"
            )
        name = backends.choose(spec, expression, backend or table.backend)
    else:
        table, expression = None, as_mask(mask)
        expression.check(spec.batch, spec.q_heads, spec.q_len, spec.kv_len)
        name = backends.choose(spec, expression, backend)
    if 0 in (spec.batch, spec.q_len, spec.kv_len):
        out, lse = _nothing(spec)
    else:
        if table is None:
            candidates = backends.load(name).candidate_tiles(spec, expression, gpus.detect())
            table = backends.build_table(name, expression, tiles or candidates[0], spec)
        backends.check_tiles(name, table.tiles, spec, given=mask is table or tiles is not None)
        call = Call(spec, table.tiles, name, is_active(), deterministic)
        out, lse = vjp.attend(call, q, k, v, bias, sinks, table)
    if squeeze:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _with_batch(q, k, v):
    """Rank-3 operands get a batch of one, as jax.nn takes them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
    q, k, v = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    if q.ndim == k.ndim == v.ndim == 3:
        return q[None], k[None], v[None], True
    return q, k, v, False


def _check_tiles(tiles) -> None:
    if tiles is not None and not isinstance(tiles, Tiles):
        raise TypeError(f"tiles: got {type(tiles).__name__}, expected a Tiles or None")


def _rank_4(name: str, x):
    if not is_array(x):
        raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
    if x.ndim > 4:
        raise ValueError(f"{name}: got shape {x.shape}, expected rank 4 or less")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _nothing(spec: Spec):
    """What attention over no queries or no keys gives."""
    out = jnp.zeros((spec.batch, spec.q_len, spec.q_heads, spec.v_dim), spec.dtype)
    return out, jnp.full((spec.batch, spec.q_heads, spec.q_len), -jnp.inf, jnp.float32)


def plan(
    mask: Mask | Bool[Array, "..."] | None,
    *,
    q_len: int,
    kv_len: int,
    batch: int | None = None,
    q_heads: int | None = None,
    head_dim: int = 128,
    v_dim: int | None = None,
    dtype=jnp.bfloat16,
    backend: str | None = None,
    tiles: Tiles | None = None,
) -> BlockTable:
    """Builds a mask's block tables once, for every layer of a step to share.

    Works inside jit (with traced ids and lengths) and outside. Pass the result as `mask=` to `mha`.

    Args:
        mask: a mask expression, a bool array or None.
        q_len, kv_len: lengths of the calls that will use the table.
        batch, q_heads: needed only when a `Predicate` looks at the batch or the head.
        head_dim, v_dim, dtype: of those calls; they decide the default tiles. v_dim None is
            head_dim.
        backend: the backend to plan for; None for the one that `mha` would choose.
        tiles: the kernels' schedules; None for the backend's choice.

    Returns:
        a BlockTable: forward and backward, partly and fully visible blocks apart.

    Raises:
        ValueError, TypeError, NotImplementedError: as `mha`.
    """
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ValueError(f"{name}: got {length!r}, expected an int from 0 up")
    expression = as_mask(mask)
    implied = expression.sizes()
    batch, q_heads = batch or implied[0], q_heads or implied[1]
    expression.check(batch, q_heads, q_len, kv_len)
    _check_tiles(tiles)
    q = jax.ShapeDtypeStruct((batch, q_len, q_heads, head_dim), dtype)
    k = jax.ShapeDtypeStruct((batch, kv_len, q_heads, head_dim), dtype)
    v = jax.ShapeDtypeStruct((batch, kv_len, q_heads, v_dim or head_dim), dtype)
    spec = Spec.of(q, k, v)
    name = backends.choose(spec, expression, backend)
    candidates = backends.load(name).candidate_tiles(spec, expression, gpus.detect())
    return backends.build_table(name, expression, tiles or candidates[0], spec)
