"""`shoal apply --wave`: files a wave at a time."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from harness.cluster.stack import documents, policy, workload
from shoal.cli.commands import apply as module
from shoal.cli.documents import Bundle, FileDocumentKey, read, waves
from shoal.cli.main import shoal
from shoal.cli.render.output import note_outage
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import artifacts_pb2, nouns_pb2, operator_pb2

SHOPS = 12


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    """A file for each shop, and one that they share."""
    for number in range(1, SHOPS + 1):
        name = f"shop-{number:02d}"
        text = documents(policy(name, "  optimize: {latency: 1.0}\n"), workload(name, "labels", name))
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "shared.yaml").write_text(policy("shared", "  optimize: {energy: 1.0}\n"))
    return tmp_path


def stem(document: operator_pb2.Document) -> str:
    return Path(document.name).stem


@pytest.mark.parametrize(("share", "sizes"), [(0.25, [1, 3, 3, 3, 2]), (0.0, [1] * SHOPS), (1.0, [1, 11])])
def test_the_first_wave_is_one_file_and_what_has_no_workload(shops: Path, share: float, sizes: list[int]) -> None:
    found = waves(read([str(shops)]), share)
    assert [len(part.workloads) for part in found] == sizes
    assert [stem(each) for each in found[0].documents] == ["shared", "shop-01"]
    assert [name for part in found for _, name in part.workloads] == [f"shop-{n:02d}" for n in range(1, SHOPS + 1)]
    assert {key.kind for part in found for key in part.keys} == {"Policy", "Workload"}


def test_files_without_a_workload_are_one_wave(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text(policy("shared", "  optimize: {energy: 1.0}\n"))
    (only,) = waves(read([str(tmp_path)]), 0.1)
    assert [stem(each) for each in only.documents] == ["shared"]


def files_of(parts: Sequence[Bundle]) -> list[list[str]]:
    return [[stem(each) for each in part.documents] for part in parts]


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def tenant(name: str) -> str:
    return f"apiVersion: shoal/v1\nkind: Tenant\nmetadata: {{name: {name}}}\n"


def test_a_file_of_policies_goes_with_the_first_that_uses_it(tmp_path: Path) -> None:
    """Not before: all workloads of a changed policy change at once."""
    energy = "  optimize: {energy: 1.0}\n"
    write_all(tmp_path, {f"a-policy-{n}": policy(f"shop-{n}", energy) for n in range(1, 4)})
    write_all(tmp_path, {f"shop-{n}": workload(f"shop-{n}", "labels", f"shop-{n}") for n in range(1, 3)})
    write_all(tmp_path, {"shop-3": workload("shop-3", "labels", "shop-3", "north"), "z-tenant": tenant("north")})
    write_all(tmp_path, {"unused": policy("unused", energy)})
    assert files_of(waves(read([str(tmp_path)]), 0.1)) == [
        ["a-policy-1", "shop-1", "unused"],
        ["a-policy-2", "shop-2"],
        ["a-policy-3", "shop-3", "z-tenant"],
    ]


def test_a_file_that_another_needs_goes_before_it(tmp_path: Path) -> None:
    """A chain in the order of names: each uses the policy of the next, and `own` is by itself."""
    energy = "  optimize: {energy: 1.0}\n"
    for name, uses in (("a", "b"), ("b", "c"), ("c", "c"), ("own", "own")):
        text = documents(policy(name, energy), workload(name, "labels", uses))
        write_all(tmp_path, {name: text})
    assert files_of(waves(read([str(tmp_path)]), 0.1)) == [["c"], ["b"], ["a"], ["own"]]


def test_files_that_need_each_other_go_together(tmp_path: Path) -> None:
    energy = "  optimize: {energy: 1.0}\n"
    for name, uses in (("a", "b"), ("b", "a"), ("c", "a")):
        write_all(tmp_path, {name: documents(policy(name, energy), workload(name, "labels", uses))})
    found = waves(read([str(tmp_path)]), 0.1)
    assert files_of(found) == [["a", "b"], ["c"]]
    assert [part.workloads for part in found] == [(("default", "a"), ("default", "b")), (("default", "c"),)]


@pytest.mark.parametrize("seed", range(20))
def test_no_wave_needs_what_a_later_one_sends(tmp_path: Path, seed: int) -> None:
    """Whichever files have the policies. Each file is sent once."""
    chance = np.random.default_rng(seed)
    names = [f"f{number:02d}" for number in range(12)]
    texts = dict[str, list[str]]()
    for name in names:
        texts.setdefault(str(chance.choice(names)), []).append(policy(name, "  optimize: {energy: 1.0}\n"))
        if chance.random() < 0.8:
            texts.setdefault(str(chance.choice(names)), []).append(workload(name, "labels", str(chance.choice(names))))
    write_all(tmp_path, {name: documents(*parts) for name, parts in texts.items()})
    found = waves(read([str(tmp_path)]), float(chance.choice([0.0, 0.3, 1.0])))
    known = set[FileDocumentKey]()
    for part in found:
        known |= set(part.keys)
        assert {key for keys in part.references for key in keys if key.kind == "Policy"} <= known
    assert sorted(name for part in files_of(found) for name in part) == sorted(texts)


class WavingRegion:
    """A region in which everything applied is ready, but for one workload that never is."""

    on_outage = staticmethod(note_outage)

    def __init__(self, broken: str = "", problem: str = "") -> None:
        """problem: of what is found in a plan."""
        self.clock = CoordinatorClock()
        self.aborted = list[operator_pb2.MigrationView]()
        """Of the broken one, from when it was applied first."""
        self.applied = list[list[str]]()
        self.planned = list[list[str]]()
        self.with_plan = list[bool]()
        """Of each apply."""
        self.broken = broken
        self.state = "progressing"
        """Of the broken one."""
        self.late: ShoalError | None = None
        """What the next apply ends with, though it is carried out."""
        self._problem = problem

    def models(self) -> list[artifacts_pb2.Model]:
        return []

    def plan(self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str]) -> operator_pb2.PlanReply:
        assert dict(digests) == {}
        self.planned.append([stem(each) for each in documents])
        refusal = nouns_pb2.Refusal(code="POLICY_UNKNOWN", found=self._problem)
        return operator_pb2.PlanReply(problems=[operator_pb2.Problem(refusal=refusal)] if self._problem else [])

    def apply(
        self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str], plan_hash: str = "",
        *, with_plan: bool = True,
    ) -> operator_pb2.ApplyReply:  # fmt: skip
        assert dict(digests) == {}
        self.with_plan.append(with_plan)
        self.applied.append([stem(each) for each in documents])
        plan = operator_pb2.PlanReply(computed_at=self.clock.wall())
        if self.broken in self.applied[-1] and not self.aborted:
            stages = [operator_pb2.MigrationStage(stage="planned", at=self.clock.wall())]
            refusal = nouns_pb2.Refusal(code="MEMORY_SHORT", found="no room")
            move = operator_pb2.MigrationView(stages=stages, stage="aborted", reason=refusal)
            move.workload.CopyFrom(nouns_pb2.WorkloadKey(tenant="default", name=self.broken))
            self.aborted.append(move)
        late, self.late = self.late, None
        if late is not None:
            raise late
        return operator_pb2.ApplyReply(revision=len(self.applied), plan=plan)

    def poll(self, kind: str) -> operator_pb2.GetReply:
        if kind == "migrations":
            return operator_pb2.GetReply(migrations=self.aborted)
        assert kind == "workloads"
        key = nouns_pb2.WorkloadKey(tenant="default", name=self.broken)
        view = operator_pb2.WorkloadView(workload=key, state=self.state, wanted=1)
        return operator_pb2.GetReply(workloads=[view] if self.broken else [])


def run(monkeypatch: pytest.MonkeyPatch, region: WavingRegion, *words: str) -> Result:
    @contextmanager
    def connect(*_: object) -> Iterator[WavingRegion]:
        yield region

    monkeypatch.setattr(module, "connect", connect)
    return CliRunner().invoke(shoal, ["apply", *words])


def test_an_apply_may_go_without_a_plan(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion()
    for words in ([], ["--no-plan"]):
        done = run(monkeypatch, region, "-f", str(shops), *words)
        assert done.exit_code == 0, done.output
        assert "applied, revision" in done.output
    assert region.with_plan == [True, False]
    for other in (["--plan", "abc"], ["--dry-run"], ["--wave", "50%"]):
        refused = run(monkeypatch, region, "-f", str(shops), "--no-plan", *other)
        assert isinstance(refused.exception, ShoalError)
        assert refused.exception.code is Code.USAGE
        assert f"--no-plan with {other[0]}" in str(refused.exception)


def test_each_wave_is_applied_once_the_last_is_ready(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion()
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%")
    assert done.exit_code == 0, done.output
    assert [len(each) for each in region.applied] == [2, 6, 5]
    assert "wave 3 of 3: shop-08, shop-09, shop-10, shop-11, shop-12" in done.output


def test_a_wave_whose_answer_is_late_is_applied_again(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion()
    region.late = refuse(Code.DEADLINE_EXCEEDED, "no answer", "an answer", "wait")
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%")
    assert done.exit_code == 0, done.output
    assert [len(each) for each in region.applied] == [2, 2, 6, 5]
    assert done.stderr.splitlines() == [
        "no answer (DEADLINE_EXCEEDED); the region is asked again", "the region answers again",
    ]  # fmt: skip


@pytest.mark.parametrize("is_late", [False, True])
def test_a_move_that_the_wave_began_and_that_ended_is_told_though_the_answer_was_late(
    monkeypatch: pytest.MonkeyPatch, shops: Path, is_late: bool
) -> None:
    """It began before the attempt whose answer came."""
    region = WavingRegion("shop-01")
    region.state = "pending"
    region.late = refuse(Code.DEADLINE_EXCEEDED, "no answer", "an answer", "wait") if is_late else None
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%", "--timeout", "0")
    assert isinstance(done.exception, ShoalError), done.output
    assert (done.exception.code, len(region.applied)) == (Code.MEMORY_SHORT, 1 + is_late)


def test_a_move_that_began_before_the_wave_does_not_end_it(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion("shop-01")
    region.state = "pending"
    move = operator_pb2.MigrationView(stage="aborted", reason=nouns_pb2.Refusal(code="MEMORY_SHORT"))
    move.stages.add(stage="planned", at=region.clock.wall() - 60)
    move.workload.CopyFrom(nouns_pb2.WorkloadKey(tenant="default", name="shop-01"))
    region.aborted.append(move)
    region.late = refuse(Code.DEADLINE_EXCEEDED, "no answer", "an answer", "wait")
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%", "--timeout", "0")
    assert isinstance(done.exception, ShoalError), done.output
    assert done.exception.code is Code.DEADLINE_EXCEEDED


def test_no_wave_follows_one_that_was_refused(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion()
    region.late = refuse(Code.POLICY_UNKNOWN, "no such policy", "one", "apply it")
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%")
    assert isinstance(done.exception, ShoalError)
    assert len(region.applied) == 1


def test_no_wave_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion("shop-03")
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "10%", "--timeout", "0.1")
    assert isinstance(done.exception, ShoalError), done.output
    assert done.exception.code is Code.DEADLINE_EXCEEDED
    assert region.applied == [["shared", "shop-01"], ["shop-02"], ["shop-03"]]
    refusal = done.exception.refusal
    assert refusal.found.startswith("wave 3 of 12, the 9 workloads of later waves are as they were: default/shop-03 is")
    assert refusal.remedy == "shoal explain shop-03; the same command again goes on with what is left"
    region.broken = ""
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "10%")
    assert done.exit_code == 0, done.output
    assert [name for wave in region.applied[3:] for name in wave] == [
        "shared",
        *(f"shop-{n:02d}" for n in range(1, 13)),
    ]


@pytest.mark.parametrize("output", ["table", "json"])
def test_nothing_is_applied_if_one_of_all_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, shops: Path, output: str
) -> None:
    region = WavingRegion(problem="policy that nobody has")
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "10%", "-o", output)
    assert done.exit_code == 255
    assert "policy that nobody has" in done.output
    assert (len(region.planned), region.applied) == (1, [])
    assert len(region.planned[0]) == SHOPS + 1, "of all files at once"


@pytest.mark.parametrize(("output", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
@pytest.mark.parametrize(("broken", "applied"), [("", 3), ("shop-03", 2)], ids=["ready", "failed in the second"])
def test_waves_print_one_list(
    monkeypatch: pytest.MonkeyPatch, shops: Path, output: str, parse: Callable[[str], Any], broken: str, applied: int
) -> None:
    """Of what was applied, also where a wave failed."""
    region = WavingRegion(broken)
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%", "--timeout", "0.1", "-o", output)
    assert (done.exit_code == 0) is (not broken)
    assert [int(each["revision"]) for each in parse(done.stdout)] == list(range(1, applied + 1))


@pytest.mark.parametrize("words", [("--plan", "0123456789abcdef"), ("--dry-run",)])
def test_a_plan_is_of_all_files_at_once(monkeypatch: pytest.MonkeyPatch, shops: Path, words: tuple[str, ...]) -> None:
    region = WavingRegion()
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "10%", *words)
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.USAGE
    assert region.applied == []
