"""The Hopper backward by interpretation: gradients under every form of table and every schedule.

Tiles are those that ship; a cotangent of lse comes with that of out.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
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
    "documents": (problem((200, 200)), "causal_documents", NARROW),
    "64 queries, 128 channels": (problem(dims=(128, 128)), "documents_padded", MIDDLE),
    "few queries": (problem((8, 150)), "causal_documents", MIDDLE),
    "wide": (problem(dims=(256, 256)), "lengths", WIDE),
    "192 and 128 channels": (problem((130, 130), (192, 128)), "causal_documents", WIDE),
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


@pytest.mark.parametrize("tiles", [MIDDLE, WIDE], ids=["middle", "wide"])
def test_padding_may_hold_anything(tiles):
    given = problem((130, 130), heads=(2, 2))
    lens = jnp.asarray([70, 129], jnp.int32)
    data = testing.make_inputs(given, "bfloat16", pa.Lengths(lens, lens), "padding")
    pad = (np.arange(130)[None] >= np.asarray(lens)[:, None])[..., None, None]

    def gradients(operands, dout):
        def attend(*x):
            return pa.mha(*x, data.mask, backend="mosaic_gpu", tiles=tiles)

        return jax.vjp(attend, *operands)[1](dout)

    results = []
    for fill in (0, jnp.nan):
        *operands, dout = (jnp.where(pad, fill, x) for x in (*data.operands[:3], data.dout))
        with pa.interpret():
            results.append(jax.jit(gradients)(tuple(operands), dout))
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(testing.to_host(poisoned), testing.to_host(clean))
        assert not np.where(pad, testing.to_host(poisoned), 0).any()


@pytest.mark.parametrize("mask_name", ["causal", "dense_heads"])
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
