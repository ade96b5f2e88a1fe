"""One run of a region that delegates a workload to another region, or takes it back, while a fault strikes at one step.

The local region is whole: the real coordinator, negotiation included, and the real agents. The other region is a small
one (`RegionEngine`), with a federation between them. A seed draws three things:

- the direction: out on an operator's request, home on one, home by itself or after notice, out because it is better
  there;
- the step of the migration at which the fault strikes;
- the fault: a process of the local region, the other region's coordinator or all of it, the network between them, or
  the end of an agreement.

Clients send requests throughout. The migration must end by itself; then everything must come to rest, and after the
workload is deleted nothing may be left.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.negotiation.model import Active
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Transaction
from shoal.simulator.checkers import cross_region
from shoal.simulator.parts.cluster import GIB, ClusterSpec
from shoal.simulator.parts.federation import (
    RTT_S,
    FederationListing,
    SimFederation,
    SimRegion,
    delegation_facts,
    ledger_facts,
    unfinished_trades,
)
from shoal.simulator.parts.hardware import Behaviour, chip
from shoal.simulator.parts.inter_region import SimFederationLink, SimPeerRegions, serve_peer
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.migration_events import migrations_in
from shoal.simulator.parts.network import REGION
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.simulator.parts.region_engine import RegionResources
from shoal.simulator.parts.storage import CommitMoment
from shoal.simulator.scenarios.region_run import QUIESCENT_S, RunOutcome, model_profile, run_region
from shoal.simulator.scenarios.region_run import RegionRun as Run
from shoal.simulator.scenarios.single_fault import (
    CANCELLABLE_STEPS,
    GATEWAYS,
    MOVE_STEPS,
    OLD_MODEL,
    TEXT,
    FaultCell,
    MigrationScenario,
    delete_workload,
)
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimProcess
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code
from shoal.types.route import Endpoint
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

NAME: Final = "cross-region"
AWAY: Final = "south"
HOME_GATEWAYS, AWAY_GATEWAYS = f"{REGION}'s gateways", f"{AWAY}'s gateways"
"""Data has its own network paths: gateways may reach each other while their coordinators do not."""
OUTBOUND: Final = ("out", "better")
DIRECTIONS: Final = (*OUTBOUND, "home", "failback", "notice")
QUIESCENT_TIMEOUT_S: Final = 400.0
"""Virtual seconds until the run is quiescent: a lease, a back-off after many attempts, the minute for which there must
be a local place before failback, and a migration."""
MOVE_START_TIMEOUT_S: Final = 200.0
"""Virtual seconds until a migration that nobody requested begins: a minute of local room, or two cooldowns of the
workload that is to be improved."""
FOREVER_S: Final = 1e9
"""Longer than any run."""
PARTS: Final = ("power", "supervisor", "front", "worker")
FAULTS: Final = (
    "coordinator", "coordinator-power",
    *(f"gateway-{part}" for part in PARTS[:-1]),
    *(f"home-{part}" for part in PARTS),
    "away-coordinator", "away-reboot", "away-stop", "away-dark",
    "ways-both", "ways-coordinators", "ways-gateways", "ways-there", "ways-back",
    "federation", "agreement-noticed", "agreement-ended", "cancelled",
)  # fmt: skip
CELLS: Final = tuple(
    FaultCell(way, step, moment, fault)
    for way, step, moment, fault in product(
        DIRECTIONS, [step for step in MOVE_STEPS if step not in ("rolling_back", "aborted")], CommitMoment, FAULTS
    )
    if not (way in OUTBOUND and step == "warming")  # the other region warms up unobserved
    and not (fault == "cancelled" and step not in CANCELLABLE_STEPS)
)
_STRIDE: Final = 1009
"""Consecutive seeds get distant cells, and every cell comes once before any comes twice."""


@dataclass(frozen=True, slots=True)
class CrossRegionDraw:
    """What the seed draws."""

    # Direction, step of the move, moment and fault.
    cell: FaultCell
    # Agents in the local region.
    agents: int
    # Replicas of the workload, 1 or 2.
    replicas: int
    # As a policy writes it: none, warm or staged.
    standby: str
    # True: the other region's answers differ from the local region's, so verification must fail.
    answers_differ: bool
    # Seconds that the fault lasts; FOREVER_S: until the run converges.
    outage_s: float
    # Seconds from the fault until the local coordinator is killed; 0: it is not.
    second_kill_s: float
    # Seconds from the step's commit to the fault, if the cell's moment is after its effect.
    fault_delay_s: float
    # Mean seconds of a model load.
    load_s: float


def draw_run(seed: int) -> CrossRegionDraw:
    rng = Rng(seed).stream("crossing")
    cell = CELLS[seed * _STRIDE % len(CELLS)]
    replicas = rng.randint(1, 2)
    # If no local replica answers, there is nothing to compare with, and wrong answers are rightly served.
    wrong = cell.state_machine in OUTBOUND and cell.fault.partition("-")[0] not in ("home", "ways") and rng.happens(0.1)
    return CrossRegionDraw(
        cell=cell,
        agents=replicas + rng.randint(1, 2),
        replicas=replicas,
        standby=rng.choice(["none", "none", "warm", "warm", "staged"]),
        answers_differ=wrong and cell.step in CANCELLABLE_STEPS[:5],
        outage_s=rng.choice([0.5, 2.0, 6.0, 12.0, 45.0, FOREVER_S]) * rng.uniform(0.8, 1.2),
        second_kill_s=rng.uniform(0.1, 8.0) if rng.happens(0.25) else 0.0,
        fault_delay_s=rng.choice([0.0, 0.001, 0.01, 0.1, 0.5]) * rng.uniform(0.5, 1.5),
        load_s=rng.uniform(0.2, 2.5),
    )


def draw_spec(rng: Rng, draw: CrossRegionDraw) -> ClusterSpec:
    speed = 1e9 if draw.cell.state_machine == "better" else 1e11
    nodes = dict.fromkeys(GATEWAYS, ()) | {
        f"edge-{number}": (chip(f"cpu{number}", speed * rng.uniform(0.8, 1.2), 8 * GIB),)
        for number in range(draw.agents)
    }
    size = rng.randint(10, 150) << 20
    return ClusterSpec(
        nodes=nodes,
        labels={},
        profiles={OLD_MODEL: model_profile(OLD_MODEL, 1e8, size)},
        behaviours={OLD_MODEL: Behaviour(draw.load_s, rng.uniform(0.005, 0.05))},
    )


def run_seed(seed: int) -> RunOutcome:
    """Execute the whole run. The same seed and code give the same record, byte for byte."""
    draw = draw_run(seed)
    return run_region(seed, NAME, partial(draw_spec, draw=draw), partial(_run_draw, draw=draw))


async def _run_draw(run: Run, draw: CrossRegionDraw) -> None:
    run.make_checkers = cross_region.make_checkers
    scenario = CrossRegionScenario(run, draw)
    try:
        await scenario.execute()
    finally:
        scenario.federation.end()


class SimOtherRegion:
    """The other region, as fronts of the local region call it."""

    def __init__(self, federation: SimFederation, serve_s: float, answers_differ: bool) -> None:
        self._federation = federation
        self._rng = federation.world.rng.stream("beyond")
        self._serve_s = serve_s
        self._answers_differ = answers_differ

    async def infer(self, gateway: SimMachine, endpoint: Endpoint) -> Code | None:
        met = gateway.front.peers.get(endpoint.region)
        if met is None or endpoint.node not in met.gateways:
            return Code.CERT_UNTRUSTED
        there = self._federation.network.transit(HOME_GATEWAYS, AWAY_GATEWAYS)
        back = self._federation.network.transit(AWAY_GATEWAYS, HOME_GATEWAYS)
        if there is None or back is None or self._site(endpoint).is_powered_off:
            await asyncio.sleep(0.5)
            return Code.REPLICA_UNREACHABLE
        await asyncio.sleep(there)
        if not self._serves(endpoint):
            await asyncio.sleep(back)
            return Code.AGREEMENT_UNKNOWN
        await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._serve_s)
        await asyncio.sleep(back)
        return Code.REPLICA_UNREACHABLE if self._site(endpoint).is_powered_off else None

    def answer_signature(self, region: str) -> str:
        return "other answers" if self._answers_differ else "right answers"

    def _serves(self, endpoint: Endpoint) -> bool:
        return self._site(endpoint).engine.serves(WorkloadKey(GUEST_TENANT, endpoint.agreement))

    def _site(self, endpoint: Endpoint) -> SimRegion:
        return self._federation.sites[endpoint.region]


class CrossRegionScenario(MigrationScenario):
    """One live migration between two regions."""

    def __init__(self, run: Run, draw: CrossRegionDraw) -> None:
        back = draw.cell.step if draw.cell.fault == "cancelled" and draw.cell.step in CANCELLABLE_STEPS else ""
        super().__init__(run, draw.cell, draw.fault_delay_s, back)
        self.draw = draw
        chips = {f"far-{number}": chip("cpu0", 1e11, 8 * GIB) for number in range(2)}
        there = RegionResources(AWAY, AWAY, chips, dict.fromkeys(chips, 1.0))
        self.federation = SimFederation(run.world, (there,), run.cluster.spec.profiles, 1)
        self.listing = FederationListing(REGION, REGION)
        self.federation.members.append(self.listing.member)
        self.away = self.federation.sites[AWAY]
        serve_s = run.cluster.spec.behaviours[OLD_MODEL].serve_s
        run.cluster.network.other_regions = SimOtherRegion(self.federation, serve_s, draw.answers_differ)
        run.cluster.on_coordinator_start = self._join
        self._delegations: dict[str, object] = {}
        self._able_replicas: tuple[str, ...] = ()
        self._may_leave = False
        """True: the policy delegates workloads that are better off elsewhere."""

    # -- federation membership -----------------------------------------------------------------------------------------

    async def _join(self, process: SimProcess, region: RegionalCoordinator) -> None:
        network = self.federation.network
        link = SimFederationLink(process, network, REGION, list(self.federation.replicas))
        adopt = region.workloads.adopt_delegations

        def adopt_and_record(**news: object) -> None:
            adopt(**news)  # type: ignore[arg-type]
            self._record_delegations(region)

        region.workloads.adopt_delegations = adopt_and_record  # type: ignore[method-assign]
        await region.federate(
            SimPeerRegions(process, network, REGION),
            federation=link,
            directory=lambda: self.listing.directory,
            rtt=lambda: {AWAY: Seconds(RTT_S)},
        )
        assert region.delegate is not None
        network.listen(REGION, process, serve_peer(REGION, region.delegate))
        process.on_death(lambda: self.world.record("region.down", region=REGION))
        process.spawn(self.listing.advertise(link, self.cluster.clock, region.workloads.inputs), "advertise")
        self.world.record("region.up", region=REGION)

    def _record_delegations(self, region: RegionalCoordinator) -> None:
        """Record the delegations that the local region acts on, if they changed."""
        told = delegation_facts(region.workloads.delegations, region.origin)
        if told != self._delegations:
            self._delegations = told
            self.world.record("delegated", region=REGION, **told)

    async def start(self) -> None:
        await self.federation.start()
        await self.cluster.start()
        await self.wait_until(self._is_up, 30.0, "everybody to be listed, and every machine to be known")

    def _is_up(self) -> bool:
        region = self.cluster.region
        listed = self.federation.is_fully_listed() and AWAY in self.listing.regions
        return listed and region is not None and not any(self._missing_machines(region))

    def _missing_machines(self, region: RegionalCoordinator) -> Iterator[str]:
        for machine in self.cluster.surviving_machines():
            yield from self.cluster.convergence.missing_at(region, machine)
            state = region.fleet.fleet.nodes.get(machine.name)
            yield from sorted(machine.chips.keys() - (state.receipts.keys() if state is not None else set()))

    # -- the migration -------------------------------------------------------------------------------------------------

    def documents(self, model: str, replicas: int) -> str:
        better = "when-better" if self._may_leave else "never"
        delegate = better if self.cell.state_machine == "better" else "when-infeasible"
        spread = f"replicas: {replicas}" + (", spread: node" if replicas > 1 else "")
        return f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: text}}
spec:
  require: {{availability: {{{spread}, standby: {self.draw.standby}}}}}
  optimize: {{latency: 1.0}}
  migration: {{when: {{cooldown: 10s}}}}
  federation: {{delegate: {delegate}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: text}}
spec:
  model: {{source: "{model}"}}
  policy: text
"""

    async def begin(self) -> None:
        """Bring the workload to where the migration starts; clients send requests from then on."""
        match self.cell.state_machine:
            case "out" | "better":
                await self.apply_and_wait(OLD_MODEL, self.draw.replicas)
            case "failback":
                for machine in self._agent_machines():
                    await self._cordon(machine, on=True)
                await self.apply(OLD_MODEL, self.draw.replicas)
                await self._wait_quiescent("to be run elsewhere", away=True)
            case _:
                await self.apply_and_wait(OLD_MODEL, self.draw.replicas)
                await self.cluster.operators.retry_until_done("out", partial(_move_across, to=AWAY))
                await self._wait_quiescent("to have gone elsewhere", away=True)
        self.start_clients()

    async def apply_and_wait(self, model: str, replicas: int) -> None:
        await self.apply(model, replicas)
        await self._wait_quiescent("coming up", away=False)

    async def act(self) -> None:
        match self.cell.state_machine:
            case "out":
                await self.request("out", partial(_move_across, to=AWAY))
            case "home":
                await self.request("home", partial(_move_across, to=REGION))
            case "better":
                self._may_leave = True
                await self.apply(OLD_MODEL, self.draw.replicas)
            case "failback":
                for machine in self._agent_machines():
                    await self._cordon(machine, on=False)
            case "notice":
                self._withdraw(60.0)
        await self.wait_until(lambda: self.is_written, MOVE_START_TIMEOUT_S, "a move")
        await self.wait_over()

    def steps_in(self, moment: CommitMoment, transaction: Transaction) -> tuple[str, ...]:
        crosses = any(migration.is_cross_region for migration in migrations_in(transaction))
        return super().steps_in(moment, transaction) if crosses else ()

    def inject_fault(self) -> None:
        who, _, part = self.cell.fault.partition("-")
        gone_s, cluster = self.draw.outage_s, self.cluster
        if self.draw.second_kill_s:
            self.world.call_later(self.draw.second_kill_s, cluster.kill_coordinator)
        match who:
            case "coordinator":
                cluster.kill_coordinator(power=part == "power")
            case "gateway":
                self.break_part(cluster.network.machines[GATEWAYS[0]], part, gone_s)
            case "home":
                self.break_part(self._local_machine(), part, gone_s)
            case "away":
                self._inject_remote_fault(part, gone_s)
            case "ways":
                self._cut(part, gone_s)
            case "federation":
                for replica in self.federation.replicas.values():
                    replica.kill()
            case "agreement":
                self._withdraw(20.0 if part == "noticed" else 0.0)
            case _:
                pass  # the migration is cancelled when it reaches the step

    def _local_machine(self) -> SimMachine:
        """A machine with a replica, else any with a device."""
        nodes = self._agent_machines()
        return self.rng.choice([machine for machine in nodes if machine.workers] or nodes)

    def _agent_machines(self) -> list[SimMachine]:
        return [machine for machine in self.cluster.machines if machine.chips]

    def _inject_remote_fault(self, part: str, gone_s: float) -> None:
        match part:
            case "coordinator" | "reboot":
                self.away.kill(reboots=part == "reboot")
            case "stop":
                self.away.pause(min(gone_s, 60.0))
            case _:
                self.away.power_off()
                self.world.call_later(gone_s, self.away.power_on)

    def _cut(self, part: str, gone_s: float) -> None:
        network = self.federation.network
        there = [network.path(REGION, AWAY), network.path(HOME_GATEWAYS, AWAY_GATEWAYS)]
        back = [network.path(AWAY, REGION), network.path(AWAY_GATEWAYS, HOME_GATEWAYS)]
        match part:
            case "both":
                cut = [*there, *back]
            case "coordinators":
                cut = [there[0], back[0]]
            case "gateways":
                cut = [there[1], back[1]]
            case "there":
                cut = there
            case _:
                cut = back
        self.world.record("fault.cut", ways=part)
        for path in cut:
            path.cut = True
        self.world.call_later(gone_s, self._restore_paths)

    def _restore_paths(self) -> None:
        for one, other in ((REGION, AWAY), (HOME_GATEWAYS, AWAY_GATEWAYS)):
            self.federation.network.path(one, other).cut = self.federation.network.path(other, one).cut = False

    def _withdraw(self, ends_s: float) -> None:
        if self.away.is_up and self.away.guests:
            self.world.record("fault.withdrawn", region=AWAY)
            self.away.withdraw(self.away.guests[0], Seconds(ends_s))

    async def _cordon(self, machine: SimMachine, *, on: bool) -> None:
        while await self.cluster.operators.cordon(machine.name, on=on) != "ok":  # noqa: ASYNC110 - as people do
            await asyncio.sleep(0.5)

    # -- quiescence ----------------------------------------------------------------------------------------------------

    async def converge(self) -> None:
        """End every lasting fault, wait until the workload is quiescent in either region, then delete it."""
        self._restore_paths()
        if self.away.is_powered_off:
            self.away.power_on()
        for party in self.federation.parties():
            if party.process is not None:
                party.resume(party.process)
        await self.cluster.clear_faults()
        began = self.world.now()
        await self._wait_quiescent("after the fault")
        self.run.converged_s = self.world.now() - began
        await self.stop_clients()
        await self.cluster.operators.retry_until_done("delete", delete_workload)
        await self._wait_quiescent("after all was taken back")
        self.federation.read_ledgers()
        store = self.cluster.store
        if store is not None:
            self.world.record("ledger", region=REGION, entries=ledger_facts(store))
        self.world.record("run.ends")

    async def _wait_quiescent(self, when: str, *, away: bool | None = None) -> None:
        """away: whether the workload must run elsewhere (True) or locally (False); None: either will do."""
        since = began = self.world.now()
        while self.world.now() < since + QUIESCENT_S:
            if missing := await self._missing(away):
                if self.world.now() >= began + QUIESCENT_TIMEOUT_S:
                    self.world.fail(f"not at rest within {QUIESCENT_TIMEOUT_S:.0f} s {when}: {'; '.join(missing)}")
                    await asyncio.get_running_loop().create_future()
                since = self.world.now() + 0.5
            await asyncio.sleep(0.5)

    async def _missing(self, away: bool | None) -> list[str]:
        region, coordinator = self.cluster.region, self.cluster.coordinator
        if region is None or region.origin is None or coordinator is None or not coordinator.alive:
            return ["no coordinator"]
        agreements = [
            trade.phase.agreement for trade in region.origin.trades.values() if isinstance(trade.phase, Active)
        ]
        found = unfinished_trades(REGION, region.origin)
        found += self.federation.missing(
            served=False, known_agreements=[(agreement.region, agreement.id) for agreement in agreements]
        )
        found += self._missing_machines(region)
        found += [f"{each.id} is {each.stage}" for each in region.workloads.migrations.live]
        found += [f"{agreement.id} is {agreement.service}" for agreement in agreements if not agreement.is_serving]
        if found or not region.workloads.intents:
            return found + [f"{agreement.id} stands" for agreement in agreements if not region.workloads.intents]
        if away is not None and bool(agreements) != away:
            return [f"{TEXT} is {'not ' if away else ''}elsewhere"]
        if self.cell.state_machine in ("failback", "notice") and agreements and away is None:
            return [f"{TEXT} has not come home"]
        here = any(machine.workers for machine in self.cluster.machines)
        if bool(agreements) == here and self.draw.standby == "none":
            found.append(f"{TEXT} is {'both here and' if here else 'neither here nor'} elsewhere")
        for machine in self.cluster.surviving_machines():
            if code := await self.cluster.operators.request(machine.name, TEXT):
                found.append(f"{machine.name} answers with {code}")
        return found

    # -- replicas able to answer ---------------------------------------------------------------------------------------

    def on_request(self) -> None:
        able = (*self._able_locally(), *self._able_remotely())
        if able != self._able_replicas:
            self._able_replicas = able
            self.world.record("able", names=able)

    def _able_locally(self) -> list[str]:
        """Local replicas that could answer.

        None count while the coordinators reach each other but the gateways do not. A returning workload then has
        nothing to be compared with, and the other region still reports that it serves.
        """
        network = self.federation.network
        if network.is_open_both_ways(REGION, AWAY) and not network.is_open_both_ways(HOME_GATEWAYS, AWAY_GATEWAYS):
            return []
        return [
            name
            for machine in self._agent_machines()
            for name in sorted(machine.workers)
            if machine.is_ready(name) and machine.front.alive and machine.supervisor and machine.supervisor.alive
        ]

    def _able_remotely(self) -> list[str]:
        network, away = self.federation.network, self.away
        ways = ((REGION, AWAY), (HOME_GATEWAYS, AWAY_GATEWAYS))
        open_ways = all(network.is_open_both_ways(one, other) for one, other in ways)
        process = away.process
        stands = process is not None and process.alive and not process.is_paused
        if self.draw.answers_differ or not (open_ways and stands):
            return []
        return [name for name in away.guests if away.engine.serves(WorkloadKey(GUEST_TENANT, name))]


async def _move_across(region: RegionalCoordinator, to: str) -> Migration:
    return await region.moves.migrate_to_region(TEXT, Aim(to), OPERATOR_URI)
