"""Connections that all say something at once leave the event loop to others in between."""

import asyncio
import socket
import ssl
from collections import Counter
from pathlib import Path

import pytest

from harness.crypto.pki import Authority
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.host import connection_turns
from shoal.host.connection_turns import PAUSE_S, TURN_S, ConnectionTurns
from shoal.host.connections import Connections
from shoal.host.tls_listener import TlsListener
from shoal.types.device import Role

CALLERS = 60


class Clock:
    """Goes on by itself with each look, where it is told to."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now = 100.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


async def next_turn() -> None:
    """Return when what is due now has run."""
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


def use_turn(turns: ConnectionTurns, clock: Clock, seconds: float = TURN_S) -> None:
    assert turns.begin_event()
    clock.now += seconds
    turns.end_event()


async def test_a_connection_alone_never_waits() -> None:
    clock = Clock()
    turns = ConnectionTurns(asyncio.get_running_loop(), clock)
    for _ in range(5):
        use_turn(turns, clock, 20 * TURN_S)
        clock.now += PAUSE_S


async def test_what_comes_when_the_turn_is_over_waits_for_the_next_and_so_does_what_comes_behind_it() -> None:
    clock, handled = Clock(), list[str]()
    turns = ConnectionTurns(asyncio.get_running_loop(), clock)
    use_turn(turns, clock, 0.6 * TURN_S)
    use_turn(turns, clock, 0.6 * TURN_S)
    assert not turns.begin_event()
    turns.wait(lambda: handled.append("a"))
    clock.now += 1.0
    assert not turns.begin_event(), "it would overtake"
    turns.wait(lambda: handled.append("b"))
    assert handled == []
    await next_turn()
    assert handled == ["a", "b"]
    assert turns.begin_event()


async def test_those_that_wait_share_turns_with_everything_else() -> None:
    loop, clock, handled, ended = asyncio.get_running_loop(), Clock(), list[object](), asyncio.Event()
    turns = ConnectionTurns(loop, clock)

    def handle(number: int) -> None:
        clock.now += 0.6 * TURN_S
        handled.append(number)

    def handle_other() -> None:
        handled.append("other")
        if 4 in handled:
            ended.set()
        else:
            loop.call_soon(handle_other)

    for number in range(5):
        turns.wait(lambda number=number: handle(number))  # type: ignore[misc]
    handle_other()
    await ended.wait()
    assert handled == ["other", 0, 1, "other", 2, 3, "other", 4, "other"]


async def test_one_that_fails_keeps_no_other_from_its_turn() -> None:
    loop, handled, errors = asyncio.get_running_loop(), list[str](), list[str]()
    loop.set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
    turns = ConnectionTurns(loop, Clock())

    def fail() -> None:
        raise ValueError("broken")

    turns.wait(fail)
    turns.wait(lambda: handled.append("b"))
    await next_turn()
    assert (handled, errors) == (["b"], ["broken"])


async def test_handshakes_at_once_leave_the_loop_to_others(tmp_path: Path) -> None:
    """Of callers that connect, and all say hello once they are taken: each turn of the loop begins a few handshakes."""
    loop, turn, begun = asyncio.get_running_loop(), 0, Counter[int]()
    connection_turns._turns[loop] = ConnectionTurns(loop, Clock(step_s=0.9 * PAUSE_S))
    authority = Authority(tmp_path, "eu", SystemClock().wall())
    files = authority.issue(Role.AGENT, "edge-1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.sni_callback = lambda *_: begun.update((turn,))
    connections = Connections(CALLERS, CALLERS)
    listener = TlsListener(connections, lambda: context, {}, handshake_s=60.0)
    port = await listener.start("127.0.0.1", 0, backlog=CALLERS)

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        if begun.total() < CALLERS:
            loop.call_soon(count_turn)

    count_turn()
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(CALLERS)]
    try:
        await until(lambda: len(connections) == CALLERS, 20.0, "all are taken")
        for caller in callers:
            caller.sendall(_hello())
        await until(lambda: begun.total() == CALLERS, 20.0, "all handshakes have begun")
        assert max(begun.values()) <= 2 * TURN_S / PAUSE_S
    finally:
        listener.close()
        for caller in callers:
            caller.close()
        await until(lambda: not len(connections), 20.0, "all are gone")


def _hello() -> bytes:
    """With which a client begins."""
    outgoing = ssl.MemoryBIO()
    secure = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="edge-1")
    with pytest.raises(ssl.SSLWantReadError):
        secure.do_handshake()
    return outgoing.read()
