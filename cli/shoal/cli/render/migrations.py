"""A live migration for people: its stage, its verification, and the guard's measurements."""

import math
from collections.abc import Callable
from typing import Final

from shoal.cli.render.columns import Column
from shoal.cli.render.output import line, table
from shoal.cli.render.resources import place, reason, requested_target, when
from shoal.cli.render.styles import state, style_of
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import show_bytes, show_carbon, show_gain, show_joules, show_seconds, show_usd_per_hour
from shoal.v1 import nouns_pb2, operator_pb2

QUEUED: Final = "queued"
"""The stage of a move that waits in the queue: it has not begun."""


def is_over(migration: operator_pb2.MigrationView) -> bool:
    return migration.stage in ("done", "aborted")


def refusal_of(migration: operator_pb2.MigrationView) -> ShoalError:
    """Why it was aborted."""
    found = migration.reason
    return ShoalError(Refusal(Code(found.code or Code.MOVE_CANCELLED), found.found, found.asked, found.remedy))


def stage_line(migration: operator_pb2.MigrationView) -> str:
    why = f": {reason(migration.reason)}" if migration.reason.code else ""
    return f"{migration.id}  {_source_to_target(migration)}  {migration.stage.replace('_', ' ')}{why}"


def show_migration(migration: operator_pb2.MigrationView) -> None:
    line(stage_line(migration), f"bold {style_of(migration.stage)}".rstrip())
    why = f": {migration.why}" if migration.why else ""
    line(f"{migration.cause}{why}{f', by {migration.actor}' if migration.actor else ''}")
    began = migration.stages[0].at
    rows = [
        [one.stage.replace("_", " "), when(one.at), f"+{one.at - began:.1f}s", one.note] for one in migration.stages
    ]
    table(["STAGE", Column("ENTERED", rank=2), Column("AFTER", rank=1, right=True), Column("", 3, least=12)], rows)
    if migration.HasField("expected"):
        _show_expectation(migration)
    if migration.verdict.migration:
        _show_verdict(migration.verdict, went_on=migration.stage in _AFTER_VERIFY)
        if migration.verdict.pack:
            line(f"reference {migration.verdict.pack}, {_origin(migration)}")
    if migration.readings:
        table(
            ["SHARE", "HELD", "REQUESTS", "ERRORS", "P95", "P95 OF THE OLD", Column("PASSED")],
            [
                [
                    f"{one.share:.0%}", f"{one.held_s:.1f}s", str(one.target.requests), str(one.target.errors),
                    _p95_of_step(one.target), _p95_of_step(one.source),
                    state(one.outcome if one.outcome == "not judged" else "yes" if one.passed else "no"),
                ]
                for one in migration.readings
            ],
        )  # fmt: skip


def _show_expectation(migration: operator_pb2.MigrationView) -> None:
    """Expected gain beside the actual one."""
    expected, came = migration.expected, migration.came if migration.HasField("came") else None
    seconds = f", {show_seconds(expected.seconds)}" if math.isfinite(expected.seconds) else ""
    fetch = f", {show_bytes(expected.fetch_bytes)} to fetch" if expected.fetch_bytes else ""
    line(f"expected: {show_gain(expected.gain)}{seconds}{fetch}")
    if came is not None:
        errors = f", {came.errors} failed" if came.errors else ""
        counted = f"{came.requests} requests in {show_seconds(came.over_s)}{errors}"
        better = f"{show_gain(came.gain)}, " if came.requests else ""
        fetched = f", {show_bytes(came.fetch_bytes)} fetched" if came.HasField("fetch_bytes") else ""
        line(f"came: {better}{show_seconds(came.seconds)}{fetched}; {counted}")
    known = [expected.before, expected.after, *([came.after] if came is not None else [])]
    table(
        [Column(""), Column("BEFORE"), Column("EXPECTED"), *([Column("CAME")] if came is not None else [])],
        [
            [name, *(_figure(getattr(one, field), show_one) for one in known)]
            for name, field, show_one in (
                (_p95_of(migration), "latency_p95_s", show_seconds),
                ("energy/inference", "joules", show_joules),
                ("cost", "cost_usd_per_h", show_usd_per_hour),
                ("carbon", "carbon_g_per_h", show_carbon),
            )
        ],
    )


def _p95_of(migration: operator_pb2.MigrationView) -> str:
    between = migration.source.region or migration.target.region
    return "p95, with the way" if between else "p95 at the worker"


def _p95_of_step(figures: operator_pb2.GuardFigures) -> str:
    return show_seconds(figures.latency_p95_s) if figures.requests else "-"


def _figure(value: float, show_one: Callable[[float], str]) -> str:
    return show_one(value) if math.isfinite(value) else "-"


_AFTER_VERIFY = ("shifting", "draining", "done")


def _show_verdict(verdict: nouns_pb2.Verdict, *, went_on: bool) -> None:
    failed = "differs, and goes on as the policy says" if went_on else f"failed: {verdict.code}"
    outcome = "passed" if verdict.passed else f"{failed} {verdict.reason}".rstrip()
    done = "recorded as the reference" if verdict.recorded else f"verified against {verdict.against}"
    line(f"{done} with {verdict.samples} {verdict.inputs} inputs: {outcome}")
    table(
        ["OUTPUT", "METRIC", "BOUND", "WORST", Column("PASSED")],
        [
            [
                one.output or "(all)",
                one.metric,
                f"{one.bound:.4g}",
                f"{one.worst:.4g}",
                state("yes" if one.passed else "no"),
            ]
            for one in verdict.drifts
        ],
    )


def _origin(migration: operator_pb2.MigrationView) -> str:
    """Where the reference answers come from, or which replica recorded them."""
    if not migration.HasField("reference"):
        return "removed since"
    if not migration.reference.HasField("recorded"):
        return "pushed"
    by = migration.reference.recorded
    runs = " ".join(part for part in (by.provider, by.runtime_version, by.precision) if part)
    return f"recorded by {by.node}/{by.device} ({runs}) at {when(by.at)}"


def _source_to_target(migration: operator_pb2.MigrationView) -> str:
    target = place(migration.target) or requested_target(migration) or "?"
    return f"{migration.workload.tenant}/{migration.workload.name}  {place(migration.source)} -> {target}"
