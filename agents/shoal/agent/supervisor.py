"""The supervisor: holds the link, keeps the desired set on disk, and makes it so.

Everything is decided in `core`; here events are taken, the desired set is persisted, then acted on, then reported.
It waits through the Clock and asyncio only, starts no thread and names no adapter: the simulator runs this very class.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.agent.core import admission, partition, reconcile
from shoal.agent.core import assignment as machine
from shoal.agent.core import receipt as receipts
from shoal.agent.core import session as sessions
from shoal.agent.core.backoff import delay
from shoal.agent.ports import (
    Cache,
    Clock,
    Driver,
    Front,
    FrontStats,
    Journal,
    Link,
    LinkRefused,
    LocalWorker,
    Log,
    Pace,
    Session,
    Signer,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    Workers,
    WorkerStats,
)
from shoal.types.assignment import DesiredSet, Observed, Phase, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, Node, Reading
from shoal.types.link import Hello, NodeEvent, NodeEvents, ProbeNow, Receipts, Refused, ToAgent, Welcome
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Elapsed, Seconds

EVENTS_KEPT = 256
"""Events that wait for a link; the oldest go first."""
WAKE_LEAST_S = 0.001
WALL_STEP_S = 0.5
"""The wall clock moved against the elapsed one by more than this: times shown to people follow it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Timing of the supervisor. heartbeat_s: until a coordinator says its own."""

    limits: machine.Limits = field(default_factory=machine.Limits)
    heartbeat_s: float = 1.0
    full_every: int = 30
    fatal_retry_s: float = 30.0
    """A session refused for good is tried again this seldom: an operator may have settled it meanwhile."""
    poll_s: float = 0.1
    """Between looks at a replica that drains, and at a front that starts."""
    retry_s: float = 0.5
    """Between attempts to persist or to configure the front."""
    collect_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The node at one moment: what a status and the metrics are made of."""

    linked: bool
    epoch: int
    version: Version | None
    devices: tuple[Device, ...]
    observed: tuple[Observed, ...]
    readings: tuple[Reading, ...]
    front: FrontStats


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

    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        found = (self.performing, self.fetching, self.waking, self.draining)
        return tuple(task for task in found if task is not None)


@dataclass(slots=True, eq=False)
class _Open:
    """The session that is open."""

    session: Session
    welcome: Welcome
    reporter: sessions.Reporter = field(default_factory=sessions.Reporter)
    receipts: tuple[SignedReceipt, ...] = ()
    reported: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """`run` until `stop`. A run that is cancelled or killed leaves front and workers as they are."""

    def __init__(
        self,
        *,
        settings: Settings,
        node: Node,
        drivers: Sequence[Driver],
        link: Link,
        workers: Workers,
        front: Front,
        journal: Journal,
        cache: Cache,
        signer: Signer,
        clock: Clock,
        nonce: Callable[[], str],
        log: Log,
    ) -> None:
        """node: all but its devices, which the drivers tell. nonce: a fresh secret each time."""
        self._settings = settings
        self._node = node
        self._drivers = drivers
        self._link = link
        self._workers = workers
        self._front = front
        self._journal = journal
        self._cache = cache
        self._signer = signer
        self._clock = clock
        self._nonce = nonce
        self._log = log

        self._by_device: dict[str, Driver] = {}
        self._silent: set[str] = set()
        self._desired: DesiredSet | None = None
        self._offered: DesiredSet | None = None
        self._replicas: dict[str, _Replica] = {}
        self._orphans: dict[str, WorkerAdopted] = {}
        self._receipts: tuple[SignedReceipt, ...] = ()
        self._probes: dict[str, Device] = {}
        self._open: _Open | None = None
        self._sight: partition.Sight = partition.CutOff(clock.now())
        self._events: deque[NodeEvent] = deque(maxlen=EVENTS_KEPT)
        self._worker_stats: dict[str, WorkerStats] = {}
        self._front_stats = FrontStats(ready=False, ingress=(), in_flight=())
        self._epoch_wall = Seconds(clock.wall() - clock.now())
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

        self._changed = asyncio.Event()
        self._unreconciled = asyncio.Event()
        self._unconfigured = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._unprobed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._snapshot = Snapshot(False, 0, None, (), (), (), self._front_stats)

    @property
    def snapshot(self) -> Snapshot:
        """As of the last heartbeat."""
        return self._snapshot

    def device(self, name: str) -> Device | None:
        return next((device for device in self._node.devices if device.name == name), None)

    def pace(self, device: str) -> Pace | None:
        driver = self._by_device.get(device)
        return driver.pace(device) if driver else None

    async def run(self) -> None:
        """Boots from what is on disk and alive, whether or not there is a link; returns after `stop`."""
        try:
            await self._boot()
            async with asyncio.TaskGroup() as group:
                self._group = group
                for loop in (
                    self._watch_workers,
                    self._reconcile_forever,
                    self._configure_forever,
                    self._save_forever,
                    self._probe_forever,
                    self._collect_forever,
                    self._sample_forever,
                    self._beat_forever,
                    self._link_forever,
                ):
                    self._spawn(loop(), loop.__name__)
                await self._stopping.wait()
                await self._wind_down()
                for task in self._tasks:
                    task.cancel()
        finally:
            self._ended.set()

    def request_stop(self) -> None:
        """Drain every replica, then end front and workers; `run` returns when that is done."""
        self._stopping.set()

    async def stop(self) -> None:
        """`request_stop`, and wait for it."""
        self.request_stop()
        await self._ended.wait()

    # boot

    async def _boot(self) -> None:
        self._discover()
        self._desired = await self._journal.load()
        self._receipts = receipts.valid(await self._journal.load_receipts(), self._node.devices)
        self._probes = {device.name: device for device in receipts.to_probe(self._receipts, self._node.devices)}
        self._orphans = {each.assignment: each for each in await self._workers.adopt()}
        version = self._desired.version if self._desired else None
        self._log(
            "booted",
            generation=version.generation if version else None,
            devices=len(self._node.devices),
            adopted=len(self._orphans),
        )
        self._unprobed.set()

    def _discover(self) -> None:
        for driver in self._drivers:
            for device in driver.discover():
                if device.name in self._by_device:
                    self._tell(Code.NAME_DUPLICATE, device.name, "two drivers offer a device of this name")
                    continue
                self._by_device[device.name] = driver
                self._node = replace(self._node, devices=(*self._node.devices, device))

    # the desired set: persisted, then acted on

    async def _save_forever(self) -> None:
        refused: DesiredSet | None = None
        while True:
            await self._unsaved.wait()
            offered = self._offered
            if offered is None:
                self._unsaved.clear()
                continue
            try:
                await self._journal.save(offered)
            except ShoalError as error:
                if offered is not refused:
                    self._tell(error.code, "desired set", str(error))
                refused = offered
                await self._clock.sleep(Seconds(self._settings.retry_s))
                continue
            self._desired = offered
            if self._offered is offered:
                self._offered = None
            self._log("desired_accepted", generation=offered.version.generation, history=offered.version.history)
            for event in (self._unreconciled, self._unconfigured, self._changed):
                event.set()

    async def _reconcile_forever(self) -> None:
        self._reconcile()
        # Only now: an adopted front goes on with the workers it knows until they count here too.
        self._unconfigured.set()
        while True:
            ends_at = self._cut_off_ends_at()
            wait = None if ends_at is None else max(0.0, ends_at - self._clock.now())
            await _wait(self._unreconciled, wait)
            self._unreconciled.clear()
            self._reconcile()

    def _cut_off_ends_at(self) -> Elapsed | None:
        if self._desired is None:
            return None
        return partition.ends_at(self._desired.assignments, self._sight, self._clock.now())

    def _reconcile(self) -> None:
        if self._desired is None:
            return  # whatever runs goes on until a coordinator says otherwise
        now = self._clock.now()
        asked = {each.id: each for each in self._desired.assignments}
        for name in tuple(self._orphans):
            orphan = self._orphans.pop(name)
            if name in asked and name not in self._replicas:
                self._keep(name, *machine.adopt(asked[name], _service(orphan.ready), now, self._settings.limits))
            elif name not in self._replicas:
                self._spawn(self._workers.stop(name), f"stop {name}")
        wanted = tuple(
            each
            for each in asked.values()
            if not self._stopping.is_set()
            and partition.may_run(each, self._sight, now, running=each.id in self._replicas)
        )
        plan = reconcile.plan(wanted, {name: replica.state for name, replica in self._replicas.items()})
        for each in plan.begin:
            self._keep(each.id, *machine.begin(each, now, self._settings.limits))
        for each in plan.resume:
            self._apply(each.id, machine.Resume(each))
        for name in plan.drain:
            self._apply(name, machine.Drain())
        for name in plan.forget:
            if self._replicas[name].unperformed:
                continue  # its worker is still to be stopped; then this is looked at again
            for task in self._replicas.pop(name).tasks():
                task.cancel()
            self._changed.set()

    # one replica

    def _keep(self, name: str, state: machine.State, effects: tuple[machine.Effect, ...]) -> None:
        replica = self._replicas[name] = _Replica(name, state)
        replica.performing = self._spawn(self._perform_forever(replica), f"perform {name}")
        self._entered(replica, None, effects)

    def _apply(self, name: str, event: machine.Event) -> None:
        replica = self._replicas.get(name)
        if replica is None:
            return
        before = replica.state
        replica.state, effects = machine.step(before, event, self._clock.now(), self._settings.limits)
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
            return
        self._changed.set()
        self._unconfigured.set()
        if isinstance(state, machine.Gone):
            self._unreconciled.set()
        self._log("phase", assignment=replica.name, workload=str(state.asked.workload), phase=machine.phase(state))
        if isinstance(state, machine.Failed | machine.Poisoned):
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
                self._unreconciled.set()

    async def _perform(self, replica: _Replica, effect: machine.Effect) -> None:
        asked = replica.state.asked
        match effect:
            case machine.Fetch():
                replica.fetching = self._spawn(self._fetch(replica), f"fetch {replica.name}")
            case machine.StopFetch():
                if replica.fetching is not None:
                    replica.fetching.cancel()
            case machine.StartWorker(path):
                states = (each.state for each in self._replicas.values())
                refusal = admission.admit(asked, self._read(asked.device), states)
                if refusal is not None:
                    raise ShoalError(refusal)
                await self._workers.start(asked, path)
            case machine.StopWorker():
                await self._workers.stop(replica.name)
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
            path = await self._cache.ensure(asked.model, asked.model_bytes)
        except ShoalError as error:
            self._apply(replica.name, machine.FetchFailed(error.refusal))
        else:
            self._apply(replica.name, machine.Fetched(path))

    async def _await_idle(self, replica: _Replica) -> None:
        while isinstance(replica.state, machine.Draining):
            await self._clock.sleep(Seconds(self._settings.poll_s))
            if await self._sample() and self._in_flight(replica.name) == 0:
                self._apply(replica.name, machine.Idle())

    async def _watch_workers(self) -> None:
        async for event in self._workers.events():
            self._take_from_worker(event)

    def _take_from_worker(self, event: WorkerEvent) -> None:
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
                self._unreconciled.set()

    # the front

    async def _configure_forever(self) -> None:
        while True:
            await self._unconfigured.wait()
            self._unconfigured.clear()
            desired = self._desired
            try:
                await self._front.configure(
                    desired.routes if desired else (), desired.credentials if desired else (), self._serving()
                )
                await self._sample()
            except ShoalError as error:
                self._log("front_not_configured", error=True, refusal=str(error))
                self._unconfigured.set()
                await self._clock.sleep(Seconds(self._settings.retry_s))

    def _serving(self) -> tuple[LocalWorker, ...]:
        """Ready and not draining: no request reaches a replica that has not passed its warm-up."""
        ready = (name for name, replica in self._replicas.items() if isinstance(replica.state, machine.Ready))
        return tuple(local for name in ready if (local := self._workers.local(name)) is not None)

    # what is, and the report of it

    async def _beat_forever(self) -> None:
        while True:
            await _wait(self._changed, self._heartbeat())
            self._changed.clear()
            self._snapshot = self._observe()
            if self._open is not None:
                await self._report(self._open, self._snapshot)

    def _heartbeat(self) -> Seconds:
        return self._open.welcome.heartbeat_s if self._open else Seconds(self._settings.heartbeat_s)

    async def _sample_forever(self) -> None:
        """Apart from the beat: a worker that does not answer must not make the node look silent."""
        while True:
            await self._sample()
            pause = self._heartbeat() if self._front_stats.ready else Seconds(self._settings.poll_s)
            await self._clock.sleep(pause)

    async def _sample(self) -> bool:
        """Asks front and workers for their counters; False when one did not answer, and its last ones stand."""
        try:
            workers, front = await self._workers.stats(), await self._front.stats()
        except ShoalError:
            workers, front = None, replace(self._front_stats, ready=False)
        if workers is not None:
            self._worker_stats = {each.assignment: each for each in workers}
        if front.ready != self._front_stats.ready:
            self._log("front_ready" if front.ready else "front_down", error=not front.ready)
            self._changed.set()
        self._front_stats = front
        return workers is not None

    def _in_flight(self, name: str) -> int:
        stats = self._worker_stats.get(name)
        return max(stats.in_flight if stats else 0, dict(self._front_stats.in_flight).get(name, 0))

    def _observe(self) -> Snapshot:
        offset = Seconds(self._clock.wall() - self._clock.now())
        if abs(offset - self._epoch_wall) > WALL_STEP_S:
            self._epoch_wall = offset
        readings = (self._read(device.name) for device in self._node.devices)
        return Snapshot(
            linked=self._open is not None,
            epoch=self._open.welcome.epoch if self._open else 0,
            version=self._desired.version if self._desired else None,
            devices=self._node.devices,
            observed=tuple(self._observed(replica) for replica in self._replicas.values()),
            readings=tuple(reading for reading in readings if reading is not None),
            front=self._front_stats,
        )

    def _observed(self, replica: _Replica) -> Observed:
        stats = self._worker_stats.get(replica.name)
        return machine.observe(
            replica.state,
            epoch_wall=self._epoch_wall,
            in_flight=self._in_flight(replica.name),
            served=stats.served if stats else (),
        )

    def _read(self, device: str) -> Reading | None:
        driver = self._by_device.get(device)
        if driver is None:
            return None
        try:
            reading = driver.read(device)
        except ShoalError as error:
            if device not in self._silent:
                self._silent.add(device)
                self._tell(error.code, device, str(error))
            return None
        self._silent.discard(device)
        return reading

    async def _report(self, link: _Open, snapshot: Snapshot) -> None:
        moment = sessions.Report(
            node=self._node.name,
            epoch=link.welcome.epoch,
            version=snapshot.version,
            observed=snapshot.observed,
            readings=snapshot.readings,
            ingress=snapshot.front.ingress,
            taken_at=self._clock.wall(),
            front_ready=snapshot.front.ready,
        )
        link.reporter, status = sessions.report(link.reporter, moment, full_every=self._settings.full_every)
        try:
            if link.receipts != self._receipts:
                link.receipts = self._receipts
                await link.session.send(Receipts(link.receipts))
            await link.session.send(status)
            link.reported.set()
            if self._events:
                events, self._events = tuple(self._events), deque(maxlen=EVENTS_KEPT)
                await link.session.send(NodeEvents(events))
        except ShoalError:
            await link.session.close()  # the receiving side notices and calls again

    def _tell(self, code: str, subject: str, message: str) -> None:
        """To the log now, to the region's events when there is a link. A repeated one is not queued twice."""
        self._log("event", error=True, code=code, subject=subject, message=message)
        if not any((event.code, event.subject) == (code, subject) for event in self._events):
            self._events.append(NodeEvent(code, subject, message, self._clock.wall()))

    # the link

    async def _link_forever(self) -> None:
        attempt = 0
        while True:
            hello = Hello(
                node=self._node,
                nonce=self._nonce(),
                holds=self._desired.version if self._desired else None,
                protocol=sessions.PROTOCOL,
                sent_at=self._clock.wall(),
            )
            called_at = self._clock.now()
            try:
                session = await self._link.connect(hello)
            except LinkRefused as error:
                ended = error.refused
            except ShoalError as error:
                ended = Refused(error.refusal, fatal=False)
            else:
                ended = await self._converse(session, hello)
            self._lose_sight(ended)
            attempt = 0 if self._clock.now() - called_at >= sessions.STEADY_S else attempt + 1
            wait = sessions.reconnect_after(self._node.name, attempt)
            await self._clock.sleep(Seconds(self._settings.fatal_retry_s) if ended.fatal else wait)

    def _lose_sight(self, ended: Refused) -> None:
        self._log("link_down", code=ended.refusal.code, found=ended.refusal.found, remedy=ended.refusal.remedy)
        if isinstance(self._sight, partition.Linked):
            self._sight = partition.CutOff(self._clock.now())
            self._unreconciled.set()

    async def _converse(self, session: Session, hello: Hello) -> Refused:
        """One session from its welcome to its end, and why it ended."""
        link = _Open(session, session.welcome)
        refusal = sessions.check_welcome(hello, link.welcome)
        if refusal is not None:
            await session.close()
            return Refused(refusal, fatal=False)
        skew = sessions.skewed(link.welcome, self._clock.wall())
        if skew is not None:
            self._tell(Code.CLOCK_SKEW, self._node.name, f"the coordinator's clock differs by {skew:.0f}s")
        self._log("link_up", epoch=link.welcome.epoch, history=link.welcome.history)
        self._open, self._sight = link, partition.Linked()
        self._changed.set()
        self._unreconciled.set()
        try:
            while True:
                message = await session.receive()
                if isinstance(message, Refused) and message.fatal:
                    return message
                await self._take_from_coordinator(link, message)
        except ShoalError as error:
            return Refused(error.refusal, fatal=False)
        finally:
            self._open = None
            await session.close()

    async def _take_from_coordinator(self, link: _Open, message: ToAgent) -> None:
        match message:
            case DesiredSet():
                await link.reported.wait()  # a new history is accepted only after it was shown what runs here
                self._judge(link, message)
            case ProbeNow():
                named = {device.name: device for device in self._node.devices}
                chosen = message.devices or tuple(named)
                self._probes |= {name: named[name] for name in chosen if name in named}
                self._unprobed.set()
            case Refused():
                self._log("message_refused", error=True, refusal=str(message.refusal))
            case Welcome():
                self._log("unexpected_welcome", error=True)

    def _judge(self, link: _Open, offered: DesiredSet) -> None:
        newest = self._offered or self._desired
        match sessions.judge(newest, offered, node=self._node.name, history=link.welcome.history):
            case sessions.Accept(desired):
                self._offered = desired
                self._unsaved.set()
            case sessions.Held():
                pass
            case Refusal() as refusal:
                self._tell(refusal.code, "desired set", str(refusal))

    # receipts and the cache

    async def _probe_forever(self) -> None:
        attempts: dict[str, int] = {}
        while True:
            await self._unprobed.wait()
            if not self._probes:
                self._unprobed.clear()
                continue
            name, device = next(iter(self._probes.items()))
            del self._probes[name]
            try:
                receipt = replace(await self._workers.probe(device), node=self._node.name)
                signed = self._signer.sign_receipt(receipt)
                self._receipts = receipts.with_new(self._receipts, signed)
                await self._journal.save_receipts(self._receipts)
            except ShoalError as error:
                self._tell(error.code, name, f"no capability receipt: {error}")
                self._probes[name] = device
                await self._clock.sleep(delay(name, attempts.get(name, 0), base_s=5.0, cap_s=300.0))
                attempts[name] = attempts.get(name, 0) + 1
            else:
                self._log("probed", device=name, seconds=receipt.probe_s)
                self._changed.set()

    async def _collect_forever(self) -> None:
        while True:
            if self._desired is not None:
                states = {name: replica.state for name, replica in self._replicas.items()}
                for digest in await self._cache.collect(reconcile.pinned(self._desired, states)):
                    self._log("collected", digest=digest)
            await self._clock.sleep(Seconds(self._settings.collect_s))

    # the end

    async def _wind_down(self) -> None:
        self._log("stopping")
        self._unreconciled.set()
        try:
            async with asyncio.timeout(self._settings.limits.drain_s + 1.0):
                while any(not isinstance(each.state, machine.Gone) for each in self._replicas.values()):
                    await self._clock.sleep(Seconds(self._settings.poll_s))
        except TimeoutError:
            self._log("drain_incomplete", error=True)
        await self._front.close(keep=False)
        await self._workers.close(keep=False)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._group is not None, "tasks live while the supervisor runs"
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _service(ready: WorkerReady | None) -> machine.Service | None:
    return None if ready is None else _service_of(ready)


def _service_of(ready: WorkerReady) -> machine.Service:
    return machine.Service(ready.measured, ready.inputs, ready.outputs)


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event or, where there is one, the time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
