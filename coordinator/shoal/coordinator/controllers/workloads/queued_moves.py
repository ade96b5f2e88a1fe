"""`shoal migrate --queue`: accepts moves that are refused only for now, and begins each once nothing refuses it.

A look is what `can-move` computes. It never runs in the region's step, and a move that begins is an ordinary one.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import structlog

from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Compute, Transition, inline
from shoal.coordinator.controllers.workloads.looks import MOST_LOOKS, Look, run_after_look
from shoal.coordinator.controllers.workloads.moves_api import ID_KIND, MovesController, check_is_of
from shoal.coordinator.controllers.workloads.placement_queries import PlacementQueries
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.controllers.workloads.transitions import RegionWrites
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.migration.estimate import check_aim
from shoal.coordinator.core.migration.model import Migration, place_of
from shoal.coordinator.core.migration.movable import HeldReplica, MoveObstacle, held_replicas, is_there, list_held
from shoal.coordinator.core.migration.queue import (
    LOOK_SHARE,
    WAIT_S,
    DocumentRevision,
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

MOST_IN_A_TICK: Final = 16
"""Moves that one tick looks at, where what costs little says already that they wait."""
log: Final = structlog.get_logger("shoal.coordinator")


@dataclass(frozen=True, slots=True)
class _Look:
    """A look that is being computed."""

    # Id of the move.
    move: str
    # Whether a request would still move the same replica, and what the look names is the same.
    is_same: Callable[[], bool]
    # How many of the last ones in a row found that this move may begin.
    earlier: int
    # Processor time that it took, once it ran; empty before that.
    took: list[float] = field(default_factory=list)


class QueuedMovesController:
    """Commits every change before it counts, under the lock that steps hold."""

    def __init__(
        self,
        workloads: WorkloadsController,
        placement: PlacementQueries,
        moves: MovesController,
        context: RegionContext,
        compute: Compute,
        thread_time: Callable[[], float],
    ) -> None:
        """compute: where looks run, which take as long as a plan of the region. thread_time: seconds of processor time
        of the thread that asks."""
        self._workloads = workloads
        self._queue = workloads.queue
        self._placement = placement
        self._moves = moves
        self._clock = context.clock
        self._ids = context.ids
        self._compute = compute
        self._thread_time = thread_time
        self._looked_at: dict[str, Elapsed] = {}
        self._turns: dict[str, Elapsed] = {}
        self._documents: dict[str, DocumentRevision] = {}
        """By id of a move, what the last tick found of its workload."""
        self._look: tuple[_Look, asyncio.Task[MoveObstacle | None]] | None = None
        self._rests_until = Elapsed(0.0)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def migrate(
        self, key: WorkloadKey, aim: Aim, actor: str, *, replica: str = "", compute: Compute = inline
    ) -> Migration | QueuedMove:
        """As `MovesController.migrate`, but a move that is refused only for now waits.

        Raises ShoalError(WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | CONFLICT | QUEUE_FULL | STORE_FULL), or the code
        by which the move could never begin, and what `compute` raises.
        """
        return await run_after_look(
            self._workloads.transitions,
            lambda: self._look_at_request(key, aim, replica),
            lambda reason: self._request(key, aim, actor, replica, reason),
            compute,
        )

    def _look_at_request(self, key: WorkloadKey, aim: Aim, replica: str) -> Look[Refusal | None]:
        """What a move has to wait for; None: nothing. It raises by what waiting does not change."""
        self._moves.check_request(key, aim)
        found = self._moves.movable_replica(key, aim, replica)
        if isinstance(found, MoveObstacle):
            if found.is_final:
                raise ShoalError(found.refusal)
            return self._look_at_wait(key, aim, replica, found.refusal)
        estimate, is_moving = (
            self._placement.move_estimator(key, aim, replica=found[1].id),
            self._placement.is_moving(key),
        )
        is_same, check_wait = (
            self._moves.same_as_now(key, aim, replica, found),
            self._wait_check(key, aim, replica, found),
        )

        def ask() -> Refusal | None:
            estimates = estimate()
            if estimates.refusal is None:
                return None
            if estimates.there_already is not None and not is_moving:
                raise ShoalError(estimates.there_already)
            check_wait()
            return estimates.refusal

        # A move that waits is looked at again: what it waits for now may be over by then.
        return Look(ask, lambda reason: reason is None and not is_same())

    def _look_at_wait(self, key: WorkloadKey, aim: Aim, replica: str, obstacle: Refusal) -> Look[Refusal | None]:
        """Whether a move can wait for the end of what is in the way."""
        check_wait = self._wait_check(key, aim, replica, self._source(key, aim, replica, obstacle))

        def ask() -> Refusal:
            check_wait()
            return obstacle

        return Look(ask, lambda _: False)

    def _wait_check(self, key: WorkloadKey, aim: Aim, replica: str, source: HeldReplica) -> Callable[[], None]:
        """Raises ShoalError where the move cannot wait, or not usefully; it may run in a thread."""
        full = entry_refusal(self._queue.all.values(), key, replica)
        lasting = self._placement.lasting_refusal(key, aim, source[1].id)

        def check() -> None:
            if (why := full or lasting()) is not None:
                raise ShoalError(why)

        return check

    def _request(
        self, key: WorkloadKey, aim: Aim, actor: str, replica: str, reason: Refusal | None
    ) -> Transition[RegionWrites, Migration | QueuedMove]:
        """reason: what it has to wait for, by the look; None: nothing."""
        self._moves.check_request(key, aim)
        found = self._moves.movable_replica(key, aim, replica)
        if isinstance(found, MoveObstacle):
            if found.is_final:
                raise ShoalError(found.refusal)
            reason, source = found.refusal, self._source(key, aim, replica, found.refusal)
        elif reason is None:
            begun = self._moves.begin(key, aim, actor, found)
            return Transition(begun.effects, begun.writes, begun.adopt)
        else:
            source = found
        full = entry_refusal(self._queue.all.values(), key, replica)
        if full is not None:
            raise ShoalError(full)
        now, place = self._clock.now(), place_of(self._workloads.fleet, *source)
        queued = QueuedMove(
            self._ids.name(ID_KIND), key, actor, aim, replica, place, reason, self._clock.wall(), now,
            Elapsed(now + WAIT_S), document=self._revision_of(key),
        )  # fmt: skip
        told = f"from {place.where} to {aim.where}: waits, {reason}"
        return self._transition(queued, LogEvent("MIGRATION_QUEUED", queued.id, told, actor))

    def _source(self, key: WorkloadKey, aim: Aim, replica: str, obstacle: Refusal) -> HeldReplica:
        """The replica that would move if it could: one that is not there already, where there is one. obstacle: why
        none moves now, which also says why there is none."""
        mine = held_replicas(key, replica, self._held())
        if not mine:
            raise ShoalError(obstacle)
        return next((each for each in mine if not is_there(each, aim)), mine[0])

    def _revision_of(self, key: WorkloadKey) -> DocumentRevision | None:
        stored = self._workloads.catalog.documents.get(DocumentKey("Workload", str(key)))
        return DocumentRevision(stored.revision, stored.applied_at) if stored is not None else None

    def _held(self) -> list[HeldReplica]:
        return list_held({node: each.assignments for node, each in self._workloads.desired.items()})

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
        """Ends what has nothing left to move or waited too long, and looks at the move whose turn it is. Called by the
        region's loop; costs nothing while nothing waits, and waits for no look."""
        if not self._queue.waiting:
            return
        with suppress(ShoalError, StaleRevision):  # the store takes nothing now: the next tick tries again
            await self._give_up()
            if self._look is not None:
                await self._take_up(*self._look)
            else:
                await self._look_around()

    async def _give_up(self) -> None:
        now, wall = self._clock.now(), self._clock.wall()
        known = {each.key for each in self._workloads.intents}
        for queued in self._queue.waiting:
            why = self._gone(queued, known) or expiry_refusal(queued, self._queue.reason_of(queued), now, wall)
            if why is not None:
                await self._run(partial(self._end_if_waiting, queued.id, why))
        waits = {each.id: each.workload.tenant for each in self._queue.waiting}
        self._documents = {name: each for name, each in self._documents.items() if name in waits}
        self._looked_at = {name: at for name, at in self._looked_at.items() if name in waits}
        self._turns = {tenant: at for tenant, at in self._turns.items() if tenant in waits.values()}

    def _gone(self, queued: QueuedMove, known: Collection[WorkloadKey]) -> Refusal | None:
        """Why there is nothing to move any more, or nowhere; None: there is. known: all workloads."""
        try:
            check_aim(self._workloads.fleet, queued.aim)
            if queued.workload not in known:
                self._moves.check_request(queued.workload, queued.aim)
        except ShoalError as gone:
            return gone.refusal
        before, after = self._documents.get(queued.id, queued.document), self._revision_of(queued.workload)
        if after is None:
            return None
        if before is None or not before.is_of_another(after):
            self._documents[queued.id] = after
            return None
        found = f"{queued.workload} was deleted, and another one applied under its name"
        return Refusal(Code.WORKLOAD_UNKNOWN, found, "the workload that was to move", "ask again for the new one")

    async def _look_around(self) -> None:
        """Looks at moves in their turn, up to the first one that takes computing."""
        now = self._clock.now()
        if now < self._rests_until:
            return
        for _ in range(MOST_IN_A_TICK):
            queued = next_look(self._queue.all.values(), self._looked_at, self._turns, now)
            if queued is None or await self._look_at(queued, now):
                return

    async def _look_at(self, queued: QueuedMove, now: Elapsed) -> bool:
        """Whether a look began. What costs little first: whether there is a replica to move and a node to move it
        to."""
        self._looked_at[queued.id] = self._turns[queued.workload.tenant] = now
        found = self._obstacle(queued)
        if isinstance(found, MoveObstacle):
            await self._heed(queued.id, found)
            return False
        self._begin_look(queued, found, earlier=0)
        return True

    async def _heed(self, name: str, obstacle: MoveObstacle) -> None:
        if obstacle.is_final:
            await self._run(partial(self._end_if_waiting, name, obstacle.refusal))
        elif name in self._queue.all:
            self._queue.reasons[name] = obstacle.refusal

    def _begin_look(self, queued: QueuedMove, found: HeldReplica, *, earlier: int) -> None:
        is_same = self._moves.same_as_now(queued.workload, queued.aim, queued.replica, found)
        look = _Look(queued.id, is_same, earlier)
        compute = self._placement.waits_for(queued.workload, queued.aim, found[1].id)

        def run_timed() -> MoveObstacle | None:
            began = self._thread_time()
            try:
                return compute()
            finally:
                look.took.append(self._thread_time() - began)

        self._look = look, asyncio.create_task(self._compute(run_timed))

    async def _take_up(self, look: _Look, task: asyncio.Task[MoveObstacle | None]) -> None:
        """Acts on a look that is done."""
        if not task.done():
            return
        self._look = None
        self._rests_until = Elapsed(self._clock.now() + sum(look.took) / LOOK_SHARE)
        if task.cancelled():
            return
        if (failed := task.exception()) is not None:
            if isinstance(failed, ShoalError):
                await self._heed(look.move, MoveObstacle(failed.refusal))
            else:
                log.error("look_at_queued_move_failed", migration=look.move, exc_info=failed)
        elif (obstacle := task.result()) is not None:
            await self._heed(look.move, obstacle)
        else:
            await self._run(lambda: self._begin_if_ready(look))

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

    def _begin_if_ready(self, look: _Look) -> Transition[RegionWrites, None]:
        """After a look that found nothing in the way, if that still holds: else it is looked at again."""
        name = look.move
        queued = self._queue.all.get(name)
        if queued is None or queued.is_over:
            return Transition(None)
        found = self._obstacle(queued)
        if isinstance(found, MoveObstacle):
            if found.is_final:
                return self._end_if_waiting(name, found.refusal)
            self._queue.reasons[name] = found.refusal
            return Transition(None)
        if look.earlier + 1 < MOST_LOOKS and not look.is_same():
            self._begin_look(queued, found, earlier=look.earlier + 1)
            return Transition(None)
        waited = queued.id, queued.waiting_time(self._clock.now())
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
        told = f"aborted, {queued.waiting_time(self._clock.now())}: {why}"
        return self._transition(after, LogEvent("MIGRATION_ABORTED", queued.id, told, actor))

    def _transition(self, result: QueuedMove, event: LogEvent) -> Transition[RegionWrites, Migration | QueuedMove]:
        changed = {result.id: result}
        written = self._queue.writes(changed)
        event = replace(event, node=result.source.node, workload=result.workload)

        def adopt(revision: int) -> None:
            self._queue.adopt(changed, written)

        return Transition(result, RegionWrites(written.puts, written.deletes, (event,)), adopt)

    async def _run(self, step: Callable[[], Transition[RegionWrites, T]]) -> T:
        async with self._workloads.step_lock:
            return await self._workloads.transitions.run(step)
