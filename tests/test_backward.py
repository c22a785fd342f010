"""Outputs and gradients of every backend, mask, shape and option; and what must be exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import testing, triton
from pallas_attn.testing import MASK_CASES, MASKED, SHAPED, Case, Operands, Problem


def check(case, dtype, backend):
    """Holds a case to the error rule; in float32 through a table that was planned before."""
    problem, data = case.problem, testing.inputs(case, dtype)
    tiles = testing.small_tiles(backend)
    if dtype == "float32":
        data, tiles = data._replace(mask=planned(problem, data.mask, backend)), None
    attend = testing.attend_with(problem, backend, tiles)
    testing.assert_close_to_reference(attend, problem, data, testing.expected(case, dtype))


def planned(problem, mask, backend):
    sizes = dict(zip(("batch", "q_heads", "q_len", "kv_len"), problem.mask_shape, strict=True))
    head_dim, v_dim = problem.dims
    tiles = testing.small_tiles(backend)
    return pa.plan(
        mask, **sizes, head_dim=head_dim, v_dim=v_dim, dtype="float32", backend=backend, tiles=tiles
    )


# Plain JAX treats all dtypes alike; kernels have one path for float32 and another for 16 bits.
RUNS = [("triton", "float32"), ("triton", "bfloat16"), ("xla", "float32")]


@pytest.mark.parametrize(("backend", "dtype"), RUNS, indirect=["backend"])
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.mask_name)
def test_every_mask(case, dtype, backend):
    check(case, dtype, backend)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("case", SHAPED, ids=lambda case: case.name)
def test_every_shape_and_option(case, backend):
    narrow = max(case.problem.dims) <= triton.MAX_FLOAT32_DIM
    check(case, "float32" if case.mask_name == "full" and narrow else "bfloat16", backend)


@pytest.mark.parametrize("backend", ["xla"], indirect=True)
@pytest.mark.parametrize(
    "case", [case for case in SHAPED if case.mask_name != "full"], ids=lambda case: case.name
)
def test_every_shape_and_option_in_plain_jax(case, backend):
    check(case, "bfloat16", backend)


def gradients(loss, operands):
    """The gradient of a scalar of (out, lse), by name."""
    grads = testing.compiled(jax.grad(loss), operands)(operands)
    return testing.to_host(grads._asdict())


@pytest.mark.parametrize("of", ["lse", "out", "both"])
def test_each_output_alone_and_together(of, backend):
    # Not a cotangent of zeros for the other output, but an output that no one uses.
    problem = Problem(lens=(65, 65), heads=(6, 2))
    mask = np.ones((65, 65), bool)
    mask[7] = False
    data = testing.make_inputs(problem, "float32", jnp.asarray(mask), of)

    def loss_of(attend):
        def loss(operands):
            out, lse = attend(operands, data.mask)
            seen = jnp.where(lse > -jnp.inf, lse, 0.0)
            terms = {"lse": (seen * data.dlse).sum(), "out": (out * data.dout).sum()}
            return terms["lse"] + terms["out"] if of == "both" else terms[of]

        return loss

    attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
    got = gradients(loss_of(attend), Operands(*data.operands[:3]))
    want = gradients(loss_of(testing.attend_plainly(problem)), Operands(*data.operands[:3]))
    for name in "qkv":
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=2e-5)
    assert np.any(got["q"])
    assert not np.any(got["q"][:, 7])
    if of == "lse":
        assert not np.any(got["v"])


PADDINGS = {
    "lengths": lambda m, n: pa.Lengths(jnp.asarray([m - 40, 0]), jnp.asarray([n - 33, n - 1])),
    "kv_lengths_causal": lambda m, n: pa.Lengths(kv_lens=jnp.asarray([50, 3])) & pa.Causal(),
    "documents": lambda m, n: pa.Document(
        jnp.asarray(np.r_[np.zeros(30), np.full(40, -1), np.full(m - 70, 2)].astype(np.int32)),
        jnp.asarray(np.r_[np.full(20, -5), np.zeros(n - 40), np.full(20, -1)].astype(np.int32)),
    ),
    "documents_or_lengths": lambda m, n: (
        pa.Document(jnp.asarray(np.r_[np.zeros(m - 30), np.full(30, -1)].astype(np.int32)))
        & pa.SlidingWindow(40, 3)
    ) | pa.Lengths(jnp.asarray([10, 20]), jnp.asarray([5, 0])),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_stands_in_padding_never_leaks(name, poison, backend):
    problem = Problem(lens=(97, 97), heads=(4, 2), soft_cap=5.0)
    mask = PADDINGS[name](*problem.lens)
    data = testing.make_inputs(problem, "float32", mask, name)
    q, k, v, _, _ = data.operands
    batch = np.arange(problem.batch, dtype=np.int32)[:, None]
    index = np.arange(97, dtype=np.int32)[None]

    def planted(x, valid):
        if valid is None:
            return x
        bad = ~np.broadcast_to(np.asarray(valid), (problem.batch, 97))
        assert bad.any()
        return jnp.where(bad[:, :, None, None], poison, x)

    q_valid, kv_valid = mask.q_valid(batch, index), mask.kv_valid(batch, index)
    dirty = data._replace(
        operands=Operands(planted(q, q_valid), planted(k, kv_valid), planted(v, kv_valid)),
        dout=planted(data.dout, q_valid),
    )
    attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
    fn = testing.compiled(testing.with_gradients(attend), data)
    clean, got = testing.to_host(fn(data)), testing.to_host(fn(dirty))
    for result, x in got.items():
        np.testing.assert_array_equal(x, clean[result], err_msg=result)
        assert np.isfinite(x).all() or result == "lse"


def test_nothing_visible_at_all(backend):
    problem = Problem(lens=(40, 50), sinks=True, bias="hqk", soft_cap=3.0)
    mask = pa.Lengths(kv_lens=jnp.asarray([0, 0]))
    data = testing.make_inputs(problem, "bfloat16", mask, "nothing")
    attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
    got = testing.run(attend, data)
    assert np.isneginf(got.pop("lse")).all()
    assert set(got) == {"out", "dq", "dk", "dv", "dbias", "dsinks"}
    for name, x in got.items():
        assert not np.any(x), name


def test_unseen_keys_have_no_gradient(backend):
    problem = Problem(lens=(60, 97))
    data = testing.make_inputs(problem, "float32", pa.Causal(), "unseen")
    attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
    got = testing.run(attend, data)
    for name in ("dk", "dv"):
        assert not np.any(got[name][:, 60:])
        assert np.all(np.any(got[name][:, :60], axis=(0, 2, 3)))


def test_gradient_of_a_broadcast_bias_is_the_sum(backend):
    full = Problem(lens=(40, 49), bias="bhqk")
    data = testing.make_inputs(full, "float32", pa.Causal(), "bias")
    row = data.operands.bias[:1, :, :1, :]
    tiles = testing.small_tiles(backend)
    results = []
    for bias in (row, jnp.broadcast_to(row, full.bias_shape)):
        given = data._replace(operands=data.operands._replace(bias=bias))
        results.append(testing.run(testing.attend_with(full, backend, tiles), given)["dbias"])
    summed = results[1].sum(axis=(0, 2), keepdims=True)
    np.testing.assert_allclose(results[0], summed, rtol=1e-4, atol=2e-5)


# A few of each kind: what the check costs is a compilation each, and the maths is shared.
DIFFERENCED = [
    Case("base", "causal_documents"), Case("base", "lengths"), Case("base", "predicate_arrays"),
    Case("heads_5_1", "full"), Case("everything", "window"), Case("bias_hk", "block_sparse_heads"),
    Case("sinks", "dense"), Case("soft_cap", "causal_offsets"), Case("scale_negative", "dilated"),
]  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCED, ids=lambda case: case.name)
def test_finite_differences(case):
    # In float64, which only plain JAX takes; the kernels are held to it by the error rule.
    problem, data = case.problem, testing.inputs(case, "float32")
    attend = testing.attend_with(problem, "xla", testing.small_tiles("xla"))
    with jax.enable_x64(True):
        operands, dout, dlse = jax.tree.map(
            jnp.asarray, testing.to_host((data.operands, data.dout, data.dlse))
        )

        def loss(operands):
            out, lse = attend(operands, data.mask)
            assert out.dtype == lse.dtype == jnp.float64
            return (out * dout).sum() + jnp.where(lse > -jnp.inf, lse * dlse, 0.0).sum()

        value_and_grad = testing.compiled(jax.value_and_grad(loss), operands)
        _, grads = value_and_grad(operands)
        rng = testing.generator(case.name + "-direction")
        for name, grad in grads._asdict().items():
            if grad is None:
                continue
            direction, step = jnp.asarray(rng.standard_normal(grad.shape)), 1e-5
            at = getattr(operands, name)
            ahead, behind = (
                value_and_grad(operands._replace(**{name: at + s * direction}))[0]
                for s in (step, -step)
            )
            measured, claimed = (ahead - behind) / (2 * step), (grad * direction).sum()
            np.testing.assert_allclose(claimed, measured, rtol=1e-6, atol=1e-6, err_msg=name)


def test_masks_of_every_class_are_among_the_cases():
    rng = np.random.default_rng(0)
    seen = {type(mask) for case in MASK_CASES.values() for mask in _parts(case(rng, 2, 4, 64, 64))}
    public = {getattr(pa, n) for n in pa.__all__ if isinstance(getattr(pa, n), type)}
    assert seen >= {c for c in public if issubclass(c, pa.Mask)} - {pa.Mask}


def _parts(mask):
    yield mask
    for field in vars(mask).values():
        if isinstance(field, pa.Mask):
            yield from _parts(field)
