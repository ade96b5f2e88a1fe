"""`shoal top`: its figures, and its keys, without a terminal."""

import asyncio
import math
from typing import Any

import pytest
from textual.widgets import DataTable, Static, TabbedContent

from shoal.cli.tui.app import Details, TopApp
from shoal.cli.tui.model import RegionSnapshot, RegionSummary, move_lines, summarise, summary_text
from shoal.types.codes import Code, refuse
from shoal.v1 import nouns_pb2, operator_pb2

KEY = nouns_pb2.WorkloadKey(tenant="default", name="reader")


def device(name: str, power_w: float, **more: object) -> operator_pb2.DeviceView:
    emulated, power_in = bool(more.get("emulated")), str(more.get("power_in", ""))
    return operator_pb2.DeviceView(
        node="edge", device=nouns_pb2.Device(name=name, emulated=emulated, power_in=power_in), liveness="ready",
        reading=nouns_pb2.Reading(device=name, power_w=power_w), cost_usd_per_h=0.5,
        assignments=["a-1"] if more.get("busy") else [],
    )  # fmt: skip


def migration(stage: str = "shifting", share: float = 0.4) -> operator_pb2.MigrationView:
    return operator_pb2.MigrationView(
        id="m-1", workload=KEY, stage=stage, share=share, cause="drain",
        source=operator_pb2.MigrationPlace(node="edge", device="npu0", stand_in="emulated"),
        target=operator_pb2.MigrationPlace(node="cloud", device="gpu0"),
        stages=[operator_pb2.MigrationStage(stage="planned", at=1.0)],
        readings=[operator_pb2.GuardReading(
            target=operator_pb2.GuardFigures(requests=7, errors=1, latency_p95_s=0.002),
            source=operator_pb2.GuardFigures(),
        )],
        reason=nouns_pb2.Refusal(code="WAITING_FOR_SHIFT", found="40% of the requests are held"),
    )  # fmt: skip


def snapshot(at: float = 10.0, requests: int = 0, region: str = "home") -> RegionSnapshot:
    ingress = [nouns_pb2.Ingress(workload=KEY, requests=requests)]
    rows: dict[str, list[Any]] = {
        "nodes": [
            operator_pb2.NodeView(node=nouns_pb2.Node(name="edge"), liveness="ready"),
            operator_pb2.NodeView(node=nouns_pb2.Node(name="\x1b[31mcloud"), liveness="lost"),
        ],
        "devices": [
            device("npu0", 12.0, emulated=True, busy=True), device("cpu0", 45.0), device("cpu1", 9.0, power_in="cpu0"),
        ],
        "workloads": [operator_pb2.WorkloadView(workload=KEY, state="ready", ready=1, wanted=1, ingress=ingress)],
        "placements": [],
        "migrations": [migration(), migration("done", 1.0)],
        "events": [operator_pb2.Event(sequence=1, at=1.0, code="NODE_LOST", subject="cloud")],
    }  # fmt: skip
    rows["migrations"][1].id = "m-0"
    return RegionSnapshot(at, region, rows)


def test_the_figures_on_top_say_what_is_emulated_and_count_a_meter_once() -> None:
    found = summarise(snapshot(12.0, 130), snapshot(10.0, 100))
    assert found == RegionSummary((1, 2), (1, 1), 15.0, (45.0, 12.0), 0.5, 1)
    assert summary_text("home", found) == (
        "home  1/2 nodes  1/1 workloads  15.0 requests/s  45W + 12W emulated  0.5 USD/h  1 move"
    )


def test_a_rate_needs_two_looks_and_counters_that_grow() -> None:
    assert math.isnan(summarise(snapshot(), None).requests_per_s)
    assert math.isnan(summarise(snapshot(12.0, 5), snapshot(10.0, 100)).requests_per_s), "a front was started again"
    assert "requests/s" not in summary_text("home", summarise(snapshot(), None))


@pytest.mark.parametrize(
    ("before", "now", "rate"),
    [
        ({"reader@a": 100, "gone@a": 900}, {"reader@a": 130}, 15.0),  # a workload was deleted
        ({"reader@a": 100, "reader@b": 900}, {"reader@a": 130, "reader@b": 4}, 15.0),  # a front was started again
        ({"reader@a": 100}, {"reader@a": 130, "reader@b": 900}, 15.0),  # a node came back
        ({"reader@a": 100, "other@a": 7}, {"reader@a": 130, "other@a": 17}, 20.0),
        ({"reader@a": 100}, {"reader@a": 100}, 0.0),
        ({}, {}, 0.0),
        ({"gone@a": 900}, {"reader@a": 130}, math.nan),
    ],
)
def test_a_counter_that_begins_anew_leaves_the_rate_of_the_others(
    before: dict[str, int], now: dict[str, int], rate: float
) -> None:
    def look(at: float, counts: dict[str, int]) -> RegionSnapshot:
        rows: dict[str, operator_pb2.WorkloadView] = {}
        for entry, requests in counts.items():
            name, _, origin = entry.partition("@")
            key = nouns_pb2.WorkloadKey(tenant="default", name=name)
            row = rows.setdefault(name, operator_pb2.WorkloadView(workload=key))
            row.ingress.add(workload=key, origin=origin, requests=requests)
        return RegionSnapshot(at, "home", {"workloads": list(rows.values())})

    assert summarise(look(12.0, now), look(10.0, before)).requests_per_s == pytest.approx(rate, nan_ok=True)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_move_is_a_picture_within_the_width(width: int) -> None:
    lines = move_lines(migration(), width)
    assert max(map(len, lines)) <= width
    if width == 120:
        assert lines == (
            "m-1  default/reader, by drain",
            "  edge/npu0 (emulated) -> cloud/gpu0",
            "  ● planned ● reserved ● staging ● warming ● verifying ◉ shifting ○ draining ○ done",
            f"  {'█' * 16}{'░' * 24} 40% of the requests",
            "  p95 of the new 2ms, of the old -, 1 of 7 failed",
            "  waits: WAITING_FOR_SHIFT 40% of the requests are held",
        )
    else:
        assert lines[2] == "  ●●●●●◉○○ shifting, 6 of 8"


def test_a_move_that_waits_is_before_every_stage() -> None:
    waits = migration("queued", 0.0)
    assert move_lines(waits, 140)[2].startswith("  ◉ queued ○ planned ○ reserved")
    assert move_lines(waits, 70)[2] == "  ◉○○○○○○○○ queued, 1 of 9"


@pytest.mark.parametrize("leaves_with", ["q", "ctrl+c"])
def test_keys_open_tables_and_a_row(monkeypatch: pytest.MonkeyPatch, leaves_with: str) -> None:
    # Seldom enough that the app rests in between: a key is waited for until it does, for a second at most.
    monkeypatch.setattr("shoal.cli.tui.app.LOOK_S", 0.1)
    looks = iter([snapshot(10.0, 0), snapshot(11.0, 5)])

    def look() -> RegionSnapshot:
        if (found := next(looks, None)) is not None:
            return found
        raise refuse(Code.COORDINATOR_UNREACHABLE, "nobody there")

    async def use() -> None:
        app = TopApp(look)
        async with app.run_test(size=(80, 24)) as pilot:
            summary = app.query_one("#summary", Static)
            for _ in range(300):
                if str(summary.content) == "no answer (COORDINATOR_UNREACHABLE), asked again: nobody there":
                    break
                await pilot.pause(0.01)
            else:
                pytest.fail(f"last: {summary.content}")
            assert app.query_one(TabbedContent).active == "workloads"
            await pilot.press("1")
            assert app.query_one(TabbedContent).active == "nodes"
            table = app.query_one("#table-nodes", DataTable)
            assert table.row_count == 2
            assert "\x1b" not in str(table.get_row_at(1)[0])
            await pilot.press("enter")
            await pilot.pause()
            assert isinstance(app.screen, Details)
            await pilot.press("escape", "5")
            assert app.query_one(TabbedContent).active == "migrations"
            assert "◉○○ shifting" in str(app.query_one("#moving", Static).content)
            await pilot.press("6")
            assert "NODE_LOST" in str(app.query_one("#said", Static).content)
            await pilot.press(leaves_with)
            await pilot.pause()
            assert app._exit, "Ctrl-C too: Textual would only say that another key quits"

    asyncio.run(use())
