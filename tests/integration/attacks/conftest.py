"""A node with one model and a coordinator, for the attacks of a module; they must outlive all of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models.synthetic import relu
from shoal.agent.clock import SystemClock
from shoal.types.workload import WorkloadKey


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    """`relu` of tenant `acme`; its front and worker are the same processes at the end."""
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    made = DataPlaneNode("n1", Authority(tmp_path / "ca", "west", SystemClock().wall()), tmp_path / "n1")
    try:
        await made.start()
        await made.load("a1", WorkloadKey("acme", "relu"), model)
        await made.configure()
        front = made.front.pid
        yield made
        assert (made.front.pid, made.front.restarts, made.exits) == (front, 0, []), "nothing died"
    finally:
        await made.stop()
