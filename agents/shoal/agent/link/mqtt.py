"""The Link port over MQTT 5, through a broker that is not trusted.

A session begins with a signed hello and the coordinator's signed welcome, which agree on a key; from then on status and
requests are sealed with it. The session is over when the broker is gone, when the coordinator says so or leaves, and
when the coordinator's signed beat stays out: nothing that a broker keeps or repeats passes for the coordinator's life.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import aiomqtt
from cryptography import x509

from shoal.agent.link.credentials import Files
from shoal.agent.ports import Clock, LinkRefused, Log
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.link import FromAgent, Hello, Receipts, Refused, ToAgent, Welcome
from shoal.types.units import Seconds
from shoal.v1 import link_pb2, mqtt_pb2
from shoal.wire import mqtt, nouns, topics
from shoal.wire.handshake import check_own
from shoal.wire.identity import Identity
from shoal.wire.seal import Ephemeral, Opener, Sealer, SessionKey, Signature, open_signed, parse, sign
from shoal.wire.topics import DOWN, RETAINED, Channel
from shoal.wire.trust import check_certificate

WELCOME_S: Final = 5.0
SILENT_BEATS: Final = 3
KNOCKS_S: Final = (Seconds(0.5), Seconds(1.0))
"""Between calls in a row at a broker that does not let this node in: rights that it lost it is told again."""
INBOX: Final = 64
"""Messages other than the desired set that may wait for the supervisor; the oldest go first."""


class MqttLink:
    """Connects to one broker: a connection for each session, so that its last will names that session."""

    def __init__(self, files: Files, address: str, clock: Clock, log: Log) -> None:
        self._files = files
        self._address = address
        self._clock = clock
        self._log = log
        self._session: MqttSession | None = None
        self.models_address = ""
        """host:port where the coordinator of the last session serves models; empty before the first."""

    async def connect(self, hello: Hello) -> "MqttSession":
        identity = self._files.identity()
        check_own(self._files, self._clock.wall())
        node = _Node(identity, self._files, self._clock)
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
        for wait in KNOCKS_S:
            try:
                return await mqtt.open_client(self._files, self._address, name, will)
            except ShoalError as error:
                if error.code is not Code.UNAUTHENTICATED:
                    raise
            await self._clock.sleep(wait)
        return await mqtt.open_client(self._files, self._address, name, will)

    def renewed(self) -> None:
        """Ends the open session, so that the next one uses the new files."""
        self.end("this node's certificate was renewed")

    def end(self, found: str) -> None:
        """Ends the open session, if there is one."""
        if self._session is not None:
            self._session.end(_over(found))


class MqttSession:
    """One session. `welcome` is there once `open` has returned."""

    welcome: Welcome

    def __init__(self, node: "_Node", client: aiomqtt.Client, address: str, hello: Hello, log: Log) -> None:
        self._node = node
        self._client = client
        self._messages: AsyncIterator[aiomqtt.Message] = aiter(client.messages)
        self._address = address
        self._hello = hello
        self._log = log
        self._ephemeral = Ephemeral()
        self._presence = mqtt_pb2.RegionPresence()
        self._heard_at = 0.0
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._models_address = ""
        self._inbox: deque[ToAgent] = deque(maxlen=INBOX)
        self._desired: DesiredSet | None = None
        self._ended: Refusal | None = None
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> str:
        """Says hello; returns where models are served. Raises LinkRefused, ShoalError(COORDINATOR_UNREACHABLE |
        TOPIC_DENIED)."""
        identity = self._node.identity
        down = (topics.of_node(identity.region, identity.name, channel) for channel in DOWN)
        try:
            await mqtt.subscribe(self._client, (topics.region_online(identity.region), *down))
            async with asyncio.timeout(WELCOME_S):
                while self._sealer is None:
                    await self._take(await anext(self._messages))
            await self._publish(Channel.ONLINE, self._node.presence(self._hello.nonce, online=True))
        except TimeoutError as cause:
            found = "no welcome" if self._presence.presence else "the coordinator is not there"
            raise mqtt.unreachable(self._address, found) from cause
        except (aiomqtt.MqttError, StopAsyncIteration) as cause:
            raise mqtt.unreachable(self._address, cause) from cause
        self._heard_at = asyncio.get_running_loop().time()
        self._reading = asyncio.create_task(self._read(), name="mqtt session")
        return self._models_address

    async def send(self, message: FromAgent) -> None:
        if self._ended is not None or self._sealer is None:
            raise ShoalError(self._ended or _over("it is closed"))
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
            if self._ended is not None:
                raise ShoalError(self._ended)
            self._arrived.clear()
            await self._arrived.wait()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
        self.end(_over("it is closed"))
        if self._sealer is not None:
            try:
                async with asyncio.timeout(mqtt.CLOSE_S):
                    await self._publish(Channel.ONLINE, self._node.presence(self._hello.nonce, online=False))
            except (aiomqtt.MqttError, TimeoutError):
                pass  # then the last will says it
        await mqtt.close_client(self._client)

    async def _read(self) -> None:
        """Until the session is over."""
        try:
            while self._ended is None:
                async with asyncio.timeout_at(self._heard_at + SILENT_BEATS * self._presence.every_s):
                    message = await anext(self._messages)
                await self._take(message)
        except TimeoutError:
            self.end(_over(f"no beat of the coordinator for {SILENT_BEATS * self._presence.every_s:g}s"))
        except (aiomqtt.MqttError, StopAsyncIteration) as cause:
            self.end(mqtt.unreachable(self._address, cause).refusal)
        finally:
            self.end(_over("it is no longer read"))

    async def _take(self, message: aiomqtt.Message) -> None:
        """One message from the broker: what is not the coordinator's changes nothing. Raises LinkRefused."""
        name, payload = message.topic.value, mqtt.payload_of(message)
        try:
            if name == topics.region_online(self._node.identity.region):
                await self._take_presence(payload)
                return
            match self._node.channel(name):
                case Channel.WELCOME:
                    self._take_welcome(payload)
                case Channel.DESIRED:
                    self._take_desired(payload, retained=message.retain)
                case _:
                    self._take_request(payload)
        except LinkRefused:
            raise
        except ShoalError as error:
            self._log("message_dropped", error=True, topic=name, code=error.code, found=error.refusal.found)

    async def _take_presence(self, payload: bytes) -> None:
        """The coordinator's beat. An unknown presence in greeting is answered with a hello to it; in a session it means
        that the coordinator began anew and knows this session no more."""
        seen = self._presence
        presence = parse(mqtt_pb2.RegionPresence, self._node.open(payload, Channel.ONLINE, to_all=True))
        if presence.presence == seen.presence:
            if presence.beat <= seen.beat and presence.online:
                return  # a repeated one is no life
        elif self._sealer is not None and presence.online:
            self.end(_over("the coordinator has connected anew"))
            return
        elif self._sealer is not None:
            return  # an earlier connection of the coordinator has ended
        if not presence.online:
            if self._sealer is not None:
                self.end(_over("the coordinator has left the broker"))
            return
        if not 0.0 < presence.every_s <= WELCOME_S:
            raise refuse(Code.MESSAGE_INVALID, f"a beat every {presence.every_s}s", f"at most {WELCOME_S:g}s")
        self._presence, self._heard_at = presence, asyncio.get_running_loop().time()
        if self._sealer is None and presence.presence != seen.presence:
            await self._greet()

    async def _greet(self) -> None:
        opening = mqtt_pb2.Opening(
            hello=nouns.to_wire(self._hello),
            key=self._ephemeral.public,
            presence=self._presence.presence,
            beat=self._presence.beat,
        )
        await self._publish(Channel.HELLO, self._node.sign(Channel.HELLO, opening.SerializeToString()))

    def _take_welcome(self, payload: bytes) -> None:
        opened = parse(mqtt_pb2.Opened, self._node.open(payload, Channel.WELCOME))
        if self._sealer is not None:
            if opened.epoch == self.welcome.epoch and opened.answer.HasField("refused"):
                self.end(_refused(opened.answer).refusal)
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
            self._desired = None  # the broker kept it from a history that has ended
        self._models_address = opened.models_address

    def _take_desired(self, payload: bytes, *, retained: bool) -> None:
        desired = nouns.decode(DesiredSet, self._node.open(payload, Channel.DESIRED))
        if retained and _is_older(desired.version, self._hello.holds):
            raise refuse(
                Code.GENERATION_STALE,
                f"generation {desired.version.generation} kept by the broker",
                "the newest",
                "the coordinator sends it again",
            )
        if self._desired is None or not _is_older(desired.version, self._desired.version):
            self._desired = desired
            self._arrived.set()

    def _take_request(self, payload: bytes) -> None:
        if self._opener is None:
            return  # kept for an earlier session
        unsealed = self._opener.open(Channel.REQUEST, payload)
        message = nouns.to_agent_from_wire(parse(link_pb2.ToAgent, unsealed.content))
        self._inbox.append(message)
        self._arrived.set()
        if unsealed.last:
            self.end(message.refusal if isinstance(message, Refused) else _over("the coordinator ended it"))

    def end(self, refusal: Refusal) -> None:
        """Both methods raise it from now on; the first reason stays."""
        self._ended = self._ended or refusal
        self._arrived.set()

    async def _publish(self, channel: Channel, payload: bytes) -> None:
        topic = topics.of_node(self._node.identity.region, self._node.identity.name, channel)
        await mqtt.publish(self._client, topic, payload, retain=channel in RETAINED)


class _Node:
    """What this node signs with, and whom it believes."""

    def __init__(self, identity: Identity, files: Files, clock: Clock) -> None:
        self.identity = identity
        self._clock = clock
        self._signature = Signature.of_pem(files.key.read_bytes(), files.certificate.read_bytes())
        self._authorities = x509.load_pem_x509_certificates(files.ca.read_bytes())

    def sign(self, channel: Channel, content: bytes) -> bytes:
        return sign(self._signature, self.identity.region, self.identity.name, channel, content)

    def presence(self, nonce: str, *, online: bool) -> bytes:
        return self.sign(Channel.ONLINE, mqtt_pb2.Presence(nonce=nonce, online=online).SerializeToString())

    def open(self, payload: bytes, channel: Channel, *, to_all: bool = False) -> bytes:
        """What the region's coordinator signed for this node, or for all. Raises ShoalError."""
        node = "" if to_all else self.identity.name
        return open_signed(payload, self._is_coordinator, self.identity.region, node, channel)[0]

    def channel(self, name: str) -> Channel:
        """Raises ShoalError(TOPIC_DENIED | NODE_MISMATCH)."""
        topic = topics.parse(name, self.identity.region, DOWN)
        if topic.node != self.identity.name:
            raise refuse(Code.NODE_MISMATCH, f"a message to {topic.node}", self.identity.name, "look at the broker")
        return topic.channel

    def _is_coordinator(self, certificate: x509.Certificate) -> None:
        roles = frozenset({Role.COORDINATOR})
        check_certificate(
            certificate, self._authorities, region=self.identity.region, roles=roles, wall=self._clock.wall()
        )


def _is_older(offered: Version, held: Version | None) -> bool:
    return (
        held is not None
        and offered.history == held.history
        and (offered.term, offered.generation) < (held.term, held.generation)
    )


def _refused(answer: link_pb2.ToAgent) -> Refused:
    message = nouns.to_agent_from_wire(answer)
    if not isinstance(message, Refused):
        raise refuse(Code.MESSAGE_INVALID, type(message).__name__, "a refusal", "update the coordinator")
    return message


def _over(found: str) -> Refusal:
    return Refusal(Code.COORDINATOR_UNREACHABLE, found, "a session", "it is tried again")
