"""Moves replicas off a place that cannot serve the traffic declared for the time ahead: a coming or current peak.

Rates are those until `schedule.lead_s` from now, so that a sleeping device is awake, and the replica on it takes
requests, when the peak begins. The move has a deadline: no cooldown and no window holds it back.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, MoveProposal
from shoal.coordinator.core.migration.triggers.view import MovableReplica, TriggerView, deferred_proposal
from shoal.coordinator.core.placement.contention import UTILISATION_MOST
from shoal.coordinator.core.placement.model import Slot
from shoal.types.workload import Intent

NAME: Final = "wake"


def propose(view: TriggerView) -> Iterator[MoveProposal]:
    peaking = defaultdict[Slot, list[MovableReplica]](list)
    for replica in view.replicas:
        if _has_peak(replica.intent) and view.busy_on(replica.slot) > UTILISATION_MOST:
            peaking[replica.slot].append(replica)
    turns = view.turns(NAME, [replica for found in peaking.values() for replica in found])
    for slot, found in peaking.items():
        yield from _relieve(view, slot, found, turns)


def _relieve(
    view: TriggerView, slot: Slot, peaking: list[MovableReplica], turns: frozenset[str]
) -> Iterator[MoveProposal]:
    """Moves as many as bring the device below its capacity, the busiest first."""
    busy = view.busy_on(slot)
    reason = f"the declared peak takes {busy:.0%} of {slot.node}/{slot.device}, at most {UTILISATION_MOST:.0%}"
    for replica in sorted(
        peaking, key=lambda each: (-view.device_share(each.intent, each.baseline), each.place.assignment)
    ):
        if busy <= UTILISATION_MOST:
            return
        intent = replica.intent
        if replica.place.assignment in turns:
            asked = view.forced_proposal(replica, Cause.WAKE, reason, intent.require, intent.limits)
        else:
            asked = deferred_proposal(replica, Cause.WAKE, reason)
        if asked.refusal is None:
            busy -= view.device_share(intent, replica.baseline)
        yield replace(asked, is_urgent=True)


def _has_peak(intent: Intent) -> bool:
    """True if more traffic is declared for now, or for soon, than for other times."""
    declared = intent.declared.traffic if intent.declared is not None else intent.traffic
    return any(now.rate > usual.rate for now, usual in zip(intent.traffic, declared, strict=True))
