"""What a serving call computes and how: its static facts, its operands, the choice of backend.

A call attends new tokens to a cache. Tokens lie side by side, [tokens, q_heads, head_dim]; sequence
s owns q_len of them (the same for all) or those from cu_seqlens[s] to cu_seqlens[s + 1]. They are
the last ones of its kv_lens[s] tokens, so token t of n stands at position kv_lens[s] - n + t, and
masks are asked at such positions. The cache is a pool of pages with a table, or one stretch a
sequence.

A backend that serves holds a module `decode` with three functions:

    unsupported_reason(spec, mask, gpu)     why it cannot take a call, or None
    candidate_tiles(spec, gpu)              schedules worth trying, the default first
    run(call, inputs)                       out [tokens, q_heads, v_dim], lse [tokens, q_heads]
"""

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import jax

from pallas_attn import backends
from pallas_attn import gpu as gpus
from pallas_attn.tiles import is_power_of_two

# Splitting finer than this costs more in merging than it gains.
MIN_SPLIT_KEYS = 256


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static facts of one serving call.

    Attributes:
        batch: sequences.
        tokens: new tokens of all sequences, padding included.
        q_len: new tokens of each sequence; None where cu_seqlens says.
        page_size, max_pages: keys of a page and pages of a sequence; a cache without a table is one
            page a sequence.
        paged: whether there is a page table.
        q_heads, kv_heads, head_dim, v_dim, dtype, scale, soft_cap, has_sinks: as in `Spec`.
        shared_kv: whether the values are the first v_dim channels of the keys.
        num_splits: parts that each sequence is cut into; None for the backend's choice.
    """

    batch: int
    tokens: int
    q_len: int | None
    page_size: int
    max_pages: int
    paged: bool
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    scale: float
    soft_cap: float | None = None
    has_sinks: bool = False
    shared_kv: bool = False
    num_splits: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return self.page_size * self.max_pages

    @property
    def members(self) -> int:
        """Sequences, and with cu_seqlens one more: the padding after the last one."""
        return self.batch + (self.q_len is None)


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """The schedule of a serving kernel.

    Attributes:
        block_rows: rows of a tile; a row is one token of one of a KV head's query heads. 192 for
            three warpgroups of Hopper.
        block_kv: keys in a tile.
        num_warps, num_stages: as in `KernelTiles`.
        programs_per_sm: how many programs a multiprocessor should get in all; decides how finely
            sequences are split.
        gather: whether keys of pages smaller than a tile are loaded row by row instead of page by
            page.

    Raises:
        ValueError: for a size that no kernel takes.
    """

    block_rows: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 6
    gather: bool = False

    def __post_init__(self):
        for name in ("block_rows", "block_kv"):
            size = getattr(self, name)
            if size < 16 or not (is_power_of_two(size) or (size, name) == (192, "block_rows")):
                raise ValueError(f"{name}: got {size}, expected a power of two from 16 up")
        if self.num_warps not in (1, 2, 4, 8, 12, 16):
            raise ValueError(f"num_warps: got {self.num_warps}, expected 1, 2, 4, 8, 12 or 16")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages: got {self.num_stages}, expected 1 to 8")
        if self.programs_per_sm < 1:
            raise ValueError(f"programs_per_sm: got {self.programs_per_sm}, expected 1 or more")

    def __str__(self):
        return (
            f"{self.block_rows}x{self.block_kv}, {self.num_warps} warps, {self.num_stages} stages, "
            f"{self.programs_per_sm} programs a multiprocessor"
        )


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """All that is static about one serving call; hashable, equal calls share compiled code.

    Attributes:
        spec: what is computed.
        tiles: how.
        backend: by which backend.
        sms: multiprocessors to fill.
        interpret: whether kernels run by interpretation.
    """

    spec: DecodeSpec
    tiles: DecodeTiles
    backend: str
    sms: int
    interpret: bool = False


class DecodeInputs(NamedTuple):
    """Operands of a serving call: arrays outside kernels, references inside; unused ones are None.

    q: [tokens, q_heads, head_dim]; k, v: [num_pages, page_size, kv_heads, dim], or
    [batch, cache_len, kv_heads, dim] without a table; page_table: int32 [batch, max_pages];
    kv_lens: int32 [batch]; cu_seqlens: int32 [batch + 1]; sinks: [q_heads].
    """

    q: Any
    k: Any
    v: Any
    page_table: Any
    kv_lens: Any
    cu_seqlens: Any
    mask: Any
    sinks: Any


def load(name: str):
    """The backend's serving module, or None when it has none."""
    try:
        return importlib.import_module(f"pallas_attn.{name}.decode")
    except ModuleNotFoundError as e:
        if e.name != f"pallas_attn.{name}.decode":
            raise
        return None


def reason(name: str, spec: DecodeSpec, mask, gpu) -> str | None:
    """Why a backend cannot take a call, or None when it can."""
    module = load(name)
    if module is None:
        return "it has no serving kernel"
    return module.unsupported_reason(spec, mask, gpu)


def choose(spec: DecodeSpec, mask, name: str | None) -> str:
    """The backend that runs a call: the one named, or the first that can.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: when the named backend cannot, or none can, with the reasons.
    """
    backends.check_name(name)
    gpu, refused = gpus.detect(), {}
    for candidate in (name,) if name else backends.ALL:
        refused[candidate] = reason(candidate, spec, mask, gpu)
        if refused[candidate] is None:
            return candidate
    if name:
        raise NotImplementedError(
            f"backend {name!r} was asked for and cannot run this call: {refused[name]}"
        )
    listed = "; ".join(f"{k}: {v}" for k, v in refused.items())
    raise NotImplementedError(f"no backend takes this call: {listed}")


@functools.partial(jax.jit, static_argnums=0)
def attend(call: DecodeCall, inputs: DecodeInputs):
    """Attention of new tokens to a cache, by the backend that `call` names.

    Returns:
        out [tokens, q_heads, v_dim] in q's dtype; lse float32 [tokens, q_heads].
    """
    return _guarded(call, inputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(call, inputs):
    module = load(call.backend)
    assert module is not None
    return tuple(module.run(call, inputs))


@_guarded.defjvp
def _no_derivative(call, primals, tangents):
    raise NotImplementedError(
        "attention to a cache has no derivatives; differentiate mha or mha_varlen instead"
    )
