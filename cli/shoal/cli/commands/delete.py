"""`shoal delete`: take a document, node or token away."""

import click

from shoal.cli.options import connected, connection, tenant
from shoal.cli.render.output import line


@click.command()
@click.argument("kind", type=click.Choice(["workload", "policy", "tenant", "region", "node", "token"]))
@click.argument("name")
@tenant
@connection
def delete(kind: str, name: str, tenant: str, context: str, region: str) -> None:
    """Delete one thing. A workload's replicas drain first; what others use is refused IN_USE."""
    with connected(context, region) as api:
        api.delete(kind, name, tenant if kind == "workload" else "")
    line(f"deleted {kind} {name}")
