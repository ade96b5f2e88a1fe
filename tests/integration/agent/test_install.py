"""`make bundle` and what `deploy/install.sh` makes of it on a machine without a package index; minutes."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from harness.machine import Machine, booted
from harness.service import AGENT, STATE, install, join, lives, nodes
from harness.wait import wait_until

pytestmark = [pytest.mark.long, pytest.mark.alone]

ROOT: Final = Path(__file__).parents[3]
SCRIPT: Final = "/srv/shoal-device/install.sh"
BUNDLED_WITHIN_S: Final = 600.0
PATIENCE_S: Final = 90.0


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """With the bundle unpacked, and a coordinator that was installed from it."""
    subprocess.run(["make", "-C", str(ROOT), "bundle"], check=True, timeout=BUNDLED_WITHIN_S)
    (bundle,) = (ROOT / "dist").glob(f"shoal-device-{_architecture()}.tar")
    with booted() as found:
        for path in (ROOT, *ROOT.parents):
            found.tell("chmod", "a+rx", str(path))
        found.tell("tar", "-xf", str(bundle), "-C", "/srv")
        install(found, "--part", "coordinator", "--set", "SHOAL_REGION=eu", script=SCRIPT)
        wait_until(lambda: nodes(found) == [], PATIENCE_S, "the coordinator to answer")
        yield found


def test_one_command_makes_a_node_of_it(machine: Machine) -> None:
    said = join(machine, script=SCRIPT)
    wait_until(lambda: lives(machine), PATIENCE_S, "the agent to serve")
    wait_until(lambda: nodes(machine)[0].get("liveness") == "ready", PATIENCE_S, "the region to see it")
    (device,) = nodes(machine)[0]["node"]["devices"]
    assert device["name"] == "cpu0"
    used = int(machine.tell("du", "-sm", "/opt/shoal/agent").split()[0])
    print(f"{used} MB in /opt/shoal/agent; {said}")
    asked = re.search(r"^agent\) need_mb=(\d+)", (ROOT / "deploy" / "install.sh").read_text(), re.MULTILINE)
    assert asked is not None
    assert used <= int(asked.group(1))


def test_another_release_and_the_one_before(machine: Machine) -> None:
    first = machine.path("/opt/shoal/agent/current").readlink()
    install(machine, "--upgrade", script=SCRIPT)
    second = machine.path("/opt/shoal/agent/current").readlink()
    assert second != first
    assert machine.path("/opt/shoal/agent/previous").readlink() == first
    wait_until(lambda: lives(machine), PATIENCE_S, "the agent to serve")
    assert str(second) in machine.path(f"/proc/{machine.show(AGENT, 'MainPID')}/cmdline").read_text()
    assert f"shoal-agent: {first}" in install(machine, "--rollback", script=SCRIPT)
    wait_until(lambda: lives(machine), PATIENCE_S, "the agent to serve")
    assert str(first) in machine.path(f"/proc/{machine.show(AGENT, 'MainPID')}/cmdline").read_text()
    assert len(nodes(machine)) == 1, "the same node"


def test_what_pip_cannot_install_leaves_the_present_release_alone(machine: Machine) -> None:
    current = machine.path("/opt/shoal/agent/current").readlink()
    machine.tell("sh", "-c", "mkdir /srv/few && cp /srv/shoal-device/wheels/shoal_* /srv/few")
    done = machine.run("sh", SCRIPT, "--upgrade", "--wheels", "/srv/few")
    assert done.returncode == 1
    assert "FETCH_FAILED  " in done.stderr
    assert machine.path("/opt/shoal/agent/current").readlink() == current
    assert len(list(machine.path("/opt/shoal/agent/releases").iterdir())) == 2, "nothing half made"
    assert lives(machine)


def test_removed_it_keeps_its_identity_unless_told_otherwise(machine: Machine) -> None:
    install(machine, "--uninstall", script=SCRIPT)
    assert not machine.path("/opt/shoal/agent").exists()
    assert machine.path(f"{STATE}/identity/cert.pem").exists()
    install(machine, script=SCRIPT)
    wait_until(lambda: lives(machine), PATIENCE_S, "the agent to serve, with no token")
    assert len(nodes(machine)) == 1


def _architecture() -> str:
    return subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
