"""Inference through a gateway over gRPC, for programs on asyncio: many requests at once over one connection."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Final, Self

from shoal.client.contexts import Context
from shoal.client.grpc_messages import (
    decode_metadata,
    decode_response,
    decode_stream_response,
    encode_metadata_request,
    encode_request,
)
from shoal.client.retries import RETRIES, FailedCall, retry_delay_s
from shoal.client.tensors import InferenceResult, ModelMetadata, Parameters, Tensors
from shoal.host.grpc_client import ANSWER_WINDOW_BYTES, CallError, ChannelClosed, ClientCall, GrpcChannel
from shoal.host.tls import client_context
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.wire import limits, status

AHEAD: Final = 8
"""Requests of a stream that are sent before their turn: enough to hide a round trip behind them."""
_SERVICE: Final = "/inference.GRPCInferenceService"
_TENANT_KEY: Final = "shoal-tenant"


class AsyncInferenceClient:
    """Calls of one event loop to one gateway, or to an agent's front.

    It connects when it is first used, and again after the connection broke. `retries`: how often a call is repeated
    that the server says may be repeated (it names a time, as with OVERLOADED), or that never reached it.
    """

    def __init__(self, context: Context, address: str = "", *, timeout_s: float = 30.0, retries: int = RETRIES) -> None:
        """address: host:port; by default the context's gateway. timeout_s: of calls without a deadline of their own.
        Raises ShoalError(CONTEXT_UNKNOWN)."""
        address = address or context.gateway
        if not address:
            raise refuse(Code.CONTEXT_UNKNOWN, "no gateway is known", "host:port of a gateway", "pass --gateway")
        self._address = HostPort.parse(address, "gateway")
        self._timeout_s = timeout_s
        self._retries = retries
        self._tenant = context.tenant
        self._name = secrets.token_hex(4)
        self._channel = GrpcChannel(
            address,
            self._address.host,
            lambda: client_context(context.ca, context.certificate, context.key),
            limits.BULK,
            limits.INFER_BYTES,
            answer_window=ANSWER_WINDOW_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends calls in flight. Idempotent."""
        await self._channel.close()

    async def metadata(self, model: str) -> ModelMetadata:
        """Raises ShoalError(MODEL_NOT_FOUND, ..)."""
        return decode_metadata(
            await self._call("ModelMetadata", encode_metadata_request(model), self._timeout_s, (), is_step=False)
        )

    async def infer(
        self,
        model: str,
        inputs: Tensors,
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        datatypes: Mapping[str, str] | None = None,
        parameters: Parameters | None = None,
    ) -> InferenceResult:
        """As `InferenceClient.infer`."""
        message = encode_request(model, inputs, datatypes, parameters)
        metadata = (("traceparent", traceparent),) if traceparent else ()
        is_step = "sequence_id" in (parameters or {})
        left_s = self._timeout_s if deadline_s is None else deadline_s
        return decode_response(await self._call("ModelInfer", message, left_s, metadata, is_step=is_step))

    async def infer_stream(
        self,
        model: str,
        requests: Iterable[Tensors] | AsyncIterable[Tensors],
        *,
        datatypes: Mapping[str, str] | None = None,
        parameters: Parameters | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[InferenceResult]:
        """Answers of one stream, in the order of its requests, of which up to AHEAD are sent before their turn.

        timeout_s: for each answer, from the one before it; by default the client's. Nothing is repeated. Raises
        ShoalError at the first request that is refused, and where the server ends the stream before its last answer.
        Close the iterator (`contextlib.aclosing`) where it is left early: a generator of requests is closed with it.
        """
        try:
            call = await self._channel.stream(f"{_SERVICE}/ModelStreamInfer", ((_TENANT_KEY, self._tenant),))
        except (CallError, ChannelClosed) as error:
            raise ShoalError(self._failed(error).refusal) from error
        stream = _RequestStream(call, _messages(model, requests, datatypes, parameters))
        try:
            while (answer := await self._next_answer(stream, timeout_s or self._timeout_s)) is not None:
                yield answer
        finally:
            await stream.close()

    async def _next_answer(self, stream: "_RequestStream", timeout_s: float) -> InferenceResult | None:
        """None after the last one. Raises ShoalError."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await stream.read()
        except CallError as error:
            raise ShoalError(self._failed(error).refusal) from error
        except TimeoutError as error:
            found = f"no answer of the stream for {timeout_s:g}s"
            raise refuse(Code.DEADLINE_EXCEEDED, found, "an answer", "allow more time") from error
        if message is None:
            if stream.is_complete:
                return None
            found = f"gateway {self._address} ended the stream after {stream.answered} of {stream.sent} answers"
            raise refuse(Code.REPLICA_UNREACHABLE, found, "an answer to each request", "send the others again")
        answer = decode_stream_response(message)
        if isinstance(answer, str):
            raise ShoalError(_refusal_of_words(answer))
        return answer

    async def _call(
        self, method: str, message: bytes, left_s: float, metadata: tuple[tuple[str, str], ...], *, is_step: bool
    ) -> bytes:
        """Raises ShoalError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + left_s
        said = ((_TENANT_KEY, self._tenant), *metadata)
        attempt = 0
        while True:
            try:
                return await self._channel.unary(f"{_SERVICE}/{method}", message, max(0.0, end - loop.time()), said)
            except (CallError, ChannelClosed) as error:
                failed = self._failed(error)
                wait_s = retry_delay_s(
                    failed, attempt, self._retries, end - loop.time(), is_step=is_step, client=self._name
                )
                if wait_s is None or isinstance(error, ChannelClosed):
                    raise ShoalError(failed.refusal) from error
            attempt += 1
            await asyncio.sleep(wait_s)

    def _failed(self, error: CallError | ChannelClosed) -> FailedCall:
        if isinstance(error, ChannelClosed):
            refusal = Refusal(Code.CANCELLED, "this client was closed", "an open one", "make another")
            return FailedCall(refusal, was_sent=False)
        refusal = status.refusal_of_status(error.status, error.details, error.metadata)
        if refusal.code is Code.COORDINATOR_UNREACHABLE:  # the nearest code of UNAVAILABLE where coordinators answer
            found = f"gateway {self._address}: {error.details}"
            refusal = Refusal(Code.REPLICA_UNREACHABLE, found, "an answer", "shoal dev status")
        return FailedCall(refusal, status.retry_after_of(error.metadata), error.was_processed)


class _RequestStream:
    """Sends requests while their answers are read."""

    def __init__(self, call: ClientCall, messages: AsyncGenerator[bytes]) -> None:
        self._call = call
        # Requests that were given to the call, and those that were answered.
        self.sent = self.answered = 0
        self._is_last_sent = False
        self._room = asyncio.Semaphore(AHEAD)
        self._failure: BaseException | None = None
        self._sender = asyncio.create_task(self._send(messages), name="inference-stream")

    async def read(self) -> bytes | None:
        """The next answer; None after the last one. Raises CallError, and what making a request raised."""
        try:
            message = await self._call.read()
        except CallError:
            if self._failure is not None:
                raise self._failure from None
            raise
        if message is not None:
            self.answered += 1
        self._room.release()
        return message

    @property
    def is_complete(self) -> bool:
        """Whether each request has its answer, and there will be no other."""
        return self._is_last_sent and self.answered == self.sent

    async def close(self) -> None:
        self._sender.cancel()
        if not self._call.is_over:
            self._call.cancel()
        with suppress(asyncio.CancelledError):
            await self._sender

    async def _send(self, messages: AsyncGenerator[bytes]) -> None:
        try:
            async with aclosing(messages):
                async for message in messages:
                    await self._room.acquire()
                    self.sent += 1
                    await self._call.write(message)
            self._is_last_sent = True
            self._call.half_close()
        except CallError:
            pass  # the reader learns of it
        except Exception as error:
            self._failure = error
            self._call.cancel()


async def _messages(
    model: str,
    requests: Iterable[Tensors] | AsyncIterable[Tensors],
    datatypes: Mapping[str, str] | None,
    parameters: Parameters | None,
) -> AsyncGenerator[bytes]:
    if not isinstance(requests, AsyncIterable):
        for each in requests:
            yield encode_request(model, each, datatypes, parameters)
        return
    try:
        async for each in requests:
            yield encode_request(model, each, datatypes, parameters)
    finally:
        if isinstance(requests, AsyncGenerator):
            await requests.aclose()


def _refusal_of_words(words: str) -> Refusal:
    """The refusal that a stream tells in words, which end with its code."""
    code = words.rpartition("(")[2].removesuffix(")")
    known = Code(code) if code in Code.__members__.values() else Code.INTERNAL
    return Refusal.parse(words, known)
