"""F16: a store is restored from an old backup, or a machine's image is rolled back. The coordinator opens a new
history, and agents keep running what they run: real agents and requests."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.fleet import AgentFleet, Running
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock

pytestmark = [pytest.mark.alone, pytest.mark.long]
CONVERGED_S = 10.0


@pytest.fixture(scope="module")
def fleet(coordinator: CoordinatorServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentFleet]:
    found = AgentFleet([coordinator], tmp_path_factory.mktemp("crew"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def history(crew: AgentFleet) -> str:
    with crew.api() as api:
        return api.who_am_i().history


def both(crew: AgentFleet) -> Running:
    """A replica on each node."""
    crew.apply_workload(2, "relu")
    crew.wait_settled()
    return crew.running_workers()


def anew(crew: AgentFleet) -> Running:
    """The documents say the same as before, and edge-1's replica is another one."""
    earlier = both(crew)
    crew.apply_workload(1, "relu", ["edge-2"])
    crew.wait_settled()
    later = both(crew)
    assert len(earlier.keys() & later.keys()) == 1
    return later


def the_store(coordinator: CoordinatorServer, saved: Path) -> None:
    """The file alone, over what was written since."""
    store = coordinator.data / "store"
    for path in store.glob("state.db*"):
        path.unlink()
    shutil.copy(saved / "store" / "state.db", store / "state.db")


def the_image(coordinator: CoordinatorServer, saved: Path) -> None:
    """All that the machine had."""
    shutil.rmtree(coordinator.data)
    shutil.copytree(saved, coordinator.data)


def by_the_tool(coordinator: CoordinatorServer, saved: Path) -> None:
    newest = max((saved / "store" / "backups").glob("state-*.db"))
    assert coordinator.restore_from(newest)["history"]


def rolls_back(
    crew: AgentFleet, coordinator: CoordinatorServer, saved: Path, put_back: Callable[[CoordinatorServer, Path], None]
) -> None:
    """What comes back knows of an earlier replica, and not of the one that runs."""
    both(crew)
    assert coordinator.end() == 0
    shutil.copytree(coordinator.data, saved)
    coordinator.start()
    before, earlier, clock = anew(crew), history(crew), SystemClock()
    with crew.load() as load:
        coordinator.end(signal.SIGKILL)
        put_back(coordinator, saved)
        began = clock.now()
        coordinator.start()
        up_s = clock.now() - began
        wait_until(lambda: history(crew) != earlier, CONVERGED_S, "another history")
        crew.wait_settled()
        converged_s = clock.now() - began
        load.wait_for(100)
    verdict = load.verdict()
    assert crew.running_workers() == before, "nothing was ended or begun anew"
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    assert converged_s <= CONVERGED_S
    with crew.api() as api:
        opened = [event.message for event in api.events() if event.code == "HISTORY_OPENED"]
    record(
        "F16", "P", 1, put_back=put_back.__name__, start_s=round(up_s, 2), converged_s=round(converged_s, 2),
        restarts=0, requests=verdict.answered, requests_lost=0, why=opened[-1],
    )  # fmt: skip


def test_f16_a_machine_whose_image_was_rolled_back(
    fleet: AgentFleet, coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    rolls_back(fleet, coordinator, tmp_path / "saved", the_image)


def test_f16_an_old_file_in_the_stores_place(fleet: AgentFleet, coordinator: CoordinatorServer, tmp_path: Path) -> None:
    rolls_back(fleet, coordinator, tmp_path / "saved", the_store)


def test_f16_a_copy_restored_by_the_tool(fleet: AgentFleet, coordinator: CoordinatorServer, tmp_path: Path) -> None:
    rolls_back(fleet, coordinator, tmp_path / "saved", by_the_tool)


def test_f16_a_node_whose_image_was_rolled_back(fleet: AgentFleet, tmp_path: Path) -> None:
    """It boots with what it ran then, and ends with what it is told now."""
    member, clock = fleet.members[0], SystemClock()
    both(fleet)
    member.end()
    shutil.copytree(member.state, tmp_path / "saved", ignore=shutil.ignore_patterns("run"))
    member.start()
    fleet.wait_settled()
    before = anew(fleet)
    with fleet.load() as load:
        member.end()
        shutil.rmtree(member.state)
        shutil.copytree(tmp_path / "saved", member.state)
        began = clock.now()
        member.start()
        fleet.wait_settled()
        converged_s = clock.now() - began
        load.wait_for(100)
    verdict = load.verdict()
    after = fleet.running_workers()
    assert after.keys() == before.keys(), "what it ran then is ended, what it shall run begun"
    assert {name: at for name, at in after.items() if before[name] == at}, "the other node is not concerned"
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    assert converged_s <= CONVERGED_S
    record(
        "F16", "P", 1, put_back="the_node", converged_s=round(converged_s, 2), restarts=0, requests=verdict.answered,
        requests_lost=0,
    )  # fmt: skip
