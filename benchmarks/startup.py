"""What a first call costs, and what later ones cost the host: measured alone, one after the other.

A first call is everything that a user waits for: tracing, lowering, compiling, loading the module
and running, of a jitted function that plans its tables inside. Nothing else runs meanwhile.
"""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from benchmarks import check, impls

HOST_CALLS = 100
# JAX reports every compilation under this name.
_COMPILED = "/jax/core/compile/backend_compile_duration"


def functions_of(impl, case):
    """Returns jitted functions of (q, k, v, raw): the forward, and the gradients of its sum."""

    def forward(q, k, v, raw):
        return impl.forward(case, q, k, v, impl.prepare(case, raw))

    def total(q, k, v, raw):
        return forward(q, k, v, raw).astype(jnp.float32).sum()

    return jax.jit(forward), jax.jit(jax.grad(total, (0, 1, 2)))


def other_batch(case):
    """Returns the case with its documents in the reverse order: the same shapes, other masks."""
    return replace(case, mask=replace(case.mask, lengths=case.mask.lengths[::-1]))


def _first(function, *args):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def _host_us(function, *args):
    jax.block_until_ready(function(*args))
    result, start = None, time.perf_counter()
    for _ in range(HOST_CALLS):
        result = function(*args)
    seconds = time.perf_counter() - start
    jax.block_until_ready(result)
    return seconds / HOST_CALLS * 1e6


class Compilations:
    """Inside, counts what JAX compiles."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event, duration_secs, **_):
        self.count += event == _COMPILED

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


def measure(impl, case):
    """Returns the fields of a result.

    Returns:
        ms: of the first forward call, all of it; first_grad_s: seconds of the first gradients, the
        forward not known; host_us: of a later forward call; compiled_again: how many programs
        another batch of documents compiled, forward and gradients, None without documents.
    """
    inputs = jax.block_until_ready(check.make_inputs(case.shape)[:3])
    raw, other = (jax.device_put(impls.raw_operands(c)) for c in (case, other_batch(case)))
    forward, gradients = functions_of(impl, case)
    first = _first(forward, *inputs, raw)
    fields: dict[str, float | int | None] = {
        "first_s": round(first, 3),
        "first_grad_s": round(_first(gradients, *inputs, raw), 3),
        "ms": round(first * 1e3, 1),
        "host_us": round(_host_us(forward, *inputs, raw), 1),
        "compiled_again": None,
    }
    if raw:
        with Compilations() as seen:
            jax.block_until_ready([f(*inputs, other) for f in (forward, gradients)])
        fields["compiled_again"] = seen.count
    return fields
