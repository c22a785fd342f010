"""What the nnx and the linen module share: options, RoPE, flax's keywords and masks, the KV cache.

The two module files hold projections and wiring only; every rule about what a keyword means is
here, once. Arrays are [..., len, heads, dim] with any number of leading axes, as flax has them.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn import _compat

_QK_NORMS = (None, "rms", "layer")
_LECUN_NORMAL = jax.nn.initializers.lecun_normal()


class AttentionOptions(TypedDict, total=False):
    """The options of both `Attention` modules; `ATTENTION_DEFAULTS` has their defaults.

    Attributes:
        num_kv_heads: key and value heads, a divisor of num_heads (GQA); None for num_heads.
        head_dim: features of one query or key head; None for in_features // num_heads.
        v_dim: features of one value head; None for head_dim.
        causal: self-attention only: a token sees itself and what came before.
        window: self-attention only: (left, right) tokens seen besides self, None open, or one int
            for both sides; None for no window.
        rope_theta: base of the rotary position embedding of queries and keys; None for none.
        qk_norm: "rms" or "layer": normalises each query and key head, with a learned scale, before
            RoPE ("layer" is flax's normalize_qk); None for none.
        soft_cap: c in c·tanh(logits / c); None for none.
        scale: factor on q·k; None for 1/sqrt(head_dim).
        use_sinks: learn one logit per head that takes part in the softmax's denominator.
        use_bias: whether the four projections have biases.
        kernel_init: initialiser of the four kernels.
        dtype: of the computation; None to infer it from inputs and parameters.
        param_dtype: of the parameters.
        backend: as in `pallas_attn.mha`.
    """

    num_kv_heads: int | None
    head_dim: int | None
    v_dim: int | None
    causal: bool
    window: int | tuple[int | None, int | None] | None
    rope_theta: float | None
    qk_norm: str | None
    soft_cap: float | None
    scale: float | None
    use_sinks: bool
    use_bias: bool
    kernel_init: Callable[..., Any]
    dtype: Any
    param_dtype: Any
    backend: str | None


ATTENTION_DEFAULTS: AttentionOptions = {
    "num_kv_heads": None,
    "head_dim": None,
    "v_dim": None,
    "causal": False,
    "window": None,
    "rope_theta": None,
    "qk_norm": None,
    "soft_cap": None,
    "scale": None,
    "use_sinks": False,
    "use_bias": True,
    "kernel_init": _LECUN_NORMAL,
    "dtype": None,
    "param_dtype": jnp.float32,
    "backend": None,
}


class Heads(NamedTuple):
    """How many heads of which size a module has."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int


def complete(
    options: Mapping[str, Any], in_features: int, num_heads: int
) -> tuple[AttentionOptions, Heads]:
    """Fills the defaults in, resolves what depends on the sizes, and checks the rest.

    Args:
        options: some of `AttentionOptions`.
        in_features: features of the queries' input.
        num_heads: query heads.

    Returns:
        all options, and the sizes.

    Raises:
        TypeError: for a name that is no option.
        ValueError: naming the option, what came and what was expected.
    """
    unknown = sorted(set(options) - set(ATTENTION_DEFAULTS))
    if unknown:
        raise TypeError(
            f"Attention got unexpected options {unknown}, it has {list(ATTENTION_DEFAULTS)}"
        )
    full: Any = {**ATTENTION_DEFAULTS, **options}
    kv_heads, head_dim, v_dim = (full[n] for n in ("num_kv_heads", "head_dim", "v_dim"))
    kv_heads = num_heads if kv_heads is None else kv_heads
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(f"num_kv_heads: got {kv_heads}, expected a divisor of {num_heads=}")
    if head_dim is None:
        if in_features % num_heads:
            raise ValueError(f"num_heads: got {num_heads}, expected a divisor of {in_features=}")
        head_dim = in_features // num_heads
    if full["rope_theta"] is not None:
        if head_dim % 2:
            raise ValueError(f"head_dim: got {head_dim}, expected an even number for RoPE")
        full["rope_theta"] = float(full["rope_theta"])
    if full["qk_norm"] not in _QK_NORMS:
        raise ValueError(f"qk_norm: got {full['qk_norm']!r}, expected one of {_QK_NORMS}")
    # Masks check their own numbers: better now than at the first call.
    pattern(full["causal"], full["window"])
    return full, Heads(num_heads, kv_heads, head_dim, head_dim if v_dim is None else v_dim)


def implicit_promotion():
    """A context for flax's norms, which mix 16-bit and float32: strict promotion refuses that."""
    return jax.numpy_dtype_promotion("standard")


def pattern(causal: bool, window, offset=0):
    """The module's own self-attention mask, or None when it has none.

    Args:
        causal: as in `AttentionOptions`.
        window: likewise.
        offset: int or int32 scalar, the key index of the first query (the tokens already cached).
    """
    masks: list[Any] = [pa.Causal(offset=offset)] if causal else []
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        masks.append(pa.SlidingWindow(left, right, offset=offset))
    return functools.reduce(operator.and_, masks) if masks else None


def rope(x, positions, theta: float):
    """Rotary position embedding: turns (x[i], x[i + dim/2]) by position · theta^(-2i/dim).

    Args:
        x: [..., len, heads, dim], dim even.
        positions: int [len] or [..., len], the position of each token.
        theta: base of the wavelengths.

    Returns:
        The turned x, in x's dtype; the maths is done in float32.

    Source: "RoFormer", arXiv:2104.09864, in the half-split order of Llama and of nnx.RoPE.
    """
    positions = jnp.asarray(positions)
    if positions.ndim > x.ndim - 2 or positions.shape[-1:] != x.shape[-3:-2]:
        raise ValueError(
            f"positions: got shape {positions.shape}, expected [len] or [..., len] for tokens of "
            f"shape {x.shape[:-2]}"
        )
    half = x.shape[-1] // 2
    exponents = np.arange(half, dtype=np.float32) / np.float32(half)
    inv_freq = jnp.asarray(np.float32(theta) ** -exponents, jnp.float32)
    missing = x.ndim - 2 - positions.ndim
    positions = positions.astype(jnp.float32).reshape((1,) * missing + positions.shape + (1, 1))
    angles = positions * inv_freq.reshape((1,) * (x.ndim - 1) + (half,))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Call(NamedTuple):
    """What one call of an `Attention` module says besides its inputs; see its `__call__`."""

    is_cross: bool
    positions: Any
    kv_positions: Any
    decode: bool

    @staticmethod
    def of(inputs_q, inputs_kv, positions, kv_positions, decode: bool) -> "Call":
        """Decides between self and cross attention, and refuses what does not go together.

        Raises:
            ValueError: naming the argument that does not fit.
        """
        # Handing the same array over twice is flax's other spelling of self-attention.
        is_cross = inputs_kv is not None and inputs_kv is not inputs_q
        if is_cross and decode:
            raise ValueError(
                "decode: the cache is for self-attention, got decode=True and inputs_kv"
            )
        if is_cross and (positions is None) != (kv_positions is None):
            raise ValueError("positions, kv_positions: cross attention takes both or neither")
        if not is_cross and kv_positions is not None:
            raise ValueError("kv_positions: self-attention takes positions only")
        return Call(is_cross, positions, kv_positions, decode)

    def rotate(self, query, key, theta: float | None, index):
        """RoPE on queries and keys [..., len, heads, dim] of which `index` tokens came before.

        Cross attention has no common axis of positions, so it is turned only where both are given.
        """
        if theta is None or (self.is_cross and self.positions is None):
            return query, key
        positions = self.positions
        if positions is None:
            positions = index + jnp.arange(query.shape[-3], dtype=jnp.int32)
        kv_positions = self.kv_positions if self.is_cross else positions
        return rope(query, positions, theta), rope(key, kv_positions, theta)

    def masks(self, mask, causal: bool, window, index, new_len: int) -> tuple:
        """The masks to join for this call: its own, and for self-attention the module's.

        A planned table cannot be joined with anything and stands alone.
        """
        if self.is_cross or isinstance(mask, pa.BlockTable):
            return (mask,)
        if not self.decode:
            return (pattern(causal, window), mask)
        # The slots after the new tokens hold nothing yet; causal hides them anyway.
        filled = None if causal else pa.Lengths(kv_lens=index + jnp.int32(new_len))
        return (pattern(causal, window, offset=index), filled, mask)


class Cache(NamedTuple):
    """Keys [..., max_len, kv_heads, head_dim], values and int32 [] tokens held, of one layer."""

    key: jax.Array
    value: jax.Array
    index: jax.Array

    @staticmethod
    def empty(input_shape: tuple[int, ...], heads: Heads, dtype) -> "Cache":
        """A cache for inputs of shape [..., max_len, features], as flax's init_cache takes it."""
        shape = (*input_shape[:-1], heads.num_kv_heads)
        return Cache(
            jnp.zeros((*shape, heads.head_dim), dtype),
            jnp.zeros((*shape, heads.v_dim), dtype),
            jnp.zeros((), jnp.int32),
        )

    def append(self, key, value) -> "Cache":
        """The cache with the new tokens' keys and values [..., new_len, kv_heads, dim] at its end.

        Raises:
            ValueError: when they do not fit: in shape always, in number where the index is known.
        """
        new_len, max_len = key.shape[-3], self.key.shape[-3]
        for name, new, held in (("keys", key, self.key), ("values", value, self.value)):
            if new.shape != (*held.shape[:-3], new_len, *held.shape[-2:]):
                raise ValueError(
                    f"cache: holds {name} of shape {held.shape}, got new ones of shape {new.shape}"
                )
        held_len = 0 if _compat.is_traced(self.index) else int(self.index)
        if held_len + new_len > max_len:
            raise ValueError(f"cache: {held_len} tokens held, {new_len} new, room for {max_len}")
        zero = jnp.zeros((), jnp.int32)
        start = (*(zero,) * (key.ndim - 3), self.index, zero, zero)
        return Cache(
            jax.lax.dynamic_update_slice(self.key, key.astype(self.key.dtype), start),
            jax.lax.dynamic_update_slice(self.value, value.astype(self.value.dtype), start),
            self.index + jnp.int32(new_len),
        )

    def guard(self, out):
        """`out`, or NaN when the cache has overflowed: under jit no error can be raised."""
        fits = self.index <= jnp.int32(self.key.shape[-3])
        return jnp.where(fits, out, jnp.asarray(np.nan, out.dtype))


def attend(query, key, value, masks, *, bias=None, **options):
    """`pallas_attn.mha` on arrays with any number of leading axes.

    Args:
        query: [..., q_len, q_heads, head_dim].
        key: [..., kv_len, kv_heads, head_dim].
        value: [..., kv_len, kv_heads, v_dim].
        masks: masks to join: None, mask expressions, a lone planned table, arrays that broadcast
            to [..., q_heads, q_len, kv_len] where 0 is hidden. An expression counts the leading
            axes as one batch, in row-major order.
        bias: None or an array that broadcasts as the masks do.
        options: the other keywords of `mha`.

    Returns:
        [..., q_len, q_heads, v_dim] in the query's dtype.
    """
    arrays = (query, key, value)
    lead = query.shape[:-3]
    if any(x.ndim != query.ndim or x.ndim < 3 or x.shape[:-3] != lead for x in arrays):
        raise ValueError(
            f"query, key, value: got shapes {', '.join(str(x.shape) for x in arrays)}, expected "
            "[..., len, heads, dim] with the same leading axes"
        )
    q, k, v = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in arrays)
    if bias is not None:
        bias = _flatten_leading("bias", jnp.asarray(bias), lead)
    out = pa.mha(q, k, v, _join(masks, lead), bias=bias, **options)
    return out.reshape(*lead, *out.shape[1:])


def _join(masks, lead):
    masks = [_as_bool(m, lead) if _is_array(m) else m for m in masks if m is not None]
    if any(isinstance(m, pa.BlockTable) for m in masks) and len(masks) > 1:
        raise ValueError(
            "mask: a planned BlockTable cannot be joined with another mask; plan the joined one"
        )
    masks = [pa.Dense(m) if _is_array(m) else m for m in masks]
    return functools.reduce(operator.and_, masks) if masks else None


def _is_array(x) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _as_bool(mask, lead):
    """Bool from any array: flax's mask makers give floats of 0 and 1."""
    return _flatten_leading("mask", jnp.asarray(mask).astype(jnp.bool_), lead)


def _flatten_leading(name: str, x, lead):
    """[..., heads, q_len, kv_len] of any rank that broadcasts, as rank 4."""
    rank = len(lead) + 3
    if x.ndim > rank:
        raise ValueError(f"{name}: got shape {x.shape}, expected rank {rank} or less")
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    if any(got not in (1, want) for got, want in zip(x.shape, lead, strict=False)):
        raise ValueError(f"{name}: got shape {x.shape}, expected leading axes 1 or as in {lead}")
    if any(size != 1 for size in x.shape[:-3]):
        x = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


# What flax's modules pass to an attention_fn besides arrays, and what ours takes on top.
FLAX_KEYWORDS: dict[str, Any] = {
    "broadcast_dropout": True,
    "dropout_rng": None,
    "dropout_rate": 0.0,
    "deterministic": False,
    "dtype": None,
    "precision": None,
    "module": None,
}
OWN_KEYWORDS: dict[str, Any] = {
    "bound_mask": None,
    "scale": None,
    "soft_cap": None,
    "sinks": None,
    "backend": None,
    "deterministic_backward": False,
}
_NEVER = {
    "module": "sow_weights=True needs the attention weights, which are never formed",
    "einsum_dot_general": "the products are formed inside the kernels",
    "qk_attn_weights_einsum": "the products are formed inside the kernels",
    "attn_weights_value_einsum": "the products are formed inside the kernels",
    "input_positions": "it has no RoPE; Attention(rope_theta=...) of this package does",
}


def signature(keywords: Mapping[str, Any]) -> inspect.Signature:
    """The signature of an attention_fn with these keywords.

    linen asks for the signature and drops, silently, every keyword that is not named in it.
    """
    kinds = inspect.Parameter
    arrays = [kinds(n, kinds.POSITIONAL_OR_KEYWORD) for n in ("query", "key", "value")]
    optional = [kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=None) for n in ("bias", "mask")]
    rest = [kinds(n, kinds.KEYWORD_ONLY, default=default) for n, default in keywords.items()]
    return inspect.Signature([*arrays, *optional, *rest])


def read_keywords(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """All keywords of a call, defaults filled in, once those that cannot be honoured are refused.

    Raises:
        TypeError: for a keyword that is not known.
        ValueError: for a dropout_rate outside [0, 1).
        NotImplementedError: naming the keyword that cannot be honoured.
    """
    unknown = sorted(set(given) - set(keywords))
    if unknown:
        raise TypeError(
            f"attention_fn got unexpected keywords {unknown}, it takes {list(keywords)}"
        )
    options = {**keywords, **given}
    rate = options["dropout_rate"]
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate: got {rate}, expected one in [0, 1)")
    if rate > 0.0 and not options["deterministic"]:
        raise NotImplementedError(
            f"dropout_rate={rate} with deterministic={options['deterministic']}: pallas_attn has "
            "no dropout of attention weights"
        )
    for name, reason in _NEVER.items():
        if options.get(name) is not None:
            raise NotImplementedError(
                f"{name}: pallas_attn's attention_fn cannot honour it: {reason}"
            )
    return options


def check_precision(precision, dtype, backend: str | None) -> None:
    """Refuses a precision that is not kept.

    Products of 16-bit operands are exact in float32, where they are summed, so for these every
    precision is the same; backend "xla" always takes the highest.

    Raises:
        NotImplementedError: for float32 operands and more than the default.
    """
    is_default = precision in (None, "default", jax.lax.Precision.DEFAULT)
    if is_default or backend == "xla" or jnp.dtype(dtype).itemsize <= 2:
        return
    raise NotImplementedError(
        f"precision={precision}: for {dtype} only the default; bind backend='xla' for the highest"
    )


def call_attention(operands, bias, masks, options: Mapping[str, Any]):
    """`attend` for an attention_fn whose operands have been promoted and keywords read."""
    query, key, value = operands
    check_precision(options["precision"], query.dtype, options["backend"])
    return attend(
        query, key, value, (options["bound_mask"], *masks), bias=bias, scale=options["scale"],
        soft_cap=options["soft_cap"], sinks=options["sinks"], backend=options["backend"],
        deterministic=options["deterministic_backward"],
    )  # fmt: skip
