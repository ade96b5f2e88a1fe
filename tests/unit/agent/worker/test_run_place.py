"""Where a request runs, by what was measured."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.agent.worker.queue_jobs import QueueJob

from harness.wait import until
from shoal.agent.worker.engine_run import EngineRun
from shoal.agent.worker.infer_job import InferJob
from shoal.agent.worker.process import EXIT_STUCK
from shoal.agent.worker.run_place import HOLD_S, RunPlace, inline_limit_s
from shoal.agent.worker.run_timeouts import MIN_LIMIT_S, RunTimeouts
from shoal.agent.worker.run_watch import WATCH_EVERY_S, RunWatch
from shoal.agent.worker.runner_threads import RunnerThreads, measure_hop
from shoal.types.codes import Code, Refusal

HOP_S = 60e-6


@pytest.mark.parametrize(
    ("processors", "run_s", "inline"),
    [(2, HOP_S / 2, True), (2, HOP_S * 2, False), (1, HOP_S * 2, True), (1, 2 * HOLD_S, False), (1, HOP_S / 2, True)],
)
def test_a_run_is_inline_while_the_hop_costs_more_than_it_hides(processors: int, run_s: float, inline: bool) -> None:
    place = RunPlace(inline_limit_s(HOP_S, processors))
    place.record(100, run_s)
    assert place.is_inline(100) is inline


def test_a_size_that_has_not_run_is_not_inline() -> None:
    place = RunPlace(HOP_S)
    assert not place.is_inline(100)
    place.record(100, HOP_S / 2)
    assert place.is_inline(127)
    assert not place.is_inline(128), "twice as many bytes"
    assert not RunPlace(0.0).is_inline(100)


def test_shapes_that_have_not_run_or_were_long_are_not_inline() -> None:
    place = RunPlace(HOP_S)
    wide, long = ((1, 4096),), ((4096, 1),)
    assert not place.is_short(wide)
    place.record_shapes(wide, HOP_S / 2)
    assert place.is_short(wide)
    place.record_shapes(long, HOP_S * 2)
    assert not place.is_short(long)
    place.record_shapes(wide, HOP_S * 2)
    assert not place.is_short(wide), "the last time counts"
    for length in range(2000):
        place.record_shapes(((length,),), HOP_S / 2)
    assert place.is_short(((1999,),))
    assert not place.is_short(((0,),)), "not all are remembered"


@given(st.lists(st.sampled_from([HOP_S / 3, HOP_S * 3]), min_size=40, max_size=40), st.sampled_from([1 / 3, 3]))
def test_it_follows_what_is_measured_now(before: list[float], now: float) -> None:
    place = RunPlace(HOP_S)
    for seconds in [*before, *[now * HOP_S] * 20]:
        place.record(100, seconds)
    assert place.is_inline(100) is (now < 1)


def test_the_first_runs_of_each_size_are_timed_and_then_one_of_eight() -> None:
    place = RunPlace(HOP_S)
    timed = [place.is_to_be_timed(100) for _ in range(64)]
    assert timed == [number <= 8 or number % 8 == 0 for number in range(1, 65)]
    assert place.is_to_be_timed(127) is False, "the same size"
    assert place.is_to_be_timed(128), "twice as many bytes"
    assert not RunPlace(0.0).is_to_be_timed(100), "nothing runs on the loop"


@pytest.mark.parametrize("period", [2, 4, 8])
def test_long_runs_between_short_ones_of_their_size_are_timed(period: int) -> None:
    """Whichever of eight they are."""
    for phase in range(period):
        place, inline = RunPlace(HOP_S), 0
        for number in range(1800):
            seconds = 5 * period * HOP_S if number % period == phase else HOP_S / 5
            inline += place.is_inline(100) and seconds > HOP_S
            if place.is_to_be_timed(100):
                place.record(100, seconds)
            else:
                place.record_untimed(100, seconds)
        assert inline <= 1800 / period / 8, (period, phase)


class Jobs:
    """Jobs, and what became of them."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def make(self, *, is_inline: bool) -> InferJob:
        made = InferJob(
            b"", "", "", 0.0, 1e9, lambda *each: self.outcomes.append(each), self.outcomes.append, is_metered=True
        )
        made.is_inline = is_inline
        EngineRun([made], 1).since = 0.0
        return made


class Stuck(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize("is_inline", [False, True])
async def test_a_run_without_end_is_terminated_and_then_ends_the_process(
    is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise Stuck(code)

    monkeypatch.setattr(os, "_exit", leave)
    job = Jobs().make(is_inline=is_inline)
    watch = RunWatch("a", RunTimeouts(1, 0.001), lambda: [job], lambda: 0.0)
    now = 0.0
    while now < MIN_LIMIT_S - 2 * WATCH_EVERY_S:
        now += WATCH_EVERY_S
        watch.look(now)
    run = job.run
    assert run is not None
    assert not run.options.terminate
    watch.look(now + 100.0)
    assert not run.options.terminate, "this process did not run meanwhile"
    now += 100.0
    for _ in range(3):
        now += WATCH_EVERY_S
        watch.look(now)
    with pytest.raises(Stuck, match=str(EXIT_STUCK)):
        watch.look(now + WATCH_EVERY_S)
    assert run.is_stuck
    assert run.options.terminate


async def test_the_watch_sleeps_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at a job that comes long after the last one."""
    monkeypatch.setattr("shoal.agent.worker.run_watch._DOZE_AFTER", 2)
    jobs: list[InferJob] = []
    loop = asyncio.get_running_loop()
    watch = RunWatch("a", RunTimeouts(1, 0.001), lambda: tuple(jobs), loop.time)
    for _ in range(2):
        job = Jobs().make(is_inline=False)
        run = EngineRun([job], 1)
        run.since = loop.time()
        jobs.append(job)
        watch.on_job()
        await until(lambda: run.watchdog is not None, 5, "seen")  # noqa: B023 - awaited here
        jobs.clear()
        await until(lambda: watch._is_dozing, 15, "asleep")
    watch.close()
    await until(lambda: not any(each.name == "watch" for each in threading.enumerate()), 5, "over")


async def test_jobs_run_in_order_and_are_completed_on_the_loop() -> None:
    here, got = threading.get_ident(), []
    ran: list[int] = []

    def run(jobs: Sequence[QueueJob]) -> Callable[[], object]:
        assert threading.get_ident() != here
        (job,) = jobs
        ran.append(job.number)

        def record() -> None:
            assert threading.get_ident() == here
            got.append(job.number)

        return record

    threads = RunnerThreads(1, "run", run)
    for number in range(500):
        threads.submit(QueueJob(number))
        if not number % 100:
            await until(lambda: bool(got), 5, "the first")
    await until(lambda: len(got) == 500, 5, "all")
    assert got == ran == list(range(500))
    threads.close()
    await until(lambda: not any(each.name.startswith("run_") for each in threading.enumerate()), 5, "over")


async def test_what_left_the_queue_costs_no_run_and_others_keep_their_order() -> None:
    held, ran = threading.Event(), list[int]()

    def run(jobs: Sequence[QueueJob]) -> Callable[[], object]:
        held.wait(30)
        ran.extend(job.number for job in jobs)
        return lambda: None

    threads = RunnerThreads(1, "run", run)
    jobs = [QueueJob(number, deadline=float(-(number % 7))) for number in range(100)]
    first = QueueJob(-1)
    threads.submit(first)
    await until(lambda: first.place is None, 5, "it runs")
    for job in jobs:
        threads.submit(job)
    for job in jobs[::3]:
        assert threads.discard(job)
        assert not threads.discard(job)
    assert not threads.discard(first), "it runs"
    held.set()
    kept = sorted((job for job in jobs if job.number % 3), key=lambda job: (job.deadline, job.number))
    await until(lambda: len(ran) == 1 + len(kept), 5, "all")
    assert ran == [-1, *(job.number for job in kept)]
    threads.close()


async def test_a_hop_is_measured() -> None:
    assert 1e-6 < await measure_hop() < 0.01


async def test_a_job_is_answered_once() -> None:
    jobs = Jobs()
    refusal = Refusal(Code.OVERLOADED, "f", "a", "r")
    job = jobs.make(is_inline=False)
    job.answer([b"x"])
    job.refuse(refusal)
    job.cancel()
    gone = jobs.make(is_inline=False)
    gone.cancel()
    gone.answer([b"y"])
    assert jobs.outcomes == [([b"x"], None)]
    run = EngineRun([gone], 1)
    assert run.options.terminate
    run.wait(60.0)
