"""The common request, answered without a task: its replica is here or at another front of the region. It comes from a
client, or from another front. It waits for nothing but its turn between tenants.

What it counts and records is the same as everywhere. Whatever is not so (a session, a trace, a suspect, a limit that is
reached, a caller who is refused) is left to `DataPlane.infer`, and so is what comes after a failed attempt.
`GrpcMethods` asks for it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shoal.agent.core.fair_queue import WaitingRequest
from shoal.agent.core.request_attempts import DEADLINE_REFUSAL
from shoal.agent.core.request_router import BegunAttempt
from shoal.agent.core.route_tables import RequestEntry
from shoal.agent.core.tenant_limits import TenantGate
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.dispatcher import RequestDispatcher
from shoal.agent.dataplane.in_flight import InFlightRequest, RequestFactory
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.outcomes import RequestOutcomes
from shoal.agent.dataplane.tenant_admission import TenantAdmission
from shoal.agent.dataplane.transport import MAX_MESSAGE, InboundCall
from shoal.agent.dataplane.upstream import CallContext, OpenReplica, PeerClients, WorkerClients, failed_attempt
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.frames import InferAnswer
from shoal.agent.ports import AgentClock
from shoal.http2.grpc_messages import MessageBytes
from shoal.types.codes import Code, ShoalError
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

CALLER_CHECK_S: Final = Seconds(0.25)
"""A caller's certificate or token that expires counts for this long after; one that is revoked counts no more at once.
Clocks of fronts are as old (`clock.FollowerClock`)."""
_KEPT_HEADS: Final = 16
"""Requests by length that are remembered for callers with the same headers on one connection."""
_KEPT_CALLERS: Final = 4096
"""Callers that are remembered so, as many as `CallerAuth` knows again."""
_KEPT_TARGETS: Final = 64
"""Models that are remembered so."""

OnEnd = Callable[[MessageBytes | None, Exception | None], None]
"""Takes the answer, or why there is none."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What requests of one length say that begin with the same bytes."""

    # As `request.constant_part`.
    constant: bytes
    # Name of the workload.
    model: str
    # The client's request id; empty without one.
    id: str


@dataclass(slots=True)
class _CheckedCaller:
    """Who asks, found by the same credentials on any number of connections."""

    caller: Caller
    # Until when its credentials count without another look, elapsed clock. A look that finds them valid moves it.
    valid_until: Elapsed


@dataclass(slots=True)
class _Target:
    """Where one caller's requests for one workload go."""

    # Of the configuration that it was made under.
    version: int
    # Who asks, and until when that is known.
    checked: _CheckedCaller
    # Of the workload.
    route: Route
    # The route's only replica; None where there is a choice.
    endpoint: Endpoint | None


@dataclass(slots=True)
class DirectMemo:
    """What is remembered of the calls of one connection with equal headers."""

    heads: dict[int, _Head] = field(default_factory=dict)
    """By the request's length."""
    targets: dict[str, _Target] = field(default_factory=dict)
    """By name of the workload."""


class DirectRequests:
    """The direct requests of one front."""

    def __init__(
        self,
        clock: AgentClock,
        callers: CallerAuth,
        tenants: TenantAdmission,
        requests: RequestFactory,
        dispatcher: RequestDispatcher,
        workers: WorkerClients,
        peers: PeerClients,
        captures: RequestCaptures,
        meter: RequestMeter,
        outcomes: RequestOutcomes,
    ) -> None:
        self.clock = clock
        self.dispatcher = dispatcher
        self.router = dispatcher.router
        self.workers = workers
        self.captures = captures
        self.meter = meter
        self.outcomes = outcomes
        self.callers = callers
        self._peers = peers
        self._tenants = tenants
        self._requests = requests
        self._version = 0
        self._checked: dict[int, _CheckedCaller] = {}
        """By address of the caller, which it keeps alive."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests whose first attempt failed."""

    def configure(self) -> None:
        """The configuration changed: whatever is remembered is found anew."""
        self._version += 1
        self._checked.clear()

    def prepare(
        self, call: InboundCall, remaining_s: float | None, memo: DirectMemo, request: bytes
    ) -> "DirectRequest | None":
        """The request, if it may be sent directly; nothing is counted yet. `remaining_s`: until its caller's
        deadline."""
        head = memo.heads.get(len(request))
        if head is None or not request.startswith(head.constant):
            head = self._read_head(memo, request)
            if head is None:
                return None
        now = self.clock.now()
        target = memo.targets.get(head.model)
        if target is None or target.version != self._version or not self._is_valid(target, call, now):
            target = self._find_target(call, head.model, memo, now)
            if target is None:
                return None
        route, caller = target.route, target.checked.caller
        if self._requests.may_trace(caller, call):
            return None
        if caller.hop and not self.callers.may_forward(call, caller.name, route.workload):
            return None
        flight = self._requests.make_plain(call, caller, head.id, route, request, now, remaining_s)
        endpoint = self._endpoint_of(target, flight)
        at = None if endpoint is None else self._connection_to(endpoint, flight)
        if endpoint is None or at is None:
            return None
        gate = None if caller.hop else self._tenants.gate(caller.tenant)  # a forward was charged where it entered
        if gate is not None and not gate.is_open(now):
            return None
        return DirectRequest(self, call, flight, target, endpoint, at, gate)

    def _is_valid(self, target: _Target, call: InboundCall, now: Elapsed) -> bool:
        """Whether its caller still counts. It is looked at for all of its connections together: of many with few
        requests each, it would be for each request."""
        checked = target.checked
        if now < checked.valid_until:
            return True
        if self.callers.find_caller(call) is not checked.caller:
            return False
        checked.valid_until = Elapsed(now + CALLER_CHECK_S)
        return True

    def _check(self, caller: Caller, now: Elapsed) -> _CheckedCaller:
        """Of a caller that was found valid now."""
        until = Elapsed(now + CALLER_CHECK_S)
        checked = self._checked.get(id(caller))
        if checked is not None:
            checked.valid_until = until
            return checked
        checked = _CheckedCaller(caller, until)
        if not caller.hop:  # each forward is found anew
            if len(self._checked) >= _KEPT_CALLERS:
                self._checked.clear()
            self._checked[id(caller)] = checked
        return checked

    def _endpoint_of(self, target: _Target, flight: InFlightRequest) -> Endpoint | None:
        """Where the request would go now; None: it is to be refused, or only a task can tell."""
        left = Seconds(flight.expires_at - flight.arrived_at)
        if left <= 0:
            return None
        if target.endpoint is None:
            return self.router.choose_at_once(flight, target.route, self._requests.next_number())
        return target.endpoint if self.router.takes_at_once(flight, target.endpoint, left) else None

    def choose_in_turn(
        self, flight: InFlightRequest, target: _Target, now: Elapsed
    ) -> tuple[Endpoint, OpenReplica] | None:
        """Where a request goes that waited for its turn; None: not as directly as it seemed when it came."""
        if target.version != self._version:
            return None
        number = self._requests.next_number()
        endpoint = self.router.choose_in_turn(flight, target.route, target.endpoint, now, number)
        at = None if endpoint is None else self._connection_to(endpoint, flight)
        return None if endpoint is None or at is None else (endpoint, at)

    def _connection_to(self, endpoint: Endpoint, flight: InFlightRequest) -> OpenReplica | None:
        """None where there is none yet, or the request would have to wait for its payer's turn on it."""
        if endpoint.kind is EndpointKind.LOCAL:
            return self.workers.connection_to(endpoint.assignment)
        return self._peers.connection_to(endpoint, flight.request, flight.payer)

    def _read_head(self, memo: DirectMemo, request: bytes) -> _Head | None:
        """None: the request is refused, or says something that is not usual."""
        try:
            asked = reading.parse_request(request)
        except ShoalError:
            return None
        if asked != reading.InferRequestHead(asked.model, "", asked.id, "", None):
            return None
        constant = reading.constant_part(request)
        head = _Head(constant or b"", asked.model, asked.id)
        if constant is not None:
            if len(memo.heads) >= _KEPT_HEADS:
                memo.heads.clear()
            memo.heads[len(request)] = head
        return head

    def _find_target(self, call: InboundCall, model: str, memo: DirectMemo, now: Elapsed) -> _Target | None:
        """None: the caller, or the model, is to be refused, or the request is not common."""
        caller = self.callers.find_caller(call)
        if caller is None or caller.region or caller.agreement or call.step or call.suspect:
            return None
        entry = RequestEntry.FORWARD if caller.hop else RequestEntry.CLIENT
        route = self.router.tables.find(WorkloadKey(caller.tenant, model), entry)
        if route is None or not self.router.is_common(route):
            return None
        target = _Target(self._version, self._check(caller, now), route, self.router.sole_replica(route))
        if len(memo.targets) >= _KEPT_TARGETS:
            memo.targets.clear()
        memo.targets[model] = target
        return target


class DirectRequest:
    """One request on its way to the replica. It is the `TurnWaiter` of its turn, and the `PendingCall` of its
    connection."""

    __slots__ = (
        "_at",
        "_begun",
        "_call",
        "_endpoint",
        "_flight",
        "_forward",
        "_gate",
        "_has_turn",
        "_is_over",
        "_on_end",
        "_owner",
        "_target",
        "_task",
        "_waiting",
    )

    def __init__(
        self,
        owner: DirectRequests,
        call: InboundCall,
        flight: InFlightRequest,
        target: _Target,
        endpoint: Endpoint,
        at: OpenReplica,
        gate: TenantGate | None,
    ) -> None:
        self._owner = owner
        self._forward = call if flight.caller.hop else None
        """The call, whose proof is accepted once, if another front forwards the request."""
        self._flight = flight
        self._target = target
        self._endpoint = endpoint
        self._at = at
        self._gate = gate
        self._has_turn = False
        self._waiting: WaitingRequest | None = None
        """Its place in the queue while it waits for its turn."""
        self._begun: BegunAttempt | None = None
        self._call: object = None
        self._on_end: OnEnd | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def payer(self) -> str:
        return self._flight.payer

    def begin(self, on_end: OnEnd) -> bool:
        """Send it once it is its turn, and call `on_end` once; False, and nothing is counted, where it is to be
        refused."""
        owner, flight = self._owner, self._flight
        self._has_turn = owner.dispatcher.turns.enter(flight)
        if self._forward is not None and not self._accept_forward(self._forward):
            owner.dispatcher.turns.leave(flight)  # a forward does not wait
            return False
        self._on_end = on_end
        if self._gate is not None:
            self._gate.take()
        if flight.caller.is_ingress:
            owner.meter.record_entry(flight.key, flight.caller.origin)
        owner.router.enter(flight)
        if self._has_turn:
            self._send(flight.arrived_at)
        else:
            self._waiting = owner.dispatcher.turns.begin_wait(flight, self)
        return True

    def _send(self, now: Elapsed) -> None:
        owner, flight = self._owner, self._flight
        flight.attempts = 1
        self._begun = owner.router.begin_attempt(self._endpoint, flight, now)
        left = Seconds(flight.expires_at - now)
        key = flight.key
        context = CallContext(key.tenant, flight.caller.origin, flight.id, left, workload=key.name, payer=flight.payer)
        try:
            self._call = self._at.begin_infer(self, self._endpoint, flight.request, context)
        except ShoalError as error:
            self.set_exception(error)

    def _accept_forward(self, call: InboundCall) -> bool:
        """False: it was accepted before, and is to be refused."""
        try:
            self._owner.callers.consume_forward(call, self._flight.caller)
        except ShoalError:
            return False
        return True

    def cancel(self) -> None:
        """The caller is gone. Idempotent."""
        if self._is_over:
            return
        if self._task is not None:
            self._task.cancel()
            return
        if self._waiting is not None:
            self._owner.dispatcher.turns.end_wait(self._waiting)
        self._at.end_infer(self._call)
        if self._begun is not None:
            self._owner.router.on_withdrawal(self._begun)
        self._end(Code.CANCELLED)

    # TurnWaiter

    def on_turn(self) -> None:
        self._waiting, self._has_turn = None, True
        now = self._owner.clock.now()
        chosen = self._owner.choose_in_turn(self._flight, self._target, now)
        if chosen is None:
            self._go_on_in_task(None)
        else:
            self._endpoint, self._at = chosen
            self._send(now)

    def on_late(self) -> None:
        self._waiting = None
        self._refuse(ShoalError(DEADLINE_REFUSAL))

    # PendingCall

    def done(self) -> bool:
        return self._is_over or self._task is not None

    def set_result(self, answer: InferAnswer, /) -> None:
        owner, flight, begun = self._owner, self._flight, self._begun
        assert begun is not None
        owner.router.on_answer(begun, owner.clock.now(), self._at.rtt_s)
        owner.router.clear_suspicion(flight)
        if self._endpoint.kind is EndpointKind.LOCAL:
            owner.captures.note(self._endpoint.assignment, flight.request)
        size = len(answer.payload)
        if size > MAX_MESSAGE:
            self._refuse(reading.too_large(f"an answer of {size} bytes", MAX_MESSAGE))
        else:
            self._end(None, answer.payload)

    def set_exception(self, exception: ShoalError, /) -> None:
        """The attempt failed: another replica may be tried."""
        self._at.end_infer(self._call)
        self._go_on_in_task(exception)

    def _go_on_in_task(self, cause: ShoalError | None) -> None:
        """`cause`: why the attempt failed; None: there was none yet."""
        task = self._task = asyncio.get_running_loop().create_task(self._go_on(cause))
        self._owner.tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._owner.tasks.discard(task)
        if not self._is_over:  # the task was cancelled before it began
            if self._begun is not None:
                self._owner.router.on_withdrawal(self._begun)
            self._end(Code.CANCELLED)

    async def _go_on(self, cause: ShoalError | None) -> None:
        dispatcher, flight, route, begun = self._owner.dispatcher, self._flight, self._target.route, self._begun
        try:
            if cause is None or begun is None:
                answer = await dispatcher.answer_in_turn(route, flight)
            else:
                answer = await dispatcher.answer_after(failed_attempt(cause), begun, route, flight)
        except ShoalError as error:
            self._refuse(error)
        except asyncio.CancelledError:
            self._end(Code.CANCELLED)
            raise
        except Exception as error:
            self._end(Code.CANCELLED, None, error)
        else:
            self._end(None, answer)

    def _refuse(self, error: ShoalError) -> None:
        self._owner.outcomes.log_refusal(self._flight.id, str(self._flight.key), error)
        self._end(error.code, None, error)

    def _end(self, code: Code | None, answer: MessageBytes | None = None, error: Exception | None = None) -> None:
        owner, flight, on_end = self._owner, self._flight, self._on_end
        self._is_over = True
        self._on_end = None  # it refers to the call, and the call to this
        self._at.after_call()
        owner.router.leave(flight)
        seconds = owner.outcomes.record(flight, code)
        if self._gate is not None:
            self._gate.leave(seconds)
        flight.request = b""  # its caller may read the answer slowly, and this object lives as long
        if on_end is not None and (answer is not None or error is not None):
            on_end(answer, error)
        if self._has_turn:  # last: others go on in it
            owner.dispatcher.turns.leave(flight)
