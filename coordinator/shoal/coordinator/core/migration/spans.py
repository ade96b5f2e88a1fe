"""A migration as a trace, made of what is stored of it: the same spans whoever asks, before and after a restart."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from shoal.coordinator.core.migration.model import HELD_ANEW, Aborted, Entered, Migration, Reading, Stage
from shoal.types.trace import Span, span_of, stretch, trace_of
from shoal.types.units import Wall, show_seconds

_AT_SOURCE: Final = frozenset({Stage.CLEARING, Stage.DRAINING, Stage.RETURNING})
_ENDS: Final = frozenset({Stage.DONE, Stage.ABORTED})
_BACK: Final = frozenset({Stage.ROLLING_BACK, Stage.ABORTED})


def trace_id(region: str, migration: str) -> str:
    return trace_of("migration", region, migration)


def spans_of(migration: Migration, region: str, wall: Wall) -> tuple[Span, ...]:
    """A root, and one for each stage that it was in; each step of shifting is one. wall: now, where it is not over."""
    trace = trace_id(region, migration.id)
    root = span_of(trace, "migration")
    story = migration.story
    refusal = migration.state.refusal if isinstance(migration.state, Aborted) else None
    spans = [
        stretch(
            *(trace, root, "", "migration", region),
            *(story[0].at, story[-1].at if migration.is_over else wall),
            _about(migration),
            refusal.code if refusal is not None else "",
            is_open=not migration.is_over,
        )
    ]
    readings = iter(migration.readings)
    for number, (entered, after) in enumerate(zip_longest(story, story[1:])):
        if entered.stage in _ENDS:
            continue
        code = refusal.code if refusal is not None and after is not None and after.stage in _BACK else ""
        if entered.stage is Stage.ROLLING_BACK:
            code = ""  # what failed did so before
        spans.append(
            stretch(
                *(trace, span_of(trace, str(number), entered.stage), root, entered.stage.replace("_", " "), region),
                *(entered.at, after.at if after is not None else wall),
                dict(_of_stage(migration, entered, iter(()) if _broke_off(after) else readings)),
                code,
                is_open=after is None,
            )
        )
    return tuple(spans)


def _about(migration: Migration) -> dict[str, str]:
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


def _broke_off(after: Entered | None) -> bool:
    """A step of which nothing was read, for it is held once more."""
    return after is not None and after.note.endswith(HELD_ANEW)


def _of_stage(migration: Migration, entered: Entered, readings: Iterator[Reading]) -> Iterator[tuple[str, str]]:
    """readings: of the steps that are still to come."""
    place = migration.source if entered.stage in _AT_SOURCE else migration.target
    if place is not None and entered.stage is not Stage.PLANNED:
        yield "shoal.where", place.where
    if entered.note:
        yield "shoal.note", entered.note
    if entered.stage is Stage.SHIFTING and (reading := next(readings, None)) is not None:
        yield "shoal.requests", str(reading.target.requests)
        yield "shoal.errors", str(reading.target.errors)
        yield "shoal.p95", show_seconds(reading.target.p95_s)
    if entered.stage is Stage.VERIFYING and (verdict := migration.verdict) is not None:
        yield "shoal.against", verdict.against
        yield "shoal.samples", str(verdict.samples)
        yield "shoal.passed", str(verdict.passed).lower()
