"""Both cores of the link over MQTT, and between them a broker that loses, repeats, delays and reorders at will."""

from dataclasses import dataclass, field
from typing import Final

from shoal.agent.core import link_session
from shoal.agent.core.mqtt_session import MqttSessionMachine
from shoal.coordinator.core.link.broker_connection import BrokerConnection
from shoal.coordinator.core.link.lanes import Lane, LaneReady, PauseLane
from shoal.coordinator.core.link.mqtt_sessions import (
    HelloReceived,
    LinkClosed,
    LinkEffects,
    MessageReceived,
    MqttSessions,
    NodeSession,
    OutputReady,
    SessionClosed,
    SessionOpened,
)
from shoal.simulator.parts.broker import is_match
from shoal.simulator.parts.broker_links import UnsignedNodeCodec, UnsignedRegionCodec
from shoal.simulator.parts.network import REGION
from shoal.types import topics
from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import Hello, ProbeNow, Refused, Welcome
from shoal.types.mqtt_frames import Publication
from shoal.types.topics import Channel
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.wire import mqtt_frames

NODE: Final = "edge-1"
HISTORY: Final = "h"
REFUSAL: Final = Refusal(Code.DUPLICATE_IDENTITY, "a session stands", "one agent", "wait")


def hello(nonce: str, holds: Version | None = None) -> Hello:
    node = Node(
        NODE, REGION, Role.AGENT, {}, "1", "x", "x", Bytes(1), Bytes(1), (), "a:1", "a:4", "boot"
    )  # fmt: skip
    return Hello(node, nonce, holds, 1, Wall(0.0))


@dataclass
class MessyBroker:
    """What was published and not delivered yet, and all that ever was. Nothing in it is bound to a connection: a
    message may reach either end's next life."""

    # On its way; anyone of these may be the next.
    in_transit: list[Publication] = field(default_factory=list)
    # Everything published: an untrusted broker may repeat any of it at any time.
    published: list[Publication] = field(default_factory=list)
    # The last retained message of each topic.
    retained: dict[str, Publication] = field(default_factory=dict)

    def publish(self, publication: Publication) -> None:
        self.published.append(publication)
        self.in_transit.append(publication)
        if publication.retain:
            self.retained[publication.topic] = publication

    def addressed_hellos(self) -> set[tuple[str, str]]:
        """(presence, nonce) of every hello that was published."""
        topic = topics.of_node(REGION, NODE, Channel.HELLO)
        openings = (mqtt_frames.decode_opening(each.payload) for each in self.published if each.topic == topic)
        return {(opening.presence, opening.hello.nonce) for opening in openings}

    def subscribe(self, filters: tuple[str, ...]) -> None:
        """Retained messages of these topics are on their way once more."""
        for topic, publication in sorted(self.retained.items()):
            if any(is_match(each, topic) for each in filters):
                self.in_transit.append(publication)


class AgentEnd:
    """The agent's core with what its supervisor does: call again, report, and take desired sets as `link_session`
    says."""

    def __init__(self, broker: MessyBroker) -> None:
        self.held: DesiredSet | None = None
        self.probes: dict[int, list[int]] = {}
        """Numbers of the requests received, by the epoch of the session that received them."""
        self._broker = broker
        self._nonces = 0
        self._sequence = 0
        self.machine = self._connect(Elapsed(0.0))

    @property
    def is_open(self) -> bool:
        return self.machine.welcome is not None and self.machine.end_refusal is None

    def restart(self, now: Elapsed, *, is_lost: bool) -> None:
        """Begin another session. is_lost: the broker lost the last one, and publishes its will; else it is closed."""
        if is_lost:
            self._broker.publish(self.machine.will)
        else:
            self._publish(self.machine.close())
        self.machine = self._connect(now)

    def report(self) -> None:
        """Send a status, which names the epoch and, by its version, what the node holds."""
        if self.is_open and self.machine.welcome is not None:
            self._sequence += 1
            held = self.held.version if self.held is not None else None
            epoch = self.machine.welcome.epoch
            status = Status(NODE, epoch, self._sequence, True, held, (), (), (), (), Wall(0.0), True)
            self._broker.publish(self.machine.send(status))

    def on_message(self, publication: Publication, now: Elapsed) -> None:
        try:
            answers = self.machine.on_message(
                publication.topic, publication.payload, retained=publication.retain, now=now
            )
        except ShoalError:
            return
        welcome = self.machine.welcome
        assert welcome is None or welcome.nonce == f"nonce-{self._nonces}", "the answer to another hello"
        self._publish(answers)
        self._read()

    def on_time(self, now: Elapsed) -> None:
        self.machine.on_time(now)

    def _read(self) -> None:
        welcome = self.machine.welcome
        while welcome is not None and (message := self.machine.next_message()) is not None:
            match message:
                case ProbeNow((name,)):
                    epoch, number = (int(part) for part in name.split("/"))
                    assert epoch == welcome.epoch, "of another session"
                    self.probes.setdefault(epoch, []).append(number)
                case DesiredSet():
                    self._on_desired_set(message, welcome)
                case _:
                    assert isinstance(message, Refused), message

    def _on_desired_set(self, offered: DesiredSet, welcome: Welcome) -> None:
        match link_session.evaluate(self.held, offered, node=NODE, history=welcome.history):
            case link_session.AcceptSet(desired):
                assert self.held is None or desired.version.generation > self.held.version.generation
                self.held = desired

    def _connect(self, now: Elapsed) -> MqttSessionMachine:
        self._nonces += 1
        opening = hello(f"nonce-{self._nonces}", self.held.version if self.held is not None else None)
        machine = MqttSessionMachine(REGION, NODE, opening, UnsignedNodeCodec(NODE))
        self._broker.subscribe(machine.subscriptions)
        machine.start(now)
        return machine

    def _publish(self, publications: tuple[Publication, ...]) -> None:
        for each in publications:
            self._broker.publish(each)


class CoordinatorEnd:
    """The coordinator's core with what its controllers do: give out epochs, and keep the node's desired set newest."""

    def __init__(self, broker: MessyBroker) -> None:
        self.statuses: dict[int, list[int]] = {}
        """Sequence numbers of the statuses received, by epoch."""
        self.questions: list[tuple[HelloReceived, Lane]] = []
        """Hellos that the controller has not answered yet."""
        self.open_epochs: set[int] = set()
        """Epochs for which the controller was not told that they are over."""
        self.generation = 0
        self.presences = 0
        self.sessions = MqttSessions(REGION)
        self._broker = broker
        self._epoch = 0
        self._probes = 0
        self._connection: BrokerConnection | None = None
        self._outputs: set[NodeSession] = set()
        self._asked: set[tuple[str, str]] = set()

    def connect(self) -> None:
        self.presences += 1
        self._connection = BrokerConnection(f"presence-{self.presences}", UnsignedRegionCodec())
        self.sessions.on_connected(self._connection)

    def reconnect(self, now: Elapsed) -> None:
        """The broker was lost to it, and says so; a new connection is open."""
        assert self._connection is not None
        self._broker.publish(self.sessions.will_of(self._connection))
        self._perform(self.sessions.on_disconnected(is_lost=True), now)
        assert self.sessions.session_count == 0
        self.connect()

    def take_over(self, now: Elapsed) -> None:
        """Another coordinator leads: it knows epochs and desired sets, and no session."""
        assert self._connection is not None
        self._broker.publish(self.sessions.will_of(self._connection))
        self.sessions = MqttSessions(REGION)
        self.questions.clear()
        self.open_epochs.clear()
        self._outputs.clear()
        self.connect()

    def send_heartbeat(self, now: Elapsed) -> None:
        self._broker.publish(self.sessions.next_heartbeat())
        self._perform(self.sessions.on_heartbeat_acknowledged(now), now)

    def change_desired_set(self, now: Elapsed) -> None:
        self.generation += 1
        self._send_desired_set(now)

    def probe(self, now: Elapsed) -> None:
        """A request, which names the epoch."""
        self._probes += 1
        self._perform(self.sessions.send(NODE, ProbeNow((f"{self._epoch}/{self._probes}",))), now)

    def end(self, now: Elapsed) -> None:
        self._perform(self.sessions.end(NODE, Refused(REFUSAL, fatal=False)), now)

    def answer(self, index: int, now: Elapsed, *, is_welcome: bool, ends_previous: bool = True) -> None:
        """ends_previous: the session before it is ended first, as the fleet's controller does where it knows it."""
        received, lane = self.questions.pop(index)
        if is_welcome:
            self._epoch += 1
            self.open_epochs.add(self._epoch)
            if ends_previous:
                self.end(now)
            answer: Welcome | Refusal = Welcome(self._epoch, received.hello.nonce, HISTORY, 1, Seconds(1.0), Wall(0.0))
        else:
            answer = REFUSAL
        self._perform(self.sessions.answer_hello(received, answer, ""), now)
        if is_welcome and self.generation:
            self._send_desired_set(now)
        self._read(lane, now)

    def on_message(self, publication: Publication, now: Elapsed) -> None:
        self._perform(self.sessions.on_message(publication.topic, publication.payload, now), now)

    def _send_desired_set(self, now: Elapsed) -> None:
        desired = DesiredSet(NODE, Version(HISTORY, 1, self.generation), (), (), (), (), Seconds(1.0))
        self._perform(self.sessions.send(NODE, desired), now)

    def _read(self, lane: Lane, now: Elapsed) -> None:
        """Until the lane is empty, or waits for the controller."""
        while (effects := self.sessions.next_step(lane, now)) is not None:
            for effect in effects:
                if isinstance(effect, HelloReceived):
                    self._check_hello(effect)
                    self.questions.append((effect, lane))
                    return
            if any(isinstance(effect, PauseLane) for effect in effects):
                now = Elapsed(now + 1.0)
            self._perform(effects, now)

    def _check_hello(self, received: HelloReceived) -> None:
        """It was addressed to this connection, and is asked about for the first time."""
        presence, nonce = received.connection.presence, received.hello.nonce
        assert received.connection is self._connection
        assert (presence, nonce) not in self._asked, "a repeated hello"
        assert (presence, nonce) in self._broker.addressed_hellos(), "a hello to another connection"
        self._asked.add((presence, nonce))

    def _perform(self, effects: LinkEffects, now: Elapsed) -> None:
        for effect in effects:
            match effect:
                case Publication():
                    self._broker.publish(effect)
                case LaneReady(lane):
                    self._read(lane, now)
                case MessageReceived(session, message):
                    self._on_status(session, message, now)
                case SessionOpened(session):
                    assert session.epoch == self._epoch
                    self._outputs.add(session)
                    self._write(session)
                case OutputReady(session):
                    self._write(session)
                case SessionClosed(_, epoch):
                    self.open_epochs.discard(epoch)
                case LinkClosed(sessions):
                    self.open_epochs.difference_update(sessions.values())

    def _on_status(self, session: NodeSession, message: object, now: Elapsed) -> None:
        assert isinstance(message, Status)
        assert message.epoch == session.epoch, "of another session"
        self.statuses.setdefault(session.epoch, []).append(message.sequence)
        if message.version is None or message.version.generation < self.generation:
            self._send_desired_set(now)

    def _write(self, session: NodeSession) -> None:
        if session in self._outputs:
            while (publication := self.sessions.next_output(session)) is not None:
                self._broker.publish(publication)
            if session.queue.is_finished:
                self._outputs.discard(session)
                assert self.sessions.forget(session) == ()
