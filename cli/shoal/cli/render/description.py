"""One thing for people: what it is, why, since when, what belongs to it, what happened last, what to do."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.text import Text

from shoal.cli.options import SINGULAR
from shoal.cli.render.columns import Cell
from shoal.cli.render.data import document_yaml
from shoal.cli.render.listings import COLUMNS, name_of, show, text_of
from shoal.cli.render.migrations import show_migration
from shoal.cli.render.output import console, line
from shoal.cli.render.plan import show_elsewhere
from shoal.cli.render.resources import age, event_line, scale_state, show_profile, when
from shoal.v1 import operator_pb2

LAST_EVENTS: Final = 8
_STATES: Final = ("STATE", "LIVENESS", "PHASE", "STAGE")
"""Headings of the column that says what something is."""
_ELSEWHERE: Final = frozenset(
    (
        *(*_STATES, "REASON", "AGE", "SEEN", "LAST SEEN", "SINCE", "APPLIED", "BEGAN", "PUSHED"),
        *("JOINED", "MADE", "AGREED"),
    )
)
"""Headings of columns that are said first, in other words."""


def show_description(
    kind: str, row: Any, events: Iterable[operator_pb2.Event], belongings: Sequence[tuple[str, Sequence[Any]]]
) -> None:
    """events: the region's, oldest first. belongings: (kind, rows) of what belongs to it."""
    if kind == "models":
        show_profile(row)
    elif kind == "migrations":
        show_migration(row)
    else:
        _show_columns(kind, row)
    if kind in ("policies", "tenants") and row.text:
        line("")
        line("DOCUMENT", "bold cyan")
        for each in document_yaml(row.text).splitlines():
            line(each)
    if kind == "workloads" and row.elsewhere:
        line("")
        line("OTHER REGIONS, WHEN LAST ASKED", "bold cyan")
        show_elsewhere(row.elsewhere)
    for of, rows in belongings:
        if rows:
            line("")
            line(of.upper(), "bold cyan")
            show(of, rows, wide=False)
    if mine := [event for event in events if is_about(kind, row, event)][-LAST_EVENTS:]:
        line("")
        line("EVENTS", "bold cyan")
        for event in mine:
            line(event_line(event))
    if remedy := what_to_do(kind, row):
        line("")
        line(f"try: {remedy}", "green")


def is_about(kind: str, row: Any, event: operator_pb2.Event) -> bool:
    match kind:
        case "nodes":
            return bool(row.node.name in (event.node, event.subject))
        case "devices":
            return bool(row.node == event.node and row.device.name in (event.subject, *event.message.split()))
        case "workloads":
            return bool(event.workload == row.workload)
        case "placements":
            return bool(event.workload == row.assignment.workload and row.assignment.id in event.message)
    return bool(event.subject == name_of(kind, row))


def what_to_do(kind: str, row: Any) -> str:
    """The remedy of its reason, else where to read on; empty: nothing is wrong."""
    refusal = getattr(row, "reason", None)
    code, remedy = getattr(refusal, "code", ""), getattr(refusal, "remedy", "")
    if remedy:
        return str(remedy)
    if kind == "workloads" and ((code and not scale_state(code)) or row.state != "ready"):
        return f"shoal explain {row.workload.name} --tenant {row.workload.tenant}"
    if kind == "placements" and row.observed.phase == "failed":
        return f"shoal logs {row.node}"
    return "shoal doctor" if code and kind in ("nodes", "devices") else ""


def _show_columns(kind: str, row: Any) -> None:
    said = {each.name: each.cell(row) for each in COLUMNS[kind]}
    head = Text(f"{SINGULAR[kind]} {name_of(kind, row)}", style="bold")
    for heading in _STATES:
        if heading in said:
            cell = said[heading]
            head.append(f"  {text_of(cell)}", cell.style if isinstance(cell, Cell) else "")
    console.print(head)
    reason = text_of(said.get("REASON", "-"))
    if reason != "-":
        is_note = kind == "placements" and not row.observed.code
        line(f"  {'note' if is_note else 'why'}: {reason}", "" if is_note else "yellow")
    for what, at in _times(kind, row):
        if at:
            line(f"  {what}: {age(at)} ago, {when(at)}")
    facts = {
        name.lower(): text_of(cell)
        for name, cell in said.items()
        if name not in _ELSEWHERE and text_of(cell) not in ("", "-") and text_of(cell) != name_of(kind, row)
    }
    width = max(map(len, facts), default=0)
    for name, text in facts.items():
        line(f"  {name}:{' ' * (width - len(name))} {text}")


def _times(kind: str, row: Any) -> tuple[tuple[str, float], ...]:
    """What happened when; 0: that is not known. `since`: when it came to be as it is."""
    match kind:
        case "nodes":
            return ("seen", row.last_seen), ("joined", row.joined_at)
        case "workloads":  # one that waits for nothing: since it was applied
            return (("since", row.since or row.applied_at),)
        case "devices":
            return (("since", row.since),)
        case "placements":
            return (("since", row.observed.since),)
        case "tokens":
            return (("made", row.created_at),)
        case "agreements":
            return (("agreed", row.agreed_at),)
        case "policies" | "tenants":
            return (("since", row.applied_at),)
        case "regions":
            return (("since", row.document.applied_at),)
    return ()
