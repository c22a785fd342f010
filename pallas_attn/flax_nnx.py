"""pallas_attn in flax.nnx: an `attention_fn` for nnx.MultiHeadAttention, and an `Attention` module.

    layer = nnx.MultiHeadAttention(8, 512, attention_fn=attention_fn, decode=False, rngs=rngs)
    out = layer(x, mask=pa.Causal() & pa.Document(segment_ids))

    layer = Attention(512, 8, num_kv_heads=2, causal=True, rope_theta=1e4, rngs=rngs)
    out = layer(x)

Parameters have the names and shapes of flax's own module, in nnx and in linen.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.nnx.nn import dtypes

import pallas_attn as pa
from pallas_attn import _flax_common as common
from pallas_attn._flax_common import AttentionOptions

_KEYWORDS = {
    **common.FLAX_KEYWORDS,
    "promote_dtype": dtypes.promote_dtype,
    "is_causal": False,
    "input_positions": None,
    **common.OWN_KEYWORDS,
}
_NORMS = {"rms": nnx.RMSNorm, "layer": functools.partial(nnx.LayerNorm, use_bias=False)}


def attention_fn(query, key, value, bias=None, mask=None, **keywords):
    """Attention with the signature of `nnx.dot_product_attention`.

    Args:
        query: [..., q_len, q_heads, head_dim].
        key: [..., kv_len, kv_heads, head_dim]; q_heads may be a multiple of kv_heads.
        value: [..., kv_len, kv_heads, v_dim].
        bias: broadcasts to [..., q_heads, q_len, kv_len], added to the scaled logits.
        mask: an array that broadcasts likewise (0 or False is hidden; flax's mask makers give
            floats), a mask expression such as `pa.Causal()`, or a planned `pa.BlockTable`.
        keywords: those of `nnx.dot_product_attention`, and `bound_mask`, `scale`, `soft_cap`,
            `sinks`, `backend`, `deterministic_backward`, which `make_attention_fn` binds.

    Returns:
        [..., q_len, q_heads, v_dim]. Queries that see nothing give 0.

    Raises:
        NotImplementedError: for dropout, sown weights, input_positions, or a precision that cannot
            be honoured; by name.
        TypeError, ValueError: naming the argument that does not fit.
    """
    options = common.read_keywords(keywords, _KEYWORDS)
    operands = options["promote_dtype"]((query, key, value), dtype=options["dtype"])
    # The same as flax's tril for q_len != kv_len too: aligned to the top left.
    causal = common.pattern(causal=options["is_causal"], window=None)
    return common.call_attention(operands, bias, (mask, causal), options)


attention_fn.__signature__ = common.signature(_KEYWORDS)  # pyrefly: ignore[missing-attribute]


def make_attention_fn(mask=None, **keywords):
    """An `attention_fn` with options bound to it.

    `functools.partial(attention_fn, soft_cap=...)` does the same but for `mask`: flax's modules
    always pass one, if only None, and would override it. Here both are joined.

    Args:
        mask: a mask expression, bool array or None, joined by & with the mask of each call.
        keywords: `scale`, `soft_cap`, `sinks`, `backend`, `deterministic_backward` (bit-equal
            gradients from run to run: `deterministic` of `pallas_attn.mha`).
    """
    return functools.partial(attention_fn, bound_mask=mask, **keywords)


class Attention(nnx.Module):
    """Multi-head attention on `pallas_attn.mha`.

    The parameters `query`, `key`, `value` (kernel [features, heads, dim], bias [heads, dim]), `out`
    (kernel [num_heads, v_dim, in_features], bias [in_features]) and, where asked for, `query_ln`,
    `key_ln` (scale [head_dim]) are those of nnx.MultiHeadAttention; `sinks` is [num_heads].

    Args:
        in_features: features of inputs_q and of the output.
        num_heads: query heads.
        rngs: for the initial values.
        in_kv_features: features of inputs_kv; None for in_features.
        options: see `AttentionOptions`.

    Raises:
        TypeError, ValueError: naming the option that is unknown or does not fit.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        in_kv_features: int | None = None,
        **options: Unpack[AttentionOptions],
    ):
        full, heads = common.complete(options, in_features, num_heads)
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim = heads
        self.causal, self.window = full["causal"], full["window"]
        self.rope_theta, self.soft_cap = full["rope_theta"], full["soft_cap"]
        self.scale, self.backend = full["scale"], full["backend"]
        self.dtype, self.param_dtype = full["dtype"], full["param_dtype"]

        dtypes_of = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=full["use_bias"], kernel_init=full["kernel_init"],
            rngs=rngs, **dtypes_of,
        )  # fmt: skip
        kv_features = in_features if in_kv_features is None else in_kv_features
        self.query = linear(in_features, (num_heads, self.head_dim))
        self.key = linear(kv_features, (self.num_kv_heads, self.head_dim))
        self.value = linear(kv_features, (self.num_kv_heads, self.v_dim))
        self.query_ln: Any = nnx.data(None)
        self.key_ln: Any = nnx.data(None)
        if full["qk_norm"] is not None:
            norm = _NORMS[full["qk_norm"]]
            self.query_ln = norm(self.head_dim, rngs=rngs, **dtypes_of)
            self.key_ln = norm(self.head_dim, rngs=rngs, **dtypes_of)
        self.out = linear((num_heads, self.v_dim), in_features, axis=(-2, -1))
        self.sinks: Any = nnx.data(None)
        if full["use_sinks"]:
            self.sinks = nnx.Param(jnp.zeros((num_heads,), self.param_dtype))
        self.cached_key: Any = nnx.data(None)
        self.cached_value: Any = nnx.data(None)
        self.cache_index: Any = nnx.data(None)

    def __call__(
        self,
        inputs_q,
        inputs_kv=None,
        *,
        mask=None,
        bias=None,
        positions=None,
        kv_positions=None,
        decode: bool = False,
    ):
        """Attends from inputs_q to itself, to the cache, or to inputs_kv.

        Args:
            inputs_q: [..., q_len, in_features].
            inputs_kv: [..., kv_len, in_kv_features]: cross attention, to which the module's
                `causal`, `window` and default positions do not apply. None (or inputs_q itself)
                for self-attention.
            mask: joined by & with the module's own pattern: a mask expression or an array that
                broadcasts to [..., num_heads, q_len, kv_len], kv_len being the cache's max_len when
                decoding. A planned `pa.BlockTable` says everything by itself: plan it from
                `pattern()` and what else holds.
            bias: broadcasts likewise, added to the scaled logits.
            positions: int [q_len] or [..., q_len], for RoPE; None counts from 0, or on from the
                cache.
            kv_positions: int [kv_len] or [..., kv_len]: cross attention turns queries and keys only
                when both are given.
            decode: append the tokens to the cache (`init_cache` first) and attend to all of it. One
                token at a time or many; past max_len a ValueError, or NaN where jit hides the
                count.

        Returns:
            [..., q_len, in_features].

        Raises:
            ValueError: naming the argument that does not fit.
        """
        call = common.Call.of(inputs_q, inputs_kv, positions, kv_positions, decode)
        source: Any = inputs_kv if call.is_cross else inputs_q
        query, key, value = self.query(inputs_q), self.key(source), self.value(source)
        if self.query_ln is not None:
            with common.implicit_promotion():
                query, key = self.query_ln(query), self.key_ln(key)
        cache = self._read_cache() if decode else None
        index = 0 if cache is None else cache.index
        query, key = call.rotate(query, key, self.rope_theta, index)
        masks = call.masks(mask, self.causal, self.window, index, query.shape[-3])
        if cache is not None:
            cache = cache.append(key, value)
            self.cached_key[...], self.cached_value[...] = cache.key, cache.value
            self.cache_index[...] = cache.index
            key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        out = common.attend(
            query, key, value, masks, bias=bias, scale=self.scale, soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...], backend=self.backend,
        )  # fmt: skip
        return self.out(out if cache is None else cache.guard(out))

    def pattern(self, offset=0):
        """The mask that self-attention has by itself: `causal` and `window`, else `pa.Full()`.

        What a planned table has to contain: `pa.plan(layer.pattern() & pa.Document(ids), ...)`.

        Args:
            offset: int or int32 scalar, the key index of the first query.
        """
        return common.pattern(self.causal, self.window, offset) or pa.Full()

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = None) -> None:
        """Makes an empty cache for `decode=True`; call it again to start anew.

        Args:
            input_shape: [..., max_len, features], as nnx.MultiHeadAttention takes it.
            dtype: of the cached keys and values; None for the computation's.
        """
        heads = common.Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim)
        dtype = dtype or self.dtype or self.param_dtype
        cache = common.Cache.empty(input_shape, heads, dtype)
        self.cached_key, self.cached_value = nnx.Cache(cache.key), nnx.Cache(cache.value)
        self.cache_index = nnx.Cache(cache.index)

    def _read_cache(self) -> common.Cache:
        if self.cached_key is None:
            raise ValueError("decode: got True without a cache, call init_cache first")
        return common.Cache(self.cached_key[...], self.cached_value[...], self.cache_index[...])


def to_linen(module: nnx.Module) -> dict[str, Any]:
    """The parameters of an attention module as linen's `variables["params"]`.

    Args:
        module: `Attention` or nnx.MultiHeadAttention.
    """
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def from_linen(module: nnx.Module, params) -> None:
    """Puts linen parameters, of `flax_linen.Attention` or of flax's own module, into an nnx module.

    Args:
        module: `Attention` or nnx.MultiHeadAttention.
        params: linen's `variables["params"]`.

    Raises:
        ValueError: when names or shapes differ, listing them.
    """
    params = meta.unbox(params)
    state = nnx.state(module, nnx.Param)
    want, got = (_shapes(tree) for tree in (nnx.to_pure_dict(state), params))
    if want != got:
        raise ValueError(f"params: got {sorted(got - want)}, expected {sorted(want - got)}")
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, dict(params)))
    nnx.update(module, state)


def _shapes(tree) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(dict(tree))
    return {
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} {x.shape}" for path, x in leaves
    }
