"""A write takes effect, and its answer is lost: no node is shut out by what nobody heard, and no document stuck."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import Welcome


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path)
    yield opened
    await opened.store.close()


def lose_answers(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = world.store.commit

    async def commit(*given: Any, **more: Any) -> int:
        await real(*given, **more)
        raise refuse(Code.STORE_UNAVAILABLE, "no answer of the store", "one", "try again")

    monkeypatch.setattr(world.store, "commit", commit)


async def connect_once(world: RegionFixture) -> FakeAgent:
    agent = FakeAgent(world, "edge-1")
    assert isinstance(await agent.connect(), Welcome)
    await world.region.fleet.on_close(agent.name, agent.epoch)
    return agent


async def test_a_node_whose_hello_was_stored_unheard_connects_at_its_second_attempt(world: RegionFixture) -> None:
    agent = await connect_once(world)
    with pytest.MonkeyPatch.context() as patched:
        lose_answers(world, patched)
        assert isinstance(await agent.connect(), Refusal)
    assert isinstance(await agent.connect(), Refusal), "of what was stored meanwhile"
    assert isinstance(await agent.connect(), Welcome)


async def test_a_node_that_was_deleted_unheard_is_deleted_by_the_second_attempt(world: RegionFixture) -> None:
    agent = await connect_once(world)
    with pytest.MonkeyPatch.context() as patched:
        lose_answers(world, patched)
        with pytest.raises(ShoalError):
            await world.region.fleet.forget(agent.name, "ops")
    with pytest.raises(ShoalError, match="CONFLICT"):
        await world.region.fleet.forget(agent.name, "ops")
    await world.region.fleet.forget(agent.name, "ops")
    assert agent.name not in world.region.fleet.fleet.nodes
    assert isinstance(await agent.connect(), Welcome)


async def test_documents_that_were_applied_unheard_are_known_by_the_second_attempt(world: RegionFixture) -> None:
    """All that were stored together, also those that the second attempt does not concern."""
    await world.push()
    documents = world.region.documents
    with pytest.MonkeyPatch.context() as patched:
        lose_answers(world, patched)
        with pytest.raises(ShoalError, match="STORE_UNAVAILABLE"):
            await documents.apply(DOCUMENTS, {}, "", "ops")
    assert not documents.catalog.documents
    with pytest.raises(ShoalError, match="CONFLICT"):
        await documents.apply(DOCUMENTS, {}, "", "ops")
    assert {key.store_key for key in documents.catalog.documents} == await stored_documents(world)
    again = await documents.apply(DOCUMENTS, {}, "", "ops")
    assert not again.plan_result.documents, "applied already"
    changed = [(name, text.replace("latency: 1.0", "cost: 1.0")) for name, text in DOCUMENTS]
    assert (await documents.apply(changed, {}, "", "ops")).revision
    known = dict(documents.catalog.documents)
    await documents.start()
    assert dict(documents.catalog.documents) == known, "the store has the same"


async def test_a_document_that_was_deleted_unheard_is_gone_by_the_second_attempt(world: RegionFixture) -> None:
    await world.push()
    documents, key = world.region.documents, DocumentKey("Workload", "default/reader")
    await documents.apply(DOCUMENTS, {}, "", "ops")
    with pytest.MonkeyPatch.context() as patched:
        lose_answers(world, patched)
        with pytest.raises(ShoalError, match="STORE_UNAVAILABLE"):
            await documents.delete(key, "ops")
    with pytest.raises(ShoalError, match="CONFLICT"):
        await documents.delete(key, "ops")
    assert key not in documents.catalog.documents
    assert not world.region.workloads.intents
    assert (await documents.apply(DOCUMENTS, {}, "", "ops")).revision
    assert {each.store_key for each in documents.catalog.documents} == await stored_documents(world)


async def stored_documents(world: RegionFixture) -> set[str]:
    return {record.key for record in await world.store.scan("documents/")}
