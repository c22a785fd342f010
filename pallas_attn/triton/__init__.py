"""Any NVIDIA GPU from compute capability 8.0: Pallas kernels in its Triton lowering.

JAX deprecates this lowering since 0.11. It stays in this one folder, behind the backend boundary.
"""

import dataclasses

from pallas_attn.gpu import Gpu
from pallas_attn.partition import spread
from pallas_attn.spec import KERNEL_DTYPES, MAX_HEAD_DIM, Spec
from pallas_attn.tiles import KernelTiles, Tiles, padded_dim


def unsupported_reason(spec: Spec, mask, gpu: Gpu | None) -> str | None:
    """Why these kernels cannot take a call, or None when they can."""
    if gpu is None:
        return (
            "it needs an NVIDIA GPU, and this process runs on none "
            "(pallas_attn.interpret() runs it by interpretation)"
        )
    if gpu.compute_capability < (8, 0):
        return f"it needs compute capability 8.0 or more, and {gpu.name} has {gpu.compute_capability}"
    if spec.dtype not in KERNEL_DTYPES:
        return f"it takes {', '.join(KERNEL_DTYPES)}, and the operands are {spec.dtype}"
    if max(spec.head_dim, spec.v_dim) > MAX_HEAD_DIM:
        return f"it takes head_dim and v_dim up to {MAX_HEAD_DIM}, not {spec.head_dim}, {spec.v_dim}"
    return None


def candidate_tiles(spec: Spec, gpu: Gpu | None) -> list[Tiles]:
    """Schedules worth trying for a call, the default first."""
    del gpu
    dim = max(padded_dim(spec.head_dim), padded_dim(spec.v_dim))
    if spec.dtype == "float32":
        tiles = KernelTiles(32, 32, 4, 2)
        return [Tiles(tiles, tiles, tiles)]
    # Of the schedules that spill no register under any mask, the fastest on dense work at 4k.
    # D128, H200, 2026-11-29, full/causal TFLOP/s: fwd 450/402, dq 530/471, dkv 526/506.
    # D64, the same: fwd 409/366, dq 602/550, dkv 443/422.
    if dim <= 64:
        return [Tiles(KernelTiles(128, 64, 8, 3), KernelTiles(128, 64, 4, 3), KernelTiles(64, 64, 4, 3))]
    if dim <= 128:
        return [Tiles(KernelTiles(64, 64, 4, 3), KernelTiles(64, 64, 4, 2), KernelTiles(64, 64, 4, 2))]
    return [Tiles(KernelTiles(64, 32, 4, 2), KernelTiles(64, 32, 4, 2), KernelTiles(32, 64, 8, 2))]


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

    tiles = xla.candidate_tiles(call.spec, None)[0]
    call = dataclasses.replace(call, tiles=tiles)
    return xla.run_backward(call, q, k, v, bias, table, residuals)[3]


