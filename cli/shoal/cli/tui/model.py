"""What `shoal top` shows, computed from two looks at the region. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shoal.cli.render.migrations import QUEUED, is_over
from shoal.cli.render.resources import device_stand_in, place, reason, requested_target
from shoal.types.units import show_seconds, show_usd_per_hour, show_watts

STAGES: Final = (QUEUED, "planned", "reserved", "staging", "warming", "verifying", "shifting", "draining", "done")
"""Of a migration, in order."""


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """One look at the region, as the API's messages."""

    # Seconds on this machine's monotonic clock.
    at: float
    # The region's name.
    region: str
    # Kind, as listings name it -> its rows.
    rows: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class RegionSummary:
    """The figures on top."""

    # Nodes that are ready, and all.
    nodes: tuple[int, int]
    # Workloads that are ready, and all.
    workloads: tuple[int, int]
    # Requests a second that entered since the look before; NaN: there is none to compare with.
    requests_per_s: float
    # Watts that real devices measure now, and those that emulated ones say.
    watts: tuple[float, float]
    # USD/h of the devices on which something runs.
    usd_per_h: float
    # Migrations that are not over.
    moves: int


def summarise(now: RegionSnapshot, before: RegionSnapshot | None) -> RegionSummary:
    devices = now.rows.get("devices", ())
    nodes, workloads = now.rows.get("nodes", ()), now.rows.get("workloads", ())
    watts = [0.0, 0.0]
    for row in devices:
        power = row.reading.power_w
        # What another device's meter counts too is counted there.
        if math.isfinite(power) and power > 0 and not row.device.power_in:
            watts[bool(device_stand_in(row.device))] += power
    costs = [row.cost_usd_per_h for row in devices if row.assignments and math.isfinite(row.cost_usd_per_h)]
    return RegionSummary(
        (sum(row.liveness == "ready" for row in nodes), len(nodes)),
        (sum(row.state == "ready" for row in workloads), len(workloads)),
        _rate(now, before),
        (watts[0], watts[1]),
        sum(costs),
        sum(not is_over(row) for row in now.rows.get("migrations", ())),
    )


def summary_text(region: str, found: RegionSummary) -> str:
    """One line for people."""
    real, emulated = found.watts
    power = [show_watts(real)] if real else []
    power += [f"{show_watts(emulated)} emulated"] if emulated else []
    parts = [
        region,
        f"{found.nodes[0]}/{found.nodes[1]} nodes",
        f"{found.workloads[0]}/{found.workloads[1]} workloads",
        "" if math.isnan(found.requests_per_s) else f"{found.requests_per_s:.1f} requests/s",
        " + ".join(power),
        show_usd_per_hour(found.usd_per_h),
        f"{found.moves} move{'s' * (found.moves != 1)}" if found.moves else "",
    ]
    return "  ".join(filter(None, parts))


def move_lines(row: Any, width: int) -> tuple[str, ...]:
    """A migration that is under way: from where to where, its stages, its share of the requests, and what it waits for.

    width: characters of a line.
    """
    target = place(row.target) or requested_target(row) or "anywhere"
    cells = max(10, min(40, width - 40))
    done = round(row.share * cells)
    lines = [
        f"{row.id}  {row.workload.tenant}/{row.workload.name}, by {row.cause}",
        f"  {place(row.source)} -> {target}",
        f"  {_stages(row.stage, width)}",
        f"  {'█' * done}{'░' * (cells - done)} {row.share:.0%} of the requests",
    ]
    if row.readings:
        last = row.readings[-1]
        lines.append(
            f"  p95 of the new {_p95(last.target)}, of the old {_p95(last.source)}, "
            f"{last.target.errors} of {last.target.requests} failed"
        )
    if row.reason.code:
        lines.append(f"  waits: {reason(row.reason)}")
    return tuple(line if len(line) <= width else line[: width - 1] + "…" for line in lines)


def _stages(stage: str, width: int) -> str:
    """Which are done, which is on, which are to come: with their names where there is room."""
    if stage not in STAGES:
        return stage.replace("_", " ")
    stages = STAGES if stage == QUEUED else STAGES[1:]  # of a move that began, its wait is over
    at = stages.index(stage)
    marks = ["●" if index < at else "◉" if index == at else "○" for index in range(len(stages))]
    named = " ".join(f"{mark} {name}" for mark, name in zip(marks, stages, strict=True))
    return named if len(named) + 2 <= width else f"{''.join(marks)} {stage}, {at + 1} of {len(stages)}"


def _p95(figures: Any) -> str:
    return show_seconds(figures.latency_p95_s) if figures.requests else "-"


def _rate(now: RegionSnapshot, before: RegionSnapshot | None) -> float:
    """Requests a second, by the counters that went on from the look before; NaN: there are some, but none did.

    One that shrank or went began anew: a front was started again, or forgot a workload. One that is new may count from
    long ago, as those of a node that comes back.
    """
    if before is None or now.at <= before.at:
        return math.nan
    counted, known = _requests(now), _requests(before)
    more = [counted[key] - known[key] for key in counted.keys() & known.keys() if counted[key] >= known[key]]
    if not more and (counted or known):
        return math.nan
    return sum(more) / (now.at - before.at)


def _requests(found: RegionSnapshot) -> Mapping[tuple[str, str, str], int]:
    """Tenant, workload and origin -> requests that entered since their front counts them."""
    return {
        (row.workload.tenant, row.workload.name, one.origin): one.requests
        for row in found.rows.get("workloads", ())
        for one in row.ingress
    }
