"""A workload's history over a real store, and the way back to any of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.region import DIGEST, DOCUMENTS, World
from shoal.coordinator.controllers import revisions
from shoal.coordinator.controllers.catalog import DocumentKey
from shoal.coordinator.controllers.revisions import KEPT, Revision
from shoal.types.codes import Code, ShoalError
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")
WORKLOAD = DocumentKey("Workload", "default/reader")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    opened = await World.open(tmp_path / "first")
    await opened.push()
    yield opened
    await opened.store.close()


def text(label: str, policy: str = "") -> str:
    named = f"  policy: {policy}\n" if policy else ""
    return (
        f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {{name: reader, labels: {{v: {label}}}}}\n"
        f"spec:\n  model: {{source: {DIGEST}}}\n{named}"
    )


def policy(weight: str) -> str:
    return f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: kept}}\nspec:\n  optimize: {{{weight}: 1.0}}\n"


async def apply(world: World, *texts: str, actor: str = "ops") -> None:
    given = [(f"{number}.yaml", each) for number, each in enumerate(texts)]
    applied = await world.region.workloads.apply(given, {}, "", actor)
    assert not applied.planned.problems, applied.planned.problems
    world.clock.advance(1.0)


async def told(world: World) -> tuple[Revision, ...]:
    return await revisions.history(world.store, world.region.workloads.catalog, KEY)


async def rolled_back(world: World, to: int = 0) -> None:
    texts, digests = await revisions.proposed(world.store, world.region.workloads.catalog, KEY, to)
    applied = await world.region.workloads.apply(texts, digests, "", "ops", back=True)
    assert not applied.planned.problems, applied.planned.problems
    world.clock.advance(1.0)


async def test_who_changed_what_and_when(world: World) -> None:
    await apply(world, policy("cost"), text("a", "kept"), actor="ann")
    await apply(world, text("b", "kept"), actor="bob")
    await apply(world, policy("energy"), actor="cyd")
    await apply(world, text("b", "kept"), actor="dan")
    lines = [(each.document.kind, each.document.revision, each.document.applied_by) for each in await told(world)]
    assert lines == [("Policy", 1, "ann"), ("Workload", 1, "ann"), ("Workload", 2, "bob"), ("Policy", 2, "cyd")]
    _, first, second, changed = await told(world)
    assert (first.lines, first.current) == ((), False)
    assert (second.lines, second.current) == (("- metadata.labels.v: a", "+ metadata.labels.v: b"), True)
    assert changed.lines == ("- spec.optimize.cost: 1.0", "+ spec.optimize.energy: 1.0")
    stamps = [each.document.applied_at for each in await told(world)]
    assert stamps == sorted(stamps)


async def test_back_and_back_again(world: World) -> None:
    for label in "abc":
        await apply(world, text(label))
    await rolled_back(world, 1)
    await rolled_back(world)
    found = [(each.document.revision, each.repeats) for each in await told(world)]
    assert found == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 3)]
    (intent,) = world.region.workloads.intents
    assert (intent.labels, intent.back) == ({"v": "c"}, True)
    await apply(world, text("d"))
    assert not world.region.workloads.intents[0].back
    events = [event for event in await world.region.events.past(0, 1000) if event.code == "APPLIED"]
    assert events[-1].message == "revision 6"


async def test_it_comes_back_with_the_very_models_that_it_was_pinned_to(world: World) -> None:
    await world.region.workloads.apply(DOCUMENTS, {}, "", "test")
    (before,) = world.region.workloads.intents
    (name,) = (model.source for model in before.models)
    await apply(world, text("b"))
    _, digests = await revisions.proposed(world.store, world.region.workloads.catalog, KEY, 1)
    assert digests == {name: DIGEST}
    await rolled_back(world)
    assert world.region.workloads.intents[0].models == before.models


async def test_without_its_bytes_there_is_no_way_back(world: World, tmp_path: Path) -> None:
    await apply(world, text("a"))
    catalog = world.region.workloads.catalog
    await apply(world, text("b"))
    gone = world.region.workloads.catalog
    world.region.workloads.catalog = type(gone)(gone.documents, {})
    assert [each.gone for each in await told(world)] == [(DIGEST,), (DIGEST,)]
    with pytest.raises(ShoalError) as caught:
        await revisions.proposed(world.store, world.region.workloads.catalog, KEY, 1)
    assert caught.value.code is Code.MODEL_UNKNOWN
    assert DIGEST in caught.value.refusal.found
    assert catalog.models


async def test_a_revision_that_never_was(world: World) -> None:
    with pytest.raises(ShoalError) as caught:
        await told(world)
    assert caught.value.code is Code.WORKLOAD_UNKNOWN
    await apply(world, text("a"))
    for to in (0, 7):
        with pytest.raises(ShoalError) as caught:
            await revisions.proposed(world.store, world.region.workloads.catalog, KEY, to)
        assert caught.value.code is Code.NOT_FOUND


async def test_so_many_are_kept_and_all_go_with_the_workload(world: World, tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        await apply(world, text(f"v{number}"))
    earlier = await revisions.earlier(world.store, WORKLOAD)
    assert [each.revision for each in earlier] == list(range(5, KEPT + 5))
    await world.store.close()
    again = await World.open(tmp_path / "first", world)
    assert [each.document.revision for each in await told(again)] == list(range(5, KEPT + 6)), "and after a restart"
    await again.region.workloads.delete(WORKLOAD, "ops")
    assert await again.store.scan(revisions.REVISIONS) == ()
    await apply(again, text("anew"))
    assert [each.document.revision for each in await told(again)] == [1]
