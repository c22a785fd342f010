"""Applies `Detail` to a tile in registers, inside kernels.

A [64, n] tile lies in registers as wgmma leaves it: a thread holds two rows and, of every 8
columns, two. So all that a thread's row needs of a span is a word of 32 bits for every 128 columns,
made from two numbers; and a word of packed bits serves four of its groups of 8 columns. Nothing of
this is kept in registers between blocks: all of it, loads too, stands behind a uniform branch that
fully visible blocks do not take.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import _compat
from pallas_attn.call import Call
from pallas_attn.mosaic_gpu.common import CHUNK, TILE, with_registers
from pallas_attn.mosaic_gpu.detail import Detail
from pallas_attn.mosaic_gpu.lanes import Emitter, first_column, first_row

SCALAR = plgpu.Layout.WG_SPLAT


class Word(NamedTuple):
    """An int32 in shared memory, plus a scalar: read where it is used, held in no register before.

    ref: int32 [n]; index, plus: int32 scalars, the latter or a Python int.
    """

    ref: Any
    index: Any
    plus: Any = 0

    def read(self):
        """The number."""
        return self.ref[self.index] + self.plus


class Place(NamedTuple):
    """Where a tile lies: int32 scalars, or `Word`s; batch and head count absolutely."""

    batch: Any
    head: Any
    q_start: Any
    kv_start: Any


def mask_tile(s, detail: Detail, place: Place, partial, *, call: Call, compare=None):
    """-inf where a pair is not visible.

    Args:
        s: [64, n] float32, rows are queries; or keys, with a `detail_by_key` and q_start and
            kv_start in each other's place.
        detail: references.
        place: where the tile begins.
        partial: scalar; where it is false nothing happens.
        call: static facts.
        compare: scalar; where it is true ids are compared, too, in a branch of their own, which
            takes fewer registers than one inside the other. None: as `detail.unsorted` says.
    """
    names, refs = _needed(detail)
    if not names:
        return s
    if call.interpret:
        chosen = Detail(**dict(zip(names, refs, strict=True)))
        place = Place(*(x.read() if isinstance(x, Word) else x for x in place))
        return lax.cond(
            jnp.asarray(partial).astype(bool),
            lambda: jnp.where(_visible(chosen, place, s.shape), s, -jnp.inf),
            lambda: s,
        )
    out = plgpu.ShapeDtypeStruct(s.shape, jnp.dtype(jnp.float32), layout=TILE)
    fields = _fields(place, detail, refs)
    words = [x.ref for x in fields if x is not None and x.ref is not None]
    scalars = [partial, 0 if compare is None else compare]
    for x in fields:
        if x is not None:
            scalars += [x.index] if isinstance(x.plus, int) else [x.index, x.plus]
    refs_type = (_compat.READ_ONLY,) * (len(refs) + len(words))
    scalar_types = (SCALAR,) * len(scalars)

    @plgpu.inline_mgpu(arg_types=(TILE, scalar_types, refs_type), return_type=out)
    def emit(_, tile, scalars, all_refs):
        machine = Emitter()
        condition, comparing, *rest = (x.registers.flat[0] for x in scalars)
        arrays = Detail(**dict(zip(names, all_refs[: len(names)], strict=True)))

        def field(word, words, numbers):
            index = machine.fresh(next(numbers))
            plus = word.plus if isinstance(word.plus, int) else machine.fresh(next(numbers))
            return (index if word.ref is None else machine.load_shared(next(words), index)) + plus

        def change(registers, arrays=arrays):
            left = iter(all_refs[len(names) :]), iter(rest)
            at = Place(*(0 if x is None else field(x, *left) for x in fields))
            return _apply(machine, registers, arrays, at, s.shape[1])

        registers = list(tile.registers.flat)
        assert len(registers) == s.shape[1] // 4, "two neighbouring columns a register"
        for flag, part in _branches(arrays, condition, comparing, apart=compare is not None):
            decide = functools.partial(change, arrays=part)
            registers = machine.when(machine.differs(flag, 0), registers, decide)
        return with_registers(tile, registers)

    return emit(s, tuple(jnp.asarray(x, jnp.int32) for x in scalars), (*refs, *words))


def hide_tile(s, when, *, call: Call):
    """-inf everywhere where `when`, a scalar, is true; a border over which no code moves."""
    if call.interpret:
        return jnp.where(jnp.asarray(when).astype(bool), -jnp.inf, s)
    out = plgpu.ShapeDtypeStruct(s.shape, jnp.dtype(jnp.float32), layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, SCALAR), return_type=out)
    def emit(_, tile, when):
        machine = Emitter()
        (condition,) = when.registers.flat

        def hide(registers):
            return machine.choose(registers, lambda *_: machine.differs(0, 0))

        registers = machine.when(machine.differs(condition, 0), list(tile.registers.flat), hide)
        return with_registers(tile, registers)

    return emit(s, jnp.asarray(when, jnp.int32))


def _needed(detail: Detail):
    """Names and references of what decides a pair: the bits, or else spans and ids."""
    names = ["lo", "hi", "q_ids", "kv_ids", "unsorted"]
    if detail.bits is not None:
        names = ["bits"]
    names = [n for n in names if getattr(detail, n) is not None]
    return names, [getattr(detail, n) for n in names]


def _branches(detail: Detail, partial, compare, *, apart: bool):
    """(condition, what it decides by) of the branches that a tile takes one after the other."""
    if not apart or detail.unsorted is None:
        return [(partial, detail)]
    spans = dataclasses.replace(detail, q_ids=None, kv_ids=None, unsorted=None)
    return [
        (partial, spans),
        (compare, dataclasses.replace(detail, lo=None, hi=None, unsorted=None)),
    ]


def _fields(place: Place, detail: Detail, refs) -> list[Word | None]:
    """The fields of `Place` as words, a scalar as the index of one without a reference.

    None for what is not looked at: it would take a register for nothing.
    """
    heads = detail.bits is not None and detail.bits.shape[1] > 1
    needs = any(ref.shape[0] > 1 for ref in refs), heads, True, True
    words = [x if isinstance(x, Word) else Word(None, x) for x in place]
    return [word if needed else None for word, needed in zip(words, needs, strict=True)]


# The plain branch.


def _lead(ref, index, axis: int = 0):
    return index if ref.shape[axis] > 1 else 0


def _visible(detail: Detail, place: Place, shape):
    """Which pairs of a tile are visible, by definition."""
    q, kv = (place.q_start, shape[0]), (place.kv_start, shape[1])

    def read(ref, part, axis):
        values = ref[_lead(ref, place.batch), pl.ds(*part)]
        return lax.broadcast_in_dim(values, shape, (axis,))

    seen = jnp.full(shape, True)
    bits = detail.bits
    if bits is not None:
        words = bits[
            _lead(bits, place.batch), _lead(bits, place.head, 1),
            pl.ds(*q), pl.ds(kv[0] // 32, kv[1] // 32),
        ]  # fmt: skip
        words = jnp.repeat(words, 32, axis=1)
        shifts = lax.broadcasted_iota(jnp.int32, shape, 1) & 31
        return (lax.shift_right_logical(words, shifts) & 1) != 0
    keys = place.kv_start + lax.broadcasted_iota(jnp.int32, shape, 1)
    if detail.lo is not None:
        seen = seen & (keys >= read(detail.lo, q, 0))
    if detail.hi is not None:
        seen = seen & (keys < read(detail.hi, q, 0))
    if detail.unsorted is not None:
        unsorted = detail.unsorted[_lead(detail.unsorted, place.batch)]
        same = read(detail.q_ids, q, 0) == read(detail.kv_ids, kv, 1)
        seen = seen & (same | (unsorted == 0))
    return seen


# The branch of one thread. `machine` is described in `lanes`; registers are pairs of neighbouring
# columns, [column group, row half].


def _apply(machine, registers, detail: Detail, at: Place, columns: int):
    """The thread's registers with -inf where a pair is not visible."""
    thread = machine.thread()
    first = first_row(thread), first_column(thread)
    if detail.bits is not None:
        return _apply_bits(machine, registers, detail.bits, at, first, columns)
    return _apply_spans(machine, registers, detail, at, first)


def _when_unsorted(machine, detail: Detail, at: Place, values, change):
    """`change(values)` where ids are to be compared."""
    pointer = machine.pointer(detail.unsorted, _lead_of(detail.unsorted, at.batch))
    (unsorted,) = machine.load(pointer)
    return machine.when(unsorted > 0, values, change)


def _lead_of(ref, index, axis: int = 0):
    """`index`, or 0 where the array has one entry for all."""
    shape = ref.shape if hasattr(ref, "shape") else ref.type.shape
    return index if shape[axis] > 1 else 0


def _apply_bits(machine, registers, bits, at: Place, first, columns: int):
    row, column = first
    lead = _lead_of(bits, at.batch), _lead_of(bits, at.head, 1)
    row_words = machine.row_size(bits)
    pointer = machine.pointer(bits, *lead, at.q_start + row, at.kv_start >> 5)
    count = columns // 32
    width = count & -count if count & 3 else 4
    loaded = [
        [
            word
            for n in range(0, count, width)
            for word in machine.load(pointer, 8 * half * row_words + n, width)
        ]
        for half in (0, 1)
    ]
    # One shift a word, then all tests are of constant bits.
    words = [[word >> column for word in half] for half in loaded]

    def seen(group, half, e):
        return machine.bit(words[half][group // 4], 8 * (group % 4) + e)

    return machine.choose(registers, seen)


def _apply_spans(machine, registers, detail: Detail, at: Place, first):
    """The rows' bounds, and ids if need be, become words of 32 elements."""
    chunks = -(-len(registers) // 32)
    words = _span_words(machine, detail, at, first, chunks)
    groups = len(registers) // 2

    def compared(words):
        return _same_ids(machine, words, detail, at, first, groups)

    if detail.unsorted is not None:
        words = _when_unsorted(machine, detail, at, words, compared)
    elif detail.q_ids is not None:
        words = compared(words)

    def seen(group, half, e):
        return machine.bit(words[half * chunks + group // 16], 2 * (group % 16) + e)

    return machine.choose(registers, seen)


def _span_words(machine, detail: Detail, at: Place, first, chunks: int):
    """Which of a row's elements in this thread lie in its span: [row half, 128 columns]."""
    row, column = first
    start = at.kv_start + column
    bounds = [(r, end) for r, end in ((detail.lo, False), (detail.hi, True)) if r is not None]
    pointers = [machine.pointer(r, _lead_of(r, at.batch), at.q_start + row) for r, _ in bounds]
    words = []
    for half, chunk in itertools.product((0, 1), range(chunks)):
        word = None
        for pointer, (_, is_end) in zip(pointers, bounds, strict=True):
            (bound,) = machine.load(pointer, 8 * half)
            x = machine.clamp(bound - start - 128 * chunk, 0, 128)
            # Elements in columns before the bound: two for each whole group of 8, and the rest.
            part = machine.ones_from(((x >> 2) & 62) + machine.clamp(x & 7, 0, 2))
            part = part ^ -1 if is_end else part
            word = part if word is None else word & part
        words.append(machine.ones_from(at.q_start & 0) if word is None else word)
    return words


def _same_ids(machine, words, detail: Detail, at: Place, first, groups: int):
    """Words less the elements whose ids differ."""
    row, column = first
    chunks = len(words) // 2
    pointer = machine.pointer(detail.q_ids, _lead_of(detail.q_ids, at.batch), at.q_start + row)
    mine = [machine.load(pointer, 8 * half)[0] for half in (0, 1)]
    keys = _pairs(machine, detail.kv_ids, at.batch, at.kv_start + column, groups)
    return [
        word & machine.word([machine.equal(mine[n // chunks], key) for key in part])
        for n, word in enumerate(words)
        for part in [keys[32 * (n % chunks) : 32 * (n % chunks + 1)]]
    ]


def _pairs(machine, ref, batch, start, groups: int):
    """Of every 8 numbers the two that a thread's columns have, one after the other."""
    pointer = machine.pointer(ref, _lead_of(ref, batch), start)
    return [x for group in range(groups) for x in machine.load(pointer, 8 * group, 2)]


# Padding in shared memory.


def clear_rows(
    ref, dirty_ref, batch, start, when, *, call: Call, width: int = 64, threads: int = 128
) -> None:
    """Zeroes the rows of a tile in shared memory that are padding, before wgmma reads it.

    Every warpgroup that reads the tile does this for itself: writing the same zeros several times
    is harmless, and its own 128 threads are all that it waits for. The interpreter's race detector
    would object; there nothing is written, and the product is to be told `clean_rows_flags`.

    Args:
        ref: [rows, dim] of 16-bit numbers, in blocks of 8 x `width`, swizzled: which moves bytes
            within a block's row only.
        dirty_ref: `Detail.kv_dirty` or `q_dirty`.
        batch, start: where the tile's rows begin in `dirty_ref`; int32 scalars.
        when: scalar; where it is false nothing happens.
        call: static facts.
        width: of the blocks.
        threads: 128, or 32 where one warp does it.
    """
    if call.interpret:
        return

    @plgpu.inline_mgpu(arg_types=(_tile_type(width), _compat.READ_ONLY, (SCALAR,) * 3))
    def emit(_, tile, dirty, scalars):
        machine = Emitter()
        condition, *scalars = (x.registers.flat[0] for x in scalars)
        with mgpu_utils.when(machine.differs(condition, 0).ir_value):
            batch, start = (machine.fresh(x) for x in scalars)

            def flag_of(row):
                pointer = machine.pointer(dirty, _lead_of(dirty, batch), start + row)
                return machine.load(pointer)[0]

            _zero_rows(machine, tile, ref.shape, width, flag_of, threads)

    emit(ref, dirty_ref, tuple(jnp.asarray(x, jnp.int32) for x in (when, batch, start)))


def clear_rows_from(ref, end, start, when, *, call: Call) -> None:
    """`clear_rows` of the rows from `end` on; the tile's first is `start`."""
    if call.interpret:
        return

    @plgpu.inline_mgpu(arg_types=(_tile_type(CHUNK), (SCALAR,) * 3))
    def emit(_, tile, scalars):
        machine = Emitter()
        condition, *scalars = (x.registers.flat[0] for x in scalars)
        with mgpu_utils.when(machine.differs(condition, 0).ir_value):
            end, start = (machine.fresh(x) for x in scalars)
            _zero_rows(
                machine, tile, ref.shape, CHUNK, lambda row: machine.word([end <= start + row])
            )

    emit(ref, tuple(jnp.asarray(x, jnp.int32) for x in (when, end, start)))


def _tile_type(width: int):
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)
    return plgpu.RefType(transforms)


def _zero_rows(machine, tile, shape, width: int, flag_of, threads: int = 128) -> None:
    """Zeroes the rows whose `flag_of` is not 0, and waits for the threads that do it."""
    (rows, dim), line_bytes = shape, 2 * width
    thread = machine.thread() & (threads - 1)
    for first in range(0, rows, threads):
        row = thread + first
        if rows - first < threads:
            row = machine.clamp(row, 0, rows - 1)
        flag = flag_of(row)
        # Blocks one after the other, of 8 rows each. The last row is cleared by several threads,
        # if there are too many.
        line = (row >> 3) * (16 * dim) + (row & 7) * line_bytes
        lines = [line + chunk * (8 * line_bytes) for chunk in range(dim // width)]
        machine.store_zeros(tile, lines, line_bytes, flag)
    machine.fence()
    machine.sync(threads)


def rows_before(end, start, rows: int, call: Call):
    """What a product of the interpreter is told in place of `clear_rows_from`.

    Args:
        end, start: as there.
        rows: of the tile.
        call: static facts.

    Returns:
        bool [rows], False from `end` on; None on a device.
    """
    if not call.interpret:
        return None
    return start + lax.iota(jnp.int32, rows) < end


def clean_rows_flags(dirty_ref, batch, start, rows: int, call: Call):
    """What a product of the interpreter is told in place of `clear_rows`.

    Args:
        dirty_ref, batch, start: as in `clear_rows`.
        rows: of the tile.
        call: static facts.

    Returns:
        bool [rows], False for padding; None on a device, where shared memory has been cleared.
    """
    if not call.interpret:
        return None
    return dirty_ref[_lead(dirty_ref, batch), pl.ds(start, rows)] == 0


__all__ = [
    "Place",
    "Word",
    "clean_rows_flags",
    "clear_rows",
    "clear_rows_from",
    "mask_tile",
    "rows_before",
]
