"""An idle agent's supervisor beside an empty Python process with the same imports: `shoal bench footprint`.

Starts a local region (one plain CPU agent, one gateway), leaves it alone without a model, and measures the agent's
supervisor: resident and unshared memory, CPU over some idle time, and that it maps no ONNX Runtime. The front and the
spare worker are shown too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shoal.client import Contexts
from shoal.devstack.control import Control
from shoal.devstack.layout import Asked

IMPORTS = "import shoal.agent.main.run, shoal.agent.devices.cpu, shoal.agent.devices.cuda, shoal.agent.devices.emulated"
EMPTY = f"{IMPORTS}; import signal; print(flush=True); signal.pause()"


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes; cpu: share of one core over the idle time."""

    rss: int
    unshared: int
    cpu: float
    threads: int
    runtime_mapped: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="idle time to measure")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        control = Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        try:
            up = control.up(Asked(agents=1), lambda text: print(f"# {text}", file=sys.stderr))
            agent = up.stack.agents[0].name
            processes = {row["role"]: psutil.Process(row["pid"]) for row in control.status() if row["name"] == agent}
            figures = measure(processes, arguments.seconds)
        finally:
            control.down()
    if arguments.json:
        print(json.dumps({name: asdict(each) for name, each in figures.items()}, indent=1))
        return
    print(f"{'process':24} {'RSS MiB':>8} {'unshared':>9} {'CPU':>7} {'threads':>8}  ONNX Runtime")
    for name, each in figures.items():
        mapped = "mapped" if each.runtime_mapped else "no"
        print(
            f"{name:24} {each.rss / 2**20:8.1f} {each.unshared / 2**20:9.1f} {each.cpu:7.2%} {each.threads:8}  {mapped}"
        )


def measure(processes: dict[str, psutil.Process], seconds: float) -> dict[str, Figures]:
    """All at once over the same time, the empty process among them."""
    with subprocess.Popen([sys.executable, "-c", EMPTY], stdout=subprocess.PIPE) as empty:
        assert empty.stdout is not None
        empty.stdout.readline()
        everyone = {"empty, same imports": psutil.Process(empty.pid), **processes}
        before = {name: _cpu_s(process) for name, process in everyone.items()}
        started = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - started
        figures = {name: _figures(process, before[name], passed) for name, process in everyone.items()}
        empty.terminate()
    return figures


def _figures(process: psutil.Process, before: float, passed: float) -> Figures:
    memory = process.memory_full_info()
    return Figures(
        rss=memory.rss,
        unshared=memory.uss,
        cpu=(_cpu_s(process) - before) / passed,
        threads=process.num_threads(),
        runtime_mapped=any("onnxruntime" in mapped.path for mapped in process.memory_maps()),
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
