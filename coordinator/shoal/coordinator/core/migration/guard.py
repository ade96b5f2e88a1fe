"""The guard: compares the new replica with the old one while requests shift in steps."""

import math
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import (
    Cause,
    ExpectedOutcome,
    GuardReading,
    Migration,
    ReplicaObservation,
    RequestStats,
    ShiftingState,
)
from shoal.types.assignment import Observed
from shoal.types.migration import MigrationRule

MIN_REQUESTS: Final = 20
"""Requests in a step below which its p95 is not meaningful."""
LATE_SIGMAS: Final = 3.0
"""Standard deviations between two shares of missed deadlines that are no coincidence: one in 740 (two-proportion
z-test)."""
EARLY_END_ERRORS: Final = 5
"""Errors from which on a step may end early."""
P95_NOISE_S: Final = 0.005
"""A p95 longer by less than this never trips the guard, whatever the ratio: at a millisecond it is noise."""


def stats_of(observed: Observed | None) -> RequestStats:
    if observed is None:
        return RequestStats()
    return RequestStats(
        requests=sum(max(0, each.requests - each.refused) for each in observed.served),
        errors=sum(each.errors for each in observed.served),
        joules=math.fsum(each.joules for each in observed.served),
        latencies=observed.latencies,
        late=sum(each.late for each in observed.served),
    ).with_p95()


def observed_stats(sight: ReplicaObservation) -> RequestStats:
    return sight.stats if sight.stats is not None else stats_of(sight.observed)


def evaluate_step(
    rule: MigrationRule,
    step: ShiftingState,
    source: RequestStats,
    target: RequestStats,
    chosen: ExpectedOutcome | None,
    held_s: float,
) -> GuardReading:
    """Judges both replicas over this step. Without requests nothing counts against the new one. The old replica's
    p95 is that of the step before if that was longer or if this step had too few requests: with few requests left to
    it near the end, its p95 is short."""
    old, new = source.since(step.source), target.since(step.target)
    old = replace(old, p95_s=max(step.source.p95_s, old.p95_s if old.requests >= MIN_REQUESTS else 0.0))
    fair_s = reference_p95_s(old, new, chosen)
    bound_s = max(rule.guard_p95 * fair_s, fair_s + P95_NOISE_S)
    slow = new.requests >= MIN_REQUESTS and old.p95_s > 0 and new.p95_lower_bound_s > bound_s
    passed = not slow and not _is_failing(rule, new) and not _misses_more_deadlines(rule, old, new)
    return GuardReading(rule.steps[step.step], replace(old, latencies=()), replace(new, latencies=()), held_s, passed)


def placement_expectation(migration: Migration) -> ExpectedOutcome | None:
    """The prediction that the new place was chosen with. None for a new version: it has to match the old replica,
    whatever its operations predict."""
    target = migration.target
    is_new = migration.cause is Cause.DOCUMENTS and target is not None and target.model != migration.source.model
    return None if is_new else migration.expected


def reference_p95_s(old: RequestStats, new: RequestStats, chosen: ExpectedOutcome | None) -> float:
    """The p95 that the new replica is held to: the old replica's, or the predicted one if longer. Otherwise nothing
    could leave a fast device for a slow one that is good enough."""
    expected_s = chosen.after.latency_p95_s - new.way_s if chosen is not None else 0.0
    return max(old.p95_s, 0.0 if math.isnan(expected_s) else expected_s)


def should_end_early(rule: MigrationRule, reading: GuardReading) -> bool:
    """True if the failure is clear enough to end the step before its time."""
    return reading.target.errors >= EARLY_END_ERRORS and _is_failing(rule, reading.target)


def _misses_more_deadlines(rule: MigrationRule, old: RequestStats, new: RequestStats) -> bool:
    """True if the new replica missed significantly more of its clients' deadlines than the old one did. Deadlines
    that neither can meet do not count, because the same clients call both."""
    if old.requests < MIN_REQUESTS or new.requests < MIN_REQUESTS:
        return False
    both = (old.late + new.late) / (old.requests + new.requests)
    deviation = math.sqrt(both * (1 - both) * (1 / old.requests + 1 / new.requests))
    return new.late / new.requests - old.late / old.requests > LATE_SIGMAS * deviation


def _is_failing(rule: MigrationRule, target: RequestStats) -> bool:
    return target.errors > rule.guard_errors * target.requests
