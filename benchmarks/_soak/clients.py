"""Unmodified clients of a front, each asked in the same way.

Every one has `infer` and two have `stream`; all raise CallFailedError. They run without Shoal's stubs, which share a
proto package with tritonclient's.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp
import grpc
from numpy.typing import NDArray
from tritonclient.grpc import aio as triton_grpc
from tritonclient.http import aio as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from shoal.client import AsyncInferenceClient, Context, InferenceClient
from shoal.http2.grpc_messages import GrpcStatus
from shoal.types.codes import Code, ShoalError
from shoal.wire.status import grpc_status

ATTEMPT_S: Final = 30.0
"""Seconds for one attempt without a deadline of its own."""
BROKEN: Final = "BROKEN"
"""Where a connection ended, or none could be made: no front has said anything."""

Arrays = Mapping[str, NDArray[Any]]


class CallFailedError(Exception):
    """One attempt failed. may_repeat: its client may send the same again."""

    def __init__(self, code: str, words: str = "", *, may_repeat: bool) -> None:
        super().__init__(f"{code}: {words}")
        self.code = code
        self.may_repeat = may_repeat


@dataclass(frozen=True, slots=True)
class Door:
    """A front, and who calls it."""

    # host:port.
    address: str
    # The caller's files, and the region.
    context: Context
    # A bearer token in place of the caller's certificate; empty: none.
    bearer: str = ""


class Client(Protocol):
    """Tensors in and out by name. deadline_s: that the server is told. options: of the protocol's parameters."""

    async def infer(
        self, model: str, inputs: Arrays, *, deadline_s: float | None = None, options: Mapping[str, Any] | None = None
    ) -> Arrays: ...

    async def close(self) -> None: ...


class StreamClient(Client, Protocol):
    def stream(self, model: str, requests: Sequence[Arrays]) -> AsyncIterator[Arrays]:
        """Answers, in the order of the requests."""
        ...


@dataclass(slots=True)
class TritonGrpc:
    door: Door
    _client: Any = field(init=False)

    def __post_init__(self) -> None:
        context, own = self.door.context, not self.door.bearer
        self._client = triton_grpc.InferenceServerClient(
            self.door.address,
            ssl=True,
            root_certificates=str(context.ca),
            private_key=str(context.key) if own else None,
            certificate_chain=str(context.certificate) if own else None,
            channel_args=[
                ("grpc.ssl_target_name_override", "localhost"),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )

    async def infer(
        self, model: str, inputs: Arrays, *, deadline_s: float | None = None, options: Mapping[str, Any] | None = None
    ) -> Arrays:
        limit_s = ATTEMPT_S if deadline_s is None else deadline_s
        try:
            result = await self._client.infer(
                model,
                _tensors(triton_grpc, inputs),
                client_timeout=limit_s,
                headers=_headers(self.door),
                **options or {},
            )
        except InferenceServerException as error:
            raise _failed(error) from error
        return _of_grpc(result)

    async def stream(self, model: str, requests: Sequence[Arrays]) -> AsyncIterator[Arrays]:
        async def messages() -> AsyncIterator[dict[str, Any]]:
            for inputs in requests:
                yield {"model_name": model, "inputs": _tensors(triton_grpc, inputs)}

        answers = self._client.stream_infer(messages(), stream_timeout=ATTEMPT_S, headers=_headers(self.door))
        try:
            async for result, error in answers:
                if error is not None:
                    raise _failed(error)
                yield _of_grpc(result)
        except grpc.RpcError as error:
            raise _failed(error) from error
        finally:
            answers.cancel()

    async def close(self) -> None:
        await self._client.close()


@dataclass(slots=True)
class TritonRest:
    """json_outputs: of each model, whose tensors then are numbers, both ways; None: bytes after the JSON."""

    door: Door
    json_outputs: Mapping[str, Sequence[str]] | None = None
    _client: Any = field(init=False)

    def __post_init__(self) -> None:
        trust = ssl.create_default_context(cafile=str(self.door.context.ca))
        trust.check_hostname = False  # the certificate is for localhost
        trust.load_cert_chain(self.door.context.certificate, self.door.context.key)
        self._client = triton_http.InferenceServerClient(
            self.door.address, ssl=True, ssl_context=trust, conn_timeout=ATTEMPT_S
        )

    async def infer(
        self, model: str, inputs: Arrays, *, deadline_s: float | None = None, options: Mapping[str, Any] | None = None
    ) -> Arrays:
        headers = {} if deadline_s is None else {"shoal-deadline-ms": str(max(1, round(1e3 * deadline_s)))}
        names = self.json_outputs
        outputs = names and [triton_http.InferRequestedOutput(each, binary_data=False) for each in names[model]]
        try:
            tensors = _tensors(triton_http, inputs, binary_data=names is None)
            result = await self._client.infer(model, tensors, outputs=outputs, headers=headers, **options or {})
        except InferenceServerException as error:
            raise _failed(error) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CallFailedError(BROKEN, repr(error), may_repeat=True) from error
        return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}

    async def close(self) -> None:
        await self._client.close()


@dataclass(slots=True)
class ShoalGrpc:
    door: Door
    _client: AsyncInferenceClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = AsyncInferenceClient(self.door.context, self.door.address, timeout_s=ATTEMPT_S)

    async def infer(
        self, model: str, inputs: Arrays, *, deadline_s: float | None = None, options: Mapping[str, Any] | None = None
    ) -> Arrays:
        try:
            return (await self._client.infer(model, inputs, deadline_s=deadline_s, parameters=options)).outputs
        except ShoalError as error:
            raise _refused(error.code, str(error)) from error

    async def stream(self, model: str, requests: Sequence[Arrays]) -> AsyncIterator[Arrays]:
        try:
            async with aclosing(self._client.infer_stream(model, requests)) as answers:
                async for answer in answers:
                    yield answer.outputs
        except ShoalError as error:
            raise _refused(error.code, str(error)) from error

    async def close(self) -> None:
        await self._client.close()


@dataclass(slots=True)
class ShoalRest:
    """The client without asyncio: one request at a time, on a thread."""

    door: Door
    _client: InferenceClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = InferenceClient(self.door.context, self.door.address, timeout_s=ATTEMPT_S)

    async def infer(
        self, model: str, inputs: Arrays, *, deadline_s: float | None = None, options: Mapping[str, Any] | None = None
    ) -> Arrays:
        try:
            answer = await asyncio.to_thread(
                self._client.infer, model, inputs, deadline_s=deadline_s, parameters=options
            )
        except ShoalError as error:
            raise _refused(error.code, str(error)) from error
        return answer.outputs

    async def close(self) -> None:
        self._client.close()


def _tensors(triton: Any, inputs: Arrays, **options: Any) -> list[Any]:
    found = list[Any]()
    for name, value in inputs.items():
        tensor = triton.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value, **options)
        found.append(tensor)
    return found


def _headers(door: Door) -> dict[str, str] | None:
    return {"authorization": f"Bearer {door.bearer}"} if door.bearer else None


def _of_grpc(result: Any) -> Arrays:
    return {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}


def _failed(error: Any) -> CallFailedError:
    """error: InferenceServerException or grpc.aio.AioRpcError. A refusal's words end with its code."""
    if isinstance(error, grpc.RpcError):
        words, status = str(error.details()), str(error.code())
    else:
        words, status = str(error.message()), str(error.status() or "")
    code = words.strip().rpartition("(")[2].removesuffix(")")
    if code in Code.__members__.values():
        return _refused(Code(code), words)
    name = status.removeprefix("StatusCode.")
    if name in ("DEADLINE_EXCEEDED", "CANCELLED"):  # the client's own
        return CallFailedError(name, words, may_repeat=True)
    return CallFailedError(BROKEN, f"{name} {words}", may_repeat=True)


def _refused(code: Code, words: str) -> CallFailedError:
    """What passes may be repeated: gRPC's UNAVAILABLE."""
    return CallFailedError(str(code), words, may_repeat=grpc_status(code) is GrpcStatus.UNAVAILABLE)
