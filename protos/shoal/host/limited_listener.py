"""A TCP port whose connections are counted before TLS: one beyond the limits costs no handshake.

HTTP servers start TLS themselves, on a connection that has a place.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final, cast

from shoal.host import file_descriptors
from shoal.host.connections import Connection, Connections

CHUNK_BYTES: Final = 256 * 2**10
"""Bytes read or written at once of a body."""
HEAD_READ_BYTES: Final = 8 * 2**10
"""Bytes read at once of a head, few, so that a head is found too large before much of it is held."""


class LimitedListener:
    """Listens on one port.

    connections: the limits. serve: called in a task for each connection that has a place, which is given back when it
    returns. Nothing of the connection has been read then: its first bytes are the handshake's.
    """

    def __init__(
        self,
        connections: Connections,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, Connection], Coroutine[None, None, None]],
    ) -> None:
        self._connections = connections
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """Of the open connections."""
        return tuple(self._tasks)

    async def start(self, host: str, port: int, *, backlog: int, reuse_port: bool = False) -> int:
        """The port it listens on. backlog: connections that wait in the kernel to be accepted. Raises OSError."""
        self._server = await asyncio.start_server(
            self._accept,
            host,
            port,
            limit=CHUNK_BYTES,
            backlog=file_descriptors.ACCEPTS_PER_TURN,
            reuse_port=reuse_port,
        )
        file_descriptors.set_backlog(self._server, backlog)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more; open connections go on."""
        if self._server is not None:
            self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()

        def close() -> None:
            writer.transport.abort()
            task.cancel()

        place = self._connections.add(str(writer.get_extra_info("peername", ("",))[0]), close)
        if place is None:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._run(reader, writer, place))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._on_done(task, place))

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection) -> None:
        transport = cast(asyncio.Transport, writer.transport)
        # Python 3.11.2 (Debian 12) keeps reading although the transport was paused when the connection was made. This
        # pair of calls stops it.
        transport.resume_reading()
        transport.pause_reading()
        await self._serve(reader, writer, place)

    def _on_done(self, task: asyncio.Task[None], place: Connection) -> None:
        self._tasks.discard(task)
        self._connections.remove(place)
