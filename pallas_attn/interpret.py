"""`with interpret():` runs GPU kernels on a CPU, for tests and for users without a GPU."""

import contextlib
import contextvars

from pallas_attn import _compat, gpu

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("interpret", default=False)


@contextlib.contextmanager
def interpret(detect_races: bool = False, target: str = "h200"):
    """Runs the kernels of any backend by interpretation inside the block.

    Triton kernels run in Pallas' interpreter, Mosaic kernels in JAX's GPU interpreter, which models
    shared memory, barriers and TMA. Functions jitted before are traced again inside. Slow: for
    small shapes only.

    Args:
        detect_races: also run the race detector (Mosaic kernels only; Triton's interpreter is
            sequential and has none).
        target: the GPU to pretend to, a key of `pallas_attn.gpu.KNOWN`; it decides what backends
            support and the default tiles.
    """
    with gpu.target(target), _compat.interpret_context(detect_races):
        token = _active.set(True)
        try:
            yield
        finally:
            _active.reset(token)


def is_active() -> bool:
    """Whether the caller stands inside `interpret()`."""
    return _active.get()
