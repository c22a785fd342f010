"""Trains the transformer on packed Python source: `python -m models.train --out runs/cpu`.

python -m models.train --preset h200 --out runs/h200 --backend triton
python -m models.train --preset h200 --compare pallas_attn:mosaic_gpu pallas_attn:triton jax_cudnn
python -m models.train --preset h200 --compare pallas_attn jax_cudnn --window-pattern C --steps 60
python -m models.train --mesh data=2,fsdp=2,heads=2 --preset h200 --out runs/eight
"""

import argparse
import dataclasses
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from . import data
from .compare import CHOICES, compare
from .gpt import AttentionConfig, GPTConfig
from .runs import BatchConfig, OptimConfig, Run, RunConfig, plot
from .sample import generate
from .trainer import Trainer, make_mesh, progress_bar, show

PRESETS = {
    # 1.7M weights, 1,024 tokens a step: minutes on two CPU cores.
    "cpu": RunConfig(),
    # 133M weights; 131,072 tokens a step.
    "h200": RunConfig(
        model=GPTConfig(
            layers=12,
            width=1024,
            attention=AttentionConfig(q_heads=8, kv_heads=2, head_dim=128, window=1024),
        ),
        batch=BatchConfig(row_len=8192, rows=16, accum=4),
        optim=OptimConfig(steps=600, learning_rate=1e-3, warmup=60),
        dtype="bfloat16",
    ),
    # Seconds; for tests.
    "tiny": RunConfig(
        model=GPTConfig(
            layers=2,
            width=32,
            attention=AttentionConfig(
                q_heads=4, kv_heads=2, head_dim=8, window=16, window_pattern="SL"
            ),
        ),
        batch=BatchConfig(row_len=64, rows=8),
        optim=OptimConfig(steps=30, learning_rate=1e-2, warmup=5),
    ),
}


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    documents: list[data.Document] | None = None,
    resume: bool = False,
    until: int | None = None,
    eval_every: int = 100,
) -> Trainer:
    """Trains a run, with its log, plot and checkpoints.

    Args:
        config: Of the run.
        folder: Of the run.
        mesh: As `Trainer` takes it.
        documents: The corpus; None is the standard library.
        resume: Whether to go on from the folder's last checkpoint.
        until: The step to stop before, for a run in parts; None is the last.
        eval_every: Steps between held-out evaluations, each followed by a checkpoint.

    Returns:
        The trainer, at its last step.
    """
    documents = data.read_corpus() if documents is None else documents
    until = config.optim.steps if until is None else min(until, config.optim.steps)
    run = Run(folder)
    run.start(config, data.fingerprint(documents), resume=resume)
    trainer = Trainer(config, documents, mesh=mesh)
    if run.last_step is not None:
        trainer.restore(run)
    else:
        run.log([{"step": 0, "held_out_loss": trainer.held_out_loss()}])
    bar = progress_bar(trainer.step, until)
    log_every = next(n for n in (10, 5, 2, 1) if eval_every % n == 0)
    for records in trainer.run(until, log_every=log_every):
        if trainer.step % eval_every == 0 or trainer.step == until:
            records.append({"step": trainer.step, "held_out_loss": trainer.held_out_loss()})
            run.save(trainer.step, trainer.state)
        run.log(records)
        show(bar, records)
    bar.close()
    plot({"": run.read_log()}, run.folder / "loss.png")
    run.close()
    return trainer


def config_options(parser: Any, cls: type, skip: tuple[str, ...] = ()) -> None:
    """Gives a parser one option for each plain field of a configuration."""
    for field in dataclasses.fields(cls):
        flag = "--" + field.name.replace("_", "-")
        if field.name in skip or dataclasses.is_dataclass(field.type):
            continue
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            kinds = typing.get_args(field.type) or (field.type,)
            parser.add_argument(flag, type=kinds[0])


def override(config: Any, options: argparse.Namespace) -> Any:
    """A configuration with the fields that the command line names."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = override(value, options)
        elif getattr(options, field.name, None) is not None:
            changes[field.name] = getattr(options, field.name)
    return dataclasses.replace(config, **changes)


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, RunConfig]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--out", help="the run's folder; default runs/PRESET")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--stop-at", type=int, help="a step to stop before")
    parser.add_argument("--eval-every", type=int, default=100, help="steps, and a checkpoint")
    parser.add_argument("--mesh", default="", help="data=2,fsdp=2,heads=2; data takes what is left")
    parser.add_argument("--compare", nargs="+", choices=CHOICES, help="measure these instead")
    fields = parser.add_argument_group("in the place of the preset's")
    for cls in (RunConfig, BatchConfig, OptimConfig, GPTConfig, AttentionConfig):
        config_options(fields, cls, skip=("vocab_size",))
    options = parser.parse_args(arguments)
    if options.dtype is None and jax.default_backend() == "gpu":
        options.dtype = "bfloat16"
    options.out = options.out or f"runs/{options.preset}"
    return options, override(PRESETS[options.preset], options)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options, config = parse(arguments)
    sizes = [part.split("=") for part in options.mesh.split(",") if part]
    mesh = make_mesh({axis: int(size) for axis, size in sizes})
    if options.compare:
        compare(config, options.compare, options.out, mesh=mesh)
        return
    started = time.perf_counter()
    trainer = train(
        config,
        options.out,
        mesh=mesh,
        resume=options.resume,
        until=options.stop_at,
        eval_every=options.eval_every,
    )
    held_out = [r["held_out_loss"] for r in Run(options.out).read_log() if "held_out_loss" in r]
    count = sum(leaf.size for leaf in jax.tree.leaves(trainer.state["params"]))
    print(f"\n{count:,} weights, {trainer.step} steps, {time.perf_counter() - started:.0f} s")
    print(f"held-out loss {held_out[0]:.3f} -> {held_out[-1]:.3f} nats a byte")
    print(f"checkpoint, log.jsonl and loss.png in {options.out}; a sample:\n")
    prompt = "def "
    tokens = generate(
        trainer.program.graphdef,
        trainer.state["params"],
        data.encode(prompt.encode()),
        300,
        backend=config.backend,
    )
    print(prompt + data.decode(tokens))


if __name__ == "__main__":
    main()
