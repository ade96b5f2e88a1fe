"""Who records what a model answers, and who is judged by it: first ones, others, what takes the place of a lost one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.builders.coordinator_core import DIGEST, SMALL, CoreRegion, intent, node
from shoal.coordinator.core.migration.model import MigrationStage
from shoal.types.assignment import Assignment
from shoal.types.codes import Code
from shoal.types.migration import Against, InputsFrom, MigrationRule, PackRef, Recording, Verdict
from shoal.types.units import Bytes
from shoal.types.workload import ModelRef

RULE = MigrationRule(against=Against.REFERENCE, samples=12)
INPUTS = PackRef("sha256:" + "e" * 64, Bytes(1000), 16, answers=False)
MADE_UP = (DIGEST, "")
AS_ASKED = (Against.REFERENCE, InputsFrom.GENERATED, 0)


def region_of(*names: str, **changes: Any) -> CoreRegion:
    region = CoreRegion(*(node(name) for name in names), flops={"a": 2e11})
    region.intents = (intent(**{"migration": RULE, **changes}),)
    return region


def replicas(region: CoreRegion) -> Iterator[tuple[str, Assignment]]:
    return ((name, one) for name, content in sorted(region.desired.items()) for one in content.assignments)


def recording_replicas(region: CoreRegion) -> list[str]:
    return [
        name
        for name, one in replicas(region)
        if one.verification is not None and one.verification.recording is Recording.HERE
    ]


def recorder_of(region: CoreRegion, key: tuple[str, str] = MADE_UP) -> str:
    return region.references[key].by


def test_the_first_that_is_warm_records_and_serves_once_that_is_done() -> None:
    region = region_of("a", "b")
    region.step()
    ((_, one),) = replicas(region)
    assert one.verification is not None
    assert one.verification.recording is Recording.AWAITED, "it is not warm yet"
    assert (one.verification.samples, one.verification.pack) == (12, "")
    region.run(2.5)
    assert recording_replicas(region) == ["a"]
    assert region.routed_nodes("b") == []
    region.run(3)
    assert recorder_of(region) == one.id
    assert region.routed_nodes("b") == ["a"]
    assert recording_replicas(region) == []


def test_of_two_one_records_and_the_other_waits_and_is_judged_by_it() -> None:
    region = region_of("a", "b", replicas=2)
    region.agents["b"].load_s = 3.0
    seen = set[str]()
    for _ in range(30):
        region.step()
        at_once = recording_replicas(region)
        assert len(at_once) <= 1
        seen |= set(at_once)
    assert seen == {"a"}
    assert sorted(region.routed_nodes("b")) == ["a", "b"]
    told = [one for sent in region.told for one in sent["b"].assignments if one.verification is not None]
    assert not region.agents["b"].verified[told[-1].id].recorded
    assert told[-1].verification is not None
    assert told[-1].verification.pack == region.references[MADE_UP].pack.digest


@pytest.mark.parametrize("wrong", [False, True])
def test_what_takes_the_place_of_a_lost_one_is_judged_by_what_that_recorded(wrong: bool) -> None:
    region = region_of("a", "b")
    region.run(6)
    first = recorder_of(region)
    region.agents["b"].wrong = wrong
    region.agents["a"].up = False
    region.run(60)
    assert region.routed_nodes("b") == ([] if wrong else ["b"])
    assert recorder_of(region) == first, "what is in force stays"


def test_another_records_where_the_first_is_lost_in_the_midst() -> None:
    region = region_of("a", "b")
    region.agents["a"].verify_s = 1000.0
    region.run(4)
    assert recording_replicas(region) == ["a"]
    region.agents["a"].up = False
    region.run(60)
    assert recorder_of(region) == next(one.id for name, one in replicas(region) if name == "b")
    assert region.routed_nodes("b") == ["b"]


def test_a_coordinator_that_starts_anew_asks_no_second_one() -> None:
    region = region_of("a", "b", "c", replicas=2)
    for name in ("a", "b"):
        region.agents[name].verify_s = 1000.0
    region.run(6)
    before = recording_replicas(region)
    region.restart()
    for name in region.agents:
        region.agents[name].heard = False
    region.run(1)
    assert recording_replicas(region) == before, "nobody has been heard"
    for name in region.agents:
        region.reconnect(name)
    region.run(3)
    assert recording_replicas(region) == before


def test_the_workloads_own_inputs_make_a_reference_of_their_own() -> None:
    region = region_of("a", migration=replace(RULE, pack=INPUTS, samples=64))
    region.step()
    ((_, one),) = replicas(region)
    assert one.verification is not None
    assert (one.verification.pack, one.verification.samples) == (INPUTS.digest, 16)
    region.run(6)
    assert list(region.references) == [(DIGEST, INPUTS.digest)]


def test_one_that_serves_records_beside_it_where_the_policy_asks_later_or_it_was_dropped() -> None:
    region = region_of("a", "b", migration=MigrationRule())
    region.run(6)
    assert not region.references
    region.intents = (intent(migration=RULE),)
    for _ in range(2):
        region.step()
        assert region.routed_nodes("b") == ["a"], "it serves on"
        ((_, one),) = replicas(region)
        assert one.verification is not None
        assert one.verification.beside
        region.run(2)
        assert recorder_of(region) == one.id
        assert region.replicas() == {one.id: ("a", False)}
        region.references.clear()  # an operator drops it


def test_one_whose_recording_came_to_nothing_is_not_asked_again() -> None:
    region = region_of("a", "b", migration=MigrationRule())
    region.run(6)
    ((_, one),) = replicas(region)
    region.intents = (intent(migration=RULE),)
    region.step()
    assert one.verification is None
    state = region.fleet.nodes["a"]
    failed = Verdict("r-1", False, Code.VERIFY_IMPOSSIBLE, "no input was answered", *AS_ASKED, recorded=True)
    region.agents["a"].heard = False
    region.references.clear()
    region.fleet = region.fleet.with_node(
        replace(state, observed={one.id: replace(state.observed[one.id], verdict=failed)})
    )
    region.step()
    assert recording_replicas(region) == []


def test_an_upgrade_is_judged_by_its_own_answers() -> None:
    region = region_of("a", "b")
    region.run(6)
    old = recorder_of(region)
    region.intents = (intent(migration=RULE, models=(ModelRef("new.onnx", SMALL, "int8"),), revision=2),)
    region.run(60)
    (move,) = region.migrations.values()
    assert move.stage is MigrationStage.DONE
    assert move.verdict is not None
    assert move.verdict.recorded
    assert recorder_of(region) == old
    assert recorder_of(region, (SMALL, "")) == move.verdict.migration.replace("m-", "a-")
