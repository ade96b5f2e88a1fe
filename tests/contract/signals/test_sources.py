"""One suite for every way in which a feed of price or carbon comes."""

import asyncio
import gzip
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from harness.crypto.pki import Authority
from harness.fakes.clock import ManualClock
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.core.signals.model import SignalName, SignalReading
from shoal.coordinator.signals import web as feeds
from shoal.coordinator.signals.files import MAX_FEED_BYTES, FeedFiles
from shoal.coordinator.signals.sources import Sources
from shoal.coordinator.signals.web import FeedUrls
from shoal.host.egress_guard import is_public
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall

CARBON = SignalName.CARBON
CLOCK = ManualClock()


@dataclass
class Feed:
    """A source that a test writes. taken_at: of a value that comes without its time; None: when it was read."""

    sources: Sources
    source: str
    say: Callable[[bytes], object]
    fail: Callable[[], None]
    written_at: Callable[[], Wall]

    async def read(self) -> tuple[SignalReading, ...]:
        return await self.sources.read(CARBON, self.source)


@asynccontextmanager
async def a_file(folder: Path) -> AsyncIterator[Feed]:
    path = folder / "grid" / "carbon.csv"
    path.parent.mkdir()
    yield Feed(
        Sources(FeedFiles(folder), FeedUrls(), CLOCK), "./grid/carbon.csv", path.write_bytes, path.unlink,
        lambda: Wall(path.stat().st_mtime),
    )  # fmt: skip


@asynccontextmanager
async def https_feed(
    folder: Path, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> AsyncIterator[Feed]:
    """An HTTPS server on loopback, which the command line names. answer: what it says."""
    authority = Authority(folder / "ca", "eu", CoordinatorClock().wall())
    files = authority.issue(Role.COORDINATOR, "feed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    trusts = ssl.create_default_context(cafile=files.authority)
    app = web.Application()
    app.router.add_get("/carbon", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0, ssl=context)  # type: ignore[arg-type]
        port = server.sockets[0].getsockname()[1]
        sources = Sources(FeedFiles(folder), FeedUrls(["127.0.0.1"], trusts), CLOCK)
        yield Feed(sources, f"https://127.0.0.1:{port}/carbon", lambda _: None, lambda: None, CLOCK.wall)
        server.close()
    finally:
        await runner.cleanup()


@asynccontextmanager
async def a_url(folder: Path) -> AsyncIterator[Feed]:
    said = [b"", b""]

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=said[0], status=200 if said[1] == b"" else 503)

    async with https_feed(folder, answer) as feed:

        def say(data: bytes) -> None:
            said[:] = [data, b""]

        def fail() -> None:
            said[1] = b"down"

        feed.say, feed.fail = say, fail
        yield feed


KINDS = {"file": a_file, "url": a_url}


@pytest.fixture(params=sorted(KINDS))
async def feed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Feed]:
    async with KINDS[request.param](tmp_path) as opened:
        yield opened


async def refusal_code(work: Awaitable[object]) -> Code:
    with pytest.raises(ShoalError) as caught:
        await work
    assert caught.value.refusal.found
    assert caught.value.refusal.remedy
    return caught.value.code


async def test_a_value_is_dated_by_its_source(feed: Feed) -> None:
    feed.say(b"350 gCO2/kWh\n")
    assert await feed.read() == (SignalReading(350.0, feed.written_at()),)


async def test_what_changes_is_read_anew(feed: Feed) -> None:
    feed.say(b"at,gCO2/kWh\n2026-11-21T06:00:00Z,60\n")
    first = await feed.read()
    assert await feed.read() == first
    feed.say(b"at,gCO2/kWh\n2026-11-21T06:00:00Z,60\n2026-11-21T07:00:00Z,70\n")
    assert [each.value for each in await feed.read()] == [60.0, 70.0]
    assert (await feed.read())[0] == first[0]


async def test_what_is_no_feed_is_refused_and_can_be_mended(feed: Feed) -> None:
    for data in (b"", b"\xff\xfe", b"<html>no</html>", b"9" * (MAX_FEED_BYTES + 1)):
        feed.say(data)
        assert await refusal_code(feed.read()) == Code.SIGNAL_INVALID
    feed.say(b"5 gCO2/kWh")
    assert (await feed.read())[0].value == 5.0


async def test_what_fails_is_unreachable_and_comes_back(feed: Feed) -> None:
    feed.say(b"5 gCO2/kWh")
    await feed.read()
    feed.fail()
    assert await refusal_code(feed.read()) == Code.SOURCE_UNREACHABLE
    feed.say(b"6 gCO2/kWh")
    assert (await feed.read())[0].value == 6.0


async def test_both_signals_may_name_one_source(feed: Feed) -> None:
    feed.say(b"5 gCO2/kWh")
    assert (await feed.read())[0].value == 5.0
    assert await refusal_code(feed.sources.read(SignalName.PRICE, feed.source)) == Code.SIGNAL_INVALID
    assert (await feed.read())[0].value == 5.0


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "out", "out/secret", ".", "grid/../../secret"])
async def test_a26_no_file_outside_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "signals"
    (folder / "grid").mkdir(parents=True)
    (tmp_path / "secret").write_text("5 gCO2/kWh")
    (folder / "out").symlink_to(tmp_path)
    sources = Sources(FeedFiles(folder), FeedUrls(), CLOCK)
    assert await refusal_code(sources.read(CARBON, name)) == Code.SOURCE_DENIED


@pytest.mark.parametrize("name", ["loop", "no/such", "9" * 300, "."])
async def test_what_is_no_file_is_coded(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    sources = Sources(FeedFiles(tmp_path), FeedUrls(), CLOCK)
    assert await refusal_code(sources.read(CARBON, name)) in (Code.SOURCE_UNREACHABLE, Code.SOURCE_DENIED)


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "carbon")
    sources = Sources(FeedFiles(tmp_path), FeedUrls(), CLOCK)
    assert await refusal_code(sources.read(CARBON, "carbon")) == Code.SOURCE_DENIED


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/", "https://localhost/", "https://[::1]/", "https://169.254.169.254/latest/meta-data",
        "https://10.0.0.1/", "https://[::ffff:127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://2130706433/",
        "https://0x7f.1/", "https://0/", "http://127.0.0.1/", "http://example.com/", "https://user:word@example.com/",
        "file:///etc/passwd", "ftp://example.com/", "https:///x", "gopher://127.0.0.1/",
    ],
)  # fmt: skip
async def test_a26_no_url_leads_inside(url: str, tmp_path: Path) -> None:
    """A26, of feeds: refused by the address that would be dialled, before anything is sent."""
    sources = Sources(FeedFiles(tmp_path), FeedUrls(["feeds.internal"]), CLOCK)
    assert await refusal_code(sources.read(CARBON, url)) == Code.SOURCE_DENIED


async def test_what_is_packed_is_not_unpacked(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(b"5 gCO2/kWh"), headers={"Content-Encoding": "gzip"})

    async with https_feed(tmp_path, answer) as feed:
        assert await refusal_code(feed.read()) == Code.SIGNAL_INVALID


@pytest.mark.parametrize("address", ["169.254.169.254", "127.0.0.1", "10.0.0.7", "::1"])
async def test_a26_a_name_is_judged_by_the_address_that_is_dialled(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that changes its mind between two look-ups changes nothing: there is one, and what it says is judged."""
    asked = list[str]()

    async def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [
            (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0)[: 4 if ":" in address else 2])
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    sources = Sources(FeedFiles(tmp_path), FeedUrls(), CLOCK)
    assert await refusal_code(sources.read(CARBON, "https://rebinding.example/carbon")) == Code.SOURCE_DENIED
    assert asked == ["rebinding.example"]


async def test_a26_nothing_that_vouches_for_us_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what this machine keeps for that host, nor what an answer before left behind, nor a way around."""
    seen = list[dict[str, str]]()

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return web.Response(body=b"5 gCO2/kWh", headers={"Set-Cookie": "session=1"})

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login us password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    async with https_feed(tmp_path, answer) as feed:
        for _ in range(2):
            assert (await feed.read())[0].value == 5.0
    assert len(seen) == 2
    for headers in seen:
        assert headers.keys() <= {"host", "accept", "accept-encoding", "user-agent"}


@pytest.mark.parametrize("to", ["https://169.254.169.254/", "http://127.0.0.1/", "/elsewhere", "https://example.com/"])
async def test_a26_a_redirect_leads_nowhere(to: str, tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(to)

    async with https_feed(tmp_path, answer) as feed:
        assert await refusal_code(feed.read()) == Code.SOURCE_DENIED


async def test_an_answer_that_is_too_long_is_cut_off(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2 * MAX_FEED_BYTES >> 16):
            await response.write(b"9" * (1 << 16))
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    async with https_feed(tmp_path, answer) as feed:
        assert await refusal_code(feed.read()) == Code.SIGNAL_INVALID
        await asyncio.wait_for(left.wait(), 30)


async def test_a_server_that_says_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "TIMEOUT_S", 0.2)

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with https_feed(tmp_path, answer) as feed:
        assert await refusal_code(feed.read()) == Code.SOURCE_UNREACHABLE


async def test_a_server_that_drips_is_left_and_its_connection_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and all of them never would."""
    monkeypatch.setattr(feeds, "TIMEOUT_S", 0.5)
    left = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"9")
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.Event().wait(), 0.02)
        finally:
            left.set()

    async with https_feed(tmp_path, answer) as feed:
        assert await refusal_code(feed.read()) == Code.SOURCE_UNREACHABLE
        await asyncio.wait_for(left.wait(), 30)


async def test_an_answer_that_breaks_off_is_none(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"5 gCO2/kWh")
        assert request.transport is not None
        request.transport.close()
        return response

    async with https_feed(tmp_path, answer) as feed:
        assert await refusal_code(feed.read()) == Code.SOURCE_UNREACHABLE


async def test_a_server_that_nobody_vouches_for_is_not_believed(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        raise AssertionError("it was asked")

    async with https_feed(tmp_path, answer) as feed:
        believing_the_system = Sources(FeedFiles(tmp_path), FeedUrls(["127.0.0.1"]), CLOCK)
        assert await refusal_code(believing_the_system.read(CARBON, feed.source)) == Code.SOURCE_UNREACHABLE


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::808:808", True), ("::ffff:8.8.8.8", True),
        ("127.0.0.1", False), ("0.0.0.0", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False),
        ("100.64.0.1", False), ("169.254.169.254", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::", False), ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False), ("ff02::1", False),
        ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False), ("2002:7f00:1::", False), ("x", False),
    ],
)  # fmt: skip
def test_a26_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
