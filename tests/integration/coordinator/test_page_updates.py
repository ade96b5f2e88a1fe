"""The page in a browser, on a coordinator that is scripted: what it asks and shows between two tables, and after an
upgrade."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page

from harness.clients.browser import chromium
from harness.wait import wait_until
from shoal.coordinator.api.dashboard import assets

ROWS: Final[dict[str, dict[str, Any]]] = {
    "region": {"home": {"name": "home", "writable": True}},
    "workloads": {
        "default/reader": {"tenant": "default", "name": "reader", "state": "ready", "wanted": 2, "ready": 2,
                           "revision": 3}
    },
    "placements": {
        name: {"id": name, "tenant": "default", "name": "reader", "node": "shop", "device": "npu", "phase": "ready"}
        for name in ("a-1", "a-2")
    },
    "places": {
        name: {"tenant": "default", "name": "reader", "node": "shop", "device": "npu", "phase": "ready"}
        for name in ("a-1", "a-2")
    },
}  # fmt: skip
WATCH: Final = """window.seen = [];
new MutationObserver(() => {
  for (const said of ['Nothing runs', 'not applied'])
    if (document.body.innerText.includes(said)) window.seen.push(said);
}).observe(document.body, {subtree: true, childList: true, characterData: true})"""


class ScriptedRegion:
    """Answers what a page asks; one region, one workload."""

    def __init__(self) -> None:
        self.files = {name: each.content for name, each in assets.load().items()}
        self.asked = list[str]()
        self.may_tell = threading.Event()
        """Whether live tables are told; until then a page that asked for them waits."""
        self.may_tell.set()
        self.hang_up = threading.Event()
        """Ends the live connections."""

    def count(self, path: str) -> int:
        return self.asked.count(path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    region: ScriptedRegion

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Not on the test's output."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        self.region.asked.append(address.path)
        name = address.path.removeprefix("/assets/") if address.path != "/" else assets.PAGE
        if (content := self.region.files.get(name)) is not None:
            kind = {"html": "text/html", "js": "text/javascript", "css": "text/css"}.get(name.rpartition(".")[2], "")
            self.answer(content, kind or "image/svg+xml")
        elif address.path == "/api/v1/live":
            self.tell(parse_qs(address.query)["tables"][0].split(","))
        elif address.path == "/api/v1/session":
            self.answer(json.dumps({"region": "home", "role": "viewer", "name": "ann", "ends": 2e9}).encode())
        else:
            self.answer(b'{"plan": {}, "series": []}')

    def answer(self, content: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def tell(self, tables: list[str]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.region.may_tell.wait(30)
        told = [f"event: rows\ndata: {json.dumps({'table': name, 'rows': [*ROWS.get(name, {}).items()]})}\n\n"
                for name in tables]  # fmt: skip
        self.wfile.write("".join(["event: whole\ndata: {}\n\n", *told, "event: now\ndata: {}\n\n"]).encode())
        self.wfile.flush()
        self.region.hang_up.wait(30)


@pytest.fixture
def region() -> ScriptedRegion:
    return ScriptedRegion()


@pytest.fixture
def page(region: ScriptedRegion) -> Iterator[Page]:
    """On the list of workloads."""
    with ExitStack() as opened:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"region": region}))
        opened.callback(server.server_close)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened.callback(server.shutdown)
        opened.callback(region.hang_up.set)
        opened.callback(region.may_tell.set)
        page = opened.enter_context(chromium()).new_page()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/#/workloads")
        page.get_by_role("link", name="reader").wait_for()
        page.get_by_text("live", exact=True).wait_for()
        yield page


def test_a_workload_is_explained_once_and_nothing_is_said_before_it_is_known(
    page: Page, region: ScriptedRegion
) -> None:
    assert page.locator(".places").first.inner_text() == "shop/npu\nshop/npu", "two replicas on one device"
    page.evaluate(WATCH)
    region.may_tell.clear()
    page.get_by_role("link", name="reader").click()
    wait_until(lambda: region.count("/api/v1/live") == 2, 10, "the page of one workload follows its tables")
    page.locator("main [aria-busy]").first.wait_for()
    assert region.count("/api/v1/explain") == 0, "it is not known yet where it runs"
    region.may_tell.set()
    page.get_by_role("heading", name="Where it runs").wait_for()
    page.get_by_text("No candidate is known.").wait_for()
    assert region.count("/api/v1/explain") == 1
    assert page.evaluate("window.seen") == []


def test_a_page_that_stays_open_through_an_upgrade_is_loaded_again_once(page: Page, region: ScriptedRegion) -> None:
    page.evaluate("window.first = true")
    script = next(name for name in region.files if name.endswith(".js"))
    region.files["main-UPGRADED.js"] = region.files[script]
    region.files[assets.PAGE] = region.files[assets.PAGE].replace(script.encode(), b"main-UPGRADED.js")
    region.hang_up.set()
    page.wait_for_function("window.first === undefined", timeout=30_000)
    page.get_by_role("link", name="reader").wait_for()
    loads = region.count("/assets/main-UPGRADED.js")
    opened = region.count("/api/v1/live")
    wait_until(lambda: region.count("/api/v1/live") >= opened + 2, 60, "it goes on, and on again")
    assert loads == region.count("/assets/main-UPGRADED.js") == 1


def test_a_page_whose_coordinator_has_no_other_stays(page: Page, region: ScriptedRegion) -> None:
    page.evaluate("window.first = true")
    region.hang_up.set()
    wait_until(lambda: region.count("/api/v1/live") >= 3, 60, "it goes on, and on again")
    wait_until(lambda: region.count("/") >= 2, 30, "and has looked for another page")
    assert page.evaluate("window.first") is True
