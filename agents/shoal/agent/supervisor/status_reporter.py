"""Statuses: what the node is at one moment, and what of it a session has not reported yet."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.agent.core import link_session
from shoal.agent.ports import Batches, FrontStats
from shoal.agent.supervisor.device_probes import DeviceProbes
from shoal.agent.supervisor.node_monitor import NodeMonitor
from shoal.agent.supervisor.open_session import MAX_TRACKED_STATUSES, OpenSession
from shoal.agent.supervisor.outbox import Outbox
from shoal.agent.supervisor.replicas import ReplicaManager
from shoal.agent.supervisor.route_subscriptions import RouteSubscriptions
from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.agent.supervisor.supervisor_ports import SupervisorPorts
from shoal.types.assignment import DesiredSet, Observed, Version
from shoal.types.codes import ShoalError
from shoal.types.device import Device, Reading, SilentDevice
from shoal.types.link import Receipts
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Seconds

WALL_STEP_S = 0.5
"""If the wall clock moves against the elapsed clock by more than this, reported wall times follow it."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The node at one moment: input of a status and of the metrics."""

    # True while a session with a coordinator is open.
    is_linked: bool
    # Epoch of the coordinator, from its welcome; 0 without a session.
    epoch: int
    # Version of the persisted desired set. None before the first one.
    version: Version | None
    # All devices of the node, including those that do not answer now.
    devices: tuple[Device, ...]
    # One entry per assignment that exists here.
    observations: tuple[Observed, ...]
    # Readings of the devices that answer and have been probed since they last failed.
    readings: tuple[Reading, ...]
    # Counters from the last sample of the front.
    front: FrontStats
    # Batch sizes of answered runs, by assignment; only of assignments whose worker reported.
    batches: Mapping[str, Batches] = field(default_factory=dict)
    # Devices that do not answer, and since when.
    silent: tuple[SilentDevice, ...] = ()


class StatusReporter:
    """Takes a snapshot of the node at each heartbeat, and sends it as a status."""

    def __init__(
        self,
        settings: SupervisorSettings,
        ports: SupervisorPorts,
        monitor: NodeMonitor,
        replicas: ReplicaManager,
        probes: DeviceProbes,
        outbox: Outbox,
        subscriptions: RouteSubscriptions,
        *,
        on_signed: Callable[[], None],
    ) -> None:
        """`on_signed` is called when receipts can be sent that a heartbeat did not wait for."""
        self._settings = settings
        self._clock = ports.clock
        self._membership = ports.membership
        self._signer = ports.signer
        self._on_signed = on_signed
        # The newest call of the signer.
        self._signing: asyncio.Task[tuple[SignedReceipt, ...]] | None = None
        self._log = ports.log
        self._monitor = monitor
        self._replicas = replicas
        self._probes = probes
        self._outbox = outbox
        self._subscriptions = subscriptions
        self._epoch_wall = Seconds(self._clock.wall() - self._clock.now())
        self.snapshot = NodeSnapshot(False, 0, None, (), (), (), monitor.front_stats)

    def take_snapshot(self, devices: tuple[Device, ...], link: OpenSession | None, desired: DesiredSet | None) -> None:
        """Read all `devices`. `desired` is what is on disk."""
        offset = Seconds(self._clock.wall() - self._clock.now())
        if abs(offset - self._epoch_wall) > WALL_STEP_S:
            self._epoch_wall = offset
        readings = [self._monitor.read(device.name) for device in devices]
        self._probes.request(self._monitor.take_returned_devices())
        observed = self._replicas.observations(self._epoch_wall)
        stats = {each.assignment: self._monitor.worker_stats(each.assignment) for each in observed}
        self.snapshot = NodeSnapshot(
            is_linked=link is not None,
            epoch=link.welcome.epoch if link else 0,
            version=desired.version if desired else None,
            devices=devices,
            observations=observed,
            readings=tuple(reading for reading in readings if reading is not None),
            silent=self._monitor.silent_devices(self._epoch_wall),
            front=self._monitor.front_stats,
            batches={name: each.batches for name, each in stats.items() if each is not None},
        )

    async def send_receipts(self, link: OpenSession) -> None:
        """Send the receipts that this session has not sent yet, once they are signed. If that fails, the session is
        closed.

        Call before `take_snapshot`: the broker of an MQTT session may take seconds to acknowledge receipts, and a
        snapshot would be older than that when it is sent.
        """
        if link.receipts == self._probes.receipts:
            return
        told = self._probes.receipts
        signed = await self._sign([each.receipt for each in told])
        if signed is None:
            return
        link.receipts = told
        try:
            await link.session.send(Receipts(signed))
        except ShoalError:
            await self._close(link)

    async def _sign(self, receipts: Sequence[Receipt]) -> tuple[SignedReceipt, ...] | None:
        """Signed now, because the key that signed these when they were measured may have been replaced. None: not yet.

        What the signer knows it answers at once. A program takes a second on a busy board, and no status waits for
        that: meanwhile the node serves what it has.
        """
        if self._signing is not None and not self._signing.done():
            return None
        self._signing = asyncio.create_task(self._signer.sign_receipts(receipts), name="sign receipts")
        await asyncio.sleep(0)
        if not self._signing.done():
            self._signing.add_done_callback(self._after_signing)
            return None
        try:
            return self._signing.result()
        except ShoalError as error:  # the next heartbeat tries again
            self._log.warning("receipts_not_signed", code=error.code, error=str(error))
            return None

    def _after_signing(self, task: "asyncio.Task[tuple[SignedReceipt, ...]]") -> None:
        """The signer knows them now, or the next heartbeat tries again."""
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._on_signed()
        else:
            self._log.warning("receipts_not_signed", error=str(error))

    async def send(self, node: str, link: OpenSession) -> None:
        """Send the last snapshot and all that waits. If that fails, the session is closed."""
        snapshot = self.snapshot
        held = self._membership.current_trust()
        moment = link_session.NodeReport(
            node=node,
            epoch=link.welcome.epoch,
            version=snapshot.version,
            observed=snapshot.observations,
            readings=snapshot.readings,
            silent=snapshot.silent,
            ingress=snapshot.front.ingress,
            agreement_counts=snapshot.front.agreement_counts,
            tenants=snapshot.front.tenants,
            taken_at=self._clock.wall(),
            front_ready=snapshot.front.ready,
            serial=held.serial,
            roots=held.roots,
            asks_lease=bool(self._replicas.stateful_replicas()),
            subscriptions=self._subscriptions.report,
        )
        link.reporter, status = link_session.next_status(link.reporter, moment, full_every=self._settings.full_every)
        link.sent_at[status.sequence] = self._clock.now()
        link.sent_at.pop(status.sequence - MAX_TRACKED_STATUSES, None)
        try:
            await link.session.send(status)
            link.has_reported.set()
            await self._outbox.send(link.session)
        except ShoalError:
            await self._close(link)

    @staticmethod
    async def _close(link: OpenSession) -> None:
        link.report_failed = link.report_failed or not link.has_reported.is_set()
        link.has_reported.set()
        await link.session.close()  # the receive loop notices and reconnects
