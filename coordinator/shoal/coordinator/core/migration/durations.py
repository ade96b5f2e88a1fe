"""How long a move takes: what it waits for, and what earlier moves of the region took beyond that."""

import math
from collections.abc import Iterable
from statistics import median
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.model import DoneState, Migration
from shoal.coordinator.core.placement.model import NO_OVERHEADS, MoveOverheads
from shoal.types.migration import Against, MigrationRule
from shoal.types.units import Seconds

MOST_MOVES: Final = 32
"""The newest of a kind that count. A region that got faster or slower is known by half of them."""


def waits_s(fleet: Fleet, rule: MigrationRule, old_p95_s: float, new_p95_s: float, load_s: float) -> Seconds:
    """Of the load, the comparison, the steps, and the requests that the old replica still has; NaN if one is unknown.
    An old replica drains for the longest of its requests, and `drain_s` is the most that it may take."""
    compared_s = 0.0 if rule.against is Against.NONE else rule.samples * (old_p95_s + new_p95_s)
    step_s = max(rule.hold_s, fleet.timing.route_propagation_s)
    return Seconds(load_s + compared_s + len(rule.steps) * step_s + min(rule.drain_s, old_p95_s))


def took_s(migration: Migration) -> Seconds:
    """From its first stage to its last one so far."""
    return Seconds(migration.stages[-1].at - migration.stages[0].at)


def move_overheads(migrations: Iterable[Migration]) -> MoveOverheads:
    """The median of what moves within the region took beyond `waits_s`, apart for those whose node had the model. One
    kind stands for the other where there was none yet."""
    done = [
        (each.stages[-1].at, each.id, expected.fetch_bytes > 0, took_s(each) - (expected.seconds - expected.overhead_s))
        for each in migrations
        if isinstance(each.state, DoneState)
        and not each.is_cross_region
        and not each.gap
        and (expected := each.expected) is not None
        and math.isfinite(expected.seconds)
    ]
    if not done:
        return NO_OVERHEADS
    beyond = dict[bool, list[float]]()
    for *_, is_fetched, seconds in sorted(done, reverse=True):
        beyond.setdefault(is_fetched, []).append(seconds)
    cached, fetched = (Seconds(median((beyond.get(kind) or beyond[not kind])[:MOST_MOVES])) for kind in (False, True))
    return MoveOverheads(cached, fetched)
