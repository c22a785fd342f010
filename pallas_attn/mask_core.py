"""What a mask is: the three questions it answers, how masks combine, and blocks from row spans.

The masks themselves are in `masks.py`. A mask answers at up to three levels of detail, each derived
from the one before unless it knows better:

    allowed(at)     one bool per (query, key) pair: the meaning. Runs in kernels on partial blocks.
    row_span(at)    query row i sees keys [start, end): for masks that are one interval a row. Block
                    bounds follow exactly and cheaply.
    tiles(grid)     per block of queries and keys: may any pair be visible, are all visible?

Numbers given as Python ints are constants of the kernel; arrays (ids, lengths, maps) are its
operands, so new values never recompile. Inside a kernel the arrays of a mask are references,
indexed like arrays.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Past any length; a quarter of int32's range, so that sums of two stay in it.
FAR = 1 << 29


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a mask is asked: int32 indices that broadcast, and the lengths of the sequences."""

    batch: jax.typing.ArrayLike
    head: jax.typing.ArrayLike
    q: jax.typing.ArrayLike
    kv: jax.typing.ArrayLike | None  # None where whole rows are asked about
    q_len: jax.typing.ArrayLike
    kv_len: jax.typing.ArrayLike


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """The blocks that tiles of block_q x block_kv cut a [q_len, kv_len] problem into."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def num_q(self) -> int:
        """Blocks of queries."""
        return -(-self.q_len // self.block_q)

    @property
    def num_kv(self) -> int:
        """Blocks of keys."""
        return -(-self.kv_len // self.block_kv)

    @property
    def q_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last query of each block, [1, 1, num_q, 1]."""
        first = np.arange(self.num_q, dtype=np.int32).reshape(1, 1, -1, 1) * np.int32(self.block_q)
        return first, np.minimum(first + np.int32(self.block_q - 1), np.int32(self.q_len - 1))

    @property
    def kv_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last key of each block, [1, 1, 1, num_kv]."""
        first = np.arange(self.num_kv, dtype=np.int32).reshape(1, 1, 1, -1) * np.int32(
            self.block_kv
        )
        return first, np.minimum(first + np.int32(self.block_kv - 1), np.int32(self.kv_len - 1))


def is_array(x) -> bool:
    """Whether x is an array, a traced one, or a kernel's reference to one."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def xp_of(*xs):
    """NumPy while everything is known on the host, so that static tables cost no device work."""
    return np if all(isinstance(x, int | np.ndarray | np.generic) for x in xs) else jnp


def largest(a, b):
    """Elementwise maximum, on the host where both are."""
    return xp_of(a, b).maximum(a, b)


def smallest(a, b):
    """Elementwise minimum, on the host where both are."""
    return xp_of(a, b).minimum(a, b)


def int_operand(name: str, value, rank: int | None = None):
    """An int as it is, an integer array as int32 of rank 1 or more.

    Raises:
        TypeError: for anything else.
        ValueError: when the array's rank is above `rank`.
    """
    if isinstance(value, bool) or not (isinstance(value, int | np.integer) or is_array(value)):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int or an integer array")
    if not is_array(value) or isinstance(value, np.integer):
        return int(value)
    if rank is not None and value.ndim > rank:
        raise ValueError(f"{name}: got shape {value.shape}, expected rank {rank} or less")
    array = int32_array(name, value)
    return array.reshape(1) if array.ndim == 0 else array


def position_operand(name: str, value):
    """`int_operand` of a length or an offset, [batch] at most, within ±FAR.

    No key is as far as that, so all numbers beyond mean the same; sums with them would wrap around.
    """
    found = int_operand(name, value, 1)
    if is_array(found):
        return jnp.clip(found, np.int32(-FAR), np.int32(FAR))
    return max(-FAR, min(FAR, found))


def int32_array(name: str, value):
    """An integer array as int32. What it cannot hold raises on the host, and saturates on a device.

    Raises:
        TypeError: for another dtype.
        ValueError: for a NumPy array with numbers past int32.
    """
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {value.dtype}, expected an integer dtype")
    limits, given = np.iinfo(np.int32), np.iinfo(value.dtype)
    if given.min >= limits.min and given.max <= limits.max:
        return jnp.asarray(value).astype(np.int32)
    if isinstance(value, np.ndarray):
        low, high = value.min(initial=0), value.max(initial=0)
        if low < limits.min or high > limits.max:
            raise ValueError(f"{name}: got numbers from {low} to {high}, expected what int32 holds")
        return jnp.asarray(value.astype(np.int32))
    # Wrapped around, a large id would turn into padding.
    low, high = (np.asarray(n, value.dtype) for n in (max(given.min, limits.min), limits.max))
    return jnp.clip(value, low, high).astype(np.int32)


def batch_of(*values) -> int:
    """The leading size of arrays [batch or 1, ...]; ints and None say nothing."""
    return max([1, *(x.shape[0] for x in values if is_array(x))])


def at_batch(value, batch):
    """The entry of a per-sequence number: an int as it is, [1] shared, [batch] indexed."""
    if not is_array(value):
        return value
    return value[0] if value.shape[0] == 1 else value[batch]


class Mask:
    """Base of all masks; a pytree whose leaves are the mask's arrays."""

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, _flatten, lambda aux, xs: _unflatten(cls, aux, xs))

    @property
    def runs(self) -> bool:
        """Whether the visible blocks of a row are nearly always one run: tables are cheaper."""
        return False

    def allowed(self, at: Position):
        """Whether each (query, key) pair is visible: bool, broadcasting as the indices do."""
        raise NotImplementedError

    def row_span(self, at: Position) -> tuple[Any, Any] | None:
        """(start, end) of the keys that a query row sees; None when they are no one interval."""
        del at

    def tiles(self, grid: TileGrid):
        """(any, full): bool, broadcasting to [batch, q_heads, num_q, num_kv].

        `any` is False only for blocks with no visible pair, `full` True only for blocks with no
        other.
        """
        span = self.row_span(row_positions(grid))
        if span is None:
            raise NotImplementedError(f"{type(self).__name__} has neither tiles nor row_span")
        return span_tiles(grid, *span)

    def uniform(self, grid: TileGrid) -> bool:
        """Whether each block is known to be visible wholly or not at all, sequence ends aside."""
        del grid
        return False

    def q_valid(self, batch, q) -> Any:
        """Queries that may see anything (bool), or None when all may. Others never matter."""
        del batch, q

    def kv_valid(self, batch, kv) -> Any:
        """Keys that may be seen by anything (bool), or None when all may. Others never matter."""
        del batch, kv

    def check(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        """Raises ValueError when the mask's arrays do not fit the call."""

    def sizes(self) -> tuple[int, int]:
        """(batch, q_heads) that the mask's own arrays imply; 1 where they do not say."""
        return 1, 1

    # NumPy would otherwise try `array & mask` element by element.
    __array_ufunc__ = None

    def __and__(self, other) -> "Mask":
        return And(self, as_mask(other))

    __rand__ = __and__

    def __or__(self, other) -> "Mask":
        return Or(self, as_mask(other))

    __ror__ = __or__

    def __invert__(self) -> "Mask":
        return Not(self)

    def __repr__(self):
        fields = (show(*f) for f in vars(self).items() if f[0] != "_children")
        return f"{type(self).__name__}({', '.join(fields)})"


def show(name: str, value) -> str:
    """One field of a mask's `repr`; arrays by dtype and shape."""
    if is_array(value):
        return f"{name}={value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value) if isinstance(value, Mask) else f"{name}={value!r}"


def _flatten(mask):
    fields = vars(mask)
    # Which fields are children is settled once: JAX also unflattens masks with placeholders as
    # leaves.
    names = fields.get("_children")
    if names is None:
        names = tuple(k for k, v in fields.items() if isinstance(v, Mask | tuple) or is_array(v))
    static = tuple((k, v) for k, v in fields.items() if k not in names and k != "_children")
    return tuple(fields[k] for k in names), (names, static)


def _unflatten(cls, aux, xs):
    names, static = aux
    mask = object.__new__(cls)
    vars(mask).update(static, _children=names, **dict(zip(names, xs, strict=True)))
    return mask


def row_positions(grid: TileGrid) -> Position:
    """Positions of all query rows, broadcasting to [batch, q_len], for `row_span`."""
    q = np.arange(grid.q_len, dtype=np.int32)[None, :]
    batch = np.arange(grid.batch, dtype=np.int32)[:, None]
    return Position(batch, np.zeros((1, 1), np.int32), q, None, grid.q_len, grid.kv_len)


def to_blocks(x, block: int, fill):
    """[..., len] cut into [..., blocks, block], the end filled up."""
    xp = xp_of(x)
    short = -x.shape[-1] % block
    if short:
        x = xp.concatenate([x, xp.full((*x.shape[:-1], short), fill, x.dtype)], axis=-1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def span_bounds(grid: TileGrid, start, end):
    """Bounds of the rows of each block of queries, [..., num_q].

    Returns:
        min start and max end over rows that see something; max start and min end over all rows.
    """
    xp = xp_of(start, end)
    start, end = xp.broadcast_arrays(start, end)
    if start.shape[-1] != grid.q_len:
        start = xp.broadcast_to(start, (*start.shape[:-1], grid.q_len))
        end = xp.broadcast_to(end, (*end.shape[:-1], grid.q_len))
    start, end = start.astype(np.int32), end.astype(np.int32)
    start, end = largest(start, np.int32(0)), smallest(end, np.int32(grid.kv_len))
    empty = start >= end
    first = to_blocks(xp.where(empty, np.int32(FAR), start), grid.block_q, FAR).min(-1)
    last = to_blocks(xp.where(empty, np.int32(0), end), grid.block_q, 0).max(-1)
    inner_first = to_blocks(xp.where(empty, np.int32(FAR), start), grid.block_q, 0).max(-1)
    inner_last = to_blocks(xp.where(empty, np.int32(0), end), grid.block_q, FAR).min(-1)
    return first, last, inner_first, inner_last


def span_tiles(grid: TileGrid, start, end):
    """`Mask.tiles` of a mask given by row spans [batch or 1, q_len]."""
    bounds = span_bounds(grid, start, end)
    first, last, inner_first, inner_last = (b[:, None, :, None] for b in bounds)
    kv_first, kv_last = grid.kv_bounds
    return (
        (first <= kv_last) & (last > kv_first),
        (inner_first <= kv_first) & (inner_last > kv_last),
    )


class Full(Mask):
    """Everything is visible."""

    runs = True

    def allowed(self, at):
        return true_like(at.q, at.kv)

    def row_span(self, at):
        zero = at.q * np.int32(0)
        return zero, zero + np.int32(FAR)


def true_like(q, kv):
    """True for every pair of the two index arrays."""
    shape = jnp.broadcast_shapes(jnp.shape(q), jnp.shape(kv))
    return jnp.full(shape, True) if shape else jnp.asarray(True)


class And(Mask):
    """Visible where both masks say so; what `a & b` makes."""

    def __init__(self, a: Mask, b: Mask):
        self.a, self.b = a, b

    @property
    def runs(self):
        return self.a.runs and self.b.runs

    def sizes(self):
        (batch_a, heads_a), (batch_b, heads_b) = self.a.sizes(), self.b.sizes()
        return max(batch_a, batch_b), max(heads_a, heads_b)

    def __repr__(self):
        return f"{self.a!r} & {self.b!r}"

    def allowed(self, at):
        return self.a.allowed(at) & self.b.allowed(at)

    def row_span(self, at):
        a, b = self.a.row_span(at), self.b.row_span(at)
        return None if a is None or b is None else (largest(a[0], b[0]), smallest(a[1], b[1]))

    def tiles(self, grid):
        if self.row_span(row_positions(grid)) is not None:
            return super().tiles(grid)
        (any_a, full_a), (any_b, full_b) = self.a.tiles(grid), self.b.tiles(grid)
        return any_a & any_b, full_a & full_b

    def q_valid(self, batch, q):
        return both(self.a.q_valid(batch, q), self.b.q_valid(batch, q))

    def kv_valid(self, batch, kv):
        return both(self.a.kv_valid(batch, kv), self.b.kv_valid(batch, kv))

    def check(self, batch, heads, q_len, kv_len):
        self.a.check(batch, heads, q_len, kv_len)
        self.b.check(batch, heads, q_len, kv_len)


def both(a, b):
    """The conjunction of two conditions, where None is a condition that always holds."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


class Or(Mask):
    """Visible where either mask says so; what `a | b` makes."""

    def __init__(self, a: Mask, b: Mask):
        self.a, self.b = a, b

    @property
    def runs(self):
        return self.a.runs and self.b.runs

    def sizes(self):
        (batch_a, heads_a), (batch_b, heads_b) = self.a.sizes(), self.b.sizes()
        return max(batch_a, batch_b), max(heads_a, heads_b)

    def __repr__(self):
        return f"({self.a!r} | {self.b!r})"

    def allowed(self, at):
        return self.a.allowed(at) | self.b.allowed(at)

    def tiles(self, grid):
        (any_a, full_a), (any_b, full_b) = self.a.tiles(grid), self.b.tiles(grid)
        return any_a | any_b, full_a | full_b

    def q_valid(self, batch, q):
        a, b = self.a.q_valid(batch, q), self.b.q_valid(batch, q)
        return None if a is None or b is None else a | b

    def kv_valid(self, batch, kv):
        a, b = self.a.kv_valid(batch, kv), self.b.kv_valid(batch, kv)
        return None if a is None or b is None else a | b

    def check(self, batch, heads, q_len, kv_len):
        self.a.check(batch, heads, q_len, kv_len)
        self.b.check(batch, heads, q_len, kv_len)


class Not(Mask):
    """Visible where the mask says no; what `~a` makes."""

    def __init__(self, a: Mask):
        self.a = a

    def sizes(self):
        return self.a.sizes()

    def __repr__(self):
        return f"~({self.a!r})"

    def allowed(self, at):
        return ~self.a.allowed(at)

    def tiles(self, grid):
        any_a, full_a = self.a.tiles(grid)
        return ~full_a, ~any_a

    def check(self, batch, heads, q_len, kv_len):
        self.a.check(batch, heads, q_len, kv_len)


class Dense(Mask):
    """Visible where a bool array is True.

    Args:
        array: bool, broadcasting to [batch, q_heads, q_len, kv_len]. Read in blocks that are partly
            visible only. For long sequences prefer a mask with structure: this one is quadratic.
    """

    def __init__(self, array):
        if array.dtype != jnp.bool_:
            raise TypeError(
                f"mask: got dtype {array.dtype}, expected bool, True where a query may attend "
                "(numbers to add to the logits go into bias=)"
            )
        if array.ndim > 4:
            raise ValueError(f"mask: got shape {array.shape}, expected rank 4 or less")
        self.array = jnp.asarray(array).reshape((1,) * (4 - array.ndim) + array.shape)

    def sizes(self):
        return self.array.shape[0], self.array.shape[1]

    def allowed(self, at):
        index = zip(self.array.shape, (at.batch, at.head, at.q, at.kv), strict=True)
        seen = self.array[tuple(0 if n == 1 else i for n, i in index)]
        return seen & true_like(at.q, at.kv)

    def tiles(self, grid):
        def reduced(every: bool):
            x = self.array
            for axis, block in ((2, grid.block_q), (3, grid.block_kv)):
                if x.shape[axis] != 1:
                    blocks = to_blocks(jnp.moveaxis(x, axis, -1), block, every)
                    blocks = blocks.all(-1) if every else blocks.any(-1)
                    x = jnp.moveaxis(blocks, -1, axis)
            return x

        return reduced(False), reduced(True)

    def check(self, batch, heads, q_len, kv_len):
        full = (batch, heads, q_len, kv_len)
        if any(n not in (1, f) for n, f in zip(self.array.shape, full, strict=True)):
            raise ValueError(
                f"mask: got shape {self.array.shape}, expected one that broadcasts to "
                f"[batch, q_heads, q_len, kv_len] = {full}"
            )


def as_mask(mask) -> Mask:
    """A mask expression from None (everything is visible), a mask, or a bool array (True = attend).

    Raises:
        TypeError: for anything else.
    """
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if is_array(mask):
        return Dense(mask)
    raise TypeError(
        f"mask: got {type(mask).__name__}, expected a mask such as Causal(), a BlockTable from "
        "plan(), a bool array or None"
    )
