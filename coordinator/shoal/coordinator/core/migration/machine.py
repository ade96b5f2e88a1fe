"""State machine of one live migration, a function of stored state, observation and time. Guide: migration.md.

Every state that is not final has a deadline and a way back, except `draining`, which can only continue. The machine
itself does nothing: `effects.move_of` derives what a state asks of the region, and is idempotent.
"""

from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.guard import (
    evaluate_step,
    observed_stats,
    placement_expectation,
    reference_p95_s,
    should_end_early,
)
from shoal.coordinator.core.migration.model import (
    RESTARTED_STEP_NOTE,
    AbortedState,
    DoneState,
    DrainingState,
    GapState,
    Migration,
    MigrationEvent,
    MigrationLimits,
    MigrationObservation,
    MigrationStage,
    MigrationState,
    PlannedState,
    PreparingState,
    ReplicaPlace,
    ReturningState,
    RollingBackState,
    ShiftingState,
    StageEntry,
)
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.migration import Against, MigrationRule, Verdict, admits, has_answers
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds

LIMITS: Final = MigrationLimits()
MigrationStep = tuple[Migration, tuple[MigrationEvent, ...]]

_PREPARING: Final = (MigrationStage.RESERVED, MigrationStage.STAGING, MigrationStage.WARMING, MigrationStage.VERIFYING)
_STAGE_OF: Final = {
    Phase.FETCHING: MigrationStage.STAGING,
    Phase.LOADING: MigrationStage.STAGING,
    Phase.WARMING: MigrationStage.WARMING,
    Phase.VERIFYING: MigrationStage.VERIFYING,
    Phase.READY: MigrationStage.VERIFYING,
}


def start(migration: Migration, now: Elapsed, wall: Wall, limits: MigrationLimits = LIMITS) -> MigrationStep:
    """The migration at its beginning: it waits for a place. The state that it comes with is ignored."""
    note = ", ".join(filter(None, (migration.aim.region or migration.aim.node, migration.reason)))
    until = Elapsed(now + (limits.planned_cross_region_s if migration.is_cross_region else limits.planned_s))
    return _enter(migration, PlannedState(now, until), wall, note)


def reserve(
    migration: Migration,
    target: ReplicaPlace,
    now: Elapsed,
    wall: Wall,
    limits: MigrationLimits = LIMITS,
    *,
    gap: bool = False,
) -> MigrationStep:
    """Gives it a place: the allocations hold both replicas from now on; with a gap, the larger of them. Raises
    ShoalError(CONFLICT) if it had a place."""
    if not isinstance(migration.state, PlannedState):
        raise refuse(Code.CONFLICT, f"{migration.id} is {migration.stage}", "a migration that waits for a place")
    until = Elapsed(now + limits.reserved_s + limits.report_s)
    note = f"{target.where}, once the old one has gone: it cannot hold both" if gap else target.where
    after = replace(migration, target=target, gap=gap)
    return _enter(after, PreparingState(MigrationStage.RESERVED, now, until), wall, note)


def cancel(
    migration: Migration, actor: str, now: Elapsed, wall: Wall, limits: MigrationLimits = LIMITS
) -> MigrationStep:
    """Rolls it back for an operator. Raises ShoalError(CONFLICT) if it is too late."""
    match migration.state:
        case PlannedState() | PreparingState() | GapState() | ShiftingState():
            return _roll_back(migration, Refusal(Code.MOVE_CANCELLED, f"by {actor}"), now, wall, limits)
        case DrainingState() | RollingBackState() | ReturningState() | DoneState() | AbortedState():
            raise refuse(
                Code.CONFLICT, f"{migration.id} is {migration.stage}", "a migration that can still go back",
                "move the workload back with `shoal migrate`",
            )  # fmt: skip


def step(
    migration: Migration, seen: MigrationObservation, now: Elapsed, wall: Wall, limits: MigrationLimits = LIMITS
) -> MigrationStep:
    """The migration after one observation. Idempotent: the same observation again changes nothing."""
    match migration.state:
        case PlannedState() as state:
            return _step_planned(migration, state, seen, now, wall, limits)
        case PreparingState() as state:
            return _step_preparing(migration, state, seen, now, wall, limits)
        case GapState() as state:
            return _step_gap(migration, state, seen, now, wall, limits)
        case ShiftingState() as state:
            return _step_shifting(migration, state, seen, now, wall, limits)
        case DrainingState(until=until):
            if not seen.source.is_assigned:
                return _enter(migration, DoneState(now, observed_stats(seen.target)), wall)
            if now >= until:
                done = DoneState(now, observed_stats(seen.target))
                return _enter(migration, done, wall, "the old replica's node has not let go of it yet")
            return migration, ()
        case RollingBackState(handing=True) as state:
            handed = not seen.target.has_sessions and now >= state.since + limits.route_propagation_s
            if handed or _target_loss(migration, seen) is not None or now >= state.since + limits.handover_s:
                return replace(migration, state=replace(state, handing=False)), ()
            return migration, ()
        case RollingBackState(refusal=refusal, until=until):
            if seen.target.is_assigned and now < until:
                return migration, ()
            if migration.dark_since is not None:
                again = Elapsed(now + limits.warming_s + limits.report_s)
                return _enter(migration, ReturningState(refusal, now, again), wall, migration.source.where)
            return _enter(migration, AbortedState(refusal, now), wall, str(refusal))
        case ReturningState(refusal=refusal, until=until):
            observed = seen.source.observed
            served = seen.source.is_assigned and seen.source.is_current and observed is not None
            if served and observed is not None and observed.phase is Phase.READY:
                lit = _close_gap(migration, wall)
                return _enter(lit, AbortedState(refusal, now), wall, f"{refusal}; nobody served for {lit.gap_s:.1f} s")
            if now >= until or not seen.source.is_assigned or seen.source.is_lost:
                return _enter(
                    migration, AbortedState(refusal, now), wall, f"{refusal}; the old one has not come back yet"
                )
            return migration, ()
        case DoneState() | AbortedState():
            return migration, ()


def _step_planned(
    migration: Migration,
    state: PlannedState,
    seen: MigrationObservation,
    now: Elapsed,
    wall: Wall,
    limits: MigrationLimits,
) -> MigrationStep:
    if (refusal := _source_loss(migration, seen) or seen.obsolete_reason) is not None:
        return _roll_back(migration, refusal, now, wall, limits)
    # Extended only at half time instead of with every step, because each change is a write.
    if seen.is_queued and state.until - now < limits.planned_s / 2:
        return replace(migration, state=replace(state, until=Elapsed(now + limits.planned_s))), ()
    if now >= state.until:
        found = (
            str(seen.placement_refusal)
            if seen.placement_refusal is not None
            else "no place for it beside the one it runs on"
        )
        refusal = Refusal(Code.NO_ROOM_FOR_BOTH, found)
        if migration.is_cross_region and seen.placement_refusal is not None:
            refusal = seen.placement_refusal
        return _roll_back(migration, refusal, now, wall, limits)
    return migration, ()


def _step_preparing(
    migration: Migration,
    state: PreparingState,
    seen: MigrationObservation,
    now: Elapsed,
    wall: Wall,
    limits: MigrationLimits,
) -> MigrationStep:
    observed = seen.target.observed
    migration = _with_verdict(migration, observed)
    if now >= state.until:
        found = f"{state.stage} for {now - state.since:.0f} s{_last_report(observed)}"
        return _roll_back(migration, Refusal(Code.MOVE_TIMEOUT, found), now, wall, limits)
    if (refusal := _wrong_answers(migration, observed)) is not None:
        return _roll_back(migration, refusal, now, wall, limits)
    if (refusal := _source_loss(migration, seen)) is not None:
        # The new replica stays, like any other that replaces a lost one.
        after, told = _enter(migration, AbortedState(refusal, now), wall, str(refusal))
        return after, (*told, *_unverified_event(migration))
    if (
        refusal := _target_loss(migration, seen)
        or seen.obsolete_reason
        or _verdict_refusal(migration, migration.verdict)
    ) is not None:
        return _roll_back(migration, refusal, now, wall, limits)
    if observed is None or not seen.target.is_current:
        return migration, ()
    if observed.phase is Phase.READY and (migration.verdict is not None or migration.rule.against is Against.NONE):
        after, told = _shift(migration, 0, seen, now, wall, limits)
        return after, (*_difference_event(migration.verdict), *told)
    if migration.gap and observed.phase is Phase.STAGED:
        until = Elapsed(now + migration.rule.allow_gap_s - _return_s(seen.source.observed, limits))
        note = f"{migration.source.where} goes first: for at most {migration.rule.allow_gap_s:g} s nobody serves"
        return _enter(replace(migration, dark_since=wall), GapState(MigrationStage.CLEARING, now, until), wall, note)
    stage = _STAGE_OF.get(observed.phase, state.stage)
    if _PREPARING.index(stage) <= _PREPARING.index(state.stage):
        return migration, ()
    return _enter(
        migration, PreparingState(stage, now, Elapsed(now + _stage_timeout_s(stage, migration.rule, limits))), wall
    )


def _step_gap(
    migration: Migration, state: GapState, seen: MigrationObservation, now: Elapsed, wall: Wall, limits: MigrationLimits
) -> MigrationStep:  # fmt: skip
    observed = seen.target.observed
    migration = _with_verdict(migration, observed)
    if now >= state.until:
        dark_s = wall - (migration.dark_since if migration.dark_since is not None else wall)
        found = f"nobody served for {dark_s:.1f} s, and the old one has to come back{_last_report(observed)}"
        return _roll_back(migration, Refusal(Code.MOVE_TIMEOUT, found), now, wall, limits)
    refusal = _wrong_answers(migration, observed) or _target_loss(migration, seen) or seen.obsolete_reason
    if (refusal := refusal or _verdict_refusal(migration, migration.verdict)) is not None:
        return _roll_back(migration, refusal, now, wall, limits)
    if state.stage is MigrationStage.CLEARING:
        left = seen.source.observed
        gone = seen.source.is_lost or not seen.source.is_assigned or (left is not None and left.phase is Phase.STAGED)
        return (
            _enter(migration, replace(state, stage=MigrationStage.STAGING, since=now), wall)
            if gone
            else (migration, ())
        )
    if observed is None or not seen.target.is_current:
        return migration, ()
    if observed.phase is Phase.READY and (migration.verdict is not None or migration.rule.against is Against.NONE):
        lit = _close_gap(migration, wall)
        after, told = _drain(lit, now, wall, limits, f"nobody served for {lit.gap_s:.1f} s")
        return after, (*_difference_event(migration.verdict), *told)
    stage = _STAGE_OF.get(observed.phase, state.stage)
    if _PREPARING.index(stage) <= _PREPARING.index(state.stage):
        return migration, ()
    return _enter(migration, replace(state, stage=stage, since=now), wall)


def _return_s(source: Observed | None, limits: MigrationLimits) -> Seconds:
    """Time that the old replica needs to serve again after it left its device; it is reserved from the gap."""
    load_s = source.measured.load_s if source is not None and source.measured is not None else 0.0
    return Seconds(load_s + limits.route_propagation_s)


def _close_gap(migration: Migration, wall: Wall) -> Migration:
    """Records that a replica serves again."""
    since = migration.dark_since if migration.dark_since is not None else wall
    return replace(migration, gap_s=Seconds(max(0.0, wall - since)))


def _step_shifting(
    migration: Migration,
    state: ShiftingState,
    seen: MigrationObservation,
    now: Elapsed,
    wall: Wall,
    limits: MigrationLimits,
) -> MigrationStep:
    observed = seen.target.observed
    if now >= state.until:
        found = f"shifting, step {state.step + 1}, for {now - state.since:.0f} s{_last_report(observed)}"
        kept = seen.source.observed.sessions if state.stateful and seen.source.observed is not None else 0
        code, found = (Code.HANDOVER_FAILED, f"{kept} sessions left, {found}") if kept else (Code.MOVE_TIMEOUT, found)
        return _roll_back(migration, Refusal(code, found), now, wall, limits)
    shown = _verdict(migration, observed)
    if (
        refusal := _target_loss(migration, seen) or seen.obsolete_reason or _verdict_refusal(migration, shown)
    ) is not None:
        return _roll_back(migration, refusal, now, wall, limits)
    if _source_loss(migration, seen) is not None:
        return _drain(migration, now, wall, limits, "the old replica is lost: the new one has passed and takes all")
    if observed is None or observed.phase is not Phase.READY or not seen.target.is_current:
        return migration, ()
    held_s = now - state.since
    chosen = placement_expectation(migration)
    reading = evaluate_step(
        migration.rule, state, observed_stats(seen.source), observed_stats(seen.target), chosen, held_s
    )
    whole_from = None if seen.counts_since is None else Elapsed(seen.counts_since + limits.route_propagation_s)
    is_whole = whole_from is not None and state.since >= whole_from
    due = is_whole and now >= state.due
    if should_end_early(migration.rule, reading) or (due and not reading.passed):
        read = replace(migration, readings=(*migration.readings, replace(reading, passed=False)))
        p95 = show_seconds(reading.target.p95_s)
        found = f"{reading.target.errors} of {reading.target.requests} requests failed, p95 {p95}"
        measure = reference_p95_s(reading.source, reading.target, chosen)
        asked = f"at most {migration.rule.guard_errors:.3%}, {migration.rule.guard_p95:g} x {show_seconds(measure)}"
        return _roll_back(read, Refusal(Code.GUARD_TRIPPED, found, asked), now, wall, limits)
    if not is_whole and whole_from is not None and now >= whole_from:
        return _restart_step(migration, state, seen, now, wall, limits)
    if not due:
        return migration, ()
    read = replace(migration, readings=(*migration.readings, reading))
    if state.step + 1 < len(migration.rule.steps):
        return _shift(read, state.step + 1, seen, now, wall, limits)
    if state.stateful and seen.source.has_sessions:
        return migration, ()
    return _drain(read, now, wall, limits, "" if state.stateful else _ending_sessions(seen))


# -- transitions ------------------------------------------------------------------------------------------------------


def _enter(migration: Migration, state: MigrationState, wall: Wall, note: str = "") -> MigrationStep:
    after = replace(migration, state=state)
    after = replace(after, stages=(*migration.stages, StageEntry(after.stage, wall, note)))
    word = after.stage.replace("_", " ")
    return after, (MigrationEvent(f"MIGRATION_{after.stage.upper()}", f"{word} {note}".strip()),)


def _ending_sessions(seen: MigrationObservation) -> str:
    """What people are told of sessions that the old replica does not hand over; empty where it has none."""
    count = seen.source.observed.sessions if seen.source.observed is not None else 0
    return f"{count} sessions end: the new replica has another model" if count else ""


def _roll_back(
    migration: Migration, refusal: Refusal, now: Elapsed, wall: Wall, limits: MigrationLimits
) -> MigrationStep:
    if migration.target is None:
        return _enter(migration, AbortedState(refusal, now), wall, str(refusal))
    handing = isinstance(migration.state, ShiftingState) and migration.state.stateful
    until = Elapsed(now + migration.rule.drain_s + limits.rollback_s + (limits.handover_s if handing else 0.0))
    return _enter(migration, RollingBackState(refusal, now, until, handing), wall, str(refusal))


def _shift(
    migration: Migration, index: int, seen: MigrationObservation, now: Elapsed, wall: Wall, limits: MigrationLimits
) -> MigrationStep:
    held_s = _step_hold_s(migration, limits)
    stateful = seen.source.is_stateful and _can_take_state(migration)
    again_s = held_s if migration.is_cross_region else 0.0  # the counters may be reset once
    until = Elapsed(now + held_s + again_s + 2 * limits.report_s + (limits.handover_s if stateful else 0.0))
    source, target = observed_stats(seen.source), observed_stats(seen.target)
    if migration.readings:
        source = replace(source, p95_s=migration.readings[-1].source.p95_s or source.p95_s)
    share = migration.rule.steps[index]
    state = ShiftingState(index, source, target, now, Elapsed(now + held_s), until, stateful)
    return _enter(migration, state, wall, f"{share:.0%}")


def _restart_step(
    migration: Migration,
    state: ShiftingState,
    seen: MigrationObservation,
    now: Elapsed,
    wall: Wall,
    limits: MigrationLimits,
) -> MigrationStep:
    """The same share, held from now on, with the same deadline: readings so far come from counters that were reset,
    and from the time around the reset."""
    source, due = observed_stats(seen.source), Elapsed(now + _step_hold_s(migration, limits))
    source = replace(source, p95_s=state.source.p95_s or source.p95_s)
    again = replace(state, source=source, target=observed_stats(seen.target), since=now, due=due)
    share = migration.rule.steps[state.step]
    return _enter(migration, again, wall, f"{share:.0%}, {RESTARTED_STEP_NOTE}")


def _step_hold_s(migration: Migration, limits: MigrationLimits) -> Seconds:
    return Seconds(max(migration.rule.hold_s, limits.route_propagation_s))


def _drain(migration: Migration, now: Elapsed, wall: Wall, limits: MigrationLimits, note: str = "") -> MigrationStep:
    until = Elapsed(now + migration.rule.drain_s + limits.rollback_s)
    return _enter(migration, DrainingState(now, until), wall, note)


# -- observations -----------------------------------------------------------------------------------------------------


def _source_loss(migration: Migration, seen: MigrationObservation) -> Refusal | None:
    if seen.source.is_assigned and not seen.source.is_lost:
        return None
    return Refusal(Code.NODE_LOST, f"the replica on {migration.source.where} is gone", "one to move")


def _target_loss(migration: Migration, seen: MigrationObservation) -> Refusal | None:
    where = migration.target.where if migration.target is not None else ""
    if seen.target_failure is not None:
        return seen.target_failure
    if not seen.target.is_assigned or seen.target.is_lost:
        return Refusal(Code.NODE_LOST, f"the new replica on {where} is gone")
    observed = seen.target.observed
    if observed is not None and observed.phase is Phase.FAILED and observed.code in _FINAL_CODES:
        code = observed.code or Code.VERIFY_FAILED
        return _difference_refusal(migration, code, f"{where}: {observed.reason}")
    return None


_FINAL_CODES: Final = frozenset({Code.VERIFY_FAILED, Code.VERIFY_IMPOSSIBLE})
"""Failures that the node does not retry."""


def _verdict(migration: Migration, observed: Observed | None) -> Verdict | None:
    """The verdict of this migration; one of an earlier migration does not count."""
    verdict = observed.verdict if observed is not None else None
    return verdict if verdict is not None and verdict.migration == migration.id else None


def _can_take_state(migration: Migration) -> bool:
    """Whether the new replica may go on with the old one's sessions: it runs the same variant of the model, or
    answered the same inputs as the old one did, state among both. Another one takes a state of the same shape without a
    word.

    By the verdict kept with the migration, because a replica that shifts is asked for none, and its node may have
    restarted since and report none."""
    if migration.target is not None and migration.target.variant == migration.source.variant:
        return True
    kept = migration.verdict
    return kept is not None and kept.passed and kept.samples > 0 and kept.against is Against.SOURCE


def _with_verdict(migration: Migration, observed: Observed | None) -> Migration:
    verdict = _verdict(migration, observed)
    return replace(migration, verdict=verdict) if verdict is not None else migration


def _wrong_answers(migration: Migration, observed: Observed | None) -> Refusal | None:
    """Why it must not serve, even if the old replica is gone: its answers were compared and are wrong."""
    refusal = _verdict_refusal(migration, migration.verdict)
    if refusal is not None and refusal.code is not Code.VERIFY_IMPOSSIBLE:
        return refusal
    if observed is not None and observed.phase is Phase.FAILED and observed.code is Code.VERIFY_FAILED:
        return _difference_refusal(migration, Code.VERIFY_FAILED, observed.reason)
    return None


def _verdict_refusal(migration: Migration, verdict: Verdict | None) -> Refusal | None:
    if verdict is None or admits(verdict, advisory=migration.rule.advisory):
        return None
    return _difference_refusal(migration, verdict.code or Code.VERIFY_FAILED, verdict.reason)


def _difference_refusal(migration: Migration, code: Code, found: str) -> Refusal:
    if code is not Code.VERIFY_FAILED:
        return Refusal(code, found)
    return Refusal(code, found, "the answers of the replica that serves", migration.remedy)


def _difference_event(verdict: Verdict | None) -> tuple[MigrationEvent, ...]:
    """For a difference that the policy only advises on."""
    return () if verdict is None or verdict.passed else (MigrationEvent("MIGRATION_DIFFERS", verdict.reason),)


def _unverified_event(migration: Migration) -> tuple[MigrationEvent, ...]:
    """For a replica that replaces a lost one without verification, because only the lost one could have verified it."""
    if migration.rule.against is not Against.SOURCE or migration.verdict is not None or has_answers(migration.rule):
        return ()
    where = migration.target.where if migration.target is not None else ""
    return (
        MigrationEvent("MIGRATION_UNVERIFIED", f"the replica on {where} serves as it is: there is nobody left to ask"),
    )


def _stage_timeout_s(stage: MigrationStage, rule: MigrationRule, limits: MigrationLimits) -> Seconds:
    match stage:
        case MigrationStage.STAGING:
            return Seconds(limits.staging_s + limits.report_s)
        case MigrationStage.WARMING:
            return Seconds(limits.warming_s + limits.report_s)
        case _:
            return Seconds(limits.verify_timeout_s(rule.samples) + limits.report_s)


def _last_report(observed: Observed | None) -> str:
    if observed is None:
        return ", its node has not taken it up"
    return f", its node says {observed.phase}{f' ({observed.code}: {observed.reason})' if observed.code else ''}"
