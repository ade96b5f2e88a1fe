"""F32: an agent's disk fills while it fetches, logs or persists, and what runs keeps running. The whole state
directory of a real agent, log included, is on a disk that fills to the last byte."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from harness.clients.oip import InferenceError, Tensor
from harness.cluster.agent_host import REGION, AgentHost, FakeCoordinator, assignment, ready
from harness.crypto.pki import Authority
from harness.faults.disk import fill_disk, small_disk
from harness.models import engine_cases
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.assignment import Phase, Version
from shoal.types.codes import Code
from shoal.types.device import Role

ONE, TWO = "a-one", "a-two"
MIB = 2**20


def digest_of(model: bytes) -> str:
    return f"sha256:{hashlib.sha256(model).hexdigest()}"


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[tuple[FakeCoordinator, AgentHost]]:
    authority = Authority(tmp_path / "ca", REGION, SystemClock().wall())
    models = [engine_cases.add_one(), engine_cases.heavy(8)]
    coordinator = FakeCoordinator(
        authority.issue(Role.COORDINATOR, "coordinator"), {digest_of(model): model for model in models}
    )
    await coordinator.start()
    with small_disk(tmp_path / "disk", 192 * MIB) as disk:
        machine = AgentHost(disk / "edge-1", authority, coordinator.address)
        try:
            await asyncio.to_thread(machine.start)
            await until(lambda: coordinator.receipts, 60.0, "the device to be measured")
            yield coordinator, machine
        finally:
            machine.lose_power()
            await coordinator.stop()


@pytest.mark.timeout(300)
async def test_f32_what_runs_keeps_running_and_what_is_desired_is_kept(
    region: tuple[FakeCoordinator, AgentHost],
) -> None:
    coordinator, machine = region
    one, two = (
        assignment(name, name, digest, len(coordinator.models[digest]))
        for name, digest in zip((ONE, TWO), coordinator.models, strict=True)
    )
    coordinator.want(one, generation=1)
    await ready(coordinator, ONE, 60.0)
    processes = machine.workers()
    client = machine.client()
    x = Tensor("x", "FP32", (4,), np.arange(4, dtype="<f4").tobytes())
    right = (np.arange(4, dtype="<f4") + 1).tobytes()
    answered: list[bytes] = []
    lost: list[InferenceError] = []
    ended = asyncio.Event()

    async def load() -> None:
        while not ended.is_set():
            try:
                answered.append((await client.infer(ONE, [x])).outputs[0].raw)
            except InferenceError as error:
                lost.append(error)

    async def wait_answers(more: int) -> None:
        count = len(answered)
        await until(lambda: len(answered) > count + more, 30.0, f"{more} more answers")

    async def front_answers() -> bool:
        try:
            return bool((await client.infer(ONE, [x])).outputs)
        except InferenceError:
            return False

    await until(front_answers, 10.0, "the front to serve it")
    loading = asyncio.create_task(load())
    await wait_answers(20)
    ballast = machine.folder.parent / "ballast"
    await asyncio.to_thread(fill_disk, ballast)
    coordinator.want(one, two, generation=2)
    await until(lambda: coordinator.observed[TWO].code is Code.DISK_FULL, 30.0, "the full disk in the status")
    told = coordinator.observed[TWO]
    assert told.reason
    assert coordinator.version == Version("h-1", 1, 2), "the set is persisted in the reserved space, and then accepted"
    fill_disk(ballast)
    await wait_answers(50)
    assert coordinator.phase(ONE) is Phase.READY
    assert machine.workers()[ONE] == processes[ONE]
    ballast.unlink()
    await ready(coordinator, TWO, 90.0)
    await wait_answers(20)
    ended.set()
    await loading
    assert lost == []
    assert set(answered) == {right}
    assert machine.workers()[ONE] == processes[ONE]
    sessions = len(coordinator.hellos)
    machine.lose_power()
    await asyncio.to_thread(machine.start)
    await until(lambda: len(coordinator.hellos) > sessions, 30.0, "the next session")
    assert coordinator.hellos[-1].holds == Version("h-1", 1, 2), "what was accepted on a full disk outlives the power"
    await client.close()
    record("F32", "P", 1, sent=len(answered), lost=0, restarted=0, told=told.code)
