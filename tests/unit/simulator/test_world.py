"""Processes die at any step, and nothing they do afterwards has an effect."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import ProcessDead, SimProcess, SimWorld


def in_world(main: Callable[[SimWorld], Coroutine[Any, Any, None]], seed: int = 1) -> SimWorld:
    worlds: list[SimWorld] = []

    async def start(loop: VirtualLoop) -> None:
        worlds.append(SimWorld(loop, seed))
        await main(worlds[0])

    run(start)
    return worlds[0]


def test_death_ends_every_task_of_a_process_and_no_other() -> None:
    async def main(world: SimWorld) -> None:
        ended: list[str] = []

        async def work(name: str) -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(100.0))
            finally:
                ended.append(name)

        victim, other = SimProcess(world, "victim"), SimProcess(world, "other")
        victim.spawn(work("victim"), "work")
        other.spawn(work("other"), "work")
        await asyncio.sleep(1.0)
        victim.die()
        await asyncio.sleep(1.0)
        assert ended == ["victim"]
        with pytest.raises(ProcessDead):
            victim.gate("anything")

    in_world(main)


def test_an_armed_process_dies_at_that_very_step() -> None:
    async def main(world: SimWorld) -> None:
        done: list[int] = []
        process = SimProcess(world, "victim")
        process.steps_to_live = 3

        async def work() -> None:
            for number in range(10):
                process.gate(f"step {number}")
                done.append(number)
                await asyncio.sleep(0.1)

        process.spawn(work(), "work")
        await asyncio.sleep(5.0)
        assert done == [0, 1]
        assert [event.facts["where"] for event in world.history.events if event.kind == "fault.killed"] == ["step 2"]

    in_world(main)


def test_a_process_that_fails_by_itself_fails_the_run() -> None:
    async def main(world: SimWorld) -> None:
        async def work() -> None:
            raise ZeroDivisionError

        process = SimProcess(world, "victim")
        process.spawn(work(), "work")
        await asyncio.sleep(1.0)
        assert not process.alive

    assert "ZeroDivisionError" in in_world(main).failures[0]
