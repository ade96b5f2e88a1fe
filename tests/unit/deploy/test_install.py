"""`deploy/install.sh` before it changes anything: what it looks at, what it would do, what it refuses."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from shoal.types.codes import Code

ROOT: Final = Path(__file__).parents[3]
SCRIPT: Final = ROOT / "deploy" / "install.sh"
JOINS: Final = ("--enrol", "coordinator.example:7444", "--token-file", "-")


def machine(folder: Path, *, memory_mb: int = 4096, files: Mapping[str, str] | None = None) -> Path:
    """What the script sees of a machine."""
    for name, text in {"proc/meminfo": f"MemTotal: {memory_mb * 1024} kB\n", **(files or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def install(
    *arguments: str, facts: Path, machine_name: str = "x86_64", script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """Nothing is changed."""
    return subprocess.run(
        ["sh", str(script), "--dry-run", *arguments],
        env={
            **os.environ,
            "SHOAL_FACTS": str(facts),
            "SHOAL_MACHINE": machine_name,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        input="token\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_it_says_what_it_would_do_and_does_nothing_of_it(tmp_path: Path) -> None:
    label = "price=0.10 USD/h"
    done = install(*JOINS, "--label", "site=shop", "--label", label, facts=machine(tmp_path))
    assert done.returncode == 0, done.stderr
    for step in (
        "+ useradd --system",
        "-m venv /opt/shoal/agent/releases/",
        "+ install -m 644",
        "+ write /var/lib/shoal-agent/token, mode 600",
    ):
        assert step in done.stdout, done.stdout
    assert not Path("/opt/shoal/agent").exists()
    assert not Path("/etc/shoal").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0"}, "a Jetson"),
        ({"etc/nv_tegra_release": "# R36\n"}, "a Jetson"),
        ({"proc/device-tree/compatible": "radxa,rock-5b\0rockchip,rk3588\0"}, "a Rockchip board"),
        ({"proc/driver/nvidia/version": "NVRM version\n"}, "NVIDIA's driver is here"),
        ({".dockerenv": ""}, "a container"),
    ],
)
def test_it_knows_the_board_and_says_what_of_it_is_used(tmp_path: Path, files: Mapping[str, str], said: str) -> None:
    done = install(*JOINS, facts=machine(tmp_path, files=files), machine_name="aarch64")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    if "driver/nvidia" not in "".join(files):
        return
    with_gpu = install(*JOINS, "--extras", "cpu,nvidia", facts=tmp_path)
    assert "nvidia.conf" in with_gpu.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((*JOINS, "--label", "site"), Code.FIELD_INVALID),
        ((*JOINS, "--label", "site=a'b"), Code.FIELD_INVALID),
        ((*JOINS, "--set", "SHOAL_X=$(reboot)"), Code.FIELD_INVALID),
        ((*JOINS, "--set", "PATH=/tmp"), Code.FIELD_INVALID),
        (("--enrol", "coordinator", "--token-file", "-"), Code.FIELD_INVALID),
        ((*JOINS, "--listen", "0.0.0.0; reboot"), Code.FIELD_INVALID),
        (("--enrol", "c:1", "--token-file", "/nowhere"), Code.NOT_FOUND),
        (("--token-file", "-"), Code.FIELD_MISSING),
        ((), Code.FIELD_MISSING),
        ((*JOINS, "--wheels", "/var/empty"), Code.NOT_FOUND),
        ((*JOINS, "--python", "/nowhere/python3"), Code.NOT_FOUND),
        (("--upgrade", "--no-start"), Code.NOT_FOUND),
        (("--rollback",), Code.NOT_FOUND),
    ],
)
def test_it_refuses_with_a_code_and_a_remedy(tmp_path: Path, arguments: tuple[str, ...], code: Code) -> None:
    done = install(*arguments, facts=machine(tmp_path))
    assert done.returncode == 1, done.stdout
    assert re.fullmatch(rf"found: .+; wanted: .+; try: .+ \({code}\)\n", done.stderr), done.stderr


def test_no_index_is_asked_for_a_package_of_ours(tmp_path: Path) -> None:
    """There they are somebody else's: wheels alone, or sources by their path, else nothing."""
    alone = tmp_path / "alone"
    alone.mkdir()
    script = shutil.copy(SCRIPT, alone / "install.sh")
    shutil.copytree(SCRIPT.parent / "systemd", alone / "systemd")
    facts = machine(tmp_path / "machine")
    refused = install(*JOINS, facts=facts, script=Path(script))
    assert refused.returncode == 1
    assert refused.stderr.startswith("found: neither wheels nor Shoal's sources"), refused.stderr
    assert refused.stderr.rstrip().endswith(f"({Code.NOT_FOUND})"), refused.stderr
    assert "pip" not in refused.stdout

    (alone / "wheels").mkdir()
    (alone / "wheels" / "shoal_orchestrator_agent-0.1.0-py3-none-any.whl").touch()
    (asked,) = re.findall(r"^.*pip install.*$", install(*JOINS, facts=facts, script=Path(script)).stdout, re.MULTILINE)
    assert f"--no-index --find-links {alone / 'wheels'} shoal-orchestrator-agent[cpu]" in asked

    (beside,) = re.findall(r"^.*pip install.*$", install(*JOINS, facts=facts).stdout, re.MULTILINE)
    assert f"--constraint {ROOT}/constraints.txt {ROOT}/protos {ROOT}/agents[cpu]" in beside
    assert " shoal-orchestrator" not in beside


def test_it_refuses_a_machine_that_will_not_do(tmp_path: Path) -> None:
    small = install(*JOINS, facts=machine(tmp_path, memory_mb=256))
    assert small.stderr.startswith("found: 256 MB of memory")
    assert small.stderr.endswith(f"({Code.MEMORY_SHORT})\n")
    strange = install(*JOINS, facts=machine(tmp_path), machine_name="armv7l")
    assert strange.stderr.startswith("found: a processor armv7l")
    assert strange.stderr.endswith(f"({Code.NOT_SUPPORTED_YET})\n")


@pytest.mark.parametrize("arguments", [("--nonsense",), ("--enrol",), ("--part", "x"), ("--role", "x")])
def test_a_wrong_command_line_ends_with_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert install(*arguments, facts=machine(tmp_path)).returncode == 2


def test_every_refusal_has_a_code_of_ours() -> None:
    codes = set(re.findall(r"refuse ([A-Z_]+) ", SCRIPT.read_text()))
    assert len(codes) > 5
    assert codes <= {str(code) for code in Code}


def test_python_is_looked_at_and_not_only_found(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.10.12 ;; *) exit 1 ;; esac\n")
    old.chmod(0o755)
    done = install(*JOINS, "--python", str(old), facts=machine(tmp_path))
    assert done.stderr.startswith(f"found: {old}: Python 3.10.12; wanted: Python 3.11 or newer")
    assert done.stderr.endswith(f"({Code.NOT_FOUND})\n")
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\necho venv\n")  # as Debian's without python3-venv
    bare.chmod(0o755)
    assert "apt-get install python3-venv" in install(*JOINS, "--python", str(bare), facts=tmp_path).stderr


def function_of_script(name: str) -> str:
    found = re.search(rf"^{name}\(\) \{{.*?^\}}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


STUBS: Final = """
dry= start=yes has_systemd=yes changed= unit=agent.service program=agent state=$home
run() { "$@"; }
say() { :; }
refuse() { exit 1; }
systemctl() { :; }
journalctl() { :; }
sleep() { :; }
serves() { [ -e "$home/current/good" ]; }
"""


def releases_after(home: Path, *steps: str) -> tuple[str, str, set[str]]:
    """(current, previous, what is kept) after releases were made, of which only those named good.. serve; `back` is a
    rollback."""
    functions = "\n".join(map(function_of_script, ("choose", "start_unit", "rollback")))
    for step in steps:
        act = "rollback"
        if step != "back":
            (home / "releases" / step).mkdir(parents=True)
            if step.startswith("good"):
                (home / "releases" / step / "good").touch()
            act = f"choose $home/releases/{step} new; start_unit"
        script = f"home={home}\n{STUBS}\n{functions}\n{act}"
        done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=False, timeout=60)
        serves = (home / "current" / "good").exists()
        assert done.returncode == (0 if serves else 1), done.stderr
    previous = home / "previous"
    return (
        (home / "current").readlink().name,
        previous.readlink().name if previous.is_symlink() else "",
        {each.name for each in (home / "releases").iterdir()},
    )


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        (("good1",), ("good1", "", {"good1"})),
        (("good1", "good2", "good3"), ("good3", "good2", {"good2", "good3"})),
        (("good1", "bad1"), ("bad1", "good1", {"good1", "bad1"})),
        (("good1", "bad1", "bad2", "bad3"), ("bad3", "good1", {"good1", "bad3"})),
        (("good1", "bad1", "bad2", "back"), ("good1", "good1", {"good1"})),
        (("good1", "bad1", "good2"), ("good2", "good1", {"good1", "good2"})),
        (("good1", "good2", "back"), ("good1", "good2", {"good1", "good2"})),
        (("good1", "good2", "back", "back"), ("good2", "good1", {"good1", "good2"})),
    ],
)
def test_the_last_release_that_served_is_kept(
    tmp_path: Path, steps: tuple[str, ...], left: tuple[str, str, set[str]]
) -> None:
    """An upgrade that fails and is tried again leaves the way back."""
    assert releases_after(tmp_path, *steps) == left


def test_a_release_that_an_older_script_left_counts_as_served(tmp_path: Path) -> None:
    old = tmp_path / "releases" / "old"
    old.mkdir(parents=True)
    (tmp_path / "current").symlink_to(old)
    assert releases_after(tmp_path, "bad1", "bad2") == ("bad2", "old", {"old", "bad2"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs")
def test_root_follows_no_link_that_the_services_user_left() -> None:
    function = function_of_script("write_token")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        state, victim = folder / "state", folder / "victim"
        state.mkdir()
        victim.write_text("of root")
        (state / "token.new").symlink_to(victim)
        shutil.chown(state, "nobody")
        script = f"dry= token=- state={state}\nrun() {{ :; }}\n{function}\nwrite_token"
        for user in ("-u shoal", "shoal:shoal"):
            script = script.replace(user, user.replace("shoal", "nobody"))
        subprocess.run(["sh", "-euc", script], input="secret", text=True, check=False, timeout=30)
        assert (victim.read_text(), victim.owner()) == ("of root", "root")
        token = state / "token"
        assert (token.read_text(), token.owner(), token.stat().st_mode & 0o777) == ("secret", "nobody", 0o600)
