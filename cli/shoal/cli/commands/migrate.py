"""`shoal migrate`, `shoal drain`: live migration of replicas."""

import os
import time
from collections.abc import Callable, Iterable

import click

from shoal.cli.names import MIGRATION, NODE, TARGET, WORKLOAD
from shoal.cli.options import connect, connection, output, tenant
from shoal.cli.render.data import as_data
from shoal.cli.render.migrations import QUEUED, is_over, refusal_of, show_migration, stage_line
from shoal.cli.render.output import emit, line, note, progress
from shoal.cli.render.resources import reason
from shoal.cli.wrong_word import WrongWord
from shoal.client import RegionClient
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import operator_pb2

POLL_S = 0.1
REPLACEMENT_POLLS = 600
"""How many times to check whether a standby on a drained node has been replaced elsewhere."""


@click.command()
@click.argument("workload", type=WORKLOAD)
@click.option(
    "--to", "to", type=TARGET, metavar="NODE[/DEVICE]|REGION", help="Where it is to run; this region: home again."
)
@click.option("--replica", default="", help="Which of its replicas, by assignment. [default: the first not there]")
@click.option(
    "--queue",
    is_flag=True,
    help="Where it is refused only for now (no room, another move, a node that is not ready), let it wait, for an hour "
    "at most.",
)
@click.option(
    "--cancel",
    default="",
    type=MIGRATION,
    metavar="MIGRATION",
    help="Take this move back instead, also one that waits.",
)
@click.option("--watch", is_flag=True, help="Say how it goes, and return when it is over.")
@tenant
@connection
@output
def migrate(
    workload: str, to: str | None, replica: str, queue: bool, cancel: str, watch: bool, tenant: str, context: str,
    region: str, output: str,
) -> None:  # fmt: skip
    """Move a replica of WORKLOAD, live: verified against the one that serves before it takes a request. To another
    REGION, or home from one, the whole workload moves, by an agreement with that region.
    """
    if bool(to) == bool(cancel):
        raise WrongWord("--to and --cancel" if to else "neither --to nor --cancel", "one of the two", "", None)
    if (replica or queue) and cancel:
        raise WrongWord(f"{'--replica' if replica else '--queue'} beside --cancel", "it beside --to", "", None)
    with connect(context, region) as api:
        begun = (
            api.cancel_migration(cancel, workload, tenant)
            if cancel
            else api.migrate(tenant, workload, to or "", replica, queue=queue)
        )
        if watch:
            (begun,) = follow(api, [begun], progress(output), is_cancelled=bool(cancel))
    if output in ("json", "yaml"):
        emit(as_data(begun), output)
    elif watch:
        show_migration(begun)
    else:
        line(stage_line(begun) if begun.stage == QUEUED else f"{begun.id} is {begun.stage}")
    if watch and not cancel and begun.stage != "done":
        raise refusal_of(begun)


@click.command()
@click.argument("node", type=NODE)
@click.option(
    "--watch", is_flag=True, help="Say how it goes, and return when every move is over and what stands by has gone."
)
@connection
@output
def drain(node: str, watch: bool, context: str, region: str, output: str) -> None:
    """Empty NODE: nothing new comes to it, and each of its replicas moves to another node, live."""
    with connect(context, region) as api:
        reply = api.drain(node)
        moves = follow(api, reply.migrations, progress(output)) if watch else list(reply.migrations)
        left = wait_standbys_replaced(api, reply.refusals) if watch else list(reply.refusals)
    if output in ("json", "yaml"):
        outcome = operator_pb2.DrainReply(node=reply.node, migrations=moves, refusals=left)
        emit(as_data(outcome), output)
    else:
        line(f"{node} is cordoned, {len(moves)} of its replicas {'moves' if len(moves) == 1 else 'move'}")
        for one in moves:
            line(f"  {stage_line(one)}")
        for each in left:
            line(f"  {each.assignment} stays: {reason(each.reason)}", "yellow")
    stopped = next((one for one in moves if one.stage == "aborted"), None)
    if stopped is not None:
        raise refusal_of(stopped)
    if watch and left:
        stay = "1 replica stays" if len(left) == 1 else f"{len(left)} replicas stay"
        raise refuse(Code.CONFLICT, f"{stay} on {node}", "an empty node", "see above")


def wait_standbys_replaced(
    api: RegionClient, refusals: Iterable[operator_pb2.DrainRefusal]
) -> list[operator_pb2.DrainRefusal]:  # fmt: skip
    """Replicas that stay on the node, after standbys that only wait for a replacement are gone or had time to go."""
    left = list(refusals)
    for _ in range(REPLACEMENT_POLLS):
        if not any(each.reason.code == Code.WAITING_FOR_REPLACEMENT for each in left):
            break
        there = {row.assignment.id for row in api.poll("placements").placements}
        left = [each for each in left if each.assignment in there]
        time.sleep(POLL_S)  # noqa: TID251
    return left


def follow(
    api: RegionClient,
    migrations: Iterable[operator_pb2.MigrationView],
    say: Callable[[str], None],
    *,
    is_cancelled: bool = False,
) -> list[operator_pb2.MigrationView]:
    """Print each new stage once, and what it waits for; return when all migrations are over. Whoever interrupts it is
    told that they go on. is_cancelled: they are being taken back already.

    Raises ShoalError(MIGRATION_UNKNOWN) if one is forgotten."""
    known = {one.id: one for one in migrations}
    try:
        return _follow(api, known, say)
    except KeyboardInterrupt:
        for one in known.values():
            if not is_over(one) and not is_cancelled:
                note(f"{one.id} goes on; to take it back: {_cancel_command(one)}")
        raise


def _cancel_command(one: operator_pb2.MigrationView) -> str:
    tenant = one.workload.tenant
    named = "" if tenant == (os.environ.get("SHOAL_TENANT") or "default") else f" --tenant {tenant}"
    return f"shoal migrate {one.workload.name} --cancel {one.id}{named}"


def _follow(
    api: RegionClient, known: dict[str, operator_pb2.MigrationView], say: Callable[[str], None]
) -> list[operator_pb2.MigrationView]:  # fmt: skip
    """known: the migrations by id, as last seen."""
    said = dict.fromkeys(known, 0)
    waits = dict.fromkeys(known, "")
    # When one of them begins, its stages are counted from the first one on: the queue is none of them.
    queued = {one.id for one in known.values() if one.stage == QUEUED}
    while True:
        for one in known.values():
            if one.id in queued and all(stage.stage != QUEUED for stage in one.stages):
                queued.remove(one.id)
                said[one.id] = 0
            for stage in one.stages[said[one.id] :]:
                say(f"{one.id}  {stage.stage.replace('_', ' ')}  {stage.note}".rstrip())
                waits[one.id] = ""
            said[one.id] = len(one.stages)
            # Once for each code: what a wait found may be another figure at every look.
            if one.reason.code and one.reason.code != waits[one.id] and not is_over(one):
                waits[one.id] = one.reason.code
                say(f"{one.id}  waits: {reason(one.reason)}")
        if all(is_over(one) for one in known.values()):
            return list(known.values())
        time.sleep(POLL_S)  # noqa: TID251
        for name in [one.id for one in known.values() if not is_over(one)]:
            known[name] = _fetch_migration(api, name)


def _fetch_migration(api: RegionClient, name: str) -> operator_pb2.MigrationView:
    try:
        found = api.poll("migrations", name).migrations
    except ShoalError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise refuse(Code.MIGRATION_UNKNOWN, f"{name} is not listed any more", "", "see `shoal events`") from error
    return next(one for one in found if one.id == name)
