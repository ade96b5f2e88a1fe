"""Which moves begin by themselves: a region that is to be at rest waits for those that are due, and for no others."""

from dataclasses import replace

import pytest
from unit.coordinator.core.region import DIGEST, START

from shoal.coordinator.core.migration.budget import Held, Hold
from shoal.coordinator.core.migration.model import Aborted, Cause, Migration, Place, Planned, Proposal
from shoal.coordinator.core.placement.model import Aim, Plan, WorkloadPlan
from shoal.simulator.moves import to_come
from shoal.types.codes import Code, Refusal
from shoal.types.migration import MigrationRule
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("shop", "text")
OLD = Place("a-1", "edge-1", "cpu0", DIGEST, "fp32")
NEW = Place("a-2", "edge-2", "cpu0", DIGEST, "fp32")
NOW, WALL = Elapsed(100.0), Wall(START + 100.0)
WITHIN_S = 5.5


def plan(refusal: Refusal | None) -> Plan:
    lacking = WorkloadPlan(KEY, "policy", 1, 0, (), (), refusal, (), "", None, ())
    return Plan((lacking,), "hash")


REFUSED = plan(Refusal(Code.MOVE_BLOCKED, "m-1 ended there"))


def failed(code: Code = Code.MOVE_CANCELLED, *, at: float = 95.0) -> Migration:
    rule = MigrationRule(cooldown_s=Seconds(10.0))
    planned = Planned(Elapsed(0.0), Elapsed(0.0))
    begun = Migration("m-1", KEY, Cause.DOCUMENTS, "", OLD, Aim("edge-2"), rule, planned, target=NEW)
    return replace(begun, state=Aborted(Refusal(code, ""), Elapsed(at)))


def due(migration: Migration, decided: Plan = REFUSED) -> bool:
    return bool(list(to_come((), decided, (migration,), NOW, WALL, WITHIN_S)))


@pytest.mark.parametrize(("hold", "in_s", "comes"), [
    (Hold.SETTLING, 5.0, True),
    (Hold.COOLDOWN, 5.0, True),
    (Hold.COOLDOWN, 50.0, False),
    (Hold.GAIN, None, False),
])  # fmt: skip
def test_what_is_held_back_comes_when_its_time_does(hold: Hold, in_s: float | None, *, comes: bool) -> None:
    proposal = Proposal(KEY, OLD, Aim("edge-2"), Cause.LATENCY, "11% better")
    until = Wall(WALL + in_s) if in_s is not None else Wall(0.0)
    held = Held(proposal, hold, "since 5s", until)
    assert bool(list(to_come((held,), None, (), NOW, WALL, WITHIN_S))) is comes


def test_what_documents_ask_for_still_is_tried_again_when_the_place_may_be() -> None:
    assert due(failed())
    assert not due(failed(at=99.0)), "later than that"
    assert not due(failed(at=80.0)), "it could have been, and was not"
    assert not due(failed(), plan(None)), "nothing lacks a place"


def test_so_is_what_something_else_speaks_for() -> None:
    """It fades, for the best place is not looked at as long as a move there has just failed."""
    proposal = Proposal(KEY, OLD, Aim("edge-3"), Cause.LATENCY, "10% better", fading=True)
    held = Held(proposal, Hold.SETTLING, "just below its threshold again")
    assert not list(to_come((held,), plan(None), (), NOW, WALL, WITHIN_S))
    assert list(to_come((held,), plan(None), (failed(),), NOW, WALL, WITHIN_S))


def test_what_stays_blocked_is_not_waited_for() -> None:
    assert not due(failed(Code.VERIFY_FAILED)), "until its device is measured anew"
    assert not due(replace(failed(), dark_since=WALL)), "until a longer gap is allowed"
