"""Any NVIDIA GPU from compute capability 8.0: Pallas kernels in its Triton lowering.

JAX deprecates this lowering since 0.11. It stays in this one folder, behind the backend boundary.
"""

import dataclasses

from pallas_attn.gpu import Gpu
from pallas_attn.mask_core import Mask
from pallas_attn.partition import spread
from pallas_attn.spec import KERNEL_DTYPES, MAX_HEAD_DIM, Spec
from pallas_attn.tiles import KernelTiles, Tiles, is_power_of_two, padded_dim

# At 256 channels out erred 1.3 times what the error rule allows (H200, 2026-11-29).
MAX_FLOAT32_DIM = 192


def unsupported_reason(spec: Spec, mask, gpu: Gpu | None) -> str | None:
    """Why these kernels cannot take a call, or None when they can."""
    if gpu is None:
        return (
            "it needs an NVIDIA GPU, and this process runs on none "
            "(pallas_attn.interpret() runs it by interpretation)"
        )
    if gpu.compute_capability < (8, 0):
        return (
            f"it needs compute capability 8.0 or more, and {gpu.name} has {gpu.compute_capability}"
        )
    if spec.dtype not in KERNEL_DTYPES:
        return f"it takes {', '.join(KERNEL_DTYPES)}, and the operands are {spec.dtype}"
    if max(spec.head_dim, spec.v_dim) > MAX_HEAD_DIM:
        return (
            f"it takes head_dim and v_dim up to {MAX_HEAD_DIM}, not {spec.head_dim}, {spec.v_dim}"
        )
    widest = max(spec.head_dim, spec.v_dim)
    if spec.dtype == "float32" and widest > MAX_FLOAT32_DIM:
        return (
            f"it takes float32 up to {MAX_FLOAT32_DIM} channels, not {widest}: its sums over more "
            "err beyond twice the plain computation's"
        )
    if not candidate_tiles(spec, mask, gpu):
        dims = f"head_dim {spec.head_dim}, v_dim {spec.v_dim}"
        return f"no tiles of {dims} fit {gpu.name}'s shared memory"
    return None


def candidate_tiles(spec: Spec, mask: Mask, gpu: Gpu | None) -> list[Tiles]:
    """Schedules worth trying for a call that fit the device's shared memory, the default first."""
    if spec.dtype == "float32":
        options = dict.fromkeys(("fwd", "dq", "dkv"), _FLOAT32)
    else:
        dim = max(padded_dim(spec.head_dim), padded_dim(spec.v_dim))
        hopper = gpu is None or gpu.is_hopper
        table = _HOPPER if hopper else _OTHERS
        options = next(kernels for most, kernels in table if dim <= most)
        if hopper and spec.group > 1 and 64 < dim <= 128:
            options = {**options, "dkv": (_GROUPED_DKV, *_SMALL["dkv"])}
        if hopper and dim > 128 and not mask.runs:
            # Masks read pair by pair need registers that 64 keys do not leave: 365/323, not
            # 468/412.
            options = {**options, "fwd": _SMALL["fwd"]}
    limit = gpu.smem_per_block if gpu else None
    fitting = {
        kernel: [t for t in tiles if limit is None or smem_bytes(kernel, t, spec) <= limit]
        for kernel, tiles in options.items()
    }
    count = min(len(tiles) for tiles in fitting.values())
    return [Tiles(*(fitting[kernel][i] for kernel in ("fwd", "dq", "dkv"))) for i in range(count)]


def tiles_reason(tiles: Tiles, spec: Spec, gpu: Gpu | None) -> str | None:
    """Why a call cannot run with these tiles, or None when it can."""
    for kernel in ("fwd", "dq", "dkv"):
        given = getattr(tiles, kernel)
        if not (is_power_of_two(given.block_q) and is_power_of_two(given.block_kv)):
            return f"{kernel}'s blocks are {given.block_q}x{given.block_kv}, not powers of two"
        if given.num_warps == 12:
            return f"{kernel} has 12 warps, not a power of two"
        needed = smem_bytes(kernel, getattr(tiles, kernel), spec)
        if gpu is not None and needed > gpu.smem_per_block:
            return (
                f"{kernel} needs {needed} bytes of shared memory at head_dim {spec.head_dim}, "
                f"v_dim {spec.v_dim}, and {gpu.name} has {gpu.smem_per_block}"
            )
    return None


def smem_bytes(kernel: str, tiles: KernelTiles, spec: Spec) -> int:
    """Shared memory that Triton's pipeliner will ask for, as its compiled kernels report it.

    The tiles that stay, and num_stages of those that stream: q and k, v forward; q, dout and k, v
    for dq; k, v and q, dout for dk and dv.
    """
    both = padded_dim(spec.head_dim) + padded_dim(spec.v_dim)
    width = 4 if spec.dtype == "float32" else 2
    if kernel == "dkv":
        stay, stream = tiles.block_kv * both, tiles.block_q * both
    else:
        stay = tiles.block_q * (padded_dim(spec.head_dim) if kernel == "fwd" else both)
        stream = tiles.block_kv * both
    return width * (stay + tiles.num_stages * stream) + 1024


# Of the schedules that spill no register under any mask the fastest on dense work, then smaller
# ones for smaller shared memory. TFLOP/s full/causal at 4k, H200, 2026-11-29:
#   D64   fwd 128x64 409/366, dq 128x64 602/550, dkv 64x64 443/422
#   D256  fwd 128x64 468/412, dq and dkv together 229/220
#   D128  fwd 64x64 450/402, dq 64x64 530/471, dkv 64x64 526/506; at D128 larger tiles win a few
#         per cent on dense work and lose a third on documents
_SMALL: dict[str, tuple[KernelTiles, ...]] = {
    "fwd": (KernelTiles(64, 32, 4, 2), KernelTiles(32, 32, 4, 1)),
    "dq": (KernelTiles(64, 32, 4, 1), KernelTiles(32, 32, 4, 1)),
    "dkv": (KernelTiles(32, 64, 4, 2), KernelTiles(32, 32, 4, 1)),
}
_Table = tuple[tuple[int, dict[str, tuple[KernelTiles, ...]]], ...]
_HOPPER: _Table = (
    (64, {
        "fwd": (KernelTiles(128, 64, 8, 3), *_SMALL["fwd"]),
        "dq": (KernelTiles(128, 64, 4, 3), *_SMALL["dq"]),
        "dkv": (KernelTiles(64, 64, 4, 3), *_SMALL["dkv"]),
    }),
    (128, {
        "fwd": (KernelTiles(64, 64, 4, 3), *_SMALL["fwd"]),
        "dq": (KernelTiles(64, 64, 4, 2), *_SMALL["dq"]),
        "dkv": (KernelTiles(64, 64, 4, 2), *_SMALL["dkv"]),
    }),
    (256, {
        "fwd": (KernelTiles(128, 64, 8, 2), *_SMALL["fwd"]),
        "dq": (KernelTiles(128, 32, 8, 2), *_SMALL["dq"]),
        "dkv": (KernelTiles(32, 128, 8, 2), *_SMALL["dkv"]),
    }),
)  # fmt: skip
# Without wgmma both operands of a matmul take registers. Chosen by the compiler's report for sm_80,
# no spills; no such card was at hand to time them.
_OTHERS: _Table = (
    (64, {
        "fwd": (KernelTiles(128, 64, 8, 3), *_SMALL["fwd"]),
        "dq": (KernelTiles(64, 64, 8, 2), *_SMALL["dq"]),
        "dkv": _SMALL["dkv"],
    }),
    (128, {
        "fwd": (KernelTiles(64, 64, 4, 3), *_SMALL["fwd"]),
        "dq": (KernelTiles(64, 64, 8, 2), *_SMALL["dq"]),
        "dkv": (KernelTiles(64, 64, 8, 2), *_SMALL["dkv"]),
    }),
    (256, _SMALL),
)  # fmt: skip
# A group's heads in one loop leave no registers for 64 queries at D128 under documents.
# dkv 502/460.
_GROUPED_DKV = KernelTiles(32, 64, 4, 3)
_FLOAT32 = (KernelTiles(32, 32, 4, 2), KernelTiles(32, 32, 4, 1), KernelTiles(16, 16, 4, 1))


def run_forward(call, q, k, v, bias, sinks, table):
    """Out and lse; see `pallas_attn.triton.forward`."""
    from pallas_attn.triton.common import Inputs
    from pallas_attn.triton.forward import forward

    inputs = Inputs(q, k, v, table.fwd, table.mask, bias=bias, sinks=sinks)
    return spread(forward, call, inputs, ("out", "lse"))


def run_backward(call, q, k, v, bias, table, residuals):
    """dq, dk, dv; and the bias's gradient by the plain-JAX backend, which XLA drops when unused."""
    from pallas_attn.triton.backward import backward_dkv, backward_dq
    from pallas_attn.triton.common import Inputs

    lse_log2, delta, dout = residuals
    inputs = Inputs(
        q, k, v, table.dq, table.mask, bias=bias, dout=dout, lse_log2=lse_log2, delta=delta
    )  # fmt: skip
    (dq,) = spread(backward_dq, call, inputs, ("dq",))
    dk, dv = spread(backward_dkv, call, inputs._replace(visits=table.dkv), ("dk", "dv"))
    dbias = None if bias is None else _bias_gradient(call, q, k, v, bias, table, residuals)
    return dq, dk, dv, dbias


def _bias_gradient(call, q, k, v, bias, table, residuals):
    from pallas_attn import xla

    tiles = xla.candidate_tiles(call.spec, table.mask, None)[0]
    call = dataclasses.replace(call, tiles=tiles)
    return xla.run_backward(call, q, k, v, bias, table, residuals)[3]
