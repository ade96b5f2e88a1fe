"""A replica that nobody asks is unloaded, and its next requests load it again: real processes."""

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest
import pytest_asyncio

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.agent_host import REGION, AgentHost, FakeCoordinator, assignment, ready
from harness.crypto.pki import Authority
from harness.models import engine_cases
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.assignment import Phase
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = "a-one"
AFTER_S = Seconds(1.0)
MODEL_MB, SIDE = 64, 1024
"""A layer has 4 MiB of weights."""
CROWD = 200
WAKE_S = 30.0
"""Longest deadline of a request that waits; a wake takes about a second on a quiet machine."""


@dataclass
class Scene:
    """One agent with one replica that is scaled to zero after `AFTER_S`."""

    coordinator: FakeCoordinator
    machine: AgentHost
    client: GrpcClient
    sent: Tensor
    right: np.ndarray[Any, Any]

    async def infer(self, timeout: float = WAKE_S) -> bool:
        """Whether the answer is right."""
        answer = (await self.client.infer("angle", [self.sent], timeout=timeout)).outputs[0].raw
        return np.allclose(np.frombuffer(answer, np.float32).reshape(self.right.shape), self.right, 1e-4, 1e-5)

    async def idle(self) -> None:
        """Until it is unloaded, and its worker's process is gone."""

        def is_unloaded() -> bool:
            seen = self.coordinator.observed[NAME]
            return seen.code is Code.SCALED_TO_ZERO and NAME not in self.machine.workers()

        await until(is_unloaded, 20.0, "the replica to be unloaded")

    def memory(self) -> int:
        """Bytes that the agent's processes do not share with others."""
        total = 0
        for each in self.machine.processes():
            with suppress(psutil.Error):
                total += each.memory_full_info().uss
        return total


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("region")
    authority = Authority(folder / "ca", REGION, SystemClock().wall())
    model = engine_cases.layers(MODEL_MB // 4, SIDE)
    digest = f"sha256:{hashlib.sha256(model).hexdigest()}"
    given = np.random.default_rng(7).standard_normal((1, SIDE), dtype=np.float32)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    right = np.asarray(session.run(None, {"x": given})[0])
    coordinator = FakeCoordinator(authority.issue(Role.COORDINATOR, "coordinator"), {digest: model})
    await coordinator.start()
    machine = AgentHost(folder / "edge-1", authority, coordinator.address)
    try:
        await asyncio.to_thread(machine.start)
        client = machine.client()
        await until(lambda: coordinator.receipts, 40.0, "the device to be measured")
        asked = replace(assignment(NAME, "angle", digest, len(model)), to_zero_after_s=AFTER_S)
        coordinator.want(asked, generation=1)
        await ready(coordinator, NAME)
        yield Scene(coordinator, machine, client, Tensor("x", "FP32", given.shape, given.tobytes()), right)
        await client.close()
    finally:
        machine.lose_power()
        await coordinator.stop()


async def test_it_gives_its_memory_back_and_loads_for_the_next_request(scene: Scene) -> None:
    assert await scene.infer()
    loaded = scene.memory()
    await scene.idle()
    seen = scene.coordinator.observed[NAME]
    assert seen.phase is Phase.READY
    assert "the next one waits" in seen.reason
    await until(lambda: loaded - scene.memory() > MODEL_MB * 2**20, 10.0, "its memory to be free")
    freed = loaded - scene.memory()
    assert await scene.client.model_ready("angle"), "it takes requests"
    listed = await scene.client.index()
    assert [each["state"] for each in listed] == ["READY"]
    assert Code.SCALED_TO_ZERO in listed[0]["reason"]
    began = asyncio.get_running_loop().time()
    assert await scene.infer()
    first_s = asyncio.get_running_loop().time() - began
    await until(lambda: scene.coordinator.observed[NAME].code is None, 10.0, "the region to hear of it")
    record("scale-to-zero", "P", 1, freed_mib=freed // 2**20, first_answer_s=round(first_s, 3))


async def test_requests_that_come_at_once_wait_for_one_load_and_none_is_lost(scene: Scene) -> None:
    await scene.idle()
    restarts = scene.coordinator.observed[NAME].restarts
    answers = await asyncio.gather(*(scene.infer() for _ in range(CROWD)))
    assert sum(answers) == CROWD
    assert scene.coordinator.observed[NAME].restarts == restarts, "a wake is no restart"


async def test_a_deadline_that_no_load_meets_is_refused_at_once_and_the_load_begins(scene: Scene) -> None:
    await scene.idle()
    with pytest.raises(InferenceError) as refused:
        await scene.infer(timeout=0.05)
    assert refused.value.code == Code.SCALED_TO_ZERO
    assert float(refused.value.retry_after_ms) > 50
    assert await scene.infer()


async def test_a_worker_that_is_killed_while_it_loads_for_a_request_costs_nothing_but_time(scene: Scene) -> None:
    await scene.idle()
    answer = asyncio.create_task(scene.infer())
    await until(lambda: NAME in scene.machine.workers(), 10.0, "a worker to load it", every_s=0.005)
    os.kill(scene.machine.workers()[NAME], signal.SIGKILL)
    assert await answer
