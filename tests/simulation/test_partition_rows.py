"""Rows of the fault table about links and clocks: what a region does when its members lose sight of each other, or of
the time. One fault at a time, in virtual time.
"""

import asyncio
from collections import Counter

import pytest
from simulation.scene import GATEWAY, GIVEN_UP, Scene, cut, isolate, run_scenario

from harness.report import record
from shoal.simulator.parts.network import COORDINATOR
from shoal.types.route import EndpointState
from shoal.types.workload import PartitionRule

RUNS = 6
HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
RULE = PartitionRule()
SUSPECT_AFTER_S = 3 * RULE.heartbeat_s
RETURNS = 6
BACK_S = 0.5
"""Times 0, 1 or 2: how long another has served when a node is back."""


async def changes_of(scene: Scene, node: str) -> list[str]:
    """What was said of this node's liveness, in order."""
    assert scene.cluster.region is not None
    words = {"NODE_READY", "NODE_SUSPECT", "NODE_LOST"}
    told = await scene.cluster.region.events.events_after(0, 10_000)
    return [str(event.code) for event in told if event.code in words and event.subject == node]


def test_f20_cut_off_for_an_hour_the_island_serves_and_one_replica_stays() -> None:
    sent = 0
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        island = scene.replicas[0].name
        async with scene.load(every_s=0.5, front=island):
            isolate(scene, island)
            await asyncio.sleep(HOUR_S)
            assert len(scene.replicas) == 2, "it is replaced meanwhile"
            isolate(scene, island, on=False)
            worst = max(worst, await scene.wait_whole(60.0))
        assert len(scene.replicas) == 1

    for seed in range(2):
        scene = run_scenario(seed, 1, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:5]}"
        assert scene.starts() == 2, "one replacement, and nothing is restarted"
        sent += len(scene.answers)
    record("F20", "S", 2, cut_off_s=HOUR_S, sent_at_the_island=sent, lost=0, one_again_after_s=round(worst, 1))


@pytest.mark.parametrize("standby", ["none", "warm"])
def test_f20_what_serves_when_a_node_is_back_goes_on(standby: str) -> None:
    """It is back some time after another took over, early ones before every front knows of that. All nodes are equal,
    but for what each measures."""
    moves = list[int]()

    async def scenario(scene: Scene) -> None:
        seen = list[str]()

        async def watch(seconds: float) -> None:
            until = scene.world.now() + seconds
            while scene.world.now() < until:
                alone = who_serves(scene)
                if len(alone) == 1 and seen[-1:] != alone:
                    seen.extend(alone)
                await asyncio.sleep(0.05)

        async with scene.load(every_s=0.05):
            await watch(1.0)
            (old,) = who_serves(scene)
            isolate(scene, old)
            while who_serves(scene) in ([], [old]):
                await watch(0.05)
            await watch(BACK_S * (len(moves) % 3))
            (new,) = who_serves(scene)
            isolate(scene, old, on=False)
            await watch(20.0)
            await scene.wait_whole(20.0)
            assert who_serves(scene) == [new]
        assert seen == [old, new]
        moves.append(len(seen) - 1)

    for seed in range(RETURNS):
        run_scenario(seed, 1, scenario, agents=3, standby=standby)
    record("F20", "S", RETURNS, case="back while another serves", standby=standby, moves_of_traffic=max(moves))


def who_serves(scene: Scene) -> list[str]:
    """Nodes whose replicas the gateway sends to."""
    assert scene.cluster.region is not None
    routes = scene.cluster.region.workloads.desired[GATEWAY].routes
    return [each.node for route in routes for each in route.endpoints if each.state is EndpointState.READY]


@pytest.mark.parametrize("seeing", ["agent", "coordinator"])
def test_f22_one_way_partition_changes_a_node_once(seeing: str) -> None:
    """Only the agent hears the coordinator, or only the coordinator hears the agent."""

    async def scenario(scene: Scene) -> None:
        node = scene.replicas[0].name
        ends = (node, COORDINATOR) if seeing == "agent" else (COORDINATOR, node)
        async with scene.load(every_s=0.05):
            before = await changes_of(scene, node)
            cut(scene, *ends)
            await asyncio.sleep(120.0)
            cut(scene, *ends, on=False)
            await scene.wait_whole(60.0)
            changes = (await changes_of(scene, node))[len(before) :]
        assert changes in ([], ["NODE_SUSPECT", "NODE_LOST", "NODE_READY"], ["NODE_SUSPECT", "NODE_READY"]), changes

    for seed in range(RUNS):
        scene = run_scenario(seed, 2, scenario, agents=3)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:5]}"
        assert scene.starts() <= 3, "at most one replacement a fault"
    record("F22", "S", RUNS, way=f"{seeing} hears", replacements_at_most=1, lost=0)


def test_f22_two_members_that_do_not_see_each_other_are_no_ones_loss() -> None:
    async def scenario(scene: Scene) -> None:
        node = scene.replicas[0].name
        async with scene.load(every_s=0.05):
            before = await changes_of(scene, node)
            for ends in ((node, GATEWAY), (GATEWAY, node)):
                cut(scene, *ends)
            await asyncio.sleep(30.0)
            for ends in ((node, GATEWAY), (GATEWAY, node)):
                cut(scene, *ends, on=False)
            await scene.wait_whole(20.0)
            assert await changes_of(scene, node) == before

    for seed in range(RUNS):
        scene = run_scenario(seed, 2, scenario, agents=3)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:5]}"
        assert scene.starts() == 2, "both see the coordinator: nothing is replaced"
    record("F22", "S", RUNS, way="partial mesh", replacements=0, lost=0)


def test_f23_loss_duplication_reordering_and_delay_on_every_link() -> None:
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        for path in scene.cluster.network.paths():
            path.loss, path.duplicate, path.late, path.delay_s = 0.3, 0.5, 0.1, 0.5
        await asyncio.sleep(60.0)
        scene.cluster.reset_paths()
        worst = max(worst, await scene.wait_whole(10.0))

    for seed in range(RUNS):
        run_scenario(seed, 2, scenario, agents=4, datagrams=True)
    record("F23", "S", RUNS, loss=0.3, duplication=0.5, delay_mean_s=0.5, delay_late_s=5.0, converged_s=round(worst, 1))


def test_f25_a_false_mass_silence_replaces_nothing() -> None:
    """The coordinator's own uplink: it hears half of the region no more, and they serve on."""

    async def scenario(scene: Scene) -> None:
        silent = [machine.name for machine in scene.replicas[:3]]
        async with scene.load(every_s=0.05):
            await asyncio.sleep(RULE.lost_after_s)  # until the coordinator has watched for a window
            for name in silent:
                cut(scene, name, COORDINATOR)
            await asyncio.sleep(RULE.lost_after_s)
            for name in silent:
                cut(scene, name, COORDINATOR, on=False)
            await scene.wait_whole(30.0)

    for seed in range(RUNS):
        scene = run_scenario(seed, 4, scenario, agents=6)
        assert "MASS_SILENCE" in scene.codes
        assert scene.starts() == 4, "nothing is replaced without need"
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:5]}"
    record("F25", "S", RUNS, fault="the observer's", silent_s=RULE.lost_after_s, needless_replacements=0, lost=0)


def test_f25_a_real_mass_loss_is_made_good() -> None:
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        dead = scene.replicas
        for machine in dead:
            scene.cluster.cut_power(machine)
        began = scene.world.now()
        rest = [machine for machine in scene.cluster.machines if machine not in dead]
        await scene.until(lambda: sum(bool(machine.workers) for machine in rest) == 3, 30.0, "replacements")
        await scene.until(lambda: sum(scene.ready(machine) for machine in rest) == 3, 30.0, "their readiness")
        worst = max(worst, scene.world.now() - began)
        scene.codes = await scene.event_codes()

    for seed in range(RUNS):
        scene = run_scenario(seed, 3, scenario, agents=6)
        assert "MASS_SILENCE" in scene.codes
    assert worst <= 30.0
    record("F25", "S", RUNS, fault="three nodes lost", replaced_within_s=round(worst, 1))


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S, YEAR_S, -YEAR_S])
def test_f26_a_wall_clock_that_jumps_moves_no_lease(seconds: float) -> None:
    """On each component in turn, then on all; a node then dies, and is judged as late as ever."""
    errors = Counter[str]()

    async def scenario(scene: Scene) -> None:
        cluster = scene.cluster
        clocks = [cluster.clock, *(machine.clock for machine in cluster.machines)]
        async with scene.load(every_s=0.05):
            for clock in clocks:
                cluster.step_clock(clock, seconds)
                await asyncio.sleep(20.0)
                clock.step(-seconds)
                await asyncio.sleep(5.0)
            assert not await scene.event_codes() & GIVEN_UP, "nobody was taken for silent"
            assert scene.starts() == 2
            dead = scene.replicas[0]
            cut_at = scene.world.now()
            cluster.cut_power(dead)
            await asyncio.sleep(1.0)
            cluster.step_clock(cluster.clock, seconds)
            for code, after_s in (("NODE_SUSPECT", SUSPECT_AFTER_S), ("NODE_LOST", RULE.lost_after_s)):
                while code not in await scene.event_codes():
                    await asyncio.sleep(0.05)
                    assert scene.world.now() < cut_at + 60.0
                errors[code] = max(errors[code], round(abs(scene.world.now() - cut_at - after_s), 2))  # type: ignore[assignment]
            cluster.clock.step(-seconds)
            cluster.restore_power(dead)
            await scene.wait_whole(60.0)

    for seed in range(3):
        scene = run_scenario(seed, 2, scenario, agents=3)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:5]}"
    assert max(errors.values()) <= RULE.heartbeat_s + 0.5, errors
    record("F26", "S", 3, jump_s=seconds, lost=0, leases_wrong_by_at_most_s=max(errors.values()))


def test_f26_an_island_serves_as_long_as_its_rule_says_whatever_the_clocks_show() -> None:
    """Against the same seed whose clock does not jump: when an island knows that it is one is the link's affair."""
    serve_s = 20.0
    jumps = (0.0, -YEAR_S, -600.0, 600.0, YEAR_S)
    served: list[float] = []
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        machine, seconds = scene.replicas[0], jumps[len(served)]
        isolate(scene, machine.name)
        cut_at = scene.world.now()
        await asyncio.sleep(5.0)
        scene.cluster.step_clock(machine.clock, seconds)
        await scene.until(lambda: not machine.workers, 60.0, "the end of its lease")
        served.append(scene.last("worker.stop") - cut_at)
        machine.clock.step(-seconds)
        isolate(scene, machine.name, on=False)
        await scene.wait_whole(60.0)

    for seed in range(RUNS):
        served.clear()
        for _ in jumps:
            run_scenario(seed, 1, scenario, partition=f"serve: {serve_s:.0f}s")
        assert min(served) >= serve_s
        worst = max(worst, max(served) - min(served))
    assert worst <= RULE.heartbeat_s
    record("F26", "S", RUNS * len(jumps), lease_s=serve_s, jumps_s=jumps, wrong_by_at_most_s=round(worst, 3))


def test_f27_ten_minutes_of_skew_change_no_decision() -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.load(every_s=0.05):
            await asyncio.sleep(60.0)
            await scene.apply(replicas=2)
            await scene.wait_whole(30.0)

    for seed in range(RUNS):
        for skews in ((600.0, 0.0, -600.0), (-600.0, 600.0, 0.0)):
            scene = run_scenario(seed, 2, scenario, agents=3, skews=skews)
            assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:5]}"
            assert "CLOCK_SKEW" in scene.codes
            assert scene.starts() == 2, "nothing was moved for it"
            assert not scene.codes & GIVEN_UP
    record("F27", "S", 2 * RUNS, skew_s=600, lost=0, wrong_decisions=0)
