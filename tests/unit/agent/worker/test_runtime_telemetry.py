"""ONNX Runtime tells its maker nothing of what an agent runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def traces(folder: Path, statement: str) -> list[str]:
    """Files that a process left which ran a statement, in an environment of its own: the runtime sends nothing either
    where a variable says that a machine for tests runs it."""
    for each in ("home", "scratch"):
        (folder / each).mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TMPDIR": str(folder / "scratch")}
    subprocess.run([sys.executable, "-c", statement], env=environment, check=True, timeout=120)
    return sorted(each.name for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize(
    "module",
    [
        "shoal.agent.worker.engine",
        "shoal.agent.worker.probe",
        "shoal.agent.worker.support",
        "shoal.agent.preparation.answers",
        "shoal.agent.preparation.quantise",
    ],
)
def test_a_process_that_imports_the_runtime_keeps_no_number_of_the_machine(tmp_path: Path, module: str) -> None:
    statement = f"import os, sys, {module}; assert 'onnxruntime' in sys.modules; "
    # The runtime looks at more than this variable to tell whether it may report: where it may not, it leaves nothing.
    assert traces(tmp_path, f"{statement}assert os.environ['ORT_DISABLE_TELEMETRY'] == '1'") == []
