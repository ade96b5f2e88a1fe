"""One suite for every store behind ports.Store."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from harness.builders.coordinator_core import node
from harness.fakes.region import CountingIds, KnownModels, RecordedLinks, SteppedClock
from harness.models.push import chunks_of
from harness.models.synthetic import digest_of
from harness.servers.etcd import Etcd, etcd
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.controllers.identity.enrolment import Enrolment
from shoal.coordinator.controllers.log.events import AUDIT, EventLog, first_broken_entry
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.controllers.workloads.migrations import MIGRATIONS
from shoal.coordinator.controllers.workloads.move_queue import MoveQueueRepository
from shoal.coordinator.core.migration.model import ReplicaPlace
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.main.options import parser_of, store_kinds, store_options_of, store_settings_of
from shoal.coordinator.ports import Compacted, OpenStore, StaleRevision, StoreChange, StoreOptions, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.link import Hello, Welcome
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Elapsed, Wall
from shoal.types.workload import WorkloadKey

CHANGES_KEPT = 16

Opener = Callable[[Path], Awaitable[OpenStore]]


@dataclass(frozen=True)
class Backend:
    """One kind of store. can_forget: `forget` makes it drop all changes but the newest CHANGES_KEPT."""

    open: Opener
    forget: Callable[[], None] = lambda: None
    can_forget: bool = True


AS_USER = "etcd, as the user of a region"
INSTALLED = sorted(entry.name for entry in entry_points(group="shoal.stores"))
BACKENDS = (*INSTALLED, AS_USER)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture(scope="module")
def cluster_of_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """That of somebody who may read and write one region's part of it."""
    with etcd(tmp_path_factory.mktemp("etcd"), scopes=("region/eu", "region/us")) as found:
        yield found


def from_environment(name: str) -> Backend:
    """A kind of store that this repository does not know, as a coordinator opens it by its SHOAL_* variables."""
    kind = store_kinds()[name]
    parsed = parser_of(os.environ).parse_args(["run", "--store", name])

    async def open_one(directory: Path) -> OpenStore:
        scope = f"region/{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
        return await kind.from_options(StoreOptions(directory, scope, store_settings_of(parsed, name)))

    return Backend(open_one, can_forget=False)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    match request.param:
        case "sqlite":  # it forgets by itself
            return Backend(partial(SqliteStore.open, changes_kept=CHANGES_KEPT))
        case "etcd":
            found: Etcd = request.getfixturevalue("cluster")
        case name if name == AS_USER:
            found = request.getfixturevalue("cluster_of_users")
        case name:
            return from_environment(name)
    return Backend(found.open, lambda: found.compact(CHANGES_KEPT))


@pytest.fixture
def opener(backend: Backend) -> Opener:
    return backend.open


@pytest.mark.parametrize("name", INSTALLED)
def test_a_kind_of_store_declares_its_settings_as_flags_and_variables(name: str) -> None:
    settings = [each.name for each in store_kinds()[name].SETTINGS]
    flags = [text for each in settings for text in (f"--{name}-{each}", f"flag {each}")]
    parsed = parser_of({}).parse_args(["run", "--store", name, *flags])
    assert store_options_of(parsed).settings == {each: f"flag {each}" for each in settings}
    variables = {f"SHOAL_{name}_{each}".upper().replace("-", "_"): each for each in settings}
    assert store_options_of(parser_of(variables).parse_args(["run", "--store", name])).settings == {
        each: each for each in settings
    }


@asynccontextmanager
async def open_store(opener: Opener, directory: Path) -> AsyncIterator[OpenStore]:
    store = await opener(directory)
    try:
        yield store
    finally:
        await store.close()


async def test_reads_what_was_committed(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        assert await store.read("nodes/a") is None
        first = await store.commit(Transaction({"nodes/a": b"1", "nodes/b": b"\0\xff"}))
        second = await store.commit(Transaction({"nodes/a": b"2"}))
        assert second > first > 0
        found = await store.read("nodes/a")
        assert found is not None
        assert (found.key, found.value, found.revision) == ("nodes/a", b"2", second)
        assert [record.revision for record in await store.scan("nodes/")] == [second, first]


async def test_scans_in_order_in_pages(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        keys = [f"events/{number:04}" for number in range(50)]
        await store.commit(Transaction({key: key.encode() for key in [*keys, "event", "events0", "f"]}))
        assert [record.key for record in await store.scan("events/")] == keys
        found: list[str] = []
        while page := await store.scan("events/", after=found[-1] if found else "", limit=7):
            assert len(page) <= 7
            found += [record.key for record in page]
        assert found == keys


async def test_a_snapshot_is_everything_at_one_revision_while_others_write(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        revision = await store.commit(
            Transaction({f"pair/{side}/{number}": b"0" for side in "ab" for number in range(8)})
        )

        async def write(number: int) -> None:
            await store.commit(Transaction({f"pair/{side}/{number}": b"1" for side in "ab"}))

        writing = [asyncio.ensure_future(write(number)) for number in range(8)]
        found = await store.snapshot()
        await asyncio.gather(*writing)
        held = {record.key: record.value for record in found.records}
        assert list(held) == sorted(held)
        assert all(held[f"pair/a/{number}"] == held[f"pair/b/{number}"] for number in range(8)), "no half of a write"
        assert found.revision >= max(record.revision for record in found.records) >= revision
        later = await store.snapshot()
        assert set(later.records) == set(await store.scan(""))
        await store.commit(Transaction(deletes=("pair/a/0",)))
        assert (await store.snapshot()).revision > later.revision, "a delete is a revision too"


async def test_a_stale_expectation_changes_nothing(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        revision = await store.commit(Transaction({"a": b"1"}))
        await store.commit(Transaction({"a": b"2"}, expect={"a": revision}))
        for expect in ({"a": revision}, {"a": 0}, {"b": 7}):
            with pytest.raises(StaleRevision):
                await store.commit(Transaction({"a": b"3", "b": b"3"}, deletes=("a",), expect=expect))
        assert [(record.key, record.value) for record in await store.scan("")] == [("a", b"2")]
        await store.commit(Transaction({"b": b"1"}, expect={"b": 0}))


async def test_exactly_one_of_a_hundred_racing_transactions_wins(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        await store.commit(Transaction({"token": b"fresh"}))
        record = await store.read("token")
        assert record is not None
        racers = [
            store.commit(Transaction({"token": b"%d" % number}, expect={"token": record.revision}))
            for number in range(100)
        ]
        outcomes = await asyncio.gather(*racers, return_exceptions=True)
        assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, StaleRevision) for outcome in outcomes) == 99


async def test_commits_made_at_once_are_each_whole_and_none_spoils_another(opener: Opener, tmp_path: Path) -> None:
    """Of two that want the same key, one wins, whichever the store hears first."""
    async with open_store(opener, tmp_path) as store:
        start = await store.commit(Transaction({"old": b"1"}))
        unfit: Any = object()
        rivals = ({"a/1": b"x", "b/1": b"x"}, {"a/1": b"y", "b/2": b"y"})
        *raced, refused, last = await asyncio.gather(
            *(store.commit(Transaction(puts, expect={"a/1": 0})) for puts in rivals),
            store.commit(Transaction({"a/3": b"z", "a/4": unfit})),
            store.commit(Transaction({"a/5": b"w"}, deletes=("old",), expect={"old": start})),
            return_exceptions=True,
        )
        (won,) = [number for number, outcome in enumerate(raced) if isinstance(outcome, int)]
        revision = raced[won]
        assert isinstance(revision, int)
        assert isinstance(last, int)
        assert start < min(revision, last)
        assert revision != last
        assert isinstance(raced[1 - won], StaleRevision)
        assert isinstance(refused, Exception)
        whole = {key: (value, revision) for key, value in rivals[won].items()}
        assert await _content(store) == {**whole, "a/5": (b"w", last)}
        watched = store.watch("a/", start)
        assert [(await anext(watched)).revision for _ in range(2)] == sorted((revision, last))
    async with open_store(opener, tmp_path) as store:
        assert await _content(store) == {**whole, "a/5": (b"w", last)}


async def test_a_commit_costs_no_more_when_many_changes_are_kept(tmp_path: Path) -> None:
    """In steps of SQLite's machine, of which a disk that is slow takes no more."""
    store = await SqliteStore.open(tmp_path, changes_kept=4000)
    try:

        async def cost() -> int:
            steps = 0

            def count() -> int:
                nonlocal steps
                steps += 1
                return 0

            store._connection.set_progress_handler(count, 10)
            await store.commit(Transaction({"a": b"1"}))
            store._connection.set_progress_handler(None, 0)
            return steps

        await store.commit(Transaction({"a": b"0"}))
        at_first = await cost()
        for number in range(11):
            await store.commit(Transaction({f"b/{number}/{each}": b"" for each in range(400)}))
        assert await store.read("b/10/399") is not None
        await store.commit(Transaction({"a": b"2"}))  # what was too much is gone with this one
        assert await cost() <= 3 * at_first
    finally:
        await store.close()


async def test_moves_that_wait_are_read_back_and_stand_apart(opener: Opener, tmp_path: Path) -> None:
    """In the transaction that begins one, it leaves the queue; what scans migrations finds none that waits."""
    moves = [
        QueuedMove(
            f"m-{number}", WorkloadKey("shop", "reader"), "ops", Aim("edge-1", "cpu0"), "",
            ReplicaPlace("a-1", "edge-2", "cpu0", "sha256:0", "fp32"), Refusal(Code.MEMORY_SHORT, "0 B free", "1 GiB"),
            Wall(1.8e9), Elapsed(100.0), Elapsed(3700.0),
        )
        for number in range(3)
    ]  # fmt: skip
    moves[2] = replace(moves[2], ended=Refusal(Code.MOVE_CANCELLED, "by ops"), ended_at=Wall(1.8e9 + 5))
    async with open_store(opener, tmp_path) as store:
        written = MoveQueueRepository().writes({each.id: each for each in moves})
        await store.commit(Transaction(written.puts, deletes=written.deletes))
    async with open_store(opener, tmp_path) as store:
        queue = MoveQueueRepository()
        await queue.start(store)
        assert queue.all == {each.id: each for each in moves}
        assert [each.id for each in queue.waiting] == ["m-0", "m-1"]
        assert not await store.scan(MIGRATIONS)
        left = queue.writes({"m-0": None})
        await store.commit(Transaction({MIGRATIONS + "m-0": b"{}", **left.puts}, deletes=left.deletes))
        await queue.start(store)
        assert [*queue.all] == ["m-1", "m-2"]


async def test_since_when_nodes_and_tokens_are_there_is_read_back(opener: Opener, tmp_path: Path) -> None:
    """By a coordinator that starts again, in whichever store the one before it wrote."""

    async def open_region(store: OpenStore) -> RegionalCoordinator:
        region = RegionalCoordinator(
            store, RecordedLinks(), models, models, clock, CountingIds(), RegionConfig("eu-west")
        )
        await region.start()
        return region

    clock, models = SteppedClock(), KnownModels()
    authority = FileAuthority.open(tmp_path / "ca", "eu-west", wall=clock.wall(), may_create=True)
    hello = Hello(node("edge-1", role=Role.GATEWAY), "nonce", None, 1, clock.wall())
    first = clock.wall()
    async with open_store(opener, tmp_path) as store:
        region = await open_region(store)
        assert isinstance(await region.fleet.on_hello("edge-1", Role.GATEWAY, hello), Welcome)
        made = await Enrolment(region.context, authority).create("agent", "edge-2", 60.0, "ann")
    clock.advance(3600.0)
    async with open_store(opener, tmp_path) as store:
        region = await open_region(store)
        assert region.fleet.fleet.nodes["edge-1"].joined_at == first
        assert isinstance(await region.fleet.on_hello("edge-1", Role.GATEWAY, hello), Welcome)
        assert region.fleet.fleet.nodes["edge-1"].joined_at == first
        (token,) = await Enrolment(region.context, authority).tokens()
        assert (token.id, token.created_at) == (made.id, first)


async def test_audit_entries_of_several_coordinators_at_once_form_one_chain(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        logs = [EventLog(store, CoordinatorClock(), kept=100, audit_kept=1000) for _ in range(3)]
        for each in logs:
            await each.start()

        async def act(log: EventLog, name: str) -> None:
            for number in range(15):
                await log.audit(name, "Apply", f"{number}", "applied")

        await asyncio.gather(*(act(log, f"coordinator {number}") for number, log in enumerate(logs)))
        stored = await store.scan(AUDIT)
        assert len(stored) == 3 * 15
        assert first_broken_entry(stored) is None


class PausedModels(DirectoryBlobs):
    """The folder that all coordinators of a region share, and an inspector. It stands still, when told so, in the step
    of that name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Bytes(10_000))
        self.pause_in = ""
        self.is_paused, self.goes_on = asyncio.Event(), asyncio.Event()

    async def _reach(self, step: str) -> None:
        if step == self.pause_in:
            self.is_paused.set()
            await self.goes_on.wait()

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        await self._reach("inspect")
        return await KnownModels().inspect(path, digest, shapes)

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        return await KnownModels().inspect_pack(path, digest, model)

    async def delete(self, digest: str, is_unrecorded: Callable[[], Awaitable[bool]]) -> None:
        await self._reach("delete")
        await super().delete(digest, is_unrecorded)


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("step", ["inspect", "delete"])
async def test_f08_a_leader_that_stood_still_deletes_no_bytes_that_the_next_one_recorded(
    opener: Opener, tmp_path: Path, step: str, is_recorded: bool
) -> None:
    """Nor those that it may record any moment: the log says that they stay, and they go once it has removed them."""
    content, clock, ids = b"m" * 1000, SteppedClock(), CountingIds()
    digest = digest_of(content)

    async def lead(store: OpenStore) -> tuple[RegionalCoordinator, PausedModels]:
        models = PausedModels(tmp_path / "models")
        region = RegionalCoordinator(store, RecordedLinks(), models, models, clock, ids, RegionConfig("eu"))
        await region.start(elected=True)
        return region, models

    async def push(region: RegionalCoordinator) -> None:
        await region.models.push("ocr", Bytes(len(content)), digest, chunks_of(content), actor="ann")

    async with open_store(opener, tmp_path / "store") as store:
        first, models = await lead(store)
        if step == "delete":
            await push(first)
        models.pause_in = step
        paused = asyncio.ensure_future(first.models.remove("ocr", "ann") if step == "delete" else push(first))
        await asyncio.wait_for(models.is_paused.wait(), 10.0)
        second, _ = await lead(store)
        if is_recorded:
            await push(second)
        with capture_logs() as logs:
            models.goes_on.set()
            (ended,) = await asyncio.gather(paused, return_exceptions=True)
        kept = [each["digest"] for each in logs if each["event"] == "model_bytes_kept"]
        assert kept == ([] if is_recorded else [digest])
        if step == "inspect":
            assert isinstance(ended, ShoalError)
            assert ended.code is Code.NOT_LEADER
        assert await models.stat(digest) == len(content)
        if not is_recorded:
            await push(second)
        size, chunks = await second.models.fetch(digest, 0)
        assert b"".join([chunk async for chunk in chunks]) == content
        await second.models.remove("ocr", "ann")
        assert await models.stat(digest) is None, f"the leader deletes its {size} bytes"


async def test_survives_being_closed_and_opened(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        revision = await store.commit(Transaction({"a": b"1"}))
    async with open_store(opener, tmp_path) as store:
        found = await store.read("a")
        assert found is not None
        assert found.revision == revision
        assert await store.commit(Transaction({"b": b"1"})) > revision


async def test_a_second_process_is_refused(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path):
        with pytest.raises(ShoalError) as refused:
            await opener(tmp_path)
        assert refused.value.code is Code.STORE_UNAVAILABLE


async def test_a_closed_store_says_so(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        pass
    with pytest.raises(ShoalError) as refused:
        await store.read("a")
    assert refused.value.code is Code.STORE_UNAVAILABLE


async def test_watch_gives_every_change_under_its_prefix_in_order(opener: Opener, tmp_path: Path) -> None:
    async with open_store(opener, tmp_path) as store:
        start = await store.commit(Transaction({"a/1": b"before"}))
        seen: list[StoreChange] = []

        async def follow() -> None:
            async for change in store.watch("a/", start):
                seen.append(change)
                if len(seen) == 4:
                    return

        follower = asyncio.create_task(follow())
        first = await store.commit(Transaction({"a/2": b"x", "b/1": b"other", "a/1": b"y"}))
        await store.commit(Transaction({"b/2": b"other"}))
        second = await store.commit(Transaction(deletes=("a/1", "a/never")))
        third = await store.commit(Transaction({"a/3": b"z"}))
        await asyncio.wait_for(follower, 5)
        assert [(change.key, change.value, change.revision) for change in seen] == [
            ("a/2", b"x", first),
            ("a/1", b"y", first),
            ("a/1", None, second),
            ("a/3", b"z", third),
        ]


async def test_a_watcher_that_is_too_late_is_told_to_list_again(
    backend: Backend, opener: Opener, tmp_path: Path
) -> None:
    async with open_store(opener, tmp_path) as store:
        start = await store.commit(Transaction({"a": b"0"}))
        revisions = [await store.commit(Transaction({"a": b"%d" % number})) for number in range(CHANGES_KEPT * 2)]
        backend.forget()
        watcher, seen, told = store.watch("a", start), list[int](), None
        while told is None and len(seen) < len(revisions):
            try:
                seen.append((await anext(watcher)).revision)
            except Compacted as gone:
                told = gone.revision
        if told is None:
            assert not backend.can_forget
            assert seen == revisions
        else:
            assert (seen, told) == ([], revisions[-1])
        await store.commit(Transaction({"a": b"next"}))
        assert (await anext(store.watch("a", revisions[-1]))).value == b"next"


async def test_a_watcher_overtaken_while_it_sleeps_misses_nothing_in_silence(
    backend: Backend, opener: Opener, tmp_path: Path
) -> None:
    async with open_store(opener, tmp_path) as store:
        start = await store.commit(Transaction({"a": b"0"}))
        watcher = store.watch("a", start)
        expected = [await store.commit(Transaction({"a": b"first"}))]
        assert (await anext(watcher)).revision == expected[0]
        expected += [await store.commit(Transaction({"a": b"%d" % number})) for number in range(CHANGES_KEPT * 2)]
        backend.forget()
        seen, told = [expected[0]], None
        while told is None and len(seen) < len(expected):
            try:
                seen.append((await asyncio.wait_for(anext(watcher), 5)).revision)
            except Compacted as gone:
                told = gone.revision
        assert seen == expected[: len(seen)]
        assert told in (None, expected[-1])


KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "b/\u00e9", "c"])
VALUES = st.binary(max_size=64)
STEPS = st.lists(
    st.tuples(
        st.dictionaries(KEYS, VALUES, max_size=3),
        st.sets(KEYS, max_size=2),
        st.dictionaries(KEYS, st.integers(-2, 3), max_size=2),
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_behaves_as_a_dictionary_does(
    opener: Opener, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    """Any sequence of transactions, with reopening in between, gives what a dictionary of (value, revision) gives."""
    asyncio.run(_compare(opener, tmp_path_factory.mktemp("store"), steps))


async def _compare(opener: Opener, directory: Path, steps: list[tuple[Any, ...]]) -> None:
    model: dict[str, tuple[bytes, int]] = {}
    store = await opener(directory)
    last = 0
    for puts, deletes, guesses, reopen in steps:
        # What is there for a guess of 0 or more but 3; else what was there once, or never was.
        expect = {
            key: model.get(key, (b"", 0))[1] if 0 <= guess < 3 else max(0, last + guess)
            for key, guess in guesses.items()
        }
        stale = any(model.get(key, (b"", 0))[1] != revision for key, revision in expect.items())
        transaction = Transaction(puts, tuple(sorted(deletes - puts.keys())), expect)
        if stale:
            with pytest.raises(StaleRevision):
                await store.commit(transaction)
        else:
            revision = await store.commit(transaction)
            assert revision > last
            last = revision
            model = {key: value for key, value in model.items() if key not in transaction.deletes}
            model |= {key: (value, revision) for key, value in puts.items()}
        if reopen:
            await store.close()
            store = await opener(directory)
        assert await _content(store) == model
    await store.close()


async def _content(store: OpenStore) -> Mapping[str, tuple[bytes, int]]:
    return {record.key: (record.value, record.revision) for record in await store.scan("")}
