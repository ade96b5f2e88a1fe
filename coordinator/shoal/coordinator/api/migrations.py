"""Live moves, as the operator API shows them. Pure: values in, messages out."""

import math

from shoal.coordinator.api.views import key_view, pack_view, refusal_view
from shoal.coordinator.controllers.catalog import Catalog
from shoal.coordinator.controllers.migrations import verdict_digest
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.core.migration.budget import Held
from shoal.coordinator.core.migration.crossing import queued, refusal_of
from shoal.coordinator.core.migration.model import (
    Aborted,
    Alone,
    Came,
    Done,
    Draining,
    Expected,
    Figures,
    Migration,
    Place,
    Planned,
    Preparing,
    Reading,
    Returning,
    RollingBack,
    Service,
    Shifting,
)
from shoal.coordinator.core.migration.moves import move_of
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Verdict
from shoal.types.units import Elapsed, Wall
from shoal.v1 import artifacts_pb2, operator_pb2
from shoal.wire.nouns import to_wire


def migration_views(
    controller: WorkloadsController, name: str, tenant: str, now: Elapsed, wall: Wall
) -> list[operator_pb2.MigrationView]:
    """Of those that are kept, the oldest first: name: this one's, or all of this workload; empty: any, as tenant. Who
    watches a move asks several times a second, and hundreds of old ones are kept: of those nothing is made then."""
    asked = [
        each
        for each in controller.migrations.all.values()
        if name in ("", each.id, each.workload.name) and tenant in ("", each.workload.tenant)
    ]
    asked.sort(key=lambda each: (each.story[0].at, each.id))
    return [migration_view(controller, each, now, wall) for each in asked]


def migration_view(
    controller: WorkloadsController, migration: Migration, now: Elapsed, wall: Wall
) -> operator_pb2.MigrationView:
    move, target, verdict = move_of(migration), migration.target, migration.verdict
    reason = _reason(controller, migration)
    return operator_pb2.MigrationView(
        id=migration.id,
        workload=key_view(migration.workload),
        stage=migration.stage,
        cause=migration.cause,
        actor=migration.actor,
        source=_place(migration.source),
        target=_place(target) if target is not None else None,
        to=migration.aim.where,
        share=move.share if move is not None else float(isinstance(migration.state, Done)),
        reason=refusal_view(reason) if reason is not None else None,
        gives_up_at=_gives_up_at(migration, now, wall),
        stages=[operator_pb2.MigrationStage(stage=one.stage, at=one.at, note=one.note) for one in migration.story],
        verdict=to_wire(verdict) if verdict is not None else None,
        readings=[_reading(reading) for reading in migration.readings],
        why=migration.reason,
        expected=_expected(migration.expected) if migration.expected is not None else None,
        came=_came(migration.came) if migration.came is not None else None,
        gap_s=migration.gap_s if migration.gap_s is not None else math.nan,
        verdict_sha256=verdict_digest(verdict) if verdict is not None else "",
        reference=_reference(controller.catalog, verdict, target),
    )


def unmoved_view(held: Held) -> operator_pb2.UnmovedView:
    asked = held.proposal
    return operator_pb2.UnmovedView(
        source=_place(asked.source),
        to=asked.aim.where,
        cause=asked.cause,
        why=asked.reason,
        hold=held.hold,
        found=held.why,
        until=held.until,
    )


def _reference(catalog: Catalog, verdict: Verdict | None, target: Place | None) -> artifacts_pb2.Pack | None:
    """What it was judged by, or made."""
    if verdict is None or target is None:
        return None
    pack = catalog.packs.get(verdict.pack)
    found = pack.read_for.get(target.model) if pack is not None else None
    return pack_view(catalog, found, target.model) if found is not None else None


def _reason(controller: WorkloadsController, migration: Migration) -> Refusal | None:
    """What it waits for, or why it ended."""
    match migration.state:
        case Planned() if migration.crosses:
            return queued(migration, controller.migrations.all.values()) or refusal_of(migration, controller.turned)
        case Planned():
            plan = controller.plan_now.of(migration.workload) if controller.plan_now is not None else None
            why = plan.unmoved.get(migration.id) if plan is not None else None
            if why is None:
                return Refusal(Code.WAITING_FOR_TURN, "another move of its workload is under way, or it was just asked")
            return Refusal(Code.NO_ROOM_FOR_BOTH, str(why))
        case Preparing() | Alone():
            name = migration.target.assignment if migration.target is not None else ""
            wait = next((wait for wait in controller.waits if wait.assignment == name), None)
            return Refusal(wait.code, wait.reason) if wait is not None else None
        case Shifting(step=step):
            share, left = migration.rule.steps[step], len(migration.rule.steps) - step - 1
            return Refusal(Code.WAITING_FOR_SHIFT, f"{share:.0%} of the requests are held, {left} steps to go")
        case Draining():
            return Refusal(Code.WAITING_FOR_DRAIN, f"{migration.source.where} finishes what it has")
        case RollingBack(refusal=refusal) | Returning(refusal=refusal) | Aborted(refusal=refusal):
            return refusal
        case Done():
            return None


def _gives_up_at(migration: Migration, now: Elapsed, wall: Wall) -> float:
    match migration.state:
        case Planned() | Preparing() | Alone() | Shifting() | Draining() | RollingBack() | Returning():
            return wall + (migration.state.until - now)
        case Done() | Aborted():
            return 0.0


def _place(place: Place) -> operator_pb2.MigrationPlace:
    return operator_pb2.MigrationPlace(
        assignment=place.assignment,
        node=place.node,
        device=place.device,
        model=place.model,
        precision=place.precision,
        region=place.region,
    )


def _expected(expected: Expected) -> operator_pb2.MoveExpected:
    return operator_pb2.MoveExpected(
        before=_service(expected.before),
        after=_service(expected.after),
        gain=expected.gain,
        fetch_bytes=expected.fetch_bytes,
        seconds=expected.seconds,
    )


def _came(came: Came) -> operator_pb2.MoveCame:
    return operator_pb2.MoveCame(
        after=_service(came.after),
        gain=came.gain,
        seconds=came.seconds,
        over_s=came.over_s,
        requests=came.requests,
        errors=came.errors,
        fetch_bytes=came.fetch_bytes,
    )


def _service(service: Service) -> operator_pb2.ReplicaService:
    return operator_pb2.ReplicaService(
        latency_p95_s=service.latency_p95_s,
        joules=service.joules,
        cost_usd_per_h=service.cost,
        carbon_g_per_h=service.carbon,
    )


def _reading(reading: Reading) -> operator_pb2.GuardReading:
    return operator_pb2.GuardReading(
        share=reading.share,
        held_s=reading.held_s,
        source=_figures(reading.source),
        target=_figures(reading.target),
        passed=reading.passed,
    )


def _figures(figures: Figures) -> operator_pb2.GuardFigures:
    return operator_pb2.GuardFigures(requests=figures.requests, errors=figures.errors, latency_p95_s=figures.p95_s)
