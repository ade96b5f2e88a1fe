"""F43: a whole region is lost under load while it serves for another. That one serves again, from a standby or a new
place."""

from collections.abc import Iterator
from contextlib import contextmanager

from harness.cluster.delegation import FAR, HOME, NEAR, gateway_load, in_regions, wait_all_acquainted, wait_delegated
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, policy, workload
from harness.measure.history import CallOutcome
from harness.report import record
from harness.wait import wait_until
from shoal.v1 import operator_pb2

COLD_S = 5.0
"""Beyond the time that the model takes to load."""
WARM_S = 3.0
KEPT = documents(
    policy(
        "kept",
        f"  require: {{residency: [{HOME}, {FAR}], availability: {{standby: warm}}}}\n"
        "  optimize: {cost: 1.0}\n  federation: {delegate: when-better, margin: 30%}\n",
    ),
    workload("kept", "relu", "kept"),
)
"""Home could run it and stands by; the other region asks a third of home's price."""


def is_breached(stack: DevStack, agreed: operator_pb2.AgreementView) -> bool:
    """In the ledger of home."""
    with stack.api() as api:
        entries = api.get("ledger").ledger
    return "breached" in [one.what for one in entries if one.agreement == agreed.agreement]


@contextmanager
def cordon_regions(stack: DevStack, *regions: str) -> Iterator[None]:
    """Nothing new is placed there."""

    def cordon(on: bool) -> None:
        for region in regions:
            for member in stack.info.stack.for_region(region).agents:
                with stack.api(region) as api:
                    api.cordon(member.name, cordoned=on)

    cordon(True)
    try:
        yield
    finally:
        cordon(False)


def trust_in(stack: DevStack, region: str) -> float:
    """As the federation tells home."""
    with stack.api() as api:
        view = api.federation()
    assert view is not None
    return next(one.trust for one in view.members if one.region == region)


def loading_s(stack: DevStack, after: int, name: str) -> float:
    """How long a region took to load it that had just got it, the bytes of its model fetched first."""
    told = [event for event in stack.events(after) if event.workload.name == name]
    granted = next(event.at for event in told if event.code == "GRANTED")
    return next(event.at for event in told if event.code == "RENEWED") - granted


def wait_standby(stack: DevStack, name: str) -> str:
    """The replica at home that stands by for another region, once it is ready and in the routes."""

    def rows_if_standby() -> list[operator_pb2.PlacementView]:
        rows = stack.placements(name)
        ready = all(row.routed and row.assignment.standby for row in rows)
        return rows if ready and len(rows) == 1 and stack.are_nodes_current() else []

    return wait_until(rows_if_standby, WAIT_TIMEOUT_S, f"a standby of {name}", every_s=0.1)[0].assignment.id


def first_answer_at(load: InferenceLoad, since: float) -> float:
    """When the first request that was sent from then on and answered was answered."""
    done = [done for history in load.histories for done in list(history.completed)]
    return min(each.end for each in done if each.outcome is CallOutcome.OK and each.start >= since)


def test_f43_region_lost_under_load(neighbourhood: DevStack) -> None:
    """All of its machines at once: `own`, which home may run now, and `near`, which only a third may, have no standby;
    for `kept` home stands by.

    The first two had to go to the region that is lost: the others took nothing new when they were applied.
    """
    stack = neighbourhood
    before = max((event.sequence for event in stack.events()), default=0)
    with cordon_regions(stack, HOME, NEAR):
        stack.apply(in_regions("near", NEAR, FAR))
        stack.apply(in_regions("own", HOME, FAR))
        lost = {name: wait_delegated(stack, name) for name in ("near", "own")}
    stack.apply(KEPT)
    lost["kept"] = wait_delegated(stack, "kept")
    spare = wait_standby(stack, "kept")
    load_s = max(loading_s(stack, before, name) for name in ("near", "own"))
    assert {view.counterpart for view in lost.values()} == {FAR}
    members = stack.info.stack.for_region(FAR).members
    with (
        gateway_load(stack, "near") as near,
        gateway_load(stack, "own") as own,
        gateway_load(stack, "kept") as kept,
    ):
        killed = {load.workload: load.now() for load in (near, own, kept)}
        for member in members:
            stack.control.break_member(member.name, "kill")
        gone = {load.workload: load.now() for load in (near, own)}
        for load in (near, own):
            load.wait_for(20)
        found = {
            each.workload: first_answer_at(each, gone[each.workload]) - killed[each.workload] for each in (near, own)
        }
        silent_s = kept.longest_gap_s(killed["kept"])
    try:
        for load in (near, own, kept):
            verdict = load.verdict()
            assert verdict.violations == (), str(verdict)
        assert wait_delegated(stack, "near").counterpart == NEAR
        wait_until(
            lambda: all(is_breached(stack, agreed) for agreed in lost.values()), WAIT_TIMEOUT_S, "both to be breached"
        )
        assert kept.verdict().lost_count == 0, str(kept.verdict())
        assert silent_s <= WARM_S
        (now,) = wait_until(
            lambda: [row for row in stack.placements("kept") if not row.assignment.standby],
            WAIT_TIMEOUT_S,
            "one to be active",
        )
        assert (now.assignment.id, now.assignment.standby) == (spare, False), "the very same replica, active now"
        assert all(seconds <= load_s + COLD_S for seconds in found.values()), (found, load_s)
    finally:
        for member in members:
            stack.control.break_member(member.name, "resume")
    stack.delete_workloads("near", "own", "kept")
    wait_all_acquainted(stack)
    wait_until(lambda: trust_in(stack, FAR) < 1.0, WAIT_TIMEOUT_S, "home's report to count")
    record(
        "F43", "P", 1, load_s=round(load_s, 2), by_third_s=round(found["near"], 2),
        by_home_s=round(found["own"], 2), killing_s=round(gone["own"] - killed["own"], 2),
        trust=round(trust_in(stack, FAR), 3), standby_silent_s=round(silent_s, 3),
        standby_sent=kept.verdict().sent, standby_lost=kept.verdict().lost_count,
    )  # fmt: skip
