"""Help of a command with many verbs: grouped by purpose, with examples, and verbs imported when they are used."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import click

from shoal.cli.examples import EXAMPLES
from shoal.cli.verbs import Verb
from shoal.cli.wrong_word import WrongWord
from shoal.host.program_help import Example, format_examples


class GroupedHelp(click.Group):
    """A group whose verbs are listed under headings, in the order given."""

    def __init__(
        self,
        *arguments: Any,
        groups: Mapping[str, Sequence[Verb]],
        examples: Sequence[Example] = (),
        **options: Any,
    ) -> None:
        """groups: heading -> its verbs. examples: (command line, what it does)."""
        super().__init__(*arguments, **options)
        self._groups = groups
        self._examples = tuple(examples)
        self._verbs = {verb.name: verb for verbs in groups.values() for verb in verbs}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self._verbs:
            verb = self._verbs[cmd_name]
            command = verb.load()
            command.short_help = verb.summary
            _add_examples(command, verb.name)
            self.add_command(command, verb.name)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._verbs and args[0][:1].isalpha() and not ctx.resilient_parsing:
            near = get_close_matches(args[0], self._verbs, 1)
            remedy = f"{ctx.command_path} {near[0]}" if near else ""
            raise WrongWord(f"no verb is called {args[0]!r:.80}", "one of those in the help", remedy, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self._verbs), default=0)
        for heading, verbs in self._groups.items():
            with formatter.section(heading):
                formatter.write_dl([(verb.name.ljust(widest), verb.summary) for verb in verbs])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._examples:
            formatter.write("\n" + format_examples(self._examples) + "\n")
        super().format_epilog(ctx, formatter)


def _add_examples(command: click.Command, path: str) -> None:
    """To its help, and to that of the verbs below it."""
    parts = [command.epilog] if command.epilog else []
    if path in EXAMPLES:
        parts.append("\b\n" + format_examples(EXAMPLES[path]))
    command.epilog = "\n\n".join(parts) or None
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                _add_examples(inner, f"{path} {name}")
