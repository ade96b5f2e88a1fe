"""The judge of regions that trade finds each kind of violation in a record that holds just it, none in a sound one."""

import ast
import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.simulator.checkers import federation as module
from shoal.simulator.checkers.region import find_violations
from shoal.simulator.world.world import SimEvent

AWARD = {"by": "home", "what": "Award", "said": "w1", "bid": "b-1", "agreement": "g-1", "workload": "shop/text"}
GRANT = {"by": "away", "what": "Grant", "said": "w2", "bid": "b-1", "agreement": "g-1", "lease_s": 30.0}
RENEWED = {"by": "away", "what": "Renewed", "said": "w3", "agreement": "g-1", "nonce": "n", "lease_s": 30.0}
OFFER = {"by": "away", "what": "Offer", "said": "w4", "bid": "b-1", "hold_s": 10.0}


def at(time: float, kind: str, facts: Mapping[str, Any] | None = None, **more: Any) -> SimEvent:
    return SimEvent(time, kind, {**(facts or {}), **more})


def up(*regions: str) -> list[SimEvent]:
    return [at(0.0, "region.up", region=region) for region in regions]


def holds(time: float, *bids: str) -> SimEvent:
    return at(time, "holds", region="away", bids=bids)


def guests(time: float, *agreements: str) -> SimEvent:
    return at(time, "guests", region="away", agreements=agreements)


def runs_away(time: float, *, ready: bool = True) -> SimEvent:
    return at(time, "delegated", region="home", workloads=(("shop/text", "g-1", "away", ready, True),), leaving=())


def award_events(time: float, call: int = 1, **changed: Any) -> list[SimEvent]:
    """Said, delivered, granted, heard."""
    award, grant = {**AWARD, **changed}, {**GRANT, **changed}
    return [
        at(time, "said", award, call=call, target=changed.get("target", "away")),
        at(time + 0.1, "delivered", award, call=call, at=changed.get("target", "away")),
        at(time + 0.2, "answered", {**grant, "by": changed.get("target", "away")}, call=call, to="home"),
        at(time + 0.3, "heard", grant, call=call, to="home"),
    ]


def time_passes(time: float) -> SimEvent:
    return at(time, "said", by="x", what="Measure", said="m", call=99, target="y")


def ledger(region: str, counterpart: str, *words: str, evidence: str = "", **spoilt: Any) -> SimEvent:
    """A sound chain of these words about g-1; `spoilt` changes the last entry after the fact."""
    entries: list[dict[str, Any]] = []
    previous = ""
    for number, what in enumerate(words, start=1):
        entry = {
            "sequence": number, "at": 1.0, "what": what, "agreement": "g-1", "counterpart": counterpart,
            "workload": "shop/text", "code": "", "terms": "", "evidence": evidence, "previous": previous,
        }  # fmt: skip
        previous = hashlib.sha256(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        entries.append(entry)
    entries[-1].update(spoilt)
    return at(90.0, "ledger", region=region, entries=tuple(tuple(each.items()) for each in entries))


END = at(99.0, "run.ends")
SAID = base64.b64encode(b"word").decode()
WORD = at(1.0, "said", by="home", what="Notice", said=hashlib.sha256(b"word").hexdigest()[:12], call=5, target="away",
          agreement="g-9", code="", ends_s=0.0)  # fmt: skip
RENEWAL = {"by": "home", "what": "Renewal", "said": "w5", "agreement": "g-1", "sequence": 1, "nonce": "n"}
REFUSAL = {"by": "away", "what": "Refusal", "code": "HOLD_EXPIRED", "to": "home"}
LOST = {**REFUSAL, "code": "PEER_UNREACHABLE"}
RELEASE = {"by": "home", "what": "Release", "said": "w6", "solicitation": "s-1", "bid": "b-1"}
NOTICE = {"by": "away", "what": "Notice", "said": "w7", "agreement": "g-1", "code": "CORDONED", "ends_s": 30.0}

SOUND: dict[str, list[SimEvent]] = {
    "a hold ends in time": [
        *up("away"), holds(1.0, "b-1"), at(1.1, "answered", OFFER, call=1, to="home"), holds(13.5), time_passes(90.0),
    ],
    "a region that is down holds nothing": [
        *up("away"), holds(1.0, "b-1"), at(1.1, "answered", OFFER, call=1, to="home"),
        at(5.0, "region.down", region="away"), time_passes(90.0), at(91.0, "region.up", region="away"), holds(91.5),
    ],
    "an award again is the same award": [*award_events(1.0), *award_events(3.0, call=2)],
    "after a refusal another may be awarded": [
        at(1.0, "said", AWARD, call=1, target="away"), at(2.0, "heard", REFUSAL, call=1),
        *award_events(3.0, call=2, bid="b-2", agreement="g-2"),
    ],
    "after a release that was acknowledged": [
        at(1.0, "said", AWARD, call=1, target="away"), at(2.0, "said", RELEASE, call=2, target="away"),
        at(2.5, "heard", by="away", what="Done", call=2, to="home"),
        *award_events(3.0, call=3, bid="b-2", agreement="g-2"),
    ],
    "after a notice": [
        *award_events(1.0), at(2.0, "delivered", NOTICE, call=2, at="home"),
        *award_events(3.0, call=3, bid="b-2", agreement="g-2"),
    ],
    "a lease that is renewed goes on": [
        *up("home", "away"), *award_events(1.0), guests(1.2, "g-1"), runs_away(2.0),
        at(25.0, "said", RENEWAL, call=2, target="away"), at(25.1, "answered", RENEWED, call=2, to="home"),
        at(25.2, "heard", RENEWED, call=2, to="home"), time_passes(50.0), guests(59.0), runs_away(54.0, ready=False),
        time_passes(95.0),
    ],
    "while one is being left": [
        *award_events(1.0), at(2.0, "delegated", region="home", workloads=(), leaving=("g-1",)),
        *award_events(3.0, call=3, bid="b-2", agreement="g-2"),
    ],
    "after a lease that was over": [*award_events(1.0), *award_events(32.0, call=2, bid="b-2", agreement="g-2")],
    "two ledgers with one story": [
        WORD, ledger("home", "away", "awarded", "granted", "breached", "ended", evidence=SAID),
        ledger("away", "home", "granted", "expired", evidence=SAID), END,
    ],
    "what was awarded and never granted": [
        ledger("home", "away", "awarded", "released"), ledger("away", "home", "offered", "expired"), END,
    ],
    "what fits": [at(1.0, "room", region="away", devices=(("edge-1", 8, 8),))],
}  # fmt: skip

VIOLATED: dict[str, list[list[SimEvent]]] = {
    "HoldChecker": [
        [*up("away"), holds(1.0, "b-1"), at(1.1, "answered", OFFER, call=1, to="home"), time_passes(14.5)],
        [*up("away"), holds(1.0, "b-1"), time_passes(90.0)],
        [
            *up("away"), holds(1.0, "b-1"), at(1.1, "answered", OFFER, call=1, to="home"),
            at(5.0, "region.down", region="away"), at(91.0, "region.up", region="away"), time_passes(94.5),
        ],
        [at(1.1, "answered", OFFER, call=1, to="home"), *award_events(15.0), guests(15.2, "g-1")],
    ],
    "AwardChecker": [
        [at(1.0, "said", AWARD, call=1, target="away"), *award_events(3.0, call=2, bid="b-2", agreement="g-2")],
        [
            at(1.0, "said", AWARD, call=1, target="away"), at(2.0, "heard", LOST, call=1),
            *award_events(3.0, call=2, bid="b-2", agreement="g-2"),
        ],
        [*award_events(1.0), *award_events(3.0, call=2, bid="b-2", agreement="g-2")],
        [*award_events(1.0), *award_events(3.0, call=2, bid="b-2")],
    ],
    "AgreementChecker": [
        [*award_events(1.0), *award_events(2.0, agreement="g-2")],
        [*award_events(1.0), *award_events(2.0, target="far")],
        [guests(1.0, "g-1")],
        [*award_events(1.0), guests(2.0, "g-1"), guests(3.0), guests(4.0, "g-1")],
    ],
    "LeaseChecker": [
        [*up("away"), *award_events(1.0), guests(1.2, "g-1"), time_passes(40.0)],
        [*up("home"), *award_events(1.0), runs_away(2.0), time_passes(35.0)],
        [*up("home"), runs_away(2.0), time_passes(6.0)],
    ],
    "CapacityChecker": [[at(1.0, "room", region="away", devices=(("edge-1", 9, 8),))]],
    "LedgerChecker": [
        [at(1.0, "refused", call=1, at="fed", to="home", code="LEDGER_BROKEN")],
        [ledger("home", "away", "awarded", "granted", previous="0" * 64)],
        [ledger("home", "away", "awarded", "granted", sequence=3)],
        [ledger("home", "away", "granted", evidence=SAID)],
        [ledger("home", "away", "awarded", "ended", "renewed"), END],
        [ledger("home", "away", "awarded", "granted"), ledger("away", "home", "offered", "expired"), END],
        [ledger("home", "away", "awarded", "granted", "ended"), ledger("away", "home", "granted"), END],
        [ledger("home", "away", "awarded", "granted", "granted"), ledger("away", "home", "granted"), END],
    ],
    "AcknowledgedWritesChecker": [
        [
            at(1.0, "store.commit", store="home", revision=1, puts=(("k", "v"),), deletes=()),
            at(1.1, "store.acked", store="home", revision=1),
            at(2.0, "store.recovered", store="away", revision=0, contents=()),
            at(2.0, "store.recovered", store="home", revision=0, contents=()),
        ],
    ],
}  # fmt: skip


def violations_of(events: list[SimEvent]) -> list[str]:
    return find_violations(sorted(events, key=lambda event: event.at), module.make_checkers())


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_is_left_alone(name: str) -> None:
    assert violations_of(SOUND[name]) == []


@pytest.mark.parametrize(
    ("rule", "index"), [(rule, index) for rule, stories in VIOLATED.items() for index in range(len(stories))]
)
def test_each_rule_finds_its_violation(rule: str, index: int) -> None:
    told = violations_of(VIOLATED[rule][index])
    assert rule in {each.split(": ")[1] for each in told}, told


def test_every_rule_has_a_violation_here() -> None:
    assert {type(rule).__name__ for rule in module.make_checkers()} == VIOLATED.keys()


def test_the_judge_imports_nothing_of_the_code_under_test() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    assert {name for name in names if name.startswith("shoal.")} == {"shoal.simulator.checkers.region"}
