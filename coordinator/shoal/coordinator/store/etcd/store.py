"""The store of a region, or of a federation, in etcd v3, under a prefix of its own.

    PREFIX/data/KEY          records
    PREFIX/guard/CLIENT/N    the last transaction that this client made in lane N
    PREFIX/leader            the leader (`election.py`)

A transaction without an answer must be neither repeated blindly nor reported as failed, because either could be wrong.
So each transaction also writes a token of its own to a guard key, on condition that the guard is as the client last saw
it. A repeated transaction fails on that condition if the first attempt was executed, and the token found there proves
it. After giving up, the client can later find out what happened, or prevent execution for good by writing another
token. etcd's revision is the store's: a record's is its `mod_revision`.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog

from shoal.coordinator.ports import (
    Compacted,
    StaleRevision,
    StoreChange,
    StoreOptions,
    StoreRecord,
    StoreSnapshot,
    Transaction,
)
from shoal.coordinator.store.etcd import options
from shoal.coordinator.store.etcd.election import EtcdElection
from shoal.coordinator.store.etcd.members import (
    NEEDS_LEADER,
    ClusterReplaced,
    EtcdMembers,
    OutcomeUnknown,
    at_revision,
    end_of,
    rollback_refusal,
)
from shoal.etcd import etcd_pb2
from shoal.types.codes import Code, Refusal, ShoalError, refuse

log: Final = structlog.get_logger("shoal.coordinator.store")
LANES: Final = 8
"""Concurrent transactions."""
PAGE: Final = 2000
"""Records in one answer of a scan."""
RETRY_S: Final = 0.1
"""Seconds between the end of a watch and the attempt at the next member."""
OPEN_TIMEOUT_S: Final = 20.0
"""Seconds for the first answer when the store is opened, because etcd may be starting too."""


@dataclass(slots=True)
class _Lane:
    """One guard key. At most one transaction at a time uses it."""

    # The guard key.
    guard: bytes
    # Revision of the guard as last seen; 0: it does not exist.
    revision: int = 0
    # Token of a transaction whose outcome is unknown; None: every outcome is known.
    token: bytes | None = None


class EtcdStore:
    """ports.Store for several coordinators at once. recovery: why the stored state is older than what was acknowledged.

    Once `stale` is set, the store takes no more writes; whoever caches its content opens it again and reads again. It
    is set when a write that was refused as unavailable turned out to have happened, or etcd was restored to an older
    state.
    """

    def __init__(self, members: EtcdMembers, root: str, client: str, lock: int, directory: Path) -> None:
        self.recovery: Refusal | None = None
        self.root = root
        self.members = members
        self.client = client
        self._directory = directory
        self._data = f"{root}/data/".encode()
        self._lock = lock
        self._closed = False
        self._lane_slots = asyncio.Semaphore(LANES)
        self._free_lanes = [_Lane(f"{root}/guard/{client}/{lane}".encode()) for lane in range(LANES)]
        self._unresolved_lanes: list[_Lane] = []
        self._resolving: asyncio.Future[None] | None = None

    @property
    def stale(self) -> asyncio.Event:
        return self.members.stale

    SETTINGS: Final = options.SETTINGS

    @classmethod
    async def from_options(cls, given: StoreOptions) -> "EtcdStore":
        """Raises ShoalError(FIELD_MISSING | FIELD_INVALID | TLS_REQUIRED | STORE_UNAVAILABLE | STORE_DENIED)."""
        found = options.EtcdOptions.parse(given)
        members = EtcdMembers.from_options(found)
        try:
            return await cls.open(given.directory, members, f"{found.prefix}/{given.scope}")
        except BaseException:
            await members.close()
            raise

    @classmethod
    async def open(cls, directory: Path, members: EtcdMembers, root: str) -> "EtcdStore":
        """directory: holds this client's name and the newest revision it saw; one process at a time. root: before every
        key.

        Raises ShoalError(STORE_UNAVAILABLE) when another process has the directory, or etcd does not answer;
        STORE_DENIED when it answers, and this coordinator's user has no right to what is under `root`.
        """
        lock = _lock(directory)
        try:
            store = cls(members, root, _client_of(directory), lock, directory)
            await store._load_guards()
        except BaseException:
            os.close(lock)
            raise
        return store

    def election(self, candidate: bytes) -> EtcdElection:
        """candidate: the value that other coordinators read while this one leads."""
        return EtcdElection(self.members, f"{self.root}/leader", self.client, candidate)

    async def read(self, key: str) -> StoreRecord | None:
        self._check_open()
        found = await self.members.range(etcd_pb2.RangeRequest(key=self._data + key.encode()))
        return self._record(found.kvs[0]) if found.kvs else None

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        """Reads at one revision, however many pages it takes."""
        self._check_open()
        start = max(self._data + prefix.encode(), self._data + after.encode() + b"\0" if after else b"")
        return (await self._read_consistent(start, end_of(self._data + prefix.encode()), limit)).records

    async def snapshot(self) -> StoreSnapshot:
        self._check_open()
        return await self._read_consistent(self._data, end_of(self._data), 0)

    async def _read_consistent(self, start: bytes, end: bytes, limit: int) -> StoreSnapshot:
        while True:
            try:
                return await self._pages(start, end, limit)
            except grpc.aio.AioRpcError as error:  # the scan's revision was compacted between two pages
                if error.code() is not grpc.StatusCode.OUT_OF_RANGE:
                    raise

    async def commit(self, transaction: Transaction) -> int:
        self._check_open()
        try:
            async with self._lane() as lane:
                return await self._commit_guarded(lane, self._compares(transaction), self._writes(transaction))
        except ShoalError as error:
            if error.code is not Code.STORE_FULL or transaction.puts:
                raise
        return await self._delete(transaction)

    async def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        """When a member fails, continues at another one, from the revision after the last one delivered."""
        self._check_open()
        key, told = self._data + prefix.encode(), after
        while True:
            member = self.members.current
            call = member.watch.Watch(None, metadata=NEEDS_LEADER)
            events: list[etcd_pb2.Event] = []
            try:
                create = etcd_pb2.WatchCreateRequest(
                    key=key, range_end=end_of(key), start_revision=told + 1, fragment=True
                )
                await call.write(etcd_pb2.WatchRequest(create_request=create))
                async for answer in call:
                    if answer.created and answer.header.revision < told:
                        # The watch would wait silently for a revision that only another history reaches.
                        self.stale.set()
                        raise ClusterReplaced(rollback_refusal(told, answer.header.revision))
                    if answer.compact_revision:
                        raise Compacted(await self._newest_revision())
                    events += answer.events
                    if answer.canceled:
                        break
                    if answer.fragment:
                        continue
                    # Deliver whole revisions, each once: a member may repeat what another one has delivered.
                    news = [self._change(event) for event in events if event.kv.mod_revision > told]
                    events = []
                    for change in news:
                        yield change
                    told = max(told, *(change.revision for change in news), 0)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # continues at another member
            finally:
                call.cancel()
            self._check_open()
            self.members.avoid(member)
            await asyncio.sleep(RETRY_S)

    async def backup(self) -> Path | None:
        """None: etcd keeps its own copies (`etcdctl snapshot save`). Saves the newest revision seen, so that the next
        start detects a cluster that was restored to an older state."""
        self._save_newest_revision()
        return None

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self.recovery is None:
                self._save_newest_revision()
            await self.members.close()
            os.close(self._lock)

    async def _load_guards(self) -> None:
        """Loads the guards and checks that etcd did not go back. Raises ShoalError(STORE_UNAVAILABLE |
        STORE_DENIED)."""
        guards = f"{self.root}/guard/{self.client}/".encode()
        try:
            found = await self.members.range(
                etcd_pb2.RangeRequest(key=guards, range_end=end_of(guards)), timeout_s=OPEN_TIMEOUT_S
            )
        except ShoalError as error:
            if error.code is not Code.STORE_DENIED:
                raise
            refusal = error.refusal
            wanted = f"one that may read and write {self.root}/"
            raise refuse(Code.STORE_DENIED, refusal.found, wanted, refusal.remedy) from error
        seen = {kv.key: kv.mod_revision for kv in found.kvs}
        for lane in self._free_lanes:
            lane.revision = seen.get(lane.guard, 0)
        noted = _saved_revision(self._directory)
        if noted > found.header.revision:
            self.recovery = rollback_refusal(noted, found.header.revision)

    def _save_newest_revision(self) -> None:
        """Writes a new file and renames it. If the disk refuses, the previous revision stays: a rollback that ends
        after that revision is then not detected, but nothing else breaks."""
        unfinished = self._directory / "newest.new"
        try:
            unfinished.write_text(f"{self.members.newest_revision}\n")
            unfinished.rename(self._directory / "newest")
        except OSError as error:
            log.error("revision_write_failed", folder=str(self._directory), error=str(error))

    async def _newest_revision(self) -> int:
        found = await self.members.range(etcd_pb2.RangeRequest(key=self._data))
        return found.header.revision

    async def _pages(self, start: bytes, end: bytes, limit: int) -> StoreSnapshot:
        records: list[StoreRecord] = []
        revision = 0
        while True:
            size = min(PAGE, limit - len(records)) if limit else PAGE
            page = await self.members.range(
                etcd_pb2.RangeRequest(key=start, range_end=end, limit=size, revision=revision)
            )
            records += map(self._record, page.kvs)
            revision = revision or page.header.revision
            if not page.more or len(records) == limit:
                return StoreSnapshot(revision, tuple(records))
            start = page.kvs[-1].key + b"\0"

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[_Lane]:
        """A free lane, once the outcome of every earlier transaction is known."""
        async with self._lane_slots:
            while self._unresolved_lanes:
                if self._resolving is None or self._resolving.done():
                    self._resolving = asyncio.ensure_future(self._resolve_lanes())
                await asyncio.shield(self._resolving)
            if self.stale.is_set():
                raise refuse(
                    Code.STORE_UNAVAILABLE,
                    "what this coordinator remembers is not what etcd holds",
                    "a coordinator that knows what is stored",
                    "it reads its state again by itself; try once more",
                )
            lane = self._free_lanes.pop()
            try:
                yield lane
            finally:
                (self._free_lanes if lane.token is None else self._unresolved_lanes).append(lane)

    async def _commit_guarded(
        self, lane: _Lane, compares: list[etcd_pb2.Compare], writes: list[etcd_pb2.RequestOp]
    ) -> int:
        """The revision of the commit. The lane keeps the token while the outcome is unknown."""
        token = secrets.token_bytes(8)
        while True:
            request = etcd_pb2.TxnRequest(
                compare=[at_revision(lane.guard, lane.revision), *compares],
                success=[_put(lane.guard, token), *writes],
                failure=[_get(lane.guard)],
            )
            answer = await self._txn(lane, token, request)
            if answer.succeeded:
                lane.revision = answer.header.revision
                return lane.revision
            found = answer.responses[0].response_range.kvs
            value, revision = (found[0].value, found[0].mod_revision) if found else (b"", 0)
            if value == token:
                lane.revision = revision
                return revision
            if revision == lane.revision:
                raise StaleRevision
            lane.revision = revision  # an earlier transaction of this lane was executed meanwhile

    async def _txn(self, lane: _Lane, token: bytes, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        lane.token = token
        try:
            answer = await self.members.txn(request)
        except OutcomeUnknown as doubt:
            refusal = doubt.refusal
            raise refuse(
                refusal.code,
                f"{refusal.found}; it is not known whether this write happened",
                refusal.asked,
                refusal.remedy,
            ) from doubt
        except (ShoalError, grpc.aio.AioRpcError):
            lane.token = None
            raise
        lane.token = None
        return answer

    async def _resolve_lanes(self) -> None:
        """Finds the outcome of transactions that got no answer. Raises ShoalError(STORE_UNAVAILABLE | STORE_FULL)."""
        while self._unresolved_lanes:
            lane = self._unresolved_lanes[-1]
            # Once the guard has changed, a request that is still in flight can no longer be executed.
            request = etcd_pb2.TxnRequest(
                compare=[at_revision(lane.guard, lane.revision)],
                success=[_put(lane.guard, secrets.token_bytes(8))],
                failure=[_get(lane.guard)],
            )
            answer = await self.members.txn(request)
            if answer.succeeded:
                lane.revision = answer.header.revision
            else:
                guard = answer.responses[0].response_range.kvs[0]
                lane.revision = guard.mod_revision
                if guard.value == lane.token:
                    self.stale.set()
            lane.token = None
            self._free_lanes.append(self._unresolved_lanes.pop())

    async def _delete(self, transaction: Transaction) -> int:
        """Deletes without a guard, because a guard is a write and a full etcd takes none. Repeating a delete does no
        harm."""
        request = etcd_pb2.TxnRequest(compare=self._compares(transaction), success=self._writes(transaction))
        answer = await self.members.txn(request)
        if answer.succeeded:
            return answer.header.revision
        raise StaleRevision

    def _compares(self, transaction: Transaction) -> list[etcd_pb2.Compare]:
        return [at_revision(self._data + key.encode(), revision) for key, revision in transaction.expect.items()]

    def _writes(self, transaction: Transaction) -> list[etcd_pb2.RequestOp]:
        deletes = dict.fromkeys(key for key in transaction.deletes if key not in transaction.puts)
        return [
            *(_put(self._data + key.encode(), value) for key, value in transaction.puts.items()),
            *(
                etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=self._data + key.encode()))
                for key in deletes
            ),
        ]

    def _record(self, kv: etcd_pb2.KeyValue) -> StoreRecord:
        return StoreRecord(kv.key.removeprefix(self._data).decode(), kv.value, kv.mod_revision)

    def _change(self, event: etcd_pb2.Event) -> StoreChange:
        kv = event.kv
        value = None if event.type == etcd_pb2.Event.DELETE else kv.value
        return StoreChange(kv.key.removeprefix(self._data).decode(), value, kv.mod_revision)

    def _check_open(self) -> None:
        if self._closed:
            raise refuse(Code.STORE_UNAVAILABLE, "the store is closed", "an open store", "start the coordinator")


def _put(key: bytes, value: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value))


def _get(key: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=key))


def _lock(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        raise refuse(
            Code.STORE_UNAVAILABLE, str(cause.strerror), "a directory of its own", "choose another --data-dir"
        ) from cause
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        os.close(lock)
        raise refuse(
            Code.STORE_UNAVAILABLE,
            "another process has the store open",
            "one coordinator a directory",
            "stop the other one",
        ) from cause
    return lock


def _client_of(directory: Path) -> str:
    """The name that this directory's guards have in etcd. Made once, so that the number of guards does not grow with
    each start."""
    path = directory / "client"
    if not path.exists():
        unfinished = directory / "client.new"
        unfinished.write_text(secrets.token_hex(8))
        unfinished.rename(path)
    return path.read_text()


def _saved_revision(directory: Path) -> int:
    path = directory / "newest"
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else 0
