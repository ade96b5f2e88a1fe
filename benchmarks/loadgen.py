"""MLPerf's LoadGen against a local region's gateway and against ONNX Runtime in process: `shoal bench loadgen`.

LoadGen (MLCommons) issues the queries, measures time and judges: VALID and INVALID come from its own summary. Each of
four scenarios runs against each of two systems: `in-process` runs the model with one thread per core; `shoal` asks the
gateway of a local region (one plain CPU agent, one gateway, no relays) through an unmodified tritonclient over TLS.
Every answer is compared with ONNX Runtime's, bit for bit.

The load: the in-process system's Offline throughput is measured first. A third of it is the rate of the Server
scenario, for both systems, and the least that `shoal` must reach in Offline. The other two thirds allow for client,
LoadGen, gateway, agent and worker sharing the cores, which the in-process system has to itself. SingleStream and
MultiStream (8 samples a query) have no target. The model is magika's (`--model`). The Server's bound on p99 is 100 ms,
MLPerf's for object detection (it has none for these models), unless `--server-ms` says otherwise.

The least numbers of queries are those that LoadGen's early stopping needs for its estimates: 64 for a p90, 662 for a
p99. Runs are shorter than MLPerf's ten minutes, so no figure here is an MLPerf result.

Exit status 1 when any run is invalid, an answer is wrong or missing, or `shoal` does not reach its third.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from _machine import machine_line
from _serving.models import CLASSIFIER, MAGIKA, RECOGNISER, ServedModel, served_model
from _serving.region import place

from shoal.client import Contexts
from shoal.devstack.control import Control, RunningStack
from shoal.devstack.layout import StackOptions

SCENARIOS: Final = ("SingleStream", "MultiStream", "Server", "Offline")
P90_QUERIES: Final = 64
P99_QUERIES: Final = 662
"""LoadGen's early stopping: fewer queries give no estimate of a p90 or a p99 at 99 % confidence."""
SAMPLES: Final = 64
"""Different inputs that LoadGen chooses from."""
IN_MULTI_STREAM: Final = 8
"""Samples of one query, as in MLPerf."""
SHARE: Final = 1 / 3
OFFLINE_SPARE: Final = 1.2
"""Factor on the samples answered in the previous run, so that an Offline run does not end before its least time."""
PROBE_S: Final = 4.0
FASTEST_NS: Final = 100_000
"""No system here answers faster. LoadGen creates the queries of a stream beforehand, enough to fill the least time at
this latency; a run that uses them up earlier is INVALID."""


@dataclass(frozen=True, slots=True)
class LoadGenRun:
    """One scenario run against one system."""

    # "in-process" or "shoal".
    system: str
    # One of SCENARIOS.
    scenario: str
    # True if LoadGen says VALID.
    valid: bool
    # What `value` is, with its unit: "p90 ms", "p99 ms" or "per s".
    what: str
    # The figure that LoadGen reports; NaN if it reports none.
    value: float
    # What `value` must reach; NaN without a target.
    target: float
    # Samples answered, failed and wrong ones included.
    samples: int
    # Samples that failed.
    failed: int
    # Samples whose answer differs from ONNX Runtime's.
    wrong: int
    # Least number of queries of the run.
    queries_least: int
    # How often each failure occurred.
    reasons: Mapping[str, int]
    # Lines of LoadGen's summary that explain INVALID; empty for a valid run.
    why_invalid: tuple[str, ...] = ()

    @property
    def has_passed(self) -> bool:
        """A NaN target always passes."""
        return self.valid and not self.failed and not self.wrong and not self.value < self.target


FIGURES: Final = {
    "SingleStream": ("90.0th percentile latency (ns)", "p90 ms", 1e-6),
    "MultiStream": ("99.0th percentile latency (ns)", "p99 ms", 1e-6),
    "Server": ("99.00 percentile latency (ns)", "p99 ms", 1e-6),
    "Offline": ("Samples per second", "per s", 1.0),
}
"""For each scenario: the line of LoadGen's summary, its name here, and its scale."""


WHY_INVALID: Final = (
    r"^\s*((?:Min duration|Min queries|Early stopping|Performance constraints) satisfied : NO.*|\* .+)$"
)
TOO_FEW: Final = "Min duration satisfied : NO"
"""In an Offline run, whose queries are created beforehand, this means that the system was faster than expected."""


def read_summary(scenario: str, summary: str) -> tuple[bool, float, tuple[str, ...]]:
    """Whether LoadGen says VALID, its figure, and its reasons if it says INVALID. Raises ValueError for a summary
    without a result."""
    fields = dict(re.findall(r"^\s*([^:\n]+?)\s*:\s*(.+?)\s*$", summary, re.MULTILINE))
    if fields.get("Result is") not in ("VALID", "INVALID"):
        raise ValueError(f"no result in LoadGen's summary:\n{summary[:2000]}")
    line, _, scale = FIGURES[scenario]
    why = re.findall(WHY_INVALID, summary, re.MULTILINE)
    valid = fields["Result is"] == "VALID"
    return valid, float(fields.get(line, "nan")) * scale, () if valid else tuple(each.strip() for each in why)


@dataclass(frozen=True, slots=True)
class LoadGenBench:
    """Runs scenarios against both systems, each run in a process of its own."""

    # Model, inputs, addresses and certificates, as `_loadgen_child.py` takes them.
    spec: Mapping[str, Any]
    # Folder of LoadGen's logs.
    scratch: Path
    # Least time of a run, in seconds.
    seconds: float
    # Bound on p99 in the Server scenario, in milliseconds.
    server_ms: float
    # Most requests that the client has in flight, by system.
    at_once: Mapping[str, int]

    def run(
        self, system: str, scenario: str, *, per_s: float, target: float = math.nan, seconds: float = 0.0
    ) -> LoadGenRun:
        """per_s: samples a second that Server sends, and that Offline is expected to answer. seconds: least time; 0 for
        the bench's own."""
        seconds = seconds or self.seconds
        least = {"SingleStream": P90_QUERIES, "Offline": 1}.get(scenario, P99_QUERIES)
        settings: dict[str, Any] = {"min_duration_ms": int(seconds * 1000), "min_query_count": least}
        match scenario:
            case "SingleStream":
                settings["single_stream_expected_latency_ns"] = FASTEST_NS
            case "MultiStream":
                settings["multi_stream_expected_latency_ns"] = FASTEST_NS
                settings["multi_stream_samples_per_query"] = IN_MULTI_STREAM
            case "Server":
                settings |= {"server_target_qps": per_s, "server_target_latency_ns": int(self.server_ms * 1e6)}
            case "Offline":
                settings["offline_expected_qps"] = per_s
        log = self.scratch / f"{system}-{scenario}"
        spec = {
            **self.spec,
            "system": system,
            "scenario": scenario,
            "settings": settings,
            "at_once": self.at_once[system],
            "log": str(log),
        }
        child = [sys.executable, str(Path(__file__).parent / "_loadgen_child.py"), json.dumps(spec)]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{system} {scenario}: {done.stderr.strip()[-2000:]}")
        counts = json.loads(done.stdout.splitlines()[-1])
        valid, value, why = read_summary(scenario, (log / "mlperf_log_summary.txt").read_text())
        return LoadGenRun(
            system, scenario, valid, FIGURES[scenario][1], value, target, counts["samples"], counts["failed"],
            counts["wrong"], least, counts["reasons"], why,
        )  # fmt: skip

    def offline_throughput(self, system: str) -> float:
        """Samples a second, Offline, in a short run whose verdict does not count."""
        found, per_s = math.nan, 100.0
        for _ in range(2):  # the second with about as many samples as it takes
            found = self.run(system, "Offline", per_s=per_s, seconds=PROBE_S).value
            per_s = found
        return found


def bench(up: RunningStack, model: ServedModel, scratch: Path, arguments: argparse.Namespace) -> list[LoadGenRun]:
    chance = np.random.default_rng(11)
    inputs = scratch / "inputs.npz"
    np.savez(inputs, **{name: random_inputs(value, chance) for name, value in model.inputs.items()})
    folder = Path(up.client.folder)
    spec = {
        "model": str(model.path), "inputs": str(inputs), "name": model.name, "url": up.client.gateway,
        "ca": str(folder / "ca.pem"), "certificate": str(folder / "cert.pem"), "key": str(folder / "key.pem"),
    }  # fmt: skip
    at_once = {"in-process": os.cpu_count() or 1, "shoal": arguments.at_once}
    loads = LoadGenBench(spec, scratch, arguments.seconds, arguments.server_ms, at_once)
    reached = {system: loads.offline_throughput(system) for system in ("in-process", "shoal")}
    third = reached["in-process"] * SHARE
    log_line(f"in-process answers {reached['in-process']:.0f} samples/s Offline; a third of it is {third:.0f}/s")
    runs = []
    for scenario in SCENARIOS:
        for system in ("in-process", "shoal"):
            per_s = reached[system] * OFFLINE_SPARE if scenario == "Offline" else third
            target = third if scenario == "Offline" else math.nan
            run = loads.run(system, scenario, per_s=per_s, target=target)
            if scenario == "Offline" and TOO_FEW in " ".join(run.why_invalid):
                run = loads.run(system, scenario, per_s=run.value * OFFLINE_SPARE, target=target)
            runs.append(run)
            log_line(format_run(runs[-1]))
    return runs


def random_inputs(value: np.ndarray[Any, Any], chance: np.random.Generator) -> Any:
    """SAMPLES random values with the shape and type of one that the model takes; integers are bytes (magika's)."""
    shape = (SAMPLES, *value.shape[1:])
    if np.issubdtype(value.dtype, np.integer):
        return chance.integers(0, 256, shape, value.dtype)
    return chance.random(shape, np.float32)


def format_run(run: LoadGenRun) -> str:
    verdict = "VALID" if run.valid else "INVALID"
    target = "" if math.isnan(run.target) else f"  (at least {run.target:.0f})"
    told = "".join(f"\n    {line}" for line in run.why_invalid)
    told += "".join(f"\n    {count} x {reason}" for reason, count in run.reasons.items())
    return (
        f"{run.scenario:13} {run.system:11} {verdict:8} {run.value:9.2f} {run.what:7} {run.samples:8} {run.failed:7} "
        f"{run.wrong:6} {run.queries_least:8}{target}{told}"
    )


def log_line(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(MAGIKA, CLASSIFIER, RECOGNISER), default=MAGIKA)
    parser.add_argument("--seconds", type=float, default=20.0, help="the least time of a run")
    parser.add_argument("--server-ms", type=float, default=100.0, help="the Server scenario's bound on p99")
    parser.add_argument("--at-once", type=int, default=64, help="requests that the client has in flight, at most")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(machine_line(), file=sys.stderr if arguments.json else sys.stdout)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        control = Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        try:
            up = control.up(StackOptions(agents=1, relayed=False), log_line)
            model = served_model(arguments.model, Path(scratch))
            place(up, [model])
            runs = bench(up, model, Path(scratch), arguments)
        finally:
            control.down()
    if arguments.json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
    else:
        print(
            f"{'scenario':13} {'system':11} {'LoadGen':8} {'figure':>17} {'samples':>8} {'failed':>7} {'wrong':>6} "
            f"{'least q.':>8}"
        )
        print("\n".join(format_run(run) for run in runs))
    missed = [run for run in runs if not run.has_passed]
    print("PASSED" if not missed else f"FAILED: {', '.join(f'{run.scenario} {run.system}' for run in missed)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
