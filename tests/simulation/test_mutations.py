"""Planted bugs are caught by the judge and the invariants in ordinary seeded runs, none by a test written for it."""

import os
from collections.abc import Sequence
from contextlib import closing

import pytest
from simulation.mutations import MUTATIONS, Mutation

from harness.report import record
from shoal.simulator.run.seeds import RUN_BY_SCENARIO, run_seeds
from shoal.simulator.scenarios.region_run import RunOutcome

JOBS = os.cpu_count() or 1
MOST_SEEDS = {"storm": 200, "negotiation": 1000, "matrix": 200, "cross-region": 400, "requests": 100}
FIRST_SEED = 5000
CAUGHT_BY = {
    "a-replica-moves-twice": 5009,
    "agent-takes-any-generation": 5046,
    "award-not-idempotent": 5005,
    "award-sent-before-persisting": 5017,
    "backoff-without-jitter": 5019,
    "clock-loses-its-floor": 5028,
    "coordinator-sends-before-persisting": 5020,
    "crashing-request-is-retried-for-ever": 5023,
    "drain-closes-first": 5019,
    "draining-replica-gets-requests": 5007,
    "ejected-replica-is-never-tried-again": 5004,
    "empty-list-is-healthy": 5013,
    "failed-request-is-not-retried": 5002,
    "failure-ejects-nobody": 5005,
    "front-lets-everybody-in": 5001,
    "hang-up-cuts-a-commit-from-its-memory": 5002,
    "hold-without-expiry": 5005,
    "idle-replica-is-refused": 5001,
    "last-replica-is-ejected": 5002,
    "lease-without-end": 5014,
    "move-drains-by-closing": 5015,
    "mover-sends-before-persisting": 5074,
    "next-award-before-the-last-is-known": 5012,
    "poison-by-node": 5013,
    "store-acknowledges-before-flush": 5015,
    "verification-skipped-after-a-restart": 5008,
    "way-back-takes-the-source": 5005,
    "weight-moved-before-its-step": 5001,
}
"""The first seed from FIRST_SEED on that caught the mutation, where some before it did not. It is played first, and the
others if it does not catch the mutation any more."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_caught(mutation: Mutation) -> None:
    most = MOST_SEEDS[mutation.scenario]
    first = CAUGHT_BY.get(mutation.name, FIRST_SEED)
    others = [seed for seed in range(FIRST_SEED, FIRST_SEED + most) if seed != first]
    with mutation.plant():  # workers are forked with the bug in
        known = RUN_BY_SCENARIO[mutation.scenario](first)
        caught = known if known.violations else _first_caught(others, mutation.scenario)
    if caught is None:
        pytest.fail(f"{mutation.name} ({mutation.bug}) lived through {most} seeds")
    _sound(caught)
    tried = [first, *others].index(caught.seed) + 1
    record(
        "D8", "S", tried, mutation=mutation.name, bug=mutation.bug, seeds=tried, caught_by=caught.violations[0][:160]
    )


def _first_caught(seeds: Sequence[int], scenario: str) -> RunOutcome | None:
    with closing(run_seeds(seeds, scenario, JOBS)) as outcomes:
        return next((outcome for outcome in outcomes if outcome.violations), None)


def _sound(caught: RunOutcome) -> None:
    """It was the mutation that was caught: without it the very same seed passes."""
    assert not RUN_BY_SCENARIO[caught.scenario](caught.seed).violations
