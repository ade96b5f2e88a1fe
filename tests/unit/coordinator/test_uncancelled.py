"""Work that is finished before its caller's cancellation goes on."""

import asyncio
import gc
from typing import Any

import pytest

from shoal.coordinator.uncancelled import run_to_completion


async def test_a_cancelled_caller_waits_for_the_end() -> None:
    begun, may_end, steps = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        steps.append("committed")
        await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
        steps.append("remembered")

    caller = asyncio.create_task(run_to_completion(work()))
    await begun.wait()
    caller.cancel()
    await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
    caller.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["committed", "remembered"]


async def test_what_goes_wrong_after_its_caller_has_left_is_nobodys() -> None:
    told = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        raise ValueError("too late")

    caller = asyncio.create_task(run_to_completion(work()))
    await begun.wait()
    caller.cancel()
    may_end.set()
    await asyncio.wait([caller])
    assert caller.cancelled()
    del caller
    gc.collect()
    assert told == []


async def test_results_and_errors_pass_through() -> None:
    async def seven() -> int:
        return 7

    async def wrong() -> int:
        raise ValueError("wrong")

    assert await run_to_completion(seven()) == 7
    with pytest.raises(ValueError, match="wrong"):
        await run_to_completion(wrong())
