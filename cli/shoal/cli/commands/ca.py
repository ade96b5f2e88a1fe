"""`shoal ca`: the certificate authority of a region or of a federation, and its rotation."""

import time
from contextlib import ExitStack
from typing import Final

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.columns import Column
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line, table
from shoal.cli.render.resources import when
from shoal.client import RegionClient
from shoal.types.codes import Code, ShoalError
from shoal.types.units import DURATION, parse_quantity
from shoal.v1 import operator_pb2

POLL_S: Final = 0.5
RENEWED_S: Final = 10.0
"""Within which a coordinator renews its first operator's files. A federation refuses an open connection too, once its
certificate is of a CA that is trusted no more."""
STAGES: Final = {
    "idle": "no rotation is on",
    "trust": "the next CA is made known",
    "issue": "the next CA issues; the old one is trusted still",
}


@click.group()
def ca() -> None:
    """The certificate authority of a region, or of a federation."""


@ca.command()
@connection
@output
def status(context: str, region: str, output: str) -> None:
    """Which CAs the region or federation trusts, where a rotation stands, and whom it waits for."""
    with connect(context, region) as api:
        found = api.authority()
    if output in ("json", "yaml"):
        emit(as_data(found), output)
        return
    line(f"{found.stage}: {STAGES[found.stage]}" + (f", since {when(found.since)}" if found.since else ""))
    table(
        [Column("FINGERPRINT", least=20), "STATE", "UNTIL"],
        [[root.fingerprint, root.state, when(root.expires_at)] for root in found.roots],
    )
    if found.laggards:
        columns = [Column("WAITS FOR", least=24), Column("WHICH LACKS", rank=1, least=24), Column("CONNECTED", rank=2)]
        table(columns, [_row(each) for each in found.laggards], wide=output == "wide")
    line(f"{found.revoked} certificates are revoked")


@ca.command()
@click.option(
    "--stage",
    type=click.Choice(["issue", "retire"]),
    default=None,
    help="Go on to this stage without those that are waited for. [default: begin]",
)
@click.option("--wait", default="10m", show_default=True, help="How long to watch; 0s: begin and leave.")
@connection
@output
def rotate(stage: str | None, wait: str, context: str, region: str, output: str) -> None:
    """Follow the CA of a region, or of a federation, by a new one, without a restart.

    First everybody is told to trust both, then everybody gets a certificate of the new one, then the old one goes. The
    coordinator carries it on by itself, also over a restart and when this command is gone. Nodes that are lost are not
    waited for: when they come back they renew. Clients of tenants are, since they hold the files themselves, and so is
    a broker: run `shoal-coordinator broker-config` again and reload it. A federation's waits for its member regions
    that advertise, in place of nodes, until they trust the new one.
    """
    quiet = output in ("json", "yaml")
    with connect(context, region) as api:
        found = api.authority()
        if stage is not None or found.stage == "idle":
            found = api.rotate(stage or "")
    found = _wait_rotated(context, region, found, parse_quantity(wait, DURATION), quiet=quiet)
    if output in ("json", "yaml"):
        emit(as_data(found), output)
    elif found.stage == "idle":
        issuing = next(root.fingerprint for root in found.roots if root.state == "issuing")
        line(f"done: {issuing} issues, and it alone is trusted")
    else:
        line(f"it goes on, and waits for {len(found.laggards)} more: shoal ca status")


def _wait_rotated(
    context: str, region: str, found: operator_pb2.GetAuthorityReply, wait_s: float, *, quiet: bool
) -> operator_pb2.GetAuthorityReply:
    """Wait until the rotation is done or the time is over; print a line for each change."""
    answered_at = time.monotonic()  # noqa: TID251 - a command's own clock
    end = answered_at + wait_s
    shown = ""
    with ExitStack() as opened:
        api: RegionClient | None = None
        while True:
            text = f"{found.stage}: {found.nodes_done} of {found.nodes}"
            if text != shown and not quiet and found.stage != "idle":
                line(text, "dim")
            shown = text
            if found.stage == "idle" or time.monotonic() >= end:  # noqa: TID251
                return found
            time.sleep(POLL_S)  # noqa: TID251
            api = api or opened.enter_context(connect(context, region))
            try:
                found, answered_at = api.authority(), time.monotonic()  # noqa: TID251
            except ShoalError as error:
                if error.code is not Code.CERT_UNTRUSTED or time.monotonic() - answered_at > RENEWED_S:  # noqa: TID251
                    raise
                api = None  # connects anew, with the files as they are then


def _row(each: operator_pb2.LaggardView) -> list[str]:
    until = f", until {when(each.certificate_expires_at)}" if each.certificate_expires_at else ""
    return [each.uri, each.lacks + until, "yes" if each.connected else "no"]
