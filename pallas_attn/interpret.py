"""`with interpret():` runs GPU kernels on a CPU, for tests and for users without a GPU."""

import contextlib
import contextvars

import jax

from pallas_attn import _compat, gpu

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("interpret", default=False)


class RaceError(RuntimeError):
    """The race detector found accesses to memory that nothing orders; the text names them."""


@contextlib.contextmanager
def interpret(detect_races: bool = False, target: str = "h200"):
    """Runs the kernels of any backend by interpretation inside the block.

    Triton kernels run in Pallas' interpreter, Mosaic kernels in JAX's GPU interpreter, which models
    shared memory, barriers and TMA. Functions jitted before are traced again inside. Slow: for
    small shapes only.

    Threads of Mosaic kernels wait for each other in callbacks, each of which takes one of XLA's CPU
    threads. On a machine with few cores set the environment variable PJRT_NPROC to 16 before JAX
    first looks for devices: kernels may else wait for ever.

    Args:
        detect_races: also run the race detector (Mosaic kernels only; Triton's interpreter is
            sequential and has none).
        target: the GPU to pretend to, a key of `pallas_attn.gpu.KNOWN`; it decides what backends
            support and the default tiles.

    Raises:
        RaceError: when a kernel in the block raced. Such a kernel ends at its first race. When the
            block ends in an error of its own, that one is raised, and the races are in its notes.
    """
    races = []
    try:
        with gpu.target(target), _compat.interpret_context(detect_races) as races:
            token = _active.set(True)
            try:
                yield
            finally:
                _active.reset(token)
    except jax.errors.JaxRuntimeError as error:
        if races:
            raise RaceError(_describe(races)) from error
        raise
    except Exception as error:
        if races:
            error.add_note(_describe(races))
        raise
    if races:
        raise RaceError(_describe(races))


def is_active() -> bool:
    """Whether the caller stands inside `interpret()`."""
    return _active.get()


def _describe(races: list[str]) -> str:
    return "\n  ".join(["races found:", *races])
