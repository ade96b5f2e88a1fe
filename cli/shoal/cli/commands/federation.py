"""`shoal federation`: regions that negotiate placements."""

import math
import time
from collections.abc import Sequence

import click

from shoal.cli.listing import ListingOptions, Target, listing, run_listing
from shoal.cli.options import connect, connection, output
from shoal.cli.render.columns import Column
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line, table
from shoal.cli.render.resources import reason, when
from shoal.client import RegionClient
from shoal.types.codes import Code, refuse
from shoal.types.units import DURATION, parse_quantity, show_bytes, show_number, show_seconds, show_usd_per_hour
from shoal.v1 import federation_pb2, operator_pb2

BID_ENTRIES = ("offered", "countered", "declined", "awarded", "granted", "released", "expired")
"""Ledger entries of a bid until it becomes an agreement or is gone."""


POLL_S = 0.5
SOLICITATION_CODES = tuple(
    each.upper() for each in ("solicited", "bid", "countered", "declined", "no_bid", "awarded", "granted")
)


@click.group()
def federation() -> None:
    """Join a federation of regions, see who is in it, and what was asked, bid, awarded and delivered."""


@federation.command()
@click.option("--federation", "address", required=True, metavar="HOST:PORT,..", help="Where it redeems tokens.")
@click.option(
    "--token",
    required=True,
    envvar="SHOAL_TOKEN",
    help="Of `shoal token create --role region` at the federation; better by SHOAL_TOKEN.",
)
@connection
@output
def join(address: str, token: str, context: str, region: str, output: str) -> None:
    """Make this region a member.

    Its CAs and the address of its port for peers (`shoal-coordinator run --peers`) are given to the federation, and
    those of the other members are trusted from then on, for what peers may ask and for nothing else. Whom it works for
    its Region document says (`spec.trade`), and what may run elsewhere each policy (`spec.federation`).
    """
    with connect(context, region) as api:
        joined = api.join_federation(address, token)
    if output in ("json", "yaml"):
        emit(as_data(joined), output)
    else:
        others = len(joined.members) - 1
        line(f"joined {joined.federation} at {joined.address}: {others} other region{'s' if others != 1 else ''}")


@federation.command()
@click.option("--forget", is_flag=True, help="Also where the federation does not answer; it then lists the region on.")
@click.option("--now", "at_once", is_flag=True, help="Break agreements off: nobody is trusted any more.")
@click.option("--within", default="2m", show_default=True, help="How long agreements may take to end; then it leaves.")
@connection
def leave(forget: bool, at_once: bool, within: str, context: str, region: str) -> None:
    """End the region's membership.

    Its agreements end first, in good order: what others run for it is brought home, or is served there until its notice
    is over where home has no place; what it runs for others is given notice of. Until then no other agreement begins.
    """
    patience_s = parse_quantity(within, DURATION)
    with connect(context, region) as api:
        left = 0 if at_once or forget else _drain_agreements(api, patience_s)
        api.leave_federation(forget=forget)
    line("left" + (f"; {left} agreements were broken off" if left else ""))


def _drain_agreements(api: RegionClient, patience_s: float) -> int:
    """Agreements that are left when the time is over; prints a line for each change."""
    end = time.monotonic() + patience_s  # noqa: TID251 - a command's own clock
    shown = 0
    while (left := api.drain_federation()) > 0:
        if left != shown:
            line(f"{left} agreement{'s' if left != 1 else ''} to end", "dim")
        shown = left
        if time.monotonic() >= end:  # noqa: TID251
            return left
        time.sleep(POLL_S)  # noqa: TID251
    return 0


@federation.command()
@connection
@output
def regions(context: str, region: str, output: str) -> None:
    """Who is in the federation, at what distance, and what they have free."""
    with connect(context, region) as api:
        found = api.federation()
    if found is None:
        raise refuse(
            Code.NOT_FOUND, "this region is in no federation", "a member of one", "join one: shoal federation join"
        )
    if output in ("json", "yaml"):
        emit(as_data(found), output)
        return
    joined = f"joined {when(found.joined_at)}" if found.joined_at else ""  # the federation itself never does
    said = f"answered {when(found.heard_at)}" if found.heard_at else joined
    state = reason(found.reason) if found.HasField("reason") else said
    line(", ".join(filter(None, (f"{found.federation} at {found.address}", state))))
    table(
        ["REGION", "DISTANCE", "TRUST", "STANDING", "RESIDENCY", "FREE", "DEVICES", "ADDRESS"],
        [_row(member) for member in found.members],
        wide=output == "wide",
    )
    if output == "wide":
        table(
            ["REGION", "CLASS", "RUNTIME", "DEVICES", "FREE", "PRECISIONS", "PRICE", "J/TFLOP", "MEASURED"],
            [_class_row(member.region, each) for member in found.members for each in member.classes],
            wide=True,
        )


@federation.command()
@click.argument("trade", metavar="[TRADE]", default="")
@connection
@output
def bids(trade: str, context: str, region: str, output: str) -> None:
    """Who asked, who bid what, who won and why, up to the agreements.

    What this region asked of others stands in its event log, with the terms of each answer in each round; TRADE (the
    first rounds' name, or a workload's) shows one. What it bid for others stands in its ledger."""
    with connect(context, region) as api:
        entries = [entry for entry in api.get("ledger").ledger if entry.what in BID_ENTRIES]
        asked = [event for event in api.events() if event.code in SOLICITATION_CODES]
    if trade:
        asked = [each for each in asked if trade in (each.subject, each.workload.name)]
        entries = [each for each in entries if trade in (each.agreement, each.workload.rpartition("/")[2])]
    if output in ("json", "yaml"):
        emit({"asked": [as_data(each) for each in asked], "bid": [as_data(each) for each in entries]}, output)
        return
    rows = []
    for each in asked:
        workload = f"{each.workload.tenant}/{each.workload.name}"
        rows.append([when(each.at), each.code.lower(), each.subject, workload, each.message])
    columns = [
        Column("AT", rank=2), Column("WHAT"), Column("TRADE", rank=1, least=10), Column("WORKLOAD", rank=3, least=12),
        Column("TERMS", rank=4, least=16),
    ]  # fmt: skip
    table(columns, rows, wide=output == "wide")
    _show_entries(entries, output)


@federation.command()
@click.argument("name", metavar="[AGREEMENT]", default="")
@listing
@connection
def agreements(
    name: str, watch: bool, sort_by: str, selector: str, output: str, context: str, region: str
) -> None:  # fmt: skip
    """What this region has run elsewhere, and runs for others, as `shoal get agreements` lists it."""
    target = Target("agreements", (name,) if name else ())
    with connect(context, region) as api:
        run_listing(api, [target], ListingOptions(output, selector, sort_by, watch=watch))


@federation.command()
@click.argument("name", metavar="[AGREEMENT]", default="")
@connection
@output
def ledger(name: str, context: str, region: str, output: str) -> None:
    """Every transition of every agreement, as this region wrote it down.

    At a federation: its copy of what the region AGREEMENT wrote down."""
    with connect(context, region) as api:
        entries = list(api.get("ledger", name).ledger)
    _show_entries(entries, output)


def _show_entries(entries: Sequence[federation_pb2.LedgerEntry], output: str) -> None:
    if output in ("json", "yaml"):
        emit([as_data(entry) for entry in entries], output)
        return
    table(
        [
            Column("#", rank=6), Column("AT", rank=4), "WHAT", Column("REGION"), Column("WORKLOAD", rank=1, least=12),
            Column("AGREEMENT", rank=3, least=10), Column("CODE", rank=2), Column("TERMS", rank=5, least=16),
        ],
        [
            [
                *(str(each.sequence), when(each.at), each.what, each.counterpart, each.workload),
                *(each.agreement, each.code or "-", each.terms or "-"),
            ]
            for each in entries
        ],
        wide=output == "wide",
    )  # fmt: skip


def _row(member: operator_pb2.MemberView) -> list[str]:
    free = show_bytes(sum(each.free_bytes for each in member.classes)) if member.advertises else "-"
    devices = str(sum(each.devices for each in member.classes)) if member.advertises else "-"
    distance = "-" if math.isnan(member.rtt_s) else show_seconds(member.rtt_s)
    believed = (f"{member.trust:.2f}", f"{member.standing:.2f}")
    return [member.region, distance, *believed, member.residency or "-", free, devices, member.address]


def _class_row(region: str, each: federation_pb2.CapacityClass) -> list[str]:
    joules = "-" if math.isnan(each.joules_per_tflop) else show_number(each.joules_per_tflop)
    price = "-" if math.isnan(each.cost_usd_per_h) else show_usd_per_hour(each.cost_usd_per_h)
    return [
        *(region, each.device_class, each.runtime, str(each.devices), show_bytes(each.free_bytes)),
        *(" ".join(each.precisions) or "-", price, joules, f"{each.confidence:.0%}"),
    ]
