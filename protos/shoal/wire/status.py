"""The table from codes to gRPC and HTTP statuses, and how a refusal is sent beside a status."""

from typing import Any, Final, NoReturn, Protocol

import grpc

from shoal.types.codes import Code, Refusal
from shoal.v1 import nouns_pb2

_GRPC: Final[dict[grpc.StatusCode, tuple[Code, ...]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        Code.INVALID_ARGUMENT,
        Code.YAML_INVALID,
        Code.FIELD_INVALID,
        Code.USAGE,
        Code.NAME_INVALID,
        Code.MESSAGE_INVALID,
        Code.FIELD_TOO_MANY,
        Code.MODEL_INVALID,
        Code.MODEL_PATH,
        Code.MODEL_ARCHIVE,
        Code.MODEL_DIGEST,
        Code.CUSTOM_OP_DENIED,
        Code.EXPRESSION_INVALID,
        Code.POLICY_COST,
        Code.SOURCE_DENIED,
        Code.SIGNAL_INVALID,
        Code.CSR_DENIED,
        Code.NOT_SUPPORTED_YET,
        Code.TELEMETRY_ABSURD,
        Code.RECEIPT_ABSURD,
        Code.SESSION_INVALID,
    ),
    grpc.StatusCode.NOT_FOUND: (
        Code.MODEL_NOT_FOUND,
        Code.MODEL_UNKNOWN,
        Code.NOT_FOUND,
        Code.WORKLOAD_UNKNOWN,
        Code.NODE_UNKNOWN,
        Code.POLICY_UNKNOWN,
        Code.TENANT_UNKNOWN,
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        Code.TOO_LARGE,
        Code.MODEL_TOO_LARGE,
        Code.QUOTA,
        Code.DISK_FULL,
        Code.STORE_FULL,
        Code.OUT_OF_MEMORY,
    ),
    grpc.StatusCode.UNAVAILABLE: (
        Code.OVERLOADED,
        Code.MODEL_NOT_READY,
        Code.REPLICA_UNREACHABLE,
        Code.WORKER_CRASHED,
        Code.WORKER_KILLED,
        Code.FRONT_STUCK,
        Code.COORDINATOR_STUCK,
        Code.STORE_UNAVAILABLE,
        Code.COORDINATOR_UNREACHABLE,
        Code.NOT_LEADER,
        Code.LEASE_ENDED,
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (Code.DEADLINE_EXCEEDED, Code.TOO_SLOW),
    grpc.StatusCode.CANCELLED: (Code.CANCELLED,),
    grpc.StatusCode.UNAUTHENTICATED: (
        Code.UNAUTHENTICATED,
        Code.CERT_EXPIRED,
        Code.CERT_NOT_YET_VALID,
        Code.CERT_UNTRUSTED,
        Code.CERT_NAME_INVALID,
        Code.CERT_REVOKED,
        Code.RENEW_DENIED,
        Code.TOKEN_INVALID,
        Code.TOKEN_USED,
        Code.TOKEN_EXPIRED,
        Code.TLS_REQUIRED,
        Code.SIGNATURE_INVALID,
    ),
    grpc.StatusCode.PERMISSION_DENIED: (
        Code.ROLE_DENIED,
        Code.STORE_DENIED,
        Code.TENANT_DENIED,
        Code.FORWARD_DENIED,
        Code.NODE_MISMATCH,
        Code.REGION_MISMATCH,
        Code.DUPLICATE_IDENTITY,
        Code.TOPIC_DENIED,
    ),
    grpc.StatusCode.ABORTED: (
        Code.PLAN_STALE,
        Code.CONFLICT,
        Code.EPOCH_STALE,
        Code.TERM_STALE,
        Code.GENERATION_STALE,
        Code.MESSAGE_REPLAYED,
        Code.SESSION_LOST,
        Code.SESSION_MOVED,
        Code.SESSION_STEP,
    ),
    grpc.StatusCode.UNIMPLEMENTED: (Code.UNIMPLEMENTED,),
    grpc.StatusCode.INTERNAL: (
        Code.INTERNAL,
        Code.RUNTIME_FAILED,
        Code.REQUEST_CRASHED_WORKER,
        Code.STORE_CORRUPT,
        Code.STATE_CORRUPT,
    ),
}
_GRPC_OF: Final = {code: status for status, codes in _GRPC.items() for code in codes}

_HTTP_OF_GRPC: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
}
_HTTP_SPECIAL: Final = {Code.TOO_SLOW: 408, Code.QUOTA: 429, Code.OVERLOADED: 503}

CODE_KEY: Final = "shoal-code"
REFUSAL_KEY: Final = "shoal-refusal-bin"
RETRY_KEY: Final = "retry-after-ms"


class AbortContext(Protocol):
    """The part of grpc.aio's servicer context that an abort needs."""

    async def abort(self, code: grpc.StatusCode, details: str = ..., trailing_metadata: Any = ...) -> NoReturn: ...


def grpc_status(code: Code) -> grpc.StatusCode:
    """FAILED_PRECONDITION for codes that depend on the current state (those of placement, waits)."""
    return _GRPC_OF.get(code, grpc.StatusCode.FAILED_PRECONDITION)


def http_status(code: Code) -> int:
    return _HTTP_SPECIAL.get(code) or _HTTP_OF_GRPC[grpc_status(code)]


def trailers(refusal: Refusal, retry_after_s: float | None = None) -> tuple[tuple[str, str | bytes], ...]:
    message = nouns_pb2.Refusal(
        code=refusal.code, found=refusal.found, asked=refusal.asked, remedy=refusal.remedy
    ).SerializeToString()
    found: tuple[tuple[str, str | bytes], ...] = ((CODE_KEY, str(refusal.code)), (REFUSAL_KEY, message))
    if retry_after_s is not None:
        found = (*found, (RETRY_KEY, str(max(1, round(retry_after_s * 1000)))))
    return found


async def abort(context: AbortContext, refusal: Refusal, retry_after_s: float | None = None) -> NoReturn:
    """Ends the call with the refusal's status. The trailers carry the whole refusal."""
    await context.abort(grpc_status(refusal.code), str(refusal), trailers(refusal, retry_after_s))


_CODE_OF_STATUS: Final = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
    grpc.StatusCode.UNAVAILABLE: Code.COORDINATOR_UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: Code.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: Code.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.ROLE_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: Code.NOT_FOUND,
}

_CALL_LOST: Final = "Internal error from Core"
"""Details that grpc's Python API gives, with INTERNAL, to a call that was over when a message was written, whatever
ended it: https://github.com/grpc/grpc/issues/36066"""


def refusal_of(error: grpc.RpcError) -> Refusal:
    """The refusal that a Shoal server sent, otherwise the nearest code for grpc's own status."""
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in trailing:
        if key == REFUSAL_KEY:
            message = nouns_pb2.Refusal.FromString(value)
            if message.code in Code.__members__:
                return Refusal(Code(message.code), message.found, message.asked, message.remedy)
            return Refusal(Code.CODE_UNKNOWN, f"{message.code}: {message.found}", message.asked, message.remedy)
    status = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = getattr(error, "details", lambda: str(error))() or ""
    if status is grpc.StatusCode.INTERNAL and details == _CALL_LOST:
        return Refusal(Code.COORDINATOR_UNREACHABLE, "the call was over before it was written", "a call", "try again")
    return Refusal(_CODE_OF_STATUS.get(status, Code.INTERNAL), details)


def retry_after_s(error: grpc.RpcError) -> float | None:
    for key, value in getattr(error, "trailing_metadata", lambda: None)() or ():
        if key == RETRY_KEY and value.isdigit():
            return int(value) / 1000
    return None
