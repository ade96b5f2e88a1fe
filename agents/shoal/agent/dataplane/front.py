"""What the front does with a call: authenticate, route, attempt, and retry on another replica.

`DataPlane` is the `InferenceService` behind every transport. Decisions are made by `core.routing`; connections to
replicas are in `upstream`.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from structlog.contextvars import bind_contextvars, reset_contextvars

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
from shoal.agent.dataplane import model_messages
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.in_flight import InFlightRequest, RequestFactory
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.outcomes import RequestOutcomes
from shoal.agent.dataplane.session_affinity import SessionAffinity, SessionSearch, local_endpoint
from shoal.agent.dataplane.session_state import hide_state
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.tracing import Tracer
from shoal.agent.dataplane.transport import MAX_MESSAGE, CallRefused, InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.ports import AgentClock, FrontStats, LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.agreement import GUEST_TENANT, local_traffic_key
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import SERVED_VERSION as VERSION
from shoal.types.workload import WorkloadKey

METADATA_TIMEOUT_S: Final = Seconds(10.0)


class DataPlane:
    """Answers the Open Inference Protocol along routes. Everything runs on one event loop."""

    def __init__(
        self,
        settings: FrontSettings,
        clock: AgentClock,
        workers: WorkerClients,
        peers: PeerClients,
        callers: CallerAuth,
        sessions: FrontSessions,
        captures: RequestCaptures | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Optional parts have defaults.

        - `captures`: keeps requests that workers here answered, where the workload consents.
        - `tracer`: by default one that traces what operators ask for, and exports nothing.
        """
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._callers = callers
        self._sessions = sessions
        self._captures = captures or RequestCaptures()
        self._requests = RequestFactory(settings, clock, tracer or Tracer(settings.region, settings.origin, clock))
        self._affinity = SessionAffinity()
        self._meter = RequestMeter()
        self._outcomes = RequestOutcomes(self._meter, clock)
        self._routes: Mapping[WorkloadKey, Route] = {}
        self._forward_routes: Mapping[WorkloadKey, Route] = {}
        """Routes of requests that another front of the region forwarded here."""
        self._agreements: Mapping[WorkloadKey, str] = {}
        """Agreements of workloads that another region serves, with this region or alone."""
        self._guest_routes: Mapping[WorkloadKey, Route] = {}
        """Routes of requests of other regions."""
        self._known_workers: dict[str, LocalWorker] = {}
        self._health: dict[str, ReplicaHealth] = {}
        self._crashes = CrashForensics()
        self._suspect_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks for suspected requests, by replica: with two of them there, another crash would not show which one is
        to blame."""
        self._workload_counts: Counter[WorkloadKey] = Counter()
        self._payer_counts: Counter[str] = Counter()
        self._bytes = 0
        self._configured = False
        self._draining = False
        self._change = asyncio.Event()

    @property
    def meter(self) -> RequestMeter:
        return self._meter

    @property
    def is_ready(self) -> bool:
        return self._is_serving()

    @property
    def in_flight(self) -> int:
        return self._workload_counts.total()

    @property
    def ejected_count(self) -> int:
        now = self._clock.now()
        return sum(each.ejected_until is not None and now < each.ejected_until for each in self._health.values())

    def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...],
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
    ) -> None:
        """Apply a complete configuration. A worker that was restarted starts with fresh health."""
        before = self._readiness()
        self._callers.configure(credentials, revoked, peers, forwarding)
        self._routes = {route.workload: route for route in routes}
        for worker in workers:
            if self._known_workers.get(worker.assignment) not in (None, worker) and worker.assignment in self._health:
                self._health[worker.assignment] = ReplicaHealth(outstanding=self._health[worker.assignment].outstanding)
        self._known_workers = {worker.assignment: worker for worker in workers}
        self._forward_routes = _forward_routes(routes, workers)
        self._guest_routes = _guest_routes(routes)
        self._workers.configure(workers)
        listed = frozenset(endpoint.assignment for route in routes for endpoint in route.endpoints)
        self._sessions.configure(stateful_replicas, workers, revoked, listed)
        self._peers.configure(endpoint for route in routes for endpoint in route.endpoints)
        self._agreements = {
            route.workload: endpoint.agreement for route in routes for endpoint in route.endpoints if endpoint.region
        }
        out = {name for agreement in self._agreements.values() for name in (agreement, local_traffic_key(agreement))}
        self._meter.keep_agreements(out | {agreement for peer in peers for agreement in peer.agreements})
        named = listed | self._known_workers.keys()
        self._health = {
            name: health for name, health in self._health.items() if name in named or health.outstanding > 0
        }
        self._configured = True
        if self._readiness() != before:
            self._announce()

    def drain(self) -> None:
        """Become not ready, so that load balancers choose another front; calls are still answered."""
        self._draining = True
        self._announce()

    def _readiness(self) -> tuple[object, ...]:
        """Everything that the result of `server_ready` depends on."""
        return self._is_serving(), self._callers.rules

    def _announce(self) -> None:
        past, self._change = self._change, asyncio.Event()
        past.set()

    def stats(self) -> FrontStats:
        flights = tuple((name, self._health.get(name, HEALTHY).outstanding) for name in self._known_workers)
        return FrontStats(
            self._is_serving(),
            self._meter.ingress(),
            flights,
            self._meter.crossings(),
            self._sessions.counts(),
            self._callers.denied_counts(),
        )

    # InferenceService

    def live(self) -> bool:
        return True

    @property
    def change(self) -> asyncio.Event:
        return self._change

    def admit(self, call: InboundCall) -> str:
        try:
            caller = self._callers.authenticate(call)
        except ShoalError as error:
            if error.code is Code.FORWARD_DENIED:
                self._outcomes.record_refused_call(self._requests.name_of(call), error)
            raise
        return f"{caller.tenant}/{caller.origin}" if caller.tenant == GUEST_TENANT else caller.tenant

    def server_ready(self, call: InboundCall) -> bool:
        self._callers.authenticate_reader(call)
        return self._is_serving()

    def server_metadata(self, call: InboundCall) -> oip.ServerMetadataResponse:
        self._callers.authenticate_reader(call)
        return model_messages.server_metadata()

    def index(self, call: InboundCall, *, ready_only: bool) -> oip.RepositoryIndexResponse:
        caller = self._callers.authenticate_reader(call)
        found = oip.RepositoryIndexResponse()
        for key, route in sorted(self._routes.items()):
            only = caller.agreement or caller.workload
            if key.tenant != caller.tenant or (only and key.name != only):
                continue
            ready = self._has_replica(route)
            if ready:
                found.models.add(name=key.name, version=VERSION, state="READY")
            elif not ready_only:
                reason = self._unavailable_reason(route)
                found.models.add(name=key.name, version=VERSION, state="UNAVAILABLE", reason=reason)
        return found

    def model_ready(self, call: InboundCall, name: str, version: str) -> bool:
        return self._has_replica(self._route(self._callers.authenticate_reader(call), name, version))

    async def model_metadata(self, call: InboundCall, name: str, version: str) -> oip.ModelMetadataResponse:
        caller = self._callers.authenticate_reader(call)
        route = self._route(caller, name, version)
        left = METADATA_TIMEOUT_S if call.remaining_s is None else min(call.remaining_s, METADATA_TIMEOUT_S)
        errand = CallContext(
            *(caller.tenant, caller.origin, self._requests.name_of(call), Seconds(left), caller.agreement),
            workload=route.workload.name,
        )
        tried: frozenset[str] = frozenset()
        failure: ShoalError | None = None
        while isinstance(picked := self._choose(route, tried, "", self._requests.next_number()), Endpoint):
            try:
                if picked.kind is EndpointKind.LOCAL:
                    said = await self._workers.metadata(picked.assignment, errand)
                    hide_state(said, self._sessions.session_of(picked.assignment))
                else:
                    said = await self._peers.metadata(picked, name, errand)
            except AttemptFailed as error:
                tried, failure = tried | {picked.assignment}, error
                continue
            return model_messages.metadata_as_served(name, said)
        raise failure or ShoalError(picked)

    async def model_config(self, call: InboundCall, name: str, version: str) -> oip.ModelConfigResponse:
        return model_messages.config_of(name, await self.model_metadata(call, name, version))

    def statistics(self, call: InboundCall, name: str, version: str) -> oip.ModelStatisticsResponse:
        """Statistics of the requests that entered the region here, as in all counters by workload."""
        caller = self._callers.authenticate_reader(call)
        if name:
            keys = [self._route(caller, name, version).workload]
        else:
            keys = sorted(key for key in self._routes if key.tenant == caller.tenant and not caller.agreement)
        return model_messages.statistics_of({key: self._meter.totals(key) for key in keys})

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        try:
            caller = self._callers.authenticate(call)
            asked = reading.parse_request(request)
            self._callers.consume_forward(call, caller)
            route = self._route(caller, asked.model, asked.version)
            if route.stateful and not asked.session:
                raise _no_sequence()
        except ShoalError as error:
            self._outcomes.record_refused_call(self._requests.name_of(call), error)
            raise
        flight = self._requests.make(call, caller, asked, route, request)
        if caller.is_ingress:
            self._meter.record_entry(flight.key, caller.origin)
        code: Code | None = Code.CANCELLED
        logged = bind_contextvars(trace_id=flight.trace.id) if flight.trace is not None else None
        try:
            with self._hold_room(route, flight):
                answer = await self._answer(route, flight)
            code = None
            return answer + _FINAL if asked.wants_final else answer
        except ShoalError as error:
            code = error.code
            self._outcomes.log_refusal(flight.id, str(flight.key), error)
            raise
        finally:
            self._outcomes.record(flight, code)
            if logged is not None:
                reset_contextvars(**logged)

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
        return self._choose(route, tried, key.sequence, 0)

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

    # authentication and routing

    def check_revoked(self, serial: str) -> Refusal | None:
        """Why a certificate of this serial is refused; None if it is not."""
        return self._callers.check_revoked(serial)

    def _route(self, caller: Caller, name: str, version: str) -> Route:
        """The route for a request.

        A request forwarded inside the region goes to a worker of this node or leaves the region here. A request of
        another region stays in this one. Raises ShoalError(MODEL_NOT_FOUND | MODEL_NOT_READY | TENANT_DENIED |
        FORWARD_DENIED).
        """
        key = WorkloadKey(caller.tenant, caller.agreement or name)
        if caller.is_forwarded:
            self._callers.check_forward(caller, key)
        if caller.hop:
            route = (self._guest_routes if caller.region else self._forward_routes).get(key)
            if route is None and self._sessions.replicas(key):
                return Route(key, 0, (), stateful=True)  # their steps wait for a worker
            if route is None:
                raise refuse(Code.MODEL_NOT_READY, f"{key} has no worker here", "a ready replica", "retry elsewhere")
            return route
        route = self._routes.get(key)
        if route is None and not self._callers.may_enter(caller.tenant):
            raise refuse(
                Code.TENANT_DENIED,
                f"clients of tenant {caller.tenant} do not enter at this agent",
                "one that serves the workload, an entry of the tenant, or a gateway",
                f"call the region's gateway, or: shoal node label {self._settings.origin} entry={caller.tenant}",
            )
        if route is None:
            raise refuse(
                Code.MODEL_NOT_FOUND,
                f"tenant {caller.tenant} has no workload {name!r:.80}",
                "a workload that was applied",
                "see the repository's index, or: shoal get workloads",
            )
        if version not in ("", VERSION):
            raise refuse(
                Code.MODEL_NOT_FOUND, f"version {version!r:.80} of {key}", f"{VERSION} or none", "leave the version out"
            )
        return route

    def _pick(self, route: Route, tried: frozenset[str], session: str, seed: int) -> Endpoint | Refusal:
        """As `_choose`, but avoid a connection that is still opening while another replica's is open.

        Opening takes several round trips. The check starts opening the connection. A request with a session does wait,
        because it must meet its replica.
        """
        first = picked = self._choose(route, tried, session, seed)
        opening = frozenset[str]()
        while not session and isinstance(picked, Endpoint) and self._peers.is_connecting(picked):
            if picked.assignment in opening:
                return first  # all that are left are connecting
            opening |= {picked.assignment}
            picked = self._choose(route, tried, session, seed, opening)
        return picked

    def _choose(
        self, route: Route, tried: frozenset[str], session: str, seed: int, connecting: frozenset[str] = frozenset()
    ) -> Endpoint | Refusal:
        now = self._clock.now()
        return routing.choose(route, self._health, self._known_workers.keys(), tried, session, now, seed, connecting)

    def _has_replica(self, route: Route) -> bool:
        return routing.has_ready_replica(route, self._health, self._known_workers.keys(), self._clock.now())

    def _unavailable_reason(self, route: Route) -> str:
        picked = self._choose(route, frozenset(), "", 0)
        return str(picked) if isinstance(picked, Refusal) else "no replica answers; they are tried again"

    def _is_serving(self) -> bool:
        return self._configured and not self._draining


_CRASH_REFUSAL: Final = Refusal(
    Code.REQUEST_CRASHED_WORKER,
    "two workers ended, or could not end a run, while they had this request",
    "a request that its model survives",
    "change the input; the same bytes are refused for a while",
)


_FINAL: Final = oip.ModelInferResponse(
    parameters={"triton_final_response": oip.InferParameter(bool_param=True)}
).SerializeToString()
"""Appended to a serialized answer, it adds this parameter: fields of a message may come in any order."""


def _no_sequence() -> ShoalError:
    return refuse(
        Code.SESSION_INVALID,
        "a request without a sequence",
        "sequence_id, and sequence_start with the first step",
        "name the session of each request: the workload keeps state between them",
    )


def _deadline_exceeded() -> ShoalError:
    return refuse(Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more")


def _forward_routes(routes: tuple[Route, ...], workers: tuple[LocalWorker, ...]) -> dict[WorkloadKey, Route]:
    """Routes of requests forwarded inside the region: to this node's workers, and to other regions.

    The share of traffic that other regions take now is ignored, because the entering front has applied it. A guest
    workload of another region is not forwarded to a third.
    """
    listed = {route.workload: route.endpoints for route in routes}
    found: defaultdict[WorkloadKey, list[Endpoint]] = defaultdict(list)
    for key in {worker.workload for worker in workers}:
        own = [worker.assignment for worker in workers if worker.workload == key]
        found[key] += routing.local_endpoints(listed.get(key, ()), own)
    for route in routes:
        if route.workload.tenant != GUEST_TENANT:
            found[route.workload] += [replace(each, weight=1.0) for each in route.endpoints if each.region]
    stateful = {route.workload for route in routes if route.stateful}
    return {
        key: Route(key, 0, tuple(endpoints), stateful=key in stateful) for key, endpoints in found.items() if endpoints
    }


def _guest_routes(routes: tuple[Route, ...]) -> dict[WorkloadKey, Route]:
    """Routes of guest workloads, without gateways: only as far as they run in this region."""
    return {
        route.workload: replace(
            route, endpoints=tuple(each for each in route.endpoints if each.kind is not EndpointKind.GATEWAY)
        )
        for route in routes
        if route.workload.tenant == GUEST_TENANT
    }
