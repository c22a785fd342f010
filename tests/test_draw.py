"""`draw` and `explain`: what they say is what runs."""

import inspect

import jax
import jax.numpy as jnp
import mask_truth
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import gpu
from pallas_attn.draw import FULL, SKIPPED, block_kinds

TILES = pa.Tiles(*(pa.KernelTiles(16, 16),) * 3)


def test_text_of_a_causal_mask():
    lines = pa.draw(pa.Causal(), q_len=40, kv_len=60, block_q=16, block_kv=16).splitlines()
    assert lines[:-1] == ["+...", "#+..", "##+."]
    assert lines[-1] == ("Causal(), 40 x 60 in blocks of 16 x 16: 6 skipped, 3 partial, 3 full")


def test_lengths_default_to_square_and_arrays_are_masks():
    assert "20 x 20" in pa.draw(None, q_len=20)
    array = jnp.asarray(np.tril(np.ones((8, 8), bool)))
    assert pa.draw(array, q_len=8, block_q=4, block_kv=4).splitlines()[:2] == ["+.", "#+"]


@pytest.mark.parametrize("name", ["document", "blocks", "window_end", "predicate"])
def test_kinds_are_those_of_the_mask(name):
    sizes = (2, 2, 21, 34)
    mask, see = mask_truth.leaves(3, *sizes)[name]
    some, every = mask_truth.block_truth(mask_truth.dense(see, *sizes), 4, 8)
    whole = (np.arange(some.shape[-1]) + 1) * 8 <= 34
    kinds = block_kinds(mask, q_len=21, kv_len=34, block_q=4, block_kv=8, batch=1, head=1)
    assert not ((kinds == SKIPPED) & some[1, 1]).any()
    assert not ((kinds == FULL) & ~(every[1, 1] & whole)).any()


def test_batch_and_head_choose_what_is_shown():
    mask = pa.Lengths(kv_lens=np.array([4, 8], np.int32))
    options = {"q_len": 8, "block_q": 4, "block_kv": 4}
    assert pa.draw(mask, **options).splitlines()[0] == "#."
    assert pa.draw(mask, batch=1, **options).splitlines()[0] == "##"
    mask = pa.Predicate(lambda b, h, i, j: j < 4 * (h + 1))
    assert pa.draw(mask, head=1, **options).splitlines()[0] == "##"


def test_a_table_brings_its_own_lengths_and_blocks():
    table = pa.plan(pa.Causal(), q_len=40, kv_len=60, tiles=TILES)
    assert pa.draw(table) == pa.draw(pa.Causal(), q_len=40, kv_len=60, block_q=16, block_kv=16)
    kinds = {"+": 1, "#": 2, ".": 0}
    rows = [[kinds[c] for c in row] for row in pa.draw(table).splitlines()[:-1]]
    np.testing.assert_array_equal(table.fwd.kinds(4)[0, 0], rows)


def test_a_length_is_needed():
    with pytest.raises(ValueError, match="q_len: got None, expected a length"):
        pa.draw(pa.Causal())


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    mask = pa.Causal() & pa.Document(np.repeat(np.arange(4), 10).astype(np.int32))
    text = pa.draw(mask, q_len=40, block_q=8, block_kv=8, path=str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert text == pa.draw(mask, q_len=40, block_q=8, block_kv=8)
    with pytest.raises(
        ValueError, match=r"path: got lengths 8192 x 8192, expected at most 2\^24 pairs"
    ):
        pa.draw(pa.Causal(), q_len=8192, path=str(path))


def structs(dim=64, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((2, 100, 8, dim), dtype)
    return q, *(jax.ShapeDtypeStruct((2, 130, 2, dim), dtype) for _ in range(2))


def test_explain_prints_a_report():
    with gpu.target("h200"):
        text = str(pa.explain(*structs(), pa.Causal()))
    assert text.splitlines()[:4] == [
        "attention of 100 queries to 130 keys, batch 2, 8 query heads on 2 KV heads, head_dim 64, "
        "v_dim 64, bfloat16",
        "mask     Causal()",
        "device   NVIDIA H200",
        "backend  mosaic_gpu",
    ]
    assert "tiles    fwd " in text
    assert "not      xla: it could, but 'mosaic_gpu' is preferred" in text


def test_explain_says_why_not():
    if gpu.detect() is None:
        explained = pa.explain(*structs())
        assert explained.backend == "xla"
        assert explained.gpu is None
        assert explained.reasons["triton"].startswith("it needs an NVIDIA GPU")
        assert "device   no NVIDIA GPU" in str(explained)
    with gpu.target("h200"):
        assert "up to 256" in pa.explain(*structs(dim=512)).reasons["triton"]
        asked = pa.explain(*structs(), backend="xla")
        could = "it could, but 'xla' was asked for"
        assert asked.reasons == {"mosaic_gpu": could, "triton": could}


def test_explain_takes_what_mha_takes():
    q, k, v = structs()
    assert (
        pa.explain(*(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (q, k, v))).spec.batch == 1
    )
    bias, sinks = (
        jax.ShapeDtypeStruct((8, 1, 130), jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.float32),
    )
    spec = pa.explain(q, k, v, bias=bias, sinks=sinks, soft_cap=3, scale=0.5).spec
    assert (spec.bias_shape, spec.has_sinks, spec.soft_cap, spec.scale) == (
        (1, 8, 1, 130),
        True,
        3.0,
        0.5,
    )
    table = pa.plan(pa.Causal(), q_len=100, kv_len=130, head_dim=64, tiles=TILES)
    assert pa.explain(q, k, v, table).tiles == TILES
    assert pa.explain(q, k, v, pa.Causal(), tiles=TILES).tiles == TILES
    arrays = (jnp.zeros(x.shape, x.dtype) for x in (q, k, v))
    assert pa.explain(*arrays).spec == pa.explain(q, k, v).spec


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "cudnn"}, ValueError, "backend: got 'cudnn', expected one of"),
        ({"mask": 3}, TypeError, "mask: got int, expected a mask"),
        ({"mask": jnp.ones((3, 3), bool)}, ValueError, "mask: got shape"),
        (
            {"mask": pa.plan(None, q_len=3, kv_len=3)},
            ValueError,
            "mask: got a BlockTable planned for",
        ),
        (
            {"mask": pa.plan(None, q_len=100, kv_len=130), "tiles": TILES},
            ValueError,
            "tiles: got fwd",
        ),
        ({"scale": float("nan")}, ValueError, "scale: got nan"),
    ],
)
def test_explain_refuses_what_mha_refuses(options, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(pa.explain)(*structs(), **options)
