"""The agent's end of a session over a broker: what it answers, what it believes, and when it gives up."""

from dataclasses import replace

import pytest

from shoal.agent.core.mqtt_session import MAX_INBOX, MISSED_HEARTBEATS, WELCOME_S, MqttSessionMachine
from shoal.simulator.parts.broker_links import NonceKey, UnsignedNodeCodec, UnsignedRegionCodec
from shoal.simulator.parts.network import REGION
from shoal.types import topics
from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import Hello, ProbeNow, Receipts, Refused, ToAgent, Welcome
from shoal.types.mqtt_frames import OpeningAnswer, Publication, RegionPresence, Sealer
from shoal.types.topics import Channel
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.wire import mqtt_frames

NAME = "edge-1"
NONCE = "nonce-1"
EPOCH = 7
HEARTBEAT_S = Seconds(1.0)
CODEC = UnsignedRegionCodec()
WELCOME = Welcome(EPOCH, NONCE, "h", 1, HEARTBEAT_S, Wall(0.0))
HELLO = Hello(
    Node(NAME, REGION, Role.AGENT, {}, "1", "x", "x", Bytes(1), Bytes(1), (), "a:1", "a:4", "boot"),
    NONCE, Version("h", 1, 5), 1, Wall(0.0),
)  # fmt: skip
ENDING = Refusal(Code.CERT_REVOKED, "serial 7", "one that stands", "enrol again")


class Ends:
    """A session, and what the coordinator says to it."""

    def __init__(self) -> None:
        self.session = MqttSessionMachine(REGION, NAME, HELLO, UnsignedNodeCodec(NAME))
        self.sealer = Sealer(NonceKey(NAME, NONCE).seal(EPOCH))
        self.session.start(Elapsed(0.0))

    def say_presence(
        self,
        heartbeat: int,
        presence: str = "p",
        *,
        online: bool = True,
        every_s: float = HEARTBEAT_S,
        now: float = 0.0,
    ) -> tuple[Publication, ...]:
        content = RegionPresence(presence, heartbeat, Seconds(every_s), online)
        return self.session.on_message(
            topics.region_online(REGION), CODEC.sign_presence(content), retained=True, now=Elapsed(now)
        )

    def say(self, channel: Channel, payload: bytes, *, now: float = 0.0, node: str = NAME) -> tuple[Publication, ...]:
        topic = topics.of_node(REGION, node, channel)
        return self.session.on_message(topic, payload, retained=channel is Channel.DESIRED, now=Elapsed(now))

    def say_answer(self, answer: ToAgent, *, nonce: str = NONCE, epoch: int = EPOCH, now: float = 0.0) -> list[str]:
        """Topics of what it answers."""
        content = OpeningAnswer(answer, nonce, epoch, b"", "models:1")
        return [each.topic for each in self.say(Channel.WELCOME, CODEC.sign_answer(NAME, content), now=now)]

    def say_desired(self, generation: int, history: str = "h") -> None:
        desired = DesiredSet(NAME, Version(history, 1, generation), (), (), (), (), Seconds(1.0))
        self.say(Channel.DESIRED, CODEC.sign_desired_set(NAME, desired))

    def request(self, message: ToAgent, *, last: bool = False) -> bytes:
        return self.sealer.seal(Channel.REQUEST, CODEC.encode_message(message), last=last)

    def open(self) -> None:
        self.say_presence(1)
        self.say_answer(WELCOME)

    def receive_all(self) -> list[ToAgent]:
        found = []
        while (message := self.session.next_message()) is not None:
            found.append(message)
        return found


def code_of(refusal: Refusal | None) -> Code | None:
    return None if refusal is None else refusal.code


def own(channel: Channel) -> str:
    return topics.of_node(REGION, NAME, channel)


def test_it_says_hello_to_each_presence_once_and_shows_itself_when_it_is_welcome() -> None:
    ends = Ends()
    (hello,) = ends.say_presence(4)
    opening = mqtt_frames.decode_opening(hello.payload)
    assert (hello.topic, hello.retain) == (own(Channel.HELLO), False)
    assert (opening.hello, opening.presence, opening.heartbeat) == (HELLO, "p", 4)
    assert ends.say_presence(5) == ends.say_presence(4) == (), "it was said already"
    (again,) = ends.say_presence(1, "another")
    assert mqtt_frames.decode_opening(again.payload).presence == "another"
    assert ends.say_answer(replace(WELCOME, nonce="another"), nonce="another") == []
    assert ends.session.welcome is None
    assert ends.say_answer(WELCOME) == [own(Channel.ONLINE)]
    assert ends.session.welcome == WELCOME
    assert ends.session.models_address == "models:1"


def test_its_will_and_its_farewell_name_its_hello() -> None:
    ends = Ends()
    will = ends.session.will
    assert will.retain
    presence = mqtt_frames.decode_node_presence(will.payload)
    assert (presence.nonce, presence.online) == (NONCE, False)
    assert ends.session.close() == (), "nobody knows of it"
    ends = Ends()
    ends.open()
    assert ends.session.close() == (will,)


def test_a_hello_that_is_refused() -> None:
    ends = Ends()
    ends.say_presence(1)
    refused = Refused(ENDING, fatal=True)
    assert ends.say_answer(refused, epoch=0) == []
    assert ends.session.hello_refused == refused
    assert ends.session.end_refusal == ENDING


@pytest.mark.parametrize(("is_seen", "found"), [(False, "the coordinator is not there"), (True, "no welcome")])
def test_a_welcome_that_does_not_come(is_seen: bool, found: str) -> None:
    ends = Ends()
    if is_seen:
        ends.say_presence(1, now=3.0)
    assert ends.session.deadline == Elapsed(WELCOME_S)
    ends.session.on_time(Elapsed(WELCOME_S - 0.1))
    assert ends.session.end_refusal is None
    ends.session.on_time(Elapsed(WELCOME_S))
    assert ends.session.end_refusal is not None
    assert ends.session.end_refusal.found == found


def test_only_a_new_heartbeat_is_a_sign_of_life() -> None:
    ends = Ends()
    ends.open()
    silence_s = MISSED_HEARTBEATS * HEARTBEAT_S
    ends.session.on_announced(Elapsed(1.0))
    assert ends.session.deadline == 1.0 + silence_s
    ends.say_presence(2, now=2.0)
    for heartbeat in (1, 2):
        ends.say_presence(heartbeat, now=3.0)
    ends.say_answer(WELCOME, now=3.0)
    ends.say_desired(9)
    ends.session.on_time(Elapsed(1.9 + silence_s))
    assert ends.session.end_refusal is None
    ends.session.on_time(Elapsed(2.0 + silence_s))
    assert code_of(ends.session.end_refusal) is Code.COORDINATOR_UNREACHABLE


@pytest.mark.parametrize("every_s", [0.0, -1.0, WELCOME_S + 0.1, float("nan"), float("inf")])
def test_an_absurd_interval_of_heartbeats_changes_nothing(every_s: float) -> None:
    ends = Ends()
    with pytest.raises(ShoalError) as caught:
        ends.say_presence(1, every_s=every_s)
    assert caught.value.code is Code.MESSAGE_INVALID
    assert ends.say_presence(1), "it was not seen"


@pytest.mark.parametrize(
    ("presence", "online", "ends_it"),
    [("p", False, True), ("another", True, True), ("another", False, False)],
    ids=["it left", "it has connected anew", "an earlier connection of it ended"],
)
def test_presences_within_a_session(presence: str, online: bool, ends_it: bool) -> None:
    ends = Ends()
    ends.open()
    ends.say_presence(1, presence, online=online)
    assert (ends.session.end_refusal is not None) == ends_it


def test_a_notice_ends_the_session_of_its_epoch_only() -> None:
    ends = Ends()
    ends.open()
    notice = Refused(Refusal(Code.EPOCH_STALE, "epoch 7", "a session that stands"), fatal=False)
    ends.say_answer(notice, nonce="", epoch=EPOCH - 1)
    ends.say_answer(replace(WELCOME, epoch=EPOCH), nonce="")
    assert ends.session.end_refusal is None
    ends.say_answer(notice, nonce="")
    assert code_of(ends.session.end_refusal) is Code.EPOCH_STALE
    with pytest.raises(ShoalError) as caught:
        ends.session.send(Receipts(()))
    assert caught.value.code is Code.EPOCH_STALE
    assert ends.say_presence(9, "another") == (), "it is over"


def test_requests_count_once_in_order_and_in_their_session_only() -> None:
    ends = Ends()
    early, second, third = (ends.request(ProbeNow((str(number),))) for number in range(3))
    foreign = Sealer(NonceKey(NAME, NONCE).seal(EPOCH + 1)).seal(Channel.REQUEST, CODEC.encode_message(ProbeNow(())))
    assert ends.say(Channel.REQUEST, early) == ()
    ends.open()
    ends.say(Channel.REQUEST, third)
    for payload, code in ((second, Code.MESSAGE_REPLAYED), (third, Code.MESSAGE_REPLAYED), (foreign, Code.EPOCH_STALE)):
        with pytest.raises(ShoalError) as caught:
            ends.say(Channel.REQUEST, payload)
        assert caught.value.code is code
    assert ends.receive_all() == [ProbeNow(("2",))]


def test_what_waits_is_bounded_and_the_desired_set_is_the_newest_and_comes_last() -> None:
    ends = Ends()
    ends.open()
    for generation in (8, 9, 8):
        ends.say_desired(generation)
    for number in range(MAX_INBOX + 2):
        ends.say(Channel.REQUEST, ends.request(ProbeNow((str(number),))))
    *probes, desired = ends.receive_all()
    assert probes == [ProbeNow((str(number),)) for number in range(2, MAX_INBOX + 2)]
    assert isinstance(desired, DesiredSet)
    assert desired.version.generation == 9


def test_a_kept_desired_set_that_is_older_than_what_it_holds_or_of_another_history() -> None:
    ends = Ends()
    with pytest.raises(ShoalError) as caught:
        ends.say_desired(4)
    assert caught.value.code is Code.GENERATION_STALE
    ends.say_desired(4, history="ended")
    ends.open()
    assert ends.receive_all() == []


def test_the_last_message_is_read_and_then_the_session_is_over() -> None:
    ends = Ends()
    ends.open()
    ends.say(Channel.REQUEST, ends.request(Refused(ENDING, fatal=True), last=True))
    assert ends.receive_all() == [Refused(ENDING, fatal=True)]
    assert ends.session.end_refusal == ENDING
    ends.session.end(Refusal(Code.INTERNAL, "later"))
    assert ends.session.end_refusal == ENDING, "the first reason stays"


def test_a_message_to_another_node_or_on_another_topic() -> None:
    ends = Ends()
    for channel, node, code in (
        (Channel.WELCOME, "edge-2", Code.NODE_MISMATCH),
        (Channel.STATUS, NAME, Code.TOPIC_DENIED),
    ):
        with pytest.raises(ShoalError) as caught:
            ends.say(channel, b"", node=node)
        assert caught.value.code is code


def test_receipts_are_kept_and_statuses_are_not() -> None:
    ends = Ends()
    with pytest.raises(ShoalError):
        ends.session.send(Receipts(()))
    ends.open()
    receipts = ends.session.send(Receipts(()))
    status = ends.session.send(Status(NAME, EPOCH, 1, True, None, (), (), (), (), Wall(0.0), True))
    assert (receipts.topic, receipts.retain) == (own(Channel.CAPABILITY), True)
    assert (status.topic, status.retain) == (own(Channel.STATUS), False)
