"""One region's controllers, joined. `main` and the simulator build it from ports, and only from ports.

Every method is a coroutine on one event loop: no threads, no clock but the port's, no chance but the port's. What a
restart finds is what the store holds; nothing else is remembered.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.bids import BidsController, stored_guests
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.controllers.fleet import FleetController
from shoal.coordinator.controllers.home import RegionHome
from shoal.coordinator.controllers.ledger import Ledger
from shoal.coordinator.controllers.logs import NodeLogs
from shoal.coordinator.controllers.models import ModelsController
from shoal.coordinator.controllers.moving import MovingController
from shoal.coordinator.controllers.past import NoProofs, Past
from shoal.coordinator.controllers.signals import SignalsController
from shoal.coordinator.controllers.traces import TracesController
from shoal.coordinator.controllers.trades import TradesController
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.core.negotiation.hold import DEFAULTS, Terms
from shoal.coordinator.core.negotiation.peering import united
from shoal.coordinator.core.signals.model import Reading, SignalName
from shoal.coordinator.ports import (
    AgentLinks,
    Blobs,
    Clock,
    FederationLink,
    Ids,
    Inspector,
    Meter,
    Peers,
    Proofs,
    Signals,
    StaleRevision,
    Store,
    Traces,
)
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import LogLines, SpansFound
from shoal.types.offer import Directory, member_of
from shoal.types.trace import Span
from shoal.types.units import Elapsed, Seconds

TICK_S: Final = Seconds(0.25)
STEP_S: Final = Seconds(2.0)
RETRY_S: Final = Seconds(1.0)
DRAIN_S: Final = Seconds(10.0)
"""A region that is to leave its federation trades again where nobody has asked it for so long to end what it has."""
REST: Final = 3
"""Times as long as a look took, but at most `tick_s`, there is no other: in a large region a herd of hellos, each of
which is a reason to look, leaves three quarters of the time to those who say hello."""


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """name: the region's. seed: of every choice that placement leaves open.

    tick_s: how often silence is judged. step_s: at most so long between two looks at everything; what happens is acted
    on at once. events_kept, audit_kept: entries, the oldest go first. terms: of what it runs for other regions.
    """

    name: str
    tick_s: Seconds = TICK_S
    step_s: Seconds = STEP_S
    seed: int = 0
    events_kept: int = 10_000
    audit_kept: int = 100_000
    terms: Terms = DEFAULTS


class NoMeter:
    """Counts nothing."""

    def count(self, name: str, **labels: str) -> None:
        pass

    def add(self, name: str, amount: float, **labels: str) -> None:
        pass


class NoTraces:
    """Nobody collects them."""

    wanted = False

    def told(self, spans: Sequence[Span]) -> None:
        pass


class NoSignals:
    """Reads no feed: constants and an operator's word are all there is."""

    async def read(self, name: SignalName, source: str) -> tuple[Reading, ...]:
        raise refuse(Code.SOURCE_DENIED, f"{source:.120}", "a constant", "this coordinator reads no feeds")


class Region:
    """The regional coordinator behind its ports. fleet implements ports.LinkEvents: give it to the link adapter."""

    def __init__(
        self,
        store: Store,
        links: AgentLinks,
        blobs: Blobs,
        inspector: Inspector,
        clock: Clock,
        ids: Ids,
        config: RegionConfig,
        *,
        meter: Meter | None = None,
        restored: Refusal | None = None,
        signals: Signals | None = None,
        proofs: Proofs | None = None,
        traces: Traces | None = None,
    ) -> None:
        """restored: why the store is a copy that is older than what was acknowledged; opens a new history. proofs: by
        which nodes can show that it is where nobody knows; without them it is never found out. traces: who is told of
        migrations and negotiations that are over."""
        self.config = config
        self.restored = restored
        self._store = store
        self._ids = ids
        meter = meter or NoMeter()
        self._clock = clock
        self._meter = meter
        self._dirty = asyncio.Event()
        self._stopping = False
        self.events = EventLog(store, clock, kept=config.events_kept, audit_kept=config.audit_kept)
        self.truth = Truth(config.name, store, self.events, ids, meter)
        proofs = proofs or NoProofs()
        self.fleet = FleetController(
            store,
            links,
            self.truth,
            clock,
            meter,
            self._dirty.set,
            greeted=lambda hello: self._past.greeted(hello),
            answered=self._answered,
        )
        self.logs = NodeLogs(links, clock)
        self.signals = SignalsController(
            config.name,
            store,
            self.truth,
            clock,
            meter,
            signals or NoSignals(),
            lambda: self.workloads.catalog,
            changed=self._dirty.set,
        )
        self.workloads = WorkloadsController(
            config.name,
            store,
            links,
            self.truth,
            self.fleet,
            clock,
            meter,
            seed=config.seed,
            changed=self._dirty.set,
            signals=self.signals.now,
            proofs=proofs,
            ended=lambda migration: self.traces.ended(migration),
        )
        self.ledger = Ledger(store, self.truth, clock)
        self.traces = TracesController(
            config.name,
            links,
            clock,
            self.events,
            self.ledger,
            traces or NoTraces(),
            migrations=lambda: self.workloads.migrations.all,
            nodes=lambda: {name: each.protocol for name, each in self.fleet.fleet.nodes.items() if each.connected},
            bids=lambda: self.bids,
        )
        self.moving = MovingController(self.workloads, self.fleet, self.truth, clock, ids, self._dirty.set)
        self._past = Past(self.truth, self.fleet, self.workloads, proofs, meter)
        self.models = ModelsController(
            store,
            self.truth,
            blobs,
            inspector,
            clock,
            lambda: self.workloads.catalog,
            self.workloads.adopt,
            region=config.name,
        )
        self._directory: Callable[[], Directory | None] = lambda: None
        self.trades: TradesController | None = None
        """What others run for this region; None until `federate`."""
        self.bids: BidsController | None = None
        """What this region runs for others: what the peers' adapter calls (ports.PeerEvents)."""
        self.store_refusal: Refusal | None = None
        """Why the last step could not be written; None when it could."""

    async def start(self, *, elected: bool = False) -> None:
        """Reads the store and opens (or resumes) the history. Call once, before any link is served.

        elected: among several coordinators, of which this one leads now. Its term comes first: what is read after that
        nobody else changes. Raises ShoalError(STATE_CORRUPT | REGION_MISMATCH | STORE_FULL | STORE_UNAVAILABLE),
        StaleRevision when yet another one was elected meanwhile.
        """
        await self.truth.start(elected=elected)
        await self.events.start()
        if not self.truth.history:
            await self.truth.open_history("the region's first start")
        elif self.restored is not None:
            await self.truth.open_history(str(self.restored))
        elif elected:
            await self.events.write(Event("LEADER_ELECTED", self.config.name, f"term {self.truth.term}"))
        await self._read()
        self.workloads.adopt_bids(guests=(), reserved=(), promises=())  # `federate` knows of which it leads

    async def follow(self) -> None:
        """What the store holds now, for reading alone; again whenever it has changed. Raises ShoalError."""
        await self.truth.start()
        await self.events.start()
        await self._read()
        guests = await stored_guests(self._store, self.config.name)
        self.workloads.adopt_bids(guests=guests, reserved=(), promises=())

    @property
    def deposed(self) -> asyncio.Event:
        """Set once another coordinator was found to lead: this one can write nothing any more."""
        return self.events.deposed

    @property
    def unwritable(self) -> Refusal | None:
        """Why the store takes no writes; None as far as is known that it does."""
        return self.store_refusal or self.events.refusal

    async def _read(self) -> None:
        await self.fleet.start()
        await self.models.start()
        await self.workloads.start()
        await self.signals.start()
        await self.ledger.start()

    async def federate(
        self,
        peers: Peers,
        *,
        federation: FederationLink | None,
        directory: Callable[[], Directory | None],
        rtt: Callable[[], Mapping[str, Seconds]],
    ) -> None:
        """From now on this region trades with those of `directory`, where its documents say so. Call after `start` and
        before `run`; without it nothing is delegated, and nothing is run for others.

        Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        self._directory = directory
        self.trades = TradesController(
            self.config.name,
            self._store,
            self.ledger,
            RegionHome(self.workloads, self.fleet, self._clock),
            peers,
            self._clock,
            self._ids,
            self._meter,
            federation=federation,
            directory=directory,
            rtt=rtt,
            changed=self._adopt_trades,
            ended=self.traces.ended,
        )
        self.bids = BidsController(
            self.config.name,
            self._store,
            self.ledger,
            self.workloads,
            self.models,
            lambda: self.fleet.fleet,
            self._clock,
            self._ids,
            self._meter,
            peers=peers,
            origin=self.trades,
            listed=lambda region: member_of(directory(), region),
            changed=self._adopt_trades,
            terms=self.config.terms,
        )
        await self.trades.start()
        await self.bids.start()

    def drain(self) -> int:
        """For the next `DRAIN_S` no agreement begins, and those that are end in good order. How many are left: call it
        again until there is none."""
        if self.trades is None or self.bids is None:
            return 0
        until = Elapsed(self._clock.now() + DRAIN_S)
        for side in (self.trades, self.bids):
            side.drain(until)
        self._dirty.set()
        return self.trades.owed + self.bids.owed

    @property
    def regions(self) -> frozenset[str]:
        """This one and those that it knows, where it is in a federation."""
        directory = self._directory()
        return frozenset((self.config.name, *(each.region for each in directory.members))) if directory else frozenset()

    @property
    def heads_shown(self) -> Mapping[str, str]:
        """By counterpart, the digest of this region's ledger that it says it was shown last."""
        directory = self._directory()
        told = [each.advertisement for each in directory.members if each.advertisement] if directory is not None else []
        return {each.region: each.heads.get(self.config.name, "") for each in told}

    async def run(self) -> None:
        """Judges silence and steps, until stopped."""
        self._dirty.set()
        step_at = self._clock.now()
        while not self._stopping:
            began = self._clock.now()
            await self.fleet.tick()
            if self._dirty.is_set() or began >= step_at:
                self._dirty.clear()
                await self._step()
                deadline = self.workloads.next_deadline() or self.config.step_s
                step_at = Elapsed(self._clock.now() + min(deadline, self.config.step_s))
            if self.trades is not None and self.bids is not None:
                await self.trades.tick()
                await self.bids.tick()
            await self._tell_traces()
            took = self._clock.now() - began
            await self._clock.sleep(Seconds(min(REST * took, self.config.tick_s)))
            await self._wait()

    def stop(self) -> None:
        """Ends `run` at its next look; nothing needs saving, since everything was saved before it was done."""
        self._stopping = True
        self._dirty.set()
        if self.trades is not None and self.bids is not None:
            self.trades.stop()
            self.bids.stop()

    def _answered(self, node: str, answer: LogLines | SpansFound) -> None:
        if isinstance(answer, LogLines):
            self.logs.answered(node, answer)
        else:
            self.traces.answered(node, answer)

    def _adopt_trades(self) -> None:
        if self.trades is not None and self.bids is not None:
            peers = united(self.trades.peers, self.bids.peers)
            self.workloads.adopt_trades(delegated=self.trades.delegated, peers=peers)

    async def _step(self) -> None:
        if self.trades is not None:
            self.workloads.turned = self.trades.turned
        try:
            await self.workloads.step()
            self.store_refusal = None
        except (ShoalError, StaleRevision) as error:
            if isinstance(error, ShoalError):
                self.store_refusal = error.refusal
            self._meter.count("steps_failed")
            self._dirty.set()
            await self._clock.sleep(RETRY_S)

    async def _tell_traces(self) -> None:
        try:
            await self.traces.tell()
        except ShoalError:
            self._meter.count("traces_not_told")

    async def _wait(self) -> None:
        """For the next tick, or until something happens."""
        ticking = asyncio.ensure_future(self._clock.sleep(self.config.tick_s))
        happening = asyncio.ensure_future(self._dirty.wait())
        try:
            await asyncio.wait({ticking, happening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ticking.cancel()
            happening.cancel()
