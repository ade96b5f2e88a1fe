"""Away from a place that cannot do what is declared for the time ahead: a peak that is about to come, or is there.

Rates are those that hold until `schedule.lead_s` from now, so a device that sleeps is awake, and the replica on it
takes requests, when the peak begins. It has a deadline: no cooldown and no window holds it back.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Proposal
from shoal.coordinator.core.migration.triggers.view import Replica, View
from shoal.coordinator.core.placement.books import busy_share
from shoal.coordinator.core.placement.solve import UTILISATION_MOST
from shoal.types.workload import Intent

NAME: Final = "wake"


def propose(view: View) -> Iterator[Proposal]:
    for replica in view.replicas:
        busy = _busy(view, replica)
        if _peaks(replica.intent) and busy > UTILISATION_MOST:
            intent = replica.intent
            reason = f"the declared peak takes {busy:.0%} of {replica.place.where}, at most {UTILISATION_MOST:.0%}"
            yield replace(view.forced(replica, Cause.WAKE, reason, intent.require, intent.limits), urgent=True)


def _peaks(intent: Intent) -> bool:
    """More is declared for now, or for soon, than at other times."""
    declared = intent.declared.traffic if intent.declared is not None else intent.traffic
    return any(now.rate > usual.rate for now, usual in zip(intent.traffic, declared, strict=True))


def _busy(view: View, replica: Replica) -> float:
    """Share of its device's time that declared traffic takes, others' on the device too."""
    others = sum(
        busy_share(view.scope, each.intent, each.calm, each.intent.require.replicas)
        for each in view.replicas
        if each.slot == replica.slot and each is not replica
    )
    return others + busy_share(view.scope, replica.intent, replica.calm, replica.intent.require.replicas)
