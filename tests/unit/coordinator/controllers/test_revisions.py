"""A workload's history over a real store, and the way back to any of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.fakes.region import DIGEST, DOCUMENTS, RegionFixture
from shoal.coordinator.controllers.documents import revisions
from shoal.coordinator.controllers.documents.revisions import KEPT, Revision
from shoal.coordinator.core.catalog.differences import differences
from shoal.coordinator.core.catalog.model import DocumentKey, StoredDocument
from shoal.policies import canonical_text, load
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")
WORKLOAD = DocumentKey("Workload", "default/reader")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
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


async def apply(world: RegionFixture, *texts: str, actor: str = "ops") -> None:
    given = [(f"{number}.yaml", each) for number, each in enumerate(texts)]
    applied = await world.region.documents.apply(given, {}, "", actor)
    assert not applied.plan_result.problems, applied.plan_result.problems
    world.clock.advance(1.0)


async def read_history(world: RegionFixture) -> tuple[Revision, ...]:
    return await revisions.history(world.store, world.region.workloads.catalog, KEY)


async def roll_back(world: RegionFixture, to: int = 0) -> None:
    texts, digests = await revisions.rollback_documents(world.store, world.region.workloads.catalog, KEY, to)
    applied = await world.region.documents.apply(texts, digests, "", "ops", back=True)
    assert not applied.plan_result.problems, applied.plan_result.problems
    world.clock.advance(1.0)


async def test_who_changed_what_and_when(world: RegionFixture) -> None:
    await apply(world, policy("cost"), text("a", "kept"), actor="ann")
    await apply(world, text("b", "kept"), actor="bob")
    await apply(world, policy("energy"), actor="cyd")
    await apply(world, text("b", "kept"), actor="dan")
    lines = [
        (each.document.kind, each.document.revision, each.document.applied_by) for each in await read_history(world)
    ]
    assert lines == [("Policy", 1, "ann"), ("Workload", 1, "ann"), ("Workload", 2, "bob"), ("Policy", 2, "cyd")]
    _, first, second, changed = await read_history(world)
    assert (first.lines, first.is_current) == ((), False)
    assert (second.lines, second.is_current) == (("~ metadata.labels.v: a -> b",), True)
    assert changed.lines == ("- spec.optimize.cost: 1.0", "+ spec.optimize.energy: 1.0")
    stamps = [each.document.applied_at for each in await read_history(world)]
    assert stamps == sorted(stamps)


async def test_back_and_back_again(world: RegionFixture) -> None:
    for label in "abc":
        await apply(world, text(label))
    await roll_back(world, 1)
    await roll_back(world)
    found = [(each.document.revision, each.repeats) for each in await read_history(world)]
    assert found == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 3)]
    (intent,) = world.region.workloads.intents
    assert (intent.labels, intent.back) == ({"v": "c"}, True)
    await apply(world, text("d"))
    assert not world.region.workloads.intents[0].back
    events = [event for event in await world.region.events.events_after(0, 1000) if event.code == "APPLIED"]
    assert events[-1].message == "revision 6"


async def test_it_comes_back_with_the_very_models_that_it_was_pinned_to(world: RegionFixture) -> None:
    await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    (before,) = world.region.workloads.intents
    (name,) = (model.source for model in before.models)
    await apply(world, text("b"))
    _, digests = await revisions.rollback_documents(world.store, world.region.workloads.catalog, KEY, 1)
    assert digests == {name: DIGEST}
    await roll_back(world)
    assert world.region.workloads.intents[0].models == before.models


async def test_without_its_bytes_there_is_no_way_back(world: RegionFixture, tmp_path: Path) -> None:
    await apply(world, text("a"))
    catalog = world.region.workloads.catalog
    await apply(world, text("b"))
    gone = world.region.workloads.catalog
    world.region.workloads.catalog = type(gone)(gone.documents, {})
    assert [each.missing_sources for each in await read_history(world)] == [(DIGEST,), (DIGEST,)]
    with pytest.raises(ShoalError) as caught:
        await revisions.rollback_documents(world.store, world.region.workloads.catalog, KEY, 1)
    assert caught.value.code is Code.MODEL_UNKNOWN
    assert DIGEST in caught.value.refusal.found
    assert catalog.models


async def test_a_revision_that_never_was(world: RegionFixture) -> None:
    with pytest.raises(ShoalError) as caught:
        await read_history(world)
    assert caught.value.code is Code.WORKLOAD_UNKNOWN
    await apply(world, text("a"))
    for to in (0, 7):
        with pytest.raises(ShoalError) as caught:
            await revisions.rollback_documents(world.store, world.region.workloads.catalog, KEY, to)
        assert caught.value.code is Code.NOT_FOUND


async def test_so_many_are_kept_and_all_go_with_the_workload(world: RegionFixture, tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        await apply(world, text(f"v{number}"))
    earlier = await revisions.load_earlier(world.store, WORKLOAD)
    assert [each.revision for each in earlier] == list(range(5, KEPT + 5))
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    assert [each.document.revision for each in await read_history(again)] == list(range(5, KEPT + 6)), (
        "and after a restart"
    )
    await again.region.documents.delete(WORKLOAD, "ops")
    assert await again.store.scan(revisions.REVISIONS) == ()
    await apply(again, text("anew"))
    assert [each.document.revision for each in await read_history(again)] == [1]


def test_a_field_that_changes_shows_both_values_in_one_line() -> None:
    def stored_document(spec: str) -> StoredDocument:
        text = f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: mild}}\nspec: {spec}\n"
        (document,) = load([("mild.yaml", text)]).documents
        return StoredDocument("Policy", "mild", canonical_text(document.value), 1, Wall(0.0), "ops")

    before = stored_document("{optimize: {latency: 1}, require: {latency: {p95: 20ms}}}")
    after = stored_document("{optimize: {cost: 1}, require: {latency: {p95: 50ms}}}")
    assert sorted(differences(before, after)) == [
        "+ spec.optimize.cost: 1.0",
        "- spec.optimize.latency: 1.0",
        "~ spec.require.latency.p95: 20ms -> 50ms",
    ]
