"""What of models was fetched, by whom, is counted as it goes out."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from harness.fakes.clock import ManualClock
from shoal.coordinator.controllers.workloads import fetches
from shoal.coordinator.controllers.workloads.fetches import Fetches
from shoal.types.units import Bytes


async def chunks(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(size)


async def test_what_goes_out_is_counted_when_it_is_over_or_cut_off() -> None:
    clock = ManualClock()
    counted = Fetches(clock)
    began = clock.wall()
    assert [len(data) async for data in counted.track("edge-1", "sha256:a", chunks(3, 4))] == [3, 4]
    clock.advance(1.0)
    cut = counted.track("g-1", "sha256:a", chunks(3, 4))
    assert isinstance(cut, AsyncGenerator)
    async with aclosing(cut):
        await anext(cut)
        await anext(cut)
    assert [(each.by, each.size) for each in counted.all] == [("edge-1", 7), ("g-1", 3)]
    assert counted.all[1].at == clock.wall()
    assert counted.since == began


def test_what_is_forgotten_is_not_said_to_be_known() -> None:
    clock = ManualClock()
    counted = Fetches(clock)
    for _ in range(fetches.KEPT + 2):
        clock.advance(1.0)
        counted.count("edge-1", "sha256:a", Bytes(1))
    assert len(counted.all) == fetches.KEPT
    assert counted.since < counted.all[0].at
    assert counted.since == counted.all[0].at - 1.0
