"""Another region's measurements, by command: what is kept survives `kill -9`, and each change is in the audit log."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.cluster.agents import api
from harness.cluster.coordinator import REGION, CoordinatorServer
from shoal.client import Context, Contexts

ROW = {
    "model": "sha256:" + "a" * 64,
    "provider": "CPUExecutionProvider",
    "product": "maker board",
    "ratio": 2.0,
    "operators": {"launch": 0.2, "conv": 0.8},
}
DOCUMENT = {
    "apiVersion": "shoal/v1",
    "kind": "Measurements",
    "region": "asia",
    "exportedAt": "2026-01-01T00:00:00Z",
    "rows": [ROW, {**ROW, "product": "maker box", "ratio": -1}],
}


def run(coordinator: CoordinatorServer, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SHOAL_HOME": str(home)}
    Contexts(home).save(Context("test", REGION, coordinator.link, str(coordinator.ready["operator_dir"])))
    command = [sys.executable, "-m", "shoal.cli.main", "region", "measurements", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


def shoal(coordinator: CoordinatorServer, home: Path, *arguments: str) -> str:
    done = run(coordinator, home, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def audit_entry_count(coordinator: CoordinatorServer) -> int:
    with api(coordinator) as region:
        (check,) = [check for check in region.doctor().checks if "audit entries" in check.name]
    return int(check.name.split()[0])


def test_an_import_survives_kill_9_and_is_audited(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    file, before = tmp_path / "asia.json", audit_entry_count(coordinator)
    file.write_text(json.dumps(DOCUMENT))
    tried = shoal(coordinator, tmp_path, "import", str(file), "--dry-run")
    assert tried.startswith("region asia: 1 row would be kept (1 models on 1 device classes)\n1 left out:\n")
    assert "TELEMETRY_ABSURD rows[1]: ratio -1, wanted 0.001 to 1000" in tried
    assert json.loads(shoal(coordinator, tmp_path, "ls", "-o", "json")) == []
    assert audit_entry_count(coordinator) == before
    told = json.loads(shoal(coordinator, tmp_path, "import", str(file), "-o", "json"))
    assert (told["dryRun"], told["imported"]["rows"], told["left_out"]) == (False, 1, 1)
    assert audit_entry_count(coordinator) == before + 1
    coordinator.end(signal.SIGKILL)
    coordinator.start()
    (line,) = shoal(coordinator, tmp_path, "ls").splitlines()[1:]
    assert line.split()[:6] == ["asia", "1", "1", "1", "2026-01-01", "00:00:00Z"]
    assert line.split()[-1] == "admin"
    own = tmp_path / "own.json"
    assert shoal(coordinator, tmp_path, "export", str(own)) == ""
    assert json.loads(own.read_text()) == json.loads(shoal(coordinator, tmp_path, "export")) | {
        "exportedAt": json.loads(own.read_text())["exportedAt"]
    }
    assert json.loads(own.read_text())["rows"] == [], "what is of others is not exported"
    assert shoal(coordinator, tmp_path, "rm", "asia") == "measurements of region asia are forgotten\n"
    assert audit_entry_count(coordinator) == before + 2
    again = run(coordinator, tmp_path, "rm", "asia")
    assert (again.returncode, again.stderr.count("NOT_FOUND")) == (255, 1)


def test_a_file_that_is_none_is_one_coded_line(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    for text, code in (("no json", "FIELD_INVALID"), (json.dumps({**DOCUMENT, "kind": "Policy"}), "KIND_UNKNOWN")):
        file.write_text(text)
        done = run(coordinator, tmp_path, "import", str(file))
        assert done.returncode == 255
        (line,) = done.stderr.splitlines()
        assert code in line
