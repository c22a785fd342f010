"""The only place that calls wgmma: products of tiles into an accumulator, waits, reads.

A product is asynchronous on the card: it reads its operands in shared memory, through the async
proxy, until a wait says that it is done; only then may a slot be released or overwritten.

In the interpreter an accumulator is a plain buffer in registers and a product plain `jnp`, so that
nothing of JAX's interpreter need be changed. Its reads and waits stand in scopes by whose names the
race detector (`_mosaic_interpret.py`) knows them, and treats them as the card would.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import _compat
from pallas_attn.call import Call


def accumulator(shape: tuple[int, int], *, call: Call):
    """What `pl.run_scoped` allocates for a float32 accumulator, zero at first.

    Inside, `acc[...] = x` sets it, and `load` reads it.
    """
    if call.interpret:
        return plgpu.MemorySpace.REGS(shape, jnp.float32)
    return plgpu.ACC(shape, jnp.float32)


def qk(acc, q_smem, k_smem, *, call: Call) -> None:
    """Starts acc [m, n] += q [m, d] kᵀ, with k [n, d]; both in shared memory."""
    dot(acc, q_smem, k_smem, call=call, transpose_b=True)


def pv(acc, p, v_smem, *, call: Call, v_rows=None) -> None:
    """Starts acc [m, d] += p [m, n] v [n, d]; p in registers. `v_rows`: `dot`'s b_rows."""
    dot(acc, p, v_smem, call=call, b_rows=v_rows)


def dot(
    acc, a, b, *, call: Call, transpose_a: bool = False, transpose_b: bool = False, b_rows=None
) -> None:
    """Starts acc [m, n] += a b, with a [m, k] and b [k, n].

    Args:
        acc: an accumulator.
        a: in shared memory, or in registers.
        b: in shared memory.
        call: says whether this is the interpreter.
        transpose_a: a in shared memory is [k, m].
        transpose_b: b is [n, k].
        b_rows: bool or int32 [k], 0 where b's row is padding and may hold NaN; None where none is.
            Used in the interpreter alone, where such rows count as 0; on the card they must have
            been zeroed in shared memory before.
    """
    in_registers = isinstance(a, jnp.ndarray)
    if not call.interpret:
        if transpose_a:
            a = a.transpose((1, 0))
        plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)
        return
    with _compat.interpreter_event("wgmma_operand"):
        left = a if in_registers else a[...]
    with _compat.interpreter_event("wgmma_last_operand"):
        right = b[...]
    left = left.astype(jnp.float32)
    right = right.astype(jnp.float32)
    if b_rows is not None:
        axis = 1 if transpose_b else 0
        keep = lax.broadcast_in_dim(b_rows.astype(jnp.bool_), right.shape, [axis])
        right = jnp.where(keep, right, jnp.zeros_like(right))
    contract = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    product = lax.dot_general(left, right, (contract, ((), ())), precision=lax.Precision.HIGHEST)
    with _compat.interpreter_event("wgmma_sum"):
        acc[...] = acc[...] + product


def hold(ref, columns: int, *, call: Call):
    """The first columns of a left operand in shared memory, in registers; None if these are 0."""
    if columns == 0:
        return None
    part = ref.at[:, pl.ds(0, columns)]
    return part[...] if call.interpret else plgpu.load(part, layout=plgpu.Layout.WGMMA)


def dot_held(acc, held, a, b, *, call: Call) -> None:
    """Starts acc [m, n] += a bᵀ, with a [m, k] and b [n, k] in shared memory.

    `held`: what `hold` gave of a, which then is not read again.
    """
    if held is None:
        dot(acc, a, b, call=call, transpose_b=True)
        return
    n = held.shape[1]
    dot(acc, held, b.at[:, pl.ds(0, n)], call=call, transpose_b=True)
    if rest := a.shape[1] - n:
        parts = (x.at[:, pl.ds(n, rest)] for x in (a, b))
        dot(acc, *parts, call=call, transpose_b=True)


def wait(acc, pending: int, *, call: Call) -> None:
    """Waits until at most `pending` products of this warpgroup are under way.

    Args:
        acc: any accumulator that is live here.
        pending: how many of the latest products may still run.
        call: says whether this is the interpreter.
    """
    if not call.interpret:
        plgpu.wgmma_wait(pending)
        return
    with _compat.interpreter_event(f"wgmma_wait_{pending}"):
        acc[...]


def load(acc, pending: int | None = 0, *, call: Call):
    """The accumulator's value [m, n], in registers.

    Args:
        acc: the accumulator.
        pending: waits first until at most so many products are under way; None does not wait.
        call: says whether this is the interpreter.
    """
    if not call.interpret:
        return plgpu.wgmma_accumulator_load(acc, wait_n=pending)
    if pending is not None:
        wait(acc, pending, call=call)
    return acc[...]
