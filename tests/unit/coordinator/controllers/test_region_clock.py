"""Elapsed time of a region over restarts, on machines whose own clocks begin anew, and behind a leader."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.region import RegionFixture, SteppedClock, run_heartbeat, two_agents
from shoal.coordinator.controllers.log.region_clock import CLOCK, FLOOR_INTERVAL_S, RegionClock
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.core.migration.model import MigrationStage, ShiftingState
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")
BOOTS = (5.0, 3.0e6, 0.0)
"""What three machines' own clocks say when the coordinator starts there."""


async def restart(world: RegionFixture, folder: Path, booted_s: float) -> RegionFixture:
    await world.store.close()
    world.clock.elapsed = booted_s
    return await RegionFixture.open(folder, world)


async def test_three_restarts_keep_every_stored_time(tmp_path: Path) -> None:
    """Of a move while it shifts, and of the reconciler's memory."""
    world = await RegionFixture.open(tmp_path / "first")
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    while world.region.moves.get(begun.id).stage is not MigrationStage.SHIFTING:
        await run_heartbeat(world, source, target)
    state, memory = world.region.moves.get(begun.id).state, world.region.workloads._memory
    assert isinstance(state, ShiftingState)
    assert memory.marks
    for booted_s in BOOTS:
        before = world.region.clock.now()
        world = await restart(world, tmp_path / "first", booted_s)
        assert world.region.clock.now() == before, "a restart takes no time"
        assert world.region.moves.get(begun.id).state == state
        assert world.region.workloads._memory == memory
        await world.region.fence.commit({"x": b"1"})
        world.clock.advance(0.125)
        await world.region.fence.commit({"x": b"2"})
        assert world.region.clock.now() == before + 0.125
        assert state.since <= world.region.clock.now() < state.until
    await world.store.close()


async def test_a_region_that_writes_nothing_else_writes_its_clock(tmp_path: Path) -> None:
    world = await RegionFixture.open(tmp_path / "first")
    await world.region.fence.commit({"x": b"1"})
    written = await world.store.read(CLOCK)
    world.clock.advance(FLOOR_INTERVAL_S - 1.0)
    await world.region.fence.save_clock()
    assert await world.store.read(CLOCK) == written, "it was written a moment ago"
    world.clock.advance(2.0)
    await world.region.fence.save_clock()
    before = world.region.clock.now()
    world = await restart(world, tmp_path / "first", 1.0)
    assert world.region.clock.now() == before
    await world.store.close()


async def test_what_frees_space_on_a_full_disk_writes_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await RegionFixture.open(tmp_path / "first")
    await world.region.fence.commit({"x": b"1"})
    real = world.store.commit

    async def full(transaction: object) -> int:
        if transaction.puts:  # type: ignore[attr-defined]
            raise ShoalError(Refusal(Code.STORE_FULL))
        return await real(transaction)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        await world.region.fence.commit({}, deletes=("x",))
    assert await world.store.read("x") is None
    await world.store.close()


async def test_a_follower_has_the_leader_s_time(tmp_path: Path) -> None:
    world = await RegionFixture.open(tmp_path / "first")
    other = SteppedClock()
    other.elapsed = 77.0
    follower = RegionalCoordinator(
        *(world.store, world.links, world.models, world.models, other, world.ids, RegionConfig("eu"))
    )
    for _ in range(3):
        world.clock.advance(40.0)
        await world.region.fence.commit({"x": b"1"})
        await follower.follow()
        assert follower.clock.now() == world.region.clock.now()
    other.advance(9.0)
    await follower.follow()
    assert follower.clock.now() == world.region.clock.now() + 9.0, "it does not go back to what it read"
    await world.store.close()


@given(
    boots=st.lists(
        st.tuples(st.floats(0.0, 1e9), st.lists(st.floats(0.0, 1e6), min_size=1, max_size=4)), min_size=1, max_size=6
    )
)
def test_elapsed_time_never_goes_back_and_counts_what_was_watched(
    boots: list[tuple[float, list[float]]],
) -> None:
    """Whatever the machine's clock says at each start, when the floor is that of the last commit."""
    floor: Elapsed | None = None
    watched = 0.0
    first = boots[0][0]
    for booted_s, steps in boots:
        machine = SteppedClock()
        machine.elapsed = booted_s
        clock = RegionClock(machine)
        if floor is not None:
            clock.resume(floor)
            assert clock.now() == pytest.approx(floor, abs=1e-6)
        for step in steps:
            machine.advance(step)
            watched += step
            assert floor is None or clock.now() >= floor - 1e-6
            floor = clock.now()
    assert floor == pytest.approx(first + watched, abs=1e-6)
