"""The service of a worker process: loads, measures, serves and meters its assignments (one, unless they are shared).

State changes are pushed (`state`, a WorkerStatus) to every connected peer, so that a supervisor that adopts this worker
learns the same as the one that started it. On an emulated device all reported times (Measured, Served) are device time:
the time waited here, divided by the profile's `time_scale`.
"""

import asyncio
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np
import onnxruntime as ort
import structlog
from google.protobuf.message import DecodeError

from shoal.agent.core.verification import InputComparison
from shoal.agent.frames import FrameMessage, FrameServer, Handler, InferCall
from shoal.agent.packing import pack, unpack
from shoal.agent.ports import NO_BATCHES
from shoal.agent.worker import isolation
from shoal.agent.worker.compare import compare
from shoal.agent.worker.energy import ConstantPower, Energy, energy_of
from shoal.agent.worker.engine import (
    Engine,
    input_candidates,
    open_engine,
    read_and_verify,
    reference_shapes,
    run_options,
    warm_up,
)
from shoal.agent.worker.failures import memory_refusal
from shoal.agent.worker.memory import MemoryGrowth
from shoal.agent.worker.messages import LoadOrder, LoadResult, LoadState, ProbeOrder, WorkerReport, WorkerStatus
from shoal.agent.worker.metering import Metering
from shoal.agent.worker.pace import ModelPace, element_count, hold_slot, model_pace
from shoal.agent.worker.parsing import Parser
from shoal.agent.worker.probe import probe, read_graph
from shoal.agent.worker.process import EXIT_STUCK
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.agent.worker.run_timeouts import RunTimeouts
from shoal.agent.worker.sample_inputs import sample_input
from shoal.agent.worker.support import runtime_support
from shoal.agent.worker.tensors import Array, batch_size, decode, decode_response, encode, make_request, output_names
from shoal.artifacts.samples import SamplePack, read_pack, write_pack
from shoal.host.event_wait import wait_or_timeout
from shoal.host.watchdog import Watchdog
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Measured
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.migration import Tolerance
from shoal.types.trace import parse_traceparent
from shoal.types.units import Joules, Seconds
from shoal.v1 import witness_pb2
from shoal.wire import nouns

_log = structlog.get_logger(__name__)

MAX_RUN_S: Final = 300.0
"""Upper limit on the time of any request, whatever its deadline."""
WATCH_EVERY_S: Final = Seconds(0.1)
IDLE_WAIT_S: Final = 0.25
"""A request for a comparison waits at most this long for a moment without other requests."""
_WARM_RUNS: Final = 5
_WARM_BUDGET_S: Final = 1.0
_CLIENT_FAULTS: Final = frozenset(
    {Code.INVALID_ARGUMENT, Code.FIELD_TOO_MANY, Code.TOO_LARGE, Code.UNIMPLEMENTED, Code.CANCELLED}
)


class _Job:
    """One request that waits or runs."""

    def __init__(
        self, payload: bytes, origin: str, arrived_at: float, deadline: float, *, is_metered: bool, trace: str = ""
    ) -> None:
        self.payload = payload
        self.origin = origin
        self.is_metered = is_metered
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.options = run_options()
        # Set when the caller is gone, or the deadline has passed.
        self.cancelled = threading.Event()
        # (start of the run in the runtime, request size in elements). None outside a run. Written by the runner's
        # thread.
        self.current_run: tuple[float, int] | None = None
        # Watches the run; None until the first check sees it. Written by the event loop's thread.
        self.watchdog: Watchdog | None = None
        # `traceparent` if the request is traced; empty for nearly all.
        self.trace = trace
        # End time of each stage, and the batch size. None if the request is not traced.
        self.stages: dict[str, float] | None = {"arrive": arrived_at} if trace else None
        # True once the run exceeded its time limit and was told to terminate.
        self.is_stuck = False

    def end(self) -> None:
        self.cancelled.set()
        self.options.terminate = True


class ModelRunner:
    """A loaded model and its runner threads. `on_busy_change` is called when it becomes busy or idle.

    A watchdog counts the time in which this process ran. A run that exceeds its limit is told to terminate. If it does
    not, the process exits, because nothing else stops an operator. The other requests in this process are not at fault:
    they are retried elsewhere.
    """

    def __init__(
        self, order: LoadOrder, engine: Engine, loaded: LoadResult, on_busy_change: Callable[[], None]
    ) -> None:
        self.loaded = loaded
        self._pace = _pace_of(order)
        self.metering = Metering(_energy(order, self._pace))
        self._on_busy_change = on_busy_change
        self._jobs: dict[asyncio.Future[bytes], _Job] = {}
        self._in_flight = 0
        # (digest, content) of the sample pack in use.
        self._pack: tuple[str, SamplePack] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._order = order
        self._engine = engine
        self._parser = Parser(engine.inputs, engine.outputs, order.max_request_bytes, isolation.headroom_bytes)
        self._scale = order.access.pace.time_scale if order.access.pace else 1.0
        reference = {spec.name: shape for spec, shape in reference_shapes(engine.inputs, order.work.shapes)}
        # The time of this machine: what is measured of an emulated device is its own.
        self._timeouts = RunTimeouts(element_count(reference), loaded.run_s)
        self._is_watching = False
        self._runners = ThreadPoolExecutor(order.runners, thread_name_prefix="run")
        self._clock = asyncio.get_running_loop().time

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def infer_when_idle(self, message: FrameMessage) -> FrameMessage:
        """As `infer`, for a comparison with another replica: no client waits for it, and it is not counted."""
        await wait_or_timeout(self._idle, IDLE_WAIT_S)
        return await self.infer(message, is_metered=False)

    def sample_request(self, seed: int | None, index: int) -> bytes:
        """A serialized request with generated inputs. The same numbers give the same request. `seed` None: the model's
        own seed."""
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(self._order.digest.encode()).digest()[:8], "big")
        feeds = sample_input(self._engine.inputs, self._order.work, seed, index)
        return make_request(feeds).SerializeToString()

    def pack_sample(self, path: str, digest: str, index: int) -> bytes:
        """Sample number `index` of the pack at `path`, serialized. Empty if the pack has no such sample."""
        if self._pack is None or self._pack[0] != digest:
            self._pack = digest, read_pack(read_and_verify(path, digest), self._engine.inputs, self._engine.outputs)
        try:
            feeds, answers = self._pack[1].sample(index)
        except IndexError:
            self._pack = None
            return b""
        request = make_request(feeds)
        response = encode(request, answers).SerializeToString() if answers else b""
        return witness_pb2.Sample(request=request.SerializeToString(), response=response).SerializeToString()

    def record(self, recorded: witness_pb2.Recorded) -> bytes:
        """A sample pack of these inputs and answers. Raises ShoalError(MODEL_INVALID)."""
        inputs, outputs = self._engine.inputs, self._engine.outputs
        samples = [
            (
                decode(oip.ModelInferRequest.FromString(each.request), inputs),
                decode_response(oip.ModelInferResponse.FromString(each.response), outputs),
            )
            for each in recorded.samples
        ]
        return write_pack(samples, inputs, outputs)

    def compare(self, answers: witness_pb2.Answers) -> InputComparison:
        """Compare two answers. One that this model cannot have given counts as different."""
        try:
            expected, got = (
                decode_response(oip.ModelInferResponse.FromString(answer), self._engine.outputs)
                for answer in (answers.expected, answers.got)
            )
        except (ShoalError, DecodeError) as error:
            found = error.refusal.found if isinstance(error, ShoalError) else "bytes that are no answer"
            return InputComparison((), f"answers that cannot be compared: {found}", 0)
        return compare(expected, got, [nouns.from_wire(Tolerance, each) for each in answers.tolerances])

    async def infer(self, message: FrameMessage, *, is_metered: bool = True) -> FrameMessage:
        """Raises ShoalError: OVERLOADED, DEADLINE_EXCEEDED, an error in the request, or an error of the runtime.

        `is_metered`: count the request among those served.
        """
        if self.in_flight >= self._order.queue:
            raise refuse(
                Code.OVERLOADED, f"{self.in_flight} requests wait here", f"at most {self._order.queue}", "retry later"
            )
        now = self._clock()
        left = message.header.get("deadline_s")
        deadline = now + (min(float(left), MAX_RUN_S) if isinstance(left, int | float) else MAX_RUN_S)
        origin, trace = str(message.header.get("origin", "")), str(message.header.get("trace", ""))
        job = _Job(message.payload, origin, now, deadline, is_metered=is_metered, trace=trace)
        self._in_flight += 1
        if self._in_flight == 1:
            self._idle.clear()
            self._on_busy_change()  # before the run, because the run can crash
        future = asyncio.get_running_loop().run_in_executor(self._runners, self._run, job)
        self._jobs[future] = job
        if not self._is_watching:
            self._check_runs()
        future.add_done_callback(self._on_run_done)
        try:
            async with asyncio.timeout_at(deadline):
                payload = await asyncio.shield(future)
        except TimeoutError as error:
            raise _deadline_error() from error
        finally:
            if not future.done():
                self._end_job(future, job)
        return FrameMessage("answer", {} if job.stages is None else {"stages": job.stages}, payload)

    def close(self) -> None:
        """End the requests in flight, and accept no new ones."""
        for future, job in self._jobs.items():
            self._end_job(future, job)
        self._runners.shutdown(wait=False)

    def _end_job(self, future: asyncio.Future[bytes], job: _Job) -> None:
        job.end()
        future.add_done_callback(lambda done: done.exception())

    def _check_runs(self) -> None:
        """Runs every WATCH_EVERY_S while there are requests."""
        self._is_watching = bool(self._jobs)
        if not self._is_watching:
            return
        now = self._clock()
        for job in self._jobs.values():
            running = job.current_run
            if running is None:
                continue
            since, size = running
            limit_s = self._timeouts.limit_s(size)
            watched = job.watchdog or Watchdog(Seconds(limit_s), WATCH_EVERY_S, since)
            watched = job.watchdog = watched.on_tick(now)
            if watched.silent_s >= limit_s and not job.is_stuck:
                parent = parse_traceparent(job.trace)
                _log.warning(
                    "run_overdue",
                    assignment=self._order.assignment,
                    duration_s=round(watched.silent_s, 3),
                    trace_id=parent.trace if parent is not None else None,
                )
                job.is_stuck = True
                job.options.terminate = True
            elif watched.silent_s >= limit_s + self._timeouts.grace_s(size):
                _log.error("worker_stuck", assignment=self._order.assignment, duration_s=round(watched.silent_s, 3))
                os._exit(EXIT_STUCK)
        asyncio.get_running_loop().call_later(WATCH_EVERY_S, self._check_runs)

    def _on_run_done(self, future: asyncio.Future[bytes]) -> None:
        del self._jobs[future]
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()
            self._on_busy_change()

    def _run(self, job: _Job) -> bytes:
        """Runs in a runner thread. Meters the request whatever its outcome."""
        busy_s = 0.0
        self._mark_stage(job, "queue")
        try:
            if job.cancelled.is_set() or self._clock() >= job.deadline:
                raise _deadline_error()
            request = self._parser.parse(job.payload)
            feeds = decode(request, self._engine.inputs, self._order.max_request_bytes)
            names = output_names(request, self._engine.outputs)
            shapes = {name: feed.shape for name, feed in feeds.items()}
            size = element_count(shapes)
            self._mark_stage(job, "decode")
            with hold_slot(self._order.slots):
                self._mark_stage(job, "wait")
                start = time.perf_counter()
                job.current_run = self._clock(), size
                try:
                    outputs = self._engine.run(feeds, names, job.options)
                finally:
                    job.current_run = None
                real_s = time.perf_counter() - start
                self._timeouts.record_run(size, real_s)
                busy_s, missed = self._keep_pace(job, real_s, shapes)
                self._mark_stage(job, "run")
            answer = encode(request, outputs).SerializeToString()
            self._mark_stage(job, "encode")
        except ShoalError as error:
            found = self._stuck_error() if job.is_stuck else error
            code = Code.DEADLINE_EXCEEDED if job.cancelled.is_set() else found.code
            if job.is_metered:
                late = code is Code.DEADLINE_EXCEEDED and not job.is_stuck
                self.metering.record_failure(job.origin, busy_s, own_fault=code not in _CLIENT_FAULTS, is_late=late)
            raise found from error
        except Exception as error:
            if job.is_metered:
                self.metering.record_failure(job.origin, busy_s, own_fault=True)
            short = memory_refusal(error)
            _log.exception("run_failed", assignment=self._order.assignment)
            raise ShoalError(
                short or Refusal(Code.INTERNAL, type(error).__name__, "an answer", "see the log")
            ) from error
        pace = self._order.access.pace
        latency_s = (self._clock() - job.arrived_at) / self._scale if pace is None or not pace.simulated else busy_s
        batch = batch_size(self._engine.inputs, shapes)
        if job.stages is not None:
            job.stages["batch"] = batch
        if job.is_metered:
            self.metering.record_answer(job.origin, latency_s, busy_s, pace_missed=missed, batch=batch)
        return answer

    def _mark_stage(self, job: _Job, name: str) -> None:
        """The stage ends now."""
        if job.stages is not None:
            job.stages[name] = self._clock()

    def _stuck_error(self) -> ShoalError:
        return refuse(
            Code.WORKER_STUCK,
            f"a run of {self._order.assignment} went on for much longer than any before",
            "an end to it",
            "it was terminated; it is tried once more elsewhere",
        )

    def _keep_pace(self, job: _Job, real_s: float, shapes: dict[str, tuple[int, ...]]) -> tuple[float, bool]:
        """(seconds the device was busy, in device time; whether the real run took longer than the pace)."""
        pace = self._order.access.pace
        if pace is None or self._pace is None:
            return real_s, False
        device_s = self._pace.seconds(_scale(self._order, shapes))
        if pace.simulated:
            return device_s, False
        job.cancelled.wait(max(0.0, device_s * pace.time_scale - real_s))
        return device_s, real_s > device_s * pace.time_scale


class _HostedAssignment:
    """One assignment of this worker, from its load order on."""

    def __init__(self, order: LoadOrder) -> None:
        self.order = order
        self.state = LoadState.LOADING
        self.replica: ModelRunner | None = None
        self.refusal: Refusal | None = None
        self.loading: asyncio.Task[None] | None = None

    def status(self) -> WorkerStatus:
        replica = self.replica
        # Read before `served`, so that the histogram never counts more than there are requests.
        latencies = replica.metering.latencies() if replica else ()
        return WorkerStatus(
            state=self.state,
            assignment=self.order.assignment,
            in_flight=replica.in_flight if replica else 0,
            served=replica.metering.totals_by_origin() if replica else (),
            loaded=replica.loaded if replica else None,
            refusal=self.refusal,
            batches=replica.metering.batches() if replica else NO_BATCHES,
            latencies=latencies,
        )


class WorkerService:
    """Handlers by frame kind. A frame about one assignment names it in the header.

    A worker serves one assignment in its life, or several that one tenant shares it for. `stop_requested` is set when
    the process must end. `busy` is the file in which it notes the assignments with requests in flight, for diagnosis
    after a crash.
    """

    def __init__(self, busy: mmap.mmap) -> None:
        self.stop_requested = asyncio.Event()
        self._busy = busy
        self._assignments: dict[str, _HostedAssignment] = {}
        self._is_probing = False
        self._idle_bytes = 0
        # Keeps a plugin's context open: some close it with their last session.
        self._provider_session: Engine | None = None
        self._load_turn = asyncio.Lock()
        self._server: FrameServer | None = None
        self._infers: set[asyncio.Task[None]] = set()

    def serve_on(self, server: FrameServer) -> None:
        self._server = server

    def handlers(self) -> dict[str, Handler]:
        return {
            "load": self._load,
            "unload": self._unload,
            "status": self._status,
            "answer": self._answer,
            "draw": self._sample_request,
            "packed": self._pack_sample,
            "record": self._record,
            "compare": self._compare,
            "ping": self._ping,
            "metadata": self._metadata,
            "probe": self._probe,
            "support": self._support,
            "stop": self._stop,
        }

    async def _load(self, message: FrameMessage) -> FrameMessage:
        """Answers at once; the outcome is pushed. Raises ShoalError(CONFLICT) if this worker cannot hold the assignment
        too."""
        order = unpack(LoadOrder, message.payload)
        together = {order.shared_by, *(held.order.shared_by for held in self._assignments.values())}
        if self._assignments and (order.assignment in self._assignments or "" in together or len(together) > 1):
            raise self._busy_error("start another worker")
        if not self._assignments:
            self._idle_bytes = isolation.data_bytes()
        held = self._assignments[order.assignment] = _HostedAssignment(order)
        held.loading = asyncio.create_task(self._bring_up(held), name="load")
        return FrameMessage("loading")

    async def _bring_up(self, held: _HostedAssignment) -> None:
        loop, order = asyncio.get_running_loop(), held.order
        try:
            async with self._load_turn:
                self._set_state(held, LoadState.LOADING)
                memory = MemoryGrowth(order.access)
                await self._open_provider(order)
                self._limit_memory()
                start = time.perf_counter()
                engine = await asyncio.to_thread(_open_engine, order)
                load_s = time.perf_counter() - start
                self._set_state(held, LoadState.WARMING)
                options = run_options()
                giving_up = loop.call_later(order.warm_up_s, _terminate, options)
                try:
                    loaded = await asyncio.to_thread(_measure, order, engine, options, load_s, memory)
                finally:
                    giving_up.cancel()
            if self._assignments.get(order.assignment) is held:
                held.replica = ModelRunner(order, engine, loaded, self._note_busy)
            self._set_state(held, LoadState.READY)
        except ShoalError as error:
            self._on_load_failed(held, error.refusal)
        except MemoryError as error:
            self._on_load_failed(held, Refusal(Code.OUT_OF_MEMORY, str(error)))
        except Exception as error:  # without this the replica would stay `loading` until its deadline, and say nothing
            _log.exception("load_failed", assignment=held.order.assignment)
            self._on_load_failed(held, Refusal(Code.LOAD_FAILED, type(error).__name__, "a loaded model", "see the log"))

    async def _open_provider(self, order: LoadOrder) -> None:
        """What a provider takes of the host for itself, whatever the model, is beside the models' limit: a device's
        context may be larger than the models on it."""
        if order.provider == CPU_PROVIDER or self._provider_session is not None:
            return
        earlier = isolation.data_bytes()
        self._provider_session = await asyncio.to_thread(_open_smallest_graph, order)
        self._idle_bytes += max(0, isolation.data_bytes() - earlier)

    def _on_load_failed(self, held: _HostedAssignment, refusal: Refusal) -> None:
        order = held.order
        if refusal.code is Code.OUT_OF_MEMORY:
            had = f"{order.memory_bytes} bytes" if order.memory_bytes else "what the machine has left"
            refusal = replace(refusal, asked=f"{order.assignment} may take {had}")
        held.refusal = refusal
        held.state = LoadState.FAILED
        self._limit_memory()
        self._set_state(held, LoadState.FAILED)

    async def _unload(self, message: FrameMessage) -> FrameMessage:
        """Answers at once, also for an unknown assignment. Requests in flight are ended; a load in progress runs to its
        end."""
        held = self._assignments.pop(str(message.header.get("assignment", "")), None)
        if held is not None:
            self._limit_memory()
            if held.replica is not None:
                held.replica.close()
        return FrameMessage("unloaded")

    async def _status(self, _: FrameMessage) -> FrameMessage:
        held = tuple(held.status() for held in self._assignments.values())
        return FrameMessage("status", {}, pack(WorkerReport(held, self._is_probing)))

    async def _metadata(self, message: FrameMessage) -> FrameMessage:
        return FrameMessage("metadata", {}, pack(self._ready_runner(_assignment(message)).loaded))

    def on_infer(self, call: InferCall) -> None:
        """Raises ShoalError(MODEL_NOT_READY)."""
        task = asyncio.create_task(self._infer(self._ready_runner(call.header.assignment), call))
        self._infers.add(task)
        task.add_done_callback(self._infers.discard)
        call.on_cancel = task.cancel

    async def _infer(self, runner: ModelRunner, call: InferCall) -> None:
        asked = call.header
        header = {"origin": asked.origin, "trace": asked.trace, "deadline_s": asked.remaining_s}
        try:
            answer = await runner.infer(FrameMessage("infer", header, bytes(call.payload)))
        except ShoalError as error:
            call.refuse(error.refusal)
        else:
            call.answer((answer.payload,), answer.header)

    async def _answer(self, message: FrameMessage) -> FrameMessage:
        return await self._ready_runner(_assignment(message)).infer_when_idle(message)

    async def _sample_request(self, message: FrameMessage) -> FrameMessage:
        seed, index = message.header.get("seed"), int(message.header["index"])
        return FrameMessage(
            "drawn", {}, await asyncio.to_thread(self._ready_runner(_assignment(message)).sample_request, seed, index)
        )

    async def _pack_sample(self, message: FrameMessage) -> FrameMessage:
        header = message.header
        path, digest, index = str(header["path"]), str(header["digest"]), int(header["index"])
        return FrameMessage(
            "packed",
            {},
            await asyncio.to_thread(self._ready_runner(_assignment(message)).pack_sample, path, digest, index),
        )

    async def _record(self, message: FrameMessage) -> FrameMessage:
        recorded = witness_pb2.Recorded.FromString(message.payload)
        return FrameMessage(
            "recorded", {}, await asyncio.to_thread(self._ready_runner(_assignment(message)).record, recorded)
        )

    async def _compare(self, message: FrameMessage) -> FrameMessage:
        answers = witness_pb2.Answers.FromString(message.payload)
        found = await asyncio.to_thread(self._ready_runner(_assignment(message)).compare, answers)
        drifts = [nouns.to_wire(drift) for drift in found.drifts]
        told = witness_pb2.Compared(drifts=drifts, fault=found.fault, elements=found.elements)
        return FrameMessage("compared", {}, told.SerializeToString())

    async def _ping(self, _: FrameMessage) -> FrameMessage:
        return FrameMessage("pong")

    async def _probe(self, message: FrameMessage) -> FrameMessage:
        if self._assignments:
            raise self._busy_error("probe in a spare worker")
        order = unpack(ProbeOrder, message.payload)
        self._is_probing = True  # until the process ends: the thread runs on when the caller is gone
        probed = await asyncio.to_thread(probe, order)
        return FrameMessage("probed", {}, pack(replace(probed, runtime=await asyncio.to_thread(runtime_support))))

    async def _support(self, _: FrameMessage) -> FrameMessage:
        if self._assignments:
            raise self._busy_error("ask a spare worker")
        return FrameMessage("supported", {}, pack(await asyncio.to_thread(runtime_support)))

    async def _stop(self, _: FrameMessage) -> FrameMessage:
        self.stop_requested.set()
        return FrameMessage("stopping")

    def _ready_runner(self, name: str) -> ModelRunner:
        held = self._assignments.get(name)
        if held is None or held.replica is None:
            found = f"{name} is {held.state if held else 'not held here'}"
            raise refuse(Code.MODEL_NOT_READY, found, "a ready replica", "retry elsewhere")
        return held.replica

    def _busy_error(self, remedy: str) -> ShoalError:
        return refuse(Code.CONFLICT, f"holds {', '.join(self._assignments)}", "an idle worker", remedy)

    def _limit_memory(self) -> None:
        """Limit the process to the sum of what it holds, each as its order says. No limit if one of them has none."""
        parts = [held.order.memory_bytes for held in self._assignments.values() if held.state is not LoadState.FAILED]
        isolation.limit_memory(self._idle_bytes, sum(parts) if all(parts) else 0)

    def _note_busy(self) -> None:
        busy = [name for name, held in self._assignments.items() if held.replica is not None and held.replica.in_flight]
        noted = " ".join(busy).encode()[: len(self._busy) - 1] + b"\0"
        self._busy[: len(noted)] = noted

    def _set_state(self, held: _HostedAssignment, state: LoadState) -> None:
        """Push the new state, unless the assignment was unloaded meanwhile."""
        held.state = state
        if self._assignments.get(held.order.assignment) is not held:
            return
        _log.info(
            "load_state_changed", assignment=held.order.assignment, state=state, error=str(held.refusal or "") or None
        )
        if self._server is not None:
            self._server.push("state", pack(held.status()))


def _assignment(message: FrameMessage) -> str:
    return str(message.header.get("assignment", ""))


def _open_smallest_graph(order: LoadOrder) -> Engine | None:
    """None where the provider does not take it."""
    os.environ.update(order.access.environment)
    try:
        return open_engine(read_graph("launch"), Provider(order.provider, order.access), {"x": (1,)})
    except ShoalError as error:
        _log.warning("provider_not_opened", provider=order.provider, code=error.code, error=str(error))
        return None


def _open_engine(order: LoadOrder) -> Engine:
    """Load at low priority, because other models may serve in this process. With more than one thread, load at normal
    priority: threads that the runtime starts would keep the low priority for ever."""

    def work() -> Engine:
        # Later sessions of this process are for the same device; the pool ensures that.
        os.environ.update(order.access.environment)
        provider = Provider(order.provider, order.access, order.precision, order.threads)
        made = order.prepared
        data = read_and_verify(made.path, made.digest) if made else read_and_verify(order.path, order.digest)
        if made is not None and made.compiled:
            return open_engine(data, provider, compiled=made.operators)
        return open_engine(data, provider, order.shapes, partial=order.partial, node_flops=order.work.node_flops)

    return isolation.run_at_low_priority(work) if order.threads == 1 else work()


def _measure(
    order: LoadOrder, engine: Engine, options: ort.RunOptions, load_s: float, memory: MemoryGrowth
) -> LoadResult:
    """Warm up and time some runs. On an emulated device: device time, or the real time if that is longer."""
    pace = _pace_of(order)
    energy = _energy(order, pace)
    is_simulated = order.access.pace is not None and order.access.pace.simulated
    candidates = chain(_sample_candidates(order, engine), input_candidates(engine, order.work))
    warmth = warm_up(
        engine,
        candidates,
        runs=0 if is_simulated else _WARM_RUNS,  # a run may take seconds, from which nothing is learnt
        budget_s=0.0 if is_simulated else _WARM_BUDGET_S,
        options=options,
        optional=order.warm_up_optional,
    )
    if warmth.skip_reason is not None:
        return _result_without_warm_up(order, engine, energy.source, load_s, memory, warmth.skip_reason)
    feeds, times = warmth.feeds, warmth.times
    busy_s = waited_s = times
    if order.access.pace is not None and pace is not None:
        device_s = pace.seconds(_scale(order, {name: feed.shape for name, feed in feeds.items()}))
        busy_s = (device_s,) * len(times)
        if order.access.pace.simulated:
            waited_s = busy_s
        else:
            waited_s = tuple(max(device_s, real_s / order.access.pace.time_scale) for real_s in times)
    p50, p95 = (Seconds(float(value)) for value in np.quantile(waited_s, (0.5, 0.95)))
    joules = energy.joules({"": sum(busy_s)})[""] / len(busy_s)
    measured = Measured(
        load_s=Seconds(load_s),
        memory_bytes=memory.bytes(),
        latency_p50_s=p50,
        latency_p95_s=p95,
        joules=Joules(joules),
        energy_source=energy.source,
        samples=len(times),
        prepare_s=order.prepared.prepare_s if order.prepared else Seconds(0.0),
    )
    operators = tuple(sorted(engine.operators))
    run_s = Seconds(float(np.quantile(times, 0.95)))
    note = _note(order, engine, pace.note if pace else "")
    return LoadResult(measured, engine.inputs, engine.outputs, note, operators, run_s)


def _note(order: LoadOrder, engine: Engine, *more: str) -> str:
    """What people are to know of a loaded model."""
    return "; ".join(filter(None, (*more, order.prepared.note if order.prepared else "", engine.note)))


def _sample_candidates(order: LoadOrder, engine: Engine) -> Iterator[Callable[[], dict[str, Array]]]:
    """The first of the given samples, if they can be read."""
    if not order.samples:
        return
    try:
        data = read_and_verify(order.samples, order.samples_digest)
        inputs, _ = read_pack(data, engine.inputs, engine.outputs).sample(0)
    except ShoalError as error:
        _log.warning("samples_unreadable", assignment=order.assignment, code=error.code, error=str(error))
        return
    yield lambda: inputs


def _result_without_warm_up(
    order: LoadOrder, engine: Engine, source: EnergySource, load_s: float, memory: MemoryGrowth, why: Refusal
) -> LoadResult:
    """The result of a load without a run. `samples` is 0, so that its zeros replace no prediction."""
    measured = Measured(
        load_s=Seconds(load_s),
        memory_bytes=memory.bytes(),
        latency_p50_s=Seconds(0.0),
        latency_p95_s=Seconds(0.0),
        joules=Joules(0.0),
        energy_source=source,
        samples=0,
    )
    note = _note(order, engine, f"serves without a warm-up: {why.found}")
    return LoadResult(measured, engine.inputs, engine.outputs, note, tuple(sorted(engine.operators)))


def _energy(order: LoadOrder, pace: ModelPace | None) -> Energy:
    if pace is None:
        return energy_of(order.access, order.threads)
    return ConstantPower(pace.watts, EnergySource.PROFILE)


def _pace_of(order: LoadOrder) -> ModelPace | None:
    """How the model runs on its device, if that is emulated. Raises ShoalError(LOAD_FAILED)."""
    if order.access.pace is None:
        return None
    return model_pace(order.access.pace, order.work, order.weights, order.precision)


def _scale(order: LoadOrder, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Elements of these inputs for each one of the reference shapes."""
    reference = element_count(order.work.shapes)
    return element_count(shapes) / reference if reference else 1.0


def _terminate(options: ort.RunOptions) -> None:
    options.terminate = True


def _deadline_error() -> ShoalError:
    return refuse(
        Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more time"
    )
