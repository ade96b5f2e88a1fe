"""A node of the benchmark of memory: an agent's device, its reading and its pool of workers, and no other part."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from _prediction.live_models import LiveModel

from shoal.agent.clock import SystemClock
from shoal.agent.devices.cpu import CpuDriver
from shoal.agent.devices.host import Host
from shoal.agent.driver_port import DriverOptions
from shoal.agent.ports import WorkerExited, WorkerFailed, WorkerReady
from shoal.agent.worker.pool import ProcessWorkers
from shoal.agent.worker.pool_options import PoolOptions
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.prediction.demand import at_shapes, work_of
from shoal.types.assignment import Assignment, Measured
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import PartitionRule, WorkloadKey

_RULE: Final = PartitionRule(Seconds(1.0), Seconds(10.0), None, False)
_STILL_S: Final = 0.4
_STILL_BYTES: Final = 2**19
_SETTLE_S: Final = 15.0
"""A spare worker takes a second of a core to start; a busy machine makes that longer."""


class MemoryNode:
    """Loads models and removes them, as told. `lost` are assignments whose worker ended by itself."""

    def __init__(self, folder: Path, driver: CpuDriver, pool: ProcessWorkers) -> None:
        (self.device,) = driver.discover()
        self.pool = pool
        self.lost = set[str]()
        self._folder = folder
        self._driver = driver
        self._waiting = dict[str, asyncio.Future[Measured | Refusal]]()

    def read(self) -> Reading:
        return self._driver.read(self.device.name)

    def assignment(self, name: str, profile: ModelProfile, memory_bytes: int) -> Assignment:
        """memory_bytes: what it may take; 0: anything."""
        return Assignment(
            id=name,
            workload=WorkloadKey("bench", name),
            revision=1,
            model=profile.digest,
            model_bytes=profile.size_bytes,
            device=self.device.name,
            provider=self.device.provider,
            precision=profile.precision,
            draining=False,
            shared_worker=False,
            memory_bytes=Bytes(memory_bytes),
            partition=_RULE,
            work=work_of(profile),
        )

    async def load(self, model: LiveModel, assignment: Assignment) -> Measured | Refusal:
        """Load and warm up in a worker of its own."""
        path = self._folder / assignment.model.removeprefix("sha256:")
        if not path.exists():
            path.write_bytes(model.content)
        found: asyncio.Future[Measured | Refusal] = asyncio.get_running_loop().create_future()
        self._waiting[assignment.id] = found
        await self.pool.start(assignment, str(path))
        return await found

    async def remove(self, assignment: str) -> None:
        """Returns once its process is gone."""
        await self.pool.stop(assignment)
        self._waiting.pop(assignment, None)
        self.lost.discard(assignment)

    async def settle(self) -> None:
        """Until free memory stands still: a spare worker starts after each load."""
        before = self.read().free_bytes
        for _ in range(round(_SETTLE_S / _STILL_S)):
            await asyncio.sleep(_STILL_S)
            now = self.read().free_bytes
            if abs(now - before) < _STILL_BYTES:
                return
            before = now

    async def watch(self) -> None:
        """Take the pool's events, for ever."""
        async for event in self.pool.events():
            match event:
                case WorkerReady():
                    self._settle(event.assignment, event.measured)
                case WorkerFailed():
                    self._settle(event.assignment, event.refusal)
                case WorkerExited():
                    self.lost.add(event.assignment)
                    self._settle(event.assignment, event.refusal)
                case _:
                    pass

    def _settle(self, assignment: str, found: Measured | Refusal) -> None:
        waiting = self._waiting.get(assignment)
        if waiting is not None and not waiting.done():
            waiting.set_result(found)


@asynccontextmanager
async def memory_node(folder: Path) -> AsyncIterator[MemoryNode]:
    """With an agent's pool as it comes, a spare worker included."""
    clock, models = SystemClock(), folder / "models"
    models.mkdir()
    driver = CpuDriver(clock, DriverOptions())
    devices = {each.name: each for each in driver.discover()}
    pool = ProcessWorkers(
        folder / "run", models, clock, devices.get, driver.access, PoolOptions(), free_bytes=Host().free_bytes
    )
    node = MemoryNode(models, driver, pool)
    await pool.adopt()
    watching = asyncio.create_task(node.watch())
    try:
        yield node
    finally:
        watching.cancel()
        await pool.close(keep=False)


def profile_at_batch_1(model: LiveModel) -> ModelProfile:
    digest = f"sha256:{hashlib.sha256(model.content).hexdigest()}"
    found = profile_of(model.content, digest)
    assert isinstance(found, ModelProfile), found
    return at_shapes(found, model.at_batch(1))


def is_shortage(found: Measured | Refusal) -> bool:
    """Whether a load ended because memory ran out."""
    return isinstance(found, Refusal) and found.code is Code.OUT_OF_MEMORY
