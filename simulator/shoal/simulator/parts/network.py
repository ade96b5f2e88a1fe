"""Links with loss, delay, duplication, reordering and cuts, each direction on its own.

An agent's session carries the real nouns as the real bytes of `shoal.wire`. As a *stream* (gRPC over TCP), a lost
packet only arrives late, and a cut holds everything back until it heals or either end gives up. As *datagrams* (what a
broker with QoS 0 would do), every message is lost, duplicated, delayed or overtaken on its own.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from shoal.coordinator.ports import LinkEvents
from shoal.coordinator.uncancelled import dispatch_message, run_to_completion
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.link import (
    FromAgent,
    Hello,
    Lease,
    LogLines,
    LogsAsked,
    NodeEvents,
    ProbeNow,
    Receipts,
    Refused,
    SpansAsked,
    SpansFound,
    ToAgent,
    Welcome,
)
from shoal.types.route import Endpoint
from shoal.v1 import link_pb2
from shoal.wire import nouns

if TYPE_CHECKING:
    from shoal.simulator.parts.machine import SimMachine

T = TypeVar("T")

REGION: Final = "sim"
COORDINATOR = "coordinator"
CONNECT_TIMEOUT_S = 3.0
KEEPALIVE_S = 5.0


@dataclass(slots=True)
class PathConditions:
    """Current conditions of one direction between two machines."""

    # True: nothing passes.
    cut: bool = False
    # Chance, 0 to 1, that a datagram is lost, or that a stream's packet arrives 0.2 s late.
    loss: float = 0.0
    # Chance, 0 to 1, that a datagram arrives twice.
    duplicate: float = 0.0
    # Chance, 0 to 1, that a message takes ten times its delay.
    late: float = 0.0
    # Mean of the exponentially distributed delay, in seconds.
    delay_s: float = 0.002


@dataclass(slots=True)
class LinkListener:
    process: SimProcess
    events: LinkEvents
    sessions: dict[str, "_LinkConnection"] = field(default_factory=dict)


class Paths:
    """Both directions between any two machines."""

    def __init__(self, world: SimWorld, name: str = "network") -> None:
        self.world = world
        self.rng = world.rng.stream(name)
        self.arrived_by = 0.0
        """Virtual time, seconds, by which all that was sent until now is there, unless a path is cut."""
        self._paths: dict[tuple[str, str], PathConditions] = {}

    def path(self, source: str, target: str) -> PathConditions:
        """The conditions of one direction; assign to its fields to change them."""
        return self._paths.setdefault((source, target), PathConditions())

    def paths(self) -> tuple[PathConditions, ...]:
        return tuple(self._paths.values())

    def is_open_both_ways(self, one: str, other: str) -> bool:
        return one == other or not (self.path(one, other).cut or self.path(other, one).cut)

    def transit(self, source: str, target: str, rng: Rng | None = None) -> float | None:
        """Seconds that a message sent now takes; None: it is lost. rng: what draws them; None: this network's own."""
        path = self.path(source, target)
        if path.cut or (rng or self.rng).happens(path.loss):
            return None
        return self.delay(path, rng)

    def delay(self, path: PathConditions, rng: Rng | None = None) -> float:
        rng = rng or self.rng
        stretch = 10.0 if rng.happens(path.late) else 1.0
        found = 0.0002 + stretch * rng.exponential(path.delay_s)
        self.arrived_by = max(self.arrived_by, self.world.now() + found)
        return found


class OtherRegions(Protocol):
    """Other regions, as a front of this region calls them."""

    async def infer(self, gateway: "SimMachine", endpoint: Endpoint) -> Code | None:
        """Send one request; None: it was answered."""
        ...

    def answer_signature(self, region: str) -> str:
        """Stands for the content of the region's answers."""
        ...


class NoOtherRegions:
    """There is no other region."""

    async def infer(self, gateway: "SimMachine", endpoint: Endpoint) -> Code | None:
        raise AssertionError(f"{endpoint} is routed to")

    def answer_signature(self, region: str) -> str:
        raise AssertionError(f"{region} answers")


class SimNetwork(Paths):
    """Every path of the region. other_regions: what its gateways lead to."""

    def __init__(self, world: SimWorld, *, datagrams: bool = False) -> None:
        super().__init__(world)
        self.datagrams = datagrams
        self.other_regions: OtherRegions = NoOtherRegions()
        self.listener: LinkListener | None = None
        self.machines: dict[str, SimMachine] = {}
        self._sessions: list[_LinkConnection] = []
        self.heal_listeners: list[Callable[[], None]] = []

    def listen(self, process: SimProcess, events: LinkEvents) -> None:
        """The coordinator's end is up: `events` is called for every session."""
        self.listener = LinkListener(process, events)
        process.on_death(self._on_listener_death)

    def retransmit_all(self) -> None:
        """Streams resend what a cut held back."""
        for session in self._sessions:
            session.up.retransmit()
            session.down.retransmit()
        for again in self.heal_listeners:
            again()

    async def connect(self, process: SimProcess, place: str, node: str, hello: Hello) -> "SimLinkSession":
        """Open a session for `node` from the machine at `place`. Raises ShoalError(COORDINATOR_UNREACHABLE) or the
        coordinator's refusal."""
        data = nouns.from_agent_to_wire(hello).SerializeToString()
        process.gate("connect")
        self.world.record("link.connect", node=place, holds=version_of(hello.holds))
        there = self.transit(place, COORDINATOR)
        if there is None:
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise unreachable("no answer")
        await asyncio.sleep(there)
        listener = self.listener
        if listener is None or not listener.process.alive:
            await asyncio.sleep(self.delay(self.path(COORDINATOR, place)))
            raise unreachable("connection refused")
        session = _LinkConnection(self, place, node, listener, process)
        session.serving = listener.process.spawn(session.serve(data, hello.node.role), f"session-{node}")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                answer = await session.answer
        except (TimeoutError, asyncio.CancelledError) as cause:
            session.on_client_left()
            if isinstance(cause, TimeoutError):
                raise unreachable("no answer") from cause
            raise
        process.check()
        if isinstance(answer, Refusal):
            raise ShoalError(answer)
        self._sessions = [known for known in self._sessions if known.up.open or known.down.open]
        self._sessions.append(session)
        process.on_death(session.on_client_left)
        session.watch()
        return SimLinkSession(process, session, answer)

    def _on_listener_death(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            for session in tuple(listener.sessions.values()):
                session.on_server_left()


class SimLink:
    """Implements the agent's Link port. place: of its machine; node: the name in its certificate."""

    def __init__(self, process: SimProcess, network: SimNetwork, place: str, node: str) -> None:
        self._process = process
        self._network = network
        self._place = place
        self._node = node

    async def connect(self, hello: Hello) -> "SimLinkSession":
        return await self._network.connect(self._process, self._place, self._node, hello)


class SimLinkSession:
    """Implements the Session port: the agent's end of one session."""

    def __init__(self, process: SimProcess, session: "_LinkConnection", welcome: Welcome) -> None:
        self.welcome = welcome
        self._process = process
        self._session = session

    async def send(self, message: FromAgent) -> None:
        self._process.gate("send")
        if not self._session.up.open:
            raise self._session.closed_error()
        self._session.network.world.record("agent.sent", node=self._session.place, **message_facts(message))
        self._session.up.send(nouns.from_agent_to_wire(message).SerializeToString())

    async def receive(self) -> ToAgent:
        data = await self._session.client_inbox.get()
        self._process.gate("receive")
        if data is None:
            self._session.client_inbox.put_nowait(None)
            raise self._session.closed_error()
        return nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(data))

    async def close(self) -> None:
        self._process.gate("close")
        self._session.on_client_left()


class SimAgentLinks:
    """Implements the coordinator's AgentLinks port."""

    def __init__(self, process: SimProcess, network: SimNetwork) -> None:
        self._process = process
        self._network = network

    async def send(self, node: str, message: ToAgent) -> None:
        self._process.gate(f"send to {node}")
        session = self._session(node)
        if session is not None:
            session.send_to_agent(message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        self._process.gate(f"end {node}")
        session = self._session(node)
        if session is not None:
            session.send_to_agent(Refused(refusal, fatal))
            session.on_server_left()

    def _session(self, node: str) -> "_LinkConnection | None":
        listener = self._network.listener
        return None if listener is None else listener.sessions.get(node)


class _LinkConnection:
    """Both ends of one session and the messages in transit."""

    def __init__(self, network: SimNetwork, place: str, node: str, listener: LinkListener, client: SimProcess) -> None:
        self.network = network
        self.place = place
        self.node = node
        self.epoch = 0
        self.serving: asyncio.Task[None] | None = None
        self.client = client
        self.listener = listener
        self.answer: asyncio.Future[Welcome | Refusal] = network.world.loop.create_future()
        self.client_inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.server_inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.up = Pipe[bytes](network, place, COORDINATOR, self.server_inbox.put_nowait)
        self.down = Pipe[bytes](network, COORDINATOR, place, self.client_inbox.put_nowait)
        self._silent_count = 0

    def closed_error(self) -> ShoalError:
        return unreachable("the session has ended")

    async def serve(self, hello_bytes: bytes, role: Role) -> None:
        """The coordinator's end, as its link adapter runs it: open, receive in order, close. It is cancelled when the
        agent hangs up, but handling that has begun is finished."""
        events = self.listener.events
        hello = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(hello_bytes))
        assert isinstance(hello, Hello)
        try:
            if await run_to_completion(self._open(events, hello, role)):
                await self._receive(events)
        except ShoalError as broken:
            self.send_to_agent(Refused(broken.refusal, fatal=False))
            self.on_server_left()
        finally:
            if self.epoch > 0:
                if self.listener.sessions.get(self.node) is self:
                    del self.listener.sessions[self.node]
                await events.on_close(self.node, self.epoch)

    async def _open(self, events: LinkEvents, hello: Hello, role: Role) -> bool:
        answer = await events.on_hello(self.node, role, hello)
        if isinstance(answer, Refusal):
            self._reply(answer)
            return False
        self.epoch = answer.epoch
        older = self.listener.sessions.get(self.node)
        if older is not None:
            older.on_server_left()
        self.listener.sessions[self.node] = self
        self.network.world.record(
            "link.opened", node=self.node, epoch=answer.epoch, history=answer.history, term=answer.term
        )
        self._reply(answer)
        return True

    async def _receive(self, events: LinkEvents) -> None:
        reader = nouns.SessionReader()
        while (data := await self.server_inbox.get()) is not None:
            self.listener.process.gate(f"receive from {self.node}")
            try:
                message = reader.read(link_pb2.FromAgent.FromString(data))
            except ShoalError as invalid:
                self.send_to_agent(Refused(invalid.refusal, fatal=False))
                continue
            answer = await dispatch_message(events, self.node, self.epoch, message)
            if answer is not None:
                self.send_to_agent(answer)

    def send_to_agent(self, message: ToAgent) -> None:
        if self.down.open:
            self.network.world.record("coordinator.sent", node=self.node, epoch=self.epoch, **message_facts(message))
            self.down.send(nouns.to_agent_to_wire(message).SerializeToString())

    def watch(self) -> None:
        """Keepalive: both ends give up on a path that was silent at two checks."""
        if not (self.up.open and self.down.open):
            return
        self._silent_count = 0 if self.network.is_open_both_ways(self.place, COORDINATOR) else self._silent_count + 1
        if self._silent_count >= 2:
            self._close(self.server_inbox, 0.0)
            self._close(self.client_inbox, 0.0)
            self.up.open = self.down.open = False
            return
        self.network.world.call_later(KEEPALIVE_S, self.watch)

    def on_client_left(self) -> None:
        """The agent's end is gone; a reset notifies the coordinator, unless the path is cut."""
        self.up.open = self.down.open = False
        self.network.world.call_later(self._notice_s(self.place, COORDINATOR), self._cancel_serving)

    def _cancel_serving(self) -> None:
        if self.serving is not None and not self.serving.done():
            self.serving.cancel()

    def on_server_left(self) -> None:
        self._resolve_answer(unreachable("connection reset").refusal)
        self.up.open = self.down.open = False
        if self.listener.sessions.get(self.node) is self:
            del self.listener.sessions[self.node]
        self._close(self.server_inbox, 0.0)
        self._close(self.client_inbox, self._notice_s(COORDINATOR, self.place))

    def _notice_s(self, source: str, target: str) -> float:
        """Seconds until `target` knows that `source` has ended the session."""
        path = self.network.path(source, target)
        return 2 * KEEPALIVE_S if path.cut else 0.05 + self.network.delay(path)

    def _close(self, inbox: "asyncio.Queue[bytes | None]", seconds: float) -> None:
        self.network.world.call_later(seconds, lambda: inbox.put_nowait(None))

    def _reply(self, answer: Welcome | Refusal) -> None:
        """Send the welcome like every message; if it is lost, the connecting side times out."""
        if isinstance(answer, Welcome):
            decoded = nouns.to_agent_from_wire(
                link_pb2.ToAgent.FromString(nouns.to_agent_to_wire(answer).SerializeToString())
            )
            assert isinstance(decoded, Welcome)
            answer = decoded
        seconds = self.network.transit(COORDINATOR, self.place)
        if seconds is not None:
            self.network.world.call_later(seconds, lambda: self._resolve_answer(answer))

    def _resolve_answer(self, answer: Welcome | Refusal) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Pipe(Generic[T]):
    """One direction of one connection."""

    def __init__(self, network: SimNetwork, source: str, target: str, deliver: Callable[[T], None]) -> None:
        self.open = True
        self._network = network
        self._path = network.path(source, target)
        self._deliver = deliver
        self._in_transit: deque[T] = deque()
        self._arrives_at = 0.0
        self._stuck_count = 0

    def send(self, data: T) -> None:
        network, rng = self._network, self._network.rng
        if network.datagrams:
            for _ in range(2 if rng.happens(self._path.duplicate) else 1):
                if not self._path.cut and not rng.happens(self._path.loss):
                    network.world.call_later(network.delay(self._path), lambda: self._datagram(data))
            return
        now = network.world.now()
        again = 0.2 if rng.happens(self._path.loss) else 0.0
        self._arrives_at = max(self._arrives_at, now + again + network.delay(self._path))
        self._in_transit.append(data)
        network.world.call_later(self._arrives_at - now, self._arrive)

    def retransmit(self) -> None:
        """The path may be open again: resume what was held back, in order."""
        stuck, self._stuck_count = self._stuck_count, 0
        for _ in range(stuck):
            self._network.world.call_later(self._network.delay(self._path), self._arrive)

    def _datagram(self, data: T) -> None:
        if not self._path.cut:
            self._deliver(data)

    def _arrive(self) -> None:
        if self._path.cut:
            self._stuck_count += 1
        else:
            self._deliver(self._in_transit.popleft())


def unreachable(found: str) -> ShoalError:
    return refuse(Code.COORDINATOR_UNREACHABLE, found, "an answer from the coordinator", "it is tried again by itself")


def message_facts(message: FromAgent | ToAgent) -> dict[str, object]:
    """What the record keeps of a message."""
    match message:
        case Status():
            return {
                "what": "status",
                "epoch": message.epoch,
                "version": version_of(message.version),
                "phases": tuple((each.assignment, str(each.phase)) for each in message.observed),
            }
        case DesiredSet():
            return {
                "what": "desired",
                "version": version_of(message.version),
                "assignments": tuple((each.id, each.draining) for each in message.assignments),
                "content": short_digest(nouns.encode(message)),
            }
        case Refused():
            return {"what": "refused", "code": str(message.refusal.code), "found": message.refusal.found}
        case Hello() | Welcome() | Receipts() | NodeEvents() | ProbeNow() | Lease():
            return {"what": type(message).__name__.lower()}
        case LogsAsked() | LogLines() | SpansAsked() | SpansFound():
            return {"what": type(message).__name__.lower()}


def version_of(version: Version | None) -> tuple[str, int, int] | None:
    return None if version is None else (version.history, version.term, version.generation)


def short_digest(data: bytes) -> str:
    """A name for these bytes, for the record."""
    return hashlib.sha256(data).hexdigest()[:12]
