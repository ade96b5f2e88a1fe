"""The table from codes to gRPC and HTTP statuses, and how a refusal is sent beside a status."""

from collections.abc import Iterable
from typing import Final

from shoal.http2.grpc_messages import GrpcStatus
from shoal.types.codes import Code, Refusal
from shoal.v1 import nouns_pb2

_GRPC: Final[dict[GrpcStatus, tuple[Code, ...]]] = {
    GrpcStatus.INVALID_ARGUMENT: (
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
    GrpcStatus.NOT_FOUND: (
        Code.MODEL_NOT_FOUND,
        Code.MODEL_UNKNOWN,
        Code.NOT_FOUND,
        Code.WORKLOAD_UNKNOWN,
        Code.NODE_UNKNOWN,
        Code.POLICY_UNKNOWN,
        Code.TENANT_UNKNOWN,
    ),
    GrpcStatus.RESOURCE_EXHAUSTED: (
        Code.TOO_LARGE,
        Code.MODEL_TOO_LARGE,
        Code.QUOTA,
        Code.TENANT_RATE,
        Code.TENANT_CONCURRENCY,
        Code.DISK_FULL,
        Code.STORE_FULL,
        Code.OUT_OF_MEMORY,
    ),
    GrpcStatus.UNAVAILABLE: (
        Code.OVERLOADED,
        Code.MODEL_NOT_READY,
        Code.SCALED_TO_ZERO,
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
    GrpcStatus.DEADLINE_EXCEEDED: (Code.DEADLINE_EXCEEDED, Code.TOO_SLOW),
    GrpcStatus.CANCELLED: (Code.CANCELLED,),
    GrpcStatus.UNAUTHENTICATED: (
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
    GrpcStatus.PERMISSION_DENIED: (
        Code.ROLE_DENIED,
        Code.STORE_DENIED,
        Code.TENANT_DENIED,
        Code.FORWARD_DENIED,
        Code.NODE_MISMATCH,
        Code.REGION_MISMATCH,
        Code.DUPLICATE_IDENTITY,
        Code.TOPIC_DENIED,
        Code.SHM_DENIED,
    ),
    GrpcStatus.ABORTED: (
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
    GrpcStatus.UNIMPLEMENTED: (Code.UNIMPLEMENTED,),
    GrpcStatus.INTERNAL: (
        Code.INTERNAL,
        Code.RUNTIME_FAILED,
        Code.REQUEST_CRASHED_WORKER,
        Code.STORE_CORRUPT,
        Code.STATE_CORRUPT,
    ),
}
_GRPC_OF: Final = {code: status for status, codes in _GRPC.items() for code in codes}

_HTTP_OF_GRPC: Final = {
    GrpcStatus.INVALID_ARGUMENT: 400,
    GrpcStatus.FAILED_PRECONDITION: 409,
    GrpcStatus.NOT_FOUND: 404,
    GrpcStatus.RESOURCE_EXHAUSTED: 413,
    GrpcStatus.UNAVAILABLE: 503,
    GrpcStatus.DEADLINE_EXCEEDED: 504,
    GrpcStatus.CANCELLED: 499,
    GrpcStatus.UNAUTHENTICATED: 401,
    GrpcStatus.PERMISSION_DENIED: 403,
    GrpcStatus.ABORTED: 409,
    GrpcStatus.UNIMPLEMENTED: 501,
    GrpcStatus.INTERNAL: 500,
}
_HTTP_SPECIAL: Final = {
    Code.TOO_SLOW: 408,
    Code.QUOTA: 429,
    Code.TENANT_RATE: 429,
    Code.TENANT_CONCURRENCY: 429,
    Code.OVERLOADED: 503,
}

CODE_KEY: Final = "shoal-code"
REFUSAL_KEY: Final = "shoal-refusal-bin"
RETRY_KEY: Final = "retry-after-ms"


def grpc_status(code: Code) -> GrpcStatus:
    """FAILED_PRECONDITION for codes that depend on the current state (those of placement, waits)."""
    return _GRPC_OF.get(code, GrpcStatus.FAILED_PRECONDITION)


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


_CODE_OF_STATUS: Final = {
    GrpcStatus.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
    GrpcStatus.UNAVAILABLE: Code.COORDINATOR_UNREACHABLE,
    GrpcStatus.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    GrpcStatus.CANCELLED: Code.CANCELLED,
    GrpcStatus.UNIMPLEMENTED: Code.UNIMPLEMENTED,
    GrpcStatus.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    GrpcStatus.PERMISSION_DENIED: Code.ROLE_DENIED,
    GrpcStatus.INVALID_ARGUMENT: Code.INVALID_ARGUMENT,
    GrpcStatus.NOT_FOUND: Code.NOT_FOUND,
}


def refusal_of_status(status: GrpcStatus, details: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> Refusal:
    """The refusal in a call's trailers, otherwise the nearest code for the status itself."""
    for key, value in metadata:
        if key == REFUSAL_KEY and isinstance(value, bytes):
            message = nouns_pb2.Refusal.FromString(value)
            if message.code in Code.__members__:
                return Refusal(Code(message.code), message.found, message.asked, message.remedy)
            return Refusal(Code.CODE_UNKNOWN, f"{message.code}: {message.found}", message.asked, message.remedy)
    return Refusal(_CODE_OF_STATUS.get(status, Code.INTERNAL), details)


def retry_after_of(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Seconds after which to retry, from a call's trailers; None where they do not say."""
    for key, value in metadata:
        if key == RETRY_KEY and isinstance(value, str) and value.isdigit():
            return int(value) / 1000
    return None
