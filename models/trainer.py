"""The training loop's moving parts: mesh, optimizer, jitted step, and the Trainer that holds them.

One step: masks are planned from the batch's segment ids, the loss is summed over micro-batches,
and the gradient is divided by the number of tokens that have a target. Weights and optimizer
state lie on the mesh (data, fsdp, heads) as gpt.PARTITION says; XLA does the rest.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import pallas_attn as pa
from pallas_attn import gpu

from . import data, peer
from .gpt import GPT, PARTITION, ROWS, plan_masks, summed_loss, train_flops
from .runs import OptimConfig, Run, RunConfig, State
from .sample import abstract_model

ATTENTIONS = ("pallas_attn", *peer.IMPLEMENTATIONS)
HELD_OUT_STEPS = 16  # batches in one held-out evaluation


def make_mesh(shape: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, heads).

    Args:
        shape: Sizes; an axis that is not named has size 1, but `data`, which takes what is left.
        devices: None is all of them.

    Returns:
        The mesh.

    Raises:
        ValueError: An unknown axis, or sizes that do not fit the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    named = shape.get("fsdp", 1) * shape.get("heads", 1)
    sizes = {"data": max(len(devices) // named, 1), "fsdp": 1, "heads": 1} | shape
    if len(sizes) != 3 or np.prod(list(sizes.values())) != len(devices):
        raise ValueError(f"mesh {sizes} must be data, fsdp and heads over {len(devices)} devices")
    auto = (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), auto, devices=devices)


def place(tree: Any, mesh: Mesh) -> Any:
    """Shardings for weights and what the optimizer keeps for each, by the weight's name."""

    def sharding(path, _):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        named = [name for name in names if name != "value"]
        return NamedSharding(mesh, PARTITION.get(named[-1] if named else "", P()))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def make_optimizer(config: OptimConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW as OptimConfig says, and its learning rate by step."""
    rate = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=rate / (config.warmup + 1),  # not 0, which would waste the first step
        peak_value=rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=0.1 * rate,
    )

    def matrices(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    adamw = optax.adamw(schedule, b2=config.beta2, weight_decay=config.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw), schedule


def make_loss(config: RunConfig, graphdef: nnx.GraphDef) -> Callable[..., Any]:
    """Makes loss(params, batch of [rows, row_len]) -> (sum in nats, how many tokens)."""
    if config.attention == "pallas_attn":
        attention = functools.partial(pa.mha, backend=config.backend)
        plan = functools.partial(plan_masks, dtype=config.dtype, backend=config.backend)
    else:
        attention, plan = peer.attention_fn(config.attention), peer.dense_masks

    def loss(params, batch):
        masks = plan(config.model, batch.segment_ids)
        model = nnx.merge(graphdef, params)
        logits = model(
            batch.tokens, batch.positions, masks, attention=attention, remat=config.remat
        )
        return summed_loss(logits, batch.targets)

    return loss


def make_step(config: RunConfig, graphdef: nnx.GraphDef) -> Callable[..., Any]:
    """Makes step(state, index, batch of [accum, rows, row_len]) -> (state, metrics)."""
    gradient = jax.value_and_grad(make_loss(config, graphdef), has_aux=True)
    optimizer, schedule = make_optimizer(config.optim)

    def add_micro_batch(params, total, micro_batch):
        return jax.tree.map(jnp.add, total, gradient(params, micro_batch)), None

    def step(state, index, batch):
        params = state["params"]
        if config.batch.accum == 1:
            total = gradient(params, jax.tree.map(lambda x: x[0], batch))
        else:
            zeros = (jnp.float32(0), jnp.int32(0)), jax.tree.map(jnp.zeros_like, params)
            add = functools.partial(add_micro_batch, params)
            total, _ = jax.lax.scan(add, zeros, batch)
        (loss, count), grads = total
        share = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g * share, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, opt_state = optimizer.update(grads, state["opt_state"], params)
            rate = schedule(index)
        metrics = {
            "loss": loss * share,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": rate,
        }
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, metrics

    return step


class Program(NamedTuple):
    """The jitted functions of one configuration on one mesh."""

    graphdef: nnx.GraphDef
    shardings: State  # of the weights and the optimizer state
    create: Callable[[], State]
    train_step: Callable[..., Any]
    loss: Callable[..., Any]


@functools.lru_cache(maxsize=8)
def build(config: RunConfig, mesh: Mesh) -> Program:
    """Builds a run's functions; equal runs share them, and so what was compiled.

    Args:
        config: Of the run.
        mesh: From `make_mesh`.
    """
    graphdef, params = abstract_model(config.model, config.dtype)
    optimizer, _ = make_optimizer(config.optim)

    def create():
        model = GPT(config.model, rngs=nnx.Rngs(config.seed), dtype=config.dtype)
        params = nnx.state(model, nnx.Param)
        return {"params": params, "opt_state": optimizer.init(params)}

    shapes = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    shardings = place(shapes, mesh)
    train_step = jax.jit(
        make_step(config, graphdef),
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, P())),
    )
    loss = jax.jit(make_loss(config, graphdef))
    return Program(graphdef, shardings, jax.jit(create, out_shardings=shardings), train_step, loss)


class Trainer:
    """A model, its optimizer and its data on a mesh, at some step."""

    def __init__(
        self, config: RunConfig, documents: list[data.Document], *, mesh: Mesh | None = None
    ):
        """Draws the first weights and compiles nothing yet.

        Args:
            config: Of the run.
            documents: The corpus, before it is split.
            mesh: From `make_mesh`; None is all devices along `data`.

        Raises:
            ValueError: Rows that do not split into micro-batches over the mesh, or heads that do
                not split over it.
        """
        self.config, self.step = config, 0
        self.mesh = make_mesh({}) if mesh is None else mesh
        self._check()
        train, held_out = data.split(documents)
        sizes = {"row_len": config.batch.row_len, "rows": config.batch.rows}
        self.train_rows = data.PackedRows(train, seed=config.seed, **sizes)
        self.held_out_rows = data.PackedRows(held_out, seed=0, **sizes)
        self.program = build(config, self.mesh)
        self.batch_sharding = NamedSharding(self.mesh, P(None, *ROWS))
        with jax.set_mesh(self.mesh):
            self.state: State = self.program.create()

    def _check(self) -> None:
        batch, mesh = self.config.batch, self.mesh.shape
        row_shards = batch.accum * mesh["data"] * mesh["fsdp"]
        if batch.rows % row_shards:
            raise ValueError(
                f"{batch.rows=} must be a multiple of accum * data * fsdp = {row_shards}"
            )
        if self.config.model.attention.kv_heads % mesh["heads"]:
            raise ValueError(f"kv_heads must be a multiple of the mesh's heads={mesh['heads']}")

    def _on_device(self, batch: data.Batch) -> data.Batch:
        """Puts a step's rows on the mesh as [accum, rows, row_len]."""
        accum, row_len = self.config.batch.accum, self.config.batch.row_len
        split = jax.tree.map(lambda x: x.reshape(accum, -1, row_len), batch)
        return jax.device_put(split, self.batch_sharding)

    def run(self, until: int, *, log_every: int = 10) -> Iterator[list[dict[str, Any]]]:
        """Trains up to a step.

        Args:
            until: The step to stop before.
            log_every: Steps between looks at the device; in between nothing waits for it.

        Yields:
            A record for each step since the last look. Rates are means since then; the first look
            follows one step, so that compilation spoils only that one's rate.
        """
        peak = peak_flops(self.mesh)
        pending, started, first = [], time.perf_counter(), self.step
        while self.step < until:
            batch = self.train_rows.batch(self.step)
            with jax.set_mesh(self.mesh):
                self.state, metrics = self.program.train_step(
                    self.state, np.int32(self.step), self._on_device(batch)
                )
            flops = train_flops(self.config.model, batch.positions, batch.segment_ids)
            pending.append((metrics, int((batch.segment_ids >= 0).sum()), flops))
            self.step += 1
            if self.step not in (first + 1, until) and self.step % log_every:
                continue
            losses = jax.device_get([metrics for metrics, _, _ in pending])
            seconds = time.perf_counter() - started
            tokens, flops = (sum(entry[i] for entry in pending) for i in (1, 2))
            rates = {"tokens_per_s": tokens / seconds}
            if peak is not None:
                rates["mfu"] = flops / seconds / peak
            yield [
                {"step": self.step - len(losses) + index + 1, "tokens": entry[1]}
                | {name: float(value) for name, value in values.items()}
                | rates
                for index, (values, entry) in enumerate(zip(losses, pending, strict=True))
            ]
            pending, started = [], time.perf_counter()

    def held_out_loss(self, steps: int = HELD_OUT_STEPS) -> float:
        """Mean loss in nats a byte over the first batches of the held-out documents."""
        loss, count = 0.0, 0
        for step in range(min(steps, -(-self.held_out_rows.epoch_rows // self.config.batch.rows))):
            batches = self._on_device(self.held_out_rows.batch(step))
            for micro in range(self.config.batch.accum):
                with jax.set_mesh(self.mesh):
                    part = self.program.loss(
                        self.state["params"], jax.tree.map(lambda x, m=micro: x[m], batches)
                    )
                loss, count = loss + float(part[0]), count + int(part[1])
        return loss / max(count, 1)

    def restore(self, run: Run) -> None:
        """Goes on where a run's last checkpoint stands."""
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self.state,
            self.program.shardings,
        )
        self.state, self.step = run.restore(like), run.last_step or 0


def peak_flops(mesh: Mesh) -> float | None:
    """The bf16 matmul rate of all devices of a mesh in FLOP/s; None where it is not known."""
    card = gpu.from_device(mesh.devices.flat[0])
    return None if card is None or card.peak_bf16 is None else card.peak_bf16 * mesh.size


def progress_bar(step: int, until: int) -> tqdm:
    """A bar over steps; where nobody watches, a line now and then."""
    every = 0.5 if sys.stderr.isatty() else 20.0
    return tqdm(total=until, initial=step, unit="step", mininterval=every, dynamic_ncols=True)


def show(bar: tqdm, records: list[dict[str, Any]]) -> None:
    """Moves the bar on and writes the newest figures beside it."""
    newest: dict[str, Any] = {}
    for record in records:
        newest |= record
    texts = {"loss": ".3f", "held_out_loss": ".3f", "tokens_per_s": ",.0f", "mfu": ".1%"}
    known = {name: format(newest[name], text) for name, text in texts.items() if name in newest}
    bar.set_postfix(known, refresh=False)
    bar.update(newest["step"] - bar.n)
