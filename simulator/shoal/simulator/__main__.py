"""`python -m shoal.simulator --seed N` repeats one run and prints its record; with `--count` it runs many seeds."""

import os
import sys
import traceback
from time import perf_counter

import click

from shoal.simulator.run.seeds import RUN_BY_SCENARIO, replay, run_seeds

SHOWN_KINDS = (
    "fault.", "storm.", "matrix.", "move.", "client.failed", "client.lost", "process.",
    "operator.", "holds", "guests", "delegated",
    "coordinator.started", "coordinator.died", "agent.started", "agent.died",
)  # fmt: skip
VERBOSE_KINDS = (
    *SHOWN_KINDS,
    "worker.",
    "link.",
    "journal.",
    "front.",
    "region.",
    "said",
    "delivered",
    "answered",
    "refused",
)


@click.command()
@click.option("--seed", type=int, required=True, help="The run's seed; it decides everything.")
@click.option("--scenario", type=click.Choice(sorted(RUN_BY_SCENARIO)), default="storm", show_default=True)
@click.option("--count", type=int, default=0, help="Play so many seeds from --seed on; one line each.")
@click.option("--jobs", type=int, default=os.cpu_count() or 1, show_default=True)
@click.option("-v", "--verbose", count=True, help="-v: also workers, links, messages. -vv: every event.")
def main(seed: int, scenario: str, count: int, jobs: int, verbose: int) -> None:
    """Exit status 1 when anything was violated."""
    sys.exit(_run_many(range(seed, seed + count), scenario, jobs) if count else _run_one(seed, scenario, verbose))


def _run_one(seed: int, scenario: str, verbose: int) -> int:
    began = perf_counter()
    outcome = RUN_BY_SCENARIO[scenario](seed)
    took = perf_counter() - began
    for event in outcome.events:
        if verbose > 1 or event.kind.startswith(VERBOSE_KINDS if verbose else SHOWN_KINDS):
            print(event)
    print(f"\nseed {seed}  scenario {scenario}  faults on: {', '.join(outcome.kinds) or 'none'}")
    print(f"struck: {dict(outcome.fault_counts)}  requests: {dict(outcome.counts)}")
    print(
        f"{outcome.virtual_s:.1f} virtual s in {took:.2f} s ({outcome.virtual_s / took:.0f}x), "
        f"converged {outcome.converged_s:.1f} s after the storm, record {outcome.digest[:16]}"
    )
    if outcome.cause is not None:
        traceback.print_exception(outcome.cause)
    for violation in outcome.violations[:20]:
        print(f"VIOLATED  {violation}")
    return 1 if outcome.violations else 0


def _run_many(seeds: range, scenario: str, jobs: int) -> int:
    began = perf_counter()
    failed, virtual = 0, 0.0
    for outcome in run_seeds(seeds, scenario, jobs):
        virtual += outcome.virtual_s
        print(f"{outcome.seed} {outcome.digest} {len(outcome.violations)}")
        if outcome.violations:
            failed += 1
            print(f"VIOLATED  {outcome.violations[0]}\n          replay: {replay(outcome)}")
    took = perf_counter() - began
    print(
        f"{len(seeds)} seeds, {failed} failed, {len(seeds) / took:.1f} seeds/s, virtual/real time {virtual / took:.0f}",
        file=sys.stderr,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    main()
