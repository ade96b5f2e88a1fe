"""grpc.health.v1 at a real front, for who may ask whether it is ready."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.clients.oip import SERVICE, GrpcClient, Tensor
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from shoal.agent.clock import SystemClock
from shoal.agent.frames import FrameClient
from shoal.inference import health_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire import grpcio_status

Health = health_pb2.HealthCheckResponse
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
TOKEN = Credential("acme", hashlib.sha256(b"secret").hexdigest(), Wall(4e9))


async def check(client: GrpcClient, service: str = "", method: str = "Check") -> Any:
    return await watch(client, service, method).read()


def watch(client: GrpcClient, service: str = "", method: str = "Watch") -> Any:
    call = client.channel.unary_stream(f"/grpc.health.v1.Health/{method}", None, Health.FromString)
    asked = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return call(asked, metadata=tuple(client.default_metadata.items()), timeout=30)


async def refusal_code(client: GrpcClient, service: str, method: str) -> Code:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await check(client, service, method)
    return grpcio_status.refusal_of(refused.value).code


def clients(node: DataPlaneNode) -> tuple[GrpcClient, GrpcClient]:
    authority = node.files.authority.read_bytes()
    return node.grpc_client(node.authority.issue(Role.TENANT, "acme")), node.token_client(authority, "secret")


async def test_a_front_says_over_grpc_whether_it_serves(node: DataPlaneNode) -> None:
    await node.configure(credentials=(TOKEN,))
    for client in clients(node):
        for service in ("", SERVICE):
            assert (await check(client, service)).status == Health.SERVING
            assert (await check(client, service, "Watch")).status == Health.SERVING
        assert await refusal_code(client, "nothing", "Check") is Code.NOT_FOUND
        assert (await check(client, "nothing", "Watch")).status == Health.SERVICE_UNKNOWN
        await client.close()
    stranger = node.token_client(node.files.authority.read_bytes(), "guess")
    for method in ("Check", "Watch"):
        assert await refusal_code(stranger, "", method) is Code.TOKEN_INVALID
    await stranger.close()


async def test_a60_a_watch_ends_when_its_token_is_revoked(node: DataPlaneNode) -> None:
    await node.configure(credentials=(TOKEN,))
    by_certificate, by_token = clients(node)
    calls = [watch(each) for each in (by_certificate, by_token)]
    for call in calls:
        assert (await call.read()).status == Health.SERVING
    await node.configure()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(calls[1].read(), 1.0)
    assert grpcio_status.refusal_of(ended.value).code is Code.TOKEN_INVALID
    assert (await check(by_certificate)).status == Health.SERVING, "another's rights are as they were"
    for each in (by_certificate, by_token):
        await each.close()


async def test_a_channel_of_the_library_follows_the_health_of_a_front_until_it_ends(node: DataPlaneNode) -> None:
    """Its own client-side health checking: a channel is ready only while `Watch` says SERVING."""
    files = node.authority.issue(Role.TENANT, "acme")
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}}
    credentials = grpc.ssl_channel_credentials(
        files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
    )
    address = f"localhost:{node.front.config.port}"
    options = (("grpc.service_config", json.dumps(config)), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10.0)
        ready = channel.unary_unary(f"/{SERVICE}/ModelReady", None, oip.ModelReadyResponse.FromString)
        assert (await ready(oip.ModelReadyRequest(name="relu").SerializeToString())).ready
    unknown = {**config, "healthCheckConfig": {"serviceName": "nothing"}}
    options = (("grpc.service_config", json.dumps(unknown)), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/{SERVICE}/ModelReady", None, None)(b"", timeout=5.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "it is unhealthy, and nothing is sent"


async def test_who_watches_is_told_that_a_front_drains(node: DataPlaneNode) -> None:
    client = clients(node)[0]
    call = watch(client)
    assert (await call.read()).status == Health.SERVING
    process = node.front._process
    assert process is not None
    control = await FrameClient.connect(node.front.config.socket_path(), process.nonce)
    await control.call("drain")
    assert (await asyncio.wait_for(call.read(), 5.0)).status == Health.NOT_SERVING
    assert (await check(client)).status == Health.NOT_SERVING
    assert (await client.infer("relu", X)).outputs, "it still answers"
    await control.close()
    await client.close()


@pytest.mark.alone
async def test_who_watches_is_told_that_a_front_ends_and_does_not_keep_it(tmp_path: Path) -> None:
    node = DataPlaneNode("n1", Authority(tmp_path / "ca", "west", SystemClock().wall()), tmp_path / "n1")
    await node.start()
    try:
        await node.configure()
        client = clients(node)[0]
        call = watch(client)
        assert (await call.read()).status == Health.SERVING
        told = asyncio.ensure_future(call.read())
        loop = asyncio.get_running_loop()
        start = loop.time()
        await node.front.close(keep=False)
        took_s = loop.time() - start
        assert (await told).status == Health.NOT_SERVING
        assert took_s < node.front.config.drain_s / 2
        await client.close()
    finally:
        await node.stop()
