"""What waits for a runner: the order, who leaves, and when batches are made."""

import math
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.agent.worker.queue_jobs import QueueJob

from harness.wait import until
from shoal.agent.worker.batching import BatchPlan, BatchPoint
from shoal.agent.worker.deadline_heap import DeadlineHeap
from shoal.agent.worker.job_queue import MOST_GROUPS, JobQueue
from shoal.agent.worker.runner_threads import RunnerThreads

RUN_S = 0.010
DELAY_S = 0.020
FLAT = tuple(BatchPoint(rows, RUN_S, RUN_S, RUN_S) for rows in (1, 2, 4, 8))
PLAN = BatchPlan(8, DELAY_S, FLAT)


def numbers(jobs: Sequence[QueueJob]) -> list[int]:
    return [job.number for job in jobs]


def queue_of(*jobs: QueueJob, is_idle: bool = False) -> JobQueue[QueueJob]:
    made: JobQueue[QueueJob] = JobQueue()
    made.set_plan(PLAN)
    for job in jobs:
        made.put(job, is_idle=is_idle)
    return made


@given(st.lists(st.tuples(st.floats(0, 5) | st.just(math.inf), st.booleans()), max_size=80))
def test_law_the_heap_is_a_stable_sort_of_those_that_stayed(asked: list[tuple[float, bool]]) -> None:
    heap: DeadlineHeap[QueueJob] = DeadlineHeap()
    jobs = [QueueJob(number, deadline) for number, (deadline, _) in enumerate(asked)]
    for job in jobs:
        heap.push(job, job.number)
    for job, (_, leaves) in zip(jobs, asked, strict=True):
        if leaves:
            heap.discard(job)
    kept = sorted((job for job, (_, leaves) in zip(jobs, asked, strict=True) if not leaves), key=lambda j: j.deadline)
    assert len(heap) == len(kept)
    assert {job.number for job in heap} == set(numbers(kept))
    assert heap.first() == ((kept[0].deadline, kept[0].number) if kept else None)
    assert numbers([heap.pop() for _ in kept]) == numbers(kept)
    assert all(job.place is None for job in jobs)
    with pytest.raises(IndexError):
        heap.pop()


def test_many_that_leave_take_no_place() -> None:
    heap: DeadlineHeap[QueueJob] = DeadlineHeap()
    stays = QueueJob(0, 1.0)
    heap.push(stays, 0)
    for number in range(1, 5_000):
        job = QueueJob(number, 2.0)
        heap.push(job, number)
        heap.discard(job)
    assert len(heap._places) < 50


Steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.sampled_from([None, "a", "b", "c"]), st.integers(1, 7), st.floats(0, 1), st.booleans()
        ),
        st.tuples(st.just("take"), st.floats(0, 0.05)),
        st.tuples(st.just("discard"), st.integers(0, 200)),
        st.tuples(st.just("stop batches")),
    ),
    max_size=60,
)


@given(Steps)
def test_law_each_job_runs_once_or_leaves_and_batches_keep_the_rules(steps: list[tuple[object, ...]]) -> None:
    queue = queue_of()
    waiting: dict[int, QueueJob] = {}
    now, put = 0.0, 0
    for step in steps:
        match step:
            case ("put", group, int(rows), float(left_s), bool(is_idle)):
                job = QueueJob(put, now + left_s, now, group, rows)
                waiting[put], put = job, put + 1
                queue.put(job, is_idle=is_idle)
            case ("take", float(pause_s)):
                now += pause_s
                due = queue.due_at(now) <= now
                taken = queue.take(now)
                assert bool(taken) is due, "it waits until the time that it says, and no longer"
                assert all(job is waiting.pop(job.number) for job in taken)
                if len(taken) > 1:
                    (group,) = {job.group for job in taken}
                    assert group is not None
                    assert sum(job.rows for job in taken) <= PLAN.size
                    left = [job for job in waiting.values() if job.group == group]
                    assert all((job.deadline, job.number) > (taken[-1].deadline, taken[-1].number) for job in left)
                assert numbers(taken) == numbers(sorted(taken, key=lambda job: (job.deadline, job.number)))
            case ("discard", int(number)):
                known = waiting.pop(number, None)
                if known is not None:
                    assert queue.discard(known)
                    assert not queue.discard(known)
            case _:
                queue.set_plan(None)
        assert len(queue) == len(waiting)
        assert all(job.place is not None for job in waiting.values())
    now += 2.0
    while taken := queue.take(now):
        assert all(job is waiting.pop(job.number) for job in taken)
    assert not waiting


def test_a_request_that_nothing_runs_beside_does_not_wait() -> None:
    assert numbers(queue_of(QueueJob(0, group="a"), is_idle=True).take(0.0)) == [0]


def test_others_are_waited_for_as_long_as_the_delay() -> None:
    queue = queue_of(QueueJob(0, group="a"), QueueJob(1, group="a", arrived_at=0.015))
    assert queue.due_at(0.015) == DELAY_S
    assert not queue.take(0.019)
    assert numbers(queue.take(0.020)) == [0, 1]


def test_a_full_batch_does_not_wait() -> None:
    queue = queue_of(*(QueueJob(number, group="a", rows=3) for number in range(4)))
    assert numbers(queue.take(0.0)) == [0, 1], "a third would be 9 rows"
    assert not queue.take(0.0), "6 of 8 rows"


def test_a_deadline_that_needs_it_closes_the_batch_early() -> None:
    queue = queue_of(QueueJob(0, group="a"), QueueJob(1, 0.015, group="a"))
    assert queue.due_at(0.0) == pytest.approx(0.005)
    assert numbers(queue.take(0.006)) == [1, 0]


def test_what_waits_for_others_lets_later_ones_pass() -> None:
    queue = queue_of(QueueJob(0, 1.0, group="a"), QueueJob(1, 2.0), QueueJob(2, 3.0, group="b", rows=8))
    assert numbers(queue.take(0.0)) == [1]
    assert numbers(queue.take(0.0)) == [2]
    assert not queue.take(0.0)
    assert numbers(queue.take(DELAY_S)) == [0]


def test_the_earliest_deadline_of_all_runs_first() -> None:
    queue = queue_of(QueueJob(0, 2.0, group="a", rows=8), QueueJob(1, 1.0, group="b", rows=8), QueueJob(2, 3.0))
    assert [numbers(queue.take(0.0)) for _ in range(3)] == [[1], [0], [2]]


async def test_threads_make_a_batch_of_what_waits_and_keep_to_the_delay() -> None:
    """Two threads: one runs, the other waits for the batch, as long as the delay and no longer."""
    go, ran = threading.Event(), list[list[int]]()

    def run(jobs: Sequence[QueueJob]) -> Callable[[], object]:
        if jobs[0].number < 0:
            go.wait(30)
        ran.append(numbers(jobs))
        return lambda: None

    threads = RunnerThreads(2, "run", run)
    threads.set_plan(PLAN)
    blocker = QueueJob(-1)
    threads.submit(blocker)
    await until(lambda: blocker.place is None, 5, "it runs")
    now = threads._clock()
    for number in range(3):
        threads.submit(QueueJob(number, group="a", arrived_at=now, deadline=now + 60))
    await until(lambda: ran == [[0, 1, 2]], 5, "the batch")
    assert threads._clock() - now >= DELAY_S
    for number in range(3, 14):
        threads.submit(QueueJob(number, group="a", arrived_at=threads._clock(), deadline=now + 60))
    await until(lambda: len(ran) == 3, 5, "a full batch, and what is left after the delay")
    assert ran[1:] == [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13]]
    go.set()
    await until(lambda: len(ran) == 4, 5, "the first")
    threads.close()
    await until(lambda: not any(each.name.startswith("run_") for each in threading.enumerate()), 5, "over")


async def test_an_urgent_request_shortens_a_wait_that_has_begun() -> None:
    go, ran = threading.Event(), list[list[int]]()

    def run(jobs: Sequence[QueueJob]) -> Callable[[], object]:
        if jobs[0].number < 0:
            go.wait(30)
        ran.append(numbers(jobs))
        return lambda: None

    threads = RunnerThreads(2, "run", run)
    threads.set_plan(BatchPlan(8, 600.0, FLAT))
    blocker = QueueJob(-1)
    threads.submit(blocker)
    await until(lambda: blocker.place is None, 5, "it runs")
    now = threads._clock()
    threads.submit(QueueJob(0, group="a", arrived_at=now, deadline=now + 900))
    await until(lambda: threads._next_look < math.inf and threads._idle == 1, 5, "the other thread waits")
    threads.submit(QueueJob(1, group="a", arrived_at=now, deadline=now + 0.2))
    await until(lambda: ran == [[1, 0]], 5, "the batch")
    go.set()
    threads.close()


def test_requests_of_too_many_groups_run_alone() -> None:
    queue = queue_of(*(QueueJob(number, group=number) for number in range(MOST_GROUPS + 2)))
    assert [numbers(queue.take(0.0)) for _ in range(3)] == [[MOST_GROUPS], [MOST_GROUPS + 1], []]
    assert len(queue) == MOST_GROUPS


def test_what_a_batch_leaves_waits_by_its_own_time() -> None:
    early, late = QueueJob(0, group="a", rows=8), QueueJob(1, group="a", arrived_at=0.010)
    queue = queue_of(early, late)
    assert numbers(queue.take(0.010)) == [0]
    assert queue.due_at(0.010) == pytest.approx(0.010 + DELAY_S)


def test_a_batch_is_no_larger_than_its_earliest_deadline_allows() -> None:
    plan = BatchPlan(8, DELAY_S, tuple(BatchPoint(rows, rows / 1e3, rows / 1e3, rows / 1e3) for rows in (1, 2, 4, 8)))
    for left_s, taken in ((1.0, 8), (0.005, 4), (0.0015, 1), (0.0005, 8)):
        queue: JobQueue[QueueJob] = JobQueue()
        queue.set_plan(plan)
        for number in range(8):
            queue.put(QueueJob(number, left_s if number == 5 else 2.0, group="a"), is_idle=False)
        batch = numbers(queue.take(0.0))
        assert (batch[0], len(batch)) == (5, taken), left_s
