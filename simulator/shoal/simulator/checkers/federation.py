"""What must not happen between regions that negotiate. Imports nothing of the code under test and reads only the
record.

Events read here:

- `said`, `delivered`, `answered`, `heard`, `refused` of messages (parts/inter_region.py);
- `region.up`, `region.down`, `region.stopped`, `region.awake`;
- what a region acts on, whenever it changes: `holds` (bids that it reserves room for), `guests` (agreements that it
  runs for others), `delegated` (own workloads that run elsewhere, and agreements that it is leaving), `room` (what it
  allocated of each device);
- at the end `ledger` (entries, oldest first) and `run.ends`.
"""

import hashlib
import json
from base64 import b64decode
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from shoal.simulator.checkers.region import AcknowledgedWritesChecker, Checker, RecordedEvent

SLACK_S: Final = 3.0
"""Seconds in which a running region has read its clock and written the consequence, after other writes to a slow disk.
"""
ALLOWANCE_S: Final = 5.0
"""Seconds that the delegate adds to a lease."""
UNKNOWN_TERM_S: Final = 60.0
"""Assumed length of a hold or lease whose answer was never sent, so that no event states it."""
CONFIRM_S: Final = 2.0
"""Seconds after its start for which an origin relies on its store: by then the delegate has confirmed or not."""
FINAL_ENTRIES: Final = frozenset({"released", "expired", "breached", "ended"})
"""Ledger entries that end an agreement."""
AFTER_BREACH_ENTRIES: Final = frozenset({"renewed", "ended"})
"""A breached agreement may serve on until something replaces it."""


class RegionAvailability:
    """Which regions can act, and since when: a region that is down or stopped keeps no deadline."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def on_event(self, event: RecordedEvent) -> None:
        match event.kind:
            case "region.up" | "region.awake":
                self._since[event.facts["region"]] = event.at
            case "region.down" | "region.stopped":
                self._since.pop(event.facts["region"], None)

    def since(self, region: str) -> float | None:
        return self._since.get(region)


class HoldChecker:
    """A hold that is not awarded is gone when it expires, and a later award is refused."""

    def __init__(self) -> None:
        self._regions = RegionAvailability()
        self._bids: dict[str, str] = {}
        self._granted: set[tuple[str, str]] = set()
        """(delegate, agreement) -> when its newest lease ends as the delegate counts, without the allowance."""
        self._until: dict[tuple[str, str], float] = {}
        self._held_bids: dict[str, tuple[str, ...]] = {}

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        self._regions.on_event(event)
        if event.kind == "answered" and facts["what"] == "Offer":
            self._until[facts["by"], facts["bid"]] = event.at + facts["hold_s"]
        if event.kind == "said" and facts["what"] == "Award":
            self._bids[facts["agreement"]] = facts["bid"]
        if event.kind == "guests":
            for agreement in facts["agreements"]:
                key = (facts["region"], self._bids.get(agreement, ""))
                if key not in self._granted and event.at > self._until.get(key, event.at) + SLACK_S:
                    self._granted.add(key)
                    return f"{key[0]} takes {agreement}, and the hold of {key[1]} was over at {self._until[key]:.1f} s"
                self._granted.add(key)
        if event.kind == "holds":
            self._held_bids[facts["region"]] = facts["bids"]
            for bid in facts["bids"]:
                self._until.setdefault((facts["region"], bid), event.at + UNKNOWN_TERM_S)
        for region, bids in self._held_bids.items():
            since = self._regions.since(region)
            for bid in bids:
                until = self._until[region, bid]
                if since is not None and event.at > max(until, since) + SLACK_S:
                    self._until[region, bid] = float("inf")
                    return f"{region} still holds room for {bid}, whose hold was over at {until:.1f} s"
        return None


class AwardChecker:
    """A workload has at most one award open: the next is sent only once each earlier one is known to have failed."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, float]] = defaultdict(dict)
        """Workload -> agreement -> until when it may still be granted."""
        self._named: dict[str, tuple[str, str]] = {}
        self._workloads: dict[str, str] = {}
        self._bids: dict[str, str] = {}
        self._calls: dict[int, tuple[str, str]] = {}
        self._asked: dict[int, float] = {}
        self._delegated: dict[str, set[str]] = defaultdict(set)

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind, facts.get("what"):
            case "said", "Award":
                return self._check_award(event)
            case "said", "Release":
                self._calls[facts["call"]] = ("Release", facts["bid"])
            case "said", "Renewal":
                self._calls[facts["call"]] = ("Renewal", facts["agreement"])
                self._asked[facts["call"]] = event.at
            case (("said" | "delivered"), "Notice"):
                self._close_agreement(facts["agreement"])
            case "heard", ("Grant" | "Renewed"):
                self._extend_lease(facts["agreement"], self._asked.get(facts["call"], event.at) + facts["lease_s"])
            case "heard", "Refusal" if facts["call"] in self._calls and facts["code"] != "PEER_UNREACHABLE":
                kind, name = self._calls[facts["call"]]
                self._close_agreement(self._bids.get(name, name) if kind == "Release" else name)
            case "delegated", _:
                self._on_delegated(facts["region"], {agreement for _, agreement, *_ in facts["workloads"]})
                for agreement in facts["leaving"]:
                    self._close_agreement(agreement)
            case "heard", "Done" if self._calls.get(facts["call"], ("", ""))[0] == "Release":
                self._close_agreement(self._bids.get(self._calls[facts["call"]][1], ""))
        return None

    def _check_award(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        agreement, workload = facts["agreement"], facts["workload"]
        self._calls[facts["call"]] = ("Award", agreement)
        self._asked[facts["call"]] = event.at
        meant = (facts["bid"], facts["target"])
        if self._named.setdefault(agreement, meant) != meant:
            return f"{agreement} names an award of {meant}, and before one of {self._named[agreement]}"
        self._workloads[agreement] = workload
        self._bids[facts["bid"]] = agreement
        others = [other for other, until in self._open[workload].items() if other != agreement and event.at < until]
        self._open[workload][agreement] = event.at + UNKNOWN_TERM_S
        if others:
            return f"{workload} is awarded as {agreement} while {others[0]} may be granted"
        return None

    def _extend_lease(self, agreement: str, until: float) -> None:
        """An agreement that the origin has an answer for stands while its lease does, as the origin counts it."""
        known = self._open[self._workloads.get(agreement, "")]
        if agreement in known:
            known[agreement] = until

    def _on_delegated(self, region: str, agreements: set[str]) -> None:
        """The origin sends nothing more to agreements that it no longer lists."""
        before, self._delegated[region] = self._delegated[region], agreements
        for agreement in before - agreements:
            self._close_agreement(agreement)

    def _close_agreement(self, agreement: str) -> None:
        self._open[self._workloads.get(agreement, "")].pop(agreement, None)


class AgreementChecker:
    """A hold becomes at most one agreement, an agreement has one bid and one region, and an ended one stays ended."""

    def __init__(self) -> None:
        self._granted: dict[str, tuple[str, str]] = {}
        self._of_bid: dict[tuple[str, str], str] = {}
        self._awarded: set[tuple[str, str]] = set()
        self._guests: dict[str, frozenset[str]] = defaultdict(frozenset)
        self._ended_agreements: set[tuple[str, str]] = set()
        self._reported: set[tuple[str, str]] = set()

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind, facts.get("what"):
            case "delivered", "Award":
                self._awarded.add((facts["at"], facts["agreement"]))
            case "answered", "Grant":
                agreement, bid, region = facts["agreement"], facts["bid"], facts["by"]
                if self._granted.setdefault(agreement, (region, bid)) != (region, bid):
                    return f"{agreement} is granted to {bid} of {region}, and to {self._granted[agreement]}"
                if self._of_bid.setdefault((region, bid), agreement) != agreement:
                    return f"{bid} of {region} is granted as {agreement} and as {self._of_bid[region, bid]}"
            case "guests", _:
                return self._check_guests(facts["region"], frozenset(facts["agreements"]))
        return None

    def _check_guests(self, region: str, agreements: frozenset[str]) -> str | None:
        before, self._guests[region] = self._guests[region], agreements
        self._ended_agreements |= {(region, each) for each in before - agreements}
        for each in sorted(agreements - before):
            if (region, each) not in self._awarded:
                return f"{region} runs {each}, which nobody awarded to it"
            if (region, each) in self._ended_agreements and (region, each) not in self._reported:
                self._reported.add((region, each))
                return f"{region} runs {each} again after it had ended"
        return None


class LeaseChecker:
    """No agreement is held by one side alone beyond its lease."""

    def __init__(self) -> None:
        self._regions = RegionAvailability()
        self._granted: dict[tuple[str, str], float] = {}
        """By delegate and agreement: when its newest lease ends as the delegate counts, without the allowance."""
        self._lease_s: dict[str, float] = {}
        """Agreement -> the longest lease answered; a delegate that restarts counts it once more."""
        self._asked: dict[int, float] = {}
        self._origin_lease_end: dict[str, float] = {}
        """Agreement -> when its lease ends as the origin counts."""
        self._guests: dict[str, tuple[str, ...]] = {}
        self._delegated: dict[str, tuple[tuple[str, str], ...]] = {}
        self._reported: set[str] = set()

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        self._regions.on_event(event)
        match event.kind, facts.get("what"):
            case "said", ("Award" | "Renewal"):
                self._asked[facts["call"]] = event.at
            case "answered", ("Grant" | "Renewed"):
                agreement = facts["agreement"]
                self._lease_s[agreement] = max(facts["lease_s"], self._lease_s.get(agreement, 0.0))
                self._granted[facts["by"], facts["agreement"]] = event.at + facts["lease_s"]
            case "heard", ("Grant" | "Renewed"):
                until = self._asked[facts["call"]] + facts["lease_s"]
                self._origin_lease_end[facts["agreement"]] = max(
                    until, self._origin_lease_end.get(facts["agreement"], 0.0)
                )
            case "guests", _:
                self._guests[facts["region"]] = facts["agreements"]
                for agreement in facts["agreements"]:
                    self._granted.setdefault((facts["region"], agreement), event.at + self._lease_of(agreement))
            case "delegated", _:
                self._delegated[facts["region"]] = tuple(
                    (workload, agreement) for workload, agreement, _, ready, _ in facts["workloads"] if ready
                )
        return self._check_overdue(event.at)

    def _lease_of(self, agreement: str) -> float:
        return self._lease_s.get(agreement, UNKNOWN_TERM_S)

    def _check_overdue(self, now: float) -> str | None:
        for region, agreements in self._guests.items():
            since = self._regions.since(region)
            if since is None:
                continue
            for agreement in agreements:
                lease_s = self._lease_of(agreement)
                until = max(self._granted[region, agreement], since + lease_s) + ALLOWANCE_S
                if now > until + SLACK_S and agreement not in self._reported:
                    self._reported.add(agreement)
                    return f"{region} runs {agreement}, whose lease was over at {until:.1f} s"
        for region, pairs in self._delegated.items():
            since = self._regions.since(region)
            if since is None:
                continue
            for workload, agreement in pairs:
                until = max(self._origin_lease_end.get(agreement, 0.0), since + CONFIRM_S)
                if now > until + SLACK_S and f"{region} {agreement}" not in self._reported:
                    self._reported.add(f"{region} {agreement}")
                    return f"{region} believes that {agreement} runs {workload}; its lease was over at {until:.1f} s"
        return None


class CapacityChecker:
    """Nothing is sold twice: what a region holds and runs fits on each of its devices."""

    def check(self, event: RecordedEvent) -> str | None:
        if event.kind == "room":
            over = [name for name, taken, total in event.facts["devices"] if taken > total]
            if over:
                return f"{event.facts['region']} has sold {over[0]} twice: {event.facts['devices']}"
        return None


class LedgerChecker:
    """Each ledger is one chain, every message in it was sent, and both ledgers of an agreement agree."""

    def __init__(self) -> None:
        self._known_evidence: set[str] = set()
        self._ledgers: dict[str, tuple[Mapping[str, Any], ...]] = {}

    def check(self, event: RecordedEvent) -> str | None:
        facts = event.facts
        match event.kind:
            case "said" | "answered":
                self._known_evidence.add(facts["said"])
            case "ledger":
                self._ledgers[facts["region"]] = entries = tuple(dict(each) for each in facts["entries"])
                return _check_chain(facts["region"], entries) or self._check_evidence(facts["region"], entries)
            case "refused" if facts["code"] == "LEDGER_BROKEN":
                return f"{facts['at']} finds that the ledger of {facts['to']} is not what it was shown before"
            case "run.ends":
                return self._check_agreements()
        return None

    def _check_evidence(self, region: str, entries: tuple[Mapping[str, Any], ...]) -> str | None:
        for entry in entries:
            if entry["evidence"]:
                said = hashlib.sha256(b64decode(entry["evidence"])).hexdigest()[:12]
                if said not in self._known_evidence:
                    return f"{region}'s entry {entry['sequence']} has evidence of what nobody said"
        return None

    def _check_agreements(self) -> str | None:
        told: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        workloads: dict[str, set[str]] = defaultdict(set)
        for region, entries in sorted(self._ledgers.items()):
            for entry in entries:
                agreement = entry["agreement"]
                mine = told[agreement][region]
                if (
                    mine
                    and mine[-1] in FINAL_ENTRIES
                    and (mine[-1] != "breached" or entry["what"] not in AFTER_BREACH_ENTRIES)
                ):
                    return f"{region} writes {entry['what']!r} of {agreement}, which it wrote to be {mine[-1]}"
                mine.append(entry["what"])
                told[agreement][entry["counterpart"]] += []
                workloads[agreement].add(entry["workload"])
        for agreement, sides in sorted(told.items()):
            wrong = _compare_sides(agreement, {side: words for side, words in sides.items() if side in self._ledgers})
            if wrong:
                return wrong
            if len(workloads[agreement] - {""}) > 1:
                return f"{agreement} is of {sorted(workloads[agreement])}"
        return None


def _check_chain(region: str, entries: tuple[Mapping[str, Any], ...]) -> str | None:
    previous, number = "", 0
    for entry in entries:
        if (entry["sequence"], entry["previous"]) != (number + 1, previous):
            return f"{region}'s entry {entry['sequence']} does not follow from entry {number}"
        plain = json.dumps(dict(entry), sort_keys=True, separators=(",", ":"))
        previous, number = hashlib.sha256(plain.encode()).hexdigest(), number + 1
    return None


def _compare_sides(agreement: str, sides: Mapping[str, list[str]]) -> str | None:
    for side, words in sorted(sides.items()):
        if words.count("granted") > 1:
            return f"{side} wrote {agreement} to be granted {words.count('granted')} times"
        for other, theirs in sorted(sides.items()):
            if other == side:
                continue
            if "granted" in words and not {"granted", "awarded"} & set(theirs):
                return f"{side} wrote {agreement} to be granted, {other} knows nothing of it: {theirs}"
            if "granted" in words and FINAL_ENTRIES & set(words) and not FINAL_ENTRIES & set(theirs):
                return f"{side} wrote {agreement} to be {words[-1]}, for {other} it goes on: {theirs}"
    return None


def make_checkers() -> tuple[Checker, ...]:
    return (
        AcknowledgedWritesChecker(),
        HoldChecker(),
        AwardChecker(),
        AgreementChecker(),
        LeaseChecker(),
        CapacityChecker(),
        LedgerChecker(),
    )
