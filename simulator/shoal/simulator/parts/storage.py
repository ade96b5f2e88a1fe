"""State that must survive: the coordinator's store and the agent's journal on a simulated disk, and models by digest.

They keep the promises of their ports as the real adapters do. Bytes are checksummed, flushed, and only then
acknowledged. Files are replaced by write, flush, rename, and a flush of the directory.
"""

import asyncio
import pickle
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from enum import StrEnum

from shoal.coordinator.ports import StaleRevision, StoreChange, StoreRecord, Transaction
from shoal.simulator.parts.network import COORDINATOR, SimNetwork, short_digest
from shoal.simulator.world.disk import SimDisk
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.assignment import Assignment, DesiredSet
from shoal.types.codes import Code, refuse
from shoal.types.link import Receipts
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Bytes
from shoal.wire import nouns

_LOG = "store.log"


class CommitMoment(StrEnum):
    """Moment of a coordinator's step: BEFORE it is written, AFTER that, and once its effects are EFFECTED."""

    BEFORE = "before"
    AFTER = "after"
    EFFECTED = "effected"


CommitObserver = Callable[[CommitMoment, Transaction], None]


def ignore_commit(moment: CommitMoment, transaction: Transaction) -> None:
    return None


def frame(content: bytes) -> bytes:
    """Prefix length and checksum, so that a torn write is detected."""
    return len(content).to_bytes(4, "big") + zlib.crc32(content).to_bytes(4, "big") + content


def unframe(data: bytes, offset: int) -> tuple[bytes, int] | None:
    """(the framed content at `offset`, where the next frame begins); None if it is torn or absent."""
    head = data[offset : offset + 8]
    size = int.from_bytes(head[:4], "big")
    content = data[offset + 8 : offset + 8 + size]
    if len(head) < 8 or len(content) < size or zlib.crc32(content) != int.from_bytes(head[4:], "big"):
        return None
    return content, offset + 8 + size


class SimStore:
    """Implements the Store port: a log of transactions on the coordinator's disk, replayed when a process opens it."""

    def __init__(
        self, world: SimWorld, process: SimProcess, disk: SimDisk, on_commit: CommitObserver = ignore_commit
    ) -> None:
        """on_commit: called with each transaction before it is written, and again after that but before the
        acknowledgement."""
        self._world = world
        self._process = process
        self._disk = disk
        self._on_commit = on_commit
        self._records: dict[str, StoreRecord] = {}
        self._changes: list[StoreChange] = []
        self._changed = asyncio.Event()
        self._one_writer = asyncio.Lock()
        self._revision = 0
        self.unavailable = False
        self._recover()

    async def read(self, key: str) -> StoreRecord | None:
        await self._step(f"read {key}")
        return self._records.get(key)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        await self._step(f"scan {prefix}")
        keys = sorted(key for key in self._records if key.startswith(prefix) and key > after)
        return tuple(self._records[key] for key in (keys[:limit] if limit else keys))

    async def commit(self, transaction: Transaction) -> int:
        self._on_commit(CommitMoment.BEFORE, transaction)
        await self._step("commit")
        # As if a thread wrote it: cancelling the caller meanwhile undoes nothing.
        writing = asyncio.ensure_future(self._commit(transaction))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        revision = await asyncio.shield(writing)
        await self._process.wait_resumed()
        self._on_commit(CommitMoment.AFTER, transaction)
        self._process.gate("committed")
        self._world.record("store.acked", store=self._disk.name, revision=revision)
        return revision

    async def _commit(self, transaction: Transaction) -> int:
        async with self._one_writer:
            for key, revision in transaction.expect.items():
                held = self._records.get(key)
                if (held.revision if held else 0) != revision:
                    raise StaleRevision(key)
            revision = self._revision + 1
            puts = dict(transaction.puts)
            self._world.record(
                "store.commit",
                store=self._disk.name,
                revision=revision,
                puts=tuple((key, short_digest(value)) for key, value in sorted(puts.items())),
                deletes=tuple(transaction.deletes),
            )
            await self._write(frame(pickle.dumps((revision, puts, tuple(transaction.deletes)))))
            self._apply(revision, puts, transaction.deletes)
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        seen = 0
        while True:
            while seen < len(self._changes):
                change = self._changes[seen]
                seen += 1
                if change.revision > after and change.key.startswith(prefix):
                    self._process.gate(f"watch {prefix}")
                    yield change
            await self._changed.wait()

    async def close(self) -> None:
        return None

    def contents(self) -> Mapping[str, bytes]:
        """Everything committed, for the invariants; not part of the port."""
        return {key: record.value for key, record in self._records.items()}

    async def _write(self, data: bytes) -> None:
        """The transaction is acknowledged only after this returns."""
        self._disk.append(self._process, _LOG, data)
        await self._disk.flush(self._process, _LOG)

    async def _step(self, where: str) -> None:
        await self._process.wait_resumed()
        self._process.gate(where)
        if self.unavailable:
            await asyncio.sleep(0.01)
            raise refuse(Code.STORE_UNAVAILABLE, "the store does not answer", "a store", "it is tried again by itself")
        await asyncio.sleep(0)
        self._process.check()

    def _apply(self, revision: int, puts: Mapping[str, bytes], deletes: tuple[str, ...]) -> None:
        self._revision = revision
        for key, value in puts.items():
            self._records[key] = StoreRecord(key, value, revision)
            self._changes.append(StoreChange(key, value, revision))
        for key in deletes:
            self._records.pop(key, None)
            self._changes.append(StoreChange(key, None, revision))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _recover(self) -> None:
        log = self._disk.read(_LOG)
        if log is None:
            return
        offset = 0
        while (found := unframe(log, offset)) is not None:
            content, offset = found
            self._apply(*pickle.loads(content))
        if offset < len(log):
            self._disk.truncate(self._process, _LOG, offset)
        self._world.record(
            "store.recovered",
            store=self._disk.name,
            revision=self._revision,
            contents=tuple((key, short_digest(record.value)) for key, record in sorted(self._records.items())),
        )


async def format_store(process: SimProcess, disk: SimDisk) -> None:
    """Create an empty, flushed store, as its first opening leaves it."""
    disk.append(process, _LOG, b"")
    await disk.flush(process, _LOG)
    await disk.flush_names(process)


class SimAgentJournal:
    """Implements the agent's Journal port."""

    def __init__(self, world: SimWorld, process: SimProcess, disk: SimDisk, node: str) -> None:
        self._world = world
        self._process = process
        self._disk = disk
        self._node = node
        self._one_writer = asyncio.Lock()

    async def load(self) -> DesiredSet | None:
        self._process.gate("load journal")
        content = self._read("desired")
        if content is not None:
            await self._disk.flush_names(self._process)
        desired = None if content is None else nouns.decode(DesiredSet, content)
        self._world.record("journal.loaded", node=self._node, **_desired_facts(desired))
        return desired

    async def save(self, desired: DesiredSet) -> None:
        async with self._one_writer:
            await self._replace("desired", nouns.encode(desired))
        self._world.record("journal.saved", node=self._node, **_desired_facts(desired))

    async def load_receipts(self) -> tuple[SignedReceipt, ...]:
        self._process.gate("load receipts")
        content = self._read("receipts")
        return () if content is None else nouns.decode(Receipts, content).receipts

    async def save_receipts(self, receipts: tuple[SignedReceipt, ...]) -> None:
        async with self._one_writer:
            await self._replace("receipts", nouns.encode(Receipts(receipts)))

    def _read(self, name: str) -> bytes | None:
        for candidate in (name, f"{name}.previous"):
            data = self._disk.read(candidate)
            found = None if data is None else unframe(data, 0)
            if found is not None:
                return found[0]
        return None

    async def _replace(self, name: str, content: bytes) -> None:
        disk, process = self._disk, self._process
        disk.overwrite(process, f"{name}.new", frame(content))
        await disk.flush(process, f"{name}.new")
        if disk.read(name) is not None:
            disk.rename(process, name, f"{name}.previous")
        disk.rename(process, f"{name}.new", name)
        await disk.flush_names(process)


def _desired_facts(desired: DesiredSet | None) -> dict[str, object]:
    if desired is None:
        return {"version": None, "assignments": (), "verifying": (), "content": ""}
    version = desired.version
    return {
        "version": (version.history, version.term, version.generation),
        "assignments": tuple(asked.id for asked in desired.assignments),
        "verifying": tuple(
            asked.id
            for asked in desired.assignments
            if asked.verification is not None and not asked.verification.beside
        ),
        "content": short_digest(nouns.encode(desired)),
    }


class SimModels:
    """Implements the coordinator's Blobs and Inspector ports: profiles by digest, without any bytes."""

    def __init__(self, profiles: Mapping[str, ModelProfile]) -> None:
        self.profiles = dict(profiles)

    async def stat(self, digest: str) -> Bytes | None:
        profile = self.profiles.get(digest)
        return None if profile is None else profile.size_bytes

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        profile = self.profiles.get(digest)
        if profile is None:
            raise refuse(Code.MODEL_UNKNOWN, digest, "a model that was pushed", "push it first")
        return profile

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        raise NotImplementedError("nobody pushes samples in a simulation")

    def read(self, digest: str, offset: int) -> AsyncIterator[bytes]:
        raise NotImplementedError("agents of a simulation fetch through their Cache")

    def path(self, digest: str) -> str:
        return digest

    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        async for _ in chunks:
            pass
        return digest

    async def digests(self) -> tuple[str, ...]:
        return ()

    async def delete(self, digest: str, is_unrecorded: Callable[[], Awaitable[bool]]) -> None:
        return None


class SimRecordingSink:
    """Implements the agent's port for recordings."""

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        raise NotImplementedError("no scenario verifies against a reference")


class SimModelCache:
    """Implements the agent's Cache port: fetching takes time and needs the coordinator.

    cached_models: digest -> whether the bytes on the node's disk are intact.
    """

    def __init__(
        self,
        process: SimProcess,
        network: SimNetwork,
        node: str,
        disk: SimDisk,
        cached_models: dict[str, bool],
        rng: Rng,
    ) -> None:
        self._process = process
        self._network = network
        self._node = node
        self._disk = disk
        self._cached_models = cached_models
        self._rng = rng

    async def admit(self, asked: Assignment) -> None:
        """Admits every model: nobody signs models here."""

    async def ensure(self, digest: str, size: Bytes) -> str:
        self._process.gate("ensure")
        if digest not in self._cached_models:
            await asyncio.sleep(self._rng.uniform(0.02, 0.1) + size / 100e6)
            self._process.gate("fetched")
            listener = self._network.listener
            there = self._network.is_open_both_ways(self._node, COORDINATOR)
            if listener is None or not there:
                raise refuse(Code.FETCH_FAILED, "the coordinator cannot be reached", digest, "it is tried again")
            if self._disk.full:
                raise refuse(Code.DISK_FULL, "no room in the cache", digest, "free some space")
            self._cached_models[digest] = True
        return f"/cache/{digest}"

    async def discard(self, digest: str) -> bool:
        self._process.gate("discard")
        if self._cached_models.get(digest, True):
            return False  # it is not there, or sound
        del self._cached_models[digest]
        return True

    async def collect(self, pinned: frozenset[str]) -> tuple[str, ...]:
        self._process.gate("collect")
        return ()
