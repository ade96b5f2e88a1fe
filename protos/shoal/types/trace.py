"""What happened to one request, migration or negotiation, where and when: spans of a trace, as OpenTelemetry has them.

Ids are hexadecimal: 32 digits of a trace, 16 of a span. Those of what is stored (a migration, a negotiation) follow
from its name, so that whoever tells the story tells the same spans, before and after a restart, and in either region.
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
"""The process of what a coordinator tells."""


class SpanKind(StrEnum):
    INTERNAL = "internal"
    SERVER = "server"
    """Answers what came over a network."""
    CLIENT = "client"
    """Asks, and waits for the answer."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a trace. parent: empty for a root. region, node, process: where it was; node is empty for what
    a coordinator tells. code: of types.codes, where it failed. open: it is not over; `seconds` is until it was told."""

    trace: str
    id: str
    parent: str
    name: str
    kind: SpanKind
    region: str
    node: str
    process: str
    began: Wall
    seconds: Seconds
    attributes: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    open: bool = False

    @property
    def ended(self) -> Wall:
        return Wall(self.began + self.seconds)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """What a caller says of the trace that its request belongs to. sampled: it records, and asks others to."""

    trace: str
    span: str
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-{_SAMPLED if self.sampled else 0:02x}"


def read_traceparent(text: str) -> TraceParent | None:
    """None for what is no `traceparent`: then there is none. Source: W3C Trace Context, level 1, section 3.2."""
    found = _PARENT.fullmatch(text) if len(text) <= 128 else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not (int(trace, 16) and int(span, 16)):
        return None
    return TraceParent(trace, span, bool(int(flags, 16) & _SAMPLED))


def stretch(
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
    """A stretch of what a coordinator tells of its region."""
    seconds = Seconds(max(0.0, ended - began))
    where = (region, "", COORDINATOR)
    return Span(trace, span, parent, name, SpanKind.INTERNAL, *where, began, seconds, attributes, code, is_open)


def trace_of(*names: str) -> str:
    """The trace of what has these names: the same for the same ones."""
    return _digest(names)[:32]


def span_of(trace: str, *names: str) -> str:
    """One span of that trace, by its names."""
    return _digest((trace, *names))[:16]


def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()
