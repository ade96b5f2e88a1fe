"""The agents' links over an MQTT broker, as far as its semantics reach the ports.

The broker stands beside the coordinator: an agent reaches both by the same path. What it keeps (retained messages),
what it repeats (QoS 1: a message may come twice, the second time late), what it says for a client that it lost (the
last will) and what a crash of it costs (every session at once, and at times all that it kept) is modelled here;
signatures and seals are not, but what they let the real adapters tell: what is foreign, repeated or outdated changes
nothing. Models come from the coordinator itself, never over the broker.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.finish import deliver, finish
from shoal.coordinator.ports import LinkEvents
from shoal.simulator.network import COORDINATOR, KEEPALIVE_S, Network, Pipe, told, unreachable, version_of
from shoal.simulator.world import Process
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import FromAgent, Hello, Refused, ToAgent, Welcome
from shoal.v1 import link_pb2
from shoal.wire import nouns

BROKER: Final = "broker"
CONNECT_TIMEOUT_S: Final = 3.0
WELCOME_S: Final = 5.0
BEAT_S: Final = 1.0
SILENT_BEATS: Final = 3
HELLO_BEATS: Final = 10
RETRY_S: Final = 0.5
REPEATED_S: Final = 2.0
"""Mean seconds until a message comes for the second time."""


@dataclass(frozen=True, slots=True)
class RegionPresence:
    """The coordinator's beat, to all; retained. presence: of one connection of it to the broker."""

    presence: str
    beat: int
    online: bool


@dataclass(frozen=True, slots=True)
class Opening:
    """A hello, to one presence of the coordinator."""

    presence: str
    beat: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to the hello of that nonce; or, by its epoch, to a session that is over."""

    nonce: str
    epoch: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """A message within a session, `up` from the node or down to it."""

    up: bool
    epoch: int
    sequence: int
    content: bytes
    last: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """A node's desired set; retained."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether the session of that hello lives; retained, and the node's last will."""

    nonce: str
    online: bool


Message = RegionPresence | Opening | Opened | Sealed | Kept | Presence
Parcel = tuple[str, Message]
"""(the node that it is from or to; '' for all, the message): a topic and its payload."""
RETAINED: Final = (RegionPresence, Kept, Presence)


class Client:
    """One connection to the broker. inbox: what it gives out; None when it is over."""

    def __init__(self, broker: "Broker", place: str, reads: Callable[[Parcel], bool], will: Parcel) -> None:
        network = broker.network
        self.place = place
        self.reads = reads
        self.will = will
        self.inbox: asyncio.Queue[Parcel | None] = asyncio.Queue()
        there, back = (place, COORDINATOR), (COORDINATOR, place)
        if place == COORDINATOR:
            there, back = (COORDINATOR, BROKER), (BROKER, COORDINATOR)
        self._ways = there, back
        self._broker = broker
        self._silent = 0
        self._known = True
        self.up = Pipe[Parcel | None](network, *there, self._arrive)
        self.down = Pipe[Parcel](network, *back, self.inbox.put_nowait)
        network.world.later(KEEPALIVE_S, self._watch)

    @property
    def is_open(self) -> bool:
        return self.up.open

    def publish(self, node: str, message: Message) -> None:
        if self.up.open:
            self.up.send((node, message))

    def leave(self) -> None:
        """In good order, behind all that was published: no will."""
        if self.up.open:
            self.up.send(None)
            self._end()

    def reset(self) -> None:
        """The client's process is gone, or gave up."""
        if self.up.open:
            self._end()
            path = self._broker.network.path(*self._ways[0])
            if not path.cut:
                self._broker.network.world.later(0.05 + self._broker.network.delay(path), self._lost)

    def broker_died(self) -> None:
        self._known = False
        if self.up.open:
            self.up.open = self.down.open = False
            path = self._broker.network.path(*self._ways[1])
            notice_s = 2 * KEEPALIVE_S if path.cut else 0.05 + self._broker.network.delay(path)
            self._broker.network.world.later(notice_s, lambda: self.inbox.put_nowait(None))

    def retransmit(self) -> None:
        self.up.retransmit()
        self.down.retransmit()

    def _end(self) -> None:
        self.up.open = self.down.open = False
        self.inbox.put_nowait(None)

    def _arrive(self, parcel: Parcel | None) -> None:
        if not self._known:
            return
        if parcel is None:
            self._forget()
        else:
            self._broker.take(parcel)

    def _watch(self) -> None:
        """Keepalive: both ends give up on a path that was silent twice."""
        if not self._known:
            return
        paths = [self._broker.network.path(*way) for way in self._ways]
        self._silent = self._silent + 1 if any(path.cut for path in paths) or not self.up.open else 0
        if self._silent >= 2:
            if self.up.open:
                self._end()
            self._lost()
            return
        self._broker.network.world.later(KEEPALIVE_S, self._watch)

    def _lost(self) -> None:
        """The broker misses it, and says what it was asked to."""
        if self._known:
            self._forget()
            self._broker.take(self.will)

    def _forget(self) -> None:
        self._known = False
        self._broker.clients.remove(self)


class Broker:
    """One broker process: it may die at any time, and forget."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.chance = network.world.chance.stream("broker")
        self.is_up = True
        self.clients: list[Client] = []
        self._kept: dict[tuple[str, type], Parcel] = {}
        network.on_healed.append(self._healed)

    def attach(self, place: str, reads: Callable[[Parcel], bool], will: Parcel) -> Client | None:
        """A connection that starts clean, and first gets what is kept of what it reads. None: nobody listens."""
        if not self.is_up:
            return None
        client = Client(self, place, reads, will)
        self.clients.append(client)
        for parcel in self._kept.values():
            if reads(parcel):
                client.down.send(parcel)
        return client

    def take(self, parcel: Parcel) -> None:
        """One published message, and at times once more."""
        self._give(parcel)
        if self.chance.happens(self.network.path(BROKER, COORDINATOR).duplicate):
            self.network.world.later(self.chance.delay(REPEATED_S), lambda: self._give(parcel))

    def die(self, *, forgets: bool) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self.network.world.record("fault.broker", forgets=forgets, clients=len(self.clients))
        clients, self.clients = self.clients, []
        for client in clients:
            client.broker_died()
        if forgets:
            self._kept.clear()

    def start(self) -> None:
        self.is_up = True

    def _give(self, parcel: Parcel) -> None:
        if not self.is_up:
            return
        node, message = parcel
        if isinstance(message, RETAINED):
            self._kept[node, type(message)] = parcel
        for client in self.clients:
            if client.reads(parcel) and client.down.open:
                client.down.send(parcel)

    def _healed(self) -> None:
        for client in self.clients:
            client.retransmit()


@dataclass(slots=True)
class _Seat:
    """A session at the coordinator's end. seen: the sequence of the last message that counted."""

    epoch: int
    nonce: str
    said: int = 0
    seen: int = 0


@dataclass(slots=True)
class _Lane:
    """One node's messages, read one after the other."""

    waiting: asyncio.Queue[Message]
    reading: asyncio.Task[None]


class BrokerLinks:
    """The coordinator's AgentLinks port."""

    def __init__(self, process: Process, broker: Broker) -> None:
        self._process = process
        self._broker = broker
        self._world = broker.network.world
        self._events: LinkEvents | None = None
        self._client: Client | None = None
        self._presence = ""
        self._beat = 0
        self._nonces: set[str] = set()
        self._seats: dict[str, _Seat] = {}
        self._lanes: dict[str, _Lane] = {}

    def serve(self, events: LinkEvents) -> None:
        self._events = events
        self._process.on_death(self._died)
        self._process.spawn(self._run(), "broker")

    async def send(self, node: str, message: ToAgent) -> None:
        self._process.gate(f"send to {node}")
        seat = self._seats.get(node)
        if seat is not None:
            self._tell(node, seat, message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        self._process.gate(f"end {node}")
        seat = self._seats.get(node)
        if seat is not None:
            self._tell(node, seat, Refused(refusal, fatal), last=True)
            await self._forget(node, seat)

    def _died(self) -> None:
        if self._client is not None:
            self._client.reset()

    async def _run(self) -> None:
        while True:
            chance = self._broker.chance
            presence = chance.token(8)
            offline = RegionPresence(presence, 0, online=False)
            self._client = client = self._broker.attach(COORDINATOR, _goes_up, ("", offline))
            if client is not None:
                self._presence, self._beat, self._nonces = presence, 0, set()
                beating = self._process.spawn(self._beat_forever(client), "beat")
                while (parcel := await client.inbox.get()) is not None:
                    self._process.gate("broker message")
                    self._sort(*parcel)
                beating.cancel()
                await finish(self._blinded())
                self._client = None
                for lane in self._lanes.values():
                    lane.reading.cancel()
                self._lanes.clear()
                for node, seat in tuple(self._seats.items()):
                    await finish(self._forget(node, seat))
            await asyncio.sleep(chance.between(0.5, 1.0) * RETRY_S)

    async def _beat_forever(self, client: Client) -> None:
        while True:
            self._beat += 1
            client.publish("", RegionPresence(self._presence, self._beat, online=True))
            await asyncio.sleep(BEAT_S)
            if self._broker.network.open_both_ways(COORDINATOR, BROKER):
                assert self._events is not None
                await self._events.sighted()
            else:
                await self._blinded()

    async def _blinded(self) -> None:
        assert self._events is not None
        await self._events.blinded(tuple(self._seats))

    def _sort(self, node: str, message: Message) -> None:
        lane = self._lanes.get(node)
        if lane is None:
            waiting: asyncio.Queue[Message] = asyncio.Queue()
            reading = self._process.spawn(self._read(node, waiting), f"lane-{node}")
            lane = self._lanes[node] = _Lane(waiting, reading)
        lane.waiting.put_nowait(message)

    async def _read(self, node: str, waiting: asyncio.Queue[Message]) -> None:
        while True:
            message = await waiting.get()
            try:
                await self._take(node, message)
            except ShoalError as error:
                self._world.record("link.dropped", node=node, code=str(error.code))

    async def _take(self, node: str, message: Message) -> None:
        match message:
            case Opening():
                fresh = message.presence == self._presence and self._beat - HELLO_BEATS <= message.beat <= self._beat
                hello = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(message.content))
                assert isinstance(hello, Hello)
                if fresh and hello.nonce not in self._nonces:
                    self._nonces.add(hello.nonce)
                    await finish(self._open(node, hello))
            case Presence():
                seat = self._seats.get(node)
                if seat is not None and seat.nonce == message.nonce and not message.online:
                    await self._forget(node, seat)
            case Sealed():
                await self._take_sealed(node, message)
            case RegionPresence() | Opened() | Kept():
                return

    async def _open(self, node: str, hello: Hello) -> None:
        assert self._events is not None
        answer = await self._events.opened(node, hello.node.role, hello)
        if isinstance(answer, Refusal):
            self._publish(node, Opened(hello.nonce, 0, _down(Refused(answer, fatal=False))))
            return
        self._seats[node] = _Seat(answer.epoch, hello.nonce)
        self._world.record("link.opened", node=node, epoch=answer.epoch, history=answer.history, term=answer.term)
        self._publish(node, Opened(hello.nonce, answer.epoch, _down(answer)))

    async def _take_sealed(self, node: str, sealed: Sealed) -> None:
        seat = self._seats.get(node)
        if seat is None or seat.epoch != sealed.epoch:
            stale = Refusal(Code.EPOCH_STALE, f"epoch {sealed.epoch}", "a session that stands", "connect again")
            self._publish(node, Opened("", sealed.epoch, _down(Refused(stale, fatal=False))))
            return
        if sealed.sequence <= seat.seen:
            return
        seat.seen = sealed.sequence
        message = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(sealed.content))
        assert self._events is not None
        answer = await deliver(self._events, node, seat.epoch, message)
        if answer is not None:
            self._tell(node, seat, answer)

    def _tell(self, node: str, seat: _Seat, message: ToAgent, *, last: bool = False) -> None:
        if self._client is None:
            return
        self._world.record("coordinator.sent", node=node, epoch=seat.epoch, **told(message))
        if isinstance(message, DesiredSet):
            self._publish(node, Kept(_down(message)))
        else:
            seat.said += 1
            self._publish(node, Sealed(False, seat.epoch, seat.said, _down(message), last))

    def _publish(self, node: str, message: Message) -> None:
        if self._client is not None:
            self._client.publish(node, message)

    async def _forget(self, node: str, seat: _Seat) -> None:
        if self._seats.get(node) is seat:
            del self._seats[node]
            assert self._events is not None
            await self._events.closed(node, seat.epoch)


class BrokerLink:
    """The agent's Link port. place: of its machine; node: the name that its hello says."""

    def __init__(self, process: Process, broker: Broker, place: str, node: str) -> None:
        self._process = process
        self._broker = broker
        self._place = place
        self._node = node

    async def connect(self, hello: Hello) -> "BrokerSession":
        network = self._broker.network
        self._process.gate("connect")
        network.world.record("link.connect", node=self._place, holds=version_of(hello.holds))
        there = network.transit(self._place, COORDINATOR)
        if there is None:
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise unreachable("no answer")
        await asyncio.sleep(there)
        will = (self._node, Presence(hello.nonce, online=False))
        client = self._broker.attach(self._place, lambda parcel: _goes_down(parcel, self._node), will)
        if client is None:
            await asyncio.sleep(network.delay(network.path(COORDINATOR, self._place)))
            raise unreachable("connection refused")
        self._process.on_death(client.reset)
        session = BrokerSession(self._process, client, self._place, self._node, hello)
        try:
            await session.open()
        except BaseException:
            client.reset()
            raise
        return session


class BrokerSession:
    """The agent's Session port. `welcome` is there once `open` has returned."""

    welcome: Welcome

    def __init__(self, process: Process, client: Client, place: str, node: str, hello: Hello) -> None:
        self._process = process
        self._client = client
        self._place = place
        self._node = node
        self._hello = hello
        self._region = RegionPresence("", 0, online=False)
        self._heard_at = 0.0
        self._is_open = False
        self._said = 0
        self._seen = 0
        self._desired: DesiredSet | None = None
        self._ended: Refusal | None = None
        self._inbox: list[ToAgent] = []
        self._arrived = asyncio.Event()

    async def open(self) -> None:
        try:
            async with asyncio.timeout(WELCOME_S):
                while not self._is_open:
                    self._take(await self._client.inbox.get())
                    if self._ended is not None:
                        raise ShoalError(self._ended)
        except TimeoutError as cause:
            raise unreachable("no welcome") from cause
        self._process.check()
        self._client.publish(self._node, Presence(self._hello.nonce, online=True))
        self._heard_at = self._process.world.now()
        self._process.spawn(self._read(), "session")

    async def send(self, message: FromAgent) -> None:
        self._process.gate("send")
        if self._ended is not None:
            raise ShoalError(self._ended)
        self._process.world.record("agent.sent", node=self._place, **told(message))
        self._said += 1
        content = nouns.from_agent_to_wire(message).SerializeToString()
        self._client.publish(self._node, Sealed(True, self.welcome.epoch, self._said, content))

    async def receive(self) -> ToAgent:
        while True:
            self._process.gate("receive")
            if self._inbox:
                return self._inbox.pop(0)
            if self._desired is not None:
                desired, self._desired = self._desired, None
                return desired
            if self._ended is not None:
                raise ShoalError(self._ended)
            self._arrived.clear()
            await self._arrived.wait()

    async def close(self) -> None:
        self._process.gate("close")
        self._end(unreachable("it is closed").refusal)
        self._client.publish(self._node, Presence(self._hello.nonce, online=False))
        self._client.leave()

    async def _read(self) -> None:
        try:
            while self._ended is None:
                async with asyncio.timeout_at(self._heard_at + SILENT_BEATS * BEAT_S):
                    parcel = await self._client.inbox.get()
                self._take(parcel)
        except TimeoutError:
            self._end(unreachable("no beat of the coordinator").refusal)

    def _take(self, parcel: Parcel | None) -> None:
        if parcel is None:
            self._end(unreachable("the broker is lost").refusal)
            return
        match parcel[1]:
            case RegionPresence() as region:
                self._take_region(region)
            case Opened() as opened:
                self._take_opened(opened)
            case Kept(content):
                desired = nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(content))
                assert isinstance(desired, DesiredSet)
                newest = self._desired.version if self._desired is not None else self._hello.holds
                if not _is_older(desired.version, newest):
                    self._desired = desired
                    self._arrived.set()
            case Sealed() as sealed:
                self._take_sealed(sealed)
            case Opening() | Presence():
                return

    def _take_region(self, region: RegionPresence) -> None:
        """An unknown presence is said hello to; in a session it means that the coordinator began anew."""
        known = self._region
        if region.presence == known.presence:
            if region.online and region.beat <= known.beat:
                return
        elif self._is_open:
            if region.online:
                self._end(unreachable("the coordinator has connected anew").refusal)
            return
        if not region.online:
            if self._is_open:
                self._end(unreachable("the coordinator has left the broker").refusal)
            return
        self._region, self._heard_at = region, self._process.world.now()
        if not self._is_open and region.presence != known.presence:
            content = nouns.from_agent_to_wire(self._hello).SerializeToString()
            self._client.publish(self._node, Opening(region.presence, region.beat, content))

    def _take_opened(self, opened: Opened) -> None:
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
                self._desired = None  # kept from a history that has ended

    def _take_sealed(self, sealed: Sealed) -> None:
        if not self._is_open or sealed.epoch != self.welcome.epoch or sealed.sequence <= self._seen:
            return
        self._seen = sealed.sequence
        message = nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(sealed.content))
        self._inbox.append(message)
        self._arrived.set()
        if sealed.last:
            self._end(message.refusal if isinstance(message, Refused) else unreachable("it was ended").refusal)

    def _end(self, refusal: Refusal) -> None:
        self._ended = self._ended or refusal
        self._arrived.set()


def _goes_up(parcel: Parcel) -> bool:
    message = parcel[1]
    return isinstance(message, Opening | Presence) or (isinstance(message, Sealed) and message.up)


def _goes_down(parcel: Parcel, node: str) -> bool:
    name, message = parcel
    if isinstance(message, Sealed):
        return name == node and not message.up
    return isinstance(message, RegionPresence) or (name == node and isinstance(message, Opened | Kept))


def _is_older(offered: Version, held: Version | None) -> bool:
    return (
        held is not None
        and offered.history == held.history
        and (offered.term, offered.generation) < (held.term, held.generation)
    )


def _down(message: ToAgent) -> bytes:
    return nouns.to_agent_to_wire(message).SerializeToString()
