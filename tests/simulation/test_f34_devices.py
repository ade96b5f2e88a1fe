"""F34: a device vanishes, resets, or answers nothing for a while, in virtual time. That assignment alone moves."""

import asyncio
from collections.abc import Callable

from simulation.scene import Scene, run_scenario

from harness.report import record
from shoal.simulator.parts.machine import SimMachine

RUNS = 6
ERRING_RUNS = 3
"""Nothing fails over, so each serves for the whole time, which takes longest to simulate."""
DETECTED_S = 2.0
Loss = Callable[[SimMachine], None]


def vanishes(machine: SimMachine) -> None:
    """It takes its worker with it."""
    for name in sorted(machine.workers):
        machine.kill_worker(name, own_fault=False, why="its device is gone")


def errs(machine: SimMachine) -> None:
    """Its driver answers with errors; what runs on it is as it was."""


async def lose_device(scene: Scene, machine: SimMachine, loss: Loss) -> str:
    """The device answers no more from now on; its name."""
    (device,) = machine.chips
    machine.lost_devices.add(device)
    scene.world.record("fault.device", node=machine.name, device=device)
    loss(machine)
    return device


def test_f34_a_device_that_vanishes_loses_its_own_assignment_alone() -> None:
    """Of two replicas one moves on: told within 2 s, no request lost, the other's worker untouched; the device takes
    nothing before it was measured again."""
    worst = 0.0
    sent = 0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        victim, other = scene.replicas
        kept = dict(other.workers)
        async with scene.load():
            at = scene.world.now()
            device = await lose_device(scene, victim, vanishes)
            await scene.until(lambda: not is_routed(scene, victim), 10.0, "routes to leave it")
            worst = max(worst, scene.world.now() - at)
            spare = next(each for each in scene.cluster.machines if each.chips and each not in (victim, other))
            await scene.until(lambda: scene.ready(spare), 30.0, "the replacement")
            assert other.workers == kept, "the very same process"
            measured = receipt_at(scene, victim, device)
            victim.lost_devices.discard(device)
            back_at = scene.world.now()
            await scene.until(lambda: receipt_at(scene, victim, device) > measured, 20.0, "a new receipt")
            assert workers_started(scene, victim, device, back_at) == [], "void until measured again"
            await scene.wait_whole(30.0)
        assert "DEVICE_LOST" in scene.codes

    for seed in range(RUNS):
        scene = run_scenario(seed, 2, scenario, agents=3)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:3]}"
        sent += len(scene.answers)
    assert worst <= DETECTED_S
    record("F34", "S", RUNS, fault="vanishes with its worker", detected_worst_s=round(worst, 2), sent=sent, lost=0)


def test_f34_a_driver_that_errs_stops_nothing_that_runs() -> None:
    """It is told, nothing new comes to it, and what answers goes on (I10)."""
    sent = 0

    async def scenario(scene: Scene) -> None:
        (victim,) = scene.replicas
        kept = dict(victim.workers)
        async with scene.load(0.05):
            device = await lose_device(scene, victim, errs)
            await asyncio.sleep(DETECTED_S)
            assert scene.cluster.region is not None
            assert device not in scene.cluster.region.fleet.fleet.nodes[victim.name].readings
            await asyncio.sleep(10.0)
            assert victim.workers == kept, "the very same process"
            victim.lost_devices.discard(device)
            await scene.wait_whole(30.0)
        assert "DEVICE_LOST" in scene.codes
        assert scene.starts() == 1

    for seed in range(ERRING_RUNS):
        scene = run_scenario(seed, 1, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:3]}"
        sent += len(scene.answers)
    record("F34", "S", ERRING_RUNS, fault="its driver errs for 12 s", sent=sent, lost=0)


def test_f34_a_device_that_is_away_for_long_is_told_of_once() -> None:
    """Not at every attempt to load there; and again the next time."""

    async def scenario(scene: Scene) -> None:
        (victim,) = scene.replicas
        for times in (1, 2):
            device = await lose_device(scene, victim, vanishes)
            await asyncio.sleep(60.0)
            assert scene.cluster.region is not None
            events = await scene.cluster.region.events.events_after(0, 1000)
            told = [each.message for each in events if each.code == "DEVICE_LOST"]
            assert 2 * times <= len(told) <= 3 * times, told  # of the device, and of what was to load there
            victim.lost_devices.discard(device)
            await scene.wait_whole(60.0)

    for seed in range(RUNS):
        run_scenario(seed, 1, scenario, agents=1)


def test_f34_a_device_that_resets_loads_again_where_it_is_or_elsewhere() -> None:
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        (victim,) = scene.replicas
        device = await lose_device(scene, victim, vanishes)
        scene.world.call_later(0.4, lambda: victim.lost_devices.discard(device))
        worst = max(worst, await scene.wait_whole(60.0))

    for seed in range(RUNS):
        run_scenario(seed, 1, scenario)
    record("F34", "S", RUNS, fault="resets", whole_worst_s=round(worst, 2))


def is_routed(scene: Scene, machine: SimMachine) -> bool:
    """Whether the gateway sends anything there."""
    front = scene.cluster.network.machines["gateway"].front
    return any(
        each.node == machine.name and each.weight > 0 for route in front.routes.values() for each in route.endpoints
    )


def receipt_at(scene: Scene, machine: SimMachine, device: str) -> float:
    region = scene.cluster.region
    assert region is not None
    receipt = region.fleet.fleet.nodes[machine.name].receipts.get(device)
    return receipt.measured_at if receipt is not None else 0.0


def workers_started(scene: Scene, machine: SimMachine, device: str, since: float) -> list[str]:
    """Workers that were started on it from then on until now."""
    return [
        event.facts["assignment"]
        for event in scene.world.history.events
        if event.kind == "worker.start"
        and event.at >= since
        and (event.facts["node"], event.facts["device"]) == (machine.name, device)
    ]
