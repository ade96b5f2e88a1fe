"""The relays between the machines of a local federation, in front of an echo on a port of one member."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from harness.ports import free_ports
from harness.wait import until
from shoal.devstack import layout
from shoal.devstack.layout import Member, Stack
from shoal.devstack.roads import SLOW_BYTES_PER_S, Faults, Roads

NAME, OTHER = "edge", "hub"
SOON_S = 5.0
NOT_YET_S = 0.3


@asynccontextmanager
async def echo(port: int) -> AsyncIterator[None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, layout.HERE, port)
    async with server:
        yield


class Road:
    """One road, and connections over it from this process."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        member = Member(NAME, "agent", "", {}, {"grpc": f"{layout.HERE}:{self.port}"})
        self.roads = Roads(Stack("home", (member,), 1.0))

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(layout.ROAD, self.port)


@pytest.fixture
async def road() -> AsyncIterator[Road]:
    found = Road()
    await found.roads.open()
    yield found
    found.roads.tell(Faults())
    found.roads.close()


async def answer(reader: asyncio.StreamReader, length: int, within_s: float = SOON_S) -> bytes:
    async with asyncio.timeout(within_s):
        return await reader.readexactly(length)


async def nothing_comes(reader: asyncio.StreamReader) -> None:
    with pytest.raises(TimeoutError):
        await answer(reader, 1, NOT_YET_S)


async def test_what_is_sent_is_carried_both_ways_and_so_is_the_end(road: Road) -> None:
    async with echo(road.port):
        reader, writer = await road.dial()
        writer.write(b"hello")
        assert await answer(reader, 5) == b"hello"
        writer.write_eof()
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""


async def test_where_nobody_listens_the_caller_is_refused(road: Road) -> None:
    reader, _ = await road.dial()
    async with asyncio.timeout(SOON_S):
        with suppress(ConnectionResetError):  # whether it or an end of file is seen is the kernel's choice
            assert await reader.read() == b""


@pytest.mark.parametrize("who", ["target", "source"])
async def test_cut_resets_nothing_and_what_waited_comes_in_order(road: Road, who: str) -> None:
    """The source is known by its process."""
    cut = Faults(frozenset({NAME if who == "target" else OTHER}), pids={OTHER: (os.getpid(),)})
    async with echo(road.port):
        reader, writer = await road.dial()
        writer.write(b"1")
        assert await answer(reader, 1) == b"1"
        road.roads.tell(cut)
        writer.write(b"2")
        await nothing_comes(reader)
        later, latest = await road.dial()
        latest.write(b"x")
        await nothing_comes(later)
        writer.write(b"3")
        road.roads.tell(Faults())
        assert await answer(reader, 2) == b"23"
        assert await answer(later, 1) == b"x"


async def test_of_an_end_that_hangs_up_nobody_hears_before_the_road_heals(road: Road) -> None:
    async with echo(road.port):
        first, hung_up = await road.dial()
        hung_up.write(b"1")
        assert await answer(first, 1) == b"1"
        road.roads.tell(Faults(frozenset({NAME})))
        hung_up.transport.abort()
        with pytest.raises(AssertionError, match="not within"):
            await until(lambda: not road.roads.trips, NOT_YET_S, "the road to notice")
        road.roads.tell(Faults())
        await until(lambda: not road.roads.trips, SOON_S, "the road to notice")


async def test_who_is_not_broken_is_carried_past_who_is(road: Road) -> None:
    async with echo(road.port):
        reader, writer = await road.dial()
        road.roads.tell(Faults(frozenset({OTHER})))
        writer.write(b"1")
        assert await answer(reader, 1) == b"1"


async def test_slow_is_its_rate_both_ways_together(road: Road) -> None:
    size = SLOW_BYTES_PER_S // 4
    async with echo(road.port):
        reader, writer = await road.dial()
        road.roads.tell(Faults(slow=frozenset({NAME})))
        loop = asyncio.get_running_loop()
        start = loop.time()
        writer.write(bytes(size))
        assert await answer(reader, size) == bytes(size)
        assert loop.time() - start >= 0.9 * 2 * size / SLOW_BYTES_PER_S


def test_what_is_told_is_what_is_heard() -> None:
    faults = Faults(frozenset({"a"}), frozenset({"b"}), {"a": (1, 2), "b": ()})
    assert Faults.parse(faults.line()) == faults
