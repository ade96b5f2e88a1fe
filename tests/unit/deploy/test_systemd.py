"""Units as systemd reads them, which need not run: valid, confined, and letting through what agents do."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / "deploy" / "systemd"
UNITS: Final = {"shoal-agent.service": 2.2, "shoal-coordinator.service": 2.1}
"""With the exposure that `systemd-analyze security` may find at the most, of 10."""
DONE_BY_AGENTS: Final = (
    "unshare", "capset", "prctl", "seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self",
    "pidfd_open", "pidfd_send_signal", "sched_setscheduler", "sched_setaffinity", "setpriority", "memfd_create",
    "flock", "epoll_wait", "sendmsg", "accept4", "clone", "clone3", "execve", "mmap", "mprotect", "setrlimit",
    "prlimit64", "statx",
)  # fmt: skip

OF_ITS_OWN_MACHINE: Final = frozenset(
    ("get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node", "migrate_pages", "memfd_secret")
)
"""What a service may say of its own memory, and a container may not say of a machine that it shares."""


def analyze(*arguments: str) -> str:
    found = shutil.which("systemd-analyze")
    assert found is not None, "systemd-analyze is missing: `make packages` installs Debian's systemd"
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def verify_unit(root: Path, unit: str) -> str:
    """What systemd says to it; what this machine alone lacks is not looked at."""
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={root}", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    told = done.stdout + done.stderr
    assert (done.returncode == 0) is (told == "")
    return told


def settings(unit: str) -> list[tuple[str, str]]:
    lines = [line for line in (FOLDER / unit).read_text().splitlines() if not line.startswith("#")]
    return [(name, value) for name, sign, value in (line.partition("=") for line in lines) if sign]


def of(unit: str, name: str) -> list[str]:
    return [value for each, value in settings(unit) if each == name]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which both parts are installed, as far as systemd looks."""
    for part in ("agent", "coordinator"):
        unit = f"shoal-{part}.service"
        program = tmp_path / of(unit, "ExecStart")[0].partition(" ")[0].lstrip("/")
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        units = tmp_path / "etc" / "systemd" / "system"
        units.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / unit, units)
    return tmp_path


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_wrong_with_it(root: Path, unit: str) -> None:
    assert verify_unit(root, unit) == ""


def test_it_would_find_what_is_wrong(root: Path) -> None:
    path = root / "etc" / "systemd" / "system" / "shoal-agent.service"
    path.write_text(path.read_text().replace("@system-service", "@system-service @nonsense"))
    assert "Unknown system call group, ignoring: @nonsense" in verify_unit(root, "shoal-agent.service")


def test_it_finds_nothing_wrong_with_what_is_put_beside_it_for_accelerators(root: Path) -> None:
    beside = root / "etc" / "systemd" / "system" / "shoal-agent.service.d"
    beside.mkdir()
    shutil.copy(FOLDER / "shoal-agent.service.d" / "nvidia.conf", beside)
    assert verify_unit(root, "shoal-agent.service") == ""


@pytest.mark.parametrize("unit", UNITS)
def test_little_is_exposed_beyond_what_it_is_for(tmp_path: Path, unit: str) -> None:
    shutil.copy(FOLDER / unit, tmp_path)  # without what is beside it for accelerators
    told = analyze("security", "--offline=true", "--no-pager", str(tmp_path / unit))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", told)
    assert found is not None, told
    assert float(found.group(1)) <= UNITS[unit], told


@pytest.mark.parametrize("unit", UNITS)
def test_what_the_containers_profile_refuses_is_refused_here_too_and_what_agents_do_is_not(unit: str) -> None:
    allowed: set[str] = set()
    for value in of(unit, "SystemCallFilter"):
        named = _expand(value.lstrip("~").split())
        allowed = allowed - named if value.startswith("~") else allowed | named
    refused = {*runpy.run_path(str(ROOT / "deploy" / "seccomp.py"))["REFUSED"]}
    assert allowed & refused - OF_ITS_OWN_MACHINE == set()
    assert {*DONE_BY_AGENTS} <= allowed
    assert of(unit, "RestrictNamespaces") == ["user net"], "a worker leaves the network"


def test_the_supervisor_alone_is_started_again() -> None:
    assert of("shoal-agent.service", "KillMode") == ["process"]
    assert of("shoal-agent.service", "Restart") == ["always"]
    assert of("shoal-agent.service", "StartLimitIntervalSec") == ["0"]
    assert not of("shoal-agent.service", "ProtectControlGroups"), "workers have groups of their own"
    assert not of("shoal-agent.service", "Delegate"), "only where there is DelegateSubgroup"
    delegated = dict(settings("shoal-agent.service.d/delegate.conf"))
    assert delegated == {"Delegate": "memory pids", "DelegateSubgroup": "supervisor"}


def _expand(names: list[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        if name.startswith("@"):
            lines = [line.strip() for line in analyze("syscall-filter", name).splitlines()[1:]]
            found |= _expand([line for line in lines if line and not line.startswith("#")])
        else:
            found.add(name)
    return found
