"""The coordinator's end of all sessions over an MQTT broker: its messages and `now` in, what to do out.

One connection to the broker carries all sessions, and its loss ends them all. The next connection has a new presence:
agents say hello to it, report in full, and get their desired sets again.

The adapter performs the effects that the methods return, in order. For `LaneReady` it calls `next_step` until that
returns None, beside other lanes; for `SessionOpened` it publishes `next_output` until the session's queue is finished,
and looks again at each `OutputReady`. It answers a `HelloReceived` by `answer_hello`, with no await between the
controller's answer and that call, and a `MessageReceived` by `reply`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.coordinator.core.link.broker_connection import BrokerConnection
from shoal.coordinator.core.link.codec import AgreedKey, MessageReader, Signer
from shoal.coordinator.core.link.hello import check_hello
from shoal.coordinator.core.link.lanes import Lane, LaneReady, Lanes, MessageDropped, PauseLane
from shoal.coordinator.core.link.outgoing import OutgoingQueue
from shoal.types import topics
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.link import FromAgent, Hello, Refused, ToAgent, Welcome
from shoal.types.mqtt_frames import Opener, Opening, OpeningAnswer, Publication, RegionPresence, Sealer
from shoal.types.topics import RETAINED, UP, Channel
from shoal.types.units import Elapsed, Seconds

HEARTBEAT_S: Final = Seconds(1.0)
MAX_INVALID: Final = 20
"""Unreadable messages in one session that end it."""


@dataclass(slots=True, eq=False)
class NodeSession:
    """One node's session, from its welcome until it is closed or the broker is lost."""

    # Name of the node.
    node: str
    # Who opened it.
    signer: Signer
    # Number of the session, given by the controller; part of the session key.
    epoch: int
    # Nonce of the hello that opened the session; a presence must name it to end the session.
    nonce: str
    # The connection to the broker that it lives on.
    connection: BrokerConnection
    # Seals messages to the node.
    sealer: Sealer
    # Opens sealed messages from the node and rejects replays.
    opener: Opener
    # Decodes what they contain.
    reader: MessageReader
    # Messages that wait to be sent to the node.
    queue: OutgoingQueue = field(default_factory=OutgoingQueue)
    # Refusal that ends the session, sealed as the last message; None while the session is open.
    last_message: ToAgent | None = None
    # Unreadable messages so far, of at most MAX_INVALID.
    invalid_count: int = 0


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A valid hello: ask the controller, then call `answer_hello`."""

    # Name of the node, by the topic.
    node: str
    # Its role, by its certificate.
    role: Role
    # What it sent.
    hello: Hello
    # Who signed it.
    signer: Signer
    # The session's key, if it is welcome.
    key: AgreedKey
    # The connection that it came by.
    connection: BrokerConnection


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message within a session: hand it to the controller, then call `reply`."""

    session: NodeSession
    message: FromAgent


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Publish the output of this session from now on."""

    session: NodeSession
    role: Role


@dataclass(frozen=True, slots=True)
class OutputReady:
    """The session has something to publish, or is closed."""

    session: NodeSession


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session is over."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """A hello was refused; its node is told so, if the broker still answers."""

    node: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """A message was not valid, and changed nothing. node: empty where its topic was not one of a node's."""

    node: str
    topic: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The broker does not answer, so the silence of these nodes proves nothing about them."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The connection to the broker is over and these sessions with it, so that their nodes' silence proves nothing."""

    # Epoch of each session, by node; at least one.
    sessions: Mapping[str, int]
    # False where the coordinator gave the connection up, as for another certificate.
    is_lost: bool


@dataclass(frozen=True, slots=True)
class LinkRestored:
    """The broker answers."""


LinkEffect = (
    Publication
    | LaneReady
    | PauseLane
    | MessageDropped
    | MessageRefused
    | HelloReceived
    | HelloRefused
    | MessageReceived
    | SessionOpened
    | OutputReady
    | SessionClosed
    | LinkLost
    | LinkClosed
    | LinkRestored
)
LinkEffects = tuple[LinkEffect, ...]
ArrivalEffects = tuple[LaneReady | MessageDropped | MessageRefused, ...]


class MqttSessions:
    """All sessions of a region over its broker."""

    def __init__(self, region: str, heartbeat_s: Seconds = HEARTBEAT_S) -> None:
        self.heartbeat_s = heartbeat_s
        """Interval of heartbeats. One that the broker has not acknowledged after as long is overdue."""
        self._region = region
        self._connection: BrokerConnection | None = None
        self._sessions: dict[str, NodeSession] = {}
        self._lanes = Lanes()

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """Filters to subscribe to, without what the broker retains: it may be of sessions that are over."""
        return tuple(topics.all_nodes(self._region, channel) for channel in UP)

    # the connection to the broker

    def will_of(self, connection: BrokerConnection) -> Publication:
        """What the broker publishes when it loses the connection; the last message of one that is given up."""
        return self._announce(connection, online=False)

    def on_connected(self, connection: BrokerConnection) -> None:
        """The broker has granted the subscriptions."""
        self._connection, self._lanes = connection, Lanes()

    def on_disconnected(self, *, is_lost: bool) -> LinkEffects:
        """The connection is over: the broker is lost, or it was given up."""
        self._connection, self._lanes = None, Lanes()
        sessions, self._sessions = self._sessions, {}
        if not sessions:
            return ()
        for session in sessions.values():
            session.queue.discard()
            session.queue.close()
        closed = LinkClosed({name: session.epoch for name, session in sessions.items()}, is_lost)
        return (closed, *(OutputReady(session) for session in sessions.values()))

    def next_heartbeat(self) -> Publication:
        """The heartbeat to publish now. Call it once for each interval, while connected."""
        connection = self._connection
        assert connection is not None, "heartbeats are for a connection"
        connection.heartbeat += 1
        return self._announce(connection, online=True)

    def on_heartbeat_overdue(self) -> LinkEffects:
        """The broker has not acknowledged a heartbeat in time. Until it does, a node's silence proves nothing."""
        return (LinkLost(tuple(self._sessions)),)

    def on_heartbeat_acknowledged(self, now: Elapsed) -> LinkEffects:
        """Also close the sessions whose certificate has ended or was revoked, and forget nodes that are gone."""
        connection = self._connection
        if connection is None:
            return ()
        closed: list[LinkEffect] = []
        for session in tuple(self._sessions.values()):
            refusal = connection.codec.check_signer(session.signer)
            if refusal is not None:
                closed += self._close(session, Refused(refusal, fatal=False))
        self._lanes.remove_idle(now, self._sessions, self.heartbeat_s)
        return (LinkRestored(), *closed)

    # incoming messages

    def on_message(self, topic: str, payload: bytes, now: Elapsed) -> ArrivalEffects:
        """Queue one message of the broker in its node's lane. Does not look at the payload."""
        if self._connection is None:
            return ()
        try:
            parsed = topics.parse(topic, self._region, UP)
        except ShoalError as error:
            return (MessageRefused("", topic, error.refusal),)
        return self._lanes.put(parsed.node, parsed.channel, payload, now)

    def next_step(self, lane: Lane, now: Elapsed) -> LinkEffects | None:
        """Handle the lane's next message, once all that the last call returned is done. None: stop reading it."""
        if not self._lanes.is_current(lane):
            return None
        if freed := self._lanes.on_handled(lane):
            return freed
        match self._lanes.take(lane, now):
            case None:
                if lane.node not in self._sessions:
                    self._lanes.remove(lane)
                return None
            case PauseLane() as pause:
                return (pause,)
            case channel, payload:
                try:
                    return self._on_payload(lane, channel, payload, now)
                except ShoalError as error:
                    return (MessageRefused(lane.node, channel, error.refusal),)

    def _on_payload(self, lane: Lane, channel: Channel, payload: bytes, now: Elapsed) -> LinkEffects:
        connection = self._connection
        if connection is None:
            return ()
        match channel:
            case Channel.HELLO:
                return self._on_hello(connection, lane.node, payload)
            case Channel.ONLINE:
                return self._on_presence(connection, lane.node, payload)
            case _:
                return self._on_sealed(connection, lane, channel, payload, now)

    def _on_hello(self, connection: BrokerConnection, node: str, payload: bytes) -> LinkEffects:
        opening, signer = connection.codec.verify_opening(node, payload)
        if not connection.is_fresh(opening):
            found = f"a hello to heartbeat {opening.heartbeat} of {opening.presence:.40}"
            raise refuse(Code.MESSAGE_REPLAYED, found, "a fresh one")
        if not connection.is_new(node, opening.hello.nonce):
            raise refuse(Code.MESSAGE_REPLAYED, "a hello that was answered already", "each nonce once")
        try:
            key = _admit(connection, node, opening, signer)
        except ShoalError as error:
            return self._refuse(connection, node, opening.hello, error.refusal)
        return (HelloReceived(node, signer.identity.role, opening.hello, signer, key, connection),)

    def answer_hello(self, received: HelloReceived, answer: Welcome | Refusal, models_address: str) -> LinkEffects:
        """Messages to a node that is welcome reach this session from now on. models_address: host:port where it
        fetches models."""
        node, hello, connection = received.node, received.hello, received.connection
        if isinstance(answer, Refusal):
            return self._refuse(connection, node, hello, answer)
        if connection is not self._connection:
            return (SessionClosed(node, answer.epoch),)  # the broker was lost meanwhile, and the node's session with it
        replaced = self._sessions.get(node)
        closed = self._end(replaced) if replaced is not None else ()
        seal = received.key.seal(answer.epoch)
        signer, reader = received.signer, connection.codec.reader_of(received.signer)
        session = NodeSession(node, signer, answer.epoch, hello.nonce, connection, Sealer(seal), Opener(seal), reader)
        self._sessions[node] = session
        opened = OpeningAnswer(answer, hello.nonce, answer.epoch, received.key.public, models_address)
        return (SessionOpened(session, received.role), self._answer(connection, node, opened), *closed)

    def _refuse(self, connection: BrokerConnection, node: str, hello: Hello, refusal: Refusal) -> LinkEffects:
        refused = HelloRefused(node, refusal)
        if connection is not self._connection:
            return (refused,)
        answer = OpeningAnswer(Refused(refusal, fatal=False), hello.nonce)
        return (refused, self._answer(connection, node, answer))

    def _on_presence(self, connection: BrokerConnection, node: str, payload: bytes) -> LinkEffects:
        """End the session if the presence is signed by the session's own key and names its hello."""
        session = self._sessions.get(node)
        if session is None:
            return ()
        presence = connection.codec.verify_presence(node, payload, session.signer)
        if presence.nonce != session.nonce or presence.online:
            return ()
        return self._end(session)

    def _on_sealed(
        self, connection: BrokerConnection, lane: Lane, channel: Channel, payload: bytes, now: Elapsed
    ) -> LinkEffects:
        session = self._sessions.get(lane.node)
        if session is None:
            return self._notify_stale(connection, lane, payload, now)
        try:
            unsealed = session.opener.open(channel, payload)
        except ShoalError as error:
            notices: LinkEffects = ()
            if error.code is Code.EPOCH_STALE:
                notices = self._notify_stale(connection, lane, payload, now)
            return (*notices, MessageRefused(lane.node, channel, error.refusal))
        try:
            message = session.reader.read(unsealed.content)
        except ShoalError as error:
            answers = self._answer_invalid(session, error.refusal)
            return (*answers, MessageRefused(lane.node, channel, error.refusal))
        return (MessageReceived(session, message),)

    def _answer_invalid(self, session: NodeSession, refusal: Refusal) -> LinkEffects:
        session.invalid_count += 1
        refused = Refused(refusal, fatal=False)
        return self._close(session, refused) if session.invalid_count >= MAX_INVALID else self.reply(session, refused)

    def _notify_stale(
        self, connection: BrokerConnection, lane: Lane, payload: bytes, now: Elapsed
    ) -> tuple[Publication, ...]:
        """Tell the sender of a message that its session is over, at most once per heartbeat. Raises ShoalError."""
        epoch = connection.codec.decode_sealed(payload).epoch
        if not self._lanes.may_notify_stale(lane, now, self.heartbeat_s):
            return ()
        refusal = Refusal(Code.EPOCH_STALE, f"epoch {epoch}", "a session that stands", "connect again")
        answer = OpeningAnswer(Refused(refusal, fatal=False), epoch=epoch)
        return (self._answer(connection, lane.node, answer),)

    # outgoing messages

    def send(self, node: str, message: ToAgent) -> LinkEffects:
        """A message to a node without a session is dropped: the next session begins with the node's whole state."""
        session = self._sessions.get(node)
        return self.reply(session, message) if session is not None else ()

    def reply(self, session: NodeSession, message: ToAgent) -> LinkEffects:
        session.queue.put(message)
        return (OutputReady(session),)

    def end(self, node: str, ending: Refused) -> LinkEffects:
        """End the node's session, if it has one, and tell it why."""
        session = self._sessions.get(node)
        return self._close(session, ending) if session is not None else ()

    def next_output(self, session: NodeSession) -> Publication | None:
        """The next message to publish; None: none waits. Raises ShoalError(TOO_LARGE)."""
        connection = session.connection
        if connection is not self._connection:
            session.queue.discard()  # the next session repeats whatever the node did not receive
        message = session.queue.next()
        if message is None:
            return None
        if isinstance(message, DesiredSet):
            payload = connection.codec.sign_desired_set(session.node, message)
            return self._publication(session.node, Channel.DESIRED, payload)
        content = connection.codec.encode_message(message)
        payload = session.sealer.seal(Channel.REQUEST, content, last=message is session.last_message)
        return self._publication(session.node, Channel.REQUEST, payload)

    def forget(self, session: NodeSession) -> LinkEffects:
        """Its output cannot be published any longer, or is finished: the session is over, if it was not before."""
        session.queue.close()
        if self._sessions.get(session.node) is not session:
            return ()
        return self._end(session)

    def _close(self, session: NodeSession, ending: Refused) -> LinkEffects:
        """End the session, and tell its node why."""
        session.last_message = ending
        session.queue.put(ending)
        return self._end(session)

    def _end(self, session: NodeSession) -> LinkEffects:
        """Take the session off; what waits in its queue is still sent."""
        session.queue.close()
        del self._sessions[session.node]
        return (OutputReady(session), SessionClosed(session.node, session.epoch))

    def _announce(self, connection: BrokerConnection, *, online: bool) -> Publication:
        presence = RegionPresence(connection.presence, connection.heartbeat, self.heartbeat_s, online)
        payload = connection.codec.sign_presence(presence)
        return Publication(topics.region_online(self._region), payload, retain=True)

    def _answer(self, connection: BrokerConnection, node: str, answer: OpeningAnswer) -> Publication:
        return self._publication(node, Channel.WELCOME, connection.codec.sign_answer(node, answer))

    def _publication(self, node: str, channel: Channel, payload: bytes) -> Publication:
        return Publication(topics.of_node(self._region, node, channel), payload, channel in RETAINED)


def _admit(connection: BrokerConnection, node: str, opening: Opening, signer: Signer) -> AgreedKey:
    """The session's key, if this signer may open one in this name. Raises ShoalError(NODE_MISMATCH |
    MESSAGE_INVALID)."""
    uri = signer.identity.uri
    if signer.identity.name != node:
        raise refuse(Code.NODE_MISMATCH, f"a hello of {uri} as {node}", uri, "a node speaks for itself")
    check_hello(opening.hello, signer.identity)
    return connection.codec.agree(node, opening.key, opening.hello.nonce)
