"""Documents in, desired sets out: the one loop that decides what runs where.

A step computes everything from the store's truth and the fleet as heard, commits what changed (desired sets with their
new generations, the reconciler's memory, the events) in one transaction, and only then sends. A send that is lost is
repaired: a session is sent its set when it opens, and again when the node says that it holds another.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator.controllers import records, revisions
from shoal.coordinator.controllers.catalog import (
    DOCUMENTS,
    Catalog,
    DocumentChange,
    DocumentKey,
    Guest,
    Proposal,
    Provenance,
    StoredDocument,
    propose,
    without,
)
from shoal.coordinator.controllers.enrolment import CREDENTIALS
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.fetches import Fetches
from shoal.coordinator.controllers.fleet import FleetController
from shoal.coordinator.controllers.memory import StoredMemory
from shoal.coordinator.controllers.migrations import Migrations, verdict_digest
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.fleet.updates import retimed
from shoal.coordinator.core.migration.advance import Advanced, advance, moving, view
from shoal.coordinator.core.migration.budget import Held, holds_at_home
from shoal.coordinator.core.migration.crossing import courses_of
from shoal.coordinator.core.migration.model import Aborted, Cause, Migration, Place
from shoal.coordinator.core.migration.model import Proposal as MoveProposal
from shoal.coordinator.core.migration.triggers.view import LOOK_S
from shoal.coordinator.core.migration.unmoved import unmoved
from shoal.coordinator.core.placement.model import Aim, Inputs, Plan, Reservation, Signatures, Slot, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.signals.model import Signal, SignalName
from shoal.coordinator.core.workloads.decide import inputs_of, timing
from shoal.coordinator.core.workloads.invariants import Promise, Snapshot
from shoal.coordinator.core.workloads.model import Content, Course, Delegated, Happened, Memory, Wait, World
from shoal.coordinator.core.workloads.routes import at_home, is_abroad
from shoal.coordinator.core.workloads.sleep import next_due
from shoal.coordinator.core.workloads.spending import rates
from shoal.coordinator.core.workloads.trouble import cleared, poisoned
from shoal.coordinator.ports import AgentLinks, Clock, Meter, Proofs, StaleRevision, Store
from shoal.policies import Problem, node_price
from shoal.types.agreement import GUESTS
from shoal.types.assignment import Credential, DesiredSet, PeerTrust, Trust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.migration import Recording
from shoal.types.units import Elapsed, Seconds, UsdPerHour
from shoal.types.workload import DelegationMode, Intent, WorkloadKey
from shoal.wire.identity import uri_of

DESIRED: Final = "desired/"
MEMORY: Final = "memory"
RESEND_BEATS: Final = 3
"""A node that still reports another version this many beats after it was sent one is sent it again."""
PLANS_KEPT: Final = 32
FORGOTTEN: Final = 1_000_000
"""Assignments that may have been created and are not remembered, when a history begins: their ids stay theirs."""
RETURN_S: Final = 5.0
"""All agents have called again within this (`reconnect_after` of the agent)."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What applying would do. problems: then there is neither plan nor hash. signals: as the plan reads them."""

    proposal: Proposal
    plan: Plan | None
    signals: Mapping[SignalName, Signal] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.proposal.problems

    @property
    def documents(self) -> tuple[DocumentChange, ...]:
        return self.proposal.changes


@dataclass(frozen=True, slots=True)
class Applied:
    """stale: the decisions that differ from the plan whose hash was given; then nothing was applied."""

    planned: Planned
    stale: tuple[str, ...]
    revision: int


class WorkloadsController:
    def __init__(
        self,
        region: str,
        store: Store,
        links: AgentLinks,
        truth: Truth,
        fleet: FleetController,
        clock: Clock,
        meter: Meter,
        *,
        seed: int,
        changed: Callable[[], None],
        signals: Callable[[Catalog], Mapping[SignalName, Signal]],
        proofs: Proofs,
        ended: Callable[[str], None],
    ) -> None:
        """seed: of every choice that placement leaves open. changed: called when the next step should come at once.
        signals: as they are now under the documents of a catalog. ended: a migration did."""
        self.catalog = Catalog()
        self.intents: tuple[Intent, ...] = ()
        self.signatures = Signatures()
        self.desired: dict[str, DesiredSet] = {}
        self.credentials: tuple[Credential, ...] = ()
        self.trust: Trust | None = None
        self.revoked_gateways: tuple[str, ...] = ()
        """Serials of this region's gateways, which other regions shall refuse too."""
        self.delegated: Mapping[WorkloadKey, Delegated] = {}
        self.turned: Mapping[WorkloadKey, Refusal] = {}
        """Why the last trade of a workload came to nothing."""
        self.reserved: tuple[Reservation, ...] = ()
        self.peers: tuple[PeerTrust, ...] = ()
        self.promises: tuple[Promise, ...] = ()
        self.migrations = Migrations()
        self.fetches = Fetches(clock)
        self.waits: tuple[Wait, ...] = ()
        self.held: tuple[Held, ...] = ()
        """What speaks for moves that do not begin, by the last look."""
        self.plan_now: Plan | None = None
        """Of the last step."""
        self.decided: Mapping[WorkloadKey, Intent] = {}
        """What `plan_now` is of: documents that came since are not in it."""
        self._region = region
        self._store = store
        self._links = links
        self._truth = truth
        self._fleet = fleet
        self._clock = clock
        self._meter = meter
        self._seed = seed
        self._changed = changed
        self._ended = ended
        self._signals = signals
        self._hosts: Mapping[WorkloadKey, frozenset[str]] = {}
        self._proofs = proofs
        self._awaited_until = Elapsed(0.0)
        self._look_at = Elapsed(0.0)
        self._rates: Mapping[tuple[WorkloadKey, str], UsdPerHour] = {}
        self._rated_at = Elapsed(0.0)
        self._looked: tuple[object, ...] = ()
        self._memory = Memory()
        self._saved = Memory()
        self._revisions: dict[str, int] = {}
        self._sent_at: dict[str, Elapsed] = {}
        self._written_at: dict[str, Elapsed] = {}
        self._plans: dict[str, tuple[str, ...]] = {}
        self.stepping = asyncio.Lock()
        """Held while what is remembered is computed and written; who promises room of the region's holds it too."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE): also where a document is of a newer version."""
        documents = {}
        for record in await self._store.scan(DOCUMENTS):
            stored = records.load(StoredDocument, record.value)
            try:
                _ = stored.value
            except ShoalError as cause:
                raise records.unreadable(f"{stored.kind} {stored.name}", str(cause)) from cause
            documents[stored.key] = stored
            self._revisions[record.key] = record.revision
        self.adopt(replace(self.catalog, documents=documents))
        for record in await self._store.scan(DESIRED):
            self.desired[record.key.removeprefix(DESIRED)] = records.load(DesiredSet, record.value)
        self._written_at = dict.fromkeys(self.desired, self._clock.now())
        self.await_nodes()
        found = await self._store.read(MEMORY)
        if found is not None:
            self._memory = self._saved = records.load(StoredMemory, found.value).restored(self._clock.now())
        await self.migrations.start(self._store, self._clock.now(), self._clock.wall())
        await self.load_credentials()

    def adopt(self, catalog: Catalog) -> None:
        """The new truth about documents and models, already in the store. Guests are told by `adopt_bids` alone."""
        self.catalog = replace(catalog, guests=self.catalog.guests)
        self.intents = self.catalog.intents
        self.signatures = self.catalog.signatures(self._region)
        self._fleet.fleet = retimed(self._fleet.fleet, timing(self.intents), self._clock.now())
        self._changed()

    async def load_credentials(self) -> None:
        found = [records.load(Credential, record.value) for record in await self._store.scan(CREDENTIALS)]
        self.credentials = tuple(found)
        self._changed()

    def adopt_trust(self, trust: Trust, gateways: tuple[str, ...] = ()) -> None:
        """Whom every node shall believe, from the next step on. gateways: revoked serials of theirs."""
        self.revoked_gateways = gateways
        if trust != self.trust:
            self.trust = trust
            self._changed()

    def adopt_trades(
        self,
        *,
        delegated: Mapping[WorkloadKey, Delegated] | None = None,
        reserved: tuple[Reservation, ...] | None = None,
        peers: tuple[PeerTrust, ...] | None = None,
    ) -> None:
        """What this region has others run, what it holds for bids, and whom its gateways may meet, from the next step
        on. None: as it is."""
        news = (
            self.delegated if delegated is None else dict(delegated),
            self.reserved if reserved is None else reserved,
            self.peers if peers is None else peers,
        )
        if news != (self.delegated, self.reserved, self.peers):
            self.delegated, self.reserved, self.peers = news
            self._changed()

    def adopt_bids(
        self, *, guests: tuple[Guest, ...], reserved: tuple[Reservation, ...], promises: tuple[Promise, ...]
    ) -> None:
        """What other regions have run here and what is held for them, from the next step on."""
        self.promises = promises
        self.adopt_trades(reserved=reserved)
        if guests != self.catalog.guests:
            self.catalog = replace(self.catalog, guests=guests)
            self.adopt(self.catalog)

    def endpoints(self, key: WorkloadKey) -> int:
        """Replicas of this region that requests for a workload are sent to."""
        table = self._memory.tables.get(str(key))
        return at_home(table.endpoints) if table is not None else 0

    def hosts(self, key: WorkloadKey) -> frozenset[str]:
        """Nodes that have, by the last step, replicas of what another region has run here."""
        return self._hosts.get(key, frozenset())

    @property
    def kept_room(self) -> tuple[Reservation, ...]:
        """What is reserved and not taken up: an agreement with a replica has its room by that."""
        if not self.reserved:
            return ()
        placed = {each.workload for desired in self.desired.values() for each in desired.assignments}
        return tuple(each for each in self.reserved if WorkloadKey(GUESTS, each.bid) not in placed)

    def serves_at_home(self, key: WorkloadKey) -> bool:
        """Whether all that its plan wants here is in the routes, and no other region."""
        plan = self.plan_now.of(key) if self.plan_now is not None else None
        return plan is not None and not self.leads_abroad(key) and self.endpoints(key) >= plan.wanted > 0

    @property
    def region(self) -> str:
        return self._region

    def course(self, key: WorkloadKey) -> Course | None:
        """Of a workload between this region and another."""
        crossing = [each for each in self.migrations.all.values() if each.crosses and each.workload == key]
        return courses_of(crossing, self._clock.now()).get(key) if crossing else None

    def may_leave(self, intent: Intent) -> bool:
        """Whether a workload may go to a region that is only better now."""
        now, wall = self._clock.now(), self._clock.wall()
        return holds_at_home(intent.key, intent.migration, self.migrations.all.values(), now, wall) is None

    def leads_abroad(self, key: WorkloadKey) -> bool:
        """Whether requests may still go to another region."""
        table = self._memory.tables.get(str(key))
        return table is not None and any(is_abroad(endpoint) and endpoint.weight > 0 for endpoint in table.endpoints)

    def provenance(self, node: str, assignment: str, model: str) -> Provenance:
        """Of what this replica answers, where it was asked to record that: all by the coordinator's own knowledge.

        Raises ShoalError(ROLE_DENIED)."""
        desired, state = self.desired.get(node), self._fleet.fleet.nodes.get(node)
        for one in desired.assignments if desired is not None else ():
            asked, device = one.verification, state.device(one.device) if state is not None else None
            if (one.id, one.model) == (assignment, model) and asked and asked.recording is Recording.HERE:
                return Provenance(
                    model, asked.pack, one.workload, one.id, node, one.device, one.provider,
                    device.runtime_version if device is not None else "", one.precision, self._clock.wall(),
                )  # fmt: skip
        raise refuse(
            Code.ROLE_DENIED, f"{node} was not asked to record {model!r:.80} by {assignment!r:.80}",
            "the replica that the coordinator chose", "it is judged by what another recorded",
        )  # fmt: skip

    def plan(
        self, texts: Sequence[tuple[str, str]], digests: Mapping[str, str], actor: str, *, back: bool = False
    ) -> Planned:
        """What applying would do; changes nothing. No texts: what would change now. back: by a rollback."""
        proposal = self.proposed(texts, digests, actor, back=back)
        if proposal.problems:
            return Planned(proposal, None)
        plan = self.explained(proposal.catalog)
        self._remember(plan)
        return Planned(proposal, plan, self._signals(proposal.catalog))

    def proposed(
        self,
        texts: Sequence[tuple[str, str]],
        digests: Mapping[str, str] | None = None,
        actor: str = "",
        *,
        back: bool = False,
    ) -> Proposal:
        """Documents laid over those that hold; changes nothing."""
        wall = self._clock.wall()
        return propose(self.catalog, texts, digests or {}, region=self._region, actor=actor, wall=wall, back=back)

    async def apply(
        self,
        texts: Sequence[tuple[str, str]],
        digests: Mapping[str, str],
        plan_hash: str,
        actor: str,
        *,
        back: bool = False,
    ) -> Applied:
        """back: by a rollback. Raises ShoalError(CONFLICT | STORE_FULL | STORE_UNAVAILABLE)."""
        async with self._truth.changing:
            return await self._apply(texts, digests, plan_hash, actor, back=back)

    async def delete(self, key: DocumentKey, actor: str) -> int:
        """Raises ShoalError(NOT_FOUND | WORKLOAD_UNKNOWN | IN_USE | CONFLICT)."""
        async with self._truth.changing:
            left = without(self.catalog, key)
            event = Event("DELETED", f"{key.kind} {key.name}", "", actor, "", _workload_of(key))
            kept = revisions.all_of(self.catalog.documents[key])
            revision = await self._commit_documents({}, (key.stored_at, *kept), (key,), [event])
            self.adopt(left)
            return revision

    async def clear(self, name: str, actor: str) -> tuple[str, ...]:
        """Lets a poisoned model (by name or digest) be tried again; says where.

        Raises ShoalError(MODEL_UNKNOWN | STORE_FULL | STORE_UNAVAILABLE)."""
        digest = self.catalog.digest_of(name)
        if digest is None:
            raise refuse(Code.MODEL_UNKNOWN, f"model {name!r:.80}", "a pushed model", "see `shoal model ls`")
        async with self.stepping:
            held = tuple(
                " on ".join((each.model, f"{each.provider} {each.runtime_version}"))
                for each in sorted(poisoned(self._memory.crashes))
                if each.model == digest
            )
            if not held:
                return ()
            memory = replace(self._memory, crashes=cleared(self._memory.crashes, digest))
            puts = {MEMORY: records.dump(StoredMemory(self._clock.now(), memory))}
            await self._truth.commit(puts, events=[Event("MODEL_CLEARED", digest, "; ".join(held), actor)])
            self._memory = self._saved = memory
        self._changed()
        return held

    async def step(self) -> None:
        """Raises ShoalError when the store takes nothing: nothing was sent then, and the next step tries again."""
        async with self.stepping:
            if not self._awaits_nodes():
                await self._step()

    def await_nodes(self) -> None:
        """From now on, while what nodes were told last is of a history that has ended, they have a while to show what
        they run before anything is decided anew."""
        self._awaited_until = Elapsed(self._clock.now() + RETURN_S)

    def adopt_told(self, told: DesiredSet) -> None:
        """What a node was told by a coordinator that knew more than this store: its replicas count, from the next step
        on, as if they had been decided here, where their workload and their model are still known."""
        asked = {intent.key for intent in self.intents}
        kept = tuple(
            each for each in told.assignments if each.workload in asked and each.model in self.catalog.profiles
        )
        self.desired[told.node] = replace(told, assignments=kept)

    def _awaits_nodes(self) -> bool:
        return self._is_first and self._clock.now() < self._awaited_until and not self._all_are_back()

    @property
    def _is_first(self) -> bool:
        """Whether the next step is the first one of its history, and there was one before."""
        return any(desired.version.history != self._truth.history for desired in self.desired.values())

    def _all_are_back(self) -> bool:
        states = self._fleet.fleet.nodes.values()
        return all(state.revoked or (state.connected and state.sequence > 0) for state in states)

    async def _step(self) -> None:
        wall = self._clock.wall()
        if self._is_first:
            self._memory = replace(self._memory, issued=self._memory.issued + FORGOTTEN)
        now = self._clock.now()
        self._spend(now)
        world = self._world(self.catalog)
        advanced = advance(world, self.migrations.all, now, wall, look=self._looks(world, now))
        decision, written = advanced.decision, self.migrations.written(advanced.changed, now)
        credentials = tuple(each for each in self.credentials if each.expires_at > wall)
        changed = {
            node: self._next_set(node, content, credentials)
            for node, content in sorted(decision.desired.items())
            if not self._is(node, content, credentials)
        }
        gone = tuple(node for node in self.desired if node not in decision.desired)
        if changed or gone or decision.memory != self._saved or decision.events or written.puts:
            puts = {**{DESIRED + node: records.dump(desired) for node, desired in changed.items()}, **written.puts}
            if decision.memory != self._saved:
                puts[MEMORY] = records.dump(StoredMemory(self._clock.now(), decision.memory))
            events = [_event(happened) for happened in decision.events]
            deletes = (*(DESIRED + node for node in gone), *written.deletes)
            await self._attest(self.migrations.judged(advanced.changed))
            await self._truth.commit(puts, deletes=deletes, events=events)
        self._memory = self._saved = decision.memory
        self._count(advanced)
        ended = self.migrations.ended(advanced.changed)
        self.migrations.adopt(advanced.changed, written)
        for each in ended:
            self._ended(each.id)
        self.held = advanced.held if advanced.held is not None else self.held
        if advanced.changed:
            self._changed()  # what they ask of the region now, the next step reads
        self.waits, self.plan_now = decision.waits, decision.plan
        self.decided = {intent.key: intent for intent in world.intents}
        self._hosts = _guests_hosts(decision.desired)
        self.desired.update(changed)
        self._written_at.update(dict.fromkeys(changed, self._clock.now()))
        for node in gone:
            del self.desired[node]
            self._written_at.pop(node, None)
        runs = {node: each.assignments for node, each in self.desired.items()}
        self._rates = rates(runs, world.costs, self.delegated)
        for node in self._to_send(frozenset(changed)):
            self._sent_at[node] = self._clock.now()
            self._fleet.unsent.discard(node)
            desired = self.desired[node]
            await self._links.send(node, replace(desired, proof=self._proofs.of(desired)))

    def _spend(self, now: Elapsed) -> None:
        """What the time since the last step has cost, as that left things."""
        hours = (now - self._rated_at) / 3600
        self._rated_at = now
        for (workload, region), rate in self._rates.items():
            named = {"tenant": workload.tenant, "workload": workload.name, "counterpart": region}
            self._meter.add("cost_usd", rate * hours, **named)

    def _looks(self, world: World, now: Elapsed) -> bool:
        """Whether it is time to look for moves that nobody asked for: every so often, and at once where documents or
        the region's price and carbon are others."""
        seen = (world.intents, world.costs, repr(world.region.carbon_g_per_kwh))
        if now < self._look_at and seen == self._looked:
            return False
        self._look_at, self._looked = Elapsed(now + LOOK_S), seen
        return True

    def snapshot(self) -> Snapshot:
        """The region after its last step, for `invariants.check`."""
        plans = self.plan_now.workloads if self.plan_now is not None else ()
        return Snapshot(
            fleet=self._fleet.fleet,
            intents=self.intents,
            desired={node: _content(desired) for node, desired in self.desired.items()},
            memory=self._memory,
            waits=self.waits,
            now=self._clock.now(),
            wall=self._clock.wall(),
            placeable=frozenset(plan.workload for plan in plans if plan.refusal is None),
            versions={node: desired.version for node, desired in self.desired.items()},
            written_at=dict(self._written_at),
            reserved=self.kept_room,
            promises=self.promises,
            moves=self.migrations.underway,
        )

    def next_deadline(self) -> Seconds | None:
        """Until the earliest wait ends, so that the loop can look again then."""
        if self._awaits_nodes():
            return Seconds(self._awaited_until - self._clock.now())
        wall = self._clock.wall()
        ends = [end for wait in self.waits for end in (wait.retry_at, wait.gives_up_at) if end and end > wall]
        left = [Seconds(end - wall) for end in ends]
        now, after_s = self._clock.now(), self.catalog.facts(self._region).sleep_after_s
        due = (self.migrations.next_deadline(now), next_due(self._memory.idle, after_s, now))
        return min((*left, *(each for each in due if each is not None)), default=None)

    @property
    def costs(self) -> dict[Slot, UsdPerHour]:
        return self._costs(self._signals(self.catalog))

    def _costs(self, signals: Mapping[SignalName, Signal]) -> dict[Slot, UsdPerHour]:
        """A node's price counts for each of its devices; absent where it is unknown."""
        signal = signals.get(SignalName.PRICE)
        region_price = UsdPerHour(signal.value) if signal is not None else None
        return {
            Slot(name, device.name): price
            for name, state in self._fleet.fleet.nodes.items()
            if (price := node_price(state.node.labels, region_price)) is not None
            for device in state.node.devices
        }

    def inputs(self, catalog: Catalog | None = None) -> Inputs:
        """What placement looks at now; under other documents, where a catalog is given."""
        return self._inputs(catalog or self.catalog)

    def explained(self, catalog: Catalog | None = None) -> Plan:
        """The plan as it would be computed now, with every candidate."""
        return place(self.inputs(catalog))

    def explain(self, key: WorkloadKey) -> WorkloadPlan:
        """Raises ShoalError(WORKLOAD_UNKNOWN)."""
        plan = self.explained().of(key)
        if plan is None:
            raise refuse(Code.WORKLOAD_UNKNOWN, str(key), "an applied workload", "see `shoal get workloads`")
        return plan

    def unmoved(self, key: WorkloadKey) -> tuple[Held, ...]:
        """Why the workload's replicas stay where they are, and the workload at home."""
        now, wall = self._clock.now(), self._clock.wall()
        found = unmoved(view(self._world(self.catalog), self.migrations.all, now, wall, key), self.held, key)
        return (*found, *self._held_at_home(key))

    def _held_at_home(self, key: WorkloadKey) -> tuple[Held, ...]:
        """What keeps it from being offered to other regions, where its policy gives it to any that is better."""
        intent = next((intent for intent in self.intents if intent.key == key), None)
        held = [(node, one) for node, each in self.desired.items() for one in each.assignments if one.workload == key]
        better = intent is not None and intent.delegation.mode is DelegationMode.WHEN_BETTER
        if intent is None or not better or not held or key in self.delegated:
            return ()
        now, wall = self._clock.now(), self._clock.wall()
        found = holds_at_home(key, intent.migration, self.migrations.all.values(), now, wall)
        node, one = held[0]
        place = Place(one.id, node, one.device, one.model, one.precision)
        asked = MoveProposal(key, place, Aim(), Cause.COST, "to another region that is better")
        return (Held(asked, *found),) if found is not None else ()

    async def _apply(
        self, texts: Sequence[tuple[str, str]], digests: Mapping[str, str], plan_hash: str, actor: str, *, back: bool
    ) -> Applied:
        before = self._plans.get(plan_hash)
        planned = self.plan(texts, digests, actor, back=back)
        if planned.plan is None:
            return Applied(planned, (), 0)
        if plan_hash and plan_hash != planned.plan.hash:
            return Applied(planned, _differences(before, _decisions(planned.plan)), 0)
        documents = planned.proposal.catalog.documents
        keys = planned.proposal.changed
        if not keys:
            return Applied(planned, (), 0)
        events = [
            Event(
                "APPLIED", f"{key.kind} {key.name}", f"revision {documents[key].revision}", actor, "", _workload_of(key)
            )
            for key in keys
        ]
        held = self.catalog.documents
        left = revisions.outgoing([held[key] for key in keys if key in held])
        puts = {**{key.stored_at: records.dump(documents[key]) for key in keys}, **left.puts}
        revision = await self._commit_documents(puts, left.deletes, keys, events)
        self.adopt(planned.proposal.catalog)
        return Applied(planned, (), revision)

    def _inputs(self, catalog: Catalog) -> Inputs:
        now = self._clock.now()
        return inputs_of(moving(self._world(catalog), self.migrations.all, now), now, self._clock.wall())

    async def _attest(self, judged: Sequence[Migration]) -> None:
        """What verifications came to, into the audit log before anything acts on it: twice after a crash in between,
        never not at all. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        for each in judged:
            if each.verdict is not None and each.target is not None:
                actor = uri_of(self._region, Role.AGENT, each.target.node)
                came = "passed" if each.verdict.passed else str(each.verdict.code or Code.VERIFY_FAILED)
                await self._truth.attest(actor, "Verify", each.id, f"{came} sha256:{verdict_digest(each.verdict)}")

    def _count(self, advanced: Advanced) -> None:
        for each in advanced.changed.values():
            before = self.migrations.all.get(each.id)
            if each.is_over and not (before is not None and before.is_over):
                code = each.state.refusal.code if isinstance(each.state, Aborted) else ""
                self._meter.count("migrations_ended", stage=each.stage, cause=each.cause, code=code)
        for held in advanced.news:
            self._meter.count("migrations_held", cause=held.proposal.cause, by=held.hold)

    def _world(self, catalog: Catalog) -> World:
        intents = self.intents if catalog is self.catalog else catalog.intents
        signals = self._signals(catalog)
        return World(
            region=catalog.facts(self._region, signals),
            fleet=self._fleet.fleet,
            intents=intents,
            profiles=catalog.profiles,
            desired={node: _content(desired) for node, desired in self.desired.items()},
            memory=self._memory,
            quotas=catalog.quotas,
            costs=self._costs(signals),
            documents=catalog.refs,
            seed=self._seed,
            signatures=self.signatures if catalog is self.catalog else catalog.signatures(self._region),
            delegated=self.delegated,
            reserved=self.kept_room,
            rtt_s=catalog.rtt_s,
            peers=self.peers,
            turned=self.turned,
            fetched=self.fetches.all,
            counted_since=self.fetches.since,
            references=catalog.references,
        )

    def _next_set(self, node: str, content: Content, credentials: tuple[Credential, ...]) -> DesiredSet:
        known = self.desired.get(node)
        generation = known.version.generation + 1 if known is not None else 1
        return DesiredSet(
            node,
            self._truth.version(generation),
            content.assignments,
            content.routes,
            content.pins,
            credentials,
            content.heartbeat_s,
            self.trust,
            content.peers,
            asleep=content.asleep,
        )

    def _is(self, node: str, content: Content, credentials: tuple[Credential, ...]) -> bool:
        known = self.desired.get(node)
        return known is not None and (
            _content(known) == content
            and known.credentials == credentials
            and known.version.history == self._truth.history
            and known.trust == self.trust
        )

    def _to_send(self, changed: frozenset[str]) -> list[str]:
        """Connected nodes that have shown what they run and may hold another set than theirs."""
        found = []
        for name, state in sorted(self._fleet.fleet.nodes.items()):
            if name in self.desired and state.connected and state.sequence > 0:
                new = name in changed or name in self._fleet.unsent
                if new or self._is_behind(name, state):
                    found.append(name)
        return found

    def _is_behind(self, node: str, state: NodeState) -> bool:
        patience = RESEND_BEATS * self._fleet.fleet.timing.heartbeat_s
        sent_at = self._sent_at.get(node)
        return state.version != self.desired[node].version and (
            sent_at is None or self._clock.now() - sent_at >= patience
        )

    async def _commit_documents(
        self, puts: Mapping[str, bytes], deletes: tuple[str, ...], keys: Sequence[DocumentKey], events: list[Event]
    ) -> int:
        expect = {key.stored_at: self._revisions.get(key.stored_at, 0) for key in keys}
        try:
            revision = await self._truth.commit(puts, deletes=deletes, expect=expect, events=events)
        except StaleRevision as cause:
            raise refuse(
                Code.CONFLICT, f"{cause} changed meanwhile", "documents as they were planned", "plan again, then apply"
            ) from cause
        for stored_at in expect:
            if stored_at in puts:
                self._revisions[stored_at] = revision
            else:
                self._revisions.pop(stored_at, None)
        return revision

    def _remember(self, plan: Plan) -> None:
        self._plans.pop(plan.hash, None)
        self._plans[plan.hash] = _decisions(plan)
        while len(self._plans) > PLANS_KEPT:
            del self._plans[next(iter(self._plans))]


def _guests_hosts(desired: Mapping[str, Content]) -> Mapping[WorkloadKey, frozenset[str]]:
    found = dict[WorkloadKey, frozenset[str]]()
    for node, content in desired.items():
        for each in content.assignments:
            if each.workload.tenant == GUESTS:
                found[each.workload] = found.get(each.workload, frozenset()) | {node}
    return found


def _content(desired: DesiredSet) -> Content:
    return Content(
        desired.assignments, desired.routes, desired.pins, desired.heartbeat_s, desired.peers, desired.asleep
    )


def _decisions(plan: Plan) -> tuple[str, ...]:
    """One line each, for saying which differ."""
    return tuple(
        f"{change.sign} {workload.workload} {change.model[:19]} {change.precision} on {change.node}/{change.device}"
        for workload in plan.workloads
        for change in workload.changes
    )


def _differences(before: tuple[str, ...] | None, after: tuple[str, ...]) -> tuple[str, ...]:
    if before is None:
        return ("that plan is not known any more; now it would be:", *after)
    gone = [f"no more: {line}" for line in before if line not in after]
    new = [f"now: {line}" for line in after if line not in before]
    return (*gone, *new) or ("the documents or the region's state differ; the placements do not",)


def _event(happened: Happened) -> Event:
    return Event(happened.code, happened.subject, happened.message, node=happened.node, workload=happened.workload)


def _workload_of(key: DocumentKey) -> WorkloadKey | None:
    return WorkloadKey(*key.name.split("/", 1)) if key.kind == "Workload" else None
