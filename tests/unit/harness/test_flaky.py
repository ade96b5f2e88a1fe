"""The second attempt of failed tests, on files of tests that this one writes."""

from pathlib import Path

import pytest

from harness import flaky

FAILS_ONCE = """
import pathlib
def test_first():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    return flaky.run("phase", ["-q", *arguments], folder / "flaky.txt")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_fails_once_passes_and_is_named(folder: Path, workers: str) -> None:
    (folder / "test_one.py").write_text(FAILS_ONCE)
    (folder / "test_two.py").write_text("def test_well():\n    pass\n")
    assert run(folder, "-n", workers, "--dist", "loadscope") == 0
    assert (folder / "flaky.txt").read_text() == "phase: test_one.py::test_first\n"


def test_what_fails_twice_fails(folder: Path) -> None:
    (folder / "test_one.py").write_text("def test_bad():\n    raise AssertionError\n")
    assert run(folder) == 1
    assert not (folder / "flaky.txt").exists()


def test_more_than_a_few_have_no_second_attempt(folder: Path) -> None:
    for number in range(flaky.MAX_FAILED + 1):
        (folder / f"test_{number}.py").write_text(FAILS_ONCE)
    assert run(folder) == 1
    assert run(folder) == 0, "each of them would have passed at a second attempt"
    assert not (folder / "flaky.txt").exists()


def test_a_phase_that_did_not_end_has_no_second_attempt(folder: Path) -> None:
    (folder / "test_one.py").write_text(FAILS_ONCE)
    (folder / "test_two.py").write_text("import nowhere\n")
    assert run(folder) == 2
    assert not (folder / "flaky.txt").exists()
