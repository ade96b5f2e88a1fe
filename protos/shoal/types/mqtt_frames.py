"""Messages of the agent link over MQTT, as both ends' cores see them, and the numbers that make each count once.

Encoding, signatures and MACs stay outside: a core gets them as a codec, and a session's MAC as a `SessionSeal`.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import Hello, ToAgent
from shoal.types.topics import Channel
from shoal.types.units import Seconds

MAX_SEQUENCE: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Publication:
    """A message for the broker, always at QoS 1. payload: signed or sealed; nobody but the other end can read it as
    valid."""

    topic: str
    payload: bytes
    # True: the broker keeps it for later subscribers.
    retain: bool = False


@dataclass(frozen=True, slots=True)
class RegionPresence:
    """The coordinator's heartbeat, to all nodes; retained, and its last will."""

    # Identifies one connection of the coordinator to the broker.
    presence: str
    # Number of the heartbeat on that connection, from 1.
    heartbeat: int
    # Interval of the heartbeats.
    every_s: Seconds
    # False: that connection has ended.
    online: bool


@dataclass(frozen=True, slots=True)
class NodePresence:
    """Whether the session of the hello with that nonce lives; retained, and the node's last will."""

    nonce: str
    online: bool


@dataclass(frozen=True, slots=True)
class Opening:
    """A hello, addressed to one presence of the coordinator."""

    hello: Hello
    # The node's public half of the session's key.
    key: bytes
    # Presence and heartbeat of the coordinator that the node saw last.
    presence: str
    heartbeat: int


@dataclass(frozen=True, slots=True)
class OpeningAnswer:
    """The answer to the hello with that nonce; or, without a nonce, a refusal that ends the session of that epoch."""

    # A Welcome or a Refused.
    answer: ToAgent
    # Nonce of the hello; empty in a notice to a session that has ended.
    nonce: str = ""
    # Epoch of the session; 0 where the hello was refused.
    epoch: int = 0
    # The coordinator's public half of the session's key, with a welcome.
    key: bytes = b""
    # host:port where models are served, with a welcome.
    models_address: str = ""


@dataclass(frozen=True, slots=True)
class SealedFrame:
    """A message within a session."""

    # The session's epoch; a message of another epoch is outdated.
    epoch: int
    # Number within the session and direction, from 1. It grows from message to message.
    sequence: int
    # An encoded `FromAgent` or `ToAgent`.
    content: bytes
    # True: the session ends with this message.
    last: bool
    # By the session's key, over all of the above, its topic and its region; empty until it is encoded.
    mac: bytes = b""


class SessionSeal(Protocol):
    """The key of one session, which only its two ends have."""

    @property
    def epoch(self) -> int: ...

    def encode(self, channel: Channel, frame: SealedFrame) -> bytes:
        """The frame with its MAC. Raises ShoalError(TOO_LARGE)."""
        ...

    def decode(self, payload: bytes) -> SealedFrame:
        """The frame, unverified. Raises ShoalError(MESSAGE_INVALID | TOO_LARGE)."""
        ...

    def check(self, channel: Channel, frame: SealedFrame) -> None:
        """Raises ShoalError(SIGNATURE_INVALID) unless the other end of this session sealed it for this channel."""
        ...


class Sealer:
    """Numbers and seals the messages that one end sends in one session."""

    def __init__(self, seal: SessionSeal) -> None:
        self._seal = seal
        self._sequence = 0

    def seal(self, channel: Channel, content: bytes, *, last: bool = False) -> bytes:
        """Raises ShoalError(TOO_LARGE)."""
        payload = self._seal.encode(channel, SealedFrame(self._seal.epoch, self._sequence + 1, content, last))
        self._sequence += 1
        return payload


@dataclass(frozen=True, slots=True)
class Unsealed:
    """Content of a sealed message."""

    content: bytes
    # True: the session ends with this message.
    last: bool


class Opener:
    """Opens the messages that one end receives in one session: those of its epoch, each once, and never an older one
    after a newer one on the same channel. A message that is refused does not change its state."""

    def __init__(self, seal: SessionSeal) -> None:
        self._seal = seal
        self._sequences: dict[Channel, int] = {}

    def open(self, channel: Channel, payload: bytes) -> Unsealed:
        """Raises ShoalError(MESSAGE_INVALID | TOO_LARGE | EPOCH_STALE | SIGNATURE_INVALID | MESSAGE_REPLAYED)."""
        frame = self._seal.decode(payload)
        if frame.epoch != self._seal.epoch:
            raise refuse(
                Code.EPOCH_STALE, f"epoch {frame.epoch}", f"epoch {self._seal.epoch}", "it is of another session"
            )
        if not 0 < frame.sequence <= MAX_SEQUENCE:
            raise invalid_frame(f"sequence {frame.sequence}")
        self._seal.check(channel, frame)
        newest = self._sequences.get(channel, 0)
        if frame.sequence <= newest:
            raise refuse(
                Code.MESSAGE_REPLAYED,
                f"{channel} {frame.sequence} after {newest}",
                "each message once, in order",
                "it was dropped",
            )
        self._sequences[channel] = frame.sequence
        return Unsealed(frame.content, frame.last)


def invalid_frame(found: str) -> ShoalError:
    return refuse(
        Code.MESSAGE_INVALID, found, "a message as protos/shoal/v1/mqtt.proto defines it", "update the sender"
    )
