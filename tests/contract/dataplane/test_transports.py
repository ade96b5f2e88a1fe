"""What every transport of the data plane does, whatever it is made of: one suite over each way in."""

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.oip import Client, Failed, GrpcClient, RestClient, Tensor, infer_request
from harness.pki import Authority, Files
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.grpc import GrpcTransport
from shoal.agent.dataplane.rest import RestTransport
from shoal.agent.dataplane.transport import MAX_MESSAGE, Call, Refused, TlsFiles, Transport
from shoal.agent.dataplane.trust import Authorities
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.wire import status

REGION = "west"


class Echo:
    """A service that answers inputs as outputs and notes each call; `deny` and `hold` change what it does."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.requests: list[oip.ModelInferRequest] = []
        self.admitted = 0
        self.deny: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.inside = 0
        self.cancelled = 0

    def _see(self, call: Call) -> None:
        self.calls.append(call)
        if self.deny is not None:
            raise self.deny

    def live(self) -> bool:
        return True

    def admit(self, call: Call) -> None:
        self.admitted += 1
        self._see(call)

    def server_ready(self, call: Call) -> bool:
        self._see(call)
        return True

    def server_metadata(self, call: Call) -> oip.ServerMetadataResponse:
        self._see(call)
        return oip.ServerMetadataResponse(name="shoal", version="2", extensions=["binary_tensor_data"])

    def index(self, call: Call, *, ready_only: bool) -> oip.RepositoryIndexResponse:
        self._see(call)
        found = oip.RepositoryIndexResponse()
        found.models.add(name="up", version="1", state="READY")
        if not ready_only:
            found.models.add(name="down", version="1", state="UNAVAILABLE", reason="no replica")
        return found

    def model_ready(self, call: Call, name: str, version: str) -> bool:
        self._see(call)
        return name == "up"

    async def model_metadata(self, call: Call, name: str, version: str) -> oip.ModelMetadataResponse:
        self._see(call)
        shown = oip.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP32", shape=[-1, 3])
        return oip.ModelMetadataResponse(
            name=name, versions=["1"], platform="onnx_onnxv1", inputs=[shown], outputs=[shown]
        )

    async def infer(self, call: Call, request: bytes) -> bytes:
        self._see(call)
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


@dataclass
class Way:
    """One transport, and how a client of it looks. sure: its client shows a certificate."""

    name: str
    sure: bool
    service: Echo
    transport: Transport
    authority: Authority
    own: Files
    port: int = 0
    clients: list[Client] = field(default_factory=list)

    def client(self, files: Files | None = None, bearer: str = "secret") -> Client:
        root = self.authority.certificate.read_bytes()
        if self.sure:
            files, bearer = files or self.own, ""
        made: Client
        if self.name == "rest":
            made = RestClient(self.port, root, files, bearer)
        else:
            made = GrpcClient(self.port, root, files, bearer)
        self.clients.append(made)
        return made

    def shown(self, code: Code) -> str | int:
        return status.http_status(code) if self.name == "rest" else status.grpc_status(code).name


def told(region: str, tls: TlsFiles) -> Authorities:
    """That there is no other region."""
    authorities = Authorities(region, tls)
    authorities.configure(())
    return authorities


@pytest.fixture(params=["grpc", "grpc-token", "rest", "rest-token"])
async def way(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Way]:
    authority = Authority(tmp_path, REGION, SystemClock().wall())
    node = authority.issue(Role.AGENT, "n1")
    tls = TlsFiles(node.certificate, node.key, node.authority)
    service = Echo()
    name, _, kind = str(request.param).partition("-")
    transport: Transport
    if name == "rest":
        transport = RestTransport(service, "127.0.0.1", 0, tls)
    else:
        transport = GrpcTransport(service, "127.0.0.1", 0, tls, None if kind else told(REGION, tls))
    found = Way(name, not kind, service, transport, authority, authority.issue(Role.TENANT, "acme"))
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


async def test_tensors_pass_bit_for_bit(way: Way) -> None:
    answer = await way.client().infer("up", TENSORS, request_id="r-1")
    assert (answer.model, answer.id, answer.outputs) == ("up", "r-1", TENSORS)
    assert way.service.requests[0].model_name == "up"


async def test_who_calls_is_told(way: Way) -> None:
    said = {"shoal-tenant": "acme", "shoal-origin": "edge-1", "shoal-hop": "1", "shoal-request-id": "q7"}
    said["traceparent"] = trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await way.client().infer("up", TENSORS[:1], said=said)
    call = way.service.calls[-1]
    assert (call.tenant, call.origin, call.hop, call.request_id) == ("acme", "edge-1", 1, "q7")
    assert call.trace == trace
    if way.sure:
        assert call.identity is not None
        assert (call.identity.uri, call.bearer) == ("shoal://west/tenant/acme", "")
    else:
        assert (call.identity, call.bearer) == (None, "secret")
    with pytest.raises(Failed) as wrong:
        await way.client().infer("up", TENSORS[:1], said={"shoal-hop": "2"})
    assert wrong.value.code == Code.INVALID_ARGUMENT


async def test_live_needs_nobody(way: Way) -> None:
    way.service.deny = refuse(Code.UNAUTHENTICATED)
    assert await way.client(bearer="").live()
    with pytest.raises(Failed) as ready:
        await way.client(bearer="").ready()
    assert (ready.value.status, ready.value.code) == (way.shown(Code.UNAUTHENTICATED), Code.UNAUTHENTICATED)


CONTROLS = (
    ("TraceSetting", "POST", "trace/setting"),
    ("TraceSetting", "GET", "models/up/trace/setting"),
    ("LogSettings", "POST", "logging"),
    ("ModelStatistics", "GET", "models/up/stats"),
    ("SystemSharedMemoryRegister", "POST", "systemsharedmemory/region/x/register"),
    ("CudaSharedMemoryRegister", "POST", "cudasharedmemory/region/x/register"),
    ("ModelConfig", "GET", "models/up/config"),
)
"""What Triton lets its clients do beside inference: method, and the same over REST."""


@pytest.mark.parametrize(("method", "verb", "path"), CONTROLS)
async def test_a45_nothing_but_inference_is_on_the_data_port(way: Way, method: str, verb: str, path: str) -> None:
    client = way.client()
    asked: Awaitable[object]
    if isinstance(client, RestClient):
        asked = client.asked(verb, f"/v2/{path}", b"{}")
    else:
        assert isinstance(client, GrpcClient)
        asked = client.call(method, b"")
    with pytest.raises(Failed) as refused:
        await asked
    assert refused.value.status in (404, "UNIMPLEMENTED"), refused.value
    assert not way.service.requests
    assert await client.ready()


async def test_small_calls(way: Way) -> None:
    client = way.client()
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
    with pytest.raises(Failed) as load:
        await client.load("up")
    assert (load.value.status, load.value.code) == (way.shown(Code.UNIMPLEMENTED), Code.UNIMPLEMENTED)


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
async def test_refusals_keep_their_code(way: Way, code: Code) -> None:
    way.service.deny = Refused(Refusal(code, "found this", "asked that", "do so"), Seconds(0.25))
    client = way.client()
    for call in (lambda: client.infer("up", TENSORS[:1]), client.ready, lambda: client.model("up")):
        attempt: Callable[[], Awaitable[object]] = call
        with pytest.raises(Failed) as failed:
            await attempt()
        seen = failed.value
        assert (seen.status, seen.code, seen.retry_after_ms) == (way.shown(code), code, "250")
        assert "found this" in str(seen)
        assert "do so" in str(seen)


async def test_our_own_failure_is_internal_and_tells_nothing(way: Way) -> None:
    way.service.deny = RuntimeError("a secret path")
    client = way.client()
    with pytest.raises(Failed) as failed:
        await client.infer("up", TENSORS[:1])
    assert failed.value.code == Code.INTERNAL
    assert "secret" not in str(failed.value)
    way.service.deny = None
    assert (await client.infer("up", TENSORS[:1])).outputs == TENSORS[:1]


@pytest.mark.parametrize("way", ["grpc-token", "rest-token"], indirect=True)
async def test_where_anybody_may_connect_the_caller_is_judged_before_the_body(way: Way) -> None:
    """Of a stranger's request not even the size matters: nothing of it is taken."""
    way.service.deny = Refused(Refusal(Code.TOKEN_INVALID, "a token nobody was given", "a token", "make one"))
    huge = Tensor("x", "UINT8", (MAX_MESSAGE + 1,), bytes(MAX_MESSAGE + 1))
    with pytest.raises(Failed) as refused:
        await way.client().infer("up", (huge,), timeout=20)
    assert refused.value.code == Code.TOKEN_INVALID


async def test_too_large_never_reaches_the_service(way: Way) -> None:
    huge = Tensor("x", "UINT8", (MAX_MESSAGE + 1,), bytes(MAX_MESSAGE + 1))
    with pytest.raises(Failed) as failed:
        await way.client().infer("up", (huge,))
    assert failed.value.status == way.shown(Code.TOO_LARGE)
    assert not way.service.requests


async def test_a_caller_that_hangs_up_cancels_its_call(way: Way) -> None:
    way.service.hold = asyncio.Event()
    task = asyncio.create_task(way.client().infer("up", TENSORS[:1]))
    await until(lambda: way.service.inside == 1, 5, "inside")
    task.cancel()
    await until(lambda: way.service.cancelled == 1, 5, "cancelled at the service")


async def test_stopping_lets_calls_end_and_takes_no_new(way: Way) -> None:
    way.service.hold = asyncio.Event()
    client = way.client()
    task = asyncio.create_task(client.infer("up", TENSORS[:1]))
    await until(lambda: way.service.inside == 1, 5, "inside")
    stopping = asyncio.create_task(way.transport.stop(Seconds(10.0)))

    async def refused() -> bool:
        try:
            await way.client().infer("up", TENSORS[:1], timeout=0.5)
        except (Failed, OSError, EOFError, TimeoutError):
            return True
        return False

    await until(refused, 5, "no new call is taken")
    assert not stopping.done()
    way.service.hold.set()
    assert (await task).outputs == TENSORS[:1]
    await stopping


@pytest.mark.parametrize("way", ["grpc", "rest", "rest-token"], indirect=True)
async def test_strangers_are_shut_out(way: Way, tmp_path: Path) -> None:
    """A certificate of another authority ends the handshake, also where none is needed. (grpc-token asks for none.)"""
    other = Authority(tmp_path / "other", REGION, SystemClock().wall())
    way.sure = False
    client = way.client(other.issue(Role.TENANT, "acme"))
    with pytest.raises((Failed, OSError, EOFError)):
        await client.infer("up", TENSORS[:1], timeout=3)
    assert not way.service.calls


async def test_renewed_files_count_from_the_next_connection(way: Way) -> None:
    old = way.client()
    assert await old.ready()
    fresh = Authority(way.authority.folder / "fresh", REGION, SystemClock().wall())
    node = fresh.issue(Role.AGENT, "n1")
    tls: TlsFiles = way.transport._tls  # type: ignore[attr-defined]
    for now, then in (
        (node.key, tls.key),
        (node.certificate, tls.certificate),
        (node.authority, tls.authority),
    ):
        then.write_bytes(now.read_bytes())
    way.authority = fresh
    way.own = fresh.issue(Role.TENANT, "acme")
    assert await way.client().ready()
    if isinstance(old, GrpcClient):
        assert await old.ready()  # its connection stands


# gRPC alone


@pytest.mark.parametrize("way", ["grpc"], indirect=True)
async def test_grpc_deadlines_arrive(way: Way) -> None:
    await way.client().infer("up", TENSORS[:1], timeout=7)
    left = way.service.calls[-1].left_s
    assert left is not None
    assert 5 < left <= 7
    client = way.client()
    assert isinstance(client, GrpcClient)
    await client.call("ModelInfer", infer_request("up", TENSORS[:1]).SerializeToString(), timeout=None)
    assert way.service.calls[-1].left_s is None


@pytest.mark.parametrize("way", ["grpc"], indirect=True)
async def test_grpc_stream_answers_in_order_and_goes_on_after_a_refusal(way: Way) -> None:
    client = way.client()
    assert isinstance(client, GrpcClient)
    call: Any = client.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)(None)
    for number in range(5):
        way.service.deny = refuse(Code.INVALID_ARGUMENT, "not this one") if number == 2 else None
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


@pytest.mark.parametrize("way", ["grpc", "grpc-token"], indirect=True)
async def test_a14_grpc_compressed_messages_are_refused(way: Way) -> None:
    client = way.client()
    assert isinstance(client, GrpcClient)
    bomb = infer_request("up", (Tensor("x", "UINT8", (2**27,), bytes(2**27)),)).SerializeToString()
    with pytest.raises(Failed) as failed:
        await client.call("ModelInfer", bomb, compression=grpc.Compression.Gzip)
    assert failed.value.status == "UNIMPLEMENTED"
    assert not way.service.requests


# HTTP alone


@pytest.mark.parametrize("way", ["rest"], indirect=True)
async def test_rest_keeps_a_connection_and_takes_pipelined_requests(way: Way) -> None:
    client = way.client()
    assert isinstance(client, RestClient)
    reader, writer = await client.connect()
    body = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[7]}]}'
    for _ in range(2):
        writer.write(client.bytes_of("POST", "/v2/models/up/infer", body) * 3)
    seen = b""
    async with asyncio.timeout(5):
        while seen.count(b'"data":[7]') < 6:
            seen += await reader.read(2**16)
    assert seen.count(b"HTTP/1.1 200") == 6
    writer.close()


@pytest.mark.parametrize("way", ["rest"], indirect=True)
async def test_rest_asks_who_before_it_reads_a_body(way: Way) -> None:
    client = way.client()
    assert isinstance(client, RestClient)
    way.service.deny = refuse(Code.UNAUTHENTICATED)
    head = client.bytes_of("POST", "/v2/models/up/infer", b"").replace(b"content-length: 0", b"content-length: 999999")
    response = await client.exchange(head)
    assert (response.status, response.headers["connection"]) == (401, "close")
    way.service.deny = None
    expecting = head.replace(b"host:", b"expect: 100-continue\r\nhost:").replace(b"999999", b"2")
    reader, writer = await client.connect()
    writer.write(expecting)
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
    writer.close()


@pytest.mark.parametrize("way", ["rest"], indirect=True)
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
async def test_a14_rest_heads_that_lie(way: Way, head: bytes, status_: int) -> None:
    client = way.client()
    assert isinstance(client, RestClient)
    response = await client.exchange(head)
    assert response.status == status_, response.body
    assert response.json()["code"] == response.headers["shoal-code"]
    assert not way.service.requests


@pytest.mark.parametrize("way", ["rest"], indirect=True)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a14_rest_bodies_are_measured_as_they_expand(way: Way, encoding: str) -> None:
    client = way.client()
    assert isinstance(client, RestClient)
    text = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}).encode()
    bits = 31 if encoding == "gzip" else 15

    def packed(data: bytes) -> bytes:
        packer = zlib.compressobj(9, wbits=bits)
        return packer.compress(data) + packer.flush()

    said = {"content-encoding": encoding}
    fine = await client.asked("POST", "/v2/models/up/infer", packed(text), said)
    assert fine.json()["outputs"][0]["data"] == [1, 2]
    bomb = packed(text + b" " * (MAX_MESSAGE + 1))
    assert len(bomb) < MAX_MESSAGE // 900
    with pytest.raises(Failed) as failed:
        await client.asked("POST", "/v2/models/up/infer", bomb, said)
    assert (failed.value.status, failed.value.code) == (413, Code.TOO_LARGE)
    assert len(way.service.requests) == 1


@pytest.mark.parametrize("way", ["rest"], indirect=True)
async def test_rest_cuts_off_who_sends_too_slowly(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.agent.dataplane import rest

    monkeypatch.setattr(rest, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(rest, "BODY_GRACE_S", 0.2)
    client = way.client()
    assert isinstance(client, RestClient)
    for head in (
        b"GET /v2 HTTP/1.1\r\nho",
        b"POST /v2/models/up/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    ):
        response = await client.exchange(head, timeout=5)
        assert (response.status, response.json()["code"]) == (408, Code.TOO_SLOW)


@pytest.mark.parametrize("way", ["rest"], indirect=True)
async def test_rest_gives_the_name_in_the_path_as_it_was_meant(way: Way) -> None:
    client = way.client()
    assert isinstance(client, RestClient)
    body = b'{"inputs":[]}'
    await client.asked("POST", "/v2/models/a%2Fb%20c/versions/7/infer?x=1", body)
    asked = way.service.requests[-1]
    assert (asked.model_name, asked.model_version) == ("a/b c", "7")


def test_refused_is_a_refusal() -> None:
    assert isinstance(Refused(Refusal(Code.OVERLOADED)), ShoalError)
