"""A61: an agent that floods the broker, while the coordinator reads nothing. Its bytes are bounded, and others'
messages arrive."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.clients.mqtt import Closed, MqttPeer
from harness.crypto.pki import Authority
from harness.report import record
from harness.servers.mosquitto import MosquittoBroker, broker, tls
from harness.wait import wait_until
from shoal.coordinator.broker.config import PACKET_BYTES, QUEUED_BYTES
from shoal.types import topics
from shoal.types.device import Role
from shoal.types.topics import Channel

REGION = "home"
FLOOD_S = 5.0
PAYLOAD = bytes(PACKET_BYTES - 1024)
CONTAINER_BYTES = 512 * 2**20
"""What the broker's container has in `docker-compose.yml`."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), REGION, time.time())  # noqa: TID251 - the broker's own clock


@pytest.fixture
def served_broker(tmp_path: Path, authority: Authority) -> Iterator[MosquittoBroker]:
    with broker(tmp_path / "mqtt", authority, nodes=("edge-1", "edge-2")) as found:
        yield found


def peer(served: MosquittoBroker, authority: Authority, role: Role, name: str) -> MqttPeer:
    return MqttPeer(served.port, tls(authority.issue(role, name)), f"{name}-test")


@pytest.mark.parametrize("qos", [0, 1])
def test_a61_a_flood_while_the_coordinator_is_away_is_bounded_and_others_come_through(
    served_broker: MosquittoBroker, authority: Authority, qos: int
) -> None:
    of_liar, of_other = (topics.of_node(REGION, name, Channel.STATUS) for name in ("edge-1", "edge-2"))
    process = psutil.Process(served_broker.pid)
    with peer(served_broker, authority, Role.COORDINATOR, "coordinator") as above:
        assert above.subscribe(topics.all_nodes(REGION, Channel.STATUS)) == 1
        above.pause()
        sent, most, end = 0, 0, time.monotonic() + FLOOD_S  # noqa: TID251
        while time.monotonic() < end:  # noqa: TID251
            try:
                with peer(served_broker, authority, Role.AGENT, "edge-1") as liar:
                    while time.monotonic() < end and liar.flood_once(of_liar, PAYLOAD, qos):  # noqa: TID251
                        sent += len(PAYLOAD)
                        most = max(most, process.memory_info().rss)
            except Closed:
                pass  # thrown out, or not let in while it has no memory: it calls again
        assert sent > 2 * QUEUED_BYTES, f"it sent {sent} bytes only"
        assert most < CONTAINER_BYTES, f"{most} bytes of {sent}"
        above.resume()

        def other_is_heard() -> bool:
            try:
                with peer(served_broker, authority, Role.AGENT, "edge-2") as other:
                    other.publish(of_other, b"here")
            except (Closed, AssertionError):
                return False
            return (of_other, b"here") in above.received

        wait_until(other_is_heard, 20.0, "another agent's status", every_s=0.2)
    record("A61", "P", 1, qos=qos, sent_mib=sent // 2**20, most_mib=most // 2**20)
