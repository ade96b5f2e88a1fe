"""Which carrier an agent uses to call the coordinator: gRPC where it works, else MQTT, and gRPC again once it works.

A network can block gRPC in two ways: no connection is established, or each connection is cut soon after it opens.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.types.backoff import delay
from shoal.types.units import Elapsed, Seconds


class Carrier(StrEnum):
    GRPC = "grpc"
    MQTT = "mqtt"


@dataclass(frozen=True, slots=True)
class CarrierTiming:
    """When to leave a carrier and when to try gRPC again."""

    # A session that lasted this many seconds shows that its carrier works here.
    stable_s: Seconds = Seconds(60.0)
    # Calls by gRPC in a row without a stable session, before MQTT is used.
    strike_limit: int = 2
    # Seconds from the change to MQTT to the first check of gRPC; doubled each time gRPC then fails.
    first_recheck_s: Seconds = Seconds(15.0)
    # Longest time between two checks of gRPC, seconds.
    max_recheck_s: Seconds = Seconds(900.0)


@dataclass(frozen=True, slots=True)
class CarrierSelection:
    """The carrier in use and the state that decides the next one."""

    # Name of the node; it spreads the checks of a fleet.
    node: str
    # The thresholds.
    timing: CarrierTiming = CarrierTiming()
    # Carrier of the next call.
    carrier: Carrier = Carrier.GRPC
    # Calls by gRPC in a row without a stable session.
    strikes: int = 0
    # Checks of gRPC since it last had a stable session.
    rechecks: int = 0
    # When to check gRPC next, elapsed clock; None while gRPC is the carrier.
    recheck_at: Elapsed | None = None


def record_call(selection: CarrierSelection, carrier: Carrier, lasted_s: Seconds, now: Elapsed) -> CarrierSelection:
    """Apply the end of a call by `carrier`. `lasted_s` is the length of its session; 0 where none was established."""
    if carrier is not selection.carrier:
        return selection  # ended on purpose, to change to the other carrier
    match carrier:
        case Carrier.GRPC if lasted_s >= selection.timing.stable_s:
            return replace(selection, strikes=0, rechecks=0)
        case Carrier.GRPC if selection.strikes + 1 < selection.timing.strike_limit:
            return replace(selection, strikes=selection.strikes + 1)
        case Carrier.GRPC:
            return _schedule_recheck(
                replace(selection, carrier=Carrier.MQTT, strikes=selection.timing.strike_limit), now
            )
        case Carrier.MQTT if lasted_s > 0:
            return selection
        case Carrier.MQTT:
            return _try_grpc(selection)


def record_recheck(selection: CarrierSelection, reachable: bool, now: Elapsed) -> CarrierSelection:
    """Apply a check of gRPC made during an MQTT session. If gRPC is reachable, the next call uses it."""
    return _try_grpc(selection) if reachable else _schedule_recheck(selection, now)


def _try_grpc(selection: CarrierSelection) -> CarrierSelection:
    """Allow one call by gRPC; one that is not stable returns to MQTT."""
    return replace(selection, carrier=Carrier.GRPC, strikes=selection.timing.strike_limit - 1, recheck_at=None)


def _schedule_recheck(selection: CarrierSelection, now: Elapsed) -> CarrierSelection:
    wait = delay(
        selection.node,
        selection.rechecks,
        base_s=selection.timing.first_recheck_s,
        cap_s=selection.timing.max_recheck_s,
    )
    return replace(selection, rechecks=selection.rechecks + 1, recheck_at=Elapsed(now + wait))
