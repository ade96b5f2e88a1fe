"""A negotiation as a trace: both regions tell their side of it under one trace, which follows from the solicitation.

The origin's side is made of its log of events, the other region's of its holds and its ledger. A federation, which
keeps nothing of it, tells its part when it is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.types.chain import LedgerEntry
from shoal.types.offer import Offer, Solicitation
from shoal.types.trace import Span, span_of, stretch, trace_of
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

SOLICITED: Final = "solicited"
ANSWERS: Final = frozenset({"bid", "countered", "declined"})
OUTCOMES: Final = frozenset({"granted", "released", "expired"})
"""Of an award."""
TOLD: Final = frozenset({SOLICITED, "no_bid", "awarded", *ANSWERS, *OUTCOMES})
LAST: Final = frozenset({"no_bid", *OUTCOMES})
"""What ends a negotiation."""


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of the log about a trade. what: as `Noted` has it; name: of the solicitation, of an award and what
    comes of it the agreement's. region: the counterpart, empty without one."""

    what: str
    name: str
    workload: WorkloadKey
    at: Wall
    region: str = ""
    code: str = ""
    terms: str = ""


@dataclass(frozen=True, slots=True)
class Negotiation:
    """What was said for one workload from one solicitation to what came of it, oldest first."""

    solicitation: str
    lines: tuple[Line, ...]

    @property
    def agreement(self) -> str:
        return next((line.name for line in self.lines if line.what == "awarded"), "")


def negotiations(lines: Sequence[Line]) -> tuple[Negotiation, ...]:
    """lines: the log's, in its order; entries of what came before it was cut are left out."""
    found: dict[str, list[Line]] = {}
    current: dict[WorkloadKey, str] = {}
    for line in lines:
        if line.what == SOLICITED or line.what in ANSWERS or line.what == "no_bid":
            current[line.workload] = line.name
            found.setdefault(line.name, []).append(line)
        elif line.workload in current:
            mine = found[current[line.workload]]
            awarded = next((each.name for each in mine if each.what == "awarded"), line.name)
            if line.name == awarded and not any(each.what in OUTCOMES for each in mine):
                mine.append(line)
    return tuple(Negotiation(name, tuple(told)) for name, told in found.items())


def trace_id(origin: str, solicitation: str) -> str:
    return trace_of("negotiation", origin, solicitation)


def origin_spans(told: Negotiation, origin: str) -> tuple[Span, ...]:
    """The origin's side."""
    trace = trace_id(origin, told.solicitation)
    root = span_of(trace, "negotiation")
    first, last = told.lines[0], told.lines[-1]
    over = last.what in LAST
    about = {"shoal.trade": told.solicitation, "shoal.workload": str(first.workload)}
    if first.what == SOLICITED and first.terms:
        about["shoal.need"] = first.terms
    if told.agreement:
        about["shoal.agreement"] = told.agreement
    code = last.code if over and last.what != "granted" else ""
    spans = [stretch(trace, root, "", "negotiation", origin, first.at, last.at, about, code, is_open=not over)]
    number, asked, awarded = 0, first, None
    for line in told.lines:
        if line.what == SOLICITED or not number:
            number, asked = number + 1, line
            answered = next((each for each in told.lines if each.what in ANSWERS and _round(each) == number), last)
            mine, terms = _solicit_span(trace, number), {"shoal.round": str(number)}
            if line.what == SOLICITED:
                terms["shoal.asked"] = line.terms
            spans.append(stretch(trace, mine, root, "solicit", origin, line.at, answered.at, terms))
        if line.what in ANSWERS:
            terms = {"shoal.answer": line.what, "shoal.to.region": line.region, "shoal.terms": line.terms}
            mine, parent = answer_span(trace, line.region, _round(line)), _solicit_span(trace, number)
            spans.append(stretch(trace, mine, parent, "answer", origin, asked.at, line.at, terms, line.code))
        elif line.what == "awarded":
            awarded = line
        elif awarded is not None and line.what in OUTCOMES:
            terms = {"shoal.to.region": line.region, "shoal.agreement": line.name, "shoal.terms": awarded.terms}
            code, mine = line.code if line.what != "granted" else "", span_of(trace, "award")
            spans.append(stretch(trace, mine, root, "award", origin, awarded.at, line.at, terms, code))
    return tuple(spans)


def delegate_spans(
    offer: Offer, agreement: str, since: Wall, entries: Sequence[LedgerEntry], region: str, wall: Wall
) -> tuple[Span, ...]:
    """The side of a region that bid: how long its room was held, and what for. agreement: empty where none came of it.
    entries: of its ledger. wall: now, where the hold is not over."""
    trace = trace_id(offer.origin, offer.solicitation)
    mine = [each for each in entries if each.agreement in (offer.id, agreement)]
    over = next((each for each in mine if each.what in OUTCOMES), None)
    said: Mapping[str, str] = {
        "shoal.bid": offer.id,
        "shoal.agreement": agreement,
        "shoal.from.region": offer.origin,
        "shoal.came": over.what if over is not None else "",
    }
    parent = answer_span(trace, region, offer.round)
    ended = over.at if over is not None else wall
    code = over.code if over is not None and over.what != "granted" else ""
    about = {key: value for key, value in said.items() if value}
    name = span_of(trace, "hold", offer.id)
    return (stretch(trace, name, parent, "hold", region, since, ended, about, code, is_open=over is None),)


def carried(asked: Solicitation, federation: str, to: int, answers: int, began: Wall, ended: Wall) -> Span:
    """The federation's part in one round: it asked so many regions at once, and so many answered in time."""
    trace = trace_id(asked.origin, asked.id)
    parent, own = _solicit_span(trace, asked.round), span_of(trace, "fan out", str(asked.round))
    about = {"shoal.from.region": asked.origin, "shoal.asked": f"{to} regions", "shoal.answers": str(answers)}
    return stretch(trace, own, parent, "fan out", federation, began, ended, about)


def _solicit_span(trace: str, number: int) -> str:
    return span_of(trace, "solicit", str(number))


def answer_span(trace: str, region: str, number: int) -> str:
    """Of the origin's wait for what this region answered in that round: what the region did then is beneath it."""
    return span_of(trace, "answer", region, str(number))


def _round(line: Line) -> int:
    """As the terms of an answer say: `round 2: ..`."""
    word, _, rest = line.terms.partition(" ")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return int(digits) if word == "round" and digits else 1
