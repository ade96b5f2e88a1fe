"""Connections of a `TlsListener` on asyncio's streams, each served in a task of its own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

from shoal.host.connections import Connection, Connections

CHUNK_BYTES: Final = 256 * 2**10
"""Bytes read or written at once of a body."""
HEAD_READ_BYTES: Final = 8 * 2**10
"""Bytes read at once of a head, few, so that a head is found too large before much of it is held."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Connection], Coroutine[None, None, None]]


class TlsStreams:
    """serve: called in a task for each connection, after its handshake; the place in `connections` is given back when
    it returns."""

    def __init__(self, connections: Connections, serve: Serve) -> None:
        self._connections = connections
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """Of the open connections."""
        return tuple(self._tasks)

    def protocol(self, place: Connection) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Protocol(
            asyncio.StreamReader(limit=CHUNK_BYTES), lambda reader, writer: self._begin(reader, writer, place)
        )

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection) -> None:
        task = asyncio.create_task(self._serve(reader, writer, place))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._on_done(task, place))

    def _on_done(self, task: asyncio.Task[None], place: Connection) -> None:
        self._tasks.discard(task)
        self._connections.remove(place)


class _Protocol(asyncio.StreamReaderProtocol):
    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            drop_frames(exc)
        super().connection_lost(exc)


def drop_frames(error: BaseException) -> None:
    """A stream keeps why its connection ended, with the frames that it was raised in, and these have the stream: a
    cycle of all that the connection held, which no reference count frees."""
    error.with_traceback(None).__context__ = None
