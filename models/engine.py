"""Text for many requests at once: continuous batching over keys and values in pages.

    engine = Engine(graphdef, params, EngineConfig(max_batch=16))
    numbers = [engine.submit(Request(prompt)) for prompt in prompts]
    while engine.busy:
        for event in engine.step(): ...

A step feeds tokens of many sequences, chunks of prompts and single ones side by side, and draws
one token for each sequence that has been fed whole. `scheduler.py` says which; here is the step
on the device. Its shapes come from a few sizes that the configuration names, all compiled by
`warm_up`: who is in the batch, their lengths and their pages are data.

    decode   one token a row, rows rounded up to one of `decode_rows`
    mixed    ragged: max_batch rows, tokens rounded up to one of `mixed_tokens`

The next step is launched before the last one's tokens are read: they stay on the device, one for
each slot, and the next step takes them from there. Only token ids are known here, no text.

`python -m models.engine --bench` measures tokens/s beside the naive loop.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_attn as pa
from pallas_attn.varlen import locate

from . import data
from .gpt import layer_masks
from .sampling import Draws, draw
from .scheduler import Event, Request, Row, Scheduler

Pools = list[tuple[jax.Array, jax.Array]]  # k_pages and v_pages of each layer

# What a step knows of a row; the last two are float32 bits.
COLUMNS = ("slot", "count", "start", "index", "seed", "top_k", "temperature", "top_p")
FROM_DEVICE = -1  # as a token: the one that was drawn last in this slot


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine; each of the row and token counts is compiled once.

    Attributes:
        max_batch: Sequences that run at once.
        max_len: Tokens of a sequence, a multiple of page_size.
        page_size: Tokens of a page.
        num_pages: Of the pool; 0 for as many as max_batch sequences of max_len need.
        decode_rows: Sizes of decode steps; max_batch is always one.
        mixed_tokens: Sizes of steps with prompts; the largest is above max_batch, and is the most
            that one step feeds.
        forbidden: Tokens that are never drawn.
        backend: Of `pa.paged_attention`.
    """

    max_batch: int = 16
    max_len: int = 2048
    page_size: int = 32
    num_pages: int = 0
    decode_rows: tuple[int, ...] = (1, 16)
    mixed_tokens: tuple[int, ...] = (64, 512)
    forbidden: tuple[int, ...] = (data.PAD,)
    backend: str | None = None

    @property
    def max_pages(self) -> int:
        """Pages of a sequence."""
        return self.max_len // self.page_size

    @property
    def pool_pages(self) -> int:
        """Pages of the pool."""
        return self.num_pages or self.max_batch * self.max_pages

    def size_of(self, rows: list[Row]) -> "StepSize":
        """The smallest step that holds some rows."""
        if all(row.count == 1 for row in rows):
            sizes = {n for n in self.decode_rows if n < self.max_batch} | {self.max_batch}
            count = min(n for n in sizes if n >= len(rows))
            return StepSize(count, count, False)
        total = sum(row.count for row in rows)
        return StepSize(self.max_batch, min(n for n in self.mixed_tokens if n >= total), True)

    @property
    def sizes(self) -> list["StepSize"]:
        """All steps that may ever be compiled."""
        rows = sorted({n for n in self.decode_rows if n < self.max_batch} | {self.max_batch})
        decode = [StepSize(n, n, False) for n in rows]
        return decode + [StepSize(self.max_batch, n, True) for n in sorted(self.mixed_tokens)]


class StepSize(NamedTuple):
    """The static shape of a step."""

    rows: int
    tokens: int
    ragged: bool


def pack(size: StepSize, rows: list[Row], tables: np.ndarray) -> np.ndarray:
    """Writes all that a step must know into one array, so that one transfer carries it.

    Args:
        size: Of the step.
        rows: At most size.rows; the rest feed nothing.
        tables: int32 [max_batch + 1, max_pages], the pages of each slot.

    Returns:
        int32 [tokens + rows * (len(COLUMNS) + max_pages)].
    """
    tokens, whole, real = [], [], []
    for row in rows:
        given, how = row.given, row.sequence.request.sampling
        tokens += given + [FROM_DEVICE] * (row.count - len(given))
        after = row.start + row.count  # index of the token that is drawn
        seed = how.seed - ((how.seed >> 31) << 32)  # the same bits as int32
        whole.append((row.sequence.slot, row.count, row.start, after, seed, how.top_k))
        real.append((how.temperature, how.top_p))
    columns = np.zeros((size.rows, len(COLUMNS)), np.int32)
    columns[:, 0] = len(tables) - 1  # no slot
    if rows:
        columns[: len(rows), :6] = whole
        columns[: len(rows), 6:] = np.asarray(real, np.float32).view(np.int32)
    tokens = np.asarray(tokens + [0] * (size.tokens - len(tokens)), np.int32)
    return np.concatenate([tokens, columns.reshape(-1), tables[columns[:, 0]].reshape(-1)])


def _unpack(size: StepSize, packed: jax.Array):
    """Tokens, columns by name and page table, from `pack`."""
    width, end = len(COLUMNS), size.tokens + size.rows * len(COLUMNS)
    tokens, table = packed[: size.tokens], packed[end:].reshape(size.rows, -1)
    columns = packed[size.tokens : end].reshape(size.rows, width)
    named = {name: columns[:, index] for index, name in enumerate(COLUMNS)}
    for name in COLUMNS[-2:]:
        named[name] = jax.lax.bitcast_convert_type(named[name], jnp.float32)
    return tokens, named, table


def step(size, model, pools: Pools, last: jax.Array, packed: jax.Array, config: EngineConfig):
    """Feeds tokens and draws the next ones.

    Args:
        size: Static shape.
        model: The GPT.
        pools: Keys and values of each layer, [num_pages, page_size, kv_heads, head_dim].
        last: int32 [max_batch + 1], the token drawn last in each slot.
        packed: From `pack`.
        config: Of the engine.

    Returns:
        The pools and `last` with what is new, and int32 [rows], the tokens drawn.
    """
    tokens, row, table = _unpack(size, packed)
    offsets = jnp.pad(jnp.cumsum(row["count"], dtype=jnp.int32), (1, 0))
    if size.ragged:
        owner, inside = locate(offsets, size.tokens)
        owner = jnp.maximum(owner, np.int32(0))
        new = {"cu_seqlens_q": offsets}
    else:
        owner = jnp.arange(size.rows, dtype=np.int32)
        inside, new = jnp.zeros_like(owner), {"q_lens": row["count"]}
    tokens = jnp.where(tokens == FROM_DEVICE, last[row["slot"][owner]], tokens)
    layers, written = iter(pools), []

    def attention(q, k, v, mask, *, soft_cap, sinks):
        cache = pa.PagedKV(*next(layers), table, row["start"]).append(k[0], v[0], **new)
        written.append((cache.k_pages, cache.v_pages))
        out: Any = pa.paged_attention(
            q[0], cache.k_pages, cache.v_pages, table, cache.kv_lens,
            cu_seqlens_q=new.get("cu_seqlens_q"), mask=mask, soft_cap=soft_cap, sinks=sinks,
            backend=config.backend,
        )  # fmt: skip
        return out[None]

    positions = row["start"][owner] + inside
    masks = layer_masks(model.config, None)
    x = model.features(tokens[None], positions[None], masks, attention=attention)[0]
    logits = model.logits(x[jnp.maximum(offsets[1:] - np.int32(1), np.int32(0))])
    logits = logits.at[:, np.asarray(config.forbidden, np.int32)].set(-jnp.inf)
    draws = Draws(*(row[name] for name in Draws._fields))
    drawn = draw(logits, draws)
    return written, last.at[row["slot"]].set(drawn), drawn


@functools.lru_cache(maxsize=8)
def compiled_step(graphdef: nnx.GraphDef, treedef: Any, config: EngineConfig):
    """The jitted step; engines of one model and configuration share it."""

    # A list of weights crosses jit faster than the tree does.
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def run(size, weights, pools, last, packed):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        return step(size, model, pools, last, packed, config)

    return run


class Engine:
    """Runs requests; not thread-safe.

    Args:
        graphdef: Of a GPT.
        params: Its weights.
        config: Sizes.

    Raises:
        ValueError: For sizes that do not fit.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: nnx.State, config: EngineConfig):
        model: Any = nnx.eval_shape(lambda: nnx.merge(graphdef, params))
        self.config, self.vocab_size = config, model.config.vocab_size
        self.scheduler = Scheduler(
            num_pages=config.pool_pages, page_size=config.page_size, max_batch=config.max_batch,
            max_len=config.max_len, max_tokens=max(config.mixed_tokens),
        )  # fmt: skip
        weights, treedef = jax.tree.flatten(params)
        # What the model casts where it uses it can be cast once.
        self._weights = [w.astype(model.dtype) if w.ndim > 1 else w for w in weights]
        self._run: Any = compiled_step(graphdef, treedef, config)
        heads, dim = model.config.attention.kv_heads, model.config.attention.head_dim
        shape = (config.pool_pages, config.page_size, heads, dim)
        # Placed as what steps return is, which counts where jit looks up what it has compiled.
        device = self._weights[0].sharding
        self._pools: Pools = [
            jax.device_put((jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)), device)
            for _ in range(model.config.layers)
        ]
        self._last = jax.device_put(jnp.zeros(config.max_batch + 1, jnp.int32), device)
        self._tables = np.zeros((config.max_batch + 1, config.max_pages), np.int32)
        self._in_flight: tuple[list[Row], jax.Array] | None = None
        self.steps = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.busy or self._in_flight is not None

    @property
    def compilations(self) -> int:
        """Steps compiled so far for this model and configuration."""
        return self._run._cache_size()

    def submit(self, request: Request) -> int:
        """Queues a request; gives its number.

        Raises:
            ValueError: As `check`.
        """
        self.check(request)
        return self.scheduler.submit(request)

    def check(self, request: Request) -> None:
        """Changes nothing, and so may be called from any thread.

        Raises:
            ValueError: The request could never run, or has tokens that the model does not know.
        """
        if not all(0 <= token < self.vocab_size for token in request.prompt):
            raise ValueError(f"prompt: expected tokens from 0 to {self.vocab_size - 1}")
        self.scheduler.check(request)

    def cancel(self, number: int) -> Event | None:
        """Ends a request at once; None where it has ended already."""
        return self.scheduler.cancel(number)

    def step(self) -> list[Event]:
        """Launches the next step and reads the one before."""
        rows = self.scheduler.plan()
        before, self._in_flight = self._in_flight, self._launch(rows) if rows else None
        if before is None:
            return []
        return self.scheduler.finish(before[0], np.asarray(before[1])[: len(before[0])].tolist())

    def run(self, requests: Items[Request]) -> list[list[int]]:
        """Runs requests to their end; gives the new tokens of each."""
        found: dict[int, list[int]] = {self.submit(request): [] for request in requests}
        while self.busy:
            for event in self.step():
                found[event.id] += event.tokens
        return list(found.values())

    def warm_up(self) -> None:
        """Compiles all steps, by running each on nothing."""
        for size in self.config.sizes:
            self._dispatch(size, [])
        jax.block_until_ready(self._last)

    def _launch(self, rows: list[Row]) -> tuple[list[Row], jax.Array]:
        for sequence in (row.sequence for row in rows):
            new = sequence.pages[sequence.tabled :]
            if new:
                self._tables[sequence.slot, sequence.tabled : len(sequence.pages)] = new
                sequence.tabled = len(sequence.pages)
        self.steps += 1
        return rows, self._dispatch(self.config.size_of(rows), rows)

    def _dispatch(self, size: StepSize, rows: list[Row]) -> jax.Array:
        packed = pack(size, rows, self._tables)
        self._pools, self._last, drawn = self._run(
            size, self._weights, self._pools, self._last, jnp.asarray(packed)
        )
        drawn.copy_to_host_async()
        return drawn


def main(arguments: Items[str] | None = None) -> None:
    """The command line."""
    from .engine_bench import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", action="store_true", required=True, help="measure tokens/s")
    parser.add_argument("--preset", default="h200", help="of models.train: a model's shape")
    parser.add_argument("--folder", help="a run whose checkpoint is taken instead")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--backend", help="of pallas_attn")
    parser.add_argument("--out", help="a file that the JSON lines are added to")
    options = parser.parse_args(arguments)
    if math.prod((options.prompt_len, options.new_tokens, *options.concurrency)) < 1:
        parser.error("sizes must be at least 1")
    measure(options)


if __name__ == "__main__":
    main()
