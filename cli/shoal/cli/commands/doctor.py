"""`shoal doctor`: checks by component, each failure with the line that fixes it."""

import click

from shoal.cli.options import connected, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line, table


@click.command()
@click.argument("component", type=click.Choice(["all", "region", "agent", "federation"]), default="all")
@connection
@output
def doctor(component: str, context: str, region: str, output: str) -> None:
    """Check the region: the invariants on its live state, its store, identity, nodes, the federation that it is in.

    Status 1 when a check fails."""
    with connected(context, region) as api:
        checks = [check for check in api.doctor().checks if component in ("all", check.component)]
    failed = [check for check in checks if not check.ok]
    if output in ("json", "yaml"):
        emit([as_data(check) for check in checks], output)
    else:
        table(
            ["", "COMPONENT", "CHECK", "CODE", "FOUND", "REMEDY"],
            [
                ["ok" if c.ok else "FAIL", c.component, c.name, c.refusal.code, c.refusal.found, c.refusal.remedy]
                for c in checks
            ],
        )
        line(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise click.exceptions.Exit(1)
