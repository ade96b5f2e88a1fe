"""A write of a node's record takes effect, and its answer is lost: the node is not shut out by what nobody heard."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.region import FakeAgent, RegionFixture
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
