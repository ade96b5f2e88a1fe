"""The agents' links over a simulated broker. What both ends say is decided by the real cores, `agent.core.mqtt_session`
and `coordinator.core.link`; these classes only carry it, as the link adapters do.

Frames have their real encodings and MACs. They are not signed: nobody forges in the simulation. Models come from the
coordinator itself, never over the broker.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from shoal.agent.core.mqtt_session import MqttSessionMachine
from shoal.agent.ports import LinkRefused
from shoal.coordinator.core.link.broker_connection import BrokerConnection
from shoal.coordinator.core.link.codec import Signer
from shoal.coordinator.core.link.lanes import Lane, LaneReady, MessageDropped, PauseLane
from shoal.coordinator.core.link.mqtt_sessions import (
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
from shoal.coordinator.ports import LinkEvents
from shoal.coordinator.uncancelled import dispatch_message, run_to_completion
from shoal.simulator.parts.broker import BrokerClient, BrokerLost, SimBroker
from shoal.simulator.parts.network import COORDINATOR, REGION, message_facts, unreachable, version_of
from shoal.simulator.world.world import SimProcess
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Refusal, ShoalError
from shoal.types.identity import Identity
from shoal.types.link import FromAgent, Hello, Refused, ToAgent, Welcome
from shoal.types.mqtt_frames import NodePresence, Opening, OpeningAnswer, Publication, RegionPresence, SealedFrame
from shoal.types.units import Elapsed, Wall
from shoal.wire import mqtt_frames, nouns
from shoal.wire.seal import SessionKey, decode_sealed

CONNECT_TIMEOUT_S: Final = 3.0
CLOSE_S: Final = 1.0
RETRY_S: Final = 0.5


class UnsignedNodeCodec:
    """Implements `agent.core.mqtt_session.NodeCodec`. The key of a session is its nonce."""

    def __init__(self, node: str) -> None:
        self._node = node

    @property
    def public_key(self) -> bytes:
        return b""

    def agree(self, coordinator_key: bytes, nonce: str, epoch: int) -> SessionKey:
        return SessionKey(nonce.encode(), REGION, self._node, epoch)

    def sign_opening(self, opening: Opening) -> bytes:
        return mqtt_frames.encode_opening(opening)

    def sign_presence(self, presence: NodePresence) -> bytes:
        return mqtt_frames.encode_node_presence(presence)

    def verify_presence(self, payload: bytes) -> RegionPresence:
        return mqtt_frames.decode_region_presence(payload)

    def verify_answer(self, payload: bytes) -> OpeningAnswer:
        return mqtt_frames.decode_opening_answer(payload)

    def verify_desired_set(self, payload: bytes) -> DesiredSet:
        return nouns.decode(DesiredSet, payload)

    def encode_message(self, message: FromAgent) -> bytes:
        return mqtt_frames.encode_from_agent(message)

    def decode_message(self, content: bytes) -> ToAgent:
        return mqtt_frames.decode_to_agent(content)


class NonceKey:
    """Implements `coordinator.core.link.codec.AgreedKey`."""

    def __init__(self, node: str, nonce: str) -> None:
        self._node = node
        self._nonce = nonce

    @property
    def public(self) -> bytes:
        return b""

    def seal(self, epoch: int) -> SessionKey:
        return SessionKey(self._nonce.encode(), REGION, self._node, epoch)


class UnsignedMessageReader:
    """Implements `coordinator.core.link.codec.MessageReader`."""

    def __init__(self) -> None:
        self._reader = nouns.SessionReader()

    def read(self, content: bytes) -> FromAgent:
        return mqtt_frames.decode_from_agent(content, self._reader)


class UnsignedRegionCodec:
    """Implements `coordinator.core.link.codec.RegionCodec`. Everybody is who they say, and no certificate ends."""

    def sign_presence(self, presence: RegionPresence) -> bytes:
        return mqtt_frames.encode_region_presence(presence)

    def sign_answer(self, node: str, answer: OpeningAnswer) -> bytes:
        return mqtt_frames.encode_opening_answer(answer)

    def sign_desired_set(self, node: str, desired: DesiredSet) -> bytes:
        return nouns.encode(desired)

    def verify_opening(self, node: str, payload: bytes) -> tuple[Opening, Signer]:
        opening = mqtt_frames.decode_opening(payload)
        who = opening.hello.node
        return opening, Signer(Identity(who.region, who.role, who.name, Wall(0.0), Wall(0.0), "0"), b"")

    def verify_presence(self, node: str, payload: bytes, signer: Signer) -> NodePresence:
        return mqtt_frames.decode_node_presence(payload)

    def check_signer(self, signer: Signer) -> Refusal | None:
        return None

    def agree(self, node: str, key: bytes, nonce: str) -> NonceKey:
        return NonceKey(node, nonce)

    def encode_message(self, message: ToAgent) -> bytes:
        return mqtt_frames.encode_to_agent(message)

    def decode_sealed(self, payload: bytes) -> SealedFrame:
        return decode_sealed(payload)

    def reader_of(self, signer: Signer) -> "UnsignedMessageReader":
        return UnsignedMessageReader()


class SimBrokerLinks:
    """Implements the coordinator's AgentLinks port."""

    def __init__(self, process: SimProcess, broker: SimBroker) -> None:
        self._process = process
        self._broker = broker
        self._world = broker.network.world
        self._sessions = MqttSessions(REGION)
        self._events: LinkEvents | None = None
        self._client: BrokerClient | None = None
        self._output_ready: dict[NodeSession, asyncio.Event] = {}

    def serve(self, events: LinkEvents) -> None:
        self._events = events
        self._process.on_death(self._on_death)
        self._process.spawn(self._run(), "broker")

    async def send(self, node: str, message: ToAgent) -> None:
        self._process.gate(f"send to {node}")
        await self._send(self._sessions.send(node, message), message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        self._process.gate(f"end {node}")
        ending = Refused(refusal, fatal)
        await self._send(self._sessions.end(node, ending), ending)

    def _on_death(self) -> None:
        if self._client is not None:
            self._client.reset()

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except ShoalError as error:
                self._world.record("link.failed", code=str(error.code))
            await asyncio.sleep(self._broker.rng.uniform(0.5, 1.0) * RETRY_S)

    async def _serve(self) -> None:
        """Serve one connection, until the broker is lost or a controller fails."""
        connection = BrokerConnection(self._broker.rng.hex_token(8), UnsignedRegionCodec())
        client = self._broker.attach(COORDINATOR, self._sessions.will_of(connection))
        if client is None:
            return
        self._client = client
        failure: ShoalError | None = None
        try:
            await client.subscribe(self._sessions.subscriptions, retained=False)
            self._sessions.on_connected(connection)
            await self._send_heartbeats(client)
        except BrokerLost:
            pass
        except ShoalError as error:
            failure = error
        client.reset()
        await run_to_completion(self._perform(self._sessions.on_disconnected(is_lost=failure is None)))
        if failure is not None:
            raise failure

    async def _receive(self, client: BrokerClient) -> None:
        """Queue what arrives, until the connection is over."""
        while (publication := await client.inbox.get()) is not None:
            self._process.gate("broker message")
            for effect in self._sessions.on_message(publication.topic, publication.payload, self._now()):
                self._on_arrival(effect)

    async def _send_heartbeats(self, client: BrokerClient) -> None:
        """Raises BrokerLost, ShoalError."""
        lost = self._process.spawn(self._receive(client), "receive")
        while not lost.done():
            await self._send_heartbeat(client, lost)
            await asyncio.wait([lost], timeout=self._sessions.heartbeat_s)

    async def _send_heartbeat(self, client: BrokerClient, lost: "asyncio.Task[None]") -> None:
        sent = asyncio.ensure_future(client.publish(self._sessions.next_heartbeat()))
        try:
            await asyncio.wait([sent, lost], timeout=self._sessions.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return
            if not sent.done():
                await self._perform(self._sessions.on_heartbeat_overdue())
            await sent
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
        await self._perform(self._sessions.on_heartbeat_acknowledged(self._now()))

    async def _send(self, effects: LinkEffects, message: ToAgent) -> None:
        for effect in effects:
            if isinstance(effect, OutputReady):
                session = effect.session
                self._world.record("coordinator.sent", node=session.node, epoch=session.epoch, **message_facts(message))
        await self._perform(effects)

    async def _perform(self, effects: LinkEffects) -> None:
        """In order, each even where a controller failed before it. Raises that controller's ShoalError."""
        failure: ShoalError | None = None
        for effect in effects:
            try:
                await self._perform_one(effect)
            except ShoalError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def _perform_one(self, effect: LinkEffect) -> None:
        events = self._events
        assert events is not None
        match effect:
            case Publication():
                await self._publish(effect)
            case LaneReady() | MessageDropped() | MessageRefused():
                self._on_arrival(effect)
            case OutputReady(session):
                if (ready := self._output_ready.get(session)) is not None:
                    ready.set()
            case PauseLane(seconds):
                await asyncio.sleep(seconds)
            case MessageReceived(session, message):
                answer = await dispatch_message(events, session.node, session.epoch, message)
                if answer is not None:
                    await self._send(self._sessions.reply(session, answer), answer)
            case HelloReceived():
                await self._perform(await run_to_completion(self._ask(events, effect)))
            case SessionOpened(session):
                self._output_ready[session] = asyncio.Event()
                self._process.spawn(self._write(session), f"output-{session.node}")
            case SessionClosed(node, epoch):
                await events.on_close(node, epoch)
            case HelloRefused(node, refusal):
                self._world.record("link.refused", node=node, code=str(refusal.code))
            case LinkLost(nodes):
                await events.on_link_lost(nodes)
            case LinkClosed(sessions, is_lost):
                await events.on_link_closed(sessions, is_lost=is_lost)
            case LinkRestored():
                await events.on_link_restored()

    async def _ask(self, events: LinkEvents, received: HelloReceived) -> LinkEffects:
        answer = await events.on_hello(received.node, received.role, received.hello)
        effects = self._sessions.answer_hello(received, answer, "")
        if isinstance(answer, Welcome):
            self._world.record(
                "link.opened", node=received.node, epoch=answer.epoch, history=answer.history, term=answer.term
            )
        return effects

    def _on_arrival(self, effect: LaneReady | MessageDropped | MessageRefused) -> None:
        match effect:
            case LaneReady(lane):
                self._process.spawn(self._read(lane), f"lane-{lane.node}")
            case MessageDropped(reason):
                self._world.record("link.dropped", reason=reason)
            case MessageRefused(node, _, refusal):
                self._world.record("link.dropped", node=node, code=str(refusal.code))

    async def _read(self, lane: Lane) -> None:
        while (effects := self._sessions.next_step(lane, self._now())) is not None:
            try:
                await self._perform(effects)
            except ShoalError as error:
                self._world.record("link.failed", node=lane.node, code=str(error.code))

    async def _write(self, session: NodeSession) -> None:
        ready = self._output_ready[session]
        while not session.queue.is_finished:
            ready.clear()
            while (publication := self._sessions.next_output(session)) is not None:
                await self._publish(publication)
            if not session.queue.is_finished:
                await ready.wait()
        del self._output_ready[session]
        try:
            await self._perform(self._sessions.forget(session))
        except ShoalError as error:
            self._world.record("link.failed", node=session.node, code=str(error.code))

    async def _publish(self, publication: Publication) -> None:
        try:
            if self._client is not None:
                await self._client.publish(publication)
        except BrokerLost:
            pass  # the heartbeats find out

    def _now(self) -> Elapsed:
        return Elapsed(self._world.now())


class SimBrokerLink:
    """Implements the agent's Link port. place: of its machine; node: the name in its hello."""

    def __init__(self, process: SimProcess, broker: SimBroker, place: str, node: str) -> None:
        self._process = process
        self._broker = broker
        self._place = place
        self._node = node

    async def connect(self, hello: Hello) -> "SimBrokerSession":
        network = self._broker.network
        self._process.gate("connect")
        network.world.record("link.connect", node=self._place, holds=version_of(hello.holds))
        there = network.transit(self._place, COORDINATOR)
        if there is None:
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise unreachable("no answer")
        await asyncio.sleep(there)
        machine = MqttSessionMachine(REGION, self._node, hello, UnsignedNodeCodec(self._node))
        client = self._broker.attach(self._place, machine.will)
        if client is None:
            await asyncio.sleep(network.delay(network.path(COORDINATOR, self._place)))
            raise unreachable("connection refused")
        self._process.on_death(client.reset)
        session = SimBrokerSession(self._process, machine, client, self._place)
        try:
            await session.open()
        except BaseException:
            await session.close()
            raise
        return session


class SimBrokerSession:
    """Implements the agent's Session port. `welcome` is set once `open` has returned."""

    welcome: Welcome

    def __init__(self, process: SimProcess, machine: MqttSessionMachine, client: BrokerClient, place: str) -> None:
        self._process = process
        self._machine = machine
        self._client = client
        self._place = place
        self._arrival = asyncio.Event()

    async def open(self) -> None:
        machine = self._machine
        try:
            await self._client.subscribe(machine.subscriptions, retained=True)
            machine.start(self._now())
            while machine.welcome is None and machine.end_refusal is None:
                await self._read_once()
        except BrokerLost as cause:
            raise unreachable("the broker is lost") from cause
        if machine.hello_refused is not None:
            raise LinkRefused(machine.hello_refused)
        if machine.welcome is None:
            assert machine.end_refusal is not None
            raise ShoalError(machine.end_refusal)
        self._process.check()
        machine.on_announced(self._now())
        self.welcome = machine.welcome
        self._process.spawn(self._read(), "session")

    async def send(self, message: FromAgent) -> None:
        self._process.gate("send")
        publication = self._machine.send(message)
        self._process.world.record("agent.sent", node=self._place, **message_facts(message))
        try:
            await self._client.publish(publication)
        except BrokerLost as cause:
            self._end()
            raise unreachable("the broker is lost") from cause

    async def receive(self) -> ToAgent:
        while True:
            self._process.gate("receive")
            if (message := self._machine.next_message()) is not None:
                return message
            if self._machine.end_refusal is not None:
                raise ShoalError(self._machine.end_refusal)
            self._arrival.clear()
            await self._arrival.wait()

    async def close(self) -> None:
        self._process.gate("close")
        farewell = self._machine.close()
        self._arrival.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._publish(farewell)
        except (BrokerLost, TimeoutError):
            pass  # the last will says the same
        self._client.disconnect()

    async def _read(self) -> None:
        try:
            while self._machine.end_refusal is None:
                await self._read_once()
        except BrokerLost:
            self._end()

    async def _read_once(self) -> None:
        """Handle the next message, and publish what follows from it; or what is due by time."""
        try:
            async with asyncio.timeout_at(self._machine.deadline):
                publication = await self._client.inbox.get()
        except TimeoutError:
            self._machine.on_time(self._now())
        else:
            if publication is None:
                raise BrokerLost
            await self._on_message(publication)
        self._arrival.set()

    async def _on_message(self, publication: Publication) -> None:
        topic, payload = publication.topic, publication.payload
        try:
            answers = self._machine.on_message(topic, payload, retained=publication.retain, now=self._now())
        except ShoalError as error:
            self._process.world.record("agent.dropped", node=self._place, code=str(error.code))
            return
        await self._publish(answers)

    async def _publish(self, publications: Iterable[Publication]) -> None:
        for each in publications:
            await self._client.publish(each)

    def _end(self) -> None:
        self._machine.end(unreachable("the broker is lost").refusal)
        self._arrival.set()

    def _now(self) -> Elapsed:
        return Elapsed(self._process.world.now())
