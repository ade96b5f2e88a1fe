"""The questions of `shoal policy new --wizard`, asked in a terminal. Tab completes what the region in use has names
for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from shoal.cli.names import COMPLETION_S
from shoal.cli.render.output import line, note, show_refusal
from shoal.cli.render.plan import problems_of, show_problems
from shoal.policies import load
from shoal.policies.questions import Question, fill_in, lines_of, questions
from shoal.policies.templates import NEEDS, need_template, summary
from shoal.types.codes import Code, refuse

_SHOWN: Final = 4
"""Suggestions that a question shows; Tab completes all of them."""


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What the region in use has that an answer can name."""

    # Its name; empty where none could be reached.
    region: str = ""
    # Names of models.
    models: tuple[str, ...] = ()
    # CEL over devices and nodes, each true of at least one.
    selectors: tuple[str, ...] = ()
    # Names of labels that nodes have.
    labels: tuple[str, ...] = ()

    def of(self, key: str) -> tuple[str, ...]:
        """For a question."""
        match key:
            case "model":
                return self.models
            case "where" | "first" | "second":
                return self.selectors
            case "label":
                return self.labels
            case "region":
                return (self.region,) if self.region else ()
        return ()


def suggestions_of(region: str, models: Sequence[Any], nodes: Sequence[Any]) -> Suggestions:
    """models, nodes: rows of listings."""
    kinds = sorted({device.kind for row in nodes for device in row.node.devices})
    pairs = sorted({pair for row in nodes for pair in row.node.labels.items()})
    by_label = (f'has(node.labels.{name}) && node.labels.{name} == "{value}"' for name, value in pairs)
    return Suggestions(
        region,
        tuple(dict.fromkeys(row.name for row in models if row.name)),
        (*(f'device.kind == "{kind}"' for kind in kinds), *(each for each in by_label if each.isprintable())),
        tuple(dict.fromkeys(name for name, _ in pairs)),
    )


def ask_region(context: str) -> Suggestions:
    """What the region in use says; nothing where it cannot be reached."""
    with suppress(Exception):  # whoever writes a file needs no region
        from shoal.cli.render.listings import rows_of
        from shoal.client import Contexts, RegionClient

        found = Contexts().get(context)
        with RegionClient(found, COMPLETION_S) as api:
            nodes = rows_of(api, "nodes", "", "")
            return suggestions_of(found.region, api.models(), nodes)
    return Suggestions()


def run_wizard(need: str, given: Mapping[str, str], known: Suggestions) -> None:
    """Ask, show, check, and write a file on consent. need: empty: it is asked for. given: answers by key, which are not
    asked for. Raises ShoalError(CONFLICT | SOURCE_UNREACHABLE), click.Abort."""
    if known.region:
        note(f"region {known.region}: Tab completes its models, devices and labels")
    else:
        note("no region can be reached: names are not completed")
    text = need_template(need or _ask_need())
    answers = dict(given)
    for question in questions(text):
        if question.key not in answers:
            answers[question.key] = _ask(question, text, answers, known.of(question.key))
    made = fill_in(text, answers)
    name = answers.get("name", "") or "policy"
    problems = load([(f"{name}.yaml", made)]).problems
    click.echo(f"\n{made}")
    if problems:
        show_problems(problems_of(problems))
        line("nothing is written")
        raise click.exceptions.Exit(1)
    line("valid, as shoal validate judges it", "green")
    path = Path(_prompt("Write it to which file?", f"{name}.yaml", ()))
    is_new = not path.exists()
    if not click.confirm(f"Write {path}?" if is_new else f"{path} is there. Replace it?", default=is_new):
        line("nothing is written")
        return
    try:
        path.write_text(made, encoding="utf-8")
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{path}: {cause.strerror}", "a file that can be written", "choose another"
        ) from cause
    line(f"written. What it would do: shoal plan -f {path}")


def _ask_need() -> str:
    for number, need in enumerate(NEEDS, 1):
        line(f"{number:2}  {need:23} {summary(need)}")
    while True:
        answer = _prompt("Which need is nearest to yours? Its number or name", "1", NEEDS)
        if answer in NEEDS:
            return answer
        if answer.isdecimal() and 1 <= int(answer) <= len(NEEDS):
            return NEEDS[int(answer) - 1]
        line(f"1 to {len(NEEDS)}, or a name")


def _ask(question: Question, text: str, answers: Mapping[str, str], suggestions: Sequence[str]) -> str:
    """An answer that the check finds nothing in."""
    default = "" if question.is_optional else question.default
    if question.key in ("model", "region", "label") and suggestions and default not in suggestions:
        default = suggestions[0]
    if suggestions:
        more = ", .." if len(suggestions) > _SHOWN else ""
        note(f"Tab: {', '.join(suggestions[:_SHOWN])}{more}")
    elif question.is_optional:
        note(f"such as: {question.default}")
    while True:
        answer = _prompt(question.prompt, default, suggestions)
        made = fill_in(text, {**answers, question.key: answer})
        lines = lines_of(text, question.key)
        problems = [each for each in load([("", made)]).problems if each.line in lines]
        if not problems:
            return answer
        show_refusal(problems[0].refusal, stderr=False)


def _prompt(prompt: str, default: str, suggestions: Sequence[str]) -> str:
    with _completed_from(suggestions):
        try:
            answer = click.prompt(prompt, default=default, show_default=bool(default), prompt_suffix=" > ")
        except click.Abort:
            click.echo()  # the shell's prompt is not to stand behind the question
            raise
    return str(answer).strip()


@contextmanager
def _completed_from(suggestions: Sequence[str]) -> Iterator[None]:
    """Tab completes an answer as a whole, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return

    def complete(begun: str, state: int) -> str | None:
        found = [each for each in suggestions if each.startswith(begun)]
        return found[state] if state < len(found) else None

    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete)
    readline.set_completer_delims("")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
