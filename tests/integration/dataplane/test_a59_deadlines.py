"""A59: a client steers the figures that replicas are judged by. Short deadlines that it chooses, at a real front,
eject no replica for others."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from harness.clients.oip import InferenceError, Tensor, infer_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models import engine_cases as models
from harness.report import record
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.workload import WorkloadKey

ENDLESS = 2**60
IMPATIENT = 12
"""Requests that no replica could answer in time."""


def tensors(trips: int) -> tuple[Tensor, Tensor]:
    return (
        Tensor("x", "FP32", (1,), np.ones(1, np.float32).tobytes()),
        Tensor("n", "INT64", (), np.array(trips, np.int64).tobytes()),
    )


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    model = tmp_path / "loop.onnx"
    model.write_bytes(models.loop(-1))
    made = DataPlaneNode("n1", Authority(tmp_path / "ca", "west", SystemClock().wall()), tmp_path / "n1")
    try:
        await made.start()
        await made.load("a1", WorkloadKey("acme", "loop"), model)
        await made.configure()
        yield made
        assert made.exits == []
    finally:
        await made.stop()


@pytest.mark.parametrize("answered_before", [0, 3])
async def test_a59_short_deadlines_of_one_client_eject_no_replica(node: DataPlaneNode, answered_before: int) -> None:
    """Before and after the replica's usual time is known. Ejected, it would count as not ready."""
    impatient = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    other = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    for _ in range(answered_before):
        await other.infer("loop", tensors(3))
    hasty = infer_request("loop", tensors(ENDLESS))
    hasty.parameters["timeout"].int64_param = 20_000
    ready = []
    for _ in range(IMPATIENT):
        with pytest.raises(InferenceError) as late:
            await impatient.send(hasty)
        assert late.value.code == Code.DEADLINE_EXCEEDED
        ready.append(await other.model_ready("loop"))
    answer = await other.infer("loop", tensors(3))
    await impatient.close()
    await other.close()
    record("A59", "P", IMPATIENT, answered_before=answered_before, ready=sum(ready))
    assert all(ready), ready
    assert answer.outputs[0].raw == np.full(1, 8, np.float32).tobytes()
