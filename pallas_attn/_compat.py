"""The one place that knows how JAX releases differ and that may touch its private modules."""

import contextlib
import dataclasses

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType


def _read_only() -> plgpu.RefType:
    # Since 0.12.1 a reference given to `inline_mgpu` counts as written unless it says otherwise,
    # and a kernel may not write to an operand that is an array.
    says = any(field.name == "write" for field in dataclasses.fields(plgpu.RefType))
    return plgpu.RefType(write=False) if says else plgpu.RefType()


# The type of a reference from which `inline_mgpu` only reads.
READ_ONLY = _read_only()


def varying_axes(*arrays) -> frozenset[str]:
    """The mesh axes over which any of the arrays varies, inside a shard_map that checks this."""
    axes = frozenset()
    for leaf in jax.tree.leaves(arrays):
        kind = getattr(jax.typeof(leaf), "manual_axis_type", None)
        axes |= kind.varying if kind is not None else frozenset()
    return axes


def match_varying(arrays, axes: frozenset[str]):
    """Casts every array to vary over `axes`, so that one kernel may take them all."""
    if not axes:
        return arrays

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def out_struct(shape, dtype, like) -> jax.ShapeDtypeStruct:
    """Declares an output that varies over the same manual mesh axes as the operand `like`."""
    kind = getattr(jax.typeof(like), "manual_axis_type", None)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def manual_axes() -> frozenset[str]:
    """The mesh axes that an enclosing shard_map has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def is_traced(tree) -> bool:
    """Whether any leaf of `tree` is an abstract value of some JAX transformation."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def interpret_context(detect_races: bool):
    """Runs Mosaic kernels in JAX's GPU interpreter; jitted functions retrace on entry and exit.

    Yields:
        the list to which races are added as text while kernels run.
    """
    # Imported where it is needed: it stands on private modules of JAX.
    from pallas_attn import _mosaic_interpret

    # A clock for each load or product under way; with too few of them races go unseen.
    params = plgpu.InterpretGPUParams(detect_races=detect_races, num_tma_threads_per_device=64)
    with _mosaic_interpret.patched() as races, plgpu.force_gpu_interpret_mode(params):
        yield races
        jax.effects_barrier()


def interpreter_event(name: str):
    """Names what is traced inside for the interpreter's race detector; free on a GPU."""
    return jax.named_scope(f"pallas_attn_{name}")


@contextlib.contextmanager
def without_interpret_context():
    """Shields a Triton call from `interpret_context`, whose interpreter knows Mosaic only."""
    # None turns the mode off; JAX's annotation leaves it out.
    with plgpu.force_gpu_interpret_mode(None):  # pyrefly: ignore[bad-argument-type]
        yield
