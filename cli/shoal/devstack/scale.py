"""Computes one time scale for all emulated devices of a machine, from the machine's own measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LARGEST_FLOPS: Final = 8.2e9
"""FLOPs of the largest model at which the host keeps up: ResNet-50's, which most sources measure. An emulated device
that launches slowly needs less of the host for small models than its rate says."""
MARGIN: Final = 1.5
"""A run takes longer than its share of the cores implies (caches, the front, the client)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one device's receipt says; emulated devices only pace, the host computes."""

    # Of convolutions, in FLOP/s.
    flops: float
    # Whether it is emulated.
    is_emulated: bool
    # Seconds of a launch.
    launch_s: float = 0.0

    @property
    def largest_per_s(self) -> float:
        """Inferences of the largest model in a second."""
        return 1 / (self.launch_s + LARGEST_FLOPS / self.flops) if self.flops > 0 else 0.0


def time_scale(rates: Sequence[Rate], cores: int) -> float:
    """The smallest scale, in steps of 5, at which this host keeps up with the fastest emulated device.

    All emulated devices may run at once and share the cores: scale = fastest / host x (devices / cores) x MARGIN. The
    scale is 1 if nothing is emulated. Raises ValueError if something is emulated and the host was not measured.
    """
    emulated = [rate.largest_per_s for rate in rates if rate.is_emulated]
    if not emulated:
        return 1.0
    host = max((rate.largest_per_s for rate in rates if not rate.is_emulated), default=0.0)
    if host <= 0:
        raise ValueError("the host's own rate is not known")
    share = max(1.0, len(emulated) / cores)
    return max(1.0, 5.0 * -(-max(emulated) / host * share * MARGIN // 5.0))
