"""The whole demo on one machine, as steps that check themselves; the command line narrates it."""

import math
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from PIL import Image

from shoal.client import InferenceClient, RegionClient
from shoal.devstack import ocr
from shoal.devstack.control import Control, RunningStack
from shoal.devstack.layout import StackOptions, installed_simulators
from shoal.devstack.load import ClosedLoopLoad, MixedLoad
from shoal.devstack.serving_shares import ServingLook, ServingShare, look_of, shares_of
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import show_joules, show_seconds, show_usd_per_hour
from shoal.v1 import operator_pb2

CHAPTERS: Final = (
    "A region on this machine, a smaller one beside it, and the federation of both",
    "Three models of a page reader are placed where they answer soonest",
    "Now the least energy counts: everything moves, live, under load",
    "A machine dies under load",
    "A workload that no device at home may run is run by another region",
    "A model moves to another vendor's NPU and back; then the invariants are checked",
)
DETECT: Final = "page-lines"
TURN: Final = "line-turn"
RECOGNISE: Final = "line-text"
T = TypeVar("T")

WORKLOADS: Final = (DETECT, TURN, RECOGNISE)
DELEGATED: Final = "archive-text"
"""The workload that does not fit in the local region."""
NEGOTIATION_EVENTS: Final = ("SOLICITED", "BID", "COUNTERED", "DECLINED", "AWARDED", "GRANTED", "RENEWED")
"""Events that show how another region came to run it."""
ANGLE: Final = "line-angle"
"""The workload that moves to another vendor's NPU."""
NEAR_IN_INT8: Final = 0.1
"""Answers are probabilities. Over all slices of this page int8 is 0.1 off at most."""
SETTLE_S: Final = 60.0
MOVE_S: Final = 180.0
"""A move prepares, loads and compares a model, which a busy machine does several times as slowly as an idle one."""
LOAD_BEFORE_KILL: Final = 150
"""Requests answered before the kill, so that it happens under load."""
LOAD_BEFORE_MOVE: Final = 50
LOAD_CLIENTS: Final = {DETECT: 1, TURN: 16, RECOGNISE: 1}
"""Enough to keep each emulated device busy. A page has more slices to turn than it has anything else; they share runs,
as `fast.yaml` allows."""
LINE_TOP: Final = 45
LINE_BOTTOM: Final = 68
"""Of one line on the page, in pixels."""
WORDS_RIGHT: Final = 120
"""End of that line's first words."""
SHARES_OVER_S: Final = 5.0
"""Shares and rates are of so many seconds: nodes report what they served every second or two."""
LOOK_S: Final = 0.5
METERS_IDLE_S: Final = 2.5
"""Longer than a node's interval between two reports of what it served."""


class Narrator(Protocol):
    """Shows the demo while it runs."""

    def chapter(self, title: str) -> None:
        """The next of `CHAPTERS`."""

    def say(self, text: str) -> None:
        """What happened."""

    def now(self, text: str) -> None:
        """What happens now, until the next call."""

    def serving(self, shares: Sequence[ServingShare]) -> None:
        """Who serves now, until the next call."""

    def check(self, name: str, ok: bool, found: str) -> None: ...
    def plan(self, plan: operator_pb2.PlanReply) -> None: ...
    def migration(self, migration: operator_pb2.MigrationView) -> None: ...


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """One expectation. A failed one makes the demo's exit status non-zero."""

    name: str
    ok: bool
    found: str


@dataclass
class DemoReport:
    """Figures of the run, for `--json`."""

    # grpc or mqtt.
    link: str = "grpc"
    # How many times slower emulated devices answer than the real ones; 1: as fast.
    time_scale: float = 1.0
    # Text that the recogniser read, line by line.
    lines: list[str] = field(default_factory=list)
    # By objective (`fastest`, `least energy`): workload -> `node/device` of its replicas.
    placed: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    # By objective. Modelled unless `energy_sources` says `measured`.
    joules_per_page: dict[str, float] = field(default_factory=dict)
    # By objective: `measured`, `profile` or `estimated`; `estimated` also if replicas differ.
    energy_sources: dict[str, str] = field(default_factory=dict)
    # A row per candidate of every plan: p95 in seconds, joules, refusal, whether it was chosen.
    predictions: list[dict[str, Any]] = field(default_factory=list)
    # Placement changes of the second plan, each with its sign.
    moves: list[str] = field(default_factory=list)
    # The live migration under load: stages, verification, requests, joules per page before and after.
    migration: dict[str, Any] = field(default_factory=dict)
    # Requests while a machine was killed: sent, answered, retried, lost, wrong.
    load: dict[str, Any] = field(default_factory=dict)
    # The delegated workload: region, bids, seconds until granted and answered.
    federation: dict[str, Any] = field(default_factory=dict)
    # The moves to another vendor's NPU and back: stages, drift, requests. Empty where no plugin is installed.
    vendors: dict[str, Any] = field(default_factory=dict)
    # Duration of each step of the demo.
    seconds: dict[str, float] = field(default_factory=dict)
    # Every expectation, in order.
    checks: list[DemoCheck] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def data(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


class Demo:
    """Runs the demo once. `run` raises ShoalError if the stack itself fails; failed expectations go into the report."""

    def __init__(self, control: Control, narrator: Narrator, link: str = "grpc") -> None:
        self._control = control
        self._narrator = narrator
        self.report = DemoReport(link=link)
        self._applied_at = 0.0

    def run(self) -> DemoReport:
        files = ocr.files()
        up = self._time_step("start", lambda: self._start())
        with RegionClient(up.operator) as api, self._events_on_failure(api):
            self._time_step("push and place", lambda: self._place(api, files))
            fast = self._time_step("read the page", lambda: self._read(api, up, files, "fastest"))
            self._time_step("move to least energy", lambda: self._save_energy(api, up, files, fast))
            self._time_step("kill a machine under load", lambda: self._kill(api, up, files))
            self._restore_power(api)
            self._time_step("have another region run it", lambda: self._delegate(api, up, files))
            self._narrator.chapter(CHAPTERS[5])
            if up.stack.agents[0].simulate:
                self._time_step("move to another vendor's NPU", lambda: self._change_vendor(api, up, files))
            else:
                self._narrator.say("  no vendor's simulator runs here: nothing to move to (x86-64, onnxruntime-qnn)")
            self._narrator.now("shoal doctor looks at what runs")
            failed = [check for check in api.doctor().checks if not check.ok]
            self._check(
                "doctor finds nothing wrong", not failed, "; ".join(f"{c.name}: {c.refusal.found}" for c in failed)
            )
        return self.report

    @contextmanager
    def _events_on_failure(self, api: RegionClient) -> Iterator[None]:
        """Explain a step that fails by the coordinator's last decisions."""
        try:
            yield
        except ShoalError:
            self._narrator.say("The last events before the failure:")
            for event in list(api.events())[-25:]:
                name = event.workload.name or event.subject
                self._narrator.say(f"{event.sequence}  {event.code}  {name} {event.node}  {event.message}")
            raise

    # the steps

    def _start(self) -> RunningStack:
        self._narrator.chapter(CHAPTERS[0])
        up = self._control.up(
            StackOptions(link=self.report.link, regions=2, federation=1, neighbours=1, simulate=installed_simulators()),
            self._narrator.now,
        )
        self.report.time_scale = up.stack.time_scale
        with RegionClient(up.operator) as api:
            for row in api.get("devices").devices:
                device = row.device
                mark = " (simulated)" if device.simulated else " (emulated)" if device.emulated else ""
                self._narrator.say(f"  {row.node}/{device.name}{mark}  {show_usd_per_hour(row.cost_usd_per_h)}")
        self._narrator.say(
            f"  {len(up.stack.members)} programs on {self.report.link} links; emulated devices answer "
            f"{up.stack.time_scale:g} times slower here than real ones"
        )
        return up

    def _place(self, api: RegionClient, files: ocr.OcrFiles) -> None:
        self._narrator.chapter(CHAPTERS[1])
        for path, name in (
            (files.detector, "ppocr-det"),
            (files.classifier, "ppocr-cls"),
            (files.recogniser, "ppocr-rec"),
        ):
            self._narrator.now(f"pushes {name}")
            api.push(path, name)
        plan = self._apply(api, "fast.yaml")
        rows = self._wait_placements(api, plan)
        self.report.placed["fastest"] = _devices_by_workload(rows)
        self._check(
            "three workloads are ready",
            {row.assignment.workload.name for row in rows} == set(WORKLOADS),
            str(len(rows)),
        )

    def _read(self, api: RegionClient, up: RunningStack, files: ocr.OcrFiles, title: str) -> float:
        """Read the page; return the joules that it took."""
        self._narrator.now("reads a photographed page: finds its lines, then reads each")
        before = self._joules(api)
        page = Image.open(files.page)
        alphabet = ocr.alphabet(files.recogniser)
        with InferenceClient(up.client) as client:

            def infer(workload: str, value: ocr.Floats) -> ocr.Floats:
                (output,) = client.infer(workload, {"x": value}).outputs.values()
                return np.asarray(output, np.float32)

            lines = ocr.read_page(page, alphabet, DETECT, RECOGNISE, infer)
        if tuple(lines) != tuple(self.report.lines):
            for text in lines:
                self._narrator.say(f"  | {text}")
        self.report.lines = list(lines)
        wrong = [f"{found!r} for {known!r}" for found, known in zip(lines, ocr.LINES, strict=False) if found != known]
        self._check(
            f"{title}: every line of the page is read right",
            tuple(lines) == ocr.LINES,
            "; ".join(wrong) or f"{len(lines)} lines",
        )
        served = 1 + len(lines)
        after = self._wait(
            lambda: (now := self._joules(api)) if served_requests(api) - before[1] >= served else None,
            15.0,
            "the meters to report",
        )
        joules = float(after[0] - before[0])
        self.report.joules_per_page[title] = joules
        sources = {one.energy_source for row in _rows(api) for one in row.observed.served if one.requests}
        self.report.energy_sources[title] = sources.pop() if len(sources) == 1 else "estimated"
        self._narrator.say(f"  one page took {show_joules(joules)} ({self.report.energy_sources[title]})")
        return joules

    def _save_energy(self, api: RegionClient, up: RunningStack, files: ocr.OcrFiles, fast: float) -> None:
        self._narrator.chapter(CHAPTERS[2])
        load = self._page_load(up, files)
        load.start()
        try:
            asked = ", ".join(f"{clients} of {name}" for name, clients in LOAD_CLIENTS.items())
            self._narrator.say(f"  clients under way: {asked}")
            self._narrator.now("each asks one request after another, for parts of the page")
            self._wait(lambda: len(load.calls) >= LOAD_BEFORE_MOVE, 60.0, "the load to run")
            plan = self._apply(api, "frugal.yaml")
            moved = self._follow_move(api, RECOGNISE, load)
            rows = self._wait_placements(api, plan)
            answered = len(load.calls)
            self._wait(lambda: len(load.calls) >= answered + LOAD_BEFORE_MOVE, 60.0, "more load to be answered")
        finally:
            load.stop()
        self._narrator.serving(())
        self.report.moves = [
            f"{change.sign} {one.workload.name} {change.node}/{change.device}"
            for one in plan.workloads
            for change in one.changes
        ]
        self.report.placed["least energy"] = _devices_by_workload(rows)
        self._show_migration(moved, load)
        self._check(
            "something moved",
            self.report.placed["fastest"] != self.report.placed["least energy"],
            str(self.report.moves),
        )
        self._wait_meters_idle(api)
        frugal = self._read(api, up, files, "least energy")
        title = "modelled, on emulated devices" if any(row.stand_in for row in rows) else "measured"
        self._narrator.say(f"  a page costs {show_joules(frugal)} instead of {show_joules(fast)} ({title})")
        self._check("the move saves energy", frugal < fast, f"{show_joules(fast)} -> {show_joules(frugal)} ({title})")
        self.report.migration |= {"joules_per_page_before": fast, "joules_per_page_after": frugal}

    def _page_load(self, up: RunningStack, files: ocr.OcrFiles) -> MixedLoad:
        """Clients of all three models of the reader, each with its one request and its one right answer. They ask for
        parts of a page: for whole ones this machine would take longer than the emulated devices are to take."""
        page = Image.open(files.page).convert("RGB")
        strip = page.crop((0, LINE_TOP, page.width, LINE_BOTTOM))
        words = page.crop((0, LINE_TOP, WORDS_RIGHT, LINE_BOTTOM))
        inputs = {DETECT: ocr.detection_input(strip), TURN: ocr.slices(page)[:1], RECOGNISE: ocr.line_input(words)}
        with InferenceClient(up.client) as client:
            expected = {name: client.infer(name, {"x": value}).outputs for name, value in inputs.items()}
        return MixedLoad(
            [
                ClosedLoopLoad(up.client, name, {"x": value}, expected[name], clients=LOAD_CLIENTS[name])
                for name, value in inputs.items()
            ]
        )

    def _follow_move(self, api: RegionClient, workload: str, load: MixedLoad) -> operator_pb2.MigrationView:
        """The workload's move once it is over. Meanwhile: its stage, and who serves, told at each new stage."""
        looks, told = deque[ServingLook](), 0

        def over() -> operator_pb2.MigrationView | None:
            nonlocal told
            now = time.monotonic()  # noqa: TID251 - measures
            looks.append(look_of(_rows(api), WORKLOADS, now))
            while len(looks) > 2 and now - looks[1].at >= SHARES_OVER_S:
                looks.popleft()
            shares = shares_of(looks[0], looks[-1])
            self._narrator.serving(shares)
            moving = _newest_migration(api, workload)
            if moving is None:
                return None
            stage = moving.stages[-1]
            doing = f"{stage.stage.replace('_', ' ')} {stage.note}".strip()
            self._narrator.now(
                f"{workload}: {doing}; {load.rate(SHARES_OVER_S):.0f} requests/s, {load.lost_count} lost"
            )
            if len(moving.stages) > told:
                told = len(moving.stages)
                self._narrator.say(f"  {stage.at - moving.stages[0].at:5.1f}s  {doing:<16}  {_shares_text(shares)}")
            return moving if moving.stage in ("done", "aborted") else None

        return self._wait(over, MOVE_S, f"the move of {workload} to end", every_s=LOOK_S)

    def _show_migration(self, moved: operator_pb2.MigrationView, load: MixedLoad) -> None:
        """Show its stages and verification, and the outcome of the requests meanwhile."""
        self._narrator.migration(moved)
        sent, answered, verdict = len(load.calls), load.outcomes()["ok"], moved.verdict
        self._narrator.say(f"  requests while it moved: {load.summary()}")
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
            "answered": answered,
            "lost": load.lost_count,
            "wrong": load.wrong_count,
            "requests_per_s": round(load.mean_rate(), 1),
        }
        self._check("it was compared with the one that served", verdict.passed, f"{verdict.code} {verdict.reason}")
        self._check("the move is done", moved.stage == "done", f"{moved.stage}: {moved.reason.code}")
        self._check("no request was lost by the move", load.lost_count == 0, f"{dict(load.outcomes())}")
        self._check("every request was answered meanwhile", sent == answered, f"{dict(load.outcomes())}")
        self._check(
            "every answer stayed the same, bit for bit",
            load.wrong_count == 0,
            f"{load.wrong_count} of {answered} differ",
        )

    def _wait_meters_idle(self, api: RegionClient) -> None:
        """Wait until everything served is reported: the counts have not changed for a while."""
        last, since = -1, 0.0

        def are_meters_idle() -> bool:
            nonlocal last, since
            now, count = time.monotonic(), served_requests(api)  # noqa: TID251 - measures
            if count != last:
                last, since = count, now
            return now - since >= METERS_IDLE_S

        self._wait(are_meters_idle, 30.0, "the meters to report")

    def _kill(self, api: RegionClient, up: RunningStack, files: ocr.OcrFiles) -> None:
        self._narrator.chapter(CHAPTERS[3])
        plan = self._apply(api, "sturdy.yaml")
        rows = self._wait_placements(api, plan)
        killed_node = next(row.node for row in rows if row.assignment.workload.name == RECOGNISE)
        load = self._page_load(up, files)
        before = _ingress(api)
        load.start()
        try:
            self._wait(lambda: len(load.calls) >= LOAD_BEFORE_KILL, 60.0, "the load to run")
            pids = self._control.break_member(killed_node, "kill")
            killed_at = load.elapsed_s()
            served_before = _requests_by_node(api)
            self._narrator.say(f"  {killed_node}: all {len(pids)} processes killed (SIGKILL)")
            self._narrator.now("requests go to the other replicas; lost ones are placed elsewhere")
            self._wait(lambda: killed_node in self._dead_members(), 10.0, f"{killed_node} to be dead")
            self._check("the machine is dead", True, killed_node)
            rows = self._wait(
                lambda: self._replacement_rows(api, killed_node),
                SETTLE_S,
                f"what ran on {killed_node} to run elsewhere",
            )
            took = load.elapsed_s() - killed_at
            self._wait(lambda: len(load.calls) >= 2 * LOAD_BEFORE_KILL, 60.0, "more load to be answered")
        finally:
            load.stop()
        outcomes = load.outcomes()
        sent, answered = len(load.calls), outcomes["ok"]
        counted = self._wait(lambda: _ingress_since(api, before, sent), 15.0, "the gateway's counts")
        after = load.count_answered_since(killed_at)
        elsewhere = self._wait(
            lambda: _requests_elsewhere(served_before, _requests_by_node(api), killed_node, after),
            15.0,
            "the other nodes' meters to report",
        )
        self.report.load = {
            "sent": sent,
            "answered": answered,
            "retried_by_gateway": counted["retried"],
            "lost": load.lost_count,
            "wrong": load.wrong_count,
            "outcomes": dict(outcomes),
            "replaced_in_s": round(took, 2),
            "answered_after_the_kill": after,
            "served_by": elsewhere,
            "longest_s": round(max(call.took_s for call in load.calls), 3),
        }
        self._narrator.say(
            f"  requests: {load.summary()}, {counted['retried']} retried by the gateway; "
            f"replaced after {show_seconds(took)}"
        )
        self._check("no request was lost", load.lost_count == 0, f"{load.lost_count} of {sent} lost: {dict(outcomes)}")
        self._check("every request was answered", sent == answered, f"{answered} of {sent}: {dict(outcomes)}")
        self._check(
            "every answer is the same, bit for bit", load.wrong_count == 0, f"{load.wrong_count} of {answered} differ"
        )
        self._check("the work is served elsewhere", after > 0 and killed_node not in elsewhere, str(elsewhere))

    def _delegate(self, api: RegionClient, up: RunningStack, files: ocr.OcrFiles) -> None:
        self._narrator.chapter(CHAPTERS[4])
        plan = self._apply(api, "thrifty.yaml")
        (mine,) = (one for one in plan.workloads if one.workload.name == DELEGATED)
        self._check("home has no place for it", bool(mine.refusal.code), mine.refusal.found)
        line = _sample_line(files)
        with InferenceClient(up.client) as client:

            def answer() -> dict[str, ocr.Floats] | None:
                try:
                    return client.infer(DELEGATED, {"x": line}).outputs
                except ShoalError:
                    return None  # no answer yet

            found = self._wait(answer, SETTLE_S, "an answer from another region through home's gateway")
            answered_s = time.monotonic() - self._applied_at  # noqa: TID251 - measures
            expected = client.infer(RECOGNISE, {"x": line}).outputs
        log = [event for event in api.events() if event.workload.name == DELEGATED]
        for event in log:
            if event.code in NEGOTIATION_EVENTS:
                self._narrator.say(f"  {event.at - log[0].at:5.2f}s  {event.code:<9}  {event.message}")
        granted_s = next(event.at for event in log if event.code == "GRANTED") - log[0].at
        (agreed,) = (one for one in api.get("agreements").agreements if one.workload.name == DELEGATED)
        self.report.federation = {
            "workload": DELEGATED,
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
        self._narrator.say(
            f"  {agreed.counterpart} runs it: granted {show_seconds(granted_s)} after it was applied, answered through "
            f"home's own gateway after {show_seconds(answered_s)}, its model fetched meanwhile"
        )
        self._check("another region runs it", agreed.counterpart != up.stack.region, agreed.counterpart)
        same = found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
        self._check("it answers the same, bit for bit", same, "" if same else "the answers differ")

    def _change_vendor(self, api: RegionClient, up: RunningStack, files: ocr.OcrFiles) -> None:
        slices = ocr.slices(Image.open(files.page))
        with tempfile.TemporaryDirectory() as folder:
            samples = Path(folder) / "slices.npz"
            np.savez(samples, x=slices)
            api.push_samples(samples, "ppocr-cls")
        self._apply(api, "angles.yaml")
        self._wait(lambda: _is_serving(api, ANGLE), SETTLE_S, "the classifier to be ready")
        with InferenceClient(up.client) as client:
            expected = client.infer(ANGLE, {"x": slices[:1]}).outputs
        load = ClosedLoopLoad(up.client, ANGLE, {"x": slices[:1]}, expected, clients=1, at_most=NEAR_IN_INT8)
        load.start()
        try:
            moves = list[operator_pb2.MigrationView]()
            for name in ("vendors.yaml", "angles.yaml"):
                self._apply(api, name)
                moves.append(self._next_move(api, {one.id for one in moves}))
            answered = len(load.calls)
            self._wait(lambda: len(load.calls) >= answered + LOAD_BEFORE_MOVE, 60.0, "more load to be answered")
        finally:
            load.stop()
        for moved in moves:
            self._narrator.migration(moved)
        self._narrator.say(f"  requests while it moved: {load.summary()}")
        there = moves[0]
        worst = {f"{one.output or '(all)'} {one.metric}": one.worst for one in there.verdict.drifts}
        self.report.vendors = {
            "moves": [f"{one.source.node}/{one.source.device} -> {one.target.device} {one.stage}" for one in moves],
            "stand_in": there.target.stand_in,
            "precision": there.target.precision,
            "worst": worst,
            "sent": len(load.calls),
            "lost": load.lost_count,
            "wrong": load.wrong_count,
        }
        self._check("both moves are done", all(one.stage == "done" for one in moves), str(self.report.vendors["moves"]))
        self._check("the NPU ran it in int8", there.target.precision == "int8", there.target.precision)
        self._check("no request was lost between vendors", load.lost_count == 0, f"{dict(load.outcomes())}")
        self._check("no answer was further off than int8 is", load.wrong_count == 0, f"{load.wrong_count} differ")

    def _next_move(self, api: RegionClient, earlier: Collection[str]) -> operator_pb2.MigrationView:
        """The classifier's move after those, once it is over."""

        def over() -> operator_pb2.MigrationView | None:
            moved = _completed_migration(api, ANGLE)
            return moved if moved is not None and moved.id not in earlier else None

        return self._wait(over, MOVE_S, f"the move of {ANGLE} to end")

    def _restore_power(self, api: RegionClient) -> None:
        dead = self._dead_members()
        self._narrator.now(f"{', '.join(dead)} gets its power back")
        for name in dead:
            self._control.break_member(name, "resume")
        self._wait(
            lambda: not dead or {n.node.name for n in api.get("nodes").nodes if n.liveness == "ready"} >= set(dead),
            SETTLE_S,
            "the machine to be back",
        )
        self._check("the machine is back", bool(dead), ", ".join(dead))

    def _dead_members(self) -> list[str]:
        return [row["name"] for row in self._control.status() if row["state"] == "killed"]

    # what they share

    def _apply(self, api: RegionClient, name: str) -> operator_pb2.PlanReply:
        text = package_files("shoal.devstack").joinpath("demo_data", name).read_text()
        documents = [operator_pb2.Document(name=name, text=text)]
        self._narrator.now(f"plans {name}, and applies it")
        plan = api.plan(documents)
        self._narrator.plan(plan)
        for one in plan.workloads:
            for candidate in one.candidates:
                self.report.predictions.append(
                    {
                        "policy": name,
                        "workload": one.workload.name,
                        "device": f"{candidate.node}/{candidate.device}",
                        "stand_in": candidate.stand_in,
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

    def _wait_placements(self, api: RegionClient, plan: operator_pb2.PlanReply) -> Sequence[operator_pb2.PlacementView]:
        """Return the placements once they equal the plan: all serving, none starting or draining."""
        planned = {
            (one.workload.name, candidate.node, candidate.device)
            for one in plan.workloads
            for candidate in one.candidates
            if candidate.chosen
        }

        def placements_as_planned() -> Sequence[operator_pb2.PlacementView] | None:
            rows = _rows(api)
            placed = {(row.assignment.workload.name, row.node, row.assignment.device) for row in rows}
            return (
                rows if placed == planned and all(row.routed and not row.assignment.draining for row in rows) else None
            )

        self._narrator.now("nodes fetch the models, load them and warm up")
        return self._wait(placements_as_planned, SETTLE_S, "the workloads to be ready")

    def _replacement_rows(self, api: RegionClient, killed_node: str) -> Sequence[operator_pb2.PlacementView] | None:
        rows = [row for row in _rows(api) if row.routed and row.node != killed_node]
        count = {name: sum(row.assignment.workload.name == name for row in rows) for name in WORKLOADS}
        return rows if all(number >= 2 for number in count.values()) else None

    def _joules(self, api: RegionClient) -> tuple[float, int]:
        """(joules, requests) served since the replicas became ready."""
        served = [one for row in _rows(api) for one in row.observed.served]
        return sum(one.joules for one in served), sum(one.requests for one in served)

    def _wait(self, condition: Callable[[], T | None], limit_s: float, what: str, every_s: float = 0.1) -> T:
        end = time.monotonic() + limit_s  # noqa: TID251 - the demo's own deadlines
        while not (found := condition()):
            if time.monotonic() > end:  # noqa: TID251
                raise refuse(Code.DEADLINE_EXCEEDED, f"not within {limit_s:g}s", what, "shoal events; shoal dev status")
            time.sleep(every_s)  # noqa: TID251
        return found

    def _check(self, name: str, ok: bool, found: str) -> None:
        self.report.checks.append(DemoCheck(name, ok, found))
        self._narrator.check(name, ok, found)

    def _time_step(self, name: str, step: Callable[[], Any]) -> Any:
        began = time.monotonic()  # noqa: TID251 - measures
        try:
            return step()
        finally:
            self.report.seconds[name] = round(time.monotonic() - began, 1)  # noqa: TID251


def _sample_line(files: ocr.OcrFiles) -> ocr.Floats:
    """One line of the page, as input of the recogniser."""
    return ocr.line_input(Image.open(files.page).convert("RGB").crop((0, LINE_TOP, 384, LINE_BOTTOM)))


def _shares_text(shares: Sequence[ServingShare]) -> str:
    """Who serves, in a line."""
    return ", ".join(
        f"{each.place.partition('/')[0]} {each.share:.0%} {each.rate:.0f}/s"
        + (f" {show_joules(each.joules)}" if math.isfinite(each.joules) else "")
        for each in shares
        if each.rate
    )


def _newest_migration(api: RegionClient, workload: str) -> operator_pb2.MigrationView | None:
    found = (one for one in api.get("migrations").migrations if one.workload.name == workload)
    return max(found, key=lambda one: one.stages[0].at, default=None)


def _completed_migration(api: RegionClient, workload: str) -> operator_pb2.MigrationView | None:
    """The workload's newest migration once it is over; None before."""
    newest = _newest_migration(api, workload)
    return newest if newest is not None and newest.stage in ("done", "aborted") else None


def _is_serving(api: RegionClient, workload: str) -> bool:
    return any(row.routed for row in _rows(api) if row.assignment.workload.name == workload)


def served_requests(api: RegionClient) -> int:
    return sum(one.requests for row in _rows(api) for one in row.observed.served)


def _rows(api: RegionClient) -> list[operator_pb2.PlacementView]:
    return list(api.get("placements").placements)


def _devices_by_workload(rows: Sequence[operator_pb2.PlacementView]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.assignment.workload.name, []).append(f"{row.node}/{row.assignment.device}")
    return {name: sorted(devices) for name, devices in sorted(found.items())}


def _ingress(api: RegionClient) -> dict[str, int]:
    views = [view for view in api.get("workloads").workloads if view.workload.name in WORKLOADS]
    names = ("requests", "answered", "retried", "refused", "lost")
    return {name: sum(getattr(one, name) for view in views for one in view.ingress) for name in names}


def _requests_by_node(api: RegionClient) -> Counter[str]:
    """Requests served by each node's present replicas."""
    served: Counter[str] = Counter()
    for row in _rows(api):
        if row.assignment.workload.name in WORKLOADS:
            served[row.node] += sum(one.requests for one in row.observed.served)
    return served


def _requests_elsewhere(before: Counter[str], now: Counter[str], killed_node: str, least: int) -> dict[str, int] | None:
    """Requests that the nodes other than `killed_node` served since `before`, once they are at least `least`; None
    before."""
    grown = {node: count - before[node] for node, count in now.items() if node != killed_node and count > before[node]}
    return grown if sum(grown.values()) >= least else None


def _ingress_since(api: RegionClient, before: dict[str, int], sent: int) -> dict[str, int] | None:
    now = _ingress(api)
    found = {name: now[name] - before[name] for name in now}
    return found if found["requests"] >= sent else None
