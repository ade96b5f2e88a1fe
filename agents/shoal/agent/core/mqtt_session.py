"""The agent's end of one session over an MQTT broker: messages of the broker and `now` in, messages for it out.

A session begins with a signed hello and the coordinator's signed welcome, which agree on a key. From then on, status
and requests are sealed with it. The session ends when the coordinator ends it or leaves, when its heartbeats stop, and
when the adapter says so (`end`). A message that the broker keeps or repeats never counts as a sign of life of the
coordinator, and changes nothing.

The adapter publishes what the methods return, in order; calls `on_time` at `deadline`; and reads `next_message` until
it is None, after which `end_refusal` says whether the session is over.
"""

from collections import deque
from typing import Final, Protocol

from shoal.types import topics
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import FromAgent, Hello, Receipts, Refused, ToAgent, Welcome
from shoal.types.mqtt_frames import (
    NodePresence,
    Opener,
    Opening,
    OpeningAnswer,
    Publication,
    RegionPresence,
    Sealer,
    SessionSeal,
)
from shoal.types.topics import DOWN, RETAINED, Channel
from shoal.types.units import Elapsed, Seconds

WELCOME_S: Final = Seconds(5.0)
"""For how long the welcome is awaited; also the longest interval of heartbeats that is believed."""
MISSED_HEARTBEATS: Final = 3
MAX_INBOX: Final = 64
"""Messages other than the desired set that may wait for the supervisor. The oldest are dropped."""


class NodeCodec(Protocol):
    """Encodes, signs and verifies for one node, in one session. All `verify_*` raise ShoalError where the message is
    not one that the region's coordinator signed for this node, or for all nodes."""

    @property
    def public_key(self) -> bytes:
        """This node's half of the session's key."""
        ...

    def agree(self, coordinator_key: bytes, nonce: str, epoch: int) -> SessionSeal:
        """The key of the session. Raises ShoalError(MESSAGE_INVALID)."""
        ...

    def sign_opening(self, opening: Opening) -> bytes: ...
    def sign_presence(self, presence: NodePresence) -> bytes: ...
    def verify_presence(self, payload: bytes) -> RegionPresence: ...
    def verify_answer(self, payload: bytes) -> OpeningAnswer: ...
    def verify_desired_set(self, payload: bytes) -> DesiredSet: ...
    def encode_message(self, message: FromAgent) -> bytes: ...
    def decode_message(self, content: bytes) -> ToAgent:
        """Raises ShoalError(MESSAGE_INVALID | ...)."""
        ...


class MqttSessionMachine:
    """One session, from its hello to its end. Only `now` moves its timers."""

    def __init__(self, region: str, node: str, hello: Hello, codec: NodeCodec) -> None:
        self.welcome: Welcome | None = None
        self.models_address = ""
        """host:port where the coordinator serves models; empty before the welcome."""
        self.hello_refused: Refused | None = None
        """The coordinator's answer to the hello, where it refused it."""
        self.end_refusal: Refusal | None = None
        """Why the session is over; None while it is not. The first reason stays."""
        self.deadline: Elapsed | None = None
        """When `on_time` is due; None before `start`."""
        self._region = region
        self._node = node
        self._hello = hello
        self._codec = codec
        self._presence = RegionPresence("", 0, Seconds(0.0), online=False)
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._inbox: deque[ToAgent] = deque(maxlen=MAX_INBOX)
        self._desired: DesiredSet | None = None

    # what the connection to the broker needs

    @property
    def will(self) -> Publication:
        """What the broker publishes when it loses the connection: it names the hello, since no epoch exists yet."""
        return self._announce(online=False)

    @property
    def subscriptions(self) -> tuple[str, ...]:
        own = (topics.of_node(self._region, self._node, channel) for channel in DOWN)
        return (topics.region_online(self._region), *own)

    def start(self, now: Elapsed) -> None:
        """The broker has granted the subscriptions: the welcome is awaited from now on."""
        self.deadline = Elapsed(now + WELCOME_S)

    def on_announced(self, now: Elapsed) -> None:
        """The broker has acknowledged this node's presence: heartbeats are expected from now on."""
        self._expect_heartbeat(now)

    # incoming

    def on_message(self, topic: str, payload: bytes, *, retained: bool, now: Elapsed) -> tuple[Publication, ...]:
        """Handle one message from the broker. retained: the broker had kept it. Raises ShoalError for a message that
        is not valid here; it changed nothing."""
        if self.end_refusal is not None:
            return ()
        if topic == topics.region_online(self._region):
            return self._on_presence(self._codec.verify_presence(payload), now)
        match self._parse_channel(topic):
            case Channel.WELCOME:
                return self._on_answer(self._codec.verify_answer(payload), now)
            case Channel.DESIRED:
                self._on_desired_set(self._codec.verify_desired_set(payload), retained=retained)
            case channel:
                self._on_sealed(channel, payload)
        return ()

    def on_time(self, now: Elapsed) -> None:
        """End the session if the welcome or the heartbeats have not come in time."""
        if self.deadline is None or now < self.deadline:
            return
        if self.welcome is not None:
            self.end(_end_refusal(f"no heartbeat of the coordinator for {self._silence_s:g}s"))
        else:
            self.end(_end_refusal("no welcome" if self._presence.presence else "the coordinator is not there"))

    def next_message(self) -> ToAgent | None:
        """The next message for the supervisor. The desired set is the last of those that wait, and only the newest."""
        if self._inbox:
            return self._inbox.popleft()
        desired, self._desired = self._desired, None
        return desired

    def _on_presence(self, presence: RegionPresence, now: Elapsed) -> tuple[Publication, ...]:
        """Before the welcome, an unknown presence is answered with a hello. In a session it means that the coordinator
        restarted its connection and does not know this session."""
        seen, is_open = self._presence, self.welcome is not None
        if presence.presence == seen.presence:
            if presence.heartbeat <= seen.heartbeat and presence.online:
                return ()  # a repeated heartbeat is no sign of life
        elif is_open:
            if presence.online:
                self.end(_end_refusal("the coordinator has connected anew"))
            return ()  # else an earlier connection of the coordinator has ended
        if not presence.online:
            if is_open:
                self.end(_end_refusal("the coordinator has left the broker"))
            return ()
        if not 0.0 < presence.every_s <= WELCOME_S:
            raise refuse(Code.MESSAGE_INVALID, f"a heartbeat every {presence.every_s}s", f"at most {WELCOME_S:g}s")
        self._presence = presence
        if is_open:
            self._expect_heartbeat(now)
        elif presence.presence != seen.presence:
            return (self._open(presence),)
        return ()

    def _open(self, presence: RegionPresence) -> Publication:
        opening = Opening(self._hello, self._codec.public_key, presence.presence, presence.heartbeat)
        return self._publication(Channel.HELLO, self._codec.sign_opening(opening))

    def _on_answer(self, opened: OpeningAnswer, now: Elapsed) -> tuple[Publication, ...]:
        answer = opened.answer
        if self.welcome is not None:
            if opened.epoch == self.welcome.epoch and isinstance(answer, Refused):
                self.end(answer.refusal)
            return ()
        if opened.nonce != self._hello.nonce:
            return ()  # the answer to another hello of this node
        if isinstance(answer, Refused):
            self.hello_refused = answer
            self.end(answer.refusal)
            return ()
        if not isinstance(answer, Welcome):
            raise refuse(Code.MESSAGE_INVALID, type(answer).__name__, "a welcome", "update the coordinator")
        seal = self._codec.agree(opened.key, self._hello.nonce, answer.epoch)
        self.welcome, self._sealer, self._opener = answer, Sealer(seal), Opener(seal)
        self.models_address = opened.models_address
        if self._desired is not None and self._desired.version.history != answer.history:
            self._desired = None  # retained by the broker, from a history that has ended
        self._expect_heartbeat(now)
        return (self._announce(online=True),)

    def _on_desired_set(self, desired: DesiredSet, *, retained: bool) -> None:
        if retained and _is_older(desired.version, self._hello.holds):
            raise refuse(
                Code.GENERATION_STALE,
                f"generation {desired.version.generation} kept by the broker",
                "the newest",
                "the coordinator sends it again",
            )
        if self._desired is None or not _is_older(desired.version, self._desired.version):
            self._desired = desired

    def _on_sealed(self, channel: Channel, payload: bytes) -> None:
        if self._opener is None:
            return  # of an earlier session
        unsealed = self._opener.open(channel, payload)
        message = self._codec.decode_message(unsealed.content)
        self._inbox.append(message)
        if unsealed.last:
            self.end(message.refusal if isinstance(message, Refused) else _end_refusal("the coordinator ended it"))

    # outgoing

    def send(self, message: FromAgent) -> Publication:
        """Raises ShoalError: the reason why the session is over, or TOO_LARGE."""
        if self.end_refusal is not None or self._sealer is None:
            raise ShoalError(self.end_refusal or _end_refusal("it is closed"))
        channel = Channel.CAPABILITY if isinstance(message, Receipts) else Channel.STATUS
        return self._publication(channel, self._sealer.seal(channel, self._codec.encode_message(message)))

    def close(self) -> tuple[Publication, ...]:
        """End the session. What it returns tells the coordinator; where it is lost, the last will says the same."""
        self.end(_end_refusal("it is closed"))
        return (self._announce(online=False),) if self.welcome is not None else ()

    def end(self, refusal: Refusal) -> None:
        """Nothing is sent from now on, and once the waiting messages are read, nothing is received."""
        self.end_refusal = self.end_refusal or refusal

    @property
    def _silence_s(self) -> float:
        return MISSED_HEARTBEATS * self._presence.every_s

    def _expect_heartbeat(self, now: Elapsed) -> None:
        self.deadline = Elapsed(now + self._silence_s)

    def _parse_channel(self, topic: str) -> Channel:
        """Raises ShoalError(TOPIC_DENIED | NODE_MISMATCH)."""
        parsed = topics.parse(topic, self._region, DOWN)
        if parsed.node != self._node:
            raise refuse(Code.NODE_MISMATCH, f"a message to {parsed.node}", self._node, "look at the broker")
        return parsed.channel

    def _announce(self, *, online: bool) -> Publication:
        return self._publication(
            Channel.ONLINE, self._codec.sign_presence(NodePresence(self._hello.nonce, online=online))
        )

    def _publication(self, channel: Channel, payload: bytes) -> Publication:
        return Publication(topics.of_node(self._region, self._node, channel), payload, channel in RETAINED)


def _is_older(offered: Version, current: Version | None) -> bool:
    return (
        current is not None
        and offered.history == current.history
        and (offered.term, offered.generation) < (current.term, current.generation)
    )


def _end_refusal(found: str) -> Refusal:
    return Refusal(Code.COORDINATOR_UNREACHABLE, found, "a session", "it is tried again")
