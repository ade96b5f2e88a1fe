"""The front of one machine: the agent's own routing state, admission and retries over modelled connections.

Everything that decides is the agent's core: `RequestRouter` and `RequestAttempts`, as its real front calls them. Here
are time, connections, and the record that checkers read.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shoal.agent.core.awaited_routes import AwaitedRoutes, no_answer
from shoal.agent.core.crashes import CRASH_REFUSAL, Crash
from shoal.agent.core.cross_region_traffic import CrossRegionTraffic
from shoal.agent.core.request_attempts import RequestAttempts
from shoal.agent.core.request_router import RequestRouter
from shoal.agent.core.route_tables import RequestEntry
from shoal.agent.core.routing import AdmissionRefusal, RetryDecision
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.ports import LocalWorker, VerificationSource
from shoal.host.event_wait import wait_or_timeout
from shoal.simulator.parts.network import REGION
from shoal.simulator.parts.upstream import SimAttemptFailed, SimUpstream
from shoal.simulator.world.world import SimProcess
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, ShoalError
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import WorkloadKey

if TYPE_CHECKING:
    from shoal.simulator.parts.machine import SimMachine

TIMEOUT_S: Final = Seconds(60.0)
"""Deadline of a request whose client sets none."""
REQUEST_BYTES: Final = Bytes(1024)

Answer = tuple[Code | None, str]
"""(None, the assignment that answered) or (why there is no answer, '')."""


@dataclass(frozen=True, slots=True)
class FrontServing:
    """What a front is told to serve."""

    # Where requests may go.
    routes: tuple[Route, ...] = ()
    # Workers here that take requests.
    workers: tuple[LocalWorker, ...] = ()
    # Other regions that it exchanges requests with.
    peers: tuple[PeerTrust, ...] = ()
    # Replicas here that others are compared with.
    verification_sources: tuple[VerificationSource, ...] = ()
    # Replicas here that requests wait for, as they have no worker.
    unloaded: tuple[UnloadedReplica, ...] = ()
    # True: the region may have workloads that `routes` does not list.
    routes_on_demand: bool = False


@dataclass(eq=False)
class SimRequest:
    """One request inside a front. Implements the core's RoutedRequest."""

    # Its name in the record.
    number: str
    # Its workload.
    key: WorkloadKey
    # Stands for its tensors: equal contents are the same request, sent again.
    digest: bytes
    # How it came in.
    entry: RequestEntry
    # When it arrived, elapsed clock.
    arrived_at: Elapsed
    # Its deadline, elapsed clock.
    expires_at: Elapsed
    # The crash of its replica in this attempt; None without one.
    crash: Crash | None = None
    # Session id: none has one.
    session: str = ""
    # The front that forwarded it saw a worker crash under it.
    has_crashed_elsewhere: bool = False
    # How it ended; a request that the front's death cut off was not answered.
    answer: Answer = (Code.REPLICA_UNREACHABLE, "")

    @property
    def payer(self) -> str:
        return self.key.tenant

    @property
    def size(self) -> Bytes:
        return REQUEST_BYTES


class SimFront:
    """One life of the front process. Its routing state and the requests inside die with it."""

    def __init__(self, machine: "SimMachine") -> None:
        self.process = SimProcess(machine.world, f"front-{machine.name}")
        self.router = RequestRouter(machine.limits, TIMEOUT_S)
        self.traffic = CrossRegionTraffic()
        self._change = asyncio.Event()
        """Set, and replaced, at each configuration."""
        self.serving: FrontServing | None = None
        """The last configuration; None before the first."""
        self.awaited = AwaitedRoutes()
        self.asking = asyncio.Event()
        """Set when a request waits for routes that the supervisor has not heard of."""
        self._used = set[WorkloadKey]()
        self._machine = machine
        self._upstream = SimUpstream(machine, self.router)
        self._seeds = itertools.count(1)
        self._suspect_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def alive(self) -> bool:
        """Whether it runs and is configured."""
        return self.process.alive and self.serving is not None

    @property
    def routes(self) -> Mapping[WorkloadKey, Route]:
        """Routes of clients' requests."""
        return self.router.tables.entering

    @property
    def peers(self) -> Mapping[str, PeerTrust]:
        """Region -> trust in its gateways."""
        return {} if self.serving is None else {peer.region: peer for peer in self.serving.peers}

    def configure(self, serving: FrontServing) -> None:
        """Apply a complete configuration."""
        machine = self._machine
        if self.serving is None:
            limits = machine.limits
            machine.world.record(
                "front.started", node=machine.name, per_endpoint=max(limits.per_replica, limits.per_way)
            )
        self.serving = serving
        self.router.configure(serving.routes, serving.workers, serving.unloaded)
        self.awaited.configure(serving.routes, is_on_demand=serving.routes_on_demand)
        self._used &= self.router.tables.entering.keys()
        past, self._change = self._change, asyncio.Event()
        past.set()
        counted = {agreement for peer in serving.peers for agreement in peer.agreements}
        self.traffic.keep(self.router.tables.traffic_keys | counted)
        machine.world.record(
            "front.configured",
            node=machine.name,
            workers=tuple(worker.assignment for worker in serving.workers),
            unloaded=tuple((each.assignment, str(each.workload)) for each in serving.unloaded if each.failure is None),
            routes=tuple(
                (
                    str(route.workload),
                    route.generation,
                    tuple(
                        (each.assignment, each.node, str(each.state), each.weight, _kind_of(each))
                        for each in route.endpoints
                    ),
                )
                for route in serving.routes
            ),
        )

    def stop(self) -> None:
        """SIGKILL."""
        was_alive = self.alive
        self.process.die()
        if was_alive:
            self._machine.world.record("front.died", node=self._machine.name)

    async def request(
        self,
        workload: WorkloadKey,
        content: bytes,
        *,
        entry: RequestEntry = RequestEntry.CLIENT,
        timeout_s: Seconds = TIMEOUT_S,
        suspect: bool = False,
    ) -> Answer:
        """One inference request. `suspect`: the front that forwards it saw a worker crash under it."""
        if not self.alive:
            return Code.REPLICA_UNREACHABLE, ""
        machine, now = self._machine, self._machine.clock.now()
        request = SimRequest(
            machine.next_request(), workload, content, entry, now, Elapsed(now + max(0.0, timeout_s)),
            has_crashed_elsewhere=suspect,
        )  # fmt: skip
        self._record(
            "entered", request, workload=str(workload), content=content, entry=entry.name.lower(), timeout_s=timeout_s
        )
        serving = self.process.spawn(self._serve(request), "request")
        try:
            await asyncio.wait((serving,))
        except asyncio.CancelledError:
            request.answer = Code.CANCELLED, ""
            serving.cancel()
            raise
        return request.answer

    async def _serve(self, request: SimRequest) -> None:
        try:
            request.answer = await self._admit_and_answer(request)
        except ShoalError as error:
            self._machine.world.fail(f"{self.process.name} does not handle {error}", error)
        finally:
            code, _ = request.answer
            outcome = "ok" if code is None else str(code)
            self._record("left", request, outcome=outcome, alive=self.process.alive)

    def route_questions(self) -> tuple[WorkloadKey, ...]:
        """Workloads that requests wait for, and those that clients asked for since it started: as the counters of a
        front say of every request, of which this one keeps none."""
        return tuple(sorted({*self.awaited.open_questions(self._now()), *self._used}))

    async def _find_route(self, request: SimRequest) -> Route | Code | None:
        """The route, waited for if the region may have one; else why there is none."""
        route = self.router.tables.find(request.key, request.entry)
        if route is not None or request.entry is not RequestEntry.CLIENT:
            return route
        if not self.awaited.may_exist(request.key):
            self.awaited.repeat(request.key, self._now())
            return None
        is_new = self.awaited.is_answered(request.key)
        refusal = self.awaited.ask(request.key, self._now())
        if refusal is not None:
            return refusal.code
        if is_new:
            self.asking.set()
        until = min(request.expires_at, self.awaited.due_at(request.key))
        while not self.awaited.is_answered(request.key):
            left = until - self._now()
            if left <= 0 or not await wait_or_timeout(self._change, left, self._machine.clock):
                return no_answer(request.key).code
        return self.router.tables.find(request.key, request.entry)

    async def _admit_and_answer(self, request: SimRequest) -> Answer:
        route = await self._find_route(request)
        if isinstance(route, Code):
            return route, ""
        if route is not None and request.entry is RequestEntry.CLIENT:
            self._used.add(request.key)
        if route is None:
            return Code.MODEL_NOT_FOUND if request.entry is RequestEntry.CLIENT else Code.MODEL_NOT_READY, ""
        refused = self.router.admit(request, route)
        if refused is not None:
            return refused.refusal.code, ""
        self.router.enter(request)
        try:
            awake = await self._wait_for_wake(route, request)
            return await self._answer(awake, request) if isinstance(awake, Route) else (awake, "")
        finally:
            self.router.leave(request)

    async def _wait_for_wake(self, route: Route, request: SimRequest) -> Route | Code:
        """Its route once a replica takes requests, or none will; or why it is refused meanwhile."""
        while True:
            plan = self.router.plan_wake(route, request.expires_at, self._now())
            for assignment in plan.wake:
                self._machine.wakes.put_nowait(assignment)
            if plan.refused is not None:
                return plan.refused.refusal.code
            if not plan.waits:
                return route
            try:
                async with asyncio.timeout(request.expires_at - self._now()):
                    await self._change.wait()
            except TimeoutError:
                return Code.DEADLINE_EXCEEDED
            route = self.router.tables.find(request.key, request.entry) or route

    async def _answer(self, route: Route, request: SimRequest) -> Answer:
        attempts = RequestAttempts(self.router, route, request, next(self._seeds))
        failure: Code | None = None
        while True:
            picked = attempts.next_endpoint(self._now(), self._upstream.is_connecting)
            if isinstance(picked, AdmissionRefusal):
                return failure or picked.refusal.code, ""
            self._record("sent", request, to=picked.assignment, via=_kind_of(picked))
            try:
                return None, await self._attempt_guarded(picked, request)
            except SimAttemptFailed as failed:
                failure = failed.code
                match attempts.on_failure(picked, failed.code, self._now()):
                    case RetryDecision.RETURN_ERROR:
                        return failed.code, ""
                    case RetryDecision.BLOCK:
                        return CRASH_REFUSAL.code, ""
                    case RetryDecision.RETRY:
                        pass

    async def _attempt_guarded(self, endpoint: Endpoint, request: SimRequest) -> str:
        """As `_attempt`, but a suspected request runs without other suspects on the replica."""
        try:
            if self.router.is_suspect(request, self._now()):
                answered_by = await self._attempt_exclusively(endpoint, request)
            else:
                answered_by = await self._attempt(endpoint, request)
        except SimAttemptFailed as failed:
            self.router.suspect_after(failed.code, request, self._now())
            raise
        self.router.clear_suspicion(request)
        return answered_by

    async def _attempt_exclusively(self, endpoint: Endpoint, request: SimRequest) -> str:
        alone = self._suspect_locks[endpoint.assignment]
        try:
            async with asyncio.timeout(request.expires_at - self._now()):
                await alone.acquire()
        except TimeoutError as error:
            raise SimAttemptFailed(Code.DEADLINE_EXCEEDED) from error
        try:
            return await self._attempt(endpoint, request)
        finally:
            alone.release()
            if not self.router.has_suspects:
                self._suspect_locks.clear()

    async def _attempt(self, endpoint: Endpoint, request: SimRequest) -> str:
        """The assignment that answered. Raises SimAttemptFailed."""
        begun = self.router.begin_attempt(endpoint, request, self._now())
        outcome: Code | Seconds = Code.CANCELLED
        try:
            answered_by = await self._send(endpoint, request)
        except SimAttemptFailed as failed:
            outcome = failed.code
            self.router.on_failure(begun, failed.code, self._now())
            self._record("failed", request, to=endpoint.assignment, code=str(failed.code))
            raise
        except BaseException:
            self.router.on_withdrawal(begun)
            raise
        else:
            now = self._now()
            outcome = Seconds(now - begun.at)
            self.router.on_answer(begun, now, self._upstream.rtt_s(endpoint))
            self._record("served", request, to=endpoint.assignment)
        finally:
            sent = self.router.tables.traffic_of(request.key, endpoint, REGION)
            if sent is not None:
                self.traffic.add(*sent, outcome)
        return answered_by

    async def _send(self, endpoint: Endpoint, request: SimRequest) -> str:
        remaining_s = Seconds(request.expires_at - self._now())
        try:
            async with asyncio.timeout(remaining_s):
                suspect = self.router.is_suspect(request, self._now())
                return await self._upstream.infer(endpoint, request.key, request.digest, remaining_s, suspect=suspect)
        except TimeoutError as late:
            raise SimAttemptFailed(Code.DEADLINE_EXCEEDED) from late

    def _now(self) -> Elapsed:
        return self._machine.clock.now()

    def _record(self, what: str, request: SimRequest, **facts: object) -> None:
        self._machine.world.record(f"request.{what}", front=self._machine.name, number=request.number, **facts)


def _kind_of(endpoint: Endpoint) -> str:
    """How the record calls it: `local`, `agent`, `gateway`, or `region` for a gateway of another region."""
    return "region" if endpoint.region else str(EndpointKind(endpoint.kind))
