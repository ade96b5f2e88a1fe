"""Which devices must be measured again, because a policy wants younger receipts (`trust.within`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.types.assignment import Assignment
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import Intent, WorkloadKey

RENEW_AT: Final = 0.5
"""A receipt is renewed at this share of the age that a policy allows. What is left is for a node that is busy."""
LEAST_S: Final = Seconds(60.0)
"""A device is asked no more often, whatever a policy says: a probe takes some seconds of a core."""

DeviceKey = tuple[str, str]
"""Node and device."""


@dataclass(frozen=True, slots=True)
class MeasuringState:
    """What the region remembers of its requests. Not stored: a new leader asks once more."""

    # When each device was asked last.
    asked_at: Mapping[DeviceKey, Elapsed] = field(default_factory=dict)


def due_measurements(
    state: MeasuringState,
    fleet: Fleet,
    intents: Iterable[Intent],
    replicas: Iterable[tuple[str, Assignment]],
    now: Elapsed,
    wall: Wall,
) -> tuple[MeasuringState, Mapping[str, tuple[str, ...]]]:
    """The devices to measure now, by node, and the state in which they were asked. `replicas` come with their nodes,
    and are looked at only where a policy asks for young receipts.

    A workload has the devices measured that it runs on, and all while it has no replica, since it could run on any.
    Emulated devices are left out: their figures are a profile's, and no younger for being read again.
    """
    asking = [(each, within) for each in intents if (within := each.require.measured_within_s) is not None]
    if not asking:
        return state, {}
    found: dict[str, set[str]] = {}
    asked_at = {key: at for key, at in state.asked_at.items() if key[0] in fleet.nodes}
    placed: dict[WorkloadKey, set[DeviceKey]] = {}
    for name, one in replicas:
        placed.setdefault(one.workload, set()).add((name, one.device))
    for intent, within_s in asking:
        own = placed.get(intent.key, set())
        for name, node in fleet.nodes.items():
            for device in node.node.devices if node.liveness is Liveness.READY and node.connected else ():
                key, receipt = (name, device.name), node.receipts.get(device.name)
                if device.emulated or receipt is None or (own and key not in own):
                    continue
                pause_s = max(LEAST_S, RENEW_AT * within_s)
                is_old = wall - receipt.measured_at >= RENEW_AT * within_s
                if is_old and (key not in asked_at or now - asked_at[key] >= pause_s):
                    found.setdefault(name, set()).add(device.name)
    asked_at |= {(name, device): now for name, devices in found.items() for device in devices}
    return MeasuringState(asked_at), {name: tuple(sorted(devices)) for name, devices in sorted(found.items())}
