"""`shoal policy new`: templates by need, their questions, and the wizard that asks them."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.terminal import terminal
from shoal.cli.commands.policy import policy
from shoal.cli.wizard import suggestions_of
from shoal.policies import Workload, load
from shoal.policies.parse import MappingNode, parse, plain
from shoal.policies.questions import fill_in, lines_of, questions
from shoal.policies.templates import NEEDS, need_template, summary, template
from shoal.types.codes import Code, ShoalError

MODELINE = "# yaml-language-server: $schema=shoal.json\n"
TWO_LINES = "kind: Policy\nname: mine  # ask name: What is it called?\nalso: mine  # as name\n"


@pytest.mark.parametrize("need", NEEDS)
def test_a_template_is_valid_as_it_is_and_with_its_examples(need: str) -> None:
    text = need_template(need)
    examples = {each.key: each.default for each in questions(text)}
    for made in (text, fill_in(text, {}), fill_in(text, examples)):
        loaded = load([(need, made)])
        assert [str(problem) for problem in loaded.problems] == []
        assert [document.kind for document in loaded.documents] == ["Policy", "Workload"]
        assert loaded.documents[0].name == need
    assert text.startswith(MODELINE)
    assert len(summary(need)) <= 53, "its line of the help"
    assert " ask " not in fill_in(text, {})
    assert {"name", "model", "rate", "region"} <= examples.keys()
    assert re.sub("# (ask|as) ", "", text).count("# as") == 0


@pytest.mark.parametrize("need", NEEDS)
def test_a_name_is_given_once_for_policy_and_workload(need: str) -> None:
    made = fill_in(need_template(need), {"name": "reader", "model": "ocr"})
    policy_document, workload = load([(need, made)]).documents
    assert isinstance(workload.value, Workload)
    assert (policy_document.name, workload.value.metadata.name) == ("reader", "reader")
    assert (workload.value.spec.policy, workload.value.spec.model.source) == ("reader", "ocr")


def test_templates_of_the_kinds_name_the_schema_too() -> None:
    assert all(template(kind).startswith(MODELINE) for kind in ("policy", "workload", "tenant", "region"))


def test_an_optional_field_is_left_out_unless_it_is_answered() -> None:
    text = "  # where: a.b  # ask where: Where?\n"
    assert fill_in(text, {"where": " "}) == "  # where: a.b  # where: Where?\n"
    assert fill_in(text, {"where": 'c == "d"'}) == '  where: c == "d"\n'
    assert lines_of(TWO_LINES, "name") == {2, 3}


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_an_answer_changes_its_own_fields_and_nothing_else(answer: str) -> None:
    made = fill_in(TWO_LINES, {"name": answer})
    (root,) = parse("made", made).roots
    assert isinstance(root, MappingNode)
    assert list(root.entries) == ["kind", "name", "also"]
    found = plain(root)
    assert isinstance(found, dict)
    assert found["kind"] == "Policy"
    if answer.strip():
        assert found["name"] == found["also"]
        if isinstance(found["name"], str):
            assert found["name"] == " ".join(answer.split())


def test_a_template_is_printed_with_answers() -> None:
    found = CliRunner().invoke(
        policy, ["new", "--template", "cheapest", "--set", "name=bills", "--set", "cost=2 USD/h"]
    )
    assert found.exit_code == 0
    assert "name: bills\n" in found.output
    assert "cost: 2 USD/h\n" in found.output
    assert "# p95: How soon" in found.output


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--wizard"], "--template"),
        (["--wizard", "--template", "npu-first"], "--template npu-first"),
        (["--template", "npu-first", "--set", "p59=1s"], "correct"),
        (["--set", "p95=1s"], "--help"),
        (["workload", "--template", "npu-first"], "kind"),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], remedy: str) -> None:
    found = CliRunner().invoke(policy, ["new", *words])
    assert isinstance(found.exception, ShoalError)
    assert found.exception.code is Code.USAGE
    assert remedy in found.exception.refusal.remedy


def test_suggestions_are_expressions_that_the_language_takes() -> None:
    node = SimpleNamespace(
        labels={"site": "shop-7"}, devices=[SimpleNamespace(kind="npu"), SimpleNamespace(kind="cpu")]
    )
    found = suggestions_of(
        "home", [SimpleNamespace(name="ocr"), SimpleNamespace(name="")], [SimpleNamespace(node=node)]
    )
    assert (found.models, found.labels, found.of("region")) == (("ocr",), ("site",), ("home",))
    assert len(found.selectors) == 3
    for selector in found.selectors:
        assert load([("", fill_in(need_template("lowest-latency"), {"where": selector}))]).problems == ()


def test_the_wizard_asks_checks_shows_and_writes_on_consent_alone(tmp_path: Path) -> None:
    """With Tab, a wrong answer, a refusal of the result, and consent."""
    code = (
        "from shoal.cli.wizard import Suggestions, run_wizard\n"
        "known = Suggestions('home-2', ('ocr', 'silero'), ('device.kind == \"npu\"',), ('site',))\n"
        "for _ in range(2): run_wizard('', {'rate': '3/s'}, known)\n"
    )
    with terminal([sys.executable, "-c", code], os.environ, tmp_path) as shown:
        for consent in ("n", ""):  # a file that is not there is written without a word
            shown.expect("Which need is nearest")
            shown.type("99\r")
            shown.expect("1 to ")
            shown.expect(" > ")
            shown.type("lowest\t\r")
            shown.expect("95 %")
            shown.type("soon\r")
            shown.expect("soon")
            shown.expect("95 %")
            shown.type("40ms\r")
            shown.expect("On which devices")
            shown.type("dev\t\r")
            shown.expect("What do clients call it?")
            shown.type("reader\r")
            shown.expect("Which model?")
            shown.type("sil\t\r")
            shown.expect("Which region")
            shown.type("\r")
            shown.expect("valid, as shoal validate")
            shown.type("mine.yaml\r")
            shown.expect("Write mine.yaml? [Y/n]")
            assert not (tmp_path / "mine.yaml").exists()
            shown.type(f"{consent}\r")
            shown.expect("nothing is written" if consent == "n" else "written")
        shown.read_to_end()
    made = (tmp_path / "mine.yaml").read_text()
    assert load([("mine.yaml", made)]).problems == ()
    for line in (
        "p95: 40ms",
        'where: device.kind == "npu"',
        "name: reader",
        "source: silero",
        "from: home-2",
        "rate: 3/s",
    ):
        assert f"{line}\n" in made
