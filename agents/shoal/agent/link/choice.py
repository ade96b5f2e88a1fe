"""The Link port over two carriers: `core/choice` decides which, here calls are made and gRPC is looked at again."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from shoal.agent.core import choice as core
from shoal.agent.core.choice import Carrier, Choice, Timing
from shoal.agent.link.grpc import GrpcLink, GrpcModels
from shoal.agent.link.https import HttpsModels
from shoal.agent.link.mqtt import MqttLink
from shoal.agent.ports import Clock, LinkRefused, Log, Session
from shoal.types.codes import ShoalError
from shoal.types.link import FromAgent, Hello, ToAgent, Welcome
from shoal.types.units import Elapsed, Seconds

DEFAULT: Final = Timing()


class ChosenLink:
    """looks: whether a plain handshake with the coordinator's gRPC port succeeds now."""

    def __init__(
        self,
        node: str,
        grpc: GrpcLink,
        mqtt: MqttLink,
        looks: Callable[[], Awaitable[bool]],
        clock: Clock,
        log: Log,
        *,
        timing: Timing = DEFAULT,
    ) -> None:
        self._choice = Choice(node, timing)
        self._grpc = grpc
        self._mqtt = mqtt
        self._looks = looks
        self._clock = clock
        self._log = log

    @property
    def carrier(self) -> Carrier:
        """Of the session that is open, or of the next call."""
        return self._choice.carrier

    async def connect(self, hello: Hello) -> "ChosenSession":
        carrier = self.carrier
        try:
            session = await (self._grpc if carrier is Carrier.GRPC else self._mqtt).connect(hello)
        except LinkRefused:
            raise  # the carrier works
        except ShoalError:
            self._ended(carrier, Seconds(0.0))
            raise
        return ChosenSession(session, partial(self._ended, carrier), self._clock, self._look_forever())

    def renewed(self) -> None:
        """Ends the open session, so that the next one uses the new files."""
        self._grpc.renewed()
        self._mqtt.renewed()

    def _ended(self, carrier: Carrier, lasted_s: Seconds) -> None:
        before = self.carrier
        self._choice = core.ended(self._choice, carrier, lasted_s, self._clock.now())
        if self.carrier is not before:
            self._log("carrier", carrier=self.carrier, lasted_s=lasted_s)

    async def _look_forever(self) -> None:
        """While a session over MQTT is open: ends it once gRPC is back."""
        if self._choice.look_at is None:
            return
        while (at := self._choice.look_at) is not None:
            await self._clock.sleep(Seconds(max(0.0, at - self._clock.now())))
            self._choice = core.looked(self._choice, await self._looks(), self._clock.now())
        if self.carrier is Carrier.GRPC:
            self._log("carrier", carrier=self.carrier)
            self._mqtt.end("gRPC can be reached again")


class ChosenSession:
    """A session that tells how long it lasted; meanwhile `beside` runs."""

    def __init__(
        self, session: Session, ended: Callable[[Seconds], None], clock: Clock, beside: "Awaitable[None]"
    ) -> None:
        self.welcome: Welcome = session.welcome
        self._session = session
        self._ended = ended
        self._clock = clock
        self._since: Elapsed | None = clock.now()
        self._beside = asyncio.ensure_future(beside)

    async def send(self, message: FromAgent) -> None:
        await self._session.send(message)

    async def receive(self) -> ToAgent:
        return await self._session.receive()

    async def close(self) -> None:
        if self._since is not None:
            since, self._since = self._since, None
            self._beside.cancel()
            self._ended(Seconds(self._clock.now() - since))
        await self._session.close()


class Models(Protocol):
    """Where models come from, and recordings go."""

    def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]: ...
    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None: ...


class ChosenModels:
    """Models by the way that messages go."""

    def __init__(self, link: ChosenLink, grpc: GrpcModels, https: HttpsModels) -> None:
        self._link = link
        self._grpc = grpc
        self._https = https

    def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        return self._now.fetch(digest, offset)

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        await self._now.record(assignment, model, digest, content)

    @property
    def _now(self) -> Models:
        return self._grpc if self._link.carrier is Carrier.GRPC else self._https
