"""`ports.CoordinatorLink` over two carriers, gRPC and MQTT.

`core.carrier_selection` decides which one; this module connects, and probes gRPC while MQTT is in use.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from shoal.agent.core import carrier_selection as core
from shoal.agent.core.carrier_selection import Carrier, CarrierSelection, CarrierTiming
from shoal.agent.ports import AgentClock, CoordinatorLink, LinkRefused, LinkSession, Log
from shoal.types.codes import ShoalError
from shoal.types.link import FromAgent, Hello, ToAgent, Welcome
from shoal.types.units import Elapsed, Seconds

DEFAULT_TIMING: Final = CarrierTiming()


class CarrierLink(CoordinatorLink, Protocol):
    """A link over one carrier."""

    def on_certificate_renewed(self) -> None:
        """End the open session, so that the next one uses the new files."""
        ...


class BrokerLink(CarrierLink, Protocol):
    """The link that is left when gRPC can be reached again."""

    def end(self, found: str) -> None:
        """End the open session, if there is one. `found`: why."""
        ...


class FailoverLink:
    """`open_mqtt` makes the link over MQTT when it is first needed. `probe_grpc` returns whether a plain TLS handshake
    with the coordinator's gRPC port succeeds now."""

    def __init__(
        self,
        node: str,
        grpc: CarrierLink,
        open_mqtt: Callable[[], BrokerLink],
        probe_grpc: Callable[[], Awaitable[bool]],
        clock: AgentClock,
        log: Log,
        *,
        timing: CarrierTiming = DEFAULT_TIMING,
    ) -> None:
        self._selection = CarrierSelection(node, timing)
        self._grpc = grpc
        self._open_mqtt = open_mqtt
        # None: it was never needed.
        self._mqtt: BrokerLink | None = None
        self._probe_grpc = probe_grpc
        self._clock = clock
        self._log = log

    @property
    def carrier(self) -> Carrier:
        """Carrier of the open session, or of the next attempt."""
        return self._selection.carrier

    async def connect(self, hello: Hello) -> "FailoverSession":
        carrier = self.carrier
        try:
            session = await self._link_over(carrier).connect(hello)
        except LinkRefused:
            raise  # an answer: the carrier works
        except ShoalError:
            self._on_session_end(carrier, Seconds(0.0))
            raise
        return FailoverSession(session, partial(self._on_session_end, carrier), self._clock, self._probe_grpc_forever())

    def on_certificate_renewed(self) -> None:
        """End the open session, so that the next one uses the new files."""
        self._grpc.on_certificate_renewed()
        if self._mqtt is not None:
            self._mqtt.on_certificate_renewed()

    def _link_over(self, carrier: Carrier) -> CarrierLink:
        if carrier is Carrier.GRPC:
            return self._grpc
        if self._mqtt is None:
            self._mqtt = self._open_mqtt()
        return self._mqtt

    def _on_session_end(self, carrier: Carrier, lasted_s: Seconds) -> None:
        before = self.carrier
        self._selection = core.record_call(self._selection, carrier, lasted_s, self._clock.now())
        if self.carrier is not before:
            self._log.info("carrier_changed", carrier=self.carrier, duration_s=lasted_s)

    async def _probe_grpc_forever(self) -> None:
        """Runs while a session over MQTT is open, and ends that session once gRPC works."""
        if self._selection.recheck_at is None:
            return
        while (at := self._selection.recheck_at) is not None:
            await self._clock.sleep(Seconds(max(0.0, at - self._clock.now())))
            self._selection = core.record_recheck(self._selection, await self._probe_grpc(), self._clock.now())
        if self.carrier is Carrier.GRPC and self._mqtt is not None:
            self._log.info("carrier_changed", carrier=self.carrier)
            self._mqtt.end("gRPC can be reached again")


class FailoverSession:
    """A session that reports how long it lasted. `background` runs as long as it is open."""

    def __init__(
        self, session: LinkSession, on_end: Callable[[Seconds], None], clock: AgentClock, background: "Awaitable[None]"
    ) -> None:
        self.welcome: Welcome = session.welcome
        self._session = session
        self._on_end = on_end
        self._clock = clock
        self._opened_at: Elapsed | None = clock.now()
        self._background = asyncio.ensure_future(background)

    async def send(self, message: FromAgent) -> None:
        await self._session.send(message)

    async def receive(self) -> ToAgent:
        return await self._session.receive()

    async def close(self) -> None:
        if self._opened_at is not None:
            since, self._opened_at = self._opened_at, None
            self._background.cancel()
            self._on_end(Seconds(self._clock.now() - since))
        await self._session.close()


class ModelTransport(Protocol):
    """Fetches models, and uploads recordings."""

    def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]: ...
    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None: ...


class FailoverModels:
    """Transfers models over the carrier that the link uses."""

    def __init__(self, link: FailoverLink, grpc: ModelTransport, open_https: Callable[[], ModelTransport]) -> None:
        self._link = link
        self._grpc = grpc
        self._open_https = open_https

    def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        return self._transport.fetch(digest, offset)

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        await self._transport.record(assignment, model, digest, content)

    @property
    def _transport(self) -> ModelTransport:
        return self._grpc if self._link.carrier is Carrier.GRPC else self._open_https()
