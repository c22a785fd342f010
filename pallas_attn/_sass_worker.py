"""Compiles lowered modules for a GPU that is not there; the child process of `pallas_attn.inspect`.

Run as a file, never imported: XLA reads its dump flags once, when a process first uses it, so they
must be in the environment before it starts. Usage: `_sass_worker.py DIR`, where DIR holds
target.pbtxt (the GPU) and jobs.json (a list of job names; each job's module is NAME/module.mlir).
XLA dumps into DIR/dump; what a job dumped is moved to NAME/, beside status.json and mosaic.out,
where the Mosaic GPU compiler's prints go.
"""

import ctypes
import json
import os
import pathlib
import sys

from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib import xla_client


def _compile(text: str, devices) -> None:
    options = xla_client.CompileOptions()
    options.executable_build_options.use_shardy_partitioner = True
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        device_list = xla_client.DeviceList(tuple(devices))
        devices[0].client.compile(module, device_list, options)


def _send_stdout_to(path: pathlib.Path) -> None:
    """Also what the compiler, which is no Python, prints."""
    ctypes.CDLL(None).fflush(None)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.close(file)


def main(root: pathlib.Path) -> None:
    """Compiles every job of `root`; a job that fails says so in its status and stops no other."""
    config = (root / "target.pbtxt").read_text()
    topology = topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=config, topology="1x1x1"
    )
    for name in json.loads((root / "jobs.json").read_text()):
        folder = root / name
        error = None
        _send_stdout_to(folder / "mosaic.out")
        print(f"JOB {name}", file=sys.stderr, flush=True)  # parts XLA's log
        try:
            _compile((folder / "module.mlir").read_text(), topology.devices)
        except Exception as e:  # whatever the compiler raises is this job's result
            error = f"{type(e).__name__}: {e}"
        ctypes.CDLL(None).fflush(None)
        for path in (root / "dump").iterdir():
            path.rename(folder / path.name)
        (folder / "status.json").write_text(json.dumps({"error": error}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
