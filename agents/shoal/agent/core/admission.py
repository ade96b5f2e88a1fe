"""The last check before a load: does the device have the memory now, whatever the allocations say."""

from collections.abc import Collection, Iterable

from shoal.agent.core.assignment.states import Loading, State, Waking, Warming
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import show_bytes


def admit(
    assignment: Assignment,
    reading: Reading | None,
    silence: Refusal | None,
    states: Iterable[State],
    same_memory: Collection[str],
    worker_bytes: int = 0,
) -> Refusal | None:
    """Return None, or why the assignment must not load now: MEMORY_SHORT, DEVICE_LOST or DEVICE_UNREACHABLE.

    `reading` is of the assignment's device, just taken; None where the device cannot be read, and `silence` says why,
    or None where it answers and was not measured since it was lost.
    Memory that other assignments are loading into is not yet in its free bytes, so it is subtracted: of those on the
    devices `same_memory`, which work in the same. `worker_bytes`: what the process of the replica takes of the same
    memory before it has a model; its commitment is without that.
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
    begun = (state.loading if isinstance(state, Waking) else state for state in states)
    loading = sum(
        state.assignment.memory_bytes
        for state in begun
        if isinstance(state, Loading | Warming)
        and state.assignment.device in same_memory
        and state.assignment.id != assignment.id
    )
    free = reading.free_bytes - loading
    needed = assignment.memory_bytes + worker_bytes
    if needed <= free:
        return None
    found = f"{show_bytes(max(0, free))} free on {assignment.device}"
    return Refusal(Code.MEMORY_SHORT, found, show_bytes(needed), "free memory or choose another device")
