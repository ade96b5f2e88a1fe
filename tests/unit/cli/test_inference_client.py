"""The inference client without asyncio: the connection that it keeps, and a front that ends it."""

import json
import socket
import ssl
import struct
import threading
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from harness.crypto.pki import Authority
from shoal.agent.clock import SystemClock
from shoal.client import Context, InferenceClient
from shoal.client.tensors import plain_parameter
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role

X: Final = np.zeros(2**18, np.float32)
"""1 MiB: more than a connection takes that nobody reads."""
WAIT_S: Final = 5.0
RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST."""


class Front:
    """Serves one connection after another, each for as many requests as `served` says, then closes it without a word.

    Answers are a tensor of one zero, those of `unanswered` (counted from 0) excepted: there the connection ends.
    """

    def __init__(self, context: ssl.SSLContext, served: tuple[int, ...], *, is_reset: bool, unanswered: int) -> None:
        self.requests = 0
        self.ended = threading.Semaphore(0)
        """Counts the connections that were closed."""
        self._context = context
        self._served = served
        self._is_reset = is_reset
        self._unanswered = unanswered
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        with self._listener:
            for count in self._served:
                with self._context.wrap_socket(self._listener.accept()[0], server_side=True) as connection:
                    connection.settimeout(WAIT_S)
                    for _ in range(count):
                        self._answer(connection)
                    if self._is_reset:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.ended.release()

    def _answer(self, connection: ssl.SSLSocket) -> None:
        with connection.makefile("rb") as reader:
            head = [line.strip().lower() for line in iter(reader.readline, b"\r\n")]
            (size,) = (int(line.partition(b":")[2]) for line in head if line.startswith(b"content-length:"))
            reader.read(size)
        self.requests += 1
        if self.requests - 1 != self._unanswered:
            output = {"name": "y", "shape": [1], "datatype": "FP32", "data": [0.0]}
            body = json.dumps({"outputs": [output]}).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "west", SystemClock().wall())


@pytest.fixture
def trust(authority: Authority) -> ssl.SSLContext:
    files = authority.issue(Role.GATEWAY, "front")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    return context


@pytest.fixture
def caller(authority: Authority, tmp_path: Path) -> Context:
    files = authority.issue(Role.TENANT, "acme")
    for name, path in (("cert.pem", files.certificate), ("key.pem", files.key), ("ca.pem", files.authority)):
        (tmp_path / name).write_bytes(path.read_bytes())
    return Context("client", "west", "", str(tmp_path), tenant="acme")


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_ended_while_nothing_was_asked_fails_no_request(
    trust: ssl.SSLContext, caller: Context, is_reset: bool
) -> None:
    """A front that is replaced ends the connections that it kept: what is asked next has never been anywhere."""
    front = Front(trust, (2, 1, 1), is_reset=is_reset, unanswered=-1)
    try:
        with InferenceClient(caller, front.address, retries=0, timeout_s=WAIT_S) as client:
            for count in (2, 1, 1):
                for _ in range(count):
                    assert client.infer("reader", {"x": X}).outputs["y"] == 0
                assert front.ended.acquire(timeout=WAIT_S)
    finally:
        front.stop()
    assert front.requests == 4


def test_a_request_that_may_have_been_answered_is_not_repeated(trust: ssl.SSLContext, caller: Context) -> None:
    front = Front(trust, (2, 1), is_reset=False, unanswered=1)
    try:
        with InferenceClient(caller, front.address, timeout_s=WAIT_S) as client:
            client.infer("reader", {"x": X})
            with pytest.raises(ShoalError) as failed:
                client.infer("reader", {"x": X})
            assert failed.value.code is Code.REPLICA_UNREACHABLE
            assert front.requests == 2
            client.infer("reader", {"x": X})
    finally:
        front.stop()


HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%b\r\n"


class OneAnswer(Front):
    """Answers its one request with these bytes, one part after the other, each when `next_part` allows it."""

    def __init__(self, context: ssl.SSLContext, *parts: bytes) -> None:
        self._parts = parts
        self.next_part = threading.Semaphore(0)
        super().__init__(context, (1,), is_reset=False, unanswered=-1)

    def _answer(self, connection: ssl.SSLSocket) -> None:
        with connection.makefile("rb") as reader:
            for _ in iter(reader.readline, b"\r\n"):
                pass
        for part in self._parts:
            connection.sendall(part)
            self.next_part.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("begun", [0, 10], ids=["silent", "in parts"])
def test_a_deadline_ends_a_call_whatever_the_gateway_sends(trust: ssl.SSLContext, caller: Context, begun: int) -> None:
    front = OneAnswer(trust, *([HEAD % (begun + 1, b""), b"x" * begun] if begun else [b""]))
    try:
        with InferenceClient(caller, front.address) as client:
            with pytest.raises(ShoalError) as failed:
                client.infer("reader", {"x": X[:1]}, deadline_s=0.1)
            assert failed.value.code is Code.DEADLINE_EXCEEDED
    finally:
        for _ in range(3):
            front.next_part.release()
        front.stop()


SHORT: Final = json.dumps(
    {"outputs": [{"name": "y", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 8}}]}
).encode()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"", b"<html>"),
        (b"", b'{"outputs": [{"name": "y"}]}'),
        (b"", b"[1]"),
        (b"inference-header-content-length: %d\r\n" % len(SHORT), SHORT + bytes(8)),
    ],
    ids=["page", "without a shape", "list", "short tensor"],
)
def test_an_answer_that_is_none_is_a_refusal(trust: ssl.SSLContext, caller: Context, head: bytes, body: bytes) -> None:
    front = OneAnswer(trust, HEAD % (len(body), head) + body)
    try:
        with InferenceClient(caller, front.address, timeout_s=WAIT_S) as client:
            with pytest.raises(ShoalError) as failed:
                client.infer("reader", {"x": X[:1]})
            assert failed.value.code is Code.MESSAGE_INVALID
    finally:
        front.next_part.release()
        front.stop()


def test_parameters_of_numpy_are_numbers_and_none_becomes_another() -> None:
    assert plain_parameter("a", np.int64(3)) == 3
    assert plain_parameter("a", np.float32(0.5)) == 0.5
    assert plain_parameter("a", np.bool_(True)) is True
    for value in (2**63, -(2**63) - 1, None, [1]):
        with pytest.raises(ShoalError) as refused:
            plain_parameter("sequence_id", value)
        assert refused.value.code is Code.INVALID_ARGUMENT
