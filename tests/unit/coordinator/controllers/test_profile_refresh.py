"""After an upgrade the models that an older version inspected are inspected again, and nobody waits for it."""

import errno
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.fakes.region import DIGEST, RegionFixture, two_agents
from harness.models.push import chunks_of
from harness.models.synthetic import digest_of, relu
from shoal.coordinator import codec
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector
from shoal.coordinator.controllers.log.events import EVENTS
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.core.catalog.model import MODELS, ModelRecord
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.ports import Transaction
from shoal.types.codes import Code, refuse
from shoal.types.profile import PROFILE_VERSION, ModelProfile
from shoal.types.units import Bytes

OTHER = "sha256:" + "b" * 64
FULL = refuse(Code.STORE_FULL, "no room", "some", "make some")
GONE = OSError(errno.EIO, "Input/output error")
NO_PROCESS = refuse(Code.INTERNAL, "Resource temporarily unavailable", "a process", "try again")
NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")

Found = Callable[[ModelProfile], ModelProfile]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


class BackgroundInspector:
    """Stands in for the region's; what it finds is of this version."""

    def __init__(self, world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inspect = world.models.inspect
        self.asked = list[tuple[str, Mapping[str, tuple[int, ...]]]]()
        self.refusals: dict[str, Exception] = {}
        """By digest: what is raised."""
        self.on_inspect: Callable[[], None] = lambda: None
        monkeypatch.setattr(world.models, "inspect", self.inspect)

    @property
    def digests(self) -> list[str]:
        return [digest for digest, _ in self.asked]

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        assert is_background
        self.asked.append((digest, shapes or {}))
        self.on_inspect()
        if digest in self.refusals:
            raise self.refusals[digest]
        return replace(await self._inspect(path, digest, shapes), version=PROFILE_VERSION, run_bytes=Bytes(700))


async def push_two(world: RegionFixture) -> None:
    await world.push()
    await world.region.models.push("other", Bytes(1000), OTHER, chunks_of(bytes(1000)), actor="test")


def profile(world: RegionFixture, digest: str = DIGEST) -> ModelProfile:
    return world.region.workloads.catalog.models[digest].profile


async def test_what_an_older_version_inspected_is_inspected_again(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs as well, and once; its bytes are neither read nor written by the coordinator, and nobody is told
    that somebody pushed it."""
    await two_agents(world)
    older, events = world.region.workloads.catalog.models[DIGEST], await world.store.scan(EVENTS)
    inspector = BackgroundInspector(world, monkeypatch)
    monkeypatch.delattr(type(world.models), "write")
    monkeypatch.delattr(type(world.models), "read")
    for _ in range(2):
        await world.region.models.profiles.run()
    newer = replace(older.profile, version=PROFILE_VERSION, run_bytes=Bytes(700))
    assert world.region.workloads.catalog.models[DIGEST] == replace(older, profile=newer)
    assert inspector.asked == [(DIGEST, older.profile.reference_shapes)]
    (record,) = await world.store.scan(MODELS)
    assert b'"run_bytes":700' in record.value
    assert await world.store.scan(EVENTS) == events


async def test_a_model_that_is_removed_meanwhile_stays_removed(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.push()
    inspect = world.models.inspect

    async def remove_first(
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        found = await inspect(path, digest, shapes)
        await world.region.models.remove(DIGEST, "test")
        return replace(found, version=PROFILE_VERSION)

    monkeypatch.setattr(world.models, "inspect", remove_first)
    await world.region.models.profiles.run()
    assert DIGEST not in world.region.workloads.catalog.models
    assert not await world.store.scan(MODELS)
    assert await world.models.stat(DIGEST) is None


REFUSALS = [
    refuse(code, "a model", "another one", "push another one") for code in (Code.MODEL_INVALID, Code.NOT_LEADER)
]


@pytest.mark.parametrize("error", [*REFUSALS, GONE], ids=["a refusal", "one that a model forged", "the disk"])
async def test_a_model_that_is_refused_stays_as_it_was_and_holds_up_no_other(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await push_two(world)
    before = world.region.workloads.catalog.models[DIGEST]
    inspector = BackgroundInspector(world, monkeypatch)
    inspector.refusals[DIGEST] = error
    with capture_logs() as logs:
        for _ in range(2):
            await world.region.models.profiles.run()
    assert world.region.workloads.catalog.models[DIGEST] == before
    assert profile(world, OTHER).version == PROFILE_VERSION
    assert inspector.digests == [DIGEST, OTHER]
    assert [(each["event"], each.get("digest")) for each in logs] == [
        ("inspection_failed", DIGEST),
        ("profiles_refreshed", None),
    ]
    assert (logs[-1]["refreshed"], logs[-1]["refused"]) == (1, 1)


async def test_it_ends_where_another_coordinator_leads(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    await push_two(world)
    inspector = BackgroundInspector(world, monkeypatch)
    ports = (world.store, world.links, world.models, world.models, world.clock, world.ids)
    await RegionalCoordinator(*ports, RegionConfig("eu")).start(elected=True)
    with capture_logs() as logs:
        await world.region.models.profiles.run()
    assert inspector.digests == [DIGEST]
    assert not [each for each in logs if each["event"] in ("inspection_failed", "profiles_not_recorded")]
    assert profile(world).version < PROFILE_VERSION


async def test_a_store_that_is_full_is_tried_again_later(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line for each try; what was refused is not inspected again."""
    await push_two(world)
    inspector = BackgroundInspector(world, monkeypatch)
    inspector.refusals[DIGEST] = REFUSALS[0]
    commit, tries = world.store.commit, 0

    async def refuse_twice(transaction: Transaction) -> int:
        nonlocal tries
        if any(key.startswith(MODELS) for key in transaction.puts):
            tries += 1
            if tries <= 2:
                raise FULL
        return await commit(transaction)

    monkeypatch.setattr(world.store, "commit", refuse_twice)
    with capture_logs() as logs:
        await world.region.models.profiles.run()
    assert inspector.digests == [DIGEST, OTHER, OTHER, OTHER]
    assert [each["event"] for each in logs] == [
        "inspection_failed",
        "profiles_not_recorded",
        "profiles_not_recorded",
        "profiles_refreshed",
    ]
    assert profile(world, OTHER).version == PROFILE_VERSION


@pytest.mark.parametrize("error", [NO_PROCESS, NO_DESCRIPTOR], ids=["no process", "no descriptor"])
async def test_an_error_of_this_machine_is_no_refusal(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As with a full store, it is tried again some minutes later, with one line for each try."""
    await push_two(world)
    inspector = BackgroundInspector(world, monkeypatch)
    inspector.refusals[DIGEST] = error
    tries = list[float]()

    def recover_at_the_third() -> None:
        tries.append(world.clock.now())
        if len(tries) == 3:
            del inspector.refusals[DIGEST]

    inspector.on_inspect = recover_at_the_third
    with capture_logs() as logs:
        await world.region.models.profiles.run()
    assert inspector.digests == [DIGEST, DIGEST, DIGEST, OTHER]
    assert [later - before for before, later in pairwise(tries[:3])] == pytest.approx([600.0, 600.0])
    assert [each["event"] for each in logs] == ["profiles_not_recorded", "profiles_not_recorded", "profiles_refreshed"]
    assert (logs[-1]["refreshed"], logs[-1]["refused"]) == (2, 0)
    assert [profile(world, each).version for each in (DIGEST, OTHER)] == [PROFILE_VERSION] * 2


async def test_a_profile_at_other_shapes_is_refused_with_a_line(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background, and as the model is pushed again."""
    await world.push()
    before, inspect = profile(world), world.models.inspect

    async def at_other_shapes(path: str, digest: str, *_: object, is_background: bool = False) -> ModelProfile:
        found = await inspect(path, digest, {"x": (1, 3, 96, 96)}, is_background=is_background)
        return replace(found, version=PROFILE_VERSION)

    monkeypatch.setattr(world.models, "inspect", at_other_shapes)
    with capture_logs() as logs:
        await world.region.models.profiles.run()
        await world.push()
    assert profile(world) == before
    failed = [(each["digest"], each["error"]) for each in logs if each["event"] == "inspection_failed"]
    assert failed == [(DIGEST, "input 'x' at (1, 3, 96, 96), what runs was placed at (1, 3, 48, 48)")] * 2


async def test_it_pauses_for_as_long_as_it_works(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    await push_two(world)
    inspector = BackgroundInspector(world, monkeypatch)
    starts = list[float]()

    def work() -> None:
        starts.append(world.clock.now())
        world.clock.advance(7.0)

    inspector.on_inspect = work
    await world.region.models.profiles.run()
    assert starts[1] - starts[0] == pytest.approx(14.0)


async def test_stored_bytes_are_inspected_where_they_are(world: RegionFixture, tmp_path: Path) -> None:
    """By the child, with a disk that has no room for another copy; a damaged file keeps its profile."""
    content, folder = relu().SerializeToString(), tmp_path / "models"
    digest = digest_of(content)
    blobs = DirectoryBlobs(folder, Bytes(2**20))
    for each, known in ((content, digest), (b"x", OTHER)):
        path = await blobs.write(chunks_of(each), size=Bytes(len(each)), digest=digest_of(each))
        Path(path).rename(blobs.path(known))
    current = profile_of(content, digest)
    assert isinstance(current, ModelProfile)
    older = replace(current, version=0, run_bytes=Bytes(1))
    records = [
        ModelRecord(each, (), world.clock.wall(), "test", replace(older, digest=each)) for each in (digest, OTHER)
    ]
    await world.store.commit(Transaction({MODELS + each.digest: codec.dump(each) for each in records}))

    full = DirectoryBlobs(folder, Bytes(2**20), spare_bytes=Bytes(2**62))
    before = Path(full.path(digest)).stat()
    region = RegionalCoordinator(
        world.store, world.links, full, ChildInspector(), world.clock, world.ids, RegionConfig("eu")
    )
    await region.start()
    await region.models.profiles.run()
    assert region.workloads.catalog.models[digest].profile == current
    assert region.workloads.catalog.models[OTHER] == records[1]
    after = Path(full.path(digest)).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
