"""What the front does with a call: who asks, what for, where to, and again elsewhere when that fails.

`DataPlane` is the `Service` behind every transport. Decisions are `core.routing`'s; the ways to replicas `forward`'s.
"""

import asyncio
import hashlib
import itertools
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import structlog
from structlog.contextvars import bind_contextvars, reset_contextvars

from shoal.agent.core import routing
from shoal.agent.core.routing import WELL, Condemned, Fault, Health, Limits, Load, Next, Suspects, Tries
from shoal.agent.core.sequences import Key, Step
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.auth import INFER_ROLES, READ_ROLES, Caller, Credentials, by_digest, caller_of, refused
from shoal.agent.dataplane.forward import AttemptFailed, Errand, Peers, Workers
from shoal.agent.dataplane.metering import Meter
from shoal.agent.dataplane.pins import Pins, Search, at_home
from shoal.agent.dataplane.sessions import Sessions, digest
from shoal.agent.dataplane.state import hide
from shoal.agent.dataplane.tracing import Trace, Tracer
from shoal.agent.dataplane.transport import MAX_MESSAGE, Call, Refused
from shoal.agent.dataplane.witness import Captures
from shoal.agent.ports import Clock, FrontStats, Keeper, LocalWorker
from shoal.inference import open_inference_pb2 as oip
from shoal.types.agreement import GUESTS, home_side
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

VERSION: Final = "1"
"""A workload shows one version to clients, whichever revision serves it."""
METADATA_TIMEOUT_S: Final = Seconds(10.0)
MAX_LOGGED_REFUSALS: Final = 20
"""Refused requests logged a second; more are only counted."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """origin: the name under which requests that enter here are counted. timeouts: without a deadline, and at most."""

    region: str
    origin: str
    timeout_s: float = 60.0
    max_timeout_s: float = 300.0
    limits: Limits = field(default_factory=Limits)


@dataclass(eq=False)
class _Flight:
    """One request inside. crowd: what was in flight at its replica when that crashed, itself included. suspicion: what
    was known of it at that moment, before the crowd's own crash was. step: where its workload has state. trace: None of
    nearly all."""

    key: WorkloadKey
    caller: Caller
    id: str
    session: str
    request: bytes
    arrived: Elapsed
    expires: Elapsed
    step: Step | None = None
    trace: Trace | None = None
    attempts: int = 0
    crowd: tuple["_Flight", ...] = ()
    suspicion: frozenset[bytes] | None = None

    @property
    def payer(self) -> str:
        """Whose share of the front it takes: one region's guests do not stand before another's."""
        tenant = self.key.tenant
        return f"{tenant}/{self.caller.origin}" if tenant == GUESTS else tenant

    @cached_property
    def digest(self) -> bytes:
        """Of what the model sees: who sends the same again under another id sends the same."""
        message = oip.ModelInferRequest.FromString(self.request)
        message.id = ""
        content = f"{self.key}\0".encode() + message.SerializeToString(deterministic=True)
        return hashlib.sha256(content).digest()

    def others(self) -> frozenset[bytes]:
        return frozenset(flight.digest for flight in self.crowd if flight is not self)


class DataPlane:
    """Answers the Open Inference Protocol along routes. Everything runs on one event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        workers: Workers,
        peers: Peers,
        dates_at: Callable[[], Wall] | None = None,
        captures: Captures | None = None,
        sessions: Sessions | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """dates_at: the moment at which who calls must be valid; by default now. captures: what keeps requests that
        workers here answered, where that is consented to. sessions: that this front has; by default none. tracer: by
        default one that traces what operators ask for, and tells nobody."""
        self._dates_at = dates_at or clock.wall
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._captures = captures or Captures()
        self._sessions = sessions or Sessions(settings.region, settings.origin, clock, workers, peers, self._dates_at)
        self._tracer = tracer or Tracer(settings.region, settings.origin, clock)
        self._pins = Pins()
        self._meter = Meter()
        self._routes: Mapping[WorkloadKey, Route] = {}
        self._forwarded: Mapping[WorkloadKey, Route] = {}
        """What a request may still meet that another front of the region sent here."""
        self._agreements: Mapping[WorkloadKey, str] = {}
        """Of workloads that another region serves, beside this one or alone."""
        self._guests: Mapping[WorkloadKey, Route] = {}
        """What a request of another region may meet."""
        self._peers_of: Mapping[str, PeerTrust] = {}
        self._credentials: Credentials = {}
        self._revoked: frozenset[str] = frozenset()
        self._known: dict[str, LocalWorker] = {}
        self._health: dict[str, Health] = {}
        self._at: defaultdict[str, set[_Flight]] = defaultdict(set)
        self._condemned = Condemned()
        self._suspects = Suspects()
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of suspects, by replica: two of them there, and another crash would not tell who is to blame."""
        self._inside: Counter[WorkloadKey] = Counter()
        self._of_payer: Counter[str] = Counter()
        self._bytes = 0
        self._ids = itertools.count(1)
        self._run = secrets.token_hex(4)
        self._logged: tuple[int, int] = (0, 0)
        self._configured = False
        self._draining = False

    @property
    def meter(self) -> Meter:
        return self._meter

    @property
    def in_flight(self) -> int:
        return self._inside.total()

    @property
    def ejected(self) -> int:
        now = self._clock.now()
        return sum(each.ejected_until is not None and now < each.ejected_until for each in self._health.values())

    def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...],
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        keepers: tuple[Keeper, ...] = (),
    ) -> None:
        """The whole truth, each time. A worker that was started anew is judged anew."""
        self._peers_of = {peer.region: peer for peer in peers}
        self._routes = {route.workload: route for route in routes}
        self._credentials = by_digest(credentials)
        self._revoked = frozenset(revoked)
        for worker in workers:
            if self._known.get(worker.assignment) not in (None, worker) and worker.assignment in self._health:
                self._health[worker.assignment] = Health(outstanding=self._health[worker.assignment].outstanding)
        self._known = {worker.assignment: worker for worker in workers}
        self._forwarded = _forwarded(routes, workers)
        self._guests = _inside(routes)
        self._workers.configure(workers)
        listed = frozenset(endpoint.assignment for route in routes for endpoint in route.endpoints)
        self._sessions.configure(keepers, workers, revoked, listed)
        self._peers.configure(endpoint for route in routes for endpoint in route.endpoints)
        self._agreements = {
            route.workload: endpoint.agreement for route in routes for endpoint in route.endpoints if endpoint.region
        }
        out = {name for agreement in self._agreements.values() for name in (agreement, home_side(agreement))}
        self._meter.forget(out | {agreement for peer in peers for agreement in peer.agreements})
        named = listed | self._known.keys()
        self._health = {
            name: health for name, health in self._health.items() if name in named or health.outstanding > 0
        }
        self._configured = True

    def drain(self) -> None:
        """From now on not ready, so that whoever balances over fronts looks elsewhere; calls are still answered."""
        self._draining = True

    def stats(self) -> FrontStats:
        flights = tuple((name, self._health.get(name, WELL).outstanding) for name in self._known)
        return FrontStats(
            self._ready(), self._meter.ingress(), flights, self._meter.crossings(), self._sessions.counts()
        )

    # the service

    def live(self) -> bool:
        return True

    def admit(self, call: Call) -> None:
        self._caller(call)

    def server_ready(self, call: Call) -> bool:
        self._reader(call)
        return self._ready()

    def server_metadata(self, call: Call) -> oip.ServerMetadataResponse:
        self._reader(call)
        return oip.ServerMetadataResponse(
            name="shoal", version="2", extensions=["binary_tensor_data", "model_repository", "parameters", "sequence"]
        )

    def index(self, call: Call, *, ready_only: bool) -> oip.RepositoryIndexResponse:
        caller = self._reader(call)
        found = oip.RepositoryIndexResponse()
        for key, route in sorted(self._routes.items()):
            if key.tenant != caller.tenant or (caller.agreement and key.name != caller.agreement):
                continue
            ready = self._has_replica(route)
            if ready:
                found.models.add(name=key.name, version=VERSION, state="READY")
            elif not ready_only:
                reason = self._why_not(route)
                found.models.add(name=key.name, version=VERSION, state="UNAVAILABLE", reason=reason)
        return found

    def model_ready(self, call: Call, name: str, version: str) -> bool:
        return self._has_replica(self._route(self._reader(call), name, version))

    async def model_metadata(self, call: Call, name: str, version: str) -> oip.ModelMetadataResponse:
        caller = self._reader(call)
        route = self._route(caller, name, version)
        left = METADATA_TIMEOUT_S if call.left_s is None else min(call.left_s, METADATA_TIMEOUT_S)
        errand = Errand(caller.tenant, caller.origin, self._name(call), Seconds(left), caller.agreement)
        tried: frozenset[str] = frozenset()
        failure: ShoalError | None = None
        while isinstance(picked := self._choose(route, tried, "", next(self._ids)), Endpoint):
            try:
                if picked.kind is EndpointKind.LOCAL:
                    said = await self._workers.metadata(picked.assignment, errand)
                    hide(said, self._sessions.session_of(picked.assignment))
                else:
                    said = await self._peers.metadata(picked, name, errand)
            except AttemptFailed as error:
                tried, failure = tried | {picked.assignment}, error
                continue
            said.name = name
            said.versions[:] = [VERSION]
            said.platform = "onnx_onnxv1"
            return said
        raise failure or ShoalError(picked)

    async def infer(self, call: Call, request: bytes) -> bytes:
        try:
            caller = self._caller(call)
            asked = reading.read(request)
            route = self._route(caller, asked.model, asked.version)
            if route.stateful and not asked.session:
                raise _no_sequence()
        except ShoalError as error:
            self._meter.codes[error.code] += 1
            self._log_refusal(self._name(call), "", error)
            raise
        flight = self._flight(call, caller, asked, route, request)
        if caller.enters:
            self._meter.entered(flight.key, caller.origin)
        code: Code | None = Code.CANCELLED
        logged = bind_contextvars(trace_id=flight.trace.id) if flight.trace is not None else None
        try:
            with self._inside_for(route, flight):
                answer = await self._answer(route, flight)
            code = None
            return answer
        except ShoalError as error:
            code = error.code
            self._log_refusal(flight.id, str(flight.key), error)
            raise
        finally:
            self._note(flight, code)
            if logged is not None:
                reset_contextvars(**logged)

    # one request

    def _note(self, flight: _Flight, code: Code | None) -> None:
        """code: of the refusal it ended with, None when it was answered."""
        if code is not None:
            self._meter.codes[code] += 1
        caller = flight.caller
        if flight.trace is not None:
            flight.trace.end(caller, str(flight.key), flight.id, flight.attempts, code)
        if not caller.enters:
            return
        seconds = Seconds(self._clock.now() - flight.arrived)
        if code is not None:
            self._meter.ended(flight.key, caller.origin, flight.attempts, code)
        else:
            self._meter.answered(flight.key, caller.origin, flight.attempts, seconds)
        if caller.region:
            self._meter.crossed(caller.agreement, caller.region, routing.fault_of(code) if code else seconds)

    async def _answer(self, route: Route, flight: _Flight) -> bytes:
        """Raises ShoalError: the last attempt's, once no other is left to make."""
        if flight.step is not None:
            return await self._answer_step(route, flight, flight.step)
        tries = Tries()
        failure: AttemptFailed | None = None
        seed = next(self._ids)
        while True:
            picked = self._pick(route, tries.tried, flight.session, seed)
            if isinstance(picked, Refusal):
                raise failure or Refused(picked, Seconds(1.0))
            if flight.expires <= self._clock.now():
                raise failure or _late()
            flight.attempts += 1
            try:
                return await self._attempt_apart(picked, flight, flight.request)
            except AttemptFailed as error:
                failure = error
                fault = routing.fault_of(error.code)
                tries = replace(tries, crashed_with=flight.suspicion)
                match routing.judge(fault, tries, idempotent=not flight.session, sent=error.sent):
                    case Next.DELIVER:
                        raise
                    case Next.CONDEMN:
                        raise self._condemn(flight, tries) from error
                    case Next.RETRY:
                        tries = replace(tries, tried=tries.tried | {picked.assignment})

    async def _answer_step(self, route: Route, flight: _Flight, step: Step) -> bytes:
        """At the replica that has the session, wherever it went. Raises ShoalError, soon after no place is left."""
        key = Key(flight.key, flight.session)
        if flight.caller.hop:  # who sent it knows where else to ask
            at = at_home(self._sessions.where(key), self._first_of(route, key))
            return await self._step_at(at, key, step, flight)
        search = Search(self._pins, key, step, self._clock.now())
        while True:
            picked = search.place(route, self._sessions.where(key), self._first_of(route, key, search.tried))
            if isinstance(picked, Refusal):
                raise search.failure or Refused(picked, Seconds(1.0))
            if flight.expires <= self._clock.now():
                raise search.failure or _late()
            flight.attempts += 1
            try:
                answer = await self._step_at(picked, key, step, flight)
            except ShoalError as error:
                wait_s = search.failed(error, picked, self._route_now(route), self._clock.now())
                await asyncio.sleep(min(wait_s, max(0.0, flight.expires - self._clock.now())))
                route = self._route_now(route)
            else:
                search.answered(picked)
                return answer

    async def _step_at(self, picked: Endpoint, key: Key, step: Step, flight: _Flight) -> bytes:
        if picked.kind is not EndpointKind.LOCAL:
            left = Seconds(flight.expires - self._clock.now())
            return await self._attempt(picked, flight, left, flight.request)

        async def run(assignment: str, request: bytes) -> bytes:
            try:
                return await self._attempt_apart(replace(picked, assignment=assignment), flight, request)
            except AttemptFailed as error:
                if routing.fault_of(error.code) is Fault.CRASH and flight.suspicion is not None:
                    raise self._condemn(flight, Tries(crashed_with=flight.suspicion)) from error
                raise

        return await self._sessions.step(key, step, flight.request, picked.assignment, flight.expires, run)

    def _first_of(self, route: Route, key: Key, tried: frozenset[str] = frozenset()) -> Endpoint | Refusal:
        """Where a new session begins: the same at every front that knows the same route."""
        return self._choose(route, tried, key.sequence, 0)

    def _route_now(self, route: Route) -> Route:
        return self._routes.get(route.workload, route)

    def _suspicion(self, flight: _Flight) -> frozenset[bytes] | None:
        """What was in flight with the same request when it met a crash before, in this try or another; None if not."""
        return self._suspects.crashed_with(flight.digest, self._clock.now()) if self._suspects else None

    def _condemn(self, flight: _Flight, tries: Tries) -> ShoalError:
        """After its second crash. tries: before it."""
        if routing.blamed(tries, flight.others()):
            self._condemned.add(flight.digest, self._clock.now())
        return ShoalError(_CRASHES)

    async def _attempt_apart(self, endpoint: Endpoint, flight: _Flight, request: bytes) -> bytes:
        """As `_attempt`, apart from other suspects if it met a crash before; one that meets its first is one from now
        on. Raises AttemptFailed, ShoalError(DEADLINE_EXCEEDED)."""
        try:
            if self._suspicion(flight) is None:
                left = Seconds(flight.expires - self._clock.now())
                answer = await self._attempt(endpoint, flight, left, request)
            else:
                answer = await self._attempt_alone(endpoint, flight, request)
        except AttemptFailed as error:
            if routing.fault_of(error.code) is Fault.CRASH and flight.suspicion is None:
                self._suspects.add(flight.digest, flight.others(), self._clock.now())
            raise
        if self._suspects:
            self._suspects.answered(flight.digest)
        return answer

    async def _attempt_alone(self, endpoint: Endpoint, flight: _Flight, request: bytes) -> bytes:
        """As `_attempt`, with no other suspect there. Raises AttemptFailed, ShoalError(DEADLINE_EXCEEDED)."""
        alone = self._alone[endpoint.assignment]
        try:
            async with asyncio.timeout(flight.expires - self._clock.now()):
                await alone.acquire()
        except TimeoutError as error:
            raise _late() from error
        try:
            return await self._attempt(endpoint, flight, Seconds(flight.expires - self._clock.now()), request)
        finally:
            alone.release()
            if not self._suspects:
                self._alone.clear()

    async def _attempt(self, endpoint: Endpoint, flight: _Flight, left: Seconds, request: bytes) -> bytes:
        """One replica, once. request: what it is asked, with its state if it has one. Raises AttemptFailed; what
        happened is noted in the replica's health."""
        name = endpoint.assignment
        before = self._health.get(name, WELL)
        self._health[name] = routing.sent(before)
        self._at[name].add(flight)
        flight.crowd, flight.suspicion = (), None
        token = flight.step.token if flight.step is not None else ""
        attempt = flight.trace.attempt(endpoint) if flight.trace is not None else None
        errand = Errand(
            flight.key.tenant, flight.caller.origin, flight.id, left, flight.caller.agreement, token, attempt
        )
        code: Code | None = Code.CANCELLED
        outcome: Fault | Seconds = Fault.REQUEST
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
            code = error.code
            outcome = fault = routing.fault_of(code)
            if fault is Fault.CRASH and not flight.crowd:
                crowd = tuple(self._at[name])
                for each in crowd:
                    each.crowd, each.suspicion = crowd, self._suspicion(each)
            self._health[name] = routing.failed(self._health[name], name, fault, self._clock.now())
            raise
        except BaseException:
            self._health[name] = routing.withdrawn(self._health[name])
            raise
        finally:
            self._at[name].discard(flight)
            if not self._at[name]:
                del self._at[name]
            if attempt is not None:
                attempt.end(code)
            if endpoint.region:
                self._meter.crossed(endpoint.agreement, endpoint.region, outcome)
            elif flight.key in self._agreements:
                self._meter.crossed(home_side(self._agreements[flight.key]), self._settings.region, outcome)
        road = self._peers.road_s(endpoint)
        self._health[name] = routing.answered(self._health[name], seconds, before.outstanding, now, road)
        if len(answer) > MAX_MESSAGE:
            raise reading.too_large(f"an answer of {len(answer)} bytes", MAX_MESSAGE)
        return answer

    @contextmanager
    def _inside_for(self, route: Route, flight: _Flight) -> Iterator[None]:
        """Room for one request while it is inside. Raises Refused when it is turned away."""
        self._turn_away(route, flight)
        size = len(flight.request)
        self._inside[flight.key] += 1
        self._of_payer[flight.payer] += 1
        self._bytes += size
        try:
            yield
        finally:
            self._inside[flight.key] -= 1
            self._of_payer[flight.payer] -= 1
            self._bytes -= size

    def _turn_away(self, route: Route, flight: _Flight) -> None:
        if self._condemned:
            left = self._condemned.left_s(flight.digest, flight.arrived)
            if left is not None:
                raise Refused(_CRASHES, left)
        here: AbstractSet[str] = self._known.keys()
        if flight.step is not None and not flight.step.start:
            if flight.caller.hop:
                return  # judged where it entered; here it waits for its turn
            here = here | self._sessions.replicas(flight.key)
            route = replace(route, endpoints=tuple(replace(each, weight=1.0) for each in route.endpoints))
        load = Load(self._inside[flight.key], self._of_payer[flight.payer], Bytes(self._bytes))
        turned = routing.admit(
            route,
            self._health,
            here,
            load,
            Seconds(flight.expires - flight.arrived),
            Bytes(len(flight.request)),
            self._settings.limits,
            flight.arrived,
        )
        if turned is not None:
            raise Refused(turned.refusal, turned.retry_after_s)

    def _flight(self, call: Call, caller: Caller, asked: reading.Asked, route: Route, request: bytes) -> _Flight:
        now = self._clock.now()
        wishes = [left for left in (call.left_s, asked.timeout_s) if left is not None]
        left = min(*wishes, self._settings.max_timeout_s) if wishes else self._settings.timeout_s
        name = self._name(call) if caller.hop else asked.id[:128] or self._name(call)
        step = self._step(call, caller, asked, request) if route.stateful and asked.session else None
        trace = self._tracer.begin(caller, call.trace)
        return _Flight(route.workload, caller, name, asked.session, request, now, Elapsed(now + left), step, trace)

    def _step(self, call: Call, caller: Caller, asked: reading.Asked, request: bytes) -> Step:
        """Its token names this very call, at every front that it comes to."""
        own = f"{self._settings.origin}-{self._run}-{next(self._ids):x}"
        token = call.step if caller.hop and call.step else own
        return Step(token, digest(request), asked.start, asked.end, asked.step)

    # who and where

    def revoked(self, serial: str) -> Refusal | None:
        """Why a certificate of this serial is refused, if it is."""
        return refused(serial, self._revoked)

    def _caller(self, call: Call, roles: frozenset[Role] = INFER_ROLES) -> Caller:
        settings = self._settings
        return caller_of(
            call,
            self._credentials,
            settings.region,
            settings.origin,
            self._dates_at(),
            roles,
            self._revoked,
            self._peers_of,
        )

    def _reader(self, call: Call) -> Caller:
        return self._caller(call, READ_ROLES)

    def _route(self, caller: Caller, name: str, version: str) -> Route:
        """One that was forwarded inside the region meets a worker of this node, or leaves the region here; one of
        another region stays in this one. Raises ShoalError(MODEL_NOT_FOUND | MODEL_NOT_READY)."""
        key = WorkloadKey(caller.tenant, caller.agreement or name)
        if caller.hop:
            route = (self._guests if caller.region else self._forwarded).get(key)
            if route is None and self._sessions.replicas(key):
                return Route(key, 0, (), stateful=True)  # their steps wait for a worker
            if route is None:
                raise refuse(Code.MODEL_NOT_READY, f"{key} has no worker here", "a ready replica", "retry elsewhere")
            return route
        route = self._routes.get(key)
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
        """As `_choose`; but who has no session does not wait for a way to open, which takes several round trips, while
        another replica's is open. A way that is met so begins to open."""
        first = picked = self._choose(route, tried, session, seed)
        opening = frozenset[str]()
        while not session and isinstance(picked, Endpoint) and self._peers.is_opening(picked):
            if picked.assignment in opening:
                return first  # all that are left
            opening |= {picked.assignment}
            picked = self._choose(route, tried, session, seed, opening)
        return picked

    def _choose(
        self, route: Route, tried: frozenset[str], session: str, seed: int, opening: frozenset[str] = frozenset()
    ) -> Endpoint | Refusal:
        now = self._clock.now()
        return routing.choose(route, self._health, self._known.keys(), tried, session, now, seed, opening)

    def _has_replica(self, route: Route) -> bool:
        return routing.ready(route, self._health, self._known.keys(), self._clock.now())

    def _why_not(self, route: Route) -> str:
        picked = self._choose(route, frozenset(), "", 0)
        return str(picked) if isinstance(picked, Refusal) else "no replica answers; they are tried again"

    def _ready(self) -> bool:
        return self._configured and not self._draining

    def _name(self, call: Call) -> str:
        return call.request_id[:128] or f"{self._settings.origin}-{self._run}-{next(self._ids):x}"

    def _log_refusal(self, request: str, workload: str, error: ShoalError) -> None:
        second = int(self._clock.now())
        count = self._logged[1] + 1 if self._logged[0] == second else 1
        self._logged = (second, count)
        if count <= MAX_LOGGED_REFUSALS:
            refusal = error.refusal
            _log.info("refused", request=request, workload=workload, code=refusal.code, found=refusal.found)


_CRASHES: Final = Refusal(
    Code.REQUEST_CRASHED_WORKER,
    "two workers ended, or could not end a run, while they had this request",
    "a request that its model survives",
    "change the input; the same bytes are refused for a while",
)


def _no_sequence() -> ShoalError:
    return refuse(
        Code.SESSION_INVALID,
        "a request without a sequence",
        "sequence_id, and sequence_start with the first step",
        "name the session of each request: the workload keeps state between them",
    )


def _late() -> ShoalError:
    return refuse(Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more")


def _forwarded(routes: tuple[Route, ...], workers: tuple[LocalWorker, ...]) -> dict[WorkloadKey, Route]:
    """To this node's workers, and to other regions, whatever share of the workload these take now: who sent the request
    has looked at that. What this one runs for another goes to no third."""
    listed = {route.workload: route.endpoints for route in routes}
    found: defaultdict[WorkloadKey, list[Endpoint]] = defaultdict(list)
    for key in {worker.workload for worker in workers}:
        own = [worker.assignment for worker in workers if worker.workload == key]
        found[key] += routing.arrived(listed.get(key, ()), own)
    for route in routes:
        if route.workload.tenant != GUESTS:
            found[route.workload] += [replace(each, weight=1.0) for each in route.endpoints if each.region]
    stateful = {route.workload for route in routes if route.stateful}
    return {
        key: Route(key, 0, tuple(endpoints), stateful=key in stateful) for key, endpoints in found.items() if endpoints
    }


def _inside(routes: tuple[Route, ...]) -> dict[WorkloadKey, Route]:
    """What is run here for other regions, as far as it is here."""
    return {
        route.workload: replace(
            route, endpoints=tuple(each for each in route.endpoints if each.kind is not EndpointKind.GATEWAY)
        )
        for route in routes
        if route.workload.tenant == GUESTS
    }
