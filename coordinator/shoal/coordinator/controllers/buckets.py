"""How often somebody may fail or ask: one bucket for each address or name, up to a bound of them."""

from typing import Final

from shoal.types.units import Elapsed

AUDIT_EVERY_S: Final = 60.0


class Bucket:
    """What one address may still do. One audit entry a minute tells of it."""

    def __init__(self, burst: float, per_s: float, now: Elapsed) -> None:
        self._burst = burst
        self._per_s = per_s
        self._level = burst
        self._at = now
        self._audited: Elapsed | None = None

    def allows(self, now: Elapsed) -> bool:
        self._fill(now)
        return self._level >= 1

    def spend(self, now: Elapsed, amount: float = 1.0) -> None:
        self._fill(now)
        self._level = max(0.0, self._level - amount)

    def shall_audit(self, now: Elapsed) -> bool:
        if self._audited is not None and now - self._audited < AUDIT_EVERY_S:
            return False
        self._audited = now
        return True

    def _fill(self, now: Elapsed) -> None:
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now


class Buckets:
    """burst at once, then per_s a second, for each of at most `most` keys."""

    def __init__(self, burst: float, per_s: float, most: int) -> None:
        self._burst = burst
        self._per_s = per_s
        self._most = most
        self._buckets: dict[str, Bucket] = {}

    def of(self, key: str, now: Elapsed) -> Bucket:
        """An attacker with many addresses pushes out those that were quiet for longest, at a constant cost."""
        bucket = self._buckets.pop(key, None) or Bucket(self._burst, self._per_s, now)
        self._buckets[key] = bucket
        if len(self._buckets) > self._most:
            del self._buckets[next(iter(self._buckets))]
        return bucket
