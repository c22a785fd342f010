"""How a call is computed: tiles, warps, pipeline depth of each kernel. Never what is computed."""

import dataclasses


def is_power_of_two(x: int) -> bool:
    """Whether x is 1, 2, 4, ..."""
    return x > 0 and x & (x - 1) == 0


@dataclasses.dataclass(frozen=True)
class KernelTiles:
    """The schedule of one kernel.

    Attributes:
        block_q: query rows in a tile.
        block_kv: keys in a tile.
        num_warps: warps of a thread block that compute; ignored by plain JAX.
        num_stages: depth of the load pipeline; ignored by plain JAX.

    Raises:
        ValueError: for a size that no kernel takes.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size < 16 or size % 16:
                raise ValueError(f"{name}: got {size}, expected a multiple of 16 from 16 up")
        if self.num_warps not in (1, 2, 4, 8, 12, 16):
            raise ValueError(f"num_warps: got {self.num_warps}, expected 1, 2, 4, 8, 12 or 16")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages: got {self.num_stages}, expected 1 to 8")

    def __str__(self):
        return f"{self.block_q}x{self.block_kv}, {self.num_warps} warps, {self.num_stages} stages"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The schedules of the three kernels of a call.

    Attributes:
        fwd: the forward kernel; loops over key blocks.
        dq: the backward kernel for dq; loops over key blocks.
        dkv: the backward kernel for dk and dv; loops over query blocks.
    """

    fwd: KernelTiles
    dq: KernelTiles
    dkv: KernelTiles

    def __str__(self):
        return f"fwd {self.fwd}; dq {self.dq}; dkv {self.dkv}"


def split_dim(dim: int, most: int = 256) -> tuple[tuple[int, int], ...]:
    """Cuts a head dimension into power-of-two chunks, so that 96 costs 96 and not 128.

    Args:
        dim: channels.
        most: the widest chunk wanted, a power of two from 16 up; 256 gives at most two chunks.

    Returns:
        (start, width) of each chunk; widths are at least 16 (the tensor cores' depth) and the last
        one may reach past `dim`.
    """
    if is_power_of_two(dim) and dim >= 16:
        wide = ((0, dim),)
    else:
        head = 1 << (dim.bit_length() - 1)
        tail = max(16, 1 << (dim - head - 1).bit_length()) if head < dim else 0
        if head < 16:
            wide = ((0, 16),)
        else:
            wide = ((0, 2 * head),) if tail >= head else ((0, head), (head, tail))
    return tuple(
        (start + offset, min(width, most))
        for start, width in wide
        for offset in range(0, width, most)
    )


def padded_dim(dim: int) -> int:
    """The width that the chunks of `split_dim` cover."""
    start, width = split_dim(dim)[-1]
    return start + width
