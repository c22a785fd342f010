"""`Predicate`: any function of (batch, head, q_index, kv_index), and its arrays, as a mask.

The function is traced once on four scalars. The trace is then evaluated on whole tiles: every
scalar of the trace becomes an array with one element per (query, key) pair, and reading a
closed-over array at a scalar index becomes a gather. The same evaluation serves plain JAX, where
closed-over arrays are arrays, and kernels, where they are references to device memory.
"""

import functools

import jax
import jax.numpy as jnp

_INDEX = jax.ShapeDtypeStruct((), jnp.int32)
# Primitives that only change the shape of a one-element value; on tiles they do nothing.
_RESHAPES = ("squeeze", "reshape", "broadcast_in_dim", "copy", "copy_p", "expand_dims")
# Functions called by a trace and the parameter that holds them; they are inlined.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
}
_CONTROL_FLOW = ("cond", "while", "scan")


class Trace:
    """A traced predicate, compared by its text so that equal predicates share compiled code.

    The text holds no values of closed-over arrays: all of those are operands.
    """

    def __init__(self, jaxpr):
        self.jaxpr = jaxpr

    @functools.cached_property
    def text(self) -> str:
        """The operations, closed-over arrays by type only."""
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
    outs = closed.out_avals
    if len(outs) != 1 or not isinstance(outs[0], jax.core.ShapedArray) or outs[0].shape != ():
        raise TypeError(
            "Predicate: fn(batch, head, q_index, kv_index) gave "
            f"{[str(a) for a in outs]}, expected one bool scalar"
        )
    if outs[0].dtype != jnp.bool_:
        raise TypeError(f"Predicate: fn gave {outs[0].dtype}, expected bool")
    # Arrays that an inner jit closes over become arrays of the whole trace.
    closed = jax.make_jaxpr(lambda *at: _inline(closed.jaxpr, closed.consts, at))(*[_INDEX] * 4)
    _check(closed.jaxpr)
    return Trace(closed.jaxpr), tuple(jnp.asarray(c) for c in closed.consts)


def _inline(jaxpr, consts, args):
    """Runs a trace with the functions that it calls spelled out."""

    def take(eqn, ins):
        if (param := _CALLS.get(eqn.primitive.name)) is not None:
            inner = eqn.params[param]
            return _inline(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), ins)
        out = eqn.primitive.bind(*ins, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    return _run(jaxpr, consts, args, take)


def _run(jaxpr, consts, args, take):
    """Interprets a trace; `take(eqn, ins)` gives the outputs of one operation."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var):
        return jnp.asarray(var.val, var.aval.dtype) if hasattr(var, "val") else values[var]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, take(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _check(jaxpr):
    """Refuses, by name, what `evaluate` could not do."""
    arrays = set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if (
            name == "dynamic_slice"
            and not hasattr(eqn.invars[0], "val")
            and eqn.invars[0] in arrays
        ):
            if any(size != 1 for size in eqn.params["slice_sizes"]):
                raise NotImplementedError(
                    "Predicate: reads more than one element of an array at once"
                )
            continue
        if name in _CONTROL_FLOW or name.startswith("random_"):
            raise NotImplementedError(
                f"Predicate: operation {name!r} has no form for whole tiles (in place of control "
                "flow use jnp.where)"
            )
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        single = all(a.size == 1 for a in avals)
        if not single or (name not in _RESHAPES and any(a.shape for a in avals)):
            raise NotImplementedError(
                f"Predicate: operation {name!r} works on arrays of shapes "
                f"{[a.shape for a in avals]}; inside a predicate only scalars and "
                "array[scalar, ...] can be used"
            )


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
    def take(eqn, ins):
        name = eqn.primitive.name
        if name == "dynamic_slice":
            return [_lookup(ins[0], eqn.invars[0].aval.shape, ins[1:])]
        if name in _RESHAPES:
            return [ins[0]]
        # Scalars meet tiles only in one shape: Triton has no implicit broadcasting.
        wide = jnp.broadcast_shapes(*(jnp.shape(x) for x in ins)) if ins else shape
        out = eqn.primitive.bind(*(jnp.broadcast_to(x, wide) for x in ins), **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    return _run(jaxpr, consts, args, take)


def _lookup(array, shape, indices):
    """array[indices] with indices clamped into bounds, as `lax.dynamic_slice` does."""
    if not shape:
        return array[...]
    clamped = tuple(
        jnp.clip(jnp.asarray(i, jnp.int32), jnp.int32(0), jnp.int32(n - 1))
        for i, n in zip(indices, shape, strict=True)
    )
    return array[clamped]
