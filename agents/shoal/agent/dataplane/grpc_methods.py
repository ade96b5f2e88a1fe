"""The methods of the Open Inference Protocol over gRPC, and of the services beside it, whatever carries the calls.

Inference requests and answers pass as bytes; only the small calls are parsed here.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import structlog
from google.protobuf.message import Message

from shoal.agent.dataplane import grpc_health, reflection
from shoal.agent.dataplane.call_places import CallPlace
from shoal.agent.dataplane.compression import expand, expanded_size
from shoal.agent.dataplane.exchange import Exchange
from shoal.agent.dataplane.grpc_call import DirectCall, GrpcCall
from shoal.agent.dataplane.ingress_admission import SMALL_BYTES, IngressAdmission, MessagePlace
from shoal.agent.dataplane.request import invalid, too_large
from shoal.agent.dataplane.transport import (
    AGREEMENT_KEY,
    FORWARD_KEY,
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    STEP_KEY,
    SUSPECT_KEY,
    TENANT_KEY,
    TRACE_KEY,
    InboundCall,
    InferenceService,
    check_request_id,
    drop_tracebacks,
    retry_after_s,
)
from shoal.agent.dataplane.trust import Authorities
from shoal.host.grpc_server import CallEnded, CallFailure, MessageTooLarge
from shoal.host.peer_certificate import PeerCertificate
from shoal.http2.grpc_messages import MessageBytes
from shoal.inference import health_pb2, reflection_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Seconds
from shoal.wire import status
from shoal.wire.field_limits import CountLimits, encode_field, parse

SERVICE: Final = "inference.GRPCInferenceService"
_CLAIMS: Final = "claims"
"""Of a call's memo."""
SMALL_LIMITS: Final = CountLimits(fields=256, repeated=64)
"""Limits for a request of any method but an inference."""
NO_REPOSITORY_CONTROL: Final = Refusal(
    Code.UNIMPLEMENTED,
    "loading and unloading by clients",
    "a policy: the coordinator decides what runs where",
    "shoal apply -f WORKLOAD.yaml",
)
NO_CUDA_SHARED_MEMORY: Final = Refusal(
    Code.UNIMPLEMENTED, "shared memory of CUDA devices", "system shared memory, or tensors in the request", "use those"
)

_READY: Final = oip.ServerReadyResponse(ready=True).SerializeToString()
_NOT_READY: Final = oip.ServerReadyResponse(ready=False).SerializeToString()

_log = structlog.get_logger(__name__)
_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class Method:
    """A method whose request and answer pass as bytes."""

    # Returns the payer, or None for the caller itself; called before the request is read. Raises ShoalError.
    admit: Callable[[InboundCall], str | None]
    # Answers the request.
    answer: Callable[[InboundCall, bytes], Awaitable[bytes]]
    # True if neither request nor answer exceeds SMALL_BYTES. Then it has SMALL_S, and uses no slot of an inference.
    small: bool = False


NO_EXTRA_METHODS: Final[Mapping[str, Mapping[str, Method]]] = {}


@dataclass(frozen=True, slots=True)
class MethodHandler:
    """How the calls of one method are answered."""

    # Returns the only message of the answer, or None after it has sent all. Raises ShoalError, CallEnded.
    answer: Callable[[GrpcCall], Awaitable[bytes | None]]
    # True if it returns that message.
    is_unary: bool = False
    # True if a front that leaves does not wait for its calls.
    is_long_lived: bool = False
    # Takes a call whose request is here, and ends it; False leaves it to `answer`.
    answer_now: Callable[[DirectCall, bytes], bool] | None = None
    # Gives a place to a request of so many bytes that is arriving; None leaves it to `answer`.
    begin_read: Callable[[DirectCall, int], MessagePlace | None] | None = None


class GrpcMethods:
    """Every method of a data port.

    - `admission`: the port's.
    - `authorities`: CAs of the certificates that clients may show; None: certificates do not count.
    - `extra_methods`: further methods to answer, by service and name.
    """

    def __init__(
        self,
        service: InferenceService,
        admission: IngressAdmission,
        authorities: Authorities | None = None,
        extra_methods: Mapping[str, Mapping[str, Method]] = NO_EXTRA_METHODS,
    ) -> None:
        self._service = service
        self._authorities = authorities
        self.admission = admission
        self.handlers = {
            f"/{name}/{method}": handler
            for name, handlers in self._services(extra_methods).items()
            for method, handler in handlers.items()
        }
        """By `/SERVICE/METHOD`."""

    def find(self, path: str) -> MethodHandler:
        """The handler of `/SERVICE/METHOD`; one that refuses where there is no such method."""
        found = self.handlers.get(path)
        if found is not None:
            return found

        async def refuse_call(carried: GrpcCall) -> None:
            self._authenticate(self.inbound_call(carried))
            asked = "a method of the Open Inference Protocol"
            raise ShoalError(Refusal(Code.UNIMPLEMENTED, f"{path!r:.200}", asked, "another method"))

        return MethodHandler(refuse_call)

    def is_front(self, certificate: PeerCertificate | None) -> bool:
        """Whether the certificate is another front's: it sends many clients' calls on one connection."""
        try:
            identity = self._identity(certificate)
        except ShoalError:
            return False
        return identity is not None and identity.role in (Role.AGENT, Role.GATEWAY)

    def _authenticate(self, call: InboundCall) -> None:
        """Check the token of a caller without a certificate, before any of its messages is read. Raises ShoalError."""
        if call.identity is None:
            self._service.authenticate(InboundCall(bearer=call.bearer))

    def _services(self, extra_methods: Mapping[str, Mapping[str, Method]]) -> Mapping[str, Mapping[str, MethodHandler]]:
        service = self._service
        inference = {
            "ServerLive": self._header_only(lambda _: oip.ServerLiveResponse(live=service.live()), anonymous=True),
            "ServerReady": self._header_only(lambda call: _READY if service.server_ready(call) else _NOT_READY),
            "ServerMetadata": self._header_only(service.server_metadata),
            "RepositoryModelLoad": self._header_only(self._refuse_load),
            "RepositoryModelUnload": self._header_only(self._refuse_load),
            "ModelReady": self._small(oip.ModelReadyRequest, self._model_ready),
            "ModelMetadata": self._small(oip.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": self._small(oip.ModelConfigRequest, self._model_config),
            "ModelStatistics": self._small(oip.ModelStatisticsRequest, self._statistics),
            "RepositoryIndex": self._small(oip.RepositoryIndexRequest, self._index),
            "SystemSharedMemoryStatus": self._small(oip.SystemSharedMemoryStatusRequest, self._shared_memory_status),
            "SystemSharedMemoryRegister": self._small(oip.SystemSharedMemoryRegisterRequest, self._register),
            "SystemSharedMemoryUnregister": self._small(oip.SystemSharedMemoryUnregisterRequest, self._unregister),
            "CudaSharedMemoryStatus": self._header_only(self._cuda_status),
            "CudaSharedMemoryRegister": self._header_only(self._refuse_cuda),
            "CudaSharedMemoryUnregister": self._header_only(self._cuda_unregister),
            "ModelInfer": replace(
                self._whole(Method(service.admit, service.infer)),
                answer_now=self._infer_now,
                begin_read=self._begin_read,
            ),
            "ModelStreamInfer": MethodHandler(self._answer_stream),
        }
        reflect = {reflection.METHOD: self._streaming(self._reflect)}
        health = {
            "Check": self._small(health_pb2.HealthCheckRequest, self._check_health),
            "Watch": self._streaming(self._watch_health, is_long_lived=True),
        }
        beside = {
            name: {method: self._raw(each) for method, each in methods.items()}
            for name, methods in extra_methods.items()
        }
        return {
            SERVICE: inference,
            **dict.fromkeys(reflection.SERVICES, reflect),
            grpc_health.SERVICE: health,
            **beside,
        }

    def _header_only(
        self, answer: Callable[[InboundCall], Message | bytes], *, anonymous: bool = False
    ) -> MethodHandler:
        """A method with an empty request: it is answered from its headers, without reading or waiting for the message.

        `anonymous` methods authenticate nobody. Their answers take a place only where they cannot go at once, so that
        callers who take none keep nobody else from one.
        """

        async def handle(call: InboundCall, exchange: Exchange) -> None:
            if not anonymous:
                with self._begin_head_call(call):
                    await exchange.send(answer(call))
                return
            answered = answer(call)
            if not exchange.send_now(answered):
                with self.admission.anonymous(exchange.call.peer.rpartition(":")[0]):
                    await exchange.send(answered)

        def answer_now(carried: DirectCall, _: bytes) -> bool:
            try:
                call = self._claims_of(carried)
                if call.identity is None and anonymous:
                    return False
                answered = answer(call)
                content = answered if isinstance(answered, bytes) else answered.SerializeToString()
            except ShoalError:
                return False
            if not carried.has_room(len(content)):
                return False  # there is a limit to the time that the caller has for it
            carried.complete(content)
            return True

        return replace(self._streaming(handle, authenticates=not anonymous), answer_now=answer_now)

    def _small(self, kind: type[_M], answer: Callable[[InboundCall, _M], Awaitable[Message]]) -> MethodHandler:
        """A method with small requests."""

        async def handle(call: InboundCall, exchange: Exchange) -> None:
            with self._begin_call(call) as place:
                request = await self._read_small(call, exchange, place.payer)
                await exchange.send(await answer(call, parse(kind, _require_message(request), SMALL_LIMITS)))

        return self._streaming(handle)

    def _raw(self, method: Method) -> MethodHandler:
        if not method.small:
            return self._whole(method)

        async def handle(call: InboundCall, exchange: Exchange) -> None:
            payer = method.admit(call) or ""
            with self.admission.places.take(call.caller):
                request = await self._read_small(call, exchange, payer)
                await exchange.send(await method.answer(call, _require_message(request)))

        return self._streaming(handle)

    def _begin_call(self, call: InboundCall, *, stream: bool = False) -> CallPlace:
        """The place of a call that is no inference, once its caller is authenticated. Raises ShoalError."""
        return self.admission.places.take(call.caller, self._service.tenant_of(call), stream=stream)

    def _begin_head_call(self, call: InboundCall) -> AbstractContextManager[None]:
        """The same of a call that is answered from its head alone. Raises ShoalError."""
        return self.admission.head_call(call.caller, self._service.tenant_of(call))

    async def _read_small(self, call: InboundCall, exchange: Exchange, payer: str) -> bytes | None:
        """Read the next message of a method with small requests; None at the end of the call. Inside
        `CallPlaces.take`. `payer`: empty for the caller itself.

        Raises MessageTooLarge, ShoalError(INVALID_ARGUMENT | TOO_LARGE | TOO_SLOW).
        """
        async with self.admission.small_read_slot(call.caller, payer):
            request = await exchange.call.read(SMALL_BYTES)
        return None if request is None else await expand(request, expanded_size(request, SMALL_BYTES))

    async def _reflect(self, call: InboundCall, exchange: Exchange) -> None:
        """Answer reflection requests in order, until the caller ends the stream or is no longer authorized."""
        self._service.server_ready(call)
        with self._begin_call(call, stream=True) as place:
            while (request := await self._read_small(call, exchange, place.payer)) is not None:
                asked = parse(reflection_pb2.ServerReflectionRequest, request, SMALL_LIMITS)
                self._service.server_ready(call)
                await exchange.send(reflection.answer(asked))

    async def _watch_health(self, call: InboundCall, exchange: Exchange) -> None:
        self._service.server_ready(call)
        with self._begin_call(call) as place:
            request = await self._read_small(call, exchange, place.payer)
        asked = parse(health_pb2.HealthCheckRequest, _require_message(request), SMALL_LIMITS)
        async with self.admission.watch(call.caller, place.payer):
            await grpc_health.watch(self._service, call, asked.service, exchange.send)

    def _streaming(
        self,
        handle: Callable[[InboundCall, Exchange], Awaitable[None]],
        *,
        is_long_lived: bool = False,
        authenticates: bool = True,
    ) -> MethodHandler:
        """A method whose messages are sent one by one, though it may be unary for its caller: only so can the time of
        a send be limited."""

        async def answer(carried: GrpcCall) -> None:
            exchange = Exchange(carried)
            try:
                call = self.inbound_call(carried)
                if authenticates:
                    self._authenticate(call)
                await handle(call, exchange)
                return
            except CallEnded:
                raise
            except Exception as error:
                refusal = _refusal_of(error)
            await exchange.settle()
            raise refusal

        return MethodHandler(answer, is_long_lived=is_long_lived)

    def _whole(self, method: Method) -> MethodHandler:
        """A method with one request and one answer of any size."""

        async def answer(carried: GrpcCall) -> bytes:
            try:
                return await self._answer_whole(method, carried)
            except CallEnded:
                raise
            except Exception as error:
                refusal = _refusal_of(error)
            carried.discard()
            await self._service.pace(self._claims_of(carried), refusal)
            raise refusal

        return MethodHandler(answer, is_unary=True)

    def _begin_read(self, carried: DirectCall, size: int) -> MessagePlace | None:
        """Read an inference request without a task, now or once it is its turn; None: it is to be refused, or only a
        task can wait for it."""
        try:
            call = self._claims_of(carried)
        except ShoalError:
            return None
        payer = self._service.payer_of(call)
        if payer is None or size > MAX_MESSAGE:
            return None

        def on_expired(error: ShoalError) -> None:
            carried.fail(call_failure(error))

        def on_turn(is_ready: bool) -> None:
            carried.on_turn(is_ready=is_ready)

        return self.admission.begin_read(call.caller, size, payer, on_expired, on_turn)

    def _infer_now(self, carried: DirectCall, request: bytes) -> bool:
        """Have a request answered without a task; False: it is not so simple, or is to be refused."""
        try:
            call = self._claims_of(carried)
            direct = self._service.prepare_direct(call, carried.remaining_s(), carried.shared_memo, request)
            if direct is None:
                return False
            caller, payer = call.caller, direct.payer
            place = self.admission.places.take(caller, payer, is_trial=True)
        except ShoalError:
            return False
        try:
            charge = self.admission.places.hold_request(caller, len(request), payer)
        except ShoalError:
            place.leave()
            return False

        def on_end(answer: MessageBytes | None, error: Exception | None) -> None:
            charge.release()
            if answer is not None:
                try:
                    place.hold_answer(len(answer), payer)
                except ShoalError as refused:
                    carried.fail(call_failure(refused))
                else:
                    carried.complete(answer)
            elif error is not None:
                carried.fail(call_failure(_refusal_of(error)))

        if not direct.begin(on_end):
            charge.release()
            place.leave()
            return False
        carried.add_done_callback(place.leave)
        carried.add_done_callback(direct.cancel)
        carried.add_done_callback(charge.release)  # of one that its caller gave up
        return True

    async def _answer_whole(self, method: Method, carried: GrpcCall) -> bytes:
        """Raises MessageTooLarge, ShoalError."""
        call = self.inbound_call(carried)
        caller = call.caller
        payer = method.admit(call) or caller
        place = self.admission.places.take(caller, payer)
        carried.add_done_callback(place.leave)  # when the caller has read the answer
        request = await self._read_whole(carried, call, payer)
        size = expanded_size(request, MAX_MESSAGE)
        with self.admission.places.hold_request(caller, size, payer):
            request = await expand(request, size)
            answer = await method.answer(call, request)
            del request
        place.hold_answer(len(answer), payer)
        return answer

    async def _read_whole(self, carried: GrpcCall, call: InboundCall, payer: str) -> bytes:
        """The call's request, in a slot unless it is here already. Inside `CallPlaces.take`.

        Raises MessageTooLarge, ShoalError(INVALID_ARGUMENT | TOO_SLOW | OVERLOADED).
        """
        if carried.has_message:
            return _require_message(await carried.read(MAX_MESSAGE))
        size = carried.message_bytes
        if size is not None and size > MAX_MESSAGE:
            raise MessageTooLarge(size, MAX_MESSAGE)
        async with self.admission.read_slot(call.caller, size=size, payer=payer):
            return _require_message(await carried.read(MAX_MESSAGE))

    async def _answer_stream(self, carried: GrpcCall) -> None:
        """Raises ShoalError."""
        try:
            await self._stream(carried)
        except CallEnded:
            raise
        except Exception as error:
            refusal = _refusal_of(error)
        else:
            return
        carried.discard()
        await self._service.pace(self._claims_of(carried), refusal)
        raise refusal

    async def _stream(self, carried: GrpcCall) -> None:
        """Answer each request of the stream in order. A refused request is answered as an error, and the stream
        continues. Raises MessageTooLarge, ShoalError."""
        call = self.inbound_call(carried)
        payer = self._service.admit(call)
        with self.admission.places.take(call.caller, payer, stream=True) as place:
            while True:
                async with self.admission.stream_read(call.caller, payer, lambda: carried.has_begun):
                    request = await carried.read(MAX_MESSAGE)
                if request is None:
                    return
                size = expanded_size(request, MAX_MESSAGE)
                with self.admission.places.hold_request(call.caller, size, payer):
                    answering = self._answer_one(self.inbound_call(carried), request, size)
                    del request  # if it is compressed, it is freed as soon as it is expanded
                    answer = await answering
                place.hold_answer(len(answer), payer)
                await carried.write(answer)
                place.release_answer()
                del answer  # it is charged no more, and the next message may be long in coming

    async def _answer_one(self, call: InboundCall, request: bytes, size: int) -> bytes:
        """`size` is the request's size once expanded."""
        try:
            request = await expand(request, size)
            return _stream_response(2, await self._service.infer(call, request))
        except Exception as error:
            refusal = _refusal_of(error)
        await self._service.pace(call, refusal)
        return _stream_response(1, str(refusal.refusal).encode())

    def inbound_call(self, carried: GrpcCall) -> InboundCall:
        """What the service is told of a call.

        Raises ShoalError(CERT_NAME_INVALID | CERT_UNTRUSTED | REGION_MISMATCH | INVALID_ARGUMENT).
        """
        known = self._claims_of(carried)
        left = carried.remaining_s()
        return known if left is None else replace(known, remaining_s=Seconds(left))

    def _claims_of(self, carried: GrpcCall) -> InboundCall:
        """As `inbound_call`, without the deadline."""
        identity = self._identity(carried.certificate)
        known = carried.memo.get(_CLAIMS)
        if not isinstance(known, InboundCall) or known.identity is not identity:
            known = carried.memo[_CLAIMS] = _claims(carried.metadata, identity)
        return known

    def _identity(self, certificate: PeerCertificate | None) -> Identity | None:
        if self._authorities is None or certificate is None:
            return None
        return self._authorities.identity(certificate)

    async def _model_ready(self, call: InboundCall, request: oip.ModelReadyRequest) -> oip.ModelReadyResponse:
        """False for an unknown model, as in Triton, and for one that the region does not say anything about."""
        try:
            return oip.ModelReadyResponse(ready=await self._service.model_ready(call, request.name, request.version))
        except ShoalError as error:
            if error.code not in (Code.MODEL_NOT_FOUND, Code.MODEL_NOT_READY):
                raise
            return oip.ModelReadyResponse(ready=False)

    async def _model_metadata(self, call: InboundCall, request: oip.ModelMetadataRequest) -> oip.ModelMetadataResponse:
        return await self._service.model_metadata(call, request.name, request.version)

    async def _check_health(
        self, call: InboundCall, request: health_pb2.HealthCheckRequest
    ) -> health_pb2.HealthCheckResponse:
        return grpc_health.check(self._service, call, request.service)

    async def _model_config(self, call: InboundCall, request: oip.ModelConfigRequest) -> oip.ModelConfigResponse:
        return await self._service.model_config(call, request.name, request.version)

    async def _statistics(self, call: InboundCall, request: oip.ModelStatisticsRequest) -> oip.ModelStatisticsResponse:
        return await self._service.statistics(call, request.name, request.version)

    async def _index(self, call: InboundCall, request: oip.RepositoryIndexRequest) -> oip.RepositoryIndexResponse:
        return self._service.index(call, ready_only=request.ready)

    async def _shared_memory_status(
        self, call: InboundCall, request: oip.SystemSharedMemoryStatusRequest
    ) -> oip.SystemSharedMemoryStatusResponse:
        return self._service.shared_memory_status(call, request.name)

    async def _register(
        self, call: InboundCall, request: oip.SystemSharedMemoryRegisterRequest
    ) -> oip.SystemSharedMemoryRegisterResponse:
        self._service.register_shared_memory(call, request)
        return oip.SystemSharedMemoryRegisterResponse()

    async def _unregister(
        self, call: InboundCall, request: oip.SystemSharedMemoryUnregisterRequest
    ) -> oip.SystemSharedMemoryUnregisterResponse:
        self._service.unregister_shared_memory(call, request.name)
        return oip.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, call: InboundCall) -> Message:
        """There is none, as in a Triton without GPUs."""
        self._service.server_ready(call)
        return oip.CudaSharedMemoryStatusResponse()

    def _cuda_unregister(self, call: InboundCall) -> Message:
        """As in a Triton without GPUs: its clients do this first, to begin without regions."""
        self._service.server_ready(call)
        return oip.CudaSharedMemoryUnregisterResponse()

    def _refuse_cuda(self, call: InboundCall) -> Message:
        self._service.server_ready(call)
        raise ShoalError(NO_CUDA_SHARED_MEMORY)

    def _refuse_load(self, call: InboundCall) -> Message:
        self._service.server_ready(call)
        raise ShoalError(NO_REPOSITORY_CONTROL)


def _refusal_of(error: Exception) -> ShoalError:
    """What the caller is told of an error that ends its call, or its request."""
    if isinstance(error, MessageTooLarge):
        return too_large(f"a message of {error.size} bytes", error.max_bytes)
    if not isinstance(error, ShoalError):
        _log.exception("call_failed")
    drop_tracebacks(error)
    if isinstance(error, ShoalError):
        return error
    asked, remedy = "an answer", "report this with the log of the node"
    return ShoalError(Refusal(Code.INTERNAL, type(error).__name__, asked, remedy))


def call_failure(error: ShoalError) -> CallFailure:
    """The refusal as a status of gRPC."""
    refusal = error.refusal
    return CallFailure(status.grpc_status(refusal.code), str(refusal), status.trailers(refusal, retry_after_s(error)))


def _require_message(request: bytes | None) -> bytes:
    """Raises ShoalError(INVALID_ARGUMENT)."""
    if request is None:
        raise invalid("a call without a message", "a request")
    return request


def _claims(said: Mapping[str, str], identity: Identity | None) -> InboundCall:
    """A call without its deadline. Raises ShoalError(INVALID_ARGUMENT)."""
    hop = said.get(HOP_KEY, "0")
    if hop not in ("0", "1"):
        raise refuse(Code.INVALID_ARGUMENT, f"{HOP_KEY} {hop!r:.40}", "0 or 1", "leave it out")
    return InboundCall(
        identity=identity,
        bearer=bearer_of(said),
        tenant=said.get(TENANT_KEY, ""),
        origin=said.get(ORIGIN_KEY, ""),
        hop=int(hop),
        request_id=check_request_id(said.get(REQUEST_KEY, "")),
        agreement=said.get(AGREEMENT_KEY, ""),
        step=said.get(STEP_KEY, "")[:128],
        trace=said.get(TRACE_KEY, ""),
        forward=said.get(FORWARD_KEY, "")[:512],
        suspect=said.get(SUSPECT_KEY) == "1",
    )


SHARED_FIELDS: Final = ("authorization", TENANT_KEY, ORIGIN_KEY, HOP_KEY, AGREEMENT_KEY, STEP_KEY, SUSPECT_KEY)
"""Metadata of a call that says who asks for what. The rest of its claims (an id, a trace, a forward's proof) may differ
in each call."""


def bearer_of(metadata: Mapping[str, str]) -> str:
    """The token of the field `authorization`; empty without one."""
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _stream_response(field: int, content: bytes) -> bytes:
    """A serialized ModelStreamInferResponse around content that is already serialized."""
    return encode_field(field, (content,))
