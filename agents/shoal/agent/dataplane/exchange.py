"""Messages of one gRPC call of a method other than an inference: small ones, each within a time limit."""

import asyncio
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from shoal.agent.dataplane.ingress_admission import SMALL_S
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.units import Seconds
from shoal.wire import status


class Exchange:
    """Messages of one call of a method other than an inference."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.context = context
        self._writing: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """The next message, None at the end of the call."""
        request = await self.context.read()
        return request if isinstance(request, bytes) else None

    async def send(self, answer: Message | bytes) -> None:
        """Raises ShoalError(TOO_SLOW) if the caller does not read the answer."""
        content = answer if isinstance(answer, bytes) else answer.SerializeToString()
        self._writing = asyncio.ensure_future(self.context.write(content))
        self._writing.add_done_callback(_forget)
        taken, _ = await asyncio.wait((self._writing,), timeout=SMALL_S)
        if not taken:
            found = "an answer that its caller does not take"
            raise refuse(Code.TOO_SLOW, found, f"within {SMALL_S:g}s", "read faster")
        self._writing.result()

    async def abort(self, refusal: Refusal, retry_s: Seconds | None = None) -> None:
        """End the call after its last answer was sent, because only one operation may send at a time.

        Raises CancelledError if the caller disconnects before that, which the library does not report otherwise.
        """
        try:
            if self._writing is not None:
                await self._writing
            await status.abort(self.context, refusal, retry_s)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as error:
            raise asyncio.CancelledError from error


def _forget(writing: "asyncio.Future[None]") -> None:
    """Retrieve the result of a write that nobody awaits."""
    if not writing.cancelled():
        writing.exception()
