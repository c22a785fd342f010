"""Which token comes next: greedy, or drawn by temperature, top-k and top-p.

A draw depends on the request's seed and the token's index alone, so a request gets the same text
whatever else is in the batch, and again when it is computed a second time.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are drawn.

    Attributes:
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_k: Only the k most likely tokens are drawn from; 0 for all.
        top_p: Of those, the fewest most likely whose probabilities reach p; above 0, 1 for all.
        seed: Of the draws, 32 bits.

    Raises:
        ValueError: For values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: got {self.temperature}, expected 0 or more")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k: got {self.top_k}, expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected above 0 and up to 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}, expected 32 bits")


class Draws(NamedTuple):
    """The draws of a step, each array [rows]; see `Sampling`."""

    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    seed: jax.Array  # the 32 bits, as int32
    index: jax.Array  # int32: of the token in its sequence


def draw(logits: jax.Array, draws: Draws) -> jax.Array:
    """Draws one token a row.

    Args:
        logits: float32 [rows, vocab_size]; -inf is never drawn.
        draws: How.

    Returns:
        int32 [rows].
    """
    # Sorting the vocabulary is what costs; a batch that is greedy throughout goes without.
    return jax.lax.cond(jnp.any(draws.temperature > 0), _sample, _greedy, logits, draws)


def _greedy(logits, draws):
    del draws
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _sample(logits, draws):
    size = logits.shape[-1]
    best, tokens = jax.lax.top_k(logits, size)  # by falling logit, equals by rising token
    scaled = best / jnp.maximum(draws.temperature, 1e-6)[:, None]
    rank = jnp.arange(size, dtype=jnp.int32)
    top_k = jnp.where(draws.top_k > 0, draws.top_k, np.int32(size))
    scaled = jnp.where(rank < top_k[:, None], scaled, -jnp.inf)
    shares = jax.nn.softmax(scaled, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    # Rounding may bring the sum to 1 before the last tokens.
    kept = (before < draws.top_p[:, None]) | (draws.top_p >= 1)[:, None]
    scaled = jnp.where(kept, scaled, -jnp.inf)

    def one(seed, index, scores):
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.categorical(key, scores)

    drawn = jax.vmap(one)(draws.seed, draws.index, scaled).astype(jnp.int32)
    drawn = jnp.where(draws.temperature > 0, drawn, np.int32(0))
    return jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
