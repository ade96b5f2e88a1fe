"""The refusal that a status of grpc's own stands for."""

import grpc
import grpc.aio
import pytest

from shoal.types.codes import Code
from shoal.wire.grpcio_status import refusal_of


def error(status: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(status, nothing, nothing, details=details, debug_error_string=None)


@pytest.mark.parametrize(
    ("status", "details", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", Code.COORDINATOR_UNREACHABLE),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", Code.COORDINATOR_UNREACHABLE),
        (grpc.StatusCode.INTERNAL, "a bug", Code.INTERNAL),
    ],
)
def test_a_call_that_was_lost_is_told_from_a_bug(status: grpc.StatusCode, details: str, code: Code) -> None:
    assert refusal_of(error(status, details)).code is code
