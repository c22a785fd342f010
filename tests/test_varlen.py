"""Packed sequences against each alone: every mask, empty sequences, what lies past the end."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import reference, varlen

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 8
# Empty sequences at the start, in the middle and at the end; tokens past the last offset.
CU = np.array([0, 0, 9, 10, 10, 31, 38, 38], np.int32)
CU_KV = np.array([0, 5, 5, 12, 12, 40, 41, 43], np.int32)
TOTAL, KV_TOTAL = 41, 47
SEQUENCES = len(CU) - 1
PREFIX = np.array([1, 3, 0, 4, 7, 2, 1], np.int32)
USED = np.array([1, 4, 3, 0, 11, 9, 0], np.int32)
OFFSETS = np.array([0, 2, -1, 3, 5, -2, 0], np.int32)
TILES = pa.Tiles(*(pa.KernelTiles(16, 16),) * 3)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def operands(total=TOTAL, kv_total=KV_TOTAL):
    q, k = normal(0, total, HEADS, DIM), normal(1, kv_total, KV_HEADS, DIM)
    return q, k, normal(2, kv_total, KV_HEADS, V_DIM)


# name: (the packed call's mask, sequence -> the mask of that sequence alone)
MASKS = {
    "none": (None, lambda s: None),
    "full": (pa.Full(), lambda s: None),
    "causal": (pa.Causal(), lambda s: pa.Causal()),
    "bottom_right": (pa.Causal(align="bottom_right"), lambda s: pa.Causal(align="bottom_right")),
    "offsets": (pa.Causal(OFFSETS), lambda s: pa.Causal(int(OFFSETS[s]))),
    "window": (pa.SlidingWindow(4, 2), lambda s: pa.SlidingWindow(4, 2)),
    "window_end": (
        pa.SlidingWindow(4, 0, align="bottom_right"),
        lambda s: pa.SlidingWindow(4, 0, align="bottom_right"),
    ),
    "chunked": (pa.Causal() & pa.Chunked(5), lambda s: pa.Causal() & pa.Chunked(5)),
    "prefix": (pa.PrefixLM(PREFIX), lambda s: pa.PrefixLM(int(PREFIX[s]))),
    "lengths": (pa.Lengths(USED, USED + 1), lambda s: pa.Lengths(int(USED[s]), int(USED[s]) + 1)),
    "dilated": (pa.Dilated(2, 3), lambda s: pa.Dilated(2, 3)),
    "hole": (~pa.SlidingWindow(2, 1) | pa.Causal(-5),
             lambda s: ~pa.SlidingWindow(2, 1) | pa.Causal(-5)),
    "predicate": (
        pa.Predicate(lambda b, h, i, j: (i + j + h + b) % 3 != 0),
        lambda s: pa.Predicate(lambda b, h, i, j: (i + j + h + s) % 3 != 0),
    ),
}  # fmt: skip


def one_by_one(q, k, v, cu_q, cu_kv, mask_of, **options):
    """Each sequence through the reference; zeros and -inf past the last offset."""
    outs, lses = [], []
    cu_q, cu_kv = cu_q.tolist(), cu_kv.tolist()
    for s in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[s : s + 2]), slice(*cu_kv[s : s + 2])
        if rows.start == rows.stop:
            continue
        if keys.start == keys.stop:
            outs.append(jnp.zeros((rows.stop - rows.start, HEADS, V_DIM)))
            lses.append(jnp.full((HEADS, rows.stop - rows.start), -jnp.inf))
            continue
        out, lse = reference.mha(q[None, rows], k[None, keys], v[None, keys], mask_of(s), **options)
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - cu_q[-1]
    outs.append(jnp.zeros((rest, HEADS, V_DIM)))
    lses.append(jnp.full((HEADS, rest), -jnp.inf))
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def block_diagonal(cu_q, cu_kv, mask_of):
    """Which packed tokens see each other, asked one by one: [1, heads, total, kv_total]."""
    pairs = np.zeros((1, HEADS, TOTAL, KV_TOTAL), bool)
    cu_q, cu_kv = cu_q.tolist(), cu_kv.tolist()
    for s in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[s : s + 2]), slice(*cu_kv[s : s + 2])
        sizes = (rows.stop - rows.start, keys.stop - keys.start)
        if all(sizes):
            pairs[..., rows, keys] = reference.visible(mask_of(s), 1, HEADS, *sizes)
    return pairs


@jax.jit
def under_pairs(q, k, v, pairs):
    """Out, lse and gradients of the reference; the mask is an operand: one compilation for all."""

    def attend(q, k, v):
        out, lse = reference.mha(q[None], k[None], v[None], pa.Dense(pairs))
        return out[0], lse[0]

    grads = jax.grad(lambda *a: weighted(*attend(*a)), (0, 1, 2))(q, k, v)
    return (*attend(q, k, v), *grads)


def weighted(out, lse):
    """A loss with a non-zero cotangent on every row, those past the end included."""
    seen = lse > -jnp.inf
    z = jnp.where(seen, lse, 0.0)
    return (out * normal(5, *out.shape)).sum() + (z * normal(6, *z.shape)).sum()


def check(call, wanted, arrays, tolerance=3e-5):
    """Outputs, lse and every gradient; `call` and `wanted` take the arrays and give (out, lse)."""
    every = tuple(range(len(arrays)))
    got, got_grads = jax.jit(
        lambda *a: (call(*a), jax.grad(lambda *b: weighted(*call(*b)), every)(*a))
    )(*arrays)
    ref, ref_grads = jax.jit(
        lambda *a: (wanted(*a), jax.grad(lambda *b: weighted(*wanted(*b)), every)(*a))
    )(*arrays)
    for a, b in zip((*got, *got_grads), (*ref, *ref_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
    return got, got_grads


@pytest.mark.parametrize("name", MASKS)
def test_packed_equals_each_alone(name):
    mask, mask_of = MASKS[name]

    def call(q, k, v):
        return pa.mha_varlen(
            q, k, v, CU, CU_KV, mask=mask, return_lse=True, backend="xla", tiles=TILES
        )

    got = jax.jit(lambda *a: (*call(*a), *jax.grad(lambda *b: weighted(*call(*b)), (0, 1, 2))(*a)))(
        *operands()
    )
    wanted = under_pairs(*operands(), block_diagonal(CU, CU_KV, mask_of))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5, rtol=3e-5)
    out, lse, *grads = got
    assert not np.asarray(out[CU[-1] :]).any()
    assert (np.asarray(lse[:, CU[-1] :]) == -np.inf).all()
    for grad, end in zip(grads, (CU[-1], CU_KV[-1], CU_KV[-1]), strict=True):
        assert not np.asarray(grad[end:]).any()


@pytest.mark.parametrize("name", ["bottom_right", "predicate"])
def test_packed_equals_each_alone_in_kernels(name):
    mask, mask_of = MASKS[name]
    with pa.interpret():
        check(
            lambda q, k, v: pa.mha_varlen(
                q, k, v, CU, CU_KV, mask=mask, return_lse=True, backend="triton", tiles=TILES
            ),
            lambda q, k, v: one_by_one(q, k, v, CU, CU_KV, mask_of),
            operands(),
        )


def test_one_set_of_offsets_and_all_options():
    q, k, v = operands(TOTAL, TOTAL)
    sinks = normal(3, HEADS)
    options = {"scale": 0.3, "soft_cap": 2.0}

    def call(q, k, v, sinks):
        return pa.mha_varlen(
            q, k, v, CU, mask=pa.Causal(), sinks=sinks, return_lse=True, tiles=TILES, **options
        )

    def wanted(q, k, v, sinks):
        return one_by_one(q, k, v, CU, CU, lambda s: pa.Causal(), sinks=sinks, **options)

    check(call, wanted, (q, k, v, sinks))
    np.testing.assert_array_equal(
        pa.mha_varlen(q, k, v, CU), pa.mha_varlen(q, k, v, CU, CU, return_lse=True)[0]
    )


def test_bias_counts_in_packed_indices():
    q, k, v = operands()
    bias = normal(4, HEADS, TOTAL, KV_TOTAL)

    def call(q, k, v, bias):
        return pa.mha_varlen(q, k, v, CU, CU_KV, bias=bias, return_lse=True)

    def wanted(q, k, v, bias):
        segments = [
            np.searchsorted(cu, np.arange(n), "right") - 1
            for cu, n in ((CU, TOTAL), (CU_KV, KV_TOTAL))
        ]
        segments = [np.where(s < SEQUENCES, s, -1).astype(np.int32) for s in segments]
        mask = pa.Document(*segments)
        out, lse = reference.mha(q[None], k[None], v[None], mask, bias=bias[None])
        return out[0], lse[0]

    check(call, wanted, (q, k, v, bias))


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("mask", [pa.Causal(align="bottom_right"), pa.Dilated(2, 3)], ids=repr)
def test_nan_past_the_last_offset_does_not_leak(backend, mask):
    arrays = operands()
    ends = (CU[-1], CU_KV[-1], CU_KV[-1])
    planted = [x.at[end:].set(jnp.nan) for x, end in zip(arrays, ends, strict=True)]
    weights = normal(7, TOTAL, HEADS, V_DIM)

    @jax.jit
    def run(q, k, v, weights):
        def loss(q, k, v):
            out = pa.mha_varlen(q, k, v, CU, CU_KV, mask=mask, backend=backend, tiles=TILES)
            return (out * weights).sum(), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, grads

    with pa.interpret():
        clean_out, clean_grads = run(*arrays, weights)
        out, grads = run(*planted, weights)
    np.testing.assert_array_equal(out, clean_out)
    for grad, clean, end in zip(grads, clean_grads, ends, strict=True):
        np.testing.assert_array_equal(grad, clean)
        assert not np.asarray(grad[end:]).any()


def test_new_offsets_do_not_retrace():
    q, k, v = operands()
    traces = []

    @jax.jit
    def run(q, k, v, cu_q, cu_kv):
        traces.append(1)
        out = pa.mha_varlen(q, k, v, cu_q, cu_kv, mask=pa.Causal(align="bottom_right"))
        return out

    for cu_q, cu_kv in (
        (CU, CU_KV),
        (np.array([0, 41, 41, 41, 41, 41, 41, 41]), np.array([0, 47, 47, 47, 47, 47, 47, 47])),
        (np.arange(0, 40, 5), np.arange(0, 48, 6)),
        (np.zeros(8, int), np.zeros(8, int)),
    ):
        cu_q, cu_kv = (x.astype(np.int32) for x in (cu_q, cu_kv))
        got = run(q, k, v, jnp.asarray(cu_q), jnp.asarray(cu_kv))
        pairs = block_diagonal(cu_q, cu_kv, lambda s: pa.Causal(align="bottom_right"))
        wanted, *_ = under_pairs(q, k, v, pairs)
        np.testing.assert_allclose(got, wanted, atol=3e-5)
    assert len(traces) == 1


def test_locate():
    segment, position = varlen.locate(jnp.asarray([0, 0, 3, 3, 5], jnp.int32), 7)
    np.testing.assert_array_equal(segment, [1, 1, 1, 3, 3, -1, -1])
    np.testing.assert_array_equal(position, [0, 1, 2, 0, 1, 0, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": jnp.zeros((1, 4, 2, 8))}, ValueError, r"q: got shape .*expected \[total, heads"),
        ({"v": jnp.zeros((4, 8))}, ValueError, r"v: got shape \(4, 8\), expected \[total, heads"),
        ({"cu_seqlens_q": jnp.zeros(1, jnp.int32)}, ValueError, r"cu_seqlens_q: got shape \(1,\)"),
        ({"cu_seqlens_q": jnp.zeros((2, 2), jnp.int32)}, ValueError, r"cu_seqlens_q: got shape"),
        ({"cu_seqlens_q": jnp.zeros(3)}, TypeError, "cu_seqlens_q: got dtype float32"),
        ({"cu_seqlens_q": [0, 1, 4]}, TypeError, "cu_seqlens_q: got list, expected an integer"),
        ({"cu_seqlens_q": np.array([0, 4, 1])}, ValueError, r"got \[0, 4, 1\], expected offsets"),
        ({"cu_seqlens_q": np.array([1, 2, 4])}, ValueError, "offsets that ascend from 0 to 4"),
        ({"cu_seqlens_kv": np.array([0, 2, 5])}, ValueError, r"kv: got \[0, 2, 5\], expected"),
        ({"q": [[[1.0]]]}, TypeError, "q: got list, expected an array"),
        ({"cu_seqlens_kv": jnp.zeros(4, jnp.int32)}, ValueError, "_kv: got 4 offsets, expected 3"),
        ({"mask": pa.plan(pa.Causal(), q_len=4, kv_len=4)}, TypeError, "mask: got a BlockTable"),
        ({"mask": pa.PrefixLM(np.ones(3, np.int32))}, ValueError, "mask: got per-sequence arrays"),
        ({"mask": 3}, TypeError, "mask: got int, expected a mask"),
        ({"backend": "cudnn"}, ValueError, "backend: got 'cudnn', expected one of"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, error, message):
    x = jnp.zeros((4, 2, 8))
    call = {"q": x, "k": x, "v": x, "cu_seqlens_q": jnp.asarray([0, 1, 4], jnp.int32)} | change
    with pytest.raises(error, match=message):
        inspect.unwrap(pa.mha_varlen)(**call)
