"""What warm-ups measured, by (model, node, device): kept when the replica is gone, and what the region learns by."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from immutables import Map

from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import Trial
from shoal.coordinator.core.prediction.demand import at_shapes, demand_of, prepared_profile
from shoal.coordinator.core.prediction.load_law import sizes_of
from shoal.coordinator.core.prediction.residuals import Residual, residual_of, with_service
from shoal.coordinator.core.workloads.model import RegionState
from shoal.types.assignment import Assignment, Measured, Observed

MOST_WARM_UPS: Final = 4096
"""Kept: about 1 KiB of the store each. Beyond, those of nodes that are gone are dropped first."""


class WarmUps(NamedTuple):
    """All that is kept, as `ReconcilerMemory` has it, and where something changed."""

    measured: Map[Trial, Measured]
    residuals: Map[Trial, Residual]
    # Nodes of which another figure is kept than before, or none any more.
    nodes: frozenset[str]


def remember_warm_ups(world: RegionState, nodes: Iterable[str]) -> WarmUps:
    """The newest warm-up of each trial. nodes: those that may report one that is not known."""
    known, residuals, changed = world.memory.measured, world.memory.residuals, set[str]()
    for node in sorted(nodes):
        state = world.fleet.nodes.get(node)
        if state is None or not any(each.measured is not None for each in state.observed.values()):
            continue
        assigned = {one.id: one for one in world.desired[node].assignments} if node in world.desired else {}
        for name, observed in sorted(state.observed.items()):  # sorted, because two may be of one trial
            if observed.measured is None or not observed.measured.samples:  # it serves without a warm-up
                continue
            one = assigned.get(name)
            variant = one.variant if one is not None and one.preparation is not None else observed.model
            trial = Trial(variant, node, observed.device)
            before = known.get(trial)
            # By repr, because NaN (unknown joules) is not equal to itself.
            is_same = before is observed.measured or repr(before) == repr(observed.measured)
            seen = residuals.get(trial)
            if is_same and (seen is None or seen.is_plausible):
                later = with_service(seen, observed.measured, observed.served) if seen is not None else None
                if later is not None and later is not seen:
                    residuals = residuals.set(trial, later)
                    changed.add(node)
                continue
            # New, or of an older version, with other operator classes.
            known = known.set(trial, observed.measured)
            residual = None if one is None else _residual(world, state, one, observed)
            if residual is not None:
                residuals = residuals.set(trial, residual)
            elif trial in residuals:
                residuals = residuals.delete(trial)
            changed.add(node)
    if len(known) > MOST_WARM_UPS:
        order = sorted(known, key=lambda trial: (trial.node not in world.fleet.nodes, trial))
        for trial in order[MOST_WARM_UPS:]:
            known = known.delete(trial)
            residuals = residuals.delete(trial) if trial in residuals else residuals
            changed.add(trial.node)
    return WarmUps(known, residuals, frozenset(changed))


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
    demand, sizes = demand_of(profile), sizes_of(profile)
    return residual_of(one.variant, device, receipt.rates, precision, demand, observed.measured, sizes)
