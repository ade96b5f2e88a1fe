"""Timeouts that count only the time in which this process ran."""

import gc
import weakref
from contextlib import suppress

import pytest

from shoal.agent.timeouts import within
from shoal.types.codes import Code, ShoalError, refuse


class Held:
    """What a frame on an error's way holds, such as a connection with its buffers."""


async def test_an_error_waits_for_no_collector() -> None:
    """A task holds its error, and the error the frames that it went through."""
    held = list[weakref.ref[Held]]()

    async def fail() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        raise refuse(Code.OVERLOADED, "full", "room", "retry")

    gc.disable()
    try:
        with suppress(ShoalError):
            await within(5.0, fail())
        assert held[0]() is None
    finally:
        gc.enable()


async def test_an_answer_comes_back_and_so_does_an_error() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ValueError

    assert await within(5.0, answer()) == 7
    with pytest.raises(ValueError):
        await within(5.0, fail())
