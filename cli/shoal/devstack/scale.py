"""One time scale for all emulated devices of a machine, from what the machine was measured to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MARGIN: Final = 1.5
"""A run takes longer than its share of the cores says (caches, the front, the client)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One device's convolution rate (FLOP/s) from its receipt; emulated ones pace, the host computes."""

    flops: float
    emulated: bool


def time_scale(rates: Sequence[Rate], cores: int) -> float:
    """The least scale, in steps of 5, under which this host can meet the fastest emulated device.

    All emulated devices may run at once and share the cores: scale = fastest / host x (devices / cores) x MARGIN.
    1 when nothing is emulated. Raises ValueError when something is emulated and the host was not measured.
    """
    emulated = [rate.flops for rate in rates if rate.emulated]
    if not emulated:
        return 1.0
    host = max((rate.flops for rate in rates if not rate.emulated), default=0.0)
    if host <= 0:
        raise ValueError("the host's own rate is not known")
    share = max(1.0, len(emulated) / cores)
    return max(1.0, 5.0 * -(-max(emulated) / host * share * MARGIN // 5.0))
