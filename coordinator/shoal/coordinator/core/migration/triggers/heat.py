"""Moves replicas off a device that is too hot or throttles."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, MoveProposal
from shoal.coordinator.core.migration.triggers.view import (
    HOT_C,
    MovableReplica,
    TriggerView,
    deferred_proposal,
    heat_reason,
)

NAME: Final = "heat"


def propose(view: TriggerView) -> Iterator[MoveProposal]:
    hot = [(replica, *found) for replica in view.replicas if (found := _heat_condition(view, replica)) is not None]
    turns = view.turns(NAME, [replica for replica, _, share in hot if share == 1.0])
    for replica, reason, share in hot:
        intent = replica.intent
        if replica.place.assignment in turns:
            yield view.forced_proposal(replica, Cause.HEAT, reason, intent.require, intent.limits)
        else:
            yield replace(deferred_proposal(replica, Cause.HEAT, reason), is_fading=share < 1.0)


def _heat_condition(view: TriggerView, replica: MovableReplica) -> tuple[str, float] | None:
    """How hot its device is, and the share of the threshold that it exceeds; None: it is not."""
    reading = replica.live_option.state.readings.get(replica.slot.device)
    if reading is not None:
        for share in view.threshold_shares(replica, NAME):
            if found := heat_reason(reading, share * HOT_C):
                return f"{replica.place.where} {found}", share
    return None
