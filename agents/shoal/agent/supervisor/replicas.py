"""The node's replicas: the state of each assignment, and the effects that `core.assignment` requests."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.agent.core import admission, reconcile
from shoal.agent.core.assignment import events, machine, report, states, unloading
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.ports import (
    LocalWorker,
    PreparedModel,
    StatefulReplica,
    VerificationSource,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
)
from shoal.agent.supervisor.node_monitor import EventReporter, NodeMonitor
from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.agent.supervisor.supervisor_ports import SupervisorPorts
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import PERMANENT_LOAD_FAILURES, UNREADABLE_DEVICE, Code, ShoalError
from shoal.types.migration import Recording, Verification
from shoal.types.units import Elapsed, Seconds

MIN_SLEEP_S = 0.001
_TAKING_REQUESTS = states.Ready | states.Unloading | states.ScaledToZero | states.Waking
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(slots=True, eq=False)
class _Replica:
    """One assignment: its state, its effects in order, and the tasks that perform them."""

    # Id of the assignment.
    name: str
    # Current state of the machine in `core.assignment`.
    state: states.State
    # Effects in the order in which they must be performed.
    outbox: asyncio.Queue[events.Effect] = field(default_factory=asyncio.Queue)
    # Effects in the outbox or in progress.
    pending_effects: int = 0
    # Performs the effects of the outbox; runs as long as the replica exists.
    performing: asyncio.Task[None] | None = None
    # Fetches the model. None before the first fetch.
    fetching: asyncio.Task[None] | None = None
    # Fires the next TimerFired. None before the first one is scheduled.
    timer: asyncio.Task[None] | None = None
    # Waits until no request is in flight. None before a drain.
    draining: asyncio.Task[None] | None = None
    # Runs the verification. None before the first one.
    verifying: asyncio.Task[None] | None = None
    # Path of inputs for the warm-up. Empty until they are fetched, and if there are none.
    samples: str = ""
    # What this node made of the pushed model. None before that, and where it is loaded as it was pushed.
    prepared: PreparedModel | None = None

    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        found = (self.performing, self.fetching, self.timer, self.draining, self.verifying)
        return tuple(task for task in found if task is not None)


class ReplicaManager:
    """Runs the replicas of this node.

    `on_phase_change` is called when a replica changes its phase. `request_reconcile` is called when one is gone or has
    no assignment, so that the caller must reconcile. `on_operators` is called with a device, and the operators that its
    provider took of a model.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        ports: SupervisorPorts,
        monitor: NodeMonitor,
        *,
        spawn: Spawn,
        report_event: EventReporter,
        on_phase_change: Callable[[], None],
        request_reconcile: Callable[[], None],
        on_operators: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self._limits = settings.limits
        self._poll_s = settings.poll_s
        self._workers = ports.workers
        self._front = ports.front
        self._cache = ports.cache
        self._preparer = ports.preparer
        self._recordings = ports.recordings
        self._clock = ports.clock
        self._log = ports.log
        self._monitor = monitor
        self._spawn = spawn
        self._report_event = report_event
        self._on_phase_change = on_phase_change
        self._request_reconcile = request_reconcile
        self._on_operators = on_operators
        self._replicas: dict[str, _Replica] = {}
        self._orphans: dict[str, WorkerAdopted] = {}
        self._ending: set[str] = set()
        """Adopted workers that no assignment asks for, until they are stopped."""
        self._unreadable_devices: dict[str, Code] = {}
        """Devices of these replicas that could not be read for a load, and why: told once, until one loads there."""

    def __contains__(self, name: object) -> bool:
        return name in self._replicas

    @property
    def current_states(self) -> Mapping[str, states.State]:
        return {name: replica.state for name, replica in self._replicas.items()}

    async def adopt(self) -> int:
        """Adopt the workers of an earlier supervisor; returns their count. `resolve_orphans` assigns or stops them."""
        self._orphans = {each.assignment: each for each in await self._workers.adopt()}
        return len(self._orphans)

    def resolve_orphans(self, assignments: Mapping[str, Assignment]) -> None:
        """Turn adopted workers into replicas where an assignment of their name exists. The others end, as replicas do
        that drain."""
        for name in tuple(self._orphans):
            orphan = self._orphans.pop(name)
            if name in self._replicas:
                continue
            if name in assignments:
                service, now = _optional_loaded_model(orphan.ready), self._clock.now()
                self._add(name, *machine.adopt(assignments[name], service, now, self._limits, orphan.verdict))
            elif name not in self._ending:
                self._ending.add(name)
                self._spawn(self._end_orphan(name), f"end {name}")

    @property
    def ending(self) -> Collection[str]:
        """Assignments that nobody asked for when their workers were adopted, and whose workers run still. They begin
        again only afterwards."""
        return self._ending

    async def _end_orphan(self, name: str) -> None:
        """Stop the worker once no request is in flight there, or after the longest drain. The front knows that it takes
        no more."""
        begun = self._clock.now()
        while (passed := self._clock.now() - begun) < self._limits.drain_s:
            is_counted = await self._monitor.sample()
            if passed >= self._limits.drain_grace_s and is_counted and self._monitor.in_flight(name) == 0:
                break
            await self._clock.sleep(Seconds(self._poll_s))
        await self._workers.stop(name)
        self._ending.discard(name)
        self._request_reconcile()

    def is_device_busy(self, device: str) -> bool:
        """Whether a replica runs, or is about to run, on this device, or its worker still has to be stopped. A worker
        that ends without an assignment may be on any."""
        return bool(self._ending) or any(
            replica.state.assignment.device == device
            and (not isinstance(replica.state, states.Gone) or bool(replica.pending_effects))
            for replica in self._replicas.values()
        )

    def is_any_starting(self) -> bool:
        """Whether any replica is fetching, loading or warming up."""
        on_its_way = states.Fetching | states.Loading | states.Warming | states.Waking
        return any(isinstance(replica.state, on_its_way) for replica in self._replicas.values())

    def apply_plan(self, plan: reconcile.ReconcilePlan) -> None:
        for each in plan.begin:
            # A sleeping device must wake first. That time must not count against the fetch limit.
            fetch_s = self._limits.fetch_s + self._monitor.set_sleep(each.device, False)
            self._add(each.id, *machine.begin(each, self._clock.now(), replace(self._limits, fetch_s=fetch_s)))
        for each in plan.resume:
            self._apply_event(each.id, events.ResumeRequested(each))
        for name in plan.drain:
            self._apply_event(name, events.DrainRequested())
        for name in plan.forget:
            if self._replicas[name].pending_effects:
                continue  # its worker still has to be stopped; the next reconcile checks again
            for task in self._replicas.pop(name).tasks():
                task.cancel()
            self._monitor.forget_assignment(name)
            self._on_phase_change()

    def ready_workers(self) -> tuple[LocalWorker, ...]:
        """Workers of replicas that are ready and not draining: a replica gets no request before its warm-up is done."""
        ready = (name for name, replica in self._replicas.items() if isinstance(replica.state, states.Ready))
        return tuple(local for name in ready if (local := self._workers.local(name)) is not None)

    def unloaded_replicas(self) -> tuple[UnloadedReplica, ...]:
        """Replicas that requests wait for, as they are scaled to zero, and those that failed to load again."""
        found = (_unloaded_replica(replica.state) for replica in self._replicas.values())
        return tuple(replica for replica in found if replica is not None)

    def unload_unused(self) -> None:
        """Call after each sample: unload what had no request for as long as its policy says."""
        now = self._clock.now()
        for name, replica in tuple(self._replicas.items()):
            state = replica.state
            if isinstance(state, states.Ready) and unloading.may_unload(state.assignment, state.record):
                last = Elapsed(max(state.since, self._monitor.last_request_at(name)))
                if self._sessions(name) == 0 and unloading.is_unused(state.assignment, last, now):
                    self._apply_event(name, events.Unused())

    async def wake_requested(self) -> None:
        """Load what requests wait for, until cancelled."""
        async for name in self._front.wakes():
            self._apply_event(name, events.WakeRequested())

    def verification_sources(self) -> tuple[VerificationSource, ...]:
        """Serving replicas that others may be compared with, and how many requests may be kept for that."""
        found = (_verification_source(replica.state) for replica in self._replicas.values())
        return tuple(witness for witness in found if witness is not None)

    def stateful_replicas(self) -> tuple[StatefulReplica, ...]:
        """Replicas of stateful workloads. Their sessions survive a restart of the worker."""
        found = (_stateful_replica(replica.state) for replica in self._replicas.values())
        return tuple(replica for replica in found if replica is not None)

    def observations(self, epoch_wall: Seconds) -> tuple[Observed, ...]:
        return tuple(self._observe(replica, epoch_wall) for replica in self._replicas.values())

    async def watch_workers(self) -> None:
        """Handle events of the worker pool until cancelled."""
        async for event in self._workers.events():
            self._on_worker_event(event)

    # one replica

    def _add(self, name: str, state: states.State, effects: tuple[events.Effect, ...]) -> None:
        replica = self._replicas[name] = _Replica(name, state)
        self._monitor.assign_device(name, state.assignment.device)
        replica.performing = self._spawn(self._perform_forever(replica), f"perform {name}")
        self._on_state_change(replica, None, effects)

    def _apply_event(self, name: str, event: events.Event) -> None:
        replica = self._replicas.get(name)
        if replica is None:
            return
        before = replica.state
        replica.state, effects = machine.step(before, event, self._clock.now(), self._limits)
        self._on_state_change(replica, before, effects)

    def _on_state_change(
        self, replica: _Replica, before: states.State | None, effects: tuple[events.Effect, ...]
    ) -> None:
        state = replica.state
        for effect in effects:
            if isinstance(effect, events.WakeAt):
                self._schedule_timer(replica, effect.at)
            else:
                replica.pending_effects += 1
                replica.outbox.put_nowait(effect)
        if type(state) is type(before):
            if before is not None and (_verification_source(state), _stateful_replica(state)) != (
                _verification_source(before),
                _stateful_replica(before),
            ):
                self._on_phase_change()
            return
        self._on_phase_change()
        if isinstance(state, states.Gone):
            self._request_reconcile()
        self._log.info(
            "replica_phase_changed",
            assignment=replica.name,
            workload=str(state.assignment.workload),
            phase=report.phase(state),
            unloaded=isinstance(state, states.ScaledToZero | states.Waking),
        )
        # A final state lasts: the region sees it in every status, and reports it once itself.
        if (
            isinstance(state, states.Failed | states.Poisoned | states.Rejected)
            and state.refusal.code not in PERMANENT_LOAD_FAILURES
            and self._is_news(state.assignment.device, state.refusal.code)
        ):
            self._report_event(state.refusal.code, replica.name, state.refusal.words)
        elif isinstance(state, states.Ready):
            self._unreadable_devices.pop(state.assignment.device, None)

    def _is_news(self, device: str, code: Code) -> bool:
        """Whether a failure is to be reported. A device that cannot be read fails every attempt of every replica on it,
        all for the same cause."""
        if code not in UNREADABLE_DEVICE:
            return True
        used = {each.state.assignment.device for each in self._replicas.values()}
        known = {name: why for name, why in self._unreadable_devices.items() if name in used}
        self._unreadable_devices = {**known, device: code}
        return known.get(device) is not code

    def _schedule_timer(self, replica: _Replica, at: Elapsed) -> None:
        async def fire_later() -> None:
            # A sleep may end early by a rounding error, and TimerFired comes only once.
            while (left := at - self._clock.now()) > 0:
                await self._clock.sleep(Seconds(max(left, MIN_SLEEP_S)))
            self._apply_event(replica.name, events.TimerFired())

        if replica.timer is not None:
            replica.timer.cancel()
        replica.timer = self._spawn(fire_later(), f"wake {replica.name}")

    async def _perform_forever(self, replica: _Replica) -> None:
        while True:
            effect = await replica.outbox.get()
            try:
                await self._perform(replica, effect)
            except ShoalError as error:
                self._apply_event(replica.name, events.LoadFailed(error.refusal))
            replica.pending_effects -= 1
            if isinstance(replica.state, states.Gone):
                self._request_reconcile()

    async def _perform(self, replica: _Replica, effect: events.Effect) -> None:
        asked = replica.state.assignment
        match effect:
            case events.StartFetch():
                replica.fetching = self._spawn(self._fetch(replica), f"fetch {replica.name}")
            case events.StopFetch():
                if replica.fetching is not None:
                    replica.fetching.cancel()
            case events.StartWorker(path):
                running = (each.state for each in self._replicas.values())
                reading = self._monitor.read(asked.device)
                silence, shared = self._monitor.silence(asked.device), self._monitor.same_memory(asked.device)
                worker_bytes = self._workers.worker_bytes() if self._monitor.is_in_host_memory(asked.device) else 0
                refusal = admission.admit(
                    asked, reading, silence, running, shared, worker_bytes, self._workers.may_share
                )
                if refusal is not None:
                    raise ShoalError(refusal)
                await self._workers.start(asked, path, replica.samples, replica.prepared)
            case events.StopWorker():
                await self._workers.stop(replica.name)
            case events.StartVerify(verification):
                replica.verifying = self._spawn(self._verify(replica, verification), f"verify {replica.name}")
            case events.StopVerify():
                if replica.verifying is not None:
                    replica.verifying.cancel()
            case events.AwaitIdle():
                if replica.draining is None or replica.draining.done():
                    replica.draining = self._spawn(self._await_idle(replica), f"drain {replica.name}")
            case events.DiscardBytes():
                await self._discard_corrupt(replica)
            case events.WakeAt():
                pass  # scheduled when the state was entered

    async def _discard_corrupt(self, replica: _Replica) -> None:
        asked, prepared = replica.state.assignment, replica.prepared
        for digest in (asked.samples, prepared.digest if prepared is not None else ""):
            if digest:
                await self._cache.discard(digest)
        if not await self._cache.discard(asked.model):
            return
        for name in [name for name, each in self._replicas.items() if each.state.assignment.model == asked.model]:
            self._apply_event(name, events.BytesDiscarded())

    async def _fetch(self, replica: _Replica) -> None:
        asked = replica.state.assignment
        try:
            await self._cache.admit(asked)
            path = await self._cache.ensure(asked.model, asked.model_bytes)
            replica.samples = await self._fetch_samples(asked)
            replica.prepared = None  # of an earlier attempt: it may have been rejected since
            if self._preparer.is_needed(asked):
                self._apply_event(replica.name, events.PreparationQueued())
                replica.prepared = await self._preparer.prepare(
                    asked,
                    path,
                    replica.samples,
                    lambda: self._apply_event(replica.name, events.PreparationStarted()),
                )
            while (wakes_in := self._monitor.set_sleep(asked.device, False)) > 0:
                await self._clock.sleep(Seconds(max(wakes_in, MIN_SLEEP_S)))
        except ShoalError as error:
            self._apply_event(replica.name, events.FetchFailed(error.refusal))
        else:
            self._apply_event(replica.name, events.ModelFetched(path))

    async def _fetch_samples(self, assignment: Assignment) -> str:
        """Path of the samples, or empty: without them the warm-up uses generated inputs. A preparation uses
        those that there are."""
        if not assignment.samples:
            return ""
        try:
            return await self._cache.ensure(assignment.samples, assignment.samples_bytes)
        except ShoalError as error:
            if assignment.preparation is not None:
                raise
            self._log.warning("samples_fetch_failed", assignment=assignment.id, code=error.code, error=str(error))
            return ""

    async def _verify(self, replica: _Replica, verification: Verification) -> None:
        try:
            local = self._workers.local(replica.name)
            if local is None:
                return  # the exit event of the worker follows
            pack = await self._cache.ensure(verification.pack, verification.pack_bytes) if verification.pack else ""
            if verification.recording is Recording.HERE:
                recorded = await self._front.record(local, verification, pack)
                verdict = recorded.verdict
                if recorded.content:
                    model = replica.state.assignment.model
                    await self._recordings.record(replica.name, model, verdict.pack, recorded.content)
            else:
                verdict = await self._front.verify(local, verification, pack)
            await self._workers.record_verdict(replica.name, verdict)
        except ShoalError as error:
            self._log.warning("replica_verification_failed", assignment=replica.name, code=error.code, error=str(error))
            self._apply_event(replica.name, events.NoVerdict(error.refusal))
        else:
            self._log.info("replica_verified", assignment=replica.name, passed=verdict.passed, reason=verdict.reason)
            self._apply_event(replica.name, events.VerdictReached(verdict))

    async def _await_idle(self, replica: _Replica) -> None:
        while isinstance(replica.state, states.Draining | states.Unloading):
            await self._clock.sleep(Seconds(self._poll_s))
            is_counted = await self._monitor.sample()
            if is_counted and self._monitor.in_flight(replica.name) == 0 and self._may_end(replica):
                self._apply_event(replica.name, events.Idle())

    def _may_end(self, replica: _Replica) -> bool:
        """Whether a worker with nothing in flight gets nothing more. Peers may still use the routes of one that drains,
        for a grace period; of one that is unloaded the front alone says so."""
        if not isinstance(replica.state, states.Unloading):
            return True
        return replica.name in self._monitor.front_stats.unloaded and self._sessions(replica.name) == 0

    def _sessions(self, name: str) -> int:
        """Sessions that the front keeps for it."""
        return dict(self._monitor.front_stats.sessions).get(name, 0)

    def _on_worker_event(self, event: WorkerEvent) -> None:
        match event:
            case WorkerReady():
                replica = self._replicas.get(event.assignment)
                if event.operators and replica is not None:
                    self._on_operators(replica.state.assignment.device, event.operators)
                self._apply_event(event.assignment, events.Warmed(_loaded_model(event)))
            case WorkerPhase():
                if event.phase == Phase.WARMING:
                    self._apply_event(event.assignment, events.WarmupStarted())
            case WorkerFailed():
                failed = self._replicas.get(event.assignment)
                prepared = failed.prepared if failed is not None else None
                # Answers that differ are those of the device's arithmetic, compiled or not.
                if prepared is not None and prepared.compiled and event.refusal.code is not Code.DRIFT_OVER:
                    self._preparer.reject(prepared)
                self._apply_event(event.assignment, events.LoadFailed(event.refusal))
            case WorkerExited():
                self._report_event(event.refusal.code, event.assignment, event.refusal.words)
                self._apply_event(event.assignment, events.Exited(event.own_fault, event.refusal, event.at_load))
            case WorkerAdopted():
                self._orphans[event.assignment] = event
                self._request_reconcile()

    def _observe(self, replica: _Replica, epoch_wall: Seconds) -> Observed:
        stats = self._monitor.worker_stats(replica.name)
        return report.observe(
            replica.state,
            epoch_wall=epoch_wall,
            in_flight=self._monitor.in_flight(replica.name),
            served=stats.served if stats else (),
            sessions=self._sessions(replica.name),
            latencies=stats.latencies if stats else (),
        )


def _verification_source(state: states.State) -> VerificationSource | None:
    asked = state.assignment
    if not isinstance(state, _TAKING_REQUESTS) or not (asked.verifiers or asked.capture):
        return None
    return VerificationSource(asked.id, asked.verifiers, asked.capture)


def _unloaded_replica(state: states.State) -> UnloadedReplica | None:
    asked = state.assignment
    match state:
        case states.Unloading() | states.ScaledToZero() | states.Waking():
            takes = unloading.wake_time(state.record, state.loaded_model)
            is_waking = isinstance(state, states.Waking)
            return UnloadedReplica(asked.id, asked.workload, takes.median_s, takes.least_s, is_waking)
        case states.Failed(refusal=refusal) | states.Poisoned(refusal=refusal) | states.Rejected(refusal=refusal):
            if asked.to_zero_after_s is None:
                return None
            return UnloadedReplica(asked.id, asked.workload, failure=refusal)
        case _:
            return None


def _stateful_replica(state: states.State) -> StatefulReplica | None:
    asked = state.assignment
    if isinstance(state, states.Draining | states.Gone) or not asked.session:
        return None
    return StatefulReplica(asked.id, asked.workload, asked.session, asked.handover, asked.handover_sources)


def _optional_loaded_model(ready: WorkerReady | None) -> states.LoadedModel | None:
    return None if ready is None else _loaded_model(ready)


def _loaded_model(ready: WorkerReady) -> states.LoadedModel:
    return states.LoadedModel(ready.measured, ready.inputs, ready.outputs, ready.note)
