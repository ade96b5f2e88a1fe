"""Seeds that each strike one blow at a step of a move (F05): played, counted, and what holds of all of them."""

import os
from collections import Counter
from time import perf_counter

from harness.report import record
from shoal.simulator.run.seeds import replay, run_seeds
from shoal.simulator.scenarios.region_run import RunOutcome

JOBS = os.cpu_count() or 1


def run_matrix(
    scenario: str, seeds: range, *, of: int, missed_most: float, done_least: float, **said: object
) -> Counter[str]:  # fmt: skip
    """How often each cell was struck. of: how many cells there are. missed_most: the share of seeds whose blow may
    have missed its moment. done_least: the share of ends that are `done`."""
    began = perf_counter()
    outcomes = list(run_seeds(seeds, scenario, JOBS))
    took = perf_counter() - began
    failed = [outcome for outcome in outcomes if outcome.violations]
    struck = Counter(outcome.kinds[0] for outcome in outcomes if outcome.fault_counts.get("fault.struck"))
    missed = [outcome.seed for outcome in outcomes if not outcome.fault_counts.get("fault.struck")]
    counts = Counter[str]()
    for outcome in outcomes:
        counts.update(outcome.counts)
    ends = {name: count for name, count in sorted(counts.items()) if name.startswith(("done", "aborted"))}
    settled = [outcome.converged_s for outcome in outcomes if not outcome.violations]
    record(
        "F05", "S", len(outcomes), **said, cells=len(struck), of=of, missed=len(missed), ends=ends,
        asked=counts["asked"], refused_at_first=counts["failed"], lost=counts["lost"],
        converged_worst_s=round(max(settled, default=0.0), 1), ms_each=round(1000 * took / len(outcomes)),
    )  # fmt: skip
    assert not failed, f"{len(failed)} of {len(outcomes)} seeds failed\n" + "\n".join(
        map(describe_outcome, failed[:10])
    )
    assert len(missed) <= len(outcomes) * missed_most, f"the blow missed its moment: seeds {missed[:20]}"
    assert counts["lost"] == 0
    assert ends["done"] > sum(ends.values()) * done_least
    return struck


def describe_outcome(outcome: RunOutcome) -> str:
    return f"{outcome.kinds}: {replay(outcome)}\n    " + "\n    ".join(outcome.violations[:5])
