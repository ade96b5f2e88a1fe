"""What is taken in the region: memory and time of devices, quotas of tenants. Replaced, never changed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.coordinator.core.fleet.commitments import NOTHING, Committed, commitments, memory_of
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.coordinator.core.placement.standing import Current, Fallen, Standing
from shoal.types.codes import Code
from shoal.types.units import Bytes
from shoal.types.workload import Intent, Quota, Spread, Standby, WorkloadKey

CLAIM_ENDED = frozenset({Code.NODE_LOST, Code.NODE_UNKNOWN, Code.DEVICE_LOST, Code.POISONED})


class Held(NamedTuple):
    """What a tenant holds of its quota."""

    replicas: int = 0
    memory: int = 0

    def plus(self, replicas: int, memory: int) -> "Held":
        return Held(self.replicas + replicas, self.memory + memory)


@dataclass(frozen=True, slots=True)
class Books:
    """memory: by device, of all assignments whatever becomes of them. busy: share of a device's time that declared
    traffic takes. held: by tenant, with the replicas of workloads that are not decided yet."""

    memory: Mapping[Slot, Committed]
    busy: Mapping[Slot, float]
    held: Mapping[str, Held]

    def undecided(self, scope: Scope, intent: Intent, current: Current, sign: int) -> "Books":
        """With (sign 1) or without (-1) the replicas of a workload that is not decided yet. Of those that fell, what
        may still run keeps its share of the quota: a node that is silent for a while must not find it spent. What is
        lost or does not come up has none. Memory counts until they are gone.
        """
        books = self
        for standing in current.counted:
            books = books._with_standing(scope, intent, standing, sign)
        for fallen in current.fallen:
            if fallen.refusal.code in CLAIM_ENDED or fallen.assignment.id in scope.inputs.broken:
                continue
            held = _plus(books.held, intent.key.tenant, sign, sign * fallen.assignment.memory_bytes)
            books = replace(books, held=held)
        return books

    def without(self, scope: Scope, intent: Intent, current: Current) -> "Books":
        """As if this workload had no replica, and never had one."""
        memory = dict(self.memory)
        replicas: tuple[Standing | Fallen, ...] = (*current.counted, *current.fallen)
        for each in replicas:
            slot = Slot(each.node, each.assignment.device)
            state = scope.inputs.fleet.nodes.get(each.node)
            observed = None if state is None else state.observed.get(each.assignment.id)
            memory[slot] = memory.get(slot, NOTHING).less(memory_of(each.assignment, observed))
        return replace(self.undecided(scope, intent, current, -1), memory=memory)

    def _with_standing(self, scope: Scope, intent: Intent, standing: Standing, sign: int) -> "Books":
        busy = sign * busy_share(scope, intent, standing.option, intent.require.replicas)
        taken = sign * standing.assignment.memory_bytes
        return replace(
            self,
            busy={**self.busy, standing.slot: self.busy.get(standing.slot, 0.0) + busy},
            held=_plus(self.held, intent.key.tenant, sign, taken),
        )

    def kept(self, scope: Scope, intent: Intent, standing: Standing) -> "Books":
        """A current replica was decided to stay."""
        return self._with_standing(scope, intent, standing, 1)

    def freed(self, slot: Slot, memory: Bytes) -> "Books":
        """As if so much that is loaded on a device were not; negative: as if more were."""
        return replace(self, memory={**self.memory, slot: self.memory.get(slot, NOTHING).less(memory)})

    def reserving(self, reservations: Sequence[Reservation], sign: int = 1) -> "Books":
        """With (sign 1) or without (-1) room that is kept for a guest; it counts to nobody's quota."""
        if not reservations:
            return self
        memory, busy = dict(self.memory), dict(self.busy)
        for each in reservations:
            memory[each.slot] = memory.get(each.slot, NOTHING).plus(Bytes(sign * each.memory_bytes), loaded=False)
            busy[each.slot] = busy.get(each.slot, 0.0) + sign * each.busy
        return replace(self, memory=memory, busy=busy)

    def added(self, tenant: str, slot: Slot, memory: Bytes, busy: float) -> "Books":
        """A new replica was decided."""
        return Books(
            memory={**self.memory, slot: self.memory.get(slot, NOTHING).plus(memory, loaded=False)},
            busy={**self.busy, slot: self.busy.get(slot, 0.0) + busy},
            held=_plus(self.held, tenant, 1, memory),
        )


def _plus(held: Mapping[str, Held], tenant: str, replicas: int, memory: int) -> Mapping[str, Held]:
    return {**held, tenant: held.get(tenant, Held()).plus(replicas, memory)}


def opened(scope: Scope, workloads: Iterable[tuple[Intent, Current]]) -> Books:
    """As the desired sets stand: what runs, or is promised, keeps its place, whatever its priority (nothing is
    preempted)."""
    inputs = scope.inputs
    memory = {Slot(*slot): committed for slot, committed in commitments(inputs.fleet, inputs.desired).items()}
    books = Books(memory, {}, {}).reserving(inputs.reserved)
    for slot, shared in _shared(scope):
        books = books.freed(slot, shared)
    for intent, current in workloads:
        books = books.undecided(scope, intent, current, 1)
    return books


def _shared(scope: Scope) -> Iterator[tuple[Slot, Bytes]]:
    """What two replicas do not take at once, of which one is loaded only while the other is not."""
    pairs = {(move.source, move.target): move for move in scope.moving if move.gap}
    held = {
        one.id: (Slot(node, one.device), memory_of(one, None))
        for node, assignments in scope.inputs.desired.items()
        for one in assignments
    }
    for source, target in pairs:
        if source in held and target in held and held[source][0] == held[target][0]:
            yield held[source][0], min(held[source][1], held[target][1])


def busy_share(scope: Scope, intent: Intent, option: Option, replicas: int) -> float:
    """Share of a device's time that one replica's declared traffic takes; 0 where none is declared (guide, eq. 9)."""
    if option.prediction is None:
        return 0.0
    rate = scope.replica_rate(intent, replicas)
    return rate * option.prediction.latency_p50_s.mid / max(1, option.device.parallelism)


def wants_standby(intent: Intent) -> bool:
    """Whether one more replica is to be kept, without requests."""
    return intent.require.standby is not Standby.NONE


def quota_caps(scope: Scope, workloads: Sequence[tuple[Intent, Current]]) -> Mapping[WorkloadKey, int]:
    """How many of its current replicas each workload may keep. workloads: by descending rank.

    Where a tenant runs more than its quota (it was lowered, or a lost node came back) the workload of the lowest rank
    that has more than one gives one up, again and again; last ones are given up only when all have just one.
    """
    may_stay = {intent.key: (*_spread_out(intent, current.standing), *current.reserve) for intent, current in workloads}
    caps = {
        intent.key: min(len(may_stay[intent.key]), intent.require.replicas + wants_standby(intent))
        for intent, _ in workloads
    }
    for tenant, quota in scope.inputs.quotas.items():
        mine = [(key, standing) for key, standing in may_stay.items() if key.tenant == tenant]

        def over(mine: Sequence[tuple[WorkloadKey, tuple[Standing, ...]]] = mine, quota: Quota = quota) -> bool:
            kept = [each for key, standing in mine for each in standing[: caps[key]]]
            memory = sum(each.assignment.memory_bytes for each in kept)
            return (quota.replicas is not None and len(kept) > quota.replicas) or (
                quota.memory is not None and memory > quota.memory
            )

        while over():
            several = [key for key, _ in mine if caps[key] > 1]
            caps[(several or [key for key, _ in mine if caps[key] > 0])[-1]] -= 1
    return caps


def _spread_out(intent: Intent, standing: Sequence[Standing]) -> tuple[Standing, ...]:
    """Those that the spread lets stand together."""
    places: dict[object, Standing] = {}
    for each in standing:
        place = {Spread.NONE: each.assignment.id, Spread.DEVICE: each.slot, Spread.NODE: each.node}
        places.setdefault(place[intent.require.spread], each)
    return tuple(places.values())
