"""What every transport of the data plane does, whatever it is made of: one suite over each way in."""

import asyncio
import gc
import json
import logging
import ssl
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import pytest

from harness.clients.http2 import Http2Connection
from harness.clients.http2_rest import Http2RestClient
from harness.clients.oip import GrpcClient, InferenceError, OipClient, RestClient, Tensor, infer_request, read_response
from harness.crypto.pki import Authority, CertificateFiles
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane import exchange, http1, reflection, rest
from shoal.agent.dataplane import ingress_admission as intake_module
from shoal.agent.dataplane.data_port import DataPort
from shoal.agent.dataplane.grpc_methods import SERVICE
from shoal.agent.dataplane.grpc_reference import GrpcioTransport
from shoal.agent.dataplane.ingress_admission import SMALL_BYTES, IngressAdmission
from shoal.agent.dataplane.log_budget import LINES
from shoal.agent.dataplane.memory import COPIES, MessageMemory
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.tenant_admission import TenantAdmission
from shoal.agent.dataplane.transport import MAX_MESSAGE, CallRefused, InboundCall, TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.inference import health_pb2, reflection_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Elapsed, PerSecond, Seconds
from shoal.wire import grpcio_status, status

REGION = "west"
GRPC = pytest.mark.parametrize("case", ["grpc", "grpc-token", "direct", "grpcio", "grpcio-token"], indirect=True)
GRPC_WITH_CERTIFICATE = pytest.mark.parametrize("case", ["grpc", "direct", "grpcio"], indirect=True)


class Echo:
    """A service that answers inputs as outputs and notes each call; `deny` and `hold` change what it does."""

    def __init__(self) -> None:
        self.calls: list[InboundCall] = []
        self.requests: list[oip.ModelInferRequest] = []
        self.regions: dict[str, oip.SystemSharedMemoryRegisterRequest] = {}
        self.admitted = 0
        self.deny: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.hold_metadata: asyncio.Event | None = None
        self.inside = 0
        self.cancelled = 0
        self.is_ready = True
        self.is_direct = False
        self.paced: list[Code] = []
        self.change = asyncio.Event()
        self.tenants = TenantAdmission(SystemClock(), RequestMeter())

    def become(self, *, is_ready: bool) -> None:
        self.is_ready = is_ready
        self.change.set()
        self.change = asyncio.Event()

    def _see(self, call: InboundCall) -> None:
        self.calls.append(call)
        if self.deny is not None:
            raise self.deny

    def live(self) -> bool:
        return True

    def authenticate(self, call: InboundCall) -> None:
        self._see(call)

    def admit(self, call: InboundCall) -> str:
        self.admitted += 1
        self._see(call)
        self.tenants.check("acme")
        return "acme"

    async def pace(self, call: InboundCall, error: ShoalError) -> None:
        self.paced.append(error.code)

    def payer_of(self, call: InboundCall) -> str | None:
        gate = self.tenants.gate("acme")
        is_open = self.is_direct and self.deny is None and (gate is None or gate.is_open(Elapsed(0.0)))
        return "acme" if is_open else None

    def tenant_of(self, call: InboundCall) -> str:
        self._see(call)
        return "acme"

    def server_ready(self, call: InboundCall) -> bool:
        self._see(call)
        return self.is_ready

    def server_metadata(self, call: InboundCall) -> oip.ServerMetadataResponse:
        self._see(call)
        return oip.ServerMetadataResponse(name="shoal", version="2", extensions=["binary_tensor_data"])

    def index(self, call: InboundCall, *, ready_only: bool) -> oip.RepositoryIndexResponse:
        self._see(call)
        found = oip.RepositoryIndexResponse()
        found.models.add(name="up", version="1", state="READY")
        if not ready_only:
            found.models.add(name="down", version="1", state="UNAVAILABLE", reason="no replica")
        return found

    async def model_ready(self, call: InboundCall, name: str, version: str) -> bool:
        self._see(call)
        if name not in ("up", "down"):
            raise refuse(Code.MODEL_NOT_FOUND, f"no workload {name!r}")
        return name == "up"

    async def model_metadata(self, call: InboundCall, name: str, version: str) -> oip.ModelMetadataResponse:
        self._see(call)
        if self.hold_metadata is not None:
            await self.hold_metadata.wait()
        shown = oip.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP32", shape=[-1, 3])
        return oip.ModelMetadataResponse(
            name=name, versions=["1"], platform="onnx_onnxv1", inputs=[shown], outputs=[shown]
        )

    async def model_config(self, call: InboundCall, name: str, version: str) -> oip.ModelConfigResponse:
        self._see(call)
        config = oip.ModelConfig(name=name, platform="onnxruntime_onnx", backend="onnxruntime")
        config.input.add(name="x", data_type=oip.TYPE_FP32, dims=[-1, 3])
        config.output.add(name="y", data_type=oip.TYPE_STRING, dims=[-1])
        return oip.ModelConfigResponse(config=config)

    async def statistics(self, call: InboundCall, name: str, version: str) -> oip.ModelStatisticsResponse:
        self._see(call)
        found = oip.ModelStatisticsResponse()
        for each in [name] if name else ["up", "down"]:
            stats = found.model_stats.add(name=each, version="1", inference_count=3, execution_count=3)
            stats.inference_stats.success.count = 3
            stats.inference_stats.success.ns = 5
            stats.inference_stats.fail.count = 0
        return found

    def prepare_direct(
        self, call: InboundCall, remaining_s: float | None, memo: dict[str, object], request: bytes
    ) -> "DirectEcho | None":
        gate = self.tenants.gate("acme")
        if not self.is_direct or self.deny is not None or (gate is not None and not gate.is_open(Elapsed(0.0))):
            return None
        left = None if remaining_s is None else Seconds(remaining_s)
        return DirectEcho(self, replace(call, remaining_s=left), request)

    def shared_memory_status(self, call: InboundCall, name: str) -> oip.SystemSharedMemoryStatusResponse:
        self._see(call)
        found = oip.SystemSharedMemoryStatusResponse()
        for each in [name] if name else self.regions:
            said = self.regions[each]
            shown = found.regions[each]
            shown.name, shown.key, shown.offset, shown.byte_size = said.name, said.key, said.offset, said.byte_size
        return found

    def register_shared_memory(self, call: InboundCall, asked: oip.SystemSharedMemoryRegisterRequest) -> None:
        self._see(call)
        self.regions[asked.name] = asked

    def unregister_shared_memory(self, call: InboundCall, name: str) -> None:
        self._see(call)
        for each in [name] if name else list(self.regions):
            self.regions.pop(each, None)

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        self._see(call)
        gate = self.tenants.enter("acme")
        try:
            return await self._answer(request)
        finally:
            if gate is not None:
                gate.leave(Seconds(0.01))

    async def _answer(self, request: bytes) -> bytes:
        message = oip.ModelInferRequest.FromString(request)
        self.requests.append(message)
        self.inside += 1
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        return oip.ModelInferResponse(
            model_name=message.model_name,
            id=message.id,
            outputs=[
                oip.ModelInferResponse.InferOutputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
                for t in message.inputs
            ],
            raw_output_contents=message.raw_input_contents,
        ).SerializeToString()


class DirectEcho:
    """A request of `Echo` that its transport does not wait for."""

    payer = "acme"

    def __init__(self, service: Echo, call: InboundCall, request: bytes) -> None:
        self._service = service
        self._call = call
        self._request = request
        self._task: asyncio.Task[None] | None = None

    def begin(self, on_end: Callable[[bytes | None, Exception | None], None]) -> bool:
        self._service.admitted += 1
        self._task = asyncio.create_task(self._run(on_end))
        return True

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, on_end: Callable[[bytes | None, Exception | None], None]) -> None:
        try:
            async with asyncio.timeout(self._call.remaining_s):
                answer = await self._service.infer(self._call, self._request)
        except TimeoutError:
            on_end(None, refuse(Code.DEADLINE_EXCEEDED, "no answer by the deadline"))
        except Exception as error:
            on_end(None, error)
        else:
            on_end(answer, None)


@dataclass
class TransportCase:
    """One transport, and how a client of it looks. sure: its client shows a certificate."""

    name: str
    has_client_certificate: bool
    service: Echo
    transport: DataPort | GrpcioTransport
    authority: Authority
    own: CertificateFiles
    memory: MessageMemory
    tls: TlsFiles
    port: int = 0
    clients: list[OipClient] = field(default_factory=list)

    def client(self, files: CertificateFiles | None = None, bearer: str = "secret") -> OipClient:
        root = self.authority.certificate.read_bytes()
        if self.has_client_certificate:
            files, bearer = files or self.own, ""
        made: OipClient
        if self.name == "rest2":
            made = Http2RestClient(self.port, root, files, bearer)
        elif self.name == "rest":
            made = RestClient(self.port, root, files, bearer)
        else:
            made = GrpcClient(self.port, root, files, bearer)
        self.clients.append(made)
        return made

    def admission(self) -> IngressAdmission:
        return self.transport.admission

    def unread_bytes(self) -> int:
        """Bytes of answers that all callers have not read yet."""
        return sum(each.unread_bytes for each in self.admission().places.usage.values())

    def is_inside(self) -> bool:
        """Whether a call is inside."""
        return self.transport.is_busy

    def status_of(self, code: Code) -> str | int:
        return status.http_status(code) if self.name.startswith("rest") else status.grpc_status(code).name


def no_peer_authorities(region: str, tls: TlsFiles) -> Authorities:
    """That there is no other region."""
    authorities = Authorities(region, tls)
    authorities.configure(())
    return authorities


WAYS = (
    "grpc",
    "grpc-token",
    "direct",
    "direct-token",
    "grpcio",
    "grpcio-token",
    "rest",
    "rest-token",
    "rest2",
    "rest2-token",
)


@pytest.fixture(params=WAYS)
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TransportCase]:
    authority = Authority(tmp_path, REGION, SystemClock().wall())
    node = authority.issue(Role.AGENT, "n1")
    tls = TlsFiles(node.certificate, node.key, node.authority)
    service = Echo()
    name, _, kind = str(request.param).partition("-")
    service.is_direct = name == "direct"
    transport: DataPort | GrpcioTransport
    memory = MessageMemory()
    authorities = no_peer_authorities(REGION, tls)
    if name == "grpcio":
        transport = GrpcioTransport(service, "127.0.0.1", 0, tls, None if kind else authorities, memory=memory)
    else:
        transport = DataPort(service, "127.0.0.1", 0, tls, authorities, memory=memory)
    own = authority.issue(Role.TENANT, "acme")
    found = TransportCase(name, not kind, service, transport, authority, own, memory, tls)
    found.port = await transport.start()
    yield found
    for client in found.clients:
        await client.close()
    await transport.stop(Seconds(0.0))


TENSORS = (
    Tensor("a", "FP32", (2, 2), struct.pack("<4f", 0.1, float("nan"), float("-inf"), -0.0)),
    Tensor("b", "BF16", (3,), b"\x01\x02\x03\x04\x05\x06"),
    Tensor("c", "BYTES", (2,), struct.pack("<I", 2) + b"\xff\xfe" + struct.pack("<I", 0)),
    Tensor("d", "INT64", (0, 7), b""),
    Tensor("e", "BOOL", (), b"\x01"),
)


async def test_tensors_pass_bit_for_bit(case: TransportCase) -> None:
    answer = await case.client().infer("up", TENSORS, request_id="r-1")
    assert (answer.model, answer.id, answer.outputs) == ("up", "r-1", TENSORS)
    assert case.service.requests[0].model_name == "up"


async def test_who_calls_is_told(case: TransportCase) -> None:
    said = {"shoal-tenant": "acme", "shoal-origin": "edge-1", "shoal-hop": "1", "shoal-request-id": "q7"}
    said["traceparent"] = trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await case.client().infer("up", TENSORS[:1], extra_metadata=said)
    call = case.service.calls[-1]
    assert (call.tenant, call.origin, call.hop, call.request_id) == ("acme", "edge-1", 1, "q7")
    assert call.trace == trace
    assert not call.suspect
    if case.has_client_certificate:
        assert call.identity is not None
        assert (call.identity.uri, call.bearer) == ("shoal://west/tenant/acme", "")
    else:
        assert (call.identity, call.bearer) == (None, "secret")
    with pytest.raises(InferenceError) as wrong:
        await case.client().infer("up", TENSORS[:1], extra_metadata={"shoal-hop": "2"})
    assert wrong.value.code == Code.INVALID_ARGUMENT


async def test_live_needs_nobody(case: TransportCase) -> None:
    case.service.deny = refuse(Code.UNAUTHENTICATED)
    assert await case.client(bearer="").live()
    with pytest.raises(InferenceError) as ready:
        await case.client(bearer="").ready()
    assert (ready.value.status, ready.value.code) == (case.status_of(Code.UNAUTHENTICATED), Code.UNAUTHENTICATED)


CONTROLS = (
    ("TraceSetting", "POST", "trace/setting"),
    ("TraceSetting", "GET", "models/up/trace/setting"),
    ("LogSettings", "POST", "logging"),
    ("CudaSharedMemoryRegister", "POST", "cudasharedmemory/region/x/register"),
)
"""What Triton lets its clients do to a server: method, and the same over REST. What it lets them read of their own
models is served."""


@pytest.mark.parametrize(("method", "verb", "path"), CONTROLS)
async def test_a45_nothing_but_inference_is_on_the_data_port(
    case: TransportCase, method: str, verb: str, path: str
) -> None:
    client = case.client()
    asked: Awaitable[object]
    if isinstance(client, RestClient):
        asked = client.checked_request(verb, f"/v2/{path}", b"{}")
    else:
        assert isinstance(client, GrpcClient)
        asked = client.call(method, b"")
    with pytest.raises(InferenceError) as refused:
        await asked
    assert refused.value.status in (404, 501, "UNIMPLEMENTED"), refused.value
    assert refused.value.code in (Code.NOT_FOUND, Code.UNIMPLEMENTED)
    assert not case.service.requests
    assert await client.ready()


Region = oip.SystemSharedMemoryRegisterRequest
REGIONS = (Region(name="a b", key="/k", offset=2**40, byte_size=7), Region(name="z/\u00e9", key="k2", byte_size=1))


async def register(client: OipClient, region: oip.SystemSharedMemoryRegisterRequest) -> None:
    if isinstance(client, RestClient):
        body = json.dumps({"key": region.key, "offset": region.offset, "byte_size": region.byte_size}).encode()
        path = f"/v2/systemsharedmemory/region/{quote(region.name, safe='')}/register"
        assert (await client.checked_request("POST", path, body)).body == b""
    else:
        assert isinstance(client, GrpcClient)
        assert await client.call("SystemSharedMemoryRegister", region.SerializeToString()) == b""


async def regions_of(client: OipClient, name: str = "") -> dict[str, tuple[str, int, int]]:
    if isinstance(client, RestClient):
        path = f"region/{quote(name, safe='')}/status" if name else "status"
        rows = (await client.checked_request("GET", f"/v2/systemsharedmemory/{path}")).json()
        return {row["name"]: (row["key"], row["offset"], row["byte_size"]) for row in rows}
    assert isinstance(client, GrpcClient)
    request = oip.SystemSharedMemoryStatusRequest(name=name).SerializeToString()
    said = oip.SystemSharedMemoryStatusResponse.FromString(await client.call("SystemSharedMemoryStatus", request))
    return {name: (each.key, each.offset, each.byte_size) for name, each in said.regions.items()}


async def unregister(client: OipClient, name: str = "") -> None:
    if isinstance(client, RestClient):
        path = f"region/{quote(name, safe='')}/unregister" if name else "unregister"
        await client.checked_request("POST", f"/v2/systemsharedmemory/{path}")
    else:
        assert isinstance(client, GrpcClient)
        request = oip.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString()
        await client.call("SystemSharedMemoryUnregister", request)


async def test_regions_of_shared_memory_are_registered_and_shown(case: TransportCase) -> None:
    client = case.client()
    for each in REGIONS:
        await register(client, each)
    assert list(case.service.regions.values()) == list(REGIONS)
    shown = {each.name: (each.key, each.offset, each.byte_size) for each in REGIONS}
    assert await regions_of(client) == shown
    assert await regions_of(client, "a b") == {"a b": shown["a b"]}
    await unregister(client, "a b")
    assert await regions_of(client) == {"z/\u00e9": ("k2", 0, 1)}
    await unregister(client)
    assert await regions_of(client) == {}
    case.service.deny = refuse(Code.SHM_DENIED, "not here")
    for refused in (register(client, REGIONS[0]), regions_of(client), unregister(client)):
        with pytest.raises(InferenceError) as denied:
            await refused
        assert (denied.value.status, denied.value.code) == (case.status_of(Code.SHM_DENIED), Code.SHM_DENIED)


async def test_there_is_no_shared_memory_of_cuda_and_its_absence_is_told(case: TransportCase) -> None:
    """Triton's own clients first unregister all regions of both kinds."""
    client = case.client()
    if isinstance(client, RestClient):
        assert (await client.checked_request("GET", "/v2/cudasharedmemory/status")).json() == []
        await client.checked_request("POST", "/v2/cudasharedmemory/unregister")
        return
    assert isinstance(client, GrpcClient)
    assert await client.call("CudaSharedMemoryStatus", b"") == await client.call("CudaSharedMemoryUnregister", b"")


@pytest.mark.parametrize("case", ["rest", "rest2"], indirect=True)
@pytest.mark.parametrize(
    "document",
    [
        {}, {"key": 7}, {"key": "k", "byte_size": -1}, {"key": "k", "offset": True}, {"key": "k", "offset": 0.5},
        {"key": "k", "byte_size": 2**64}, {"key": "\ud800"}, [], "k",
    ],
)  # fmt: skip
async def test_a_region_in_json_is_checked(case: TransportCase, document: object) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    with pytest.raises(InferenceError) as refused:
        await client.checked_request("POST", "/v2/systemsharedmemory/region/x/register", json.dumps(document).encode())
    assert (refused.value.status, refused.value.code) == (400, Code.INVALID_ARGUMENT)
    assert not case.service.regions


CONFIG = {
    "name": "up",
    "platform": "onnxruntime_onnx",
    "backend": "onnxruntime",
    "max_batch_size": 0,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3]}],
    "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [-1]}],
}


async def test_models_are_described_and_counted_as_triton_does(case: TransportCase) -> None:
    client = case.client()
    if isinstance(client, RestClient):
        for path in ("models/up/config", "models/up/versions/1/config"):
            assert (await client.checked_request("GET", f"/v2/{path}")).json() == CONFIG
        paths = {"models/up/stats": ["up"], "models/up/versions/1/stats": ["up"], "models/stats": ["up", "down"]}
        for path, names in paths.items():
            rows = (await client.checked_request("GET", f"/v2/{path}")).json()["model_stats"]
            assert [row["name"] for row in rows] == names
            assert rows[0]["inference_stats"] == {"success": {"count": 3, "ns": 5}, "fail": {"count": 0, "ns": 0}}
            assert (rows[0]["inference_count"], rows[0]["batch_stats"]) == (3, [])
    else:
        assert isinstance(client, GrpcClient)
        asked = oip.ModelConfigRequest(name="up").SerializeToString()
        config = oip.ModelConfigResponse.FromString(await client.call("ModelConfig", asked)).config
        assert (config.name, config.input[0].data_type, list(config.output[0].dims)) == ("up", oip.TYPE_FP32, [-1])
        for name, names in (("up", ["up"]), ("", ["up", "down"])):
            asked = oip.ModelStatisticsRequest(name=name).SerializeToString()
            said = oip.ModelStatisticsResponse.FromString(await client.call("ModelStatistics", asked))
            assert [row.name for row in said.model_stats] == names
            assert said.model_stats[0].inference_stats.success.ns == 5
    case.service.deny = refuse(Code.UNAUTHENTICATED)
    with pytest.raises(InferenceError) as refused:
        await (
            client.checked_request("GET", "/v2/models/up/stats")
            if isinstance(client, RestClient)
            else client.call("ModelStatistics", b"")
        )
    assert refused.value.code == Code.UNAUTHENTICATED


async def test_a_model_that_there_is_not_is_not_ready(case: TransportCase) -> None:
    """Clients take an error for a failure of the server."""
    client = case.client()
    assert not await client.model_ready("nothing")
    if isinstance(client, RestClient):
        response = await client.request("GET", "/v2/models/nothing/ready")
        assert (response.status, response.json()["code"]) == (404, Code.MODEL_NOT_FOUND)


async def test_a24_names_of_requests_are_short_and_printable(case: TransportCase) -> None:
    client = case.client()
    names = ["q" * 129, "\x7f", "a\tb"] if isinstance(client, RestClient) else ["q" * 129]  # grpc sends no others
    for name in names:
        with pytest.raises(InferenceError) as refused:
            await client.infer("up", TENSORS[:1], extra_metadata={"shoal-request-id": name})
        assert (refused.value.status, refused.value.code) == (
            case.status_of(Code.INVALID_ARGUMENT),
            Code.INVALID_ARGUMENT,
        )
    assert not case.service.requests


async def test_small_calls(case: TransportCase) -> None:
    client = case.client()
    assert await client.ready()
    assert await client.model_ready("up")
    assert not await client.model_ready("down")
    assert await client.server() == {"name": "shoal", "version": "2", "extensions": ["binary_tensor_data"]}
    shown = [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert await client.model("up") == {
        "name": "up",
        "versions": ["1"],
        "platform": "onnx_onnxv1",
        "inputs": shown,
        "outputs": shown,
    }
    assert [row["name"] for row in await client.index()] == ["up", "down"]
    assert await client.index(ready=True) == [{"name": "up", "version": "1", "state": "READY", "reason": ""}]
    with pytest.raises(InferenceError) as load:
        await client.load("up")
    assert (load.value.status, load.value.code) == (case.status_of(Code.UNIMPLEMENTED), Code.UNIMPLEMENTED)


@pytest.mark.parametrize(
    "code",
    [
        Code.INVALID_ARGUMENT,
        Code.MODEL_NOT_FOUND,
        Code.TOO_LARGE,
        Code.OVERLOADED,
        Code.MODEL_NOT_READY,
        Code.DEADLINE_EXCEEDED,
        Code.CERT_EXPIRED,
        Code.TENANT_DENIED,
        Code.REQUEST_CRASHED_WORKER,
    ],
)
async def test_refusals_keep_their_code(case: TransportCase, code: Code) -> None:
    case.service.deny = CallRefused(Refusal(code, "found this", "asked that", "do so"), Seconds(0.25))
    client = case.client()
    for call in (lambda: client.infer("up", TENSORS[:1]), client.ready, lambda: client.model("up")):
        attempt: Callable[[], Awaitable[object]] = call
        with pytest.raises(InferenceError) as failed:
            await attempt()
        seen = failed.value
        assert (seen.status, seen.code, seen.retry_after_ms) == (case.status_of(code), code, "250")
        assert "found this" in str(seen)
        assert "do so" in str(seen)


async def test_a_tenant_over_its_rate_is_told_when_to_retry_and_nothing_of_its_body_is_taken(
    case: TransportCase,
) -> None:
    case.service.tenants.configure([TenantLimit("acme", rate=PerSecond(0.01))])
    huge = Tensor("x", "UINT8", (8 * 2**20,), bytes(8 * 2**20))
    with pytest.raises(InferenceError) as refused:
        await case.client().infer("up", (huge,))
    assert refused.value.status in (429, "RESOURCE_EXHAUSTED")
    assert (refused.value.status, refused.value.code) == (case.status_of(Code.TENANT_RATE), Code.TENANT_RATE)
    assert 90_000 < int(refused.value.retry_after_ms) <= 100_000, "the bucket of a front that starts is empty"
    assert not case.service.requests
    assert await case.client().ready(), "only requests are limited"
    assert case.service.tenants.uses() == (TenantUse("acme", over_rate=1),)
    assert case.service.paced == [Code.TENANT_RATE]


async def test_calls_of_a_tenant_over_its_rate_are_counted_together(case: TransportCase) -> None:
    """Those of every method: with more credentials a tenant gets no more of them."""
    case.admission().places.most_per_payer = 2
    case.service.tenants.configure([TenantLimit("acme", rate=PerSecond(0.01))])
    case.service.hold_metadata = asyncio.Event()
    held = [asyncio.create_task(case.client(bearer=f"secret-{number}").model("up")) for number in range(2)]
    await until(lambda: case.admission().places.by_payer.get("acme") == 2, 5.0, "two calls inside")
    with pytest.raises(InferenceError, match="2 calls of this tenant") as refused:
        await case.client(bearer="secret-3").model("up")
    assert (refused.value.code, refused.value.retry_after_ms) == (Code.OVERLOADED, "1000")
    case.service.hold_metadata.set()
    await asyncio.gather(*held)
    await until(lambda: not case.admission().places.usage, 5.0, "all to leave")
    assert await case.client(bearer="secret-3").model("up")


async def test_a_front_is_ready_for_a_caller_that_has_all_its_calls_inside(case: TransportCase) -> None:
    case.admission().places.most_per_caller = 1
    case.service.hold = asyncio.Event()
    client = case.client()
    held = asyncio.create_task(client.infer("up", TENSORS[:1]))
    await until(lambda: case.service.inside == 1, 5.0, "a request inside")
    asked = case.client()
    assert await asked.ready()
    assert (await asked.server())["name"] == "shoal"
    if isinstance(asked, RestClient):
        assert await asked.model_ready("up")
    with pytest.raises(InferenceError, match="1 calls of this caller"):
        await asked.model("up")
    case.service.become(is_ready=False)
    assert not await asked.ready()
    case.service.hold.set()
    await held


async def test_a_tenant_with_too_many_inside_is_refused_until_one_ends(case: TransportCase) -> None:
    case.service.tenants.configure([TenantLimit("acme", concurrency=1)])
    case.service.hold = asyncio.Event()
    first = asyncio.create_task(case.client().infer("up", TENSORS[:1]))
    await until(lambda: case.service.inside == 1, 5, "inside")
    client = case.client()
    with pytest.raises(InferenceError) as refused:
        await client.infer("up", TENSORS[:1])
    assert refused.value.status in (429, "RESOURCE_EXHAUSTED")
    assert (refused.value.status, refused.value.code) == (
        case.status_of(Code.TENANT_CONCURRENCY),
        Code.TENANT_CONCURRENCY,
    )
    assert refused.value.retry_after_ms
    case.service.hold.set()
    await first
    assert (await client.infer("up", TENSORS[:1])).outputs == TENSORS[:1]


@GRPC
async def test_each_request_of_a_stream_is_charged(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, GrpcClient)
    case.service.tenants.configure([TenantLimit("acme", concurrency=1)])
    stream = client.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
    call: Any = stream(None, metadata=tuple(client.default_metadata.items()))
    for number in (1, 2):
        await call.write(infer_request("up", TENSORS[:1], "").SerializeToString())
        assert not oip.ModelStreamInferResponse.FromString(await call.read()).error_message
        assert case.service.tenants.uses()[0].admitted == number
    case.service.tenants.configure([TenantLimit("acme", concurrency=0)])
    await call.write(infer_request("up", TENSORS[:1], "").SerializeToString())
    assert Code.TENANT_CONCURRENCY in oip.ModelStreamInferResponse.FromString(await call.read()).error_message
    call.cancel()


async def test_our_own_failure_is_internal_and_tells_nothing(case: TransportCase) -> None:
    case.service.deny = RuntimeError("a secret path")
    client = case.client()
    with pytest.raises(InferenceError) as failed:
        await client.infer("up", TENSORS[:1])
    assert failed.value.code == Code.INTERNAL
    assert "secret" not in str(failed.value)
    case.service.deny = None
    assert (await client.infer("up", TENSORS[:1])).outputs == TENSORS[:1]


@pytest.mark.parametrize("case", ["grpc-token", "grpcio-token", "rest-token"], indirect=True)
async def test_where_anybody_may_connect_the_caller_is_judged_before_the_body(case: TransportCase) -> None:
    """Of a stranger's request not even the size matters: nothing of it is taken."""
    case.service.deny = CallRefused(Refusal(Code.TOKEN_INVALID, "a token nobody was given", "a token", "make one"))
    huge = Tensor("x", "UINT8", (MAX_MESSAGE + 1,), bytes(MAX_MESSAGE + 1))
    with pytest.raises(InferenceError) as refused:
        await case.client().infer("up", (huge,), timeout=20)
    assert refused.value.code == Code.TOKEN_INVALID


async def test_too_large_never_reaches_the_service(case: TransportCase) -> None:
    huge = Tensor("x", "UINT8", (MAX_MESSAGE + 1,), bytes(MAX_MESSAGE + 1))
    with pytest.raises(InferenceError) as failed:
        await case.client().infer("up", (huge,))
    assert failed.value.status == case.status_of(Code.TOO_LARGE)
    assert not case.service.requests


async def test_a_caller_that_hangs_up_cancels_its_call(case: TransportCase) -> None:
    case.service.hold = asyncio.Event()
    task = asyncio.create_task(case.client().infer("up", TENSORS[:1]))
    await until(lambda: case.service.inside == 1, 5, "inside")
    task.cancel()
    await until(lambda: case.service.cancelled == 1, 5, "cancelled at the service")
    await until(lambda: not case.memory.held_bytes, 5, "nothing is charged for it any more")


async def test_stopping_lets_calls_end_and_takes_no_new(case: TransportCase) -> None:
    case.service.hold = asyncio.Event()
    client = case.client()
    task = asyncio.create_task(client.infer("up", TENSORS[:1]))
    await until(lambda: case.service.inside == 1, 5, "inside")
    stopping = asyncio.create_task(case.transport.stop(Seconds(10.0)))

    async def is_refused() -> bool:
        try:
            await case.client().infer("up", TENSORS[:1], timeout=0.5)
        except (InferenceError, OSError, EOFError, TimeoutError):
            return True
        return False

    await until(is_refused, 5, "no new call is taken")
    assert not stopping.done()
    case.service.hold.set()
    assert (await task).outputs == TENSORS[:1]
    await stopping


@pytest.mark.parametrize("case", ["grpc", "grpc-token", "grpcio", "rest", "rest-token", "rest2"], indirect=True)
async def test_strangers_are_shut_out(case: TransportCase, tmp_path: Path) -> None:
    """A certificate of another authority ends the handshake, also where none is needed."""
    other = Authority(tmp_path / "other", REGION, SystemClock().wall())
    case.has_client_certificate = False
    client = case.client(other.issue(Role.TENANT, "acme"))
    with pytest.raises((InferenceError, OSError, EOFError)):
        await client.infer("up", TENSORS[:1], timeout=3)
    assert not case.service.calls


async def test_renewed_files_count_from_the_next_connection(case: TransportCase) -> None:
    old = case.client()
    assert await old.ready()
    fresh = Authority(case.authority.folder / "fresh", REGION, SystemClock().wall())
    node = fresh.issue(Role.AGENT, "n1")
    tls = case.tls
    for now, then in (
        (node.key, tls.key),
        (node.certificate, tls.certificate),
        (node.authority, tls.authority),
    ):
        then.write_bytes(now.read_bytes())
    case.authority = fresh
    case.own = fresh.issue(Role.TENANT, "acme")
    assert await case.client().ready()
    if isinstance(old, GrpcClient):
        assert await old.ready()  # its connection stands


# gRPC alone


@GRPC_WITH_CERTIFICATE
async def test_grpc_deadlines_arrive(case: TransportCase) -> None:
    await case.client().infer("up", TENSORS[:1], timeout=7)
    left = case.service.calls[-1].remaining_s
    assert left is not None
    assert 5 < left <= 7
    client = case.client()
    assert isinstance(client, GrpcClient)
    await client.call("ModelInfer", infer_request("up", TENSORS[:1]).SerializeToString(), timeout=None)
    assert case.service.calls[-1].remaining_s is None


@GRPC_WITH_CERTIFICATE
async def test_grpc_stream_answers_in_order_and_goes_on_after_a_refusal(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, GrpcClient)
    call: Any = client.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)(None)
    for number in range(5):
        case.service.deny = refuse(Code.INVALID_ARGUMENT, "not this one") if number == 2 else None
        await call.write(infer_request("up", TENSORS, str(number)).SerializeToString())
        said = oip.ModelStreamInferResponse.FromString(await call.read())
        if number == 2:
            assert "not this one" in said.error_message
        else:
            assert (said.infer_response.id, list(said.infer_response.raw_output_contents)) == (
                str(number),
                [t.raw for t in TENSORS],
            )
    await call.done_writing()
    assert not await call.read()


@GRPC
async def test_a14_grpc_compressed_messages_are_measured_once_expanded(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, GrpcClient)
    request = infer_request("up", TENSORS, "r-1").SerializeToString()
    answer = await client.call("ModelInfer", request, compression=grpc.Compression.Gzip)
    assert oip.ModelInferResponse.FromString(answer).id == "r-1"
    asked = oip.ModelReadyRequest(name="up").SerializeToString()
    ready = await client.call("ModelReady", asked, compression=grpc.Compression.Gzip)
    assert oip.ModelReadyResponse.FromString(ready).ready
    case.service.requests.clear()
    bomb = infer_request("up", (Tensor("x", "UINT8", (2**27,), bytes(2**27)),)).SerializeToString()
    small = oip.ModelReadyRequest(name="u" * (SMALL_BYTES + 1)).SerializeToString()
    for method, message in (("ModelInfer", bomb), ("ModelReady", small)):
        with pytest.raises(InferenceError) as failed:
            await client.call(method, message, compression=grpc.Compression.Gzip)
        assert (failed.value.status, failed.value.code) == (case.status_of(Code.TOO_LARGE), Code.TOO_LARGE)
    with pytest.raises(InferenceError) as failed:
        await client.call("ModelInfer", request, compression=grpc.Compression.Deflate)
    assert failed.value.status == "UNIMPLEMENTED", "raw deflate does not say what it expands to"
    assert not case.service.requests


@GRPC
async def test_a57_grpc_compressed_messages_are_charged_as_what_they_expand_to(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, GrpcClient)
    tensor = Tensor("x", "UINT8", (2**25,), bytes(2**25))
    request = infer_request("up", (tensor,)).SerializeToString()
    case.service.hold = asyncio.Event()
    asking = asyncio.create_task(client.call("ModelInfer", request, compression=grpc.Compression.Gzip))
    await until(lambda: case.service.inside == 1, 10.0, "the request inside")
    assert case.memory.held_bytes == COPIES * len(request)
    case.service.hold.set()
    assert oip.ModelInferResponse.FromString(await asking).raw_output_contents == [tensor.raw]
    await until(lambda: not case.memory.held_bytes, 5.0, "nothing held")


@GRPC
async def test_grpc_streams_take_gzip(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, GrpcClient)
    stream = client.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
    call: Any = stream(None, metadata=tuple(client.default_metadata.items()), compression=grpc.Compression.Gzip)
    for number in range(3):
        await call.write(infer_request("up", (TENSORS[0],) * 20, str(number)).SerializeToString())
        said = oip.ModelStreamInferResponse.FromString(await call.read())
        assert (said.infer_response.id, said.error_message) == (str(number), "")
    await call.write(b"\x1f\x8bnot gzip, and not protobuf" + bytes(4))
    assert "not gzip" in oip.ModelStreamInferResponse.FromString(await call.read()).error_message
    await call.write(infer_request("up", (TENSORS[0],), "last").SerializeToString())
    assert oip.ModelStreamInferResponse.FromString(await call.read()).infer_response.id == "last"
    await call.done_writing()
    assert not await call.read()


@GRPC
@pytest.mark.parametrize("service", reflection.SERVICES)
async def test_grpc_reflection_is_for_who_may_call(case: TransportCase, service: str) -> None:
    """Two questions on one stream, as grpcurl asks them."""
    client = case.client()
    assert isinstance(client, GrpcClient)
    Request = reflection_pb2.ServerReflectionRequest
    path = f"/{service}/{reflection.METHOD}"
    asked = (Request(list_services=""), Request(file_containing_symbol="inference.GRPCInferenceService"))
    call: Any = client.channel.stream_stream(path, None, None)(None, metadata=tuple(client.default_metadata.items()))
    for request in asked:
        await call.write(request.SerializeToString())
        said = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
        assert said.WhichOneof("message_response") in ("list_services_response", "file_descriptor_response")
    await call.write(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert grpcio_status.refusal_of(refused.value).code is Code.MESSAGE_INVALID
    call = client.channel.stream_stream(path, None, None)(None, metadata=tuple(client.default_metadata.items()))
    await call.write(asked[0].SerializeToString())
    assert await call.read()
    case.service.deny = refuse(Code.CERT_REVOKED)
    await call.write(asked[0].SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert grpcio_status.refusal_of(refused.value).code is Code.CERT_REVOKED
    case.service.deny = None
    call = client.channel.stream_stream(path, None, None)(None, metadata=tuple(client.default_metadata.items()))
    await call.done_writing()
    assert not await call.read()
    case.service.deny = refuse(Code.UNAUTHENTICATED)
    call = client.channel.stream_stream(path, None, None)(None, metadata=tuple(client.default_metadata.items()))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert grpcio_status.refusal_of(refused.value).code is Code.UNAUTHENTICATED


HEALTH = "/grpc.health.v1.Health"


def health_request(service: str = "") -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


def watch_health(client: GrpcClient, service: str = "") -> Any:
    watching = client.channel.unary_stream(f"{HEALTH}/Watch", None, health_pb2.HealthCheckResponse.FromString)
    return watching(health_request(service), metadata=tuple(client.default_metadata.items()))


@GRPC
async def test_grpc_health_tells_each_change_to_who_watches(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, GrpcClient)
    Health = health_pb2.HealthCheckResponse
    whole, inference, nothing = watch_health(client), watch_health(client, SERVICE), watch_health(client, "nothing")
    assert (await nothing.read()).status == Health.SERVICE_UNKNOWN
    for is_ready in (True, False, True):
        if is_ready is not case.service.is_ready:
            case.service.become(is_ready=is_ready)
        for call in (whole, inference):
            assert (await call.read()).status == (Health.SERVING if is_ready else Health.NOT_SERVING)
    ask = client.channel.unary_unary(f"{HEALTH}/Check", None, Health.FromString)
    said: Any = {"metadata": tuple(client.default_metadata.items())}
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        assert (await ask(health_request(SERVICE), compression=compression, **said)).status == Health.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(health_request("nothing"), **said)
    assert grpcio_status.refusal_of(refused.value).code is Code.NOT_FOUND
    case.service.deny = refuse(Code.CERT_REVOKED)
    case.service.become(is_ready=True)
    for call in (whole, inference, nothing):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert grpcio_status.refusal_of(refused.value).code is Code.CERT_REVOKED


@GRPC
async def test_grpc_health_watches_end_with_their_clients_and_do_not_hold_a_front(case: TransportCase) -> None:
    intake: IngressAdmission = case.admission()
    going, staying = case.client(), case.client()
    assert isinstance(going, GrpcClient)
    assert isinstance(staying, GrpcClient)
    calls = [watch_health(client) for client in (going, going, staying)]
    for call in calls:
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert intake.watch_count == 3
    assert intake.places.calls == 0, "who waits for news takes no place of those who ask"
    calls[0].cancel()
    await until(lambda: intake.watch_count == 2, 5.0, "the end of one that was cancelled")
    await going.close()
    await until(lambda: intake.watch_count == 1, 5.0, "the end of one whose client is gone")
    start = asyncio.get_running_loop().time()
    leaving = asyncio.create_task(case.transport.stop(Seconds(30.0)))
    case.service.become(is_ready=False)
    assert (await calls[2].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await leaving
    assert asyncio.get_running_loop().time() - start < 5.0, "nobody waits for a watch"


@GRPC
async def test_a57_grpc_health_watches_of_one_caller_are_bounded(
    case: TransportCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "WATCHES_PER_CALLER", 2)
    client = case.client()
    assert isinstance(client, GrpcClient)
    calls = [watch_health(client) for _ in range(2)]
    for call in calls:
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await watch_health(client).read()
    assert grpcio_status.refusal_of(refused.value).code is Code.OVERLOADED
    calls[0].cancel()

    async def watches() -> bool:
        with suppress(grpc.aio.AioRpcError):
            return bool(await watch_health(client).read())
        return False

    await until(watches, 5.0, "a place that came free")


@GRPC
async def test_a15_an_answer_that_nobody_takes_ends_without_a_traceback(
    case: TransportCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What its caller asks for meanwhile is answered; and it is told why once it does take the answer."""
    monkeypatch.setattr(exchange, "SMALL_S", 0.2)
    context = ssl.create_default_context(cafile=str(case.authority.certificate))
    said = {"authorization": "Bearer secret"}
    if case.has_client_certificate:
        context.load_cert_chain(case.own.certificate, case.own.key)
        said = {}
    intake: IngressAdmission = case.admission()
    connection = await Http2Connection.connect(f"127.0.0.1:{case.port}", context, "localhost", window=0)
    for stream, method in ((1, "ServerReady"), (3, "ServerMetadata")):
        connection.open_stream(stream, f"/{SERVICE}/{method}", **said)
        connection.send_message(stream, b"", end=True)
    await until(lambda: intake._head_calls.total() == 2, 5.0, "both calls inside")
    await until(lambda: not intake._head_calls, 5.0, "the end of their time")
    assert await case.client().ready()
    assert not connection.is_ended(1)
    connection.grant_window(1, 2**16)
    await until(lambda: connection.is_ended(1), 5.0, "its status")
    assert Code.TOO_SLOW.encode() in connection.header_blocks(1)
    await connection.close()
    await until(lambda: not case.is_inside(), 5.0, "the end of the other")
    gc.collect()
    assert not [each.message for each in caplog.records if each.levelno >= logging.ERROR]


# HTTP alone


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_keeps_a_connection_and_takes_pipelined_requests(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    reader, writer = await client.connect()
    body = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[7]}]}'
    for _ in range(2):
        writer.write(client.request_bytes("POST", "/v2/models/up/infer", body) * 3)
    seen = b""
    async with asyncio.timeout(5):
        while seen.count(b'"data":[7]') < 6:
            seen += await reader.read(2**16)
    assert seen.count(b"HTTP/1.1 200") == 6
    writer.close()


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_asks_who_before_it_reads_a_body(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    case.service.deny = refuse(Code.UNAUTHENTICATED)
    head = client.request_bytes("POST", "/v2/models/up/infer", b"").replace(
        b"content-length: 0", b"content-length: 999999"
    )
    response = await client.exchange(head)
    assert (response.status, response.headers["connection"]) == (401, "close")
    case.service.deny = None
    expecting = head.replace(b"host:", b"expect: 100-continue\r\nhost:").replace(b"999999", b"2")
    reader, writer = await client.connect()
    writer.write(expecting)
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
    writer.close()


@pytest.mark.parametrize("case", ["rest"], indirect=True)
@pytest.mark.parametrize(
    ("head", "status_"),
    [
        (b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 4294967296\r\n\r\n0123456789", 413),
        (b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-encoding: br\r\ncontent-length: 1\r\n\r\n0", 501),
        (
            b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
            400,
        ),
        (b"GET /v2/models/up/infer HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"NOT HTTP\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 60000 + b"\r\n\r\n", 431),
    ],
)
async def test_a14_rest_heads_that_lie(case: TransportCase, head: bytes, status_: int) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    response = await client.exchange(head)
    assert response.status == status_, response.body
    assert response.json()["code"] == response.headers["shoal-code"]
    assert not case.service.requests


@pytest.mark.parametrize("case", ["rest"], indirect=True)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a14_rest_bodies_are_measured_as_they_expand(case: TransportCase, encoding: str) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    text = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}).encode()
    bits = 31 if encoding == "gzip" else 15

    def compress(data: bytes) -> bytes:
        packer = zlib.compressobj(9, wbits=bits)
        return packer.compress(data) + packer.flush()

    said = {"content-encoding": encoding}
    fine = await client.checked_request("POST", "/v2/models/up/infer", compress(text), said)
    assert fine.json()["outputs"][0]["data"] == [1, 2]
    bomb = compress(text + b" " * (MAX_MESSAGE + 1))
    assert len(bomb) < MAX_MESSAGE // 900
    with pytest.raises(InferenceError) as failed:
        await client.checked_request("POST", "/v2/models/up/infer", bomb, said)
    assert (failed.value.status, failed.value.code) == (413, Code.TOO_LARGE)
    assert len(case.service.requests) == 1


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_cuts_off_who_sends_too_slowly(case: TransportCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(rest, "BODY_GRACE_S", 0.2)
    client = case.client()
    assert isinstance(client, RestClient)
    for head in (
        b"GET /v2 HTTP/1.1\r\nho",
        b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    ):
        response = await client.exchange(head, timeout=5)
        assert (response.status, response.json()["code"]) == (408, Code.TOO_SLOW)


@pytest.mark.parametrize("case", ["rest2"], indirect=True)
async def test_http2_cuts_off_who_sends_too_slowly(case: TransportCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "BODY_GRACE_S", 0.2)
    client = case.client()
    assert isinstance(client, Http2RestClient)
    connection = await Http2Connection.connect(f"127.0.0.1:{case.port}", client.context(), "localhost")
    connection.open_stream(1, "/v2/models/up/infer", content_type="application/json", content_length="100")
    connection.send_data(1, b"{")
    await until(lambda: b"TOO_SLOW" in connection.header_blocks(1), 5, "a refusal")
    assert b"408" in connection.header_blocks(1)
    await connection.close()


@pytest.mark.parametrize("case", ["rest2"], indirect=True)
async def test_http2_takes_a_body_with_trailers(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, Http2RestClient)
    connection = await Http2Connection.connect(f"127.0.0.1:{case.port}", client.context(), "localhost")
    connection.open_stream(1, "/v2/models/up/infer", content_type="application/json")
    connection.send_data(1, b'{"inputs":[]}')
    connection.send_trailers(1, checksum="none")
    await until(lambda: connection.is_ended(1), 5, "an answer")
    assert connection.header_blocks(1).startswith(b"\x88"), "indexed: status 200"
    await connection.close()


@pytest.mark.parametrize("case", ["rest", "rest2-token"], indirect=True)
@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
@pytest.mark.parametrize("size", [4, 4_000_000])
async def test_curl_is_answered_over_either_version(
    case: TransportCase, tmp_path: Path, version: str, size: int
) -> None:
    """A tensor of `size` bytes goes there and back."""
    raw = bytes(range(256)) * (size // 256) + bytes(size % 256)
    row = {"name": "a", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    sent, back = tmp_path / "sent", tmp_path / "back"
    sent.write_bytes(text + raw)
    command = ["curl", "-s", version, "--cacert", str(case.authority.certificate), "-o", str(back)]
    command += ["-w", "%{http_version} %{http_code}", "-H", f"inference-header-content-length: {len(text)}"]
    if case.has_client_certificate:
        command += ["--cert", str(case.own.certificate), "--key", str(case.own.key)]
    else:
        command += ["-H", "authorization: Bearer secret"]
    command += ["--data-binary", f"@{sent}", f"https://localhost:{case.port}/v2/models/up/infer"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        said, _ = await process.communicate()
    assert (said.decode(), process.returncode) == ("2 200" if version == "--http2" else "1.1 200", 0)
    assert back.read_bytes()[-size:] == raw


REST = pytest.mark.parametrize("case", ["rest", "rest-token", "rest2", "rest2-token"], indirect=True)
VALUES = json.dumps({"id": "r-1", "x": [1, 2, 3, 4, 5, 6], "parameters": {"top_k": 5}}).encode()
GENERATED = {"model_name": "up", "model_version": "", "id": "r-1", "x": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}


@REST
@pytest.mark.parametrize("path", ["/v2/models/up/{}", "/v2/models/up/versions/1/{}"])
async def test_rest_generate_takes_values_by_name(case: TransportCase, path: str) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    whole = await client.checked_request("POST", path.format("generate"), VALUES)
    assert whole.headers["content-type"] == "application/json"
    assert whole.json() == GENERATED
    stream = await client.checked_request("POST", path.format("generate_stream"), VALUES, {"shoal-request-id": "q7"})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["shoal-request-id"] == "q7"
    assert stream.body.startswith(b"data: ")
    assert stream.body.endswith(b"\n\n")
    assert json.loads(stream.body.removeprefix(b"data: ")) == GENERATED
    (first, second) = case.service.requests
    assert first == second
    assert (list(first.inputs[0].shape), first.parameters["top_k"].int64_param) == ([2, 3], 5)
    assert case.service.admitted == 2
    options = await client.request("OPTIONS", path.format("generate_stream"))
    assert options.headers["allow"] == "POST, OPTIONS"
    await until(lambda: not case.is_inside(), 5, "nothing is held")


@REST
async def test_rest_generate_refuses_before_it_runs_and_tells_a_failure_in_the_stream(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    for method in ("generate", "generate_stream"):
        wrong = await client.request("POST", f"/v2/models/up/{method}", b'{"x": [1, 2]}')
        assert (wrong.status, wrong.json()["code"]) == (400, Code.INVALID_ARGUMENT)
        large = await client.request("POST", f"/v2/models/up/{method}", bytes(2**20 + 1))
        assert (large.status, large.json()["code"]) == (413, Code.TOO_LARGE)
        case.service.deny = refuse(Code.UNAUTHENTICATED)
        assert (await client.request("POST", f"/v2/models/up/{method}", VALUES)).status == 401
        case.service.deny = None

    async def fail(request: bytes) -> bytes:
        raise refuse(Code.OVERLOADED, "a queue of 9", "room", "come back")

    case.service._answer = fail  # type: ignore[method-assign]
    assert (await client.request("POST", "/v2/models/up/generate", VALUES)).status == 503
    failed = await client.request("POST", "/v2/models/up/generate_stream", VALUES)
    assert failed.status == 200
    shown = json.loads(failed.body.removeprefix(b"data: "))
    assert (shown["code"], shown["found"], shown["wanted"], shown["try"]) == (
        Code.OVERLOADED,
        "a queue of 9",
        "room",
        "come back",
    )
    await until(lambda: not case.is_inside(), 5, "nothing is held")


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_generate_stream_opens_before_its_answer_and_ends_with_its_client(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    case.service.hold = asyncio.Event()
    reader, writer = await client.connect()
    writer.write(client.request_bytes("POST", "/v2/models/up/generate_stream", VALUES))
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    case.service.hold.set()
    async with asyncio.timeout(5):
        rest_ = await reader.readuntil(b"0\r\n\r\n")
    assert b"data: {" in rest_
    case.service.hold.clear()
    writer.write(client.request_bytes("POST", "/v2/models/up/generate_stream", VALUES))
    async with asyncio.timeout(5):
        await reader.readuntil(b"\r\n\r\n")
    await until(lambda: case.service.inside == 1, 5, "it is inside")
    writer.close()
    await until(lambda: case.service.cancelled == 1 and not case.is_inside(), 5, "it is cancelled, and nothing is held")


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_a_stream_over_http_1_0_ends_with_its_connection_at_once(
    case: TransportCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "LINGER_S", 60.0)  # what it would wait for bytes of its client
    client = case.client()
    assert isinstance(client, RestClient)
    reader, writer = await client.connect()
    request = client.request_bytes("POST", "/v2/models/up/generate_stream", VALUES)
    writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert b"chunked" not in answer.lower()
    assert answer.endswith(b"\n\n")
    writer.close()
    await until(lambda: not case.is_inside(), 5, "nothing is held")


@pytest.mark.parametrize("case", ["rest2"], indirect=True)
async def test_http2_generate_stream_waits_for_its_readers_window_and_ends_with_it(case: TransportCase) -> None:
    """What a client does not read is charged to it while its stream is open, and is free when that is reset."""
    client = case.client()
    assert isinstance(client, Http2RestClient)
    values = json.dumps({"x": [0.1] * 12_000}, separators=(",", ":")).encode()
    assert len(values) < 65_535, "the server's first window"
    connection = await Http2Connection.connect(f"127.0.0.1:{case.port}", client.context(), "localhost")
    connection.open_stream(1, "/v2/models/up/generate_stream", content_type="application/json")
    for start in range(0, len(values), 16_384):
        connection.send_data(1, values[start : start + 16_384])
    connection.send_trailers(1, checksum="none")
    await until(lambda: case.unread_bytes() > 65_535, 5, "an answer beyond the client's window")
    assert not connection.is_ended(1)
    connection.reset(1)
    await until(lambda: not case.is_inside(), 5, "nothing is held")
    assert case.unread_bytes() == 0
    case.service.hold = asyncio.Event()
    connection.open_stream(3, "/v2/models/up/generate_stream", content_type="application/json")
    connection.send_data(3, VALUES)
    connection.send_trailers(3, checksum="none")
    await until(lambda: connection.header_blocks(3).startswith(b"\x88"), 5, "its head, before its answer")
    connection.reset(3)
    await until(lambda: case.service.cancelled == 1 and not case.is_inside(), 5, "it is cancelled, and nothing is held")
    await connection.close()


@pytest.mark.parametrize("case", ["rest", "rest2-token"], indirect=True)
@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
async def test_curl_reads_a_generated_stream_over_either_version(case: TransportCase, version: str) -> None:
    command = ["curl", "-sN", version, "--cacert", str(case.authority.certificate)]
    command += ["-w", "%{http_version} %{http_code}", "--data-binary", VALUES.decode()]
    if case.has_client_certificate:
        command += ["--cert", str(case.own.certificate), "--key", str(case.own.key)]
    else:
        command += ["-H", "authorization: Bearer secret"]
    command += [f"https://localhost:{case.port}/v2/models/up/generate_stream"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        said, _ = await process.communicate()
    shown, _, status_ = said.decode().partition("\n\n")
    assert (status_, process.returncode) == ("2 200" if version == "--http2" else "1.1 200", 0)
    assert json.loads(shown.removeprefix("data: ")) == GENERATED


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_says_in_words_how_a_request_ended(case: TransportCase) -> None:
    """A status line without a reason phrase is none for some clients (h2load counts it as failed)."""
    client = case.client()
    assert isinstance(client, RestClient)
    for code, line in (
        (None, b"HTTP/1.1 200 OK\r\n"),
        (Code.MODEL_NOT_FOUND, b"HTTP/1.1 404 Not Found\r\n"),
        (Code.OVERLOADED, b"HTTP/1.1 503 Service Unavailable\r\n"),
        (Code.CANCELLED, b"HTTP/1.1 499 Client Closed Request\r\n"),
    ):
        case.service.deny = refuse(code) if code else None
        reader, writer = await client.connect()
        writer.write(client.request_bytes("GET", "/v2/models/up"))
        assert await reader.readline() == line
        writer.close()


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_answers_head_and_options(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    whole = await client.request("GET", "/v2/models/up")
    reader, writer = await client.connect()
    writer.write(client.request_bytes("HEAD", "/v2/models/up") + client.request_bytes("GET", "/v2/health/live"))
    seen = b""
    async with asyncio.timeout(5):
        while not seen.endswith(b'{"live": true}'):
            seen += await reader.read(2**16)
    writer.close()
    head, _, rest = seen.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"content-length: {len(whole.body)}".encode() in head
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n"), "no body of the first is between"
    for path, allowed in (
        ("*", "GET, HEAD, POST, OPTIONS"),
        ("/v2/models/up/infer", "POST, OPTIONS"),
        ("/v2/models/up", "GET, HEAD, OPTIONS"),
    ):
        response = await client.request("OPTIONS", path)
        assert (response.status, response.headers["allow"], response.body) == (200, allowed, b"")
    assert (await client.request("OPTIONS", "/v1")).status == 404


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_tells_a_client_without_tls_what_is_missing(case: TransportCase) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", case.port)
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(5):
        response = await read_response(reader)
        assert not await reader.read()
    writer.close()
    assert (response.status, response.json()["code"]) == (400, Code.TLS_REQUIRED)
    assert "https://" in response.json()["error"]


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_a24_a_name_that_is_no_ascii_is_refused_and_writes_no_traceback(
    case: TransportCase, capsys: pytest.CaptureFixture[str]
) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    head = b"GET /v2 HTTP/1.1\r\nhost: x\r\nshoal-request-id: \xff\r\n\r\n"
    for _ in range(3):
        response = await client.exchange(head)
        assert (response.status, response.json()["code"]) == (400, Code.INVALID_ARGUMENT)
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_a24_failures_of_ours_are_logged_now_and_then(
    case: TransportCase, capsys: pytest.CaptureFixture[str]
) -> None:
    client = case.client()
    case.service.deny = RuntimeError("broken")
    for _ in range(LINES + 5):
        with pytest.raises(InferenceError):
            await client.ready()
    assert "".join(capsys.readouterr()).count("] call_failed ") <= LINES


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_a24_silence_ends_before_the_first_request_and_after(
    case: TransportCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(case.transport, DataPort)
    monkeypatch.setattr(case.transport.listener, "handshake_s", 0.3)
    monkeypatch.setattr(http1, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http1, "IDLE_TIMEOUT_S", 0.6)
    client = case.client()
    assert isinstance(client, RestClient)
    for kind in ("tcp", "tls", "keep-alive"):
        if kind == "tcp":
            reader, writer = await asyncio.open_connection("127.0.0.1", case.port)
        else:
            reader, writer = await client.connect()
        if kind == "keep-alive":
            writer.write(client.request_bytes("GET", "/v2/health/live"))
            await reader.readuntil(b'{"live": true}')
        async with asyncio.timeout(3):
            assert not await reader.read(), kind
        writer.close()


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_a24_who_holds_many_idle_connections_makes_room_for_others(
    case: TransportCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two addresses hold all that the port has; a third is served, and so is a request that is inside."""
    assert isinstance(case.transport, DataPort)
    monkeypatch.setattr(case.transport.connections, "_most", 8)
    monkeypatch.setattr(case.transport.connections, "_most_per_address", 4)
    client = case.client()
    assert isinstance(client, RestClient)
    case.service.hold = asyncio.Event()
    asked = asyncio.create_task(client.infer("up", TENSORS[:1]))
    await until(lambda: case.service.inside == 1, 5, "inside")
    held = [
        await asyncio.open_connection("127.0.0.1", case.port, local_addr=(address, 0))
        for address, count in (("127.0.0.1", 3), ("127.0.0.2", 4))
        for _ in range(count)
    ]
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", case.port, local_addr=("127.0.0.3", 0))
        await writer.start_tls(client.context(), server_hostname="localhost")
        writer.write(client.request_bytes("GET", "/v2/health/live"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        held.append((reader, writer))
    case.service.hold.set()
    assert (await asked).outputs == TENSORS[:1]
    for _, each in held:
        each.transport.abort()


@pytest.mark.parametrize("case", ["rest"], indirect=True)
async def test_rest_gives_the_name_in_the_path_as_it_was_meant(case: TransportCase) -> None:
    client = case.client()
    assert isinstance(client, RestClient)
    body = b'{"inputs":[]}'
    await client.checked_request("POST", "/v2/models/a%2Fb%20c/versions/7/infer?x=1", body)
    asked = case.service.requests[-1]
    assert (asked.model_name, asked.model_version) == ("a/b c", "7")


def test_refused_is_a_refusal() -> None:
    assert isinstance(CallRefused(Refusal(Code.OVERLOADED)), ShoalError)
