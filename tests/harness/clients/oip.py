"""Clients of the Open Inference Protocol for tests: one over gRPC, one over HTTP, with the same methods."""

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import h11

from harness.crypto.pki import CertificateFiles
from shoal.inference import open_inference_pb2 as oip

SERVICE = "inference.GRPCInferenceService"
Metadata = Mapping[str, str]
"""Metadata or headers."""
NOTHING: Metadata = {}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    id: str
    outputs: tuple[Tensor, ...]


class InferenceError(Exception):
    """status: gRPC's by name, HTTP's by number. code: Shoal's; empty if the transport itself refused."""

    def __init__(self, status: str | int, code: str, retry_after_ms: str, text: str) -> None:
        super().__init__(f"{status} {code} {text}")
        self.status = status
        self.code = code
        self.retry_after_ms = retry_after_ms


class OipClient(Protocol):
    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        *,
        request_id: str = "",
        extra_metadata: Metadata = NOTHING,
        timeout: float = 20.0,
    ) -> Answer: ...
    async def live(self) -> bool: ...
    async def ready(self) -> bool: ...
    async def model_ready(self, model: str) -> bool: ...
    async def model(self, model: str) -> dict[str, Any]: ...
    async def server(self) -> dict[str, Any]: ...
    async def index(self, ready: bool = False) -> list[dict[str, str]]: ...
    async def load(self, model: str) -> None: ...
    async def close(self) -> None: ...


def infer_request(model: str, inputs: Sequence[Tensor], request_id: str = "") -> oip.ModelInferRequest:
    return oip.ModelInferRequest(
        model_name=model,
        id=request_id,
        inputs=[
            oip.ModelInferRequest.InferInputTensor(name=t.name, datatype=t.datatype, shape=t.shape) for t in inputs
        ],
        raw_input_contents=[t.raw for t in inputs],
    )


def step_request(
    model: str, inputs: Sequence[Tensor], sequence: int | str, *, start: bool = False, end: bool = False, step: int = 0
) -> oip.ModelInferRequest:
    """One step of a session, as a client of the protocol sends it. step: its number; 0: steps are not numbered."""
    request = infer_request(model, inputs)
    if isinstance(sequence, int):
        request.parameters["sequence_id"].int64_param = sequence
    else:
        request.parameters["sequence_id"].string_param = sequence
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    if step:
        request.parameters["sequence_step"].int64_param = step
    return request


class GrpcClient:
    """files: for a client certificate; authority alone with `bearer`."""

    def __init__(
        self,
        port: int,
        authority: bytes,
        files: CertificateFiles | None = None,
        bearer: str = "",
        server_name: str = "localhost",
        host: str = "127.0.0.1",
    ) -> None:
        certificate, key = (files.certificate.read_bytes(), files.key.read_bytes()) if files else (None, None)
        self.channel = grpc.aio.secure_channel(
            f"{host}:{port}",
            grpc.ssl_channel_credentials(authority, key, certificate),
            (
                ("grpc.ssl_target_name_override", server_name),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        self.default_metadata: dict[str, str] = {"authorization": f"Bearer {bearer}"} if bearer else {}

    async def call(
        self,
        method: str,
        request: bytes,
        extra_metadata: Metadata = NOTHING,
        timeout: float | None = 20.0,
        **options: Any,
    ) -> bytes:
        try:
            metadata = tuple({**self.default_metadata, **extra_metadata}.items())
            call = self.channel.unary_unary(f"/{SERVICE}/{method}", None, None)
            answer: bytes = await call(request, metadata=metadata, timeout=timeout, **options)
            return answer
        except grpc.aio.AioRpcError as error:
            trailing: Any = error.trailing_metadata() or ()
            found = {key: value for key, value in trailing if isinstance(value, str)}
            raise InferenceError(
                error.code().name, found.get("shoal-code", ""), found.get("retry-after-ms", ""), error.details() or ""
            ) from error

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        *,
        request_id: str = "",
        extra_metadata: Metadata = NOTHING,
        timeout: float = 20.0,
    ) -> Answer:
        return await self.send(infer_request(model, inputs, request_id), extra_metadata=extra_metadata, timeout=timeout)

    async def send(
        self, request: oip.ModelInferRequest, *, extra_metadata: Metadata = NOTHING, timeout: float = 20.0
    ) -> Answer:
        sent = request.SerializeToString()
        answer = oip.ModelInferResponse.FromString(await self.call("ModelInfer", sent, extra_metadata, timeout))
        return Answer(
            answer.model_name,
            answer.id,
            tuple(
                Tensor(t.name, t.datatype, tuple(t.shape), raw)
                for t, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
            ),
        )

    async def live(self) -> bool:
        return oip.ServerLiveResponse.FromString(await self.call("ServerLive", b"")).live

    async def ready(self) -> bool:
        return oip.ServerReadyResponse.FromString(await self.call("ServerReady", b"")).ready

    async def model_ready(self, model: str) -> bool:
        request = oip.ModelReadyRequest(name=model).SerializeToString()
        return oip.ModelReadyResponse.FromString(await self.call("ModelReady", request)).ready

    async def model(self, model: str) -> dict[str, Any]:
        request = oip.ModelMetadataRequest(name=model).SerializeToString()
        said = oip.ModelMetadataResponse.FromString(await self.call("ModelMetadata", request))
        rows = {
            side: [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in getattr(said, side)]
            for side in ("inputs", "outputs")
        }
        return {"name": said.name, "versions": list(said.versions), "platform": said.platform, **rows}

    async def server(self) -> dict[str, Any]:
        said = oip.ServerMetadataResponse.FromString(await self.call("ServerMetadata", b""))
        return {"name": said.name, "version": said.version, "extensions": list(said.extensions)}

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        request = oip.RepositoryIndexRequest(ready=ready).SerializeToString()
        said = oip.RepositoryIndexResponse.FromString(await self.call("RepositoryIndex", request))
        return [{"name": m.name, "version": m.version, "state": m.state, "reason": m.reason} for m in said.models]

    async def load(self, model: str) -> None:
        await self.call("RepositoryModelLoad", oip.RepositoryModelLoadRequest(model_name=model).SerializeToString())

    async def close(self) -> None:
        await self.channel.close(None)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class RestClient:
    """Opens a connection for each request; `exchange` sends arbitrary bytes."""

    # On loopback.
    port: int
    # PEM of the CA that the server's certificate must chain to.
    authority: bytes
    # Client certificate; None: none is presented.
    files: CertificateFiles | None = None
    # Bearer token; empty: none is sent.
    bearer: str = ""
    # Headers of every request.
    default_metadata: dict[str, str] = field(default_factory=dict)

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority.decode())
        if self.files is not None:
            context.load_cert_chain(self.files.certificate, self.files.key)
        return context

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.context(), server_hostname="localhost", limit=2**20
        )

    async def exchange(self, sent: bytes, timeout: float = 20.0) -> Response:
        """Send bytes, read one response. Raises OSError or EOFError if the server hangs up without one."""
        async with asyncio.timeout(timeout):
            reader, writer = await self.connect()
            try:
                writer.write(sent)
                return await read_response(reader)
            finally:
                writer.close()

    async def request(
        self, method: str, path: str, body: bytes = b"", extra_metadata: Metadata = NOTHING, timeout: float = 20.0
    ) -> Response:
        return await self.exchange(self.request_bytes(method, path, body, extra_metadata), timeout)

    def request_bytes(self, method: str, path: str, body: bytes = b"", extra_metadata: Metadata = NOTHING) -> bytes:
        headers = {"host": "localhost", "content-length": str(len(body)), **self.default_metadata, **extra_metadata}
        if self.bearer:
            headers["authorization"] = f"Bearer {self.bearer}"
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def checked_request(
        self, method: str, path: str, body: bytes = b"", extra_metadata: Metadata = NOTHING
    ) -> Response:
        """As `request`. Raises InferenceError for a status of 400 or more."""
        response = await self.request(method, path, body, extra_metadata)
        if response.status >= 400:
            raise error_of(response)
        return response

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        *,
        request_id: str = "",
        extra_metadata: Metadata = NOTHING,
        timeout: float = 20.0,
    ) -> Answer:
        rows = [
            {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": len(t.raw)}}
            for t in inputs
        ]
        document: dict[str, Any] = {"inputs": rows, "parameters": {"binary_data_output": True}}
        if request_id:
            document["id"] = request_id
        text = json.dumps(document).encode()
        body = b"".join((text, *(t.raw for t in inputs)))
        headers = {"inference-header-content-length": str(len(text)), **extra_metadata}
        response = await self.checked_request("POST", f"/v2/models/{model}/infer", body, headers)
        split = int(response.headers["inference-header-content-length"])
        found = json.loads(response.body[:split])
        outputs, offset = [], split
        for row in found["outputs"]:
            size = row["parameters"]["binary_data_size"]
            raw = response.body[offset : offset + size]
            outputs.append(Tensor(row["name"], row["datatype"], tuple(row["shape"]), raw))
            offset += size
        assert offset == len(response.body)
        return Answer(found["model_name"], found.get("id", ""), tuple(outputs))

    async def live(self) -> bool:
        return bool((await self.checked_request("GET", "/v2/health/live")).json()["live"])

    async def ready(self) -> bool:
        return await self._ready("/v2/health/ready")

    async def model_ready(self, model: str) -> bool:
        return await self._ready(f"/v2/models/{model}/ready")

    async def _ready(self, path: str) -> bool:
        response = await self.request("GET", path)
        if "ready" not in response.json():
            raise error_of(response)
        assert response.json()["ready"] is (response.status == 200)
        return response.status == 200

    async def model(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.checked_request("GET", f"/v2/models/{model}")).json()
        return found

    async def server(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.checked_request("GET", "/v2")).json()
        return found

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        body = json.dumps({"ready": ready}).encode()
        found: list[dict[str, str]] = (await self.checked_request("POST", "/v2/repository/index", body)).json()
        return found

    async def load(self, model: str) -> None:
        await self.checked_request("POST", f"/v2/repository/models/{model}/load", b"{}")

    async def close(self) -> None:
        pass


def error_of(response: Response) -> InferenceError:
    code, retry = response.headers.get("shoal-code", ""), response.headers.get("retry-after-ms", "")
    return InferenceError(response.status, code, retry, response.body.decode())


async def read_response(reader: asyncio.StreamReader) -> Response:
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    http.send(h11.EndOfMessage())
    response: h11.Response | None = None
    body = []
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(2**18)
            if not data and response is None:
                raise EOFError
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            assert response is not None
            headers = {name.decode(): value.decode() for name, value in response.headers}
            return Response(response.status_code, headers, b"".join(body))
