"""Failures that users of attention kernels have met, each an example of a kind of fault."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import reference, testing
from pallas_attn.testing import Operands, Problem


class AllTiles(pa.Mask):
    """Another mask that cannot tell which blocks are empty, as a user may write one."""

    def __init__(self, inner):
        self.inner = inner

    def allowed(self, at):
        return self.inner.allowed(at)

    def tiles(self, grid):
        shape = (1, 1, grid.num_q, grid.num_kv)
        return np.ones(shape, bool), np.zeros(shape, bool)


def options(backend):
    return {"backend": backend, "tiles": testing.small_tiles(backend)}


def check(problem, data, backend):
    """Every result of a backend, held to the error rule; runs it twice."""
    attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
    return testing.assert_close_to_reference(attend, problem, data)


def forward(fn, *args):
    """Results of a jitted call on the host."""
    return testing.to_host(testing.compiled(fn, *args)(*args))


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_rows_that_see_nothing_do_not_poison_the_rest(backend):
    problem = Problem(batch=1, lens=(130, 130), heads=(2, 2), dims=(64, 64))
    seen = np.ones((130, 130), bool)
    seen[[5, 129]] = False
    data = testing.make_inputs(problem, "float32", jnp.asarray(seen), "blind rows")
    got = check(problem, data, backend)
    assert not np.any(got["out"][:, [5, 129]])
    assert not np.any(got["dq"][:, [5, 129]])
    # What the rows' cotangents are makes no difference to the keys.
    other = data._replace(
        dout=data.dout.at[:, [5, 129]].set(1e3), dlse=data.dlse.at[:, :, 5].set(-1e3)
    )
    again = testing.run(testing.attend_with(problem, **options(backend)), other)
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(got[name], again[name])


@pytest.mark.parametrize("form", ["expression", "array", "all_tiles"])
def test_leading_tiles_with_nothing_to_see(form, backend):
    problem = Problem(batch=1, lens=(600, 600), heads=(1, 1), dims=(16, 16))
    band = pa.SlidingWindow(9, 0)
    i, j = np.indices((600, 600))
    mask = {
        "expression": band,
        "array": jnp.asarray((j <= i) & (j >= i - 9)),
        "all_tiles": AllTiles(band),
    }[form]
    check(problem, testing.make_inputs(problem, "float32", mask, "band"), backend)


@pytest.mark.parametrize("lens", [(3, 128), (130, 17), (5, 2), (1, 129)])
def test_causal_of_unequal_lengths(lens, backend):
    problem = Problem(batch=1, lens=lens, heads=(2, 2), dims=(64, 64))
    q_len, kv_len = lens
    for mask, shift in ((pa.Causal(), 0), (pa.Causal(align="bottom_right"), kv_len - q_len)):
        data = testing.make_inputs(problem, "float32", mask, f"causal{lens}")
        q, k, v, _, _ = data.operands
        want, lse = forward(testing.attend_plainly(problem), data.operands, mask)
        i, j = np.indices(lens)
        dense = jnp.asarray(j <= i + shift)
        given = {**options(backend), "return_lse": True}
        cu = jnp.asarray([[0, q_len], [0, kv_len]])
        got = forward(lambda q, k, v: pa.mha(q, k, v, dense, **given), q, k, v)  # noqa: B023
        close(got[0], want)
        np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(lse))
        if shift < 0:
            assert np.isneginf(got[1][..., :-shift]).all()
            assert not np.any(got[0][:, :-shift])
        packed = forward(
            lambda q, k, v, cu: pa.mha_varlen(q[0], k[0], v[0], *cu, mask=mask, **given),  # noqa: B023
            q, k, v, cu,
        )  # fmt: skip
        close(packed[0], want[0])
        np.testing.assert_array_equal(np.isneginf(packed[1]), np.isneginf(lse[0]))


@pytest.mark.parametrize("lens", [(64, 256), (256, 64)])
def test_the_loop_over_keys_ends_with_the_keys(lens, backend):
    problem = Problem(batch=1, lens=lens, heads=(2, 2), dims=(64, 64))
    got = check(problem, testing.make_inputs(problem, "bfloat16", None, f"keys{lens}"), backend)
    for name in ("dk", "dv"):
        assert np.all(np.any(got[name], axis=(0, 2, 3)))


@pytest.mark.parametrize("left", [0, 1, 17, 63, 64, 128, 129])
def test_a_window_counts_keys_besides_the_query_itself(left, backend):
    # Equal logits, values that tell their index: the output is the middle of what was visible.
    index = jnp.arange(130, dtype=jnp.float32)
    v = jnp.broadcast_to(index[None, :, None, None], (1, 130, 1, 16))
    q, k = jnp.ones_like(v), jnp.zeros_like(v)
    mask = pa.Causal() & pa.SlidingWindow(left)
    out = forward(lambda *qkv: pa.mha(*qkv, mask, **options(backend)), q, k, v)
    i = np.arange(130)
    close(out[0, :, 0, 0], (i + np.maximum(0, i - left)) / 2)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_each_other(causal, backend):
    problem = Problem(batch=1, lens=(130, 130), heads=(2, 2))
    ids = {cut: jnp.asarray(np.repeat([1, 2], [cut, 130 - cut])) for cut in (37, 64)}

    def masked(ids):
        return pa.Document(ids) & pa.Causal() if causal else pa.Document(ids)

    data = testing.make_inputs(problem, "float32", masked(ids[37]), "documents")
    attend = testing.attend_with(problem, **options(backend))
    fn = testing.compiled(testing.with_gradients(attend), data)
    for cut in ids:
        # A loss on the second document only, as out and as lse.
        dout = data.dout.at[:, :cut].set(0.0)
        dlse = data.dlse.at[:, :, :cut].set(0.0)
        got = testing.to_host(fn(data._replace(mask=masked(ids[cut]), dout=dout, dlse=dlse)))
        alone = testing.Data(
            Operands(*(x[:, cut:] for x in data.operands[:3])),
            pa.Causal() if causal else None,
            data.dout[:, cut:],
            data.dlse[:, :, cut:],
        )
        want = testing.run(testing.attend_plainly(problem), alone)
        close(got["lse"][..., cut:], want["lse"])
        for name in ("out", "dq", "dk", "dv"):
            close(got[name][:, cut:], want[name])
            if name != "out":
                assert not np.any(got[name][:, :cut]), name


def test_lengths_of_zero_when_decoding(backend):
    problem = Problem(batch=3, lens=(1, 128), heads=(4, 2))
    lens = jnp.asarray([0, 33, 1])
    data = testing.make_inputs(problem, "bfloat16", pa.Lengths(kv_lens=lens), "decode")
    q, k, v, _, _ = data.operands
    unused = jnp.arange(128) >= lens[:, None]
    k, v = (jnp.where(unused[:, :, None, None], jnp.nan, x) for x in (k, v))
    attend = testing.attend_with(problem, **options(backend))
    out, lse = forward(attend, Operands(q, k, v), data.mask)
    want, want_lse = forward(testing.attend_plainly(problem), data.operands, data.mask)
    assert not np.any(out[0])
    assert np.isneginf(lse[0]).all()
    close(out, want, 2e-2)
    close(lse[1:], want_lse[1:])


def test_tokens_past_the_last_offset(backend):
    rng = testing.generator("offsets")
    q, k, v, dout = (jnp.asarray(rng.standard_normal((130, 2, 32), np.float32)) for _ in range(4))
    cu = jnp.asarray([0, 40, 40, 128])

    def fn(q, k, v, cu, dout):
        def attend(q, k, v):
            return pa.mha_varlen(q, k, v, cu, mask=pa.Causal(), **options(backend))

        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    got = forward(fn, q, k, v, cu, dout)
    for x in got:
        assert not np.any(x[128:])
        assert np.isfinite(x).all()
    for start, end in ((0, 40), (40, 128)):
        data = testing.Data(
            Operands(*(x[None, start:end] for x in (q, k, v))),
            pa.Causal(),
            dout[None, start:end],
            jnp.zeros((1, 2, end - start)),
        )
        want = testing.run(testing.attend_plainly(Problem()), data)
        for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
            close(x[start:end], want[name][0])


@pytest.mark.parametrize(("cap", "size"), [(50.0, 60.0), (15.0, 1.0)])
def test_soft_cap_of_large_logits_and_its_gradient(cap, size, backend):
    problem = Problem(batch=1, lens=(130, 130), heads=(4, 2), dims=(64, 64), soft_cap=cap)
    data = testing.make_inputs(problem, "float32", pa.Causal(), f"cap{cap}")
    q, k, v, _, _ = data.operands
    check(problem, data._replace(operands=Operands(size * q, size * k, v)), backend)


@pytest.mark.parametrize("lens", [(1, 2), (17, 17), (63, 64), (129, 130), (257, 258)])
def test_lengths_around_the_tiles(lens, backend):
    problem = Problem(batch=1, lens=lens, heads=(2, 1))
    data = testing.make_inputs(problem, "float32", None, f"around{lens}")
    attend = testing.attend_with(problem, **options(backend))
    fn = testing.compiled(testing.with_gradients(attend), data)
    got, again = (testing.to_host(fn(data)) for _ in range(2))
    exact, plain = testing.expected_of(problem, data)
    testing.assert_close(got, exact, plain, testing.magnitudes(problem, data), "float32")
    for name, x in got.items():
        np.testing.assert_array_equal(x, again[name])
    ones = testing.to_host(fn(data._replace(operands=jax.tree.map(jnp.ones_like, data.operands))))
    close(ones["out"], np.ones_like(ones["out"]))
    close(ones["lse"], np.log(lens[1]) + 32**0.5)


def test_key_gradients_sum_over_the_group(backend):
    problem = Problem(batch=1, lens=(65, 65), heads=(12, 4), dims=(64, 64))
    data = testing.make_inputs(problem, "float32", pa.Causal(), "group")
    got = testing.run(testing.attend_with(problem, **options(backend)), data)
    q, k, v, _, _ = data.operands
    repeated = data._replace(
        operands=Operands(q, jnp.repeat(k, 3, axis=2), jnp.repeat(v, 3, axis=2))
    )
    want = testing.run(testing.attend_with(problem, **options(backend)), repeated)
    for name in ("dk", "dv"):
        summed = want[name].reshape(1, 65, 4, 3, 64).sum(3)
        close(got[name], summed)
    with pytest.raises(ValueError, match="heads"):
        pa.mha(q, k[:, :, :3, :][:, :, [0, 1, 2, 0, 1]], v[:, :, [0, 1, 2, 3, 0]])


@pytest.mark.parametrize("dims", [(8, 8), (40, 72), (72, 40), (96, 96), (160, 80)])
def test_every_channel_counts_and_the_scale_is_of_the_true_dimension(dims, backend):
    problem = Problem(batch=1, lens=(33, 33), heads=(1, 1), dims=dims)
    data = testing.make_inputs(problem, "float32", None, f"channels{dims}")
    q, k, v, _, _ = data.operands
    fn = testing.compiled(lambda *qkv: pa.mha(*qkv, return_lse=True, **options(backend)), q, k, v)
    out, lse = testing.to_host(fn(q, k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(dims[0])
    close(lse, np.log(np.exp(logits).sum(-1)))
    assert not np.allclose(testing.to_host(fn(q.at[..., -1].add(1.0), k, v))[1], lse)
    changed = testing.to_host(fn(q, k, v.at[..., -1].add(1.0)))[0]
    close(changed[..., -1], out[..., -1] + 1.0)
    close(changed[..., :-1], out[..., :-1])


@pytest.mark.parametrize("scale", [None, 0.3])
def test_lse_is_natural_and_merges_halves(scale, backend):
    problem = Problem(batch=1, lens=(130, 130), heads=(2, 1), scale=scale)
    data = testing.make_inputs(problem, "float32", None, "merge")
    q, k, v, _, _ = data.operands
    attend = testing.attend_with(problem, **options(backend))
    out, lse = forward(attend, Operands(q, k, v), None)
    logits = np.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * (scale or 32**-0.5)
    close(lse, np.log(np.exp(logits).sum(-1)))
    halves = testing.compiled(attend, Operands(q, k[:, :65], v[:, :65]), None)
    (out_a, lse_a), (out_b, lse_b) = (
        testing.to_host(halves(Operands(q, k[:, part], v[:, part]), None))
        for part in (slice(0, 65), slice(65, 130))
    )
    weight = (1 / (1 + np.exp(lse_b - lse_a))).swapaxes(1, 2)[..., None]
    close(weight * out_a + (1 - weight) * out_b, out)
    close(np.logaddexp(lse_a, lse_b), lse)

    def packed(q, k, v, cu):
        given = {**options(backend), "scale": scale, "return_lse": True}
        return pa.mha_varlen(q[0], k[0], v[0], cu, **given)

    close(forward(packed, q, k, v, jnp.asarray([0, 130]))[1], lse[0])


@pytest.mark.parametrize("scale", [0.0, 1e-30, -0.125])
@pytest.mark.parametrize("mask", [pa.Causal(), pa.Full()], ids=["causal", "full"])
def test_scales_that_are_zero_tiny_or_negative(scale, mask, backend):
    problem = Problem(batch=1, lens=(130, 130), heads=(1, 1), scale=scale)
    got = check(problem, testing.make_inputs(problem, "float32", mask, "scale"), backend)
    if scale == 0.0:
        assert not np.any(got["dq"])
        assert not np.any(got["dk"])


def _hiding(bias, hidden, value):
    """A bias with `value` where a pair is hidden."""
    return jnp.where(jnp.asarray(hidden), jnp.asarray(value, bias.dtype), bias)


@pytest.mark.parametrize(
    ("value", "mask"),
    [
        (-np.inf, None),
        (-np.inf, pa.Causal(align="bottom_right")),
        (-1e30, None),
        (np.finfo(np.float32).min, pa.Causal(align="bottom_right")),
        (-1e4, None),
    ],
)
def test_a_bias_that_hides_is_a_mask(value, mask, backend):
    problem = Problem(batch=2, lens=(65, 70), heads=(2, 1), bias="bqk")
    data = testing.make_inputs(problem, "float32", mask, "hiding bias")
    # Whole leading tiles, and pairs here and there; every query sees its own key.
    hidden = testing.generator("hiding").random((2, 1, 65, 70)) < 0.3
    hidden[..., :60, :] |= np.arange(70) < np.arange(60)[:, None] - 20
    hidden[..., np.arange(65), np.arange(65)] = False
    bias = data.operands.bias
    given = data._replace(operands=data.operands._replace(bias=_hiding(bias, hidden, value)))
    by_mask = jnp.broadcast_to(jnp.asarray(~hidden), (2, 2, 65, 70))
    wanted = data._replace(mask=pa.Dense(by_mask) & (mask or pa.Full()))
    exact, plain = testing.expected_of(problem, wanted)
    got = testing.run(testing.attend_with(problem, **options(backend)), given)
    testing.assert_close(got, exact, plain, testing.magnitudes(problem, data), "float32")


@pytest.mark.parametrize("value", [-np.inf, np.finfo(np.float32).min])
def test_rows_that_a_bias_hides_wholly_stay_finite(value, backend):
    problem = Problem(batch=1, lens=(65, 70), heads=(2, 1), bias="qk")
    data = testing.make_inputs(problem, "float32", None, "hidden rows")
    hidden = np.zeros((1, 1, 65, 70), bool)
    hidden[..., [0, 40, 64], :] = True
    bias = _hiding(data.operands.bias, hidden, value)
    # As in a loss that leaves such rows out.
    data = data._replace(
        operands=data.operands._replace(bias=bias),
        dout=data.dout.at[:, [0, 40, 64]].set(0.0),
        dlse=data.dlse.at[:, :, [0, 40, 64]].set(0.0),
    )
    got = testing.run(testing.attend_with(problem, **options(backend)), data)
    assert all(np.isfinite(x).all() for name, x in got.items() if name != "lse")
    mean = np.asarray(data.operands.v).mean((0, 1, 2)) if value > -np.inf else 0.0
    close(got["out"][0, [0, 40, 64]], np.broadcast_to(mean, (3, 2, 32)))
    assert not np.any(got["dq"][:, [0, 40, 64]])
    seen = data._replace(
        operands=data.operands._replace(bias=_hiding(bias, hidden, 0.0)),
        mask=pa.Dense(jnp.asarray(~hidden)),
    )
    exact, plain = testing.expected_of(problem, seen)
    got["out"][:, [0, 40, 64]], got["lse"][..., [0, 40, 64]] = 0.0, -np.inf  # looked at above
    testing.assert_close(got, exact, plain, testing.magnitudes(problem, seen), "float32")


@pytest.mark.parametrize(
    ("lens", "far"), [((1, 128), 200.0), ((64, 64), 200.0), ((65, 130), -200.0), ((65, 130), 3e4)]
)
def test_logits_that_are_all_far_from_zero(lens, far, backend):
    """What is past an end counts as 0 somewhere: exp(0 - lse) must not be taken."""
    problem = Problem(batch=1, lens=lens, heads=(2, 1), dims=(32, 32), scale=1.0)
    data = testing.make_inputs(problem, "float32", None, "far")
    q, k, *others = data.operands
    q, k = 0.1 * q, 0.1 * k
    operands = Operands(q.at[..., 0].set(16.0), k.at[..., 0].set(-far / 16.0), *others)
    check(problem, data._replace(operands=operands), backend)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "int8", "bfloat16"),
        ("int8", "int8", "int8"),
    ],
)
def test_mixed_dtypes_are_refused_by_name(dtypes):
    q, k, v = (jax.ShapeDtypeStruct((1, 8, 2, 16), d) for d in dtypes)
    with pytest.raises(ValueError, match="dtype: got"):
        pa.explain(q, k, v)


@pytest.mark.parametrize("given", ["kv", "q"])
def test_one_of_the_two_lengths_alone(given, backend):
    lens = jnp.asarray([24, 125, 53, 28, 77, 96, 13, 114])
    problem = Problem(batch=8, lens=(128, 128), heads=(4, 4), dims=(16, 16))
    data = testing.make_inputs(problem, "float32", pa.Lengths(**{f"{given}_lens": lens}), "lengths")
    got = check(problem, data, backend)
    q, k, v, _, _ = data.operands
    name = {"kv": "key_value_seq_lengths", "q": "query_seq_lengths"}[given]
    want = jax.nn.dot_product_attention(q, k, v, **{name: lens})
    counts = (jnp.arange(128) < lens[:, None]) if given == "q" else jnp.ones((8, 128), bool)
    want = np.where(np.asarray(counts)[..., None, None], np.asarray(want), 0.0)
    close(got["out"], want)


CHANGES = [
    ("soft_cap", {"soft_cap": 15.0}, {"soft_cap": 50.0}),
    ("scale", {"scale": 0.1}, {"scale": 0.2}),
    ("window", {"mask": pa.SlidingWindow(16)}, {"mask": pa.SlidingWindow(32)}),
    ("causal", {}, {"mask": pa.Causal()}),
    ("sinks", {}, {"sinks": jnp.ones(2)}),
]


@pytest.mark.parametrize(("first", "second"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_nothing_is_reused_that_should_not_be(first, second, backend):
    # Two calls of equal shapes, gradients after no gradients, each by its own reference.
    problem = Problem(batch=1, lens=(70, 70), heads=(2, 2))
    q, k, v = testing.make_inputs(problem, "float32").operands[:3]

    def loss_of(attend):
        def loss(q, **call):
            out = attend(q, k, v, **call)
            return ((out[0] if isinstance(out, tuple) else out) ** 2).sum()

        return loss

    ours = loss_of(functools.partial(pa.mha, **options(backend)))
    exact = loss_of(reference.mha)
    for call in (first, second):
        value, grad = jax.jit(lambda q: (ours(q, **call), jax.grad(ours)(q, **call)))(q)  # noqa: B023
        want, want_grad = jax.jit(jax.value_and_grad(lambda q: exact(q, **call)))(q)  # noqa: B023
        close(value, want, 1e-4)
        close(grad, want_grad, 1e-4)


def test_another_length_dtype_or_width_after_the_first(backend):
    for seed, (length, dim, dtype) in enumerate(
        [(48, 64, "float16"), (48, 64, "bfloat16"), (48, 128, "bfloat16"), (72, 128, "bfloat16")]
    ):
        problem = Problem(batch=1, lens=(length, length), heads=(1, 1), dims=(dim, dim))
        data = testing.make_inputs(problem, dtype, pa.Causal(), f"series{seed}")
        attend = testing.attend_with(problem, **options(backend))
        out, _ = forward(attend, data.operands, data.mask)
        want, _ = forward(testing.attend_plainly(problem), data.operands, data.mask)
        close(out, want, 2e-2)


def test_dropout_is_no_argument():
    q = jnp.zeros((1, 4, 1, 16))
    with pytest.raises(TypeError):
        pa.mha(q, q, q, dropout_rate=0.5)
