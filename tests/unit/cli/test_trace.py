"""`shoal trace` over several regions: who is asked, and what is said of who was not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from click.testing import CliRunner, Result

from shoal.cli.commands import trace as command
from shoal.client import Context
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.trace import Span, SpanKind
from shoal.types.units import Seconds, Wall
from shoal.v1 import operator_pb2
from shoal.wire.nouns import to_wire

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def span(region: str, number: int, **attributes: str) -> Span:
    told = {key.replace("_", "."): value for key, value in attributes.items()}
    where = (region, "gw", "front")
    return Span(TRACE, f"{number:016x}", "", "request", SpanKind.SERVER, *where, Wall(1.7e9), Seconds(1.0), told)


@dataclass
class Regions:
    """Their spans, by name; one that is not there refuses."""

    spans: dict[str, tuple[Span, ...]]
    silent: tuple[str, ...] = ()
    asked: list[tuple[str, str]] = field(default_factory=list)

    def all(self) -> tuple[Context, ...]:
        return tuple(Context(f"to-{name}", name, "", "") for name in (*self.spans, "broken"))

    @contextmanager
    def connect(self, context: str, region: str) -> Iterator["_Api"]:
        yield _Api(self, region or context.removeprefix("to-") or "home")


@dataclass
class _Api:
    regions: Regions
    name: str

    @property
    def context(self) -> Context:
        return Context(f"to-{self.name}", self.name, "", "")

    def trace(self, name: str) -> operator_pb2.TraceReply:
        self.regions.asked.append((self.name, name))
        if self.name not in self.regions.spans:
            raise refuse(Code.COORDINATOR_UNREACHABLE, self.name)
        spans = map(to_wire, self.regions.spans[self.name])
        return operator_pb2.TraceReply(trace=TRACE, spans=spans, silent=self.regions.silent)


def run(monkeypatch: pytest.MonkeyPatch, regions: Regions, *arguments: str) -> Result:
    monkeypatch.setattr(command, "connect", regions.connect)
    monkeypatch.setattr(command, "Contexts", lambda: regions)
    return CliRunner().invoke(command.trace, ["m-1", *arguments])


def test_it_goes_on_where_the_trace_goes_each_region_once(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = Regions(
        {
            "home": (span("home", 1, shoal_to_region="away"),),
            "away": (span("away", 2, shoal_from_region="home", shoal_to_region="third"),),
            "third": (span("third", 3, shoal_from_region="away"),),
            "other": (span("other", 4),),
        }
    )
    result = run(monkeypatch, regions, "-o", "json")
    assert result.exit_code == 0, result.output
    assert [each["region"] for each in json.loads(result.stdout)] == ["home", "away", "third"]
    assert regions.asked == [("home", "m-1"), ("away", TRACE), ("third", TRACE)]


def test_what_cannot_be_asked_is_said_beside_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = (span("home", 1, shoal_to_region="nowhere"), span("home", 2, shoal_to_region="broken"))
    said: list[str] = []
    monkeypatch.setattr(command, "note", said.append)
    result = run(monkeypatch, Regions({"home": home}, silent=("n-2", "n-1")), "-o", "yaml")
    assert result.exit_code == 0, result.output
    assert "no answer from n-1, n-2" in said[-1]
    assert [text for text in said if "nowhere" in text and "no context" in text]
    assert [text for text in said if text.startswith("broken: ") and text.endswith("(COORDINATOR_UNREACHABLE)")]


def test_a_trace_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Regions({"home": ()}))
    assert isinstance(result.exception, ShoalError)
    assert result.exception.code is Code.NOT_FOUND
