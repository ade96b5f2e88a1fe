"""Worker processes of one machine, and the port through which a supervisor starts and stops them.

A worker survives its supervisor's death and is adopted by the next one; a power cut ends them all. A model's
`Behaviour` determines what happens when it is loaded and called.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import TYPE_CHECKING, Final

from shoal.agent.core.histogram import Histogram
from shoal.agent.ports import (
    LocalWorker,
    PreparedModel,
    WorkerAdopted,
    WorkerEvent,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    WorkerStats,
)
from shoal.simulator.world.world import SimProcess
from shoal.types.assignment import Assignment, Measured, Served
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.device import Device, EnergySource
from shoal.types.migration import Verdict
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Joules, Seconds

if TYPE_CHECKING:
    from shoal.simulator.parts.machine import SimMachine

SILENT_S: Final = 1.2
"""A front gives up a worker that has answered no ping for this long."""
PING_EVERY_S: Final = 0.4

RunOutcome = Code | None
"""None: the request was answered; else why it was not."""


class SimWorker:
    """One worker process. It runs as many requests at a time as its device can, the others wait in their order."""

    def __init__(self, process: SimProcess, assignment: Assignment, runners: int) -> None:
        self.process = process
        self.assignment = assignment
        self.ready: WorkerReady | None = None
        self.verdict: Verdict | None = None
        self.in_flight = 0
        self.requests = 0
        self.errors = 0
        self.latencies = Histogram()
        self._slots = asyncio.Semaphore(runners)
        self._jobs: list[asyncio.Future[RunOutcome]] = []
        process.on_death(self._on_death)

    @property
    def alive(self) -> bool:
        return self.process.alive

    def local(self) -> LocalWorker:
        """It as its supervisor and its front know it: the nonce is another one in each process."""
        name = self.assignment.id
        return LocalWorker(name, self.assignment.workload, f"/run/{name}.sock", self.process.name)

    def submit(self, seconds: float, end_run: Callable[[], RunOutcome], ping_s: float) -> "asyncio.Future[RunOutcome]":
        """Run one request for `seconds`, once it is its turn; `end_run` then tells the outcome. ping_s: when the next
        ping is due, if the process is stopped."""
        job: asyncio.Future[RunOutcome] = self.process.world.loop.create_future()
        self._jobs = [*(each for each in self._jobs if not each.done()), job]
        self.in_flight += 1
        self.process.spawn(self._run(job, seconds, end_run), "request")
        if self.process.is_paused:
            self._expect_ping(ping_s)
        return job

    def pause(self, seconds: float, ping_s: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`; ping_s: when the next ping is due."""
        self.process.pause()
        self.process.world.call_later(seconds, self.process.resume)
        self._expect_ping(ping_s)

    async def _run(self, job: "asyncio.Future[RunOutcome]", seconds: float, end_run: Callable[[], RunOutcome]) -> None:
        async with self._slots:
            if not job.done():  # else its caller is gone
                await asyncio.sleep(seconds)
            await self.process.wait_resumed()
        self.in_flight -= 1
        outcome = end_run() if not job.done() else None
        if not job.done():  # it may have crashed the worker
            job.set_result(outcome)

    def _expect_ping(self, ping_s: float) -> None:
        def end_silent_jobs() -> None:
            if self.process.is_paused:
                self._end_jobs(Code.REPLICA_UNREACHABLE)

        self.process.world.call_later(ping_s + SILENT_S, end_silent_jobs)

    def _on_death(self) -> None:
        self.errors += sum(not job.done() for job in self._jobs)
        self._end_jobs(Code.WORKER_CRASHED)

    def _end_jobs(self, code: Code) -> None:
        for job in self._jobs:
            if not job.done():
                job.set_result(code)


class SimWorkerPool:
    """Implements the Workers port."""

    def __init__(self, process: SimProcess, machine: "SimMachine") -> None:
        self._process = process
        self._machine = machine
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        machine.event_queue = self._events

    async def adopt(self) -> tuple[WorkerAdopted, ...]:
        self._process.gate("adopt workers")
        await asyncio.sleep(0.005)
        self._process.gate("adopted workers")
        machine = self._machine
        adopted = tuple(
            WorkerAdopted(name, worker.ready, worker.verdict) for name, worker in sorted(machine.workers.items())
        )
        machine.world.record(
            "worker.adopted", node=machine.name, assignments=tuple(each.assignment for each in adopted)
        )
        return adopted

    async def start(
        self, assignment: Assignment, path: str, samples: str = "", prepared: PreparedModel | None = None
    ) -> None:
        self._process.gate(f"start {assignment.id}")
        machine = self._machine
        machine.world.record(
            "worker.start",
            node=machine.name,
            assignment=assignment.id,
            workload=str(assignment.workload),
            model=assignment.model,
            device=assignment.device,
            to_zero=assignment.to_zero_after_s is not None,
        )
        if assignment.id in machine.workers:
            machine.world.fail(f"{assignment.id} is started twice on {machine.name}")
            return
        machine.require_awake(assignment.device, f"{assignment.id} is started")
        worker = machine.new_worker(assignment)
        worker.process.spawn(self._load(worker), "load")
        self._process.gate(f"started {assignment.id}")

    async def stop(self, assignment: str) -> None:
        self._process.gate(f"stop {assignment}")
        machine = self._machine
        worker = machine.workers.pop(assignment, None)
        if worker is None:
            return
        worker.process.die()
        machine.world.record(
            "worker.stop",
            node=machine.name,
            assignment=assignment,
            workload=str(worker.assignment.workload),
            ready=worker.ready is not None,
            in_flight=worker.in_flight,
        )
        self._process.gate(f"stopped {assignment}")

    def local(self, assignment: str) -> LocalWorker | None:
        self._process.check()
        worker = self._machine.workers.get(assignment)
        return None if worker is None else worker.local()

    async def record_verdict(self, assignment: str, verdict: Verdict) -> None:
        self._process.gate(f"judged {assignment}")
        worker = self._machine.workers.get(assignment)
        if worker is not None:
            worker.verdict = verdict

    def worker_bytes(self) -> Bytes:
        """A simulated process weighs nothing."""
        return Bytes(0)

    def may_share(self, new: Assignment, held: Collection[Assignment]) -> bool:
        """Each has a process of its own."""
        return False

    async def probe(self, device: Device) -> Receipt:
        self._process.gate(f"probe {device.name}")
        machine = self._machine
        seconds = machine.rng.uniform(0.5, 2.0)
        machine.require_awake(device.name, "a probe runs")
        machine.probing.add(device.name)
        try:
            await asyncio.sleep(seconds)
        finally:
            machine.probing.discard(device.name)
        self._process.gate(f"probed {device.name}")
        known = machine.chips.get(device.name)
        if known is None or device.name in machine.lost_devices:
            raise refuse(Code.DEVICE_LOST, f"{device.name} does not answer", "a device", "check its driver")
        return known.receipt(machine.identity, device, machine.clock.wall(), Seconds(seconds))

    async def events(self) -> AsyncIterator[WorkerEvent]:
        while True:
            event = await self._events.get()
            self._process.gate("worker event")
            yield event

    async def stats(self) -> tuple[WorkerStats, ...]:
        self._process.gate("worker stats")
        return tuple(
            WorkerStats(
                name,
                worker.in_flight,
                (_served_stats(worker, self._machine.slowdown),),
                latencies=worker.latencies.counts,
            )
            for name, worker in sorted(self._machine.workers.items())
            if worker.ready is not None
        )

    async def close(self, *, keep: bool) -> None:
        self._process.gate("close workers")
        if not keep:
            for name in sorted(self._machine.workers):
                await self.stop(name)

    async def _load(self, worker: SimWorker) -> None:
        """A worker's life until it is ready; runs in the worker's own process."""
        machine, asked = self._machine, worker.assignment
        behaviour = machine.models[asked.model]
        await asyncio.sleep(machine.rng.uniform(0.02, 0.2))
        machine.emit(WorkerPhase(asked.id, "loading"))
        if not machine.cached_models.get(asked.model, False):
            refusal = Refusal(Code.MODEL_DIGEST, "other bytes", asked.model, "it is fetched again by itself")
            machine.emit(WorkerFailed(asked.id, refusal))
            return
        await asyncio.sleep(machine.rng.uniform(0.5, 1.5) * behaviour.load_s)
        if machine.rng.happens(behaviour.crash_at_load):
            machine.kill_worker(asked.id, own_fault=True, why="crashed at load", at_load=True)
            return
        machine.emit(WorkerPhase(asked.id, "warming"))
        await asyncio.sleep(machine.rng.uniform(0.05, 0.3))
        measured = Measured(
            load_s=Seconds(behaviour.load_s),
            memory_bytes=Bytes(int(asked.memory_bytes * 0.8)),
            latency_p50_s=Seconds(behaviour.serve_s),
            latency_p95_s=Seconds(behaviour.serve_s * 1.5),
            joules=Joules(behaviour.serve_s * machine.chips[asked.device].active_w),
            energy_source=EnergySource.PROFILE,
            samples=8,
        )
        spec = TensorSpec("x", "FP32", (1, 4))
        worker.ready = WorkerReady(asked.id, measured, (spec,), (spec,))
        machine.world.record(
            "worker.ready", node=machine.name, assignment=asked.id, workload=str(asked.workload), model=asked.model
        )
        machine.emit(worker.ready)


def answer_signature(machine: "SimMachine", worker: SimWorker) -> str:
    """Stands for the answers' content: equal signatures mean equal answers."""
    asked = worker.assignment
    return "other answers" if asked.device in machine.models[asked.model].wrong else "right answers"


def _served_stats(worker: SimWorker, slowdown: float) -> Served:
    measured = worker.ready.measured if worker.ready else None
    p50, joules = (measured.latency_p50_s, measured.joules) if measured else (Seconds(0.0), Joules(0.0))
    return Served(
        origin="",
        requests=worker.requests,
        errors=worker.errors,
        latency_p50_s=Seconds(p50 * slowdown),
        latency_p95_s=Seconds(p50 * 1.5 * slowdown),
        joules=Joules(worker.requests * joules),
        energy_source=EnergySource.PROFILE,
    )
