"""The virtual loop: time jumps, order repeats, and nothing leaves the simulation."""

import asyncio

import pytest

from shoal.simulator.world.loop import Deadlock, EscapedSimulation, Livelock, VirtualLoop, run


def test_an_hour_passes_at_once() -> None:
    async def main(loop: VirtualLoop) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(3600.0))
            group.create_task(asyncio.sleep(7.0))
        return loop.time()

    assert run(main) == 3600.0


def test_timeouts_and_queues_work_on_virtual_time() -> None:
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Queue[int]().get(), 2.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.sleep(9.0)
        return loop.time()

    assert run(main) == 4.0


def test_sets_of_tasks_are_walked_in_the_order_of_creation() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        async def give(number: int) -> int:
            await asyncio.sleep(1.0 / (number + 1))
            return number

        done, _ = await asyncio.wait([asyncio.ensure_future(give(number)) for number in range(30)])
        return [task.result() for task in done]

    assert run(main) == list(range(30))


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Deadlock, match="main"):
        run(main)


def test_standing_still_is_a_livelock() -> None:
    async def main(loop: VirtualLoop) -> None:
        while loop.time() == 0.0:  # noqa: ASYNC110 - the very thing to be caught
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(main)


def test_threads_sockets_and_processes_are_refused() -> None:
    async def main(loop: VirtualLoop) -> None:
        with pytest.raises(EscapedSimulation):
            await asyncio.to_thread(print)
        with pytest.raises(EscapedSimulation):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(EscapedSimulation):
            await asyncio.create_subprocess_exec("true")

    run(main)
