"""Reads the record of a run and reports what must not have happened.

The checkers import nothing of the code under test and read only events (`at`, `kind`, `facts`). Each one is a small
model of a promise; it takes the events one by one and returns violations.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

DUPLICATE_MARK = "."
"""Separates the name that a duplicate machine reports from its number; both together are the name of a host."""


class RecordedEvent(Protocol):
    """An event of the record."""

    @property
    def at(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...


class Checker(Protocol):
    def check(self, event: RecordedEvent) -> str | None:
        """The violation that this event causes; None: none."""
        ...


class AcknowledgedWritesChecker:
    """I6, I9: what a store acknowledged is there after every restart, and nothing that was never written."""

    def __init__(self) -> None:
        self._stores: dict[str, _StoreHistory] = defaultdict(_StoreHistory)

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "store.commit":
                self._stores[facts["store"]].commits[facts["revision"]] = facts
            case "store.acked":
                self._stores[facts["store"]].acknowledged.add(facts["revision"])
            case "store.recovered":
                return self._stores[facts["store"]].check_recovery(facts["revision"], dict(facts["contents"]))
        return None


class _StoreHistory:
    """The history of one store."""

    def __init__(self) -> None:
        self.commits: dict[int, Mapping[str, Any]] = {}
        self.acknowledged: set[int] = set()

    def check_recovery(self, revision: int, contents: dict[str, str]) -> str | None:
        lost = sorted(acked for acked in self.acknowledged if acked > revision)
        if lost:
            return f"acknowledged writes are lost: revisions {lost}, recovered to {revision}"
        self.commits = {number: commit for number, commit in self.commits.items() if number <= revision}
        expected: dict[str, str] = {}
        for number in sorted(self.commits):
            expected.update(self.commits[number]["puts"])
            for key in self.commits[number]["deletes"]:
                expected.pop(key, None)
        if expected != contents:
            wrong = sorted(key for key in expected.keys() | contents.keys() if expected.get(key) != contents.get(key))
            return f"the store came back with other contents than were written: {wrong}"
        return None


class JournalChecker:
    """I9 on agents: the next boot loads the saved desired set, or a newer one."""

    def __init__(self) -> None:
        self._saved: dict[str, tuple[Any, str]] = {}

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "journal.saved":
            self._saved[event.facts["node"]] = (event.facts["version"], event.facts["content"])
        if event.kind == "journal.loaded":
            node, version = event.facts["node"], event.facts["version"]
            saved = self._saved.get(node)
            if saved is not None and event.facts["content"] != saved[1]:
                older = version is None or (version[0] == saved[0][0] and version[1:] <= saved[0][1:])
                if older:
                    return f"{node} saved {saved[0]} and loaded {version}"
            if version is not None:
                self._saved[node] = (version, event.facts["content"])
        return None


class PersistenceChecker:
    """Agents act on and report only what is on their disk. Within one history, term and generation never go back, and
    an agent never returns to a history that it left."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = defaultdict(set)
        self._versions: dict[str, list[tuple[str, int, int]]] = defaultdict(list)

    def check(self, event: RecordedEvent) -> str | None:
        match event.kind:
            case "journal.saved" | "journal.loaded" if event.facts["version"] is not None:
                return self._check_saved(event.facts["node"], event.facts["version"], event.facts["assignments"])
            case "worker.start":
                node, assignment = event.facts["node"], event.facts["assignment"]
                if assignment not in self._known[node]:
                    return f"{node} started {assignment} before any desired set with it was on its disk"
            case "agent.sent" if event.facts["what"] == "status" and event.facts["version"] is not None:
                if event.facts["version"] not in self._versions[event.facts["node"]]:
                    return f"{event.facts['node']} reported {event.facts['version']}, which is not on its disk"
        return None

    def _check_saved(self, node: str, version: tuple[str, int, int], assignments: Iterable[str]) -> str | None:
        self._known[node].update(assignments)
        before = self._versions[node]
        if version in before[-1:]:
            return None
        before.append(version)
        same = [each for each in before[:-1] if each[0] == version[0]]
        if any(each[1] > version[1] or each[2] > version[2] for each in same):
            return f"{node} went back to {version} after {same[-1]}"
        if same and before[-2][0] != version[0]:
            return f"{node} took up history {version[0]} again after {before[-2][0]}"
        return None


class DesiredSetChecker:
    """A (node, history, generation) names one desired set, and a coordinator never sends an older one."""

    def __init__(self) -> None:
        self._content: dict[tuple[str, str, int], str] = {}
        self._newest: dict[tuple[str, str], int] = defaultdict(int)
        self._epoch: dict[tuple[str, str], int] = defaultdict(int)

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        if event.kind == "link.opened":
            key = (facts["node"], facts["history"])
            if facts["epoch"] <= self._epoch[key]:
                return f"epoch {facts['epoch']} for {facts['node']} after {self._epoch[key]}"
            self._epoch[key] = facts["epoch"]
        if event.kind == "coordinator.sent" and facts["what"] == "desired":
            history, _, generation = facts["version"]
            node = facts["node"]
            known = self._content.setdefault((node, history, generation), facts["content"])
            if known != facts["content"]:
                return f"two desired sets for {node} are both {facts['version']}"
            if generation < self._newest[node, history]:
                return f"{node} was sent {facts['version']} after generation {self._newest[node, history]}"
            self._newest[node, history] = generation
        return None


class ReplicaChecker:
    """I4, I10 and make-before-break: only warmed replicas answer or are reported ready, none is stopped with requests
    in flight, and the last healthy replica of a wanted workload is not stopped."""

    GRACE_S = 15.0
    """Most seconds by which the report that a coordinator acts on may be old."""
    DRAIN_S = 29.0

    def __init__(self) -> None:
        self._ready: dict[tuple[str, str], str] = {}
        self._started: set[tuple[str, str]] = set()
        self._was_ready: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        self._closed_at: dict[tuple[str, str], float] = {}
        self._first_started_at: dict[tuple[str, str], float] = {}
        self._wanted: dict[str, float] = {}
        """Workload -> since when it is wanted; replicas from before a deletion do not count after it is applied again.
        """
        self._gap_replicas: set[str] = set()
        """Both replicas of a migration whose policy allows a gap: `GapChecker` checks those."""
        self._unloaded: dict[tuple[str, str], str] = {}
        """Replicas for which their front holds requests, without a worker or while it loads, and their workloads."""

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "move.step" if facts["gap_s"] > 0:
                self._gap_replicas |= {facts["source"], facts["target"]}
            case "worker.start":
                self._first_started_at.setdefault((facts["node"], facts["assignment"]), event.at)
                self._ready.pop((facts["node"], facts["assignment"]), None)
                self._started.add((facts["node"], facts["assignment"]))
            case "worker.ready":
                self._ready[facts["node"], facts["assignment"]] = facts["workload"]
                self._started.discard((facts["node"], facts["assignment"]))
            case "worker.died":
                self._end(event, (facts["node"], facts["assignment"]))
            case "worker.stop":
                return self._check_stop(event)
            case "front.configured":
                self._on_configured(event)
            case "request.answered":
                if (facts["node"], facts["assignment"]) not in self._ready:
                    return f"a request was answered by {facts['assignment']} on {facts['node']}, which was not warm"
            case "agent.sent" if facts["what"] == "status":
                for assignment, phase in facts["phases"]:
                    if phase == "ready" and (facts["node"], assignment) in self._started - self._unloaded.keys():
                        return f"{facts['node']} reported {assignment} ready while it was loading"
            case "operator.wanted":
                self._wanted = {name: self._wanted.get(name, event.at) for name in facts["workloads"]}
        return None

    def _on_configured(self, event: RecordedEvent) -> None:
        node, open_now = event.facts["node"], set(event.facts["workers"])
        self._unloaded = {key: workload for key, workload in self._unloaded.items() if key[0] != node}
        self._unloaded |= {(node, name): workload for name, workload in event.facts["unloaded"]}
        for key in self._ready:
            if key[0] == node:
                if key[1] in open_now:
                    self._closed_at.pop(key, None)
                else:
                    self._closed_at.setdefault(key, event.at)

    def _check_stop(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        key = (facts["node"], facts["assignment"])
        was_ready = key in self._ready
        closed_at = self._closed_at.get(key)
        workload = self._ready.get(key, "")
        self._end(event, key)
        if not was_ready:
            return None
        if facts["in_flight"] and event.at - (event.at if closed_at is None else closed_at) < self.DRAIN_S:
            return f"{key[1]} on {key[0]} was stopped with {facts['in_flight']} requests in flight"
        since = self._wanted.get(workload) if key[1] not in self._gap_replicas else None
        if (
            since is not None
            and self._first_started_at[key] > since
            and not self._has_other_replica(workload, event.at)
        ):
            return f"the last ready replica of {workload}, {key[1]} on {key[0]}, was stopped"
        return None

    def _has_other_replica(self, workload: str, now: float) -> bool:
        if workload in self._ready.values() or workload in self._unloaded.values():
            return True
        ends = [at for key, at in self._was_ready[workload].items() if now - at < self.GRACE_S and at < now]
        return bool(ends)

    def _end(self, event: RecordedEvent, key: tuple[str, str]) -> None:
        self._started.discard(key)
        self._closed_at.pop(key, None)
        workload = self._ready.pop(key, None)
        if workload is not None:
            self._was_ready[workload][key] = event.at


class VerificationChecker:
    """I4: a replica whose node must verify it answers no request before it has passed, or before verification is
    waived."""

    def __init__(self) -> None:
        self._unverified: set[tuple[str, str]] = set()
        self._passed: set[tuple[str, str]] = set()

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "journal.saved":
                node, asked = facts["node"], set(facts["verifying"])
                freed = {(node, name) for name in facts["assignments"] if name not in asked}
                known = {key[1] for key in self._passed if key[0] == node}
                self._unverified = (self._unverified - freed) | {(node, name) for name in asked - known}
            case "verified" if facts["passed"]:
                self._passed.add((facts["node"], facts["assignment"]))
                self._unverified.discard((facts["node"], facts["assignment"]))
            case "request.answered" if (facts["node"], facts["assignment"]) in self._unverified:
                return f"a request was answered by {facts['assignment']} on {facts['node']}, which was not verified"
        return None


class MigrationChecker:
    """A live migration goes forward or rolls back and never restarts. Traffic shifts to its new replica only once that
    has passed verification, and no front gives it more than the written step allows while the old one serves."""

    ORDER = (
        "planned", "reserved", "staging", "warming", "verifying", "shifting 1", "shifting 2", "draining", "done",
        "rolling_back", "aborted",
    )  # fmt: skip
    ORDER_WITH_GAP = (
        "planned", "reserved", "clearing", "staging", "warming", "verifying", "draining", "done", "rolling_back",
        "returning", "aborted",
    )  # fmt: skip
    ENDS = ("done", "aborted")

    def __init__(self) -> None:
        self._steps: dict[str, str] = {}
        self._verifies: dict[str, bool] = {}
        """Migration -> whether it was to be verified when it began."""
        self._passed: set[str] = set()
        self._share: dict[str, float] = {}
        """New replica -> largest share of the migration's requests that it may take, 0 to 1."""
        self._sources: dict[str, str] = {}
        """New replica -> old one, of migrations that are not over."""
        self._cleared = set[str]()

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "move.step":
                return self._check_step(facts)
            case "verified" if facts["passed"]:
                self._passed.add(facts["migration"])
            case "front.configured":
                for _, _, endpoints in facts["routes"]:
                    weights = {assignment: weight for assignment, _, _, weight, _ in endpoints}
                    for target, source in self._sources.items():
                        new, old = weights.get(target, 0), weights.get(source, 0)
                        if source in weights and new > (self._share[target] + 0.01) * (old + new):
                            return f"{facts['node']} gives {target} {new} of {old + new}, too much for now"
        return None

    def _check_step(self, facts: Mapping[str, Any]) -> str | None:
        name, step, target = facts["migration"], facts["step"], facts["target"]
        before = self._steps.get(name, "planned")
        self._verifies.setdefault(name, facts["verifies"])
        self._steps[name] = step
        if before in self.ENDS and step != before:
            return f"{name} is {step} after it was {before}"
        order = self.ORDER_WITH_GAP if facts["gap_s"] > 0 else self.ORDER
        if before == "staging" and step == "clearing" and name not in self._cleared:
            before = "reserved"  # the bytes are fetched before the gap; within it the model is staged again
        self._cleared |= {name} if step == "clearing" else set()
        if order.index(step) < order.index(before):
            return f"{name} went back from {before} to {step}"
        if step == "shifting 1" and self._verifies[name] and name not in self._passed:
            return f"{name} shifts, and {target} was not verified"
        if target:
            share = 1.0 if step == "draining" else facts["share"]
            self._share[target] = max(share, self._share.get(target, 0.0))
            self._sources[target] = facts["source"]
        if step in self.ENDS:
            self._sources.pop(target, None)
        return None


class GapChecker:
    """A migration with a gap leaves the workload unserved no longer than its policy allows, roll-back included, unless
    processes died meanwhile."""

    SLACK_S = 5.0
    """A roll-back starts in time by the duration of the first load; the next load may take somewhat longer."""

    def __init__(self) -> None:
        self._outages: dict[str, tuple[float, float]] = {}
        """Migration -> (since when nobody serves, seconds that its policy allows)."""

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "move.step" if facts["step"] == "clearing":
                self._outages.setdefault(facts["migration"], (event.at, facts["gap_s"]))
            case "worker.died" | "agent.died" | "coordinator.died" | "front.died":
                self._outages.clear()
            case "worker.ready":
                dark, self._outages = self._outages, {}
                for migration, (since, allowed_s) in dark.items():
                    if event.at - since > allowed_s + self.SLACK_S:
                        return f"{migration}: nobody served for {event.at - since:.1f} s, {allowed_s:g} s are allowed"
        return None


class PoisonChecker:
    """After three crashes of its own while loading, on whichever nodes, a model is started on no other node."""

    CRASHES = 3
    GRACE_S = 30.0
    """Seconds until the coordinator knows of the third crash and every node has its answer."""

    def __init__(self) -> None:
        self._crashes: dict[str, list[float]] = defaultdict(list)
        self._touched: dict[str, set[str]] = defaultdict(set)

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "worker.died" and event.facts["why"] == "crashed at load":
            self._crashes[event.facts["model"]].append(event.at)
        if event.kind == "worker.start":
            model, node = event.facts["model"], _identity_of(event.facts["node"])
            crashes = self._crashes[model]
            known = len(crashes) >= self.CRASHES and event.at > crashes[self.CRASHES - 1] + self.GRACE_S
            if known and node not in self._touched[model]:
                return f"{model} crashed {len(crashes)} times, and was then started on {node}"
            self._touched[model].add(node)
        return None


class ReconnectChecker:
    """Retries are spread: agents that failed together do not reconnect together repeatedly."""

    WINDOW_S = 0.005
    ROUNDS = 4

    def __init__(self) -> None:
        self._calls: dict[str, list[float]] = defaultdict(list)

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "link.opened":
            self._calls.pop(event.facts["node"], None)
        if event.kind == "link.connect":
            node = event.facts["node"]
            mine = self._calls[node]
            mine.append(event.at)
            for other, calls in self._calls.items():
                if _identity_of(other) != _identity_of(node) and self._are_synchronised(mine, calls):
                    return f"{node} and {other} called at the same moments, {self.ROUNDS} times in a row"
        return None

    def _are_synchronised(self, mine: list[float], others: list[float]) -> bool:
        if len(mine) <= self.ROUNDS or len(others) <= self.ROUNDS:
            return False
        pairs = zip(mine[-self.ROUNDS :], others[-self.ROUNDS :], strict=True)
        return all(abs(one - other) < self.WINDOW_S for one, other in pairs)


class DocumentChecker:
    """Every acknowledged change of a document is kept: the final content is the last acknowledged change, or one
    without an answer."""

    def __init__(self) -> None:
        self._possible: dict[str, set[str]] = defaultdict(lambda: {""})

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "operator.done" if facts["outcome"] == "ok":
                self._possible[facts["document"]] = {facts["content"]}
            case "operator.done" if facts["outcome"] == "unknown":
                self._possible[facts["document"]].add(facts["content"])
            case "operator.read":
                held = dict(facts["documents"])
                for name, possible in self._possible.items():
                    if held.get(name, "") not in possible:
                        return f"{name} is {held.get(name, '')!r}, which is none of {sorted(possible)}"
        return None


class ClientChecker:
    """If another process can answer what a killed one was asked, no client is refused by both gateways. A client that
    retries for long enough is answered, whatever was killed."""

    def __init__(self) -> None:
        self._strict = False

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "matrix.begins":
                self._strict = facts["strict"]
            case "matrix.calms":
                self._strict = False
            case "client.failed" if self._strict:
                return f"request {facts['number']} was refused with {facts['code']}, though there was another replica"
            case "client.lost":
                return f"request {facts['number']} was lost: {facts['code']}"
        return None


class StoredStateChecker:
    """A coordinator acts on what its store holds: a restart would change nothing."""

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "region.memory":
            acts_on, stored = dict(event.facts["acts_on"]), dict(event.facts["stored"])
            wrong = sorted(key for key in acts_on.keys() | stored.keys() if acts_on.get(key) != stored.get(key))
            if wrong:
                told = ", ".join(f"{key}: {acts_on.get(key)}, stored is {stored.get(key)}" for key in wrong)
                return f"the coordinator does not act on what it stored: {told}"
        return None


class AuditChecker:
    """The audit log is one chain that holds every written entry once."""

    def __init__(self) -> None:
        self._written: list[str] = []

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "audit.kept":
            self._written.append(event.facts["subject"])
        if event.kind == "operator.audit":
            previous, number = "", 0
            for sequence, subject, follows, digest in event.facts["entries"]:
                if (sequence, follows) != (number + 1, previous):
                    return f"entry {sequence} ({subject}) does not follow from entry {number}"
                previous, number = digest, sequence
            held = Counter(subject for _, subject, _, _ in event.facts["entries"])
            wrong = sorted(subject for subject in self._written if held[subject] != 1)
            if wrong:
                return f"entries that were written are not there once: {wrong}"
        return None


class EnrolmentChecker:
    """A token becomes at most one certificate, every certificate has its token, and an enrolled node holds one."""

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "enrolled":
            used, certificates = event.facts["used"], event.facts["certificates"]
            if len(used) != len(certificates) or len(set(certificates)) != len(certificates):
                return f"{len(used)} tokens became the certificates {certificates}"
            if event.facts["holds"] not in certificates:
                return f"the node holds {event.facts['holds']}, which the region never issued: {certificates}"
        return None


def _identity_of(node: str) -> str:
    """The name that a machine reports; a duplicate reports the name of its original."""
    return node.partition(DUPLICATE_MARK)[0]


def make_checkers() -> tuple[Checker, ...]:
    return (
        AcknowledgedWritesChecker(),
        JournalChecker(),
        PersistenceChecker(),
        DesiredSetChecker(),
        ReplicaChecker(),
        VerificationChecker(),
        MigrationChecker(),
        GapChecker(),
        PoisonChecker(),
        ReconnectChecker(),
        DocumentChecker(),
        ClientChecker(),
        StoredStateChecker(),
        AuditChecker(),
        EnrolmentChecker(),
    )


def find_violations(history: Iterable[RecordedEvent], checkers: Iterable[Checker] | None = None) -> list[str]:
    """Every violation in the order of events, with its time and the checker's name. checkers: None means those of one
    region."""
    found: list[str] = []
    checkers = make_checkers() if checkers is None else tuple(checkers)
    for event in history:
        for rule in checkers:
            violation = rule.check(event)
            if violation is not None:
                found.append(f"{event.at:.4f} s: {type(rule).__name__}: {violation}")
    return found
