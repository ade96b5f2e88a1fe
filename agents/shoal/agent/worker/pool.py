"""The supervisor's worker processes: starts, adopts, watches and ends them (`ports.WorkerPool`).

Runs in the supervisor and imports no runtime. There is one worker per assignment, or one for all shared assignments of
a tenant on a device. A spare worker has the runtime imported and no model loaded.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from shoal.agent.frames import ConnectionLost, FrameMessage
from shoal.agent.ports import (
    AgentClock,
    DeviceAccess,
    LocalWorker,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    WorkerStats,
)
from shoal.agent.timeouts import wait_any
from shoal.agent.worker.background_tasks import BackgroundTasks
from shoal.agent.worker.cgroups import Cgroups
from shoal.agent.worker.device_prober import DeviceProber
from shoal.agent.worker.load_orders import LoadOrders, may_share
from shoal.agent.worker.messages import (
    SLOTS,
    LoadOrder,
    LoadState,
    WorkerReport,
    WorkerStatus,
    pack,
    unpack,
)
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.process import WorkerProcess, assignments_at_fault
from shoal.agent.worker.replica_table import ReplicaTable, WorkerReplica
from shoal.agent.worker.spare import SpareWorker, lower_priority_briefly
from shoal.agent.worker.status_polls import STATUS_S, StatusPolls
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Device
from shoal.types.migration import Verdict
from shoal.types.receipt import Receipt
from shoal.types.units import Seconds

_log = structlog.get_logger(__name__)

_SPARE_DELAY_S: Final = Seconds(15.0)
"""Delay before a new spare starts after a start that is not urgent: a spare takes a core for a second, which a
migration needs more."""


class ProcessWorkers:
    """Worker processes with their files under `folder`, and their models in `models`.

    `device` and `access` return what the drivers know of a device, by its name. `files` returns all devices' files.
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
    ) -> None:
        self._folder = folder
        self._models = models
        self._clock = clock
        self._files = files
        self._options = options or PoolOptions()
        self._orders = LoadOrders(folder / SLOTS, device, access, self._options)
        self._replicas = ReplicaTable()
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()
        self._spare = SpareWorker(self._spawn, self._connect, clock, self._tasks)
        self._prober = DeviceProber(self._spare, access, clock, self._options)
        self._polls = StatusPolls(self._replicas, self._end_in_background, self._tasks, self._options)
        # Kept apart from `_tasks`: `close` waits for these and does not cancel them.
        self._end_tasks: set[asyncio.Task[None]] = set()
        self._choice_lock = asyncio.Lock()
        self._load_slots = asyncio.Semaphore(self._options.max_concurrent_loads)
        self._groups = Cgroups.detect()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / SLOTS).mkdir(mode=0o700, exist_ok=True)

    async def adopt(self) -> tuple[WorkerAdopted, ...]:
        """Adopt the workers of an earlier supervisor. Also starts the spare worker."""
        found = [await self._adopt_one(record) for record in sorted(self._folder.glob("worker-*.json"))]
        if self._options.keep_spare:
            self._spare.ensure()
        return tuple(one for those in found for one in those)

    async def start(self, assignment: Assignment, path: str, samples: str = "") -> None:
        """Returns at once. Starting an assignment again ends its first worker."""
        await self.stop(assignment.id)
        task = self._tasks.spawn(self._bring_up(assignment, path, samples))
        self._starts[assignment.id] = task
        task.add_done_callback(partial(self._on_start_done, assignment.id))

    async def stop(self, assignment: str) -> None:
        starting = self._starts.pop(assignment, None)
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        replica = self._replicas.pop(assignment)
        if replica is not None:
            await self._release(assignment, replica.process)

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

    # starting and ending a worker

    def _spawn(self) -> WorkerProcess:
        """Raises OSError."""
        orphan_after_s = self._options.orphan_after_s
        return WorkerProcess.spawn(
            self._folder, self._models, self._files(), orphan_after_s, self._groups, self._on_worker_exit
        )

    async def _connect(self, process: WorkerProcess) -> None:
        """Connect a process that starts. Raises ShoalError."""
        await process.connect(partial(self._on_state_push, process), self._options.start_timeout_s)

    async def _bring_up(self, assignment: Assignment, path: str, samples: str) -> None:
        """Always ends with an event: ready, failed or exited."""
        taken = False
        try:
            if not _is_deferrable(assignment):
                self._spare.restore_priority()
            async with self._load_slots:
                order = self._orders.order(assignment, path, samples)
                async with self._choice_lock:
                    process = self._find_shared_worker(assignment) or await self._spare.take(
                        urgent=not _is_deferrable(assignment)
                    )
                    if _is_deferrable(assignment) and not process.assignments:
                        lower_priority_briefly(process, self._clock, self._tasks)
                    process.assignments[assignment.id] = assignment
                replica, taken = self._replicas.add(assignment.id, process), True
                process.save()
                # As the worker does for itself. Memory of an unloaded model may still be mapped; `limit_memory` never
                # goes below what the process could use before.
                process.limit_memory(self._orders.process_memory_bytes(process.assignments.values()))
                async with process.load_lock:
                    await self._load(replica, order)
        except ConnectionLost as error:
            if taken:
                return  # the exit event says more
            await self._on_load_failed(assignment.id, error.refusal)
        except ShoalError as error:
            await self._on_load_failed(assignment.id, error.refusal)
        finally:
            if _is_deferrable(assignment):
                self._spare.ensure_after(_SPARE_DELAY_S)
            else:
                self._spare.ensure()

    async def _load(self, replica: WorkerReplica, order: LoadOrder) -> None:
        replica.has_load_begun = True
        limit = self._options.load_timeout_s
        await replica.process.call("load", limit, pack(order))
        settled = asyncio.create_task(replica.load_done.wait())
        gone = asyncio.create_task(replica.process.exit_event.wait())
        try:
            done = await wait_any({settled, gone}, limit)
        finally:
            settled.cancel()
            gone.cancel()
        if not done:
            raise refuse(Code.LOAD_TIMEOUT, "still loading", f"ready within {limit:g}s", "a smaller or simpler model")

    async def _on_load_failed(self, assignment: str, refusal: Refusal) -> None:
        replica = self._replicas.pop(assignment)
        self._events.put_nowait(WorkerFailed(assignment, refusal))
        if replica is not None and refusal.code is Code.LOAD_TIMEOUT:
            # only the end of the process interrupts a load
            await replica.process.end()
        elif replica is not None:
            await self._release(assignment, replica.process)

    async def _release(self, assignment: str, process: WorkerProcess) -> None:
        """Remove the assignment from its process. End the process if it then holds nothing, or does not obey."""
        del process.assignments[assignment]
        process.verdicts.pop(assignment, None)
        if process.assignments and process.client is not None and not process.exit_event.is_set():
            process.save()
            try:
                await process.call("unload", STATUS_S, header={"assignment": assignment})
            except ConnectionLost:
                # the exit event says more
                pass
            except ShoalError as error:
                process.kill_reason = replace(error.refusal, code=Code.WORKER_STUCK)
                await process.end()
        else:
            await process.end()

    def _find_shared_worker(self, assignment: Assignment) -> WorkerProcess | None:
        """A worker that this assignment may join: same tenant and device, all shared, with room. None if there is
        none."""
        for process in self._replicas.processes():
            if not process.exit_event.is_set() and may_share(assignment, process.assignments.values(), self._options):
                return process
        return None

    def _on_state_push(self, process: WorkerProcess, message: FrameMessage) -> None:
        """Handle a state that a worker pushed."""
        status = unpack(WorkerStatus, message.payload)
        replica = self._replicas.find(status.assignment, process)
        if replica is None:
            return
        if status.state is not LoadState.LOADING:
            process.restore_priority()  # the warm-up must measure what the replica will do at normal priority
        match status.state:
            case LoadState.LOADING | LoadState.WARMING:
                self._events.put_nowait(WorkerPhase(status.assignment, status.state.value))
            case LoadState.READY:
                replica.ready = _worker_ready(status)
                replica.load_done.set()
                if replica.ready is not None:
                    self._events.put_nowait(replica.ready)
            case LoadState.FAILED:
                replica.load_done.set()
                refusal = status.refusal or Refusal(Code.LOAD_FAILED)
                self._tasks.spawn(self._on_load_failed(status.assignment, refusal))

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
            await process.connect(partial(self._on_state_push, process), STATUS_S)
            report = unpack(WorkerReport, (await process.call("status", STATUS_S)).payload)
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
            replica.ready = _worker_ready(status)
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


def _is_deferrable(assignment: Assignment) -> bool:
    """Whether another replica serves until this one has passed its verification."""
    return assignment.verification is not None


def _worker_ready(status: WorkerStatus) -> WorkerReady | None:
    if status.state is not LoadState.READY or status.loaded is None:
        return None
    loaded = status.loaded
    return WorkerReady(status.assignment, loaded.measured, loaded.inputs, loaded.outputs, loaded.unwarmed)
