"""What must not happen between regions that trade; stands apart like `judge`, and believes only the record.

Events read here: `said`, `delivered`, `answered`, `heard`, `refused` of messages (between.py); `region.up`,
`region.down`, `region.stopped`, `region.awake`; and what a region acts on, whenever it changes: `holds` (bids that it
keeps room for), `guests` (agreements that it runs for others), `delegated` (own workloads that run elsewhere, and the
agreements that it is leaving), `room`
(what it gave away of each device); at the end `ledger` (its entries, oldest first) and `story.ends`.
"""

import hashlib
import json
from base64 import b64decode
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from shoal.simulator.judge import AcknowledgedWrites, Happened, Rule

SLACK_S: Final = 3.0
"""A region that is up has looked at its clock and written what follows, behind what else it writes on a slow disk."""
ALLOWANCE_S: Final = 5.0
"""What the delegate adds to a lease."""
LONGEST_S: Final = 60.0
"""A hold or lease whose length nobody was told, for its answer never left."""
CONFIRM_S: Final = 2.0
"""So long after its start an origin relies on what it finds: by then the delegate has said that it still stands."""
LAST: Final = frozenset({"released", "expired", "breached", "ended"})
"""Entries of a ledger that end an agreement."""
STAYS: Final = frozenset({"renewed", "ended"})
"""What breached may serve on until something else does."""


class Regions:
    """Which regions can act, and since when: who is down or stopped keeps no deadline."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def take(self, event: Happened) -> None:
        match event.kind:
            case "region.up" | "region.awake":
                self._since[event.facts["region"]] = event.at
            case "region.down" | "region.stopped":
                self._since.pop(event.facts["region"], None)

    def since(self, region: str) -> float | None:
        return self._since.get(region)


class HoldsEnd:
    """A hold that was not awarded is gone when it is over, and an award that comes later gets nothing."""

    def __init__(self) -> None:
        self._regions = Regions()
        self._bids: dict[str, str] = {}
        self._begun: set[tuple[str, str]] = set()
        self._until: dict[tuple[str, str], float] = {}
        self._held: dict[str, tuple[str, ...]] = {}

    def take(self, event: Happened) -> str | None:
        facts = event.facts
        self._regions.take(event)
        if event.kind == "answered" and facts["what"] == "Offer":
            self._until[facts["by"], facts["bid"]] = event.at + facts["hold_s"]
        if event.kind == "said" and facts["what"] == "Award":
            self._bids[facts["agreement"]] = facts["bid"]
        if event.kind == "guests":
            for agreement in facts["agreements"]:
                key = (facts["region"], self._bids.get(agreement, ""))
                if key not in self._begun and event.at > self._until.get(key, event.at) + SLACK_S:
                    self._begun.add(key)
                    return f"{key[0]} takes {agreement}, and the hold of {key[1]} was over at {self._until[key]:.1f} s"
                self._begun.add(key)
        if event.kind == "holds":
            self._held[facts["region"]] = facts["bids"]
            for bid in facts["bids"]:
                self._until.setdefault((facts["region"], bid), event.at + LONGEST_S)
        for region, bids in self._held.items():
            since = self._regions.since(region)
            for bid in bids:
                until = self._until[region, bid]
                if since is not None and event.at > max(until, since) + SLACK_S:
                    self._until[region, bid] = float("inf")
                    return f"{region} still holds room for {bid}, whose hold was over at {until:.1f} s"
        return None


class OneAward:
    """A workload has at most one award open: the next goes out only when each before it is known to be none."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, float]] = defaultdict(dict)
        """workload -> agreement -> until when it may still be one."""
        self._named: dict[str, tuple[str, str]] = {}
        self._workloads: dict[str, str] = {}
        self._bids: dict[str, str] = {}
        self._calls: dict[int, tuple[str, str]] = {}
        self._asked: dict[int, float] = {}
        self._delegated: dict[str, set[str]] = defaultdict(set)

    def take(self, event: Happened) -> str | None:
        facts = event.facts
        match event.kind, facts.get("what"):
            case "said", "Award":
                return self._award(event)
            case "said", "Release":
                self._calls[facts["call"]] = ("Release", facts["bid"])
            case "said", "Renewal":
                self._calls[facts["call"]] = ("Renewal", facts["agreement"])
                self._asked[facts["call"]] = event.at
            case (("said" | "delivered"), "Notice"):
                self._let_go(facts["agreement"])
            case "heard", ("Grant" | "Renewed"):
                self._keep(facts["agreement"], self._asked.get(facts["call"], event.at) + facts["lease_s"])
            case "heard", "Refusal" if facts["call"] in self._calls and facts["code"] != "PEER_UNREACHABLE":
                kind, name = self._calls[facts["call"]]
                self._let_go(self._bids.get(name, name) if kind == "Release" else name)
            case "delegated", _:
                self._listed(facts["region"], {agreement for _, agreement, *_ in facts["workloads"]})
                for agreement in facts["leaving"]:
                    self._let_go(agreement)
            case "heard", "Done" if self._calls.get(facts["call"], ("", ""))[0] == "Release":
                self._let_go(self._bids.get(self._calls[facts["call"]][1], ""))
        return None

    def _award(self, event: Happened) -> str | None:
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
        self._open[workload][agreement] = event.at + LONGEST_S
        if others:
            return f"{workload} is awarded as {agreement} while {others[0]} may be granted"
        return None

    def _keep(self, agreement: str, until: float) -> None:
        """An agreement that was heard of stands while its lease does, as the origin counts it."""
        known = self._open[self._workloads.get(agreement, "")]
        if agreement in known:
            known[agreement] = until

    def _listed(self, region: str, agreements: set[str]) -> None:
        """Nothing is sent any more to what has gone from here."""
        before, self._delegated[region] = self._delegated[region], agreements
        for agreement in before - agreements:
            self._let_go(agreement)

    def _let_go(self, agreement: str) -> None:
        self._open[self._workloads.get(agreement, "")].pop(agreement, None)


class OneAgreement:
    """A hold becomes at most one agreement, an agreement is of one bid and one region, and what has ended stays so."""

    def __init__(self) -> None:
        self._granted: dict[str, tuple[str, str]] = {}
        self._of_bid: dict[tuple[str, str], str] = {}
        self._awarded: set[tuple[str, str]] = set()
        self._guests: dict[str, frozenset[str]] = defaultdict(frozenset)
        self._gone: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def take(self, event: Happened) -> str | None:
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
                return self._changed(facts["region"], frozenset(facts["agreements"]))
        return None

    def _changed(self, region: str, agreements: frozenset[str]) -> str | None:
        before, self._guests[region] = self._guests[region], agreements
        self._gone |= {(region, each) for each in before - agreements}
        for each in sorted(agreements - before):
            if (region, each) not in self._awarded:
                return f"{region} runs {each}, which nobody awarded to it"
            if (region, each) in self._gone and (region, each) not in self._told:
                self._told.add((region, each))
                return f"{region} runs {each} again after it had ended"
        return None


class Leases:
    """No agreement is held by one side alone beyond its lease."""

    def __init__(self) -> None:
        self._regions = Regions()
        self._granted: dict[tuple[str, str], float] = {}
        """By delegate and agreement: when its newest lease ends as the delegate counts, without the allowance."""
        self._lease_s: dict[str, float] = {}
        """By agreement: the longest lease that was told; a delegate that starts anew counts it once more."""
        self._asked: dict[int, float] = {}
        self._kept: dict[str, float] = {}
        """By agreement: when it ends as the origin counts."""
        self._guests: dict[str, tuple[str, ...]] = {}
        self._delegated: dict[str, tuple[tuple[str, str], ...]] = {}
        self._told: set[str] = set()

    def take(self, event: Happened) -> str | None:
        facts = event.facts
        self._regions.take(event)
        match event.kind, facts.get("what"):
            case "said", ("Award" | "Renewal"):
                self._asked[facts["call"]] = event.at
            case "answered", ("Grant" | "Renewed"):
                agreement = facts["agreement"]
                self._lease_s[agreement] = max(facts["lease_s"], self._lease_s.get(agreement, 0.0))
                self._granted[facts["by"], facts["agreement"]] = event.at + facts["lease_s"]
            case "heard", ("Grant" | "Renewed"):
                until = self._asked[facts["call"]] + facts["lease_s"]
                self._kept[facts["agreement"]] = max(until, self._kept.get(facts["agreement"], 0.0))
            case "guests", _:
                self._guests[facts["region"]] = facts["agreements"]
                for agreement in facts["agreements"]:
                    self._granted.setdefault((facts["region"], agreement), event.at + self._lease_of(agreement))
            case "delegated", _:
                self._delegated[facts["region"]] = tuple(
                    (workload, agreement) for workload, agreement, _, ready, _ in facts["workloads"] if ready
                )
        return self._beyond(event.at)

    def _lease_of(self, agreement: str) -> float:
        return self._lease_s.get(agreement, LONGEST_S)

    def _beyond(self, now: float) -> str | None:
        for region, agreements in self._guests.items():
            since = self._regions.since(region)
            if since is None:
                continue
            for agreement in agreements:
                lease_s = self._lease_of(agreement)
                until = max(self._granted[region, agreement], since + lease_s) + ALLOWANCE_S
                if now > until + SLACK_S and agreement not in self._told:
                    self._told.add(agreement)
                    return f"{region} runs {agreement}, whose lease was over at {until:.1f} s"
        for region, pairs in self._delegated.items():
            since = self._regions.since(region)
            if since is None:
                continue
            for workload, agreement in pairs:
                until = max(self._kept.get(agreement, 0.0), since + CONFIRM_S)
                if now > until + SLACK_S and f"{region} {agreement}" not in self._told:
                    self._told.add(f"{region} {agreement}")
                    return f"{region} believes that {agreement} runs {workload}; its lease was over at {until:.1f} s"
        return None


class Room:
    """Nothing is sold twice: what a region holds and runs fits on each of its devices."""

    def take(self, event: Happened) -> str | None:
        if event.kind == "room":
            over = [name for name, taken, total in event.facts["devices"] if taken > total]
            if over:
                return f"{event.facts['region']} has sold {over[0]} twice: {event.facts['devices']}"
        return None


class Ledgers:
    """Each ledger is one chain, every word in it was said, and the two of an agreement tell one story."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._ledgers: dict[str, tuple[Mapping[str, Any], ...]] = {}

    def take(self, event: Happened) -> str | None:
        facts = event.facts
        match event.kind:
            case "said" | "answered":
                self._said.add(facts["said"])
            case "ledger":
                self._ledgers[facts["region"]] = entries = tuple(dict(each) for each in facts["entries"])
                return _chain(facts["region"], entries) or self._evidence(facts["region"], entries)
            case "refused" if facts["code"] == "LEDGER_BROKEN":
                return f"{facts['at']} finds that the ledger of {facts['to']} is not what it was shown before"
            case "story.ends":
                return self._stories()
        return None

    def _evidence(self, region: str, entries: tuple[Mapping[str, Any], ...]) -> str | None:
        for entry in entries:
            if entry["evidence"]:
                said = hashlib.sha256(b64decode(entry["evidence"])).hexdigest()[:12]
                if said not in self._said:
                    return f"{region}'s entry {entry['sequence']} has evidence of what nobody said"
        return None

    def _stories(self) -> str | None:
        told: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        workloads: dict[str, set[str]] = defaultdict(set)
        for region, entries in sorted(self._ledgers.items()):
            for entry in entries:
                agreement = entry["agreement"]
                mine = told[agreement][region]
                if mine and mine[-1] in LAST and (mine[-1] != "breached" or entry["what"] not in STAYS):
                    return f"{region} writes {entry['what']!r} of {agreement}, which it wrote to be {mine[-1]}"
                mine.append(entry["what"])
                told[agreement][entry["counterpart"]] += []
                workloads[agreement].add(entry["workload"])
        for agreement, sides in sorted(told.items()):
            wrong = _differ(agreement, {side: words for side, words in sides.items() if side in self._ledgers})
            if wrong:
                return wrong
            if len(workloads[agreement] - {""}) > 1:
                return f"{agreement} is of {sorted(workloads[agreement])}"
        return None


def _chain(region: str, entries: tuple[Mapping[str, Any], ...]) -> str | None:
    previous, number = "", 0
    for entry in entries:
        if (entry["sequence"], entry["previous"]) != (number + 1, previous):
            return f"{region}'s entry {entry['sequence']} does not follow from entry {number}"
        plain = json.dumps(dict(entry), sort_keys=True, separators=(",", ":"))
        previous, number = hashlib.sha256(plain.encode()).hexdigest(), number + 1
    return None


def _differ(agreement: str, sides: Mapping[str, list[str]]) -> str | None:
    for side, words in sorted(sides.items()):
        if words.count("granted") > 1:
            return f"{side} wrote {agreement} to be granted {words.count('granted')} times"
        for other, theirs in sorted(sides.items()):
            if other == side:
                continue
            if "granted" in words and not {"granted", "awarded"} & set(theirs):
                return f"{side} wrote {agreement} to be granted, {other} knows nothing of it: {theirs}"
            if "granted" in words and LAST & set(words) and not LAST & set(theirs):
                return f"{side} wrote {agreement} to be {words[-1]}, for {other} it goes on: {theirs}"
    return None


def rules() -> tuple[Rule, ...]:
    return (AcknowledgedWrites(), HoldsEnd(), OneAward(), OneAgreement(), Leases(), Room(), Ledgers())
