"""What the code knows about a GPU: its limits, its peak rates, and which one a call will run on."""

import contextlib
import contextvars
import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of NVIDIA GPU.

    Attributes:
        name: as `jax.Device.device_kind` gives it.
        compute_capability: (major, minor).
        sms: multiprocessors.
        smem_per_block: bytes of shared memory that one thread block may use.
        peak_bf16: dense bf16 matmul rate in FLOP/s, from the vendor's datasheet; None if unknown.
        bandwidth: device memory in bytes/s, from the same; None if unknown.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    smem_per_block: int
    peak_bf16: float | None = None
    bandwidth: float | None = None

    @property
    def is_hopper(self) -> bool:
        """Whether wgmma and TMA exist on it in Hopper's form."""
        return self.compute_capability == (9, 0)


# Datasheet values. A new card is one row here.
KNOWN: dict[str, Gpu] = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 232448, 989e12, 4.8e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 989e12, 3.35e12),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 312e12, 2.04e12),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 101376, 121e12, 0.3e12),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 165e12, 1.01e12),
}

_SMEM_BY_CAPABILITY = {(8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376}

_target: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target(name: str):
    """Makes backend choice and default tiles believe in a GPU that this machine may not have.

    For cross-lowering and for `pallas_attn.inspect`. Unlike `interpret()` it is no part of JAX's
    cache key: trace a function for each target afresh.

    Args:
        name: a key of `KNOWN`, such as "h200".

    Raises:
        ValueError: for a name that is not known.
    """
    if name not in KNOWN:
        raise ValueError(f"target: got {name!r}, expected one of {sorted(KNOWN)}")
    token = _target.set(KNOWN[name])
    try:
        yield KNOWN[name]
    finally:
        _target.reset(token)


def from_device(device: jax.Device) -> Gpu | None:
    """The `Gpu` record of a JAX device, or None when it is no NVIDIA GPU."""
    if device.platform not in ("gpu", "cuda") or "rocm" in device.client.platform_version.lower():
        return None
    for gpu in KNOWN.values():
        if gpu.name == device.device_kind:
            return gpu
    major, minor = (int(x) for x in str(device.compute_capability).split("."))
    smem = _SMEM_BY_CAPABILITY.get((major, minor), 232448 if major >= 9 else 101376)
    return Gpu(device.device_kind, (major, minor), device.core_count, smem)


def detect() -> Gpu | None:
    """The GPU that a call made now would run on; None when that is a CPU or another platform."""
    if (gpu := _target.get()) is not None:
        return gpu
    device = jax.config.jax_default_device
    if isinstance(device, jax.Device):
        return from_device(device)
    try:
        devices = jax.devices(device) if isinstance(device, str) else jax.devices()
    except RuntimeError:
        return None
    return from_device(devices[0])
