"""The Hopper backward by interpretation: gradients under every schedule.

Tiles are those that ship; a cotangent of lse comes with that of out. Masks with arrays run on a GPU
(`tests/test_gpu.py`): the interpreter can hang on them where cores are few.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn import testing
from pallas_attn.testing import MASK_CASES, Problem

# What ships for up to 64, 128 and 256 channels; tiles of the forward that are quick to interpret.
NARROW = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(128, 128, 8),) * 2)
MIDDLE = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 128, 8, 3),) * 2)
WIDE = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 64, 8),) * 2)

BASE = Problem(batch=2, lens=(150, 200), heads=(4, 2), dims=(64, 64))


def problem(lens=(150, 200), dims=(64, 64), **more):
    return dataclasses.replace(BASE, lens=lens, dims=dims, **more)


CASES = {
    "window, sinks, cap": (problem(sinks=True, soft_cap=3.0), "causal_window", NARROW),
    "64 queries, 128 channels": (problem(dims=(128, 128)), "causal", MIDDLE),
    "wide": (problem((130, 130), (192, 128)), "window", WIDE),
    "64 and 96 channels": (problem(dims=(64, 96)), "causal", MIDDLE),
}


def check(given: Problem, mask_name: str, tiles, dtype="bfloat16", **options):
    mask = MASK_CASES[mask_name](testing.generator(mask_name), *given.mask_shape)
    data = testing.make_inputs(given, dtype, mask, mask_name)

    def attend(operands, mask):
        q, k, v, _, sinks = operands
        return pa.mha(
            q, k, v, mask, sinks=sinks, scale=given.scale, soft_cap=given.soft_cap,
            return_lse=True, backend="mosaic_gpu", tiles=tiles, **options,
        )  # fmt: skip

    with pa.interpret():
        testing.assert_close_to_reference(attend, given, data)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    check(*CASES[name])


def test_gradients_of_float16():
    check(problem((70, 130)), "causal_offsets", MIDDLE, "float16")


@pytest.mark.parametrize("mask_name", ["causal"])
def test_deterministic_gradients(mask_name):
    check(problem((150, 150)), mask_name, MIDDLE, deterministic=True)


@pytest.mark.parametrize(
    ("dkv", "named"),
    [
        (pa.KernelTiles(32, 32), "32x32"),
        (pa.KernelTiles(64, 128, 4), "4 warps"),
        (pa.KernelTiles(64, 128, 8, 1), "1 stages"),
        (pa.KernelTiles(64, 128, 8, 8), "shared memory"),
    ],
)
def test_other_tiles_are_refused(dkv, named):
    x = jax.ShapeDtypeStruct((1, 70, 1, 128), jnp.bfloat16)
    tiles = pa.Tiles(pa.KernelTiles(128, 64, 8), dkv, dkv)
    with pa.gpu.target("h200"), pytest.raises(ValueError, match=named):
        jax.eval_shape(lambda x: pa.mha(x, x, x, backend="mosaic_gpu", tiles=tiles), x)
