"""A client's calls on a connection whose server allows few streams at once, used by several payers."""

import asyncio
from collections.abc import Awaitable

import pytest

from harness.fakes.wire import Wire
from harness.wait import until
from shoal.host.grpc_client import (
    CallError,
    ChannelState,
    ClientCall,
    ClientSession,
    GrpcChannel,
    UnaryCall,
)
from shoal.http2 import frames
from shoal.http2.frames import ErrorCode
from shoal.http2.grpc_messages import GrpcStatus, parse_timeout
from shoal.http2.header_blocks import HeaderDecoder, encode
from shoal.wire.limits import PEER

MOST = 8
"""Streams: one payer gets six of them, and the next finds two."""
BLOCK = encode(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"there")))


class Connection:
    """One that is open, and its calls."""

    def __init__(self, most: int = MOST) -> None:
        self.channel = GrpcChannel("127.0.0.1:1", "there", None, PEER, 2**20)
        self.session = ClientSession(self.channel, PEER, is_shared=True)
        self.wire = Wire()
        self.session.connection_made(self.wire)
        self.made = list[str]()
        """Payers whose header blocks were made, in that order."""
        self.allow(most)

    def allow(self, most: int) -> None:
        self.session.data_received(frames.settings(((frames.MAX_CONCURRENT_STREAMS, most),)))

    def ask(self, *payers: str) -> list[asyncio.Task[ClientCall]]:
        return [asyncio.create_task(self._open(payer)) for payer in payers]

    async def _open(self, payer: str) -> ClientCall:
        def make_block() -> bytes:
            self.made.append(payer)
            return BLOCK

        return await self.session.open(payer, make_block, b"", 2**20)

    def end(self, count: int = 1) -> None:
        """The server ends the oldest calls."""
        for number in tuple(self.session.connection.streams)[:count]:
            self.session.data_received(frames.rst_stream(number, ErrorCode.CANCEL))

    async def until_open(self, count: int) -> None:
        await until(lambda: len(self.session.connection.streams) == count, 5.0, f"{count} calls are open")
        await turns()
        assert len(self.session.connection.streams) == count

    def timeouts(self) -> list[float]:
        """Seconds that the server was told of calls, in their order."""
        sent, decoder, found = memoryview(bytes(self.wire.sent)), HeaderDecoder(), list[float]()
        at = len(frames.PREFACE)
        while at < len(sent):
            high, low, kind, _, _ = frames.HEAD.unpack_from(sent, at)
            begin = at + frames.HEAD_BYTES
            at = begin + (high << 16 | low)
            if kind == frames.HEADERS:
                told = decoder.decode(bytes(sent[begin:at])).get(b"grpc-timeout")
                found.append(parse_timeout((told or b"").decode()) or 0.0)
        return found

    @property
    def in_use(self) -> int:
        """Streams."""
        return self.session._shares.total


async def turns() -> None:
    """Return once whatever is due has run."""
    for _ in range(5):
        await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop


async def failure(task: Awaitable[ClientCall]) -> CallError:
    with pytest.raises(CallError) as failed:
        async with asyncio.timeout(5.0):
            await task
    return failed.value


async def test_one_payer_leaves_streams_to_another_and_waits_for_its_own() -> None:
    at = Connection()
    loud = at.ask(*(20 * ["loud"]))
    await at.until_open(6)
    assert (at.session.has_stream("loud"), at.session.has_stream("quiet")) == (False, True)
    assert at.made == 6 * ["loud"], "what is said is made once there is a stream to say it on"
    (quiet,) = at.ask("quiet")
    assert (await quiet).payer == "quiet"
    at.end(2)
    await at.until_open(7)
    assert [task.done() for task in loud] == 8 * [True] + 12 * [False], "in their order"
    while not all(task.done() for task in loud):
        at.end()
        await turns()
    assert at.made.count("loud") == 20


async def test_a_call_that_begins_without_a_task_overtakes_nobody_of_its_payer() -> None:
    at = Connection()
    at.ask(*(7 * ["loud"]))
    await at.until_open(6)
    at.end()
    assert not at.session.has_stream("loud"), "it is granted to the one that waits"
    await at.until_open(6)
    at.end()
    assert at.session.has_stream("loud")


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_call_that_is_cancelled_while_it_waits_takes_no_stream(is_late: bool) -> None:
    at = Connection()
    calls = at.ask(*(8 * ["loud"]))
    await at.until_open(6)
    if is_late:  # it was granted a stream already
        at.end(2)
    calls[6].cancel()
    if not is_late:
        at.end(2)
    await turns()
    assert calls[6].cancelled()
    assert calls[7].done()
    assert (len(at.session.connection.streams), at.in_use) == (5, 5)


async def test_a_call_whose_header_block_cannot_be_made_takes_no_stream() -> None:
    at = Connection()

    def fail() -> bytes:
        raise ValueError("no key")

    with pytest.raises(ValueError, match="no key"):
        await at.session.open("loud", fail, b"", 2**20)
    assert at.in_use == 0


async def test_a_lost_connection_ends_what_waits() -> None:
    at = Connection()
    calls = at.ask(*(8 * ["loud"]))
    await at.until_open(6)
    at.session.connection_lost(None)
    for call in calls[6:]:
        error = await failure(call)
        assert (error.status, error.was_processed) == (GrpcStatus.UNAVAILABLE, False)
    assert at.in_use == 0
    assert (await failure(*at.ask("quiet"))).details == "the connection was lost"
    assert at.in_use == 0


async def test_what_waits_where_the_server_goes_away_is_sent_elsewhere_at_once() -> None:
    at = Connection()
    calls = at.ask(*(8 * ["loud"]))
    await at.until_open(6)
    last = max(at.session.connection.streams)
    at.session.data_received(frames.goaway(last, ErrorCode.NO_ERROR))
    for call in calls[6:]:
        assert (await failure(call)).was_refused
    assert (await failure(*at.ask("quiet"))).was_refused
    assert (len(at.session.connection.streams), at.in_use) == (6, 6), "those under way are answered"
    at.end(6)
    assert at.in_use == 0


async def test_a_server_that_goes_away_as_a_stream_is_granted() -> None:
    at = Connection()
    calls = at.ask(*(7 * ["loud"]))
    await at.until_open(6)
    at.end(2)
    at.session.data_received(frames.goaway(2 * 6 - 1, ErrorCode.NO_ERROR))
    assert (await failure(calls[6])).was_refused
    assert at.in_use == len(at.session.connection.streams) == 4


async def test_the_server_may_allow_fewer_streams_and_then_more() -> None:
    at = Connection()
    at.ask(*(10 * ["loud"]))
    await at.until_open(6)
    at.allow(2)
    at.end(4)
    await at.until_open(2)
    at.ask("quiet")
    await turns()
    assert at.made.count("quiet") == 0
    at.allow(MOST)
    await at.until_open(7)
    assert at.made.count("quiet") == 1
    at.allow(0)
    at.end(7)
    at.ask("late")
    await turns()
    assert (len(at.session.connection.streams), at.in_use) == (0, 0)
    at.allow(1)
    await at.until_open(1)


async def test_who_hears_of_an_end_may_begin_the_next_call_at_once() -> None:
    at, found = Connection(1), list[bool]()
    call = UnaryCall(at.session, "loud", 2**20, lambda *_: found.append(at.session.has_stream("loud")))
    at.session.begin(call, BLOCK, b"")
    assert not at.session.has_stream("loud")
    at.end()
    assert found == [True]


async def test_calls_that_wait_go_elsewhere_where_the_connection_has_no_more_stream_numbers() -> None:
    at = Connection()
    loud = at.ask(*(9 * ["loud"]))
    await at.until_open(6)
    at.session.connection._next_stream = frames.MAX_STREAM_ID
    at.end()
    for call in loud[7:]:
        assert (await failure(call)).was_refused, "at once, not when a stream is free"
    assert (await failure(*at.ask("quiet"))).was_refused
    assert len(at.session.connection.streams) == at.in_use == 6, "those under way are answered, the last too"


async def test_a_connection_is_not_idle_while_a_granted_stream_is_to_be_opened() -> None:
    at = Connection(1)
    at.ask("loud", "loud")
    await at.until_open(1)
    idle = asyncio.create_task(at.session.wait_until_idle(60.0))
    at.end()  # before it looks
    assert (len(at.session.connection.streams), at.in_use) == (0, 1), "it is granted to the next"
    await at.until_open(1)
    assert not idle.done()
    at.end()
    await until(idle.done, 5.0, "no call is left")


async def test_a_call_that_waited_tells_the_server_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    at, loop = Connection(1), asyncio.get_running_loop()
    channel, waited_s, now = at.channel, 0.0, loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + waited_s)
    channel._session, channel._state = at.session, ChannelState.READY
    calls = [asyncio.create_task(channel.unary("/x/Y", b"", 50.0)) for _ in range(2)]
    await at.until_open(1)
    waited_s = 20.0
    at.end()
    await at.until_open(1)
    first, second = at.timeouts()
    assert 30.0 < first <= 50.0
    assert second <= 30.0
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_calls_without_a_task_end_at_their_own_deadlines() -> None:
    at = Connection()
    ended = list[tuple[float, GrpcStatus | None]]()

    def begin(timeout_s: float) -> UnaryCall:
        call = UnaryCall(
            at.session,
            "acme",
            2**20,
            lambda _, error: ended.append((timeout_s, None if error is None else error.status)),
        )
        at.session.begin(call, BLOCK, b"")
        call.end_at(at.session.loop.time() + timeout_s)
        return call

    begin(60.0)
    begin(0.02)
    begin(0.01)
    begin(0.015).withdraw()
    await until(lambda: len(ended) == 2, 5.0, "the two deadlines")
    assert sorted(ended) == [(0.01, GrpcStatus.DEADLINE_EXCEEDED), (0.02, GrpcStatus.DEADLINE_EXCEEDED)]
    at.session.connection_lost(None)
    assert ended[2:] == [(60.0, GrpcStatus.UNAVAILABLE)]
    assert not at.session._deadlines
    assert at.session._timer is None, "nothing refers to a connection that is gone"


async def test_a_call_whose_end_fails_leaves_the_others_their_deadlines() -> None:
    at, ended, failures = Connection(), list[float](), list[object]()
    at.session.loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def begin(timeout_s: float) -> None:
        def on_answer(_: object, error: object) -> None:
            ended.append(timeout_s)
            if timeout_s == 0.01:
                raise ValueError(timeout_s)

        call = UnaryCall(at.session, "acme", 2**20, on_answer)
        at.session.begin(call, BLOCK, b"")
        call.end_at(at.session.loop.time() + timeout_s)

    for timeout_s in (0.01, 0.011, 0.02):
        begin(timeout_s)
    await until(lambda: len(ended) == 3, 5.0, "the three deadlines")
    assert ended == [0.01, 0.011, 0.02]
    assert [str(each) for each in failures] == ["0.01"]
    at.session.connection_lost(None)
