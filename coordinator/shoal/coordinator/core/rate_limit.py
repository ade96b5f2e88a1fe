"""Token buckets that limit how often a caller may fail or ask: one for each address or name, up to a maximum number."""

from typing import Final

from shoal.types.units import Elapsed

AUDIT_INTERVAL_S: Final = 60.0
MESSAGE_BURST: Final = 256
"""Messages of one node that are read without delay: what an agent reports when its link opens, with room."""
MESSAGES_PER_S: Final = 50.0
"""Messages a second after the burst: ten times what the shortest heartbeat (200 ms) sends."""


class TokenBucket:
    """The budget of one caller. Its refusals make at most one audit entry a minute."""

    def __init__(self, burst: float, per_s: float, now: Elapsed) -> None:
        self._burst = burst
        self._per_s = per_s
        self._level = burst
        self._at = now
        self._audited: Elapsed | None = None

    def allows(self, now: Elapsed) -> bool:
        """Whether a token is left. Takes none, because some callers spend one only after a failure."""
        self._fill(now)
        return self._level >= 1

    def spend(self, now: Elapsed, amount: float = 1.0) -> None:
        self._fill(now)
        self._level = max(0.0, self._level - amount)

    def charge(self, now: Elapsed, amount: float) -> None:
        """Takes what something turned out to cost, which may be more than is left: the caller then owes it."""
        self._fill(now)
        self._level -= amount

    def should_audit(self, now: Elapsed) -> bool:
        """True at most once in AUDIT_INTERVAL_S, so that an attacker cannot flood the audit log."""
        if self._audited is not None and now - self._audited < AUDIT_INTERVAL_S:
            return False
        self._audited = now
        return True

    def _fill(self, now: Elapsed) -> None:
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now


class RateLimiter:
    """For each key, `burst` tokens at first and `per_s` more a second. At most `max_keys` buckets exist."""

    def __init__(self, burst: float, per_s: float, max_keys: int) -> None:
        self._burst = burst
        self._per_s = per_s
        self._max_keys = max_keys
        self._buckets: dict[str, TokenBucket] = {}

    def bucket_of(self, key: str, now: Elapsed) -> TokenBucket:
        """The bucket of `key`, which is created if needed. Beyond `max_keys` the bucket that was used least recently is
        dropped, so that an attacker with many addresses costs constant memory and time."""
        bucket = self._buckets.pop(key, None) or TokenBucket(self._burst, self._per_s, now)
        self._buckets[key] = bucket
        if len(self._buckets) > self._max_keys:
            del self._buckets[next(iter(self._buckets))]
        return bucket
