"""Inference through a gateway: the Open Inference Protocol over REST with binary tensors.

Any KServe or Triton client works as well; this one needs only the standard library and numpy. It does not import the
protocol's gRPC stubs, so that a foreign client can live in the same process.
"""

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shoal.client.contexts import Context
from shoal.types.address import HostPort
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
BF16: Final = "BF16"
_NAMES: Final = {np.dtype(kind): name for name, kind in DTYPES.items()}

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """outputs: by name. headers: as the gateway sent them, names in lower case."""

    outputs: dict[str, NDArray[Any]]
    headers: dict[str, str]
    datatypes: dict[str, str] = field(default_factory=dict)
    """By output, in the protocol's names. BF16 becomes float32, which holds each of its values exactly."""


class InferenceClient:
    """One keep-alive connection to a gateway; not safe for concurrent use by two threads."""

    def __init__(self, context: Context, address: str = "", timeout_s: float = 30.0) -> None:
        self._context = context
        address = address or context.gateway
        if not address:
            raise refuse(Code.CONTEXT_UNKNOWN, "no gateway is known", "host:port of a gateway", "pass --gateway")
        gateway = HostPort.parse(address, "gateway")
        trust = ssl.create_default_context(cafile=str(context.ca))
        trust.load_cert_chain(context.certificate, context.key)
        self._connection = http.client.HTTPSConnection(gateway.host, gateway.port, timeout=timeout_s, context=trust)

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

    def infer(
        self,
        model: str,
        inputs: Tensors,
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, str | int | bool] | None = None,
    ) -> InferenceResult:
        """Send one request. Raises ShoalError with the gateway's code.

        traceparent: of the trace that the request belongs to. datatypes: of inputs whose array does not determine it,
        since numpy has no BF16 (see `bfloat16`). parameters: of the request, such as `sequence_id`.
        """
        known = {name: _datatype(value, (datatypes or {}).get(name, "")) for name, value in inputs.items()}
        raw = {name: _to_bytes(value, known[name], name) for name, value in inputs.items()}
        head = {
            "inputs": [
                {
                    "name": name,
                    "shape": list(value.shape),
                    "datatype": known[name],
                    "parameters": {"binary_data_size": len(raw[name])},
                }
                for name, value in inputs.items()
            ],
            "parameters": {**(parameters or {}), "binary_data_output": True},
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
        outputs, told = _outputs(reply_headers, body)
        return InferenceResult(outputs, reply_headers, told)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            self._connection.request(method, path, body, {**headers, "shoal-tenant": self._context.tenant})
            reply = self._connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as cause:
            self._connection.close()
            address = str(HostPort(self._connection.host, self._connection.port))
            check_own(self._context, Wall(time.time()))  # noqa: TID251 - a command's own clock
            if isinstance(cause, ssl.SSLError):
                raise_fault(cause, address)
            raise refuse(
                Code.REPLICA_UNREACHABLE, f"gateway {address}: {cause}", "an answer", "shoal dev status"
            ) from cause
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, content


def _datatype(value: NDArray[Any], declared: str) -> str:
    if declared == BF16:
        return declared
    if value.dtype.kind in "OSU":
        return "BYTES"
    name = _NAMES.get(value.dtype)
    if name is None:
        asked = ", ".join((*DTYPES, "BYTES", BF16))
        raise refuse(Code.INVALID_ARGUMENT, f"dtype {value.dtype}", asked, "convert the array")
    return name


def _to_bytes(value: NDArray[Any], datatype: str, name: str) -> bytes:
    if datatype == BF16:
        return bfloat16(value, name).tobytes()
    if datatype != "BYTES":
        return np.ascontiguousarray(value).tobytes()
    items = (item if isinstance(item, bytes) else str(item).encode() for item in value.ravel())
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


def bfloat16(value: NDArray[Any], name: str) -> NDArray[np.uint16]:
    """The bits of BF16 values. value: the bits themselves (uint16, or the two-byte values that numpy reads of what
    ml_dtypes wrote), or floats that are exact in BF16. Raises ShoalError(INVALID_ARGUMENT)."""
    plain = np.ascontiguousarray(value)
    if plain.dtype == np.uint16 or (plain.dtype.kind == "V" and plain.dtype.itemsize == 2):
        return plain.view(np.uint16).reshape(value.shape)
    if plain.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            wide = plain.astype(np.float32)
        bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
        if np.array_equal(float32(bits), plain, equal_nan=plain.dtype.kind == "f"):
            return bits.reshape(value.shape)
    found = f"input {name!r:.80}: {plain.dtype} that BF16 does not hold exactly"
    remedy = "round it yourself: send the upper two bytes of each float32 as uint16, or what ml_dtypes' bfloat16 gives"
    raise refuse(Code.INVALID_ARGUMENT, found, "BF16", remedy)


def float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _outputs(headers: Mapping[str, str], body: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
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
        elif tensor["datatype"] == BF16:
            found[tensor["name"]] = float32(np.frombuffer(part, np.uint16)).reshape(shape)
        else:
            found[tensor["name"]] = np.frombuffer(part, DTYPES[tensor["datatype"]]).reshape(shape)
    return found, {tensor["name"]: tensor["datatype"] for tensor in head["outputs"]}


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
        return Refusal.parse(message, Code(code))
    return Refusal(Code.INTERNAL, f"HTTP {status}: {message}")
