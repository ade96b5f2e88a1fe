"""System shared memory at real fronts: an unmodified tritonclient with its own utilities, at an agent and a gateway."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from onnx import helper

from harness.clients import triton
from harness.clients.oip import GrpcClient, Tensor, infer_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models.synthetic import model as onnx_model
from harness.models.synthetic import tensor
from shoal.agent.clock import SystemClock
from shoal.agent.core.shared_memory import SharedMemoryGrant
from shoal.agent.dataplane.shared_regions import FOLDER
from shoal.inference import open_inference_pb2 as oip
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


async def ask_plain(client: GrpcClient, content: bytes) -> bytes:
    answer = await client.infer("same", [Tensor("x", "FP32", (len(content) // 4,), content)])
    return answer.outputs[0].raw


def shared_asker(path: Path, size: int) -> Callable[[GrpcClient, bytes], Awaitable[bytes]]:
    """The input in the first half of the file, the output in the second."""
    message = infer_request("same", ())
    message.inputs.add(name="x", datatype="FP32", shape=[size // 4])
    message.outputs.add(name="y")
    for parameters, offset in ((message.inputs[0].parameters, 0), (message.outputs[0].parameters, size)):
        parameters["shared_memory_region"].string_param = "r"
        parameters["shared_memory_byte_size"].int64_param = size
        parameters["shared_memory_offset"].int64_param = offset
    request = message.SerializeToString()

    async def ask(client: GrpcClient, content: bytes) -> bytes:
        with path.open("r+b", buffering=0) as file:
            file.write(content)
            await client.call("ModelInfer", request)
            file.seek(size)
            return file.read()

    return ask


def cpu_s(pid: int | None) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


@pytest.mark.long
@pytest.mark.parametrize("megabytes", [1, 4])
async def test_what_it_saves(tmp_path: Path, megabytes: int) -> None:
    """Prints what a request costs, with its tensors in the messages and in shared memory, in turn: 4 rounds of 50."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    node = DataPlaneNode("n1", authority, tmp_path / "n1", shared_memory=ACME)
    path, content = FOLDER / f"{PREFIX}measured", os.urandom(megabytes * 2**20)
    path.write_bytes(bytes(2 * len(content)))
    same = helper.make_node("Identity", ["x"], ["y"])
    (tmp_path / "same.onnx").write_bytes(
        onnx_model([same], [tensor("x", ["N"])], [tensor("y", ["N"])]).SerializeToString()
    )
    client: GrpcClient | None = None
    try:
        await node.start()
        await node.load("a1", WorkloadKey("acme", "same"), tmp_path / "same.onnx")
        await node.configure()
        client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
        asked = oip.SystemSharedMemoryRegisterRequest(name="r", key=path.name, byte_size=2 * len(content))
        await client.call("SystemSharedMemoryRegister", asked.SerializeToString())
        ways = {"in messages": ask_plain, "in shared memory": shared_asker(path, len(content))}
        pids = {"front": node.front.pid, "worker": node.worker_pid("a1")}
        cpu: defaultdict[tuple[str, str], float] = defaultdict(float)
        took: defaultdict[str, list[float]] = defaultdict(list)
        loop, rounds, count = asyncio.get_running_loop(), 4, 50
        for number in range(1 + rounds):
            for way, ask in ways.items():
                before = {name: cpu_s(pid) for name, pid in pids.items()}
                for _ in range(count):
                    began = loop.time()
                    assert await ask(client, content) == content
                    took[way].append(loop.time() - began)
                for name, pid in pids.items():
                    cpu[way, name] += cpu_s(pid) - before[name] if number else 0.0
        for way in ways:
            each = {name: round(cpu[way, name] / rounds / count * 1e6) for name in pids}
            p50 = statistics.median(took[way][count:]) * 1e3
            print(f"{megabytes} MiB in and out {way}: {each} us of CPU, p50 {p50:.1f} ms with the client's")
        assert cpu["in shared memory", "front"] < cpu["in messages", "front"]
    finally:
        path.unlink()
        if client is not None:
            await client.close()
        await node.stop()
