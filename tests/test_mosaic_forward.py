"""The Hopper forward by interpretation: every mask, shape and option, by the error rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import testing
from pallas_attn.testing import MASKED, SHAPED, Operands, Problem

SMALL = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 64, 8),) * 2)
# One mask of each form of table and of detail; the others run on a GPU, and their details are
# checked in test_mosaic_masking.py.
FORMS = ("causal", "window", "causal_documents", "lengths", "dense", "causal_block_sparse")
TAKEN = [
    case
    for case in SHAPED
    if case.mask_name == "full"
    and case.problem_name in ("more_keys", "one_key", "soft_cap", "sinks")
]


def forward_only(problem: Problem, data, tiles=SMALL, mask=None, *, races=False):
    """Out and lse, judged by the error rule."""
    exact, plain = (
        {name: x[name] for name in ("out", "lse")} for x in testing.expected_of(problem, data)
    )
    attend = testing.attend_with(problem, "mosaic_gpu", tiles)
    with pa.interpret(detect_races=races):
        out, lse = attend(data.operands, data.mask if mask is None else mask)
    got = {"out": testing.to_host(out), "lse": testing.to_host(lse)}
    sizes = testing.magnitudes(problem, data)
    testing.assert_close(got, exact, plain, sizes, data.operands.q.dtype.name)
    return got


@pytest.mark.parametrize(
    "case", [c for c in MASKED if c.mask_name in FORMS], ids=lambda case: case.mask_name
)
def test_every_form_of_mask(case):
    forward_only(case.problem, testing.inputs(case, "bfloat16"))


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_every_shape_and_option(case):
    forward_only(case.problem, testing.inputs(case, "float16"))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", [None, pa.Causal()], ids=["full", "causal"])
def test_shipped_tiles_race_free(dims, mask):
    problem = Problem(batch=2, lens=(264, 264), heads=(2, 1), dims=dims)
    data = testing.make_inputs(problem, "bfloat16", mask, f"shipped{dims}{mask}")
    forward_only(problem, data, None, races=True)


@pytest.mark.parametrize("growth", [0.05, 2.0])
def test_maxima_that_grow_are_rescaled(growth):
    # Random logits hardly ever move a maximum by 2^8, which is when the accumulator is rescaled.
    problem = Problem(lens=(200, 512), heads=(2, 2), dims=(64, 64))
    data = testing.make_inputs(problem, "bfloat16", pa.Causal(align="bottom_right"), "grow")
    q, k, v = data.operands[:3]
    grown = k.astype(jnp.float32) * (
        1.0 + growth * jnp.arange(512, dtype=jnp.float32)[None, :, None, None]
    )
    data = data._replace(operands=Operands(jnp.abs(q), grown.astype(k.dtype), v))
    forward_only(problem, data)


@pytest.mark.parametrize("scale", [0.0, -0.7, 30.0])
def test_any_scale(scale):
    problem = Problem(lens=(70, 130), heads=(2, 2), dims=(64, 64), scale=scale)
    forward_only(problem, testing.make_inputs(problem, "float16", None, f"scale{scale}"))


def test_padding_may_hold_anything():
    problem = Problem(batch=2, lens=(130, 130), heads=(2, 2), dims=(64, 64))
    lens = jnp.asarray([70, 129], jnp.int32)
    data = testing.make_inputs(problem, "bfloat16", pa.Lengths(lens, lens), "padding")
    pad = (np.arange(130)[None] >= np.asarray(lens)[:, None])[..., None, None]
    poisoned = Operands(*(jnp.where(pad, jnp.nan, x) for x in data.operands[:3]))
    clean = data._replace(operands=Operands(*(jnp.where(pad, 0, x) for x in data.operands[:3])))
    want = forward_only(problem, clean)
    attend = testing.attend_with(problem, "mosaic_gpu", SMALL)
    with pa.interpret():
        out, lse = attend(poisoned, data.mask)
    np.testing.assert_array_equal(testing.to_host(out), want["out"])
    np.testing.assert_array_equal(testing.to_host(lse), want["lse"])


def test_heads_of_a_group_share_short_tiles():
    problem = Problem(batch=1, lens=(50, 200), heads=(6, 2), dims=(64, 64))
    mask = pa.Causal(align="bottom_right")
    data = testing.make_inputs(problem, "bfloat16", mask, "packed")
    forward_only(problem, data, pa.Tiles(pa.KernelTiles(192, 128, 12), SMALL.dq, SMALL.dkv))


def test_batches_map():
    problem = Problem(batch=2, lens=(70, 70), heads=(2, 2), dims=(64, 64))
    data = testing.make_inputs(problem, "bfloat16", pa.Causal(), "mapped")
    q, k, v = data.operands[:3]

    def one(q, k, v):
        return pa.mha(q, k, v, pa.Causal(), backend="mosaic_gpu", tiles=SMALL)

    with pa.interpret():
        mapped, whole = jax.vmap(one)(q, k, v), one(q, k, v)
    np.testing.assert_array_equal(testing.to_host(mapped), testing.to_host(whole))


def test_what_it_does_not_take_is_said():
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
    half = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bfloat16)
    with pa.gpu.target("h200"):
        assert "float16" in pa.explain(q, q, q).reasons["mosaic_gpu"]
        assert "bias" in pa.explain(half, half, half, bias=bias).reasons["mosaic_gpu"]
        assert pa.explain(half, half, half).backend == "mosaic_gpu"
    with pa.gpu.target("a100"):
        assert "9.0" in pa.explain(half, half, half).reasons["mosaic_gpu"]
