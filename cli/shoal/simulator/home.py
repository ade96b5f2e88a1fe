"""A region's engine in small, for runs of milliseconds: the real `decide` over one gateway and a few nodes, whose
agents do at once what they are told. A new replica takes `LOAD_S`; nothing here fails by itself.

What a region's controllers for trade get from the real WorkloadsController they get from here: what is placed, what
serves, the inputs of a what-if; and they tell it what is held, who is a guest, and what runs elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.catalog import Catalog, Guest, ModelRecord
from shoal.coordinator.controllers.memory import StoredMemory
from shoal.coordinator.controllers.trades import Standing
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.negotiation.choice import Figures, own_figures
from shoal.coordinator.core.placement.model import Inputs, Plan, RegionFacts, Reservation, Slot, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.signals.model import Signal, SignalName
from shoal.coordinator.core.workloads.decide import decide, inputs_of
from shoal.coordinator.core.workloads.invariants import Promise
from shoal.coordinator.core.workloads.model import Content, Course, Delegated, Memory
from shoal.coordinator.core.workloads.model import World as Known
from shoal.coordinator.core.workloads.routes import gateways
from shoal.simulator.machine import Chip
from shoal.simulator.world import EPOCH, Clock
from shoal.types.agreement import GUESTS, GatewayRef, ServiceReport
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.device import Node, Reading, Role
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall, Watts
from shoal.types.workload import Intent, Trade, WorkloadKey

GATEWAY: Final = "gateway"
LOAD_S: Final = 0.5
LOOK_S: Final = 5.0
"""Whether home has a place for what runs elsewhere is looked at so often, as by the real one."""


_NO_SIGNALS: Final[Mapping[SignalName, Signal]] = {}
_NOWHERE: Final = RegionFacts("")
_Place = tuple[Node, Chip | None, Receipt | None]


@dataclass(frozen=True, slots=True)
class Estate:
    """What a region has. nodes: name -> its one chip. prices: USD/h of a node."""

    name: str
    residency: str
    nodes: Mapping[str, Chip]
    prices: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Told(Catalog):
    """A catalog without documents: what its Region would say is said here."""

    here: RegionFacts = _NOWHERE
    takes: tuple[Trade, ...] = ()

    def trades(self, region: str) -> tuple[Trade, ...]:
        return self.takes

    def facts(self, region: str, signals: Mapping[SignalName, Signal] = _NO_SIGNALS) -> RegionFacts:
        return self.here


class Home:
    """The machines of one region and what runs on them; outlives its coordinator's processes."""

    def __init__(
        self,
        estate: Estate,
        clock: Clock,
        passed: Callable[[], float],
        profiles: Mapping[str, ModelProfile],
        takes: Trade,
    ) -> None:
        """clock: of the coordinator's machine. passed: time as it is, whatever that machine is at."""
        self.estate = estate
        self._passed = passed
        self.clock = clock
        models = {name: ModelRecord(name, (), Wall(EPOCH), "", each) for name, each in profiles.items()}
        self.catalog = Told(models=models, here=RegionFacts(estate.name, estate.residency), takes=(takes,))
        self._profiles = profiles
        self.revoked_gateways: tuple[str, ...] = ()
        self.wanted: tuple[Intent, ...] = ()
        """What its operators have applied."""
        self.guests: tuple[Guest, ...] = ()
        self.delegated: Mapping[WorkloadKey, Delegated] = {}
        self.reserved: tuple[Reservation, ...] = ()
        self.plan: Plan = Plan((), "")
        self.crossed: Callable[[str], ServiceReport]
        """What an agreement's requests showed at the gateways."""
        self.stepping = asyncio.Lock()
        self.woken = asyncio.Event()
        self.is_busy = False
        """Something here is on its way."""
        self._memory = Memory()
        self._stepped_at = clock.now()
        self._desired: Mapping[str, Content] = {}
        self._started: dict[str, float] = {}
        self._places: list[_Place] = [(_node(estate.name, GATEWAY, None), None, None)]
        for name, chip in self._chips():
            node = _node(estate.name, name, chip)
            self._places.append((node, chip, chip.receipt(node.name, chip.device, Wall(EPOCH), Seconds(1.0))))
        self._costs = {Slot(name, chip.device.name): UsdPerHour(estate.prices[name]) for name, chip in self._chips()}
        self._could: dict[WorkloadKey, tuple[float, bool]] = {}

    def restart(self) -> None:
        """Another process of its coordinator begins: what runs goes on, what was told it is told anew."""
        self.guests, self.delegated, self.reserved = (), {}, ()
        self._could.clear()
        self._memory = StoredMemory(self._stepped_at, self._memory).restored(self.clock.now())
        self.stepping = asyncio.Lock()

    def step(self) -> None:
        """One look at everything, as the real controller takes it; what it asks for is done."""
        before = (self._memory, self._desired)
        self._stepped_at = self.clock.now()
        decision = decide(self._known(), self._stepped_at, self.clock.wall())
        self.plan, self._memory, self._desired = decision.plan, decision.memory, decision.desired
        now = self._passed()
        there = self.assignments()
        self._started = {each.id: self._started.get(each.id, now) for each in there}
        self.is_busy = before != (self._memory, self._desired) or not all(self._is_ready(each) for each in there)

    def assignments(self) -> tuple[Assignment, ...]:
        return tuple(each for content in self._desired.values() for each in content.assignments)

    def serves(self, workload: WorkloadKey) -> bool:
        """Whether a replica here answers."""
        return any(each.workload == workload and self._is_ready(each) for each in self.assignments())

    def room(self) -> tuple[tuple[str, int, int], ...]:
        """By node: bytes given away, whether held or run, and bytes there are."""
        taken = dict.fromkeys(self.estate.nodes, 0)
        for node, content in self._desired.items():
            for each in content.assignments:
                taken[node] += each.memory_bytes
        for held in self._kept_room():
            taken[held.slot.node] += held.memory_bytes
        return tuple((name, taken[name], chip.device.memory_bytes) for name, chip in self._chips())

    # what trades ask of it: `controllers.trades.Home`

    def intents(self) -> tuple[Intent, ...]:
        return self.wanted

    def profiles(self) -> Mapping[str, ModelProfile]:
        return self._profiles

    def standing(self, key: WorkloadKey) -> Standing:
        plan = self.plan.of(key)
        if plan is None:
            return Standing(placed=True, serves=False)
        if plan.elsewhere:
            now = self.clock.now()
            at, placed = self._could.get(key, (now - LOOK_S, False))
            if now - at >= LOOK_S:
                placed = self._what_if(key, explain=False).refusal is None
                self._could[key] = (now, placed)
            return Standing(placed, serves=False)
        return Standing(plan.refusal is None, self.serves(key))

    def course(self, key: WorkloadKey) -> Course | None:
        return None

    def may_leave(self, intent: Intent) -> bool:
        return True

    def barred(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        return frozenset()

    @property
    def moves_live(self) -> bool:
        return False

    def figures(self, key: WorkloadKey) -> Figures | None:
        return own_figures(self._what_if(key, explain=True))

    def gateways(self) -> tuple[GatewayRef, ...]:
        return gateways(self.fleet())

    def revoked(self) -> tuple[str, ...]:
        return self.revoked_gateways

    def delivered(self, agreement: str) -> ServiceReport:
        return self.crossed(agreement)

    # what bids ask of it: as of `controllers.workloads`

    def inputs(self) -> Inputs:
        return inputs_of(self._known(), self.clock.now(), self.clock.wall())

    def endpoints(self, key: WorkloadKey) -> int:
        table = self._memory.tables.get(str(key))
        return len(table.endpoints) if table is not None else 0

    def hosts(self, key: WorkloadKey) -> frozenset[str]:
        return frozenset(
            node for node, content in self._desired.items() if any(each.workload == key for each in content.assignments)
        )

    def adopt_bids(
        self, *, guests: tuple[Guest, ...], reserved: tuple[Reservation, ...], promises: tuple[Promise, ...]
    ) -> None:
        if (guests, reserved) != (self.guests, self.reserved):
            self.guests, self.reserved = guests, reserved
            self.woken.set()

    def adopt_trades(self, delegated: Mapping[WorkloadKey, Delegated]) -> None:
        if delegated != self.delegated:
            self.delegated = delegated
            self.woken.set()

    async def borrow(self, region: str, size: int, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Every model is everywhere."""
        raise AssertionError(digest)

    def fleet(self) -> Fleet:
        """Every node, as heard this very moment."""
        now, wall = self.clock.now(), self.clock.wall()
        return Fleet({place[0].name: self._state(*place, now, wall) for place in self._places}, ticked_at=now)

    def _known(self) -> Known:
        return Known(
            region=self.catalog.here,
            fleet=self.fleet(),
            intents=(*self.wanted, *(guest.intent for guest in self.guests)),
            profiles=self._profiles,
            desired=self._desired,
            memory=self._memory,
            costs=self._costs,
            rtt_s={guest.intent.key.name: guest.way_s for guest in self.guests},
            delegated=self.delegated,
            reserved=self._kept_room(),
        )

    def _kept_room(self) -> tuple[Reservation, ...]:
        """An agreement with a replica has its room by that."""
        placed = {each.workload for each in self.assignments()}
        return tuple(each for each in self.reserved if WorkloadKey(GUESTS, each.bid) not in placed)

    def _what_if(self, key: WorkloadKey, *, explain: bool) -> WorkloadPlan:
        """The workload's plan if no other region ran it."""
        plan = place(self.inputs(), explain=(key,) if explain else False, at_home=(key,)).of(key)
        assert plan is not None
        return plan

    def _chips(self) -> list[tuple[str, Chip]]:
        return sorted(self.estate.nodes.items())

    def _is_ready(self, assignment: Assignment) -> bool:
        started = self._started.get(assignment.id)
        return started is not None and self._passed() >= started + LOAD_S and not assignment.draining

    def _state(self, node: Node, chip: Chip | None, receipt: Receipt | None, now: Elapsed, wall: Wall) -> NodeState:
        content = self._desired.get(node.name, Content())
        readings, receipts = dict[str, Reading](), dict[str, Receipt]()
        if chip is not None and receipt is not None:
            name = chip.device.name
            free = Bytes(chip.device.memory_bytes - sum(each.memory_bytes for each in content.assignments))
            readings[name] = Reading(name, free, 0.1, 45.0, Watts(10.0), float("nan"), wall)
            receipts[name] = receipt
        return NodeState(
            node,
            Liveness.READY,
            epoch=1,
            sequence=1,
            connected=True,
            heard_at=now,
            last_seen=wall,
            reported=True,
            observed={each.id: self._observed(each, wall) for each in content.assignments},
            readings=readings,
            receipts=receipts,
            front_ready=True,
        )

    def _observed(self, asked: Assignment, wall: Wall) -> Observed:
        ready = self._is_ready(asked) or asked.draining
        phase = Phase.DRAINING if asked.draining else Phase.READY if ready else Phase.LOADING
        return Observed(
            assignment=asked.id,
            workload=asked.workload,
            model=asked.model,
            device=asked.device,
            phase=phase,
            since=wall,
            code=None,
            reason="",
            retry_at=None,
            gives_up_at=None,
            in_flight=0,
            restarts=0,
            measured=None,
            served=(),
        )


def _node(region: str, name: str, chip: Chip | None) -> Node:
    return Node(
        name=name,
        region=region,
        role=Role.GATEWAY if chip is None else Role.AGENT,
        labels={},
        agent_version="0.1.0",
        os="sim",
        arch="sim",
        memory_bytes=Bytes(64 << 30),
        memory_limit_bytes=Bytes(64 << 30),
        devices=() if chip is None else (chip.device,),
        grpc_address=f"{name}.{region}:8001",
        rest_address=f"{name}.{region}:8000",
        token_address=f"{name}.{region}:8002",
        metrics_address=f"{name}.{region}:9000",
        boot_id=name,
    )
