"""One machine of the region: its modelled devices, and its workers and front as processes of their own.

A worker survives its supervisor's death and is adopted by the next one; a power cut ends them all. A model's
`Behaviour` determines what happens when it is loaded and called.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.agent.core.histogram import Histogram
from shoal.agent.ports import (
    DeviceAccess,
    FrontStats,
    LocalWorker,
    ReferenceRecording,
    StatefulReplica,
    VerificationSource,
    WorkerAdopted,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    WorkerStats,
)
from shoal.simulator.parts.network import REGION, SimNetwork
from shoal.simulator.world.disk import SimDisk
from shoal.simulator.world.world import SimClock, SimProcess, SimWorld
from shoal.types.address import HostPort
from shoal.types.agreement import local_traffic_key
from shoal.types.assignment import Assignment, Credential, Crossing, Forwarding, Ingress, Measured, PeerTrust, Served
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.device import Device, DeviceKind, EnergySource, PowerState, Reading, Rest, Role
from shoal.types.migration import Against, Drift, InputsFrom, Metric, Verdict, Verification, Verifier
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Rates, Receipt
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Joules, Seconds, Wall, Watts
from shoal.types.workload import WorkloadKey


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one model does on a worker."""

    # Mean seconds of a load.
    load_s: float = 0.3
    # Mean seconds of a request.
    serve_s: float = 0.02
    # Chance, 0 to 1, that a load crashes the worker.
    crash_at_load: float = 0.0
    # Chance, 0 to 1, that a request crashes the worker.
    crash_at_request: float = 0.0
    # Names of devices on which its answers differ from everywhere else.
    wrong: frozenset[str] = frozenset()


USUAL_W: Final = 15.0


@dataclass(frozen=True, slots=True)
class Chip:
    """A modelled device."""

    device: Device
    # FLOP/s, of matmul and conv alike.
    flops: float
    # Watts at work; a third of it when idle.
    active_w: Watts = Watts(USUAL_W)

    def receipt(self, node: str, device: Device, measured_at: Wall, probe_s: Seconds) -> Receipt:
        """The receipt that probing would give. device: as its node knows it now."""
        return Receipt(
            node=node,
            device=device.name,
            provider=device.provider,
            driver_version=device.driver_version,
            runtime_version=device.runtime_version,
            precisions=("fp32",),
            operators=(),
            rates=Rates(
                matmul_flops={"fp32": self.flops},
                conv_flops={"fp32": self.flops},
                elementwise_bytes=1e10,
                copy_bytes=1e10,
                launch_s=Seconds(5e-5),
                node_s=Seconds(2e-6),
                load_bytes=1e9,
                idle_w=Watts(self.active_w / 3),
                active_w=self.active_w,
                energy_source=EnergySource.PROFILE,
            ),
            memory_bytes=device.memory_bytes,
            spread=0.1,
            measured_at=measured_at,
            probe_s=probe_s,
            emulated=True,
            source="simulator",
        )


def chip(
    name: str, flops: float, memory: int, wake_s: float | None = None, *, active_w: float = USUAL_W
) -> Chip:  # fmt: skip
    """A modelled CPU. wake_s: seconds to wake it; None: it cannot sleep."""
    rest = None if wake_s is None else Rest(Watts(10.0), Watts(1.0), Seconds(wake_s), "simulator")
    device = Device(
        name=name,
        kind=DeviceKind.CPU,
        vendor="sim",
        model="modelled",
        driver="modelled",
        driver_version="1",
        runtime_version="1",
        provider="CPUExecutionProvider",
        memory_bytes=Bytes(memory),
        emulated=True,
        profile="simulator",
        profile_source="shoal.simulator.parts.machine",
        rest=rest,
    )
    return Chip(device, flops, Watts(active_w))


class SimWorker:
    """One worker process."""

    def __init__(self, process: SimProcess, assignment: Assignment) -> None:
        self.process = process
        self.assignment = assignment
        self.ready: WorkerReady | None = None
        self.verdict: Verdict | None = None
        self.in_flight = 0
        self.requests = 0
        self.errors = 0
        self.latencies = Histogram()

    @property
    def alive(self) -> bool:
        return self.process.alive


@dataclass(slots=True)
class AgreementCounter:
    """Requests that one front counted under an agreement."""

    requests: int = 0
    errors: int = 0
    # Latencies of the newest answered requests.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    latencies: Histogram = field(default_factory=Histogram)

    def to_report(self, agreement: str, region: str) -> Crossing:
        ordered = sorted(self.seconds)
        p95_s = ordered[int(0.95 * len(ordered))] if ordered else 0.0
        return Crossing(agreement, region, self.requests, self.errors, Seconds(p95_s), self.latencies.counts)


class SimFront:
    """The data plane of one machine: its last configuration and its counters."""

    def __init__(self) -> None:
        self.alive = False
        self.routes: Mapping[WorkloadKey, Route] = {}
        self.peers: Mapping[str, PeerTrust] = {}
        """Region -> trust in its gateways."""
        self.agreement_counters: dict[tuple[str, str], AgreementCounter] = {}
        """(agreement, region) -> counter."""
        self.workers: Mapping[str, LocalWorker] = {}
        self.verification_sources: Mapping[str, VerificationSource] = {}
        self.counts: dict[WorkloadKey, Ingress] = {}

    def count_agreement_request(self, agreement: str, region: str, seconds: float | None) -> None:
        """Count one finished request to that region. seconds: its latency; None: it was not answered."""
        count = self.agreement_counters.setdefault((agreement, region), AgreementCounter())
        count.requests += 1
        if seconds is None:
            count.errors += 1
        else:
            count.seconds.append(seconds)
            count.latencies.add(seconds)

    def agreement_of(self, workload: WorkloadKey) -> str:
        """The agreement under which another region serves the workload, beside this region or alone; empty: none."""
        route = self.routes.get(workload)
        found = (each.agreement for each in route.endpoints if each.region) if route is not None else iter(())
        return next(found, "")


class SimMachine:
    """Processes and devices that lose power together."""

    def __init__(
        self,
        world: SimWorld,
        network: SimNetwork,
        name: str,
        role: Role,
        chips: tuple[Chip, ...],
        models: Mapping[str, Behaviour],
        identity: str = "",
    ) -> None:
        """identity: the name that its agent reports; its own name unless it is a duplicate."""
        self.world = world
        self.network = network
        self.name = name
        self.identity = identity or name
        self.role = role
        self.chips = {each.device.name: each for each in chips}
        self.models = models
        self.rng = world.rng.stream(f"machine/{name}")
        self.clock = SimClock(world, booted_at=self.rng.uniform(1.0, 1e5))
        self.disk = SimDisk(world, name)
        self.cached_models: dict[str, bool] = {}
        self.workers: dict[str, SimWorker] = {}
        self.front = SimFront()
        self.supervisor: SimProcess | None = None
        self.event_queue: asyncio.Queue[WorkerEvent] | None = None
        self.lost_devices: set[str] = set()
        self.awake_at: dict[str, float] = {}
        """Device -> when it is awake; infinite while it sleeps."""
        self.probing: set[str] = set()
        self.slowdown = 1.0
        """Factor on the time that a request takes by its model."""
        self.alter_reading: Callable[[Reading], Reading] = _unchanged_reading
        """Changes what the sensors read."""
        self.boots = 0
        self.has_power = True

    def emit(self, event: WorkerEvent) -> None:
        if self.event_queue is not None and self.supervisor is not None and self.supervisor.alive:
            self.event_queue.put_nowait(event)

    def used_bytes(self, device: str) -> int:
        return sum(
            worker.assignment.memory_bytes for worker in self.workers.values() if worker.assignment.device == device
        )

    def power(self, device: str) -> PowerState:
        at = self.awake_at.get(device, 0.0)
        if at <= self.world.now():
            return PowerState.AWAKE
        return PowerState.ASLEEP if at == math.inf else PowerState.WAKING

    def require_awake(self, device: str, what: str) -> None:
        """Fail the run if the device sleeps while something runs there or is about to."""
        if self.power(device) is not PowerState.AWAKE:
            self.world.fail(f"{what} on {self.name}'s {device}, which is {self.power(device)}")

    def set_sleep(self, device: str, asleep: bool) -> float:
        """Seconds until the device could run something. A sleeping device must have no replica."""
        known = self.chips.get(device)
        if known is None or known.device.rest is None:
            return 0.0
        now = self.world.now()
        if asleep:
            on_it = [name for name, worker in sorted(self.workers.items()) if worker.assignment.device == device]
            if on_it or device in self.probing:
                self.world.fail(f"{self.name} puts {device} to sleep under {on_it or 'its probe'}")
            if self.power(device) is not PowerState.ASLEEP:
                self.world.record("device.sleeps", node=self.name, device=device)
            self.awake_at[device] = math.inf
            return known.device.rest.wake_s
        if self.power(device) is PowerState.ASLEEP:
            self.world.record("device.wakes", node=self.name, device=device)
            self.awake_at[device] = now + known.device.rest.wake_s
        return max(0.0, self.awake_at.get(device, 0.0) - now)

    def is_ready(self, assignment: str) -> bool:
        worker = self.workers.get(assignment)
        return worker is not None and worker.ready is not None

    def kill_worker(self, assignment: str, *, own_fault: bool, why: str, at_load: bool = False) -> None:
        """End the worker process; the supervisor sees its exit."""
        worker = self.workers.pop(assignment, None)
        if worker is None:
            return
        worker.process.die()
        self.world.record(
            "worker.died", node=self.name, assignment=assignment, model=worker.assignment.model, own=own_fault, why=why
        )
        code = Code.WORKER_CRASHED if own_fault else Code.WORKER_KILLED
        refusal = Refusal(code, why, "a running worker", "it is started again by itself")
        self.emit(WorkerExited(assignment, own_fault, refusal, at_load))

    def kill_front(self) -> None:
        """Kill the front; it restarts at once with its last configuration."""
        if self.front.alive:
            self.front.alive = False
            self.world.record("front.died", node=self.name)
            self.world.call_later(self.rng.uniform(0.02, 0.2), self._restart_front)

    def power_cut(self) -> None:
        """Stop everything on the machine; the disk keeps what was flushed."""
        if self.supervisor is not None:
            self.supervisor.die()
        for name in sorted(self.workers):
            worker = self.workers.pop(name)
            worker.process.die()
            self.world.record(
                "worker.died", node=self.name, assignment=name, model=worker.assignment.model, own=False, why="power"
            )
        self.front = SimFront()
        self.awake_at.clear()
        self.probing.clear()
        lost = self.disk.power_cut()
        self.world.record("fault.power", node=self.name, lost=lost)

    def _restart_front(self) -> None:
        if self.supervisor is not None and self.supervisor.alive:
            self.front.alive = True
        else:
            self.front.routes = {}

    async def request(self, workload: WorkloadKey, *, forwarded: bool = False) -> tuple[Code | None, str]:
        """One inference request at this machine's front: (None, the assignment that answered) or (code, '')."""
        front = self.front
        if not front.alive:
            return Code.REPLICA_UNREACHABLE, ""
        route = front.routes.get(workload)
        if route is None:
            return Code.MODEL_NOT_FOUND, ""
        tried: set[str] = set()
        crashed = False
        while True:
            choices = self._choices(route, tried, forwarded=forwarded)
            if not choices:
                return (Code.REPLICA_UNREACHABLE if tried else Code.MODEL_NOT_READY), ""
            endpoint = self.rng.choice(choices)
            tried.add(endpoint.assignment)
            began, beside = self.world.now(), front.agreement_of(workload)
            code, assignment = await self._send_to(endpoint, workload)
            if beside:
                seconds = self.world.now() - began if code is None else None
                own = local_traffic_key(beside), REGION
                front.count_agreement_request(
                    *((endpoint.agreement, endpoint.region) if endpoint.region else own), seconds
                )
            if code is None:
                return None, assignment
            if code is Code.WORKER_CRASHED:
                if crashed:
                    return Code.REQUEST_CRASHED_WORKER, ""
                crashed = True
            if not front.alive:
                return Code.REPLICA_UNREACHABLE, ""

    def _choices(self, route: Route, tried: set[str], *, forwarded: bool) -> list[Endpoint]:
        """Endpoints to try next.

        Standby replicas come only when all others were tried. A forwarded request goes to a worker of this machine, or
        leaves the region, whatever the weight of that endpoint.
        """
        open_to = [
            each
            for each in route.endpoints
            if each.assignment not in tried
            and (each.weight > 0 or (forwarded and each.region))
            and (
                each.assignment in self.front.workers
                if each.kind is EndpointKind.LOCAL
                else bool(each.region) or not forwarded
            )
        ]
        at_work = [each for each in open_to if each.state is EndpointState.READY]
        return at_work or [each for each in open_to if each.state is EndpointState.STANDBY]

    async def _send_to(self, endpoint: Endpoint, workload: WorkloadKey) -> tuple[Code | None, str]:
        if endpoint.kind is EndpointKind.LOCAL:
            return await self._infer(endpoint.assignment)
        if endpoint.region:
            code = await self.network.other_regions.infer(self, endpoint)
            if code is None:
                self.world.record("request.crossed", region=endpoint.region, agreement=endpoint.agreement)
            return code, endpoint.assignment
        place = HostPort.parse(endpoint.address).host
        there = self.network.transit(self.name, place)
        peer = self.network.machines.get(place)
        if there is None or peer is None:
            await asyncio.sleep(0.5)
            return Code.REPLICA_UNREACHABLE, ""
        await asyncio.sleep(there)
        answer = await peer.request(workload, forwarded=True)
        back = self.network.transit(place, self.name)
        if back is None:
            await asyncio.sleep(0.5)
            return Code.REPLICA_UNREACHABLE, ""
        await asyncio.sleep(back)
        return answer

    async def _infer(self, assignment: str) -> tuple[Code | None, str]:
        worker = self.workers.get(assignment)
        if worker is None or worker.ready is None:
            return Code.REPLICA_UNREACHABLE, ""
        behaviour = self.models[worker.assignment.model]
        worker.in_flight += 1
        serve_s = self.rng.uniform(0.5, 1.5) * behaviour.serve_s * self.slowdown
        await asyncio.sleep(serve_s)
        worker.in_flight -= 1
        if not worker.alive:
            worker.errors += 1
            return Code.WORKER_CRASHED, ""
        if self.rng.happens(behaviour.crash_at_request):
            self.kill_worker(assignment, own_fault=True, why="crashed at a request")
            return Code.WORKER_CRASHED, ""
        worker.requests += 1
        worker.latencies.add(serve_s)
        self.world.record("request.answered", node=self.name, assignment=assignment)
        return None, assignment


def _unchanged_reading(reading: Reading) -> Reading:
    return reading


class SimDeviceDriver:
    """Implements the Driver port over the machine's chips."""

    def __init__(self, process: SimProcess, machine: SimMachine) -> None:
        self._process = process
        self._machine = machine

    def discover(self) -> tuple[Device, ...]:
        """All devices on the bus, whether or not they answer now."""
        self._process.check()
        return tuple(each.device for each in self._machine.chips.values())

    def read(self, device: str) -> Reading:
        self._process.check()
        machine = self._machine
        if device in machine.lost_devices or device not in machine.chips:
            raise refuse(Code.DEVICE_LOST, f"{device} does not answer", "a device", "check its driver")
        total = machine.chips[device].device.memory_bytes
        reading = Reading(
            device=device,
            free_bytes=Bytes(max(0, total - machine.used_bytes(device))),
            utilisation=0.1,
            temperature_c=45.0,
            power_w=Watts(10.0),
            energy_j=machine.world.now() * 10.0,
            taken_at=machine.clock.wall(),
            power=machine.power(device) if machine.chips[device].device.rest is not None else None,
        )
        return machine.alter_reading(reading)

    def access(self, device: str) -> DeviceAccess:
        return DeviceAccess()

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        self._process.check()
        return Seconds(self._machine.set_sleep(device, asleep))


class SimWorkerPool:
    """Implements the Workers port."""

    def __init__(self, process: SimProcess, machine: SimMachine) -> None:
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

    async def start(self, assignment: Assignment, path: str, samples: str = "") -> None:
        self._process.gate(f"start {assignment.id}")
        machine = self._machine
        machine.world.record(
            "worker.start",
            node=machine.name,
            assignment=assignment.id,
            workload=str(assignment.workload),
            model=assignment.model,
            device=assignment.device,
        )
        if assignment.id in machine.workers:
            machine.world.fail(f"{assignment.id} is started twice on {machine.name}")
            return
        machine.require_awake(assignment.device, f"{assignment.id} is started")
        process = SimProcess(machine.world, f"worker-{machine.name}-{assignment.id}")
        worker = SimWorker(process, assignment)
        machine.workers[assignment.id] = worker
        process.spawn(self._load(worker), "load")
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
        if worker is None:
            return None
        return LocalWorker(assignment, worker.assignment.workload, f"/run/{assignment}.sock", "nonce")

    async def record_verdict(self, assignment: str, verdict: Verdict) -> None:
        self._process.gate(f"judged {assignment}")
        worker = self._machine.workers.get(assignment)
        if worker is not None:
            worker.verdict = verdict

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


def _answer_signature(machine: SimMachine, worker: SimWorker) -> str:
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


class SimFrontControl:
    """Implements the Front port: how the supervisor controls the machine's front."""

    def __init__(self, process: SimProcess, machine: SimMachine) -> None:
        self._process = process
        self._machine = machine
        self.is_adopted = machine.front.alive

    async def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...] = (),
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        verification_sources: tuple[VerificationSource, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
    ) -> None:
        self._process.gate("configure front")
        await asyncio.sleep(0.001)
        self._process.check()
        machine = self._machine
        front = machine.front
        front.routes = {route.workload: route for route in routes}
        front.workers = {worker.assignment: worker for worker in workers}
        front.verification_sources = {witness.assignment: witness for witness in verification_sources}
        front.peers = {peer.region: peer for peer in peers}
        agreements = {front.agreement_of(route.workload) for route in routes} - {""}
        out = agreements | {local_traffic_key(agreement) for agreement in agreements}
        front.agreement_counters = {key: count for key, count in front.agreement_counters.items() if key[0] in out}
        front.alive = True
        machine.world.record(
            "front.configured",
            node=machine.name,
            workers=tuple(worker.assignment for worker in workers),
            routes=tuple(
                (
                    str(route.workload),
                    route.generation,
                    tuple((each.assignment, each.node, str(each.state), each.weight) for each in route.endpoints),
                )
                for route in routes
            ),
        )
        self._process.gate("configured front")

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Compare as many answers with the source's front as there are samples; each exchange may be lost."""
        machine = self._machine
        target = machine.workers.get(worker.assignment)
        expected = ""
        for _ in range(asked.samples):
            self._process.check()
            if target is None or not target.alive or not machine.front.alive:
                raise refuse(Code.REPLICA_UNREACHABLE, "the new replica is gone", "its answer", "it is loaded again")
            await asyncio.sleep(machine.models[target.assignment.model].serve_s)
            if asked.against is Against.SOURCE:
                source = self._answer_from_region if asked.agreement else self._answer_from_source
                expected = await source(asked)
        self._process.gate("verified")
        passed = target is not None and expected in ("", _answer_signature(machine, target))
        machine.world.record(
            "verified", node=machine.name, assignment=worker.assignment, migration=asked.migration, passed=passed
        )
        code, reason = (None, "") if passed else (Code.VERIFY_FAILED, "y: max_rel 1, at most 0.001")
        drift = Drift("y", Metric.MAX_REL, 1e-3, 0.0 if passed else 1.0, passed)
        used = InputsFrom.GENERATED
        return Verdict(asked.migration, passed, code, reason, asked.against, used, asked.samples, (drift,))

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> ReferenceRecording:
        raise NotImplementedError("no scenario verifies against a reference")

    async def _answer_from_region(self, asked: Verification) -> str:
        """The other region's answer to one input, through a gateway. Raises ShoalError."""
        peer, back = await self._reach_source(asked)
        leads = (each for route in peer.front.routes.values() for each in route.endpoints)
        out = next((each for each in leads if each.agreement == asked.agreement), None)
        if not peer.front.alive or out is None:
            raise refuse(Code.MODEL_NOT_READY, f"{peer.name} leads to no {asked.agreement}", "a way there", "retry")
        began = peer.world.now()
        code = await peer.network.other_regions.infer(peer, out)
        peer.front.count_agreement_request(
            out.agreement, out.region, peer.world.now() - began if code is None else None
        )
        await asyncio.sleep(back)
        if code is not None:
            raise refuse(code, f"{out.region} does not answer", "an answer", "retry")
        return peer.network.other_regions.answer_signature(out.region)

    async def _reach_source(self, asked: Verification) -> tuple[SimMachine, float]:
        """(the machine that answers for the source, once the request has arrived; seconds for the way back). Raises
        ShoalError(REPLICA_UNREACHABLE)."""
        machine = self._machine
        place = HostPort.parse(asked.source_address).host
        peer = machine.network.machines.get(place)
        there = machine.network.transit(machine.name, place)
        back = machine.network.transit(place, machine.name)
        if peer is None or there is None or back is None:
            await asyncio.sleep(0.5)
            raise refuse(Code.REPLICA_UNREACHABLE, f"{place} does not answer", "an answer", "retry")
        await asyncio.sleep(there)
        return peer, back

    async def _answer_from_source(self, asked: Verification) -> str:
        """The source's answer to one input. Raises ShoalError."""
        machine = self._machine
        peer, back = await self._reach_source(asked)
        witness = peer.front.verification_sources.get(asked.source)
        source = peer.workers.get(asked.source)
        if not peer.front.alive or source is None or source.ready is None:
            raise refuse(Code.MODEL_NOT_READY, f"{asked.source} has no worker there", "a ready replica", "retry")
        named = Verifier(asked.migration, machine.identity)
        if witness is None or named not in witness.verifiers:
            raise refuse(Code.ROLE_DENIED, f"{machine.identity}, which no move names", "a verifier", "retry")
        await asyncio.sleep(peer.models[source.assignment.model].serve_s + back)
        if not source.alive:
            raise refuse(Code.WORKER_CRASHED, f"{asked.source} ended", "an answer", "retry")
        return _answer_signature(peer, source)

    async def lease(self, seconds: Seconds, claim: str) -> None:
        self._process.gate("lease front")
        self._machine.world.record("front.leased", node=self._machine.name, seconds=seconds)

    async def stats(self) -> FrontStats:
        self._process.gate("front stats")
        machine = self._machine
        in_flight = tuple((name, worker.in_flight) for name, worker in sorted(machine.workers.items()))
        crossings = tuple(count.to_report(*key) for key, count in machine.front.agreement_counters.items())
        return FrontStats(machine.front.alive, tuple(machine.front.counts.values()), in_flight, crossings)

    async def close(self, *, keep: bool) -> None:
        self._process.gate("close front")
        if not keep:
            self._machine.front = SimFront()
