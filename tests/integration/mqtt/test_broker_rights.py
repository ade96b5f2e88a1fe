"""Who may do what at a real Mosquitto: what the rights of coordinator and nodes let through, and what they refuse."""

import json
import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from harness import report
from harness.clients.mqtt import NOT_AUTHORIZED, Closed, MqttPeer
from harness.crypto.pki import Authority, CertificateFiles
from harness.servers.mosquitto import MosquittoBroker, broker, tls
from shoal.coordinator.broker import rights
from shoal.types import topics
from shoal.types.device import Role
from shoal.types.topics import DOWN, UP, Channel

REGION = "home"
NODES = ("edge-1", "edge-2")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), REGION, time.time())  # noqa: TID251 - the broker's own clock


@pytest.fixture(scope="module")
def served_broker(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[MosquittoBroker]:
    """Both nodes are admitted."""
    with broker(tmp_path_factory.mktemp("mqtt"), authority, nodes=NODES) as found:
        yield found


def peer(served: MosquittoBroker, authority: Authority, role: Role, name: str, *, will: str = "") -> MqttPeer:
    return MqttPeer(served.port, tls(authority.issue(role, name)), f"{name}-test", will=will)


def coordinator(served: MosquittoBroker, authority: Authority) -> MqttPeer:
    """It reads everything that a coordinator may read."""
    found = peer(served, authority, Role.COORDINATOR, "coordinator")
    for channel in UP:
        assert found.subscribe(topics.all_nodes(REGION, channel)) == 1
    return found


def test_a_node_and_the_coordinator_reach_each_other(served_broker: MosquittoBroker, authority: Authority) -> None:
    with coordinator(served_broker, authority) as above, peer(served_broker, authority, Role.AGENT, "edge-1") as node:
        for channel in DOWN:
            assert node.subscribe(topics.of_node(REGION, "edge-1", channel)) == 1
        assert node.subscribe(topics.region_online(REGION)) == 1
        sent_up = [(topics.of_node(REGION, "edge-1", channel), channel.encode()) for channel in UP]
        for topic, payload in sent_up:
            assert node.publish(topic, payload) == 0
        assert above.wait_received(len(UP)) == sent_up
        sent_down = [(topics.of_node(REGION, "edge-1", channel), channel.encode()) for channel in DOWN]
        sent_down.append((topics.region_online(REGION), b"here"))
        for topic, payload in sent_down:
            assert above.publish(topic, payload) == 0
        assert node.wait_received(len(sent_down)) == sent_down


def test_a17_publishing_outside_ones_rights_is_refused_and_reaches_nobody(
    served_broker: MosquittoBroker, authority: Authority
) -> None:
    foreign = [topics.of_node(REGION, "edge-2", channel) for channel in Channel]
    own = [topics.of_node(REGION, "edge-1", channel) for channel in DOWN]
    others = [
        topics.region_online(REGION),
        topics.of_node("elsewhere", "edge-1", Channel.STATUS),
        f"{topics.of_node(REGION, 'edge-1', Channel.STATUS)}/more",
        f"{topics.of_node(REGION, 'edge-1', Channel.STATUS)}/",
        f"/{topics.of_node(REGION, 'edge-1', Channel.STATUS)}",
        topics.of_node(REGION, "Edge-1", Channel.STATUS),
        topics.of_node(REGION, "%u", Channel.STATUS),
        topics.of_node(REGION, "", Channel.STATUS),
        "$SYS/broker/uptime",
        "$SYS/x",
        rights.CONTROL,
        rights.RESPONSE,
        "$CONTROL/broker/v1",
        "anything",
    ]
    refused = 0
    command = json.dumps({"commands": [{"command": "deleteClient", "username": "edge-2"}]}).encode()
    with (
        coordinator(served_broker, authority) as above,
        peer(served_broker, authority, Role.AGENT, "edge-2") as victim,
        peer(served_broker, authority, Role.AGENT, "edge-1") as attacker,
    ):
        assert above.subscribe(rights.RESPONSE) == 1
        for channel in DOWN:
            assert victim.subscribe(topics.of_node(REGION, "edge-2", channel)) == 1
        assert victim.subscribe(topics.region_online(REGION)) == 1
        for topic in (*foreign, *own, *others):
            for retain in (False, True):
                assert attacker.publish(topic, command, retain=retain) == NOT_AUTHORIZED, topic
                refused += 1
        # What is sent last comes last: by then everything else would have come.
        assert attacker.publish(topics.of_node(REGION, "edge-1", Channel.STATUS), b"mine") == 0
        assert above.publish(topics.of_node(REGION, "edge-2", Channel.REQUEST), b"probe") == 0
        assert above.wait_received(1) == [(topics.of_node(REGION, "edge-1", Channel.STATUS), b"mine")]
        assert victim.wait_received(1) == [(topics.of_node(REGION, "edge-2", Channel.REQUEST), b"probe")]
    with coordinator(served_broker, authority) as late:
        assert late.received == [], "nothing was kept"
        report.record("A17", "P", refused, delivered=0)


def test_a17_a_last_will_on_anothers_topic_is_never_published(
    served_broker: MosquittoBroker, authority: Authority
) -> None:
    """Mosquitto takes it at the connection, and judges it when it would send it."""
    topic = topics.of_node(REGION, "edge-2", Channel.ONLINE)
    own = topics.of_node(REGION, "edge-1", Channel.ONLINE)
    with coordinator(served_broker, authority) as above:
        for will in (topic, topics.of_node(REGION, "edge-1", Channel.DESIRED), rights.CONTROL, "$SYS/x", own):
            peer(served_broker, authority, Role.AGENT, "edge-1", will=will).vanish()
        assert above.wait_received(1) == [(own, b"gone")]
    with coordinator(served_broker, authority) as late:
        assert late.wait_received(1) == [(own, b"gone")], "only its own will was kept"
        with peer(served_broker, authority, Role.AGENT, "edge-1") as node:
            assert node.publish(own, b"", retain=True) == 0
            assert late.wait_received(2)[1] == (own, b"")


def test_a18_subscribing_to_more_than_ones_own_is_refused_and_delivers_nothing(
    served_broker: MosquittoBroker, authority: Authority
) -> None:
    own = topics.of_node(REGION, "edge-1", Channel.DESIRED)
    filters = [
        "#",
        "/#",
        "+/#",
        "+/+/+/+/+",
        f"+/v1/{REGION}/edge-1/desired",
        "shoal/#",
        f"shoal/v1/{REGION}/#",
        f"shoal/v1/{REGION}/+/desired",
        f"shoal/v1/{REGION}/edge-1/#",
        f"shoal/v1/{REGION}/edge-1/+",
        f"{own}/#",
        *(topics.of_node(REGION, "edge-2", channel) for channel in Channel),
        *(topics.of_node(REGION, "edge-1", channel) for channel in UP),
        *(topics.all_nodes(REGION, channel) for channel in Channel),
        f"$share/group/{own}",
        "$share/group/#",
        f"$share/group/{topics.of_node(REGION, 'edge-2', Channel.DESIRED)}",
        "$SYS/#",
        "$SYS/broker/clients/total",
        "$CONTROL/#",
        rights.RESPONSE,
    ]
    with (
        coordinator(served_broker, authority) as above,
        peer(served_broker, authority, Role.AGENT, "edge-2") as victim,
        peer(served_broker, authority, Role.AGENT, "edge-1") as attacker,
    ):
        for topic in filters:
            assert attacker.subscribe(topic) == NOT_AUTHORIZED, topic
        assert attacker.subscribe(own) == 1
        for channel in UP:
            assert victim.publish(topics.of_node(REGION, "edge-2", channel), b"secret") == 0
        for channel in DOWN:
            above.publish(topics.of_node(REGION, "edge-2", channel), b"secret")
        assert above.publish(own, b"yours") == 0
        assert attacker.wait_received(1) == [(own, b"yours")]
        report.record("A18", "P", len(filters), delivered=0)


@pytest.mark.parametrize("role", [role for role in Role if role not in (Role.AGENT, Role.GATEWAY, Role.COORDINATOR)])
def test_a18_who_is_neither_node_nor_coordinator_does_not_get_in(
    served_broker: MosquittoBroker, authority: Authority, role: Role
) -> None:
    with pytest.raises(Closed):
        peer(served_broker, authority, role, "edge-1")


def test_a18_an_agent_with_the_coordinators_name_is_not_the_coordinator(
    served_broker: MosquittoBroker, authority: Authority
) -> None:
    for name in ("coordinator", "shoal-coordinator"):
        with peer(served_broker, authority, Role.AGENT, name) as impostor:
            assert impostor.subscribe(topics.all_nodes(REGION, Channel.STATUS)) == NOT_AUTHORIZED
            assert impostor.publish(rights.CONTROL, b"{}") == NOT_AUTHORIZED


def test_a10_the_broker_speaks_to_nobody_without_tls_and_a_certificate(
    served_broker: MosquittoBroker, authority: Authority
) -> None:
    files = authority.issue(Role.AGENT, "edge-1")
    stranger = Authority(authority.folder / "other", REGION, time.time()).issue(Role.AGENT, "edge-1")  # noqa: TID251
    old = tls(files)
    with pytest.deprecated_call():
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    bare = ssl.create_default_context(cafile=str(files.authority))
    foreign = tls(CertificateFiles(stranger.certificate, stranger.key, files.authority))
    attempts: dict[str, ssl.SSLContext | None] = {
        "plaintext": None,
        "TLS 1.1": old,
        "no client certificate": bare,
        "another authority's certificate": foreign,
    }
    for how, context in attempts.items():
        with pytest.raises(Closed):
            MqttPeer(served_broker.port, context, f"edge-1-{how}")
    assert "unsupported protocol" in served_broker.log, "TLS 1.1 reached the broker, which would not speak it"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 1883), timeout=1)
    conf = (served_broker.folder / "mosquitto.conf").read_text().splitlines()
    assert [line for line in conf if line.startswith(("listener", "port"))] == [
        f"listener {served_broker.port} 127.0.0.1"
    ]
    with peer(served_broker, authority, Role.AGENT, "edge-1") as node:  # the very same certificate, as it should be
        assert node.publish(topics.of_node(REGION, "edge-1", Channel.STATUS), b"x") in (0, 16)
    report.record("A10", "P", len(attempts) + 1, listener="mqtt")
