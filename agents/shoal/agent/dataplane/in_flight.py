"""The requests inside a front: what is known of each, and under which id it goes on."""

import itertools
import secrets

from shoal.agent.core.crashes import Crash
from shoal.agent.core.sequences import SessionStep
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import digest
from shoal.agent.dataplane.tracing import Trace, Tracer
from shoal.agent.dataplane.transport import MAX_REQUEST_ID, InboundCall, is_request_id
from shoal.agent.ports import AgentClock
from shoal.types.route import Route
from shoal.types.units import Bytes, Elapsed
from shoal.types.workload import WorkloadKey


class InFlightRequest:
    """One request inside the front. Each makes one: a dataclass takes several times as long, compiled or not."""

    __slots__ = (
        "arrived_at", "attempts", "caller", "crash", "expires_at", "has_caller_deadline", "has_crashed_elsewhere", "id",
        "is_too_early", "key", "known_digest", "request", "session", "step", "trace",
    )  # fmt: skip

    def __init__(
        self,
        key: WorkloadKey,
        caller: Caller,
        name: str,
        session: str,
        request: bytes,
        arrived_at: Elapsed,
        expires_at: Elapsed,
        step: SessionStep | None = None,
        trace: Trace | None = None,
        *,
        has_caller_deadline: bool = False,
        has_crashed_elsewhere: bool = False,
    ) -> None:
        self.key = key
        """Its workload."""
        self.caller = caller
        """Its authenticated caller."""
        self.id = name
        """Request id for logs and forwards."""
        self.session = session
        """Session id; empty without one."""
        self.request = request
        """The serialized request."""
        self.arrived_at = arrived_at
        """When it arrived, elapsed clock."""
        self.expires_at = expires_at
        """Its deadline, elapsed clock."""
        self.step = step
        """Its step, if its workload is stateful; else None."""
        self.trace = trace
        """Its trace; None for nearly all requests."""
        self.attempts = 0
        """Attempts so far."""
        self.crash: Crash | None = None
        """The crash of its replica in this attempt; None without one."""
        self.known_digest: bytes | None = None
        """Its digest, once computed: most requests need none."""
        self.has_caller_deadline = has_caller_deadline
        """Whether `expires_at` is what its caller asked for, and not this front's limit."""
        self.is_too_early = False
        """Whether its newest attempt missed the deadline before an answer was due."""
        self.has_crashed_elsewhere = has_crashed_elsewhere
        """Whether the front of this region that forwarded it saw a worker crash under it."""

    @property
    def payer(self) -> str:
        """Whose share of the front it uses."""
        return self.caller.payer

    @property
    def size(self) -> Bytes:
        return Bytes(len(self.request))

    @property
    def digest(self) -> bytes:
        """Digest of what the model sees: the same for a repeated request, whatever its id."""
        if self.known_digest is None:
            self.known_digest = reading.fingerprint(self.request, str(self.key))
        return self.known_digest


class RequestFactory:
    """Makes the requests of one front: their deadlines, ids and traces."""

    def __init__(self, settings: FrontSettings, clock: AgentClock, tracer: Tracer) -> None:
        self._settings = settings
        self._clock = clock
        self._tracer = tracer
        self._numbers = itertools.count(1)
        self._run_id = secrets.token_hex(4)

    def make(
        self, call: InboundCall, caller: Caller, asked: reading.InferRequestHead, route: Route, request: bytes
    ) -> InFlightRequest:
        """The request of `asked`, which was read from `request`."""
        now = self._clock.now()
        wishes = [left for left in (call.remaining_s, asked.timeout_s) if left is not None]
        left = min(*wishes, self._settings.max_timeout_s) if wishes else self._settings.timeout_s
        name = self.name_of(call) if caller.hop else self._name_of(call, asked.id)
        step = self._step(call, caller, asked, request) if route.stateful and asked.session else None
        trace = self._tracer.begin(caller, call.trace)
        return InFlightRequest(
            route.workload, caller, name, asked.session, request, now, Elapsed(now + left), step, trace,
            has_caller_deadline=bool(wishes) and left < self._settings.max_timeout_s,
            has_crashed_elsewhere=call.suspect and caller.is_forwarded,
        )  # fmt: skip

    def make_plain(
        self,
        call: InboundCall,
        caller: Caller,
        own_id: str,
        route: Route,
        request: bytes,
        now: Elapsed,
        remaining_s: float | None,
    ) -> InFlightRequest:
        """As `make`, of a request that has no parameters, is not traced, and met no crash. `remaining_s`: until its
        caller's deadline."""
        name = self.name_of(call) if caller.hop else self._name_of(call, own_id)
        most = self._settings.max_timeout_s
        left = self._settings.timeout_s if remaining_s is None else min(remaining_s, most)
        return InFlightRequest(
            route.workload, caller, name, "", request, now, Elapsed(now + left),
            has_caller_deadline=remaining_s is not None and left < most,
        )  # fmt: skip

    def may_trace(self, caller: Caller, call: InboundCall) -> bool:
        """Whether the call's request may be traced."""
        return self._tracer.may_trace(caller, call.trace)

    def name_of(self, call: InboundCall) -> str:
        """The id of a call that names no other: what its caller says, or a new one."""
        return call.request_id[:MAX_REQUEST_ID] or self._new_name()

    def _name_of(self, call: InboundCall, own_id: str) -> str:
        """The id of a client's request, which names itself `own_id`: it is sent in metadata and written to logs."""
        own_id = own_id[:MAX_REQUEST_ID]
        return own_id if own_id and is_request_id(own_id) else self.name_of(call)

    def next_number(self) -> int:
        """A number that no other request of this front has."""
        return next(self._numbers)

    def _step(self, call: InboundCall, caller: Caller, asked: reading.InferRequestHead, request: bytes) -> SessionStep:
        """The step that the request asks for. Its token identifies this call at every front that it reaches."""
        token = call.step if caller.hop and call.step else self._new_name()
        return SessionStep(token, digest(request), asked.start, asked.end, asked.step)

    def _new_name(self) -> str:
        return f"{self._settings.origin}-{self._run_id}-{self.next_number():x}"
