"""What `shoal-coordinator operator` waits for."""

from pathlib import Path

from harness.fakes.clock import ManualClock
from shoal.coordinator.main.operators import REQUEST_FILE, SERVED_WITHIN_S, ask_for_operator, is_served
from shoal.types.units import Seconds


class ServingClock(ManualClock):
    """During its second sleep a coordinator serves the request."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.sleeps = 0

    async def sleep(self, seconds: Seconds) -> None:
        await super().sleep(seconds)
        self.sleeps += 1
        if self.sleeps == 2:
            (self.folder / REQUEST_FILE).unlink()


async def test_the_owner_waits_until_the_files_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "operator"
    ask_for_operator(folder)
    clock = ServingClock(folder)
    assert await is_served(folder, clock)
    assert clock.sleeps == 2


async def test_without_a_coordinator_the_request_stays_for_its_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "operator"
    ask_for_operator(folder)
    clock = ManualClock()
    begun = clock.now()
    assert not await is_served(folder, clock)
    assert SERVED_WITHIN_S <= clock.now() - begun < SERVED_WITHIN_S + 1
    assert (folder / REQUEST_FILE).exists()
