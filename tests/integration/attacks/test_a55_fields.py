"""A55: one request with millions of empty repeated or nested fields. Over the wire, at a real coordinator, up to the
port's limit, on every method.

The requests come one after another, each from a client that may call the method. CPU time and memory are those of the
coordinator's own process; another client calls all the while. What passes the counts grows only outside the event loop:
a plan of as much YAML as a request holds, by a viewer.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import Descriptor

from harness.attacks.repeated_fields import methods, repeated_fields
from harness.cluster.coordinator import REGION, CoordinatorServer, operator
from harness.report import record
from shoal.coordinator.api.authorise import RULES
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.v1 import artifacts_pb2, enrolment_pb2, link_pb2
from shoal.v1 import operator_pb2 as api
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options

pytestmark = pytest.mark.alone

CPU_S = 0.5
"""Of one request: at the loop; TLS and HTTP/2, which have threads of their own, are counted too."""
TIMES_ITS_BYTES = 4
OTHERS_S = 1.0
SIZE = LINK_BYTES - 64 * 1024
METHODS = {
    method: kind
    for module in (link_pb2, artifacts_pb2, api)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method, kind in methods(service)
}
STRANGERS = dict(each for service in enrolment_pb2.DESCRIPTOR.services_by_name.values() for each in methods(service))
UNKNOWN = b"\x9a\x7d\x00"


class Others:
    """An operator who asks all the while, a process's worth of patience: the longest that it waited."""

    def __init__(self, coordinator: CoordinatorServer) -> None:
        stub = operator(coordinator.link, coordinator.certificate(Role.OPERATOR, "victim"))
        self._ask = partial(asyncio.to_thread, partial(stub.WhoAmI, api.WhoAmIRequest(), timeout=30))
        self.longest_s = 0.0
        self.calls = 0

    async def run(self) -> None:
        while True:
            began = asyncio.get_running_loop().time()
            await self._ask()
            self.longest_s = max(self.longest_s, asyncio.get_running_loop().time() - began)
            self.calls += 1


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def code_of(channel: grpc.aio.Channel, method: str, message: bytes) -> Code:
    """What one message comes to, whatever its method makes of it."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary(method, None, None)(message, timeout=30)
    return refusal_of(error.value).code


def crowds(kind: Descriptor) -> Iterator[tuple[str, bytes]]:
    """Messages of every field that can be crowded, in one submessage and each in its own; of unknown fields too."""
    for each in repeated_fields(kind):
        yield each.path, each.message(SIZE)
        if each.outer and not each.is_packed:
            yield f"{each.path} spread", each.message(SIZE, spread=True)
    yield "unknown", UNKNOWN * (SIZE // len(UNKNOWN))


@pytest.mark.timeout(300)
async def test_a55_crowded_requests_on_every_method(coordinator: CoordinatorServer) -> None:
    assert coordinator.process is not None
    process, others = psutil.Process(coordinator.process.pid), Others(coordinator)
    asking = asyncio.create_task(others.run())
    options = channel_options(LINK_BYTES, server_name=dns_of(REGION, Role.COORDINATOR, "coordinator"))
    channels: dict[Role, grpc.aio.Channel] = {}
    asked, longest_s, grown = 0, 0.0, 0
    for method in METHODS:
        role = sorted(RULES[method])[0]
        if role not in channels:
            files = coordinator.certificate(role, "crowd")
            shown = grpc.ssl_channel_credentials(files.ca_pem, files.key_pem, files.certificate_pem)
            channels[role] = grpc.aio.secure_channel(coordinator.link, shown, options)
        for path, message in crowds(METHODS[method]):
            before_s, before = cpu_s(process), process.memory_info().rss
            code = await code_of(channels[role], method, message)
            assert code is Code.FIELD_TOO_MANY, (method, path)
            took_s = cpu_s(process) - before_s
            assert took_s < CPU_S, (method, path, took_s)
            grown = max(grown, process.memory_info().rss - before)
            longest_s, asked = max(longest_s, took_s), asked + 1
    for each in channels.values():
        await each.close(None)
    asking.cancel()
    assert grown < TIMES_ITS_BYTES * SIZE
    assert others.calls > 100
    assert others.longest_s < OTHERS_S
    record(
        "A55", "P", asked, listener="link", longest_cpu_ms=round(longest_s * 1e3), grown_mib=round(grown / 2**20, 1),
        others_calls=others.calls, others_longest_ms=round(others.longest_s * 1e3),
    )  # fmt: skip


async def test_a55_crowded_requests_of_strangers(coordinator: CoordinatorServer) -> None:
    anonymous = grpc.ssl_channel_credentials(coordinator.certificate(Role.VIEWER, "somebody").ca_pem)
    options = channel_options(LINK_BYTES, server_name=dns_of(REGION, Role.COORDINATOR, "coordinator"))
    async with grpc.aio.secure_channel(coordinator.enrol, anonymous, options) as channel:
        for method in STRANGERS:
            assert await code_of(channel, method, UNKNOWN * 10_000) is Code.FIELD_TOO_MANY, method
    record("A55", "P", len(STRANGERS), listener="enrol")


def yaml_of(size: int) -> list[api.Document]:
    """About `size` bytes of lists of small numbers, in as many texts as one text's own limit asks for."""
    line = "- [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]\n"
    text = "\n".join(("apiVersion: shoal/v1", "kind: Policy", "metadata: {name: a}", "spec:", "")) + line * 220
    return [api.Document(name=f"{number}.yaml", text=text) for number in range(size // len(text))]


async def test_a55_a_plan_of_all_that_a_request_holds_is_computed_beside_the_loop(
    coordinator: CoordinatorServer,
) -> None:
    viewer = operator(coordinator.link, coordinator.certificate(Role.VIEWER, "reader"))
    others = Others(coordinator)
    asking = asyncio.create_task(others.run())
    request = api.PlanRequest(documents=yaml_of(SIZE))
    plan = partial(viewer.Plan, request, timeout=120)
    began = asyncio.get_running_loop().time()
    reply = await asyncio.to_thread(plan)
    took_s = asyncio.get_running_loop().time() - began
    asking.cancel()
    assert any(problem.refusal.code == Code.YAML_TOO_LARGE for problem in reply.problems)
    assert others.calls > 3 * took_s
    assert others.longest_s < OTHERS_S, "somebody else waited for a viewer's plan"
    record("A55", "P", 1, plan_s=round(took_s, 1), others_longest_ms=round(others.longest_s * 1e3))
