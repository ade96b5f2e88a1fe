"""The supervisor's worker processes: starts, adopts, watches, ends them (`ports.Workers`).

Runs in the supervisor and imports no runtime. One worker an assignment, or one for the shared ones of a tenant on a
device; and one spare that has the runtime imported and no model.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from shoal.agent.frames import ConnectionLost, Message
from shoal.agent.ports import (
    Clock,
    LocalWorker,
    Pace,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    WorkerStats,
)
from shoal.agent.worker.groups import Groups
from shoal.agent.worker.messages import (
    SLOTS,
    LoadOrder,
    Meters,
    Probed,
    ProbeOrder,
    State,
    WorkerReport,
    WorkerStatus,
    pack,
    unpack,
)
from shoal.agent.worker.process import WorkerProcess, blamed, oom_kills
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Device
from shoal.types.migration import Verdict
from shoal.types.receipt import Receipt
from shoal.types.units import Seconds

_log = structlog.get_logger(__name__)

_STATUS_S: Final = 2.0
_SPARE_RETRY_S: Final = Seconds(2.0)
_SPARE_REST_S: Final = Seconds(15.0)
"""After a start that nobody waited for: the next spare takes a core for a second, which a move has better use for."""
_ASIDE_S: Final = Seconds(15.0)
"""A process that nobody waits for steps aside for so long at most: on a busy machine it would never get ready."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """memory_floor, memory_slack: a worker may map floor + slack x what its assignment commits, since it maps more than
    what becomes resident. stuck_after_s: a worker that does not even say how it is for so long is killed, and one
    that does nothing at all meanwhile (it was stopped, or its threads wait for each other) much sooner.
    share_at_most, share_bytes: how many models may share a worker, and what may be committed for them together."""

    spare: bool = True
    """Keep one from the start; a gateway, which runs nothing, does not."""
    orphan_after_s: float = 60.0
    start_timeout_s: float = 60.0
    load_timeout_s: float = 180.0
    warm_up_s: float = 60.0
    stuck_after_s: float = 20.0
    loads_at_once: int = 2
    queue: int = 128
    threads: int = 1
    max_request_bytes: int = 64 * 2**20
    memory_slack: float = 1.5
    memory_floor: int = 256 * 2**20
    probe_s: float = 10.0
    share_at_most: int = 8
    share_bytes: int = 2 * 2**30


class _Replica:
    """An assignment's worker and what that last said of it."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.loading = False
        """It was told to load, and did not wait for its turn."""
        self.settled = asyncio.Event()
        """Loading is over, one way or the other."""
        self.ready: WorkerReady | None = None
        self.stats: WorkerStats | None = None


class ProcessWorkers:
    """Worker processes with their files under `folder`, and their models' in `models`.

    device, pace: what the drivers say of a device, by its name.
    """

    def __init__(
        self,
        folder: Path,
        models: Path,
        clock: Clock,
        device: Callable[[str], Device | None],
        pace: Callable[[str], Pace | None],
        options: PoolOptions | None = None,
    ) -> None:
        self._folder = folder
        self._models = models
        self._clock = clock
        self._device = device
        self._pace = pace
        self._options = options or PoolOptions()
        self._replicas: dict[str, _Replica] = {}
        self._spare: WorkerProcess | None = None
        self._spare_ready: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        """Not cancelled by `close`, which waits for them."""
        self._choosing = asyncio.Lock()
        self._loads = asyncio.Semaphore(self._options.loads_at_once)
        self._oom_kills = self._oom_kills_before = oom_kills()
        """Of the whole machine, as of the last two looks at what is ready."""
        self._groups = Groups.find()
        self._closed = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / SLOTS).mkdir(mode=0o700, exist_ok=True)

    async def adopt(self) -> tuple[WorkerAdopted, ...]:
        """Also sees to the spare worker."""
        found = [await self._adopt_one(record) for record in sorted(self._folder.glob("worker-*.json"))]
        if self._options.spare:
            self._keep_spare()
        return tuple(one for those in found for one in those)

    async def start(self, assignment: Assignment, path: str) -> None:
        """Returns at once. A second start of one assignment ends its first worker."""
        await self.stop(assignment.id)
        task = self._task(self._bring_up(assignment, path))
        self._starts[assignment.id] = task
        task.add_done_callback(partial(self._started, assignment.id))

    async def stop(self, assignment: str) -> None:
        starting = self._starts.pop(assignment, None)
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        replica = self._replicas.pop(assignment, None)
        if replica is not None:
            await self._release(assignment, replica.process)

    def local(self, assignment: str) -> LocalWorker | None:
        replica = self._replicas.get(assignment)
        if replica is None or replica.ready is None:
            return None
        process = replica.process
        return LocalWorker(assignment, process.assignments[assignment].workload, str(process.socket), process.nonce)

    async def judged(self, assignment: str, verdict: Verdict) -> None:
        replica = self._replicas.get(assignment)
        if replica is not None:
            replica.process.verdicts[assignment] = verdict
            replica.process.save()

    async def probe(self, device: Device) -> Receipt:
        """In a worker that is ended afterwards; an emulated device's receipt is its profile.

        Raises ShoalError(RUNTIME_FAILED | WORKER_CRASHED | DEADLINE_EXCEEDED | DEVICE_LOST).
        """
        measured_at = self._clock.wall()
        probed = self._profiled(device) if device.emulated else await self._probed(device)
        return Receipt(
            node="",
            device=device.name,
            provider=device.provider,
            driver_version=device.driver_version,
            runtime_version=device.runtime_version,
            precisions=probed.precisions,
            operators=probed.operators,
            rates=probed.rates,
            memory_bytes=device.memory_bytes,
            spread=probed.spread,
            measured_at=measured_at,
            probe_s=Seconds(probed.probe_s),
            emulated=device.emulated,
            source=device.profile_source if device.emulated else "probe",
        )

    async def events(self) -> AsyncIterator[WorkerEvent]:
        while True:
            yield await self._events.get()

    async def stats(self) -> tuple[WorkerStats, ...]:
        """Of every ready worker; of one that does not answer in time, the last it said."""
        ready = dict.fromkeys(replica.process for replica in self._replicas.values() if replica.ready)
        self._oom_kills_before, self._oom_kills = self._oom_kills, oom_kills()
        await asyncio.gather(*(self._ask(process) for process in ready))
        return tuple(replica.stats for replica in self._replicas.values() if replica.stats is not None)

    async def close(self, *, keep: bool) -> None:
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = {replica.process for replica in self._replicas.values()}
        if self._spare is not None:
            processes.add(self._spare)
        self._replicas.clear()
        self._spare = None
        await asyncio.gather(*(process.leave() if keep else process.end() for process in processes), *self._endings)

    # a worker's life

    async def _bring_up(self, assignment: Assignment, path: str) -> None:
        """Ends in an event: ready, failed or exited."""
        taken = False
        try:
            if self._spare is not None and not _has_time(assignment):
                self._spare.step_up()  # whoever took it for something that has time goes first
            async with self._loads:
                order = self._order(assignment, path)
                async with self._choosing:
                    process = self._shared(assignment) or await self._take_spare(wanted=not _has_time(assignment))
                    if _has_time(assignment) and not process.assignments:
                        self._step_aside(process)
                    process.assignments[assignment.id] = assignment
                replica, taken = _Replica(process), True
                self._replicas[assignment.id] = replica
                process.save()
                self._limit_memory(process)
                async with process.loading:
                    await self._load(replica, order)
        except ConnectionLost as error:
            if taken:
                return  # its exit says more
            await self._give_up(assignment.id, error.refusal)
        except ShoalError as error:
            await self._give_up(assignment.id, error.refusal)
        finally:
            if _has_time(assignment):
                self._task(self._later_spare(_SPARE_REST_S))
            else:
                self._keep_spare()

    async def _load(self, replica: _Replica, order: LoadOrder) -> None:
        client = replica.process.client
        assert client is not None
        replica.loading = True
        limit = self._options.load_timeout_s
        await client.call("load", pack(order), timeout=limit)
        settled = asyncio.create_task(replica.settled.wait())
        gone = asyncio.create_task(replica.process.gone.wait())
        try:
            done, _ = await asyncio.wait({settled, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
            gone.cancel()
        if not done:
            raise refuse(Code.LOAD_TIMEOUT, "still loading", f"ready within {limit:g}s", "a smaller or simpler model")

    async def _give_up(self, assignment: str, refusal: Refusal) -> None:
        replica = self._replicas.pop(assignment, None)
        self._events.put_nowait(WorkerFailed(assignment, refusal))
        if replica is not None and refusal.code is Code.LOAD_TIMEOUT:
            # nothing else interrupts a load
            await replica.process.end()
        elif replica is not None:
            await self._release(assignment, replica.process)

    async def _release(self, assignment: str, process: WorkerProcess) -> None:
        """Takes it out of its process, which ends when it holds nothing more or does not obey."""
        del process.assignments[assignment]
        process.verdicts.pop(assignment, None)
        if process.assignments and process.client is not None and not process.gone.is_set():
            process.save()
            try:
                await process.client.call("unload", header={"assignment": assignment}, timeout=_STATUS_S)
            except ConnectionLost:
                # its exit says more
                pass
            except ShoalError as error:
                process.verdict = replace(error.refusal, code=Code.WORKER_STUCK)
                await process.end()
        else:
            await process.end()

    def _shared(self, assignment: Assignment) -> WorkerProcess | None:
        """A worker that this one may join: of its tenant and device, all of them shared, with room in it."""
        for process in dict.fromkeys(replica.process for replica in self._replicas.values()):
            if not process.gone.is_set() and may_share(assignment, process.assignments.values(), self._options):
                return process
        return None

    def _said(self, process: WorkerProcess, message: Message) -> None:
        """A worker pushed its state."""
        status = unpack(WorkerStatus, message.payload)
        replica = self._replicas.get(status.assignment)
        if replica is None or replica.process is not process:
            return
        if status.state is not State.LOADING:
            process.step_up()  # what is measured while it warms up is what it will do
        match status.state:
            case State.LOADING | State.WARMING:
                self._events.put_nowait(WorkerPhase(status.assignment, status.state.value))
            case State.READY:
                replica.ready = _ready(status)
                replica.settled.set()
                if replica.ready is not None:
                    self._events.put_nowait(replica.ready)
            case State.FAILED:
                replica.settled.set()
                refusal = status.refusal or Refusal(Code.LOAD_FAILED)
                self._task(self._give_up(status.assignment, refusal))

    def _exited(self, process: WorkerProcess) -> None:
        if process is self._spare:
            self._spare = None
            _log.warning("spare_worker_exited", worker=process.name, why=str(process.judge(oom=False)[1]))
            self._task(self._later_spare(_SPARE_RETRY_S))
        held = {name: replica for name, replica in self._replicas.items() if replica.process is process}
        if not held:
            return
        counted = process.oom_kills()
        own_fault, refusal = process.judge(oom=bool(counted) if counted is not None else self._oom_kill_of_late())
        if process.verdict is not None:
            own_fault, refusal = False, process.verdict
        loading = [name for name, replica in held.items() if replica.loading and not replica.settled.is_set()]
        at_fault = blamed(held, loading, process.busy()) if own_fault else frozenset()
        for name in held:
            del self._replicas[name]
            _log.warning("worker_exited", assignment=name, own_fault=name in at_fault, why=str(refusal))
            self._events.put_nowait(WorkerExited(name, name in at_fault, refusal))
        self._end(process)

    def _oom_kill_of_late(self) -> bool:
        return oom_kills() > self._oom_kills_before

    async def _adopt_one(self, record: Path) -> tuple[WorkerAdopted, ...]:
        process = WorkerProcess.find(record, self._groups, self._exited)
        if process is None:
            return ()
        process.step_up()
        try:
            client = await process.greet(partial(self._said, process), _STATUS_S)
            report = unpack(WorkerReport, (await client.call("status", timeout=_STATUS_S)).payload)
        except ShoalError as error:
            _log.warning("worker_not_adopted", worker=process.name, why=str(error.refusal))
            await process.end()
            return ()
        if not report.held and not report.measuring and not process.assignments and self._spare is None:
            self._spare = process
            return ()
        held = {one.assignment: one for one in report.held if one.state is not State.FAILED}
        if not held or held.keys() != process.assignments.keys():
            await process.end()
            return ()
        for name, status in held.items():
            replica = self._replicas[name] = _Replica(process)
            replica.ready = _ready(status)
            replica.loading = True
            if replica.ready is not None:
                replica.settled.set()
        return tuple(WorkerAdopted(name, self._replicas[name].ready, process.verdicts.get(name)) for name in held)

    async def _ask(self, process: WorkerProcess) -> None:
        client = process.client
        assert client is not None
        now = asyncio.get_running_loop().time()
        before = process.used_s()
        try:
            report = unpack(WorkerReport, (await client.call("status", timeout=_STATUS_S)).payload)
        except ShoalError:
            process.silent_since = process.silent_since or now
            silent_s = asyncio.get_running_loop().time() - process.silent_since
            still = silent_s >= _STATUS_S and process.rests() and process.used_s() == before
            if (still or silent_s >= self._options.stuck_after_s) and not process.gone.is_set():
                found = f"silent for {silent_s:.0f}s{', and used no processor' if still else ''}"
                process.verdict = Refusal(Code.WORKER_STUCK, found, "its status", "the assignment is loaded again")
                self._end(process)
            return
        process.silent_since = None
        for status in report.held:
            replica = self._replicas.get(status.assignment)
            if replica is not None and replica.process is process and replica.ready is not None:
                inside = min(status.in_flight, self._options.queue)  # a worker that lies says no more than it may hold
                replica.stats = WorkerStats(status.assignment, inside, status.served, status.batches, status.latencies)

    # the spare worker

    async def _take_spare(self, *, wanted: bool = True) -> WorkerProcess:
        """A worker that is connected and holds nothing; for the caller to end. wanted: now, at any other's cost. Raises
        ShoalError."""
        if self._spare is None:
            self._keep_spare()
        process = self._spare
        if process is None:
            raise refuse(Code.LOAD_FAILED, "no worker process could be started", "one", "see the agent's log")
        if process.client is None:
            assert self._spare_ready is not None
            if wanted:
                process.step_up()
            await asyncio.shield(self._spare_ready)
        if self._spare is not process:
            # another start was faster
            return await self._take_spare(wanted=wanted)
        self._spare = None
        return process

    def _keep_spare(self) -> None:
        if self._spare is None and not self._closed:
            try:
                self._spare = WorkerProcess.spawn(
                    self._folder, self._models, self._options.orphan_after_s, self._groups, self._exited
                )
            except OSError as error:
                _log.warning("no_spare_worker", reason=str(error))
                self._task(self._later_spare(_SPARE_RETRY_S))
                return
            self._step_aside(self._spare)
            self._spare_ready = self._task(self._greet(self._spare))

    def _step_aside(self, process: WorkerProcess) -> None:
        """While it imports the runtime, or loads what is not waited for: both take a core for a second."""
        process.step_aside()
        self._task(self._step_up_in_time(process))

    async def _step_up_in_time(self, process: WorkerProcess) -> None:
        await self._clock.sleep(_ASIDE_S)
        process.step_up()

    async def _greet(self, process: WorkerProcess) -> None:
        try:
            await process.greet(partial(self._said, process), self._options.start_timeout_s)
            process.step_up()
        except BaseException:
            if self._spare is process:
                self._spare = None
            await process.end()
            raise

    async def _later_spare(self, after: Seconds) -> None:
        await self._clock.sleep(after)
        self._keep_spare()

    # what a worker is told

    def _order(self, assignment: Assignment, path: str) -> LoadOrder:
        device = self._device(assignment.device)
        if device is None:
            raise refuse(Code.DEVICE_LOST, assignment.device, "a device of this node", "it is placed elsewhere")
        options = self._options
        slots = (str(self._folder / SLOTS / f"{device.name}-{n}.lock") for n in range(device.parallelism))
        return LoadOrder(
            assignment=assignment.id,
            shared_by=assignment.workload.tenant if assignment.shared_worker else "",
            digest=assignment.model,
            path=path,
            provider=device.provider,
            precision=assignment.precision,
            threads=options.threads,
            runners=max(1, device.parallelism),
            queue=options.queue,
            memory_bytes=self._allowed(assignment),
            max_request_bytes=options.max_request_bytes,
            warm_up_s=options.warm_up_s,
            work=assignment.work,
            pace=self._pace(device.name),
            slots=tuple(slots) if device.emulated else (),
            meters=_meters(device),
            visible=_cuda_uuid(device),
        )

    def _allowed(self, assignment: Assignment) -> int:
        """Bytes that it may add to its worker; 0: as many as there are."""
        options = self._options
        return int(options.memory_floor + options.memory_slack * assignment.memory_bytes) * bool(
            assignment.memory_bytes
        )

    def _limit_memory(self, process: WorkerProcess) -> None:
        """To the sum of what it holds, as the worker does for itself, or to what it may take already: what was unloaded
        may lie in it still, and a limit below that kills."""
        parts = [self._allowed(assignment) for assignment in process.assignments.values()]
        process.limit_memory(sum(parts) if all(parts) else 0)

    def _profiled(self, device: Device) -> Probed:
        pace = self._pace(device.name)
        if pace is None:
            raise refuse(
                Code.DEVICE_LOST, f"no profile of {device.name}", "an emulated device", "see the agent's settings"
            )
        return Probed(pace.rates, tuple(pace.rates.matmul_flops), (), 0.0, 0.0)

    async def _probed(self, device: Device) -> Probed:
        process = await self._take_spare()
        try:
            assert process.client is not None
            order = ProbeOrder(
                device.provider, _meters(device), device.parallelism, self._options.probe_s, _cuda_uuid(device)
            )
            reply = await process.client.call("probe", pack(order), timeout=3 * self._options.probe_s)
            return unpack(Probed, reply.payload)
        except ConnectionLost as error:
            raise refuse(
                Code.WORKER_CRASHED, "the worker ended while probing", device.name, "check the device's driver"
            ) from error
        finally:
            await process.end()
            self._keep_spare()

    def _started(self, assignment: str, task: "asyncio.Task[None]") -> None:
        if self._starts.get(assignment) is task:
            del self._starts[assignment]

    def _end(self, process: WorkerProcess) -> None:
        task = asyncio.create_task(process.end())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def _task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        with suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                _log.warning("worker_task_failed", why=str(error))


def _has_time(assignment: Assignment) -> bool:
    """Another replica serves until this one has passed its verification."""
    return assignment.verification is not None


def may_share(new: Assignment, held: Collection[Assignment], options: PoolOptions) -> bool:
    """Whether `new` may join the worker that holds `held` (nothing: it has been released and ends)."""
    kin = {(one.workload.tenant, one.device, one.shared_worker) for one in held}
    return (
        kin == {(new.workload.tenant, new.device, True)}
        and new.shared_worker
        and len(held) < options.share_at_most
        and new.memory_bytes + sum(one.memory_bytes for one in held) <= options.share_bytes
    )


def _ready(status: WorkerStatus) -> WorkerReady | None:
    if status.state is not State.READY or status.loaded is None:
        return None
    loaded = status.loaded
    return WorkerReady(status.assignment, loaded.measured, loaded.inputs, loaded.outputs)


def _meters(device: Device) -> Meters:
    """Where the driver found the device's energy counters."""
    rapl = device.attributes.get("energy_counters", "").split()
    return Meters(tuple(rapl), _cuda_uuid(device))


def _cuda_uuid(device: Device) -> str:
    return device.attributes.get("uuid", "") if device.provider == "CUDAExecutionProvider" else ""
