"""Another CA in a region whose links go by a broker: it gets its files by hand, so the rotation waits for it (F30)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.report import record
from harness.stack import Stack, region
from harness.wait import wait_until
from shoal.devstack import broker
from shoal.wire.enrol import renew

MEMBERS = ("plain-cpu", "gateway")
PATIENCE_S = 60.0

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with region(tmp_path_factory.mktemp("carried"), 1, link="mqtt") as found:
        yield found


def waits_for(stack: Stack) -> list[str]:
    with stack.api() as api:
        found = api.authority()
    return [each.uri.partition("//home/")[2] for each in found.laggards] if found.stage == "issue" else [found.stage]


def test_f30_the_rotation_waits_for_the_broker_and_everybody_is_back_through_it(carried: Stack) -> None:
    client = Path(carried.client_files.certificate).parent
    member = carried.info.stack.broker
    assert member is not None
    assert carried.shoal("ca", "rotate", "--wait", "0s").returncode == 0
    wait_until(
        lambda: waits_for(carried) == ["broker/broker", "tenant/default"], PATIENCE_S, "every node to have followed"
    )
    renew(carried.info.stack.coordinator.addresses["enrol"], client).write(client)
    wait_until(lambda: waits_for(carried) == ["broker/broker"], PATIENCE_S, "the client to have followed")
    assert "broker-config" in carried.shoal("ca", "status").stdout

    broker.prepare(carried.control.folder, carried.info.stack, member)
    ((pid, _),) = carried.processes("broker")
    os.kill(pid, signal.SIGHUP)
    wait_until(lambda: waits_for(carried) == ["idle"], PATIENCE_S, "the old CA to go")

    linked = {name: len(carried.logged(name, "link_up")) for name in MEMBERS}
    carried.kill("broker/broker")

    def are_back() -> bool:
        return all(len(carried.logged(name, "link_up")) > count for name, count in linked.items())

    wait_until(are_back, PATIENCE_S, "all to come back by it")
    wait_until(lambda: carried.doctor() == [], PATIENCE_S, "all to be in order")
    record("F30", "P", 1, link="mqtt")
