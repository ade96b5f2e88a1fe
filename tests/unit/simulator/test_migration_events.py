"""Which moves begin by themselves: a region that is to be at rest waits for those that are due, and for no others."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import DIGEST, START
from shoal.coordinator.core.migration.budget import HoldReason, MoveHold
from shoal.coordinator.core.migration.model import (
    AbortedState,
    Cause,
    Migration,
    MoveProposal,
    PlannedState,
    ReplicaPlace,
)
from shoal.coordinator.core.placement.model import Aim, PlacementPlan, WorkloadPlan
from shoal.simulator.parts.migration_events import pending_moves
from shoal.types.codes import Code, Refusal
from shoal.types.migration import MigrationRule
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("shop", "text")
OLD = ReplicaPlace("a-1", "edge-1", "cpu0", DIGEST, "fp32")
NEW = ReplicaPlace("a-2", "edge-2", "cpu0", DIGEST, "fp32")
NOW, WALL = Elapsed(100.0), Wall(START + 100.0)
WITHIN_S = 5.5


def plan(refusal: Refusal | None) -> PlacementPlan:
    lacking = WorkloadPlan(KEY, "policy", 1, 0, (), (), refusal, (), "", None, ())
    return PlacementPlan((lacking,), "hash")


REFUSED = plan(Refusal(Code.MOVE_BLOCKED, "m-1 ended there"))


def failed_migration(code: Code = Code.MOVE_CANCELLED, *, at: float = 95.0) -> Migration:
    rule = MigrationRule(cooldown_s=Seconds(10.0))
    planned = PlannedState(Elapsed(0.0), Elapsed(0.0))
    begun = Migration("m-1", KEY, Cause.DOCUMENTS, "", OLD, Aim("edge-2"), rule, planned, target=NEW)
    return replace(begun, state=AbortedState(Refusal(code, ""), Elapsed(at)))


def due(migration: Migration, decided: PlacementPlan = REFUSED) -> bool:
    return bool(list(pending_moves((), decided, (migration,), NOW, WALL, WITHIN_S)))


@pytest.mark.parametrize(("hold", "in_s", "comes"), [
    (HoldReason.SETTLING, 5.0, True),
    (HoldReason.COOLDOWN, 5.0, True),
    (HoldReason.COOLDOWN, 50.0, False),
    (HoldReason.GAIN, None, False),
])  # fmt: skip
def test_what_is_held_back_comes_when_its_time_does(hold: HoldReason, in_s: float | None, *, comes: bool) -> None:
    proposal = MoveProposal(KEY, OLD, Aim("edge-2"), Cause.LATENCY, "11% better")
    until = Wall(WALL + in_s) if in_s is not None else Wall(0.0)
    held = MoveHold(proposal, hold, "since 5s", until)
    assert bool(list(pending_moves((held,), None, (), NOW, WALL, WITHIN_S))) is comes


def test_what_documents_ask_for_still_is_tried_again_when_the_place_may_be() -> None:
    assert due(failed_migration())
    assert not due(failed_migration(at=99.0)), "later than that"
    assert not due(failed_migration(at=80.0)), "it could have been, and was not"
    assert not due(failed_migration(), plan(None)), "nothing lacks a place"


def test_so_is_what_something_else_speaks_for() -> None:
    """It fades, for the best place is not looked at as long as a move there has just failed."""
    proposal = MoveProposal(KEY, OLD, Aim("edge-3"), Cause.LATENCY, "10% better", is_fading=True)
    held = MoveHold(proposal, HoldReason.SETTLING, "just below its threshold again")
    assert not list(pending_moves((held,), plan(None), (), NOW, WALL, WITHIN_S))
    assert list(pending_moves((held,), plan(None), (failed_migration(),), NOW, WALL, WITHIN_S))


def test_what_stays_blocked_is_not_waited_for() -> None:
    assert not due(failed_migration(Code.VERIFY_FAILED)), "until its device is measured anew"
    assert not due(replace(failed_migration(), dark_since=WALL)), "until a longer gap is allowed"
