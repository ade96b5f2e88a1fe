"""Replicas that do not come up: counted, given up, and blamed on what is to blame."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.placement.model import Triple
from shoal.coordinator.core.workloads.model import Crashes, Memory, Stage
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.units import Elapsed, Seconds

POISON_AFTER = 3
CRASH_MEMORY_S = Seconds(3600.0)
"""Crashes further apart than this are not one story: counting begins anew."""
FAILURES_MOST = 3
"""Failures of one assignment, crashes aside, before another device is tried; its node goes on trying meanwhile."""
UNSEEN_MOST_S = Seconds(30.0)
"""An assignment that its reporting node does not mention for so long was not taken up."""
START_LEAST_S = Seconds(900.0)
START_BYTES = 128 * 1024
"""Fetch, load and warm-up get 900 s and a second for every 128 KiB of model: more than the node's own deadlines."""
COMING_UP = frozenset({Phase.FETCHING, Phase.LOADING, Phase.WARMING})
AT_ONCE = frozenset({Code.DEVICE_LOST, Code.POISONED, Code.VERIFY_FAILED, Code.VERIFY_IMPOSSIBLE})
"""Failures that another try on the same device does not mend."""


def crashes(
    memory: Memory, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]], now: Elapsed
) -> tuple[Crashes, ...]:
    """Own-fault crashes by triple, across the fleet, with those that the nodes report now. A replay counts nothing."""
    known = {each.triple: each for each in memory.crashes}
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
            before = known.get(triple, Crashes(triple, 0, now, ()))
            event = (assignment.id, observed.restarts)
            if event in before.seen or observed.code not in (Code.WORKER_CRASHED, Code.POISONED):
                continue
            stale = now - before.last_at > CRASH_MEMORY_S
            count = 1 if stale and before.count < POISON_AFTER else before.count + 1
            if observed.code is Code.POISONED:
                count = max(count, POISON_AFTER)
            known[triple] = Crashes(triple, count, now, (*before.seen, event))
    return tuple(known[triple] for triple in sorted(known))


def poisoned(crashes: tuple[Crashes, ...]) -> frozenset[Triple]:
    """Triples that are placed nowhere: until model, provider or runtime version changes."""
    return frozenset(each.triple for each in crashes if each.count >= POISON_AFTER)


def cleared(crashes: tuple[Crashes, ...], digest: str) -> tuple[Crashes, ...]:
    """With nothing held against this model; a replay of what was counted still counts nothing."""
    return tuple(replace(each, count=0) if each.triple.model == digest else each for each in crashes)


def broken(
    memory: Memory, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]], now: Elapsed
) -> Mapping[str, Refusal]:
    """Assignments that do not count as replicas any more, with the reason; their nodes are heard and ready."""
    found = dict[str, Refusal]()
    for node, assignments in desired.items():
        state = fleet.nodes.get(node)
        if state is None or state.liveness is not Liveness.READY or not state.reported:
            continue
        for assignment in assignments:
            observed = state.observed.get(assignment.id)
            mark = memory.marks.get(assignment.id)
            waited = now - mark.since if mark is not None and mark.stage is Stage.STARTING else 0.0
            where = f"{node}/{assignment.device}"
            if observed is None:
                if waited > UNSEEN_MOST_S:
                    found[assignment.id] = Refusal(Code.NODE_NOT_READY, f"{where} did not take it up")
            elif observed.phase is Phase.FAILED:
                code = observed.code or Code.INTERNAL
                if code in AT_ONCE or (observed.restarts >= FAILURES_MOST and code is not Code.WORKER_CRASHED):
                    found[assignment.id] = Refusal(code, f"{where}: {observed.reason}")
            elif observed.phase in COMING_UP and waited > START_LEAST_S + assignment.model_bytes / START_BYTES:
                found[assignment.id] = Refusal(Code.LOAD_TIMEOUT, f"{where} is {observed.phase} for too long")
    return found
