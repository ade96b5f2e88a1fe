"""Rounds of one measurement by turns: of the Python sources, and of modules that are compiled.

Each round is a process of its own, by whose clock the CPU time of a request is told: other programs of the machine
hardly change it.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from _compiled import environment_of
from _machine import machine_line

from shoal.host.compiled import is_compiled

Measure = Callable[[Sequence[str], cProfile.Profile | None], Coroutine[Any, Any, dict[str, float]]]
"""CPU microseconds of a request, by case. The profile is to be on while they are answered."""


def run(about: str | None, cases: Sequence[str], measure: Measure) -> None:
    """The program of a measurement. about: for its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=cases, default=cases)
    parser.add_argument("--compiled", type=Path, metavar="FOLDER", help="what deploy/compiled/build.py made")
    parser.add_argument("--profile", action="store_true", help="functions by their own time")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once or options.profile:
        profile = cProfile.Profile(time.process_time) if options.profile else None
        found = asyncio.run(measure(options.only, profile))
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        print(json.dumps({**found, "compiled": float(is_compiled())}))
        return
    print(machine_line())
    builds: dict[str, Path | None] = {"python": None, **({"compiled": options.compiled} if options.compiled else {})}
    rounds = [{name: _run_once(options.only, folder) for name, folder in builds.items()} for _ in range(options.rounds)]
    least: dict[str, dict[str, float]] = {}
    for case in options.only:
        of = {name: [each[name][case] for each in rounds] for name in builds}
        least[case] = {name: round(min(times), 1) for name, times in of.items()}
        cells = (f"{name} {min(times):>8.1f} us (median {statistics.median(times):.1f})" for name, times in of.items())
        print(f"{case:<22} {'  '.join(cells)}")
    print(json.dumps(least))


def _run_once(cases: Sequence[str], folder: Path | None) -> dict[str, float]:
    """One round, in a process of its own."""
    command = [sys.executable, sys.argv[0], "--once", "--only", *cases]
    environment = None if folder is None else environment_of(folder)
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    if bool(told.pop("compiled")) is not (folder is not None):
        raise SystemExit("another build of the modules was measured than was asked for")
    return told
