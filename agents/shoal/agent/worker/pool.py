"""The supervisor's worker processes: starts, adopts, watches and ends them (`ports.WorkerPool`).

Runs in the supervisor and imports no runtime. There is one worker per assignment, or one for all shared assignments of
a tenant on a device.

- `SpareWorker` keeps a worker ready that has no model.
- `ReplicaLoader` chooses a worker for a replica, and loads its model there.
- `StatusPolls` reads the workers' counters, and ends one that does not answer.
- `DeviceProber` measures devices.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.frames import FrameMessage
from shoal.agent.ports import (
    AgentClock,
    LocalWorker,
    PreparedModel,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerStats,
)
from shoal.agent.worker import load_orders
from shoal.agent.worker.background_tasks import BackgroundTasks
from shoal.agent.worker.cgroups import Cgroups
from shoal.agent.worker.device_prober import DeviceProber
from shoal.agent.worker.load_orders import LoadOrders
from shoal.agent.worker.messages import SLOTS, LoadState
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.process import WorkerProcess, assignments_at_fault
from shoal.agent.worker.replica_loader import ReplicaLoader
from shoal.agent.worker.replica_table import ReplicaTable, worker_ready
from shoal.agent.worker.spare import SpareWorker
from shoal.agent.worker.status_check import read_report, read_status
from shoal.agent.worker.status_polls import STATUS_S, StatusPolls
from shoal.types.assignment import Assignment
from shoal.types.codes import ShoalError
from shoal.types.device import Device
from shoal.types.migration import Verdict
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes

_log = structlog.get_logger(__name__)


class ProcessWorkers:
    """Worker processes with their files under `folder`, and their models in `models`.

    `device` and `access` return what the drivers know of a device, by its name. `files` returns all devices' files,
    `free_bytes` what the machine has left for processes.
    """

    def __init__(
        self,
        folder: Path,
        models: Path,
        clock: AgentClock,
        device: Callable[[str], Device | None],
        access: Callable[[str], DeviceAccess],
        options: PoolOptions | None = None,
        *,
        files: Callable[[], tuple[str, ...]] = tuple,
        free_bytes: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._folder = folder
        self._models = models
        self._files = files
        self._options = options or PoolOptions()
        self._replicas = ReplicaTable()
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()
        self._free_bytes = free_bytes
        # Memory of the last worker that had no model; 0 before the first.
        self._worker_bytes = 0
        self._spare = SpareWorker(
            self._spawn, self._connect, self._has_device_files, clock, self._tasks, has_room=self._has_room_for_spare
        )
        self._loader = ReplicaLoader(
            self._replicas,
            self._spare,
            LoadOrders(folder / SLOTS, device, access, self._options),
            self._events.put_nowait,
            self._tasks,
            clock,
            self._options,
        )
        self._prober = DeviceProber(self._spare, access, clock, self._options)
        self._polls = StatusPolls(self._replicas, self._end_in_background, self._tasks, self._options)
        # Kept apart from `_tasks`: `close` waits for these and does not cancel them.
        self._end_tasks: set[asyncio.Task[None]] = set()
        self._groups = Cgroups.detect()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / SLOTS).mkdir(mode=0o700, exist_ok=True)

    async def adopt(self) -> tuple[WorkerAdopted, ...]:
        """Adopt the workers of an earlier supervisor. Also starts the spare worker."""
        found = [await self._adopt_one(record) for record in sorted(self._folder.glob("worker-*.json"))]
        if self._options.keep_spare:
            self._spare.replenish()
        return tuple(one for those in found for one in those)

    async def start(
        self, assignment: Assignment, path: str, samples: str = "", prepared: PreparedModel | None = None
    ) -> None:
        """Returns at once. Starting an assignment again ends its first worker."""
        await self.stop(assignment.id)
        task = self._tasks.spawn(self._loader.bring_up(assignment, path, samples, prepared))
        self._starts[assignment.id] = task
        task.add_done_callback(partial(self._on_start_done, assignment.id))

    async def stop(self, assignment: str) -> None:
        starting = self._starts.pop(assignment, None)
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        replica = self._replicas.pop(assignment)
        if replica is not None:
            await self._loader.release(assignment, replica.process)

    def local(self, assignment: str) -> LocalWorker | None:
        replica = self._replicas.get(assignment)
        if replica is None or replica.ready is None:
            return None
        process = replica.process
        return LocalWorker(assignment, process.assignments[assignment].workload, str(process.socket), process.nonce)

    async def record_verdict(self, assignment: str, verdict: Verdict) -> None:
        replica = self._replicas.get(assignment)
        if replica is not None:
            replica.process.verdicts[assignment] = verdict
            replica.process.save()

    async def probe(self, device: Device) -> Receipt:
        return await self._prober.probe(device)

    async def events(self) -> AsyncIterator[WorkerEvent]:
        while True:
            yield await self._events.get()

    def worker_bytes(self) -> Bytes:
        return Bytes(0 if self._spare.is_ready else self._worker_bytes)

    def may_share(self, new: Assignment, held: Collection[Assignment]) -> bool:
        return load_orders.may_share(new, held, self._options)

    async def stats(self) -> tuple[WorkerStats, ...]:
        return await self._polls.stats()

    async def close(self, *, keep: bool) -> None:
        self._spare.close()
        await self._tasks.cancel()
        processes = set(self._replicas.processes())
        spare = self._spare.pop()
        if spare is not None:
            processes.add(spare)
        self._replicas.clear()
        await asyncio.gather(*(process.detach() if keep else process.end() for process in processes), *self._end_tasks)

    # one process

    def _spawn(self) -> WorkerProcess:
        """Raises OSError."""
        orphan_after_s, files = self._options.orphan_after_s, self._files()
        process = WorkerProcess.spawn(
            self._folder, self._models, files, orphan_after_s, self._groups, self._on_worker_exit
        )
        process.device_files = frozenset(files)
        return process

    def _has_device_files(self, process: WorkerProcess) -> bool:
        """False: a device was found since it started, and it is confined for good."""
        return process.device_files is None or process.device_files >= set(self._files())

    async def _connect(self, process: WorkerProcess) -> None:
        """Connect a process that starts. Raises ShoalError."""
        await process.connect(partial(self._on_push, process), self._options.start_timeout_s)
        self._worker_bytes = max(self._worker_bytes, process.own_bytes())
        if self._replicas.replicas():
            self._tasks.spawn(self._import_runtime(process))

    async def _import_runtime(self, process: WorkerProcess) -> None:
        """On a node that serves, a spare has the runtime, so that it replaces a lost worker sooner; on an idle node the
        memory matters more. One that cannot import it fails with its first order."""
        with suppress(ShoalError):
            await process.call("import", self._options.start_timeout_s)
            if not process.assignments:
                self._worker_bytes = process.own_bytes()

    def _has_room_for_spare(self) -> bool:
        """As much again must stay free, for the worker of the next model."""
        return self._free_bytes() >= 2 * self._worker_bytes

    def _on_push(self, process: WorkerProcess, message: FrameMessage) -> None:
        try:
            status = read_status(message.payload)
        except ShoalError as error:
            self._polls.end_invalid(process, error)
            return
        self._loader.on_status(process, status)

    def _on_worker_exit(self, process: WorkerProcess) -> None:
        self._spare.on_exit(process)
        held = self._replicas.in_process(process)
        if not held:
            return
        counted = process.oom_kills()
        own_fault, refusal = process.explain_exit(
            oom=bool(counted) if counted is not None else self._polls.has_recent_oom_kill()
        )
        if process.kill_reason is not None:
            own_fault, refusal = False, process.kill_reason
        loading = [name for name, replica in held.items() if replica.has_load_begun and not replica.load_done.is_set()]
        busy = process.busy_assignments()
        at_fault = assignments_at_fault(held, loading, busy) if own_fault else frozenset()
        for name in held:
            self._replicas.pop(name)
            _log.warning(
                "worker_exited", assignment=name, own_fault=name in at_fault, code=refusal.code, error=str(refusal)
            )
            at_load = name in loading and not busy
            self._events.put_nowait(WorkerExited(name, name in at_fault, refusal, at_load))
        self._end_in_background(process)

    async def _adopt_one(self, record: Path) -> tuple[WorkerAdopted, ...]:
        process = WorkerProcess.from_record(record, self._groups, self._on_worker_exit)
        if process is None:
            return ()
        process.restore_priority()
        try:
            await process.connect(partial(self._on_push, process), STATUS_S)
            report = read_report((await process.call("status", STATUS_S)).payload)
        except ShoalError as error:
            _log.warning("worker_adoption_failed", worker=process.name, code=error.code, error=str(error))
            await process.end()
            return ()
        if not (report.held or report.measuring or process.assignments) and self._spare.offer(process):
            return ()
        held = {one.assignment: one for one in report.held if one.state is not LoadState.FAILED}
        if not held or held.keys() != process.assignments.keys():
            await process.end()
            return ()
        adopted = []
        for name, status in held.items():
            replica = self._replicas.add(name, process)
            replica.ready = worker_ready(status)
            replica.has_load_begun = True
            if replica.ready is not None:
                replica.load_done.set()
            adopted.append(WorkerAdopted(name, replica.ready, process.verdicts.get(name)))
        return tuple(adopted)

    def _on_start_done(self, assignment: str, task: "asyncio.Task[None]") -> None:
        if self._starts.get(assignment) is task:
            del self._starts[assignment]

    def _end_in_background(self, process: WorkerProcess) -> None:
        task = asyncio.create_task(process.end())
        self._end_tasks.add(task)
        task.add_done_callback(self._end_tasks.discard)
