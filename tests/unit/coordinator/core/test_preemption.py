"""Preemption: who leaves for a workload of higher priority, and that nobody does without `preempt`."""

from typing import Any

import pytest

from harness.builders.coordinator_core import MIB, CoreRegion, device, intent, node
from shoal.coordinator.core.migration.model import Cause, DoneState
from shoal.types.codes import Code
from shoal.types.migration import Against, MigrationRule
from shoal.types.units import Seconds
from shoal.types.workload import Intent, Preempt

QUICK = MigrationRule(against=Against.NONE, hold_s=Seconds(1.0), drain_s=Seconds(1.0))
ONE = 110 * MIB
"""Memory for one replica."""
ON_LEFT = 'node.name == "left"'


def workload(name: str, priority: int, **changes: Any) -> Intent:
    return intent(name, priority=priority, migration=QUICK, **changes)


def region(**memory: int) -> CoreRegion:
    """Replicas turn out to be faster than predicted, so that none moves for another prediction."""
    found = CoreRegion(*(node(name, device(memory=size)) for name, size in memory.items()))
    for agent in found.agents.values():
        agent.p50_s = 0.005
    return found


def where(found: CoreRegion, name: str) -> list[str]:
    return sorted(at for at, draining in found.replicas(name).values() if not draining)


def low_first(found: CoreRegion, high: Intent, low: Intent | None = None) -> CoreRegion:
    """The region after a workload of low priority runs on the left, and another has asked for that place."""
    low = low or workload("low", 10)
    bound = intent("low", priority=low.priority, migration=QUICK, where=ON_LEFT)
    found.intents = (bound,)
    found.run(5)
    assert where(found, "low") == ["left"]
    found.intents = (low,)
    found.run(5)
    assert where(found, "low") == ["left"]
    found.intents = (low, high)
    return found


def test_what_has_another_place_moves_there_live() -> None:
    found = low_first(region(left=ONE, right=ONE), workload("high", 900, where=ON_LEFT, preempt=Preempt.LOWER))
    while found.now < 60 and not where(found, "high"):
        found.step()
        assert where(found, "low"), "it is somewhere at any time"
    found.run(20)
    assert (where(found, "high"), where(found, "low")) == (["left"], ["right"])
    (moved,) = found.migrations.values()
    assert moved.cause is Cause.PREEMPTION
    assert isinstance(moved.state, DoneState)
    assert moved.reason == "shop/high needs left/cpu0"


@pytest.mark.parametrize("preempt", [Preempt.NEVER, Preempt.LOWER])
def test_what_has_no_other_place_stays(preempt: Preempt) -> None:
    found = low_first(region(left=ONE), workload("high", 900, preempt=preempt))
    decision = found.run(30)
    assert (where(found, "high"), where(found, "low")) == ([], ["left"])
    plan = decision.plan.workloads[0]
    assert plan.refusal is not None
    assert plan.refusal.code is Code.MEMORY_SHORT
    assert found.migrations == {}


def test_never_displaces_nothing_even_where_there_is_another_place() -> None:
    found = low_first(region(left=ONE, right=ONE), workload("high", 900, where=ON_LEFT))
    found.run(30)
    assert (where(found, "high"), where(found, "low")) == ([], ["left"])


def test_equals_are_not_displaced() -> None:
    always = workload("high", 10, where=ON_LEFT, preempt=Preempt.ALWAYS)
    found = low_first(region(left=ONE, right=ONE), always)
    found.run(30)
    assert (where(found, "high"), where(found, "low")) == ([], ["left"])


def test_always_ends_what_has_no_other_place_and_says_so() -> None:
    found = low_first(region(left=ONE), workload("high", 900, preempt=Preempt.ALWAYS))
    decision = found.run(30)
    assert (where(found, "high"), where(found, "low")) == (["left"], [])
    lost = decision.plan.workloads[1]
    assert lost.refusal is not None
    assert lost.refusal.code in (Code.OUTRANKED, Code.MEMORY_SHORT)
    before = found.desired
    found.run(20)
    assert found.desired == before, "and then nothing changes any more"


def test_the_least_important_of_them_leaves_and_no_more_than_are_needed() -> None:
    found = region(left=160 * MIB)  # for two
    found.intents = (workload("low", 10), workload("middle", 50))
    found.run(5)
    assert (where(found, "low"), where(found, "middle")) == (["left"], ["left"])
    found.intents = (*found.intents, workload("high", 900, preempt=Preempt.ALWAYS))
    found.run(30)
    assert [where(found, name) for name in ("high", "middle", "low")] == [["left"], ["left"], []]
