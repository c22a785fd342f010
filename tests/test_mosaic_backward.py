"""The Hopper backward by interpretation: gradients under every form of table and every schedule.

Tiles are those that ship; a cotangent of lse comes with that of out.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_mosaic_masking import to_registers

import pallas_attn as pa
from pallas_attn import backends, reference, testing
from pallas_attn.mosaic_gpu import backward_add, backward_turns
from pallas_attn.mosaic_gpu.detail import detail_by_key
from pallas_attn.spec import Spec
from pallas_attn.testing import MASK_CASES, Problem

# What ships for up to 64 and 128 channels, and for 256 with a cap; tiles of the forward that are
# quick to interpret.
NARROW = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(128, 128, 8),) * 2)
MIDDLE = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 128, 8, 3),) * 2)
WIDE = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 64, 8),) * 2)
# A warpgroup of its own makes dq, as ships for up to 192 and 256 channels.
ADDER_192 = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 64, 12, 3),) * 2)
ADDER = pa.Tiles(pa.KernelTiles(128, 64, 8), *(pa.KernelTiles(64, 64, 12),) * 2)

BASE = Problem(batch=2, lens=(150, 200), heads=(4, 2), dims=(64, 64))


def problem(lens=(150, 200), dims=(64, 64), **more):
    return dataclasses.replace(BASE, lens=lens, dims=dims, **more)


def wide(lens, dims=(256, 256), **more):
    """Smaller, since it takes long to interpret; batch entries and heads are taken alike by all."""
    return problem(lens, dims, batch=1, heads=(2, 1), **more)


CASES = {
    "window, sinks, cap": (problem(sinks=True, soft_cap=3.0), "causal_window", NARROW),
    "documents": (problem((200, 200)), "causal_documents", NARROW),
    "64 queries, 128 channels": (problem(dims=(128, 128)), "documents_padded", MIDDLE),
    "few queries": (problem((8, 150)), "causal_documents", MIDDLE),
    "wide": (wide((150, 200)), "lengths", WIDE),
    "wide with an adder": (wide((130, 130)), "causal_documents", ADDER),
    "192 and 128 channels": (wide((130, 130), (192, 128)), "causal_documents", ADDER_192),
    "192 channels, cap": (wide((130, 130), (192, 192), soft_cap=3.0), "causal", ADDER_192),
    "wide, cap": (wide((70, 130), soft_cap=3.0), "causal", ADDER),
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


@pytest.mark.parametrize("tiles", [MIDDLE, WIDE, ADDER], ids=["middle", "wide", "adder"])
def test_padding_may_hold_anything(tiles):
    shapes = problem((130, 130), heads=(2, 2))
    lens = jnp.asarray([70, 129], jnp.int32)
    data = testing.make_inputs(shapes, "bfloat16", pa.Lengths(lens, lens), "padding")
    pad = (np.arange(130)[None] >= np.asarray(lens)[:, None])[..., None, None]

    def gradients(operands, dout):
        def attend(*x):
            return pa.mha(*x, data.mask, backend="mosaic_gpu", tiles=tiles)

        return jax.vjp(attend, *operands)[1](dout)

    given = [
        tuple(jnp.where(pad, fill, x) for x in (*data.operands[:3], data.dout))
        for fill in (0, jnp.nan)
    ]
    with pa.interpret():
        run = testing.compiled(lambda *x: gradients(x[:3], x[3]), *given[0])
        results = [run(*x) for x in given]
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(testing.to_host(poisoned), testing.to_host(clean))
        assert not np.where(pad, testing.to_host(poisoned), 0).any()


@pytest.mark.parametrize(
    ("given", "mask_name", "tiles"),
    [
        (problem((150, 150), batch=1), "causal", MIDDLE),
        (problem((150, 150), batch=1), "dense_heads", MIDDLE),
        (wide((150, 150), (64, 64)), "causal", ADDER),
    ],
)
def test_deterministic_gradients(given, mask_name, tiles):
    check(given, mask_name, tiles, deterministic=True)


@pytest.mark.parametrize(
    ("dkv", "named"),
    [
        (pa.KernelTiles(32, 32), "32x32"),
        (pa.KernelTiles(64, 128, 4), "4 warps"),
        (pa.KernelTiles(64, 128, 8, 1), "1 stages"),
        (pa.KernelTiles(64, 128, 8, 5), "shared memory"),
    ],
)
def test_other_tiles_are_refused(dkv, named):
    x = jax.ShapeDtypeStruct((1, 70, 1, 128), jnp.bfloat16)
    tiles = pa.Tiles(pa.KernelTiles(128, 64, 8), dkv, dkv)
    with pa.gpu.target("h200"), pytest.raises(ValueError, match=named):
        jax.eval_shape(lambda x: pa.mha(x, x, x, backend="mosaic_gpu", tiles=tiles), x)


SPEC = Spec(2, 700, 900, 2, 2, 64, 64, "bfloat16", 0.1)
SHUFFLED = pa.Document(
    jnp.asarray(np.random.default_rng(0).permuted(np.arange(700) // 60), jnp.int32),
    jnp.asarray(np.arange(900) // 80, jnp.int32),
)
BY_KEY = MASK_CASES | {"queries_of_documents_in_any_order": lambda *_: SHUFFLED & pa.Causal()}


def test_dq_lies_as_its_threads_hold_it():
    tile = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    registers = to_registers(tile)
    stored = np.zeros(backward_add.slabs(64, 96), np.float32)
    for n, pair in enumerate(backward_add.fours(len(registers))):
        four = np.concatenate([registers[m] for m in pair], axis=1)
        stored[:, n] = four.reshape(4, 128)
    np.testing.assert_array_equal(stored, backward_add.to_slabs(tile))
    heads = np.stack([stored, stored + 1])[None]
    np.testing.assert_array_equal(
        backward_add.from_slabs(heads), np.stack([tile, tile + 1], axis=1)[None]
    )


def mask_named(name):
    shape = SPEC.batch, SPEC.q_heads, SPEC.q_len, SPEC.kv_len
    return BY_KEY[name](testing.generator(name), *shape)


@pytest.mark.parametrize("name", BY_KEY)
def test_tiles_take_turns_in_the_order_in_which_they_add(name):
    tiles = pa.Tiles(MIDDLE.fwd, MIDDLE.dq, MIDDLE.dkv)
    visits = backends.build_table("mosaic_gpu", mask_named(name), tiles, SPEC).dkv
    order = jax.tree.map(np.asarray, backward_turns.order_of(visits, 11))
    seen = visits.kinds(11) > 0
    (taken,) = np.asarray(backward_turns.tile_order(seen.shape[-2]))
    assert sorted(taken) == [*range(seen.shape[-2])]
    want = np.zeros(seen.shape, int)
    want[..., taken, :] = np.cumsum(seen[..., taken, :], -2) - seen[..., taken, :]
    tile = np.arange(seen.shape[-2])
    if order.last is not None:
        got = order.last[..., None, :] - tile[:, None]
    else:
        bits, later = (x.astype(np.uint32) for x in np.moveaxis(order.turns, -1, 0))
        after = (bits[..., tile // 32] & (-2 << tile % 32)).astype(np.uint32)
        got = np.swapaxes(later[..., tile // 32] + np.bitwise_count(after), -1, -2)
    np.testing.assert_array_equal(np.where(seen, got, 0), np.where(seen, want, 0))


@pytest.mark.parametrize("name", BY_KEY)
def test_what_decides_a_pair_by_key(name):
    mask = mask_named(name)
    detail = detail_by_key(mask, SPEC, block_q=64, block_kv=128)
    want = np.asarray(reference.visible(mask, 2, 2, 700, 900))
    want = np.broadcast_to(want, (2, 2, 700, 900)).swapaxes(-1, -2)
    if detail.bits is not None:
        words = np.asarray(detail.bits)[:, :, :900]
        got = (words[..., np.arange(700) // 32] >> (np.arange(700) % 32)) & 1 != 0
    else:
        query = np.arange(700)
        ends = {"lo": 0, "hi": 700}
        for bound in ends:
            rows = getattr(detail, bound)
            if rows is not None:
                ends[bound] = np.asarray(rows)[:, None, :900, None]
        got = (query >= ends["lo"]) & (query < ends["hi"])
        if detail.unsorted is not None:
            keys, queries = np.asarray(detail.q_ids)[:, :900], np.asarray(detail.kv_ids)[:, :700]
            same = keys[:, None, :, None] == queries[:, None, None, :]
            got = got & (same | (np.asarray(detail.unsorted)[:, None, None, None] == 0))
    # Queries that see nothing may count as seeing: their probabilities are 0.
    sees = want.any(-2, keepdims=True)
    np.testing.assert_array_equal(np.where(sees, got, False), want)
