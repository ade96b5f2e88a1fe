"""Messages of one gRPC call of a method other than an inference: small ones, each within a time limit."""

import asyncio

from google.protobuf.message import Message

from shoal.agent.dataplane.grpc_call import GrpcCall
from shoal.agent.dataplane.ingress_admission import SMALL_S
from shoal.types.codes import Code, refuse


class Exchange:
    """Messages of one call of a method other than an inference."""

    def __init__(self, call: GrpcCall) -> None:
        self.call = call
        self._writing: asyncio.Future[None] | None = None

    def send_now(self, answer: Message | bytes) -> bool:
        """Send the answer if all of it can go at once; return whether it did. Raises CallEnded."""
        return self.call.write_now(_content_of(answer))

    async def send(self, answer: Message | bytes) -> None:
        """Raises ShoalError(TOO_SLOW) if the caller does not read the answer, CallEnded."""
        if self.send_now(answer):
            return
        self._writing = asyncio.ensure_future(self.call.write(_content_of(answer)))
        self._writing.add_done_callback(_forget)
        taken, _ = await asyncio.wait((self._writing,), timeout=SMALL_S)
        if not taken:
            found = "an answer that its caller does not take"
            raise refuse(Code.TOO_SLOW, found, f"within {SMALL_S:g}s", "read faster")
        self._writing.result()

    async def settle(self) -> None:
        """Return when the last answer was sent, because only one operation may send at a time. Raises CallEnded."""
        if self._writing is not None:
            await self._writing


def _content_of(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def _forget(writing: "asyncio.Future[None]") -> None:
    """Retrieve the result of a write that nobody awaits."""
    if not writing.cancelled():
        writing.exception()
