"""The coordinator's end of sessions over a broker: which hellos count, which sessions stand, what nodes are told."""

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from shoal.coordinator.core.link.broker_connection import MAX_HELLO_AGE_HEARTBEATS, BrokerConnection
from shoal.coordinator.core.link.codec import Signer
from shoal.coordinator.core.link.lanes import LaneReady
from shoal.coordinator.core.link.mqtt_sessions import (
    HEARTBEAT_S,
    MAX_INVALID,
    HelloReceived,
    HelloRefused,
    LinkClosed,
    LinkEffect,
    LinkLost,
    LinkRestored,
    MessageReceived,
    MessageRefused,
    MqttSessions,
    NodeSession,
    OutputReady,
    SessionClosed,
    SessionOpened,
)
from shoal.coordinator.core.link.outgoing import MAX_WAITING
from shoal.simulator.parts.broker_links import NonceKey, UnsignedNodeCodec, UnsignedRegionCodec
from shoal.simulator.parts.network import REGION
from shoal.types import topics
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node, Role
from shoal.types.link import FromAgent, Hello, NodeEvents, ProbeNow, Receipts, Refused, ToAgent, Welcome
from shoal.types.mqtt_frames import NodePresence, Opener, Opening, OpeningAnswer, Publication, Sealer
from shoal.types.topics import Channel
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.wire import mqtt_frames

NAME = "edge-1"
ENDING = Refusal(Code.CERT_REVOKED, "serial 7", "one that stands", "enrol again")
E = TypeVar("E")


def hello(nonce: str, name: str = NAME) -> Hello:
    node = Node(name, REGION, Role.AGENT, {}, "1", "x", "x", Bytes(1), Bytes(1), (), "a:1", "a:4", "b")
    return Hello(node, nonce, None, 1, Wall(0.0))


def welcome(epoch: int, nonce: str) -> Welcome:
    return Welcome(epoch, nonce, "h", 1, Seconds(1.0), Wall(0.0))


class EndingCodec(UnsignedRegionCodec):
    """ended: why the certificates have ended."""

    ended: Refusal | None = None

    def check_signer(self, signer: Signer) -> Refusal | None:
        return self.ended


class Region:
    """The sessions, and what nodes send to them."""

    def __init__(self) -> None:
        self.now = Elapsed(50.0)
        self.sessions = MqttSessions(REGION)
        self.codec = EndingCodec()
        self.connections = 0
        self.node_codec = UnsignedNodeCodec(NAME)
        self.connect()

    def connect(self) -> None:
        self.connections += 1
        self.connection = BrokerConnection(f"p-{self.connections}", self.codec)
        self.sessions.on_connected(self.connection)
        self.sessions.next_heartbeat()

    def say(self, channel: Channel, payload: bytes, node: str = NAME) -> list[LinkEffect]:
        """All that follows from a message, until its lane is empty."""
        found: list[LinkEffect] = []
        effects = self.sessions.on_message(topics.of_node(REGION, node, channel), payload, self.now)
        for effect in effects:
            if isinstance(effect, LaneReady):
                while (step := self.sessions.next_step(effect.lane, self.now)) is not None:
                    found += step
            else:
                found.append(effect)
        return found

    def say_hello(self, nonce: str, *, presence: str = "", heartbeat: int = 0) -> list[LinkEffect]:
        opening = Opening(
            hello(nonce), b"", presence or self.connection.presence, heartbeat or self.connection.heartbeat
        )
        return self.say(Channel.HELLO, self.node_codec.sign_opening(opening))

    def open(self, nonce: str = "n", epoch: int = 7) -> NodeSession:
        received = only(HelloReceived, self.say_hello(nonce))
        return only(SessionOpened, self.sessions.answer_hello(received, welcome(epoch, nonce), "models:1")).session

    def say_in_session(self, sealer: Sealer, message: FromAgent) -> list[LinkEffect]:
        return self.say(Channel.STATUS, sealer.seal(Channel.STATUS, self.node_codec.encode_message(message)))

    def outputs(self, session: NodeSession) -> list[Publication]:
        found = []
        while (publication := self.sessions.next_output(session)) is not None:
            found.append(publication)
        return found


def only(kind: type[E], effects: Any) -> E:
    (found,) = (effect for effect in effects if isinstance(effect, kind))
    return found


def codes(effects: list[LinkEffect]) -> list[Code]:
    return [effect.refusal.code for effect in effects if isinstance(effect, MessageRefused)]


def read_answer(effects: Any) -> OpeningAnswer:
    return mqtt_frames.decode_opening_answer(only(Publication, effects).payload)


def node_sealer(nonce: str = "n", epoch: int = 7) -> Sealer:
    return Sealer(NonceKey(NAME, nonce).seal(epoch))


def test_a_hello_is_asked_about_and_its_welcome_opens_a_session() -> None:
    region = Region()
    received = only(HelloReceived, region.say_hello("n"))
    assert (received.node, received.role, received.hello) == (NAME, Role.AGENT, hello("n"))
    assert region.sessions.session_count == 0
    effects = region.sessions.answer_hello(received, welcome(7, "n"), "models:1")
    assert read_answer(effects) == OpeningAnswer(welcome(7, "n"), "n", 7, b"", "models:1")
    assert only(SessionOpened, effects).session.epoch == 7
    assert region.sessions.session_count == 1


def test_a_hello_that_is_refused_is_told_so() -> None:
    region = Region()
    received = only(HelloReceived, region.say_hello("n"))
    effects = region.sessions.answer_hello(received, ENDING, "")
    assert only(HelloRefused, effects) == HelloRefused(NAME, ENDING)
    assert read_answer(effects) == OpeningAnswer(Refused(ENDING, fatal=False), "n")
    assert region.sessions.session_count == 0


def test_a_hello_in_another_s_name_is_told_so_and_asks_nobody() -> None:
    region = Region()
    opening = Opening(hello("n", "edge-2"), b"", region.connection.presence, region.connection.heartbeat)
    effects = region.say(Channel.HELLO, region.node_codec.sign_opening(opening))
    assert only(HelloRefused, effects).refusal.code is Code.NODE_MISMATCH
    assert not any(isinstance(effect, HelloReceived) for effect in effects)


def test_a11_a_hello_counts_once_and_to_a_recent_heartbeat_of_this_connection() -> None:
    region = Region()
    assert codes(region.say_hello("old", presence="p-0")) == [Code.MESSAGE_REPLAYED]
    assert codes(region.say_hello("early", heartbeat=region.connection.heartbeat + 1)) == [Code.MESSAGE_REPLAYED]
    only(HelloReceived, region.say_hello("n", heartbeat=1))
    for _ in range(MAX_HELLO_AGE_HEARTBEATS):
        assert codes(region.say_hello("n", heartbeat=1)) == [Code.MESSAGE_REPLAYED]
        region.sessions.next_heartbeat()
    only(HelloReceived, region.say_hello("just in time", heartbeat=1))
    region.sessions.next_heartbeat()
    assert codes(region.say_hello("late", heartbeat=1)) == [Code.MESSAGE_REPLAYED]
    assert codes(region.say_hello("n", heartbeat=1)) == [Code.MESSAGE_REPLAYED]


def test_a_welcome_after_its_connection_was_lost_opens_nothing() -> None:
    region = Region()
    received = only(HelloReceived, region.say_hello("n"))
    region.sessions.on_disconnected(is_lost=True)
    region.connect()
    assert region.sessions.answer_hello(received, welcome(7, "n"), "") == (SessionClosed(NAME, 7),)
    refused = region.sessions.answer_hello(received, ENDING, "")
    assert refused == (HelloRefused(NAME, ENDING),), "nobody is there to be told"
    assert region.sessions.session_count == 0


def test_a_newer_session_replaces_one_and_finishes_its_output() -> None:
    region = Region()
    first = region.open("n", 7)
    received = only(HelloReceived, region.say_hello("m"))
    effects = region.sessions.answer_hello(received, welcome(8, "m"), "")
    assert OutputReady(first) in effects
    assert SessionClosed(NAME, 7) in effects
    assert first.queue.is_finished
    assert region.sessions.forget(first) == ()
    assert codes(region.say_in_session(node_sealer("n", 7), Receipts(()))) == [Code.EPOCH_STALE]
    assert only(MessageReceived, region.say_in_session(node_sealer("m", 8), Receipts(()))).session.epoch == 8


def test_messages_count_once_and_in_order() -> None:
    region = Region()
    session = region.open()
    sealer = node_sealer()
    content = region.node_codec.encode_message(NodeEvents(()))
    first, second = (sealer.seal(Channel.STATUS, content) for _ in range(2))
    assert only(MessageReceived, region.say(Channel.STATUS, second)) == MessageReceived(session, NodeEvents(()))
    for late in (first, second):
        assert codes(region.say(Channel.STATUS, late)) == [Code.MESSAGE_REPLAYED]


def test_a_former_session_is_told_so_once_for_each_heartbeat() -> None:
    region = Region()
    sealer = node_sealer()
    answer = read_answer(region.say_in_session(sealer, NodeEvents(())))
    assert answer.epoch == 7
    assert isinstance(answer.answer, Refused)
    assert answer.answer.refusal.code is Code.EPOCH_STALE
    assert region.say_in_session(sealer, NodeEvents(())) == []
    region.now = Elapsed(region.now + HEARTBEAT_S)
    assert read_answer(region.say_in_session(sealer, NodeEvents(()))) == answer
    region.open("n", 8)
    assert codes(region.say_in_session(sealer, NodeEvents(()))) == [Code.EPOCH_STALE]


def test_junk_without_a_session_is_counted_and_answered_with_nothing() -> None:
    region = Region()
    for _ in range(2):
        effects = region.say(Channel.STATUS, b"\xff" * 9)
        assert codes(effects) == [Code.MESSAGE_INVALID]
        assert not any(isinstance(effect, Publication) for effect in effects)
    (refused,) = region.sessions.on_message("shoal/v1/elsewhere/edge-1/status", b"", region.now)
    assert isinstance(refused, MessageRefused)
    assert refused.refusal.code is Code.TOPIC_DENIED


def test_unreadable_messages_are_answered_and_end_the_session_when_they_persist() -> None:
    region = Region()
    session, sealer = region.open(), node_sealer()
    for number in range(1, MAX_INVALID + 1):
        effects = region.say(Channel.STATUS, sealer.seal(Channel.STATUS, b""))
        assert codes(effects) == [Code.MESSAGE_INVALID]
        assert any(isinstance(effect, SessionClosed) for effect in effects) == (number == MAX_INVALID)
    assert len(region.outputs(session)) == MAX_INVALID
    assert session.queue.is_finished


@pytest.mark.parametrize(("nonce", "online", "ends_it"), [("n", False, True), ("n", True, False), ("m", False, False)])
def test_a_will_ends_the_session_of_its_hello_only(nonce: str, online: bool, ends_it: bool) -> None:
    region = Region()
    region.open()
    effects = region.say(Channel.ONLINE, region.node_codec.sign_presence(NodePresence(nonce, online=online)))
    assert (SessionClosed(NAME, 7) in effects) == ends_it
    assert region.sessions.session_count == (0 if ends_it else 1)


def test_what_goes_down_is_sealed_and_the_last_says_so() -> None:
    region = Region()
    session = region.open()
    desired = DesiredSet(NAME, Version("h", 1, 3), (), (), (), (), Seconds(1.0))
    assert region.sessions.send("edge-2", ProbeNow(())) == ()
    for message in (replace(desired, version=Version("h", 1, 2)), ProbeNow(("cpu0",)), desired):
        assert region.sessions.send(NAME, message) == (OutputReady(session),)
    effects = region.sessions.end(NAME, Refused(ENDING, fatal=True))
    assert effects == (OutputReady(session), SessionClosed(NAME, 7))
    probe, last, kept = region.outputs(session)
    opener = Opener(NonceKey(NAME, "n").seal(7))
    sealed: tuple[tuple[Publication, ToAgent, bool], ...] = (
        (probe, ProbeNow(("cpu0",)), False),
        (last, Refused(ENDING, fatal=True), True),
    )
    for publication, sent, is_last in sealed:
        unsealed = opener.open(Channel.REQUEST, publication.payload)
        assert (mqtt_frames.decode_to_agent(unsealed.content), unsealed.last) == (sent, is_last)
        assert not publication.retain
    assert (kept.topic, kept.retain) == (topics.of_node(REGION, NAME, Channel.DESIRED), True)
    assert UnsignedNodeCodec(NAME).verify_desired_set(kept.payload) == desired
    assert region.sessions.forget(session) == ()


def test_a_node_that_does_not_read_ends_its_session() -> None:
    region = Region()
    session = region.open()
    for _ in range(MAX_WAITING + 1):
        region.sessions.send(NAME, ProbeNow(()))
    assert len(region.outputs(session)) == MAX_WAITING
    assert session.queue.is_finished
    assert region.sessions.forget(session) == (OutputReady(session), SessionClosed(NAME, 7))


def test_a_lost_broker_ends_every_session_and_what_waits_is_dropped() -> None:
    region = Region()
    session = region.open()
    region.sessions.send(NAME, ProbeNow(()))
    assert region.sessions.on_heartbeat_overdue() == (LinkLost((NAME,)),)
    effects = region.sessions.on_disconnected(is_lost=True)
    assert effects == (LinkClosed({NAME: 7}, is_lost=True), OutputReady(session))
    region.connect()
    assert region.outputs(session) == []
    assert session.queue.is_finished
    assert region.sessions.on_heartbeat_acknowledged(region.now) == (LinkRestored(),)
    assert region.sessions.on_disconnected(is_lost=True) == ()
    assert region.sessions.on_message(topics.of_node(REGION, NAME, Channel.STATUS), b"", region.now) == ()


def test_a_connection_that_is_given_up_ends_all_its_sessions_at_once() -> None:
    region = Region()
    session = region.open()
    effects = region.sessions.on_disconnected(is_lost=False)
    assert effects == (LinkClosed({NAME: 7}, is_lost=False), OutputReady(session))
    assert session.queue.is_finished
    assert region.sessions.session_count == 0
    assert region.sessions.forget(session) == ()


def test_what_waits_for_an_ended_session_is_not_sent_on_the_next_connection() -> None:
    region = Region()
    session = region.open()
    region.sessions.end(NAME, Refused(ENDING, fatal=False))
    region.sessions.on_disconnected(is_lost=True)
    region.connect()
    assert region.outputs(session) == []
    assert session.queue.is_finished


def test_a_certificate_that_has_ended_ends_its_session_at_the_next_heartbeat() -> None:
    region = Region()
    session = region.open()
    assert region.sessions.on_heartbeat_acknowledged(region.now) == (LinkRestored(),)
    region.codec.ended = ENDING
    effects = region.sessions.on_heartbeat_acknowledged(region.now)
    assert effects == (LinkRestored(), OutputReady(session), SessionClosed(NAME, 7))
    (last,) = region.outputs(session)
    unsealed = Opener(NonceKey(NAME, "n").seal(7)).open(Channel.REQUEST, last.payload)
    assert (mqtt_frames.decode_to_agent(unsealed.content), unsealed.last) == (Refused(ENDING, fatal=False), True)


def test_heartbeats_count_up_and_the_will_names_their_connection() -> None:
    region = Region()
    first, second = (mqtt_frames.decode_region_presence(region.sessions.next_heartbeat().payload) for _ in range(2))
    will = region.sessions.will_of(region.connection)
    assert will.retain
    left = mqtt_frames.decode_region_presence(will.payload)
    assert second.heartbeat == first.heartbeat + 1
    assert (left.presence, left.online, second.online) == (second.presence, False, True)
