"""An upgrade in waves, driven on a fleet that is a few values."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli import rollout
from shoal.cli.commands.upgrade import RECOUNT_S, RequestTally, drain_progress
from shoal.cli.rollout import (
    AdmitNodes,
    DrainNodes,
    DrainProgress,
    DrainStage,
    FinishedStage,
    InstallHook,
    InstallStage,
    InstallVersion,
    RolloutObservation,
    RolloutOptions,
    RolloutPart,
    ServiceCounts,
    WatchStage,
)
from shoal.types.codes import Code
from shoal.v1 import nouns_pb2, operator_pb2

OLD, NEW = "0.1.0", "0.2.0"
ASKED = RolloutOptions(NEW, share=0.2, hold_s=30.0, within_s=100.0)


def agents(count: int, **more: int) -> dict[str, RolloutPart]:
    """more: replicas, by name."""
    names = [f"n{number:02}" for number in range(count)]
    return {name: RolloutPart(name, OLD, True, replicas=more.get(name, 1)) for name in names}


@dataclass
class Fleet:
    """Empties, installs and serves as told, a second a look. stuck, broken, never: of these nodes a drain leaves
    something, the command fails, the new version does not come back."""

    parts: dict[str, RolloutPart]
    stuck: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    failing_with: str = ""
    """This version fails a tenth of the requests."""
    cordoned: set[str] = field(default_factory=set)
    installed: list[str] = field(default_factory=list)
    at_once: int = 0
    hooks: dict[str, InstallHook] = field(default_factory=dict)
    service: ServiceCounts = field(default_factory=ServiceCounts)
    to: str = NEW
    now: float = 0.0

    def look(self) -> RolloutObservation:
        self.now += 1
        failing = any(part.version == self.failing_with for part in self.parts.values())
        self.service = ServiceCounts(self.service.requests + 10, self.service.failed + failing, {"default/w": 0.01})
        leaving = {name: DrainProgress(0, ("w-1 stays: NO_CANDIDATE",)) for name in self.stuck}
        ready = frozenset(part.name for part in self.parts.values() if part.ready)
        return RolloutObservation(
            tuple(self.parts.values()), ready, self.service, frozenset(), leaving, dict(self.hooks)
        )

    def perform(self, effect: rollout.RolloutEffect) -> None:
        match effect:
            case DrainNodes(names):
                self.cordoned |= set(names)
                for name in set(names) - self.stuck:
                    self.parts[name] = replace(self.parts[name], replicas=0)
            case InstallVersion(names):
                self.installed += names
                self.at_once = max(self.at_once, len(names))
                for name in names:
                    self.hooks[name] = InstallHook(True, "status 1: no such image" if name in self.broken else "")
                    version = self.parts[name].version if name in self.broken | self.never else self.to
                    ready = name not in self.never
                    self.parts[name] = replace(self.parts[name], version=version, ready=ready)
            case AdmitNodes(names):
                self.cordoned -= set(names)

    def run(self, asked: RolloutOptions = ASKED, looks: int = 10_000) -> FinishedStage:
        """As the command does; it dies after so many looks."""
        self.to = asked.version
        course, effects = rollout.begin(self.look(), asked, self.now)
        for _ in range(looks):
            for effect in effects:
                self.perform(effect)
            if isinstance(course.stage, FinishedStage):
                return course.stage
            course, effects = rollout.step(course, self.look(), asked, self.now)
        return FinishedStage(("cut off",))


def test_one_alone_then_a_share_at_a_time_the_emptiest_first() -> None:
    parts = agents(10, n07=0, n03=5)
    planned = rollout.waves(parts.values(), ASKED)
    assert planned[0] == ("n07",)
    assert [len(wave) for wave in planned] == [1, 2, 2, 2, 2, 1]
    assert planned[-1] == ("n03",)
    fleet = Fleet(parts)
    assert fleet.run() == FinishedStage()
    assert fleet.installed == [name for wave in planned for name in wave]
    assert {part.version for part in fleet.parts.values()} == {NEW}
    assert not fleet.cordoned
    assert fleet.now > 7 * ASKED.hold_s, "each wave was watched, and the time before the first"


def test_gateways_go_last_and_never_most_of_them_at_once() -> None:
    gateways = {name: RolloutPart(name, OLD, True, rank=1, drains=False) for name in ("g1", "g2", "g3")}
    planned = rollout.waves({**gateways, **agents(2)}.values(), replace(ASKED, share=1.0))
    assert planned == (("n00",), ("n01",), ("g1",), ("g2",), ("g3",))
    fleet = Fleet({**gateways, **agents(2)})
    assert fleet.run() == FinishedStage()
    assert fleet.installed[2:] == ["g1", "g2", "g3"]


@given(st.integers(1, 30), st.floats(0, 1), st.integers(0, 400))
def test_wherever_it_dies_the_same_command_goes_on(count: int, share: float, looks: int) -> None:
    fleet = Fleet(agents(count))
    asked = replace(ASKED, share=share, hold_s=3.0)
    fleet.run(asked, looks)
    assert fleet.run(asked) == FinishedStage()
    assert {part.version for part in fleet.parts.values()} == {NEW}
    assert not fleet.cordoned
    assert fleet.at_once <= max(1, count // 2)


def test_a_version_that_fails_requests_halts_at_the_first_node() -> None:
    fleet = Fleet(agents(10), failing_with=NEW)
    over = fleet.run()
    assert over.refusal is not None
    assert over.refusal.code is Code.GUARD_TRIPPED
    assert "requests failed" in over.refusal.found
    assert f"--to {OLD}" in over.refusal.remedy
    assert len(fleet.installed) == 1
    back = Fleet(fleet.parts, failing_with=NEW)
    assert back.run(replace(ASKED, version=OLD)) == FinishedStage(), "the way back is the same way"
    assert len(back.installed) == 1


def test_what_failed_before_is_not_held_against_it() -> None:
    fleet = Fleet(agents(4), failing_with=OLD)
    assert fleet.run() == FinishedStage()


def test_a_node_that_cannot_be_emptied_halts_and_is_left_as_it_was() -> None:
    fleet = Fleet(agents(4), stuck=frozenset({"n00"}))
    over = fleet.run()
    assert over.refusal is not None
    assert over.refusal.code is Code.CONFLICT
    assert "n00: w-1 stays: NO_CANDIDATE" in over.refusal.found
    assert "--in-place" in over.refusal.remedy
    assert not fleet.installed
    assert not fleet.cordoned
    assert fleet.run(replace(ASKED, in_place=True)) == FinishedStage()


@pytest.mark.parametrize(
    ("fault", "code", "found"),
    [
        ("broken", Code.CONFLICT, "n00: status 1: no such image"),
        ("never", Code.NODE_NOT_READY, "n00 is not ready"),
    ],
)
def test_a_node_that_does_not_come_back_halts_and_gets_no_work(fault: str, code: Code, found: str) -> None:
    fleet = Fleet(agents(4))
    setattr(fleet, fault, frozenset({"n00"}))
    over = fleet.run()
    assert over.refusal is not None
    assert over.refusal.code is code
    assert over.refusal.found == found
    assert fleet.installed == ["n00"]
    assert fleet.cordoned == {"n00"}


def test_a_node_that_is_not_there_is_left_and_told() -> None:
    parts = agents(3)
    parts["n01"] = replace(parts["n01"], ready=False)
    assert Fleet(parts).run() == FinishedStage(("n01",))


def test_who_comes_back_late_with_the_version_may_work_again_too() -> None:
    late = RolloutPart("late", NEW, False)
    course, effects = rollout.begin(RolloutObservation((RolloutPart("n1", NEW, True), late)), ASKED, 0.0)
    assert effects == (AdmitNodes(("n1",)),)
    back = RolloutObservation((RolloutPart("n1", NEW, True), replace(late, ready=True)), service=ServiceCounts())
    course, effects = rollout.step(course, back, ASKED, ASKED.hold_s)
    assert (course.stage, effects) == (FinishedStage(), (AdmitNodes(("n1", "late")),))


def test_nothing_is_done_where_all_run_it() -> None:
    fleet = Fleet({name: replace(part, version=NEW) for name, part in agents(3).items()}, cordoned={"n01"})
    assert fleet.run() == FinishedStage()
    assert not fleet.installed
    assert not fleet.cordoned


BEFORE = rollout.RolloutBaseline(
    (OLD,), frozenset({"n00", "n01"}), frozenset({"old"}), 0.0, {"default/w": 0.010, "default/idle": 0.0}
)
WATCH = WatchStage(("n00",), 10.0, ServiceCounts(100, 0))
WELL = RolloutObservation((), BEFORE.nodes, ServiceCounts(200, 0, {"default/w": 0.012, "default/idle": 0.5}))


@pytest.mark.parametrize(
    ("seen", "found", "passing"),
    [
        (WELL, "", False),
        (replace(WELL, nodes=frozenset({"n00"})), "not ready any more: n01", True),
        (replace(WELL, wrong=frozenset({"old", "invariant I1: x"})), "shoal doctor: invariant I1: x", True),
        (replace(WELL, service=ServiceCounts(200, 2, {})), "2 of 100 requests failed", False),
        (replace(WELL, service=ServiceCounts(200, 1, {})), "", False),
        (replace(WELL, service=ServiceCounts(110, 9, {})), "", False),
        (replace(WELL, service=ServiceCounts(200, 0, {"default/w": 0.026})), "default/w: p95 26.0 ms", True),
    ],
)
def test_the_guards(seen: RolloutObservation, found: str, passing: bool) -> None:
    refusal, may_pass = rollout.find_regression(BEFORE, WATCH, seen, ASKED)
    assert (refusal.found if refusal is not None else "") == found
    assert may_pass == passing


def test_what_passes_is_given_time_and_then_halts() -> None:
    course = rollout.RolloutState(WATCH, BEFORE)
    late = replace(WELL, nodes=frozenset({"n00"}), parts=(RolloutPart("n00", NEW, True), RolloutPart("n01", OLD, True)))
    assert rollout.step(course, late, ASKED, 10.0) == (course, ())
    after, _ = rollout.step(course, late, ASKED, 10.0 + rollout.GRACE_S)
    assert isinstance(after.stage, FinishedStage)
    assert after.stage.refusal is not None
    after, effects = rollout.step(course, replace(late, nodes=BEFORE.nodes), ASKED, 11.0)
    assert after.stage == DrainStage(("n01",), 111.0, ServiceCounts(200, 0, WELL.service.p95_s if WELL.service else {}))
    assert effects == (DrainNodes(("n01",)),)


def test_what_was_stopped_with_its_node_has_to_serve_again_and_is_judged_from_then() -> None:
    """--in-place: requests failed while it was stopped; that much was asked for."""
    asked = replace(ASKED, in_place=True)
    course = rollout.RolloutState(DrainStage(("n00",), 100.0, ServiceCounts(100, 0)), BEFORE)
    full = (RolloutPart("n00", OLD, True, replicas=1), RolloutPart("n01", NEW, True))
    stuck = RolloutObservation(
        full, BEFORE.nodes, ServiceCounts(100, 0), leaving={"n00": DrainProgress(0, ("w-1 stays: NO_ROOM_FOR_BOTH",))}
    )
    course, effects = rollout.step(course, stuck, asked, 50.0)
    assert effects == (InstallVersion(("n00",)),)

    def rollout_state(requests: int, failed: int, loading: int = 0) -> RolloutObservation:
        parts = (RolloutPart("n00", NEW, True, replicas=1, loading=loading), full[1])
        return RolloutObservation(
            parts, BEFORE.nodes, ServiceCounts(requests, failed), hooks={"n00": InstallHook(is_done=True)}
        )

    course, effects = rollout.step(course, rollout_state(140, 40, loading=1), asked, 60.0)
    assert (isinstance(course.stage, InstallStage), effects) == (True, ())
    late, _ = rollout.step(course, rollout_state(140, 40, loading=1), asked, 150.0)
    assert isinstance(late.stage, FinishedStage)
    assert late.stage.refusal is not None
    assert late.stage.refusal.found == "n00 has 1 replicas that do not serve"
    course, _ = rollout.step(course, rollout_state(150, 50), asked, 61.0)
    course, effects = rollout.step(course, rollout_state(160, 55), asked, 61.0 + rollout.SETTLE_S)
    assert (course.stage, effects) == (
        WatchStage(("n00",), 66.0 + asked.hold_s, ServiceCounts(160, 55)),
        (AdmitNodes(("n00",)),),
    )
    well, _ = rollout.step(course, rollout_state(260, 55), asked, 66.0 + asked.hold_s)
    assert well.stage == FinishedStage()
    ill, _ = rollout.step(course, rollout_state(260, 65), asked, 66.0 + asked.hold_s)
    assert isinstance(ill.stage, FinishedStage)
    assert ill.stage.refusal is not None
    assert ill.stage.refusal.code is Code.GUARD_TRIPPED


def test_while_no_coordinator_answers_nothing_is_judged() -> None:
    course = rollout.RolloutState(WATCH, BEFORE)
    blind = RolloutObservation((RolloutPart("c1:1", NEW, True, drains=False),))
    assert rollout.step(course, blind, ASKED, 50.0) == (course, ())
    after, _ = rollout.step(course, blind, ASKED, 10.0 + ASKED.within_s)
    assert isinstance(after.stage, FinishedStage)
    assert after.stage.refusal is not None
    assert after.stage.refusal.code is Code.COORDINATOR_UNREACHABLE


def test_while_no_coordinator_answers_nobody_counts_as_empty() -> None:
    course = rollout.RolloutState(DrainStage(("n00",), 100.0, ServiceCounts()), BEFORE)
    assert rollout.step(course, RolloutObservation(()), ASKED, 50.0) == (course, ())
    after, effects = rollout.step(course, RolloutObservation(()), ASKED, 100.0)
    assert isinstance(after.stage, FinishedStage)
    assert effects == ()


def test_coordinators_go_one_at_a_time_the_leader_last_and_are_not_drained() -> None:
    parts = tuple(RolloutPart(f"c{n}:1", OLD, True, rank=int(n == 1), drains=False) for n in (1, 2, 3))
    one = replace(ASKED, share=0.0)
    assert rollout.waves(parts, one) == (("c2:1",), ("c3:1",), ("c1:1",))
    course = rollout.RolloutState(WatchStage((), 0.0, ServiceCounts()))
    after, effects = rollout.step(course, RolloutObservation(parts, service=ServiceCounts()), one, 1.0)
    assert isinstance(after.stage, InstallStage)
    assert effects == (InstallVersion(("c2:1",)),)


def test_what_clients_got_wrong_is_no_failure_of_the_upgrade() -> None:
    def tallied_views(requests: int, refused: int, client_faults: int) -> list[operator_pb2.WorkloadView]:
        key = nouns_pb2.WorkloadKey(tenant="default", name="w")
        counts = nouns_pb2.Ingress(
            workload=key, origin="n00", requests=requests, refused=refused, client_faults=client_faults
        )
        return [operator_pb2.WorkloadView(workload=key, ingress=[counts])]

    tally, epochs = RequestTally(), {"n00": 1}
    tally.add(tallied_views(100, 0, 0), (), epochs, 0.0)
    tally.add(tallied_views(100, 0, 0), (), epochs, RECOUNT_S)
    assert tally.add(tallied_views(200, 60, 60), (), epochs, RECOUNT_S + 1) == ServiceCounts(100, 0, {})
    assert tally.add(tallied_views(300, 90, 80), (), epochs, RECOUNT_S + 2) == ServiceCounts(200, 10, {}), (
        "ten had no replica"
    )


def workload_views(requests: int, lost: int = 0, **others: int) -> list[operator_pb2.WorkloadView]:
    """At n00; others: requests, by node."""
    key = nouns_pb2.WorkloadKey(tenant="default", name="w")
    ingress = [nouns_pb2.Ingress(workload=key, origin="n00", requests=requests, lost=lost)]
    ingress += [nouns_pb2.Ingress(workload=key, origin=name, requests=count) for name, count in others.items()]
    return [operator_pb2.WorkloadView(workload=key, ingress=ingress)]


def test_counts_that_begin_anew_or_come_late_are_no_requests() -> None:
    tally, epochs = RequestTally(), {"n00": 1, "n01": 1}
    assert tally.add(workload_views(5000, 40), (), epochs, 0.0) == ServiceCounts(0, 0, {})
    assert tally.add(workload_views(5010, 40), (), epochs, RECOUNT_S).requests == 10
    assert tally.add(workload_views(5020, 41), (), epochs, RECOUNT_S + 1) == ServiceCounts(20, 1, {})
    again = {"n00": 2, "n01": 1}
    assert tally.add(workload_views(2000, 1), (), again, 10.0) == ServiceCounts(20, 1, {}), "a front began anew"
    assert tally.add([], (), {"n00": 3, "n01": 2}, 20.0) == ServiceCounts(20, 1, {}), "another coordinator"
    assert tally.add(workload_views(9000, 50), (), {"n00": 3, "n01": 2}, 20.5) == ServiceCounts(20, 1, {}), (
        "which hears of it late"
    )
    assert tally.add(workload_views(9010, 50), (), {"n00": 3, "n01": 2}, 20.0 + RECOUNT_S) == ServiceCounts(30, 1, {})


def planned_migration(assignment: str, code: str, found: str = "") -> operator_pb2.MigrationView:
    return operator_pb2.MigrationView(
        stage="planned",
        source=operator_pb2.MigrationPlace(assignment=assignment),
        reason=nouns_pb2.Refusal(code=code, found=found),
    )


def test_a_move_without_a_place_is_what_stays_and_one_that_waits_its_turn_is_under_way() -> None:
    going = operator_pb2.MigrationView(stage="shifting", source=operator_pb2.MigrationPlace(assignment="w-1"))
    turn, none = (
        planned_migration("w-2", Code.WAITING_FOR_TURN),
        planned_migration("w-3", Code.NO_ROOM_FOR_BOTH, "edge-npu is full"),
    )
    held = operator_pb2.DrainRefusal(assignment="w-4", reason=nouns_pb2.Refusal(code=Code.CONFLICT, found="starting"))
    standby = operator_pb2.DrainRefusal(assignment="w-5", reason=nouns_pb2.Refusal(code=Code.WAITING_FOR_REPLACEMENT))
    assert drain_progress([going, turn], [standby]) == DrainProgress(2, ())
    assert drain_progress([none], [standby, held]) == DrainProgress(
        0, ("w-3 stays: NO_ROOM_FOR_BOTH edge-npu is full", "w-4 stays: CONFLICT starting")
    )


def test_what_cannot_leave_at_once_is_given_time() -> None:
    parts = (RolloutPart("n00", OLD, True, replicas=1), RolloutPart("n01", OLD, True))
    course = rollout.RolloutState(DrainStage(("n00",), 100.0, ServiceCounts()), BEFORE)
    stuck = RolloutObservation(
        parts, service=ServiceCounts(), leaving={"n00": DrainProgress(0, ("w-1 stays: NO_ROOM_FOR_BOTH",))}
    )
    assert rollout.step(course, stuck, ASKED, rollout.GRACE_S - 0.1) == (course, ())
    after, effects = rollout.step(course, stuck, ASKED, rollout.GRACE_S)
    assert isinstance(after.stage, FinishedStage)
    assert effects == (AdmitNodes(("n00",)),)
    moving = replace(stuck, leaving={"n00": DrainProgress(1, stuck.leaving["n00"].stuck)})
    assert rollout.step(course, moving, ASKED, 99.0) == (course, ()), "something goes yet"


def test_while_some_node_calls_again_the_others_count() -> None:
    tally = RequestTally()
    for look in range(20):
        counts = workload_views(5000 + 10 * look, n01=70 + look, us=900 + look)
        tally.add(counts, (), {"n00": 1, "n01": 1 + look}, RECOUNT_S * look)
    busy = tally.add(workload_views(5190, n01=89, us=919), (), {"n00": 1, "n01": 20}, RECOUNT_S * 19)
    assert busy.requests == 190, "but for those of who calls, and of another region by whichever gateway"
    quiet = tally.add(workload_views(5190, n01=90, us=920), (), {"n00": 1, "n01": 20}, RECOUNT_S * 20)
    assert quiet.requests == 190 + 1 + 1
