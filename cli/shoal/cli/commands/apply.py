"""`shoal apply`: make it so."""

import time

import click

from shoal.cli.documents import push_sources, read
from shoal.cli.options import connected, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.migrations import refusal_of
from shoal.cli.render.output import emit, line, progress
from shoal.cli.render.plan import problems_of, show_plan, show_problems
from shoal.client import Region
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.v1 import operator_pb2


@click.command()
@click.option("-f", "--file", "files", multiple=True, required=True, help="A YAML file or folder; repeat.")
@click.option(
    "--plan",
    "plan_hash",
    default="",
    metavar="HASH",
    help="Refuse (PLAN_STALE) if a decision of that plan would differ.",
)
@click.option("--wait", is_flag=True, help="Return when every applied workload is ready.")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds that --wait waits.")
@connection
@output
def apply(
    files: tuple[str, ...], plan_hash: str, wait: bool, timeout_s: float, context: str, region: str, output: str
) -> None:
    """Apply FILES: store them, place what they ask for, and say what changes."""
    bundle = read(files)
    if bundle.problems:
        show_problems(problems_of(bundle.problems), stderr=True)
        raise click.exceptions.Exit(255)
    with connected(context, region) as api:
        reply = api.apply(bundle.documents, push_sources(api, bundle), plan_hash)
        finish(api, reply, plan_hash, wait, timeout_s, output)


def finish(
    api: Region, reply: operator_pb2.ApplyReply, plan_hash: str, wait: bool, timeout_s: float, output: str
) -> None:
    """Says what came of an apply, and waits for it. Raises ShoalError(PLAN_STALE | DEADLINE_EXCEEDED)."""
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        show_plan(reply.plan, wide=output == "wide")  # or its problems
    if reply.problems:
        raise click.exceptions.Exit(255)
    if reply.stale:
        for text in reply.stale:
            progress(output)(f"  differs: {text}")
        raise ShoalError(
            Refusal(
                Code.PLAN_STALE,
                f"the plan is now {reply.plan.hash}",
                f"plan {plan_hash}",
                "look at it again: shoal plan",
            )
        )
    if output == "table" and reply.revision:
        line(f"applied, revision {reply.revision}")
    if wait:
        applied = [(plan.workload.tenant, plan.workload.name) for plan in reply.plan.workloads]
        await_ready(api, applied, timeout_s, reply.plan.computed_at)
        progress(output)("ready")


def await_ready(api: Region, workloads: list[tuple[str, str]], timeout_s: float, since: float) -> None:
    """Returns when each is ready as its documents have it. since: when those were applied.

    Raises ShoalError(DEADLINE_EXCEEDED) naming the reason; what a move after `since` was given up for, where the
    workload has nowhere else to go: it serves on as it was."""
    end = time.monotonic() + timeout_s  # noqa: TID251 - a command's own deadline
    while True:
        views = {(v.workload.tenant, v.workload.name): v for v in api.look("workloads").workloads}
        waiting = [views[key] for key in workloads if key in views and views[key].state != "ready"]
        if not waiting:
            return
        stuck = {(v.workload.tenant, v.workload.name) for v in waiting if v.state == "pending"}
        moves = api.look("migrations").migrations if stuck else ()
        for move in moves:
            key = (move.workload.tenant, move.workload.name)
            if key in stuck and move.stage == "aborted" and move.stages[0].at >= since:
                why = refusal_of(move).refusal
                raise refuse(
                    why.code, f"{why.found}; {move.workload.name} serves on as it was", why.asked,
                    f"see `shoal describe migration {move.id}`",
                )  # fmt: skip
        if time.monotonic() > end:  # noqa: TID251
            raise refuse(Code.DEADLINE_EXCEEDED, _why(waiting[0]), f"ready within {timeout_s:g}s", "shoal explain it")
        time.sleep(0.1)  # noqa: TID251


def _why(view: operator_pb2.WorkloadView) -> str:
    reason = " ".join(part for part in (view.reason.code, view.reason.found) if part)
    return f"{view.workload.tenant}/{view.workload.name} is {view.state}: {reason or 'no reason given'}"
