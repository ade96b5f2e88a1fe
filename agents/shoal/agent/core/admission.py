"""The last check before a load: does the device have the memory now, whatever the allocations say."""

from collections.abc import Callable, Collection, Iterable

from shoal.agent.core.assignment.states import Draining, Loading, Ready, State, Unloading, Verifying, Waking, Warming
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import show_bytes

MayShare = Callable[[Assignment, Collection[Assignment]], bool]
"""Whether an assignment would join a worker that holds these."""


def is_shared_alike(new: Assignment, held: Collection[Assignment]) -> bool:
    """Whether all are to share workers, of one tenant on one device. Never if `held` is empty."""
    kin = {(one.workload.tenant, one.device, one.shared_worker) for one in held}
    return new.shared_worker and kin == {(new.workload.tenant, new.device, True)}


def admit(
    assignment: Assignment,
    reading: Reading | None,
    silence: Refusal | None,
    states: Iterable[State],
    same_memory: Collection[str],
    worker_bytes: int = 0,
    may_share: MayShare = is_shared_alike,
) -> Refusal | None:
    """Return None, or why the assignment must not load now: MEMORY_SHORT, DEVICE_LOST or DEVICE_UNREACHABLE.

    `reading` is of the assignment's device, just taken; None where the device cannot be read, and `silence` says why,
    or None where it answers and was not measured since it was lost.
    Memory that other assignments are loading into is not yet in its free bytes, so it is subtracted: of those on the
    devices `same_memory`, which work in the same. `worker_bytes`: what the process of the replica takes of the same
    memory before it has a model; its commitment is without that. may_share: what of a worker's provider counts once
    where several join it, those of `states` that are loaded among them.
    """
    if reading is None:
        # A driver that does not answer says nothing of its device: this node tries again, the region nowhere else yet.
        code = Code.DEVICE_UNREACHABLE if silence and silence.code is Code.DEVICE_UNREACHABLE else Code.DEVICE_LOST
        if silence is None:  # it answers again, and what it can do now is unknown
            found = f"{assignment.device} was lost, and is not measured again yet"
            return Refusal(code, found, "a device to load on", "wait: it is tried again by itself")
        found = silence.found
        if not found.startswith(f"{assignment.device} does not answer"):
            found = f"{assignment.device} does not answer: {found}"
        return Refusal(code, found, "a device to load on", "check its driver")
    others = [state for state in states if state.assignment.id != assignment.id]
    begun = [
        state.assignment
        for state in (each.loading if isinstance(each, Waking) else each for each in others)
        if isinstance(state, Loading | Warming) and state.assignment.device in same_memory
    ]
    loading = _bytes_to_load(begun, others, may_share)
    free = reading.free_bytes - loading
    needed = _bytes_to_load([*begun, assignment], others, may_share) - loading + worker_bytes
    if needed <= free:
        return None
    found = f"{show_bytes(max(0, free))} free on {assignment.device}"
    return Refusal(Code.MEMORY_SHORT, found, show_bytes(needed), "free memory or choose another device")


def _bytes_to_load(begun: Iterable[Assignment], states: Iterable[State], may_share: MayShare) -> int:
    """What loads that have begun take, in workers as they would be chosen: the first model of each takes what its
    provider does, which is in use already in those that have a loaded one."""
    workers = list[list[Assignment]]()
    for state in states:
        if isinstance(state, Verifying | Ready | Unloading | Draining):
            _join(workers, state.assignment, may_share)
    total = 0
    for each in begun:
        has_provider = _join(workers, each, may_share)
        total += each.memory_bytes - (each.provider_bytes if has_provider else 0)
    return total


def _join(workers: list[list[Assignment]], new: Assignment, may_share: MayShare) -> bool:
    """Put it into the first worker that it may share; False: into one of its own."""
    held = next((each for each in workers if may_share(new, each)), None)
    if held is None:
        workers.append([new])
    else:
        held.append(new)
    return held is not None
