"""Intervals of keys that queries see, turned into intervals of queries that see a key.

Along the queries that see anything bounds never descend, for every mask that is one interval a row
but documents. So the queries that see a key are an interval too, but for some within it that see
nothing at all.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.mask_core import FAR, xp_of


def by_key(lo, hi, q_len: int, kv_len: int):
    """The queries [first, last) that see each key.

    Args:
        lo, hi: int32 [batch | 1, q_len]: query i sees keys [lo, hi). None is no bound.
        q_len, kv_len: the lengths.

    Returns:
        int32 [batch | 1, kv_len] each; None is no bound.
    """
    if lo is None and hi is None:
        return None, None
    lead = (1, q_len)
    lo, hi = (
        None if x is None else xp_of(x).broadcast_to(x, (x.shape[0], q_len)) for x in (lo, hi)
    )
    xp, keys = xp_of(*(x for x in (lo, hi) if x is not None)), np.arange(kv_len, dtype=np.int32)
    sees = np.full(lead, True) if lo is None or hi is None else lo < hi
    first = last = None
    if hi is not None:
        # Never descending, with those that see nothing left out.
        first = _count_up_to(xp, _running_max(xp, xp.where(sees, hi, np.int32(0))), keys)
    if lo is not None:
        starts = xp.where(sees, lo, np.int32(FAR))
        starts = -_running_max(xp, -starts[:, ::-1])[:, ::-1]
        last = _count_up_to(xp, starts, keys)
    return first, last


def _running_max(xp, x):
    return np.maximum.accumulate(x, axis=1) if xp is np else lax.cummax(x, axis=1)


def _count_up_to(xp, ascending, keys):
    """For each key, how many of the ascending numbers are not above it."""
    if xp is np:
        rows = [np.searchsorted(row, keys, side="right") for row in ascending]
        return np.stack(rows).astype(np.int32)

    def one(row):
        found = jnp.searchsorted(row, keys, side="right", method="scan_unrolled")
        return found.astype(jnp.int32)

    return jax.vmap(one)(ascending)


__all__ = ["by_key"]
