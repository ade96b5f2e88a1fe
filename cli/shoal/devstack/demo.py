"""The whole story on one machine, as steps that check themselves; the command line narrates it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import files as package_files
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from PIL import Image

from shoal.client import Inference, Region
from shoal.devstack import ocr
from shoal.devstack.control import Control, Up
from shoal.devstack.layout import Asked
from shoal.devstack.load import Load
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import show_joules, show_seconds
from shoal.v1 import operator_pb2

DETECT: Final = "page-lines"
RECOGNISE: Final = "line-text"
T = TypeVar("T")

WORKLOADS: Final = (DETECT, RECOGNISE)
ABROAD: Final = "archive-text"
"""The one that home has no place for."""
TRADED: Final = ("SOLICITED", "BID", "COUNTERED", "DECLINED", "AWARDED", "GRANTED", "RENEWED")
"""Events that tell how another region came to run it."""
SETTLE_S: Final = 60.0
LOAD_BEFORE_KILL: Final = 40
"""Requests answered before the kill, so that it strikes under load."""
LOAD_BEFORE_MOVE: Final = 10
METERS_REST_S: Final = 2.5
"""Longer than a node lets pass between two reports of what it served."""


class Narrator(Protocol):
    """Tells the story as it happens."""

    def section(self, title: str) -> None: ...
    def say(self, text: str) -> None: ...
    def plan(self, plan: operator_pb2.PlanReply) -> None: ...
    def placements(self, rows: Sequence[operator_pb2.PlacementView]) -> None: ...
    def migration(self, migration: operator_pb2.MigrationView) -> None: ...


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation. A failed one makes the demo's status non-zero."""

    name: str
    ok: bool
    found: str


@dataclass
class Report:
    """Figures of the run, for `--json`. Joules are modelled where `energy_sources` does not say `measured`."""

    link: str = "grpc"
    time_scale: float = 1.0
    lines: list[str] = field(default_factory=list)
    placed: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    joules_per_page: dict[str, float] = field(default_factory=dict)
    energy_sources: dict[str, str] = field(default_factory=dict)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    migration: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def data(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


class Demo:
    """Runs the story once. `run` raises ShoalError when the stack itself fails; expectations go into the report."""

    def __init__(self, control: Control, narrator: Narrator, link: str = "grpc") -> None:
        self._control = control
        self._tell = narrator
        self.report = Report(link=link)
        self._applied_at = 0.0

    def run(self) -> Report:
        files = ocr.files()
        up = self._timed("start", lambda: self._start())
        with Region(up.operator) as api, self._events_on_failure(api):
            self._timed("push and place", lambda: self._place(api, files))
            fast = self._timed("read the page", lambda: self._read(api, up, files, "fastest"))
            self._timed("move to least energy", lambda: self._save_energy(api, up, files, fast))
            self._timed("kill a machine under load", lambda: self._kill(api, up, files))
            self._tell.section("The dead machine gets its power back")
            self._power_back(api)
            self._timed("have another region run it", lambda: self._delegate(api, up, files))
            self._tell.section("The invariants are checked on what runs")
            failed = [check for check in api.doctor().checks if not check.ok]
            self._check(
                "doctor finds nothing wrong", not failed, "; ".join(f"{c.name}: {c.refusal.found}" for c in failed)
            )
        return self.report

    @contextmanager
    def _events_on_failure(self, api: Region) -> Iterator[None]:
        """A step that does not come about is explained by what the coordinator last decided."""
        try:
            yield
        except ShoalError:
            self._tell.section("The last events before the failure")
            for event in list(api.events())[-25:]:
                name = event.workload.name or event.subject
                self._tell.say(f"{event.sequence}  {event.code}  {name} {event.node}  {event.message}")
            raise

    # the steps

    def _start(self) -> Up:
        self._tell.section(
            f"A region on this machine: a coordinator, a gateway, four agents on {self.report.link} links; "
            "a small one that asks less, and the federation of both"
        )
        up = self._control.up(Asked(link=self.report.link, regions=2, federation=1, neighbours=1), self._tell.say)
        self.report.time_scale = up.stack.time_scale
        return up

    def _place(self, api: Region, files: ocr.Files) -> None:
        self._tell.section("Two models that find and read the lines of a page, placed for lowest latency")
        api.push(files.detector, "ppocr-det")
        api.push(files.recogniser, "ppocr-rec")
        plan = self._apply(api, "fast.yaml")
        rows = self._settled(api, plan)
        self._tell.placements(rows)
        self.report.placed["fastest"] = _where(rows)
        self._check(
            "two workloads are ready", {row.assignment.workload.name for row in rows} == set(WORKLOADS), str(len(rows))
        )

    def _read(self, api: Region, up: Up, files: ocr.Files, title: str) -> float:
        """Joules for one page."""
        before = self._joules(api)
        page = Image.open(files.page)
        alphabet = ocr.alphabet(files.recogniser)
        with Inference(up.client) as client:

            def infer(workload: str, value: ocr.Floats) -> ocr.Floats:
                (output,) = client.infer(workload, {"x": value}).outputs.values()
                return np.asarray(output, np.float32)

            lines = ocr.read_page(page, alphabet, DETECT, RECOGNISE, infer)
        for text in lines:
            self._tell.say(f"  | {text}")
        self.report.lines = list(lines)
        wrong = [f"{found!r} for {known!r}" for found, known in zip(lines, ocr.LINES, strict=False) if found != known]
        self._check(
            f"{title}: every line of the page is read right",
            tuple(lines) == ocr.LINES,
            "; ".join(wrong) or f"{len(lines)} lines",
        )
        served = 1 + len(lines)
        after = self._wait(
            lambda: (now := self._joules(api)) if now_requests(api) - before[1] >= served else None,
            15.0,
            "the meters to report",
        )
        joules = float(after[0] - before[0])
        self.report.joules_per_page[title] = joules
        sources = {one.energy_source for row in _rows(api) for one in row.observed.served if one.requests}
        self.report.energy_sources[title] = sources.pop() if len(sources) == 1 else "estimated"
        self._tell.say(f"one page took {show_joules(joules)} ({self.report.energy_sources[title]})")
        return joules

    def _save_energy(self, api: Region, up: Up, files: ocr.Files, fast: float) -> None:
        self._tell.section(
            "The policy changes from lowest latency to lowest energy: both models move, live, under load"
        )
        line = _line_of(files)
        with Inference(up.client) as client:
            expected = client.infer(RECOGNISE, {"x": line}).outputs
        load = Load(up.client, RECOGNISE, {"x": line}, expected, clients=2)
        load.start()
        try:
            self._wait(lambda: len(load.calls) >= LOAD_BEFORE_MOVE, 60.0, "the load to run")
            plan = self._apply(api, "frugal.yaml")
            rows = self._settled(api, plan)
            moved = self._wait(lambda: _ended_move(api, RECOGNISE), SETTLE_S, "the move to end")
            answered = len(load.calls)
            self._wait(lambda: len(load.calls) >= answered + LOAD_BEFORE_MOVE, 60.0, "more load to be answered")
        finally:
            load.stop()
        self.report.moves = [
            f"{change.sign} {one.workload.name} {change.node}/{change.device}"
            for one in plan.workloads
            for change in one.changes
        ]
        self._tell.placements(rows)
        self.report.placed["least energy"] = _where(rows)
        self._show_move(moved, load)
        self._check(
            "something moved",
            self.report.placed["fastest"] != self.report.placed["least energy"],
            str(self.report.moves),
        )
        self._meters_rest(api)
        frugal = self._read(api, up, files, "least energy")
        title = "modelled, on emulated devices" if any(row.emulated for row in rows) else "measured"
        self._tell.say(f"a page costs {show_joules(frugal)} instead of {show_joules(fast)} ({title})")
        self._check("the move saves energy", frugal < fast, f"{show_joules(fast)} -> {show_joules(frugal)} ({title})")
        self.report.migration |= {"joules_per_page_before": fast, "joules_per_page_after": frugal}

    def _show_move(self, moved: operator_pb2.MigrationView, load: Load) -> None:
        """Its stages and what was compared; what became of the requests meanwhile."""
        self._tell.migration(moved)
        sent, answered, verdict = len(load.calls), load.outcomes()["ok"], moved.verdict
        self._tell.say(f"requests while it moved: {sent} sent, {answered} answered, {sent - answered} lost")
        self.report.migration = {
            "from": f"{moved.source.node}/{moved.source.device}",
            "to": f"{moved.target.node}/{moved.target.device}",
            "stages_s": {one.stage: round(one.at - moved.stages[0].at, 2) for one in moved.stages},
            "verified": {
                "against": verdict.against,
                "inputs": verdict.inputs,
                "samples": verdict.samples,
                "worst": {f"{one.output or '(all)'} {one.metric}": one.worst for one in verdict.drifts},
            },
            "sent": sent,
            "lost": sent - answered,
            "wrong": load.wrong,
        }
        self._check("it was compared with the one that served", verdict.passed, f"{verdict.code} {verdict.reason}")
        self._check("the move is done", moved.stage == "done", f"{moved.stage}: {moved.reason.code}")
        self._check("no request was lost by the move", sent == answered, f"{dict(load.outcomes())}")
        self._check("every answer stayed the same, bit for bit", load.wrong == 0, f"{load.wrong} of {answered} differ")

    def _meters_rest(self, api: Region) -> None:
        """Until everything that was served is reported: nothing more is, for a while."""
        last, since = -1, 0.0

        def rest() -> bool:
            nonlocal last, since
            now, count = time.monotonic(), now_requests(api)  # noqa: TID251 - measures
            if count != last:
                last, since = count, now
            return now - since >= METERS_REST_S

        self._wait(rest, 30.0, "the meters to report")

    def _kill(self, api: Region, up: Up, files: ocr.Files) -> None:
        self._tell.section("Two replicas on two nodes; then one machine dies under load")
        plan = self._apply(api, "sturdy.yaml")
        rows = self._settled(api, plan)
        self._tell.placements(rows)
        victim = next(row.node for row in rows if row.assignment.workload.name == RECOGNISE)
        line = _line_of(files)
        with Inference(up.client) as client:
            expected = client.infer(RECOGNISE, {"x": line}).outputs
        load = Load(up.client, RECOGNISE, {"x": line}, expected)
        before = _ingress(api)
        load.start()
        try:
            self._wait(lambda: len(load.calls) >= LOAD_BEFORE_KILL, 60.0, "the load to run")
            pids = self._control.hurt(victim, "kill")
            killed_at = load.elapsed()
            served_before = _served_by(api)
            self._tell.say(f"{victim}: all {len(pids)} processes killed (SIGKILL)")
            self._wait(lambda: victim in self._dead(), 10.0, f"{victim} to be dead")
            self._check("the machine is dead", True, victim)
            rows = self._wait(lambda: self._replaced(api, victim), SETTLE_S, f"what ran on {victim} to run elsewhere")
            took = load.elapsed() - killed_at
            self._wait(lambda: len(load.calls) >= 2 * LOAD_BEFORE_KILL, 60.0, "more load to be answered")
        finally:
            load.stop()
        self._tell.placements(rows)
        outcomes = load.outcomes()
        sent, answered = len(load.calls), outcomes["ok"]
        counted = self._wait(lambda: _counted(api, before, sent), 15.0, "the gateway's counts")
        after = load.answered_after(killed_at)
        elsewhere = self._wait(
            lambda: _grown(served_before, _served_by(api), victim, after), 15.0, "the other nodes' meters to report"
        )
        self.report.load = {
            "sent": sent,
            "answered": answered,
            "retried_by_gateway": counted["retried"],
            "lost": sent - answered,
            "wrong": load.wrong,
            "outcomes": dict(outcomes),
            "replaced_in_s": round(took, 2),
            "answered_after_the_kill": after,
            "served_by": elsewhere,
            "longest_s": round(max(call.took_s for call in load.calls), 3),
        }
        self._tell.say(
            f"requests: {sent} sent, {answered} answered, {counted['retried']} retried by the gateway, "
            f"{sent - answered} lost; replaced after {show_seconds(took)}"
        )
        self._check("no request was lost", sent == answered, f"{sent - answered} of {sent} lost: {dict(outcomes)}")
        self._check("every answer is the same, bit for bit", load.wrong == 0, f"{load.wrong} of {answered} differ")
        self._check("the work is served elsewhere", after > 0 and victim not in elsewhere, str(elsewhere))

    def _delegate(self, api: Region, up: Up, files: ocr.Files) -> None:
        self._tell.section("One more workload, whose budget is below what home asks; another region takes it")
        plan = self._apply(api, "thrifty.yaml")
        (mine,) = (one for one in plan.workloads if one.workload.name == ABROAD)
        self._check("home has no place for it", bool(mine.refusal.code), mine.refusal.found)
        line = _line_of(files)
        with Inference(up.client) as client:

            def answer() -> dict[str, ocr.Floats] | None:
                try:
                    return client.infer(ABROAD, {"x": line}).outputs
                except ShoalError:
                    return None  # not there yet

            found = self._wait(answer, SETTLE_S, "an answer from another region through home's gateway")
            answered_s = time.monotonic() - self._applied_at  # noqa: TID251 - measures
            expected = client.infer(RECOGNISE, {"x": line}).outputs
        log = [event for event in api.events() if event.workload.name == ABROAD]
        for event in log:
            if event.code in TRADED:
                self._tell.say(f"  {event.at - log[0].at:6.2f}s  {event.code:<9}  {event.message}")
        granted_s = next(event.at for event in log if event.code == "GRANTED") - log[0].at
        (agreed,) = (one for one in api.get("agreements").agreements if one.workload.name == ABROAD)
        self.report.federation = {
            "workload": ABROAD,
            "region": agreed.counterpart,
            "granted_in_s": round(granted_s, 2),
            "answered_in_s": round(answered_s, 2),
            "bids": [
                {
                    "region": bid.region,
                    "p95_s": bid.latency_p95_s,
                    "usd_per_hour": bid.offer.cost,
                    "chosen": bid.chosen,
                    "refusal": bid.refusal.code,
                }
                for bid in mine.bids
            ],
        }
        self._tell.say(
            f"{agreed.counterpart} runs it: granted {show_seconds(granted_s)} after it was applied, answered through "
            f"home's own gateway after {show_seconds(answered_s)}, its model fetched meanwhile"
        )
        self._check("another region runs it", agreed.counterpart != up.stack.region, agreed.counterpart)
        same = found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
        self._check("it answers the same, bit for bit", same, "" if same else "the answers differ")

    def _power_back(self, api: Region) -> None:
        dead = self._dead()
        for name in dead:
            self._control.hurt(name, "resume")
        self._wait(
            lambda: not dead or {n.node.name for n in api.get("nodes").nodes if n.liveness == "ready"} >= set(dead),
            SETTLE_S,
            "the machine to be back",
        )
        self._check("the machine is back", bool(dead), ", ".join(dead))

    def _dead(self) -> list[str]:
        return [row["name"] for row in self._control.status() if row["state"] == "killed"]

    # what they share

    def _apply(self, api: Region, name: str) -> operator_pb2.PlanReply:
        text = package_files("shoal.devstack").joinpath("story", name).read_text()
        documents = [operator_pb2.Document(name=name, text=text)]
        plan = api.plan(documents)
        self._tell.plan(plan)
        for one in plan.workloads:
            for candidate in one.candidates:
                self.report.predictions.append(
                    {
                        "policy": name,
                        "workload": one.workload.name,
                        "device": f"{candidate.node}/{candidate.device}",
                        "emulated": candidate.emulated,
                        "chosen": candidate.chosen,
                        "refusal": candidate.refusal.code,
                        "p95_s": candidate.prediction.latency_p95_s.mid,
                        "joules": candidate.prediction.joules.mid,
                        "energy_source": candidate.prediction.energy_source,
                        "basis": candidate.prediction.basis,
                    }
                )
        self._applied_at = time.monotonic()  # noqa: TID251 - measures
        applied = api.apply(documents, plan_hash=plan.hash)
        if applied.problems or applied.stale:
            raise refuse(
                Code.PLAN_STALE, f"{applied.problems or applied.stale}", "the plan just shown", "run the demo again"
            )
        return plan

    def _settled(self, api: Region, plan: operator_pb2.PlanReply) -> Sequence[operator_pb2.PlacementView]:
        """Placements once they are those of the plan: all serving, nothing on its way in or out."""
        planned = {
            (one.workload.name, candidate.node, candidate.device)
            for one in plan.workloads
            for candidate in one.candidates
            if candidate.chosen
        }

        def settled() -> Sequence[operator_pb2.PlacementView] | None:
            rows = _rows(api)
            placed = {(row.assignment.workload.name, row.node, row.assignment.device) for row in rows}
            return (
                rows if placed == planned and all(row.routed and not row.assignment.draining for row in rows) else None
            )

        return self._wait(settled, SETTLE_S, "the workloads to be ready")

    def _replaced(self, api: Region, victim: str) -> Sequence[operator_pb2.PlacementView] | None:
        rows = [row for row in _rows(api) if row.routed and row.node != victim]
        count = {name: sum(row.assignment.workload.name == name for row in rows) for name in WORKLOADS}
        return rows if all(number >= 2 for number in count.values()) else None

    def _joules(self, api: Region) -> tuple[float, int]:
        """Joules and requests served since the replicas became ready."""
        served = [one for row in _rows(api) for one in row.observed.served]
        return sum(one.joules for one in served), sum(one.requests for one in served)

    def _wait(self, condition: Callable[[], T | None], limit_s: float, what: str) -> T:
        end = time.monotonic() + limit_s  # noqa: TID251 - the demo's own deadlines
        while not (found := condition()):
            if time.monotonic() > end:  # noqa: TID251
                raise refuse(Code.DEADLINE_EXCEEDED, f"not within {limit_s:g}s", what, "shoal events; shoal dev status")
            time.sleep(0.1)  # noqa: TID251
        return found

    def _check(self, name: str, ok: bool, found: str) -> None:
        self.report.checks.append(Check(name, ok, found))
        self._tell.say(f"{'ok  ' if ok else 'FAIL'}  {name}" + ("" if ok else f": {found}"))

    def _timed(self, name: str, step: Callable[[], Any]) -> Any:
        began = time.monotonic()  # noqa: TID251 - measures
        try:
            return step()
        finally:
            self.report.seconds[name] = round(time.monotonic() - began, 1)  # noqa: TID251


def _line_of(files: ocr.Files) -> ocr.Floats:
    """One line of the page, as the recogniser takes it."""
    return ocr.line_input(Image.open(files.page).convert("RGB").crop((0, 45, 384, 68)))


def _ended_move(api: Region, workload: str) -> operator_pb2.MigrationView | None:
    """Its newest migration, once that is over."""
    found = (one for one in api.get("migrations").migrations if one.workload.name == workload)
    newest = max(found, key=lambda one: one.stages[0].at, default=None)
    return newest if newest is not None and newest.stage in ("done", "aborted") else None


def now_requests(api: Region) -> int:
    return sum(one.requests for row in _rows(api) for one in row.observed.served)


def _rows(api: Region) -> list[operator_pb2.PlacementView]:
    return list(api.get("placements").placements)


def _where(rows: Sequence[operator_pb2.PlacementView]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.assignment.workload.name, []).append(f"{row.node}/{row.assignment.device}")
    return {name: sorted(devices) for name, devices in sorted(found.items())}


def _ingress(api: Region) -> dict[str, int]:
    views = [view for view in api.get("workloads").workloads if view.workload.name == RECOGNISE]
    names = ("requests", "answered", "retried", "refused", "lost")
    return {name: sum(getattr(one, name) for view in views for one in view.ingress) for name in names}


def _served_by(api: Region) -> Counter[str]:
    """Recognitions served by each node's present replicas."""
    served: Counter[str] = Counter()
    for row in _rows(api):
        if row.assignment.workload.name == RECOGNISE:
            served[row.node] += sum(one.requests for one in row.observed.served)
    return served


def _grown(before: Counter[str], now: Counter[str], victim: str, least: int) -> dict[str, int] | None:
    """What the nodes but `victim` served since `before`, once it is all that was answered."""
    grown = {node: count - before[node] for node, count in now.items() if node != victim and count > before[node]}
    return grown if sum(grown.values()) >= least else None


def _counted(api: Region, before: dict[str, int], sent: int) -> dict[str, int] | None:
    now = _ingress(api)
    found = {name: now[name] - before[name] for name in now}
    return found if found["requests"] >= sent else None
