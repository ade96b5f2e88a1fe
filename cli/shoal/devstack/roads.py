"""The roads between the machines of a local federation, which `shoal dev break` cuts and slows.

Each member listens on 127.0.0.1; the others reach it on 127.0.0.2, same port, where a relay of this process stands. So
no right is needed, and whoever sits at a member (127.0.0.1) still reaches it while the others do not.

`python -m shoal.devstack.roads FOLDER` is a child of the keeper, which says on stdin, one JSON object a line, what is
true from now on: `{"cut": [NAME..], "slow": [NAME..], "pids": {NAME: [PID..]}}`. It ends with its keeper.

A cut resets nothing: what is sent waits in the sender's buffers, a new connection is taken and not answered, and an end
that hangs up is not heard of before the road heals. That is what TCP makes of a network that drops every packet, but
for the handshake of a new connection, which here succeeds.
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
from shoal.devstack.layout import Stack

SLOW_BYTES_PER_S: Final = 128 * 2**10
PIECE: Final = 16 * 2**10
BUFFER: Final = 64 * 2**10
"""In the kernel, each way and side: what waits in a slow road is late."""


@dataclass(frozen=True, slots=True)
class Faults:
    """pids: of each broken member, by which its own connections to others are told."""

    cut: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> "Faults":
        told = json.loads(line)
        pids = {name: tuple(found) for name, found in told["pids"].items()}
        return cls(frozenset(told["cut"]), frozenset(told["slow"]), pids)

    def line(self) -> bytes:
        told = {"cut": sorted(self.cut), "slow": sorted(self.slow), "pids": {**self.pids}}
        return json.dumps(told).encode() + b"\n"


@dataclass(slots=True, eq=False)
class Trip:
    """One connection. source: the member that dialled, '' when it is none that is broken."""

    target: str
    port: int
    source: str = ""


class Roads:
    """A relay in front of every port of every member. Everything runs on one event loop."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._faults = Faults()
        self._changed = asyncio.Event()
        self.trips: set[Trip] = set()
        self._free_at: dict[str, float] = {}
        self._servers: list[asyncio.Server] = []

    async def open(self) -> None:
        """Raises OSError when a road's address is taken."""
        for member in self._stack.members:
            for address in member.addresses.values():
                host, _, port = layout.road(address).rpartition(":")
                if layout.road(address) != address:
                    listening = _listener(host, int(port))
                    taker = self._taker(member.name, address)
                    self._servers.append(await asyncio.start_server(taker, sock=listening, limit=BUFFER))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def tell(self, faults: Faults) -> None:
        """What is true from now on, for connections that are open as well."""
        self._faults = faults
        ports = _ports(faults.pids)
        for trip in self.trips:
            trip.source = ports.get(trip.port, "")
        self._changed.set()
        self._changed = asyncio.Event()

    def _taker(
        self, target: str, address: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            trip = Trip(target, writer.get_extra_info("peername")[1])
            if self._faults.pids:
                trip.source = _ports(self._faults.pids).get(trip.port, "")
            self.trips.add(trip)
            try:
                await self._carry(trip, address, reader, writer)
            finally:
                self.trips.discard(trip)

        return take

    async def _carry(
        self, trip: Trip, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._passable(trip)
        try:
            there, thither = await _dial(address)
        except OSError:
            writer.transport.abort()  # nobody listens there: the caller is told so
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(trip, reader, thither))
                group.create_task(self._pump(trip, there, writer))
        except* OSError:
            pass
        finally:
            for side in (writer, thither):
                side.transport.abort()

    async def _pump(self, trip: Trip, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises OSError when either end is gone, as soon as the other may hear of it."""
        try:
            while data := await reader.read(PIECE):
                await self._passable(trip)
                await self._paced(trip, len(data))
                writer.write(data)
                await writer.drain()
        except OSError:
            await self._passable(trip)
            raise
        await self._passable(trip)
        writer.write_eof()

    async def _passable(self, trip: Trip) -> None:
        while not self._faults.cut.isdisjoint((trip.source, trip.target)):
            await self._changed.wait()

    async def _paced(self, trip: Trip, size: int) -> None:
        loop = asyncio.get_running_loop()
        for name in self._faults.slow.intersection((trip.source, trip.target)):
            at = max(loop.time(), self._free_at.get(name, 0.0)) + size / SLOW_BYTES_PER_S
            self._free_at[name] = at
            await asyncio.sleep(at - loop.time())


def _listener(host: str, port: int) -> socket.socket:
    found = _socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((host, port))
    found.listen(128)
    return found


async def _dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    found = _socket()
    try:
        await asyncio.get_running_loop().sock_connect(found, (host, int(port)))
        return await asyncio.open_connection(sock=found, limit=BUFFER)
    except BaseException:
        found.close()
        raise


def _socket() -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    found.setblocking(False)
    return found


def _ports(pids: Mapping[str, Iterable[int]]) -> dict[int, str]:
    """Local ports of these processes' connections, and whose they are."""
    found = dict[int, str]()
    for name, numbers in pids.items():
        for pid in numbers:
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    found[connection.laddr.port] = name
    return found


async def _serve(stack: Stack) -> None:
    roads = Roads(stack)
    await roads.open()
    print("open", flush=True)
    told = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    while line := await told.readline():
        roads.tell(Faults.parse(line))
        print("told", flush=True)
    roads.close()


def main() -> None:
    asyncio.run(_serve(layout.load(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
