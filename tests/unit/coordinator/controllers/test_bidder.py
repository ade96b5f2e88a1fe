"""Bids are computed beside the loop: what they hold is still free then, and no region gets more than its turn."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from harness.builders.negotiation import signed_message, solicitation
from harness.fakes.delegate import DelegateFixture
from harness.fakes.region import FakeAgent, RegionFixture
from harness.wait import until
from shoal.coordinator.controllers.federation import bidder
from shoal.coordinator.controllers.federation.bidder import OPEN_OF_ORIGIN
from shoal.coordinator.core.negotiation.bid import answer_solicitation
from shoal.coordinator.core.workloads.invariants import check
from shoal.types.agreement import Release
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.offer import Answer, Decline, Offer
from shoal.types.units import Seconds

T = TypeVar("T")

TRADE = """apiVersion: shoal/v1
kind: Region
metadata: {name: eu}
spec: {trade: [{with: "us-*", hold_share: 90%}]}
"""


class Beside:
    """Where bids are computed: in turn with what a test does meanwhile."""

    agent: FakeAgent

    def __init__(self) -> None:
        self.delegate: DelegateFixture | None = None
        self.origins = list[str]()
        """Whose bids were computed."""
        self.locked = list[bool]()
        """Whether steps of the region waited meanwhile."""
        self.seconds = 0.0
        """Processor time so far."""
        self.took_s = 0.0
        """Processor time of each bid."""
        self.is_inside = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.then: Callable[[int], Awaitable[object]] | None = None
        """What happens before an answer, by its number; not while steps wait."""

    async def compute(self, work: Callable[[], T], /) -> T:
        assert self.delegate is not None
        lock = self.delegate.world.region.workloads.step_lock
        self.locked.append(lock.locked())
        self.is_inside = True
        told = work()
        self.is_inside = False
        await self.gate.wait()
        if self.then is not None and not self.locked[-1]:
            await self.then(len(self.locked))
        return told

    def thread_time(self) -> float:
        self.seconds += self.took_s
        return self.seconds


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Beside:
    made = Beside()

    def answer(asked: Any, *args: Any, **options: Any) -> Any:
        assert made.is_inside, "it was computed on the loop"
        made.origins.append(asked.origin)
        return answer_solicitation(asked, *args, **options)

    monkeypatch.setattr(bidder, "answer_solicitation", answer)
    return made


@pytest.fixture
async def here(tmp_path: Path, beside: Beside) -> AsyncIterator[DelegateFixture]:
    world = await RegionFixture.open(tmp_path)
    assert not (await world.region.documents.apply([("r.yaml", TRADE)], {}, "", "test")).plan_result.problems
    beside.agent = FakeAgent(world, "edge-1")
    for agent in (beside.agent, FakeAgent(world, "gw", role=Role.GATEWAY)):
        await agent.connect()
    await world.step()
    beside.delegate = opened = await DelegateFixture.open(world, compute=beside.compute, thread_time=beside.thread_time)
    yield opened
    opened.bids.stop()
    await world.store.close()


async def ask(here: DelegateFixture, name: str, origin: str = "us-east", **changes: Any) -> Answer:
    asked = solicitation(name, origin=origin, models=(await here.profile(),), **changes)
    return await here.bids.on_solicitation(signed_message(asked, origin))


async def refusal_of(asked: Awaitable[Answer]) -> Code:
    with pytest.raises(ShoalError) as refused:
        await asked
    return refused.value.code


async def test_a_bid_is_computed_beside_the_loop_while_steps_go_on(here: DelegateFixture, beside: Beside) -> None:
    assert isinstance(await ask(here, "s-1"), Offer)
    assert isinstance(await ask(here, "s-1"), Offer)
    assert beside.locked == [False], "once, and without the lock"


async def test_what_an_origin_may_hold_is_judged_when_it_is_held(here: DelegateFixture, beside: Beside) -> None:
    async def forbid(number: int) -> None:
        less = TRADE.replace("90%", "0.01%")
        applied = await here.world.region.documents.apply([("r.yaml", less)], {}, "", "test")
        assert not applied.plan_result.problems

    beside.then = forbid
    told = await ask(here, "s-1")
    assert isinstance(told, Decline)
    assert told.refusal.code is Code.HOLD_SHARE
    assert beside.locked == [False, False]


async def test_a_node_that_changes_meanwhile_has_the_bid_computed_anew(here: DelegateFixture, beside: Beside) -> None:
    async def fill(number: int) -> None:
        if number == 1:
            await beside.agent.report(free_bytes=0)

    beside.then = fill
    told = await ask(here, "s-1")
    assert isinstance(told, Decline)
    assert told.refusal.code is Code.MEMORY_SHORT
    assert beside.locked == [False, False]
    assert here.bids.open_count == 0


async def test_the_third_time_steps_wait_for_the_bid(here: DelegateFixture, beside: Beside) -> None:
    async def change(number: int) -> None:
        await beside.agent.report(free_bytes=(1 + number) * 2**31)

    beside.then = change
    assert isinstance(await ask(here, "s-1"), Offer)
    assert beside.locked == [False, False, True]
    assert check(here.world.region.workloads.snapshot()) == ()


async def test_an_origin_has_one_bid_computed_at_a_time_and_others_have_their_turn(
    here: DelegateFixture, beside: Beside
) -> None:
    beside.gate.clear()
    asked = [asyncio.ensure_future(ask(here, f"s-{number}")) for number in range(OPEN_OF_ORIGIN)]
    await until(lambda: beside.origins, 5.0, "the first to be computed")
    other = asyncio.ensure_future(ask(here, "s-other", "us-west"))
    assert await refusal_of(ask(here, "s-beyond")) is Code.OVERLOADED
    beside.gate.set()
    assert all(isinstance(each, Offer) for each in await asyncio.gather(*asked, other))
    assert beside.origins.index("us-west") < 3
    assert isinstance(await ask(here, "s-beyond"), Offer)


async def test_a_bid_that_nobody_waits_for_any_more_is_not_computed(here: DelegateFixture, beside: Beside) -> None:
    beside.gate.clear()
    first = asyncio.ensure_future(ask(here, "s-1"))
    await until(lambda: beside.origins, 5.0, "the first to be computed")
    late = asyncio.ensure_future(ask(here, "s-2", answer_s=Seconds(1.0)))
    await until(lambda: here.bids._bidder._origins["us-east"].open_count == 2, 5.0, "the second to wait")
    here.world.clock.advance(1.1)
    beside.gate.set()
    assert await refusal_of(late) is Code.OVERLOADED
    assert isinstance(await first, Offer)
    assert len(beside.origins) == 1


async def test_what_takes_long_to_compute_may_be_asked_for_less_often(here: DelegateFixture, beside: Beside) -> None:
    beside.took_s = 1.0
    answers = [await ask(here, f"s-{number}") for number in range(3)]
    assert all(isinstance(each, Offer) for each in answers)
    assert await refusal_of(ask(here, "s-3")) is Code.OVERLOADED
    assert isinstance(await ask(here, "s-3", "us-west"), Offer), "another region is charged for its own"
    here.world.clock.advance(2.0)
    assert isinstance(await ask(here, "s-4"), Offer)


async def test_an_origin_that_asks_again_at_once_has_half_of_the_time(here: DelegateFixture, beside: Beside) -> None:
    """Time goes on while bids are computed."""
    clock, beside.took_s, busy_s = here.world.clock, 0.8, 0.0

    async def pass_time(number: int) -> None:
        clock.advance(beside.took_s)

    beside.then = pass_time
    for number in range(2):
        began, busy_s = clock.now(), 0.0
        while clock.now() < began + 60:
            before = len(beside.locked)
            with suppress(ShoalError):  # OVERLOADED
                await ask(here, f"s-{clock.now()}", indicative=True)
            busy_s += beside.took_s * (len(beside.locked) - before)
            clock.advance(0.05)
        if number:  # the first minute has what may come at once
            assert 0.4 < busy_s / (clock.now() - began) < 0.55


async def test_a_bid_that_is_ready_too_late_holds_nothing(here: DelegateFixture, beside: Beside) -> None:
    async def pass_time(number: int) -> None:
        here.world.clock.advance(1.8)

    beside.then = pass_time
    assert await refusal_of(ask(here, "s-1", answer_s=Seconds(1.0))) is Code.OVERLOADED
    assert here.bids.open_count == 0
    assert beside.locked == [False], "and is not computed again"


async def test_what_an_origin_gives_up_meanwhile_has_no_bid_computed_anew(
    here: DelegateFixture, beside: Beside
) -> None:
    """Otherwise it could have each bid computed while steps wait."""
    held = [await ask(here, f"s-{number}") for number in range(3)]

    async def release(number: int) -> None:
        offer = held.pop()
        assert isinstance(offer, Offer)
        await here.bids.on_release(signed_message(Release(offer.solicitation, offer.id, "us-east"), "us-east"))

    beside.locked.clear()
    beside.then = release
    assert isinstance(await ask(here, "s-3"), Offer)
    assert beside.locked == [False]
    assert check(here.world.region.workloads.snapshot()) == ()


async def test_who_is_not_traded_with_takes_no_turn(here: DelegateFixture, beside: Beside) -> None:
    beside.gate.clear()
    first = asyncio.ensure_future(ask(here, "s-1"))
    await until(lambda: beside.origins, 5.0, "the first to be computed")
    told = await ask(here, "s-2", "ap-south")
    assert isinstance(told, Decline)
    assert told.refusal.code is Code.TRADE_DENIED
    beside.gate.set()
    await first
