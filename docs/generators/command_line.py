"""The page of `shoal`'s verbs, from the commands themselves."""

from collections.abc import Iterator, Sequence

import click

from generators.markdown import GENERATED, code, page, table, wrap
from shoal.cli.examples import EXAMPLES
from shoal.cli.main import shoal
from shoal.cli.verbs import GROUPS, Verb
from shoal.host.program_help import Example

_HEAD = f"""# Command line

{GENERATED}

`shoal --help` lists the verbs, `shoal VERB --help` the options of one. An option can also be set by
the variable that stands beside it. `-o json` gives errors as JSON too. What the status of a command
means: [exit codes](exit-codes.md).
"""


def command_line() -> str:
    return page(_lines())


def verbs() -> Iterator[tuple[str, click.Command]]:
    """(`shoal get`, command) of every verb and of the verbs below it, in the order of the help."""
    for group in GROUPS.values():
        for verb in group:
            yield from _with_verbs_below(f"shoal {verb.name}", _command_of(verb))


def _command_of(verb: Verb) -> click.Command:
    """As `shoal` has it: with its examples."""
    found = shoal.get_command(click.Context(shoal), verb.name)
    assert found is not None
    return found


def _with_verbs_below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if command.hidden:
        return
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            if (inner := command.get_command(click.Context(command), name)) is not None:
                yield from _with_verbs_below(f"{path} {name}", inner)


def _lines() -> Iterator[str]:
    yield _HEAD
    yield from _options(shoal.params)
    for heading, group in GROUPS.items():
        yield f"## {heading}"
        yield ""
        for verb in group:
            for path, each in _with_verbs_below(f"shoal {verb.name}", _command_of(verb)):
                yield from _verb(path, each)


def _verb(path: str, command: click.Command) -> Iterator[str]:
    yield f"{'#' * (2 + path.count(' '))} {path}"
    yield ""
    yield "```text"
    yield usage(path, command)
    yield "```"
    yield ""
    for paragraph in (command.help or "").split("\n\n"):
        yield from wrap(_with_code(paragraph.removeprefix("\b")))
    yield from _options(command.params)
    yield from _examples(EXAMPLES.get(path.removeprefix("shoal "), ()))


def _with_code(text: str) -> str:
    """Angle brackets would be HTML."""
    return text.replace("<", "&lt;")


def usage(path: str, command: click.Command) -> str:
    """The command line, without what every option takes."""
    arguments = [
        each.make_metavar(click.Context(command)) for each in command.params if isinstance(each, click.Argument)
    ]
    options = ["[OPTIONS]"] if any(isinstance(each, click.Option) for each in command.params) else []
    below = ["VERB"] if isinstance(command, click.Group) else []
    return " ".join([path, *options, *arguments, *below])


def _options(parameters: Sequence[click.Parameter]) -> Iterator[str]:
    rows = [_row(each) for each in parameters if isinstance(each, click.Option) and not each.hidden]
    if rows:
        yield from table(("option", "value", "default", "variable", "meaning"), rows)


def _row(option: click.Option) -> tuple[str, ...]:
    names = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
    return names, _value(option), _default(option), _variables(option), option.help or ""


def _value(option: click.Option) -> str:
    if option.is_flag or option.count:
        return ""
    if isinstance(option.type, click.Choice):
        shown = ", ".join(code(each) for each in option.type.choices)
    else:
        shown = code(option.make_metavar(click.Context(shoal)))
    return f"{shown}, repeatable" if option.multiple else shown


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    shown = option.default
    if option.is_flag or callable(shown) or not isinstance(shown, str | int | float) or shown == "":
        return ""
    return code(shown)


def _variables(option: click.Option) -> str:
    given = option.envvar
    return code(given) if isinstance(given, str) else ", ".join(code(each) for each in given or ())


def _examples(found: Sequence[Example]) -> Iterator[str]:
    if found:
        yield "```sh"
        widest = max(len(line) for line, _ in found)
        yield from (f"{line.ljust(widest)}  # {meaning}" if meaning else line for line, meaning in found)
        yield "```"
        yield ""
