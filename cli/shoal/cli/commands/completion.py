"""`shoal completion`: what a shell needs to complete verbs, options, kinds and names."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes `shoal` in SHELL: verbs, options, kinds, and names as the region in use has them.

    Names are asked for when you press the key; where no region answers there are none.
    """
    found = get_completion_class(shell)
    assert found is not None, "one of click's own"
    print(found(context.find_root().command, {}, "shoal", "_SHOAL_COMPLETE").source(), end="")
