"""What every story of one blow has: a region, clients that ask all the while and ask again as clients do, and the
moment at which something is struck, by what is written then.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.catalog import DocumentKey
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.migration.model import Migration, Stage
from shoal.coordinator.ports import Transaction
from shoal.simulator.machine import Machine
from shoal.simulator.moves import moves_in, step_of
from shoal.simulator.operators import WHO, Act
from shoal.simulator.scenario import CONVERGE_S, START_S, STEADY_S, digest
from shoal.simulator.scenario import Stage as Run
from shoal.simulator.storage import Moment, unwatched
from shoal.types.codes import ShoalError
from shoal.types.workload import WorkloadKey

GATEWAYS: Final = ("gateway", "gateway-2")
TEXT: Final = WorkloadKey("default", "text")
OLD, NEW = digest(0), digest(1)
ENDS_S: Final = 150.0
"""Virtual seconds in which the move is over, whoever is gone."""
PATIENCE_S: Final = 60.0
AGAIN_S: Final = 0.25
EVERY_S: Final = 0.15

OF_GAPS: Final = (Stage.CLEARING, Stage.RETURNING)
"""Only of a move with a gap: its one device cannot hold both replicas."""
MOVE_STEPS: Final = (
    *(str(stage) for stage in Stage if stage not in (Stage.SHIFTING, *OF_GAPS)),
    "shifting 1",
    "shifting 2",
)
FORTH: Final = ("planned", "reserved", "staging", "warming", "verifying", "shifting 1", "shifting 2")
"""From where a move can be taken back."""
GAP_FORTH: Final = ("reserved", "staging", "clearing", "warming")
"""Likewise with a gap; staging is before it, and again in it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """machine: whose. step: of it, as it is named there. victim: who or what is struck."""

    machine: str
    step: str
    moment: Moment
    victim: str

    def __str__(self) -> str:
        return f"{self.machine} {self.step}, {self.moment}: {self.victim}"


class Story:
    """A region, its clients, and the blow at one cell. late_s: from a step's commit to the blow, where that comes after
    its effect."""

    def __init__(self, run: Run, cell: Cell, late_s: float) -> None:
        self.run = run
        self.cell = cell
        self.late_s = late_s
        self.world = run.world
        self.cluster = run.cluster
        self.chance = run.world.chance.stream("matrix story")
        self.struck = False
        self._seen: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        run.kinds = (str(cell),)

    async def tell(self) -> None:
        cluster = self.cluster
        cluster.operators.quota = 100
        await self.start()
        await cluster.operators.insist("push", self._push)
        await self.begin()
        self.world.record("matrix.begins", cell=str(self.cell), strict=self.may_fail_nothing())
        cluster.on_commit = self._watch
        await self.act()
        if not self.struck:
            self.world.record("matrix.missed", cell=str(self.cell))
        cluster.on_commit = unwatched
        self.world.record("matrix.calms")
        await self.settle()
        cluster.operators.read_memory()
        self.world.record("matrix.ends")

    async def start(self) -> None:
        """Everything, from nothing."""
        await self.cluster.start()

    async def begin(self) -> None:
        """Up to where the machine starts."""
        raise NotImplementedError

    async def act(self) -> None:
        """The machine, from its first step to its end."""
        raise NotImplementedError

    async def settle(self) -> None:
        """All that would last ends, and the region converges."""
        await self.cluster.calm()
        self.run.converged_s = await self.run.converges(CONVERGE_S, "after the blow")
        await self.run.stays(STEADY_S)
        await self.stop_asking()

    def documents(self, model: str, replicas: int) -> str:
        raise NotImplementedError

    def strike(self) -> None:
        """The blow."""
        raise NotImplementedError

    def steps(self, moment: Moment, transaction: Transaction) -> tuple[str, ...]:
        """Which of the machine's steps a transaction takes."""
        raise NotImplementedError

    async def up(self, model: str, replicas: int) -> None:
        await self.apply(model, replicas)
        await self.run.converges(START_S, "coming up")

    async def apply(self, model: str, replicas: int) -> None:
        text = self.documents(model, replicas)

        async def act(region: Region) -> None:
            applied = await region.workloads.apply([("text.yaml", text)], {}, "", WHO)
            if applied.planned.problems:
                raise ShoalError(applied.planned.problems[0].refusal)

        await self.cluster.operators.insist(f"{model[-2:]} times {replicas}", act)

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = self.world.now() + within_s
        while not condition():
            if self.world.now() >= deadline:
                self.world.fail(f"not within {within_s:.0f} s: {what}")
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(0.05)

    async def _push(self, region: Region) -> None:
        for name, each in self.cluster.spec.profiles.items():
            await region.models.push("", each.size_bytes, name, no_bytes(), actor=WHO)

    # -- the blow ------------------------------------------------------------------------------------------------------

    def _watch(self, moment: Moment, transaction: Transaction) -> None:
        cell = self.cell
        for step in self.steps(moment, transaction):
            if step == cell.step and not self.struck:
                if moment is cell.moment:
                    self._blow()
                elif cell.moment is Moment.EFFECTED and moment is Moment.AFTER:
                    self.struck = True
                    self.world.later(self.late_s, self._blow)
            if moment is Moment.AFTER and step not in self._seen:
                self._seen.add(step)
                self.reached(step)

    def reached(self, step: str) -> None:
        """For the first time."""

    def _blow(self) -> None:
        self.struck = True
        self.world.record("fault.struck", cell=str(self.cell))
        self.strike()

    def hit(self, machine: Machine, part: str, gone_s: float) -> None:
        """One part of a machine. gone_s: until one without power has it again; infinite: never in this run."""
        match part:
            case "power":
                self.cluster.cut_power(machine)
                if gone_s < PATIENCE_S:
                    self.world.later(gone_s, lambda: self._come_back(machine))
            case "supervisor":
                self.cluster.kill_agent(machine)
            case "front":
                machine.kill_front()
            case _:
                for name in sorted(machine.workers):
                    machine.kill_worker(name, own_fault=False, why="killed from outside")

    def _come_back(self, machine: Machine) -> None:
        if machine.name not in self.cluster.buried:
            self.cluster.restore_power(machine)

    def may_fail_nothing(self) -> bool:
        """Whether somebody else can answer whatever the victim was asked."""
        return False

    # -- clients -------------------------------------------------------------------------------------------------------

    def start_asking(self) -> None:
        self._asking = asyncio.ensure_future(self._clients())

    async def stop_asking(self) -> None:
        """All that was asked is answered, or lost."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.wait((asking,))

    async def _clients(self) -> None:
        number = 0
        async with asyncio.TaskGroup() as group:
            while True:
                number += 1
                group.create_task(self._client(number))
                try:
                    await asyncio.sleep(self.chance.delay(EVERY_S))
                except asyncio.CancelledError:
                    return

    def asked(self) -> None:
        """A request is about to be sent."""

    async def _client(self, number: int) -> None:
        """One request: at one gateway, at the other where that fails, and again after a while."""
        counts = self.cluster.operators.counts
        counts["asked"] = counts.get("asked", 0) + 1
        began, tries = self.world.now(), 0
        while True:
            self.asked()
            front = GATEWAYS[(number + tries) % len(GATEWAYS)]
            code = await self.cluster.operators.request(front, TEXT)
            tries += 1
            if code is None:
                break
            if tries == len(GATEWAYS):
                counts["failed"] = counts.get("failed", 0) + 1
                self.world.record("client.failed", number=number, code=str(code))
            if tries >= len(GATEWAYS):
                if self.world.now() > began + PATIENCE_S:
                    counts["lost"] = counts.get("lost", 0) + 1
                    self.world.record("client.lost", number=number, code=str(code))
                    break
                await asyncio.sleep(AGAIN_S)
        self.world.record("client.done", number=number)


class Moving(Story):
    """One live move. back: the stage at which it is cancelled; anything else: it is not."""

    def __init__(self, run: Run, cell: Cell, late_s: float, back: str) -> None:
        super().__init__(run, cell, late_s)
        self.back = back
        self.migration: Migration | None = None
        self.is_written = False
        """Else the next one that is begun counts."""
        self._cancelling: asyncio.Task[None] | None = None

    async def ended(self) -> None:
        """Returns when it is over, and is there still."""
        await self.until(lambda: self.is_written, 30.0, "a move")
        await self.until(self._is_over, ENDS_S, f"the end of the move, {self.cell}")
        await asyncio.sleep(1.0)  # a blow after the last step's effect
        await self.until(self._is_over, ENDS_S, "the end of the move to be there again")
        ended = self._now()
        assert ended is not None
        end = f"{ended.stage} {ended.state.refusal.code}" if ended.state.kind == "aborted" else str(ended.stage)
        self.world.record("move.ended", end=end, story=tuple(str(each.stage) for each in ended.story))
        self.cluster.operators.counts[end] = 1

    def steps(self, moment: Moment, transaction: Transaction) -> tuple[str, ...]:
        found = []
        for migration in moves_in(transaction):
            if not self.is_written or self.migration is None or migration.id == self.migration.id:
                self.migration = migration
                self.is_written |= moment is Moment.AFTER
                found.append(step_of(migration))
        return tuple(found)

    def reached(self, step: str) -> None:
        assert self.migration is not None
        back, forth = self.back, GAP_FORTH if self.cell.machine == "gap" else FORTH
        if self._cancelling is None and step in forth and back in forth and forth.index(step) >= forth.index(back):
            name = self.migration.id
            self._cancelling = asyncio.ensure_future(self.ask("cancel", lambda region: region.moving.cancel(name, WHO)))

    def _now(self) -> Migration | None:
        region = self.cluster.region
        if region is None or self.migration is None:
            return None
        return region.workloads.migrations.all.get(self.migration.id)

    def _is_over(self) -> bool:
        now = self._now()
        return now is not None and now.is_over

    async def ask(self, what: str, act: Act) -> None:
        """Until it is done, or there is something to see of it."""
        while not (self._is_over() or (what != "cancel" and self.is_written)):
            if await self.cluster.operators.offer(what, act) == "ok":
                return
            await asyncio.sleep(0.5)


async def delete(region: Region) -> None:
    key = DocumentKey("Workload", f"{TEXT.tenant}/{TEXT.name}")
    if key in region.workloads.catalog.documents:
        await region.workloads.delete(key, WHO)


async def no_bytes() -> AsyncIterator[bytes]:
    return
    yield b""
