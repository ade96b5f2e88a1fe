"""Moves replicas off a place that no longer keeps the policy's bounds: latency, cost, energy, carbon, the node's power.

As for a placement candidate, the upper end of measurement and prediction counts: a bound that may be missed is at
risk. Of estimated energy the middle counts (`Scope.figure_faults`). If no place fits, the relaxation steps of the
policy are tried in order.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, MoveProposal
from shoal.coordinator.core.migration.triggers.view import MovableReplica, TriggerView, deferred_proposal
from shoal.coordinator.core.placement.feasible import Constraint, PlacementFault
from shoal.coordinator.core.placement.relax import LIMIT_DIMENSIONS
from shoal.policies.resolve import PRICE_LABEL
from shoal.types.units import Seconds
from shoal.types.workload import Limits, Requirements

NAME: Final = "limits"
_CAUSES: Final = {
    Constraint.LATENCY: Cause.SLO,
    Constraint.COST: Cause.COST,
    Constraint.ENERGY: Cause.ENERGY,
    Constraint.CARBON: Cause.CARBON,
    Constraint.POWER: Cause.POWER,
}


def propose(view: TriggerView) -> Iterator[MoveProposal]:
    missing = [(replica, *found) for replica in view.replicas if (found := _limit_condition(view, replica)) is not None]
    turns = view.turns(NAME, [replica for replica, _, share in missing if share == 1.0])
    for replica, fault, share in missing:
        if replica.place.assignment in turns:
            yield _proposal_for(view, replica, fault)
        else:
            asked = deferred_proposal(replica, _cause(replica, fault.constraint), str(fault.refusal))
            yield replace(asked, is_fading=share < 1.0)


def _limit_condition(view: TriggerView, replica: MovableReplica) -> tuple[PlacementFault, float] | None:
    """The bound that it misses, and the share of the bounds at which it does; None: it keeps all."""
    intent = replica.intent
    for share in view.threshold_shares(replica, NAME):
        fault = _first_fault(view, replica, *_tighten(intent.require, intent.limits, share))
        if fault is not None:
            return fault, share
    return None


def _proposal_for(view: TriggerView, replica: MovableReplica, fault: PlacementFault) -> MoveProposal:
    intent = replica.intent
    found = view.forced_proposal(
        replica, _cause(replica, fault.constraint), str(fault.refusal), intent.require, intent.limits
    )
    for step in intent.relax:
        missed = _first_fault(view, replica, step.require, step.limits)
        if found.refusal is None or missed is None:
            break
        found = view.forced_proposal(
            replica, _cause(replica, missed.constraint), str(missed.refusal), step.require, step.limits
        )
    return found


def _first_fault(
    view: TriggerView, replica: MovableReplica, require: Requirements, limits: Limits
) -> PlacementFault | None:
    found = view.scope.figure_faults(replica.live_option, replica.intent, require, limits, is_running=True)
    return min(found, key=lambda fault: fault.constraint, default=None)


def _tighten(require: Requirements, limits: Limits, share: float) -> tuple[Requirements, Limits]:
    if require.latency_p95_s is not None:
        require = replace(require, latency_p95_s=Seconds(share * require.latency_p95_s))
    scaled = {name: share * bound for name in LIMIT_DIMENSIONS if (bound := getattr(limits, name)) is not None}
    return require, replace(limits, **scaled)


def _cause(replica: MovableReplica, order: Constraint) -> Cause:
    by_signal = PRICE_LABEL not in replica.live_option.state.node.labels
    return Cause.PRICE if order is Constraint.COST and by_signal else _CAUSES[order]
