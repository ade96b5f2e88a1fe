"""How far a guest is, as its origin is told: also by a coordinator that has just started."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.builders.coordinator_core import fleet_of, merge_status, node, status
from harness.builders.negotiation import award, notice, offer, solicitation
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.liveness import update_liveness
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.hold import AwardReceived, GrantedBid, HeldBid, OriginNotice
from shoal.coordinator.core.negotiation.service_state import service_state
from shoal.types.agreement import ServiceState
from shoal.types.device import Role
from shoal.types.units import Elapsed, Wall

GATEWAY = node("gw", role=Role.GATEWAY)
HEARD = fleet_of(node("edge-1"), GATEWAY)
RESTARTED = updates.restore(tuple(HEARD.nodes.values()), Fleet(), Elapsed(100.0))
"""As of the start of a coordinator, before it hears a node."""
LOST_AFTER_S = HEARD.timing.lost_after_s


def agreement(*, replicas: int = 1, has_served: bool | None) -> GrantedBid:
    held = HeldBid(solicitation(), offer(replicas=replicas), (), Elapsed(10.0))
    state, _ = hold.step(held, AwardReceived(award()), Elapsed(1.0))
    assert isinstance(state, GrantedBid)
    return replace(state, has_served=has_served)


def with_session(fleet: Fleet, now: float) -> Fleet:
    """The gateway said hello, and has reported nothing yet."""
    after = updates.connect(fleet, GATEWAY, 2, Elapsed(now), Wall(0.0))
    return update_liveness(after, Elapsed(now))[0]


def with_report(fleet: Fleet, now: float, *, front_ready: bool) -> Fleet:
    told = status(GATEWAY, 1, at=now, epoch=2, front_ready=front_ready)
    after, refusals = merge_status(with_session(fleet, now), "gw", 2, told, Elapsed(now), Wall(0.0))
    assert not refusals
    return update_liveness(after, Elapsed(now))[0]


def with_silence(fleet: Fleet, until: float) -> Fleet:
    """The coordinator looks once a heartbeat: after a longer pause it judges nobody."""
    assert fleet.ticked_at is not None
    while fleet.ticked_at < until:
        fleet = update_liveness(fleet, Elapsed(min(until, fleet.ticked_at + fleet.timing.heartbeat_s)))[0]
        assert fleet.ticked_at is not None
    return fleet


def test_a_guest_is_ready_with_all_its_replicas_and_a_gateway() -> None:
    first, later = agreement(replicas=2, has_served=False), agreement(replicas=2, has_served=True)
    assert service_state(first, 1, HEARD) is ServiceState.STARTING
    assert service_state(first, 2, HEARD) is ServiceState.READY
    assert service_state(later, 1, HEARD) is ServiceState.SHORT
    assert service_state(later, 2, fleet_of(node("edge-1"))) is ServiceState.SHORT, "no gateway"


@pytest.mark.parametrize(
    ("fleet", "found"),
    [
        (lambda: RESTARTED, ServiceState.READY),
        (lambda: with_silence(RESTARTED, 100.0 + LOST_AFTER_S - 0.1), ServiceState.READY),
        (lambda: with_session(RESTARTED, 101.0), ServiceState.READY),
        (lambda: with_report(RESTARTED, 101.0, front_ready=True), ServiceState.READY),
        (lambda: with_report(RESTARTED, 101.0, front_ready=False), ServiceState.SHORT),  # it speaks for itself
        (lambda: with_silence(RESTARTED, 100.0 + LOST_AFTER_S + 0.1), ServiceState.SHORT),  # it had its time
        (lambda: with_silence(with_session(RESTARTED, 101.0), 101.0 + LOST_AFTER_S + 0.1), ServiceState.SHORT),
        (lambda: updates.revoke(RESTARTED, "gw", 2), ServiceState.SHORT),
    ],
)
def test_what_was_ready_stays_so_until_its_gateway_reports_or_is_silent_too_long(
    fleet: Callable[[], Fleet], found: ServiceState
) -> None:
    assert service_state(agreement(has_served=True), 1, fleet()) is found


def test_a_restart_makes_nothing_ready_that_was_not() -> None:
    assert service_state(agreement(has_served=False), 1, RESTARTED) is ServiceState.STARTING
    assert service_state(agreement(has_served=True), 0, RESTARTED) is ServiceState.SHORT
    ready = with_report(RESTARTED, 101.0, front_ready=True)
    assert service_state(agreement(has_served=False), 1, ready) is ServiceState.READY


@pytest.mark.parametrize(
    ("routed", "found"), [(0, ServiceState.STARTING), (1, ServiceState.SHORT), (2, ServiceState.READY)]
)
def test_the_stored_routes_say_whether_a_bid_of_an_older_version_served(routed: int, found: ServiceState) -> None:
    assert service_state(agreement(replicas=2, has_served=None), routed, RESTARTED) is found


def test_a_guest_under_notice_is_stopping() -> None:
    state, _ = hold.step(agreement(has_served=True), OriginNotice(notice(20.0)), Elapsed(2.0))
    assert service_state(state, 1, HEARD) is ServiceState.STOPPING
