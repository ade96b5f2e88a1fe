"""A negotiation as a trace: both regions export their spans under one trace id, derived from the solicitation.

The origin makes its spans from its event log, the delegate from its holds and its ledger. A federation stores
nothing of it and exports its span when the fan-out is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.types.chain import LedgerEntry
from shoal.types.offer import Offer, Solicitation
from shoal.types.trace import Span, coordinator_span, span_id_of, trace_id_of
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

SOLICITED: Final = "solicited"
ANSWERS: Final = frozenset({"bid", "countered", "declined"})
OUTCOMES: Final = frozenset({"granted", "released", "expired"})
"""Results of an award."""
NEGOTIATION_EVENTS: Final = frozenset({SOLICITED, "no_bid", "awarded", *ANSWERS, *OUTCOMES})
FINAL_EVENTS: Final = frozenset({"no_bid", *OUTCOMES})
"""Events that end a negotiation."""


@dataclass(frozen=True, slots=True)
class NegotiationLine:
    """One log entry about a trade."""

    # Kind of the event, as in TradeNote.
    what: str
    # Id of the solicitation; from the award on, that of the agreement.
    name: str
    # Workload that was negotiated.
    workload: WorkloadKey
    # When it was logged.
    at: Wall
    # The other region; empty: none.
    region: str = ""
    # Why; empty: no reason given.
    code: str = ""
    # Details in words, as in TradeNote.
    terms: str = ""


@dataclass(frozen=True, slots=True)
class Negotiation:
    """All entries for one workload from one solicitation to its result, oldest first."""

    solicitation: str
    lines: tuple[NegotiationLine, ...]

    @property
    def agreement(self) -> str:
        return next((line.name for line in self.lines if line.what == "awarded"), "")


def negotiations(lines: Sequence[NegotiationLine]) -> tuple[Negotiation, ...]:
    """Groups the log's lines, given in its order. Lines of a solicitation that was truncated from the log are left
    out."""
    found: dict[str, list[NegotiationLine]] = {}
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
    return trace_id_of("negotiation", origin, solicitation)


def origin_spans(negotiation: Negotiation, origin: str) -> tuple[Span, ...]:
    """Spans of the origin."""
    trace = trace_id(origin, negotiation.solicitation)
    root = span_id_of(trace, "negotiation")
    first, last = negotiation.lines[0], negotiation.lines[-1]
    over = last.what in FINAL_EVENTS
    about = {"shoal.trade": negotiation.solicitation, "shoal.workload": str(first.workload)}
    if first.what == SOLICITED and first.terms:
        about["shoal.need"] = first.terms
    if negotiation.agreement:
        about["shoal.agreement"] = negotiation.agreement
    code = last.code if over and last.what != "granted" else ""
    spans = [coordinator_span(trace, root, "", "negotiation", origin, first.at, last.at, about, code, is_open=not over)]
    number, asked, awarded = 0, first, None
    for line in negotiation.lines:
        if line.what == SOLICITED or not number:
            number, asked = number + 1, line
            answered = next(
                (each for each in negotiation.lines if each.what in ANSWERS and _round(each) == number), last
            )
            mine, terms = _solicit_span(trace, number), {"shoal.round": str(number)}
            if line.what == SOLICITED:
                terms["shoal.asked"] = line.terms
            spans.append(coordinator_span(trace, mine, root, "solicit", origin, line.at, answered.at, terms))
        if line.what in ANSWERS:
            terms = {"shoal.answer": line.what, "shoal.to.region": line.region, "shoal.terms": line.terms}
            mine, parent = answer_span(trace, line.region, _round(line)), _solicit_span(trace, number)
            spans.append(coordinator_span(trace, mine, parent, "answer", origin, asked.at, line.at, terms, line.code))
        elif line.what == "awarded":
            awarded = line
        elif awarded is not None and line.what in OUTCOMES:
            terms = {"shoal.to.region": line.region, "shoal.agreement": line.name, "shoal.terms": awarded.terms}
            code, mine = line.code if line.what != "granted" else "", span_id_of(trace, "award")
            spans.append(coordinator_span(trace, mine, root, "award", origin, awarded.at, line.at, terms, code))
    return tuple(spans)


def delegate_spans(
    offer: Offer, agreement: str, since: Wall, entries: Sequence[LedgerEntry], region: str, wall: Wall
) -> tuple[Span, ...]:
    """Span of a region that bid: how long its room was held, and with what result. agreement: empty if there was
    none. entries: of its ledger. wall: now, for a hold that is not over."""
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
    name = span_id_of(trace, "hold", offer.id)
    return (coordinator_span(trace, name, parent, "hold", region, since, ended, about, code, is_open=over is None),)


def fan_out_span(
    solicitation: Solicitation, federation: str, asked_count: int, answers: int, started_at: Wall, ended_at: Wall
) -> Span:
    """The federation's span for one round: how many regions it asked at once, and how many answered in time."""
    trace = trace_id(solicitation.origin, solicitation.id)
    parent, own = _solicit_span(trace, solicitation.round), span_id_of(trace, "fan out", str(solicitation.round))
    about = {
        "shoal.from.region": solicitation.origin,
        "shoal.asked": f"{asked_count} regions",
        "shoal.answers": str(answers),
    }
    return coordinator_span(trace, own, parent, "fan out", federation, started_at, ended_at, about)


def _solicit_span(trace: str, number: int) -> str:
    return span_id_of(trace, "solicit", str(number))


def answer_span(trace: str, region: str, number: int) -> str:
    """Id of the origin's span that waits for this region's answer in that round; the region's own spans are its
    children."""
    return span_id_of(trace, "answer", region, str(number))


def _round(line: NegotiationLine) -> int:
    """The round that an answer's terms name: `round 2: ..`."""
    word, _, rest = line.terms.partition(" ")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return int(digits) if word == "round" and digits else 1
