"""`shoal cordon`, `shoal uncordon`: keep new work off a node."""

import click

from shoal.cli.options import connected, connection
from shoal.cli.render.output import line


@click.command()
@click.argument("node")
@connection
def cordon(node: str, context: str, region: str) -> None:
    """Place nothing new on NODE; what serves there stays."""
    with connected(context, region) as api:
        line(f"{api.cordon(node, cordoned=True).node.name} is cordoned")


@click.command()
@click.argument("node")
@connection
def uncordon(node: str, context: str, region: str) -> None:
    """Let NODE take new work again."""
    with connected(context, region) as api:
        line(f"{api.cordon(node, cordoned=False).node.name} takes work again")
