"""`ports.CoordinatorLink` over MQTT 5, through an untrusted broker.

A session begins with a signed hello and the coordinator's signed welcome, which agree on a key. From then on, status
and requests are sealed with it.

The session ends when the broker is gone, when the coordinator ends it or leaves, and when the coordinator's signed
heartbeats stop. A message that the broker keeps or repeats never counts as a sign of life of the coordinator.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import aiomqtt
from cryptography import x509

from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.ports import AgentClock, LinkRefused, Log
from shoal.types import topics
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.link import FromAgent, Hello, Receipts, Refused, ToAgent, Welcome
from shoal.types.topics import DOWN, RETAINED, Channel
from shoal.types.units import Seconds
from shoal.v1 import link_pb2, mqtt_pb2
from shoal.wire import mqtt, nouns
from shoal.wire.handshake import check_own
from shoal.wire.seal import Ephemeral, Opener, Sealer, SessionKey, SigningIdentity, parse, sign, verify_signed_message
from shoal.wire.trust import check_certificate

WELCOME_S: Final = 5.0
MISSED_HEARTBEATS: Final = 3
LOGIN_RETRIES_S: Final = (Seconds(0.5), Seconds(1.0))
"""Seconds between login attempts at a broker that refuses this node: a broker that lost its access rules gets them
again."""
MAX_INBOX: Final = 64
"""Messages other than the desired set that may wait for the supervisor. The oldest are dropped."""


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
        node = _NodeCredentials(identity, self._files, self._clock)
        will = aiomqtt.Will(
            topics.of_node(identity.region, identity.name, Channel.ONLINE),
            node.presence(hello.nonce, online=False),
            qos=1,
            retain=True,
        )
        name = f"{identity.name}-{secrets.token_hex(4)}"
        client = await self._open(name, will)
        session = MqttSession(node, client, self._address, hello, self._log)
        try:
            self.models_address = await session.open()
        except BaseException:
            await session.close()
            raise
        self._session = session
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
            self._session.end(_end_refusal(found))


class MqttSession:
    """One session. `welcome` is set once `open` has returned."""

    welcome: Welcome

    def __init__(self, node: "_NodeCredentials", client: aiomqtt.Client, address: str, hello: Hello, log: Log) -> None:
        self._node = node
        self._client = client
        self._messages: AsyncIterator[aiomqtt.Message] = aiter(client.messages)
        self._address = address
        self._hello = hello
        self._log = log
        self._ephemeral = Ephemeral()
        self._presence = mqtt_pb2.RegionPresence()
        self._heartbeat_at = 0.0
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._models_address = ""
        self._inbox: deque[ToAgent] = deque(maxlen=MAX_INBOX)
        self._desired: DesiredSet | None = None
        self._end_reason: Refusal | None = None
        self._wakeup = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> str:
        """Send the hello and wait for the welcome. Returns where models are served.

        Raises LinkRefused, ShoalError(COORDINATOR_UNREACHABLE | TOPIC_DENIED).
        """
        identity = self._node.identity
        down = (topics.of_node(identity.region, identity.name, channel) for channel in DOWN)
        try:
            await mqtt.subscribe(self._client, (topics.region_online(identity.region), *down))
            async with asyncio.timeout(WELCOME_S):
                while self._sealer is None:
                    await self._on_message(await anext(self._messages))
            await self._publish(Channel.ONLINE, self._node.presence(self._hello.nonce, online=True))
        except TimeoutError as cause:
            found = "no welcome" if self._presence.presence else "the coordinator is not there"
            raise mqtt.unreachable(self._address, found) from cause
        except (aiomqtt.MqttError, StopAsyncIteration) as cause:
            raise mqtt.unreachable(self._address, cause) from cause
        self._heartbeat_at = asyncio.get_running_loop().time()
        self._reader = asyncio.create_task(self._read(), name="mqtt session")
        return self._models_address

    async def send(self, message: FromAgent) -> None:
        if self._end_reason is not None or self._sealer is None:
            raise ShoalError(self._end_reason or _end_refusal("it is closed"))
        channel = Channel.CAPABILITY if isinstance(message, Receipts) else Channel.STATUS
        content = nouns.from_agent_to_wire(message).SerializeToString()
        try:
            await self._publish(channel, self._sealer.seal(channel, content))
        except aiomqtt.MqttError as cause:
            self.end(mqtt.unreachable(self._address, cause).refusal)
            raise mqtt.unreachable(self._address, cause) from cause

    async def receive(self) -> ToAgent:
        while True:
            if self._inbox:
                return self._inbox.popleft()
            if self._desired is not None:
                desired, self._desired = self._desired, None
                return desired
            if self._end_reason is not None:
                raise ShoalError(self._end_reason)
            self._wakeup.clear()
            await self._wakeup.wait()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
        self.end(_end_refusal("it is closed"))
        if self._sealer is not None:
            try:
                async with asyncio.timeout(mqtt.CLOSE_S):
                    await self._publish(Channel.ONLINE, self._node.presence(self._hello.nonce, online=False))
            except (aiomqtt.MqttError, TimeoutError):
                pass  # the last will says the same
        await mqtt.close_client(self._client)

    async def _read(self) -> None:
        """Handle messages until the session is over."""
        try:
            while self._end_reason is None:
                async with asyncio.timeout_at(self._heartbeat_at + MISSED_HEARTBEATS * self._presence.every_s):
                    message = await anext(self._messages)
                await self._on_message(message)
        except TimeoutError:
            self.end(_end_refusal(f"no beat of the coordinator for {MISSED_HEARTBEATS * self._presence.every_s:g}s"))
        except (aiomqtt.MqttError, StopAsyncIteration) as cause:
            self.end(mqtt.unreachable(self._address, cause).refusal)
        finally:
            self.end(_end_refusal("it is no longer read"))

    async def _on_message(self, message: aiomqtt.Message) -> None:
        """Handle one message from the broker. A message that is not from the coordinator changes nothing. Raises
        LinkRefused."""
        name, payload = message.topic.value, mqtt.payload_of(message)
        try:
            if name == topics.region_online(self._node.identity.region):
                await self._on_presence(payload)
                return
            match self._node.parse_channel(name):
                case Channel.WELCOME:
                    self._on_welcome(payload)
                case Channel.DESIRED:
                    self._on_desired_set(payload, retained=message.retain)
                case _:
                    self._on_request(payload)
        except LinkRefused:
            raise
        except ShoalError as error:
            self._log.warning("message_dropped", topic=name, code=error.code, error=str(error))

    async def _on_presence(self, payload: bytes) -> None:
        """Handle the coordinator's heartbeat.

        Before the welcome, an unknown presence is answered with a hello. In a session it means that the coordinator
        restarted its connection and does not know this session.
        """
        seen = self._presence
        presence = parse(mqtt_pb2.RegionPresence, self._node.verify(payload, Channel.ONLINE, to_all=True))
        if presence.presence == seen.presence:
            if presence.beat <= seen.beat and presence.online:
                return  # a repeated heartbeat is no sign of life
        elif self._sealer is not None and presence.online:
            self.end(_end_refusal("the coordinator has connected anew"))
            return
        elif self._sealer is not None:
            return  # an earlier connection of the coordinator has ended
        if not presence.online:
            if self._sealer is not None:
                self.end(_end_refusal("the coordinator has left the broker"))
            return
        if not 0.0 < presence.every_s <= WELCOME_S:
            raise refuse(Code.MESSAGE_INVALID, f"a beat every {presence.every_s}s", f"at most {WELCOME_S:g}s")
        self._presence, self._heartbeat_at = presence, asyncio.get_running_loop().time()
        if self._sealer is None and presence.presence != seen.presence:
            await self._send_hello()

    async def _send_hello(self) -> None:
        opening = mqtt_pb2.Opening(
            hello=nouns.to_wire(self._hello),
            key=self._ephemeral.public,
            presence=self._presence.presence,
            beat=self._presence.beat,
        )
        await self._publish(Channel.HELLO, self._node.sign(Channel.HELLO, opening.SerializeToString()))

    def _on_welcome(self, payload: bytes) -> None:
        opened = parse(mqtt_pb2.Opened, self._node.verify(payload, Channel.WELCOME))
        if self._sealer is not None:
            if opened.epoch == self.welcome.epoch and opened.answer.HasField("refused"):
                self.end(_parse_refused(opened.answer).refusal)
            return
        if opened.nonce != self._hello.nonce:
            return  # the answer to another hello of this node
        answer = nouns.to_agent_from_wire(opened.answer)
        if isinstance(answer, Refused):
            raise LinkRefused(answer)
        if not isinstance(answer, Welcome):
            raise refuse(Code.MESSAGE_INVALID, type(answer).__name__, "a welcome", "update the coordinator")
        identity = self._node.identity
        secret = self._ephemeral.agree(opened.key, region=identity.region, node=identity.name, nonce=self._hello.nonce)
        key = SessionKey(secret, identity.region, identity.name, answer.epoch)
        self.welcome, self._sealer, self._opener = answer, Sealer(key), Opener(key)
        if self._desired is not None and self._desired.version.history != answer.history:
            self._desired = None  # retained by the broker, from a history that has ended
        self._models_address = opened.models_address

    def _on_desired_set(self, payload: bytes, *, retained: bool) -> None:
        desired = nouns.decode(DesiredSet, self._node.verify(payload, Channel.DESIRED))
        if retained and _is_older(desired.version, self._hello.holds):
            raise refuse(
                Code.GENERATION_STALE,
                f"generation {desired.version.generation} kept by the broker",
                "the newest",
                "the coordinator sends it again",
            )
        if self._desired is None or not _is_older(desired.version, self._desired.version):
            self._desired = desired
            self._wakeup.set()

    def _on_request(self, payload: bytes) -> None:
        if self._opener is None:
            return  # retained for an earlier session
        unsealed = self._opener.open(Channel.REQUEST, payload)
        message = nouns.to_agent_from_wire(parse(link_pb2.ToAgent, unsealed.content))
        self._inbox.append(message)
        self._wakeup.set()
        if unsealed.last:
            self.end(message.refusal if isinstance(message, Refused) else _end_refusal("the coordinator ended it"))

    def end(self, refusal: Refusal) -> None:
        """`send` and `receive` raise `refusal` from now on. The first reason stays."""
        self._end_reason = self._end_reason or refusal
        self._wakeup.set()

    async def _publish(self, channel: Channel, payload: bytes) -> None:
        topic = topics.of_node(self._node.identity.region, self._node.identity.name, channel)
        await mqtt.publish(self._client, topic, payload, retain=channel in RETAINED)


class _NodeCredentials:
    """The key that this node signs with, and the CAs that it trusts."""

    def __init__(self, identity: Identity, files: CredentialFiles, clock: AgentClock) -> None:
        self.identity = identity
        self._clock = clock
        self._signature = SigningIdentity.from_pem(files.key.read_bytes(), files.certificate.read_bytes())
        self._authorities = x509.load_pem_x509_certificates(files.ca.read_bytes())

    def sign(self, channel: Channel, content: bytes) -> bytes:
        return sign(self._signature, self.identity.region, self.identity.name, channel, content)

    def presence(self, nonce: str, *, online: bool) -> bytes:
        return self.sign(Channel.ONLINE, mqtt_pb2.Presence(nonce=nonce, online=online).SerializeToString())

    def verify(self, payload: bytes, channel: Channel, *, to_all: bool = False) -> bytes:
        """Content that the region's coordinator signed for this node, or for all nodes. Raises ShoalError."""
        node = "" if to_all else self.identity.name
        return verify_signed_message(payload, self._check_coordinator, self.identity.region, node, channel)[0]

    def parse_channel(self, name: str) -> Channel:
        """Raises ShoalError(TOPIC_DENIED | NODE_MISMATCH)."""
        topic = topics.parse(name, self.identity.region, DOWN)
        if topic.node != self.identity.name:
            raise refuse(Code.NODE_MISMATCH, f"a message to {topic.node}", self.identity.name, "look at the broker")
        return topic.channel

    def _check_coordinator(self, certificate: x509.Certificate) -> None:
        roles = frozenset({Role.COORDINATOR})
        check_certificate(
            certificate, self._authorities, region=self.identity.region, roles=roles, wall=self._clock.wall()
        )


def _is_older(offered: Version, current: Version | None) -> bool:
    return (
        current is not None
        and offered.history == current.history
        and (offered.term, offered.generation) < (current.term, current.generation)
    )


def _parse_refused(answer: link_pb2.ToAgent) -> Refused:
    message = nouns.to_agent_from_wire(answer)
    if not isinstance(message, Refused):
        raise refuse(Code.MESSAGE_INVALID, type(message).__name__, "a refusal", "update the coordinator")
    return message


def _end_refusal(found: str) -> Refusal:
    return Refusal(Code.COORDINATOR_UNREACHABLE, found, "a session", "it is tried again")
