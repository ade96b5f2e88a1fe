"""Refusals of grpcio's calls: how its servers send them, and how its clients find them."""

from typing import Any, Final, NoReturn, Protocol

import grpc

from shoal.http2.grpc_messages import GrpcStatus
from shoal.types.codes import Code, Refusal
from shoal.wire.status import grpc_status, refusal_of_status, retry_after_of, trailers

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_CALL_LOST: Final = "Internal error from Core"
"""Details that grpc's Python API gives, with INTERNAL, to a call that was over when a message was written, whatever
ended it: https://github.com/grpc/grpc/issues/36066"""


class AbortContext(Protocol):
    """The part of grpc.aio's servicer context that an abort needs."""

    async def abort(self, code: grpc.StatusCode, details: str = ..., trailing_metadata: Any = ...) -> NoReturn: ...


def status_code(code: Code) -> grpc.StatusCode:
    """grpcio's name of a code's status."""
    return _CODES[grpc_status(code)]


async def abort(context: AbortContext, refusal: Refusal, retry_after_s: float | None = None) -> NoReturn:
    """Ends the call with the refusal's status. The trailers carry the whole refusal."""
    await context.abort(status_code(refusal.code), str(refusal), trailers(refusal, retry_after_s))


def refusal_of(error: grpc.RpcError) -> Refusal:
    """The refusal that a Shoal server sent, otherwise the nearest code for grpc's own status."""
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    code = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = getattr(error, "details", lambda: str(error))() or ""
    if code is grpc.StatusCode.INTERNAL and details == _CALL_LOST:
        return Refusal(Code.COORDINATOR_UNREACHABLE, "the call was over before it was written", "a call", "try again")
    return refusal_of_status(GrpcStatus(code.value[0]), details, tuple(trailing))


def retry_after_s(error: grpc.RpcError) -> float | None:
    return retry_after_of(tuple(getattr(error, "trailing_metadata", lambda: None)() or ()))
