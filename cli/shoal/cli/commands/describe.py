"""`shoal describe`: everything about one thing."""

import click

from shoal.cli.names import OF_KIND
from shoal.cli.options import ResourceKind, connect, connection
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import rows_of
from shoal.cli.render.output import emit
from shoal.types.codes import Code, refuse


@click.command()
@click.argument("kind", type=ResourceKind())
@click.argument("name", type=OF_KIND)
@click.option("--tenant", default="", help="Only this tenant's. [default: all]")
@connection
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
def describe(kind: str, name: str, tenant: str, context: str, region: str, output: str) -> None:
    """Everything the coordinator knows about one thing, with what belongs to it."""
    with connect(context, region) as api:
        found = rows_of(api, kind, name, tenant)
        if not found:
            raise refuse(
                Code.NOT_FOUND, f"no {kind.removesuffix('s')} {name!r}", "one that is there", f"shoal get {kind}"
            )
        data = [as_data(message) for message in found]
        if kind in ("nodes", "workloads"):
            placements = [as_data(message) for message in rows_of(api, "placements", "", tenant)]
            for one in data:
                one["placements"] = [row for row in placements if _belongs(kind, one, row)]
    emit(data, output)


def _belongs(kind: str, one: dict, row: dict) -> bool:  # type: ignore[type-arg]
    if kind == "nodes":
        return bool(row["node"] == one["node"]["name"])
    return bool(row["assignment"]["workload"] == one["workload"])
