"""A52: one tenant's many credentials hold half-sent requests and watches open; another tenant's client does not wait
for them, and finds places."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from harness.clients.http2 import DATA, Http2Connection
from harness.clients.oip import Tensor, infer_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.ingress_admission import GRACE_S, WATCHES, WATCHES_PER_PAYER
from shoal.inference import health_pb2
from shoal.types.assignment import Credential
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

INFER, WATCH = "/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Watch"
LARGE = 10**6
STREAMS = range(1, 2 * 128, 2)
"""Of one connection, half of what it may have."""
TOKENS = [f"{number:040}" for number in range(WATCHES)]
IN_TURN_S = GRACE_S / 2
"""Far below what a slow read has, and far above what a request of a megabyte takes: some 50 ms."""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    """`relu` of tenant `acme`; tenant `crowd` has a thousand credentials."""
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    made = DataPlaneNode("n1", Authority(tmp_path / "ca", "west", SystemClock().wall()), tmp_path / "n1")
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in TOKENS]
    try:
        await made.start()
        await made.load("a1", WorkloadKey("acme", "relu"), model)
        await made.configure(credentials=tuple(Credential("crowd", each, Wall(2.0**40)) for each in digests))
        yield made
    finally:
        await made.stop()


async def connect(node: DataPlaneNode, files: CertificateFiles | None = None) -> Http2Connection:
    context = ssl.create_default_context(cafile=str(node.files.authority))
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return await Http2Connection.connect(f"127.0.0.1:{node.front.config.port}", context, "localhost")


async def test_a52_half_sent_requests_of_one_tenant_delay_no_other(node: DataPlaneNode) -> None:
    crowd = await connect(node)
    for stream, token in zip(STREAMS, TOKENS, strict=False):
        crowd.open_stream(stream, INFER, authorization=f"Bearer {token}")
        crowd.send_message(stream, b"", of=LARGE)
    client = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    asked = infer_request("relu", (Tensor("x", "FP32", (1, 4), bytes(16)),))
    asked.parameters["note"].string_param = "x" * (LARGE // 2)
    sent = asked.SerializeToString()
    await client.ready()
    loop, took = asyncio.get_running_loop(), list[float]()
    for _ in range(20):
        began = loop.time()
        await client.call("ModelInfer", sent)
        took.append(loop.time() - began)
    held = sum(not crowd.is_ended(stream) for stream in STREAMS)
    record("A52", "I", len(took), half_sent=held, victim_longest_ms=round(max(took) * 1e3))
    assert held == len(STREAMS), "the victim does not depend on their end"
    assert max(took) < IN_TURN_S
    await client.close()
    await crowd.close()


async def watch(connection: Http2Connection, tokens: Sequence[str] = ()) -> int:
    """A watch on each stream, under a token each; how many go on once all are answered."""
    for at, stream in enumerate(STREAMS):
        claims = {"authorization": f"Bearer {tokens[at]}"} if tokens else {}
        connection.open_stream(stream, WATCH, **claims)
        connection.send_message(stream, health_pb2.HealthCheckRequest().SerializeToString(), end=True)

    def has_heard() -> bool:
        told = {number for kind, _, number, _ in connection.seen if kind == DATA}
        return all(stream in told or connection.is_ended(stream) for stream in STREAMS)

    await until(has_heard, 60.0, "an answer on each stream")
    return open_watches(connection)


def open_watches(connection: Http2Connection) -> int:
    return sum(not connection.is_ended(stream) for stream in STREAMS)


async def test_a52_watches_of_one_tenant_leave_places_to_others(node: DataPlaneNode) -> None:
    """Each credential has one: none is the credential with most."""
    crowd = [await connect(node) for _ in range(WATCHES // len(STREAMS))]
    for at, each in enumerate(crowd):
        await watch(each, TOKENS[at * len(STREAMS) : (at + 1) * len(STREAMS)])
    assert sum(map(open_watches, crowd)) == WATCHES_PER_PAYER
    victim = await connect(node, node.authority.issue(Role.TENANT, "acme"))
    assert await watch(victim) == len(STREAMS)
    for each in (*crowd, victim):
        await each.close()
