"""Expected and actual outcome of a move."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.durations import took_s, waits_s
from shoal.coordinator.core.migration.guard import stats_of
from shoal.coordinator.core.migration.model import (
    ActualOutcome,
    Cause,
    DoneState,
    ExpectedOutcome,
    Migration,
    ReplicaPlace,
    RequestStats,
    ServiceFigures,
)
from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.feasible import Option, Scope, awake_w
from shoal.coordinator.core.placement.model import Inputs
from shoal.coordinator.core.placement.rank import gain, predicted_values, served_values
from shoal.coordinator.core.placement.score import carbon, cost, energy, latency
from shoal.coordinator.core.prediction.model import Basis, Interval, Prediction
from shoal.coordinator.core.workloads.model import DelegatedWorkload, RegionState
from shoal.types.assignment import Observed
from shoal.types.device import PowerState
from shoal.types.migration import MigrationRule
from shoal.types.offer import Offer
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import Intent, Weights

OUTCOME_AFTER_S: Final = Seconds(30.0)
"""Time after its end at which a move's outcome is measured."""
OUTCOME_EXPIRY_S: Final = Seconds(3600.0)
"""Time after its end from which on an outcome that could not be measured is given up."""


def expected_outcome(
    scope: Scope, intent: Intent, source: Option, target: Option, baseline: Option | None = None
) -> ExpectedOutcome:
    """Outcome of moving a replica from `source`, with its current figures, to `target`. baseline: the source's
    figures without the current load, by which the target is judged; None: `source`."""
    there = calibrate(scope, baseline or source, target)
    fetch_bytes = missing_bytes(scope.inputs, target.slot.node, target.model.digest)
    replicas, source = intent.require.replicas, _awake_beside(source, there)
    new, old = predicted_values(scope, there, intent, replicas), predicted_values(scope, source, intent, replicas)
    return ExpectedOutcome(
        before=_service_figures(scope, intent, source),
        after=_service_figures(scope, intent, there),
        gain=gain(new, old, intent.weights),
        fetch_bytes=fetch_bytes,
        seconds=overlap_s(scope.inputs, intent.migration, _p95_s(source), there.prediction, fetch_bytes),
        overhead_s=scope.inputs.move_overheads.of(fetch_bytes),
    )


def gain_with_energy(
    scope: Scope, intent: Intent, source: Option, target: Option, figures: tuple[float, float]
) -> float:
    """The gain that `expected_outcome` gives, but for the energy term. figures: that term before and after the move, in
    any one unit."""
    there = calibrate(scope, source, target)
    old, new = (
        tuple(
            figure if term is energy.TERM else term.predict(scope, option, intent, intent.require.replicas)
            for term in score.TERMS
        )
        for option, figure in zip((_awake_beside(source, there), there), figures, strict=True)
    )
    return gain(new, old, intent.weights)


def _awake_beside(source: Option, there: Option) -> Option:
    """The source as it is compared. That it may sleep afterwards counts only against a target that would have to wake:
    `consolidate` weighs sleep by time and by coming peaks."""
    return replace(source, wakes=source.wakes and there.wakes)


def expected_outcome_between(
    scope: Scope, intent: Intent, source: ReplicaPlace, target: ReplicaPlace
) -> ExpectedOutcome | None:
    """The same for two places; None if one of them no longer exists."""
    known = [_option(scope, intent, each) for each in (source, target)]
    here, there = known
    return expected_outcome(scope, intent, here, there) if here is not None and there is not None else None


def expected_remote_outcome(
    scope: Scope, intent: Intent, migration: Migration, home: Sequence[ReplicaPlace], away: DelegatedWorkload
) -> ExpectedOutcome | None:  # fmt: skip
    """Outcome of moving a whole workload between its local replicas (`home`, serving or planned) and another region,
    by that region's bid. None if either is unknown."""
    options = [option for each in home if (option := _option(scope, intent, each)) is not None]
    bid, out = away.bid, migration.leaves_region
    if bid is None or not options:
        return None
    here, there = _aggregate(scope, intent, options), _offered_figures(bid, away)
    before, after = (here, there) if out else (there, here)
    lacks = {option.slot.node: missing_bytes(scope.inputs, option.slot.node, option.model.digest) for option in options}
    sent = scope.inputs.profiles[bid.model].size_bytes if out and not bid.cached else Bytes(0)
    loads = [option.prediction.load_s.mid for option in options if option.prediction is not None]
    return ExpectedOutcome(
        before=before,
        after=after,
        gain=gain_of(after, before, intent.weights),
        fetch_bytes=sent if out else Bytes(sum(lacks.values())),
        seconds=waits_s(
            scope.inputs.fleet, migration.rule, before.latency_p95_s, after.latency_p95_s,
            bid.load_s if out else max(loads, default=math.nan),
        ),
    )  # fmt: skip


def is_outcome_due(migration: Migration, sleep_after_s: Seconds | None, now: Elapsed) -> bool:
    """True while the outcome can be measured. For a consolidation, only after the device had time to fall asleep."""
    rests_s = sleep_after_s or 0.0 if migration.cause is Cause.CONSOLIDATION else 0.0
    return (
        isinstance(migration.state, DoneState)
        and OUTCOME_AFTER_S + rests_s <= now - migration.state.at <= OUTCOME_EXPIRY_S
    )


def actual_outcome(
    scope: Scope, intent: Intent, migration: Migration, observed: Observed, now: Elapsed, fetched: Bytes | None
) -> ActualOutcome | None:  # fmt: skip
    """What the new replica did since the move was done; for a workload that came back, each replica counts as this
    one. fetched: bytes of the model fetched for it. None if there is nothing to compare with."""
    state, target = migration.state, migration.target
    option = _option(scope, intent, target) if target is not None else None
    if not isinstance(state, DoneState) or option is None or option.prediction is None:
        return None
    since = stats_of(observed).since(state.target)
    latency_s = since.p95_s if any(since.latencies) else math.nan
    joules = since.joules / since.requests if since.requests else math.nan
    replicas = intent.require.replicas if migration.is_cross_region else 1
    carbon = replicas * scope.emissions_g_per_h(joules, intent, intent.require.replicas)
    after = ServiceFigures(latency_s, joules, replicas * option.cost, carbon)
    brought = _outcome(intent, migration, after, since, now, fetched)
    if brought is None or migration.cause is not Cause.CONSOLIDATION:
        return brought
    return replace(brought, gain=_watts_gain(scope, intent, migration, after))


def actual_remote_outcome(
    intent: Intent,
    migration: Migration,
    away: DelegatedWorkload,
    figures: RequestStats,
    now: Elapsed,
    fetched: Bytes | None,
) -> ActualOutcome | None:
    """What the other region did since the workload moved there. Latency: as this region's gateways saw it (figures);
    joules: as that region meters them; the rest: as it bid."""
    if not isinstance(migration.state, DoneState) or away.bid is None:
        return None
    since = figures.since(migration.state.target)
    joules = away.joules if away.joules is not None and since.requests else math.nan
    carbon = away.bid.carbon * joules / away.bid.joules if away.bid.joules > 0 else math.nan
    latency_s = since.p95_s + away.rtt_s if any(since.latencies) else math.nan
    return _outcome(intent, migration, ServiceFigures(latency_s, joules, away.bid.cost, carbon), since, now, fetched)


def fetched_bytes(world: RegionState, migration: Migration) -> Bytes | None:
    """Bytes of the model that the target's node, or its region, fetched since the move began. None if they were not
    counted from then on."""
    target, began = migration.target, migration.stages[0].at
    if target is None or world.fetches_counted_since is None or world.fetches_counted_since > began:
        return None
    by = target.assignment if target.region else target.node
    return Bytes(sum(each.size for each in world.fetches if (each.by, each.model) == (by, target.model)
                     and each.at >= began))  # fmt: skip


def calibrate(scope: Scope, source: Option, target: Option) -> Option:
    """`target` made comparable with a measured `source`. If it never ran the model, its prediction is scaled by the
    error of what would be predicted of the source without its own measurement, so that both places are compared on the
    same basis."""
    here, there = source.prediction, target.prediction
    if here is None or there is None or here.basis is not Basis.HERE or there.basis is Basis.HERE:
        return target
    bound = scope.prediction_unmeasured(source)
    if not isinstance(bound, Prediction):
        return target
    slower = _ratio(here.latency_p50_s.mid, bound.latency_p50_s.mid)
    hungrier = _ratio(here.joules.mid, bound.joules.mid)
    slower_at_most = _ratio(here.latency_p95_s.mid, bound.latency_p95_s.mid)
    likely = replace(
        there,
        latency_p50_s=_scale(there.latency_p50_s, slower),
        latency_p95_s=_scale(there.latency_p95_s, slower_at_most),
        joules=_scale(there.joules, hungrier),
    )
    return replace(target, prediction=likely)


def overlap_s(
    inputs: Inputs, rule: MigrationRule, here_p95_s: float, there: Prediction | None, fetch_bytes: Bytes
) -> Seconds:
    """Seconds from the start of the new replica to the end of the old one by the policy, each time at the middle of
    its prediction, and what the region's moves took beyond that; NaN if one is unknown. here_p95_s: the old
    replica's. fetch_bytes: what the new one's node lacks of the model."""
    if there is None:
        return Seconds(math.nan)
    waits = waits_s(inputs.fleet, rule, here_p95_s, there.latency_p95_s.mid, there.load_s.mid)
    return Seconds(max(0.0, waits + inputs.move_overheads.of(fetch_bytes))) if math.isfinite(waits) else waits


def missing_bytes(inputs: Inputs, node: str, model: str) -> Bytes:
    """Bytes of a model that a node does not have yet."""
    held = any(each.model == model for each in inputs.assignments_on(node))
    return Bytes(0 if held else inputs.profiles[model].size_bytes)


def _watts_gain(scope: Scope, intent: Intent, migration: Migration, after: ServiceFigures) -> float:
    """Gain of a consolidation in the terms that it was started for: watts instead of joules, including the device
    that was to sleep, in its current state. NaN if unknown."""
    source, expected = _option(scope, intent, migration.source), migration.expected
    if expected is None or source is None or source.receipt is None or source.device.rest is None:
        return math.nan
    rate, reading = scope.energy_rate(intent, intent.require.replicas), source.state.readings.get(source.device.name)
    sleeps = reading is not None and reading.power is PowerState.ASLEEP
    resting_w = source.device.rest.asleep_w if sleeps else source.device.rest.idle_w
    here = awake_w(source.device.rest, source.receipt, rate * expected.before.joules)
    there = resting_w + rate * after.joules
    if math.isnan(there):
        return math.nan
    return gain_of(replace(after, joules=there), replace(expected.before, joules=here), intent.weights)


def _option(scope: Scope, intent: Intent, place: ReplicaPlace) -> Option | None:
    """The place with its current figures, by what it served; None if it no longer exists."""
    state = scope.inputs.fleet.nodes.get(place.node)
    device = state.device(place.device) if state is not None else None
    model = next((each for each in intent.models if each.variant == place.variant), None)
    if state is None or device is None or model is None or place.model not in scope.inputs.profiles:
        return None
    observed = state.observed.get(place.assignment)
    measured, served = (observed.measured, observed.served) if observed is not None else (None, ())
    return scope.option(intent, model, state, device, served, measured)


def _p95_s(option: Option) -> float:
    return option.prediction.latency_p95_s.mid if option.prediction is not None else math.nan


def _service_figures(scope: Scope, intent: Intent, option: Option) -> ServiceFigures:
    known = option.prediction
    if known is None:
        return ServiceFigures(cost=option.cost)
    carbon = scope.emissions_g_per_h(known.joules.mid, intent, intent.require.replicas)
    return ServiceFigures(known.latency_p95_s.mid, known.joules.mid, option.cost, carbon)


def _aggregate(scope: Scope, intent: Intent, options: Sequence[Option]) -> ServiceFigures:
    """Figures of all replicas together: the slowest latency, the mean joules per inference, the sum of the others."""
    each = [_service_figures(scope, intent, option) for option in options]
    return ServiceFigures(
        latency_p95_s=latency.TERM.combine([one.latency_p95_s for one in each]),
        joules=energy.TERM.combine([one.joules for one in each]),
        cost=cost.TERM.combine([one.cost for one in each]),
        carbon=carbon.TERM.combine([one.carbon for one in each]),
    )


def _offered_figures(bid: Offer, away: DelegatedWorkload) -> ServiceFigures:
    return ServiceFigures(bid.latency_p95_s + away.rtt_s, bid.joules, bid.cost, bid.carbon)


def _outcome(
    intent: Intent,
    migration: Migration,
    after: ServiceFigures,
    since: RequestStats,
    now: Elapsed,
    fetched: Bytes | None,
) -> ActualOutcome | None:
    state, expected = migration.state, migration.expected
    if not isinstance(state, DoneState) or expected is None:
        return None
    over = Seconds(now - state.at)
    better = gain_of(after, expected.before, intent.weights) if since.requests else math.nan
    return ActualOutcome(after, better, took_s(migration), over, since.requests, since.errors, fetched)


def gain_of(after: ServiceFigures, before: ServiceFigures, weights: Weights) -> float:
    """Relative gain of one over the other, as in `rank.gain`."""
    return gain(served_values(after), served_values(before), weights)


def _ratio(measured: float, predicted: float) -> float:
    ratio = measured / predicted if predicted > 0 else 1.0
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0


def _scale(interval: Interval, factor: float) -> Interval:
    return Interval(*(factor * each for each in interval))
