"""Watching moves from the command line."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from shoal.cli.commands.apply import report_apply, workloads_to_await
from shoal.cli.commands.delete import delete
from shoal.cli.commands.migrate import drain, follow, migrate, wait_standbys_replaced
from shoal.cli.render.listings import show
from shoal.cli.render.migrations import show_migration, stage_line
from shoal.cli.render.output import line
from shoal.client import RegionClient
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import nouns_pb2, operator_pb2


class Listed:
    """The API of a region that lists these migrations, to who asks for one by name; each answer once, but the last."""

    def __init__(self, *answers: tuple[operator_pb2.MigrationView, ...]) -> None:
        self._answers: dict[str, list[operator_pb2.MigrationView]] = {}
        for one in (one for answer in answers for one in answer):
            self._answers.setdefault(one.id, []).append(one)

    def poll(self, kind: str, name: str) -> operator_pb2.GetReply:
        assert kind == "migrations"
        if name not in self._answers:
            raise refuse(Code.NOT_FOUND, f"migrations '{name}'", "one that is listed", "")
        found = self._answers[name]
        return operator_pb2.GetReply(migrations=[found.pop(0) if len(found) > 1 else found[0]])


class Ready:
    """A region in which everything applied is ready."""

    def poll(self, kind: str) -> operator_pb2.GetReply:
        return operator_pb2.GetReply()


def view(name: str, stage: str) -> operator_pb2.MigrationView:
    return operator_pb2.MigrationView(id=name, stage=stage)


def test_it_returns_when_all_are_over() -> None:
    api = Listed((view("m-1", "staging"), view("m-2", "done")), (view("m-1", "aborted"), view("m-2", "done")))
    ended = follow(cast(RegionClient, api), [view("m-1", "planned"), view("m-2", "planned")], line)
    assert [one.stage for one in ended] == ["aborted", "done"]


def test_who_stops_watching_is_told_that_it_goes_on_and_how_to_take_it_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, Ctrl-C ended it without a word."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.commands.migrate.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        follow(cast(RegionClient, Listed()), [move_of("default"), view("m-2", "done")], line)
    said = capsys.readouterr().err
    assert said == "m-1 goes on; to take it back: shoal migrate reader --cancel m-1\n"


def move_of(tenant: str) -> operator_pb2.MigrationView:
    key = nouns_pb2.WorkloadKey(tenant=tenant, name="reader")
    return operator_pb2.MigrationView(id="m-1", workload=key, stage="planned")


class Interrupted:
    """A region whose user presses Ctrl-C while it is asked."""

    def poll(self, kind: str, name: str) -> operator_pb2.GetReply:
        raise KeyboardInterrupt

    def cancel_migration(self, name: str, workload: str, tenant: str) -> operator_pb2.MigrationView:
        return move_of(tenant)


@pytest.mark.parametrize(("tenant", "usual", "named"), [
    ("acme", "", " --tenant acme"), ("acme", "acme", ""), ("default", "acme", " --tenant default"),
])  # fmt: skip
def test_what_takes_it_back_names_its_tenant(
    tenant: str, usual: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the move was unknown under the tenant that is meant without a word; and nothing was said at all where
    Ctrl-C fell into a look."""
    monkeypatch.setenv("SHOAL_TENANT", usual)
    with pytest.raises(KeyboardInterrupt):
        follow(cast(RegionClient, Interrupted()), [move_of(tenant)], line)
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(f"goes on; to take it back: shoal migrate reader --cancel m-1{named}")


def test_who_takes_it_back_is_not_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.commands.migrate.connect", lambda *_: nullcontext(Interrupted()))
    answer = CliRunner().invoke(migrate, ["reader", "--cancel", "m-1", "--watch"])
    assert answer.exit_code == 1
    assert "take it back" not in answer.stderr


def test_one_that_is_listed_no_more_ends_the_watch() -> None:
    api = Listed((view("m-other", "done"),))
    with pytest.raises(ShoalError) as caught:
        follow(cast(RegionClient, api), [view("m-1", "planned")], line)
    assert caught.value.code is Code.MIGRATION_UNKNOWN


class Drained(Listed):
    """A region of which one node is drained."""

    def drain(self, node: str) -> operator_pb2.DrainReply:
        return operator_pb2.DrainReply(migrations=[view("m-1", "planned")])

    def migrate(self, *_: str, queue: bool) -> operator_pb2.MigrationView:
        return view("m-1", "queued" if queue else "planned")


class Relieved:
    """A region in which a standby goes at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def poll(self, kind: str) -> operator_pb2.GetReply:
        assert kind == "placements"
        self.looks += 1
        found = operator_pb2.GetReply()
        found.placements.add().assignment.id = "a-loading"
        if self.looks < 3:
            found.placements.add().assignment.id = "a-spare"
        return found


def test_a_drain_waits_for_what_stands_by() -> None:
    reply = operator_pb2.DrainReply()
    reply.refusals.add(assignment="a-spare").reason.code = Code.WAITING_FOR_REPLACEMENT
    reply.refusals.add(assignment="a-loading").reason.code = Code.MODEL_NOT_READY
    api = Relieved()
    left = wait_standbys_replaced(cast(RegionClient, api), reply.refusals)
    assert ([each.assignment for each in left], api.looks) == (["a-loading"], 3)
    assert wait_standbys_replaced(cast(RegionClient, api), left) == left
    assert api.looks == 3, "nothing to wait for"


@pytest.mark.parametrize("command", [[drain, "edge-1"], [migrate, "reader", "--to", "edge-2"]])
def test_for_programs_stdout_is_the_outcome_alone(command: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told = [operator_pb2.MigrationStage(stage="planned"), operator_pb2.MigrationStage(stage="done", note="all of it")]
    api = Drained((operator_pb2.MigrationView(id="m-1", stage="done", stages=told),))
    monkeypatch.setattr("shoal.cli.commands.migrate.connect", lambda *_: nullcontext(api))
    answer = CliRunner().invoke(command[0], [*command[1:], "--watch", "-o", "json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    (moved,) = found.get("migrations", [found])
    assert moved["stage"] == "done"
    assert "m-1  done  all of it" in answer.stderr


def test_one_replica_of_a_drained_node_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.commands.migrate.connect", lambda *_: nullcontext(Drained()))
    answer = CliRunner().invoke(drain, ["edge-1"])
    assert answer.stdout.splitlines()[0] == "edge-1 is cordoned, 1 of its replicas moves"


def test_ready_is_said_beside_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    reply = operator_pb2.ApplyReply(revision=3)
    report_apply(cast(RegionClient, Ready()), reply, "", [], wait=True, timeout_s=1, output="json")
    said = capsys.readouterr()
    assert (json.loads(said.out)["revision"], said.err) == (3, "ready\n")
    report_apply(cast(RegionClient, Ready()), reply, "", [], wait=True, timeout_s=1, output="table")
    said = capsys.readouterr()
    assert said.out.endswith("ready\n")


def waiting(name: str, state: str = "pending", **more: Any) -> operator_pb2.WorkloadView:
    key = nouns_pb2.WorkloadKey(tenant="default", name=name)
    reason = nouns_pb2.Refusal(code=more.pop("code", ""), found=more.pop("found", ""))
    return operator_pb2.WorkloadView(workload=key, state=state, wanted=1, reason=reason, **more)


class Looks:
    """A region whose workloads are these, look by look; the last ones stay."""

    def __init__(self, *looks: tuple[operator_pb2.WorkloadView, ...]) -> None:
        self._looks = list(looks)

    def poll(self, kind: str) -> operator_pb2.GetReply:
        if kind != "workloads":
            return operator_pb2.GetReply()
        return operator_pb2.GetReply(workloads=self._looks.pop(0) if len(self._looks) > 1 else self._looks[0])


def plan_of(*workloads: tuple[str, str], changed: str = "") -> operator_pb2.ApplyReply:
    """workloads: (name, policy)."""
    plans = [
        operator_pb2.WorkloadPlan(workload=nouns_pb2.WorkloadKey(tenant="default", name=name), policy=policy)
        for name, policy in workloads
    ]
    documents = [operator_pb2.DocumentChange(sign="~", kind="Policy", name=changed)] if changed else []
    return operator_pb2.ApplyReply(revision=1, plan=operator_pb2.PlanReply(workloads=plans, documents=documents))


def test_ctrl_c_ends_the_wait_and_says_that_nothing_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def poll(self, kind: str) -> operator_pb2.GetReply:
            raise KeyboardInterrupt

    reply = operator_pb2.ApplyReply(revision=3)
    with pytest.raises(KeyboardInterrupt):
        report_apply(
            cast(RegionClient, Interrupted()),
            reply,
            "",
            [("default", "reader")],
            wait=True,
            timeout_s=1,
            output="table",
        )
    assert "what was applied goes on: shoal get workloads" in capsys.readouterr().err


def test_an_apply_waits_for_its_own_workloads_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Another that has waited for a device for days holds nobody up."""
    stuck = waiting("other", code="NO_CANDIDATE")
    region = Looks((stuck, waiting("reader", "ready")))
    reply = plan_of(("other", ""), ("reader", ""))
    report_apply(
        cast(RegionClient, region), reply, "", [("default", "reader")], wait=True, timeout_s=0.2, output="table"
    )
    assert capsys.readouterr().out.endswith("ready\n")


def test_a_policy_alone_is_waited_for_by_those_that_it_changes() -> None:
    """Whether or not the apply was planned: a large one is not."""
    standing = [
        operator_pb2.WorkloadView(workload=nouns_pb2.WorkloadKey(tenant="default", name=name), policy=policy)
        for name, policy in (("other", "quick"), ("reader", "mild"))
    ]
    for planned in ((("other", "quick"), ("reader", "mild")), ()):
        reply = plan_of(*planned, changed="mild")
        assert workloads_to_await(reply, [], lambda: standing) == [("default", "reader")]
    assert workloads_to_await(plan_of(("reader", "mild")), [], lambda: standing) == []


def test_an_apply_says_what_it_waits_for_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    fetching = [
        waiting("reader", "progressing", code="WAITING_FOR_FETCH", found=f"{done} MiB of 9 MiB") for done in (1, 2, 3)
    ]
    loading = waiting("reader", "progressing", code="WAITING_FOR_LOAD", found="by CPUExecutionProvider")
    region = Looks(*((each,) for each in (*fetching, loading, waiting("reader", "ready"))))
    mine = [("default", "reader")]
    report_apply(cast(RegionClient, region), plan_of(("reader", "")), "", mine, wait=True, timeout_s=5, output="table")
    said = [each for each in capsys.readouterr().out.splitlines() if each.startswith("waiting: ")]
    assert said == [
        "waiting: default/reader is progressing, 0 of 1 ready: WAITING_FOR_FETCH 1 MiB of 9 MiB",
        "waiting: default/reader is progressing, 0 of 1 ready: WAITING_FOR_LOAD by CPUExecutionProvider",
    ]


def test_an_apply_ends_at_a_final_failure_with_its_code() -> None:
    final = waiting("reader", code="OP_UNSUPPORTED", found="no kernel for NonZero", final=True)
    mine, reply = [("default", "reader")], plan_of(("reader", ""))
    with pytest.raises(ShoalError) as caught:
        report_apply(cast(RegionClient, Looks((final,))), reply, "", mine, wait=True, timeout_s=60, output="json")
    assert caught.value.code is Code.OP_UNSUPPORTED
    assert "no kernel for NonZero" in caught.value.refusal.found
    passing = waiting("reader", code="MEMORY_SHORT")
    with pytest.raises(ShoalError) as late:
        report_apply(cast(RegionClient, Looks((passing,))), reply, "", mine, wait=True, timeout_s=0.2, output="json")
    assert late.value.code is Code.DEADLINE_EXCEEDED


class Stumbling(Looks):
    """A region in which a move of `reader` ended with this code."""

    def __init__(self, code: str, *looks: tuple[operator_pb2.WorkloadView, ...]) -> None:
        super().__init__(*looks)
        self._ended = operator_pb2.MigrationView(
            id="m-1", workload=nouns_pb2.WorkloadKey(tenant="default", name="reader"), stage="aborted",
            stages=[operator_pb2.MigrationStage(stage="planned", at=10.0)],
            reason=nouns_pb2.Refusal(code=code, found="shop-7/npu0 did not take it up"),
        )  # fmt: skip

    def poll(self, kind: str) -> operator_pb2.GetReply:
        return super().poll(kind) if kind == "workloads" else operator_pb2.GetReply(migrations=[self._ended])


def test_an_apply_waits_for_a_node_that_is_not_ready_for_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    blocked = waiting("reader", code="MOVE_BLOCKED", found="m-1 ended there: NODE_NOT_READY")
    mine, reply = [("default", "reader")], plan_of(("reader", ""))
    looks = ((blocked,), (blocked,), (waiting("reader", "progressing"),), (waiting("reader", "ready"),))
    region = cast(RegionClient, Stumbling("NODE_NOT_READY", *looks))
    report_apply(region, reply, "", mine, wait=True, timeout_s=30, output="table")
    said = [each for each in capsys.readouterr().out.splitlines() if "did not take it up" in each]
    assert said == [
        "waiting: default/reader is pending, 0 of 1 ready: MOVE_BLOCKED m-1 ended there: NODE_NOT_READY; shop-7/npu0 "
        "did not take it up (NODE_NOT_READY): it serves on as it was, and m-1 is tried again"
    ]
    region = cast(RegionClient, Stumbling("NODE_NOT_READY", (blocked,)))
    with pytest.raises(ShoalError) as late:
        report_apply(region, reply, "", mine, wait=True, timeout_s=0.2, output="table")
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert "did not take it up" in late.value.refusal.found


def test_an_apply_ends_where_the_new_version_failed() -> None:
    region = cast(RegionClient, Stumbling("VERIFY_FAILED", (waiting("reader", code="VERIFY_FAILED"),)))
    with pytest.raises(ShoalError) as failed:
        report_apply(
            region, plan_of(("reader", "")), "", [("default", "reader")], wait=True, timeout_s=60, output="table"
        )
    assert failed.value.code is Code.VERIFY_FAILED


def test_a_watch_says_why_a_move_waits(capsys: pytest.CaptureFixture[str]) -> None:
    def at(stage: str, code: str = "", found: str = "") -> operator_pb2.MigrationView:
        stages = [operator_pb2.MigrationStage(stage=stage)]
        why = nouns_pb2.Refusal(code=code, found=found)
        return operator_pb2.MigrationView(id="m-1", stage=stage, stages=stages, reason=why)

    waits = [(at("planned", "WAITING_FOR_TURN", f"{count} before it"),) for count in (2, 1)]
    api = Listed(*waits, (at("planned", "NO_ROOM_FOR_BOTH", "3 MiB free"),), (at("done"),))
    follow(cast(RegionClient, api), [at("planned", "WAITING_FOR_TURN", "3 before it")], line)
    assert capsys.readouterr().out.splitlines() == [
        "m-1  planned",
        "m-1  waits: WAITING_FOR_TURN 3 before it",
        "m-1  waits: NO_ROOM_FOR_BOTH 3 MiB free",
    ]


class Deletes:
    """A region that refuses to delete `held`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    def delete(self, kind: str, name: str, tenant: str = "") -> None:
        self.asked.append((kind, name, tenant))
        if name == "held":
            raise refuse(Code.IN_USE, "policy held is used by default/other")


def test_several_names_are_deleted_and_one_refusal_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Deletes()
    monkeypatch.setattr("shoal.cli.commands.delete.connect", lambda *_: nullcontext(api))
    answer = CliRunner().invoke(delete, ["policy", "held", "mild", "mild"])
    assert answer.exit_code == 255
    assert answer.stdout == "deleted policy mild\n"
    assert answer.stderr == "found: policy held is used by default/other (IN_USE)\n"
    assert api.asked == [("policy", "held", ""), ("policy", "mild", "")]


def test_a_file_s_documents_are_deleted_who_uses_another_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = "apiVersion: shoal/v1\n"
    (tmp_path / "all.yaml").write_text(
        f"{head}kind: Tenant\nmetadata: {{name: shop}}\n---\n"
        f"{head}kind: Policy\nmetadata: {{name: mild}}\n---\n"
        f"{head}kind: Workload\nmetadata: {{name: reader, tenant: shop}}\n"
        "spec: {model: {source: ocr}, policy: mild}\n"
    )
    api = Deletes()
    monkeypatch.setattr("shoal.cli.commands.delete.connect", lambda *_: nullcontext(api))
    answer = CliRunner().invoke(delete, ["-f", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert api.asked == [("workload", "reader", "shop"), ("policy", "mild", ""), ("tenant", "shop", "")]


def test_what_differs_is_said_beside_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    reply = operator_pb2.ApplyReply(stale=["reader goes elsewhere"])
    with pytest.raises(ShoalError) as caught:
        report_apply(cast(RegionClient, Ready()), reply, "abc", [], wait=False, timeout_s=1, output="json")
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


@pytest.mark.parametrize(
    ("passed", "outcome", "word"),
    [(False, "not judged", "not judged"), (True, "passed", "yes"), (False, "failed", "no"), (True, "", "yes")],
)
def test_a_step_without_a_request_is_shown_as_not_judged(
    capsys: pytest.CaptureFixture[str], outcome: str, word: str, *, passed: bool
) -> None:
    """The last: of a coordinator that does not say."""
    move = view("m-1", "done")
    move.stages.add(stage="planned", at=1.8e9)
    move.readings.add(share=0.25, held_s=2.0, passed=passed, outcome=outcome)
    show_migration(move)
    (row,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("25%")]
    assert row.rstrip().endswith(f" {word}")
    assert row.split()[2:6] == ["0", "0", "-", "-"], "no request has no p95"


def test_a_move_is_taken_back_by_its_name_alone() -> None:
    asked = CliRunner().invoke(migrate, ["reader", "--cancel", "m-1", "--replica", "a-1"])
    assert asked.exit_code == 2
    assert "--replica beside --cancel" in asked.stderr


def move_through(name: str, *stages: str, code: str = "") -> operator_pb2.MigrationView:
    """A move that went through these stages, and what it waits for."""
    told = [operator_pb2.MigrationStage(stage=stage) for stage in stages]
    reason = nouns_pb2.Refusal(code=code)
    return operator_pb2.MigrationView(id=name, stage=stages[-1], stages=told, reason=reason)


def test_a_watch_goes_through_the_queue_into_the_move() -> None:
    """Each stage is said once, the first of the move that begins too."""
    said = list[str]()
    api = Listed(
        (move_through("m-1", "queued", code="MEMORY_SHORT"),),
        (move_through("m-1", "queued", code="CONFLICT"),),
        (move_through("m-1", "planned", "reserved"),),
        (move_through("m-1", "planned", "reserved", "done"),),
    )
    (ended,) = follow(cast(RegionClient, api), [move_through("m-1", "queued", code="MEMORY_SHORT")], said.append)
    assert ended.stage == "done"
    assert [each.removeprefix("m-1  ").split()[0] for each in said] == [
        "queued", "waits:", "waits:", "planned", "reserved", "done",
    ]  # fmt: skip


def test_a_watch_ends_with_what_ended_the_wait() -> None:
    said = list[str]()
    api = Listed((move_through("m-1", "queued", "aborted", code="MOVE_TIMEOUT"),))
    (ended,) = follow(cast(RegionClient, api), [move_through("m-1", "queued", code="MEMORY_SHORT")], said.append)
    assert (ended.stage, ended.reason.code) == ("aborted", "MOVE_TIMEOUT")
    assert said[-1] == "m-1  aborted"


def test_what_is_queued_says_for_what_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Drained):
        def migrate(self, *_: str, queue: bool) -> operator_pb2.MigrationView:
            assert queue
            return move_through("m-1", "queued", code="MEMORY_SHORT")

    monkeypatch.setattr("shoal.cli.commands.migrate.connect", lambda *_: nullcontext(Full()))
    answer = CliRunner().invoke(migrate, ["reader", "--to", "edge-2", "--queue"])
    assert answer.exit_code == 0, answer.output
    assert "queued" in answer.stdout
    assert "MEMORY_SHORT" in answer.stdout
    asked = CliRunner().invoke(migrate, ["reader", "--cancel", "m-1", "--queue"])
    assert asked.exit_code == 2
    assert "--queue beside --cancel" in asked.stderr


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
