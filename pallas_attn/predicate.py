"""`Predicate`: any function of (batch, head, q_index, kv_index) as a mask, arrays it closes over included.

The function is traced once on four scalars. The trace is then evaluated on whole tiles: every scalar
of the trace becomes an array with one element per (query, key) pair, and reading a closed-over array at
a scalar index becomes a gather. The same evaluation serves plain JAX, where closed-over arrays are
arrays, and kernels, where they are references to device memory.
"""

import functools

import jax
import jax.numpy as jnp

_INDEX = jax.ShapeDtypeStruct((), jnp.int32)
# Primitives that only change the shape of a one-element value; on tiles they do nothing.
_RESHAPES = ("squeeze", "reshape", "broadcast_in_dim", "copy", "copy_p", "expand_dims")
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr",
          "custom_jvp_call": "call_jaxpr", "remat": "jaxpr", "checkpoint": "jaxpr"}  # fmt: skip


class Trace:
    """A traced predicate, compared by its text so that equal predicates share compiled code."""

    def __init__(self, jaxpr):
        self.jaxpr = jaxpr

    @functools.cached_property
    def text(self) -> str:
        return str(self.jaxpr)

    def uses(self, index: int) -> bool:
        """Whether the answer depends on the index-th of (batch, head, q, kv)."""
        var = self.jaxpr.invars[index]
        read = (v for eqn in self.jaxpr.eqns for v in eqn.invars)
        return any(v is var for v in (*read, *self.jaxpr.outvars))

    def __eq__(self, other):
        return isinstance(other, Trace) and self.text == other.text

    def __hash__(self):
        return hash(self.text)


def trace(fn) -> tuple[Trace, tuple[jax.Array, ...]]:
    """Traces `fn` on four int32 scalars.

    Returns:
        the trace, and the arrays that `fn` closes over.

    Raises:
        TypeError: when `fn` is not callable or does not give one bool.
        NotImplementedError: when it uses an operation that has no elementwise form.
    """
    if not callable(fn):
        raise TypeError(f"Predicate: got {type(fn).__name__}, expected a function")
    closed = jax.make_jaxpr(fn)(_INDEX, _INDEX, _INDEX, _INDEX)
    if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
        raise TypeError(
            "Predicate: fn(batch, head, q_index, kv_index) gave "
            f"{[str(a) for a in closed.out_avals]}, expected one bool scalar"
        )
    if closed.out_avals[0].dtype != jnp.bool_:
        raise TypeError(f"Predicate: fn gave {closed.out_avals[0].dtype}, expected bool")
    _check(closed.jaxpr)
    return Trace(closed.jaxpr), tuple(jnp.asarray(c) for c in closed.consts)


def _check(jaxpr, arrays=None):
    """Refuses, by name, what `evaluate` could not do."""
    arrays = set(jaxpr.constvars) if arrays is None else arrays
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dynamic_slice" and eqn.invars[0] in arrays:
            if any(size != 1 for size in eqn.params["slice_sizes"]):
                raise NotImplementedError(
                    "Predicate: reads more than one element of an array at once"
                )
            continue
        if name in _CALLS:
            inner = _inner(eqn)
            _check(inner, {i for i, o in zip(inner.invars, eqn.invars, strict=True)
                           if not hasattr(o, "val") and o in arrays} | set(inner.constvars))  # fmt: skip
            continue
        sizes = [v.aval.size for v in (*eqn.invars, *eqn.outvars)]
        if any(size != 1 for size in sizes):
            raise NotImplementedError(
                f"Predicate: operation {name!r} works on arrays of {sizes} elements; inside a "
                "predicate only scalars and array[scalar, ...] can be used"
            )


def _inner(eqn):
    inner = eqn.params[_CALLS[eqn.primitive.name]]
    return getattr(inner, "jaxpr", inner)


def evaluate(traced: Trace, arrays, batch, head, q, kv):
    """The predicate's value for index arrays that broadcast against each other.

    Args:
        traced, arrays: from `trace`; arrays may be references inside a kernel.
        batch, head, q, kv: int32 arrays.

    Returns:
        bool, of the broadcast shape.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in (batch, head, q, kv)))
    indices = [jnp.asarray(x, jnp.int32) for x in (batch, head, q, kv)]
    (out,) = _evaluate(traced.jaxpr, arrays, indices, shape)
    return jnp.broadcast_to(out, shape)


def _evaluate(jaxpr, consts, args, shape):
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var):
        return jnp.asarray(var.val, var.aval.dtype) if hasattr(var, "val") else values[var]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        ins = [read(v) for v in eqn.invars]
        if name == "dynamic_slice":
            outs = [_lookup(ins[0], eqn.invars[0].aval.shape, ins[1:])]
        elif name in _RESHAPES:
            outs = [ins[0]]
        elif name in _CALLS:
            inner = _inner(eqn)
            outs = _evaluate(inner, getattr(eqn.params[_CALLS[name]], "consts", ()), ins, shape)
        else:
            # Scalars meet tiles only in one shape: Triton has no implicit broadcasting.
            wide = jnp.broadcast_shapes(*(jnp.shape(x) for x in ins)) if ins else shape
            out = eqn.primitive.bind(*(jnp.broadcast_to(x, wide) for x in ins), **eqn.params)
            outs = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _lookup(array, shape, indices):
    """array[indices] with indices clamped into bounds, as `lax.dynamic_slice` does."""
    if not shape:
        return array[...]
    clamped = tuple(
        jnp.clip(jnp.asarray(i, jnp.int32), jnp.int32(0), jnp.int32(n - 1))
        for i, n in zip(indices, shape, strict=True)
    )
    return array[clamped]
