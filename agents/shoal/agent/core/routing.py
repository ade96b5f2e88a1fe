"""Routing of requests: which replica is next, what a failure means, and what is refused before it waits.

Everything here is a function of values. The front keeps one `ReplicaHealth` for each replica it sends to and one
`AttemptHistory` for each request. It calls `admit` once, then `choose` and `decide_retry` until the request is answered
or given up.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from shoal.types import stable_hash
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Elapsed, Seconds

EJECT_BASE_S: Final = 0.25
EJECT_CAP_S: Final = 10.0
LATE_LIMIT: Final = 3
"""Deadlines missed in a row after which a replica counts as failed, because one that hangs refuses nothing."""
HANG_S: Final = 1.5
HANG_FACTOR: Final = 4.0
"""A missed deadline counts against the replica only after both HANG_S seconds and HANG_FACTOR times its usual latency.
A worker gives one run the same time (`shoal.agent.worker.run_timeouts`). Clients choose deadlines, so shorter ones say
nothing about the replica.
"""
SERVICE_SHARE: Final = 0.2
"""Weight of the newest request in the moving estimate of a replica's service time."""

RTT_WINDOWS: Final = 10
"""Windows of one RTT of which the largest count of answers holds: as many round trips as BBR keeps its largest delivery
rate for (draft-ietf-ccwg-bbr, MaxBwFilterLen)."""


class ReplicaHealth(NamedTuple):
    """How one replica has behaved towards this front."""

    # Requests sent to it and not yet ended.
    outstanding: int = 0
    # Failures in a row that count against it.
    failures: int = 0
    # Deadlines it missed in a row.
    late_count: int = 0
    # When its ejection ends, elapsed clock; None where it is not ejected.
    ejected_until: Elapsed | None = None
    # Estimated seconds of work for one request, without the RTT; None before the first answer.
    service_s: Seconds | None = None
    # RTT to the replica in seconds; 0 for a local one.
    rtt_s: Seconds = Seconds(0.0)
    # When its newest answer arrived, elapsed clock; None before the first.
    answered_at: Elapsed | None = None
    # When the current window of one RTT began, elapsed clock: at the first answer after the window before.
    window_start: Elapsed | None = None
    # Answers in each of the last windows, the current one last.
    window_answers: tuple[int, ...] = ()


class AttemptFault(Enum):
    """What a failed attempt is attributed to."""

    REQUEST = auto()
    """The request itself: the error goes to the caller."""
    BUSY = auto()
    """The replica is healthy and has no room; another replica may have."""
    LATE = auto()
    """The deadline passed after the replica had the request for longer than it should need."""
    CALLER = auto()
    """The deadline passed before an answer was due; it says nothing about the replica."""
    REPLICA = auto()
    """The replica refused the request, or the connection to it failed."""
    CRASH = auto()
    """The worker died while it ran this request, or never finished it."""


class RetryDecision(Enum):
    """What to do with a request after a failed attempt."""

    RETURN_ERROR = auto()
    RETRY = auto()
    BLOCK = auto()
    """It crashed two workers: answer REQUEST_CRASHED_WORKER."""


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """The attempts of one request so far."""

    # Assignments that it was sent to.
    tried: frozenset[str] = frozenset()
    # True if it was in flight at an earlier crash.
    has_crashed: bool = False


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much may wait at one front.

    A request is refused first if it would not be answered by its deadline. These limits bound what waits where no
    deadline is near, so that a client may send thousands of requests at once.
    """

    # Requests of a workload for each replica that takes requests: as many as a worker's queue takes. Requests in
    # transit over a long RTT come on top, up to per_way in all. A waiting request costs a front some 20 KB beside its
    # bytes.
    per_replica: int = 1024
    # Requests of a workload for each gateway to another region; the number of replicas behind it is unknown here.
    per_way: int = 2048
    # Requests of one tenant, or of one region's guests, all workloads together.
    per_tenant: int = 4096
    # Bytes of all waiting requests together.
    total_bytes: int = 512 * 2**20
    # Requests of several tenants on their way to replicas at once, beside those in transit over a long RTT. Beyond,
    # they wait for their turn (`fair_queue`). Measured in docs/decisions/0029-tenants.md.
    slots: int = 64


@dataclass(frozen=True, slots=True)
class FrontLoad:
    """What is inside the front now, without the request to admit."""

    # Requests of the same workload.
    workload: int
    # Requests of the same tenant, or of the same region's guests.
    tenant: int
    # Bytes of all requests.
    total_bytes: Bytes


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Why a request is refused before it waits. `retry_after_s` is when there may be room; None where that
    is unknown."""

    refusal: Refusal
    retry_after_s: Seconds | None = None


HEALTHY: Final = ReplicaHealth()

_FAULTS: Final[dict[AttemptFault, frozenset[Code]]] = {
    AttemptFault.BUSY: frozenset({Code.OVERLOADED, Code.OUT_OF_MEMORY, Code.SCALED_TO_ZERO}),
    AttemptFault.LATE: frozenset({Code.DEADLINE_EXCEEDED}),
    AttemptFault.CRASH: frozenset({Code.WORKER_CRASHED, Code.WORKER_STUCK}),
    # A peer's error about this node or about its own routes does not concern the caller: another replica may answer.
    AttemptFault.REPLICA: frozenset(
        {
            Code.REPLICA_UNREACHABLE,
            Code.MODEL_NOT_READY,
            Code.MODEL_NOT_FOUND,
            Code.WORKER_KILLED,
            Code.DEVICE_LOST,
            Code.UNAUTHENTICATED,
            Code.ROLE_DENIED,
            Code.TENANT_DENIED,
            Code.FORWARD_DENIED,
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


def fault_of(code: Code) -> AttemptFault:
    """What the code of a failed attempt is attributed to."""
    return _FAULT_OF.get(code, AttemptFault.REQUEST)


def fault_of_attempt(
    code: Code, health: ReplicaHealth, ahead: int, waited_s: Seconds, default_timeout_s: Seconds, now: Elapsed
) -> AttemptFault:
    """As `fault_of`, for an attempt that failed after `waited_s`.

    A missed deadline is the caller's choice (CALLER) if the replica answered another request meanwhile. It also is if
    the replica had less than HANG_S seconds or less than HANG_FACTOR times its usual latency. `default_timeout_s`, the
    front's own limit for requests without a deadline, always suffices: of a replica that never answered nothing shorter
    is known.

    `health` is the replica's, now; `ahead` is as in `record_answer`.
    """
    fault = fault_of(code)
    if fault is not AttemptFault.LATE:
        return fault
    if health.answered_at is not None and health.answered_at > now - waited_s:
        return AttemptFault.CALLER
    usual_s = math.inf if health.service_s is None else health.rtt_s + health.service_s * (ahead + 1)
    is_due = waited_s >= min(default_timeout_s, max(HANG_S, HANG_FACTOR * usual_s))
    return AttemptFault.LATE if is_due else AttemptFault.CALLER


def candidates(
    route: Route, health: Mapping[str, ReplicaHealth], here: AbstractSet[str], now: Elapsed
) -> list[Endpoint]:
    """Endpoints that may take a new request; standby ones only while no other can.

    `here` are the assignments with a local worker that takes requests.
    """
    ready, standby = _open_endpoints(route, here)
    return _with_standby(ready, standby, health, now)


def _with_standby(
    ready: list[Endpoint], standby: list[Endpoint], health: Mapping[str, ReplicaHealth], now: Elapsed
) -> list[Endpoint]:
    for endpoint in ready:
        if _may_take(health.get(endpoint.assignment, HEALTHY), now):
            return ready
    return ready + standby


def local_endpoints(listed: Iterable[Endpoint], workers: Collection[str]) -> tuple[Endpoint, ...]:
    """Endpoints for a request that another front of the region sent to this node.

    These are the workers in this node's own route, by its weights. So a migration between two devices of the node
    splits traffic as the route says. If the route lists none that takes requests, the sender's route is newer: then any
    worker may take it.

    `listed` are the workload's endpoints in this node's route; `workers` are assignments of its workers that take
    requests.
    """
    by_name = {endpoint.assignment: endpoint for endpoint in listed if endpoint.kind is EndpointKind.LOCAL}
    open_here = (EndpointState.READY, EndpointState.STANDBY)
    known = [by_name[name] for name in workers if name in by_name]
    usable = tuple(each for each in known if each.state in open_here and each.weight > 0)
    return usable or tuple(
        Endpoint(name, "", EndpointKind.LOCAL, "", 1.0, EndpointState.READY) for name in workers
    )  # fmt: skip


def choose(
    route: Route,
    health: Mapping[str, ReplicaHealth],
    here: AbstractSet[str],
    tried: AbstractSet[str],
    session: str,
    now: Elapsed,
    seed: int,
    connecting: AbstractSet[str] = frozenset(),
) -> Endpoint | Refusal:
    """Return the endpoint for the next attempt, never a draining or a tried one; a refusal when none is left.

    - A replica is drawn by weight. It gets the request if it is idle; else the replica with the fewest
      outstanding requests for its weight does. So a light load follows the weights (a step of a migration
      relies on that), and a heavy one follows the replicas' speed.
    - An ejected replica gets nothing until its ejection ends, then one request at a time, unless nothing else
      is left. Standby replicas take over while all others are ejected, or the only ones left for this request.
    - `session`: requests of one session go to one replica while it takes requests.
    - `connecting`: replicas whose connection is not open yet; they get nothing while another takes requests.
    """
    ready, standby = _open_endpoints(route, here)
    open_to_new = _with_standby(ready, standby, health, now)
    if not open_to_new:
        return _no_replica(route)
    if len(open_to_new) == 1 and not tried:
        return open_to_new[0]
    untried = [endpoint for endpoint in open_to_new if endpoint.assignment not in tried]
    if not untried:
        return Refusal(
            Code.REPLICA_UNREACHABLE,
            f"all {len(open_to_new)} replicas of {route.workload} were tried",
            "one that answers",
            "retry later",
        )
    standby = [e for e in standby if e.assignment not in tried]
    taking = [e for e in untried if _may_take(health.get(e.assignment, HEALTHY), now)] or [
        e for e in standby if _may_take(health.get(e.assignment, HEALTHY), now)
    ]
    usable = [e for e in taking if e.assignment not in connecting] or taking or untried
    if len(usable) == 1:
        return usable[0]
    if session:
        return max(usable, key=lambda e: -e.weight / math.log(stable_hash.fraction(f"{session}/{e.assignment}")))
    drawn = _pick_by_weight(usable, stable_hash.fraction(f"{seed}/{len(tried)}"))
    if health.get(drawn.assignment, HEALTHY).outstanding == 0:
        return drawn
    return min(usable, key=lambda e: (_load_per_weight(e, health), e is not drawn))


def has_ready_replica(route: Route, health: Mapping[str, ReplicaHealth], here: AbstractSet[str], now: Elapsed) -> bool:
    """Whether some replica takes requests and is not ejected."""
    states = (health.get(endpoint.assignment, HEALTHY) for endpoint in candidates(route, health, here, now))
    return any(state.ejected_until is None or now >= state.ejected_until for state in states)


def decide_retry(fault: AttemptFault, history: AttemptHistory) -> RetryDecision:
    """What to do after an attempt failed. `history` is from before the attempt.

    The request may have been run: without state in the server, that does no harm. A step of a session does not come
    here.
    """
    if fault in (AttemptFault.REQUEST, AttemptFault.LATE, AttemptFault.CALLER):
        return RetryDecision.RETURN_ERROR
    if fault is AttemptFault.CRASH and history.has_crashed:
        return RetryDecision.BLOCK
    return RetryDecision.RETRY


def record_sent(health: ReplicaHealth) -> ReplicaHealth:
    return ReplicaHealth(health.outstanding + 1, *health[1:])


def record_withdrawn(health: ReplicaHealth) -> ReplicaHealth:
    """The caller cancelled; this says nothing about the replica."""
    return ReplicaHealth(health.outstanding - 1, *health[1:])


def record_answer(
    health: ReplicaHealth, latency_s: Seconds, ahead: int, now: Elapsed, rtt_s: Seconds = Seconds(0.0)
) -> ReplicaHealth:
    """Update the estimates after an answer.

    `ahead` is the number of requests outstanding at the replica when this one was sent. A replica that runs one request
    at a time, or shares itself among all, took (latency - RTT) / (ahead + 1) for each. Requests that were still in
    transit make that an underestimate.
    """
    newest = max(latency_s - rtt_s, 0.0) / (ahead + 1)
    is_new_window = health.window_start is None or now - health.window_start >= rtt_s
    return ReplicaHealth(
        outstanding=health.outstanding - 1,
        service_s=Seconds(newest if health.service_s is None else _ewma(health.service_s, newest, SERVICE_SHARE)),
        rtt_s=rtt_s,
        answered_at=now,
        window_start=now if is_new_window else health.window_start,
        window_answers=(*health.window_answers[1 - RTT_WINDOWS :], 1)
        if is_new_window
        else (*health.window_answers[:-1], health.window_answers[-1] + 1),
    )


def record_failure(health: ReplicaHealth, name: str, fault: AttemptFault, now: Elapsed) -> ReplicaHealth:
    """Count a failed attempt. `name` is the replica's; it spreads the times at which fronts retry an ejected one."""
    over = record_withdrawn(health)
    match fault:
        case AttemptFault.REQUEST | AttemptFault.BUSY:
            return over._replace(failures=0, late_count=0, ejected_until=None)
        case AttemptFault.CALLER:
            return over
        case AttemptFault.LATE if health.late_count + 1 < LATE_LIMIT:
            return over._replace(late_count=health.late_count + 1)
        case AttemptFault.LATE | AttemptFault.REPLICA | AttemptFault.CRASH:
            if health.ejected_until is not None and now < health.ejected_until:
                return over  # it was in flight when the replica was ejected, so it is the same failure
            until = now + delay(name, health.failures, base_s=EJECT_BASE_S, cap_s=EJECT_CAP_S)
            return over._replace(failures=health.failures + 1, late_count=0, ejected_until=Elapsed(until))


def admit(
    route: Route,
    health: Mapping[str, ReplicaHealth],
    here: AbstractSet[str],
    load: FrontLoad,
    remaining_s: Seconds,
    size: Bytes,
    limits: AdmissionLimits,
    now: Elapsed,
) -> AdmissionRefusal | None:
    """None, or why the request may not wait: no replica, no room, or no answer expected within `remaining_s`."""
    replicas = candidates(route, health, here, now)
    if not replicas:
        return AdmissionRefusal(_no_replica(route), Seconds(1.0))
    known = [health.get(each.assignment, HEALTHY) for each in replicas]
    # Of the workload, those that wait for their turn and are not on their way to a replica.
    ahead = max(0, load.workload - sum([each.outstanding for each in known])) / len(known)
    soonest, room = Seconds(math.inf), 0
    for replica, each in zip(replicas, known, strict=True):
        soonest = min(soonest, _expected_wait(each, ahead))
        room += _room(replica, each, limits)
    if load.workload >= room:
        return _refuse_overload(f"{load.workload} requests of {route.workload} wait", f"at most {room}", soonest)
    if load.tenant >= limits.per_tenant:
        return _refuse_overload(f"{load.tenant} requests of the tenant wait", f"at most {limits.per_tenant}", soonest)
    if load.total_bytes > 0 and load.total_bytes + size > limits.total_bytes:
        return _refuse_overload(f"{load.total_bytes} bytes wait", f"at most {limits.total_bytes}", soonest)
    if soonest > remaining_s:
        return _refuse_overload(
            f"an answer would take {soonest:.3f}s", f"within {remaining_s:.3f}s", soonest - remaining_s
        )
    return None


def sole_replica(route: Route, here: AbstractSet[str]) -> Endpoint | None:
    """The only endpoint which takes requests, inside the region; None where there is another, or none."""
    ready, _ = _open_endpoints(route, here)
    return ready[0] if len(ready) == 1 and ready[0].kind is not EndpointKind.GATEWAY else None


def takes_at_once(health: ReplicaHealth, waiting: int, remaining_s: Seconds, limits: AdmissionLimits) -> bool:
    """Whether a `sole_replica` in this state takes a request as `admit` and `choose` would have it, as far as they do
    not look at payers and bytes. `waiting`: requests of the workload inside."""
    if health.ejected_until is not None or waiting >= limits.per_replica:
        return False
    outstanding, service_s = health.outstanding, health.service_s
    if outstanding == 0 or service_s is None:
        return remaining_s >= 0.0
    return _expected_wait(health, max(0, waiting - outstanding)) <= remaining_s


def _open_endpoints(route: Route, here: AbstractSet[str]) -> tuple[list[Endpoint], list[Endpoint]]:
    """(ready, standby): those that take requests."""
    ready: list[Endpoint] = []
    standby: list[Endpoint] = []
    for endpoint in route.endpoints:
        if endpoint.weight > 0 and (endpoint.kind is not EndpointKind.LOCAL or endpoint.assignment in here):
            if endpoint.state is EndpointState.READY:
                ready.append(endpoint)
            elif endpoint.state is EndpointState.STANDBY:
                standby.append(endpoint)
    return ready, standby


def _may_take(health: ReplicaHealth, now: Elapsed) -> bool:
    if health.ejected_until is None:
        return True
    return now >= health.ejected_until and health.outstanding == 0


def _room(endpoint: Endpoint, health: ReplicaHealth, limits: AdmissionLimits) -> int:
    """Requests that may wait for one endpoint.

    Requests in transit come on top: as many as are answered within one RTT (Little's law), counted rather than derived
    from the time between answers, which over a long RTT arrive in bursts. The largest of the last windows counts: the
    current one has only begun, and a pause of either machine says nothing about what the connection holds.
    """
    if endpoint.kind is EndpointKind.GATEWAY:
        return limits.per_way
    in_transit = max(health.window_answers, default=0) if health.rtt_s > 0 else 0
    return max(limits.per_replica, min(limits.per_way, limits.per_replica + in_transit))


def _ewma(known: float, newest: float, share: float) -> float:
    return known + share * (newest - known)


def _load_per_weight(endpoint: Endpoint, health: Mapping[str, ReplicaHealth]) -> float:
    return (health.get(endpoint.assignment, HEALTHY).outstanding + 1) / endpoint.weight


def _expected_wait(health: ReplicaHealth, ahead: float) -> Seconds:
    """Seconds until a request that comes now would be answered, after `ahead` others that are not sent yet. An idle
    replica is always tried: an old estimate may be wrong."""
    if health.outstanding == 0 or health.service_s is None:
        return Seconds(0.0)
    return Seconds(health.rtt_s + health.service_s * (health.outstanding + ahead + 1))


def _pick_by_weight(endpoints: Sequence[Endpoint], unit: float) -> Endpoint:
    left = unit * sum((endpoint.weight for endpoint in endpoints), 0.0)
    for endpoint in endpoints:
        left -= endpoint.weight
        if left < 0:
            return endpoint
    return endpoints[-1]


def _no_replica(route: Route) -> Refusal:
    found = route.pending_reason or (
        f"every replica of {route.workload} is draining or still loading"
        if route.endpoints
        else f"{route.workload} has no replica"
    )
    says_more = bool(route.pending_code) and route.pending_code != Code.MODEL_NOT_READY
    return Refusal(
        Code.MODEL_NOT_READY,
        f"{route.pending_code}: {found}" if says_more else found,
        "a ready replica",
        f"retry later, or ask why: shoal explain {route.workload.name}",
    )


def _refuse_overload(found: str, asked: str, retry_after_s: float) -> AdmissionRefusal:
    refusal = Refusal(Code.OVERLOADED, found, asked, "retry after the time given, or ask for more replicas")
    return AdmissionRefusal(refusal, Seconds(max(0.01, retry_after_s)))
