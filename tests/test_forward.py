"""The forward pass by itself: forms of the call, large logits, without gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import testing
from pallas_attn.testing import CASES, MASKED, SHAPED, Problem


def test_forms_of_the_call(backend):
    problem = Problem(lens=(40, 40))
    data = testing.make_inputs(problem, "float32", pa.Causal(), "forms")
    lower = jnp.tril(jnp.ones((40, 40), bool))
    options = {"backend": backend, "tiles": testing.small_tiles(backend)}

    def forms(q, k, v):
        whole = [
            pa.mha(q, k, v, pa.Causal(), **options),
            pa.mha(q, k, v, pa.Causal(), deterministic=True, **options),
            pa.mha(q, k, v, lower[None, None], **options),
            pa.mha(q, k, v, bias=jnp.where(lower, 0.0, -1e9), **options),
        ]
        return whole, pa.mha(q[0], k[0], v[0], lower, return_lse=True, **options)

    q, k, v = data.operands[:3]
    whole, alone = testing.to_host(testing.compiled(forms, q, k, v)(q, k, v))
    out, lse = testing.to_host(testing.attend_plainly(problem)(data.operands, data.mask))
    for got, want in (*((x, out) for x in whole), (alone[0], out[0]), (alone[1], lse[0])):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_logits_far_from_zero(backend):
    # exp of these logits over- or underflows float32 unless the maximum is taken first.
    problem = Problem(lens=(70, 70), scale=4.0)
    for shift in (60.0, -60.0):
        data = testing.make_inputs(problem, "float32", pa.Causal(), f"far{shift}")
        operands = data.operands._replace(q=data.operands.q + shift)
        data = data._replace(operands=operands)
        attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
        testing.assert_close_to_reference(attend, problem, data)


@pytest.mark.parametrize("name", ["base-causal_documents", "everything-full"])
def test_the_same_with_and_without_gradients(name, backend):
    case = CASES[name]
    data = testing.inputs(case, "float16")
    attend = testing.attend_with(case.problem, backend, testing.small_tiles(backend))
    alone = testing.compiled(attend, data.operands, data.mask)(data.operands, data.mask)
    both = testing.assert_close_to_reference(attend, case.problem, data)
    for result, got in zip(("out", "lse"), testing.to_host(alone), strict=True):
        np.testing.assert_array_equal(got, both[result])


def test_names_tell_cases_apart():
    assert len(CASES) == len(MASKED) + len(SHAPED)
