"""`shoal migrate --queue`: accepts moves that are refused only for now, and begins each once nothing refuses it.

A look is what `can-move` computes. It never runs in the region's step, and a move that begins is an ordinary one.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from shoal.coordinator import metrics
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Transition
from shoal.coordinator.controllers.workloads.apply import Compute
from shoal.coordinator.controllers.workloads.moves_api import ID_KIND, MovesController, check_is_of
from shoal.coordinator.controllers.workloads.placement_queries import PlacementQueries
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.controllers.workloads.transitions import RegionWrites
from shoal.coordinator.core.migration.model import Migration, place_of
from shoal.coordinator.core.migration.movable import HeldReplica, MoveObstacle, held_by, held_replicas, is_there
from shoal.coordinator.core.migration.queue import (
    LOOK_SHARE,
    WAIT_S,
    QueuedMove,
    entry_refusal,
    expiry_refusal,
    next_look,
)
from shoal.coordinator.core.placement.feasible import node_fault
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import StaleRevision
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Look:
    """A look that is being computed."""

    # Id of the move.
    move: str
    # When it began.
    began: Elapsed
    # What refuses the move (None: nothing), and when that was known.
    found: asyncio.Task[tuple[Refusal | None, Elapsed]]


class QueuedMovesController:
    """Commits every change before it counts, under the lock that steps hold."""

    def __init__(
        self,
        workloads: WorkloadsController,
        placement: PlacementQueries,
        moves: MovesController,
        context: RegionContext,
        compute: Compute,
    ) -> None:
        """compute: where looks run, which take as long as a plan of the region."""
        self._workloads = workloads
        self._queue = workloads.queue
        self._placement = placement
        self._moves = moves
        self._clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._compute = compute
        self._looked_at: dict[str, Elapsed] = {}
        self._look: _Look | None = None
        self._rests_until = Elapsed(0.0)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def migrate(self, key: WorkloadKey, aim: Aim, actor: str, *, replica: str = "") -> Migration | QueuedMove:
        """As `MovesController.migrate`, but a move that is refused only for now waits.

        Raises ShoalError(WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | CONFLICT | QUEUE_FULL | STORE_FULL), or the code
        by which the move could never begin.
        """
        return await self._run(lambda: self._request(key, aim, actor, replica))

    def _request(
        self, key: WorkloadKey, aim: Aim, actor: str, replica: str
    ) -> Transition[RegionWrites, Migration | QueuedMove]:
        self._moves.check_request(key, aim)
        found = self._moves.movable_replica(key, aim, replica)
        if isinstance(found, MoveObstacle):
            if found.is_final:
                raise ShoalError(found.refusal)
            refusal, source = found.refusal, self._source(key, aim, replica)
        else:
            refused = self._placement.estimate_move(key, aim, replica=found[1].id).refusal
            if refused is None:
                begun = self._moves.begin(key, aim, actor, found)
                return Transition(begun.effects, begun.writes, begun.adopt)
            refusal, source = refused, found
        full = entry_refusal(self._queue.all.values(), key, replica)
        if full is not None:
            raise ShoalError(full)
        if (never := self._placement.hopeless_refusal(key, aim, source[1].id)) is not None:
            raise ShoalError(never)
        now, place = self._clock.now(), place_of(self._workloads.fleet, *source)
        queued = QueuedMove(
            self._ids.name(ID_KIND), key, actor, aim, replica, place, refusal, self._clock.wall(), now,
            Elapsed(now + WAIT_S),
        )  # fmt: skip
        told = f"from {place.where} to {aim.where}: waits, {refusal}"
        return self._transition({queued.id: queued}, queued, LogEvent("MIGRATION_QUEUED", queued.id, told, actor))

    def _source(self, key: WorkloadKey, aim: Aim, replica: str) -> HeldReplica:
        """The replica that would move if it could: one that is not there already, where there is one."""
        mine = held_replicas(key, replica, self._held())
        if not mine:
            raise refuse(Code.NOT_FOUND, f"no replica of {key}", "one that runs here")
        return next((each for each in mine if not is_there(each, aim)), mine[0])

    def _held(self) -> list[HeldReplica]:
        return held_by({node: each.assignments for node, each in self._workloads.desired.items()})

    async def cancel(self, name: str, actor: str, key: WorkloadKey | None = None) -> Migration | QueuedMove:
        """Takes a move back that waits; a migration that began as `MovesController.cancel` does.

        Raises ShoalError(MIGRATION_UNKNOWN | CONFLICT | STORE_FULL).
        """
        return await self._run(lambda: self._cancel(name, actor, key))

    def _cancel(
        self, name: str, actor: str, key: WorkloadKey | None
    ) -> Transition[RegionWrites, Migration | QueuedMove]:
        queued = self._queue.all.get(name)
        if queued is None:
            cancelled = self._moves.cancel_transition(name, actor, key)
            return Transition(cancelled.effects, cancelled.writes, cancelled.adopt)
        check_is_of(name, queued.workload, key)
        if queued.is_over:
            raise refuse(Code.CONFLICT, f"{name} is {queued.stage}", "a move that waits", "see `shoal get migrations`")
        return self._end(queued, Refusal(Code.MOVE_CANCELLED, f"by {actor}"), actor)

    # -- looks ---------------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Gives up what waited too long, and looks at the move whose turn it is. Called by the region's loop; costs
        nothing while nothing waits, and waits for no look."""
        if not self._queue.waiting:
            return
        with suppress(ShoalError, StaleRevision):  # the store takes nothing now: the next tick tries again
            await self._give_up_expired()
            if self._look is not None:
                await self._take_up(self._look)
            elif (queued := self._next()) is not None:
                await self._look_at(queued)

    def _next(self) -> QueuedMove | None:
        now = self._clock.now()
        self._looked_at = {name: at for name, at in self._looked_at.items() if name in self._queue.all}
        return next_look(self._queue.all.values(), self._looked_at, now) if now >= self._rests_until else None

    async def _give_up_expired(self) -> None:
        now = self._clock.now()
        for queued in self._queue.waiting:
            if now >= queued.until:
                why = expiry_refusal(queued, self._queue.reason_of(queued))
                await self._run(partial(self._end_if_waiting, queued.id, why))

    async def _look_at(self, queued: QueuedMove) -> None:
        """What costs little first: whether there is a replica to move and a node to move it to."""
        now = self._clock.now()
        self._looked_at[queued.id] = now
        found = self._obstacle(queued)
        if isinstance(found, MoveObstacle):
            if found.is_final:
                await self._run(partial(self._end_if_waiting, queued.id, found.refusal))
            else:
                self._queue.reasons[queued.id] = found.refusal
            return
        look = self._placement.waits_for(queued.workload, queued.aim, found[1].id)
        self._look = _Look(queued.id, now, asyncio.create_task(self._compute_look(look)))

    async def _compute_look(self, look: Callable[[], Refusal | None]) -> tuple[Refusal | None, Elapsed]:
        return await self._compute(look), self._clock.now()

    async def _take_up(self, look: _Look) -> None:
        """Acts on a look that is done."""
        if not look.found.done():
            return
        self._look = None
        if look.found.cancelled() or look.found.exception() is not None:
            return  # the workload went meanwhile, or there was no turn for the look: the next one says
        refusal, at = look.found.result()
        self._rests_until = Elapsed(at + (at - look.began) / LOOK_SHARE)
        if refusal is not None:
            self._queue.reasons[look.move] = refusal
            return
        await self._run(lambda: self._begin_if_ready(look.move))

    def _obstacle(self, queued: QueuedMove) -> HeldReplica | MoveObstacle:
        """The replica to move, or what keeps it, without a plan."""
        try:
            self._moves.check_request(queued.workload, queued.aim)
        except ShoalError as gone:
            return MoveObstacle(gone.refusal, is_final=True)
        fault = node_fault(self._workloads.fleet.nodes[queued.aim.node])
        found = self._moves.movable_replica(queued.workload, queued.aim, queued.replica)
        if isinstance(found, MoveObstacle) or fault is None:
            return found
        return MoveObstacle(fault.refusal)

    def _begin_if_ready(self, name: str) -> Transition[RegionWrites, None]:
        """By the state as of now: what a look found may have changed since."""
        queued = self._queue.all.get(name)
        if queued is None or queued.is_over:
            return Transition(None)
        found = self._obstacle(queued)
        if isinstance(found, MoveObstacle):
            if found.is_final:
                return self._end_if_waiting(name, found.refusal)
            self._queue.reasons[name] = found.refusal
            return Transition(None)
        refusal = self._placement.waits_for(queued.workload, queued.aim, found[1].id)()
        if refusal is not None:
            self._queue.reasons[name] = refusal
            return Transition(None)
        waited = queued.id, queued.waited(self._clock.now())
        begun = self._moves.begin(queued.workload, queued.aim, queued.actor, found, waited=waited)
        left = self._queue.writes({name: None})
        assert begun.writes is not None, "a new migration is stored"
        writes = replace(begun.writes, deletes=(*begun.writes.deletes, *left.deletes))

        def adopt(revision: int) -> None:
            begun.adopt(revision)
            self._queue.adopt({name: None}, left)

        return Transition(None, writes, adopt)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _end_if_waiting(self, name: str, why: Refusal) -> Transition[RegionWrites, None]:
        queued = self._queue.all.get(name)
        if queued is None or queued.is_over:
            return Transition(None)
        ended = self._end(queued, why, "coordinator")
        return Transition(None, ended.writes, ended.adopt)

    def _end(self, queued: QueuedMove, why: Refusal, actor: str) -> Transition[RegionWrites, Migration | QueuedMove]:
        after = replace(queued, ended=why, ended_at=self._clock.wall())
        told = f"aborted, {queued.waited(self._clock.now())}: {why}"
        return self._transition({queued.id: after}, after, LogEvent("MIGRATION_ABORTED", queued.id, told, actor))

    def _transition(
        self, changed: Mapping[str, QueuedMove], result: QueuedMove, event: LogEvent
    ) -> Transition[RegionWrites, Migration | QueuedMove]:
        written = self._queue.writes(changed)
        event = replace(event, node=result.source.node, workload=result.workload)

        def adopt(revision: int) -> None:
            self._queue.adopt(changed, written)
            if result.ended is not None:
                self._meter.count(
                    metrics.MIGRATIONS_ENDED, stage=result.stage, cause="operator", code=result.ended.code
                )

        return Transition(result, RegionWrites(written.puts, written.deletes, (event,)), adopt)

    async def _run(self, step: Callable[[], Transition[RegionWrites, T]]) -> T:
        async with self._workloads.step_lock:
            return await self._workloads.transitions.run(step)
