"""What a worker answers: one assignment loaded, measured, served and metered.

State changes are pushed (`state`, a WorkerStatus) to whoever is connected, so that a supervisor that adopts this worker
learns the same as the one that started it. On an emulated device every time that is reported (Measured, Served) is the
device's own, that is: as waited here, divided by the profile's `time_scale`.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import numpy as np
import onnxruntime as ort
import structlog

from shoal.agent.frames import FrameServer, Handler, Message
from shoal.agent.ports import Pace
from shoal.agent.worker import isolation
from shoal.agent.worker.energy import ConstantPower, Energy, energy_of
from shoal.agent.worker.engine import Engine, open_engine, read_verified, run_options, warm_up
from shoal.agent.worker.messages import Loaded, LoadOrder, ProbeOrder, State, WorkerStatus, pack, unpack
from shoal.agent.worker.metering import Metering
from shoal.agent.worker.pace import device_seconds, elements, turn
from shoal.agent.worker.probe import probe
from shoal.agent.worker.process import EXIT_STUCK
from shoal.agent.worker.tensors import decode, encode, requested
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Measured
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.units import Bytes, Joules, Seconds

_log = structlog.get_logger(__name__)

MAX_RUN_S: Final = 300.0
"""The longest any request may take, whatever deadline it brings."""
STUCK_S: Final = 10.0
"""A run that goes on for this long after it was told to terminate ends the process."""
_WARM_RUNS: Final = 5
_WARM_BUDGET_S: Final = 1.0
_CLIENTS_FAULT: Final = frozenset({Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.UNIMPLEMENTED, Code.CANCELLED})


class _Job:
    """One request on its way through a runner."""

    def __init__(self, payload: bytes, origin: str, arrived: float, deadline: float) -> None:
        self.payload = payload
        self.origin = origin
        self.arrived = arrived
        self.deadline = deadline
        self.options = run_options()
        self.ended = threading.Event()
        """The caller is gone, or its deadline."""

    def end(self) -> None:
        self.ended.set()
        self.options.terminate = True


class Replica:
    """A loaded model and its runners."""

    def __init__(self, order: LoadOrder, engine: Engine, loaded: Loaded) -> None:
        self.loaded = loaded
        self.metering = Metering(_energy(order))
        self.in_flight = 0
        self._order = order
        self._engine = engine
        self._scale = order.pace.time_scale if order.pace else 1.0
        self._runners = ThreadPoolExecutor(order.runners, thread_name_prefix="run")
        self._clock = asyncio.get_running_loop().time

    async def infer(self, message: Message) -> Message:
        """Raises ShoalError: OVERLOADED, DEADLINE_EXCEEDED, what the request got wrong, or what the runtime said."""
        if self.in_flight >= self._order.queue:
            raise refuse(
                Code.OVERLOADED, f"{self.in_flight} requests wait here", f"at most {self._order.queue}", "retry later"
            )
        now = self._clock()
        left = message.header.get("deadline_s")
        deadline = now + (min(float(left), MAX_RUN_S) if isinstance(left, int | float) else MAX_RUN_S)
        job = _Job(message.payload, str(message.header.get("origin", "")), now, deadline)
        self.in_flight += 1
        future = asyncio.get_running_loop().run_in_executor(self._runners, self._run, job)
        future.add_done_callback(self._finished)
        try:
            async with asyncio.timeout_at(deadline):
                payload = await asyncio.shield(future)
        except TimeoutError as error:
            raise _late() from error
        finally:
            if not future.done():
                job.end()
                future.add_done_callback(lambda done: done.exception())
                asyncio.get_running_loop().call_later(STUCK_S, _exit_if_stuck, future)
        return Message("answer", {}, payload)

    def _finished(self, _: asyncio.Future[bytes]) -> None:
        self.in_flight -= 1

    def _run(self, job: _Job) -> bytes:
        """In a runner thread. Meters the request, whatever becomes of it."""
        busy_s = 0.0
        try:
            if job.ended.is_set() or self._clock() >= job.deadline:
                raise _late()
            request = oip.ModelInferRequest.FromString(job.payload)
            feeds = decode(request, self._engine.inputs, self._order.max_request_bytes)
            names = requested(request, self._engine.outputs)
            with turn(self._order.slots):
                start = time.perf_counter()
                outputs = self._engine.run(feeds, names, job.options)
                real_s = time.perf_counter() - start
                busy_s, missed = self._keep_pace(job, real_s, {name: feed.shape for name, feed in feeds.items()})
            answer = encode(request, outputs).SerializeToString()
        except ShoalError as error:
            code = Code.DEADLINE_EXCEEDED if job.ended.is_set() else error.code
            self.metering.failed(job.origin, busy_s, ours=code not in _CLIENTS_FAULT)
            raise
        except Exception as error:
            self.metering.failed(job.origin, busy_s, ours=False)
            found = f"{type(error).__name__}: {error}"[:300]
            raise refuse(Code.INVALID_ARGUMENT, found, "a ModelInferRequest", "send a well-formed request") from error
        latency_s = (self._clock() - job.arrived) / self._scale
        self.metering.answered(job.origin, latency_s, busy_s, pace_missed=missed)
        return answer

    def _keep_pace(self, job: _Job, real_s: float, shapes: dict[str, tuple[int, ...]]) -> tuple[float, bool]:
        """(seconds the device was busy, in its own time; whether the real run was later than its pace)."""
        pace = self._order.pace
        if pace is None:
            return real_s, False
        device_s = _device_seconds(self._order, pace, shapes)
        job.ended.wait(max(0.0, device_s * pace.time_scale - real_s))
        return device_s, real_s > device_s * pace.time_scale


class Service:
    """Handlers by kind of frame. A worker serves one assignment in its life; `stopped` says that it shall end."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self._state = State.SPARE
        self._assignment = ""
        self._replica: Replica | None = None
        self._refusal: Refusal | None = None
        self._server: FrameServer | None = None
        self._loading: asyncio.Task[None] | None = None

    def serve_on(self, server: FrameServer) -> None:
        self._server = server

    def handlers(self) -> dict[str, Handler]:
        return {
            "load": self._load,
            "status": self._status,
            "infer": self._infer,
            "metadata": self._metadata,
            "probe": self._probe,
            "stop": self._stop,
        }

    async def _load(self, message: Message) -> Message:
        """Answers at once; what comes of it is pushed. Raises ShoalError(CONFLICT) on a second order."""
        order = unpack(LoadOrder, message.payload)
        if self._state is not State.SPARE:
            raise refuse(Code.CONFLICT, f"holds {self._assignment}", "an idle worker", "start another worker")
        self._assignment = order.assignment
        self._change(State.LOADING)
        self._loading = asyncio.create_task(self._bring_up(order), name="load")
        return Message("loading")

    async def _bring_up(self, order: LoadOrder) -> None:
        loop = asyncio.get_running_loop()
        try:
            isolation.forget_peak()
            before = isolation.resident_bytes()
            isolation.limit_memory(order.memory_bytes)
            start = time.perf_counter()
            engine = await asyncio.to_thread(_open, order)
            load_s = time.perf_counter() - start
            self._change(State.WARMING)
            options = run_options()
            giving_up = loop.call_later(order.warm_up_s, _terminate, options)
            try:
                loaded = await asyncio.to_thread(_measure, order, engine, options, load_s, before)
            finally:
                giving_up.cancel()
            self._replica = Replica(order, engine, loaded)
            self._change(State.READY)
        except ShoalError as error:
            self._refuse(order, error.refusal)
        except MemoryError as error:
            self._refuse(order, Refusal(Code.OUT_OF_MEMORY, str(error)))
        except Exception as error:  # else it would stay `loading`, in silence, until its deadline
            _log.exception("load_failed")
            self._refuse(order, Refusal(Code.LOAD_FAILED, type(error).__name__, "a loaded model", "see the log"))

    def _refuse(self, order: LoadOrder, refusal: Refusal) -> None:
        isolation.limit_memory(0)
        if refusal.code is Code.OUT_OF_MEMORY:
            had = f"{order.memory_bytes} bytes" if order.memory_bytes else "what the machine has left"
            refusal = replace(refusal, asked=f"{order.assignment} may take {had}")
        self._refusal = refusal
        self._change(State.FAILED)

    async def _status(self, _: Message) -> Message:
        return Message("status", {}, pack(self._now()))

    async def _metadata(self, _: Message) -> Message:
        return Message("metadata", {}, pack(self._ready().loaded))

    async def _infer(self, message: Message) -> Message:
        return await self._ready().infer(message)

    async def _probe(self, message: Message) -> Message:
        if self._state is not State.SPARE:
            raise refuse(Code.CONFLICT, f"holds {self._assignment}", "an idle worker", "probe in a spare worker")
        order = unpack(ProbeOrder, message.payload)
        return Message("probed", {}, pack(await asyncio.to_thread(probe, order)))

    async def _stop(self, _: Message) -> Message:
        self.stopped.set()
        return Message("stopping")

    def _ready(self) -> Replica:
        if self._replica is None:
            raise refuse(Code.MODEL_NOT_READY, f"the worker is {self._state}", "a ready replica", "retry elsewhere")
        return self._replica

    def _now(self) -> WorkerStatus:
        replica = self._replica
        return WorkerStatus(
            state=self._state,
            assignment=self._assignment,
            in_flight=replica.in_flight if replica else 0,
            served=replica.metering.served() if replica else (),
            loaded=replica.loaded if replica else None,
            refusal=self._refusal,
        )

    def _change(self, state: State) -> None:
        self._state = state
        _log.info("worker_state", state=state, assignment=self._assignment, refusal=str(self._refusal or ""))
        if self._server is not None:
            self._server.push("state", pack(self._now()))


def _open(order: LoadOrder) -> Engine:
    """Beside serving, so at low priority; but threads that the runtime starts would keep that for ever."""

    def work() -> Engine:
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


def _exit_if_stuck(future: "asyncio.Future[bytes]") -> None:
    if not future.done():
        _log.error("worker_stuck", seconds=STUCK_S)
        os._exit(EXIT_STUCK)
