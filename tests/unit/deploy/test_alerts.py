"""Alert rules as code: each fires once, each has a run-book. `tests/unit/docs/test_metrics.py` checks their metrics."""

import re
import subprocess
from pathlib import Path
from typing import Final

import yaml

from harness.servers.prometheus import RULES, program, rules

ROOT: Final = Path(__file__).parents[3]
TESTS: Final = ROOT / "deploy" / "prometheus" / "tests" / "shoal.yml"


def promtool(*arguments: str) -> None:
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_once_and_not_before() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(TESTS))
    fired = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_every_alert_has_a_run_book() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    headings = {f"docs/operations.md#{title.lower()}" for title in re.findall(r"^### (\w+)$", operations, re.MULTILINE)}
    assert {rule["annotations"]["runbook"] for rule in rules()} <= headings
    assert len({rule["alert"] for rule in rules()}) == len(rules())
