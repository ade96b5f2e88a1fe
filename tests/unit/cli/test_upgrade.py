"""`shoal upgrade` on a region that takes its time to answer."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli.commands import upgrade
from shoal.cli.rollout import FinishedStage, RolloutOptions
from shoal.client import RegionClient
from shoal.types.codes import Code
from shoal.v1 import nouns_pb2, operator_pb2

OLD, NEW = "0.1.0", "0.2.0"
ANSWER_S = 0.1


class Slow:
    """A region of two nodes without replicas. One check of doctor fails, and has for long; every answer takes time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.versions = {"n1": OLD, "n2": OLD}
        self.examined = 0

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def record_install(self, said: str) -> None:
        name, _, what = said.partition(": ")
        if what.startswith("install "):
            self.versions[name] = NEW

    def get(self, kind: str) -> operator_pb2.GetReply:
        self.pass_(ANSWER_S)
        nodes = [
            operator_pb2.NodeView(
                node=nouns_pb2.Node(name=name, role="agent", agent_version=version), liveness="ready", front_ready=True
            )
            for name, version in self.versions.items()
        ]
        return operator_pb2.GetReply(nodes=nodes if kind == "nodes" else [])

    def doctor(self) -> operator_pb2.DoctorReply:
        self.pass_(ANSWER_S)
        self.examined += 1
        why = nouns_pb2.Refusal(code=Code.STATE_CORRUPT, found="entry 7")
        return operator_pb2.DoctorReply(checks=[operator_pb2.Check(name="audit", ok=False, refusal=why)])

    def drain(self, _: str) -> operator_pb2.DrainReply:
        return operator_pb2.DrainReply()

    def cordon(self, _: str, *, cordoned: bool) -> None:
        assert not cordoned


@pytest.mark.parametrize("hold_s", [0.5 + number / 20 for number in range(20)])
def test_what_doctor_said_before_is_asked_before_whenever_the_watch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold_s: float
) -> None:
    slow = Slow()
    monkeypatch.setattr(upgrade, "time", SimpleNamespace(sleep=slow.pass_, monotonic=lambda: slow.now))
    region = cast(RegionClient, slow)
    asked = RolloutOptions(NEW, hold_s=hold_s)
    shell = upgrade._UpgradeDriver(region, "agent", asked, "", tmp_path / "kept.json", slow.record_install)
    assert shell.run() == FinishedStage()
    assert slow.examined == 3, "before, and after each wave"
    assert set(slow.versions.values()) == {NEW}


def test_a_command_that_fails_says_so_in_whatever_letters() -> None:
    said: Any = "import sys; sys.stderr.buffer.write(b'pas trouv\\xe9'); sys.exit(3)"
    assert upgrade._run_install([sys.executable, "-c", said], 20.0) == "status 3: pas trouv\N{REPLACEMENT CHARACTER}"
