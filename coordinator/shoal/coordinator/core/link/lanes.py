"""Messages that came over a broker and wait to be read: a lane for each node, so that a flood, a slow store or junk
affects that node only."""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from shoal.coordinator.core.rate_limit import MESSAGE_BURST, MESSAGES_PER_S, TokenBucket
from shoal.types.topics import Channel
from shoal.types.units import Elapsed, Seconds

MAX_WAITING: Final = 64
"""Messages of one node that wait to be read; beyond it the oldest are dropped."""
MAX_LANES: Final = 20_000
"""Nodes that may have messages waiting."""
MAX_CONCURRENT_HELLOS: Final = 16
"""Hellos handled at once; in a reconnect storm the others wait, so that heartbeats and statuses are not delayed."""


class HelloSlot(Enum):
    """A lane's right to have a hello handled, one of MAX_CONCURRENT_HELLOS."""

    # It has none.
    NONE = auto()
    # It was given one after a wait, and has not used it yet.
    GRANTED = auto()
    # Its hello is handled.
    IN_USE = auto()


@dataclass(slots=True, eq=False)
class Lane:
    """Messages of one node, read one after the other."""

    # Name of the node.
    node: str
    # Limits how fast messages are read, so that a flood delays nobody else.
    bucket: TokenBucket
    # Unread messages with their channels; when full, the oldest is dropped.
    waiting: deque[tuple[Channel, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    # True from `LaneReady` until it was found empty.
    is_reading: bool = False
    # Whether a hello of this node is handled.
    slot: HelloSlot = HelloSlot.NONE
    # When the node was last told that its session is over; None: never.
    stale_notified_at: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class LaneReady:
    """Read this lane, beside others, until nothing waits there."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class PauseLane:
    """Read this lane's next message after so many seconds."""

    seconds: Seconds


@dataclass(frozen=True, slots=True)
class MessageDropped:
    """A message was dropped because too many wait. reason: `lanes`, of too many nodes; `flood`, of this one."""

    reason: str


class Lanes:
    """The lanes of one connection to the broker."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._slots_in_use = 0
        self._queued_for_slot: deque[Lane] = deque()

    def __len__(self) -> int:
        return len(self._lanes)

    def is_current(self, lane: Lane) -> bool:
        return self._lanes.get(lane.node) is lane

    def put(self, node: str, channel: Channel, payload: bytes, now: Elapsed) -> tuple[LaneReady | MessageDropped, ...]:
        """Queue a message. Does not look at the payload."""
        lane = self._lanes.get(node)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                return (MessageDropped("lanes"),)
            lane = self._lanes[node] = Lane(node, TokenBucket(MESSAGE_BURST, MESSAGES_PER_S, now))
        found: list[LaneReady | MessageDropped] = []
        if len(lane.waiting) == MAX_WAITING:
            found.append(MessageDropped("flood"))
        lane.waiting.append((channel, payload))
        if not lane.is_reading:
            lane.is_reading = True
            found.append(LaneReady(lane))
        return tuple(found)

    def take(self, lane: Lane, now: Elapsed) -> tuple[Channel, bytes] | PauseLane | None:
        """The lane's next message, or how long to wait for it. None: stop reading it. Either nothing waits, or a hello
        does, and `LaneReady` comes once it may be handled."""
        if not lane.waiting:
            lane.is_reading = False
            return None
        if not lane.bucket.allows(now):
            return PauseLane(Seconds(1.0 / MESSAGES_PER_S))
        if lane.slot is HelloSlot.GRANTED:  # even if a flood has pushed out the hello: `finish` passes it on
            lane.slot = HelloSlot.IN_USE
        elif lane.waiting[0][0] is Channel.HELLO:
            if self._slots_in_use >= MAX_CONCURRENT_HELLOS:
                self._queued_for_slot.append(lane)
                return None
            self._slots_in_use += 1
            lane.slot = HelloSlot.IN_USE
        lane.bucket.spend(now)
        return lane.waiting.popleft()

    def on_handled(self, lane: Lane) -> tuple[LaneReady, ...]:
        """The message that was taken last is handled."""
        if lane.slot is not HelloSlot.IN_USE:
            return ()
        lane.slot = HelloSlot.NONE
        if not self._queued_for_slot:
            self._slots_in_use -= 1
            return ()
        successor = self._queued_for_slot.popleft()
        successor.slot = HelloSlot.GRANTED
        return (LaneReady(successor),)

    def may_notify_stale(self, lane: Lane, now: Elapsed, every_s: Seconds) -> bool:
        """True at most once in `every_s`: the node may be told that its session is over."""
        if self._is_notified(lane, now, every_s):
            return False
        lane.stale_notified_at = now
        return True

    def remove_idle(self, now: Elapsed, sessions: Container[str], notice_every_s: Seconds) -> None:
        """Remove the lanes that are not read, of nodes without a session, once their stale notice limits no further
        one. They would leave no room for other nodes."""
        for node, lane in tuple(self._lanes.items()):
            if node not in sessions and not lane.is_reading and not self._is_notified(lane, now, notice_every_s):
                del self._lanes[node]

    def remove(self, lane: Lane) -> None:
        """Remove a lane that is not read, unless its stale notice limits further ones."""
        if lane.stale_notified_at is None and not lane.is_reading:
            self._lanes.pop(lane.node, None)

    @staticmethod
    def _is_notified(lane: Lane, now: Elapsed, every_s: Seconds) -> bool:
        return lane.stale_notified_at is not None and now - lane.stale_notified_at < every_s
