"""`shoal cordon`, `shoal uncordon`: keep new work off a node."""

import click

from shoal.cli.names import NODE
from shoal.cli.options import connect, connection
from shoal.cli.render.output import line


@click.command()
@click.argument("node", type=NODE)
@connection
def cordon(node: str, context: str, region: str) -> None:
    """Place nothing new on NODE; what serves there stays."""
    with connect(context, region) as api:
        line(f"{api.cordon(node, cordoned=True).node.name} is cordoned")


@click.command()
@click.argument("node", type=NODE)
@connection
def uncordon(node: str, context: str, region: str) -> None:
    """Let NODE take new work again."""
    with connect(context, region) as api:
        line(f"{api.cordon(node, cordoned=False).node.name} takes work again")
