"""gRPC calls that no regular client would send, as hand-made HTTP/2 frames."""

import asyncio
import contextlib
import socket
import ssl
import struct


def declare_4_gib(address: str, path: str, context: ssl.SSLContext, server_name: str) -> bytes:
    """The server's answer to a message that declares 4 GiB and sends ten bytes: a refusal, by the server (`TOO_LARGE`)
    or by grpc's library, or a close."""
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=server_name) as secure,
    ):
        secure.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, b"")
            + frame(1, 4, 1, request_block(path))
            + frame(0, 0, 1, b"\x00" + struct.pack("!I", 2**32 - 1) + b"0123456789")
        )
        seen = b""
        while b"grpc-status" not in seen or not any(each in seen for each in (b"larger than max", b"TOO_LARGE")):
            data = secure.recv(65536)
            if not data:
                break
            seen += data
        return seen


DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_INITIAL_WINDOW = 4


class Http2Connection:
    """A connection on which the test decides what to send and read. It answers pings, like a live peer.

    seen: every frame received, as (type, flags, stream, payload). window: of each stream, in bytes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen: list[tuple[int, int, int, bytes]] = []
        self.closed = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._greeted = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, address: str, context: ssl.SSLContext, server_name: str, *, window: int = 65535, hello: bool = True
    ) -> "Http2Connection":
        """hello: send the preface and settings; otherwise the server waits for them. Raises OSError."""
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=server_name, ssl_handshake_timeout=30
        )
        made = cls(reader, writer)
        if hello:
            made._greeted = True
            made.send(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, struct.pack("!HI", _INITIAL_WINDOW, window))
            )
        return made

    def send(self, data: bytes) -> None:
        if not self.closed.is_set():
            self._writer.write(data)

    def open_stream(self, stream: int, path: str, **metadata: str) -> None:
        """Send the headers of a call; `_` in a metadata key stands for `-`."""
        self.send(frame(HEADERS, END_HEADERS, stream, request_block(path, **metadata)))

    def send_message(self, stream: int, content: bytes, *, of: int | None = None, end: bool = False) -> None:
        """Send a message in frames of 16 KiB. of: the size that it declares."""
        data = b"\x00" + struct.pack("!I", len(content) if of is None else of) + content
        for at in range(0, len(data), 2**14):
            last = end and at + 2**14 >= len(data)
            self.send(frame(DATA, END_STREAM if last else 0, stream, data[at : at + 2**14]))

    def send_data(self, stream: int, content: bytes) -> None:
        self.send(frame(DATA, 0, stream, content))

    def send_trailers(self, stream: int, **fields: str) -> None:
        block = b"".join(_literal(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())
        self.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))

    @property
    def goaway_error(self) -> int | None:
        """The code of the newest GOAWAY; None before one."""
        codes = [int.from_bytes(payload[4:8]) for kind, _, _, payload in self.seen if kind == GOAWAY]
        return codes[-1] if codes else None

    def reset(self, stream: int) -> None:
        self.send(frame(RST_STREAM, 0, stream, struct.pack("!I", 8)))

    def grant_window(self, stream: int, size: int) -> None:
        self.send(frame(WINDOW_UPDATE, 0, stream, struct.pack("!I", size)))

    def header_blocks(self, stream: int) -> bytes:
        """Header blocks of that stream. gRPC's core compresses no literal: names and values can be found in it."""
        return b"".join(payload for kind, _, number, payload in self.seen if kind == HEADERS and number == stream)

    def is_ended(self, stream: int) -> bool:
        """Whether the server ended it: with its last frame, with a reset, or by closing the connection."""
        return self.closed.is_set() or any(
            number == stream and (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM))
            for kind, flags, number, _ in self.seen
        )

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                payload = await self._reader.readexactly(size)
                self.seen.append((kind, flags, int.from_bytes(head[5:]) & 2**31 - 1, payload))
                if kind == PING and not flags & ACK:
                    self.send(frame(PING, ACK, 0, payload))
                if kind == SETTINGS and not flags & ACK and self._greeted:
                    self.send(frame(SETTINGS, ACK, 0, b""))
        except (OSError, EOFError):
            self.closed.set()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def request_block(path: str, **metadata: str) -> bytes:
    """The header block of a call: HPACK literals without indexing. `_` in a metadata key stands for `-`."""

    fields = {
        b":method": b"POST",
        b":scheme": b"https",
        b":path": path.encode(),
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        **{name.replace("_", "-").encode(): value.encode() for name, value in metadata.items()},
    }
    return b"".join(_literal(*pair) for pair in fields.items())


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
