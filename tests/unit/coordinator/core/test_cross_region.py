"""Live moves of a whole workload to another region and home, as the region's steps make them."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import DIGEST, SMALL, START, CoreRegion, counts_of, intent, node, profile
from harness.builders.offers import offer
from shoal.agent.dataplane.metering import RequestMeter
from shoal.coordinator.core.migration.advance import advance, migration_effects, trigger_view
from shoal.coordinator.core.migration.budget import REGION_MOST, HoldReason
from shoal.coordinator.core.migration.cross_region import cross_region_states, queue_refusal, region_exclusions
from shoal.coordinator.core.migration.machine import cancel
from shoal.coordinator.core.migration.model import (
    P95,
    AbortedState,
    Cause,
    DoneState,
    DrainingState,
    Migration,
    PlannedState,
    PreparingState,
    RequestStats,
    RollingBackState,
    ShiftingState,
)
from shoal.coordinator.core.migration.outcomes import fetched_bytes
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.workloads.cross_region_state import (
    CrossRegionState,
    MovedForGood,
    MoveOutFailed,
    ReturnCooldown,
    has_given_up_agreement,
)
from shoal.coordinator.core.workloads.model import DelegatedWorkload, ModelFetch
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import AgreementCounts, Phase, Served
from shoal.types.codes import Code
from shoal.types.device import EnergySource, Role
from shoal.types.migration import MigrationWindow
from shoal.types.route import Endpoint, EndpointState
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, UsdPerHour, Wall
from shoal.types.workload import ModelRef, Standby, WorkloadKey

KEY = WorkloadKey("shop", "ocr")
AWAY = DelegatedWorkload(
    "g-1", "us-east", (GatewayRef("gx", "far:7001"), GatewayRef("gy", "far:7002")), is_ready=True, model=DIGEST,
    precision="fp32",
)  # fmt: skip


@pytest.fixture
def region() -> CoreRegion:
    region = CoreRegion(node("gw", role=Role.GATEWAY), node("a"), node("b"), flops={"gw": 1e9, "a": 4e11, "b": 2e11})
    region.intents = (intent(),)
    region.run(10)
    return region


def the_one(region: CoreRegion) -> Migration:
    (found,) = region.migrations.values()
    return found


def cross_region_state(region: CoreRegion) -> CrossRegionState | None:
    return cross_region_states(region.migrations.values(), Elapsed(region.now)).get(KEY)


def endpoints(region: CoreRegion, at: str) -> tuple[Endpoint, ...]:
    return region.desired[at].routes[0].endpoints


def shares(region: CoreRegion, at: str) -> tuple[float, float]:
    """Of the requests at that node: what stays here, and what leaves."""
    weights = [(each.node in ("gx", "gy", "gw"), each.weight) for each in endpoints(region, at)]
    total = sum(weight for _, weight in weights)
    return tuple(sum(weight for out, weight in weights if out is side) / total for side in (False, True))  # type: ignore[return-value]


def until(region: CoreRegion, kind: type[object], steps: int = 60) -> None:
    for _ in range(steps):
        if isinstance(the_one(region).state, kind):
            return
        region.step()
    raise AssertionError(f"never {kind.__name__}: {the_one(region)}")


def outward(region: CoreRegion) -> Migration:
    region.delegated = {KEY: replace(AWAY, is_ready=False)}
    region.run(3)
    return the_one(region)


def test_out_it_is_compared_shifted_step_by_step_and_home_drains(region: CoreRegion) -> None:
    begun = outward(region)
    assert (begun.cause, begun.source.node, begun.target and begun.target.region) == (Cause.COST, "a", "us-east")
    assert [each.node for each in endpoints(region, "gw")] == ["a"], "the other region is not ready"
    region.delegated = {KEY: AWAY}
    region.step()
    assert shares(region, "gw") == (1.0, 0.0), "listed, so that it can be asked, and taking nothing"
    asked = region.desired["a"].assignments[0].verification
    assert asked is not None
    assert (asked.agreement, asked.beside, asked.source_node) == ("g-1", True, "gw")
    seen = list[tuple[float, float]]()
    for _ in range(40):
        region.step()
        if region.desired["a"].assignments:
            assert region.agents["a"].reports(region.now)[0].phase in (Phase.READY, Phase.DRAINING)
        assert shares(region, "gw") == shares(region, "b"), "as at every front"
        if shares(region, "gw") not in seen:
            seen.append(shares(region, "gw"))
    assert seen == [(1.0, 0.0), (0.75, 0.25), (0.0, 1.0)]
    assert (the_one(region).stage, region.replicas()) == ("done", {})
    assert the_one(region).verdict is not None
    assert cross_region_state(region) is None


def test_what_answers_otherwise_there_takes_no_request_and_is_given_up(region: CoreRegion) -> None:
    region.agents["a"].wrong = True
    outward(region)
    region.delegated = {KEY: AWAY}
    for _ in range(10):
        region.step()
        assert shares(region, "gw") == (1.0, 0.0)
    assert isinstance(the_one(region).state, RollingBackState)
    assert cross_region_state(region) == MoveOutFailed("us-east", "g-1", has_wrong_answers=True, is_over=False)
    region.delegated = {}
    region.run(2)
    state = the_one(region).state
    assert isinstance(state, AbortedState)
    assert state.refusal.code is Code.VERIFY_FAILED
    assert region.routed_nodes("b") == ["a"]
    region.delegated = {KEY: replace(AWAY, agreement="g-2", is_ready=False)}
    region.run(3)
    assert len(region.migrations) == 1, "not again before its cooldown is over"


@pytest.mark.parametrize("state", [PreparingState, ShiftingState])
def test_an_agreement_that_breaks_on_the_way_leaves_all_at_home(region: CoreRegion, state: type[object]) -> None:
    outward(region)
    if state is ShiftingState:
        region.delegated = {KEY: AWAY}
    until(region, state)
    region.delegated = {}
    region.run(3)
    assert isinstance(the_one(region).state, AbortedState)
    assert region.routed_nodes("gw") == ["a"]


@pytest.mark.parametrize("state", [PreparingState, ShiftingState, DrainingState])
def test_f05_a_coordinator_that_begins_anew_goes_on_where_it_was(region: CoreRegion, state: type[object]) -> None:
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, state)
    region.restart()
    region.step()
    for name in region.agents:
        region.reconnect(name)
    region.run(20)
    assert the_one(region).stage == "done"
    assert shares(region, "b") == (0.0, 1.0)


def at_the_other(region: CoreRegion) -> None:
    outward(region)
    region.delegated = {KEY: AWAY}
    region.run(25)
    assert the_one(region).stage == "done"
    region.migrations = {}


@pytest.mark.parametrize("wanted", [True, False])
def test_home_again_by_itself_or_by_notice(region: CoreRegion, wanted: bool) -> None:
    at_the_other(region)
    region.delegated = {KEY: replace(AWAY, is_wanted=wanted, return_reason="home has a place for it again")}
    seen = list[tuple[float, float]]()
    for _ in range(60):
        region.step()
        if shares(region, "gw") not in seen:
            seen.append(shares(region, "gw"))
        if (way := cross_region_state(region)) is not None and has_given_up_agreement(way):
            break
    assert seen[:2] == [(0.0, 1.0), (0.25, 0.75)]
    assert seen[-1] == (1.0, 0.0)
    assert the_one(region).cause is (Cause.FAILBACK if wanted else Cause.NOTICE)
    shown = the_one(region).verdict
    assert shown is not None
    assert shown.passed
    region.delegated = {}
    region.run(2)
    assert the_one(region).stage == "done"
    assert len(region.replicas()) == 1


def test_home_that_answers_otherwise_leaves_it_where_it_is(region: CoreRegion) -> None:
    at_the_other(region)
    for agent in region.agents.values():
        agent.wrong = True
    region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}
    for _ in range(60):
        region.step()
        assert shares(region, "gw") == (0.0, 1.0)
    state = the_one(region).state
    assert isinstance(state, AbortedState)
    assert state.refusal.code is Code.VERIFY_FAILED
    assert region.replicas() == {}


def test_a_region_that_is_only_silent_is_not_left(region: CoreRegion) -> None:
    at_the_other(region)
    region.delegated = {KEY: replace(AWAY, is_wanted=False)}
    region.run(10)
    assert region.migrations == {}


def test_what_stands_by_at_home_takes_over_when_the_agreement_breaks_as_home_drains(region: CoreRegion) -> None:
    region.intents = (intent(standby=Standby.WARM),)
    region.run(10)
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, DrainingState)
    region.step()
    assert [each.state for each in endpoints(region, "gw") if each.node in region.agents] == [EndpointState.STANDBY]
    region.delegated = {KEY: replace(AWAY, is_wanted=False)}
    for _ in range(10):
        region.step()
        assert [each for each in endpoints(region, "gw") if each.node in region.agents], "whatever it is now"
    assert shares(region, "gw")[0] > 0.0
    assert len(region.migrations) == 1, "nothing is compared with it"


def test_an_agreement_that_breaks_on_the_way_home_is_waited_for_no_longer(region: CoreRegion) -> None:
    at_the_other(region)
    region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}
    run_until_move(region)
    region.delegated = {KEY: replace(AWAY, is_wanted=False)}
    region.run(8)
    assert isinstance(the_one(region).state, AbortedState)
    assert shares(region, "gw")[0] > 0.0, "though that region is in the routes yet"


def test_what_stood_by_at_home_is_compared_while_it_is_ready_and_takes_over(region: CoreRegion) -> None:
    region.intents = (intent(standby=Standby.WARM),)
    region.run(10)
    at_the_other(region)
    stood_by = [name for name, agent in region.agents.items() if agent.content.assignments]
    assert len(stood_by) == 1
    region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}
    run_until_move(region)
    until(region, DrainingState)
    ended = the_one(region)
    assert ended.target is not None
    assert ended.target.node in stood_by
    assert ended.verdict is not None


# -- an agreement that ends, and one that follows it -------------------------------------------------------------------


def fall(region: CoreRegion, *names: str) -> None:
    """These nodes are lost."""
    for name in names:
        region.agents[name].heard = False
    region.run(30)


def cancel_move(region: CoreRegion) -> None:
    one = the_one(region)
    region.migrations[one.id] = cancel(one, "ops", Elapsed(region.now), Wall(START + region.now))[0]


@pytest.mark.parametrize("code", [Code.MOVE_CANCELLED, Code.VERIFY_FAILED])
def test_after_a_move_was_given_up_another_agreement_serves_when_home_has_nobody(
    region: CoreRegion, code: Code
) -> None:
    region.agents["a"].wrong = code is Code.VERIFY_FAILED
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, RollingBackState if code is Code.VERIFY_FAILED else ShiftingState)
    if code is Code.MOVE_CANCELLED:
        cancel_move(region)
    region.delegated = {}
    region.run(2)
    state = the_one(region).state
    assert isinstance(state, AbortedState)
    assert state.refusal.code is code
    fall(region, "a", "b")
    region.delegated = {KEY: replace(AWAY, agreement="g-2", region="us-west")}
    region.step()
    assert shares(region, "gw") == (0.0, 1.0)


def test_a_delegate_that_is_ready_serves_when_home_is_lost_while_it_is_compared(region: CoreRegion) -> None:
    outward(region)
    region.delegated = {KEY: AWAY}
    region.step()
    assert isinstance(the_one(region).state, PreparingState)
    fall(region, "a", "b")
    assert isinstance(the_one(region).state, AbortedState)
    assert shares(region, "gw") == (0.0, 1.0)


def test_what_answered_otherwise_serves_nobody_even_when_home_is_lost(region: CoreRegion) -> None:
    region.agents["a"].wrong = True
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, RollingBackState)
    fall(region, "a", "b")
    assert endpoints(region, "gw") == ()


def test_home_that_is_lost_again_while_the_other_region_is_left_hands_it_all_back(region: CoreRegion) -> None:
    at_the_other(region)
    region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}
    run_until_move(region)
    until(region, DrainingState)
    for agent in (region.agents["a"], region.agents["b"]):
        agent.heard = False
    region.run(6)
    assert isinstance(the_one(region).state, DrainingState)
    assert shares(region, "gw") == (0.0, 1.0)


@pytest.mark.parametrize("asked", ["", "documents"])
def test_what_came_home_rests_there(region: CoreRegion, asked: str) -> None:
    at_the_other(region)
    region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}
    run_until_move(region)
    one = the_one(region)
    region.migrations[one.id] = replace(one, asked=asked)
    until(region, DrainingState)
    region.delegated = {}
    region.run(1)
    assert cross_region_state(region) == ReturnCooldown("us-east", "g-1", asked)
    region.run(the_one(region).rule.cooldown_s, tick=10.0)
    assert (cross_region_state(region) is not None) == bool(asked)


def test_while_it_crosses_nothing_else_moves_it(region: CoreRegion) -> None:
    def movable() -> int:
        now, wall = Elapsed(region.now), Wall(START + region.now)
        return len(trigger_view(region.world(), region.migrations, now, wall, only=KEY).replicas)

    assert movable() == 1
    outward(region)
    assert movable() == 0


def run_until_move(region: CoreRegion) -> None:
    for _ in range(60):
        if region.migrations:
            return
        region.step()
    raise AssertionError("no move began")


@pytest.mark.parametrize("state", [PreparingState, ShiftingState])
def test_nothing_goes_on_towards_an_agreement_that_is_ending(region: CoreRegion, state: type[object]) -> None:
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, state)
    region.delegated = {KEY: replace(AWAY, is_wanted=False, return_reason="notice was given (AGREEMENT_ENDED)")}
    region.step()
    found = the_one(region).state
    assert isinstance(found, RollingBackState)
    assert found.refusal.code is Code.AGREEMENT_ENDED
    for _ in range(10):
        assert shares(region, "gw") == (1.0, 0.0)
        region.step()


def test_the_next_agreement_inherits_no_share(region: CoreRegion) -> None:
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, ShiftingState)
    assert shares(region, "gw") == (0.75, 0.25)
    region.delegated = {KEY: replace(AWAY, agreement="g-2")}
    region.step()
    assert (way := cross_region_state(region)) is not None
    assert way.agreement == "g-1"
    for _ in range(10):
        assert shares(region, "gw")[1] == 0.0, "not compared yet"
        region.step()


def test_a_delegate_that_is_ready_before_its_move_began_is_compared_first(region: CoreRegion) -> None:
    region.delegated = {KEY: AWAY}
    region.restart()
    region.step()
    assert shares(region, "gw") == (1.0, 0.0)
    for name in region.agents:
        region.reconnect(name)
    region.step()
    assert isinstance(the_one(region).state, PreparingState)
    assert shares(region, "gw") == (1.0, 0.0)


# -- what nobody asked for waits its turn ------------------------------------------------------------------------------


def set_migration_rule(region: CoreRegion, **rule: Any) -> None:
    """Its policy says so of moves."""
    (one,) = region.intents
    region.intents = (replace(one, migration=replace(one.migration, **rule)),)


def request_return(region: CoreRegion) -> None:
    region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}


def opening(minutes: int) -> MigrationWindow:
    """So long after the start."""
    day, minute = divmod(int(START // 60) + minutes, 1440)
    return MigrationWindow(((day + 3) % 7,), minute, minute + 30, "UTC")  # the first of January 1970 was a Thursday


def test_home_again_waits_for_its_window(region: CoreRegion) -> None:
    set_migration_rule(region, windows=(opening(minutes=2),))
    at_the_other(region)
    request_return(region)
    region.run(60)
    assert region.migrations == {}
    held = advance(region.world(), {}, Elapsed(region.now), Wall(START + region.now)).move_holds
    assert held is not None
    (one,) = held
    assert (one.hold, one.proposal.aim.where, one.until) == (
        HoldReason.WINDOW,
        "eu-west",
        (int(START // 60) + 2) * 60.0,
    )
    region.run(60)
    assert the_one(region).cause is Cause.FAILBACK


def test_a_notice_waits_for_no_window(region: CoreRegion) -> None:
    at_the_other(region)
    set_migration_rule(region, windows=(opening(minutes=60),))
    request_return(region)
    region.run(5)
    assert region.migrations == {}
    region.delegated = {KEY: replace(AWAY, is_wanted=False, return_reason="notice was given")}
    region.run(5)
    assert the_one(region).cause is Cause.NOTICE


def test_home_again_waits_until_its_workload_has_rested(region: CoreRegion) -> None:
    outward(region)
    region.delegated = {KEY: AWAY}
    region.run(25)
    (out,) = region.migrations.values()
    assert isinstance(out.state, DoneState)
    request_return(region)
    region.run(out.state.at + out.rule.cooldown_s - region.now - 1.0, tick=1.0)
    assert len(region.migrations) == 1
    region.run(3.0)
    assert [each.cause for each in region.migrations.values()] == [Cause.COST, Cause.FAILBACK]


def test_so_many_cross_at_once_and_the_next_says_what_it_waits_for(region: CoreRegion) -> None:
    keys = [WorkloadKey("shop", f"w{number}") for number in range(REGION_MOST + 1)]
    region.intents = tuple(intent(key.name) for key in keys)
    region.run(10)
    region.delegated = {key: replace(AWAY, agreement=f"g-{key.name}", is_ready=False) for key in keys}
    region.run(30)
    states = [type(each.state) for each in region.migrations.values()]
    assert (states.count(PreparingState), states.count(PlannedState)) == (REGION_MOST, 1)
    (last,) = (each for each in region.migrations.values() if isinstance(each.state, PlannedState))
    waits = queue_refusal(last, region.migrations.values())
    assert waits is not None
    assert waits.code is Code.WAITING_FOR_TURN
    region.delegated = {key: replace(each, is_ready=True) for key, each in region.delegated.items()}
    region.run(60)
    assert {each.stage for each in region.migrations.values()} == {"done"}


def test_what_moves_inside_the_region_is_not_moved_to_another_at_once(region: CoreRegion) -> None:
    inside = region.migrate("b")
    region.step()
    region.delegated = {KEY: AWAY}
    while not region.migrations[inside].is_over:
        assert shares(region, "gw") == (1.0, 0.0)
        assert len(region.migrations) == 1
        region.step()
    assert region.migrations[inside].stage == "done"
    region.run(2)
    (out,) = (each for each in region.migrations.values() if each.is_cross_region)
    assert not out.is_over
    assert out.source.node == "b", "where it is now"


def test_while_it_crosses_changed_documents_replace_nothing(region: CoreRegion) -> None:
    outward(region)
    region.intents = (replace(region.intents[0], models=(ModelRef("small", SMALL, ""),)),)
    region.run(20)
    assert list(region.migrations) == [the_one(region).id]
    assert len(region.replicas()) == 1


def test_a_device_at_home_that_answered_otherwise_is_tried_no_more(region: CoreRegion) -> None:
    at_the_other(region)
    region.agents["a"].wrong = True
    set_migration_rule(region, cooldown_s=30.0)
    request_return(region)
    region.run(30)
    wrong = the_one(region)
    assert isinstance(wrong.state, AbortedState)
    assert (wrong.state.refusal.code, wrong.target and wrong.target.node) == (Code.VERIFY_FAILED, "a")
    region.run(60)
    first, second = region.migrations.values()
    assert (second.target and second.target.node) == "b", "the other device"
    assert second.stage == "draining"
    assert first.id != second.id


def test_a_device_at_home_that_answered_otherwise_may_when_it_is_measured_anew(region: CoreRegion) -> None:
    at_the_other(region)
    region.agents["a"].wrong = True
    request_return(region)
    region.run(30)

    def blocked_nodes() -> list[str]:
        now = Elapsed(region.now)
        return [trial.node for _, trial in migration_effects(region.world(), region.migrations, now).blocked]

    assert blocked_nodes() == ["a"]
    state = region.fleet.nodes["a"]
    again = {name: replace(each, measured_at=Wall(START + 1)) for name, each in state.receipts.items()}
    region.fleet = replace(region.fleet, nodes={**region.fleet.nodes, "a": replace(state, receipts=again)})
    assert blocked_nodes() == []
    region.step()
    assert the_one(region).cleared


def test_a_device_that_answered_otherwise_serves_when_nobody_else_does(region: CoreRegion) -> None:
    at_the_other(region)
    for agent in region.agents.values():
        agent.wrong = True
    request_return(region)
    region.run(30)
    assert isinstance(the_one(region).state, AbortedState)
    region.delegated = {}
    region.run(10)
    assert shares(region, "gw")[0] == 1.0


def test_a_region_that_answered_otherwise_is_barred_until_its_model_is_cleared(region: CoreRegion) -> None:
    region.agents["a"].wrong = True
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, RollingBackState)
    region.delegated = {}
    region.run(5)
    one = the_one(region)
    assert region_exclusions([one]) == {KEY: {("us-east", DIGEST)}}
    assert region_exclusions([replace(one, cleared=True)]) == {}
    region.intents = ()
    region.run(1)
    assert region_exclusions(region.migrations.values()) == {}, "nothing is held against anybody for what is not there"


def test_what_an_operator_moved_stays_there_however_short_its_drain(region: CoreRegion) -> None:
    outward(region)
    one = the_one(region)
    region.migrations[one.id] = replace(one, cause=Cause.OPERATOR)
    region.delegated = {KEY: AWAY}
    region.run(25)
    assert the_one(region).stage == "done"
    assert cross_region_state(region) == MovedForGood("us-east", "g-1")
    assert shares(region, "gw") == (0.0, 1.0)


# -- the guard: what is counted anew judges nobody ---------------------------------------------------------------------

AT_HOME_S = 0.01


@dataclass
class FrontCounters:
    """Of home's gateway: what it counts under the agreement, there and at home."""

    region: CoreRegion
    counts: dict[str, list[float]] = field(default_factory=dict)

    def send_requests(self, there_s: float, requests: int = 30) -> None:
        """So many requests to each of the two, then one step."""
        for agreement, seconds in (("g-1", there_s), ("g-1/home", AT_HOME_S)):
            self.counts.setdefault(agreement, []).extend([seconds] * requests)
        self.region.agents["gw"].agreement_counts = tuple(
            AgreementCounts(name, "us-east", len(each), 0, Seconds(sorted(each)[-1]), counts_of(each))
            for name, each in self.counts.items()
        )
        self.region.step()

    def anew(self) -> None:
        """It is another process now, which was ready between two beats."""
        self.counts = {}

    def until_over(self, there_s: float, steps: int = 200) -> Migration:
        for _ in range(steps):
            if the_one(self.region).stage in ("done", "aborted", "rolling_back", "draining"):
                return the_one(self.region)
            self.send_requests(there_s)
        raise AssertionError(f"never over: {the_one(self.region)}")


@pytest.fixture
def shifting(region: CoreRegion) -> FrontCounters:
    """At the first step of a move to the other region."""
    outward(region)
    region.delegated = {KEY: AWAY}
    until(region, ShiftingState)
    return FrontCounters(region)


def hurt(front: FrontCounters, victim: str) -> None:
    """Begins anew, and the first requests after that are slow at the other region alone, whose way opens."""
    region = front.region
    if victim == "coordinator":
        region.restart()
        for name in region.agents:
            region.reconnect(name)
    elif victim == "gateway":
        region.agents["gw"].front_ready = False
        front.send_requests(0.01)
        region.agents["gw"].front_ready = True
        front.anew()
    else:
        front.anew()
    for _ in range(3):
        front.send_requests(0.5)


@pytest.mark.parametrize("victim", ["gateway", "front", "coordinator"])
def test_what_is_read_around_a_restart_judges_nobody(shifting: FrontCounters, victim: str) -> None:
    shifting.send_requests(0.01)
    hurt(shifting, victim)
    assert the_one(shifting.region).stage == "shifting"
    ended = shifting.until_over(0.01)
    assert ended.stage == "draining", ended
    assert [reading.passed for reading in ended.readings] == [True, True]
    assert max(reading.target.p95_s for reading in ended.readings) < 0.02, "the slow ones are in no reading"
    assert [each.note for each in ended.stages if "anew" in each.note] == [
        "25%, held anew: who counts the requests began anew"
    ]


@pytest.mark.parametrize("victim", ["", "gateway", "front", "coordinator"])
def test_a_region_that_is_slow_trips_the_guard_whatever_began_anew(shifting: FrontCounters, victim: str) -> None:
    shifting.send_requests(0.01)
    if victim:
        hurt(shifting, victim)
    ended = shifting.until_over(0.05)
    assert isinstance(ended.state, RollingBackState), ended
    assert ended.state.refusal.code is Code.GUARD_TRIPPED
    assert ended.readings[-1].target.p95_s == pytest.approx(0.05, rel=0.05)


def test_a_region_that_grows_slow_trips_the_guard_of_the_last_step_too(shifting: FrontCounters) -> None:
    """Then home has no requests any more to be compared with: what it was like before counts."""
    region = shifting.region
    while shares(region, "gw") != (0.0, 1.0):
        shifting.send_requests(0.01, 100)
    for _ in range(20):
        shifting.counts.setdefault("g-1", []).extend([0.2] * 20)
        region.agents["gw"].agreement_counts = tuple(
            AgreementCounts(name, "us-east", len(each), 0, Seconds(0.2), counts_of(each))
            for name, each in shifting.counts.items()
        )
        region.step()
    ended = the_one(region)
    assert isinstance(ended.state, RollingBackState | AbortedState), ended
    assert ended.state.refusal.code is Code.GUARD_TRIPPED
    assert ended.readings[-1].source.p95_s == pytest.approx(AT_HOME_S, rel=0.05)


def report_front_counts(region: CoreRegion, there: RequestMeter, home: RequestMeter) -> None:
    """What a real front has counted is what home's gateway tells; then one step."""
    sides = (("g-1", there), ("g-1/home", home))
    told = (replace(each, agreement=name) for name, meter in sides for each in meter.agreement_counts())
    region.agents["gw"].agreement_counts = tuple(told)
    region.step()


@pytest.mark.parametrize(
    ("failed", "trips"),
    [
        ({}, False),
        ({Code.INVALID_ARGUMENT: 30}, False),
        ({Code.INVALID_ARGUMENT: 3000, Code.REPLICA_UNREACHABLE: 6}, True),
        ({Code.INTERNAL: 6}, True),
        ({Code.DEADLINE_EXCEEDED: 15}, True),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, dict) else "",
)
def test_what_clients_got_wrong_neither_trips_a_guard_between_regions_nor_hides_a_failure(
    shifting: FrontCounters, failed: dict[Code, int], *, trips: bool
) -> None:
    """At each step 30 answers of each side beside; the clients of home meet their deadlines."""
    there, home = RequestMeter(), RequestMeter()
    for _ in range(60):
        if not isinstance(the_one(shifting.region).state, ShiftingState):
            break
        for meter in (there, home):
            for _ in range(30):
                meter.record_traffic("", "us-east", Seconds(AT_HOME_S))
        for code, count in failed.items():
            for _ in range(count):
                there.record_traffic("", "us-east", code)
        report_front_counts(shifting.region, there, home)
    state = the_one(shifting.region).state
    assert isinstance(state, RollingBackState if trips else DrainingState), state
    assert all(reading.is_conclusive for reading in the_one(shifting.region).readings)


def test_deadlines_that_neither_region_meets_are_their_clients_affair(shifting: FrontCounters) -> None:
    there, home = RequestMeter(), RequestMeter()
    for _ in range(60):
        if not isinstance(the_one(shifting.region).state, ShiftingState):
            break
        for meter in (there, home):
            for _ in range(30):
                meter.record_traffic("", "us-east", Seconds(AT_HOME_S))
                meter.record_traffic("", "us-east", Code.DEADLINE_EXCEEDED)
        report_front_counts(shifting.region, there, home)
    assert isinstance(the_one(shifting.region).state, DrainingState)


def test_a_step_between_regions_that_saw_mistakes_alone_was_not_judged(shifting: FrontCounters) -> None:
    there, home = RequestMeter(), RequestMeter()
    for _ in range(60):
        if not isinstance(the_one(shifting.region).state, ShiftingState):
            break
        home.record_traffic("", "us-east", Seconds(AT_HOME_S))
        there.record_traffic("", "us-east", Code.INVALID_ARGUMENT)
        report_front_counts(shifting.region, there, home)
    readings = the_one(shifting.region).readings
    assert readings
    assert not any(reading.is_conclusive for reading in readings)


def test_while_no_gateway_counts_nothing_is_judged_and_the_deadline_ends_it(shifting: FrontCounters) -> None:
    region = shifting.region
    began = region.now
    region.agents["gw"].front_ready = False
    while isinstance(the_one(region).state, ShiftingState):
        region.step()
        assert region.now - began < 60.0
    state = the_one(region).state
    assert isinstance(state, RollingBackState)
    assert state.refusal.code is Code.MOVE_TIMEOUT
    assert not the_one(region).readings


def test_two_slow_ones_of_a_few_say_nothing_of_the_p95() -> None:
    few = RequestStats(20, latencies=counts_of([0.01] * 18 + [0.5] * 2))
    many = RequestStats(2000, latencies=counts_of([0.01] * 1800 + [0.5] * 200))
    assert few.p95_lower_bound_s == pytest.approx(0.01, rel=0.05)
    assert many.p95_lower_bound_s == pytest.approx(0.5, rel=0.05)
    assert replace(many, latencies=()).p95_lower_bound_s == 0.0, "where nobody counted"


@given(st.lists(st.floats(1e-5, 1e3), max_size=60), st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=60))
def test_law_what_came_since_is_of_that_alone(before: list[float], after: list[float]) -> None:
    first = RequestStats(len(before), latencies=counts_of(before))
    both = RequestStats(len(before) + len(after), latencies=counts_of([*before, *after]))
    since = both.since(first)
    assert since.requests == len(after)
    assert since.p95_s == pytest.approx(sorted(after)[int(P95 * (len(after) - 1))], rel=0.05)
    assert first.since(both) == first, "it began anew"


# -- what it is begun for, and what came -------------------------------------------------------------------------------

BID = offer("us-east", 0.01, 0.5, model=DIGEST, joules=Joules(0.2), cached=False, load_s=Seconds(4.0))


def set_counted_latencies(region: CoreRegion, agreement: str, answered: list[float]) -> None:
    """By home's gateway, in seconds."""
    traffic = AgreementCounts(agreement, "us-east", len(answered), 0, Seconds(answered[-1]), counts_of(answered))
    state = region.fleet.nodes["gw"]
    known = replace(state, agreement_counts={**state.agreement_counts, agreement: traffic})
    region.fleet = replace(region.fleet, nodes={**region.fleet.nodes, "gw": known})


def test_out_it_says_what_is_expected_and_what_came(region: CoreRegion) -> None:
    region.costs = {Slot("a", "cpu0"): UsdPerHour(1.0), Slot("b", "cpu0"): UsdPerHour(1.0)}
    region.intents = (replace(region.intents[0], weights={"cost": 1.0}),)
    away = replace(AWAY, bid=BID, rtt_s=Seconds(0.005))
    region.delegated = {KEY: replace(away, is_ready=False)}
    region.run(3)
    expected = the_one(region).expected
    assert expected is not None
    assert (expected.before.cost, expected.after.cost, expected.gain) == (1.0, 0.5, 0.5)
    assert expected.after.latency_p95_s == pytest.approx(0.015)
    assert expected.after.joules == 0.2
    assert math.isfinite(expected.before.latency_p95_s)
    assert expected.fetch_bytes == profile().size_bytes
    assert expected.seconds > 4.0 + 2 * 2.0
    region.fetched = (
        ModelFetch("g-1", DIGEST, Wall(START + region.now), Bytes(7)),
        ModelFetch("g-1", DIGEST, Wall(START), Bytes(100)),
        ModelFetch("a", DIGEST, Wall(START + region.now), Bytes(100)),
    )
    region.delegated = {KEY: away}
    set_counted_latencies(region, "g-1", [0.02] * 100)
    region.run(25)
    assert the_one(region).stage == "done"
    set_counted_latencies(region, "g-1", [0.02] * 100 + [0.03] * 200)
    region.delegated = {KEY: replace(away, joules=0.4)}
    region.run(40)
    brought = the_one(region).came
    assert brought is not None
    assert (brought.requests, brought.errors, brought.fetch_bytes) == (200, 0, 7)
    assert brought.after.latency_p95_s == pytest.approx(0.03, rel=0.025), "of what came since, and the way"
    assert (brought.after.joules, brought.gain) == (0.4, 0.5)
    assert "MIGRATION_BROUGHT" in {event.code for event in region.events}


def test_home_it_says_what_is_expected_and_what_came(region: CoreRegion) -> None:
    region.costs = {Slot("a", "cpu0"): UsdPerHour(1.0), Slot("b", "cpu0"): UsdPerHour(1.0)}
    region.intents = (replace(region.intents[0], weights={"cost": 1.0}),)
    at_the_other(region)
    away = replace(AWAY, bid=replace(BID, cost=UsdPerHour(4.0)), rtt_s=Seconds(0.005))
    region.delegated = {KEY: replace(away, return_reason="home is better")}
    run_until_move(region)
    until(region, DrainingState)
    one = the_one(region)
    assert one.expected is not None
    assert one.target is not None
    assert (one.expected.before.cost, one.expected.after.cost, one.expected.gain) == (4.0, 1.0, 0.75)
    assert one.expected.fetch_bytes == profile().size_bytes
    set_counted_latencies(region, "g-1/home", [0.5] * 60)
    _serves(region, one.target.node, [0.1] * 100)
    region.step()
    region.delegated = {}
    region.run(1)
    assert the_one(region).stage == "done"
    _serves(region, one.target.node, [0.1] * 100 + [0.02] * 300)
    region.run(40)
    brought = the_one(region).came
    assert brought is not None
    assert (brought.requests, brought.fetch_bytes) == (300, 0)
    assert brought.after.latency_p95_s == pytest.approx(0.02, rel=0.025), "of what came since"
    assert brought.after.joules == pytest.approx(0.5)
    assert brought.gain == pytest.approx(0.75)


def _serves(region: CoreRegion, name: str, answered: list[float]) -> None:
    count, agent = len(answered), region.agents[name]
    agent.served = (Served("", count, 0, Seconds(0.01), Seconds(0.02), Joules(0.5 * count), EnergySource.ESTIMATED),)
    agent.latencies = counts_of(answered)


def test_what_was_not_counted_from_the_beginning_is_not_known(region: CoreRegion) -> None:
    begun = outward(region)
    world = replace(region.world(), fetches_counted_since=Wall(begun.stages[0].at + 1))
    assert fetched_bytes(world, begun) is None
    assert fetched_bytes(region.world(), begun) == 0


Fault = Literal["breaks", "notice", "silent", "restart", "source", "gateway", "nothing"]
faults = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(get_args(Fault))), min_size=1, max_size=5
)  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(faults, st.booleans())
@example([(1, "restart"), (1, "restart"), (10, "breaks")], False)  # the agreement is lost while home drains
@example([(1, "notice"), (1, "source")], False)  # home is lost while the move is taken back
@example([(1, "source"), (1, "gateway"), (9, "restart")], False)  # the other region has it all at once
def test_law_whatever_happens_on_the_way_someone_serves_and_it_ends(
    story: list[tuple[int, Fault]], back: bool
) -> None:  # fmt: skip
    """The region's own invariants are looked at after each step. The source that is hurt comes back; an agreement that
    broke does not."""
    region = CoreRegion(node("gw", role=Role.GATEWAY), node("a"), node("b"), flops={"gw": 1e9, "a": 4e11, "b": 2e11})
    region.intents = (intent(),)
    region.run(10)
    if back:
        at_the_other(region)
        region.delegated = {KEY: replace(AWAY, return_reason="home has a place for it again")}
    else:
        outward(region)
        region.delegated = {KEY: AWAY}
    hurt = set[str]()

    def step() -> None:
        region.step()
        moves = [each for each in region.migrations.values() if not each.is_over]
        assert len(moves) <= 1
        away = region.delegated.get(KEY)
        way = cross_region_state(region)
        if away is not None and way is not None and has_given_up_agreement(way) and away.is_wanted:
            region.delegated = {}  # as the trade does, sooner or later
        if "gateway" not in hurt and KEY in region.delegated:
            assert any(each.weight > 0 for each in endpoints(region, "gw"))

    for pause, fault in story:
        for _ in range(pause):
            step()
        match fault:
            case "breaks":
                region.delegated = {}
                hurt.add(fault)
            case "notice" if KEY in region.delegated:
                region.delegated = {
                    KEY: replace(region.delegated[KEY], is_wanted=False, return_reason="notice was given")
                }
            case "silent" if KEY in region.delegated:
                region.delegated = {KEY: replace(region.delegated[KEY], is_wanted=False)}
            case "restart":
                region.restart()
                for name in region.agents:
                    region.reconnect(name)
            case "source" | "gateway":
                agent = region.agents["a" if fault == "source" else "gw"]
                agent.heard = not agent.heard
                hurt.add(fault)
    for agent in region.agents.values():
        agent.heard = True
    for _ in range(200):
        region.step(1.0)
        if all(each.is_over for each in region.migrations.values()):
            break
        if KEY in region.delegated and (way := cross_region_state(region)) is not None and has_given_up_agreement(way):
            region.delegated = {}
    assert [each.id for each in region.migrations.values() if not each.is_over] == []
    region.run(10, tick=1.0)
    assert [each for each in endpoints(region, "b") if each.weight > 0]
