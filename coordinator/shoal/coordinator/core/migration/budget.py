"""Decides which of the proposed moves start now, and what holds the others back.

A condition has to be sustained for `SUSTAINED_S`. A workload rests for `cooldown` after each of its moves, whatever
the cause. Before a return to a place that it left it rests longer: the cooldown doubles with each further move
between the two places in the last hour. The number of simultaneous moves is limited per workload and per tenant, and
the number of those that start a replica per region: a policy may hold a shift for hours, which others do not wait for.
Only one move at a time searches for room on a device. Windows bind the moves that can wait.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from shoal.coordinator.core.migration.machine import start
from shoal.coordinator.core.migration.model import (
    NEVER,
    AbortedState,
    Cause,
    DoneState,
    DrainingState,
    Migration,
    MigrationEvent,
    MigrationLimits,
    MoveProposal,
    PlannedState,
    ShiftingState,
)
from shoal.coordinator.core.migration.triggers import TriggerScan
from shoal.coordinator.core.migration.windows import is_open_at, next_open
from shoal.coordinator.core.workloads.model import PendingMove
from shoal.types.migration import MigrationRule
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds
from shoal.types.workload import Intent, WorkloadKey

SUSTAINED_S: Final = Seconds(10.0)
"""A condition that holds for less starts no move."""
UNSEEN_EXPIRY_S: Final = Seconds(30.0)
"""If a replica could not be observed for this long, its pending conditions start over."""
RETURN_MEMORY_S: Final = Seconds(3600.0)
"""Moves back and forth between two places count for this long."""
REGION_MOST: Final = 4
"""Most automatic moves within a region whose new replica does not serve yet, all of which have a deadline; and most
moves between it and others."""
TENANT_MOST: Final = 4
"""Most simultaneous automatic moves of one tenant within a region, however long its policies hold them."""
FORCED_CAUSES: Final = frozenset({Cause.SLO, Cause.HEAT, Cause.POWER, Cause.NOTICE, Cause.WAKE, Cause.PREEMPTION})
"""These cannot wait for a window."""
URGENT_MOST: Final = 8
"""Most simultaneous moves of one cause that have a deadline; other moves do not hold these back."""
AUTOMATIC_LIMITS: Final = MigrationLimits(planned_s=Seconds(15.0))
"""An automatic move saw room when it began: it gets that room soon, or gives up."""
UNPLACED_COOLDOWN_S: Final = Seconds(60.0)
"""Longest rest after a move that found no room and so moved nothing."""
REQUESTED_CAUSES: Final = frozenset({Cause.OPERATOR, Cause.DOCUMENTS, Cause.DRAIN})
DEFERRABLE_CAUSES: Final = frozenset({Cause.COST, Cause.FAILBACK})
"""Moves between regions that have no deadline."""


class HoldReason(StrEnum):
    """What holds a move back."""

    NOT_AUTOMATIC = "not-automatic"
    """The policy allows no automatic moves."""
    GAIN = "gain"
    """The gain is below the required one."""
    NO_PLACE = "no-place"
    SETTLING = "settling"
    """The condition has not been sustained for long enough."""
    COOLDOWN = "cooldown"
    WINDOW = "window"
    OTHERS = "others"
    """The workload's limit of simultaneous moves is reached, or another move goes first."""
    TURN = "turn"
    """Its places are searched in a later scan."""
    REGION = "region"
    """The limit of simultaneous moves of the region or of the tenant is reached."""


@dataclass(frozen=True, slots=True)
class MoveHold:
    """A proposed move that does not start, and why."""

    # The move that is held back.
    proposal: MoveProposal
    # Kind of the obstacle.
    hold: HoldReason
    # The obstacle in words.
    why: str
    # When this obstacle ends; 0: unknown.
    until: Wall = NEVER
    # What an operator can do so that it moves; empty: nothing.
    remedy: str = ""

    def __str__(self) -> str:
        one = self.proposal
        to = f" to {one.aim.where}" if one.aim.where else ""
        return f"{one.source.where}{to} ({one.cause}: {one.reason}): {self.why}"


@dataclass(frozen=True, slots=True)
class MoveSelection:
    """Which proposed moves start."""

    # New migrations, each with its events.
    started_moves: tuple[tuple[Migration, tuple[MigrationEvent, ...]], ...]
    # Every proposal that does not start.
    move_holds: tuple[MoveHold, ...]
    # Those of `move_holds` that have another obstacle than the one reported last.
    new_holds: tuple[MoveHold, ...]
    # State for the next call, by `ASSIGNMENT TRIGGER`.
    pending: Mapping[str, PendingMove]


def select_moves(
    scan: TriggerScan,
    pending: Mapping[str, PendingMove],
    assigned: frozenset[str],
    migrations: Mapping[str, Migration],
    intents: Mapping[WorkloadKey, Intent],
    now: Elapsed,
    wall: Wall,
) -> MoveSelection:
    """assigned: existing replicas; the pending conditions of any other are dropped. Idempotent: called again with
    its own result, it starts nothing more."""
    kept = _next_pending(scan, pending, assigned, now)
    book = _MoveBudget(migrations, intents, now, wall)
    begun = list[tuple[Migration, tuple[MigrationEvent, ...]]]()
    held, news = list[MoveHold](), list[MoveHold]()
    for key, proposal in sorted(scan.proposals, key=_rank):
        found = book.first_hold(proposal, kept[key].since)
        if found is None:
            begun.append(book.begin(proposal))
            kept[key] = replace(kept[key], told="")
            continue
        held.append(found)
        if found.hold not in (HoldReason.SETTLING, HoldReason.TURN) and kept[key].told != found.hold:
            kept[key] = replace(kept[key], told=str(found.hold))
            news.append(found)
    return MoveSelection(tuple(begun), tuple(held), tuple(news), dict(sorted(kept.items())))


def cross_region_hold(
    key: WorkloadKey, rule: MigrationRule, migrations: Collection[Migration], now: Elapsed, wall: Wall
) -> tuple[HoldReason, str, Wall] | None:  # fmt: skip
    """The first obstacle to an automatic, deferrable move of a workload between regions: kind, why, and until when
    (0: unknown). None if it may start."""
    live = [each for each in migrations if not each.is_over]
    mine = sorted(each.id for each in live if each.workload == key)
    if mine:
        return HoldReason.OTHERS, f"{', '.join(mine)} first", NEVER
    if sum(each.is_cross_region and each.cause in DEFERRABLE_CAUSES for each in live) >= REGION_MOST:
        return HoldReason.REGION, f"{REGION_MOST} moves between regions are under way", NEVER
    rests_s, why = _cooldown_left_s(key, migrations, rule.cooldown_s, now, _is_completed_cross_region)
    if rests_s > 0:
        return HoldReason.COOLDOWN, why, Wall(wall + rests_s)
    if not is_open_at(rule.windows, wall):
        return HoldReason.WINDOW, "outside the policy's windows", next_open(rule.windows, wall)
    return None


def _next_pending(
    scan: TriggerScan, pending: Mapping[str, PendingMove], assigned: frozenset[str], now: Elapsed
) -> dict[str, PendingMove]:  # fmt: skip
    """Conditions that hold now, and those that may still hold because their replica could not be observed."""
    known = {key: each for key, each in pending.items() if each.unseen is None or now - each.unseen < UNSEEN_EXPIRY_S}
    kept = dict[str, PendingMove]()
    for key, each in known.items():
        name = key.partition(" ")[0]
        if key not in scan.evaluated_keys and name in assigned:
            since = now if each.unseen is None else each.unseen
            kept[key] = replace(each, unseen=None if name in scan.known_replicas else since)
    return kept | {key: replace(known.get(key, PendingMove(now)), unseen=None) for key, _ in scan.proposals}


def _rank(found: tuple[str, MoveProposal]) -> tuple[bool, bool, float, str]:
    """Moves with a deadline first, then forced ones, then the greatest gain."""
    key, one = found
    return (
        not one.is_urgent,
        one.cause not in FORCED_CAUSES,
        -(one.expected.gain if one.expected is not None else 0.0),
        key,
    )


class _MoveBudget:
    def __init__(
        self, migrations: Mapping[str, Migration], intents: Mapping[WorkloadKey, Intent], now: Elapsed, wall: Wall
    ) -> None:
        self._all = dict(migrations)
        self._intents = intents
        self._now = now
        self._wall = wall

    def first_hold(self, one: MoveProposal, since: Elapsed) -> MoveHold | None:
        """The first obstacle to a move; None if it may start."""
        rule = self._intents[one.workload].migration
        live = [each for each in self._all.values() if not each.is_over]
        mine = [each for each in live if each.workload == one.workload]
        if one.refusal is not None:
            return MoveHold(one, HoldReason.NO_PLACE, one.refusal.found)
        if len(mine) >= rule.max_concurrent or any(each.source.assignment == one.source.assignment for each in mine):
            return MoveHold(one, HoldReason.OTHERS, f"{', '.join(sorted(each.id for each in mine))} first")
        if one.is_deferred:
            return MoveHold(
                one, HoldReason.SETTLING if one.is_fading else HoldReason.TURN, "its places are looked at after others'"
            )
        if (first := self._blocking_move(one, live)) is not None:
            return MoveHold(one, HoldReason.OTHERS, f"{first.id} first")
        if one.is_urgent:
            if sum(each.cause is one.cause for each in live) >= URGENT_MOST:
                return MoveHold(
                    one, HoldReason.REGION, f"{URGENT_MOST} moves of the region with a deadline are under way"
                )
            return None
        unasked = [each for each in live if each.cause not in REQUESTED_CAUSES and not each.is_cross_region]
        if sum(each.workload.tenant == one.workload.tenant for each in unasked) >= TENANT_MOST:
            return MoveHold(one, HoldReason.REGION, f"{TENANT_MOST} moves of the tenant are under way")
        if sum(not isinstance(each.state, ShiftingState | DrainingState) for each in unasked) >= REGION_MOST:
            return MoveHold(one, HoldReason.REGION, f"{REGION_MOST} moves of the region start replicas")
        if one.is_fading:
            return MoveHold(one, HoldReason.SETTLING, "just below its threshold again")
        if (left := since + SUSTAINED_S - self._now) > 0:
            return MoveHold(
                one, HoldReason.SETTLING, f"since {show_seconds(self._now - since)}", Wall(self._wall + left)
            )
        rests_s, why = _cooldown_left_s(
            one.workload,
            self._all.values(),
            rule.cooldown_s,
            self._now,
            lambda each: _is_between_same_places(each, one),
        )
        if rests_s > 0:
            return MoveHold(one, HoldReason.COOLDOWN, why, Wall(self._wall + rests_s))
        if one.cause not in FORCED_CAUSES and not is_open_at(rule.windows, self._wall):
            return MoveHold(one, HoldReason.WINDOW, "outside the policy's windows", next_open(rule.windows, self._wall))
        return None

    def begin(self, one: MoveProposal) -> tuple[Migration, tuple[MigrationEvent, ...]]:
        asked = Migration(
            self._new_name(one), one.workload, one.cause, "", one.source, one.aim,
            self._intents[one.workload].migration, PlannedState(Elapsed(0.0), Elapsed(0.0)),
            reason=one.reason, expected=one.expected,
        )  # fmt: skip
        migration, told = start(asked, self._now, self._wall, AUTOMATIC_LIMITS)
        self._all[migration.id] = migration
        return migration, told

    def _blocking_move(self, one: MoveProposal, live: Sequence[Migration]) -> Migration | None:
        """A live automatic move that has to finish first: it waits for room on the same device and is not in the
        allocations yet. Consolidations also run one at a time, or else two could swap their devices."""
        unasked = sorted((each for each in live if each.cause not in REQUESTED_CAUSES), key=lambda each: each.id)
        to = (one.aim.node, one.aim.device)
        return next(
            (
                each
                for each in unasked
                if (isinstance(each.state, PlannedState) and (each.aim.node, each.aim.device) == to)
                or one.cause is each.cause is Cause.CONSOLIDATION
            ),
            None,
        )

    def _new_name(self, one: MoveProposal) -> str:
        stem, number = "m-" + one.source.assignment.removeprefix("a-"), 1
        while f"{stem}-{number}" in self._all:
            number += 1
        return f"{stem}-{number}"


def _cooldown_left_s(
    key: WorkloadKey, migrations: Collection[Migration], cooldown_s: Seconds, now: Elapsed,
    is_return: Callable[[Migration], bool],
) -> tuple[float, str]:  # fmt: skip
    """Seconds until the workload's cooldown is over, and what it follows. is_return: whether a past move was between
    the two places of the new one."""
    ended = [(_end_time(each), each) for each in migrations if each.workload == key]
    over = [(at, each) for at, each in ended if at is not None]
    if not over:
        return 0.0, ""
    last_at, last = max(over, key=lambda each: (each[0], each[1].id))
    times = sum(is_return(each) for at, each in over if at > now - RETURN_MEMORY_S)
    if isinstance(last.state, AbortedState) and last.target is None:
        cooldown_s = min(cooldown_s, UNPLACED_COOLDOWN_S)
    rest_s = cooldown_s * 2 ** max(0, times - 1) if is_return(last) else cooldown_s
    back = f", {times} times between these places" if rest_s > cooldown_s else ""
    return last_at + rest_s - now, f"{show_seconds(rest_s)} after {last.id}{back}"


def _end_time(migration: Migration) -> Elapsed | None:
    match migration.state:
        case DoneState(at=at) | AbortedState(at=at):
            return at
        case _:
            return None


def _is_completed_cross_region(migration: Migration) -> bool:
    """True if it moved the workload to another region or back."""
    return migration.is_cross_region and isinstance(migration.state, DoneState)


def _is_between_same_places(migration: Migration, one: MoveProposal) -> bool:
    """True if it moved a replica between the two places of the proposal, in either direction."""
    here, past = one.source, (migration.source, migration.target)
    places = {(each.node, each.device, each.variant) for each in past if each is not None}
    return isinstance(migration.state, DoneState) and places == {
        (here.node, here.device, here.variant), (one.aim.node, one.aim.device, one.aim.model)
    }  # fmt: skip
