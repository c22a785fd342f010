"""Tokens/s of the engine at some numbers of concurrent requests, beside the naive loop."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from . import data
from .engine import Engine, EngineConfig
from .gpt import GPT
from .sample import abstract_model, generate, load
from .scheduler import Request
from .train import PRESETS


def measure(options: argparse.Namespace) -> None:
    """Measures, and prints one JSON line a case.

    Each case is run once to warm up and once more on other prompts; the time is from the first
    submission to the last token, prompts included. Documents never end here, so that all requests
    get as many tokens.

    Args:
        options: From the command line of `models.engine`.
    """
    graphdef, params, dtype = _model(options)
    naive, first = _naive(graphdef, params, options)
    records: list[dict[str, Any]] = [naive]
    _show(naive, options, dtype)
    most = max(options.concurrency)
    total = options.prompt_len + options.new_tokens
    config = EngineConfig(
        max_batch=most,
        max_len=-(-total // 64) * 64,
        page_size=64,
        decode_rows=tuple(options.concurrency),
        mixed_tokens=(most + max(512, options.prompt_len), most + 4096),
        backend=options.backend,
    )
    engine = Engine(graphdef, params, config)
    started = time.perf_counter()
    engine.warm_up()
    print(f"{engine.compilations} steps compiled in {time.perf_counter() - started:.1f} s")
    for count in options.concurrency:
        for seed in (1, 0):
            prompts = _prompts(count, options.prompt_len, seed)
            requests = [Request(prompt, options.new_tokens) for prompt in prompts]
            steps, started = engine.steps, time.perf_counter()
            texts = engine.run(requests)
            seconds = time.perf_counter() - started
        assert all(len(text) == options.new_tokens for text in texts)
        record = {
            "case": "engine",
            "concurrency": count,
            "tokens_per_s": round(count * options.new_tokens / seconds, 1),
            "ms_per_step": round(1e3 * seconds / (engine.steps - steps), 3),
            "same_as_naive": _same(texts[0], first),
        }
        record["times_naive"] = round(record["tokens_per_s"] / naive["tokens_per_s"], 2)
        records.append(record)
        _show(record, options, dtype)
    assert engine.compilations == len(config.sizes), "something was compiled while it was measured"
    if options.out:
        with Path(options.out).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _model(options) -> tuple[nnx.GraphDef, nnx.State, str]:
    """A checkpoint's model, or a preset's with random weights."""
    if options.folder:
        graphdef, params = load(options.folder)
        return graphdef, params, "as trained"
    config = PRESETS[options.preset]
    dtype = "bfloat16" if jax.default_backend() == "gpu" else config.dtype
    make = jax.jit(
        lambda: nnx.split(GPT(config.model, rngs=nnx.Rngs(0), dtype=dtype), nnx.Param)[1]
    )
    return abstract_model(config.model, dtype)[0], make(), dtype


def _prompts(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Random bytes, so that no two prompts share a page."""
    rows = np.random.default_rng(seed).integers(0, data.DOC, (count, length)).tolist()
    return [tuple(row) for row in rows]


def _naive(graphdef, params, options) -> tuple[dict[str, Any], np.ndarray]:
    """The naive loop on one request; its tokens too."""
    prompt = np.asarray(_prompts(1, options.prompt_len, 0)[0], np.int32)
    run = lambda: generate(  # noqa: E731
        graphdef, params, prompt, options.new_tokens, temperature=0.0, backend=options.backend
    )
    run()
    started = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - started
    rate = options.new_tokens / seconds
    return {"case": "naive", "concurrency": 1, "tokens_per_s": round(rate, 1)}, tokens


def _same(tokens: list[int], naive: np.ndarray) -> int:
    """How many tokens from the first on are those of the naive loop."""
    count = min(len(tokens), len(naive))
    differ = np.flatnonzero(np.asarray(tokens[:count]) != naive[:count])
    return int(differ[0]) if len(differ) else count


def _show(record: dict[str, Any], options, dtype: str) -> None:
    device = jax.devices()[0].device_kind
    record |= {
        "model": options.folder or options.preset,
        "dtype": dtype,
        "prompt": options.prompt_len,
        "new_tokens": options.new_tokens,
        "device": device,
        "jax": jax.__version__,
    }
    print(json.dumps(record), flush=True)
