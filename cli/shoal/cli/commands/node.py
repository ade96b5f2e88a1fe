"""`shoal node`: an operator's decisions about a node's membership."""

import time
from collections.abc import Sequence
from typing import Final

import click

from shoal.cli.names import NODE
from shoal.cli.options import LABEL, connect, connection, output
from shoal.cli.render.columns import Column
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import show
from shoal.cli.render.output import emit, line, table
from shoal.client import RegionClient
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2

MEASURE_S: Final = 120.0
"""Twice what a node takes that measures three devices beside other work."""
POLL_S: Final = 0.2


@click.group()
def node() -> None:
    """Revoke or label a node, resolve a duplicate identity, end a quarantine, have it measured. Each act goes to the
    audit log."""


@node.command()
@click.argument("name", type=NODE, metavar="NODE")
@click.option("--reason", required=True, help="Why, for the audit log and for whoever asks the node.")
@click.option(
    "--role",
    type=click.Choice(["agent", "gateway", "operator", "viewer", "tenant"]),
    default=None,
    help="Of the identity called NODE; operators, viewers and tenants are revoked so too. [default: the node's]",
)
@click.option(
    "--keep-enrolled",
    is_flag=True,
    help="Identities that enrolled with tokens of NODE stay; they count as enrolled by you.",
)
@click.option("--dry-run", is_flag=True, help="Show what would end, and end nothing.")
@click.option("--force", is_flag=True, help="Also where no operator is left.")
@connection
@output
def revoke(
    name: str,
    reason: str,
    role: str | None,
    keep_enrolled: bool,
    dry_run: bool,
    force: bool,
    context: str,
    region: str,
    output: str,
) -> None:
    """Refuse every certificate of NODE, and all that it made or that is bound to it, at once and everywhere.

    Its session ends, routes drop it, its workloads move, and it stops serving when it hears of it. Tokens that an
    operator made end with it, bearer tokens included, and so do the identities that enrolled with them, and what those
    made. A tenant's bearer tokens end with the tenant. With a new token the machine may join again: shoal token create
    --name NODE.
    """
    with connect(context, region) as api:
        reply = api.revoke(
            name, role=role or "", reason=reason, keep_enrolled=keep_enrolled, dry_run=dry_run, force=force
        )
    if output in ("json", "yaml"):
        emit(
            {
                "name": name,
                "dryRun": dry_run,
                "revoked": list(reply.serials),
                "ended": [as_data(each) for each in reply.ended],
            },
            output,
        )
        return
    number = len(reply.serials)
    certificates = f"{number} certificate{'s' if number != 1 else ''}"
    line(
        f"{name} would be revoked: {certificates}"
        if dry_run
        else f"{name} is revoked: {certificates} refused from now on"
    )
    if len(reply.ended) > 1:
        columns = [
            Column("ENDS"),
            Column("NAME", least=12),
            Column("ABOUT", rank=2, least=16),
            Column("BECAUSE OF", rank=3, least=16),
        ]
        table(columns, [[e.kind, e.name, e.about, e.because] for e in reply.ended], wide=output == "wide")


@node.command()
@click.argument("name", type=NODE, metavar="NODE")
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
    with connect(context, region) as api:
        view = api.resolve_duplicate(name, keep=keep)
    if output in ("json", "yaml"):
        emit(as_data(view), output)
    else:
        line(f"{name} is settled" if keep == "running" else f"{name} is revoked; make a token for each of the two")


@node.command()
@click.argument("name", type=NODE, metavar="NODE")
@connection
@output
def release(name: str, context: str, region: str, output: str) -> None:
    """End the quarantine of NODE; what it reports next is judged anew."""
    with connect(context, region) as api:
        view = api.release(name)
    if output in ("json", "yaml"):
        emit(as_data(view), output)
    else:
        line(f"{name} is released")


@node.command()
@click.argument("name", type=NODE, metavar="NODE")
@click.argument("device", metavar="[DEVICE]", default="")
@connection
@output
def measure(name: str, device: str, context: str, region: str, output: str) -> None:
    """Have NODE measure its devices again, or DEVICE alone, and wait for the figures.

    A policy's `trust: {within: 2m}` has this done by itself, at half of that age.
    """
    with connect(context, region) as api:
        before = {row.device.name: row.receipt.measured_at for row in _devices(api, name)}
        asked = api.measure(name, device)
        end = time.monotonic() + MEASURE_S  # noqa: TID251 - a command's own deadline
        rows = _devices(api, name, asked)
        while any(row.receipt.measured_at <= before.get(row.device.name, 0.0) for row in rows):
            if time.monotonic() > end:  # noqa: TID251
                raise refuse(
                    Code.DEADLINE_EXCEEDED,
                    f"{', '.join(asked)} of {name} is not measured after {MEASURE_S:g} s",
                    "a receipt",
                    f"see `shoal events`, and the agent's log: shoal logs {name}",
                )
            time.sleep(POLL_S)  # noqa: TID251
            rows = _devices(api, name, asked)
    if output in ("json", "yaml"):
        emit([as_data(row) for row in rows], output)
    else:
        show("devices", rows, wide=output == "wide")


@node.command()
@click.argument("name", type=NODE, metavar="NODE")
@click.argument("labels", metavar="NAME=VALUE|NAME- ..", nargs=-1, required=True)
@connection
@output
def label(name: str, labels: tuple[str, ...], context: str, region: str, output: str) -> None:
    """Set labels of NODE that count for policies (site=shop), or remove them (site-).

    What a device declares of itself counts as self.NAME only, unless its join token allows it. `price` is what an hour
    of the node costs; `entry` lists the tenants whose clients may call it (* for all).
    """
    removed = [each[:-1] for each in labels if each.endswith("-") and "=" not in each]
    given = dict(LABEL.convert(each, None, None) for each in labels if each[:-1] not in removed or "=" in each)
    with connect(context, region) as api:
        view = api.label(name, given, removed)
    if output in ("json", "yaml"):
        emit(as_data(view), output)
    else:
        line(
            f"{name}: " + (" ".join(f"{key}={value}" for key, value in sorted(view.node.labels.items())) or "no labels")
        )


def _devices(api: RegionClient, node: str, names: Sequence[str] = ()) -> list[operator_pb2.DeviceView]:
    """Devices of the node; all where no names are given."""
    return [row for row in api.get("devices").devices if row.node == node and (not names or row.device.name in names)]
