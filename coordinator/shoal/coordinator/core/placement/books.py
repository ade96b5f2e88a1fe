"""What is taken in the region: memory and time of devices, quotas of tenants. Replaced, never changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.coordinator.core.fleet.commitments import NOTHING, Committed, commitments
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.placement.standing import Standing
from shoal.types.units import Bytes
from shoal.types.workload import Intent


class Held(NamedTuple):
    """What a tenant holds of its quota."""

    replicas: int = 0
    memory: int = 0

    def plus(self, replicas: int, memory: int) -> "Held":
        return Held(self.replicas + replicas, self.memory + memory)


@dataclass(frozen=True, slots=True)
class Books:
    """memory: by device, of all assignments whatever becomes of them. busy: share of a device's time that declared
    traffic takes. By tenant: held, with the replicas of workloads that are not decided yet; decided, without them."""

    memory: Mapping[Slot, Committed]
    busy: Mapping[Slot, float]
    held: Mapping[str, Held]
    decided: Mapping[str, Held]

    def undecided(self, scope: Scope, intent: Intent, standing: Standing, sign: int) -> "Books":
        """With (sign 1) or without (-1) a current replica whose workload is not decided yet. Its memory counts always,
        until it is gone."""
        busy = sign * busy_share(scope, intent, standing.option, intent.require.replicas)
        taken = sign * standing.assignment.memory_bytes
        return replace(
            self,
            busy={**self.busy, standing.slot: self.busy.get(standing.slot, 0.0) + busy},
            held=_plus(self.held, intent.key.tenant, sign, taken),
        )

    def kept(self, scope: Scope, intent: Intent, standing: Standing) -> "Books":
        """A current replica was decided to stay."""
        taken = standing.assignment.memory_bytes
        decided = _plus(self.decided, intent.key.tenant, 1, taken)
        return replace(self.undecided(scope, intent, standing, 1), decided=decided)

    def added(self, tenant: str, slot: Slot, memory: Bytes, busy: float) -> "Books":
        """A new replica was decided."""
        return Books(
            memory={**self.memory, slot: self.memory.get(slot, NOTHING).plus(memory, loaded=False)},
            busy={**self.busy, slot: self.busy.get(slot, 0.0) + busy},
            held=_plus(self.held, tenant, 1, memory),
            decided=_plus(self.decided, tenant, 1, memory),
        )


def _plus(held: Mapping[str, Held], tenant: str, replicas: int, memory: int) -> Mapping[str, Held]:
    return {**held, tenant: held.get(tenant, Held()).plus(replicas, memory)}


def opened(scope: Scope, standings: Iterable[tuple[Intent, tuple[Standing, ...]]]) -> Books:
    """As the desired sets stand: what runs keeps its place, whatever its priority (nothing is preempted)."""
    inputs = scope.inputs
    memory = {Slot(*slot): committed for slot, committed in commitments(inputs.fleet, inputs.desired).items()}
    books = Books(memory, {}, {}, {})
    for intent, current in standings:
        for standing in current:
            books = books.undecided(scope, intent, standing, 1)
    return books


def busy_share(scope: Scope, intent: Intent, option: Option, replicas: int) -> float:
    """Share of a device's time that one replica's declared traffic takes; 0 where none is declared (guide, eq. 9)."""
    if option.prediction is None:
        return 0.0
    rate = scope.replica_rate(intent, replicas)
    return rate * option.prediction.latency_p50_s.mid / max(1, option.device.parallelism)
