"""A client that takes nothing of what it asks for loses its connection before that fills the memory."""

from typing import Any

import pytest

from harness.fakes.wire import Wire
from shoal.host.grpc_server import GrpcServerLimits
from shoal.host.http2_session import UNTAKEN_BYTES

LIMITS = GrpcServerLimits(streams=8, message_bytes=1, handshake_s=60.0, ping_interval_s=60.0, ping_timeout_s=60.0)


class Full(Wire):
    """The kernel takes nothing more."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


@pytest.mark.parametrize("is_paused", [False, True])
async def test_who_takes_nothing_is_let_go(is_paused: bool) -> None:
    """What needs no credentials is answered too: pings, and calls that are refused."""
    wire: Any = Full()
    session = wire.session(None, LIMITS)
    if is_paused:
        session.pause_writing()
    answered = 0
    while not wire.is_aborted and answered < 2 * UNTAKEN_BYTES:
        session.connection.out.append(bytes(2**14))
        session.flush()
        answered += 2**14
    assert wire.is_aborted is is_paused
    assert len(wire.sent) < 1.1 * UNTAKEN_BYTES or not is_paused


async def test_answers_that_are_sent_at_once_are_no_fault_of_whoever_asked() -> None:
    """Of many streams in one turn of the loop: the kernel is full only once all of them were written."""
    wire: Any = Full()
    session = wire.session(None, LIMITS)
    write = wire.write

    def write_and_pause(data: Any) -> None:
        write(data)
        session.pause_writing()

    wire.write = write_and_pause
    session.connection.out.append(bytes(8 * UNTAKEN_BYTES))
    session.flush()
    assert not session.connection.can_send
    assert not wire.is_aborted
    session.resume_writing()
    session.connection.out.append(bytes(UNTAKEN_BYTES))
    session.flush()
    session.connection.out.append(bytes(UNTAKEN_BYTES))
    session.flush()
    assert not wire.is_aborted, "it has taken what came before"
