"""`shoal validate`: every problem of YAML files, offline."""

import click

from shoal.cli.documents import read
from shoal.cli.options import output
from shoal.cli.render.output import emit, line
from shoal.cli.render.plan import problems_of, show_problems


@click.command()
@click.argument("files", nargs=-1, required=True)
@output
def validate(files: tuple[str, ...], output: str) -> None:
    """Parse FILES (or folders; - is standard input) and show every problem with file, line, column and a hint.

    Talks to nobody."""
    bundle = read(files)
    problems = problems_of(bundle.problems)
    if output in ("json", "yaml"):
        emit({"valid": not problems, "problems": problems}, output)
    else:
        show_problems(problems)
        if not problems:
            line(f"valid: {len(bundle.documents)} file{'s' * (len(bundle.documents) != 1)}")
    if problems:
        raise click.exceptions.Exit(1)
