"""The agents' other end over MQTT 5, through a broker that is not trusted and never the truth.

One connection to the broker carries all sessions. When it is lost every session is over: the next connection has a new
presence, agents say hello to it, report in full and are sent their desired sets again. What a node sends is queued
apart, so that a flood, a slow store or junk costs that node only.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import aiomqtt
import structlog
from cryptography import x509
from google.protobuf.message import Message

from shoal.coordinator.controllers.finish import deliver, finish
from shoal.coordinator.link.check import check_hello, check_signatures
from shoal.coordinator.link.outbox import Outbox
from shoal.coordinator.ports import Clock, Ids, LinkEvents, Meter
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import Hello, Refused, ToAgent, Welcome
from shoal.types.units import Elapsed, Seconds
from shoal.v1 import link_pb2, mqtt_pb2
from shoal.wire import mqtt, nouns, topics
from shoal.wire.handshake import PemFiles
from shoal.wire.identity import NODES, Identity, check_validity, require
from shoal.wire.seal import (
    Ephemeral,
    Opener,
    Sealer,
    SessionKey,
    Signature,
    open_signed,
    parse,
    sign,
)
from shoal.wire.topics import RETAINED, UP, Channel

BEAT_S: Final = Seconds(1.0)
HELLO_BEATS: Final = 10
"""A hello names a beat that it has seen; one that is older than so many is a repeated one."""
WAITING: Final = 64
"""Messages of one node that wait to be read; the oldest go first."""
MOST_LANES: Final = 20_000
"""Names that may have messages waiting."""
MOST_INVALID: Final = 20
"""Messages that cannot be read, in one session, before it ends."""
RETRY_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Between attempts to reach the broker; the last stays."""
IN_FLIGHT: Final = 1000
HELLOS_AT_ONCE: Final = 16
"""A herd of hellos waits, so that beats and statuses do not."""

log: Final = structlog.get_logger("shoal.coordinator.link")


@dataclass(slots=True, eq=False)
class _Session:
    """One node's session. nonce: of its hello. ending: what it is told last, once it ends."""

    identity: Identity
    certificate: x509.Certificate
    epoch: int
    nonce: str
    sealer: Sealer
    opener: Opener
    outbox: Outbox = field(default_factory=Outbox)
    ending: ToAgent | None = None
    invalid: int = 0
    writing: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """Messages of one node, read one after the other."""

    waiting: deque[tuple[Channel, bytes]] = field(default_factory=lambda: deque(maxlen=WAITING))
    is_read: bool = False
    told_stale_at: Elapsed | None = None


class _Connection:
    """One connection to the broker, and what may be known through it."""

    def __init__(self, presence: str, signature: Signature) -> None:
        self.presence = presence
        self.signature = signature
        self.client: aiomqtt.Client | None = None
        self.outdated = asyncio.Event()
        self.beat = 0
        self.greeted: deque[tuple[int, str]] = deque()
        """(beat, nonce) of the hellos that may still be repeated."""
        self.nonces: set[str] = set()

    def is_fresh(self, opening: mqtt_pb2.Opening) -> bool:
        return opening.presence == self.presence and self.beat - HELLO_BEATS <= opening.beat <= self.beat

    def is_new(self, nonce: str) -> bool:
        """Whether this hello comes for the first time; it counts as seen from now on."""
        while self.greeted and self.greeted[0][0] < self.beat - HELLO_BEATS:
            self.nonces.discard(self.greeted.popleft()[1])
        if nonce in self.nonces:
            return False
        self.nonces.add(nonce)
        self.greeted.append((self.beat, nonce))
        return True


class MqttLinks:
    """ports.AgentLinks over a broker; feeds ports.LinkEvents while `run` runs."""

    def __init__(
        self,
        region: str,
        address: str,
        files: PemFiles,
        *,
        identify: Callable[[x509.Certificate], Identity],
        revoked: Callable[[str], Refusal | None],
        models_address: Callable[[], str],
        clock: Clock,
        ids: Ids,
        meter: Meter,
        beat_s: Seconds = BEAT_S,
    ) -> None:
        """address: host:port of the broker. files: the coordinator's own, read at each connection.

        identify: whom the region's authority certified; raises ShoalError(CERT_*). revoked: by serial.
        models_address: host:port where agents on this link fetch models.
        """
        self._region = region
        self._address = address
        self._files = files
        self._identify = identify
        self._revoked = revoked
        self._models_address = models_address
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._beat_s = beat_s
        self._events: LinkEvents | None = None
        self._connection: _Connection | None = None
        self._sessions: dict[str, _Session] = {}
        self._lanes: dict[str, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = asyncio.Semaphore(HELLOS_AT_ONCE)

    def bind(self, events: LinkEvents) -> None:
        """Once, before `run`."""
        self._events = events

    @property
    def connected(self) -> int:
        return len(self._sessions)

    @property
    def is_online(self) -> bool:
        """Whether the broker is there."""
        return self._connection is not None

    def refresh(self) -> None:
        """Connects anew where the coordinator's certificate is another than the one in use."""
        connection = self._connection
        if connection is not None and self._signature() != connection.signature:
            connection.outdated.set()

    async def send(self, node: str, message: ToAgent) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.outbox.put(message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        session = self._sessions.get(node)
        if session is not None:
            await self._close(session, Refused(refusal, fatal))

    async def run(self) -> None:
        """Until it is cancelled: connects, serves, connects again."""
        attempt = 0
        while True:
            try:
                await self._serve()
            except ShoalError as error:
                log.warning("broker not reached", code=error.code, found=error.refusal.found)
            except aiomqtt.MqttError as error:
                log.warning("broker lost", broker=self._address, found=str(error))
                attempt = 0
            except OSError as error:
                log.error("no files to connect with", found=str(error))
            except Exception:
                log.exception("the broker's connection failed unforeseen; it is tried again")
            await self._clock.sleep(Seconds(RETRY_S[min(attempt, len(RETRY_S) - 1)]))
            attempt += 1

    async def _serve(self) -> None:
        """One connection. Raises ShoalError, OSError, aiomqtt.MqttError when it is over."""
        connection = _Connection(self._ids.secret(), self._signature())
        will = aiomqtt.Will(
            topics.region_online(self._region), self._presence(connection, online=False), qos=1, retain=True
        )
        client = connection.client = await mqtt.open_client(
            self._files,
            self._address,
            f"coordinator-{connection.presence[:8]}",
            will,
            in_flight=IN_FLIGHT,
            queue=_queue(self._arrived),
        )
        try:
            await mqtt.subscribe(client, (topics.all_nodes(self._region, each) for each in UP), retained=False)
            self._connection = connection
            log.info("broker reached", broker=self._address)
            await self._beat_forever(connection, client)
        except aiomqtt.MqttError:
            await finish(self._blinded())
            raise
        finally:
            self._connection = None
            await finish(self._forget_all())
            await self._leave(connection, client)

    def _signature(self) -> Signature:
        return Signature.of_pem(self._files.key.read_bytes(), self._files.certificate.read_bytes())

    async def _beat_forever(self, connection: _Connection, client: aiomqtt.Client) -> None:
        """Until the broker is lost (raises aiomqtt.MqttError) or the certificate is another."""
        lost = asyncio.ensure_future(anext(client.messages))  # the queue gives nothing out: it ends with the connection
        try:
            while not connection.outdated.is_set():
                connection.beat += 1
                await self._beat(connection, client, lost)
                await self._close_invalid()
                pause = asyncio.ensure_future(self._clock.sleep(self._beat_s))
                await asyncio.wait({lost, pause}, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
                if lost.done():
                    lost.result()
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def _beat(
        self, connection: _Connection, client: aiomqtt.Client, lost: "asyncio.Future[aiomqtt.Message]"
    ) -> None:
        """The broker's acknowledgement is its sign of life: while it owes one, what nodes do not say proves nothing."""
        told = asyncio.ensure_future(self._publish_presence(connection, client, online=True))
        try:
            await asyncio.wait((told, lost), timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return
            if not told.done():
                await self._blinded()
            await told
        finally:
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)
        if self._events is not None:
            await self._events.sighted()

    async def _blinded(self) -> None:
        if self._events is not None:
            await self._events.blinded(tuple(self._sessions))

    async def _leave(self, connection: _Connection, client: aiomqtt.Client) -> None:
        """In good order, where the broker still answers; else the will says it."""
        try:
            async with asyncio.timeout(mqtt.CLOSE_S):
                await self._publish_presence(connection, client, online=False)
        except (aiomqtt.MqttError, TimeoutError):
            pass
        await mqtt.close_client(client)

    async def _publish_presence(self, connection: _Connection, client: aiomqtt.Client, *, online: bool) -> None:
        payload = self._presence(connection, online=online)
        await mqtt.publish(client, topics.region_online(self._region), payload, retain=True)

    def _presence(self, connection: _Connection, *, online: bool) -> bytes:
        content = mqtt_pb2.RegionPresence(
            presence=connection.presence, beat=connection.beat, every_s=self._beat_s, online=online
        )
        return sign(connection.signature, self._region, "", Channel.ONLINE, content.SerializeToString())

    async def _close_invalid(self) -> None:
        """Sessions whose certificate has ended or was revoked meanwhile."""
        for session in tuple(self._sessions.values()):
            refusal = self._no_longer(session.identity)
            if refusal is not None:
                await self._close(session, Refused(refusal, fatal=False))

    def _no_longer(self, identity: Identity) -> Refusal | None:
        return check_validity(identity, self._clock.wall()) or self._revoked(identity.serial)

    # what comes in

    def _arrived(self, message: aiomqtt.Message) -> None:
        """Sorts by node, on the event loop; reads nothing."""
        payload = mqtt.payload_of(message)
        try:
            topic = topics.parse(message.topic.value, self._region, UP)
        except ShoalError as error:
            self._meter.count("messages_refused", code=error.code)
            return
        lane = self._lanes.get(topic.node)
        if lane is None:
            if len(self._lanes) >= MOST_LANES:
                self._meter.count("messages_dropped", reason="lanes")
                return
            lane = self._lanes[topic.node] = _Lane()
        if len(lane.waiting) == WAITING:
            self._meter.count("messages_dropped", reason="flood")
        lane.waiting.append((topic.channel, payload))
        if not lane.is_read:
            lane.is_read = True
            self._spawn(self._read(topic.node, lane))

    async def _read(self, node: str, lane: _Lane) -> None:
        try:
            while lane.waiting:
                channel, payload = lane.waiting.popleft()
                await self._take(node, lane, channel, payload)
        finally:
            lane.is_read = False
            if node not in self._sessions and lane.told_stale_at is None:
                self._lanes.pop(node, None)

    async def _take(self, node: str, lane: _Lane, channel: Channel, payload: bytes) -> None:
        try:
            match channel:
                case Channel.HELLO:
                    async with self._greeting:
                        await self._take_hello(node, payload)
                case Channel.ONLINE:
                    await self._take_presence(node, payload)
                case _:
                    await self._take_sealed(node, lane, channel, payload)
        except ShoalError as error:
            self._meter.count("messages_refused", code=error.code)
            log.debug("message dropped", node=node, topic=channel, code=error.code, found=error.refusal.found)
        except aiomqtt.MqttError:
            pass  # the connection is over, and so is the session
        except Exception:
            log.exception("message failed", node=node, topic=channel)

    async def _take_hello(self, node: str, payload: bytes) -> None:
        connection, events = self._connection, self._events
        if connection is None or events is None:
            return
        identities: list[Identity] = []
        content, certificate = open_signed(
            payload, lambda found: identities.append(self._admit(found)), self._region, node, Channel.HELLO
        )
        identity = identities[0]
        opening = parse(mqtt_pb2.Opening, content)
        if not connection.is_fresh(opening):
            raise refuse(
                Code.MESSAGE_REPLAYED, f"a hello to beat {opening.beat} of {opening.presence:.40}", "a fresh one"
            )
        hello = nouns.from_wire(Hello, opening.hello)
        if not connection.is_new(f"{node}/{hello.nonce}"):
            raise refuse(Code.MESSAGE_REPLAYED, "a hello that was answered already", "each nonce once")
        opened = await finish(self._open(events, identity, certificate, hello, opening.key, node))
        await self._publish(connection, node, Channel.WELCOME, opened)

    def _admit(self, certificate: x509.Certificate) -> Identity:
        identity = self._identify(certificate)
        require(identity, region=self._region, roles=NODES)
        if (refusal := self._no_longer(identity)) is not None:
            raise ShoalError(refusal)
        return identity

    async def _open(
        self, events: LinkEvents, identity: Identity, certificate: x509.Certificate, hello: Hello, key: bytes, node: str
    ) -> mqtt_pb2.Opened:
        """The answer to a hello: a welcome, and from then on there is a session; else a refusal."""
        ephemeral = Ephemeral()
        try:
            if identity.name != node:
                raise refuse(
                    Code.NODE_MISMATCH, f"a hello of {identity.uri} as {node}", identity.uri, "a node speaks for itself"
                )
            check_hello(hello, identity)
            secret = ephemeral.agree(key, region=self._region, node=node, nonce=hello.nonce)
            answer = await events.opened(node, identity.role, hello)
        except ShoalError as error:
            return self._refused(node, hello, error.refusal)
        if isinstance(answer, Refusal):
            return self._refused(node, hello, answer)
        # No await between `opened` and here: whoever sends to this node from now on reaches this session.
        session_key = SessionKey(secret, self._region, node, answer.epoch)
        session = _Session(identity, certificate, answer.epoch, hello.nonce, Sealer(session_key), Opener(session_key))
        session.outbox.epoch = answer.epoch
        self._sessions[node] = session
        log.info("session opened", node=node, role=identity.role, epoch=answer.epoch, link="mqtt")
        session.writing = self._spawn(self._write_forever(session))
        return self._welcome(answer, hello.nonce, ephemeral.public)

    def _refused(self, node: str, hello: Hello, refusal: Refusal) -> mqtt_pb2.Opened:
        self._meter.count("sessions_refused", code=refusal.code)
        log.warning("session refused", node=node, code=refusal.code, found=refusal.found)
        return mqtt_pb2.Opened(answer=_wire(Refused(refusal, fatal=False)), nonce=hello.nonce)

    def _welcome(self, welcome: Welcome, nonce: str, key: bytes) -> mqtt_pb2.Opened:
        return mqtt_pb2.Opened(
            answer=_wire(welcome), nonce=nonce, key=key, epoch=welcome.epoch, models_address=self._models_address()
        )

    async def _take_presence(self, node: str, payload: bytes) -> None:
        """Only the session's own signer can end it so, and only the session whose hello it names."""
        session = self._sessions.get(node)
        if session is None:
            return

        def is_signer(certificate: x509.Certificate) -> None:
            if certificate != session.certificate:
                raise refuse(Code.SIGNATURE_INVALID, "a presence by another key", "the session's own", "it was dropped")

        content, _ = open_signed(payload, is_signer, self._region, node, Channel.ONLINE)
        presence = parse(mqtt_pb2.Presence, content)
        if presence.nonce == session.nonce and not presence.online:
            await self._forget(session)

    async def _take_sealed(self, node: str, lane: _Lane, channel: Channel, payload: bytes) -> None:
        session = self._sessions.get(node)
        if session is None:
            await self._tell_stale(node, lane, payload)
            return
        try:
            unsealed = session.opener.open(channel, payload)
        except ShoalError as error:
            if error.code is Code.EPOCH_STALE:
                await self._tell_stale(node, lane, payload)
            raise
        try:
            message = nouns.from_agent_from_wire(parse(link_pb2.FromAgent, unsealed.content))
            check_signatures(message, session.identity, session.certificate)
        except ShoalError as error:
            await self._answer_invalid(session, error.refusal)
            raise
        assert self._events is not None, "bound before serving"
        answer = await deliver(self._events, node, session.epoch, message)
        if answer is not None:
            session.outbox.put(answer)

    async def _answer_invalid(self, session: _Session, refusal: Refusal) -> None:
        session.invalid += 1
        if session.invalid >= MOST_INVALID:
            await self._close(session, Refused(refusal, fatal=False))
        else:
            session.outbox.put(Refused(refusal, fatal=False))

    async def _tell_stale(self, node: str, lane: _Lane, payload: bytes) -> None:
        """A message of a session that is over: its sender is told so, at most once a beat."""
        now = self._clock.now()
        if self._connection is None or (lane.told_stale_at is not None and now - lane.told_stale_at < self._beat_s):
            return
        lane.told_stale_at = now
        epoch = parse(mqtt_pb2.Sealed, payload).epoch
        refusal = Refusal(Code.EPOCH_STALE, f"epoch {epoch}", "a session that stands", "connect again")
        opened = mqtt_pb2.Opened(answer=_wire(Refused(refusal, fatal=False)), epoch=epoch)
        await self._publish(self._connection, node, Channel.WELCOME, opened)

    # what goes out

    async def _write_forever(self, session: _Session) -> None:
        """Until its outbox is closed and empty. Whatever the node was not told is sent again in its next session."""
        try:
            async for message in session.outbox:
                connection = self._connection
                if connection is None or connection.client is None:
                    return
                if isinstance(message, DesiredSet):
                    await self._publish(connection, session.identity.name, Channel.DESIRED, nouns.to_wire(message))
                else:
                    last = message is session.ending
                    payload = session.sealer.seal(Channel.REQUEST, _wire(message).SerializeToString(), last=last)
                    await self._put(connection.client, session.identity.name, Channel.REQUEST, payload)
        except (aiomqtt.MqttError, ShoalError) as error:
            log.warning("session cannot be written to", node=session.identity.name, found=str(error))
        finally:
            await finish(self._forget(session))

    async def _publish(self, connection: _Connection, node: str, channel: Channel, message: Message) -> None:
        """Signed. Nothing where the connection is over."""
        if connection.client is None:
            return
        content = message.SerializeToString(deterministic=True)
        await self._put(
            connection.client, node, channel, sign(connection.signature, self._region, node, channel, content)
        )

    async def _put(self, client: aiomqtt.Client, node: str, channel: Channel, payload: bytes) -> None:
        await mqtt.publish(client, topics.of_node(self._region, node, channel), payload, retain=channel in RETAINED)

    async def _close(self, session: _Session, ending: Refused) -> None:
        """The session takes nothing more; its node is told why."""
        session.ending = ending
        session.outbox.put(ending)
        session.outbox.close()
        await self._forget(session)

    async def _forget(self, session: _Session) -> None:
        session.outbox.close()
        name = session.identity.name
        if self._sessions.get(name) is not session:
            return
        del self._sessions[name]
        log.info("session closed", node=name, epoch=session.epoch, link="mqtt")
        assert self._events is not None, "bound before serving"
        await self._events.closed(name, session.epoch)

    async def _forget_all(self) -> None:
        for lane in self._lanes.values():
            lane.waiting.clear()
        self._lanes.clear()
        for session in tuple(self._sessions.values()):
            await self._forget(session)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _wire(message: ToAgent) -> link_pb2.ToAgent:
    return nouns.to_agent_to_wire(message)


def _queue(arrived: Callable[[aiomqtt.Message], None]) -> type[asyncio.Queue[aiomqtt.Message]]:
    """Hands each message on at once; what waits is bounded by node, not for all together."""

    class Sorted(asyncio.Queue[aiomqtt.Message]):
        def put_nowait(self, item: aiomqtt.Message) -> None:
            arrived(item)

    return Sorted
