"""A decoder-only transformer whose attention is `pallas_attn.mha`.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU, RMSNorm, no biases,
the output head not tied to the embedding. A layer sees either all that came before (L) or a
sliding window of it (S), and both keep documents packed into one row apart; plain causal layers (C)
do not, and are there to be measured against attention that knows no documents. The masks are
planned once a step, one for each distinct window, and shared by the layers:

    masks = plan_masks(config, segment_ids)
    logits = model(tokens, positions, masks)

Weights are float32 and are cast to `dtype` where they are used. Initial values:

    embedding                    normal, std 0.02
    q, k, v, gate, up            normal, std 1 / sqrt(width)
    attention out, mlp down      normal, std 1 / sqrt(fan in) / sqrt(2 layers)
    head                         normal, std 0.02: the first loss is close to log(vocab_size)
    norms 1, sinks 0
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import pallas_attn as pa

from .data import NO_TARGET, VOCAB_SIZE

# attention(q, k, v, mask, soft_cap=, sinks=) -> out, in pa.mha's layout.
AttentionFn = Callable[..., jax.Array]
Rotation = tuple[jax.Array, jax.Array]  # cos and sin, from `rotary_angles`
Masks = Mapping[str, Any]  # a letter of the window pattern -> what `attention` takes as mask

REMAT_POLICIES = {
    "none": None,  # keep every activation
    "save_attention": jax.checkpoint_policies.save_only_these_names(
        "pallas_attn_out", "pallas_attn_lse"
    ),  # run all of a block again but the attention kernel
    "full": jax.checkpoint_policies.nothing_saveable,  # run all of a block again
}

# How each weight lies on a mesh with the axes data, fsdp and heads, by the weight's name.
PARTITION = {
    "embed": P(None, "fsdp"),
    "head": P("fsdp", None),
    "q": P("fsdp", "heads", None),
    "k": P("fsdp", "heads", None),
    "v": P("fsdp", "heads", None),
    "out": P("heads", None, "fsdp"),
    "sinks": P("heads"),
    "gate": P("fsdp", "heads"),
    "up": P("fsdp", "heads"),
    "down": P("heads", "fsdp"),
}
ROWS = P(("data", "fsdp"))  # how a batch's rows lie on it


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention of every layer."""

    q_heads: int = 4
    kv_heads: int = 2  # divides q_heads
    head_dim: int = 48  # even, for the rotary pairs
    window_pattern: str = "SSSL"  # one letter a layer, repeated: S a window, L all before, C causal
    window: int = 64  # keys that an S layer sees besides a token itself
    qk_norm: bool = True  # RMSNorm of q and k before they are rotated
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    sinks: bool = False  # one learned logit a head in the softmax's denominator

    def __post_init__(self):
        if not self.window_pattern or not set(self.window_pattern) <= {"S", "L", "C"}:
            raise ValueError(f"{self.window_pattern=} must be made of the letters S, L and C")


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of the network."""

    vocab_size: int = VOCAB_SIZE
    layers: int = 4
    width: int = 192
    attention: AttentionConfig = AttentionConfig()

    @property
    def hidden(self) -> int:
        """Width inside the SwiGLU: 8/3 of the model's, rounded up to a multiple of 64."""
        return -(-8 * self.width // (3 * 64)) * 64

    def letter(self, layer: int) -> str:
        """The window pattern's letter for one layer."""
        pattern = self.attention.window_pattern
        return pattern[layer % len(pattern)]

    @property
    def letters(self) -> list[str]:
        """The letters that the layers use, sorted."""
        return sorted({self.letter(layer) for layer in range(self.layers)})


def layer_masks(config: GPTConfig, segment_ids: jax.Array | None) -> dict[str, Any]:
    """The mask expression for each letter that the layers use.

    Args:
        config: Of the model.
        segment_ids: int32 [batch, len]; tokens see their own document only, negative is padding.
            None where each sequence is one document.

    Returns:
        {"L": ..., "S": ..., "C": ...}, those that there are.
    """
    packed: pa.masks.Mask = pa.Causal()
    if segment_ids is not None:
        packed = packed & pa.Document(segment_ids)
    window = pa.SlidingWindow(config.attention.window, None)
    known = {"L": packed, "S": packed & window, "C": pa.Causal()}
    return {letter: known[letter] for letter in config.letters}


def plan_masks(
    config: GPTConfig,
    segment_ids: jax.Array,
    *,
    dtype: Any = jnp.float32,
    backend: str | None = None,
) -> dict[str, Any]:
    """Plans the masks of a step, once for all layers.

    Args:
        config: Of the model.
        segment_ids: int32 [batch, len], as in `layer_masks`.
        dtype: Of q, k and v in the model.
        backend: As given to `pa.mha`.

    Returns:
        One planned mask for each letter that the layers use.
    """
    length, head_dim = segment_ids.shape[-1], config.attention.head_dim
    return {
        letter: pa.plan(
            mask, q_len=length, kv_len=length, head_dim=head_dim, dtype=dtype, backend=backend
        )
        for letter, mask in layer_masks(config, segment_ids).items()
    }


def rotary_angles(positions: jax.Array, head_dim: int, base: float = 10_000.0) -> Rotation:
    """Gives (cos, sin), float32 [batch, len, 1, head_dim // 2], for positions [batch, len]."""
    rates = base ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, :, None, None] * rates[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of x [batch, len, heads, head_dim] by their angles.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.4, pairs laid out as two halves.
    """
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def shard_rows(x: jax.Array) -> jax.Array:
    """Keeps activations split by rows alone where a mesh is set, so weights move, not they."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, ROWS)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A float32 weight drawn from a normal distribution."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Scales the last axis to a root mean square of 1, then by a learned weight."""

    def __init__(self, width: int):
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes x of any shape [..., width]; the mean is taken in float32."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        weight = jax.lax.broadcast_in_dim(self.weight[...], x.shape, (x.ndim - 1,))
        return (wide * jax.lax.rsqrt(mean_square + 1e-6) * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = attention = config.attention
        width, head_dim = config.width, attention.head_dim
        std = width**-0.5
        out_std = (attention.q_heads * head_dim * 2 * config.layers) ** -0.5
        self.q = normal(rngs, (width, attention.q_heads, head_dim), std)
        self.k = normal(rngs, (width, attention.kv_heads, head_dim), std)
        self.v = normal(rngs, (width, attention.kv_heads, head_dim), std)
        self.out = normal(rngs, (attention.q_heads, head_dim, width), out_std)
        if attention.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)
        if attention.sinks:
            self.sinks = nnx.Param(jnp.zeros((attention.q_heads,), jnp.float32))

    def __call__(
        self, x: jax.Array, rotation: Rotation, mask: Any, attention: AttentionFn
    ) -> jax.Array:
        """Takes x [batch, len, width], gives the same shape."""
        q, k, v = (
            jnp.einsum("blw,whd->blhd", x, weight[...].astype(x.dtype))
            for weight in (self.q, self.k, self.v)
        )  # [batch, len, q_heads or kv_heads, head_dim]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotation), rotate(k, rotation)
        sinks = self.sinks[...] if self.config.sinks else None
        out = attention(q, k, v, mask, soft_cap=self.config.soft_cap, sinks=sinks)
        return jnp.einsum("blhd,hdw->blw", out, self.out[...].astype(x.dtype))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer, GLU Variants (arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden
        self.gate = normal(rngs, (width, hidden), width**-0.5)
        self.up = normal(rngs, (width, hidden), width**-0.5)
        self.down = normal(rngs, (hidden, width), (hidden * 2 * config.layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes x [batch, len, width], gives the same shape."""
        gate, up = x @ self.gate[...].astype(x.dtype), x @ self.up[...].astype(x.dtype)
        return (jax.nn.silu(gate) * up) @ self.down[...].astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention, then the SwiGLU, each on a normed input and added to the stream."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.attention_norm, self.attention = RMSNorm(config.width), Attention(config, rngs)
        self.mlp_norm, self.mlp = RMSNorm(config.width), SwiGLU(config, rngs)

    def __call__(
        self, x: jax.Array, rotation: Rotation, mask: Any, attention: AttentionFn
    ) -> jax.Array:
        """Takes x [batch, len, width], gives the same shape."""
        x = shard_rows(x + self.attention(self.attention_norm(x), rotation, mask, attention))
        return shard_rows(x + self.mlp(self.mlp_norm(x)))


class GPT(nnx.Module):
    """The whole network: tokens to the logits of the next tokens."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.embed = normal(rngs, (config.vocab_size, config.width), 0.02)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width)
        self.head = normal(rngs, (config.width, config.vocab_size), 0.02)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        masks: Masks,
        *,
        attention: AttentionFn = pa.mha,
        remat: str = "none",
    ) -> jax.Array:
        """Runs the network.

        Args:
            tokens: int32 [batch, len].
            positions: int32 [batch, len], counted inside each document.
            masks: From `plan_masks` or `layer_masks`, or whatever `attention` takes.
            attention: Called as `pa.mha` is, once a layer and in their order.
            remat: A key of REMAT_POLICIES: what is kept for the backward pass.

        Returns:
            float32 [batch, len, vocab_size].
        """
        return self.logits(
            self.features(tokens, positions, masks, attention=attention, remat=remat)
        )

    def features(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        masks: Masks,
        *,
        attention: AttentionFn = pa.mha,
        remat: str = "none",
    ) -> jax.Array:
        """All layers, but not the head; arguments as above. Gives [batch, len, width]."""

        def run(block: Block, x: jax.Array, rotation: Rotation, mask: Any) -> jax.Array:
            return block(x, rotation, mask, attention)

        if remat != "none":
            run = nnx.remat(run, policy=REMAT_POLICIES[remat])
        x = shard_rows(self.embed[...][tokens].astype(self.dtype))  # [batch, len, width]
        rotation = rotary_angles(positions, self.config.attention.head_dim)
        for layer, block in enumerate(self.blocks):
            x = run(block, x, rotation, masks[self.config.letter(layer)])
        return x

    def logits(self, x: jax.Array) -> jax.Array:
        """The head: features [..., width] to float32 [..., vocab_size]."""
        head = self.head[...].astype(self.dtype)
        return jnp.matmul(self.norm(x), head, preferred_element_type=jnp.float32)


def summed_loss(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropy over the tokens that have a target.

    Args:
        logits: float32 [batch, len, vocab_size].
        targets: int32 [batch, len]; NO_TARGET is left out.

    Returns:
        (sum in nats, float32; how many were summed, int32).
    """
    counted = targets != NO_TARGET
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_probs, jnp.where(counted, targets, 0)[..., None], axis=-1)
    loss = -jnp.sum(jnp.where(counted, picked[..., 0], 0.0))
    return loss, jnp.sum(counted, dtype=jnp.int32)


def matmul_params(config: GPTConfig) -> int:
    """Weights that each token is multiplied by: all but the embedding and the norms."""
    heads = 2 * config.attention.q_heads + 2 * config.attention.kv_heads
    layer = config.width * (heads * config.attention.head_dim + 3 * config.hidden)
    return config.layers * layer + config.width * config.vocab_size


def train_flops(config: GPTConfig, positions: np.ndarray, segment_ids: np.ndarray) -> float:
    """Floating-point operations that one training step on a batch needs.

    6 for each weight and token, and 12 * q_heads * head_dim for each (query, key) pair that the
    masks let see each other: forward 2 + 2 and backward twice that. Work on hidden pairs and
    padding, and forward passes run again under remat, are not counted: they are not needed.

    Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B: 6 N + 12 L H Q T a token; T, the
    keys that each query sees, is counted here rather than taken as the row's length.

    Args:
        config: Of the model.
        positions: int32 [batch, len], counted inside each document of contiguous tokens.
        segment_ids: int32 [batch, len]; negative is padding.

    Returns:
        The count; a float, since it passes 2**53 only where its last digits mean nothing.
    """
    keys = positions[segment_ids >= 0].astype(np.int64) + 1  # that each token sees in an L layer
    before = np.nonzero(segment_ids >= 0)[-1].astype(np.int64) + 1  # and in a C layer
    short = np.minimum(keys, config.attention.window + 1)
    seen = {"L": keys.sum(), "S": short.sum(), "C": before.sum()}
    pairs = sum(int(seen[config.letter(layer)]) for layer in range(config.layers))
    per_pair = 12 * config.attention.q_heads * config.attention.head_dim
    return 6.0 * matmul_params(config) * len(keys) + float(per_pair * pairs)
