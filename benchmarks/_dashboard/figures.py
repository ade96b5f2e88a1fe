"""What `shoal bench dashboard` reports, and how it judges. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

FIRST_PAINT_MS: Final = 1500.0
UPDATE_MS: Final = 250.0
PAGE_KB: Final = 1000.0
"""Expanded."""
LOOP_MS: Final = 50.0
UPDATE_SHARE: Final = 0.95
"""`update_ms` is what this share of the changes took at most."""


@dataclass(frozen=True, slots=True)
class PageOpening:
    """One page, opened in a window of its own that has kept nothing."""

    # Milliseconds from the navigation until its first rows were drawn, by the page's own clock.
    drawn_ms: float
    # Processor milliseconds of the browser until then.
    browser_cpu_ms: float
    # The same of the dashboard: its looks at the region, its thread, what it has computed.
    dashboard_cpu_ms: float
    # Thousand bytes that it loaded, as they travelled.
    travelled_kb: float
    # The same, after they were expanded.
    expanded_kb: float
    # Rows of its live tables.
    rows: int

    @property
    def cpu_ms(self) -> float:
        return self.browser_cpu_ms + self.dashboard_cpu_ms


@dataclass(frozen=True, slots=True)
class Update:
    """One change of the region that a page showed."""

    # Milliseconds from the call that made it until the page had drawn it.
    drawn_ms: float
    # Processor milliseconds of browser and dashboard meanwhile.
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class LoopHold:
    """The longest time without a turn of the coordinator's loop."""

    # Processor milliseconds of the loop's thread: what its own work took.
    cpu_ms: float = 0.0
    # Milliseconds by the clock; other programs, and other threads of the process, count too.
    clock_ms: float = 0.0
    # Processor milliseconds of the longest collection of garbage that it had to do.
    collection_ms: float = 0.0
    # Where the loop was when it was held for `cpu_ms`, innermost first; empty: nobody saw it.
    held_in: str = ""


@dataclass(slots=True)
class DashboardFigures:
    """What was measured."""

    # Nodes of the region, a device each.
    nodes: int
    # Workloads of the region.
    workloads: int
    # By page: the first reader after nobody read for a while.
    cold: dict[str, PageOpening] = field(default_factory=dict)
    # By page: a second reader.
    warm: dict[str, PageOpening] = field(default_factory=dict)
    # Milliseconds until the page of a workload shows every candidate, for which the region is planned; NaN: unknown.
    asked_ms: float = math.nan
    # Changes that the page showed.
    updates: list[Update] = field(default_factory=list)
    # While nobody looked.
    quiet: LoopHold = LoopHold()
    # While pages were open.
    watched: LoopHold = LoopHold()
    # Processor milliseconds of the longest slice of the dashboard's own looks.
    slice_ms: float = 0.0
    # Latest heartbeat of an agent, in seconds after it was due: how far the machine did not keep up.
    heartbeat_late_s: float = 0.0
    # Share of the machine's processors that other programs took meanwhile.
    others_share: float = math.nan
    # What was wanted and did not come in time, a sentence each.
    failures: list[str] = field(default_factory=list)

    @property
    def first_paint_ms(self) -> float:
        """Of the slowest page, whoever opened it."""
        return max((each.drawn_ms for each in self._openings), default=math.nan)

    @property
    def first_paint_cpu_ms(self) -> float:
        """As `first_paint_ms`, in processor time: what it takes on one processor that does nothing else."""
        return max((each.cpu_ms for each in self._openings), default=math.nan)

    @property
    def update_ms(self) -> float:
        return at_share([each.drawn_ms for each in self.updates], UPDATE_SHARE)

    @property
    def largest_page_kb(self) -> float:
        """Expanded: what a browser has to read, however well it travelled."""
        return max((each.expanded_kb for each in self._openings), default=math.nan)

    @property
    def largest_page_travelled_kb(self) -> float:
        return max((each.travelled_kb for each in self._openings), default=math.nan)

    @property
    def loop_stall_ms(self) -> float:
        """In processor time, whether or not somebody looked."""
        return max(self.quiet.cpu_ms, self.watched.cpu_ms)

    @property
    def _openings(self) -> list[PageOpening]:
        return [*self.cold.values(), *self.warm.values()]


def at_share(values: Sequence[float], share: float) -> float:
    """The least of the values that this share of them does not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def missed_goals(found: DashboardFigures) -> list[str]:
    """The goals that it misses or does not show to be met, a sentence each."""
    goals = (
        ("first paint", found.first_paint_ms, FIRST_PAINT_MS, "ms"),
        ("update", found.update_ms, UPDATE_MS, "ms"),
        ("largest page", found.largest_page_kb, PAGE_KB, "kB"),
        ("loop held", found.loop_stall_ms, LOOP_MS, "ms"),
    )
    return [f"{name} {value:.0f} {unit}, at most {most:.0f}" for name, value, most, unit in goals if not value <= most]


def report(found: DashboardFigures) -> dict[str, Any]:
    """For JSON: the four figures that are judged first, then what they come from; null for what is unknown."""
    told = {
        "first_paint_ms": found.first_paint_ms,
        "update_ms": found.update_ms,
        "largest_page_kb": found.largest_page_kb,
        "loop_stall_ms": found.loop_stall_ms,
        "first_paint_cpu_ms": found.first_paint_cpu_ms,
        "largest_page_travelled_kb": found.largest_page_travelled_kb,
        "update_p50_ms": at_share([each.drawn_ms for each in found.updates], 0.5),
        "update_max_ms": at_share([each.drawn_ms for each in found.updates], 1.0),
        "update_cpu_p50_ms": at_share([each.cpu_ms for each in found.updates], 0.5),
        "missed": missed_goals(found),
        **asdict(found),
        "updates": len(found.updates),
    }
    return {name: _known(value) for name, value in told.items()}


def _known(value: Any) -> Any:
    """Rounded to what is worth reading; None for NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _known(each) for name, each in value.items()}
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 3 if abs(value) < 1 else 1)
    return value
