"""What a client's channel does, against this project's server and grpcio's."""

import asyncio
import contextlib
import gc
import math
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.crypto.pki import Authority, CertificateFiles
from harness.faults.tcp_proxy import tcp_proxy
from harness.servers.grpc_port import GrpcPort
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.host.grpc_client import ANSWER_WINDOW_BYTES, CallError, ChannelClosed, ChannelState, GrpcChannel, Metadata
from shoal.host.grpc_server import CallFailure, GrpcServerLimits, ServerCall, ServerMethod
from shoal.http2.grpc_messages import GrpcStatus
from shoal.http2.keepalive import Keepalive
from shoal.types.device import Role
from shoal.wire.limits import BULK, LINK, LIVENESS, PEER, server_options

NAME = "localhost"
MAX_BYTES = 2**23
STREAMS = 4
REFUSAL = (("shoal-code", "QUOTA"), ("detail-bin", b"\x00\xff"))


@dataclass
class Calls:
    """What the server's methods see: `/x/Echo` answers at once, `/x/Hold` once `go` is set, `/x/Hang` never, `/x/Fail`
    with a status, `/x/Chat` each message by itself."""

    inside: int = 0
    most: int = 0
    cancelled: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    seen: dict[str, str] = field(default_factory=dict)
    remaining_s: float | None = None

    @contextlib.contextmanager
    def count(self) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1


@dataclass
class ServerCase:
    """A running server."""

    kind: str
    authority: Authority
    calls: Calls
    server: Any
    port: int = 0
    channels: list[GrpcChannel] = field(default_factory=list)

    def channel(
        self,
        keepalive: Keepalive = BULK,
        *,
        port: int = 0,
        name: str = NAME,
        files: CertificateFiles | None = None,
        is_shared: bool = False,
    ) -> GrpcChannel:
        own = files or self.authority.issue(Role.TENANT, "acme")

        def context() -> ssl.SSLContext:
            made = ssl.create_default_context(cafile=str(self.authority.certificate))
            made.load_cert_chain(own.certificate, own.key)
            made.set_alpn_protocols(["h2"])
            return made

        made = GrpcChannel(
            f"127.0.0.1:{port or self.port}",
            name,
            context,
            keepalive,
            MAX_BYTES,
            is_shared=is_shared,
            answer_window=ANSWER_WINDOW_BYTES,
        )
        self.channels.append(made)
        return made

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)


def own_server(calls: Calls, context: ssl.SSLContext) -> GrpcPort:
    async def echo(call: ServerCall) -> bytes | None:
        calls.seen, calls.remaining_s = dict(call.metadata), call.remaining_s()
        return await call.read(MAX_BYTES)

    async def hold(call: ServerCall) -> bytes | None:
        with calls.count():
            await calls.go.wait()
            return await call.read(MAX_BYTES)

    async def hang(call: ServerCall) -> bytes | None:
        with calls.count():
            await asyncio.Event().wait()
        return None

    async def fail(call: ServerCall) -> bytes | None:
        raise CallFailure(GrpcStatus.FAILED_PRECONDITION, "not now: 5 % são", REFUSAL)

    async def chat(call: ServerCall) -> bytes | None:
        while (message := await call.read(MAX_BYTES)) is not None:
            await call.write(message)
        return None

    methods = {"/x/Echo": echo, "/x/Hold": hold, "/x/Hang": hang, "/x/Fail": fail, "/x/Chat": chat}
    limits = GrpcServerLimits(STREAMS, MAX_BYTES, 10.0, 2.0, 3.0)
    return GrpcPort(lambda path: ServerMethod(methods[path]), limits, lambda: context)


def grpcio_server(calls: Calls) -> grpc.aio.Server:
    async def echo(request: bytes, context: Any) -> bytes:
        calls.seen, calls.remaining_s = dict(context.invocation_metadata()), context.time_remaining()
        return request

    async def hold(request: bytes, _: Any) -> bytes:
        with calls.count():
            await calls.go.wait()
            return request

    async def hang(_request: bytes, _: Any) -> bytes:
        with calls.count():
            await asyncio.Event().wait()
        raise AssertionError

    async def fail(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now: 5 % são", REFUSAL)
        raise AssertionError

    async def chat(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    unary = grpc.unary_unary_rpc_method_handler
    methods: dict[str, Any] = {
        "Echo": unary(echo), "Hold": unary(hold), "Hang": unary(hang), "Fail": unary(fail),
        "Chat": grpc.stream_stream_rpc_method_handler(chat),
    }  # fmt: skip
    made = grpc.aio.server(options=(*server_options(MAX_BYTES), ("grpc.max_concurrent_streams", STREAMS)))
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", methods),))
    return made


@pytest.fixture(params=["own", "grpcio"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ServerCase]:
    authority = Authority(tmp_path, "eu", SystemClock().wall())
    node = authority.issue(Role.AGENT, "n1")
    calls = Calls()
    if request.param == "own":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(node.certificate, node.key)
        context.load_verify_locations(node.authority)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        server: Any = own_server(calls, context)
        port = await server.start()
    else:
        server = grpcio_server(calls)
        certificate, key, ca = node.read()
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
    found = ServerCase(str(request.param), authority, calls, server, port)
    yield found
    for channel in found.channels:
        await channel.close()
    await found.stop(0.0)


@pytest.mark.parametrize("size", [0, 1, 65_530, 65_536, 5_000_000])
async def test_messages_of_any_size(case: ServerCase, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert await case.channel().unary("/x/Echo", body, 30.0) == body


async def test_metadata_and_deadline_arrive(case: ServerCase) -> None:
    channel = case.channel()
    await channel.unary("/x/Echo", b"", 7.0, (("shoal-tenant", "acme"), ("a", "b c")))
    assert channel.state is ChannelState.READY
    assert (case.calls.seen["shoal-tenant"], case.calls.seen["a"]) == ("acme", "b c")
    assert case.calls.remaining_s is not None
    assert 5.0 < case.calls.remaining_s <= 7.0
    await channel.unary("/x/Echo", b"")
    assert case.calls.remaining_s is None


async def test_a_status_comes_with_its_details_and_trailers(case: ServerCase) -> None:
    with pytest.raises(CallError) as failed:
        await case.channel().unary("/x/Fail", b"x", 5.0)
    error = failed.value
    assert (error.status, error.details) == (GrpcStatus.FAILED_PRECONDITION, "not now: 5 % são")
    assert set(REFUSAL) <= set(error.metadata)
    assert error.was_processed


async def test_messages_of_a_stream_come_one_by_one(case: ServerCase) -> None:
    call = await case.channel().stream("/x/Chat")
    for number in range(20):
        await call.write(bytes([number]) * number * 10_000)
        assert await call.read() == bytes([number]) * number * 10_000
    call.half_close()
    assert await call.read() is None
    assert call.is_over
    with pytest.raises(CallError):
        await call.write(b"late")


async def test_a_deadline_ends_a_call_at_both_ends(case: ServerCase) -> None:
    with pytest.raises(CallError) as failed:
        await case.channel().unary("/x/Hang", b"", 0.3)
    assert failed.value.status is GrpcStatus.DEADLINE_EXCEEDED
    await until(lambda: case.calls.cancelled == 1, 5, "cancelled at the server")


async def test_a_caller_that_is_cancelled_cancels_its_call(case: ServerCase) -> None:
    task = asyncio.create_task(case.channel().unary("/x/Hang", b""))
    await until(lambda: case.calls.inside == 1, 5, "inside")
    task.cancel()
    await until(lambda: case.calls.cancelled == 1, 5, "cancelled at the server")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_calls_beyond_what_the_server_allows_wait(case: ServerCase) -> None:
    channel = case.channel()
    tasks = [asyncio.create_task(channel.unary("/x/Hold", bytes([number]))) for number in range(3 * STREAMS)]
    await until(lambda: case.calls.inside == STREAMS, 5, "as many inside as are allowed")
    case.calls.go.set()
    assert await asyncio.gather(*tasks) == [bytes([number]) for number in range(3 * STREAMS)]
    assert case.calls.most == STREAMS


async def test_one_of_several_payers_leaves_calls_to_others(case: ServerCase) -> None:
    channel, said = case.channel(is_shared=True), list[int]()

    async def ask(number: int) -> bytes:
        def make_metadata() -> Metadata:
            said.append(number)
            return (("number", str(number)),)

        return await channel.unary("/x/Hold", bytes([number]), 60.0, make_metadata, "loud")

    tasks = [asyncio.create_task(ask(number)) for number in range(3 * STREAMS)]
    await until(lambda: case.calls.inside == STREAMS - 1, 5, "as many inside as one may have")
    assert await channel.unary("/x/Echo", b"x", 10.0, (), "quiet") == b"x"
    assert (channel.can_begin("loud"), channel.can_begin("quiet")) == (False, True)
    assert said == [0, 1, 2], "what is said with a call that waits would grow old"
    tasks.pop().cancel()
    case.calls.go.set()
    assert await asyncio.gather(*tasks) == [bytes([number]) for number in range(3 * STREAMS - 1)]
    assert case.calls.most == STREAMS - 1
    assert list(dict.fromkeys(said)) == list(range(3 * STREAMS - 1)), (
        "in their order; one that is refused is sent again"
    )


async def test_a_server_that_stops_answers_what_is_inside(case: ServerCase) -> None:
    channel = case.channel()
    task = asyncio.create_task(channel.unary("/x/Hold", b"kept"))
    await until(lambda: case.calls.inside == 1, 5, "inside")
    stopping = asyncio.create_task(case.stop(10.0))
    await until(lambda: channel.state is not ChannelState.READY, 5, "the channel to know")
    case.calls.go.set()
    assert await task == b"kept"
    await stopping
    with pytest.raises(CallError) as failed:
        await channel.unary("/x/Echo", b"", 2.0)
    assert failed.value.status is GrpcStatus.UNAVAILABLE
    assert not failed.value.was_processed


async def test_a_lost_connection_ends_its_calls_and_the_next_call_opens_another(case: ServerCase) -> None:
    async with tcp_proxy(case.port) as way:
        channel = case.channel(port=way.port)
        assert await channel.unary("/x/Echo", b"1") == b"1"
        inside = asyncio.create_task(channel.unary("/x/Hang", b""))
        await until(lambda: case.calls.inside == 1, 5, "inside")
        way.max_age_s = 0.0
        with pytest.raises(CallError) as failed:
            await inside
        assert failed.value.status is GrpcStatus.UNAVAILABLE
        assert failed.value.was_processed
        way.max_age_s = math.inf
        assert await channel.unary("/x/Echo", b"2", 5.0) == b"2"


@pytest.mark.parametrize("keepalive", [LINK, PEER, LIVENESS], ids=["link", "peer", "liveness"])
@pytest.mark.parametrize("method", ["Echo", "Hang"])
async def test_f18_a_peer_that_takes_everything_and_answers_nothing(
    case: ServerCase, keepalive: Keepalive, method: str
) -> None:
    async with tcp_proxy(case.port) as way:
        channel = case.channel(keepalive, port=way.port)
        assert await channel.unary("/x/Echo", b"hello", 30.0) == b"hello"
        inside = asyncio.create_task(channel.unary("/x/Hang", b"", 60.0)) if method == "Hang" else None
        if inside is not None:
            await until(lambda: case.calls.inside == 1, 5, "inside")
        way.is_stalled = True
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(CallError) as failed:
            await (inside or channel.unary("/x/Echo", b"lost", 60.0))
        assert failed.value.status is GrpcStatus.UNAVAILABLE
        # two looks, each half an interval apart, and a second for a busy machine
        assert loop.time() - start <= 2 * keepalive.ping_interval_s + 1.5 * keepalive.ping_timeout_s + 1.0


@pytest.mark.parametrize("keepalive", [LINK, PEER, LIVENESS], ids=["link", "peer", "liveness"])
async def test_far_away_is_no_fault(case: ServerCase, keepalive: Keepalive) -> None:
    async with tcp_proxy(case.port, delay_s=0.15) as way:
        assert await case.channel(keepalive, port=way.port).unary("/x/Echo", b"hello", 30.0) == b"hello"


async def test_what_cannot_be_reached_is_tried_again(case: ServerCase) -> None:
    channel = case.channel(replace(PEER, connect_timeout_s=1.0), port=1)
    with pytest.raises(CallError) as failed:
        await channel.unary("/x/Echo", b"", 5.0)
    assert failed.value.details.startswith("failed to connect to 127.0.0.1:1")
    assert (failed.value.was_processed, channel.state) == (False, ChannelState.FAILED)
    await until(lambda: channel.state is ChannelState.IDLE, 5, "the end of the back-off")


async def test_an_attempt_that_was_refused_leaves_nothing_behind(case: ServerCase) -> None:
    """No timer of a handshake that never began, whose failure nobody would await."""
    loop, said = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: said.append(str(context["message"])))
    channel = case.channel(replace(PEER, connect_timeout_s=0.1), port=1)

    async def fail() -> None:
        with pytest.raises(CallError):
            await channel.unary("/x/Echo", b"", 5.0)
        over = loop.time() + 0.3
        await until(lambda: loop.time() > over, 5, "the time of a handshake to be over")
        await until(lambda: channel.state is ChannelState.IDLE, 5, "the end of the back-off")

    await fail()
    await fail()  # the channel keeps its last failure, and what that refers to
    gc.collect()
    assert said == []


@pytest.mark.parametrize("fault", ["name", "stranger"])
async def test_who_proves_nothing_is_not_called(case: ServerCase, fault: str, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "eu", SystemClock().wall()).issue(Role.TENANT, "acme")
    channel = case.channel(name="elsewhere") if fault == "name" else case.channel(files=other)
    with pytest.raises(CallError) as failed:
        await channel.unary("/x/Echo", b"", 5.0)
    assert failed.value.status is GrpcStatus.UNAVAILABLE
    assert not case.calls.seen
    if fault == "name":
        assert isinstance(channel.failure, ssl.SSLCertVerificationError)


async def test_an_answer_that_is_too_large_is_not_read(case: ServerCase) -> None:
    channel = case.channel()
    channel._max_bytes = 1_000
    with pytest.raises(CallError) as failed:
        await channel.unary("/x/Echo", bytes(2_000), 5.0)
    assert failed.value.status is GrpcStatus.RESOURCE_EXHAUSTED
    assert "larger than max" in failed.value.details


class Outcomes:
    """Of calls without a task."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.errors: list[CallError] = []

    def __call__(self, answer: bytes | None, error: CallError | None) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            assert answer is not None
            self.answers.append(answer)

    async def until(self, count: int) -> None:
        await until(lambda: len(self.answers) + len(self.errors) >= count, 10.0, f"{count} outcomes")


async def ready(case: ServerCase) -> GrpcChannel:
    channel = case.channel()
    assert not channel.can_begin()
    assert await channel.unary("/x/Echo", b"x") == b"x"
    return channel


@pytest.mark.parametrize("size", [0, 1, 16_000, 16_384, 70_000, 2**20 + 1, 2**22])
async def test_a_call_without_a_task_is_answered(case: ServerCase, size: int) -> None:
    channel, found, message = await ready(case), Outcomes(), b"\x5a" * size
    tasks = len(asyncio.all_tasks())
    assert channel.begin_unary("/x/Echo", message, 10.0, (("who", "acme"),), found) is not None
    assert len(asyncio.all_tasks()) == tasks
    await found.until(1)
    assert found.answers == [message]
    assert case.calls.seen["who"] == "acme"
    assert case.calls.remaining_s is not None
    assert 5.0 < case.calls.remaining_s < 10.1  # each side has its own clock


async def test_calls_without_a_task_end_with_what_the_server_says(case: ServerCase) -> None:
    channel, found = await ready(case), Outcomes()
    channel.begin_unary("/x/Fail", b"", 10.0, (), found)
    await found.until(1)
    (error,) = found.errors
    assert (error.status, error.details) == (GrpcStatus.FAILED_PRECONDITION, "not now: 5 % são")
    channel.begin_unary("/x/Hang", b"", 0.2, (), found)
    await found.until(2)
    assert found.errors[1].status is GrpcStatus.DEADLINE_EXCEEDED
    await until(lambda: case.calls.cancelled == 1, 10.0, "the server to end it")


async def test_a_call_without_a_task_that_is_withdrawn_says_nothing(case: ServerCase) -> None:
    channel, found = await ready(case), Outcomes()
    call = channel.begin_unary("/x/Hang", b"", 10.0, (), found)
    assert call is not None
    await until(lambda: case.calls.inside == 1, 10.0, "the call to arrive")
    call.withdraw()
    call.withdraw()
    await until(lambda: case.calls.cancelled == 1, 10.0, "the server to end it")
    assert (found.answers, found.errors) == ([], [])


async def test_no_call_begins_without_a_task_where_it_would_wait(case: ServerCase) -> None:
    channel, found = await ready(case), Outcomes()
    for _ in range(STREAMS):
        assert channel.begin_unary("/x/Hold", b"h", 10.0, (), found) is not None
    assert not channel.can_begin()
    assert channel.begin_unary("/x/Hold", b"h", 10.0, (), found) is None
    case.calls.go.set()
    await found.until(STREAMS)
    assert found.answers == STREAMS * [b"h"]
    await case.stop(0.1)
    await until(lambda: not channel.can_begin(), 10.0, "the channel to notice")


async def test_a_call_without_a_task_whose_answer_is_too_large(case: ServerCase) -> None:
    channel, found = await ready(case), Outcomes()
    channel.begin_unary("/x/Echo", bytes(MAX_BYTES - 1), 10.0, (), found)
    await found.until(1)
    assert len(found.answers) == 1
    channel._max_bytes = 1000
    channel.begin_unary("/x/Echo", bytes(1001), 10.0, (), found)
    await found.until(2)
    assert found.errors[0].status is GrpcStatus.RESOURCE_EXHAUSTED


async def test_a_connection_whose_streams_are_used_up_is_followed_by_another(case: ServerCase) -> None:
    channel = await ready(case)
    session = channel._session
    assert session is not None
    session.connection._next_stream = 2**31 - 1
    assert await channel.unary("/x/Echo", b"last") == b"last"
    assert await channel.unary("/x/Echo", b"first") == b"first"
    assert channel._session is not session
    await until(lambda: not session.is_open, 10.0, "the old connection to close")


async def test_a_closed_channel_lets_calls_end_and_takes_no_more(case: ServerCase) -> None:
    channel = case.channel()
    ending = asyncio.create_task(channel.unary("/x/Hold", b"kept"))
    await until(lambda: case.calls.inside == 1, 5, "inside")
    closing = asyncio.create_task(channel.close(10.0))
    await until(lambda: channel.state is ChannelState.CLOSED, 5, "closed")
    with pytest.raises(ChannelClosed):
        await channel.unary("/x/Echo", b"")
    case.calls.go.set()
    assert await ending == b"kept"
    await closing


async def test_a_channel_closed_at_once_ends_its_calls(case: ServerCase) -> None:
    channel = case.channel()
    ending = asyncio.create_task(channel.unary("/x/Hang", b""))
    await until(lambda: case.calls.inside == 1, 5, "inside")
    await channel.close()
    with pytest.raises(CallError) as failed:
        await ending
    assert failed.value.status is GrpcStatus.CANCELLED
    await until(lambda: case.calls.cancelled == 1, 5, "cancelled at the server")
