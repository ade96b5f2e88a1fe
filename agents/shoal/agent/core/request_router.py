"""The routing state of one front: its routes, the health of replicas, the requests inside, and what it suspects.

Whoever drives it brings time and connections: `admit`, `enter` and `leave` once for each request, then for each attempt
`begin_attempt` and one of `on_answer`, `on_failure` and `on_withdrawal`. Decisions are made by `routing` and `crashes`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from shoal.agent.core import routing, wakes
from shoal.agent.core.crashes import CRASH_REFUSAL, CrashForensics, RequestInFlight
from shoal.agent.core.route_tables import NO_ROUTES, RouteTables, RunningWorker
from shoal.agent.core.routing import HEALTHY, AdmissionLimits, AdmissionRefusal, AttemptFault, FrontLoad, ReplicaHealth
from shoal.agent.core.wakes import NO_WAKE, UnloadedReplica, WakePlan
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import WorkloadKey

_NOBODY: Final = frozenset[str]()


class RoutedRequest(RequestInFlight, Protocol):
    """A request inside the front, as far as routing concerns it."""

    key: WorkloadKey
    """Its workload."""
    session: str
    """Session id; empty without one."""
    arrived_at: Elapsed
    expires_at: Elapsed
    """Its deadline."""
    has_crashed_elsewhere: bool
    """The front that forwarded it saw a worker crash under it."""

    @property
    def payer(self) -> str:
        """Whose share of the front it uses."""
        ...

    @property
    def size(self) -> Bytes: ...


class BegunAttempt(NamedTuple):
    """One request that was sent to one replica."""

    endpoint: Endpoint
    request: RoutedRequest
    # Requests outstanding at the replica when this one was sent.
    ahead: int
    # When it was sent, elapsed clock.
    at: Elapsed


class RequestRouter:
    """Where requests go at one front, and what it knows of the replicas. It belongs to one thread."""

    def __init__(self, limits: AdmissionLimits, timeout_s: Seconds) -> None:
        """`timeout_s` is the front's own limit for requests without a deadline."""
        self._limits = limits
        self._timeout_s = timeout_s
        self._tables = NO_ROUTES
        self._workers: Mapping[str, RunningWorker] = {}
        self._unloaded: Mapping[str, UnloadedReplica] = {}
        """Replicas without a worker, those that failed to load among them, by assignment."""
        self._awaited: frozenset[str] = _NOBODY
        """Those of them that requests may wait for."""
        self._woken_at: dict[str, Elapsed] = {}
        """When a request first asked for each of these."""
        self._health: dict[str, ReplicaHealth] = {}
        self._crashes = CrashForensics()
        self._by_workload: Counter[WorkloadKey] = Counter()
        self._by_payer: Counter[str] = Counter()
        self._bytes = 0

    @property
    def tables(self) -> RouteTables:
        return self._tables

    @property
    def workers(self) -> AbstractSet[str]:
        """Assignments with a worker here that takes requests."""
        return self._workers.keys()

    @property
    def unloaded_names(self) -> AbstractSet[str]:
        """Assignments without a worker here that requests may wait for."""
        return self._awaited

    @property
    def in_flight(self) -> int:
        """Requests inside."""
        return self._by_workload.total()

    @property
    def has_suspects(self) -> bool:
        return self._crashes.has_suspects

    def outstanding(self) -> tuple[tuple[str, int], ...]:
        """(assignment, requests sent to it and not yet ended), for each worker here that takes requests, or that
        requests wait for."""
        names = (*self._workers, *self._awaited)
        return tuple((name, self._health.get(name, HEALTHY).outstanding) for name in names)

    @property
    def in_transit(self) -> int:
        """Requests that RTTs hold rather than replicas, as in `routing`: those answered within one RTT."""
        return sum(max(each.window_answers, default=0) for each in self._health.values() if each.rtt_s > 0)

    def ejected_count(self, now: Elapsed) -> int:
        return sum(each.ejected_until is not None and now < each.ejected_until for each in self._health.values())

    def configure(
        self, routes: Iterable[Route], workers: Iterable[RunningWorker], unloaded: Iterable[UnloadedReplica] = ()
    ) -> None:
        """Apply complete routes, all workers here that take requests, and all replicas here that have none.

        A worker that was restarted starts with fresh health. What is known of a replica that is listed no more is
        dropped, once nothing is outstanding there.
        """
        by_name = {worker.assignment: worker for worker in workers}
        for name, worker in by_name.items():
            if self._workers.get(name) not in (None, worker) and name in self._health:
                self._health[name] = ReplicaHealth(outstanding=self._health[name].outstanding)
        self._workers = by_name
        self._unloaded = {each.assignment: each for each in unloaded if each.assignment not in by_name}
        awaited = tuple(each for each in self._unloaded.values() if each.failure is None)
        self._awaited = frozenset([each.assignment for each in awaited])
        # One that does not load yet is asked for again by whoever waits for it.
        self._woken_at = {
            name: at for name, at in self._woken_at.items() if name in self._awaited and self._unloaded[name].is_waking
        }
        self._tables = RouteTables.from_routes(routes, (*by_name.values(), *awaited))
        named = {*self._tables.assignments, *by_name, *self._awaited}
        self._health = {
            name: health for name, health in self._health.items() if name in named or health.outstanding > 0
        }

    # admission

    def admit(
        self, request: RoutedRequest, route: Route | None, keeping: AbstractSet[str] | None = None
    ) -> AdmissionRefusal | None:
        """None, or why the request may not wait here.

        `route` is None for a request that was admitted where it entered: only what is to blame for crashes is refused
        then. `keeping` is given for a step of a session that has begun: the assignments here that keep sessions of the
        workload. Such a step may go to any replica of the route, whatever its weight.
        """
        left_s = self._crashes.blocked_s(request, request.arrived_at)
        if left_s is not None:
            return AdmissionRefusal(CRASH_REFUSAL, left_s)
        if route is None:
            return None
        here = self.workers | self._awaited
        if keeping is not None:
            here = here | keeping
            route = replace(route, endpoints=tuple(replace(each, weight=1.0) for each in route.endpoints))
        return routing.admit(
            route,
            self._health,
            here,
            FrontLoad(self._by_workload[request.key], self._by_payer[request.payer], Bytes(self._bytes)),
            Seconds(request.expires_at - request.arrived_at),
            request.size,
            self._limits,
            request.arrived_at,
        )

    def enter(self, request: RoutedRequest) -> None:
        """Count an admitted request, until it leaves."""
        self._by_workload[request.key] += 1
        self._by_payer[request.payer] += 1
        self._bytes += request.size

    def leave(self, request: RoutedRequest) -> None:
        """It ended, with whatever outcome."""
        self._by_workload[request.key] -= 1
        self._by_payer[request.payer] -= 1
        self._bytes -= request.size

    # common requests: of no session, for workloads that no other region serves

    def is_common(self, route: Route) -> bool:
        """Whether the route's requests may be common ones: none of them wakes a replica."""
        if route.stateful or self._tables.agreements.get(route.workload) is not None:
            return False
        return not any(each.assignment in self._unloaded for each in route.endpoints)

    def sole_replica(self, route: Route) -> Endpoint | None:
        """The replica in this region that is the route's only one which takes requests; None where there is a
        choice."""
        return routing.sole_replica(route, self.workers)

    def takes_at_once(self, request: RoutedRequest, endpoint: Endpoint, remaining_s: Seconds) -> bool:
        """Whether `admit` lets the request in, and `choose` sends it to its route's `sole_replica`, without asking
        them: nothing is known against the request or the replica, and there is room."""
        limits = self._limits
        if (
            self._crashes.is_aware(request.arrived_at)
            or self._bytes + request.size > limits.total_bytes
            or self._by_payer[request.payer] >= limits.per_tenant
        ):
            return False
        health = self._health.get(endpoint.assignment, HEALTHY)
        return routing.takes_at_once(health, self._by_workload[request.key], remaining_s, limits)

    def choose_at_once(self, request: RoutedRequest, route: Route, seed: int) -> Endpoint | None:
        """Where `admit` lets the request in, the replica that `choose` gives; None where it is refused, or something is
        known against requests."""
        now = request.arrived_at
        if self._crashes.is_aware(now) or self.admit(request, route) is not None:
            return None
        return self._choose_afresh(route, now, seed)

    def choose_in_turn(
        self, request: RoutedRequest, route: Route, sole: Endpoint | None, now: Elapsed, seed: int
    ) -> Endpoint | None:
        """Where a request that was let in goes now that its turn has come, as `choose` has it. `sole`: the route's
        `sole_replica`. None where there is none, or something is known against requests."""
        if self._crashes.is_aware(now) or request.expires_at <= now:
            return None
        if sole is not None and self._health.get(sole.assignment, HEALTHY).ejected_until is None:
            return sole
        return self._choose_afresh(route, now, seed)

    def _choose_afresh(self, route: Route, now: Elapsed, seed: int) -> Endpoint | None:
        """What `choose` gives a request of no session that has tried no replica; None where it gives none."""
        picked = self.choose(route, _NOBODY, "", now, seed)
        return picked if isinstance(picked, Endpoint) else None

    # the choice of a replica

    def choose(
        self,
        route: Route,
        tried: AbstractSet[str],
        session: str,
        now: Elapsed,
        seed: int,
        connecting: AbstractSet[str] = _NOBODY,
    ) -> Endpoint | Refusal:
        """As `routing.choose`, with what is known here."""
        return routing.choose(route, self._health, self.workers, tried, session, now, seed, connecting)

    def choose_connected(
        self,
        route: Route,
        tried: AbstractSet[str],
        session: str,
        now: Elapsed,
        seed: int,
        is_connecting: Callable[[Endpoint], bool],
    ) -> Endpoint | Refusal:
        """As `choose`, but avoid a connection that is still opening while another replica's is open.

        Opening takes several round trips. The check starts opening the connection. A request with a session does wait,
        because it must meet its replica.
        """
        first = picked = self.choose(route, tried, session, now, seed)
        opening = _NOBODY
        while not session and isinstance(picked, Endpoint) and is_connecting(picked):
            if picked.assignment in opening:
                return first  # all that are left are connecting
            opening |= {picked.assignment}
            picked = self.choose(route, tried, session, now, seed, opening)
        return picked

    def has_ready_replica(self, route: Route, now: Elapsed) -> bool:
        """As `routing.has_ready_replica`, with what is known here. One that is scaled to zero takes requests."""
        return routing.has_ready_replica(route, self._health, self.workers | self._awaited, now)

    # replicas that are scaled to zero

    def plan_wake(self, route: Route, expires_at: Elapsed, now: Elapsed) -> WakePlan:
        """As `wakes.plan_wake`, for a request along the route. What it says to wake counts as asked for."""
        if not self._unloaded:
            return NO_WAKE
        listed = [self._unloaded[each.assignment] for each in route.endpoints if self._is_unloaded(each)]
        if not listed:
            return NO_WAKE
        has_other = bool(routing.candidates(route, self._health, self.workers, now))
        plan = wakes.plan_wake(listed, self._woken_at, expires_at, now, has_other=has_other)
        self._woken_at.update(dict.fromkeys(plan.wake, now))
        return plan

    def wake_s(self, route: Route, now: Elapsed) -> Seconds | None:
        """How long a request along the route waits for a replica that is scaled to zero; None where it need not."""
        if not self._awaited:
            return None
        taking = (each.assignment for each in route.endpoints if self._is_unloaded(each))
        waits = [self._unloaded[name] for name in taking if name in self._awaited]
        if not waits or routing.candidates(route, self._health, self.workers, now):
            return None
        return min(each.wake_s for each in waits)

    def _is_unloaded(self, endpoint: Endpoint) -> bool:
        takes = endpoint.weight > 0 and endpoint.state is not EndpointState.DRAINING
        return takes and endpoint.kind is EndpointKind.LOCAL and endpoint.assignment in self._unloaded

    # attempts

    def begin_attempt(self, endpoint: Endpoint, request: RoutedRequest, now: Elapsed) -> BegunAttempt:
        """The request is sent to the endpoint now."""
        name = endpoint.assignment
        before = self._health.get(name, HEALTHY)
        self._health[name] = routing.record_sent(before)
        self._crashes.on_attempt(name, request)
        return BegunAttempt(endpoint, request, before.outstanding, now)

    def on_answer(self, begun: BegunAttempt, now: Elapsed, rtt_s: Seconds) -> None:
        """`rtt_s` is the RTT to the endpoint; 0 for a local worker, and where it is unknown."""
        name = begun.endpoint.assignment
        self._crashes.on_attempt_end(name, begun.request)
        self._health[name] = routing.record_answer(
            self._health[name], Seconds(now - begun.at), begun.ahead, now, rtt_s
        )  # fmt: skip

    def on_failure(self, begun: BegunAttempt, code: Code, now: Elapsed) -> AttemptFault:
        """The attempt failed; what that is attributed to."""
        name = begun.endpoint.assignment
        fault = routing.fault_of_attempt(
            code, self._health[name], begun.ahead, Seconds(now - begun.at), self._timeout_s, now
        )
        if fault is AttemptFault.CRASH:
            self._crashes.on_crash(name, begun.request, now)
        if code is Code.REQUEST_CRASHED_WORKER and not begun.endpoint.region:
            self._crashes.block(begun.request, now)  # or else it would end workers of other nodes too
        self._health[name] = routing.record_failure(self._health[name], name, fault, now)
        self._crashes.on_attempt_end(name, begun.request)
        return fault

    def on_withdrawal(self, begun: BegunAttempt) -> None:
        """The caller cancelled, or something failed here: it says nothing about the replica."""
        name = begun.endpoint.assignment
        self._health[name] = routing.record_withdrawn(self._health[name])
        self._crashes.on_attempt_end(name, begun.request)

    # crashes

    def is_suspect(self, request: RoutedRequest, now: Elapsed) -> bool:
        """Whether the request met a crash: it must run where no other suspect runs."""
        return self._crashes.is_suspect(request, now)

    def suspect_after(self, code: Code, request: RoutedRequest, now: Elapsed) -> None:
        """Suspect the request if its attempt failed with a crash, its first."""
        if routing.fault_of(code) is AttemptFault.CRASH:
            self._crashes.add_suspect(request, now)

    def clear_suspicion(self, request: RoutedRequest) -> None:
        """The request was answered."""
        self._crashes.on_answer(request)

    def block_if_to_blame(self, request: RoutedRequest, now: Elapsed) -> None:
        """As `CrashForensics.block_if_to_blame`."""
        self._crashes.block_if_to_blame(request, now)
