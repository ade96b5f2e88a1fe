"""What placement says of the region as it is, or would be under documents that are only proposed. Changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.controllers.workloads.node_marks import are_same
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.coordinator.core.migration.advance import migration_effects, trigger_view
from shoal.coordinator.core.migration.budget import MoveHold, cross_region_hold
from shoal.coordinator.core.migration.effects import clearable
from shoal.coordinator.core.migration.estimate import MoveEstimates, estimate_move
from shoal.coordinator.core.migration.hopeless import hopeless_refusal, passing_refusal
from shoal.coordinator.core.migration.model import Cause, Migration, MoveProposal, place_of
from shoal.coordinator.core.migration.movable import (
    HeldReplica,
    MoveObstacle,
    held_replicas,
    is_delegated,
    keeps_sessions,
    list_held,
    runs_elsewhere,
    runs_here,
)
from shoal.coordinator.core.migration.reasons_to_stay import reasons_to_stay
from shoal.coordinator.core.negotiation.trust import delegation_refusal, may_delegate
from shoal.coordinator.core.placement.model import Aim, Inputs, PlacementPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import DesiredContent
from shoal.coordinator.ports import Clock
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.workload import DelegationMode, Intent, Quota, WorkloadKey


@dataclass(frozen=True, slots=True, eq=False)
class MoveMark:
    """What the answer about one move names, to tell whether it still holds. In a large region something changes all the
    time; what changed elsewhere matters to placement, which decides anew in each step."""

    # What the workload asks for.
    intent: Intent | None
    # Quota of its tenant.
    quota: Quota | None
    # The node that the replica is on and the one that it is to go to, as decisions see them.
    nodes: tuple[NodeState | None, ...]
    # What each of them is to run.
    desired: tuple[DesiredContent | None, ...]
    # Those of the workload.
    migrations: tuple[Migration, ...]

    def is_same(self, other: "MoveMark") -> bool:
        """Compares nodes and migrations by identity: it is called on the loop."""
        return (
            self.intent == other.intent
            and self.quota == other.quota
            and are_same(self.nodes, other.nodes)
            and are_same(self.desired, other.desired)
            and are_same(self.migrations, other.migrations)
        )


class PlacementQueries:
    """By the state that the next step would read."""

    def __init__(self, workloads: WorkloadsController, clock: Clock) -> None:
        self._workloads = workloads
        self._clock = clock

    @property
    def fleet(self) -> Fleet:
        """The fleet as of now."""
        return self._workloads.fleet

    @property
    def region(self) -> str:
        """This region's name."""
        return self._workloads.region

    def region_of(self, key: WorkloadKey) -> str:
        """The region that runs the workload under an agreement; empty: none does."""
        away = self._workloads.delegations.get(key)
        return away.region if away is not None and away.is_ready else ""

    def elsewhere_refusal(self, key: WorkloadKey) -> Refusal | None:
        """Why it cannot move to a node of this region: another region has it, and no replica is here. None: it may."""
        away = self._workloads.delegations.get(key)
        if away is None or held_replicas(key, "", self.list_held()):
            return None
        return runs_elsewhere(key, away.region, self.region)

    def list_held(self) -> list[HeldReplica]:
        """Every assignment of the region with its node, by node."""
        return list_held({node: each.assignments for node, each in self._workloads.desired.items()})

    def cross_region_refusal(self, intent: Intent, region: str) -> Refusal | None:
        """Why the workload cannot move to that region, or back to this one, by the state that it is in, whatever the
        other region offers. `shoal can-move` returns this, and `shoal migrate` is refused by it."""
        key, away = intent.key, self._workloads.delegations.get(intent.key)
        under_way = [each.id for each in self._workloads.migrations.live if each.workload == key]
        if under_way:
            return Refusal(
                Code.CONFLICT, f"{key} moves already: {under_way[0]}", "one that does not", "wait for its end"
            )
        if region == self.region:
            return runs_here(key) if away is None or not away.is_ready else None
        if away is not None:
            return is_delegated(key, away.region, self.region)
        if intent.session:
            return keeps_sessions(key)
        return None if may_delegate(intent.delegation, region) else delegation_refusal(intent.delegation, region)

    def is_moving(self, key: WorkloadKey) -> bool:
        """Whether a migration of the workload is under way."""
        return any(each.workload == key for each in self._workloads.migrations.all.values() if not each.is_over)

    def mark(self, key: WorkloadKey, aim: Aim, source: str) -> MoveMark:
        """As of now, of a move of the workload from the node `source`."""
        world, places = self._workloads.region_state(), (source, aim.node)
        return MoveMark(
            self._workloads.intent_of(key),
            world.quotas.get(key.tenant),
            tuple(world.fleet.nodes.get(each) for each in places),
            tuple(world.desired.get(each) for each in places),
            tuple(each for each in self._workloads.migrations.all.values() if each.workload == key),
        )

    def waits_for(self, key: WorkloadKey, aim: Aim, replica: str) -> Callable[[], MoveObstacle | None]:
        """Why a replica that waits in the queue cannot move there now; None: it can. Blocks by earlier failures count.

        By the state as of now, and it reads nothing else: it may run in a thread.
        """
        inputs_now, is_moving = self._inputs(key, None, overrules=False), self.is_moving(key)

        def look() -> MoveObstacle | None:
            inputs = inputs_now()
            found = estimate_move(inputs, key, aim, replica)
            if found.refusal is None:
                return None
            if found.there_already is not None and not is_moving:
                return MoveObstacle(found.there_already, is_final=True)
            return MoveObstacle(passing_refusal(inputs, key, aim, replica, found.refusal))

        return look

    def lasting_refusal(self, key: WorkloadKey, aim: Aim, replica: str) -> Callable[[], Refusal | None]:
        """Why that replica can never move there by waiting; None: it may. As `waits_for`, it may run in a thread."""
        inputs = self._inputs(key, None, overrules=False)
        return lambda: hopeless_refusal(inputs(), key, aim, replica)

    def move_estimator(
        self, key: WorkloadKey, aim: Aim, catalog: Catalog | None = None, replica: str = ""
    ) -> Callable[[], MoveEstimates]:
        """Whether a replica of the workload could move there at an operator's request now. `shoal can-move` returns
        this, and `shoal migrate` is refused by it. catalog: documents that are only proposed.

        By the state as of now, and it reads nothing else: it may run in a thread. It raises
        ShoalError(WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND).
        """
        inputs = self._inputs(key, catalog, overrules=True)
        return lambda: estimate_move(inputs(), key, aim, replica)

    def return_estimator(self, key: WorkloadKey) -> Callable[[], MoveEstimates]:
        """As `move_estimator`, of a workload that another region runs: every place that it would have here. A replica
        that is here nevertheless, as after a silence, is none that it would move from."""
        inputs_now = self._inputs(key, None, overrules=True)

        def estimate() -> MoveEstimates:
            inputs = inputs_now()
            others = {
                node: tuple(one for one in assignments if one.workload != key)
                for node, assignments in inputs.desired.items()
            }
            at_home = replace(inputs, elsewhere=inputs.elsewhere - {key}, desired=others)
            return estimate_move(at_home, key, Aim())

        return estimate

    def _inputs(self, key: WorkloadKey, catalog: Catalog | None, *, overrules: bool) -> Callable[[], Inputs]:
        """Of the state as of now; they take time that grows with the region. overrules: without the blocks of the
        workload that an operator's request lifts."""
        now, wall, known = self._clock.now(), self._clock.wall(), dict(self._workloads.migrations.all)
        world = self._workloads.region_state(catalog)

        def inputs() -> Inputs:
            overruled = {
                each.id: replace(each, cleared=True) for each in (clearable(known.values(), key) if overrules else ())
            }
            return inputs_of(world, migration_effects(world, {**known, **overruled}, now), now, wall)

        return inputs

    async def explain(self, *keys: WorkloadKey, compute: Compute = inline) -> PlacementPlan:
        """The plan as placement would compute it now, with every candidate of these workloads; of all, where none is
        named. compute: where the computation runs, which takes seconds in a large region.

        Raises ShoalError(WORKLOAD_UNKNOWN).
        """
        inputs = self._workloads.inputs()
        plan = await compute(lambda: place(inputs, explain=keys or True))
        for key in keys:
            if plan.of(key) is None:
                raise refuse(
                    Code.WORKLOAD_UNKNOWN, f"no workload {key}", "an applied workload", "see `shoal get workloads`"
                )
        return plan

    async def reasons_to_stay(self, key: WorkloadKey, *, compute: Compute = inline) -> tuple[MoveHold, ...]:
        """Why the workload's replicas stay where they are, and why the workload stays in this region. compute: where
        the computation runs, which looks at every other place."""
        now, wall = self._clock.now(), self._clock.wall()
        world, moves = self._workloads.region_state(), dict(self._workloads.migrations.all)
        holds = self._workloads.move_holds
        found = await compute(lambda: reasons_to_stay(trigger_view(world, moves, now, wall, key), holds, key))
        return (*found, *self._reasons_to_stay_local(key))

    def _reasons_to_stay_local(self, key: WorkloadKey) -> tuple[MoveHold, ...]:
        """What keeps the workload from being offered to other regions, where its policy delegates to any better one."""
        intent = self._workloads.intent_of(key)
        desired = self._workloads.desired
        held = [(node, one) for node, each in desired.items() for one in each.assignments if one.workload == key]
        better = intent is not None and intent.delegation.mode is DelegationMode.WHEN_BETTER
        if intent is None or not better or not held or key in self._workloads.delegations:
            return ()
        now, wall = self._clock.now(), self._clock.wall()
        found = cross_region_hold(key, intent.migration, self._workloads.migrations.all.values(), now, wall)
        node, one = held[0]
        place = place_of(self._workloads.fleet, node, one)
        asked = MoveProposal(key, place, Aim(), Cause.COST, "to another region that is better")
        return (MoveHold(asked, *found),) if found is not None else ()
