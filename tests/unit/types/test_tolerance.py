"""Tolerances by precision, where a policy says none."""

from itertools import pairwise

import pytest

from shoal.types.migration import Metric
from shoal.types.tolerance import default

FINE_TO_COARSE = ("fp64", "fp32", "fp16", "bf16", "int8")


def bounds(source: str, target: str) -> tuple[float, float]:
    most, least = default(source, target)
    assert (most.metric, least.metric, most.output, least.output) == (Metric.MAX_REL, Metric.COSINE, "", "")
    return most.bound, least.bound


def test_the_coarser_precision_rules_either_way() -> None:
    assert bounds("fp32", "fp32") == bounds("fp64", "fp32") == (1e-3, 0.9999)
    assert bounds("fp32", "int8") == bounds("int8", "fp32") == bounds("int8", "int8") == (0.25, 0.99)
    for fine, coarse in pairwise(FINE_TO_COARSE):
        assert bounds(coarse, fine) == bounds(fine, coarse) == bounds(coarse, coarse)
        assert bounds(fine, fine)[0] <= bounds(coarse, coarse)[0]
        assert bounds(fine, fine)[1] >= bounds(coarse, coarse)[1]


@pytest.mark.parametrize("unknown", ["int4", "fp8", "", "posit"])
def test_what_is_not_known_is_as_coarse_as_int8(unknown: str) -> None:
    assert bounds("fp32", unknown) == bounds("fp32", "int8")
