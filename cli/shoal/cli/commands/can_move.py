"""`shoal can-move`: whether a model could run there, and at what price."""

import sys

import click

from shoal.cli.names import TARGET, RegionName
from shoal.cli.options import connect, connection, output, tenant
from shoal.cli.render.data import as_data
from shoal.cli.render.move import show_prospect
from shoal.cli.render.output import emit


@click.command("can-move")
@click.argument("name", type=RegionName("workloads", "models"), metavar="WORKLOAD|MODEL")
@click.option("--to", type=TARGET, required=True, metavar="NODE|NODE/DEVICE|REGION", help="Where it might move.")
@tenant
@connection
@output
def can_move(name: str, to: str, tenant: str, context: str, region: str, output: str) -> None:
    """Whether a workload, or a pushed model that nobody runs yet, could move there: yes, yes-with (what changes on the
    way), or no, and why; with bytes, seconds, latency, energy, cost and how far answers may drift. Nothing is moved.

    Exits with 0 for yes and yes-with, with 1 for no.
    """
    with connect(context, region) as api:
        reply = api.can_move(tenant, name, to)
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        show_prospect(reply, to, wide=output == "wide")
    sys.exit(1 if reply.answer == "no" else 0)
