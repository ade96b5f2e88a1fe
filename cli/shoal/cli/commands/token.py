"""`shoal token`: join tokens and bearer tokens."""

import click

from shoal.cli.options import LABEL, connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, note
from shoal.types.units import DURATION, parse_quantity


@click.group()
def token() -> None:
    """One-time join tokens, and bearer tokens for a tenant's clients; at a federation, tokens for regions."""


@token.command()
@click.option(
    "--role",
    type=click.Choice(["agent", "gateway", "operator", "viewer", "tenant", "bearer", "region"]),
    default="agent",
    show_default=True,
)
@click.option(
    "--name", default="", help="Bind it to this node, operator, tenant or region. [default: open, but for tenants]"
)
@click.option("--valid", default="1h", show_default=True, help="How long it may be used.")
@click.option(
    "--label",
    "labels",
    type=LABEL,
    multiple=True,
    help="Of the node that joins with it, so that it counts for policies; repeatable. `price` is its price, `entry` "
    "lists the tenants whose clients may call it (* for all).",
)
@click.option(
    "--allow-labels",
    multiple=True,
    metavar="PATTERN",
    help="Names of labels that the node may declare itself (`site`, `rack-*`), so that they count; repeatable. Without "
    "it they count as self.NAME only.",
)
@connection
@output
def create(
    role: str,
    name: str,
    valid: str,
    labels: tuple[tuple[str, str], ...],
    allow_labels: tuple[str, ...],
    context: str,
    region: str,
    output: str,
) -> None:
    """Make a token; it is shown once, alone on standard output, and kept as a hash only."""
    with connect(context, region) as api:
        reply = api.create_token(role, name, parse_quantity(valid, DURATION), dict(labels), allow_labels)
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        print(reply.token)
        note(f"valid for {valid}, {'many uses' if role == 'bearer' else 'one use'}; id {reply.id}")
