"""What the store keeps of each node: its record, its receipts, its label grant, and how often it was lost."""

import base64
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.fleet.labels import ENTRY_LABEL, EVERY_TENANT, NO_LABEL_GRANT, LabelGrant
from shoal.coordinator.core.fleet.state import DuplicateIdentity, NodeState
from shoal.coordinator.ports import StaleRevision
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Node
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import UNKNOWN_TIME, Wall

NODES: Final = "nodes/"
RECEIPTS: Final = "receipts/"
GRANTS: Final = "grants/"
"""Label grants of each node, from its join token and from operators."""
CLAIMS: Final = "claims"
RECEIPTS_DELETED: Final = 1000
"""Receipts that one transaction deletes. An older version kept those of devices that were gone, however many, and a
transaction of etcd takes 10,240 operations."""


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
    duplicate: DuplicateIdentity | None = None
    # Labels as the node declares them. None: stored before tokens granted labels.
    declared: Mapping[str, str] | None = None
    # When the region first opened a session for this name. It stays for as long as there is a record: over new
    # sessions, restarts of either side, and a revocation after which the name joins again with a new token. A node that
    # an operator deletes, and that joins again, is new. 0: not known, because an older version wrote the record, at
    # first or after a rollback.
    joined_at: Wall = UNKNOWN_TIME


@dataclass(frozen=True, slots=True)
class Claims:
    """Input of the leases' claim: how often each node was lost."""

    # How often each node was lost; a node that was never lost is absent.
    given_up: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A receipt, with what its node signed, so that a reader can verify the signature again."""

    receipt: Receipt
    # The receipt as the node signed it, base64.
    content: str
    # Base64.
    signature: str


class NodeRepository:
    """Reads and writes them. A record is written against the revision that was read: of two sessions one is refused."""

    def __init__(self, context: RegionContext) -> None:
        self._store = context.store
        self._fence = context.fence
        self._revisions: dict[str, int] = {}
        self._declared_labels: dict[str, Mapping[str, str] | None] = {}
        """Labels as each node declares them; None: stored before tokens granted labels."""
        self._losses: dict[str, int] = {}
        """How often each node was lost: what ran only there may since have been placed elsewhere."""
        self._receipts: dict[str, set[str]] = {}
        """By node, the devices whose receipt is stored."""

    async def load(self) -> tuple[NodeState, ...]:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
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
                    joined_at=stored.joined_at,
                    receipts=receipts.get(name, {}),
                    revoked=stored.revoked,
                    duplicate=stored.duplicate,
                )
            )
        self._receipts = {name: {*devices} for name, devices in receipts.items()}
        claims = await self._store.read(CLAIMS)
        self._losses = {} if claims is None else dict(codec.load(Claims, claims.value).given_up)
        return tuple(states)

    def record_of(self, state: NodeState) -> NodeRecord:
        """The record of a node as it is now."""
        declared = self._declared_labels.get(state.name)
        return NodeRecord(
            state.node,
            state.epoch,
            state.cordoned,
            state.last_seen,
            state.revoked,
            state.duplicate,
            declared,
            state.joined_at,
        )

    def declared_labels(self, node: str) -> Mapping[str, str]:
        return self._declared_labels.get(node) or {}

    def losses(self, node: str) -> int:
        """How often the node was lost."""
        return self._losses.get(node, 0)

    async def save(self, stored: NodeRecord, *events: LogEvent, grant: LabelGrant | None = None) -> None:
        """Deletes the receipts of devices that the node no longer has. grant: to store with it. Raises StaleRevision,
        ShoalError(STORE_FULL | ..).
        """
        name = stored.node.name
        key = NODES + name
        puts = {key: codec.dump(stored)} | ({GRANTS + name: codec.dump(grant)} if grant is not None else {})
        devices = self._receipts.get(name, set())
        gone = sorted(devices - {device.name for device in stored.node.devices})[:RECEIPTS_DELETED]
        try:
            self._revisions[name] = await self._fence.commit(
                puts, deletes=_receipt_keys(name, gone), expect={key: self._revisions.get(name, 0)}, events=events
            )
        except StaleRevision:
            await self._read_revision(name)
            raise
        self._declared_labels[name] = stored.declared
        devices.difference_update(gone)

    async def _read_revision(self, node: str) -> None:
        """Of its record as it is stored: a write whose answer was lost may have taken effect, and none after it would
        succeed. Raises ShoalError(STORE_UNAVAILABLE)."""
        record = await self._store.read(NODES + node)
        self._revisions[node] = 0 if record is None else record.revision

    async def save_as_operator(self, stored: NodeRecord, event: LogEvent, grant: LabelGrant | None = None) -> None:
        """As `save`. Raises ShoalError(CONFLICT | STORE_FULL | ..)."""
        try:
            await self.save(stored, event, grant=grant)
        except StaleRevision as cause:
            raise _conflict(stored.node.name) from cause

    async def save_receipts(self, node: str, signed: Iterable[SignedReceipt], event: LogEvent) -> None:
        """Raises ShoalError(STORE_FULL | ..)."""
        records = {
            each.receipt.device: SignedRecord(
                each.receipt,
                base64.b64encode(each.content).decode(),
                base64.b64encode(each.signature).decode(),
            )
            for each in signed
        }
        # Counted before: after a timeout they may be stored all the same.
        self._receipts.setdefault(node, set()).update(records)
        await self._fence.commit(
            {f"{RECEIPTS}{node}/{device}": codec.dump(record) for device, record in records.items()}, events=[event]
        )

    async def count_losses(self, nodes: Collection[str]) -> None:
        """Counts each of the nodes as lost once more, in memory in any case. Raises StaleRevision,
        ShoalError(STORE_FULL | ..).
        """
        self._losses.update({node: self._losses.get(node, 0) + 1 for node in nodes})
        await self._fence.commit({CLAIMS: codec.dump(Claims(self._losses))})

    async def delete(self, state: NodeState, event: LogEvent) -> int:
        """All of a node but its losses. Raises ShoalError(CONFLICT | STORE_FULL | ..)."""
        node = state.name
        devices = self._receipts.get(node, set())
        while len(devices) > RECEIPTS_DELETED:  # those of devices that are gone come first
            first = sorted(devices, key=lambda device: (device in state.receipts, device))[:RECEIPTS_DELETED]
            await self._fence.commit({}, deletes=_receipt_keys(node, first))
            devices.difference_update(first)
        keys = (NODES + node, GRANTS + node, *_receipt_keys(node, devices))
        try:
            revision = await self._fence.commit(
                {}, deletes=keys, expect={NODES + node: self._revisions[node]}, events=[event]
            )
        except StaleRevision as cause:
            await self._read_revision(node)
            raise _conflict(node) from cause
        self._revisions.pop(node, None)
        self._declared_labels.pop(node, None)
        self._receipts.pop(node, None)
        return revision

    async def grant_of(self, node: str, known: NodeState | None) -> tuple[LabelGrant, bool]:
        """The node's label grant, and False if it must still be stored. A node that was stored before tokens granted
        labels keeps the labels that it had.

        Raises ShoalError.
        """
        found = await self._store.read(GRANTS + node)
        if found is not None:
            return codec.load(LabelGrant, found.value), True
        if known is not None and node in self._declared_labels and self._declared_labels[node] is None:
            return LabelGrant(known.node.labels), False
        return NO_LABEL_GRANT, True


def _receipt_keys(node: str, devices: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{RECEIPTS}{node}/{device}" for device in devices)


def _with_all_labels(node: Node) -> Node:
    """The node as before tokens granted labels: all declared labels apply, and every tenant's clients may call it."""
    labels = {ENTRY_LABEL: EVERY_TENANT, **node.labels}
    return replace(node, labels=labels)


def _conflict(node: str) -> ShoalError:
    return refuse(Code.CONFLICT, f"{node} changed meanwhile", "an unchanged node", "try again")
