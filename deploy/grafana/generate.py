"""Writes `dashboards/*.json`, as Grafana imports and provisions them, from `dashboards.yml` beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

HERE: Final = Path(__file__).parent
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES: Final = {
    "region": 'label_values(up{job="shoal-coordinator"}, region)',
    "node": 'label_values(up{job="shoal-front", region=~"$region"}, node)',
}
COLUMNS: Final = 24
HEIGHT: Final = 8


def boards() -> dict[str, dict[str, Any]]:
    """By uid."""
    said = yaml.safe_load((HERE / "dashboards.yml").read_text())
    return {board["uid"]: _dashboard(board) for board in said}


def text(board: Mapping[str, Any]) -> str:
    return json.dumps(board, indent=1) + "\n"


def _dashboard(board: Mapping[str, Any]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in board["rows"].items():
        panels.append({"type": "row", "title": heading, "collapsed": False, "panels": [], **_at(0, y, COLUMNS, 1)})
        y, x = y + 1, 0
        for panel in row:
            width = panel.get("width", 8)
            if x + width > COLUMNS:
                y, x = y + HEIGHT, 0
            panels.append(_panel(panel) | _at(x, y, width, HEIGHT))
            x += width
        y += HEIGHT
    others = {"type": "dashboards", "title": "Shoal", "tags": ["shoal"], "asDropdown": True, "includeVars": True}
    return {
        "uid": board["uid"],
        "title": board["title"],
        "description": board["help"],
        "tags": ["shoal"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [others],
        "templating": {"list": [_source(), *map(_variable, board["variables"])]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _panel(panel: Mapping[str, Any]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    shown = {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}}
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("help", ""),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "options": shown if kind == "timeseries" else {},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel["queries"].items())
        ],
    }


def _source() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"}


def _variable(name: str) -> dict[str, Any]:
    """All of them at first."""
    return {
        "type": "query",
        "name": name,
        "label": name,
        "datasource": SOURCE,
        "query": {"query": VARIABLES[name], "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


if __name__ == "__main__":
    for uid, board in boards().items():
        (HERE / "dashboards" / f"{uid}.json").write_text(text(board))
