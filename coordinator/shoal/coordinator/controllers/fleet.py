"""The agents' sessions: who is there, what they report, and what of it outlives this process.

Implements ports.LinkEvents. A session's epoch and a receipt are in the store before they count; readings, phases and
liveness are heard again after a restart.
"""

import base64
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.core.fleet.judge import judge
from shoal.coordinator.core.fleet.state import Fleet, LivenessChange, NodeState, Twins
from shoal.coordinator.core.fleet.updates import (
    connected,
    cordoned,
    disconnected,
    forgotten,
    hidden,
    marked,
    receipts_received,
    released,
    restored,
    revoked,
    status_received,
    uncovered,
    unread,
)
from shoal.coordinator.ports import AgentLinks, Clock, Meter, StaleRevision, Store
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
    spoken,
)
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Elapsed, Wall, show_seconds
from shoal.wire import nouns

NODES: Final = "nodes/"
RECEIPTS: Final = "receipts/"
TWIN_BEATS: Final = 2
"""A session that was heard within this many beats is alive: another hello of its name is a twin's."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What outlives a restart of one node's state. epoch: no session of a lower or the same one counts any more."""

    node: Node
    epoch: int
    cordoned: bool
    last_seen: Wall
    revoked: bool = False
    twins: Twins | None = None


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A hello of a node whose session was alive. other: where it came from. beat_at: of the session's first status
    since; one that comes a heartbeat later shows that both are running (an agent that only called again has let go of
    its old session, and what it had sent there before arrives at once)."""

    other: str
    beat_at: Elapsed | None = None
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A signed receipt as it came, base64: whoever reads it can check the signature again."""

    content: str
    signature: str


class FleetController:
    def __init__(
        self,
        store: Store,
        links: AgentLinks,
        truth: Truth,
        clock: Clock,
        meter: Meter,
        changed: Callable[[], None],
        greeted: Callable[[Hello], Awaitable[None]],
        answered: Callable[[str, LogLines | SpansFound], None],
    ) -> None:
        """changed: called when something happened that placement or routes may depend on. greeted: before a hello is
        answered; raises ShoalError where it cannot be. answered: a node did, what it was asked."""
        self._fleet = Fleet()
        self._beaten: dict[str, NodeState] = {}
        """Nodes that were heard since somebody last looked at the fleet: newer than theirs in `_fleet`."""
        self._unsaid: list[Event] = []
        """Of heartbeats; said by the next tick."""
        self.unsent: set[str] = set()
        """Nodes whose session has not been sent its desired set yet."""
        self._store = store
        self._links = links
        self._truth = truth
        self._clock = clock
        self._meter = meter
        self._changed = changed
        self._greeted = greeted
        self._answered = answered
        self._revisions: dict[str, int] = {}
        self._peers: dict[str, str] = {}
        self._writing: dict[str, Elapsed] = {}
        """Nodes of which something is being written down, and since when: what they say meanwhile is read after it."""
        self._doubts: dict[str, _Doubt] = {}

    @property
    def fleet(self) -> Fleet:
        """As of now. Thousands of beats a second replace one node each, so they are put together when one looks."""
        if self._beaten:
            self._fleet = replace(self._fleet, nodes={**self._fleet.nodes, **self._beaten})
            self._beaten = {}
        return self._fleet

    @fleet.setter
    def fleet(self, fleet: Fleet) -> None:
        """One that was made of `self.fleet` without a wait between."""
        self._fleet = fleet

    async def start(self) -> None:
        receipts: dict[str, dict[str, Receipt]] = {}
        for record in await self._store.scan(RECEIPTS):
            _, name, device = record.key.split("/")
            content = base64.b64decode(records.load(SignedRecord, record.value).content)
            receipts.setdefault(name, {})[device] = nouns.decode(Receipt, content)
        states = []
        for record in await self._store.scan(NODES):
            stored = records.load(NodeRecord, record.value)
            name = stored.node.name
            self._revisions[name] = record.revision
            states.append(
                NodeState(
                    stored.node,
                    epoch=stored.epoch,
                    cordoned=stored.cordoned,
                    last_seen=stored.last_seen,
                    receipts=receipts.get(name, {}),
                    revoked=stored.revoked,
                    twins=stored.twins,
                )
            )
        self.fleet = restored(tuple(states), self.fleet, self._clock.now())

    async def opened(self, node: str, role: Role, hello: Hello, *, peer: str = "") -> Welcome | Refusal:
        if hello.node.name != node or hello.node.role is not role:
            return Refusal(
                Code.NODE_MISMATCH,
                f"a hello of {hello.node.role} {hello.node.name}",
                f"{role} {node}, as in its certificate",
                "a node speaks for itself only",
            )
        if (protocol := spoken(hello)) is None:
            return Refusal(
                Code.NOT_SUPPORTED_YET,
                f"protocol {hello.protocol} to {max(hello.protocol, hello.newest)}",
                f"protocol {OLDEST_PROTOCOL} to {PROTOCOL}",
                "upgrade the older of the two",
            )
        try:
            await self._greeted(hello)
        except ShoalError as error:
            return error.refusal
        known = self.fleet.nodes.get(node)
        if known is not None and self._is_alive(known):
            refusal = Refusal(
                Code.TWIN_REFUSED,
                f"{node} already has a session",
                "one agent for each identity",
                "stop the other agent, or enrol this one under its own name",
            )
            if node not in self._doubts:
                self._doubts[node] = _Doubt(peer or hello.node.grpc_address)
                await self._truth.note(Event(Code.TWIN_REFUSED, node, str(refusal), node=node))
            return refusal
        epoch = (known.epoch if known is not None else 0) + 1
        wall = self._clock.wall()
        stored = NodeRecord(
            hello.node, epoch, known is not None and known.cordoned, wall, twins=known.twins if known else None
        )
        skewed = _skew_events(known, self._connected(hello, epoch, wall).nodes[node])
        try:
            await self._save(stored, Event("NODE_CONNECTED", node, f"epoch {epoch}", node=node), *skewed)
        except StaleRevision:
            return Refusal(Code.TWIN_REFUSED, f"two hellos of {node} at once", "one", "call again")
        except ShoalError as error:
            return error.refusal
        if known is not None and known.connected:
            await self._links.end(
                node, Refusal(Code.EPOCH_STALE, f"epoch {known.epoch}", f"epoch {epoch}", "connect again"), fatal=False
            )
        self.fleet = self._connected(hello, epoch, wall)
        self.unsent.add(node)
        self._peers[node] = peer or hello.node.grpc_address
        self._doubts.pop(node, None)
        self._changed()
        return Welcome(
            epoch,
            hello.nonce,
            self._truth.history,
            self._truth.term,
            self.fleet.timing.heartbeat_s,
            self._clock.wall(),
            protocol,
        )

    def heard(self, node: str, epoch: int, status: Status) -> Refusal | Lease | None:
        before = self._beaten.get(node) or self._fleet.nodes.get(node)
        alone = Fleet({node: before} if before is not None else {})
        fleet, refusals = status_received(alone, node, epoch, status, self._clock.now(), self._clock.wall())
        after = fleet.nodes.get(node)
        if before is not None and after is not None and after is not before:
            self._beaten[node] = after
            if node in self._doubts:
                self._confirm_doubt(node)
            events = [*_phase_events(before, after), *_quarantine_events(before, after), *_skew_events(before, after)]
            self._unsaid += events
            if events or _matters(before, after):
                self._changed()
        for refusal in refusals:
            self._meter.count("messages_refused", code=refusal.code)
        if refusals or not status.alone or after is None or after is before:
            return refusals[0] if refusals else None
        return Lease(status.sequence, self._fleet.timing.lost_after_s)

    async def received(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        with self._unread(node):
            return await self._received(node, epoch, message)

    @contextmanager
    def _unread(self, node: str) -> Iterator[None]:
        """A link reads a node's messages one after the other. On a slow disk one takes longer to write than a node may
        be silent, and its beats lie behind it."""
        since, is_first = self._clock.now(), node not in self._writing
        if is_first:
            self._writing[node] = since
        try:
            yield
        finally:
            if is_first:
                del self._writing[node]
            self._excuse({node: since})

    def _excuse(self, writing: Mapping[str, Elapsed]) -> None:
        now, patience_s = self._clock.now(), self._fleet.timing.heartbeat_s
        if late := [node for node, since in writing.items() if now - since >= patience_s]:
            self.fleet = unread(self.fleet, late, now)

    async def _received(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        match message:
            case Receipts():
                return await self._receipts(node, epoch, message.receipts)
            case NodeEvents():
                await self._events(node, message)
                return None
            case LogLines() | SpansFound():
                self._answered(node, message)
                return None
            case Hello():
                return Refusal(Code.MESSAGE_INVALID, "a second hello", "one a session", "open another session")

    def check_connected(self, node: str) -> None:
        """Raises ShoalError(NODE_UNKNOWN | NODE_LOST)."""
        if not self._known(node).connected:
            raise refuse(
                Code.NODE_LOST, f"{node} is not connected", "a node that is", "on the device: journalctl -u shoal-agent"
            )

    async def closed(self, node: str, epoch: int) -> None:
        before = self.fleet
        self.fleet = disconnected(before, node, epoch)
        if self.fleet is not before:
            await self._truth.note(Event("NODE_DISCONNECTED", node, f"epoch {epoch}", node=node))

    async def dismiss(self, refusal: Refusal) -> None:
        """Ends every session: all say hello again."""
        for node, state in tuple(self.fleet.nodes.items()):
            if state.connected:
                await self._links.end(node, refusal, fatal=False)
                self.fleet = disconnected(self.fleet, node, state.epoch)

    async def blinded(self, nodes: Collection[str]) -> None:
        before = self.fleet
        self.fleet = hidden(before, nodes, self._clock.now())
        if self.fleet is not before:
            found = f"the coordinator does not reach it; {len(nodes)} nodes come by it, and are not judged for now"
            await self._truth.note(Event("BROKER_LOST", "broker", found))

    async def sighted(self) -> None:
        before = self.fleet
        self.fleet = uncovered(before, self._clock.now())
        if self.fleet is not before:
            await self._truth.note(Event("BROKER_BACK", "broker", "nodes that come by it are judged again in a while"))

    async def tick(self) -> None:
        """Judges silence; an event for each change, and those that heartbeats brought."""
        unsaid, self._unsaid = self._unsaid, []
        if unsaid:
            await self._truth.note(*unsaid)
        for node, doubt in list(self._doubts.items()):
            if doubt.is_sure:
                await self._mark_twins(node, doubt)
        mass = self.fleet.mass_silence
        self._excuse(self._writing)
        self.fleet, changes = judge(self.fleet, self._clock.now())
        if changes:
            self._changed()
            await self._truth.note(*(_liveness_event(change) for change in changes))
        if self.fleet.mass_silence is not None and mass is None:
            names = ", ".join(self.fleet.mass_silence.nodes)
            await self._truth.note(Event(Code.MASS_SILENCE, names, "fell silent together: replacement is paced"))

    async def cordon(self, node: str, is_cordoned: bool, actor: str) -> None:
        """Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        record = replace(_record(self._known(node)), cordoned=is_cordoned)
        word = "NODE_CORDONED" if is_cordoned else "NODE_UNCORDONED"
        await self._save_as_operator(record, Event(word, node, "", actor, node=node))
        self.fleet = cordoned(self.fleet, node, is_cordoned)
        self._changed()

    async def revoke(self, node: str, reason: str, actor: str, also: Mapping[str, bytes]) -> None:
        """Ends its session and counts it as lost at once. also: written in the same transaction, beside its next epoch,
        so that nothing of the old session counts. Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        state = self._known(node)
        epoch = state.epoch + 1
        record = replace(_record(state), epoch=epoch, revoked=True, twins=None)
        await self._save_as_operator(record, Event("NODE_REVOKED", node, reason, actor, node=node), also)
        self.fleet = revoked(self.fleet, node, epoch)
        self._doubts.pop(node, None)
        self._changed()
        refusal = Refusal(
            Code.CERT_REVOKED, f"{node} was revoked: {reason}", "a member of the region", "join again with a new token"
        )
        await self._links.end(node, refusal, fatal=True)

    async def settle(self, node: str, actor: str) -> None:
        """The one that holds the session stays, and the mark goes. Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        state = self._known(node)
        if state.twins is None:
            raise refuse(Code.CONFLICT, f"{node} is not marked", "a node that twins were seen of", "shoal get nodes")
        record = replace(_record(state), twins=None)
        await self._save_as_operator(record, Event("NODE_SETTLED", node, "the running one stays", actor, node=node))
        self._doubts.pop(node, None)  # one that still runs is seen as it calls again
        self.fleet = marked(self.fleet, node, None)

    async def release(self, node: str, actor: str) -> None:
        """Ends a quarantine. Raises ShoalError(NODE_UNKNOWN | CONFLICT)."""
        state = self._known(node)
        if not state.quarantined:
            raise refuse(Code.CONFLICT, f"{node} is not in quarantine", "a node that is", "shoal get nodes")
        await self._truth.note(Event("NODE_RELEASED", node, f"was in for {state.refusal}", actor, node=node))
        self.fleet = released(self.fleet, node)
        self._changed()

    async def forget(self, node: str, actor: str) -> int:
        """Removes a node that is not connected. Raises ShoalError(NODE_UNKNOWN | IN_USE | CONFLICT)."""
        state = self._known(node)
        if state.connected:
            raise refuse(Code.IN_USE, f"{node} is connected", "a node that is gone", "stop its agent first")
        keys = (NODES + node, *(f"{RECEIPTS}{node}/{device}" for device in state.receipts))
        try:
            revision = await self._truth.commit(
                {},
                deletes=keys,
                expect={NODES + node: self._revisions[node]},
                events=[Event("NODE_DELETED", node, "", actor)],
            )
        except StaleRevision as cause:
            raise _conflict(node) from cause
        self._revisions.pop(node, None)
        self.fleet = forgotten(self.fleet, node)
        self._changed()
        return revision

    def _confirm_doubt(self, node: str) -> None:
        """The session goes on after another hello of its name: there are two, once a heartbeat has shown it."""
        doubt, now = self._doubts[node], self._clock.now()
        if doubt.beat_at is None:
            self._doubts[node] = replace(doubt, beat_at=now)
        elif now - doubt.beat_at >= self._fleet.timing.heartbeat_s:
            self._doubts[node] = replace(doubt, is_sure=True)

    async def _mark_twins(self, node: str, doubt: _Doubt) -> None:
        state = self.fleet.nodes.get(node)
        if state is None:
            del self._doubts[node]
            return
        twins = Twins(self._peers.get(node, ""), doubt.other, self._clock.wall())
        if state.twins is None or (state.twins.running, state.twins.other) != (twins.running, twins.other):
            message = (
                f"two agents show this identity: one at {twins.running} has the session, one at {twins.other} has not"
            )
            event = Event(Code.TWIN_REFUSED, node, message, node=node)
            try:
                await self._save(replace(_record(state), twins=twins), event)
            except (StaleRevision, ShoalError):
                return  # said again by the next tick
            self.fleet = marked(self.fleet, node, twins)
        if self._doubts.get(node) == doubt:
            del self._doubts[node]

    async def _receipts(self, node: str, epoch: int, signed: tuple[SignedReceipt, ...]) -> Refusal | None:
        if (known := self.fleet.nodes.get(node)) is None or known.epoch != epoch:
            return Refusal(Code.EPOCH_STALE, f"epoch {epoch}", "the session's", "connect again")
        fleet, refusals = receipts_received(
            self.fleet, node, tuple(each.receipt for each in signed), self._clock.now(), self._clock.wall()
        )
        kept = fleet.nodes[node].receipts
        puts = {
            f"{RECEIPTS}{node}/{each.receipt.device}": records.dump(
                SignedRecord(base64.b64encode(each.content).decode(), base64.b64encode(each.signature).decode())
            )
            for each in signed
            if kept.get(each.receipt.device) == each.receipt and known.receipts.get(each.receipt.device) != each.receipt
        }
        for refusal in refusals:
            self._meter.count("messages_refused", code=refusal.code)
        if puts:
            devices = ", ".join(sorted(key.rsplit("/", 1)[1] for key in puts))
            try:
                await self._truth.commit(
                    puts, events=[Event("RECEIPT_KEPT", f"{node}/{devices}", "measured", node=node)]
                )
            except ShoalError as error:
                return error.refusal
        # Statuses may have come in while the receipts were written: merge into what is true now.
        self.fleet, _ = receipts_received(
            self.fleet, node, tuple(each.receipt for each in signed), self._clock.now(), self._clock.wall()
        )
        self._changed()
        return refusals[0] if refusals else None

    async def _events(self, node: str, message: NodeEvents) -> None:
        await self._truth.note(
            *(Event(each.code, each.subject, each.message, f"agent {node}", node=node) for each in message.events)
        )

    def _connected(self, hello: Hello, epoch: int, wall: Wall) -> Fleet:
        protocol = spoken(hello) or OLDEST_PROTOCOL
        return connected(self.fleet, hello.node, epoch, self._clock.now(), wall, hello.sent_at, protocol)

    async def _save(self, stored: NodeRecord, *events: Event, also: Mapping[str, bytes] | None = None) -> None:
        name = stored.node.name
        key = NODES + name
        self._revisions[name] = await self._truth.commit(
            {key: records.dump(stored), **(also or {})}, expect={key: self._revisions.get(name, 0)}, events=events
        )

    async def _save_as_operator(
        self, stored: NodeRecord, event: Event, also: Mapping[str, bytes] | None = None
    ) -> None:
        try:
            await self._save(stored, event, also=also)
        except StaleRevision as cause:
            raise _conflict(stored.node.name) from cause

    def _known(self, node: str) -> NodeState:
        state = self.fleet.nodes.get(node)
        if state is None:
            raise refuse(Code.NODE_UNKNOWN, f"{node!r:.80}", "a node of this region", "see `shoal get nodes`")
        return state

    def _is_alive(self, state: NodeState) -> bool:
        silent = self._clock.now() - state.heard_at
        return state.connected and silent <= TWIN_BEATS * self.fleet.timing.heartbeat_s


def _record(state: NodeState) -> NodeRecord:
    return NodeRecord(state.node, state.epoch, state.cordoned, state.last_seen, state.revoked, state.twins)


def _matters(before: NodeState, after: NodeState) -> bool:
    """Whether anything changed that decisions read, beside what changes with every beat."""
    return (
        before.reported != after.reported
        or before.sequence == 0
        or before.version != after.version
        or before.front_ready != after.front_ready
        or before.observed.keys() != after.observed.keys()
        or any(_state(before.observed[key]) != _state(after.observed[key]) for key in after.observed)
    )


def _state(observed: Observed) -> tuple[object, ...]:
    drained = observed.phase is Phase.DRAINING and observed.in_flight == 0
    return observed.phase, observed.code, observed.restarts, observed.measured, drained, observed.sessions == 0


def _phase_events(before: NodeState, after: NodeState) -> list[Event]:
    """Failures, by code; what goes well is told by the reconciler."""
    return [
        Event(observed.code, observed.assignment, observed.reason, f"agent {after.name}", after.name, observed.workload)
        for observed in after.observed.values()
        if observed.phase is Phase.FAILED
        and observed.code is not None
        and ((known := before.observed.get(observed.assignment)) is None or _state(known) != _state(observed))
    ]


def _quarantine_events(before: NodeState, after: NodeState) -> list[Event]:
    if before.quarantined == after.quarantined:
        return []
    code = Code.NODE_QUARANTINED if after.quarantined else "NODE_TRUSTED"
    return [Event(code, after.name, str(after.refusal or "its reports are sound again"), node=after.name)]


def _skew_events(before: NodeState | None, after: NodeState) -> list[Event]:
    if not after.is_skewed or (before is not None and before.is_skewed):
        return []
    way = "behind" if after.skew_s > 0 else "ahead"
    message = f"its clock is {show_seconds(abs(after.skew_s))} {way} of the coordinator's; nothing is decided by it"
    return [Event(Code.CLOCK_SKEW, after.name, message, node=after.name)]


def _liveness_event(change: LivenessChange) -> Event:
    return Event(
        f"NODE_{change.after.upper().replace('-', '_')}",
        change.node,
        f"{change.before} -> {change.after}, silent for {change.silent_s:.1f}s",
        node=change.node,
    )


def _conflict(node: str) -> ShoalError:
    return refuse(Code.CONFLICT, f"{node} changed meanwhile", "an unchanged node", "try again")
