"""What a region tells of traces: stories from its store, requests from the fronts that had them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.region import RegionFixture, run_until_over, two_agents
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.controllers.queries import traces
from shoal.coordinator.controllers.queries.traces import TracesController
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import PROTOCOL, SpansAsked, SpansFound, ToAgent
from shoal.types.trace import Span, SpanKind
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
KEY = WorkloadKey("default", "reader")


def span(node: str, number: int = 1, **other: object) -> Span:
    where = ("eu", node, "front")
    made = Span(TRACE, f"{number:016x}", "", "request", SpanKind.SERVER, *where, Wall(1.0), Seconds(1.0))
    return replace(made, **other)  # type: ignore[arg-type]


class Fronts:
    """Nodes that answer at once with what they keep; those that keep nothing say nothing. And a collector."""

    is_enabled = True

    def __init__(self, world: RegionFixture, kept: dict[str, tuple[Span, ...]]) -> None:
        self.kept = kept
        self.collected: list[Sequence[Span]] = []
        self.migrations: dict[str, Migration] = {}
        region = world.region
        self.traces = TracesController(
            replace(region.context, clock=ManualClock()),
            self,
            region.ledger,
            self,
            migrations=lambda: self.migrations,
            nodes=lambda: {name: 1 if name.startswith("earlier") else PROTOCOL for name in kept},
            delegate=lambda: None,
        )

    async def send(self, node: str, message: ToAgent) -> None:
        assert isinstance(message, SpansAsked)
        if self.kept[node]:
            self.traces.on_answer("another", SpansFound(message.request, (span("forged"),)))
            self.traces.on_answer(node, SpansFound(message.request, self.kept[node]))

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None: ...

    def export(self, spans: Sequence[Span]) -> None:
        self.collected.append(spans)


class Collected:
    """ports.Traces"""

    is_enabled = True

    def __init__(self) -> None:
        self.exports: list[Sequence[Span]] = []

    def export(self, spans: Sequence[Span]) -> None:
        self.exports.append(spans)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "eu")
    yield opened
    await opened.store.close()


async def test_of_a_request_every_node_tells_its_own_part_and_nobody_elses(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "ANSWERS_S", 0.05)
    lies = (span("b"), span("c", 9), span("b", 8, trace="f" * 32), span("b", 7, region="us"))
    absurd = (
        span("b", 6, began=Wall(float("nan"))),
        span("b", 5, seconds=Seconds(-1.0)),
        span("b", 4, began=Wall(1e300)),
        span("b", 3, seconds=Seconds(1e300)),
    )
    fronts = Fronts(world, {"a": (span("a"), span("a", 2)), "b": (*lies, *absurd), "mute": ()})
    found = await fronts.traces.find(TRACE)
    assert [(each.node, each.id[-1]) for each in found.spans] == [("a", "1"), ("a", "2"), ("b", "1")]
    assert (found.trace, found.silent_nodes) == (TRACE, ("mute",))


async def test_f41_a_node_of_an_earlier_version_is_not_asked_for_what_it_does_not_know(world: RegionFixture) -> None:
    fronts = Fronts(world, {"a": (span("a"),), "earlier": (span("earlier"),)})
    found = await fronts.traces.find(TRACE)
    assert [each.node for each in found.spans] == ["a"]
    assert found.silent_nodes == ("earlier",)


async def test_one_that_nobody_knows_is_empty_and_what_is_no_id_is_refused(world: RegionFixture) -> None:
    fronts = Fronts(world, {})
    assert (await fronts.traces.find(TRACE)).spans == ()
    for name in ("m-1", "", "x" * 500, TRACE.upper(), f"{TRACE}\n"):
        with pytest.raises(ShoalError) as refused:
            await fronts.traces.find(name)
        assert refused.value.code is Code.NOT_FOUND


async def write_negotiation(log: EventLog) -> None:
    def event(code: str, subject: str, message: str) -> LogEvent:
        return LogEvent(code, subject, message, workload=KEY)

    await log.write(
        event("SOLICITED", "s-1", "short"),
        LogEvent("PLACED", "a-7", "of no trade", workload=KEY),
        event("BID", "s-1", "us  SLO_UNREACHABLE  round 1: p95 20ms, 1 x fp32  SLO_UNREACHABLE  2 USD/h"),
        event("BID", "s-1", "asia  round 1: p95 20ms, 1 x fp32"),
        event("AWARDED", "g-1", "asia  p95 20ms, 1 x fp32"),
        event("GRANTED", "g-1", "asia  lease 60s"),
    )


@pytest.mark.parametrize("name", ["s-1", "g-1"])
async def test_a_negotiation_is_found_by_its_names_and_its_trace(world: RegionFixture, name: str) -> None:
    await write_negotiation(world.region.events)
    fronts = Fronts(world, {})
    found = await fronts.traces.find(name)
    assert await fronts.traces.find(found.trace) == found
    root, _solicit, dear, taken, award = found.spans
    assert root.attributes["shoal.agreement"] == "g-1"
    assert (dear.code, dear.attributes["shoal.to.region"]) == (Code.SLO_UNREACHABLE, "us")
    assert (taken.code, taken.attributes["shoal.terms"]) == ("", "round 1: p95 20ms, 1 x fp32")
    assert award.attributes["shoal.to.region"] == "asia"


async def test_what_ended_is_told_once_and_only_where_somebody_collects(world: RegionFixture) -> None:
    await write_negotiation(world.region.events)
    fronts = Fronts(world, {})
    fronts.traces.on_end("g-1")
    await fronts.traces.export()
    await fronts.traces.export()
    (told,) = fronts.collected
    assert told == (await fronts.traces.find("s-1")).spans
    fronts.is_enabled = False
    fronts.traces.on_end("g-1")
    await fronts.traces.export()
    assert len(fronts.collected) == 1


async def test_few_may_ask_all_nodes_at_once(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "SEEKERS", 0)
    with pytest.raises(ShoalError) as many:
        await Fronts(world, {}).traces.find(TRACE)
    assert many.value.code is Code.OVERLOADED


async def test_a_migration_is_told_when_it_is_over_and_known_after_a_restart(tmp_path: Path) -> None:
    collected = Collected()
    world = await RegionFixture.open(tmp_path / "first", traces=collected)
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    await world.region.traces.export()
    assert not collected.exports, "it is under way"
    assert (await world.region.traces.find(begun.id)).spans[0].open
    await run_until_over(world, begun, source, target)
    await world.region.traces.export()
    (told,) = collected.exports
    assert [span.name for span in told][:2] == ["migration", "planned"]
    assert told[0].attributes["shoal.migration"] == begun.id
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    assert (await again.region.traces.find(begun.id)).spans == told
    assert (await again.region.traces.find(told[0].trace)).spans == told
    await again.store.close()
