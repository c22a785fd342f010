"""What a run is and the folder it leaves behind.

config.json    the RunConfig, and a fingerprint of the text
log.jsonl      one JSON object a step, and one a held-out evaluation
loss.png       both losses over the steps
checkpoints/   orbax: params and opt_state at some steps
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from .gpt import AttentionConfig, GPTConfig

type State = dict[str, Any]  # {"params": ..., "opt_state": ...}


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """How much text one optimizer step reads."""

    row_len: int = 256  # tokens
    rows: int = 4  # in a step
    accum: int = 1  # micro-batches that a step's rows are split into; divides rows


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with clipping, a linear warm-up and a cosine down to a tenth of the rate."""

    steps: int = 1000
    learning_rate: float = 3e-3
    warmup: int = 50  # steps
    weight_decay: float = 0.1  # on matrices alone
    beta2: float = 0.95
    clip: float = 1.0  # of the gradient's global norm


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that a run's numbers depend on, but the text and the machine."""

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    attention: str = "pallas_attn"  # or a key of peer.IMPLEMENTATIONS
    backend: str | None = None  # of pa.mha
    dtype: str = "float32"  # that activations are computed in; weights are float32
    remat: str = "none"  # a key of gpt.REMAT_POLICIES
    seed: int = 0  # of the weights and of the order of the text

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RunConfig":
        """Reads what `dataclasses.asdict` wrote."""
        model = dict(fields["model"])
        model["attention"] = AttentionConfig(**model["attention"])
        parts: dict[str, Any] = {
            "model": GPTConfig(**model),
            "batch": BatchConfig(**fields["batch"]),
            "optim": OptimConfig(**fields["optim"]),
        }
        return cls(**{**fields, **parts})


class Run:
    """The folder of one run; opened anew or to go on."""

    def __init__(self, folder: str | Path):
        """Opens a folder.

        Args:
            folder: Made by `start` where it is missing.
        """
        self.folder = Path(folder).absolute()
        self._manager: ocp.CheckpointManager | None = None

    def start(self, config: RunConfig, text: str, *, resume: bool = False) -> None:
        """Claims the folder for a configuration.

        Args:
            config: Of the run.
            text: Fingerprint of the text it trains on.
            resume: Whether to go on where the folder's last checkpoint stands, if it has one.

        Raises:
            FileExistsError: A run is there and is not to be resumed.
            ValueError: The run that is there has another configuration or text.
        """
        wanted = {"config": dataclasses.asdict(config), "text": text}
        path = self.folder / "config.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(wanted, indent=2) + "\n")
            return
        if not resume:
            raise FileExistsError(f"{self.folder} holds a run: resume it, or name another folder")
        found = _flatten(json.loads(path.read_text()))
        other = [name for name, value in _flatten(wanted).items() if found.get(name) != value]
        if other:
            changes = ", ".join(f"{n} {found.get(n)} -> {_flatten(wanted)[n]}" for n in other)
            raise ValueError(f"{self.folder} holds another run; changed: {changes}")
        self._cut_log(-1 if self.last_step is None else self.last_step)

    def config(self) -> RunConfig:
        """The configuration that the folder was started with."""
        return RunConfig.from_json(json.loads((self.folder / "config.json").read_text())["config"])

    @property
    def checkpoints(self) -> ocp.CheckpointManager:
        """Orbax's manager, made when it is first asked for."""
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
        return self._manager

    @property
    def last_step(self) -> int | None:
        """The step of the last checkpoint."""
        return self.checkpoints.latest_step()

    def save(self, step: int, state: State) -> None:
        """Writes a checkpoint, in the background; one that is there already is left alone."""
        if step != self.last_step:
            items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
            self.checkpoints.save(step, args=ocp.args.Composite(**items))

    def restore(self, like: State) -> State:
        """Reads the last checkpoint.

        Args:
            like: Arrays or ShapeDtypeStructs with shardings; may be a part of what was saved.

        Returns:
            The same trees, with the saved values.

        Raises:
            FileNotFoundError: There is no checkpoint.
        """
        if self.last_step is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint")
        items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
        restored = self.checkpoints.restore(self.last_step, args=ocp.args.Composite(**items))
        return {name: restored[name] for name in like}

    def close(self) -> None:
        """Waits for checkpoints that are still being written."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.close()
            self._manager = None

    def log(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds records to log.jsonl."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def read_log(self) -> list[dict[str, Any]]:
        """All records of log.jsonl."""
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _cut_log(self, step: int) -> None:
        """Drops what was logged after the checkpoint that the run goes on from."""
        kept = [record for record in self.read_log() if record["step"] <= step]
        (self.folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def plot(curves: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws loss over steps.

    Args:
        curves: Records of log.jsonl under the name that the picture gives them.
        path: Of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, records in curves.items():
        for key, marker in (("loss", ""), ("held_out_loss", "o")):
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{name} {key}", marker=marker)
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
