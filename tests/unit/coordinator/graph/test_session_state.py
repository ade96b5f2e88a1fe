"""Whether a model can carry state from step to step."""

import pytest

from shoal.coordinator.core.graph.session_state import session_state_problems
from shoal.types.codes import Code
from shoal.types.profile import ModelProfile, TensorSpec
from shoal.types.units import Bytes
from shoal.types.workload import SESSION_BYTES

HALF = SESSION_BYTES // 8


@pytest.mark.parametrize(
    ("h", "c", "too_large"),
    [
        ((HALF,), (HALF,), []),
        ((HALF,), (HALF + 1,), ["c"]),
        ((2 * HALF + 1,), (-1,), ["h", "c"]),
        ((-1, 2 * HALF - 1), (-1,), []),
    ],
)
def test_state_is_no_larger_than_a_session_may_be(h: tuple[int, ...], c: tuple[int, ...], too_large: list[str]) -> None:
    inputs, outputs = (
        tuple(TensorSpec(name, "FP32", shape) for name, shape in zip(names, (h, c), strict=True))
        for names in (("h", "c"), ("hn", "cn"))
    )
    profile = ModelProfile(
        "sha256:0", Bytes(1), 8, 13, {"": 13}, "test", "fp32", inputs, outputs, {}, (), Bytes(1), Bytes(1), True, {}
    )
    found = dict(session_state_problems(profile, {"h": "hn", "c": "cn"}, "a model"))
    assert list(found) == too_large
    assert all(refusal.code is Code.SESSION_INVALID for refusal in found.values())
