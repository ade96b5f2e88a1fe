"""Where a request goes: which replica next, what a failure means, and what is turned away before it waits.

Everything here is a function of values. The front keeps one `Health` for each replica it sends to and one `Tries` for
each request; it asks `admit` once, then `choose` and `judge` until the request is answered or given up.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from shoal.agent.core.backoff import delay
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Elapsed, Seconds

EJECT_BASE_S: Final = 0.25
EJECT_CAP_S: Final = 10.0
LATE_LIMIT: Final = 3
"""Deadlines missed in a row after which a replica counts as failed: one that hangs refuses nothing."""
SERVICE_SHARE: Final = 0.2
"""Weight of the newest request in the moving estimate of a replica's service time."""
APART_SHARE: Final = 0.05
"""As small in that of how far answers are apart: over a long road they come in bunches."""
APART_CAP_S: Final = 0.1
"""Answers are never taken to be further apart: a pause of hours says nothing about the load that comes after it."""
LEAST_APART_S: Final = 1e-4
"""Nor closer: several may come within one tick of the clock."""


@dataclass(frozen=True, slots=True)
class Health:
    """How one replica has behaved towards this front.

    outstanding: requests sent and not yet ended. failures: in a row. service_s: estimated seconds of work for one
    request, None before the first answer. road_s: there and back, without work. answered_at: the newest answer.
    apart_s: estimated seconds from one answer to the next.
    """

    outstanding: int = 0
    failures: int = 0
    late: int = 0
    ejected_until: Elapsed | None = None
    service_s: Seconds | None = None
    road_s: Seconds = Seconds(0.0)
    answered_at: Elapsed | None = None
    apart_s: Seconds = Seconds(APART_CAP_S)


class Fault(Enum):
    """Whose fault an attempt's failure is."""

    REQUEST = auto()
    """The request's own: it goes to the caller."""
    BUSY = auto()
    """The replica is well and has no room: another may have."""
    LATE = auto()
    """The deadline passed while the replica had it."""
    REPLICA = auto()
    """The replica refused it, or the way there broke."""
    CRASH = auto()
    """The worker died with this request inside, or ran it without end."""


class Next(Enum):
    """What becomes of a request after a failed attempt."""

    DELIVER = auto()
    RETRY = auto()
    CONDEMN = auto()
    """It crashed two workers: REQUEST_CRASHED_WORKER."""


@dataclass(frozen=True, slots=True)
class Tries:
    """What one request has been through. crashed_with: digests of what else was in flight where it first crashed, as
    far as that was not answered since."""

    tried: frozenset[str] = frozenset()
    crashed_with: frozenset[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait at one front. per_replica: requests of a workload for each replica that takes requests; as many
    as a worker's queue takes. Those on a long road to it are besides, up to per_way in all.
    per_way: for each gateway on the way to another region: how many replicas there are behind it is not known here.
    """

    per_replica: int = 128
    per_way: int = 512
    per_tenant: int = 1024
    total_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Load:
    """What is inside the front now, the asking request not included."""

    workload: int
    tenant: int
    total_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Turned:
    """A request turned away before it waited. retry_after_s: when there may be room."""

    refusal: Refusal
    retry_after_s: Seconds | None = None


WELL: Final = Health()

_FAULTS: Final[dict[Fault, frozenset[Code]]] = {
    Fault.BUSY: frozenset({Code.OVERLOADED, Code.OUT_OF_MEMORY}),
    Fault.LATE: frozenset({Code.DEADLINE_EXCEEDED}),
    Fault.CRASH: frozenset({Code.WORKER_CRASHED, Code.WORKER_STUCK}),
    # What a peer says about us or about its routes is no business of the caller's: another replica may answer.
    Fault.REPLICA: frozenset(
        {
            Code.REPLICA_UNREACHABLE,
            Code.MODEL_NOT_READY,
            Code.MODEL_NOT_FOUND,
            Code.WORKER_KILLED,
            Code.DEVICE_LOST,
            Code.UNAUTHENTICATED,
            Code.ROLE_DENIED,
            Code.TENANT_DENIED,
            Code.REGION_MISMATCH,
            Code.CERT_EXPIRED,
            Code.CERT_NOT_YET_VALID,
            Code.CERT_UNTRUSTED,
            Code.CERT_NAME_INVALID,
            Code.CERT_REVOKED,
            Code.AGREEMENT_UNKNOWN,
            Code.AGREEMENT_ENDED,
        }
    ),
}
_FAULT_OF: Final = {code: fault for fault, codes in _FAULTS.items() for code in codes}


def fault_of(code: Code) -> Fault:
    """Of what an endpoint answered, or failed to."""
    return _FAULT_OF.get(code, Fault.REQUEST)


def candidates(
    route: Route, health: Mapping[str, Health], here: AbstractSet[str], now: Elapsed
) -> tuple[Endpoint, ...]:
    """Endpoints that may take something new: those that stand by only while no other takes requests. here: assignments
    with a local worker that takes requests."""
    at_work = _in_state(EndpointState.READY, route, here)
    if any(_takes(health.get(endpoint.assignment, WELL), now) for endpoint in at_work):
        return at_work
    return (*at_work, *_in_state(EndpointState.STANDBY, route, here))


def arrived(listed: Iterable[Endpoint], workers: Collection[str]) -> tuple[Endpoint, ...]:
    """Where a request goes that another front of the region sent to this node: to the workers that this node's own
    table lists, by its weights, so that a move between two devices of a node is shared as it says. Where the table
    lists none that takes requests, the sender's is newer: then to any.

    listed: the workload's endpoints here. workers: assignments of its workers that take requests."""
    by_name = {endpoint.assignment: endpoint for endpoint in listed if endpoint.kind is EndpointKind.LOCAL}
    open_here = (EndpointState.READY, EndpointState.STANDBY)
    known = [by_name[name] for name in workers if name in by_name]
    usable = tuple(each for each in known if each.state in open_here and each.weight > 0)
    return usable or tuple(
        Endpoint(name, "", EndpointKind.LOCAL, "", 1.0, EndpointState.READY) for name in workers
    )  # fmt: skip


def choose(
    route: Route,
    health: Mapping[str, Health],
    here: AbstractSet[str],
    tried: AbstractSet[str],
    session: str,
    now: Elapsed,
    seed: int,
    opening: AbstractSet[str] = frozenset(),
) -> Endpoint | Refusal:
    """The endpoint for the next attempt, never a draining or a tried one; a refusal when none is left.

    A replica drawn by weight gets the request if it is idle, else the one whose outstanding requests are least for its
    weight. So a light load is shared by weights (what a step of a migration counts on), a heavy one by how fast the
    replicas are. An ejected replica gets nothing until its time is over, then one request at a time, unless nothing
    else is left; those that stand by take over for as long as all others are ejected. session: requests of one session
    meet one replica, as long as it takes requests. opening: replicas to which the way is not open yet; they get nothing
    while another takes requests.
    """
    open_to_new = candidates(route, health, here, now)
    if not open_to_new:
        return _nowhere(route)
    untried = [endpoint for endpoint in open_to_new if endpoint.assignment not in tried]
    if not untried:
        return Refusal(
            Code.REPLICA_UNREACHABLE,
            f"all {len(open_to_new)} replicas of {route.workload} were tried",
            "one that answers",
            "retry later",
        )
    taking = [e for e in untried if _takes(health.get(e.assignment, WELL), now)]
    usable = [e for e in taking if e.assignment not in opening] or taking or untried
    if len(usable) == 1:
        return usable[0]
    if session:
        return max(usable, key=lambda e: -e.weight / math.log(_unit(f"{session}/{e.assignment}")))
    drawn = _drawn(usable, _unit(f"{seed}/{len(tried)}"))
    if health.get(drawn.assignment, WELL).outstanding == 0:
        return drawn
    return min(usable, key=lambda e: (_crowd(e, health), e is not drawn))


def ready(route: Route, health: Mapping[str, Health], here: AbstractSet[str], now: Elapsed) -> bool:
    """Whether some replica takes requests and is not ejected."""
    states = (health.get(endpoint.assignment, WELL) for endpoint in candidates(route, health, here, now))
    return any(state.ejected_until is None or now >= state.ejected_until for state in states)


def judge(fault: Fault, tries: Tries, *, idempotent: bool, sent: bool) -> Next:
    """After an attempt failed, `tries` as before it. sent: the replica may have begun to work on it."""
    if fault in (Fault.REQUEST, Fault.LATE):
        return Next.DELIVER
    if fault is Fault.CRASH and tries.crashed_with is not None:
        return Next.CONDEMN
    if sent and not idempotent and fault is not Fault.BUSY:
        return Next.DELIVER
    return Next.RETRY


def blamed(tries: Tries, crashed_with: frozenset[bytes]) -> bool:
    """Whether this very request is to blame for two crashes: only if what else was in flight differs, or nothing was.

    tries: before the second crash. crashed_with: the others' digests at the second."""
    return tries.crashed_with is not None and (tries.crashed_with != crashed_with or not crashed_with)


def sent(health: Health) -> Health:
    return replace(health, outstanding=health.outstanding + 1)


def withdrawn(health: Health) -> Health:
    """The caller went away; nothing was learnt about the replica."""
    return replace(health, outstanding=health.outstanding - 1)


def answered(health: Health, latency_s: Seconds, ahead: int, now: Elapsed, road_s: Seconds = Seconds(0.0)) -> Health:
    """ahead: what was outstanding there when the request was sent. A replica that works on one request at a time, or
    shares itself among all, took (latency - road) / (ahead + 1) for each; more than that as far as they were on the
    road."""
    newest = max(latency_s - road_s, 0.0) / (ahead + 1)
    apart = APART_CAP_S if health.answered_at is None else min(now - health.answered_at, APART_CAP_S)
    return Health(
        outstanding=health.outstanding - 1,
        service_s=Seconds(newest if health.service_s is None else _moved(health.service_s, newest, SERVICE_SHARE)),
        road_s=road_s,
        answered_at=now,
        apart_s=Seconds(_moved(health.apart_s, apart, APART_SHARE)),
    )


def failed(health: Health, name: str, fault: Fault, now: Elapsed) -> Health:
    """name: of the replica; spreads the times at which fronts probe it back."""
    over = withdrawn(health)
    match fault:
        case Fault.REQUEST | Fault.BUSY:
            return replace(over, failures=0, late=0, ejected_until=None)
        case Fault.LATE if health.late + 1 < LATE_LIMIT:
            return replace(over, late=health.late + 1)
        case Fault.LATE | Fault.REPLICA | Fault.CRASH:
            if health.ejected_until is not None and now < health.ejected_until:
                return over  # one of those in flight when it was ejected: no second failure
            until = now + delay(name, health.failures, base_s=EJECT_BASE_S, cap_s=EJECT_CAP_S)
            return replace(over, failures=health.failures + 1, late=0, ejected_until=Elapsed(until))


def admit(
    route: Route,
    health: Mapping[str, Health],
    here: AbstractSet[str],
    load: Load,
    left_s: Seconds,
    size: Bytes,
    limits: Limits,
    now: Elapsed,
) -> Turned | None:
    """None, or why the request may not even wait: nobody serves it, no room, or no replica answers within `left_s`."""
    replicas = candidates(route, health, here, now)
    if not replicas:
        return Turned(_nowhere(route), Seconds(1.0))
    waits = [_wait(health.get(replica.assignment, WELL)) for replica in replicas]
    soonest = min(waits)
    room = sum(_room(each, health.get(each.assignment, WELL), limits) for each in replicas)
    if load.workload >= room:
        return _overloaded(f"{load.workload} requests of {route.workload} wait", f"at most {room}", soonest)
    if load.tenant >= limits.per_tenant:
        return _overloaded(f"{load.tenant} requests of the tenant wait", f"at most {limits.per_tenant}", soonest)
    if load.total_bytes > 0 and load.total_bytes + size > limits.total_bytes:
        return _overloaded(f"{load.total_bytes} bytes wait", f"at most {limits.total_bytes}", soonest)
    if soonest > left_s:
        return _overloaded(f"an answer would take {soonest:.3f}s", f"within {left_s:.3f}s", soonest - left_s)
    return None


_T = TypeVar("_T")


class _Remembered(Generic[_T]):
    """Something about each of a bounded number of requests, by digest, for a while; the oldest go first."""

    def __init__(self, keep_s: float = 60.0, size: int = 1024) -> None:
        self._keep_s = keep_s
        self._size = size
        self._known: dict[bytes, tuple[Elapsed, _T]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def _put(self, digest: bytes, what: _T, now: Elapsed) -> None:
        self._known.pop(digest, None)
        self._known[digest] = Elapsed(now + self._keep_s), what
        while len(self._known) > self._size:
            del self._known[next(iter(self._known))]

    def _get(self, digest: bytes, now: Elapsed) -> tuple[Elapsed, _T] | None:
        found = self._known.get(digest)
        if found is not None and now >= found[0]:
            del self._known[digest]
            return None
        return found


class Condemned(_Remembered[None]):
    """Requests that crashed two workers, refused until their time is over."""

    def add(self, digest: bytes, now: Elapsed) -> None:
        self._put(digest, None, now)

    def left_s(self, digest: bytes, now: Elapsed) -> Seconds | None:
        """Seconds for which it is still refused; None when it is not."""
        found = self._get(digest, now)
        return None if found is None else Seconds(found[0] - now)


class Suspects(_Remembered[frozenset[bytes]]):
    """Requests that were in flight at a crash, until they are answered: whoever sends one again does not begin anew."""

    def add(self, digest: bytes, crashed_with: frozenset[bytes], now: Elapsed) -> None:
        """crashed_with: digests of what else was in flight there."""
        self._put(digest, crashed_with, now)

    def crashed_with(self, digest: bytes, now: Elapsed) -> frozenset[bytes] | None:
        found = self._get(digest, now)
        return None if found is None else found[1]

    def answered(self, digest: bytes) -> None:
        """It is innocent, and no excuse for those that were in flight with it."""
        self._known.pop(digest, None)
        self._known = {each: (until, others - {digest}) for each, (until, others) in self._known.items()}


def _in_state(state: EndpointState, route: Route, here: AbstractSet[str]) -> tuple[Endpoint, ...]:
    return tuple(
        endpoint
        for endpoint in route.endpoints
        if endpoint.state is state
        and endpoint.weight > 0
        and (endpoint.kind is not EndpointKind.LOCAL or endpoint.assignment in here)
    )


def _takes(health: Health, now: Elapsed) -> bool:
    if health.ejected_until is None:
        return True
    return now >= health.ejected_until and health.outstanding == 0


def _room(endpoint: Endpoint, health: Health, limits: Limits) -> int:
    """On the road are as many as are answered in the time that it takes (Little's law)."""
    if endpoint.kind is EndpointKind.GATEWAY:
        return limits.per_way
    on_the_road = math.floor(health.road_s / max(health.apart_s, LEAST_APART_S))
    return max(limits.per_replica, min(limits.per_way, limits.per_replica + on_the_road))


def _moved(known: float, newest: float, share: float) -> float:
    return known + share * (newest - known)


def _crowd(endpoint: Endpoint, health: Mapping[str, Health]) -> float:
    return (health.get(endpoint.assignment, WELL).outstanding + 1) / endpoint.weight


def _wait(health: Health) -> Seconds:
    """Until a request sent now would be answered. An idle replica is always tried: an old estimate may be wrong."""
    if health.outstanding == 0 or health.service_s is None:
        return Seconds(0.0)
    return Seconds(health.road_s + health.service_s * (health.outstanding + 1))


def _drawn(endpoints: Sequence[Endpoint], unit: float) -> Endpoint:
    left = unit * sum(endpoint.weight for endpoint in endpoints)
    for endpoint in endpoints:
        left -= endpoint.weight
        if left < 0:
            return endpoint
    return endpoints[-1]


def _unit(text: str) -> float:
    """A number in (0, 1) that depends on `text` alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


def _nowhere(route: Route) -> Refusal:
    found = route.pending_reason or (
        f"every replica of {route.workload} is draining or still loading"
        if route.endpoints
        else f"{route.workload} has no replica"
    )
    return Refusal(
        Code.MODEL_NOT_READY,
        f"{route.pending_code}: {found}" if route.pending_code else found,
        "a ready replica",
        f"retry later, or ask why: shoal explain {route.workload.name}",
    )


def _overloaded(found: str, asked: str, retry_after_s: float) -> Turned:
    refusal = Refusal(Code.OVERLOADED, found, asked, "retry after the time given, or ask for more replicas")
    return Turned(refusal, Seconds(max(0.01, retry_after_s)))
