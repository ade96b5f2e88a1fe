"""Metrics are what is declared: names, the reference page, and every metric that a page or a query names."""

import ast
import re
from pathlib import Path
from typing import Any, Final

import pytest

from harness.metrics import (
    DECLARED,
    MENTIONED,
    PAGES,
    check_page,
    series_names,
    undeclared_names,
    undeclared_series,
)
from harness.servers.prometheus import queries, rules
from shoal.agent import metrics as agent
from shoal.coordinator import metrics as coordinator
from shoal.types.metric import CounterMetric, DeclaredMetric, HistogramMetric

ROOT: Final = Path(__file__).parents[3]
REFERENCE: Final = ROOT / "docs" / "reference" / "metrics.md"
PROSE: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy/prometheus/tests/shoal.yml")
BASE_UNITS: Final = frozenset(
    ("", "seconds", "bytes", "ratio", "celsius", "watts", "joules", "usd", "usd_per_hour", "grams_per_kilowatt_hour")
)
OTHER_UNITS: Final = re.compile(r"_(ms|us|milliseconds|minutes|hours|kb|mb|kilobytes|megabytes|percent|kwh)(_|$)")
MATCHER: Final = re.compile(r"(shoal_[a-z0-9_]+)\{([^}]*)\}")
LABEL: Final = re.compile(r"(\w+)\s*(=~|=|!=|!~)\s*\"([^\"]*)\"")
MAKING: Final = re.compile(r"^(Counter|Gauge|Histogram|Summary|Info|Enum)Metric(Family)?$|^(Gauge|Summary|Info)$")
"""Calls that declare a metric, or make one without a declaration."""
ADDED: Final = frozenset(("instance", "job", "region", "node", "le"))
"""Labels that a scrape adds, and the bound of a histogram's bucket."""


def test_the_reference_lists_every_metric() -> None:
    assert {*re.findall(r"^\| `(shoal_\w+)`", REFERENCE.read_text(), re.MULTILINE)} == {one.name for one in DECLARED}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_every_metric_that_a_page_names_is_declared(page: Path) -> None:
    assert undeclared_names(MENTIONED.findall(page.read_text())) == []


def test_every_metric_that_a_query_asks_for_is_declared() -> None:
    asked = [*(each.expr for each in queries()), *(rule["expr"] for rule in rules())]
    named = [name for expr in asked for name in MENTIONED.findall(expr)]
    assert len({*named}) > 40
    assert undeclared_series(named) == []


def test_every_label_that_a_query_asks_for_is_declared() -> None:
    by_name = {name: metric for metric in DECLARED for name in series_names(metric)}
    matched = 0
    for expr in (*(each.expr for each in queries()), *(rule["expr"] for rule in rules())):
        for name, matchers in MATCHER.findall(expr):
            labels = {label.name: label for label in by_name[name].labels}
            for label, operator, value in LABEL.findall(matchers):
                assert label in labels or label in ADDED, expr
                if label in labels and operator in ("=", "!="):
                    assert labels[label].allows(value), expr
                    matched += 1
    assert matched > 3


def test_an_unknown_metric_is_found() -> None:
    assert undeclared_series(["shoal_front_requests", "shoal_front_requests_total"]) == ["shoal_front_requests"]
    assert undeclared_series(["shoal_front_request_seconds"]) == ["shoal_front_request_seconds"]
    assert undeclared_names(["shoal_front_request_seconds", "shoal_agent_process_", "shoal_agent_none_"]) == [
        "shoal_agent_none_"
    ]


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_names_follow_the_conventions_of_prometheus(metric: DeclaredMetric) -> None:
    assert re.fullmatch(r"shoal_(coordinator|agent|front)_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == isinstance(metric, CounterMetric)
    assert metric.unit in BASE_UNITS
    assert metric.name.removesuffix("_total").endswith(metric.unit)
    assert not OTHER_UNITS.search(metric.name)
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created", "_info"))
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    assert all(re.fullmatch(r"[a-z]+", label.name) for label in metric.labels)
    assert all(label.values or label.others for label in metric.labels)
    for series in metric.known_series:
        metric.check(series)
    if isinstance(metric, HistogramMetric):
        assert metric.buckets == tuple(sorted(set(metric.buckets)))


def test_a_metric_is_declared_once() -> None:
    assert len({metric.name for metric in DECLARED}) == len(DECLARED)


@pytest.mark.parametrize("module", [agent, coordinator], ids=["agent", "coordinator"])
def test_every_declaration_is_on_a_page(module: Any) -> None:
    named = {value for value in vars(module).values() if isinstance(value, DeclaredMetric)}
    assert named
    assert named <= {*DECLARED}


def test_metrics_are_declared_in_one_module_of_each_part() -> None:
    """And nowhere else, so that nothing can be counted that a page does not list."""
    found = {
        path.relative_to(ROOT).as_posix()
        for part in ("agents", "coordinator", "protos", "cli", "policies")
        for path in (ROOT / part).rglob("*.py")
        if "/build/" not in path.as_posix() and "_pb2" not in path.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and MAKING.search(node.func.id)
    }
    assert found == {
        "agents/shoal/agent/metrics.py",
        "coordinator/shoal/coordinator/metrics.py",
        "protos/shoal/host/metrics.py",
        "protos/shoal/types/metric.py",
    }


def test_a_page_that_exports_too_little_or_too_much_is_found() -> None:
    text = "# HELP shoal_front_in_flight Requests inside the front.\n# TYPE shoal_front_in_flight gauge\n"
    check_page(f"{text}shoal_front_in_flight 0.0\n", (agent.FRONT_IN_FLIGHT,))
    for declared, shown in (
        ((agent.FRONT_IN_FLIGHT, agent.FRONT_EJECTED), f"{text}shoal_front_in_flight 0.0\n"),
        ((), f"{text}shoal_front_in_flight 0.0\n"),
        ((agent.FRONT_IN_FLIGHT,), text),
    ):
        with pytest.raises(AssertionError):
            check_page(shown, declared)
    assert PAGES.keys() == {"region", "federation", "supervisor", "front"}
