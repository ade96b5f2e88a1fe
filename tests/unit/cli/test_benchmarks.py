"""What the benchmarks judge by: a goal that can be missed, and LoadGen's own words."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli.commands.bench import bench
from shoal.types.codes import Code, ShoalError

FOLDER = Path(__file__).parents[3] / "benchmarks"
MIB = 2**20

VALID = """
================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 103.77
Result is : VALID
  Performance constraints satisfied : Yes
  Min duration satisfied : Yes
  Min queries satisfied : Yes
  Early stopping satisfied: Yes
99.00 percentile latency (ns)   : 4790000
"""
INVALID = """
Result is : INVALID
  Performance constraints satisfied : NO
  Min duration satisfied : Yes
Recommendations:
 * Reduce target QPS to improve latency.
99.00 percentile latency (ns)   : 173330000
"""


@pytest.fixture
def footprint(monkeypatch: pytest.MonkeyPatch) -> Any:
    return benchmark("footprint", monkeypatch)


@pytest.fixture
def loadgen(monkeypatch: pytest.MonkeyPatch) -> Any:
    return benchmark("loadgen", monkeypatch)


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As `shoal bench` starts it: its own folder comes first. Nothing of it stays for other tests."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for each in ("_machine", name):
        monkeypatch.delitem(sys.modules, each, raising=False)
        monkeypatch.setitem(sys.modules, each, importlib.import_module(each))
    return sys.modules[name]


def figures(
    module: Any,
    *,
    rss_mib: float = 40.0,
    cpu: float = 0.005,
    mapped: tuple[str, ...] = (),
    front_mib: float = 37.0,
    front_maps: tuple[str, ...] = (),
) -> dict[str, Any]:
    empty = module.ProcessFootprint(30 * MIB, 25 * MIB, 20 * MIB, 0.0, 1, ("cryptography",))
    supervisor = module.ProcessFootprint(int(rss_mib * MIB), 30 * MIB, 20 * MIB, cpu, 11, mapped)
    front = module.ProcessFootprint(int(front_mib * MIB), 25 * MIB, 20 * MIB, 0.0, 2, front_maps)
    return {module.EMPTY_NAME: empty, "supervisor": supervisor, "front": front}


def test_a_footprint_within_its_goal_misses_nothing(footprint: Any) -> None:
    assert footprint.missed_goals(figures(footprint), rss_mib=45, over_mib=14, cpu=0.01) == []


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"rss_mib": 44.5}, "14.5 MiB above"),
        ({"cpu": 0.02}, "2.00% of a core"),
        ({"mapped": ("onnxruntime",)}, "supervisor maps onnxruntime"),
        ({"mapped": ("cryptography",)}, "supervisor maps cryptography"),
        ({"front_mib": 38.5}, "front 38.5 MiB, at most 38.1"),
        ({"front_maps": ("cryptography",)}, "front maps cryptography"),
    ],
)
def test_a_footprint_can_miss_its_goal(footprint: Any, measured: dict[str, Any], said: str) -> None:
    (missed,) = footprint.missed_goals(figures(footprint, **measured), rss_mib=45, over_mib=14, cpu=0.01)
    assert said in missed


def test_a_large_supervisor_misses_its_goal_whatever_its_imports_take(footprint: Any) -> None:
    found = figures(footprint, rss_mib=46.0)
    assert footprint.missed_goals(found, rss_mib=45, over_mib=20, cpu=0.01) == ["supervisor 46.0 MiB, at most 45"]


def test_a_footprint_without_a_supervisor_misses_its_goal(footprint: Any) -> None:
    found = figures(footprint)
    del found["supervisor"]
    assert footprint.missed_goals(found, rss_mib=45, over_mib=14, cpu=0.01) == ["no supervisor was measured"]


def test_loadgen_s_own_words_are_the_verdict(loadgen: Any) -> None:
    assert loadgen.read_summary("Server", VALID) == (True, pytest.approx(4.79), ())
    valid, figure, why = loadgen.read_summary("Server", INVALID)
    assert (valid, figure) == (False, pytest.approx(173.33))
    assert why == ("Performance constraints satisfied : NO", "* Reduce target QPS to improve latency.")
    with pytest.raises(ValueError, match="no result"):
        loadgen.read_summary("Server", "")


def test_a_valid_run_with_a_failure_or_below_its_third_does_not_pass(loadgen: Any) -> None:
    def run(**changed: Any) -> bool:
        given = {"valid": True, "value": 300.0, "target": 250.0, "failed": 0, "wrong": 0, **changed}
        passed: bool = loadgen.LoadGenRun(
            "shoal", "Offline", what="per s", samples=9, queries_least=1, reasons={}, **given
        ).has_passed
        return passed

    assert run()
    assert run(target=float("nan"))
    assert not run(valid=False)
    assert not run(failed=1)
    assert not run(wrong=1)
    assert not run(value=200.0)


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """Two that write what they were given beside themselves."""
    for name in ("one", "two"):
        write = "import pathlib, sys; pathlib.Path(__file__).with_suffix('.txt').write_text(' '.join(sys.argv[1:]))"
        (tmp_path / f"{name}.py").write_text(write)
    return tmp_path


def test_options_after_a_benchmark_s_name_are_its_own(benchmarks: Path) -> None:
    done = CliRunner().invoke(bench, ["--folder", str(benchmarks), "one", "--quick", "--peers", "there"])
    assert done.exit_code == 0, done.output
    assert (benchmarks / "one.txt").read_text() == "--quick --peers there"
    assert not (benchmarks / "two.txt").exists()


def test_all_benchmarks_run_when_none_is_named(benchmarks: Path) -> None:
    assert CliRunner().invoke(bench, ["--folder", str(benchmarks)]).exit_code == 0
    assert [(benchmarks / f"{name}.txt").read_text() for name in ("one", "two")] == ["", ""]


def test_options_need_one_benchmark_to_go_to(benchmarks: Path) -> None:
    done = CliRunner().invoke(bench, ["--folder", str(benchmarks), "--quick"])
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.FIELD_INVALID
    assert not list(benchmarks.glob("*.txt"))
