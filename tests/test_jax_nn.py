"""`dot_product_attention` against `jax.nn.dot_product_attention`, argument by argument."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 19, 24, 4, 2, 16
Q_LENS, KV_LENS = np.array([19, 7], np.int32), np.array([11, 24], np.int32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def operands(q_len=Q_LEN, kv_len=KV_LEN, heads=HEADS, kv_heads=KV_HEADS):
    kv = (BATCH, kv_len, kv_heads, DIM)
    return normal(0, BATCH, q_len, heads, DIM), normal(1, *kv), normal(2, *kv)


def random_mask(*shape):
    mask = np.random.default_rng(3).random(shape) < 0.6
    mask[..., 0] = True  # Every row sees something.
    return jnp.asarray(mask)


def check(*arrays, rows=None, **options):
    """Equal outputs, and equal gradients, on the rows given (all without)."""
    weights = normal(4, *arrays[0].shape)
    if rows is not None:
        weights = weights * rows.astype(jnp.float32).reshape(*rows.shape, 1, 1)

    def run(attend):
        def loss(*arrays):
            out = attend(*arrays, **options)
            return (out * weights).sum(), out

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    (_, ours), our_grads = run(pa.dot_product_attention)
    (_, theirs), their_grads = run(jax.nn.dot_product_attention)
    if rows is not None:
        assert not np.asarray(ours)[~np.asarray(rows)].any()
        ours, theirs = (np.asarray(x)[np.asarray(rows)] for x in (ours, theirs))
    for a, b in zip((ours, *our_grads), (theirs, *their_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_the_signature_is_that_of_jax_nn():
    ours = inspect.signature(inspect.unwrap(pa.dot_product_attention)).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_heads(heads):
    check(*operands(heads=heads[0], kv_heads=heads[1]))


@pytest.mark.parametrize("sizes", [(19, 24), (24, 19), (1, 24)], ids=str)
def test_causal_is_aligned_as_in_jax_nn(sizes):
    check(*operands(*sizes), is_causal=True)


@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
def test_scale(scale):
    check(*operands(), scale=scale)


@pytest.mark.parametrize("shape", [
    (2, 4, 19, 24), (1, 4, 19, 24), (2, 1, 1, 24), (1, 1, 19, 1), (1, 1, 1, 1),
], ids=str)  # fmt: skip
def test_bias_and_mask_broadcast(shape):
    check(*operands(), normal(5, *shape))
    if shape[-1] != 1:
        check(*operands(), None, random_mask(*shape))


def test_bias_and_mask_together():
    bias, mask = normal(5, 1, 4, 19, 24), random_mask(2, 1, 19, 24)
    check(*operands(), bias=bias, mask=mask, is_causal=True)


@pytest.mark.parametrize(
    ("window", "causal"),
    [(0, False), (3, False), (3, True), ((4, 0), False), ((0, 5), False), ((2, 7), True)],
    ids=str,
)
def test_local_window(window, causal):
    check(*operands(20, 20), local_window_size=window, is_causal=causal)


@pytest.mark.parametrize(
    ("which", "causal"), [("q", False), ("kv", False), ("kv", True), ("both", True)]
)
def test_lengths_alone_and_together(which, causal):
    q_lens = Q_LENS if which != "kv" else None
    kv_lens = KV_LENS if which != "q" else None
    rows = None if q_lens is None else jnp.arange(Q_LEN)[None] < jnp.asarray(q_lens)[:, None]
    check(
        *operands(), rows=rows, is_causal=causal,
        query_seq_lengths=None if q_lens is None else jnp.asarray(q_lens),
        key_value_seq_lengths=None if kv_lens is None else jnp.asarray(kv_lens),
    )  # fmt: skip


def test_everything_at_once():
    check(
        *operands(), normal(5, 1, 4, 19, 24), random_mask(2, 1, 19, 24), scale=0.4, is_causal=True,
        rows=jnp.arange(Q_LEN)[None] < jnp.asarray(Q_LENS)[:, None],
        query_seq_lengths=jnp.asarray(Q_LENS), key_value_seq_lengths=jnp.asarray(KV_LENS),
        local_window_size=(30, 1),
    )  # fmt: skip


def test_without_batch():
    q, k, v = (x[0] for x in operands())
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize("rank", [3, 4])
def test_residual(rank):
    arrays = operands() if rank == 4 else [x[0] for x in operands()]
    ours = pa.dot_product_attention(*arrays, is_causal=True, return_residual=True)
    theirs = jax.nn.dot_product_attention(*arrays, is_causal=True, return_residual=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    grad = jax.grad(
        lambda q: pa.dot_product_attention(q, *arrays[1:], return_residual=True)[1].sum()
    )
    assert not np.asarray(grad(arrays[0])).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype):
    arrays = [x.astype(dtype) for x in operands()]
    ours = pa.dot_product_attention(*arrays, is_causal=True)
    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.nn.dot_product_attention(*arrays, is_causal=True)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(
        ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=0.03, rtol=0.03
    )


def test_rows_that_see_nothing_are_the_stated_difference():
    q, k, v = operands()
    mask = np.ones((1, 1, Q_LEN, KV_LEN), bool)
    mask[..., 5, :] = False
    out = pa.dot_product_attention(q, k, v, mask=jnp.asarray(mask))
    assert not np.asarray(out[:, 5]).any()
    assert np.asarray(jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask))[:, 5]).any()


def test_implementation_names_a_backend():
    q, k, v = operands()
    with pa.interpret():
        np.testing.assert_allclose(
            pa.dot_product_attention(q, k, v, implementation="triton"),
            pa.dot_product_attention(q, k, v, implementation="xla"),
            atol=2e-5,
        )
    with pytest.raises(
        ValueError, match="implementation: got 'cudnn', expected one of mosaic_gpu, triton, xla"
    ):
        inspect.unwrap(pa.dot_product_attention)(q, k, v, implementation="cudnn")


def test_errors_name_the_argument():
    q, k, v = operands()
    for name in ("bias", "mask"):
        with pytest.raises(ValueError, match=rf"{name}: got shape \(19, 24\), expected rank 4"):
            pa.dot_product_attention(q, k, v, **{name: jnp.ones((19, 24), bool)})
    with pytest.raises(TypeError, match="mask: got dtype float32, expected bool"):
        pa.dot_product_attention(q, k, v, mask=jnp.ones((1, 1, 19, 24)))
    with pytest.raises(ValueError, match=r"kv_lens: got shape \(3,\)"):
        pa.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.ones(3, jnp.int32))
    for window in (-1, (1, -2)):
        with pytest.raises(ValueError, match=r"(left|right): got -\d, expected an int from 0 up"):
            pa.dot_product_attention(q, k, v, local_window_size=window)


def test_all_orders_of_static_arguments_trace_under_jit():
    q, k, v = operands()
    for causal, residual in itertools.product((False, True), repeat=2):
        fn = jax.jit(pa.dot_product_attention, static_argnames=("is_causal", "return_residual"))
        fn(q, k, v, is_causal=causal, return_residual=residual)
