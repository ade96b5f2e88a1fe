"""`shoal demo`, which README's first command starts: the program itself, on real models and processes. How fast a
machine shows it is not judged; what it promises is, and that its end is the end of all that it started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil
import pytest

from harness.wait import wait_until

LIMIT_S: Final = 540.0
"""It takes about two minutes on two cores that nothing else uses."""
ENDS_WITHIN_S: Final = 60.0
"""Each member has ten seconds to end, and agents, gateways, coordinators and the federation do so in turn."""


@pytest.mark.timeout(600)
def test_every_expectation_of_the_demo_holds(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("shoal")
    # Addresses of sockets are short, and a test's own folder is not.
    with tempfile.TemporaryDirectory(prefix="demo-") as scratch:
        ran = subprocess.run(
            [program, "demo", "--json"],
            env={**os.environ, "HOME": str(tmp_path), "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        left = list(Path(scratch).iterdir())
    assert ran.returncode in (0, 1), ran.stderr
    report = json.loads(ran.stdout)
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert ran.returncode == 0
    for part in ("migration", "load", "vendors"):
        found = report[part]
        assert found["sent"] > 0
        assert (found["lost"], found["wrong"]) == (0, 0), part
    assert left == [], "everything is stopped and nothing is left behind"


def alive(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    found = set[psutil.Process]()
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.add(each)
    return found


def members(folder: str) -> set[psutil.Process]:
    """What runs for a folder, which command lines name, and all that these have started."""
    named = [each for each in psutil.process_iter(["cmdline"]) if folder in " ".join(each.info["cmdline"] or ())]
    found = set(named)
    for each in named:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(each.children(recursive=True))
    return alive(found)


@pytest.mark.timeout(600)
def test_a_demo_that_is_killed_leaves_nothing_that_runs(tmp_path: Path) -> None:
    """While its regions start; nobody would know that they are there, nor how to stop them."""
    program = Path(sys.executable).with_name("shoal")
    with tempfile.TemporaryDirectory(prefix="demo-") as scratch:

        def has_agent() -> bool:
            return any({"run", "node"} <= {*each.cmdline()} for each in members(scratch))

        demo = subprocess.Popen(
            [program, "demo", "--json"],
            env={**os.environ, "HOME": str(tmp_path), "TMPDIR": scratch},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(has_agent, LIMIT_S, "an agent to run")
            seen = members(scratch)
            demo.kill()
            assert demo.wait() == -signal.SIGKILL, "it ran until then"
            wait_until(lambda: not alive(seen) and not members(scratch), ENDS_WITHIN_S, f"all of these to end: {seen}")
        finally:
            demo.kill()
            demo.wait()
            for each in members(scratch):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        assert list(Path(scratch).iterdir()) == [], "as a demo that ends by itself leaves it"
