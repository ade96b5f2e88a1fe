"""The delays of every retry loop: they double up to a cap, stay within their jitter, and are repeatable."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.types.backoff import delay


@given(st.text(max_size=20), st.integers(0, 2000))
def test_a_delay_is_bounded_and_repeatable(name: str, attempt: int) -> None:
    wait = delay(name, attempt, base_s=0.5, cap_s=60.0)
    assert wait == delay(name, attempt, base_s=0.5, cap_s=60.0)
    ceiling = min(60.0, 0.5 * 2 ** min(attempt, 32))
    assert ceiling / 2 <= wait <= ceiling


def test_jitter_spreads_the_delays_of_many_names_over_its_whole_range() -> None:
    waits = sorted(delay(f"edge-{number}", 3, base_s=1.0, cap_s=60.0, jitter=0.25) for number in range(1000))
    assert 6.0 <= waits[0] < 6.1
    assert 7.9 < waits[-1] <= 8.0


def test_without_jitter_the_delay_doubles_up_to_its_cap() -> None:
    waits = [delay("name", attempt, base_s=1.0, cap_s=30.0, jitter=0.0) for attempt in range(7)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
