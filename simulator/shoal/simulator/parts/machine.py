"""One machine of the region: its modelled devices, and its workers and front as processes of their own."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.ports import WorkerEvent, WorkerExited
from shoal.simulator.parts.front import SimFront
from shoal.simulator.parts.hardware import Behaviour, Chip
from shoal.simulator.parts.network import SimNetwork
from shoal.simulator.parts.workers import PING_EVERY_S, RunOutcome, SimWorker
from shoal.simulator.world.disk import SimDisk
from shoal.simulator.world.world import SimClock, SimProcess, SimWorld
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.device import PowerState, Reading, Role

USUAL_LIMITS: Final = AdmissionLimits()


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
        limits: AdmissionLimits = USUAL_LIMITS,
    ) -> None:
        """identity: the name that its agent reports; its own name unless it is a duplicate. limits: of its front."""
        self.world = world
        self.network = network
        self.name = name
        self.identity = identity or name
        self.role = role
        self.chips = {each.device.name: each for each in chips}
        self.models = models
        self.limits = limits
        self.rng = world.rng.stream(f"machine/{name}")
        self.request_rng = world.rng.stream(f"requests/{name}")
        """What requests draw: it leaves other draws unchanged."""
        self.clock = SimClock(world, booted_at=self.rng.uniform(1.0, 1e5))
        self.disk = SimDisk(world, name)
        self.cached_models: dict[str, bool] = {}
        self.workers: dict[str, SimWorker] = {}
        self.front = SimFront(self)
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
        self.own_crashes: Counter[str] = Counter()
        """Model -> workers that ended by their own fault."""
        self.boots = 0
        self.has_power = True
        self.wakes: asyncio.Queue[str] = asyncio.Queue()
        """Assignments that requests at the front wait for; its supervisor takes them."""
        self._requests = itertools.count(1)
        self._worker_numbers = itertools.count(1)

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

    def is_unloaded(self, assignment: str) -> bool:
        """Whether its front holds requests for it until it is loaded."""
        return any(each.assignment == assignment and each.failure is None for each in self.unloaded_replicas)

    @property
    def unloaded_replicas(self) -> tuple[UnloadedReplica, ...]:
        """Its replicas without a worker that its front knows of."""
        return () if self.front.serving is None else self.front.serving.unloaded

    def new_worker(self, assignment: Assignment) -> SimWorker:
        """A worker process that has loaded nothing yet."""
        process = SimProcess(self.world, f"worker-{self.name}-{assignment.id}-{next(self._worker_numbers)}")
        worker = SimWorker(process, assignment, self.chips[assignment.device].device.parallelism)
        self.workers[assignment.id] = worker
        return worker

    def pause_worker(self, assignment: str, seconds: float) -> None:
        """Stop the worker process for a while; its connections stay."""
        self.world.record("fault.stopped", node=self.name, assignment=assignment, seconds=seconds)
        self.workers[assignment].pause(seconds, self.request_rng.uniform(0.0, PING_EVERY_S))

    def kill_worker(self, assignment: str, *, own_fault: bool, why: str, at_load: bool = False) -> None:
        """End the worker process; the supervisor sees its exit."""
        worker = self.workers.pop(assignment, None)
        if worker is None:
            return
        worker.process.die()
        self.own_crashes[worker.assignment.model] += own_fault
        self.world.record(
            "worker.died", node=self.name, assignment=assignment, model=worker.assignment.model, own=own_fault, why=why
        )
        code = Code.WORKER_CRASHED if own_fault else Code.WORKER_KILLED
        refusal = Refusal(code, why, "a running worker", "it is started again by itself")
        self.emit(WorkerExited(assignment, own_fault, refusal, at_load))

    def kill_front(self) -> None:
        """Kill the front; it restarts at once with its last configuration."""
        if self.front.alive:
            dead = self.front
            dead.stop()
            self.world.call_later(self.rng.uniform(0.02, 0.2), lambda: self._restart_front(dead))

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
        self.front.stop()
        self.front = SimFront(self)
        self.awake_at.clear()
        self.probing.clear()
        lost = self.disk.power_cut()
        self.world.record("fault.power", node=self.name, lost=lost)

    def _restart_front(self, dead: SimFront) -> None:
        """Start a front in the place of `dead`. Its supervisor gives it the last configuration; without a supervisor it
        waits for the next one's."""
        if self.front is not dead:
            return
        self.front = SimFront(self)
        if self.supervisor is not None and self.supervisor.alive and dead.serving is not None:
            self.front.configure(dead.serving)

    def next_request(self) -> str:
        """A name for the next request at its front."""
        return f"{self.name}/{next(self._requests)}"

    def run_request(self, assignment: str, content: bytes) -> "asyncio.Future[RunOutcome] | None":
        """Run a request on a worker: why it was not answered, or None when it was. None instead of the future: there is
        no such worker."""
        worker = self.workers.get(assignment)
        if worker is None or worker.ready is None or not worker.alive:
            return None
        rng, behaviour = self.request_rng, self.models[worker.assignment.model]
        serve_s = rng.uniform(0.5, 1.5) * behaviour.serve_s * self.slowdown
        crashes = content.startswith(behaviour.poison) or rng.happens(behaviour.crash_at_request)

        def end_run() -> RunOutcome:
            if crashes:
                self.world.record("request.crashed", node=self.name, assignment=assignment, content=content)
                self.kill_worker(assignment, own_fault=True, why="crashed at a request")
                return Code.WORKER_CRASHED
            worker.requests += 1
            worker.latencies.add(serve_s)
            self.world.record("request.answered", node=self.name, assignment=assignment)
            return None

        return worker.submit(serve_s, end_run, rng.uniform(0.0, PING_EVERY_S))


def _unchanged_reading(reading: Reading) -> Reading:
    return reading
