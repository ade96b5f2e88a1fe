"""One run of a region that moves a replica, or places and removes some, while one process is killed at one step (F05).

The cell of the matrix is the seed's: which step of the machine, before it is written, after that or after its effect,
and who is killed there; it is the coordinator for every second seed. All else a seed draws: the region, what began the
move, whether it is taken back or wrong, how long the victim is gone. Clients ask all the while through two gateways,
and ask again as clients do. The move must end by itself while the victim is gone or back; then the region must
converge.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import DOCUMENTS, DocumentKey
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.controllers.workloads import DESIRED
from shoal.coordinator.core.migration.model import Migration, Stage
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Transaction
from shoal.simulator.chance import Chance
from shoal.simulator.cluster import GIB, Spec
from shoal.simulator.machine import Behaviour, Machine, chip
from shoal.simulator.moves import moves_in, step_of
from shoal.simulator.operators import WHO, Act
from shoal.simulator.scenario import CONVERGE_S, START_S, STEADY_S, Outcome, digest, perform, profile
from shoal.simulator.scenario import Stage as Run
from shoal.simulator.storage import Moment, unwatched
from shoal.types.assignment import DesiredSet
from shoal.types.codes import ShoalError
from shoal.types.workload import WorkloadKey

NAME: Final = "matrix"
GATEWAYS: Final = ("gateway", "gateway-2")
TEXT: Final = WorkloadKey("default", "text")
OLD, NEW = digest(0), digest(1)
ENDS_S: Final = 150.0
"""Virtual seconds in which the move is over, whoever is gone."""
PATIENCE_S: Final = 60.0
AGAIN_S: Final = 0.25
EVERY_S: Final = 0.15

OF_GAPS: Final = (Stage.CLEARING, Stage.RETURNING)
"""Only of a move whose policy allows a gap, which none has here."""
MOVE_STEPS: Final = (
    *(str(stage) for stage in Stage if stage not in (Stage.SHIFTING, *OF_GAPS)),
    "shifting 1",
    "shifting 2",
)
FORTH: Final = ("planned", "reserved", "staging", "warming", "verifying", "shifting 1", "shifting 2")
"""From where a move can be taken back."""
PLACE_STEPS: Final = ("applied", "assigned", "routed", "scaled", "draining", "removed", "deleted")
WAITS: Final = ("planned", *PLACE_STEPS)
"""Steps at which the machine waits for whoever has gone, however long."""
ENDS_IN_BACK: Final = frozenset({Stage.ROLLING_BACK, Stage.ABORTED})
COORDINATORS: Final = ("coordinator", "coordinator-power")
PARTS: Final = ("power", "supervisor", "front", "worker")
VICTIMS: Final = (
    *COORDINATORS,
    *(f"source-{part}" for part in PARTS),
    *(f"target-{part}" for part in PARTS),
    *(f"gateway-{part}" for part in ("power", "supervisor", "front")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """machine: `move` or `place`. step: of it, as `*_STEPS` name them."""

    machine: str
    step: str
    moment: Moment
    victim: str

    def __str__(self) -> str:
        return f"{self.machine} {self.step}, {self.moment}: {self.victim}"


CELLS: Final = tuple(
    Cell("move", step, moment, victim) for step, moment, victim in product(MOVE_STEPS, Moment, VICTIMS)
) + tuple(
    Cell("place", step, moment, victim)
    for step, moment, victim in product(PLACE_STEPS, Moment, (*COORDINATORS, "source-power", "gateway-power"))
)
_AT_COORDINATORS: Final = tuple(cell for cell in CELLS if cell.victim in COORDINATORS)
_ELSEWHERE: Final = tuple(cell for cell in CELLS if cell.victim not in COORDINATORS)
_STRIDE: Final = 101
"""Seeds that follow on each other are of cells far apart, and all cells come before one comes again."""


@dataclass(frozen=True, slots=True)
class Draw:
    """cause: `operator`, `drain` or `documents`. back: what takes the move back, `wrong` or the stage at which it is
    cancelled; empty: nothing. impatient: the operator asks twice. gone_s: until a machine without power has it again;
    infinite: never in this run. late_s: from a step's commit to the blow, where that comes after its effect."""

    cell: Cell
    agents: int
    replicas: int
    standby: bool
    cause: str
    back: str
    impatient: bool
    gone_s: float
    late_s: float
    load_s: float


def drawn(seed: int) -> Draw:
    chance = Chance(seed).stream("matrix")
    cells = _ELSEWHERE if seed % 2 else _AT_COORDINATORS
    cell = cells[seed // 2 * _STRIDE % len(cells)]
    replicas = chance.whole(1, 2)
    standby = chance.happens(0.15)
    back = ""
    if cell.step in ENDS_IN_BACK or (cell.machine == "move" and chance.happens(0.1)):
        back = chance.pick(_ways_back(cell.step))
    # What documents ask for has its place from the first.
    cause = chance.pick(["operator", "operator", "drain", "drain" if cell.step == "planned" else "documents"])
    return Draw(
        cell=cell,
        agents=replicas + 1 + standby + chance.whole(0, 1),
        replicas=replicas,
        standby=standby,
        cause="operator" if back else cause,
        back=back,
        impatient=chance.happens(0.3),
        gone_s=chance.pick([0.5, 2.0, 6.0, 20.0, 20.0 if cell.step in WAITS else float("inf")]),
        late_s=chance.pick([0.0, 0.001, 0.01, 0.1, 0.5]) * chance.between(0.5, 1.5),
        load_s=chance.between(0.2, 2.5),
    )


def _ways_back(step: str) -> tuple[str, ...]:
    """What takes a move back without missing `step`."""
    match step:
        case "rolling_back":
            return ("wrong", *FORTH[1:])  # what has no place yet ends at once
        case "aborted":
            return ("wrong", *FORTH)
        case _ if step in FORTH:
            return FORTH[FORTH.index(step) :]
        case _:
            return ("",)


def spec(chance: Chance, draw: Draw) -> Spec:
    nodes = dict.fromkeys(GATEWAYS, ()) | {
        f"edge-{number}": (chip(f"cpu{number}", chance.between(8e10, 1.2e11), 8 * GIB),)
        for number in range(draw.agents)
    }
    size = chance.whole(10, 150) << 20
    return Spec(
        nodes=nodes,
        labels={},
        profiles={name: profile(name, 1e8, size) for name in (OLD, NEW)},
        behaviours={name: Behaviour(draw.load_s, chance.between(0.005, 0.05)) for name in (OLD, NEW)},
        datagrams=chance.happens(0.2),
        mqtt=chance.stream("mqtt").happens(0.2),
    )


def play(seed: int) -> Outcome:
    """The whole run; the same seed and code give the same record, byte for byte."""
    draw = drawn(seed)
    return perform(seed, NAME, partial(spec, draw=draw), partial(_told, draw=draw))


async def _told(run: Run, draw: Draw) -> None:
    await (_Moving if draw.cell.machine == "move" else _Placing)(run, draw).tell()


class _Story:
    """A region, its clients, and the blow."""

    def __init__(self, run: Run, draw: Draw) -> None:
        self.run = run
        self.draw = draw
        self.world = run.world
        self.cluster = run.cluster
        self.chance = run.world.chance.stream("matrix story")
        self.struck = False
        self._seen: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        run.kinds = (str(draw.cell),)

    async def tell(self) -> None:
        cluster = self.cluster
        cluster.operators.quota = 100
        await cluster.start()
        await cluster.operators.insist("push", self._push)
        await self.begin()
        self.world.record("matrix.begins", cell=str(self.draw.cell), strict=self.may_fail_nothing())
        cluster.on_commit = self._watch
        await self.act()
        if not self.struck:
            self.world.record("matrix.missed", cell=str(self.draw.cell))
        cluster.on_commit = unwatched
        self.world.record("matrix.calms")
        await cluster.calm()
        self.run.converged_s = await self.run.converges(CONVERGE_S, "after the blow")
        await self.run.stays(STEADY_S)
        await self.stop_asking()
        cluster.operators.read_memory()
        self.world.record("matrix.ends")

    async def begin(self) -> None:
        """Up to where the machine starts."""
        raise NotImplementedError

    async def act(self) -> None:
        """The machine, from its first step to its end."""
        raise NotImplementedError

    def steps(self, moment: Moment, transaction: Transaction) -> tuple[str, ...]:
        """Which of the machine's steps a transaction takes."""
        raise NotImplementedError

    def victims(self) -> tuple[Machine | None, Machine | None]:
        """(source, target)"""
        raise NotImplementedError

    async def up(self, model: str, replicas: int) -> None:
        await self.apply(model, replicas)
        await self.run.converges(START_S, "coming up")

    async def apply(self, model: str, replicas: int) -> None:
        text = _documents(model, replicas, standby=self.draw.standby)

        async def act(region: Region) -> None:
            applied = await region.workloads.apply([("text.yaml", text)], {}, "", WHO)
            if applied.planned.problems:
                raise ShoalError(applied.planned.problems[0].refusal)

        await self.cluster.operators.insist(f"{model[-2:]} times {replicas}", act)
        self.cluster.operators.wants({str(TEXT)})

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = self.world.now() + within_s
        while not condition():
            if self.world.now() >= deadline:
                self.world.fail(f"not within {within_s:.0f} s: {what}")
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(0.05)

    async def _push(self, region: Region) -> None:
        for name, each in self.cluster.spec.profiles.items():
            await region.models.push("", each.size_bytes, name, _no_bytes(), actor=WHO)

    # -- the blow ------------------------------------------------------------------------------------------------------

    def _watch(self, moment: Moment, transaction: Transaction) -> None:
        cell = self.draw.cell
        for step in self.steps(moment, transaction):
            if step == cell.step and not self.struck:
                if moment is cell.moment:
                    self.struck = True
                    self._strike()
                elif cell.moment is Moment.EFFECTED and moment is Moment.AFTER:
                    self.struck = True
                    self.world.later(self.draw.late_s, self._strike)
            if moment is Moment.AFTER and step not in self._seen:
                self._seen.add(step)
                self.reached(step)

    def reached(self, step: str) -> None:
        """For the first time."""

    def _strike(self) -> None:
        who, _, part = self.draw.cell.victim.partition("-")
        self.world.record("fault.struck", cell=str(self.draw.cell))
        if who == "coordinator":
            self.cluster.kill_coordinator(power=part == "power")
            return
        source, target = self.victims()
        gateway = self.cluster.network.machines[GATEWAYS[0]]
        machine = {"source": source, "target": target, "gateway": gateway}[who]
        if machine is None:
            machine = self.chance.pick([each for each in self.cluster.machines if each.chips and each is not source])
        match part:
            case "power":
                self.cluster.cut_power(machine)
                if self.draw.gone_s < PATIENCE_S:
                    self.world.later(self.draw.gone_s, lambda: self._come_back(machine))
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
        who = self.draw.cell.victim.partition("-")[0]
        return who in ("coordinator", "gateway") or self.draw.replicas > 1

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

    async def _client(self, number: int) -> None:
        """One request: at one gateway, at the other where that fails, and again after a while."""
        counts = self.cluster.operators.counts
        counts["asked"] = counts.get("asked", 0) + 1
        began, tries = self.world.now(), 0
        while True:
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


class _Moving(_Story):
    """One live move."""

    def __init__(self, run: Run, draw: Draw) -> None:
        super().__init__(run, draw)
        self.migration: Migration | None = None
        self.is_written = False
        """Else the next one that is begun counts."""
        self._cancelling: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self.up(OLD, self.draw.replicas)
        self.start_asking()

    async def act(self) -> None:
        holding = self._holding()
        source = self.chance.pick(holding)
        free = [each for each in self.cluster.machines if each.chips and not each.workers]
        target = self.chance.pick(free or [each for each in holding if each is not source])
        if self.draw.back == "wrong":
            (name,) = target.chips
            for model, each in list(self.cluster.behaviours.items()):
                self.cluster.behaviours[model] = replace(each, wrong=frozenset({name}))
        match self.draw.cause:
            case "operator":
                one = next(name for name, worker in sorted(source.workers.items()) if not worker.assignment.standby)
                migrate = partial(_migrate, aim=Aim(target.name), replica=one)
                await self._ask("migrate", migrate)
                if self.draw.impatient:
                    await self.cluster.operators.offer("migrate once more", migrate)
            case "drain":
                await self._ask("drain", partial(_drain, node=source.name))
            case _:
                await self.apply(NEW, self.draw.replicas)
        await self.until(lambda: self.is_written, 30.0, "a move")
        await self.until(self._is_over, ENDS_S, f"the end of the move, {self.draw.cell}")
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
        back = self.draw.back
        if self._cancelling is None and step in FORTH and back in FORTH and FORTH.index(step) >= FORTH.index(back):
            name = self.migration.id
            self._cancelling = asyncio.ensure_future(
                self._ask("cancel", lambda region: region.moving.cancel(name, WHO))
            )

    def victims(self) -> tuple[Machine | None, Machine | None]:
        assert self.migration is not None
        machines = self.cluster.network.machines
        target = self.migration.target.node if self.migration.target is not None else self.migration.aim.node
        return machines[self.migration.source.node], machines.get(target)

    def _holding(self) -> list[Machine]:
        return [
            machine
            for machine in self.cluster.machines
            if any(not worker.assignment.standby for worker in machine.workers.values())
        ]

    def _now(self) -> Migration | None:
        region = self.cluster.region
        if region is None or self.migration is None:
            return None
        return region.workloads.migrations.all.get(self.migration.id)

    def _is_over(self) -> bool:
        now = self._now()
        return now is not None and now.is_over

    async def _ask(self, what: str, act: Act) -> None:
        """Until it is done, or there is something to see of it."""
        while not (self._is_over() or (what != "cancel" and self.is_written)):
            if await self.cluster.operators.offer(what, act) == "ok":
                return
            await asyncio.sleep(0.5)


class _Placing(_Story):
    """Replicas that come, one that goes, and the rest that go with their workload."""

    def __init__(self, run: Run, draw: Draw) -> None:
        super().__init__(run, draw)
        self._before: dict[str, tuple[str, bool]] = {}
        """(node, whether it drains) of every assignment that was written."""
        self._applied = 0

    async def begin(self) -> None:
        return None

    async def act(self) -> None:
        replicas = self.draw.replicas
        await self.up(OLD, replicas + 1)
        self.start_asking()
        await asyncio.sleep(self.chance.between(0.0, 2.0))
        await self.up(OLD, replicas)
        await self.stop_asking()
        self.cluster.operators.wants(set())
        await self.cluster.operators.insist("delete", _delete)
        await self.until(
            lambda: not any(machine.workers for machine in self.cluster.machines), ENDS_S, "all to be gone"
        )
        await asyncio.sleep(1.0)

    def steps(self, moment: Moment, transaction: Transaction) -> tuple[str, ...]:
        found = list[str]()
        if any(key.startswith(DOCUMENTS) for key in transaction.puts):
            found.append("scaled" if self._applied else "applied")
            self._applied += moment is Moment.AFTER
        if any(key.startswith(DOCUMENTS) for key in transaction.deletes):
            found.append("deleted")
        now = dict(self._before)
        for key, value in sorted(transaction.puts.items()):
            if key.startswith(DESIRED):
                desired = records.load(DesiredSet, value)
                now = {name: each for name, each in now.items() if each[0] != desired.node}
                now |= {one.id: (desired.node, one.draining) for one in desired.assignments}
                if any(route.endpoints for route in desired.routes):
                    found.append("routed")
        if now.keys() - self._before.keys():
            found.append("assigned")
        if self._before.keys() - now.keys():
            found.append("removed")
        if any(draining and not self._before.get(name, ("", False))[1] for name, (_, draining) in now.items()):
            found.append("draining")
        if moment is Moment.AFTER:
            self._before = now
        return tuple(found)

    def victims(self) -> tuple[Machine | None, Machine | None]:
        nodes = sorted({node for node, _ in self._before.values()})
        return (self.cluster.network.machines[self.chance.pick(nodes)] if nodes else None), None

    def may_fail_nothing(self) -> bool:
        return False


async def _migrate(region: Region, aim: Aim, replica: str) -> None:
    await region.moving.migrate(TEXT, aim, WHO, replica=replica)


async def _drain(region: Region, node: str) -> None:
    """A person drains again where nothing moves: after a restart, what has not reported cannot."""
    drained = await region.moving.drain(node, WHO)
    if not drained.begun:
        raise ShoalError(next(iter(drained.unmoved.values())))


async def _delete(region: Region) -> None:
    key = DocumentKey("Workload", f"{TEXT.tenant}/{TEXT.name}")
    if key in region.workloads.catalog.documents:
        await region.workloads.delete(key, WHO)


def _documents(model: str, replicas: int, *, standby: bool) -> str:
    availability = f"replicas: {replicas}" + (", spread: node" if replicas > 1 else "")
    return f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: text}}
spec:
  require: {{availability: {{{availability}{", standby: warm" if standby else ""}}}}}
  migration: {{when: {{cooldown: 10s}}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: text}}
spec:
  model: {{source: "{model}"}}
  policy: text
"""


async def _no_bytes() -> AsyncIterator[bytes]:
    return
    yield b""
