"""The relays between the machines of a local federation, in front of an echo on a port of one member."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from harness.ports import free_ports
from harness.wait import until
from shoal.devstack import layout
from shoal.devstack.layout import StackLayout, StackMember
from shoal.devstack.link_shaping import SLOW_BYTES_PER_S, LinkFaults, LinkRelays, RelayedConnection

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

    server = await asyncio.start_server(serve, layout.MEMBER_HOST, port)
    async with server:
        yield


class RelayFixture:
    """One road, and connections over it from this process."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        member = StackMember(NAME, "agent", "", {}, {"data": f"{layout.MEMBER_HOST}:{self.port}"})
        self.roads = LinkRelays(StackLayout("home", (member,), 1.0))

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(layout.RELAY_HOST, self.port)


@pytest.fixture
async def relay() -> AsyncIterator[RelayFixture]:
    found = RelayFixture()
    await found.roads.open()
    yield found
    found.roads.apply_faults(LinkFaults())
    found.roads.close()


async def answer(reader: asyncio.StreamReader, length: int, within_s: float = SOON_S) -> bytes:
    async with asyncio.timeout(within_s):
        return await reader.readexactly(length)


async def nothing_comes(reader: asyncio.StreamReader) -> None:
    with pytest.raises(TimeoutError):
        await answer(reader, 1, NOT_YET_S)


async def test_what_is_sent_is_carried_both_ways_and_so_is_the_end(relay: RelayFixture) -> None:
    async with echo(relay.port):
        reader, writer = await relay.dial()
        writer.write(b"hello")
        assert await answer(reader, 5) == b"hello"
        writer.write_eof()
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""


async def test_both_legs_of_a_relay_send_at_once(relay: RelayFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nagle's algorithm with delayed acknowledgements holds a message that is written in two parts for 40 ms."""
    legs = dict[tuple[str, int], int]()
    pump = LinkRelays._pump

    async def record_nodelay(
        self: LinkRelays, trip: RelayedConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        leg = writer.get_extra_info("socket")
        legs[leg.getpeername()] = leg.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await pump(self, trip, reader, writer)

    monkeypatch.setattr(LinkRelays, "_pump", record_nodelay)
    async with echo(relay.port):
        reader, writer = await relay.dial()
        writer.write(b"hello")
        await answer(reader, 5)
        caller = writer.get_extra_info("sockname")
        assert legs == {caller: 1, (layout.MEMBER_HOST, relay.port): 1}
        writer.close()


async def test_a_stack_without_relays_has_none() -> None:
    member = StackMember(NAME, "agent", "", {}, {"data": f"{layout.MEMBER_HOST}:{free_ports(1)[0]}"})
    stack = StackLayout("home", (member,), 1.0, relayed=False)
    assert stack.dial_address(member.addresses["data"]) == member.addresses["data"]
    roads = LinkRelays(stack)
    await roads.open()
    with pytest.raises(OSError):
        await asyncio.open_connection(layout.RELAY_HOST, int(member.addresses["data"].rpartition(":")[2]))
    roads.close()


async def test_where_nobody_listens_the_caller_is_refused(relay: RelayFixture) -> None:
    reader, _ = await relay.dial()
    async with asyncio.timeout(SOON_S):
        with suppress(ConnectionResetError):  # whether it or an end of file is seen is the kernel's choice
            assert await reader.read() == b""


@pytest.mark.parametrize("who", ["target", "source"])
async def test_cut_resets_nothing_and_what_waited_comes_in_order(relay: RelayFixture, who: str) -> None:
    """The source is known by its process."""
    cut = LinkFaults(frozenset({NAME if who == "target" else OTHER}), pids={OTHER: (os.getpid(),)})
    async with echo(relay.port):
        reader, writer = await relay.dial()
        writer.write(b"1")
        assert await answer(reader, 1) == b"1"
        relay.roads.apply_faults(cut)
        writer.write(b"2")
        await nothing_comes(reader)
        later, latest = await relay.dial()
        latest.write(b"x")
        await nothing_comes(later)
        writer.write(b"3")
        relay.roads.apply_faults(LinkFaults())
        assert await answer(reader, 2) == b"23"
        assert await answer(later, 1) == b"x"


async def test_of_an_end_that_hangs_up_nobody_hears_before_the_road_heals(relay: RelayFixture) -> None:
    async with echo(relay.port):
        first, hung_up = await relay.dial()
        hung_up.write(b"1")
        assert await answer(first, 1) == b"1"
        relay.roads.apply_faults(LinkFaults(frozenset({NAME})))
        hung_up.transport.abort()
        with pytest.raises(AssertionError, match="not within"):
            await until(lambda: not relay.roads.connections, NOT_YET_S, "the road to notice")
        relay.roads.apply_faults(LinkFaults())
        await until(lambda: not relay.roads.connections, SOON_S, "the road to notice")


async def test_who_is_not_broken_is_carried_past_who_is(relay: RelayFixture) -> None:
    async with echo(relay.port):
        reader, writer = await relay.dial()
        relay.roads.apply_faults(LinkFaults(frozenset({OTHER})))
        writer.write(b"1")
        assert await answer(reader, 1) == b"1"


async def test_slow_is_its_rate_both_ways_together(relay: RelayFixture) -> None:
    size = SLOW_BYTES_PER_S // 4
    async with echo(relay.port):
        reader, writer = await relay.dial()
        relay.roads.apply_faults(LinkFaults(slow=frozenset({NAME})))
        loop = asyncio.get_running_loop()
        start = loop.time()
        writer.write(bytes(size))
        assert await answer(reader, size) == bytes(size)
        assert loop.time() - start >= 0.9 * 2 * size / SLOW_BYTES_PER_S


def test_what_is_told_is_what_is_heard() -> None:
    faults = LinkFaults(frozenset({"a"}), frozenset({"b"}), {"a": (1, 2), "b": ()})
    assert LinkFaults.parse(faults.to_line()) == faults
