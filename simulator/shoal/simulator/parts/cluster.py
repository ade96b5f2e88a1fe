"""One region in the simulator: the real RegionalCoordinator and Supervisors over simulated ports, and the faults that
can be injected."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.supervisor import Supervisor, SupervisorPorts, SupervisorSettings
from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.records import GRANTS
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.core.fleet.labels import ENTRY_LABEL, EVERY_TENANT, LabelGrant
from shoal.coordinator.ports import Transaction
from shoal.simulator.checkers.invariants import InvariantMonitor
from shoal.simulator.checkers.region import DUPLICATE_MARK
from shoal.simulator.parts.broker import SimBroker
from shoal.simulator.parts.broker_links import SimBrokerLink, SimBrokerLinks
from shoal.simulator.parts.convergence import ConvergenceCheck
from shoal.simulator.parts.front_control import SimFrontControl
from shoal.simulator.parts.hardware import Behaviour, Chip, SimDeviceDriver
from shoal.simulator.parts.machine import USUAL_LIMITS, SimMachine
from shoal.simulator.parts.migration_events import migration_facts, migrations_in, queued_moves_in
from shoal.simulator.parts.network import COORDINATOR, REGION, SimAgentLinks, SimLink, SimNetwork
from shoal.simulator.parts.operators import SimOperators
from shoal.simulator.parts.storage import (
    CommitMoment,
    CommitObserver,
    SimAgentJournal,
    SimModelCache,
    SimModels,
    SimRecordingSink,
    SimStore,
    format_store,
    ignore_commit,
)
from shoal.simulator.parts.workers import SimWorkerPool
from shoal.simulator.world.disk import SimDisk
from shoal.simulator.world.world import SimClock, SimProcess, SimWorld
from shoal.types.codes import Code
from shoal.types.device import Node, Role
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Bytes
from shoal.wire import nouns

GIB = 1 << 30
LATE_S = 1.0
"""Seconds: what is so late holds up a heartbeat that is due."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What the region consists of."""

    # Node name -> its chips; a node without chips is a gateway.
    nodes: Mapping[str, tuple[Chip, ...]]
    # Node name -> labels that its join token grants.
    labels: Mapping[str, Mapping[str, str]]
    # Model digest -> profile.
    profiles: Mapping[str, ModelProfile]
    # Model digest -> what it does on a worker.
    behaviours: Mapping[str, Behaviour]
    # True: links lose and reorder messages. Ignored with `mqtt`.
    datagrams: bool = False
    # True: the agents' links go over a broker.
    mqtt: bool = False
    # Seconds without a replica after which devices sleep; None: they never sleep.
    sleep_after_s: float | None = None
    # What may wait at each front.
    limits: AdmissionLimits = USUAL_LIMITS
    # Chance that a workload's replicas are unloaded after seconds without a request.
    to_zero: float = 0.0


OnCoordinatorStart = Callable[[SimProcess, RegionalCoordinator], Awaitable[None]]


async def no_federation(process: SimProcess, region: RegionalCoordinator) -> None:
    """The region is in no federation."""


class SimCluster:
    """One region. `start` brings it up; the other methods kill, cut and boot its parts."""

    def __init__(self, world: SimWorld, spec: ClusterSpec) -> None:
        self.world = world
        self.spec = spec
        self.network = SimNetwork(world, datagrams=spec.datagrams and not spec.mqtt)
        self.broker = SimBroker(self.network) if spec.mqtt else None
        self.models = SimModels(spec.profiles)
        self.behaviours = dict(spec.behaviours)
        """Model digest -> behaviour on every machine; changes take effect at once."""
        self.disk = SimDisk(world, COORDINATOR, full_code=Code.STORE_FULL)
        self.clock = SimClock(world, booted_at=world.rng.stream("coordinator").uniform(1.0, 1e5))
        self.machines = [
            SimMachine(
                *(world, self.network, name, Role.AGENT if chips else Role.GATEWAY, chips, self.behaviours),
                limits=spec.limits,
            )
            for name, chips in spec.nodes.items()
        ]
        self.network.machines.update({machine.name: machine for machine in self.machines})
        self.duplicates: list[SimMachine] = []
        """Machines that run from a copy of another machine's state directory."""
        self.coordinator: SimProcess | None = None
        self.region: RegionalCoordinator | None = None
        self.store: SimStore | None = None
        self.operators = SimOperators(self)
        self.convergence = ConvergenceCheck(self)
        self.supervisors: dict[str, Supervisor] = {}
        self.is_over = False
        self.permanently_dead: frozenset[str] = frozenset()
        """Machines that stay dead when the faults are over."""
        self.invariants: InvariantMonitor | None = None
        self.own_faults: Counter[str] = Counter()
        self.on_commit: CommitObserver = ignore_commit
        """Observes every transaction of every coordinator."""
        self.on_coordinator_start: OnCoordinatorStart = no_federation
        """Called by every coordinator once it has read its store."""
        self._power_cut_on_death: dict[str, bool] = {}

    async def start(self) -> None:
        setup = SimProcess(self.world, "setup")
        await format_store(setup, self.disk)
        await self._grant_labels(setup)
        self.start_coordinator()
        for machine in self.machines:
            self.boot(machine)

    async def _grant_labels(self, setup: SimProcess) -> None:
        """Grant labels as the nodes' join tokens would: each machine's own, and entry for every tenant's clients."""
        grants = {
            GRANTS + machine.identity: codec.dump(
                LabelGrant({ENTRY_LABEL: EVERY_TENANT, **self.spec.labels.get(machine.name, {})})
            )
            for machine in self.machines
            if machine.role is Role.AGENT
        }
        await SimStore(self.world, setup, self.disk).commit(Transaction(grants))

    # the coordinator

    def start_coordinator(self) -> None:
        """Start a new process on what the disk holds."""
        if self.is_over or (self.coordinator is not None and self.coordinator.alive):
            return
        self.coordinator = process = SimProcess(self.world, COORDINATOR)
        process.on_death(self._on_coordinator_death)
        self.world.record("coordinator.started")
        process.spawn(self._run_coordinator(process), "run")

    def kill_coordinator(self, *, power: bool = False) -> None:
        process = self.coordinator
        if process is None or not process.alive:
            return
        self._power_cut_on_death[COORDINATOR] = power
        self.world.record("fault.killed", process=COORDINATOR, where="any")
        process.die()

    def kill_after_steps(self, process: SimProcess | None, steps: int, *, power: bool = False) -> None:
        """`process` dies after `steps` more steps of its ports."""
        if process is not None and process.alive:
            self._power_cut_on_death[process.name] = power
            process.steps_to_live = steps

    async def _run_coordinator(self, process: SimProcess) -> None:
        self.store = store = SimStore(self.world, process, self.disk, self._on_commit)
        links = SimAgentLinks(process, self.network) if self.broker is None else SimBrokerLinks(process, self.broker)
        region = RegionalCoordinator(
            store,
            links,
            self.models,
            self.models,
            self.clock,
            SimIdSource(self.world, process),
            RegionConfig(name=REGION),
        )
        await region.start()
        process.check()
        await self.on_coordinator_start(process, region)
        process.check()
        for migration in region.workloads.migrations.live:  # one may have been written when the last coordinator died
            self.world.record("move.step", **migration_facts(migration))
        self.invariants = InvariantMonitor(self.world, region, self.operators.deleted_at)
        self.region = region
        self.network.listen(process, region.fleet)
        if isinstance(links, SimBrokerLinks):
            links.serve(region.fleet)
        self.world.record("coordinator.serving")
        await region.run()

    def _on_commit(self, moment: CommitMoment, transaction: Transaction) -> None:
        if moment is CommitMoment.AFTER:
            for migration in migrations_in(transaction):
                self.world.record("move.step", **migration_facts(migration))
            for name, stage in queued_moves_in(transaction):
                self.world.record("move.queue", migration=name, stage=stage)
        self.on_commit(moment, transaction)

    def _on_coordinator_death(self) -> None:
        self.region = None
        self.store = None
        self.world.record("coordinator.died")
        if self._power_cut_on_death.pop(COORDINATOR, False):
            lost = self.disk.power_cut()
            self.world.record("fault.power", node=COORDINATOR, lost=lost)
        down = self.world.rng.stream(f"down-{self.world.now()}").exponential(1.0)
        self.world.call_later(0.05 + min(down, 8.0), self.start_coordinator)

    # agents

    def live_agents(self) -> list[SimMachine]:
        return [machine for machine in self.machines if machine.supervisor is not None and machine.supervisor.alive]

    def boot(self, machine: SimMachine) -> None:
        """Start a supervisor on `machine`, unless one runs or there is no power."""
        if self.is_over or not machine.has_power or (machine.supervisor is not None and machine.supervisor.alive):
            return
        machine.boots += 1
        machine.supervisor = process = SimProcess(self.world, f"agent-{machine.name}")
        process.on_death(lambda: self._on_agent_death(machine))
        self.world.record("agent.started", node=machine.name, boot=machine.boots)
        process.spawn(self._run_agent(process, machine), "run")

    def kill_agent(self, machine: SimMachine) -> None:
        if machine.supervisor is not None and machine.supervisor.alive:
            self.world.record("fault.killed", process=machine.supervisor.name, where="any")
            machine.supervisor.die()

    def boot_duplicate(self, machine: SimMachine) -> SimMachine:
        """Boot another machine from a copy of this one's state directory as it is now."""
        chips = tuple(machine.chips.values())
        place = f"{machine.name}{DUPLICATE_MARK}{len(self.duplicates) + 1}"
        duplicate = SimMachine(
            *(self.world, self.network, place, machine.role, chips, machine.models, machine.name),
            limits=machine.limits,
        )
        duplicate.disk.copy(machine.disk)
        duplicate.cached_models = dict(machine.cached_models)
        self.network.machines[place] = duplicate
        self.duplicates.append(duplicate)
        self.world.record("fault.duplicate", node=machine.name, duplicate=place)
        self.boot(duplicate)
        return duplicate

    def cut_power(self, machine: SimMachine) -> None:
        """The machine has no power until `restore_power`."""
        machine.has_power = False
        machine.power_cut()

    def restore_power(self, machine: SimMachine) -> None:
        """Without effect on a machine that died for good since its power was cut."""
        if machine.name in self.permanently_dead:
            return
        machine.has_power = True
        self.boot(machine)

    def _on_agent_death(self, machine: SimMachine) -> None:
        machine.event_queue = None
        self.world.record("agent.died", node=machine.name)
        if machine.has_power:
            self.world.call_later(machine.rng.uniform(0.1, 2.0), lambda: self.boot(machine))

    async def _run_agent(self, process: SimProcess, machine: SimMachine) -> None:
        world, rng = self.world, machine.rng
        ports = SupervisorPorts(
            drivers=(SimDeviceDriver(process, machine),),
            link=self._link(process, machine),
            workers=SimWorkerPool(process, machine),
            front=SimFrontControl(process, machine),
            journal=SimAgentJournal(world, process, machine.disk, machine.name),
            cache=SimModelCache(process, self.network, machine.name, machine.disk, machine.cached_models, rng),
            recordings=SimRecordingSink(),
            signer=SimReceiptSigner(),
            clock=machine.clock,
            nonce=lambda: rng.hex_token(16),
            log=_DiscardLog(),
        )
        self.supervisors[machine.name] = supervisor = Supervisor(SupervisorSettings(), self._node(machine), ports)
        await supervisor.run()

    def _link(self, process: SimProcess, machine: SimMachine) -> SimLink | SimBrokerLink:
        if self.broker is None:
            return SimLink(process, self.network, machine.name, machine.identity)
        return SimBrokerLink(process, self.broker, machine.name, machine.identity)

    def _node(self, machine: SimMachine) -> Node:
        return Node(
            name=machine.identity,
            region=REGION,
            role=machine.role,
            labels=dict(self.spec.labels.get(machine.name, {})),
            agent_version="0.1.0",
            os="sim",
            arch="sim",
            memory_bytes=Bytes(64 * GIB),
            memory_limit_bytes=Bytes(64 * GIB),
            devices=(),
            data_address=f"{machine.name}:8001",
            metrics_address=f"{machine.name}:9000",
            boot_id=f"{machine.name}-{machine.boots}",
        )

    def step_clock(self, clock: SimClock, seconds: float) -> None:
        clock.step(seconds)
        if self.invariants is not None:
            self.invariants.clocks_stepped = True

    # after the faults

    def reset_paths(self) -> None:
        for path in self.network.paths():
            path.loss = path.late = path.duplicate = 0.0
            path.delay_s = 0.002

    async def clear_faults(self) -> None:
        """End every lasting fault; some machines may stay dead. What a fault made so late that its sender looks dead
        has arrived afterwards."""
        rng = self.world.rng.stream("calm")
        agents = [machine for machine in self.machines if machine.chips]
        if len(agents) > 3 and rng.happens(0.2):
            dead = rng.choice(agents)
            self.permanently_dead = frozenset({dead.name})
            self.cut_power(dead)
        self.reset_paths()
        for path in self.network.paths():
            path.cut = False
        self.network.retransmit_all()
        if self.broker is not None:
            self.broker.start()
        for process in (self.coordinator, *(machine.supervisor for machine in self.machines)):
            if process is not None:
                process.steps_to_live = 0
        for disk in (self.disk, *(machine.disk for machine in self.machines)):
            disk.full = False
        for clock in (self.clock, *(machine.clock for machine in self.machines)):
            clock.skew = 0.0
        for duplicate in self.duplicates:
            self.cut_power(duplicate)
        for machine in self.machines:
            machine.lost_devices.clear()
            if machine.name not in self.permanently_dead:
                self.restore_power(machine)
        await self.operators.uncordon_all()
        if (late_s := self.network.arrived_by - self.world.now()) > LATE_S:
            await asyncio.sleep(late_s)

    def end(self) -> None:
        """End the run and every process."""
        self.is_over = True
        for machine in (*self.machines, *self.duplicates):
            machine.power_cut()
        if self.coordinator is not None:
            self.coordinator.die()

    def surviving_machines(self) -> list[SimMachine]:
        return [machine for machine in self.machines if machine.name not in self.permanently_dead]


class SimReceiptSigner:
    """Implements the Signer port; signatures are tested with the real links."""

    async def sign_receipts(self, receipts: Sequence[Receipt]) -> tuple[SignedReceipt, ...]:
        return tuple(nouns.make_signed_receipt(each, b"simulated") for each in receipts)


class SimIdSource:
    """Implements the Ids port: ids from the seed."""

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self._rng = world.rng.stream(f"ids-{process.name}-{world.now()}")
        self._process = process

    def name(self, kind: str) -> str:
        self._process.check()
        return f"{kind}-{self._rng.hex_token(8)}"

    def secret(self) -> str:
        self._process.check()
        return self._rng.hex_token(27)  # 20 bytes, base64


class _DiscardLog:
    """The simulator checks the supervisor by its effects, so its log is dropped."""

    def info(self, event: str, /, **fields: str | float | None) -> None: ...

    def warning(self, event: str, /, **fields: str | float | None) -> None: ...

    def error(self, event: str, /, **fields: str | float | None) -> None: ...
