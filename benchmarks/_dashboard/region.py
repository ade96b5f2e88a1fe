"""A region that stands, with agents that report on time, and its dashboard; in one process, on one loop."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from _placement.agents import NoModels, ScaleAgent, ScaleLinks
from _placement.standing import REGION, fill

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.dashboard.dashboard import Dashboard
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.identity.enrolment import Enrolment
from shoal.coordinator.controllers.region.region import NoMeter, RegionalCoordinator, RegionConfig
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.host import gc_freeze
from shoal.types.address import HostPort
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall

HEARTBEAT_S: Final = 5.0
REST_S: Final = 3.0
"""Seconds without a desired set after which the region stands."""
SAID_S: Final = 15.0
"""How often it is said that the region does not stand yet."""
ACTOR: Final = "shoal://scale/operator/bench"


@dataclass(frozen=True, slots=True)
class WatchedRegion:
    """A region with a dashboard."""

    region: RegionalCoordinator
    links: ScaleLinks
    dashboard: Dashboard
    # Ends, with its error, when anything that the region needs has ended.
    running: asyncio.Task[None]

    async def stand(self, deadline: float) -> None:
        """Returns when the region has planned, and has sent nothing for a while. Raises TimeoutError."""
        sets, said = -1, time.monotonic()
        while sets != self.links.sets or self.region.workloads.last_plan is None:
            if self.running.done():
                self.running.result()
            if (now := time.monotonic()) >= deadline:
                raise TimeoutError(
                    f"the region does not stand: it has sent {self.links.sets} desired sets, and goes on"
                )
            if now - said >= SAID_S:
                said = now
                print(f"# {self.links.sets} desired sets sent so far", file=sys.stderr, flush=True)
            sets = self.links.sets
            await asyncio.sleep(REST_S)

    async def open_link(self) -> str:
        operator = Identity(REGION, Role.OPERATOR, "bench", Wall(0.0), Wall(4e9), "1")
        made = await self.dashboard.open_link(operator)
        return f"https://{made.address}/#link={made.secret}"

    async def cordon(self, node: str, is_cordoned: bool) -> None:
        await self.region.fleet.cordon(node, is_cordoned, ACTOR)

    @property
    def some_node(self) -> str:
        """An agent, any one that does not change from run to run."""
        return sorted(name for name, each in self.region.fleet.fleet.nodes.items() if each.node.devices)[7]


@asynccontextmanager
async def watched_region(nodes: int, workloads: int, folder: Path) -> AsyncIterator[WatchedRegion]:
    clock = CoordinatorClock()
    store = await SqliteStore.open(folder / "store")
    standing = await fill(store, nodes, clock.wall(), HEARTBEAT_S, workloads)
    links = ScaleLinks({each.name: ScaleAgent(each, standing.epoch) for each in standing.nodes}, HEARTBEAT_S)
    region = RegionalCoordinator(store, links, NoModels(), NoModels(), clock, SystemIds(), RegionConfig(REGION))
    await region.start()
    links.attach(region)
    authority = FileAuthority.open(folder / "ca", REGION, wall=clock.wall(), may_create=True)
    identity = ServerIdentity(authority, folder / "server", ("127.0.0.1",), clock)
    audit = AuditTrail(region.events, NoMeter())
    guard = Authorisation(REGION, clock, NoMeter(), audit)
    dashboard = Dashboard(
        region, guard, audit, SystemIds(), identity, advertise="127.0.0.1", hosts=("127.0.0.1",), federation=None
    )
    nobody = cast(Any, None)
    operators = OperatorService(region, Enrolment(region.context, authority), nobody, audit, nobody)
    await dashboard.start(HostPort("127.0.0.1", 0), operators)
    running = asyncio.create_task(_run(links.run(), region.run(), region.timeline.run(), dashboard.run()))
    try:
        yield WatchedRegion(region, links, dashboard, running)
    finally:
        region.stop()
        await dashboard.stop()
        running.cancel()
        with suppress(asyncio.CancelledError, Exception):  # who waits for it has had its error
            await running
        await store.close()


async def _run(*needed: Coroutine[Any, Any, None]) -> None:
    """Runs them all, and young garbage's collection as the coordinator's program has it. Raises the first error."""
    async with asyncio.TaskGroup() as tasks:
        for each in (*needed, gc_freeze.collect_regularly()):
            tasks.create_task(each)
