"""Live moves in a region: what placement, desired sets and routes make of them, step by step, every step checked."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import (
    DIGEST,
    GIB,
    SMALL,
    START,
    CoreRegion,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    receipt,
)
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.effects import UNTAKEN_REST_S
from shoal.coordinator.core.migration.machine import LIMITS
from shoal.coordinator.core.migration.model import AbortedState, Cause, MigrationStage, RollingBackState
from shoal.coordinator.core.placement.model import Move, Slot
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.failures import UNSEEN_MOST_S
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS
from shoal.coordinator.core.workloads.replacements import MovesUnderWay, startable_replicas
from shoal.types.assignment import Served
from shoal.types.codes import Code, Refusal
from shoal.types.device import EnergySource, Node
from shoal.types.migration import UPGRADE_REMEDY, Against, Metric, MigrationRule, PackRef, Tolerance
from shoal.types.tolerance import default
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, Limits, ModelRef, Standby


def settled_region(*names: str) -> CoreRegion:
    region = CoreRegion(*(node(name) for name in names), flops={"a": 2e11})
    region.intents = (intent(),)
    region.run(5)
    assert list(region.replicas().values()) == [("a", False)]
    return region


def weights(region: CoreRegion, at: str) -> dict[str, float]:
    (route,) = region.desired[at].routes
    return {endpoint.node: endpoint.weight for endpoint in route.endpoints}


def stages(region: CoreRegion, migration: str) -> list[MigrationStage]:
    return [entry.stage for entry in region.migrations[migration].stages]


def test_an_operator_moves_a_replica_step_by_step() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b", steps=(0.25, 1.0))
    shares = list[dict[str, float]]()
    for _ in range(40):
        region.step()
        now = weights(region, "b")
        if not shares or shares[-1] != now:
            shares.append(now)
        verified = region.migrations[moving].verdict
        if "b" in now:
            assert verified is not None
            assert verified.passed
    assert shares == [{"a": 1.0}, {"a": 0.75, "b": 0.25}, {"b": 1.0}]
    assert list(region.replicas().values()) == [("b", False)]
    assert stages(region, moving) == [
        MigrationStage.PLANNED, MigrationStage.RESERVED, MigrationStage.STAGING, MigrationStage.VERIFYING,
        MigrationStage.SHIFTING, MigrationStage.SHIFTING, MigrationStage.DRAINING, MigrationStage.DONE,
    ]  # fmt: skip
    (kept,) = region.desired["b"].assignments
    assert kept.verification is None
    before = region.desired
    region.run(30)
    assert region.desired == before, "it stays where it was moved to"


def test_both_replicas_are_told_what_to_ask_and_whom_to_answer() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b")
    region.step()
    (source,), (target,) = region.desired["a"].assignments, region.desired["b"].assignments
    asked = target.verification
    assert asked is not None
    assert (asked.migration, asked.source, asked.source_node, asked.source_address) == (
        moving,
        source.id,
        "a",
        "a:8001",
    )
    assert asked.tolerances
    assert [(each.migration, each.node) for each in source.verifiers] == [(moving, "b")]
    assert source.verification is None


def test_outputs_that_the_policy_does_not_name_are_compared_too() -> None:
    region = settled_region("a", "b")
    boxes = Tolerance("boxes", Metric.MAX_ABS, 0.5)
    region.migrate("b", tolerances=(boxes,), samples=108)
    region.step()
    asked = region.desired["b"].assignments[0].verification
    assert asked is not None
    assert asked.tolerances == (boxes, *default("fp32", "fp32"))
    assert asked.within_s == LIMITS.verify_s + 100 * LIMITS.sample_s


def test_neither_replica_of_a_move_is_scaled_to_zero() -> None:
    region = settled_region("a", "b")
    region.intents = (replace(region.intents[0], to_zero_after_s=Seconds(600.0)),)
    region.run(2)
    moving = region.migrate("b")
    while region.migrations[moving].stage is not MigrationStage.DONE:
        region.step()
        if region.migrations[moving].target is not None and region.migrations[moving].stage not in (
            MigrationStage.PLANNED,
            MigrationStage.DONE,
        ):
            told = [each.to_zero_after_s for one in region.desired.values() for each in one.assignments]
            assert set(told) <= {None}
    region.run(2)
    assert [each.to_zero_after_s for each in region.desired["b"].assignments] == [600.0]


def test_what_does_not_have_to_be_compared_moves_without_a_verdict() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b", against=Against.NONE)
    region.run(20)
    assert region.migrations[moving].stage is MigrationStage.DONE
    assert region.migrations[moving].verdict is None
    assert list(region.replicas().values()) == [("b", False)]


def test_what_has_not_passed_is_told_to_show_it_until_it_drains() -> None:
    region = settled_region("a", "b")
    region.agents["b"].wrong = True
    moving = region.migrate("b")
    region.run(20)
    assert region.migrations[moving].stage is MigrationStage.ABORTED
    told = [each for sent in region.told for each in sent["b"].assignments]
    assert told
    assert all(each.draining or each.verification is not None for each in told), "no moment at which it may serve"


def test_where_it_was_slow_it_may_go_when_the_old_one_is_lost() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b", steps=(0.5, 1.0), hold_s=4.0)
    while region.migrations[moving].stage is not MigrationStage.SHIFTING:
        region.step()
    energy = EnergySource.ESTIMATED
    region.agents["b"].served = (Served("a", 100, 50, Seconds(0.01), Seconds(0.02), Joules(0.0), energy),)
    region.run(40)
    assert region.migrations[moving].stage is MigrationStage.ABORTED
    region.agents["a"].up = False
    region.run(30)
    assert region.fleet.nodes["a"].liveness is Liveness.LOST
    assert weights(region, "b") == {"b": 1.0}


def test_a_wrong_target_is_refused_and_not_tried_again() -> None:
    region = settled_region("a", "b")
    region.agents["b"].wrong = True
    moving = region.migrate("b")
    for _ in range(40):
        region.step()
        assert weights(region, "a") == {"a": 1.0}, "the source is untouched"
    ended = region.migrations[moving]
    assert isinstance(ended.state, AbortedState)
    assert ended.state.refusal.code is Code.VERIFY_FAILED
    assert list(region.replicas().values()) == [("a", False)]
    again = region.migrate("b")
    region.run(5)
    assert stages(region, again) == [MigrationStage.PLANNED]
    plan = region.decision.plan.workloads[0] if region.decision else None
    assert plan is not None
    assert plan.unplaced_moves[again].code is Code.VERIFY_FAILED
    assert moving in plan.unplaced_moves[again].found
    assert plan.refusal is None, "it is not short of anything"


def test_what_has_no_room_waits_and_says_so() -> None:
    region = CoreRegion(node("a"), node("b", device(memory=GIB // 64)))
    region.intents = (intent(),)
    region.run(5)
    moving = region.migrate("b")
    region.run(5)
    assert region.decision is not None
    assert region.decision.plan.workloads[0].unplaced_moves[moving].code is Code.MEMORY_SHORT
    region.run(620, tick=5)
    ended = region.migrations[moving]
    assert isinstance(ended.state, AbortedState)
    assert ended.state.refusal.code is Code.NO_ROOM_FOR_BOTH
    assert "MEMORY_SHORT" in ended.state.refusal.found


def two_and(*others: Node) -> CoreRegion:
    region = CoreRegion(node("a"), node("b"), *others, flops={"a": 2e11, "b": 2e11})
    region.intents = (intent(replicas=2),)
    region.run(6)
    assert sorted(region.replicas().values()) == [("a", False), ("b", False)]
    return region


def test_what_has_no_place_holds_up_no_other() -> None:
    region = two_and(node("c", device(memory=GIB // 64)), node("d"))
    stays, goes = region.migrate("c", at="a"), region.migrate("d", at="b")
    region.run(20)
    assert region.migrations[goes].stage is MigrationStage.DONE
    assert stages(region, stays) == [MigrationStage.PLANNED]
    assert region.decision is not None
    assert region.decision.plan.workloads[0].unplaced_moves[stays].code is Code.MEMORY_SHORT


def test_only_so_many_of_a_workload_go_at_once_and_the_others_wait_as_long_as_it_takes() -> None:
    region = two_and(node("c"), node("d"))
    first, second = region.migrate("c", at="a", hold_s=800.0), region.migrate("d", at="b")
    region.run(700, tick=5)
    assert region.migrations[first].stage is MigrationStage.SHIFTING
    assert stages(region, second) == [MigrationStage.PLANNED]
    region.run(1000, tick=5)
    assert [region.migrations[each].stage for each in (first, second)] == [MigrationStage.DONE, MigrationStage.DONE]
    assert sorted(region.replicas().values()) == [("c", False), ("d", False)]


def test_what_was_wrong_is_forgotten_once_its_device_is_measured_anew() -> None:
    region = settled_region("a", "b")
    region.agents["b"].wrong = True
    moving = region.migrate("b")
    region.run(20)
    assert not region.migrations[moving].cleared
    anew = receipt(region.agents["b"].node, region.agents["b"].node.devices[0], at=START + region.now)
    region.fleet, refusals = updates.merge_receipts(
        region.fleet, "b", (anew,), Elapsed(region.now), Wall(START + region.now)
    )
    assert not refusals
    region.step()
    assert region.migrations[moving].cleared


def test_a_guard_takes_every_request_back_at_once() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b", steps=(0.5, 1.0), hold_s=4.0)
    while region.migrations[moving].stage is not MigrationStage.SHIFTING:
        region.step()
    assert weights(region, "a") == {"a": 0.5, "b": 0.5}
    energy = EnergySource.ESTIMATED
    region.agents["b"].served = (Served("a", 100, 50, Seconds(0.01), Seconds(0.02), Joules(0.0), energy),)
    region.step()
    assert weights(region, "a") == {"a": 1.0}
    region.run(40)
    ended = region.migrations[moving]
    assert isinstance(ended.state, AbortedState)
    assert ended.state.refusal.code is Code.GUARD_TRIPPED
    assert list(region.replicas().values()) == [("a", False)]


def test_a_new_model_takes_over_by_a_move() -> None:
    region = settled_region("a", "b")
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    for _ in range(60):
        region.step()
        assert weights(region, "a"), "never dark"
    (moving,) = region.migrations.values()
    assert moving.cause is Cause.DOCUMENTS
    assert moving.stage is MigrationStage.DONE
    assert (moving.source.model, moving.target.model if moving.target else "") == (DIGEST, SMALL)
    assert len(region.replicas()) == 1


def test_a_busy_node_that_did_not_take_a_new_model_up_is_asked_again_soon() -> None:
    """Nothing was tried there, so that it does not rest for as long as a place that failed."""
    region = settled_region("a")
    region.agents["a"].ignores = lambda each: each.model == SMALL
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    region.run(UNSEEN_MOST_S + 10)
    (first,) = region.migrations.values()
    assert isinstance(first.state, AbortedState)
    assert first.state.refusal.code is Code.NODE_NOT_READY
    region.agents["a"].ignores = lambda _: False
    region.run(first.state.at + UNTAKEN_REST_S - region.now - 2)
    assert len(region.migrations) == 1
    assert first.rule.cooldown_s > UNTAKEN_REST_S + 30
    for _ in range(30):
        region.step()
        assert weights(region, "a"), "never dark"
    (second,) = (each for name, each in region.migrations.items() if name != first.id)
    assert second.stage is MigrationStage.DONE


def test_what_a_coordinator_that_has_just_begun_has_not_heard_is_not_replaced_unseen() -> None:
    """Documents changed as it began: who has the old model has not called yet, and is to compare the new one's."""
    region = settled_region("a", "b")
    (old,) = region.replicas()
    region.restart()
    for agent in region.agents.values():
        agent.heard = False
    region.reconnect("b")
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    region.run(2)
    assert list(region.replicas()) == [old]
    region.reconnect("a")
    region.run(30)
    (moving,) = region.migrations.values()
    assert moving.stage is MigrationStage.DONE
    assert moving.verdict is not None
    assert moving.verdict.passed


def test_a_node_that_never_calls_holds_nobody_up_for_longer_than_until_it_is_lost() -> None:
    region = settled_region("a", "b")
    region.restart()
    for agent in region.agents.values():
        agent.heard = False
    region.reconnect("b")
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    region.run(region.fleet.timing.lost_after_s + 5.0)
    assert region.migrations == {}
    assert region.routed_nodes("b") == ["b"]


def test_a_wrong_new_model_never_serves_and_the_old_one_goes_on() -> None:
    region = settled_region("a", "b")
    for agent in region.agents.values():
        agent.wrong = True
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    for _ in range(120):
        region.step()
        assert weights(region, "a") == {"a": 1.0}
    assert {migration.target.node for migration in region.migrations.values() if migration.target} == {"a", "b"}
    assert all(migration.stage is MigrationStage.ABORTED for migration in region.migrations.values())
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert refusal.code is Code.VERIFY_FAILED
    assert "max_rel" in refusal.found
    assert refusal.remedy == UPGRADE_REMEDY, "as `plan` says before it"


def test_a_refused_upgrade_is_told_by_what_was_compared_though_another_place_lacks_less() -> None:
    """A third node costs a little too much: that is not why the new model does not serve."""
    region = settled_region("a", "b", "c")
    region.costs |= {Slot(name, "cpu0"): UsdPerHour(0.1) for name in "ab"} | {Slot("c", "cpu0"): UsdPerHour(0.21)}
    for agent in region.agents.values():
        agent.wrong = True
    retrained = (ModelRef("small.onnx", SMALL, ""),)
    region.intents = (replace(intent(models=retrained), limits=Limits(cost=UsdPerHour(0.2))),)
    region.run(60)
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert refusal.code is Code.VERIFY_FAILED
    assert "max_rel 0.8, at most 0.001" in refusal.found
    assert "COST_OVER x 1" in refusal.found


def test_a_plan_says_with_what_another_model_is_compared() -> None:
    region = settled_region("a", "b")
    changed = intent(models=(ModelRef("small.onnx", SMALL, ""),))

    def comparison_models(wanted: Intent) -> tuple[str, ...]:
        inputs = inputs_of(
            replace(region.world(), intents=(wanted,)), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now)
        )
        (plan,) = place(inputs).workloads
        return plan.compared_with

    assert comparison_models(changed) == (DIGEST,)
    assert comparison_models(intent()) == ()
    for rule in (replace(changed.migration, against=Against.NONE), replace(changed.migration, advisory=True)):
        assert comparison_models(replace(changed, migration=rule)) == ()


def test_a_rollback_is_not_held_to_the_answers_of_what_it_leaves() -> None:
    region = settled_region("a", "b")
    for agent in region.agents.values():
        agent.wrong = True
    region.intents = (replace(intent(models=(ModelRef("small.onnx", SMALL, ""),)), back=True),)
    for _ in range(60):
        region.step()
        assert weights(region, "a"), "never dark"
    (moving,) = region.migrations.values()
    assert (moving.stage, moving.rule.against) == (MigrationStage.DONE, Against.NONE)
    assert "rollback" in moving.reason
    region.intents = (
        replace(intent(models=(ModelRef("small.onnx", SMALL, ""),), where='node.name == "b"'), back=True),
    )
    region.run(40)
    (other,) = [each for each in region.migrations.values() if each.id != moving.id]
    assert other.rule.against is Against.SOURCE, "the same model elsewhere has to answer the same"


def test_a_rollback_is_held_to_what_its_samples_are_to_answer() -> None:
    region = settled_region("a", "b")
    pack = PackRef("sha256:" + "d" * 64, Bytes(1000), 16, answers=True)
    back = intent(models=(ModelRef("small.onnx", SMALL, ""),), migration=MigrationRule(pack=pack))
    region.intents = (replace(back, back=True),)
    region.run(60)
    (moving,) = region.migrations.values()
    assert (moving.stage, moving.rule.against) == (MigrationStage.DONE, Against.REFERENCE)
    assert moving.verdict is not None
    assert moving.verdict.against is Against.REFERENCE


@pytest.mark.parametrize("answers", [True, False])
def test_what_its_source_leaves_unverified_shows_its_samples_or_is_told(*, answers: bool) -> None:
    region = settled_region("a", "b")
    pack = PackRef("sha256:" + "d" * 64, Bytes(1000), 16, answers=answers)
    moving = region.migrate("b", pack=pack)
    region.agents["b"].load_s = 30.0
    region.run(2)
    region.agents["a"].up = False
    while not region.migrations[moving].is_over:
        region.step()
    assert stages(region, moving)[-1] is MigrationStage.ABORTED
    (left,) = region.desired["b"].assignments
    assert (left.verification.against if left.verification is not None else None) == (
        Against.REFERENCE if answers else None
    )
    assert ("MIGRATION_UNVERIFIED" in {each.code for each in region.events}) is not answers
    region.agents["b"].wrong = True
    region.run(40)
    assert bool(weights(region, "b")) is not answers, "wrong answers are caught where they are known to be wrong"


def test_where_its_standby_is_it_says_so() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 4e11, "b": 2e11})
    region.intents = (intent(standby=Standby.WARM),)
    region.run(10)
    moving = region.migrate("b", at="a")
    region.run(2)
    assert region.decision is not None
    waits = region.decision.plan.workloads[0].unplaced_moves[moving]
    assert (waits.code, waits.found) == (Code.CONFLICT, "its standby is on b/cpu0")


def test_replicas_move_one_after_the_other() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), node("d"))
    region.intents = (intent(replicas=3),)
    region.run(6)
    region.intents = (intent(replicas=3, models=(ModelRef("small.onnx", SMALL, ""),)),)
    for _ in range(200):
        region.step()
        live = [each for each in region.migrations.values() if not each.is_over]
        assert len(live) <= 1
        assert sum(endpoint.weight for endpoint in region.desired["a"].routes[0].endpoints) == 3.0
    assert [each.stage for each in region.migrations.values()] == [MigrationStage.DONE] * 3


def test_documents_that_change_their_mind_take_the_move_back_first() -> None:
    region = settled_region("a", "b", "c")
    region.intents = (intent(where='node.name == "b"'),)
    region.run(2)
    region.intents = (intent(where='node.name == "c"'),)
    region.run(60)
    first, second = region.migrations.values()
    assert isinstance(first.state, AbortedState)
    assert first.state.refusal.code is Code.CONFLICT
    assert second.stage is MigrationStage.DONE
    assert list(region.replicas().values()) == [("c", False)]


def test_a_source_that_dies_before_the_verdict_leaves_its_place_to_the_new_one() -> None:
    region = settled_region("a", "b")
    region.agents["b"].verify_s = 60.0
    moving = region.migrate("b")
    region.step()
    region.agents["a"].up = False
    region.run(20)
    assert region.fleet.nodes["a"].liveness is Liveness.LOST
    assert region.migrations[moving].stage is MigrationStage.ABORTED
    assert weights(region, "b") == {"b": 1.0}


def test_a_target_that_dies_on_the_way_changes_nothing_for_the_source() -> None:
    region = settled_region("a", "b", "c")
    moving = region.migrate("b", steps=(0.5, 1.0), hold_s=60.0)
    while region.migrations[moving].stage is not MigrationStage.SHIFTING:
        region.step()
    region.agents["b"].up = False
    region.run(20)
    assert weights(region, "a") == {"a": 1.0}
    assert region.migrations[moving].stage is MigrationStage.ABORTED


def test_what_a_place_is_blamed_for_goes_with_its_workload() -> None:
    region = settled_region("a", "b")
    region.agents["b"].wrong = True
    moving = region.migrate("b")
    region.run(20)
    assert not region.migrations[moving].cleared
    region.intents = ()
    region.run(5)
    assert region.migrations[moving].cleared


PACK = PackRef("sha256:" + "d" * 64, Bytes(1000), 16, answers=True)
REFERRING = MigrationRule(against=Against.REFERENCE, pack=PACK)


def test_by_a_reference_a_replica_is_judged_that_takes_the_place_of_a_lost_one() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 2e11})
    region.intents = (intent(migration=REFERRING),)
    region.agents["a"].verify_s = 3.0
    region.run(4)
    assert weights(region, "b") == {}, "not before it has shown what it answers"
    region.run(4)
    assert weights(region, "b") == {"a": 1.0}
    region.agents["a"].up = False
    for _ in range(60):
        region.step()
        told = [one for one in region.desired["b"].assignments if region.agents["b"].verified.get(one.id) is None]
        assert all(one.verification is not None and one.verification.pack == PACK.digest for one in told)
    assert weights(region, "b") == {"b": 1.0}
    assert not region.migrations


def test_what_answers_otherwise_than_the_reference_is_tried_elsewhere() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 2e11})
    region.intents = (intent(migration=REFERRING),)
    region.agents["a"].wrong = True
    for _ in range(40):
        region.step()
        assert "a" not in weights(region, "b")
    assert weights(region, "b") == {"b": 1.0}


def test_a_deleted_workload_ends_its_move() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b")
    region.step()
    region.intents = ()
    region.run(5)
    assert region.replicas() == {}
    assert region.migrations[moving].is_over


def test_one_that_stands_by_leaves_a_cordoned_node_when_another_stands_by() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), flops={"a": 4e11, "b": 2e11})
    region.intents = (intent(standby=Standby.WARM),)
    region.run(10)
    (spare,) = [where for where, content in region.desired.items() for one in content.assignments if one.standby]
    region.fleet = region.fleet.with_node(replace(region.fleet.nodes[spare], cordoned=True))
    held = set[int]()
    for _ in range(60):
        region.step()
        held.add(sum(one.standby for content in region.desired.values() for one in content.assignments))
    assert region.desired[spare].assignments == ()
    assert 0 not in held, "make before break"
    assert len(region.replicas()) == 2


def test_a_move_whose_targets_node_falls_silent_ends_with_that() -> None:
    region = settled_region("a", "b")
    moving = region.migrate("b")
    region.step()
    region.agents["b"].heard = False
    region.run(10)
    state = region.migrations[moving].state
    assert isinstance(state, RollingBackState | AbortedState)
    assert (state.refusal.code, state.refusal.found) == (Code.NODE_SUSPECT, "b is silent")
    assert weights(region, "a") == {"a": 1.0}


@pytest.mark.parametrize("to", ["", "b"])
def test_a_move_that_waits_ends_with_the_node_that_it_would_leave(to: str) -> None:
    """The node is removed before any step has seen it lost, and there is a place for what it ran."""
    region = settled_region("a", "b")
    moving = region.migrate(to)
    del region.agents["a"]
    region.fleet = updates.remove_node(region.fleet, "a")
    region.step()
    state = region.migrations[moving].state
    assert isinstance(state, AbortedState)
    assert state.refusal.code is Code.NODE_LOST
    region.run(5)
    assert list(region.replicas().values()) == [("b", False)]


def test_a_new_replica_of_a_move_without_a_source_starts_as_any_other() -> None:
    """No plan has one, because a move that waits is left out without its source."""
    fleet, key = fleet_of(node("a")), intent().key
    plan = place(inputs(fleet, intent())).of(key)
    assert plan is not None
    (target,) = (replace(each, migration="m-1") for each in plan.targets)
    move = Move("m-1", key, "a-gone", Refusal(Code.MOVE_HELD))
    found = startable_replicas(replace(plan, targets=(target,)), (), fleet, MovesUnderWay((move,)))
    assert found == ((target, None),)
