"""What a workload asks for at a given time: the objective of its schedule, and its declared traffic.

Both are evaluated ahead of time, because a place for a peak takes up to `lead_s` to prepare: waking a device,
loading, verification and shifting. A coming peak counts like a current one, so a place is left only after the peak.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.model import RegionFacts, Trial
from shoal.policies.cel import Expression
from shoal.types.assignment import Measured
from shoal.types.codes import ShoalError
from shoal.types.offer import Demand
from shoal.types.units import DURATION, PerSecond, Seconds, Wall
from shoal.types.workload import DeclaredValues, Intent, Traffic, Weights

ROUTE_PROPAGATION_S: Final = Seconds(2.0)
"""Shortest shift step of a move (`MigrationLimits.route_propagation_s` of a region with a heartbeat of one second)."""
VERIFY_S: Final = Seconds(5.0)
"""Time for verification without failures, and for every other wait of a move."""
LOAD_S: Final = Seconds(10.0)
"""Time for loading and warming up if it was never measured."""
_NOW: Final = re.compile(r"\bnow\b")
"""The variable of a selector that changes by itself."""
LONGEST_LEAD_S: Final = Seconds(DURATION.most)
"""Nobody looks further ahead, whatever nodes and documents say of their times: `now` must stay a date."""
PEAK_CHECKS: Final = 4
"""Number of times between now and `lead_s` later at which a peak is looked for."""


def effective_intent(intent: Intent, region: RegionFacts, wall: Wall, lead: Seconds) -> Intent:
    """The intent with its effective weights and rates: the schedule's at `wall` + `lead`, the traffic's from now
    until then. `declared` keeps the documents' values. An expression that fails does not hold. A workload that may
    not move automatically has room for its peaks at all times."""
    if not is_time_dependent(intent):
        return intent
    ahead = min(LONGEST_LEAD_S, lead)  # in this order, the longest where a node's time is no number
    moments = tuple(Wall(wall + ahead * step / PEAK_CHECKS) for step in range(PEAK_CHECKS + 1))
    weights = _weights(intent, region, moments[-1])
    moves = intent.migration.automatic
    traffic = tuple(_traffic(each, region, moments, always=not moves) for each in intent.traffic)
    return replace(intent, weights=weights, traffic=traffic, declared=DeclaredValues(intent.weights, intent.traffic))


def demand_of(traffic: Iterable[Traffic]) -> tuple[Demand, ...]:
    """Traffic to ask another region for. It includes every peak, because that region cannot move a workload ahead of
    a peak that it does not know."""
    return tuple(
        Demand(each.origin, PerSecond(max(each.rate, each.peak)) if each.when else each.rate, each.peak)
        for each in traffic
    )


def depends_on_time(intent: Intent) -> bool:
    """True if what it asks for, or where it may run, changes by itself."""
    selectors = (intent.require.where, *intent.prefer)
    return is_time_dependent(intent) or any(_NOW.search(each) is not None for each in selectors)


def is_time_dependent(intent: Intent) -> bool:
    """True if what it asks for depends on the time."""
    return bool(intent.schedule) or any(each.when for each in intent.traffic)


def lead_s(intent: Intent, fleet: Fleet, measured: Mapping[Trial, Measured]) -> Seconds:
    """How long before a time to start preparing for it: the slowest device wakes, the model loads, is verified and
    takes over."""
    models = {model.variant for model in intent.models}
    loads = [each.load_s + each.prepare_s for trial, each in measured.items() if trial.model in models]
    wakes = [
        device.rest.wake_s for state in fleet.nodes.values() for device in state.node.devices if device.rest is not None
    ]
    rule = intent.migration
    shifting = len(rule.steps) * max(rule.hold_s, ROUTE_PROPAGATION_S)
    return Seconds(max(wakes, default=0.0) + max(loads, default=LOAD_S) + VERIFY_S + shifting)


def _weights(intent: Intent, region: RegionFacts, wall: Wall) -> Weights:
    return next((each.weights for each in intent.schedule if _holds(each.when, region, wall)), intent.weights)


def _traffic(traffic: Traffic, region: RegionFacts, moments: tuple[Wall, ...], *, always: bool) -> Traffic:
    if not traffic.when:
        return traffic
    peaks = always or any(_holds(traffic.when, region, moment) for moment in moments)
    return replace(traffic, rate=PerSecond(max(traffic.rate, traffic.peak) if peaks else traffic.rate))


def _holds(when: str, region: RegionFacts, wall: Wall) -> bool:
    try:
        return Expression.compile(when).evaluate(now=datetime.fromtimestamp(wall, UTC), region=region.fields)
    except ShoalError:
        return False
