"""What a benchmark needs of any server: how to ask it, which processes it has, whether it answers right."""

import http.client
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import numpy as np
from _serving.h2load import HttpRequest
from _serving.models import ServedModel
from _serving.processes import Roles
from numpy.typing import NDArray

from shoal.client.tensors import DTYPES
from shoal.inference import open_inference_pb2 as oip
from shoal.wire.limits import INFER_BYTES

SERVICE: Final = "inference.GRPCInferenceService"
CALL_S: Final = 30.0


class Protocol(Enum):
    GRPC = auto()
    """Open Inference Protocol over gRPC: tensors as bytes."""
    JSON = auto()
    """Open Inference Protocol over HTTP/1.1: tensors as numbers."""
    OWN_JSON = auto()
    """JSON of the server's own over HTTP/1.1: one tensor as numbers, both ways."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens for one protocol.

    url: scheme, host and port. roots: file of the CA to trust, for TLS. tls_name: the name in the server's certificate.
    """

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    roots: str = ""
    tls_name: str = ""

    @property
    def host_and_port(self) -> str:
        return urlsplit(self.url).netloc


@dataclass(slots=True)
class Server:
    """A running server."""

    # In tables and ratios; says whether it speaks TLS.
    name: str
    # Where it listens, by protocol.
    addresses: Mapping[Protocol, Address]
    # Its processes by role, now.
    processes: Callable[[], Roles]
    # Seconds from its start to its first right answer; None: not measured.
    start_s: float | None = None
    # More callers, each of a tenant of its own, that share a load of more calls than one may have.
    callers: tuple[tuple[tuple[str, str], ...], ...] = field(default=())
    # Headers of a tenant that has a quota, with which the server is flooded.
    flooder: tuple[tuple[str, str], ...] = ()


def ready_request(address: Address) -> HttpRequest:
    """ServerReady, which no model answers."""
    answer = oip.ServerReadyResponse(ready=True).SerializeToString()
    return HttpRequest(f"{address.url}/{SERVICE}/ServerReady", _grpc_headers(address), bytes(5), False, 5 + len(answer))


def infer_request(protocol: Protocol, address: Address, model: ServedModel) -> HttpRequest:
    match protocol:
        case Protocol.GRPC:
            url = f"{address.url}/{SERVICE}/ModelInfer"
            return HttpRequest(url, _grpc_headers(address), model.grpc_message(), False, model.answer_bytes)
        case Protocol.JSON:
            headers = (("content-type", "application/json"), *address.headers)
            return HttpRequest(f"{address.url}/v2/models/{model.name}/infer", headers, model.json_body(), True, 64)
        case Protocol.OWN_JSON:
            (value,) = model.inputs.values()
            headers = (("content-type", "application/json"), *address.headers)
            body = json.dumps({"x": value.ravel().tolist()}).encode()
            return HttpRequest(f"{address.url}/{model.name}", headers, body, True, 16)


def _grpc_headers(address: Address) -> tuple[tuple[str, str], ...]:
    return (("content-type", "application/grpc"), ("te", "trailers"), *address.headers)


def check_answer(server: Server, protocol: Protocol, model: ServedModel) -> None:
    """One request, whose answer must be ONNX Runtime's. Raises ValueError, OSError, grpc.RpcError."""
    address = server.addresses[protocol]
    request = infer_request(protocol, address, model)
    found = _ask_grpc(address, request) if protocol is Protocol.GRPC else _ask_http(address, request, protocol)
    expected = list(model.outputs.items())
    if len(found) != len(expected):
        raise ValueError(f"{server.name} {model.name}: {len(found)} outputs, not {len(expected)}")
    for value, (name, right) in zip(found, expected, strict=True):
        if not np.allclose(value.reshape(right.shape), right, rtol=1e-5, atol=1e-6):
            raise ValueError(f"{server.name} {model.name}: another {name} than ONNX Runtime's")


def _ask_grpc(address: Address, request: HttpRequest) -> list[NDArray[Any]]:
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", INFER_BYTES),
        ("grpc.max_send_message_length", INFER_BYTES),
    ]
    if address.roots:
        credentials = grpc.ssl_channel_credentials(Path(address.roots).read_bytes())
        options.append(("grpc.ssl_target_name_override", address.tls_name))
        channel = grpc.secure_channel(address.host_and_port, credentials, options)
    else:
        channel = grpc.insecure_channel(address.host_and_port, options)
    with channel:
        call = channel.unary_unary(
            urlsplit(request.url).path, request_serializer=None, response_deserializer=oip.ModelInferResponse.FromString
        )
        answer = call(request.body[5:], timeout=CALL_S, metadata=address.headers)
    if not answer.raw_output_contents:  # MLServer puts numbers into the message
        return [np.array(output.contents.fp32_contents, np.float32) for output in answer.outputs]
    return [
        np.frombuffer(raw, DTYPES[output.datatype])
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    ]


def _ask_http(address: Address, request: HttpRequest, protocol: Protocol) -> list[NDArray[Any]]:
    parts = urlsplit(request.url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        trust = ssl.create_default_context(cafile=address.roots)
        trust.check_hostname = False  # names of certificates are those of a region, not of this machine
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=CALL_S, context=trust
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CALL_S)
    try:
        connection.request("POST", parts.path, request.body, dict(request.headers))
        reply = connection.getresponse()
        body = reply.read()
    finally:
        connection.close()
    if reply.status != 200:
        raise ValueError(f"HTTP {reply.status}: {body[:200]!r}")
    outputs = json.loads(body)
    if protocol is Protocol.OWN_JSON:
        return [np.array(outputs["y"], np.float32)]
    return [np.array(output["data"], DTYPES[output["datatype"]]) for output in outputs["outputs"]]
