"""Away from a place that does not keep the policy's bounds any more: latency, cost, energy, carbon, the node's power.

Judged as placement judges a candidate, the upper end of what is measured and predicted: a bound that may be missed is
at risk. Where placement had to relax the policy, the step counts at which something fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Proposal
from shoal.coordinator.core.migration.triggers.view import Replica, View, waiting
from shoal.coordinator.core.placement.feasible import Fault, Order
from shoal.policies.resolve import PRICE_LABEL
from shoal.types.units import Seconds
from shoal.types.workload import Limits, Requirements

NAME: Final = "limits"
_CAUSES: Final = {
    Order.LATENCY: Cause.SLO,
    Order.COST: Cause.COST,
    Order.ENERGY: Cause.ENERGY,
    Order.CARBON: Cause.CARBON,
    Order.POWER: Cause.POWER,
}


def propose(view: View) -> Iterator[Proposal]:
    missing = [(replica, *found) for replica in view.replicas if (found := _found(view, replica)) is not None]
    turns = view.turns([replica for replica, _, share in missing if share == 1.0])
    for replica, fault, share in missing:
        if replica.place.assignment in turns:
            yield _proposed(view, replica, fault)
        else:
            asked = waiting(replica, _cause(replica, fault.order), str(fault.refusal))
            yield replace(asked, fading=share < 1.0)


def _found(view: View, replica: Replica) -> tuple[Fault, float] | None:
    """What it misses, and the share of the bounds at which it does."""
    intent = replica.intent
    for share in view.shares(replica, NAME):
        fault = _missed(view, replica, *_tightened(intent.require, intent.limits, share))
        if fault is not None:
            return fault, share
    return None


def _proposed(view: View, replica: Replica, fault: Fault) -> Proposal:
    intent = replica.intent
    found = view.forced(replica, _cause(replica, fault.order), str(fault.refusal), intent.require, intent.limits)
    for step in intent.relax:
        missed = _missed(view, replica, step.require, step.limits)
        if found.refusal is None or missed is None:
            break
        found = view.forced(replica, _cause(replica, missed.order), str(missed.refusal), step.require, step.limits)
    return found


def _missed(view: View, replica: Replica, require: Requirements, limits: Limits) -> Fault | None:
    found = view.scope.figure_faults(replica.loaded, replica.intent, require, limits)
    return min(found, key=lambda fault: fault.order, default=None)


def _tightened(require: Requirements, limits: Limits, share: float) -> tuple[Requirements, Limits]:
    if require.latency_p95_s is not None:
        require = replace(require, latency_p95_s=Seconds(share * require.latency_p95_s))
    names = ("cost", "energy", "carbon", "node_power")
    scaled = {name: share * bound for name in names if (bound := getattr(limits, name)) is not None}
    return require, replace(limits, **scaled)


def _cause(replica: Replica, order: Order) -> Cause:
    by_signal = PRICE_LABEL not in replica.loaded.state.node.labels
    return Cause.PRICE if order is Order.COST and by_signal else _CAUSES[order]
