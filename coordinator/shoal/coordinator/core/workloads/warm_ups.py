"""What warm-ups measured, by (model, node, device): kept when the replica is gone, and what the region learns by."""

from collections.abc import Mapping
from typing import Final

from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import Trial
from shoal.coordinator.core.prediction.demand import at_shapes, demand_of, prepared_profile
from shoal.coordinator.core.prediction.residuals import Residual, residual_of
from shoal.coordinator.core.workloads.model import RegionState, WarmUpRecord
from shoal.types.assignment import Assignment, Observed

MOST_WARM_UPS: Final = 4096
"""Kept: about 1 KiB of the store each. Beyond, those of nodes that are gone are dropped first."""


def remember_warm_ups(
    world: RegionState, desired: Mapping[str, tuple[Assignment, ...]]
) -> tuple[WarmUpRecord, ...]:  # fmt: skip
    """The newest warm-up of each trial."""
    known = {each.trial: each for each in world.memory.measured}
    assigned = {one.id: one for each in desired.values() for one in each}
    for state in world.fleet.nodes.values():
        for name, observed in sorted(state.observed.items()):  # sorted, because two may be of one trial
            if observed.measured is None or not observed.measured.samples:  # it serves without a warm-up
                continue
            one = assigned.get(name)
            variant = one.variant if one is not None and one.preparation is not None else observed.model
            trial = Trial(variant, state.name, observed.device)
            # By repr, because NaN (unknown joules) is not equal to itself.
            if trial not in known or repr(known[trial].measured) != repr(observed.measured):
                residual = None if one is None else _residual(world, state, one, observed)
                known[trial] = WarmUpRecord(trial, observed.measured, residual)
    if len(known) > MOST_WARM_UPS:
        here = sorted(known, key=lambda trial: (trial.node not in world.fleet.nodes, trial))
        known = {trial: known[trial] for trial in here[:MOST_WARM_UPS]}
    return tuple(known[trial] for trial in sorted(known))


def _residual(world: RegionState, state: NodeState, one: Assignment, observed: Observed) -> Residual | None:
    """None where no receipt promised anything."""
    device, receipt = state.device(observed.device), state.receipts.get(observed.device)
    profile = world.profiles.get(observed.model)
    if device is None or receipt is None or profile is None or observed.measured is None:
        return None
    shapes = next((intent.shapes for intent in world.intents if intent.key == one.workload), {})
    profile = at_shapes(profile, shapes)
    if one.preparation is not None:
        profile = prepared_profile(profile, one.precision)
    precision = one.precision or profile.precision
    measured_s = observed.measured.latency_p50_s
    return residual_of(one.variant, device, receipt.rates, precision, demand_of(profile), measured_s)
