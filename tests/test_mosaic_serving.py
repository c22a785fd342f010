"""The Hopper serving kernel: right and free of races by interpretation, found out once a fault is
planted, and compiled for sm_90a without spills. What it refuses it refuses by name.

Faults may make a kernel wait for ever, so they run in a child process with a time limit.
"""

import contextlib
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_truth import Serving, assert_right, make, sizes, truth
from test_mosaic_lowering import PTXAS
from test_races import changed, run_limited

import pallas_attn as pa
from pallas_attn import _compile_only, _sass, decode_call, gpu, inspect, testing
from pallas_attn.interpret import RaceError
from pallas_attn.mosaic_gpu import decode, mma, ring

CAUSAL = pa.Causal()
WINDOW = CAUSAL & pa.SlidingWindow(50)
# Sequences that start at any token, one without tokens, one token alone, and padding after them;
# junk past the lengths, in unused pages and in unused entries of the table.
RAGGED = Serving(
    lens=(200, 0, 100, 90), q_lens=(130, 0, 70, 1), heads=(2, 1), dims=(64, 64), padding=5,
    dtype="bfloat16",
)  # fmt: skip
# Two consumers and short blocks; where a case has no tiles, those that are shipped.
SMALL = pa.DecodeTiles(128, 64, 8, 2)
SHIPPED = ("dims_128", "dims_192_64")
CASES = {
    "ragged": (RAGGED, CAUSAL),
    "window_sinks": (
        dataclasses.replace(
            RAGGED, lens=(200, 60), q_lens=(70, 131), page_size=48, heads=(3, 1), dims=(40, 32),
            sinks=True, dtype="float16",
        ),
        WINDOW,
    ),
    "equal_soft_cap": (
        dataclasses.replace(
            RAGGED, lens=(0, 50, 230), q_lens=70, padding=0, heads=(1, 1), page_size=8,
            options=(("soft_cap", 3.0), ("scale", -0.3)),
        ),
        None,
    ),
    "dims_128": (
        dataclasses.replace(
            RAGGED, lens=(300, 40), q_lens=(130, 40), dims=(128, 128), page_size=256
        ),
        CAUSAL,
    ),
    "dims_192_64": (
        dataclasses.replace(
            RAGGED, lens=(100, 40), q_lens=(65, 40), dims=(192, 64), page_size=64
        ),
        CAUSAL,
    ),
    "prefix": (
        dataclasses.replace(RAGGED, lens=(130, 70), q_lens=(90, 60)),
        pa.PrefixLM(jnp.asarray([120, 10], jnp.int32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_is_right_and_race_free(name):
    case, mask = CASES[name]
    with pa.interpret(detect_races=True):
        tiles = None if name in SHIPPED else SMALL
        assert_right(case, mask, seed=name, backend="mosaic_gpu", tiles=tiles)


def test_contiguous_cache():
    case = Serving(
        lens=(0, 33, 129),
        q_lens=34,
        page_size=136,
        extra_pages=0,
        heads=(2, 2),
        dims=(64, 64),
        dtype="bfloat16",
    )
    data = make(case)
    there = (jnp.arange(136) < data.kv_lens[:, None])[..., None, None]
    k, v = (jnp.where(there, x, jnp.nan) for x in (data.dense_k, data.dense_v))

    def call(q, k, v, lens):
        options = {"return_lse": True, "backend": "mosaic_gpu", "tiles": SMALL}
        return pa.mha_decode(q, k, v, lens, mask=CAUSAL, **options)

    with pa.interpret(detect_races=True):
        out, lse = jax.jit(call)(data.q, k, v, data.kv_lens)
        got = {"out": np.asarray(out, np.float64), "lse": np.asarray(lse, np.float64)}
    exact, plain = truth(case, data, CAUSAL)
    testing.assert_close(got, exact, plain, sizes(case, data), case.dtype)


def test_new_lengths_and_offsets_compile_nothing_and_layers_are_mapped_over():
    case = dataclasses.replace(RAGGED, lens=(100, 150), q_lens=(64, 70), heads=(1, 1))
    data, traces = make(case), []

    @jax.jit
    def call(q, k, v, table, lens, cu):
        traces.append(1)
        return pa.paged_attention(
            q, k, v, table, lens, cu_seqlens_q=cu, mask=CAUSAL, backend="mosaic_gpu", tiles=SMALL
        )

    with pa.interpret():
        first = call(*data[:6])
        cu = jnp.asarray([0, 100, 101], jnp.int32)
        again = call(*data[:4], jnp.asarray([100, 9], jnp.int32), cu)
        mapped = jax.vmap(call, (0, None, None, None, None, None))(
            jnp.stack([data.q, data.q * 0]), *data[1:6]
        )
    assert len(traces) == 1
    assert not again[101:].any()
    assert jnp.isfinite(again).all()
    np.testing.assert_array_equal(mapped[0], first)


def spec(**changes):
    given = {
        "batch": 2, "tokens": 200, "q_len": None, "page_size": 16, "max_pages": 4, "paged": True,
        "q_heads": 8, "kv_heads": 2, "head_dim": 128, "v_dim": 128, "dtype": "bfloat16",
        "scale": 1.0,
    }  # fmt: skip
    return decode_call.DecodeSpec(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "mask", "why"),
    [
        ({"q_len": 4, "tokens": 8}, None, "32 new tokens a sequence or more"),
        ({"tokens": 60}, None, "and here are 30"),
        ({"dtype": "float32"}, None, "float16 and bfloat16"),
        ({"head_dim": 96}, None, "head_dim in multiples of 8 up to 64 and of 64 up to 256"),
        ({"v_dim": 320}, None, "v_dim"),
        ({"page_size": 12}, None, "pages of a multiple of 8 keys, not 12"),
        ({"shared_kv": True}, None, "array of their own"),
        ({"num_splits": 4}, None, "does not split"),
        ({}, pa.Predicate(lambda b, h, q, kv: q > kv), "one interval"),
        ({}, CAUSAL & pa.Lengths(kv_lens=9), "padding"),
    ],
)
def test_what_it_refuses_another_takes(changes, mask, why):
    asked = spec(**changes)
    with gpu.target("h200") as hopper:
        assert why in decode_call.reason(
            "mosaic_gpu", asked, pa.Full() if mask is None else mask, hopper
        )
        assert decode_call.choose(asked, pa.Full() if mask is None else mask, None) == "triton"
        assert decode_call.choose(spec(), CAUSAL, None) == "mosaic_gpu"


# ------------------------------------------------------------------------------------------------
# Planted faults, in a child process
# ------------------------------------------------------------------------------------------------

# k and v differ in shape, so that a fault can tell them apart; two blocks of threads take several
# tiles of several blocks of keys each.
FAULTY = dataclasses.replace(
    RAGGED, lens=(250, 70), q_lens=(130, 70), heads=(1, 1), dims=(128, 64), page_size=32
)

# What is told of a tile lies where that of the tile before the last one lay.
MANY = dataclasses.replace(FAULTY, lens=(200, 70), heads=(2, 2), dims=(64, 64))


def slots_named(slots) -> str:
    """Which of q, k, v a ring is, by its shape."""
    shape = slots.data.shape
    return "q" if len(shape) == 4 else "k" if shape[2] == 128 else "v"


@contextlib.contextmanager
def dropped(name, which):
    """A fault: calls of `ring.name` do nothing for one ring."""

    def call(original, slots, *rest, **options):
        if slots_named(slots) != which:
            original(slots, *rest, **options)

    with changed(ring, name, call):
        yield


@contextlib.contextmanager
def released_early(which):
    """A fault: consumers hand a slot back as soon as it is full, and read it after that."""
    release = ring.release

    def wait(original, slots, slot):
        original(slots, slot)
        if slots_named(slots) == which:
            release(slots, slot)

    with changed(ring, "wait_full", wait), dropped("release", which):
        yield


@contextlib.contextmanager
def past_the_end():
    """A fault: units of a sequence's last tokens store all of their 64 rows."""

    def store(original, ref, start, head, count, x, *, call):
        whole = jnp.where(count > 0, jnp.minimum(64, ref.shape[0] - start), 0)
        original(ref, start, head, whole.astype(jnp.int32), x, call=call)

    with changed(decode.rows, "store_tile", store):
        yield


FAULTS = {
    **{f"wait for full {x}": functools.partial(dropped, "wait_full", x) for x in "qkv"},
    **{f"wait for empty {x}": functools.partial(dropped, "wait_empty", x) for x in "qkv"},
    **{f"early release of {x}": functools.partial(released_early, x) for x in "kv"},
    "wait for products": lambda: changed(mma, "wait", lambda original, *args, **options: None),
    "told is read after it is handed back": lambda: changed(
        decode.plgpu, "commit_smem", lambda original: None
    ),
    "rows of the next sequence": past_the_end,
    "values past the end": lambda: changed(
        decode.attend.masking, "rows_before", lambda original, *args: None
    ),
}


def outcome(case=FAULTY):
    """ "race", "error", "wrong" or "clean", and why."""
    jax.clear_caches()
    try:
        with pa.interpret(detect_races=True):
            assert_right(case, CAUSAL, backend="mosaic_gpu", tiles=SMALL)
    except RaceError as race:
        return "race", str(race)
    except AssertionError as error:
        return "wrong", str(error)[:300]
    except Exception as error:
        return "error", str(error)[-300:]
    return "clean", ""


def faults():
    """What is said of the kernel as it is, and of each planted fault."""
    found = {"none": outcome()}
    for name, fault in FAULTS.items():
        with fault():
            found[name] = outcome(MANY if "told" in name else FAULTY)
    return found


@pytest.fixture(scope="module")
def found():
    return run_limited("faults", 300, __file__)


def test_without_a_fault_it_is_clean(found):
    assert found["none"] == ["clean", ""]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, found):
    kind, why = found[name]
    if name == "values past the end":
        assert kind == "wrong", why
    else:
        # A dropped wait for a barrier may also break a rule that the interpreter checks by itself.
        dropped_wait = "wait for" in name and kind == "error" and "arrier" in why
        assert kind == "race" or dropped_wait, f"{kind}: {why}"


# ------------------------------------------------------------------------------------------------
# Lowering and SASS
# ------------------------------------------------------------------------------------------------


def prefill(page_size, dims, heads=(32, 8), mask=CAUSAL, dtype=jnp.bfloat16, **options):
    """A call as (fn, *avals): 8 sequences of up to 8,192 keys, 8,192 new tokens."""
    struct, ints = functools.partial(jax.ShapeDtypeStruct, dtype=dtype), jnp.int32
    pages = 8192 // page_size
    k, v = (struct((8 * pages, page_size, heads[1], d)) for d in dims)

    def call(q, k, v, table, lens, cu):
        return pa.paged_attention(
            q, k, v, table, lens, cu_seqlens_q=cu, mask=mask, backend="mosaic_gpu",
            return_lse=True, **options,
        )  # fmt: skip

    shapes = ((8, pages), (8,), (9,))
    return (
        call,
        struct((8192, heads[0], dims[0])),
        k,
        v,
        *(jax.ShapeDtypeStruct(s, ints) for s in shapes),
    )


def contiguous():
    k = jax.ShapeDtypeStruct((8, 8192, 8, 128), jnp.bfloat16)
    q, lens = (
        jax.ShapeDtypeStruct((8, 512, 32, 128), k.dtype),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    call = functools.partial(pa.mha_decode, mask=CAUSAL, backend="mosaic_gpu")
    return lambda q, k, lens: call(q, k, k, lens), q, k, lens


CALLS = {
    "pages_of_64": prefill(64, (128, 128)),
    "pages_of_16": prefill(16, (128, 128)),
    "window": prefill(48, (128, 128), mask=CAUSAL & pa.SlidingWindow(1024), soft_cap=30.0),
    "dim_64": prefill(16, (64, 64)),
    "dim_256": prefill(16, (256, 256), heads=(8, 2), mask=WINDOW),
    "dim_192_128": prefill(64, (192, 128)),
    "dim_40_pages_of_8": prefill(8, (40, 40), dtype=jnp.float16),
    "contiguous": contiguous(),
}


def test_lowers_for_hopper():
    for name, call in CALLS.items():
        assert inspect.lower(*call, target="h200").count("@mosaic_gpu") == 1, name


@pytest.mark.sass
def test_nothing_spills_and_wgmma_is_not_serialised():
    try:
        _sass.find_tool("nvdisasm")
        _compile_only.check_plugin()
        found = [_sass.find_tool("ptxas", version).version for version in PTXAS]
    except _sass.MissingToolsError as e:
        pytest.skip(str(e))
    results = inspect.report_many(
        list(CALLS.values()), target="h200", ptxas=found, named="pallas_attn"
    )
    for name, reports in zip(CALLS, results, strict=True):
        assert not isinstance(reports, inspect.CompileError), (name, reports)
        ours = [r for r in reports if r.backend == "mosaic_gpu"]
        assert len(ours) == len(found), name
        for r in ours:
            assert (r.spill_bytes, r.faults) == (0, ()), (name, str(r))
            assert {kind for kind, _ in r.setmaxnreg} == {"dec", "inc"}, (name, str(r))
            assert min(r.count("HGMMA"), r.count("UTMALDG")) > 0, (name, str(r))
            assert r.smem <= gpu.KNOWN["h200"].smem_per_block, (name, str(r))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
