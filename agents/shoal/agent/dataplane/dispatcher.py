"""Sends requests to replicas: admission, the choice of a replica, attempts, and retries on another one.

Decisions are made by `core.routing`; connections to replicas are in `upstream`. Steps of sessions are in `sessions`.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from shoal.agent.core import routing
from shoal.agent.core.crashes import CrashForensics, is_second_crash
from shoal.agent.core.routing import (
    HEALTHY,
    AttemptFault,
    AttemptHistory,
    FrontLoad,
    ReplicaHealth,
    RetryDecision,
)
from shoal.agent.core.sequences import SequenceKey, SessionStep
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.in_flight import InFlightRequest, RequestFactory
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.session_affinity import SessionAffinity, SessionSearch, local_endpoint
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import MAX_MESSAGE, CallRefused
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.ports import AgentClock, LocalWorker
from shoal.types.agreement import local_traffic_key
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import WorkloadKey


class RequestDispatcher:
    """Has requests answered by replicas, here or at other fronts."""

    def __init__(
        self,
        settings: FrontSettings,
        clock: AgentClock,
        workers: WorkerClients,
        peers: PeerClients,
        sessions: FrontSessions,
        captures: RequestCaptures,
        meter: RequestMeter,
        requests: RequestFactory,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._sessions = sessions
        self._captures = captures
        self._meter = meter
        self._requests = requests
        self._affinity = SessionAffinity()
        self._routes: Mapping[WorkloadKey, Route] = {}
        self._agreements: Mapping[WorkloadKey, str] = {}
        """Agreements of workloads that another region serves, with this region or alone."""
        self._known_workers: dict[str, LocalWorker] = {}
        self._health: dict[str, ReplicaHealth] = {}
        self._crashes = CrashForensics()
        self._suspect_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks for suspected requests, by replica: with two of them there, another crash would not show which one is
        to blame."""
        self._workload_counts: Counter[WorkloadKey] = Counter()
        self._payer_counts: Counter[str] = Counter()
        self._bytes = 0

    def configure(self, routes: Mapping[WorkloadKey, Route], workers: Iterable[LocalWorker]) -> None:
        """Apply a complete configuration. A worker that was restarted starts with fresh health.

        `routes` are those of requests that enter here.
        """
        self._routes = routes
        for worker in workers:
            if self._known_workers.get(worker.assignment) not in (None, worker) and worker.assignment in self._health:
                self._health[worker.assignment] = ReplicaHealth(outstanding=self._health[worker.assignment].outstanding)
        self._known_workers = {worker.assignment: worker for worker in workers}
        self._agreements = {
            route.workload: endpoint.agreement
            for route in routes.values()
            for endpoint in route.endpoints
            if endpoint.region
        }
        listed = {endpoint.assignment for route in routes.values() for endpoint in route.endpoints}
        named = listed | self._known_workers.keys()
        self._health = {
            name: health for name, health in self._health.items() if name in named or health.outstanding > 0
        }

    @property
    def in_flight(self) -> int:
        return self._workload_counts.total()

    @property
    def ejected_count(self) -> int:
        now = self._clock.now()
        return sum(each.ejected_until is not None and now < each.ejected_until for each in self._health.values())

    def outstanding(self) -> tuple[tuple[str, int], ...]:
        """Requests at each local worker, by assignment."""
        return tuple((name, self._health.get(name, HEALTHY).outstanding) for name in self._known_workers)

    def traffic_keys(self) -> set[str]:
        """Under which the meter counts the requests that workloads with an agreement get, there and here."""
        return {name for agreement in self._agreements.values() for name in (agreement, local_traffic_key(agreement))}

    def choose(
        self, route: Route, tried: frozenset[str], session: str, seed: int, connecting: frozenset[str] = frozenset()
    ) -> Endpoint | Refusal:
        now = self._clock.now()
        return routing.choose(route, self._health, self._known_workers.keys(), tried, session, now, seed, connecting)

    def has_replica(self, route: Route) -> bool:
        return routing.has_ready_replica(route, self._health, self._known_workers.keys(), self._clock.now())

    def unavailable_reason(self, route: Route) -> str:
        picked = self.choose(route, frozenset(), "", 0)
        return str(picked) if isinstance(picked, Refusal) else "no replica answers; they are tried again"

    async def answer(self, route: Route, flight: InFlightRequest) -> bytes:
        """Raises CallRefused where the request is not admitted; ShoalError: the last attempt's, once no other replica
        is left."""
        with self._hold_room(route, flight):
            return await self._answer(route, flight)

    # one request

    async def _answer(self, route: Route, flight: InFlightRequest) -> bytes:
        """Raises ShoalError: the last attempt's, once no other replica is left."""
        if flight.step is not None:
            return await self._answer_step(route, flight, flight.step)
        tries = AttemptHistory()
        failure: AttemptFailed | None = None
        seed = self._requests.next_number()
        while True:
            picked = self._pick(route, tries.tried, flight.session, seed)
            if isinstance(picked, Refusal):
                raise failure or CallRefused(picked, Seconds(1.0))
            if flight.expires_at <= self._clock.now():
                raise failure or _deadline_exceeded()
            flight.attempts += 1
            try:
                return await self._attempt_guarded(picked, flight, flight.request)
            except AttemptFailed as error:
                failure = error
                fault = routing.fault_of(error.code)
                tries = replace(tries, has_crashed=is_second_crash(flight))
                match routing.decide_retry(fault, tries, idempotent=not flight.session, was_sent=error.was_sent):
                    case RetryDecision.RETURN_ERROR:
                        raise
                    case RetryDecision.BLOCK:
                        raise self._block(flight) from error
                    case RetryDecision.RETRY:
                        tries = replace(tries, tried=tries.tried | {picked.assignment})

    async def _answer_step(self, route: Route, flight: InFlightRequest, step: SessionStep) -> bytes:
        """Answer at the replica that has the session, wherever it moved. Raises ShoalError soon after no replica is
        left."""
        key = SequenceKey(flight.key, flight.session)
        if flight.caller.hop:  # the front that forwarded it searches further
            at = local_endpoint(self._sessions.location(key), self._first_endpoint(route, key))
            return await self._step_at(at, key, step, flight)
        search = SessionSearch(self._affinity, key, step, self._clock.now())
        while True:
            picked = search.next_endpoint(
                route, self._sessions.location(key), self._first_endpoint(route, key, search.tried)
            )
            if isinstance(picked, Refusal):
                raise search.failure or CallRefused(picked, Seconds(1.0))
            if flight.expires_at <= self._clock.now():
                raise search.failure or _deadline_exceeded()
            flight.attempts += 1
            try:
                answer = await self._step_at(picked, key, step, flight)
            except ShoalError as error:
                wait_s = search.on_failure(error, picked, self._current_route(route), self._clock.now())
                await asyncio.sleep(min(wait_s, max(0.0, flight.expires_at - self._clock.now())))
                route = self._current_route(route)
            else:
                search.on_answer(picked)
                return answer

    async def _step_at(self, picked: Endpoint, key: SequenceKey, step: SessionStep, flight: InFlightRequest) -> bytes:
        if picked.kind is not EndpointKind.LOCAL:
            left = Seconds(flight.expires_at - self._clock.now())
            return await self._attempt(picked, flight, left, flight.request)

        async def run(assignment: str, request: bytes) -> bytes:
            try:
                return await self._attempt_guarded(replace(picked, assignment=assignment), flight, request)
            except AttemptFailed as error:
                if routing.fault_of(error.code) is AttemptFault.CRASH and is_second_crash(flight):
                    raise self._block(flight) from error
                raise

        return await self._sessions.step(key, step, flight.request, picked.assignment, flight.expires_at, run)

    def _first_endpoint(
        self, route: Route, key: SequenceKey, tried: frozenset[str] = frozenset()
    ) -> Endpoint | Refusal:
        """Where a new session begins; the same at every front with the same route."""
        return self.choose(route, tried, key.sequence, 0)

    def _current_route(self, route: Route) -> Route:
        return self._routes.get(route.workload, route)

    def _block(self, flight: InFlightRequest) -> ShoalError:
        """The refusal after a second crash."""
        self._crashes.block_if_to_blame(flight, self._clock.now())
        return ShoalError(_CRASH_REFUSAL)

    async def _attempt_guarded(self, endpoint: Endpoint, flight: InFlightRequest, request: bytes) -> bytes:
        """As `_attempt`, but a suspected request runs without other suspects on the replica.

        A request that meets its first crash becomes a suspect. Raises AttemptFailed, ShoalError(DEADLINE_EXCEEDED).
        """
        try:
            if not self._crashes.is_suspect(flight, self._clock.now()):
                left = Seconds(flight.expires_at - self._clock.now())
                answer = await self._attempt(endpoint, flight, left, request)
            else:
                answer = await self._attempt_exclusively(endpoint, flight, request)
        except AttemptFailed as error:
            if routing.fault_of(error.code) is AttemptFault.CRASH:
                self._crashes.add_suspect(flight, self._clock.now())
            raise
        self._crashes.on_answer(flight)
        return answer

    async def _attempt_exclusively(self, endpoint: Endpoint, flight: InFlightRequest, request: bytes) -> bytes:
        """As `_attempt`, with no other suspect on the replica. Raises AttemptFailed, ShoalError(DEADLINE_EXCEEDED)."""
        alone = self._suspect_locks[endpoint.assignment]
        try:
            async with asyncio.timeout(flight.expires_at - self._clock.now()):
                await alone.acquire()
        except TimeoutError as error:
            raise _deadline_exceeded() from error
        try:
            return await self._attempt(endpoint, flight, Seconds(flight.expires_at - self._clock.now()), request)
        finally:
            alone.release()
            if not self._crashes.has_suspects:
                self._suspect_locks.clear()

    async def _attempt(
        self, endpoint: Endpoint, flight: InFlightRequest, remaining_s: Seconds, request: bytes
    ) -> bytes:
        """Send the request to one replica once, and record the outcome in the replica's health.

        `request` is what is sent, with the session's state if it has one. Raises AttemptFailed.
        """
        name = endpoint.assignment
        before = self._health.get(name, HEALTHY)
        self._health[name] = routing.record_sent(before)
        self._crashes.on_attempt(name, flight)
        token = flight.step.token if flight.step is not None else ""
        attempt = flight.trace.attempt(endpoint) if flight.trace is not None else None
        errand = CallContext(
            *(flight.key.tenant, flight.caller.origin, flight.id, remaining_s, flight.caller.agreement, token, attempt),
            workload=flight.key.name,
        )
        code: Code | None = Code.CANCELLED
        outcome: Code | Seconds = Code.CANCELLED
        start = self._clock.now()
        try:
            if endpoint.kind is EndpointKind.LOCAL:
                answer = await self._workers.infer(name, request, errand)
                self._captures.note(name, request)
            else:
                answer = await self._peers.infer(endpoint, request, errand)
            now = self._clock.now()
            outcome = seconds = Seconds(now - start)
            code = None
        except AttemptFailed as error:
            outcome = code = error.code
            now = self._clock.now()
            waited, patience = Seconds(now - start), Seconds(self._settings.timeout_s)
            fault = routing.fault_of_attempt(code, self._health[name], before.outstanding, waited, patience, now)
            flight.is_too_early = fault is AttemptFault.CALLER
            if fault is AttemptFault.CRASH:
                self._crashes.on_crash(name, flight, now)
            self._health[name] = routing.record_failure(self._health[name], name, fault, now)
            raise
        except BaseException:
            self._health[name] = routing.record_withdrawn(self._health[name])
            raise
        finally:
            self._crashes.on_attempt_end(name, flight)
            if attempt is not None:
                attempt.end(code)
            if endpoint.region:
                self._meter.record_crossing(endpoint.agreement, endpoint.region, outcome)
            elif flight.key in self._agreements:
                self._meter.record_crossing(
                    local_traffic_key(self._agreements[flight.key]), self._settings.region, outcome
                )
        road = self._peers.rtt_s(endpoint)
        self._health[name] = routing.record_answer(self._health[name], seconds, before.outstanding, now, road)
        if len(answer) > MAX_MESSAGE:
            raise reading.too_large(f"an answer of {len(answer)} bytes", MAX_MESSAGE)
        return answer

    def _pick(self, route: Route, tried: frozenset[str], session: str, seed: int) -> Endpoint | Refusal:
        """As `choose`, but avoid a connection that is still opening while another replica's is open.

        Opening takes several round trips. The check starts opening the connection. A request with a session does wait,
        because it must meet its replica.
        """
        first = picked = self.choose(route, tried, session, seed)
        opening = frozenset[str]()
        while not session and isinstance(picked, Endpoint) and self._peers.is_connecting(picked):
            if picked.assignment in opening:
                return first  # all that are left are connecting
            opening |= {picked.assignment}
            picked = self.choose(route, tried, session, seed, opening)
        return picked

    @contextmanager
    def _hold_room(self, route: Route, flight: InFlightRequest) -> Iterator[None]:
        """Count one request while it is inside. Raises CallRefused when it is not admitted."""
        self._check_admission(route, flight)
        size = len(flight.request)
        self._workload_counts[flight.key] += 1
        self._payer_counts[flight.payer] += 1
        self._bytes += size
        try:
            yield
        finally:
            self._workload_counts[flight.key] -= 1
            self._payer_counts[flight.payer] -= 1
            self._bytes -= size

    def _check_admission(self, route: Route, flight: InFlightRequest) -> None:
        left = self._crashes.blocked_s(flight, flight.arrived_at)
        if left is not None:
            raise CallRefused(_CRASH_REFUSAL, left)
        here: AbstractSet[str] = self._known_workers.keys()
        if flight.step is not None and not flight.step.start:
            if flight.caller.hop:
                return  # admitted where it entered; here it waits for its turn
            here = here | self._sessions.replicas(flight.key)
            route = replace(route, endpoints=tuple(replace(each, weight=1.0) for each in route.endpoints))
        load = FrontLoad(self._workload_counts[flight.key], self._payer_counts[flight.payer], Bytes(self._bytes))
        turned = routing.admit(
            route,
            self._health,
            here,
            load,
            Seconds(flight.expires_at - flight.arrived_at),
            Bytes(len(flight.request)),
            self._settings.limits,
            flight.arrived_at,
        )
        if turned is not None:
            raise CallRefused(turned.refusal, turned.retry_after_s)


_CRASH_REFUSAL: Final = Refusal(
    Code.REQUEST_CRASHED_WORKER,
    "two workers ended, or could not end a run, while they had this request",
    "a request that its model survives",
    "change the input; the same bytes are refused for a while",
)


def _deadline_exceeded() -> ShoalError:
    return refuse(Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more")
