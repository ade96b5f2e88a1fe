"""Price and carbon in a region: what plans read, what events say, what a restart finds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture, SteppedClock
from harness.wait import until
from shoal.coordinator.controllers.region.doctor import examine
from shoal.coordinator.core.placement.model import WorkloadPlan
from shoal.coordinator.core.signals.model import SignalName, SignalReading
from shoal.coordinator.ports import StaleRevision
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

PRICE, CARBON = SignalName.PRICE, SignalName.CARBON
OPERATOR = "shoal://eu/operator/ann"


@dataclass
class ScriptedSignals:
    """ports.Signals that says what a test puts in; a source that is not there cannot be reached."""

    clock: SteppedClock | None = None
    sources: dict[str, tuple[SignalReading, ...]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hangs: set[str] = field(default_factory=set)

    async def read(self, name: SignalName, source: str) -> tuple[SignalReading, ...]:
        self.asked.append(source)
        if source in self.hangs:
            await asyncio.Event().wait()
        if source not in self.sources:
            raise refuse(Code.SOURCE_UNREACHABLE, f"{source} is not there", "a feed", "mend it")
        return self.sources[source]

    def say(self, source: str, value: float, ago_s: float = 0.0) -> None:
        assert self.clock is not None
        self.sources[source] = (SignalReading(value, Wall(self.clock.wall() - ago_s)),)


@pytest.fixture
def signals() -> ScriptedSignals:
    return ScriptedSignals()


@pytest.fixture
async def world(signals: ScriptedSignals, tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first", signals=signals)
    signals.clock = opened.clock
    yield opened
    await opened.store.close()


def region(spec: str) -> list[tuple[str, str]]:
    return [("r.yaml", f"apiVersion: shoal/v1\nkind: Region\nmetadata: {{name: eu}}\nspec: {spec}\n")]


async def apply(world: RegionFixture, texts: list[tuple[str, str]]) -> None:
    applied = await world.region.documents.apply(texts, {}, "", OPERATOR)
    assert not applied.plan_result.problems


async def look(world: RegionFixture, seconds: float = 1.0) -> None:
    world.clock.advance(seconds)
    for name in SignalName:
        await world.region.signals.poll(name)


async def signal_events(world: RegionFixture) -> list[tuple[str, str]]:
    events = await world.region.events.events_after(0, 1000)
    return [(event.code, event.message) for event in events if event.code.startswith(("SIGNAL", "SOURCE"))]


async def diagnosis(world: RegionFixture) -> Code | None:
    """What the doctor says of the carbon."""
    (found,) = [check async for check in examine(world.region, world.store) if "carbon" in check.name]
    return found.refusal.code if found.refusal is not None else None


async def codes(world: RegionFixture) -> list[str]:
    return [code for code, _ in await signal_events(world)]


async def ready(world: RegionFixture) -> None:
    """One node that could run the one workload of these tests."""
    await world.push()
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await agent.report()
    await world.step()


def documents_with_limits(limits: str) -> list[tuple[str, str]]:
    name, text = DOCUMENTS[0]
    return [(name, text.replace("spec: {optimize", f"spec: {{limits: {{{limits}}}, optimize"))]


async def plan_reader(world: RegionFixture, texts: list[tuple[str, str]]) -> WorkloadPlan:
    plan = (await world.region.documents.plan(texts, {}, OPERATOR)).plan
    assert plan is not None
    found = plan.of(WorkloadKey("default", "reader"))
    assert found is not None
    return found


async def test_a_feed_prices_nodes_and_a_change_is_told(world: RegionFixture, signals: ScriptedSignals) -> None:
    await ready(world)
    signals.say("./p.csv", 0.4)
    await apply(world, region("{price: {source: ./p.csv}}"))
    assert world.region.signals.current() == {}, "not read yet, so nobody takes it for anything"
    await look(world)
    (cost,) = world.region.workloads.costs.values()
    assert cost == 0.4
    assert (await plan_reader(world, documents_with_limits("cost: 0.5 USD/h"))).refusal is None
    signals.say("./p.csv", 0.6)
    await look(world)
    (candidate,) = (await plan_reader(world, documents_with_limits("cost: 0.5 USD/h"))).candidates
    assert candidate.refusal is not None
    assert (candidate.refusal.code, candidate.refusal.found) == (Code.COST_OVER, "0.6 USD/h")
    assert await signal_events(world) == [
        ("SIGNAL_CHANGED", "price 0.4 USD/h (./p.csv, 1s ago)"),
        ("SIGNAL_CHANGED", "price 0.6 USD/h (./p.csv, 1s ago), before 0.4 USD/h"),
    ]


async def test_carbon_is_judged_with_the_intensity_of_now(world: RegionFixture, signals: ScriptedSignals) -> None:
    await ready(world)
    limit = documents_with_limits("carbon: 1 gCO2/h")
    (candidate,) = (await plan_reader(world, limit)).candidates
    assert candidate.refusal is not None
    assert (candidate.refusal.code, candidate.refusal.found) == (Code.CARBON_OVER, "unknown here")
    await apply(world, region("{carbon: 0.001 gCO2/kWh}"))
    assert (await plan_reader(world, limit)).refusal is None
    await world.region.signals.set_override(CARBON, "5000 gCO2/kWh", OPERATOR)
    (candidate,) = (await plan_reader(world, limit)).candidates
    assert candidate.refusal is not None
    assert candidate.refusal.code == Code.CARBON_OVER
    assert candidate.carbon_g_per_h > 1


async def test_stale_once_the_fallback_counts_then_back(world: RegionFixture, signals: ScriptedSignals) -> None:
    signals.say("./c.csv", 100.0)
    await apply(world, region("{carbon: {source: ./c.csv, stale_after: 10m, fallback: 350 gCO2/kWh}}"))
    await look(world)
    for _ in range(3):
        await look(world, 400.0)
    signal = world.region.signals.current()[CARBON]
    assert (signal.value, signal.stale, signal.fallback, signal.source) == (350.0, True, True, "./c.csv")
    assert await diagnosis(world) == Code.SIGNAL_STALE
    del signals.sources["./c.csv"]
    await look(world)
    await look(world)
    assert world.region.signals.refusals[CARBON].code == Code.SOURCE_UNREACHABLE
    assert await diagnosis(world) == Code.SOURCE_UNREACHABLE
    signals.say("./c.csv", 350.5)
    await look(world)
    await look(world)
    assert await codes(world) == [
        "SIGNAL_CHANGED", "SIGNAL_STALE", "SIGNAL_CHANGED", "SOURCE_UNREACHABLE", "SIGNAL_BACK",
    ]  # fmt: skip
    assert world.region.signals.refusals == {}
    assert await diagnosis(world) is None


async def test_a_forecast_counts_when_its_time_comes(world: RegionFixture, signals: ScriptedSignals) -> None:
    now = world.clock.wall()
    signals.sources["./p.csv"] = (SignalReading(0.4, now), SignalReading(0.2, Wall(now + 3600)))
    await apply(world, region("{price: {source: ./p.csv}}"))
    await look(world)
    assert world.region.signals.current()[PRICE].value == 0.4
    await look(world, 3600)
    assert world.region.signals.current()[PRICE].value == 0.2
    assert await codes(world) == ["SIGNAL_CHANGED"] * 2


async def test_an_operators_word_comes_first_and_survives_a_restart(
    world: RegionFixture, signals: ScriptedSignals, tmp_path: Path
) -> None:
    await ready(world)
    await apply(world, region("{price: 0.4 USD/h}"))
    await look(world)
    await world.region.signals.set_override(PRICE, "12 USD/d", OPERATOR)
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world, signals=signals)
    try:
        signal = again.region.signals.current()[PRICE]
        assert (signal.value, signal.source, signal.stale) == (0.5, "by hand", False)
        assert set(again.region.workloads.costs.values()) == {0.5}
        assert await again.region.signals.clear_override(PRICE, OPERATOR)
        assert not await again.region.signals.clear_override(PRICE, OPERATOR), "nothing is there any more"
        assert again.region.signals.current()[PRICE].value == 0.4
        await look(again)
        events = [event for event in await again.region.events.events_after(0, 100) if event.actor == OPERATOR]
        assert [event.code for event in events] == ["APPLIED", "SIGNAL_SET", "SIGNAL_CLEARED"]
    finally:
        await again.store.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [("5", Code.UNIT_MISSING), ("5 gCO2/kWh", Code.UNIT_WRONG), ("-5 USD/h", Code.QUANTITY_INVALID),
     ("1e9 USD/h", Code.SIGNAL_INVALID)],
)  # fmt: skip
async def test_a_word_that_can_not_be_is_refused(world: RegionFixture, text: str, code: Code) -> None:
    with pytest.raises(ShoalError) as caught:
        await world.region.signals.set_override(PRICE, text, OPERATOR)
    assert caught.value.code == code
    assert world.region.signals.current() == {}
    assert await codes(world) == []


async def test_a_restart_says_nothing_twice_and_has_the_last_value(
    world: RegionFixture, signals: ScriptedSignals, tmp_path: Path
) -> None:
    signals.say("https://grid.example/eu", 100.0)
    await apply(world, region("{carbon: {source: https://grid.example/eu, stale_after: 1h}}"))
    await look(world)
    before = await signal_events(world)
    await world.store.close()
    signals.sources.clear()
    again = await RegionFixture.open(tmp_path / "first", world, signals=signals)
    try:
        assert again.region.signals.current()[CARBON].value == 100.0
        await look(again)
        assert await signal_events(again) == [
            *before,
            ("SOURCE_UNREACHABLE", "carbon: https://grid.example/eu is not there: mend it"),
        ]
        await look(again, 3600.0)
        await look(again)
        signal = again.region.signals.current()[CARBON]
        assert (signal.value, signal.stale, signal.fallback) == (100.0, True, False), "the last value, and its mark"
        assert (await codes(again))[-1] == "SIGNAL_STALE"
    finally:
        await again.store.close()


async def test_a_server_is_asked_seldom_and_a_new_source_at_once(
    world: RegionFixture, signals: ScriptedSignals
) -> None:
    signals.say("https://a/", 1.0)
    signals.say("https://b/", 2.0)
    await apply(world, region("{price: {source: 'https://a/'}}"))
    for _ in range(20):
        await look(world)
    assert signals.asked == ["https://a/"]
    await apply(world, region("{price: {source: 'https://b/'}}"))
    assert world.region.signals.current() == {}, "a value of another source is none of this one"
    await look(world)
    assert signals.asked == ["https://a/", "https://b/"]
    assert world.region.signals.current()[PRICE].value == 2.0
    await look(world, 300.0)
    assert signals.asked[2:] == ["https://b/"]


async def test_what_the_store_does_not_take_is_told_later(
    world: RegionFixture, signals: ScriptedSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.say("./p.csv", 0.4)
    await apply(world, region("{price: {source: ./p.csv}}"))

    async def full(*_: object, **__: object) -> int:
        raise StaleRevision

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        await look(world)
    assert world.region.signals.current()[PRICE].value == 0.4, "it counts, told or not"
    assert await codes(world) == []
    await look(world)
    assert await codes(world) == ["SIGNAL_CHANGED"]


async def test_a_source_that_hangs_keeps_nobody_from_being_told(
    world: RegionFixture, signals: ScriptedSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price's server never answers: the carbon's file is read all the same, and the price's age is told."""
    signals.say("./c.csv", 100.0)
    signals.say("https://a/", 1.0)
    await apply(world, region("{price: {source: 'https://a/', stale_after: 10m}, carbon: {source: ./c.csv}}"))
    await look(world)
    world.clock.advance(700.0)
    signals.hangs.add("https://a/")
    signals.say("./c.csv", 200.0)

    async def a_moment(seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    monkeypatch.setattr(world.clock, "sleep", a_moment)
    running = asyncio.create_task(world.region.signals.run())
    try:

        async def both() -> bool:
            return (await codes(world)).count("SIGNAL_STALE") == 1 and any(
                "200 g" in text for _, text in await signal_events(world)
            )

        await until(both, 10.0, "the age of one, the change of the other")
        assert signals.asked.count("https://a/") == 2
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
