"""Mosaic kernels in JAX's interpreter: products, stores that add, and what the detector sees."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn as pa
from pallas_attn import _mosaic_interpret
from pallas_attn.call import Call
from pallas_attn.interpret import RaceError
from pallas_attn.mosaic_gpu import mma
from pallas_attn.spec import Spec

KERNEL = pa.KernelTiles(64, 64)
ON_CARD = Call(
    Spec(1, 64, 64, 1, 1, 64, 64, "bfloat16", 1.0), pa.Tiles(KERNEL, KERNEL, KERNEL), "mosaic_gpu"
)
INTERPRET = dataclasses.replace(ON_CARD, interpret=True)
TILE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def smem(shape, dtype=jnp.bfloat16):
    bytes_ = jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, 128 // bytes_)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def launch(body, out, scratch, *operands, warpgroups=1, blocks=1):
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        num_threads=warpgroups,
        thread_name="wg",
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*operands)


def random(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def f32(x):
    return np.asarray(x, np.float32)


# ------------------------------------------------------------------------------------------------
# Products
# ------------------------------------------------------------------------------------------------


def product(a, b, *kept, call, in_registers=False, **transposes):
    """1 + a b + a b: an accumulator is set, added to twice, read. `kept`: b_rows, or nothing."""

    def body(a_ref, b_ref, *refs):
        *kept_ref, out_ref, a_smem, b_smem, out_smem, barrier = refs
        plgpu.copy_gmem_to_smem(a_ref, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, barrier)
        plgpu.barrier_wait(barrier)
        rows = kept_ref[0][...] if kept else None
        if kept and not transposes["transpose_b"]:
            rows = rows != 0

        def run(acc):
            ones = jnp.full((64, 64), 1.0, jnp.float32)
            acc[...] = ones if call.interpret else plgpu.layout_cast(ones, plgpu.Layout.WGMMA)
            for _ in range(2):
                left = a_smem
                if in_registers:
                    left = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA)
                mma.dot(acc, left, b_smem, call=call, b_rows=rows, **transposes)
            mma.wait(acc, 1, call=call)
            return mma.load(acc, call=call)

        out_smem[...] = pl.run_scoped(run, mma.accumulator((64, 64), call=call))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = (
        *(smem(x.shape, x.dtype) for x in (a, b)),
        smem((64, 64), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
    )
    return launch(body, TILE, scratch, a, b, *kept)


PRODUCTS = {
    "a b": {},
    "a bᵀ": {"transpose_b": True},
    "aᵀ b": {"transpose_a": True},
    "aᵀ bᵀ": {"transpose_a": True, "transpose_b": True},
    "a in registers": {"in_registers": True},
    "a in registers, bᵀ": {"in_registers": True, "transpose_b": True},
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    options = PRODUCTS[name]
    a = random(128, 64) if options.get("transpose_a") else random(64, 128)
    b = random(64, 128, seed=1) if options.get("transpose_b") else random(128, 64, seed=1)
    with pa.interpret(detect_races=True):
        out = product(a, b, call=INTERPRET, **options)
    left = f32(a).T if options.get("transpose_a") else f32(a)
    right = f32(b).T if options.get("transpose_b") else f32(b)
    np.testing.assert_allclose(out, 1 + 2 * left @ right, atol=1e-4)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_lower_for_hopper(name):
    options = PRODUCTS[name]
    a, b = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for _ in range(2))
    run = jax.jit(functools.partial(product, call=ON_CARD, **options))
    assert "mosaic_gpu" in run.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("transpose_b", [False, True])
def test_padding_rows_of_b_count_as_zero(transpose_b):
    a, b = random(64, 64), random(64, 64, seed=1)
    kept = np.arange(64) % 3 != 0
    bad = jnp.where(kept[:, None], b, jnp.nan).astype(b.dtype)
    with pa.interpret():
        out = product(
            a,
            bad.T if transpose_b else bad,
            jnp.asarray(kept, jnp.int32),
            call=INTERPRET,
            transpose_b=transpose_b,
        )
    np.testing.assert_allclose(out, 1 + 2 * f32(a)[:, kept] @ f32(b)[kept], atol=1e-4)


# ------------------------------------------------------------------------------------------------
# TMA
# ------------------------------------------------------------------------------------------------


def test_loads_fill_with_zeros_and_stores_clip():
    """Boxes that reach past the ends of an array in global memory: 100 rows, 40 channels."""

    def body(x_ref, start_ref, out_ref, x_smem, barrier):
        rows, channels = pl.ds(start_ref[0], 64), pl.ds(start_ref[1], 64)
        plgpu.copy_gmem_to_smem(x_ref.at[rows, channels], x_smem, barrier)
        plgpu.barrier_wait(barrier)
        x_smem[...] = x_smem[...] + jnp.ones((64, 64), x_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, out_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    x = random(100, 40)
    start = jnp.array([64, 0], jnp.int32)
    shape = jax.ShapeDtypeStruct((100, 64), jnp.bfloat16)
    with pa.interpret(detect_races=True):
        out = launch(body, shape, (smem((64, 64)), plgpu.Barrier()), x, start)
    wanted = np.pad(f32(x)[64:], ((0, 0), (0, 24))) + 1
    np.testing.assert_allclose(f32(out)[64:], wanted, rtol=1e-2)
    assert np.isnan(f32(out)[:64]).all(), "nothing else is written"


def added(parallel_read):
    """Two thread blocks add to the same rows of a reference, by TMA and where a predicate holds."""

    def body(x_ref, sum_ref, out_ref, x_smem):
        x_smem[...] = x_ref[...]
        plgpu.commit_smem()
        block = lax.axis_index("block")
        for predicate in (None, block == 1):
            plgpu.copy_smem_to_gmem(x_smem, sum_ref, reduction_op="add", predicate=predicate)
        # Of the two, the older is done.
        plgpu.wait_smem_to_gmem(1)
        plgpu.wait_smem_to_gmem(0)
        out_ref.at[block][...] = sum_ref[...] if parallel_read else x_ref[...]

    def run(x):
        total = jax.new_ref(jnp.full((64, 64), 2.0, jnp.float32))
        out = jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)
        launch(body, out, (smem((64, 64), jnp.float32),), x, total, blocks=2)
        return total[...]

    with pa.interpret(detect_races=True):
        return jax.jit(run)(jnp.ones((64, 64), jnp.float32))


def test_stores_that_add():
    np.testing.assert_array_equal(added(False), np.full((64, 64), 5.0))


def test_a_read_races_with_stores_that_add():
    with pytest.raises(RaceError, match=r"global memory.*(addition|read).*(addition|read)"):
        added(True)


# ------------------------------------------------------------------------------------------------
# Races
# ------------------------------------------------------------------------------------------------

STEPS, SLOTS = 5, 2


def pipeline(fault=""):
    """Sum of a[i] b[i]ᵀ over a ring of slots: warpgroup 1 loads, warpgroup 0 multiplies."""

    def body(a_ref, b_ref, out_ref, a_smem, b_smem, out_smem, full, empty):
        def load(step, _):
            slot = lax.rem(step, jnp.int32(SLOTS))
            if fault != "slot not awaited":
                pl.when(step >= SLOTS)(lambda: plgpu.barrier_wait(empty.at[slot]))
            plgpu.copy_gmem_to_smem(a_ref.at[step], a_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(b_ref.at[step], b_smem.at[slot], full.at[slot])

        def multiply(acc, step):
            slot = lax.rem(step, jnp.int32(SLOTS))
            if fault != "data not awaited":
                plgpu.barrier_wait(full.at[slot])
            if fault == "released early":
                plgpu.barrier_arrive(empty.at[slot])
            if fault.startswith("operand rewritten"):
                b_smem.at[slot][...] = b_smem.at[slot][...]
                if fault == "operand rewritten":
                    plgpu.commit_smem()
            mma.qk(acc, a_smem.at[slot], b_smem.at[slot], call=INTERPRET)
            if fault == "accumulator read too soon":
                acc[...] = mma.load(acc, None, call=INTERPRET)
            if fault != "product not awaited":
                mma.wait(acc, 1 if fault == "one product too few" else 0, call=INTERPRET)
            if fault == "plain read":
                acc[...] = acc[...] + b_smem.at[slot][...].astype(jnp.float32)
            if fault != "released early":
                plgpu.barrier_arrive(empty.at[slot])

        def run(acc):
            lax.fori_loop(jnp.int32(0), jnp.int32(STEPS), lambda step, _: multiply(acc, step), None)
            return mma.load(acc, call=INTERPRET)

        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _():
            lax.fori_loop(jnp.int32(0), jnp.int32(STEPS), load, None)

        @pl.when(wg == 0)
        def _():
            out_smem[...] = pl.run_scoped(run, mma.accumulator((64, 64), call=INTERPRET))
            if fault != "store not committed":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_ref)
            plgpu.wait_smem_to_gmem(0)

    a, b = random(STEPS, 64, 64), random(STEPS, 64, 64, seed=1)
    scratch = (
        smem((SLOTS, 64, 64)),
        smem((SLOTS, 64, 64)),
        smem((64, 64), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS),
    )
    out = launch(body, TILE, scratch, a, b, warpgroups=2)
    return out, np.einsum("smk,snk->mn", f32(a), f32(b))


@pytest.mark.parametrize("fault", ["", "operand rewritten"])
def test_a_sound_pipeline_has_no_races(fault):
    with pa.interpret(detect_races=True):
        out, wanted = pipeline(fault)
    np.testing.assert_allclose(out, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("released early", "shared memory: .*mma.py"),
        ("product not awaited", "shared memory: .*mma.py"),
        ("one product too few", "shared memory: .*mma.py"),
        ("accumulator read too soon", "registers: .*mma.py"),
        ("operand rewritten, not committed", "shared memory: read .*mma.py.*write"),
        ("plain read", "shared memory: .*test_mosaic_interpreter.py"),
        ("store not committed", "shared memory: read .*write"),
    ],
)
def test_races_are_reported_by_place(fault, message):
    with (
        pytest.raises(RaceError, match=rf"races found:\n  {message}") as caught,
        pa.interpret(detect_races=True),
    ):
        pipeline(fault)
    assert "test_mosaic_interpreter.py:" in str(caught.value)


@pytest.mark.parametrize("fault", ["slot not awaited", "data not awaited"])
def test_a_broken_barrier_is_an_error_and_the_next_run_is_sound(fault):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Bb]arrier"), pa.interpret():
        jax.block_until_ready(pipeline(fault))
    with pa.interpret(detect_races=True):
        out, wanted = pipeline()
    np.testing.assert_allclose(out, wanted, atol=1e-4)


def test_races_are_looked_for_on_demand_only():
    with pa.interpret():
        jax.block_until_ready(pipeline("store not committed"))


def test_another_error_keeps_its_type_and_notes_the_races():
    def run():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(pipeline("store not committed"))
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught, pa.interpret(detect_races=True):
        run()
    assert "races found" in caught.value.__notes__[-1]


def test_the_detector_is_put_back():
    gpu_callbacks = _mosaic_interpret.gpu_callbacks
    before = gpu_callbacks.GPURaceDetectionState, gpu_callbacks.copy_smem_to_gmem
    with pa.interpret(detect_races=True):
        assert gpu_callbacks.GPURaceDetectionState is not before[0]
    assert (gpu_callbacks.GPURaceDetectionState, gpu_callbacks.copy_smem_to_gmem) == before


def test_an_unknown_jax_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 99, 0))
    refused = pytest.raises(NotImplementedError, match=r"known for JAX 0.11 and 0.12, got")
    with refused, pa.interpret(detect_races=True):
        pass
