"""What decides single pairs in the Hopper kernels, against the masks' definition.

On a machine with a Hopper GPU, JAX with CUDA and pytest, without plugins:

    python -m pytest tests/test_mosaic_masking.py -m hopper -q -p no:cacheprovider -o addopts=""
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn as pa
from pallas_attn import reference, testing
from pallas_attn.call import Call
from pallas_attn.mosaic_gpu import detail as details
from pallas_attn.mosaic_gpu import masking
from pallas_attn.mosaic_gpu.detail import Detail, detail_by_key, detail_of
from pallas_attn.spec import Spec
from pallas_attn.tiles import KernelTiles, Tiles

NAMES = sorted(testing.MASK_CASES)
SIZES = [(2, 4, 97, 97), (3, 2, 40, 129), (1, 1, 300, 64)]
# One of each kind of detail, for what is slow.
KINDS = [
    "full", "causal", "window_open_right", "window_offsets", "lengths", "documents_padded",
    "documents_alternating", "causal_documents", "dense", "predicate_arrays", "not_window",
]  # fmt: skip


def spec_of(batch, heads, q_len, kv_len):
    return Spec(
        batch=batch, q_len=q_len, kv_len=kv_len, q_heads=heads, kv_heads=1, head_dim=64, v_dim=64,
        dtype="bfloat16", scale=1.0,
    )  # fmt: skip


def call_of(sizes, *, interpret):
    tiles = KernelTiles(64, 128)
    return Call(spec_of(*sizes), Tiles(tiles, tiles, tiles), "mosaic_gpu", interpret=interpret)


def case(name, sizes):
    """(mask, its visible pairs) of `MASK_CASES`."""
    mask = testing.MASK_CASES[name](testing.generator(name), *sizes)
    return mask, visible(mask, sizes)


def visible(mask, sizes):
    return np.asarray(reference.visible(mask, *sizes))


def seen_by(detail, batch, heads, q_len, kv_len):
    """The pairs that a Detail shows, by spans and ids or by bits."""
    q_rows, kv_rows = (details.padded_rows(n) for n in (q_len, kv_len))
    out = np.ones((batch, heads, q_rows, kv_rows), bool)
    keys = np.arange(kv_rows)
    if detail.lo is not None:
        out &= keys >= np.asarray(detail.lo)[:, None, :, None]
    if detail.hi is not None:
        out &= keys < np.asarray(detail.hi)[:, None, :, None]
    if detail.unsorted is not None:
        q_ids, kv_ids = np.asarray(detail.q_ids), np.asarray(detail.kv_ids)
        same = q_ids[:, :, None] == kv_ids[:, None, :]
        out &= (same | (np.asarray(detail.unsorted)[:, None, None] == 0))[:, None]
    if detail.bits is not None:
        words = np.asarray(detail.bits).view(np.uint32)[..., None]
        pairs = (words >> np.arange(32, dtype=np.uint32)) & 1
        out &= pairs.reshape(*words.shape[:-2], -1).astype(bool)
    return out


def check(detail, pairs, *, keys_end=True):
    """A Detail shows the pairs, and nothing past the ends that count."""
    batch, _, q_len, kv_len = pairs.shape
    got = seen_by(detail, *pairs.shape)
    np.testing.assert_array_equal(got[:, :, :q_len, :kv_len], pairs)
    assert not (keys_end and got[:, :, :q_len, kv_len:].any()), "a key past the end is seen"
    for x in jax.tree.leaves(detail):
        assert x.dtype == np.int32
        assert x.shape[0] in (1, batch)


@pytest.mark.parametrize("name", NAMES)
def test_detail_is_the_definition(name):
    for sizes in SIZES:
        mask, pairs = case(name, sizes)
        options = {"spec": spec_of(*sizes), "block_q": 64, "block_kv": 128}
        check(detail_of(mask, **options), pairs, keys_end=sizes[3] % 128)
        traced = jax.jit(functools.partial(detail_of, **options))(mask)
        check(traced, pairs, keys_end=sizes[3] % 128)
        assert traced.q_dirty is None
        both = traced, detail_by_key(mask, **options)
        held = sum(x.bits.nbytes for x in both if x.bits is not None)
        assert held == details.pair_bytes(mask, **options)


def test_what_needs_nothing_has_nothing():
    spec = spec_of(2, 2, 256, 512)
    options = {"block_q": 64, "block_kv": 128}
    assert jax.tree.leaves(detail_of(pa.Full(), spec, **options)) == []
    causal = detail_of(pa.Causal(), spec, **options)
    assert isinstance(causal.hi, np.ndarray), "known while tracing"
    assert jax.tree.leaves(causal) == [causal.hi]
    window = detail_of(pa.SlidingWindow(9), spec, **options)
    assert jax.tree.leaves(window) == [window.lo]
    offsets = jnp.asarray([3, 5], jnp.int32)
    traced = detail_of(pa.Causal(offsets), spec, **options)
    assert jax.tree.leaves(traced) == [traced.hi], "a start at 0 is known also where traced"
    assert detail_of(pa.Full(), spec_of(1, 1, 128, 65), **options).hi is not None


def test_whole_tiles_need_no_bits():
    rng = testing.generator("whole tiles")
    mask = pa.BlockSparse(rng.random((3, 2)) < 0.5, 128, 256)
    options = {"block_kv": 128}
    assert jax.tree.leaves(detail_of(mask, spec_of(1, 1, 384, 512), block_q=64, **options)) == []
    ragged = detail_of(mask, spec_of(1, 1, 380, 500), block_q=64, **options)
    assert ragged.bits is None
    np.testing.assert_array_equal(np.asarray(ragged.hi)[0, :380], 500)
    for block_q in (192, (64, 192)):
        cut = detail_of(mask, spec_of(1, 1, 384, 512), block_q=block_q, **options)
        check(cut, visible(mask, (1, 1, 384, 512)))
        assert cut.bits is not None


IDS = {
    "ascending": [0, 0, 1, 1, 1, 4, 9, 9],
    "one": [3] * 8,
    "all_padding": [-1] * 8,
    "padding_at_the_end": [0, 0, 1, 1, 5, -1, -7, -1],
    "padding_at_the_start": [-2, -1, 0, 0, 1, 1, 5, 5],
    "padding_at_both": [-2, 3, 3, 4, 4, 6, -1, -1],
    "padding_in_the_middle": [0, 0, -1, 0, 1, 1, -1, 2],
    "descending": [4, 4, 3, 3, 2, 2, 1, 0],
    "back_again": [0, 0, 1, 1, 0, 0, 2, 2],
    "extremes": [-(2**31), 0, 0, 7, 2**31 - 1, 2**31 - 1, -1, -1],
}
UNSORTED = {"padding_in_the_middle", "descending", "back_again"}


@pytest.mark.parametrize("name", IDS)
def test_ids_of_every_order(name):
    ids = np.array(IDS[name], np.int32)
    shuffled = testing.generator(name).permutation(np.concatenate([ids, ids]))
    for q, kv in ((ids, None), (shuffled, ids), (ids, np.append(ids, ids[-1]))):
        mask = pa.Document(q, kv)
        sizes = (1, 1, len(q), len(q if kv is None else kv))
        found = detail_of(mask, spec_of(*sizes), block_q=64, block_kv=64)
        check(found, visible(mask, sizes))
        assert int(found.unsorted[0]) == (name in UNSORTED)


def test_each_sequence_decides_for_itself():
    ids = np.array([IDS["ascending"], IDS["back_again"], IDS["padding_at_the_end"]], np.int32)
    for mask in (pa.Document(ids), pa.Document(ids) & pa.Causal(), pa.Document(ids[1], ids)):
        found = detail_of(mask, spec_of(3, 1, 8, 8), block_q=64, block_kv=64)
        np.testing.assert_array_equal(found.unsorted, [0, 1, 0])
        check(found, visible(mask, (3, 1, 8, 8)))


def test_long_documents_against_plain_search():
    rng = testing.generator("long")
    ids = np.sort(rng.integers(-30, 400, (2, 5000)).astype(np.int32), axis=-1)
    mask = pa.Document(ids) & pa.Causal()
    found = detail_of(mask, spec_of(2, 1, 5000, 5000), block_q=64, block_kv=128)
    for row in range(2):
        lo = np.searchsorted(ids[row], ids[row], "left")
        hi = np.minimum(np.searchsorted(ids[row], ids[row], "right"), np.arange(5000) + 1)
        real = ids[row] >= 0
        np.testing.assert_array_equal(found.lo[row, :5000], np.where(real, lo, 0))
        np.testing.assert_array_equal(found.hi[row, :5000], np.where(real, hi, 0))
    np.testing.assert_array_equal(found.unsorted, 0)


def test_padding_is_marked():
    spec = spec_of(2, 1, 300, 260)
    mask = pa.Lengths(jnp.asarray([7, 300]), jnp.asarray([260, 9]))
    found = detail_by_key(mask, spec, block_q=64, block_kv=128)
    for dirty, lens, length in ((found.q_dirty, (7, 300), 300), (found.kv_dirty, (260, 9), 260)):
        index = np.arange(512)
        expected = [(index >= n) & (index < length) for n in lens]
        np.testing.assert_array_equal(dirty, expected)
    assert detail_of(pa.Causal(), spec, block_q=64, block_kv=128).kv_dirty is None


def test_bits_in_chunks_are_the_bits_at_once(monkeypatch):
    mask, pairs = case("predicate_arrays", (2, 2, 300, 70))
    monkeypatch.setattr(details, "CHUNK_PAIRS", 2 * 2 * 256 * 64)
    check(detail_of(mask, spec_of(2, 2, 300, 70), block_q=64, block_kv=64), pairs)


def test_two_documents_are_bits():
    rng = testing.generator("two documents")
    a, b = (jnp.asarray(rng.integers(0, 3, 90), jnp.int32) for _ in range(2))
    mask = pa.Document(a) & pa.Document(b)
    found = detail_of(mask, spec_of(1, 1, 90, 90), block_q=64, block_kv=64)
    assert found.bits is not None
    check(found, visible(mask, (1, 1, 90, 90)))


# One thread's branch, on NumPy arrays of 128 threads.


class Threads:
    """The `machine` of `lanes` with a number for each thread in place of a register."""

    def __init__(self):
        self.reads = 0

    def thread(self):
        return np.arange(128, dtype=np.int32)

    def pointer(self, ref, *index):
        index = np.broadcast_arrays(*(np.asarray(i, np.int64) for i in index), np.zeros(128))[:-1]
        return ref, np.ravel_multi_index(tuple(index), ref.shape)

    def load(self, pointer, at=0, count=1):
        ref, place = pointer
        first = place + at
        assert (first % count == 0).all(), "a read of several elements is aligned"
        self.reads += 1
        return [ref.reshape(-1)[first + n] for n in range(count)]

    def row_size(self, ref):
        return ref.shape[-1]

    def ones_from(self, n):
        assert (n >= 0).all()
        return np.where(n > 31, 0, np.int64(-1) << n).astype(np.int32)

    def clamp(self, x, low, high):
        return np.clip(x, low, high)

    def equal(self, a, b):
        return a == b

    def bit(self, word, n):
        return ((word.astype(np.int64) >> n) & 1) != 0

    def word(self, conditions):
        assert len(conditions) <= 32
        bits = sum(c.astype(np.int64) << n for n, c in enumerate(conditions))
        return bits.astype(np.uint32).view(np.int32)

    def when(self, flag, registers, change):
        assert (flag == flag[0]).all(), "a branch is uniform"
        return change(registers) if flag[0] else registers

    def choose(self, registers, seen):
        out = []
        for n, register in enumerate(registers):
            keep = np.stack([seen(n // 2, n % 2, e) for e in (0, 1)], axis=-1)
            out.append(np.where(keep, register, -np.inf))
        return out


def to_registers(tile):
    """[64, n] as wgmma lays it out: [column group, row half] of [thread, 2]."""
    quads = tile.reshape(4, 2, 8, -1, 4, 2)  # warp, half, row, group, quad lane, element
    order = quads.transpose(3, 1, 0, 2, 4, 5)
    return list(order.reshape(-1, 128, 2))


def from_registers(registers):
    order = np.stack(registers).reshape(-1, 2, 4, 8, 4, 2)
    return order.transpose(2, 1, 3, 0, 4, 5).reshape(64, -1)


def masked_by_threads(detail, place, columns):
    names, refs = masking._needed(detail)
    arrays = Detail(**{n: np.asarray(x) for n, x in zip(names, refs, strict=True)})
    registers = to_registers(np.zeros((64, columns), np.float32))
    at = masking.Place(*(np.int32(x) for x in place))
    return from_registers(masking._apply(Threads(), registers, arrays, at, columns)) == 0


def seen_from(mask, sizes, by_key, **blocks):
    """Detail, pairs [batch, heads, rows, columns] and which columns count, from either side."""
    pairs = visible(mask, sizes)
    spec = spec_of(*sizes)
    if not by_key:
        return detail_of(mask, spec, **blocks), pairs, np.full_like(pairs[:, :, :1], True)
    # Queries that see nothing may count as seeing: their probabilities are 0.
    turned = pairs.swapaxes(-1, -2)
    return detail_by_key(mask, spec, **blocks), turned, turned.any(-2, keepdims=True)


def grown(x, rows, columns):
    """More columns and rows of False."""
    return np.pad(x, [(0, 0), (0, 0), (0, rows - x.shape[2]), (0, columns - x.shape[3])])


@pytest.mark.parametrize("columns", [64, 128, 192])
@pytest.mark.parametrize("by_key", [False, True], ids=["by_query", "by_key"])
@pytest.mark.parametrize("name", KINDS)
def test_threads(name, by_key, columns):
    sizes = (2, 2, 200, 150)
    mask, _ = case(name, sizes)
    blocks = {"block_q": 64, "block_kv": 128 if name == "full" else 64}
    detail, pairs, counts = seen_from(mask, sizes, by_key, **blocks)
    length = pairs.shape[2]
    expected, counts = grown(pairs, 576, 576), grown(counts, 1, 576)
    # Rows that no tile of a kernel reaches: arrays are padded to whole 256 rows only.
    detail = jax.tree.map(lambda x: widened(np.asarray(x)), detail)
    starts = itertools.product(range(0, length, 64), range(0, pairs.shape[3], columns))
    for b, h, (row, column) in itertools.product(range(2), range(2), starts):
        got = masked_by_threads(detail, masking.Place(b, h, row, column), columns)
        at = np.s_[b, h, row : row + 64, column : column + columns]
        got = got & counts[b, h, :, column : column + columns] if by_key else got
        np.testing.assert_array_equal(got, expected[at])


def widened(x):
    """More zeros at the end of the last two axes, as far as the widest tile of a test reaches."""
    pad = [(0, 0)] * x.ndim
    if x.ndim == 4:
        pad[2], pad[3] = (0, 320), (0, 16)
    elif x.ndim == 2:
        pad[1] = (0, 320)
    return np.pad(x, pad)


# Kernels: the interpreter, lowering, and a GPU.


def mask_kernel(detail, s, *, columns, call):
    """Masks every tile [64, columns] of s [batch, heads, rows, n] whose column block is even."""
    leaves, tree = jax.tree.flatten(detail)
    batch, heads, rows, length = s.shape

    def body(*refs):
        *operands, s_ref, out_ref, tile = refs
        arrays = jax.tree.unflatten(tree, operands)
        b, h, i = (lax.axis_index(n) for n in "bhi")

        def step(j, _):
            at = (b, h, pl.ds(i * 64, 64), pl.ds(j * columns, columns))
            x = s_ref[at] if call.interpret else load_tile(s_ref.at[at])
            place = masking.Place(b, h, i * 64, j * columns)
            masked = masking.mask_tile(x, arrays, place, (j & 1) == 0, call=call)
            out_ref.at[at][...] = masked

        lax.fori_loop(jnp.int32(0), jnp.int32(length // columns), step, None)
        del tile

    return mosaic_kernel(body, s, (batch, heads, rows // 64))(*leaves, s)


def load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def mosaic_kernel(body, out, grid, scratch=(None,)):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out.shape, out.dtype),
        scratch_types=list(scratch),
        grid=grid,
        grid_names=tuple("bhi"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def rounded(n, to=256):
    return -(-n // to) * to


def check_kernel(name, sizes, columns, *, interpret):
    """The kernel by query and by key against the definition; odd column blocks are untouched."""
    mask, _ = case(name, sizes)
    call = call_of(sizes, interpret=interpret)
    for by_key in (False, True):
        detail, pairs, counts = seen_from(mask, sizes, by_key, block_q=64, block_kv=128)
        if not masking._needed(detail)[0]:
            continue
        shape = (*pairs.shape[:2], rounded(pairs.shape[2]), rounded(pairs.shape[3]))
        s = jnp.asarray(testing.generator("s").standard_normal(shape, np.float32))
        run = jax.jit(functools.partial(mask_kernel, columns=columns, call=call))
        got = np.asarray(run(jax.tree.map(jnp.asarray, detail), s))
        even = (np.arange(shape[3]) // columns) % 2 == 0
        expected = np.where(grown(pairs, *shape[2:]) | ~even, np.asarray(s), -np.inf)
        rows = slice(0, pairs.shape[2])
        compared = grown(counts, 1, shape[3]) | ~even
        # Keys past the end are hidden where a block reaches past it.
        compared |= not by_key and pairs.shape[3] % 128 != 0
        at = np.broadcast_to(compared, got[:, :, rows].shape)
        np.testing.assert_array_equal(got[:, :, rows][at], expected[:, :, rows][at])


@pytest.mark.parametrize("name", KINDS)
def test_interpreter(name):
    with pa.interpret(detect_races=True):
        check_kernel(name, (2, 1, 70, 140), 128, interpret=True)


def arguments(kind, q_rows=512, kv_rows=512):
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    span = {"lo": ints(2, q_rows), "hi": ints(2, q_rows)}
    ids = {"q_ids": ints(2, q_rows), "kv_ids": ints(2, kv_rows), "unsorted": ints(2)}
    bits = {"bits": ints(2, 4, q_rows, kv_rows // 32)}
    fields = {"span": span, "hi": {"hi": span["hi"]}, "ids": {**span, **ids}, "bits": bits}
    return Detail(**fields[kind])


@pytest.mark.parametrize("kind", ["hi", "span", "ids", "bits"])
def test_lowers_for_a_gpu(kind):
    call = call_of((2, 4, 512, 512), interpret=False)
    fn = functools.partial(mask_kernel, columns=128, call=call)
    s = jax.ShapeDtypeStruct((2, 4, 512, 512), jnp.float32)
    jax.jit(fn).trace(arguments(kind), s).lower(lowering_platforms=("cuda",))


def clear_kernel(values, dirty, *, call):
    """Copies values [batch, len, dim] through shared memory, in blocks of 192 rows."""
    _, length, dim = values.shape
    rows = 192
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def body(values_ref, dirty_ref, out_ref, tile, barrier):
        b, _, i = (lax.axis_index(n) for n in "bhi")
        at = (b, pl.ds(i * rows, rows))
        plgpu.copy_gmem_to_smem(values_ref.at[at], tile, barrier)
        plgpu.barrier_wait(barrier)
        masking.clear_rows(tile, dirty_ref, b, i * rows, i != 1, call=call)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    scratch = plgpu.SMEM((rows, dim), values.dtype, transforms=transforms), plgpu.Barrier()
    grid = (values.shape[0], 1, length // rows)
    return mosaic_kernel(body, values, grid, scratch)(values, dirty)


def test_clearing_lowers_for_a_gpu():
    call = call_of((2, 4, 512, 512), interpret=False)
    values = jax.ShapeDtypeStruct((2, 576, 128), jnp.bfloat16)
    dirty = jax.ShapeDtypeStruct((2, 768), jnp.int32)
    fn = functools.partial(clear_kernel, call=call)
    jax.jit(fn).trace(values, dirty).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name, columns):
    check_kernel(name, (2, 4, 300, 450), columns, interpret=False)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_clearing_on_a_gpu(dim):
    rng = testing.generator("clear")
    values = jnp.asarray(rng.standard_normal((2, 576, dim)), jnp.bfloat16)
    dirty = np.pad(rng.integers(0, 2, (2, 576)).astype(np.int32), ((0, 0), (0, 192)))
    values = jnp.where(dirty[:, :576, None] == 1, jnp.nan, values)
    call = call_of((2, 4, 512, 512), interpret=False)
    got = jax.jit(functools.partial(clear_kernel, call=call))(values, dirty)
    asked = (np.arange(576) // 192 != 1)[None, :, None]
    cleared = asked & (dirty[:, :576, None] == 1)
    # As float32: NumPy does not take two bfloat16 NaNs for equal.
    got, values = (np.asarray(x).astype(np.float32) for x in (got, values))
    np.testing.assert_array_equal(got, np.where(cleared, np.float32(0), values))
