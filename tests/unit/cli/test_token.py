"""Tokens for many devices: the whole command for each."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shoal.cli.commands import token as module
from shoal.cli.main import shoal
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import operator_pb2


class MintingRegion:
    """A region that makes tokens, up to a limit."""

    def __init__(self) -> None:
        self.asked = list[tuple[str, str, Mapping[str, str]]]()
        self.limit = 1000

    def who_am_i(self) -> operator_pb2.WhoAmIReply:
        return operator_pb2.WhoAmIReply(enrol_address="region.example:7443")

    def create_token(
        self, role: str, name: str, valid_s: float, labels: Mapping[str, str], allow_labels: Any
    ) -> operator_pb2.CreateTokenReply:
        if len(self.asked) >= self.limit:
            raise refuse(Code.OVERLOADED, "too many at once")
        self.asked.append((role, name, labels))
        return operator_pb2.CreateTokenReply(token=f"shoal-join.home.f.{len(self.asked)}", id=f"t{len(self.asked)}")


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> MintingRegion:
    found = MintingRegion()

    @contextmanager
    def connect(*_: object) -> Iterator[MintingRegion]:
        yield found

    monkeypatch.setattr(module, "connect", connect)
    return found


def run(*words: str) -> tuple[str, str]:
    done = CliRunner().invoke(shoal, ["token", "create", *words], catch_exceptions=False)
    return done.stdout, done.stderr


def test_one_token_stands_alone_and_how_to_use_it_beside_it(region: MintingRegion) -> None:
    out, said = run()
    assert out == "shoal-join.home.f.1\n"
    assert "there: SHOAL_TOKEN=.. shoal-agent join --coordinator region.example:7443" in said
    assert "shoal context login" in run("--role", "operator", "--name", "ann")[1]
    assert "there:" not in run("--role", "bearer", "--name", "shop")[1], "it is no token to join with"


def test_a_group_gets_a_command_for_each_of_its_nodes(region: MintingRegion) -> None:
    out, said = run("--count", "12", "--group", "shops", "--labels", "site=north,rack=2", "--label", "price=0.1 USD/h")
    lines = out.splitlines()
    assert len(lines) == 12
    assert shlex.split(lines[0]) == [
        "SHOAL_TOKEN=shoal-join.home.f.1", "shoal-agent", "join", "--coordinator", "region.example:7443",
    ]  # fmt: skip
    assert [name for _, name, _ in region.asked] == [f"shops-{number:02d}" for number in range(1, 13)]
    assert region.asked[0][2] == {"group": "shops", "site": "north", "rack": "2", "price": "0.1 USD/h"}
    assert "12 tokens" in said
    data = json.loads(run("--count", "2", "-o", "json")[0])
    assert [each["name"] for each in data] == ["", ""]
    assert data[0]["command"].startswith("SHOAL_TOKEN=")


def test_tokens_that_were_made_are_shown_when_a_later_one_is_refused(region: MintingRegion) -> None:
    region.limit = 3
    done = CliRunner().invoke(shoal, ["token", "create", "--count", "5"])
    assert isinstance(done.exception, ShoalError)
    assert len(done.stdout.splitlines()) == 3


def test_what_does_not_go_together_is_refused(region: MintingRegion) -> None:
    for words in (("--count", "2", "--name", "edge"), ("--group", "x", "--role", "operator"), ("--labels", "site")):
        with pytest.raises((ShoalError, click.UsageError)):
            CliRunner().invoke(shoal, ["token", "create", *words], standalone_mode=False, catch_exceptions=False)
    assert region.asked == []
