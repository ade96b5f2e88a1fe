"""Moves the only replica off a device that could then sleep, to a device that stays awake anyway.

Here the objective's energy term is watts and includes what keeps the device awake, because joules per inference
ignore a server that idles between requests. A workload moves only if it weighs energy, before its next peak, and if
the energy saved until then (at most `HORIZON_S`) exceeds what moving and waking take.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, ExpectedOutcome, MoveProposal
from shoal.coordinator.core.migration.outcomes import expected_outcome, gain_with_energy
from shoal.coordinator.core.migration.triggers.view import MovableReplica, TriggerView, new_proposal
from shoal.coordinator.core.placement.feasible import Option, awake_w
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.placement.score import energy
from shoal.coordinator.core.workloads.schedule import effective_intent
from shoal.types.device import Rest
from shoal.types.units import Seconds, Wall, show_joules, show_seconds, show_watts

NAME: Final = "consolidation"
HORIZON_S: Final = Seconds(600.0)
MOVING_S: Final = Seconds(30.0)
"""Duration of a move whose load time is unknown: emulated devices do not report one."""
PEAK_CHECKS: Final = 40
"""Number of times within the horizon at which a peak is looked for."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What moving to one place would save."""

    # Place that the replica would move to.
    option: Option
    # Expected outcome; its gain counts the energy until `over_s`, less moving and waking.
    expected: ExpectedOutcome
    # Power saved while the device sleeps.
    watts: float
    # Joules saved until `over_s`, less moving and waking, on the device's own time: for an emulated device real time
    # divided by `time_scale`.
    joules: float
    # Time considered, in seconds: until the next peak, at most `HORIZON_S`.
    over_s: Seconds


def propose(view: TriggerView) -> Iterator[MoveProposal]:
    if view.inputs.region.sleep_after_s is None:
        return
    for replica in view.replicas:
        rest = replica.live_option.device.rest
        if rest is None or replica.intent.weights.get(energy.NAME, 0.0) <= 0 or not view.has_turn(replica):
            continue
        best = _best(view, replica, rest) if _is_alone_on_device(view, replica) else None
        if best is not None:
            reason = f"{replica.place.where} may sleep: {show_watts(best.watts)} less, {show_joules(best.joules)} in"
            reason += f" {show_seconds(best.over_s)}"
            found = new_proposal(replica, best.option, best.expected, Cause.CONSOLIDATION, reason)
            yield replace(found, is_fading=best.expected.gain < replica.intent.migration.gain)


def _best(view: TriggerView, replica: MovableReplica, rest: Rest) -> Saving | None:
    intent, scope = replica.intent, view.scope
    here = scope.preference(replica.live_option, intent)
    found = [
        saving
        for option in view.places(replica, intent.require, intent.limits)
        if scope.preference(option, intent) <= here
        and _stays_awake(view, option)
        and (saving := _saving(view, replica, rest, option)) is not None
    ]
    asked = intent.migration.gain * min(view.threshold_shares(replica, NAME))
    worth = [each for each in found if each.expected.gain >= asked and each.joules > 0]
    return max(worth, key=lambda each: (each.expected.gain, each.option.key), default=None)


def _saving(view: TriggerView, replica: MovableReplica, rest: Rest, option: Option) -> Saving | None:
    """None if one of its figures is unknown."""
    receipt = replica.baseline.receipt
    if receipt is None:
        return None
    expected = expected_outcome(view.scope, replica.intent, replica.baseline, option)
    rate = view.scope.energy_rate(replica.intent, replica.intent.require.replicas)
    here = awake_w(rest, receipt, rate * expected.before.joules)
    there = rest.asleep_w + rate * expected.after.joules
    moving_s = expected.seconds if math.isfinite(expected.seconds) else MOVING_S
    moving = max(0.0, receipt.rates.active_w - rest.idle_w) * rest.wake_s + (here - rest.asleep_w) * moving_s
    over_s = _quiet_s(view, replica)
    joules = (here - there) * over_s - moving
    if math.isnan(joules):
        return None
    watts = (here, here - joules / over_s)
    better = gain_with_energy(view.scope, replica.intent, replica.baseline, option, watts)
    spared = joules / replica.live_option.device.time_scale
    return Saving(option, replace(expected, gain=better), here - there, spared, over_s)


def _is_alone_on_device(view: TriggerView, replica: MovableReplica) -> bool:
    """True if nothing else is on its device, and no room is reserved there."""
    here = [each for each in view.inputs.assignments_on(replica.slot.node) if each.device == replica.slot.device]
    kept = any(each.slot == replica.slot for each in view.inputs.reserved)
    return len(here) == 1 and not kept


def _quiet_s(view: TriggerView, replica: MovableReplica) -> Seconds:
    """Time until more traffic is declared than now, at most `HORIZON_S`."""
    intent = replica.intent
    if intent.declared is None:
        return HORIZON_S
    documents = replace(intent, weights=intent.declared.weights, traffic=intent.declared.traffic, declared=None)
    for step in range(1, PEAK_CHECKS):
        ahead = Seconds(HORIZON_S * step / PEAK_CHECKS)
        then = effective_intent(documents, view.inputs.region, Wall(view.inputs.wall + ahead), Seconds(0.0))
        if any(later.rate > now.rate for later, now in zip(then.traffic, intent.traffic, strict=True)):
            return ahead
    return HORIZON_S


def _stays_awake(view: TriggerView, option: Option) -> bool:
    """True if the device cannot sleep, or has something else on it that is not leaving."""
    here = view.inputs.assignments_on(option.slot.node)
    taken = any(
        each.device == option.slot.device and not each.draining and each.id not in view.leaving for each in here
    )
    return option.device.rest is None or taken or Slot(*option.slot) in {one.slot for one in view.inputs.reserved}
