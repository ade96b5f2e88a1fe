"""System shared memory at real fronts: an unmodified tritonclient with its own utilities, at an agent and a gateway;
retries, sessions and captured requests hold bytes."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.clients import triton
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from shoal.agent.clock import SystemClock
from shoal.agent.core.shared_memory import SharedMemoryGrant
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

TESTS = Path(__file__).parents[2]
CHILD = "harness.clients.triton_shared_memory"
KEY = WorkloadKey("acme", "transpose")
PREFIX = f"shoal-test-{os.getpid()}-"
ACME = (SharedMemoryGrant("acme", PREFIX),)


@pytest.fixture
async def fronts(tmp_path: Path) -> AsyncIterator[dict[str, DataPlaneNode]]:
    """An agent with a worker, and a gateway without one."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    agent = DataPlaneNode("n1", authority, tmp_path / "n1", shared_memory=ACME)
    gateway = DataPlaneNode("g1", authority, tmp_path / "g1", Role.GATEWAY, shared_memory=ACME)
    model = tmp_path / "transpose.onnx"
    model.write_bytes(triton.transpose_model("FP32", "BYTES"))
    try:
        await asyncio.gather(agent.start(), gateway.start())
        await agent.load("a1", KEY, model)
        await agent.configure()
        await gateway.configure([Route(KEY, 1, (agent.endpoint("a1", at=gateway),))])
        yield {"agent": agent, "gateway": gateway}
    finally:
        await gateway.stop()
        await agent.stop()


def ask(front: DataPlaneNode, transport: str, prefix: str) -> dict[str, Any]:
    tenant = front.authority.issue(Role.TENANT, "acme")
    spec = {
        "transport": transport,
        "url": f"localhost:{front.front.config.port}",
        "authority": str(tenant.authority),
        "certificate": str(tenant.certificate),
        "key": str(tenant.key),
        "model": "transpose",
        "prefix": prefix,
    }
    command = [sys.executable, "-m", CHILD, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=TESTS)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("transport", ["grpc", "http"])
async def test_tritonclient_passes_tensors_in_shared_memory(fronts: dict[str, DataPlaneNode], transport: str) -> None:
    for name, front in fronts.items():
        prefix = f"{PREFIX}{name}-"
        found = await asyncio.to_thread(ask, front, transport, prefix)
        assert found["status"] == {
            "in_FP32": [f"/{prefix}in", 0, 64],
            "in_BYTES": [f"/{prefix}in", 64, 64],
            "out_FP32": [f"/{prefix}out", 0, 64],
            "out_BYTES": [f"/{prefix}out", 64, 64],
        }
        assert found["right"] == {
            "in and out": ["numbers", "texts"],
            "in": ["sent"],
            "out": ["numbers", "texts"],
            "first out": ["numbers", "sent"],
            "second out": ["texts", "sent"],
            **({"stream": ["numbers", "texts"]} if transport == "grpc" else {}),
        }
        assert set(found["told"]) == {"out_FP32", "out_BYTES"}
        for parameters in found["told"].values():
            assert set(parameters) == {"shared_memory_byte_size", "shared_memory_region"}
        assert "'in_FP32'" in found["errors"]["unregistered"]
        assert "CUDA" in found["errors"]["cuda"]
        assert found["left"] == 0
