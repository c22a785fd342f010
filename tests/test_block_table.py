"""Tables rebuilt to dense maps against the masks' pairs, under jit and at 131,072 tokens."""

import inspect
import time

import jax
import jax.numpy as jnp
import mask_truth
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pallas_attn as pa
from pallas_attn import block_table, gpu
from pallas_attn.mask_core import Position, TileGrid

SIZES = [(2, 2, 21, 34), (1, 2, 30, 17)]
NAMES = sorted(mask_truth.leaves(0, 1, 1, 4, 4))
SKIPPED, PARTIAL, FULL = 0, 1, 2


def rebuilt(visits, columns):
    """[batch or 1, heads or 1, rows, columns] of 0 skipped, 1 partly, 2 fully visible."""
    table = np.asarray(visits.table)
    kinds = np.zeros((*table.shape[:3], columns), int)
    for at in np.ndindex(table.shape[:3]):
        if visits.form == "list":
            full, partial = np.asarray(visits.counts)[at]
            blocks = table[at][: full + partial]
            assert len(set(blocks.tolist())) == len(blocks), "a block is visited twice"
            kinds[at][blocks[:full]] = FULL
            kinds[at][blocks[full:]] = PARTIAL
            continue
        first, full_first, full_last, last = table[at][:4]
        assert 0 <= first <= full_first <= full_last <= last <= columns
        kinds[at][first:last] = PARTIAL
        if visits.form == "loose":
            some = np.asarray(visits.some)
            kinds[at] *= (some.swapaxes(-1, -2) if visits.by_key else some)[at]
            assert table[at][4] == last - first - (kinds[at] != SKIPPED).sum()
        kinds[at][full_first:full_last] = FULL
    np.testing.assert_array_equal(visits.kinds(columns), kinds)
    return kinds


def both_ways(mask, grid):
    """Rebuilt maps of the kernels that loop over keys, and over queries (transposed back)."""
    rows = block_table.row_visits(mask, grid)
    columns = block_table.column_visits(mask, grid)
    return rows, columns, rebuilt(rows, grid.num_kv), rebuilt(columns, grid.num_q).swapaxes(-1, -2)


def wanted_kinds(pairs, grid):
    """What both maps should say if they are exact."""
    some, every = mask_truth.block_truth(pairs, grid.block_q, grid.block_kv)
    q_whole = (np.arange(grid.num_q) + 1) * grid.block_q <= grid.q_len
    kv_whole = (np.arange(grid.num_kv) + 1) * grid.block_kv <= grid.kv_len
    kinds = np.where(some, PARTIAL, SKIPPED)
    return np.where(every & kv_whole, FULL, kinds), np.where(every & q_whole[:, None], FULL, kinds)


def check(mask, pairs, tiles):
    grid = TileGrid(*pairs.shape, *tiles)
    rows, columns, by_row, by_column = both_ways(mask, grid)
    assert rows.form == columns.form
    for visits, kinds, wanted in zip(
        (rows, columns), (by_row, by_column), wanted_kinds(pairs, grid), strict=True
    ):
        kinds = np.broadcast_to(kinds, wanted.shape)
        assert not ((kinds == SKIPPED) & (wanted != SKIPPED)).any(), "a visible pair is not visited"
        # This also says that no full block carries an end of the sequence.
        assert not ((kinds == FULL) & (wanted != FULL)).any(), "a block runs without its mask"
        assert visits.any_partial or not (kinds == PARTIAL).any()
        assert visits.any_full or not (kinds == FULL).any()
    return by_row, by_column


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tiles", [(4, 8), (16, 16)], ids=str)
def test_tables_are_the_masks(name, tiles):
    for sizes in SIZES:
        mask, see = mask_truth.leaves(3, *sizes)[name]
        check(mask, mask_truth.dense(see, *sizes), tiles)


@pytest.mark.parametrize(
    "mask",
    [
        pa.Full(),
        pa.Causal(),
        pa.Causal(align="bottom_right"),
        pa.SlidingWindow(9, 3),
        pa.SlidingWindow(20),
        pa.PrefixLM(11),
        pa.Chunked(8),
        pa.Causal() & pa.Chunked(16),
        pa.Causal() & pa.SlidingWindow(9),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tiles", [(4, 4), (8, 4), (4, 16)], ids=str)
def test_runs_of_static_masks_are_exact(mask, tiles):
    for sizes in ((1, 1, 32, 32), (1, 1, 21, 34), (1, 1, 34, 21)):
        at = np.indices(sizes[2:])
        pairs = np.asarray(jnp.broadcast_to(mask.allowed(
            pa.mask_core.Position(0, 0, at[0], at[1], *sizes[2:])), sizes))  # fmt: skip
        grid = TileGrid(*sizes, *tiles)
        rows, _, by_row, by_column = both_ways(mask, grid)
        assert rows.form == "run"
        assert isinstance(rows.table, np.ndarray), "a static table costs device work"
        for kinds, wanted in zip((by_row, by_column), wanted_kinds(pairs, grid), strict=True):
            np.testing.assert_array_equal(kinds, wanted)


def test_causal_table_drawn_by_hand():
    tiles = pa.Tiles(*(pa.KernelTiles(16, 16),) * 3)
    table = pa.plan(pa.Causal(), q_len=40, kv_len=60, tiles=tiles)
    np.testing.assert_array_equal(
        rebuilt(table.fwd, 4)[0, 0], [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0]]
    )
    # The last block of queries is ragged: for dk and dv, which loop over queries, it is partial.
    np.testing.assert_array_equal(
        rebuilt(table.dkv, 3)[0, 0], [[1, 2, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]]
    )


@settings(
    derandomize=True, deadline=None, max_examples=20, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(
    st.lists(st.integers(-1, 6), min_size=24, max_size=24),
    st.integers(0, 24),
    st.sampled_from([(4, 4), (8, 4)]),
    st.booleans(),
)
def test_random_documents_and_lengths(ids, length, tiles, ascending):
    ids = sorted(ids) if ascending else ids
    mask = pa.Document(np.array(ids, np.int32)) & pa.Lengths(np.array([length], np.int32))
    mask = mask & pa.Causal()
    pairs = mask_truth.dense(
        lambda b, h, i, j: ids[i] == ids[j] >= 0 and i < length and j <= i, 1, 1, 24, 24
    )
    check(mask, pairs, tiles)


@pytest.mark.parametrize("name", ["causal_offset", "prefix", "window_offset", "length_kv"])
def test_traced_numbers_give_the_static_tables(name):
    static, traced = {
        "causal_offset": (pa.Causal(3), pa.Causal(np.array([3], np.int32))),
        "prefix": (pa.PrefixLM(11), pa.PrefixLM(np.array([11], np.int32))),
        "window_offset": (
            pa.SlidingWindow(9, 2, offset=-4),
            pa.SlidingWindow(9, 2, offset=np.array([-4], np.int32)),
        ),
        "length_kv": (pa.Lengths(13, 27), pa.Lengths(*np.array([[13], [27]], np.int32))),
    }[name]
    grid = TileGrid(1, 1, 21, 34, 4, 8)
    in_jit = jax.jit(
        lambda m: (block_table.row_visits(m, grid), block_table.column_visits(m, grid))
    )(traced)
    for visits, columns, wanted in zip(
        in_jit, (grid.num_kv, grid.num_q), both_ways(static, grid)[:2], strict=True
    ):
        assert visits.any_partial and visits.any_full  # noqa: PT018
        np.testing.assert_array_equal(rebuilt(visits, columns), rebuilt(wanted, columns))


@pytest.mark.parametrize("name", ["document", "blocks", "dense", "predicate", "dilated", "lengths"])
def test_tables_built_under_jit_equal_those_built_outside(name):
    mask, _ = mask_truth.leaves(5, *SIZES[0])[name]
    grid = TileGrid(*SIZES[0], 4, 8)
    build = lambda m: (block_table.row_visits(m, grid), block_table.column_visits(m, grid))  # noqa: E731
    for a, b, columns in zip(
        jax.jit(build)(mask), build(mask), (grid.num_kv, grid.num_q), strict=True
    ):
        np.testing.assert_array_equal(rebuilt(a, columns), rebuilt(b, columns))


def qkv(length, heads=2, kv_heads=1, dim=16):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=(1, length, h, dim)), jnp.float32)
            for h in (heads, kv_heads, kv_heads))  # fmt: skip


def test_new_ids_do_not_retrace():
    q, k, v = qkv(40)
    traces = []

    @jax.jit
    def inside(q, k, v, ids):
        traces.append("inside")
        table = pa.plan(pa.Document(ids) & pa.Causal(), q_len=40, kv_len=40, head_dim=16)
        return pa.mha(q, k, v, table, backend="xla")

    @jax.jit
    def planned(q, k, v, table):
        traces.append("planned")
        return pa.mha(q, k, v, table, backend="xla")

    for cut in (7, 20, 33):
        ids = (np.arange(40) >= cut).astype(np.int32)
        table = pa.plan(pa.Document(ids) & pa.Causal(), q_len=40, kv_len=40, head_dim=16)
        a, b = inside(q, k, v, jnp.asarray(ids)), planned(q, k, v, table)
        np.testing.assert_array_equal(a, b)
        alone = pa.mha(q[:, cut:], k[:, cut:], v[:, cut:], pa.Causal(), backend="xla")
        np.testing.assert_allclose(a[:, cut:], alone, atol=1e-5)
    assert sorted(traces) == ["inside", "planned"]


def test_one_table_serves_many_layers():
    q, k, v = qkv(40)
    table = pa.plan(pa.Causal() & pa.Chunked(9), q_len=40, kv_len=40, head_dim=16)
    reused = jax.jit(lambda q, table: pa.mha(pa.mha(q, k, v, table), k, v, table))(q, table)
    fresh = q
    for _ in range(2):
        fresh = pa.mha(fresh, k, v, pa.Causal() & pa.Chunked(9))
    np.testing.assert_allclose(reused, fresh, atol=1e-6)


def test_tables_for_other_problems_raise_naming_the_table():
    q, k, v = qkv(40)
    mha = inspect.unwrap(pa.mha)
    message = "mask: got a BlockTable planned for q_len=48, kv_len=40, expected one for q_len=40"
    with pytest.raises(ValueError, match=message):
        mha(q, k, v, pa.plan(pa.Causal(), q_len=48, kv_len=40))
    with pytest.raises(ValueError, match="mask: got a BlockTable planned for q_len=40, kv_len=256"):
        mha(q, k, v, pa.plan(pa.Causal(), q_len=40, kv_len=256))
    per_head = pa.Predicate(lambda b, h, i, j: i + h >= j)
    with pytest.raises(
        ValueError, match=r"BlockTable \(fwd\) planned for batch 1 and 4 query heads"
    ):
        mha(q, k, v, pa.plan(per_head, q_len=40, kv_len=40, q_heads=4))
    three = pa.Document(np.zeros((3, 40), np.int32))
    with pytest.raises(ValueError, match=r"BlockTable \(fwd\) planned for batch 3"):
        mha(q, k, v, pa.plan(three, q_len=40, kv_len=40))
    table = pa.plan(pa.Causal(), q_len=40, kv_len=40)
    tiles = pa.Tiles(*(pa.KernelTiles(16, 32),) * 3)
    with pytest.raises(ValueError, match=r"tiles: got fwd 16x32.*expected those of the BlockTable"):
        mha(q, k, v, table, tiles=tiles)
    mha(q, k, v, table, tiles=table.tiles)


def test_lengths_of_zero_can_be_planned():
    for mask in (pa.Causal(), pa.Full(), pa.Chunked(3), pa.Dilated(1, 2)):
        for q_len, kv_len in ((0, 0), (0, 20), (20, 0)):
            table = pa.plan(mask, q_len=q_len, kv_len=kv_len, head_dim=16)
            q, k, v = next(qkv(q_len)), *list(qkv(kv_len))[1:]
            out, lse = pa.mha(q, k, v, table, return_lse=True)
            assert out.shape == (1, q_len, 2, 16)
            assert not np.asarray(out).any()
            assert (np.asarray(lse) == -np.inf).all()


def test_full_blocks_only_and_rows_of_none():
    """A map of full blocks only is honoured; a row of blocks without any gives 0 and -inf."""
    q, k, v = qkv(64)
    block_map = np.array([[True, False], [False, False]])
    mask = pa.BlockSparse(block_map, 32, 32)
    tiles = pa.Tiles(*(pa.KernelTiles(32, 32),) * 3)
    table = pa.plan(mask, q_len=64, kv_len=64, tiles=tiles)
    np.testing.assert_array_equal(rebuilt(table.fwd, 2)[0, 0], [[2, 0], [0, 0]])
    wanted = pa.mha(q[:, :32], k[:, :32], v[:, :32], backend="xla")
    for backend in ("xla", "triton"):
        with pa.interpret():
            planned = pa.plan(mask, q_len=64, kv_len=64, tiles=tiles, backend=backend)
            out, lse = pa.mha(q, k, v, planned, return_lse=True)
        np.testing.assert_allclose(out[:, :32], wanted, atol=1e-5)
        assert not np.asarray(out[:, 32:]).any()
        assert (np.asarray(lse[:, :, 32:]) == -np.inf).all()


def largest(jaxpr):
    """Elements of the largest array anywhere in a jaxpr."""
    most = 0
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            most = max(most, getattr(var.aval, "size", 0))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                most = max(most, largest(getattr(inner, "jaxpr", inner)))
    return most


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "predicate"])
def test_nothing_quadratic_at_131072_tokens(name, backend):
    length = 131_072
    make = {
        "causal": lambda ids: pa.Causal(),
        "window": lambda ids: pa.Causal() & pa.SlidingWindow(4096),
        "documents": lambda ids: pa.Causal() & pa.Document(ids),
        "predicate": lambda ids: pa.Predicate(lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)),
    }[name]

    def loss(q, k, v, ids):
        table = pa.plan(make(ids), q_len=length, kv_len=length, head_dim=64, backend=backend)
        out, lse = pa.mha(q, k, v, table, return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    q = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((length,), jnp.int32)
    start = time.perf_counter()
    with gpu.target("h200"):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(q, k, k, ids)
    seconds = time.perf_counter() - start
    # q_len x kv_len is 2^34; q alone is 2^24.
    assert largest(jaxpr.jaxpr) <= 1 << 26
    # Seconds, with room for a busy machine.
    assert seconds < 60


STATIC = [
    pa.Full(), pa.Causal(), pa.Causal(5), pa.Causal(align="bottom_right"), pa.PrefixLM(40),
    pa.Chunked(24), pa.SlidingWindow(30, 10), pa.Causal() & pa.SlidingWindow(20),
    pa.Causal(-40),
]  # fmt: skip


@pytest.mark.parametrize("mask", STATIC, ids=str)
@pytest.mark.parametrize("lens", [(128, 128), (130, 97), (70, 200)], ids=str)
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16)], ids=str)
def test_columns_of_a_span_need_no_map(mask, lens, blocks):
    grid = TileGrid(1, 1, *lens, *blocks)
    some, every = mask.tiles(grid)
    every = every & (grid.q_bounds[0] + np.int32(grid.block_q) <= grid.q_len)
    some, every = (x.swapaxes(-1, -2) for x in block_table._to_rank_4(some, every, grid))
    quick = block_table._columns_of_span(mask, grid)
    if quick is not None:
        np.testing.assert_array_equal(quick, block_table._runs_of(some, every))
    else:
        q, kv = np.arange(lens[0])[:, None], np.arange(lens[1])[None]
        seen = np.asarray(mask.allowed(Position(0, 0, q, kv, *lens)))
        assert not seen.any(1).all(), "only rows that see nothing take the slow way"


def test_tables_of_long_sequences_are_small():
    # A map of all blocks would hold 4e9 entries.
    grid = TileGrid(1, 1, 1 << 22, 1 << 22, 64, 64)
    visits = block_table.column_visits(pa.Causal() & pa.SlidingWindow(100), grid)
    assert visits.table.shape == (1, 1, 1 << 16, 4)
    assert (visits.table[..., 3] - visits.table[..., 0]).max() == 3
