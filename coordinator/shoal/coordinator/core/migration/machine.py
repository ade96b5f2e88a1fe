"""One live move, step by step: a function of what is remembered, what is seen, and the time. Guide: migration.md.

Every state that is not an end has a deadline, and a way back (but `draining`, from where it only goes on). Nothing is
done here: what a state wants of the region is told by `moves.move_of`, and is the same however often it is asked.
"""

from dataclasses import replace
from typing import Final

from shoal.coordinator.core.migration.guard import chosen_with, counted, judged, measure_s, tripped
from shoal.coordinator.core.migration.model import (
    HELD_ANEW,
    Aborted,
    Alone,
    Done,
    Draining,
    Entered,
    Limits,
    Migration,
    Place,
    Planned,
    Preparing,
    Returning,
    RollingBack,
    Seen,
    Shifting,
    Stage,
    State,
    Told,
)
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.migration import Against, MigrationRule, Verdict, admits, has_answers
from shoal.types.units import Elapsed, Seconds, Wall

LIMITS: Final = Limits()
Stepped = tuple[Migration, tuple[Told, ...]]

_PREPARING: Final = (Stage.RESERVED, Stage.STAGING, Stage.WARMING, Stage.VERIFYING)
_STAGE_OF: Final = {
    Phase.FETCHING: Stage.STAGING,
    Phase.LOADING: Stage.STAGING,
    Phase.WARMING: Stage.WARMING,
    Phase.VERIFYING: Stage.VERIFYING,
    Phase.READY: Stage.VERIFYING,
}


def planned(migration: Migration, now: Elapsed, wall: Wall, limits: Limits = LIMITS) -> Stepped:
    """As it begins: it waits for a place. The state that it comes with counts for nothing."""
    note = ", ".join(filter(None, (migration.aim.region or migration.aim.node, migration.reason)))
    until = Elapsed(now + (limits.crossing_s if migration.crosses else limits.planned_s))
    return _enter(migration, Planned(now, until), wall, note)


def placed(
    migration: Migration, target: Place, now: Elapsed, wall: Wall, limits: Limits = LIMITS, *, gap: bool = False
) -> Stepped:
    """It has a place: both replicas are in the books from now on; with a gap, the larger of them. Raises
    ShoalError(CONFLICT) where it had one."""
    if not isinstance(migration.state, Planned):
        raise refuse(Code.CONFLICT, f"{migration.id} is {migration.stage}", "a migration that waits for a place")
    until = Elapsed(now + limits.reserved_s + limits.report_s)
    note = f"{target.where}, once the old one has gone: it cannot hold both" if gap else target.where
    after = replace(migration, target=target, gap=gap)
    return _enter(after, Preparing(Stage.RESERVED, now, until), wall, note)


def cancelled(migration: Migration, actor: str, now: Elapsed, wall: Wall, limits: Limits = LIMITS) -> Stepped:
    """An operator wants it undone. Raises ShoalError(CONFLICT) where that is too late."""
    match migration.state:
        case Planned() | Preparing() | Alone() | Shifting():
            return _back(migration, Refusal(Code.MOVE_CANCELLED, f"by {actor}"), now, wall, limits)
        case Draining() | RollingBack() | Returning() | Done() | Aborted():
            raise refuse(
                Code.CONFLICT, f"{migration.id} is {migration.stage}", "a migration that can still go back",
                "move the workload back with `shoal migrate`",
            )  # fmt: skip


def step(migration: Migration, seen: Seen, now: Elapsed, wall: Wall, limits: Limits = LIMITS) -> Stepped:
    """What it comes to by what is seen. Asked again with the same, it changes nothing."""
    match migration.state:
        case Planned() as state:
            return _planned(migration, state, seen, now, wall, limits)
        case Preparing() as state:
            return _preparing(migration, state, seen, now, wall, limits)
        case Alone() as state:
            return _alone(migration, state, seen, now, wall, limits)
        case Shifting() as state:
            return _shifting(migration, state, seen, now, wall, limits)
        case Draining(until=until):
            if not seen.source.assigned:
                return _enter(migration, Done(now, counted(seen.target)), wall)
            if now >= until:
                done = Done(now, counted(seen.target))
                return _enter(migration, done, wall, "the old replica's node has not let go of it yet")
            return migration, ()
        case RollingBack(handing=True) as state:
            handed = not seen.target.has_sessions and now >= state.since + limits.settle_s
            if handed or _target_gone(migration, seen) is not None or now >= state.since + limits.hand_s:
                return replace(migration, state=replace(state, handing=False)), ()
            return migration, ()
        case RollingBack(refusal=refusal, until=until):
            if seen.target.assigned and now < until:
                return migration, ()
            if migration.dark_since is not None:
                again = Elapsed(now + limits.warming_s + limits.report_s)
                return _enter(migration, Returning(refusal, now, again), wall, migration.source.where)
            return _enter(migration, Aborted(refusal, now), wall, str(refusal))
        case Returning(refusal=refusal, until=until):
            observed = seen.source.observed
            served = seen.source.assigned and seen.source.seen and observed is not None
            if served and observed is not None and observed.phase is Phase.READY:
                lit = _lit(migration, wall)
                return _enter(lit, Aborted(refusal, now), wall, f"{refusal}; nobody served for {lit.gap_s:.1f} s")
            if now >= until or not seen.source.assigned or seen.source.lost:
                return _enter(migration, Aborted(refusal, now), wall, f"{refusal}; the old one has not come back yet")
            return migration, ()
        case Done() | Aborted():
            return migration, ()


def _planned(
    migration: Migration, state: Planned, seen: Seen, now: Elapsed, wall: Wall, limits: Limits
) -> Stepped:  # fmt: skip
    if (refusal := _source_gone(migration, seen) or seen.unwanted) is not None:
        return _back(migration, refusal, now, wall, limits)
    if seen.queued and state.until - now < limits.planned_s / 2:  # written now and then, not at every look
        return replace(migration, state=replace(state, until=Elapsed(now + limits.planned_s))), ()
    if now >= state.until:
        found = str(seen.waits) if seen.waits is not None else "no place for it beside the one it runs on"
        refusal = Refusal(Code.NO_ROOM_FOR_BOTH, found)
        if migration.crosses and seen.waits is not None:
            refusal = seen.waits
        return _back(migration, refusal, now, wall, limits)
    return migration, ()


def _preparing(
    migration: Migration, state: Preparing, seen: Seen, now: Elapsed, wall: Wall, limits: Limits
) -> Stepped:  # fmt: skip
    observed = seen.target.observed
    migration = _with_verdict(migration, observed)
    if now >= state.until:
        found = f"{state.stage} for {now - state.since:.0f} s{_last_said(observed)}"
        return _back(migration, Refusal(Code.MOVE_TIMEOUT, found), now, wall, limits)
    if (refusal := _wrong(migration, observed)) is not None:
        return _back(migration, refusal, now, wall, limits)
    if (refusal := _source_gone(migration, seen)) is not None:
        # The new replica stays, as any other that takes the place of one that is lost.
        after, told = _enter(migration, Aborted(refusal, now), wall, str(refusal))
        return after, (*told, *_unverified(migration))
    if (refusal := _target_gone(migration, seen) or seen.unwanted or _failed(migration, migration.verdict)) is not None:
        return _back(migration, refusal, now, wall, limits)
    if observed is None or not seen.target.seen:
        return migration, ()
    if observed.phase is Phase.READY and (migration.verdict is not None or migration.rule.against is Against.NONE):
        after, told = _shift(migration, 0, seen, now, wall, limits)
        return after, (*_differs(migration.verdict), *told)
    if migration.gap and observed.phase is Phase.STAGED:
        until = Elapsed(now + migration.rule.allow_gap_s - _return_s(seen.source.observed, limits))
        note = f"{migration.source.where} goes first: for at most {migration.rule.allow_gap_s:g} s nobody serves"
        return _enter(replace(migration, dark_since=wall), Alone(Stage.CLEARING, now, until), wall, note)
    stage = _STAGE_OF.get(observed.phase, state.stage)
    if _PREPARING.index(stage) <= _PREPARING.index(state.stage):
        return migration, ()
    return _enter(migration, Preparing(stage, now, Elapsed(now + _allowed_s(stage, migration.rule, limits))), wall)


def _alone(
    migration: Migration, state: Alone, seen: Seen, now: Elapsed, wall: Wall, limits: Limits
) -> Stepped:  # fmt: skip
    observed = seen.target.observed
    migration = _with_verdict(migration, observed)
    if now >= state.until:
        dark_s = wall - (migration.dark_since if migration.dark_since is not None else wall)
        found = f"nobody served for {dark_s:.1f} s, and the old one has to come back{_last_said(observed)}"
        return _back(migration, Refusal(Code.MOVE_TIMEOUT, found), now, wall, limits)
    refusal = _wrong(migration, observed) or _target_gone(migration, seen) or seen.unwanted
    if (refusal := refusal or _failed(migration, migration.verdict)) is not None:
        return _back(migration, refusal, now, wall, limits)
    if state.stage is Stage.CLEARING:
        left = seen.source.observed
        gone = seen.source.lost or not seen.source.assigned or (left is not None and left.phase is Phase.STAGED)
        return _enter(migration, replace(state, stage=Stage.STAGING, since=now), wall) if gone else (migration, ())
    if observed is None or not seen.target.seen:
        return migration, ()
    if observed.phase is Phase.READY and (migration.verdict is not None or migration.rule.against is Against.NONE):
        lit = _lit(migration, wall)
        after, told = _drain(lit, now, wall, limits, f"nobody served for {lit.gap_s:.1f} s")
        return after, (*_differs(migration.verdict), *told)
    stage = _STAGE_OF.get(observed.phase, state.stage)
    if _PREPARING.index(stage) <= _PREPARING.index(state.stage):
        return migration, ()
    return _enter(migration, replace(state, stage=stage, since=now), wall)


def _return_s(source: Observed | None, limits: Limits) -> Seconds:
    """What an old replica that has let go of its device takes to serve there again: its part of the gap."""
    load_s = source.measured.load_s if source is not None and source.measured is not None else 0.0
    return Seconds(load_s + limits.settle_s)


def _lit(migration: Migration, wall: Wall) -> Migration:
    """Somebody serves again."""
    since = migration.dark_since if migration.dark_since is not None else wall
    return replace(migration, gap_s=Seconds(max(0.0, wall - since)))


def _shifting(
    migration: Migration, state: Shifting, seen: Seen, now: Elapsed, wall: Wall, limits: Limits
) -> Stepped:  # fmt: skip
    observed = seen.target.observed
    if now >= state.until:
        found = f"shifting, step {state.step + 1}, for {now - state.since:.0f} s{_last_said(observed)}"
        kept = seen.source.observed.sessions if state.stateful and seen.source.observed is not None else 0
        code, found = (Code.HANDOVER_FAILED, f"{kept} sessions left, {found}") if kept else (Code.MOVE_TIMEOUT, found)
        return _back(migration, Refusal(code, found), now, wall, limits)
    shown = _verdict(migration, observed)
    if (refusal := _target_gone(migration, seen) or seen.unwanted or _failed(migration, shown)) is not None:
        return _back(migration, refusal, now, wall, limits)
    if _source_gone(migration, seen) is not None:
        return _drain(migration, now, wall, limits, "the old replica is lost: the new one has passed and takes all")
    if observed is None or observed.phase is not Phase.READY or not seen.target.seen:
        return migration, ()
    held_s = now - state.since
    chosen = chosen_with(migration)
    reading = judged(migration.rule, state, counted(seen.source), counted(seen.target), chosen, held_s)
    whole_from = None if seen.counts_since is None else Elapsed(seen.counts_since + limits.settle_s)
    is_whole = whole_from is not None and state.since >= whole_from
    due = is_whole and now >= state.due
    if tripped(migration.rule, reading) or (due and not reading.passed):
        read = replace(migration, readings=(*migration.readings, replace(reading, passed=False)))
        found = (
            f"{reading.target.errors} of {reading.target.requests} requests failed, p95 {reading.target.p95_s:.3g} s"
        )
        measure = measure_s(reading.source, reading.target, chosen)
        asked = f"at most {migration.rule.guard_errors:.3%}, {migration.rule.guard_p95:g} x {measure:.3g} s"
        return _back(read, Refusal(Code.GUARD_TRIPPED, found, asked), now, wall, limits)
    if not is_whole and whole_from is not None and now >= whole_from:
        return _shift_again(migration, state, seen, now, wall, limits)
    if not due:
        return migration, ()
    read = replace(migration, readings=(*migration.readings, reading))
    if state.step + 1 < len(migration.rule.steps):
        return _shift(read, state.step + 1, seen, now, wall, limits)
    if state.stateful and seen.source.has_sessions:
        return migration, ()
    return _drain(read, now, wall, limits)


# -- ways ------------------------------------------------------------------------------------------------------------


def _enter(migration: Migration, state: State, wall: Wall, note: str = "") -> Stepped:
    after = replace(migration, state=state)
    after = replace(after, story=(*migration.story, Entered(after.stage, wall, note)))
    word = after.stage.replace("_", " ")
    return after, (Told(f"MIGRATION_{after.stage.upper()}", f"{word} {note}".strip()),)


def _back(migration: Migration, refusal: Refusal, now: Elapsed, wall: Wall, limits: Limits) -> Stepped:
    if migration.target is None:
        return _enter(migration, Aborted(refusal, now), wall, str(refusal))
    handing = isinstance(migration.state, Shifting) and migration.state.stateful
    until = Elapsed(now + migration.rule.drain_s + limits.rollback_s + (limits.hand_s if handing else 0.0))
    return _enter(migration, RollingBack(refusal, now, until, handing), wall, str(refusal))


def _shift(migration: Migration, index: int, seen: Seen, now: Elapsed, wall: Wall, limits: Limits) -> Stepped:
    held_s = _held_s(migration, limits)
    stateful = seen.source.stateful
    again_s = held_s if migration.crosses else 0.0  # who counts for both may begin anew once
    until = Elapsed(now + held_s + again_s + 2 * limits.report_s + (limits.hand_s if stateful else 0.0))
    source, target = counted(seen.source), counted(seen.target)
    if migration.readings:
        source = replace(source, p95_s=migration.readings[-1].source.p95_s or source.p95_s)
    share = migration.rule.steps[index]
    state = Shifting(index, source, target, now, Elapsed(now + held_s), until, stateful)
    return _enter(migration, state, wall, f"{share:.0%}")


def _shift_again(
    migration: Migration, state: Shifting, seen: Seen, now: Elapsed, wall: Wall, limits: Limits
) -> Stepped:  # fmt: skip
    """The same share, held from now on, to the same deadline: what was read before is of counts that broke off, and of
    the time around that."""
    source, due = counted(seen.source), Elapsed(now + _held_s(migration, limits))
    source = replace(source, p95_s=state.source.p95_s or source.p95_s)
    again = replace(state, source=source, target=counted(seen.target), since=now, due=due)
    share = migration.rule.steps[state.step]
    return _enter(migration, again, wall, f"{share:.0%}, {HELD_ANEW}")


def _held_s(migration: Migration, limits: Limits) -> Seconds:
    return Seconds(max(migration.rule.hold_s, limits.settle_s))


def _drain(migration: Migration, now: Elapsed, wall: Wall, limits: Limits, note: str = "") -> Stepped:
    until = Elapsed(now + migration.rule.drain_s + limits.rollback_s)
    return _enter(migration, Draining(now, until), wall, note)


# -- what is seen ------------------------------------------------------------------------------------------------------


def _source_gone(migration: Migration, seen: Seen) -> Refusal | None:
    if seen.source.assigned and not seen.source.lost:
        return None
    return Refusal(Code.NODE_LOST, f"the replica on {migration.source.where} is gone", "one to move")


def _target_gone(migration: Migration, seen: Seen) -> Refusal | None:
    where = migration.target.where if migration.target is not None else ""
    if seen.broken is not None:
        return seen.broken
    if not seen.target.assigned or seen.target.lost:
        return Refusal(Code.NODE_LOST, f"the new replica on {where} is gone")
    observed = seen.target.observed
    if observed is not None and observed.phase is Phase.FAILED and observed.code in _FINAL:
        return Refusal(observed.code or Code.VERIFY_FAILED, f"{where}: {observed.reason}")
    return None


_FINAL: Final = frozenset({Code.VERIFY_FAILED, Code.VERIFY_IMPOSSIBLE})
"""Failures that the node does not try again by itself."""


def _verdict(migration: Migration, observed: Observed | None) -> Verdict | None:
    """Of this migration alone: an earlier one's says nothing."""
    verdict = observed.verdict if observed is not None else None
    return verdict if verdict is not None and verdict.migration == migration.id else None


def _with_verdict(migration: Migration, observed: Observed | None) -> Migration:
    verdict = _verdict(migration, observed)
    return replace(migration, verdict=verdict) if verdict is not None else migration


def _wrong(migration: Migration, observed: Observed | None) -> Refusal | None:
    """It was compared, and must not answer anybody, whatever becomes of the old one."""
    refusal = _failed(migration, migration.verdict)
    if refusal is not None and refusal.code is not Code.VERIFY_IMPOSSIBLE:
        return refusal
    if observed is not None and observed.phase is Phase.FAILED and observed.code is Code.VERIFY_FAILED:
        return Refusal(Code.VERIFY_FAILED, observed.reason)
    return None


def _failed(migration: Migration, verdict: Verdict | None) -> Refusal | None:
    if verdict is None or admits(verdict, advisory=migration.rule.advisory):
        return None
    return Refusal(verdict.code or Code.VERIFY_FAILED, verdict.reason)


def _differs(verdict: Verdict | None) -> tuple[Told, ...]:
    """Of one that goes on all the same, as its policy has it."""
    return () if verdict is None or verdict.passed else (Told("MIGRATION_DIFFERS", verdict.reason),)


def _unverified(migration: Migration) -> tuple[Told, ...]:
    """Of one that takes over from a replica that is lost, and was to be compared with that alone."""
    if migration.rule.against is not Against.SOURCE or migration.verdict is not None or has_answers(migration.rule):
        return ()
    where = migration.target.where if migration.target is not None else ""
    return (Told("MIGRATION_UNVERIFIED", f"the replica on {where} serves as it is: there is nobody left to ask"),)


def _allowed_s(stage: Stage, rule: MigrationRule, limits: Limits) -> Seconds:
    match stage:
        case Stage.STAGING:
            return Seconds(limits.staging_s + limits.report_s)
        case Stage.WARMING:
            return Seconds(limits.warming_s + limits.report_s)
        case _:
            return Seconds(limits.verify_within(rule.samples) + limits.report_s)


def _last_said(observed: Observed | None) -> str:
    if observed is None:
        return ", its node has not taken it up"
    return f", its node says {observed.phase}{f' ({observed.code}: {observed.reason})' if observed.code else ''}"
