"""A migration as a trace, built from its stored state: the same spans for every query, before and after a restart."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from shoal.coordinator.core.migration.model import (
    RESTARTED_STEP_NOTE,
    AbortedState,
    GuardReading,
    Migration,
    MigrationStage,
    StageEntry,
)
from shoal.types.trace import Span, coordinator_span, span_id_of, trace_id_of
from shoal.types.units import Wall, show_seconds

_AT_SOURCE: Final = frozenset({MigrationStage.CLEARING, MigrationStage.DRAINING, MigrationStage.RETURNING})
_ENDS: Final = frozenset({MigrationStage.DONE, MigrationStage.ABORTED})
_BACK: Final = frozenset({MigrationStage.ROLLING_BACK, MigrationStage.ABORTED})


def trace_id(region: str, migration: str) -> str:
    return trace_id_of("migration", region, migration)


def spans_of(migration: Migration, region: str, wall: Wall) -> tuple[Span, ...]:
    """A root span and one span for each stage entered; each shift step is a span. wall: now, for a migration that is
    not over."""
    trace = trace_id(region, migration.id)
    root = span_id_of(trace, "migration")
    stages = migration.stages
    refusal = migration.state.refusal if isinstance(migration.state, AbortedState) else None
    spans = [
        coordinator_span(
            *(trace, root, "", "migration", region),
            *(stages[0].at, stages[-1].at if migration.is_over else wall),
            _attributes(migration),
            refusal.code if refusal is not None else "",
            is_open=not migration.is_over,
        )
    ]
    readings = iter(migration.readings)
    for number, (entered, after) in enumerate(zip_longest(stages, stages[1:])):
        if entered.stage in _ENDS:
            continue
        code = refusal.code if refusal is not None and after is not None and after.stage in _BACK else ""
        if entered.stage is MigrationStage.ROLLING_BACK:
            code = ""  # the failure came before the rollback
        spans.append(
            coordinator_span(
                *(trace, span_id_of(trace, str(number), entered.stage), root, entered.stage.replace("_", " "), region),
                *(entered.at, after.at if after is not None else wall),
                dict(_stage_attributes(migration, entered, iter(()) if _is_restart(after) else readings)),
                code,
                is_open=after is None,
            )
        )
    return tuple(spans)


def _attributes(migration: Migration) -> dict[str, str]:
    said = {
        "shoal.migration": migration.id,
        "shoal.workload": str(migration.workload),
        "shoal.cause": migration.cause,
        "shoal.actor": migration.actor,
        "shoal.from": migration.source.where,
        "shoal.to": migration.target.where if migration.target is not None else "",
        "shoal.reason": migration.reason,
        "shoal.gap": show_seconds(migration.gap_s) if migration.gap_s is not None else "",
    }
    if migration.aim.region and not migration.source.region:
        said["shoal.to.region"] = migration.aim.region
    return {key: value for key, value in said.items() if value}


def _is_restart(after: StageEntry | None) -> bool:
    """True if the step had no reading because it started over."""
    return after is not None and after.note.endswith(RESTARTED_STEP_NOTE)


def _stage_attributes(
    migration: Migration, entered: StageEntry, readings: Iterator[GuardReading]
) -> Iterator[tuple[str, str]]:
    """readings: those of the remaining shift steps."""
    place = migration.source if entered.stage in _AT_SOURCE else migration.target
    if place is not None and entered.stage is not MigrationStage.PLANNED:
        yield "shoal.where", place.where
    if entered.note:
        yield "shoal.note", entered.note
    if entered.stage is MigrationStage.SHIFTING and (reading := next(readings, None)) is not None:
        yield "shoal.requests", str(reading.target.requests)
        yield "shoal.errors", str(reading.target.errors)
        yield "shoal.p95", show_seconds(reading.target.p95_s)
    if entered.stage is MigrationStage.VERIFYING and (verdict := migration.verdict) is not None:
        yield "shoal.against", verdict.against
        yield "shoal.samples", str(verdict.samples)
        yield "shoal.passed", str(verdict.passed).lower()
