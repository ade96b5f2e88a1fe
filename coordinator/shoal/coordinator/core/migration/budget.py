"""Which of the moves that something speaks for begin now, and what holds the others back.

A condition has to hold for a while. A workload rests for `cooldown` after each of its moves, whatever began it; on the
way back to a place that it left, twice as long for each time that it went to and fro within the last hour. So many of a
workload's replicas, and so many of the region's, move at once; one at a time looks for room on a device; windows bind
what could as well wait.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from shoal.coordinator.core.migration.machine import planned
from shoal.coordinator.core.migration.model import (
    NEVER,
    Aborted,
    Cause,
    Done,
    Limits,
    Migration,
    Planned,
    Proposal,
    Told,
)
from shoal.coordinator.core.migration.triggers import Look
from shoal.coordinator.core.migration.windows import next_open, open_at
from shoal.coordinator.core.workloads.model import Pending
from shoal.types.migration import MigrationRule
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds
from shoal.types.workload import Intent, WorkloadKey

HOLD_S: Final = Seconds(10.0)
"""A condition that holds for less speaks for nothing."""
UNSEEN_S: Final = Seconds(30.0)
"""What spoke for a move of a replica that could not be looked at for so long begins anew."""
RETURNS_S: Final = Seconds(3600.0)
"""So long it is remembered that a workload went to and fro."""
REGION_MOST: Final = 4
"""Moves of a region at once that nobody asked for; and as many between it and others."""
FORCED: Final = frozenset({Cause.SLO, Cause.HEAT, Cause.POWER, Cause.NOTICE, Cause.WAKE})
"""These cannot wait for a window."""
URGENT_MOST: Final = 8
"""Of those that have a deadline, which the others do not hold back."""
UNASKED: Final = Limits(planned_s=Seconds(15.0))
"""There was room as it began: it takes it, or gives up."""
UNPLACED_S: Final = Seconds(60.0)
"""The longest rest after a move that found no room, and so moved nothing."""
ASKED: Final = frozenset({Cause.OPERATOR, Cause.DOCUMENTS, Cause.DRAIN})
CAN_WAIT: Final = frozenset({Cause.COST, Cause.FAILBACK})
"""Of moves between regions, those that have no deadline."""


class Hold(StrEnum):
    """What holds a move back."""

    UNASKED = "unasked"
    """Its policy lets nothing move unasked."""
    GAIN = "gain"
    """It would gain less than is asked."""
    NO_PLACE = "no-place"
    SETTLING = "settling"
    """Its condition has not held for long."""
    COOLDOWN = "cooldown"
    WINDOW = "window"
    OTHERS = "others"
    """As many of its workload's replicas as may move do, or another goes first."""
    TURN = "turn"
    """Where it could go is looked at after that of others."""
    REGION = "region"
    """As many of the region's."""


@dataclass(frozen=True, slots=True)
class Held:
    """until: then it will not be held back by this any more; 0: nobody knows."""

    proposal: Proposal
    hold: Hold
    why: str
    until: Wall = NEVER

    def __str__(self) -> str:
        one = self.proposal
        to = f" to {one.aim.where}" if one.aim.where else ""
        return f"{one.source.where}{to} ({one.cause}: {one.reason}): {self.why}"


@dataclass(frozen=True, slots=True)
class Allotted:
    """begun: with what is told of each. news: held back by something else than was told before."""

    begun: tuple[tuple[Migration, tuple[Told, ...]], ...]
    held: tuple[Held, ...]
    news: tuple[Held, ...]
    pending: Mapping[str, Pending]


def allot(
    look: Look, pending: Mapping[str, Pending], assigned: frozenset[str], migrations: Mapping[str, Migration],
    intents: Mapping[WorkloadKey, Intent], now: Elapsed, wall: Wall,
) -> Allotted:  # fmt: skip
    """assigned: replicas that are there; of others nothing is remembered. Asked again with what it answered, it begins
    nothing more."""
    kept = _kept(look, pending, assigned, now)
    book = _Book(migrations, intents, now, wall)
    begun = list[tuple[Migration, tuple[Told, ...]]]()
    held, news = list[Held](), list[Held]()
    for key, proposal in sorted(look.found, key=_rank):
        found = book.holds(proposal, kept[key].since)
        if found is None:
            begun.append(book.begin(proposal))
            kept[key] = replace(kept[key], told="")
            continue
        held.append(found)
        if found.hold not in (Hold.SETTLING, Hold.TURN) and kept[key].told != found.hold:
            kept[key] = replace(kept[key], told=str(found.hold))
            news.append(found)
    return Allotted(tuple(begun), tuple(held), tuple(news), dict(sorted(kept.items())))


def holds_at_home(
    key: WorkloadKey, rule: MigrationRule, migrations: Collection[Migration], now: Elapsed, wall: Wall
) -> tuple[Hold, str, Wall] | None:  # fmt: skip
    """The first thing that holds back a move of a workload between regions which can wait and nobody asked for, why,
    and until when (0: nobody knows)."""
    live = [each for each in migrations if not each.is_over]
    mine = sorted(each.id for each in live if each.workload == key)
    if mine:
        return Hold.OTHERS, f"{', '.join(mine)} first", NEVER
    if sum(each.crosses and each.cause in CAN_WAIT for each in live) >= REGION_MOST:
        return Hold.REGION, f"{REGION_MOST} moves between regions are under way", NEVER
    rests_s, why = _rests_s(key, migrations, rule.cooldown_s, now, _went)
    if rests_s > 0:
        return Hold.COOLDOWN, why, Wall(wall + rests_s)
    if not open_at(rule.windows, wall):
        return Hold.WINDOW, "outside the policy's windows", next_open(rule.windows, wall)
    return None


def _kept(
    look: Look, pending: Mapping[str, Pending], assigned: frozenset[str], now: Elapsed
) -> dict[str, Pending]:  # fmt: skip
    """What speaks for a move now, and what may go on to, as nobody looked whether it does."""
    known = {key: each for key, each in pending.items() if each.unseen is None or now - each.unseen < UNSEEN_S}
    kept = dict[str, Pending]()
    for key, each in known.items():
        name = key.partition(" ")[0]
        if key not in look.judged and name in assigned:
            since = now if each.unseen is None else each.unseen
            kept[key] = replace(each, unseen=None if name in look.seen else since)
    return kept | {key: replace(known.get(key, Pending(now)), unseen=None) for key, _ in look.found}


def _rank(found: tuple[str, Proposal]) -> tuple[bool, bool, float, str]:
    """What has a deadline, then what is forced, then what gains most."""
    key, one = found
    return not one.urgent, one.cause not in FORCED, -(one.expected.gain if one.expected is not None else 0.0), key


class _Book:
    def __init__(
        self, migrations: Mapping[str, Migration], intents: Mapping[WorkloadKey, Intent], now: Elapsed, wall: Wall
    ) -> None:
        self._all = dict(migrations)
        self._intents = intents
        self._now = now
        self._wall = wall

    def holds(self, one: Proposal, since: Elapsed) -> Held | None:
        """The first thing that holds it back."""
        rule = self._intents[one.workload].migration
        live = [each for each in self._all.values() if not each.is_over]
        mine = [each for each in live if each.workload == one.workload]
        if one.refusal is not None:
            return Held(one, Hold.NO_PLACE, one.refusal.found)
        if len(mine) >= rule.max_concurrent or any(each.source.assignment == one.source.assignment for each in mine):
            return Held(one, Hold.OTHERS, f"{', '.join(sorted(each.id for each in mine))} first")
        if one.waits:
            return Held(one, Hold.SETTLING if one.fading else Hold.TURN, "its places are looked at after others'")
        if (first := self._first(one, live)) is not None:
            return Held(one, Hold.OTHERS, f"{first.id} first")
        if one.urgent:
            if sum(each.cause is one.cause for each in live) >= URGENT_MOST:
                return Held(one, Hold.REGION, f"{URGENT_MOST} moves of the region with a deadline are under way")
            return None
        if sum(each.cause not in ASKED and not each.crosses for each in live) >= REGION_MOST:
            return Held(one, Hold.REGION, f"{REGION_MOST} moves of the region are under way")
        if one.fading:
            return Held(one, Hold.SETTLING, "just below its threshold again")
        if (left := since + HOLD_S - self._now) > 0:
            return Held(one, Hold.SETTLING, f"since {show_seconds(self._now - since)}", Wall(self._wall + left))
        rests_s, why = _rests_s(
            one.workload, self._all.values(), rule.cooldown_s, self._now, lambda each: _between(each, one)
        )
        if rests_s > 0:
            return Held(one, Hold.COOLDOWN, why, Wall(self._wall + rests_s))
        if one.cause not in FORCED and not open_at(rule.windows, self._wall):
            return Held(one, Hold.WINDOW, "outside the policy's windows", next_open(rule.windows, self._wall))
        return None

    def begin(self, one: Proposal) -> tuple[Migration, tuple[Told, ...]]:
        asked = Migration(
            self._name(one), one.workload, one.cause, "", one.source, one.aim,
            self._intents[one.workload].migration, Planned(Elapsed(0.0), Elapsed(0.0)),
            reason=one.reason, expected=one.expected,
        )  # fmt: skip
        migration, told = planned(asked, self._now, self._wall, UNASKED)
        self._all[migration.id] = migration
        return migration, told

    def _first(self, one: Proposal, live: Sequence[Migration]) -> Migration | None:
        """What changes where there is room, and is not in the books yet; and of devices that may sleep without their
        replica, one after the other, or two would swap theirs."""
        unasked = sorted((each for each in live if each.cause not in ASKED), key=lambda each: each.id)
        to = (one.aim.node, one.aim.device)
        return next(
            (
                each
                for each in unasked
                if (isinstance(each.state, Planned) and (each.aim.node, each.aim.device) == to)
                or one.cause is each.cause is Cause.CONSOLIDATION
            ),
            None,
        )

    def _name(self, one: Proposal) -> str:
        stem, number = "m-" + one.source.assignment.removeprefix("a-"), 1
        while f"{stem}-{number}" in self._all:
            number += 1
        return f"{stem}-{number}"


def _rests_s(
    key: WorkloadKey, migrations: Collection[Migration], cooldown_s: Seconds, now: Elapsed,
    between: Callable[[Migration], bool],
) -> tuple[float, str]:  # fmt: skip
    """Seconds until a workload has rested, and from what. between: whether a move went to and fro between the places of
    the one that is to begin."""
    ended = [(_ended_at(each), each) for each in migrations if each.workload == key]
    over = [(at, each) for at, each in ended if at is not None]
    if not over:
        return 0.0, ""
    last_at, last = max(over, key=lambda each: (each[0], each[1].id))
    times = sum(between(each) for at, each in over if at > now - RETURNS_S)
    if isinstance(last.state, Aborted) and last.target is None:
        cooldown_s = min(cooldown_s, UNPLACED_S)
    rest_s = cooldown_s * 2 ** max(0, times - 1) if between(last) else cooldown_s
    back = f", {times} times between these places" if rest_s > cooldown_s else ""
    return last_at + rest_s - now, f"{show_seconds(rest_s)} after {last.id}{back}"


def _ended_at(migration: Migration) -> Elapsed | None:
    match migration.state:
        case Done(at=at) | Aborted(at=at):
            return at
        case _:
            return None


def _went(migration: Migration) -> bool:
    """It went from home to another region, or back."""
    return migration.crosses and isinstance(migration.state, Done)


def _between(migration: Migration, one: Proposal) -> bool:
    """Whether it went to and fro between the two places of a proposal."""
    places = {(each.node, each.device, each.model) for each in (migration.source, migration.target) if each is not None}
    here = one.source
    return isinstance(migration.state, Done) and places == {
        (here.node, here.device, here.model), (one.aim.node, one.aim.device, one.aim.model)
    }  # fmt: skip
