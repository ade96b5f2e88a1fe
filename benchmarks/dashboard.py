"""The dashboard of a large region in a browser: `shoal bench dashboard [--nodes 1000] [--workloads 500]`.

A region that already stands (`_placement/standing.py`) runs with agents that report on time, in one process, and serves
its dashboard to headless Chromium on the same machine. Then, in this order:

- *quiet*: for how long the coordinator's loop is held by its own work, while nobody looks;
- *pages*: each page is opened in a window of its own that has kept nothing, by the first reader after a while (`cold`)
  and by a later one: seconds until its first rows are drawn, bytes that it loaded, rows that it holds;
- *updates*: a node is cordoned and uncordoned; milliseconds from the call until the page that shows it has drawn it;
- *watched*: for how long the loop was held meanwhile, in processor time, and the longest look of the dashboard's own.

Browser, region and agents share the machine's processors, so times are upper bounds of what a coordinator with a
machine of its own gives; bytes, rows and processor time do not depend on what else runs. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from _machine import machine_line
from _placement.agents import LoopMonitor, NoModels, ScaleAgent, ScaleLinks
from _placement.standing import REGION, fill
from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeout

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.dashboard.dashboard import Dashboard
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.identity.enrolment import Enrolment
from shoal.coordinator.controllers.region.region import NoMeter, RegionalCoordinator, RegionConfig
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.address import HostPort
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall

HEARTBEAT_S: Final = 5.0
REST_S: Final = 3.0
"""Seconds without a desired set after which the region stands."""
QUIET_S: Final = 10.0
UNREAD_S: Final = 3.0
"""Seconds without a reader before a page is opened as by the first one: more than half of all rows have changed."""
UPDATES: Final = 20
UPDATE_TIMEOUT_MS: Final = 10_000.0
ACTOR: Final = "shoal://scale/operator/bench"
WORKLOAD: Final = "workloads/t0/w-000000"
PAGES: Final = {
    "": "main .tile",
    "fleet": "main tbody tr",
    "workloads": "main tbody tr",
    WORKLOAD: "[aria-label=Replicas] tbody tr",
    "migrations": "main .empty:not([aria-busy])",
    "federation": "main .empty:not([aria-busy])",
    "events": "main tbody tr, main .empty:not([aria-busy])",
    "plan": "main form",
    "traces": "main form",
}
"""What each page shows once it has its rows, or has heard that there are none."""
ASKED: Final = {WORKLOAD: "[aria-label=Candidates] tbody tr"}
"""What it shows once it has the answer of a computation, which its bytes include."""
ASKED_TIMEOUT_MS: Final = 120_000.0

T = TypeVar("T")


@dataclass(slots=True)
class DashboardFigures:
    """What was measured."""

    # Nodes of the region, a device each.
    nodes: int
    # Workloads of the region.
    workloads: int
    # By page: seconds from the navigation to its first rows, of the first reader after nobody read for a while.
    cold_first_rows_s: dict[str, float] = field(default_factory=dict)
    # The same of a second reader.
    first_rows_s: dict[str, float] = field(default_factory=dict)
    # By page: thousand bytes that it loaded until then, as they travelled.
    page_kb: dict[str, float] = field(default_factory=dict)
    # The same, after they were expanded.
    page_expanded_kb: dict[str, float] = field(default_factory=dict)
    # By page: rows of its live tables.
    page_rows: dict[str, int] = field(default_factory=dict)
    # Seconds until the page of a workload shows every candidate, which a plan of the whole region is made for.
    asked_s: float = 0.0
    # Milliseconds from a change to its picture, of half the changes at most.
    update_p50_ms: float = 0.0
    # The same, of the slowest.
    update_max_ms: float = 0.0
    # Changes that the page did not show in time: a node without a processor falls silent, and is no longer `ready`.
    updates_unseen: int = 0
    # Longest that the loop was held, in milliseconds of its thread's processor time, while nobody looked.
    quiet_stall_ms: float = 0.0
    # The same, while pages were open.
    watched_stall_ms: float = 0.0
    # Longest slice of the dashboard's own looks, in milliseconds by the clock.
    slice_ms: float = 0.0
    # The machine's load, of the last minute, before and after.
    load: tuple[float, float] = (0.0, 0.0)


class Loop:
    """Lets the browser's thread ask the region's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        found: Future[T] = asyncio.run_coroutine_threadsafe(work(), self._loop)
        return found.result(60)


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


def open_page(browser: Browser, link: str, path: str, figures: DashboardFigures, *, is_first: bool) -> Page:
    """A window that is logged in by `link` shows `path`. is_first: nobody has read for a while."""
    context = browser.new_context(ignore_https_errors=True, viewport={"width": 1440, "height": 900})
    page = context.new_page()
    origin = link.partition("/#")[0]
    page.goto(link)
    page.get_by_role("navigation").wait_for()
    page.goto("about:blank")
    if is_first:
        page.wait_for_timeout(1e3 * UNREAD_S)
    load = Load(page)
    began = time.monotonic()
    page.goto(f"{origin}/#/{path}")
    page.wait_for_selector(PAGES[path])
    took, name = time.monotonic() - began, path or "overview"
    if path in ASKED:
        page.wait_for_selector(ASKED[path], timeout=ASKED_TIMEOUT_MS)
        figures.asked_s = round(time.monotonic() - began, 3)
    page.wait_for_timeout(100)  # the browser counts a little later than it draws
    loaded = (load.travelled, load.expanded, load.rows)
    (figures.cold_first_rows_s if is_first else figures.first_rows_s)[name] = round(took, 3)
    figures.page_kb[name], figures.page_expanded_kb[name] = (round(each / 1e3, 1) for each in loaded[:2])
    figures.page_rows[name] = loaded[2]
    return page


def measure_updates(page: Page, loop: Loop, region: RegionalCoordinator, origin: str) -> list[float]:
    """Milliseconds of each that the page showed in time, in order."""
    node = sorted(name for name, each in region.fleet.fleet.nodes.items() if each.node.devices)[7]
    page.goto(f"{origin}/#/fleet")
    page.get_by_role("button", name="nodes", exact=True).click()
    page.get_by_role("searchbox").fill(node)
    page.locator("main tbody tr").nth(1).wait_for(state="detached")
    took = []
    for number in range(UPDATES):
        cordoned = number % 2 == 0
        word = "cordoned" if cordoned else "ready"
        began = time.monotonic()
        loop.ask(lambda cordoned=cordoned: region.fleet.cordon(node, cordoned, ACTOR))  # type: ignore[misc]
        with suppress(PageTimeout):
            page.locator("main tbody tr .state").filter(has_text=word).wait_for(timeout=UPDATE_TIMEOUT_MS)
            took.append(1e3 * (time.monotonic() - began))
        page.wait_for_timeout(150)
    return sorted(took)


def drive(dashboard: Dashboard, loop: Loop, region: RegionalCoordinator, figures: DashboardFigures) -> None:
    """Runs in a thread: the browser's part."""
    operator = Identity(REGION, Role.OPERATOR, "bench", Wall(0.0), Wall(4e9), "1")

    def link() -> str:
        made = loop.ask(lambda: dashboard.open_link(operator))
        return f"https://{made.address}/#link={made.secret}"

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for path in PAGES:
            for is_first in (True, False):
                open_page(browser, link(), path, figures, is_first=is_first).context.close()
        page = open_page(browser, link(), "fleet", figures, is_first=False)
        took = measure_updates(page, loop, region, page.url.partition("/#")[0])
        figures.updates_unseen = UPDATES - len(took)
        if took:
            figures.update_p50_ms, figures.update_max_ms = took[len(took) // 2], took[-1]
        browser.close()


async def stand(links: ScaleLinks, region: RegionalCoordinator) -> None:
    """Returns when the region has planned, and has sent nothing for a while."""
    sets = -1
    while sets != links.sets or region.workloads.last_plan is None:
        sets = links.sets
        await asyncio.sleep(REST_S)


async def measure(nodes: int, workloads: int, folder: Path) -> DashboardFigures:
    clock, figures, load = CoordinatorClock(), DashboardFigures(nodes, workloads), os.getloadavg()[0]
    store = await SqliteStore.open(folder / "store")
    standing = await fill(store, nodes, clock.wall(), HEARTBEAT_S, workloads)
    links = ScaleLinks({each.name: ScaleAgent(each, standing.epoch) for each in standing.nodes}, HEARTBEAT_S)
    region = RegionalCoordinator(store, links, NoModels(), NoModels(), clock, SystemIds(), RegionConfig(REGION))
    await region.start()
    links.attach(region)
    authority = FileAuthority.open(folder / "ca", REGION, wall=clock.wall(), may_create=True)
    identity = ServerIdentity(authority, folder / "server", ("127.0.0.1",), clock)
    audit = AuditTrail(region.events, NoMeter())
    guard = Authorisation(REGION, clock, NoMeter(), audit)
    dashboard = Dashboard(
        region, guard, audit, SystemIds(), identity, advertise="127.0.0.1", hosts=("127.0.0.1",), federation=None
    )
    nobody = cast(Any, None)
    operators = OperatorService(region, Enrolment(region.context, authority), nobody, audit, nobody)
    await dashboard.start(HostPort("127.0.0.1", 0), operators)
    monitor = LoopMonitor()
    running: Sequence[Coroutine[Any, Any, None]] = (
        links.run(), region.run(), region.timeline.run(), dashboard.run(), monitor.run(),
    )  # fmt: skip
    tasks = [asyncio.create_task(each) for each in running]
    try:
        await stand(links, region)
        print(f"# {nodes} nodes and {workloads} workloads stand", file=sys.stderr, flush=True)
        monitor.reset()
        await asyncio.sleep(QUIET_S)
        figures.quiet_stall_ms = 1e3 * monitor.stall_s
        monitor.reset()
        await asyncio.to_thread(drive, dashboard, Loop(), region, figures)
        figures.watched_stall_ms = 1e3 * monitor.stall_s
        figures.slice_ms = 1e3 * dashboard.board.longest_slice_s
        figures.load = load, os.getloadavg()[0]
    finally:
        region.stop()
        await dashboard.stop()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        await store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--workloads", type=int, default=500)
    given = parser.parse_args()
    print(machine_line(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(given.nodes, given.workloads, Path(folder)))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
