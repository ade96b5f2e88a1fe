"""Moves replicas of lower priority to another place, where a workload that may displace them lacks room.

The moves need no consent of the policy of what moves: with `preempt` the region's operator gives priorities that
meaning. They have a deadline, because the other workload does not serve until they are over.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, MoveProposal
from shoal.coordinator.core.migration.triggers.view import TriggerView
from shoal.coordinator.core.placement.preempt import preemptions

NAME: Final = "preempt"


def propose(view: TriggerView) -> Iterator[MoveProposal]:
    for each in preemptions(view.scope, view.inputs.intents, view.current):
        replica = view.serving(each.workload, each.assignment) if each.has_place else None
        if replica is not None:
            intent = replica.intent
            found = view.forced_proposal(
                replica, Cause.PREEMPTION, each.refusal.found, intent.require, intent.limits, leaves=each.slot
            )
            yield replace(found, is_urgent=True)
