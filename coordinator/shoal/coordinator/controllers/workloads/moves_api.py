"""The operator's commands on live moves: migrate, cancel, drain a node, and clear what excludes a place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Compute, Transition, inline
from shoal.coordinator.controllers.workloads.looks import Look, run_after_look
from shoal.coordinator.controllers.workloads.placement_queries import PlacementQueries
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.controllers.workloads.transitions import RegionWrites
from shoal.coordinator.core.migration import machine
from shoal.coordinator.core.migration.cross_region import INITIAL_STATE, remote_place
from shoal.coordinator.core.migration.effects import clearable
from shoal.coordinator.core.migration.estimate import check_aim
from shoal.coordinator.core.migration.model import (
    AbortedState,
    Cause,
    Migration,
    MigrationEvent,
    PlannedState,
    ReplicaPlace,
    place_of,
)
from shoal.coordinator.core.migration.movable import (
    HeldReplica,
    MoveObstacle,
    movable_replica,
    region_aim_refusal,
    runs_elsewhere,
)
from shoal.coordinator.core.negotiation.offer_selection import request_hash
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import MigrationRule
from shoal.types.workload import Intent, WorkloadKey

T = TypeVar("T")

ID_KIND: Final = "m"


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What a drain began, and what cannot move now."""

    # Live moves of the node's replicas, begun by this drain or earlier.
    migrations: tuple[Migration, ...]
    # By assignment id, why a replica cannot move now.
    refusals: Mapping[str, Refusal]


class MovesController:
    """Commits every command before it answers, under the lock that steps hold."""

    def __init__(
        self,
        workloads: WorkloadsController,
        placement: PlacementQueries,
        fleet: FleetController,
        context: RegionContext,
        on_change: Callable[[], None],
    ) -> None:
        self._workloads = workloads
        self._placement = placement
        self._fleet = fleet
        self._clock = context.clock
        self._ids = context.ids
        self._on_change = on_change

    async def migrate(
        self, key: WorkloadKey, aim: Aim, actor: str, *, replica: str = "", compute: Compute = inline
    ) -> Migration:
        """Begins a move of one replica: of `replica`, else of the first one that is not already at the aim. compute:
        where it is computed whether it can move there, which takes as long as a plan of the region.

        Raises ShoalError(WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | MODEL_NOT_READY | CONFLICT | STORE_FULL), or the
        code by which `shoal can-move` answers no, and what `compute` raises.
        """
        return await run_after_look(
            self._workloads.transitions,
            lambda: self._look(key, aim, replica),
            lambda _: self._begin(key, aim, actor, replica),
            compute,
        )

    def _look(self, key: WorkloadKey, aim: Aim, replica: str) -> Look[None]:
        self.check_request(key, aim)
        found = self._movable_replica(key, aim, replica)
        estimate = self._placement.move_estimator(key, aim, replica=found[1].id)

        def check() -> None:
            refusal = estimate().refusal
            if refusal is not None:
                raise ShoalError(refusal)

        is_same = self.same_as_now(key, aim, replica, found)
        return Look(check, lambda _: not is_same())

    def same_as_now(self, key: WorkloadKey, aim: Aim, replica: str, found: HeldReplica) -> Callable[[], bool]:
        """Whether at a later time a request would move the same replica, and what the answer names is the same."""
        node, one = found
        mark = self._placement.mark(key, aim, node)

        def is_same() -> bool:
            now = self.movable_replica(key, aim, replica)
            if isinstance(now, MoveObstacle) or now[1].id != one.id:
                return False
            return mark.is_same(self._placement.mark(key, aim, node))

        return is_same

    def _begin(self, key: WorkloadKey, aim: Aim, actor: str, replica: str) -> Transition[RegionWrites, Migration]:
        """Begins a move that could be made when it was looked at."""
        self.check_request(key, aim)
        return self.begin(key, aim, actor, self._movable_replica(key, aim, replica))

    def check_request(self, key: WorkloadKey, aim: Aim) -> None:
        """Raises ShoalError(WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND) where there is nothing to move, or nowhere."""
        check_aim(self._fleet.fleet, aim)
        self._intent_of(key)

    def begin(
        self, key: WorkloadKey, aim: Aim, actor: str, found: HeldReplica, *, waited: tuple[str, str] | None = None
    ) -> Transition[RegionWrites, Migration]:
        """Begins a move that nothing refuses, of `found`. waited: id and reason of one that was in the queue; None: the
        operator asks now.

        An operator's request overrides earlier failures there that were only late or slow. One that waited does not:
        what failed meanwhile was not known to whoever asked.
        """
        rule = self._rule_of(key)
        migration = self._new_migration(key, Cause.OPERATOR, actor, found, aim, rule, *(waited or ()))
        known = self._workloads.migrations.all.values()
        forgiven = [replace(each, cleared=True) for each in clearable(known, key)] if waited is None else []
        return self._transition([*forgiven, migration], actor, migration)

    async def migrate_to_region(self, key: WorkloadKey, aim: Aim, actor: str, *, replica: str = "") -> Migration:
        """Begins a move of a workload to the region that `aim` names as its node, or back to the local region.

        Raises ShoalError(FIELD_INVALID | WORKLOAD_UNKNOWN | TRADE_DENIED | MODEL_NOT_READY | CONFLICT | STORE_FULL).
        """
        return await self._run(lambda: self._begin_cross_region(key, aim, actor, replica))

    def _begin_cross_region(
        self, key: WorkloadKey, aim: Aim, actor: str, replica: str
    ) -> Transition[RegionWrites, Migration]:
        source, rule, home = self.cross_region_source(key, aim, replica), self._rule_of(key), self._is_local(aim)
        name, now, wall = self._ids.name(ID_KIND), self._clock.now(), self._clock.wall()
        begun = Migration(name, key, Cause.OPERATOR, actor, source, Aim(region=aim.node), rule, INITIAL_STATE)
        if home:
            begun = replace(begun, asked=request_hash(self._intent_of(key)))
        migration = machine.start(begun, now, wall)[0]
        return self._transition([migration], actor, migration)

    def cross_region_source(self, key: WorkloadKey, aim: Aim, replica: str = "") -> ReplicaPlace:
        """The current place of a workload that is to move to the region that `aim` names as its node; changes nothing.

        Raises ShoalError(FIELD_INVALID | WORKLOAD_UNKNOWN | TRADE_DENIED | MODEL_NOT_READY | CONFLICT).
        """
        refusal = region_aim_refusal(aim, replica)
        if refusal is not None:
            raise ShoalError(refusal)
        refusal = self._placement.cross_region_refusal(self._intent_of(key), aim.node)
        if refusal is not None:
            raise ShoalError(refusal)
        if self._is_local(aim):
            return remote_place(self._workloads.delegations[key])
        node, one = self._movable_replica(key, Aim(), "")
        return place_of(self._fleet.fleet, node, one)

    def _is_local(self, aim: Aim) -> bool:
        return aim.node == self._workloads.region

    async def cancel(self, name: str, actor: str, key: WorkloadKey | None = None) -> Migration:
        """Cancels a migration. key: the workload that it must belong to; None: any.

        Raises ShoalError(MIGRATION_UNKNOWN | CONFLICT | STORE_FULL | ..).
        """
        return await self._run(lambda: self.cancel_transition(name, actor, key))

    def cancel_transition(self, name: str, actor: str, key: WorkloadKey | None) -> Transition[RegionWrites, Migration]:
        known = self.get(name)
        check_is_of(name, known.workload, key)
        after, told = machine.cancel(known, actor, self._clock.now(), self._clock.wall())
        return self._transition([after], actor, after, told)

    async def drain(self, node: str, actor: str) -> DrainResult:
        """Cordons a node and begins to move every replica on it to another node.

        Raises ShoalError(NODE_UNKNOWN | STORE_FULL | ..).
        """
        await self._fleet.cordon(node, True, actor)
        refusals = await self._run(lambda: self._drain(node, actor))
        under_way = (each for each in self._workloads.migrations.live if each.source.node == node)
        return DrainResult(tuple(under_way), refusals)

    def _drain(self, node: str, actor: str) -> Transition[RegionWrites, Mapping[str, Refusal]]:
        desired = self._workloads.desired.get(node)
        moving = {each.source.assignment for each in self._workloads.migrations.live}
        begun, refusals = list[Migration](), dict[str, Refusal]()
        for one in desired.assignments if desired is not None else ():
            if one.draining or one.id in moving:
                continue
            if one.standby:
                refusals[one.id] = Refusal(
                    Code.WAITING_FOR_REPLACEMENT, "it goes when another node has one that stands by"
                )
                continue
            try:
                held = self._movable_replica(one.workload, Aim(), one.id)
                begun.append(
                    self._new_migration(one.workload, Cause.DRAIN, actor, held, Aim(), self._rule_of(one.workload))
                )
            except ShoalError as error:
                refusals[one.id] = error.refusal
        return self._transition(begun, actor, refusals)

    async def clear(self, name: str, actor: str) -> tuple[str, ...]:
        """Clears failed migrations that exclude places of a model (by name or digest); returns those places.

        Raises ShoalError(STORE_FULL | ..).
        """
        digest = self._workloads.catalog.digest_of(name)
        return await self._run(lambda: self._clear(digest, actor))

    def _clear(self, digest: str | None, actor: str) -> Transition[RegionWrites, tuple[str, ...]]:
        cleared = [
            (replace(each, cleared=True), f"{each.target.model} on {each.target.where}")
            for each in self._workloads.migrations.all.values()
            if isinstance(each.state, AbortedState) and not each.cleared
            if each.target is not None and each.target.model == digest
        ]
        return self._transition([each for each, _ in cleared], actor, tuple(where for _, where in cleared))

    def get(self, name: str) -> Migration:
        """Raises ShoalError(MIGRATION_UNKNOWN)."""
        known = self._workloads.migrations.all.get(name)
        if known is None:
            raise unknown_migration(name)
        return known

    # -- what may move -------------------------------------------------------------------------------------------------

    def _rule_of(self, key: WorkloadKey) -> MigrationRule:
        return self._intent_of(key).migration

    def _intent_of(self, key: WorkloadKey) -> Intent:
        intent = self._workloads.intent_of(key)
        if intent is None:
            raise refuse(
                Code.WORKLOAD_UNKNOWN, f"no workload {key}", "an applied workload", "see `shoal get workloads`"
            )
        return intent

    def movable_replica(self, key: WorkloadKey, aim: Aim, replica: str) -> HeldReplica | MoveObstacle:
        """The replica that a request would move now, or why there is none."""
        held, live = self._placement.list_held(), self._workloads.migrations.live
        found = movable_replica(key, aim, replica, held, live, self._fleet.fleet)
        away = self._workloads.delegations.get(key)
        if away is not None and isinstance(found, MoveObstacle) and found.refusal.code is Code.NOT_FOUND:
            return replace(found, refusal=runs_elsewhere(key, away.region, self._workloads.region))
        return found

    def _movable_replica(self, key: WorkloadKey, aim: Aim, replica: str) -> HeldReplica:
        found = self.movable_replica(key, aim, replica)
        if isinstance(found, MoveObstacle):
            raise ShoalError(found.refusal)
        return found

    # -- writing -------------------------------------------------------------------------------------------------------

    def _new_migration(
        self, key: WorkloadKey, cause: Cause, actor: str, held: HeldReplica, aim: Aim, rule: MigrationRule,
        name: str = "", reason: str = "",
    ) -> Migration:  # fmt: skip
        source = place_of(self._fleet.fleet, *held)
        name = name or self._ids.name(ID_KIND)
        asked = Migration(name, key, cause, actor, source, aim, rule, INITIAL_STATE, reason=reason)
        return machine.start(asked, self._clock.now(), self._clock.wall())[0]

    async def _run(self, step: Callable[[], Transition[RegionWrites, T]]) -> T:
        """The result of a command, once it is committed."""
        async with self._workloads.step_lock:
            return await self._workloads.transitions.run(step)

    def _transition(
        self, changed: list[Migration], actor: str, result: T, told: tuple[MigrationEvent, ...] = ()
    ) -> Transition[RegionWrites, T]:
        if not changed:
            return Transition(result)
        book, by_id = self._workloads.migrations, {each.id: each for each in changed}
        written = book.writes(by_id)
        events = [
            LogEvent("MIGRATION_PLANNED", each.id, _description(each), actor, _node_of(each), each.workload)
            for each in changed
            if isinstance(each.state, PlannedState)
        ]
        events += [
            LogEvent(one.code, each.id, one.message, actor, _node_of(each), each.workload)
            for each in changed
            for one in told
        ]

        def adopt(revision: int) -> None:
            book.adopt(by_id, written)
            self._on_change()

        return Transition(result, RegionWrites(written.puts, written.deletes, events), adopt)


def unknown_migration(name: str) -> ShoalError:
    return refuse(Code.MIGRATION_UNKNOWN, f"migration {name!r:.80}", "one that is listed", "see `shoal get migrations`")


def check_is_of(name: str, owner: WorkloadKey, key: WorkloadKey | None) -> None:
    """Raises ShoalError where a move is not of the workload that it has to be of: CONFLICT, or MIGRATION_UNKNOWN where
    another tenant's workload moves, which is none of the caller's business. key: None: any."""
    if key is None or owner == key:
        return
    if owner.tenant != key.tenant:
        raise unknown_migration(name)
    remedy = f"see `shoal get migrations {key.name} --tenant {key.tenant}`"
    raise refuse(Code.CONFLICT, f"{name} moves {owner}", f"a move of {key}", remedy)


def _node_of(migration: Migration) -> str:
    return "" if migration.source.region else migration.source.node


def _description(migration: Migration) -> str:
    return f"from {migration.source.where} to {migration.aim.where or 'another place'} ({migration.cause})"
