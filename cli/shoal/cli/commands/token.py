"""`shoal token`: join tokens and bearer tokens."""

import shlex
from collections.abc import Iterator
from typing import Any, Final

import click

from shoal.cli.options import LABEL, connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, note
from shoal.types.codes import Code, refuse
from shoal.types.units import DURATION, parse_quantity

MOST: Final = 1000
"""Tokens of one command. Each is a call and a write of its own."""
_REDEEM: Final = {
    "agent": "shoal-agent run --enrol {address}{listen}",
    "gateway": "shoal-agent run --role gateway --enrol {address}{listen}",
    "operator": "shoal context login --coordinator {address}",
    "viewer": "shoal context login --coordinator {address}",
    "region": "shoal federation join --federation {address}",
}
"""Role -> the command that redeems its token, which it reads from SHOAL_TOKEN. The others have none. A node's joins and
then serves."""
_LISTEN: Final = " --listen 0.0.0.0:8001 --metrics 0.0.0.0:9464 --front-metrics 0.0.0.0:9465"
"""A node of a region on several machines, which dial it; by default it listens on its own machine alone."""
_LISTEN_HERE: Final = " --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --front-metrics 127.0.0.1:0"
"""One of several nodes on one machine: any free ports."""


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
    "--count",
    type=click.IntRange(1, MOST),
    help="So many, each printed as the whole command that a device runs, one a line: it joins, and serves.",
)
@click.option("--group", default="", help="Bind them to nodes GROUP-1, GROUP-2 .., labelled group=GROUP.")
@click.option(
    "--label",
    "labels",
    type=LABEL,
    multiple=True,
    help="Of the node that joins with it, so that it counts for policies; repeatable. `price` is its price, `entry` "
    "lists the tenants whose clients may call it (* for all).",
)
@click.option("--labels", "more_labels", default="", metavar="NAME=VALUE,..", help="As --label, several at once.")
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
    count: int | None,
    group: str,
    labels: tuple[tuple[str, str], ...],
    more_labels: str,
    allow_labels: tuple[str, ...],
    context: str,
    region: str,
    output: str,
) -> None:
    """Make a token; it is shown once, alone on standard output, and kept as a hash only.

    With --count or --group each line is the command to run on one device, its token in it: it joins, and serves. Run
    again, after a reboot, it serves.
    """
    if (count or group) and (name or role not in ("agent", "gateway")):
        raise refuse(
            Code.USAGE, f"--count or --group with {f'--name {name}' if name else f'--role {role}'}",
            "tokens of nodes, which the group names", "shoal token create --count 40 --group shops",
        )  # fmt: skip
    valid_s = parse_quantity(valid, DURATION)
    wanted = dict(labels) | dict(LABEL.convert(each, None, None) for each in filter(None, more_labels.split(",")))
    if group:
        wanted.setdefault("group", group)
    made: list[dict[str, Any]] = []
    with connect(context, region) as api:
        address = str(api.who_am_i().enrol_address)
        for node in _names(name, group, count or 1):
            reply = api.create_token(role, node, valid_s, wanted, allow_labels)
            command = join_command(role, address, reply.token, f"./{node or reply.id}" if count or group else "")
            made.append({**as_data(reply), "name": node, "command": command})
            if (count or group) and output not in ("json", "yaml"):
                print(command, flush=True)  # at once: a later one may be refused, and this one is shown once
    if output in ("json", "yaml"):
        emit(made if count or group else made[0], output)
        return
    uses = "many uses" if role == "bearer" else "one use"
    if count or group:
        note(f"{len(made)} tokens, each valid for {valid}, {uses}")
        if _is_of_this_machine(address):
            note("the region listens on this machine alone: each runs here, on free ports, its state in a folder here")
        return
    print(made[0]["token"])
    note(f"valid for {valid}, {uses}; id {made[0]['id']}")
    if role in _REDEEM and address:
        note(f"there: {_command(role, address, '..', '')}")


def join_command(role: str, address: str, token: str, folder: str) -> str:
    """What redeems the token, whole; empty: nothing does. The token is in the environment, where `ps` does not show
    it. folder: of the node's state, where it is one of several on this machine; empty: it is alone on its machine."""
    if role not in _REDEEM or not address:
        return ""
    return _command(role, address, shlex.quote(token), folder)


def _command(role: str, address: str, token: str, folder: str) -> str:
    here = f" --state-dir {shlex.quote(folder)}{_LISTEN_HERE}" if folder else ""
    listen, address = here if _is_of_this_machine(address) else _LISTEN, shlex.quote(address)
    return f"SHOAL_TOKEN={token} {_REDEEM[role].format(address=address, listen=listen)}"


def _is_of_this_machine(addresses: str) -> bool:
    """Whether nobody else can dial these, HOST:PORT with commas between."""
    hosts = [each.rpartition(":")[0] for each in addresses.split(",")]
    return all(host == "localhost" or host.startswith("127.") or host == "[::1]" for host in hosts)


def _names(name: str, group: str, count: int) -> Iterator[str]:
    """Of each token: the node that it is bound to; empty: any. Numbers have leading zeros, so that names sort."""
    for number in range(1, count + 1):
        yield f"{group}-{number:0{len(str(count))}d}" if group else name
