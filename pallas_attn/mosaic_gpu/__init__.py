"""NVIDIA Hopper: warp-specialised Pallas kernels in Mosaic GPU, with TMA and wgmma."""

import dataclasses

from pallas_attn.gpu import Gpu
from pallas_attn.mask_core import Mask
from pallas_attn.partition import spread
from pallas_attn.spec import MAX_HEAD_DIM, Spec
from pallas_attn.tiles import KernelTiles, Tiles

DTYPES = ("float16", "bfloat16")
# Of the bits of masks that are no interval a row: more than this stays with other backends.
MAX_PAIR_BYTES = 2 << 30


def unsupported_reason(spec: Spec, mask, gpu: Gpu | None) -> str | None:
    """Why these kernels cannot take a call, or None when they can."""
    from pallas_attn.mosaic_gpu.detail import pair_bytes

    reason = device_reason(spec.dtype, gpu)
    if reason is not None:
        return reason
    if spec.bias_shape is not None:
        return "it takes no bias"
    for name, dim in (("head_dim", spec.head_dim), ("v_dim", spec.v_dim)):
        if dim > MAX_HEAD_DIM:
            return f"it takes {name} up to {MAX_HEAD_DIM}, not {dim}"
    tiles = candidate_tiles(spec, mask, gpu)[0]
    kernels = tiles.fwd, tiles.dkv
    sizes = {
        "block_q": tuple(t.block_q for t in kernels),
        "block_kv": tuple(t.block_kv for t in kernels),
    }
    needed = pair_bytes(mask, spec, **sizes)
    if needed > MAX_PAIR_BYTES:
        return (
            f"this mask would be kept as one bit a pair, {needed} bytes, and it takes up to "
            f"{MAX_PAIR_BYTES}"
        )
    return None


def device_reason(dtype: str, gpu: Gpu | None) -> str | None:
    """Why these kernels run on no operands of a dtype here, or None when they do."""
    if gpu is None:
        return (
            "it needs an NVIDIA GPU, and this process runs on none "
            "(pallas_attn.interpret() runs it by interpretation)"
        )
    if not gpu.is_hopper:
        return f"it needs compute capability 9.0, and {gpu.name} has {gpu.compute_capability}"
    if dtype not in DTYPES:
        return f"it takes {' and '.join(DTYPES)}, and the operands are {dtype}"
    return None


def forward_tiles(wide: int) -> tuple[KernelTiles, ...]:
    """Schedules of the forward worth trying for heads so wide, the default first."""
    return next(tiles for most, tiles in _FORWARD if wide <= most)


def candidate_tiles(spec: Spec, mask: Mask, gpu: Gpu | None) -> list[Tiles]:
    """Schedules worth trying for a call, the default first."""
    from pallas_attn.mosaic_gpu.common import padded

    del mask, gpu
    wide = max(padded(spec.head_dim), padded(spec.v_dim))
    back = next(tiles for most, tiles in _BACKWARD if wide <= most)
    # One backward kernel makes all three gradients.
    return [Tiles(tiles, back, back) for tiles in forward_tiles(wide)]


def tiles_reason(tiles: Tiles, spec: Spec, gpu: Gpu | None) -> str | None:
    """Why a call cannot run with these tiles, or None when it can."""
    needed = smem_bytes(tiles.fwd, spec)
    if gpu is not None and needed > gpu.smem_per_block:
        return f"fwd needs {needed} bytes of shared memory, and {gpu.name} has {gpu.smem_per_block}"
    fwd = tiles.fwd
    if fwd.block_q not in (64, 128, 192) or fwd.block_kv not in (64, 128, 256):
        return (
            f"fwd's blocks are {fwd.block_q}x{fwd.block_kv}, and it takes 64, 128 or 192 queries "
            "and 64, 128 or 256 keys"
        )
    if fwd.num_warps != fwd.block_q // 16:
        return f"fwd has {fwd.num_warps} warps, and {fwd.block_q} queries take {fwd.block_q // 16}"
    if fwd.num_stages < 2:
        # With one slot each for k and v, producer and consumers would wait for each other.
        return "fwd has 1 stage, and it takes 2 or more"
    return _backward_reason(tiles.dkv, spec, gpu)


def _backward_reason(tiles: KernelTiles, spec: Spec, gpu: Gpu | None) -> str | None:
    from pallas_attn.mosaic_gpu.backward_parts import smem_bytes, takes

    if not takes(tiles, spec):
        return (
            f"dkv is {tiles}, and it takes 64x128, 128x128 (both up to 128 channels, the latter up "
            "to 64) or 64x64, with 8 warps (64x64 with 12 too) and 2 to 5 stages"
        )
    needed = smem_bytes(tiles, spec)
    if gpu is not None and needed > gpu.smem_per_block:
        return f"dkv needs {needed} bytes of shared memory, and {gpu.name} has {gpu.smem_per_block}"
    return None


def smem_bytes(tiles: KernelTiles, spec: Spec) -> int:
    """Shared memory of the forward kernel, barriers aside."""
    from pallas_attn.mosaic_gpu.common import padded
    from pallas_attn.mosaic_gpu.schedule import stages_out

    q_dim, v_dim = padded(spec.head_dim), padded(spec.v_dim)
    staged = v_dim if stages_out(spec) else 0
    stream = tiles.num_stages * tiles.block_kv * (q_dim + v_dim)
    return 2 * (tiles.block_q * (q_dim + staged) + stream) + 2048


_FORWARD = (
    (64, (KernelTiles(192, 128, 12, 2),)),
    (128, (KernelTiles(192, 128, 12, 2), KernelTiles(128, 128, 8, 2))),
    (192, (KernelTiles(192, 64, 12, 2), KernelTiles(128, 64, 8, 3))),
    (256, (KernelTiles(128, 64, 8, 2),)),
)
_BACKWARD = (
    (64, KernelTiles(128, 128, 8, 2)),
    (128, KernelTiles(64, 128, 8, 3)),
    (192, KernelTiles(64, 64, 12, 3)),
    (256, KernelTiles(64, 64, 12, 2)),
)


def build_table(mask: Mask, tiles: Tiles, spec: Spec):
    """The block tables of a call, and what these kernels need besides."""
    from pallas_attn.mosaic_gpu import tables

    return tables.build(mask, tiles, spec)


def run_forward(call, q, k, v, bias, sinks, table):
    """Out and lse; see `pallas_attn.mosaic_gpu.forward`."""
    from pallas_attn.mosaic_gpu.common import Inputs
    from pallas_attn.mosaic_gpu.forward import forward

    assert bias is None
    extra = dataclasses.replace(table.extra, backward=None)
    inputs = Inputs(q, k, v, table.fwd, extra, sinks=sinks)
    return spread(forward, call, inputs, ("out", "lse"))


def run_backward(call, q, k, v, bias, table, residuals):
    """dq, dk, dv; see `pallas_attn.mosaic_gpu.backward`."""
    from pallas_attn.mosaic_gpu.backward import backward
    from pallas_attn.mosaic_gpu.common import Inputs

    assert bias is None
    lse_log2, delta, dout = residuals
    inputs = Inputs(
        q, k, v, table.dkv, table.extra.backward, dout=dout, lse_log2=lse_log2, delta=delta
    )  # fmt: skip
    return *spread(backward, call, inputs, ("dq", "dk", "dv")), None
