"""The supervisor: keeps the link, persists the desired set, and makes the node match it.

All decisions are made in `core`. This module takes events, persists the desired set, acts on it and reports, in that
order. It waits only through the Clock and asyncio, starts no thread and names no adapter, because the simulator runs
this very class.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shoal.agent.core import link_session, partition, reconcile
from shoal.agent.core.assignment import states
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.ports import LinkRefused, LinkSession
from shoal.agent.supervisor.device_probes import DeviceProbes
from shoal.agent.supervisor.front_updates import FrontUpdates
from shoal.agent.supervisor.node_monitor import NodeMonitor
from shoal.agent.supervisor.open_session import OpenSession
from shoal.agent.supervisor.outbox import Outbox
from shoal.agent.supervisor.replicas import ReplicaManager
from shoal.agent.supervisor.route_subscriptions import RouteSubscriptions
from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.agent.supervisor.status_reporter import NodeSnapshot, StatusReporter
from shoal.agent.supervisor.supervisor_ports import SupervisorPorts
from shoal.host.event_wait import wait_or_timeout
from shoal.types.assignment import DesiredSet, Forwarding
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, Node, Role
from shoal.types.link import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Hello,
    Lease,
    LogsAsked,
    ProbeNow,
    Refused,
    SpansAsked,
    ToAgent,
    Welcome,
)
from shoal.types.units import Elapsed, Seconds

ASKS_APART_S: Final = Seconds(0.1)
"""What a front's clients ask for within this time is reported at once. A choice: so they make a node send ten statuses
a second at most, a fifth of what a coordinator reads of it."""


class Supervisor:
    """Runs a node: `run` until `stop`. A run that is cancelled or killed leaves front and workers running."""

    def __init__(self, settings: SupervisorSettings, node: Node, ports: SupervisorPorts) -> None:
        """`node` comes without its devices, which the drivers discover."""
        self._settings = settings
        self._node = node
        self._link = ports.link
        self._workers = ports.workers
        self._front = ports.front
        self._journal = ports.journal
        self._cache = ports.cache
        self._clock = ports.clock
        self._nonce = ports.nonce
        self._log = ports.log
        self._contact = ports.contact
        self._membership = ports.membership
        self._logs = ports.logs
        self._spans = ports.spans
        self._wait_devices = ports.wait_devices

        self._has_booted = False
        self._desired: DesiredSet | None = None
        self._unsaved_desired: DesiredSet | None = None
        self._session: OpenSession | None = None
        heard = self._contact.last_contact()
        self._link_state: partition.LinkState = partition.CutOff(self._clock.now() if heard is None else heard)
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

        self._report_due = asyncio.Event()
        self._reconcile_due = asyncio.Event()
        self._save_due = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._outbox = Outbox(ports.clock, ports.log, self._spawn, self._report_due.set)
        self._monitor = NodeMonitor(
            ports.drivers,
            ports.workers,
            ports.front,
            ports.clock,
            ports.log,
            self._outbox.report_event,
            self._report_due.set,
        )
        self._replicas = ReplicaManager(
            settings,
            ports,
            self._monitor,
            spawn=self._spawn,
            report_event=self._outbox.report_event,
            on_phase_change=self._on_phase_change,
            request_reconcile=self._reconcile_due.set,
            on_operators=lambda device, taken: self._probes.on_operators(device, taken),
        )
        self._front_updates = FrontUpdates(
            settings,
            ports,
            self._replicas,
            self._monitor,
            desired=lambda: self._desired,
            on_trust_change=self._report_due.set,
        )
        self._subscriptions = RouteSubscriptions(ports.clock, self._report_due.set)
        self._probes = DeviceProbes(
            settings,
            ports,
            self._monitor,
            is_any_starting=self._replicas.is_any_starting,
            report_event=self._outbox.report_event,
            on_receipt=self._on_receipt,
        )
        self._reporter = StatusReporter(
            settings,
            ports,
            self._monitor,
            self._replicas,
            self._probes,
            self._outbox,
            self._subscriptions,
            on_signed=self._report_due.set,
        )

    @property
    def snapshot(self) -> NodeSnapshot:
        """State of the node at the last heartbeat."""
        return self._reporter.snapshot

    def device(self, name: str) -> Device | None:
        return next((device for device in self._node.devices if device.name == name), None)

    def access(self, device: str) -> DeviceAccess:
        return self._monitor.access(device)

    @property
    def device_files(self) -> tuple[str, ...]:
        """Device files of all devices: a spare worker is started before it is known for which."""
        return tuple(sorted({file for each in self._node.devices for file in self._monitor.access(each.name).files}))

    async def run(self) -> None:
        """Start from what is on disk and what still runs, with or without a link. Returns after `stop`."""
        try:
            await self._boot()
            async with asyncio.TaskGroup() as group:
                self._group = group
                for loop in (
                    self._replicas.watch_workers,
                    self._replicas.wake_requested,
                    self._reconcile_forever,
                    self._front_updates.configure_forever,
                    self._save_forever,
                    self._probes.probe_forever,
                    self._collect_forever,
                    self._sample_forever,
                    self._front_updates.lease_forever,
                    self._heartbeat_forever,
                    self._link_forever,
                ):
                    self._spawn(loop(), loop.__name__)
                await self._stopping.wait()
                await self._drain_and_close()
                for task in self._tasks:
                    task.cancel()
        finally:
            self._stopped.set()

    def report_event(self, code: str, subject: str, message: str) -> None:
        """As `Outbox.report_event`, for what runs beside the supervisor."""
        self._outbox.report_event(code, subject, message)

    def on_devices_found(self) -> None:
        """A driver has found devices that it did not find before. The region hears of them in a new session."""
        if not self._has_booted:
            return  # the boot asks all drivers
        known = {each.name: each for each in (*self._node.devices, *self._monitor.discover())}
        self._node = replace(self._node, devices=tuple(known.values()))
        self._probes.on_devices_found(self._node)
        if self._session is not None:
            self._spawn(self._session.session.close(), "close the session")

    def request_stop(self) -> None:
        """Drain every replica, then end front and workers. `run` returns when that is done."""
        self._stopping.set()

    async def stop(self) -> None:
        """Call `request_stop` and wait until it is done."""
        self.request_stop()
        await self._stopped.wait()

    # boot

    async def _boot(self) -> None:
        self._desired = await self._journal.load()
        if self._node.role is Role.AGENT:
            self._subscriptions.resume(self._desired)
        await self._probes.load()
        self._has_booted = True
        self.on_devices_found()
        adopted = await self._replicas.adopt()
        version = self._desired.version if self._desired else None
        self._log.info(
            "agent_started",
            generation=version.generation if version else None,
            devices=len(self._node.devices),
            adopted=adopted,
        )

    # the desired set: persist it, then act on it

    async def _save_forever(self) -> None:
        refused: DesiredSet | None = None
        while True:
            await self._save_due.wait()
            offered = self._unsaved_desired
            if offered is None:
                self._save_due.clear()
                continue
            try:
                await self._journal.save(offered)
            except ShoalError as error:
                if offered is not refused:
                    self._outbox.report_event(error.code, "desired set", error.refusal.words)
                refused = offered
                await self._clock.sleep(Seconds(self._settings.retry_s))
                continue
            self._desired = offered
            if self._unsaved_desired is offered:
                self._unsaved_desired = None
            self._log.info(
                "desired_set_accepted", generation=offered.version.generation, history=offered.version.history
            )
            self._reconcile_due.set()
            self._front_updates.request()
            self._report_due.set()

    async def _reconcile_forever(self) -> None:
        self._reconcile()
        # Configure only after the first reconcile: until then an adopted front keeps the workers that it knows.
        self._front_updates.request()
        while True:
            ends_at = self._next_serve_deadline()
            wait = None if ends_at is None else max(0.0, ends_at - self._clock.now())
            await wait_or_timeout(self._reconcile_due, wait)
            self._reconcile_due.clear()
            self._reconcile()

    def _next_serve_deadline(self) -> Elapsed | None:
        if self._desired is None:
            return None
        return partition.next_serve_deadline(self._desired.assignments, self._link_state, self._clock.now())

    def _reconcile(self) -> None:
        if self._desired is None:
            return  # what runs keeps running until a coordinator sends a desired set
        now = self._clock.now()
        asked = {each.id: each for each in self._desired.assignments}
        self._replicas.resolve_orphans(asked)
        wanted = tuple(
            each
            for each in asked.values()
            if not self._stopping.is_set()
            and each.id not in self._replicas.ending
            and partition.may_run(each, self._link_state, now, running=each.id in self._replicas)
        )
        self._replicas.apply_plan(reconcile.plan(wanted, self._replicas.current_states))
        for device in self._node.devices:
            if device.rest is not None:
                may_sleep = not (self._probes.is_due(device.name) or self._replicas.is_device_busy(device.name))
                self._monitor.set_sleep(device.name, may_sleep and device.name in self._desired.asleep)

    def _on_phase_change(self) -> None:
        self._report_due.set()
        self._front_updates.request()

    def _on_receipt(self) -> None:
        self._report_due.set()
        self._reconcile_due.set()

    # heartbeats and reports

    async def _heartbeat_forever(self) -> None:
        while True:
            await wait_or_timeout(self._report_due, self._heartbeat_s())
            self._report_due.clear()
            link = self._session
            if link is not None:
                await self._reporter.send_receipts(link)
            self._reporter.take_snapshot(self._node.devices, self._session, self._desired)
            # A session that opened meanwhile has set `_report_due`: its receipts go first too.
            if link is not None and link is self._session:
                await self._reporter.send(self._node.name, link)

    def _heartbeat_s(self) -> Seconds:
        return self._session.heartbeat_s if self._session else Seconds(self._settings.heartbeat_s)

    async def _sample_forever(self) -> None:
        """Separate from the heartbeat, because a worker that does not answer must not make the node look silent."""
        while True:
            if await self._monitor.sample():
                self._replicas.unload_unused()
            if self._node.role is Role.AGENT:
                self._subscriptions.follow(self._monitor.front_stats, self._desired, self._link_state)
            pause = self._heartbeat_s() if self._monitor.front_stats.ready else Seconds(self._settings.poll_s)
            apart = Seconds(min(pause, ASKS_APART_S))
            await self._clock.sleep(apart)
            await self._front.next_ask(Seconds(pause - apart))

    # the link

    async def _link_forever(self) -> None:
        await self._wait_devices()
        attempt = 0
        while True:
            hello = Hello(
                node=replace(self._node, subscribes=self._node.role is Role.AGENT and self._front.waits_for_routes),
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
                ended = error.message
                self._log.warning("session_refused", code=ended.refusal.code, error=str(ended.refusal))
            except ShoalError as error:
                ended = Refused(error.refusal, fatal=False)
                self._log.warning("coordinator_connection_failed", code=error.code, error=str(error))
            else:
                opened_at = self._clock.now()
                ended = await self._run_session(session, hello)
                self._log.warning("session_closed", code=ended.refusal.code, error=str(ended.refusal))
            self._on_link_lost(ended)
            was_steady = opened_at is not None and self._clock.now() - opened_at >= link_session.STABLE_SESSION_S
            attempt = 0 if was_steady else attempt + 1
            wait = link_session.reconnect_after(self._node.name, attempt)
            await self._clock.sleep(Seconds(self._settings.fatal_retry_s) if ended.fatal else wait)

    def _on_link_lost(self, ended: Refused) -> None:
        self._membership.on_link_refused(ended.refusal)
        if ended.refusal.code is Code.CERT_REVOKED:
            self._drop_assignments()
        if isinstance(self._link_state, partition.Linked):
            self._link_state = partition.CutOff(self._clock.now())
            self._contact.on_link_lost()
            self._reconcile_due.set()

    def _drop_assignments(self) -> None:
        """The region revoked this node's membership. That is not a partition, so the node stops serving everything."""
        newest = self._unsaved_desired or self._desired
        if newest is not None and (newest.assignments or newest.routes):
            self._unsaved_desired = replace(
                newest, assignments=(), routes=(), pins=(), credentials=(), peers=(), forwarding=Forwarding()
            )
            self._save_due.set()

    async def _run_session(self, session: LinkSession, hello: Hello) -> Refused:
        """Run one session from its welcome to its end. Returns why it ended."""
        link = OpenSession(session, session.welcome, session.welcome.heartbeat_s)
        refusal = link_session.check_welcome(hello, link.welcome) or link_session.check_hello(hello, self._node)
        if refusal is not None:
            await session.close()
            return Refused(refusal, fatal=False)
        skew = link_session.clock_skew(link.welcome, self._clock.wall())
        if skew is not None:
            self._outbox.report_event(
                Code.CLOCK_SKEW, self._node.name, f"the coordinator's clock differs by {skew:.0f}s"
            )
        self._log.info("session_opened", epoch=link.welcome.epoch, history=link.welcome.history)
        self._session, self._link_state = link, partition.Linked()
        self._contact.on_link_up(link.welcome.coordinator_time)
        self._report_due.set()
        self._reconcile_due.set()
        try:
            while True:
                message = await session.receive()
                if isinstance(message, Refused) and message.fatal:
                    return message
                await self._on_message(link, message)
        except ShoalError as error:
            return Refused(error.refusal, fatal=False)
        finally:
            self._session = None
            await session.close()

    async def _on_message(self, link: OpenSession, message: ToAgent) -> None:
        match message:
            case DesiredSet():
                # A coordinator with a new history must see what runs here before it may replace the desired set.
                await link.has_reported.wait()
                if not link.report_failed:
                    self._on_desired_set(link, message)
            case ProbeNow():
                self._probes.request(message.devices or [device.name for device in self._node.devices])
            case Lease():
                asked_at = link.sent_at.get(message.sequence)
                if asked_at is not None:
                    self._front_updates.extend_lease(asked_at, message)
            case LogsAsked():
                if self._logs is not None:
                    self._outbox.answer(partial(self._logs.read, message))
            case SpansAsked():
                if self._spans is not None:
                    self._outbox.answer(partial(self._spans.spans, message))
            case Refused():
                self._log.warning("message_refused", code=message.refusal.code, error=str(message.refusal))
            case Welcome():
                self._log.warning("welcome_unexpected")

    def _on_desired_set(self, link: OpenSession, offered: DesiredSet) -> None:
        newest = self._unsaved_desired or self._desired
        match link_session.evaluate(newest, offered, node=self._node.name, history=link.welcome.history):
            case link_session.AcceptSet(desired):
                self._unsaved_desired = desired
                self._save_due.set()
                self._set_heartbeat(link, desired.heartbeat_s)
            case link_session.SetUnchanged():
                self._set_heartbeat(link, offered.heartbeat_s)
            case Refusal() as refusal:
                self._outbox.report_event(refusal.code, "desired set", refusal.words)

    def _set_heartbeat(self, link: OpenSession, seconds: Seconds) -> None:
        """Takes effect before the desired set is on disk, because the coordinator already counts on the new
        interval."""
        if link.heartbeat_s != seconds:
            link.heartbeat_s = seconds
            self._report_due.set()

    # the cache

    async def _collect_forever(self) -> None:
        while True:
            if self._desired is not None:
                for digest in await self._cache.collect(
                    reconcile.pinned_digests(self._desired, self._replicas.current_states)
                ):
                    self._log.info("model_evicted", digest=digest)
            await self._clock.sleep(Seconds(self._settings.collect_s))

    # shutdown

    async def _drain_and_close(self) -> None:
        self._log.info("process_stopping")
        self._reconcile_due.set()
        try:
            async with asyncio.timeout(self._settings.limits.drain_s + 1.0):
                while self._replicas.ending or any(
                    not isinstance(state, states.Gone) for state in self._replicas.current_states.values()
                ):
                    await self._clock.sleep(Seconds(self._settings.poll_s))
        except TimeoutError:
            self._log.warning("drain_incomplete")
        await self._front.close(keep=False)
        await self._workers.close(keep=False)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._group is not None, "tasks live while the supervisor runs"
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
