"""attention_fn: every keyword of flax's, and inside flax's own modules."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax_truth import FEATURES, HEADS, LEN, close, layer_by_hand, normal, softmax_by_hand, tril

import pallas_attn as pa
from pallas_attn import flax_linen, flax_nnx

LIBS = {"nnx": flax_nnx, "linen": flax_linen}
both = pytest.mark.parametrize("lib", LIBS.values(), ids=LIBS)


@pytest.fixture(scope="module")
def x():
    return normal(1, 2, LEN, FEATURES)


def padding_mask(*lead):
    keep = jnp.broadcast_to(jnp.arange(LEN) < 7, (*lead, LEN))
    return nn.make_attention_mask(jnp.full((*lead, LEN), True), keep)


MASKED = {
    "flax_causal": lambda: nn.make_causal_mask(jnp.ones((2, LEN))),
    "flax_padding": lambda: padding_mask(2),
    "bool_full": lambda: normal(5, 2, HEADS, LEN, LEN) > 0.5,
    "int_rows": lambda: jnp.asarray(tril(LEN), jnp.int32),
    "bool_keys": lambda: (jnp.arange(LEN) % 3 > 0).reshape(1, 1, 1, LEN),
    "no_batch": lambda: normal(5, HEADS, LEN, LEN) > 0.5,
    "two_batches": lambda: normal(5, 2, 3, 1, LEN, LEN) > 0.5,
    "second_batch": lambda: normal(5, 1, 3, 1, LEN, LEN) > 0.5,
    "no_leading": lambda: nn.make_causal_mask(jnp.ones((LEN,))),
    "none": lambda: None,
}
LEADS = {"two_batches": (2, 3), "second_batch": (2, 3), "no_leading": (), "none": (2, 3)}


@pytest.mark.parametrize("name", MASKED)
def test_attention_fn_masks(name):
    lead, mask = LEADS.get(name, (2,)), MASKED[name]()
    q, k, v = (normal(i, *lead, LEN, HEADS, 8) for i in range(3))
    got = jax.jit(flax_nnx.attention_fn)(q, k, v, mask=mask)
    close(got, softmax_by_hand(q, k, v, True if mask is None else mask))
    if name in ("flax_causal", "two_batches"):
        close(jax.jit(flax_linen.attention_fn)(q, k, v, mask=mask), got, 0)


@both
def test_attention_fn_bias_and_groups(lib):
    q, k, v = normal(0, 2, LEN, 6, 8), normal(1, 2, LEN, 2, 8), normal(2, 2, LEN, 2, 16)
    bias = normal(3, 6, 1, LEN)
    close(jax.jit(lib.attention_fn)(q, k, v, bias), softmax_by_hand(q, k, v, bias=bias))


@both
def test_attention_fn_takes_every_keyword_of_flax(lib):
    own = (nnx if lib is flax_nnx else nn).dot_product_attention
    flax = {n: p.default for n, p in inspect.signature(own).parameters.items()}
    ours = {n: p.default for n, p in inspect.signature(lib.attention_fn).parameters.items()}
    # linen passes nothing that the signature does not name, so it has to be there to be refused.
    assert {n: ours.get(n) for n in flax} == flax
    assert list(flax)[:5] == list(ours)[:5]


REFUSED = [
    ({"dropout_rate": 0.1}, LIBS),
    ({"dropout_rate": 0.1, "dropout_rng": 0}, LIBS),
    ({"module": object()}, LIBS),
    ({"precision": "highest"}, LIBS),
    ({"precision": jax.lax.Precision.HIGH}, LIBS),
    ({"input_positions": 0}, ["nnx"]),
    ({"einsum_dot_general": jax.lax.dot_general}, ["linen"]),
    ({"qk_attn_weights_einsum": jnp.einsum}, ["linen"]),
    ({"attn_weights_value_einsum": jnp.einsum}, ["linen"]),
]


@pytest.mark.parametrize(
    ("lib", "keywords"),
    [pytest.param(LIBS[n], k, id=f"{n}-{next(iter(k))}") for k, names in REFUSED for n in names],
)
def test_attention_fn_refuses_by_name(lib, keywords):
    q = normal(0, 1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=next(iter(keywords))):
        lib.attention_fn(q, q, q, **keywords)


@both
def test_attention_fn_honours_what_changes_nothing(lib):
    q = normal(0, 1, LEN, HEADS, 8)
    want = softmax_by_hand(q, q, q)
    same = [
        {"dropout_rate": 0.5, "deterministic": True, "broadcast_dropout": False},
        {"dropout_rng": jax.random.key(0)},
        {"precision": "highest", "backend": "xla"},
        {"dtype": jnp.bfloat16, "precision": "highest"},
    ]
    *outs, half = jax.jit(lambda q: [lib.attention_fn(q, q, q, **k) for k in same])(q)
    for out in outs:
        close(out, want)
    assert half.dtype == jnp.bfloat16
    close(half, want, 3e-2)


@both
def test_attention_fn_names_what_does_not_fit(lib):
    q = normal(0, 2, LEN, HEADS, 8)
    with pytest.raises(TypeError, match="windoe"):
        lib.attention_fn(q, q, q, windoe=3)
    with pytest.raises(ValueError, match="dropout_rate"):
        lib.attention_fn(q, q, q, dropout_rate=1.5)
    with pytest.raises(ValueError, match="leading axes"):
        lib.attention_fn(q, q[:1], q)
    with pytest.raises(ValueError, match=r"mask: .*leading axes"):
        lib.attention_fn(q, q, q, mask=jnp.ones((3, 1, LEN, LEN)))
    with pytest.raises(ValueError, match=r"mask: .*rank"):
        lib.attention_fn(q, q, q, mask=jnp.ones((1, 1, 1, LEN, LEN)))
    table = pa.plan(pa.Causal(), q_len=LEN, kv_len=LEN, head_dim=8, dtype=jnp.float32)
    with pytest.raises(ValueError, match="BlockTable"):
        lib.make_attention_fn(pa.Causal())(q, q, q, mask=table)


@functools.cache
def flax_params(**options):
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **options)
    return flax_nnx.to_linen(layer)


def flax_layer(lib, attention_fn, **options):
    """flax's own module with an attention_fn, as a jitted function of the input."""
    params = flax_params(normalize_qk=options.get("normalize_qk", False))
    if lib is flax_nnx:
        layer = nnx.MultiHeadAttention(
            HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0), **options
        )
        flax_nnx.from_linen(layer, params)
        return nnx.jit(lambda x, **kw: layer(x, **kw), static_argnames=STATIC)
    twin = nn.MultiHeadAttention(HEADS, attention_fn=attention_fn, **options)
    return jax.jit(lambda x, **kw: twin.apply({"params": params}, x, **kw), static_argnames=STATIC)


STATIC = ("is_causal", "deterministic", "sow_weights")


@both
def test_attention_fn_drops_into_flax(lib, x):
    own = flax_layer(lib, (nnx if lib is flax_nnx else nn).dot_product_attention, normalize_qk=True)
    ours = flax_layer(lib, lib.attention_fn, normalize_qk=True)
    causal = nn.make_causal_mask(x[..., 0])
    want = own(x, mask=causal)
    close(ours(x, mask=causal), want)
    table = pa.plan(pa.Causal(), q_len=LEN, kv_len=LEN, head_dim=8, dtype=jnp.float32)
    close(ours(x, mask=table), want)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        ours(x, sow_weights=True)


def test_attention_fn_is_causal(x):
    own = flax_layer(flax_nnx, nnx.dot_product_attention)
    ours = flax_layer(flax_nnx, flax_nnx.attention_fn)
    close(ours(x, is_causal=True), own(x, is_causal=True))
    mask = jnp.ones((2, 1, LEN, LEN)).at[..., 3:5].set(0.0)
    close(ours(x, mask=mask, is_causal=True), own(x, mask=mask, is_causal=True))


@both
def test_flax_dropout_is_refused(lib, x):
    layer = flax_layer(lib, lib.attention_fn, dropout_rate=0.5)
    close(layer(x, deterministic=True), flax_layer(lib, lib.attention_fn)(x))
    rngs = {"rngs": nnx.Rngs(0)} if lib is flax_nnx else {"dropout_rng": jax.random.key(0)}
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        layer(x, deterministic=False, **rngs)


@both
def test_bound_options(lib, x):
    ids = jnp.asarray([0] * 4 + [1] * 6, jnp.int32)
    same = np.asarray(ids)[:, None] == np.asarray(ids)[None, :]
    bound = flax_layer(lib, lib.make_attention_fn(pa.Causal(), soft_cap=2.0, scale=0.7))
    params = flax_params(normalize_qk=False)
    want = layer_by_hand(params, x, tril(LEN) & same, cap=2.0, scale=0.7)
    close(bound(x), layer_by_hand(params, x, tril(LEN), cap=2.0, scale=0.7))
    close(bound(x, mask=pa.Document(ids)), want)
    # A float array of flax's mask makers joins with the bound expression too.
    close(bound(x, mask=jnp.asarray(same, jnp.float32)), want)
    # What flax passes itself cannot be bound by partial, the rest can.
    other = flax_layer(lib, functools.partial(lib.attention_fn, soft_cap=2.0, scale=0.7))
    close(other(x, mask=pa.Causal() & pa.Document(ids)), want)
    q, sinks = normal(3, 2, LEN, HEADS, 8), jnp.arange(4.0)
    got = lib.make_attention_fn(pa.Causal(), sinks=sinks)(q, q, q)
    close(got, softmax_by_hand(q, q, q, tril(LEN), sinks=sinks))


def test_flax_decode_with_attention_fn(x):
    params = flax_params(normalize_qk=False)
    want = layer_by_hand(params, x, tril(LEN))
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=flax_nnx.attention_fn, decode=True, rngs=nnx.Rngs(0)
    )
    flax_nnx.from_linen(layer, params)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, token: layer(token, is_causal=True))
    close(jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(LEN)], axis=1), want)

    twin = nn.MultiHeadAttention(HEADS, attention_fn=flax_linen.attention_fn, decode=True)
    cache = jax.eval_shape(twin.init, jax.random.key(0), x)["cache"]
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache)
    apply = jax.jit(functools.partial(twin.apply, mutable=["cache"]))
    outs = []
    for i in range(LEN):
        out, updated = apply({"params": params, "cache": cache}, x[:, i : i + 1])
        cache = updated["cache"]
        outs.append(out)
    close(jnp.concatenate(outs, axis=1), want)
