"""The interface between what carries a gRPC call and the methods that answer it."""

from collections.abc import Callable, Mapping
from typing import Protocol

from shoal.host.grpc_server import CallFailure
from shoal.host.peer_certificate import PeerCertificate
from shoal.http2.grpc_messages import MessageBytes


class GrpcCall(Protocol):
    """One call, as its transport has it. `read` and `write` raise CallEnded once the caller is gone."""

    @property
    def peer(self) -> str:
        """The caller's address and port."""
        ...

    @property
    def certificate(self) -> PeerCertificate | None:
        """The caller's certificate that passed the handshake; None without one."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def memo(self) -> dict[str, object]:
        """What was made of the metadata, by whatever made it. Calls of one connection with equal metadata may share
        it."""
        ...

    @property
    def message_bytes(self) -> int | None:
        """Bytes of the next message; None where the transport does not know yet."""
        ...

    @property
    def has_message(self) -> bool:
        """Whether the next message has arrived whole."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether a part of the next message has arrived; True where the transport does not know."""
        ...

    def remaining_s(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the caller has got the answer, or is gone."""
        ...

    def discard(self) -> None:
        """Hold nothing of what the caller sends, now or later: nobody reads on."""
        ...

    async def read(self, max_bytes: int) -> bytes | None:
        """The next message, None at the end of the call. Raises MessageTooLarge."""
        ...

    def write_now(self, message: bytes) -> bool:
        """Send a message if all of it can go at once; return whether it did. Raises CallEnded."""
        ...

    async def write(self, message: bytes) -> None:
        """Send a message; return when it is on its way."""
        ...


class DirectCall(GrpcCall, Protocol):
    """A call that can be ended without a task. `complete` and `fail` do nothing where it has ended."""

    @property
    def shared_memo(self) -> dict[str, object]:
        """What was made of the metadata, but for what differs from call to call (`SHARED_FIELDS`). Calls of one
        connection share it."""
        ...

    def has_room(self, size: int) -> bool:
        """Whether an answer of `size` bytes can go at once."""
        ...

    def complete(self, message: MessageBytes) -> None:
        """End it with OK, and this only message."""
        ...

    def fail(self, failure: CallFailure) -> None:
        """End it with a status."""
        ...

    def on_turn(self, *, is_ready: bool) -> None:
        """The place that its request waited for is there; `is_ready` is false where a task is to read it instead."""
        ...
