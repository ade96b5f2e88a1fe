"""The REST form of the Open Inference Protocol, with the binary tensor extension, over HTTP of either version.

Requests become the same serialized ModelInferRequest that gRPC carries. As little as possible is read: the caller is
authenticated from the headers, and a body is measured while it arrives and expands.
"""

import asyncio
import json
import math
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote

import structlog

from shoal.agent.dataplane import generate, tensors
from shoal.agent.dataplane.call_places import CallPlace
from shoal.agent.dataplane.conversion import Conversions
from shoal.agent.dataplane.grpc_methods import NO_CUDA_SHARED_MEMORY, NO_REPOSITORY_CONTROL
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.log_budget import LogBudget
from shoal.agent.dataplane.memory import MemoryCharge
from shoal.agent.dataplane.request import invalid, too_large
from shoal.agent.dataplane.rest_documents import (
    config_document,
    model_document,
    region_of,
    regions_document,
    statistics_document,
)
from shoal.agent.dataplane.transport import (
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    TENANT_KEY,
    TRACE_KEY,
    InboundCall,
    InferenceService,
    check_request_id,
    drop_tracebacks,
    retry_after_s,
)
from shoal.http2.grpc_messages import MessageBytes
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds
from shoal.wire import status

SMALL_BYTES: Final = 16 * 2**10
"""Largest body of a request that carries no tensors."""
BODY_GRACE_S: Final = 10.0
BODY_RATE: Final = 128 * 2**10
"""Bytes per second below which a body counts as too slow, once the grace is over."""
_LENGTH_HEADER: Final = "inference-header-content-length"
FREE_PIECES: Final = 1024
LEAST_PIECE: Final = 64
"""Bytes of a body's pieces (chunks, frames, or what arrives at once), on average, beyond the first ones: each takes as
long as some hundred bytes."""
_DEADLINE_HEADER: Final = "shoal-deadline-ms"

T = TypeVar("T")

_log = structlog.get_logger(__name__)
_failures = LogBudget()


class ClientGone(Exception):
    """The client disconnected, or its request cannot be answered any more."""


class RequestCarrier(Protocol):
    """What carries one request: its connection, or its stream. It cancels the request when its client is gone."""

    def memo(self, call: InboundCall) -> dict[str, object]:
        """What the service keeps for requests of this client that say the same of themselves."""
        ...

    def whole_body(self) -> bytearray | None:
        """The body, if all of it has arrived; else None. Raises ShoalError(INVALID_ARGUMENT)."""
        ...

    def body(self) -> AsyncIterator[bytes | bytearray]:
        """The body as it arrives. Raises ShoalError(TOO_SLOW) once it is behind `body_deadline_s`,
        ShoalError(INVALID_ARGUMENT), ClientGone."""
        ...

    def on_admitted(self) -> None:
        """The caller is authenticated."""
        ...


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A request, once its head has arrived."""

    # In upper case.
    method: str
    # Its parts between slashes.
    path: tuple[str, ...]
    # Names in lower case.
    headers: Mapping[str, str]
    # What the service is told of it; of its deadline, as it was when the head had arrived.
    call: InboundCall
    # When its client gives up, on the loop's clock; None: it does not say.
    expires_at: float | None
    # Why the client's certificate counts for nobody; None: it counts, or there is none.
    identity_error: ShoalError | None
    # Brings its body.
    carrier: RequestCarrier

    def call_now(self) -> InboundCall:
        """The call, with what is left of its time."""
        if self.expires_at is None:
            return self.call
        left = self.expires_at - asyncio.get_running_loop().time()
        return replace(self.call, remaining_s=Seconds(max(0.0, left)))


@dataclass(frozen=True, slots=True)
class RestResponse:
    status: int
    body: bytes
    # Without those of the connection and the body's length.
    headers: Mapping[str, str] = field(default_factory=dict)
    # Events of a stream as they come, in place of `body`; None: it is no stream. They raise ClientGone.
    events: AsyncGenerator[bytes, None] | None = None


def body_deadline_s(received: int) -> Seconds:
    """Seconds from a body's start by which more than `received` bytes of it must have arrived."""
    return Seconds(BODY_GRACE_S + received / BODY_RATE)


def check_pieces(pieces: int, received: int) -> None:
    """Of a body. Raises ShoalError(INVALID_ARGUMENT)."""
    if pieces > FREE_PIECES and received < pieces * LEAST_PIECE:
        raise invalid(f"{pieces} pieces of {received} bytes", "larger chunks")


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Whom a connection's certificate names."""

    # None without a certificate, or with an error.
    identity: Identity | None = None
    # Why the certificate counts for nobody.
    error: ShoalError | None = None


def make_request(
    method: str, target: str, fields: Iterable[tuple[str, str]], client: ClientIdentity, carrier: RequestCarrier
) -> RestRequest:
    """A request whose head has just arrived. `fields`: the head's, names in lower case.

    Raises ShoalError(INVALID_ARGUMENT).
    """
    if not target.isascii():
        raise invalid(f"path {target!a:.80}", "ASCII, the rest percent-encoded")
    headers: dict[str, str] = {}
    for name, value in fields:
        if name in headers and name in _SINGLE_HEADERS:
            raise invalid(f"{name} twice", "once")
        headers[name] = value
    hop = headers.get(HOP_KEY, "0")
    if hop not in ("0", "1"):
        raise invalid(f"{HOP_KEY} {hop!r:.40}", "0 or 1")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    deadline_ms = _whole_number(headers, _DEADLINE_HEADER)
    remaining_s = None if deadline_ms is None else Seconds(deadline_ms / 1000)
    call = InboundCall(
        identity=client.identity,
        bearer=token.strip() if scheme.lower() == "bearer" else "",
        tenant=headers.get(TENANT_KEY, ""),
        origin=headers.get(ORIGIN_KEY, ""),
        hop=int(hop),
        request_id=check_request_id(headers.get(REQUEST_KEY, "")),
        remaining_s=remaining_s,
        trace=headers.get(TRACE_KEY, ""),
    )
    target = target.partition("?")[0]
    path = ("*",) if target == "*" else tuple(unquote(part) for part in target.split("/")[1:] if part)
    expires_at = None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s
    return RestRequest(method, path, headers, call, expires_at, client.error, carrier)


@dataclass(slots=True)
class _Generation:
    """A request of `generate` or `generate_stream`, ready to run."""

    # The serialized ModelInferRequest; empty once it was taken.
    message: bytes
    # Of its call, until the response is sent.
    place: CallPlace
    # Who is charged for its memory.
    payer: str
    # For the message.
    charge: MemoryCharge

    def take_message(self) -> bytes:
        taken, self.message = self.message, b""
        return taken


def _is_readiness(method: str, path: tuple[str, ...]) -> bool:
    """What load balancers and clients ask to learn whether there is a front: its load must not change the answer."""
    match method, path:
        case "GET", ("v2",) | ("v2", "health", "ready"):
            return True
        case "GET", ("v2", "models", _, "ready") | ("v2", "models", _, "versions", _, "ready"):
            return True
        case _:
            return False


class RestMethods:
    """Every method of a data port over REST."""

    def __init__(self, service: InferenceService, admission: IngressAdmission) -> None:
        self._service = service
        self._admission = admission
        self._conversions = Conversions()

    def close(self) -> None:
        self._conversions.close()

    async def answer(self, request: RestRequest, held: ExitStack) -> RestResponse:
        """The answer, or a refusal. `held` is what the caller holds of the admission until its response is sent.

        Raises ClientGone.
        """
        try:
            return await self._answer(request, held)
        except ShoalError as error:
            drop_tracebacks(error)
            await self._service.pace(request.call, error)
            return refusal_response(error.refusal, retry_after_s(error))
        except (ClientGone, OSError):
            raise
        except Exception as error:
            return refusal_response(_record_failure(error))

    async def _answer(self, request: RestRequest, held: ExitStack) -> RestResponse:
        """Raises ShoalError."""
        if request.method == "OPTIONS":
            return _options(request.path)
        method = "GET" if request.method == "HEAD" else request.method
        if (method, request.path) == ("GET", ("v2", "health", "live")):
            return _response({"live": self._service.live()})
        if request.identity_error is not None:
            raise request.identity_error
        match method, request.path:
            case "POST", ("v2", "models", name, "infer") | ("v2", "models", name, "versions", _, "infer"):
                return await self._infer(request, name, held)
            case "POST", ("v2", "models", name, "generate") | ("v2", "models", name, "versions", _, "generate"):
                return await self._generate(request, name, held)
            case (
                "POST",
                ("v2", "models", name, "generate_stream") | ("v2", "models", name, "versions", _, "generate_stream"),
            ):
                return await self._generate_stream(request, name, held)
            case _:
                self._begin_small(request.call, held, is_head_call=_is_readiness(method, request.path))
                return await self._answer_small(request, method)

    def _begin_small(self, call: InboundCall, held: ExitStack, *, is_head_call: bool) -> None:
        """Count a call that is no inference until its response is sent, once its caller is authenticated. Raises
        ShoalError."""
        payer = self._service.tenant_of(call)
        begin = self._admission.head_call if is_head_call else self._admission.places.take
        held.enter_context(begin(call.caller, payer))

    async def _answer_small(self, request: RestRequest, method: str) -> RestResponse:
        """Any other method. Raises ShoalError."""
        match method, request.path:
            case "GET", ("v2", "health", "ready"):
                return _ready({}, self._service.server_ready(request.call))
            case "GET", ("v2",):
                said = self._service.server_metadata(request.call)
                return _response({"name": said.name, "version": said.version, "extensions": list(said.extensions)})
            case "GET", ("v2", "models", "stats"):
                return _response(statistics_document(await self._service.statistics(request.call, "", "")))
            case "GET", ("v2", "models", name) | ("v2", "models", name, "versions", _):
                return _response(
                    model_document(await self._service.model_metadata(request.call, name, _version(request)))
                )
            case "GET", ("v2", "models", name, "ready") | ("v2", "models", name, "versions", _, "ready"):
                return await self._model_ready(request, name)
            case "GET", ("v2", "models", name, "config") | ("v2", "models", name, "versions", _, "config"):
                return _response(
                    config_document(await self._service.model_config(request.call, name, _version(request)))
                )
            case "GET", ("v2", "models", name, "stats") | ("v2", "models", name, "versions", _, "stats"):
                return _response(
                    statistics_document(await self._service.statistics(request.call, name, _version(request)))
                )
            case "POST", ("v2", "repository", "index"):
                return await self._index(request)
            case "POST", ("v2", "repository", "models", _, "load" | "unload"):
                self._service.server_ready(request.call)
                raise ShoalError(NO_REPOSITORY_CONTROL)
            case method, ("v2", "systemsharedmemory", *path):
                return await self._shared_memory(request, method, tuple(path))
            case method, ("v2", "cudasharedmemory", *path):
                self._service.server_ready(request.call)
                return _cuda_shared_memory(method, tuple(path))
            case method, path:
                self._service.server_ready(request.call)
                raise _no_such_path(method, path)

    async def _model_ready(self, request: RestRequest, name: str) -> RestResponse:
        try:
            return _ready({"name": name}, await self._service.model_ready(request.call, name, _version(request)))
        except ShoalError as error:
            if error.code not in (Code.MODEL_NOT_FOUND, Code.MODEL_NOT_READY):
                raise
            refused = refusal_response(error.refusal)
            return replace(refused, body=_dump({"name": name, "ready": False, **json.loads(refused.body)}))

    async def _infer(self, request: RestRequest, name: str, held: ExitStack) -> RestResponse:
        payer = self._service.admit(request.call)
        caller = request.call.caller
        place = held.enter_context(self._admission.places.take(caller, payer))
        request.carrier.on_admitted()
        size = _declared_bytes(request, MAX_MESSAGE)
        body = request.carrier.whole_body() if _is_plain(request) else None
        if body is None:
            async with self._admission.read_slot(caller, body_deadline_s(MAX_MESSAGE), size, payer):
                body = await _read_body(request, MAX_MESSAGE)
        charge = self._admission.places.hold_request(caller, len(body), payer)
        with charge:
            header_length = _whole_number(request.headers, _LENGTH_HEADER)
            steps = tensors.convert_request(name, _version(request), body, header_length)
            message, wanted = await self._conversions.run(caller, len(body), steps)
            del steps, body
            charge.resize(len(message))
            answer = await self._answer_message(request, message)
            del message
        place.hold_answer(len(answer), payer)  # it may wait for its conversion
        shown = tensors.convert_response(answer, wanted)
        content, json_length = await self._conversions.run(caller, len(answer), shown)
        place.hold_answer(len(content), payer)
        if json_length is None:
            return RestResponse(200, content, {"content-type": "application/json"})
        headers = {"content-type": "application/octet-stream", _LENGTH_HEADER: str(json_length)}
        return RestResponse(200, content, headers)

    async def _answer_message(self, request: RestRequest, message: bytes) -> bytes:
        """The model's answer. Raises ShoalError."""
        call = request.call_now()
        try:
            direct = self._service.prepare_direct(call, call.remaining_s, request.carrier.memo(request.call), message)
        except ShoalError:
            direct = None  # `infer` refuses
        if direct is not None:
            answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            if direct.begin(partial(_complete, answered)):
                try:
                    return await answered
                finally:
                    direct.cancel()
        return await self._service.infer(call, message)

    async def _shared_memory(self, request: RestRequest, method: str, path: tuple[str, ...]) -> RestResponse:
        match method, path:
            case "GET", ("status",) | ("region", _, "status"):
                name = path[1] if len(path) > 1 else ""
                return _response(regions_document(self._service.shared_memory_status(request.call, name)))
            case "POST", ("region", name, "register"):
                self._service.authenticate(request.call)
                asked = region_of(name, await _read_document(request))
                self._service.register_shared_memory(request.call, asked)
                return RestResponse(200, b"")
            case "POST", ("unregister",) | ("region", _, "unregister"):
                self._service.unregister_shared_memory(request.call, path[1] if len(path) > 1 else "")
                return RestResponse(200, b"")
            case _:
                self._service.server_ready(request.call)
                raise _no_such_path(method, request.path)

    async def _generate(self, request: RestRequest, name: str, held: ExitStack) -> RestResponse:
        text = await self._generated_answer(request, await self._generate_request(request, name, held))
        return RestResponse(200, text, {"content-type": "application/json"})

    async def _generate_stream(self, request: RestRequest, name: str, held: ExitStack) -> RestResponse:
        """A request that cannot be run is refused as any other; a failure of its run is an event."""
        generation = await self._generate_request(request, name, held)
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        return RestResponse(200, b"", headers, self._events(request, generation))

    async def _generate_request(self, request: RestRequest, name: str, held: ExitStack) -> _Generation:
        """`held` gets the call's place, and the message's charge, which may be released before."""
        payer = self._service.admit(request.call)
        caller = request.call.caller
        place = held.enter_context(self._admission.places.take(caller, payer))
        request.carrier.on_admitted()
        most = generate.MAX_BODY_BYTES
        size = _declared_bytes(request, most)
        async with self._admission.read_slot(caller, body_deadline_s(most), size, payer):
            body = await _read_body(request, most)
        charge = self._admission.places.hold_request(caller, len(body), payer)
        held.enter_context(charge)
        described = await self._service.model_metadata(request.call_now(), name, _version(request))
        steps = generate.convert_request(described, _version(request), body)
        message = await self._conversions.run(caller, len(body), steps)
        charge.resize(len(message))
        return _Generation(message, place, payer, charge)

    async def _generated_answer(self, request: RestRequest, asked: _Generation) -> bytes:
        answer = await self._service.infer(request.call_now(), asked.take_message())
        asked.charge.release()
        asked.place.hold_answer(len(answer), asked.payer)  # it may wait for its conversion
        steps = generate.convert_response(answer)
        text = await self._conversions.run(request.call.caller, len(answer), steps)
        asked.place.hold_answer(len(text), asked.payer)
        return text

    async def _events(self, request: RestRequest, asked: _Generation) -> AsyncGenerator[bytes, None]:
        """One event for each answer; a failure is the last one."""
        try:
            yield generate.event(await self._generated_answer(request, asked))
        except ShoalError as error:
            drop_tracebacks(error)
            yield generate.error_event(error.refusal, retry_after_s(error))
        except (ClientGone, OSError):
            raise
        except Exception as error:
            yield generate.error_event(_record_failure(error), None)

    async def _index(self, request: RestRequest) -> RestResponse:
        self._service.server_ready(request.call)
        ready = (await _read_document(request)).get("ready", False)
        if not isinstance(ready, bool):
            raise invalid(f"ready {ready!r:.80}", "true or false")
        listed = self._service.index(request.call, ready_only=ready)
        rows = [{"name": m.name, "version": m.version, "state": m.state, "reason": m.reason} for m in listed.models]
        return _response(rows)


def _cuda_shared_memory(method: str, path: tuple[str, ...]) -> RestResponse:
    """There is none, as in a Triton without GPUs. Its clients unregister all first, to begin without regions."""
    match method, path:
        case "GET", ("status",):
            return _response([])
        case "POST", ("unregister",) | ("region", _, "unregister"):
            return RestResponse(200, b"")
        case _:
            raise ShoalError(NO_CUDA_SHARED_MEMORY)


def _record_failure(error: Exception) -> Refusal:
    """Logs a failure of our own, unless there were many; returns what the client hears of it."""
    if (left_out := _failures.take(asyncio.get_running_loop().time())) is not None:
        _log.error("call_failed", suppressed=left_out, exc_info=error)
    drop_tracebacks(error)
    return Refusal(Code.INTERNAL, type(error).__name__, "an answer", "report this with the log of the node")


def _declared_bytes(request: RestRequest, most: int) -> int | None:
    """The length that the request's head gives its body, None where it gives none. Raises ShoalError(TOO_LARGE)."""
    declared = _whole_number(request.headers, "content-length")
    if declared is not None and declared > most:
        raise too_large(f"a body of {declared} bytes", most)
    return declared


def _complete(answered: asyncio.Future[bytes], answer: MessageBytes | None, error: Exception | None) -> None:
    if answered.done():
        return
    if answer is not None:
        answered.set_result(bytes(answer))
    elif error is not None:
        answered.set_exception(error)


def _is_plain(request: RestRequest) -> bool:
    """Whether its body is sent as it is, not compressed."""
    return request.headers.get("content-encoding", "identity").strip().lower() in _PLAIN


async def _read_body(request: RestRequest, most: int) -> bytearray:
    """The body, expanded. Raises ShoalError(TOO_LARGE)."""
    expand = _expander(request.headers.get("content-encoding", "identity"))
    body = bytearray()
    async for data in request.carrier.body():
        for part in expand(data):
            if len(body) + len(part) > most:
                raise too_large(f"a body of over {most} bytes once expanded", most)
            if not body and isinstance(part, bytearray):
                body = part  # it is nobody else's
            else:
                body += part
            if part is not data:
                await asyncio.sleep(0)  # let other tasks run: a small body may expand to a large one
    return body


async def _read_document(request: RestRequest) -> Mapping[str, Any]:
    """The body of a request that carries no tensors; {} where it is empty. Raises ShoalError."""
    _declared_bytes(request, SMALL_BYTES)
    body = bytes(await _read_body(request, SMALL_BYTES))
    return tensors.load_json(body) if body.strip() else {}


_SINGLE_HEADERS: Final = frozenset(
    {"authorization", "content-length", "content-encoding", TENANT_KEY, HOP_KEY, _LENGTH_HEADER, _DEADLINE_HEADER}
)
_PLAIN: Final = frozenset({"identity", ""})
_Expander = Callable[[bytes | bytearray], Iterator[bytes | bytearray]]
_EXPANDED_AT_ONCE: Final = 2**20


def _expander(encoding: str) -> _Expander:
    """A function that expands the next bytes of a body. Pieces of a compressed body have at most `_EXPANDED_AT_ONCE`
    bytes."""
    match encoding.strip().lower():
        case plain if plain in _PLAIN:
            return lambda data: iter((data,))
        case "gzip" | "deflate":
            stream = zlib.decompressobj(wbits=47)

            def expand(data: bytes | bytearray) -> Iterator[bytes | bytearray]:
                try:
                    while data and not stream.eof:
                        yield stream.decompress(data, _EXPANDED_AT_ONCE)
                        data = stream.unconsumed_tail
                except zlib.error as error:
                    raise invalid(f"a body that is not {encoding}: {error}"[:200], encoding) from error

            return expand
        case _:
            raise refuse(
                Code.UNIMPLEMENTED, f"content-encoding {encoding!r:.40}", "identity, gzip or deflate", "send it plain"
            )


def _whole_number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise invalid(f"{name} {text!r:.40}", "a whole number")
    return int(text)


def _version(request: RestRequest) -> str:
    """The version in /v2/models/NAME/versions/VERSION/...; empty without one."""
    return request.path[4] if len(request.path) > 4 and request.path[3] == "versions" else ""


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode()


def _response(document: Any, at: int = 200) -> RestResponse:
    return RestResponse(at, _dump(document), {"content-type": "application/json"})


def reason_of(at: int) -> str:
    """The reason phrase. 499, from nginx, is not in the standard."""
    return HTTPStatus(at).phrase if at in HTTPStatus.__members__.values() else "Client Closed Request"


def _options(path: tuple[str, ...]) -> RestResponse:
    match path:
        case ("*",):
            allowed = "GET, HEAD, POST, OPTIONS"
        case (
            ("v2", "models", *_, "infer" | "generate" | "generate_stream")
            | ("v2", "repository", *_)
            | ("v2", "systemsharedmemory" | "cudasharedmemory", *_, "register" | "unregister")
        ):
            allowed = "POST, OPTIONS"
        case ("v2", *_):
            allowed = "GET, HEAD, OPTIONS"
        case _:
            raise _no_such_path("OPTIONS", path)
    return RestResponse(200, b"", {"allow": allowed})


def _no_such_path(method: str, path: tuple[str, ...]) -> ShoalError:
    shown = f"{method} /{'/'.join(path)}"
    return refuse(Code.NOT_FOUND, f"{shown!r:.200}", "a path of the Open Inference Protocol", "see its REST form")


def _ready(document: Mapping[str, Any], ready: bool) -> RestResponse:
    return _response({**document, "ready": ready}, 200 if ready else 503)


def refusal_response(refusal: Refusal, retry_s: float | None = None, at: int | None = None) -> RestResponse:
    response = _response({"error": str(refusal), "code": refusal.code}, at or status.http_status(refusal.code))
    headers = {**response.headers, status.CODE_KEY: str(refusal.code)}
    if retry_s is not None:
        headers |= {"retry-after": str(math.ceil(retry_s)), status.RETRY_KEY: str(max(1, round(retry_s * 1000)))}
    if refusal.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return RestResponse(response.status, response.body, headers)
