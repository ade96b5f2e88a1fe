"""Sessions of agents: which nodes are connected, what they report, and which of it is stored.

Implements ports.LinkEvents. A session's epoch and a receipt are stored before they take effect. Readings, phases and
liveness are not stored: nodes report them again after a restart.
"""

import base64
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.fleet.labels import (
    ENTRY_LABEL,
    EVERY_TENANT,
    NO_LABEL_GRANT,
    LabelGrant,
    check_declared_labels,
    check_labels,
    effective_labels,
)
from shoal.coordinator.core.fleet.liveness import update_liveness
from shoal.coordinator.core.fleet.state import DuplicateIdentity, Fleet, Liveness, LivenessChange, NodeState
from shoal.coordinator.core.fleet.updates import (
    clear_quarantine,
    connect,
    disconnect,
    extend_grace,
    mark_link_lost,
    mark_link_restored,
    merge_receipts,
    merge_status,
    remove_node,
    restore,
    revoke,
    with_cordon,
    with_duplicate,
    with_labels,
)
from shoal.coordinator.core.rate_limit import RateLimiter
from shoal.coordinator.ports import AgentLinks, StaleRevision
from shoal.types.assignment import Observed, Phase, Status
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Node, Role
from shoal.types.link import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Hello,
    Lease,
    LogLines,
    NodeEvents,
    Receipts,
    Reported,
    SpansFound,
    Welcome,
    negotiate_protocol,
)
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Elapsed, Wall, show_seconds

NODES: Final = "nodes/"
RECEIPTS: Final = "receipts/"
GRANTS: Final = "grants/"
"""Label grants of each node, from its join token and from operators."""
EVENT_BURST: Final = 256
"""Event log entries that one node may cause at once: as many as an agent buffers while it is disconnected."""
EVENTS_PER_S: Final = 2.0
"""Entries a second that one node may cause after the burst."""
MESSAGE_MOST, SUBJECT_MOST = 512, 256
"""Characters kept of an agent's event message and of its subject."""
MOST_NODES: Final = 20_000
"""Nodes with a rate limit in memory: twice the number of links (`LINK_CONNECTIONS`)."""
CLAIMS: Final = "claims"
ALIVE_HEARTBEATS: Final = 2
"""A session heard within this many heartbeats is alive: another hello of its name comes from a duplicate."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The part of a node's state that survives a restart of the coordinator."""

    # The node with its effective labels.
    node: Node
    # Epoch of the newest session; older sessions are refused.
    epoch: int
    # True: placement puts nothing new here.
    cordoned: bool
    # When the node was last heard, as of this write.
    last_seen: Wall
    # True: its identity was revoked.
    revoked: bool = False
    # Two agents showed this identity and no operator has resolved it yet; None: no duplicate.
    twins: DuplicateIdentity | None = None
    # Labels as the node declares them. None: stored before tokens granted labels.
    declared: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """Input of the leases' claim: how often each node was lost."""

    # How often each node was lost; a node that was never lost is absent.
    given_up: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _SuspectedDuplicate:
    """A hello that was refused because the node's session was alive.

    An agent that merely reconnected has closed its old session, and what it had sent there arrives at once. So only a
    status that comes a heartbeat after the first one shows that two agents run.
    """

    # Where the refused hello came from.
    other_address: str
    # When the session sent its first status since; None: none yet.
    heartbeat_at: Elapsed | None = None
    # True: the session is alive a heartbeat later, so two agents run.
    is_confirmed: bool = False


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A receipt, with what its node signed, so that a reader can verify the signature again."""

    receipt: Receipt
    # The receipt as the node signed it, base64.
    content: str
    # Base64.
    signature: str


class FleetController:
    """Owns the fleet view; implements ports.LinkEvents."""

    def __init__(
        self,
        context: RegionContext,
        links: AgentLinks,
        on_change: Callable[[], None],
        before_hello: Callable[[Hello], Awaitable[None]],
        on_answer: Callable[[str, LogLines | SpansFound], None],
    ) -> None:
        """on_change: called when something changed that placement or routes may depend on. before_hello: called before
        a hello is answered; raises ShoalError to refuse it. on_answer: called with a node's answer to a request.
        """
        self._fleet = Fleet()
        self._fresh_states: dict[str, NodeState] = {}
        """States of nodes heard since `fleet` was last read; newer than those in `_fleet`."""
        self._pending_events: list[LogEvent] = []
        """Events that heartbeats caused; the next tick writes them."""
        self.unsent: set[str] = set()
        """Nodes to whose session no desired set was sent yet."""
        self._store = context.store
        self._links = links
        self._fence = context.fence
        self._clock = context.clock
        self._meter = context.meter
        self._on_change = on_change
        self._before_hello = before_hello
        self._on_answer = on_answer
        self._revisions: dict[str, int] = {}
        self._event_limits = RateLimiter(EVENT_BURST, EVENTS_PER_S, MOST_NODES)
        """Rate limit of event log entries, by node."""
        self._declared_labels: dict[str, Mapping[str, str] | None] = {}
        """Labels as each node declares them; None: stored before tokens granted labels."""
        self._addresses: dict[str, str] = {}
        self._writing_since: dict[str, Elapsed] = {}
        """Nodes with a write in progress, and since when: their next messages are read after it."""
        self._suspected_duplicates: dict[str, _SuspectedDuplicate] = {}
        self._losses: dict[str, int] = {}
        """How often each node was lost: what ran only there may since have been placed elsewhere."""

    @property
    def fleet(self) -> Fleet:
        """The fleet as of now. Thousands of heartbeats a second replace one node each, so they are merged when the
        fleet is read.
        """
        if self._fresh_states:
            self._fleet = replace(self._fleet, nodes={**self._fleet.nodes, **self._fresh_states})
            self._fresh_states = {}
        return self._fleet

    @fleet.setter
    def fleet(self, fleet: Fleet) -> None:
        """The new value must derive from `self.fleet` without an await in between."""
        self._fleet = fleet

    async def start(self) -> None:
        receipts: dict[str, dict[str, Receipt]] = {}
        for record in await self._store.scan(RECEIPTS):
            _, name, device = record.key.split("/")
            receipts.setdefault(name, {})[device] = codec.load(SignedRecord, record.value).receipt
        states = []
        for record in await self._store.scan(NODES):
            stored = codec.load(NodeRecord, record.value)
            name = stored.node.name
            self._revisions[name] = record.revision
            self._declared_labels[name] = stored.declared
            node = stored.node if stored.declared is not None else _with_all_labels(stored.node)
            states.append(
                NodeState(
                    node,
                    epoch=stored.epoch,
                    cordoned=stored.cordoned,
                    last_seen=stored.last_seen,
                    receipts=receipts.get(name, {}),
                    revoked=stored.revoked,
                    duplicate=stored.twins,
                )
            )
        self.fleet = restore(tuple(states), self.fleet, self._clock.now())
        claims = await self._store.read(CLAIMS)
        self._losses = {} if claims is None else dict(codec.load(Claims, claims.value).given_up)

    async def on_hello(self, node: str, role: Role, hello: Hello, *, peer: str = "") -> Welcome | Refusal:
        if hello.node.name != node or hello.node.role is not role:
            return Refusal(
                Code.NODE_MISMATCH,
                f"a hello of {hello.node.role} {hello.node.name}",
                f"{role} {node}, as in its certificate",
                "a node speaks for itself only",
            )
        if (protocol := negotiate_protocol(hello)) is None:
            return Refusal(
                Code.NOT_SUPPORTED_YET,
                f"protocol {hello.protocol} to {max(hello.protocol, hello.newest)}",
                f"protocol {OLDEST_PROTOCOL} to {PROTOCOL}",
                "upgrade the older of the two",
            )
        try:
            await self._before_hello(hello)
            grant, is_stored = await self._grant_of(node)
        except ShoalError as error:
            return error.refusal
        known = self.fleet.nodes.get(node)  # no await from here to the write: of two concurrent hellos one is refused
        if known is not None and self._is_alive(known):
            refusal = Refusal(
                Code.TWIN_REFUSED,
                f"{node} already has a session",
                "one agent for each identity",
                "stop the other agent, or enrol this one under its own name",
            )
            if node not in self._suspected_duplicates:
                self._suspected_duplicates[node] = _SuspectedDuplicate(peer or hello.node.grpc_address)
                await self._fence.note(LogEvent(Code.TWIN_REFUSED, node, refusal.words, node=node))
            return refusal
        if (denied := check_declared_labels(hello.node.labels)) is not None:
            return denied
        epoch = (known.epoch if known is not None else 0) + 1
        wall = self._clock.wall()
        declared = hello.node.labels
        hello = replace(hello, node=replace(hello.node, labels=effective_labels(declared, grant)))
        stored = NodeRecord(
            hello.node,
            epoch,
            known is not None and known.cordoned,
            wall,
            twins=known.duplicate if known else None,
            declared=declared,
        )
        skewed = _skew_events(known, self._with_session(hello, epoch, wall).nodes[node])
        try:
            said = LogEvent("NODE_CONNECTED", node, f"epoch {epoch}", node=node)
            await self._save(stored, said, *skewed, also={} if is_stored else {GRANTS + node: codec.dump(grant)})
        except StaleRevision:
            return Refusal(Code.TWIN_REFUSED, f"two hellos of {node} at once", "one", "call again")
        except ShoalError as error:
            return error.refusal
        if known is not None and known.connected:
            await self._links.end(
                node, Refusal(Code.EPOCH_STALE, f"epoch {known.epoch}", f"epoch {epoch}", "connect again"), fatal=False
            )
        self.fleet = self._with_session(hello, epoch, wall)
        self.unsent.add(node)
        self._addresses[node] = peer or hello.node.grpc_address
        self._suspected_duplicates.pop(node, None)
        self._on_change()
        return Welcome(
            epoch,
            hello.nonce,
            self._fence.history,
            self._fence.term,
            self.fleet.timing.heartbeat_s,
            self._clock.wall(),
            protocol,
        )

    def on_status(self, node: str, epoch: int, status: Status) -> Refusal | Lease | None:
        before = self._fresh_states.get(node) or self._fleet.nodes.get(node)
        only_this_node = Fleet({node: before} if before is not None else {})
        fleet, refusals = merge_status(only_this_node, node, epoch, status, self._clock.now(), self._clock.wall())
        after = fleet.nodes.get(node)
        if before is not None and after is not None and after is not before:
            self._fresh_states[node] = after
            if node in self._suspected_duplicates:
                self._confirm_duplicate(node)
            events = [*_phase_events(before, after), *_quarantine_events(before, after), *_skew_events(before, after)]
            self._pending_events += self._admit_events(node, events) if events else []
            if events or _affects_decisions(before, after):
                self._on_change()
        for refusal in refusals:
            self._meter.count(metrics.MESSAGES_REFUSED, code=refusal.code)
        if refusals or not status.asks_lease or after is None or after is before:
            return refusals[0] if refusals else None
        claim = f"{self._fence.history}/{self._losses.get(node, 0)}"
        return Lease(status.sequence, self._fleet.timing.lost_after_s, claim)

    async def on_message(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        with self._while_writing(node):
            return await self._on_message(node, epoch, message)

    @contextmanager
    def _while_writing(self, node: str) -> Iterator[None]:
        """Marks a node as having a write in progress, so that its silence meanwhile is excused. A link reads a node's
        messages in order: on a slow disk, heartbeats queue behind a write for longer than a node may be silent.
        """
        since, is_first = self._clock.now(), node not in self._writing_since
        if is_first:
            self._writing_since[node] = since
        try:
            yield
        finally:
            if is_first:
                del self._writing_since[node]
            self._excuse_silence({node: since})

    def _excuse_silence(self, writing: Mapping[str, Elapsed]) -> None:
        now, patience_s = self._clock.now(), self._fleet.timing.heartbeat_s
        if late := [node for node, since in writing.items() if now - since >= patience_s]:
            self.fleet = extend_grace(self.fleet, late, now)

    async def _on_message(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        match message:
            case Receipts():
                return await self._receipts(node, epoch, message.receipts)
            case NodeEvents():
                await self._events(node, message)
                return None
            case LogLines() | SpansFound():
                self._on_answer(node, message)
                return None
            case Hello():
                return Refusal(Code.MESSAGE_INVALID, "a second hello", "one a session", "open another session")

    def check_connection(self, node: str) -> None:
        """Raises ShoalError(NODE_UNKNOWN | NODE_LOST)."""
        if not self._require_node(node).connected:
            raise refuse(
                Code.NODE_LOST, f"{node} is not connected", "a node that is", "on the device: journalctl -u shoal-agent"
            )

    async def on_close(self, node: str, epoch: int) -> None:
        before = self.fleet
        self.fleet = disconnect(before, node, epoch)
        if self.fleet is not before:
            await self._fence.note(LogEvent("NODE_DISCONNECTED", node, f"epoch {epoch}", node=node))

    async def end_sessions(self, refusal: Refusal) -> None:
        """Ends every session, so that all nodes send a new hello."""
        for node, state in tuple(self.fleet.nodes.items()):
            if state.connected:
                await self._links.end(node, refusal, fatal=False)
                self.fleet = disconnect(self.fleet, node, state.epoch)

    async def on_link_lost(self, nodes: Collection[str]) -> None:
        before = self.fleet
        self.fleet = mark_link_lost(before, nodes, self._clock.now())
        if self.fleet is not before:
            found = f"the coordinator does not reach it; {len(nodes)} nodes come by it, and are not judged for now"
            await self._fence.note(LogEvent("BROKER_LOST", "broker", found))

    async def on_link_restored(self) -> None:
        before = self.fleet
        self.fleet = mark_link_restored(before, self._clock.now())
        if self.fleet is not before:
            await self._fence.note(
                LogEvent("BROKER_BACK", "broker", "nodes that come by it are judged again in a while")
            )

    async def tick(self) -> None:
        """Updates liveness by silence. Writes an event for each change, and the events that heartbeats caused."""
        unsaid, self._pending_events = self._pending_events, []
        if unsaid:
            await self._fence.note(*unsaid)
        for node, doubt in list(self._suspected_duplicates.items()):
            if doubt.is_confirmed:
                await self._record_duplicate(node, doubt)
        mass = self.fleet.mass_silence
        self._excuse_silence(self._writing_since)
        self.fleet, changes = update_liveness(self.fleet, self._clock.now())
        if changes:
            await self._invalidate_claims(*(change.node for change in changes if change.after is Liveness.LOST))
            self._on_change()
            await self._fence.note(*(_liveness_event(change) for change in changes))
        if self.fleet.mass_silence is not None and mass is None:
            names = ", ".join(self.fleet.mass_silence.nodes)
            await self._fence.note(LogEvent(Code.MASS_SILENCE, names, "fell silent together: replacement is paced"))

    async def _invalidate_claims(self, *nodes: str) -> None:
        """Changes the nodes' claims before their workloads are placed elsewhere: their next lease carries another
        claim, also after a restart.
        """
        if not nodes:
            return
        self._losses.update({node: self._losses.get(node, 0) + 1 for node in nodes})
        try:
            await self._fence.commit({CLAIMS: codec.dump(Claims(self._losses))})
        except (ShoalError, StaleRevision):  # a store that takes no writes takes no new placement either
            self._meter.count(metrics.CLAIM_WRITES_FAILED)

    async def cordon(self, node: str, is_cordoned: bool, actor: str) -> None:
        """Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        record = replace(self._record(self._require_node(node)), cordoned=is_cordoned)
        word = "NODE_CORDONED" if is_cordoned else "NODE_UNCORDONED"
        await self._save_as_operator(record, LogEvent(word, node, "", actor, node=node))
        self.fleet = with_cordon(self.fleet, node, is_cordoned)
        self._on_change()

    async def revoke(self, node: str, reason: str, actor: str) -> None:
        """Ends the node's session and counts it as lost at once. Its next epoch is stored first, so that no message of
        the old session is accepted. Raises ShoalError(NODE_UNKNOWN | CONFLICT).
        """
        state = self._require_node(node)
        epoch = state.epoch + 1
        record = replace(self._record(state), epoch=epoch, revoked=True, twins=None)
        await self._save_as_operator(record, LogEvent("NODE_REVOKED", node, reason, actor, node=node))
        self.fleet = revoke(self.fleet, node, epoch)
        self._suspected_duplicates.pop(node, None)
        self._on_change()
        refusal = Refusal(
            Code.CERT_REVOKED, f"{node} was revoked: {reason}", "a member of the region", "join again with a new token"
        )
        await self._links.end(node, refusal, fatal=True)

    async def resolve_duplicate(self, node: str, actor: str) -> None:
        """Keeps the agent that holds the session and clears the mark. Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        state = self._require_node(node)
        if state.duplicate is None:
            raise refuse(Code.CONFLICT, f"{node} is not marked", "a node that twins were seen of", "shoal get nodes")
        record = replace(self._record(state), twins=None)
        await self._save_as_operator(record, LogEvent("NODE_SETTLED", node, "the running one stays", actor, node=node))
        self._suspected_duplicates.pop(node, None)  # a duplicate that still runs is noticed at its next hello
        self.fleet = with_duplicate(self.fleet, node, None)

    async def release(self, node: str, actor: str) -> None:
        """Ends a quarantine. Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        state = self._require_node(node)
        if not state.quarantined:
            raise refuse(Code.CONFLICT, f"{node} is not in quarantine", "a node that is", "shoal get nodes")
        await self._fence.note(LogEvent("NODE_RELEASED", node, f"was in for {state.refusal}", actor, node=node))
        self.fleet = clear_quarantine(self.fleet, node)
        self._on_change()

    async def label(self, node: str, given: Mapping[str, str], removed: Collection[str], actor: str) -> None:
        """Adds and removes labels that an operator grants the node. Raises ShoalError(NODE_UNKNOWN | FIELD_INVALID |
        CONFLICT).
        """
        state = self._require_node(node)
        grant = (await self._grant_of(node))[0].with_labels(given, removed)
        if (refusal := check_labels(grant.labels)) is not None:
            raise ShoalError(refusal)
        labels = effective_labels(self._declared_labels.get(node) or {}, grant)
        record = replace(self._record(state), node=replace(state.node, labels=labels))
        words = [f"{name}={value}" for name, value in sorted(given.items())] + [f"{name}-" for name in sorted(removed)]
        event = LogEvent("NODE_LABELLED", node, " ".join(words), actor, node=node)
        await self._save_as_operator(record, event, {GRANTS + node: codec.dump(grant)})
        self.fleet = with_labels(self.fleet, node, labels)
        self._on_change()

    async def _grant_of(self, node: str) -> tuple[LabelGrant, bool]:
        """The node's label grant, and False if it must still be stored. A node that was stored before tokens granted
        labels keeps the labels that it had.

        Raises ShoalError.
        """
        found = await self._store.read(GRANTS + node)
        if found is not None:
            return codec.load(LabelGrant, found.value), True
        known = self.fleet.nodes.get(node)
        if known is not None and node in self._declared_labels and self._declared_labels[node] is None:
            return LabelGrant(known.node.labels), False
        return NO_LABEL_GRANT, True

    async def forget(self, node: str, actor: str) -> int:
        """Removes a node that is not connected. Raises ShoalError(NODE_UNKNOWN | IN_USE | CONFLICT)."""
        state = self._require_node(node)
        if state.connected:
            raise refuse(Code.IN_USE, f"{node} is connected", "a node that is gone", "stop its agent first")
        keys = (NODES + node, GRANTS + node, *(f"{RECEIPTS}{node}/{device}" for device in state.receipts))
        try:
            revision = await self._fence.commit(
                {},
                deletes=keys,
                expect={NODES + node: self._revisions[node]},
                events=[LogEvent("NODE_DELETED", node, "", actor)],
            )
        except StaleRevision as cause:
            raise _conflict(node) from cause
        self._revisions.pop(node, None)
        self._declared_labels.pop(node, None)
        self.fleet = remove_node(self.fleet, node)
        self._on_change()
        return revision

    def _confirm_duplicate(self, node: str) -> None:
        """Called for a status of the session after another hello. A status that comes a heartbeat after the first one
        confirms that two agents run.
        """
        doubt, now = self._suspected_duplicates[node], self._clock.now()
        if doubt.heartbeat_at is None:
            self._suspected_duplicates[node] = replace(doubt, heartbeat_at=now)
        elif now - doubt.heartbeat_at >= self._fleet.timing.heartbeat_s:
            self._suspected_duplicates[node] = replace(doubt, is_confirmed=True)

    async def _record_duplicate(self, node: str, doubt: _SuspectedDuplicate) -> None:
        state = self.fleet.nodes.get(node)
        if state is None:
            del self._suspected_duplicates[node]
            return
        twins = DuplicateIdentity(self._addresses.get(node, ""), doubt.other_address, self._clock.wall())
        if state.duplicate is None or (state.duplicate.running, state.duplicate.other) != (twins.running, twins.other):
            message = (
                f"two agents show this identity: one at {twins.running} has the session, one at {twins.other} has not"
            )
            event = LogEvent(Code.TWIN_REFUSED, node, message, node=node)
            try:
                await self._save(replace(self._record(state), twins=twins), event)
            except (StaleRevision, ShoalError):
                return  # the next tick tries again
            self.fleet = with_duplicate(self.fleet, node, twins)
        if self._suspected_duplicates.get(node) == doubt:
            del self._suspected_duplicates[node]

    async def _receipts(self, node: str, epoch: int, signed: tuple[SignedReceipt, ...]) -> Refusal | None:
        if (known := self.fleet.nodes.get(node)) is None or known.epoch != epoch:
            return Refusal(Code.EPOCH_STALE, f"epoch {epoch}", "the session's", "connect again")
        fleet, refusals = merge_receipts(
            self.fleet, node, tuple(each.receipt for each in signed), self._clock.now(), self._clock.wall()
        )
        kept = fleet.nodes[node].receipts
        puts = {
            f"{RECEIPTS}{node}/{each.receipt.device}": codec.dump(
                SignedRecord(
                    each.receipt,
                    base64.b64encode(each.content).decode(),
                    base64.b64encode(each.signature).decode(),
                )
            )
            for each in signed
            if kept.get(each.receipt.device) == each.receipt and known.receipts.get(each.receipt.device) != each.receipt
        }
        for refusal in refusals:
            self._meter.count(metrics.MESSAGES_REFUSED, code=refusal.code)
        if puts:
            devices = ", ".join(sorted(key.rsplit("/", 1)[1] for key in puts))
            try:
                await self._fence.commit(
                    puts, events=[LogEvent("RECEIPT_KEPT", f"{node}/{devices}", "measured", node=node)]
                )
            except ShoalError as error:
                return error.refusal
        # Statuses may have come in while the receipts were written: merge into the newest state.
        self.fleet, _ = merge_receipts(
            self.fleet, node, tuple(each.receipt for each in signed), self._clock.now(), self._clock.wall()
        )
        self._on_change()
        return refusals[0] if refusals else None

    async def _events(self, node: str, message: NodeEvents) -> None:
        """Records an agent's events in its own name: only known codes, truncated, and within its rate limit."""
        told = [
            LogEvent(
                _agent_code(each.code), each.subject[:SUBJECT_MOST], each.message[:MESSAGE_MOST], f"agent {node}", node
            )
            for each in message.events
        ]
        taken = self._admit_events(node, told)
        if taken:
            await self._fence.note(*taken)
        for event in taken:
            if event.code == Code.FORWARD_DENIED:
                await self._fence.audit(event.actor, "DenyForward", event.subject, event.code)
        if len(taken) < len(told):
            bucket = self._event_limits.bucket_of(node, self._clock.now())
            if bucket.should_audit(self._clock.now()):
                await self._fence.audit(f"agent {node}", "Tell", "events", Code.OVERLOADED)

    def _admit_events(self, node: str, events: list[LogEvent]) -> list[LogEvent]:
        """Those of the events that the node's rate limit allows now; the rest is counted."""
        bucket, now, taken = self._event_limits.bucket_of(node, self._clock.now()), self._clock.now(), list[LogEvent]()
        for event in events:
            if bucket.allows(now):
                bucket.spend(now)
                taken.append(event)
            else:
                self._meter.count(metrics.EVENTS_DROPPED, code=Code.OVERLOADED)
        return taken

    def _with_session(self, hello: Hello, epoch: int, wall: Wall) -> Fleet:
        protocol = negotiate_protocol(hello) or OLDEST_PROTOCOL
        return connect(self.fleet, hello.node, epoch, self._clock.now(), wall, hello.sent_at, protocol)

    async def _save(self, stored: NodeRecord, *events: LogEvent, also: Mapping[str, bytes] | None = None) -> None:
        name = stored.node.name
        key = NODES + name
        self._revisions[name] = await self._fence.commit(
            {key: codec.dump(stored), **(also or {})}, expect={key: self._revisions.get(name, 0)}, events=events
        )
        self._declared_labels[name] = stored.declared

    async def _save_as_operator(
        self, stored: NodeRecord, event: LogEvent, also: Mapping[str, bytes] | None = None
    ) -> None:
        try:
            await self._save(stored, event, also=also)
        except StaleRevision as cause:
            raise _conflict(stored.node.name) from cause

    def _record(self, state: NodeState) -> NodeRecord:
        declared = self._declared_labels.get(state.name)
        return NodeRecord(
            state.node, state.epoch, state.cordoned, state.last_seen, state.revoked, state.duplicate, declared
        )

    def _require_node(self, node: str) -> NodeState:
        state = self.fleet.nodes.get(node)
        if state is None:
            raise refuse(Code.NODE_UNKNOWN, f"{node!r:.80}", "a node of this region", "see `shoal get nodes`")
        return state

    def _is_alive(self, state: NodeState) -> bool:
        silent = self._clock.now() - state.heard_at
        return state.connected and silent <= ALIVE_HEARTBEATS * self.fleet.timing.heartbeat_s


def _agent_code(code: str) -> str:
    """Agents may use codes of types.codes only. Event names such as NODE_REVOKED are the coordinator's own."""
    return code if code in Code.__members__ else Code.CODE_UNKNOWN


def _with_all_labels(node: Node) -> Node:
    """The node as before tokens granted labels: all declared labels apply, and every tenant's clients may call it."""
    return replace(node, labels={ENTRY_LABEL: EVERY_TENANT, **node.labels})


def _affects_decisions(before: NodeState, after: NodeState) -> bool:
    """Whether anything changed that decisions depend on, apart from what changes with every heartbeat."""
    return (
        before.has_full_status != after.has_full_status
        or before.sequence == 0
        or before.version != after.version
        or before.front_ready != after.front_ready
        or before.observed.keys() != after.observed.keys()
        or any(_decision_state(before.observed[key]) != _decision_state(after.observed[key]) for key in after.observed)
    )


def _decision_state(observed: Observed) -> tuple[object, ...]:
    drained = observed.phase is Phase.DRAINING and observed.in_flight == 0
    return observed.phase, observed.code, observed.restarts, observed.measured, drained, observed.sessions == 0


def _phase_events(before: NodeState, after: NodeState) -> list[LogEvent]:
    """An event for each new failure, by code. The reconciler reports successes."""
    return [
        LogEvent(
            observed.code, observed.assignment, observed.reason, f"agent {after.name}", after.name, observed.workload
        )
        for observed in after.observed.values()
        if observed.phase is Phase.FAILED
        and observed.code is not None
        and (
            (known := before.observed.get(observed.assignment)) is None
            or _decision_state(known) != _decision_state(observed)
        )
    ]


def _quarantine_events(before: NodeState, after: NodeState) -> list[LogEvent]:
    if before.quarantined == after.quarantined:
        return []
    code = Code.NODE_QUARANTINED if after.quarantined else "NODE_TRUSTED"
    return [LogEvent(code, after.name, str(after.refusal or "its reports are sound again"), node=after.name)]


def _skew_events(before: NodeState | None, after: NodeState) -> list[LogEvent]:
    if not after.is_skewed or (before is not None and before.is_skewed):
        return []
    way = "behind" if after.skew_s > 0 else "ahead"
    message = f"its clock is {show_seconds(abs(after.skew_s))} {way} of the coordinator's; nothing is decided by it"
    return [LogEvent(Code.CLOCK_SKEW, after.name, message, node=after.name)]


def _liveness_event(change: LivenessChange) -> LogEvent:
    return LogEvent(
        f"NODE_{change.after.upper().replace('-', '_')}",
        change.node,
        f"{change.before} -> {change.after}, silent for {change.silent_s:.1f}s",
        node=change.node,
    )


def _conflict(node: str) -> ShoalError:
    return refuse(Code.CONFLICT, f"{node} changed meanwhile", "an unchanged node", "try again")
