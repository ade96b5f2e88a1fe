"""Relays between the members of a local federation, which `shoal dev break` cuts and slows.

Each member listens on 127.0.0.1. The others reach it on 127.0.0.2, at the same port, through a relay of this process.
So cutting a link needs no privileges, and a client on 127.0.0.1 still reaches a member that the others do not reach.

`python -m shoal.devstack.link_shaping FOLDER` is a child of the process supervisor, which writes the desired faults to
its stdin, one JSON object a line: `{"cut": [NAME..], "slow": [NAME..], "pids": {NAME: [PID..]}}`. It ends with its
supervisor.

A cut resets nothing. Sent data waits in the sender's buffers, a new connection is accepted but not answered, and a
hang-up becomes visible only after the link heals. A network that drops every packet looks the same over TCP, except
that there the handshake of a new connection fails.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from shoal.devstack import layout
from shoal.devstack.layout import StackLayout
from shoal.types.address import HostPort

SLOW_BYTES_PER_S: Final = 128 * 2**10
CHUNK_BYTES: Final = 16 * 2**10
SOCKET_BUFFER_BYTES: Final = 64 * 2**10
"""Kernel buffer, per direction and side; small, because data queued on a slow link arrives late."""


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """The desired faults of all links."""

    # Names of members that nothing reaches.
    cut: frozenset[str] = frozenset()
    # Names of members whose links are throttled.
    slow: frozenset[str] = frozenset()
    # Processes of each broken member, which identify the connections that it dialled itself.
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> "LinkFaults":
        told = json.loads(line)
        pids = {name: tuple(found) for name, found in told["pids"].items()}
        return cls(frozenset(told["cut"]), frozenset(told["slow"]), pids)

    def to_line(self) -> bytes:
        told = {"cut": sorted(self.cut), "slow": sorted(self.slow), "pids": {**self.pids}}
        return json.dumps(told).encode() + b"\n"


@dataclass(slots=True, eq=False)
class RelayedConnection:
    """One connection through a relay."""

    # Member that was dialled.
    target: str
    # Local port of the dialling side.
    port: int
    # Member that dialled; empty unless that member is broken.
    source: str = ""


class LinkRelays:
    """A relay in front of every port of every member. Everything runs on one event loop."""

    def __init__(self, stack: StackLayout) -> None:
        self._stack = stack
        self._faults = LinkFaults()
        self._faults_changed = asyncio.Event()
        self.connections: set[RelayedConnection] = set()
        self._send_allowed_at: dict[str, float] = {}
        self._servers: list[asyncio.Server] = []

    async def open(self) -> None:
        """Raises OSError if a relay's address is taken."""
        for member in self._stack.members:
            for address in member.addresses.values():
                road = self._stack.dial_address(address)
                if road != address:
                    listening = _listener(HostPort.parse(road))
                    taker = self._connection_handler(member.name, address)
                    self._servers.append(await asyncio.start_server(taker, sock=listening, limit=SOCKET_BUFFER_BYTES))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def apply_faults(self, faults: LinkFaults) -> None:
        """Set the faults from now on, for open connections as well."""
        self._faults = faults
        ports = _local_ports(faults.pids)
        for trip in self.connections:
            trip.source = ports.get(trip.port, "")
        self._faults_changed.set()
        self._faults_changed = asyncio.Event()

    def _connection_handler(
        self, target: str, address: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            trip = RelayedConnection(target, writer.get_extra_info("peername")[1])
            if self._faults.pids:
                trip.source = _local_ports(self._faults.pids).get(trip.port, "")
            self.connections.add(trip)
            try:
                await self._relay(trip, address, reader, writer)
            finally:
                self.connections.discard(trip)

        return on_connection

    async def _relay(
        self, trip: RelayedConnection, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._wait_uncut(trip)
        try:
            upstream_reader, upstream_writer = await _dial(address)
        except OSError:
            writer.transport.abort()  # nothing listens there: reset the caller's connection
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(trip, reader, upstream_writer))
                group.create_task(self._pump(trip, upstream_reader, writer))
        except* OSError:
            pass
        finally:
            for side in (writer, upstream_writer):
                side.transport.abort()

    async def _pump(self, trip: RelayedConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises OSError when either end is gone, as soon as the faults let the other end notice."""
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._wait_uncut(trip)
                await self._throttle(trip, len(data))
                writer.write(data)
                await writer.drain()
        except OSError:
            await self._wait_uncut(trip)
            raise
        await self._wait_uncut(trip)
        writer.write_eof()

    async def _wait_uncut(self, trip: RelayedConnection) -> None:
        while not self._faults.cut.isdisjoint((trip.source, trip.target)):
            await self._faults_changed.wait()

    async def _throttle(self, trip: RelayedConnection, size: int) -> None:
        loop = asyncio.get_running_loop()
        for name in self._faults.slow.intersection((trip.source, trip.target)):
            at = max(loop.time(), self._send_allowed_at.get(name, 0.0)) + size / SLOW_BYTES_PER_S
            self._send_allowed_at[name] = at
            await asyncio.sleep(at - loop.time())


def _listener(address: HostPort) -> socket.socket:
    found = _socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((address.host, address.port))
    found.listen(128)
    return found


async def _dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    peer = HostPort.parse(address)
    found = _socket()
    try:
        await asyncio.get_running_loop().sock_connect(found, (peer.host, peer.port))
        return await asyncio.open_connection(sock=found, limit=SOCKET_BUFFER_BYTES)
    except BaseException:
        found.close()
        raise


def _socket() -> socket.socket:
    # asyncio sets TCP_NODELAY only where the socket says that it is TCP; without it, what a relay writes in two parts
    # waits up to 40 ms for the peer's delayed acknowledgement.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    found.setblocking(False)
    return found


def _local_ports(pids: Mapping[str, Iterable[int]]) -> dict[int, str]:
    """Local port of each of these processes' connections -> member name."""
    found = dict[int, str]()
    for name, numbers in pids.items():
        for pid in numbers:
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    found[connection.laddr.port] = name
    return found


async def _serve(stack: StackLayout) -> None:
    roads = LinkRelays(stack)
    await roads.open()
    print("open", flush=True)
    told = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    while line := await told.readline():
        roads.apply_faults(LinkFaults.parse(line))
        print("told", flush=True)
    roads.close()


def main() -> None:
    asyncio.run(_serve(layout.load(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
