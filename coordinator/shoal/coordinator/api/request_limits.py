"""Limits requests on ports without client certificates before they are parsed; `authorise.py` does it on the others."""

from typing import Any

import grpc
import grpc.aio

from shoal.types.codes import ShoalError
from shoal.wire.grpcio_status import abort
from shoal.wire.request_limits import make_reader


class RequestLimitInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Covers methods with one request and one reply, which are all that unauthenticated clients may call."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        assert handler.unary_unary is not None, f"{handler_call_details.method} streams"
        read = make_reader(handler_call_details.method, handler.request_deserializer)

        async def call(data: bytes, context: Any) -> Any:
            try:
                request = read(data)
            except ShoalError as error:
                await abort(context, error.refusal)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(call, None, handler.response_serializer)
