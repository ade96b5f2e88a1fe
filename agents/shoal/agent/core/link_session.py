"""One session with the coordinator: which welcome and desired set to accept, what to report, when to call again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from shoal.types.assignment import (
    MAX_INGRESS_PART,
    MAX_STATUS_TENSORS,
    NO_SUBSCRIPTIONS,
    AgreementCounts,
    DesiredSet,
    Ingress,
    IngressRange,
    Observed,
    Status,
    Subscriptions,
    Version,
)
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node, Reading, SilentDevice
from shoal.types.link import OLDEST_PROTOCOL, Hello, Welcome
from shoal.types.tenant import TenantUse
from shoal.types.units import Seconds, Wall

SKEW_ALLOWANCE_S = 30.0


def check_welcome(hello: Hello, welcome: Welcome) -> Refusal | None:
    """Return why to end the session, or None.

    The welcome must answer this hello, in a protocol version that the hello offered, and must not be from a replaced
    leader.
    """
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


def check_hello(hello: Hello, node: Node) -> Refusal | None:
    """Return why to end the session that this hello opened, or None.

    A driver may have found devices while the coordinator answered. Statuses would tell of devices that the region does
    not know, for which it quarantines a node.
    """
    told = {device.name for device in hello.node.devices}
    untold = ", ".join(device.name for device in node.devices if device.name not in told)
    if not untold:
        return None
    return Refusal(Code.MESSAGE_INVALID, f"a hello without {untold}", "all devices of this node", "connect again")


def clock_skew(welcome: Welcome, wall: Wall) -> Seconds | None:
    """Coordinator's clock minus `wall`, seconds; None where it is within the allowance."""
    difference = Seconds(welcome.coordinator_time - wall)
    return difference if abs(difference) > SKEW_ALLOWANCE_S else None


@dataclass(frozen=True, slots=True)
class AcceptSet:
    """A desired set to persist and act on."""

    desired_set: DesiredSet


@dataclass(frozen=True, slots=True)
class SetUnchanged:
    """The set is already persisted: nothing to do."""


SetDecision = AcceptSet | SetUnchanged | Refusal


def evaluate(held: DesiredSet | None, offered: DesiredSet, *, node: str, history: str) -> SetDecision:
    """Whether to act on a desired set that was offered after this session's first full status.

    `history` is the one of the welcome. Within one history, term and generation never go back. Another history is
    accepted only if it is this session's. Its first set stops nothing: assignments, routes and peers that it does not
    list stay until a later generation.

    The same set is accepted again if its content differs, because an earlier version of this program may have persisted
    less of it.
    """
    version = offered.version
    if offered.node != node:
        return Refusal(Code.NODE_MISMATCH, f"a desired set for {offered.node}", node, "send each node its own")
    if version.history != history:
        return Refusal(Code.GENERATION_STALE, f"history {version.history}", history, "connect again")
    if held is None:
        return AcceptSet(offered)
    if version.history != held.version.history:
        return AcceptSet(_keep_unknown(held, offered))
    return _evaluate_same_history(held, offered)


def _evaluate_same_history(held: DesiredSet, offered: DesiredSet) -> SetDecision:
    version, known = offered.version, held.version
    if version.term < known.term:
        return _stale_term(version.term, known.term)
    if version.generation < known.generation:
        asked = f"at least {known.generation}"
        return Refusal(Code.GENERATION_STALE, f"generation {version.generation}", asked, "send the newest")
    if version != known:
        return AcceptSet(offered)
    shown = replace(held, proof=offered.proof)
    if shown == offered:
        return SetUnchanged()
    # The held set may be the first of its history, with older entries kept: a repeat must not stop those.
    whole = _keep_unknown(held, offered)
    return SetUnchanged() if whole == shown else AcceptSet(whole)


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


STABLE_SESSION_S = 5.0
"""After a session of at least this many seconds, the next call starts the back-off from the beginning."""


def reconnect_after(node: str, attempt: int) -> Seconds:
    """Seconds before call number `attempt`: 0.1 to 0.2 at first, at most 4.

    The cap brings all nodes back within 5 seconds of the coordinator's return.
    """
    return delay(node, attempt, base_s=0.2, cap_s=4.0)


@dataclass(frozen=True, slots=True)
class ReportCursor:
    """What this session has reported so far."""

    # Sequence number of the last status; 0 before the first.
    sequence: int = 0
    # What the last status knew of each assignment, by its id.
    last_observed: Mapping[str, Observed] = field(default_factory=dict)
    # Serial of the node's certificate and fingerprints of its trusted CAs, as last reported.
    identity: tuple[str, tuple[str, ...]] = ("", ())
    # What the node subscribed to, as last reported; None before the first report.
    subscriptions: Subscriptions | None = None
    # Key of the last ingress that was reported, where it goes in parts; empty: the next part is the first.
    ingress_until: str = ""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The node's state at one moment, the content of a full status."""

    # Name of the node.
    node: str
    # Number of this session, from the welcome; the coordinator drops reports of an earlier one.
    epoch: int
    # Version of the desired set last persisted; None before the first.
    version: Version | None
    # Every assignment that the node knows.
    observed: tuple[Observed, ...]
    # The newest reading of each device that can be read.
    readings: tuple[Reading, ...]
    # Requests that entered the region here since the front started, by workload and tenant.
    ingress: tuple[Ingress, ...]
    # Wall time of this report.
    taken_at: Wall
    # Whether the front takes requests.
    front_ready: bool
    # Serial number of the node's certificate, decimal; empty where it has none.
    serial: str = ""
    # Fingerprints of the CAs that the node trusts.
    roots: tuple[str, ...] = ()
    # Requests to and from other regions by agreement, at a gateway; else empty.
    agreement_counts: tuple[AgreementCounts, ...] = ()
    # Whether it runs stateful replicas, which only one node may run, and so asks for a lease on them.
    asks_lease: bool = False
    # Devices that do not answer.
    silent: tuple[SilentDevice, ...] = ()
    # What limited tenants did at the front since it started.
    tenants: tuple[TenantUse, ...] = ()
    # Workloads that it asks routes of.
    subscriptions: Subscriptions = NO_SUBSCRIPTIONS


def next_status(reporter: ReportCursor, now: NodeReport, *, full_every: int) -> tuple[ReportCursor, Status]:
    """The next status: complete at first and in every `full_every`-th message, else the changes since the last one."""
    full = reporter.sequence % full_every == 0
    held = (now.serial, now.roots)
    news = full or held != reporter.identity
    ingress, part = _ingress_part(now.ingress, reporter.ingress_until)
    status = Status(
        node=now.node,
        epoch=now.epoch,
        sequence=reporter.sequence + 1,
        full=full,
        version=now.version,
        observed=_within_tensors(now.observed if full else _changes(now.observed, reporter.last_observed)),
        gone=tuple(sorted(reporter.last_observed.keys() - {each.assignment for each in now.observed})),
        readings=now.readings,
        silent=now.silent,
        ingress=ingress,
        taken_at=now.taken_at,
        front_ready=now.front_ready,
        serial=now.serial if news else "",
        roots=now.roots if news else (),
        agreement_counts=now.agreement_counts,
        asks_lease=now.asks_lease,
        tenants=now.tenants,
        subscriptions=now.subscriptions if full or now.subscriptions != reporter.subscriptions else None,
        ingress_range=part,
    )
    known = {each.assignment: each for each in now.observed}
    until = part.until if part is not None else ""
    return ReportCursor(status.sequence, known, held, now.subscriptions, until), status


def _ingress_part(ingress: tuple[Ingress, ...], after: str) -> tuple[tuple[Ingress, ...], IngressRange | None]:
    """What a status says of it: all, or of many those whose turn it is. after: key of the last one that was said."""
    if len(ingress) <= MAX_INGRESS_PART:
        return ingress, None
    later = sorted((each for each in ingress if each.key > after), key=attrgetter("key"))
    part = tuple(later[:MAX_INGRESS_PART])
    return part, IngressRange(after, part[-1].key if len(later) > len(part) else "")


def _within_tensors(observed: tuple[Observed, ...]) -> tuple[Observed, ...]:
    """Without the inputs and outputs of those that would be too many for one message. No decision reads them."""
    left, found = MAX_STATUS_TENSORS, list[Observed]()
    for each in observed:
        tensors = len(each.inputs) + len(each.outputs)
        is_told = tensors <= left
        left -= tensors if is_told else 0
        found.append(each if is_told else replace(each, inputs=(), outputs=()))
    return tuple(found)


def _changes(observed: Iterable[Observed], known: Mapping[str, Observed]) -> tuple[Observed, ...]:
    return tuple(each for each in observed if known.get(each.assignment) != each)
