"""`shoal bench placement --memory`: the schedule, the rules beside Shoal's, and how what came of it is counted."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from harness.benchmark_modules import load_benchmark
from harness.builders.coordinator_core import profile
from shoal.types.units import Bytes

MIB = 2**20
NEEDS = {"large": 100 * MIB, "small": 20 * MIB}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    load_benchmark(monkeypatch, "_prediction", ("live_models",))
    return load_benchmark(monkeypatch, "_placement", ("foreign_memory", "memory_group", "memory_node", "memory"))[
        "memory"
    ]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_benchmark(monkeypatch, "_placement", ("foreign_memory",))["foreign_memory"]


def test_the_schedule_is_near_the_limit_and_the_same_for_a_seed(memory: Any) -> None:
    found = memory.schedule(NEEDS, 200, 1)
    assert found == memory.schedule(NEEDS, 200, 1) != memory.schedule(NEEDS, 200, 2)
    assert Counter(each.model for each in found).keys() == NEEDS.keys()
    shares = [each.left_bytes / NEEDS[each.model] for each in found]
    assert 0.5 <= min(shares) < 0.6
    assert 1.9 < max(shares) <= 2
    assert all(number < each.leaves_at <= number + 5 for number, each in enumerate(found))


def test_outcomes_are_counted_by_what_they_were(memory: Any) -> None:
    trials = [
        memory.MemoryTrial("served", 120 * MIB, 110 * MIB, 100 * MIB, 0),
        memory.MemoryTrial("refused", 90 * MIB, 110 * MIB, 100 * MIB, 0),
        memory.MemoryTrial("refused", 105 * MIB, 110 * MIB, 100 * MIB, 0),
        memory.MemoryTrial("short", 90 * MIB, 50 * MIB, 100 * MIB, 2),
        memory.MemoryTrial("failed", 90 * MIB, 50 * MIB, 100 * MIB, 1),
    ]
    found = memory.figures(trials)
    assert found == memory.RuleFigures(5, 1, 2, 1, 1, 3, 1)


def test_rules_beside_shoal_know_nothing_of_what_a_load_takes(memory: Any) -> None:
    count = memory.CountRule(130 * MIB, NEEDS)
    reading = SimpleNamespace(free_bytes=30 * MIB)
    assert count.allows(None, reading, [object()])
    assert not count.allows(None, reading, [object(), object()])
    files = memory.FileSizeRule({"large": replace(profile(), size_bytes=Bytes(40 * MIB))})
    assert files.asked_bytes("large") == 40 * MIB
    assert files.allows(SimpleNamespace(model_bytes=29 * MIB), reading, [])
    assert not files.allows(SimpleNamespace(model_bytes=31 * MIB), reading, [])


def test_a_foreign_process_leaves_what_it_is_told(foreign: Any) -> None:
    """On a machine where nothing else runs: what it holds is what is gone."""
    held = [0]
    machine = foreign.ForeignMemory(lambda: 100 * MIB - held[0] * MIB)
    hold = machine._hold

    def hold_and_count(blocks: int) -> bool:
        held[0] = blocks
        return bool(hold(blocks))

    machine._hold = hold_and_count
    try:
        assert machine.leave(60 * MIB) == 60 * MIB
        assert machine.leave(90 * MIB) == 90 * MIB
        assert machine.leave(200 * MIB) == 100 * MIB
        assert machine.is_alive
        machine.revive()
        assert machine.is_alive
    finally:
        machine.close()
    assert not machine.is_alive
