"""How the Hopper forward deals out its tiles, and which tiles it refuses before a launch."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import backends, block_table
from pallas_attn.mosaic_gpu import schedule
from pallas_attn.spec import Spec

STRUCT = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
SPEC = Spec.of(STRUCT, STRUCT, STRUCT)


# The first resonated: dealt out forth and back it gave some blocks twice what others had.
@pytest.mark.parametrize(
    ("tiles", "streams", "together"), [(32, 32, 8), (86, 16, 4), (22, 64, 16), (3, 2, 1), (1, 5, 1)]
)
def test_tiles_of_falling_cost_are_dealt_out_evenly(tiles, streams, together):
    cost = tuple(range(1, tiles + 1))
    table = schedule.balanced(cost, streams, together, 132)
    taken = [table[1 : 1 + count, block] for block, count in enumerate(table[0])]
    everything = np.concatenate(taken)
    assert collections.Counter(everything.tolist()) == dict.fromkeys(range(tiles * streams), 1)
    load = [sum(cost[t % tiles] + 1 for t in block) for block in taken]
    assert max(load) <= sum(load) / 132 + max(cost) + 1


@pytest.mark.parametrize(
    ("fwd", "why"),
    [
        (pa.KernelTiles(96, 128, 8), "blocks are 96x128"),
        (pa.KernelTiles(128, 96, 8), "blocks are 128x96"),
        (pa.KernelTiles(192, 128, 8), "192 queries take 12"),
        (pa.KernelTiles(128, 128, 8, 1), "2 or more"),
        (pa.KernelTiles(192, 256, 12, 8), "shared memory"),
    ],
)
def test_tiles_that_cannot_run_are_refused(fwd, why):
    other = pa.KernelTiles(64, 64)
    with pa.gpu.target("h200"), pytest.raises(ValueError, match=why):
        jax.eval_shape(
            lambda x: pa.mha(x, x, x, backend="mosaic_gpu", tiles=pa.Tiles(fwd, other, other)),
            STRUCT,
        )


def test_a_plan_holds_the_tables_of_the_gradients():
    with pa.gpu.target("h200"):
        tiles = backends.load("mosaic_gpu").candidate_tiles(SPEC, pa.Causal(), pa.gpu.detect())[0]
        table = pa.plan(pa.Causal(), q_len=256, kv_len=256, head_dim=64)
    assert table.tiles == tiles
    grid_of = block_table.grid_for(1, 1, 256, 256)
    want = block_table.column_visits(pa.Causal(), grid_of(tiles.dkv))
    np.testing.assert_array_equal(table.dkv.table, want.table)
