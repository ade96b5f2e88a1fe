"""Moves on a device that cannot hold both replicas: they wait, or the old one goes first, where the policy says so."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.builders.coordinator_core import DIGEST, MIB, SMALL, CoreRegion, device, intent, node
from shoal.coordinator.core.migration.model import AbortedState, Cause, Migration, MigrationStage
from shoal.types.assignment import Phase
from shoal.types.codes import Code
from shoal.types.migration import Against, MigrationRule, PackRef
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import ModelRef

PACK = PackRef("sha256:" + "d" * 64, Bytes(1000), 16, answers=True)
GAP = MigrationRule(against=Against.REFERENCE, pack=PACK, allow_gap_s=Seconds(20.0))
OLD, NEW = (ModelRef("small.onnx", SMALL, ""),), (ModelRef("model.onnx", DIGEST, ""),)


def full(rule: MigrationRule = GAP) -> CoreRegion:
    """One device, with room for the old model or for the new one."""
    region = CoreRegion(node("a", device(memory=92 * MIB)))
    region.intents = (intent(models=OLD, migration=rule),)
    region.run(8)
    assert serves(region) == [SMALL]
    return region


def serves(region: CoreRegion) -> list[str]:
    """Models of the replicas that requests are sent to."""
    (route,) = region.desired["a"].routes
    listed = {endpoint.assignment for endpoint in route.endpoints}
    return [one.model for one in region.desired["a"].assignments if one.id in listed]


def loaded_models(region: CoreRegion) -> list[str]:
    """What takes memory of the device."""
    return [one.model for one in region.desired["a"].assignments if not one.staged]


def until(region: CoreRegion, reached: Callable[[Migration], bool]) -> Migration:
    for _ in range(200):
        region.step()
        if any(reached(each) for each in moves(region)):
            return moves(region)[0]
    raise AssertionError([each.stages for each in moves(region)])


def upgrade(region: CoreRegion, rule: MigrationRule = GAP) -> None:
    region.intents = (intent(models=NEW, migration=rule, revision=2),)


def moves(region: CoreRegion) -> list[Migration]:
    return list(region.migrations.values())


def test_without_leave_what_has_no_room_waits_and_nobody_is_in_the_dark() -> None:
    rule = replace(GAP, allow_gap_s=Seconds(0.0))
    region = full(rule)
    upgrade(region, rule)
    for _ in range(60):
        region.step()
        assert serves(region) == [SMALL]
    assert not moves(region)
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert "MEMORY_SHORT" in str(refusal)


def test_with_leave_the_old_one_goes_first_and_the_gap_is_told() -> None:
    region = full()
    upgrade(region)
    dark = 0
    for _ in range(120):
        region.step()
        assert len(loaded_models(region)) <= 1 or moves(region)[0].stage in (
            MigrationStage.DRAINING,
            MigrationStage.DONE,
        )
        dark += not serves(region)
    (one,) = moves(region)
    assert (one.cause, one.stage) == (Cause.DOCUMENTS, MigrationStage.DONE)
    assert [entry.stage for entry in one.stages] == [
        MigrationStage.PLANNED,
        MigrationStage.RESERVED,
        MigrationStage.CLEARING,
        MigrationStage.STAGING,
        MigrationStage.VERIFYING,
        MigrationStage.DRAINING,
        MigrationStage.DONE,
    ]
    assert one.verdict is not None
    assert one.verdict.passed
    assert (one.verdict.against, serves(region)) == (Against.REFERENCE, [DIGEST])
    assert one.gap_s is not None
    assert one.gap_s == pytest.approx(0.5 * dark, abs=1.0)
    assert f"{one.gap_s:.1f} s" in one.stages[-2].note
    assert len(region.desired["a"].assignments) == 1


@pytest.mark.parametrize(
    ("wrong", "load_s", "code"), [(True, 2.0, Code.VERIFY_FAILED), (False, 60.0, Code.MOVE_TIMEOUT)]
)
def test_what_does_not_come_in_time_or_answers_otherwise_gives_the_old_one_its_place_back(
    *, wrong: bool, load_s: float, code: Code
) -> None:
    region = full()
    agent = region.agents["a"]
    upgrade(region)
    until(region, lambda each: each.stage is MigrationStage.CLEARING)
    agent.wrong, agent.load_s = wrong, load_s
    until(region, lambda each: each.stage in (MigrationStage.ROLLING_BACK, MigrationStage.RETURNING))
    agent.wrong, agent.load_s = False, 2.0
    region.run(15)
    (one,) = moves(region)
    assert isinstance(one.state, AbortedState)
    assert one.state.refusal.code is code
    assert MigrationStage.RETURNING in [entry.stage for entry in one.stages]
    assert serves(region) == [SMALL]
    assert one.gap_s is not None
    assert one.gap_s <= GAP.allow_gap_s, "the old one's way back is within what was promised"
    before = region.desired
    region.run(30)
    assert region.desired == before, "it is not tried again at once"


def test_an_operator_takes_it_back_while_nobody_serves() -> None:
    from shoal.coordinator.core.migration import machine
    from shoal.types.units import Elapsed, Wall

    region = full()
    upgrade(region)
    one = until(region, lambda each: each.stage is MigrationStage.STAGING and each.dark_since is not None)
    region.migrations[one.id] = machine.cancel(one, "ops", Elapsed(region.now), Wall(region.now))[0]
    region.run(15)
    assert serves(region) == [SMALL]


def test_where_the_old_one_is_lost_meanwhile_the_new_one_comes_up() -> None:
    region = full()
    upgrade(region)
    until(region, lambda each: each.stage is MigrationStage.CLEARING)
    assert all(each.phase is Phase.STAGED for each in region.agents["a"].reports(region.now))
    region.run(20)
    assert serves(region) == [DIGEST]


def test_a_gap_that_came_to_nothing_is_not_tried_again_by_itself() -> None:
    rule = replace(GAP, cooldown_s=Seconds(30.0))
    region = full(rule)
    upgrade(region, rule)
    region.agents["a"].load_s = 60.0
    until(region, lambda each: each.stage is MigrationStage.RETURNING)
    region.agents["a"].load_s = 2.0
    region.run(120)
    (one,) = moves(region)
    assert (one.stage, serves(region)) == (MigrationStage.ABORTED, [SMALL])
    region.agents["a"].stuck = {one.source.assignment}
    region.step()
    region.agents["a"].stuck = set()
    region.run(20)
    assert len(moves(region)) == 1, "that the old one is silent or stumbles for a moment is no reason"


@pytest.mark.parametrize("longer", [True, False])
def test_a_longer_gap_or_an_operator_lets_it_try_again(*, longer: bool) -> None:
    region = full()
    upgrade(region)
    region.agents["a"].load_s = 60.0
    one = until(region, lambda each: each.stage is MigrationStage.RETURNING)
    region.agents["a"].load_s = 2.0
    region.run(20)
    if longer:
        upgrade(region, replace(GAP, allow_gap_s=Seconds(30.0)))
    else:
        region.migrations[one.id] = replace(region.migrations[one.id], cleared=True)
    region.run(60)
    assert (len(moves(region)), serves(region)) == (2, [DIGEST])


def test_what_cannot_be_there_and_back_in_time_does_not_begin() -> None:
    rule = replace(GAP, allow_gap_s=Seconds(1.5))
    region = full(rule)
    upgrade(region, rule)
    for _ in range(60):
        region.step()
        assert serves(region) == [SMALL]
    assert not moves(region)
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert refusal.code is Code.NO_ROOM_FOR_BOTH
    assert "1.5 s" in refusal.asked
