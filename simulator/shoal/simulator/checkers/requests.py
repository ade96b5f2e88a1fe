"""Checks of where requests go, and of what becomes of them at a front.

Events read here, besides those of fronts (`front.started`, `front.configured`, `front.died`):

- `request.entered`: a front has it; `content` is what it asks, `entry` how it came in, `timeout_s` how long it may
  take.
- `request.sent`, then `request.served` or `request.failed`: one attempt at the replica `to`.
- `request.left`: it ended at that front, with the code or `ok` as `outcome`.
- `request.crashed`: it ended its worker.
- `requests.calm` and `requests.rest`: between them each front asks `per_replica` times for each replica, one request
  after the other, and no fault strikes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.simulator.checkers.region import Checker, RecordedEvent

CLIENT: Final = "client"
OPEN_STATES: Final = ("ready", "standby")
RETRIED_CODES: Final = ("REPLICA_UNREACHABLE", "WORKER_CRASHED", "MODEL_NOT_READY")
"""After these a request goes to another replica."""
LOST_CODES: Final = ("REPLICA_UNREACHABLE", "DEADLINE_EXCEEDED")
"""After these the request may still run."""
PARDON_CODES: Final = ("OVERLOADED", "OUT_OF_MEMORY")
"""After these a replica counts as healthy."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One endpoint of a route."""

    # Whether a worker of the front's own machine answers.
    is_local: bool
    # Whether it may get requests at all.
    is_open: bool
    # Whether it gets them before any standby does.
    is_ready: bool


@dataclass(frozen=True, slots=True)
class _FrontConfig:
    """What a front was told to serve."""

    at: float
    # Assignments with a worker that takes requests.
    workers: frozenset[str]
    # Workload -> assignment -> endpoint.
    routes: Mapping[str, Mapping[str, _Endpoint]]

    def takers(self, workload: str, *, ready_only: bool = False) -> set[str]:
        """Assignments that may get a client's request."""
        return {
            name
            for name, each in self.routes.get(workload, {}).items()
            if each.is_open and (each.is_ready or not ready_only) and (not each.is_local or name in self.workers)
        }


@dataclass(slots=True)
class _Inside:
    """One request inside a front."""

    # Its workload.
    workload: str
    # What it asks: equal contents are the same request again.
    content: bytes
    # How it came in.
    entry: str
    # When it came in.
    at: float
    # How long it may take, in seconds.
    timeout_s: float
    # Replicas that it was sent to, in order.
    sent: list[str] = field(default_factory=list)
    # Whether the newest of them has it, and has not answered or failed.
    is_outstanding: bool = False


class _FrontRecord:
    """The life of one front process, as the record tells it."""

    def __init__(self, per_endpoint: int) -> None:
        self.per_endpoint = per_endpoint
        """Most requests that may wait for one endpoint."""
        self.configs: list[_FrontConfig] = []
        self.requests: dict[str, _Inside] = {}

    def configs_since(self, at: float) -> list[_FrontConfig]:
        """Those in force at some time since then."""
        later = [number for number, config in enumerate(self.configs) if config.at > at]
        return self.configs[max(0, (later[0] if later else len(self.configs)) - 1) :]

    def takers(self, request: _Inside, *, ready_only: bool = False) -> set[str]:
        """Assignments that could be given this client's request all the time since it came in."""
        found = [config.takers(request.workload, ready_only=ready_only) for config in self.configs_since(request.at)]
        return set.intersection(*found) if found else set()

    def admitted_count(self, workload: str) -> int:
        """Requests of the workload inside, without those that are still to be admitted."""
        return sum(each.workload == workload and bool(each.sent) for each in self.requests.values())


class _FrontsChecker:
    """Follows every front; what is wrong is for subclasses to say."""

    def __init__(self) -> None:
        self._fronts: dict[str, _FrontRecord] = {}

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "front.started":
                self._fronts[facts["node"]] = _FrontRecord(facts["per_endpoint"])
                self.on_restart(facts["node"])
            case "front.died":
                self._fronts.pop(facts["node"], None)
                self.on_restart(facts["node"])
            case "front.configured" if facts["node"] in self._fronts:
                front = self._fronts[facts["node"]]
                front.configs = [*front.configs[-20:], _config_of(event)]
                self.on_configured(facts["node"], front)
            case "request.entered" if facts["front"] in self._fronts:
                inside = _Inside(facts["workload"], facts["content"], facts["entry"], event.at, facts["timeout_s"])
                self._fronts[facts["front"]].requests[facts["number"]] = inside
            case "request.sent" | "request.served" | "request.failed" | "request.left":
                return self._check_request(event)
        return None

    def _check_request(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        front = self._fronts.get(facts["front"])
        request = front.requests.get(facts["number"]) if front is not None else None
        if front is None or request is None:
            return None
        violation = self.on_request(event, front, request)
        match event.kind:
            case "request.sent":
                request.sent.append(facts["to"])
                request.is_outstanding = True
            case "request.served" | "request.failed":
                request.is_outstanding = False
            case "request.left":
                del front.requests[facts["number"]]
        return violation

    def on_restart(self, node: str) -> None:
        """The front of this node is new, or gone."""

    def on_configured(self, node: str, front: _FrontRecord) -> None:
        """It has a configuration."""

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        """A request that is inside was sent, served, failed or left; what is wrong with that."""
        raise NotImplementedError


class RouteChecker(_FrontsChecker):
    """A request goes only to an endpoint of its route that takes requests, and to a worker of the own machine only
    while that takes them: not while it loads or drains. What was forwarded to a front goes to no third one. No request
    is sent twice to one replica."""

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        if event.kind != "request.sent" or not front.configs:
            return None
        to, via, where = event.facts["to"], event.facts["via"], f"{event.facts['number']} was sent to"
        if to in request.sent:
            return f"{where} {to} again"
        if via == "local" and to not in front.configs[-1].workers:
            return f"{where} {to}, whose worker takes no requests"
        if request.entry != CLIENT and via not in ("local", "region"):
            return f"{where} {to} at a third front"
        listed = [config.routes.get(request.workload, {}).get(to) for config in front.configs_since(request.at)]
        if request.entry == CLIENT and not any(each is not None and each.is_open for each in listed):
            return f"{where} {to}, which takes no requests of {request.workload}"
        return None


class EjectionChecker(_FrontsChecker):
    """A replica that failed gets nothing for a moment while another one is there that has not failed."""

    SHORTEST_S = 0.12
    """A little less than the shortest ejection: half of 0.25 s."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: dict[str, dict[str, float]] = defaultdict(dict)
        """Front -> replica -> when it failed first since its last answer."""

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "worker.ready":  # its own front knows that it is another process; the others do not
            self._failed[event.facts["node"]].pop(event.facts["assignment"], None)
        return super().check(event)

    def on_restart(self, node: str) -> None:
        self._failed.pop(node, None)

    def on_configured(self, node: str, front: _FrontRecord) -> None:
        config = front.configs[-1]
        listed = {name for route in config.routes.values() for name in route} | config.workers
        # A front forgets a replica that is listed no more, once it waits for none of its answers.
        known = listed | {each.sent[-1] for each in front.requests.values() if each.is_outstanding}
        self._failed[node] = {name: at for name, at in self._failed[node].items() if name in known}

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        facts = event.facts
        failed, to = self._failed[facts["front"]], facts["to"] if event.kind != "request.left" else ""
        match event.kind:
            case "request.served":
                failed.pop(to, None)
            case "request.failed" if facts["code"] in RETRIED_CODES:
                failed.setdefault(to, event.at)
            case "request.failed" if facts["code"] in PARDON_CODES:
                failed.pop(to, None)
            case "request.sent" if request.entry == CLIENT and to in failed:
                others = front.takers(request) - failed.keys() - set(request.sent)
                if others and event.at - failed[to] < self.SHORTEST_S:
                    return f"{to} failed and is sent {facts['number']}, though {sorted(others)} have not failed"
        return None


class RetryChecker(_FrontsChecker):
    """Nobody is refused while a ready replica has not been tried, were it only one that failed before."""

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        facts = event.facts
        if event.kind != "request.left" or request.entry != CLIENT or not facts["alive"]:
            return None
        in_time = event.at < request.at + request.timeout_s
        untried = front.takers(request, ready_only=True) - set(request.sent)
        if facts["outcome"] in RETRIED_CODES and in_time and untried:
            return f"{facts['number']} got {facts['outcome']}, and {sorted(untried)} were not tried"
        return None


class FrontAdmissionChecker(_FrontsChecker):
    """A front lets in as many as may wait for its replicas, refuses nobody while it is empty, and lets nobody wait
    beyond the deadline."""

    SLACK_S = 0.01

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        facts, number = event.facts, event.facts["number"]
        count = front.admitted_count(request.workload)
        match event.kind:
            case "request.sent" if not request.sent and front.configs:
                config = front.configs[-1]
                most = front.per_endpoint * len(config.routes.get(request.workload, {}).keys() | config.workers)
                if count >= most:
                    return f"{number} was let in as {count} of {request.workload} were inside, at most {most} may be"
            case "request.left" if facts["outcome"] == "OVERLOADED" and not request.sent:
                if not any(each.sent for each in front.requests.values()):
                    return f"{number} was refused for want of room, and nobody was inside"
            case "request.left" if event.at > request.at + request.timeout_s + self.SLACK_S:
                return (
                    f"{number} left {event.at - request.at:.3f} s after it came, {request.timeout_s:g} s were allowed"
                )
        return None


class CrashingRequestChecker(_FrontsChecker):
    """No request ends more than two workers, however often its client sends it to one front; and one more for each of
    its attempts whose end the front did not learn, such as over a connection that was cut."""

    MOST = 2
    WINDOW_S = 50.0
    """It may be forgotten after a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._crashes: dict[bytes, list[float]] = defaultdict(list)
        """Content -> when it ended a worker."""
        self._lost: dict[bytes, list[float]] = defaultdict(list)
        """Content -> when a front gave up an attempt without an answer."""

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind != "request.crashed":
            return super().check(event)
        content = event.facts["content"]
        crashes = self._recent(self._crashes, content, event.at)
        most = self.MOST + len(self._recent(self._lost, content, event.at))
        crashes.append(event.at)
        return f"{content!r} ended {len(crashes)} workers, at most {most} are expected" if len(crashes) > most else None

    def on_restart(self, node: str) -> None:
        """A front forgets what it knew when it dies."""
        self._crashes.clear()
        self._lost.clear()

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        if event.kind == "request.failed" and event.facts["code"] in LOST_CODES and request.entry == CLIENT:
            self._lost[request.content].append(event.at)
        return None

    def _recent(self, times: dict[bytes, list[float]], content: bytes, now: float) -> list[float]:
        times[content] = [at for at in times[content] if now - at < self.WINDOW_S]
        return times[content]


class RecoveryChecker(_FrontsChecker):
    """Whatever failed before, a front of a region at rest uses every ready replica of its routes."""

    def __init__(self) -> None:
        super().__init__()
        self._calm_at: float | None = None
        self._per_replica = 0
        self._asked: Counter[tuple[str, str]] = Counter()
        """(front, workload) -> clients' requests since the calm began."""
        self._used: set[tuple[str, str]] = set()
        """(front, replica) of each attempt since then."""

    def check(self, event: RecordedEvent) -> str | None:
        match event.kind:
            case "requests.calm":
                self._calm_at, self._per_replica = event.at, event.facts["per_replica"]
                self._asked.clear()
                self._used.clear()
            case "requests.rest":
                return self._check_use()
        return super().check(event)

    def on_request(self, event: RecordedEvent, front: _FrontRecord, request: _Inside) -> str | None:
        if event.kind == "request.sent" and request.entry == CLIENT:
            self._used.add((event.facts["front"], event.facts["to"]))
            self._asked[event.facts["front"], request.workload] += not request.sent
        return None

    def _check_use(self) -> str | None:
        for (name, workload), count in sorted(self._asked.items()):
            front = self._fronts.get(name)
            if front is None or not front.configs or self._calm_at is None or front.configs[-1].at > self._calm_at:
                continue
            ready = front.configs[-1].takers(workload, ready_only=True)
            unused = [each for each in sorted(ready) if (name, each) not in self._used]
            if unused and count >= self._per_replica * len(ready):
                return f"{name} sent {count} requests of {workload}, none of them to {unused}"
        return None


def _config_of(event: RecordedEvent) -> _FrontConfig:
    routes: Iterable[tuple[str, int, Iterable[tuple[Any, ...]]]] = event.facts["routes"]
    return _FrontConfig(
        event.at,
        frozenset(event.facts["workers"]),
        {
            workload: {
                assignment: _Endpoint(kind == "local", state in OPEN_STATES and weight > 0, state == "ready")
                for assignment, _, state, weight, kind in endpoints
            }
            for workload, _, endpoints in routes
        },
    )


def make_checkers() -> tuple[Checker, ...]:
    return (
        RouteChecker(),
        EjectionChecker(),
        RetryChecker(),
        FrontAdmissionChecker(),
        CrashingRequestChecker(),
        RecoveryChecker(),
    )
