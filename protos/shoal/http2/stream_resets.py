"""Detects clients that reset streams before their messages arrive: HTTP/2 rapid reset (CVE-2023-44487).

No limit of concurrent streams counts such a stream. Envoy closes a connection by the same rule
(`overload.premature_reset_total_stream_count`).
"""

from dataclasses import dataclass
from typing import Final

STREAMS: Final = 500
"""Streams of one connection before its resets are evaluated: Envoy's default."""


@dataclass(slots=True)
class ResetCount:
    """Streams of one connection. Older ones weigh less."""

    # Streams since the last evaluation, older ones halved.
    streams: int = 0
    # Those of them that were reset before their message arrived.
    resets: int = 0

    def record(self, *, was_reset: bool) -> bool:
        """Count a stream. Returns True when more than half were reset early, at most once for each STREAMS."""
        self.streams += 1
        self.resets += was_reset
        if self.streams < STREAMS:
            return False
        is_storm = 2 * self.resets > self.streams
        self.streams, self.resets = (0, 0) if is_storm else (self.streams // 2, self.resets // 2)
        return is_storm
