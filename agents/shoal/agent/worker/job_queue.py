"""What waits for a runner: the earliest deadline first, and what may run together as batches.

Not for several threads; `runner_threads` holds the lock.
"""

import math
from collections.abc import Hashable
from typing import Any, Final, Generic, Protocol, TypeVar

from shoal.agent.worker.batching import BatchPlan
from shoal.agent.worker.deadline_heap import NUMBER, DeadlineHeap

MOST_GROUPS: Final = 16
"""Groups that wait at the same time; requests of others run alone. Every look at the queue looks at all of them."""


class QueuedJob(Protocol):
    """What a queue needs of a job, beside `deadline_heap.Waiting`."""

    arrived_at: float
    deadline: float
    # Requests of one group may run as one batch. None: it runs alone.
    group: Hashable | None
    # Inputs that it brings along the first axis.
    rows: int
    # As in `deadline_heap.Waiting`.
    place: list[Any] | None
    # Its batch begins at this time at the latest. Only the queue writes it.
    start_by: float

    @property
    def due(self) -> float:
        """As in `deadline_heap.Waiting`."""
        ...


J = TypeVar("J", bound=QueuedJob)


class _Lane(DeadlineHeap[J]):
    """The jobs of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        # The batch begins at this time at the latest, full or not.
        self.start_by = math.inf


class JobQueue(Generic[J]):
    """Jobs of one model. Those of one deadline run in the order in which they came."""

    def __init__(self) -> None:
        # How batches are made. None: each job runs alone. Only `set_plan` changes it.
        self.plan: BatchPlan | None = None
        self._alone: DeadlineHeap[J] = DeadlineHeap()
        self._lanes: dict[Hashable, _Lane[J]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._alone) + sum(map(len, self._lanes.values()))

    def set_plan(self, plan: BatchPlan | None) -> None:
        """What waits runs alone."""
        waiting = [job for lane in self._lanes.values() for job in lane]
        self._lanes.clear()
        self.plan = plan
        for job in waiting:
            assert job.place is not None
            self._put_alone(job, job.place[NUMBER])

    def put(self, job: J, *, is_idle: bool) -> None:
        """`is_idle`: nothing runs, so that the job need not wait for others."""
        self._number += 1
        if job.group is None or self.plan is None:
            self._put_alone(job, self._number)
            return
        lane = self._lanes.get(job.group)
        if lane is None and len(self._lanes) >= MOST_GROUPS:
            self._put_alone(job, self._number)
            return
        if lane is None:
            lane = self._lanes[job.group] = _Lane()
        job.start_by = job.arrived_at if is_idle and not lane.rows else job.arrived_at + self.plan.delay_s
        lane.start_by = min(lane.start_by, job.start_by)
        lane.rows += job.rows
        lane.push(job, self._number)

    def discard(self, job: J) -> bool:
        """Whether the job waited here. It leaves."""
        if job.place is None:
            return False
        lane = self._lanes.get(job.group) if job.group is not None else None
        if lane is None:
            self._alone.discard(job)
        else:
            lane.discard(job)
            lane.rows -= job.rows
            if not lane.rows:
                del self._lanes[job.group]
        return True

    def due_at(self, now: float) -> float:
        """When `take` gives something: not after `now`, if it does at once; inf if nothing waits."""
        if self._alone or self.plan is None:
            return now if self._alone else math.inf
        return min((self._closes_at(lane, self.plan) for lane in self._lanes.values()), default=math.inf)

    def take(self, now: float) -> list[J]:
        """The jobs of the next run: one, or a batch. Empty: none is due."""
        if not self._lanes:
            return [self._alone.pop()] if self._alone else []
        assert self.plan is not None
        chosen: Hashable | None = None
        earliest: tuple[float, float] = self._alone.first() or (math.inf, math.inf)
        for group, lane in self._lanes.items():
            first = lane.first()
            assert first is not None
            if first < earliest and self._closes_at(lane, self.plan) <= now:
                chosen, earliest = group, first
        if chosen is None:
            return [self._alone.pop()] if self._alone else []
        return self._take_batch(chosen, self.plan, now)

    def _put_alone(self, job: J, number: int) -> None:
        job.group = None
        self._alone.push(job, number)

    def _take_batch(self, group: Hashable, plan: BatchPlan, now: float) -> list[J]:
        lane = self._lanes[group]
        left = plan.rows_to_take(lane.rows, lane.peek().deadline - now)
        taken: list[J] = []
        while lane.rows and (not taken or lane.peek().rows <= left):
            job = lane.pop()
            taken.append(job)
            lane.rows -= job.rows
            left -= job.rows
        if lane.rows:
            lane.start_by = min(job.start_by for job in lane)
        else:
            del self._lanes[group]
        return taken

    def _closes_at(self, lane: _Lane[J], plan: BatchPlan) -> float:
        first = lane.first()
        assert first is not None
        if lane.rows >= plan.size:
            return -math.inf
        return min(lane.start_by, first[0] - plan.seconds(lane.rows))
