"""A migration as a trace."""

from dataclasses import replace

from shoal.coordinator.core.migration.model import (
    RESTARTED_STEP_NOTE,
    AbortedState,
    Cause,
    DoneState,
    DrainingState,
    GuardReading,
    Migration,
    MigrationStage,
    ReplicaPlace,
    RequestStats,
    StageEntry,
)
from shoal.coordinator.core.migration.spans import spans_of, trace_id
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against, InputsFrom, MigrationRule, Verdict
from shoal.types.trace import Span
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import WorkloadKey

STAGES = (
    (MigrationStage.PLANNED, 0.0, "n-2"),
    (MigrationStage.RESERVED, 0.1, "n-2/cpu"),
    (MigrationStage.STAGING, 0.2, ""),
    (MigrationStage.WARMING, 1.0, ""),
    (MigrationStage.VERIFYING, 1.5, ""),
    (MigrationStage.SHIFTING, 2.0, "25%"),
    (MigrationStage.SHIFTING, 4.0, "100%"),
    (MigrationStage.DRAINING, 6.0, ""),
    (MigrationStage.DONE, 7.0, ""),
)
START = 1.7e9


def stages_of(*stages: tuple[MigrationStage, float, str]) -> tuple[StageEntry, ...]:
    return tuple(StageEntry(stage, Wall(START + at), note) for stage, at, note in stages)


MOVE = Migration(
    id="m-1",
    workload=WorkloadKey("default", "reader"),
    cause=Cause.OPERATOR,
    actor="ops",
    source=ReplicaPlace("a-1", "n-1", "cpu", "sha", "fp32"),
    aim=Aim("n-2"),
    rule=MigrationRule(),
    state=DoneState(),
    target=ReplicaPlace("a-2", "n-2", "cpu", "sha", "fp32"),
    verdict=Verdict("m-1", True, None, "", Against.SOURCE, InputsFrom.GENERATED, 8),
    readings=(
        GuardReading(0.25, RequestStats(9), RequestStats(3, 0, 0.004), 2.0, True),
        GuardReading(1.0, RequestStats(9), RequestStats(12, 1, 0.005), 2.0, True),
    ),
    stages=stages_of(*STAGES),
)


def spans_named(spans: tuple[Span, ...], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_a_whole_one_has_a_span_for_each_stage_and_they_fill_it() -> None:
    root, *stages = spans_of(MOVE, "eu", Wall(START + 500.0))
    assert (root.trace, root.name, root.parent, root.seconds) == (trace_id("eu", "m-1"), "migration", "", 7.0)
    assert [span.name for span in stages] == [str(stage) for stage, _, _ in STAGES[:-1]]
    assert all(span.parent == root.id for span in stages)
    assert [span.end_time for span in stages] == [span.began for span in stages[1:]] + [root.end_time]
    assert len({span.id for span in (root, *stages)}) == len(STAGES)
    assert not any(span.code or span.open for span in (root, *stages))
    assert (root.attributes["shoal.from"], root.attributes["shoal.to"]) == ("n-1/cpu", "n-2/cpu")
    first, second = (span.attributes for span in stages if span.name == "shifting")
    assert (first["shoal.requests"], second["shoal.requests"], second["shoal.errors"]) == ("3", "12", "1")
    assert (first["shoal.note"], second["shoal.p95"]) == ("25%", "5ms")
    (verifying,) = spans_named(tuple(stages), "verifying")
    assert (verifying.attributes["shoal.samples"], verifying.attributes["shoal.passed"]) == ("8", "true")
    (draining,) = spans_named(tuple(stages), "draining")
    assert draining.attributes["shoal.where"] == "n-1/cpu"


def test_the_same_spans_whenever_it_is_told() -> None:
    assert spans_of(MOVE, "eu", Wall(0.0)) == spans_of(MOVE, "eu", Wall(START + 1e6))
    underway = replace(MOVE, state=DrainingState(Elapsed(1.0), Elapsed(9.0)), stages=MOVE.stages[:-1])
    told, later = spans_of(underway, "eu", Wall(START + 6.5)), spans_of(MOVE, "eu", Wall(0.0))
    assert [span.id for span in told] == [span.id for span in later]
    assert [(span.name, span.open) for span in told if span.open] == [("migration", True), ("draining", True)]
    assert (told[-1].seconds, later[-1].seconds) == (0.5, 1.0)
    assert spans_of(MOVE, "us", Wall(0.0))[0].trace != told[0].trace


def test_a_step_that_was_held_anew_was_read_once_and_then() -> None:
    again = (MigrationStage.SHIFTING, 3.0, f"25%, {RESTARTED_STEP_NOTE}")
    told = spans_of(replace(MOVE, stages=stages_of(*STAGES[:6], again, *STAGES[6:])), "eu", Wall(0.0))
    read = [span.attributes.get("shoal.requests") for span in told if span.name == "shifting"]
    assert read == [None, "3", "12"]


def test_what_failed_is_where_it_failed() -> None:
    refusal = Refusal(Code.GUARD_TRIPPED, "too slow")
    back = stages_of(
        *STAGES[:6], (MigrationStage.ROLLING_BACK, 2.5, str(refusal)), (MigrationStage.ABORTED, 3.0, str(refusal))
    )
    failed = replace(MOVE, state=AbortedState(refusal, Elapsed(0.0)), stages=back, readings=MOVE.readings[:1])
    assert [(span.name, span.code) for span in spans_of(failed, "eu", Wall(0.0)) if span.code] == [
        ("migration", Code.GUARD_TRIPPED),
        ("shifting", Code.GUARD_TRIPPED),
    ]
    early = stages_of(STAGES[0], (MigrationStage.ABORTED, 600.0, "no room"))
    never = replace(
        MOVE, state=AbortedState(refusal, Elapsed(0.0)), stages=early, target=None, verdict=None, readings=()
    )
    assert [(span.name, span.code) for span in spans_of(never, "eu", Wall(0.0))] == [
        ("migration", Code.GUARD_TRIPPED),
        ("planned", Code.GUARD_TRIPPED),
    ]


def test_one_that_leaves_home_says_where_its_trace_goes_on() -> None:
    cross_region = replace(MOVE, aim=Aim(region="us"), target=replace(MOVE.target or MOVE.source, region="us", node=""))
    assert spans_of(cross_region, "eu", Wall(0.0))[0].attributes["shoal.to.region"] == "us"
    assert "shoal.to.region" not in spans_of(MOVE, "eu", Wall(0.0))[0].attributes
