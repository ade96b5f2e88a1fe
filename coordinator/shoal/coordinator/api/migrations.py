"""Migrations as the operator API shows them. Pure: values in, messages out."""

import math

from shoal.coordinator.api.views import key_view, pack_view, refusal_view
from shoal.coordinator.controllers.workloads.migrations import verdict_digest
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.budget import MoveHold
from shoal.coordinator.core.migration.cross_region import placement_refusal, queue_refusal
from shoal.coordinator.core.migration.effects import move_of
from shoal.coordinator.core.migration.model import (
    AbortedState,
    ActualOutcome,
    Cause,
    DoneState,
    DrainingState,
    ExpectedOutcome,
    GapState,
    GuardReading,
    Migration,
    PlannedState,
    PreparingState,
    ReplicaPlace,
    RequestStats,
    ReturningState,
    RollingBackState,
    ServiceFigures,
    ShiftingState,
)
from shoal.coordinator.core.migration.queue import QUEUED, QueuedMove
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Verdict
from shoal.types.units import Elapsed, Wall
from shoal.v1 import artifacts_pb2, operator_pb2
from shoal.wire.nouns import fill_view, to_wire


def migration_views(
    controller: WorkloadsController, fleet: Fleet, name: str, tenant: str, now: Elapsed, wall: Wall
) -> list[operator_pb2.MigrationView]:
    """The kept migrations that match and the moves in the queue, oldest first. name: a migration's, or a workload's
    for all of its migrations; empty: any. An empty tenant: any.

    Filters before it builds messages, because a client that watches a migration polls several times a second and
    hundreds of old ones are kept.
    """
    asked = [
        each
        for each in controller.migrations.all.values()
        if name in ("", each.id, each.workload.name) and tenant in ("", each.workload.tenant)
    ]
    found = [migration_view(controller, fleet, each, now, wall) for each in asked]
    found += [
        queued_move_view(controller, fleet, each, now, wall)
        for each in controller.queue.all.values()
        if name in ("", each.id, each.workload.name) and tenant in ("", each.workload.tenant)
    ]
    return sorted(found, key=lambda each: (each.stages[0].at, each.id))


def queued_move_view(
    controller: WorkloadsController, fleet: Fleet, queued: QueuedMove, now: Elapsed, wall: Wall
) -> operator_pb2.MigrationView:
    """A move that waits, or that ended in the queue, beside the migrations."""
    stages = [operator_pb2.MigrationStage(stage=QUEUED, at=queued.at, note=queued.aim.where)]
    if queued.ended is not None:
        stages.append(operator_pb2.MigrationStage(stage=queued.stage, at=queued.ended_at, note=str(queued.ended)))
    return operator_pb2.MigrationView(
        id=queued.id,
        workload=key_view(queued.workload),
        stage=queued.stage,
        cause=Cause.OPERATOR,
        actor=queued.actor,
        source=_place(queued.source),
        to=queued.aim.where,
        to_stand_in=fleet.stand_in(queued.aim.node, queued.aim.device),
        reason=refusal_view(controller.queue.reason_of(queued)),
        gives_up_at=0.0 if queued.is_over else wall + (queued.until - now),
        stages=stages,
        gap_s=math.nan,
    )


def migration_view(
    controller: WorkloadsController, fleet: Fleet, migration: Migration, now: Elapsed, wall: Wall
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
        to_stand_in=fleet.stand_in(migration.aim.node, migration.aim.device),
        share=move.share if move is not None else float(isinstance(migration.state, DoneState)),
        reason=refusal_view(reason) if reason is not None else None,
        gives_up_at=_gives_up_at(migration, now, wall),
        stages=[operator_pb2.MigrationStage(stage=one.stage, at=one.at, note=one.note) for one in migration.stages],
        verdict=to_wire(verdict) if verdict is not None else None,
        readings=[_reading(reading) for reading in migration.readings],
        why=migration.reason,
        expected=_expected_view(migration.expected) if migration.expected is not None else None,
        came=_actual_view(migration.came) if migration.came is not None else None,
        gap_s=migration.gap_s if migration.gap_s is not None else math.nan,
        verdict_sha256=verdict_digest(verdict) if verdict is not None else "",
        reference=_reference(controller.catalog, verdict, target),
    )


def held_move_view(held: MoveHold, fleet: Fleet) -> operator_pb2.MoveHoldView:
    asked = held.proposal
    return operator_pb2.MoveHoldView(
        source=_place(asked.source),
        to=asked.aim.where,
        to_stand_in=fleet.stand_in(asked.aim.node, asked.aim.device),
        cause=asked.cause,
        why=asked.reason,
        hold=held.hold,
        found=held.why,
        until=held.until,
        remedy=held.remedy,
    )


def _reference(catalog: Catalog, verdict: Verdict | None, target: ReplicaPlace | None) -> artifacts_pb2.Pack | None:
    """The pack that the verdict compared with, or that it recorded."""
    if verdict is None or target is None:
        return None
    pack = catalog.packs.get(verdict.pack)
    found = pack.read_for.get(target.model) if pack is not None else None
    return pack_view(catalog, found, target.model) if found is not None else None


def _reason(controller: WorkloadsController, migration: Migration) -> Refusal | None:
    """What the migration waits for, or why it ended."""
    match migration.state:
        case PlannedState() if migration.is_cross_region:
            return queue_refusal(migration, controller.migrations.all.values()) or placement_refusal(
                migration, controller.last_refusals
            )
        case PlannedState():
            plan = controller.last_plan.of(migration.workload) if controller.last_plan is not None else None
            why = plan.unplaced_moves.get(migration.id) if plan is not None else None
            if why is None:
                return Refusal(Code.WAITING_FOR_TURN, "another move of its workload is under way, or it was just asked")
            return Refusal(Code.NO_ROOM_FOR_BOTH, str(why))
        case PreparingState() | GapState():
            name = migration.target.assignment if migration.target is not None else ""
            wait = next((wait for wait in controller.waits if wait.assignment == name), None)
            return Refusal(wait.code, wait.reason) if wait is not None else None
        case ShiftingState(step=step):
            share, left = migration.rule.steps[step], len(migration.rule.steps) - step - 1
            to_go = f"{left} step{'' if left == 1 else 's'} to go" if left else "the last step"
            return Refusal(Code.WAITING_FOR_SHIFT, f"the new replica has {share:.0%} of the requests, {to_go}")
        case DrainingState():
            return Refusal(Code.WAITING_FOR_DRAIN, f"{migration.source.where} finishes what it has")
        case RollingBackState(refusal=refusal) | ReturningState(refusal=refusal) | AbortedState(refusal=refusal):
            return refusal
        case DoneState():
            return None


def _gives_up_at(migration: Migration, now: Elapsed, wall: Wall) -> float:
    match migration.state:
        case (
            PlannedState()
            | PreparingState()
            | GapState()
            | ShiftingState()
            | DrainingState()
            | RollingBackState()
            | ReturningState()
        ):
            return wall + (migration.state.until - now)
        case DoneState() | AbortedState():
            return 0.0


def _place(place: ReplicaPlace) -> operator_pb2.MigrationPlace:
    return fill_view(operator_pb2.MigrationPlace(), place)


def _expected_view(expected: ExpectedOutcome) -> operator_pb2.MoveExpected:
    return operator_pb2.MoveExpected(
        before=_service(expected.before),
        after=_service(expected.after),
        gain=expected.gain,
        fetch_bytes=expected.fetch_bytes,
        seconds=expected.seconds,
    )


def _actual_view(actual: ActualOutcome) -> operator_pb2.MoveCame:
    return operator_pb2.MoveCame(
        after=_service(actual.after),
        gain=actual.gain,
        seconds=actual.seconds,
        over_s=actual.over_s,
        requests=actual.requests,
        errors=actual.errors,
        fetch_bytes=actual.fetch_bytes,
    )


def _service(service: ServiceFigures) -> operator_pb2.ReplicaService:
    return operator_pb2.ReplicaService(
        latency_p95_s=service.latency_p95_s,
        joules=service.joules,
        cost_usd_per_h=service.cost,
        carbon_g_per_h=service.carbon,
    )


def _reading(reading: GuardReading) -> operator_pb2.GuardReading:
    return operator_pb2.GuardReading(
        share=reading.share,
        held_s=reading.held_s,
        source=_figures(reading.source),
        target=_figures(reading.target),
        passed=reading.passed and reading.is_conclusive,
        outcome="not judged" if not reading.is_conclusive else "passed" if reading.passed else "failed",
    )


def _figures(figures: RequestStats) -> operator_pb2.GuardFigures:
    return operator_pb2.GuardFigures(requests=figures.requests, errors=figures.errors, latency_p95_s=figures.p95_s)
