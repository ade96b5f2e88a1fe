"""Price and carbon of a real coordinator: a file that changes, an operator's word, a source that is denied."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.agents import api
from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.wait import wait_until
from shoal.client import Context, Contexts
from shoal.v1 import operator_pb2

DOCUMENT = f"""apiVersion: shoal/v1
kind: Region
metadata: {{name: {REGION}}}
spec:
  price: {{source: ./prices.csv}}
  carbon: {{source: "https://169.254.169.254/latest", fallback: 350 gCO2/kWh}}
"""


@pytest.fixture(scope="module")
def prices(coordinator: CoordinatorServer) -> Path:
    """The file that the applied Region names."""
    folder = coordinator.data / "signals"
    folder.mkdir()
    write(folder / "prices.csv", "0.40 USD/h\n")
    with api(coordinator) as region:
        reply = region.apply([operator_pb2.Document(name="region.yaml", text=DOCUMENT)])
        assert not reply.problems
    return folder / "prices.csv"


def write(path: Path, text: str) -> None:
    """As docs/guides/signals.md says."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


def planned_signals(coordinator: CoordinatorServer) -> dict[str, Any]:
    """The signals of a plan by name."""
    with api(coordinator) as region:
        return {one.name: one for one in region.plan([]).signals}


def signal_events(coordinator: CoordinatorServer) -> list[str]:
    with api(coordinator) as region:
        return [f"{event.code} {event.message}" for event in region.events() if event.code.startswith("SIGNAL")]


def audit_entry_count(coordinator: CoordinatorServer) -> int:
    """Entries of the audit log."""
    with api(coordinator) as region:
        (check,) = [check for check in region.doctor().checks if "audit entries" in check.name]
    return int(check.name.split()[0])


def shoal(coordinator: CoordinatorServer, home: Path, *arguments: str) -> str:
    environment = {**os.environ, "SHOAL_HOME": str(home)}
    Contexts(home).save(Context("test", REGION, coordinator.link, str(coordinator.ready["operator_dir"])))
    command = [sys.executable, "-m", "shoal.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_that_changes_is_in_the_next_plan_and_in_the_events(
    coordinator: CoordinatorServer, prices: Path
) -> None:
    wait_until(lambda: planned_signals(coordinator)["price"].value == 0.4, 30, "the first price is read")
    write(prices, "0.55 USD/h\n")
    wait_until(lambda: planned_signals(coordinator)["price"].value == 0.55, 30, "the new price is read")
    found = planned_signals(coordinator)["price"]
    assert found.why.startswith("./prices.csv, ")
    assert (found.unit, found.stale, found.fallback) == ("USD/h", False, False)
    wait_until(lambda: any("before 0.4 USD/h" in line for line in signal_events(coordinator)), 30, "the change is told")
    assert len([line for line in signal_events(coordinator) if "before 0.4 USD/h" in line]) == 1


def test_a26_a_source_inside_is_denied_and_the_fallback_counts(coordinator: CoordinatorServer, prices: Path) -> None:
    wait_until(
        lambda: planned_signals(coordinator)["carbon"].refusal.code == "SOURCE_DENIED", 30, "the source is denied"
    )
    found = planned_signals(coordinator)["carbon"]
    assert (found.value, found.stale, found.fallback) == (350.0, True, True)
    with api(coordinator) as region:
        (check,) = [check for check in region.doctor().checks if "carbon" in check.name]
        assert (check.ok, check.refusal.code) == (False, "SOURCE_DENIED")


def test_an_operators_word_by_command_survives_kill_9(
    coordinator: CoordinatorServer, prices: Path, tmp_path: Path
) -> None:
    before = audit_entry_count(coordinator)
    said = shoal(coordinator, tmp_path, "region", "set", "price", "12 USD/d")
    assert said.startswith("price is 0.5 USD/h (by hand, ")
    assert audit_entry_count(coordinator) == before + 1
    coordinator.end(signal.SIGKILL)
    coordinator.start()
    assert "0.5 USD/h (by hand, " in shoal(coordinator, tmp_path, "get", "regions")
    assert "by hand" not in shoal(coordinator, tmp_path, "region", "set", "price", "--clear")
    wait_until(
        lambda: planned_signals(coordinator)["price"].source == "./prices.csv", 30, "the document's source counts"
    )
    with api(coordinator) as region:
        actors = {event.code: event.actor for event in region.events() if event.code.startswith("SIGNAL_")}
    assert actors["SIGNAL_SET"] == actors["SIGNAL_CLEARED"] == f"shoal://{REGION}/operator/admin"
