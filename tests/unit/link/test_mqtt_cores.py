"""Agent's and coordinator's cores of the link over MQTT against each other, through a broker that loses, repeats,
delays and reorders.

Whatever it does: each message counts once and in order, and what is of another session counts nothing. Once it behaves,
a session comes up and the newest desired set arrives.
"""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from unit.link.channel import NODE, AgentEnd, CoordinatorEnd, MessyBroker

from shoal.agent.core.mqtt_session import MISSED_HEARTBEATS, WELCOME_S
from shoal.coordinator.core.link.mqtt_sessions import HEARTBEAT_S
from shoal.simulator.parts.network import REGION
from shoal.types import topics
from shoal.types.mqtt_frames import Publication
from shoal.types.topics import DOWN, UP
from shoal.types.units import Elapsed

RECOVERS_WITHIN_S = 2 * WELCOME_S + MISSED_HEARTBEATS * HEARTBEAT_S + 2.0
"""A session that nobody answers is given up by silence; then one hello may go to a coordinator that has left, and be
awaited in vain; the next is answered."""
TO_COORDINATOR = frozenset(topics.of_node(REGION, NODE, channel) for channel in UP)
TO_AGENT = frozenset((topics.region_online(REGION), *(topics.of_node(REGION, NODE, channel) for channel in DOWN)))
INDEX = st.integers(0, 10**6)


class MessyLink(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = Elapsed(0.0)
        self.broker = MessyBroker()
        self.coordinator = CoordinatorEnd(self.broker)
        self.agent = AgentEnd(self.broker)

    @initialize()
    def begin(self) -> None:
        self.coordinator.connect()
        self.coordinator.send_heartbeat(self.now)

    # what the broker does

    @precondition(lambda self: self.broker.in_transit)
    @rule(index=INDEX, times=st.integers(1, 2))
    def hand_over_any(self, index: int, times: int) -> None:
        publication = self.broker.in_transit.pop(index % len(self.broker.in_transit))
        for _ in range(times):
            self._hand_over(publication)

    @precondition(lambda self: self.broker.in_transit)
    @rule(most=st.integers(1, 20))
    def hand_over_in_order(self, most: int) -> None:
        for _ in range(min(most, len(self.broker.in_transit))):
            self._hand_over(self.broker.in_transit.pop(0))

    @precondition(lambda self: self.broker.in_transit)
    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        self.broker.in_transit.pop(index % len(self.broker.in_transit))

    @precondition(lambda self: self.broker.published)
    @rule(index=INDEX)
    def repeat_any(self, index: int) -> None:
        self._hand_over(self.broker.published[index % len(self.broker.published)])

    @rule()
    def forget_retained(self) -> None:
        self.broker.retained.clear()

    # what the ends do

    @rule(is_lost=st.booleans())
    def restart_agent(self, is_lost: bool) -> None:
        self.agent.restart(self.now, is_lost=is_lost)

    @rule()
    def reconnect_coordinator(self) -> None:
        self.coordinator.reconnect(self.now)

    @rule()
    def take_over(self) -> None:
        self.coordinator.take_over(self.now)

    @rule()
    def send_heartbeat(self) -> None:
        self.coordinator.send_heartbeat(self.now)

    @rule()
    def report(self) -> None:
        self.agent.report()

    @rule()
    def probe(self) -> None:
        self.coordinator.probe(self.now)

    @rule()
    def change_desired_set(self) -> None:
        self.coordinator.change_desired_set(self.now)

    @rule()
    def end_session(self) -> None:
        self.coordinator.end(self.now)

    @precondition(lambda self: self.coordinator.questions)
    @rule(index=INDEX, is_welcome=st.booleans(), ends_previous=st.booleans())
    def answer_hello(self, index: int, is_welcome: bool, ends_previous: bool) -> None:
        index %= len(self.coordinator.questions)
        self.coordinator.answer(index, self.now, is_welcome=is_welcome, ends_previous=ends_previous)

    @rule(seconds=st.sampled_from((0.3, 1.0, 4.0, 6.0)))
    def pass_time(self, seconds: float) -> None:
        self.now = Elapsed(self.now + seconds)
        self.agent.on_time(self.now)

    @rule(ends_previous=st.booleans())
    def recover(self, ends_previous: bool) -> None:
        """From now on the broker delivers each message once and in order, and both ends do what they do by time."""
        until = self.now + RECOVERS_WITHIN_S
        while not self._is_settled():
            assert self.now < until, "no session, or not the newest desired set"
            self.coordinator.send_heartbeat(self.now)
            self.agent.report()
            while self.broker.in_transit or self.coordinator.questions:
                if self.broker.in_transit:
                    self._hand_over(self.broker.in_transit.pop(0))
                else:
                    self.coordinator.answer(0, self.now, is_welcome=True, ends_previous=ends_previous)
            self.now = Elapsed(self.now + HEARTBEAT_S)
            self.agent.on_time(self.now)
            if self.agent.machine.end_refusal is not None:
                self.agent.restart(self.now, is_lost=False)

    def teardown(self) -> None:
        self.recover(ends_previous=True)

    # what holds

    @invariant()
    def each_message_counts_once_and_in_order(self) -> None:
        for counts in (*self.coordinator.statuses.values(), *self.agent.probes.values()):
            assert all(earlier < later for earlier, later in pairwise(counts)), counts

    @invariant()
    def the_controller_knows_which_sessions_stand(self) -> None:
        assert len(self.coordinator.open_epochs) == self.coordinator.sessions.session_count

    def _is_settled(self) -> bool:
        held, newest = self.agent.held, self.coordinator.generation
        is_newest = newest == 0 or (held is not None and held.version.generation == newest)
        welcome = self.agent.machine.welcome
        return (
            is_newest
            and self.agent.is_open
            and welcome is not None
            and welcome.epoch in self.coordinator.open_epochs
            and not self.broker.in_transit
            and not self.coordinator.questions
        )

    def _hand_over(self, publication: Publication) -> None:
        if publication.topic in TO_COORDINATOR:
            self.coordinator.on_message(publication, self.now)
        if publication.topic in TO_AGENT:
            self.agent.on_message(publication, self.now)


@pytest.mark.timeout(600)
def test_i7_whatever_the_broker_does() -> None:
    run_state_machine_as_test(
        MessyLink,
        settings=settings(
            max_examples=250, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
