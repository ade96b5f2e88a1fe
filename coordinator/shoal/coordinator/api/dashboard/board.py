"""Keeps the rows of the dashboard's tables as the region is now, in slices that never hold the loop.

The rows come from the messages that the command line shows (`api/views.py`). A message is built only for what changed:
the fleet's and the desired states are immutable values, so another object is another state. While nobody looks, nothing
is computed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, Protocol

from shoal.coordinator.api import views
from shoal.coordinator.api.dashboard.feed import RowChange, RowKey
from shoal.coordinator.api.dashboard.rows import (
    Row,
    device_row,
    event_row,
    figures_row,
    node_row,
    placement_row,
    plain,
    row_text,
    workload_row,
)
from shoal.coordinator.api.migrations import migration_view
from shoal.coordinator.controllers.federation.membership import FederationMembership
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core import timeline
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import PlacementPlan, Slot
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.types.assignment import Assignment, DesiredSet
from shoal.types.units import UsdPerHour
from shoal.types.workload import Intent, WorkloadKey
from shoal.v1 import operator_pb2

SLICE_S: Final = 0.004
"""The loop is given back after this much work."""
TICK_S: Final = 0.1
"""Shortest time between two looks at the region."""
IDLE_FACTOR: Final = 9
"""After a look that took t, wait at least 9 t: looking takes a tenth of the loop at most."""
EVENTS_SHOWN: Final = 400
"""Newest events in their table."""
FIGURES_SHOWN: Final = 30
"""Newest fine steps of the timeline in a row: five minutes."""
UNPRICED: Final = UsdPerHour(math.nan)
MOVES_SHOWN: Final = 200
"""Newest migrations in their table, those under way first."""


class Federated(Protocol):
    @property
    def membership(self) -> FederationMembership: ...


class Source(NamedTuple):
    """Where a row comes from."""

    # Table and key of the row.
    key: RowKey
    # Values that decide what the row says. States are compared by identity, figures and texts by value.
    made_of: tuple[object, ...]
    # Makes the row; called only if one of these is another than before.
    make: Callable[[], Row]


class Pace:
    """Gives the loop its turns during long work, and measures that work."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self.worked_s = 0.0
        self.longest_s = 0.0
        """The longest that the loop was held."""

    async def breathe(self) -> None:
        if self._now() - self._began >= SLICE_S:
            await self.rest()

    async def rest(self) -> None:
        took = self._now() - self._began
        self.worked_s += took
        self.longest_s = max(self.longest_s, took)
        await asyncio.sleep(0)
        self._began = self._now()


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
        self._shown: dict[RowKey, tuple[tuple[object, ...], str]] = {}
        """What each row was made of, and its JSON."""
        self._shown_events: deque[int] = deque()
        """Numbers of the events in their table, oldest first."""
        self._stays: tuple[PlacementPlan | None, dict[str, str]] = None, {}
        """Of the plan: why replicas stay, by assignment."""
        self.longest_slice_s = 0.0
        """The longest that any look held the loop."""

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

    async def run(self) -> None:
        """Until cancelled: follows the region while somebody reads."""
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
            past = await log.events_after(0, EVENTS_SHOWN)
            after = past[0].sequence - 1 if past else 0
        else:
            after = shown[-1]
        async for event in log.follow(after):
            shown.append(event.sequence)
            changes: list[RowChange] = [(_event_key(event.sequence), row_text(event_row(views.event_view(event))))]
            if len(shown) > EVENTS_SHOWN:
                changes.append((_event_key(shown.popleft()), None))
            self._publish(changes)
            await asyncio.sleep(0)

    async def look(self, pace: Pace) -> None:
        """One look at everything; publishes what changed."""
        present: set[RowKey] = set()
        changes: list[RowChange] = []
        for source in self._sources():
            present.add(source.key)
            known = self._shown.get(source.key)
            if known is None or not _is_same(known[0], source.made_of):
                text = row_text(source.make())
                if known is None or known[1] != text:
                    changes.append((source.key, text))
                self._shown[source.key] = source.made_of, text
            await pace.breathe()
        for key in self._shown.keys() - present:
            del self._shown[key]
            changes.append((key, None))
        if changes:
            self._publish(changes)
        await pace.rest()
        self.longest_slice_s = max(self.longest_slice_s, pace.longest_s)

    def _sources(self) -> Iterator[Source]:
        yield Source(("region", self._region.config.name), (object(),), self._describe)
        yield from self._fleet()
        yield from self._placements()
        yield from self._workloads()
        yield from self._migrations()
        yield from self._agreements()
        yield from self._members()
        yield from self._figures()

    def _fleet(self) -> Iterator[Source]:
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        costs = controller.costs
        for name, state in fleet.nodes.items():
            desired = controller.desired.get(name)
            yield Source(("nodes", name), (state, desired), partial(_node, state, desired))
            for index, device in enumerate(state.node.devices):
                price = costs.get(Slot(name, device.name), UNPRICED)
                make = partial(_device, state, desired, price, index)
                yield Source(("devices", f"{name}/{device.name}"), (state, desired, price), make)

    def _placements(self) -> Iterator[Source]:
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        if self._stays[0] is not controller.last_plan:
            self._stays = controller.last_plan, views.stay_reasons(controller.last_plan)
        for node, desired in tuple(controller.desired.items()):
            state = fleet.nodes.get(node)
            for each in desired.assignments:
                stays = self._stays[1].get(each.id, "")
                yield Source(
                    ("placements", each.id), (each, state, stays), partial(_placement, node, each, state, stays)
                )

    def _workloads(self) -> Iterator[Source]:
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        index = views.WorkloadIndex.of_region(controller, fleet)
        for intent in controller.intents:
            key = intent.key
            made_of = (
                intent,
                index.plans.get(key),
                index.ready[key],
                index.is_behind(intent),
                tuple(index.waits.get(key, ())),
                index.ingress_of(key),
                controller.last_intents.get(key),
                controller.delegations.get(key),
                controller.routes_to_other_region(key),
            )
            yield Source(("workloads", str(key)), made_of, partial(self._workload, intent, index))
        for key in views.leaving_workloads(controller, index):
            waits = (tuple(index.waits.get(key, ())),)
            yield Source(("workloads", str(key)), waits, partial(_leaving, key, index))

    def _workload(self, intent: Intent, index: views.WorkloadIndex) -> Row:
        return workload_row(views.workload_view(self._region.workloads, intent, index))

    def _migrations(self) -> Iterator[Source]:
        region, now, wall = self._region, self._region.clock.now(), self._region.clock.wall()
        moves = sorted(region.workloads.migrations.all.values(), key=lambda each: (not each.is_over, each.stages[0].at))
        for move in moves[-MOVES_SHOWN:]:
            made_of = (move,) if move.is_over else (object(),)
            make = partial(migration_view, region.workloads, region.fleet.fleet, move, now, wall)
            yield Source(("migrations", move.id), made_of, partial(_plain, make))

    def _figures(self) -> Iterator[Source]:
        """The newest values of the timeline, of the region (under an empty key) and of each workload."""
        kept = self._region.timeline
        for key in (timeline.REGION, *(str(intent.key) for intent in self._region.workloads.intents)):
            yield Source(("figures", key), (kept.revision,), partial(_figures, kept.timeline, key))

    def _agreements(self) -> Iterator[Source]:
        region = self._region
        trades = region.origin.trades if region.origin is not None else {}
        bids = tuple(region.delegate.states.values()) if region.delegate is not None else ()
        report = partial(service_report, region.fleet.fleet)
        for view in views.agreement_views(trades, bids, region.clock.now(), report):
            yield Source(("agreements", f"{view.side}/{view.agreement}"), (object(),), partial(plain, view))

    def _members(self) -> Iterator[Source]:
        membership = self.membership
        if membership is None or membership.current is None:
            return
        for member in views.federation_view(membership).members:
            yield Source(("regions", member.region), (object(),), partial(plain, member))


def _event_key(sequence: int) -> RowKey:
    return "events", f"{sequence:012}"


def _node(state: NodeState, desired: DesiredSet | None) -> Row:
    return node_row(views.node_view(state, desired, None))


def _device(state: NodeState, desired: DesiredSet | None, price: UsdPerHour, index: int) -> Row:
    costs = {Slot(state.name, state.node.devices[index].name): price}
    return device_row(list(views.device_views(state, desired, costs))[index])


def _placement(node: str, one: Assignment, state: NodeState | None, stays: str) -> Row:
    return placement_row(views.placement_view(node, one, state, stays=stays))


def _figures(kept: timeline.Timeline, key: str) -> Row:
    return figures_row(key, kept.newest(key, FIGURES_SHOWN))


def _leaving(key: WorkloadKey, index: views.WorkloadIndex) -> Row:
    return workload_row(views.leaving_view(key, index))


def _plain(make: Callable[[], operator_pb2.MigrationView]) -> Row:
    return plain(make())


def _is_same(before: tuple[object, ...], after: tuple[object, ...]) -> bool:
    return all(
        a is b or (isinstance(b, float | int | str | tuple) and a == b) for a, b in zip(before, after, strict=True)
    )
