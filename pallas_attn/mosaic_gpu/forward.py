"""The forward kernel for Hopper: one producer warpgroup, two or three consumers.

grid: one thread block a multiprocessor; each takes tiles (64 rows a consumer) longest first

producer    for each tile: q of each consumer; then k, v of the blocks that any of them sees
                wait empty -> TMA -> full             (a ring of num_stages slots)
consumer    wait q; for each block of the tile, in step with the producer:
                s = q·kᵀ -> logits -> (mask) -> softmax -> acc += p·v      (`attend.py`)
            out = acc·factor -> shared memory -> TMA; lse -> global memory

wg 0   S0 PV0 | softmax ....... | S0 PV0 | softmax ...     consumers take turns at the
wg 1          | S1 PV1 | softmax ....... | S1 PV1 | ...    tensor cores: the softmax of one
wg 2                   | S2 PV2 | softmax ....... | ...    runs under the matmuls of others
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import attend, common, ring, schedule
from pallas_attn.mosaic_gpu.attend import Kernel, Scratch
from pallas_attn.mosaic_gpu.common import UNIT, Inputs


def forward(call: Call, inputs: Inputs):
    """Runs the forward kernel.

    Args:
        call: static facts.
        inputs: q, k, v, visits, extra, sinks, origin.

    Returns:
        out [batch, q_len, q_heads, v_dim] in q's dtype; lse float32 [batch, q_heads, q_len].
    """
    spec = call.spec
    plan = schedule.plan(call, inputs)
    dtype = inputs.q.dtype
    order = schedule.order(plan)
    inputs = inputs._replace(
        q=common.for_tma(inputs.q), k=common.for_tma(inputs.k), v=common.for_tma(inputs.v),
        order=None if order is None else jnp.asarray(order),
    )  # fmt: skip
    q_dim, v_dim = common.padded(spec.head_dim), common.padded(spec.v_dim)
    wgs, tiles = plan.num_wgs, call.tiles.fwd
    slots = {
        "q": (wgs, (UNIT, q_dim), 1),
        "k": (tiles.num_stages, (tiles.block_kv, q_dim), wgs),
        "v": (tiles.num_stages, (tiles.block_kv, v_dim), wgs),
    }
    data = {n: common.smem((count, *shape), dtype) for n, (count, shape, _) in slots.items()}
    bars = {n: ring.barriers(count, readers) for n, (count, _, readers) in slots.items()}
    out = common.smem((wgs, UNIT, v_dim), dtype) if plan.stage_out else None
    padded_len = plan.units * UNIT
    out, lse = common.launch(
        functools.partial(_kernel, call=call, plan=plan),
        inputs,
        name="pallas_attn_hopper_fwd",
        outs=[
            ((*inputs.q.shape[:3], inputs.v.shape[3]), dtype),
            ((spec.batch, spec.q_heads, padded_len), jnp.float32),
        ],
        scratch=(data, bars, out, plgpu.SMEM((2, wgs, len(schedule.FIELDS)), jnp.int32)),
        blocks=plan.blocks,
        threads=wgs + 1,
    )
    return out[:, : spec.q_len, :, : spec.v_dim], lse[..., : spec.q_len]


def _kernel(inputs: Inputs, outs, data, bars, out_smem, work, *, call: Call, plan: schedule.Plan):
    wg = lax.axis_index("wg")
    slots = {name: ring.Slots(data[name], *bars[name]) for name in data}
    kernel = Kernel(call, plan, inputs, Scratch(**slots, out=out_smem, work=work), wg)
    block = lax.axis_index("block")
    count = schedule.tiles_of_block(plan, inputs, block)

    @pl.when(wg == plan.num_wgs)
    def _producer():
        plgpu.set_max_registers(plan.registers[1], action="decrease")

        def take(i, done):
            return _load_tile(kernel, schedule.tile_at(plan, inputs, i, block), i, done)

        lax.fori_loop(jnp.int32(0), count, take, jnp.int32(0))

    @pl.when(wg < plan.num_wgs)
    def _consumer():
        plgpu.set_max_registers(plan.registers[0], action="increase")
        schedule.start_turns(kernel)
        finish = functools.partial(_finish, outs)

        def take(i, slot):
            work_of_tile = schedule.Work(work, (i & jnp.int32(1), wg), inputs.visits)
            return attend.compute_tile(kernel, work_of_tile, slot, finish)

        lax.fori_loop(jnp.int32(0), count, take, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _load_tile(kernel: Kernel, tile: schedule.Tile, i, done):
    """Producer: loads one tile's q, then k and v block by block; `done` blocks came before."""
    plan, inputs, smem = kernel.plan, kernel.inputs, kernel.smem
    spec = kernel.call.spec
    dims = {"k": common.padded(spec.head_dim), "v": common.padded(spec.v_dim)}
    blocks = schedule.blocks_of_tile(plan, inputs, tile)

    def source_of(name, n):
        rows = pl.ds(blocks.at(n) * kernel.block_kv, kernel.block_kv)
        keys = getattr(inputs, name)
        return keys.at[tile.batch, rows, tile.kv_head, schedule.channels(dims[name])]

    def load_q():
        for w in range(plan.num_wgs):
            unit = schedule.unit_of(plan, tile, w)
            rows = pl.ds(unit.q_unit * UNIT, UNIT)
            source = inputs.q.at[tile.batch, rows, unit.head, schedule.channels(dims["k"])]
            pl.when(i > 0)(functools.partial(ring.wait_empty, smem.q, w))
            # The consumer reads this after it has waited for q. It may still be reading what it was
            # told of the tile before, but not of the one before that.
            _tell(kernel, tile, unit, i, w)
            ring.load(smem.q, w, source, used=None)

    return attend.feed(kernel, blocks.count, done, load_q, source_of)


def _tell(kernel: Kernel, tile, unit, i, wg: int) -> None:
    def write(field: int, value):
        kernel.smem.work[i & jnp.int32(1), wg, field] = value

    schedule.tell(kernel.plan, kernel.inputs, tile, unit, write)


def _finish(outs, kernel: Kernel, work, acc, row_max, row_sum):
    """Normalises, and writes out and lse of this warpgroup's rows."""
    plan, spec = kernel.plan, kernel.call.spec
    out, lse = attend.normalised(kernel, work, acc, row_max, row_sum)
    if plan.stage_out:
        staged = kernel.smem.out.at[kernel.wg]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    else:
        staged = kernel.smem.q.data.at[kernel.wg]
    staged[...] = out.astype(staged.dtype)
    plgpu.commit_smem()
    rows = pl.ds(work.q_start, UNIT)

    @pl.when(work.exists != 0)
    def _store():
        channels = schedule.channels(common.padded(spec.v_dim))
        plgpu.copy_smem_to_gmem(staged, outs[0].at[work.batch, rows, work.head, channels])
        outs[1].at[work.batch, work.head, rows][...] = lse

    if not plan.stage_out:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(kernel.smem.q, kernel.wg)
