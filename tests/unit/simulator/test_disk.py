"""The simulated disk and what stands on it: flushed survives a power cut, the rest may not."""

import asyncio

import pytest

from shoal.coordinator.ports import StaleRevision, Transaction
from shoal.simulator.parts.storage import SimAgentJournal, SimStore, format_store, frame, unframe
from shoal.simulator.world.disk import SimDisk
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Seconds


def test_a_power_cut_keeps_what_was_flushed_and_may_tear_the_rest() -> None:
    async def main(loop: VirtualLoop) -> set[bytes]:
        left = set()
        for seed in range(60):
            world = SimWorld(loop, seed)
            process, disk = SimProcess(world, "p"), SimDisk(world, "d")
            disk.append(process, "log", b"flushed.")
            await disk.flush(process, "log")
            await disk.flush_names(process)
            disk.append(process, "log", b"lost")
            disk.power_cut()
            left.add(disk.read("log") or b"")
        return left

    left = run(main)
    assert all(each.startswith(b"flushed.") for each in left)
    assert {b"flushed.", b"flushed.lost"} < left
    assert len(left) > 4


def test_a_file_whose_name_was_not_flushed_may_vanish() -> None:
    async def main(loop: VirtualLoop) -> set[bytes | None]:
        left = set()
        for seed in range(20):
            world = SimWorld(loop, seed)
            process, disk = SimProcess(world, "p"), SimDisk(world, "d")
            disk.append(process, "new", b"x")
            await disk.flush(process, "new")
            disk.power_cut()
            left.add(disk.read("new"))
        return left

    assert run(main) == {None, b"x"}


def test_a_full_disk_writes_nothing() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = SimWorld(loop, 1)
        process, disk = SimProcess(world, "p"), SimDisk(world, "d")
        disk.full = True
        with pytest.raises(ShoalError) as refused:
            disk.append(process, "log", b"x")
        assert refused.value.code is Code.DISK_FULL
        assert disk.read("log") is None

    run(main)


def test_frames_tell_torn_from_whole() -> None:
    whole = frame(b"content")
    assert unframe(whole, 0) == (b"content", len(whole))
    assert all(unframe(whole[:cut], 0) is None for cut in range(len(whole)))
    assert unframe(whole[:-1] + b"x", 0) is None


def test_the_store_keeps_every_acknowledged_commit_over_300_power_cuts() -> None:
    async def main(loop: VirtualLoop) -> int:
        found_unacknowledged = 0
        for seed in range(300):
            world = SimWorld(loop, seed)
            disk = SimDisk(world, "d")
            await format_store(SimProcess(world, "setup"), disk)
            process = SimProcess(world, "p")
            process.steps_to_live = world.rng.randint(1, 60)
            store = SimStore(world, process, disk)
            acknowledged: list[int] = []

            async def write(store: SimStore = store, acknowledged: list[int] = acknowledged) -> None:
                for number in range(20):
                    await store.commit(Transaction({f"k{number}": b"v"}))
                    acknowledged.append(number)

            process.spawn(write(), "write")
            await asyncio.sleep(1.0)
            process.die()
            disk.power_cut()
            kept = SimStore(world, SimProcess(world, "q"), disk).contents()
            assert kept.keys() >= {f"k{number}" for number in acknowledged}, seed
            found_unacknowledged += len(kept) - len(acknowledged)
        return found_unacknowledged

    assert run(main) > 0  # some were written and not yet acknowledged: both outcomes are seen


def test_the_store_compares_and_sets_and_watches() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = SimWorld(loop, 1)
        disk = SimDisk(world, "d")
        process = SimProcess(world, "p")
        await format_store(process, disk)
        store = SimStore(world, process, disk)
        first = await store.commit(Transaction({"a/1": b"x", "b/1": b"y"}, expect={"a/1": 0}))
        with pytest.raises(StaleRevision):
            await store.commit(Transaction({"a/1": b"z"}, expect={"a/1": 0}))
        await store.commit(Transaction({"a/2": b"x"}, deletes=("a/1",), expect={"a/1": first}))
        assert [record.key for record in await store.scan("a/")] == ["a/2"]
        seen = []
        async for change in store.watch("a/", first):
            seen.append((change.key, change.value))
            if len(seen) == 2:
                break
        assert sorted(seen) == [("a/1", None), ("a/2", b"x")]

    run(main)


def test_the_journal_never_loads_less_than_it_saved() -> None:
    async def main(loop: VirtualLoop) -> set[int]:
        outcomes = set()
        for seed in range(200):
            world = SimWorld(loop, seed)
            disk = SimDisk(world, "d")
            process = SimProcess(world, "p")
            process.steps_to_live = world.rng.randint(1, 60)
            journal = SimAgentJournal(world, process, disk, "edge-1")
            saved = [0]

            async def write(journal: SimAgentJournal = journal, saved: list[int] = saved) -> None:
                for generation in range(1, 12):
                    version = Version("h", 1, generation)
                    await journal.save(DesiredSet("edge-1", version, (), (), (), (), Seconds(1.0)))
                    saved.append(generation)

            process.spawn(write(), "write")
            await asyncio.sleep(1.0)
            process.die()
            disk.power_cut()
            loaded = await SimAgentJournal(world, SimProcess(world, "q"), disk, "edge-1").load()
            generation = 0 if loaded is None else loaded.version.generation
            assert generation in (saved[-1], saved[-1] + 1), seed
            outcomes.add(generation - saved[-1])
        return outcomes

    assert run(main) == {0, 1}
