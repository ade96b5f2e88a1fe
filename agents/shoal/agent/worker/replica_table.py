"""The replicas of a node, each with its worker: several may be in one process."""

import asyncio

from shoal.agent.ports import WorkerReady, WorkerStats
from shoal.agent.worker.messages import LoadState, WorkerStatus
from shoal.agent.worker.process import WorkerProcess


class WorkerReplica:
    """The worker of an assignment, and the last state that it reported."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        # True once the worker got the load order. False while it waits for its turn.
        self.has_load_begun = False
        # Set when loading is over, successful or not.
        self.load_done = asyncio.Event()
        self.ready: WorkerReady | None = None
        self.stats: WorkerStats | None = None


class ReplicaTable:
    """The replicas by assignment."""

    def __init__(self) -> None:
        self._replicas: dict[str, WorkerReplica] = {}

    def add(self, assignment: str, process: WorkerProcess) -> WorkerReplica:
        """A replica in that process, which has reported nothing yet."""
        replica = self._replicas[assignment] = WorkerReplica(process)
        return replica

    def get(self, assignment: str) -> WorkerReplica | None:
        return self._replicas.get(assignment)

    def find(self, assignment: str, process: WorkerProcess) -> WorkerReplica | None:
        """The replica, if it is in this process: what another one says of it is late."""
        replica = self._replicas.get(assignment)
        return replica if replica is not None and replica.process is process else None

    def pop(self, assignment: str) -> WorkerReplica | None:
        return self._replicas.pop(assignment, None)

    def clear(self) -> None:
        self._replicas.clear()

    def replicas(self) -> tuple[WorkerReplica, ...]:
        return tuple(self._replicas.values())

    def processes(self) -> tuple[WorkerProcess, ...]:
        """Each process once, in the order of its first replica."""
        return tuple(dict.fromkeys(replica.process for replica in self._replicas.values()))

    def in_process(self, process: WorkerProcess) -> dict[str, WorkerReplica]:
        return {name: replica for name, replica in self._replicas.items() if replica.process is process}


def worker_ready(status: WorkerStatus) -> WorkerReady | None:
    """The replica as its worker reports it; None unless it is ready."""
    if status.state is not LoadState.READY or status.loaded is None:
        return None
    loaded = status.loaded
    return WorkerReady(status.assignment, loaded.measured, loaded.inputs, loaded.outputs, loaded.note, loaded.operators)
