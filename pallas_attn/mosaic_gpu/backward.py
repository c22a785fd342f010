"""The backward kernel for Hopper: dk, dv and dq in one pass, five products a block.

    grid: one thread block a multiprocessor, which takes one tile after the other, the next that
          nobody has yet: block_kv keys of one KV head

    `backward_producer`    one warp loads k and v, then q, dout block by block; two add dq to
                           global memory; one zeroes padding, where there is any
    `backward_narrow`      two warpgroups, up to 128 channels: each has 64 of 128 keys
    `backward_wide`        two warpgroups, more channels: 64 keys; each has half of the channels;
                           or three, of which one makes dq and adds it by TMA

dk and dv stay in registers, summed over the query heads of the group too. dq is summed in global
memory, float32, by adding stores, whose order differs from run to run, and with it dq's last bits;
with `deterministic` tiles take turns (`backward_turns`). FlashAttention-3, arXiv 2407.08608.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import _compat
from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import (
    backward_add,
    backward_narrow,
    backward_producer,
    backward_turns,
    backward_wide,
    common,
)
from pallas_attn.mosaic_gpu.backward_parts import (
    FEW_SECTIONS,
    STAGED,
    TILE_WORDS,
    WGS,
    Barriers,
    Kernel,
    Order,
    Plan,
    Smem,
    for_each_tile,
    handed_over,
    plan_of,
)
from pallas_attn.mosaic_gpu.common import UNIT, Inputs


def backward(call: Call, inputs: Inputs):
    """Runs the backward kernel.

    Args:
        call: static facts.
        inputs: all of `Inputs` but sinks; visits are by key.

    Returns:
        dq like q, dk like k, dv like v. Without `deterministic`, dq may differ in its last bits
        from run to run.
    """
    spec, plan = call.spec, plan_of(call, inputs)
    dtype = inputs.q.dtype
    padded = {n: _operand(n, getattr(inputs, n), plan) for n in ("q", "k", "v", "dout")}
    inputs = inputs._replace(
        lse_log2=_row_terms(call, plan, inputs.lse_log2, inputs.delta),
        delta=None,
        order=_tile_order(call, plan, inputs),
        **padded,
    )
    order = Order(None, None, None)
    if call.deterministic:
        q_blocks = plan.q_rows // call.tiles.dkv.block_q
        order = backward_turns.order_of(inputs.visits, q_blocks)
    # State has no batching rule: under vmap one kernel runs after another.
    run = jax.custom_batching.sequential_vmap(functools.partial(_run, call, plan))
    dq, dk, dv = run(inputs, order)
    dq = backward_add.from_slabs(dq)[:, : spec.q_len, :, : spec.head_dim] * jnp.float32(spec.scale)
    dk, dv = dk[:, : spec.kv_len, :, : spec.head_dim], dv[:, : spec.kv_len, :, : spec.v_dim]
    return dq.astype(dtype), dk, dv


def _tile_order(call: Call, plan: Plan, inputs: Inputs):
    """The tiles of a head in the order in which they are taken, int32 [batch or 1, tiles].

    None: as they lie, which under causal masks is the longest first, too.
    """
    extra = inputs.extra
    if call.deterministic:
        return backward_turns.tile_order(plan.tiles)
    if extra.cost is None:
        return extra.rank if plan.streams // plan.together < FEW_SECTIONS else None
    rank = np.argsort(-np.asarray(extra.cost), kind="stable")
    return None if (np.diff(rank) > 0).all() else jnp.asarray(rank[None], jnp.int32)


def _run(call: Call, plan: Plan, inputs: Inputs, order: Order):
    """dq, unscaled, as `backward_add` lays it out; dk, dv like k and v."""
    heads = call.spec.batch, call.spec.q_heads

    def kernel(refs):
        dq, dk, dv, done, counter = refs
        now = order._replace(done=done)
        dk[...], dv[...] = _launch(call, plan, (inputs, now, counter), dq)

    # What begins as 0; what dk and dv begin as is never read.
    done = None
    if call.deterministic:
        done = jnp.zeros((*heads, plan.q_rows // call.tiles.dkv.block_q, WGS), jnp.int32)
    dq = jnp.zeros((*heads, *backward_add.slabs(plan.q_rows, plan.dim)), jnp.float32)
    counter = jnp.zeros(1, jnp.int32)
    start = dq, jnp.zeros_like(inputs.k), jnp.zeros_like(inputs.v), done, counter
    return pl.run_state(kernel)(start)[:3]


def _operand(name: str, x, plan: Plan):
    """An operand as TMA can address it, with as many channels as the kernel wants."""
    channels = plan.dim if plan.wide or name in ("q", "k") else plan.v_dim
    short = channels - x.shape[3] if channels > common.padded(x.shape[3]) else 0
    return common.for_tma(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, short))) if short else x)


def _row_terms(call: Call, plan: Plan, lse_log2, delta):
    """Lse and delta of each block, one after the other: [batch, q_heads, q blocks · 2 · block_q].

    float32 by its bits, since the words that share its shared memory are int32. Rows past q_len get
    p = 0.
    """
    short = ((0, 0), (0, 0), (0, plan.q_rows - call.spec.q_len))
    terms = jnp.pad(lse_log2, short, constant_values=jnp.inf), jnp.pad(delta, short)
    shape = *lse_log2.shape[:2], -1, call.tiles.dkv.block_q
    both = jnp.stack([x.reshape(shape) for x in terms], axis=3)
    return lax.bitcast_convert_type(both, jnp.int32).reshape(*shape[:2], -1)


def _scratch(call: Call, plan: Plan, dtype):
    tiles, stages, both = call.tiles.dkv, call.tiles.dkv.num_stages, plgpu.Barrier(num_arrivals=WGS)
    words = plgpu.SMEM((stages * 2 * tiles.block_q + 2 * TILE_WORDS,), jnp.int32)
    slots = plgpu.Barrier(num_arrivals=WGS, num_barriers=stages)
    bars = Barriers(
        full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        empty=slots,
        clean=plgpu.Barrier(num_barriers=stages) if plan.cleans else None,
        dout_empty=slots if plan.wide else None,
        keys=plgpu.Barrier(num_arrivals=2 if plan.wide else 2 * WGS),
        p=plgpu.Barrier() if plan.wide else None,
        ds=plgpu.Barrier(num_barriers=2 if plan.adder else 1) if plan.wide else both,
        dq_full=None if plan.wide else plgpu.Barrier(num_barriers=WGS),
        dq_empty=_read_ds(plan),
        read=plgpu.Barrier(num_arrivals=WGS + plan.adder),
        written=both,
        stored=plgpu.Barrier(num_arrivals=(1 if plan.wide else WGS) + plan.cleans + plan.adder),
    )
    if plan.wide:
        handed = handed_over(plan.adder, call.spec)
        smem = functools.partial(_smem, dtype=dtype, width=plan.width)
        return Smem(
            k=smem((2, UNIT, plan.dim)),
            v=None,
            q=smem((2, stages, UNIT, plan.dim)),
            dout=None,
            p=smem((handed, UNIT, UNIT)) if handed else None,
            ds=smem((2, UNIT, UNIT)),
            dq=_staging(call, plan),
            words=words,
        ), bars
    ds = (WGS, UNIT, UNIT) if plan.by_rows else (UNIT, UNIT)
    return Smem(
        k=common.smem((WGS, UNIT, plan.dim), dtype),
        v=common.smem((WGS, UNIT, plan.v_dim), dtype),
        q=common.smem((stages, tiles.block_q, plan.dim), dtype),
        dout=common.smem((stages, tiles.block_q, plan.v_dim), dtype),
        p=None,
        ds=common.smem((2, WGS, *ds), dtype),
        dq=_staging(call, plan),
        words=words,
    ), bars


def _read_ds(plan: Plan):
    if plan.adder:
        return plgpu.Barrier(num_arrivals=2, num_barriers=2)
    return None if plan.wide else plgpu.Barrier(num_barriers=WGS)


def _staging(call: Call, plan: Plan):
    """Where dq is staged: a warpgroup's for the producer, or by whoever adds it by TMA."""
    if not plan.wide:
        return plgpu.SMEM((WGS, *backward_add.slabs(UNIT, UNIT)), jnp.float32)
    if not (plan.staged or call.interpret):
        return None
    shape = 1 if plan.adder else WGS, max(plan.staged, 1), *backward_add.slabs(UNIT, STAGED)
    return plgpu.SMEM(shape, jnp.float32)


def _smem(shape, dtype, width: int):
    """Shared memory in blocks of 8 rows of `width` numbers, swizzled."""
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), swizzle))


def _launch(call: Call, plan: Plan, operands, dq):
    inputs, *state = operands
    axes = _compat.varying_axes(inputs)
    inputs = _compat.match_varying(inputs, axes)
    leaves, tree = jax.tree.flatten((inputs, *state))

    def body(*refs):
        operands, order, counter = jax.tree.unflatten(tree, refs[: len(leaves)])
        outs, (smem, bars) = refs[len(leaves) : len(leaves) + 3], refs[len(leaves) + 3 :]
        wg = lax.axis_index("wg")
        _kernel(Kernel(call, plan, operands, order, outs, smem, bars, wg, counter))

    name = "pallas_attn_hopper_bwd"
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=tuple(
            _compat.out_struct(x.shape, x.dtype, inputs.q) for x in (inputs.k, inputs.v)
        ),
        scratch_types=_scratch(call, plan, inputs.q.dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=WGS + 1 + plan.adder,
        thread_name="wg",
        compiler_params=common.compiler_params(),
        kernel_name=name,
    )(*leaves, dq)


def _kernel(kernel: Kernel):
    @pl.when(kernel.wg == WGS)
    def _producer():
        plgpu.set_max_registers(kernel.plan.registers[1], action="decrease")

        @plgpu.warp_map
        def _by_warp(warp):
            pl.when(warp == 0)(lambda: backward_producer.load(kernel))
            pl.when(warp == 1)(lambda: backward_producer.store(kernel, 0))
            if not kernel.plan.wide:
                pl.when(warp == 3)(lambda: backward_producer.store(kernel, 1))
            if kernel.plan.cleans:
                pl.when(warp == 2)(lambda: backward_producer.clean(kernel))

    if kernel.plan.adder:

        @pl.when(kernel.wg == WGS + 1)
        def _adder():
            plgpu.set_max_registers(kernel.plan.registers[2], action="decrease")
            backward_wide.start_adder(kernel)
            for_each_tile(kernel, backward_wide.add_dq)
            backward_add.finish()

    @pl.when(kernel.wg < WGS)
    def _consumer():
        plgpu.set_max_registers(kernel.plan.registers[0], action="increase")
        compute = (backward_wide if kernel.plan.wide else backward_narrow).compute
        backward_wide.start(kernel)
        for_each_tile(kernel, compute)
