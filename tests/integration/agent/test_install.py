"""`make bundle` and what `deploy/install.sh` makes of it on a machine without a package index; minutes."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from harness.cluster.systemd_machine import SystemdMachine, boot_machine
from harness.cluster.systemd_region import AGENT, STATE, install, is_live, join, nodes
from harness.wait import wait_until

pytestmark = [pytest.mark.long, pytest.mark.alone]

ROOT: Final = Path(__file__).parents[3]
SCRIPT: Final = "/srv/shoal-device/install.sh"
BUNDLED_WITHIN_S: Final = 600.0
WAIT_TIMEOUT_S: Final = 90.0


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    """With the bundle unpacked, and a coordinator that was installed from it."""
    subprocess.run(["make", "-C", str(ROOT), "bundle"], check=True, timeout=BUNDLED_WITHIN_S)
    (bundle,) = (ROOT / "dist").glob(f"shoal-device-{_architecture()}.tar")
    with boot_machine() as found:
        for path in (ROOT, *ROOT.parents):
            found.run_checked("chmod", "a+rx", str(path))
        found.run_checked("tar", "-xf", str(bundle), "-C", "/srv")
        install(found, "--part", "coordinator", "--set", "SHOAL_REGION=eu", script=SCRIPT)
        wait_until(lambda: nodes(found) == [], WAIT_TIMEOUT_S, "the coordinator to answer")
        yield found


def test_one_command_makes_a_node_of_it(machine: SystemdMachine) -> None:
    said = join(machine, script=SCRIPT)
    wait_until(lambda: is_live(machine), WAIT_TIMEOUT_S, "the agent to serve")
    wait_until(lambda: nodes(machine)[0].get("liveness") == "ready", WAIT_TIMEOUT_S, "the region to see it")
    (device,) = nodes(machine)[0]["node"]["devices"]
    assert device["name"] == "cpu0"
    used = int(machine.run_checked("du", "-sm", "/opt/shoal/agent").split()[0])
    print(f"{used} MB in /opt/shoal/agent; {said}")
    asked = re.search(r"^agent\) need_mb=(\d+)", (ROOT / "deploy" / "install.sh").read_text(), re.MULTILINE)
    assert asked is not None
    assert used <= int(asked.group(1))


def test_another_release_and_the_one_before(machine: SystemdMachine) -> None:
    first = machine.path("/opt/shoal/agent/current").readlink()
    install(machine, "--upgrade", script=SCRIPT)
    second = machine.path("/opt/shoal/agent/current").readlink()
    assert second != first
    assert machine.path("/opt/shoal/agent/previous").readlink() == first
    wait_until(lambda: is_live(machine), WAIT_TIMEOUT_S, "the agent to serve")
    assert str(second) in machine.path(f"/proc/{machine.show(AGENT, 'MainPID')}/cmdline").read_text()
    assert f"shoal-agent: {first}" in install(machine, "--rollback", script=SCRIPT)
    wait_until(lambda: is_live(machine), WAIT_TIMEOUT_S, "the agent to serve")
    assert str(first) in machine.path(f"/proc/{machine.show(AGENT, 'MainPID')}/cmdline").read_text()
    assert len(nodes(machine)) == 1, "the same node"


def test_what_pip_cannot_install_leaves_the_present_release_alone(machine: SystemdMachine) -> None:
    current = machine.path("/opt/shoal/agent/current").readlink()
    machine.run_checked("sh", "-c", "mkdir /srv/few && cp /srv/shoal-device/wheels/shoal_orchestrator_* /srv/few")
    done = machine.run("sh", SCRIPT, "--upgrade", "--wheels", "/srv/few")
    assert done.returncode == 1
    assert "(FETCH_FAILED)" in done.stderr
    assert machine.path("/opt/shoal/agent/current").readlink() == current
    assert len(list(machine.path("/opt/shoal/agent/releases").iterdir())) == 2, "nothing half made"
    assert is_live(machine)


def test_removed_it_keeps_its_identity_unless_told_otherwise(machine: SystemdMachine) -> None:
    install(machine, "--uninstall", script=SCRIPT)
    assert not machine.path("/opt/shoal/agent").exists()
    assert machine.path(f"{STATE}/identity/cert.pem").exists()
    install(machine, script=SCRIPT)
    wait_until(lambda: is_live(machine), WAIT_TIMEOUT_S, "the agent to serve, with no token")
    assert len(nodes(machine)) == 1


def _architecture() -> str:
    return subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
