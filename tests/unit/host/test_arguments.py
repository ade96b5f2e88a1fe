"""Mistakes in command lines that argparse reads, and how a refusal is printed."""

import argparse
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.host.arguments import ArgumentParser
from shoal.host.refusal_text import parts_of, print_refusal
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError


def address(text: str) -> HostPort:
    try:
        return HostPort.parse(text)
    except ShoalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def scale(text: str) -> float:
    if float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return float(text)


def parser() -> ArgumentParser:
    top = ArgumentParser(prog="tool")
    verbs = top.add_subparsers(dest="verb", required=True)
    join = verbs.add_parser("join")
    join.add_argument("--token", required=True, help="from another, 100%% new.")
    run = verbs.add_parser("run")
    run.add_argument("--listen", type=address)
    run.add_argument("--links")
    run.add_argument("--scale", type=scale, help="how much slower")
    run.add_argument("--level", choices=("low", "high"))
    return top


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "found: no verb; wanted: one of join, run; try: tool --help (USAGE)"),
        ("rn", "found: no verb is called 'rn'; wanted: one of join, run; try: tool run, or tool --help (USAGE)"),
        ("join", "found: no --token; wanted: --token: from another, 100% new; try: tool join --help (USAGE)"),
        ("join --token", "found: --token: expected one argument; wanted: --token: from another, 100% new; "
                         "try: tool join --help (USAGE)"),
        ("run more words", "found: more words after all that it takes; try: tool run --help (USAGE)"),
        ("run --scal=2x --sclae=2", "found: '2x' for --scale; wanted: --scale: how much slower; "
                                    "try: tool run --help (USAGE)"),
        ("run --sclae=2", "found: no option is called '--sclae'; wanted: one of those in the help; "
                          "try: tool run --scale, or tool run --help (USAGE)"),
        ("--nope run", "found: no option is called '--nope'; wanted: one of those in the help; "
                       "try: tool --help (USAGE)"),
        ("run --scale 0", "found: '0' for --scale; wanted: a positive number; try: tool run --help (USAGE)"),
        ("run --li x", "found: --li, which begins several options; wanted: one of --listen, --links; "
                       "try: tool run --help (USAGE)"),
        ("run --listen here", "found: --listen: address 'here'; wanted: HOST:PORT, an IPv6 address in brackets; "
                              "try: for example 127.0.0.1:7443 or [::1]:7443, or tool run --help (USAGE)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_coded_line_in_a_pipe(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, argparse's own words followed the usage, of 28 lines for `shoal-coordinator run`."""
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", said + "\n")


def test_what_is_right_is_read() -> None:
    found = parser().parse_args(["run", "--scale", "2", "--listen", "[::1]:5"])
    assert (found.verb, found.scale, str(found.listen)) == ("run", 2.0, "[::1]:5")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_each_part_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "--listen", "here"])
    assert shown.getvalue().splitlines() == [
        "found:  --listen: address 'here'",
        "wanted: HOST:PORT, an IPv6 address in brackets",
        "try:    for example 127.0.0.1:7443 or [::1]:7443, or tool",
        "        run --help (USAGE)",
    ]


def test_a_refusal_controls_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may tell what another machine answered."""
    print_refusal(hostile := Refusal(Code.CONFLICT, "\x1b[31mred", "", "\x07bell"))
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    print_refusal(hostile)
    for said in (capsys.readouterr().err, shown.getvalue()):
        assert "red" in said
        assert not {"\x1b", "\x07"} & set(said)


words = st.text("ab \x1b", max_size=60)


@given(words, words, words, st.integers(1, 120))
def test_any_refusal_has_its_code_once_at_the_end(found: str, wanted: str, remedy: str, width: int) -> None:
    lines = parts_of(Refusal(Code.CONFLICT, found, wanted, remedy), width)
    text = "\n".join(label + said for label, said in lines)
    assert text.endswith("(CONFLICT)")
    assert text.count("CONFLICT") == 1
    assert [label for label, _ in lines if label.strip()] == [
        label for label, said in (("found:  ", found), ("wanted: ", wanted), ("try:    ", remedy)) if said
    ]


def test_examples_stand_at_the_end_of_the_help_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    top = ArgumentParser(prog="tool", description="x " * 100, examples=(("tool run", "go"), ("tool  stop", "")))
    assert top.format_help().endswith("\n\nExamples:\n  tool run    go\n  tool  stop\n")
    assert max(map(len, top.format_help().splitlines())) <= 80
