"""Delay before the next attempt: exponential, capped, and spread by a hash of names instead of random numbers."""

from typing import Final

from shoal.types import stable_hash
from shoal.types.units import Seconds

EQUAL_JITTER: Final = 0.5
"""Half of the delay is spread, the other half is a pause in any case: "equal jitter" in M. Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015."""
_MAX_DOUBLINGS: Final = 32
"""More change nothing below any cap in use, and a float holds 2^32 times any base."""


def delay(name: str, attempt: int, *, base_s: float, cap_s: float, jitter: float = EQUAL_JITTER) -> Seconds:
    """Seconds before retry number `attempt`, counted from 0.

    The longest is min(cap, base * 2^attempt). A hash of (name, attempt) takes up to the share `jitter` off it, so that
    a fleet that failed together does not retry together. With a jitter of 0 all wait equally long.
    """
    ceiling = min(cap_s, base_s * 2 ** min(attempt, _MAX_DOUBLINGS))
    share = stable_hash.fraction(name, str(attempt))
    return Seconds(ceiling * (1.0 - jitter + jitter * share))
