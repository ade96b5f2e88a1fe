"""Away from a device that is too hot, or slows itself down."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Proposal
from shoal.coordinator.core.migration.triggers.view import HOT_C, Replica, View, heat, waiting

NAME: Final = "heat"


def propose(view: View) -> Iterator[Proposal]:
    hot = [(replica, *found) for replica in view.replicas if (found := _found(view, replica)) is not None]
    turns = view.turns([replica for replica, _, share in hot if share == 1.0])
    for replica, reason, share in hot:
        intent = replica.intent
        if replica.place.assignment in turns:
            yield view.forced(replica, Cause.HEAT, reason, intent.require, intent.limits)
        else:
            yield replace(waiting(replica, Cause.HEAT, reason), fading=share < 1.0)


def _found(view: View, replica: Replica) -> tuple[str, float] | None:
    """How hot its device is, and the share of the threshold at which it counts as that."""
    reading = replica.loaded.state.readings.get(replica.slot.device)
    if reading is not None:
        for share in view.shares(replica, NAME):
            if found := heat(reading, share * HOT_C):
                return f"{replica.place.where} {found}", share
    return None
