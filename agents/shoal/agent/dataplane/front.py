"""What the front does with a call: authenticate, find its route, have it answered, and record how it ended.

`DataPlane` is the `InferenceService` behind every transport. `caller_auth` says who calls; `dispatcher` sends requests
to replicas.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from structlog.contextvars import bind_contextvars, reset_contextvars

from shoal.agent import metrics
from shoal.agent.core.request_attempts import DEADLINE_REFUSAL
from shoal.agent.core.route_tables import RequestEntry
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.dataplane import model_messages
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.auth import INFER_ROLES, READ_ROLES, Caller
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.direct_requests import DirectMemo, DirectRequest, DirectRequests
from shoal.agent.dataplane.dispatcher import RequestDispatcher
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.in_flight import RequestFactory
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.outcomes import RequestOutcomes
from shoal.agent.dataplane.paced_refusals import PacedRefusals
from shoal.agent.dataplane.route_waits import RouteWaits
from shoal.agent.dataplane.session_state import hide_state
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.shared_memory import SharedMemory
from shoal.agent.dataplane.shared_tensors import SharedTensors
from shoal.agent.dataplane.tenant_admission import TenantAdmission
from shoal.agent.dataplane.tracing import Tracer
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.ports import AgentClock, FrontStats, LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.metric import MetricReadings
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.tenant import TenantLimit
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import SERVED_VERSION as VERSION
from shoal.types.workload import WorkloadKey

_DIRECT: Final = "direct"
"""Of a call's memo."""
_PACED: Final = frozenset({Code.TENANT_RATE, Code.TENANT_CONCURRENCY})
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
        shared_memory: SharedMemory | None = None,
        request_wake: Callable[[str], None] = lambda _: None,
        on_ask: Callable[[], None] = lambda: None,
    ) -> None:
        """Optional parts have defaults.

        - `captures`: keeps requests that workers here answered, where the workload consents.
        - `tracer`: by default one that traces what operators ask for, and exports nothing.
        - `shared_memory`: by default nobody may use any.
        - `request_wake`: asks the supervisor to load a replica that is scaled to zero; by default nobody is asked.
        - `on_ask`: called when `stats` name another workload that requests wait for routes of; by default nobody is
          told.
        """
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._callers = callers
        self._sessions = sessions
        self._requests = RequestFactory(settings, clock, tracer or Tracer(settings.region, settings.origin, clock))
        self._meter = RequestMeter()
        self._outcomes = RequestOutcomes(self._meter, clock)
        captures = captures or RequestCaptures()
        self._dispatcher = RequestDispatcher(
            *(settings, clock, workers, peers, sessions, captures, self._meter, self._requests), request_wake
        )
        self._router = self._dispatcher.router
        self._tenants = TenantAdmission(clock, self._meter)
        self._refusals = PacedRefusals(clock)
        self._direct = DirectRequests(
            *(clock, callers, self._tenants, self._requests, self._dispatcher, workers, peers, captures),
            *(self._meter, self._outcomes),
        )
        self._shared_memory = shared_memory or SharedMemory()
        self._route_waits = RouteWaits(clock, on_ask)
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
        return self._router.in_flight

    def tenant_readings(self) -> MetricReadings:
        """What the metrics page says of tenants' limits, and of what waits."""
        return {**self._tenants.readings(), metrics.FRONT_WAITING: {(): self._dispatcher.turns.waiting}}

    @property
    def ejected_count(self) -> int:
        return self._router.ejected_count(self._clock.now())

    def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...],
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
        tenants: tuple[TenantLimit, ...] = (),
        unloaded: tuple[UnloadedReplica, ...] = (),
        routes_on_demand: bool = False,
    ) -> None:
        """Apply a complete configuration. A worker that was restarted starts with fresh health."""
        before = self._readiness()
        self._callers.configure(credentials, revoked, peers, forwarding)
        self._tenants.configure(tenants)
        self._dispatcher.turns.configure({each.tenant: each.weight for each in tenants})
        self._router.configure(routes, workers, unloaded)
        self._workers.configure(workers)
        self._sessions.configure(stateful_replicas, workers, revoked, self._router.tables.assignments)
        self._peers.configure(endpoint for route in routes for endpoint in route.endpoints)
        self._meter.keep_workloads(self._router.tables.entering.keys())
        counted = {agreement for peer in peers for agreement in peer.agreements}
        self._meter.keep_agreements(self._router.tables.traffic_keys | counted)
        self._direct.configure()
        self._dispatcher.wakes.on_configured()
        self._route_waits.configure(routes, is_on_demand=routes_on_demand)
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
        return FrontStats(
            self._is_serving(),
            self._meter.ingress(),
            self._router.outstanding(),
            self._meter.agreement_counts(),
            self._sessions.counts(),
            self._callers.denied_counts(),
            self._tenants.uses(),
            unloaded=tuple(sorted(self._router.unloaded_names)),
            asked=self._route_waits.open_questions,
        )

    # InferenceService

    def live(self) -> bool:
        return True

    @property
    def change(self) -> asyncio.Event:
        return self._change

    def authenticate(self, call: InboundCall) -> None:
        self._callers.authenticate(call)

    def admit(self, call: InboundCall) -> str:
        try:
            caller = self._callers.authenticate(call)
        except ShoalError as error:
            if error.code is Code.FORWARD_DENIED:
                self._outcomes.record_refused_call(self._requests.name_of(call), error)
            raise
        if not caller.hop:
            self._tenants.check(caller.tenant)
        return caller.payer

    async def pace(self, call: InboundCall, error: ShoalError) -> None:
        if error.code in _PACED:
            await self._refusals.wait(call.caller)

    def payer_of(self, call: InboundCall) -> str | None:
        caller = self._callers.find_caller(call)
        if caller is None or caller.tenant == GUEST_TENANT:
            return None
        gate = None if caller.hop else self._tenants.gate(caller.tenant)  # it was charged where it entered
        return caller.tenant if gate is None or gate.is_open(self._clock.now()) else None

    def tenant_of(self, call: InboundCall) -> str:
        caller = self._callers.authenticate(call, READ_ROLES)
        return caller.payer if caller.role in INFER_ROLES else ""

    def server_ready(self, call: InboundCall) -> bool:
        self._callers.authenticate_reader(call)
        return self._is_serving()

    def server_metadata(self, call: InboundCall) -> oip.ServerMetadataResponse:
        caller = self._callers.authenticate_reader(call)
        return model_messages.server_metadata(has_shared_memory=self._shared_memory.is_allowed(caller))

    def index(self, call: InboundCall, *, ready_only: bool) -> oip.RepositoryIndexResponse:
        caller = self._callers.authenticate_reader(call)
        found = oip.RepositoryIndexResponse()
        only, routed = caller.agreement or caller.workload, self._router.tables.entering
        own = (key for key in routed if key.tenant == caller.tenant and (not only or key.name == only))
        for key in sorted(own):  # a region may have thousands of others
            route = routed[key]
            ready = self._router.has_ready_replica(route, self._clock.now())
            if ready:
                wake_s = self._router.wake_s(route, self._clock.now())
                reason = "" if wake_s is None else f"{Code.SCALED_TO_ZERO}: the next request waits {wake_s:.2g}s"
                found.models.add(name=key.name, version=VERSION, state="READY", reason=reason)
            elif not ready_only:
                reason = self._unavailable_reason(route)
                found.models.add(name=key.name, version=VERSION, state="UNAVAILABLE", reason=reason)
        return found

    async def model_ready(self, call: InboundCall, name: str, version: str) -> bool:
        caller = self._callers.authenticate_reader(call)
        await self._wait_for_routes(call, caller, name)
        route = self._route(caller, name, version)
        return self._router.has_ready_replica(route, self._clock.now())

    async def model_metadata(self, call: InboundCall, name: str, version: str) -> oip.ModelMetadataResponse:
        caller = self._callers.authenticate_reader(call)
        call = await self._wait_for_routes(call, caller, name)
        route = self._route(caller, name, version)
        left = METADATA_TIMEOUT_S if call.remaining_s is None else min(call.remaining_s, METADATA_TIMEOUT_S)
        if left <= 0.0:  # of a `generate` too, whose request begins only after this
            with self._outcomes.recording(self._requests.name_of(call)):
                raise ShoalError(DEADLINE_REFUSAL)
        context = CallContext(
            *(caller.tenant, caller.origin, self._requests.name_of(call), Seconds(left), caller.agreement),
            workload=route.workload.name,
            payer=caller.payer,
        )
        route = await self._dispatcher.wakes.wait(route, caller, Elapsed(self._clock.now() + left))
        tried: frozenset[str] = frozenset()
        failure: ShoalError | None = None
        while isinstance(picked := self._choose(route, tried, self._requests.next_number()), Endpoint):
            try:
                if picked.kind is EndpointKind.LOCAL:
                    said = await self._workers.metadata(picked.assignment, context)
                    hide_state(said, self._sessions.session_of(picked.assignment))
                else:
                    said = await self._peers.metadata(picked, name, context)
            except AttemptFailed as error:
                tried, failure = tried | {picked.assignment}, error
                continue
            return model_messages.metadata_as_served(name, said)
        raise failure or ShoalError(picked)

    async def model_config(self, call: InboundCall, name: str, version: str) -> oip.ModelConfigResponse:
        return model_messages.config_of(name, await self.model_metadata(call, name, version))

    async def statistics(self, call: InboundCall, name: str, version: str) -> oip.ModelStatisticsResponse:
        """Statistics of the requests that entered the region here, as in all counters by workload."""
        caller = self._callers.authenticate_reader(call)
        if name:
            await self._wait_for_routes(call, caller, name)
            keys = [self._route(caller, name, version).workload]
        else:
            routed = self._router.tables.entering
            keys = sorted(key for key in routed if key.tenant == caller.tenant and not caller.agreement)
        zero = self._clock.wall() - self._clock.now()
        return model_messages.statistics_of({key: self._meter.totals(key) for key in keys}, zero)

    def prepare_direct(
        self, call: InboundCall, remaining_s: float | None, memo: dict[str, object], request: bytes
    ) -> DirectRequest | None:
        known = memo.get(_DIRECT)
        if not isinstance(known, DirectMemo):
            known = memo[_DIRECT] = DirectMemo()
        return self._direct.prepare(call, remaining_s, known, request)

    def shared_memory_status(self, call: InboundCall, name: str) -> oip.SystemSharedMemoryStatusResponse:
        caller = self._authenticate(call)
        with self._outcomes.recording(self._requests.name_of(call)):
            return self._shared_memory.status(caller, name)

    def register_shared_memory(self, call: InboundCall, asked: oip.SystemSharedMemoryRegisterRequest) -> None:
        caller = self._authenticate(call)
        with self._outcomes.recording(self._requests.name_of(call)):
            self._shared_memory.register(caller, asked)

    def unregister_shared_memory(self, call: InboundCall, name: str) -> None:
        caller = self._authenticate(call)
        with self._outcomes.recording(self._requests.name_of(call)):
            self._shared_memory.unregister(caller, name)

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        caller = self._authenticate(call)
        if caller.hop:  # it was charged where it entered
            return await self._infer(call, caller, request)
        gate = self._tenants.enter(caller.tenant)
        if gate is None:
            return await self._infer(call, caller, request)
        began = self._clock.now()
        try:
            return await self._infer(call, caller, request)
        finally:
            gate.leave(Seconds(self._clock.now() - began))

    def _authenticate(self, call: InboundCall) -> Caller:
        try:
            return self._callers.authenticate(call)
        except ShoalError as error:
            self._outcomes.record_refused_call(self._requests.name_of(call), error)
            raise

    async def _infer(
        self, call: InboundCall, caller: Caller, request: bytes, shared: SharedTensors | None = None
    ) -> bytes:
        """`shared`: where outputs go, if the request came with references to shared memory; it holds bytes now."""
        try:
            asked = reading.parse_request(request)
            self._callers.consume_forward(call, caller)
            call = await self._wait_for_routes(call, caller, asked.model, asked.timeout_s)
            route = self._route(caller, asked.model, asked.version)
            if route.stateful and not asked.session:
                raise _no_sequence()
        except ShoalError as error:
            self._outcomes.record_refused_call(self._requests.name_of(call), error)
            raise
        if asked.uses_shared_memory:
            return await self._infer_shared(call, caller, request, asked.timeout_s)
        flight = self._requests.make(call, caller, asked, route, request)
        if caller.is_ingress:
            self._meter.record_entry(flight.key, caller.origin)
        code: Code | None = Code.CANCELLED
        logged = bind_contextvars(trace_id=flight.trace.id) if flight.trace is not None else None
        try:
            answer = await self._dispatcher.answer(route, flight)
            if shared is not None:
                answer = await shared.write(answer)
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

    async def _infer_shared(
        self, call: InboundCall, caller: Caller, request: bytes, timeout_s: Seconds | None
    ) -> bytes:
        """As `_infer`, for a request that refers to shared memory, and names `timeout_s`."""
        began, left_s = self._clock.now(), _time_left(call, timeout_s)
        with self._shared_memory.tensors(caller.tenant) as shared:
            with self._outcomes.recording(self._requests.name_of(call)):
                self._shared_memory.check(caller)
                whole = await shared.read(request)
            return await self._infer(self._call_after(call, left_s, began), caller, whole, shared)

    # authentication and routing

    def check_revoked(self, serial: str) -> Refusal | None:
        """Why a certificate of this serial is refused; None if it is not."""
        return self._callers.check_revoked(serial)

    async def _wait_for_routes(
        self, call: InboundCall, caller: Caller, name: str, timeout_s: Seconds | None = None
    ) -> InboundCall:
        """Wait until the front knows whether there is a route for a client's request. The call, with the time that is
        left of its own and of `timeout_s`, which the request names. Raises as `RouteWaits.wait`."""
        key = WorkloadKey(caller.tenant, name)
        if (
            caller.hop
            or caller.agreement
            or self._router.tables.find(key, RequestEntry.CLIENT) is not None
            or not self._callers.may_enter(caller.tenant)
        ):
            return call
        began, left_s = self._clock.now(), _time_left(call, timeout_s)
        await self._route_waits.wait(key, Seconds(self._settings.timeout_s) if left_s is None else left_s)
        return self._call_after(call, left_s, began)

    def _call_after(self, call: InboundCall, left_s: Seconds | None, began: Elapsed) -> InboundCall:
        """The call, with what is left now of `left_s`, which it had at `began`."""
        if left_s is None:
            return call
        return replace(call, remaining_s=Seconds(max(0.0, left_s - (self._clock.now() - began))))

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
            route = self._router.tables.find(key, RequestEntry.GUEST if caller.region else RequestEntry.FORWARD)
            if route is None and self._sessions.replicas(key):
                return Route(key, 0, (), stateful=True)  # their steps wait for a worker
            if route is None:
                raise refuse(Code.MODEL_NOT_READY, f"{key} has no worker here", "a ready replica", "retry elsewhere")
            return route
        route = self._router.tables.find(key, RequestEntry.CLIENT)
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

    def _choose(self, route: Route, tried: frozenset[str], seed: int) -> Endpoint | Refusal:
        return self._router.choose(route, tried, "", self._clock.now(), seed)

    def _unavailable_reason(self, route: Route) -> str:
        picked = self._choose(route, frozenset(), 0)
        return str(picked) if isinstance(picked, Refusal) else "no replica answers; they are tried again"

    def _is_serving(self) -> bool:
        return self._configured and not self._draining


_FINAL: Final = oip.ModelInferResponse(
    parameters={"triton_final_response": oip.InferParameter(bool_param=True)}
).SerializeToString()
"""Appended to a serialized answer, it adds this parameter: fields of a message may come in any order."""


def _time_left(call: InboundCall, timeout_s: Seconds | None) -> Seconds | None:
    """The least of the call's time and of `timeout_s`, which its request names; None: it sets no limit."""
    return min((left for left in (call.remaining_s, timeout_s) if left is not None), default=None)


def _no_sequence() -> ShoalError:
    return refuse(
        Code.SESSION_INVALID,
        "a request without a sequence",
        "sequence_id, and sequence_start with the first step",
        "name the session of each request: the workload keeps state between them",
    )
