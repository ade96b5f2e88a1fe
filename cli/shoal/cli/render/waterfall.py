"""A trace for people: a line for each span, beneath the one it was part of, and a bar for when it was."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from shoal.cli.render.output import console, line, table
from shoal.types.trace import Span
from shoal.types.units import show_seconds

_TOLD: Final = (
    "shoal.to.region",
    "shoal.to.node",
    "shoal.workload",
    "shoal.from",
    "shoal.to",
    "shoal.cause",
    "shoal.answer",
    "shoal.terms",
    "shoal.asked",
    "shoal.note",
    "shoal.came",
)
"""Attributes that are shown of each span; all of them with `wide`."""
_WIDTHS: Final = range(20, 61)
_BESIDE: Final = 90
"""Columns that the rest of a line usually takes."""


@dataclass(frozen=True, slots=True)
class Row:
    """label: the span's name beneath its parent's. begin, end: of the whole trace, 0 to 1."""

    label: str
    where: str
    took: str
    begin: float
    end: float
    told: str


def show_trace(spans: Sequence[Span], *, wide: bool) -> None:
    width = min(max(console.width - _BESIDE, _WIDTHS[0]), _WIDTHS[-1])
    began, took_s = extent(spans)
    regions = len({span.region for span in spans})
    at = datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds")
    count = len({span.id for span in spans})
    many = f"{count} span{'s' if count != 1 else ''} in {regions} region{'s' if regions != 1 else ''}"
    line(f"trace {spans[0].trace}  {many}  {show_seconds(took_s)}  from {at}", "bold")
    table(
        ["SPAN", "WHERE", "TOOK", f"0{show_seconds(took_s):>{width - 1}}", ""],
        [[row.label, row.where, row.took, bar(row.begin, row.end, width), row.told] for row in rows(spans, wide=wide)],
    )


def rows(spans: Sequence[Span], *, wide: bool = False) -> tuple[Row, ...]:
    """Each span once, parents before children, both by when they began. A span whose parent is not among them is a
    root."""
    began, took_s = extent(spans)
    return tuple(
        Row(
            label,
            _where(span),
            show_seconds(span.seconds) + ("+" if span.open else ""),
            (span.began - began) / took_s if took_s > 0 else 0.0,
            (span.ended - began) / took_s if took_s > 0 else 1.0,
            _told(span, wide=wide),
        )
        for label, span in _tree(spans)
    )


def extent(spans: Iterable[Span]) -> tuple[float, float]:
    """(when the first began, seconds until the last ended)"""
    listed = tuple(spans)
    began = min(span.began for span in listed)
    return began, max(span.ended for span in listed) - began


def bar(begin: float, end: float, width: int) -> str:
    """begin, end: 0 to 1. At least one cell: what happened is seen."""
    first = min(math.floor(begin * width), width - 1)
    last = max(math.ceil(end * width - 1e-9), first + 1)
    return " " * first + "█" * (last - first) + " " * (width - last)


def _tree(spans: Sequence[Span]) -> Iterator[tuple[str, Span]]:
    """(its name with the branches that lead to it, the span). Who is told twice counts once."""
    known = {span.id: span for span in spans}
    children: dict[str, list[Span]] = {}
    for span in known.values():
        parent = span.parent if span.parent in known and span.parent != span.id else ""
        children.setdefault(parent, []).append(span)
    for each in children.values():
        each.sort(key=lambda span: (span.began, -span.seconds, span.id))
    seen = set[str]()

    def beneath(root: Span) -> Iterator[tuple[str, Span]]:
        ahead = [(root, "", "")]  # no recursion: how deep it goes is a stranger's word
        while ahead:
            span, lead, branch = ahead.pop()
            seen.add(span.id)
            yield f"{lead}{branch}{span.name}", span
            inner = [each for each in children.get(span.id, ()) if each.id not in seen]
            lead += {"": "", "└ ": "  ", "├ ": "│ "}[branch]
            ahead += [(each, lead, "├ " if number else "└ ") for number, each in enumerate(reversed(inner))]

    for root in children.get("", ()):
        yield from beneath(root)
    for span in known.values():
        if span.id not in seen:  # its parents go in a circle
            yield from beneath(span)


def _where(span: Span) -> str:
    return "/".join(filter(None, (span.region, span.node, span.process)))


def _told(span: Span, *, wide: bool) -> str:
    if wide:
        said = [f"{key.removeprefix('shoal.')}={value}" for key, value in sorted(span.attributes.items())]
    else:
        said = [span.attributes[key] for key in _TOLD if span.attributes.get(key)]
    return "  ".join(filter(None, (span.code, *said)))
