"""Inference through a gateway: the Open Inference Protocol over REST with binary tensors, for programs without asyncio.

Any KServe or Triton client works as well; this one needs only the standard library and numpy. It does not import the
protocol's gRPC stubs, so that a foreign client can live in the same process. `async_inference` is its counterpart over
gRPC, with streams.
"""

import http.client
import json
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shoal.client.contexts import Context
from shoal.client.pem_files import load_pair
from shoal.client.retries import RETRIES, FailedCall, retry_delay_s
from shoal.client.tensors import (
    DTYPES,
    InferenceResult,
    ModelMetadata,
    Parameters,
    Tensors,
    TensorSpec,
    datatype_of,
    from_raw,
    plain_parameter,
    to_raw,
    unreadable_answer,
)
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Wall
from shoal.wire import status
from shoal.wire.handshake import check_own, raise_fault

_READ_BYTES: Final = 2**20
SLACK_S: Final = 1.0
"""Seconds beyond a deadline for the refusal that names it to arrive."""


class InferenceClient:
    """One keep-alive connection to a gateway, made anew where the gateway closed it; not safe for concurrent use by two
    threads.

    `retries`: how often a call is repeated that the server says may be repeated (it names a time, as with OVERLOADED),
    or that never reached it.
    """

    def __init__(self, context: Context, address: str = "", *, timeout_s: float = 30.0, retries: int = RETRIES) -> None:
        """address: host:port; by default the context's gateway. timeout_s: of calls without a deadline of their own.
        Raises ShoalError(CONTEXT_UNKNOWN)."""
        self._context = context
        self._timeout_s = timeout_s
        self._retries = retries
        self._name = secrets.token_hex(4)
        address = address or context.gateway
        if not address:
            raise refuse(Code.CONTEXT_UNKNOWN, "no gateway is known", "host:port of a gateway", "pass --gateway")
        gateway = HostPort.parse(address, "gateway")
        trust = ssl.create_default_context(cafile=str(context.ca))
        load_pair(trust, context)
        self._connection = http.client.HTTPSConnection(gateway.host, gateway.port, timeout=timeout_s, context=trust)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def metadata(self, model: str) -> ModelMetadata:
        """Raises ShoalError(MODEL_NOT_FOUND, ..)."""
        _, body = self._call("GET", f"/v2/models/{model}", b"", {}, None, is_step=False)
        with _refuse_unreadable():
            described = json.loads(body)
            return ModelMetadata(_specs(described["inputs"]), _specs(described["outputs"]))

    def infer(
        self,
        model: str,
        inputs: Tensors,
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        datatypes: Mapping[str, str] | None = None,
        parameters: Parameters | None = None,
    ) -> InferenceResult:
        """One request. Raises ShoalError with the gateway's code. `AsyncInferenceClient.infer` takes the same.

        deadline_s: for the whole, with all repetitions. traceparent: of the trace that the request belongs to.
        datatypes: of inputs whose array does not determine it, since numpy has no BF16 (see `tensors.bfloat16`).
        parameters: of the request, such as `sequence_id`.
        """
        known = {name: datatype_of(value, (datatypes or {}).get(name, "")) for name, value in inputs.items()}
        raw = {name: to_raw(value, known[name], name) for name, value in inputs.items()}
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
            "parameters": {
                **{name: plain_parameter(name, value) for name, value in (parameters or {}).items()},
                "binary_data_output": True,
            },
        }
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
        if traceparent:
            headers["traceparent"] = traceparent
        is_step = "sequence_id" in (parameters or {})
        body = b"".join((text, *raw.values()))
        said, answer = self._call("POST", f"/v2/models/{model}/infer", body, headers, deadline_s, is_step=is_step)
        with _refuse_unreadable():
            outputs, told = _outputs(said, answer)
        return InferenceResult(outputs, said, told)

    def _call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        deadline_s: float | None,
        *,
        is_step: bool,
    ) -> tuple[dict[str, str], bytes]:
        """Headers and body of the answer. Raises ShoalError."""
        end = time.monotonic() + (self._timeout_s if deadline_s is None else deadline_s)  # noqa: TID251 - its deadline
        attempt = 0
        while True:
            left_s = max(0.0, end - time.monotonic())  # noqa: TID251
            asked = dict(headers)
            if deadline_s is not None:
                asked["shoal-deadline-ms"] = str(max(1, round(left_s * 1000)))
            try:
                code, said, answer = self._exchange(method, path, body, asked, left_s + SLACK_S)
            except _NotSent as error:
                failed, cause = FailedCall(error.refusal, was_sent=False), error.__cause__
            else:
                if code == 200:
                    return said, answer
                failed, cause = FailedCall(_refusal(code, said, answer), status.retry_after_of(said.items())), None
            left_s = end - time.monotonic()  # noqa: TID251
            wait_s = retry_delay_s(failed, attempt, self._retries, left_s, is_step=is_step, client=self._name)
            if wait_s is None:
                raise ShoalError(failed.refusal) from cause
            attempt += 1
            time.sleep(wait_s)  # noqa: TID251 - as long as the server says

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, dict[str, str], bytes]:
        """timeout_s: for all of it. Raises ShoalError; _NotSent where no connection could be made."""
        connection, end = self._connection, time.monotonic() + timeout_s  # noqa: TID251 - its deadline
        if connection.sock is not None and _is_over(connection.sock):
            connection.close()
        is_open = connection.sock is not None
        try:
            connection.timeout = timeout_s
            if connection.sock is None:
                connection.connect()
                is_open = True
            own = connection.sock
            assert own is not None
            own.settimeout(_left_s(end))
            connection.request(method, path, body, {**headers, "shoal-tenant": self._context.tenant})
            own.settimeout(_left_s(end))
            reply = connection.getresponse()
            parts = list[bytes]()
            while reply.length != 0 and not reply.isclosed():
                own.settimeout(_left_s(end))  # a part each, since a socket's time begins anew with each call of it
                parts.append(reply.read1(_READ_BYTES))
            if reply.length:
                raise http.client.IncompleteRead(b"", reply.length)
            reply.read()  # nothing: the connection is free for the next request
            content = b"".join(parts)
        except (OSError, http.client.HTTPException) as cause:
            connection.close()
            address = str(HostPort(connection.host, connection.port))
            check_own(self._context, Wall(time.time()))  # noqa: TID251 - a command's own clock
            if isinstance(cause, TimeoutError) and is_open:
                found = f"no whole answer of gateway {address} in {timeout_s:.3g}s"
                raise refuse(Code.DEADLINE_EXCEEDED, found, "an answer", "allow more time") from cause
            if isinstance(cause, ssl.SSLError):
                raise_fault(cause, address)
            refusal = Refusal(Code.REPLICA_UNREACHABLE, f"gateway {address}: {cause}", "an answer", "shoal dev status")
            raise (ShoalError(refusal) if is_open else _NotSent(refusal)) from cause
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, content


def _left_s(end: float) -> float:
    """Raises TimeoutError."""
    if (left_s := end - time.monotonic()) <= 0:  # noqa: TID251 - a call's deadline
        raise TimeoutError("timed out")
    return left_s


@contextmanager
def _refuse_unreadable() -> Iterator[None]:
    """Around what reads an answer. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as cause:
        found = f"an answer that cannot be read: {type(cause).__name__}: {cause!s:.200}"
        raise unreadable_answer(found) from cause


def _is_over(kept: socket.socket) -> bool:
    """Whether the server closed a connection on which every answer was read: nothing else can be there to be read."""
    with selectors.DefaultSelector() as selector:
        selector.register(kept, selectors.EVENT_READ)
        return bool(selector.select(0))


class _NotSent(ShoalError):
    """The call never reached its server."""


def _specs(tensors: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    """The part of the protocol's model metadata that describes inputs or outputs."""
    return tuple(TensorSpec(each["name"], each["datatype"], tuple(map(int, each["shape"]))) for each in tensors)


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
        found[tensor["name"]] = from_raw(part, tensor["datatype"], shape)
    return found, {tensor["name"]: tensor["datatype"] for tensor in head["outputs"]}


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
    try:
        message = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    code = headers.get("shoal-code", "")
    if code in Code.__members__.values():
        return Refusal.parse(message, Code(code))
    return Refusal(Code.INTERNAL, f"HTTP {status}: {message}")
