"""The dashboard of a large region in a browser: `shoal bench dashboard [--nodes 1000] [--workloads 500]`.

A region that already stands (`_placement/standing.py`) runs with agents that report on time, in one process, and serves
its dashboard to headless Chromium on the same machine. Then, in this order:

- *quiet*: for how long the coordinator's loop is held by its own work, while nobody looks;
- *pages*: each page is opened in a window of its own that has kept nothing, by the first reader after a while (`cold`)
  and by a later one (`warm`): milliseconds from the navigation until its first rows are drawn, by the page's own clock,
  bytes that it loaded, rows that it holds;
- *updates*: a node is cordoned and uncordoned; milliseconds from the call until the page that shows it has drawn it;
- *watched*: for how long the loop was held meanwhile, and where.

Where the machine has two processors, the region with its agents and its dashboard is bound to one of them and Chromium
with what drives it to another, so that neither waits for the other; a browser at home has more than one, so its times
are upper bounds. What other programs do on the two still makes the clock's figures larger. So each of them has one in
processor time beside it, which they change little: `first_paint_cpu_ms` is what browser and dashboard together took
until the first rows, that is, the time on one processor that does nothing else. `loop_stall_ms` is processor time of
the loop's thread: what the coordinator's own work held it for, its agents' included. `others_share` says which part of
the machine other programs took; above a few percent judge by processor time. Bytes and rows depend on nothing else.

Progress goes to stderr; the last line on stdout is JSON. The exit status is 1 when something that was waited for did
not come; `missed` lists the goals that were not met.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from _dashboard.browser import DashboardWindows, GivesUpError, Loop, missing_browser
from _dashboard.figures import DashboardFigures, report
from _dashboard.holds import HoldMonitor
from _dashboard.processors import OthersMeter, Sides, pin
from _dashboard.region import WatchedRegion, watched_region
from _machine import machine_line
from playwright.sync_api import Error as BrowserError

from shoal.coordinator.main import GC_THRESHOLD
from shoal.host import gc_freeze

QUIET_S: Final = 10.0
DEADLINE_S: Final = 900.0
NODES_LEAST: Final = 8
BUSY: Final = 0.05
"""Share of the processors that other programs took, above which the clock's figures are theirs too."""


async def measure(given: argparse.Namespace, folder: Path, sides: Sides) -> DashboardFigures:
    """Raises GivesUpError, TimeoutError, BrowserError."""
    deadline = time.monotonic() + given.deadline
    figures, monitor = DashboardFigures(given.nodes, given.workloads), HoldMonitor()
    async with watched_region(given.nodes, given.workloads, folder) as watched:
        watching = asyncio.create_task(monitor.run())
        try:
            await watched.stand(deadline)
            print(f"# {given.nodes} nodes and {given.workloads} workloads stand", file=sys.stderr, flush=True)
            others = OthersMeter()
            watched.links.latest_s = 0.0
            monitor.reset()
            await asyncio.sleep(QUIET_S)
            figures.quiet = monitor.found
            monitor.reset()

            def on_measured() -> None:
                figures.watched, figures.others_share = monitor.found, others.share()
                figures.heartbeat_late_s = watched.links.latest_s
                figures.slice_ms = 1e3 * watched.dashboard.board.longest_slice_s

            await _drive(watched, Loop(deadline), figures, given, sides.browser, on_measured)
        finally:
            watching.cancel()
    return figures


async def _drive(
    watched: WatchedRegion,
    loop: Loop,
    figures: DashboardFigures,
    given: argparse.Namespace,
    processor: int | None,
    on_measured: Callable[[], None],
) -> None:
    """Lets the browser do its part, and ends it when the region has ended."""
    board = watched.dashboard.board
    windows = DashboardWindows(
        loop, lambda: loop.ask(watched.open_link), watched.cordon, figures, lambda: board.worked_s, given.screenshots
    )
    work = asyncio.to_thread(windows.run, watched.some_node, processor, on_measured, is_quick=given.quick)
    driving = asyncio.create_task(work)
    await asyncio.wait((driving, watched.running), return_when=asyncio.FIRST_COMPLETED)
    if watched.running.done():
        loop.is_over.set()
        watched.running.result()
    await driving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--workloads", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="the three largest pages alone, and fewer updates")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="for everything")
    parser.add_argument(
        "--screenshots", type=Path, metavar="FOLDER", help="also make a picture of each page, for a desktop and a phone"
    )
    given = parser.parse_args()
    if given.nodes < NODES_LEAST or given.workloads < 1:
        parser.error(f"at least {NODES_LEAST} nodes and a workload")
    if why := missing_browser():
        raise SystemExit(f"shoal bench dashboard: {why}")
    if given.screenshots is not None:
        given.screenshots.mkdir(parents=True, exist_ok=True)
    sides = Sides()
    print(f"{machine_line()}; {sides}", flush=True)
    pin(sides.region)
    # As the coordinator's program does.
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    gc_freeze.freeze()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        try:
            found = asyncio.run(measure(given, Path(folder), sides))
        except (GivesUpError, TimeoutError, BrowserError) as error:
            raise SystemExit(f"shoal bench dashboard: {error}") from None
    if found.others_share > BUSY:
        print(f"# other programs took {found.others_share:.0%} of the processors: judge by processor time")
    print(json.dumps(report(found)))
    sys.exit(1 if found.failures else 0)


if __name__ == "__main__":
    main()
