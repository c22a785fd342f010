"""jit over sharded arrays, shard_map, vmap of sharded axes, on four host devices.

They run in a process of their own."""

import json
import pathlib
import subprocess
import sys

import pytest
import sharded_cases

SCRIPT = pathlib.Path(sharded_cases.__file__)


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(sharded_cases.CHECKS))
def test_sharded(results, name):
    assert results[name] is None, results[name]
