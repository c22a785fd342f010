"""The README's support table, asked of the backends themselves: `python -m pallas_attn.support`."""

import dataclasses

from pallas_attn import backends, masks
from pallas_attn import gpu as gpus
from pallas_attn.spec import Spec

_BASE = Spec(
    batch=2, q_len=512, kv_len=512, q_heads=8, kv_heads=8, head_dim=128, v_dim=128,
    dtype="bfloat16", scale=1.0,
)  # fmt: skip

# What is asked of each backend: a name, and how it changes the plain call.
QUESTIONS: dict[str, dict] = {
    "float16, bfloat16": {},
    "float32": {"dtype": "float32"},
    "float32, head_dim above 192": {"dtype": "float32", "head_dim": 256},
    "float64": {"dtype": "float64"},
    "any lengths, q_len ≠ kv_len": {"q_len": 130, "kv_len": 17},
    "GQA, MQA": {"kv_heads": 1},
    "head_dim or v_dim not a power of two, v_dim ≠ head_dim": {"head_dim": 72, "v_dim": 40},
    "head_dim and v_dim up to 256": {"head_dim": 256, "v_dim": 256},
    "head_dim above 256": {"head_dim": 512, "v_dim": 512},
    "every mask of `pallas_attn.masks`": {},
    "soft_cap, sinks": {"soft_cap": 30.0, "has_sinks": True},
    "bias, with gradient": {"bias_shape": (1, 8, 512, 512)},
    "lse, with gradient": {},
    "bit-equal gradients from run to run": {},
}
DEVICES = {"Hopper": "h200", "Ampere": "a100", "CPU": None}


def answer(backend: str, question: str, device: str | None) -> str | None:
    """Why a backend refuses on a device (a key of `gpu.KNOWN`, None for a CPU), or None."""
    spec = dataclasses.replace(_BASE, **QUESTIONS[question])
    gpu = gpus.KNOWN[device] if device else None
    return backends.load(backend).unsupported_reason(spec, masks.Causal(), gpu)


def table() -> str:
    """The table as Markdown: for each question and backend the devices on which it runs."""
    lines = [f"| | {' | '.join(backends.ALL)} |", f"| --- {'| --- ' * len(backends.ALL)}|"]
    for question in QUESTIONS:
        cells = []
        for backend in backends.ALL:
            runs = [n for n, device in DEVICES.items() if answer(backend, question, device) is None]
            cells.append(", ".join(runs) or "-")
        lines.append(f"| {question} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
