"""`shoal apply --wave`: files a wave at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness.cluster.stack import documents, policy, workload
from shoal.cli.commands import apply as module
from shoal.cli.documents import read, waves
from shoal.cli.main import shoal
from shoal.types.codes import Code, ShoalError
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


class WavingRegion:
    """A region in which everything applied is ready, but for one workload that never is."""

    def __init__(self, broken: str = "") -> None:
        self.applied = list[list[str]]()
        self.broken = broken

    def models(self) -> list[artifacts_pb2.Model]:
        return []

    def apply(
        self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str], plan_hash: str
    ) -> operator_pb2.ApplyReply:
        assert (dict(digests), plan_hash) == ({}, "")
        self.applied.append([stem(each) for each in documents])
        return operator_pb2.ApplyReply(revision=len(self.applied))

    def poll(self, kind: str) -> operator_pb2.GetReply:
        assert kind == "workloads"
        key = nouns_pb2.WorkloadKey(tenant="default", name=self.broken)
        view = operator_pb2.WorkloadView(workload=key, state="progressing", wanted=1)
        return operator_pb2.GetReply(workloads=[view] if self.broken else [])

    def get(self, kind: str) -> operator_pb2.GetReply:
        assert kind == "migrations"
        return operator_pb2.GetReply()


def run(monkeypatch: pytest.MonkeyPatch, region: WavingRegion, *words: str) -> Result:
    @contextmanager
    def connect(*_: object) -> Iterator[WavingRegion]:
        yield region

    monkeypatch.setattr(module, "connect", connect)
    return CliRunner().invoke(shoal, ["apply", *words])


def test_each_wave_is_applied_once_the_last_is_ready(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion()
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "50%")
    assert done.exit_code == 0, done.output
    assert [len(each) for each in region.applied] == [2, 6, 5]
    assert "wave 3 of 3: shop-08, shop-09, shop-10, shop-11, shop-12" in done.output


def test_no_wave_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch, shops: Path) -> None:
    region = WavingRegion("shop-03")
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "10%", "--timeout", "0.1")
    assert isinstance(done.exception, ShoalError), done.output
    assert done.exception.code is Code.DEADLINE_EXCEEDED
    assert region.applied == [["shared", "shop-01"], ["shop-02"], ["shop-03"]]


@pytest.mark.parametrize("words", [("--plan", "0123456789abcdef"), ("--dry-run",)])
def test_a_plan_is_of_all_files_at_once(monkeypatch: pytest.MonkeyPatch, shops: Path, words: tuple[str, ...]) -> None:
    region = WavingRegion()
    done = run(monkeypatch, region, "-f", str(shops), "--wave", "10%", *words)
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.USAGE
    assert region.applied == []
