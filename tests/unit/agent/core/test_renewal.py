"""When a fleet's nodes renew: early enough, and not together; and which certificate is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report import IN_PROCESS, record
from shoal.agent.core.renewal import (
    CA_SWITCH_S,
    DENIED_CAP_S,
    EXPIRED_CAP_S,
    VALID_CAP_S,
    ca_switch_delay,
    due_at,
    is_offer_expired,
    retry_after,
)
from shoal.types.codes import Code
from shoal.types.units import Wall

FLEET = 5000
NOW, ENDED, GOOD = Wall(1000.0), Wall(900.0), Wall(1100.0)


@given(st.text(min_size=1), st.floats(0, 4e9), st.floats(1, 1e9))
def test_a_certificate_is_due_before_a_third_of_its_life_is_left_and_after_half(
    node: str, issued: float, life: float
) -> None:
    due = due_at(Wall(issued), Wall(issued + life), node)
    assert issued + life * 0.6 < due <= issued + life * 0.667


def test_f30_a_fleet_turns_to_another_ca_one_after_another() -> None:
    """As many as there are would be a storm: no tenth of the time has many more than its share."""
    waits = [ca_switch_delay(f"edge-{number}") for number in range(FLEET)]
    assert all(0 <= wait < CA_SWITCH_S for wait in waits)
    tenths = [0] * 10
    for wait in waits:
        tenths[int(wait / CA_SWITCH_S * 10)] += 1
    assert max(tenths) < FLEET / 10 * 1.2
    record("F30", IN_PROCESS, 1, nodes=FLEET, busiest_second=max(tenths))


@given(st.text(min_size=1), st.integers(0, 50), st.sampled_from([Code.RENEW_DENIED, Code.COORDINATOR_UNREACHABLE]))
def test_who_is_late_tries_often_and_who_was_refused_seldom(node: str, attempt: int, refused: Code) -> None:
    answered = refused is Code.RENEW_DENIED
    for ended in (True, False):
        most = DENIED_CAP_S if answered else EXPIRED_CAP_S if ended else VALID_CAP_S
        assert 0 < retry_after(node, attempt, refused, expired=ended) <= most


@pytest.mark.parametrize(
    ("offered", "held", "past"),
    [(ENDED, GOOD, True), (ENDED, ENDED, False), (GOOD, GOOD, False), (GOOD, ENDED, False), (NOW, GOOD, True)],
)
def test_a_certificate_of_the_past_does_not_follow_a_good_one(offered: Wall, held: Wall, past: bool) -> None:
    assert is_offer_expired(offered, held, NOW) is past
