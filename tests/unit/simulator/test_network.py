"""Links in the simulation: streams keep order and come late, datagrams are lost, doubled and overtaken."""

import asyncio

import pytest
from unit.simulator.fakes import SENT, RecordingLinkEvents, hello, status

from shoal.simulator.parts.network import COORDINATOR, SimLink, SimLinkSession, SimNetwork
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.codes import Code, ShoalError


class Line:
    def __init__(self, loop: VirtualLoop, seed: int, *, datagrams: bool) -> None:
        self.world = SimWorld(loop, seed)
        self.network = SimNetwork(self.world, datagrams=datagrams)
        self.heard = RecordingLinkEvents()
        self.server = SimProcess(self.world, COORDINATOR)
        self.client = SimProcess(self.world, "agent-a")
        self.network.listen(self.server, self.heard)
        self.path = self.network.path("a", COORDINATOR)

    async def connect(self) -> SimLinkSession:
        return await SimLink(self.client, self.network, "a", "a").connect(hello())


def test_a_stream_loses_and_reorders_nothing_over_loss_and_a_short_cut() -> None:
    async def main(loop: VirtualLoop) -> None:
        line = Line(loop, 3, datagrams=False)
        session = await line.connect()
        line.path.loss, line.path.late = 0.3, 0.5
        for number in range(SENT):
            line.path.cut = 10 <= number < 20
            await session.send(status(number))
            await asyncio.sleep(0.05)
            if number == 19:
                line.path.cut = False
                line.network.retransmit_all()
        await asyncio.sleep(5.0)
        assert line.heard.sequences == list(range(SENT))

    run(main)


def test_datagrams_are_lost_doubled_and_overtaken() -> None:
    async def main(loop: VirtualLoop) -> None:
        line = Line(loop, 3, datagrams=True)
        session = await line.connect()
        line.path.loss, line.path.late, line.path.duplicate, line.path.delay_s = 0.3, 0.5, 0.5, 0.05
        for number in range(SENT):
            await session.send(status(number))
            await asyncio.sleep(0.02)
        await asyncio.sleep(5.0)
        got = line.heard.sequences
        assert set(got) < set(range(SENT))
        assert len(got) > len(set(got))
        assert got != sorted(got)

    run(main)


def test_both_ends_give_up_on_a_path_that_stays_cut_one_way() -> None:
    async def main(loop: VirtualLoop) -> None:
        line = Line(loop, 3, datagrams=False)
        session = await line.connect()
        line.path.cut = True
        began = loop.time()
        with pytest.raises(ShoalError) as ended:
            await session.receive()
        assert ended.value.code is Code.COORDINATOR_UNREACHABLE
        assert loop.time() - began <= 15.0
        await asyncio.sleep(1.0)
        assert line.heard.closed_epochs == [7]

    run(main)


def test_the_death_of_an_agent_is_heard() -> None:
    async def main(loop: VirtualLoop) -> None:
        line = Line(loop, 3, datagrams=False)
        await line.connect()
        line.client.die()
        await asyncio.sleep(1.0)
        assert line.heard.closed_epochs == [7]

    run(main)


def test_nobody_listens() -> None:
    async def main(loop: VirtualLoop) -> None:
        line = Line(loop, 3, datagrams=False)
        line.server.die()
        with pytest.raises(ShoalError) as refused:
            await line.connect()
        assert refused.value.code is Code.COORDINATOR_UNREACHABLE

    run(main)
