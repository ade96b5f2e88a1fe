"""`shoal delete`: take a document, node or token away."""

import click

from shoal.cli.options import SINGULAR, ResourceKind, connected, connection, tenant
from shoal.cli.render.output import line


@click.command()
@click.argument("kind", type=ResourceKind("workloads", "policies", "tenants", "regions", "nodes", "tokens"))
@click.argument("name")
@tenant
@connection
def delete(kind: str, name: str, tenant: str, context: str, region: str) -> None:
    """Delete one thing. A workload's replicas drain first; what others use is refused IN_USE."""
    kind = SINGULAR[kind]
    with connected(context, region) as api:
        api.delete(kind, name, tenant if kind == "workload" else "")
    line(f"deleted {kind} {name}")
