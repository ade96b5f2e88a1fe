"""What a load adds to the memory of its device."""

import numpy as np
import pytest

from shoal.agent.driver_port import DeviceAccess, MemoryCounter
from shoal.agent.worker import isolation
from shoal.agent.worker.memory import MemoryGrowth, measure_provider_memory

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


@pytest.mark.parametrize(
    ("held_in_turn", "found"),
    [
        # As CUDA: nothing before the first session, and of each then an arena and a model of 9 MB.
        ([0, 829_000_000, 829_000_000, 838_000_000], 820_000_000),
        ([0, 9_000_000, 9_000_000, 18_000_000], 0),
        ([0, 9_000_000, 9_000_000, 19_000_000], 0),
    ],
)
def test_a_provider_takes_what_a_second_load_does_not(held_in_turn: list[int | None], found: int) -> None:
    held[:] = held_in_turn
    assert measure_provider_memory(on("gpu"), list).device_bytes == found


def test_what_every_load_takes_is_no_provider_s_on_the_host_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 64 MB, once, and models of 32 MB."""
    resident, peaks = iter([100_000_000, 196_000_000]), iter([196_000_000] * 2 + [228_000_000] * 2)
    monkeypatch.setattr(isolation, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(isolation, "peak_resident_bytes", lambda: next(peaks))
    held[:] = [None]
    found = measure_provider_memory(on("gpu"), list)
    assert found.device_bytes == 64_000_000, "the device tells nothing: its memory is the host's"
    assert found.host_bytes == 64_000_000
