"""Replicas that do not start: counted, given up, and attributed to their cause."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.placement.model import Poisoning, Triple, requester_of
from shoal.coordinator.core.workloads.model import AssignmentStage, Crashes, ReconcilerMemory, Unloadable
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.units import Elapsed, Seconds

POISON_AFTER = 3
POISON_TENANTS = 2
"""A model that crashes with the requests of this many tenants is itself the cause."""
CRASH_MEMORY_S = Seconds(3600.0)
"""Crashes further apart than this are unrelated: the count starts over."""
FAILURES_MOST = 3
"""Failures of one assignment, apart from crashes, before another device is tried; its node keeps retrying meanwhile."""
UNSEEN_MOST_S = Seconds(30.0)
"""An assignment that its reporting node does not mention for this long was not accepted."""
START_LEAST_S = Seconds(900.0)
START_BYTES = 128 * 1024
"""Fetch, load and warm-up get 900 s plus a second for every 128 KiB of model: more than the node's own deadlines."""
STARTING_PHASES = frozenset({Phase.FETCHING, Phase.LOADING, Phase.WARMING})
FINAL_FAILURES = PERMANENT_LOAD_FAILURES | {Code.DEVICE_LOST, Code.POISONED, Code.VERIFY_FAILED, Code.VERIFY_IMPOSSIBLE}
"""Failures that a retry on the same device does not fix."""


def count_crashes(
    memory: ReconcilerMemory,
    fleet: Fleet,
    desired: Mapping[str, tuple[Assignment, ...]],
    now: Elapsed,
    models: Collection[str],
) -> tuple[Crashes, ...]:
    """Own-fault crashes across the fleet, with those that the nodes report now. A repeated report counts nothing.
    models: digests that the region has; crashes of others are dropped, as are few that are long ago.

    Counted by triple and by the requester whose requests may have caused them: a tenant can crash its own workers on
    purpose.
    """
    held = (
        frozenset(one.id for assignments in desired.values() for one in assignments) if memory.crashes else frozenset()
    )
    lasting = _lasting_guests(memory.crashes)
    known = {
        (each.triple, each.requester): kept
        for each in memory.crashes
        if each.triple.model in models
        and (kept := _relevant_crashes(each, memory.marks, held, now, lasting)) is not None
    }
    for node in sorted(desired):
        state = fleet.nodes.get(node)
        if state is None:
            continue
        for assignment in desired[node]:
            observed = state.observed.get(assignment.id)
            device = state.device(assignment.device)
            if observed is None or device is None or observed.phase is not Phase.FAILED:
                continue
            triple = Triple(assignment.model, device.provider, device.runtime_version)
            requester = "" if observed.crashed_at_load else requester_of(assignment.workload)
            before = known.get((triple, requester), Crashes(triple, 0, now, (), requester))
            event = (assignment.id, observed.restarts)
            if event in before.seen or observed.code not in (Code.WORKER_CRASHED, Code.POISONED):
                continue
            stale = now - before.last_at > CRASH_MEMORY_S
            count = 1 if stale and before.count < POISON_AFTER else before.count + 1
            if observed.code is Code.POISONED:
                count = max(count, POISON_AFTER)
            known[triple, requester] = Crashes(triple, count, now, (*before.seen, event), requester)
    return tuple(known[each] for each in sorted(known))


def _relevant_crashes(
    crashes: Crashes, marks: Collection[str], held: Collection[str], now: Elapsed, lasting: Collection[Crashes]
) -> Crashes | None:
    """The count without reports of assignments that are gone, which nobody repeats; None where it is of no more use.
    marks, held: assignments that exist.

    Another region may give its next agreement another name, so what is held against one ends too, but for `lasting`.
    """
    seen = tuple(each for each in crashes.seen if each[0] in marks or each[0] in held)
    may_end = crashes.count < POISON_AFTER or (_is_guest(crashes.requester) and crashes not in lasting)
    if not seen and may_end and now - crashes.last_at > CRASH_MEMORY_S:
        return None
    return crashes if len(seen) == len(crashes.seen) else replace(crashes, seen=seen)


def _lasting_guests(crashes: tuple[Crashes, ...]) -> frozenset[Crashes]:
    """Of each triple that crashed with a tenant's requests and with guests', the count of the newest guest: what these
    two show of the model holds for everybody, for as long as the tenant's count."""
    poisonous = [each for each in crashes if each.count >= POISON_AFTER and each.requester]
    with_tenant = {each.triple for each in poisonous if not _is_guest(each.requester)}
    guests = [each for each in poisonous if _is_guest(each.requester) and each.triple in with_tenant]
    newest = {each.triple: each for each in sorted(guests, key=lambda each: each.last_at)}
    return frozenset(newest.values())


def poisonings(crashes: tuple[Crashes, ...]) -> frozenset[Poisoning]:
    """Triples that are not placed, and for which requester: for everybody if it crashed at load, or with two
    tenants' requests."""
    found = {Poisoning(each.triple, each.requester) for each in crashes if each.count >= POISON_AFTER}
    # all guests count as one tenant, because other regions choose the names of their agreements
    tenants = {(each.triple, _tenant_of(each.requester)) for each in found if each.requester}
    counted = Counter(triple for triple, _ in tenants)
    return frozenset(found | {Poisoning(triple, "") for triple, count in counted.items() if count >= POISON_TENANTS})


def _tenant_of(requester: str) -> str:
    """Of what `requester_of` gives."""
    return requester.partition("/")[0]


def _is_guest(requester: str) -> bool:
    return _tenant_of(requester) == GUEST_TENANT


def describe_poisoning(poisoning: Poisoning) -> str:
    """Where the model is not placed, and for whom."""
    triple, requester = poisoning
    return f"{triple.provider} {triple.runtime_version}" + (f" for {requester}" if requester else "")


def clear_crashes(crashes: tuple[Crashes, ...], digest: str) -> tuple[Crashes, ...]:
    """The crash counts with this model's set to 0; a repeated report of a counted crash still counts nothing."""
    return tuple(replace(each, count=0) if each.triple.model == digest else each for each in crashes)


def record_unloadable(
    memory: ReconcilerMemory, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]], models: Collection[str]
) -> tuple[Unloadable, ...]:
    """Load failures that no retry on the same runtime changes, with those that the nodes report now. A replica that
    became ready disproves them. models: digests that the region has; failures of others are dropped."""
    known = {each.triple: each for each in memory.unloadable if each.triple.model in models}
    for node in sorted(desired):
        state = fleet.nodes.get(node)
        for assignment in desired[node] if state is not None else ():
            assert state is not None
            observed, device = state.observed.get(assignment.id), state.device(assignment.device)
            if observed is None or device is None:
                continue
            triple = Triple.of_assignment(assignment, device)
            if observed.phase is Phase.READY:
                known.pop(triple, None)
            elif (
                observed.phase is Phase.FAILED
                and observed.code is not None
                and observed.code in PERMANENT_LOAD_FAILURES
            ):
                before = known.get(triple)
                if before is None or (before.cleared and before.assignment != assignment.id):
                    refusal = Refusal(observed.code, f"{node}/{device.name}: {observed.reason}")
                    known[triple] = Unloadable(triple, refusal, assignment.id)
    return tuple(known[triple] for triple in sorted(known))


def load_refusals(known: tuple[Unloadable, ...]) -> Mapping[Triple, Refusal]:
    """Triples that are not placed, and why."""
    return {each.triple: each.refusal for each in known if not each.cleared}


def allow_retry(known: tuple[Unloadable, ...], digest: str) -> tuple[Unloadable, ...]:
    """The load failures with this model's cleared, so that it is tried again."""
    return tuple(replace(each, cleared=True) if each.triple.model == digest else each for each in known)


def excluded_places(memory: ReconcilerMemory, digest: str) -> tuple[str, ...]:
    """Where the model is not placed because it crashed there, or could not be loaded; in words."""
    poisoned = (each for each in sorted(poisonings(memory.crashes)) if each.triple.model == digest)
    refused = (each for each in sorted(load_refusals(memory.unloadable)) if each.model == digest)
    return (
        *(describe_poisoning(each) for each in poisoned),
        *(f"{each.provider} {each.runtime_version}" for each in refused),
    )


def with_retry(memory: ReconcilerMemory, digest: str) -> ReconcilerMemory:
    """The memory with nothing held against the model, so that it is tried again."""
    crashes, unloadable = clear_crashes(memory.crashes, digest), allow_retry(memory.unloadable, digest)
    return replace(memory, crashes=crashes, unloadable=unloadable)


def broken_assignments(
    memory: ReconcilerMemory, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]], now: Elapsed
) -> Mapping[str, Refusal]:
    """Assignments on ready, reporting nodes that no longer count as replicas, and why."""
    found = dict[str, Refusal]()
    for node, assignments in desired.items():
        state = fleet.nodes.get(node)
        if state is None or state.liveness is not Liveness.READY or not state.has_full_status:
            continue
        for assignment in assignments:
            observed = state.observed.get(assignment.id)
            mark = memory.marks.get(assignment.id)
            waited = now - mark.since if mark is not None and mark.stage is AssignmentStage.STARTING else 0.0
            where = f"{node}/{assignment.device}"
            if observed is None:
                if waited > UNSEEN_MOST_S:
                    found[assignment.id] = Refusal(Code.NODE_NOT_READY, f"{where} did not take it up")
            elif observed.phase is Phase.FAILED:
                code = observed.code or Code.INTERNAL
                if code in FINAL_FAILURES or (observed.restarts >= FAILURES_MOST and code is not Code.WORKER_CRASHED):
                    found[assignment.id] = Refusal(code, f"{where}: {observed.reason}")
            elif observed.phase in STARTING_PHASES and waited > START_LEAST_S + assignment.model_bytes / START_BYTES:
                found[assignment.id] = Refusal(Code.LOAD_TIMEOUT, f"{where} is {observed.phase} for too long")
    return found
