"""What a call computes: shapes, dtypes, score options; checked once, hashable, static in jit."""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import _compat

KERNEL_DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static facts of one attention call.

    Attributes:
        batch, q_len, kv_len, q_heads, kv_heads, head_dim, v_dim: sizes, see `Spec.of`.
        dtype: name of the operands' common dtype.
        scale: multiplies q·k.
        soft_cap: None or c in c·tanh(logits / c).
        has_sinks: whether each head has a learned logit in the denominator.
        bias_shape: rank-4 shape of the bias, or None.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    scale: float
    soft_cap: float | None = None
    has_sinks: bool = False
    bias_shape: tuple[int, int, int, int] | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @staticmethod
    def of(q, k, v, *, bias=None, scale=None, soft_cap=None, sinks=None) -> "Spec":
        """Checks the operands of a call and collects its static facts.

        Args:
            q: [batch, q_len, q_heads, head_dim].
            k: [batch, kv_len, kv_heads, head_dim].
            v: [batch, kv_len, kv_heads, v_dim].
            bias: broadcasts to [batch, q_heads, q_len, kv_len]; rank 4.
            scale: a static number; None for 1/sqrt(head_dim).
            soft_cap: a static positive number, or None.
            sinks: [q_heads].

        Raises:
            ValueError, TypeError: naming the argument, what came and what was expected.
        """
        for name, x, axes in (
            ("q", q, "[batch, q_len, q_heads, head_dim]"),
            ("k", k, "[batch, kv_len, kv_heads, head_dim]"),
            ("v", v, "[batch, kv_len, kv_heads, v_dim]"),
        ):
            if len(x.shape) != 4:
                raise ValueError(f"{name}: got shape {x.shape}, expected {axes}")
        batch, q_len, q_heads, head_dim = q.shape
        _, kv_len, kv_heads, v_dim = v.shape
        if k.shape != (batch, kv_len, kv_heads, head_dim) or v.shape[0] != batch:
            raise ValueError(
                f"q, k, v: got shapes {q.shape}, {k.shape}, {v.shape}, expected k [batch, kv_len, "
                "kv_heads, head_dim] and v [batch, kv_len, kv_heads, v_dim] with q's batch and "
                "head_dim"
            )
        if q_heads == 0 or kv_heads == 0 or q_heads % kv_heads:
            raise ValueError(
                f"heads: got {q_heads} in q and {kv_heads} in k and v, expected q's to be a "
                "multiple of k's"
            )
        for name, dim in (("head_dim", head_dim), ("v_dim", v_dim)):
            if dim < 1:
                raise ValueError(f"{name}: got {dim}, expected 1 or more")
        return Spec(
            batch=batch, q_len=q_len, kv_len=kv_len, q_heads=q_heads, kv_heads=kv_heads,
            head_dim=head_dim, v_dim=v_dim, dtype=_common_dtype(q, k, v),
            scale=check_scale(scale, head_dim), soft_cap=_check_soft_cap(soft_cap),
            has_sinks=_check_sinks(sinks, q_heads),
            bias_shape=_check_bias(bias, (batch, q_heads, q_len, kv_len)),
        )  # fmt: skip


def _common_dtype(q, k, v) -> str:
    # NumPy's float64 is float32 to JAX, unless it was told to know float64.
    names = [jax.dtypes.canonicalize_dtype(x.dtype).name for x in (q, k, v)]
    if len(set(names)) != 1:
        raise ValueError(f"dtype: got q {names[0]}, k {names[1]}, v {names[2]}, expected one dtype")
    if names[0] not in (*KERNEL_DTYPES, "float64"):
        raise ValueError(f"dtype: got {names[0]}, expected one of {', '.join(KERNEL_DTYPES)}")
    return names[0]


def static_number(name: str, value) -> float:
    """A finite Python float from a number or a concrete scalar array."""
    if _compat.is_traced(value):
        raise ValueError(
            f"{name}: got a traced array, expected a number known while tracing (scale q instead)"
        )
    is_array_scalar = isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_array_scalar and not is_number:
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {number}, expected a finite number")
    return number


def check_scale(scale, head_dim: int) -> float:
    """The factor on q·k; None means 1/sqrt(head_dim), and 0 means 0."""
    return 1.0 / math.sqrt(head_dim) if scale is None else static_number("scale", scale)


def _check_soft_cap(soft_cap) -> float | None:
    if soft_cap is None:
        return None
    number = static_number("soft_cap", soft_cap)
    if number <= 0:
        raise ValueError(f"soft_cap: got {number}, expected a positive number, or None for no cap")
    return number


def _check_sinks(sinks, q_heads: int) -> bool:
    if sinks is None:
        return False
    if not hasattr(sinks, "shape"):
        raise TypeError(f"sinks: got {type(sinks).__name__}, expected an array")
    if sinks.shape != (q_heads,):
        raise ValueError(f"sinks: got shape {sinks.shape}, expected [q_heads] = ({q_heads},)")
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks: got dtype {sinks.dtype}, expected a float dtype")
    return True


def _check_bias(bias, full: tuple[int, int, int, int]):
    if bias is None:
        return None
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias: got dtype {bias.dtype}, expected a float dtype")
    if len(bias.shape) != 4 or any(b not in (1, f) for b, f in zip(bias.shape, full, strict=True)):
        raise ValueError(
            f"bias: got shape {bias.shape}, expected one that broadcasts to "
            f"[batch, q_heads, q_len, kv_len] = {full}"
        )
    return tuple(bias.shape)
