"""Dashboards as code: what is written is what is generated, every reference resolves, every query is one."""

import itertools
import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from harness.servers.prometheus import DEPLOY, dashboards, program, queries

GRAFANA: Final = DEPLOY / "grafana"
BOARDS: Final = dashboards()


def visible_panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_dashboards_are_what_make_dashboards_writes() -> None:
    made = runpy.run_path(str(GRAFANA / "generate.py"))["boards"]()
    assert {uid: json.loads(json.dumps(board)) for uid, board in made.items()} == BOARDS


@pytest.mark.parametrize("name", BOARDS)
def test_every_reference_of_a_dashboard_resolves(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == name
    assert board["title"]
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    known = {"type": "prometheus", "uid": "${datasource}"}
    assert all(each["datasource"] == known for each in variables.values() if each["type"] == "query")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in visible_panels(board):
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len({*refs}) == len(refs)
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == known
        for target in panel["targets"]:
            used = {*re.findall(r"\$(\w+)", target["expr"])} - {"__rate_interval", "__range"}
            assert used <= variables.keys(), target["expr"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_lie_over_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_query_is_one(tmp_path: Path) -> None:
    asked = queries()
    recorded = [
        {"record": f"q:{number}", "expr": each.expand(rate="1m", span="1h")} for number, each in enumerate(asked)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_is_given_the_folders_that_it_is_told_of() -> None:
    service = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in service["volumes"])
    assert {GRAFANA / "provisioning", GRAFANA / "dashboards"} <= {(DEPLOY.parent / path).resolve() for path in mounts}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "shoal.yml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./deploy/grafana/dashboards"]
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.removeprefix(f"{provider['options']['path']}/").removesuffix(".json") in BOARDS
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
