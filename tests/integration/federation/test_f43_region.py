"""F43: a whole region that works for another, lost under load."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.history import Outcome
from harness.report import record
from harness.stack import PATIENCE_S, Load, Stack
from harness.trades import FAR, HOME, NEAR, delegated, in_regions, through_gateway, wait_whole
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = pytest.mark.alone

COLD_S = 5.0
"""Beyond the time that the model takes to load."""


def breached(stack: Stack, agreed: operator_pb2.AgreementView) -> bool:
    """In the ledger of home."""
    with stack.api() as api:
        entries = api.get("ledger").ledger
    return "breached" in [one.what for one in entries if one.agreement == agreed.agreement]


@contextmanager
def cordoned(stack: Stack, *regions: str) -> Iterator[None]:
    """Nothing new is placed there."""

    def cordon(on: bool) -> None:
        for region in regions:
            for member in stack.info.stack.of(region).agents:
                with stack.api(region) as api:
                    api.cordon(member.name, cordoned=on)

    cordon(True)
    try:
        yield
    finally:
        cordon(False)


def trust_in(stack: Stack, region: str) -> float:
    """As the federation tells home."""
    with stack.api() as api:
        view = api.federation()
    assert view is not None
    return next(one.trust for one in view.members if one.region == region)


def loading_s(stack: Stack, after: int, name: str) -> float:
    """How long a region took to load it that had just got it, the bytes of its model fetched first."""
    told = [event for event in stack.events(after) if event.workload.name == name]
    granted = next(event.at for event in told if event.code == "GRANTED")
    return next(event.at for event in told if event.code == "RENEWED") - granted


def first_answered(load: Load, since: float) -> float:
    """When the first request that was sent from then on and answered was answered."""
    done = [done for history in load.histories for done in list(history.done)]
    return min(each.end for each in done if each.outcome is Outcome.OK and each.start >= since)


def test_f43_region_lost_under_load(neighbourhood: Stack) -> None:
    """All of its machines at once, and no standby: one workload that home may run now, and one that only a third may.

    Both had to go to the region that is lost: the others took nothing new when they were applied.
    """
    stack = neighbourhood
    before = max((event.sequence for event in stack.events()), default=0)
    with cordoned(stack, HOME, NEAR):
        stack.apply(in_regions("near", NEAR, FAR))
        stack.apply(in_regions("own", HOME, FAR))
        lost = {name: delegated(stack, name) for name in ("near", "own")}
    load_s = max(loading_s(stack, before, name) for name in lost)
    assert {view.counterpart for view in lost.values()} == {FAR}
    members = stack.info.stack.of(FAR).members
    with through_gateway(stack, "near") as near, through_gateway(stack, "own") as own:
        killed = {load.workload: load.now() for load in (near, own)}
        for member in members:
            stack.control.hurt(member.name, "kill")
        gone = {load.workload: load.now() for load in (near, own)}
        for load in (near, own):
            load.wait_for(20)
        found = {
            each.workload: first_answered(each, gone[each.workload]) - killed[each.workload] for each in (near, own)
        }
    try:
        for load in (near, own):
            verdict = load.verdict()
            assert verdict.violations == (), str(verdict)
        assert delegated(stack, "near").counterpart == NEAR
        wait_until(lambda: all(breached(stack, agreed) for agreed in lost.values()), PATIENCE_S, "both to be breached")
        assert all(seconds <= load_s + COLD_S for seconds in found.values()), (found, load_s)
    finally:
        for member in members:
            stack.control.hurt(member.name, "resume")
    stack.forget("near", "own")
    wait_whole(stack)
    wait_until(lambda: trust_in(stack, FAR) < 1.0, PATIENCE_S, "home's report to count")
    record(
        "F43", "P", 1, standby=False, load_s=round(load_s, 2), by_third_s=round(found["near"], 2),
        by_home_s=round(found["own"], 2), killing_s=round(gone["own"] - killed["own"], 2),
        trust=round(trust_in(stack, FAR), 3),
    )  # fmt: skip
