"""`shoal events`: past and new events."""

import json

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line
from shoal.cli.render.resources import event_line


@click.command()
@click.option("-w", "--watch", is_flag=True, help="Stay, and show new events as they happen.")
@click.option(
    "--limit",
    default=50,
    show_default=True,
    help="How many past events, the newest, also before --watch; 0 for all that are kept.",
)
@connection
@output
def events(watch: bool, limit: int, context: str, region: str, output: str) -> None:
    """The region's events, oldest first: every decision has one."""
    with connect(context, region) as api:
        for event in api.events(follow=watch, limit=limit):
            if output == "json":
                print(json.dumps(as_data(event)), flush=True)
            elif output == "yaml":
                emit([as_data(event)], output)
            else:
                line(event_line(event))
