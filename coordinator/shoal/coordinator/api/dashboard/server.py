"""The dashboard's port: HTTPS for browsers, on an event loop and thread of its own.

TLS, files, compression and slow readers take no turn of the coordinator's loop. Who calls is decided there, by the
rules of the operator API, at each request, and again while a page is open.
"""

import asyncio
import json
import ssl
import threading
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, Protocol, TypeVar

import structlog

from shoal.coordinator.api.dashboard import assets, browser_rules, queries
from shoal.coordinator.api.dashboard.feed import Feed, RowChange
from shoal.coordinator.api.dashboard.parameters import invalid_parameter, parameters_of
from shoal.coordinator.api.dashboard.queries import Query
from shoal.coordinator.api.dashboard.rows import plain, rows_text
from shoal.host.http_server import HttpExchange, HttpLimits, HttpServer
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.wire.handshake import PemFiles
from shoal.wire.status import http_status

LIMITS: Final = HttpLimits(
    connections=512,
    connections_per_address=64,
    handshake_s=5.0,
    head_s=5.0,
    stall_s=15.0,
    head_bytes=16 * 2**10,
)
"""Of one coordinator. A browser has at most six connections to a host, one of them for the live tables."""
LIVE_MOST: Final = 128
"""Pages that are open at once."""
LIVE_PER_CALLER: Final = 16
LIVE_S: Final = 3600.0
"""A live connection ends after this; the page opens another, and goes on from the last change that it has."""
BEAT_S: Final = 10.0
"""A live connection without news carries a comment this often, and its caller is checked again at least as often."""
CHECK_S: Final = 1.0
GATHER_S: Final = 0.02
"""Changes within this time travel together."""
BATCH_BYTES: Final = 64 * 2**10
LOGIN_BYTES: Final = 1024
TABLES: Final = frozenset(
    {
        "region",
        "nodes",
        "node_states",
        "devices",
        "workloads",
        "placements",
        "places",
        "migrations",
        "agreements",
        "regions",
        "events",
        "latest_events",
        "figures",
    }
)
_JSON: Final = {"content-type": "application/json", "cache-control": "no-store"}

T = TypeVar("T")
log: Final = structlog.get_logger("shoal.coordinator.dashboard")


class Access(Protocol):
    """What the coordinator decides. Every method runs on its loop, and raises ShoalError for a refusal."""

    @property
    def region(self) -> str: ...
    @property
    def hosts(self) -> frozenset[str]:
        """Names and addresses that browsers may know it by."""
        ...

    async def caller(self, certificate: bytes | None, session: str, method: str) -> Identity:
        """Who calls, by certificate or else by session; refused unless the rule of `method` lets it."""
        ...

    async def log_in(self, link: str, address: str) -> str:
        """The secret of a new session."""
        ...

    async def log_out(self, session: str) -> None: ...
    async def ask(self, query: Query, given: Mapping[str, str], body: str, caller: Identity) -> Any:
        """The reply, a message."""
        ...

    async def on_refusal(self, actor: str, refusal: Refusal) -> None: ...
    def set_readers(self, count: int) -> None:
        """How many live connections there are now. Called on the coordinator's loop."""
        ...

    async def wait_current(self) -> None:
        """Returns once the rows that were published are those of now, for who counts as a reader."""
        ...


class DashboardServer:
    def __init__(self, access: Access, files: PemFiles) -> None:
        self._access = access
        self._files = files
        self._assets = assets.load()
        self._cookie = f"__Host-shoal-{access.region}"
        self._feed = Feed()
        self._context: tuple[tuple[float, ...], ssl.SSLContext] | None = None
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The thread's, while it serves."""
        self._news = asyncio.Event()
        self._live: dict[str, int] = {}
        """Live connections, by caller."""
        self._stopping: asyncio.Event = asyncio.Event()
        self._thread: threading.Thread | None = None

    # On the coordinator's loop.

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. Raises OSError."""
        bound = Future[int]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(host, port, bound), name="dashboard", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(bound)

    def publish(self, changes: list[RowChange]) -> None:
        self._tell(self._on_changes, changes)

    async def stop(self) -> None:
        """Ends every connection."""
        self._tell(self._stopping.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _tell(self, what: Callable[..., object], *arguments: object) -> None:
        """Calls it on the thread's loop; not at all once that has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(what, *arguments)

    # On its own.

    def _run(self, host: str, port: int, bound: Future[int]) -> None:
        loop = self._loop
        assert loop is not None, "`start` makes it"
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve(host, port, bound))
        except OSError as error:
            bound.set_exception(error)  # raised before it was bound: nothing ends it afterwards
        finally:
            loop.close()

    async def _serve(self, host: str, port: int, bound: Future[int]) -> None:
        server = HttpServer(self._answer, LIMITS, self._current_context, is_known_at_handshake=False)
        bound.set_result(await server.start(host, port))
        await self._stopping.wait()
        await server.stop()

    def _current_context(self) -> ssl.SSLContext:
        """Raises OSError, ssl.SSLError."""
        files = self._files.certificate, self._files.key, self._files.ca
        stamp = tuple(each.stat().st_mtime for each in files)
        if self._context is None or self._context[0] != stamp:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(files[0], files[1])
            context.load_verify_locations(files[2])
            context.verify_mode = ssl.CERT_OPTIONAL
            self._context = stamp, context
        return self._context[1]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _on_changes(self, changes: list[RowChange]) -> None:
        if self._feed.publish(changes):
            self._news.set()

    async def _ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` on the coordinator's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._main))

    async def _answer(self, exchange: HttpExchange) -> None:
        path, _, query = exchange.target.partition("?")
        is_page = path == "/"
        refusal = browser_rules.host_refusal(exchange.headers, self._access.hosts) or browser_rules.site_refusal(
            exchange.method, exchange.headers, is_page=is_page
        )
        if refusal is not None:
            await self._refuse(exchange, "anonymous", refusal)
            return
        try:
            await self._route(exchange, path, query)
        except ShoalError as error:
            await self._refuse(exchange, "anonymous", error.refusal)

    async def _route(self, exchange: HttpExchange, path: str, query: str) -> None:
        reads = exchange.method in ("GET", "HEAD")
        match path.split("/")[1:]:
            case [""] if reads:
                await self._send_asset(exchange, assets.PAGE)
            case ["assets", name] if reads and name in self._assets:
                await self._send_asset(exchange, name)
            case ["api", "v1", "login"] if exchange.method == "POST":
                await self._log_in(exchange)
            case ["api", "v1", "logout"] if exchange.method == "POST":
                session = browser_rules.cookie_of(exchange.headers, self._cookie)
                await self._ask(lambda: self._access.log_out(session))
                await self._respond(exchange, 204, {"set-cookie": self._cookie_text("", 0)})
            case ["api", "v1", "session"] if reads:
                caller = await self._caller(exchange, "Get")
                told = {"region": caller.region, "role": caller.role, "name": caller.name, "ends": caller.not_after}
                await self._respond(exchange, 200, _JSON, json.dumps(told).encode())
            case ["api", "v1", "live"] if exchange.method == "GET":
                await self._send_live(exchange, query)
            case ["api", "v1", name] if (found := queries.QUERIES.get(name)) is not None:
                if exchange.method != "POST" if found.has_body else not reads:
                    raise _not_found()
                await self._send_reply(exchange, found, query)
            case _:
                raise _not_found()

    async def _caller(self, exchange: HttpExchange, method: str) -> Identity:
        certificate, session = exchange.certificate, browser_rules.cookie_of(exchange.headers, self._cookie)
        full = method if method.startswith("/") else f"/shoal.v1.Operator/{method}"
        caller = await self._ask(lambda: self._access.caller(certificate, session, full))
        exchange.set_known()
        return caller

    async def _log_in(self, exchange: HttpExchange) -> None:
        body = await _body_of(exchange, LOGIN_BYTES)
        try:
            asked = json.loads(body)
            link = asked["link"]
        except (ValueError, TypeError, KeyError, RecursionError) as cause:
            raise refuse(Code.INVALID_ARGUMENT, "no link", '{"link": ".."}', "run `shoal dashboard`") from cause
        if not isinstance(link, str):
            raise refuse(Code.INVALID_ARGUMENT, "a link that is no text", '{"link": ".."}', "run `shoal dashboard`")
        address = exchange.peer_address
        secret = await self._ask(lambda: self._access.log_in(link, address))
        await self._respond(exchange, 204, {"set-cookie": self._cookie_text(secret, 12 * 3600)})

    def _cookie_text(self, secret: str, seconds: int) -> str:
        return f"{self._cookie}={secret}; Path=/; Max-Age={seconds}; Secure; HttpOnly; SameSite=Strict"

    async def _send_asset(self, exchange: HttpExchange, name: str) -> None:
        asset = self._assets[name]
        if asset.gzipped is not None and _takes_gzip(exchange):
            await self._respond(exchange, 200, {**asset.headers, "content-encoding": "gzip"}, asset.gzipped)
        else:
            await self._respond(exchange, 200, asset.headers, asset.content)

    async def _send_reply(self, exchange: HttpExchange, query: Query, text: str) -> None:
        caller = await self._caller(exchange, query.method)
        try:
            given = parameters_of(text, query.takes)
            body = ""
            if query.has_body:
                body = (await _body_of(exchange, queries.PLAN_BYTES)).decode(errors="replace")
            reply = await self._ask(lambda: self._access.ask(query, given, body, caller))
            beside = query.shorten(reply, given) if query.shorten is not None else {}
        except ShoalError as error:
            await self._refuse(exchange, caller.uri, error.refusal)
            return
        data, headers = json.dumps({**plain(reply), **beside}, allow_nan=False).encode(), _JSON
        if _takes_gzip(exchange):
            data, headers = _gzipped(data), {**_JSON, "content-encoding": "gzip"}
        await self._respond(exchange, 200, headers, data)

    async def _send_live(self, exchange: HttpExchange, query: str) -> None:
        """Server-sent events: `rows` with what changed of the tables that were asked for, `whole` before rows that
        replace all, `now` after each group. The id of an event is the number of the newest change in it."""
        caller = await self._caller(exchange, "Get")
        given = parameters_of(query, ("tables",))
        tables = frozenset(filter(None, given.get("tables", "").split(",")))
        if unknown := sorted(tables - TABLES):
            raise invalid_parameter(f"table {unknown[0]!r:.40}", ", ".join(sorted(TABLES)))
        open_count = self._live.get(caller.uri, 0)
        if open_count >= LIVE_PER_CALLER or sum(self._live.values()) >= LIVE_MOST:
            raise refuse(
                Code.OVERLOADED,
                f"{open_count} pages of {caller.uri:.120} that are open",
                f"at most {LIVE_PER_CALLER} of one, {LIVE_MOST} of all",
                "close some",
            )
        self._live[caller.uri] = open_count + 1
        self._tell_readers()
        try:
            # A page that says `live` shows what is so now: never nothing, nor what was so when somebody last looked.
            await self._ask(self._access.wait_current)
            await self._stream(exchange, tables)
        finally:
            self._live[caller.uri] -= 1
            if not self._live[caller.uri]:
                del self._live[caller.uri]
            self._tell_readers()

    def _tell_readers(self) -> None:
        count = sum(self._live.values())
        with suppress(RuntimeError):
            self._main.call_soon_threadsafe(self._access.set_readers, count)

    async def _stream(self, exchange: HttpExchange, tables: frozenset[str]) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        squeeze = zlib.compressobj(6, zlib.DEFLATED, 31) if _takes_gzip(exchange) else None
        if squeeze is not None:
            headers["content-encoding"] = "gzip"
        exchange.begin(200, {**browser_rules.SECURITY_HEADERS, **headers})

        async def send(text: str) -> None:
            data = text.encode()
            if squeeze is not None:
                data = squeeze.compress(data) + squeeze.flush(zlib.Z_SYNC_FLUSH)
            await exchange.write(data)

        version = self._resumed(exchange.headers.get("last-event-id", ""))
        end, beat, checked = self._now() + LIVE_S, 0.0, self._now()
        while (now := self._now()) < end and not exchange.is_closed:
            if now - checked >= CHECK_S:
                try:
                    await self._caller(exchange, "Get")
                except ShoalError as error:
                    await send(f"event: ended\ndata: {json.dumps(asdict(error.refusal))}\n\n")
                    return
                checked = now
            changes = self._feed.since(version, tables)
            if changes.is_whole or changes.rows:
                await self._send_changes(send, changes.version, changes.rows, is_whole=changes.is_whole)
                beat = now
            elif now - beat >= BEAT_S:
                await send(": \n\n")
                beat = now
            version = changes.version
            await self._wait_for_news(version)

    async def _send_changes(
        self, send: Callable[[str], Awaitable[None]], version: int, rows: Any, *, is_whole: bool
    ) -> None:
        if is_whole:
            await send("event: whole\ndata: {}\n\n")
        by_table: dict[str, list[tuple[str, str | None]]] = {}
        for (table, key), row in rows:
            by_table.setdefault(table, []).append((key, row))
        for table, listed in by_table.items():
            for batch in _batches(listed):
                await send(f'event: rows\ndata: {{"table":"{table}","rows":{rows_text(batch)}}}\n\n')
        await send(f"id: {id(self._feed):x}.{version}\nevent: now\ndata: {{}}\n\n")

    def _resumed(self, last: str) -> int:
        """The change from which a page goes on that was connected before; 0: from none."""
        feed, _, version = last.partition(".")
        return int(version) if feed == f"{id(self._feed):x}" and version.isdecimal() and len(version) < 16 else 0

    async def _wait_for_news(self, version: int) -> None:
        """For a change after `version`, and what comes with it; at most until the caller has to be checked again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                if self._feed.version == version:
                    self._news.clear()
                    await self._news.wait()
                await asyncio.sleep(GATHER_S)

    async def _refuse(self, exchange: HttpExchange, actor: str, refusal: Refusal) -> None:
        await self._ask(lambda: self._access.on_refusal(actor, refusal))
        await self._respond(exchange, http_status(refusal.code), _JSON, json.dumps(asdict(refusal)).encode())

    async def _respond(
        self, exchange: HttpExchange, status: int, headers: Mapping[str, str], body: bytes = b""
    ) -> None:
        await exchange.respond(status, {**browser_rules.SECURITY_HEADERS, **headers}, body)


def _batches(rows: list[tuple[str, str | None]]) -> list[list[tuple[str, str | None]]]:
    """In order, each of about BATCH_BYTES."""
    batches: list[list[tuple[str, str | None]]] = [[]]
    size = 0
    for key, row in rows:
        size += len(key) + len(row or "")
        if size > BATCH_BYTES and batches[-1]:
            batches.append([])
            size = len(key) + len(row or "")
        batches[-1].append((key, row))
    return batches


async def _body_of(exchange: HttpExchange, most: int) -> bytes:
    """Raises ShoalError(TOO_LARGE)."""
    body = bytearray()
    async for chunk in exchange.body():
        body += chunk
        if len(body) > most:
            raise refuse(Code.TOO_LARGE, f"more than {most} bytes", f"at most {most}", "send less, or use `shoal plan`")
    return bytes(body)


def _takes_gzip(exchange: HttpExchange) -> bool:
    return "gzip" in exchange.headers.get("accept-encoding", "")


def _gzipped(data: bytes) -> bytes:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, 31)
    return squeeze.compress(data) + squeeze.flush()


def _not_found() -> ShoalError:
    return refuse(Code.NOT_FOUND, "no such path", "the dashboard at /", "see docs/guides/dashboard.md")
