"""One run of a region that moves a replica, with a gap or without, or places and removes some, while one process is
killed at one step (F05).

The cell of the matrix is the seed's: which step of the machine, before it is written, after that or after its effect,
and who is killed there; it is the coordinator for every second seed. All else a seed draws: the region, what began the
move, whether it is taken back or wrong, how long the victim is gone. Clients ask all the while through two gateways,
and ask again as clients do. The move must end by itself while the victim is gone or back; then the region must
converge.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import DOCUMENTS
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.controllers.workloads import DESIRED
from shoal.coordinator.core.migration.model import Stage
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Transaction
from shoal.simulator import enrolling
from shoal.simulator.chance import Chance
from shoal.simulator.cluster import GIB, Spec
from shoal.simulator.machine import Behaviour, Machine, chip
from shoal.simulator.operators import WHO
from shoal.simulator.scenario import Outcome, perform, profile
from shoal.simulator.scenario import Stage as Run
from shoal.simulator.storage import Moment
from shoal.simulator.story import (
    ENDS_S,
    FORTH,
    GAP_FORTH,
    GATEWAYS,
    MOVE_STEPS,
    NEW,
    OLD,
    TEXT,
    Cell,
    Moving,
    Story,
    delete,
)
from shoal.types.assignment import DesiredSet
from shoal.types.codes import ShoalError

NAME: Final = "matrix"
GAP_STEPS: Final = (
    "reserved",
    "clearing",
    "staging",
    "warming",
    "draining",
    "done",
    "rolling_back",
    "returning",
    "aborted",
)
GAP_S: Final = 20
PLACE_STEPS: Final = ("applied", "assigned", "routed", "scaled", "draining", "removed", "deleted")
WAITS: Final = ("planned", *PLACE_STEPS)
"""Steps at which the machine waits for whoever has gone, however long."""
ENDS_IN_BACK: Final = frozenset({Stage.ROLLING_BACK, Stage.RETURNING, Stage.ABORTED})
COORDINATORS: Final = ("coordinator", "coordinator-power")
PARTS: Final = ("power", "supervisor", "front", "worker")
VICTIMS: Final = (
    *COORDINATORS,
    *(f"source-{part}" for part in PARTS),
    *(f"target-{part}" for part in PARTS),
    *(f"gateway-{part}" for part in ("power", "supervisor", "front")),
)  # fmt: skip


_MACHINES: Final = (
    ("move", MOVE_STEPS, VICTIMS),
    ("place", PLACE_STEPS, (*COORDINATORS, "source-power", "gateway-power")),
    ("gap", GAP_STEPS, [victim for victim in VICTIMS if not victim.startswith("target")]),
    ("enrol", enrolling.STEPS, enrolling.VICTIMS),
)
CELLS: Final = tuple(
    Cell(machine, step, moment, victim)
    for machine, steps, victims in _MACHINES
    for step, moment, victim in product(steps, Moment, victims)
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
    gap = cell.machine == "gap"
    replicas = 1 if gap else chance.whole(1, 2)
    standby = not gap and chance.happens(0.15)
    back = ""
    if cell.step in ENDS_IN_BACK or (cell.machine == "move" and chance.happens(0.1)):
        back = chance.pick(_ways_back(cell))
    # What documents ask for has its place from the first.
    cause = chance.pick(["operator", "operator", "drain", "drain" if cell.step == "planned" else "documents"])
    return Draw(
        cell=cell,
        agents=1 if gap else replicas + 1 + standby + chance.whole(0, 1),
        replicas=replicas,
        standby=standby,
        cause="documents" if gap else "operator" if back else cause,
        back=back,
        impatient=chance.happens(0.3),
        gone_s=chance.pick([0.5, 2.0, 6.0, 20.0, 20.0 if gap or cell.step in WAITS else float("inf")]),
        late_s=chance.pick([0.0, 0.001, 0.01, 0.1, 0.5]) * chance.between(0.5, 1.5),
        load_s=chance.between(0.2, 2.5),
    )


def _ways_back(cell: Cell) -> tuple[str, ...]:
    """What takes a move back without missing the step."""
    if cell.machine == "gap":
        return GAP_FORTH[2:] if cell.step == Stage.RETURNING else GAP_FORTH
    match cell.step:
        case "rolling_back":
            return ("wrong", *FORTH[1:])  # what has no place yet ends at once
        case "aborted":
            return ("wrong", *FORTH)
        case step if step in FORTH:
            return FORTH[FORTH.index(step) :]
        case _:
            return ("",)


def spec(chance: Chance, draw: Draw) -> Spec:
    gap = draw.cell.machine == "gap"
    memory = 3 * GIB if gap else 8 * GIB
    nodes = dict.fromkeys(GATEWAYS, ()) | {
        f"edge-{number}": (chip(f"cpu{number}", chance.between(8e10, 1.2e11), memory),) for number in range(draw.agents)
    }
    size = (400 if gap else chance.whole(10, 150)) << 20
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
    match draw.cell.machine:
        case "place":
            await _Placing(run, draw).tell()
        case "enrol":
            await enrolling.Enrolling(run, draw.cell, draw.late_s).tell()
        case _:
            await _MovingInside(run, draw).tell()


class _Inside(Story):
    """In one region."""

    draw: Draw

    async def apply(self, model: str, replicas: int) -> None:
        await super().apply(model, replicas)
        self.cluster.operators.wants({str(TEXT)})

    def documents(self, model: str, replicas: int) -> str:
        allowed = f", allow_gap: {GAP_S}s, verify: {{against: none}}" if self.cell.machine == "gap" else ""
        return _documents(model, replicas, standby=self.draw.standby, migration=allowed)

    def victims(self) -> tuple[Machine | None, Machine | None]:
        """(source, target)"""
        raise NotImplementedError

    def strike(self) -> None:
        who, _, part = self.cell.victim.partition("-")
        if who == "coordinator":
            self.cluster.kill_coordinator(power=part == "power")
            return
        source, target = self.victims()
        gateway = self.cluster.network.machines[GATEWAYS[0]]
        machine = {"source": source, "target": target, "gateway": gateway}[who]
        if machine is None:
            machine = self.chance.pick([each for each in self.cluster.machines if each.chips and each is not source])
        self.hit(machine, part, self.draw.gone_s)


class _MovingInside(Moving, _Inside):
    """From one device to another."""

    def __init__(self, run: Run, draw: Draw) -> None:
        super().__init__(run, draw.cell, draw.late_s, draw.back)
        self.draw = draw

    async def begin(self) -> None:
        await self.up(OLD, self.draw.replicas)
        self.start_asking()

    async def act(self) -> None:
        holding = self._holding()
        source = self.chance.pick(holding)
        free = [each for each in self.cluster.machines if each.chips and not each.workers]
        target = self.chance.pick(free or [each for each in holding if each is not source] or [source])
        if self.draw.back == "wrong":
            (name,) = target.chips
            for model, each in list(self.cluster.behaviours.items()):
                self.cluster.behaviours[model] = replace(each, wrong=frozenset({name}))
        match self.draw.cause:
            case "operator":
                one = next(name for name, worker in sorted(source.workers.items()) if not worker.assignment.standby)
                migrate = partial(_migrate, aim=Aim(target.name), replica=one)
                await self.ask("migrate", migrate)
                if self.draw.impatient:
                    await self.cluster.operators.offer("migrate once more", migrate)
            case "drain":
                await self.ask("drain", partial(_drain, node=source.name))
            case _:
                await self.apply(NEW, self.draw.replicas)
        await self.ended()

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

    def may_fail_nothing(self) -> bool:
        who = self.cell.victim.partition("-")[0]
        another = who in ("coordinator", "gateway") or self.draw.replicas > 1
        return self.cell.machine == "move" and another


class _Placing(_Inside):
    """Replicas that come, one that goes, and the rest that go with their workload."""

    def __init__(self, run: Run, draw: Draw) -> None:
        super().__init__(run, draw.cell, draw.late_s)
        self.draw = draw
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
        await self.cluster.operators.insist("delete", delete)
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


async def _migrate(region: Region, aim: Aim, replica: str) -> None:
    await region.moving.migrate(TEXT, aim, WHO, replica=replica)


async def _drain(region: Region, node: str) -> None:
    """A person drains again where nothing moves: after a restart, what has not reported cannot."""
    drained = await region.moving.drain(node, WHO)
    if not drained.begun:
        raise ShoalError(next(iter(drained.unmoved.values())))


def _documents(model: str, replicas: int, *, standby: bool, migration: str) -> str:
    availability = f"replicas: {replicas}" + (", spread: node" if replicas > 1 else "")
    return f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: text}}
spec:
  require: {{availability: {{{availability}{", standby: warm" if standby else ""}}}}}
  migration: {{when: {{cooldown: 10s}}{migration}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: text}}
spec:
  model: {{source: "{model}"}}
  policy: text
"""
