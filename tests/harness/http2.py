"""gRPC calls that no client would send, as HTTP/2 frames made by hand."""

import socket
import ssl
import struct


def declare_4_gib(address: str, path: str, context: ssl.SSLContext, server_name: str) -> bytes:
    """What the server answers to a message whose prefix declares 4 GiB, followed by ten bytes: until it says that it
    is too large, or closes."""
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=server_name) as secure,
    ):
        secure.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(4, 0, 0, b"")
            + _frame(1, 4, 1, _headers(path))
            + _frame(0, 0, 1, b"\x00" + struct.pack("!I", 2**32 - 1) + b"0123456789")
        )
        seen = b""
        while b"grpc-status" not in seen or b"larger than max" not in seen:
            data = secure.recv(65536)
            if not data:
                break
            seen += data
        return seen


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def _headers(path: str) -> bytes:
    """HPACK literals without indexing."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    fields = (
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
    return b"".join(literal(*pair) for pair in fields)
