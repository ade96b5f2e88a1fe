"""What a load adds to the memory of its device."""

import numpy as np
import pytest

from shoal.agent.driver_port import DeviceAccess, MemoryCounter
from shoal.agent.worker.memory import MemoryGrowth

held: list[int | None] = []
"""What the counter below answers, in turn; the last one from then on."""


def open_counter(name: str) -> object:
    if name == "none":
        raise OSError("it counts none")
    return lambda: held.pop(0) if len(held) > 1 else held[0]


def on(name: str) -> DeviceAccess:
    return DeviceAccess(memory_counter=MemoryCounter(f"{__name__}:open_counter", (name,)))


@pytest.mark.parametrize(
    ("before", "after", "grown"), [(None, 700, 700), (0, 700, 700), (200, 700, 500), (700, 200, 0)]
)
def test_a_process_s_share_of_the_device(before: int | None, after: int, grown: int) -> None:
    held[:] = [before, after]
    assert MemoryGrowth(on("gpu")).bytes() == grown


def test_resident_memory_where_the_device_tells_nothing() -> None:
    held[:] = [None]
    growths = [MemoryGrowth(access) for access in (DeviceAccess(), on("none"), on("gpu"))]
    taken = np.ones(2**23)
    assert all(taken.nbytes / 2 < each.bytes() < 4 * taken.nbytes for each in growths)
