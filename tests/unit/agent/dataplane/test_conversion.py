"""Conversions on the loop: whose turn it is, and what happens meanwhile."""

import asyncio
import threading
from collections.abc import Generator

import pytest

from shoal.agent.dataplane import conversion
from shoal.agent.dataplane.conversion import INLINE_BYTES, LOOP_BYTES, Conversions

LARGE = INLINE_BYTES + 1


def steps(name: str, count: int, done: list[str]) -> Generator[None, None, str]:
    for _ in range(count):
        done.append(name)
        yield
    return name


async def test_a_small_body_is_converted_at_once() -> None:
    done: list[str] = []
    work = Conversions().run("a", INLINE_BYTES, steps("a", 3, done))
    with pytest.raises(StopIteration) as over:
        work.send(None)
    assert (over.value.value, done) == ("a", ["a"] * 3)


async def test_callers_alternate_and_the_loop_goes_on_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "TURN_S", 0.0)  # a turn is one step
    conversions, done = Conversions(), list[str]()
    loop = asyncio.get_running_loop()

    def note_round(left: int) -> None:
        done.append("-")
        if left:
            loop.call_soon(note_round, left - 1)

    note_round(100)
    async with asyncio.TaskGroup() as group:
        for name in ("a", "a", "b"):
            group.create_task(conversions.run(name, LARGE, steps(name, 4, done)))
    rounds = "".join(done).rstrip("-").split("-")
    assert all(len(each) <= 1 for each in rounds), "one step in each round of the loop"
    turns = "".join(rounds)
    assert sorted(turns) == ["a"] * 8 + ["b"] * 4
    assert "aaa" not in turns[: turns.rindex("b")], "a caller with two bodies gets no more than the other"
    assert turns[:8].count("b") >= 3
    assert not conversions._inside
    assert not conversions._locks


async def test_the_largest_are_converted_in_a_thread() -> None:
    conversions, threads = Conversions(), set[str]()

    def note_thread() -> Generator[None, None, str]:
        threads.add(threading.current_thread().name)
        yield
        return "done"

    assert await conversions.run("a", LOOP_BYTES + 1, note_thread()) == "done"
    assert threads != {threading.current_thread().name}
    conversions.close()


@pytest.mark.parametrize("size", [LARGE, LOOP_BYTES + 1])
async def test_who_leaves_takes_no_more_turns(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(conversion, "TURN_S", 0.0)
    conversions, done = Conversions(), list[str]()
    leaving = asyncio.create_task(conversions.run("a", size, steps("a", 10**9, done)))
    staying = asyncio.create_task(conversions.run("b", size, steps("b", 3, done)))
    assert await staying == "b"
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await conversions.run("a", size, steps("c", 3, done)) == "c"
    conversions.close()
