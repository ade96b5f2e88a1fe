"""Sessions of agents: which nodes are connected, what they report, and which of it is stored.

Implements ports.LinkEvents. A session's epoch and a receipt are stored before they take effect. Readings, phases and
liveness are not stored: nodes report them again after a restart.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from immutables import Map

from shoal.coordinator import metrics
from shoal.coordinator.controllers.fleet.duplicates import DuplicateDetector, SuspectedDuplicate
from shoal.coordinator.controllers.fleet.node_events import (
    NodeEventLog,
    affects_decisions,
    liveness_event,
    skew_events,
    status_events,
)
from shoal.coordinator.controllers.fleet.records import NodeRecord, NodeRepository
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.fleet.labels import (
    check_declared_labels,
    check_label_count,
    check_labels,
    effective_labels,
)
from shoal.coordinator.core.fleet.liveness import update_liveness
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.fleet.updates import (
    clear_quarantine,
    close_link,
    connect,
    disconnect,
    extend_grace,
    mark_link_lost,
    mark_link_restored,
    merge_receipts,
    remove_node,
    restore,
    revoke,
    with_cordon,
    with_duplicate,
    with_labels,
    with_status,
)
from shoal.coordinator.core.placement.changes import is_material
from shoal.coordinator.core.rate_limit import RateLimiter
from shoal.coordinator.ports import AgentLinks, StaleRevision
from shoal.types.assignment import Status
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
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
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Elapsed, Wall

HELLO_BURST: Final = 256
HELLOS_PER_S: Final = 1.0
"""Sessions of one node: at first, and more a second. Each takes two commits and a step, 2.4 ms of a core. An agent
calls again after a tenth of a second to four, so minutes of failures pass. A choice."""
_MOST_BUCKETS: Final = 131_072
"""Nodes whose sessions are counted: more than a region has."""
ALIVE_HEARTBEATS: Final = 2
"""A session heard within this many heartbeats is alive: another hello of its name comes from a duplicate."""


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
        self._noted: Map[str, NodeState] = Map()
        """Each node as of its last change that decisions may depend on."""
        self.changed_nodes: set[str] = set()
        """Those that changed so since `take_changed_nodes`."""
        self.unconfirmed: set[str] = set()
        """Nodes that reported since the last call of `DesiredSetSender.send`, and may hold another set than theirs."""
        self.unsent: set[str] = set()
        """Nodes that must be sent their desired set: their session is new, or their set has changed."""
        self._links = links
        self._fence = context.fence
        self._clock = context.clock
        self._meter = context.meter
        self._on_change = on_change
        self._before_hello = before_hello
        self._on_answer = on_answer
        self._nodes = NodeRepository(context)
        self._node_events = NodeEventLog(context)
        self._duplicates = DuplicateDetector(context.clock)
        self._hellos = RateLimiter(HELLO_BURST, HELLOS_PER_S, _MOST_BUCKETS)
        self._writing_since: dict[str, Elapsed] = {}
        """Nodes with a write in progress, and since when: their next messages are read after it."""

    def fleet_seen_elsewhere(self) -> Fleet:
        """The fleet for another thread. It may lack what was heard while it is read."""
        fleet, fresh = self._fleet, self._fresh_states.copy()
        return replace(fleet, nodes={**fleet.nodes, **fresh}) if fresh else fleet

    @property
    def fleet(self) -> Fleet:
        """The fleet as of now. Thousands of heartbeats a second replace one node each, so they are merged when the
        fleet is read: by the loop alone, since who merges in between takes back what the loop wrote.
        """
        if self._fresh_states:
            self._fleet = replace(self._fleet, nodes={**self._fleet.nodes, **self._fresh_states})
            self._fresh_states = {}
        return self._fleet

    @fleet.setter
    def fleet(self, fleet: Fleet) -> None:
        """The new value must derive from `self.fleet` without an await in between."""
        before, self._fleet = self._fleet, fleet
        if fleet.nodes is before.nodes:
            return
        for name, state in fleet.nodes.items():
            if before.nodes.get(name) is not state:
                self._note_change(name, state)
        if len(self._noted) > len(fleet.nodes):
            for name in [name for name in self._noted if name not in fleet.nodes]:
                self._noted = self._noted.delete(name)
                self.changed_nodes.add(name)

    def state_of(self, node: str) -> NodeState | None:
        """As `fleet.nodes` has it, without merging the others that were heard since."""
        return self._fresh_states.get(node) or self._fleet.nodes.get(node)

    @property
    def decision_fleet(self) -> Fleet:
        """The fleet as decisions are based on it: each node as of its last change that may change one."""
        fleet = self._fleet
        return Fleet(self._noted, fleet.timing, fleet.grace_until, fleet.ticked_at, fleet.mass_silence)

    def take_changed_nodes(self) -> set[str]:
        """Nodes that are others in `decision_fleet` than at the last call."""
        found, self.changed_nodes = self.changed_nodes, set()
        return found

    def _note_change(self, node: str, state: NodeState) -> None:
        """Decisions are based on a node's new state, if it differs from the one before by what may change one."""
        known = self._noted.get(node)
        if known is None or is_material(known, state):
            self._noted = self._noted.set(node, state)
            self.changed_nodes.add(node)
            self.unconfirmed.add(node)

    async def start(self) -> None:
        states = await self._nodes.load()
        self.fleet = restore(states, self.fleet, self._clock.now())

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
            grant, is_stored = await self._nodes.grant_of(node, self.fleet.nodes.get(node))
        except ShoalError as error:
            return error.refusal
        known = self.fleet.nodes.get(node)  # no await from here to the write: of two concurrent hellos one is refused
        if known is not None and self._is_alive(known):
            refusal = Refusal(
                Code.DUPLICATE_IDENTITY,
                f"{node} already has a session",
                "one agent for each identity",
                "stop the other agent, or enrol this one under its own name",
            )
            if self._duplicates.on_refused_hello(node, peer or hello.node.data_address):
                await self._fence.note(LogEvent(Code.DUPLICATE_IDENTITY, node, refusal.words, node=node))
            return refusal
        if (denied := check_declared_labels(hello.node.labels)) is not None:
            return denied
        now = self._clock.now()
        bucket = self._hellos.bucket_of(node, now)
        if not bucket.allows(now):
            found = f"more than {HELLO_BURST} sessions of {node} at once, and {HELLOS_PER_S:g} a second"
            refusal = Refusal(Code.OVERLOADED, found, "sessions that last", "the agent calls again by itself")
            if bucket.should_audit(now):  # an event, since a line of the log for each would fill the disk
                await self._fence.note(LogEvent(Code.OVERLOADED, node, refusal.words, node=node))
            return refusal
        bucket.spend(now)
        epoch = (known.epoch if known is not None else 0) + 1
        wall = self._clock.wall()
        declared = hello.node.labels
        hello = replace(hello, node=replace(hello.node, labels=effective_labels(declared, grant)))
        connected = self._with_session(hello, epoch, wall).nodes[node]
        stored = NodeRecord(
            hello.node,
            epoch,
            known is not None and known.cordoned,
            wall,
            duplicate=known.duplicate if known else None,
            declared=declared,
            joined_at=connected.joined_at,
        )
        skewed = skew_events(known, connected)
        try:
            said = LogEvent("NODE_CONNECTED", node, f"epoch {epoch}", node=node)
            await self._nodes.save(stored, said, *skewed, grant=None if is_stored else grant)
        except StaleRevision:
            return Refusal(Code.DUPLICATE_IDENTITY, f"two hellos of {node} at once", "one", "call again")
        except ShoalError as error:
            return error.refusal
        if known is not None and known.connected:
            await self._links.end(
                node, Refusal(Code.EPOCH_STALE, f"epoch {known.epoch}", f"epoch {epoch}", "connect again"), fatal=False
            )
        self.fleet = self._with_session(hello, epoch, wall)
        self.unsent.add(node)
        self._duplicates.on_session(node, peer or hello.node.data_address)
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
        before = self.state_of(node)
        after, refusals = with_status(before, node, epoch, status, self._clock.now(), self._clock.wall())
        if before is not None and after is not None and after is not before:
            self._fresh_states[node] = after
            self._note_change(node, after)
            if node in self._duplicates.suspected:
                self._duplicates.on_status(node, self._fleet.timing.heartbeat_s)
            events = status_events(before, after)
            self._pending_events += self._node_events.admit(node, events) if events else []
            if events or affects_decisions(before, after):
                self._on_change()
        for refusal in refusals:
            self._meter.count(metrics.MESSAGES_REFUSED, code=refusal.code)
        if refusals or not status.asks_lease or after is None or after is before:
            return refusals[0] if refusals else None
        claim = f"{self._fence.history}/{self._nodes.losses(node)}"
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
                await self._node_events.record(node, message)
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

    async def on_link_closed(self, sessions: Mapping[str, int], *, is_lost: bool) -> None:
        before = self.fleet
        self.fleet = close_link(before, sessions, self._clock.now())
        if self.fleet is not before:
            ended = f"{len(sessions)} sessions by it ended; their nodes connect again, and are not judged for now"
            await self._fence.note(LogEvent("BROKER_LOST" if is_lost else "BROKER_LEFT", "broker", ended))

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
        for node, doubt in self._duplicates.confirmed_duplicates():
            await self._record_duplicate(node, doubt)
        mass = self.fleet.mass_silence
        self._excuse_silence(self._writing_since)
        self.fleet, changes = update_liveness(self.fleet, self._clock.now())
        if changes:
            await self._invalidate_claims(*(change.node for change in changes if change.after is Liveness.LOST))
            self._on_change()
            await self._fence.note(*(liveness_event(change) for change in changes))
        if self.fleet.mass_silence is not None and mass is None:
            names = ", ".join(self.fleet.mass_silence.nodes)
            await self._fence.note(LogEvent(Code.MASS_SILENCE, names, "fell silent together: replacement is paced"))

    async def _invalidate_claims(self, *nodes: str) -> None:
        """Changes the nodes' claims before their workloads are placed elsewhere: their next lease carries another
        claim, also after a restart.
        """
        if not nodes:
            return
        try:
            await self._nodes.count_losses(nodes)
        except (ShoalError, StaleRevision):  # a store that takes no writes takes no new placement either
            self._meter.count(metrics.CLAIM_WRITES_FAILED)

    async def cordon(self, node: str, is_cordoned: bool, actor: str) -> None:
        """Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        record = replace(self._nodes.record_of(self._require_node(node)), cordoned=is_cordoned)
        word = "NODE_CORDONED" if is_cordoned else "NODE_UNCORDONED"
        await self._nodes.save_as_operator(record, LogEvent(word, node, "", actor, node=node))
        self.fleet = with_cordon(self.fleet, node, is_cordoned)
        self._on_change()

    async def revoke(self, node: str, reason: str, actor: str) -> None:
        """Ends the node's session and counts it as lost at once. Its next epoch is stored first, so that no message of
        the old session is accepted. Raises ShoalError(NODE_UNKNOWN | CONFLICT).
        """
        state = self._require_node(node)
        epoch = state.epoch + 1
        record = replace(self._nodes.record_of(state), epoch=epoch, revoked=True, duplicate=None)
        await self._nodes.save_as_operator(record, LogEvent("NODE_REVOKED", node, reason, actor, node=node))
        self.fleet = revoke(self.fleet, node, epoch)
        self._duplicates.forget(node)
        self._on_change()
        refusal = Refusal(
            Code.CERT_REVOKED, f"{node} was revoked: {reason}", "a member of the region", "join again with a new token"
        )
        await self._links.end(node, refusal, fatal=True)

    async def resolve_duplicate(self, node: str, actor: str) -> None:
        """Keeps the agent that holds the session and clears the mark. Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        state = self._require_node(node)
        if state.duplicate is None:
            raise refuse(
                Code.CONFLICT, f"{node} is not marked", "a node whose identity two agents showed", "shoal get nodes"
            )
        record = replace(self._nodes.record_of(state), duplicate=None)
        await self._nodes.save_as_operator(
            record, LogEvent("NODE_SETTLED", node, "the running one stays", actor, node=node)
        )
        self._duplicates.forget(node)  # a duplicate that still runs is noticed at its next hello
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
        QUANTITY_INVALID | UNIT_MISSING | UNIT_WRONG | CONFLICT).
        """
        state = self._require_node(node)
        grant = (await self._nodes.grant_of(node, state))[0].with_labels(given, removed)
        # What was granted before stands, even if it would be refused today: nobody has typed it now.
        if (refusal := check_labels(given) or check_label_count(len(grant.labels))) is not None:
            raise ShoalError(refusal)
        labels = effective_labels(self._nodes.declared_labels(node), grant)
        record = replace(self._nodes.record_of(state), node=replace(state.node, labels=labels))
        words = [f"{name}={value}" for name, value in sorted(given.items())] + [f"{name}-" for name in sorted(removed)]
        event = LogEvent("NODE_LABELLED", node, " ".join(words), actor, node=node)
        await self._nodes.save_as_operator(record, event, grant)
        self.fleet = with_labels(self.fleet, node, labels)
        self._on_change()

    async def forget(self, node: str, actor: str) -> int:
        """Removes a node that is not connected. Raises ShoalError(NODE_UNKNOWN | IN_USE | CONFLICT)."""
        state = self._require_node(node)
        if state.connected:
            raise refuse(Code.IN_USE, f"{node} is connected", "a node that is gone", "stop its agent first")
        revision = await self._nodes.delete(state, LogEvent("NODE_DELETED", node, "", actor))
        self.fleet = remove_node(self.fleet, node)
        self._on_change()
        return revision

    async def _record_duplicate(self, node: str, doubt: SuspectedDuplicate) -> None:
        state = self.fleet.nodes.get(node)
        if state is None:
            self._duplicates.forget(node)
            return
        found, known = self._duplicates.identity_of(node, doubt), state.duplicate
        if known is None or (known.running, known.other) != (found.running, found.other):
            message = (
                f"two agents show this identity: one at {found.running} has the session, one at {found.other} has not"
            )
            event = LogEvent(Code.DUPLICATE_IDENTITY, node, message, node=node)
            try:
                await self._nodes.save(replace(self._nodes.record_of(state), duplicate=found), event)
            except (StaleRevision, ShoalError):
                return  # the next tick tries again
            self.fleet = with_duplicate(self.fleet, node, found)
        self._duplicates.forget(node, doubt)

    async def _receipts(self, node: str, epoch: int, signed: tuple[SignedReceipt, ...]) -> Refusal | None:
        if (known := self.fleet.nodes.get(node)) is None or known.epoch != epoch:
            return Refusal(Code.EPOCH_STALE, f"epoch {epoch}", "the session's", "connect again")
        fleet, refusals = merge_receipts(
            self.fleet, node, tuple(each.receipt for each in signed), self._clock.now(), self._clock.wall()
        )
        kept = fleet.nodes[node].receipts
        news = [
            each
            for each in signed
            if kept.get(each.receipt.device) == each.receipt and known.receipts.get(each.receipt.device) != each.receipt
        ]
        for refusal in refusals:
            self._meter.count(metrics.MESSAGES_REFUSED, code=refusal.code)
        if news:
            devices = ", ".join(sorted({each.receipt.device for each in news}))
            event = LogEvent("RECEIPT_KEPT", f"{node}/{devices}", "measured", node=node)
            try:
                await self._nodes.save_receipts(node, news, event)
            except ShoalError as error:
                return error.refusal
        # Statuses may have come in while the receipts were written: merge into the newest state.
        self.fleet, _ = merge_receipts(
            self.fleet, node, tuple(each.receipt for each in signed), self._clock.now(), self._clock.wall()
        )
        self._on_change()
        return refusals[0] if refusals else None

    def _with_session(self, hello: Hello, epoch: int, wall: Wall) -> Fleet:
        protocol = negotiate_protocol(hello) or OLDEST_PROTOCOL
        return connect(self.fleet, hello.node, epoch, self._clock.now(), wall, hello.sent_at, protocol)

    def _require_node(self, node: str) -> NodeState:
        state = self.fleet.nodes.get(node)
        if state is None:
            raise refuse(Code.NODE_UNKNOWN, f"no node {node!r:.80}", "a node of this region", "see `shoal get nodes`")
        return state

    def _is_alive(self, state: NodeState) -> bool:
        silent = self._clock.now() - state.heard_at
        return state.connected and silent <= ALIVE_HEARTBEATS * self.fleet.timing.heartbeat_s
