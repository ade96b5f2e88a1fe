"""The bytes of a connection: taken without loss, reading paused while nobody takes them, waits that end."""

import asyncio

import pytest

from shoal.agent.dataplane.byte_stream import MAX_UNREAD, ByteStream
from shoal.types.units import Seconds

SOON = Seconds(0.01)
LONG = Seconds(10.0)


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_reading_ = True

    def pause_reading(self) -> None:
        self.is_reading_ = False

    def resume_reading(self) -> None:
        self.is_reading_ = True


def open_stream() -> tuple[ByteStream, Transport]:
    stream, transport = ByteStream(), Transport()
    stream.connection_made(transport)
    return stream, transport


async def test_bytes_come_as_they_were_sent_and_reading_pauses_while_they_wait() -> None:
    stream, transport = open_stream()
    stream.data_received(b"a" * MAX_UNREAD)
    assert transport.is_reading_
    stream.data_received(b"b")
    assert not transport.is_reading_
    assert await stream.more(LONG)
    taken = stream.take(MAX_UNREAD - 1)
    assert transport.is_reading_
    assert bytes(taken + stream.take(7)) == b"a" * MAX_UNREAD + b"b"


async def test_who_waits_is_woken_by_bytes_by_the_end_and_by_the_time() -> None:
    stream, _ = open_stream()
    with pytest.raises(TimeoutError):
        await stream.more(SOON)
    waiting = asyncio.create_task(stream.more(LONG))
    await asyncio.wait((waiting,), timeout=SOON)
    assert stream.is_waiting
    stream.data_received(b"x")
    assert await waiting
    stream.take(1)
    waiting = asyncio.create_task(stream.more(LONG))
    await asyncio.wait((waiting,), timeout=SOON)
    stream.connection_lost(None)
    assert not await waiting
    assert not await stream.more(LONG)


async def test_who_writes_waits_while_the_peer_takes_nothing() -> None:
    stream, _ = open_stream()
    assert await stream.drain(LONG)
    stream.pause_writing()
    with pytest.raises(TimeoutError):
        await stream.drain(SOON)
    waiting = asyncio.create_task(stream.drain(LONG))
    await asyncio.wait((waiting,), timeout=SOON)
    stream.resume_writing()
    assert await waiting
    stream.pause_writing()
    waiting = asyncio.create_task(stream.drain(LONG))
    await asyncio.wait((waiting,), timeout=SOON)
    stream.connection_lost(None)
    assert not await waiting
