"""Whose connection is closed for what it takes back, and that it is closed."""

import socket
from urllib.parse import quote

import pytest

from shoal.agent.dataplane.stream_resets import CONNECTIONS, StreamResets, close_connection
from shoal.http2.stream_resets import STREAMS


@pytest.mark.parametrize(("of_ten", "closed"), [(0, False), (5, False), (6, True), (10, True)])
def test_a_connection_most_of_whose_streams_are_reset_early_is_a_storm(of_ten: int, closed: bool) -> None:
    resets = StreamResets()
    found = [resets.record_stream("ipv4:10.0.0.1:1", was_reset=stream % 10 < of_ten) for stream in range(4 * STREAMS)]
    assert any(found) is closed
    assert not any(found[: STREAMS - 1]), "too few to be judged"
    assert not resets.record_stream("ipv4:10.0.0.1:2", was_reset=True), "another connection"


def test_a_connection_that_was_good_for_long_is_judged_by_what_it_does_now() -> None:
    resets = StreamResets()
    assert not any(resets.record_stream("a", was_reset=False) for _ in range(100 * STREAMS))
    assert any(resets.record_stream("a", was_reset=True) for _ in range(2 * STREAMS))


def test_no_more_connections_are_counted_than_the_bound() -> None:
    resets = StreamResets()
    for number in range(2 * CONNECTIONS):
        resets.record_stream(str(number), was_reset=True)
    assert len(resets._counts) == CONNECTIONS


@pytest.mark.parametrize(
    ("family", "host", "prefix"), [(socket.AF_INET, "127.0.0.1", "ipv4:"), (socket.AF_INET6, "::1", "ipv6:")]
)
def test_the_connection_of_one_client_is_shut_down(family: socket.AddressFamily, host: str, prefix: str) -> None:
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.socket(family) as one,
        socket.socket(family) as other,
    ):
        accepted = []
        for client in (one, other):
            client.settimeout(5)
            client.connect(listener.getsockname())
            accepted.append(listener.accept()[0])
        shown = quote(f"[{host}]", safe=":") if ":" in host else host  # as gRPC writes it
        assert close_connection(f"{prefix}{shown}:{one.getsockname()[1]}")
        assert one.recv(1) == b""
        other.sendall(b"x")
        assert accepted[1].recv(1) == b"x"
        assert not close_connection(f"{prefix}{shown}:1")
        for each in accepted:
            each.close()
