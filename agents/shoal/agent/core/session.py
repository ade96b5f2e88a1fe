"""One session with the coordinator: which welcome and desired set to accept, what to report, when to call again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.agent.core.backoff import delay
from shoal.types.assignment import Crossing, DesiredSet, Ingress, Observed, Status, Version
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.link import OLDEST_PROTOCOL, Hello, Welcome
from shoal.types.units import Seconds, Wall

SKEW_ALLOWANCE_S = 30.0


def check_welcome(hello: Hello, welcome: Welcome) -> Refusal | None:
    """The answer must be to this very hello, in a version that it offered, and from no leader that was replaced."""
    if welcome.nonce != hello.nonce:
        return Refusal(Code.MESSAGE_INVALID, "a welcome to another hello", "the nonce of this session", "connect again")
    spoken = welcome.protocol or OLDEST_PROTOCOL
    if not hello.protocol <= spoken <= max(hello.newest, hello.protocol):
        asked = f"protocol {hello.protocol} to {max(hello.newest, hello.protocol)}"
        return Refusal(Code.NOT_SUPPORTED_YET, f"protocol {spoken}", asked, "upgrade the older of the two")
    held = hello.holds
    if held is not None and held.history == welcome.history and welcome.term < held.term:
        return Refusal(
            Code.TERM_STALE, f"term {welcome.term}", f"at least {held.term}", "connect to the current leader"
        )
    return None


def skewed(welcome: Welcome, wall: Wall) -> Seconds | None:
    """The difference of the clocks in seconds where it is beyond the allowance."""
    difference = Seconds(welcome.coordinator_time - wall)
    return difference if abs(difference) > SKEW_ALLOWANCE_S else None


@dataclass(frozen=True, slots=True)
class Accept:
    """desired: what to persist and act on."""

    desired: DesiredSet


@dataclass(frozen=True, slots=True)
class Held:
    """Persisted already: nothing to do."""


Judgement = Accept | Held | Refusal


def judge(held: DesiredSet | None, offered: DesiredSet, *, node: str, history: str) -> Judgement:
    """Whether to act on a set offered in this session, after its first full status was sent.

    What an earlier version of this program held of a set may be less than is in it: the same set is then taken again.
    history: the welcome's. Within one history the term and the generation never go back. Another history is accepted
    only if it is this session's, and its first set stops nothing: what it does not know stays until a later generation.
    """
    version = offered.version
    if offered.node != node:
        return Refusal(Code.NODE_MISMATCH, f"a desired set for {offered.node}", node, "send each node its own")
    if version.history != history:
        return Refusal(Code.GENERATION_STALE, f"history {version.history}", history, "connect again")
    if held is None:
        return Accept(offered)
    if version.history != held.version.history:
        return Accept(_keep_unknown(held, offered))
    return _judge_within(held, offered)


def _judge_within(held: DesiredSet, offered: DesiredSet) -> Judgement:
    version, known = offered.version, held.version
    if version.term < known.term:
        return _stale_term(version.term, known.term)
    if version.generation < known.generation:
        asked = f"at least {known.generation}"
        return Refusal(Code.GENERATION_STALE, f"generation {version.generation}", asked, "send the newest")
    if version != known:
        return Accept(offered)
    shown = replace(held, proof=offered.proof)
    if shown == offered:
        return Held()
    whole = _keep_unknown(held, offered)  # the first set of a history: a repeated one stops no more than it did
    return Held() if whole == shown else Accept(whole)


def _stale_term(term: int, held: int) -> Refusal:
    return Refusal(Code.TERM_STALE, f"term {term}", f"at least {held}", "connect to the current leader")


def _keep_unknown(held: DesiredSet, offered: DesiredSet) -> DesiredSet:
    known = {asked.id for asked in offered.assignments}
    routed = {route.workload for route in offered.routes}
    met = {peer.region for peer in offered.peers}
    return replace(
        offered,
        assignments=(*offered.assignments, *(asked for asked in held.assignments if asked.id not in known)),
        routes=(*offered.routes, *(route for route in held.routes if route.workload not in routed)),
        pins=tuple(sorted({*offered.pins, *held.pins})),
        peers=(*offered.peers, *(peer for peer in held.peers if peer.region not in met)),
    )


STEADY_S = 5.0
"""A session that lasted so long was a good one: the next call starts the back-off anew."""


def reconnect_after(node: str, attempt: int) -> Seconds:
    """Seconds before the next call: 0.1 to 0.2 at first, at most 4, so that all are back within 5 of whom they call."""
    return delay(node, attempt, base_s=0.2, cap_s=4.0)


@dataclass(frozen=True, slots=True)
class Reporter:
    """What this session has reported. sequence: of the last status sent. held: certificate's serial, and roots."""

    sequence: int = 0
    known: Mapping[str, Observed] = field(default_factory=dict)
    held: tuple[str, tuple[str, ...]] = ("", ())


@dataclass(frozen=True, slots=True)
class Report:
    """What is, at one moment."""

    node: str
    epoch: int
    version: Version | None
    observed: tuple[Observed, ...]
    readings: tuple[Reading, ...]
    ingress: tuple[Ingress, ...]
    taken_at: Wall
    front_ready: bool
    serial: str = ""
    roots: tuple[str, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    alone: bool = False


def report(reporter: Reporter, now: Report, *, full_every: int) -> tuple[Reporter, Status]:
    """The next status: everything at first and every `full_every` messages, else what changed since the last."""
    full = reporter.sequence % full_every == 0
    held = (now.serial, now.roots)
    news = full or held != reporter.held
    status = Status(
        node=now.node,
        epoch=now.epoch,
        sequence=reporter.sequence + 1,
        full=full,
        version=now.version,
        observed=now.observed if full else _changed(now.observed, reporter.known),
        gone=tuple(sorted(reporter.known.keys() - {each.assignment for each in now.observed})),
        readings=now.readings,
        ingress=now.ingress,
        taken_at=now.taken_at,
        front_ready=now.front_ready,
        serial=now.serial if news else "",
        roots=now.roots if news else (),
        crossings=now.crossings,
        alone=now.alone,
    )
    return Reporter(status.sequence, {each.assignment: each for each in now.observed}, held), status


def _changed(observed: Iterable[Observed], known: Mapping[str, Observed]) -> tuple[Observed, ...]:
    return tuple(each for each in observed if known.get(each.assignment) != each)
