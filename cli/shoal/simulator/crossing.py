"""One run of a region that has a workload go to another region, or come home from it, while something breaks at a step.

Home is a whole region: the real coordinator, trades included, and the real agents. The other is a small one
(`regions`), with a federation between. A seed draws the way (out by an operator's word, home by one, home by itself or
by notice, out because it is better there), the step of the move at which the blow comes, and what that is: a process
of home, the other region's coordinator or all of it, the way between them, an agreement's end. Clients ask all the
while. The move must end by itself; then all comes to rest, is taken back, and nothing is left.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.negotiation.model import Active
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Transaction
from shoal.simulator import crossing_judge
from shoal.simulator.between import FederationEnd, Peers, peer
from shoal.simulator.chance import Chance
from shoal.simulator.cluster import GIB, Spec
from shoal.simulator.home import Estate
from shoal.simulator.machine import Behaviour, Machine, chip
from shoal.simulator.moves import moves_in
from shoal.simulator.network import REGION
from shoal.simulator.operators import WHO
from shoal.simulator.regions import WAY_S, Federated, Listed, Site, delegations, ledger_of, unsettled
from shoal.simulator.scenario import STEADY_S, Outcome, perform, profile
from shoal.simulator.scenario import Stage as Run
from shoal.simulator.storage import Moment
from shoal.simulator.story import FORTH, GATEWAYS, MOVE_STEPS, OLD, TEXT, Cell, Moving, delete
from shoal.simulator.world import Process
from shoal.types.agreement import GUESTS
from shoal.types.codes import Code
from shoal.types.route import Endpoint
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

NAME: Final = "crossing"
AWAY: Final = "south"
HOME_GATES, AWAY_GATES = f"{REGION}'s gateways", f"{AWAY}'s gateways"
"""Data goes its own way: coordinators that do not hear each other may have gateways that do."""
OUT: Final = ("out", "better")
WAYS: Final = (*OUT, "home", "failback", "notice")
REST_S: Final = 400.0
"""Virtual seconds until all is at rest: a lease, a rest after many tries, a minute in which home has had a place again,
and a move."""
COMES_S: Final = 200.0
"""Until a move that nobody asked for begins: a minute of room at home, or two rests of what is to be bettered."""
GONE_S: Final = 1e9
"""For good, in this run."""
PARTS: Final = ("power", "supervisor", "front", "worker")
VICTIMS: Final = (
    "coordinator", "coordinator-power",
    *(f"gateway-{part}" for part in PARTS[:-1]),
    *(f"home-{part}" for part in PARTS),
    "away-coordinator", "away-reboot", "away-stop", "away-dark",
    "ways-both", "ways-coordinators", "ways-gateways", "ways-there", "ways-back",
    "federation", "agreement-noticed", "agreement-ended", "cancelled",
)  # fmt: skip
CELLS: Final = tuple(
    Cell(way, step, moment, victim)
    for way, step, moment, victim in product(
        WAYS, [step for step in MOVE_STEPS if step not in ("rolling_back", "aborted")], Moment, VICTIMS
    )
    if not (way in OUT and step == "warming")  # that region makes ready unseen
    and not (victim == "cancelled" and step not in FORTH)
)
_STRIDE: Final = 1009
"""Seeds that follow on each other are of cells far apart, and all cells come before one comes again."""


@dataclass(frozen=True, slots=True)
class Draw:
    """standby: as a policy has it. wrong: the other region's answers are others than home's. gone_s: how long what was
    struck stays so. again_s: until home's coordinator is killed after the blow, whatever that was; 0: it is not."""

    cell: Cell
    agents: int
    replicas: int
    standby: str
    wrong: bool
    gone_s: float
    again_s: float
    late_s: float
    load_s: float


def drawn(seed: int) -> Draw:
    chance = Chance(seed).stream("crossing")
    cell = CELLS[seed * _STRIDE % len(CELLS)]
    replicas = chance.whole(1, 2)
    # Where nobody at home answers, there is nobody to compare with: what answers otherwise serves then, as it should.
    wrong = cell.machine in OUT and cell.victim.partition("-")[0] not in ("home", "ways") and chance.happens(0.1)
    return Draw(
        cell=cell,
        agents=replicas + chance.whole(1, 2),
        replicas=replicas,
        standby=chance.pick(["none", "none", "warm", "warm", "staged"]),
        wrong=wrong and cell.step in FORTH[:5],
        gone_s=chance.pick([0.5, 2.0, 6.0, 12.0, 45.0, GONE_S]) * chance.between(0.8, 1.2),
        again_s=chance.between(0.1, 8.0) if chance.happens(0.25) else 0.0,
        late_s=chance.pick([0.0, 0.001, 0.01, 0.1, 0.5]) * chance.between(0.5, 1.5),
        load_s=chance.between(0.2, 2.5),
    )


def spec(chance: Chance, draw: Draw) -> Spec:
    speed = 1e9 if draw.cell.machine == "better" else 1e11
    nodes = dict.fromkeys(GATEWAYS, ()) | {
        f"edge-{number}": (chip(f"cpu{number}", speed * chance.between(0.8, 1.2), 8 * GIB),)
        for number in range(draw.agents)
    }
    size = chance.whole(10, 150) << 20
    return Spec(
        nodes=nodes,
        labels={},
        profiles={OLD: profile(OLD, 1e8, size)},
        behaviours={OLD: Behaviour(draw.load_s, chance.between(0.005, 0.05))},
    )


def play(seed: int) -> Outcome:
    """The whole run; the same seed and code give the same record, byte for byte."""
    draw = drawn(seed)
    return perform(seed, NAME, partial(spec, draw=draw), partial(_told, draw=draw))


async def _told(run: Run, draw: Draw) -> None:
    run.rules = crossing_judge.rules
    story = Crossing(run, draw)
    try:
        await story.tell()
    finally:
        story.federated.end()


class Beyond:
    """The other region, as home's fronts meet it."""

    def __init__(self, federated: Federated, serve_s: float, wrong: bool) -> None:
        self._federated = federated
        self._chance = federated.world.chance.stream("beyond")
        self._serve_s = serve_s
        self._wrong = wrong

    async def infer(self, gateway: Machine, endpoint: Endpoint) -> Code | None:
        met = gateway.front.peers.get(endpoint.region)
        if met is None or endpoint.node not in met.gateways:
            return Code.CERT_UNTRUSTED
        there = self._federated.between.transit(HOME_GATES, AWAY_GATES)
        back = self._federated.between.transit(AWAY_GATES, HOME_GATES)
        if there is None or back is None or self._site(endpoint).dark:
            await asyncio.sleep(0.5)
            return Code.REPLICA_UNREACHABLE
        await asyncio.sleep(there)
        if not self._serves(endpoint):
            await asyncio.sleep(back)
            return Code.AGREEMENT_UNKNOWN
        await asyncio.sleep(self._chance.between(0.5, 1.5) * self._serve_s)
        await asyncio.sleep(back)
        return Code.REPLICA_UNREACHABLE if self._site(endpoint).dark else None

    def shows(self, region: str) -> str:
        return "other answers" if self._wrong else "right answers"

    def _serves(self, endpoint: Endpoint) -> bool:
        return self._site(endpoint).home.serves(WorkloadKey(GUESTS, endpoint.agreement))

    def _site(self, endpoint: Endpoint) -> Site:
        return self._federated.sites[endpoint.region]


class Crossing(Moving):
    """One live move between two regions."""

    def __init__(self, run: Run, draw: Draw) -> None:
        back = draw.cell.step if draw.cell.victim == "cancelled" and draw.cell.step in FORTH else ""
        super().__init__(run, draw.cell, draw.late_s, back)
        self.draw = draw
        chips = {f"far-{number}": chip("cpu0", 1e11, 8 * GIB) for number in range(2)}
        there = Estate(AWAY, AWAY, chips, dict.fromkeys(chips, 1.0))
        self.federated = Federated(run.world, (there,), run.cluster.spec.profiles, 1)
        self.listed = Listed(REGION, REGION)
        self.federated.members.append(self.listed.member)
        self.away = self.federated.sites[AWAY]
        serve_s = run.cluster.spec.behaviours[OLD].serve_s
        run.cluster.network.beyond = Beyond(self.federated, serve_s, draw.wrong)
        run.cluster.joins = self._join
        self._delegations: dict[str, object] = {}
        self._able: tuple[str, ...] = ()
        self._is_let_go = False
        """What is better elsewhere may go there."""

    # -- home in its federation ----------------------------------------------------------------------------------------

    async def _join(self, process: Process, region: Region) -> None:
        between = self.federated.between
        link = FederationEnd(process, between, REGION, list(self.federated.replicas))
        adopt = region.workloads.adopt_trades

        def adopted(**news: object) -> None:
            adopt(**news)  # type: ignore[arg-type]
            self._look(region)

        region.workloads.adopt_trades = adopted  # type: ignore[method-assign]
        await region.federate(
            Peers(process, between, REGION),
            federation=link,
            directory=lambda: self.listed.directory,
            rtt=lambda: {AWAY: Seconds(WAY_S)},
        )
        assert region.bids is not None
        between.listen(REGION, process, peer(REGION, region.bids))
        process.on_death(lambda: self.world.record("region.down", region=REGION))
        process.spawn(self.listed.advertise(link, self.cluster.clock, region.workloads.inputs), "advertise")
        self.world.record("region.up", region=REGION)

    def _look(self, region: Region) -> None:
        """Tells the record what home acts on, where that changed."""
        told = delegations(region.workloads.delegated, region.trades)
        if told != self._delegations:
            self._delegations = told
            self.world.record("delegated", region=REGION, **told)

    async def start(self) -> None:
        await self.federated.start()
        await self.cluster.start()
        await self.until(self._is_up, 30.0, "everybody to be listed, and every machine to be known")

    def _is_up(self) -> bool:
        region = self.cluster.region
        listed = self.federated.is_known() and AWAY in self.listed.regions
        return listed and region is not None and not any(self._missing_machines(region))

    def _missing_machines(self, region: Region) -> Iterator[str]:
        for machine in self.cluster.standing():
            yield from self.cluster.missing_at(region, machine)
            state = region.fleet.fleet.nodes.get(machine.name)
            yield from sorted(machine.chips.keys() - (state.receipts.keys() if state is not None else set()))

    # -- the move ------------------------------------------------------------------------------------------------------

    def documents(self, model: str, replicas: int) -> str:
        better = "when-better" if self._is_let_go else "never"
        delegate = better if self.cell.machine == "better" else "when-infeasible"
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
        """Where the move begins; clients ask from there on."""
        match self.cell.machine:
            case "out" | "better":
                await self.up(OLD, self.draw.replicas)
            case "failback":
                for machine in self._nodes():
                    await self._cordon(machine, on=True)
                await self.apply(OLD, self.draw.replicas)
                await self._rests("to be run elsewhere", away=True)
            case _:
                await self.up(OLD, self.draw.replicas)
                await self.cluster.operators.insist("out", partial(_cross, to=AWAY))
                await self._rests("to have gone elsewhere", away=True)
        self.start_asking()

    async def up(self, model: str, replicas: int) -> None:
        await self.apply(model, replicas)
        await self._rests("coming up", away=False)

    async def act(self) -> None:
        match self.cell.machine:
            case "out":
                await self.ask("out", partial(_cross, to=AWAY))
            case "home":
                await self.ask("home", partial(_cross, to=REGION))
            case "better":
                self._is_let_go = True
                await self.apply(OLD, self.draw.replicas)
            case "failback":
                for machine in self._nodes():
                    await self._cordon(machine, on=False)
            case "notice":
                self._withdraw(60.0)
        await self.until(lambda: self.is_written, COMES_S, "a move")
        await self.ended()

    def steps(self, moment: Moment, transaction: Transaction) -> tuple[str, ...]:
        crosses = any(migration.crosses for migration in moves_in(transaction))
        return super().steps(moment, transaction) if crosses else ()

    def strike(self) -> None:
        who, _, part = self.cell.victim.partition("-")
        gone_s, cluster = self.draw.gone_s, self.cluster
        if self.draw.again_s:
            self.world.later(self.draw.again_s, cluster.kill_coordinator)
        match who:
            case "coordinator":
                cluster.kill_coordinator(power=part == "power")
            case "gateway":
                self.hit(cluster.network.machines[GATEWAYS[0]], part, gone_s)
            case "home":
                self.hit(self._at_home(), part, gone_s)
            case "away":
                self._strike_away(part, gone_s)
            case "ways":
                self._cut(part, gone_s)
            case "federation":
                for replica in self.federated.replicas.values():
                    replica.kill()
            case "agreement":
                self._withdraw(20.0 if part == "noticed" else 0.0)
            case _:
                pass  # it is cancelled where it is reached

    def _at_home(self) -> Machine:
        """One that has a replica, else any."""
        nodes = self._nodes()
        return self.chance.pick([machine for machine in nodes if machine.workers] or nodes)

    def _nodes(self) -> list[Machine]:
        return [machine for machine in self.cluster.machines if machine.chips]

    def _strike_away(self, part: str, gone_s: float) -> None:
        match part:
            case "coordinator" | "reboot":
                self.away.kill(reboots=part == "reboot")
            case "stop":
                self.away.stop(min(gone_s, 60.0))
            case _:
                self.away.go_dark()
                self.world.later(gone_s, self.away.light)

    def _cut(self, part: str, gone_s: float) -> None:
        between = self.federated.between
        there = [between.path(REGION, AWAY), between.path(HOME_GATES, AWAY_GATES)]
        back = [between.path(AWAY, REGION), between.path(AWAY_GATES, HOME_GATES)]
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
        self.world.later(gone_s, self._mend)

    def _mend(self) -> None:
        for one, other in ((REGION, AWAY), (HOME_GATES, AWAY_GATES)):
            self.federated.between.path(one, other).cut = self.federated.between.path(other, one).cut = False

    def _withdraw(self, ends_s: float) -> None:
        if self.away.is_up and self.away.guests:
            self.world.record("fault.withdrawn", region=AWAY)
            self.away.withdraw(self.away.guests[0], Seconds(ends_s))

    async def _cordon(self, machine: Machine, *, on: bool) -> None:
        while await self.cluster.operators.cordon(machine.name, on=on) != "ok":  # noqa: ASYNC110 - as people do
            await asyncio.sleep(0.5)

    # -- at rest -------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """All that would last ends, the workload comes to rest on either side; then it is deleted."""
        self._mend()
        if self.away.dark:
            self.away.light()
        for party in self.federated.parties():
            if party.process is not None:
                party.go_on(party.process)
        await self.cluster.calm()
        began = self.world.now()
        await self._rests("after the blow")
        self.run.converged_s = self.world.now() - began
        await self.stop_asking()
        await self.cluster.operators.insist("delete", delete)
        await self._rests("after all was taken back")
        self.federated.read_ledgers()
        store = self.cluster.store
        if store is not None:
            self.world.record("ledger", region=REGION, entries=ledger_of(store))
        self.world.record("story.ends")

    async def _rests(self, when: str, *, away: bool | None = None) -> None:
        """away: it must have come to that, one way or the other; None: either will do."""
        since = began = self.world.now()
        while self.world.now() < since + STEADY_S:
            if missing := await self._missing(away):
                if self.world.now() >= began + REST_S:
                    self.world.fail(f"not at rest within {REST_S:.0f} s {when}: {'; '.join(missing)}")
                    await asyncio.get_running_loop().create_future()
                since = self.world.now() + 0.5
            await asyncio.sleep(0.5)

    async def _missing(self, away: bool | None) -> list[str]:
        region, coordinator = self.cluster.region, self.cluster.coordinator
        if region is None or region.trades is None or coordinator is None or not coordinator.alive:
            return ["no coordinator"]
        agreements = [trade.phase.deal for trade in region.trades.trades.values() if isinstance(trade.phase, Active)]
        found = unsettled(REGION, region.trades)
        found += self.federated.missing(served=False, believed=[(deal.region, deal.agreement) for deal in agreements])
        found += self._missing_machines(region)
        found += [f"{each.id} is {each.stage}" for each in region.workloads.migrations.live]
        found += [f"{deal.agreement} is {deal.service}" for deal in agreements if not deal.serves]
        if found or not region.workloads.intents:
            return found + [f"{deal.agreement} stands" for deal in agreements if not region.workloads.intents]
        if away is not None and bool(agreements) != away:
            return [f"{TEXT} is {'not ' if away else ''}elsewhere"]
        if self.cell.machine in ("failback", "notice") and agreements and away is None:
            return [f"{TEXT} has not come home"]
        here = any(machine.workers for machine in self.cluster.machines)
        if bool(agreements) == here and self.draw.standby == "none":
            found.append(f"{TEXT} is {'both here and' if here else 'neither here nor'} elsewhere")
        for machine in self.cluster.standing():
            if code := await self.cluster.operators.request(machine.name, TEXT):
                found.append(f"{machine.name} answers with {code}")
        return found

    # -- who could answer ----------------------------------------------------------------------------------------------

    def asked(self) -> None:
        able = (*self._able_here(), *self._able_away())
        if able != self._able:
            self._able = able
            self.world.record("able", names=able)

    def _able_here(self) -> list[str]:
        """Nobody is counted while coordinators hear each other and gateways do not meet: what comes home has nothing to
        be compared with then, and the other region says that it serves."""
        between = self.federated.between
        if between.open_both_ways(REGION, AWAY) and not between.open_both_ways(HOME_GATES, AWAY_GATES):
            return []
        return [
            name
            for machine in self._nodes()
            for name in sorted(machine.workers)
            if machine.is_ready(name) and machine.front.alive and machine.supervisor and machine.supervisor.alive
        ]

    def _able_away(self) -> list[str]:
        between, away = self.federated.between, self.away
        ways = ((REGION, AWAY), (HOME_GATES, AWAY_GATES))
        open_ways = all(between.open_both_ways(one, other) for one, other in ways)
        process = away.process
        stands = process is not None and process.alive and not process.is_stopped
        if self.draw.wrong or not (open_ways and stands):
            return []
        return [name for name in away.guests if away.home.serves(WorkloadKey(GUESTS, name))]


async def _cross(region: Region, to: str) -> Migration:
    return await region.moving.cross(TEXT, Aim(to), WHO)
