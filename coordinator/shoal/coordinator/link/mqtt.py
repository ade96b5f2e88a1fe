"""The coordinator's side of the agent link over MQTT 5, through an untrusted broker that is never authoritative.

One connection to the broker carries all sessions, and its loss ends them all. The next connection has a new presence:
agents say hello to it, report in full, and get their desired sets again. Each node has a queue of its own, so that a
flood, a slow store or junk affects that node only.
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

from shoal.coordinator import metrics
from shoal.coordinator.link.check import check_hello, check_signatures
from shoal.coordinator.link.outbox import Outbox
from shoal.coordinator.link.rate_limiter import SessionRateLimiter
from shoal.coordinator.ports import Clock, IdSource, LinkEvents, Meter
from shoal.coordinator.uncancelled import dispatch_message, run_to_completion
from shoal.types import topics
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import NODES, Identity
from shoal.types.link import Hello, Refused, ToAgent, Welcome
from shoal.types.topics import RETAINED, UP, Channel
from shoal.types.units import Elapsed, Seconds
from shoal.v1 import link_pb2, mqtt_pb2
from shoal.wire import mqtt, nouns
from shoal.wire.handshake import PemFiles
from shoal.wire.identity import check_validity, require
from shoal.wire.seal import (
    Ephemeral,
    Opener,
    Sealer,
    SessionKey,
    SigningIdentity,
    parse,
    sign,
    verify_signed_message,
)

HEARTBEAT_S: Final = Seconds(1.0)
MAX_HELLO_AGE_HEARTBEATS: Final = 10
"""A hello names a heartbeat that it has seen. One older than this many heartbeats is a replay."""
MAX_WAITING: Final = 64
"""Messages of one node that wait to be read; beyond it the oldest are dropped."""
MAX_LANES: Final = 20_000
"""Nodes that may have messages waiting."""
MAX_INVALID: Final = 20
"""Unreadable messages in one session that end it."""
RETRY_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to reach the broker; the last value repeats."""
IN_FLIGHT: Final = 1000
MAX_CONCURRENT_HELLOS: Final = 16
"""Hellos handled at once; in a reconnect storm the others wait, so that heartbeats and statuses are not delayed."""

log: Final = structlog.get_logger("shoal.coordinator.link")


@dataclass(slots=True, eq=False)
class _Session:
    """One node's session, from its welcome until it is closed or the broker is lost."""

    # Who the certificate says the node is.
    identity: Identity
    # The node's certificate, which its presence and receipts are checked against.
    certificate: x509.Certificate
    # Number of the session, given by the controller; part of the session key.
    epoch: int
    # Nonce of the hello that opened the session; a presence must name it to end the session.
    nonce: str
    # Seals messages to the node.
    sealer: Sealer
    # Opens sealed messages from the node and rejects replays.
    opener: Opener
    # Messages that wait to be sent to the node.
    outbox: Outbox = field(default_factory=Outbox)
    # Refusal that ends the session, sealed as the last message; None while the session is open.
    last_message: ToAgent | None = None
    # Unreadable messages so far, of at most MAX_INVALID.
    invalid_count: int = 0
    # Task that sends the outbox; None until it is started.
    writer: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """Messages of one node, read one after the other."""

    # Unread messages with their channels; when full, the oldest is dropped.
    waiting: deque[tuple[Channel, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    # True while a task reads this lane.
    is_reading: bool = False
    # When the node was last told that its session is over; None: never.
    stale_notified_at: Elapsed | None = None
    # Limits how fast messages are read, so that a flood delays nobody else.
    rate_limiter: SessionRateLimiter = field(default_factory=SessionRateLimiter)


class _Connection:
    """One connection to the broker, and the hellos answered on it."""

    def __init__(self, presence: str, signature: SigningIdentity) -> None:
        self.presence = presence
        self.signature = signature
        self.client: aiomqtt.Client | None = None
        self.must_reconnect = asyncio.Event()
        self.heartbeat = 0
        self.recent_hellos: deque[tuple[int, str]] = deque()
        """(heartbeat, nonce) of the hellos that could still be replayed."""
        self.recent_nonces: set[str] = set()

    def is_fresh(self, opening: mqtt_pb2.Opening) -> bool:
        return (
            opening.presence == self.presence
            and self.heartbeat - MAX_HELLO_AGE_HEARTBEATS <= opening.beat <= self.heartbeat
        )

    def is_new(self, nonce: str) -> bool:
        """True if this hello arrives for the first time; records it."""
        while self.recent_hellos and self.recent_hellos[0][0] < self.heartbeat - MAX_HELLO_AGE_HEARTBEATS:
            self.recent_nonces.discard(self.recent_hellos.popleft()[1])
        if nonce in self.recent_nonces:
            return False
        self.recent_nonces.add(nonce)
        self.recent_hellos.append((self.heartbeat, nonce))
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
        check_serial: Callable[[str], Refusal | None],
        models_address: Callable[[], str],
        clock: Clock,
        ids: IdSource,
        meter: Meter,
        heartbeat_s: Seconds = HEARTBEAT_S,
    ) -> None:
        """address: host:port of the broker. files: the coordinator's own, read at each connection.

        identify: the identity that the region's authority certified; raises ShoalError(CERT_*). check_serial: the
        refusal for a revoked serial, else None. models_address: host:port where agents on this link fetch models.
        """
        self._region = region
        self._address = address
        self._files = files
        self._identify = identify
        self._check_serial = check_serial
        self._models_address = models_address
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._heartbeat_s = heartbeat_s
        self._events: LinkEvents | None = None
        self._connection: _Connection | None = None
        self._sessions: dict[str, _Session] = {}
        self._lanes: dict[str, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hello_slots = asyncio.Semaphore(MAX_CONCURRENT_HELLOS)

    def bind(self, events: LinkEvents) -> None:
        """Call once, before `run`."""
        self._events = events

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def is_online(self) -> bool:
        """True while connected to the broker."""
        return self._connection is not None

    def refresh(self) -> None:
        """Reconnects if the coordinator's certificate is no longer the one in use."""
        connection = self._connection
        if connection is not None and self._signature() != connection.signature:
            connection.must_reconnect.set()

    async def send(self, node: str, message: ToAgent) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.outbox.put(message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        session = self._sessions.get(node)
        if session is not None:
            await self._close(session, Refused(refusal, fatal))

    async def run(self) -> None:
        """Connects, serves and reconnects until it is cancelled."""
        attempt = 0
        while True:
            try:
                await self._serve()
            except ShoalError as error:
                log.warning("broker_connection_failed", address=self._address, code=error.code, error=str(error))
            except aiomqtt.MqttError as error:
                log.warning("broker_lost", address=self._address, error=str(error))
                attempt = 0
            except OSError as error:
                log.error("broker_connection_failed", address=self._address, error=str(error))
            except Exception:
                log.exception("broker_connection_failed", address=self._address)
            await self._clock.sleep(Seconds(RETRY_S[min(attempt, len(RETRY_S) - 1)]))
            attempt += 1

    async def _serve(self) -> None:
        """Serves one connection. Raises ShoalError, OSError, aiomqtt.MqttError when it ends."""
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
            queue=_dispatching_queue(self._on_message),
        )
        try:
            await mqtt.subscribe(client, (topics.all_nodes(self._region, each) for each in UP), retained=False)
            self._connection = connection
            log.info("broker_connected", address=self._address)
            await self._send_heartbeats(connection, client)
        except aiomqtt.MqttError:
            await run_to_completion(self._report_link_lost())
            raise
        finally:
            self._connection = None
            await run_to_completion(self._forget_all())
            await self._leave(connection, client)

    def _signature(self) -> SigningIdentity:
        return SigningIdentity.from_pem(self._files.key.read_bytes(), self._files.certificate.read_bytes())

    async def _send_heartbeats(self, connection: _Connection, client: aiomqtt.Client) -> None:
        """Sends heartbeats until the broker is lost (raises aiomqtt.MqttError) or the certificate changes."""
        lost = asyncio.ensure_future(anext(client.messages))  # yields no message: it ends with the connection
        try:
            while not connection.must_reconnect.is_set():
                connection.heartbeat += 1
                await self._send_heartbeat(connection, client, lost)
                await self._close_invalid()
                self._remove_idle_lanes()
                pause = asyncio.ensure_future(self._clock.sleep(self._heartbeat_s))
                await asyncio.wait({lost, pause}, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
                if lost.done():
                    lost.result()
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def _send_heartbeat(
        self, connection: _Connection, client: aiomqtt.Client, lost: "asyncio.Future[aiomqtt.Message]"
    ) -> None:
        """Publishes the presence and waits for the broker's acknowledgement. Until it arrives, a node's silence proves
        nothing."""
        told = asyncio.ensure_future(self._publish_presence(connection, client, online=True))
        try:
            await asyncio.wait((told, lost), timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return
            if not told.done():
                await self._report_link_lost()
            await told
        finally:
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)
        if self._events is not None:
            await self._events.on_link_restored()

    async def _report_link_lost(self) -> None:
        if self._events is not None:
            await self._events.on_link_lost(tuple(self._sessions))

    async def _leave(self, connection: _Connection, client: aiomqtt.Client) -> None:
        """Publishes the offline presence if the broker still answers; otherwise the broker publishes the will."""
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
            presence=connection.presence, beat=connection.heartbeat, every_s=self._heartbeat_s, online=online
        )
        return sign(connection.signature, self._region, "", Channel.ONLINE, content.SerializeToString())

    async def _close_invalid(self) -> None:
        """Closes sessions whose certificate has expired or was revoked."""
        for session in tuple(self._sessions.values()):
            refusal = self._check_identity(session.identity)
            if refusal is not None:
                await self._close(session, Refused(refusal, fatal=False))

    def _check_identity(self, identity: Identity) -> Refusal | None:
        return check_validity(identity, self._clock.wall()) or self._check_serial(identity.serial)

    # incoming messages

    def _on_message(self, message: aiomqtt.Message) -> None:
        """Sorts by node, on the event loop; does not parse the payload."""
        payload = mqtt.payload_of(message)
        try:
            topic = topics.parse(message.topic.value, self._region, UP)
        except ShoalError as error:
            self._meter.count(metrics.MESSAGES_REFUSED, code=error.code)
            return
        lane = self._lanes.get(topic.node)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                self._meter.count(metrics.MESSAGES_DROPPED, reason="lanes")
                return
            lane = self._lanes[topic.node] = _Lane()
        if len(lane.waiting) == MAX_WAITING:
            self._meter.count(metrics.MESSAGES_DROPPED, reason="flood")
        lane.waiting.append((topic.channel, payload))
        if not lane.is_reading:
            lane.is_reading = True
            self._spawn(self._read(topic.node, lane))

    async def _read(self, node: str, lane: _Lane) -> None:
        try:
            while lane.waiting:
                await lane.rate_limiter.wait()
                channel, payload = lane.waiting.popleft()
                await self._dispatch(node, lane, channel, payload)
        finally:
            lane.is_reading = False
            if node not in self._sessions and lane.stale_notified_at is None:
                self._lanes.pop(node, None)

    def _remove_idle_lanes(self) -> None:
        """Removes the lanes of nodes without a session, once their stale notice limits no further one."""
        now = self._clock.now()
        for node, lane in tuple(self._lanes.items()):
            is_notified = lane.stale_notified_at is not None and now - lane.stale_notified_at < self._heartbeat_s
            if node not in self._sessions and not lane.is_reading and not is_notified:
                del self._lanes[node]

    async def _dispatch(self, node: str, lane: _Lane, channel: Channel, payload: bytes) -> None:
        try:
            match channel:
                case Channel.HELLO:
                    async with self._hello_slots:
                        await self._on_hello(node, payload)
                case Channel.ONLINE:
                    await self._on_presence(node, payload)
                case _:
                    await self._on_sealed(node, lane, channel, payload)
        except ShoalError as error:
            self._meter.count(metrics.MESSAGES_REFUSED, code=error.code)
            log.debug("message_dropped", node=node, topic=channel, code=error.code, error=str(error))
        except aiomqtt.MqttError:
            pass  # the connection is lost, and the session with it
        except Exception:
            log.exception("message_failed", node=node, topic=channel)

    async def _on_hello(self, node: str, payload: bytes) -> None:
        connection, events = self._connection, self._events
        if connection is None or events is None:
            return
        identities: list[Identity] = []
        content, certificate = verify_signed_message(
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
        opened = await run_to_completion(self._open(events, identity, certificate, hello, opening.key, node))
        await self._publish(connection, node, Channel.WELCOME, opened)

    def _admit(self, certificate: x509.Certificate) -> Identity:
        identity = self._identify(certificate)
        require(identity, region=self._region, roles=NODES)
        if (refusal := self._check_identity(identity)) is not None:
            raise ShoalError(refusal)
        return identity

    async def _open(
        self, events: LinkEvents, identity: Identity, certificate: x509.Certificate, hello: Hello, key: bytes, node: str
    ) -> mqtt_pb2.Opened:
        """The answer to a hello: a welcome, with which the session exists, or a refusal."""
        ephemeral = Ephemeral()
        try:
            if identity.name != node:
                raise refuse(
                    Code.NODE_MISMATCH, f"a hello of {identity.uri} as {node}", identity.uri, "a node speaks for itself"
                )
            check_hello(hello, identity)
            secret = ephemeral.agree(key, region=self._region, node=node, nonce=hello.nonce)
            answer = await events.on_hello(node, identity.role, hello)
        except ShoalError as error:
            return self._refuse(node, hello, error.refusal)
        if isinstance(answer, Refusal):
            return self._refuse(node, hello, answer)
        # No await between `on_hello` and here: messages to this node reach this session from now on.
        session_key = SessionKey(secret, self._region, node, answer.epoch)
        session = _Session(identity, certificate, answer.epoch, hello.nonce, Sealer(session_key), Opener(session_key))
        session.outbox.epoch = answer.epoch
        self._sessions[node] = session
        log.info("session_opened", node=node, role=identity.role, epoch=answer.epoch, carrier="mqtt")
        session.writer = self._spawn(self._write_forever(session))
        return self._welcome(answer, hello.nonce, ephemeral.public)

    def _refuse(self, node: str, hello: Hello, refusal: Refusal) -> mqtt_pb2.Opened:
        self._meter.count(metrics.SESSIONS_REFUSED, code=refusal.code)
        log.warning("session_refused", node=node, code=refusal.code, error=str(refusal))
        return mqtt_pb2.Opened(answer=_to_wire(Refused(refusal, fatal=False)), nonce=hello.nonce)

    def _welcome(self, welcome: Welcome, nonce: str, key: bytes) -> mqtt_pb2.Opened:
        return mqtt_pb2.Opened(
            answer=_to_wire(welcome), nonce=nonce, key=key, epoch=welcome.epoch, models_address=self._models_address()
        )

    async def _on_presence(self, node: str, payload: bytes) -> None:
        """Ends the session if the presence is signed by the session's own key and names its hello."""
        session = self._sessions.get(node)
        if session is None:
            return

        def is_signer(certificate: x509.Certificate) -> None:
            if certificate != session.certificate:
                raise refuse(Code.SIGNATURE_INVALID, "a presence by another key", "the session's own", "it was dropped")

        content, _ = verify_signed_message(payload, is_signer, self._region, node, Channel.ONLINE)
        presence = parse(mqtt_pb2.Presence, content)
        if presence.nonce == session.nonce and not presence.online:
            await self._forget(session)

    async def _on_sealed(self, node: str, lane: _Lane, channel: Channel, payload: bytes) -> None:
        session = self._sessions.get(node)
        if session is None:
            await self._notify_stale(node, lane, payload)
            return
        try:
            unsealed = session.opener.open(channel, payload)
        except ShoalError as error:
            if error.code is Code.EPOCH_STALE:
                await self._notify_stale(node, lane, payload)
            raise
        try:
            message = nouns.from_agent_from_wire(parse(link_pb2.FromAgent, unsealed.content))
            check_signatures(message, session.identity, session.certificate)
        except ShoalError as error:
            await self._answer_invalid(session, error.refusal)
            raise
        assert self._events is not None, "bound before serving"
        answer = await dispatch_message(self._events, node, session.epoch, message)
        if answer is not None:
            session.outbox.put(answer)

    async def _answer_invalid(self, session: _Session, refusal: Refusal) -> None:
        session.invalid_count += 1
        if session.invalid_count >= MAX_INVALID:
            await self._close(session, Refused(refusal, fatal=False))
        else:
            session.outbox.put(Refused(refusal, fatal=False))

    async def _notify_stale(self, node: str, lane: _Lane, payload: bytes) -> None:
        """Tells the sender of a message that its session is over, at most once per heartbeat."""
        now = self._clock.now()
        if self._connection is None or (
            lane.stale_notified_at is not None and now - lane.stale_notified_at < self._heartbeat_s
        ):
            return
        lane.stale_notified_at = now
        epoch = parse(mqtt_pb2.Sealed, payload).epoch
        refusal = Refusal(Code.EPOCH_STALE, f"epoch {epoch}", "a session that stands", "connect again")
        opened = mqtt_pb2.Opened(answer=_to_wire(Refused(refusal, fatal=False)), epoch=epoch)
        await self._publish(self._connection, node, Channel.WELCOME, opened)

    # outgoing messages

    async def _write_forever(self, session: _Session) -> None:
        """Sends the outbox until it is closed and empty. The next session repeats whatever the node did not receive."""
        try:
            async for message in session.outbox:
                connection = self._connection
                if connection is None or connection.client is None:
                    return
                if isinstance(message, DesiredSet):
                    await self._publish(connection, session.identity.name, Channel.DESIRED, nouns.to_wire(message))
                else:
                    last = message is session.last_message
                    payload = session.sealer.seal(Channel.REQUEST, _to_wire(message).SerializeToString(), last=last)
                    await self._put(connection.client, session.identity.name, Channel.REQUEST, payload)
        except (aiomqtt.MqttError, ShoalError) as error:
            log.warning("session_write_failed", node=session.identity.name, error=str(error))
        finally:
            await run_to_completion(self._forget(session))

    async def _publish(self, connection: _Connection, node: str, channel: Channel, message: Message) -> None:
        """Publishes a signed message; does nothing if the connection is lost."""
        if connection.client is None:
            return
        content = message.SerializeToString(deterministic=True)
        await self._put(
            connection.client, node, channel, sign(connection.signature, self._region, node, channel, content)
        )

    async def _put(self, client: aiomqtt.Client, node: str, channel: Channel, payload: bytes) -> None:
        await mqtt.publish(client, topics.of_node(self._region, node, channel), payload, retain=channel in RETAINED)

    async def _close(self, session: _Session, ending: Refused) -> None:
        """Closes the session to further messages and tells its node why."""
        session.last_message = ending
        session.outbox.put(ending)
        session.outbox.close()
        await self._forget(session)

    async def _forget(self, session: _Session) -> None:
        session.outbox.close()
        name = session.identity.name
        if self._sessions.get(name) is not session:
            return
        del self._sessions[name]
        log.info("session_closed", node=name, epoch=session.epoch, carrier="mqtt")
        assert self._events is not None, "bound before serving"
        await self._events.on_close(name, session.epoch)

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


def _to_wire(message: ToAgent) -> link_pb2.ToAgent:
    return nouns.to_agent_to_wire(message)


def _dispatching_queue(on_message: Callable[[aiomqtt.Message], None]) -> type[asyncio.Queue[aiomqtt.Message]]:
    """A queue type that hands each message on at once. The bound on waiting messages is per node, not shared."""

    class DispatchingQueue(asyncio.Queue[aiomqtt.Message]):
        def put_nowait(self, item: aiomqtt.Message) -> None:
            on_message(item)

    return DispatchingQueue
