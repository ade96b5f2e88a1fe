"""The coordinator forgets nodes without a session that sent messages, so that they leave room for others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.clients.mqtt import MqttPeer
from harness.cluster.links import OTHER, REGION, LinkHarness, MqttCarrier
from harness.servers.mosquitto import tls
from harness.wait import until
from shoal.coordinator.core.link import lanes
from shoal.types import topics
from shoal.types.device import Role
from shoal.types.topics import Channel
from shoal.v1 import mqtt_pb2

HEARTBEATS = 4
"""One more than the notice limits, the retained one, and one on the way."""


@pytest.fixture
async def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LinkHarness]:
    monkeypatch.setattr(lanes, "MAX_LANES", 1)
    found = await LinkHarness.open(tmp_path, "mqtt")
    yield found
    await found.close()


async def test_a_node_that_was_told_that_its_session_is_over_leaves_room_for_another(link: LinkHarness) -> None:
    assert isinstance(link.carrier, MqttCarrier)
    former = MqttPeer(link.carrier.broker.port, tls(link.authority.issue(Role.AGENT, OTHER)), f"{OTHER}-shadow")
    try:
        former.subscribe(topics.of_node(REGION, OTHER, Channel.WELCOME))
        payload = mqtt_pb2.Sealed(epoch=7).SerializeToString()
        former.publish(topics.of_node(REGION, OTHER, Channel.STATUS), payload)
        await until(lambda: former.received, 5.0, "the notice that its session is over")
        former.subscribe(topics.region_online(REGION))
        seen = len(former.received)
        await until(lambda: len(former.received) >= seen + HEARTBEATS, 10.0, "heartbeats of the coordinator")
    finally:
        former.close()
    session = await link.connect()
    assert link.is_connected()
    await session.close()
