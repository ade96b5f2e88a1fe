"""The region under seeded faults: safety while they strike, convergence when they end (I1 to I12; F05, F14 as S).

`pytest tests/simulation --seeds N --first-seed S`, or SHOAL_SEEDS and SHOAL_FIRST_SEED; a failure prints the command
that plays its seed again.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from harness.report import record
from shoal.simulator.run.seeds import RUN_BY_SCENARIO, replay, run_seeds
from shoal.simulator.scenarios.region_run import CONVERGE_TIMEOUT_S, RunOutcome

JOBS = os.cpu_count() or 1
SMOKE = 8
IDLE_SEEDS = 12
CALM_SEEDS = 10
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def describe_outcome(outcome: RunOutcome) -> str:
    return f"{replay(outcome)}\n    " + "\n    ".join(outcome.violations[:5])


@pytest.mark.timeout(3600)
def test_f49_every_seed_is_safe_and_then_converges(seeds: range) -> None:
    began = perf_counter()
    outcomes = list(run_seeds(seeds, "storm", JOBS))
    took = perf_counter() - began
    virtual = sum(outcome.virtual_s for outcome in outcomes)
    struck = {kind: sum(outcome.fault_counts.get(kind, 0) for outcome in outcomes) for kind in _faults(outcomes)}
    requests = {code: sum(outcome.counts.get(code, 0) for outcome in outcomes) for code in _codes(outcomes)}
    settled = [outcome.converged_s for outcome in outcomes if not outcome.violations]
    failed = [outcome for outcome in outcomes if outcome.violations]
    record(
        "F49",
        "S",
        len(outcomes),
        failed=len(failed),
        seeds_a_second=round(len(outcomes) / took, 2),
        virtual_to_real=round(virtual / took),
        converged_worst_s=round(max(settled, default=float("nan")), 1),
        converged_median_s=round(median(settled), 1) if settled else None,
        struck=struck,
        requests=requests,
    )
    assert not failed, f"{len(failed)} of {len(outcomes)} seeds failed\n" + "\n".join(
        map(describe_outcome, failed[:10])
    )
    assert max(settled) <= CONVERGE_TIMEOUT_S
    if len(outcomes) >= 60:  # a fault that never struck was not survived
        assert min(struck.values()) > 0, struck


def test_seeds_that_once_failed() -> None:
    numbers = [int(line.split()[0]) for line in REGRESSIONS.read_text().splitlines() if not line.startswith("#")]
    failed = [outcome for outcome in run_seeds(numbers, "storm", JOBS) if outcome.violations]
    assert not failed, "\n".join(map(describe_outcome, failed))


def test_a_calm_region_comes_up_and_loses_no_request() -> None:
    for outcome in run_seeds(range(CALM_SEEDS), "calm", JOBS):
        assert not outcome.violations, describe_outcome(outcome)
        assert set(outcome.counts) <= {"ok", "MODEL_NOT_READY"}, outcome  # not ready: its only model is a poisoned one


def test_replicas_that_nobody_asks_are_unloaded_and_come_back() -> None:
    """Scale to zero under the same faults, with devices that sleep."""
    outcomes = list(run_seeds(range(IDLE_SEEDS), "idle", JOBS))
    failed = [outcome for outcome in outcomes if outcome.violations]
    assert not failed, "\n".join(map(describe_outcome, failed))
    events = RUN_BY_SCENARIO["idle"](0).events
    unloaded = {name for event in events if event.kind == "front.configured" for name, _ in event.facts["unloaded"]}
    starts = Counter(event.facts["assignment"] for event in events if event.kind == "worker.start")
    assert any(starts[name] > 1 for name in unloaded), "none was unloaded and woken"


def test_the_same_seed_gives_the_same_record() -> None:
    """In another process, with other hashes and addresses: byte for byte."""
    first, second = (_digests(hash_seed) for hash_seed in ("0", "4711"))
    assert len(first) == SMOKE
    assert first == second


def _digests(hash_seed: str) -> list[str]:
    """Of the records of the first seeds."""
    played = subprocess.run(
        [sys.executable, "-m", "shoal.simulator", "--seed", "0", "--count", str(SMOKE), "--jobs", "1"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    digests = [line.split()[1] for line in played.stdout.splitlines() if line[:1].isdigit()]
    assert digests, played.stderr
    return digests


def _faults(outcomes: list[RunOutcome]) -> list[str]:
    return sorted({kind for outcome in outcomes for kind in outcome.fault_counts})


def _codes(outcomes: list[RunOutcome]) -> list[str]:
    return sorted({code for outcome in outcomes for code in outcome.counts})
