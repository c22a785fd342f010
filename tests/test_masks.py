"""Every mask against its definition, its blocks against its pairs, and the mask algebra."""

import inspect

import jax
import jax.numpy as jnp
import mask_truth
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pallas_attn as pa
from pallas_attn import mask_core, masks, reference
from pallas_attn.mask_core import TileGrid

PROFILE = settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
SIZES = [(2, 2, 9, 13), (1, 1, 13, 9), (2, 1, 1, 20)]
NAMES = sorted(mask_truth.leaves(0, 1, 1, 4, 4))


def drawing(text):
    return np.array([[c == "x" for c in row.split()] for row in text.strip().splitlines()])


def seen(mask, batch, heads, q_len, kv_len):
    return np.asarray(reference.visible(mask, batch, heads, q_len, kv_len))


def make(cls, *args, **kwargs):
    """The mask without the runtime type checks that tests run under, which users do not have."""
    mask = object.__new__(cls)
    inspect.unwrap(cls.__init__)(mask, *args, **kwargs)
    return mask


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (pa.Causal(), "x . . . . .\nx x . . . .\nx x x . . .\nx x x x . ."),
        (pa.Causal(align="bottom_right"), "x x x . . .\nx x x x . .\nx x x x x .\nx x x x x x"),
        (pa.Causal(-1), ". . . . . .\nx . . . . .\nx x . . . .\nx x x . . ."),
        (pa.Causal(-1, "bottom_right"), "x x . . . .\nx x x . . .\nx x x x . .\nx x x x x ."),
        (pa.SlidingWindow(1, 2), "x x x . . .\nx x x x . .\n. x x x x .\n. . x x x x"),
        (pa.SlidingWindow(0, 0), "x . . . . .\n. x . . . .\n. . x . . .\n. . . x . ."),
        (pa.SlidingWindow(1), "x x x x x x\nx x x x x x\n. x x x x x\n. . x x x x"),
        (pa.SlidingWindow(right=0), "x . . . . .\nx x . . . .\nx x x . . .\nx x x x . ."),
        (
            pa.SlidingWindow(1, 0, align="bottom_right"),
            ". x x . . .\n. . x x . .\n. . . x x .\n. . . . x x",
        ),
        (pa.PrefixLM(2), "x x . . . .\nx x . . . .\nx x x . . .\nx x x x . ."),
        (pa.Chunked(3), "x x x . . .\nx x x . . .\nx x x . . .\n. . . x x x"),
        (pa.Dilated(1, 2), "x . x . . .\n. x . x . .\nx . x . x .\n. x . x . x"),
    ],
)
def test_hand_drawn(mask, picture):
    np.testing.assert_array_equal(seen(mask, 1, 1, 4, 6)[0, 0], drawing(picture))


def test_bottom_right_with_more_queries_than_keys():
    picture = drawing(". . .\n. . .\nx . .\nx x .\nx x x")
    np.testing.assert_array_equal(seen(pa.Causal(align="bottom_right"), 1, 1, 5, 3)[0, 0], picture)


def test_window_counts_keys_besides_self():
    rows = seen(pa.SlidingWindow(4, 2), 1, 1, 20, 20)[0, 0].sum(-1)
    assert rows[10] == 4 + 1 + 2
    huge = pa.SlidingWindow(2**40, 0)
    np.testing.assert_array_equal(seen(huge, 1, 1, 5, 5), seen(pa.Causal(), 1, 1, 5, 5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_allowed_is_the_definition(name, sizes):
    mask, see = mask_truth.leaves(3, *sizes)[name]
    mask.check(*sizes)
    np.testing.assert_array_equal(seen(mask, *sizes), mask_truth.dense(see, *sizes))
    implied = mask.sizes()
    assert all(n in (1, full) for n, full in zip(implied, sizes[:2], strict=True))


def check_blocks(mask, pairs, tiles, *, exact=False):
    """No visible pair is hidden, nothing is called full that is not."""
    grid = TileGrid(*pairs.shape, *tiles)
    some, every = (np.asarray(x) for x in mask.tiles(grid))
    truth_some, truth_every = mask_truth.block_truth(pairs, *tiles)
    some, every = (np.broadcast_to(x, truth_some.shape) for x in (some, every))
    assert not (truth_some & ~some).any(), "a visible pair is hidden"
    assert not (every & ~truth_every).any(), "a block that is not full is called full"
    if exact:
        np.testing.assert_array_equal(some, truth_some)
        np.testing.assert_array_equal(every, truth_every)


def check_row_span(mask, pairs):
    grid = TileGrid(*pairs.shape, 4, 4)
    span = mask.row_span(mask_core.row_positions(grid))
    if span is None:
        return False
    start, end = (np.asarray(x)[:, None, :, None] for x in span)
    keys = np.arange(grid.kv_len)
    inside = np.broadcast_to((keys >= start) & (keys < end), pairs.shape)
    np.testing.assert_array_equal(inside, pairs)
    return True


def check_padding(mask, pairs):
    batch, _, q_len, kv_len = pairs.shape
    rows = np.arange(batch, dtype=np.int32)[:, None]
    for valid, length, axis in ((mask.q_valid, q_len, 3), (mask.kv_valid, kv_len, 2)):
        counts = valid(rows, np.arange(length, dtype=np.int32)[None])
        if counts is not None:
            counts = np.broadcast_to(np.asarray(counts), (batch, length))
            used = pairs.any(axis=(1, axis))
            assert not (used & ~counts).any(), "a visible pair lies in declared padding"


# Masks whose `tiles` promise more than soundness: a block is visited only if it holds something.
NOT_EXACT = {"document", "dilated"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tiles", [(4, 4), (5, 3), (1, 1), (16, 32)], ids=str)
def test_blocks_of_each_mask(name, tiles):
    for sizes in SIZES[:2]:
        mask, see = mask_truth.leaves(5, *sizes)[name]
        pairs = mask_truth.dense(see, *sizes)
        check_blocks(mask, pairs, tiles, exact=name not in NOT_EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_row_span_and_padding_of_each_mask(name):
    spans = {"causal", "window", "prefix", "prefixes", "chunked", "length", "lengths", "full"}
    for sizes in SIZES:
        mask, see = mask_truth.leaves(7, *sizes)[name]
        pairs = mask_truth.dense(see, *sizes)
        has_span = check_row_span(mask, pairs)
        assert has_span == (name.split("_")[0] in spans)
        check_padding(mask, pairs)


def test_blocks_of_ids_in_order_are_exact():
    ids = np.repeat(np.arange(40), 3).astype(np.int32)  # More documents than bits in the hash.
    pairs = mask_truth.dense(lambda b, h, i, j: ids[i] == ids[j], 1, 1, 120, 120)
    check_blocks(pa.Document(ids), pairs, (16, 8), exact=True)


def test_dilated_blocks_are_exact_where_they_are_empty():
    pairs = seen(pa.Dilated(2, 7), 1, 1, 40, 40)
    some, _ = pa.Dilated(2, 7).tiles(TileGrid(1, 1, 40, 40, 2, 2))
    np.testing.assert_array_equal(some, mask_truth.block_truth(pairs, 2, 2)[0])


SHAPES = [(2, 2, 9, 13), (1, 2, 12, 8)]


TREES = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner), st.tuples(st.sampled_from(["and", "or"]), inner, inner)
    ),
    max_leaves=4,
)


def planted(tree, cases, sizes):
    """(mask, pairs) of a random tree of names joined by not, and, or."""
    if isinstance(tree, str):
        mask, see = cases[tree]
        return mask, mask_truth.dense(see, *sizes)
    kind, *inner = tree
    (a, a_pairs), *rest = (planted(x, cases, sizes) for x in inner)
    if kind == "not":
        return ~a, ~a_pairs
    ((b, b_pairs),) = rest
    return (a & b, a_pairs & b_pairs) if kind == "and" else (a | b, a_pairs | b_pairs)


@PROFILE
@given(
    TREES,
    st.integers(0, 1000),
    st.sampled_from(SHAPES),
    st.sampled_from([(4, 4), (5, 3), (16, 16)]),
)
def test_random_compositions(tree, seed, sizes, tiles):
    mask, pairs = planted(tree, mask_truth.leaves(seed, *sizes), sizes)
    mask.check(*sizes)
    np.testing.assert_array_equal(seen(mask, *sizes), pairs)
    check_blocks(mask, pairs, tiles)
    check_row_span(mask, pairs)
    check_padding(mask, pairs)


@PROFILE
@given(
    st.lists(st.integers(-2, 5), min_size=11, max_size=11),
    st.lists(st.integers(-2, 5), min_size=14, max_size=14),
    st.sampled_from([(4, 4), (3, 5)]),
)
def test_random_ids(q_ids, kv_ids, tiles):
    mask = pa.Document(np.array(q_ids, np.int32), np.array(kv_ids, np.int32))
    pairs = mask_truth.dense(
        lambda b, h, i, j: q_ids[i] == kv_ids[j] and q_ids[i] >= 0, 1, 1, 11, 14
    )
    np.testing.assert_array_equal(seen(mask, 1, 1, 11, 14), pairs)
    check_blocks(mask, pairs, tiles)
    check_padding(mask, pairs)


def test_algebra_laws():
    sizes = (2, 2, 9, 13)
    cases = mask_truth.leaves(11, *sizes)
    a, b, c = (cases[n][0] for n in ("causal_offset", "document", "blocks"))
    for left, right in (
        (a & b, b & a),
        (a | b, b | a),
        ((a & b) & c, a & (b & c)),
        ((a | b) | c, a | (b | c)),
        (a & (b | c), (a & b) | (a & c)),
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & pa.Full(), a),
        (a | ~pa.Full(), a),
        (a & a, a),
    ):
        np.testing.assert_array_equal(seen(left, *sizes), seen(right, *sizes))
    assert not seen(a & ~a, *sizes).any()
    assert seen(a | ~a, *sizes).all()


def test_arrays_join_masks_on_either_side():
    array = np.random.default_rng(0).random((4, 6)) < 0.5
    wanted = array & seen(pa.Causal(), 1, 1, 4, 6)[0, 0]
    for mask in (
        pa.Causal() & jnp.asarray(array),
        jnp.asarray(array) & pa.Causal(),
        array & pa.Causal(),
    ):
        np.testing.assert_array_equal(seen(mask, 1, 1, 4, 6)[0, 0], wanted)
    wanted = array | seen(pa.Causal(), 1, 1, 4, 6)[0, 0]
    for mask in (pa.Causal() | array, array | pa.Causal()):
        np.testing.assert_array_equal(seen(mask, 1, 1, 4, 6)[0, 0], wanted)
    with pytest.raises(TypeError, match=r"mask: got int, expected a mask"):
        pa.Causal() & 3


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_pytrees(name):
    sizes = (2, 2, 9, 13)
    mask, see = mask_truth.leaves(13, *sizes)[name]
    joined = (mask & pa.Causal(2)) | ~mask
    leaves, structure = jax.tree.flatten(joined)
    assert all(isinstance(x, jax.Array) for x in leaves)
    # JAX itself unflattens with placeholders and flattens again: the same leaves must come back.
    marks = [object() for _ in leaves]
    assert jax.tree.leaves(jax.tree.unflatten(structure, marks)) == marks
    nones = jax.tree.unflatten(structure, [None] * len(leaves))
    assert len(jax.tree.leaves(nones, is_leaf=lambda x: x is None)) == len(leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(again) == structure
    hash(structure)
    pairs = mask_truth.dense(see, *sizes)
    causal = mask_truth.dense(lambda b, h, i, j: j <= i + 2, *sizes)
    through_jit = jax.jit(lambda m: reference.visible(m, *sizes))(again)
    np.testing.assert_array_equal(through_jit, (pairs & causal) | ~pairs)


def test_static_parts_tell_structures_apart():
    structures = [
        jax.tree.structure(m)
        for m in (
            pa.Causal(),
            pa.Causal(1),
            pa.Causal(align="bottom_right"),
            pa.SlidingWindow(1),
            pa.SlidingWindow(1, 1),
            pa.Chunked(3),
            pa.Dilated(1, 2),
            pa.Dilated(1, 3),
            ~pa.Causal(),
            pa.Causal() & pa.Chunked(3),
            pa.Causal() | pa.Chunked(3),
        )
    ]
    for i, a in enumerate(structures):
        assert [a == b for b in structures] == [i == j for j in range(len(structures))]
    ids = np.zeros(5, np.int32)
    assert jax.tree.structure(pa.Document(ids)) == jax.tree.structure(pa.Document(ids + 1))


def test_reprs_name_the_mask_and_its_parts():
    assert repr(pa.Causal()) == "Causal()"
    assert repr(pa.Causal(3, align="bottom_right")) == "Causal(offset=3, align='bottom_right')"
    assert "Document(q_segment_ids=int32[1,5]" in repr(pa.Document(np.zeros(5, np.int32)))
    text = repr(pa.Causal() & ~pa.Chunked(3) | pa.SlidingWindow(4, offset=jnp.ones(2, jnp.int32)))
    window = "SlidingWindow(left=4, right=None, offset=int32[2])"
    assert text == f"(Causal() & ~(Chunked(chunk_len=3)) | {window})"
    array = jnp.ones(3, bool)
    assert "1 arrays" in repr(pa.Predicate(lambda b, h, i, j: array[i]))


BAD = [
    (pa.Causal, (1.5,), TypeError, "offset: got float, expected an int or an integer array"),
    (pa.Causal, (True,), TypeError, "offset: got bool"),
    (pa.Causal, (np.ones(2, np.float32),), TypeError, "offset: got dtype float32, expected an int"),
    (pa.Causal, (np.ones((2, 2), np.int32),), ValueError, r"offset: got shape \(2, 2\), expected"),
    (
        pa.Causal,
        (0, "left"),
        ValueError,
        "align: got 'left', expected 'top_left' or 'bottom_right'",
    ),
    (pa.SlidingWindow, (-1,), ValueError, "left: got -1, expected an int from 0 up, or None"),
    (pa.SlidingWindow, (1, 2.0), ValueError, "right: got 2.0, expected an int from 0 up, or None"),
    (pa.SlidingWindow, (True,), ValueError, "left: got True"),
    (pa.PrefixLM, ("3",), TypeError, "prefix_len: got str, expected an int or an integer array"),
    (pa.PrefixLM, (None,), TypeError, "prefix_len: got NoneType"),
    (pa.PrefixLM, (-1,), ValueError, "prefix_len: got -1, expected 0 or more"),
    (pa.Document, (np.full(3, 2**40),), ValueError, "ids: got numbers from .* int32 holds"),
    (pa.Document, (np.full(3, 2**31, np.uint32),), ValueError, "ids: got numbers from"),
    (pa.Chunked, (0,), ValueError, "chunk_len: got 0, expected an int from 1 up"),
    (pa.Chunked, (2.0,), ValueError, "chunk_len: got 2.0"),
    (pa.Chunked, (True,), ValueError, "chunk_len: got True"),
    (pa.Lengths, (0.5,), TypeError, "q_lens: got float"),
    (pa.Lengths, (None, np.ones(2, bool)), TypeError, "kv_lens: got dtype bool, expected an int"),
    (pa.Document, (np.ones(3, np.float32),), TypeError, "q_segment_ids: got dtype float32"),
    (pa.Document, ([0, 1], [0.5, 1.0]), TypeError, "kv_segment_ids: got dtype float64"),
    (pa.Document, (np.ones((1, 2, 3), np.int32),), ValueError, "q_segment_ids: got shape"),
    (pa.Dilated, (-1, 2), ValueError, "window: got -1, expected an int from 0 up"),
    (pa.Dilated, (1, 0), ValueError, "dilation: got 0, expected an int from 1 up"),
    (pa.Dilated, (1, 1.5), ValueError, "dilation: got 1.5"),
    (pa.BlockSparse, (np.ones((2, 2), np.int32), 4, 4), ValueError, "block_map: got int32"),
    (pa.BlockSparse, (np.ones(2, bool), 4, 4), ValueError, r"block_map: got bool\(2,\), expected"),
    (pa.BlockSparse, (np.ones((2, 2), bool), 0, 4), ValueError, "block_q: got 0, expected an int"),
    (pa.BlockSparse, (np.ones((2, 2), bool), 4, 0.5), ValueError, "block_kv: got 0.5, expected"),
    (pa.Predicate, (3,), TypeError, "Predicate: got int, expected a function"),
    (pa.Dense, (np.ones((2, 2), np.int32),), TypeError, "mask: got dtype int32, expected bool"),
    (pa.Dense, (np.ones((1,) * 5, bool),), ValueError, "mask: got shape .* rank 4 or less"),
    (masks.RowSpan, (0.5, 1), TypeError, "start: got float"),
]


@pytest.mark.parametrize("far", [2**29, 2**31 - 1, 2**31, 2**63])
def test_numbers_past_every_key_mean_the_same(far):
    everything = [
        pa.Causal(far), pa.PrefixLM(far), pa.Chunked(far), pa.Lengths(far, far),
        pa.Dilated(far, 1), pa.SlidingWindow(far, far),
    ]  # fmt: skip
    if far < 2**31:
        array = np.full(2, far, np.int64)
        everything += [pa.Causal(array), pa.PrefixLM(array), pa.Lengths(kv_lens=array)]
    for mask in everything:
        assert np.asarray(reference.visible(mask, 2, 1, 9, 7)).all(), mask
    assert not np.asarray(reference.visible(pa.Causal(-far), 2, 1, 9, 7)).any()
    own = np.asarray(reference.visible(pa.Dilated(far, far), 1, 1, 7, 7))[0, 0]
    np.testing.assert_array_equal(own, np.eye(7, dtype=bool))


def test_large_unsigned_ids_do_not_turn_into_padding():
    mask = pa.Document(jnp.asarray([2**32 - 1, 2**32 - 1, 3], jnp.uint32))
    np.testing.assert_array_equal(mask.q_segment_ids, [[2**31 - 1, 2**31 - 1, 3]])
    whole = pa.Document(np.asarray([7, 7, 2**31 - 1], np.int64))
    np.testing.assert_array_equal(whole.q_segment_ids, [[7, 7, 2**31 - 1]])


@pytest.mark.parametrize(("cls", "args", "error", "message"), BAD)
def test_constructors_name_what_is_wrong(cls, args, error, message):
    with pytest.raises(error, match=message):
        make(cls, *args)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            pa.Causal(np.zeros(3, np.int32)),
            r"offset: got shape \(3,\), expected \[batch\] = \(2,\)",
        ),
        (pa.SlidingWindow(1, offset=np.zeros(3, np.int32)), r"offset: got shape \(3,\)"),
        (pa.PrefixLM(np.zeros(3, np.int32)), r"prefix_len: got shape \(3,\)"),
        (pa.Lengths(np.zeros(3, np.int32)), r"q_lens: got shape \(3,\)"),
        (pa.Lengths(None, np.zeros(3, np.int32)), r"kv_lens: got shape \(3,\)"),
        (pa.Document(np.zeros(8, np.int32)), r"q_segment_ids: got shape \(1, 8\), expected \(2 or"),
        (pa.Document(np.zeros(9, np.int32)), r"kv_segment_ids: got shape \(1, 9\), .* 13\)"),
        (pa.Document(np.zeros((3, 9), np.int32)), r"q_segment_ids: got shape \(3, 9\)"),
        (pa.BlockSparse(np.ones((3, 3), bool), 4, 4), r"block_map: got shape \(1, 1, 3, 3\)"),
        (pa.BlockSparse(np.ones((3, 3, 4), bool), 4, 4), r"block_map: got shape \(1, 3, 3, 4\)"),
        (pa.Dense(np.ones((9, 12), bool)), r"mask: got shape \(1, 1, 9, 12\), expected one that"),
        (pa.Dense(np.ones((3, 1, 1), bool)), r"mask: got shape \(1, 3, 1, 1\)"),
        (masks.RowSpan(np.zeros(8, np.int32), np.ones(9, np.int32)), r"start: got shape \(1, 8\)"),
    ],
)
def test_check_names_what_does_not_fit(mask, message):
    for expression in (mask, ~mask, mask & pa.Full(), pa.Full() | mask):
        with pytest.raises(ValueError, match=message):
            expression.check(2, 4, 9, 13)
