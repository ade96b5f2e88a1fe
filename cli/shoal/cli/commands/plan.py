"""`shoal plan`: what apply would do, and why."""

import click

from shoal.cli.documents import push_sources, read
from shoal.cli.options import connect, connection, output
from shoal.cli.render.plan import refuse_problems, report_plan


@click.command()
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    help="A YAML file or folder, or - for standard input; repeat. Without: what would change as things stand.",
)
@connection
@output
def plan(files: tuple[str, ...], context: str, region: str, output: str) -> None:
    """Show what apply would do: diff, candidates, the chosen ones, predictions with error bars, and a hash.

    Exit status: 0 nothing to do, 1 changes, 255 error.
    """
    bundle = read(files)
    refuse_problems(bundle.problems, output)
    with connect(context, region) as api:
        reply = api.plan(bundle.documents, push_sources(api, bundle))
    report_plan(reply, output)
    if reply.problems:
        raise click.exceptions.Exit(255)
    raise click.exceptions.Exit(1 if reply.changes else 0)
