"""F17: a region's real processes, whose links Mosquitto carries, lose it by SIGKILL while they serve."""

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from integration.mqtt.region import NAME, NODES

from harness import report
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad
from harness.measure.contention import RunDelay
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.coordinator.broker import rights
from shoal.types.codes import Code

BACK_WITHIN_S = 5.0


def leave(folder: Path) -> None:
    """As it was."""


def empty(folder: Path) -> None:
    (folder / "dynamic-security.json").unlink()


def corrupt(folder: Path) -> None:
    """With all that Mosquitto keeps: over such a database it would not start, if it read one."""
    for name in ("dynamic-security.json", "mosquitto.db"):
        (folder / name).write_bytes(bytes(range(256)))


def sessions(stack: DevStack) -> dict[str, int]:
    """Epochs of the nodes that are ready."""
    with stack.api() as api:
        return {view.node.name: view.epoch for view in api.get("nodes").nodes if view.liveness == "ready"}


def reasons(stack: DevStack) -> set[str]:
    """What is told about the nodes that are ready."""
    with stack.api() as api:
        return {view.reason.code for view in api.get("nodes").nodes if view.liveness == "ready"}


def is_on_mqtt(stack: DevStack) -> bool:
    """Each node and the coordinator is connected to the broker, nodes to the coordinator not at all."""
    broker, coordinator = stack.port("broker", "mqtt"), stack.port("coordinator", "link")
    for name in ("coordinator", *NODES):
        role = "coordinator" if name == "coordinator" else "supervisor"
        ((pid, _),) = stack.processes(name, role)
        remote = {
            connection.raddr.port for connection in psutil.Process(pid).net_connections("tcp") if connection.raddr
        }
        if broker not in remote or coordinator in remote:
            return False
    return True


@pytest.mark.parametrize("hurt", [leave, empty, corrupt])
def test_f17_every_agent_is_back_soon_after_the_broker_and_nothing_was_done_twice(
    stack: DevStack, hurt: Callable[[Path], None]
) -> None:
    folder = stack.control.folder / "broker"
    wait_until(lambda: set(sessions(stack)) == set(NODES), 30.0, "every node to be ready")
    assert is_on_mqtt(stack)
    before, workers = sessions(stack), stack.workers()
    placed = [row.assignment.id for row in stack.wait_serving(NAME)]
    last = max((event.sequence for event in stack.events()), default=0)
    clock = SystemClock()
    gateway = stack.port("gateway", "data")
    with InferenceLoad(gateway, stack.client_files, NAME, clients=2, rate=10.0) as load:
        stack.kill("broker")
        hurt(folder)
        told = {Code.WAITING_FOR_LINK}
        wait_until(lambda: reasons(stack) == told, 20.0, "nodes that are ready still, and why they are not heard")
        load.wait_for(80)  # inference goes on without it, for longer than it takes to be suspected
        stack.control.break_member("broker", "resume")  # it listens when this returns
        there, delay = clock.now(), RunDelay(*(pid for pid, _ in stack.processes()))
        wait_until(
            lambda: all(sessions(stack).get(name, 0) > epoch for name, epoch in before.items()),
            WAIT_TIMEOUT_S,
            "every node back in a session of its own",
        )
        back_s, delayed_s = clock.now() - there, delay.seconds()
        load.wait_for(10)
    assert back_s - delayed_s <= BACK_WITHIN_S, f"of which {delayed_s:.2f}s because others hold the cores"
    assert load.verdict().lost_count == 0
    assert stack.workers() == workers, "no model was loaded again"
    assert [row.assignment.id for row in stack.wait_serving(NAME)] == placed
    assert {"BROKER_LOST", "BROKER_BACK"} <= {event.code for event in stack.events(last)}
    decided = [event.code for event in stack.events(last) if event.workload.name == NAME]
    assert decided == [], "nothing was decided anew"
    known = json.loads((folder / "dynamic-security.json").read_text())
    assert {client["username"] for client in known["clients"]} >= set(NODES)
    assert {role["rolename"] for role in known["roles"]} >= {rights.role_of(name) for name in NODES}
    report.record("F17", "P", 1, **{f"back_s_{hurt.__name__}": round(back_s, 2)}, requests=load.answer_count())
