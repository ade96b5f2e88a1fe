"""How a worker keeps its place on the machine."""

import shutil
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


HELD = """
import os
from pathlib import Path
from shoal.agent.worker.isolation import isolate
isolate(Path("{folder}"), Path("{folder}"), [Path("/dev/null")])
own = Path("/proc/self/fd")
held = [each for each in own.iterdir() if each.is_symlink() and str(each.readlink()).startswith("/proc/")]
print(*sorted(f"{{each.readlink().name}} {{os.get_inheritable(int(each.name))}}" for each in held), sep="\\n")
"""


def test_a_worker_holds_the_entries_of_proc_that_it_may_write(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HELD.format(folder=tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert [line for line in done.stdout.splitlines() if "fd" not in line] == ["clear_refs False", "task False"]


SHORT_OF_MEMORY = """
import os, subprocess, threading
from pathlib import Path
from shoal.agent.worker.isolation import isolate, reset_peak

def write():
    Path(f"/proc/self/task/{{threading.get_native_id()}}/comm").write_text("named")
    reset_peak()
    return b"written"

(told, tell), (heard, hear) = os.pipe(), os.pipe()
if os.fork() == 0:
    isolate(Path("{folder}"), Path("{folder}"), [Path("/dev/null")])
    os.write(tell, write())
    os.read(heard, 1)
    os.write(tell, write())
    os._exit(0)
os.close(tell)
print(os.read(told, 7).decode())
subprocess.run(["mount", "-o", "remount", "/proc"], check=True)
os.write(hear, b"x")
print(os.read(told, 7).decode())
"""
OWN_PROC = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
"""For a /proc whose entries can be dropped, as where memory is short, without those of the machine."""


def test_a_worker_writes_the_same_when_the_kernel_has_dropped_entries_of_proc(tmp_path: Path) -> None:
    if any(each.startswith("files:") for each in sandbox.unsupported_restrictions()):
        pytest.skip("the kernel restricts no files")
    if shutil.which("unshare") is None or subprocess.run([*OWN_PROC, "true"], check=False, timeout=60).returncode != 0:
        pytest.skip("no /proc of its own here")
    command = [*OWN_PROC, sys.executable, "-c", SHORT_OF_MEMORY.format(folder=tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["written", "written"], done.stderr


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
