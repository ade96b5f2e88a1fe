"""The truth of a region, or of a federation, in etcd v3, under a prefix of its own.

    PREFIX/data/KEY          what is stored
    PREFIX/guard/CLIENT/N    the last transaction that this client made in lane N
    PREFIX/leader            who leads (`election.py`)

A transaction whose answer was lost must be neither repeated blindly nor given up: both would tell somebody an untruth.
So each one also writes a token of its own to a guard key, on the condition that the guard is as the client saw it last.
Repeated, it then fails on that condition if it had been carried out, and the token that is found tells so; one that
was given up can be told apart later, or kept from ever happening, by writing another token. etcd's revision is the
store's: a record's is its `mod_revision`.
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

from shoal.coordinator.ports import Change, Compacted, Record, Snapshot, StaleRevision, StoreOptions, Transaction
from shoal.coordinator.store.etcd.election import EtcdElection
from shoal.coordinator.store.etcd.members import NEEDS_LEADER, Doubtful, Members, Pem, Replaced, is_at, went_back
from shoal.etcd import etcd_pb2
from shoal.types.codes import Code, Refusal, ShoalError, refuse

log: Final = structlog.get_logger("shoal.coordinator.store")
LANES: Final = 8
"""Transactions at once."""
PAGE: Final = 2000
"""Records in one answer of a scan."""
AGAIN_S: Final = 0.1
"""Between a watch that ended and the next member."""
FIRST_S: Final = 20.0
"""For the first answer, when the store is opened: etcd may be starting too."""


@dataclass(slots=True)
class _Lane:
    """revision: the guard's, as it was seen last. token: of a transaction of which it is not known what became."""

    guard: bytes
    revision: int = 0
    token: bytes | None = None


class EtcdStore:
    """ports.Store, for several coordinators at once. recovery: why what is there is older than what was acknowledged.

    Once `outdated` is set (a write that was refused as unavailable turned out to have happened, or etcd was put back to
    an older state), whoever remembers things by this store opens it anew and reads them again; it takes no more writes.
    """

    def __init__(self, members: Members, root: str, client: str, lock: int, directory: Path) -> None:
        self.recovery: Refusal | None = None
        self.root = root
        self.members = members
        self.client = client
        self._directory = directory
        self._data = f"{root}/data/".encode()
        self._lock = lock
        self._closed = False
        self._places = asyncio.Semaphore(LANES)
        self._free = [_Lane(f"{root}/guard/{client}/{lane}".encode()) for lane in range(LANES)]
        self._doubted: list[_Lane] = []
        self._settling: asyncio.Future[None] | None = None

    @property
    def outdated(self) -> asyncio.Event:
        return self.members.outdated

    @classmethod
    async def configured(cls, options: StoreOptions) -> "EtcdStore":
        """Raises ShoalError(FIELD_MISSING | FIELD_INVALID | STORE_UNAVAILABLE)."""
        if not options.endpoints:
            raise refuse(Code.FIELD_MISSING, "no --etcd-endpoints", "HOST:PORT,...", "name the members of the cluster")
        ca, certificate, key = options.ca, options.certificate, options.key
        if ca is None or certificate is None or key is None:
            raise refuse(
                Code.TLS_REQUIRED,
                "etcd without certificates",
                "--etcd-ca, --etcd-cert and --etcd-key",
                "run etcd with --client-cert-auth, and give this coordinator a certificate of its CA",
            )
        try:
            members = Members(
                options.endpoints, lambda: Pem(ca.read_bytes(), certificate.read_bytes(), key.read_bytes())
            )
        except OSError as cause:
            found = f"{cause.filename}: {cause.strerror}"
            raise refuse(Code.FIELD_INVALID, found, "PEM files that can be read", "see --etcd-ca") from cause
        try:
            return await cls.open(options.directory, members, f"{options.prefix}/{options.scope}")
        except BaseException:
            await members.close()
            raise

    @classmethod
    async def open(cls, directory: Path, members: Members, root: str) -> "EtcdStore":
        """directory: holds this client's name and what it saw last; one process at a time. root: before every key.

        Raises ShoalError(STORE_UNAVAILABLE) when another process has the directory, or etcd does not answer.
        """
        lock = _lock(directory)
        try:
            store = cls(members, root, _client_of(directory), lock, directory)
            await store._begin()
        except BaseException:
            os.close(lock)
            raise
        return store

    def election(self, candidate: bytes) -> EtcdElection:
        """candidate: what others are told of this one when it leads."""
        return EtcdElection(self.members, f"{self.root}/leader", self.client, candidate)

    async def read(self, key: str) -> Record | None:
        self._check_open()
        found = await self.members.range(etcd_pb2.RangeRequest(key=self._data + key.encode()))
        return self._record(found.kvs[0]) if found.kvs else None

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        """At one revision, however many pages it takes."""
        self._check_open()
        start = max(self._data + prefix.encode(), self._data + after.encode() + b"\0" if after else b"")
        return (await self._at_once(start, _end_of(self._data + prefix.encode()), limit)).records

    async def snapshot(self) -> Snapshot:
        self._check_open()
        return await self._at_once(self._data, _end_of(self._data), 0)

    async def _at_once(self, start: bytes, end: bytes, limit: int) -> Snapshot:
        while True:
            try:
                return await self._pages(start, end, limit)
            except grpc.aio.AioRpcError as error:  # its revision was compacted between two pages
                if error.code() is not grpc.StatusCode.OUT_OF_RANGE:
                    raise

    async def commit(self, transaction: Transaction) -> int:
        self._check_open()
        try:
            async with self._lane() as lane:
                return await self._guarded(lane, self._compares(transaction), self._writes(transaction))
        except ShoalError as error:
            if error.code is not Code.STORE_FULL or transaction.puts:
                raise
        return await self._delete(transaction)

    async def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """Goes on at another member, from the revision after the last one told, when one fails."""
        self._check_open()
        key, told = self._data + prefix.encode(), after
        while True:
            member = self.members.preferred
            call = member.watch.Watch(None, metadata=NEEDS_LEADER)
            events: list[etcd_pb2.Event] = []
            try:
                create = etcd_pb2.WatchCreateRequest(
                    key=key, range_end=_end_of(key), start_revision=told + 1, fragment=True
                )
                await call.write(etcd_pb2.WatchRequest(create_request=create))
                async for answer in call:
                    if answer.created and answer.header.revision < told:
                        # It waits, without a word, for a revision that another history would reach.
                        self.outdated.set()
                        raise Replaced(went_back(told, answer.header.revision))
                    if answer.compact_revision:
                        raise Compacted(await self._newest())
                    events += answer.events
                    if answer.canceled:
                        break
                    if answer.fragment:
                        continue
                    # Whole revisions only, and none again: a member may repeat what another one has told.
                    news = [self._change(event) for event in events if event.kv.mod_revision > told]
                    events = []
                    for change in news:
                        yield change
                    told = max(told, *(change.revision for change in news), 0)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # another member goes on
            finally:
                call.cancel()
            self._check_open()
            self.members.avoid(member)
            await asyncio.sleep(AGAIN_S)

    async def backup(self) -> Path | None:
        """Nothing: etcd keeps its own copies (`etcdctl snapshot save`). What was seen last is noted, so that a cluster
        that was put back is known at the next start."""
        self._note()
        return None

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self.recovery is None:
                self._note()
            await self.members.close()
            os.close(self._lock)

    async def _begin(self) -> None:
        """The guards as they are; whether etcd is the one that it was. Raises ShoalError(STORE_UNAVAILABLE)."""
        guards = f"{self.root}/guard/{self.client}/".encode()
        found = await self.members.range(
            etcd_pb2.RangeRequest(key=guards, range_end=_end_of(guards)), patience_s=FIRST_S
        )
        seen = {kv.key: kv.mod_revision for kv in found.kvs}
        for lane in self._free:
            lane.revision = seen.get(lane.guard, 0)
        noted = _noted(self._directory)
        if noted > found.header.revision:
            self.recovery = went_back(noted, found.header.revision)

    def _note(self) -> None:
        """Written whole: a name of its own, then renamed. Where the disk takes nothing the one before stands: an etcd
        that was put back by less than what is since is not known, and nothing else ends by that."""
        unfinished = self._directory / "newest.new"
        try:
            unfinished.write_text(f"{self.members.newest}\n")
            unfinished.rename(self._directory / "newest")
        except OSError as error:
            log.error("newest revision not noted", directory=str(self._directory), error=str(error))

    async def _newest(self) -> int:
        found = await self.members.range(etcd_pb2.RangeRequest(key=self._data))
        return found.header.revision

    async def _pages(self, start: bytes, end: bytes, limit: int) -> Snapshot:
        records: list[Record] = []
        revision = 0
        while True:
            size = min(PAGE, limit - len(records)) if limit else PAGE
            page = await self.members.range(
                etcd_pb2.RangeRequest(key=start, range_end=end, limit=size, revision=revision)
            )
            records += map(self._record, page.kvs)
            revision = revision or page.header.revision
            if not page.more or len(records) == limit:
                return Snapshot(revision, tuple(records))
            start = page.kvs[-1].key + b"\0"

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[_Lane]:
        """A free one, once it is known what became of every transaction before."""
        async with self._places:
            while self._doubted:
                if self._settling is None or self._settling.done():
                    self._settling = asyncio.ensure_future(self._settle())
                await asyncio.shield(self._settling)
            if self.outdated.is_set():
                raise refuse(
                    Code.STORE_UNAVAILABLE,
                    "what this coordinator remembers is not what etcd holds",
                    "a coordinator that knows what is stored",
                    "it reads its state again by itself; try once more",
                )
            lane = self._free.pop()
            try:
                yield lane
            finally:
                (self._free if lane.token is None else self._doubted).append(lane)

    async def _guarded(self, lane: _Lane, compares: list[etcd_pb2.Compare], writes: list[etcd_pb2.RequestOp]) -> int:
        """The revision. The lane keeps the token as long as nobody knows what became of it."""
        token = secrets.token_bytes(8)
        while True:
            request = etcd_pb2.TxnRequest(
                compare=[is_at(lane.guard, lane.revision), *compares],
                success=[_put(lane.guard, token), *writes],
                failure=[_look(lane.guard)],
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
            lane.revision = revision  # an earlier transaction of this lane came through meanwhile

    async def _txn(self, lane: _Lane, token: bytes, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        lane.token = token
        try:
            answer = await self.members.txn(request)
        except Doubtful as doubt:
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

    async def _settle(self) -> None:
        """What became of transactions that got no answer. Raises ShoalError(STORE_UNAVAILABLE | STORE_FULL)."""
        while self._doubted:
            lane = self._doubted[-1]
            # Once the guard is another one, what is still on its way can happen no more.
            request = etcd_pb2.TxnRequest(
                compare=[is_at(lane.guard, lane.revision)],
                success=[_put(lane.guard, secrets.token_bytes(8))],
                failure=[_look(lane.guard)],
            )
            answer = await self.members.txn(request)
            if answer.succeeded:
                lane.revision = answer.header.revision
            else:
                guard = answer.responses[0].response_range.kvs[0]
                lane.revision = guard.mod_revision
                if guard.value == lane.token:
                    self.outdated.set()
            lane.token = None
            self._free.append(self._doubted.pop())

    async def _delete(self, transaction: Transaction) -> int:
        """Without a guard, which is a write, and a full etcd takes none: to delete what is gone is to delete it."""
        request = etcd_pb2.TxnRequest(compare=self._compares(transaction), success=self._writes(transaction))
        answer = await self.members.txn(request)
        if answer.succeeded:
            return answer.header.revision
        raise StaleRevision

    def _compares(self, transaction: Transaction) -> list[etcd_pb2.Compare]:
        return [is_at(self._data + key.encode(), revision) for key, revision in transaction.expect.items()]

    def _writes(self, transaction: Transaction) -> list[etcd_pb2.RequestOp]:
        deletes = dict.fromkeys(key for key in transaction.deletes if key not in transaction.puts)
        return [
            *(_put(self._data + key.encode(), value) for key, value in transaction.puts.items()),
            *(
                etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=self._data + key.encode()))
                for key in deletes
            ),
        ]

    def _record(self, kv: etcd_pb2.KeyValue) -> Record:
        return Record(kv.key.removeprefix(self._data).decode(), kv.value, kv.mod_revision)

    def _change(self, event: etcd_pb2.Event) -> Change:
        kv = event.kv
        value = None if event.type == etcd_pb2.Event.DELETE else kv.value
        return Change(kv.key.removeprefix(self._data).decode(), value, kv.mod_revision)

    def _check_open(self) -> None:
        if self._closed:
            raise refuse(Code.STORE_UNAVAILABLE, "the store is closed", "an open store", "start the coordinator")


def _end_of(prefix: bytes) -> bytes:
    """The first key that is not under `prefix`, of which no byte is 0xFF (keys are UTF-8)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _put(key: bytes, value: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value))


def _look(key: bytes) -> etcd_pb2.RequestOp:
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
    """The name of this directory's guards: made once, so that they do not grow in number with each start."""
    path = directory / "client"
    if not path.exists():
        unfinished = directory / "client.new"
        unfinished.write_text(secrets.token_hex(8))
        unfinished.rename(path)
    return path.read_text()


def _noted(directory: Path) -> int:
    path = directory / "newest"
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else 0
