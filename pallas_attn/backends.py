"""The backends in order of preference, and the choice between them.

A backend is a subpackage with five functions: `unsupported_reason`, `candidate_tiles`,
`tiles_reason`, `run_forward` and `run_backward`; `xla/__init__.py` shows their arguments. A sixth,
`build_table`, is for backends whose kernels need more than `block_table.build` makes. To add one,
write its folder and its line in `ALL`.
"""

import importlib

from pallas_attn import block_table
from pallas_attn import gpu as gpus
from pallas_attn.gpu import Gpu
from pallas_attn.spec import Spec
from pallas_attn.tiles import Tiles

# First the fastest; "xla" takes everything, so a call without backend= always finds one.
ALL = ("mosaic_gpu", "triton", "xla")


def load(name: str):
    """The backend's module, imported when first used."""
    return importlib.import_module(f"pallas_attn.{name}")


def build_table(name: str, mask, tiles: Tiles, spec: Spec):
    """The block tables of a mask for one backend's kernels; a backend may build its own."""
    backend = load(name)
    if hasattr(backend, "build_table"):
        return backend.build_table(mask, tiles, spec)
    grid_of = block_table.grid_for(spec.batch, spec.q_heads, spec.q_len, spec.kv_len)
    return block_table.build(mask, tiles, grid_of, name)


def check_name(name: str | None, argument: str = "backend") -> None:
    """Raises ValueError for a name that is no backend."""
    if name is not None and name not in ALL:
        raise ValueError(f"{argument}: got {name!r}, expected one of {', '.join(ALL)}, or None")


def reasons(spec: Spec, mask, gpu: Gpu | None) -> dict[str, str | None]:
    """Why each backend cannot take the call; None for those that can."""
    return {name: load(name).unsupported_reason(spec, mask, gpu) for name in ALL}


def check_tiles(name: str, tiles: Tiles, spec: Spec, *, given: bool) -> None:
    """Raises ValueError when tiles that the caller gave, or planned, cannot run a call.

    Args:
        name: the backend.
        tiles, spec: what is to run.
        given: False for the backend's own choice, which is not asked about.
    """
    reason = load(name).tiles_reason(tiles, spec, gpus.detect()) if given else None
    if reason is not None:
        raise ValueError(
            f"tiles: got {tiles} (given, or planned in the BlockTable), which {name!r} cannot run: "
            f"{reason}"
        )


def choose(spec: Spec, mask, name: str | None) -> str:
    """The backend that runs a call.

    Args:
        spec, mask: what is asked for.
        name: a backend asked for by name, which never falls back; or None for the first that can.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: when the named backend cannot, with its reason.
    """
    check_name(name)
    gpu = gpus.detect()
    if name is not None:
        reason = load(name).unsupported_reason(spec, mask, gpu)
        if reason is not None:
            raise NotImplementedError(
                f"backend {name!r} was asked for and cannot run this call: {reason}"
            )
        return name
    refused = {}
    for candidate in ALL:
        reason = load(candidate).unsupported_reason(spec, mask, gpu)
        if reason is None:
            return candidate
        refused[candidate] = reason
    listed = "; ".join(f"{k}: {v}" for k, v in refused.items())
    raise NotImplementedError(f"no backend takes this call: {listed}")
