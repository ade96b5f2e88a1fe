"""Links over a broker in the simulation: what it keeps, repeats, says for the lost, and loses when it dies."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace

import pytest
from unit.simulator.fakes import SENT, RecordingLinkEvents, hello, status

from shoal.agent.core.mqtt_session import MISSED_HEARTBEATS, MqttSessionMachine
from shoal.coordinator.core.link.mqtt_sessions import MqttSessions
from shoal.simulator.parts.broker import BROKER, SimBroker
from shoal.simulator.parts.broker_links import SimBrokerLink, SimBrokerLinks, SimBrokerSession
from shoal.simulator.parts.network import COORDINATOR, KEEPALIVE_S, SimNetwork
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Seconds


class Noted(RecordingLinkEvents):
    """Also what it could not hear."""

    def __init__(self) -> None:
        super().__init__()
        self.blind_to: list[tuple[str, ...]] = []

    async def on_link_lost(self, nodes: Collection[str]) -> None:
        self.blind_to.append(tuple(nodes))

    async def on_link_closed(self, sessions: Mapping[str, int], *, is_lost: bool) -> None:
        self.blind_to.append(tuple(sessions))
        await super().on_link_closed(sessions, is_lost=is_lost)

    async def on_link_restored(self) -> None:
        self.blind_to.clear()


class Line:
    """One agent, a broker and a coordinator."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.world = SimWorld(loop, 3)
        self.network = SimNetwork(self.world)
        self.broker = SimBroker(self.network)
        self.heard = Noted()
        self.client = SimProcess(self.world, "agent-a")
        self.server = SimProcess(self.world, COORDINATOR)
        self.links = SimBrokerLinks(self.server, self.broker)
        self.links.serve(self.heard)

    async def connect(self, nonce: str = "nonce") -> SimBrokerSession:
        return await SimBrokerLink(self.client, self.broker, "a", "a").connect(replace(hello(), nonce=nonce))


def desired_set(generation: int) -> DesiredSet:
    return DesiredSet("a", Version("h", 1, generation), (), (), (), (), Seconds(1.0))


def tell(story: Callable[[Line], Awaitable[None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        await story(Line(loop))

    run(main)


def test_statuses_count_once_and_in_order_however_often_they_come() -> None:
    async def scenario(line: Line) -> None:
        session = await line.connect()
        line.network.path(BROKER, COORDINATOR).duplicate = 0.5
        for number in range(SENT):
            await session.send(status(number))
            await asyncio.sleep(0.05)
        await asyncio.sleep(10.0)
        assert line.heard.sequences == list(range(SENT))

    tell(scenario)


def test_the_newest_desired_set_is_kept_for_who_comes_late() -> None:
    async def scenario(line: Line) -> None:
        first = await line.connect()
        for generation in (1, 2):
            await line.links.send("a", desired_set(generation))
        await asyncio.sleep(1.0)
        assert await first.receive() == desired_set(2), "one slot: the newest"
        await first.close()
        second = await line.connect("another")
        assert await second.receive() == desired_set(2), "nobody sent it again"

    tell(scenario)


def test_a_broker_that_dies_ends_every_session_and_may_forget() -> None:
    async def scenario(line: Line) -> None:
        session = await line.connect()
        await line.links.send("a", desired_set(1))
        await asyncio.sleep(1.0)
        line.broker.die(forgets=True)
        await session.receive()
        with pytest.raises(ShoalError):
            await session.receive()
        assert line.heard.closed_epochs == [7]
        assert line.heard.blind_to == [("a",)]
        with pytest.raises(ShoalError):
            await line.connect()
        line.broker.start()
        await asyncio.sleep(2.0)
        assert line.heard.blind_to == []
        again = await line.connect()
        await asyncio.sleep(5.0)
        waiting = asyncio.ensure_future(again.receive())
        await asyncio.sleep(1.0)
        assert not waiting.done(), "what it kept is gone"
        waiting.cancel()

    tell(scenario)


@pytest.mark.parametrize("cut", [False, True])
def test_the_last_will_of_an_agent_ends_its_session(cut: bool) -> None:
    async def scenario(line: Line) -> None:
        await line.connect()
        line.network.path("a", COORDINATOR).cut = cut
        line.client.die()
        await asyncio.sleep(1.0)
        assert line.heard.closed_epochs == ([] if cut else [7])
        await asyncio.sleep(3 * KEEPALIVE_S)
        assert line.heard.closed_epochs == [7]

    tell(scenario)


def test_a_coordinator_that_falls_silent_or_leaves_is_missed() -> None:
    async def scenario(line: Line) -> None:
        session = await line.connect()
        line.network.path(COORDINATOR, BROKER).cut = True
        began = line.world.now()
        with pytest.raises(ShoalError) as ended:
            await session.receive()
        assert ended.value.code is Code.COORDINATOR_UNREACHABLE
        assert line.world.now() - began <= MISSED_HEARTBEATS + 1.0

    tell(scenario)


def test_a_hello_is_answered_once_and_by_nobody_when_the_coordinator_is_gone() -> None:
    async def scenario(line: Line) -> None:
        await line.connect()
        with pytest.raises(ShoalError):
            await line.connect()
        line.server.die()
        began = line.world.now()
        with pytest.raises(ShoalError):
            await line.connect()
        assert line.world.now() - began <= 6.0

    tell(scenario)


@pytest.mark.parametrize(
    ("core", "method", "silence"),
    [(MqttSessionMachine, "on_message", ()), (MqttSessions, "next_step", None)],
    ids=["agent", "coordinator"],
)
def test_no_session_comes_up_without_the_core_of_either_end(
    monkeypatch: pytest.MonkeyPatch, core: type, method: str, silence: object
) -> None:
    """So that seeds test what agents and coordinators run, and no model of it."""

    async def scenario(line: Line) -> None:
        await (await line.connect()).close()
        monkeypatch.setattr(core, method, lambda *args, **more: silence)
        with pytest.raises(ShoalError) as caught:
            await line.connect("another")
        assert caught.value.code is Code.COORDINATOR_UNREACHABLE

    tell(scenario)
