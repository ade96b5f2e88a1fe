"""Debian's Prometheus over a running stack, with the repository's rules and the queries of its dashboards."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from harness.cluster.stack import DevStack, files_of
from harness.crypto.pki import CertificateFiles
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.devstack.control import context_of
from shoal.devstack.layout import FEDERATION, StackMember

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
RULES: Final = DEPLOY / "prometheus" / "rules" / "shoal.yml"
DASHBOARDS: Final = DEPLOY / "grafana" / "dashboards"
CALL_S: Final = 10.0
STARTS_WITHIN_S: Final = 30.0

Series = Mapping[str, Any]
"""As Prometheus tells it: `metric`, and `value` or `values`."""


def program(name: str) -> str:
    """prometheus or promtool."""
    found = shutil.which(name)
    assert found is not None, f"{name} is missing: `make packages` installs Debian's prometheus"
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboards() -> dict[str, dict[str, Any]]:
    """As they are in the repository, by file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


@dataclass(frozen=True, slots=True)
class Query:
    """Of one target of one panel."""

    dashboard: str
    panel: str
    legend: str
    expr: str

    def expand(self, *, rate: str, span: str) -> str:
        """As Grafana would ask it with all regions and nodes chosen. span: of a stat, whose value is of the whole time
        shown."""
        chosen = {"$__rate_interval": rate, "$__range": span, "$region": ".*", "$node": ".*"}
        expr = self.expr
        for name, value in chosen.items():
            expr = expr.replace(name, value)
        return expr


def queries() -> list[Query]:
    return [
        Query(name, panel["title"], target["legendFormat"], target["expr"])
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


class Prometheus:
    """One process on a free port of 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self._port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "prometheus.yml"
        path.write_text(yaml.safe_dump({**config}))
        with (self.folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={path}",
                    f"--storage.tsdb.path={self.folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._is_ready, STARTS_WITHIN_S, "Prometheus to be ready")

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(CALL_S)

    def query(self, expr: str) -> list[Series]:
        """Now. Raises AssertionError with what Prometheus says to a query that it does not take."""
        return list(self._get("query", query=expr)["result"])

    def query_range(self, expr: str, start: float, end: float, step: float = 1.0) -> list[Series]:
        """From one moment to another (Unix seconds)."""
        return list(self._get("query_range", query=expr, start=start, end=end, step=step)["result"])

    def firing(self, **labels: str) -> set[str]:
        """Names of alerts; of those with these labels."""
        found = (each["labels"] for each in self._get("alerts")["alerts"] if each["state"] == "firing")
        return {each["alertname"] for each in found if labels.items() <= each.items()}

    def failing_targets(self) -> dict[str, str]:
        """Targets that do not answer, and why."""
        active = self._get("targets", state="active")["activeTargets"]
        return {each["scrapeUrl"]: each["lastError"] for each in active if each["health"] != "up"}

    def _get(self, what: str, **asked: Any) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=CALL_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{asked}: {error.read().decode()}") from error

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=CALL_S):
                return True
        except OSError:
            return False


def config(stack: DevStack, *, every_s: float, rule_files: Sequence[Path] = ()) -> dict[str, Any]:
    """Scrape every member of a stack."""
    every = f"{round(every_s * 1000)}ms"
    members = stack.info.stack.members
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [
            scrape_config(
                region, _files(stack, region), [page for one in members if one.region == region for page in _pages(one)]
            )
            for region in dict.fromkeys(member.region for member in members if member.region)
        ],
    }


def scrape_config(region: str, files: CertificateFiles, pages: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """One region, labelled as deploy/prometheus/prometheus.yml labels it. pages: (job, node, address)."""
    return {
        "job_name": region,
        "scheme": "https",
        "tls_config": {
            "server_name": "localhost",
            "ca_file": str(files.authority),
            "cert_file": str(files.certificate),
            "key_file": str(files.key),
        },
        "static_configs": [
            {"targets": [address], "labels": {"job": job, "region": region, "node": node}}
            for job, node, address in pages
        ],
    }


def _files(stack: DevStack, region: str) -> CertificateFiles:
    """Of the region's operator, or the federation's."""
    name = f"dev-{FEDERATION}" if region == FEDERATION else context_of(stack.info.stack, region)
    return files_of(stack.contexts.get(name))


def _pages(member: StackMember) -> list[tuple[str, str, str]]:
    match member.role:
        case "coordinator" | "federation":
            pages = [("shoal-coordinator", "metrics")]
        case "agent" | "gateway":
            pages = [("shoal-agent", "metrics"), ("shoal-front", "front-metrics")]
        case _:
            pages = []
    return [(job, member.name, member.addresses[use]) for job, use in pages]
