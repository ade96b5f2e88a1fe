"""Checks for a workload that moves to another region or back, in addition to the checks of one region and of a
federation.

Events read here: `client.failed` and `client.done` of requests; `able`, the names of replicas that could answer,
whenever that changes; `coordinator.serving` and `coordinator.died` of the local region; `verified`,
`request.cross_region`.
"""

from typing import Final

from shoal.simulator.checkers import federation, region, requests
from shoal.simulator.checkers.region import Checker, RecordedEvent

OUTAGE_GRACE_S: Final = 12.0
"""Virtual seconds: until silence counts as a loss, then a few steps of the region and the routes that follow."""


class AvailabilityChecker:
    """Clients are not refused for long while a replica that could answer, and a coordinator to route to it, have been
    there for as long."""

    def __init__(self) -> None:
        self._able: dict[str, float] = {}
        self._serving_since: float | None = None
        self._outage_since: float | None = None
        self._is_reported = False

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "able":
                self._able = {name: self._able.get(name, event.at) for name in facts["names"]}
            case "coordinator.serving":
                self._serving_since = event.at
            case "coordinator.died":
                self._serving_since = None
            case "request" if facts["outcome"] == "ok":
                self._outage_since = None
            case "client.failed":
                self._outage_since = event.at if self._outage_since is None else self._outage_since
                return self._check_outage(event.at, facts["code"])
        return None

    def _check_outage(self, now: float, code: str) -> str | None:
        if self._is_reported or self._outage_since is None or self._serving_since is None:
            return None
        known = max(self._outage_since, self._serving_since)
        able = sorted(name for name, since in self._able.items() if now - max(known, since) > OUTAGE_GRACE_S)
        if not able:
            return None
        self._is_reported = True
        return f"nobody has answered for {now - self._outage_since:.0f} s ({code}), though {', '.join(able)} could"


class CrossRegionVerificationChecker:
    """A replica whose answers failed the comparison gets no request, nor does one that is still being compared."""

    def __init__(self) -> None:
        self._wrong: set[str] = set()
        self._targets: dict[str, str] = {}

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "move.step" if facts["target"]:
                self._targets[facts["migration"]] = facts["target"]
            case "verified" if not facts["passed"]:
                self._wrong.add(self._targets.get(facts["migration"], ""))
            case "request.cross_region" if facts["agreement"] in self._wrong:
                return f"{facts['region']} answers under {facts['agreement']}, which answered otherwise"
        return None


def make_checkers() -> tuple[Checker, ...]:
    trades = [rule for rule in federation.make_checkers() if not isinstance(rule, region.AcknowledgedWritesChecker)]
    return (
        *(*region.make_checkers(), *requests.make_checkers()),
        *(*trades, AvailabilityChecker(), CrossRegionVerificationChecker()),
    )
