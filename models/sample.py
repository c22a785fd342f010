"""Text from a model: `python -m models.sample runs/cpu --prompt "def "`.

One sequence at a time in a buffer of fixed length, the whole of it run again for each token: the
plain way, against which a faster one can be checked.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_attn as pa

from . import data
from .gpt import GPT, GPTConfig, plan_masks
from .runs import Run

BUFFER_STEP = 64  # buffers are multiples of it, so that few lengths are ever compiled


def load(folder: str, dtype: str | None = None) -> tuple[nnx.GraphDef, nnx.State]:
    """Reads the model of a run's last checkpoint.

    Args:
        folder: Of the run.
        dtype: To compute in; None is the one it was trained with.

    Returns:
        The model as nnx.split gives it.

    Raises:
        FileNotFoundError: There is no checkpoint.
    """
    run = Run(folder)
    config = run.config()
    graphdef, params = abstract_model(config.model, dtype or config.dtype)
    device = jax.sharding.make_single_device_sharding(jax.devices()[0])
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), params)
    state = run.restore({"params": params})
    run.close()
    return graphdef, state["params"]


def abstract_model(config: GPTConfig, dtype: str) -> tuple[nnx.GraphDef, nnx.State]:
    """The model with shapes in the place of weights."""
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0), dtype=dtype))
    return nnx.split(model, nnx.Param)


def generate(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    prompt: np.ndarray,
    count: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    backend: str | None = None,
) -> np.ndarray:
    """Goes on from a prompt, up to the end of the document.

    Args:
        graphdef: Of a GPT.
        params: Its weights.
        prompt: int32 [len], at least one token.
        count: How many tokens to add at most.
        seed: Of the draws: the same seed draws the same tokens.
        temperature: Of the softmax that tokens are drawn from; 0 takes the most likely.
        backend: Of `pa.mha`.

    Returns:
        int32 [up to count], the new tokens alone; the DOC mark that ends them is left out.

    Raises:
        ValueError: An empty prompt, or a temperature below 0.
    """
    if len(prompt) == 0 or temperature < 0:
        raise ValueError(f"{len(prompt)=} must be at least 1 and {temperature=} at least 0")
    stop = len(prompt) + count
    buffer = np.full((1, -(-stop // BUFFER_STEP) * BUFFER_STEP), data.PAD, np.int32)
    buffer[0, : len(prompt)] = prompt
    span = jnp.asarray([len(prompt), stop], jnp.int32)
    key = jax.random.key(seed)
    heat = jnp.float32(temperature)
    filled = _fill(graphdef, params, jnp.asarray(buffer), span, key, heat, backend=backend)
    new = np.asarray(filled)[0, len(prompt) : stop]
    ends = np.flatnonzero(new == data.DOC)
    return new[: ends[0]] if len(ends) else new


@functools.partial(jax.jit, static_argnames=("graphdef", "backend"))
def _fill(graphdef, params, buffer, span, key, temperature, *, backend):
    """Draws the tokens of buffer [1, len] from index span[0] up to span[1], one after the other."""
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None]
    # Causal masks keep what is not written yet from what is.
    masks = plan_masks(model.config, jnp.zeros_like(buffer), dtype=model.dtype, backend=backend)
    attention = functools.partial(pa.mha, backend=backend)

    def draw(index, buffer):
        logits = model(buffer, positions, masks, attention=attention)
        last = jax.lax.dynamic_index_in_dim(logits[0], index - 1, keepdims=False)
        last = jnp.where(jnp.arange(last.size, dtype=jnp.int32) == data.PAD, -jnp.inf, last)
        drawn = jax.random.categorical(
            jax.random.fold_in(key, index), last / jnp.maximum(temperature, 1e-6)
        )
        token = jnp.where(temperature > 0, drawn, jnp.argmax(last)).astype(jnp.int32)
        return jax.lax.dynamic_update_slice(buffer, token[None, None], (jnp.int32(0), index))

    return jax.lax.fori_loop(span[0], span[1], draw, buffer)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of a run of models.train")
    parser.add_argument("--prompt", default="", help="how the text begins")
    parser.add_argument("--length", type=int, default=400, help="bytes to add at most")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default=None, help="of pa.mha")
    options = parser.parse_args()
    graphdef, params = load(options.folder)
    tokens = generate(
        graphdef,
        params,
        data.encode(options.prompt.encode()),
        options.length,
        seed=options.seed,
        temperature=options.temperature,
        backend=options.backend,
    )
    print(options.prompt + data.decode(tokens))


if __name__ == "__main__":
    main()
