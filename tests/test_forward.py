"""The forward pass by itself: planned tables under every mask, forms of the call, large logits."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import testing
from pallas_attn.testing import CASES, MASKED, Problem


def planned(problem, mask, backend):
    sizes = dict(zip(("batch", "q_heads", "q_len", "kv_len"), problem.mask_shape, strict=True))
    head_dim, v_dim = problem.dims
    tiles = testing.small_tiles(backend)
    return pa.plan(
        mask, **sizes, head_dim=head_dim, v_dim=v_dim, dtype="float32", backend=backend, tiles=tiles
    )


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.mask_name)
def test_every_mask_planned_once(case, backend):
    problem, data = case.problem, testing.inputs(case, "float32")
    table = planned(problem, data.mask, backend)
    attend = testing.attend_with(problem, backend)
    exact, plain = testing.expected(case, "float32")
    out, lse = testing.to_host(testing.compiled(attend, data.operands, table)(data.operands, table))
    sizes = testing.magnitudes(problem, data)
    testing.assert_close({"out": out, "lse": lse}, exact, plain, sizes, "float32")


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


def test_names_of_cases_are_unique():
    assert len(CASES) == len({case.name for case in CASES.values()})
