"""One connection of the coordinator to the broker, and which hellos count on it."""

from collections import deque
from typing import Final

from shoal.coordinator.core.link.codec import RegionCodec
from shoal.types.mqtt_frames import Opening

MAX_HELLO_AGE_HEARTBEATS: Final = 10
"""A hello names a heartbeat that it has seen. One older than this many heartbeats is a replay."""


class BrokerConnection:
    """presence: unique to this connection. codec: signs with the certificate that was valid when it began."""

    def __init__(self, presence: str, codec: RegionCodec) -> None:
        self.presence = presence
        self.codec = codec
        self.heartbeat = 0
        """Number of the last heartbeat; 0 before the first."""
        self._recent: deque[tuple[int, str]] = deque()
        """(heartbeat, hello) of the hellos that could still be replayed."""
        self._known: set[str] = set()

    def is_fresh(self, opening: Opening) -> bool:
        """True if the node has seen a recent heartbeat of this connection."""
        return opening.presence == self.presence and self._oldest_heartbeat <= opening.heartbeat <= self.heartbeat

    def is_new(self, node: str, nonce: str) -> bool:
        """True if this fresh hello arrives for the first time; remembers it for as long as it is fresh."""
        while self._recent and self._recent[0][0] < self._oldest_heartbeat:
            self._known.discard(self._recent.popleft()[1])
        hello = f"{node}/{nonce}"
        if hello in self._known:
            return False
        self._known.add(hello)
        self._recent.append((self.heartbeat, hello))
        return True

    @property
    def _oldest_heartbeat(self) -> int:
        return self.heartbeat - MAX_HELLO_AGE_HEARTBEATS
