"""What `shoal bench dashboard` judges by, and that what it waits for has an end."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.benchmark_modules import load_benchmark
from harness.wait import until

SPUN_S = 0.08


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    pytest.importorskip("playwright")
    load_benchmark(monkeypatch, "_placement", ("standing", "agents"))
    names = ("figures", "processors", "holds", "region", "browser")
    return SimpleNamespace(**load_benchmark(monkeypatch, "_dashboard", names))


def figures_of(modules: SimpleNamespace, **changed: Any) -> Any:
    """Within every goal, unless changed."""
    given = {"drawn_ms": 900.0, "expanded_kb": 800.0, "update_ms": 200.0, "cpu_ms": 20.0, **changed}
    found = modules.figures.DashboardFigures(1000, 500)
    fast = modules.figures.PageOpening(300.0, 100.0, 20.0, 40.0, 200.0, 7)
    found.cold["fleet"] = modules.figures.PageOpening(given["drawn_ms"], 400.0, 100.0, 80.0, given["expanded_kb"], 2500)
    found.warm["fleet"] = fast
    found.updates = [modules.figures.Update(given["update_ms"], 30.0)] * 20
    found.quiet, found.watched = modules.figures.LoopHold(10.0), modules.figures.LoopHold(given["cpu_ms"])
    return found


def test_figures_within_their_goals_miss_nothing(modules: SimpleNamespace) -> None:
    told = modules.figures.report(figures_of(modules))
    assert told["missed"] == []
    wanted = {"first_paint_ms": 900.0, "update_ms": 200.0, "largest_page_kb": 800.0, "loop_stall_ms": 20.0}
    assert {name: told[name] for name in wanted} == wanted
    assert told["first_paint_cpu_ms"] == 500.0, "browser and dashboard"
    assert list(told)[:4] == list(wanted), "what is judged comes first"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"drawn_ms": 1501.0}, "first paint 1501 ms, at most 1500"),
        ({"update_ms": 251.0}, "update 251 ms, at most 250"),
        ({"expanded_kb": 1001.0}, "largest page 1001 kB, at most 1000"),
        ({"cpu_ms": 51.0}, "loop held 51 ms, at most 50"),
    ],
)
def test_each_goal_can_be_missed(modules: SimpleNamespace, changed: dict[str, float], said: str) -> None:
    assert modules.figures.missed_goals(figures_of(modules, **changed)) == [said]


def test_what_was_not_measured_meets_no_goal_and_is_null(modules: SimpleNamespace) -> None:
    told = modules.figures.report(modules.figures.DashboardFigures(1000, 500))
    assert len(told["missed"]) == 3
    assert (told["first_paint_ms"], told["update_ms"], told["asked_ms"]) == (None, None, None)
    assert json.loads(json.dumps(told, allow_nan=False))["nodes"] == 1000


def test_one_slow_change_of_twenty_does_not_decide(modules: SimpleNamespace) -> None:
    found = figures_of(modules)
    found.updates[0] = modules.figures.Update(5000.0, 30.0)
    told = modules.figures.report(found)
    assert (told["update_ms"], told["update_max_ms"]) == (200.0, 5000.0)
    assert modules.figures.at_share([3.0, 1.0, 2.0], 0.5) == 2.0
    assert math.isnan(modules.figures.at_share([], 0.5))


async def hold_of(modules: SimpleNamespace, hold: Callable[[], object]) -> Any:
    """What a monitor finds when `hold` holds the loop."""
    monitor = modules.holds.HoldMonitor()
    running = asyncio.create_task(monitor.run())
    await until(lambda: monitor.found.clock_ms > 0.0, 10.0, "the monitor's first turn")
    monitor.reset()
    hold()
    await until(lambda: monitor.found.clock_ms > 0.0, 10.0, "its next turn")
    running.cancel()
    await asyncio.wait([running])
    return monitor.found


async def test_a_loop_that_is_held_is_found_where_it_was(modules: SimpleNamespace) -> None:
    found = await hold_of(modules, lambda: spin_for(SPUN_S))
    assert found.cpu_ms >= 1e3 * SPUN_S
    assert "spin_for" in found.held_in


async def test_a_loop_that_gets_no_processor_is_not_held_by_its_work(modules: SimpleNamespace) -> None:
    found = await hold_of(modules, lambda: threading.Event().wait(SPUN_S))
    assert found.clock_ms >= 1e3 * SPUN_S / 2
    assert found.cpu_ms < 1e3 * SPUN_S / 2


def spin_for(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_no_wait_goes_on_after_the_deadline_or_the_region(modules: SimpleNamespace) -> None:
    over = modules.browser.Loop(asyncio.get_running_loop().time() - 1.0)
    with pytest.raises(modules.browser.GivesUpError, match="--deadline"):
        over.left_s()
    loop = modules.browser.Loop(asyncio.get_running_loop().time() + 3600.0)
    assert loop.left_s() == modules.browser.STEP_S
    loop.is_over.set()
    with pytest.raises(modules.browser.GivesUpError, match="the region has ended"):
        loop.left_s()


async def test_a_region_that_never_rests_or_fails_is_not_waited_for(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.region, "REST_S", 0.001)

    async def fail() -> None:
        raise ValueError("the store is gone")

    async def go_on() -> None:
        await asyncio.Event().wait()

    unplanned = SimpleNamespace(workloads=SimpleNamespace(last_plan=None))
    going, failed = asyncio.create_task(go_on()), asyncio.create_task(fail())
    waits = modules.region.WatchedRegion(unplanned, SimpleNamespace(sets=7), None, going)
    with pytest.raises(TimeoutError, match="sent 7 desired sets"):
        await waits.stand(asyncio.get_running_loop().time() + 0.01)
    with pytest.raises(ValueError, match="the store is gone"):
        await modules.region.WatchedRegion(unplanned, SimpleNamespace(sets=7), None, failed).stand(math.inf)
    going.cancel()


def test_others_take_no_more_than_there_is(modules: SimpleNamespace) -> None:
    meter = modules.processors.OthersMeter()
    spin_for(SPUN_S)
    assert 0.0 <= meter.share() <= 1.5, "its columns are rounded to hundredths of a second"
