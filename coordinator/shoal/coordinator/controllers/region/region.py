"""One region's controllers, wired together. `main` and the simulator build it from ports only.

Every method runs on one event loop: no threads, no clock and no randomness but the ports'. A restart resumes from the
store; nothing else is kept.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from shoal.coordinator import metrics
from shoal.coordinator.controllers.documents.models import ModelsController
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.bids import load_guests
from shoal.coordinator.controllers.federation.delegate import DelegateController
from shoal.coordinator.controllers.federation.ledger import Ledger
from shoal.coordinator.controllers.federation.local_region import LocalRegionAdapter
from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.fleet.measuring import MeasuringController
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.log.region_clock import RegionClock
from shoal.coordinator.controllers.queries.logs import NodeLogs
from shoal.coordinator.controllers.queries.timeline import TimelineController
from shoal.coordinator.controllers.queries.traces import TracesController
from shoal.coordinator.controllers.region.signals import SignalsController
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.controllers.workloads.apply import DocumentsController
from shoal.coordinator.controllers.workloads.measurements import MeasurementsController
from shoal.coordinator.controllers.workloads.moves_api import MovesController
from shoal.coordinator.controllers.workloads.placement_queries import PlacementQueries
from shoal.coordinator.controllers.workloads.queued_moves import QueuedMovesController
from shoal.coordinator.controllers.workloads.restored_store import NoProofs, RestoredStoreDetector
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.negotiation.hold import DEFAULTS, HoldTerms
from shoal.coordinator.core.negotiation.peering import merge_peers
from shoal.coordinator.core.signals.model import SignalName, SignalReading
from shoal.coordinator.ports import (
    AgentLinks,
    Blobs,
    Clock,
    FederationLink,
    IdSource,
    Inspector,
    Meter,
    PeerRegions,
    Proofs,
    Signals,
    SpanExporter,
    StaleRevision,
    Store,
)
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import LogLines, SpansFound
from shoal.types.metric import CounterMetric
from shoal.types.offer import Directory
from shoal.types.trace import Span
from shoal.types.units import Elapsed, Seconds

TICK_S: Final = Seconds(0.25)
STEP_S: Final = Seconds(2.0)
RETRY_S: Final = Seconds(1.0)
DRAIN_S: Final = Seconds(10.0)
"""How long one `drain` call lasts: a region whose leave was abandoned trades again after this."""
IDLE_FACTOR: Final = 3
"""After a step that took t, wait min(3t, tick_s). In a reconnect storm every hello requests a step; this caps stepping
at a quarter of the processor. While applied workloads wait for a step to take them up, the next one begins at once:
steps decide beside the loop, so that links have their turns anyway."""

T = TypeVar("T")

log: Final = structlog.get_logger("shoal.coordinator")


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """Settings of one region."""

    # The region's name.
    name: str
    # Interval at which liveness is updated.
    tick_s: Seconds = TICK_S
    # Longest time between two steps; a change requests a step at once.
    step_s: Seconds = STEP_S
    # Seed of every choice that placement leaves open.
    seed: int = 0
    # Event log entries kept; the oldest are dropped first.
    events_kept: int = 10_000
    # Audit log entries kept; the oldest are dropped first.
    audit_kept: int = 100_000
    # Terms of holds and leases for other regions.
    terms: HoldTerms = DEFAULTS


class NoMeter:
    """Counts nothing, but takes only what may be counted."""

    def count(self, metric: CounterMetric, **labels: str) -> None:
        metric.series(**labels)

    def add(self, metric: CounterMetric, amount: float, **labels: str) -> None:
        metric.series(**labels)


class NoSpanExporter:
    """Exports nothing."""

    is_enabled = False

    def export(self, spans: Sequence[Span]) -> None:
        pass


class NoSignals:
    """Reads no feed: only constants and operators' overrides have values."""

    async def read(self, name: SignalName, source: str) -> tuple[SignalReading, ...]:
        raise refuse(Code.SOURCE_DENIED, f"{source:.120}", "a constant", "this coordinator reads no feeds")


class RegionalCoordinator:
    """The regional coordinator behind its ports. `fleet` implements ports.LinkEvents: pass it to the link adapter."""

    def __init__(
        self,
        store: Store,
        links: AgentLinks,
        blobs: Blobs,
        inspector: Inspector,
        clock: Clock,
        ids: IdSource,
        config: RegionConfig,
        *,
        meter: Meter | None = None,
        restore_reason: Refusal | None = None,
        signals: Signals | None = None,
        proofs: Proofs | None = None,
        exporter: SpanExporter | None = None,
        compute: Compute = inline,
        decide: Compute = inline,
        thread_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """restore_reason: why the store is older than what was acknowledged; opens a new history. proofs: let nodes
        prove that the store is an undetected old copy; without them it stays undetected. exporter: receives the spans
        of finished migrations and negotiations. compute: where long computations run that nobody waits for.
        thread_time: seconds of processor time of the thread that asks, by which these computations are paced. decide:
        where the region's steps decide, one at a time.
        """
        self.config = config
        self.restore_reason = restore_reason
        self._store = store
        self._ids = ids
        meter = meter or NoMeter()
        self.clock = clock = RegionClock(clock)
        """Of all times that this region's controllers hold and store."""
        self._meter = meter
        self._thread_time = thread_time
        self._decide_beside = decide
        self._dirty = asyncio.Event()
        self._stopping = False
        self.events = EventLog(store, clock, kept=config.events_kept, audit_kept=config.audit_kept)
        self.fence = RegionFence(config.name, store, self.events, clock, ids, meter)
        self.context = context = RegionContext(config.name, store, self.events, clock, ids, meter, self.fence)
        """What this region's controllers have in common."""
        proofs = proofs or NoProofs()
        self.fleet = FleetController(
            context,
            links,
            self._dirty.set,
            before_hello=lambda hello: self._restored_store.check_hello(hello),
            on_answer=self._on_answer,
        )
        self.events.stand_in = lambda node: self.fleet.fleet.stand_in(node)
        self.logs = NodeLogs(links, clock)
        self.measuring = MeasuringController(links, clock)
        self.signals = SignalsController(
            context,
            signals or NoSignals(),
            lambda: self.workloads.catalog,
            on_change=self._dirty.set,
        )
        self.workloads = WorkloadsController(
            context,
            links,
            self.fleet,
            seed=config.seed,
            on_change=self._dirty.set,
            signals=self.signals.current,
            proofs=proofs,
            on_migration_end=lambda migration: self.traces.on_end(migration),
            decide=inline if decide is inline else self._decide,  # inline, nothing is heard meanwhile
        )
        self.documents = DocumentsController(context, self.workloads, self.signals.current)
        self.placement = PlacementQueries(self.workloads, clock)
        self.ledger = Ledger(store, self.fence, clock)
        self.traces = TracesController(
            context,
            links,
            self.ledger,
            exporter or NoSpanExporter(),
            migrations=lambda: self.workloads.migrations.all,
            nodes=lambda: {name: each.protocol for name, each in self.fleet.fleet.nodes.items() if each.connected},
            delegate=lambda: self.delegate,
        )
        self.timeline = TimelineController(context, self.workloads, self.fleet, self._carbon)
        self.moves = MovesController(self.workloads, self.placement, self.fleet, context, self._dirty.set)
        self.measurements = MeasurementsController(self.workloads, context, self._dirty.set)
        self.queued_moves = QueuedMovesController(
            self.workloads, self.placement, self.moves, context, compute, thread_time
        )
        self._restored_store = RestoredStoreDetector(self.fence, self.fleet, self.workloads, proofs, meter)
        self.models = ModelsController(context, blobs, inspector, lambda: self.workloads.catalog, self.workloads.adopt)
        self._directory: Callable[[], Directory | None] = lambda: None
        self.origin: OriginController | None = None
        """Workloads that others run for this region; None until `federate`."""
        self.delegate: DelegateController | None = None
        """Workloads that this region runs for others (ports.PeerEvents); None until `federate`."""
        self.store_refusal: Refusal | None = None
        """Why the last step could not be committed; None if it was."""

    async def start(self, *, elected: bool = False) -> None:
        """Reads the store and opens (or resumes) the history. Call once, before any link is served.

        elected: this coordinator just won an election among several. Its term is written first, so that nobody else
        changes what is read after that. Raises ShoalError(STATE_CORRUPT | REGION_MISMATCH | STORE_FULL |
        STORE_UNAVAILABLE), StaleRevision when another one was elected meanwhile.
        """
        await self.fence.start(elected=elected)
        await self.events.start()
        if not self.fence.history:
            await self.fence.open_history("the region's first start")
        elif self.restore_reason is not None:
            await self.fence.open_history(str(self.restore_reason))
        elif elected:
            await self.events.write(LogEvent("LEADER_ELECTED", self.config.name, f"term {self.fence.term}"))
        await self._read()
        self.workloads.adopt_guests(guests=(), reservations=(), promises=())  # `federate` loads those of the leader
        await self.timeline.start()

    async def follow(self) -> None:
        """Loads the stored state for reading only; called again whenever the store changed. Raises ShoalError."""
        await self.fence.start()
        await self.events.start()
        await self._read()
        guests = await load_guests(self._store, self.config.name)
        self.workloads.adopt_guests(guests=guests, reservations=(), promises=())

    @property
    def leadership_loss(self) -> asyncio.Event:
        """Set once another coordinator was found to lead: this one can no longer write."""
        return self.events.leadership_loss

    @property
    def write_refusal(self) -> Refusal | None:
        """Why the store takes no writes; None if the last write succeeded."""
        return self.store_refusal or self.events.refusal

    async def _read(self) -> None:
        await self.fleet.start()
        await self.models.start()
        await self.documents.start()
        await self.workloads.start()
        await self.signals.start()
        await self.ledger.start()

    async def federate(
        self,
        peers: PeerRegions,
        *,
        federation: FederationLink | None,
        directory: Callable[[], Directory | None],
        rtt: Callable[[], Mapping[str, Seconds]],
        compute: Compute = inline,
    ) -> None:
        """Enables trading with the regions of `directory`, where documents allow it. Call after `start` and before
        `run`; without it nothing is delegated, and nothing is run for others. compute: where bids for others are
        computed, each of which takes as long as a plan of the region.

        Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE).
        """
        self._directory = directory
        access = FederationAccess(peers, federation, directory, rtt)
        self.origin = OriginController(
            self.context,
            self.ledger,
            LocalRegionAdapter(self.workloads, self.fleet, self.clock),
            access,
            on_change=self._adopt_delegations,
            on_end=self.traces.on_end,
        )
        self.delegate = DelegateController(
            self.context,
            self.ledger,
            self.workloads,
            self.models,
            access,
            origin=self.origin,
            on_change=self._adopt_delegations,
            terms=self.config.terms,
            compute=compute,
            thread_time=self._thread_time,
        )
        await self.origin.start()
        await self.delegate.start()

    def drain(self) -> int:
        """For the next `DRAIN_S` no agreement begins, and existing ones end in good order. Returns how many are left:
        call it again until there are none.
        """
        if self.origin is None or self.delegate is None:
            return 0
        until = Elapsed(self.clock.now() + DRAIN_S)
        for side in (self.origin, self.delegate):
            side.drain(until)
        self._dirty.set()
        return self.origin.open_count + self.delegate.open_count

    @property
    def regions(self) -> frozenset[str]:
        """This region and the members of its federation; empty where it is in none."""
        directory = self._directory()
        return frozenset((self.config.name, *(each.region for each in directory.members))) if directory else frozenset()

    @property
    def peer_heads(self) -> Mapping[str, str]:
        """By counterpart, the digest of this region's ledger that it was last shown, by its own advertisement."""
        directory = self._directory()
        told = [each.advertisement for each in directory.members if each.advertisement] if directory is not None else []
        return {each.region: each.heads.get(self.config.name, "") for each in told}

    async def run(self) -> None:
        """Ticks and steps until stopped."""
        self._dirty.set()
        step_at = self.clock.now()
        while not self._stopping:
            began = self.clock.now()
            await self.fleet.tick()
            if self._dirty.is_set() or began >= step_at:
                self._dirty.clear()
                await self._step()
                deadline = self.workloads.next_deadline() or self.config.step_s
                step_at = Elapsed(self.clock.now() + min(deadline, self.config.step_s))
            self.workloads.prepare()
            replicas = ((node, one) for node, each in self.workloads.desired.items() for one in each.assignments)
            await self.queued_moves.tick()
            await self.measuring.tick(self.fleet.fleet, self.workloads.intents, replicas)
            if self.origin is not None and self.delegate is not None:
                await self.origin.tick()
                await self.delegate.tick()
            await self._export_traces()
            with suppress(ShoalError, StaleRevision):  # the next write says what the store says
                await self.fence.save_clock()
            took = self.clock.now() - began
            idle_s = 0.0 if self.workloads.has_backlog else min(IDLE_FACTOR * took, self.config.tick_s)
            await self.clock.sleep(Seconds(idle_s))
            await self._wait()

    def stop(self) -> None:
        """Ends `run` at its next iteration. Nothing needs saving, because everything is committed before it takes
        effect.
        """
        self._stopping = True
        self._dirty.set()
        if self.origin is not None and self.delegate is not None:
            self.origin.stop()
            self.delegate.stop()

    def _on_answer(self, node: str, answer: LogLines | SpansFound) -> None:
        if isinstance(answer, LogLines):
            self.logs.on_answer(node, answer)
        else:
            self.traces.on_answer(node, answer)

    def _carbon(self) -> float:
        """Of the region now, g/kWh; NaN where nobody says."""
        signal = self.signals.current().get(SignalName.CARBON)
        return signal.value if signal is not None else math.nan

    def _adopt_delegations(self) -> None:
        if self.origin is not None and self.delegate is not None:
            peers = merge_peers(self.origin.peers, self.delegate.peers)
            self.workloads.adopt_delegations(
                delegations=self.origin.delegations, awarded=self.origin.awarded_prices, peers=peers
            )

    async def _step(self) -> None:
        if self.origin is not None:
            self.workloads.last_refusals = self.origin.last_refusals
            self.workloads.region_answers = self.origin.region_answers
        try:
            await self.workloads.step()
            self.store_refusal = None
        except Exception as error:  # an unforeseen one is logged: the loop does what else is to be done
            if isinstance(error, ShoalError):
                self.store_refusal = error.refusal
            elif not isinstance(error, StaleRevision):
                log.exception("task_failed", task="step")
            self._meter.count(metrics.STEPS_FAILED)
            self._dirty.set()
            await self.clock.sleep(RETRY_S)

    async def _decide(self, work: Callable[[], T]) -> T:
        """Runs what a step decides beside the loop. Meanwhile heartbeats are heard, so silence is judged, too: a pause
        between two ticks is taken for one in which nothing was heard."""
        deciding = asyncio.ensure_future(self._decide_beside(work))
        try:
            while not (await asyncio.wait({deciding}, timeout=self.config.tick_s))[0]:
                await self.fleet.tick()
        finally:
            await asyncio.wait({deciding})
        return deciding.result()

    async def _export_traces(self) -> None:
        try:
            await self.traces.export()
        except ShoalError:
            self._meter.count(metrics.TRACE_EXPORTS_FAILED)

    async def _wait(self) -> None:
        """Waits for the next tick, or until a step is requested."""
        await wait_or_timeout(self._dirty, self.config.tick_s, self.clock)
