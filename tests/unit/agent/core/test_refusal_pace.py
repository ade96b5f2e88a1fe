"""Refusals of callers over their limits leave one after the other, each caller in its turn."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.refusal_pace import AT_ONCE, MAX_WAITING, MAX_WAITING_OF_CALLER, SPACING_S, RefusalPace
from shoal.types.units import Elapsed

NOW = Elapsed(50.0)


def busy() -> RefusalPace[str]:
    """A pace at which no refusal may leave at once any more."""
    pace = RefusalPace[str]()
    while pace.enter(NOW):
        pass
    return pace


def test_a_few_leave_at_once_and_again_after_a_pause() -> None:
    pace = RefusalPace[str]()
    assert sum(pace.enter(NOW) for _ in range(100)) == AT_ONCE
    later = Elapsed(NOW + 10.0)
    assert sum(pace.enter(later) for _ in range(100)) == AT_ONCE


def test_each_caller_has_its_turn_however_many_refusals_another_has() -> None:
    pace = busy()
    for number in range(50):
        pace.wait("loud", f"loud {number}")
    pace.wait("quiet", "quiet 0")
    at, order = pace.next_at(), list[str | None]()
    while at is not None and len(order) < 4:
        assert pace.next(Elapsed(at - SPACING_S / 2)) is None
        order.append(pace.next(at))
        at = pace.next_at()
    assert order == ["loud 0", "quiet 0", "loud 1", "loud 2"]
    assert not pace.enter(Elapsed(NOW + 100.0)), "the order is kept"


def test_what_waits_is_bounded_and_the_oldest_of_the_caller_leaves() -> None:
    pace = busy()
    for number in range(MAX_WAITING_OF_CALLER):
        assert pace.wait("loud", f"loud {number}") is None
    assert pace.wait("loud", "one more") == "loud 0"
    assert pace.wait("quiet", "quiet 0") is None
    for number in range(MAX_WAITING):
        pace.wait(f"caller {number}", f"refusal {number}")
    assert pace.waiting == MAX_WAITING


EVENTS = st.lists(st.tuples(st.sampled_from(("refuse", "turn", "withdraw", "wait")), st.integers(0, 3)), max_size=60)


@given(EVENTS)
def test_every_refusal_leaves_once_and_no_sooner_than_the_pace_allows(events: list[tuple[str, int]]) -> None:
    pace, now, left, waiting = RefusalPace[tuple[str, int]](), NOW, list[float](), list[tuple[str, int]]()
    for number, (event, which) in enumerate(events):
        caller = f"caller {which}"
        match event:
            case "refuse":
                if pace.enter(now):
                    left.append(now)
                else:
                    assert pace.wait(caller, (caller, number)) is None
                    waiting.append((caller, number))
            case "turn" if (found := pace.next(now)) is not None:
                waiting.remove(found)
                left.append(now)
            case "withdraw" if waiting:
                gone = waiting.pop(which % len(waiting))
                pace.withdraw(gone[0], gone)
                pace.withdraw(gone[0], gone)
            case "wait":
                now = Elapsed(now + which * SPACING_S / 2)
        assert pace.waiting == len(waiting)
        assert (pace.next_at() is None) == (not waiting)
    assert len(left) <= AT_ONCE + 1 + (now - NOW) / SPACING_S
