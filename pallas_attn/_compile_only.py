"""Compiles lowered modules for a GPU that is not there, in child processes (`_sass_worker.py`).

A child, because XLA reads its dump flags once, when a process first uses it, and because a compiler
that dies must not take its caller along. It loads the CUDA plugin for compiling only: no GPU, no
driver.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

from pallas_attn import _sass
from pallas_attn import gpu as gpus

_COMPILE_SECONDS = 300  # for one job; a Triton kernel takes 2 to 3


def check_plugin() -> None:
    """Raises MissingToolsError unless JAX's CUDA plugin is installed."""
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if not (
        importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, plugins))
    ):
        raise _sass.MissingToolsError(
            f"no CUDA plugin for JAX (jax-cuda13-plugin, jax-cuda13-pjrt): {_sass.INSTALL_HINT}"
        )


# Sizes that decide nothing but how XLA tiles its own fusions are one value for all.
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {arch.threads}
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {gpu.smem_per_block}
  shared_memory_per_core: {arch.smem}  core_count: {gpu.sms}  fpus_per_core: {arch.fp32_lanes}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  device_address_bits: 64
  memory_bandwidth: {bandwidth:.0f}  device_memory_size: 24000000000  l2_cache_size: 41943040
  clock_rate_ghz: 1.7  device_vendor: "NVIDIA Corporation"  name: "{gpu.name}"
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  platform_version: "Compute Capability {major}.{minor}"  dnn_version: "9.10.0"
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"  device_description_str: "{gpu.name}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""


def _target_config(gpu: gpus.Gpu) -> str:
    """The GPU in the text form of XLA's GpuTargetConfigProto."""
    major, minor = gpu.compute_capability
    return _TARGET_CONFIG.format(
        gpu=gpu,
        arch=_sass.ARCHS[gpu.compute_capability],
        major=major,
        minor=minor,
        bandwidth=gpu.bandwidth or 1e12,
        # The "a" of sm_90a, without which there is no wgmma.
        extension="feature_extension: ACCELERATED_FEATURES" if gpu.is_hopper else "",
    )


def compile_all(root: pathlib.Path, jobs: dict[str, str], gpu: gpus.Gpu, ptxas: str) -> None:
    """Has child processes compile each module, leaving PTX, logs and a status in root/NAME."""
    (root / "dump").mkdir()
    (root / "target.pbtxt").write_text(_target_config(gpu))
    for name, module in jobs.items():
        (root / name).mkdir()
        (root / name / "module.mlir").write_text(module)
    for group in _groups(jobs):
        while group:
            said = _run_child(root, group, ptxas)
            undone = [name for name in group if not (root / name / "status.json").exists()]
            if undone:  # the child died in the first of them; the others get a new child
                status = {"error": f"the compiler {said}"}
                (root / undone[0] / "status.json").write_text(json.dumps(status))
            group = undone[1:]


def _groups(jobs: dict[str, str]) -> list[list[str]]:
    """Parts jobs among processes, each of which dumps a Mosaic kernel only once."""
    groups: list[tuple[list[str], set[str]]] = []
    for name, module in jobs.items():
        kernels = set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', module))
        if "mosaic_gpu" in module and not kernels:
            kernels = {"not told"}  # so they never share a process
        fitting = (group for group in groups if not group[1] & kernels)
        names, seen = next(fitting, ([], set()))
        if not names:
            groups.append((names, seen))
        names.append(name)
        seen |= kernels
    return [names for names, _ in groups]


def _run_child(root: pathlib.Path, names: list[str], ptxas: str) -> str:
    (root / "jobs.json").write_text(json.dumps(names))
    flags = (
        f"--xla_dump_to={root / 'dump'} --xla_dump_emitter_re=ptx "
        "--xla_gpu_enable_libnvjitlink=false"  # ptxas shall speak, whose version can be told
    )
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",  # the CUDA plugin is for compiling only, even where a GPU is
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # nothing runs, so cuDNN and cuBLAS may be absent
        # To stdout, which the worker keeps apart: MOSAIC_GPU_DUMP_TO would write 100 MB a kernel.
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_HOST_LLVM": "1",
        "PATH": os.path.dirname(ptxas) + os.pathsep + os.environ.get("PATH", ""),
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=5",  # logs which ptxas XLA runs, and its answer
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
    }
    # A file, and -P: with its folder on sys.path, inspect.py would hide the standard library's.
    worker = pathlib.Path(__file__).with_name("_sass_worker.py")
    command = [sys.executable, "-P", str(worker), str(root)]
    limit = _COMPILE_SECONDS * len(names)
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit} s"
    parts = re.split(r"^JOB (\d+)\n", run.stderr, flags=re.MULTILINE)
    chosen = ""  # XLA tells its ptxas when a process first looks for it
    for name, log in zip(parts[1::2], parts[2::2], strict=True):
        found = re.findall(r"^.*Using \S*ptxas\S* with version.*\n", log, flags=re.MULTILINE)
        chosen = found[-1] if found else chosen
        (root / name / "xla.log").write_text(chosen + log)
    tail = "\n".join(parts[-1].splitlines()[-20:])
    return f"ended with status {run.returncode}:\n{tail}"
