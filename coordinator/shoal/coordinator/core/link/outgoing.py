"""The bounded queue of messages to one node: a node that does not read affects only itself."""

from collections import deque
from typing import Final

from shoal.types.assignment import DesiredSet
from shoal.types.link import ToAgent

MAX_WAITING: Final = 32
"""Messages other than the desired set that may wait for one node. One more ends the session, because the node does not
read."""


class OutgoingQueue:
    """Messages that wait for one node. A newer desired set replaces an older one that was not sent yet."""

    def __init__(self) -> None:
        self._waiting: deque[ToAgent] = deque()
        self._desired: DesiredSet | None = None
        self._closed = False

    @property
    def is_finished(self) -> bool:
        """True if it is closed and nothing waits any longer."""
        return self._closed and not self._waiting and self._desired is None

    def put(self, message: ToAgent) -> None:
        if isinstance(message, DesiredSet):
            self._desired = message
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
        else:
            self._closed = True

    def close(self) -> None:
        """What waits is still sent."""
        self._closed = True

    def discard(self) -> None:
        """Close it, and drop what waits."""
        self._closed, self._desired = True, None
        self._waiting.clear()

    def next(self) -> ToAgent | None:
        """Take the next message; None: none waits. The desired set is the last of those that wait."""
        if self._waiting:
            return self._waiting.popleft()
        desired, self._desired = self._desired, None
        return desired
