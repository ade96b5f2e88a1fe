"""`shoal token`: join tokens and bearer tokens."""

import click

from shoal.cli.options import connected, connection, output
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
@connection
@output
def create(role: str, name: str, valid: str, context: str, region: str, output: str) -> None:
    """Make a token; it is shown once, alone on standard output, and kept as a hash only."""
    with connected(context, region) as api:
        reply = api.create_token(role, name, parse_quantity(valid, DURATION))
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        print(reply.token)
        note(f"valid for {valid}, {'many uses' if role == 'bearer' else 'one use'}; id {reply.id}")
