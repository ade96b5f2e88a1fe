"""How a worker keeps its place on the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.agent.worker.isolation import run_at_low_priority
from shoal.host import sandbox

NICE = """
import os, threading
from shoal.agent.worker.isolation import run_at_low_priority
os.nice(max(0, {above} - os.nice(0)))
print(run_at_low_priority(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) - os.nice(0))
"""


NAMES = """
import sys, threading
from pathlib import Path
from shoal.agent.worker.isolation import isolate
isolate(Path("{folder}"), Path("{folder}"), [Path(each) for each in sys.argv[1:]])
try:
    Path(f"/proc/self/task/{{threading.get_native_id()}}/comm").write_text("named")
except OSError as error:
    print(type(error).__name__)
else:
    print(Path("/proc/self/comm").read_text().strip())
"""


@pytest.mark.parametrize(("devices", "found"), [(["/dev/null"], "named"), ([], "PermissionError")])
def test_a_worker_with_devices_names_its_threads(tmp_path: Path, devices: list[str], found: str) -> None:
    """CUDA opens no device where it may not."""
    if any(each.startswith("files:") for each in sandbox.unsupported_restrictions()):
        pytest.skip("the kernel restricts no files")
    command = [sys.executable, "-c", NAMES.format(folder=tmp_path), *devices]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-1:] == [found], done.stderr


@pytest.mark.parametrize("agents", [12, 19])
def test_a_load_runs_though_its_agent_was_started_at_a_lower_priority(agents: int) -> None:
    """Only root may raise a priority."""
    done = subprocess.run(
        [sys.executable, "-c", NICE.format(above=agents)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_what_a_load_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_at_low_priority(lambda: 1 // 0)
