"""What a workload asks for at a time: the objective of its schedule, and the traffic that is declared for it.

Both are looked at ahead of time: what has to stand when a peak comes is begun as long before as waking a device,
loading, being compared and taking over may take (`lead_s`). A peak that is about to come counts as well as one that is
there, so a place is left only once it has passed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.model import RegionFacts
from shoal.coordinator.core.workloads.model import Remembered
from shoal.policies.cel import Expression
from shoal.types.codes import ShoalError
from shoal.types.offer import Demand
from shoal.types.units import PerSecond, Seconds, Wall
from shoal.types.workload import Declared, Intent, Traffic, Weights

SETTLE_S: Final = Seconds(2.0)
"""The least that a step of a move is held (`migration.Limits.settle_s` of a region that beats once a second)."""
VERIFY_S: Final = Seconds(5.0)
"""What comparing may take where nothing is amiss, and every other wait of a move."""
LOAD_S: Final = Seconds(10.0)
"""Loading and warming up, where nobody has seen it."""
LOOKS: Final = 4
"""Times between now and `lead_s` later at which a peak is looked for."""


def holding(intent: Intent, region: RegionFacts, wall: Wall, lead: Seconds) -> Intent:
    """The intent with the weights and rates that hold: of the schedule at `wall` + `lead`, of traffic from now until
    then. `declared` keeps what the documents say. An expression that gives no answer does not hold. A workload that may
    not move unasked has room for its peaks at any time."""
    if not is_timely(intent):
        return intent
    moments = tuple(Wall(wall + lead * step / LOOKS) for step in range(LOOKS + 1))
    weights = _weights(intent, region, moments[-1])
    moves = intent.migration.unasked
    traffic = tuple(_traffic(each, region, moments, always=not moves) for each in intent.traffic)
    return replace(intent, weights=weights, traffic=traffic, declared=Declared(intent.weights, intent.traffic))


def demanded(traffic: Iterable[Traffic]) -> tuple[Demand, ...]:
    """What another region is asked for: it cannot move a workload ahead of a peak that it knows nothing of."""
    return tuple(
        Demand(each.origin, PerSecond(max(each.rate, each.peak)) if each.when else each.rate, each.peak)
        for each in traffic
    )


def is_timely(intent: Intent) -> bool:
    """Whether what it asks for depends on the time."""
    return bool(intent.schedule) or any(each.when for each in intent.traffic)


def lead_s(intent: Intent, fleet: Fleet, measured: tuple[Remembered, ...]) -> Seconds:
    """How long before a time what holds then is to be begun: the slowest device wakes, the model loads, is compared and
    takes over."""
    models = {model.digest for model in intent.models}
    loads = [each.measured.load_s for each in measured if each.trial.model in models]
    wakes = [
        device.rest.wake_s for state in fleet.nodes.values() for device in state.node.devices if device.rest is not None
    ]
    rule = intent.migration
    shifting = len(rule.steps) * max(rule.hold_s, SETTLE_S)
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
        return Expression.compile(when).evaluate(now=datetime.fromtimestamp(wall, UTC), region=fields(region))
    except ShoalError:
        return False


def fields(region: RegionFacts) -> Mapping[str, object]:
    """`region` as an expression sees it."""
    return {"name": region.name, "residency": region.residency, "carbon": region.carbon_g_per_kwh}
