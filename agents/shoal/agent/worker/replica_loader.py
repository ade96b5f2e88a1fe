"""Brings a replica up: chooses a worker for it, loads the model there, and follows the load to its end."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from shoal.agent.frames import ConnectionLost
from shoal.agent.packing import pack
from shoal.agent.ports import AgentClock, PreparedModel, WorkerEvent, WorkerFailed, WorkerPhase
from shoal.agent.timeouts import wait_any
from shoal.agent.worker.background_tasks import BackgroundTasks
from shoal.agent.worker.load_orders import LoadOrders, may_share
from shoal.agent.worker.messages import LoadOrder, LoadState, WorkerStatus
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.process import WorkerProcess
from shoal.agent.worker.replica_table import ReplicaTable, WorkerReplica, worker_ready
from shoal.agent.worker.spare import SpareWorker, lower_priority_briefly
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds

SPARE_DELAY_S: Final = Seconds(15.0)
"""Delay before a new spare starts after a start that is not urgent: a spare takes a core for a second, which a
migration needs more."""
UNLOAD_S: Final = 2.0
"""A worker that does not unload a model within this many seconds is ended."""


class ReplicaLoader:
    """Loads models into workers. `publish` takes what the supervisor is to know of a replica."""

    def __init__(
        self,
        replicas: ReplicaTable,
        spare: SpareWorker,
        orders: LoadOrders,
        publish: Callable[[WorkerEvent], None],
        tasks: BackgroundTasks,
        clock: AgentClock,
        options: PoolOptions,
    ) -> None:
        self._replicas = replicas
        self._spare = spare
        self._orders = orders
        self._publish = publish
        self._tasks = tasks
        self._clock = clock
        self._options = options
        # One start at a time chooses, so that the next one finds the worker that it may share.
        self._choice_lock = asyncio.Lock()
        self._load_slots = asyncio.Semaphore(options.max_concurrent_loads)

    async def bring_up(
        self, assignment: Assignment, path: str, samples: str, prepared: PreparedModel | None = None
    ) -> None:
        """Always ends with an event: ready, failed or exited."""
        taken = False
        try:
            if not _is_deferrable(assignment):
                self._spare.restore_priority()
            async with self._load_slots:
                order = self._orders.order(assignment, path, samples, prepared)
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
            await self._fail(assignment.id, error.refusal)
        except ShoalError as error:
            await self._fail(assignment.id, error.refusal)
        finally:
            if _is_deferrable(assignment):
                self._spare.replenish_after(SPARE_DELAY_S)
            else:
                self._spare.replenish()

    def on_status(self, process: WorkerProcess, status: WorkerStatus) -> None:
        """The process reports how far a replica's load has come."""
        replica = self._replicas.find(status.assignment, process)
        if replica is None:
            return
        if status.state is not LoadState.LOADING:
            process.restore_priority()  # the warm-up must measure what the replica will do at normal priority
        match status.state:
            case LoadState.LOADING | LoadState.WARMING:
                self._publish(WorkerPhase(status.assignment, status.state.value))
            case LoadState.READY:
                replica.ready = worker_ready(status)
                replica.load_done.set()
                if replica.ready is not None:
                    self._publish(replica.ready)
            case LoadState.FAILED:
                replica.load_done.set()
                refusal = status.refusal or Refusal(Code.LOAD_FAILED)
                self._tasks.spawn(self._fail(status.assignment, refusal))

    async def release(self, assignment: str, process: WorkerProcess) -> None:
        """Remove the assignment from its process. End the process if it then holds nothing, or does not obey."""
        del process.assignments[assignment]
        process.verdicts.pop(assignment, None)
        if process.assignments and process.client is not None and not process.exit_event.is_set():
            process.save()
            try:
                await process.call("unload", UNLOAD_S, header={"assignment": assignment})
            except ConnectionLost:
                # the exit event says more
                pass
            except ShoalError as error:
                process.kill_reason = replace(error.refusal, code=Code.WORKER_STUCK)
                await process.end()
        else:
            await process.end()

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

    async def _fail(self, assignment: str, refusal: Refusal) -> None:
        replica = self._replicas.pop(assignment)
        self._publish(WorkerFailed(assignment, refusal))
        if replica is not None and refusal.code is Code.LOAD_TIMEOUT:
            # only the end of the process interrupts a load
            await replica.process.end()
        elif replica is not None:
            await self.release(assignment, replica.process)

    def _find_shared_worker(self, assignment: Assignment) -> WorkerProcess | None:
        """A worker that this assignment may join: same tenant and device, all shared, with room. None if there is
        none."""
        for process in self._replicas.processes():
            if not process.exit_event.is_set() and may_share(assignment, process.assignments.values(), self._options):
                return process
        return None


def _is_deferrable(assignment: Assignment) -> bool:
    """Whether another replica serves until this one has passed its verification."""
    return assignment.verification is not None
