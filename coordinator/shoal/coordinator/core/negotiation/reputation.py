"""Trust in a region's promises: what it delivered compared with what it promised.

Imports nouns only, so that a coordinator and a federation judge alike.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from shoal.types.agreement import Delivered
from shoal.types.units import Seconds

ALLOWANCE: Final = 1.1
"""A promise is kept if the delivery is within this factor of it, because predictions have an error of their own."""
NEWEST: Final = 0.3
"""Weight of one delivery against all earlier ones."""
BREACH: Final = 0.5
"""A breach counts as twice the promised latency, even if the measured latency was better."""
LEAST: Final = 0.05
HARSHNESS: Final = 2.0
"""Exponent for broken promises. At 1, a region that announces half its latency would be believed at its true latency
and so lose nothing by lying; at 2 it is believed at twice that."""


def fulfilment(delivered: Delivered) -> float:
    """How far one agreement was kept, in (0, 1]; NaN: nothing was promised, or nothing could be measured."""
    measured = delivered.requests > 0 and delivered.delivered_p95_s > 0 and delivered.promised_p95_s > 0
    share = min(1.0, ALLOWANCE * delivered.promised_p95_s / delivered.delivered_p95_s) if measured else math.nan
    if delivered.breached:
        share = BREACH if math.isnan(share) else min(share, BREACH)
    return max(LEAST, share**HARSHNESS) if not math.isnan(share) else math.nan


def with_delivery(trust: Mapping[str, float], delivered: Delivered) -> Mapping[str, float]:
    """Trust by region, in (0, 1], after one more delivery; an absent region has 1.

    A geometric moving average: kept promises win back what broken ones cost, in as many agreements.
    """
    share = fulfilment(delivered)
    if math.isnan(share):
        return trust
    before = trust.get(delivered.region, 1.0)
    now = math.exp((1 - NEWEST) * math.log(before) + NEWEST * math.log(share))
    return {**trust, delivered.region: min(1.0, max(LEAST, now))}


def trust_of(deliveries: Iterable[Delivered]) -> Mapping[str, float]:
    """Trust after all of these, oldest first."""
    trust: Mapping[str, float] = {}
    for each in deliveries:
        trust = with_delivery(trust, each)
    return trust


def believed_latency_s(promised: Seconds, trust: float) -> Seconds:
    """The latency to assume for a region's promise."""
    return Seconds(promised / max(LEAST, min(1.0, trust)))
