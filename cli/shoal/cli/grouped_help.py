"""Help of a command with many verbs, grouped by purpose, with examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedHelp(click.Group):
    """A group whose verbs are listed under headings, in the order given."""

    def __init__(
        self,
        *arguments: Any,
        groups: Mapping[str, Sequence[click.Command]] | None = None,
        examples: Sequence[tuple[str, str]] = (),
        **options: Any,
    ) -> None:
        """groups: heading -> its verbs, which are added. examples: (command line, what it does)."""
        super().__init__(*arguments, **options)
        self._headings = {
            heading: tuple(command.name or "" for command in verbs) for heading, verbs in (groups or {}).items()
        }
        self._examples = tuple(examples)
        for verbs in (groups or {}).values():
            for command in verbs:
                self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max((len(name) for name in self.commands), default=0)
        limit = formatter.width - 6 - widest
        for heading, names in self._headings.items():
            rows = [(name.ljust(widest), self.commands[name].get_short_help_str(limit)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._examples:
            with formatter.section("Examples"):
                formatter.write_dl(self._examples, col_max=60)
        super().format_epilog(ctx, formatter)
