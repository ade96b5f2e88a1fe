"""`shoal top`: the region, live, on a terminal."""

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import connect, connection
from shoal.types.codes import Code, refuse

if TYPE_CHECKING:
    from shoal.cli.tui.model import RegionSnapshot
    from shoal.client import RegionClient

EVENTS = 200
"""Past events that are shown."""


@click.command()
@connection
def top(context: str, region: str) -> None:
    """Nodes, devices, workloads, placements, moves and events, looked at every second.

    1 to 6 open a table, arrows and Enter a row of it, q ends. It needs Textual: the wheel's extra `top`.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the last
        raise refuse(Code.USAGE, "no terminal", "a terminal", "shoal status, or shoal get all --watch")
    try:
        from shoal.cli.tui.app import TopApp
    except ImportError as cause:
        raise refuse(
            Code.NOT_SUPPORTED_YET, f"{cause.name} is not installed", "the extra `top` of shoal-orchestrator",
            "install textual beside shoal; or shoal get all --watch",
        ) from cause  # fmt: skip
    with connect(context, region) as api:
        TopApp(lambda: _look(api)).run()


def _look(api: "RegionClient") -> "RegionSnapshot":
    from shoal.cli.render.listings import rows_of
    from shoal.cli.tui.model import RegionSnapshot

    kinds = ("nodes", "devices", "workloads", "placements", "migrations")
    rows: dict[str, list[Any]] = {kind: list(rows_of(api, kind, "", "")) for kind in kinds}
    rows["events"] = list(api.events(limit=EVENTS))
    return RegionSnapshot(time.monotonic(), api.context.region, rows)  # noqa: TID251 - a command's own clock
