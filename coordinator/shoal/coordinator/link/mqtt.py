"""The coordinator's side of the agent link over MQTT 5, through an untrusted broker that is never authoritative.

What is answered, and which sessions exist, is decided by `core.link.mqtt_sessions`. This module connects, publishes,
waits, and asks the controllers.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

import aiomqtt
import structlog
from cryptography import x509

from shoal.coordinator import metrics
from shoal.coordinator.core.link.broker_connection import BrokerConnection
from shoal.coordinator.core.link.lanes import Lane, LaneReady, MessageDropped, PauseLane
from shoal.coordinator.core.link.mqtt_sessions import (
    HEARTBEAT_S,
    HelloReceived,
    HelloRefused,
    LinkClosed,
    LinkEffect,
    LinkEffects,
    LinkLost,
    LinkRestored,
    MessageReceived,
    MessageRefused,
    MqttSessions,
    NodeSession,
    OutputReady,
    SessionClosed,
    SessionOpened,
)
from shoal.coordinator.link.mqtt_codec import SigningRegionCodec
from shoal.coordinator.ports import Clock, IdSource, LinkEvents, Meter
from shoal.coordinator.uncancelled import dispatch_message, run_to_completion
from shoal.types.codes import Refusal, ShoalError
from shoal.types.identity import Identity
from shoal.types.link import Refused, ToAgent
from shoal.types.mqtt_frames import Publication
from shoal.types.units import Seconds
from shoal.wire import mqtt
from shoal.wire.handshake import PemFiles
from shoal.wire.seal import SigningIdentity

RETRY_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to reach the broker; the last value repeats."""
IN_FLIGHT: Final = 1000

log: Final = structlog.get_logger("shoal.coordinator.link")


class _Dialed(NamedTuple):
    """A connection to the broker that serves nothing yet."""

    connection: BrokerConnection
    client: aiomqtt.Client
    # What it signs with.
    signature: SigningIdentity


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
        self._address = address
        self._files = files
        self._models_address = models_address
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._make_codec: Callable[[], SigningRegionCodec] = lambda: SigningRegionCodec(
            region, self._signature(), identify=identify, check_serial=check_serial, clock=clock
        )
        self._sessions = MqttSessions(region, heartbeat_s)
        self._events: LinkEvents | None = None
        self._client: aiomqtt.Client | None = None
        self._dialed: _Dialed | None = None
        """The connection that is served next."""
        self._signs_as: SigningIdentity | None = None
        self._must_reconnect = asyncio.Event()
        self._output_ready: dict[NodeSession, asyncio.Event] = {}
        """Of the sessions whose output is published."""
        self._tasks: set[asyncio.Task[None]] = set()

    def bind(self, events: LinkEvents) -> None:
        """Call once, before `run`."""
        self._events = events

    @property
    def session_count(self) -> int:
        return self._sessions.session_count

    @property
    def is_online(self) -> bool:
        """True while connected to the broker."""
        return self._sessions.is_connected

    def refresh(self) -> None:
        """Reconnects if the coordinator's certificate is no longer the one in use: it dials anew first, then ends what
        it has."""
        if self.is_online and self._signature() != self._signs_as:
            self._must_reconnect.set()

    async def send(self, node: str, message: ToAgent) -> None:
        await self._perform(self._sessions.send(node, message))

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        await self._perform(self._sessions.end(node, Refused(refusal, fatal)))

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
        """Serves one connection after the other. Raises ShoalError, OSError, aiomqtt.MqttError when one is lost."""
        self._dialed = await self._dial()
        try:
            while (dialed := self._dialed) is not None:
                self._dialed = None
                await self._serve_one(dialed)
        finally:
            if self._dialed is not None:
                self._spawn(mqtt.close_client(self._dialed.client))
                self._dialed = None

    async def _dial(self) -> _Dialed:
        """Raises ShoalError, OSError."""
        codec = self._make_codec()
        connection = BrokerConnection(self._ids.secret(), codec)
        will = self._sessions.will_of(connection)
        client = await mqtt.open_client(
            self._files,
            self._address,
            f"coordinator-{connection.presence[:8]}",
            aiomqtt.Will(will.topic, will.payload, qos=1, retain=will.retain),
            in_flight=IN_FLIGHT,
            queue=_dispatching_queue(self._on_message),
        )
        return _Dialed(connection, client, codec.signature)

    async def _serve_one(self, dialed: _Dialed) -> None:
        """Serves the connection until the certificate has changed and the next one is dialed. Raises ShoalError,
        OSError, aiomqtt.MqttError when it is lost."""
        connection, client = dialed.connection, dialed.client
        is_lost = False
        try:
            await mqtt.subscribe(client, self._sessions.subscriptions, retained=False)
            self._client, self._signs_as = client, dialed.signature
            self._must_reconnect.clear()
            self._sessions.on_connected(connection)
            log.info("broker_connected", address=self._address)
            await self._send_heartbeats(client)
        except aiomqtt.MqttError:
            is_lost = True
            raise
        finally:
            self._client = None
            ended = self._perform(self._sessions.on_disconnected(is_lost=is_lost))
            await run_to_completion(self._leave_after(ended, connection, client))

    async def _leave_after(
        self, ended: Coroutine[Any, Any, None], connection: BrokerConnection, client: aiomqtt.Client
    ) -> None:
        try:
            await ended
        finally:
            await self._leave(connection, client)

    def _signature(self) -> SigningIdentity:
        return SigningIdentity.from_pem(self._files.key.read_bytes(), self._files.certificate.read_bytes())

    async def _send_heartbeats(self, client: aiomqtt.Client) -> None:
        """Sends heartbeats until the broker is lost (raises aiomqtt.MqttError) or the next connection is in
        `_dialed`."""
        lost = asyncio.ensure_future(anext(client.messages))  # yields no message: it ends with the connection
        next_dial = asyncio.ensure_future(self._dial_next())
        try:
            while not next_dial.done():
                await self._send_heartbeat(lost)
                pause = asyncio.ensure_future(self._clock.sleep(self._sessions.heartbeat_s))
                await asyncio.wait({lost, pause, next_dial}, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
                if lost.done():
                    lost.result()
            self._dialed = next_dial.result()
        except BaseException:
            next_dial.add_done_callback(self._abandon)
            raise
        finally:
            lost.cancel()
            next_dial.cancel()
            await asyncio.gather(lost, next_dial, return_exceptions=True)

    async def _dial_next(self) -> _Dialed:
        """The connection that follows this one, once the certificate has changed. This one serves as long."""
        await self._must_reconnect.wait()
        while True:
            try:
                return await self._dial()
            except ShoalError as error:
                log.warning("broker_connection_failed", address=self._address, code=error.code, error=str(error))
            except OSError as error:
                log.error("broker_connection_failed", address=self._address, error=str(error))
            await self._clock.sleep(Seconds(RETRY_S[-1]))

    def _abandon(self, dialing: "asyncio.Future[_Dialed]") -> None:
        """Nobody uses the connection, if it is there."""
        if not dialing.cancelled() and dialing.exception() is None:
            self._spawn(mqtt.close_client(dialing.result().client))

    async def _send_heartbeat(self, lost: "asyncio.Future[aiomqtt.Message]") -> None:
        """Publishes the presence and waits for the broker's acknowledgement."""
        sent = asyncio.ensure_future(self._publish(self._sessions.next_heartbeat()))
        try:
            await asyncio.wait((sent, lost), timeout=self._sessions.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return
            if not sent.done():
                await self._perform(self._sessions.on_heartbeat_overdue())
            await sent
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
        await self._perform(self._sessions.on_heartbeat_acknowledged(self._clock.now()))

    async def _leave(self, connection: BrokerConnection, client: aiomqtt.Client) -> None:
        """Publishes the offline presence if the broker still answers; otherwise the broker publishes the will."""
        with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
            async with asyncio.timeout(mqtt.CLOSE_S):
                await _publish(client, self._sessions.will_of(connection))
        await mqtt.close_client(client)

    # effects

    async def _perform(self, effects: LinkEffects) -> None:
        """In order, each even where one before it fails. Raises what the first of those raised."""
        failure: Exception | None = None
        for effect in effects:
            try:
                await self._perform_one(effect)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def _perform_one(self, effect: LinkEffect) -> None:
        events = self._events
        match effect:
            case Publication():
                with contextlib.suppress(aiomqtt.MqttError):  # the connection is lost, and the sessions with it
                    await self._publish(effect)
            case LaneReady() | MessageDropped() | MessageRefused():
                self._on_arrival(effect)
            case OutputReady(session):
                if (ready := self._output_ready.get(session)) is not None:
                    ready.set()
            case PauseLane(seconds):
                await self._clock.sleep(seconds)
            case MessageReceived():
                await self._pass_on(effect)
            case HelloReceived():
                await self._perform(await run_to_completion(self._ask(effect)))
            case SessionOpened(session, role):
                log.info("session_opened", node=session.node, role=role, epoch=session.epoch, carrier="mqtt")
                self._output_ready[session] = asyncio.Event()
                self._spawn(self._write(session))
            case SessionClosed(node, epoch):
                log.info("session_closed", node=node, epoch=epoch, carrier="mqtt")
                assert events is not None, "bound before serving"
                await events.on_close(node, epoch)
            case HelloRefused(node, refusal):
                self._meter.count(metrics.SESSIONS_REFUSED, code=refusal.code)
                log.warning("session_refused", node=node, code=refusal.code, error=str(refusal))
            case LinkLost(nodes):
                if events is not None:
                    await events.on_link_lost(nodes)
            case LinkClosed(sessions, is_lost):
                log.info("sessions_closed", count=len(sessions), carrier="mqtt")
                if events is not None:
                    await events.on_link_closed(sessions, is_lost=is_lost)
            case LinkRestored():
                if events is not None:
                    await events.on_link_restored()

    async def _ask(self, received: HelloReceived) -> LinkEffects:
        assert self._events is not None, "bound before serving"
        answer = await self._events.on_hello(received.node, received.role, received.hello)
        return self._sessions.answer_hello(received, answer, self._models_address())

    async def _pass_on(self, received: MessageReceived) -> None:
        assert self._events is not None, "bound before serving"
        session = received.session
        answer = await dispatch_message(self._events, session.node, session.epoch, received.message)
        if answer is not None:
            await self._perform(self._sessions.reply(session, answer))

    def _on_message(self, message: aiomqtt.Message) -> None:
        """On the event loop: queues the message, and starts to read its lane."""
        payload = mqtt.payload_of(message)
        for effect in self._sessions.on_message(message.topic.value, payload, self._clock.now()):
            self._on_arrival(effect)

    def _on_arrival(self, effect: LaneReady | MessageDropped | MessageRefused) -> None:
        match effect:
            case LaneReady(lane):
                self._spawn(self._read(lane))
            case MessageDropped(reason):
                self._meter.count(metrics.MESSAGES_DROPPED, reason=reason)
            case MessageRefused(node, topic, refusal):
                self._meter.count(metrics.MESSAGES_REFUSED, code=refusal.code)
                log.debug("message_dropped", node=node, topic=topic, code=refusal.code, error=str(refusal))

    async def _read(self, lane: Lane) -> None:
        while True:
            try:
                effects = self._sessions.next_step(lane, self._clock.now())
                if effects is None:
                    return
                await self._perform(effects)
            except Exception:
                log.exception("message_failed", node=lane.node)

    async def _write(self, session: NodeSession) -> None:
        """Publishes the session's output until it is closed and all is published."""
        ready = self._output_ready[session]
        try:
            while not session.queue.is_finished:
                ready.clear()
                while (publication := self._sessions.next_output(session)) is not None:
                    await self._publish(publication)
                if not session.queue.is_finished:
                    await ready.wait()
        except (aiomqtt.MqttError, ShoalError) as error:
            log.warning("session_write_failed", node=session.node, error=str(error))
        finally:
            del self._output_ready[session]
            await run_to_completion(self._perform(self._sessions.forget(session)))

    async def _publish(self, publication: Publication) -> None:
        if self._client is not None:
            await _publish(self._client, publication)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _publish(client: aiomqtt.Client, publication: Publication) -> None:
    await mqtt.publish(client, publication.topic, publication.payload, retain=publication.retain)


def _dispatching_queue(on_message: Callable[[aiomqtt.Message], None]) -> type[asyncio.Queue[aiomqtt.Message]]:
    """A queue type that hands each message on at once. The bound on waiting messages is per node, not shared."""

    class DispatchingQueue(asyncio.Queue[aiomqtt.Message]):
        def put_nowait(self, item: aiomqtt.Message) -> None:
            on_message(item)

    return DispatchingQueue
