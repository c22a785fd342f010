"""Tiles of sequences of any length, and their order, found on the device by plain JAX.

    units   a sequence's new tokens in 64s, times the query heads of a KV head: a warpgroup's rows
    tiles   consecutive units of one sequence, as many as there are consumers; for every KV head

    150 tokens, two heads a KV head: units      0a 0b 1a | 1b 2a 2b       of heads a and b
    200 tokens, one head:                       .  .  0  | 1  2  3        what is short comes first

Heads of a KV head lie side by side in a tile, so that its warpgroups see nearly the same keys. All
arrays have the size of the most tiles that so many tokens and sequences can make; which of them
exist, of what sequence, and in what order, longest first, is in their numbers. So new lengths,
tables and offsets compile nothing.

The padding after cu_seqlens[-1] is one more sequence, of length 0, so that its rows get 0 and -inf.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import work
from pallas_attn.decode_call import DecodeCall, DecodeInputs
from pallas_attn.mask_core import FAR
from pallas_attn.masks import And
from pallas_attn.mosaic_gpu import schedule
from pallas_attn.mosaic_gpu.common import UNIT
from pallas_attn.mosaic_gpu.detail import Detail, open_start, padded_rows
from pallas_attn.spec import Spec

# A table searched by comparing with all of its entries, one fused pass, up to this many of them.
_PAIRS = 1 << 24
# Numbers of a row of `Tables.units`: TMA takes a multiple of 128 bytes.
TOLD = 32


@dataclasses.dataclass(frozen=True)
class Plan(schedule.Team):
    """The static schedule of a serving call.

    Attributes:
        tiles: the most tiles of a KV head.
        blocks: thread blocks.
        piece: keys that lie together, and that one TMA load takes.
    """

    tiles: int
    blocks: int
    piece: int


class Tables(NamedTuple):
    """What follows from the lengths, int32; tiles in the order in which they are taken.

    Attributes:
        units: [tiles · kv_heads, consumers, TOLD]: what `schedule.Work` is told, and zeros.
        tiles: [tiles, 4]: for the producer: sequence, first block of keys, how many, and the last
            piece of the sequence's keys.
        total: [1]: tiles that exist, of all KV heads.
        detail: a `detail.Detail`: the span of keys that each token sees.
    """

    units: Any
    tiles: Any
    total: Any
    detail: Detail


def plan(call: DecodeCall, spec: Spec, piece: int) -> Plan:
    """The schedule of a call.

    Args:
        call: static facts.
        spec: the same as a call of the forward kernel.
        piece: as in `Plan`.
    """
    wgs, asked = call.tiles.block_rows // UNIT, call.spec
    if asked.q_len is not None:
        per_sequence = -(-(-(-asked.q_len // UNIT) * asked.group) // wgs)
        tiles = asked.batch * per_sequence
    else:
        tiles = (asked.tokens // UNIT + asked.members) * asked.group // wgs + asked.members
    blocks = min(2, tiles) if call.interpret else call.sms
    return Plan(
        **schedule.team(wgs, spec, stage_out=True, interpret=call.interpret, ragged=True),
        tiles=tiles,
        blocks=min(blocks, tiles * asked.kv_heads),
        piece=piece,
    )


def tables(call: DecodeCall, plan: Plan, inputs: DecodeInputs) -> Tables:
    """Everything that the kernel reads besides q, k, v and the page table."""
    spec = call.spec
    found = work.sequence(call, inputs, jnp.arange(spec.members, dtype=np.int32), _read)
    units = _ceil_div(found.q_num, UNIT) * np.int32(spec.group)
    tiles = _ceil_div(units, plan.num_wgs)
    ends = jnp.cumsum(tiles, dtype=np.int32)
    total = jnp.minimum(ends[-1], np.int32(plan.tiles))
    numbers = _Numbers(found.q_start, found.q_num, found.kv_len, units, tiles, ends, total)
    _, every = _describe(call, plan, inputs.mask, numbers, jnp.arange(plan.tiles, dtype=np.int32))
    order = jnp.argsort(-every["cost"], stable=True).astype(np.int32)
    fields, tile = _describe(call, plan, inputs.mask, numbers, order)
    last = _div(jnp.maximum(tile["kv_len"] - np.int32(1), np.int32(0)), plan.piece)
    return Tables(
        _for_heads(call, fields),
        jnp.stack([tile["seq"], tile["first"], tile["count"], last], axis=-1),
        (total * np.int32(spec.kv_heads)).reshape(1),
        _detail(call, inputs, found),
    )


class _Numbers(NamedTuple):
    """Of each sequence, but for `total`: the tiles of all of them."""

    q_start: Any
    q_num: Any
    kv_len: Any
    units: Any
    tiles: Any
    ends: Any
    total: Any


def _div(x, by: int):
    return lax.div(x, jnp.full_like(x, by))


def _ceil_div(x, by: int):
    return work.ceil_div(x, jnp.full_like(x, by))


def _read(array, index, where):
    inside = jnp.clip(index, np.int32(0), np.int32(array.shape[0] - 1))
    return jnp.where(where, array[inside], np.int32(0))


def _passed(ends, index):
    """How many of the ascending `ends` each index has reached."""
    if ends.shape[0] * index.shape[0] <= _PAIRS:
        return (index[:, None] >= ends[None, :]).sum(-1, dtype=np.int32)
    found = jnp.searchsorted(ends, index, side="right", method="scan_unrolled")
    return found.astype(np.int32)


def _bounds(call: DecodeCall, mask, seq, position, kv_len):
    """The span [lo, hi) of keys that tokens at some positions see."""
    found = work.row_span(mask, jnp.minimum(seq, np.int32(call.spec.batch - 1)), position, kv_len)
    assert found is not None
    return tuple(
        jnp.clip(jnp.broadcast_to(x, position.shape).astype(np.int32), np.int32(0), kv_len)
        for x in found
    )


def _describe(call: DecodeCall, plan: Plan, mask, numbers: _Numbers, tile):
    """Facts of some tiles: of each consumer's share [tiles, consumers], and of the whole [tiles].

    Both ends of a span move forward with the token: a unit's first and last token bound the others.
    """
    zero, size = np.int32(0), call.tiles.block_kv
    seq = jnp.minimum(_passed(numbers.ends, tile), np.int32(call.spec.members - 1))
    own = _Numbers(*(x[seq] if x.ndim else x for x in numbers))
    index, short = tile - (own.ends - own.tiles), own.tiles * np.int32(plan.num_wgs) - own.units
    consumer = jnp.arange(plan.num_wgs, dtype=np.int32)[None]
    number = (index * np.int32(plan.num_wgs) - short)[:, None] + consumer
    real = tile < numbers.total
    exists = real[:, None] & (number >= zero)
    number = jnp.maximum(number, zero)
    q_unit = _div(number, call.spec.group)
    row, kv_len = q_unit * np.int32(UNIT), own.kv_len[:, None]
    rows = jnp.clip(own.q_num[:, None] - row, zero, np.int32(UNIT))
    rows = jnp.where(exists, rows, zero)
    position = kv_len - own.q_num[:, None] + row
    last_row = position + jnp.maximum(rows - np.int32(1), zero)
    low, inner_high = _bounds(call, mask, seq[:, None], position, kv_len)
    inner_low, high = _bounds(call, mask, seq[:, None], last_row, kv_len)
    first, last = _div(low, size), _ceil_div(high, size)
    sees = (rows > zero) & (low < high)
    start = jnp.where(sees, first, np.int32(FAR)).min(1, keepdims=True)
    count = jnp.maximum(jnp.where(sees, last, zero).max(1, keepdims=True) - start, zero)
    start = jnp.where(count > zero, start, zero)
    before = jnp.where(sees, first - start, count)
    blocks = jnp.where(sees, last - first, zero)
    first = start + before
    turns = _turns(plan, sees, first, last)
    fields = {
        "count": blocks, "before": before, "after": count - before - blocks, "first": first,
        "full_first": _ceil_div(inner_low, size),
        "full_last": _div(inner_high, size),
        "q_start": own.q_start[:, None] + row, "head": number - q_unit * np.int32(call.spec.group),
        "exists": rows, "turn_first": turns[0], "turn_last": turns[1],
        "dirty": jnp.broadcast_to(kv_len, rows.shape),
    }  # fmt: skip
    cost = jnp.where(real, count[:, 0] + np.int32(1), np.int32(-1))
    whole = {
        "seq": jnp.minimum(seq, np.int32(call.spec.batch - 1)), "first": start[:, 0],
        "count": count[:, 0], "kv_len": own.kv_len, "cost": cost,
    }  # fmt: skip
    return fields, whole


def _turns(plan: Plan, sees, first, last):
    """As `schedule._turns`: consumers take turns at the blocks that all of them see."""
    zero = np.int32(0)
    start = jnp.where(sees, first, zero).max(1, keepdims=True)
    end = jnp.where(sees, last, zero).min(1, keepdims=True)
    last_turn = end - first - np.int32(plan.overlap)
    return start - first, jnp.where(start < end, last_turn, np.int32(-1))


def _for_heads(call: DecodeCall, fields: dict):
    """What consumers are told, in the order of `schedule.FIELDS`, for every KV head in turn."""
    spec = call.spec
    tiles, wgs = fields["count"].shape
    shape = (tiles, spec.kv_heads, wgs)
    kv_head = jnp.arange(spec.kv_heads, dtype=np.int32)[None, :, None]
    found = {name: jnp.broadcast_to(x[:, None], shape) for name, x in fields.items()}
    found["head"] = found["head"] + kv_head * np.int32(spec.group)
    none = jnp.zeros(shape, np.int32)
    unused = [none] * (TOLD - len(schedule.FIELDS))
    stacked = [found.get(name, none) for name in schedule.FIELDS] + unused
    return jnp.stack(stacked, axis=-1).reshape(tiles * spec.kv_heads, wgs, TOLD)


def _detail(call: DecodeCall, inputs: DecodeInputs, found: work.Sequence) -> Detail:
    """The span of every token, padded so that units may reach past the last one."""
    spec = call.spec
    index = jnp.arange(padded_rows(spec.tokens + UNIT), dtype=np.int32)
    seq = _passed(inputs.cu_seqlens[1:], index) if spec.q_len is None else _div(index, spec.q_len)
    seq = jnp.minimum(seq, np.int32(spec.members - 1))
    kv_len = found.kv_len[seq]
    position = kv_len - found.q_num[seq] + index - found.q_start[seq]
    low, high = _bounds(call, inputs.mask, seq, position, kv_len)
    high = jnp.where(index < np.int32(spec.tokens), high, np.int32(0))
    return Detail(lo=None if _starts_at_0(inputs.mask) else low[None], hi=high[None])


def _starts_at_0(mask) -> bool:
    if isinstance(mask, And):
        return _starts_at_0(mask.a) and _starts_at_0(mask.b)
    return open_start(mask)


def tiles_of_block(plan: Plan, total, block):
    """How many tiles a thread block takes; they are dealt out forth and back."""
    rounds = work.ceil_div(total, jnp.int32(plan.blocks))
    last = schedule.number(plan, rounds - 1, block)
    return rounds - jnp.where(last < total, jnp.int32(0), jnp.int32(1))


__all__ = ["Plan", "Tables", "plan", "tables", "tiles_of_block"]
