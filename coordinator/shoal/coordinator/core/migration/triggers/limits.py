"""Away from a place that does not keep the policy's bounds any more: latency, cost, energy, carbon, the node's power.

Judged as placement judges a candidate, the upper end of what is measured and predicted: a bound that may be missed is
at risk. Where placement had to relax the policy, the step counts at which something fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Proposal
from shoal.coordinator.core.migration.triggers.view import Replica, View
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
    for replica in view.replicas:
        for share in view.shares(replica, NAME):
            if (found := _proposed(view, replica, share)) is not None:
                yield replace(found, fading=share < 1.0)
                break


def _proposed(view: View, replica: Replica, share: float) -> Proposal | None:
    """share: of each bound."""
    intent = replica.intent
    found: Proposal | None = None
    levels = [(intent.require, intent.limits), *((step.require, step.limits) for step in intent.relax)]
    for require, limits in levels:
        missed = _missed(view, replica, *_tightened(require, limits, share))
        if missed is None:
            break
        found = view.forced(replica, _cause(replica, missed.order), str(missed.refusal), require, limits)
        if found.refusal is None:
            break
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
