"""Memory and time of devices and quotas of tenants that are taken in the region. Values are replaced, never mutated."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from immutables import Map

from shoal.coordinator.core.fleet.commitments import NO_COMMITMENT, MemoryCommitment, commitments, memory_of
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Inputs, Reservation, Slot
from shoal.coordinator.core.placement.replicas import CurrentReplica, FailedReplica, WorkloadReplicas
from shoal.coordinator.core.placement.tenant_cost import NO_COST, TenantCost
from shoal.types.assignment import Assignment
from shoal.types.codes import Code
from shoal.types.device import Device
from shoal.types.units import Bytes
from shoal.types.workload import Intent, Quota, Standby, WorkloadKey

QUOTA_FREED_CODES = frozenset({Code.NODE_LOST, Code.NODE_UNKNOWN, Code.DEVICE_LOST, Code.POISONED})


EXACT: Final = 2.0**40
"""Shares of a device's time are rounded to multiples of 1/EXACT. Sums of such are exact up to MOST_EXACT, so that they
do not depend on their order, nor on what was added and taken out before."""
MOST_EXACT: Final = 2.0**12


Rank = tuple[int, WorkloadKey]
"""The order in which workloads are decided: descending priority, then by key."""


def rank_of(intent: Intent) -> Rank:
    return -intent.priority, intent.key


class StandingReplica(Protocol):
    """What a replica takes of which nothing has to be decided."""

    @property
    def slot(self) -> Slot: ...
    @property
    def assignment(self) -> Assignment: ...
    @property
    def memory(self) -> MemoryCommitment: ...
    @property
    def busy(self) -> float: ...
    @property
    def cost(self) -> TenantCost: ...


class QuotaUsage(NamedTuple):
    """What a tenant uses of its quota."""

    replicas: int = 0
    # Bytes committed to them.
    memory: int = 0
    # Cost of them, and of what other regions are to run.
    cost: TenantCost = NO_COST

    def with_replica(self, memory: int, cost: TenantCost, sign: int = 1) -> "QuotaUsage":
        """Adds (sign 1) or removes (sign -1) one replica. memory: bytes committed to it."""
        return QuotaUsage(self.replicas + sign, self.memory + sign * memory, self.cost.plus(cost, sign))


class Allocations(NamedTuple):
    """Capacity that is taken."""

    # Committed memory by device, of all assignments, whatever is decided about them.
    memory: Map[Slot, MemoryCommitment]
    # Share of each device's time that declared traffic takes. It may exceed 1.
    busy: Map[Slot, float]
    # Usage by tenant. Replicas of workloads that are not decided yet are included.
    quota_usage: Map[str, QuotaUsage]
    # Number of healthy replicas and of reservations on each device, which keep it awake.
    occupants: Map[Slot, int]
    # Of this, memory and time of each device that `memory_of` and `time_of` do not count; None: they count all.
    left_out: Callable[[Slot], tuple[Bytes, float]] | None = None

    def of_hardware(self, option: Option) -> tuple[MemoryCommitment, float]:
        """Memory that is taken by all devices that work in the option's, and time by all that run on its hardware."""
        return self.memory_of(option.state, option.device), self.time_of(option.state, option.device)

    def memory_of(self, state: NodeState, device: Device) -> MemoryCommitment:
        """Memory that is taken by all devices that work in this one's."""
        memory, slots = NO_COMMITMENT, [Slot(state.name, name) for name in state.same_memory(device)]
        for slot in slots:
            memory = memory.beside(self.memory.get(slot, NO_COMMITMENT))
        if self.left_out is not None:
            for slot in slots:
                memory = memory.minus(self.left_out(slot)[0])
        return memory

    def time_of(self, state: NodeState, device: Device) -> float:
        """Share of its time that is taken by all devices that run on this one's hardware."""
        slots = [Slot(state.name, name) for name in state.same_hardware(device)]
        busy = math.fsum(self.busy.get(slot, 0.0) for slot in slots)
        return busy if self.left_out is None else busy - math.fsum(self.left_out(slot)[1] for slot in slots)

    def with_standing(self, tenant: str, replica: StandingReplica, sign: int) -> "Allocations":
        """Adds (sign 1) or removes (sign -1) a replica of which nothing has to be decided."""
        slot, taken = replica.slot, replica.memory
        memory = self.memory.get(slot, NO_COMMITMENT).beside(taken if sign > 0 else -taken)
        used = self._with_usage(tenant, replica.assignment.memory_bytes, replica.cost, sign)
        return used._replace(
            memory=self.memory.set(slot, memory),
            busy=self.busy.set(slot, self.busy.get(slot, 0.0) + sign * replica.busy),
            occupants=self.occupants.set(slot, self.occupants.get(slot, 0) + sign),
        )

    def with_undecided(self, scope: Scope, intent: Intent, current: WorkloadReplicas, sign: int) -> "Allocations":
        """Adds (sign 1) or removes (sign -1) the replicas of a workload that is not decided yet.

        Failed replicas that may still run keep their share of the quota: a node that is silent for a while must not
        find it spent when it returns. Replicas that are lost or do not start have no share. Memory counts until they
        are gone.
        """
        if not (current.healthy or current.failed or intent.key in scope.inputs.awarded):
            return self
        allocations, tenant = self, intent.key.tenant
        for replica in current.healthy:
            allocations = allocations._with_replica(scope, intent, replica, sign)
        for failed in current.failed:
            if failed.refusal.code in QUOTA_FREED_CODES or failed.assignment.id in scope.inputs.broken_assignments:
                continue
            cost = TenantCost.of(scope.inputs.costs.get(Slot(failed.node, failed.assignment.device), math.nan))
            allocations = allocations._with_usage(tenant, failed.assignment.memory_bytes, cost, sign)
        here = allocations.usage(tenant).cost.plus(self.usage(tenant).cost, -1).times(sign)
        return allocations._with_cost(tenant, awarded_cost(scope.inputs, intent.key).beyond(here), sign)

    def without_workload(self, scope: Scope, intent: Intent, current: WorkloadReplicas) -> "Allocations":
        """As if this workload had no replica, and never had one."""
        memory = self.memory
        replicas: tuple[CurrentReplica | FailedReplica, ...] = (*current.healthy, *current.failed)
        for each in replicas:
            slot = Slot(each.node, each.assignment.device)
            state = scope.inputs.fleet.nodes.get(each.node)
            observed = None if state is None else state.observed.get(each.assignment.id)
            left = memory.get(slot, NO_COMMITMENT).minus(memory_of(each.assignment, observed))
            memory = memory.set(slot, left)
        return self.with_undecided(scope, intent, current, -1)._replace(memory=memory)

    def without_replica(self, scope: Scope, intent: Intent, replica: CurrentReplica) -> "Allocations":
        """As if this current replica were gone."""
        state = scope.inputs.fleet.nodes.get(replica.node)
        observed = None if state is None else state.observed.get(replica.assignment.id)
        freed = self.with_freed_memory(replica.slot, memory_of(replica.assignment, observed))
        return freed._with_replica(scope, intent, replica, -1)

    def _with_replica(self, scope: Scope, intent: Intent, replica: CurrentReplica, sign: int) -> "Allocations":
        busy = sign * busy_share(scope, intent, replica.option, intent.require.replicas)
        cost = TenantCost.of(replica.option.cost)
        used = self._with_usage(intent.key.tenant, replica.assignment.memory_bytes, cost, sign)
        slot = replica.slot
        return used._replace(
            busy=self.busy.set(slot, self.busy.get(slot, 0.0) + busy),
            occupants=self.occupants.set(slot, self.occupants.get(slot, 0) + sign),
        )

    def _with_usage(self, tenant: str, memory: int, cost: TenantCost, sign: int) -> "Allocations":
        usage = self.usage(tenant).with_replica(memory, cost, sign)
        return self._replace(quota_usage=self.quota_usage.set(tenant, usage))

    def usage(self, tenant: str) -> QuotaUsage:
        """What the tenant uses of its quota."""
        return self.quota_usage.get(tenant, QuotaUsage())

    def with_usage_of(self, tenant: str, replicas: Iterable[CurrentReplica]) -> "Allocations":
        """Adds these replicas to what the tenant uses of its quota, and to nothing else."""
        allocations = self
        for each in replicas:
            allocations = allocations._with_usage(
                tenant, each.assignment.memory_bytes, TenantCost.of(each.option.cost), 1
            )
        return allocations

    def with_awarded(self, scope: Scope, workload: WorkloadKey, here: TenantCost) -> "Allocations":
        """Adds what another region's service for a workload that was decided costs beyond its replicas here."""
        return self._with_cost(workload.tenant, awarded_cost(scope.inputs, workload).beyond(here), 1)

    def _with_cost(self, tenant: str, cost: TenantCost, sign: int) -> "Allocations":
        if cost == NO_COST:
            return self
        usage = self.usage(tenant)
        after = usage._replace(cost=usage.cost.plus(cost, sign))
        return self._replace(quota_usage=self.quota_usage.set(tenant, after))

    def with_kept_replica(self, scope: Scope, intent: Intent, replica: CurrentReplica) -> "Allocations":
        """Adds a current replica that was decided to stay."""
        return self._with_replica(scope, intent, replica, 1)

    def with_freed_memory(self, slot: Slot, memory: Bytes) -> "Allocations":
        """Frees `memory` bytes that are loaded on a device; a negative number takes them."""
        return self._replace(memory=self.memory.set(slot, self.memory.get(slot, NO_COMMITMENT).minus(memory)))

    def with_reservations(self, reservations: Sequence[Reservation], sign: int = 1) -> "Allocations":
        """Adds (sign 1) or removes (sign -1) capacity that is kept for a guest workload. It counts toward no quota."""
        if not reservations:
            return self
        memory, busy, occupants = self.memory, self.busy, self.occupants
        for each in reservations:
            kept = memory.get(each.slot, NO_COMMITMENT).plus(Bytes(sign * each.memory_bytes), loaded=False)
            memory = memory.set(each.slot, kept)
            busy = busy.set(each.slot, busy.get(each.slot, 0.0) + sign * each.busy)
            occupants = occupants.set(each.slot, occupants.get(each.slot, 0) + sign)
        return self._replace(memory=memory, busy=busy, occupants=occupants)

    def with_new_replica(self, tenant: str, option: Option, busy: float) -> "Allocations":
        """Adds a new replica that was decided."""
        slot, memory = option.slot, memory_requirement(option)
        return self._with_usage(tenant, memory, TenantCost.of(option.cost), 1)._replace(
            memory=self.memory.set(slot, self.memory.get(slot, NO_COMMITMENT).plus(memory, loaded=False)),
            busy=self.busy.set(slot, self.busy.get(slot, 0.0) + busy),
            occupants=self.occupants.set(slot, self.occupants.get(slot, 0) + 1),
        )


class Baseline:
    """Allocations of which one workload after the other is taken out: each once somebody asks what is left then."""

    def __init__(self, first: Callable[[], Allocations]) -> None:
        self._first = first
        self._steps: list[Callable[[Allocations], Allocations]] = []
        self._known: dict[int, Allocations] = {}

    def __len__(self) -> int:
        """Number of workloads that were taken out."""
        return len(self._steps)

    def take_out(self, step: Callable[[Allocations], Allocations]) -> None:
        self._steps.append(step)

    def at(self, number: int) -> Allocations:
        """Without the first `number` of them."""
        start = next((each for each in range(number, -1, -1) if each in self._known), None)
        left = self._first() if start is None else self._known[start]
        for step in self._steps[start or 0 : number]:
            left = step(left)
        self._known[number] = left
        return left


NO_ALLOCATIONS: Final = Allocations(Map(), Map(), Map(), Map())


@dataclass(frozen=True, slots=True)
class StandingReplicas:
    """Replicas of workloads of which nothing has to be decided, and which are not among the inputs."""

    # What they take.
    allocations: Allocations = NO_ALLOCATIONS
    # Memory and time that those of higher rank than this one take of a device.
    ahead: Callable[[Rank, Slot], tuple[Bytes, float]] = lambda _, __: (Bytes(0), 0.0)
    # Sum of their targets, as the hash of a plan has it.
    decided: int = 0

    def baseline(self, allocations: Allocations, intent: Intent) -> Allocations:
        """As if those of them that outrank the workload had no replicas."""
        if self is NOTHING_STANDS:
            return allocations
        rank = rank_of(intent)
        return allocations._replace(left_out=lambda slot: self.ahead(rank, slot))


NOTHING_STANDS: Final = StandingReplicas()


def initial_allocations(
    scope: Scope,
    workloads: Iterable[tuple[Intent, WorkloadReplicas]],
    standing: Allocations = NO_ALLOCATIONS,
) -> Allocations:
    """The allocations of the current desired sets, beside what stands. What runs or is promised keeps its place
    whatever its priority, because nothing is preempted."""
    inputs = scope.inputs
    memory = standing.memory
    for key, committed in commitments(inputs.fleet, inputs.desired).items():
        slot = Slot(*key)
        memory = memory.set(slot, memory.get(slot, NO_COMMITMENT).beside(committed))
    allocations = standing._replace(memory=memory).with_reservations(inputs.reserved)
    for slot, shared in _shared_memory(scope):
        allocations = allocations.with_freed_memory(slot, shared)
    asked = set[WorkloadKey]()
    for intent, current in workloads:
        asked.add(intent.key)
        allocations = allocations.with_undecided(scope, intent, current, 1)
    for workload in sorted(inputs.awarded.keys() - asked):  # deleted, and its agreement is not over yet
        allocations = allocations.with_awarded(scope, workload, NO_COST)
    return allocations


def awarded_cost(inputs: Inputs, workload: WorkloadKey) -> TenantCost:
    """Cost of a workload in the region that is to run it; nothing where none is.

    A workload that moves between regions runs in both for a while. As in a move between nodes one of the two counts:
    the dearer one.
    """
    if workload not in inputs.awarded:
        return NO_COST
    price = inputs.awarded[workload]
    return TenantCost.of(math.nan if price is None else price)


def _shared_memory(scope: Scope) -> Iterator[tuple[Slot, Bytes]]:
    """Memory to subtract for two replicas that are never loaded at the same time: the smaller of the two."""
    pairs = {(move.source, move.target): move for move in scope.placed_moves if move.gap}
    held = {
        one.id: (Slot(node, one.device), memory_of(one, None))
        for node, assignments in scope.inputs.desired.items()
        for one in assignments
    }
    for source, target in pairs:
        if source in held and target in held and held[source][0] == held[target][0]:
            yield held[source][0], min(held[source][1], held[target][1])


def busy_share(scope: Scope, intent: Intent, option: Option, replicas: int) -> float:
    """Share of a device's time that one replica's declared traffic takes; 0 without declared traffic (guide, eq. 9).
    It is at most MOST_EXACT, which no device has: a greater one would swallow others' in a sum."""
    if option.prediction is None:
        return 0.0
    rate = scope.replica_rate(intent, replicas)
    busy = rate * option.prediction.latency_p50_s.mid / max(1, option.device.parallelism)
    return busy if math.isnan(busy) else round(min(busy, MOST_EXACT) * EXACT) / EXACT


def memory_requirement(option: Option) -> Bytes:
    """Memory that is committed for a new replica: the upper end of the prediction."""
    return Bytes(0 if option.prediction is None else math.ceil(option.prediction.memory_bytes.high))


def wants_standby(intent: Intent) -> bool:
    """Whether the policy asks for one more replica, without requests."""
    return intent.require.standby is not Standby.NONE


class Holding(NamedTuple):
    """What replicas take of a quota that caps them."""

    replicas: int = 0
    # Bytes committed to them.
    memory: int = 0

    @classmethod
    def of(cls, replicas: Sequence[CurrentReplica]) -> "Holding":
        return cls(len(replicas), sum(each.assignment.memory_bytes for each in replicas))

    def plus(self, other: "Holding") -> "Holding":
        return Holding(self.replicas + other.replicas, self.memory + other.memory)

    def minus(self, other: "Holding") -> "Holding":
        return Holding(self.replicas - other.replicas, self.memory - other.memory)

    def exceeds(self, quota: Quota) -> bool:
        return (quota.replicas is not None and self.replicas > quota.replicas) or (
            quota.memory is not None and self.memory > quota.memory
        )


class UndecidedReplicas(NamedTuple):
    """A workload's current replicas before it is decided, and what its tenant's workloads of lower rank have."""

    # All that may stay.
    may_stay: tuple[CurrentReplica, ...]
    # As many of them as it asks for, in the order in which they are kept.
    wanted: tuple[CurrentReplica, ...]
    # All wanted ones of the workloads of lower rank but one of each.
    spare_below: Holding
    # That one of each.
    last_below: Holding

    @property
    def last(self) -> Holding:
        return Holding.of(self.wanted[:1])

    @property
    def spare(self) -> Holding:
        return Holding.of(self.wanted[1:])


class QuotaCaps:
    """How many of its current replicas each workload may keep.

    A tenant may run more than its quota after the quota was lowered or a lost node came back. Then the lowest-ranked
    workload with more than one replica gives one up, repeatedly. A last replica is given up only when all workloads
    have just one. What was decided stays.

    Workloads are decided by descending rank, some of them not at all. So what is given up before one's own replicas
    is all that those of lower rank can give, and for a last replica all spare ones that are not decided too: two sums
    each. A cap costs as many operations as the workload has replicas, however many its tenant has.
    """

    def __init__(self, scope: Scope, workloads: Sequence[tuple[Intent, WorkloadReplicas]]) -> None:
        """workloads: by descending rank."""
        self._quotas = {
            tenant: quota
            for tenant, quota in scope.inputs.quotas.items()
            if quota.replicas is not None or quota.memory is not None
        }
        self._workloads = dict[WorkloadKey, UndecidedReplicas]()
        spare, last = dict[str, Holding](), dict[str, Holding]()
        for intent, current in reversed(workloads):
            may_stay = (*_within_spread(intent, current.active), *current.standbys)
            wanted, tenant = may_stay[: intent.require.replicas + wants_standby(intent)], intent.key.tenant
            below = spare.get(tenant, Holding()), last.get(tenant, Holding())
            self._workloads[intent.key] = found = UndecidedReplicas(may_stay, wanted, *below)
            if tenant not in self._quotas:
                continue  # nothing is summed up where nothing is capped
            spare[tenant], last[tenant] = below[0].plus(found.spare), below[1].plus(found.last)
        self._spare = Map(spare)
        """By tenant that has a quota: the spare replicas of undecided workloads."""
        self._held = Map({tenant: each.plus(last[tenant]) for tenant, each in spare.items()})
        """By tenant that has a quota: what its workloads keep, all that they want where they are undecided."""

    def copy(self) -> "QuotaCaps":
        """The same, to be decided otherwise."""
        return copy(self)

    def of(self, workload: WorkloadKey) -> int:
        """The cap of a workload that is decided next."""
        own, tenant = self._workloads[workload], workload.tenant
        cap, quota = len(own.wanted), self._quotas.get(tenant)
        if quota is None:
            return cap
        left = self._held[tenant].minus(own.spare_below)
        while cap > 1 and left.exceeds(quota):
            cap -= 1
            left = left.minus(Holding.of(own.wanted[cap : cap + 1]))
        if cap != 1:
            return cap
        spare_above = self._spare[tenant].minus(own.spare_below).minus(own.spare)
        return 0 if left.minus(spare_above).minus(own.last_below).exceeds(quota) else 1

    def decide(self, workload: WorkloadKey, kept: Collection[str]) -> None:
        """These of its current replicas stay, by assignment id."""
        own, tenant = self._workloads[workload], workload.tenant
        if tenant not in self._quotas:
            return
        stays = Holding.of([each for each in own.may_stay if each.assignment.id in kept])
        self._held = self._held.set(tenant, self._held[tenant].minus(own.last).minus(own.spare).plus(stays))
        self._spare = self._spare.set(tenant, self._spare[tenant].minus(own.spare))


def _within_spread(intent: Intent, replicas: Sequence[CurrentReplica]) -> tuple[CurrentReplica, ...]:
    """The replicas that may coexist under the workload's spread rule."""
    places: dict[object, CurrentReplica] = {}
    for each in replicas:
        places.setdefault(each.option.domain(intent.require.spread) or each.assignment.id, each)
    return tuple(places.values())
