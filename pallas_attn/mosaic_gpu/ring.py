"""The ring of shared-memory slots between the producer warpgroup and the consumers.

A slot goes round: the producer waits until it is empty, and starts a TMA load that completes its
full barrier; each consumer waits until it is full, reads, and arrives at its empty barrier. All
waits and arrivals on these barriers are here, by name.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Slots(NamedTuple):
    """Shared memory [slots, ...] and its two barriers a slot."""

    data: Any
    full: Any
    empty: Any


def barriers(slots: int, readers: int, loads: int = 1):
    """(full, empty) barriers: `loads` loads complete the first, `readers` arrivals the second."""
    return (
        plgpu.Barrier(num_arrivals=loads, num_barriers=slots),
        plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
    )


def next_slot(slot, count: int):
    """The slot after this one, going round."""
    if count & (count - 1) == 0:
        return (slot + jnp.int32(1)) & jnp.int32(count - 1)
    return jnp.where(slot == count - 1, jnp.int32(0), slot + jnp.int32(1))


def load(slots: Slots, slot, source, *, used) -> None:
    """Producer: waits until the slot is empty and starts a load into it.

    Args:
        slots: where to.
        slot: which.
        source: a slice of global memory, or an iterator over as many as the full barrier counts
            loads: the slot's rows, piece by piece.
        used: whether the slot held anything before, bool scalar; None when that was waited for.
    """
    if used is not None:
        pl.when(used)(lambda: wait_empty(slots, slot))
    if not isinstance(source, Iterator):
        start(source, slots, slot, slots.data.at[slot])
        return
    for i, piece in enumerate(source):
        rows = piece.shape[0]
        start(piece, slots, slot, slots.data.at[slot, pl.ds(i * rows, rows)])


def start(source, slots: Slots, slot, place) -> None:
    """Producer: starts a load to a place in shared memory, which counts for the slot."""
    plgpu.copy_gmem_to_smem(source, place, slots.full.at[slot])


def wait_empty(slots: Slots, slot) -> None:
    """Producer: until every reader has released the slot."""
    plgpu.barrier_wait(slots.empty.at[slot])


def wait_full(slots: Slots, slot) -> None:
    """Consumer: until the slot's load has landed."""
    plgpu.barrier_wait(slots.full.at[slot])


def release(slots: Slots, slot) -> None:
    """Consumer: this warpgroup has read the slot."""
    plgpu.barrier_arrive(slots.empty.at[slot])
