"""Negotiations between real processes, while they are killed and cut off at seeded moments (issue 5, must-show 3).

Three regions and a federation, as `shoal dev up` starts them. Workloads of all three are to run in one of the others;
in the midst of it coordinators and the federation are killed or cut off, when they are asked for as when they are taken
back. Guests are placed on nodes that are ready at once: it is the talk between regions that is put to the test.
Four pieces of 50 negotiations each: `pytest -m long tests/integration/federation/test_negotiations.py`; each is its own
by `-k piece-2`. What came of it is judged by what each region wrote.
"""

import hashlib
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random  # noqa: TID251 - of a seed that is told
from threading import Event
from typing import Any

import pytest

from harness.cluster.delegation import FAR, HOME, NEAR, in_regions, wait_all_acquainted
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, region
from harness.fakes.link_peers import LinkPeer, LinkPeers
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.simulator.checkers.federation import FINAL_ENTRIES, LedgerChecker
from shoal.types.agreement import Award
from shoal.types.chain import LedgerEntry
from shoal.v1 import federation_pb2, operator_pb2
from shoal.wire import nouns, signed_envelope
from shoal.wire.enrol import redeem

REGIONS = (HOME, NEAR, FAR)
SERVICE = "federation-1"
STRIKES = (("kill", "resume"), ("cut", "heal"))
PIECES = 4
BATCHES = 5
TOGETHER = 10
HOLD_S = 10.0
LEASE_S = 30.0
ALLOWANCE_S = 5.0
SLACK_S = 5.0
"""For a busy machine."""
REST_S = 150.0
"""An award whose outcome nobody can say is given up after 130 s."""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """An event for the simulator's judge of ledgers."""

    at: float
    kind: str
    facts: Mapping[str, Any]


@dataclass
class NegotiationRun:
    """One piece. outages: by member, from when to when it could not act."""

    stack: DevStack
    rng: Random
    outages: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def inject_faults(self) -> Iterator[None]:
        """One to three of them are killed or cut off meanwhile, one after the other, each for a moment."""
        strikes = [
            (self.rng.choice((SERVICE, *map(self.coordinator, REGIONS))), *self.rng.choice(STRIKES),
             self.rng.uniform(0.0, 0.7), self.rng.uniform(0.2, 3.0))
            for _ in range(self.rng.choice((1, 2, 3)))
        ]  # fmt: skip
        with ThreadPoolExecutor(1) as beside:
            struck = [beside.submit(self._strike, *each) for each in strikes]
            yield
            for each in struck:
                each.result()
        wait_all_acquainted(self.stack)

    def _strike(self, name: str, verb: str, end: str, after_s: float, for_s: float) -> None:
        clock = SystemClock()
        passes(after_s)
        began = clock.wall()
        self.stack.control.break_member(name, verb)
        passes(for_s)
        self.stack.control.break_member(name, end)
        self.faults[f"{verb} {'federation' if name == SERVICE else 'coordinator'}"] += 1
        self.outages.setdefault(name, []).append((began, clock.wall()))

    def coordinator(self, name: str) -> str:
        return self.stack.info.stack.for_region(name).coordinator.name

    def out_s(self, name: str, since: float, until: float) -> float:
        """For how much of that time a region's coordinator, or the federation, was away; its start counts too."""
        outages = [*self.outages.get(self.coordinator(name), []), *self.outages.get(SERVICE, [])]
        return sum(max(0.0, min(until, end + SLACK_S) - max(since, began)) for began, end in outages if began < until)


def passes(seconds: float) -> None:
    """Time: when a fault strikes, and for how long, is drawn, and there is nothing to wait for."""
    Event().wait(seconds)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """Each region has the model, and one node more than `dev up` gives it, which alone takes work."""
    with region(tmp_path_factory.mktemp("negotiations"), 1, regions=3, federation=1) as found:
        path = found.folder / "relu.onnx"
        path.write_bytes(relu().SerializeToString())
        ends = list[LinkPeer]()
        for name in REGIONS:
            of = found.info.stack.for_region(name)
            with found.api(name) as api:
                api.push(path, "relu")
                for member in of.agents:
                    api.cordon(member.name, cordoned=True)
                token = api.create_token("agent", "swift", 300.0, {"entry": "*"}).token
            folder = found.folder / f"swift-{name}"
            redeem(of.coordinator.addresses["enrol"], token, "swift").write(folder)
            ends.append(LinkPeer(folder, name, "swift", of.coordinator.addresses["link"]))
        with LinkPeers(ends).live() as alive:
            wait_until(alive.are_connected, 60, "the regions to have a node that is ready at once")
            yield found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("piece", range(PIECES), ids=lambda piece: f"piece-{piece}")
def test_f44_negotiations_of_real_processes_under_kills_and_cuts(stack: DevStack, piece: int) -> None:
    battle, clock = NegotiationRun(stack, Random(f"negotiations {piece}")), SystemClock()
    began, granted = clock.now(), 0
    before = {name: len(ledger(stack, name)) for name in REGIONS}
    for batch in range(BATCHES):
        wanted = draw_workloads(battle.rng, f"n{piece}-{batch}")
        with battle.inject_faults():
            for name, (origin, where) in wanted.items():
                ask(partial(stack.apply, in_regions(name, *where), origin))
        wait_until(partial(are_all_agreed, stack, wanted), REST_S, "an agreement for each", every_s=0.3)
        granted += len(wanted)
        with battle.inject_faults() if battle.rng.random() < 0.5 else nullcontext():
            for name, (origin, _) in wanted.items():
                ask(partial(delete_if_present, stack, name, origin))
        wait_until(lambda: not any(in_force(stack).values()), REST_S, "every agreement to be over", every_s=0.3)
    wait_until(
        lambda: not open_holds(new_entries(stack, before)), HOLD_S + SLACK_S, "every hold to be over", every_s=0.5
    )
    fresh = new_entries(stack, before)
    violations = [
        *describe_migrations(stack),
        *awarded_twice(fresh),
        *one_sided(battle, fresh),
        *overdue_holds(battle, fresh),
    ]
    assert violations == []
    for name in REGIONS:
        with stack.api(name) as api:
            wrong = [check.name for check in api.doctor().checks if "edger" in check.name and not check.ok]
        assert wrong == [], name
    said_of = Counter(f"{entry.what} {entry.code}".strip() for entries in fresh.values() for entry in entries)
    record(
        "F44", "P", granted, piece=piece, struck=dict(sorted(battle.faults.items())),
        entries=dict(sorted(said_of.items())), took_s=round(clock.now() - began, 1),
    )  # fmt: skip


def draw_workloads(rng: Random, prefix: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Workloads: whose each is, and where it may run."""
    wanted = {}
    for number in range(TOGETHER):
        origin, *others = rng.sample(REGIONS, 3)
        wanted[f"{prefix}-{number}"] = (origin, tuple(others[: rng.choice((1, 2))]))
    return wanted


def ask(call: Callable[[], object]) -> None:
    """Of a coordinator that may be away: until it has done it."""
    wait_until(lambda: call() or True, WAIT_TIMEOUT_S, "the coordinator to answer", every_s=0.1)


def delete_if_present(stack: DevStack, name: str, origin: str) -> None:
    with stack.api(origin) as api:
        if name in [view.workload.name for view in api.get("workloads").workloads if view.state != "deleting"]:
            api.delete("workload", name)


def in_force(stack: DevStack) -> dict[str, dict[str, operator_pb2.AgreementView]]:
    """By region and side, what it holds to be agreed."""
    found: dict[str, dict[str, operator_pb2.AgreementView]] = {}
    for name in REGIONS:
        with stack.api(name) as api:
            for view in api.get("agreements").agreements:
                found.setdefault(f"{name} {view.side}", {})[view.agreement] = view
    return found


def are_all_agreed(stack: DevStack, wanted: Collection[str]) -> bool:
    """Whether each is in force by one agreement, which both sides know, and nothing else is."""
    views = in_force(stack)
    own, theirs = dict[str, list[str]](), dict[str, list[str]]()
    for side, found in views.items():
        listed = own if side.endswith("origin") else theirs
        for agreement, view in found.items():
            if side.endswith("origin") and view.state != "active":
                return False
            listed.setdefault(view.workload.name, []).append(agreement)
    return own == theirs and own.keys() == {*wanted} and all(len(each) == 1 for each in own.values())


def new_entries(stack: DevStack, before: Mapping[str, int]) -> dict[str, list[LedgerEntry]]:
    """By region, what its ledger says since it had so many entries."""
    return {name: ledger(stack, name)[count:] for name, count in before.items()}


def ledger(stack: DevStack, name: str) -> list[LedgerEntry]:
    with stack.api(name) as api:
        return [nouns.from_wire(LedgerEntry, entry) for entry in api.get("ledger").ledger]


def describe_migrations(stack: DevStack) -> list[str]:
    """Each ledger is one chain, what it has of another region that region signed, and both sides tell one story."""
    judge, found = LedgerChecker(), list[str | None]()
    for name in REGIONS:
        entries = ledger(stack, name)
        for entry in entries:
            if entry.evidence:
                evidence = b64decode(entry.evidence)
                message = federation_pb2.Said.FromString(evidence)
                signed_envelope.check(message, message.kind, to=message.to, roots_of=roots_of(stack), wall=entry.at)
                assert message.by == entry.counterpart, entry
                judge.check(LedgerRecord(entry.at, "said", {"said": hashlib.sha256(evidence).hexdigest()[:12]}))
        facts = {"region": name, "entries": [asdict(entry) for entry in entries]}
        found.append(judge.check(LedgerRecord(0.0, "ledger", facts)))
    found.append(judge.check(LedgerRecord(0.0, "run.ends", {})))
    return [each for each in found if each]


def roots_of(stack: DevStack) -> signed_envelope.RootsOf:
    return lambda name: ((stack.folder / f"swift-{name}" / "ca.pem").read_text(),)


def awarded_twice(ledgers: Mapping[str, list[LedgerEntry]]) -> list[str]:
    """Workloads that were awarded while an award before was neither known to be none nor given notice of."""
    found = list[str]()
    for name, entries in ledgers.items():
        mine = {entry.agreement: entry.workload for entry in entries if entry.what == "awarded"}
        waiting = dict[str, str]()
        for entry in entries:
            if entry.agreement not in mine:
                continue
            workload = mine[entry.agreement]
            if entry.what == "awarded":
                if workload in waiting:
                    found.append(f"{name} awarded {workload} as {entry.agreement}, and as {waiting[workload]} before")
                waiting[workload] = entry.agreement
            elif entry.what in (*FINAL_ENTRIES, "noticed") and waiting.get(workload) == entry.agreement:
                del waiting[workload]
    return found


def one_sided(battle: NegotiationRun, ledgers: Mapping[str, list[LedgerEntry]]) -> list[str]:
    """Agreements that one side held longer than a lease after they were over for the other; granted twice."""
    over, granted = dict[tuple[str, str], float](), Counter[tuple[str, str]]()
    sides = dict[str, set[str]]()
    for name, entries in ledgers.items():
        for entry in entries:
            if entry.what in ("granted", "awarded"):
                sides.setdefault(entry.agreement, set()).add(name)
                granted[name, entry.agreement] += entry.what == "granted"
            if entry.what in FINAL_ENTRIES and entry.agreement in sides:
                over.setdefault((entry.agreement, name), entry.at)
    found = [f"{name} granted {agreement} {count} times" for (name, agreement), count in granted.items() if count > 1]
    for agreement, both in sorted(sides.items()):
        ends = {name: over.get((agreement, name)) for name in both}
        if None in ends.values():
            found.append(f"{agreement} is not over for {[name for name, at in ends.items() if at is None]}")
            continue
        late = max(ends, key=lambda name: ends[name] or 0.0)
        last = max(at or 0.0 for at in ends.values())
        gap = last - min(at or 0.0 for at in ends.values())
        if gap > LEASE_S + ALLOWANCE_S + SLACK_S + battle.out_s(late, last - gap, last):
            found.append(f"{late} held {agreement} for {gap:.1f} s longer than the other")
    return found


def holds(entries: list[LedgerEntry]) -> Iterator[tuple[LedgerEntry, LedgerEntry | None]]:
    """Each hold, and what ended it."""
    ended = {entry.agreement: entry for entry in entries if entry.what in FINAL_ENTRIES}
    bids = {}
    for entry in entries:
        if entry.what == "granted" and entry.evidence:
            message = federation_pb2.Said.FromString(b64decode(entry.evidence))
            if message.kind == "award":
                bids[nouns.decode(Award, message.content).bid] = entry
    for entry in entries:
        if entry.what == "offered":
            yield entry, bids.get(entry.agreement) or ended.get(entry.agreement)


def open_holds(ledgers: Mapping[str, list[LedgerEntry]]) -> list[str]:
    return [f"{name} holds {bid.agreement}" for name, own in ledgers.items() for bid, end in holds(own) if end is None]


def overdue_holds(battle: NegotiationRun, ledgers: Mapping[str, list[LedgerEntry]]) -> list[str]:
    """Holds that outlived their time; a coordinator that was away ends them when it is back."""
    return [
        f"{name} held {bid.agreement} for {end.at - bid.at:.1f} s"
        for name, own in ledgers.items()
        for bid, end in holds(own)
        if end is not None and end.at - bid.at > HOLD_S + SLACK_S + battle.out_s(name, bid.at, end.at)
    ]
