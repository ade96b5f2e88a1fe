"""What a question has in common with measurements that stay is what `common` says of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.prediction.demand import OperatorClass
from shoal.coordinator.core.prediction.residuals import DeviceClass, Residual
from shoal.coordinator.core.prediction.shared_covariance import CommonWith, common

SHARES = 1 + len(OperatorClass)
RESIDUALS = st.builds(
    Residual,
    st.sampled_from("abc"),
    st.builds(DeviceClass, st.sampled_from(("cpu", "gpu")), st.sampled_from(("x", "y"))),
    st.lists(st.floats(0.0, 1.0), min_size=SHARES, max_size=SHARES).map(tuple),
    st.just(0.0),
)


@given(st.lists(RESIDUALS, min_size=1, max_size=6), RESIDUALS)
def test_a_question_has_the_same_in_common_bit_for_bit(seen: list[Residual], asked: Residual) -> None:
    for expected, found in zip(common([asked], seen), CommonWith(seen).of(asked), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.shape == expected.shape
