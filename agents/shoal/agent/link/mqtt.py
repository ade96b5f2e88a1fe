"""`ports.CoordinatorLink` over MQTT 5, through an untrusted broker.

What is said, and when a session is over, is decided by `core.mqtt_session`. This module connects, reads, publishes and
waits.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Final

import aiomqtt

from shoal.agent.core.mqtt_session import MqttSessionMachine
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.mqtt_codec import SigningNodeCodec
from shoal.agent.ports import AgentClock, LinkRefused, Log
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import FromAgent, Hello, ToAgent, Welcome
from shoal.types.mqtt_frames import Publication
from shoal.types.units import Elapsed, Seconds
from shoal.wire import mqtt
from shoal.wire.handshake import check_own

LOGIN_RETRIES_S: Final = (Seconds(0.5), Seconds(1.0))
"""Seconds between login attempts at a broker that refuses this node: a broker that lost its access rules gets them
again."""


class MqttLink:
    """Connects to one broker, with a connection per session, so that its last will names that session."""

    def __init__(self, files: CredentialFiles, address: str, clock: AgentClock, log: Log) -> None:
        self._files = files
        self._address = address
        self._clock = clock
        self._log = log
        self._session: MqttSession | None = None
        # host:port where the coordinator of the last session serves models. Empty before the first session.
        self.models_address = ""

    async def connect(self, hello: Hello) -> "MqttSession":
        identity = self._files.identity()
        check_own(self._files, self._clock.wall())
        codec = SigningNodeCodec(identity, self._files, self._clock)
        machine = MqttSessionMachine(identity.region, identity.name, hello, codec)
        will = aiomqtt.Will(machine.will.topic, machine.will.payload, qos=1, retain=machine.will.retain)
        client = await self._open(f"{identity.name}-{secrets.token_hex(4)}", will)
        session = MqttSession(machine, client, self._address, self._log)
        try:
            await session.open()
        except BaseException:
            await session.close()
            raise
        self._session = session
        self.models_address = machine.models_address
        return session

    async def _open(self, name: str, will: aiomqtt.Will) -> aiomqtt.Client:
        for wait in LOGIN_RETRIES_S:
            try:
                return await mqtt.open_client(self._files, self._address, name, will)
            except ShoalError as error:
                if error.code is not Code.UNAUTHENTICATED:
                    raise
            await self._clock.sleep(wait)
        return await mqtt.open_client(self._files, self._address, name, will)

    def on_certificate_renewed(self) -> None:
        """End the open session, so that the next one uses the new files."""
        self.end("this node's certificate was renewed")

    def end(self, found: str) -> None:
        """End the open session, if there is one."""
        if self._session is not None:
            self._session.end(Refusal(Code.COORDINATOR_UNREACHABLE, found, "a session", "it is tried again"))


class MqttSession:
    """One session. `welcome` is set once `open` has returned."""

    welcome: Welcome

    def __init__(self, machine: MqttSessionMachine, client: aiomqtt.Client, address: str, log: Log) -> None:
        self._machine = machine
        self._client = client
        self._messages: AsyncIterator[aiomqtt.Message] = aiter(client.messages)
        self._address = address
        self._log = log
        self._wakeup = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Send the hello and wait for the welcome.

        Raises LinkRefused, ShoalError(COORDINATOR_UNREACHABLE | TOPIC_DENIED).
        """
        machine = self._machine
        try:
            await mqtt.subscribe(self._client, machine.subscriptions)
            machine.start(_now())
            while machine.welcome is None and machine.end_refusal is None:
                await self._read_once()
            if machine.welcome is not None:
                machine.on_announced(_now())
        except (aiomqtt.MqttError, StopAsyncIteration) as cause:
            raise mqtt.unreachable(self._address, cause) from cause
        if machine.hello_refused is not None:
            raise LinkRefused(machine.hello_refused)
        if machine.welcome is None:
            assert machine.end_refusal is not None
            raise mqtt.unreachable(self._address, machine.end_refusal.found)
        self.welcome = machine.welcome
        self._reader = asyncio.create_task(self._read(), name="mqtt session")

    async def send(self, message: FromAgent) -> None:
        publication = self._machine.send(message)
        try:
            await self._publish(publication)
        except aiomqtt.MqttError as cause:
            self.end(mqtt.unreachable(self._address, cause).refusal)
            raise mqtt.unreachable(self._address, cause) from cause

    async def receive(self) -> ToAgent:
        while True:
            if (message := self._machine.next_message()) is not None:
                return message
            if self._machine.end_refusal is not None:
                raise ShoalError(self._machine.end_refusal)
            self._wakeup.clear()
            await self._wakeup.wait()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
        farewell = self._machine.close()
        self._wakeup.set()
        try:
            async with asyncio.timeout(mqtt.CLOSE_S):
                await self._publish_all(farewell)
        except (aiomqtt.MqttError, TimeoutError):
            pass  # the last will says the same
        await mqtt.close_client(self._client)

    def end(self, refusal: Refusal) -> None:
        """`send` and `receive` raise `refusal` from now on. The first reason stays."""
        self._machine.end(refusal)
        self._wakeup.set()

    async def _read(self) -> None:
        """Handle messages until the session is over."""
        try:
            while self._machine.end_refusal is None:
                await self._read_once()
        except (aiomqtt.MqttError, StopAsyncIteration) as cause:
            self.end(mqtt.unreachable(self._address, cause).refusal)
        finally:
            self.end(Refusal(Code.COORDINATOR_UNREACHABLE, "it is no longer read", "a session", "it is tried again"))

    async def _read_once(self) -> None:
        """Handle the next message, and publish what follows from it; or what is due by time."""
        try:
            async with asyncio.timeout_at(self._machine.deadline):
                message = await anext(self._messages)
        except TimeoutError:
            self._machine.on_time(_now())
        else:
            await self._on_message(message)
        self._wakeup.set()

    async def _on_message(self, message: aiomqtt.Message) -> None:
        """A message that is not from the coordinator changes nothing."""
        topic, payload = message.topic.value, mqtt.payload_of(message)
        try:
            answers = self._machine.on_message(topic, payload, retained=message.retain, now=_now())
        except ShoalError as error:
            self._log.warning("message_dropped", topic=topic, code=error.code, error=str(error))
            return
        await self._publish_all(answers)

    async def _publish_all(self, publications: Iterable[Publication]) -> None:
        for each in publications:
            await self._publish(each)

    async def _publish(self, publication: Publication) -> None:
        await mqtt.publish(self._client, publication.topic, publication.payload, retain=publication.retain)


def _now() -> Elapsed:
    return Elapsed(asyncio.get_running_loop().time())
