"""`shoal history`, `shoal rollback`: a workload's revisions, and the return to one."""

import click

from shoal.cli.commands.apply import report_apply
from shoal.cli.names import WORKLOAD
from shoal.cli.options import connect, connection, output, tenant
from shoal.cli.render.columns import Column
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line, table
from shoal.cli.render.plan import report_plan
from shoal.cli.render.resources import identity_cell, time_cell
from shoal.cli.render.styles import SIGNS
from shoal.v1 import operator_pb2


@click.command()
@click.argument("workload", type=WORKLOAD)
@tenant
@connection
@output
def history(workload: str, tenant: str, context: str, region: str, output: str) -> None:
    """Who changed WORKLOAD, or a policy of it, when, and what; -o wide: each field."""
    with connect(context, region) as api:
        revisions = api.history(tenant, workload)
    if output in ("json", "yaml"):
        emit([as_data(revision) for revision in revisions], output)
        return
    table(
        [
            "", Column("KIND", rank=3), Column("NAME", least=12), "REVISION", Column("APPLIED", rank=2),
            Column("BY", rank=4, least=10), Column("WHAT", rank=1, least=12),
        ],
        [
            ["now" if one.current else "", one.kind, one.name, str(one.revision), time_cell(one.applied_at),
             identity_cell(one.applied_by), _describe_revision(one)]
            for one in revisions
        ],
        wide=output == "wide",
    )  # fmt: skip
    if output == "wide":
        for one in revisions:
            line(f"{one.kind} {one.name} revision {one.revision}", "bold")
            for text in one.changes or (one.document,):
                line(f"    {text}", SIGNS.get(text[:1], ""))


@click.command()
@click.argument("workload", type=WORKLOAD)
@click.option("--to", "to", type=click.IntRange(1), help="A revision of `shoal history`. [default: the one before]")
@click.option("--dry-run", is_flag=True, help="Show the plan alone; exit status as that of `shoal plan`.")
@click.option("--plan", "plan_hash", default="", metavar="HASH", help="Refuse (PLAN_STALE) if a decision would differ.")
@click.option("--wait", is_flag=True, help="Return when it serves as it did then.")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds that --wait waits.")
@tenant
@connection
@output
def rollback(
    workload: str, to: int | None, dry_run: bool, plan_hash: str, wait: bool, timeout_s: float, tenant: str,
    context: str, region: str, output: str,
) -> None:  # fmt: skip
    """Bring WORKLOAD back to an earlier revision: its document and the very models it was pinned to, by a live move.

    Its policy stays as it is. With --dry-run the exit status is 0 nothing to do, 1 changes, 255 error.
    """
    with connect(context, region) as api:
        if not dry_run:
            reply = api.rollback(tenant, workload, to or 0, plan_hash)
            report_apply(api, reply, plan_hash, [(tenant, workload)], wait, timeout_s, output)
            return
        plan = api.plan_rollback(tenant, workload, to or 0)
    report_plan(plan, output)
    raise click.exceptions.Exit(255 if plan.problems else 1 if plan.changes else 0)


def _describe_revision(one: operator_pb2.RevisionView) -> str:
    said = [f"as revision {one.repeats}"] if one.repeats else []
    said += ["no way back: bytes of " + ", ".join(one.gone) + " were removed"] if one.gone else []
    names = dict.fromkeys(text[2:].partition(": ")[0] for text in one.changes)
    return "; ".join((*said, *([", ".join(names)] if names else []))) or "-"
