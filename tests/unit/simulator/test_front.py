"""The simulated front: the agent's own routing over modelled workers, connections and time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from harness.builders.agent_values import assignment
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.ports import WorkerReady
from shoal.simulator.parts.front import FrontServing
from shoal.simulator.parts.hardware import Behaviour, chip
from shoal.simulator.parts.machine import USUAL_LIMITS, SimMachine
from shoal.simulator.parts.network import SimNetwork
from shoal.simulator.parts.upstream import SILENT_S
from shoal.simulator.parts.workers import SILENT_S as WORKER_SILENT_S
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimWorld
from shoal.types.assignment import Measured
from shoal.types.codes import Code
from shoal.types.device import EnergySource, Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Joules, Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("shop", "text")
MODEL = "m"
SERVE_S = 0.02


@dataclass
class Fronts:
    """A gateway and two machines, `one` and `two`, with a replica each: `a-one` and `a-two`."""

    world: SimWorld
    network: SimNetwork
    limits: AdmissionLimits
    runners: int

    def __post_init__(self) -> None:
        models = {MODEL: Behaviour(serve_s=SERVE_S)}
        for name in ("gateway", "one", "two"):
            chips = () if name == "gateway" else (chip("cpu0", 1e11, 2**30, runners=self.runners),)
            role = Role.GATEWAY if name == "gateway" else Role.AGENT
            machine = SimMachine(self.world, self.network, name, role, chips, models, limits=self.limits)
            self.network.machines[name] = machine
        for name in ("one", "two"):
            self.start_worker(name)
        self.configure("gateway", "one", "two")

    def machine(self, name: str) -> SimMachine:
        return self.network.machines[name]

    def start_worker(self, name: str) -> None:
        """A new worker process at that machine, and its front knows of it."""
        machine = self.machine(name)
        worker = machine.new_worker(assignment(f"a-{name}", workload=KEY, model=MODEL, device="cpu0"))
        worker.ready = WorkerReady(f"a-{name}", MEASURED, (), ())
        self.configure(name, name)

    def configure(self, front: str, *replicas: str) -> None:
        """That front's route is to the replicas of these machines."""
        machine = self.machine(front)
        endpoints = tuple(endpoint(name, is_local=name == front) for name in replicas)
        workers = tuple(worker.local() for worker in machine.workers.values())
        machine.front.configure(FrontServing((Route(KEY, 1, endpoints),), workers))

    async def ask(self, content: bytes = b"x", timeout_s: float = 10.0, front: str = "gateway") -> Code | None:
        code, _ = await self.machine(front).front.request(KEY, content, timeout_s=Seconds(timeout_s))
        return code

    async def ask_many(self, count: int, timeout_s: float = 10.0) -> list[Code | None]:
        return list(
            await asyncio.gather(*(self.ask(f"{number}".encode(), timeout_s) for number in range(count)))
        )  # fmt: skip

    async def until_in_flight(self, name: str, count: int) -> None:
        """Wait until so many requests are in the worker of that machine."""
        while self.machine(name).workers[f"a-{name}"].in_flight < count:
            assert self.world.now() < 60.0
            await asyncio.sleep(0.001)

    def destinations(self, front: str = "gateway") -> list[str]:
        """Replicas that the front sent to, in order."""
        return [
            event.facts["to"]
            for event in self.world.history.events
            if event.kind == "request.sent" and event.facts["front"] == front
        ]


MEASURED = Measured(
    load_s=Seconds(0.1),
    memory_bytes=Bytes(1),
    latency_p50_s=Seconds(SERVE_S),
    latency_p95_s=Seconds(SERVE_S),
    joules=Joules(1.0),
    energy_source=EnergySource.PROFILE,
    samples=1,
)


def endpoint(name: str, *, is_local: bool = False) -> Endpoint:
    kind = EndpointKind.LOCAL if is_local else EndpointKind.AGENT
    address = "" if is_local else f"{name}:8001"
    return Endpoint(f"a-{name}", name, kind, address, 1.0, EndpointState.READY)


def play(
    scenario: Callable[[Fronts], Awaitable[None]], *, limits: AdmissionLimits = USUAL_LIMITS, runners: int = 4
) -> SimWorld:
    worlds = list[SimWorld]()

    async def whole(loop: VirtualLoop) -> None:
        world = SimWorld(loop, 1)
        worlds.append(world)
        await scenario(Fronts(world, SimNetwork(world), limits, runners))

    run(whole)
    assert worlds[0].failures == []
    return worlds[0]


def test_requests_are_answered_by_both_replicas() -> None:
    async def scenario(fronts: Fronts) -> None:
        assert await fronts.ask_many(30) == [None] * 30
        assert set(fronts.destinations()) == {"a-one", "a-two"}
        assert await fronts.ask(front="one") is None
        assert fronts.destinations("one")[-1] == "a-one"

    play(scenario)


def test_a_killed_worker_costs_an_attempt_and_is_avoided_until_it_answers() -> None:
    async def scenario(fronts: Fronts) -> None:
        one = fronts.machine("one")
        asked = asyncio.ensure_future(fronts.ask_many(20))
        await fronts.until_in_flight("one", 2)
        one.kill_worker("a-one", own_fault=False, why="test")
        assert await asked == [None] * 20
        router = fronts.machine("gateway").front.router
        assert router.ejected_count(fronts.machine("gateway").clock.now()) == 1
        before = len(fronts.destinations())
        await fronts.ask_many(5)
        assert fronts.destinations()[before:] == ["a-two"] * 5
        fronts.start_worker("one")
        await asyncio.sleep(11.0)
        before = len(fronts.destinations())
        for _ in range(20):
            assert await fronts.ask() is None
        assert "a-one" in fronts.destinations()[before:]

    play(scenario)


def test_a_replica_that_cannot_be_reached_is_given_up_and_its_connection_opened_anew() -> None:
    async def scenario(fronts: Fronts) -> None:
        await fronts.ask_many(10)
        path = fronts.network.path("gateway", "one")
        path.cut = True
        began = fronts.world.now()
        assert await fronts.ask_many(4) == [None] * 4
        assert SILENT_S < fronts.world.now() - began < 2 * SILENT_S
        began = fronts.world.now()
        assert await fronts.ask_many(4) == [None] * 4
        assert fronts.world.now() - began < SILENT_S, "nobody waits for it any more"
        path.cut = False
        await asyncio.sleep(11.0)
        before = len(fronts.destinations())
        for _ in range(20):
            assert await fronts.ask() is None
        assert "a-one" in fronts.destinations()[before:]

    play(scenario)


def test_the_only_replica_is_asked_though_it_failed() -> None:
    async def scenario(fronts: Fronts) -> None:
        fronts.configure("gateway", "one")
        fronts.machine("one").kill_worker("a-one", own_fault=False, why="test")
        fronts.configure("one", "one")
        for _ in range(3):
            assert await fronts.ask() is Code.MODEL_NOT_READY
        assert fronts.destinations() == ["a-one"] * 3

    play(scenario)


def test_a_stopped_worker_answers_no_ping() -> None:
    async def scenario(fronts: Fronts) -> None:
        fronts.configure("gateway", "one", "two")
        fronts.machine("one").pause_worker("a-one", 30.0)
        began = fronts.world.now()
        assert await fronts.ask_many(10) == [None] * 10
        assert fronts.world.now() - began > WORKER_SILENT_S

    play(scenario)


def test_a_request_ends_at_its_deadline() -> None:
    async def scenario(fronts: Fronts) -> None:
        for name in ("one", "two"):
            fronts.machine(name).slowdown = 1000.0
        began = fronts.world.now()
        assert await fronts.ask(timeout_s=0.5) is Code.DEADLINE_EXCEEDED
        assert abs(fronts.world.now() - began - 0.5) < 1e-3
        in_flight = [inside for _, inside in fronts.machine("one").front.router.outstanding()]
        assert in_flight == [0], "it is withdrawn where it was forwarded to"

    play(scenario)


def test_a_front_lets_in_as_many_as_may_wait() -> None:
    async def scenario(fronts: Fronts) -> None:
        answers = await fronts.ask_many(50)
        assert set(answers) == {None, Code.OVERLOADED}
        assert await fronts.ask() is None

    play(scenario, limits=AdmissionLimits(per_replica=5, per_way=5), runners=1)


def test_workers_run_as_many_at_a_time_as_their_device_can() -> None:
    async def seconds_of(fronts: Fronts) -> float:
        fronts.configure("gateway", "one")
        began = fronts.world.now()
        assert await fronts.ask_many(40) == [None] * 40
        return fronts.world.now() - began

    took = dict[int, float]()
    for runners in (1, 8):

        async def scenario(fronts: Fronts, runners: int = runners) -> None:
            took[runners] = await seconds_of(fronts)

        play(scenario, runners=runners)
    assert took[1] > 4 * took[8]


def test_a_request_that_ends_two_workers_is_refused() -> None:
    async def scenario(fronts: Fronts) -> None:
        assert await fronts.ask(b"poison") is Code.REQUEST_CRASHED_WORKER
        for name in ("one", "two"):
            assert not fronts.machine(name).workers
            fronts.start_worker(name)
        assert await fronts.ask(b"poison") is Code.REQUEST_CRASHED_WORKER
        assert await fronts.ask(b"another") is None

    world = play(scenario)
    assert sum(event.kind == "request.crashed" for event in world.history.events) == 2


def test_suspected_requests_run_one_at_a_time_on_a_replica() -> None:
    """All that were in flight at a crash are suspects; alone, none of them is to blame."""

    async def scenario(fronts: Fronts) -> None:
        fronts.configure("gateway", "one", "two")
        one, two = fronts.machine("one"), fronts.machine("two")
        asked = asyncio.ensure_future(fronts.ask_many(16))
        await fronts.until_in_flight("one", 4)
        one.kill_worker("a-one", own_fault=True, why="test")
        began = fronts.world.now()
        most = 0
        while not asked.done():
            most = max(most, two.workers["a-two"].in_flight if fronts.world.now() > began + 0.05 else 0)
            await asyncio.sleep(0.001)
        assert await asked == [None] * 16
        assert most == 1

    play(scenario, runners=8)


def test_what_is_inside_ends_with_its_front() -> None:
    async def scenario(fronts: Fronts) -> None:
        asked = asyncio.ensure_future(fronts.ask_many(4))
        await asyncio.sleep(0.001)
        gateway = fronts.machine("gateway")
        first = gateway.front
        gateway.kill_front()
        assert await asked == [Code.REPLICA_UNREACHABLE] * 4
        assert await fronts.ask() is Code.REPLICA_UNREACHABLE
        await asyncio.sleep(1.0)
        assert gateway.front is not first
        assert not gateway.front.alive, "nobody tells it what to serve"
        fronts.configure("gateway", "one")
        assert await fronts.ask() is None

    play(scenario)
