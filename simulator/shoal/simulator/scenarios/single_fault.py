"""What every scenario with one fault shares: a region, clients that send requests and retry, and the commit at which
the fault strikes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.migration.model import Migration, MigrationStage
from shoal.coordinator.ports import Transaction
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.migration_events import migrations_in, step_of
from shoal.simulator.parts.operators import OPERATOR_URI, Act
from shoal.simulator.parts.storage import CommitMoment, ignore_commit
from shoal.simulator.scenarios.region_run import CONVERGE_TIMEOUT_S, QUIESCENT_S, START_TIMEOUT_S, model_digest
from shoal.simulator.scenarios.region_run import RegionRun as Run
from shoal.types.codes import ShoalError
from shoal.types.workload import WorkloadKey

GATEWAYS: Final = ("gateway", "gateway-2")
TEXT: Final = WorkloadKey("default", "text")
OLD_MODEL, NEW_MODEL = model_digest(0), model_digest(1)
MOVE_TIMEOUT_S: Final = 150.0
"""Virtual seconds within which the migration is over, whichever process is down."""
CLIENT_TIMEOUT_S: Final = 60.0
RETRY_S: Final = 0.25
REQUEST_INTERVAL_S: Final = 0.15

GAP_STAGES: Final = (MigrationStage.CLEARING, MigrationStage.RETURNING)
"""Only of a migration with a gap: its one device cannot hold both replicas."""
MOVE_STEPS: Final = (
    *(str(stage) for stage in MigrationStage if stage not in (MigrationStage.SHIFTING, *GAP_STAGES)),
    "shifting 1",
    "shifting 2",
)
CANCELLABLE_STEPS: Final = ("planned", "reserved", "staging", "warming", "verifying", "shifting 1", "shifting 2")
"""Steps at which a migration can be cancelled."""
CANCELLABLE_GAP_STEPS: Final = ("reserved", "staging", "clearing", "warming")
"""The same for a migration with a gap; staging comes before the gap, and again within it."""


@dataclass(frozen=True, slots=True)
class FaultCell:
    """Where one fault strikes."""

    # Name of the state machine.
    state_machine: str
    # Step, as that state machine names it.
    step: str
    # Before the commit of the step, after it, or after its effect.
    moment: CommitMoment
    # What is struck.
    fault: str

    def __str__(self) -> str:
        return f"{self.state_machine} {self.step}, {self.moment}: {self.fault}"


class SingleFaultScenario:
    """A region, its clients, and one fault at `cell`. fault_delay_s: from the step's commit to the fault, if the cell's
    moment is after its effect."""

    def __init__(self, run: Run, cell: FaultCell, fault_delay_s: float) -> None:
        self.run = run
        self.cell = cell
        self.fault_delay_s = fault_delay_s
        self.world = run.world
        self.cluster = run.cluster
        self.rng = run.world.rng.stream("matrix scenario")
        self.is_injected = False
        self._seen: set[str] = set()
        self._client_task: asyncio.Task[None] | None = None
        run.kinds = (str(cell),)

    async def execute(self) -> None:
        cluster = self.cluster
        cluster.operators.quota = 100
        await self.start()
        await cluster.operators.retry_until_done("push", self._push)
        await self.begin()
        self.world.record("matrix.begins", cell=str(self.cell), strict=self.has_alternative())
        cluster.on_commit = self._on_commit
        await self.act()
        if not self.is_injected:
            self.world.record("matrix.missed", cell=str(self.cell))
        cluster.on_commit = ignore_commit
        self.world.record("matrix.calms")
        await self.converge()
        cluster.operators.read_memory()
        self.world.record("matrix.ends")

    async def start(self) -> None:
        """Start everything."""
        await self.cluster.start()

    async def begin(self) -> None:
        """Bring the region to where the state machine starts."""
        raise NotImplementedError

    async def act(self) -> None:
        """Take the state machine from its first step to its end."""
        raise NotImplementedError

    async def converge(self) -> None:
        """End every lasting fault and wait until the region has converged."""
        await self.cluster.clear_faults()
        self.run.converged_s = await self.run.wait_converged(CONVERGE_TIMEOUT_S, "after the fault")
        await self.run.check_quiescent(QUIESCENT_S)
        await self.stop_clients()

    def documents(self, model: str, replicas: int) -> str:
        raise NotImplementedError

    def inject_fault(self) -> None:
        """Strike what the cell names."""
        raise NotImplementedError

    def steps_in(self, moment: CommitMoment, transaction: Transaction) -> tuple[str, ...]:
        """Steps of the state machine that a transaction takes."""
        raise NotImplementedError

    async def apply_and_wait(self, model: str, replicas: int) -> None:
        await self.apply(model, replicas)
        await self.run.wait_converged(START_TIMEOUT_S, "coming up")

    async def apply(self, model: str, replicas: int) -> None:
        text = self.documents(model, replicas)

        async def act(region: RegionalCoordinator) -> None:
            applied = await region.documents.apply([("text.yaml", text)], {}, "", OPERATOR_URI)
            if applied.plan_result.problems:
                raise ShoalError(applied.plan_result.problems[0].refusal)

        await self.cluster.operators.retry_until_done(f"{model[-2:]} times {replicas}", act)

    async def wait_until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = self.world.now() + within_s
        while not condition():
            if self.world.now() >= deadline:
                self.world.fail(f"not within {within_s:.0f} s: {what}")
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(0.05)

    async def _push(self, region: RegionalCoordinator) -> None:
        for name, each in self.cluster.spec.profiles.items():
            await region.models.push("", each.size_bytes, name, no_chunks(), actor=OPERATOR_URI)

    # -- the fault -----------------------------------------------------------------------------------------------------

    def _on_commit(self, moment: CommitMoment, transaction: Transaction) -> None:
        cell = self.cell
        for step in self.steps_in(moment, transaction):
            if step == cell.step and not self.is_injected:
                if moment is cell.moment:
                    self._inject()
                elif cell.moment is CommitMoment.EFFECTED and moment is CommitMoment.AFTER:
                    self.is_injected = True
                    self.world.call_later(self.fault_delay_s, self._inject)
            if moment is CommitMoment.AFTER and step not in self._seen:
                self._seen.add(step)
                self.on_step(step)

    def on_step(self, step: str) -> None:
        """Called when a step is reached for the first time."""

    def _inject(self) -> None:
        self.is_injected = True
        self.world.record("fault.struck", cell=str(self.cell))
        self.inject_fault()

    def break_part(self, machine: SimMachine, part: str, outage_s: float) -> None:
        """Kill one part of a machine. outage_s: seconds until a machine without power has it again; infinite: never in
        this run."""
        match part:
            case "power":
                self.cluster.cut_power(machine)
                if outage_s < CLIENT_TIMEOUT_S:
                    self.world.call_later(outage_s, lambda: self._restore_power(machine))
            case "supervisor":
                self.cluster.kill_agent(machine)
            case "front":
                machine.kill_front()
            case _:
                for name in sorted(machine.workers):
                    machine.kill_worker(name, own_fault=False, why="killed from outside")

    def _restore_power(self, machine: SimMachine) -> None:
        if machine.name not in self.cluster.permanently_dead:
            self.cluster.restore_power(machine)

    def has_alternative(self) -> bool:
        """Whether another process can answer whatever the killed one was asked."""
        return False

    # -- clients -------------------------------------------------------------------------------------------------------

    def start_clients(self) -> None:
        self._client_task = asyncio.ensure_future(self._clients())

    async def stop_clients(self) -> None:
        """Return when every request is answered or lost."""
        asking, self._client_task = self._client_task, None
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
                    await asyncio.sleep(self.rng.exponential(REQUEST_INTERVAL_S))
                except asyncio.CancelledError:
                    return

    def on_request(self) -> None:
        """Called when a request is about to be sent."""

    async def _client(self, number: int) -> None:
        """One request: at one gateway, at the other if that fails, and again after a while."""
        counts = self.cluster.operators.counts
        counts["asked"] = counts.get("asked", 0) + 1
        began, tries = self.world.now(), 0
        while True:
            self.on_request()
            front = GATEWAYS[(number + tries) % len(GATEWAYS)]
            code = await self.cluster.operators.request(front, TEXT, f"client {number}".encode())
            tries += 1
            if code is None:
                break
            if tries == len(GATEWAYS):
                counts["failed"] = counts.get("failed", 0) + 1
                self.world.record("client.failed", number=number, code=str(code))
            if tries >= len(GATEWAYS):
                if self.world.now() > began + CLIENT_TIMEOUT_S:
                    counts["lost"] = counts.get("lost", 0) + 1
                    self.world.record("client.lost", number=number, code=str(code))
                    break
                await asyncio.sleep(RETRY_S)
        self.world.record("client.done", number=number)


class MigrationScenario(SingleFaultScenario):
    """One live migration. cancel_at: the stage at which it is cancelled; any other value: it is not."""

    def __init__(self, run: Run, cell: FaultCell, fault_delay_s: float, cancel_at: str) -> None:
        super().__init__(run, cell, fault_delay_s)
        self.cancel_at = cancel_at
        self.migration: Migration | None = None
        self.is_written = False
        """False: the next migration that begins counts as the scenario's."""
        self._cancelling: asyncio.Task[None] | None = None

    async def wait_over(self) -> None:
        """Return when the migration is over and its record still exists."""
        await self.wait_until(lambda: self.is_written, 30.0, "a move")
        await self.wait_until(self._is_over, MOVE_TIMEOUT_S, f"the end of the move, {self.cell}")
        await asyncio.sleep(1.0)  # a fault after the last step's effect
        await self.wait_until(self._is_over, MOVE_TIMEOUT_S, "the end of the move to be there again")
        ended = self._current()
        assert ended is not None
        end = f"{ended.stage} {ended.state.refusal.code}" if ended.state.kind == "aborted" else str(ended.stage)
        self.world.record("move.ended", end=end, stages=tuple(str(each.stage) for each in ended.stages))
        self.cluster.operators.counts[end] = 1

    def steps_in(self, moment: CommitMoment, transaction: Transaction) -> tuple[str, ...]:
        found = []
        for migration in migrations_in(transaction):
            if not self.is_written or self.migration is None or migration.id == self.migration.id:
                self.migration = migration
                self.is_written |= moment is CommitMoment.AFTER
                found.append(step_of(migration))
        return tuple(found)

    def on_step(self, step: str) -> None:
        assert self.migration is not None
        back, forth = self.cancel_at, CANCELLABLE_GAP_STEPS if self.cell.state_machine == "gap" else CANCELLABLE_STEPS
        if self._cancelling is None and step in forth and back in forth and forth.index(step) >= forth.index(back):
            name = self.migration.id
            self._cancelling = asyncio.ensure_future(
                self.request("cancel", lambda region: region.moves.cancel(name, OPERATOR_URI))
            )

    def _current(self) -> Migration | None:
        region = self.cluster.region
        if region is None or self.migration is None:
            return None
        return region.workloads.migrations.all.get(self.migration.id)

    def _is_over(self) -> bool:
        now = self._current()
        return now is not None and now.is_over

    async def request(self, what: str, act: Act) -> None:
        """Repeat the request until it succeeds, or the migration shows that it took effect."""
        while not (self._is_over() or (what != "cancel" and self.is_written)):
            if await self.cluster.operators.try_once(what, act) == "ok":
                return
            await asyncio.sleep(0.5)


async def delete_workload(region: RegionalCoordinator) -> None:
    key = DocumentKey("Workload", f"{TEXT.tenant}/{TEXT.name}")
    if key in region.workloads.catalog.documents:
        await region.documents.delete(key, OPERATOR_URI)


async def no_chunks() -> AsyncIterator[bytes]:
    return
    yield b""
