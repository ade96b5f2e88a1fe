"""The steps of `shoal upgrade`: parts are drained, get another version, and are watched, wave by wave.

Pure: observations and time in, effects out. No state needs to survive from one run to the next, because the versions
that parts run show how far the upgrade is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.types.codes import Code, Refusal

GRACE_S: Final = 20.0
"""Seconds after the hold for a temporary regression to pass, and for stuck replicas to start moving."""
MIN_REQUESTS: Final = 20
"""Fewest requests from which a share of failures is computed."""
SETTLE_S: Final = 5.0
"""Seconds after stopped replicas serve again until every front has reported the requests that failed meanwhile."""
P95_SLACK_S: Final = 0.005
"""Seconds by which any p95 may grow, however short it was."""


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """A node or a coordinator, as one observation shows it."""

    # Node name, or the coordinator's address.
    name: str
    # As the part itself reports it; empty if it does not answer.
    version: str
    # A node: liveness is ready and its front serves. A coordinator: it answers.
    ready: bool
    # Parts of a lower rank upgrade first; a wave never mixes ranks.
    rank: int = 0
    # Replicas placed on it now.
    replicas: int = 0
    # Those of `replicas` that do not serve yet.
    loading: int = 0
    # False for gateways and coordinators: they run no replicas and are upgraded without a drain.
    drains: bool = True


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far the drain of one part is."""

    # Moves that have a target, or wait for their turn.
    moving_count: int = 0
    # Replicas without a target, or that cannot leave, each with its reason.
    stuck: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstallHook:
    """The command that installs the version on one part."""

    is_done: bool = False
    # Why the command failed; empty if it succeeded or still runs.
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """What the region served."""

    # Since the first observation.
    requests: int = 0
    # Since the first observation.
    failed: int = 0
    # By workload: p95 latency in seconds of its slowest serving replica.
    p95_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutObservation:
    """What one observation of the region shows."""

    # The parts that are upgraded.
    parts: tuple[RolloutPart, ...]
    # All ready nodes, whichever component is upgraded.
    nodes: frozenset[str] = frozenset()
    # None while no coordinator answers.
    service: ServiceCounts | None = None
    # Failing checks of `shoal doctor`, where it was asked.
    wrong: frozenset[str] = frozenset()
    # Drain progress by node.
    leaving: Mapping[str, DrainProgress] = field(default_factory=dict)
    # Install command by part.
    hooks: Mapping[str, InstallHook] = field(default_factory=dict)

    def parts_in(self, wave: Iterable[str]) -> tuple[RolloutPart, ...]:
        return tuple(part for part in self.parts if part.name in set(wave))


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What the operator asked for."""

    # The version to install.
    version: str
    # Share of all parts that may change at once, 0 to 1; a wave never takes more than half of a rank.
    share: float = 0.1
    # Seconds to watch the baseline before the first wave, and to watch after each wave.
    hold_s: float = 30.0
    # Seconds for a wave's parts to become empty, and again for them to be back.
    within_s: float = 600.0
    # Share of requests that may fail beyond the baseline's share.
    max_error_share: float = 0.01
    # Factor by which a workload's p95 may exceed its baseline.
    max_slowdown: float = 2.0
    # True: replicas that cannot move away are stopped with their node.
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class RolloutBaseline:
    """The region before the first wave; later waves are compared with it."""

    # Other versions that parts ran, the most common first.
    versions: tuple[str, ...]
    # Ready nodes.
    nodes: frozenset[str]
    # Failing checks of `shoal doctor`.
    wrong: frozenset[str]
    # Share of requests that failed, 0 to 1; 0 if too few requests to tell.
    failed_share: float
    # By workload: p95 latency in seconds of its slowest serving replica.
    p95_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WatchStage:
    """The wave is done and watched for regressions."""

    # Parts that were changed; empty during the baseline, before the first wave.
    wave: tuple[str, ...]
    # Time at which the watch ends.
    until: float
    # Counts at its start.
    since: ServiceCounts


@dataclass(frozen=True, slots=True)
class DrainStage:
    """The wave's nodes are being drained."""

    # Parts being drained.
    wave: tuple[str, ...]
    # Time by which they have to be empty.
    until: float
    # Counts when the wave started.
    since: ServiceCounts


@dataclass(frozen=True, slots=True)
class InstallStage:
    """The version is being installed; the wave's parts have to come back."""

    # Parts being changed.
    wave: tuple[str, ...]
    # Time by which they have to be back.
    until: float
    # Counts from which the following watch compares.
    since: ServiceCounts
    # True if parts were stopped with replicas, which have to serve again.
    has_stopped_replicas: bool = False
    # Time since when all parts are back; None until then.
    back_at: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedStage:
    """The rollout is over."""

    # Parts that did not answer when their turn came.
    skipped: tuple[str, ...] = ()
    # Why it halted; None if it succeeded.
    refusal: Refusal | None = None


RolloutStage = WatchStage | DrainStage | InstallStage | FinishedStage


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where the rollout is."""

    stage: RolloutStage
    # None until the first watch is over.
    before: RolloutBaseline | None = None


@dataclass(frozen=True, slots=True)
class DrainNodes:
    wave: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InstallVersion:
    wave: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdmitNodes:
    """Uncordon these nodes."""

    wave: tuple[str, ...]


RolloutEffect = DrainNodes | InstallVersion | AdmitNodes


def begin(
    seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:
    """Start a rollout. Nodes that an earlier run upgraded but did not uncordon are uncordoned first."""
    service, finished = seen.service or ServiceCounts(), _admit_upgraded(seen, asked)
    if all(part.ready and part.version == asked.version for part in seen.parts):
        return RolloutState(FinishedStage()), finished
    return RolloutState(WatchStage((), now + asked.hold_s, service)), finished


def _admit_upgraded(seen: RolloutObservation, asked: RolloutOptions) -> tuple[AdmitNodes, ...]:
    """Uncordon every ready part with the new version, including nodes that an earlier run cordoned and that came back
    late."""
    finished = tuple(part.name for part in seen.parts if part.ready and part.version == asked.version)
    return (AdmitNodes(finished),) if finished else ()


def waves(parts: Iterable[RolloutPart], asked: RolloutOptions) -> tuple[tuple[str, ...], ...]:
    """The waves to come if nothing changes: one part alone, then `share` of all at once, those with the fewest replicas
    first."""
    left, planned = tuple(parts), []
    while wave := next_wave(left, asked):
        planned.append(wave)
        left = tuple(replace(part, version=asked.version) if part.name in wave else part for part in left)
    return tuple(planned)


def next_wave(parts: tuple[RolloutPart, ...], asked: RolloutOptions) -> tuple[str, ...]:
    """The next parts to change, of those that are ready and run another version; empty: none are left."""
    due = [part for part in parts if part.ready and part.version != asked.version]
    if not due:
        return ()
    rank = min(part.rank for part in due)
    alike = [part for part in parts if part.rank == rank]
    first = not any(part.version == asked.version for part in parts)
    count = 1 if first else max(1, min(int(asked.share * len(alike)), len(alike) // 2))
    chosen = sorted((part for part in due if part.rank == rank), key=lambda part: (part.replicas, part.name))
    return tuple(part.name for part in chosen[:count])


def step(
    course: RolloutState, seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:
    """One step: the new state, and the effects to perform."""
    match course.stage:
        case FinishedStage():
            return course, ()
        case WatchStage() as watch:
            return _step_watch(course, watch, seen, asked, now)
        case DrainStage() as leaving:
            return _step_drain(course, leaving, seen, asked, now)
        case InstallStage() as change:
            return _step_install(course, change, seen, asked, now)


def _step_watch(
    course: RolloutState, watch: WatchStage, seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:
    if now < watch.until:
        return course, ()
    if seen.service is None:
        if now < watch.until + asked.within_s:
            return course, ()
        return _halt(course, _no_coordinator(course)), ()
    if course.before is None:
        return _start_next_wave(replace(course, before=_measure_baseline(watch, seen, asked)), seen, asked, now)
    refusal, passing = find_regression(course.before, watch, seen, asked)
    if refusal is None:
        return _start_next_wave(course, seen, asked, now)
    if passing and now < watch.until + GRACE_S:
        return course, ()
    return _halt(course, replace(refusal, remedy=_how_to_continue(course))), ()


def _start_next_wave(
    course: RolloutState, seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:
    """Start the next wave, or finish."""
    wave = next_wave(seen.parts, asked)
    if not wave:
        left = tuple(part.name for part in seen.parts if part.version != asked.version)
        return replace(course, stage=FinishedStage(left)), _admit_upgraded(seen, asked)
    since = seen.service or ServiceCounts()
    drained = tuple(part.name for part in seen.parts_in(wave) if part.drains)
    if not drained:
        return replace(course, stage=InstallStage(wave, now + asked.within_s, since)), (InstallVersion(wave),)
    return replace(course, stage=DrainStage(wave, now + asked.within_s, since)), (DrainNodes(drained),)


def _step_drain(
    course: RolloutState, leaving: DrainStage, seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:
    if seen.service is None and now < leaving.until:
        return course, ()
    if seen.service is None:
        return _halt(course, _no_coordinator(course)), ()
    full = [part for part in seen.parts_in(leaving.wave) if part.replicas]
    told = {part.name: seen.leaving.get(part.name, DrainProgress()) for part in full}
    stuck = {name: each for name, each in told.items() if each.stuck and not each.moving_count}
    late = now >= leaving.until
    tried = now >= leaving.until - asked.within_s + GRACE_S
    if full and not late and not (tried and len(stuck) == len(full)):
        return course, ()
    if full and not asked.in_place:
        why = next(
            (f"{name}: {each.stuck[0]}" for name, each in stuck.items()),
            f"{', '.join(told)} not empty after {asked.within_s:g}s",
        )
        remedy = "make room for it, or --in-place: it is stopped with its node and comes back with it"
        halted = _halt(course, Refusal(Code.CONFLICT, why, "a node without replicas", remedy))
        return halted, (AdmitNodes(leaving.wave),)
    change = InstallStage(leaving.wave, now + asked.within_s, leaving.since, has_stopped_replicas=bool(full))
    return replace(course, stage=change), (InstallVersion(leaving.wave),)


def _step_install(
    course: RolloutState, change: InstallStage, seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:
    hooks = {name: seen.hooks.get(name, InstallHook()) for name in change.wave}
    failed = next((f"{name}: {hook.failure}" for name, hook in hooks.items() if hook.failure), "")
    if failed:
        refusal = Refusal(Code.CONFLICT, failed, "a command that ends with status 0", _how_to_continue(course))
        return _halt(course, refusal), ()
    parts = {part.name: part for part in seen.parts_in(change.wave)}
    back = {
        name
        for name, part in parts.items()
        if part.ready and part.version == asked.version and not (change.has_stopped_replicas and part.loading)
    }
    if back == set(change.wave) and all(hook.is_done for hook in hooks.values()):
        return _end_install(course, change, seen, asked, now)
    if now < change.until:
        return replace(course, stage=replace(change, back_at=None)), ()
    late = ", ".join(
        f"{name} {_describe_part(parts.get(name), asked.version)}" for name in change.wave if name not in back
    )
    found = late or "the command has not ended"
    refusal = Refusal(
        Code.NODE_NOT_READY, found, f"{asked.version} within {asked.within_s:g}s", _how_to_continue(course)
    )
    return _halt(course, refusal), ()


def _end_install(
    course: RolloutState, change: InstallStage, seen: RolloutObservation, asked: RolloutOptions, now: float
) -> tuple[RolloutState, tuple[RolloutEffect, ...]]:  # fmt: skip
    """Start the watch. Failures of replicas that were stopped on request do not count against the version."""
    since = change.since
    if change.has_stopped_replicas:
        back_at = now if change.back_at is None else change.back_at
        if now < back_at + SETTLE_S or seen.service is None:
            return replace(course, stage=replace(change, back_at=back_at)), ()
        since = seen.service
    return replace(course, stage=WatchStage(change.wave, now + asked.hold_s, since)), (AdmitNodes(change.wave),)


def find_regression(
    before: RolloutBaseline, watch: WatchStage, seen: RolloutObservation, asked: RolloutOptions
) -> tuple[Refusal | None, bool]:
    """(what is worse than before the first wave, None if nothing; whether it may still pass by itself)."""
    if gone := sorted(before.nodes - seen.nodes):
        return Refusal(Code.GUARD_TRIPPED, f"not ready any more: {', '.join(gone)}", "all that were ready before"), True
    if wrong := sorted(seen.wrong - before.wrong):
        return Refusal(Code.GUARD_TRIPPED, f"shoal doctor: {wrong[0]}", "no check that fails since"), True
    service = seen.service or ServiceCounts()
    requests, failed = service.requests - watch.since.requests, service.failed - watch.since.failed
    most = before.failed_share + asked.max_error_share
    if failed and requests >= MIN_REQUESTS and failed > most * requests:
        return Refusal(Code.GUARD_TRIPPED, f"{failed} of {requests} requests failed", f"at most {most:.2%}"), False
    for workload, p95_s in sorted(service.p95_s.items()):
        bound = before.p95_s.get(workload, 0.0) * asked.max_slowdown + P95_SLACK_S
        if before.p95_s.get(workload) and p95_s > bound:
            found = f"{workload}: p95 {p95_s * 1e3:.1f} ms"
            return Refusal(Code.GUARD_TRIPPED, found, f"at most {bound * 1e3:.1f} ms"), True
    return None, False


def _measure_baseline(watch: WatchStage, seen: RolloutObservation, asked: RolloutOptions) -> RolloutBaseline:
    service = seen.service or ServiceCounts()
    requests, failed = service.requests - watch.since.requests, service.failed - watch.since.failed
    others = Counter(part.version for part in seen.parts if part.version not in ("", asked.version))
    versions = tuple(version for version, _ in others.most_common())
    share = failed / requests if requests >= MIN_REQUESTS else 0.0
    return RolloutBaseline(versions, seen.nodes, seen.wrong, share, service.p95_s)


def _halt(course: RolloutState, refusal: Refusal) -> RolloutState:
    return replace(course, stage=FinishedStage(refusal=refusal))


def _no_coordinator(course: RolloutState) -> Refusal:
    return Refusal(Code.COORDINATOR_UNREACHABLE, "no coordinator answers", "one that leads", _how_to_continue(course))


def _how_to_continue(course: RolloutState) -> str:
    back = f"; back: --to {course.before.versions[0]}" if course.before is not None and course.before.versions else ""
    return f"see `shoal events` and `shoal logs`; on: the same command again{back}"


def _describe_part(part: RolloutPart | None, version: str) -> str:
    if part is None:
        return "is not listed"
    if not part.ready:
        return "is not ready"
    if part.version != version:
        return f"still runs {part.version or 'what says no version'}"
    return f"has {part.loading} replicas that do not serve"
