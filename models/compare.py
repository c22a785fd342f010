"""The same model on the same rows through several attentions, for speed and for equal losses."""

import dataclasses
import gc
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from pallas_attn import backends

from . import data
from .runs import RunConfig, plot
from .trainer import ATTENTIONS, Trainer, progress_bar, show

# What `compare` takes: an attention, or ours on a backend by its name.
CHOICES = (*ATTENTIONS, *(f"pallas_attn:{name}" for name in backends.ALL))


def named(config: RunConfig) -> str:
    """The attention of a run, with its backend if it is asked for by name."""
    ours = config.attention == "pallas_attn" and config.backend
    return f"{config.attention}:{config.backend}" if ours else config.attention


def train_curve(
    config: RunConfig, documents: list[data.Document], *, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Trains without leaving anything on disk, to measure.

    Args:
        config: Of the run; `config.attention` and `config.backend` say what is measured.
        documents: The corpus, before it is split.
        mesh: As `Trainer` takes it.

    Returns:
        {"attention", "remat", "records", "loss", "held_out_loss", "tokens_per_s", "mfu"}: the
        records of `Trainer.run`, the mean loss over the last tenth of the steps, and medians of
        the rates without the first steps; mfu None where the peak is not known.
    """
    trainer = Trainer(config, documents, mesh=mesh)
    bar = progress_bar(0, config.optim.steps)
    records = []
    for group in trainer.run(config.optim.steps):
        records += group
        show(bar, group)
    bar.close()
    warm, tail = records[1:] or records, records[-max(len(records) // 10, 1) :]
    return {
        "attention": named(config),
        "remat": config.remat,
        "records": records,
        "loss": statistics.fmean(record["loss"] for record in tail),
        "held_out_loss": trainer.held_out_loss(),
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in warm),
        "mfu": statistics.median(r["mfu"] for r in warm) if "mfu" in warm[0] else None,
    }


def compare(
    config: RunConfig, attentions: Sequence[str], folder: str | Path, *, mesh: Mesh | None = None
) -> list[dict[str, Any]]:
    """Trains the same model on the same rows through several attentions, one after the other.

    One that runs out of memory is tried again with remat "full"; one that cannot run at all gives
    its reason in the place of figures.

    Args:
        config: Of each run but for `attention` and, where that names one, `backend`.
        attentions: From CHOICES.
        folder: Where compare.jsonl and compare.png go.
        mesh: As `Trainer` takes it.

    Returns:
        What `train_curve` gave for each, or {"attention", "remat", "error"}.
    """
    documents = data.read_corpus()
    results = []
    for attention in attentions:
        name, _, backend = attention.partition(":")
        one = dataclasses.replace(config, attention=name, backend=backend or config.backend)
        result = _try_curve(one, documents, mesh)
        if "RESOURCE_EXHAUSTED" in result.get("error", "") and config.remat != "full":
            result = _try_curve(dataclasses.replace(one, remat="full"), documents, mesh)
        results.append(result)
    report(results, Path(folder))
    return results


def _try_curve(
    config: RunConfig, documents: list[data.Document], mesh: Mesh | None
) -> dict[str, Any]:
    """`train_curve`, or why it could not run."""
    print(f"{named(config)}, remat {config.remat}", flush=True)
    try:
        return train_curve(config, documents, mesh=mesh)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        return {"attention": named(config), "remat": config.remat, "error": reason}
    finally:
        gc.collect()  # frees the trainer's device memory before the next one asks for it


def report(results: list[dict[str, Any]], folder: Path) -> None:
    """Prints a table of `compare`'s results and writes them to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(result) + "\n" for result in results]
    (folder / "compare.jsonl").write_text("".join(lines))
    done = [result for result in results if "error" not in result]
    plot({result["attention"]: result["records"] for result in done}, folder / "compare.png")
    print(f"{'attention':<24}{'remat':<16}{'tokens/s':>12}{'MFU':>8}{'loss':>9}{'held out':>10}")
    for result in results:
        start = f"{result['attention']:<24}{result['remat']:<16}"
        if "error" in result:
            print(start + result["error"])
            continue
        mfu = "" if result["mfu"] is None else f"{result['mfu']:.1%}"
        losses = f"{result['loss']:>9.4f}{result['held_out_loss']:>10.4f}"
        print(f"{start}{result['tokens_per_s']:>12,.0f}{mfu:>8}{losses}")
    if len(done) > 1:
        curves = np.array([[record["loss"] for record in result["records"]] for result in done])
        gap = np.abs(curves - curves[0]).max()
        print(
            f"largest difference of the losses of any step from {done[0]['attention']}: {gap:.4f}"
        )
