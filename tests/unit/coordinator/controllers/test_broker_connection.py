"""What the region does where its connection to the broker is over: one look at the fleet, one event."""

from pathlib import Path

import pytest

from harness.fakes.region import FakeAgent, RegionFixture
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.fleet.state import Liveness
from shoal.types.link import Welcome

NODES = 20


async def events_of(world: RegionFixture) -> tuple[LogEvent, ...]:
    return await world.region.events.events_after(0, 1000)


@pytest.mark.parametrize(("is_lost", "code"), [(False, "BROKER_LEFT"), (True, "BROKER_LOST")])
async def test_all_sessions_of_a_connection_end_with_one_event_and_no_node_is_suspect(
    tmp_path: Path, is_lost: bool, code: str
) -> None:
    world = await RegionFixture.open(tmp_path)
    fleet = world.region.fleet
    agents = [FakeAgent(world, f"edge-{number}") for number in range(NODES)]
    for agent in agents:
        assert isinstance(await agent.connect(), Welcome)
    await fleet.tick()
    before = len(await events_of(world))
    await fleet.on_link_closed({agent.name: agent.epoch for agent in agents}, is_lost=is_lost)
    assert not any(state.connected for state in fleet.fleet.nodes.values())
    (told,) = (await events_of(world))[before:]
    assert told.code == code
    assert f"{NODES} sessions" in told.message
    world.clock.advance(fleet.fleet.timing.lost_after_s - 0.5)
    await fleet.tick()
    await fleet.on_link_restored()
    world.clock.advance(fleet.fleet.timing.lost_after_s - 0.5)
    await fleet.tick()
    assert {state.liveness for state in fleet.fleet.nodes.values()} == {Liveness.READY}, "time to come back"
    await world.store.close()
