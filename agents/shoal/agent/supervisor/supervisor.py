"""The supervisor: holds the link, keeps the desired set on disk, and makes it so.

Everything is decided in `core`; here events are taken, the desired set is persisted, then acted on, then reported.
It waits through the Clock and asyncio only, starts no thread and names no adapter: the simulator runs this very class.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shoal.agent.core import assignment as machine
from shoal.agent.core import partition, reconcile
from shoal.agent.core import receipt as receipts
from shoal.agent.core import session as sessions
from shoal.agent.core.backoff import delay
from shoal.agent.ports import (
    Batches,
    Cache,
    Clock,
    Driver,
    Front,
    FrontStats,
    Held,
    Journal,
    Link,
    LinkRefused,
    Log,
    Logs,
    Membership,
    Pace,
    Recordings,
    Session,
    Sightings,
    Signer,
    Spans,
    Workers,
)
from shoal.agent.supervisor.gauges import Gauges
from shoal.agent.supervisor.replicas import Replicas
from shoal.types.assignment import DesiredSet, Observed, Trust, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, Node, Reading
from shoal.types.link import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Hello,
    Lease,
    LogLines,
    LogsAsked,
    NodeEvent,
    NodeEvents,
    ProbeNow,
    Receipts,
    Refused,
    SpansAsked,
    SpansFound,
    ToAgent,
    Welcome,
)
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Elapsed, Seconds, Wall

EVENTS_KEPT = 256
"""Events that wait for a link; the oldest go first."""
QUESTIONS = 4
"""Of the log, or of a trace, that may be under way at once; who asks for more gets no answer, and asks again."""
STATUSES_REMEMBERED = 32
"""A lease that answers an older one extends nothing."""
WALL_STEP_S = 0.5
"""The wall clock moved against the elapsed one by more than this: times shown to people follow it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Timing of the supervisor. heartbeat_s: until a coordinator says its own."""

    limits: machine.Limits = field(default_factory=machine.Limits)
    heartbeat_s: float = 1.0
    full_every: int = 8
    """Statuses: what a lost one told is told again within so many heartbeats."""
    fatal_retry_s: float = 30.0
    """A session refused for good is tried again this seldom: an operator may have settled it meanwhile."""
    poll_s: float = 0.1
    """Between looks at a replica that drains, and at a front that starts."""
    retry_s: float = 0.5
    """Between attempts to persist or to configure the front."""
    collect_s: float = 60.0
    starts_first_s: float = 30.0
    """A measurement waits for replicas that start, for so long at most: at a boot they come to serve sooner, and what
    would be measured beside them is not what the device does."""


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
    batches: Mapping[str, Batches] = field(default_factory=dict)
    """By assignment."""


@dataclass(slots=True, eq=False)
class _Open:
    """The session that is open. heartbeat_s: as the coordinator last said it, in its welcome or with a desired set."""

    session: Session
    welcome: Welcome
    heartbeat_s: Seconds
    reporter: sessions.Reporter = field(default_factory=sessions.Reporter)
    receipts: tuple[SignedReceipt, ...] = ()
    reported: asyncio.Event = field(default_factory=asyncio.Event)
    """A status was sent; or it cannot be sent any more, and nothing was shown: `unshown`."""
    unshown: bool = False
    sent: dict[int, Elapsed] = field(default_factory=dict)
    """When the newest statuses were sent, by their sequence."""


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
        recordings: Recordings,
        signer: Signer,
        clock: Clock,
        nonce: Callable[[], str],
        log: Log,
        sightings: Sightings | None = None,
        membership: Membership | None = None,
        logs: Logs | None = None,
        spans: Spans | None = None,
    ) -> None:
        """node: all but its devices, which the drivers tell. nonce: a fresh secret each time. sightings: None for a
        run that is always the first. membership: None where certificates are not looked at. logs, spans:
        None where nothing is kept."""
        self._settings = settings
        self._node = node
        self._link = link
        self._workers = workers
        self._front = front
        self._journal = journal
        self._cache = cache
        self._signer = signer
        self._clock = clock
        self._nonce = nonce
        self._log = log

        self._desired: DesiredSet | None = None
        self._offered: DesiredSet | None = None
        self._receipts: tuple[SignedReceipt, ...] = ()
        self._probes: dict[str, Device] = {}
        self._probed = ""
        """The device that is measured now, or woken for it."""
        self._open: _Open | None = None
        self._sightings = sightings or _FirstRun()
        self._membership = membership or _Unquestioned()
        heard = self._sightings.heard()
        self._sight: partition.Sight = partition.CutOff(clock.now() if heard is None else heard)
        self._events: deque[NodeEvent] = deque(maxlen=EVENTS_KEPT)
        self._logs = logs
        self._spans = spans
        self._answers: deque[LogLines | SpansFound] = deque(maxlen=QUESTIONS)
        self._answering = 0
        self._epoch_wall = Seconds(clock.wall() - clock.now())
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

        self._changed = asyncio.Event()
        self._unreconciled = asyncio.Event()
        self._unconfigured = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._unprobed = asyncio.Event()
        self._unleased = asyncio.Event()
        self._leased_until = clock.now()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._gauges = Gauges(drivers, workers, front, log, self.tell, self._changed.set)
        self._replicas = Replicas(
            limits=settings.limits,
            poll_s=settings.poll_s,
            workers=workers,
            front=front,
            cache=cache,
            recordings=recordings,
            clock=clock,
            gauges=self._gauges,
            spawn=self._spawn,
            log=log,
            tell=self.tell,
            turned=self._phases_turned,
            unsettled=self._unreconciled.set,
        )
        self._snapshot = Snapshot(False, 0, None, (), (), (), self._gauges.front)

    @property
    def snapshot(self) -> Snapshot:
        """As of the last heartbeat."""
        return self._snapshot

    def device(self, name: str) -> Device | None:
        return next((device for device in self._node.devices if device.name == name), None)

    def pace(self, device: str) -> Pace | None:
        return self._gauges.pace(device)

    async def run(self) -> None:
        """Boots from what is on disk and alive, whether or not there is a link; returns after `stop`."""
        try:
            await self._boot()
            async with asyncio.TaskGroup() as group:
                self._group = group
                for loop in (
                    self._replicas.watch,
                    self._reconcile_forever,
                    self._configure_forever,
                    self._save_forever,
                    self._probe_forever,
                    self._collect_forever,
                    self._sample_forever,
                    self._lease_forever,
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
        self._node = replace(self._node, devices=(*self._node.devices, *self._gauges.discover()))
        self._desired = await self._journal.load()
        self._receipts = receipts.valid(await self._journal.load_receipts(), self._node.devices)
        self._probes = {device.name: device for device in receipts.to_probe(self._receipts, self._node.devices)}
        adopted = await self._replicas.adopt()
        version = self._desired.version if self._desired else None
        self._log(
            "booted",
            generation=version.generation if version else None,
            devices=len(self._node.devices),
            adopted=adopted,
        )
        self._unprobed.set()

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
                    self.tell(error.code, "desired set", str(error))
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
        self._replicas.settle(asked)
        wanted = tuple(
            each
            for each in asked.values()
            if not self._stopping.is_set()
            and partition.may_run(each, self._sight, now, running=each.id in self._replicas)
        )
        self._replicas.carry_out(reconcile.plan(wanted, self._replicas.states))
        for device in self._node.devices:
            if device.rest is not None:
                measured = device.name in self._probes or device.name == self._probed
                may_sleep = not (measured or self._replicas.busy(device.name))
                self._gauges.rest(device.name, may_sleep and device.name in self._desired.asleep)

    def _phases_turned(self) -> None:
        self._changed.set()
        self._unconfigured.set()

    # the front

    async def _configure_forever(self) -> None:
        while True:
            await self._unconfigured.wait()
            self._unconfigured.clear()
            desired = self._desired
            if desired is None and self._front.adopted:
                continue  # as its workers, it goes on until a coordinator says otherwise
            trust = desired.trust if desired and desired.trust else Trust()
            try:
                held = self._membership.held()
                await self._membership.adopt(trust)
                if self._membership.held() != held:
                    self._changed.set()
                await self._front.configure(
                    desired.routes if desired else (),
                    desired.credentials if desired else (),
                    self._replicas.serving(),
                    trust.revoked,
                    desired.peers if desired else (),
                    self._replicas.witnesses(),
                    self._replicas.keepers(),
                )
                self._unleased.set()  # it may have been started anew
                await self._gauges.sample()
            except ShoalError as error:
                self._log("front_not_configured", error=True, refusal=str(error))
                self._unconfigured.set()
                await self._clock.sleep(Seconds(self._settings.retry_s))

    async def _lease_forever(self) -> None:
        while True:
            await self._unleased.wait()
            self._unleased.clear()
            left = Seconds(self._leased_until - self._clock.now())
            if left > 0:
                try:
                    await self._front.lease(left)
                except ShoalError as error:
                    self._log("front_not_leased", error=True, refusal=str(error))

    def _extend(self, link: _Open, lease: Lease) -> None:
        """Counted from when it was asked for: whoever grants it counts from later."""
        asked_at = link.sent.get(lease.sequence)
        if asked_at is not None:
            self._leased_until = Elapsed(max(self._leased_until, asked_at + lease.seconds))
            self._unleased.set()

    # what is, and the report of it

    async def _beat_forever(self) -> None:
        while True:
            await _wait(self._changed, self._heartbeat())
            self._changed.clear()
            self._snapshot = self._observe()
            if self._open is not None:
                await self._report(self._open, self._snapshot)

    def _heartbeat(self) -> Seconds:
        return self._open.heartbeat_s if self._open else Seconds(self._settings.heartbeat_s)

    async def _sample_forever(self) -> None:
        """Apart from the beat: a worker that does not answer must not make the node look silent."""
        while True:
            await self._gauges.sample()
            pause = self._heartbeat() if self._gauges.front.ready else Seconds(self._settings.poll_s)
            await self._clock.sleep(pause)

    def _observe(self) -> Snapshot:
        offset = Seconds(self._clock.wall() - self._clock.now())
        if abs(offset - self._epoch_wall) > WALL_STEP_S:
            self._epoch_wall = offset
        readings = [self._gauges.read(device.name) for device in self._node.devices]
        for name in self._gauges.back():
            self._probes |= {device.name: device for device in self._node.devices if device.name == name}
            self._unprobed.set()
        observed = self._replicas.observed(self._epoch_wall)
        stats = {each.assignment: self._gauges.worker(each.assignment) for each in observed}
        return Snapshot(
            linked=self._open is not None,
            epoch=self._open.welcome.epoch if self._open else 0,
            version=self._desired.version if self._desired else None,
            devices=self._node.devices,
            observed=observed,
            readings=tuple(reading for reading in readings if reading is not None),
            front=self._gauges.front,
            batches={name: each.batches for name, each in stats.items() if each is not None},
        )

    async def _report(self, link: _Open, snapshot: Snapshot) -> None:
        held = self._membership.held()
        moment = sessions.Report(
            node=self._node.name,
            epoch=link.welcome.epoch,
            version=snapshot.version,
            observed=snapshot.observed,
            readings=snapshot.readings,
            ingress=snapshot.front.ingress,
            crossings=snapshot.front.crossings,
            taken_at=self._clock.wall(),
            front_ready=snapshot.front.ready,
            serial=held.serial,
            roots=held.roots,
            alone=bool(self._replicas.keepers()),
        )
        link.reporter, status = sessions.report(link.reporter, moment, full_every=self._settings.full_every)
        link.sent[status.sequence] = self._clock.now()
        link.sent.pop(status.sequence - STATUSES_REMEMBERED, None)
        try:
            if link.receipts != self._receipts:
                link.receipts = self._receipts
                # Signed now: the key that signed them when they were measured may have been followed by another.
                signed = tuple(self._signer.sign_receipt(each.receipt) for each in link.receipts)
                await link.session.send(Receipts(signed))
            await link.session.send(status)
            link.reported.set()
            if self._events:
                events, self._events = tuple(self._events), deque(maxlen=EVENTS_KEPT)
                await link.session.send(NodeEvents(events))
            while self._answers:
                await link.session.send(self._answers.popleft())
        except ShoalError:
            link.unshown = link.unshown or not link.reported.is_set()
            link.reported.set()
            await link.session.close()  # the receiving side notices and calls again

    def tell(self, code: str, subject: str, message: str) -> None:
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
                protocol=OLDEST_PROTOCOL,
                newest=PROTOCOL,
                sent_at=self._clock.wall(),
                proof=self._desired.proof if self._desired else b"",
            )
            opened_at: Elapsed | None = None
            try:
                session = await self._link.connect(hello)
            except LinkRefused as error:
                ended = error.refused
            except ShoalError as error:
                ended = Refused(error.refusal, fatal=False)
            else:
                opened_at = self._clock.now()
                ended = await self._converse(session, hello)
            self._lose_sight(ended)
            was_steady = opened_at is not None and self._clock.now() - opened_at >= sessions.STEADY_S
            attempt = 0 if was_steady else attempt + 1
            wait = sessions.reconnect_after(self._node.name, attempt)
            await self._clock.sleep(Seconds(self._settings.fatal_retry_s) if ended.fatal else wait)

    def _lose_sight(self, ended: Refused) -> None:
        self._log("link_down", code=ended.refusal.code, found=ended.refusal.found, remedy=ended.refusal.remedy)
        self._membership.doubt(ended.refusal)
        if ended.refusal.code is Code.CERT_REVOKED:
            self._leave()
        if isinstance(self._sight, partition.Linked):
            self._sight = partition.CutOff(self._clock.now())
            self._sightings.cut_off()
            self._unreconciled.set()

    def _leave(self) -> None:
        """The region said that this node is none of its members any more, which is no blindness: it serves nothing."""
        newest = self._offered or self._desired
        if newest is not None and (newest.assignments or newest.routes):
            self._offered = replace(newest, assignments=(), routes=(), pins=(), credentials=(), peers=())
            self._unsaved.set()

    async def _converse(self, session: Session, hello: Hello) -> Refused:
        """One session from its welcome to its end, and why it ended."""
        link = _Open(session, session.welcome, session.welcome.heartbeat_s)
        refusal = sessions.check_welcome(hello, link.welcome)
        if refusal is not None:
            await session.close()
            return Refused(refusal, fatal=False)
        skew = sessions.skewed(link.welcome, self._clock.wall())
        if skew is not None:
            self.tell(Code.CLOCK_SKEW, self._node.name, f"the coordinator's clock differs by {skew:.0f}s")
        self._log("link_up", epoch=link.welcome.epoch, history=link.welcome.history)
        self._open, self._sight = link, partition.Linked()
        self._sightings.linked(link.welcome.coordinator_time)
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
                if not link.unshown:
                    self._judge(link, message)
            case ProbeNow():
                named = {device.name: device for device in self._node.devices}
                chosen = message.devices or tuple(named)
                self._probes |= {name: named[name] for name in chosen if name in named}
                self._unprobed.set()
            case Lease():
                self._extend(link, message)
            case LogsAsked():
                if self._logs is not None:
                    self._answer(partial(self._logs.read, message))
            case SpansAsked():
                if self._spans is not None:
                    self._answer(partial(self._spans.spans, message))
            case Refused():
                self._log("message_refused", error=True, refusal=str(message.refusal))
            case Welcome():
                self._log("unexpected_welcome", error=True)

    def _answer(self, read: Callable[[], Awaitable[LogLines | SpansFound]]) -> None:
        """Told with the next status, which comes at once; not at all where it cannot be read."""

        async def answer() -> None:
            try:
                self._answers.append(await read())
            except ShoalError as error:
                self._log("question_not_answered", error=True, refusal=str(error))
            finally:
                self._answering -= 1
            self._changed.set()

        if self._answering < QUESTIONS:
            self._answering += 1
            self._spawn(answer(), "answer")

    def _judge(self, link: _Open, offered: DesiredSet) -> None:
        newest = self._offered or self._desired
        match sessions.judge(newest, offered, node=self._node.name, history=link.welcome.history):
            case sessions.Accept(desired):
                self._offered = desired
                self._unsaved.set()
                self._beat_every(link, desired.heartbeat_s)
            case sessions.Held():
                self._beat_every(link, offered.heartbeat_s)
            case Refusal() as refusal:
                self.tell(refusal.code, "desired set", str(refusal))

    def _beat_every(self, link: _Open, seconds: Seconds) -> None:
        """From now on, before the set is on disk: whoever counts the beats does so already."""
        if link.heartbeat_s != seconds:
            link.heartbeat_s = seconds
            self._changed.set()

    # receipts and the cache

    async def _probe_forever(self) -> None:
        attempts: dict[str, int] = {}
        while True:
            await self._unprobed.wait()
            if not self._probes:
                self._unprobed.clear()
                continue
            await self._starts_first()
            name, device = next(iter(self._probes.items()))
            del self._probes[name]
            self._probed = name
            while (wakes_in := self._gauges.rest(name, False)) > 0:
                await self._clock.sleep(wakes_in)
            try:
                receipt = replace(await self._workers.probe(device), node=self._node.name)
                if (refusal := receipts.unsteady(receipt)) is not None:
                    raise ShoalError(refusal)
                signed = self._signer.sign_receipt(receipt)
                self._gauges.measured(name)
                self._receipts = receipts.with_new(self._receipts, signed)
                await self._journal.save_receipts(self._receipts)
            except ShoalError as error:
                self.tell(error.code, name, f"no capability receipt: {error}")
                self._probes[name] = device
                await self._clock.sleep(delay(name, attempts.get(name, 0), base_s=5.0, cap_s=300.0))
                attempts[name] = attempts.get(name, 0) + 1
            else:
                self._log("probed", device=name, seconds=receipt.probe_s)
                self._probed = ""
                self._changed.set()
                self._unreconciled.set()

    async def _starts_first(self) -> None:
        until = self._clock.now() + self._settings.starts_first_s
        while self._replicas.starting() and self._clock.now() < until:
            await self._clock.sleep(Seconds(self._settings.poll_s))

    async def _collect_forever(self) -> None:
        while True:
            if self._desired is not None:
                for digest in await self._cache.collect(reconcile.pinned(self._desired, self._replicas.states)):
                    self._log("collected", digest=digest)
            await self._clock.sleep(Seconds(self._settings.collect_s))

    # the end

    async def _wind_down(self) -> None:
        self._log("stopping")
        self._unreconciled.set()
        try:
            async with asyncio.timeout(self._settings.limits.drain_s + 1.0):
                while any(not isinstance(state, machine.Gone) for state in self._replicas.states.values()):
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


class _FirstRun:
    """Sightings of a node without a past."""

    def heard(self) -> None:
        return None

    def linked(self, coordinator_time: Wall) -> None:
        pass

    def cut_off(self) -> None:
        pass


class _Unquestioned:
    """Membership of a node whose certificate nobody looks at."""

    def held(self) -> Held:
        return Held()

    async def adopt(self, trust: Trust) -> None:
        pass

    def doubt(self, refusal: Refusal) -> None:
        pass


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event or, where there is one, the time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
