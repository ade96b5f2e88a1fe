"""Away from a device that is too hot, or slows itself down."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, Proposal
from shoal.coordinator.core.migration.triggers.view import HOT_C, View, heat

NAME: Final = "heat"


def propose(view: View) -> Iterator[Proposal]:
    for replica in view.replicas:
        reading = replica.loaded.state.readings.get(replica.slot.device)
        if reading is None:
            continue
        for share in view.shares(replica, NAME):
            if found := heat(reading, share * HOT_C):
                intent, reason = replica.intent, f"{replica.place.where} {found}"
                hot = view.forced(replica, Cause.HEAT, reason, intent.require, intent.limits)
                yield replace(hot, fading=share < 1.0)
                break
