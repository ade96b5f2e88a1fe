"""An agent and its coordinator as services, on a machine with systemd, under the units' restrictions."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from harness.cluster.systemd_machine import SystemdMachine, boot_machine
from harness.cluster.systemd_region import AGENT, COORDINATOR, ENVIRONMENT, STATE, install, is_live, join, nodes
from harness.wait import wait_until

ROOT: Final = Path(__file__).parents[3]
WAIT_TIMEOUT_S: Final = 60.0


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    """A region's coordinator serves on it. The programs are those of this environment, not what pip would
    install; where it lies in a home, that much of it is shown."""
    with boot_machine() as found:
        for unit in (AGENT, COORDINATOR):
            home = f"/opt/shoal/{unit.removeprefix('shoal-').removesuffix('.service')}"
            found.run_checked("mkdir", "-p", home, f"/etc/systemd/system/{unit}.d")
            found.run_checked("ln", "-s", sys.prefix, f"{home}/current")
            shown = f"[Service]\nProtectHome=tmpfs\nBindReadOnlyPaths={sys.base_prefix} {ROOT}\n"
            found.run_checked("tee", f"/etc/systemd/system/{unit}.d/environment.conf", stdin=shown)
        install(found, "--part", "coordinator", "--set", "SHOAL_REGION=eu")
        wait_until(lambda: nodes(found) == [], WAIT_TIMEOUT_S, "the coordinator to answer")
        yield found


@pytest.fixture(scope="module")
def node(machine: SystemdMachine) -> SystemdMachine:
    """It has an agent, too, that has joined and serves."""
    said = join(machine)
    assert "would" not in said
    wait_until(lambda: is_live(machine), WAIT_TIMEOUT_S, f"the agent to serve: {machine.journal(AGENT)}")
    return machine


def processes(machine: SystemdMachine) -> dict[int, str]:
    """Command lines of all that is in the agent's control group, by pid as the machine counts."""
    pids = machine.run("cat", f"/sys/fs/cgroup/system.slice/{AGENT}/cgroup.procs").stdout.split()
    return {int(pid): machine.path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}


def children(machine: SystemdMachine) -> dict[int, str]:
    """Front and workers."""
    main = int(machine.show(AGENT, "MainPID"))
    return {pid: line for pid, line in processes(machine).items() if pid != main}


def has_spare(machine: SystemdMachine) -> bool:
    workers = [line for line in children(machine).values() if "shoal.agent.worker.main" in line]
    sockets = list(machine.path(f"{STATE}/run").glob("worker-*.sock"))
    return len(workers) == len(sockets) == 1


def has_begun(machine: SystemdMachine) -> bool:
    """Its supervisor imports what it is made of."""
    main = machine.show(AGENT, "MainPID")
    return "/google/_upb/" in machine.path(f"/proc/{main}/maps").read_text()


def test_a_machine_joins_by_one_command_and_keeps_its_settings(node: SystemdMachine) -> None:
    (view,) = nodes(node)
    assert view["node"]["name"] == "box"
    assert view["node"]["labels"] == {"site": "shop", "price": "0.10 USD/h"}
    assert node.path(STATE).stat().st_mode & 0o777 == 0o700
    assert not node.path(f"{STATE}/token").exists(), "one use, and used"
    assert 'SHOAL_ENROL="127.0.0.1:7444"' in node.path(ENVIRONMENT).read_text()
    assert node.show(AGENT, "NRestarts") == "0"


def test_its_workers_are_confined_under_the_units_restrictions(node: SystemdMachine) -> None:
    """All that is left open is what systemd 252 cannot delegate."""
    (view,) = nodes(node)
    lacking = view["node"].get("unconfined", [])
    assert all("by control group" in each for each in lacking), lacking


def test_a_killed_supervisor_is_started_again_and_adopts_what_it_left(node: SystemdMachine) -> None:
    wait_until(
        lambda: '"device_probed"' in node.journal(AGENT), WAIT_TIMEOUT_S, "the worker that measured to be followed"
    )
    wait_until(lambda: has_spare(node), WAIT_TIMEOUT_S, "a front, and a spare worker that can be spoken to")
    before = children(node)
    node.run_checked("systemctl", "kill", "--kill-who=main", "--signal=KILL", AGENT)
    wait_until(lambda: node.show(AGENT, "NRestarts") == "1", WAIT_TIMEOUT_S, "systemd to start it again")
    assert is_live(node), "the front answers meanwhile"
    wait_until(lambda: node.journal(AGENT).count('"agent_started"') == 2, WAIT_TIMEOUT_S, "the next supervisor")
    kept = [line for pid, line in children(node).items() if pid in before]
    assert [line for line in kept if " front " in line], "the very same process"
    assert [line for line in kept if "shoal.agent.worker.main" in line], "and the spare worker"


def test_one_that_is_stopped_as_it_begins_ends_what_the_one_before_left(node: SystemdMachine) -> None:
    restarts = int(node.show(AGENT, "NRestarts"))
    node.run_checked("systemctl", "kill", "--kill-who=main", "--signal=KILL", AGENT)
    wait_until(lambda: int(node.show(AGENT, "NRestarts")) > restarts, WAIT_TIMEOUT_S, "systemd to start it again")
    wait_until(lambda: has_begun(node), WAIT_TIMEOUT_S, "the next one to begin")
    node.run_checked("systemctl", "stop", AGENT)
    assert processes(node) == {}, node.journal(AGENT)
    node.run_checked("systemctl", "start", AGENT)
    wait_until(lambda: is_live(node), WAIT_TIMEOUT_S, "the agent to serve")


def test_installed_again_nothing_restarts_but_for_a_change(node: SystemdMachine) -> None:
    main = node.show(AGENT, "MainPID")
    install(node)
    assert node.show(AGENT, "MainPID") == main
    install(node, "--set", "SHOAL_CACHE_QUOTA=1GiB")
    assert node.show(AGENT, "MainPID") != main
    text = node.path(ENVIRONMENT).read_text()
    assert text.count("SHOAL_CACHE_QUOTA") == 1
    assert "site=shop" in text
    wait_until(lambda: is_live(node), WAIT_TIMEOUT_S, "the agent to serve")


def test_a_stopped_agent_leaves_no_process_and_a_removed_one_no_file(node: SystemdMachine) -> None:
    node.run_checked("systemctl", "stop", AGENT)
    assert processes(node) == {}, node.journal(AGENT)
    said = install(node, "--uninstall", "--purge")
    assert "shoal node revoke" in said
    assert node.show(AGENT, "LoadState") == "not-found"
    for path in (STATE, ENVIRONMENT, "/opt/shoal/agent", f"/etc/systemd/system/{AGENT}"):
        assert not node.path(path).exists(), path
    assert node.show(COORDINATOR, "ActiveState") == "active"
