"""The browser's part of `shoal bench dashboard`: opens pages and waits for what they draw. Runs in a thread."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from _dashboard.figures import DashboardFigures, PageOpening, Update
from _dashboard.processors import pin, tree_seconds
from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeout

CHROMIUM: Final = Path("/usr/bin/chromium")
DESKTOP: Final = (1440, 900)
PHONE: Final = (390, 844)
UNREAD_S: Final = 3.0
"""Seconds without a reader before a page is opened as by the first one: more than half of all rows have changed."""
SETTLE_S: Final = 1.0
"""The board's first look at a large region is followed by a rest of nine times as long; updates are of later looks."""
UPDATES: Final = 40
QUICK_UPDATES: Final = 20
BETWEEN_S: Final = 0.13
"""Between two updates, no multiple of the board's tenth of a second: they meet every part of its rest."""
STEP_S: Final = 60.0
"""Longest wait for one thing, on a machine on which other programs run too."""
WORKLOAD: Final = "workloads/t0/w-000000"
PAGES: Final = {
    "": "main .tile",
    "fleet": "main tbody tr",
    "workloads": "main tbody tr",
    WORKLOAD: "[aria-label=Replicas] tbody tr",
    "migrations": "main .empty:not([aria-busy])",
    "federation": "main .empty:not([aria-busy])",
    "events": "main tbody tr, main .list li, main .empty:not([aria-busy])",
    "plan": "main form",
    "traces": "main form",
}
"""What each page shows once it has its rows, or has heard that there are none."""
QUICK: Final = ("", "fleet", WORKLOAD)
"""The pages with most rows and bytes."""
ASKED: Final = {WORKLOAD: "[aria-label=Candidates] tbody tr"}
"""What it shows once it has the answer of a computation, which its bytes include."""
LIVE: Final = "header .conn.live"
"""What every page shows once it has all rows of its tables."""
WATCH: Final = """
window.whenDrawn = (selector, word) => new Promise((resolve) => {
  const look = () => {
    if (![...document.querySelectorAll(selector)].some((each) => each.textContent.includes(word))) return false;
    watch.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.timeOrigin + performance.now())));
    return true;
  };
  const watch = new MutationObserver(look);
  if (!look()) watch.observe(document, { subtree: true, childList: true, characterData: true });
});
"""
"""Tells when (milliseconds since 1970) the frame has been drawn in which a selector first finds an element with a
word."""

T = TypeVar("T")


class GivesUpError(Exception):
    """The benchmark cannot go on; says why."""


class Loop:
    """Lets the browser's thread ask the region's loop, until that has failed or the time is over."""

    def __init__(self, deadline: float) -> None:
        """deadline: by the monotonic clock."""
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self.is_over = threading.Event()

    def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        found: Future[T] = asyncio.run_coroutine_threadsafe(work(), self._loop)
        return found.result(self.left_s())

    def left_s(self) -> float:
        """Seconds for the next wait. Raises GivesUpError."""
        left = min(STEP_S, self._deadline - time.monotonic())
        if self.is_over.is_set():
            raise GivesUpError("the region has ended")
        if left <= 0.0:
            raise GivesUpError("its time is over: give it more (--deadline), or less to do (--nodes, --workloads)")
        return left


class Load:
    """What one window loads, by the browser's own count."""

    def __init__(self, page: Page) -> None:
        self.travelled = self.expanded = self.rows = 0
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        session.on("Network.dataReceived", self._on_data)
        session.on("Network.eventSourceMessageReceived", self._on_message)

    def _on_data(self, event: dict[str, Any]) -> None:
        self.travelled += event["encodedDataLength"]
        self.expanded += event["dataLength"]

    def _on_message(self, event: dict[str, Any]) -> None:
        if event["eventName"] == "rows":
            self.rows += len(json.loads(event["data"])["rows"])


class Spent:
    """Processor milliseconds since its making: of the browser's processes, and of the dashboard.

    The dashboard's are its looks at the region and all that is done beside the loop (its own thread, computations). The
    rest of what the loop does, the region does whether or not somebody looks.
    """

    def __init__(self, looks_s: Callable[[], float]) -> None:
        """looks_s: processor seconds of all looks so far."""
        self._looks_s = looks_s
        self._loop = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._browser, self._dashboard = tree_seconds(), self._dashboard_seconds()

    def browser_ms(self) -> float:
        return 1e3 * (tree_seconds() - self._browser)

    def dashboard_ms(self) -> float:
        return 1e3 * (self._dashboard_seconds() - self._dashboard)

    def _dashboard_seconds(self) -> float:
        return self._looks_s() + time.process_time() - time.clock_gettime(self._loop) - time.thread_time()


class DashboardWindows:
    """open_link: makes a link that logs a window in. cordon: the change that a page has to show. looks_s: processor
    seconds of all looks so far. shots: where pictures of the pages go; None: nowhere."""

    def __init__(
        self,
        loop: Loop,
        open_link: Callable[[], str],
        cordon: Callable[[str, bool], Coroutine[Any, Any, Any]],
        figures: DashboardFigures,
        looks_s: Callable[[], float],
        shots: Path | None,
    ) -> None:
        self._loop = loop
        self._open_link = open_link
        self._cordon = cordon
        self._figures = figures
        self._looks_s = looks_s
        self._shots = shots
        self._began = time.monotonic()

    def run(self, node: str, processor: int | None, on_measured: Callable[[], None], *, is_quick: bool) -> None:
        """Measures everything; `node` is cordoned and uncordoned. on_measured: called before pictures are made."""
        pages, count = (QUICK, QUICK_UPDATES) if is_quick else (tuple(PAGES), UPDATES)
        pin(processor)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            self._say(f"Chromium {browser.version}")
            try:
                for path in pages:
                    for is_first in (True, False):
                        self._try(f"page {path or 'overview'}", lambda: self._measure_page(browser, path, is_first))  # noqa: B023
                self._try("updates", lambda: self._measure_updates(browser, node, count))
            except GivesUpError as error:
                self._fail(str(error))
                return  # what was measured until then is worth having
            finally:
                on_measured()
            if self._shots is not None:
                for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
                    self._try(f"pictures for {name}", lambda: self._picture(browser, name, size))  # noqa: B023
            browser.close()

    def _try(self, what: str, work: Callable[[], str]) -> None:
        """A wait that was in vain is a failure of the figures, and no reason not to measure the rest."""
        try:
            self._say(f"{what}: {work()}")
        except (PageTimeout, TimeoutError) as error:
            self._fail(f"{what}: {str(error).partition(chr(10))[0] or 'not in time'}")

    def _fail(self, why: str) -> None:
        self._figures.failures.append(why)
        self._say(f"FAILED: {why}")

    def _say(self, what: str) -> None:
        print(f"# {time.monotonic() - self._began:5.1f} s  {what}", file=sys.stderr, flush=True)

    @contextmanager
    def _window(self, browser: Browser, size: tuple[int, int] = DESKTOP) -> Iterator[tuple[Page, str]]:
        """A window that is logged in, and the dashboard's origin."""
        width, height = size
        context = browser.new_context(ignore_https_errors=True, viewport={"width": width, "height": height})
        context.set_default_timeout(1e3 * self._loop.left_s())
        try:
            context.add_init_script(WATCH)
            page, link = context.new_page(), self._open_link()
            page.goto(link)
            page.get_by_role("navigation").wait_for()
            yield page, link.partition("/#")[0]
        finally:
            context.close()

    def _measure_page(self, browser: Browser, path: str, is_first: bool) -> str:
        figures, name = self._figures, path or "overview"
        with self._window(browser) as (page, origin):
            page.goto("about:blank")
            if is_first:
                page.wait_for_timeout(1e3 * UNREAD_S)
            load, spent = Load(page), Spent(self._looks_s)
            page.add_init_script(f"window.firstRows = whenDrawn({json.dumps(PAGES[path])}, '')")
            page.goto(f"{origin}/#/{path}", wait_until="commit")
            page.wait_for_selector(PAGES[path])
            cpu = spent.browser_ms(), spent.dashboard_ms()
            drawn_ms = float(page.evaluate("window.firstRows.then((at) => at - performance.timeOrigin)"))
            if path in ASKED:
                page.wait_for_selector(ASKED[path])
                figures.asked_ms = float(page.evaluate("performance.now()"))
            page.wait_for_selector(LIVE)
            page.wait_for_timeout(100)  # the browser counts a little later than it draws
            opening = PageOpening(drawn_ms, *cpu, load.travelled / 1e3, load.expanded / 1e3, load.rows)
        (figures.cold if is_first else figures.warm)[name] = opening
        return (
            f"{opening.drawn_ms:.0f} ms ({opening.cpu_ms:.0f} of processors), {opening.expanded_kb:.0f} kB, "
            f"{opening.travelled_kb:.0f} as they travelled, "
            f"{opening.rows} rows{', nobody read before' if is_first else ''}"
        )

    def _measure_updates(self, browser: Browser, node: str, count: int) -> str:
        with self._window(browser) as (page, origin):
            page.goto(f"{origin}/#/fleet")
            page.get_by_role("button", name="nodes", exact=True).click()
            page.get_by_role("searchbox").fill(node)
            page.locator("main tbody tr").nth(1).wait_for(state="detached")
            page.wait_for_timeout(1e3 * SETTLE_S)
            for number in range(count):
                self._measure_update(page, node, is_cordoned=number % 2 == 0)
                page.wait_for_timeout(1e3 * BETWEEN_S)
        return f"{len(self._figures.updates)} shown"

    def _measure_update(self, page: Page, node: str, *, is_cordoned: bool) -> None:
        cell, word = "main tbody tr .state", "cordoned" if is_cordoned else "ready"
        page.evaluate("([cell, word]) => { window.shown = whenDrawn(cell, word) }", [cell, word])
        spent, began = Spent(self._looks_s), time.time()
        self._loop.ask(lambda: self._cordon(node, is_cordoned))
        page.locator(cell).filter(has_text=word).wait_for()
        cpu = spent.browser_ms() + spent.dashboard_ms()
        shown = float(page.evaluate("window.shown"))
        self._figures.updates.append(Update(shown - 1e3 * began, cpu))

    def _picture(self, browser: Browser, name: str, size: tuple[int, int]) -> str:
        assert self._shots is not None
        cut = []
        with self._window(browser, size) as (page, origin):
            for path, rows in PAGES.items():
                page.goto(f"{origin}/#/{path}")
                page.wait_for_selector(ASKED.get(path, rows))
                page.wait_for_timeout(300)  # charts are drawn a little later than rows
                page.screenshot(path=self._shots / f"{name}-{path.replace('/', '-') or 'overview'}.png")
                if (over := int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))) > 0:
                    cut.append(f"{path or 'overview'} by {over} pixels")
        return f"in {self._shots}, wider than their window: {', '.join(cut) or 'none'}"


def missing_browser() -> str:
    """Why there is no browser; empty: there is one."""
    return "" if CHROMIUM.exists() else f"no {CHROMIUM}: install Debian's package chromium"
