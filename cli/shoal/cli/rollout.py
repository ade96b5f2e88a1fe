"""What `shoal upgrade` does next: parts leave what they serve, become another version, and are watched, wave by wave.

Pure: what is seen and the time in, what to do out. Nothing needs to be remembered from one run to the next: who runs
the version already says how far it is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.types.codes import Code, Refusal

GRACE_S: Final = 20.0
"""For what is not as it was before a wave to become so again, once the hold is over; for what cannot leave to do so."""
FEWEST: Final = 20
"""Requests of which a share says something."""
SETTLE_S: Final = 5.0
"""Until every front has told how many requests failed while a replica was stopped, once it serves again."""
SLACK_S: Final = 0.005
"""By which a p95 may grow, however short it was."""


@dataclass(frozen=True, slots=True)
class Part:
    """A node, or a coordinator. version: as it says itself. rank: those of a lower one go first, and no two ranks
    together. replicas: that are there now; loading: of these, that do not serve yet."""

    name: str
    version: str
    ready: bool
    rank: int = 0
    replicas: int = 0
    loading: int = 0
    drains: bool = True


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a drain of a part came to so far. moving: moves that have a place, or wait for their turn. stays: what has
    none, or cannot leave, and why."""

    moving: int = 0
    stays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hook:
    """What installs the version on a part. failure: how it ended, where not well."""

    ended: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """requests, failed: since the first look. p95_s: by workload, of the slowest replica that serves."""

    requests: int = 0
    failed: int = 0
    p95_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """nodes: those that are ready, whatever is upgraded. service: None while no coordinator answers. wrong: checks of
    `shoal doctor` that fail, where it was asked."""

    parts: tuple[Part, ...]
    nodes: frozenset[str] = frozenset()
    service: Service | None = None
    wrong: frozenset[str] = frozenset()
    leaving: Mapping[str, Leaving] = field(default_factory=dict)
    hooks: Mapping[str, Hook] = field(default_factory=dict)

    def of(self, wave: Iterable[str]) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.name in set(wave))


@dataclass(frozen=True, slots=True)
class Asked:
    """share: of all parts, that may change at once; never more than half. hold_s: how long each wave is watched, and
    everything before the first. within_s: for a part to be empty, and again for it to be back. errors: share of
    requests that may fail beyond what failed before. slower: factor of a workload's p95. in_place: what cannot move
    away is stopped with its node."""

    version: str
    share: float = 0.1
    hold_s: float = 30.0
    within_s: float = 600.0
    errors: float = 0.01
    slower: float = 2.0
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Before:
    """How it was before the first wave."""

    versions: tuple[str, ...]
    nodes: frozenset[str]
    wrong: frozenset[str]
    failed_share: float
    p95_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Watch:
    """wave: that was changed; empty: none yet. since: what was served when it began."""

    wave: tuple[str, ...]
    until: float
    since: Service


@dataclass(frozen=True, slots=True)
class Empty:
    """The wave's nodes are drained."""

    wave: tuple[str, ...]
    until: float
    since: Service


@dataclass(frozen=True, slots=True)
class Change:
    """The version is being installed, and its parts have to be back. stopped: with replicas, which have to serve again;
    back_at: since when they do."""

    wave: tuple[str, ...]
    until: float
    since: Service
    stopped: bool = False
    back_at: float | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """left: parts that did not answer when their turn came. refusal: why it halted."""

    left: tuple[str, ...] = ()
    refusal: Refusal | None = None


Stage = Watch | Empty | Change | Over


@dataclass(frozen=True, slots=True)
class Course:
    """before: None until the first watch is over."""

    stage: Stage
    before: Before | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    wave: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Install:
    wave: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """They may be given work again."""

    wave: tuple[str, ...]


Effect = Drain | Install | Admit


def begun(seen: Seen, asked: Asked, now: float) -> tuple[Course, tuple[Effect, ...]]:
    """What an earlier run changed and did not come to admit is admitted first."""
    service, finished = seen.service or Service(), _admitted(seen, asked)
    if all(part.ready and part.version == asked.version for part in seen.parts):
        return Course(Over()), finished
    return Course(Watch((), now + asked.hold_s, service)), finished


def _admitted(seen: Seen, asked: Asked) -> tuple[Admit, ...]:
    """Whoever runs the version and is ready: also what an earlier run cordoned, and came back late."""
    finished = tuple(part.name for part in seen.parts if part.ready and part.version == asked.version)
    return (Admit(finished),) if finished else ()


def waves(parts: Iterable[Part], asked: Asked) -> tuple[tuple[str, ...], ...]:
    """As they are to come, if nothing changes: one part alone, then `share` of all at once, the emptiest first."""
    left, planned = tuple(parts), []
    while wave := next_wave(left, asked):
        planned.append(wave)
        left = tuple(replace(part, version=asked.version) if part.name in wave else part for part in left)
    return tuple(planned)


def next_wave(parts: tuple[Part, ...], asked: Asked) -> tuple[str, ...]:
    """Of those that are ready and run another version; empty: there are none."""
    due = [part for part in parts if part.ready and part.version != asked.version]
    if not due:
        return ()
    rank = min(part.rank for part in due)
    alike = [part for part in parts if part.rank == rank]
    first = not any(part.version == asked.version for part in parts)
    count = 1 if first else max(1, min(int(asked.share * len(alike)), len(alike) // 2))
    chosen = sorted((part for part in due if part.rank == rank), key=lambda part: (part.replicas, part.name))
    return tuple(part.name for part in chosen[:count])


def step(course: Course, seen: Seen, asked: Asked, now: float) -> tuple[Course, tuple[Effect, ...]]:
    """One look: where it stands then, and what is to be done for it."""
    match course.stage:
        case Over():
            return course, ()
        case Watch() as watch:
            return _watched(course, watch, seen, asked, now)
        case Empty() as leaving:
            return _emptied(course, leaving, seen, asked, now)
        case Change() as change:
            return _changed(course, change, seen, asked, now)


def _watched(course: Course, watch: Watch, seen: Seen, asked: Asked, now: float) -> tuple[Course, tuple[Effect, ...]]:
    if now < watch.until:
        return course, ()
    if seen.service is None:
        if now < watch.until + asked.within_s:
            return course, ()
        return _halted(course, _unanswered(course)), ()
    if course.before is None:
        return _turn(replace(course, before=_before(watch, seen, asked)), seen, asked, now)
    refusal, passing = judge(course.before, watch, seen, asked)
    if refusal is None:
        return _turn(course, seen, asked, now)
    if passing and now < watch.until + GRACE_S:
        return course, ()
    return _halted(course, replace(refusal, remedy=_onwards(course))), ()


def _turn(course: Course, seen: Seen, asked: Asked, now: float) -> tuple[Course, tuple[Effect, ...]]:
    """The next wave, where one is left."""
    wave = next_wave(seen.parts, asked)
    if not wave:
        left = tuple(part.name for part in seen.parts if part.version != asked.version)
        return replace(course, stage=Over(left)), _admitted(seen, asked)
    since = seen.service or Service()
    drained = tuple(part.name for part in seen.of(wave) if part.drains)
    if not drained:
        return replace(course, stage=Change(wave, now + asked.within_s, since)), (Install(wave),)
    return replace(course, stage=Empty(wave, now + asked.within_s, since)), (Drain(drained),)


def _emptied(course: Course, leaving: Empty, seen: Seen, asked: Asked, now: float) -> tuple[Course, tuple[Effect, ...]]:
    if seen.service is None and now < leaving.until:
        return course, ()
    if seen.service is None:
        return _halted(course, _unanswered(course)), ()
    full = [part for part in seen.of(leaving.wave) if part.replicas]
    told = {part.name: seen.leaving.get(part.name, Leaving()) for part in full}
    stuck = {name: each for name, each in told.items() if each.stays and not each.moving}
    late = now >= leaving.until
    tried = now >= leaving.until - asked.within_s + GRACE_S
    if full and not late and not (tried and len(stuck) == len(full)):
        return course, ()
    if full and not asked.in_place:
        why = next(
            (f"{name}: {each.stays[0]}" for name, each in stuck.items()),
            f"{', '.join(told)} not empty after {asked.within_s:g}s",
        )
        remedy = "make room for it, or --in-place: it is stopped with its node and comes back with it"
        halted = _halted(course, Refusal(Code.CONFLICT, why, "a node without replicas", remedy))
        return halted, (Admit(leaving.wave),)
    change = Change(leaving.wave, now + asked.within_s, leaving.since, stopped=bool(full))
    return replace(course, stage=change), (Install(leaving.wave),)


def _changed(course: Course, change: Change, seen: Seen, asked: Asked, now: float) -> tuple[Course, tuple[Effect, ...]]:
    hooks = {name: seen.hooks.get(name, Hook()) for name in change.wave}
    failed = next((f"{name}: {hook.failure}" for name, hook in hooks.items() if hook.failure), "")
    if failed:
        refusal = Refusal(Code.CONFLICT, failed, "a command that ends with status 0", _onwards(course))
        return _halted(course, refusal), ()
    parts = {part.name: part for part in seen.of(change.wave)}
    back = {
        name
        for name, part in parts.items()
        if part.ready and part.version == asked.version and not (change.stopped and part.loading)
    }
    if back == set(change.wave) and all(hook.ended for hook in hooks.values()):
        return _came_back(course, change, seen, asked, now)
    if now < change.until:
        return replace(course, stage=replace(change, back_at=None)), ()
    late = ", ".join(f"{name} {_said(parts.get(name), asked.version)}" for name in change.wave if name not in back)
    found = late or "the command has not ended"
    refusal = Refusal(Code.NODE_NOT_READY, found, f"{asked.version} within {asked.within_s:g}s", _onwards(course))
    return _halted(course, refusal), ()


def _came_back(
    course: Course, change: Change, seen: Seen, asked: Asked, now: float
) -> tuple[Course, tuple[Effect, ...]]:  # fmt: skip
    """Requests that failed because their replica was stopped, as was asked for, are not held against the version."""
    since = change.since
    if change.stopped:
        back_at = now if change.back_at is None else change.back_at
        if now < back_at + SETTLE_S or seen.service is None:
            return replace(course, stage=replace(change, back_at=back_at)), ()
        since = seen.service
    return replace(course, stage=Watch(change.wave, now + asked.hold_s, since)), (Admit(change.wave),)


def judge(before: Before, watch: Watch, seen: Seen, asked: Asked) -> tuple[Refusal | None, bool]:
    """What is worse than before the first wave, and whether it may yet pass."""
    if gone := sorted(before.nodes - seen.nodes):
        return Refusal(Code.GUARD_TRIPPED, f"not ready any more: {', '.join(gone)}", "all that were ready before"), True
    if wrong := sorted(seen.wrong - before.wrong):
        return Refusal(Code.GUARD_TRIPPED, f"shoal doctor: {wrong[0]}", "no check that fails since"), True
    service = seen.service or Service()
    requests, failed = service.requests - watch.since.requests, service.failed - watch.since.failed
    most = before.failed_share + asked.errors
    if failed and requests >= FEWEST and failed > most * requests:
        return Refusal(Code.GUARD_TRIPPED, f"{failed} of {requests} requests failed", f"at most {most:.2%}"), False
    for workload, p95_s in sorted(service.p95_s.items()):
        bound = before.p95_s.get(workload, 0.0) * asked.slower + SLACK_S
        if before.p95_s.get(workload) and p95_s > bound:
            found = f"{workload}: p95 {p95_s * 1e3:.1f} ms"
            return Refusal(Code.GUARD_TRIPPED, found, f"at most {bound * 1e3:.1f} ms"), True
    return None, False


def _before(watch: Watch, seen: Seen, asked: Asked) -> Before:
    service = seen.service or Service()
    requests, failed = service.requests - watch.since.requests, service.failed - watch.since.failed
    others = Counter(part.version for part in seen.parts if part.version not in ("", asked.version))
    versions = tuple(version for version, _ in others.most_common())
    share = failed / requests if requests >= FEWEST else 0.0
    return Before(versions, seen.nodes, seen.wrong, share, service.p95_s)


def _halted(course: Course, refusal: Refusal) -> Course:
    return replace(course, stage=Over(refusal=refusal))


def _unanswered(course: Course) -> Refusal:
    return Refusal(Code.COORDINATOR_UNREACHABLE, "no coordinator answers", "one that leads", _onwards(course))


def _onwards(course: Course) -> str:
    back = f"; back: --to {course.before.versions[0]}" if course.before is not None and course.before.versions else ""
    return f"see `shoal events` and `shoal logs`; on: the same command again{back}"


def _said(part: Part | None, version: str) -> str:
    if part is None:
        return "is not listed"
    if not part.ready:
        return "is not ready"
    if part.version != version:
        return f"still runs {part.version or 'what says no version'}"
    return f"has {part.loading} replicas that do not serve"
