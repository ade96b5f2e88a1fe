"""What one caller may hold of a transport: it is bounded, and others do not wait for it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.agent.dataplane import intake as module
from shoal.agent.dataplane.intake import BYTES_PER_CALLER, CALLS_PER_CALLER, PLACES_PER_CALLER, Intake
from shoal.types.codes import Code, ShoalError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_S", 0.15)
    monkeypatch.setattr(module, "MOST_S", 30.0)


async def drip(intake: Intake, caller: str, inside: asyncio.Event | None = None) -> Code:
    """A message that never comes; how that ends."""
    with intake.call(caller):
        try:
            async with intake.place(caller, 30.0):
                if inside is not None:
                    inside.set()
                await asyncio.Event().wait()
        except ShoalError as error:
            return error.code
    raise AssertionError


async def quickly(intake: Intake, caller: str) -> float:
    """Seconds until a message that is there at once has been read."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    with intake.call(caller):
        async with intake.place(caller):
            pass
    return loop.time() - start


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, Code]) -> AsyncIterator[list[asyncio.Task[Code]]]:
    tasks = [asyncio.create_task(each) for each in work]
    await asyncio.gather(*(asyncio.wait([task], timeout=0) for task in tasks))
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_drips_keeps_its_place_until_somebody_waits() -> None:
    intake = Intake()
    async with running(*(drip(intake, "slow") for _ in range(PLACES_PER_CALLER))) as tasks:
        await asyncio.wait(tasks, timeout=0.3)
        assert not any(task.done() for task in tasks), "nobody waits, so it may take its time"
        await quickly(intake, "slow")
        assert {await task for task in tasks} == {Code.TOO_SLOW}
    assert not intake._held, "nothing is left of callers that are gone"


async def test_a_slow_caller_costs_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    intake = Intake()
    async with running(*(drip(intake, "slow") for _ in range(CALLS_PER_CALLER))):
        assert await quickly(intake, "victim") < 0.5


async def test_many_slow_callers_give_way_within_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim is neither refused nor behind those who came before it and already have places."""
    monkeypatch.setattr(module, "PATIENCE_S", 30.0)
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    intake = Intake()
    async with running(*(drip(intake, f"slow-{n % 8}") for n in range(8 * PLACES_PER_CALLER))) as tasks:
        await quickly(intake, "victim")
        assert sum(task.done() for task in tasks) <= module.PLACES, "only those of the first turn have gone"


async def test_who_stops_waiting_takes_no_place_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 30.0)
    intake = Intake()
    for _ in range(3):
        async with running(*(drip(intake, f"slow-{n % 8}") for n in range(8 * PLACES_PER_CALLER))):
            pass
    async with running(*(drip(intake, f"slow-{n % 8}") for n in range(module.PLACES - 1))) as tasks:
        await quickly(intake, "victim")
        assert not any(task.done() for task in tasks), "there was a place for everybody"


async def test_who_finds_no_place_is_told_in_time() -> None:
    intake = Intake()
    async with running(*(drip(intake, "slow") for _ in range(5 * PLACES_PER_CALLER))) as tasks:
        codes = [await task for task in tasks]
    assert set(codes) == {Code.TOO_SLOW, Code.OVERLOADED}


def test_calls_and_streams_are_counted_by_caller() -> None:
    intake = Intake()
    held = [intake.call("a") for _ in range(CALLS_PER_CALLER)]
    for each in held:
        each.__enter__()
    with pytest.raises(ShoalError) as refused, intake.call("a"):
        pass
    assert refused.value.code is Code.OVERLOADED
    with intake.call("b"):
        pass
    held.pop().__exit__(None, None, None)
    with intake.call("a"):
        pass
    streams = [intake.call("b", stream=True) for _ in range(module.STREAMS_PER_CALLER)]
    for each in streams:
        each.__enter__()
    with pytest.raises(ShoalError), intake.call("b", stream=True):
        pass
    with intake.call("b"):
        pass


def test_answers_that_are_not_read_are_bounded() -> None:
    intake = Intake()
    with intake.call("a"):
        with intake.unread("a", 2 * BYTES_PER_CALLER):
            pass
        with intake.unread("a", BYTES_PER_CALLER - 1), intake.unread("a", 1):
            with pytest.raises(ShoalError) as refused, intake.unread("a", 1):
                pass
            assert refused.value.code is Code.OVERLOADED
        with intake.unread("a", 1):
            pass
