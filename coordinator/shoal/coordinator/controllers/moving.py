"""What an operator does about live moves: begin one, take it back, empty a node, forget what a place was blamed for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.fleet import FleetController
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.core.migration import machine
from shoal.coordinator.core.migration.crossing import UNDECIDED, abroad
from shoal.coordinator.core.migration.estimate import aimed_at
from shoal.coordinator.core.migration.model import Aborted, Cause, Migration, Place, Planned, Told
from shoal.coordinator.core.migration.moves import WRONG
from shoal.coordinator.core.negotiation.choice import asked_of
from shoal.coordinator.core.negotiation.trust import may_delegate, policy_forbids
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Clock, Ids
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import MigrationRule
from shoal.types.workload import Intent, WorkloadKey

KIND: Final = "m"


@dataclass(frozen=True, slots=True)
class Drained:
    """begun: moves of the node's replicas, of this drain or earlier. unmoved: those that cannot move now, and why."""

    begun: tuple[Migration, ...]
    unmoved: Mapping[str, Refusal]


class MovingController:
    """Every act is committed before it is answered, under the lock that steps hold."""

    def __init__(
        self,
        workloads: WorkloadsController,
        fleet: FleetController,
        truth: Truth,
        clock: Clock,
        ids: Ids,
        changed: Callable[[], None],
    ) -> None:
        self._workloads = workloads
        self._fleet = fleet
        self._truth = truth
        self._clock = clock
        self._ids = ids
        self._changed = changed

    async def migrate(self, key: WorkloadKey, aim: Aim, actor: str, *, replica: str = "") -> Migration:
        """Begins a move of one replica: of `replica`, else of the first that is not where it is to go.

        Raises ShoalError(WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | MODEL_NOT_READY | CONFLICT | STORE_FULL)."""
        async with self._workloads.stepping:
            aimed_at(self._fleet.fleet, aim)
            rule = self._rule_of(key)
            found = self._movable(key, aim, replica)
            migration = self._new(key, Cause.OPERATOR, actor, found, aim, rule)
            # An operator's word counts for more than what was only late or slow there before.
            forgiven = self._cleared(lambda each: each.workload == key and not _is_wrong(each))
            await self._commit([*forgiven, migration], actor)
        return self._workloads.migrations.all[migration.id]

    async def cross(self, key: WorkloadKey, aim: Aim, actor: str, *, replica: str = "") -> Migration:
        """Begins a move of a workload to the region that `aim` has as its node, or home to this one.

        Raises ShoalError(FIELD_INVALID | WORKLOAD_UNKNOWN | TRADE_DENIED | MODEL_NOT_READY | CONFLICT | STORE_FULL)."""
        region = aim.node
        if aim.device or replica:
            raise refuse(
                Code.FIELD_INVALID, f"{f'replica {replica}' if replica else f'device {aim.device}'} with a region",
                "a region alone: it has all of a workload, where it likes",
            )  # fmt: skip
        async with self._workloads.stepping:
            rule, away = self._rule_of(key), self._workloads.delegated.get(key)
            under_way = [each.id for each in self._workloads.migrations.live if each.workload == key]
            if under_way:
                raise refuse(
                    Code.CONFLICT, f"{key} moves already: {under_way[0]}", "one that does not", "wait for its end"
                )
            home = region == self._workloads.region
            if home and (away is None or not away.ready):
                raise refuse(Code.CONFLICT, f"{key} runs at home", "one that another region runs")
            if not home and away is not None:
                raise refuse(
                    Code.CONFLICT, f"{away.region} has {key} already", "one that home runs",
                    f"bring it home first: --to {self._workloads.region}",
                )  # fmt: skip
            if home and away is not None:
                source = abroad(away)
            else:
                self._may_leave(key, region)
                node, one = self._movable(key, Aim(), "")
                source = Place(one.id, node, one.device, one.model, one.precision)
            name, now, wall = self._ids.name(KIND), self._clock.now(), self._clock.wall()
            begun = Migration(name, key, Cause.OPERATOR, actor, source, Aim(region=region), rule, UNDECIDED)
            if home:
                begun = replace(begun, asked=asked_of(self._intent_of(key)))
            migration = machine.planned(begun, now, wall)[0]
            await self._commit([migration], actor)
        return self._workloads.migrations.all[migration.id]

    async def cancel(self, name: str, actor: str, key: WorkloadKey | None = None) -> Migration:
        """Takes a move back. key: whose it is, where that was said.

        Raises ShoalError(MIGRATION_UNKNOWN | CONFLICT | STORE_FULL | ..)."""
        async with self._workloads.stepping:
            known = self.one(name)
            if key is not None and known.workload != key:
                raise refuse(Code.CONFLICT, f"{name} moves {known.workload}", f"a move of {key}")
            after, told = machine.cancelled(known, actor, self._clock.now(), self._clock.wall())
            await self._commit([after], actor, told)
        return after

    async def drain(self, node: str, actor: str) -> Drained:
        """Cordons a node and moves every replica that it has to another.

        Raises ShoalError(NODE_UNKNOWN | STORE_FULL | ..)."""
        await self._fleet.cordon(node, True, actor)
        async with self._workloads.stepping:
            desired = self._workloads.desired.get(node)
            moving = {each.source.assignment for each in self._workloads.migrations.live}
            begun, unmoved = list[Migration](), dict[str, Refusal]()
            for one in desired.assignments if desired is not None else ():
                if one.draining or one.id in moving:
                    continue
                if one.standby:
                    unmoved[one.id] = Refusal(
                        Code.WAITING_FOR_REPLACEMENT, "it goes when another node has one that stands by"
                    )
                    continue
                try:
                    held = self._movable(one.workload, Aim(), one.id)
                    begun.append(self._new(one.workload, Cause.DRAIN, actor, held, Aim(), self._rule_of(one.workload)))
                except ShoalError as error:
                    unmoved[one.id] = error.refusal
            await self._commit(begun, actor)
            under_way = (each for each in self._workloads.migrations.live if each.source.node == node)
            return Drained(tuple(under_way), unmoved)

    async def clear(self, name: str, actor: str) -> tuple[str, ...]:
        """Forgets what was held against places of a model (by name or digest); says which.

        Raises ShoalError(STORE_FULL | ..)."""
        digest = self._workloads.catalog.digest_of(name)
        async with self._workloads.stepping:
            cleared = self._cleared(lambda each: each.target is not None and each.target.model == digest)
            await self._commit(cleared, actor)
        return tuple(f"{each.target.model} on {each.target.where}" for each in cleared if each.target is not None)

    def one(self, name: str) -> Migration:
        """Raises ShoalError(MIGRATION_UNKNOWN)."""
        known = self._workloads.migrations.all.get(name)
        if known is None:
            raise refuse(
                Code.MIGRATION_UNKNOWN, f"migration {name!r:.80}", "one that is listed", "see `shoal get migrations`"
            )
        return known

    # -- what may move -------------------------------------------------------------------------------------------------

    def _rule_of(self, key: WorkloadKey) -> MigrationRule:
        return self._intent_of(key).migration

    def _intent_of(self, key: WorkloadKey) -> Intent:
        intent = next((intent for intent in self._workloads.intents if intent.key == key), None)
        if intent is None:
            raise refuse(Code.WORKLOAD_UNKNOWN, str(key), "an applied workload", "see `shoal get workloads`")
        return intent

    def _may_leave(self, key: WorkloadKey, region: str) -> None:
        intent = self._intent_of(key)
        if intent.session:
            raise refuse(
                Code.CONFLICT, f"{key} keeps state for its sessions", "a workload without",
                "sessions move between nodes of a region only",
            )  # fmt: skip
        if not may_delegate(intent.delegation, region):
            raise ShoalError(policy_forbids(intent.delegation, region))

    def _movable(self, key: WorkloadKey, aim: Aim, replica: str) -> tuple[str, Assignment]:
        crossing = [each.id for each in self._workloads.migrations.live if each.crosses and each.workload == key]
        if crossing:
            raise refuse(Code.CONFLICT, f"{key} moves as a whole: {crossing[0]}", "one that does not", "wait for it")
        held = [
            (node, one)
            for node, desired in sorted(self._workloads.desired.items())
            for one in desired.assignments
            if one.workload == key and not (one.draining or one.standby) and replica in ("", one.id)
        ]
        if not held:
            raise refuse(Code.NOT_FOUND, f"no replica {replica} of {key}".replace("  ", " "), "one that runs here")
        bound = {
            name: each.id
            for each in self._workloads.migrations.live
            for name in (each.source.assignment, each.target.assignment if each.target is not None else "")
        }
        free = [each for each in held if each[1].id not in bound]
        if not free:
            moves = ", ".join(sorted({bound[one.id] for _, one in held}))
            raise refuse(Code.CONFLICT, f"{key} moves already: {moves}", "a replica that does not", "wait for its end")
        away = [each for each in free if not aim.node or not aim.allows(each[0], each[1].device, each[1].model)]
        if not away:
            where = f"{free[0][0]}/{free[0][1].device}"
            raise refuse(Code.CONFLICT, f"{key} is on {where} already", "another node or device")
        spare = self._spare_at(key, aim)
        if spare is not None:
            raise refuse(
                Code.CONFLICT, f"the standby of {key} is on {aim.node}/{spare.device}", "another node or device",
                "aim elsewhere, or apply it without `standby`",
            )  # fmt: skip
        serving = [each for each in away if self._serves(*each)]
        if not serving:
            raise refuse(
                Code.MODEL_NOT_READY, f"no replica of {key} serves that could move", "one that is ready",
                "ask again when it is; `shoal explain` says what it waits for",
            )  # fmt: skip
        return serving[0]

    def _spare_at(self, key: WorkloadKey, aim: Aim) -> Assignment | None:
        """What stands by on the one device that it could go to."""
        state, desired = self._fleet.fleet.nodes.get(aim.node), self._workloads.desired.get(aim.node)
        if state is None or desired is None:
            return None
        devices = {each.name for each in state.node.devices if aim.device in ("", each.name)}
        spares = (each for each in desired.assignments if each.workload == key and each.standby and not each.draining)
        return next((each for each in spares if devices == {each.device}), None)

    def _serves(self, node: str, one: Assignment) -> bool:
        state = self._fleet.fleet.nodes.get(node)
        observed = state.observed.get(one.id) if state is not None else None
        return observed is not None and observed.phase is Phase.READY

    # -- writing -------------------------------------------------------------------------------------------------------

    def _new(
        self, key: WorkloadKey, cause: Cause, actor: str, held: tuple[str, Assignment], aim: Aim, rule: MigrationRule
    ) -> Migration:
        node, one = held
        source = Place(one.id, node, one.device, one.model, one.precision)
        asked = Migration(self._ids.name(KIND), key, cause, actor, source, aim, rule, UNDECIDED)
        return machine.planned(asked, self._clock.now(), self._clock.wall())[0]

    def _cleared(self, which: Callable[[Migration], bool]) -> list[Migration]:
        known = self._workloads.migrations.all.values()
        return [
            replace(each, cleared=True)
            for each in known
            if isinstance(each.state, Aborted) and not each.cleared and which(each)
        ]

    async def _commit(self, changed: list[Migration], actor: str, told: tuple[Told, ...] = ()) -> None:
        if not changed:
            return
        book, by_id = self._workloads.migrations, {each.id: each for each in changed}
        written = book.written(by_id, self._clock.now())
        events = [
            Event("MIGRATION_PLANNED", each.id, _asked(each), actor, _node_of(each), each.workload)
            for each in changed
            if isinstance(each.state, Planned)
        ]
        events += [
            Event(one.code, each.id, one.message, actor, _node_of(each), each.workload)
            for each in changed
            for one in told
        ]
        await self._truth.commit(written.puts, deletes=written.deletes, events=events)
        book.adopt(by_id, written)
        self._changed()


def _node_of(migration: Migration) -> str:
    return "" if migration.source.region else migration.source.node


def _asked(migration: Migration) -> str:
    return f"from {migration.source.where} to {migration.aim.where or 'another place'} ({migration.cause})"


def _is_wrong(migration: Migration) -> bool:
    return isinstance(migration.state, Aborted) and migration.state.refusal.code in WRONG
