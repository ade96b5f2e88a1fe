"""Sends requests to replicas: admission, the choice of a replica, attempts, and retries on another one.

Decisions are made by `core.request_router` and `core.request_attempts`; connections to replicas are in `upstream`.
Steps of sessions are in `sessions`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final

from shoal.agent.core import routing
from shoal.agent.core.crashes import CRASH_REFUSAL, is_second_crash
from shoal.agent.core.request_attempts import DEADLINE_REFUSAL, NO_REPLICA_RETRY_S, RequestAttempts
from shoal.agent.core.request_router import BegunAttempt, RequestRouter
from shoal.agent.core.routing import AdmissionRefusal, AttemptFault, RetryDecision
from shoal.agent.core.sequences import SequenceKey, SessionStep
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.fair_turns import FairTurns
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.in_flight import InFlightRequest, RequestFactory
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.session_affinity import SessionAffinity, SessionSearch, local_endpoint
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import MAX_MESSAGE, CallRefused, drop_tracebacks
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.dataplane.wakes import Wakes
from shoal.agent.ports import AgentClock
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.units import Seconds

FORWARD_TURN_S: Final = 1.0
"""Seconds that a step keeps its turn while another front has it: there it may wait for a lease or a worker, which this
front does not see. One whose model takes longer is bounded by its payer's share of the connection."""


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
        request_wake: Callable[[str], None],
    ) -> None:
        """`request_wake` is as in `Wakes`."""
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._sessions = sessions
        self._captures = captures
        self._meter = meter
        self._requests = requests
        self.router = RequestRouter(settings.limits, Seconds(settings.timeout_s))
        """Where requests go, and what is known of the replicas."""
        self.turns = FairTurns(self.router, settings.limits.slots, clock)
        """Which request goes on to a replica, where many want to."""
        self.wakes = Wakes(self.router, clock, request_wake)
        """Which requests wait until a replica is loaded again."""
        self._affinity = SessionAffinity()
        self._suspect_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks for suspected requests, by replica: with two of them there, another crash would not show which one is
        to blame."""

    async def answer(self, route: Route, flight: InFlightRequest) -> bytes:
        """Raises CallRefused where the request is not admitted; ShoalError(DEADLINE_EXCEEDED) where its turn does not
        come; ShoalError: the last attempt's, once no other replica is left."""
        self._admit(route, flight)
        self.router.enter(flight)
        try:
            # Before its turn: a request that waits for a load must keep none from others.
            route = await self._wake(route, flight)
            if flight.step is not None:
                return await self._answer_step(route, flight, flight.step)
            if not self.turns.enter(flight):
                await self.turns.wait(flight)
            try:
                return await self.answer_in_turn(route, flight)
            finally:
                self.turns.leave(flight)
        finally:
            self.router.leave(flight)

    # one request

    async def _wake(self, route: Route, flight: InFlightRequest) -> Route:
        """As `Wakes.wait`."""
        return await self.wakes.wait(route, flight.caller, flight.expires_at)

    async def answer_in_turn(self, route: Route, flight: InFlightRequest) -> bytes:
        """Answer a request inside whose turn it is, and that is no step. Raises ShoalError: the last attempt's, once no
        other replica is left."""
        return await self._try_replicas(self._attempts(route, flight), flight)

    def _attempts(self, route: Route, flight: InFlightRequest) -> RequestAttempts:
        return RequestAttempts(self.router, route, flight, self._requests.next_number())

    async def answer_after(
        self, failure: AttemptFailed, begun: BegunAttempt, route: Route, flight: InFlightRequest
    ) -> bytes:
        """Answer a request inside whose first attempt, which was sent directly, failed. Raises as `answer`."""
        self._record_failure(begun, flight, failure)
        self.router.suspect_after(failure.code, flight, self._clock.now())
        attempts = self._attempts(route, flight)
        self._decide_retry(attempts, begun.endpoint, failure)
        return await self._try_replicas(attempts, flight, failure)

    async def _try_replicas(
        self, attempts: RequestAttempts, flight: InFlightRequest, failure: AttemptFailed | None = None
    ) -> bytes:
        """`failure`: the newest attempt's. Raises as `answer_in_turn`."""
        while True:
            picked = attempts.next_endpoint(self._clock.now(), self._peers.is_connecting)
            if isinstance(picked, AdmissionRefusal):
                if failure is None and self.wakes.is_asleep(attempts.route):
                    # Its last replica was scaled to zero while it waited for its turn.
                    attempts = self._attempts(await self._wake(attempts.route, flight), flight)
                    continue
                raise failure or CallRefused(picked.refusal, picked.retry_after_s)
            flight.attempts += 1
            try:
                return await self._attempt_guarded(picked, flight, flight.request)
            except AttemptFailed as error:
                self._decide_retry(attempts, picked, error)
                drop_tracebacks(error)  # its frames hold the request, and this one would hold it
                failure = error

    def _decide_retry(self, attempts: RequestAttempts, picked: Endpoint, error: AttemptFailed) -> None:
        """Return where another replica may be tried. Raises `error`, or ShoalError(REQUEST_CRASHED_WORKER)."""
        match attempts.on_failure(picked, error.code, self._clock.now()):
            case RetryDecision.RETURN_ERROR:
                raise error
            case RetryDecision.BLOCK:
                raise ShoalError(CRASH_REFUSAL) from error
            case RetryDecision.RETRY:
                pass

    def _record_failure(self, begun: BegunAttempt, flight: InFlightRequest, error: AttemptFailed) -> None:
        fault = self.router.on_failure(begun, error.code, self._clock.now())
        flight.is_too_early = fault is AttemptFault.CALLER

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
                if search.failure is None and self.wakes.is_asleep(route):
                    route = await self._wake(route, flight)
                    continue
                raise search.failure or CallRefused(picked, NO_REPLICA_RETRY_S)
            if flight.expires_at <= self._clock.now():
                raise search.failure or ShoalError(DEADLINE_REFUSAL)
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
        """Its turn lasts while it runs. While it waits for the session's earlier steps, a lease or a worker, which may
        be long, it must keep none from others."""
        if picked.kind is not EndpointKind.LOCAL:
            async with self._step_turn(flight, FORWARD_TURN_S):
                left = Seconds(flight.expires_at - self._clock.now())
                return await self._attempt(picked, flight, left, flight.request)

        async def run(assignment: str, request: bytes) -> bytes:
            try:
                async with self._step_turn(flight):
                    return await self._attempt_guarded(replace(picked, assignment=assignment), flight, request)
            except AttemptFailed as error:
                if routing.fault_of(error.code) is AttemptFault.CRASH and is_second_crash(flight):
                    self.router.block_if_to_blame(flight, self._clock.now())
                    raise ShoalError(CRASH_REFUSAL) from error
                raise

        return await self._sessions.step(key, step, flight.request, picked.assignment, flight.expires_at, run)

    @asynccontextmanager
    async def _step_turn(self, flight: InFlightRequest, at_most_s: float | None = None) -> AsyncIterator[None]:
        """The turn of one attempt of a step, for `at_most_s`. Raises ShoalError(DEADLINE_EXCEEDED)."""
        if not self.turns.enter(flight, self._clock.now()):
            await self.turns.wait(flight)
        with ExitStack() as turn:
            turn.callback(self.turns.leave, flight)
            if flight.expires_at <= self._clock.now():
                raise ShoalError(DEADLINE_REFUSAL)
            if at_most_s is not None:
                timer = asyncio.get_running_loop().call_later(at_most_s, turn.close)
                turn.callback(timer.cancel)
            yield

    def _first_endpoint(
        self, route: Route, key: SequenceKey, tried: frozenset[str] = frozenset()
    ) -> Endpoint | Refusal:
        """Where a new session begins; the same at every front with the same route."""
        return self.router.choose(route, tried, key.sequence, self._clock.now(), 0)

    def _current_route(self, route: Route) -> Route:
        return self.router.tables.entering.get(route.workload, route)

    async def _attempt_guarded(self, endpoint: Endpoint, flight: InFlightRequest, request: bytes) -> bytes:
        """As `_attempt`, but a suspected request runs without other suspects on the replica.

        A request that meets its first crash becomes a suspect. Raises AttemptFailed, ShoalError(DEADLINE_EXCEEDED).
        """
        try:
            if not self.router.is_suspect(flight, self._clock.now()):
                left = Seconds(flight.expires_at - self._clock.now())
                answer = await self._attempt(endpoint, flight, left, request)
            else:
                answer = await self._attempt_exclusively(endpoint, flight, request)
        except AttemptFailed as error:
            self.router.suspect_after(error.code, flight, self._clock.now())
            raise
        self.router.clear_suspicion(flight)
        return answer

    async def _attempt_exclusively(self, endpoint: Endpoint, flight: InFlightRequest, request: bytes) -> bytes:
        """As `_attempt`, with no other suspect on the replica. Raises AttemptFailed, ShoalError(DEADLINE_EXCEEDED)."""
        alone = self._suspect_locks[endpoint.assignment]
        try:
            async with asyncio.timeout(flight.expires_at - self._clock.now()):
                await alone.acquire()
        except TimeoutError as error:
            raise ShoalError(DEADLINE_REFUSAL) from error
        try:
            return await self._attempt(endpoint, flight, Seconds(flight.expires_at - self._clock.now()), request)
        finally:
            alone.release()
            if not self.router.has_suspects:
                self._suspect_locks.clear()

    async def _attempt(
        self, endpoint: Endpoint, flight: InFlightRequest, remaining_s: Seconds, request: bytes
    ) -> bytes:
        """Send the request to one replica once, and record the outcome in the replica's health.

        `request` is what is sent, with the session's state if it has one. Raises AttemptFailed.
        """
        begun = self.router.begin_attempt(endpoint, flight, self._clock.now())
        token = flight.step.token if flight.step is not None else ""
        attempt = flight.trace.attempt(endpoint) if flight.trace is not None else None
        context = CallContext(
            *(flight.key.tenant, flight.caller.origin, flight.id, remaining_s, flight.caller.agreement, token, attempt),
            workload=flight.key.name,
            payer=flight.payer,
            is_suspect=self.router.is_suspect(flight, begun.at),
        )
        code: Code | None = Code.CANCELLED
        outcome: Code | Seconds = Code.CANCELLED
        try:
            if endpoint.kind is EndpointKind.LOCAL:
                answer = await self._workers.infer(endpoint.assignment, request, context)
                self._captures.note(endpoint.assignment, request)
            else:
                answer = await self._peers.infer(endpoint, request, context)
        except AttemptFailed as error:
            outcome = code = error.code
            self._record_failure(begun, flight, error)
            raise
        except BaseException:
            self.router.on_withdrawal(begun)
            raise
        else:
            now = self._clock.now()
            outcome, code = Seconds(now - begun.at), None
            self.router.on_answer(begun, now, self._peers.rtt_s(endpoint))
        finally:
            if attempt is not None:
                attempt.end(code)
            traffic = self.router.tables.traffic_of(flight.key, endpoint, self._settings.region)
            if traffic is not None:
                self._meter.record_traffic(*traffic, outcome)
        if len(answer) > MAX_MESSAGE:
            raise reading.too_large(f"an answer of {len(answer)} bytes", MAX_MESSAGE)
        return answer

    def _admit(self, route: Route, flight: InFlightRequest) -> None:
        """Raises CallRefused."""
        continues = flight.step is not None and not flight.step.start
        refused = self.router.admit(
            flight,
            # A step that continues a session was admitted where it entered; here it waits for its turn.
            None if continues and flight.caller.hop else route,
            self._sessions.replicas(flight.key) if continues else None,
        )
        if refused is not None:
            raise CallRefused(refused.refusal, refused.retry_after_s)
