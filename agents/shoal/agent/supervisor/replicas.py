"""The node's replicas: each assignment's state, and the carrying out of what `core.assignment` asks for."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.agent.core import admission, reconcile
from shoal.agent.core import assignment as machine
from shoal.agent.ports import (
    Cache,
    Clock,
    Front,
    Keeper,
    LocalWorker,
    Log,
    Recordings,
    Witness,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    Workers,
)
from shoal.agent.supervisor.gauges import Gauges, Tell
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import ShoalError
from shoal.types.migration import Recording, Verification
from shoal.types.units import Elapsed, Seconds

WAKE_LEAST_S = 0.001
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(slots=True, eq=False)
class _Replica:
    """One assignment: its state, its effects in order, and the tasks that carry them out."""

    name: str
    state: machine.State
    outbox: asyncio.Queue[machine.Effect] = field(default_factory=asyncio.Queue)
    unperformed: int = 0
    """Effects in the outbox or under way."""
    performing: asyncio.Task[None] | None = None
    fetching: asyncio.Task[None] | None = None
    waking: asyncio.Task[None] | None = None
    draining: asyncio.Task[None] | None = None
    verifying: asyncio.Task[None] | None = None

    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        found = (self.performing, self.fetching, self.waking, self.draining, self.verifying)
        return tuple(task for task in found if task is not None)


class Replicas:
    """turned: some replica changed its phase. unsettled: one is gone or without a master, so reconcile again."""

    def __init__(
        self,
        *,
        limits: machine.Limits,
        poll_s: float,
        workers: Workers,
        front: Front,
        cache: Cache,
        recordings: Recordings,
        clock: Clock,
        gauges: Gauges,
        spawn: Spawn,
        log: Log,
        tell: Tell,
        turned: Callable[[], None],
        unsettled: Callable[[], None],
    ) -> None:
        """poll_s: between looks at a replica that drains."""
        self._limits = limits
        self._poll_s = poll_s
        self._workers = workers
        self._front = front
        self._cache = cache
        self._recordings = recordings
        self._clock = clock
        self._gauges = gauges
        self._spawn = spawn
        self._log = log
        self._tell = tell
        self._turned = turned
        self._unsettled = unsettled
        self._held: dict[str, _Replica] = {}
        self._orphans: dict[str, WorkerAdopted] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._held

    @property
    def states(self) -> Mapping[str, machine.State]:
        return {name: replica.state for name, replica in self._held.items()}

    async def adopt(self) -> int:
        """Finds the workers of an earlier supervisor; how many there are. `settle` gives them a master or ends them."""
        self._orphans = {each.assignment: each for each in await self._workers.adopt()}
        return len(self._orphans)

    def settle(self, asked: Mapping[str, Assignment]) -> None:
        """Adopted workers become replicas where something of their name is asked for, and are stopped elsewhere."""
        for name in tuple(self._orphans):
            orphan = self._orphans.pop(name)
            if name in self._held:
                continue
            if name in asked:
                service, now = _service(orphan.ready), self._clock.now()
                self._keep(name, *machine.adopt(asked[name], service, now, self._limits, orphan.verdict))
            else:
                self._spawn(self._workers.stop(name), f"stop {name}")

    def busy(self, device: str) -> bool:
        """Whether something is, or is to be, on it."""
        return any(
            replica.state.asked.device == device and not isinstance(replica.state, machine.Gone)
            for replica in self._held.values()
        )

    def starting(self) -> bool:
        """Whether something is on its way to serve."""
        on_its_way = machine.Fetching | machine.Loading | machine.Warming
        return any(isinstance(replica.state, on_its_way) for replica in self._held.values())

    def carry_out(self, plan: reconcile.Plan) -> None:
        for each in plan.begin:
            # A device that sleeps is to be awake first: that is no fault of its bytes.
            fetch_s = self._limits.fetch_s + self._gauges.rest(each.device, False)
            self._keep(each.id, *machine.begin(each, self._clock.now(), replace(self._limits, fetch_s=fetch_s)))
        for each in plan.resume:
            self._apply(each.id, machine.Resume(each))
        for name in plan.drain:
            self._apply(name, machine.Drain())
        for name in plan.forget:
            if self._held[name].unperformed:
                continue  # its worker is still to be stopped; then this is looked at again
            for task in self._held.pop(name).tasks():
                task.cancel()
            self._gauges.gone(name)
            self._turned()

    def serving(self) -> tuple[LocalWorker, ...]:
        """Ready and not draining: no request reaches a replica that has not passed its warm-up."""
        ready = (name for name, replica in self._held.items() if isinstance(replica.state, machine.Ready))
        return tuple(local for name in ready if (local := self._workers.local(name)) is not None)

    def witnesses(self) -> tuple[Witness, ...]:
        """Of those that serve: whom they answer for a comparison, and what may be kept for one."""
        found = (_witness(replica.state) for replica in self._held.values())
        return tuple(witness for witness in found if witness is not None)

    def keepers(self) -> tuple[Keeper, ...]:
        """Of stateful workloads: a worker that is started anew goes on with their sessions."""
        found = (_keeper(replica.state) for replica in self._held.values())
        return tuple(keeper for keeper in found if keeper is not None)

    def observed(self, epoch_wall: Seconds) -> tuple[Observed, ...]:
        return tuple(self._observed(replica, epoch_wall) for replica in self._held.values())

    async def watch(self) -> None:
        """Takes what workers say, until cancelled."""
        async for event in self._workers.events():
            self._take(event)

    # one replica

    def _keep(self, name: str, state: machine.State, effects: tuple[machine.Effect, ...]) -> None:
        replica = self._held[name] = _Replica(name, state)
        self._gauges.runs_on(name, state.asked.device)
        replica.performing = self._spawn(self._perform_forever(replica), f"perform {name}")
        self._entered(replica, None, effects)

    def _apply(self, name: str, event: machine.Event) -> None:
        replica = self._held.get(name)
        if replica is None:
            return
        before = replica.state
        replica.state, effects = machine.step(before, event, self._clock.now(), self._limits)
        self._entered(replica, before, effects)

    def _entered(self, replica: _Replica, before: machine.State | None, effects: tuple[machine.Effect, ...]) -> None:
        state = replica.state
        for effect in effects:
            if isinstance(effect, machine.WakeAt):
                self._wake(replica, effect.at)
            else:
                replica.unperformed += 1
                replica.outbox.put_nowait(effect)
        if type(state) is type(before):
            if before is not None and (_witness(state), _keeper(state)) != (_witness(before), _keeper(before)):
                self._turned()
            return
        self._turned()
        if isinstance(state, machine.Gone):
            self._unsettled()
        self._log("phase", assignment=replica.name, workload=str(state.asked.workload), phase=machine.phase(state))
        if isinstance(state, machine.Failed | machine.Poisoned | machine.Rejected):
            self._tell(state.refusal.code, replica.name, str(state.refusal))

    def _wake(self, replica: _Replica, at: Elapsed) -> None:
        async def wake() -> None:
            while (left := at - self._clock.now()) > 0:  # a sleep may end a rounding error early, and Tick comes once
                await self._clock.sleep(Seconds(max(left, WAKE_LEAST_S)))
            self._apply(replica.name, machine.Tick())

        if replica.waking is not None:
            replica.waking.cancel()
        replica.waking = self._spawn(wake(), f"wake {replica.name}")

    async def _perform_forever(self, replica: _Replica) -> None:
        while True:
            effect = await replica.outbox.get()
            try:
                await self._perform(replica, effect)
            except ShoalError as error:
                self._apply(replica.name, machine.LoadFailed(error.refusal))
            replica.unperformed -= 1
            if isinstance(replica.state, machine.Gone):
                self._unsettled()

    async def _perform(self, replica: _Replica, effect: machine.Effect) -> None:
        asked = replica.state.asked
        match effect:
            case machine.Fetch():
                replica.fetching = self._spawn(self._fetch(replica), f"fetch {replica.name}")
            case machine.StopFetch():
                if replica.fetching is not None:
                    replica.fetching.cancel()
            case machine.StartWorker(path):
                states = (each.state for each in self._held.values())
                refusal = admission.admit(asked, self._gauges.read(asked.device), states)
                if refusal is not None:
                    raise ShoalError(refusal)
                await self._workers.start(asked, path)
            case machine.StopWorker():
                await self._workers.stop(replica.name)
            case machine.Verify(verification):
                replica.verifying = self._spawn(self._verify(replica, verification), f"verify {replica.name}")
            case machine.StopVerify():
                if replica.verifying is not None:
                    replica.verifying.cancel()
            case machine.AwaitIdle():
                if replica.draining is None or replica.draining.done():
                    replica.draining = self._spawn(self._await_idle(replica), f"drain {replica.name}")
            case machine.DiscardBytes():
                await self._cache.discard(asked.model)
            case machine.WakeAt():
                pass  # set when the state was entered

    async def _fetch(self, replica: _Replica) -> None:
        asked = replica.state.asked
        try:
            await self._cache.admit(asked)
            path = await self._cache.ensure(asked.model, asked.model_bytes)
            while (wakes_in := self._gauges.rest(asked.device, False)) > 0:
                await self._clock.sleep(Seconds(max(wakes_in, WAKE_LEAST_S)))
        except ShoalError as error:
            self._apply(replica.name, machine.FetchFailed(error.refusal))
        else:
            self._apply(replica.name, machine.Fetched(path))

    async def _verify(self, replica: _Replica, asked: Verification) -> None:
        try:
            local = self._workers.local(replica.name)
            if local is None:
                return  # its exit is on the way
            pack = await self._cache.ensure(asked.pack, asked.pack_bytes) if asked.pack else ""
            if asked.recording is Recording.HERE:
                recorded = await self._front.record(local, asked, pack)
                verdict = recorded.verdict
                if recorded.content:
                    model = replica.state.asked.model
                    await self._recordings.record(replica.name, model, verdict.pack, recorded.content)
            else:
                verdict = await self._front.verify(local, asked, pack)
            await self._workers.judged(replica.name, verdict)
        except ShoalError as error:
            self._log("not_verified_yet", assignment=replica.name, refusal=str(error))
            self._apply(replica.name, machine.Unjudged(error.refusal))
        else:
            self._log("verified", assignment=replica.name, passed=verdict.passed, why=verdict.reason)
            self._apply(replica.name, machine.Judged(verdict))

    async def _await_idle(self, replica: _Replica) -> None:
        while isinstance(replica.state, machine.Draining):
            await self._clock.sleep(Seconds(self._poll_s))
            if await self._gauges.sample() and self._gauges.in_flight(replica.name) == 0:
                self._apply(replica.name, machine.Idle())

    def _take(self, event: WorkerEvent) -> None:
        match event:
            case WorkerReady():
                self._apply(event.assignment, machine.Warmed(_service_of(event)))
            case WorkerPhase():
                if event.phase == Phase.WARMING:
                    self._apply(event.assignment, machine.Warmup())
            case WorkerFailed():
                self._apply(event.assignment, machine.LoadFailed(event.refusal))
            case WorkerExited():
                self._tell(event.refusal.code, event.assignment, str(event.refusal))
                self._apply(event.assignment, machine.Exited(event.own_fault, event.refusal))
            case WorkerAdopted():
                self._orphans[event.assignment] = event
                self._unsettled()

    def _observed(self, replica: _Replica, epoch_wall: Seconds) -> Observed:
        stats = self._gauges.worker(replica.name)
        return machine.observe(
            replica.state,
            epoch_wall=epoch_wall,
            in_flight=self._gauges.in_flight(replica.name),
            served=stats.served if stats else (),
            sessions=dict(self._gauges.front.sessions).get(replica.name, 0),
            latencies=stats.latencies if stats else (),
        )


def _witness(state: machine.State) -> Witness | None:
    asked = state.asked
    if not isinstance(state, machine.Ready) or not (asked.verifiers or asked.capture):
        return None
    return Witness(asked.id, asked.verifiers, asked.capture)


def _keeper(state: machine.State) -> Keeper | None:
    asked = state.asked
    if isinstance(state, machine.Draining | machine.Gone) or not asked.session:
        return None
    return Keeper(asked.id, asked.workload, asked.session, asked.handover, asked.givers)


def _service(ready: WorkerReady | None) -> machine.Service | None:
    return None if ready is None else _service_of(ready)


def _service_of(ready: WorkerReady) -> machine.Service:
    return machine.Service(ready.measured, ready.inputs, ready.outputs)
