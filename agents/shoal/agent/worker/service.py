"""What a worker answers: its assignments (one, unless they are shared) loaded, measured, served and metered.

State changes are pushed (`state`, a WorkerStatus) to whoever is connected, so that a supervisor that adopts this worker
learns the same as the one that started it. On an emulated device every time that is reported (Measured, Served) is the
device's own, that is: as waited here, divided by the profile's `time_scale`.
"""

import asyncio
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np
import onnxruntime as ort
import structlog
from google.protobuf.message import DecodeError

from shoal.agent.core.verification import Compared
from shoal.agent.frames import FrameServer, Handler, Message
from shoal.agent.ports import NO_BATCHES, Pace
from shoal.agent.worker import isolation
from shoal.agent.worker.compare import compare
from shoal.agent.worker.draw import draw
from shoal.agent.worker.energy import ConstantPower, Energy, energy_of
from shoal.agent.worker.engine import (
    Engine,
    open_engine,
    read_verified,
    reference_shapes,
    run_options,
    show_only,
    warm_up,
)
from shoal.agent.worker.messages import Loaded, LoadOrder, ProbeOrder, State, WorkerReport, WorkerStatus, pack, unpack
from shoal.agent.worker.metering import Metering
from shoal.agent.worker.pace import device_seconds, elements, turn
from shoal.agent.worker.patience import Patience
from shoal.agent.worker.probe import probe
from shoal.agent.worker.process import EXIT_STUCK
from shoal.agent.worker.tensors import ask, batch_of, decode, decode_answer, encode, requested
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Measured
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.migration import Tolerance
from shoal.types.trace import read_traceparent
from shoal.types.units import Bytes, Joules, Seconds
from shoal.v1 import witness_pb2
from shoal.wire import nouns
from shoal.wire.samples import SamplePack, read_pack, write_pack

_log = structlog.get_logger(__name__)

MAX_RUN_S: Final = 300.0
"""The longest any request may take, whatever deadline it brings."""
WATCH_EVERY_S: Final = 0.1
QUIET_S: Final = 0.25
"""What is asked for a comparison waits so long for a moment without requests."""
_WARM_RUNS: Final = 5
_WARM_BUDGET_S: Final = 1.0
_CLIENTS_FAULT: Final = frozenset({Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.UNIMPLEMENTED, Code.CANCELLED})


class _Job:
    """One request on its way through a runner."""

    def __init__(
        self, payload: bytes, origin: str, arrived: float, deadline: float, *, metered: bool, trace: str = ""
    ) -> None:
        self.payload = payload
        self.origin = origin
        self.metered = metered
        self.arrived = arrived
        self.deadline = deadline
        self.options = run_options()
        self.ended = threading.Event()
        """The caller is gone, or its deadline."""
        self.running: tuple[float, int] | None = None
        """Since when it is in the runtime, and its size in elements. Written by the runner's thread."""
        self.trace = trace
        """`traceparent` of a request that is traced; empty of nearly all."""
        self.stages: dict[str, float] | None = {"arrive": arrived} if trace else None
        """When each ended, of a request that is traced; and its batch."""
        self.stuck = False
        """It ran for longer than anybody should have to wait, and was told to terminate."""

    def end(self) -> None:
        self.ended.set()
        self.options.terminate = True


class Replica:
    """A loaded model and its runners. changed: called when it gets busy or idle.

    Runs are watched: one that takes too long is told to terminate, and when it does not obey the process ends, since
    nothing else stops an operator. That is no fault of the other requests here: they are retried elsewhere.
    """

    def __init__(self, order: LoadOrder, engine: Engine, loaded: Loaded, changed: Callable[[], None]) -> None:
        self.loaded = loaded
        self.metering = Metering(_energy(order))
        self._changed = changed
        self._jobs: dict[asyncio.Future[bytes], _Job] = {}
        self._inside = 0
        self._pack: tuple[str, SamplePack] | None = None
        """(digest, content) of the one that is gone through."""
        self._rests = asyncio.Event()
        self._rests.set()
        self._order = order
        self._engine = engine
        self._scale = order.pace.time_scale if order.pace else 1.0
        reference = {spec.name: shape for spec, shape in reference_shapes(engine.inputs, order.work.shapes)}
        self._patience = Patience(elements(reference), loaded.measured.latency_p95_s * self._scale)
        self._watching = False
        self._runners = ThreadPoolExecutor(order.runners, thread_name_prefix="run")
        self._clock = asyncio.get_running_loop().time

    @property
    def in_flight(self) -> int:
        return self._inside

    async def answer(self, message: Message) -> Message:
        """As `infer`, for a comparison with another replica: no client waits for it and no count shows it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await self._rests.wait()
        return await self.infer(message, metered=False)

    def draw(self, seed: int | None, index: int) -> bytes:
        """A request with inputs that are made up, serialized: the same for the same numbers. seed: None is the model's
        own."""
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(self._order.digest.encode()).digest()[:8], "big")
        feeds = draw(self._engine.inputs, self._order.work.shapes, self._order.work.below, seed, index)
        return ask(feeds).SerializeToString()

    def packed(self, path: str, digest: str, index: int) -> bytes:
        """Sample number `index` of the pack at `path`, serialized; nothing where there is none."""
        if self._pack is None or self._pack[0] != digest:
            self._pack = digest, read_pack(read_verified(path, digest), self._engine.inputs, self._engine.outputs)
        try:
            feeds, answers = self._pack[1].sample(index)
        except IndexError:
            self._pack = None
            return b""
        request = ask(feeds)
        response = encode(request, answers).SerializeToString() if answers else b""
        return witness_pb2.Sample(request=request.SerializeToString(), response=response).SerializeToString()

    def record(self, recorded: witness_pb2.Recorded) -> bytes:
        """A pack of these inputs and answers. Raises ShoalError(MODEL_INVALID)."""
        inputs, outputs = self._engine.inputs, self._engine.outputs
        samples = [
            (
                decode(oip.ModelInferRequest.FromString(each.request), inputs),
                decode_answer(oip.ModelInferResponse.FromString(each.response), outputs),
            )
            for each in recorded.samples
        ]
        return write_pack(samples, inputs, outputs)

    def compare(self, answers: witness_pb2.Answers) -> Compared:
        """An answer that this model cannot have given differs."""
        try:
            expected, got = (
                decode_answer(oip.ModelInferResponse.FromString(answer), self._engine.outputs)
                for answer in (answers.expected, answers.got)
            )
        except (ShoalError, DecodeError) as error:
            found = error.refusal.found if isinstance(error, ShoalError) else "bytes that are no answer"
            return Compared((), f"answers that cannot be compared: {found}", 0)
        return compare(expected, got, [nouns.from_wire(Tolerance, each) for each in answers.tolerances])

    async def infer(self, message: Message, *, metered: bool = True) -> Message:
        """Raises ShoalError: OVERLOADED, DEADLINE_EXCEEDED, what the request got wrong, or what the runtime said.
        metered: counted among what is served."""
        if self.in_flight >= self._order.queue:
            raise refuse(
                Code.OVERLOADED, f"{self.in_flight} requests wait here", f"at most {self._order.queue}", "retry later"
            )
        now = self._clock()
        left = message.header.get("deadline_s")
        deadline = now + (min(float(left), MAX_RUN_S) if isinstance(left, int | float) else MAX_RUN_S)
        origin, trace = str(message.header.get("origin", "")), str(message.header.get("trace", ""))
        job = _Job(message.payload, origin, now, deadline, metered=metered, trace=trace)
        self._inside += 1
        if self._inside == 1:
            self._rests.clear()
            self._changed()  # before it can crash
        future = asyncio.get_running_loop().run_in_executor(self._runners, self._run, job)
        self._jobs[future] = job
        if not self._watching:
            self._watch()
        future.add_done_callback(self._finished)
        try:
            async with asyncio.timeout_at(deadline):
                payload = await asyncio.shield(future)
        except TimeoutError as error:
            raise _late() from error
        finally:
            if not future.done():
                self._end(future, job)
        return Message("answer", {} if job.stages is None else {"stages": job.stages}, payload)

    def close(self) -> None:
        """Ends what is in flight; takes nothing more."""
        for future, job in self._jobs.items():
            self._end(future, job)
        self._runners.shutdown(wait=False)

    def _end(self, future: asyncio.Future[bytes], job: _Job) -> None:
        job.end()
        future.add_done_callback(lambda done: done.exception())

    def _watch(self) -> None:
        """While requests are inside."""
        self._watching = bool(self._jobs)
        if not self._watching:
            return
        now = self._clock()
        for job in self._jobs.values():
            running = job.running
            if running is None:
                continue
            since, size = running
            limit_s = self._patience.limit_s(size)
            if now - since >= limit_s and not job.stuck:
                parent = read_traceparent(job.trace)
                traced = {"trace_id": parent.trace} if parent is not None else {}
                seconds = round(now - since, 3)
                _log.warning("run_too_long", assignment=self._order.assignment, seconds=seconds, **traced)
                job.stuck = True
                job.options.terminate = True
            elif now - since >= limit_s + self._patience.grace_s(size):
                _log.error("worker_stuck", assignment=self._order.assignment, seconds=round(now - since, 3))
                os._exit(EXIT_STUCK)
        asyncio.get_running_loop().call_later(WATCH_EVERY_S, self._watch)

    def _finished(self, future: asyncio.Future[bytes]) -> None:
        del self._jobs[future]
        self._inside -= 1
        if self._inside == 0:
            self._rests.set()
            self._changed()

    def _run(self, job: _Job) -> bytes:
        """In a runner thread. Meters the request, whatever becomes of it."""
        busy_s = 0.0
        self._stage(job, "queue")
        try:
            if job.ended.is_set() or self._clock() >= job.deadline:
                raise _late()
            request = oip.ModelInferRequest.FromString(job.payload)
            feeds = decode(request, self._engine.inputs, self._order.max_request_bytes)
            names = requested(request, self._engine.outputs)
            shapes = {name: feed.shape for name, feed in feeds.items()}
            size = elements(shapes)
            self._stage(job, "decode")
            with turn(self._order.slots):
                self._stage(job, "wait")
                start = time.perf_counter()
                job.running = self._clock(), size
                try:
                    outputs = self._engine.run(feeds, names, job.options)
                finally:
                    job.running = None
                real_s = time.perf_counter() - start
                self._patience.ran(size, real_s)
                busy_s, missed = self._keep_pace(job, real_s, shapes)
                self._stage(job, "run")
            answer = encode(request, outputs).SerializeToString()
            self._stage(job, "encode")
        except ShoalError as error:
            found = self._too_long() if job.stuck else error
            code = Code.DEADLINE_EXCEEDED if job.ended.is_set() else found.code
            if job.metered:
                self.metering.failed(job.origin, busy_s, ours=code not in _CLIENTS_FAULT)
            raise found from error
        except Exception as error:
            if job.metered:
                self.metering.failed(job.origin, busy_s, ours=False)
            told = f"{type(error).__name__}: {error}"[:300]
            raise refuse(Code.INVALID_ARGUMENT, told, "a ModelInferRequest", "send a well-formed request") from error
        latency_s = (self._clock() - job.arrived) / self._scale
        batch = batch_of(self._engine.inputs, shapes)
        if job.stages is not None:
            job.stages["batch"] = batch
        if job.metered:
            self.metering.answered(job.origin, latency_s, busy_s, pace_missed=missed, batch=batch)
        return answer

    def _stage(self, job: _Job, name: str) -> None:
        """It ends now."""
        if job.stages is not None:
            job.stages[name] = self._clock()

    def _too_long(self) -> ShoalError:
        return refuse(
            Code.WORKER_STUCK,
            f"a run of {self._order.assignment} went on for much longer than any before",
            "an end to it",
            "it was terminated; it is tried once more elsewhere",
        )

    def _keep_pace(self, job: _Job, real_s: float, shapes: dict[str, tuple[int, ...]]) -> tuple[float, bool]:
        """(seconds the device was busy, in its own time; whether the real run was later than its pace)."""
        pace = self._order.pace
        if pace is None:
            return real_s, False
        device_s = _device_seconds(self._order, pace, shapes)
        job.ended.wait(max(0.0, device_s * pace.time_scale - real_s))
        return device_s, real_s > device_s * pace.time_scale


class _Held:
    """One assignment of this worker, from its order on."""

    def __init__(self, order: LoadOrder) -> None:
        self.order = order
        self.state = State.LOADING
        self.replica: Replica | None = None
        self.refusal: Refusal | None = None
        self.loading: asyncio.Task[None] | None = None

    def status(self) -> WorkerStatus:
        replica = self.replica
        # Read before `served`, so that there are never more of them than of requests.
        latencies = replica.metering.latencies() if replica else ()
        return WorkerStatus(
            state=self.state,
            assignment=self.order.assignment,
            in_flight=replica.in_flight if replica else 0,
            served=replica.metering.served() if replica else (),
            loaded=replica.loaded if replica else None,
            refusal=self.refusal,
            batches=replica.metering.batches() if replica else NO_BATCHES,
            latencies=latencies,
        )


class Service:
    """Handlers by kind of frame; a frame about one assignment has its name in the header.

    A worker serves one assignment in its life, or several that one tenant shares it for; `stopped` says that it shall
    end. busy: where it notes which of them have requests in flight, for whoever looks after a crash.
    """

    def __init__(self, busy: mmap.mmap) -> None:
        self.stopped = asyncio.Event()
        self._busy = busy
        self._held: dict[str, _Held] = {}
        self._measuring = False
        self._idle_bytes = 0
        self._turn = asyncio.Lock()
        self._server: FrameServer | None = None

    def serve_on(self, server: FrameServer) -> None:
        self._server = server

    def handlers(self) -> dict[str, Handler]:
        return {
            "load": self._load,
            "unload": self._unload,
            "status": self._status,
            "infer": self._infer,
            "answer": self._answer,
            "draw": self._draw,
            "packed": self._packed,
            "record": self._record,
            "compare": self._compare,
            "ping": self._ping,
            "metadata": self._metadata,
            "probe": self._probe,
            "stop": self._stop,
        }

    async def _load(self, message: Message) -> Message:
        """Answers at once; what comes of it is pushed. Raises ShoalError(CONFLICT) where it cannot be held too."""
        order = unpack(LoadOrder, message.payload)
        together = {order.shared_by, *(held.order.shared_by for held in self._held.values())}
        if self._held and (order.assignment in self._held or "" in together or len(together) > 1):
            raise self._occupied("start another worker")
        if not self._held:
            self._idle_bytes = isolation.mapped_bytes()
        held = self._held[order.assignment] = _Held(order)
        held.loading = asyncio.create_task(self._bring_up(held), name="load")
        return Message("loading")

    async def _bring_up(self, held: _Held) -> None:
        loop, order = asyncio.get_running_loop(), held.order
        try:
            async with self._turn:
                self._change(held, State.LOADING)
                isolation.forget_peak()
                before = isolation.resident_bytes()
                self._limit_memory()
                start = time.perf_counter()
                engine = await asyncio.to_thread(_open, order)
                load_s = time.perf_counter() - start
                self._change(held, State.WARMING)
                options = run_options()
                giving_up = loop.call_later(order.warm_up_s, _terminate, options)
                try:
                    loaded = await asyncio.to_thread(_measure, order, engine, options, load_s, before)
                finally:
                    giving_up.cancel()
            if self._held.get(order.assignment) is held:
                held.replica = Replica(order, engine, loaded, self._note_busy)
            self._change(held, State.READY)
        except ShoalError as error:
            self._refuse(held, error.refusal)
        except MemoryError as error:
            self._refuse(held, Refusal(Code.OUT_OF_MEMORY, str(error)))
        except Exception as error:  # else it would stay `loading`, in silence, until its deadline
            _log.exception("load_failed")
            self._refuse(held, Refusal(Code.LOAD_FAILED, type(error).__name__, "a loaded model", "see the log"))

    def _refuse(self, held: _Held, refusal: Refusal) -> None:
        order = held.order
        if refusal.code is Code.OUT_OF_MEMORY:
            had = f"{order.memory_bytes} bytes" if order.memory_bytes else "what the machine has left"
            refusal = replace(refusal, asked=f"{order.assignment} may take {had}")
        held.refusal = refusal
        held.state = State.FAILED
        self._limit_memory()
        self._change(held, State.FAILED)

    async def _unload(self, message: Message) -> Message:
        """Answers at once, also about what it does not hold: what is in flight is ended, a load is run to its end."""
        held = self._held.pop(str(message.header.get("assignment", "")), None)
        if held is not None:
            self._limit_memory()
            if held.replica is not None:
                held.replica.close()
        return Message("unloaded")

    async def _status(self, _: Message) -> Message:
        held = tuple(held.status() for held in self._held.values())
        return Message("status", {}, pack(WorkerReport(held, self._measuring)))

    async def _metadata(self, message: Message) -> Message:
        return Message("metadata", {}, pack(self._ready(message).loaded))

    async def _infer(self, message: Message) -> Message:
        return await self._ready(message).infer(message)

    async def _answer(self, message: Message) -> Message:
        return await self._ready(message).answer(message)

    async def _draw(self, message: Message) -> Message:
        seed, index = message.header.get("seed"), int(message.header["index"])
        return Message("drawn", {}, await asyncio.to_thread(self._ready(message).draw, seed, index))

    async def _packed(self, message: Message) -> Message:
        header = message.header
        path, digest, index = str(header["path"]), str(header["digest"]), int(header["index"])
        return Message("packed", {}, await asyncio.to_thread(self._ready(message).packed, path, digest, index))

    async def _record(self, message: Message) -> Message:
        recorded = witness_pb2.Recorded.FromString(message.payload)
        return Message("recorded", {}, await asyncio.to_thread(self._ready(message).record, recorded))

    async def _compare(self, message: Message) -> Message:
        answers = witness_pb2.Answers.FromString(message.payload)
        found = await asyncio.to_thread(self._ready(message).compare, answers)
        drifts = [nouns.to_wire(drift) for drift in found.drifts]
        told = witness_pb2.Compared(drifts=drifts, fault=found.fault, elements=found.elements)
        return Message("compared", {}, told.SerializeToString())

    async def _ping(self, _: Message) -> Message:
        return Message("pong")

    async def _probe(self, message: Message) -> Message:
        if self._held:
            raise self._occupied("probe in a spare worker")
        order = unpack(ProbeOrder, message.payload)
        self._measuring = True  # to the end: a caller that is gone does not stop its thread
        return Message("probed", {}, pack(await asyncio.to_thread(probe, order)))

    async def _stop(self, _: Message) -> Message:
        self.stopped.set()
        return Message("stopping")

    def _ready(self, message: Message) -> Replica:
        name = str(message.header.get("assignment", ""))
        held = self._held.get(name)
        if held is None or held.replica is None:
            found = f"{name} is {held.state if held else 'not held here'}"
            raise refuse(Code.MODEL_NOT_READY, found, "a ready replica", "retry elsewhere")
        return held.replica

    def _occupied(self, remedy: str) -> ShoalError:
        return refuse(Code.CONFLICT, f"holds {', '.join(self._held)}", "an idle worker", remedy)

    def _limit_memory(self) -> None:
        """To the sum of what is held, each as its order says; to nothing where one has no limit."""
        parts = [held.order.memory_bytes for held in self._held.values() if held.state is not State.FAILED]
        isolation.limit_memory(self._idle_bytes, sum(parts) if all(parts) else 0)

    def _note_busy(self) -> None:
        busy = [name for name, held in self._held.items() if held.replica is not None and held.replica.in_flight]
        noted = " ".join(busy).encode()[: len(self._busy) - 1] + b"\0"
        self._busy[: len(noted)] = noted

    def _change(self, held: _Held, state: State) -> None:
        """Says so, unless it was told to drop it meanwhile."""
        held.state = state
        if self._held.get(held.order.assignment) is not held:
            return
        _log.info("worker_state", state=state, assignment=held.order.assignment, refusal=str(held.refusal or ""))
        if self._server is not None:
            self._server.push("state", pack(held.status()))


def _open(order: LoadOrder) -> Engine:
    """Beside serving, so at low priority; but threads that the runtime starts would keep that for ever."""

    def work() -> Engine:
        show_only(order.visible)
        return open_engine(read_verified(order.path, order.digest), order.provider, order.threads)

    return isolation.at_low_priority(work) if order.threads == 1 else work()


def _measure(order: LoadOrder, engine: Engine, options: ort.RunOptions, load_s: float, before: int) -> Loaded:
    """Warms up and times runs: this machine's, or the emulated device's own time where the real run is no later."""
    energy = _energy(order)
    shapes = order.work.shapes
    feeds, times = warm_up(engine, shapes, runs=_WARM_RUNS, budget_s=_WARM_BUDGET_S, options=options)
    busy_s = waited_s = times
    if order.pace is not None:
        device_s = _device_seconds(order, order.pace, {name: feed.shape for name, feed in feeds.items()})
        busy_s = (device_s,) * len(times)
        waited_s = tuple(max(device_s, real_s / order.pace.time_scale) for real_s in times)
    p50, p95 = (Seconds(float(value)) for value in np.quantile(waited_s, (0.5, 0.95)))
    joules = energy.joules({"": sum(busy_s)})[""] / len(busy_s)
    measured = Measured(
        load_s=Seconds(load_s),
        memory_bytes=Bytes(max(0, isolation.peak_resident_bytes() - before)),
        latency_p50_s=p50,
        latency_p95_s=p95,
        joules=Joules(joules),
        energy_source=energy.source,
        samples=len(times),
    )
    return Loaded(measured, engine.inputs, engine.outputs)


def _energy(order: LoadOrder) -> Energy:
    if order.pace is None:
        return energy_of(order.meters, order.threads)
    return ConstantPower(order.pace.active_w, EnergySource.PROFILE)


def _device_seconds(order: LoadOrder, pace: Pace, shapes: Mapping[str, tuple[int, ...]]) -> float:
    reference = elements(order.work.shapes)
    scale = elements(shapes) / reference if reference else 1.0
    return device_seconds(pace, order.work, order.precision, scale)


def _terminate(options: ort.RunOptions) -> None:
    options.terminate = True


def _late() -> ShoalError:
    return refuse(
        Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more time"
    )
