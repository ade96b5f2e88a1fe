"""Inference through a gateway: the Open Inference Protocol over REST with binary tensors.

Any KServe or Triton client does as well; this one needs nothing but the standard library and numpy. (The gRPC stubs of
the protocol are left alone here, so that a foreign client can live in the same process.)
"""

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shoal.client.contexts import Context
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Wall
from shoal.wire.handshake import check_own, raise_fault

DTYPES: Final = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_NAMES: Final = {np.dtype(kind): name for name, kind in DTYPES.items()}

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """outputs by name; headers as the gateway sent them, names in lower case."""

    outputs: dict[str, NDArray[Any]]
    headers: dict[str, str]


class Inference:
    """One keep-alive connection to a gateway; not for use by two threads at once."""

    def __init__(self, context: Context, address: str = "", timeout_s: float = 30.0) -> None:
        self._context = context
        address = address or context.gateway_rest
        if not address:
            raise refuse(Code.CONTEXT_UNKNOWN, "no gateway is known", "host:port of a gateway", "pass --gateway")
        host, _, port = address.rpartition(":")
        trust = ssl.create_default_context(cafile=str(context.ca))
        trust.load_cert_chain(context.certificate, context.key)
        self._connection = http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=trust)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def metadata(self, model: str) -> dict[str, Any]:
        """Inputs and outputs as the protocol's model metadata. Raises ShoalError(MODEL_NOT_FOUND, ..)."""
        status, headers, body = self._exchange("GET", f"/v2/models/{model}", b"", {})
        if status != 200:
            raise ShoalError(_refusal(status, headers, body))
        return json.loads(body)  # type: ignore[no-any-return]

    def infer(self, model: str, inputs: Tensors, *, deadline_s: float | None = None, traceparent: str = "") -> Answer:
        """One request. traceparent: of the trace that it belongs to. Raises ShoalError with the gateway's code."""
        raw = {name: _to_bytes(value) for name, value in inputs.items()}
        head = {
            "inputs": [
                {
                    "name": name,
                    "shape": list(value.shape),
                    "datatype": _datatype(value),
                    "parameters": {"binary_data_size": len(raw[name])},
                }
                for name, value in inputs.items()
            ],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
        if deadline_s is not None:
            headers["shoal-deadline-ms"] = str(round(deadline_s * 1000))
        if traceparent:
            headers["traceparent"] = traceparent
        path = f"/v2/models/{model}/infer"
        status, reply_headers, body = self._exchange("POST", path, b"".join((text, *raw.values())), headers)
        if status != 200:
            raise ShoalError(_refusal(status, reply_headers, body))
        return Answer(_outputs(reply_headers, body), reply_headers)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            self._connection.request(method, path, body, {**headers, "shoal-tenant": self._context.tenant})
            reply = self._connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as cause:
            self._connection.close()
            address = f"{self._connection.host}:{self._connection.port}"
            check_own(self._context, Wall(time.time()))  # noqa: TID251 - a command's own clock
            if isinstance(cause, ssl.SSLError):
                raise_fault(cause, address)
            raise refuse(
                Code.REPLICA_UNREACHABLE, f"gateway {address}: {cause}", "an answer", "shoal dev status"
            ) from cause
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, content


def _datatype(value: NDArray[Any]) -> str:
    if value.dtype.kind in "OSU":
        return "BYTES"
    name = _NAMES.get(value.dtype)
    if name is None:
        raise refuse(Code.INVALID_ARGUMENT, f"dtype {value.dtype}", ", ".join((*DTYPES, "BYTES")), "convert the array")
    return name


def _to_bytes(value: NDArray[Any]) -> bytes:
    if _datatype(value) != "BYTES":
        return np.ascontiguousarray(value).tobytes()
    items = (item if isinstance(item, bytes) else str(item).encode() for item in value.ravel())
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


def _outputs(headers: Mapping[str, str], body: bytes) -> dict[str, NDArray[Any]]:
    split = int(headers.get("inference-header-content-length", len(body)))
    head, rest = json.loads(body[:split]), memoryview(body)[split:]
    found: dict[str, NDArray[Any]] = {}
    for tensor in head["outputs"]:
        shape = tensor["shape"]
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is None:
            kind = DTYPES.get(tensor["datatype"], object)
            found[tensor["name"]] = np.array(tensor["data"], kind).reshape(shape)
            continue
        part, rest = rest[:size], rest[size:]
        if tensor["datatype"] == "BYTES":
            found[tensor["name"]] = _strings(bytes(part)).reshape(shape)
        else:
            found[tensor["name"]] = np.frombuffer(part, DTYPES[tensor["datatype"]]).reshape(shape)
    return found


def _strings(data: bytes) -> NDArray[Any]:
    items, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return np.array(items, dtype=object)


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
    try:
        message = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    code = headers.get("shoal-code", "")
    if code in Code.__members__.values():
        # The body repeats the code in front of the message.
        return Refusal(Code(code), message.removeprefix(code).strip())
    return Refusal(Code.INTERNAL, f"HTTP {status}: {message}")
