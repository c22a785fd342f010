"""The Attention modules: by hand, against each other and flax's own, across, and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax_truth import (
    FEATURES,
    HEADS,
    LEN,
    call_linen,
    call_nnx,
    close,
    decode_linen,
    decode_nnx,
    decode_step,
    layer_by_hand,
    linen_decode_step,
    nnx_attention,
    normal,
    pair,
    tril,
    turn_by_hand,
)

import pallas_attn as pa
from pallas_attn import _flax_common as common
from pallas_attn import flax_linen, flax_nnx


@pytest.fixture(scope="module")
def x():
    return normal(1, 2, LEN, FEATURES)


def test_attention_by_hand(x):
    options = {
        "num_kv_heads": 2, "head_dim": 16, "v_dim": 8, "causal": True, "window": (3, 0),
        "rope_theta": 100.0, "soft_cap": 2.0, "scale": 0.5, "use_sinks": True, "qk_norm": "rms",
    }  # fmt: skip
    layer, twin, params = pair(**options)
    assert params["sinks"].shape == (HEADS,)
    assert params["value"]["kernel"].shape == (FEATURES, 2, 8)
    assert params["out"]["kernel"].shape == (HEADS, 8, FEATURES)
    mask, score = np.triu(tril(LEN), -3), {"cap": 2.0, "scale": 0.5}
    want = layer_by_hand(params, x, mask, rotate=turn_by_hand(np.arange(LEN), 100.0), **score)
    close(layer(x), want)
    close(twin(x), want)
    positions = jnp.asarray([0, 1, 2, 0, 1, 2, 3, 4, 0, 1], jnp.int32)
    want = layer_by_hand(params, x, mask, rotate=turn_by_hand(positions, 100.0), **score)
    close(layer(x, positions=jnp.broadcast_to(positions, (2, LEN))), want)


OPTION_SETS = {
    "plain": {},
    "window_rms": {"causal": True, "window": (3, 0), "qk_norm": "rms", "rope_theta": 500},
    "layer_norm": {"qk_norm": "layer", "num_kv_heads": 1, "window": 4},
    "sinks_cap": {"causal": True, "use_sinks": True, "soft_cap": 5, "scale": 0.3},
    "no_bias_dims": {"use_bias": False, "head_dim": 12, "v_dim": 20, "causal": True},
}


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
def test_nnx_equals_linen(options, x):
    layer, twin = nnx_attention(**options), flax_linen.Attention(HEADS, **options)
    params, cotangent = flax_nnx.to_linen(layer), normal(9, *x.shape)
    fresh = jax.eval_shape(twin.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)

    def loss(call):
        out = call(x)
        return (out * cotangent).sum(), out

    def linen_loss(params):
        return loss(functools.partial(twin.apply, {"params": params}))

    (_, out), grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer)
    (_, linen_out), linen_grads = jax.jit(jax.value_and_grad(linen_loss, has_aux=True))(params)
    close(out, linen_out, 1e-6)
    close(nnx.to_pure_dict(grads), linen_grads, 1e-5)
    for path, grad in jax.tree_util.tree_leaves_with_path(linen_grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Softmax does not see what is added to all keys, unless a norm or RoPE comes between.
        assert name == "key/bias" or float(jnp.abs(grad).max()) > 1e-4, name


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_equals_flax_with_its_parameters(kv_heads, x):
    own = nnx.MultiHeadAttention(
        HEADS, FEATURES, num_kv_heads=kv_heads, normalize_qk=True, decode=False, rngs=nnx.Rngs(0)
    )
    params = jax.tree.map(lambda p: p + normal(1, *p.shape, scale=0.1), flax_nnx.to_linen(own))
    flax_nnx.from_linen(own, params)  # Into flax's module from a tree of either library.
    layer = nnx_attention(params, num_kv_heads=kv_heads, qk_norm="layer")
    twin = flax_linen.Attention(HEADS, num_kv_heads=kv_heads, qk_norm="layer")
    mask = normal(3, 2, 1, LEN, LEN) > -1
    want = call_nnx(own, x, mask=mask)
    close(call_nnx(layer, x, mask=mask), want)
    close(call_linen(twin, params, (x,), {"mask": mask}), want)
    if kv_heads == HEADS:
        flax_twin = nn.MultiHeadAttention(HEADS, normalize_qk=True)
        close(call_linen(flax_twin, params, (x,), {"mask": mask}), want)


def test_same_seed_gives_flax_parameters():
    own = nnx.MultiHeadAttention(HEADS, FEATURES, num_kv_heads=2, decode=False, rngs=nnx.Rngs(7))
    layer = flax_nnx.Attention(FEATURES, HEADS, num_kv_heads=2, rngs=nnx.Rngs(7))
    close(flax_nnx.to_linen(layer), flax_nnx.to_linen(own), 0)
    x = jnp.ones((1, 3, FEATURES))
    modules = (nn.MultiHeadAttention(HEADS), flax_linen.Attention(HEADS))
    own, ours = (jax.jit(m.init)(jax.random.key(7), x) for m in modules)
    close(ours, own, 0)


def test_from_linen_names_what_differs():
    layer = nnx_attention(num_kv_heads=2)
    with pytest.raises(ValueError, match=r"key/kernel \(32, 4, 8\).*key/kernel \(32, 2, 8\)"):
        flax_nnx.from_linen(layer, flax_nnx.to_linen(nnx_attention()))
    with pytest.raises(ValueError, match="sinks"):
        flax_nnx.from_linen(layer, flax_nnx.to_linen(nnx_attention(num_kv_heads=2, use_sinks=True)))
    boxed = nn.with_partitioning(nn.initializers.zeros_init(), (None, "heads", None))
    twin = flax_linen.Attention(HEADS, num_kv_heads=2, kernel_init=boxed)
    variables = jax.eval_shape(twin.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    flax_nnx.from_linen(
        layer, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), variables["params"])
    )
    assert not jnp.any(layer.query.kernel[...])


def test_linen_fields_are_the_options():
    fields = flax_linen.Attention.__dataclass_fields__
    given = {n: f.default for n, f in fields.items() if n not in ("num_heads", "parent", "name")}
    assert given == common.ATTENTION_DEFAULTS
    assert set(common.AttentionOptions.__annotations__) == set(common.ATTENTION_DEFAULTS)


BAD_OPTIONS = [
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads"),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
    ({"head_dim": 7, "rope_theta": 1e4}, ValueError, "head_dim"),
    ({"qk_norm": "batch"}, ValueError, "qk_norm"),
    ({"window": (-1, 0)}, ValueError, "left"),
    ({"dropout_rate": 0.1}, TypeError, "dropout_rate"),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD_OPTIONS, ids=lambda v: str(v)[:20])
def test_options_are_checked(options, error, match):
    with pytest.raises(error, match=match):
        nnx_attention(**options)
    with pytest.raises(error, match=match):
        flax_linen.Attention(HEADS, **options).init(jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    with pytest.raises(ValueError, match="num_heads"):
        flax_nnx.Attention(FEATURES, 5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_leading_axes(lead):
    options = {"causal": True, "num_kv_heads": 2, "rope_theta": 1e4}
    _, twin, params = pair(**options)
    x = normal(1, *lead, LEN, FEATURES)
    turn = turn_by_hand(np.arange(LEN), 1e4)
    want = layer_by_hand(params, x, tril(LEN), rotate=turn)
    close(twin(x), want)
    close(decode_nnx(options, x, [6, 4], LEN), want)


def test_mask_argument(x):
    layer, twin, params = pair(causal=True, window=(4, 0))
    ids = jnp.asarray([[0] * 4 + [1] * 6, [0] * 7 + [2] * 3], jnp.int32)
    dense = ids[:, None, :, None] == ids[:, None, None, :]
    want = layer_by_hand(params, x, np.triu(tril(LEN), -4) & np.asarray(dense))
    whole = flax_linen.Attention(HEADS, causal=True, window=(4, 0)).pattern() & pa.Document(ids)
    table = pa.plan(whole, q_len=LEN, kv_len=LEN, head_dim=8, dtype=x.dtype)
    for mask in (pa.Document(ids), dense):
        close(layer(x, mask=mask), want)
    close(twin(x, mask=table), want)


def test_pattern():
    assert isinstance(nnx_attention().pattern(), pa.Full)
    assert isinstance(flax_linen.Attention(HEADS).pattern(), pa.Full)
    want = repr(pa.Causal(offset=2) & pa.SlidingWindow(3, 3, offset=2))
    assert repr(nnx_attention(causal=True, window=3).pattern(2)) == want
    assert repr(flax_linen.Attention(HEADS, causal=True, window=3).pattern(2)) == want


def test_packed_documents_equal_each_alone(x):
    layer, _, _ = pair(causal=True, rope_theta=1e4)
    ids = jnp.asarray([0] * 5 + [1] * 5, jnp.int32)
    positions = jnp.asarray([*range(5), *range(5)], jnp.int32)
    packed = layer(x, mask=pa.Document(ids), positions=positions)
    close(packed[:, :5], layer(x[:, :5]))
    close(packed[:, 5:], layer(x[:, 5:]))


def test_bias_argument(x):
    _, twin, params = pair()
    bias = normal(3, HEADS, LEN, LEN)
    close(twin(x, bias=bias), layer_by_hand(params, x, True, bias=bias))


def test_dtypes(x):
    options = {"causal": True, "qk_norm": "rms", "rope_theta": 1e4, "use_sinks": True}
    layer, twin, params = pair(dtype=jnp.bfloat16, **options)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    got = layer(x)
    assert got.dtype == twin(x).dtype == jnp.bfloat16
    close(got, twin(x), 1e-2)
    close(decode_nnx({"dtype": jnp.bfloat16, **options}, x, [LEN], LEN), got, 2e-2)
    half = nnx_attention(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **options)
    assert {a.dtype for a in jax.tree.leaves(flax_nnx.to_linen(half))} == {jnp.dtype(jnp.bfloat16)}
    half.init_cache((2, 4, FEATURES))
    assert half.cached_key.dtype == jnp.bfloat16
    half.init_cache((2, 4, FEATURES), jnp.float32)
    assert half.cached_value.dtype == jnp.float32


def test_x64(x):
    options = {"causal": True, "window": (3, 0), "qk_norm": "rms", "rope_theta": 1e4}
    layer, twin, _ = pair(**options)
    want = layer(x)
    with jax.enable_x64(True):
        got = twin(x)
        assert got.dtype == jnp.float32
        close(got, want)
        close(decode_nnx(options, x, [5, 5], LEN), want)


# Cross attention


CROSS = {"causal": True, "window": (3, 0), "rope_theta": 1e4, "num_kv_heads": 2}


@pytest.mark.parametrize("kv_features", [FEATURES, 24])
def test_cross_attention_has_no_self_defaults(kv_features):
    """C09: a decoder layer must not hand its causal window to cross attention."""
    *calls, params = pair(in_kv_features=kv_features, **CROSS)
    x, y = normal(1, 2, 20, FEATURES), normal(2, 2, 50, kv_features)
    want = layer_by_hand(params, x, True, kv=y)
    # What the call itself says does hold.
    mask = np.tril(np.ones((20, 50)), 30)
    masked = layer_by_hand(params, x, mask, kv=y)
    for call in calls:
        close(call(x, y), want)
        moved = call(x, y.at[:, 49].add(1.0)) - call(x, y)
        assert float(jnp.abs(moved[:, 0]).max(axis=-1).min()) > 1e-4
        close(call(x, y, mask=pa.Causal(offset=30)), masked)


def test_cross_attention_turns_by_given_positions_only(x):
    layer, twin, params = pair(causal=True, rope_theta=1e4)
    y, positions = normal(2, 2, LEN, FEATURES), jnp.arange(LEN, dtype=jnp.int32)
    given = {"positions": positions, "kv_positions": 2 * positions}
    turns = [turn_by_hand(p, 1e4) for p in given.values()]
    turned = layer_by_hand(params, x, True, kv=y, rotate=turns[0], rotate_kv=turns[1])
    close(layer(x, y, **given), turned)
    close(twin(x, y, **given), turned)
    assert float(np.abs(layer_by_hand(params, x, True, kv=y) - turned).max()) > 1e-2


def test_calls_are_checked(x):
    layer = nnx_attention(causal=True, rope_theta=1e4)
    close(layer(x, x), layer(x), 0)  # flax's other spelling of self-attention.
    y, positions = x + 0.0, jnp.arange(LEN, dtype=jnp.int32)
    with pytest.raises(ValueError, match="kv_positions"):
        layer(x, y, positions=positions)
    with pytest.raises(ValueError, match="kv_positions"):
        layer(x, kv_positions=positions)
    with pytest.raises(ValueError, match="positions: got shape"):
        layer(x, positions=positions[:3])
    with pytest.raises(ValueError, match="decode"):
        layer(x, y, decode=True)


# Decoding


DECODE_SETS = {
    "rope_window": {"causal": True, "num_kv_heads": 2, "rope_theta": 1e4, "window": (3, 0)},
    "sinks_cap": {
        "causal": True,
        "qk_norm": "rms",
        "use_sinks": True,
        "soft_cap": 5.0,
        "v_dim": 12,
    },
}


@pytest.mark.parametrize("options", DECODE_SETS.values(), ids=DECODE_SETS)
def test_decoding_equals_the_full_pass(options, x):
    layer, _, params = pair(**options)
    want = layer(x)
    for sizes in ([1] * LEN, [4, 1, 4, 1]):
        close(decode_nnx(options, x, sizes, 13), want)
    close(decode_linen(options, params, x, [4, 1, 4, 1], 13), want)
    close(decode_linen(options, params, x, [LEN], LEN), want)


def test_decoding_without_causal_sees_all_of_the_cache(x):
    """A prompt that sees itself both ways, then tokens that see all before them: a prefix LM."""
    params = flax_nnx.to_linen(nnx_attention())
    mask = tril(LEN)
    mask[:, :6] = True
    close(decode_nnx({}, x, [6, 1, 1, 1, 1], 13), layer_by_hand(params, x, mask))
    # The window reaches past the tokens held, into slots that hold nothing yet.
    mask = np.tril(np.triu(np.ones((LEN, LEN)), -2), 4)
    close(decode_nnx({"window": (2, 4)}, x, [LEN], 13), layer_by_hand(params, x, mask))


def test_decoding_traces_once(x):
    layer = nnx_attention(causal=True, rope_theta=1e4)
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
    layer.init_cache((2, LEN, FEATURES))
    assert int(layer.cache_index[...]) == 0


def test_decoding_under_scan(x):
    options = {"causal": True, "rope_theta": 1e4, "num_kv_heads": 2}
    linen = flax_linen.Attention(HEADS, **options)
    params, turn = flax_nnx.to_linen(nnx_attention(**options)), turn_by_hand(np.arange(LEN), 1e4)

    def step(cache, token):
        out, cache = linen_decode_step(linen, params, cache, token[:, None])
        return cache, out[:, 0]

    _, outs = jax.lax.scan(step, linen.init_cache(x.shape), x.swapaxes(0, 1))
    close(outs.swapaxes(0, 1), layer_by_hand(params, x, tril(LEN), rotate=turn))


def test_decoding_with_padded_prompts(x):
    """Left padding: the mask speaks of cache slots, positions count from the prompt's start."""
    options, pad = {"causal": True, "rope_theta": 1e4}, 3
    padded = jnp.concatenate([jnp.full((2, pad, FEATURES), 7.0), x], axis=1)
    keep = (jnp.arange(16) >= pad).reshape(1, 1, 1, 16)
    layer = nnx_attention(**options)
    params, turn = flax_nnx.to_linen(layer), turn_by_hand(np.arange(LEN), 1e4)
    layer.init_cache((2, 16, FEATURES))
    positions = jnp.arange(LEN + pad, dtype=jnp.int32) - pad
    decode_step(layer, padded[:, :8], mask=keep, positions=positions[:8])
    last = decode_step(layer, padded[:, 8:], mask=keep, positions=positions[8:])
    close(last, layer_by_hand(params, x, tril(LEN), rotate=turn)[:, 5:])


def test_cache_overflow_is_never_silent(x):
    layer, params = nnx_attention(causal=True), pair(causal=True)[-1]
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    with pytest.raises(ValueError, match="init_cache"):
        flax_linen.Attention(HEADS, causal=True).apply({"params": params}, x, decode=True)
    layer.init_cache((2, LEN, FEATURES))
    decode_step(layer, x[:, :8])
    with pytest.raises(ValueError, match="8 tokens held, 3 new, room for 10"):
        layer(x[:, :3], decode=True)
    with pytest.raises(ValueError, match=r"cache: .*shape"):
        layer(x[:1, :1], decode=True)
    assert np.isfinite(decode_step(layer, x[:, 8:])).all()
    assert np.isnan(decode_step(layer, x[:, 8:])).all()


def test_linen_init_makes_the_cache(x):
    """linen's custom: initialise with inputs as long as the cache."""
    linen = flax_linen.Attention(HEADS, num_kv_heads=2, v_dim=12, dtype=jnp.bfloat16)
    cache = jax.jit(lambda key: linen.init(key, x, decode=True)["cache"])(jax.random.key(0))
    close(cache, linen.init_cache(x.shape), 0)
    assert cache["cached_key"].dtype == jnp.bfloat16
    assert linen.init_cache(x.shape, jnp.float32)["cached_value"].dtype == jnp.float32
    assert "cache" not in jax.eval_shape(linen.init, jax.random.key(0), x)
