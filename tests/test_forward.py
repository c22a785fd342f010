"""The forward pass by itself: planned tables under every mask, forms of the call, extreme logits."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import testing
from pallas_attn.testing import CASES, MASKED, Problem


def planned(problem, mask, backend):
    batch, q_heads, q_len, kv_len = problem.mask_shape
    return pa.plan(
        mask, q_len=q_len, kv_len=kv_len, batch=batch, q_heads=q_heads, head_dim=problem.dims[0],
        v_dim=problem.dims[1], dtype=jnp.float32, backend=backend, tiles=testing.small_tiles(backend),
    )  # fmt: skip


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.mask_name)
def test_every_mask_planned_once(case, backend):
    problem, data = case.problem, testing.inputs(case, "float32")
    table = planned(problem, data.mask, backend)
    attend = testing.attend_with(problem, backend)
    exact, plain = testing.expected(case, "float32")
    out, lse = testing.to_host(testing.compiled(attend, data.operands, table)(data.operands, table))
    sizes = testing.magnitudes(problem, data)
    testing.assert_close({"out": out, "lse": lse}, exact, plain, sizes, "float32")


@pytest.fixture
def call():
    """(q, k, v) of a small problem, and the result by definition."""
    problem = Problem(lens=(40, 40))
    data = testing.make_inputs(problem, "float32", pa.Causal(), "call")
    out, lse = testing.attend_plainly(problem)(data.operands, data.mask)
    return data.operands[:3], out, lse


def near(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_forms_of_the_call(call, backend):
    (q, k, v), out, lse = call
    options = {"backend": backend, "tiles": testing.small_tiles(backend)}
    near(pa.mha(q, k, v, pa.Causal(), **options), out)
    alone, alone_lse = pa.mha(q[0], k[0], v[0], pa.Causal(), return_lse=True, **options)
    near(alone, out[0])
    near(alone_lse, lse[0])
    # A bool array of any rank up to 4, and a bias of rank 2.
    lower = jnp.tril(jnp.ones((40, 40), bool))
    near(pa.mha(q, k, v, lower, **options), out)
    near(pa.mha(q, k, v, lower[None, None], **options), out)
    hidden = jnp.where(lower, 0.0, -1e9)
    near(pa.mha(q, k, v, bias=hidden, **options), out)
    near(pa.mha(q, k, v, pa.Causal(), deterministic=True, **options), out)


def test_logits_far_from_zero(backend):
    # exp of these logits over- or underflows float32 unless the maximum is taken first.
    problem = Problem(lens=(70, 70), scale=4.0)
    for shift in (60.0, -60.0):
        data = testing.make_inputs(problem, "float32", pa.Causal(), f"far{shift}")
        operands = data.operands._replace(q=data.operands.q + shift)
        data = data._replace(operands=operands)
        attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
        testing.assert_close_to_reference(attend, problem, data)


def test_names_of_cases_are_unique():
    assert len(CASES) == len({case.name for case in CASES.values()})
