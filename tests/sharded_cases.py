"""Checks that need four devices.

test_sharding.py runs this as a program and reads the JSON that it prints last."""

import contextlib
import functools
import json
import os
import re
import sys
import traceback

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa

TILES = pa.Tiles(*(pa.KernelTiles(64, 64),) * 3)
COLLECTIVE = r"(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
Q_LEN = 130


@functools.cache
def mesh():
    return jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operands(q_heads, kv_heads, dim=16, batch=2):
    return (
        normal(0, batch, Q_LEN, q_heads, dim),
        normal(1, batch, Q_LEN, kv_heads, dim),
        normal(2, batch, Q_LEN, kv_heads, dim),
        normal(3, batch, Q_LEN, q_heads, dim),
    )


def placed(x, *spec):
    return jax.device_put(x, NamedSharding(mesh(), P(*spec)))


def close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, atol=3e-5, rtol=1e-5)


def gradients(backend, mask_of, q, k, v, dout, *arrays):
    def loss(q, k, v):
        out, lse = pa.mha(q, k, v, mask_of(*arrays), backend=backend, tiles=TILES, return_lse=True)
        return (out * dout).sum() + 0.1 * jnp.where(lse > -jnp.inf, lse, 0.0).sum(), (out, lse)

    (_, outs), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return outs, grads


def collectives(fn, *args) -> list[str]:
    return re.findall(COLLECTIVE, jax.jit(fn).lower(*args).compile().as_text())


def equals_one_device(backend, q_heads, kv_heads):
    """Every array sharded, the cotangent otherwise than q; the mask looks at batch and head."""
    shift = jnp.arange(q_heads, dtype=jnp.int32)
    ids = jnp.asarray(np.sort(np.random.default_rng(4).integers(0, 3, (2, Q_LEN))), jnp.int32)

    def mask_of(ids):
        odd = pa.Predicate(lambda b, h, i, j: (i - j) % 7 == shift[h] + b + 1)
        return pa.Causal() & pa.Document(ids) & ~odd

    fn = functools.partial(gradients, backend, mask_of)
    q, k, v, dout = operands(q_heads, kv_heads)
    expected = jax.jit(fn)(q, k, v, dout, ids)
    kv_spec = ("data", None, "heads" if kv_heads > 1 else None)
    actual = jax.jit(fn)(
        placed(q, "data", None, "heads"), placed(k, *kv_spec), placed(v, *kv_spec),
        placed(dout, None, "data", "heads"), placed(ids, "data"),
    )  # fmt: skip
    close(actual, expected)


def no_communication(backend, q_heads, kv_heads):
    """Batch and heads sharded alike everywhere: nothing moves, but one KV head's gradients."""
    fn = functools.partial(gradients, backend, lambda: pa.Causal() & pa.SlidingWindow(70))
    q, k, v, dout = operands(q_heads, kv_heads)
    spec = ("data", None, "heads")
    kv_spec = spec if kv_heads > 1 else ("data", None, None)
    args = (placed(q, *spec), placed(k, *kv_spec), placed(v, *kv_spec), placed(dout, *spec))

    def without_scalars(*args):
        return fn(*args)[1], fn(*args)[0]

    found = collectives(without_scalars, *args)
    allowed = {"all-reduce"} if kv_heads == 1 else set()
    assert set(found) <= allowed, found


def shard_mapped(backend, check):
    fn = functools.partial(gradients, backend, lambda ids: pa.Causal() & pa.Document(ids))
    spec, lse = P("data", None, "heads"), P("data", "heads")
    return fn, jax.shard_map(
        fn, mesh=mesh(), in_specs=(spec,) * 4 + (P("data"),), out_specs=((spec, lse), (spec,) * 3),
        check_vma=check,
    )  # fmt: skip


def explicit_shard_map(backend):
    """shard_map equals one device; its check of varying axes is on where nothing is interpreted."""
    fn, sharded = shard_mapped(backend, check=backend == "xla")
    q, k, v, dout = operands(4, 2)
    ids = jnp.asarray(np.sort(np.random.default_rng(4).integers(0, 3, (2, Q_LEN))), jnp.int32)
    close(jax.jit(sharded)(q, k, v, dout, ids), jax.jit(fn)(q, k, v, dout, ids))


def shard_map_check_while_interpreting():
    """Pallas' interpreter cannot, and says what to do."""
    _, sharded = shard_mapped("triton", check=True)
    q, k, v, dout = operands(4, 2)
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        jax.jit(sharded)(q, k, v, dout, jnp.zeros((2, Q_LEN), jnp.int32))


def shard_map_check_passes_for_a_gpu():
    """With the check on, forward and backward trace to kernels when not interpreted."""
    from pallas_attn import gpu

    _, sharded = shard_mapped("triton", check=True)
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    q, k = struct((2, Q_LEN, 4, 64)), struct((2, Q_LEN, 2, 64))
    dout = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    ids = jax.ShapeDtypeStruct((2, Q_LEN), jnp.int32)
    with gpu.target("h200"):
        traced = jax.jit(sharded).trace(q, k, k, dout, ids)
    assert "pallas_attn_fwd" in str(traced.jaxpr)
    assert "pallas_attn_dk_dv" in str(traced.jaxpr)


def mapped_axis_sharded(backend):
    """vmap over operands without batch whose mapped axis is sharded: nothing is gathered."""
    q, k, v, _ = operands(4, 2, batch=4)

    def fn(q, k, v):
        one = functools.partial(pa.mha, mask=pa.Causal(), backend=backend, tiles=TILES)
        return jax.vmap(lambda q, k, v: one(q, k, v))(q, k, v)

    args = tuple(placed(x, ("data", "heads")) for x in (q, k, v))
    close(jax.jit(fn)(*args), jax.jit(fn)(q, k, v))
    assert collectives(fn, *args) == []


def uneven_heads_raise():
    """One KV head cannot be spread over two devices: JAX says so."""
    x = normal(0, 2, Q_LEN, 1, 16)
    with pytest.raises(ValueError, match="evenly divide"):
        placed(x, "data", None, "heads")


CHECKS = {
    **{
        f"{check.__name__}-{backend}-{q_heads}-{kv_heads}": functools.partial(
            check, backend, q_heads, kv_heads
        )
        for check in (equals_one_device, no_communication)
        for backend in ("triton", "xla")  # what takes float32
        for q_heads, kv_heads in ((4, 2), (4, 4), (4, 1))
    },
    **{
        f"{check.__name__}-{backend}": functools.partial(check, backend)
        for check in (explicit_shard_map, mapped_axis_sharded)
        for backend in ("triton", "xla")  # what takes float32
    },
    "uneven_heads_raise": uneven_heads_raise,
    "shard_map_check_while_interpreting": shard_map_check_while_interpreting,
    "shard_map_check_passes_for_a_gpu": shard_map_check_passes_for_a_gpu,
}


def main(names) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    results = {}
    for name in names or CHECKS:
        try:
            real = contextlib.nullcontext() if name.endswith("for_a_gpu") else pa.interpret()
            with real:
                CHECKS[name]()
            results[name] = None
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()[-3000:]
        print(name, "ok" if results[name] is None else "FAILED", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
