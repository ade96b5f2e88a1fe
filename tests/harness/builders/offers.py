"""Bids, terms and profiles for the tests of both sides' cores."""

import math

from shoal.coordinator.core.negotiation.offer_selection import DelegationTerms
from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.rank import TermValues
from shoal.types.codes import Code, Refusal
from shoal.types.device import EnergySource
from shoal.types.offer import Decline, Offer
from shoal.types.units import GramsPerHour, Joules, Seconds, UsdPerHour
from shoal.types.workload import (
    DelegationMode,
    DelegationRule,
    Limits,
    Relaxation,
    Requirements,
    Spread,
    Standby,
    Weights,
)

LATENCY_AND_COST: Weights = {"latency": 0.5, "cost": 0.5}


def requirements(p95_s: float | None = None, **changes: object) -> Requirements:
    values: dict[str, object] = {
        "latency_p95_s": None if p95_s is None else Seconds(p95_s),
        "latency_from_origin": False,
        "where": "",
        "residency": (),
        "precisions": (),
        "replicas": 1,
        "spread": Spread.NONE,
        "standby": Standby.NONE,
        "recovery_s": None,
        "measured_only": False,
        "measured_within_s": None,
    }
    return Requirements(**{**values, **changes})  # type: ignore[arg-type]


def term_values(**known: float) -> TermValues:
    """By the names of score terms; the others are unknown."""
    return tuple(known.get(term.name, math.nan) for term in score.TERMS)


def terms(
    p95_s: float | None = None,
    *,
    mode: DelegationMode = DelegationMode.WHEN_INFEASIBLE,
    own: TermValues | None = None,
    margin: float = 0.0,
    weights: Weights = LATENCY_AND_COST,
    rtt_s: float = 0.01,
    limits: Limits = Limits(),  # noqa: B008
    relax: tuple[float, ...] = (),
    trust: dict[str, float] | None = None,
    asked: str = "asked",
    require: Requirements | None = None,
) -> DelegationTerms:
    """relax: steps of the latency bound. way_s: to each of the regions a, b and c."""
    steps = tuple(Relaxation(f"latency: {{p95: {step}}}", requirements(step), limits) for step in relax)
    return DelegationTerms(
        request_hash=asked,
        require=require or requirements(p95_s),
        limits=limits,
        weights=weights,
        relax=steps,
        delegation=DelegationRule(mode, margin),
        own=own,
        rtt_s=dict.fromkeys("abc", rtt_s),
        trust=trust or {},
    )


def offer(region: str, p95_s: float = 0.02, cost: float = 1.0, **changes: object) -> Offer:
    values: dict[str, object] = {
        "id": f"bid-{region}",
        "solicitation": "t-1",
        "round": 1,
        "origin": "home",
        "region": region,
        "model": "sha256:" + "0" * 64,
        "precision": "fp32",
        "replicas": 1,
        "latency_p95_s": Seconds(p95_s),
        "cost": UsdPerHour(cost),
        "joules": Joules(math.nan),
        "energy_source": EnergySource.ESTIMATED,
        "carbon": GramsPerHour(math.nan),
        "load_s": Seconds(0.5),
        "cached": True,
        "stand_in": "emulated",
        "residency": "eu",
        "hold_s": Seconds(10.0),
    }
    return Offer(**{**values, **changes})  # type: ignore[arg-type]


def counter(region: str, p95_s: float, cost: float = 1.0) -> Offer:
    return offer(region, p95_s, cost, hold_s=Seconds(0.0), changes=(f"latency: {{p95: {p95_s}}}",))


def decline(region: str) -> Decline:
    return Decline("t-1", 1, region, Refusal(Code.MEMORY_SHORT, "0 B free", "1 GiB"))
