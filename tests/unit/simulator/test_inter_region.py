"""Messages between regions in the simulation: carried as bytes, lost, doubled, late; served by who may die."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal.coordinator.ports import VerifiedMessage
from shoal.simulator.parts.inter_region import CALL_TIMEOUT_S, InterRegionNetwork, SimPeerRegions, serve_peer
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.agreement import Award, GatewayRef, Grant, Notice, Release, Renewal, Renewed
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.offer import Answer, Solicitation
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

AWARD = Award(
    "agr-1", "s-1", "bid-1", "home", WorkloadKey("shop", "text"), Seconds(1800.0), (GatewayRef("gw", "gw:1"),)
)  # fmt: skip


class Delegate:
    """The other end: notes what came, and answers after a while."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.awards: list[VerifiedMessage[Award]] = []
        self._work_s = work_s

    async def on_award(self, award: VerifiedMessage[Award]) -> Grant:
        self.awards.append(award)
        await asyncio.sleep(self._work_s)
        return Grant(award.content.agreement, award.content.bid, "away", Seconds(30.0), ())

    async def on_release(self, release: VerifiedMessage[Release]) -> None:
        raise refuse(Code.BID_UNKNOWN, release.content.bid, "a bid of this region", "none")

    async def on_solicitation(self, solicitation: VerifiedMessage[Solicitation]) -> Answer:
        raise AssertionError(solicitation)

    async def on_renewal(self, renewal: VerifiedMessage[Renewal]) -> Renewed:
        raise AssertionError(renewal)

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        raise AssertionError(notice)

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        raise AssertionError(agreement)


class Two:
    """Regions `home` and `away`, and the paths between them."""

    def __init__(self, loop: VirtualLoop, delegate: Delegate) -> None:
        self.world = SimWorld(loop, 5)
        self.between = InterRegionNetwork(self.world)
        self.home = SimProcess(self.world, "home")
        self.away = SimProcess(self.world, "away")
        self.delegate = delegate
        self.between.listen("away", self.away, serve_peer("away", delegate))
        self.peers = SimPeerRegions(self.home, self.between, "home")
        self.there = self.between.path("home", "away")
        self.back = self.between.path("away", "home")

    def kinds(self) -> list[str]:
        return [event.kind for event in self.world.history.events]


def run_scenario(scenario: Callable[[Two], Coroutine[Any, Any, None]], delegate: Delegate | None = None) -> None:
    async def main(loop: VirtualLoop) -> None:
        await scenario(Two(loop, delegate or Delegate()))

    run(main)


async def refusal_code(call: Coroutine[Any, Any, object]) -> Code:
    with pytest.raises(ShoalError) as found:
        await call
    return found.value.code


def test_what_is_said_arrives_as_the_other_s_word_and_is_told_to_the_record() -> None:
    async def scenario(two: Two) -> None:
        grant = await two.peers.award("away", AWARD)
        assert (grant.signer, grant.content.agreement) == ("away", "agr-1")
        (award,) = two.delegate.awards
        assert (award.signer, award.content) == ("home", AWARD)
        assert two.kinds() == ["said", "delivered", "answered", "heard"]
        assert await refusal_code(two.peers.release("away", Release("s-1", "bid-1", "home"))) is Code.BID_UNKNOWN

    run_scenario(scenario)


@pytest.mark.parametrize("direction", ["there", "back"])
def test_what_is_lost_either_way_has_an_unknown_outcome(direction: str) -> None:
    async def scenario(two: Two) -> None:
        getattr(two, direction).loss = 1.0
        began = two.world.now()
        assert await refusal_code(two.peers.award("away", AWARD)) is Code.PEER_UNREACHABLE
        assert two.world.now() - began == pytest.approx(CALL_TIMEOUT_S)
        assert len(two.delegate.awards) == (direction == "back")

    run_scenario(scenario)


def test_a_message_may_come_twice_and_long_after_it_was_answered() -> None:
    async def scenario(two: Two) -> None:
        two.there.duplicate = 1.0
        await two.peers.award("away", AWARD)
        assert len(two.delegate.awards) == 1
        await asyncio.sleep(60.0)
        assert [each.content for each in two.delegate.awards] == [AWARD, AWARD]

    run_scenario(scenario)


def test_who_dies_at_work_leaves_the_outcome_open() -> None:
    async def scenario(two: Two) -> None:
        two.world.call_later(0.5, two.away.die)
        assert await refusal_code(two.peers.award("away", AWARD)) is Code.PEER_UNREACHABLE
        assert "answered" not in two.kinds()
        assert await refusal_code(two.peers.award("away", AWARD)) is Code.PEER_UNREACHABLE, (
            "and nobody listens any more"
        )
        assert len(two.delegate.awards) == 1

    run_scenario(scenario, Delegate(work_s=1.0))


def test_what_was_begun_is_finished_though_its_caller_has_left() -> None:
    async def scenario(two: Two) -> None:
        assert await refusal_code(two.peers.award("away", AWARD)) is Code.PEER_UNREACHABLE
        await asyncio.sleep(CALL_TIMEOUT_S)
        assert "answered" not in two.kinds(), "there is nobody to answer"
        assert len(two.delegate.awards) == 1

    run_scenario(scenario, Delegate(work_s=CALL_TIMEOUT_S + 0.5))


def test_a_stopped_process_hears_when_it_goes_on() -> None:
    async def scenario(two: Two) -> None:
        two.away.pause()
        assert await refusal_code(two.peers.award("away", AWARD)) is Code.PEER_UNREACHABLE
        assert not two.delegate.awards
        two.away.resume()
        await asyncio.sleep(1.0)
        assert len(two.delegate.awards) <= 1, "its caller's hanging up may have come first"

    run_scenario(scenario)
