"""`shoal node`: what an operator decides about a node's place in the region."""

import click

from shoal.cli.options import connected, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line


@click.group()
def node() -> None:
    """Revoke a node, settle twins, end a quarantine. Each act goes to the audit log."""


@node.command()
@click.argument("name", metavar="NODE")
@click.option("--reason", required=True, help="Why, for the audit log and for whoever asks the node.")
@click.option(
    "--role",
    type=click.Choice(["agent", "gateway", "operator", "viewer", "tenant"]),
    default=None,
    help="Of the identity called NODE; operators, viewers and tenants are revoked so too. [default: the node's]",
)
@connection
@output
def revoke(name: str, reason: str, role: str | None, context: str, region: str, output: str) -> None:
    """Refuse every certificate of NODE, at once and everywhere.

    Its session ends, routes drop it, its workloads move, and it stops serving when it hears of it. With a new token the
    machine may join again: shoal token create --name NODE.
    """
    with connected(context, region) as api:
        serials = api.revoke(name, role=role or "", reason=reason)
    if output in ("json", "yaml"):
        emit({"name": name, "revoked": list(serials)}, output)
    else:
        line(f"{name} is revoked: {len(serials)} certificate{'s' if len(serials) != 1 else ''} refused from now on")


@node.command()
@click.argument("name", metavar="NODE")
@click.option(
    "--keep",
    type=click.Choice(["running", "none"]),
    default="running",
    show_default=True,
    help="running: whoever has the session stays. none: revoke both; each joins again with a token of its own.",
)
@connection
@output
def settle(name: str, keep: str, context: str, region: str, output: str) -> None:
    """Decide about two agents that showed the identity of NODE.

    Stop the other one first: as long as it calls, the node is marked again. Where a state directory was stolen, use
    --keep none: whoever has it has the key.
    """
    with connected(context, region) as api:
        view = api.settle(name, keep=keep)
    if output in ("json", "yaml"):
        emit(as_data(view), output)
    else:
        line(f"{name} is settled" if keep == "running" else f"{name} is revoked; make a token for each of the two")


@node.command()
@click.argument("name", metavar="NODE")
@connection
@output
def release(name: str, context: str, region: str, output: str) -> None:
    """End the quarantine of NODE; what it reports next is judged anew."""
    with connected(context, region) as api:
        view = api.release(name)
    if output in ("json", "yaml"):
        emit(as_data(view), output)
    else:
        line(f"{name} is released")
