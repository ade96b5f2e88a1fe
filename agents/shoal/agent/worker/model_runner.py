"""Serves one loaded model: takes its requests, runs them on the event loop or in threads, and meters them."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import structlog

from shoal.agent.frames import FrameMessage, InferCall, Payload
from shoal.agent.frames.connection import TURN_S
from shoal.agent.worker import isolation
from shoal.agent.worker.answer_writer import AnswerWriter
from shoal.agent.worker.batch_trial import BatchTrial
from shoal.agent.worker.batches import Batch, group_of, row_bytes, rows_of
from shoal.agent.worker.batching import BatchDecision, BatchPlan
from shoal.agent.worker.deadline_heap import DeadlineHeap
from shoal.agent.worker.engine import Engine, reference_shapes
from shoal.agent.worker.engine_run import EngineRun
from shoal.agent.worker.failures import memory_refusal
from shoal.agent.worker.infer_job import InferJob, OnAnswer, Parts
from shoal.agent.worker.messages import LoadOrder, LoadResult
from shoal.agent.worker.metering import Metering
from shoal.agent.worker.model_loading import energy_of_order, pace_of, scale_of
from shoal.agent.worker.pace import element_count, hold_slot
from shoal.agent.worker.padding_trial import PaddingTrial
from shoal.agent.worker.providers import CPU_PROVIDER
from shoal.agent.worker.request_reader import InferRequest, RequestReader, align
from shoal.agent.worker.run_place import RunPlace, Shapes
from shoal.agent.worker.run_timeouts import RunTimeouts
from shoal.agent.worker.run_watch import RunWatch
from shoal.agent.worker.runner_threads import RunnerThreads
from shoal.agent.worker.tensors import DATATYPES, Array, batch_input, decode_response
from shoal.host.event_wait import wait_or_timeout
from shoal.inference.open_inference_pb2 import ModelInferResponse
from shoal.types.assignment import Batching
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds

_log = structlog.get_logger(__name__)

MAX_RUN_S: Final = 300.0
"""Upper limit on the time of any request, whatever its deadline."""
IDLE_WAIT_S: Final = 0.25
"""A request for a comparison waits at most this long for a moment without other requests."""
TRIAL_IDLE_WAIT_S: Final = 0.05
"""A run that measures batches waits at most this long for such a moment. There are some hundred of them."""
TRIAL_WAIT_S: Final = 5.0
"""Then it begins within this time, however many requests wait: their deadlines come later."""
_TRIAL_ATTEMPTS: Final = 10
_MOST_OWN: Final = 16
"""Requests of this process (trials, comparisons) beyond those of clients: who fill the queue must keep it neither from
being measured nor a move from being verified. There is one at a time of each kind."""
_NO_TURN: Final = frozenset({Code.OVERLOADED, Code.DEADLINE_EXCEEDED})
"""Of a replica that is overloaded just now."""
_HEAD_BYTES: Final = 24
"""Of a request for each input: tags and lengths, a datatype, a shape, and a part of the model's name."""
_NO_SLOT: Final = nullcontext()
_CLIENT_FAULTS: Final = frozenset(
    {Code.INVALID_ARGUMENT, Code.FIELD_TOO_MANY, Code.TOO_LARGE, Code.UNIMPLEMENTED, Code.CANCELLED}
)
_DEADLINE_PASSED: Final = Refusal(
    Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more time"
)


class ModelRunner:
    """A loaded model. Lives on the event loop; only what `_run_jobs` calls also runs in threads.

    `place` chooses where a request runs. `on_busy_change` is called when the model becomes busy (True) or idle.
    """

    def __init__(
        self,
        order: LoadOrder,
        engine: Engine,
        loaded: LoadResult,
        place: RunPlace,
        on_busy_change: Callable[[bool], None],
    ) -> None:
        self.loaded = loaded
        self._order = order
        self._engine = engine
        self._place = place
        self._on_busy_change = on_busy_change
        self._pace = pace_of(order)
        self._scale = order.access.pace.time_scale if order.access.pace else 1.0
        self.metering = Metering(energy_of_order(order, self._pace))
        self._reader = RequestReader(engine.inputs, engine.outputs, order.max_request_bytes, isolation.headroom_bytes)
        self._writer = AnswerWriter()
        reference = {spec.name: shape for spec, shape in reference_shapes(engine.inputs, order.work.shapes)}
        # The time of this machine: what is measured of an emulated device is its own.
        self._timeouts = RunTimeouts(element_count(reference), loaded.run_s)
        # Those that wait or run. The watch looks at it from its thread.
        self._jobs: set[InferJob] = set()
        self._threads: RunnerThreads[InferJob] = RunnerThreads(order.runners, "run", self._run_jobs)
        # Jobs for the event loop that came when its turn was over.
        self._inline_queue: DeadlineHeap[InferJob] = DeadlineHeap()
        self._inline_count = 0
        self._is_inline_turn_due = False
        # How requests run in batches. None: each runs alone.
        self._plan: BatchPlan | None = None
        self._row_bytes = row_bytes(engine.inputs, order.work)
        self._batch_input = batch_input(engine.inputs)
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._watch = RunWatch(order.assignment, self._timeouts, lambda: tuple(self._jobs), self._clock)
        # Of the earliest deadline of a job that waits or runs in a thread, or of one that was earlier.
        self._deadline_timer: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    def infer(self, call: InferCall) -> None:
        """Answer `call`, at once or later. Raises ShoalError(OVERLOADED)."""
        asked = call.header
        job = self._accept(
            call.payload, asked.origin, asked.trace, asked.deadline, call.answer, call.refuse, is_metered=True
        )
        call.on_cancel = partial(self._cancel, job)
        if self._plan is not None:
            self._prepare_for_batch(job, self._plan)
            self._run_in_thread(job)
            return
        if not self._place.is_inline(len(job.payload)):
            self._run_in_thread(job)
            return
        job.is_inline = True
        if not self._inline_queue and not call.is_turn_over:
            self._run_on_loop(job)
            return
        self._set_deadline(job.deadline)
        self._inline_count += 1
        self._inline_queue.push(job, self._inline_count)
        if not self._is_inline_turn_due:
            self._is_inline_turn_due = True
            self._loop.call_soon(self._run_inline_queue)

    async def infer_when_idle(self, message: FrameMessage) -> FrameMessage:
        """As `infer`, for a comparison with another replica: no client waits for it, it is not counted, and it runs
        alone. It waits for what runs, and not for all those whose deadlines come earlier: under load there would always
        be others."""
        await wait_or_timeout(self._idle, IDLE_WAIT_S)
        left = message.header.get("deadline_s")
        deadline = self._clock() + (float(left) if isinstance(left, int | float) else MAX_RUN_S)
        _, parts = await self._ask(message.payload, deadline, due=self._clock())
        return FrameMessage("answer", {}, b"".join(parts))

    async def measure_batching(self, rule: Batching, hop_s: Seconds) -> BatchDecision:
        """Measure whether requests are to run in batches, and do so from now on. It runs beside what clients send, and
        takes a runner's time for a run now and then. `hop_s`: cost of a hop to a runner's thread."""
        trial = BatchTrial(self._order, self._engine, self._run_trial)
        try:
            decision = await trial.decide(rule, self.loaded, hop_s)
            if rule.padding:
                decision = await PaddingTrial(self._order, self._engine, self._run_trial).decide(rule, decision)
        except ShoalError as error:
            decision = BatchDecision(None, f"no batches: they could not be measured: {error.refusal.found}")
        size = decision.plan.size if decision.plan is not None else 1
        _log.info("batching_chosen", assignment=self._order.assignment, size=size, reason=decision.reason)
        self._set_plan(decision.plan)
        return decision

    def close(self) -> None:
        """End the requests in flight, and accept no new ones."""
        gone = Refusal(
            Code.MODEL_NOT_READY, f"{self._order.assignment} was unloaded", "a ready replica", "retry elsewhere"
        )
        for job in tuple(self._jobs):
            job.refuse(gone)
            self._cancel(job)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._threads.close()
        self._watch.close()

    async def _ask(
        self, payload: Payload, deadline: float, request: InferRequest | None = None, due: float | None = None
    ) -> tuple[InferJob, Parts]:
        """A request of this process, and its answer. It runs alone. due: as in `InferJob`; by default its deadline.
        Raises ShoalError."""
        answered: asyncio.Future[Parts] = self._loop.create_future()
        job = self._accept(
            payload,
            "",
            "",
            deadline,
            lambda parts, _: None if answered.done() else answered.set_result(parts),
            lambda refusal: None if answered.done() else answered.set_exception(ShoalError(refusal)),
            is_metered=False,
        )
        job.request = request
        if due is not None:
            job.due = due
        self._run_in_thread(job)
        try:
            return job, await answered
        finally:
            self._cancel(job)

    async def _run_trial(self, request: InferRequest) -> tuple[dict[str, Array], float]:
        """Outputs and seconds of a run: at a moment without others if there is one soon, else in its turn. Raises
        ShoalError."""
        job, parts = await self._ask_in_turn(request, _TRIAL_ATTEMPTS)

        def read() -> dict[str, Array]:
            answer = ModelInferResponse.FromString(b"".join(parts))
            return decode_response(answer, self._engine.outputs, self._order.max_request_bytes)

        return await asyncio.to_thread(read), job.run_s

    async def _ask_in_turn(self, request: InferRequest, attempts: int) -> tuple[InferJob, Parts]:
        await wait_or_timeout(self._idle, TRIAL_IDLE_WAIT_S)
        try:
            return await self._ask(b"", self._clock() + TRIAL_WAIT_S, request)
        except ShoalError as error:
            if error.code not in _NO_TURN or attempts == 1:
                raise
        return await self._ask_in_turn(request, attempts - 1)

    def _accept(
        self,
        payload: Payload,
        origin: str,
        trace: str,
        deadline: float,
        on_answer: OnAnswer,
        on_refusal: Callable[[Refusal], object],
        *,
        is_metered: bool,
    ) -> InferJob:
        """Raises ShoalError(OVERLOADED)."""
        most = self._order.queue if is_metered else self._order.queue + _MOST_OWN
        if len(self._jobs) >= most:
            raise refuse(Code.OVERLOADED, f"{len(self._jobs)} requests wait here", f"at most {most}", "retry later")
        now = self._clock()
        latest = now + MAX_RUN_S
        job = InferJob(
            payload,
            origin,
            trace,
            now,
            deadline if deadline < latest else latest,  # NaN is not less
            on_answer,
            on_refusal,
            is_metered=is_metered,
        )
        self._jobs.add(job)
        if len(self._jobs) == 1:
            self._idle.clear()
            self._on_busy_change(True)  # before the run, because the run can crash
        self._watch.on_job()
        return job

    def _run_in_thread(self, job: InferJob) -> None:
        self._set_deadline(job.deadline)
        self._threads.submit(job)

    def _run_jobs(self, jobs: Sequence[InferJob]) -> Callable[[], object]:
        """In a runner's thread. What it returns is for the event loop."""
        if len(jobs) > 1:
            return partial(self._complete_batch, jobs, self._execute_batch(jobs))
        outcome = self._execute(jobs[0])
        assert outcome is not None
        return partial(self._complete, jobs[0], outcome)

    def _run_on_loop(self, job: InferJob) -> None:
        outcome = self._execute(job)
        if outcome is None:
            job.is_inline = False
            self._run_in_thread(job)
        else:
            self._complete(job, outcome)

    def _run_inline_queue(self) -> None:
        """Run what waits for the event loop, until its turn is over."""
        until = self._clock() + TURN_S
        while self._inline_queue:
            self._run_on_loop(self._inline_queue.pop())
            if self._inline_queue and self._clock() >= until:
                self._loop.call_soon(self._run_inline_queue)
                return
        self._is_inline_turn_due = False

    def _complete_batch(self, jobs: Sequence[InferJob], outcomes: Sequence[Parts | Refusal]) -> None:
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._complete(job, outcome)

    def _complete(self, job: InferJob, outcome: Parts | Refusal) -> None:
        self._remove(job)
        if isinstance(outcome, Refusal):
            job.refuse(outcome)
        else:
            job.answer(outcome)

    def _remove(self, job: InferJob) -> None:
        self._jobs.discard(job)
        if not self._jobs:
            self._idle.set()
            self._on_busy_change(False)

    def _cancel(self, job: InferJob) -> None:
        """Nobody waits for it any more. If it has not begun, it leaves at once."""
        job.cancel()
        if job.place is None:
            return
        if job.is_inline:
            self._inline_queue.discard(job)
        elif not self._threads.discard(job):
            return  # its run has just begun
        if job.is_metered:
            self.metering.record_failure(job.origin, 0.0, own_fault=False, is_late=True)
        self._remove(job)

    def _set_deadline(self, deadline: float) -> None:
        """One timer serves all jobs: nearly every job is answered before its deadline."""
        if self._deadline_timer is None or deadline < self._deadline_timer.when():
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer = None
        now = self._clock()
        waiting = [job for job in self._jobs if not job.is_over]
        for job in waiting:
            if job.deadline <= now:
                job.refuse(_DEADLINE_PASSED)
                self._cancel(job)
        later = min((job.deadline for job in waiting if job.deadline > now), default=None)
        if later is not None:
            self._set_deadline(later)

    def _set_plan(self, plan: BatchPlan | None) -> None:
        self._plan = plan
        self._threads.set_plan(plan)

    def _prepare_for_batch(self, job: InferJob, plan: BatchPlan) -> None:
        """Find out what the job may run together with: requests of the lengths that may be filled up, or of its own
        shapes and about the size that was measured (the bytes of a row have the same number of binary digits); in
        batches that hold no more than a request may."""
        if len(job.payload) * plan.size > self._order.max_request_bytes:
            return
        job.request = request = self._reader.read_views(job.payload)
        if request is None:
            return
        rows = rows_of(request.feeds)
        if not 0 < rows < plan.size:
            return
        if plan.padding is not None and plan.padding.is_for(request.feeds):
            job.axis = plan.padding.axis
            job.rows, job.group = rows, group_of(request, job.axis)
            return
        size = sum(feed.nbytes for feed in request.feeds.values()) // rows
        if size.bit_length() == self._row_bytes.bit_length():
            job.rows, job.group = rows, group_of(request)

    def _execute(self, job: InferJob) -> Parts | Refusal | None:
        """Run the request and meter it whatever its outcome. None: it is for a thread."""
        busy_s = 0.0
        run: EngineRun | None = None
        self._mark_stage(job, "queue")
        try:
            if job.is_over or self._clock() >= job.deadline:
                raise ShoalError(_DEADLINE_PASSED)
            request = job.request
            if request is not None:
                request = request._replace(feeds={name: align(feed) for name, feed in request.feeds.items()})
            else:
                # what protobuf must parse may take long
                request = self._reader.read_usual(job.payload) if job.is_inline else self._reader.read(job.payload)
            if request is None or (job.is_inline and not self._place.is_short(_shapes(request.feeds))):
                return None
            self._mark_stage(job, "decode")
            run = EngineRun((job,), _elements(request.feeds))
            try:
                outputs, busy_s, missed = self._run(run, request)
                parts = self._writer.write(request.names, outputs)
            finally:
                run.close()
            self._mark_stage(job, "encode")
        except ShoalError as error:
            return self._on_refused(job, error.refusal, busy_s, is_stuck=run is not None and run.is_stuck)
        except Exception as error:
            if job.is_metered:
                self.metering.record_failure(job.origin, busy_s, own_fault=True)
            _log.exception("run_failed", assignment=self._order.assignment)
            return memory_refusal(error) or Refusal(Code.INTERNAL, type(error).__name__, "an answer", "see the log")
        batch = int(request.feeds[self._batch_input].shape[0]) if self._batch_input is not None else 1
        self._record_answer(job, busy_s, batch, pace_missed=missed)
        return parts

    def _execute_batch(self, jobs: Sequence[InferJob]) -> list[Parts | Refusal]:
        """Run the requests as one, and those of a batch that fails in smaller ones, at last each alone: whatever is
        wrong with one is its own."""
        now = self._clock()
        answers = self._answers([job for job in jobs if not job.is_over and now < job.deadline])
        outcomes = [answers.get(job) or self._execute(job) for job in jobs]
        return [outcome for outcome in outcomes if outcome is not None]  # only what is for the loop gives None

    def _answers(self, jobs: Sequence[InferJob]) -> Mapping[InferJob, Parts]:
        """Answers by job. Jobs without one are to run alone."""
        if len(jobs) < 2:
            return {}
        found = self._answer_together(jobs)
        if found is not None:
            return found
        middle = len(jobs) // 2
        return {**self._answers(jobs[:middle]), **self._answers(jobs[middle:])}

    def _answer_together(self, jobs: Sequence[InferJob]) -> Mapping[InferJob, Parts] | None:
        """Answers by job. Empty: each is to run alone. None: the batch failed."""
        requests = [job.request for job in jobs if job.request is not None]
        batch = Batch([request.feeds for request in requests], [job.rows for job in jobs], jobs[0].axis)
        run: EngineRun | None = None
        for job in jobs:
            self._mark_stage(job, "queue")
        try:
            joined = requests[0]._replace(feeds=batch.join())
            for job in jobs:
                self._mark_stage(job, "decode")
            run = EngineRun(jobs, _elements(joined.feeds))
            try:
                outputs, busy_s, missed = self._run(run, joined)
            finally:
                run.close()
            parts = batch.split(outputs)
            if parts is None:
                _log.warning("batching_stopped", assignment=self._order.assignment)
                self._loop.call_soon_threadsafe(self._set_plan, None)
                return {}
            answers = {
                job: self._writer.write(request.names, part)
                for job, request, part in zip(jobs, requests, parts, strict=True)
            }
        except Exception:  # smaller runs show whose fault it is
            return {} if run is not None and run.is_stuck else None
        total, is_counted = sum(batch.rows), True
        for job in jobs:
            own_s = busy_s * job.rows / total
            if job.is_over:  # its caller went while others of its batch waited
                self.metering.record_failure(job.origin, own_s, own_fault=False, is_late=True)
                continue
            self._mark_stage(job, "encode")
            self._record_answer(job, own_s, total, is_counted=is_counted, pace_missed=missed)
            is_counted = False
        return answers

    def _run(self, run: EngineRun, request: InferRequest) -> tuple[dict[str, Array], float, bool]:
        """(outputs, seconds the device was busy in device time, whether the real run took longer than the pace)."""
        with hold_slot(self._order.slots) if self._order.slots else _NO_SLOT:
            for job in run.jobs:
                self._mark_stage(job, "wait")
            # what a batch takes says nothing of one alone
            alone = run.jobs[0] if len(run.jobs) == 1 else None
            size = len(alone.payload) if alone is not None else 0
            is_timed = size > 0 and self._place.is_to_be_timed(size)
            cpu_start = time.thread_time() if is_timed else 0.0
            run.since = start = self._clock()
            try:
                outputs = self._engine.run(request.feeds, request.outputs, run.options)
            finally:
                run.since = None
            real_s = self._clock() - start
            if is_timed:
                self._place.record(size, time.thread_time() - cpu_start)
            elif size:
                self._place.record_untimed(size, real_s)
            busy_s, missed = self._keep_pace(run, real_s, request.feeds)
            if alone is not None:
                alone.run_s = self._clock() - start if self._pace is not None else real_s
                if self._place.limit_s:
                    self._place.record_shapes(_shapes(request.feeds), real_s)
                self._timeouts.record_run(run.size, real_s)
            for job in run.jobs:
                self._mark_stage(job, "run")
        return outputs, busy_s, missed

    def _record_answer(
        self, job: InferJob, busy_s: float, batch: int, *, pace_missed: bool, is_counted: bool = True
    ) -> None:
        """`is_counted`: it is the one of its run that counts the batch."""
        if job.stages is not None:
            job.stages["batch"] = batch
        if job.is_metered:
            latency_s = busy_s if self._is_simulated else (self._clock() - job.arrived_at) / self._scale
            size = batch if is_counted else None
            self.metering.record_answer(job.origin, latency_s, busy_s, pace_missed=pace_missed, batch=size)

    def _on_refused(self, job: InferJob, refusal: Refusal, busy_s: float, *, is_stuck: bool) -> Refusal:
        if is_stuck:
            refusal = Refusal(
                Code.WORKER_STUCK,
                f"a run of {self._order.assignment} went on for much longer than any before",
                "an end to it",
                "it was terminated; it is tried once more elsewhere",
            )
        code = Code.DEADLINE_EXCEEDED if job.is_over else refusal.code
        if job.is_metered:
            late = code is Code.DEADLINE_EXCEEDED and not is_stuck
            self.metering.record_failure(job.origin, busy_s, own_fault=code not in _CLIENT_FAULTS, is_late=late)
        return refusal

    def _mark_stage(self, job: InferJob, name: str) -> None:
        """The stage ends now."""
        if job.stages is not None:
            job.stages[name] = self._clock()

    @property
    def _is_simulated(self) -> bool:
        return self._order.access.pace is not None and self._order.access.pace.simulated

    def _keep_pace(self, run: EngineRun, real_s: float, feeds: Mapping[str, Array]) -> tuple[float, bool]:
        """(seconds the device was busy, in device time; whether the real run took longer than the pace)."""
        pace = self._order.access.pace
        if pace is None or self._pace is None:
            return real_s, False
        shapes = {name: feed.shape for name, feed in feeds.items()}
        device_s = self._pace.seconds(scale_of(self._order, shapes))
        if pace.simulated:
            return device_s, False
        run.wait(device_s * pace.time_scale - real_s)
        return device_s, real_s > device_s * pace.time_scale


def _shapes(feeds: Mapping[str, Array]) -> Shapes:
    return tuple([feed.shape for feed in feeds.values()])


def _elements(feeds: Mapping[str, Array]) -> int:
    """Of all of them together."""
    count = 0
    for feed in feeds.values():
        count += feed.size
    return count


def run_place(order: LoadOrder, engine: Engine, loaded: LoadResult, limit_s: float) -> RunPlace:
    """Where the order's model runs. `limit_s`: as `RunPlace` takes it.

    The loop waits for no device, no turn and no emulated pace, for no run of several threads, and for no model whose
    values can make a run long. Strings come by protobuf, which is not for the loop. The warm-up is the first
    measurement.
    """
    is_plain = order.provider == CPU_PROVIDER and order.threads == 1 and not order.slots and order.access.pace is None
    is_bounded = engine.is_bounded_by_shapes and all(spec.dtype != "BYTES" for spec in engine.inputs)
    place = RunPlace(limit_s if is_plain and is_bounded else 0.0)
    if loaded.measured.samples:
        place.record(_reference_bytes(order, engine), loaded.run_s)
        shapes = tuple(shape for _, shape in reference_shapes(engine.inputs, order.work.shapes))
        place.record_shapes(shapes, loaded.run_s)
    return place


def reference_is_inline(order: LoadOrder, engine: Engine, place: RunPlace) -> bool:
    return place.is_inline(_reference_bytes(order, engine))


def _reference_bytes(order: LoadOrder, engine: Engine) -> int:
    """About the size of a request at the reference shapes, which is enough to choose a power of two."""
    return sum(
        math.prod(shape) * DATATYPES[spec.dtype].dtype.itemsize + len(spec.name) + _HEAD_BYTES
        for spec, shape in reference_shapes(engine.inputs, order.work.shapes)
    )
