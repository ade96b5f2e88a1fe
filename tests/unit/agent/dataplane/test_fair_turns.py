"""Requests that wait at a front for their turn between tenants."""

import asyncio

import pytest

from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.request_router import RequestRouter
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.fair_turns import FairTurns
from shoal.agent.dataplane.in_flight import InFlightRequest
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

CLOCK = SystemClock()
SLOTS = 2


def turns_of(slots: int = SLOTS) -> FairTurns:
    return FairTurns(RequestRouter(AdmissionLimits(), Seconds(60.0)), slots, CLOCK)


def request_of(tenant: str, within_s: float = 30.0, hop: int = 0) -> InFlightRequest:
    now = CLOCK.now()
    caller = Caller(tenant, Role.TENANT, tenant, hop, "gw")
    return InFlightRequest(WorkloadKey(tenant, "m"), caller, "r", "", b"", now, Elapsed(now + within_s))


async def full(turns: FairTurns) -> list[InFlightRequest]:
    """All slots taken by one tenant, and another one seen just before."""
    first = request_of("b")
    assert turns.enter(first)
    turns.leave(first)
    taken = [request_of("a") for _ in range(SLOTS)]
    assert all(map(turns.enter, taken))
    return taken


async def waiting(turns: FairTurns, request: InFlightRequest) -> asyncio.Task[None]:
    assert not turns.enter(request)
    task, before = asyncio.create_task(turns.wait(request)), turns.waiting
    await until(lambda: turns.waiting > before, 5, "it waits")
    return task


async def test_a_slot_that_is_left_goes_to_the_first_that_waits() -> None:
    turns = turns_of()
    inside = await full(turns)
    first, second = await waiting(turns, request_of("a")), await waiting(turns, request_of("a"))
    turns.leave(inside[0])
    await first
    assert not second.done()
    turns.leave(inside[1])
    await second
    assert turns.waiting == 0


async def test_a_forward_does_not_wait_and_takes_a_slot() -> None:
    turns = turns_of()
    inside = await full(turns)
    forward = request_of("a", hop=1)
    assert turns.enter(forward)
    late = await waiting(turns, request_of("a"))
    turns.leave(inside[0])
    assert turns.waiting == 1, "as many as there are slots are still inside"
    turns.leave(forward)
    await late


async def test_whose_turn_does_not_come_in_time_is_refused_and_forgotten() -> None:
    turns = turns_of()
    inside = await full(turns)
    late = request_of("a", within_s=0.01)
    assert not turns.enter(late)
    with pytest.raises(ShoalError) as refused:
        await turns.wait(late)
    assert refused.value.code is Code.DEADLINE_EXCEEDED
    assert turns.waiting == 0
    next_one = await waiting(turns, request_of("a"))
    turns.leave(inside[0])
    await next_one


@pytest.mark.parametrize("is_turn", [False, True])
async def test_a_caller_that_hangs_up_leaves_its_place_or_its_slot(is_turn: bool) -> None:
    turns = turns_of()
    inside = await full(turns)
    gone, after = await waiting(turns, request_of("a")), await waiting(turns, request_of("a"))
    if is_turn:
        turns.leave(inside.pop())  # its turn comes in the moment in which it is cancelled
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    if not is_turn:
        assert turns.waiting == 1
        turns.leave(inside.pop())
    await after  # else what the first did not use is the second's
    assert turns.waiting == 0
