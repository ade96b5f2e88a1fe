"""Delay before the next attempt: exponential, capped, and spread by a hash of names instead of random numbers."""

import hashlib

from shoal.types.units import Seconds


def delay(name: str, attempt: int, *, base_s: float, cap_s: float) -> Seconds:
    """Seconds before retry number `attempt`, counted from 0.

    Half of min(cap, base * 2^attempt) is fixed. A hash of (name, attempt) scales the other half, so that a fleet that
    failed together does not retry together.
    """
    ceiling = min(cap_s, base_s * 2 ** min(attempt, 32))
    digest = hashlib.sha256(f"{name}/{attempt}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return Seconds(ceiling * (0.5 + 0.5 * share))
