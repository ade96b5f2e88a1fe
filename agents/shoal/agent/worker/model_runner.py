"""Serves one loaded model: takes its requests, runs them on the event loop or in threads, and meters them."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Final

import structlog

from shoal.agent.frames import FrameMessage, InferCall, Payload
from shoal.agent.frames.connection import TURN_S
from shoal.agent.worker import isolation
from shoal.agent.worker.answer_writer import AnswerWriter
from shoal.agent.worker.engine import Engine, reference_shapes
from shoal.agent.worker.failures import memory_refusal
from shoal.agent.worker.infer_job import InferJob, OnAnswer, Parts
from shoal.agent.worker.messages import LoadOrder, LoadResult
from shoal.agent.worker.metering import Metering
from shoal.agent.worker.model_loading import energy_of_order, pace_of, scale_of
from shoal.agent.worker.pace import element_count, hold_slot
from shoal.agent.worker.providers import CPU_PROVIDER
from shoal.agent.worker.request_reader import InferRequest, RequestReader
from shoal.agent.worker.run_place import RunPlace
from shoal.agent.worker.run_timeouts import RunTimeouts
from shoal.agent.worker.run_watch import RunWatch
from shoal.agent.worker.runner_threads import RunnerThreads
from shoal.agent.worker.tensors import DATATYPES, Array, batch_size
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code, Refusal, ShoalError, refuse

_log = structlog.get_logger(__name__)

MAX_RUN_S: Final = 300.0
"""Upper limit on the time of any request, whatever its deadline."""
IDLE_WAIT_S: Final = 0.25
"""A request for a comparison waits at most this long for a moment without other requests."""
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
    """A loaded model. Lives on the event loop; only `_execute` also runs in threads.

    `place` chooses where a request runs. `on_busy_change` is called when the model becomes busy or idle.
    """

    def __init__(
        self,
        order: LoadOrder,
        engine: Engine,
        loaded: LoadResult,
        place: RunPlace,
        on_busy_change: Callable[[], None],
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
        self._threads = RunnerThreads(order.runners, "run")
        # Jobs for the event loop that came when its turn was over.
        self._inline_queue: deque[InferJob] = deque()
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
        call.on_cancel = job.cancel
        if not self._place.is_inline(len(job.payload)):
            self._run_in_thread(job)
            return
        job.is_inline = True
        if not self._inline_queue and not call.is_turn_over:
            self._run_on_loop(job)
            return
        self._set_deadline(job.deadline)
        self._inline_queue.append(job)
        if len(self._inline_queue) == 1:
            self._loop.call_soon(self._run_inline_queue)

    async def infer_when_idle(self, message: FrameMessage) -> FrameMessage:
        """As `infer`, for a comparison with another replica: no client waits for it, and it is not counted."""
        await wait_or_timeout(self._idle, IDLE_WAIT_S)
        left = message.header.get("deadline_s")
        deadline = self._clock() + (float(left) if isinstance(left, int | float) else MAX_RUN_S)
        answered: asyncio.Future[bytes] = self._loop.create_future()
        job = self._accept(
            message.payload,
            "",
            "",
            deadline,
            lambda parts, _: None if answered.done() else answered.set_result(b"".join(parts)),
            lambda refusal: None if answered.done() else answered.set_exception(ShoalError(refusal)),
            is_metered=False,
        )
        self._run_in_thread(job)
        try:
            return FrameMessage("answer", {}, await answered)
        finally:
            job.cancel()

    def close(self) -> None:
        """End the requests in flight, and accept no new ones."""
        gone = Refusal(
            Code.MODEL_NOT_READY, f"{self._order.assignment} was unloaded", "a ready replica", "retry elsewhere"
        )
        for job in tuple(self._jobs):
            job.refuse(gone)
            job.cancel()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._threads.close()
        self._watch.close()

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
        if len(self._jobs) >= self._order.queue:
            raise refuse(
                Code.OVERLOADED, f"{len(self._jobs)} requests wait here", f"at most {self._order.queue}", "retry later"
            )
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
            self._on_busy_change()  # before the run, because the run can crash
        self._watch.on_job()
        return job

    def _run_in_thread(self, job: InferJob) -> None:
        self._set_deadline(job.deadline)
        self._threads.submit(partial(self._run_one, job))

    def _run_one(self, job: InferJob) -> Callable[[], object]:
        outcome = self._execute(job)
        assert outcome is not None
        return partial(self._complete, job, outcome)

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
            self._run_on_loop(self._inline_queue.popleft())
            if self._inline_queue and self._clock() >= until:
                self._loop.call_soon(self._run_inline_queue)
                return

    def _complete(self, job: InferJob, outcome: Parts | Refusal) -> None:
        self._jobs.discard(job)
        if not self._jobs:
            self._idle.set()
            self._on_busy_change()
        if isinstance(outcome, Refusal):
            job.refuse(outcome)
        else:
            job.answer(outcome)

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
                job.cancel()
        later = min((job.deadline for job in waiting if job.deadline > now), default=None)
        if later is not None:
            self._set_deadline(later)

    def _execute(self, job: InferJob) -> Parts | Refusal | None:
        """Run the request and meter it whatever its outcome. None: it is for a thread."""
        busy_s = 0.0
        self._mark_stage(job, "queue")
        try:
            if job.is_over or self._clock() >= job.deadline:
                raise ShoalError(_DEADLINE_PASSED)
            # what protobuf must parse may take long
            request = self._reader.read_usual(job.payload) if job.is_inline else self._reader.read(job.payload)
            if request is None:
                return None
            shapes = {name: feed.shape for name, feed in request.feeds.items()}
            self._mark_stage(job, "decode")
            with hold_slot(self._order.slots) if self._order.slots else _NO_SLOT:
                self._mark_stage(job, "wait")
                outputs, real_s = self._run(job, request, element_count(shapes))
                busy_s, missed = self._keep_pace(job, real_s, shapes)
                self._mark_stage(job, "run")
            parts = self._writer.write(request.names, outputs)
            self._mark_stage(job, "encode")
        except ShoalError as error:
            return self._on_refused(job, error.refusal, busy_s)
        except Exception as error:
            if job.is_metered:
                self.metering.record_failure(job.origin, busy_s, own_fault=True)
            _log.exception("run_failed", assignment=self._order.assignment)
            return memory_refusal(error) or Refusal(Code.INTERNAL, type(error).__name__, "an answer", "see the log")
        batch = batch_size(self._engine.inputs, shapes)
        if job.stages is not None:
            job.stages["batch"] = batch
        if job.is_metered:
            latency_s = busy_s if self._is_simulated else (self._clock() - job.arrived_at) / self._scale
            self.metering.record_answer(job.origin, latency_s, busy_s, pace_missed=missed, batch=batch)
        return parts

    def _run(self, job: InferJob, request: InferRequest, size: int) -> tuple[dict[str, Array], float]:
        """(outputs, seconds of this machine)."""
        start, cpu_start = time.perf_counter(), time.thread_time()
        job.current_run = self._clock(), size
        try:
            outputs = self._engine.run(request.feeds, request.outputs, job.options)
        finally:
            job.current_run = None
        real_s = time.perf_counter() - start
        self._timeouts.record_run(size, real_s)
        self._place.record(len(job.payload), time.thread_time() - cpu_start)
        return outputs, real_s

    def _on_refused(self, job: InferJob, refusal: Refusal, busy_s: float) -> Refusal:
        if job.is_stuck:
            refusal = Refusal(
                Code.WORKER_STUCK,
                f"a run of {self._order.assignment} went on for much longer than any before",
                "an end to it",
                "it was terminated; it is tried once more elsewhere",
            )
        code = Code.DEADLINE_EXCEEDED if job.is_over else refusal.code
        if job.is_metered:
            late = code is Code.DEADLINE_EXCEEDED and not job.is_stuck
            self.metering.record_failure(job.origin, busy_s, own_fault=code not in _CLIENT_FAULTS, is_late=late)
        return refusal

    def _mark_stage(self, job: InferJob, name: str) -> None:
        """The stage ends now."""
        if job.stages is not None:
            job.stages[name] = self._clock()

    @property
    def _is_simulated(self) -> bool:
        return self._order.access.pace is not None and self._order.access.pace.simulated

    def _keep_pace(self, job: InferJob, real_s: float, shapes: dict[str, tuple[int, ...]]) -> tuple[float, bool]:
        """(seconds the device was busy, in device time; whether the real run took longer than the pace)."""
        pace = self._order.access.pace
        if pace is None or self._pace is None:
            return real_s, False
        device_s = self._pace.seconds(scale_of(self._order, shapes))
        if pace.simulated:
            return device_s, False
        job.wait_cancelled(device_s * pace.time_scale - real_s)
        return device_s, real_s > device_s * pace.time_scale


def run_place(order: LoadOrder, engine: Engine, loaded: LoadResult, limit_s: float) -> RunPlace:
    """Where the order's model runs. `limit_s`: as `RunPlace` takes it.

    The loop waits for no device, no turn and no emulated pace, for no run of several threads, and for no model whose
    values can make a run long. Strings come by protobuf, which is not for the loop. The warm-up is the first
    measurement.
    """
    is_plain = order.provider == CPU_PROVIDER and order.threads == 1 and not order.slots and order.access.pace is None
    is_bounded = engine.is_bounded_by_size and all(spec.dtype != "BYTES" for spec in engine.inputs)
    place = RunPlace(limit_s if is_plain and is_bounded else 0.0)
    if loaded.measured.samples:
        place.record(_reference_bytes(order, engine), loaded.run_s)
    return place


def reference_is_inline(order: LoadOrder, engine: Engine, place: RunPlace) -> bool:
    return place.is_inline(_reference_bytes(order, engine))


def _reference_bytes(order: LoadOrder, engine: Engine) -> int:
    """About the size of a request at the reference shapes, which is enough to choose a power of two."""
    return sum(
        math.prod(shape) * DATATYPES[spec.dtype].dtype.itemsize + len(spec.name) + _HEAD_BYTES
        for spec, shape in reference_shapes(engine.inputs, order.work.shapes)
    )
