"""The one loop that decides what runs where.

A step computes from the stored state and the fleet as last reported. It commits what changed (desired sets with their
new generations, the reconciler's memory, the events) in one transaction, and only then sends. A lost message is
repaired: a session is sent its set when it opens, and again when the node reports another version.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import structlog

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.documents.publishers import verify_bundle
from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.identity.enrolment import CREDENTIALS
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Compute, Transition, inline
from shoal.coordinator.controllers.workloads.confirmed_limits import ConfirmedLimits
from shoal.coordinator.controllers.workloads.desired_sets import DESIRED, DIGESTS, LARGE, DesiredSetRecords
from shoal.coordinator.controllers.workloads.fetches import Fetches
from shoal.coordinator.controllers.workloads.last_plans import LastPlans
from shoal.coordinator.controllers.workloads.memory import TrialsByNode, load_memory, memory_writes
from shoal.coordinator.controllers.workloads.migrations import MigrationRepository, MigrationWrites
from shoal.coordinator.controllers.workloads.move_queue import MoveQueueRepository
from shoal.coordinator.controllers.workloads.node_marks import RoomMark
from shoal.coordinator.controllers.workloads.sender import DesiredSetSender
from shoal.coordinator.controllers.workloads.spending import SpendingMeter
from shoal.coordinator.controllers.workloads.transitions import RegionTransitions, RegionWrites
from shoal.coordinator.core.catalog.model import Catalog, Guest
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.fleet.updates import with_timing
from shoal.coordinator.core.migration.advance import AdvanceResult, advance, migration_effects
from shoal.coordinator.core.migration.budget import MoveHold
from shoal.coordinator.core.migration.model import AbortedState
from shoal.coordinator.core.migration.triggers.view import NO_TURNS, SCAN_S
from shoal.coordinator.core.negotiation.model import RegionAnswer
from shoal.coordinator.core.placement.costs import DeviceCosts
from shoal.coordinator.core.placement.model import (
    Inputs,
    PlacementPlan,
    Reservation,
    Signatures,
    Slot,
)
from shoal.coordinator.core.signals.model import Signal, SignalName
from shoal.coordinator.core.workloads.audit import differences
from shoal.coordinator.core.workloads.changed import difference
from shoal.coordinator.core.workloads.decide import NextPlacement, inputs_of, next_placement
from shoal.coordinator.core.workloads.entries import credentials_of
from shoal.coordinator.core.workloads.failures import excluded_places, with_retry
from shoal.coordinator.core.workloads.invariants import Promise, RegionSnapshot
from shoal.coordinator.core.workloads.kept import KeptDecisions, may_ask_for_moves
from shoal.coordinator.core.workloads.liveness_rules import LivenessRules
from shoal.coordinator.core.workloads.model import (
    Decision,
    DelegatedWorkload,
    DesiredContent,
    ReconcilerMemory,
    RegionEvent,
    RegionState,
    WorkloadWait,
)
from shoal.coordinator.core.workloads.pace import StepPace
from shoal.coordinator.core.workloads.replica_counts import WantedReplicas
from shoal.coordinator.core.workloads.routes import is_remote, local_replica_count
from shoal.coordinator.core.workloads.sleep import next_due
from shoal.coordinator.core.workloads.tenant_shares import NO_DEMAND, is_any_limited
from shoal.coordinator.ports import AgentLinks, Proofs
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Credential, DesiredSet, PeerTrust, Trust
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.units import Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, WorkloadKey

T = TypeVar("T")

log: Final = structlog.get_logger("shoal.coordinator")

FORGOTTEN_IDS: Final = 1_000_000
"""Ids skipped when a history begins: the restored store may lack assignments that were created with them."""
AUDITED_PER_STEP: Final = 4
"""Settled workloads that a step decides about again. A region at rest takes a step every 2 s, so that 10,000 workloads
take 84 minutes."""
AUDITED_PER_SEARCH: Final = 1
"""Nodes of which a search for a place checks what columns say, of the first few of a step."""
RECONNECT_S: Final = 5.0
"""All agents reconnect within this time (`reconnect_after` of the agent)."""


class WorkloadsController:
    """Owns desired sets, the reconciler's memory and the migrations; computes and commits each step. It also keeps the
    queue of moves, which no step reads."""

    def __init__(
        self,
        context: RegionContext,
        links: AgentLinks,
        fleet: FleetController,
        *,
        seed: int,
        on_change: Callable[[], None],
        signals: Callable[[Catalog], Mapping[SignalName, Signal]],
        proofs: Proofs,
        on_migration_end: Callable[[str], None],
        decide: Compute = inline,
    ) -> None:
        """seed: of every choice that placement leaves open. on_change: called when the next step should run at once.
        signals: current values under the documents of a catalog. on_migration_end: called with the id of each migration
        that ended. decide: where steps decide, one at a time.
        """
        self.catalog = Catalog()
        self.intents: tuple[Intent, ...] = ()
        self.signatures = Signatures()
        self.desired: dict[str, DesiredSet] = {}
        self.credentials: tuple[Credential, ...] = ()
        self.trust: Trust | None = None
        self.revoked_gateways: tuple[str, ...] = ()
        """Revoked serials of this region's gateways, which other regions must refuse too."""
        self.delegations: Mapping[WorkloadKey, DelegatedWorkload] = {}
        self.awarded: Mapping[WorkloadKey, UsdPerHour | None] = {}
        """As in Inputs."""
        self.last_refusals: Mapping[WorkloadKey, Refusal] = {}
        self.region_answers: Mapping[WorkloadKey, tuple[RegionAnswer, ...]] = {}
        """Why the last delegation attempt of each workload failed."""
        self.reservations: tuple[Reservation, ...] = ()
        self.peers: tuple[PeerTrust, ...] = ()
        self.promises: tuple[Promise, ...] = ()
        self.migrations = MigrationRepository()
        self.queue = MoveQueueRepository()
        self.fetches = Fetches(context.clock)
        self.waits: tuple[WorkloadWait, ...] = ()
        self.move_holds: tuple[MoveHold, ...] = ()
        """Moves that a trigger proposed and a hold prevents, by the last evaluation."""
        self._region = context.name
        self._store = context.store
        self._sender = DesiredSetSender(links, fleet, proofs, context.clock)
        self._spending = SpendingMeter(context.meter)
        self._fence = context.fence
        self._fleet = fleet
        self._clock = context.clock
        self._meter = context.meter
        self._seed = seed
        self._on_change = on_change
        self._on_migration_end = on_migration_end
        self._signals = signals
        self._hosts: Mapping[WorkloadKey, frozenset[str]] = {}
        self._awaited_until = Elapsed(0.0)
        self._demand = NO_DEMAND
        self._evaluate_at = Elapsed(0.0)
        self._evaluated_inputs: tuple[object, ...] = ()
        self._last_seen: tuple[Intent, ...] = ()
        self._movers: tuple[Intent, ...] = ()
        """Of these, the ones for which triggers may move replicas."""
        self._turns = NO_TURNS
        self._memory = ReconcilerMemory()
        self._saved = ReconcilerMemory()
        self._trials = TrialsByNode()
        self._written_at: dict[str, Elapsed] = {}
        self._kept = KeptDecisions(AUDITED_PER_STEP, AUDITED_PER_SEARCH)
        self._counts = WantedReplicas()
        self._liveness_rules = LivenessRules()
        self._pace = StepPace()
        self._contents: dict[str, DesiredContent] = {}
        """The content of each desired set."""
        self._confirmed_limits = ConfirmedLimits()
        self._old_sets: set[str] = set()
        """Nodes whose desired set may belong to an ended history."""
        self._changed_nodes: set[str] = set()
        """Nodes whose state is another than in the last step that was stored."""
        self._shared: _SharedParts | None = None
        """What all desired sets had in common in that step."""
        self._is_memory_old = False
        """True: the memory is stored as an earlier version did, and is written anew as a whole."""
        self._history = ""
        """The history for which `_old_sets` was found."""
        self._plans = LastPlans()
        self._records = DesiredSetRecords()
        self.auditor: Callable[[tuple[str, ...]], None] | None = None
        """Told in each step in what its decision differs from one from scratch; None: none is made from scratch."""
        self.transitions = RegionTransitions(context)
        self.step_lock = self.transitions.lock
        self._decide = decide
        self._deciding = asyncio.Lock()
        """Held while a step decides: what earlier steps decided changes under its hands."""

    async def start(self) -> None:
        """Call after the documents are adopted. Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        stored_sets = [await self._store.scan(each) for each in (DESIRED, DIGESTS, LARGE)]
        self.desired.update(self._records.load(*stored_sets))
        self._contents = {node: _content(desired) for node, desired in self.desired.items()}
        self._old_sets = set(self.desired)
        self._confirmed_limits.forget_all()
        self._kept.forget()
        self._shared = None
        self._written_at = dict.fromkeys(self.desired, self._clock.now())
        self.await_nodes()
        stored = await load_memory(self._store)
        self._memory = self._saved = stored.memory
        self._trials = TrialsByNode(stored.memory.measured)
        self._is_memory_old = stored.is_old
        await self.migrations.start(self._store)
        await self.queue.start(self._store)
        await self.load_credentials()

    def adopt(self, catalog: Catalog) -> None:
        """Takes over documents and models that are already stored. Only `adopt_guests` changes the guests."""
        guests = self.catalog.guests
        self.catalog = catalog if catalog.guests == guests else catalog.with_changes(guests=guests)
        self._count_replicas(None)
        self.signatures = self.catalog.signatures(self._region, verify_bundle)
        self._fleet.fleet = with_timing(self._fleet.fleet, self._liveness_rules.timing(self.intents), self._clock.now())
        self._on_change()

    def _count_replicas(self, changed: Iterable[str] | None) -> None:
        """Updates the intents. changed: nodes whose state may be another than before; None: all may be."""
        self.intents = self._counted(self.catalog, self._counts, changed)

    def _counted(
        self, catalog: Catalog, counts: WantedReplicas, changed: Iterable[str] | None = None
    ) -> tuple[Intent, ...]:
        facts, now, wall = catalog.facts(self._region, self._signals(catalog)), self._clock.now(), self._clock.wall()
        return counts.count(catalog.intents, self._fleet.decision_fleet, facts, catalog.profiles, now, wall, changed)

    def intent_of(self, key: WorkloadKey) -> Intent | None:
        """The intent of the current documents; None: they have no such workload."""
        return next((intent for intent in self.intents if intent.key == key), None)

    async def load_credentials(self) -> None:
        found = [codec.load(Credential, record.value) for record in await self._store.scan(CREDENTIALS)]
        self.credentials = tuple(found)
        self._on_change()

    def adopt_trust(self, trust: Trust, gateways: tuple[str, ...] = ()) -> None:
        """The roots and revoked serials for every node, from the next step on. gateways: revoked serials of this
        region's gateways.
        """
        self.revoked_gateways = gateways
        if trust != self.trust:
            self.trust = trust
            self._on_change()

    def adopt_delegations(
        self,
        *,
        delegations: Mapping[WorkloadKey, DelegatedWorkload] | None = None,
        awarded: Mapping[WorkloadKey, UsdPerHour | None] | None = None,
        reservations: tuple[Reservation, ...] | None = None,
        peers: tuple[PeerTrust, ...] | None = None,
    ) -> None:
        """From the next step on: workloads that other regions run, what these cost from their award on, capacity held
        for bids, and peers of the gateways. None: unchanged.
        """
        news = (
            self.delegations if delegations is None else dict(delegations),
            self.awarded if awarded is None else dict(awarded),
            self.reservations if reservations is None else reservations,
            self.peers if peers is None else peers,
        )
        if news != (self.delegations, self.awarded, self.reservations, self.peers):
            self.delegations, self.awarded, self.reservations, self.peers = news
            self._on_change()

    def adopt_guests(
        self, *, guests: tuple[Guest, ...], reservations: tuple[Reservation, ...], promises: tuple[Promise, ...]
    ) -> None:
        """Guest workloads and capacity held for other regions, from the next step on."""
        self.promises = promises
        self.adopt_delegations(reservations=reservations)
        if guests != self.catalog.guests:
            self.catalog = self.catalog.with_changes(guests=guests)
            self.adopt(self.catalog)

    def endpoints(self, key: WorkloadKey) -> int:
        """Number of this region's replicas in the workload's routes, on nodes that answer."""
        table = self._memory.tables.get(str(key))
        return local_replica_count(table.endpoints, self._fleet.fleet) if table is not None else 0

    def hosts(self, key: WorkloadKey) -> frozenset[str]:
        """Nodes that have replicas of a guest workload, by the last step."""
        return self._hosts.get(key, frozenset())

    @property
    def open_reservations(self) -> tuple[Reservation, ...]:
        """Reservations without a replica: an agreement whose replica is placed holds its capacity by that replica."""
        if not self.reservations:
            return ()
        placed = {each.workload for desired in self.desired.values() for each in desired.assignments}
        return tuple(each for each in self.reservations if WorkloadKey(GUEST_TENANT, each.bid) not in placed)

    @property
    def region(self) -> str:
        return self._region

    @property
    def fleet(self) -> Fleet:
        """The fleet as of now."""
        return self._fleet.fleet

    def routes_to_other_region(self, key: WorkloadKey) -> bool:
        """Whether requests may still be routed to another region."""
        table = self._memory.tables.get(str(key))
        return table is not None and any(is_remote(endpoint) and endpoint.weight > 0 for endpoint in table.endpoints)

    async def clear(self, name: str, actor: str) -> tuple[str, ...]:
        """Lets a model (by name or digest) be tried again that is poisoned or that a runtime refused to load; returns
        where.

        Raises ShoalError(MODEL_UNKNOWN | STORE_FULL | STORE_UNAVAILABLE).
        """
        digest = self.catalog.digest_of(name)
        if digest is None:
            raise refuse(Code.MODEL_UNKNOWN, f"no model {name!r:.80}", "a pushed model", "see `shoal model ls`")
        async with self.step_lock:
            cleared = await self.transitions.run(lambda: self._clear(digest, actor))
        if cleared:
            self._on_change()
        return cleared

    def _clear(self, digest: str, actor: str) -> Transition[RegionWrites, tuple[str, ...]]:
        places = tuple(f"{digest} on {each}" for each in excluded_places(self._memory, digest))
        if not places:
            return Transition(())
        memory = with_retry(self._memory, digest)
        event = LogEvent("MODEL_CLEARED", digest, "; ".join(places), actor)
        puts, _ = memory_writes(self._saved, memory, {}, ())
        writes = RegionWrites(puts, events=[event])
        return Transition(places, writes, lambda _: self.adopt_memory(memory))

    @property
    def memory(self) -> ReconcilerMemory:
        """What steps carry from one to the next, as it is stored."""
        return self._memory

    def adopt_memory(self, memory: ReconcilerMemory) -> None:
        """Takes over what a transition has stored. Call it under `step_lock`."""
        self._memory = self._saved = memory

    async def step(self) -> None:
        """One step. Raises ShoalError when the store takes no writes: then nothing was sent, and the next step tries
        again.
        """
        async with self.step_lock:
            if not self._awaits_nodes():
                await self.transitions.run_beside(self._begin_step, self._decide_beside)
                await self._sender.send(self.desired)
                if self._kept.has_to_learn(self._memory):
                    await self._clock.sleep(Seconds(0.0))  # heartbeats have their turn
                    await self._decide_beside(lambda: self._kept.learn(self._memory))

    async def _decide_beside(self, work: Callable[[], T]) -> T:
        async with self._deciding:
            return await self._decide(work)

    def prepare(self) -> None:
        """Does a small part of what decisions would wait for. Call it between two steps, again and again."""
        if not self.step_lock.locked():
            self._kept.prepare(self._memory)

    def await_nodes(self) -> None:
        """Gives nodes RECONNECT_S to report what they run before the next decision, while the newest desired sets
        belong to an ended history.
        """
        self._awaited_until = Elapsed(self._clock.now() + RECONNECT_S)

    def adopt_desired(self, desired: DesiredSet) -> None:
        """Adopts a desired set from a coordinator with a newer store. From the next step on its replicas count as
        decided here, where their workload and model are still known.
        """
        asked = {intent.key for intent in self.intents}
        kept = tuple(
            each for each in desired.assignments if each.workload in asked and each.model in self.catalog.profiles
        )
        self.desired[desired.node] = replace(desired, assignments=kept)
        self._contents[desired.node] = _content(self.desired[desired.node])
        self._confirmed_limits.forget(desired.node)
        self._old_sets.add(desired.node)
        self._kept.forget()

    def _awaits_nodes(self) -> bool:
        return self._is_first_of_history and self._clock.now() < self._awaited_until and not self._all_have_reported()

    @property
    def _is_first_of_history(self) -> bool:
        """Whether the next step is the first one of its history, and there was an earlier history."""
        history = self._fence.history
        if self._history != history:
            self._history, self._old_sets = history, set(self.desired)
        self._old_sets = {
            node for node in self._old_sets if node in self.desired and self.desired[node].version.history != history
        }
        return bool(self._old_sets)

    def _all_have_reported(self) -> bool:
        states = self._fleet.fleet.nodes.values()
        return all(state.revoked or (state.connected and state.sequence > 0) for state in states)

    def _begin_step(self) -> Callable[[], Transition[RegionWrites, None]]:
        """Reads what links and callers may change while the step decides."""
        began, wall = self._clock.now(), self._clock.wall()
        # A restored store may lack assignments that exist: skip their ids, or else an id would name two assignments.
        if self._is_first_of_history:
            self._memory = replace(self._memory, issued=self._memory.issued + FORGOTTEN_IDS)
        now = self._clock.now()
        self._spending.count_now_and_then(now)
        # To count, each node is looked at.
        is_limited = is_any_limited(self.catalog.quotas)
        self._demand = self._demand.observe(self._fleet.fleet, now) if is_limited else NO_DEMAND
        self._changed_nodes |= self._fleet.take_changed_nodes()
        self._count_replicas(self._changed_nodes)
        world = replace(self._world(self.catalog), changed_nodes=frozenset(self._changed_nodes))
        moment = _StepMoment(
            *(world, began, now, wall, self._should_evaluate_moves(world, now)),
            _SharedParts(
                tuple(each for each in self.credentials if each.expires_at > wall), self.trust, self._fence.history
            ),
        )
        return lambda: self._step(moment)

    def _step(self, moment: "_StepMoment") -> Transition[RegionWrites, None]:
        """Decides, beside the loop: what it reads besides the moment changes under the lock alone."""
        world, now, wall, shared = moment.world, moment.now, moment.wall, moment.shared
        advanced = advance(
            *(world, self.migrations.all, now, wall),
            run_triggers=moment.run_triggers,
            kept=self._kept,
            most_new=self._pace.most,
            turns=self._turns,
        )
        decision, written = advanced.decision, self.migrations.writes(advanced.changed)
        if self.auditor is not None:
            whole = advance(world, self.migrations.all, now, wall, run_triggers=False)
            self.auditor(differences(world, decision, whole.decision))
        looked_at = decision.desired if shared == self._shared else {**self._contents, **decision.desired}
        nodes, completed = world.fleet.nodes, self._records.find_complete(self.desired, looked_at)
        incomplete = self._records.incomplete - completed.keys()
        found = {node: _content(desired) for node, desired in completed.items()}
        changed = {
            node: self._next_set(node, content, told)
            for node, content in sorted(looked_at.items())
            if node in nodes
            for told in (shared.with_credentials_for(content),)
            if node in incomplete or not self._is_unchanged(node, found.get(node), content, told)
        }
        maybe_gone = self.desired if decision.is_whole else self._changed_nodes
        gone = tuple(node for node in maybe_gone if node in self.desired and node not in nodes)
        left = self._records.obsolete_keys(changed, completed, self.desired)
        puts, deletes = self._memory_writes(decision)
        writes = None
        if changed or gone or left or puts or deletes or decision.events or written.puts:
            sets = [self._writes_of(desired, decision) for desired in changed.values()]
            puts = {**{key: value for each in sets for key, value in each.items()}, **puts, **written.puts}
            events = [_event(happened) for happened in decision.events]
            of_gone = (key for node in gone for key in (DESIRED + node, *self._records.parts(node)))
            deletes = tuple(dict.fromkeys((*of_gone, *left, *deletes, *written.deletes)))
            writes = RegionWrites(puts, deletes, events, self.migrations.new_verdicts(advanced.changed))
        contents = {node: looked_at[node] for node in changed}
        if not decision.is_whole:
            self._pace = self._pace.after(len(decision.plan.workloads), Seconds(self._clock.now() - moment.began))

        def adopt(revision: int) -> None:
            self._shared = shared
            self.desired.update(completed)
            self._contents.update(found)
            self._adopt_step(world, advanced, written, changed, contents, gone, now)
            self._records.adopt((*completed, *changed), left)

        def settle() -> None:
            try:
                self._kept.adopt(world, migration_effects(world, self.migrations.all, now), decision, now)
            except Exception:  # the step is stored: memory follows it, and the next one decides about everything
                log.exception("task_failed", task="settle")
                self._kept.forget()

        return Transition(None, writes, adopt, settle)

    def _writes_of(self, desired: DesiredSet, decision: Decision) -> Mapping[str, bytes]:
        known = self.desired.get(desired.node)
        # The routes of a node that has nothing and subscribes to nothing follow from the tables alone.
        is_known = known is not None and not (
            known.assignments or desired.assignments or known.routes_on_demand or desired.routes_on_demand
        )
        return self._records.write(
            desired, known.version if known is not None else None, decision.rerouted if is_known else None
        )

    def _memory_writes(self, decision: Decision) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
        """Of what the reconciler remembers, in this step for the first time."""
        self._trials.add(decision.measured)
        nodes: Iterable[str] = {trial.node for trial in decision.measured}
        keys: Iterable[WorkloadKey] = decision.remembered
        if self._is_memory_old:
            nodes = {trial.node for trial in decision.memory.measured}
            keys = {WorkloadKey(*name.split("/", 1)) for name in decision.memory.tables}
            keys |= {one.workload for each in decision.desired.values() for one in each.assignments}
        held: dict[WorkloadKey, list[Assignment]] = {key: [] for key in keys}
        for content in decision.desired.values() if held else ():
            for one in content.assignments:
                if one.workload in held:
                    held[one.workload].append(one)
        before = ReconcilerMemory() if self._is_memory_old else self._saved
        return memory_writes(before, decision.memory, held, nodes, self._trials)

    def _adopt_step(
        self,
        world: RegionState,
        advanced: AdvanceResult,
        written: MigrationWrites,
        changed: Mapping[str, DesiredSet],
        contents: Mapping[str, DesiredContent],
        gone: tuple[str, ...],
        now: Elapsed,
    ) -> None:
        decision = advanced.decision
        self.adopt_memory(decision.memory)
        self._is_memory_old = False
        self._meter.add(metrics.DECISIONS, len(decision.plan.workloads) - decision.audited)
        self._meter.add(metrics.DECISIONS_AUDITED, decision.audited)
        self._meter.add(metrics.DECISIONS_REFUTED, len(decision.refuted))
        if decision.absurd:
            self._meter.add(metrics.MESSAGES_REFUSED, decision.absurd, code=Code.TELEMETRY_ABSURD)
        self._count(advanced)
        ended = self.migrations.newly_over(advanced.changed)
        self.migrations.adopt(advanced.changed, written)
        for each in ended:
            self._on_migration_end(each.id)
        self._turns = advanced.turns
        self.move_holds = advanced.move_holds if advanced.move_holds is not None else self.move_holds
        if advanced.changed or self._kept.has_late:
            self._on_change()  # the next step reads what they now need, and takes up more
        self.waits = decision.waits
        self._plans.adopt(decision, world.intents)
        self._spending.adopt(
            {node: (contents[node] if node in contents else self._contents.get(node)) for node in self._changed_nodes}
            | dict(contents),
            world.costs,
            self.delegations,
            now,
        )
        self._changed_nodes = set()
        self._contents.update(contents)
        self._confirmed_limits.on_change(self.desired, changed)
        self.desired.update(changed)
        self._old_sets.difference_update(changed)
        self._fleet.unsent.update(changed)
        self._written_at.update(dict.fromkeys(changed, self._clock.now()))
        for node in gone:
            self.desired.pop(node, None)
            self._contents.pop(node, None)
            self._confirmed_limits.forget(node)
            self._old_sets.discard(node)
            self._written_at.pop(node, None)
            self._records.forget(node)
        if self.catalog.guests or self._hosts:
            self._hosts = _guest_hosts(self._contents)

    def _should_evaluate_moves(self, world: RegionState, now: Elapsed) -> bool:
        """Whether to evaluate the triggers of moves that nobody requested: every SCAN_S, and at once when the documents
        of workloads that may ask for some, the region's price or its carbon changed.
        """
        if world.intents is not self._last_seen:
            new, gone = difference(self._last_seen, world.intents)
            if any(map(may_ask_for_moves, (*new, *gone))):
                self._movers = tuple(filter(may_ask_for_moves, world.intents))
            self._last_seen = world.intents
        seen = (self._movers, world.costs, repr(world.region.carbon_g_per_kwh))
        if now < self._evaluate_at and seen == self._evaluated_inputs:
            return False
        self._evaluate_at, self._evaluated_inputs = Elapsed(now + SCAN_S), seen
        return True

    def snapshot(self) -> RegionSnapshot:
        """The region after its last step, for `invariants.check`."""
        return RegionSnapshot(
            fleet=self._fleet.fleet,
            intents=self.intents,
            desired=dict(self._contents),
            memory=self._memory,
            waits=self.waits,
            now=self._clock.now(),
            wall=self._clock.wall(),
            placeable=frozenset(plan.workload for plan in self._plans.all() if plan.refusal is None),
            versions={node: desired.version for node, desired in self.desired.items()},
            written_at=dict(self._written_at),
            reserved=self.open_reservations,
            promises=self.promises,
            moves=self.migrations.underway,
            quotas=self.catalog.quotas,
        )

    def next_deadline(self) -> Seconds | None:
        """Time until the earliest wait ends, so that the loop steps again then; None: no wait has a deadline."""
        if self._awaits_nodes():
            return Seconds(self._awaited_until - self._clock.now())
        wall = self._clock.wall()
        ends = [end for wait in self.waits for end in (wait.retry_at, wait.gives_up_at) if end and end > wall]
        left = [Seconds(end - wall) for end in ends]
        now, after_s = self._clock.now(), self.catalog.facts(self._region).sleep_after_s
        due = (self.migrations.next_deadline(now), next_due(self._memory.idle, after_s, now))
        return min((*left, *(each for each in due if each is not None)), default=None)

    @property
    def has_backlog(self) -> bool:
        """Whether applied workloads wait for a step to take them up."""
        return self._kept.has_late

    @property
    def cost_rates(self) -> Mapping[tuple[WorkloadKey, str], UsdPerHour]:
        """USD/h by workload and by the region that runs it (empty: this one), by the last step."""
        return self._spending.rates

    @property
    def costs(self) -> Mapping[Slot, UsdPerHour]:
        return _device_costs(self._fleet.fleet, self._signals(self.catalog))

    @property
    def last_plan(self) -> PlacementPlan | None:
        """The plan of the last step; None before the first."""
        return self._plans.plan

    @property
    def last_intents(self) -> Mapping[WorkloadKey, Intent]:
        """The intents that `last_plan` was computed from; later documents are not in it."""
        return self._plans.intents

    def inputs(self, catalog: Catalog | None = None) -> Inputs:
        """The inputs of placement now, under the given catalog or the applied one."""
        return self.inputs_as_of_now(catalog)()

    def inputs_as_of_now(self, catalog: Catalog | None = None) -> Callable[[], Inputs]:
        """Computes `inputs` of this moment, which takes time that grows with the region. It reads nothing that changes
        afterwards, so it may run in a thread."""
        now, wall, migrations = self._clock.now(), self._clock.wall(), dict(self.migrations.all)
        world = self.region_state(catalog)
        return lambda: inputs_of(world, migration_effects(world, migrations, now), now, wall)

    def room(self) -> RoomMark:
        """What takes room of the region's nodes as of now."""
        return RoomMark(self._fleet.decision_fleet.nodes, dict(self._contents), self.open_reservations)

    async def next_placement(self, catalog: Catalog) -> NextPlacement:
        """What placement would be asked now under the given catalog. It waits for the decision of a step; while that is
        stored, it is as if the step had not begun. It also waits until one about everything is stored, after which
        little has to be asked."""
        async with self._deciding:
            pass
        if self._kept.is_deciding_whole:
            async with self.step_lock:
                pass
        now, world = self._clock.now(), self._world(catalog)
        changed = frozenset(self._changed_nodes | self._fleet.changed_nodes)
        world = replace(world, documents=catalog.number, changed_nodes=changed)
        return next_placement(
            world, migration_effects(world, self.migrations.all, now), now, self._clock.wall(), self._kept
        )

    def _count(self, advanced: AdvanceResult) -> None:
        for each in advanced.changed.values():
            before = self.migrations.all.get(each.id)
            if each.is_over and not (before is not None and before.is_over):
                code = each.state.refusal.code if isinstance(each.state, AbortedState) else ""
                self._meter.count(metrics.MIGRATIONS_ENDED, stage=each.stage, cause=each.cause, code=code)
        for held in advanced.new_holds:
            self._meter.count(metrics.MIGRATIONS_HELD, cause=held.proposal.cause, by=held.hold)

    def region_state(self, catalog: Catalog | None = None) -> RegionState:
        """What a step would decide from now, under the given catalog or the applied one."""
        catalog = catalog or self.catalog
        return replace(self._world(catalog), desired=dict(self._contents), documents=catalog.number)

    def _world(self, catalog: Catalog) -> RegionState:
        """As `region_state`, for one step: without the list of documents, and with what this controller goes on to
        change."""
        fleet = self._fleet.decision_fleet
        intents = self.intents if catalog is self.catalog else self._counted(catalog, self._counts.for_others())
        signals = self._signals(catalog)
        return RegionState(
            region=catalog.facts(self._region, signals),
            fleet=fleet,
            live=self._fleet.fleet,
            intents=intents,
            profiles=catalog.profiles,
            desired=self._contents,
            memory=self._memory,
            quotas=catalog.quotas,
            costs=_device_costs(fleet, signals),
            seed=self._seed,
            signatures=self.signatures if catalog is self.catalog else catalog.signatures(self._region, verify_bundle),
            delegations=self.delegations,
            awarded=self.awarded,
            reserved=self.open_reservations,
            rtt_s=catalog.rtt_s,
            peers=self.peers,
            last_refusals=self.last_refusals,
            fetches=self.fetches.all,
            fetches_counted_since=self.fetches.since,
            references=catalog.references,
            demands=self._demand.demands,
            confirmed=self._confirmed_limits.nodes(fleet, self.desired),
        )

    def _next_set(self, node: str, content: DesiredContent, told: "_SharedParts") -> DesiredSet:
        known = self.desired.get(node)
        generation = known.version.generation + 1 if known is not None else 1
        return DesiredSet(
            node,
            self._fence.version(generation),
            content.assignments,
            content.routes,
            content.pins,
            told.credentials,
            content.heartbeat_s,
            told.trust,
            content.peers,
            asleep=content.asleep,
            forwarding=content.forwarding,
            tenants=content.tenants,
            routes_on_demand=content.routes_on_demand,
        )

    def _is_unchanged(
        self, node: str, completed: DesiredContent | None, content: DesiredContent, told: "_SharedParts"
    ) -> bool:
        """completed: the content before, where it was not known until now."""
        known = self.desired.get(node)
        return (
            known is not None
            and (completed or self._contents[node]) == content
            and told == _SharedParts(known.credentials, known.trust, known.version.history)
        )


@dataclass(frozen=True, slots=True)
class _SharedParts:
    """What desired sets have of the region as a whole."""

    # Of all tenants, or of those whose clients may call the node.
    credentials: tuple[Credential, ...]
    # Roots and revoked serials; None: not known yet.
    trust: Trust | None
    # Of the versions of sets.
    history: str

    def with_credentials_for(self, content: DesiredContent) -> "_SharedParts":
        """What the node of this content is told: the same where all tenants may call it, or none has a key."""
        found = credentials_of(content, self.credentials)
        return self if found == self.credentials else replace(self, credentials=found)


@dataclass(frozen=True, slots=True)
class _StepMoment:
    """What a step decides from that others may change while it does."""

    # Nothing in it changes any more, apart from what changes under the lock alone.
    world: RegionState
    # When the step began.
    began: Elapsed
    # As of when it decides.
    now: Elapsed
    # The same by the calendar.
    wall: Wall
    # Whether moves that nobody requested are looked for.
    run_triggers: bool
    # For all sets.
    shared: _SharedParts


def _device_costs(fleet: Fleet, signals: Mapping[SignalName, Signal]) -> DeviceCosts:
    signal = signals.get(SignalName.PRICE)
    return DeviceCosts(fleet.nodes, UsdPerHour(signal.value) if signal is not None else None)


def _guest_hosts(desired: Mapping[str, DesiredContent]) -> Mapping[WorkloadKey, frozenset[str]]:
    found = dict[WorkloadKey, frozenset[str]]()
    for node, content in desired.items():
        for each in content.assignments:
            if each.workload.tenant == GUEST_TENANT:
                found[each.workload] = found.get(each.workload, frozenset()) | {node}
    return found


def _content(desired: DesiredSet) -> DesiredContent:
    return DesiredContent(
        desired.assignments,
        desired.routes,
        desired.pins,
        desired.heartbeat_s,
        desired.peers,
        desired.asleep,
        desired.forwarding,
        desired.tenants,
        desired.routes_on_demand,
    )


def _event(happened: RegionEvent) -> LogEvent:
    return LogEvent(happened.code, happened.subject, happened.message, node=happened.node, workload=happened.workload)
