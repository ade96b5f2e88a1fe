"""A negotiation as a trace, from either side."""

from harness.builders.negotiation import solicitation
from harness.builders.offers import offer
from shoal.coordinator.core.negotiation.spans import (
    Negotiation,
    NegotiationLine,
    delegate_spans,
    fan_out_span,
    negotiations,
    origin_spans,
    trace_id,
)
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

KEY, OTHER = WorkloadKey("default", "reader"), WorkloadKey("default", "writer")
START = 1.7e9


def line(what: str, name: str, at: float, *said: str, key: WorkloadKey = KEY) -> NegotiationLine:
    """said: region, code, terms."""
    return NegotiationLine(what, name, key, Wall(START + at), *said)


TOLD = (
    line("solicited", "s-1", 0.0, "", "", "short"),
    line("declined", "s-1", 0.5, "us", Code.MEMORY_SHORT, "round 1  MEMORY_SHORT  1 GiB"),
    line("countered", "s-1", 0.5, "asia", "", "round 1: p95 90ms, needs p95 <= 90ms"),
    line("solicited", "s-1", 0.5, "", "", "round 2, relaxed: p95 <= 90ms"),
    line("bid", "s-1", 1.0, "asia", "", "round 2: p95 80ms"),
    line("awarded", "g-1", 1.0, "asia", "", "p95 80ms"),
    line("granted", "g-1", 1.25, "asia", "", "lease 60s"),
)


def test_the_log_is_told_apart_by_what_was_asked_and_for_which_workload() -> None:
    mixed = (
        line("granted", "g-0", -2.0, "us"),
        line("bid", "s-0", -1.0, "us", "", "round 1: p95 1ms"),
        *TOLD[:3],
        line("solicited", "s-2", 0.5, "", "", "better", key=OTHER),
        *TOLD[3:],
        line("no_bid", "s-2", 2.0, "", Code.NO_BID, "nobody", key=OTHER),
        line("released", "g-1", 90.0, "asia", Code.AGREEMENT_ENDED),
    )
    cut, mine, other = negotiations(mixed)
    assert cut.solicitation == "s-0"
    assert mine == Negotiation("s-1", TOLD)
    assert [each.what for each in other.lines] == ["solicited", "no_bid"]
    assert (mine.agreement, other.agreement) == ("g-1", "")


def test_both_rounds_their_answers_and_the_award() -> None:
    spans = origin_spans(Negotiation("s-1", TOLD), "eu")
    root, first, declined, countered, second, bid, award = spans
    assert {span.trace for span in spans} == {trace_id("eu", "s-1")}
    assert (root.name, root.parent, root.seconds, root.code, root.open) == ("negotiation", "", 1.25, "", False)
    assert root.attributes == {
        "shoal.trade": "s-1", "shoal.workload": "default/reader", "shoal.need": "short", "shoal.agreement": "g-1"
    }  # fmt: skip
    assert [(each.name, each.parent, each.seconds) for each in (first, second)] == [("solicit", root.id, 0.5)] * 2
    assert [each.parent for each in (declined, countered, bid)] == [first.id, first.id, second.id]
    assert (declined.code, declined.attributes["shoal.to.region"]) == (Code.MEMORY_SHORT, "us")
    assert (bid.began, bid.seconds, bid.attributes["shoal.answer"]) == (START + 0.5, 0.5, "bid")
    assert (award.name, award.parent, award.seconds, award.code) == ("award", root.id, 0.25, "")
    assert len({span.id for span in spans}) == len(spans)


def test_the_federations_part_hangs_beneath_the_round_that_it_carried() -> None:
    _, first, *_, second, _, _ = origin_spans(Negotiation("s-1", TOLD), "eu")
    for number, round_ in ((1, first), (2, second)):
        asked = solicitation("s-1", round=number, origin="eu")
        span = fan_out_span(asked, "fed", 3, 2, Wall(START), Wall(START + 0.5))
        assert (span.trace, span.parent, span.region, span.seconds) == (round_.trace, round_.id, "fed", 0.5)
        assert (span.attributes["shoal.asked"], span.attributes["shoal.answers"]) == ("3 regions", "2")


def test_what_came_to_nothing_says_why() -> None:
    nobody = Negotiation("s-1", (TOLD[0], TOLD[1], line("no_bid", "s-1", 0.5, "", Code.NO_BID, "nobody")))
    root, solicit, _declined = origin_spans(nobody, "eu")
    assert (root.code, solicit.seconds) == (Code.NO_BID, 0.5)
    refused = Negotiation("s-1", (*TOLD[:6], line("released", "g-1", 3.0, "asia", Code.HOLD_EXPIRED)))
    *_, award = spans = origin_spans(refused, "eu")
    assert (spans[0].code, award.code, award.seconds) == (Code.HOLD_EXPIRED, Code.HOLD_EXPIRED, 2.0)
    waiting = origin_spans(Negotiation("s-1", TOLD[:6]), "eu")
    assert waiting[0].open
    assert "award" not in [span.name for span in waiting]


def test_the_bidders_side_hangs_beneath_the_answer_it_gave() -> None:
    made = offer("asia", solicitation="s-1", origin="eu", round=2, id="b-1")
    entry = LedgerEntry(4, Wall(START + 1.25), "granted", "g-1", "eu", "default/reader", "", "", "", "")
    earlier = LedgerEntry(3, Wall(START + 0.9), "offered", "b-1", "eu", "default/reader", "", "", "", "")
    (held,) = delegate_spans(made, "g-1", Wall(START + 0.9), (earlier, entry), "asia", Wall(START + 50.0))
    (answer,) = [
        span for span in origin_spans(Negotiation("s-1", TOLD), "eu") if span.attributes.get("shoal.answer") == "bid"
    ]
    assert (held.trace, held.parent, held.region) == (answer.trace, answer.id, "asia")
    assert round(held.seconds, 3) == 0.35
    assert (held.open, held.code, held.attributes["shoal.from.region"]) == (False, "", "eu")
    (open_,) = delegate_spans(made, "", Wall(START), (earlier,), "asia", Wall(START + 2.0))
    assert (open_.open, open_.seconds) == (True, 2.0)
    gone = LedgerEntry(4, Wall(START + 9.0), "expired", "b-1", "eu", "default/reader", Code.HOLD_EXPIRED, "", "", "")
    (expired,) = delegate_spans(made, "", Wall(START), (gone,), "asia", Wall(START + 50.0))
    assert (expired.code, expired.attributes["shoal.came"]) == (Code.HOLD_EXPIRED, "expired")
