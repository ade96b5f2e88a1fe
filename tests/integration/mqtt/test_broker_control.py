"""The coordinator tells a real Mosquitto who may speak, and tells it again whenever the broker forgot."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path

import pytest

from harness import report
from harness.clients.mqtt import NOT_AUTHORIZED, MqttPeer
from harness.crypto.pki import Authority
from harness.servers.mosquitto import MosquittoBroker, broker, tls
from harness.wait import until
from shoal.coordinator.broker import rights
from shoal.coordinator.broker.control import BrokerControl
from shoal.coordinator.broker.renewal import BrokerFolder
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.types import topics
from shoal.types.device import Role
from shoal.types.topics import Channel

REGION = "home"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", REGION, time.time())  # noqa: TID251 - the broker's own clock


@contextlib.asynccontextmanager
async def running_control(
    served: MosquittoBroker, authority: Authority, *nodes: str, keep: Callable[[str, Set[str]], None] | None = None
) -> AsyncIterator[BrokerControl]:
    """These nodes are wanted; the broker has been told when this is entered."""
    files = authority.issue(Role.COORDINATOR, "coordinator")
    control = BrokerControl(REGION, served.address, files, CoordinatorClock(), SystemIds(), NoMeter(), on_sync=keep)
    for node in nodes:
        await control.admit(node)
    running = asyncio.create_task(control.run())
    try:
        await until(lambda: control.is_in_sync, 10, "the broker is told")
        yield control
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def may_speak(served: MosquittoBroker, authority: Authority, node: str) -> bool:
    """It may read its own desired set and publish its own status: both, or neither."""
    with MqttPeer(served.port, tls(authority.issue(Role.AGENT, node)), f"{node}-test") as peer:
        reads = peer.subscribe(topics.of_node(REGION, node, Channel.DESIRED)) == 1
        speaks = peer.publish(topics.of_node(REGION, node, Channel.STATUS), b"") in (0, 16)
    assert reads == speaks, f"half a right: {reads=} {speaks=}"
    return reads


async def test_admitted_nodes_speak_and_expelled_ones_are_thrown_out(tmp_path: Path, authority: Authority) -> None:
    with broker(tmp_path / "mqtt", authority) as served:
        async with running_control(served, authority, "edge-1", "edge-2") as control:
            assert may_speak(served, authority, "edge-1")
            assert not may_speak(served, authority, "edge-3"), "a certificate alone gives no right"
            await control.admit("edge-3")
            await until(lambda: control.is_in_sync, 5, "edge-3 to be admitted")
            assert may_speak(served, authority, "edge-3")

            with MqttPeer(served.port, tls(authority.issue(Role.AGENT, "edge-1")), "edge-1-test") as node:
                for name in ("edge-1", "edge-2"):
                    with MqttPeer(served.port, tls(authority.issue(Role.AGENT, name)), f"{name}-left") as left:
                        left.publish(topics.of_node(REGION, name, Channel.ONLINE), b"here", retain=True)
                await control.expel("edge-1")
                await until(node.ended.is_set, 1, "its connection to end within a second")
            await until(lambda: control.is_in_sync, 5, "edge-1 to be gone")
            assert not may_speak(served, authority, "edge-1"), "its certificate is still good, its rights are gone"
            assert may_speak(served, authority, "edge-2")
            with MqttPeer(served.port, tls(authority.issue(Role.COORDINATOR, "coordinator")), "late") as late:
                late.subscribe(topics.all_nodes(REGION, Channel.ONLINE))
                kept = [(topics.of_node(REGION, "edge-2", Channel.ONLINE), b"here")]
                assert late.wait_received(1) == kept, "what the expelled one left is gone"

            with MqttPeer(served.port, tls(authority.issue(Role.AGENT, "edge-2")), "edge-2-test") as node:
                await control.expel("edge-2")
                await control.admit("edge-2")
                await until(node.ended.is_set, 5, "the connection it had before it was expelled to end")
            await until(lambda: control.is_in_sync, 5, "edge-2 to be admitted again")
            assert may_speak(served, authority, "edge-2")


async def test_f17_a_broker_that_restarts_restarts_empty_or_finds_its_rights_corrupt_is_told_again(
    tmp_path: Path, authority: Authority
) -> None:
    nodes = tuple(f"edge-{index}" for index in range(1, 41))
    worst = 0.0
    with broker(tmp_path / "mqtt", authority) as served:
        async with running_control(served, authority, *nodes) as control:
            kept = json.loads((served.folder / "dynamic-security.json").read_text())
            assert len(kept["clients"]) == len(nodes) + 1
            for hurt in (None, MosquittoBroker.wipe, MosquittoBroker.corrupt):
                served.kill()
                await until(lambda: not control.is_in_sync, 5, "the loss to be seen")
                if hurt is not None:
                    hurt(served)
                served.start()
                start = asyncio.get_running_loop().time()
                await until(lambda: control.is_in_sync, 5, "the broker to be told again")
                worst = max(worst, asyncio.get_running_loop().time() - start)
                assert all(may_speak(served, authority, node) for node in (nodes[0], nodes[-1]))
    report.record("F17", "P", 3, rights_back_within_s=round(worst, 2), nodes=len(nodes))


async def test_what_changed_while_the_broker_was_away_is_made_good(tmp_path: Path, authority: Authority) -> None:
    with broker(tmp_path / "mqtt", authority) as served:
        async with running_control(served, authority, "edge-1", "edge-2") as control:
            served.kill()
            await until(lambda: not control.is_in_sync, 5, "the loss to be seen")
            await control.expel("edge-1")
            await control.admit("edge-3")
            served.start()
            await until(lambda: control.is_in_sync, 5, "the broker to be told")
            assert [may_speak(served, authority, f"edge-{index}") for index in (1, 2, 3)] == [False, True, True]


async def test_only_what_is_ours_is_touched(tmp_path: Path, authority: Authority) -> None:
    """An owner's own client keeps its rights; a role of another version is replaced, a node that is unknown removed."""
    with broker(tmp_path / "mqtt", authority, nodes=("edge-1", "edge-9")) as served:
        served.stop()
        path = served.folder / "rights.json"
        document = json.loads(path.read_text())
        weather = {"acltype": "publishClientSend", "topic": "weather", "priority": 0, "allow": True}
        document["roles"].append({"rolename": "weather", "acls": [weather]})
        document["clients"].append({"username": "vane", "roles": [{"rolename": "weather"}]})
        for role in document["roles"]:
            if role["rolename"] in (rights.role_of("edge-1"), rights.COORDINATOR_ROLE):
                old = topics.PREFIX if role["rolename"] == rights.role_of("edge-1") else f"{topics.PREFIX}/{REGION}/+"
                role["acls"] = [
                    acl if acl["topic"].startswith("$CONTROL") else {**acl, "topic": f"{old}/old"}
                    for acl in role["acls"]
                ]
        path.write_text(json.dumps(document))
        (served.folder / "dynamic-security.json").unlink()
        served.start()
        assert not may_speak(served, authority, "edge-1")
        async with running_control(served, authority, "edge-1"):
            assert may_speak(served, authority, "edge-1")
            assert not may_speak(served, authority, "edge-9")
            files = authority.issue(Role.COORDINATOR, "coordinator")
            with MqttPeer(served.port, tls(files), "coordinator-test") as above:
                assert above.subscribe(topics.all_nodes(REGION, Channel.STATUS)) == 1
            with MqttPeer(served.port, tls(authority.issue(Role.AGENT, "vane")), "vane-test") as vane:
                assert vane.publish("weather", b"west") in (0, 16)
                assert vane.publish("shoal", b"x") == NOT_AUTHORIZED


async def test_a_broker_that_gives_the_coordinator_nothing_is_said_and_waited_for(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker(tmp_path / "mqtt", authority) as served:
        served.stop()
        (served.folder / "rights.json").write_text(json.dumps({**rights.document(REGION), "clients": []}))
        (served.folder / "dynamic-security.json").unlink()
        served.start()
        files = authority.issue(Role.COORDINATOR, "coordinator")
        control = BrokerControl(REGION, served.address, files, CoordinatorClock(), SystemIds(), NoMeter())
        running = asyncio.create_task(control.run())
        try:
            await until(lambda: "TOPIC_DENIED" in capsys.readouterr().out, 5, "the refusal in the log")
            assert not control.is_in_sync
            served.stop()
            served.wipe()
            served.start()
            await until(lambda: control.is_in_sync, 5, "the broker to be told")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_broker_that_lost_its_rights_starts_with_all_that_the_coordinator_kept_in_its_folder(
    tmp_path: Path, authority: Authority
) -> None:
    with broker(tmp_path / "mqtt", authority) as served:
        folder = BrokerFolder(served.folder, lambda hosts: pytest.fail("its certificate is good"))
        async with running_control(served, authority, "edge-1", "edge-2", keep=folder.save_rights) as control:
            await control.expel("edge-2")

            def is_kept() -> bool:
                held = (served.folder / "rights.json").read_bytes()
                return b"edge-1" in held and b"edge-2" not in held  # before the first time it is kept it holds neither

            await until(is_kept, 5, "it is kept")
        served.kill()
        (served.folder / "dynamic-security.json").unlink()
        served.start()
        assert may_speak(served, authority, "edge-1"), "nobody has told it"
        assert not may_speak(served, authority, "edge-2")
