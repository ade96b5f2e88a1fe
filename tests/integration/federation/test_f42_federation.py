"""F42: the federation is killed, and cut off, under load; agreements are renewed from region to region. Scaled to
seconds: the whole minute is `-m long`."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.cluster.delegation import (
    FAR,
    HOME,
    NEAR,
    agreements,
    delete_delegated,
    gateway_load,
    in_regions,
    is_renewed,
    knows_all_regions,
    wait_all_acquainted,
    wait_delegated,
)
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock

pytestmark = pytest.mark.alone

SERVICE = "federation-1"


def codes(stack: DevStack, after: int, name: str) -> list[str]:
    return [event.code for event in stack.events(after) if event.workload.name == name]


@contextmanager
def without_federation(stack: DevStack, fault: str) -> Iterator[None]:
    if fault == "kill":
        stack.kill(SERVICE)
    else:
        stack.control.break_member(SERVICE, fault)
    try:
        yield
    finally:
        stack.control.break_member(SERVICE, "resume" if fault == "kill" else "heal")


@pytest.mark.parametrize(
    ("fault", "down_s"),
    [
        ("kill", 4.0),
        pytest.param("kill", 60.0, marks=pytest.mark.long),
        pytest.param("cut", 60.0, marks=pytest.mark.long),
    ],
)
def test_f42_federation_gone_under_load(neighbourhood: DevStack, fault: str, down_s: float) -> None:
    """What runs elsewhere runs on and is renewed region to region; regions that know each other trade on."""
    stack, clock = neighbourhood, SystemClock()
    stack.apply(in_regions("away", NEAR))
    agreed = wait_delegated(stack, "away")
    before = stack.events()[-1].sequence
    with gateway_load(stack, "away") as load:
        began = clock.now()
        with without_federation(stack, fault):
            stack.apply(in_regions("meanwhile", FAR))
            assert wait_delegated(stack, "meanwhile").counterpart == FAR
            alone_s = clock.now() - began
            load.wait_for(20, after_s=max(0.0, down_s - alone_s))
            assert not knows_all_regions(stack, HOME), "the federation was away"
            wait_until(lambda: is_renewed(stack, "away"), WAIT_TIMEOUT_S, "the agreement to be renewed")
        back = clock.now()
        wait_until(lambda: knows_all_regions(stack, HOME), WAIT_TIMEOUT_S, "home to hear the federation")
        stack.apply(in_regions("after", NEAR))
        wait_delegated(stack, "after")
        resumed_s = clock.now() - back
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [view.agreement for view in agreements(stack, "away")] == [agreed.agreement]
    assert codes(stack, before, "away") == [], "nothing happened to it"
    record(
        "F42", "P", 1, fault=fault, outage_s=round(back - began, 1), sent=verdict.sent, lost=verdict.lost_count,
        slowest_s=round(verdict.slowest_s, 3), traded_alone_s=round(alone_s, 2), traded_again_s=round(resumed_s, 2),
    )  # fmt: skip
    delete_delegated(stack, "away", "meanwhile", "after")
    wait_all_acquainted(stack)


def test_f42_a_ca_that_follows_waits_for_the_federation(neighbourhood: DevStack) -> None:
    """Without it, whatever the region then says to the federation would be refused, that it leaves too."""
    stack = neighbourhood
    with stack.api() as api:
        with without_federation(stack, "kill"):
            api.rotate()
            wait_until(
                lambda: [each.uri for each in api.authority().laggards] == ["shoal://home/federation/federation"],
                WAIT_TIMEOUT_S, "the rotation to wait for the federation alone",
            )  # fmt: skip
            assert api.authority().stage == "trust"
        wait_until(lambda: api.authority().stage != "trust", WAIT_TIMEOUT_S, "the rotation to go on")
    wait_all_acquainted(stack)
    stack.apply(in_regions("followed", NEAR))
    wait_delegated(stack, "followed")
    delete_delegated(stack, "followed")
