"""`shoal policy`: templates to start from, a wizard that fills one in, the schema for editors."""

import json
import sys
from collections.abc import Mapping

import click

from shoal.cli.names import CONTEXT
from shoal.cli.options import LABEL
from shoal.policies.documents import load
from shoal.policies.kinds import KINDS
from shoal.policies.questions import fill_in, lines_of, questions
from shoal.policies.schema import schema as json_schema
from shoal.policies.templates import NEEDS, need_template, summary, template
from shoal.types.codes import Code, refuse

_NEEDS_HELP = "\b\n" + "\n".join(f"{need:24} {summary(need)}" for need in NEEDS)


@click.group()
def policy() -> None:
    """The policy language: commented templates, a wizard, the JSON Schema."""


@policy.command(epilog="Needs:\n\n" + _NEEDS_HELP)
@click.argument("kind", type=click.Choice([kind.lower() for kind in KINDS]), required=False)
@click.option("--template", "need", type=click.Choice(NEEDS), metavar="NEED", help="A policy by need, with a workload.")
@click.option("--wizard", is_flag=True, help="Ask in a terminal, show the result, check it, and write it on consent.")
@click.option(
    "--set", "given", multiple=True, type=LABEL, metavar="KEY=VALUE",
    help="An answer to a question of the need's template; repeat. Each is beside its field.",
)  # fmt: skip
@click.option("--context", envvar="SHOAL_CONTEXT", default="", type=CONTEXT, help="Whose names --wizard completes.")
def new(
    kind: str | None, need: str | None, wizard: bool, given: tuple[tuple[str, str], ...], context: str
) -> None:  # fmt: skip
    """Print a commented template: of KIND (policy, unless it is given), or by need, filled in.

    Nothing is sent. Editors complete it once `shoal policy schema > shoal.json` has put the schema beside it.
    """
    answers = dict(given)
    if kind and (need or wizard):
        raise refuse(Code.USAGE, f"{kind} beside a need", "a kind, or --template, or --wizard", "leave out the kind")
    if answers and not (need or wizard):
        raise refuse(Code.USAGE, "--set without a need", "--template NEED", "shoal policy new --help")
    if need and (unknown := sorted(answers.keys() - {each.key for each in questions(need_template(need))})):
        keys = ", ".join(each.key for each in questions(need_template(need)))
        raise refuse(Code.USAGE, f"no question {', '.join(unknown)} in {need}", keys, "correct the name")
    if wizard:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            remedy = f"shoal policy new --template {need or NEEDS[0]} --set KEY=VALUE"
            raise refuse(Code.USAGE, "no terminal to ask in", "a terminal", remedy)
        from shoal.cli.wizard import ask_region, run_wizard  # gRPC, which the templates do without

        run_wizard(need or "", answers, ask_region(context))
    elif need:
        text = need_template(need)
        for key in answers:
            _check_answer(text, key, answers)
        click.echo(fill_in(text, answers), nl=False)
    else:
        click.echo(template(kind or "policy"), nl=False)


def _check_answer(text: str, key: str, answers: Mapping[str, str]) -> None:
    """As the wizard checks it. Raises ShoalError with the first problem in a line that the answer stands in."""
    lines = lines_of(text, key)
    for each in load([("", fill_in(text, answers))]).problems:
        if each.line in lines:
            why = each.refusal
            raise refuse(why.code, f"--set {key}: {why.found}", why.asked, why.remedy)


@policy.command()
def schema() -> None:
    """Print the JSON Schema of all kinds, for editors: `shoal policy schema > shoal.json`.

    A YAML file beside it whose first line is `# yaml-language-server: $schema=shoal.json` has its fields completed,
    explained and checked. Templates begin so.
    """
    print(json.dumps(json_schema(), indent=1))
