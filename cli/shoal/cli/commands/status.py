"""`shoal status`: the region on one screen."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import click
from rich.text import Text

from shoal.cli.options import connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.migrations import is_over, stage_line
from shoal.cli.render.output import console, emit, line
from shoal.cli.render.resources import event_line, liveness, reason, signal_text
from shoal.cli.render.styles import style_of
from shoal.types.codes import ShoalError

if TYPE_CHECKING:
    from shoal.client import RegionClient

MOST: Final = 5
"""Things of one kind that are named; of the others only the number is said."""
LAST_EVENTS: Final = 6


@click.command()
@connection
@output
def status(context: str, region: str, output: str) -> None:
    """The region on one screen: nodes, devices, workloads that are not well, moves, agreements, checks, last events.

    Status 1 when something is not as it should be.
    """
    with connect(context, region) as api:
        found = _read(api)
        name, address = api.context.region, api.address
    failed = [check for check in found["checks"] if not check.ok]
    ill = unwell(found)
    if output in ("json", "yaml"):
        emit({"region": name, **{kind: [as_data(row) for row in rows] for kind, rows in found.items()}}, output)
    else:
        line(f"region {name} at {address}", "bold")
        _show(found, ill, failed)
    if ill or failed:
        raise click.exceptions.Exit(1)


def _read(api: "RegionClient") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        "nodes": list(api.get("nodes").nodes),
        "devices": list(api.get("devices").devices),
        "workloads": list(api.get("workloads").workloads),
        "migrations": list(api.get("migrations").migrations),
        "agreements": list(api.get("agreements").agreements),
        "regions": list(api.get("regions").regions),
    }
    try:
        found["checks"] = list(api.doctor().checks)
    except ShoalError:  # a viewer may not
        found["checks"] = []
    found["events"] = list(api.events(limit=LAST_EVENTS))
    return found


def unwell(found: dict[str, list[Any]]) -> list[tuple[str, str]]:
    """(what, why) of each node, device and workload that is not as it should be."""
    ill = [
        (f"node {row.node.name}", f"{liveness(row)}{_because(row.reason)}")
        for row in found["nodes"]
        if liveness(row) != "ready"
    ]
    ill += [
        (f"device {row.node}/{row.device.name}", reason(row.reason))
        for row in found["devices"]
        if row.reason.code and row.liveness == "ready"
    ]
    ill += [
        (
            f"workload {row.workload.tenant}/{row.workload.name}",
            f"{row.state}, {row.ready}/{row.wanted}{_because(row.reason)}",
        )
        for row in found["workloads"]
        if row.state not in ("ready", "deleting")  # what is asked to go is as it should be
    ]
    return ill


def _because(refusal: Any) -> str:
    return f": {reason(refusal)}" if refusal.code else ""


def _show(found: dict[str, list[Any]], ill: list[tuple[str, str]], failed: list[Any]) -> None:
    _count("nodes", (liveness(row) for row in found["nodes"]))
    stand_ins = Counter(
        "simulated" if d.device.simulated else "emulated" if d.device.emulated else "real" for d in found["devices"]
    )
    _count("devices", (word for word, count in stand_ins.items() for _ in range(count)))
    _count("workloads", (row.state for row in found["workloads"]))
    if agreements := found["agreements"]:
        _count("agreements", (row.state for row in agreements))
    for row in found["regions"]:
        for signal in row.signals:
            if signal.value == signal.value or signal.refusal.code:  # NaN: nobody says
                line(f"{signal.name:<11} {signal_text(signal)}", "yellow" if signal.stale else "")
    if checks := found["checks"]:
        passed = len(checks) - len(failed)
        line(f"{'checks':<11} {passed} passed, {len(failed)} failed", "red" if failed else "")
    moves = [row for row in found["migrations"] if not is_over(row)]
    _section("MOVES", [(stage_line(row), "cyan") for row in moves])
    wrong = [(f"{what}: {why}", "yellow") for what, why in ill]
    wrong += [
        (f"{check.name}: {reason(check.refusal)}; try: {check.refusal.remedy or 'shoal doctor'}", "red")
        for check in failed
    ]
    _section("NOT WELL", wrong)
    _section("LAST EVENTS", [(event_line(event), "") for event in found["events"]], most=LAST_EVENTS)


def _count(what: str, states: Iterable[str]) -> None:
    """`nodes  5: 4 ready, 1 lost`"""
    counted = Counter(states)
    text = Text(f"{what:<11} {sum(counted.values())}")
    for index, (word, count) in enumerate(counted.most_common()):
        text.append(": " if not index else ", ")
        text.append(f"{count} {word}", style_of(word))
    console.print(text)


def _section(title: str, lines: list[tuple[str, str]], most: int = MOST) -> None:
    if not lines:
        return
    line("")
    line(title, "bold cyan")
    for text, style in lines[:most]:
        line(text, style)
    if len(lines) > most:
        line(f"and {len(lines) - most} more", "dim")
