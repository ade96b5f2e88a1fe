"""F50: a process hangs but does not end. A local stack replaces a coordinator that hangs, and no request notices."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, region, workload
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

NAME = "kept"
REPLACED_WITHIN_S = 120.0
"""10 s of silence in which it had a processor, which take longer where others have one too, half a second until it is
started again, and the start."""
HANGS = """
import signal
def spin(*_):
    while True: pass
signal.signal(signal.SIGUSR1, spin)
"""
"""What Python imports first, in every program of the stack."""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevStack]:
    """Of programs that hang on request."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(hooks))
    with region(tmp_path / "stack", 1) as found:
        yield found


def test_f50_a_hung_coordinator_of_a_local_stack_is_replaced(stack: DevStack) -> None:
    stack.apply(workload(NAME, "relu"))
    stack.wait_serving(NAME)
    ((pid, _),) = stack.processes("coordinator", "coordinator")
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, NAME, clients=2) as load:
        at = load.now()
        os.kill(pid, signal.SIGUSR1)

        def is_replaced() -> bool:
            return pid not in {other for other, _ in stack.processes("coordinator", "coordinator")} and bool(
                stack.placements(NAME)
            )

        wait_until(is_replaced, REPLACED_WITHIN_S, "another coordinator that answers", every_s=0.2)
        away_s = load.now() - at
        load.wait_for(20)
        silent_s = load.longest_gap_s(at)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    (line,) = stack.log_lines("coordinator", "event_loop_stuck")
    assert line["code"] == Code.COORDINATOR_STUCK
    assert silent_s < 1.0, "requests need no coordinator"
    record("F50", "P", 1, what="coordinator of a local stack", away_s=round(away_s, 1), silent_s=round(silent_s, 2))
