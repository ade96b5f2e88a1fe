"""The service of a worker process: loads, measures, serves and meters its assignments (one, unless they are shared).

State changes are pushed (`state`, a WorkerStatus) to every connected peer, so that a supervisor that adopts this worker
learns the same as the one that started it. On an emulated device all reported times (Measured, Served) are device time:
the time waited here, divided by the profile's `time_scale`.
"""

import asyncio
import gc
import mmap
import os
import weakref
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from shoal.agent.frames import FrameMessage, FrameServer, Handler, InferCall
from shoal.agent.packing import pack, unpack
from shoal.agent.ports import NO_BATCHES
from shoal.agent.worker import isolation
from shoal.agent.worker.engine import Engine, run_options
from shoal.agent.worker.memory import MemoryGrowth
from shoal.agent.worker.messages import (
    LoadOrder,
    LoadResult,
    LoadState,
    ProbeOrder,
    WorkerReport,
    WorkerStatus,
    process_memory_bytes,
)
from shoal.agent.worker.model_loading import measure, open_model, open_smallest_graph, terminate
from shoal.agent.worker.model_runner import ModelRunner, reference_is_inline, run_place
from shoal.agent.worker.probe import probe, probe_memory
from shoal.agent.worker.providers import CPU_PROVIDER
from shoal.agent.worker.reference_samples import ReferenceSamples
from shoal.agent.worker.run_place import RunPlace, inline_limit_s
from shoal.agent.worker.runner_threads import measure_hop
from shoal.agent.worker.support import runtime_support
from shoal.host.event_wait import wait_or_timeout
from shoal.types.assignment import Batching
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds
from shoal.v1 import witness_pb2
from shoal.wire import nouns

_log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 0.2
_LOOK_AT_MOST_EVERY_S: Final = 5.0
"""Pauses between looks whether an unloaded model is gone, doubled from look to look. A search for garbage is one
millisecond or a few: what lives as long as the process is excluded from it."""


class _HostedAssignment:
    """One assignment of this worker, from its load order on."""

    def __init__(self, order: LoadOrder) -> None:
        self.order = order
        self.name = order.assignment.encode()
        """As it is noted while it is busy."""
        self.state = LoadState.LOADING
        self.replica: ModelRunner | None = None
        # What a witness asks of it; set with `replica`.
        self.samples: ReferenceSamples | None = None
        # What runs it; set with `replica`.
        self.engine: weakref.ref[Engine] | None = None
        self.refusal: Refusal | None = None
        self.loading: asyncio.Task[None] | None = None
        # Measures whether requests are to run in batches, once it serves.
        self.trial: asyncio.Task[None] | None = None

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

    def __init__(self, busy: mmap.mmap, stop_requested: asyncio.Event) -> None:
        self.stop_requested = stop_requested
        self._busy = busy
        self._assignments: dict[str, _HostedAssignment] = {}
        # Of those, the busy ones, in the order in which they became so.
        self._busy_assignments: dict[_HostedAssignment, None] = {}
        self._is_probing = False
        self._idle_bytes = 0
        # Keeps a plugin's context open: some close it with their last session.
        self._provider_session: Engine | None = None
        # Orders whose models were unloaded and still hold their memory.
        self._leaving: list[LoadOrder] = []
        self._freeing: set[asyncio.Task[None]] = set()
        self._load_turn = asyncio.Lock()
        # Whether a model was ever opened here: the first one has taken what the provider takes for itself.
        self._has_opened = False
        # One model at a time measures batches, so that none measures another's runs.
        self._trial_turn = asyncio.Lock()
        self._server: FrameServer | None = None
        # Cost of a hop to a runner's thread. None until the first load.
        self._hop_s: Seconds | None = None

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
            "probe_memory": self._probe_memory,
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
                joined, self._has_opened = self._has_opened, True
                engine, load_time = await asyncio.to_thread(open_model, order)
                self._set_state(held, LoadState.WARMING)
                options = run_options()
                giving_up = loop.call_later(order.warm_up_s, terminate, options)
                try:
                    loaded = await asyncio.to_thread(measure, order, engine, options, load_time, memory)
                finally:
                    giving_up.cancel()
                loaded = replace(loaded, measured=replace(loaded.measured, joined=joined))
                place = run_place(order, engine, loaded, await self._inline_limit_s())
            if self._assignments.get(order.assignment) is held:
                placed = self._with_place(order, engine, loaded, place)
                held.replica = ModelRunner(order, engine, placed, place, partial(self._on_busy_change, held))
                held.samples = ReferenceSamples(order, engine)
                held.engine = weakref.ref(engine)
            self._set_state(held, LoadState.READY)
            if held.replica is not None and order.batching is not None:
                trial = self._measure_batching(held, held.replica, order.batching, loaded)
                held.trial = asyncio.create_task(trial, name="batching")
        except ShoalError as error:
            self._on_load_failed(held, error.refusal)
        except MemoryError as error:
            self._on_load_failed(held, Refusal(Code.OUT_OF_MEMORY, str(error)))
        except Exception as error:  # without this the replica would stay `loading` until its deadline, and say nothing
            _log.exception("load_failed", assignment=held.order.assignment)
            self._on_load_failed(held, Refusal(Code.LOAD_FAILED, type(error).__name__, "a loaded model", "see the log"))

    async def _measure_batching(
        self, held: _HostedAssignment, replica: ModelRunner, rule: Batching, loaded: LoadResult
    ) -> None:
        """`loaded`: the result without a word on where requests run, which batches change."""
        try:
            async with self._trial_turn:
                decision = await replica.measure_batching(rule, self._hop_s or Seconds(0.0))
        except Exception:  # it serves on without batches
            _log.exception("batching_failed", assignment=held.order.assignment)
            return
        replica.loaded = _with_note(loaded if decision.plan is not None else replica.loaded, decision.reason)
        self._push(held)

    async def _open_provider(self, order: LoadOrder) -> None:
        """What a provider takes of the host for itself, whatever the model, is beside the models' limit: a device's
        context may be larger than the models on it."""
        if order.provider == CPU_PROVIDER or self._provider_session is not None:
            return
        earlier = isolation.data_bytes()
        self._provider_session = await asyncio.to_thread(open_smallest_graph, order)
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
            if held.trial is not None:
                held.trial.cancel()
            self._on_busy_change(held, is_busy=False)
            if held.replica is not None:
                held.replica.close()
            if held.engine is not None and self._assignments:
                self._free(held.order, held.engine)
            else:
                self._limit_memory()
        return FrameMessage("unloaded")

    def _free(self, order: LoadOrder, engine: weakref.ref[Engine]) -> None:
        """A model that left holds its memory until its last run has ended, and no cycle of references holds it. Until
        then it counts, since it is in the place of nobody else's."""
        self._leaving.append(order)
        task = asyncio.create_task(self._free_when_gone(order, engine), name="free")
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _free_when_gone(self, order: LoadOrder, engine: weakref.ref[Engine]) -> None:
        pause_s = _LOOK_EVERY_S
        while engine() is not None and not await wait_or_timeout(self.stop_requested, pause_s):
            gc.collect()
            pause_s = min(2 * pause_s, _LOOK_AT_MOST_EVERY_S)
        self._leaving.remove(order)
        self._limit_memory()

    async def _status(self, _: FrameMessage) -> FrameMessage:
        held = tuple(held.status() for held in self._assignments.values())
        return FrameMessage("status", {}, pack(WorkerReport(held, self._is_probing)))

    async def _metadata(self, message: FrameMessage) -> FrameMessage:
        return FrameMessage("metadata", {}, pack(self._ready_runner(_assignment(message)).loaded))

    def on_infer(self, call: InferCall) -> None:
        """Raises ShoalError(MODEL_NOT_READY | OVERLOADED)."""
        self._ready_runner(call.header.assignment).infer(call)

    async def _answer(self, message: FrameMessage) -> FrameMessage:
        return await self._ready_runner(_assignment(message)).infer_when_idle(message)

    async def _sample_request(self, message: FrameMessage) -> FrameMessage:
        seed, index = message.header.get("seed"), int(message.header["index"])
        return FrameMessage("drawn", {}, await asyncio.to_thread(self._samples(message).sample_request, seed, index))

    async def _pack_sample(self, message: FrameMessage) -> FrameMessage:
        header = message.header
        path, digest, index = str(header["path"]), str(header["digest"]), int(header["index"])
        return FrameMessage(
            "packed",
            {},
            await asyncio.to_thread(self._samples(message).pack_sample, path, digest, index),
        )

    async def _record(self, message: FrameMessage) -> FrameMessage:
        recorded = witness_pb2.Recorded.FromString(message.payload)
        return FrameMessage("recorded", {}, await asyncio.to_thread(self._samples(message).record, recorded))

    async def _compare(self, message: FrameMessage) -> FrameMessage:
        answers = witness_pb2.Answers.FromString(message.payload)
        found = await asyncio.to_thread(self._samples(message).compare, answers)
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

    async def _probe_memory(self, message: FrameMessage) -> FrameMessage:
        if self._assignments:
            raise self._busy_error("probe in a spare worker")
        order = unpack(ProbeOrder, message.payload)
        self._is_probing = True
        return FrameMessage("probed", {}, pack(await asyncio.to_thread(probe_memory, order)))

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

    def _samples(self, message: FrameMessage) -> ReferenceSamples:
        name = _assignment(message)
        self._ready_runner(name)
        samples = self._assignments[name].samples
        assert samples is not None
        return samples

    async def _inline_limit_s(self) -> float:
        """The longest run that this process's event loop takes."""
        if self._hop_s is None:
            self._hop_s = await measure_hop()
        return inline_limit_s(self._hop_s, len(os.sched_getaffinity(0)))

    def _with_place(self, order: LoadOrder, engine: Engine, loaded: LoadResult, place: RunPlace) -> LoadResult:
        """The result, with a word on where the model runs."""
        is_inline = reference_is_inline(order, engine, place)
        _log.info(
            "run_place_chosen",
            assignment=order.assignment,
            inline=is_inline,
            run_us=round(loaded.run_s * 1e6),
            hop_us=round((self._hop_s or 0.0) * 1e6),
            limit_us=round(place.limit_s * 1e6),
        )
        if not is_inline:
            return loaded
        note = f"runs on its worker's event loop: {loaded.run_s * 1e6:.0f} us a run, at most {place.limit_s * 1e6:.0f}"
        return _with_note(loaded, note)

    def _busy_error(self, remedy: str) -> ShoalError:
        return refuse(Code.CONFLICT, f"holds {', '.join(self._assignments)}", "an idle worker", remedy)

    def _limit_memory(self) -> None:
        """Limit the process to what it holds, each as its order says."""
        orders = [held.order for held in self._assignments.values() if held.state is not LoadState.FAILED]
        orders += self._leaving
        host = max((order.access.host_bytes for order in orders), default=0)
        isolation.limit_memory(self._idle_bytes, process_memory_bytes([order.memory_bytes for order in orders], host))

    def _on_busy_change(self, held: _HostedAssignment, is_busy: bool) -> None:
        """Note it. A run may go on for longer than its assignment is held."""
        if not is_busy:
            self._busy_assignments.pop(held, None)
            if not self._busy_assignments:
                self._busy[0] = 0  # of a model that runs on the loop, with each of its requests
                return
        elif self._assignments.get(held.order.assignment) is held:
            self._busy_assignments[held] = None
        noted = b" ".join([each.name for each in self._busy_assignments])[: len(self._busy) - 1] + b"\0"
        self._busy[: len(noted)] = noted

    def _set_state(self, held: _HostedAssignment, state: LoadState) -> None:
        """Push the new state, unless the assignment was unloaded meanwhile."""
        held.state = state
        if self._assignments.get(held.order.assignment) is not held:
            return
        _log.info(
            "load_state_changed", assignment=held.order.assignment, state=state, error=str(held.refusal or "") or None
        )
        self._push(held)

    def _push(self, held: _HostedAssignment) -> None:
        if self._server is not None and self._assignments.get(held.order.assignment) is held:
            self._server.push("state", pack(held.status()))


def _with_note(loaded: LoadResult, note: str) -> LoadResult:
    return replace(loaded, note="; ".join(filter(None, (loaded.note, note))))


def _assignment(message: FrameMessage) -> str:
    return str(message.header.get("assignment", ""))
