"""What a move of a replica is expected to bring, and what it brought."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.guard import figures_of
from shoal.coordinator.core.migration.model import Came, Cause, Done, Expected, Figures, Migration, Place, Service
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Inputs
from shoal.coordinator.core.placement.rank import gain, values
from shoal.coordinator.core.prediction.model import Basis, Interval, Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.coordinator.core.workloads.model import Delegated, World
from shoal.types.assignment import Observed
from shoal.types.device import Power, Rest
from shoal.types.migration import Against, MigrationRule
from shoal.types.offer import Offer
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Elapsed, Seconds, Watts
from shoal.types.workload import Intent, Weights

SETTLED_S: Final = Seconds(30.0)
"""After it was done so long, what a move brought is read."""
UNREAD_S: Final = Seconds(3600.0)
"""After it was done so long, it is not asked any more what a move brought that could not be read."""


def expected(scope: Scope, intent: Intent, source: Option, target: Option, calm: Option | None = None) -> Expected:
    """A replica that would move from `source`, as it does there, to `target`. calm: as it did there without the load
    of now, by which the target is judged; None: as `source`."""
    there = calibrated(scope, intent, calm or source, target)
    replicas = intent.require.replicas
    new, old = values(scope, there, intent, replicas), values(scope, source, intent, replicas)
    return Expected(
        before=_service(scope, intent, source),
        after=_service(scope, intent, there),
        gain=gain(new, old, intent.weights),
        fetch_bytes=missing_bytes(scope.inputs, target.slot.node, target.model.digest),
        seconds=both_s(scope.inputs.fleet, intent.migration, _p95_s(source), there.prediction),
    )


def expected_between(scope: Scope, intent: Intent, source: Place, target: Place) -> Expected | None:
    """The same, of places. None where one of them is not known any more."""
    known = [_option(scope, intent, each) for each in (source, target)]
    here, there = known
    return expected(scope, intent, here, there) if here is not None and there is not None else None


def expected_abroad(
    scope: Scope, intent: Intent, migration: Migration, home: Sequence[Place], away: Delegated
) -> Expected | None:  # fmt: skip
    """A whole workload that moves between its replicas at `home`, which serve or are to, and another region, by what
    that bid. None where either is not known."""
    options = [option for each in home if (option := _option(scope, intent, each)) is not None]
    bid, out = away.bid, migration.leaves_home
    if bid is None or not options:
        return None
    here, there = _together(scope, intent, options), _bid(bid, away)
    before, after = (here, there) if out else (there, here)
    lacks = {option.slot.node: missing_bytes(scope.inputs, option.slot.node, option.model.digest) for option in options}
    sent = scope.inputs.profiles[bid.model].size_bytes if out and not bid.cached else Bytes(0)
    loads = [option.prediction.load_s.mid for option in options if option.prediction is not None]
    return Expected(
        before=before,
        after=after,
        gain=gain_of(after, before, intent.weights),
        fetch_bytes=sent if out else Bytes(sum(lacks.values())),
        seconds=_whole_s(
            scope.inputs.fleet, migration.rule, before.latency_p95_s, after.latency_p95_s,
            bid.load_s if out else max(loads, default=math.nan),
        ),
    )  # fmt: skip


def is_settled(migration: Migration, sleep_after_s: Seconds | None, now: Elapsed) -> bool:
    """What a device is to sleep after shows once it does."""
    rests_s = sleep_after_s or 0.0 if migration.cause is Cause.CONSOLIDATION else 0.0
    return isinstance(migration.state, Done) and SETTLED_S + rests_s <= now - migration.state.at <= UNREAD_S


def came(
    scope: Scope, intent: Intent, migration: Migration, observed: Observed, now: Elapsed, fetched: Bytes | None
) -> Came | None:  # fmt: skip
    """What the replica that took over did since it was done; of a whole workload that came home, each of its replicas
    as that one. fetched: of the model's bytes, for it. None where there is nothing to compare it with."""
    state, target = migration.state, migration.target
    option = _option(scope, intent, target) if target is not None else None
    if not isinstance(state, Done) or option is None or option.prediction is None:
        return None
    since = figures_of(observed).since(state.target)
    latency_s = since.p95_s if any(since.latencies) else math.nan
    joules = since.joules / since.requests if since.requests else math.nan
    measured = replace(option, prediction=replace(option.prediction, joules=Interval(joules, joules, joules)))
    replicas = intent.require.replicas if migration.crosses else 1
    carbon = replicas * scope.carbon_g_per_h(measured, intent, intent.require.replicas)
    after = Service(latency_s, joules, replicas * option.cost, carbon)
    brought = _came(intent, migration, after, since, now, fetched)
    if brought is None or migration.cause is not Cause.CONSOLIDATION:
        return brought
    return replace(brought, gain=_watts_gain(scope, intent, migration, after))


def came_abroad(
    intent: Intent, migration: Migration, away: Delegated, figures: Figures, now: Elapsed, fetched: Bytes | None
) -> Came | None:  # fmt: skip
    """What the other region did since a workload was there: latency as this region's gateways saw it (figures),
    joules as it meters them itself, the rest as it bid."""
    if not isinstance(migration.state, Done) or away.bid is None:
        return None
    since = figures.since(migration.state.target)
    joules = away.joules if away.joules is not None and since.requests else math.nan
    carbon = away.bid.carbon * joules / away.bid.joules if away.bid.joules > 0 else math.nan
    latency_s = since.p95_s + away.way_s if any(since.latencies) else math.nan
    return _came(intent, migration, Service(latency_s, joules, away.bid.cost, carbon), since, now, fetched)


def fetched_for(world: World, migration: Migration) -> Bytes | None:
    """What the target's node, or its region, fetched of the model since the move began. None where that was not counted
    from then on."""
    target, began = migration.target, migration.story[0].at
    if target is None or world.counted_since is None or world.counted_since > began:
        return None
    by = target.assignment if target.region else target.node
    return Bytes(sum(each.size for each in world.fetched if (each.by, each.model) == (by, target.model)
                     and each.at >= began))  # fmt: skip


def awake_w(rest: Rest, receipt: Receipt, working_w: float) -> Watts:
    """Watts of a device that stays awake for one replica. working_w: joules of its inferences in a second; of them only
    what they take beyond idling is drawn as well."""
    return Watts(rest.idle_w + max(0.0, 1.0 - rest.idle_w / receipt.rates.active_w) * working_w)


def calibrated(scope: Scope, intent: Intent, source: Option, target: Option) -> Option:
    """`target` as it may be compared with a `source` that was measured: where it never ran the model, its roofline is
    off by as much as that of `source` was, so that two places are never compared on different grounds."""
    here, there = source.prediction, target.prediction
    if here is None or there is None or here.basis is Basis.ANALYTIC or there.basis is not Basis.ANALYTIC:
        return target
    batch, demand = intent.max_batch, scope.demand(source.profile)
    bound = predict(source.device, source.receipt, source.profile, source.precision, batch, demand=demand)
    if not isinstance(bound, Prediction):
        return target
    slower = _ratio(here.latency_p50_s.mid, bound.latency_p50_s.mid)
    hungrier = _ratio(here.joules.mid, bound.joules.mid)
    slower_at_most = _ratio(here.latency_p95_s.mid, bound.latency_p95_s.mid)
    likely = replace(
        there,
        latency_p50_s=_times(there.latency_p50_s, slower),
        latency_p95_s=_times(there.latency_p95_s, slower_at_most),
        joules=_times(there.joules, hungrier),
    )
    return replace(target, prediction=likely)


def both_s(fleet: Fleet, rule: MigrationRule, here_p95_s: float, there: Prediction | None) -> Seconds:
    """Seconds from the new replica's first to the old one's last, by the policy, each at the middle of its prediction;
    NaN where a time is unknown. here_p95_s: of the old one."""
    if there is None:
        return Seconds(math.nan)
    return _whole_s(fleet, rule, here_p95_s, there.latency_p95_s.mid, there.load_s.mid)


def _whole_s(fleet: Fleet, rule: MigrationRule, old_p95_s: float, new_p95_s: float, load_s: float) -> Seconds:
    compared_s = 0.0 if rule.against is Against.NONE else rule.samples * (old_p95_s + new_p95_s)
    step_s = max(rule.hold_s, fleet.timing.settle_s)
    return Seconds(load_s + compared_s + len(rule.steps) * step_s + rule.drain_s)


def missing_bytes(inputs: Inputs, node: str, model: str) -> Bytes:
    """What a node lacks of a model."""
    held = any(each.model == model for each in inputs.desired.get(node, ()))
    return Bytes(0 if held else inputs.profiles[model].size_bytes)


def _watts_gain(scope: Scope, intent: Intent, migration: Migration, after: Service) -> float:
    """Of a consolidation, in the terms that it was begun for: watts in the place of joules, with those of the device
    that was to sleep, as it does now. NaN where nobody knows."""
    source, hoped = _option(scope, intent, migration.source), migration.expected
    if hoped is None or source is None or source.receipt is None or source.device.rest is None:
        return math.nan
    rate, reading = scope.replica_rate(intent, intent.require.replicas), source.state.readings.get(source.device.name)
    sleeps = reading is not None and reading.power is Power.ASLEEP
    resting_w = source.device.rest.asleep_w if sleeps else source.device.rest.idle_w
    here = awake_w(source.device.rest, source.receipt, rate * hoped.before.joules)
    there = resting_w + rate * after.joules
    if math.isnan(there):
        return math.nan
    return gain_of(replace(after, joules=there), replace(hoped.before, joules=here), intent.weights)


def _option(scope: Scope, intent: Intent, place: Place) -> Option | None:
    """As it does there now, by what it served."""
    state = scope.inputs.fleet.nodes.get(place.node)
    device = state.device(place.device) if state is not None else None
    model = next((each for each in intent.models if each.digest == place.model), None)
    if state is None or device is None or model is None or place.model not in scope.inputs.profiles:
        return None
    observed = state.observed.get(place.assignment)
    measured, served = (observed.measured, observed.served) if observed is not None else (None, ())
    return scope.option(intent, model, state, device, served, measured)


def _p95_s(option: Option) -> float:
    return option.prediction.latency_p95_s.mid if option.prediction is not None else math.nan


def _service(scope: Scope, intent: Intent, option: Option) -> Service:
    known = option.prediction
    if known is None:
        return Service(cost=option.cost)
    carbon = scope.carbon_g_per_h(option, intent, intent.require.replicas)
    return Service(known.latency_p95_s.mid, known.joules.mid, option.cost, carbon)


def _together(scope: Scope, intent: Intent, options: Sequence[Option]) -> Service:
    """Of all replicas: the slowest, the mean joules of an inference, the sum of the others."""
    each = [_service(scope, intent, option) for option in options]
    return Service(
        latency_p95_s=max((one.latency_p95_s for one in each), key=lambda value: (math.isnan(value), value)),
        joules=math.fsum(one.joules for one in each) / len(each),
        cost=math.fsum(one.cost for one in each),
        carbon=math.fsum(one.carbon for one in each),
    )


def _bid(bid: Offer, away: Delegated) -> Service:
    return Service(bid.latency_p95_s + away.way_s, bid.joules, bid.cost, bid.carbon)


def _came(
    intent: Intent, migration: Migration, after: Service, since: Figures, now: Elapsed, fetched: Bytes | None
) -> Came | None:  # fmt: skip
    state, hoped = migration.state, migration.expected
    if not isinstance(state, Done) or hoped is None:
        return None
    took, over = Seconds(migration.story[-1].at - migration.story[0].at), Seconds(now - state.at)
    better = gain_of(after, hoped.before, intent.weights) if since.requests else math.nan
    return Came(after, better, took, over, since.requests, since.errors, fetched)


def gain_of(after: Service, before: Service, weights: Weights) -> float:
    """By what share one betters the other, as `rank.gain`."""
    new, old = ((each.latency_p95_s, each.cost, each.joules) for each in (after, before))
    return gain(new, old, weights)


def _ratio(measured: float, predicted: float) -> float:
    ratio = measured / predicted if predicted > 0 else 1.0
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0


def _times(interval: Interval, factor: float) -> Interval:
    return Interval(*(factor * each for each in interval))
