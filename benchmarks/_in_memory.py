"""One end of a connection without a socket."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final

from shoal.agent.frames.format import Frame, FrameReader

LARGEST_FRAME: Final = 2**25


class Sink(asyncio.Transport):
    """Takes what a connection writes. on_write: what becomes of it. known: more of what it tells of itself
    (`get_extra_info`)."""

    def __init__(self, on_write: Callable[[bytes], None], **known: Any) -> None:
        super().__init__()
        self._on_write = on_write
        self._known = known

    def write(self, data: Any) -> None:
        self._on_write(data)

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "ssl_object": self, **self._known}.get(name, default)

    def getpeercert(self, *, binary_form: bool) -> bytes | None:
        """As of ssl.SSLObject: the client has no certificate."""
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def pass_bytes(receiver: asyncio.BufferedProtocol, data: bytes) -> None:
    """The bytes arrive, as many at a time as the receiver has room for."""
    view = memoryview(data)
    while view:
        room = memoryview(receiver.get_buffer(-1))
        size = min(len(room), len(view))
        room[:size] = view[:size]
        receiver.buffer_updated(size)
        view = view[size:]


def frames_in(reader: FrameReader, data: bytes) -> Iterator[Frame]:
    """The frames that end in these bytes."""
    view = memoryview(data)
    while view:
        room = reader.buffer()
        size = min(len(room), len(view))
        room[:size] = view[:size]
        reader.on_received(size)
        view = view[size:]
        while (frame := reader.next_frame(LARGEST_FRAME)) is not None:
            yield frame
