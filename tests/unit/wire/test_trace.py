"""Names of traces and spans, and what a client may say of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types.link import SpansFound
from shoal.types.trace import Span, SpanKind, TraceParent, coordinator_span, parse_traceparent, span_id_of, trace_id_of
from shoal.types.units import Seconds, Wall
from shoal.wire import nouns

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-a-later-version-adds", True),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(text: str, sampled: bool) -> None:
    assert parse_traceparent(text) == TraceParent(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 200,
    ],
)
def test_what_is_no_traceparent_says_nothing(text: str) -> None:
    assert parse_traceparent(text) is None


@given(st.text(max_size=140))
def test_no_text_is_too_strange_for_it(text: str) -> None:
    found = parse_traceparent(text)
    assert found is None or parse_traceparent(str(found)) == found


def test_ids_follow_from_names_alone() -> None:
    assert parse_traceparent(str(TraceParent(TRACE, SPAN, sampled=True))) == TraceParent(TRACE, SPAN, True)
    assert trace_id_of("migration", "eu", "m-1") == trace_id_of("migration", "eu", "m-1")
    assert (
        len(
            {
                trace_id_of("migration", "eu", "m-1"),
                trace_id_of("migration", "e", "um-1"),
                trace_id_of("m", "eu", "m-1"),
            }
        )
        == 3
    )
    assert span_id_of(TRACE, "a") != span_id_of(TRACE, "b")
    assert (len(trace_id_of("x")), len(span_id_of(TRACE, "x"))) == (32, 16)


def test_spans_travel_whole() -> None:
    told = coordinator_span(
        TRACE, SPAN, "", "migration", "eu", Wall(1.7e9), Wall(1.7e9 + 2.5), {"shoal.to": "b/cpu"}, "X"
    )
    open_ = Span(TRACE, SPAN, SPAN, "run", SpanKind.INTERNAL, "eu", "n", "worker", Wall(1.0), Seconds(0.5), open=True)
    found = SpansFound(7, (told, open_))
    assert nouns.decode(SpansFound, nouns.encode(found)) == found
    assert told.end_time == Wall(1.7e9 + 2.5)
    assert coordinator_span(TRACE, SPAN, "", "x", "eu", Wall(9.0), Wall(8.0), {}).seconds == 0.0, (
        "a clock that was set back"
    )
