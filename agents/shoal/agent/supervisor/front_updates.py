"""What the front gets from the supervisor: its configuration, and the lease of its sessions."""

import asyncio
from collections.abc import Callable

from shoal.agent.supervisor.node_monitor import NodeMonitor
from shoal.agent.supervisor.replicas import ReplicaManager
from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.agent.supervisor.supervisor_ports import SupervisorPorts
from shoal.types.assignment import DesiredSet, Forwarding, Trust
from shoal.types.codes import ShoalError
from shoal.types.link import Lease
from shoal.types.units import Elapsed, Seconds


class FrontUpdates:
    """Keeps the front as the desired set and the replicas of this node ask for.

    `desired` returns the set that is on disk. `on_trust_change` is called when this node presents another certificate,
    or trusts other CAs, than before.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        ports: SupervisorPorts,
        replicas: ReplicaManager,
        monitor: NodeMonitor,
        *,
        desired: Callable[[], DesiredSet | None],
        on_trust_change: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._front = ports.front
        self._membership = ports.membership
        self._clock = ports.clock
        self._log = ports.log
        self._replicas = replicas
        self._monitor = monitor
        self._desired = desired
        self._on_trust_change = on_trust_change
        self._due = asyncio.Event()
        self._lease_due = asyncio.Event()
        self._lease_until = self._clock.now()
        # Claim of the newest lease.
        self._claim = ""

    def request(self) -> None:
        """Configure the front soon."""
        self._due.set()

    def extend_lease(self, asked_at: Elapsed, lease: Lease) -> None:
        """Count the lease from the time of the status that requested it. The coordinator counts from a later moment, so
        this node's lease ends first."""
        self._lease_until = Elapsed(max(self._lease_until, asked_at + lease.seconds))
        self._claim = lease.claim
        self._lease_due.set()

    async def configure_forever(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            desired = self._desired()
            if desired is None and self._front.is_adopted:
                # an adopted front, like adopted workers, keeps running until a coordinator sends a desired set
                continue
            trust = desired.trust if desired and desired.trust else Trust()
            try:
                held = self._membership.current_trust()
                await self._membership.adopt(trust)
                if self._membership.current_trust() != held:
                    self._on_trust_change()
                await self._front.configure(
                    desired.routes if desired else (),
                    desired.credentials if desired else (),
                    self._replicas.ready_workers(),
                    trust.revoked,
                    desired.peers if desired else (),
                    self._replicas.verification_sources(),
                    self._replicas.stateful_replicas(),
                    desired.forwarding if desired else Forwarding(),
                    desired.tenants if desired else (),
                    unloaded=self._replicas.unloaded_replicas(),
                    routes_on_demand=desired.routes_on_demand if desired else False,
                )
                self._lease_due.set()  # the front may have restarted and lost its lease
                await self._monitor.sample()
            except ShoalError as error:
                self._log.error("front_configuration_failed", code=error.code, error=str(error))
                self._due.set()
                await self._clock.sleep(Seconds(self._settings.retry_s))

    async def lease_forever(self) -> None:
        while True:
            await self._lease_due.wait()
            self._lease_due.clear()
            left = Seconds(self._lease_until - self._clock.now())
            if left > 0:
                try:
                    await self._front.lease(left, self._claim)
                except ShoalError as error:
                    self._log.error("front_lease_failed", code=error.code, error=str(error))
