"""attention_fn inside flax's own modules; our modules against those and against each other."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import pallas_attn as pa
from pallas_attn import _flax_common as common
from pallas_attn import flax_linen, flax_nnx

FEATURES, HEADS, LEN = 32, 4, 10
LIBS = {"nnx": flax_nnx, "linen": flax_linen}
both = pytest.mark.parametrize("lib", LIBS.values(), ids=LIBS)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(got, want, tol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tol, atol=tol
        ),
        got,
        want,
    )


def tril(rows, cols=None):
    return jnp.tril(jnp.ones((rows, cols or rows), jnp.bool_))


@pytest.fixture(scope="module")
def x():
    return normal(1, 2, LEN, FEATURES)


def nnx_attention(num_heads=HEADS, **options):
    return flax_nnx.Attention(FEATURES, num_heads, rngs=nnx.Rngs(0), **options)


def pair(**options):
    """The same layer in both: calls of the nnx one and of the linen one, and the parameters."""
    layer, twin = nnx_attention(**options), flax_linen.Attention(HEADS, **options)
    params = flax_nnx.to_linen(layer)
    # Biases and sinks start at zero: move them, else nothing shows that they are used.
    params = jax.tree.map(lambda p: p + 0.3 * normal(p.size, *p.shape).astype(p.dtype), params)
    flax_nnx.from_linen(layer, params)
    return layer, functools.partial(twin.apply, {"params": params}), params


# attention_fn


MASKS = {
    "none": lambda lead: None,
    "flax_causal": lambda lead: nn.make_causal_mask(jnp.ones((*lead, LEN))),
    "flax_padding": lambda lead: nn.make_attention_mask(
        jnp.full((*lead, LEN), True), jnp.broadcast_to(jnp.arange(LEN) < 7, (*lead, LEN))
    ),
    "bool_full": lambda lead: normal(5, *lead, HEADS, LEN, LEN) > 0,
    "int_rows": lambda lead: tril(LEN).astype(jnp.int32),
    "bool_keys": lambda lead: (jnp.arange(LEN) % 3 > 0).reshape((1,) * (len(lead) + 2) + (LEN,)),
}


@both
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_attention_fn_equals_flax(lib, mask, lead):
    q, k, v = (normal(i, *lead, LEN, HEADS, 8) for i in range(3))
    mask = MASKS[mask](lead)
    bias = normal(4, *(1,) * len(lead), HEADS, LEN, LEN)
    got = lib.attention_fn(q, k, v, bias=bias, mask=mask)
    if mask is None:
        close(got, nn.dot_product_attention(q, k, v, bias=bias))
        return
    mask = mask.reshape((1,) * (len(lead) + 3 - mask.ndim) + mask.shape)
    want = nn.dot_product_attention(q, k, v, bias=bias, mask=mask)
    # flax gives a query that sees nothing the mean of all values; ours gives 0.
    seen = (mask != 0).any(-1).swapaxes(-1, -2)[..., None]
    close(got, jnp.where(seen, want, 0.0))


def test_attention_fn_groups_heads():
    q, k, v = normal(0, 2, LEN, 6, 8), normal(1, 2, LEN, 2, 8), normal(2, 2, LEN, 2, 16)
    wide = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    close(flax_nnx.attention_fn(q, k, v), nn.dot_product_attention(q, *wide))


@both
def test_attention_fn_takes_every_keyword_of_flax(lib):
    own = (nnx if lib is flax_nnx else nn).dot_product_attention
    flax_names = set(inspect.signature(own).parameters)
    # linen passes nothing that the signature does not name, so it has to be there to be refused.
    assert flax_names <= set(inspect.signature(lib.attention_fn).parameters)
    defaults = {n: p.default for n, p in inspect.signature(own).parameters.items()}
    ours = {n: p.default for n, p in inspect.signature(lib.attention_fn).parameters.items()}
    assert {n: ours[n] for n in flax_names} == defaults


@both
@pytest.mark.parametrize(
    "keywords",
    [
        {"dropout_rate": 0.1},
        {"dropout_rate": 0.1, "dropout_rng": 0},
        {"module": object()},
        {"precision": "highest"},
        {"precision": jax.lax.Precision.HIGH},
        {"einsum_dot_general": jax.lax.dot_general},
        {"qk_attn_weights_einsum": jnp.einsum},
        {"attn_weights_value_einsum": jnp.einsum},
        {"input_positions": 0},
    ],
    ids=lambda k: next(iter(k)),
)
def test_attention_fn_refuses_by_name(lib, keywords):
    name = next(iter(keywords))
    if name not in inspect.signature(lib.attention_fn).parameters:
        pytest.skip(f"not a keyword of this flax: {name}")
    q = normal(0, 1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=name):
        lib.attention_fn(q, q, q, **keywords)


@both
def test_attention_fn_honours_what_changes_nothing(lib):
    q = normal(0, 1, LEN, HEADS, 8)
    want = lib.attention_fn(q, q, q)
    close(lib.attention_fn(q, q, q, dropout_rate=0.5, deterministic=True), want, 0)
    close(
        lib.attention_fn(q, q, q, dropout_rng=jax.random.key(0), broadcast_dropout=False), want, 0
    )
    half = lib.attention_fn(q, q, q, dtype=jnp.bfloat16, precision="highest")
    assert half.dtype == jnp.bfloat16
    close(half, want, 2e-2)


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


def flax_layer(lib, attention_fn, **options):
    """flax's own module with an attention_fn as a function of (x, mask), and its parameters."""
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0), **options
    )
    if lib is flax_nnx:
        return lambda x, mask=None, **kw: layer(x, mask=mask, **kw)
    twin = nn.MultiHeadAttention(HEADS, attention_fn=attention_fn, **options)
    params = flax_nnx.to_linen(layer)
    return lambda x, mask=None, **kw: twin.apply({"params": params}, x, mask=mask, **kw)


@both
def test_attention_fn_drops_into_flax(lib, x):
    own = flax_layer(lib, (nnx if lib is flax_nnx else nn).dot_product_attention, normalize_qk=True)
    ours = flax_layer(lib, lib.attention_fn, normalize_qk=True)
    for mask in (None, nn.make_causal_mask(x[..., 0]), normal(3, 2, HEADS, LEN, LEN) > -1):
        close(ours(x, mask), own(x, mask))
    close(ours(x, pa.Causal()), own(x, nn.make_causal_mask(x[..., 0])))
    table = pa.plan(pa.Causal(), q_len=LEN, kv_len=LEN, head_dim=8, dtype=jnp.float32)
    close(ours(x, table), own(x, nn.make_causal_mask(x[..., 0])))
    with pytest.raises(NotImplementedError, match="sow_weights"):
        ours(x, sow_weights=True)


def test_attention_fn_is_causal(x):
    own = flax_layer(flax_nnx, nnx.dot_product_attention)
    ours = flax_layer(flax_nnx, flax_nnx.attention_fn)
    close(ours(x, is_causal=True), own(x, is_causal=True))
    mask = jnp.ones((2, 1, LEN, LEN)).at[..., 3:5].set(0.0).at[..., 0].set(1.0)
    close(ours(x, mask, is_causal=True), own(x, mask, is_causal=True))


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
    bound = flax_layer(lib, lib.make_attention_fn(pa.Causal(), soft_cap=2.0, scale=0.7))
    other = flax_layer(lib, functools.partial(lib.attention_fn, soft_cap=2.0, scale=0.7))
    close(bound(x), other(x, nn.make_causal_mask(x[..., 0])))
    mask = tril(LEN) & (ids[:, None] == ids[None, :])
    close(bound(x, pa.Document(ids)), other(x, mask[None, None]))
    # A float mask of flax's makers joins with the bound expression.
    close(bound(x, (ids[:, None] == ids[None, :]).astype(jnp.float32)), other(x, mask[None, None]))
    sinks = jnp.arange(4.0)
    q = x.reshape(2, LEN, HEADS, 8)
    got = lib.make_attention_fn(pa.Causal(), sinks=sinks)(q, q, q)
    close(got, pa.mha(q, q, q, pa.Causal(), sinks=sinks), 0)


def test_flax_decode_with_attention_fn(x):
    own = flax_layer(flax_nnx, nnx.dot_product_attention)
    want = own(x, nn.make_causal_mask(x[..., 0]))
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=flax_nnx.attention_fn, decode=True, rngs=nnx.Rngs(0)
    )
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, token: layer(token, is_causal=True))
    close(jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(LEN)], axis=1), want)

    twin = nn.MultiHeadAttention(HEADS, attention_fn=flax_linen.attention_fn, decode=True)
    cache = twin.init(jax.random.key(0), x)["cache"]
    apply = jax.jit(functools.partial(twin.apply, mutable=["cache"]))
    outs = []
    for i in range(LEN):
        variables = {"params": flax_nnx.to_linen(layer), "cache": cache}
        out, updated = apply(variables, x[:, i : i + 1])
        outs.append(out)
        cache = updated["cache"]
    close(jnp.concatenate(outs, axis=1), want)


# Attention


def by_hand(params, x, mask, *, kv=None, rotate=lambda q, k: (q, k), cap=None, scale=None):
    """The layer in float64 NumPy: projections, softmax with sinks, output."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    kv = x if kv is None else kv
    q, k, v = (
        np.einsum("...lf,fhd->...lhd", np.asarray(s, np.float64), p[n]["kernel"]) + p[n]["bias"]
        for n, s in (("query", x), ("key", kv), ("value", kv))
    )
    q, k = rotate(q, k)
    k, v = (np.repeat(a, q.shape[-2] // a.shape[-2], axis=-2) for a in (k, v))
    logits = np.einsum("...qhd,...khd->...hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    weights = np.exp(logits) * np.asarray(mask)
    sinks = np.exp(p["sinks"])[:, None, None] if "sinks" in p else 0.0
    weights = weights / (weights.sum(-1, keepdims=True) + sinks)
    out = np.einsum("...hqk,...khd->...qhd", weights, v)
    return np.einsum("...qhd,hdf->...qf", out, p["out"]["kernel"]) + p["out"]["bias"]


def turn_by_hand(positions, theta):
    """RoPE in complex numbers."""

    def turn(a):
        half = a.shape[-1] // 2
        angles = np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half)
        turned = (a[..., :half] + 1j * a[..., half:]) * np.exp(1j * angles)[..., None, :]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    return lambda q, k: (turn(q), turn(k))


def test_attention_by_hand(x):
    options = {
        "num_kv_heads": 2, "head_dim": 16, "v_dim": 8, "causal": True, "window": (3, 0),
        "rope_theta": 100.0, "soft_cap": 2.0, "scale": 0.5, "use_sinks": True,
    }  # fmt: skip
    layer, twin, params = pair(**options)
    assert params["sinks"].shape == (HEADS,)
    assert params["value"]["kernel"].shape == (FEATURES, 2, 8)
    assert params["out"]["kernel"].shape == (HEADS, 8, FEATURES)
    mask = np.triu(tril(LEN), -3)
    turn = turn_by_hand(np.arange(LEN), 100.0)
    want = by_hand(params, x, mask, rotate=turn, cap=2.0, scale=0.5)
    close(layer(x), want)
    close(twin(x), want)
    positions = jnp.asarray([0, 1, 2, 0, 1, 2, 3, 4, 0, 1], jnp.int32)
    want = by_hand(params, x, mask, rotate=turn_by_hand(positions, 100.0), cap=2.0, scale=0.5)
    close(layer(x, positions=positions), want)
    close(twin(x, positions=jnp.broadcast_to(positions, (2, LEN))), want)


OPTION_SETS = {
    "plain": {},
    "causal": {"causal": True},
    "gqa_rope": {"causal": True, "num_kv_heads": 2, "rope_theta": 1e4},
    "window_rms": {"causal": True, "window": (3, 0), "qk_norm": "rms", "rope_theta": 500},
    "layer_norm": {"qk_norm": "layer", "num_kv_heads": 1, "window": 4},
    "sinks_cap": {"causal": True, "use_sinks": True, "soft_cap": 5.0, "scale": 0.3},
    "no_bias_dims": {"use_bias": False, "head_dim": 12, "v_dim": 20, "causal": True},
}


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
def test_nnx_equals_linen(options, x):
    layer, twin, params = pair(**options)
    close(layer(x), twin(x), 1e-6)
    fresh = flax_linen.Attention(HEADS, **options).init(jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
    cotangent = normal(9, *x.shape)
    grads = nnx.grad(lambda layer: (layer(x) * cotangent).sum())(layer)
    linen = flax_linen.Attention(HEADS, **options)
    linen_grads = jax.grad(lambda p: (linen.apply({"params": p}, x) * cotangent).sum())(params)
    close(nnx.to_pure_dict(grads), linen_grads, 1e-5)
    assert all(float(jnp.abs(g).max()) > 1e-6 for n, g in leaves(linen_grads) if n != "key/bias")


def leaves(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(p, simple=True, separator="/"), a) for p, a in flat]


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_equals_flax_with_its_parameters(kv_heads, x):
    options = {"num_kv_heads": kv_heads, "normalize_qk": True, "decode": False}
    own = nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **options)
    layer = nnx_attention(num_kv_heads=kv_heads, qk_norm="layer")
    flax_nnx.from_linen(layer, flax_nnx.to_linen(own))
    mask = normal(3, 2, 1, LEN, LEN) > -1
    close(layer(x, mask=mask), own(x, mask=mask))
    params = {"params": flax_nnx.to_linen(own)}
    linen = flax_linen.Attention(HEADS, num_kv_heads=kv_heads, qk_norm="layer")
    close(linen.apply(params, x, mask=mask), own(x, mask=mask))
    if kv_heads == HEADS:
        close(
            linen.apply(params, x), nn.MultiHeadAttention(HEADS, normalize_qk=True).apply(params, x)
        )
    # And back: ours into flax's.
    layer, _, ours = pair(num_kv_heads=kv_heads, qk_norm="layer")
    flax_nnx.from_linen(own, ours)
    close(own(x), layer(x))


def test_same_seed_gives_flax_parameters():
    own = nnx.MultiHeadAttention(HEADS, FEATURES, num_kv_heads=2, decode=False, rngs=nnx.Rngs(7))
    layer = flax_nnx.Attention(FEATURES, HEADS, num_kv_heads=2, rngs=nnx.Rngs(7))
    close(flax_nnx.to_linen(layer), flax_nnx.to_linen(own), 0)
    x = jnp.ones((1, 3, FEATURES))
    variables = [
        m.init(jax.random.key(7), x)
        for m in (nn.MultiHeadAttention(HEADS), flax_linen.Attention(HEADS))
    ]
    close(variables[1], variables[0], 0)


def test_from_linen_names_what_differs():
    layer = nnx_attention(num_kv_heads=2)
    with pytest.raises(ValueError, match=r"key/kernel \(32, 4, 8\).*key/kernel \(32, 2, 8\)"):
        flax_nnx.from_linen(layer, flax_nnx.to_linen(nnx_attention()))
    with pytest.raises(ValueError, match="sinks"):
        flax_nnx.from_linen(layer, flax_nnx.to_linen(nnx_attention(num_kv_heads=2, use_sinks=True)))


def test_linen_fields_are_the_options():
    fields = flax_linen.Attention.__dataclass_fields__
    given = {n: f.default for n, f in fields.items() if n not in ("num_heads", "parent", "name")}
    assert given == common.ATTENTION_DEFAULTS
    assert set(common.AttentionOptions.__annotations__) == set(common.ATTENTION_DEFAULTS)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"head_dim": 7, "rope_theta": 1e4}, ValueError, "head_dim"),
        ({"qk_norm": "batch"}, ValueError, "qk_norm"),
        ({"window": (-1, 0)}, ValueError, "left"),
        ({"dropout_rate": 0.1}, TypeError, "dropout_rate"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_options_are_checked(options, error, match):
    with pytest.raises(error, match=match):
        nnx_attention(**options)
    with pytest.raises(error, match=match):
        flax_linen.Attention(HEADS, **options).init(jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    with pytest.raises(ValueError, match="num_heads"):
        flax_nnx.Attention(FEATURES, 5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_leading_axes(lead):
    layer, twin, _ = pair(causal=True, num_kv_heads=2, rope_theta=1e4)
    x = normal(1, *lead, LEN, FEATURES)
    flat = x.reshape(-1, LEN, FEATURES)
    want = layer(flat).reshape(x.shape)
    close(layer(x), want, 1e-6)
    close(twin(x), want, 1e-6)
    layer.init_cache(x.shape)
    close(
        jnp.concatenate([layer(x[..., :6, :], decode=True), layer(x[..., 6:, :], decode=True)], -2),
        want,
    )


def test_mask_argument(x):
    layer, twin, _ = pair(causal=True, window=(4, 0))
    ids = jnp.asarray([[0] * 4 + [1] * 6, [0] * 7 + [2] * 3], jnp.int32)
    dense = ids[:, None, :, None] == ids[:, None, None, :]
    want = layer(x, mask=dense)
    table = pa.plan(
        layer.pattern() & pa.Document(ids), q_len=LEN, kv_len=LEN, head_dim=8, dtype=x.dtype
    )
    for mask in (pa.Document(ids), dense.astype(jnp.float32), table):
        close(layer(x, mask=mask), want, 1e-6)
        close(twin(x, mask=mask), want, 1e-6)
    assert float(jnp.abs(layer(x) - want).max()) > 1e-2
    assert nnx_attention().pattern() is None
    assert flax_linen.Attention(HEADS).pattern() is None
    assert repr(flax_linen.Attention(HEADS, causal=True, window=3).pattern(2)) == repr(
        nnx_attention(causal=True, window=3).pattern(2)
    )


def test_packed_documents_equal_each_alone(x):
    layer, _, _ = pair(causal=True, rope_theta=1e4)
    ids = jnp.asarray([0] * 4 + [1] * 6, jnp.int32)
    positions = jnp.asarray([*range(4), *range(6)], jnp.int32)
    packed = layer(x, mask=pa.Document(ids), positions=positions)
    close(packed[:, :4], layer(x[:, :4]))
    close(packed[:, 4:], layer(x[:, 4:]))


def test_bias_argument(x):
    layer, twin, params = pair()
    bias = normal(3, HEADS, LEN, LEN)
    close(layer(x, bias=bias), twin(x, bias=bias), 1e-6)
    shut = jnp.where(tril(LEN), 0.0, -1e9)
    close(layer(x, bias=shut), by_hand(params, x, tril(LEN)))


def test_dtypes(x):
    options = {
        "causal": True,
        "qk_norm": "rms",
        "rope_theta": 1e4,
        "use_sinks": True,
        "num_kv_heads": 2,
    }
    layer, twin, params = pair(dtype=jnp.bfloat16, **options)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    got = layer(x)
    assert got.dtype == twin(x).dtype == jnp.bfloat16
    close(got, twin(x), 1e-6)
    close(got, pair(**options)[0](x), 5e-2)
    layer.init_cache(x.shape)
    assert layer.cached_key.dtype == jnp.bfloat16
    close(layer(x, decode=True), got, 2e-2)
    half = nnx_attention(param_dtype=jnp.bfloat16, **options)
    assert {a.dtype for a in jax.tree.leaves(flax_nnx.to_linen(half))} == {jnp.dtype(jnp.bfloat16)}


def test_x64(x):
    layer, twin, _ = pair(causal=True, window=(3, 0), qk_norm="rms", rope_theta=1e4)
    want = layer(x)
    with jax.enable_x64(True):
        close(layer(x), want, 1e-6)
        assert twin(x).dtype == jnp.float32
        layer.init_cache(x.shape)
        got = jnp.concatenate([layer(x[:, :4], decode=True), layer(x[:, 4:], decode=True)], axis=1)
        assert layer.cache_index.dtype == jnp.int32
    close(got, want)


# Cross attention


CROSS = {"causal": True, "window": (3, 0), "rope_theta": 1e4, "num_kv_heads": 2}


@pytest.mark.parametrize("kv_features", [FEATURES, 24])
def test_cross_attention_has_no_self_defaults(kv_features):
    """C09: a decoder layer must not hand its causal window to cross attention."""
    layer = flax_nnx.Attention(
        FEATURES, HEADS, in_kv_features=kv_features, rngs=nnx.Rngs(0), **CROSS
    )
    params = flax_nnx.to_linen(layer)
    twin = functools.partial(flax_linen.Attention(HEADS, **CROSS).apply, {"params": params})
    x, y = normal(1, 2, 20, FEATURES), normal(2, 2, 50, kv_features)
    want = by_hand(params, x, np.ones((20, 50)), kv=y)
    for call in (layer, twin):
        close(call(x, y), want)
        moved = call(x, y.at[:, 49].add(1.0)) - call(x, y)
        assert float(jnp.abs(moved[:, 0]).min(axis=-1).max()) > 1e-4
        # What the call itself says does hold.
        mask = np.tril(np.ones((20, 50)), 30)
        close(call(x, y, mask=pa.Causal(offset=30)), by_hand(params, x, mask, kv=y))
        close(call(x, y, mask=jnp.asarray(mask)), by_hand(params, x, mask, kv=y))


def test_cross_attention_turns_by_given_positions_only(x):
    layer, twin, _ = pair(causal=True, rope_theta=1e4)
    y = x + 0.0  # Another array of the same numbers: cross attention.
    positions = jnp.arange(LEN, dtype=jnp.int32)
    whole = layer(x, y, positions=positions, kv_positions=positions, mask=pa.Causal())
    close(whole, layer(x), 1e-6)
    close(twin(x, y, positions=positions, kv_positions=positions, mask=pa.Causal()), whole, 1e-6)
    close(layer(x, x), layer(x), 0)
    assert float(jnp.abs(layer(x, y, mask=pa.Causal()) - whole).max()) > 1e-3
    with pytest.raises(ValueError, match="kv_positions"):
        layer(x, y, positions=positions)
    with pytest.raises(ValueError, match="kv_positions"):
        layer(x, kv_positions=positions)
    with pytest.raises(ValueError, match="positions: got shape"):
        layer(x, positions=positions[:3])
    with pytest.raises(ValueError, match="decode"):
        layer(x, y, decode=True)


# Decoding


def decode_nnx(layer, x, sizes, max_len, **call):
    layer.init_cache((*x.shape[:-2], max_len, x.shape[-1]))
    step = nnx.jit(lambda layer, x: layer(x, decode=True, **call))
    starts = np.cumsum([0, *sizes])
    outs = [step(layer, x[..., a:b, :]) for a, b in itertools.pairwise(starts)]
    return jnp.concatenate(outs, axis=-2)


def decode_linen(options, params, x, sizes, max_len):
    layer = flax_linen.Attention(HEADS, **options)
    cache = layer.init_cache((*x.shape[:-2], max_len, x.shape[-1]))
    step = jax.jit(functools.partial(layer.apply, decode=True, mutable=["cache"]))
    starts, outs = np.cumsum([0, *sizes]), []
    for a, b in itertools.pairwise(starts):
        out, updated = step({"params": params, "cache": cache}, x[..., a:b, :])
        cache = updated["cache"]
        outs.append(out)
    return jnp.concatenate(outs, axis=-2)


DECODE_SETS = {
    "gqa_rope_window": {"causal": True, "num_kv_heads": 2, "rope_theta": 1e4, "window": (3, 0)},
    "norm_sinks_cap": {
        "causal": True,
        "qk_norm": "rms",
        "use_sinks": True,
        "soft_cap": 5.0,
        "v_dim": 12,
    },
    "window_alone": {"window": (2, 0), "rope_theta": 1e4},
}


@pytest.mark.parametrize("options", DECODE_SETS.values(), ids=DECODE_SETS)
def test_decoding_equals_the_full_pass(options, x):
    layer, _, params = pair(**options)
    want = layer(x)
    for sizes in ([1] * LEN, [4, 1, 3, 1, 1]):
        close(decode_nnx(layer, x, sizes, 13), want)
    close(decode_linen(options, params, x, [4, 1, 3, 1, 1], 13), want)
    close(decode_linen(options, params, x, [LEN], LEN), want)


def test_decoding_without_causal_sees_the_cache_only(x):
    """A prompt that sees itself both ways, then tokens that see all before them: a prefix LM."""
    layer, _, _ = pair()
    want = layer(x, mask=pa.PrefixLM(6))
    close(decode_nnx(layer, x, [6, 1, 1, 1, 1], 13), want)


def test_decoding_steps_trace_once(x):
    layer, _, _ = pair(causal=True, rope_theta=1e4)
    layer.init_cache((2, LEN, FEATURES))
    traces = []

    @nnx.jit
    def step(layer, token):
        traces.append(token.shape)
        return layer(token, decode=True)

    for i in range(5):
        step(layer, x[:, i : i + 1])
    assert len(traces) == 1
    assert int(layer.cache_index[...]) == 5


def test_decoding_under_scan(x):
    options = {"causal": True, "rope_theta": 1e4, "num_kv_heads": 2}
    layer, _, params = pair(**options)
    linen = flax_linen.Attention(HEADS, **options)

    def step(cache, token):
        variables = {"params": params, "cache": cache}
        out, updated = linen.apply(variables, token[:, None], decode=True, mutable=["cache"])
        return updated["cache"], out[:, 0]

    _, outs = jax.lax.scan(step, linen.init_cache(x.shape), x.swapaxes(0, 1))
    close(outs.swapaxes(0, 1), layer(x))


def test_decoding_with_padded_prompts(x):
    """Left padding: the mask speaks of cache slots, positions count from the prompt's start."""
    layer, _, _ = pair(causal=True, rope_theta=1e4)
    pad = 3
    padded = jnp.concatenate([jnp.full((2, pad, FEATURES), 7.0), x], axis=1)
    keep = (jnp.arange(16) >= pad).reshape(1, 1, 1, 16)
    layer.init_cache((2, 16, FEATURES))
    positions = jnp.arange(8, dtype=jnp.int32) - pad
    layer(padded[:, :8], decode=True, mask=keep, positions=positions)
    last = layer(
        padded[:, 8:], decode=True, mask=keep, positions=jnp.arange(5, LEN, dtype=jnp.int32)
    )
    close(last, layer(x)[:, 5:])


def test_cache_overflow_is_never_silent(x):
    layer, _, params = pair(causal=True)
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    layer.init_cache((2, LEN, FEATURES))
    layer(x[:, :8], decode=True)
    with pytest.raises(ValueError, match="8 tokens held, 3 new, room for 10"):
        layer(x[:, :3], decode=True)
    with pytest.raises(ValueError, match=r"cache: .*shape"):
        layer(x[:1, :1], decode=True)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    assert np.isfinite(step(layer, x[:, 8:])).all()
    assert np.isnan(step(layer, x[:, 8:])).all()
    linen = flax_linen.Attention(HEADS, causal=True)
    with pytest.raises(ValueError, match="init_cache"):
        linen.apply({"params": params}, x, decode=True)


def test_linen_init_makes_the_cache(x):
    """linen's custom: initialise with inputs as long as the cache."""
    linen = flax_linen.Attention(HEADS, num_kv_heads=2, v_dim=12, dtype=jnp.bfloat16)
    variables = linen.init(jax.random.key(0), x, decode=True)
    close(variables["cache"], linen.init_cache(x.shape), 0)
    assert variables["cache"]["cached_key"].dtype == jnp.bfloat16
    assert linen.init_cache(x.shape, jnp.float32)["cached_value"].dtype == jnp.float32
    assert "cache" not in linen.init(jax.random.key(0), x)
