"""A mistake in the command line itself, as a refusal."""

import re
from typing import Final

import click

from shoal.types.codes import Code, Refusal

AFTER_THE_VERB = frozenset({"--context", "--region", "--tenant", "--output", "-o"})
"""Options that verbs have and `shoal` itself has not."""
_SURPLUS: Final = re.compile(r"Got unexpected extra arguments? \((.+)\)")
"""What click says of words that no argument takes."""


class WrongWord(click.UsageError):
    """A word of the command line that is none of those that there are."""

    def __init__(self, found: str, wanted: str, remedy: str, ctx: click.Context | None) -> None:
        super().__init__(found, ctx)
        self.wanted = wanted
        # Empty: the verb's help.
        self.remedy = remedy


def refusal_of(error: click.ClickException) -> Refusal:
    """What click says of a command line that cannot be read."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    where = context.command_path if context is not None else "shoal"
    found = " ".join(error.format_message().split()).removesuffix(".")
    if isinstance(error, WrongWord):
        remedies = filter(None, (error.remedy, f"{where} --help"))
        return Refusal(Code.USAGE, found, error.wanted, ", or ".join(remedies))
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.get_error_hint(context).replace("'", "")
        about = getattr(error.param, "help", "") or ""
        wanted = f"{name}: {about.strip().removesuffix('.')}" if about else _usage(where, context)
        return Refusal(Code.USAGE, f"no {name}", wanted, f"{where} --help")
    if isinstance(error, click.BadParameter) and error.param is not None and isinstance(error.param.type, click.Choice):
        name = error.param.get_error_hint(context).replace("'", "").strip("{}[]")
        given = error.message.partition(" is not one of")[0]
        choices = ", ".join(map(str, error.param.type.choices))
        return Refusal(
            Code.USAGE, f"{given} for {name}" if "|" not in name else given, f"one of {choices}", f"{where} --help"
        )
    if isinstance(error, click.NoSuchOption) and error.option_name in AFTER_THE_VERB and where == "shoal":
        return Refusal(
            Code.USAGE, f"{error.option_name} before the verb", "after it", f"shoal VERB {error.option_name} .."
        )
    if context is not None and (surplus := _SURPLUS.fullmatch(found)):
        return Refusal(Code.USAGE, f"{surplus[1]} after all that it takes", _usage(where, context), f"{where} --help")
    return Refusal(Code.USAGE, found, "", f"{where} --help")


def _usage(where: str, context: click.Context | None) -> str:
    """All words that the command takes, in order."""
    return " ".join((where, *(context.command.collect_usage_pieces(context) if context is not None else ())))
