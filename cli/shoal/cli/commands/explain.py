"""`shoal explain`: why a workload is where it is, or nowhere."""

import click

from shoal.cli.names import WORKLOAD
from shoal.cli.options import connect, connection, output, tenant
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import rows_of, show
from shoal.cli.render.output import emit
from shoal.cli.render.plan import show_explanation


@click.command()
@click.argument("workload", type=WORKLOAD)
@tenant
@connection
@output
def explain(workload: str, tenant: str, context: str, region: str, output: str) -> None:
    """Every candidate with its score terms, the first constraint that excluded it, and the nearest change that fits."""
    with connect(context, region) as api:
        reply = api.explain(tenant, workload)
        agreement = reply.plan.agreement
        agreements = rows_of(api, "agreements", agreement, "") if agreement and output not in ("json", "yaml") else ()
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        show_explanation(reply, wide=output == "wide")
        if agreements:
            show("agreements", agreements, wide=output == "wide")
