"""One run that migrates a replica, with a gap or without, or scales a workload, or enrols a node, while one process is
killed at one step (F05).

The seed determines the cell of the matrix: the step of the state machine, the moment (before its commit, after it, or
after its effect) and the process that is killed, which is the coordinator for every second seed. The rest is drawn at
random: the region, what starts the migration, whether it is cancelled or fails verification, how long the process is
down. Clients send requests through two gateways throughout, and retry as clients do. The migration must end by itself,
whether the process is back or not; then the region must converge.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.workloads.desired_sets import DESIRED
from shoal.coordinator.core.catalog.model import DOCUMENTS
from shoal.coordinator.core.migration.model import MigrationStage
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Transaction
from shoal.simulator.parts.cluster import GIB, ClusterSpec
from shoal.simulator.parts.hardware import Behaviour, chip
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.simulator.parts.storage import CommitMoment
from shoal.simulator.scenarios import enrolment
from shoal.simulator.scenarios.region_run import RegionRun as Run
from shoal.simulator.scenarios.region_run import RunOutcome, model_profile, run_region
from shoal.simulator.scenarios.single_fault import (
    CANCELLABLE_GAP_STEPS,
    CANCELLABLE_STEPS,
    GATEWAYS,
    MOVE_STEPS,
    MOVE_TIMEOUT_S,
    NEW_MODEL,
    OLD_MODEL,
    TEXT,
    FaultCell,
    MigrationScenario,
    SingleFaultScenario,
    delete_workload,
)
from shoal.simulator.world.rng import Rng
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
WAITING_STEPS: Final = ("planned", *PLACE_STEPS)
"""Steps at which the state machine waits for a missing machine without a limit."""
REVERSAL_STAGES: Final = frozenset({MigrationStage.ROLLING_BACK, MigrationStage.RETURNING, MigrationStage.ABORTED})
COORDINATOR_FAULTS: Final = ("coordinator", "coordinator-power")
PARTS: Final = ("power", "supervisor", "front", "worker")
FAULTS: Final = (
    *COORDINATOR_FAULTS,
    *(f"source-{part}" for part in PARTS),
    *(f"target-{part}" for part in PARTS),
    *(f"gateway-{part}" for part in ("power", "supervisor", "front")),
)  # fmt: skip


_MACHINES: Final = (
    ("move", MOVE_STEPS, FAULTS),
    ("place", PLACE_STEPS, (*COORDINATOR_FAULTS, "source-power", "gateway-power")),
    ("gap", GAP_STEPS, [fault for fault in FAULTS if not fault.startswith("target")]),
    ("enrol", enrolment.STEPS, enrolment.FAULTS),
)
CELLS: Final = tuple(
    FaultCell(machine, step, moment, fault)
    for machine, steps, faults in _MACHINES
    for step, moment, fault in product(steps, CommitMoment, faults)
)
_AT_COORDINATORS: Final = tuple(cell for cell in CELLS if cell.fault in COORDINATOR_FAULTS)
_ELSEWHERE: Final = tuple(cell for cell in CELLS if cell.fault not in COORDINATOR_FAULTS)
_STRIDE: Final = 101
"""Consecutive seeds get distant cells, and every cell comes once before any comes twice."""


@dataclass(frozen=True, slots=True)
class MatrixDraw:
    """What the seed draws."""

    # State machine, step, moment and fault.
    cell: FaultCell
    # Machines with a device.
    agents: int
    # Replicas of the workload, 1 or 2.
    replicas: int
    # True: the policy asks for a standby replica.
    standby: bool
    # What starts the move: `operator`, `drain` or `documents`.
    cause: str
    # What reverses the move: `wrong` (its answers), or the stage at which it is cancelled; empty: nothing.
    reversal: str
    # True: the operator requests the move twice.
    asks_twice: bool
    # Seconds until a machine without power has it again; inf: never in this run.
    outage_s: float
    # Seconds from the step's commit to the fault, if the cell's moment is after its effect.
    fault_delay_s: float
    # Mean seconds of a model load.
    load_s: float


def draw_run(seed: int) -> MatrixDraw:
    rng = Rng(seed).stream("matrix")
    cells = _ELSEWHERE if seed % 2 else _AT_COORDINATORS
    cell = cells[seed // 2 * _STRIDE % len(cells)]
    gap = cell.state_machine == "gap"
    replicas = 1 if gap else rng.randint(1, 2)
    standby = not gap and rng.happens(0.15)
    back = ""
    if cell.step in REVERSAL_STAGES or (cell.state_machine == "move" and rng.happens(0.1)):
        back = rng.choice(_reversals_at(cell))
    # A migration that documents cause has its target from the start: it never is `planned`.
    cause = rng.choice(["operator", "operator", "drain", "drain" if cell.step == "planned" else "documents"])
    return MatrixDraw(
        cell=cell,
        agents=1 if gap else replicas + 1 + standby + rng.randint(0, 1),
        replicas=replicas,
        standby=standby,
        cause="documents" if gap else "operator" if back else cause,
        reversal=back,
        asks_twice=rng.happens(0.3),
        outage_s=rng.choice([0.5, 2.0, 6.0, 20.0, 20.0 if gap or cell.step in WAITING_STEPS else float("inf")]),
        fault_delay_s=rng.choice([0.0, 0.001, 0.01, 0.1, 0.5]) * rng.uniform(0.5, 1.5),
        load_s=rng.uniform(0.2, 2.5),
    )


def _reversals_at(cell: FaultCell) -> tuple[str, ...]:
    """What can reverse a migration without missing the cell's step."""
    if cell.state_machine == "gap":
        return CANCELLABLE_GAP_STEPS[2:] if cell.step == MigrationStage.RETURNING else CANCELLABLE_GAP_STEPS
    match cell.step:
        case "rolling_back":
            return ("wrong", *CANCELLABLE_STEPS[1:])  # without a target yet, it ends at once and never rolls back
        case "aborted":
            return ("wrong", *CANCELLABLE_STEPS)
        case step if step in CANCELLABLE_STEPS:
            return CANCELLABLE_STEPS[CANCELLABLE_STEPS.index(step) :]
        case _:
            return ("",)


def draw_spec(rng: Rng, draw: MatrixDraw) -> ClusterSpec:
    gap = draw.cell.state_machine == "gap"
    memory = 3 * GIB if gap else 8 * GIB
    nodes = dict.fromkeys(GATEWAYS, ()) | {
        f"edge-{number}": (chip(f"cpu{number}", rng.uniform(8e10, 1.2e11), memory),) for number in range(draw.agents)
    }
    size = (400 if gap else rng.randint(10, 150)) << 20
    return ClusterSpec(
        nodes=nodes,
        labels={},
        profiles={name: model_profile(name, 1e8, size) for name in (OLD_MODEL, NEW_MODEL)},
        behaviours={name: Behaviour(draw.load_s, rng.uniform(0.005, 0.05)) for name in (OLD_MODEL, NEW_MODEL)},
        datagrams=rng.happens(0.2),
        mqtt=rng.stream("mqtt").happens(0.2),
    )


def run_seed(seed: int) -> RunOutcome:
    """Execute the whole run. The same seed and code give the same record, byte for byte."""
    draw = draw_run(seed)
    return run_region(seed, NAME, partial(draw_spec, draw=draw), partial(_run_draw, draw=draw))


async def _run_draw(run: Run, draw: MatrixDraw) -> None:
    match draw.cell.state_machine:
        case "place":
            await _PlacementScenario(run, draw).execute()
        case "enrol":
            await enrolment.EnrolmentScenario(run, draw.cell, draw.fault_delay_s).execute()
        case _:
            await _MoveScenario(run, draw).execute()


class _SingleRegionScenario(SingleFaultScenario):
    """A scenario within one region."""

    draw: MatrixDraw

    async def apply(self, model: str, replicas: int) -> None:
        await super().apply(model, replicas)
        self.cluster.operators.set_wanted({str(TEXT)})

    def documents(self, model: str, replicas: int) -> str:
        allowed = f", allow_gap: {GAP_S}s, verify: {{against: none}}" if self.cell.state_machine == "gap" else ""
        return _documents(model, replicas, standby=self.draw.standby, migration=allowed)

    def source_and_target(self) -> tuple[SimMachine | None, SimMachine | None]:
        """(source, target)"""
        raise NotImplementedError

    def inject_fault(self) -> None:
        who, _, part = self.cell.fault.partition("-")
        if who == "coordinator":
            self.cluster.kill_coordinator(power=part == "power")
            return
        source, target = self.source_and_target()
        gateway = self.cluster.network.machines[GATEWAYS[0]]
        machine = {"source": source, "target": target, "gateway": gateway}[who]
        if machine is None:
            machine = self.rng.choice([each for each in self.cluster.machines if each.chips and each is not source])
        self.break_part(machine, part, self.draw.outage_s)


class _MoveScenario(MigrationScenario, _SingleRegionScenario):
    """A migration from one device to another."""

    def __init__(self, run: Run, draw: MatrixDraw) -> None:
        super().__init__(run, draw.cell, draw.fault_delay_s, draw.reversal)
        self.draw = draw

    async def begin(self) -> None:
        await self.apply_and_wait(OLD_MODEL, self.draw.replicas)
        self.start_clients()

    async def act(self) -> None:
        holding = self._machines_with_replicas()
        source = self.rng.choice(holding)
        free = [each for each in self.cluster.machines if each.chips and not each.workers]
        target = self.rng.choice(free or [each for each in holding if each is not source] or [source])
        if self.draw.reversal == "wrong":
            (name,) = target.chips
            for model, each in list(self.cluster.behaviours.items()):
                self.cluster.behaviours[model] = replace(each, wrong=frozenset({name}))
        match self.draw.cause:
            case "operator":
                one = next(name for name, worker in sorted(source.workers.items()) if not worker.assignment.standby)
                migrate = partial(_migrate, aim=Aim(target.name), replica=one)
                await self.request("migrate", migrate)
                if self.draw.asks_twice:
                    await self.cluster.operators.try_once("migrate once more", migrate)
            case "drain":
                await self.request("drain", partial(_drain, node=source.name))
            case _:
                await self.apply(NEW_MODEL, self.draw.replicas)
        await self.wait_over()

    def source_and_target(self) -> tuple[SimMachine | None, SimMachine | None]:
        assert self.migration is not None
        machines = self.cluster.network.machines
        target = self.migration.target.node if self.migration.target is not None else self.migration.aim.node
        return machines[self.migration.source.node], machines.get(target)

    def _machines_with_replicas(self) -> list[SimMachine]:
        return [
            machine
            for machine in self.cluster.machines
            if any(not worker.assignment.standby for worker in machine.workers.values())
        ]

    def has_alternative(self) -> bool:
        who = self.cell.fault.partition("-")[0]
        another = who in ("coordinator", "gateway") or self.draw.replicas > 1
        return self.cell.state_machine == "move" and another


class _PlacementScenario(_SingleRegionScenario):
    """Scale a workload up, scale it down by one, then delete it."""

    def __init__(self, run: Run, draw: MatrixDraw) -> None:
        super().__init__(run, draw.cell, draw.fault_delay_s)
        self.draw = draw
        self._written_assignments: dict[str, tuple[str, bool]] = {}
        """Assignment id -> (node, whether it drains), of every assignment that was written."""
        self._applied = 0

    async def begin(self) -> None:
        return None

    async def act(self) -> None:
        replicas = self.draw.replicas
        await self.apply_and_wait(OLD_MODEL, replicas + 1)
        self.start_clients()
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))
        await self.apply_and_wait(OLD_MODEL, replicas)
        await self.stop_clients()
        self.cluster.operators.set_wanted(set())
        await self.cluster.operators.retry_until_done("delete", delete_workload)
        await self.wait_until(
            lambda: not any(machine.workers for machine in self.cluster.machines), MOVE_TIMEOUT_S, "all to be gone"
        )
        await asyncio.sleep(1.0)

    def steps_in(self, moment: CommitMoment, transaction: Transaction) -> tuple[str, ...]:
        found = list[str]()
        if any(key.startswith(DOCUMENTS) for key in transaction.puts):
            found.append("scaled" if self._applied else "applied")
            self._applied += moment is CommitMoment.AFTER
        if any(key.startswith(DOCUMENTS) for key in transaction.deletes):
            found.append("deleted")
        now = dict(self._written_assignments)
        for key, value in sorted(transaction.puts.items()):
            if key.startswith(DESIRED):
                desired = codec.load(DesiredSet, value)
                now = {name: each for name, each in now.items() if each[0] != desired.node}
                now |= {one.id: (desired.node, one.draining) for one in desired.assignments}
                if any(route.endpoints for route in desired.routes):
                    found.append("routed")
        if now.keys() - self._written_assignments.keys():
            found.append("assigned")
        if self._written_assignments.keys() - now.keys():
            found.append("removed")
        if any(
            draining and not self._written_assignments.get(name, ("", False))[1] for name, (_, draining) in now.items()
        ):
            found.append("draining")
        if moment is CommitMoment.AFTER:
            self._written_assignments = now
        return tuple(found)

    def source_and_target(self) -> tuple[SimMachine | None, SimMachine | None]:
        nodes = sorted({node for node, _ in self._written_assignments.values()})
        return (self.cluster.network.machines[self.rng.choice(nodes)] if nodes else None), None


async def _migrate(region: RegionalCoordinator, aim: Aim, replica: str) -> None:
    await region.moves.migrate(TEXT, aim, OPERATOR_URI, replica=replica)


async def _drain(region: RegionalCoordinator, node: str) -> None:
    """Drain as an operator would: again, if nothing moves. After a restart, nodes that have not reported yet cannot be
    drained."""
    drained = await region.moves.drain(node, OPERATOR_URI)
    if not drained.migrations:
        raise ShoalError(next(iter(drained.refusals.values())))


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
