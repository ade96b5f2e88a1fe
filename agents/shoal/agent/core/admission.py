"""The last look before a load: does the device have the memory now, whatever the books say."""

from collections.abc import Iterable

from shoal.agent.core import assignment as machine
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import show_bytes


def admit(asked: Assignment, reading: Reading | None, states: Iterable[machine.State]) -> Refusal | None:
    """None, or MEMORY_SHORT. reading: of the assignment's device, just taken; None where it cannot be read.

    What other assignments are loading right now on the device is not yet in its free memory, so it is set aside.
    """
    if reading is None:
        return Refusal(Code.DEVICE_LOST, f"{asked.device} does not answer", "a device to load on", "check its driver")
    loading = sum(
        state.asked.memory_bytes
        for state in states
        if isinstance(state, machine.Loading | machine.Warming)
        and state.asked.device == asked.device
        and state.asked.id != asked.id
    )
    free = reading.free_bytes - loading
    if asked.memory_bytes <= free:
        return None
    found = f"{show_bytes(max(0, free))} free on {asked.device}"
    return Refusal(Code.MEMORY_SHORT, found, show_bytes(asked.memory_bytes), "free memory or choose another device")
