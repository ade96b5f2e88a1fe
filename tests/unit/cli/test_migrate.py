"""Watching moves from the command line."""

import json
from contextlib import nullcontext
from typing import Any, cast

import pytest
from click.testing import CliRunner

from shoal.cli.commands.apply import finish
from shoal.cli.commands.migrate import drain, follow, migrate, relieved
from shoal.cli.render.migrations import show_migration, stage_line
from shoal.cli.render.output import line
from shoal.cli.render.resources import show
from shoal.client import Region
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import nouns_pb2, operator_pb2


class Listed:
    """The API of a region that lists these migrations, to who asks for one by name; each answer once, but the last."""

    def __init__(self, *answers: tuple[operator_pb2.MigrationView, ...]) -> None:
        self._answers: dict[str, list[operator_pb2.MigrationView]] = {}
        for one in (one for answer in answers for one in answer):
            self._answers.setdefault(one.id, []).append(one)

    def look(self, kind: str, name: str) -> operator_pb2.GetReply:
        assert kind == "migrations"
        if name not in self._answers:
            raise refuse(Code.NOT_FOUND, f"migrations '{name}'", "one that is listed", "")
        found = self._answers[name]
        return operator_pb2.GetReply(migrations=[found.pop(0) if len(found) > 1 else found[0]])


class Ready:
    """A region in which everything applied is ready."""

    def look(self, kind: str) -> operator_pb2.GetReply:
        return operator_pb2.GetReply()


def view(name: str, stage: str) -> operator_pb2.MigrationView:
    return operator_pb2.MigrationView(id=name, stage=stage)


def test_it_returns_when_all_are_over() -> None:
    api = Listed((view("m-1", "staging"), view("m-2", "done")), (view("m-1", "aborted"), view("m-2", "done")))
    ended = follow(cast(Region, api), [view("m-1", "planned"), view("m-2", "planned")], line)
    assert [one.stage for one in ended] == ["aborted", "done"]


def test_one_that_is_listed_no_more_ends_the_watch() -> None:
    api = Listed((view("m-other", "done"),))
    with pytest.raises(ShoalError) as caught:
        follow(cast(Region, api), [view("m-1", "planned")], line)
    assert caught.value.code is Code.MIGRATION_UNKNOWN


class Drained(Listed):
    """A region of which one node is drained."""

    def drain(self, node: str) -> operator_pb2.DrainReply:
        return operator_pb2.DrainReply(migrations=[view("m-1", "planned")])

    def migrate(self, *_: str) -> operator_pb2.MigrationView:
        return view("m-1", "planned")


class Relieved:
    """A region in which a standby goes at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self, kind: str) -> operator_pb2.GetReply:
        assert kind == "placements"
        self.looks += 1
        found = operator_pb2.GetReply()
        found.placements.add().assignment.id = "a-loading"
        if self.looks < 3:
            found.placements.add().assignment.id = "a-spare"
        return found


def test_a_drain_waits_for_what_stands_by() -> None:
    unmoved = operator_pb2.DrainReply()
    unmoved.unmoved.add(assignment="a-spare").reason.code = Code.WAITING_FOR_REPLACEMENT
    unmoved.unmoved.add(assignment="a-loading").reason.code = Code.MODEL_NOT_READY
    api = Relieved()
    left = relieved(cast(Region, api), unmoved.unmoved)
    assert ([each.assignment for each in left], api.looks) == (["a-loading"], 3)
    assert relieved(cast(Region, api), left) == left
    assert api.looks == 3, "nothing to wait for"


@pytest.mark.parametrize("command", [[drain, "edge-1"], [migrate, "reader", "--to", "edge-2"]])
def test_for_programs_stdout_is_the_outcome_alone(command: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told = [operator_pb2.MigrationStage(stage="planned"), operator_pb2.MigrationStage(stage="done", note="all of it")]
    api = Drained((operator_pb2.MigrationView(id="m-1", stage="done", stages=told),))
    monkeypatch.setattr("shoal.cli.commands.migrate.connected", lambda *_: nullcontext(api))
    answer = CliRunner().invoke(command[0], [*command[1:], "--watch", "-o", "json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    (moved,) = found.get("migrations", [found])
    assert moved["stage"] == "done"
    assert "m-1  done  all of it" in answer.stderr


def test_ready_is_said_beside_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    reply = operator_pb2.ApplyReply(revision=3)
    finish(cast(Region, Ready()), reply, "", wait=True, timeout_s=1, output="json")
    said = capsys.readouterr()
    assert (json.loads(said.out)["revision"], said.err) == (3, "ready\n")
    finish(cast(Region, Ready()), reply, "", wait=True, timeout_s=1, output="table")
    said = capsys.readouterr()
    assert said.out.endswith("ready\n")


def test_what_differs_is_said_beside_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    reply = operator_pb2.ApplyReply(stale=["reader goes elsewhere"])
    with pytest.raises(ShoalError) as caught:
        finish(cast(Region, Ready()), reply, "abc", wait=False, timeout_s=1, output="json")
    assert caught.value.code is Code.PLAN_STALE
    said = capsys.readouterr()
    assert json.loads(said.out)["stale"] == ["reader goes elsewhere"]
    assert "reader goes elsewhere" in said.err


def test_a_move_home_shows_from_which_region(capsys: pytest.CaptureFixture[str]) -> None:
    home = operator_pb2.MigrationView(
        id="m-1",
        source=operator_pb2.MigrationPlace(assignment="a-1", region="us-east"),
        target=operator_pb2.MigrationPlace(assignment="reader-1", node="edge-1", device="cpu0"),
        stage="staging",
        stages=[operator_pb2.MigrationStage(stage="planned", at=1.0)],
    )
    assert "us-east -> edge-1/cpu0" in stage_line(home)
    show("migrations", [home], wide=False)
    shown = capsys.readouterr().out
    assert "us-east" in shown
    assert "edge-1/cpu0" in shown


def test_what_is_expected_between_regions_is_shown_beside_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    left = operator_pb2.MigrationView(
        id="m-1",
        source=operator_pb2.MigrationPlace(assignment="reader-1", node="edge-1", device="cpu0"),
        target=operator_pb2.MigrationPlace(assignment="g-1", region="us-east"),
        stage="done",
        stages=[operator_pb2.MigrationStage(stage="planned", at=1.0)],
        expected=operator_pb2.MoveExpected(gain=0.5, fetch_bytes=2048, seconds=12.0),
        came=operator_pb2.MoveCame(gain=0.4, requests=100, seconds=9.0, over_s=30.0, fetch_bytes=1024),
    )
    show_migration(left)
    told = capsys.readouterr().out
    assert "p95, with the way" in told
    assert "1KiB fetched" in told
    left.came.ClearField("fetch_bytes")
    show_migration(left)
    assert "fetched" not in capsys.readouterr().out, "it was not counted"
    show("migrations", [left], wide=True)
    assert "2KiB" in capsys.readouterr().out


def test_a_move_is_taken_back_by_its_name_alone() -> None:
    asked = CliRunner().invoke(migrate, ["reader", "--cancel", "m-1", "--replica", "a-1"])
    assert isinstance(asked.exception, ShoalError)
    assert asked.exception.code is Code.FIELD_INVALID


def test_it_says_by_which_reference_a_replica_was_judged(capsys: pytest.CaptureFixture[str]) -> None:
    move = view("m-1", "done")
    move.stages.add(stage="planned", at=1.8e9)
    passed = nouns_pb2.Verdict(migration="m-1", passed=True, inputs="generated", samples=8, pack="sha256:a")
    passed.against = "reference"
    move.verdict.CopyFrom(passed)
    show_migration(move)
    assert "reference sha256:a, removed since" in capsys.readouterr().out
    move.reference.digest = "sha256:a"
    show_migration(move)
    assert "reference sha256:a, pushed" in capsys.readouterr().out
    by = move.reference.recorded
    by.node, by.device, by.provider, by.precision, by.at = "edge-1", "cpu0", "CPUExecutionProvider", "fp32", 1.8e9
    show_migration(move)
    found = capsys.readouterr().out
    assert "verified against reference with 8 generated inputs: passed" in found
    assert "recorded by edge-1/cpu0 (CPUExecutionProvider fp32) at 2027-01-15" in found
    move.verdict.recorded = True
    show_migration(move)
    assert "recorded as the reference with 8 generated inputs: passed" in capsys.readouterr().out
