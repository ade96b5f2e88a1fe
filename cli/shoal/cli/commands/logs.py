"""`shoal logs`: a device's log, without access to the device."""

import json

import click

from shoal.cli.names import NODE
from shoal.cli.options import connect, connection
from shoal.cli.render.output import line

_HEAD = ("timestamp", "level", "process", "event")


@click.command()
@click.argument("node", default="", type=NODE)
@click.option("-f", "--follow", is_flag=True, help="Stay, and show new lines as they come.")
@click.option("--tail", default=100, show_default=True, type=click.IntRange(1, 1000), help="How many past lines.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="json: each line as it is.")
@connection
def logs(node: str, follow: bool, tail: int, output: str, context: str, region: str) -> None:
    """The newest lines of NODE's log, oldest first: of its supervisor, front and workers. Without NODE: of the
    coordinator.

    They come over the node's own link, so it has to be connected. A node keeps 2 MiB for each process. Only operators
    may read them, and that they did is in the audit log.
    """
    with connect(context, region) as api:
        for text in api.logs(node, lines=tail, follow=follow):
            if output == "json":
                print(text, flush=True)
            else:
                line(_format_line(text))


def _format_line(text: str) -> str:
    """time, level, process, event, then the other fields; a line that is not an event stays as it is."""
    try:
        said = json.loads(text)
        head = [str(said.pop(name, "")) for name in _HEAD]
    except (ValueError, AttributeError):
        return text
    return "  ".join([*filter(None, head), *(f"{name}={value}" for name, value in said.items())])
