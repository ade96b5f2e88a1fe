"""A signal that flaps around its threshold for an hour of virtual time: moves are few, and none is without reason.

Must-show 9 of live moves, through the whole region: coordinator, store, agents, routes, clients.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from simulation.scene import Scene, run_scenario

from harness.report import record
from shoal.coordinator.core.migration.budget import RETURN_MEMORY_S, SUSTAINED_S
from shoal.coordinator.core.migration.model import Cause, Migration, MigrationStage
from shoal.coordinator.core.signals.model import SignalName
from shoal.simulator.parts.hardware import USUAL_W
from shoal.simulator.parts.operators import OPERATOR_URI

HOUR_S = 3600.0
COOLDOWN_S = 300.0
GAIN = 0.1
FIXED = 0.4
"""USD/h of the one node; the other's is the region's."""
DIRTY = 350.0
"""g/kWh."""
ASK_S = 0.5
MOVES = "  migration: {when: {gain: 10%, cooldown: 5m}, shift: {steps: [50%, 100%], hold: 2s}, drain: 5s}\n"
BEFORE_S = 2.0
"""Between what a signal is and the look that acts on it."""

Signal = list[tuple[float, bool]]
"""Since when it was which."""
Flap = Callable[[Scene, bool], Awaitable[None]]


async def price(scene: Scene, high: bool) -> None:
    """The region's price, a quarter above and below the other node's."""
    assert scene.cluster.region is not None
    await scene.cluster.region.signals.set_override(
        SignalName.PRICE, f"{FIXED * (1.25 if high else 0.75)} USD/h", OPERATOR_URI
    )


async def carbon(scene: Scene, high: bool) -> None:
    """The grid's intensity, a quarter above and below what the schedule asks after; the region's price is high."""
    assert scene.cluster.region is not None
    await price(scene, high=True)
    await scene.cluster.region.signals.set_override(
        SignalName.CARBON, f"{DIRTY * (1.25 if high else 0.75):g} gCO2/kWh", OPERATOR_URI
    )


async def load(scene: Scene, high: bool) -> None:
    """So much of it that answers come five times as late, wherever they are from."""
    for machine in scene.cluster.machines:
        machine.slowdown = 5.0 if high else 1.0


def migrations_in_order(scene: Scene) -> list[Migration]:
    assert scene.cluster.region is not None
    return sorted(scene.cluster.region.workloads.migrations.all.values(), key=lambda each: each.stages[0].at)


def run_flapping(
    seed: int, flap: Flap, every_s: float, require: str = "", policy: str = "", watts: dict[str, float] | None = None
) -> tuple[Scene, list[Migration], Signal]:
    """The hour; what moved in it; when the signal was which (by the coordinator's clock on the wall)."""
    signal: Signal = []
    moves = list[Migration]()

    async def scenario(scene: Scene) -> None:
        async def flapping() -> None:
            high = True
            while True:
                await flap(scene, high)
                signal.append((scene.cluster.clock.wall(), high))
                await asyncio.sleep(every_s)
                high = not high

        async with scene.load(every_s=ASK_S):
            turning = asyncio.ensure_future(flapping())
            await asyncio.sleep(HOUR_S)
            assert not turning.done(), turning.exception()
            turning.cancel()
            await scene.until(
                lambda: all(each.is_over for each in migrations_in_order(scene)), 120.0, "the last move to end"
            )
            moves.extend(migrations_in_order(scene))

    labels = {"edge-0": {"price": f"{FIXED} USD/h"}}
    scene = run_scenario(seed, 1, scenario, labels=labels, require=require, policy=policy, watts=watts)
    return scene, moves, signal


def shortest_rest_s(moves: list[Migration]) -> float:
    """The shortest rest between two moves; by the law of the budget it is never less than it has to be."""
    rests = [after.stages[0].at - before.stages[-1].at for before, after in pairwise(moves)]
    for number, rest in enumerate(rests):
        ended = moves[number].stages[-1].at
        times = sum(each.stages[-1].at > ended - RETURN_MEMORY_S for each in moves[: number + 1])
        assert rest >= COOLDOWN_S * 2 ** max(0, times - 2), rests
    return min(rests, default=HOUR_S)


def assert_signal_held(move: Migration, signal: Signal, *, high: bool) -> None:
    """The signal was so for a while before the move began."""
    began = move.stages[0].at
    held = [each for at, each in signal if began - SUSTAINED_S <= at <= began - BEFORE_S]
    held += [each for at, each in signal if at <= began - SUSTAINED_S][-1:]
    assert set(held) == {high}


def few(moves: list[Migration], cause: Cause, every_s: float) -> None:
    """None where the signal never holds, else no more than the cooldown lets through; each to its end."""
    if every_s < SUSTAINED_S:
        assert moves == []
    else:
        assert 2 <= len(moves) <= HOUR_S / COOLDOWN_S
    assert {(each.stage, each.cause) for each in moves} <= {(MigrationStage.DONE, cause)}


def tell_of(moves: list[Migration], signal: str, every_s: float) -> None:
    record(
        "moves-flapping",
        "S",
        1,
        signal=signal,
        every_s=every_s,
        moves=len(moves),
        rest_s=shortest_rest_s(moves),
        lost=0,
    )


@pytest.mark.parametrize("every_s", [pytest.param(7.0, marks=pytest.mark.long), 45.0])
def test_a_price_around_the_threshold(every_s: float) -> None:
    scene, moves, signal = run_flapping(3, price, every_s, policy="  optimize: {cost: 1}\n" + MOVES)
    assert scene.lost_count == 0, scene.failed_answers[:3]
    few(moves, Cause.PRICE, every_s)
    for each in moves:
        assert each.expected is not None
        assert each.expected.gain >= GAIN
        assert_signal_held(each, signal, high=each.source.node == "edge-1")
    tell_of(moves, "price", every_s)


@pytest.mark.parametrize("every_s", [pytest.param(7.0, marks=pytest.mark.long), 45.0])
def test_a_carbon_intensity_around_the_threshold(every_s: float) -> None:
    """While the grid is dirty joules count, else money: one node is frugal, the other cheap."""
    schedule = f"  optimize: {{cost: 1}}\n  schedule: [{{when: region.carbon > {DIRTY}, optimize: {{energy: 1}}}}]\n"
    scene, moves, signal = run_flapping(7, carbon, every_s, policy=schedule + MOVES, watts={"edge-1": USUAL_W / 2})
    assert scene.lost_count == 0, scene.failed_answers[:3]
    few(moves, Cause.SCHEDULE, every_s)
    for each in moves:
        assert_signal_held(each, signal, high=each.source.node == "edge-0")
    tell_of(moves, "carbon", every_s)


def test_a_load_around_the_bound() -> None:
    """Warm-up says p95 30 ms; under load it is 150."""
    scene, moves, _ = run_flapping(5, load, 45.0, require=", latency: {p95: 100ms}", policy=MOVES)
    assert scene.lost_count == 0, scene.failed_answers[:3]
    assert 1 <= len(moves) <= HOUR_S / COOLDOWN_S
    for each in moves:
        assert (each.stage, each.cause) == (MigrationStage.DONE, Cause.SLO)
        assert "SLO_UNREACHABLE" in each.reason
    tell_of(moves, "load", 45.0)
