"""`shoal demo`, which README's first command starts: the program itself, on real models and processes. How fast a
machine shows it is not judged; what it promises is."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

LIMIT_S: Final = 540.0
"""It takes about two minutes on two cores that nothing else uses."""


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
