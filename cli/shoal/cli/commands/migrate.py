"""`shoal migrate`, `shoal drain`: live moves of replicas."""

import time
from collections.abc import Callable, Iterable

import click

from shoal.cli.options import connected, connection, output, tenant
from shoal.cli.render.data import as_data
from shoal.cli.render.migrations import ended, refusal_of, show_migration, stage_line
from shoal.cli.render.output import emit, line, progress
from shoal.cli.render.resources import reason
from shoal.client import Region
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import operator_pb2

LOOK_S = 0.1
RELIEF_LOOKS = 600
"""So often it is looked whether what stands by on a drained node has found its successor elsewhere."""


@click.command()
@click.argument("workload")
@click.option("--to", "to", metavar="NODE[/DEVICE]|REGION", help="Where it is to run; this region: home again.")
@click.option("--replica", default="", help="Which of its replicas, by assignment. [default: the first not there]")
@click.option("--cancel", default="", metavar="MIGRATION", help="Take this move back instead.")
@click.option("--watch", is_flag=True, help="Say how it goes, and return when it is over.")
@tenant
@connection
@output
def migrate(
    workload: str, to: str | None, replica: str, cancel: str, watch: bool, tenant: str, context: str, region: str,
    output: str,
) -> None:  # fmt: skip
    """Move a replica of WORKLOAD, live: verified against the one that serves before it takes a request. To another
    REGION, or home from one, the whole workload moves, by an agreement with that region.
    """
    if bool(to) == bool(cancel):
        raise refuse(Code.FIELD_MISSING, "neither or both of --to and --cancel", "one of them", "add --to NODE")
    if replica and cancel:
        raise refuse(Code.FIELD_INVALID, "--replica with --cancel", "the migration alone")
    with connected(context, region) as api:
        begun = (
            api.cancel_migration(cancel, workload, tenant)
            if cancel
            else api.migrate(tenant, workload, to or "", replica)
        )
        if watch:
            (begun,) = follow(api, [begun], progress(output))
    if output in ("json", "yaml"):
        emit(as_data(begun), output)
    elif watch:
        show_migration(begun)
    else:
        line(f"{begun.id} is {begun.stage}")
    if watch and not cancel and begun.stage != "done":
        raise refusal_of(begun)


@click.command()
@click.argument("node")
@click.option(
    "--watch", is_flag=True, help="Say how it goes, and return when every move is over and what stands by has gone."
)
@connection
@output
def drain(node: str, watch: bool, context: str, region: str, output: str) -> None:
    """Empty NODE: nothing new comes to it, and each of its replicas moves to another node, live."""
    with connected(context, region) as api:
        reply = api.drain(node)
        moves = follow(api, reply.migrations, progress(output)) if watch else list(reply.migrations)
        left = relieved(api, reply.unmoved) if watch else list(reply.unmoved)
    if output in ("json", "yaml"):
        outcome = operator_pb2.DrainReply(node=reply.node, migrations=moves, unmoved=left)
        emit(as_data(outcome), output)
    else:
        line(f"{node} is cordoned, {len(moves)} of its replicas move")
        for one in moves:
            line(f"  {stage_line(one)}")
        for each in left:
            line(f"  {each.assignment} stays: {reason(each.reason)}", "yellow")
    stopped = next((one for one in moves if one.stage == "aborted"), None)
    if stopped is not None:
        raise refusal_of(stopped)
    if watch and left:
        raise refuse(Code.CONFLICT, f"{len(left)} replicas stay on {node}", "an empty node", "see above")


def relieved(
    api: Region, unmoved: Iterable[operator_pb2.UnmovedReplica]
) -> list[operator_pb2.UnmovedReplica]:  # fmt: skip
    """Of what did not move, that which stays once what only waits for its successor has gone, or had time enough to."""
    left = list(unmoved)
    for _ in range(RELIEF_LOOKS):
        if not any(each.reason.code == Code.WAITING_FOR_REPLACEMENT for each in left):
            break
        there = {row.assignment.id for row in api.look("placements").placements}
        left = [each for each in left if each.assignment in there]
        time.sleep(LOOK_S)  # noqa: TID251
    return left


def follow(
    api: Region, begun: Iterable[operator_pb2.MigrationView], say: Callable[[str], None]
) -> list[operator_pb2.MigrationView]:  # fmt: skip
    """Says each new stage once; returns when all are over. Raises ShoalError(MIGRATION_UNKNOWN): one is forgotten."""
    known = {one.id: one for one in begun}
    said = dict.fromkeys(known, 0)
    while True:
        for one in known.values():
            for stage in one.stages[said[one.id] :]:
                say(f"{one.id}  {stage.stage.replace('_', ' ')}  {stage.note}".rstrip())
            said[one.id] = len(one.stages)
        if all(ended(one) for one in known.values()):
            return list(known.values())
        time.sleep(LOOK_S)  # noqa: TID251
        for name in [one.id for one in known.values() if not ended(one)]:
            known[name] = _listed(api, name)


def _listed(api: Region, name: str) -> operator_pb2.MigrationView:
    try:
        found = api.look("migrations", name).migrations
    except ShoalError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise refuse(Code.MIGRATION_UNKNOWN, f"{name} is not listed any more", "", "see `shoal events`") from error
    return next(one for one in found if one.id == name)
