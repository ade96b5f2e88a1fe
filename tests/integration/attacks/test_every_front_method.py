"""A13 to A16 on every method of every service of a front, generated from the descriptors: gRPC with certificates, gRPC
with bearer tokens, REST.

A method that the proto has and this file does not place fails the test. While each attack goes on, another tenant's
client is answered. The control plane: `test_every_method.py`.
"""

import asyncio
import gzip
import hashlib
import json
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np
import psutil
import pytest

from harness.attacks.message_fuzzer import corrupt_message, fill_message
from harness.attacks.repeated_fields import methods
from harness.clients.http2 import Http2Connection
from harness.clients.oip import Response, RestClient, Tensor, infer_request, read_response
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import until
from shoal.agent.dataplane.call_places import STREAMS_PER_CALLER
from shoal.agent.dataplane.ingress_admission import READ_SLOTS_PER_CALLER, SMALL_BYTES
from shoal.agent.dataplane.transport import MAX_MESSAGE
from shoal.inference import health_pb2, open_inference_pb2, reflection_pb2
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import sessions_pb2, witness_pb2
from shoal.wire.grpcio_status import refusal_of

pytestmark = pytest.mark.alone

OF_CLIENTS = (open_inference_pb2, health_pb2, reflection_pb2)
OF_AGENTS = (witness_pb2, sessions_pb2)
"""What fronts call at each other, on the port of certificates alone."""
METHODS: Final = {
    method: kind
    for module in (*OF_CLIENTS, *OF_AGENTS)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method, kind in methods(service)
}
OIP: Final = "/inference.GRPCInferenceService/"
STREAM: Final = OIP + "ModelStreamInfer"
WATCH: Final = "/grpc.health.v1.Health/Watch"
UNREAD: Final = {
    OIP + name
    for name in (
        "ServerLive", "ServerReady", "ServerMetadata", "RepositoryModelLoad", "RepositoryModelUnload",
        "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    )
}  # fmt: skip
"""Their requests say nothing: they are answered by a call's head, and no byte of a message is taken."""
WHOLE: Final = {
    OIP + "ModelInfer", STREAM, "/shoal.v1.Witness/Captured", "/shoal.v1.Witness/Answer", "/shoal.v1.Sessions/Offer",
}  # fmt: skip
"""They bring tensors, or answer with them: up to MAX_MESSAGE. All others are small."""
REST: Final = {
    "ServerLive": ("GET", "/v2/health/live"),
    "ServerReady": ("GET", "/v2/health/ready"),
    "ServerMetadata": ("GET", "/v2"),
    "ModelReady": ("GET", "/v2/models/relu/ready"),
    "ModelMetadata": ("GET", "/v2/models/relu"),
    "ModelConfig": ("GET", "/v2/models/relu/config"),
    "ModelStatistics": ("GET", "/v2/models/relu/stats"),
    "ModelInfer": ("POST", "/v2/models/relu/infer"),
    "RepositoryIndex": ("POST", "/v2/repository/index"),
    "RepositoryModelLoad": ("POST", "/v2/repository/models/relu/load"),
    "RepositoryModelUnload": ("POST", "/v2/repository/models/relu/unload"),
    "SystemSharedMemoryStatus": ("GET", "/v2/systemsharedmemory/status"),
    "SystemSharedMemoryRegister": ("POST", "/v2/systemsharedmemory/region/x/register"),
    "SystemSharedMemoryUnregister": ("POST", "/v2/systemsharedmemory/unregister"),
    "CudaSharedMemoryStatus": ("GET", "/v2/cudasharedmemory/status"),
    "CudaSharedMemoryRegister": ("POST", "/v2/cudasharedmemory/region/x/register"),
    "CudaSharedMemoryUnregister": ("POST", "/v2/cudasharedmemory/unregister"),
}
REST_READ: Final = {
    "ModelInfer": MAX_MESSAGE, "RepositoryIndex": SMALL_BYTES, "SystemSharedMemoryRegister": SMALL_BYTES
}  # fmt: skip
"""Of those, which read a body, and how much."""
X: Final = (Tensor("x", "FP32", (1, 4), bytes(16)),)
BEARER: Final = "correct horse battery staple"
IN_TIME_S: Final = 15.0
"""Ten seconds, and some for a machine that is busy."""
OTHERS_S: Final = 5.0
FUZZED: Final = 24
"""Messages of each method; `tests/fuzz` has its hundred thousand of each kind of message."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One identity at the data port. files: its certificate; None: it sends the bearer token."""

    name: str
    port: int
    authority: Path
    files: CertificateFiles | None
    methods: tuple[str, ...]

    @property
    def metadata(self) -> dict[str, str]:
        return {} if self.files is not None else {"authorization": f"Bearer {BEARER}"}

    def channel(self) -> grpc.aio.Channel:
        files = self.files
        shown = (files.key.read_bytes(), files.certificate.read_bytes()) if files is not None else (None, None)
        options = (
            ("grpc.ssl_target_name_override", "localhost"),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        )
        credentials = grpc.ssl_channel_credentials(self.authority.read_bytes(), *shown)
        return grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials, options)

    async def connect(self) -> Http2Connection:
        context = ssl.create_default_context(cafile=str(self.authority))
        if self.files is not None:
            context.load_cert_chain(self.files.certificate, self.files.key)
        return await Http2Connection.connect(f"127.0.0.1:{self.port}", context, "localhost")


@pytest.fixture
async def serving_node(node: DataPlaneNode, tmp_path: Path) -> DataPlaneNode:
    """With a workload of another tenant, `shop`, and a bearer token of the attacker's."""
    model = next(tmp_path.glob("relu.onnx"))
    await node.load("a2", WorkloadKey("shop", "steady"), model)
    token = Credential("acme", hashlib.sha256(BEARER.encode()).hexdigest(), Wall(4e9))
    await node.configure(credentials=(token,))
    return node


@pytest.fixture
def callers(serving_node: DataPlaneNode) -> tuple[Caller, ...]:
    def of(modules: tuple[Any, ...]) -> tuple[str, ...]:
        services = {each.full_name for module in modules for each in module.DESCRIPTOR.services_by_name.values()}
        return tuple(method for method in METHODS if method.split("/")[1] in services)

    config, authority = serving_node.front.config, serving_node.files.authority
    tenant = serving_node.authority.issue(Role.TENANT, "acme")
    agent = serving_node.authority.issue(Role.AGENT, "n2")
    return (
        Caller("certificate", config.port, authority, tenant, of(OF_CLIENTS)),
        Caller("agent", config.port, authority, agent, of(OF_AGENTS)),
        Caller("token", config.port, authority, None, of(OF_CLIENTS)),
    )


def test_every_method_is_placed() -> None:
    assert METHODS.keys() >= UNREAD | WHOLE
    assert {OIP + name for name in REST} == {method for method in METHODS if method.startswith(OIP)} - {STREAM}, (
        "HTTP/1.1 has no streams; every other method has a path"
    )


@dataclass
class Others:
    """A client of the tenant `shop` that asks all the while."""

    node: DataPlaneNode
    calls: int = 0
    longest_s: float = 0.0
    _asking: asyncio.Task[None] | None = field(default=None)

    async def __aenter__(self) -> "Others":
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._asking is not None
        if kind is None:
            await until(lambda: self.calls >= 5, OTHERS_S, "five calls of the others")
        self._asking.cancel()
        (found,) = await asyncio.gather(self._asking, return_exceptions=True)
        if kind is None:
            assert isinstance(found, asyncio.CancelledError), found
            assert self.longest_s < OTHERS_S

    async def _ask(self) -> None:
        client = self.node.grpc_client(self.node.authority.issue(Role.TENANT, "shop"))
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                await client.infer("steady", X)
                self.calls, self.longest_s = self.calls + 1, max(self.longest_s, loop.time() - began)
                await asyncio.sleep(0.01)  # noqa: TID251 - one client's pace
        finally:
            await client.close()

    @property
    def figures(self) -> dict[str, Any]:
        return {"others_calls": self.calls, "others_longest_ms": round(self.longest_s * 1e3)}


def count_codes(seen: dict[str, int], codes: list[str]) -> None:
    for code in codes:
        seen[code] = seen.get(code, 0) + 1


async def code_of(caller: Caller, channel: grpc.aio.Channel, method: str, message: bytes, **how: Any) -> str:
    """What one message comes to: a code, or `taken`."""
    call = channel.unary_stream(method, None, None)(message, metadata=tuple(caller.metadata.items()), timeout=30, **how)
    try:
        async for _ in call:
            if method == WATCH:
                call.cancel()  # it goes on
                break
        return "taken"
    except grpc.aio.AioRpcError as error:
        return str(refusal_of(error).code)


def messages(method: str, rng: np.random.Generator) -> list[bytes]:
    """Broken ones; half of them were meant for the replica that is there."""
    sent = []
    for number in range(FUZZED):
        made = fill_message(METHODS[method], rng)
        if number % 2 and method.startswith(OIP + "Model") and "Infer" in method:
            made = infer_request("relu", X)
        elif number % 2:
            for name in ("name", "model_name"):
                if name in METHODS[method].fields_by_name:
                    setattr(made, name, "relu")
        sent.append(corrupt_message(made.SerializeToString(), rng))
    return sent


async def test_a13_fuzzed_requests_on_every_method(serving_node: DataPlaneNode, callers: tuple[Caller, ...]) -> None:
    """Every answer has a code, and none is an error of ours."""
    rng, seen = np.random.default_rng(13), dict[str, int]()
    async with Others(serving_node) as others:
        for caller in callers:
            async with caller.channel() as channel:
                for method in caller.methods:
                    sent = (code_of(caller, channel, method, each) for each in messages(method, rng))
                    codes = await asyncio.gather(*sent)
                    unwanted = {Code.INTERNAL, Code.UNAUTHENTICATED, Code.CODE_UNKNOWN}
                    assert unwanted.isdisjoint(codes), (caller.name, method, codes)
                    assert set(codes) <= {*Code, "taken"}, (caller.name, method, codes)
                    count_codes(seen, list(codes))
    record("A13", "P", sum(seen.values()), methods=len(METHODS), answers=seen, **others.figures)


async def test_a14_a_byte_too_many_on_every_method(serving_node: DataPlaneNode, callers: tuple[Caller, ...]) -> None:
    """As it is, and as what a small message expands to."""
    tried = 0
    async with Others(serving_node) as others:
        for caller in callers:
            async with caller.channel() as channel:
                for method in caller.methods:
                    over = bytes((MAX_MESSAGE if method in WHOLE else SMALL_BYTES) + 1)
                    found = await code_of(caller, channel, method, over)
                    squeezed = await code_of(caller, channel, method, over, compression=grpc.Compression.Gzip)
                    if method not in UNREAD:
                        assert found == Code.TOO_LARGE, (caller.name, method)
                        assert squeezed == Code.TOO_LARGE, (caller.name, method)
                    tried += 2
    record("A14", "P", tried, methods=len(METHODS), **others.figures)


async def test_a14_four_gigabytes_declared_on_every_method(
    serving_node: DataPlaneNode, callers: tuple[Caller, ...]
) -> None:
    """Ten bytes of them are sent. What reads nothing answers without them."""
    tried = 0
    async with Others(serving_node) as others:
        for caller in callers:
            connection = await caller.connect()
            streams = dict(zip(range(1, 2 * len(caller.methods), 2), caller.methods, strict=True))
            for stream, method in streams.items():
                connection.open_stream(stream, method, **caller.metadata)
                connection.send_message(stream, b"0123456789", of=2**32 - 1)
            for stream, method in streams.items():
                await until(partial(connection.is_ended, stream), 5, f"{caller.name}: an answer of {method}")
                told = connection.header_blocks(stream)
                assert (method in UNREAD) is (b"TOO_LARGE" not in told), (caller.name, method, told)
            tried += len(streams)
            await connection.close()
    record("A14", "P", tried, methods=len(METHODS), declared="4 GiB", **others.figures)


@pytest.mark.timeout(240)
async def test_a15_a_message_that_never_ends_on_every_method(
    serving_node: DataPlaneNode, callers: tuple[Caller, ...]
) -> None:
    """As many small ones at once as one caller has places. Twice as many for a method that brings tensors: alone it
    would have a minute. A stream may wait for its next message for minutes, and nobody can tell whether that has begun:
    there are few of a caller, and they take nobody's place."""
    loop = asyncio.get_running_loop()
    took: dict[str, float] = {}
    streams_refused = 0

    async def drip(caller: Caller, crowded: tuple[str, ...]) -> None:
        connection = await caller.connect()
        wanted = [(method, 2 * READ_SLOTS_PER_CALLER if method in WHOLE else 1) for method in crowded]
        asked = [method for method, count in wanted for _ in range(count)]
        streams = dict(zip(range(1, 2 * len(asked), 2), asked, strict=True))
        began = loop.time()
        for stream, method in streams.items():
            connection.open_stream(stream, method, **caller.metadata)
            connection.send_message(stream, b"", of=100)
        while left := [stream for stream in streams if not connection.is_ended(stream)]:
            assert loop.time() < began + 2 * IN_TIME_S + 6, sorted({streams[each] for each in left})
            for stream in left:
                connection.send_data(stream, b"x")
            await asyncio.sleep(0.5)  # noqa: TID251 - the pace of the drip
        for stream, method in streams.items():
            told = connection.header_blocks(stream)
            assert method in UNREAD or b"TOO_SLOW" in told or b"OVERLOADED" in told, (caller.name, method, told)
        name = f"{caller.name} {'whole' if crowded[0] in WHOLE else 'small'}"
        took[name] = max(took.get(name, 0.0), loop.time() - began)
        await connection.close()

    async def drip_in_turn(caller: Caller, small: tuple[str, ...]) -> None:
        for start in range(0, len(small), READ_SLOTS_PER_CALLER):
            await drip(caller, small[start : start + READ_SLOTS_PER_CALLER])

    async def hold(caller: Caller) -> None:
        nonlocal streams_refused
        connection = await caller.connect()
        streams = range(1, 4 * STREAMS_PER_CALLER, 2)
        for stream in streams:
            connection.open_stream(stream, STREAM, **caller.metadata)
            connection.send_message(stream, b"", of=100)
        refused = STREAMS_PER_CALLER
        await until(
            lambda: sum(b"OVERLOADED" in connection.header_blocks(each) for each in streams) == refused,
            10,
            "half to be refused",
        )
        streams_refused += refused
        await connection.close()

    async with Others(serving_node) as others:
        for caller in callers:
            if STREAM in caller.methods:
                await hold(caller)
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                small = tuple(each for each in caller.methods if each not in WHOLE)
                whole = tuple(each for each in caller.methods if each in WHOLE and each != STREAM)
                group.create_task(drip_in_turn(caller, small))
                group.create_task(drip(caller, whole))
    assert max(value for name, value in took.items() if name.endswith("small")) < IN_TIME_S, took
    figures = {f"{name.replace(' ', '_')}_s": round(value, 1) for name, value in took.items()}
    record("A15", "P", len(METHODS), methods=len(METHODS), streams_refused=streams_refused, **figures, **others.figures)


async def test_a16_a_connection_for_each_call_of_every_method(
    serving_node: DataPlaneNode, callers: tuple[Caller, ...]
) -> None:
    """Four for each method, each with half a message, and given up."""
    assert serving_node.front.pid is not None
    process, connections = psutil.Process(serving_node.front.pid), 0
    before = process.num_fds()
    async with Others(serving_node) as others:
        for caller in callers:
            for method in caller.methods:
                for _ in range(4):
                    async with caller.channel() as channel:
                        begin: Any = channel.stream_stream(method, None, None)
                        call = begin(metadata=tuple(caller.metadata.items()), timeout=10)
                        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                            await call.write(b"\xff")
                        call.cancel()
                    connections += 1
    await until(lambda: process.num_fds() < before + 20, 15, "descriptors to come back")
    record("A16", "P", connections, methods=len(METHODS), **others.figures)


# -- the same over REST ------------------------------------------------------------------------------------------------


def document() -> bytes:
    """An inference as JSON."""
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, -1, 2.5]}]
    return json.dumps({"id": "one", "inputs": inputs, "parameters": {"binary_data_output": False}}).encode()


async def answer_of(client: RestClient, method: str, path: str, body: bytes, **said: str) -> Response:
    return await client.request(method, path, body, {name.replace("_", "-"): value for name, value in said.items()})


def clients_of(node: DataPlaneNode) -> dict[str, RestClient]:
    return {
        "certificate": node.rest_client(node.authority.issue(Role.TENANT, "acme")),
        "token": node.rest_client(bearer=BEARER),
    }


async def test_a13_fuzzed_bodies_on_every_rest_method(serving_node: DataPlaneNode) -> None:
    rng, seen = np.random.default_rng(13), dict[str, int]()
    async with Others(serving_node) as others:
        for client in clients_of(serving_node).values():
            for name, (method, path) in REST.items():
                for _ in range(FUZZED):
                    body = corrupt_message(document() if name == "ModelInfer" else b'{"ready": true}', rng)
                    answer = await answer_of(client, method, path, body)
                    code = answer.headers.get("shoal-code", "taken")
                    assert code in {*Code, "taken"}, (name, code)
                    assert answer.status != 500, (name, code)
                    assert (code == "taken") is (answer.status < 400), (name, code, answer.status)
                    count_codes(seen, [code])
    record("A13", "P", sum(seen.values()), what="rest", methods=len(REST), answers=seen, **others.figures)


@pytest.mark.timeout(240)
async def test_a14_too_large_on_every_rest_method(serving_node: DataPlaneNode) -> None:
    """A byte too many; what expands to it; 4 GiB that are declared alone. What reads no body answers without it."""
    tried = 0
    async with Others(serving_node) as others:
        for name, (method, path) in REST.items():
            client = clients_of(serving_node)["certificate"]
            most = REST_READ.get(name, SMALL_BYTES)
            plain = client.request_bytes(method, path).replace(
                b"content-length: 0", f"content-length: {most + 1}".encode()
            )
            huge = client.request_bytes(method, path).replace(b"content-length: 0", f"content-length: {2**32}".encode())
            small = await asyncio.to_thread(gzip.compress, b" " * (most + 1), 1)
            squeezed = client.request_bytes(method, path, small, {"content-encoding": "gzip"})
            for sent in (plain, huge, squeezed):
                answer = await client.exchange(sent)
                if name in REST_READ:
                    assert (answer.status, answer.headers["shoal-code"]) == (413, Code.TOO_LARGE), name
                else:
                    assert answer.status != 500, name
                tried += 1
    record("A14", "P", tried, what="rest", methods=len(REST), **others.figures)


async def test_a15_a_body_that_never_ends_on_every_rest_method(serving_node: DataPlaneNode) -> None:
    """All at once. What reads no body has answered before."""
    loop = asyncio.get_running_loop()
    took: dict[str, float] = {}

    async def drip(name: str, method: str, path: str) -> None:
        client = clients_of(serving_node)["certificate"]
        reader, writer = await client.connect()
        began = loop.time()
        writer.write(client.request_bytes(method, path).replace(b"content-length: 0", b"content-length: 100"))
        answered = asyncio.ensure_future(read_response(reader))
        while not (await asyncio.wait([answered], timeout=1.0))[0]:
            assert loop.time() < began + 2 * IN_TIME_S, name
            writer.write(b"x")
        took[name] = loop.time() - began
        answer = await answered
        if name in REST_READ:
            assert (answer.status, answer.headers["shoal-code"]) == (408, Code.TOO_SLOW), name
        writer.close()

    async with Others(serving_node) as others, asyncio.TaskGroup() as group:
        for name, (method, path) in REST.items():
            group.create_task(drip(name, method, path))
    assert max(took.values()) < IN_TIME_S, took
    longest = round(max(took.values()), 1)
    record("A15", "P", len(REST), what="rest", methods=len(REST), longest_s=longest, **others.figures)


async def test_a16_a_connection_for_each_call_of_every_rest_method(serving_node: DataPlaneNode) -> None:
    """Four for each method, each with half a body, and given up."""
    assert serving_node.front.pid is not None
    process, connections = psutil.Process(serving_node.front.pid), 0
    before = process.num_fds()
    async with Others(serving_node) as others:
        for client in clients_of(serving_node).values():
            for method, path in REST.values():
                for _ in range(4):
                    _, writer = await client.connect()
                    head = client.request_bytes(method, path).replace(b"content-length: 0", b"content-length: 100")
                    writer.write(head + b"{")
                    await writer.drain()
                    writer.transport.abort()
                    connections += 1
    await until(lambda: process.num_fds() < before + 20, 15, "descriptors to come back")
    record("A16", "P", connections, what="rest", methods=len(REST), **others.figures)
