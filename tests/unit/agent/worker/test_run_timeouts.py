"""How long a run may take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.worker.run_timeouts import FACTOR, MIN_GRACE_S, MIN_LIMIT_S, RunTimeouts

sizes = st.integers(1, 10**9)


def test_quick_models_get_the_least_and_slow_ones_their_p99() -> None:
    quick = RunTimeouts(100, 0.01)
    assert (quick.limit_s(100), quick.grace_s(100)) == (MIN_LIMIT_S, MIN_GRACE_S)
    slow = RunTimeouts(100, 2.0)
    assert slow.limit_s(100) == pytest.approx(2.0 * FACTOR, rel=0.03)
    assert slow.grace_s(100) == pytest.approx(2.0, rel=0.03)


def test_the_p99_counts_and_not_the_slowest_of_a_thousand() -> None:
    patience = RunTimeouts(1, 1.0)
    for _ in range(999):
        patience.record_run(1, 1.0)
    patience.record_run(1, 100.0)
    assert patience.limit_s(1) == pytest.approx(FACTOR, rel=0.03)


def test_larger_inputs_get_more_and_those_larger_than_ever_much_more() -> None:
    patience = RunTimeouts(100, 1.0)
    assert patience.limit_s(50) == pytest.approx(0.5 * FACTOR, rel=0.03)
    assert patience.limit_s(300) == pytest.approx(9.0 * FACTOR, rel=0.03), "three times the size, quadratically"
    patience.record_run(300, 3.0)
    assert patience.limit_s(300) == pytest.approx(3.0 * FACTOR, rel=0.03), "now it is known"


@given(sizes, st.floats(1e-5, 100.0), sizes)
def test_nobody_is_cut_off_at_once(size: int, seconds: float, asked: int) -> None:
    patience = RunTimeouts(size, seconds)
    assert patience.limit_s(asked) >= MIN_LIMIT_S
    assert patience.grace_s(asked) >= MIN_GRACE_S
    assert patience.limit_s(max(size, asked)) >= seconds
