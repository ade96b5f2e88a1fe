"""What is taken in the region: memory and time of devices, quotas of tenants. Replaced, never changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.coordinator.core.fleet.commitments import NOTHING, Committed, commitments
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.placement.standing import Standing
from shoal.types.units import Bytes
from shoal.types.workload import Intent


@dataclass(frozen=True, slots=True)
class Books:
    """memory: by device, of all assignments whatever becomes of them. busy: share of a device's time that declared
    traffic takes. replicas, bytes: by tenant."""

    memory: Mapping[Slot, Committed]
    busy: Mapping[Slot, float]
    replicas: Mapping[str, int]
    bytes: Mapping[str, int]

    def counted(self, scope: Scope, intent: Intent, standing: Standing, sign: int = 1) -> "Books":
        """With (sign -1: without) a current replica's traffic and quota. Its memory counts until it is gone."""
        busy = sign * busy_share(scope, intent, standing.option, intent.require.replicas)
        memory = sign * standing.assignment.memory_bytes
        return self._taken(intent.key.tenant, standing.slot, busy, sign, memory)

    def with_new(self, tenant: str, slot: Slot, memory: Bytes, busy: float) -> "Books":
        taken = self._taken(tenant, slot, busy, 1, memory)
        return replace(taken, memory={**self.memory, slot: self.memory.get(slot, NOTHING).plus(memory, loaded=False)})

    def _taken(self, tenant: str, slot: Slot, busy: float, replicas: int, memory: int) -> "Books":
        return replace(
            self,
            busy={**self.busy, slot: self.busy.get(slot, 0.0) + busy},
            replicas={**self.replicas, tenant: self.replicas.get(tenant, 0) + replicas},
            bytes={**self.bytes, tenant: self.bytes.get(tenant, 0) + memory},
        )


def opened(scope: Scope, standings: Iterable[tuple[Intent, tuple[Standing, ...]]]) -> Books:
    """As the desired sets stand: what runs keeps its place, whatever its priority (nothing is preempted)."""
    inputs = scope.inputs
    memory = {Slot(*slot): committed for slot, committed in commitments(inputs.fleet, inputs.desired).items()}
    books = Books(memory, {}, {}, {})
    for intent, current in standings:
        for standing in current:
            books = books.counted(scope, intent, standing)
    return books


def busy_share(scope: Scope, intent: Intent, option: Option, replicas: int) -> float:
    """Share of a device's time that one replica's declared traffic takes; 0 where none is declared (guide, eq. 9)."""
    if option.prediction is None:
        return 0.0
    rate = scope.replica_rate(intent, replicas)
    return rate * option.prediction.latency_p50_s.mid / max(1, option.device.parallelism)
