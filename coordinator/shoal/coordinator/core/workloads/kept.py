"""What earlier steps decided and what still holds, so that a step decides about what changed.

A workload is settled when its replicas serve, nothing about it waits, and the same inputs give the same whatever the
time is. It is decided about again once one of its inputs changes: its documents, its model, a node that holds it, its
tenant's quota, or what holds for the whole region. All other workloads are decided about in every step. What is settled
takes part in placement by what it takes of devices and quotas.

That nothing else could change a decision is audited: steps decide about a few settled workloads again, and each search
checks what columns say of a few nodes, in turn. If one comes out otherwise, everything is decided again.

Nothing here is stored: without it, a step decides about everything, and comes to the same.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from immutables import Map

from shoal.coordinator.core.fleet.commitments import NO_COMMITMENT, MemoryCommitment, is_loaded, memory_of
from shoal.coordinator.core.fleet.labels import ENTRY_LABEL
from shoal.coordinator.core.fleet.state import DEFAULT_PARTITION, Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.allocations import (
    NO_ALLOCATIONS,
    NOTHING_STANDS,
    Allocations,
    Rank,
    StandingReplicas,
    rank_of,
)
from shoal.coordinator.core.placement.changes import is_same, is_same_host
from shoal.coordinator.core.placement.columns import DeviceColumns, Preparation
from shoal.coordinator.core.placement.model import Slot, WorkloadPlan
from shoal.coordinator.core.placement.tenant_cost import TenantCost
from shoal.coordinator.core.prediction.region_residuals import region_residuals
from shoal.coordinator.core.workloads.changed import difference
from shoal.coordinator.core.workloads.entries import EntryPoints
from shoal.coordinator.core.workloads.model import (
    AssignmentStage,
    Decision,
    DesiredContent,
    MigrationEffects,
    ReconcilerMemory,
    RegionState,
)
from shoal.coordinator.core.workloads.schedule import depends_on_time, is_time_dependent
from shoal.coordinator.core.workloads.tenant_shares import TenantShares
from shoal.coordinator.core.workloads.warm_ups import ResidualsByKind
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import PERMANENT_LOAD_FAILURES
from shoal.types.migration import Against, has_answers
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import Intent, Preempt, Quota, WorkloadKey

NO_CONTENT: Final = DesiredContent()
BUSY_STEPS: Final = 4
"""Of steps that have something to decide, one in so many audits one workload besides: an audit of four takes as long as
to place one, and whoever waits for such a step would wait for them too."""

MOST_REFRESHED: Final = 256
"""Nodes of which columns take over at once what is taken of them: 8 us each (`shoal bench placement`)."""
MOST_PREPARED: Final = 2048
"""Devices that are looked at at once for workloads whose like is not known: 1.6 us each where the model was measured on
a quarter of them (5,000 devices, on a busy AMD EPYC), so that a turn takes 3 ms."""
MOST_TURNS: Final = 1024
"""Of one workload, at MOST_PREPARED: so many ask a selector about each of 100 000 devices five times."""
MOST_LOOKED_AT: Final = 256
"""Workloads that are looked at for one whose like is not known: 15 us each."""


class SettledReplica(NamedTuple):
    """One replica of a settled workload, and what it takes."""

    node: str
    slot: Slot
    assignment: Assignment
    memory: MemoryCommitment
    # Share of the device's time.
    busy: float
    cost: TenantCost
    # Whether a warm-up measured it. Otherwise its prediction follows what the region measures elsewhere.
    is_measured: bool
    # As `ReplicaTarget.number`.
    number: int


class SettledWorkload(NamedTuple):
    """A workload about which nothing has to be decided."""

    rank: Rank
    replicas: tuple[SettledReplica, ...]


OnSlots = Map[Slot, Map[str, tuple[Rank, SettledReplica]]]
"""By device and assignment: the settled replica, and the rank of its workload."""


@dataclass
class StepPart:
    """What one step decides about."""

    # True: everything; nothing that was decided before is used.
    is_whole: bool
    # Workloads to place.
    intents: tuple[Intent, ...]
    # Their assignments and those of deleted workloads, by node in order; of every node if it is about everything.
    desired: dict[str, tuple[Assignment, ...]]
    # Nodes whose desired set may change whatever is decided about workloads.
    nodes: set[str]
    # Workloads that came or went since the last step.
    come_and_gone: set[WorkloadKey] = field(default_factory=set)
    # Settled workloads among them that are decided about again, because it is their turn.
    audited: dict[WorkloadKey, SettledWorkload] = field(default_factory=dict)
    # Assignments of nodes that were removed since the last step: nothing is left to decide about them.
    removed: set[str] = field(default_factory=set)
    # True: one of `audited` came out otherwise.
    is_refuted: bool = False


class Preview(NamedTuple):
    """What would be decided if a step began now. Later steps leave it as it is."""

    part: StepPart
    # What the workloads take that stay settled.
    standing: StandingReplicas
    # The devices, with what was taken of them when the last step was decided, but for nodes that are touched.
    columns: DeviceColumns


class KeptDecisions:
    """Of one region. `open` begins a step and `adopt` ends it once its decision is stored; without the latter, the next
    step decides about everything."""

    def __init__(self, audited_per_step: int = 0, audited_per_search: int | None = None) -> None:
        """audited_per_step: settled workloads that are decided about again, in turn, by each step that decides about
        nothing else; one of them by one in BUSY_STEPS of the others. audited_per_search: nodes of which each search for
        a place checks what columns say, in turn; None: as many."""
        self._audited_per_step = audited_per_step
        self._audited_per_search = audited_per_step if audited_per_search is None else audited_per_search
        self._unaudited = 0
        """Steps since the last audit."""
        self._part: StepPart | None = None
        self._learnt = ResidualsByKind(Map())
        """As the last step left them."""
        self._loose = set[WorkloadKey]()
        """Workloads that are not settled, deleted ones with assignments included."""
        self.columns = DeviceColumns(self._audited_per_search)
        """The devices, with what was taken of them when the last step was decided, but for nodes that are touched."""
        self._forget()

    def forget(self) -> None:
        """The next step decides about everything, also after one that is under way."""
        self._is_known, self._part = False, None

    @property
    def intents(self) -> Mapping[WorkloadKey, Intent]:
        """All workloads of the step that began last, by key."""
        return self._intents

    @property
    def has_late(self) -> bool:
        """Whether there are new workloads that the step that began last left to the next one."""
        return bool(self._late)

    @property
    def is_deciding_whole(self) -> bool:
        """Whether a step about everything is under way: a preview would be about everything too."""
        return self._part is not None and self._part.is_whole

    @property
    def standing(self) -> StandingReplicas:
        """What the settled workloads take."""
        return _standing(self._allocations, self._on_slot, self._decided) if self._settled else NOTHING_STANDS

    @property
    def has_automatic(self) -> bool:
        """Whether replicas of some workload may move without being asked to."""
        return bool(self._automatic)

    @property
    def heartbeat_s(self) -> Seconds:
        """The shortest heartbeat that a workload's `partition` rule asks for; the default without workloads."""
        return Seconds(min(self._heartbeats, default=DEFAULT_PARTITION.heartbeat_s))

    def is_settled(self, key: WorkloadKey) -> bool:
        return key in self._settled

    def residuals_of(self, memory: ReconcilerMemory) -> ResidualsByKind:
        """Those of the memory, for a step to change."""
        if self._learnt.residuals is not memory.residuals:
            self._learnt = ResidualsByKind(memory.residuals)
        return self._learnt

    def sleepers(self) -> Fleet:
        """The nodes with a device that can sleep."""
        return Fleet({name: self._states[name] for name in sorted(self._sleepers)})

    def open(self, world: RegionState, migrations: MigrationEffects, most_new: int | None = None) -> StepPart:
        """What has to be decided now: everything where predictions of settled replicas may be others. most_new:
        workloads that are taken up, those of highest rank first; the others count from a later step on."""
        is_usable, self._is_known = self._is_usable(world, migrations), False
        if not is_usable:
            return self.open_whole(world)
        self._part = part = self._open_part(world, migrations, most_new)
        # Those that displace others may make any replica of lower priority leave.
        return self.open_whole(world) if any(each.preempt is not Preempt.NEVER for each in part.intents) else part

    def _is_usable(self, world: RegionState, migrations: MigrationEffects) -> bool:
        """Whether the last step's decision is stored, and what is settled depends on nothing that changed since."""
        return self._is_known and self._part is None and self._is_same_base(world, migrations)

    def _is_same_base(self, world: RegionState, migrations: MigrationEffects) -> bool:
        """Whether what is settled depends on nothing that changed since it was."""
        is_relearnt = bool(self._unmeasured) and self._residuals is not world.memory.known_residuals
        return not is_relearnt and self._shared == _shared_inputs(world) and not _is_trading(world, migrations)

    def open_whole(self, world: RegionState) -> StepPart:
        """The same, where everything has to be decided."""
        self._part = self._open_whole(world)
        return self._part

    def preview(self, world: RegionState, migrations: MigrationEffects) -> Preview | None:
        """What `open` would find, and nothing that is kept changes. While a step is under way: as if it had not begun,
        because it may not be stored. None: everything would have to be decided, or steps have left workloads to later
        ones, which a plan has as all others."""
        part = self._part
        is_stored = self._is_known if part is None else not (part.is_whole or part.is_refuted)
        if self._late or self.columns.refuted or not (is_stored and self._is_same_base(world, migrations)):
            return None
        new, gone = difference(self._seen, world.intents)
        before, nodes = self._states, world.fleet.nodes
        names: Iterable[str] = world.changed_nodes if world.changed_nodes is not None else {*nodes, *before}
        changed = {name for name in names if before.get(name) is not nodes.get(name)}
        if any((name in before) != (name in nodes) for name in changed):
            return None
        asked, left = {each.key: each for each in new}, {each.key for each in gone}

        def intent_of(key: WorkloadKey) -> Intent | None:
            return asked.get(key) or (self._intents.get(key) if key not in left else None)

        dependent = {key for name in changed for key in self._dependents(name, before.get(name), nodes.get(name))}
        loose = self._to_decide(world, migrations, {*asked, *left, *dependent}, intent_of)
        intents = {key: each for key in loose if (each := intent_of(key)) is not None}
        if any(each.preempt is not Preempt.NEVER for each in intents.values()):
            return None
        allocations, on_slot, decided = self._allocations, self._on_slot, self._decided
        columns = self.columns.copy()
        for key in loose & self._settled.keys():
            for one in self._settled[key].replicas:
                allocations, decided = allocations.with_standing(key.tenant, one, -1), decided - one.number
                on_slot = on_slot.set(one.slot, on_slot[one.slot].delete(one.assignment.id))
                columns.touch([one.node])
        for name in changed:
            columns.mark(name)
        desired = {
            node: tuple(one for one in world.desired[node].assignments if one.workload in loose)
            for node in sorted({node for key in loose for node in self._holders.get(key, ())})
            if node in world.desired
        }
        found = StepPart(False, tuple(intents.values()), desired, changed)
        return Preview(found, _standing(allocations, on_slot, decided), columns)

    def automatic_part(self, world: RegionState, decided: Iterable[str]) -> tuple[StepPart, Allocations]:
        """Whose places have to be looked at in the step that began last, for moves that nobody asked for, and what the
        other workloads take: they are settled. They serve, and ask for none.

        Besides those that may move automatically, these are all that are not settled, and all that share a node with
        one that may have a peak, whose share of a device is compared. world: after the decision. decided: nodes whose
        assignments it may have changed.
        """
        keys = self._loose | self._automatic
        for key in self._automatic:
            if is_time_dependent(self._intents[key]):
                keys.update(*(self._on_node.get(node, ()) for node in self._holders.get(key, ())))
        allocations = self._allocations
        for key in keys & self._settled.keys():
            for one in self._settled[key].replicas:
                allocations = allocations.with_standing(key.tenant, one, -1)
        nodes = {*decided, *(node for key in keys for node in self._holders.get(key, ()))}
        held = ((node, world.desired[node].assignments) for node in sorted(nodes) if node in world.desired)
        desired = {node: tuple(one for one in assignments if one.workload in keys) for node, assignments in held}
        intents = tuple(self._intents[key] for key in sorted(keys & self._intents.keys()))
        return StepPart(False, intents, desired, set()), allocations

    def adopt(self, world: RegionState, migrations: MigrationEffects, decision: Decision, now: Elapsed) -> None:
        """The decision of the step that began last is stored."""
        part, self._part = self._part, None
        if part is None or _is_trading(world, migrations):
            return
        self._is_known = not part.is_refuted
        for node, content in decision.desired.items():
            self._count_holders(node, world.desired.get(node, NO_CONTENT).assignments, content.assignments)
        plans = {each.workload: each for each in decision.plan.workloads}
        waiting = {each.workload for each in decision.waits}
        moving = {move.workload for move in migrations.moves}
        for intent in part.intents:
            key = intent.key
            if key in waiting or key in moving:
                continue
            if (found := _settle(world, decision, plans[key], intent, self._holders.get(key, ()), now)) is not None:
                self._add(key, found)
        self._loose = {key for key in self._loose if key in self._intents or self._holders.get(key)}

    def find_refuted(self, world: RegionState, decision: Decision, now: Elapsed) -> tuple[str, ...]:
        """The settled workloads that the step that began last decided about again, and otherwise than before although
        nothing that should matter changed; and nodes of which columns said what is not so. Then the next step decides
        about everything."""
        part = self._part
        if part is None:
            return ()
        plans = {each.workload: each for each in decision.plan.workloads}
        waiting = {each.workload for each in decision.waits}

        def is_same(key: WorkloadKey, before: SettledWorkload) -> bool:
            holders = self._holders.get(key, ())
            now_settled = _settle(world, decision, plans[key], self._intents[key], holders, now)
            return key not in waiting and now_settled == before

        found = {str(key) for key, before in part.audited.items() if not is_same(key, before)} | self.columns.refuted
        part.is_refuted = bool(found)
        return tuple(sorted(found))

    def has_to_learn(self, memory: ReconcilerMemory) -> bool:
        """Whether `learn` has anything to do. memory: after the last step."""
        return memory.known_residuals is not self._residuals

    def learn(self, memory: ReconcilerMemory) -> None:
        """Does between steps what the next decision would wait for. memory: after the last step."""
        if self.has_to_learn(memory):
            region_residuals(memory.known_residuals).learn()
            self.columns.learn(memory.known_residuals)

    def prepare(self, memory: ReconcilerMemory) -> None:
        """Does a small part of what a search for a place would wait for, after a start above all: what is taken of some
        nodes, and what devices are to workloads like those that exist. memory: after the last step."""
        if not self._is_known or self._part is not None:
            return
        self.columns.refresh(self._allocations, MOST_REFRESHED)
        self._retry_without_room()
        for key in [*islice(self._unprepared, MOST_LOOKED_AT)]:
            turns, intent = self._unprepared.pop(key), self._intents.get(key)
            if intent is None or is_time_dependent(intent):
                continue
            found = self.columns.prepare(intent, memory.known_residuals, MOST_PREPARED)
            if found is Preparation.NO_ROOM:
                self._without_room[key] = turns
            elif found is Preparation.PART:
                # The others come first: where the region learns all the time, there is always more of it.
                if turns + 1 < MOST_TURNS:
                    self._unprepared[key] = turns + 1
                return

    # -- what changed ------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._is_known = False
        if self.columns.refuted:
            self.columns = DeviceColumns(self._audited_per_search)
        self.columns.mark_all()
        self._shared: tuple[object, ...] = ()
        self._settled: dict[WorkloadKey, SettledWorkload] = {}
        self._loose = set()
        self._allocations: Allocations = NO_ALLOCATIONS
        self._on_slot: OnSlots = Map()
        self._decided = 0
        """Sum of the targets of what is settled."""
        self._on_node: dict[str, set[WorkloadKey]] = {}
        self._of_model: dict[str, set[WorkloadKey]] = {}
        self._of_tenant: dict[str, set[WorkloadKey]] = {}
        self._unmeasured: set[WorkloadKey] = set()
        self._holders: dict[WorkloadKey, Counter[str]] = {}
        """By workload: nodes that hold assignments of it, and how many."""
        self._intents: dict[WorkloadKey, Intent] = {}
        self._unprepared: dict[WorkloadKey, int] = {}
        """Workloads for whose like not all is prepared yet, in order, and how many turns each had."""
        self._without_room: dict[WorkloadKey, int] = {}
        """Those of them that wait for room."""
        self._full_sizes = self.columns.sizes
        """What was kept when these last tried."""
        self._seen: tuple[Intent, ...] = ()
        """Of all workloads, those that wait included."""
        self._late: dict[WorkloadKey, Intent] = {}
        """New workloads that no step has taken up yet, in order of rank."""
        self._heartbeats: Counter[float] = Counter()
        self._automatic: set[WorkloadKey] = set()
        self._profiles: Mapping[str, object] = {}
        self._residuals: object = None
        self._states: Mapping[str, NodeState] = {}
        self._sleepers: set[str] = set()
        self.entries: EntryPoints | None = None
        """Of the last step; None: not known."""
        self.tenant_shares: TenantShares | None = None
        """Of the same entries."""

    def _retry_without_room(self) -> None:
        """Prepares for those that wait for room once less is kept."""
        sizes = self.columns.sizes
        if any(now < before for now, before in zip(sizes, self._full_sizes, strict=True)):
            self._unprepared |= self._without_room
            self._without_room.clear()
        self._full_sizes = sizes

    def _open_whole(self, world: RegionState) -> StepPart:
        self._forget()
        self._shared, self._profiles, self._states = _shared_inputs(world), world.profiles, world.fleet.nodes
        self._residuals = world.memory.known_residuals
        self._take_intents(world, None)
        self._unprepared = dict.fromkeys(_tenants_in_turn(self._intents), 0)
        desired = {node: world.desired.get(node, NO_CONTENT).assignments for node in sorted(world.fleet.nodes)}
        for node, assignments in desired.items():
            self._count_holders(node, (), assignments)
        self._sleepers = {name for name, state in world.fleet.nodes.items() if _may_sleep(state)}
        self._loose = {*self._intents, *self._holders}
        return StepPart(True, world.intents, desired, set(world.fleet.nodes))

    def _open_part(self, world: RegionState, migrations: MigrationEffects, most_new: int | None) -> StepPart:
        before_s = self.heartbeat_s
        replaced, come_and_gone = self._take_intents(world, most_new)
        changed, removed, is_regrouped = self._take_nodes(world)
        for key in self._to_decide(world, migrations, replaced, self._intents.get) - self._loose:
            self._loosen(key)
        self._profiles, self._residuals = world.profiles, world.memory.known_residuals
        touched = {node for key in self._loose for node in self._holders.get(key, ())}
        audited = self._take_audited()
        held = touched | {node for key in audited for node in self._holders.get(key, ())}
        desired = {
            node: tuple(one for one in world.desired[node].assignments if one.workload not in self._settled)
            for node in sorted(held)
            if node in world.desired
        }
        nodes = set(world.fleet.nodes) if is_regrouped or before_s != self.heartbeat_s else touched
        if is_regrouped:
            self.entries = None
        intents = tuple(each for key in self._loose if (each := self._intents.get(key)) is not None)
        return StepPart(False, intents, desired, nodes | changed, come_and_gone, audited, removed)

    def _take_audited(self) -> dict[WorkloadKey, SettledWorkload]:
        """The workloads whose turn it is to be decided about again: those that were settled first."""
        found = dict[WorkloadKey, SettledWorkload]()
        self._unaudited += 1
        if self._loose and self._unaudited < BUSY_STEPS:
            return found
        self._unaudited = 0
        most = min(1, self._audited_per_step) if self._loose else self._audited_per_step
        for key, settled in [*islice(self._settled.items(), most)]:
            if self._intents[key].preempt is Preempt.NEVER:
                found[key] = settled
                self._loosen(key)
            else:  # to decide about it is to decide about everything
                self._settled[key] = self._settled.pop(key)
        return found

    def _take_intents(self, world: RegionState, most: int | None) -> tuple[set[WorkloadKey], set[WorkloadKey]]:
        """Workloads with other documents than before, and those of them that came or went. most: of those that came."""
        came, left = difference(self._seen, world.intents)
        self._seen = world.intents
        # No step knows of those that wait: one that goes leaves nothing behind, and what takes its place is new.
        gone = [each for each in left if self._late.pop(each.key, None) is None]
        new = self._take_up(came, most, world.quotas)
        for each in gone:
            self._heartbeats.subtract([each.partition.heartbeat_s])
            del self._intents[each.key]
            self._automatic.discard(each.key)
        for each in new:
            self._heartbeats.update([each.partition.heartbeat_s])
            self._intents[each.key] = each
            if may_ask_for_moves(each):
                self._automatic.add(each.key)
        self._heartbeats = +self._heartbeats
        for each in gone:
            self._loosen(each.key)
        return {each.key for each in (*new, *gone)}, {each.key for each in new} ^ {each.key for each in gone}

    def _take_up(self, came: Sequence[Intent], most: int | None, quotas: Mapping[str, Quota]) -> Sequence[Intent]:
        """Those of the new intents that this step takes up: those of known workloads, and the first of the others by
        rank. The rest waits for a later step."""
        if most is None or len(came) + len(self._late) <= most:
            found, self._late = [*self._late.values(), *came], {}
            return found
        # As many as are decided about again anyway: so the steps of a large apply grow, and together decide about each
        # workload a few times.
        bounded = _bounded_tenants(quotas)
        asking = (*came, *self._late.values()) if bounded else ()
        tenants = {each.key.tenant for each in asking} & bounded
        most = max(most, len(self._loose) + sum(len(self._of_tenant.get(tenant, ())) for tenant in tenants))
        found = [each for each in came if each.key in self._intents]
        if len(found) < len(came):
            fresh = [each for each in came if each.key not in self._intents]
            self._late = {each.key: each for each in sorted((*self._late.values(), *fresh), key=rank_of)}
        # Those that wait are in order, so that a step costs what it takes up, and not what is left.
        first = [*islice(self._late, most)]
        return [*found, *(self._late.pop(key) for key in first)]

    def _take_nodes(self, world: RegionState) -> tuple[set[str], set[str], bool]:
        """Nodes whose state changed, assignments of removed ones, and whether a node takes part in the region's entries
        in another way."""
        before, nodes = self._states, world.fleet.nodes
        names: Iterable[str] = world.changed_nodes if world.changed_nodes is not None else {*nodes, *before}
        changed, removed, is_regrouped = set[str](), set[str](), False
        for name in names:
            old, new = before.get(name), nodes.get(name)
            if old is new:
                continue
            self.columns.mark(name)
            is_regrouped = is_regrouped or _entry_of(old) != _entry_of(new)
            for key in self._dependents(name, old, new):
                self._loosen(key)
            if new is None:
                self._sleepers.discard(name)
                left = world.desired.get(name, NO_CONTENT).assignments
                self._count_holders(name, left, ())
                removed.update(one.id for one in left)
                continue
            changed.add(name)
            if old is None:
                self._count_holders(name, (), world.desired.get(name, NO_CONTENT).assignments)
            (self._sleepers.add if _may_sleep(new) else self._sleepers.discard)(name)
        self._states = nodes
        return changed, removed, is_regrouped

    def _dependents(self, name: str, old: NodeState | None, new: NodeState | None) -> tuple[WorkloadKey, ...]:
        """Settled workloads on a node to which it matters that the node is another. A new neighbour and what it takes
        of the node's devices matter to what is placed there next, not to what serves there already."""
        found = tuple(self._on_node.get(name, ()))
        if old is None or new is None or not is_same_host(old, new):
            return found
        return tuple(key for key in found if self._depends(key, name, old.observed, new.observed))

    def _depends(self, key: WorkloadKey, node: str, old: Mapping[str, Observed], new: Mapping[str, Observed]) -> bool:
        """Whether other reports of a node's replicas matter to a workload that is settled there: any of its own; of
        others the measurements, by which one without any is predicted. One that may displace others, or that runs by a
        `relax` step, is judged by all that there is of the node."""
        intent = self._intents[key]
        if intent.preempt is not Preempt.NEVER or intent.relax:
            return True
        return any(
            not each.is_measured or not is_same(old.get(each.assignment.id), new.get(each.assignment.id))
            for each in self._settled[key].replicas
            if each.node == node
        )

    def _to_decide(
        self,
        world: RegionState,
        migrations: MigrationEffects,
        keys: Iterable[WorkloadKey],
        intent_of: Callable[[WorkloadKey], Intent | None],
    ) -> set[WorkloadKey]:
        """Everything that is not settled any more. keys: workloads with other documents, or that depend on a node that
        changed. intent_of: what a workload asks for now; None: it is deleted."""
        found = {*self._loose, *keys, *(move.workload for move in migrations.moves)}
        if world.profiles is not self._profiles:
            for model, users in self._of_model.items():
                if world.profiles.get(model) is not self._profiles.get(model):
                    found |= users
        found = self._with_disproving(world, found)
        bounded = _bounded_tenants(world.quotas)
        tenants = {key.tenant for key in found if key.tenant in bounded and intent_of(key) is not None}
        return found.union(*(self._of_tenant.get(tenant, set()) for tenant in tenants))

    def _with_disproving(self, world: RegionState, loose: set[WorkloadKey]) -> set[WorkloadKey]:
        """Replicas that serve disprove that their model cannot be loaded. Where a node says so, all of them count."""
        models = {each.triple.model for each in world.memory.unloadable}
        for key in loose:
            for node in self._holders.get(key, ()):
                state = world.fleet.nodes.get(node)
                models |= {
                    one.model
                    for one in (state.observed.values() if state is not None else ())
                    if one.phase is Phase.FAILED and one.code in PERMANENT_LOAD_FAILURES
                }
        return loose.union(*(self._of_model.get(model, set()) for model in models))

    def _count_holders(self, node: str, before: Sequence[Assignment], after: Sequence[Assignment]) -> None:
        if before == after:
            return
        for sign, assignments in ((-1, before), (1, after)):
            for one in assignments:
                counts = self._holders.setdefault(one.workload, Counter())
                counts[node] += sign
                if not counts[node]:
                    del counts[node]
                if not counts:
                    del self._holders[one.workload]
                elif one.workload not in self._settled:
                    self._loose.add(one.workload)

    # -- what is settled ---------------------------------------------------------------------------------------------

    def _loosen(self, key: WorkloadKey) -> None:
        found = self._settled.pop(key, None)
        if key in self._intents or key in self._holders:
            self._loose.add(key)
        else:
            self._loose.discard(key)
        if found is not None:
            self._of_tenant[key.tenant].discard(key)
            self._unmeasured.discard(key)
            self.columns.touch(each.node for each in found.replicas)
            for each in found.replicas:
                self._decided -= each.number
                self._allocations = self._allocations.with_standing(key.tenant, each, -1)
                self._on_slot = self._on_slot.set(each.slot, self._on_slot[each.slot].delete(each.assignment.id))
                self._on_node[each.node].discard(key)
                self._of_model[each.assignment.model].discard(key)

    def _add(self, key: WorkloadKey, found: SettledWorkload) -> None:
        self._settled[key] = found
        self._loose.discard(key)
        self._of_tenant.setdefault(key.tenant, set()).add(key)
        if not all(each.is_measured for each in found.replicas):
            self._unmeasured.add(key)
        self.columns.touch(each.node for each in found.replicas)
        for each in found.replicas:
            self._decided += each.number
            self._allocations = self._allocations.with_standing(key.tenant, each, 1)
            here = self._on_slot.get(each.slot, _NOTHING).set(each.assignment.id, (found.rank, each))
            self._on_slot = self._on_slot.set(each.slot, here)
            self._on_node.setdefault(each.node, set()).add(key)
            self._of_model.setdefault(each.assignment.model, set()).add(key)


def may_ask_for_moves(intent: Intent) -> bool:
    """Whether replicas may move without being asked to: its own, or those that it displaces."""
    return intent.migration.automatic or intent.preempt is not Preempt.NEVER


def _tenants_in_turn(keys: Iterable[WorkloadKey]) -> Sequence[WorkloadKey]:
    """One of each tenant, then the next of each: so nobody takes all room."""
    counts, rounds = Counter[str](), list[list[WorkloadKey]]()
    for key in keys:
        if counts[key.tenant] == len(rounds):
            rounds.append([])
        rounds[counts[key.tenant]].append(key)
        counts[key.tenant] += 1
    return [key for each in rounds for key in each]


_NOTHING: Final[Map[str, tuple[Rank, SettledReplica]]] = Map()


def _standing(allocations: Allocations, on_slot: OnSlots, decided: int) -> StandingReplicas:
    def ahead(rank: Rank, slot: Slot) -> tuple[Bytes, float]:
        """Memory and time that settled workloads of higher rank take of a device."""
        found = [each for other, each in on_slot.get(slot, _NOTHING).values() if other < rank]
        return Bytes(sum(each.memory.committed_bytes for each in found)), sum(each.busy for each in found)

    return StandingReplicas(allocations, ahead, decided)


def _bounded_tenants(quotas: Mapping[str, Quota]) -> set[str]:
    """Where a quota bounds the replicas of a tenant, all of its workloads are weighed against each other."""
    return {tenant for tenant, quota in quotas.items() if quota.replicas is not None or quota.memory is not None}


def _shared_inputs(world: RegionState) -> tuple[object, ...]:
    """What every workload depends on."""
    return (
        (world.region.name, world.region.residency, world.region.labels, repr(world.region.carbon_g_per_kwh)),
        world.fleet.timing,
        world.seed,
        world.quotas,
        world.signatures,
        world.costs,
    )


def _is_trading(world: RegionState, migrations: MigrationEffects) -> bool:
    """Whether workloads run elsewhere, or for others. Then each step decides about everything."""
    return bool(
        world.delegations
        or world.awarded
        or world.reserved
        or world.peers
        or migrations.cross_region_states
        or migrations.served_agreements
    )


def _entry_of(state: NodeState | None) -> tuple[object, ...] | None:
    """How a node takes part in the region's entries."""
    if state is None or state.revoked:
        return None
    return state.node.role, state.node.labels.get(ENTRY_LABEL), state.node.forward_key, state.node.subscribes


def _may_sleep(state: NodeState) -> bool:
    return any(device.rest is not None for device in state.node.devices)


def _settle(
    world: RegionState, decision: Decision, plan: WorkloadPlan, intent: Intent, holders: Iterable[str], now: Elapsed
) -> SettledWorkload | None:
    """The workload as settled; None where something about it may still change by itself."""
    rule = intent.migration
    if not plan.is_steady or plan.unplaced_moves or depends_on_time(intent) or intent.require.signed_by:
        return None
    if rule.against is Against.REFERENCE and not has_answers(rule):
        return None
    targets = {each.existing_assignment: each for each in plan.targets}
    found = list[SettledReplica]()
    for node in sorted(holders):
        state = world.fleet.nodes.get(node)
        before = {one.id: one for one in world.desired.get(node, NO_CONTENT).assignments}
        content = decision.desired.get(node) or world.desired.get(node, NO_CONTENT)
        for one in content.assignments:
            if one.workload != intent.key:
                continue
            target = targets.pop(one.id, None)
            if target is None or before.get(one.id) != one or not _serves(state, one, decision):
                return None
            assert state is not None
            slot, observed = Slot(node, one.device), state.observed[one.id]
            taken = NO_COMMITMENT.plus(memory_of(one, observed), loaded=is_loaded(observed))
            cost = TenantCost.of(world.costs.get(slot, math.nan))
            is_measured = observed.measured is not None and observed.measured.samples > 0
            found.append(SettledReplica(node, slot, one, taken, target.busy, cost, is_measured, target.number))
    return None if targets else SettledWorkload(rank_of(intent), tuple(found))


def _serves(state: NodeState | None, one: Assignment, decision: Decision) -> bool:
    """Whether it is in service, and will be for as long as its node reports the same. Whether every front knows of it
    already matters to other replicas of its workload that could leave then, and there are none."""
    if state is None or state.liveness is not Liveness.READY or not (state.has_full_status and state.front_ready):
        return False
    observed, mark = state.observed.get(one.id), decision.memory.marks.get(one.id)
    return (
        observed is not None
        and observed.phase is Phase.READY
        and mark is not None
        and mark.stage is AssignmentStage.SERVING
        and not (one.draining or one.staged or one.verifiers or one.handover or one.handover_sources)
        and one.verification is None
        and not (one.standby and state.cordoned)
    )
