"""What warm-ups measured, by (model, node, device): kept when the replica is gone, and what the region learns by."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Final, NamedTuple

from immutables import Map

from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import Trial
from shoal.coordinator.core.prediction.demand import block_channels, demand_of, served_profile
from shoal.coordinator.core.prediction.load_law import load_needs
from shoal.coordinator.core.prediction.residuals import DeviceClass, Residual, residual_of, with_repeat, with_service
from shoal.coordinator.core.workloads.model import RegionState
from shoal.types.assignment import Assignment, Measured, Observed
from shoal.types.profile import ModelProfile
from shoal.types.workload import Intent, WorkloadKey

MOST_OF_A_KIND: Final = 8
"""Measurements of one model on one class of devices that the region learns from. The median of eight is within 3 %, if
two devices of a class differ by 7 % (`region_residuals`); another one teaches something where it is further off."""
FAR: Final = 0.14
"""Twice that 7 %: by so much a measurement has to differ from the median of its kind to replace another one."""
MOST_WARM_UPS: Final = 4096
"""Kept: about 1 KiB of the store each. Beyond, those that the region does not learn from are dropped first, of these
those of nodes that are gone. Otherwise a region with more trials would forget what it learnt and learn it again, all
the time: each time all predictions are made anew."""


class WarmUps(NamedTuple):
    """All that is kept, as `ReconcilerMemory` has it, and where something changed."""

    measured: Map[Trial, Measured]
    residuals: Map[Trial, Residual]
    # Of which another figure is kept than before, or none any more.
    trials: frozenset[Trial]
    # New warm-ups from which nothing is learnt, because they are too far off their roofline.
    absurd: int = 0

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(trial.node for trial in self.trials)


class ResidualsByKind:
    """Residuals while a step changes them. Kept between steps, so that one that learns does not look at all of them."""

    def __init__(self, residuals: Map[Trial, Residual]) -> None:
        self.residuals = residuals
        self._of_kind: dict[tuple[str, DeviceClass], dict[Trial, float]] | None = None
        """By model and class: `log_ratio_of_sum` of the plausible ones. None: nobody asked yet; most steps learn
        nothing."""

    def ratios_like(self, trial: Trial, residual: Residual) -> Mapping[Trial, float]:
        """`log_ratio_of_sum` of the plausible ones of the same model and class."""
        if self._of_kind is None:
            self._of_kind = {}
            for other, each in self.residuals.items():
                self._add(other, each)
        return self._of_kind.get((trial.model, residual.device_class), {})

    def put(self, trial: Trial, residual: Residual | None) -> None:
        """None: without one from now on."""
        before = self.residuals.get(trial)
        if before is not None and self._of_kind is not None:
            kind = trial.model, before.device_class
            same = self._of_kind.get(kind, {})
            same.pop(trial, None)
            if not same:
                self._of_kind.pop(kind, None)
        if residual is not None:
            self.residuals = self.residuals.set(trial, residual)
            self._add(trial, residual)
        elif before is not None:
            self.residuals = self.residuals.delete(trial)

    def _add(self, trial: Trial, residual: Residual) -> None:
        if self._of_kind is not None and residual.is_plausible:
            self._of_kind.setdefault((trial.model, residual.device_class), {})[trial] = residual.log_ratio_of_sum


def remember_warm_ups(
    world: RegionState, nodes: Iterable[str], intents: Mapping[WorkloadKey, Intent], residuals: ResidualsByKind
) -> WarmUps:
    """The newest warm-up of each trial. nodes: those that may report one that is not known. intents: all workloads.
    residuals: of the memory; afterwards with what is new."""
    known, changed, absurd = world.memory.measured, set[Trial](), 0
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
            seen = residuals.residuals.get(trial)
            if is_same and (seen is None or _is_current(seen, world.profiles.get(observed.model))):
                later = None if seen is None else _with_service(seen, observed.measured, state, observed)
                if later is not None and later is not seen:
                    residuals.put(trial, later)
                    changed.add(trial)
                continue
            # New, or of an older version, with other operator classes, another roofline or another profile.
            residual = None if one is None else _residual(world, state, one, observed, intents.get(one.workload))
            if residual is not None and not residual.is_plausible:
                absurd += not is_same
                residual = None
            if is_same and residual is None and seen is not None and seen.is_plausible:
                continue  # what is known of its load stays, until a receipt says what the device promises
            if residual is not None and is_same and seen is not None:
                residual = replace(residual, log_repeat=seen.log_repeat, log_repeat_p95=seen.log_repeat_p95)
            elif residual is not None:
                residual = with_repeat(residual, seen, observed.measured, before)
            known = known.set(trial, observed.measured)
            gone = trial if residual is None else _replaced(residuals, trial, residual)
            if gone is not None:
                changed.add(gone)
                if gone != trial:
                    residuals.put(gone, None)
                residuals.put(trial, residual)
            changed.add(trial)
    if len(known) > MOST_WARM_UPS:
        taught = residuals.residuals
        order = sorted(known, key=lambda trial: (trial not in taught, trial.node not in world.fleet.nodes, trial))
        # More than has to go, so that not every step has to choose.
        for trial in order[MOST_WARM_UPS - MOST_WARM_UPS // 8 :]:
            known = known.delete(trial)
            residuals.put(trial, None)
            changed.add(trial)
    return WarmUps(known, residuals.residuals, frozenset(changed), absurd)


def _is_current(seen: Residual, profile: ModelProfile | None) -> bool:
    is_of_profile = profile is None or seen.profile_version == profile.version
    return seen.is_plausible and seen.is_of_sum and is_of_profile


def _with_service(seen: Residual, measured: Measured, state: NodeState, observed: Observed) -> Residual:
    device = state.device(observed.device)
    return with_service(seen, measured, observed.served, is_emulated=device is not None and device.emulated)


def _replaced(residuals: ResidualsByKind, trial: Trial, residual: Residual) -> Trial | None:
    """Whose place a residual takes: its own, or where enough of its kind are known, that of one of an older version, or
    of the one furthest from it. Thus where a new driver made all devices of a class faster, they all are replaced one
    after the other. None: it teaches nothing."""
    same = residuals.ratios_like(trial, residual)
    if trial in residuals.residuals or len(same) < MOST_OF_A_KIND:
        return trial
    older = [other for other, ratio in same.items() if math.isnan(ratio)]
    if older:
        return min(older)
    if abs(residual.log_ratio_of_sum - median(same.values())) <= FAR:
        return None
    return max(same, key=lambda other: (abs(same[other] - residual.log_ratio_of_sum), other))


def _residual(
    world: RegionState, state: NodeState, one: Assignment, observed: Observed, intent: Intent | None
) -> Residual | None:
    """None where no receipt promised anything."""
    device, receipt = state.device(observed.device), state.receipts.get(observed.device)
    profile = world.profiles.get(observed.model)
    if device is None or receipt is None or profile is None or observed.measured is None:
        return None
    shapes = intent.shapes if intent is not None else {}
    profile = served_profile(profile, shapes, one.precision if one.preparation is not None else "")
    precision = one.precision or profile.precision
    demand = demand_of(profile, block_channels(device, state.node.arch, precision))
    needs = load_needs(profile)
    return residual_of(
        *(one.variant, device, receipt.rates, precision, demand, observed.measured, needs, profile.version),
        provider_bytes=receipt.provider_bytes,
    )
