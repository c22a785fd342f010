"""How all tests run: strict dtypes, backends by name, and what needs a GPU skips without one."""

import contextlib
import os

import jax
import pytest

from pallas_attn import backends, gpu, testing

# Threads of the Mosaic interpreter wait in callbacks, each of which takes one of XLA's threads:
# with as few of these as a small machine has cores, kernels may wait for ever. Read when JAX first
# looks for devices.
os.environ.setdefault("PJRT_NPROC", "16")

# Mixed dtypes that JAX would promote in silence are faults here. Rank promotion stays allowed:
# masks broadcast [batch, 1, ...] against host arrays of lower rank on purpose.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    # Where pytest-timeout is not installed its setting in pyproject.toml would be an unknown one.
    with contextlib.suppress(ValueError):
        parser.addini("timeout", "limit of a test in seconds (pytest-timeout)")


def pytest_collection_modifyitems(items):
    here = gpu.detect()
    needs = {
        "gpu": here is None and "needs an NVIDIA GPU, and this machine has none",
        "hopper": not (here and here.is_hopper) and "needs a GPU of compute capability 9.0",
    }
    for item in items:
        for marker, reason in needs.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


# Those that take float32, in which most tests are written; tests/test_mosaic_*.py hold the others.
GENERAL = tuple(name for name in backends.ALL if name != "mosaic_gpu")


@pytest.fixture(params=GENERAL)
def backend(request):
    """Each backend's name, while it can run here: kernels by interpretation on a CPU."""
    with testing.running(request.param):
        yield request.param


@pytest.fixture(scope="module")
def report(request):
    """Lines for the end of the run."""
    lines = []
    yield lines
    plugins = request.config.pluginmanager
    terminal = plugins.getplugin("terminalreporter")
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        for line in lines if terminal else ():
            terminal.ensure_newline()
            terminal.write_line(line)
