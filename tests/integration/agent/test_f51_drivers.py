"""F51: a device driver that hangs, lies, crashes or is slow, in a real agent: its device is unreachable, and all else
goes on: heartbeats, the other device, and the requests of both."""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import pytest
import pytest_asyncio

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.agent_host import REGION, AgentHost, FakeCoordinator, assignment, ready
from harness.crypto.pki import Authority
from harness.faults import faulty_driver
from harness.faults.faulty_driver import DEVICE, FAULT_FILE, DriverFault
from harness.measure.contention import RunDelay
from harness.models.engine_cases import add_one
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code
from shoal.types.device import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S: Final = 60.0
BACK_S: Final = 5.0
SUSPECT_S: Final = 3.0
"""A coordinator suspects a node after three of its heartbeats of 1 s; here they are twice as frequent."""
HERE, FAULTY = "here", "faulty"
HARMLESS: Final = (DriverFault.SLOW, DriverFault.FIGURE, DriverFault.VANISH, DriverFault.HUGE)
"""When it is read, for the driver."""


@dataclass
class Node:
    """An agent with two devices, of which one has the driver that misbehaves; each has a replica."""

    coordinator: FakeCoordinator
    machine: AgentHost
    faults: Path
    client: GrpcClient
    sent: int = 0
    lost: list[str] = field(default_factory=list)

    async def infer(self, workload: str) -> str:
        """Why the answer is missing or wrong; empty if it is right."""
        tensor = Tensor("x", "FP32", (3,), np.asarray([1, 2, 3], np.float32).tobytes())
        try:
            answer = await self.client.infer(workload, [tensor], timeout=5.0)
        except InferenceError as error:
            return f"{workload}: {error}"
        right = np.asarray([2, 3, 4], np.float32).tobytes()
        return "" if answer.outputs[0].raw == right else f"{workload}: a wrong answer"

    async def serves(self, workload: str) -> bool:
        return not await self.infer(workload)

    async def send_forever(self, workload: str) -> None:
        while True:
            self.sent += 1
            if why := await self.infer(workload):
                self.lost.append(why)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    folder = tmp_path_factory.mktemp("region")
    authority = Authority(folder / "ca", REGION, SystemClock().wall())
    model = add_one()
    digest = f"sha256:{hashlib.sha256(model).hexdigest()}"
    coordinator = FakeCoordinator(authority.issue(Role.COORDINATOR, "coordinator"), {digest: model})
    await coordinator.start()
    machine = AgentHost(folder / "edge-1", authority, coordinator.address)
    faults = folder / "fault.json"
    faulty_driver.command(faults)
    installed = faulty_driver.install(folder / "installed")
    machine.environment = {FAULT_FILE: str(faults), "PYTHONPATH": f"{installed}:{':'.join(sys.path)}"}
    try:
        await asyncio.to_thread(machine.start)
        await until(lambda: len(coordinator.receipts) == 2, LIMIT_S, "both devices to be measured")
        coordinator.want(
            assignment(HERE, HERE, digest, len(model)),
            replace(assignment(FAULTY, FAULTY, digest, len(model)), device=DEVICE),
            generation=1,
        )
        await ready(coordinator, HERE)
        await ready(coordinator, FAULTY)
        client = machine.client()
        found = Node(coordinator, machine, faults, client)
        for workload in (HERE, FAULTY):
            await until(partial(found.serves, workload), LIMIT_S, "the front to serve it")
        yield found
        await client.close()
    finally:
        machine.lose_power()
        await coordinator.stop()


@asynccontextmanager
async def under_load(node: Node) -> AsyncIterator[None]:
    sending = [asyncio.create_task(node.send_forever(each)) for each in (HERE, FAULTY)]
    try:
        yield
    finally:
        for task in sending:
            task.cancel()
        await asyncio.wait(sending)


@pytest.mark.parametrize(
    ("method", "fault"),
    [("read", each) for each in DriverFault if each not in HARMLESS] + [("discover", DriverFault.HANG)],
)
async def test_f51_only_its_device_is_unreachable_and_it_is_back_soon(
    node: Node, method: str, fault: DriverFault
) -> None:
    known, sent, first = len(node.coordinator.events), node.sent, len(node.coordinator.stamps)
    delay = RunDelay(node.machine.pid)
    async with under_load(node):
        if method == "discover":  # where it was started again
            faulty_driver.command(node.faults, "read", DriverFault.EXIT)
            await until(lambda: DEVICE not in node.coordinator.readings, LIMIT_S, "the driver to have ended")
        faulty_driver.command(node.faults, method, fault)
        await until(lambda: DEVICE not in node.coordinator.readings, LIMIT_S, "the device to be unreachable")
        beats = len(node.coordinator.stamps)
        await until(lambda: len(node.coordinator.stamps) > beats + 4, LIMIT_S, "heartbeats meanwhile")
        assert "cpu0" in node.coordinator.readings
        assert node.coordinator.front_ready
        (silent,) = node.coordinator.silent.values()
        assert (silent.device, silent.code) == (DEVICE, Code.DEVICE_UNREACHABLE)
        assert silent.reason.startswith("found: ")
        began = asyncio.get_running_loop().time()
        faulty_driver.command(node.faults)
        await until(lambda: DEVICE in node.coordinator.readings, LIMIT_S, "the device to be back")
        back_s = asyncio.get_running_loop().time() - began
        assert node.coordinator.silent == {}
    (event,) = [each for each in node.coordinator.events[known:] if each.subject == DEVICE]
    assert event.code == Code.DEVICE_UNREACHABLE
    assert not node.lost
    stamps = node.coordinator.stamps[first:]
    silent_s = max(later - earlier for earlier, later in pairwise(stamps))
    slowed_s = delay.slowdown_s()
    assert silent_s <= SUSPECT_S + slowed_s
    assert back_s <= BACK_S + slowed_s
    record(
        "F51", "P", 1, fault=f"{fault} at {method}", back_s=round(back_s, 2), silent_s=round(silent_s, 2),
        sent=node.sent - sent, lost=0,
    )  # fmt: skip


async def test_f51_a_slow_driver_costs_nothing(node: Node) -> None:
    known = len(node.coordinator.events)
    async with under_load(node):
        faulty_driver.command(node.faults, "read", DriverFault.SLOW)
        beats = len(node.coordinator.stamps)
        await until(lambda: len(node.coordinator.stamps) > beats + 8, LIMIT_S, "heartbeats meanwhile")
        faulty_driver.command(node.faults)
    assert node.coordinator.readings.keys() == {"cpu0", DEVICE}
    assert node.coordinator.events[known:] == []
    assert not node.lost


async def test_f51_what_a_driver_wrote_is_in_the_agents_log(node: Node) -> None:
    failed = node.machine.log_lines("driver_failed")
    assert {each["driver"] for each in failed} == {"faulty"}
    assert any("no answer to read within" in each["error"] for each in failed)
    assert any("SIGABRT" in each["error"] for each in failed)


async def test_a_driver_that_hangs_at_the_start_keeps_no_other_device_from_serving(node: Node) -> None:
    """Nor is its own device measured anew once it answers: what it can do was on disk."""
    digest = next(iter(node.coordinator.models))
    node.coordinator.want(assignment(HERE, HERE, digest, len(node.coordinator.models[digest])), generation=2)
    await until(lambda: FAULTY not in node.machine.workers(), LIMIT_S, "the other replica to be gone")
    faulty_driver.command(node.faults, "discover", DriverFault.HANG)
    before, sessions = len(node.machine.log()), len(node.coordinator.hellos)
    await asyncio.to_thread(node.machine.lose_power)
    await asyncio.to_thread(node.machine.start)
    await until(partial(node.serves, HERE), LIMIT_S, "the processor's replica to serve")
    assert len(node.coordinator.hellos) == sessions, "the first session waits for the devices"
    faulty_driver.command(node.faults)
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(faulty_driver.__name__ in part for part in each.cmdline()):
                each.kill()
    await until(lambda: DEVICE in node.coordinator.readings, LIMIT_S, "its device to be told of")
    assert {each.name for each in node.coordinator.hellos[-1].node.devices} == {"cpu0", DEVICE}
    assert {each.receipt.device for each in node.coordinator.receipts} == {"cpu0", DEVICE}
    assert node.machine.log_lines("device_probed", before) == []


async def test_a_device_found_while_a_session_opens_is_announced_before_any_status_tells_of_it(node: Node) -> None:
    """On a busy machine its driver starts late, and the coordinator may answer late too."""
    coordinator = node.coordinator
    faulty_driver.command(node.faults, "discover", DriverFault.RAISE)
    await asyncio.to_thread(node.machine.lose_power)
    coordinator.may_welcome.clear()
    sessions = len(coordinator.hellos)
    await asyncio.to_thread(node.machine.start)
    await until(lambda: len(coordinator.hellos) > sessions, LIMIT_S, "a hello")
    assert {each.name for each in coordinator.hellos[-1].node.devices} == {"cpu0"}
    before = len(node.machine.log())
    faulty_driver.command(node.faults)
    await until(lambda: node.machine.log_lines("driver_started", before), LIMIT_S, "its driver to find the device")
    coordinator.readings = {}
    coordinator.may_welcome.set()
    await until(lambda: DEVICE in coordinator.readings, LIMIT_S, "its device to be told of")
    assert coordinator.unannounced == set()
