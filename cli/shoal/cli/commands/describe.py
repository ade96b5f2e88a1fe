"""`shoal describe`: everything about one thing."""

from collections.abc import Sequence
from typing import Any

import click

from shoal.cli.names import OF_KIND
from shoal.cli.options import KINDS_HELP, SINGULAR, ResourceKinds, connect, connection, read_targets
from shoal.cli.render.data import as_data
from shoal.cli.render.description import show_description
from shoal.cli.render.listings import rows_of
from shoal.cli.render.output import emit, line
from shoal.cli.wrong_word import WrongWord
from shoal.types.codes import Code, refuse


@click.command(epilog=KINDS_HELP)
@click.argument("kind", type=ResourceKinds())
@click.argument("names", nargs=-1, type=OF_KIND, metavar="NAME...")
@click.option("--tenant", default="", help="Only this tenant's. [default: all]")
@connection
@click.option(
    "-o", "--output", type=click.Choice(["text", "yaml", "json"]), default="text", show_default=True,
    help="text: for people; the others have everything.",
)  # fmt: skip
def describe(kind: str, names: tuple[str, ...], tenant: str, context: str, region: str, output: str) -> None:
    """What one thing is, why, and since when; what belongs to it, its last events, and what to do.

    KIND is one kind, or KIND/NAME.
    """
    targets = read_targets(kind, names)
    if not all(targets.values()):
        raise WrongWord("no NAME", f"KIND and NAME.. as in `shoal describe {kind} NAME`", f"shoal get {kind}", None)
    data = []
    with connect(context, region) as api:
        events = list(api.events()) if output == "text" else []
        placements: Sequence[Any] = ()
        if targets.keys() & {"nodes", "workloads"}:
            placements = rows_of(api, "placements", "", tenant)
        first = True
        for of, found in targets.items():
            for row in (row for name in found for row in _rows(api, of, name, tenant)):
                mine = [each for each in placements if _belongs(of, row, each)]
                if output != "text":
                    data.append(as_data(row))
                    if of in ("nodes", "workloads"):
                        data[-1]["placements"] = [as_data(each) for each in mine]
                    continue
                if not first:
                    line("")
                first = False
                moves = rows_of(api, "migrations", "", "") if of == "workloads" else ()
                about = [each for each in moves if _belongs(of, row, each)]
                users = rows_of(api, "workloads", "", "") if of == "policies" else ()
                using = [each for each in users if each.policy == row.name]  # type: ignore[attr-defined]
                belongings = (("workloads", using), ("placements", mine), ("migrations", about[-3:]))
                show_description(of, row, events, belongings)
    if output != "text":
        emit(data, output)


def _rows(api: Any, kind: str, name: str, tenant: str) -> Sequence[Any]:
    found = rows_of(api, kind, name, tenant)
    if not found:
        raise refuse(Code.NOT_FOUND, f"no {SINGULAR[kind]} {name!r}", "one that is there", f"shoal get {kind}")
    return found


def _belongs(kind: str, one: Any, row: Any) -> bool:
    """Whether a placement or migration is of that node or workload."""
    if kind == "nodes":
        return bool(row.node == one.node.name)
    workload = row.assignment.workload if hasattr(row, "assignment") else row.workload
    return kind == "workloads" and bool(workload == one.workload)
