"""A trace as it is drawn: pure values in, lines out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.render.waterfall import bar, rows, show_trace
from shoal.types.trace import Span, SpanKind
from shoal.types.units import Seconds, Wall

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
START = 1_700_000_000.0


def span(
    id_: str, parent: str, name: str, begin: float, seconds: float, where: str = "home/gw/front", **more: object
) -> Span:
    region, node, process = where.split("/")
    made = Span(
        TRACE, id_, parent, name, SpanKind.INTERNAL, region, node, process, Wall(START + begin), Seconds(seconds)
    )
    return replace(made, **more)  # type: ignore[arg-type]


REQUEST = (
    span("4", "3", "run", 0.5, 0.25, "away/box/worker"),
    span("1", "client", "request", 0.0, 1.0, attributes={"shoal.workload": "acme/reader", "shoal.attempts": "2"}),
    span("3", "2", "request", 0.25, 0.625, "away/gw-2/front"),
    span("5", "1", "attempt", 0.0, 0.125, code="REPLICA_UNREACHABLE", attributes={"shoal.to.node": "n-9"}),
    span("2", "1", "attempt", 0.125, 0.875, attributes={"shoal.to.region": "away"}),
    span("4", "3", "run", 0.5, 0.25, "away/box/worker"),
)
"""Of two regions, in the order in which it was told: two attempts, one answered elsewhere; a span told twice."""


def test_each_span_once_beneath_its_parent_by_when_it_began() -> None:
    drawn = rows(REQUEST)
    assert [row.label for row in drawn] == ["request", "├ attempt", "└ attempt", "  └ request", "    └ run"]
    assert [row.where for row in drawn][-2:] == ["away/gw-2/front", "away/box/worker"]
    assert [(row.begin, row.end) for row in drawn] == [(0, 1), (0, 0.125), (0.125, 1), (0.25, 0.875), (0.5, 0.75)]
    assert [row.details for row in drawn] == ["acme/reader", "REPLICA_UNREACHABLE  n-9", "away", "", ""]
    assert rows(REQUEST, wide=True)[0].details == "attempts=2  workload=acme/reader"


def test_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    show_trace(REQUEST, wide=False)
    head, columns, *lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert head == f"trace {TRACE}  5 spans in 2 regions  1s  from 2023-11-14T22:13:20.000+00:00"
    assert columns.split() == ["SPAN", "WHERE", "TOOK", "0", "1s"]
    at, width = columns.index("0"), len(columns) - columns.index("0")
    bars = [line[at : at + width].rstrip() for line in lines]
    assert [each.count("█") for each in bars] == [width, 3, 18, 13, 5]
    assert bars[1].startswith("█")
    assert bars[4].startswith(" " * (width // 2) + "█")


def test_one_span_alone_and_one_that_took_no_time() -> None:
    (row,) = rows([span("1", "", "migration", 0.0, 0.0, "eu//coordinator", open=True)])
    assert (row.label, row.where, row.took, row.begin, row.end) == ("migration", "eu/coordinator", "0s+", 0.0, 1.0)


def test_parents_that_go_in_a_circle_are_drawn_all_the_same() -> None:
    circle = [span("1", "2", "a", 0.0, 1.0), span("2", "1", "b", 0.0, 1.0), span("3", "3", "c", 0.0, 1.0)]
    assert sorted(row.label for row in rows(circle)) == ["a", "c", "└ b"]


def test_one_that_goes_deep_is_drawn_all_the_same() -> None:
    chain = [span(str(number), str(number - 1), "x", 0.0, 1.0) for number in range(1, 2001)]
    assert len(rows(chain)) == 2000


@given(st.floats(0, 1), st.floats(0, 1), st.integers(20, 60))
def test_a_bar_is_as_wide_as_it_is_and_shows_something(begin: float, length: float, width: int) -> None:
    drawn = bar(begin, min(1.0, begin + length), width)
    assert len(drawn) == width
    assert drawn.strip() == "█" * len(drawn.strip())
    assert drawn.strip()
