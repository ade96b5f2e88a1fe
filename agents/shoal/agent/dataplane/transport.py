"""The interface between the transports of the Open Inference Protocol and the service that answers.

A transport (gRPC, REST) finds each call's caller and deadline, and passes the call to the `InferenceService`.
Errors of the service become statuses of the protocol. `tests/contract/dataplane` tests every transport against this
module.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.http2.grpc_messages import MessageBytes
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds
from shoal.wire.limits import INFER_BYTES

MAX_MESSAGE = INFER_BYTES + 2**20
"""Largest message accepted from the network: the limit of tensor bytes, and room for their description."""

TENANT_KEY = "shoal-tenant"
ORIGIN_KEY = "shoal-origin"
HOP_KEY = "shoal-hop"
REQUEST_KEY = "shoal-request-id"
AGREEMENT_KEY = "shoal-agreement"
STEP_KEY = "shoal-step"
FORWARD_KEY = "shoal-forward"
SUSPECT_KEY = "shoal-suspect"
TRACE_KEY = "traceparent"

MAX_REQUEST_ID = 128
_REQUEST_ID = re.compile(f"[ -~]{{1,{MAX_REQUEST_ID}}}")


def is_request_id(text: str) -> bool:
    """Whether the text may be a request id in headers, metadata and logs: printable ASCII of limited length."""
    return _REQUEST_ID.fullmatch(text) is not None


def check_request_id(text: str) -> str:
    """Return the id; "" stands for none. Raises ShoalError(INVALID_ARGUMENT)."""
    if text and not is_request_id(text):
        asked = f"1 to {MAX_REQUEST_ID} characters of printable ASCII"
        raise refuse(Code.INVALID_ARGUMENT, f"{REQUEST_KEY} {text!a:.60}", asked, "leave it out, or shorten it")
    return text


@dataclass(frozen=True, slots=True)
class InboundCall:
    """What a transport knows of one call.

    All but `identity`, `bearer` and `remaining_s` are claims of the caller. The service decides who may claim what.
    """

    # From a client certificate that a CA of the region in its name issued; None without one.
    identity: Identity | None = None
    # The bearer token as sent; empty without one.
    bearer: str = ""
    # Tenant to act for; empty where the caller names none.
    tenant: str = ""
    # Origin under which another front counted the ingress; empty without one.
    origin: str = ""
    # 1 where another front forwards the request, else 0.
    hop: int = 0
    # Request id; empty without one.
    request_id: str = ""
    # Seconds until the caller's deadline; None without one.
    remaining_s: Seconds | None = None
    # Agreement of a guest's request; empty without one.
    agreement: str = ""
    # Token of a forwarded session step; empty without one.
    step: str = ""
    # W3C `traceparent`; empty without one.
    trace: str = ""
    # Proof that the front forwards the request (`ForwardAuth.sign`); empty without one.
    forward: str = ""
    # The forwarding front saw a worker crash under the same request.
    suspect: bool = False

    @property
    def caller(self) -> str:
        """Whose share of a transport this call counts in, once the service has admitted it."""
        return self.identity.uri if self.identity is not None else self.bearer


class CallRefused(ShoalError):
    """A refusal with the time after which to retry."""

    def __init__(self, refusal: Refusal, retry_after_s: Seconds | None = None) -> None:
        super().__init__(refusal)
        self.retry_after_s = retry_after_s


def retry_after_s(error: ShoalError) -> Seconds | None:
    return error.retry_after_s if isinstance(error, CallRefused) else None


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error that ends a call, and of its causes.

    They are not read, and their frames hold the request. An error and a frame that refers to it form a cycle, and a
    frame of grpc refers to the error that ends a call. Without this, both stay until the garbage collector runs.
    """
    found, seen = [error], set[int]()
    while found:
        each = found.pop()
        if id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            found += [other for other in (each.__cause__, each.__context__) if other is not None]


class DirectInference(Protocol):
    """A request that can be answered without a task."""

    @property
    def payer(self) -> str:
        """As `InferenceService.admit` gives it."""
        ...

    def begin(self, on_end: Callable[[MessageBytes | None, Exception | None], None]) -> bool:
        """Count it, and have it answered: `on_end` gets the answer, or why there is none, once, unless it is cancelled
        before. False, and nothing is counted, where it has to wait for its turn: then it is to be asked for with
        `infer`."""
        ...

    def cancel(self) -> None:
        """The caller is gone. Idempotent."""
        ...


class InferenceService(Protocol):
    """Answers the protocol. Every method but `live` authenticates the caller and raises ShoalError (or CallRefused)."""

    def live(self) -> bool: ...

    @property
    def change(self) -> asyncio.Event:
        """Set, and replaced by a new event, when the result of `server_ready` may have changed for any caller."""
        ...

    def authenticate(self, call: InboundCall) -> None:
        """Only check who calls, for any method; called before a message is read."""
        ...

    def admit(self, call: InboundCall) -> str:
        """The payer of an inference request of this caller, its tenant; called before the body is read. Raises
        CallRefused too where the tenant is over its limits."""
        ...

    async def pace(self, call: InboundCall, error: ShoalError) -> None:
        """Return when the caller may hear of `error`: those over their tenant's limits do not hear as fast as they
        ask."""
        ...

    def payer_of(self, call: InboundCall) -> str | None:
        """As `admit`, without a refusal: None where only `admit` can tell."""
        ...

    def tenant_of(self, call: InboundCall) -> str:
        """Whose calls one that is no inference counts with, as `admit` gives it, whether or not the tenant is over its
        rate; empty where it is no tenant's. Called before it takes a place: raises where it is to be refused."""
        ...

    def server_ready(self, call: InboundCall) -> bool: ...

    def server_metadata(self, call: InboundCall) -> oip.ServerMetadataResponse: ...

    def index(self, call: InboundCall, *, ready_only: bool) -> oip.RepositoryIndexResponse: ...

    async def model_ready(self, call: InboundCall, name: str, version: str) -> bool: ...

    async def model_metadata(self, call: InboundCall, name: str, version: str) -> oip.ModelMetadataResponse: ...

    async def model_config(self, call: InboundCall, name: str, version: str) -> oip.ModelConfigResponse:
        """The model's description in Triton's form, from its metadata."""
        ...

    async def statistics(self, call: InboundCall, name: str, version: str) -> oip.ModelStatisticsResponse:
        """Counts of what this front answered the caller's tenant; for all its models where `name` is empty."""
        ...

    def prepare_direct(
        self, call: InboundCall, remaining_s: float | None, memo: dict[str, object], request: bytes
    ) -> DirectInference | None:
        """The request, if it needs no task; None where only `infer` can tell what becomes of it, as of every request
        that is refused. `memo` is kept for calls of this caller with the same headers; `remaining_s` counts and not the
        call's."""
        ...

    def shared_memory_status(self, call: InboundCall, name: str) -> oip.SystemSharedMemoryStatusResponse:
        """The region of that name, or all of the caller's tenant where `name` is empty."""
        ...

    def register_shared_memory(self, call: InboundCall, asked: oip.SystemSharedMemoryRegisterRequest) -> None: ...

    def unregister_shared_memory(self, call: InboundCall, name: str) -> None:
        """Remove a region, or all of the caller's tenant where `name` is empty."""
        ...

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        """Answer a serialized ModelInferRequest with a serialized ModelInferResponse. Cancelled when the caller
        disconnects."""
        ...


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of this node: its certificate (with chain), its key, and the region's CAs.

    Changed files are read again, for connections opened from then on.
    """

    certificate: Path
    key: Path
    authority: Path

    def stamp(self) -> tuple[int, ...]:
        """A value that changes when any of the files does. Raises OSError."""
        return tuple(p.stat().st_mtime_ns for p in (self.certificate, self.key, self.authority))
