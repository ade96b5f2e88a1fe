"""Keeps the rows of the dashboard's tables as the region is now, in slices that never hold the loop.

The rows come from the messages that the command line shows (`api/views.py`). A message is built only for what changed:
the fleet's and the desired states are immutable values, so another object is another state. While nobody looks, nothing
is computed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from shoal.coordinator.api import views
from shoal.coordinator.api.dashboard.feed import RowChange, RowKey
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
    workload_row,
)
from shoal.coordinator.api.migrations import migration_view, queued_move_view
from shoal.coordinator.api.pace import Pace
from shoal.coordinator.controllers.federation.membership import FederationMembership
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core import timeline
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import PlacementPlan, Slot
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.host.event_wait import wait_or_timeout
from shoal.types.assignment import DesiredSet
from shoal.types.units import UsdPerHour
from shoal.types.workload import Intent, WorkloadKey
from shoal.v1 import operator_pb2

log: Final = structlog.get_logger("shoal.coordinator.dashboard")

TICK_S: Final = 0.1
"""Shortest time between two looks at the region."""
IDLE_FACTOR: Final = 9
"""After a look that took t of the processor, wait at least 9 t: looking takes a tenth of the loop at most."""
EVENTS_SHOWN: Final = 400
"""Newest events in their table."""
LATEST_EVENTS: Final = 20
"""Newest events in the table for pages that show a few."""
FIGURES_SHOWN: Final = 30
"""Newest fine steps of the timeline in a row: five minutes."""
CURRENT_S: Final = 5.0
"""Longest time that a new page waits for rows of now. A choice: a look at 1,000 nodes takes a tenth of a second; a page
that would wait longer had better show what is known, and that the store does not answer."""
MOVES_SHOWN: Final = 200
"""Newest migrations in their table, those under way first."""


class Federated(Protocol):
    @property
    def membership(self) -> FederationMembership: ...


class Source(NamedTuple):
    """Where rows come from that change together."""

    # No other source has it.
    key: tuple[str, str]
    # Values that decide what the rows say. States are compared by identity, figures and texts by value.
    made_of: tuple[object, ...]
    # Makes the rows; called only if one of these is another than before.
    make: Callable[[], Iterable[tuple[RowKey, Row]]]


@dataclass(slots=True)
class Shown:
    """What one source's rows were when they were last made."""

    made_of: tuple[object, ...]
    # As JSON.
    rows: dict[RowKey, str]


class Board:
    """publish: takes changed rows, in order. describe: facts of the region that are no list, as one row."""

    def __init__(
        self,
        region: RegionalCoordinator,
        federation: Federated | None,
        publish: Callable[[list[RowChange]], None],
        describe: Callable[[], Row],
    ) -> None:
        self._region = region
        self._federation = federation
        self._publish = publish
        self._describe = describe
        self._watched = asyncio.Event()
        self._looked = asyncio.Event()
        """Set from the end of a look until nobody reads any more."""
        self._has_past = asyncio.Event()
        """Set once the events from before are in their table."""
        self._shown: dict[tuple[str, str], Shown] = {}
        """By source."""
        self._failed: set[tuple[str, str]] = set()
        """Sources that did not make all of their rows when they were asked last."""
        self._shown_events: deque[int] = deque()
        """Numbers of the events in their table, oldest first."""
        self._latest_events: deque[int] = deque()
        """Likewise of the latest ones."""
        self._costs: Mapping[Slot, UsdPerHour] = {}
        self._price_changes = 0
        """How often the region's price was another. A node's own is its label, so part of its state."""
        self._stays: tuple[PlacementPlan | None, dict[str, str]] = None, {}
        """Of the plan: why replicas stay, by assignment."""
        self.worked_s = 0.0
        """Processor seconds of all looks."""
        self.longest_slice_s = 0.0
        """Processor seconds of the longest slice of any look: for that long it held the loop."""

    @property
    def membership(self) -> FederationMembership | None:
        """Of a federation; None where the region cannot join any."""
        return self._federation.membership if self._federation is not None else None

    def set_readers(self, count: int) -> None:
        """How many pages are open now."""
        if count:
            self._watched.set()
        else:
            self._watched.clear()
            self._looked.clear()

    async def wait_current(self) -> None:
        """Returns when the rows are those of now, and after `CURRENT_S` in any case. Whoever waits has to count as a
        reader."""
        await wait_or_timeout(self._looked, CURRENT_S)

    async def run(self) -> None:
        """Until cancelled: follows the region while somebody reads."""
        await self._watched.wait()
        await wait_or_timeout(self._has_past, CURRENT_S / 2)
        while True:
            await self._watched.wait()
            pace = Pace()
            await self.look(pace)
            await asyncio.sleep(max(TICK_S, IDLE_FACTOR * pace.worked_s))

    async def run_events(self) -> None:
        """Until cancelled: follows the region's events, from when somebody reads for the first time."""
        log, shown = self._region.events, self._shown_events
        await self._watched.wait()
        if not shown:
            pace, changes = Pace(), list[RowChange]()
            past = await log.events_after(0, EVENTS_SHOWN)
            for left, event in zip(range(len(past), 0, -1), past, strict=True):
                changes.extend(self._event(event, is_latest=left <= LATEST_EVENTS))
                await pace.breathe()
            self._publish(changes)
        self._has_past.set()
        async for event in log.follow(shown[-1] if shown else 0):
            self._publish(self._event(event))
            await asyncio.sleep(0)

    def _event(self, event: LogEvent, *, is_latest: bool = True) -> list[RowChange]:
        """The row of one more event, and the oldest as gone where there are enough. is_latest: whether it is among the
        newest; else enough are known to follow."""
        shown, latest = self._shown_events, self._latest_events
        shown.append(event.sequence)
        row = row_text(event_row(views.event_view(event)))
        changes: list[RowChange] = [(_event_key(event.sequence), row)]
        if is_latest:
            latest.append(event.sequence)
            changes.append((_latest_key(event.sequence), row))
        if len(latest) > LATEST_EVENTS:
            changes.append((_latest_key(latest.popleft()), None))
        if len(shown) > EVENTS_SHOWN:
            changes.append((_event_key(shown.popleft()), None))
        return changes

    async def look(self, pace: Pace) -> None:
        """One look at everything; publishes what changed."""
        present: set[tuple[str, str]] = set()
        changes: list[RowChange] = []
        gone: list[RowChange] = []
        for source in self._sources():
            present.add(source.key)
            shown = self._shown.get(source.key)
            if shown is None or not _is_same(shown.made_of, source.made_of):
                before, rows = shown.rows if shown is not None else {}, dict[RowKey, str]()
                try:
                    for key, row in source.make():
                        rows[key] = row_text(row)
                        if before.get(key) != rows[key]:
                            changes.append((key, rows[key]))
                        await pace.breathe()
                    self._failed.discard(source.key)
                except Exception:  # what cannot be shown of one must not hide all others
                    if source.key not in self._failed:
                        log.exception("dashboard_row_failed", subject=source.key[1], table=source.key[0])
                    self._failed.add(source.key)
                gone.extend((key, None) for key in before.keys() - rows.keys())
                self._shown[source.key] = Shown(source.made_of, rows)
            await pace.breathe()
        for name in self._shown.keys() - present:
            gone.extend((key, None) for key in self._shown.pop(name).rows)
            self._failed.discard(name)
        changes = gone + changes  # a row may have gone from one source to another
        if changes:
            self._publish(changes)
        await pace.rest()
        self.worked_s += pace.worked_s
        self.longest_slice_s = max(self.longest_slice_s, pace.longest_s)
        if self._watched.is_set():
            self._looked.set()

    def _sources(self) -> Iterator[Source]:
        region = "region", self._region.config.name
        yield Source(region, (object(),), lambda: ((region, self._describe()),))
        yield from self._nodes()
        yield from self._workloads()
        yield from self._migrations()
        yield from self._agreements()
        yield from self._members()
        yield self._figures()

    def _nodes(self) -> Iterator[Source]:
        """Each with its devices and replicas."""
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        costs = controller.costs
        if costs != self._costs:
            self._price_changes += 1
        self._costs = costs
        if self._stays[0] is not controller.last_plan:
            self._stays = controller.last_plan, views.stay_reasons(controller.last_plan)
        reasons = self._stays[1]
        for name in (*fleet.nodes, *(each for each in tuple(controller.desired) if each not in fleet.nodes)):
            state, desired = fleet.nodes.get(name), controller.desired.get(name)
            stays = tuple(reasons.get(each.id, "") for each in desired.assignments) if desired is not None else ()
            make = partial(_node, name, state, desired, costs, stays)
            yield Source(("node", name), (state, desired, self._price_changes, stays), make)

    def _workloads(self) -> Iterator[Source]:
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        index = views.WorkloadIndex.of_region(controller, fleet)
        for intent in index.intents:
            key = intent.key
            made_of = (
                intent,
                index.plans.get(key),
                index.ready[key],
                index.is_behind(intent),
                tuple(index.waits.get(key, ())),
                index.ingress_of(key),
                index.planned.get(key),
                index.delegations.get(key),
                key in index.routed_away,
            )
            yield _source("workloads", str(key), made_of, partial(_workload, intent, index))
        for key in views.leaving_workloads(index):
            waits = (tuple(index.waits.get(key, ())),)
            yield _source("workloads", str(key), waits, partial(_leaving, key, index))

    def _migrations(self) -> Iterator[Source]:
        region, now, wall = self._region, self._region.clock.now(), self._region.clock.wall()
        moves = sorted(region.workloads.migrations.all.values(), key=lambda each: (not each.is_over, each.stages[0].at))
        for move in moves[-MOVES_SHOWN:]:
            made_of = (move,) if move.is_over else (object(),)
            make = partial(migration_view, region.workloads, region.fleet.fleet, move, now, wall)
            yield _source("migrations", move.id, made_of, partial(_plain, make))
        queue = region.workloads.queue
        for queued in queue.all.values():
            make = partial(queued_move_view, region.workloads, region.fleet.fleet, queued, now, wall)
            yield _source("migrations", queued.id, (queued, queue.reason_of(queued)), partial(_plain, make))

    def _figures(self) -> Source:
        """The newest values of the timeline, of the region (under an empty key) and of each workload."""
        kept = self._region.timeline
        keys = tuple(intent.key for intent in self._region.workloads.intents)
        return Source(("figures", ""), (kept.revision, keys), partial(_figures, kept.timeline, keys))

    def _agreements(self) -> Iterator[Source]:
        region = self._region
        trades = region.origin.trades if region.origin is not None else {}
        bids = tuple(region.delegate.states.values()) if region.delegate is not None else ()
        report = partial(service_report, region.fleet.fleet)
        for view in views.agreement_views(trades, bids, region.clock.now(), report):
            yield _source("agreements", f"{view.side}/{view.agreement}", (object(),), partial(plain, view))

    def _members(self) -> Iterator[Source]:
        membership = self.membership
        if membership is None or membership.current is None:
            return
        for member in views.federation_view(membership).members:
            yield _source("regions", member.region, (object(),), partial(plain, member))


def _source(table: str, name: str, made_of: tuple[object, ...], make: Callable[[], Row]) -> Source:
    """Of one row."""
    key = table, name
    return Source(key, made_of, lambda: ((key, make()),))


def _event_key(sequence: int) -> RowKey:
    return "events", f"{sequence:012}"


def _latest_key(sequence: int) -> RowKey:
    return "latest_events", f"{sequence:012}"


def _node(
    name: str,
    state: NodeState | None,
    desired: DesiredSet | None,
    costs: Mapping[Slot, UsdPerHour],
    stays: tuple[str, ...],
) -> Iterator[tuple[RowKey, Row]]:
    """state: None for a node that has gone, while replicas of it are still wanted. stays: why each replica stays."""
    if state is not None:
        node = node_row(views.node_view(state, desired, None))
        yield ("nodes", name), node
        yield ("node_states", name), node_state_row(node)
        for view in views.device_views(state, desired, costs):
            yield ("devices", f"{name}/{view.device.name}"), device_row(view)
    for one, why in zip(desired.assignments if desired is not None else (), stays, strict=True):
        placement = placement_row(views.placement_view(name, one, state, stays=why))
        yield ("placements", one.id), placement
        yield ("places", one.id), place_row(placement)


def _figures(kept: timeline.Timeline, keys: tuple[WorkloadKey, ...]) -> Iterator[tuple[RowKey, Row]]:
    for subject in (timeline.REGION, *map(str, keys)):
        yield ("figures", subject), figures_row(kept.newest(subject, FIGURES_SHOWN))


def _workload(intent: Intent, index: views.WorkloadIndex) -> Row:
    return workload_row(views.workload_view(intent, index))


def _leaving(key: WorkloadKey, index: views.WorkloadIndex) -> Row:
    return workload_row(views.leaving_view(key, index))


def _plain(make: Callable[[], operator_pb2.MigrationView]) -> Row:
    return plain(make())


def _is_same(before: tuple[object, ...], after: tuple[object, ...]) -> bool:
    return all(
        a is b or (isinstance(b, float | int | str | tuple) and a == b) for a, b in zip(before, after, strict=True)
    )
