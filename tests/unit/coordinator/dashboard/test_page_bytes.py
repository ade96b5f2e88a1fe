"""No page of a region of 1,000 nodes and 500 workloads is over 1 MB, expanded: its own files and its rows.

`shoal bench dashboard` measures it in a browser; this says at once which table of which page has grown.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from shoal.coordinator.api.dashboard import assets
from shoal.coordinator.api.dashboard.board import EVENTS_SHOWN, FIGURES_SHOWN, LATEST_EVENTS
from shoal.coordinator.api.dashboard.candidates import shorten
from shoal.coordinator.api.dashboard.rows import (
    Row,
    device_row,
    event_row,
    figures_row,
    node_row,
    node_state_row,
    place_row,
    placement_row,
    plain,
    row_text,
    rows_text,
    workload_row,
)
from shoal.coordinator.api.dashboard.server import TABLES
from shoal.coordinator.core import timeline
from shoal.v1 import nouns_pb2, operator_pb2

NODES: Final = 1000
WORKLOADS: Final = 500
REPLICAS: Final = 2
"""Of each workload: twice what the benchmark's region has."""
PAGE_BYTES: Final = 1_000_000
TIMELINE_BYTES: Final = 40_000
"""Of the answer that a page's charts are drawn from: six figures of 360 steps, each of at most 18 characters."""
MAIN: Final = Path(__file__).parents[4] / "coordinator/dashboard/src/main.jsx"
CANDIDATES: Final = 150
"""As `workload.jsx` asks for."""


def nodes() -> Iterator[tuple[str, Row]]:
    for number in range(NODES):
        name = f"shop-{number:04}-edge"
        labels = {"site": f"shop-{number:04}", "group": "shop", "entry": "default", "price": "0.05 USD/h"}
        node = nouns_pb2.Node(
            name=name, role="agent", labels=labels, agent_version="0.1.0", os="linux", arch="x86_64",
            memory_limit_bytes=25_232_932_864,
        )  # fmt: skip
        yield name, node_row(operator_pb2.NodeView(node=node, liveness="ready", joined_at=1.8e9 + number))


def devices() -> Iterator[tuple[str, Row]]:
    for number in range(NODES):
        view = operator_pb2.DeviceView(node=f"shop-{number:04}-edge", cost_usd_per_h=0.05, liveness="ready")
        view.device.name, view.device.kind, view.device.vendor = "rk3588s", "npu", "RockChip"
        view.device.model, view.device.memory_bytes = "RockChip RK3588S", 16 * 2**30
        view.device.emulated = True
        view.assignments.append(f"a-{number:016x}")
        view.reading.free_bytes, view.reading.utilisation = 15_938_355_200, 0.37
        view.reading.temperature_c, view.reading.power_w = 61.0, 12.4
        yield f"{view.node}/rk3588s", device_row(view)


def placements() -> Iterator[tuple[str, Row]]:
    for number in range(REPLICAS * WORKLOADS):
        view = operator_pb2.PlacementView(node=f"shop-{number:04}-edge", stand_in="emulated", liveness="ready")
        view.assignment.id, view.assignment.device, view.assignment.precision = f"a-{number:016x}", "rk3588s", "fp32"
        view.assignment.workload.tenant, view.assignment.workload.name = "default", f"reader-{number // REPLICAS:04}"
        view.observed.phase, view.observed.since = "ready", 1.79e9
        view.observed.served.add(
            origin="gateway", requests=123_456, latency_p95_s=0.0123, joules=800.0, energy_source="profile"
        )
        yield view.assignment.id, placement_row(view)


def workloads() -> Iterator[tuple[str, Row]]:
    for number in range(WORKLOADS):
        view = operator_pb2.WorkloadView(policy=f"reader-{number:04}", state="ready", wanted=2, ready=2, revision=7)
        view.workload.tenant, view.workload.name, view.since = "default", f"reader-{number:04}", 1.79e9
        view.ingress.add(origin="gateway", requests=246_912, answered=246_900, retried=12)
        yield f"default/reader-{number:04}", workload_row(view)


def figures() -> Iterator[tuple[str, Row]]:
    step = tuple(12.345 if each is timeline.Figure.REQUESTS else 0.00123 for each in timeline.FIGURES)
    for number in range(WORKLOADS):
        subject = f"default/reader-{number:04}"
        yield subject, figures_row([step] * FIGURES_SHOWN)


def events(count: int) -> Iterator[tuple[str, Row]]:
    for number in range(count):
        view = operator_pb2.Event(
            sequence=number, at=1.79e9, code="MIGRATION_SHIFTING", subject=f"m-{number:012x}", message="shifting 25%",
            actor="coordinator", node=f"shop-{number:04}-edge", stand_in="emulated",
        )  # fmt: skip
        view.workload.tenant, view.workload.name = "default", f"reader-{number:04}"
        yield f"{number:012}", event_row(view)


def tables() -> dict[str, list[tuple[str, Row]]]:
    """Without those that do not grow with nodes and workloads."""
    all_nodes, all_placements = list(nodes()), list(placements())
    return {
        "nodes": all_nodes,
        "node_states": [(key, node_state_row(row)) for key, row in all_nodes],
        "devices": list(devices()),
        "placements": all_placements,
        "places": [(key, place_row(row)) for key, row in all_placements],
        "workloads": list(workloads()),
        "figures": list(figures()),
        "events": list(events(EVENTS_SHOWN)),
        "latest_events": list(events(LATEST_EVENTS)),
    }


def explanation_bytes() -> int:
    estimate = operator_pb2.Estimate(low=0.0012345678901, mid=0.0022345678901, high=0.0032345678901)
    prediction = operator_pb2.Prediction(
        latency_p50_s=estimate, latency_p95_s=estimate, memory_bytes=estimate, load_s=estimate, joules=estimate,
        energy_source="profile", basis="measured on the same class",
    )  # fmt: skip
    refusal = nouns_pb2.Refusal(
        code="SELECTOR_MISMATCH", found="site is shop-0001", asked="node.labels.site == 'shop-0002'", remedy="r" * 80
    )
    found = [
        operator_pb2.Candidate(
            node=f"shop-{number:04}-edge", device="rk3588s", model=f"sha256:{number:064x}", precision="fp32",
            stand_in="emulated", score=1.2345678901, prediction=prediction, cost_usd_per_h=0.05,
            carbon_g_per_h=1.2345678901, refusal=refusal,
        )
        for number in range(NODES)
    ]  # fmt: skip
    reply = operator_pb2.ExplainReply(plan=operator_pb2.WorkloadPlan(candidates=found))
    beside = shorten(reply, {"most": str(CANDIDATES), "brief": "1"})
    assert beside == {"left_out": NODES - CANDIDATES}
    return len(json.dumps({**plain(reply), **beside}))


def tables_by_page() -> dict[str, list[str]]:
    """Tables by page, as the page's source says; of the page of one workload under `workload`."""
    found: dict[str, list[str]] = {}
    for line in MAIN.read_text().splitlines():
        if (page := re.match(r'  (""|\w+): \{ name: .* tables: (\[.*?\])(.*)', line)) is None:
            continue
        name, common = page[1].strip('"') or "overview", json.loads(page[2])
        beside: dict[str, Any] = {key: json.loads(told) for key, told in re.findall(r"(list|one): (\[.*?\])", page[3])}
        found[name] = common + beside.get("list", [])
        if "one" in beside:
            found[name.removesuffix("s")] = common + beside["one"]
    return found


def test_pages_follow_tables_that_there_are() -> None:
    pages = tables_by_page()
    assert {"overview", "fleet", "workloads", "workload", "migrations", "federation", "events", "plan"} <= pages.keys()
    assert all(set(each) <= TABLES for each in pages.values())


def test_a_short_table_says_what_the_long_one_says() -> None:
    found = tables()
    for short, long in (("node_states", "nodes"), ("places", "placements")):
        whole = dict(found[long])
        assert all(row.items() <= whole[key].items() for key, row in found[short])
    cordoned = node_row(operator_pb2.NodeView(node=nouns_pb2.Node(name="n"), liveness="lost", cordoned=True))
    assert node_state_row(cordoned) == cordoned, "whatever needs a look is in it"


@pytest.mark.parametrize("page", sorted(tables_by_page()))
def test_no_page_of_a_large_region_is_over_a_megabyte(page: str) -> None:
    rows = tables()
    files = sum(len(each.content) for name, each in assets.load().items() if not name.endswith(".txt"))
    sizes = {
        table: len(rows_text([(key, row_text(row)) for key, row in rows[table]]).encode())
        for table in tables_by_page()[page]
        if table in rows
    }
    sizes["files"] = files
    sizes["timeline"] = TIMELINE_BYTES
    sizes["explanation"] = explanation_bytes() if page == "workload" else 0
    assert sum(sizes.values()) < PAGE_BYTES, sizes
