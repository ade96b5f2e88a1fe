"""A trace for people: a line for each span beneath its parent, with a bar over time."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.cli.render.columns import Column
from shoal.cli.render.output import console, line, table
from shoal.cli.render.times import rfc3339
from shoal.types.trace import Span
from shoal.types.units import show_seconds

_SHOWN_ATTRIBUTES: Final = (
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
"""Attributes shown of each span; `wide` shows all of them."""
_WIDTHS: Final = range(20, 61)
_OTHER_COLUMNS_WIDTH: Final = 90
"""Characters that the rest of a line usually takes."""


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    """One span as a line of the waterfall."""

    # The span's name, indented with tree branches beneath its parent's.
    label: str
    # region/node/process, leaving out what the span does not name.
    where: str
    # Duration for people; `+` is appended while the span is open.
    took: str
    # Start as a share of the whole trace, 0 to 1.
    begin: float
    # End as a share of the whole trace, 0 to 1.
    end: float
    # The span's code, then its attributes.
    details: str


def show_trace(spans: Sequence[Span], *, wide: bool) -> None:
    width = min(max(console.width - _OTHER_COLUMNS_WIDTH, _WIDTHS[0]), _WIDTHS[-1])
    began, took_s = extent(spans)
    regions = len({span.region for span in spans})
    count = len({span.id for span in spans})
    many = f"{count} span{'s' if count != 1 else ''} in {regions} region{'s' if regions != 1 else ''}"
    line(f"trace {spans[0].trace}  {many}  {show_seconds(took_s)}  from {rfc3339(began) or '-'}", "bold")
    table(
        [
            Column("SPAN", least=16),
            Column("WHERE", rank=2, least=12),
            Column("TOOK", rank=1, right=True),
            f"0{show_seconds(took_s):>{width - 1}}",
            Column("", rank=3, least=12),
        ],
        [
            [row.label, row.where, row.took, bar(row.begin, row.end, width), row.details]
            for row in rows(spans, wide=wide)
        ],
        wide=wide,
    )


def rows(spans: Sequence[Span], *, wide: bool = False) -> tuple[WaterfallRow, ...]:
    """Each span once, parents before children, siblings by start. A span whose parent is not in the trace is a root."""
    began, took_s = extent(spans)
    return tuple(
        WaterfallRow(
            label,
            _where(span),
            show_seconds(span.seconds) + ("+" if span.open else ""),
            (span.began - began) / took_s if took_s > 0 else 0.0,
            (span.end_time - began) / took_s if took_s > 0 else 1.0,
            _details(span, wide=wide),
        )
        for label, span in _tree(spans)
    )


def extent(spans: Iterable[Span]) -> tuple[float, float]:
    """(start of the first span, seconds until the last one ends)"""
    listed = tuple(spans)
    began = min(span.began for span in listed)
    return began, max(span.end_time for span in listed) - began


def bar(begin: float, end: float, width: int) -> str:
    """begin, end: 0 to 1. At least one cell wide, so that every span is visible."""
    first = min(math.floor(begin * width), width - 1)
    last = max(math.ceil(end * width - 1e-9), first + 1)
    return " " * first + "█" * (last - first) + " " * (width - last)


def _tree(spans: Sequence[Span]) -> Iterator[tuple[str, Span]]:
    """(its name with the branches that lead to it, the span). A span reported twice counts once."""
    known = {span.id: span for span in spans}
    children: dict[str, list[Span]] = {}
    for span in known.values():
        parent = span.parent if span.parent in known and span.parent != span.id else ""
        children.setdefault(parent, []).append(span)
    for each in children.values():
        each.sort(key=lambda span: (span.began, -span.seconds, span.id))
    seen = set[str]()

    def beneath(root: Span) -> Iterator[tuple[str, Span]]:
        ahead = [(root, "", "")]  # no recursion: the depth is untrusted
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
        if span.id not in seen:  # its parents form a cycle
            yield from beneath(span)


def _where(span: Span) -> str:
    return "/".join(filter(None, (span.region, span.node, span.process)))


def _details(span: Span, *, wide: bool) -> str:
    if wide:
        said = [f"{key.removeprefix('shoal.')}={value}" for key, value in sorted(span.attributes.items())]
    else:
        said = [span.attributes[key] for key in _SHOWN_ATTRIBUTES if span.attributes.get(key)]
    return "  ".join(filter(None, (span.code, *said)))
