"""A55: one request with millions of empty repeated or nested fields. Over the wire, at a real front, known and unknown
fields, on every method that it serves.

The requests are made from the descriptors: every repeated field and every submessage, from a client that may call the
method. One request takes at most half a second of the event loop's CPU time, and memory of at most four times its
bytes. Of a compressed one, the bytes that it expands to count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.attacks.repeated_fields import RepeatedField, methods, repeated_fields
from harness.clients.oip import SERVICE, GrpcClient
from harness.cluster.dataplane_node import DataPlaneNode
from harness.measure.process_usage import Usage
from harness.report import record
from shoal.agent.dataplane.ingress_admission import SMALL_BYTES
from shoal.agent.dataplane.request import LIMITS
from shoal.inference import health_pb2, reflection_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.v1 import sessions_pb2, witness_pb2
from shoal.wire.grpcio_status import refusal_of

pytestmark = pytest.mark.alone

MIB = 2**20
LOOP_S = 0.5
TIMES_ITS_BYTES = 4
FIXED_BYTES = 24 * MIB
"""What a request takes whatever its size: buffers of TLS, arenas of the allocator."""
SIZE = 32 * MIB
UNKNOWN = b"\x9a\x7d\x00"
"""Field 2003, empty, which nobody declared."""
OF_AGENTS = (sessions_pb2, witness_pb2)
METHODS = {
    method: kind
    for module in (oip, health_pb2, reflection_pb2, *OF_AGENTS)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method, kind in methods(service)
}
STREAM = f"/{SERVICE}/ModelStreamInfer"
SMALL = {
    "/shoal.v1.Sessions/Commit",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
} | {
    f"/{SERVICE}/{name}"
    for name in (
        "ModelReady",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
    )
}
"""Methods of requests of at most 16 KiB."""
UNREAD = {
    f"/{SERVICE}/{name}": code
    for name, code in {
        "ServerLive": None,
        "ServerReady": None,
        "ServerMetadata": None,
        "RepositoryModelLoad": Code.UNIMPLEMENTED,
        "RepositoryModelUnload": Code.UNIMPLEMENTED,
        "CudaSharedMemoryStatus": None,
        "CudaSharedMemoryRegister": Code.UNIMPLEMENTED,
        "CudaSharedMemoryUnregister": None,
    }.items()
}
"""Methods whose requests are not read, and what they answer."""


@dataclass(frozen=True, slots=True)
class RepeatedMessage:
    """One message, and the code that it is refused with; None where it is not."""

    method: str
    path: str
    message: bytes
    code: Code | None


def crowds() -> Iterator[RepeatedMessage]:
    for method, kind in METHODS.items():
        for each in repeated_fields(kind):
            for spread in (False, True)[: 2 if each.outer and not each.is_packed else 1]:
                message = each.message(SIZE, spread=spread)
                counted = Code.INVALID_ARGUMENT if is_tensor(each) else Code.FIELD_TOO_MANY
                refused = Code.TOO_LARGE if method in SMALL else UNREAD.get(method, counted)
                yield RepeatedMessage(method, f"{each.path}{' spread' * spread}", message, refused)
        size = SMALL_BYTES if method in SMALL else SIZE
        code = UNREAD.get(method, Code.FIELD_TOO_MANY)
        yield RepeatedMessage(method, "unknown", UNKNOWN * (size // len(UNKNOWN)), code)
        if method in SMALL:
            yield RepeatedMessage(method, "unknown, too large", UNKNOWN * (SIZE // len(UNKNOWN)), Code.TOO_LARGE)


def is_tensor(each: RepeatedField) -> bool:
    """Typed contents of as many elements as there may be: refused only because the request names no model."""
    limit = LIMITS.by_field.get(f"inference.InferTensorContents.{each.path.split('.')[-1].split()[0]}", 0)
    return each.is_packed and SIZE // {0: 1, 1: 8, 5: 4}[each.wire] <= limit


async def code_of(client: GrpcClient, crowd: RepeatedMessage, compression: grpc.Compression) -> str | None:
    """What it is refused with."""
    call: Any = client.channel.unary_stream(crowd.method, None, None)(
        crowd.message, metadata=tuple(client.default_metadata.items()), timeout=60, compression=compression
    )
    try:
        answers = [each async for each in call]
    except grpc.aio.AioRpcError as error:
        return refusal_of(error).code
    if crowd.method != STREAM:
        return None
    (answer,) = answers
    said = oip.ModelStreamInferResponse.FromString(answer).error_message
    return said.rpartition("(")[2].rstrip(")")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "compression",
    [pytest.param(grpc.Compression.NoCompression, marks=pytest.mark.long), grpc.Compression.Gzip],
    ids=["plain", "gzip"],
)
async def test_a55_crowded_requests_on_every_method_of_a_front(
    node: DataPlaneNode, compression: grpc.Compression
) -> None:
    assert node.front.pid is not None
    usage = Usage(node.front.pid)
    tenant = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    agent = node.grpc_client(node.authority.issue(Role.AGENT, "n2"))
    of_agents = tuple(f"/{module.DESCRIPTOR.package}.{name}/" for module in OF_AGENTS
                      for name in module.DESCRIPTOR.services_by_name)  # fmt: skip
    asked, longest_s, most = 0, 0.0, 0.0
    for crowd in crowds():
        client = agent if crowd.method.startswith(of_agents) else tenant
        held, before_s = usage.reset_peak(), usage.loop_s()
        code = await code_of(client, crowd, compression)
        loop_s, grown = usage.loop_s() - before_s, usage.peak() - held
        what = (crowd.method, crowd.path, round(loop_s, 3), round(grown / MIB, 1))
        assert code == crowd.code, what
        assert loop_s < LOOP_S, what
        assert grown < TIMES_ITS_BYTES * len(crowd.message) + FIXED_BYTES, what
        asked, longest_s, most = asked + 1, max(longest_s, loop_s), max(most, grown / MIB)
    await tenant.close()
    await agent.close()
    record(
        "A55", "P", asked, listener="front", methods=len(METHODS), longest_loop_ms=round(longest_s * 1e3),
        most_mib=round(most, 1),
    )  # fmt: skip
