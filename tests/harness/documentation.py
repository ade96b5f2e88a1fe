"""What README and docs show: blocks of code, command lines, and whether the programs take them."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from shoal.agent.main.options import parser as agent_parser
from shoal.cli.main import shoal
from shoal.coordinator.main.options import parser_of as coordinator_parser

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted(ROOT.glob("[CS]*.md")), *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK: Final = re.compile(
    r"(?:^ *<!-- not run: (?P<not_run>[^>]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
_INCLUDE: Final = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
"""A file in place of the line, as on the site."""
_FILE: Final = re.compile(r"`([\w./-]+\.yaml)`")
_SPAN: Final = re.compile(r"(?<!`)`((?:shoal|shoal-agent|shoal-coordinator|make) [^`]+)`(?!`)")
_ENDS: Final = frozenset(("|", "||", "&&", ";", "&", "(", ")", "<", ">", ">>", "$", "{", "}"))
_PREFIXES: Final = frozenset(("sudo", "exec", "time", "nohup", "then", "do", "!"))
_PLACEHOLDER: Final = re.compile(r"[A-Z]{2,}|\.\.")


@dataclass(frozen=True, slots=True)
class Snippet:
    # `docs/guides/links.md:12`
    place: str
    # sh, yaml, python and so on; span: code inside a sentence.
    language: str
    # Without its indentation.
    text: str
    # Of `<!-- not run: .. -->` above a block: why `tests/integration/test_pages.py` does not type it.
    not_run: str = ""
    # The file whose text it is, or that the sentence above it names; empty: none.
    file: str = ""


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        indent = len(found["indent"])
        body = "\n".join(each[indent:] for each in found["body"].split("\n"))
        included = _INCLUDE.findall(body)
        body = _INCLUDE.sub(lambda each: (ROOT / each[1]).read_text(), body)
        place = _place(page, text, found.start("indent") + 1)
        reason = " ".join((found["not_run"] or "").split())
        file = included[0] if included else _file_above(text[: found.start()])
        yield Snippet(place, found["language"], body, reason, file)
    for found in _SPAN.finditer(_BLOCK.sub("", text)):
        yield Snippet(_place(page, text, 0, found[1]), "span", " ".join(found[1].split()))


def _file_above(text: str) -> str:
    named = _FILE.findall(text.rstrip("\n").rpartition("\n\n")[2])
    return named[-1] if named else ""


def _place(page: Path, text: str, offset: int, sought: str = "") -> str:
    at = text.find(sought) if sought else offset
    return f"{page.relative_to(ROOT)}:{text[:at].count(chr(10)) + 1}"


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a shell text, without redirections, prefixes and assignments. A text that is no whole line
    of shell, as in a sentence, ends where it stops to be one."""
    for line in text.replace("\\\n", " ").split("\n"):
        words = shlex.shlex(re.sub(r"\$\(", " ; ", line), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        found: list[str] = []
        redirected = False
        with contextlib.suppress(ValueError):  # a quotation that ends on another line
            for word in words:
                if word in _ENDS or set(word) <= set("();<>|&"):
                    redirected = "<" in word or ">" in word
                    if not redirected:
                        yield from _command(found)
                        found = []
                elif redirected:
                    redirected = False
                else:
                    found.append(word)
        yield from _command(found)


def _command(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    rest = list(words)
    while rest and (rest[0] in _PREFIXES or re.match(r"[A-Za-z_]+=", rest[0])):
        rest.pop(0)
    rest = [each for each in rest if each not in ("..", "...")]
    if rest:
        yield tuple(rest)


def refusal_of(command: Sequence[str], *, whole: bool = True) -> str:
    """Why a program of ours would not take the command line; empty if it does, or is not ours. whole: not a mere
    mention, which may leave arguments out. A token may be in the environment instead."""
    program, *arguments = command
    match program:
        case "shoal":
            return _shoal_refusal(arguments, whole)
        case "shoal-agent" | "shoal-coordinator":
            return _program_refusal(program, arguments, whole)
        case "make":
            return _make_refusal(arguments)
        case _:
            is_ours = "/" in program and program[0] not in "/." and (ROOT / program.partition("/")[0]).exists()
            return f"no file {program}" if is_ours and whole and not (ROOT / program).exists() else ""


def _shoal_refusal(arguments: list[str], whole: bool) -> str:
    context = click.Context(shoal, info_name="shoal")
    command: click.Command = shoal
    rest = [each for each in arguments if each != "--debug"]
    while isinstance(command, click.Group):
        if not rest or rest[0] in ("--help", "-h", "--version") or _is_open(rest[0]):
            return ""
        inner = command.get_command(context, rest[0])
        if inner is None:
            return f"no verb {rest[0]}"
        settings = {"ignore_unknown_options": inner.context_settings.get("ignore_unknown_options", False)}
        context = click.Context(inner, parent=context, info_name=rest[0], **settings)
        command, rest = inner, rest[1:]
    if "--help" in rest or any(_is_open(each) for each in rest if not whole):
        return ""
    try:
        if whole:
            command.make_context(context.info_name, list(rest), parent=context.parent)
        else:
            command.make_parser(context).parse_args([each for each in rest if each != "..."])
    except click.exceptions.Exit:
        return ""
    except click.BadParameter as error:
        if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "token":
            return ""
        is_file = error.param is not None and isinstance(error.param.type, click.Path | click.File)
        return "" if is_file or _is_placeholder(error) else error.format_message()
    except click.BadOptionUsage as error:
        return error.format_message() if whole else ""
    except click.ClickException as error:
        return error.format_message()
    return ""


def _is_open(word: str) -> bool:
    return word in ("...", "..", "VERB") or word.startswith(("NAME", "|"))


def _is_placeholder(error: click.BadParameter) -> bool:
    return bool(_PLACEHOLDER.search(error.message))


def _program_refusal(program: str, arguments: list[str], whole: bool) -> str:
    parser = agent_parser() if program == "shoal-agent" else coordinator_parser({})
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            parser.parse_args(arguments)
        except SystemExit as ended:
            text = told.getvalue().strip().split("\n")[-1]
            if ended.code == 0 or text.startswith("found: no --token;") or (not whole and _is_mention(text)):
                return ""
            return text
    return ""


def _is_mention(text: str) -> bool:
    """Whether what is wrong is an argument that is missing, or a placeholder in its place."""
    is_missing = text.startswith(("found: no --", "found: no verb;")) or "expected one" in text
    return is_missing or ": tenant 'TENANT'" in text or ": address 'A'" in text


def _make_refusal(arguments: Sequence[str]) -> str:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [each for each in arguments if not each.startswith("-") and "=" not in each and each.islower()]
    missing = [each for each in named if each not in targets]
    return f"no target {missing[0]}" if missing else ""
