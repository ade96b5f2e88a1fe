"""What must not happen while a workload goes to another region or comes home, beside what its parts are judged by.

Events read here: `client.failed`, `client.done` of requests; `able`, who could answer them, by their names, whenever
that changes; `coordinator.serving`, `coordinator.died` of home; `verified`, `request.crossed`.
"""

from typing import Final

from shoal.simulator import judge, trade_judge
from shoal.simulator.judge import Happened, Rule

DARK_S: Final = 12.0
"""Virtual seconds: until silence is taken for a loss, and for a few steps of the region and the routes that follow."""


class SomebodyServes:
    """Clients are not refused for long while somebody who could answer them has been there for as long, and a
    coordinator to say so."""

    def __init__(self) -> None:
        self._able: dict[str, float] = {}
        self._serving_since: float | None = None
        self._dark_since: float | None = None
        self._told = False

    def take(self, event: Happened) -> str | None:
        facts = event.facts
        match event.kind:
            case "able":
                self._able = {name: self._able.get(name, event.at) for name in facts["names"]}
            case "coordinator.serving":
                self._serving_since = event.at
            case "coordinator.died":
                self._serving_since = None
            case "request" if facts["outcome"] == "ok":
                self._dark_since = None
            case "client.failed":
                self._dark_since = event.at if self._dark_since is None else self._dark_since
                return self._judged(event.at, facts["code"])
        return None

    def _judged(self, now: float, code: str) -> str | None:
        if self._told or self._dark_since is None or self._serving_since is None:
            return None
        known = max(self._dark_since, self._serving_since)
        able = sorted(name for name, since in self._able.items() if now - max(known, since) > DARK_S)
        if not able:
            return None
        self._told = True
        return f"nobody has answered for {now - self._dark_since:.0f} s ({code}), though {', '.join(able)} could"


class Compared:
    """What was found to answer otherwise gets no request, nor does what is being compared."""

    def __init__(self) -> None:
        self._wrong: set[str] = set()
        self._targets: dict[str, str] = {}

    def take(self, event: Happened) -> str | None:
        facts = event.facts
        match event.kind:
            case "move.step" if facts["target"]:
                self._targets[facts["migration"]] = facts["target"]
            case "verified" if not facts["passed"]:
                self._wrong.add(self._targets.get(facts["migration"], ""))
            case "request.crossed" if facts["agreement"] in self._wrong:
                return f"{facts['region']} answers under {facts['agreement']}, which answered otherwise"
        return None


def rules() -> tuple[Rule, ...]:
    trades = [rule for rule in trade_judge.rules() if not isinstance(rule, judge.AcknowledgedWrites)]
    return (*judge.rules(), *trades, SomebodyServes(), Compared())
