"""Heads of HTTP/1.1 that are read at once: what is accepted means to h11 what it means here."""

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.agent.dataplane.http1_heads import read_usual_head

MOST = 32 * 2**10
FIELDS = (
    *(b"Host: a:1", b"host: b", b"Content-Length: 4", b"content-length:0", b"content-length: 4, 4", b"X: a\tb c \t"),
    *(b"x:", b"Connection: keep-alive", b"connection: close", b"Transfer-Encoding: chunked", b"Expect: 100-continue"),
    *(b"Authorization: Bearer s", b"x : y", b" folded", b"x: \xff", b"x: a\rb", b"x: a\x00", b"upgrade: h2c", b": y"),
)
LINES = (
    *(b"GET / HTTP/1.1", b"POST /v2/models/a%20b/infer?x=1 HTTP/1.1", b"HEAD /v2 HTTP/1.0", b"OPTIONS * HTTP/1.1"),
    *(b"PUT / HTTP/1.1", b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET /\xe9 HTTP/1.1", b"get / HTTP/1.1", b""),
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A head of plausible lines, with up to two changed bytes."""
    lines = [draw(st.sampled_from(LINES)), *draw(st.lists(st.sampled_from(FIELDS), max_size=5))]
    head = bytearray(draw(st.sampled_from([b"\r\n", b"\r\n", b"\n"])).join((*lines, b"", b"")))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(head)))
        head[at : at + draw(st.integers(0, 1))] = draw(st.sampled_from([b"", b" ", b"\r", b"\n", b":", b"\0", b"A"]))
    return bytes(head)


@given(heads())
@example(b"POST /v2/models/a/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
def test_what_is_read_at_once_is_what_h11_reads(head: bytes) -> None:
    content = bytearray(head + b"1234")
    found = read_usual_head(content, MOST)
    if found is None:
        return
    http = h11.Connection(h11.SERVER)
    http.receive_data(bytes(content))
    event = http.next_event()
    assert isinstance(event, h11.Request)
    fields = [(name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers]
    assert (event.method.decode(), event.target.decode(), fields) == (found.method, found.target, found.fields)
    assert http.their_state is h11.SEND_BODY, "the connection may go on"
    assert not http.they_are_waiting_for_100_continue
    body = b"1234" if found.body_bytes else b""
    assert found.body_bytes in (0, 4)
    assert content[found.size :] == b"1234"
    rest = b""
    while isinstance(event := http.next_event(), h11.Data):
        rest += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert rest == body


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +4\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * MOST + b"\r\n\r\n",
    ],
)
def test_what_is_left_to_h11(head: bytes) -> None:
    assert read_usual_head(bytearray(head), MOST) is None


def test_a_usual_head() -> None:
    head = b"POST /v2 HTTP/1.1\r\nHost: x\r\nX:  a b \r\nContent-Length: 12\r\n\r\n"
    found = read_usual_head(bytearray(head + b"{}"), MOST)
    assert found is not None
    assert (found.method, found.target, found.size, found.body_bytes) == ("POST", "/v2", len(head), 12)
    assert found.fields == [("host", "x"), ("x", "a b"), ("content-length", "12")]
