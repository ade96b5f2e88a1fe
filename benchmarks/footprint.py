"""An idle agent's supervisor beside an empty Python process with the same imports: `shoal bench footprint`.

Starts a local region (one plain CPU agent, one gateway), leaves it idle without a model, and measures the agent's
supervisor: resident, proportional and unshared memory, CPU over some idle time, and which large libraries it maps. The
front and the spare worker are shown too, and supervisor and spare together. Exit status 1 when a goal is not met: no
ONNX Runtime and no cryptography library in supervisor and front, the supervisor at most `--rss-mib` of resident memory,
`--over-mib` of it above the empty process, and `--cpu` of one core; the front at most 40 MB of resident memory,
supervisor and spare together at most 60 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from _machine import machine_line

from shoal.client import Contexts
from shoal.devstack.control import Control
from shoal.devstack.layout import StackOptions

IMPORTS = "import shoal.agent.main.run"
RSS_MIB = 45.0
"""A goal, not a measurement."""
FRONT_MIB = 40e6 / 2**20
"""A goal, not a measurement: 40 MB of the front of a node that exchanges requests with no other region."""
TOGETHER_MIB = 60e6 / 2**20
"""A goal, not a measurement: 60 MB of the supervisor and its idle spare together (PSS)."""
OVER_MIB = 16.0
"""A goal, not a measurement: a device of 512 MiB spends a thirtieth of it on supervision."""
CPU = 0.01
"""A goal, not a measurement: more would noticeably drain an idle device's battery."""
LIBRARIES = ("onnxruntime", "cryptography")
"""Large libraries, by a part of their files' paths."""
EMPTY_NAME = "empty, same imports"
EMPTY = f"{IMPORTS}; import signal; print(flush=True); signal.pause()"


@dataclass(frozen=True, slots=True)
class ProcessFootprint:
    """What one process uses while idle."""

    # Resident memory, in bytes.
    rss: int
    # Resident memory, where each page counts as a part among those who share it (PSS), in bytes.
    pss: int
    # Memory that only this process uses (USS), in bytes.
    unshared: int
    # Share of one core over the idle time.
    cpu: float
    # Number of threads.
    threads: int
    # Those of LIBRARIES that the process maps.
    mapped: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="idle time to measure")
    parser.add_argument("--rss-mib", type=float, default=RSS_MIB, help="the goal: MiB of the supervisor")
    parser.add_argument("--over-mib", type=float, default=OVER_MIB, help="the goal: MiB above the empty process")
    parser.add_argument("--cpu", type=float, default=CPU, help="the goal: share of one core")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(machine_line(), file=sys.stderr if arguments.json else sys.stdout)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        control = Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        try:
            up = control.up(StackOptions(agents=1, relayed=False), lambda text: print(f"# {text}", file=sys.stderr))
            agent = up.stack.agents[0].name
            processes = {row["role"]: psutil.Process(row["pid"]) for row in control.status() if row["name"] == agent}
            figures = measure(processes, arguments.seconds)
        finally:
            control.down()
    missed = missed_goals(figures, rss_mib=arguments.rss_mib, over_mib=arguments.over_mib, cpu=arguments.cpu)
    if arguments.json:
        print(json.dumps({"missed": missed, **{name: asdict(each) for name, each in figures.items()}}, indent=1))
    else:
        show(figures)
        print("GOAL met" if not missed else f"GOAL NOT met: {'; '.join(missed)}")
    sys.exit(1 if missed else 0)


def missed_goals(figures: Mapping[str, ProcessFootprint], *, rss_mib: float, over_mib: float, cpu: float) -> list[str]:
    """The missed goals, in words. rss_mib: resident MiB of the supervisor. over_mib: MiB of them above the empty
    process. cpu: share of one core."""
    missed = [f"no {role} was measured" for role in (EMPTY_NAME, "supervisor", "front") if role not in figures]
    if missed:
        return missed
    supervisor, front = figures["supervisor"], figures["front"]
    missed += [f"supervisor maps {name}" for name in supervisor.mapped]
    missed += [f"front maps {name}" for name in front.mapped]
    if front.rss > FRONT_MIB * 2**20:
        missed.append(f"front {front.rss / 2**20:.1f} MiB, at most {FRONT_MIB:.1f}")
    if supervisor.rss > rss_mib * 2**20:
        missed.append(f"supervisor {supervisor.rss / 2**20:.1f} MiB, at most {rss_mib:g}")
    over = (supervisor.rss - figures[EMPTY_NAME].rss) / 2**20
    if over > over_mib:
        missed.append(f"supervisor {over:.1f} MiB above the empty process, at most {over_mib:g}")
    together = supervisor.pss + figures["worker"].pss if "worker" in figures else 0
    if together > TOGETHER_MIB * 2**20:
        missed.append(f"supervisor and spare {together / 2**20:.1f} MiB (PSS), at most {TOGETHER_MIB:.1f}")
    if supervisor.cpu > cpu:
        missed.append(f"supervisor at {supervisor.cpu:.2%} of a core, at most {cpu:.2%}")
    return missed


def show(figures: Mapping[str, ProcessFootprint]) -> None:
    print(f"{'process':24} {'RSS MiB':>8} {'PSS':>6} {'unshared':>9} {'CPU':>7} {'threads':>8}  maps")
    for name, each in figures.items():
        print(
            f"{name:24} {each.rss / 2**20:8.1f} {each.pss / 2**20:6.1f} {each.unshared / 2**20:9.1f} {each.cpu:7.2%}"
            f" {each.threads:8}  {', '.join(each.mapped) or '-'}"
        )
    if "worker" in figures:
        together = figures["supervisor"].pss + figures["worker"].pss
        print(f"supervisor with its idle spare worker: {together / 2**20:.1f} MiB (PSS)")


def measure(processes: dict[str, psutil.Process], seconds: float) -> dict[str, ProcessFootprint]:
    """Measures all processes, including the empty one, over the same time."""
    with subprocess.Popen([sys.executable, "-c", EMPTY], stdout=subprocess.PIPE) as empty:
        assert empty.stdout is not None
        empty.stdout.readline()
        everyone = {EMPTY_NAME: psutil.Process(empty.pid), **processes}
        before = {name: _cpu_s(process) for name, process in everyone.items()}
        started = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - started
        figures = {name: _footprint_of(process, before[name], passed) for name, process in everyone.items()}
        empty.terminate()
    return figures


def _footprint_of(process: psutil.Process, before: float, passed: float) -> ProcessFootprint:
    memory = process.memory_full_info()
    paths = [each.path for each in process.memory_maps()]
    return ProcessFootprint(
        rss=memory.rss,
        pss=memory.pss,
        unshared=memory.uss,
        cpu=(_cpu_s(process) - before) / passed,
        threads=process.num_threads(),
        mapped=tuple(name for name in LIBRARIES if any(name in path for path in paths)),
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
