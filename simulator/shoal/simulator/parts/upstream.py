"""What the front of one machine sends requests to: workers of the machine, fronts of other machines, other regions."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from shoal.agent.core.request_router import RequestRouter
from shoal.agent.core.route_tables import RequestEntry
from shoal.types.address import HostPort
from shoal.types.codes import Code
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

if TYPE_CHECKING:
    from shoal.simulator.parts.machine import SimMachine

CONNECT_TIMEOUT_S: Final = 1.0
CONNECT_WAIT_S: Final = 0.75
"""A request waits this long for a connection, which keeps opening."""
SILENT_S: Final = 0.5
"""Seconds until a front gives up a request whose way is cut."""
HANDSHAKE_RTTS: Final = 3
RTT_SAMPLES: Final = 8


class SimAttemptFailed(Exception):
    """One attempt at one replica failed."""

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.code = code


class _Connection:
    """The connection to one front."""

    def __init__(self) -> None:
        self.is_open = False
        self.opening: asyncio.Future[bool] | None = None
        """Done when the attempt to open it is over, with whether it is open; None: nobody tries."""
        self.rtts: deque[float] = deque(maxlen=RTT_SAMPLES)


class SimUpstream:
    """The connections of one front process. Each is opened when it is first needed, and again after a failure."""

    def __init__(self, machine: "SimMachine", router: RequestRouter) -> None:
        self._machine = machine
        self._router = router
        self._rng = machine.request_rng
        self._connections: dict[str, _Connection] = {}

    def is_connecting(self, endpoint: Endpoint) -> bool:
        """Whether a request would have to wait for the connection. The check starts opening it."""
        if endpoint.kind is EndpointKind.LOCAL or endpoint.region:
            return False
        place = _place_of(endpoint)
        connection = self._connection(place)
        if not connection.is_open and connection.opening is None:
            self._open(place, connection)
        return connection.opening is not None

    def rtt_s(self, endpoint: Endpoint) -> Seconds:
        """The least RTT of the newest answers; 0 for a local worker, another region, and before the first."""
        if endpoint.kind is EndpointKind.LOCAL or endpoint.region:
            return Seconds(0.0)
        return Seconds(min(self._connection(_place_of(endpoint)).rtts, default=0.0))

    async def infer(
        self, endpoint: Endpoint, workload: WorkloadKey, content: bytes, remaining_s: Seconds, *, suspect: bool
    ) -> str:
        """The assignment that answered. Raises SimAttemptFailed."""
        if endpoint.kind is EndpointKind.LOCAL:
            await self._run_locally(endpoint.assignment, content)
            return endpoint.assignment
        if endpoint.region:
            code = await self._machine.network.other_regions.infer(self._machine, endpoint)
            if code is not None:
                raise SimAttemptFailed(code)
            self._machine.world.record("request.cross_region", region=endpoint.region, agreement=endpoint.agreement)
            return endpoint.assignment
        return await self._forward(_place_of(endpoint), workload, content, remaining_s, suspect=suspect)

    async def _run_locally(self, assignment: str, content: bytes) -> None:
        if assignment not in self._router.workers:
            raise SimAttemptFailed(Code.MODEL_NOT_READY)
        running = self._machine.run_request(assignment, content)
        if running is None:
            raise SimAttemptFailed(Code.REPLICA_UNREACHABLE)
        code = await running
        if code is not None:
            raise SimAttemptFailed(code)

    async def _forward(
        self, place: str, workload: WorkloadKey, content: bytes, remaining_s: Seconds, *, suspect: bool
    ) -> str:
        machine, connection = self._machine, self._connection(place)
        if not await self._wait_until_open(place, connection):
            raise SimAttemptFailed(Code.REPLICA_UNREACHABLE)
        there = await self._cross(connection, machine.name, place)
        peer = machine.network.machines[place]
        code, assignment = await peer.front.request(
            workload, content, entry=RequestEntry.FORWARD, timeout_s=Seconds(remaining_s - there), suspect=suspect
        )
        if not peer.has_power:
            await self._fall_silent(connection)
        back = await self._cross(connection, place, machine.name)
        if not peer.front.alive:
            connection.is_open = False
        connection.rtts.append(there + back)
        if code is not None:
            raise SimAttemptFailed(code)
        return assignment

    async def _cross(self, connection: _Connection, source: str, target: str) -> float:
        """Return the seconds that it took a message to arrive, once it has."""
        network = self._machine.network
        seconds = network.transit(source, target, self._rng)
        if seconds is None or not all(network.machines[name].has_power for name in (source, target)):
            await self._fall_silent(connection)
        assert seconds is not None
        await asyncio.sleep(seconds)
        return seconds

    async def _fall_silent(self, connection: _Connection) -> None:
        """Notice that nothing comes back. Raises SimAttemptFailed."""
        await asyncio.sleep(SILENT_S)
        connection.is_open = False
        raise SimAttemptFailed(Code.REPLICA_UNREACHABLE)

    async def _wait_until_open(self, place: str, connection: _Connection) -> bool:
        if connection.is_open:
            return True
        if connection.opening is None:
            self._open(place, connection)
        assert connection.opening is not None
        try:
            async with asyncio.timeout(CONNECT_WAIT_S):
                return await asyncio.shield(connection.opening)
        except TimeoutError:
            return False

    def _open(self, place: str, connection: _Connection) -> None:
        network = self._machine.network
        connection.opening = self._machine.world.loop.create_future()
        there = network.transit(self._machine.name, place, self._rng)
        back = network.transit(place, self._machine.name, self._rng)
        peer = network.machines.get(place)
        is_reachable = peer is not None and peer.has_power and there is not None and back is not None
        seconds = HANDSHAKE_RTTS * ((there or 0.0) + (back or 0.0)) if is_reachable else CONNECT_TIMEOUT_S

        def end() -> None:
            opening, connection.opening = connection.opening, None
            assert opening is not None
            connection.is_open = is_reachable and network.machines[place].front.alive
            opening.set_result(connection.is_open)

        self._machine.world.call_later(seconds, end)

    def _connection(self, place: str) -> _Connection:
        return self._connections.setdefault(place, _Connection())


def _place_of(endpoint: Endpoint) -> str:
    return HostPort.parse(endpoint.address).host
