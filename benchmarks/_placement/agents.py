"""Agents that are only values: they send heartbeats on time and do at once what their desired sets say."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.fleet.state import Fleet
from shoal.types.assignment import Assignment, DesiredSet, Measured, Observed, Phase, Status, Version
from shoal.types.codes import Refusal
from shoal.types.device import EnergySource, Node, Reading
from shoal.types.link import ToAgent
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Joules, Seconds, Wall, Watts
from shoal.types.workload import WorkloadKey

TURN_S: Final = 0.01
"""How often the agents whose heartbeat is due are looked for."""
AT_ONCE: Final = 64
"""Most heartbeats between two turns of the event loop."""
WARM: Final = Measured(
    Seconds(0.5), Bytes(90 * 2**20), Seconds(0.01), Seconds(0.012), Joules(0.2), EnergySource.PROFILE, 16
)


@dataclass(slots=True)
class ScaleAgent:
    """One node."""

    # As its hello described it.
    node: Node
    # Epoch of its session.
    epoch: int
    # Number of its last status.
    sequence: int = 0
    # Version of the set that it holds.
    version: Version | None = None
    # Its replicas by assignment id, as it reports them.
    observed: dict[str, Observed] = field(default_factory=dict)
    # When its next heartbeat is due, by the monotonic clock.
    due: float = 0.0
    # False: it is silent.
    up: bool = True


@dataclass
class ScaleLinks:
    """ports.AgentLinks and all agents of the region."""

    # By name.
    agents: dict[str, ScaleAgent]
    # Seconds between two heartbeats of a node.
    heartbeat_s: float
    # When each workload was first reported ready, by the monotonic clock.
    ready_at: dict[WorkloadKey, float] = field(default_factory=dict)
    # When each workload was first in a desired set that was sent, by the monotonic clock.
    sent_at: dict[WorkloadKey, float] = field(default_factory=dict)
    # Desired sets sent.
    sets: int = 0
    # Routes in all of them.
    routes: int = 0
    # Heartbeats that were sent later than they were due, in seconds: the longest.
    latest_s: float = 0.0
    # Processor seconds that the coordinator took for heartbeats.
    heard_s: float = 0.0
    # Number of heartbeats.
    heard: int = 0

    def attach(self, region: RegionalCoordinator) -> None:
        """Opens all sessions, as if each node had just said hello, and reports everything as ready."""
        self._region = region
        known, now, wall = region.fleet.fleet, region.clock.now(), region.clock.wall()
        nodes = {
            name: replace(state, connected=True, heard_at=now, last_seen=wall) for name, state in known.nodes.items()
        }
        region.fleet.fleet = Fleet(nodes, known.timing, known.grace_until, now)
        began = time.monotonic()
        for index, (name, one) in enumerate(sorted(self.agents.items())):
            desired = region.workloads.desired[name]
            self._adopt(one, desired)
            one.due = began + self.heartbeat_s * index / len(self.agents)
            self._report([self._status(one)])

    async def send(self, node: str, message: ToAgent) -> None:
        if isinstance(message, DesiredSet) and (one := self.agents.get(node)) is not None and one.up:
            self.sets += 1
            self.routes += len(message.routes)
            at = time.monotonic()
            for each in message.assignments:
                self.sent_at.setdefault(each.workload, at)
            asyncio.get_running_loop().call_soon(self._on_set, one, message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        pass

    async def run(self) -> None:
        """Heartbeats until cancelled."""
        order = sorted(self.agents.values(), key=lambda one: one.due)
        first, due = 0, list[Status]()
        while True:
            now = time.monotonic()
            while (one := order[first % len(order)]).due <= now:
                self.latest_s = max(self.latest_s, now - one.due)
                one.due = max(one.due + self.heartbeat_s, now)
                if one.up:
                    due.append(self._status(one))
                first += 1
                if first % AT_ONCE == 0:
                    self._report(due)
                    due.clear()
                    await asyncio.sleep(0)
                    now = time.monotonic()
            self._report(due)
            due.clear()
            await asyncio.sleep(TURN_S)

    def _on_set(self, one: ScaleAgent, desired: DesiredSet) -> None:
        self._adopt(one, desired)
        at = time.monotonic()
        for each in desired.assignments:
            self.ready_at.setdefault(each.workload, at)
        self._report([self._status(one)])

    def _adopt(self, one: ScaleAgent, desired: DesiredSet) -> None:
        one.version = desired.version
        wall = self._region.clock.wall()
        one.observed = {
            each.id: one.observed.get(each.id) or _observe(each, wall)
            for each in desired.assignments
            if not each.draining
        }

    def _status(self, one: ScaleAgent) -> Status:
        one.sequence += 1
        wall, name = self._region.clock.wall(), one.node.name
        readings = tuple(_reading(one, each.name, each.memory_bytes, wall) for each in one.node.devices)
        observed = tuple(one.observed.values())
        return Status(name, one.epoch, one.sequence, True, one.version, observed, (), readings, (), wall, True)

    def _report(self, statuses: Sequence[Status]) -> None:
        """Pass them to the coordinator. The clock is read once for all of them: it takes as long as a tenth of one."""
        on_status, began = self._region.fleet.on_status, time.thread_time()
        for each in statuses:
            on_status(each.node, each.epoch, each)
        self.heard_s += time.thread_time() - began
        self.heard += len(statuses)


def _reading(one: ScaleAgent, device: str, memory: int, wall: Wall) -> Reading:
    """Free memory moves a little from one report to the next, as it does on every machine."""
    used = sum(each.measured.memory_bytes for each in one.observed.values() if each.measured is not None)
    free = Bytes(memory - used - 2**20 * (one.sequence % 7))
    return Reading(
        device, free, 0.1, 45.0 + one.sequence % 3, Watts(10.0 + 0.1 * (one.sequence % 5)), float("nan"), wall
    )


def _observe(each: Assignment, wall: Wall) -> Observed:
    return Observed(
        each.id, each.workload, each.model, each.device, Phase.READY, wall, None, "", None, None, 0, 0, WARM, ()
    )  # fmt: skip


class NoModels:
    """ports.Blobs and ports.Inspector of a region whose models are only profiles."""

    async def stat(self, digest: str) -> Bytes | None:
        return Bytes(1)

    async def read(self, digest: str, offset: int) -> AsyncIterator[bytes]:
        yield b""

    def path(self, digest: str) -> str:
        raise NotImplementedError

    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        raise NotImplementedError

    async def digests(self) -> tuple[str, ...]:
        return ()

    async def delete(self, digest: str, is_unrecorded: Callable[[], Awaitable[bool]]) -> None:
        raise NotImplementedError

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        raise NotImplementedError

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        raise NotImplementedError


@dataclass(slots=True)
class LoopMonitor:
    """For how long the event loop let nobody else run."""

    # Longest time between two turns, by the clock; other processes of the machine count too.
    wait_s: float = 0.0
    # The same in processor time of the loop's thread: what its own work took.
    stall_s: float = 0.0

    def reset(self) -> None:
        self.wait_s = self.stall_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began, used = time.monotonic(), time.thread_time()
            await asyncio.sleep(TURN_S / 2)
            self.wait_s = max(self.wait_s, time.monotonic() - began - TURN_S / 2)
            self.stall_s = max(self.stall_s, time.thread_time() - used)
