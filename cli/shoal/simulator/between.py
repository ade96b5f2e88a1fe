"""What regions and their federation say to each other, over paths that lose, double, delay and overtake.

Stands for `peers/` at all ends: nouns travel as the bytes of `shoal.wire`, and who speaks is as the network knows it,
so nothing needs a signature here. A message may come twice, and long after its sender gave up. What is delivered is
served by the process that listens as its adapter does it: finished whoever hangs up. Everything that is said and heard
goes to the record, in words that the judge reads.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast, get_args

from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.ports import Heard, PeerEvents, StaleRevision
from shoal.simulator.network import Paths, short
from shoal.simulator.world import Process, World
from shoal.types.agreement import Award, Delivered, Grant, Notice, Release, Renewal, Renewed, ReportContent
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Advertisement, Answer, Decline, Directory, Member, Offer, Solicitation
from shoal.types.units import Seconds
from shoal.wire import nouns

CALL_S: Final = 2.0
"""A caller's patience."""
STRAGGLES_S: Final = 4.0
"""A second copy of a message comes so much later, on average."""
UNKNOWN: Final = frozenset({Code.INTERNAL, Code.STORE_UNAVAILABLE, Code.CONFLICT})
"""Refusals after which it may have been done or not: for the caller as if nothing had been heard."""

Noun = (
    Award | Grant | Notice | Release | Renewal | Renewed | Offer | Decline | Solicitation
    | Advertisement | Directory | ReportContent
)  # fmt: skip
KINDS: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in get_args(Noun)}


@dataclass(frozen=True, slots=True)
class Message:
    """by: the region whose word it is, whoever carries it. facts: what the record keeps of it."""

    by: str
    kind: str
    content: bytes
    facts: Mapping[str, object] = field(compare=False)

    @property
    def evidence(self) -> bytes:
        """What stands for the signed message."""
        return b"\n".join((self.by.encode(), self.kind.encode(), self.content))


def say(by: str, what: Noun) -> Message:
    kind = type(what).__name__
    return _message(by, kind, nouns.encode(what), what)


def word(by: str, kind: str, content: str = "") -> Message:
    """What needs no noun."""
    return _message(by, kind, content.encode(), None)


def carried(evidence: bytes) -> Message:
    """The message that this is the evidence of."""
    by, kind, content = evidence.split(b"\n", 2)
    return _message(by.decode(), kind.decode(), content, nouns.decode(KINDS[kind.decode()], content))


def hear(message: Message) -> Heard[Any]:
    """Raises ShoalError(MESSAGE_INVALID)."""
    return Heard(message.by, nouns.decode(KINDS[message.kind], message.content), message.evidence)


def _message(by: str, kind: str, content: bytes, what: Noun | None) -> Message:
    message = Message(by, kind, content, {})
    facts = {"by": by, "what": kind, "said": short(message.evidence), **told(what)}
    return Message(by, kind, content, facts)


Reply = Message | tuple[Message, ...] | None
Serve = Callable[[Message], Coroutine[Any, Any, Reply]]


@dataclass(frozen=True, slots=True)
class Listener:
    process: Process
    serve: Serve


class Between(Paths):
    """Every path between regions and replicas of their federation."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "between")
        self._listeners: dict[str, Listener] = {}
        self._calls = 0

    def listen(self, place: str, process: Process, serve: Serve) -> None:
        self._listeners[place] = Listener(process, serve)

    async def call(
        self, process: Process, source: str, target: str, message: Message, within_s: float = CALL_S
    ) -> Reply:
        """Raises ShoalError(PEER_UNREACHABLE) when nothing was heard in time, or what the other end refused with."""
        process.gate(f"{message.kind} to {target}")
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[Reply | Refusal] = self.world.loop.create_future()
        sending = _Call(self, call, source, target, message, answer)
        self.world.record("said", call=call, source=source, target=target, **message.facts)
        sending.send()
        try:
            async with asyncio.timeout(within_s):
                heard = await answer
        except TimeoutError:
            sending.hang_up()
            raise unreachable(target) from None
        except asyncio.CancelledError:
            sending.hang_up()
            raise
        await process.awake()
        process.gate(f"{message.kind} answered by {target}")
        if isinstance(heard, Refusal):
            self.world.record("heard", call=call, by=target, to=source, what="Refusal", code=str(heard.code))
            raise ShoalError(heard)
        for one in _messages(heard):
            self.world.record("heard", call=call, to=source, **one.facts)
        if heard is None:
            self.world.record("heard", call=call, by=target, to=source, what="Done")
        return heard

    def listener(self, place: str) -> Listener | None:
        found = self._listeners.get(place)
        return found if found is not None and found.process.alive else None


class _Call:
    """One request on its way, all its copies, and the answers to them."""

    def __init__(
        self,
        between: Between,
        number: int,
        source: str,
        target: str,
        message: Message,
        answer: "asyncio.Future[Reply | Refusal]",
    ) -> None:
        self._between = between
        self._number = number
        self._source = source
        self._target = target
        self._message = message
        self._answer = answer
        self._serving: list[asyncio.Task[None]] = []

    def send(self) -> None:
        between = self._between
        path = between.path(self._source, self._target)
        seconds = between.transit(self._source, self._target)
        if seconds is not None:
            between.world.later(seconds, self._deliver)
        if between.chance.happens(path.duplicate):
            again = between.transit(self._source, self._target)
            if again is not None:
                between.world.later(again + between.chance.delay(STRAGGLES_S), self._deliver)

    def hang_up(self) -> None:
        """The other end is told, and cancels what it does for this caller."""
        seconds = self._between.transit(self._source, self._target)
        if seconds is not None:
            self._between.world.later(seconds, self._cancel)

    def _cancel(self) -> None:
        for serving in self._serving:
            serving.cancel()

    def _deliver(self) -> None:
        if self._between.path(self._source, self._target).cut:
            return
        listener = self._between.listener(self._target)
        if listener is None:
            self._reply(unreachable(self._target).refusal)
            return
        self._serving.append(listener.process.spawn(self._serve(listener), f"serves {self._message.kind}"))

    async def _serve(self, listener: Listener) -> None:
        world = self._between.world
        outcome: Reply | Refusal = unreachable(self._target).refusal
        try:
            await listener.process.awake()
            listener.process.gate(f"serve {self._message.kind}")
            world.record("delivered", call=self._number, at=self._target, **self._message.facts)
            reply = await finish(listener.serve(self._message))
            await listener.process.awake()
            listener.process.gate(f"answer {self._message.kind}")
            outcome = reply
            for one in _messages(outcome):
                world.record("answered", call=self._number, to=self._message.by, **one.facts)
        except StaleRevision:
            world.record("refused", call=self._number, at=self._target, to=self._message.by, code=str(Code.INTERNAL))
        except ShoalError as refused:
            if refused.code not in UNKNOWN:
                outcome = refused.refusal
            world.record("refused", call=self._number, at=self._target, to=self._message.by, code=str(refused.code))
        finally:
            self._reply(outcome)

    def _reply(self, outcome: Reply | Refusal) -> None:
        seconds = self._between.transit(self._target, self._source)
        if seconds is not None:
            self._between.world.later(seconds, lambda: self._settle(outcome))

    def _settle(self, outcome: Reply | Refusal) -> None:
        if not self._answer.done():
            self._answer.set_result(outcome)


class Peers:
    """The Peers port of `region`."""

    def __init__(self, process: Process, between: Between, region: str) -> None:
        self._process = process
        self._between = between
        self._region = region

    async def bid(self, region: str, solicitation: Solicitation) -> Heard[Answer]:
        return cast("Heard[Answer]", await self._ask(region, solicitation))

    async def award(self, region: str, award: Award) -> Heard[Grant]:
        return cast("Heard[Grant]", await self._ask(region, award))

    async def release(self, region: str, release: Release) -> None:
        await self._tell(region, release)

    async def renew(self, region: str, renewal: Renewal) -> Heard[Renewed]:
        return cast("Heard[Renewed]", await self._ask(region, renewal))

    async def notify(self, region: str, notice: Notice) -> None:
        await self._tell(region, notice)

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        message = word(self._region, "Fetch", f"{agreement} {digest}")
        await self._between.call(self._process, self._region, region, message)
        yield b"model"

    async def measure(self, region: str) -> Seconds:
        began = self._between.world.now()
        await self._between.call(self._process, self._region, region, word(self._region, "Measure"))
        return Seconds(self._between.world.now() - began)

    async def _ask(self, region: str, what: Noun) -> Heard[Any]:
        reply = await self._between.call(self._process, self._region, region, say(self._region, what))
        assert isinstance(reply, Message)
        return hear(reply)

    async def _tell(self, region: str, what: Noun) -> None:
        await self._between.call(self._process, self._region, region, say(self._region, what))


def _honest(answer: Answer) -> Answer:
    return answer


def peer(region: str, events: PeerEvents, tells: Callable[[Answer], Answer] = _honest) -> Serve:
    """The other end: what a region that listens does with a message. tells: what it makes of its own answers."""

    async def serve(message: Message) -> Reply:
        if message.kind == "Measure":
            return None
        if message.kind == "Fetch":
            agreement, _, digest = message.content.decode().partition(" ")
            await events.lend(message.by, agreement, digest)
            return None
        heard = hear(message)
        match heard.what:
            case Solicitation():
                return say(region, tells(await events.bid(heard)))
            case Award():
                return say(region, await events.awarded(heard))
            case Renewal():
                return say(region, await events.renewed(heard))
            case Release():
                await events.released(heard)
            case Notice():
                await events.noticed(heard)
            case other:
                raise AssertionError(f"nobody says {other} to a peer")
        return None

    return serve


class FederationEnd:
    """The FederationLink port of `region`: asks the replica that answered last, else the next."""

    def __init__(self, process: Process, between: Between, region: str, replicas: Sequence[str]) -> None:
        self._process = process
        self._between = between
        self._region = region
        self._replicas = list(replicas)

    async def advertise(self, advertisement: Advertisement) -> Directory | None:
        reply = await self._ask(say(self._region, advertisement), CALL_S)
        if reply is None:
            return None
        assert isinstance(reply, Message)
        return cast("Directory", hear(reply).what)

    async def solicit(self, solicitation: Solicitation) -> tuple[Heard[Answer], ...]:
        reply = await self._ask(say(self._region, solicitation), CALL_S + solicitation.answer_s)
        assert isinstance(reply, tuple)
        return tuple(hear(answer) for answer in reply)

    async def report(self, delivered: tuple[Delivered, ...], entries: tuple[LedgerEntry, ...]) -> int:
        reply = await self._ask(say(self._region, ReportContent(delivered, entries)), CALL_S)
        assert isinstance(reply, Message)
        return int(reply.content)

    async def _ask(self, message: Message, within_s: float) -> Reply:
        for _ in self._replicas:
            try:
                return await self._between.call(self._process, self._region, self._replicas[0], message, within_s)
            except ShoalError as error:
                if error.code is not Code.PEER_UNREACHABLE:
                    raise
                self._replicas.append(self._replicas.pop(0))
        raise refuse(Code.FEDERATION_UNREACHABLE, "no replica answers", "an answer", "it is tried again by itself")


class Candidates:
    """The Candidates port of one replica of the federation."""

    def __init__(self, process: Process, between: Between, replica: str) -> None:
        self._process = process
        self._between = between
        self._replica = replica

    async def ask(self, member: Member, asked: bytes, within: Seconds) -> Heard[Answer]:
        reply = await self._between.call(self._process, self._replica, member.region, carried(asked), within)
        assert isinstance(reply, Message)
        return cast("Heard[Answer]", hear(reply))


class FederationEvents(Protocol):
    """What the federation's controller does with what regions say to it."""

    async def advertised(self, heard: Heard[Advertisement]) -> Directory | None: ...
    async def solicited(self, heard: Heard[Solicitation]) -> tuple[Heard[Answer], ...]: ...
    async def reported(self, heard: Heard[ReportContent]) -> int: ...


def federation(name: str, events: FederationEvents) -> Serve:
    """The other end: what a replica that listens does with a message."""

    async def serve(message: Message) -> Reply:
        heard = hear(message)
        match heard.what:
            case Advertisement():
                directory = await events.advertised(heard)
                return None if directory is None else say(name, directory)
            case Solicitation():
                return tuple(carried(answer.evidence) for answer in await events.solicited(heard))
            case ReportContent():
                return word(name, "Next", str(await events.reported(heard)))
            case other:
                raise AssertionError(f"nobody says {other} to a federation")

    return serve


def told(what: Noun | None) -> dict[str, object]:
    """What the record keeps of a noun."""
    match what:
        case Solicitation(id=name, round=number, workload=workload, indicative=indicative):
            return {"solicitation": name, "round": number, "workload": str(workload), "indicative": indicative}
        case Offer(solicitation=name, id=bid, hold_s=hold_s, origin=origin, is_counter=counter):
            return {"solicitation": name, "bid": bid, "hold_s": hold_s, "origin": origin, "counter": counter}
        case Decline(solicitation=name, refusal=refusal):
            return {"solicitation": name, "code": str(refusal.code)}
        case Award(bid=bid, agreement=agreement, workload=workload, term_s=term_s):
            return {"bid": bid, "agreement": agreement, "workload": str(workload), "term_s": term_s}
        case Grant(bid=bid, agreement=agreement, lease_s=lease_s):
            return {"bid": bid, "agreement": agreement, "lease_s": lease_s}
        case Release(solicitation=name, bid=bid):
            return {"solicitation": name, "bid": bid}
        case Renewal(agreement=agreement, sequence=sequence, nonce=nonce):
            return {"agreement": agreement, "sequence": sequence, "nonce": nonce}
        case Renewed(agreement=agreement, nonce=nonce, lease_s=lease_s, service=service):
            return {"agreement": agreement, "nonce": nonce, "lease_s": lease_s, "service": str(service)}
        case Notice(agreement=agreement, code=code, ends_s=ends_s):
            return {"agreement": agreement, "code": str(code), "ends_s": ends_s}
        case Advertisement() | Directory() | ReportContent() | None:
            return {}


def unreachable(target: str) -> ShoalError:
    return refuse(Code.PEER_UNREACHABLE, f"{target} did not answer", "an answer", "it is tried again by itself")


def _messages(reply: "Reply | Refusal") -> tuple[Message, ...]:
    if isinstance(reply, Message):
        return (reply,)
    return reply if isinstance(reply, tuple) else ()
