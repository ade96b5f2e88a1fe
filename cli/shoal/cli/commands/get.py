"""`shoal get`: listings."""

import click

from shoal.cli.listing import ListingOptions, Target, listing, run_listing
from shoal.cli.names import OF_KIND
from shoal.cli.options import KINDS_HELP, ResourceKinds, connect, connection, read_targets


@click.command(epilog=KINDS_HELP)
@click.argument("kind", type=ResourceKinds())
@click.argument("names", nargs=-1, type=OF_KIND, metavar="[NAME]...")
@click.option("--tenant", default="", help="Only this tenant's. [default: all]")
@listing
@connection
def get(
    kind: str, names: tuple[str, ...], tenant: str, watch: bool, sort_by: str, selector: str, output: str, context: str,
    region: str,
) -> None:  # fmt: skip
    """List nodes, devices, models, workloads, placements, migrations and whatever else a region knows.

    KIND is one kind or several (nodes,devices), `all` for what runs and where, or KIND/NAME.
    """
    targets = [Target(each, found) for each, found in read_targets(kind, names).items()]
    with connect(context, region) as api:
        run_listing(api, targets, ListingOptions(output, selector, sort_by, tenant, watch))
