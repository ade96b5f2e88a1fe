"""Which carrier to call the coordinator by: gRPC while it holds, MQTT where it does not, and back when it may again.

A network can be hostile to gRPC in two ways: no connection comes about, or each is cut while it is young.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.agent.core.backoff import delay
from shoal.types.units import Elapsed, Seconds


class Carrier(StrEnum):
    GRPC = "grpc"
    MQTT = "mqtt"


@dataclass(frozen=True, slots=True)
class Timing:
    """holds_s: a session that lasted so long shows that its carrier works here. strikes: calls by gRPC in a row that
    did not hold, before MQTT's turn. first_look_s, most_s: from going to MQTT to looking whether gRPC is back; doubled
    each time that it did not hold after all."""

    holds_s: Seconds = Seconds(60.0)
    strikes: int = 2
    first_look_s: Seconds = Seconds(15.0)
    most_s: Seconds = Seconds(900.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """carrier: of the next call. strikes: calls by gRPC in a row that did not hold. looks: at gRPC since it last held.

    look_at: when to look at gRPC again; None while it is the carrier.
    """

    node: str
    timing: Timing = Timing()
    carrier: Carrier = Carrier.GRPC
    strikes: int = 0
    looks: int = 0
    look_at: Elapsed | None = None


def ended(choice: Choice, carrier: Carrier, lasted_s: Seconds, now: Elapsed) -> Choice:
    """A call by `carrier` is over. lasted_s: of its session; 0 where none came about."""
    if carrier is not choice.carrier:
        return choice  # it was ended for the other one's sake
    match carrier:
        case Carrier.GRPC if lasted_s >= choice.timing.holds_s:
            return replace(choice, strikes=0, looks=0)
        case Carrier.GRPC if choice.strikes + 1 < choice.timing.strikes:
            return replace(choice, strikes=choice.strikes + 1)
        case Carrier.GRPC:
            return _look_later(replace(choice, carrier=Carrier.MQTT, strikes=choice.timing.strikes), now)
        case Carrier.MQTT if lasted_s > 0:
            return choice
        case Carrier.MQTT:
            return _try_grpc(choice)


def looked(choice: Choice, reachable: bool, now: Elapsed) -> Choice:
    """gRPC was looked at from a session over MQTT; where it is reachable, the next call goes by it."""
    return _try_grpc(choice) if reachable else _look_later(choice, now)


def _try_grpc(choice: Choice) -> Choice:
    """One call, and MQTT again if it does not hold."""
    return replace(choice, carrier=Carrier.GRPC, strikes=choice.timing.strikes - 1, look_at=None)


def _look_later(choice: Choice, now: Elapsed) -> Choice:
    wait = delay(choice.node, choice.looks, base_s=choice.timing.first_look_s, cap_s=choice.timing.most_s)
    return replace(choice, looks=choice.looks + 1, look_at=Elapsed(now + wait))
