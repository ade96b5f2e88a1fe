"""The board's rows are those of `shoal get`, and only what changed is made again."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.builders.agent_values import assignment
from harness.builders.coordinator_core import MIB, device, fleet_of, node, observation, warm
from harness.fakes.region import FakeAgent, RegionFixture, two_agents
from harness.wait import until
from shoal.coordinator.api import views
from shoal.coordinator.api.dashboard import board
from shoal.coordinator.api.dashboard.board import EVENTS_SHOWN, Board
from shoal.coordinator.api.dashboard.feed import Feed, RowChange
from shoal.coordinator.api.dashboard.rows import (
    device_row,
    figures_row,
    node_row,
    place_row,
    placement_row,
    row_text,
    workload_row,
)
from shoal.coordinator.api.pace import Pace
from shoal.coordinator.core import timeline
from shoal.coordinator.core.placement.model import Aim
from shoal.types.assignment import DesiredSet, Measured, Phase, Version
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import WorkloadKey


class Viewer:
    """A region and what its board published last."""

    def __init__(self, world: RegionFixture) -> None:
        self.world = world
        self.last: list[RowChange] = []
        self.board = Board(world.region, None, self.last.extend, lambda: {"name": "eu"})

    async def look(self) -> dict[str, dict[str, object | None]]:
        """By table: the rows that changed, by key."""
        self.last.clear()
        await self.board.look(Pace())
        found: dict[str, dict[str, object | None]] = {}
        for (table, key), row in self.last:
            found.setdefault(table, {})[key] = None if row is None else json.loads(row)
        return found


@pytest.fixture
async def viewer(tmp_path: Path) -> AsyncIterator[Viewer]:
    world = await RegionFixture.open(tmp_path / "region")
    yield Viewer(world)
    await world.store.close()


def as_json(row: dict[str, object]) -> object:
    return json.loads(row_text(row))


async def test_rows_are_what_the_command_line_shows(viewer: Viewer) -> None:
    runs, other = await two_agents(viewer.world)
    found = await viewer.look()
    region, controller = viewer.world.region, viewer.world.region.workloads
    for name in (runs.name, other.name):
        state, desired = region.fleet.fleet.nodes[name], controller.desired.get(name)
        assert found["nodes"][name] == as_json(node_row(views.node_view(state, desired, None)))
        (device,) = views.device_views(state, desired, controller.costs)
        assert found["devices"][f"{name}/cpu0"] == as_json(device_row(device))
    (workload,) = views.workload_views(controller, region.fleet.fleet)
    assert found["workloads"] == {"default/reader": as_json(workload_row(workload))}
    (placed,) = views.placement_views(controller.desired, region.fleet.fleet, controller.last_plan)
    assert list(found["placements"].values()) == [as_json(placement_row(placed))]
    assert list(found["places"].values()) == [as_json(place_row(placement_row(placed)))]
    assert found["node_states"].keys() == found["nodes"].keys()
    assert found["region"] == {"eu": {"name": "eu"}}


def test_a_device_shows_as_committed_what_placement_counts() -> None:
    """Two models share a worker, whose provider takes 800 MiB once."""
    sizes = {"memory_bytes": Bytes(860 * MIB), "provider_bytes": Bytes(800 * MIB)}
    both = tuple(assignment(f"a-{n}", shared_worker=True, **sizes) for n in range(2))
    joined = replace(warm(memory=50 * MIB), joined=True)
    state = fleet_of(node("a", device("cpu0"))).nodes["a"]
    desired = DesiredSet("a", Version("h", 1, 1), both, (), (), (), Seconds(1.0))

    def committed_mib(*measured: Measured) -> int:
        seen = {one.id: observation(one, Phase.READY, measured=each) for one, each in zip(both, measured, strict=False)}
        (view,) = views.device_views(replace(state, observed=seen), desired, {})
        return view.committed_bytes // MIB

    assert committed_mib() == 2 * 860
    assert committed_mib(warm(memory=850 * MIB), joined) == 860 + 60


async def test_a_move_that_waits_is_a_row_and_begins_in_it(viewer: Viewer) -> None:
    """Made again only where what it waits for is another."""
    runs, other = await two_agents(viewer.world)
    region = viewer.world.region
    await region.fleet.cordon(other.name, True, "ops")
    waits = await region.queued_moves.migrate(WorkloadKey("default", "reader"), Aim(other.name), "ops")
    (row,) = (await viewer.look())["migrations"].values()
    assert isinstance(row, dict)
    assert (row["id"], row["stage"], row["reason"]["code"]) == (waits.id, "queued", "NODE_CORDONED")
    assert row["source"]["node"] == runs.name
    assert "migrations" not in await viewer.look()
    await region.fleet.cordon(other.name, False, "ops")
    for _ in range(2):
        viewer.world.clock.advance(3.0)
        await region.queued_moves.tick()
        await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop, for the look
    await region.queued_moves.tick()
    ((name, row),) = (await viewer.look())["migrations"].items()
    assert isinstance(row, dict)
    assert (name, row["id"], row["stage"]) == (waits.id, waits.id, "planned")


async def test_a_look_at_what_has_not_changed_makes_and_publishes_nothing(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_agents(viewer.world)
    await viewer.look()
    made: list[object] = []
    monkeypatch.setattr(views, "node_view", lambda *told: made.append(told))
    monkeypatch.setattr(views, "device_views", lambda *told: made.append(told))
    monkeypatch.setattr(views, "workload_view", lambda *told: made.append(told))
    monkeypatch.setattr(views, "placement_view", lambda *told, **more: made.append(told))
    assert await viewer.look() == {}
    assert made == []


async def test_a_report_changes_the_rows_of_its_node_alone(viewer: Viewer) -> None:
    runs, other = await two_agents(viewer.world)
    await viewer.look()
    await other.report(free_bytes=2**32)
    assert (await viewer.look()).keys() == {"devices"}
    await other.report(free_bytes=2**32 + 1)
    assert await viewer.look() == {}, "a change that nobody sees is none"
    assert runs.name != other.name


@pytest.mark.parametrize("since", [math.nan, 1e300])
async def test_a_time_that_is_none_costs_its_row_that_time_alone(viewer: Viewer, since: float) -> None:
    await two_agents(viewer.world)
    region = viewer.world.region
    (placed,) = views.placement_views(region.workloads.desired, region.fleet.fleet, region.workloads.last_plan)
    assert "since" in placement_row(placed)
    placed.observed.since = since
    odd = placement_row(placed)
    assert "since" not in odd
    assert odd["phase"] == placed.observed.phase


async def test_a_row_that_cannot_be_made_hides_no_other_and_is_logged_once(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, other = await two_agents(viewer.world)
    make = views.placement_view

    def fail(*told: object, **more: object) -> None:
        raise OverflowError("a figure that cannot be shown")

    monkeypatch.setattr(views, "placement_view", fail)
    with capture_logs() as logs:
        found = await viewer.look()
        assert found["nodes"].keys() == {runs.name, other.name}
        assert found["workloads"].keys() == {"default/reader"}
        assert "placements" not in found
        await runs.report(free_bytes=2**32)
        assert (await viewer.look()).keys() == {"devices"}
        monkeypatch.setattr(views, "placement_view", make)
        await runs.report(free_bytes=2**33)
        assert (await viewer.look()).keys() == {"devices", "placements", "places"}
    failed = [(each["table"], each["subject"]) for each in logs if each["event"] == "dashboard_row_failed"]
    assert failed == [("node", runs.name)]


async def test_what_is_gone_is_published_as_gone(viewer: Viewer) -> None:
    await two_agents(viewer.world)
    lone = FakeAgent(viewer.world, "edge-3")
    await lone.connect()
    await viewer.look()
    await viewer.world.region.fleet.on_close("edge-3", lone.epoch)
    await viewer.world.region.fleet.forget("edge-3", "test")
    found = await viewer.look()
    assert found["nodes"] == {"edge-3": None}
    assert found["devices"] == {"edge-3/cpu0": None}


async def test_a_migration_is_followed_from_its_first_stage_to_its_last(viewer: Viewer) -> None:
    runs, other = await two_agents(viewer.world)
    await viewer.look()
    move = await viewer.world.region.moves.migrate(WorkloadKey("default", "reader"), Aim.parse(other.name), "test")
    found = await viewer.look()
    row = found["migrations"][move.id]
    assert isinstance(row, dict)
    assert (row["stage"], row["actor"], row["workload"]["name"]) == ("planned", "test", "reader")
    assert runs.name == row["source"]["node"]


async def test_a_page_waits_for_rows_of_now(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody looked there is nothing, and after a while without readers there is what was so then."""
    await two_agents(viewer.world)
    monkeypatch.setattr(board, "CURRENT_S", 3600.0)
    for _ in ("nobody looked yet", "nobody looked for a while"):
        viewer.board.set_readers(1)
        waits = asyncio.create_task(viewer.board.wait_current())
        done, _ = await asyncio.wait({waits}, timeout=0.01)
        assert not done
        await viewer.look()
        await asyncio.wait_for(waits, 10)
        await asyncio.wait_for(viewer.board.wait_current(), 10)
        viewer.board.set_readers(0)


async def test_a_page_that_gets_no_rows_of_now_is_shown_what_is_known(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the store does not answer, which the page then says."""
    monkeypatch.setattr(board, "CURRENT_S", 0.01)
    viewer.board.set_readers(1)
    await asyncio.wait_for(viewer.board.wait_current(), 10)


async def test_the_latest_events_are_a_table_of_their_own(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "LATEST_EVENTS", 3)
    await two_agents(viewer.world)
    past = await viewer.world.region.events.events_after(0, EVENTS_SHOWN)
    viewer.board.set_readers(1)
    following = asyncio.create_task(viewer.board.run_events())
    live = Feed()
    await until(lambda: bool(viewer.last), 10.0, "past events")
    assert len(past) > 4
    assert len(viewer.last) == len(past) + 3, "no past event is published to be gone at once"

    def latest() -> list[str]:
        live.publish(viewer.last)
        viewer.last.clear()
        return [key for (_, key), _ in live.since(0, frozenset({"latest_events"})).rows]

    assert latest() == [f"{each.sequence:012}" for each in past[-3:]]
    await viewer.world.region.fleet.label("edge-1", {"site": "shop"}, (), "ann")
    await until(lambda: len(viewer.last) >= 3, 10.0, "one more, and the oldest gone")
    assert latest() == [f"{past[-1].sequence + more:012}" for more in (-1, 0, 1)]
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


async def test_past_events_are_in_their_table_before_the_first_look_ends(viewer: Viewer) -> None:
    await two_agents(viewer.world)
    viewer.board.set_readers(1)
    tasks = [asyncio.create_task(each()) for each in (viewer.board.run, viewer.board.run_events)]
    await asyncio.wait_for(viewer.board.wait_current(), 10)
    past = await viewer.world.region.events.events_after(0, EVENTS_SHOWN)
    tables = [table for (table, _), _ in viewer.last]
    first_node = tables.index("nodes")
    assert tables[:first_node].count("events") == len(past)
    assert "events" not in tables[first_node:], "each once"
    assert len(past) > 1
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_past_requests_are_a_list_where_any_is_known() -> None:
    known = tuple(2.0 if each is timeline.Figure.REQUESTS else math.nan for each in timeline.FIGURES)
    assert figures_row([timeline.UNKNOWN, known]) == {"requests_per_s": 2.0, "past_requests_per_s": [None, 2.0]}
    assert figures_row([timeline.UNKNOWN] * 3) == {}
    assert figures_row([]) == {}
