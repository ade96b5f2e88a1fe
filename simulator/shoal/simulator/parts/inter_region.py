"""Messages between regions and their federation, over paths that lose, duplicate, delay and reorder.

This stands for `peers/` at all ends. Nouns travel as the bytes of `shoal.wire`. The network knows each sender, so
nothing needs a signature here. A message may arrive twice, and long after its sender gave up. The receiving process
serves a delivered message as its adapter does: to the end, even if the caller hangs up. Everything sent and received
goes to the record, in the events that the checkers read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast, get_args

from shoal.coordinator.ports import AdvertiseAnswer, PeerEvents, StaleRevision, VerifiedMessage
from shoal.coordinator.uncancelled import run_to_completion
from shoal.simulator.parts.network import Paths, short_digest
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.agreement import Award, Grant, Notice, Release, Renewal, Renewed, ReportContent
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Advertisement, Answer, Decline, Directory, Member, Offer, Solicitation
from shoal.types.units import Seconds
from shoal.wire import nouns

CALL_TIMEOUT_S: Final = 2.0
"""Seconds after which a caller gives up."""
DUPLICATE_DELAY_S: Final = 4.0
"""Mean seconds by which the second copy of a message arrives later."""
UNCERTAIN_CODES: Final = frozenset({Code.INTERNAL, Code.STORE_UNAVAILABLE, Code.CONFLICT})
"""Refusals after which the call may or may not have taken effect: the caller treats them like silence."""

Noun = (
    Award | Grant | Notice | Release | Renewal | Renewed | Offer | Decline | Solicitation
    | Advertisement | Directory | ReportContent
)  # fmt: skip
NOUN_TYPES: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in get_args(Noun)}


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """One message between regions."""

    # The region that signed it, whoever carries it.
    signer: str
    kind: str
    content: bytes
    # What the record keeps of it.
    facts: Mapping[str, object] = field(compare=False)

    @property
    def evidence(self) -> bytes:
        """Stands for the signed message."""
        return b"\n".join((self.signer.encode(), self.kind.encode(), self.content))


def noun_message(signer: str, what: Noun) -> PeerMessage:
    kind = type(what).__name__
    return _make_message(signer, kind, nouns.encode(what), what)


def text_message(signer: str, kind: str, content: str = "") -> PeerMessage:
    """A message without a noun."""
    return _make_message(signer, kind, content.encode(), None)


def from_evidence(evidence: bytes) -> PeerMessage:
    """The message whose evidence this is."""
    by, kind, content = evidence.split(b"\n", 2)
    return _make_message(by.decode(), kind.decode(), content, nouns.decode(NOUN_TYPES[kind.decode()], content))


def verify_message(message: PeerMessage) -> VerifiedMessage[Any]:
    """Raises ShoalError(MESSAGE_INVALID)."""
    return VerifiedMessage(message.signer, nouns.decode(NOUN_TYPES[message.kind], message.content), message.evidence)


def _make_message(by: str, kind: str, content: bytes, what: Noun | None) -> PeerMessage:
    message = PeerMessage(by, kind, content, {})
    facts = {"by": by, "what": kind, "said": short_digest(message.evidence), **noun_facts(what)}
    return PeerMessage(by, kind, content, facts)


Reply = PeerMessage | tuple[PeerMessage, ...] | None
Serve = Callable[[PeerMessage], Coroutine[Any, Any, Reply]]


@dataclass(frozen=True, slots=True)
class PeerListener:
    process: SimProcess
    serve: Serve


class InterRegionNetwork(Paths):
    """Every path between regions and replicas of their federation."""

    def __init__(self, world: SimWorld) -> None:
        super().__init__(world, "between")
        self._listeners: dict[str, PeerListener] = {}
        self._calls = 0

    def listen(self, place: str, process: SimProcess, serve: Serve) -> None:
        self._listeners[place] = PeerListener(process, serve)

    async def call(
        self, process: SimProcess, source: str, target: str, message: PeerMessage, within_s: float = CALL_TIMEOUT_S
    ) -> Reply:
        """Raises ShoalError(PEER_UNREACHABLE) if no answer arrives in time, or the refusal of the other end."""
        process.gate(f"{message.kind} to {target}")
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[Reply | Refusal] = self.world.loop.create_future()
        sending = _PeerCall(self, call, source, target, message, answer)
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
        await process.wait_resumed()
        process.gate(f"{message.kind} answered by {target}")
        if isinstance(heard, Refusal):
            self.world.record("heard", call=call, by=target, to=source, what="Refusal", code=str(heard.code))
            raise ShoalError(heard)
        for one in _messages(heard):
            self.world.record("heard", call=call, to=source, **one.facts)
        if heard is None:
            self.world.record("heard", call=call, by=target, to=source, what="Done")
        return heard

    def listener(self, place: str) -> PeerListener | None:
        found = self._listeners.get(place)
        return found if found is not None and found.process.alive else None


class _PeerCall:
    """One request in progress, with all its copies and their answers."""

    def __init__(
        self,
        network: InterRegionNetwork,
        number: int,
        source: str,
        target: str,
        message: PeerMessage,
        answer: "asyncio.Future[Reply | Refusal]",
    ) -> None:
        self._network = network
        self._number = number
        self._source = source
        self._target = target
        self._message = message
        self._answer = answer
        self._serving: list[asyncio.Task[None]] = []

    def send(self) -> None:
        network = self._network
        path = network.path(self._source, self._target)
        seconds = network.transit(self._source, self._target)
        if seconds is not None:
            network.world.call_later(seconds, self._on_arrival)
        if network.rng.happens(path.duplicate):
            again = network.transit(self._source, self._target)
            if again is not None:
                network.world.call_later(again + network.rng.exponential(DUPLICATE_DELAY_S), self._on_arrival)

    def hang_up(self) -> None:
        """Notify the other end, which cancels what it does for this caller."""
        seconds = self._network.transit(self._source, self._target)
        if seconds is not None:
            self._network.world.call_later(seconds, self._cancel)

    def _cancel(self) -> None:
        for serving in self._serving:
            serving.cancel()

    def _on_arrival(self) -> None:
        if self._network.path(self._source, self._target).cut:
            return
        listener = self._network.listener(self._target)
        if listener is None:
            self._reply(unreachable(self._target).refusal)
            return
        self._serving.append(listener.process.spawn(self._serve(listener), f"serves {self._message.kind}"))

    async def _serve(self, listener: PeerListener) -> None:
        world = self._network.world
        outcome: Reply | Refusal = unreachable(self._target).refusal
        try:
            await listener.process.wait_resumed()
            listener.process.gate(f"serve {self._message.kind}")
            world.record("delivered", call=self._number, at=self._target, **self._message.facts)
            reply = await run_to_completion(listener.serve(self._message))
            await listener.process.wait_resumed()
            listener.process.gate(f"answer {self._message.kind}")
            outcome = reply
            for one in _messages(outcome):
                world.record("answered", call=self._number, to=self._message.signer, **one.facts)
        except StaleRevision:
            world.record(
                "refused", call=self._number, at=self._target, to=self._message.signer, code=str(Code.INTERNAL)
            )
        except ShoalError as refused:
            if refused.code not in UNCERTAIN_CODES:
                outcome = refused.refusal
            world.record("refused", call=self._number, at=self._target, to=self._message.signer, code=str(refused.code))
        finally:
            self._reply(outcome)

    def _reply(self, outcome: Reply | Refusal) -> None:
        seconds = self._network.transit(self._target, self._source)
        if seconds is not None:
            self._network.world.call_later(seconds, lambda: self._resolve_answer(outcome))

    def _resolve_answer(self, outcome: Reply | Refusal) -> None:
        if not self._answer.done():
            self._answer.set_result(outcome)


class SimPeerRegions:
    """Implements the Peers port of `region`."""

    def __init__(self, process: SimProcess, network: InterRegionNetwork, region: str) -> None:
        self._process = process
        self._network = network
        self._region = region

    async def request_bid(self, region: str, solicitation: Solicitation) -> VerifiedMessage[Answer]:
        return cast("VerifiedMessage[Answer]", await self._ask(region, solicitation))

    async def award(self, region: str, award: Award) -> VerifiedMessage[Grant]:
        return cast("VerifiedMessage[Grant]", await self._ask(region, award))

    async def release(self, region: str, release: Release) -> None:
        await self._send(region, release)

    async def renew(self, region: str, renewal: Renewal) -> VerifiedMessage[Renewed]:
        return cast("VerifiedMessage[Renewed]", await self._ask(region, renewal))

    async def notify(self, region: str, notice: Notice) -> None:
        await self._send(region, notice)

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        message = text_message(self._region, "Fetch", f"{agreement} {digest}")
        await self._network.call(self._process, self._region, region, message)
        yield b"model"

    async def measure(self, region: str) -> Seconds:
        began = self._network.world.now()
        await self._network.call(self._process, self._region, region, text_message(self._region, "Measure"))
        return Seconds(self._network.world.now() - began)

    async def _ask(self, region: str, what: Noun) -> VerifiedMessage[Any]:
        reply = await self._network.call(self._process, self._region, region, noun_message(self._region, what))
        assert isinstance(reply, PeerMessage)
        return verify_message(reply)

    async def _send(self, region: str, what: Noun) -> None:
        await self._network.call(self._process, self._region, region, noun_message(self._region, what))


def _unchanged_answer(answer: Answer) -> Answer:
    return answer


def serve_peer(region: str, events: PeerEvents, alter_answer: Callable[[Answer], Answer] = _unchanged_answer) -> Serve:
    """The receiving end: how a listening region handles a message. alter_answer: changes its own answers."""

    async def serve(message: PeerMessage) -> Reply:
        if message.kind == "Measure":
            return None
        if message.kind == "Fetch":
            agreement, _, digest = message.content.decode().partition(" ")
            await events.authorise_fetch(message.signer, agreement, digest)
            return None
        heard = verify_message(message)
        match heard.content:
            case Solicitation():
                return noun_message(region, alter_answer(await events.on_solicitation(heard)))
            case Award():
                return noun_message(region, await events.on_award(heard))
            case Renewal():
                return noun_message(region, await events.on_renewal(heard))
            case Release():
                await events.on_release(heard)
            case Notice():
                await events.on_notice(heard)
            case other:
                raise AssertionError(f"nobody says {other} to a peer")
        return None

    return serve


class SimFederationLink:
    """Implements the FederationLink port of `region`: calls the replica that answered last, then the next."""

    def __init__(self, process: SimProcess, network: InterRegionNetwork, region: str, replicas: Sequence[str]) -> None:
        self._process = process
        self._network = network
        self._region = region
        self._replicas = list(replicas)

    async def advertise(self, advertisement: Advertisement) -> AdvertiseAnswer:
        reply = await self._ask(noun_message(self._region, advertisement), CALL_TIMEOUT_S)
        if reply is None:
            return AdvertiseAnswer()
        assert isinstance(reply, PeerMessage)
        return AdvertiseAnswer(cast("Directory", verify_message(reply).content))

    async def solicit(self, solicitation: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        reply = await self._ask(noun_message(self._region, solicitation), CALL_TIMEOUT_S + solicitation.answer_s)
        assert isinstance(reply, tuple)
        return tuple(verify_message(answer) for answer in reply)

    async def report(self, content: ReportContent) -> int:
        reply = await self._ask(noun_message(self._region, content), CALL_TIMEOUT_S)
        assert isinstance(reply, PeerMessage)
        return int(reply.content)

    async def _ask(self, message: PeerMessage, within_s: float) -> Reply:
        for _ in self._replicas:
            try:
                return await self._network.call(self._process, self._region, self._replicas[0], message, within_s)
            except ShoalError as error:
                if error.code is not Code.PEER_UNREACHABLE:
                    raise
                self._replicas.append(self._replicas.pop(0))
        raise refuse(Code.FEDERATION_UNREACHABLE, "no replica answers", "an answer", "it is tried again by itself")


class SimCandidateRegions:
    """Implements the Candidates port of one replica of the federation."""

    def __init__(self, process: SimProcess, network: InterRegionNetwork, replica: str) -> None:
        self._process = process
        self._network = network
        self._replica = replica

    async def ask(self, member: Member, request: bytes, timeout_s: Seconds) -> VerifiedMessage[Answer]:
        reply = await self._network.call(self._process, self._replica, member.region, from_evidence(request), timeout_s)
        assert isinstance(reply, PeerMessage)
        return cast("VerifiedMessage[Answer]", verify_message(reply))


class FederationEvents(Protocol):
    """How the federation's controller handles the messages of regions."""

    async def advertise(self, heard: VerifiedMessage[Advertisement]) -> Directory | None: ...
    async def solicit(self, heard: VerifiedMessage[Solicitation]) -> tuple[VerifiedMessage[Answer], ...]: ...
    async def report(self, heard: VerifiedMessage[ReportContent]) -> int: ...


def serve_federation(name: str, events: FederationEvents) -> Serve:
    """The receiving end: how a listening replica handles a message."""

    async def serve(message: PeerMessage) -> Reply:
        heard = verify_message(message)
        match heard.content:
            case Advertisement():
                directory = await events.advertise(heard)
                return None if directory is None else noun_message(name, directory)
            case Solicitation():
                return tuple(from_evidence(answer.evidence) for answer in await events.solicit(heard))
            case ReportContent():
                return text_message(name, "Next", str(await events.report(heard)))
            case other:
                raise AssertionError(f"nobody says {other} to a federation")

    return serve


def noun_facts(what: Noun | None) -> dict[str, object]:
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


def _messages(reply: "Reply | Refusal") -> tuple[PeerMessage, ...]:
    if isinstance(reply, PeerMessage):
        return (reply,)
    return reply if isinstance(reply, tuple) else ()
