"""`python -m shoal.simulator --seed N`: play one run again and print its story."""

import sys
import traceback
from time import perf_counter

import click

from shoal.simulator.scenario import SCENARIOS, play

TOLD = (
    "fault.",
    "storm.",
    "coordinator.started",
    "coordinator.died",
    "agent.started",
    "agent.died",
    "process.",
    "operator.",
)


@click.command()
@click.option("--seed", type=int, required=True, help="The run's seed; it decides everything.")
@click.option("--scenario", type=click.Choice(sorted(SCENARIOS)), default="storm", show_default=True)
@click.option("-v", "--verbose", count=True, help="-v: also workers and links. -vv: every event.")
def main(seed: int, scenario: str, verbose: int) -> None:
    """Exit status 1 when anything was violated."""
    began = perf_counter()
    outcome = play(seed, SCENARIOS[scenario])
    took = perf_counter() - began
    told = (*TOLD, "worker.", "link.", "journal.", "front.") if verbose == 1 else TOLD
    for event in outcome.history.events:
        if verbose > 1 or event.kind.startswith(told):
            print(event)
    print(f"\nseed {seed}  scenario {scenario}  faults on: {', '.join(outcome.kinds) or 'none'}")
    print(f"struck: {dict(outcome.struck)}  requests: {dict(outcome.counts)}")
    print(
        f"{outcome.virtual_s:.1f} virtual s in {took:.2f} s ({outcome.virtual_s / took:.0f}x), "
        f"converged {outcome.converged_s:.1f} s after the storm, record {outcome.digest[:16]}"
    )
    if outcome.cause is not None:
        traceback.print_exception(outcome.cause)
    for violation in outcome.violations[:20]:
        print(f"VIOLATED  {violation}")
    sys.exit(1 if outcome.violations else 0)


if __name__ == "__main__":
    main()
