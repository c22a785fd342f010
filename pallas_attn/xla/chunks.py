"""How the plain-JAX backend cuts a call into chunks, shared by its forward and backward.

A tile is [batch, kv_heads, group, rows, keys]; the tile maths, which knows [rows, keys] only, is
mapped over the three leading axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.mask_core import Position, TileGrid
from pallas_attn.spec import Spec


def over_heads(fn):
    """Maps a function of tiles and row vectors over batch, kv_heads and group."""
    return jax.vmap(jax.vmap(jax.vmap(fn)))


def accumulator_dtype(spec: Spec):
    """float32, or float64 for float64 operands."""
    return jnp.float64 if spec.dtype == "float64" else jnp.float32


def einsum(expression: str, a, b, spec: Spec):
    """A matmul in the operands' dtype that accumulates in float32 (or float64)."""
    return jnp.einsum(
        expression,
        a,
        b,
        preferred_element_type=accumulator_dtype(spec),
        precision=lax.Precision.HIGHEST,
    )


def pad_to(x, size: int, axis: int):
    """Zeros after the end of an axis."""
    short = size - x.shape[axis]
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x


def split_q(x, spec: Spec, grid: TileGrid):
    """[batch, q_len, q_heads, d] as [q blocks, batch, kv_heads, group, block_q, d]."""
    x = pad_to(x, grid.num_q * grid.block_q, 1)
    shape = (spec.batch, grid.num_q, grid.block_q, spec.kv_heads, spec.group, x.shape[-1])
    return x.reshape(shape).transpose(1, 0, 3, 4, 2, 5)


def merge_q(x, spec: Spec):
    """The inverse of `split_q`."""
    blocks, _, _, _, block_q, dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(spec.batch, blocks * block_q, spec.q_heads, dim)
    return x[:, : spec.q_len]


def split_rows(x, spec: Spec, grid: TileGrid, fill):
    """[batch, q_heads, q_len] as [q blocks, batch, kv_heads, group, block_q]."""
    short = grid.num_q * grid.block_q - spec.q_len
    x = jnp.pad(x, ((0, 0), (0, 0), (0, short)), constant_values=fill)
    shape = (spec.batch, spec.kv_heads, spec.group, grid.num_q, grid.block_q)
    return x.reshape(shape).transpose(3, 0, 1, 2, 4)


def merge_rows(x, spec: Spec):
    """The inverse of `split_rows`."""
    blocks, _, _, _, block_q = x.shape
    x = x.transpose(1, 2, 3, 0, 4).reshape(spec.batch, spec.q_heads, blocks * block_q)
    return x[:, :, : spec.q_len]


def split_kv(x, spec: Spec, grid: TileGrid):
    """[batch, kv_len, kv_heads, d] as [kv blocks, batch, kv_heads, block_kv, d]."""
    x = pad_to(x, grid.num_kv * grid.block_kv, 1)
    shape = (spec.batch, grid.num_kv, grid.block_kv, spec.kv_heads, x.shape[-1])
    return x.reshape(shape).transpose(1, 0, 3, 2, 4)


def merge_kv(x, spec: Spec):
    """The inverse of `split_kv`."""
    blocks, _, _, block_kv, dim = x.shape
    x = x.transpose(1, 0, 3, 2, 4).reshape(spec.batch, blocks * block_kv, spec.kv_heads, dim)
    return x[:, : spec.kv_len]


def position(spec: Spec, grid: TileGrid, q_block, kv_block) -> Position:
    """Where the mask is asked for one tile; indices past the ends are clamped."""

    def index(block, size: int, length: int, axis: int):
        i = block * np.int32(size) + jnp.arange(size, dtype=np.int32)
        return jnp.expand_dims(
            jnp.minimum(i, np.int32(length - 1)), tuple({0, 1, 2, 3, 4} - {axis})
        )

    batch = jnp.arange(spec.batch, dtype=np.int32).reshape(-1, 1, 1, 1, 1)
    head = jnp.arange(spec.q_heads, dtype=np.int32).reshape(1, spec.kv_heads, spec.group, 1, 1)
    q = index(q_block, grid.block_q, spec.q_len, 3)
    kv = index(kv_block, grid.block_kv, spec.kv_len, 4)
    return Position(batch, head, q, kv, spec.q_len, spec.kv_len)


def visible(mask, spec: Spec, grid: TileGrid, q_block, kv_block):
    """The mask on one tile, the end of the keys included."""
    kv = kv_block * np.int32(grid.block_kv) + jnp.arange(grid.block_kv, dtype=np.int32)
    inside = (kv < np.int32(spec.kv_len)).reshape(1, 1, 1, 1, -1)
    return mask.allowed(position(spec, grid, q_block, kv_block)) & inside


def bias_tile(bias, spec: Spec, grid: TileGrid, q_block, kv_block):
    """The bias on one tile, broadcastable to it, or None."""
    if bias is None:
        return None
    for axis, block, size, blocks in (
        (2, q_block, grid.block_q, grid.num_q),
        (3, kv_block, grid.block_kv, grid.num_kv),
    ):
        if bias.shape[axis] != 1:
            bias = lax.dynamic_slice_in_dim(
                pad_to(bias, blocks * size, axis), block * size, size, axis
            )
    batch, heads, rows, keys = bias.shape
    split = (spec.kv_heads, spec.group) if heads > 1 else (1, 1)
    return bias.reshape(batch, *split, rows, keys).astype(accumulator_dtype(spec))


def without_padding(mask, spec: Spec, q=(), kv=()):
    """Zeros in rows that the mask declares padding, of q- and kv-like arrays: NaN must not leak."""
    batch = np.arange(spec.batch, dtype=np.int32)[:, None]

    def clean(arrays, valid):
        if valid is None:
            return tuple(arrays)
        return tuple(jnp.where(valid[:, :, None, None], x, jnp.zeros_like(x)) for x in arrays)

    q_index = np.arange(spec.q_len, dtype=np.int32)[None, :]
    kv_index = np.arange(spec.kv_len, dtype=np.int32)[None, :]
    return clean(q, mask.q_valid(batch, q_index)), clean(kv, mask.kv_valid(batch, kv_index))


def visited(mask, grid: TileGrid):
    """Bool [num_q, num_kv]: whether any sequence and head sees anything in a tile."""
    some, _ = mask.tiles(grid)
    some = jnp.asarray(some)
    some = some.any(axis=tuple(range(some.ndim - 2)))
    return jnp.broadcast_to(some, (grid.num_q, grid.num_kv))
