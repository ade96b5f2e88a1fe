"""Tokens for many devices: the whole command for each."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
import pytest
from click.testing import CliRunner

from harness.documentation import refusal_of
from shoal.cli.commands import token as module
from shoal.cli.main import shoal
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import operator_pb2


class MintingRegion:
    """A region that makes tokens, up to a limit."""

    def __init__(self) -> None:
        self.asked = list[tuple[str, str, Mapping[str, str]]]()
        self.limit = 1000
        self.address = "region.example:7443"

    def who_am_i(self) -> operator_pb2.WhoAmIReply:
        return operator_pb2.WhoAmIReply(enrol_address=self.address)

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
    assert "there: SHOAL_TOKEN=.. shoal-agent run --enrol region.example:7443 --listen 0.0.0.0:8001" in said
    assert "shoal context login" in run("--role", "operator", "--name", "ann")[1]
    assert "there:" not in run("--role", "bearer", "--name", "shop")[1], "it is no token to join with"


def test_a_group_gets_a_command_for_each_of_its_nodes(region: MintingRegion) -> None:
    out, said = run("--count", "12", "--group", "shops", "--labels", "site=north,rack=2", "--label", "price=0.1 USD/h")
    lines = out.splitlines()
    assert len(lines) == 12
    assert shlex.split(lines[0]) == [
        "SHOAL_TOKEN=shoal-join.home.f.1", "shoal-agent", "run", "--enrol", "region.example:7443",
        "--listen", "0.0.0.0:8001", "--metrics", "0.0.0.0:9464", "--front-metrics", "0.0.0.0:9465",
    ]  # fmt: skip
    for line in lines:
        assert refusal_of(shlex.split(line)[1:]) == "", "the agent takes it"
    assert [name for _, name, _ in region.asked] == [f"shops-{number:02d}" for number in range(1, 13)]
    assert region.asked[0][2] == {"group": "shops", "site": "north", "rack": "2", "price": "0.1 USD/h"}
    assert "12 tokens" in said
    assert "--role gateway" in run("--count", "2", "--role", "gateway")[0]
    data = json.loads(run("--count", "2", "-o", "json")[0])
    assert [each["name"] for each in data] == ["", ""]
    assert data[0]["command"].startswith("SHOAL_TOKEN=")


def test_agents_of_one_machine_listen_there_alone_and_need_folders_of_their_own(region: MintingRegion) -> None:
    region.address = "127.0.0.1:7443,localhost:7444"
    out, said = run("--count", "2", "--group", "shops")
    free = "--listen 127.0.0.1:0 --metrics 127.0.0.1:0 --front-metrics 127.0.0.1:0"
    assert [line.partition("shoal-agent ")[2] for line in out.splitlines()] == [
        f"run --enrol {region.address} --state-dir ./shops-{number} {free}" for number in (1, 2)
    ]
    assert "on this machine alone" in said
    assert "--state-dir ./t3 --listen" in run("--count", "1")[0], "a name of its own"
    assert "there: SHOAL_TOKEN=.. shoal-agent run --enrol 127.0.0.1:7443,localhost:7444\n" in run()[1]
    region.address = "127.0.0.1:7443,region.example:7443"
    out, said = run("--count", "2", "--group", "shops")
    assert "--listen 0.0.0.0:8001" in out
    assert "--state-dir" not in out
    assert "on this machine alone" not in said


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
