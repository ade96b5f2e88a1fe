"""Spans of a trace, as in OpenTelemetry: what happened to one request, migration or negotiation, where and when.

Ids are hexadecimal: 32 digits of a trace, 16 of a span. The ids of stored objects (a migration, a negotiation) are
derived from the object's name. So every reporter produces the same spans, after a restart and in either region.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal.types.units import Seconds, Wall

TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^\s]*)?")
_SAMPLED: Final = 1
COORDINATOR: Final = "coordinator"
"""Value of `Span.process` for spans that a coordinator reports."""


class SpanKind(StrEnum):
    INTERNAL = "internal"
    # Answers a call that came over a network.
    SERVER = "server"
    # Calls, and waits for the answer.
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of a trace."""

    # Id of the trace.
    trace: str
    # Id of the span.
    id: str
    # Id of the enclosing span; empty for a root.
    parent: str
    # What was done.
    name: str
    # Whether it answers a call, makes one, or neither.
    kind: SpanKind
    # Region where it was.
    region: str
    # Node where it was; empty for what a coordinator reports.
    node: str
    # Process on the node, or COORDINATOR.
    process: str
    # When it began, by the clock of that process.
    began: Wall
    # How long it took; for an open span, until the report.
    seconds: Seconds
    # Facts about it, by name.
    attributes: Mapping[str, str] = field(default_factory=dict)
    # Why it failed (types.codes); empty where it did not.
    code: str = ""
    # True: it has not ended.
    open: bool = False

    @property
    def end_time(self) -> Wall:
        return Wall(self.began + self.seconds)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The caller's trace context of a request."""

    trace: str
    span: str
    # True: the caller records the trace and asks others to.
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-{_SAMPLED if self.sampled else 0:02x}"


def parse_traceparent(text: str) -> TraceParent | None:
    """None where `text` is no valid `traceparent`; the request then has no trace context. Source: W3C Trace Context,
    level 1, section 3.2."""
    found = _PARENT.fullmatch(text) if len(text) <= 128 else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not (int(trace, 16) and int(span, 16)):
        return None
    return TraceParent(trace, span, bool(int(flags, 16) & _SAMPLED))


def coordinator_span(
    trace: str,
    span: str,
    parent: str,
    name: str,
    region: str,
    began: Wall,
    ended: Wall,
    attributes: Mapping[str, str],
    code: str = "",
    *,
    is_open: bool = False,
) -> Span:
    """A span that a coordinator reports about its region."""
    seconds = Seconds(max(0.0, ended - began))
    where = (region, "", COORDINATOR)
    return Span(trace, span, parent, name, SpanKind.INTERNAL, *where, began, seconds, attributes, code, is_open)


def trace_id_of(*names: str) -> str:
    """Trace id derived from these names: equal names give equal ids."""
    return _digest(names)[:32]


def span_id_of(trace: str, *names: str) -> str:
    """Span id within that trace, derived from these names."""
    return _digest((trace, *names))[:16]


def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()
