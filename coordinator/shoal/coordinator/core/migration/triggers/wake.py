"""Away from a place that cannot do what is declared for the time ahead: a peak that is about to come, or is there.

Rates are those that hold until `schedule.lead_s` from now, so a device that sleeps is awake, and the replica on it
takes requests, when the peak begins. It has a deadline: no cooldown and no window holds it back.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Proposal
from shoal.coordinator.core.migration.triggers.view import Replica, View, waiting
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.placement.solve import UTILISATION_MOST
from shoal.types.workload import Intent

NAME: Final = "wake"


def propose(view: View) -> Iterator[Proposal]:
    peaking = defaultdict[Slot, list[Replica]](list)
    for replica in view.replicas:
        if _peaks(replica.intent) and view.busy[replica.slot] > UTILISATION_MOST:
            peaking[replica.slot].append(replica)
    turns = view.turns([replica for found in peaking.values() for replica in found])
    for slot, found in peaking.items():
        yield from _relieved(view, slot, found, turns)


def _relieved(view: View, slot: Slot, peaking: list[Replica], turns: frozenset[str]) -> Iterator[Proposal]:
    """So many as bring the device below what it can do, the busiest first."""
    busy = view.busy[slot]
    reason = f"the declared peak takes {busy:.0%} of {slot.node}/{slot.device}, at most {UTILISATION_MOST:.0%}"
    for replica in sorted(peaking, key=lambda each: (-view.share(each.intent, each.calm), each.place.assignment)):
        if busy <= UTILISATION_MOST:
            return
        intent = replica.intent
        if replica.place.assignment in turns:
            asked = view.forced(replica, Cause.WAKE, reason, intent.require, intent.limits)
        else:
            asked = waiting(replica, Cause.WAKE, reason)
        if asked.refusal is None:
            busy -= view.share(intent, replica.calm)
        yield replace(asked, urgent=True)


def _peaks(intent: Intent) -> bool:
    """More is declared for now, or for soon, than at other times."""
    declared = intent.declared.traffic if intent.declared is not None else intent.traffic
    return any(now.rate > usual.rate for now, usual in zip(intent.traffic, declared, strict=True))
