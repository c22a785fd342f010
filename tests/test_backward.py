"""Outputs and gradients of every backend, mask, shape and option, by the error rule; what must be exact."""

import pytest

from pallas_attn import testing
from pallas_attn.testing import CASES, MASKED, SHAPED


def check(case, dtype, backend):
    problem, data = case.problem, testing.inputs(case, dtype)
    attend = testing.attend_with(problem, backend, testing.small_tiles(backend))
    testing.assert_close_to_reference(attend, problem, data, testing.expected(case, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.mask_name)
def test_every_mask(case, dtype, backend):
    check(case, dtype, backend)


@pytest.mark.parametrize("case", SHAPED, ids=lambda case: case.name)
def test_every_shape_and_option(case, backend):
    check(case, "float32" if case.mask_name == "full" else "bfloat16", backend)
