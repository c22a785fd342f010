"""pallas_attn in flax.linen: `attention_fn` for its MultiHeadAttention, and an `Attention` module.

    layer = nn.MultiHeadAttention(num_heads=8, attention_fn=attention_fn)
    out = layer.apply(variables, x, mask=pa.Causal() & pa.Document(segment_ids))

    layer = Attention(num_heads=8, num_kv_heads=2, causal=True, rope_theta=1e4)
    out = layer.apply(variables, x)

Parameters have the names and shapes of flax's own module, in nnx and in linen.
"""

import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.linen import dtypes

import pallas_attn as pa
from pallas_attn import _flax_common as common
from pallas_attn._flax_common import ATTENTION_DEFAULTS, AttentionOptions

_KEYWORDS = {
    **common.FLAX_KEYWORDS,
    "force_fp32_for_softmax": False,
    "einsum_dot_general": None,
    "qk_attn_weights_einsum": None,
    "attn_weights_value_einsum": None,
    **common.OWN_KEYWORDS,
}
_CACHED = ("cached_key", "cached_value", "cache_index")
_NORMS = {"rms": nn.RMSNorm, "layer": functools.partial(nn.LayerNorm, use_bias=False)}


def attention_fn(query, key, value, bias=None, mask=None, **keywords):
    """Attention with the signature of `nn.dot_product_attention`.

    Args:
        query: [..., q_len, q_heads, head_dim].
        key: [..., kv_len, kv_heads, head_dim]; q_heads may be a multiple of kv_heads.
        value: [..., kv_len, kv_heads, v_dim].
        bias: broadcasts to [..., q_heads, q_len, kv_len], added to the scaled logits.
        mask: an array that broadcasts likewise (0 or False is hidden; flax's mask makers give
            floats), a mask expression such as `pa.Causal()`, or a planned `pa.BlockTable`.
        keywords: those of `nn.dot_product_attention` (the softmax is in float32 with or without
            `force_fp32_for_softmax`), and `bound_mask`, `scale`, `soft_cap`, `sinks`, `backend`,
            `deterministic_backward`, which `make_attention_fn` binds.

    Returns:
        [..., q_len, q_heads, v_dim]. Queries that see nothing give 0.

    Raises:
        NotImplementedError: for dropout, sown weights, einsums, or a precision that cannot be
            honoured; by name.
        TypeError, ValueError: naming the argument that does not fit.
    """
    options = common.read_keywords(keywords, _KEYWORDS)
    operands = dtypes.promote_dtype(query, key, value, dtype=options["dtype"])
    return common.call_attention(operands, bias, (mask,), options)


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


class Attention(nn.Module):
    """Multi-head attention on `pallas_attn.mha`.

    The parameters `query`, `key`, `value` (kernel [features, heads, dim], bias [heads, dim]), `out`
    (kernel [num_heads, v_dim, in_features], bias [in_features]) and, where asked for, `query_ln`,
    `key_ln` (scale [head_dim]) are those of nn.MultiHeadAttention; `sinks` is [num_heads].

    Attributes:
        num_heads: query heads.
        num_kv_heads, head_dim, v_dim, causal, window, rope_theta, qk_norm, soft_cap, scale,
            use_sinks, use_bias, kernel_init, dtype, param_dtype, backend: see `AttentionOptions`.
    """

    num_heads: int
    num_kv_heads: int | None = ATTENTION_DEFAULTS["num_kv_heads"]
    head_dim: int | None = ATTENTION_DEFAULTS["head_dim"]
    v_dim: int | None = ATTENTION_DEFAULTS["v_dim"]
    causal: bool = ATTENTION_DEFAULTS["causal"]
    window: int | tuple[int | None, int | None] | None = ATTENTION_DEFAULTS["window"]
    rope_theta: float | int | None = ATTENTION_DEFAULTS["rope_theta"]
    qk_norm: str | None = ATTENTION_DEFAULTS["qk_norm"]
    soft_cap: float | int | None = ATTENTION_DEFAULTS["soft_cap"]
    scale: float | int | None = ATTENTION_DEFAULTS["scale"]
    use_sinks: bool = ATTENTION_DEFAULTS["use_sinks"]
    use_bias: bool = ATTENTION_DEFAULTS["use_bias"]
    kernel_init: Callable[..., Any] = ATTENTION_DEFAULTS["kernel_init"]
    dtype: Any = ATTENTION_DEFAULTS["dtype"]
    param_dtype: Any = ATTENTION_DEFAULTS["param_dtype"]
    backend: str | None = ATTENTION_DEFAULTS["backend"]

    @nn.compact
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
            inputs_kv: [..., kv_len, any features]: cross attention, to which the module's `causal`,
                `window` and default positions do not apply. None (or inputs_q itself) for
                self-attention.
            mask: joined by & with the module's own pattern: a mask expression or an array that
                broadcasts to [..., num_heads, q_len, kv_len], kv_len being the cache's max_len when
                decoding. A planned `pa.BlockTable` says everything by itself: plan it from
                `pattern()` and what else holds.
            bias: broadcasts likewise, added to the scaled logits.
            positions: int [q_len] or [..., q_len], for RoPE; None counts from 0, or on from the
                cache.
            kv_positions: int [kv_len] or [..., kv_len]: cross attention turns queries and keys only
                when both are given.
            decode: append the tokens to the collection "cache" (which must be mutable; `init_cache`
                makes it) and attend to all of it. One token at a time or many; past max_len a
                ValueError, or NaN where jit hides the count. While initialising, inputs_q only
                gives the cache its shape.

        Returns:
            [..., q_len, in_features].

        Raises:
            ValueError: naming the argument that does not fit.
        """
        call = common.Call.of(inputs_q, inputs_kv, positions, kv_positions, decode)
        full, heads = self._options(inputs_q.shape[-1])
        source = inputs_kv if call.is_cross else inputs_q
        dtypes_of = {"dtype": full["dtype"], "param_dtype": full["param_dtype"]}
        dense = functools.partial(
            nn.DenseGeneral, use_bias=full["use_bias"], kernel_init=full["kernel_init"], **dtypes_of
        )
        query = dense((heads.num_heads, heads.head_dim), name="query")(inputs_q)
        key = dense((heads.num_kv_heads, heads.head_dim), name="key")(source)
        value = dense((heads.num_kv_heads, heads.v_dim), name="value")(source)
        if full["qk_norm"] is not None:
            norm = _NORMS[full["qk_norm"]]
            with common.implicit_promotion():
                query = norm(name="query_ln", **dtypes_of)(query)
                key = norm(name="key_ln", **dtypes_of)(key)
        sinks = None
        if full["use_sinks"]:
            zeros = nn.initializers.zeros_init()
            sinks = self.param("sinks", zeros, (self.num_heads,), full["param_dtype"])

        cache = self._read_cache(inputs_q.shape) if decode else None
        index = 0 if cache is None else cache.index
        query, key = call.rotate(query, key, full["rope_theta"], index)
        masks = call.masks(mask, full["causal"], full["window"], index, query.shape[-3])
        if cache is not None:
            cache = cache.append(key, value)
            self._write_cache(cache)
            key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        out = common.attend(
            query, key, value, masks, bias=bias, scale=full["scale"], soft_cap=full["soft_cap"],
            sinks=sinks, backend=full["backend"],
        )  # fmt: skip
        out = out if cache is None else cache.guard(out)
        return dense(inputs_q.shape[-1], axis=(-2, -1), name="out")(out)

    @nn.nowrap
    def pattern(self, offset=0):
        """The mask that self-attention has by itself: `causal` and `window`, else `pa.Full()`.

        What a planned table has to contain: `pa.plan(layer.pattern() & pa.Document(ids), ...)`.

        Args:
            offset: int or int32 scalar, the key index of the first query.
        """
        return common.pattern(self.causal, self.window, offset) or pa.Full()

    @nn.nowrap
    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = None) -> dict[str, Any]:
        """An empty cache: the collection "cache" of this module, for `decode=True`.

        Args:
            input_shape: [..., max_len, in_features], as `init` takes the inputs.
            dtype: of the cached keys and values; None for the computation's.
        """
        _, heads = self._options(input_shape[-1])
        dtype = dtype or self.dtype or self.param_dtype
        cache = common.Cache.empty(input_shape, heads, dtype)
        return dict(zip(_CACHED, cache, strict=True))

    @nn.nowrap
    def _options(self, in_features: int) -> tuple[AttentionOptions, common.Heads]:
        given = {name: getattr(self, name) for name in ATTENTION_DEFAULTS}
        return common.complete(given, in_features, self.num_heads)

    def _read_cache(self, input_shape: tuple[int, ...]) -> common.Cache | None:
        """The cache; while initialising it is made instead, and nothing is appended."""
        if self.is_initializing():
            for name, array in self.init_cache(input_shape).items():
                self.put_variable("cache", name, array)
            return None
        if not self.has_variable("cache", _CACHED[0]):
            raise ValueError('decode: got True without the collection "cache", see init_cache')
        return common.Cache(*(self.get_variable("cache", name) for name in _CACHED))

    def _write_cache(self, cache: common.Cache) -> None:
        for name, array in zip(_CACHED, cache, strict=True):
            self.put_variable("cache", name, array)
