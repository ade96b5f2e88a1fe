"""When a client asks again."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.client.retries import CAP_S, SPREAD, FailedCall, retry_delay_s
from shoal.types.codes import Code, Refusal

OVERLOADED = Refusal(Code.OVERLOADED, "4096 requests wait")


def retry(failed: FailedCall, *, attempt: int = 0, left_s: float = 10.0, is_step: bool = False) -> float | None:
    return retry_delay_s(failed, attempt, 3, left_s, is_step=is_step, client="a")


def test_a_refusal_that_names_a_time_is_repeated_then() -> None:
    wait_s = retry(FailedCall(OVERLOADED, 0.25))
    assert wait_s is not None
    assert 0.25 <= wait_s <= 0.25 * (1 + SPREAD)


def test_clients_that_failed_together_do_not_come_back_together() -> None:
    lost = FailedCall(Refusal(Code.REPLICA_UNREACHABLE, "refused"), was_sent=False)
    for failed in (lost, FailedCall(OVERLOADED, 1.0)):
        waits = {retry_delay_s(failed, 0, 3, 10.0, is_step=False, client=f"{number}") for number in range(100)}
        assert len(waits) > 90


def test_a_refusal_without_a_time_is_not_repeated() -> None:
    assert retry(FailedCall(Refusal(Code.INTERNAL, "a fault"))) is None
    assert retry(FailedCall(OVERLOADED)) is None


def test_a_call_that_never_arrived_is_repeated_soon() -> None:
    lost = FailedCall(Refusal(Code.REPLICA_UNREACHABLE, "refused"), was_sent=False)
    delays = [retry(lost, attempt=attempt) for attempt in range(3)]
    assert all(each is not None and 0 < each <= CAP_S for each in delays)


def test_a_step_of_a_session_is_repeated_only_where_it_never_arrived() -> None:
    assert retry(FailedCall(OVERLOADED, 0.25), is_step=True) is None
    assert retry(FailedCall(OVERLOADED, 0.25, was_sent=False), is_step=True) is not None


def test_nothing_is_repeated_past_the_deadline_or_too_often() -> None:
    assert retry(FailedCall(OVERLOADED, 0.25), left_s=0.25) is None
    assert retry(FailedCall(OVERLOADED, 0.25), attempt=3) is None


@given(
    st.builds(FailedCall, st.just(OVERLOADED), st.none() | st.floats(0, 100), st.booleans()),
    st.integers(0, 5),
    st.floats(-1, 100),
    st.booleans(),
)
def test_a_delay_ends_before_the_deadline(failed: FailedCall, attempt: int, left_s: float, is_step: bool) -> None:
    found = retry_delay_s(failed, attempt, 3, left_s, is_step=is_step, client="a")
    assert found is None or 0 <= found < left_s
