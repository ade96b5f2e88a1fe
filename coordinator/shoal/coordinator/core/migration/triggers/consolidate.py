"""Off a device that could sleep without the one replica on it, to one that stays awake anyway.

The objective's energy term here is watts, with what keeping the device awake costs: joules of an inference say nothing
of a server that idles between two of them. Only workloads that weigh energy move for it, before their next peak,
and only where what is saved until then, at most `HORIZON_S`, is more than moving and waking take.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.migration.expected import awake_w, expected, gain_of
from shoal.coordinator.core.migration.model import Cause, Expected, Proposal
from shoal.coordinator.core.migration.triggers.view import Replica, View, proposal
from shoal.coordinator.core.placement.feasible import Option
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.workloads.schedule import holding
from shoal.types.device import Rest
from shoal.types.units import Seconds, Wall, show_joules, show_seconds, show_watts

NAME: Final = "consolidation"
HORIZON_S: Final = Seconds(600.0)
MOVING_S: Final = Seconds(30.0)
"""Of a move whose load time nobody can predict: emulated devices do not tell it."""
LOOKS: Final = 40
"""Times within the horizon at which a peak is looked for."""


@dataclass(frozen=True, slots=True)
class Saving:
    """hoped: with the gain in joules until `over_s`, moving and waking counted. joules: the device's own."""

    option: Option
    hoped: Expected
    watts: float
    joules: float
    over_s: Seconds


def propose(view: View) -> Iterator[Proposal]:
    if view.inputs.region.sleep_after_s is None:
        return
    for replica in view.replicas:
        rest = replica.loaded.device.rest
        if rest is None or replica.intent.weights.energy <= 0 or not view.looks_at(replica):
            continue
        best = _best(view, replica, rest) if _alone(view, replica) else None
        if best is not None:
            reason = f"{replica.place.where} may sleep: {show_watts(best.watts)} less, {show_joules(best.joules)} in"
            reason += f" {show_seconds(best.over_s)}"
            found = proposal(replica, best.option, best.hoped, Cause.CONSOLIDATION, reason)
            yield replace(found, fading=best.hoped.gain < replica.intent.migration.gain)


def _best(view: View, replica: Replica, rest: Rest) -> Saving | None:
    intent = replica.intent
    found = [
        saving
        for option in view.places(replica, intent.require, intent.limits)
        if _stays_awake(view, option) and (saving := _saving(view, replica, rest, option)) is not None
    ]
    asked = intent.migration.gain * min(view.shares(replica, NAME))
    worth = [each for each in found if each.hoped.gain >= asked and each.joules > 0]
    return max(worth, key=lambda each: (each.hoped.gain, each.option.names), default=None)


def _saving(view: View, replica: Replica, rest: Rest, option: Option) -> Saving | None:
    """None where a figure of it is unknown."""
    receipt = replica.calm.receipt
    if receipt is None:
        return None
    hoped = expected(view.scope, replica.intent, replica.calm, option)
    rate = view.scope.replica_rate(replica.intent, replica.intent.require.replicas)
    here = awake_w(rest, receipt, rate * hoped.before.joules)
    there = rest.asleep_w + rate * hoped.after.joules
    moving_s = hoped.seconds if math.isfinite(hoped.seconds) else MOVING_S
    moving = max(0.0, receipt.rates.active_w - rest.idle_w) * rest.wake_s + (here - rest.asleep_w) * moving_s
    over_s = _quiet_s(view, replica)
    joules = (here - there) * over_s - moving
    if math.isnan(joules):
        return None
    before, after = replace(hoped.before, joules=here), replace(hoped.after, joules=here - joules / over_s)
    better = gain_of(after, before, replica.intent.weights)
    spared = joules / replica.loaded.device.time_scale
    return Saving(option, replace(hoped, gain=better), here - there, spared, over_s)


def _alone(view: View, replica: Replica) -> bool:
    """Nothing else is on its device."""
    here = [each for each in view.inputs.desired.get(replica.slot.node, ()) if each.device == replica.slot.device]
    kept = any(each.slot == replica.slot for each in view.inputs.reserved)
    return len(here) == 1 and not kept


def _quiet_s(view: View, replica: Replica) -> Seconds:
    """Until more is declared of it than now, as far as one looks ahead."""
    intent = replica.intent
    if intent.declared is None:
        return HORIZON_S
    documents = replace(intent, weights=intent.declared.weights, traffic=intent.declared.traffic, declared=None)
    for step in range(1, LOOKS):
        ahead = Seconds(HORIZON_S * step / LOOKS)
        then = holding(documents, view.inputs.region, Wall(view.inputs.wall + ahead), Seconds(0.0))
        if any(later.rate > now.rate for later, now in zip(then.traffic, intent.traffic, strict=True)):
            return ahead
    return HORIZON_S


def _stays_awake(view: View, option: Option) -> bool:
    """It cannot sleep, or has something on it anyway, which does not leave itself."""
    here = view.inputs.desired.get(option.slot.node, ())
    taken = any(
        each.device == option.slot.device and not each.draining and each.id not in view.leaving for each in here
    )
    return option.device.rest is None or taken or Slot(*option.slot) in {one.slot for one in view.inputs.reserved}
