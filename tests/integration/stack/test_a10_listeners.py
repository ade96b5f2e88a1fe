"""A10: downgrades, at every port of a region. Nothing is answered without TLS 1.2, nor without a certificate where
one is required."""

import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterator

import psutil
import pytest

from harness.cluster.stack import DevStack
from harness.report import record
from shoal.types.codes import Code, ShoalError
from shoal.wire.enrol import redeem

CLOSED_WITHIN_S = 10.0
NEEDS_A_CERTIFICATE = ("link", "metrics", "front-metrics")
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
ALERT = 0x15
"""First byte of what TLS itself says when it hangs up."""


def listeners(stack: DevStack) -> dict[str, int]:
    """Every port that a member was told to listen at, by `NAME.USE`."""
    return {
        f"{member.name}.{use}": int(address.rpartition(":")[2])
        for member in stack.info.stack.members
        for use, address in member.addresses.items()
    }


def client(stack: DevStack) -> ssl.SSLContext:
    """Trusts the region, shows nothing."""
    return ssl.create_default_context(cafile=str(stack.info.operator.ca))


def exchange(connection: socket.socket, words: bytes) -> bytes:
    """What comes back until the other side closes; nothing where it resets."""
    found = b""
    with contextlib.suppress(ConnectionError, BrokenPipeError, ssl.SSLError):
        connection.sendall(words)
        while piece := connection.recv(4096):
            found += piece
    return found


@contextlib.contextmanager
def dial(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=CLOSED_WITHIN_S) as connection:
        yield connection


def test_a10_no_port_answers_without_tls(stack: DevStack) -> None:
    found = listeners(stack)
    for name, port in found.items():
        for words in (HTTP, HTTP2):
            with dial(port) as plain:
                answer = exchange(plain, words)
            told = name.endswith(".data") and requires_tls(answer)
            assert told or answer == b"" or answer[0] == ALERT, f"{name} answers plaintext: {answer[:60]!r}"
    record("A10", "P", 2 * len(found), plaintext="refused at every port", ports=len(found))


def requires_tls(answer: bytes) -> bool:
    """A data port says in HTTP that it speaks TLS, and ends the connection."""
    return answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer.lower() and b"TLS_REQUIRED" in answer


def test_a10_no_port_speaks_tls_1_1(stack: DevStack) -> None:
    context = client(stack)
    with pytest.deprecated_call():
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    for name, port in listeners(stack).items():
        with dial(port) as plain, pytest.raises((ssl.SSLError, ConnectionError)) as refused:
            context.wrap_socket(plain, server_hostname="localhost")
        # The server's own alert, not this machine's library, which could not even try.
        assert re.search("protocol version|reset|closed|EOF", str(refused.value), re.IGNORECASE), f"{name}: {refused}"


def test_a10_no_port_that_needs_a_certificate_answers_without_one(stack: DevStack) -> None:
    for name, port in listeners(stack).items():
        if name.partition(".")[2] not in NEEDS_A_CERTIFICATE:
            continue
        context = client(stack)
        context.set_alpn_protocols(["h2", "http/1.1"])
        for words in (HTTP, HTTP2):
            with dial(port) as plain:
                answer = b""
                refused = contextlib.suppress(ssl.SSLError, ConnectionError)
                with refused, context.wrap_socket(plain, server_hostname="localhost") as secured:
                    answer = exchange(secured, words)
            assert answer == b"", f"{name} answers a stranger: {answer[:60]!r}"


def test_a10_ports_that_take_other_credentials_refuse_who_has_none(stack: DevStack) -> None:
    for name, port in listeners(stack).items():
        match name.partition(".")[2]:
            case "data":
                with dial(port) as plain, client(stack).wrap_socket(plain, server_hostname="localhost") as secured:
                    secured.sendall(b"GET /v2/models/relu HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    assert secured.recv(64).startswith(b"HTTP/1.1 401 "), name
            case "enrol":
                with pytest.raises(ShoalError) as refused:
                    redeem(f"127.0.0.1:{port}", "shoal-join.nothing", "edge-9")
                assert refused.value.code is Code.TOKEN_INVALID


def test_a10_nothing_else_listens(stack: DevStack) -> None:
    """Every TCP port that a process of the region opened is one of those above, on loopback."""
    known = set(listeners(stack).values())
    opened: dict[int, str] = {}
    for (pid, _), name in stack.processes().items():
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                host = connection.laddr.ip.removeprefix("::ffff:")
                assert ipaddress.ip_address(host).is_loopback, f"{name} listens on {connection.laddr}"
                opened[connection.laddr.port] = name
    assert set(opened) == known, {port: name for port, name in opened.items() if port not in known}
