"""One region in the simulator: the real Region and Supervisors over a modelled world, and the hands that break them."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from shoal.agent.supervisor import Settings, Supervisor
from shoal.coordinator.controllers.region import Region, RegionConfig
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.model import WorkloadPlan
from shoal.coordinator.ports import Transaction
from shoal.simulator.broker import Broker, BrokerLink, BrokerLinks
from shoal.simulator.disk import Disk
from shoal.simulator.judge import TWIN
from shoal.simulator.machine import Behaviour, Chip, Driver, Front, Machine, Workers
from shoal.simulator.moves import moves_in, to_come, told
from shoal.simulator.network import COORDINATOR, REGION, AgentLinks, Link, Network
from shoal.simulator.operators import Operators
from shoal.simulator.storage import Cache, Journal, Models, Moment, Recordings, Store, Watched, format_store, unwatched
from shoal.simulator.watch import Watch
from shoal.simulator.world import Clock, Process, World
from shoal.types.codes import Code
from shoal.types.device import Node, Power, Role
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Bytes
from shoal.types.workload import Intent, Spread, Standby, WorkloadKey
from shoal.wire import nouns

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Spec:
    """Who is in the region. nodes: name -> its chips; no chips make a gateway."""

    nodes: Mapping[str, tuple[Chip, ...]]
    labels: Mapping[str, Mapping[str, str]]
    profiles: Mapping[str, ModelProfile]
    behaviours: Mapping[str, Behaviour]
    datagrams: bool = False
    mqtt: bool = False
    """The agents' links go over a broker."""
    sleep_after_s: float | None = None
    """Devices with nothing on them for so long shall sleep; None: they stay awake."""


Joins = Callable[[Process, Region], Awaitable[None]]


async def stays_alone(process: Process, region: Region) -> None:
    """It is in no federation."""


class Cluster:
    """Start it with `start`; then kill, cut and boot at will."""

    def __init__(self, world: World, spec: Spec) -> None:
        self.world = world
        self.spec = spec
        self.network = Network(world, datagrams=spec.datagrams and not spec.mqtt)
        self.broker = Broker(self.network) if spec.mqtt else None
        self.models = Models(spec.profiles)
        self.behaviours = dict(spec.behaviours)
        """Of models on every machine, from now on."""
        self.disk = Disk(world, COORDINATOR, full_code=Code.STORE_FULL)
        self.clock = Clock(world, booted_at=world.chance.stream("coordinator").between(1.0, 1e5))
        self.machines = [
            Machine(world, self.network, name, Role.AGENT if chips else Role.GATEWAY, chips, self.behaviours)
            for name, chips in spec.nodes.items()
        ]
        self.network.machines.update({machine.name: machine for machine in self.machines})
        self.twins: list[Machine] = []
        """Machines that run from a copy of another's state directory."""
        self.coordinator: Process | None = None
        self.region: Region | None = None
        self.store: Store | None = None
        self.operators = Operators(self)
        self.supervisors: dict[str, Supervisor] = {}
        self.over = False
        self.buried: frozenset[str] = frozenset()
        """Machines that stay dead when the storm is over."""
        self.watch: Watch | None = None
        self.own_faults: Counter[str] = Counter()
        self.on_commit: Watched = unwatched
        """Sees what every coordinator writes."""
        self.joins: Joins = stays_alone
        """What every coordinator does once it has read its store."""
        self._armed_power: dict[str, bool] = {}

    async def start(self) -> None:
        setup = Process(self.world, "setup")
        await format_store(setup, self.disk)
        self.start_coordinator()
        for machine in self.machines:
            self.boot(machine)

    # the coordinator

    def start_coordinator(self) -> None:
        """A new process on what the disk holds."""
        if self.over or (self.coordinator is not None and self.coordinator.alive):
            return
        self.coordinator = process = Process(self.world, COORDINATOR)
        process.on_death(self._coordinator_died)
        self.world.record("coordinator.started")
        process.spawn(self._run_coordinator(process), "run")

    def kill_coordinator(self, *, power: bool = False) -> None:
        process = self.coordinator
        if process is None or not process.alive:
            return
        self._armed_power[COORDINATOR] = power
        self.world.record("fault.killed", process=COORDINATOR, where="any")
        process.die()

    def arm(self, process: Process | None, steps: int, *, power: bool = False) -> None:
        """`process` dies after so many more steps of its ports."""
        if process is not None and process.alive:
            self._armed_power[process.name] = power
            process.fuse = steps

    async def _run_coordinator(self, process: Process) -> None:
        self.store = store = Store(self.world, process, self.disk, self._commits)
        links = AgentLinks(process, self.network) if self.broker is None else BrokerLinks(process, self.broker)
        region = Region(
            store,
            links,
            self.models,
            self.models,
            self.clock,
            Ids(self.world, process),
            RegionConfig(name=REGION),
        )
        await region.start()
        process.check()
        await self.joins(process, region)
        process.check()
        for migration in region.workloads.migrations.live:  # one may have been written as the last one died
            self.world.record("move.step", **told(migration))
        self.watch = Watch(self.world, region, self.operators.deleted)
        self.region = region
        self.network.listen(process, region.fleet)
        if isinstance(links, BrokerLinks):
            links.serve(region.fleet)
        self.world.record("coordinator.serving")
        await region.run()

    def _commits(self, moment: Moment, transaction: Transaction) -> None:
        if moment is Moment.AFTER:
            for migration in moves_in(transaction):
                self.world.record("move.step", **told(migration))
        self.on_commit(moment, transaction)

    def _coordinator_died(self) -> None:
        self.region = None
        self.store = None
        self.world.record("coordinator.died")
        if self._armed_power.pop(COORDINATOR, False):
            lost = self.disk.power_cut()
            self.world.record("fault.power", node=COORDINATOR, lost=lost)
        down = self.world.chance.stream(f"down-{self.world.now()}").delay(1.0)
        self.world.later(0.05 + min(down, 8.0), self.start_coordinator)

    # agents

    def living_agents(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.supervisor is not None and machine.supervisor.alive]

    def boot(self, machine: Machine) -> None:
        """A new supervisor on `machine`, unless one runs or there is no power."""
        if self.over or not machine.powered or (machine.supervisor is not None and machine.supervisor.alive):
            return
        machine.boots += 1
        machine.supervisor = process = Process(self.world, f"agent-{machine.name}")
        process.on_death(lambda: self._agent_died(machine))
        self.world.record("agent.started", node=machine.name, boot=machine.boots)
        process.spawn(self._run_agent(process, machine), "run")

    def kill_agent(self, machine: Machine) -> None:
        if machine.supervisor is not None and machine.supervisor.alive:
            self.world.record("fault.killed", process=machine.supervisor.name, where="any")
            machine.supervisor.die()

    def boot_twin(self, machine: Machine) -> Machine:
        """Another machine like this one, from a copy of its state directory as it is now."""
        chips = tuple(machine.chips.values())
        place = f"{machine.name}{TWIN}{len(self.twins) + 1}"
        twin = Machine(self.world, self.network, place, machine.role, chips, machine.models, machine.name)
        twin.disk.copy(machine.disk)
        twin.bytes = dict(machine.bytes)
        self.network.machines[place] = twin
        self.twins.append(twin)
        self.world.record("fault.twin", node=machine.name, twin=place)
        self.boot(twin)
        return twin

    def cut_power(self, machine: Machine) -> None:
        """The machine is dark until `restore_power`."""
        machine.powered = False
        machine.power_cut()

    def restore_power(self, machine: Machine) -> None:
        machine.powered = True
        self.boot(machine)

    def _agent_died(self, machine: Machine) -> None:
        machine.sink = None
        self.world.record("agent.died", node=machine.name)
        if machine.powered:
            self.world.later(machine.chance.between(0.1, 2.0), lambda: self.boot(machine))

    async def _run_agent(self, process: Process, machine: Machine) -> None:
        world, chance = self.world, machine.chance
        self.supervisors[machine.name] = supervisor = Supervisor(
            settings=Settings(),
            node=self._node(machine),
            drivers=(Driver(process, machine),),
            link=self._link(process, machine),
            workers=Workers(process, machine),
            front=Front(process, machine),
            journal=Journal(world, process, machine.disk, machine.name),
            cache=Cache(process, self.network, machine.name, machine.disk, machine.bytes, chance),
            recordings=Recordings(),
            signer=Signer(),
            clock=machine.clock,
            nonce=lambda: chance.token(16),
            log=_quiet,
        )
        await supervisor.run()

    def _link(self, process: Process, machine: Machine) -> Link | BrokerLink:
        if self.broker is None:
            return Link(process, self.network, machine.name, machine.identity)
        return BrokerLink(process, self.broker, machine.name, machine.identity)

    def _node(self, machine: Machine) -> Node:
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
            grpc_address=f"{machine.name}:8001",
            rest_address=f"{machine.name}:8000",
            token_address=f"{machine.name}:8002",
            metrics_address=f"{machine.name}:9000",
            boot_id=f"{machine.name}-{machine.boots}",
        )

    def step_clock(self, clock: Clock, seconds: float) -> None:
        clock.step(seconds)
        if self.watch is not None:
            self.watch.clocks_stepped = True

    # after the storm

    def clear_weather(self) -> None:
        for path in self.network.paths():
            path.loss = path.late = path.duplicate = 0.0
            path.delay_s = 0.002

    async def calm(self) -> None:
        """Ends every fault that lasts; some machines may stay dead."""
        chance = self.world.chance.stream("calm")
        agents = [machine for machine in self.machines if machine.chips]
        if len(agents) > 3 and chance.happens(0.2):
            dead = chance.pick(agents)
            self.buried = frozenset({dead.name})
            self.cut_power(dead)
        self.clear_weather()
        for path in self.network.paths():
            path.cut = False
        self.network.healed()
        if self.broker is not None:
            self.broker.start()
        for process in (self.coordinator, *(machine.supervisor for machine in self.machines)):
            if process is not None:
                process.fuse = 0
        for disk in (self.disk, *(machine.disk for machine in self.machines)):
            disk.full = False
        for clock in (self.clock, *(machine.clock for machine in self.machines)):
            clock.skew = 0.0
        for twin in self.twins:
            self.cut_power(twin)
        for machine in self.machines:
            machine.lost_devices.clear()
            if machine.name not in self.buried:
                self.restore_power(machine)
        await self.operators.uncordon_all()

    def end(self) -> None:
        """The run is over: every process ends."""
        self.over = True
        for machine in (*self.machines, *self.twins):
            machine.power_cut()
        if self.coordinator is not None:
            self.coordinator.die()

    async def missing(self, within_s: float = 0.0) -> list[str]:
        """What keeps the region from being converged; empty when it is. within_s: with the moves that begin by
        themselves within so many seconds."""
        region = self.region
        if region is None or self.coordinator is None or not self.coordinator.alive:
            return ["no coordinator"]
        found: list[str] = []
        for machine in self.standing():
            found += self.missing_at(region, machine) or [
                *self._misrouted(region, machine),
                *self._sleepless(region, machine),
            ]
        found += self._missing_replicas(region)
        found += [f"{name} is not lost yet" for name in sorted(self.buried) if not _is_lost(region, name)]
        assigned = [each for wanted in region.workloads.desired.values() for each in wanted.assignments]
        draining = [each.id for each in assigned if each.draining]
        found += [f"{name} is still to be drained" for name in draining]
        found += [f"{each.id} is {each.stage}" for each in region.workloads.migrations.live if each.target is not None]
        decided, moves = region.workloads, region.workloads.migrations.all.values()
        found += to_come(decided.held, decided.plan_now, moves, self.clock.now(), self.clock.wall(), within_s)
        if found:
            return found
        for machine in self.standing():
            for intent in region.workloads.intents:
                if self._ready(intent.key) and (code := await self.operators.request(machine.name, intent.key)):
                    found.append(f"{machine.name} answers {intent.key} with {code}")
        return found

    def settled(self) -> tuple[object, ...]:
        """What must not change once the region has converged."""
        region = self.region
        starts = sum(
            event.kind == "worker.start" and self.spec.behaviours[event.facts["model"]].crash_at_load < 1.0
            for event in self.world.history.events
        )
        versions = () if region is None else tuple((n, each.version) for n, each in region.workloads.desired.items())
        return starts, versions

    def standing(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.name not in self.buried]

    def missing_at(self, region: Region, machine: Machine) -> list[str]:
        """What one machine lacks of what it was told, its routes apart."""
        name = machine.name
        state = region.fleet.fleet.nodes.get(name)
        if machine.supervisor is None or not machine.supervisor.alive:
            return [f"{name} is down"]
        if state is None or not state.connected or state.liveness is not Liveness.READY:
            return [f"{name} is not seen: {state and (state.liveness, state.connected)}"]
        if not state.reported:
            return [f"{name} has not reported in full"]
        if state.quarantined:
            return [f"{name} is not trusted again"]
        if dark := sorted({each.name for each in state.node.devices} - state.readings.keys()):
            return [f"{name}'s {', '.join(dark)} was not measured again"]
        wanted = region.workloads.desired.get(name)
        held = self.supervisors[name].snapshot.version
        if wanted is None or held != wanted.version:
            return [f"{name} holds {held}, wanted is {wanted and wanted.version}"]
        found = [] if machine.front.alive else [f"{name}'s front is down"]
        assigned = {each.id for each in wanted.assignments if not each.staged}
        found += [f"{other} still runs on {name}" for other in sorted(machine.workers) if other not in assigned]
        found += [f"{each} has not come up on {name}" for each in sorted(assigned) if not machine.is_ready(each)]
        found += [
            f"{each.id} is not staged on {name}"
            for each in wanted.assignments
            if each.staged and each.model not in machine.bytes  # what rots there is found when it is loaded
        ]
        return found

    def _sleepless(self, region: Region, machine: Machine) -> list[str]:
        """Devices with nothing on them that are awake, where the region lets them sleep."""
        wanted = region.workloads.desired[machine.name]
        taken = {each.device for each in wanted.assignments}
        may = region.workloads.catalog.facts(REGION).sleep_after_s is not None
        able = [name for name, known in sorted(machine.chips.items()) if may and known.device.rest is not None]
        return [
            f"{machine.name}'s {name} is {machine.power(name)}"
            for name in able
            if name not in taken and machine.power(name) is not Power.ASLEEP
        ]

    def _misrouted(self, region: Region, machine: Machine) -> list[str]:
        name, found = machine.name, list[str]()
        for intent in region.workloads.intents:
            route = machine.front.routes.get(intent.key)
            routed = {each.assignment for each in route.endpoints} if route else set()
            if routed != self._ready(intent.key):
                found.append(
                    f"{name} routes {intent.key} to {sorted(routed)}, ready are {sorted(self._ready(intent.key))}"
                )
        return found

    def _missing_replicas(self, region: Region) -> list[str]:
        """Counted apart from the placement: as many as spread, quota and sound models allow must be ready, and one more
        to stand by where there is a node without an active one.

        A replica that the plan does not want may only be there while the plan lacks one: the old stays.
        """
        found: list[str] = []
        room = placed = old = 0
        for intent in region.workloads.intents:
            plan = region.workloads.plan_now.of(intent.key) if region.workloads.plan_now else None
            if plan is None:
                return [f"{intent.key} is not planned"]
            standbys = [target for target in plan.targets if target.standby]
            room += self._most(intent) + self._spare(intent, plan)
            placed += plan.placed + len(standbys)
            ready = self._ready(intent.key) | self._staged(region, intent.key)
            wanted = {target.keeps for target in plan.targets}
            found += [f"{name or 'a new one'} of {intent.key} is not ready" for name in sorted(wanted - ready)]
            old += len(ready - wanted)
            if plan.refusal is None:
                assigned = {
                    each.id
                    for desired in region.workloads.desired.values()
                    for each in desired.assignments
                    if each.workload == intent.key
                }
                found += [f"{name} of {intent.key} is not wanted" for name in sorted((ready | assigned) - wanted)]
        can_be = min(room, self.operators.quota)
        if not can_be - old <= placed <= can_be:
            found.append(f"{placed} replicas are placed and {old} old ones serve, {can_be} can be")
        return found

    def _most(self, intent: Intent) -> int:
        if any(self.spec.behaviours[model.digest].crash_at_load == 1.0 for model in intent.models):
            return 0
        nodes = [machine for machine in self.standing() if machine.chips]
        devices = sum(len(machine.chips) for machine in nodes)
        replicas = intent.require.replicas
        return {Spread.NODE: min(replicas, len(nodes)), Spread.DEVICE: min(replicas, devices), Spread.NONE: replicas}[
            intent.require.spread
        ]

    def _spare(self, intent: Intent, plan: WorkloadPlan) -> int:
        used = {target.node for target in plan.targets if not target.standby}
        free = {machine.name for machine in self.standing() if machine.chips} - used
        return int(intent.require.standby is not Standby.NONE and 0 < plan.wanted <= plan.placed and bool(free))

    def _staged(self, region: Region, workload: WorkloadKey) -> set[str]:
        return {
            each.id
            for desired in region.workloads.desired.values()
            for each in desired.assignments
            if each.workload == workload and each.staged
        }

    def _ready(self, workload: WorkloadKey) -> set[str]:
        return {
            name
            for machine in self.standing()
            for name, worker in machine.workers.items()
            if machine.is_ready(name) and worker.assignment.workload == workload
        }


def _is_lost(region: Region, node: str) -> bool:
    state = region.fleet.fleet.nodes.get(node)
    return state is None or state.liveness is Liveness.LOST


class Signer:
    """The Signer port; signatures are checked where links are real."""

    def sign_receipt(self, receipt: Receipt) -> SignedReceipt:
        return nouns.signed(receipt, b"simulated")


class Ids:
    """The Ids port: names from the seed."""

    def __init__(self, world: World, process: Process) -> None:
        self._chance = world.chance.stream(f"ids-{process.name}-{world.now()}")
        self._process = process

    def name(self, kind: str) -> str:
        self._process.check()
        return f"{kind}-{self._chance.token(8)}"

    def secret(self) -> str:
        self._process.check()
        return self._chance.token(27)  # 20 bytes, base64


def _quiet(event: str, *, error: bool = False, **fields: str | float | None) -> None:
    """What the supervisor logs is told by its effects here."""
