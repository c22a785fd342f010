"""Plain JAX in chunks: runs everywhere and takes every option.

Never holds a [q_len, kv_len] array of a long call. For CPUs, and for what no kernel takes.
"""

from pallas_attn.spec import Spec
from pallas_attn.tiles import KernelTiles, Tiles

# The largest tile of float32 logits over all sequences and heads, in bytes.
_LOGITS_BYTES = 1 << 28


def unsupported_reason(spec: Spec, mask, gpu) -> str | None:
    """None: it takes everything."""
    del spec, mask, gpu


def candidate_tiles(spec: Spec, mask, gpu) -> list[Tiles]:
    """One schedule: one chunk for short sequences, else chunks that keep the logits small."""
    del mask, gpu

    def block(length: int, most: int) -> int:
        return min(most, max(16, 1 << max(0, length - 1).bit_length()))

    most = 1024
    while most > 128 and spec.batch * spec.q_heads * most * most * 4 > _LOGITS_BYTES:
        most //= 2
    tiles = KernelTiles(block(spec.q_len, most), block(spec.kv_len, most))
    return [Tiles(tiles, tiles, tiles)]


def tiles_reason(tiles: Tiles, spec: Spec, gpu) -> str | None:
    """None: any chunks run."""
    del tiles, spec, gpu


def run_forward(call, q, k, v, bias, sinks, table):
    """See `pallas_attn.xla.forward`."""
    from pallas_attn.xla.forward import forward

    return forward(call, q, k, v, bias, sinks, table)


def run_backward(call, q, k, v, bias, table, residuals):
    """See `pallas_attn.xla.backward`."""
    from pallas_attn.xla.backward import backward

    return backward(call, q, k, v, bias, table, residuals)
