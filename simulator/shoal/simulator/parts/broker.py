"""The agents' links over an MQTT broker, as far as MQTT semantics reach the ports.

The broker runs beside the coordinator: an agent reaches both by the same path. The model covers retained messages, QoS
1 (a message may arrive twice, the second time late), the last will, and crashes, which end every session at once and at
times lose the retained messages. It does not cover signatures and seals, but what the real adapters conclude from them:
a message that is foreign, repeated or outdated changes nothing. Models come from the coordinator itself, never over the
broker.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.ports import LinkEvents
from shoal.coordinator.uncancelled import dispatch_message, run_to_completion
from shoal.simulator.parts.network import (
    COORDINATOR,
    KEEPALIVE_S,
    Pipe,
    SimNetwork,
    message_facts,
    unreachable,
    version_of,
)
from shoal.simulator.world.world import SimProcess
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import FromAgent, Hello, Refused, ToAgent, Welcome
from shoal.v1 import link_pb2
from shoal.wire import nouns

BROKER: Final = "broker"
CONNECT_TIMEOUT_S: Final = 3.0
WELCOME_TIMEOUT_S: Final = 5.0
HEARTBEAT_S: Final = 1.0
MAX_MISSED_HEARTBEATS: Final = 3
HELLO_VALID_HEARTBEATS: Final = 10
RETRY_S: Final = 0.5
REDELIVERY_S: Final = 2.0
"""Mean seconds until a duplicate arrives."""


@dataclass(frozen=True, slots=True)
class RegionPresence:
    """The coordinator's heartbeat, to all nodes; retained."""

    # Identifies one connection of the coordinator to the broker.
    presence: str
    heartbeat: int
    online: bool


@dataclass(frozen=True, slots=True)
class HelloRequest:
    """A hello, addressed to one presence of the coordinator."""

    presence: str
    heartbeat: int
    content: bytes


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """The answer to the hello with that nonce, or, by its epoch, to a session that has ended."""

    nonce: str
    epoch: int
    content: bytes


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """A message within a session."""

    # True: from the node. False: to the node.
    up: bool
    # The session's epoch; a message of another epoch is outdated.
    epoch: int
    # Number within the session and direction; a repeated number is a duplicate.
    sequence: int
    # Encoded `FromAgent` or `ToAgent`.
    content: bytes
    # True on the message that ends the session.
    last: bool = False


@dataclass(frozen=True, slots=True)
class RetainedDesiredSet:
    """A node's desired set; retained."""

    content: bytes


@dataclass(frozen=True, slots=True)
class NodePresence:
    """Whether the session of the hello with that nonce lives; retained, and the node's last will."""

    nonce: str
    online: bool


BrokerMessage = RegionPresence | HelloRequest | HelloAnswer | SessionMessage | RetainedDesiredSet | NodePresence
AddressedMessage = tuple[str, BrokerMessage]
"""(the node that it is from or to; '' for all, the message): stands for a topic and its payload."""
RETAINED: Final = (RegionPresence, RetainedDesiredSet, NodePresence)


class BrokerClient:
    """One connection to the broker. inbox: messages from the broker; None once the connection is over."""

    def __init__(
        self, broker: "SimBroker", place: str, accepts: Callable[[AddressedMessage], bool], will: AddressedMessage
    ) -> None:
        network = broker.network
        self.place = place
        self.accepts = accepts
        self.will = will
        self.inbox: asyncio.Queue[AddressedMessage | None] = asyncio.Queue()
        there, back = (place, COORDINATOR), (COORDINATOR, place)
        if place == COORDINATOR:
            there, back = (COORDINATOR, BROKER), (BROKER, COORDINATOR)
        self._paths = there, back
        self._broker = broker
        self._silent_count = 0
        self._is_known = True
        self.up = Pipe[AddressedMessage | None](network, *there, self._arrive)
        self.down = Pipe[AddressedMessage](network, *back, self.inbox.put_nowait)
        network.world.call_later(KEEPALIVE_S, self._watch)

    @property
    def is_open(self) -> bool:
        return self.up.open

    def publish(self, node: str, message: BrokerMessage) -> None:
        if self.up.open:
            self.up.send((node, message))

    def disconnect(self) -> None:
        """Disconnect cleanly after everything published: the broker sends no will."""
        if self.up.open:
            self.up.send(None)
            self._end()

    def reset(self) -> None:
        """The client's process died, or it gave up."""
        if self.up.open:
            self._end()
            path = self._broker.network.path(*self._paths[0])
            if not path.cut:
                self._broker.network.world.call_later(0.05 + self._broker.network.delay(path), self._on_lost)

    def on_broker_death(self) -> None:
        self._is_known = False
        if self.up.open:
            self.up.open = self.down.open = False
            path = self._broker.network.path(*self._paths[1])
            notice_s = 2 * KEEPALIVE_S if path.cut else 0.05 + self._broker.network.delay(path)
            self._broker.network.world.call_later(notice_s, lambda: self.inbox.put_nowait(None))

    def retransmit(self) -> None:
        self.up.retransmit()
        self.down.retransmit()

    def _end(self) -> None:
        self.up.open = self.down.open = False
        self.inbox.put_nowait(None)

    def _arrive(self, parcel: AddressedMessage | None) -> None:
        if not self._is_known:
            return
        if parcel is None:
            self._forget()
        else:
            self._broker.publish(parcel)

    def _watch(self) -> None:
        """Keepalive: both ends give up on a path that was cut at two consecutive checks."""
        if not self._is_known:
            return
        paths = [self._broker.network.path(*way) for way in self._paths]
        self._silent_count = self._silent_count + 1 if any(path.cut for path in paths) or not self.up.open else 0
        if self._silent_count >= 2:
            if self.up.open:
                self._end()
            self._on_lost()
            return
        self._broker.network.world.call_later(KEEPALIVE_S, self._watch)

    def _on_lost(self) -> None:
        """The broker notices the loss and publishes the will."""
        if self._is_known:
            self._forget()
            self._broker.publish(self.will)

    def _forget(self) -> None:
        self._is_known = False
        self._broker.clients.remove(self)


class SimBroker:
    """One broker process, which may die at any time and lose its retained messages."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.rng = network.world.rng.stream("broker")
        self.is_up = True
        self.clients: list[BrokerClient] = []
        self._retained: dict[tuple[str, type], AddressedMessage] = {}
        network.heal_listeners.append(self._on_healed)

    def attach(
        self, place: str, accepts: Callable[[AddressedMessage], bool], will: AddressedMessage
    ) -> BrokerClient | None:
        """Open a clean session, which first gets the retained messages that it accepts. None: nothing listens."""
        if not self.is_up:
            return None
        client = BrokerClient(self, place, accepts, will)
        self.clients.append(client)
        for parcel in self._retained.values():
            if accepts(parcel):
                client.down.send(parcel)
        return client

    def publish(self, parcel: AddressedMessage) -> None:
        """Deliver one published message, at times twice."""
        self._distribute(parcel)
        if self.rng.happens(self.network.path(BROKER, COORDINATOR).duplicate):
            self.network.world.call_later(self.rng.exponential(REDELIVERY_S), lambda: self._distribute(parcel))

    def die(self, *, forgets: bool) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self.network.world.record("fault.broker", forgets=forgets, clients=len(self.clients))
        clients, self.clients = self.clients, []
        for client in clients:
            client.on_broker_death()
        if forgets:
            self._retained.clear()

    def start(self) -> None:
        self.is_up = True

    def _distribute(self, parcel: AddressedMessage) -> None:
        if not self.is_up:
            return
        node, message = parcel
        if isinstance(message, RETAINED):
            self._retained[node, type(message)] = parcel
        for client in self.clients:
            if client.accepts(parcel) and client.down.open:
                client.down.send(parcel)

    def _on_healed(self) -> None:
        for client in self.clients:
            client.retransmit()


@dataclass(slots=True)
class _AgentSession:
    """A session at the coordinator's end. seen: sequence of the last message that counted."""

    epoch: int
    nonce: str
    last_sent: int = 0
    last_received: int = 0


@dataclass(slots=True)
class _NodeQueue:
    """Messages of one node, handled one after the other."""

    waiting: asyncio.Queue[BrokerMessage]
    reading: asyncio.Task[None]


class SimBrokerLinks:
    """Implements the coordinator's AgentLinks port."""

    def __init__(self, process: SimProcess, broker: SimBroker) -> None:
        self._process = process
        self._broker = broker
        self._world = broker.network.world
        self._events: LinkEvents | None = None
        self._client: BrokerClient | None = None
        self._presence = ""
        self._heartbeat = 0
        self._nonces: set[str] = set()
        self._sessions: dict[str, _AgentSession] = {}
        self._queues: dict[str, _NodeQueue] = {}

    def serve(self, events: LinkEvents) -> None:
        self._events = events
        self._process.on_death(self._on_death)
        self._process.spawn(self._run(), "broker")

    async def send(self, node: str, message: ToAgent) -> None:
        self._process.gate(f"send to {node}")
        seat = self._sessions.get(node)
        if seat is not None:
            self._send(node, seat, message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        self._process.gate(f"end {node}")
        seat = self._sessions.get(node)
        if seat is not None:
            self._send(node, seat, Refused(refusal, fatal), last=True)
            await self._forget(node, seat)

    def _on_death(self) -> None:
        if self._client is not None:
            self._client.reset()

    async def _run(self) -> None:
        while True:
            rng = self._broker.rng
            presence = rng.hex_token(8)
            offline = RegionPresence(presence, 0, online=False)
            self._client = client = self._broker.attach(COORDINATOR, _is_for_coordinator, ("", offline))
            if client is not None:
                self._presence, self._heartbeat, self._nonces = presence, 0, set()
                beating = self._process.spawn(self._send_heartbeats(client), "beat")
                while (parcel := await client.inbox.get()) is not None:
                    self._process.gate("broker message")
                    self._enqueue(*parcel)
                beating.cancel()
                await run_to_completion(self._on_link_lost())
                self._client = None
                for lane in self._queues.values():
                    lane.reading.cancel()
                self._queues.clear()
                for node, seat in tuple(self._sessions.items()):
                    await run_to_completion(self._forget(node, seat))
            await asyncio.sleep(rng.uniform(0.5, 1.0) * RETRY_S)

    async def _send_heartbeats(self, client: BrokerClient) -> None:
        while True:
            self._heartbeat += 1
            client.publish("", RegionPresence(self._presence, self._heartbeat, online=True))
            await asyncio.sleep(HEARTBEAT_S)
            if self._broker.network.is_open_both_ways(COORDINATOR, BROKER):
                assert self._events is not None
                await self._events.on_link_restored()
            else:
                await self._on_link_lost()

    async def _on_link_lost(self) -> None:
        assert self._events is not None
        await self._events.on_link_lost(tuple(self._sessions))

    def _enqueue(self, node: str, message: BrokerMessage) -> None:
        lane = self._queues.get(node)
        if lane is None:
            waiting: asyncio.Queue[BrokerMessage] = asyncio.Queue()
            reading = self._process.spawn(self._read(node, waiting), f"lane-{node}")
            lane = self._queues[node] = _NodeQueue(waiting, reading)
        lane.waiting.put_nowait(message)

    async def _read(self, node: str, waiting: asyncio.Queue[BrokerMessage]) -> None:
        while True:
            message = await waiting.get()
            try:
                await self._handle(node, message)
            except ShoalError as error:
                self._world.record("link.dropped", node=node, code=str(error.code))

    async def _handle(self, node: str, message: BrokerMessage) -> None:
        match message:
            case HelloRequest():
                fresh = (
                    message.presence == self._presence
                    and self._heartbeat - HELLO_VALID_HEARTBEATS <= message.heartbeat <= self._heartbeat
                )
                hello = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(message.content))
                assert isinstance(hello, Hello)
                if fresh and hello.nonce not in self._nonces:
                    self._nonces.add(hello.nonce)
                    await run_to_completion(self._open(node, hello))
            case NodePresence():
                seat = self._sessions.get(node)
                if seat is not None and seat.nonce == message.nonce and not message.online:
                    await self._forget(node, seat)
            case SessionMessage():
                await self._handle_session_message(node, message)
            case RegionPresence() | HelloAnswer() | RetainedDesiredSet():
                return

    async def _open(self, node: str, hello: Hello) -> None:
        assert self._events is not None
        answer = await self._events.on_hello(node, hello.node.role, hello)
        if isinstance(answer, Refusal):
            self._publish(node, HelloAnswer(hello.nonce, 0, _encode(Refused(answer, fatal=False))))
            return
        self._sessions[node] = _AgentSession(answer.epoch, hello.nonce)
        self._world.record("link.opened", node=node, epoch=answer.epoch, history=answer.history, term=answer.term)
        self._publish(node, HelloAnswer(hello.nonce, answer.epoch, _encode(answer)))

    async def _handle_session_message(self, node: str, sealed: SessionMessage) -> None:
        seat = self._sessions.get(node)
        if seat is None or seat.epoch != sealed.epoch:
            stale = Refusal(Code.EPOCH_STALE, f"epoch {sealed.epoch}", "a session that stands", "connect again")
            self._publish(node, HelloAnswer("", sealed.epoch, _encode(Refused(stale, fatal=False))))
            return
        if sealed.sequence <= seat.last_received:
            return
        seat.last_received = sealed.sequence
        message = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(sealed.content))
        assert self._events is not None
        answer = await dispatch_message(self._events, node, seat.epoch, message)
        if answer is not None:
            self._send(node, seat, answer)

    def _send(self, node: str, seat: _AgentSession, message: ToAgent, *, last: bool = False) -> None:
        if self._client is None:
            return
        self._world.record("coordinator.sent", node=node, epoch=seat.epoch, **message_facts(message))
        if isinstance(message, DesiredSet):
            self._publish(node, RetainedDesiredSet(_encode(message)))
        else:
            seat.last_sent += 1
            self._publish(node, SessionMessage(False, seat.epoch, seat.last_sent, _encode(message), last))

    def _publish(self, node: str, message: BrokerMessage) -> None:
        if self._client is not None:
            self._client.publish(node, message)

    async def _forget(self, node: str, seat: _AgentSession) -> None:
        if self._sessions.get(node) is seat:
            del self._sessions[node]
            assert self._events is not None
            await self._events.on_close(node, seat.epoch)


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
        will = (self._node, NodePresence(hello.nonce, online=False))
        client = self._broker.attach(self._place, lambda parcel: _is_for_agent(parcel, self._node), will)
        if client is None:
            await asyncio.sleep(network.delay(network.path(COORDINATOR, self._place)))
            raise unreachable("connection refused")
        self._process.on_death(client.reset)
        session = SimBrokerSession(self._process, client, self._place, self._node, hello)
        try:
            await session.open()
        except BaseException:
            client.reset()
            raise
        return session


class SimBrokerSession:
    """Implements the agent's Session port. `welcome` is set once `open` has returned."""

    welcome: Welcome

    def __init__(self, process: SimProcess, client: BrokerClient, place: str, node: str, hello: Hello) -> None:
        self._process = process
        self._client = client
        self._place = place
        self._node = node
        self._hello = hello
        self._region = RegionPresence("", 0, online=False)
        self._last_heartbeat_at = 0.0
        self._is_open = False
        self._last_sent = 0
        self._last_received = 0
        self._desired: DesiredSet | None = None
        self._end_refusal: Refusal | None = None
        self._inbox: list[ToAgent] = []
        self._arrival = asyncio.Event()

    async def open(self) -> None:
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                while not self._is_open:
                    self._handle(await self._client.inbox.get())
                    if self._end_refusal is not None:
                        raise ShoalError(self._end_refusal)
        except TimeoutError as cause:
            raise unreachable("no welcome") from cause
        self._process.check()
        self._client.publish(self._node, NodePresence(self._hello.nonce, online=True))
        self._last_heartbeat_at = self._process.world.now()
        self._process.spawn(self._read(), "session")

    async def send(self, message: FromAgent) -> None:
        self._process.gate("send")
        if self._end_refusal is not None:
            raise ShoalError(self._end_refusal)
        self._process.world.record("agent.sent", node=self._place, **message_facts(message))
        self._last_sent += 1
        content = nouns.from_agent_to_wire(message).SerializeToString()
        self._client.publish(self._node, SessionMessage(True, self.welcome.epoch, self._last_sent, content))

    async def receive(self) -> ToAgent:
        while True:
            self._process.gate("receive")
            if self._inbox:
                return self._inbox.pop(0)
            if self._desired is not None:
                desired, self._desired = self._desired, None
                return desired
            if self._end_refusal is not None:
                raise ShoalError(self._end_refusal)
            self._arrival.clear()
            await self._arrival.wait()

    async def close(self) -> None:
        self._process.gate("close")
        self._end(unreachable("it is closed").refusal)
        self._client.publish(self._node, NodePresence(self._hello.nonce, online=False))
        self._client.disconnect()

    async def _read(self) -> None:
        try:
            while self._end_refusal is None:
                async with asyncio.timeout_at(self._last_heartbeat_at + MAX_MISSED_HEARTBEATS * HEARTBEAT_S):
                    parcel = await self._client.inbox.get()
                self._handle(parcel)
        except TimeoutError:
            self._end(unreachable("no beat of the coordinator").refusal)

    def _handle(self, parcel: AddressedMessage | None) -> None:
        if parcel is None:
            self._end(unreachable("the broker is lost").refusal)
            return
        match parcel[1]:
            case RegionPresence() as region:
                self._handle_presence(region)
            case HelloAnswer() as opened:
                self._handle_hello_answer(opened)
            case RetainedDesiredSet(content):
                desired = nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(content))
                assert isinstance(desired, DesiredSet)
                newest = self._desired.version if self._desired is not None else self._hello.holds
                if not _is_older(desired.version, newest):
                    self._desired = desired
                    self._arrival.set()
            case SessionMessage() as sealed:
                self._handle_session_message(sealed)
            case HelloRequest() | NodePresence():
                return

    def _handle_presence(self, region: RegionPresence) -> None:
        """Send a hello to an unknown presence. Within a session, an unknown presence means that the coordinator
        restarted."""
        known = self._region
        if region.presence == known.presence:
            if region.online and region.heartbeat <= known.heartbeat:
                return
        elif self._is_open:
            if region.online:
                self._end(unreachable("the coordinator has connected anew").refusal)
            return
        if not region.online:
            if self._is_open:
                self._end(unreachable("the coordinator has left the broker").refusal)
            return
        self._region, self._last_heartbeat_at = region, self._process.world.now()
        if not self._is_open and region.presence != known.presence:
            content = nouns.from_agent_to_wire(self._hello).SerializeToString()
            self._client.publish(self._node, HelloRequest(region.presence, region.heartbeat, content))

    def _handle_hello_answer(self, opened: HelloAnswer) -> None:
        answer = nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(opened.content))
        if self._is_open:
            if opened.epoch == self.welcome.epoch and isinstance(answer, Refused):
                self._end(answer.refusal)
        elif opened.nonce == self._hello.nonce:
            if isinstance(answer, Refused):
                self._end(answer.refusal)
                return
            assert isinstance(answer, Welcome)
            self.welcome, self._is_open = answer, True
            if self._desired is not None and self._desired.version.history != answer.history:
                self._desired = None  # retained from a history that has ended

    def _handle_session_message(self, sealed: SessionMessage) -> None:
        if not self._is_open or sealed.epoch != self.welcome.epoch or sealed.sequence <= self._last_received:
            return
        self._last_received = sealed.sequence
        message = nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(sealed.content))
        self._inbox.append(message)
        self._arrival.set()
        if sealed.last:
            self._end(message.refusal if isinstance(message, Refused) else unreachable("it was ended").refusal)

    def _end(self, refusal: Refusal) -> None:
        self._end_refusal = self._end_refusal or refusal
        self._arrival.set()


def _is_for_coordinator(parcel: AddressedMessage) -> bool:
    message = parcel[1]
    return isinstance(message, HelloRequest | NodePresence) or (isinstance(message, SessionMessage) and message.up)


def _is_for_agent(parcel: AddressedMessage, node: str) -> bool:
    name, message = parcel
    if isinstance(message, SessionMessage):
        return name == node and not message.up
    return isinstance(message, RegionPresence) or (
        name == node and isinstance(message, HelloAnswer | RetainedDesiredSet)
    )


def _is_older(offered: Version, current: Version | None) -> bool:
    return (
        current is not None
        and offered.history == current.history
        and (offered.term, offered.generation) < (current.term, current.generation)
    )


def _encode(message: ToAgent) -> bytes:
    return nouns.to_agent_to_wire(message).SerializeToString()
