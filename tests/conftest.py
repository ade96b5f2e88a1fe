"""Options of all tests; what the rows of the fault and attack tables leave in the report."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from harness import report

# As Shoal's agents do: tests send nobody what they run.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# How long an example takes is the machine's business: with others at work a sound one took more than the 200 ms that
# Hypothesis allows by default, and drawing the first few more than its second.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# What tests are made of lives as long as the process: no search for cycles is to visit it, least of all while it grows.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Rewrite the files in tests/unit/cli/golden.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    report.on_start(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    found = yield
    if found.when == "call" and found.passed:
        report.on_passed(item.nodeid)
    return found
