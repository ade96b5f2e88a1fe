"""A small engine of one region, for runs of milliseconds: the real `decide` over one gateway and a few nodes.

The agents apply their desired sets at once; a new replica takes `LOAD_S`, and nothing here fails by itself. The engine
gives the negotiation controllers what the real WorkloadsController gives them: what is placed, what serves, and the
inputs of a what-if. In return they tell it which bids are held, which guests run here and what runs elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.federation.local_region import LocalPlacement
from shoal.coordinator.controllers.log.region_clock import RegionClock
from shoal.coordinator.controllers.workloads.node_marks import RoomMark
from shoal.coordinator.core.catalog.model import Catalog, Guest, ModelRecord
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.negotiation.offer_selection import own_values
from shoal.coordinator.core.placement.model import Inputs, PlacementPlan, RegionFacts, Reservation, Slot, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.rank import TermValues
from shoal.coordinator.core.signals.model import Signal, SignalName
from shoal.coordinator.core.workloads.cross_region_state import CrossRegionState
from shoal.coordinator.core.workloads.decide import decide, inputs_of
from shoal.coordinator.core.workloads.invariants import Promise
from shoal.coordinator.core.workloads.model import (
    NO_MIGRATIONS,
    DelegatedWorkload,
    DesiredContent,
    ReconcilerMemory,
    RegionState,
)
from shoal.coordinator.core.workloads.routes import gateways
from shoal.simulator.parts.hardware import Chip
from shoal.simulator.world.world import EPOCH
from shoal.types.agreement import GUEST_TENANT, GatewayRef, ServiceReport
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.device import Node, Reading, Role
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall, Watts
from shoal.types.workload import Intent, TradeRule, WorkloadKey

GATEWAY: Final = "gateway"
LOAD_S: Final = 0.5
LOOK_S: Final = 5.0
"""Interval at which to check whether delegated workloads fit locally again, as in the real controller."""


_NO_SIGNALS: Final[Mapping[SignalName, Signal]] = {}
_NOWHERE: Final = RegionFacts("")
_Place = tuple[Node, Chip | None, Receipt | None]


@dataclass(frozen=True, slots=True)
class RegionResources:
    """What a region has."""

    name: str
    residency: str
    # Node name -> its one chip.
    nodes: Mapping[str, Chip]
    # Node name -> USD/h.
    prices: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FixedCatalog(Catalog):
    """A catalog without documents: it returns the region facts and trade rules that it was made with."""

    region_facts: RegionFacts = _NOWHERE
    trade_rules: tuple[TradeRule, ...] = ()

    def trades(self, region: str) -> tuple[TradeRule, ...]:
        return self.trade_rules

    def facts(self, region: str, signals: Mapping[SignalName, Signal] = _NO_SIGNALS) -> RegionFacts:
        return self.region_facts


class RegionEngine:
    """The machines of one region and what runs on them; outlives its coordinator's processes."""

    def __init__(
        self,
        resources: RegionResources,
        clock: RegionClock,
        now_s: Callable[[], float],
        profiles: Mapping[str, ModelProfile],
        trade_rule: TradeRule,
    ) -> None:
        """clock: of the region, until its coordinator starts again. now_s: the world's time, whatever that machine's
        state.
        """
        self.resources = resources
        self._now_s = now_s
        self.clock = clock
        models = {name: ModelRecord(name, (), Wall(EPOCH), "", each) for name, each in profiles.items()}
        self.catalog = FixedCatalog(
            models=models, region_facts=RegionFacts(resources.name, resources.residency), trade_rules=(trade_rule,)
        )
        self._profiles = profiles
        self.revoked_gateways: tuple[str, ...] = ()
        self.applied_intents: tuple[Intent, ...] = ()
        """What the operators have applied."""
        self.guests: tuple[Guest, ...] = ()
        self.delegations: Mapping[WorkloadKey, DelegatedWorkload] = {}
        self.reservations: tuple[Reservation, ...] = ()
        self.plan: PlacementPlan = PlacementPlan((), "")
        self.gateway_report: Callable[[str], ServiceReport]
        """Agreement -> what the gateways measured of its requests."""
        self.step_lock = asyncio.Lock()
        self.wakeup = asyncio.Event()
        self.is_busy = False
        """True: a change is in progress here."""
        self._memory = ReconcilerMemory()
        self._stepped_at = clock.now()
        self._desired: Mapping[str, DesiredContent] = {}
        self._started: dict[str, float] = {}
        self._places: list[_Place] = [(_node(resources.name, GATEWAY, None), None, None)]
        for name, chip in self._chips():
            node = _node(resources.name, name, chip)
            self._places.append((node, chip, chip.receipt(node.name, chip.device, Wall(EPOCH), Seconds(1.0))))
        self._costs = {Slot(name, chip.device.name): UsdPerHour(resources.prices[name]) for name, chip in self._chips()}
        self._placement_cache: dict[WorkloadKey, tuple[float, bool]] = {}

    def restart(self, clock: RegionClock) -> None:
        """The coordinator's process restarts: replicas keep running, and desired sets are sent again. clock: of the new
        process; it goes on where the memory was written last, which a real region stores.
        """
        clock.resume(self._stepped_at)
        self.clock = clock
        self.guests, self.delegations, self.reservations = (), {}, ()
        self._placement_cache.clear()
        self.step_lock = asyncio.Lock()

    def step(self) -> None:
        """One step over everything, as in the real controller; its decisions take effect."""
        before = (self._memory, self._desired)
        self._stepped_at = self.clock.now()
        decision = decide(self._decision_inputs(), NO_MIGRATIONS, self._stepped_at, self.clock.wall())
        self.plan, self._memory, self._desired = decision.plan, decision.memory, decision.desired
        now = self._now_s()
        there = self.assignments()
        self._started = {each.id: self._started.get(each.id, now) for each in there}
        self.is_busy = before != (self._memory, self._desired) or not all(self._is_ready(each) for each in there)

    def assignments(self) -> tuple[Assignment, ...]:
        return tuple(each for content in self._desired.values() for each in content.assignments)

    def serves(self, workload: WorkloadKey) -> bool:
        """Whether a replica here answers."""
        return any(each.workload == workload and self._is_ready(each) for each in self.assignments())

    def memory_use(self) -> tuple[tuple[str, int, int], ...]:
        """Node -> (bytes held or in use, bytes in total)."""
        taken = dict.fromkeys(self.resources.nodes, 0)
        for node, content in self._desired.items():
            for each in content.assignments:
                taken[node] += each.memory_bytes
        for held in self._open_reservations():
            taken[held.slot.node] += held.memory_bytes
        return tuple((name, taken[name], chip.device.memory_bytes) for name, chip in self._chips())

    # what `controllers.federation.local_region.LocalRegion` asks for

    def intents(self) -> tuple[Intent, ...]:
        return self.applied_intents

    def profiles(self) -> Mapping[str, ModelProfile]:
        return self._profiles

    def placement(self, key: WorkloadKey) -> LocalPlacement:
        plan = self.plan.of(key)
        if plan is None:
            return LocalPlacement(is_placeable=True, serves=False)
        if plan.elsewhere:
            now = self.clock.now()
            at, placed = self._placement_cache.get(key, (now - LOOK_S, False))
            if now - at >= LOOK_S:
                placed = self._what_if(key, explain=False).refusal is None
                self._placement_cache[key] = (now, placed)
            return LocalPlacement(placed, serves=False)
        return LocalPlacement(plan.refusal is None, self.serves(key))

    def cross_region_state(self, key: WorkloadKey) -> CrossRegionState | None:
        return None

    def may_leave(self, intent: Intent) -> bool:
        return True

    def exclusions(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        return frozenset()

    @property
    def moves_live(self) -> bool:
        return False

    def figures(self, key: WorkloadKey) -> TermValues | None:
        return own_values(self._what_if(key, explain=True))

    def has_budget(self, key: WorkloadKey) -> bool:
        return False

    def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
        return None

    def gateways(self) -> tuple[GatewayRef, ...]:
        return gateways(self.fleet)

    def gateway_revocations(self) -> tuple[str, ...]:
        return self.revoked_gateways

    def service_report(self, agreement: str) -> ServiceReport:
        return self.gateway_report(agreement)

    # what `controllers.federation.delegate` needs of `controllers.workloads`

    def inputs(self) -> Inputs:
        return self.inputs_as_of_now()()

    def inputs_as_of_now(self) -> Callable[[], Inputs]:
        world, now, wall = self._decision_inputs(), self.clock.now(), self.clock.wall()
        return lambda: inputs_of(world, NO_MIGRATIONS, now, wall)

    def room(self) -> RoomMark:
        """Nodes here change by what they are to run alone."""
        return RoomMark({}, self._desired, self._open_reservations())

    def endpoints(self, key: WorkloadKey) -> int:
        table = self._memory.tables.get(str(key))
        return len(table.endpoints) if table is not None else 0

    def hosts(self, key: WorkloadKey) -> frozenset[str]:
        return frozenset(
            node for node, content in self._desired.items() if any(each.workload == key for each in content.assignments)
        )

    def adopt_guests(
        self, *, guests: tuple[Guest, ...], reservations: tuple[Reservation, ...], promises: tuple[Promise, ...]
    ) -> None:
        if (guests, reservations) != (self.guests, self.reservations):
            self.guests, self.reservations = guests, reservations
            self.wakeup.set()

    def adopt_delegations(self, delegations: Mapping[WorkloadKey, DelegatedWorkload]) -> None:
        if delegations != self.delegations:
            self.delegations = delegations
            self.wakeup.set()

    async def push_guest(self, region: str, size: int, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Does nothing: every model is everywhere."""
        raise AssertionError(digest)

    @property
    def fleet(self) -> Fleet:
        """Every node, as if it reported at this moment."""
        now, wall = self.clock.now(), self.clock.wall()
        return Fleet({place[0].name: self._state(*place, now, wall) for place in self._places}, ticked_at=now)

    def _decision_inputs(self) -> RegionState:
        return RegionState(
            region=self.catalog.region_facts,
            fleet=self.fleet,
            intents=(*self.applied_intents, *(guest.intent for guest in self.guests)),
            profiles=self._profiles,
            desired=self._desired,
            memory=self._memory,
            costs=self._costs,
            rtt_s={guest.intent.key.name: guest.rtt_s for guest in self.guests},
            delegations=self.delegations,
            reserved=self._open_reservations(),
        )

    def _open_reservations(self) -> tuple[Reservation, ...]:
        """Reservations without a replica: a replica of the agreement already takes its room."""
        placed = {each.workload for each in self.assignments()}
        return tuple(each for each in self.reservations if WorkloadKey(GUEST_TENANT, each.bid) not in placed)

    def _what_if(self, key: WorkloadKey, *, explain: bool) -> WorkloadPlan:
        """The plan of the workload if no other region ran it."""
        plan = place(self.inputs(), explain=(key,) if explain else False, as_if_local=(key,)).of(key)
        assert plan is not None
        return plan

    def _chips(self) -> list[tuple[str, Chip]]:
        return sorted(self.resources.nodes.items())

    def _is_ready(self, assignment: Assignment) -> bool:
        started = self._started.get(assignment.id)
        return started is not None and self._now_s() >= started + LOAD_S and not assignment.draining

    def _state(self, node: Node, chip: Chip | None, receipt: Receipt | None, now: Elapsed, wall: Wall) -> NodeState:
        content = self._desired.get(node.name, DesiredContent())
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
            has_full_status=True,
            observed={each.id: self._observe(each, wall) for each in content.assignments},
            readings=readings,
            receipts=receipts,
            front_ready=True,
        )

    def _observe(self, assignment: Assignment, wall: Wall) -> Observed:
        ready = self._is_ready(assignment) or assignment.draining
        phase = Phase.DRAINING if assignment.draining else Phase.READY if ready else Phase.LOADING
        return Observed(
            assignment=assignment.id,
            workload=assignment.workload,
            model=assignment.model,
            device=assignment.device,
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
        data_address=f"{name}.{region}:8001",
        metrics_address=f"{name}.{region}:9000",
        boot_id=name,
    )
