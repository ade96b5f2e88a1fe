"""Requests under seeded faults: replicas that hang, slow down, die or cannot be reached, bursts, a request that ends
its worker. Fronts route by the agent's own core; checkers read where each request went and what became of it.

`pytest tests/simulation/test_request_rows.py --request-seeds N`, or SHOAL_REQUEST_SEEDS; 10,000 by one command:
`python -m shoal.simulator --scenario requests --seed 0 --count 10000`.
"""

import os
from collections import Counter

from simulation.fault_matrix import describe_outcome

from harness.report import record
from shoal.simulator.run.seeds import run_seeds
from shoal.simulator.scenarios.request_faults import REQUEST_FAULTS

JOBS = os.cpu_count() or 1
NAME = "requests"
SEEN = {"ok", "OVERLOADED", "DEADLINE_EXCEEDED", "REPLICA_UNREACHABLE", "REQUEST_CRASHED_WORKER", "MODEL_NOT_READY"}
"""Ends of requests without which the seeds show little."""
REGRESSIONS = (
    41,  # the checker forgot a failure that the front still knew
    138,  # a request that a busy replica refused went to one that had failed, past an idle standby
    144,  # the simulator restored the power of a machine that had died for good
    263,  # the checker thought that every front knows of a worker's restart
    1121,  # a front sent a request on that the next node had found to blame
    1446,  # a new supervisor stopped a worker under a request, because no assignment was left for it
    654,  # the next node ran a request twice more that had ended a worker already
    2345,  # the checker did not know that a request may still run where it was given up
    2548,  # two fronts had the same request that ends workers
    3007,  # a move's target was made a staged standby, and the move never ended
    4441,  # the quota forced out what it had let in, over and over
    3707,  # the judge did not know that a model with three crashes is not started again
)


def test_f49_requests_go_where_they_may_whatever_fails(request_seeds: range) -> None:
    outcomes = list(run_seeds(request_seeds, NAME, JOBS))
    failed = [outcome for outcome in outcomes if outcome.violations]
    ends = sum((Counter(outcome.counts) for outcome in outcomes), Counter[str]())
    struck = sum((Counter(outcome.fault_counts) for outcome in outcomes), Counter[str]())
    record("F49", "S", len(outcomes), scenario=NAME, failed=len(failed), struck=dict(struck), requests=dict(ends))
    assert not failed, f"{len(failed)} of {len(outcomes)} seeds failed\n" + "\n".join(
        map(describe_outcome, failed[:10])
    )
    if len(outcomes) >= 50:  # what never happened was not checked
        assert ends.keys() >= SEEN, ends
        assert {kind for outcome in outcomes for kind in outcome.kinds} == {kind.name for kind in REQUEST_FAULTS}


def test_seeds_that_once_failed() -> None:
    failed = [outcome for outcome in run_seeds(REGRESSIONS, NAME, JOBS) if outcome.violations]
    assert not failed, "\n".join(map(describe_outcome, failed))


def test_the_same_seed_sends_the_same_requests() -> None:
    first = [outcome.digest for outcome in run_seeds(range(3), NAME, 1)]
    assert first == [outcome.digest for outcome in run_seeds(range(3), NAME, 2)]
