"""Which devices are to sleep: those that can, and have had nothing on them or reserved for them for a while.

An assignment wakes its device: the node wakes it before it loads. `schedule` and the triggers decide how early. The
region decides whether devices may sleep at all (`Region.spec.sleep`).
"""

from collections.abc import Iterable, Mapping
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.coordinator.core.workloads.model import DesiredContent, RegionEvent
from shoal.types.assignment import Assignment, Phase
from shoal.types.units import Elapsed, Seconds, show_joules

SLEEP_EVENT: Final = "DEVICE_SLEEPS"
WAKE_EVENT: Final = "DEVICE_WAKES"


def idle_since(
    fleet: Fleet,
    desired: Mapping[str, tuple[Assignment, ...]],
    reserved: Iterable[Reservation],
    before: Mapping[str, Elapsed],
    now: Elapsed,
) -> Mapping[str, Elapsed]:
    """Since when nothing has been on each device that can sleep, by `NODE/DEVICE`. Replicas that the node still has
    count."""
    taken = {Slot(node, each.device) for node, assignments in desired.items() for each in assignments}
    taken |= {each.slot for each in reserved}
    taken |= {
        Slot(name, each.device)
        for name, state in fleet.nodes.items()
        for each in state.observed.values()
        if each.phase is not Phase.GONE
    }
    return {
        _name(slot): before.get(_name(slot), now)
        for slot in sorted(_sleep_capable(fleet))
        if slot not in taken
    }  # fmt: skip


def devices_to_sleep(
    since: Mapping[str, Elapsed], after_s: Seconds | None, now: Elapsed
) -> Mapping[str, tuple[str, ...]]:
    """Devices that are to sleep, by node. since: from `idle_since`. after_s: None: none may sleep."""
    found = dict[str, list[str]]()
    for name, at in since.items():
        if after_s is not None and now - at >= after_s:
            node, _, device = name.partition("/")
            found.setdefault(node, []).append(device)
    return {node: tuple(devices) for node, devices in found.items()}


def next_due(since: Mapping[str, Elapsed], after_s: Seconds | None, now: Elapsed) -> Seconds | None:
    """Seconds until the next device is to sleep by time alone; None: none is."""
    left = [] if after_s is None else [at + after_s - now for at in since.values() if at + after_s > now]
    return Seconds(min(left)) if left else None


def sleep_events(
    fleet: Fleet, before: Mapping[str, DesiredContent], after: Mapping[str, DesiredContent]
) -> tuple[RegionEvent, ...]:
    """Devices that are to sleep or wake from now on, with the power that sleeping saves or the energy that it saved."""
    events = list[RegionEvent]()
    for node, content in sorted(after.items()):
        slept = before[node].asleep if node in before else ()
        state = fleet.nodes.get(node)
        for name in sorted({*content.asleep} ^ {*slept}):
            device = state.device(name) if state is not None else None
            reading = state.readings.get(name) if state is not None else None
            if name in content.asleep and device is not None and device.rest is not None:
                rest = device.rest
                spared = f"nothing on it: {rest.asleep_w:.0f} W for {rest.idle_w:.0f} W"
                events.append(RegionEvent(SLEEP_EVENT, f"{node}/{name}", spared, node, None))
            elif name not in content.asleep:
                saved = f"it has saved {show_joules(reading.saved_j)} so far" if reading is not None else ""
                events.append(RegionEvent(WAKE_EVENT, f"{node}/{name}", saved, node, None))
    return tuple(events)


def _sleep_capable(fleet: Fleet) -> frozenset[Slot]:
    return frozenset(
        Slot(name, device.name)
        for name, state in fleet.nodes.items()
        for device in state.node.devices
        if device.rest is not None
    )


def _name(slot: Slot) -> str:
    return f"{slot.node}/{slot.device}"
