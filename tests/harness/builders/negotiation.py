"""Builders of messages between regions, seen from region `eu-west`, which `us-east` solicits."""

from typing import Any

from harness.builders.coordinator_core import DIGEST, GIB, device, fleet_of, inputs, profile, receipt, require
from harness.builders.coordinator_core import node as node_of
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.negotiation.bid import BidAnswer, answer_solicitation
from shoal.coordinator.core.placement.model import Inputs, Reservation
from shoal.coordinator.ports import VerifiedMessage
from shoal.types.agreement import Award, GatewayRef, Notice, Renewal, ServiceReport
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.offer import Demand, Offer, Solicitation
from shoal.types.units import GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour
from shoal.types.workload import Limits, Requirements, TradeRule, WorkloadKey

HERE = "eu-west"
ORIGIN = "us-east"
SHOP = WorkloadKey("shop", "ocr")
ALL = (TradeRule("*", ("*",), 1.0),)
GATEWAY = GatewayRef("gw", "gw:8001")

__all__ = ["ALL", "GATEWAY", "GIB", "HERE", "ORIGIN", "SHOP", "device", "fleet_of", "node_of", "receipt"]


def solicitation(name: str = "s-1", **changes: Any) -> Solicitation:
    asked = require(**{key: changes.pop(key) for key in tuple(changes) if key in Requirements.__dataclass_fields__})
    values: dict[str, Any] = {
        "id": name,
        "round": 1,
        "origin": ORIGIN,
        "workload": SHOP,
        "models": (profile(DIGEST),),
        "require": asked,
        "limits": Limits(),
        "weights": {"latency": 1.0},
        "traffic": (),
        "max_batch": 1,
        "term_s": Seconds(1800.0),
        "answer_s": Seconds(2.0),
        "indicative": False,
    }
    return Solicitation(**(values | changes))


def demand(rate: float) -> tuple[Demand, ...]:
    return (Demand(ORIGIN, PerSecond(rate), PerSecond(rate)),)


def offer(name: str = "b-1", **changes: Any) -> Offer:
    values: dict[str, Any] = {
        "id": name,
        "solicitation": "s-1",
        "round": 1,
        "origin": ORIGIN,
        "region": HERE,
        "model": DIGEST,
        "precision": "fp32",
        "replicas": 1,
        "latency_p95_s": Seconds(0.02),
        "cost": UsdPerHour(1.0),
        "joules": Joules(0.4),
        "energy_source": EnergySource.ESTIMATED,
        "carbon": GramsPerHour(10.0),
        "load_s": Seconds(1.0),
        "cached": False,
        "stand_in": "",
        "residency": "eu",
        "hold_s": Seconds(10.0),
    }
    return Offer(**(values | changes))


def award(name: str = "g-1", bid: str = "b-1", **changes: Any) -> Award:
    values: dict[str, Any] = {
        "agreement": name,
        "solicitation": "s-1",
        "bid": bid,
        "origin": ORIGIN,
        "workload": SHOP,
        "term_s": Seconds(1800.0),
        "gateways": (GATEWAY,),
    }
    return Award(**(values | changes))


def renewal(sequence: int, nonce: str = "", *, agreement: str = "g-1", **changes: Any) -> Renewal:
    nothing = ServiceReport(0, 0, Seconds(0.0), Joules(0.0), EnergySource.ESTIMATED, 0.0)
    values: dict[str, Any] = {"report": nothing, "gateways": (GATEWAY,), "ledger_head": ""}
    return Renewal(agreement, sequence, nonce or f"n-{sequence}", **(values | changes))


def notice(ends_s: float, code: Code = Code.BETTER_ELSEWHERE, *, agreement: str = "g-1", by: str = ORIGIN) -> Notice:
    return Notice(agreement, by, code, Seconds(ends_s))


def region(*names: str, **changes: Any) -> Inputs:
    """A region with one node per name, each with one device of 8 GiB."""
    fleet: Fleet = fleet_of(*(node_of(name) for name in names or ("a",)))
    return inputs(fleet, **changes)


def bid(
    asked: Solicitation,
    world: Inputs,
    trades: tuple[TradeRule, ...] = ALL,
    *,
    name: str = "b-1",
    used: tuple[Reservation, ...] = (),
) -> BidAnswer:
    return answer_solicitation(asked, world, trades, bid=name, used=used, cached=(), hold_s=Seconds(10.0))


def signed_message(what: Any, by: str = ORIGIN) -> VerifiedMessage[Any]:
    """As received from region `by`, verified."""
    return VerifiedMessage(by, what, b"said")
