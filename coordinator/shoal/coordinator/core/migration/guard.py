"""Whether the new replica does as well as the old one while it takes more and more of its requests."""

import math
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Expected, Figures, Migration, Reading, Shifting, Sight
from shoal.types.assignment import Observed
from shoal.types.migration import MigrationRule

ENOUGH: Final = 20
"""Requests of a step before its p95 says something."""
CLEAR: Final = 5
"""Errors after which nobody waits for the end of a step."""
UNFELT_S: Final = 0.005
"""A p95 that is longer by less than this trips no guard, whatever their ratio: at a millisecond that is noise."""


def figures_of(observed: Observed | None) -> Figures:
    if observed is None:
        return Figures()
    return Figures(
        requests=sum(each.requests for each in observed.served),
        errors=sum(each.errors for each in observed.served),
        joules=math.fsum(each.joules for each in observed.served),
        latencies=observed.latencies,
    ).with_p95()


def counted(sight: Sight) -> Figures:
    return sight.figures if sight.figures is not None else figures_of(sight.observed)


def judged(
    rule: MigrationRule, step: Shifting, source: Figures, target: Figures, chosen: Expected | None, held_s: float
) -> Reading:  # fmt: skip
    """What came of both in this step. Without any request there is nothing to say against it. The old one counts as it
    was in the step before where that was longer, or where it had too few: of the few that are left to it at the end
    the p95 is short."""
    old, new = source.since(step.source), target.since(step.target)
    old = replace(old, p95_s=max(step.source.p95_s, old.p95_s if old.requests >= ENOUGH else 0.0))
    fair_s = measure_s(old, new, chosen)
    bound_s = max(rule.guard_p95 * fair_s, fair_s + UNFELT_S)
    slow = new.requests >= ENOUGH and old.p95_s > 0 and new.surely_s > bound_s
    passed = not slow and not _failing(rule, new)
    return Reading(rule.steps[step.step], replace(old, latencies=()), replace(new, latencies=()), held_s, passed)


def chosen_with(migration: Migration) -> Expected | None:
    """What the new one's place was chosen with. None of a new version: that has to show itself against the old one,
    whatever its operations let expect."""
    target = migration.target
    is_new = migration.cause is Cause.DOCUMENTS and target is not None and target.model != migration.source.model
    return None if is_new else migration.expected


def measure_s(old: Figures, new: Figures, chosen: Expected | None) -> float:
    """What the new one's p95 is held against: that of the old one, or what it was chosen with where that is longer.
    Else nothing could ever leave a fast device for a slow one that is good enough."""
    expected_s = chosen.after.latency_p95_s - new.way_s if chosen is not None else 0.0
    return max(old.p95_s, 0.0 if math.isnan(expected_s) else expected_s)


def tripped(rule: MigrationRule, reading: Reading) -> bool:
    """So clearly that the step is ended before its time."""
    return reading.target.errors >= CLEAR and _failing(rule, reading.target)


def _failing(rule: MigrationRule, target: Figures) -> bool:
    return target.errors > rule.guard_errors * target.requests
