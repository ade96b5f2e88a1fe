"""A replica joins the routes behind a long way: nobody waits for that way to open while another replica answers."""

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from harness.clients.oip import GrpcClient, Tensor
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.faults.tcp_proxy import tcp_proxy
from harness.measure.contention import RunDelay
from harness.models.synthetic import relu
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "relu")
FAR_S = 0.25
"""One way: a handshake takes four times that, a request on an open way twice."""
X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", -1.0, 1.0, 2.0, 0.0))


@pytest.mark.alone
async def test_requests_go_elsewhere_until_the_way_is_open(tmp_path: Path) -> None:
    clock = SystemClock()
    authority = Authority(tmp_path / "ca", "west", clock.wall())
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    gateway = DataPlaneNode("g1", authority, tmp_path / "g1", Role.GATEWAY)
    near, far = (DataPlaneNode(name, authority, tmp_path / name) for name in ("n1", "n2"))
    nodes = (gateway, near, far)
    try:
        for node in nodes:
            await node.start()
        await near.load("a-1", KEY, model)
        await far.load("a-2", KEY, model)
        for node, name in ((near, "a-1"), (far, "a-2")):
            await node.configure([Route(KEY, 1, (node.endpoint(name),))])
        async with tcp_proxy(far.front.config.port, delay_s=FAR_S) as way:
            here = near.endpoint("a-1", at=gateway)
            await gateway.configure([Route(KEY, 1, (here,))])
            files = authority.issue(Role.TENANT, KEY.tenant)
            client = GrpcClient(gateway.front.config.port, authority.certificate.read_bytes(), files)
            await client.infer(KEY.name, (X,))
            there = replace(far.endpoint("a-2", at=gateway, weight=9.0), address=f"127.0.0.1:{way.port}")
            await gateway.configure([Route(KEY, 2, (here, there))])
            assert gateway.front.pid is not None
            assert near.front.pid is not None
            delay = RunDelay(os.getpid(), gateway.front.pid, near.front.pid, near.worker_pid("a-1"))
            took = [await infer_duration_s(client, clock) for _ in range(5)]
            delayed_s = delay.seconds()
            assert max(took) - delayed_s < 2 * FAR_S, "none waited for the way, nor was any sent there yet"

            async def sent_there() -> bool:
                return await infer_duration_s(client, clock) >= 2 * FAR_S

            await until(sent_there, 60, "an answer by the new way")
            await client.close()
    finally:
        for node in nodes:
            await node.stop()


async def infer_duration_s(client: GrpcClient, clock: SystemClock) -> float:
    began = clock.now()
    await client.infer(KEY.name, (X,))
    return clock.now() - began
