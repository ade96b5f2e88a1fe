"""A request on its way to another front, without a task."""

import asyncio
from typing import Protocol

from shoal.agent.frames import InferAnswer, PendingCall
from shoal.host.grpc_client import CallError, GrpcChannel, MakeMetadata, UnaryCall
from shoal.types.codes import ShoalError
from shoal.types.units import Seconds


class ForwardConnection(Protocol):
    """The connection to the other front."""

    async def call(
        self, path: str, request: bytes, timeout_s: Seconds, make_metadata: MakeMetadata, payer: str
    ) -> bytes:
        """Raises ShoalError."""
        ...

    def on_call_end(self, call: object) -> None:
        """A begun call has ended."""
        ...

    def failure_of(self, channel: GrpcChannel, error: CallError) -> ShoalError:
        """What its caller is told of an error of the call."""
        ...


class BegunForward:
    """One request. `pending` gets an InferAnswer, or why there is none. A task begins where the other front refuses it
    unread."""

    __slots__ = (
        "_channel", "_connection", "_deadline", "_make_metadata", "_path", "_payer", "_pending", "_request", "_sent",
        "_task",
    )  # fmt: skip

    def __init__(
        self,
        connection: ForwardConnection,
        channel: GrpcChannel,
        pending: PendingCall,
        path: str,
        request: bytes,
        make_metadata: MakeMetadata,
        payer: str,
    ) -> None:
        """`channel`: of the connection, for a request of this size. `payer`: whose share of its streams it uses."""
        self._connection = connection
        self._channel = channel
        self._pending: PendingCall | None = pending
        self._path = path
        self._request = request
        self._deadline = 0.0
        """By the event loop's clock."""
        self._make_metadata = make_metadata
        self._payer = payer
        self._sent: UnaryCall | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, now: float, timeout_s: Seconds) -> bool:
        """Send it; False where it would have to wait. `now`: by the event loop's clock."""
        self._deadline = now + timeout_s
        self._sent = self._channel.begin_unary(
            self._path, self._request, timeout_s, self._make_metadata, self.on_answer, self._payer
        )
        return self._sent is not None

    def withdraw(self) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        self._pending = None
        self._connection.on_call_end(self)
        if self._task is not None:
            self._task.cancel()
        elif self._sent is not None:
            self._sent.withdraw()

    def on_answer(self, answer: bytes | None, error: CallError | None) -> None:
        self._connection.on_call_end(self)
        if error is None:
            self._end(answer or b"", None)
        elif error.was_refused:  # it is sent again, as often as `call` does
            self._task = asyncio.get_running_loop().create_task(self._send_again())
        else:
            self._end(b"", self._connection.failure_of(self._channel, error))

    async def _send_again(self) -> None:
        left = Seconds(self._deadline - asyncio.get_running_loop().time())
        try:
            answer = await self._connection.call(self._path, self._request, left, self._make_metadata, self._payer)
        except ShoalError as error:
            self._end(b"", error)
        else:
            self._end(answer, None)

    def _end(self, answer: bytes, error: ShoalError | None) -> None:
        pending, self._pending = self._pending, None
        if pending is None or pending.done():
            return
        if error is not None:
            pending.set_exception(error)
        else:
            pending.set_result(InferAnswer(answer, {}))
