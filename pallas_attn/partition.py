"""How a kernel behaves under vmap, under jit with sharded arrays, and under differentiation.

A kernel call is opaque to JAX. These wrappers give it

    vmap        one more grid axis per mapped axis, by Pallas' own batching;
    sharding    batch, query heads and mapped axes may be spread over devices: each device runs the
                kernel on its share, told by `origin` where that share begins (masks and tables are
                replicated and count in absolute indices). Lengths and head dimensions are never
                split;
    derivatives a clear error: first derivatives come from `vjp.attend`, others do not exist.

`spread` is all that a backend calls.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_attn import _compat
from pallas_attn.call import Call

# What each axis of an operand or result is: b batch, h query heads, k KV heads, . never split.
ROLES = {
    "q": "b.h.", "dout": "b.h.", "out": "b.h.", "dq": "b.h.",
    "lse_log2": "bh.", "delta": "bh.", "lse": "bh.",
    "k": "b.k.", "v": "b.k.", "dk": "b.k.", "dv": "b.k.",
    "bias": "bh..", "sinks": "h",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Job:
    """A kernel call without its arrays; hashable, so that wrappers are made once.

    Attributes:
        run: (call, inputs) -> tuple of arrays.
        call: static facts.
        names: of the named operands; other leaves are tables and masks.
        results: names of the results.
        tree: structure of the inputs.
        levels: for each vmap, innermost first, which leaves it maps.
    """

    run: Callable[[Call, Any], Iterable]
    call: Call
    names: tuple[str | None, ...]
    results: tuple[str, ...]
    tree: Any
    levels: tuple[tuple[bool, ...], ...] = ()


def spread(run, call: Call, inputs, results: tuple[str, ...]):
    """Runs a kernel so that vmap, sharding and differentiation treat it as described above.

    Args:
        run: (call, inputs) -> tuple of arrays; a module-level function.
        call: static facts.
        inputs: a NamedTuple of operands with a field `origin`, left None here.
        results: names of the results, keys of `ROLES`.

    Returns:
        the results, in order.
    """
    leaves, tree = jax.tree.flatten(inputs)
    names = []
    for field, value in zip(inputs._fields, inputs, strict=True):
        count = len(jax.tree.leaves(value))
        names += [field if field in ROLES else None] * count
    return _wrapped(_Job(run, call, tuple(names), results, tree))(*leaves)


@functools.lru_cache(maxsize=1024)
def _wrapped(job: _Job):
    """The job as a function of its leaves, under vmap, sharding and differentiation."""

    @jax.custom_jvp
    def guarded(*leaves):
        return mapped(*leaves)

    @guarded.defjvp
    def _no_derivative(primals, tangents):
        raise NotImplementedError(
            f"backend {job.call.backend!r} is differentiable once, in reverse mode; for second "
            "derivatives use backend='xla'"
        )

    @custom_vmap
    def mapped(*leaves):
        return _partitioned(job)(*leaves) if _may_be_sharded() else _local(job, leaves)

    @mapped.def_vmap
    def _one_more_axis(axis_size, in_batched, *leaves):
        del axis_size
        deeper = dataclasses.replace(job, levels=(*job.levels, tuple(in_batched)))
        return _wrapped(deeper)(*leaves), (True,) * len(job.results)

    return guarded


def _may_be_sharded() -> bool:
    """Whether the compiler (and no enclosing shard_map) may spread arrays over devices."""
    return jax.device_count() > 1 and not _compat.manual_axes()


def _local(job: _Job, leaves, origin=None):
    """The kernel on arrays that are all here, with one vmap per level."""

    def run(origin, *leaves):
        inputs = jax.tree.unflatten(job.tree, leaves)
        spec = dataclasses.replace(
            job.call.spec,
            batch=inputs.q.shape[0],
            q_heads=inputs.q.shape[2],
            kv_heads=inputs.k.shape[2],
        )
        call = dataclasses.replace(job.call, spec=spec)
        return tuple(job.run(call, inputs._replace(origin=origin)))

    for level in job.levels:
        run = jax.vmap(run, in_axes=(None, *(0 if mapped else None for mapped in level)))
    return run(origin, *leaves)


@functools.lru_cache(maxsize=1024)
def _partitioned(job: _Job):
    """The job as an operation that the SPMD partitioner knows how to split."""
    fn = custom_partitioning(lambda *leaves: _local(job, leaves))
    fn.def_partition(
        partition=functools.partial(_partition, job),
        infer_sharding_from_operands=functools.partial(_infer, job),
        sharding_rule=functools.partial(_rule, job),
    )
    return fn


def _roles(job: _Job) -> tuple[list[tuple[list[str], str | None]], list[tuple[list[str], str]]]:
    """What each axis of each leaf and result is: (mapped axes, roles of the others).

    Mapped axes, outermost first, are named by their level's number.
    """
    leaves = []
    for i, name in enumerate(job.names):
        lead = [str(n) for n in reversed(range(len(job.levels))) if job.levels[n][i]]
        leaves.append((lead, ROLES[name] if name else None))
    lead = [str(n) for n in reversed(range(len(job.levels)))]
    return leaves, [(lead, ROLES[name]) for name in job.results]


def _rule(job: _Job, mesh, arg_types, result_types):
    """The Shardy rule: which axes of operands and results are the same thing."""
    del mesh
    leaves, results = _roles(job)
    spec, group = job.call.spec, job.call.spec.group
    unique = iter(range(10_000))
    replicated = []

    def axis(role, size, name=None):
        if role.isdigit():
            return f"m{role}"
        if role == "." or (size == 1 and name == "bias"):
            replicated.append(f"r{next(unique)}")
            return replicated[-1]
        if spec.kv_heads == 1 and role in "hk":
            return "g" if role == "h" else axis(".", size)
        return "(k g)" if role == "h" and group > 1 else "b" if role == "b" else "k"

    def axes(lead, roles, shape, name=None):
        roles = [*lead, *(roles if roles is not None else "." * (len(shape) - len(lead)))]
        return " ".join(axis(r, n, name) for r, n in zip(roles, shape, strict=True)) or ""

    operands = [
        axes(*leaf, _shape(t), name)
        for leaf, t, name in zip(leaves, jax.tree.leaves(arg_types), job.names, strict=True)
    ]
    outs = [
        axes(*r, _shape(t)) for r, t in zip(results, jax.tree.leaves(result_types), strict=True)
    ]
    text = f"{', '.join(operands)} -> {', '.join(outs)}"
    details: dict[str, object] = {"need_replication_factors": tuple(replicated)}
    if group > 1 and spec.kv_heads > 1:
        # A factor that some operand has as a whole axis brings its size; "g" is only ever a part.
        details["g"] = group
        if not any(name in ("k", "v") for name in job.names):
            details["k"] = spec.kv_heads
    return text, details


def _shape(value_type) -> tuple[int, ...]:
    return tuple(value_type.shape)


def _axes(job: _Job, mesh, arg_shapes):
    """Mesh axes that split batch, query heads, KV heads and mapped axes, from the operands."""
    spec = job.call.spec
    leaves, _ = _roles(job)
    chosen: dict[str, tuple[str, ...]] = {}
    for (lead, roles), shape in zip(leaves, jax.tree.leaves(arg_shapes), strict=True):
        parts = tuple(shape.sharding.spec) + (None,) * len(shape.shape)
        for role, part, size in zip([*lead, *(roles or "")], parts, shape.shape, strict=False):
            part = () if part is None else part if isinstance(part, tuple) else (part,)
            ways = _ways(mesh, part)
            if role != "." and role not in chosen and ways > 1 and size % ways == 0:
                chosen[role] = part
    heads = chosen.get("h", chosen.get("k", ()))
    ways = _ways(mesh, heads)
    if spec.q_heads % ways or (spec.kv_heads % ways and spec.kv_heads != 1):
        heads = ()
    used = set(heads)
    result = {"h": heads, "k": heads if spec.kv_heads % _ways(mesh, heads) == 0 else ()}
    for role, part in chosen.items():
        if role not in ("h", "k"):
            result[role] = part if not used & set(part) else ()
            used |= set(result[role])
    return result


def _ways(mesh, axes) -> int:
    ways = 1
    for axis in axes:
        ways *= mesh.shape[axis]
    return ways


def _shardings(job: _Job, mesh, axes, arg_shapes):
    """How operands and results must lie for each device to run the kernel on its share."""
    leaves, results = _roles(job)

    def place(lead, roles, shape=(), name=None):
        parts = []
        for i, role in enumerate([*lead, *(roles or "")]):
            broadcast = name == "bias" and shape[i] == 1
            parts.append(None if broadcast else axes.get(role) or None)
        return NamedSharding(mesh, PartitionSpec(*parts))

    shapes = [s.shape for s in jax.tree.leaves(arg_shapes)]
    operands = [
        place(*leaf, shape, name)
        for leaf, shape, name in zip(leaves, shapes, job.names, strict=True)
    ]
    return operands, tuple(place(*result) for result in results)


def _infer(job: _Job, mesh, arg_shapes, result_shapes):
    del result_shapes
    return _shardings(job, mesh, _axes(job, mesh, arg_shapes), arg_shapes)[1]


def _partition(job: _Job, mesh, arg_shapes, result_shapes):
    """What one device runs, and how operands and results lie."""
    del result_shapes
    axes = _axes(job, mesh, arg_shapes)
    operands, results = _shardings(job, mesh, axes, arg_shapes)
    # One KV head shared by query heads on several devices: its gradient is the sum of their shares.
    shared = axes["h"] if axes["h"] and not axes["k"] else ()

    def lower(*leaves):
        index = job.names.index("q")
        shape = leaves[index].shape[sum(level[index] for level in job.levels) :]

        def begins(role, axis):
            if not axes.get(role):
                return jnp.int32(0)
            return lax.axis_index(axes[role]).astype(jnp.int32) * jnp.int32(shape[axis])

        origin = jnp.stack([begins("b", 0), begins("h", 2)])
        outs = _local(job, leaves, origin)
        if not shared:
            return outs
        return tuple(
            lax.psum(x.astype(jnp.float32), shared).astype(x.dtype) if name in ("dk", "dv") else x
            for name, x in zip(job.results, outs, strict=True)
        )

    return mesh, lower, results, tuple(operands)
