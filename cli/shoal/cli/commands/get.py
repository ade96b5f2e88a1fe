"""`shoal get`: listings."""

import click

from shoal.cli.names import OF_KIND
from shoal.cli.options import ResourceKind, connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import rows_of, show
from shoal.cli.render.output import emit


@click.command()
@click.argument("kind", type=ResourceKind())
@click.argument("name", default="", type=OF_KIND)
@click.option("--tenant", default="", help="Only this tenant's. [default: all]")
@connection
@output
def get(kind: str, name: str, tenant: str, context: str, region: str, output: str) -> None:
    """List nodes, devices, models, workloads, placements, migrations and whatever else a region knows."""
    with connect(context, region) as api:
        messages = rows_of(api, kind, name, tenant)
    if output in ("json", "yaml"):
        emit([as_data(message) for message in messages], output)
    else:
        show(kind, messages, wide=output == "wide")
